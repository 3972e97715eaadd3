"""Brokers that refuse, fall silent, freeze or die under a task: nothing is lost, and queues keep their order."""

from __future__ import annotations

import itertools
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest

from rocketmq_spark import session
from rocketmq_spark.base import process
from rocketmq_spark.base.clock import Deadline
from rocketmq_spark.base.codes import Request, Response
from rocketmq_spark.base.threads import Timer
from rocketmq_spark.errors import MessageRefused, RocketMQError, SendFailed
from rocketmq_spark.localbroker import LocalBroker
from rocketmq_spark.model import MessageQueue, SendRequest, SendResult
from rocketmq_spark.producer.outgoing import Outcome
from rocketmq_spark.spark.sink import task
from rocketmq_spark.wire.messages import decode_batch
from tests.helpers import freeze, indexed, killed, stored, total
from tests.live.producer.recording import RecordingSender
from tests.live.writes import Writes, bodies, frame, numbered, sink_options, writes
from tests.mockbroker import Call, Command, MockBroker, close, eventually, never, ok, refuse, route
from tests.scale import scaled

__all__ = ["writes"]

FAULTS_S = scaled(30, minimum=2)
ENOUGH = 6  # faults at least, one of each kind, also on a slow machine


class Unwilling(MockBroker):
    """Its own name server. For a moment from the first batch on it takes none: it answers flow control of three kinds, or
    nothing at all.
    """

    def __init__(self) -> None:
        super().__init__()
        self.until: float | None = None
        self.faults = ENOUGH  # none is owed where a test sets the time
        self.kept: dict[int, list[bytes]] = {}
        self.batches: dict[int, list[tuple[bytes, ...]]] = {}
        self._faults = itertools.cycle(
            [
                refuse(Response.SYSTEM_BUSY, "[REJECTREQUEST]system busy, start flow control for a while"),
                refuse(Response.FLOW_CONTROL, "flow control"),
                never,
                refuse(Response.SYSTEM_BUSY, "[TIMEOUT_CLEAN_QUEUE]broker busy, start flow control for a while"),
                self._keep_silently,
                refuse(Response.SYSTEM_ERROR, "broker unable to service, until 2099"),
            ]
        )
        self.on(Request.SEND_BATCH_MESSAGE, self._send)

    def __enter__(self) -> Unwilling:
        super().__enter__()
        self.on(Request.GET_ROUTEINFO_BY_TOPIC, route(4, {"broker-a": self.address}))
        return self

    def _send(self, call: Call) -> Command | None:
        if self.until is None:
            self.until, self.faults = time.monotonic() + FAULTS_S, 0
        if time.monotonic() < self.until or self.faults < ENOUGH:
            self.faults += 1
            fault = next(self._faults)
            return fault(call) if callable(fault) else fault
        return self._keep(call)

    def _keep_silently(self, call: Call) -> None:
        self._keep(call)

    def _keep(self, call: Call) -> Command:
        queue = self.kept.setdefault(int(call.ext("e")), [])
        at = len(queue)
        batch = tuple(bytes(item.body) for item in decode_batch(call.command.body))
        self.batches.setdefault(int(call.ext("e")), []).append(batch)
        queue += batch
        return ok(msgId="x", queueId=call.ext("e"), queueOffset=at)


@pytest.fixture
def unwilling() -> Iterator[Unwilling]:
    with Unwilling() as broker:
        yield broker


def test_flow_control_and_silent_brokers_lose_or_reorder_no_rows(
    unwilling: Unwilling, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = 2000
    batches = [
        frame(body=numbered(100, at), shardingKey=[f"k{i % 9}" for i in range(at, at + 100)])
        for at in range(0, rows, 100)
    ]
    done = Writes(unwilling.address, monkeypatch)(
        *batches, topic="t", queueSelector="hash", batchMaxBytes=1_500, sendTimeout=f"{2 * FAULTS_S + 10}s"
    )
    assert (done.rows, done.retries > 4, done.brokers["broker-a"].failures > 4) == (rows, True, True)
    kept = [body for queue in unwilling.kept.values() for body in queue]
    assert sorted(set(kept)) == [body.encode() for body in numbered(rows)]
    assert len(kept) > rows, "what was stored without an answer is there twice"
    assert all(map(in_runs, unwilling.batches.values()))


def in_runs(batches: list[tuple[bytes, ...]]) -> bool:
    """Whether the rows of a queue are there in order, and what is there again follows at once, as a whole batch."""
    rows = [row for batch, _ in itertools.groupby(batches) for row in batch]
    return rows == sorted(set(rows))


A, B, C = (b"1", b"2"), (b"3",), (b"4", b"5")


@pytest.mark.parametrize("batches", [[], [A], [A, B, C], [A, A, B, C, C, C]])
def test_a_batch_may_be_there_again_at_once(batches: list[tuple[bytes, ...]]) -> None:
    assert in_runs(batches)


@pytest.mark.parametrize("batches", [[B, A], [A, B, A], [A, A, B, A, B], [A, B, C, B], [(b"1", b"2"), (b"2", b"3")]])
def test_nothing_overtakes_and_nothing_comes_back_later(batches: list[tuple[bytes, ...]]) -> None:
    assert not in_runs(batches)


def test_when_the_time_is_over_the_task_fails_with_the_cause(
    unwilling: Unwilling, monkeypatch: pytest.MonkeyPatch
) -> None:
    unwilling.on(Request.SEND_BATCH_MESSAGE, refuse(Response.SYSTEM_BUSY, "busy"))
    writes = Writes(unwilling.address, monkeypatch)
    with pytest.raises(SendFailed, match=r"the send timeout expired after \d+ attempts; brokers tried: broker-a"):
        writes(frame(body=["x"]), topic="t", sendTimeout="1s")
    assert len(writes.requests) > 2


def test_time_in_an_ordered_queue_does_not_count(unwilling: Unwilling, monkeypatch: pytest.MonkeyPatch) -> None:
    """Twenty batches of one queue, one and a half seconds each by a clock that the broker moves, and twenty seconds for each."""
    took_s = 0.0

    def slowly(call: Call) -> Command | None:
        nonlocal took_s
        took_s += 1.5
        return unwilling._keep(call)

    clock = SimpleNamespace(monotonic=lambda: time.monotonic() + took_s, sleep=time.sleep, time_ns=time.time_ns)
    monkeypatch.setattr("rocketmq_spark.base.clock.time", clock)
    unwilling.on(Request.SEND_BATCH_MESSAGE, slowly)
    rows = frame(body=numbered(200), shardingKey=["one"] * 200)
    done = Writes(unwilling.address, monkeypatch)(
        rows, topic="t", queueSelector="hash", batchMaxBytes=1_000, sendTimeout="20s"
    )
    assert took_s == done.batches * 1.5 > 23
    assert done.rows == 200


def test_rows_waiting_for_their_queue_hold_only_their_own_bytes(
    unwilling: Unwilling, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One queue does not answer, and has one row in each Arrow batch of a mebibyte."""
    unwilling.until, batches = 0.0, 60
    held: list[Call] = []
    answering = threading.Event()

    def slow(call: Call) -> Command | None:
        if answering.is_set() or call.ext("e") != "0":
            return unwilling._keep(call)
        held.append(call)
        return None

    def rows() -> Iterator[pa.RecordBatch]:
        for number in range(batches):
            yield frame(body=["x" * 1000] * 1000 + [f"{number}"], queueId=[1] * 1000 + [0])
            assert write.sender is not None
            write.sender.sends.clear()  # which keeps what it was handed
            taken.append(pa.total_allocated_bytes() - before)
        answering.set()
        for call in held:
            call.answer(unwilling._keep(call))

    unwilling.on(Request.SEND_BATCH_MESSAGE, slow)
    before, taken = pa.total_allocated_bytes(), list[int]()
    write, schema = Writes(unwilling.address, monkeypatch), frame(body=["x"], queueId=[0]).schema
    done = write.stream(rows(), schema, topic="t", totalBatchMaxBytes="4m")
    assert (done.rows, len(held) > 0) == (batches * 1001, True)
    assert {int(row) for row in unwilling.kept[0]} == set(range(batches))
    assert max(taken) < batches // 3 << 20


def test_require_store_ok_asks_again_and_does_not_take_less(
    unwilling: Unwilling, monkeypatch: pytest.MonkeyPatch
) -> None:
    late = Command(Response.FLUSH_SLAVE_TIMEOUT, {"msgId": "x", "queueId": "0", "queueOffset": "0"})
    writes = Writes(unwilling.address, monkeypatch)
    unwilling.on(Request.SEND_BATCH_MESSAGE, late)
    assert writes(frame(body=["x"]), topic="t").retries == 0
    unwilling.until = 0.0
    unwilling.on(Request.SEND_BATCH_MESSAGE, [late, late, unwilling._keep])
    assert writes(frame(body=["x"]), topic="t", requireStoreOk="ok").retries == 2
    unwilling.on(Request.SEND_BATCH_MESSAGE, late)
    with pytest.raises(SendFailed, match="stored with FLUSH_SLAVE_TIMEOUT in all"):
        writes(frame(body=["x"]), topic="t", requireStoreOk="ok", sendTimeout="1s")


def test_a_broker_that_refuses_sends_is_waited_for(lone: LocalBroker, monkeypatch: pytest.MonkeyPatch) -> None:
    """broker-lab.md 8, row 3b, on a live broker."""
    (name,), topic = lone.brokers, f"t-{time.time_ns()}"
    lone.create_topic(topic)
    setting = "startAcceptSendRequestTimeStamp"
    writes = Writes(lone.name_server, monkeypatch)
    writes.kind = Noting

    def take_them() -> None:
        eventually(lambda: isinstance(writes.sender, Noting) and len(writes.sender.times(name, False)) > 2)
        lone.admin.update_broker_config(name, {setting: "0"})

    lone.admin.update_broker_config(name, {setting: "9999999999999"})
    back = threading.Thread(target=take_them)
    back.start()
    try:
        done = writes(frame(body=numbered(50)), topic=topic, sendTimeout="60s")
    finally:
        back.join()
        lone.admin.update_broker_config(name, {setting: "0"})
    assert (done.rows, done.retries > 2) == (50, True)
    assert bodies(stored(lone, topic, 50)) == numbered(50)


@pytest.fixture
def pair_topic(pair: LocalBroker) -> str:
    name = f"t-{time.time_ns()}"
    pair.create_topic(name, queues=2)
    return name


@pytest.fixture
def two(pair: LocalBroker, monkeypatch: pytest.MonkeyPatch) -> Writes:
    process.entries("fault tables").clear()
    monkeypatch.setattr(task, "ROUTE_REFRESH_S", 0.5)
    return Writes(pair.name_server, monkeypatch)


def flowing(strike: Callable[[], Any], over: Callable[[], bool]) -> Iterator[pa.RecordBatch]:
    """A few rows every 20 ms until it is ``over``, and ``strike`` once after 25 of them."""
    pause, limit = threading.Event(), Deadline.after(400.0)
    for number in itertools.count():
        yield frame(body=numbered(5, number * 5))
        if number == 25:
            strike()
        if number > 25 and over():
            return
        assert not limit.expired, "it is never over"
        pause.wait(0.02)


class Noting(RecordingSender):
    """Keeps when a broker failed and when it acknowledged."""

    def __init__(self, client: session.Client) -> None:
        super().__init__(client)
        self.outcomes: list[tuple[float, str, bool]] = []

    def send_async(
        self, queue: MessageQueue, request: SendRequest, deadline: Deadline, done: Callable[[Outcome], None]
    ) -> None:
        def noted(outcome: Outcome) -> None:
            done(outcome)
            self.outcomes.append((time.monotonic(), queue.broker_name, isinstance(outcome, SendResult)))

        super().send_async(queue, request, deadline, noted)

    def times(self, broker: str, good: bool) -> list[float]:
        return [at for at, name, was in self.outcomes if (name, was) == (broker, good)]


def test_killed_broker_fails_and_is_used_again_when_it_returns(pair: LocalBroker, pair_topic: str, two: Writes) -> None:
    two.kind = Noting

    returned = threading.Event()

    def kill() -> None:
        def again() -> None:
            pair.restart("broker-a")
            returned.set()

        returned.clear()
        killed(pair, "broker-a")
        threading.Timer(2.0, again).start()

    def used_again() -> bool:
        assert isinstance(two.sender, Noting)
        failed, good = two.sender.times("broker-a", False), two.sender.times("broker-a", True)
        if not failed and returned.is_set():  # a slow machine read the route without it before it sent it anything
            kill()
        return bool(failed and good) and max(good) > max(failed)

    given = {"latencyMax": "3s", "notAvailableDuration": "4s"}
    done = two.stream(flowing(kill, used_again), frame(body=["x"]).schema, topic=pair_topic, **given)
    assert used_again()
    assert done.brokers["broker-a"].failures >= 1
    found = bodies(stored(pair, pair_topic, done.rows))
    assert set(found) == set(numbered(done.rows))


SLOW, BREAKS = "takes 50 ms", "breaks the connection"


@pytest.mark.parametrize(
    ("fault", "latencies", "durations", "on", "spared"),
    [
        (SLOW, "1ms,40ms", "0,60s", "true", True),
        (SLOW, "1ms,40ms", "0,0", "true", False),
        (SLOW, "1ms,60s", "0,60s", "true", False),
        (SLOW, "1ms,40ms", "0,60s", "false", False),
        (BREAKS, "10s", "60s", "true", True),  # counts as 10 s
        (BREAKS, "11s", "60s", "true", False),
    ],
)
def test_faulty_broker_is_avoided_for_the_configured_duration(
    monkeypatch: pytest.MonkeyPatch, fault: str, latencies: str, durations: str, on: str, spared: bool
) -> None:
    """One of two, by a clock that stands still but for what it takes, and moves on by nearly a minute, and by the rest."""
    process.entries("fault tables").clear()
    now_ms = [1_000_000]
    monkeypatch.setattr(Timer, "now_ms", lambda timer: now_ms[0])
    stored = ok(msgId="x", queueId="0", queueOffset="0")

    def slowly(call: Call) -> Command:
        now_ms[0] += 50
        return stored

    def brokers() -> list[str]:
        """Of what was sent, once all of it is answered."""
        sender = writes.sender
        assert isinstance(sender, Noting)
        eventually(lambda: len(sender.outcomes) == len(sender.sends))
        return sender.brokers()

    def rows() -> Iterator[pa.RecordBatch]:
        for number in range(20):
            if number == 5:
                brokers()
                now_ms[0] += 59_900
            if number == 10:
                first[:] = brokers()
                now_ms[0] += 100
            yield frame(body=numbered(1, number))

    first: list[str] = []
    with Unwilling() as well, MockBroker() as other:
        well.until = 0.0
        well.on(Request.GET_ROUTEINFO_BY_TOPIC, route(1, {"broker-a": well.address, "broker-b": other.address}))
        other.on(Request.SEND_BATCH_MESSAGE, slowly if fault is SLOW else [close, stored])
        writes = Writes(well.address, monkeypatch)
        writes.kind = Noting
        given = {"latencyMax": latencies, "notAvailableDuration": durations, "sendLatencyFault": on}
        writes.stream(rows(), frame(body=["x"]).schema, topic="t", totalBatchMaxBytes=1, **given)
        assert (first.count("broker-b") == 1) is spared, first
        assert brokers()[len(first) :].count("broker-b") > 0, "it is used again"


@pytest.mark.parametrize(("fault", "spared"), [("true", True), ("false", False)])
def test_send_latency_fault_spares_a_frozen_broker(
    pair: LocalBroker, pair_topic: str, two: Writes, fault: str, spared: bool
) -> None:
    """For as long as the other takes 150 batches after the first that failed, or until more failed than of one that is spared."""
    pid = pair.pid("broker-a")
    assert pid is not None
    two.kind = Noting

    def thawed() -> bool:
        assert isinstance(two.sender, Noting)
        failed = two.sender.times("broker-a", False)
        later = [at for at in two.sender.times("broker-b", True) if failed and at > failed[0]]
        over = len(failed) > 8 or (spared and len(later) >= 150)
        if over:
            os.kill(pid, signal.SIGCONT)
        return over

    # An attempt has a sixth of the send timeout: more than the other broker takes on a slow machine, else both are avoided.
    timeout = "18s" if spared else "6s"
    given = {"latencyMax": "3s", "notAvailableDuration": "10m", "sendTimeout": timeout, "maxInFlight": 2}
    try:
        done = two.stream(
            flowing(lambda: freeze(pid), thawed),
            frame(body=["x"]).schema,
            topic=pair_topic,
            sendLatencyFault=fault,
            **given,
        )
    finally:
        os.kill(pid, signal.SIGCONT)
    failures = done.brokers["broker-a"].failures
    assert failures >= 1, "nobody felt that it was frozen"
    assert (failures <= 8) == spared, failures
    indexed(pair)  # with what was sent twice there are more than the rows
    assert set(bodies(stored(pair, pair_topic, done.rows))) == set(numbered(done.rows))


def test_batches_leave_dead_broker_and_rows_for_its_queue_fail(pair: LocalBroker, pair_topic: str, two: Writes) -> None:
    two(frame(body=["x"]), topic=pair_topic)
    killed(pair, "broker-a")
    try:
        done = two(frame(body=numbered(200)), topic=pair_topic, batchMaxBytes=400)
        assert (done.rows, done.brokers["broker-b"].rows) == (200, 200)
        eventually(lambda: "broker-a" not in pair.admin.routes.cluster(), 60)
        session.close_all()
        rows = frame(body=["x"], queueId=[0], brokerName=["broker-a"])
        with pytest.raises(MessageRefused, match="has no queue 0 on broker 'broker-a' that accepts messages"):
            two(rows, topic=pair_topic, sendTimeout="3s")
        assert two.requests == []
    finally:
        pair.restart("broker-a")


def test_broker_that_stays_away_fails_the_task_with_a_true_count(
    pair: LocalBroker, pair_topic: str, two: Writes
) -> None:
    dead_since: list[float] = []

    def kill() -> None:
        total(pair, pair_topic, 25 * 5 - 25)
        killed(pair, "broker-a")
        dead_since.append(time.monotonic())

    def pinned() -> Iterator[pa.RecordBatch]:
        for rows in flowing(kill, lambda: False):
            yield frame(body=rows["body"], queueId=[0] * len(rows), brokerName=["broker-a"] * len(rows))

    schema = frame(body=["x"], queueId=[0], brokerName=["broker-a"]).schema
    try:
        with pytest.raises(SendFailed, match="broker-a") as caught:
            two.stream(pinned(), schema, topic=pair_topic, sendTimeout="4s")
        assert time.monotonic() - dead_since[0] < 60  # of the two minutes that are the default
    finally:
        pair.restart("broker-a")
    counted = int(str(caught.value).partition("Acknowledged before that: ")[2].partition(" rows")[0])
    assert counted >= 25 * 5 - 50, "what was sent before its death was acknowledged then"
    found = bodies(stored(pair, pair_topic, counted))
    # A slow broker was sent some again; the first of each are in order.
    assert list(dict.fromkeys(found))[:counted] == numbered(counted)


def test_options_of_the_sink_reach_the_fault_table() -> None:
    process.entries("fault tables").clear()
    first = task._fault_table(sink_options("x:1", sendLatencyFault="4.x"))
    assert first is task._fault_table(sink_options("x:1", sendLatencyFault="4.x"))
    assert first is not task._fault_table(sink_options("x:1"))
    assert first is not task._fault_table(sink_options("y:1", sendLatencyFault="4.x")), (
        "brokers of others may have equal names"
    )
    assert first.tables.failure_latency_ms == 30_000


def test_batch_behind_one_that_was_given_up_is_not_stored(
    unwilling: Unwilling, monkeypatch: pytest.MonkeyPatch
) -> None:
    unwilling.until = 0.0
    first = threading.Event()

    def refuse_first(call: Call) -> Command | None:
        if first.is_set():
            return unwilling._keep(call)
        first.set()
        return refuse(Response.MESSAGE_ILLEGAL, "not this one")

    unwilling.on(Request.SEND_BATCH_MESSAGE, refuse_first)
    rows = frame(body=numbered(100), shardingKey=["one"] * 100)
    with pytest.raises(RocketMQError, match="not this one"):
        Writes(unwilling.address, monkeypatch)(rows, topic="t", queueSelector="hash", batchMaxBytes=500)
    assert unwilling.kept == {}


class Forgetting(RecordingSender):
    def send_async(
        self, queue: MessageQueue, request: SendRequest, deadline: Deadline, done: Callable[[Outcome], None]
    ) -> None:
        self._note(queue, request)


def test_batch_that_nobody_answers_for_is_a_bug_that_is_reported(
    unwilling: Unwilling, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(task, "LOST_SEND_S", 0.1)
    writes = Writes(unwilling.address, monkeypatch)
    writes.kind = Forgetting
    with pytest.raises(
        SendFailed, match=r"1 batches of \d+ bytes have had no outcome for 2.1 s.*bug of rocketmq-spark"
    ):
        writes(frame(body=["x"]), topic="t", sendTimeout="2s")
