"""The engine: fault tolerance as it applies it, order, bounds; blocking sends are tested through ``test_producer``."""

from __future__ import annotations

import logging
import sys
import threading
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from rocketmq_spark.base.clock import Deadline
from rocketmq_spark.base.codes import Response
from rocketmq_spark.errors import BrokerNotFound, ClosedError, ConnectionLost, MessageIllegal, SendFailed
from rocketmq_spark.model import Message, SendRequest, SendResult
from rocketmq_spark.producer.engine import Engine
from rocketmq_spark.producer.fault_tolerance import RELEASE_4, FaultTable, fault_tables
from rocketmq_spark.producer.outgoing import OutgoingSend, SendCompletion
from rocketmq_spark.producer.producer import BaseProducer
from rocketmq_spark.producer.retry import RetryState
from rocketmq_spark.producer.send_queue import INITIAL_REQUESTS_PER_BROKER
from rocketmq_spark.producer.settings import ProducerSettings
from tests.fakes.sender import refused
from tests.fakes.timer import ManualTimer
from tests.mockbroker import eventually
from tests.producer.bench import Bench
from tests.queues import q, qs

M = Message("T", b"x")


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_slow_broker_is_avoided_for_its_time(bench: Bench, mode: str) -> None:
    producer = bench.producer(send_latency_fault=True)
    send: Any = producer.send if mode == "sync" else producer.send_async
    bench.sender.latency_s["a"] = 0.6
    while bench.sender.brokers.count("a") == 0:
        send(M)
    bench.sender.latency_s.clear()
    bench.sender.calls.clear()
    for _ in range(20):
        send(M)
        bench.time.advance(0.099)
    assert "a" not in bench.sender.brokers
    bench.time.advance(0.1)
    for _ in range(4):
        send(M)
    assert "a" in bench.sender.brokers


@pytest.mark.parametrize(("preset", "isolation"), [("current", 10.0), ("4.x", 600.0)])
def test_failed_broker_gets_no_send_until_isolation_ends(bench: Bench, preset: str, isolation: float) -> None:
    producer = bench.producer(send_latency_fault=True, fault_tables=fault_tables(preset))
    bench.sender.by_broker["a"] = lambda: ConnectionLost("down")
    while "a" not in bench.sender.brokers:
        producer.send(M)
    failed_at = bench.time.now
    bench.sender.calls.clear()
    while bench.time.now < failed_at + isolation - 1:
        producer.send(M)
        bench.time.advance(isolation / 50)
    assert "a" not in bench.sender.brokers
    bench.time.advance(isolation / 25 + 1)
    for _ in range(4):
        producer.send(M)
    assert "a b" in bench.sender.brokers


def test_error_answers_isolate_and_a_missing_address_does_not(bench: Bench) -> None:
    producer = bench.producer(send_latency_fault=True)
    bench.sender.by_broker["a"] = lambda: refused(Response.SYSTEM_BUSY)
    bench.sender.by_broker["b"] = lambda: BrokerNotFound("no address")
    with pytest.raises(SendFailed):
        producer.send(M)
    now = bench.timers["send"].now_ms()
    assert not producer.faults.available("a", now)
    assert producer.faults.available("b", now)


def test_failing_fault_table_never_fails_a_send(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    producer = bench.producer(send_latency_fault=True)

    def broken(broker: str, now_ms: int) -> bool:
        raise KeyError(broker)

    monkeypatch.setattr(producer.faults, "available", broken)
    with caplog.at_level(logging.ERROR):
        for _ in range(40):
            producer.send(M)
    assert len(bench.sender.calls) == 40
    assert "choosing the queue by round robin instead" in caplog.text


def test_fault_mode_is_switched_while_sending(bench: Bench) -> None:
    producer = bench.producer()
    bench.sender.by_broker["a"] = lambda: ConnectionLost("down")
    producer.faults.enabled = True
    for _ in range(8):
        producer.send(M)
    assert bench.sender.brokers.count("a") <= 1
    producer.faults.enabled = False
    for _ in range(8):
        producer.send(M)
    assert bench.sender.brokers.count("a") >= 4
    producer.faults.tables = RELEASE_4
    producer.faults.enabled = True
    bench.time.advance(11)
    for _ in range(8):
        producer.send(M)
    assert producer.faults.faults["a"].available_at_ms > bench.timers["send"].now_ms() + 500_000


def test_and_0_27_sixteen_threads_report_and_pick_without_loss(bench: Bench) -> None:
    producer = bench.producer(send_latency_fault=True)
    start, errors = threading.Barrier(16), []

    def work(producer: BaseProducer) -> None:
        try:
            start.wait(60)
            for i in range(50):
                producer.send(M)
                if i % 10 == 0:
                    producer.faults.enabled = not producer.faults.enabled
        except Exception as e:  # noqa: BLE001 - shown by the assertion
            errors.append(e)

    threads = [threading.Thread(target=work, args=(producer,)) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert errors == []
    assert len(bench.sender.calls) == 800
    assert set(producer.faults.faults) <= {"a", "b"}


def test_engines_sharing_fault_table_do_not_disturb_each_other(bench: Bench) -> None:
    """A table of two engines is walked by detectors and by routes while sends of both report to it."""
    table, errors = FaultTable(enabled=True, detecting=True), []
    brokers = {f"b{i}" for i in range(40)}
    bench.sender.routes["T"] = tuple(qs(" ".join(f"{name}:0" for name in sorted(brokers))))
    engines = [engine_of(bench, table) for _ in range(2)]
    start, stop = threading.Barrier(4), threading.Event()
    interval = sys.getswitchinterval()

    def until_stopped(call: Callable[[], Any]) -> None:
        try:
            start.wait(60)
            while not stop.is_set():
                call()
        except Exception as e:  # noqa: BLE001 - shown by the assertion
            errors.append(e)

    calls: list[Callable[[], Any]] = [lambda engine=engine: engine.send(outgoing()) for engine in engines]  # type: ignore[misc]
    calls += [lambda: table.brokers_to_probe(0, 0), lambda: table.retain(set())]
    threads = [threading.Thread(target=until_stopped, args=(call,)) for call in calls]
    sys.setswitchinterval(1e-6)
    try:
        for thread in threads:
            thread.start()
        stop.wait(0.5)
        eventually(lambda: bool(errors) or len(bench.sender.calls) > 100)
    finally:
        stop.set()
        for thread in threads:
            thread.join(60)
        sys.setswitchinterval(interval)
    assert errors == []
    assert len(bench.sender.calls) > 100


def test_route_change_starts_a_new_index(bench: Bench) -> None:
    producer = bench.producer()
    producer.send(M)
    bench.sender.routes["T"] = tuple(qs("c:0-3"))
    bench.sender.script = [refused(Response.TOPIC_NOT_EXIST)]
    producer.send(M)
    counts = Counter(producer.send(M).queue for _ in range(40))
    assert counts == dict.fromkeys(qs("c:0-3"), 10)


def engine_of(bench: Bench, faults: FaultTable | None = None, **settings: Any) -> Engine:
    given = ProducerSettings(group="g", **{"retries": None, "pinned_retries": None, **settings})
    return Engine(bench.sender, given, ManualTimer(bench.time), faults)


class Told(list[SendCompletion]):
    """How requests ended, in that order; it is what their ``done`` calls."""

    __call__ = list.append

    @property
    def outcomes(self) -> list[Any]:
        return [ended.outcome for ended in self]


def outgoing(body: bytes = b"x", timeout: Deadline | float = 10.0, **how: Any) -> OutgoingSend:
    return OutgoingSend("T", SendRequest("g", body), timeout, **how)


def ordered(told: Told, name: str = "a:0", body: bytes = b"x") -> OutgoingSend:
    return outgoing(body, queue=q(name), ordered=True, done=told)


def test_queues_are_chosen_randomly_with_pause_between_attempts(bench: Bench) -> None:
    engine = engine_of(bench)
    only_a = lambda queues: [q for q in queues if q.broker_name == "a"]  # noqa: E731
    for _ in range(60):
        engine.send(outgoing(filter_queues=only_a))
    assert {queue.broker_name for _, queue, _ in bench.sender.calls} == {"a"}
    assert {queue.queue_id for _, queue, _ in bench.sender.calls} == {0, 1}
    bench.sender.script = [refused(Response.SYSTEM_BUSY)] * 3
    begin = bench.time.now
    engine.send(outgoing(filter_queues=only_a))
    assert bench.time.now > begin, "other brokers of the topic are no reason not to wait"


def test_time_behind_others_of_a_queue_does_not_count(bench: Bench) -> None:
    engine, told = engine_of(bench), Told()
    bench.sender.script = [None, None]
    for _ in range(2):
        engine.submit(ordered(told))
    bench.time.advance(9.0)
    bench.sender.answer()
    bench.time.advance(0.5)
    assert bench.sender.deadlines[-1] > 9.0
    bench.time.advance(5.0)
    bench.sender.answer()
    assert [type(outcome) for outcome in told.outcomes] == [SendResult] * 2


def test_time_behind_others_counts_when_a_deadline_was_set(bench: Bench) -> None:
    engine, told = engine_of(bench), Told()
    bench.sender.script = [None]
    for _ in range(2):
        engine.submit(outgoing(timeout=Deadline.after(10.0), queue=q("a:0"), ordered=True, done=told))
    bench.time.advance(10.5)
    bench.sender.answer()
    bench.time.advance(0.0)
    assert [type(outcome) for outcome in told.outcomes] == [SendResult, SendFailed]
    assert "the send timeout expired before the first attempt; " in told.outcomes[1].message
    assert len(bench.sender.calls) == 1


def test_ordered_sends_go_in_turn_and_retry_stays_first(bench: Bench) -> None:
    engine, seen = engine_of(bench), []

    def bodies(requests: list[SendRequest]) -> str:
        return " ".join(bytes(request.body).decode() for request in requests)

    def waiting() -> str:
        return bodies([request for _, request, _ in bench.sender.waiting])

    bench.sender.script = [None, None]
    for name, queue in (("a1", "a:0"), ("a2", "a:0"), ("a3", "a:0"), ("b1", "b:0")):
        request = SendRequest("g", name.encode())
        engine.submit(OutgoingSend("T", request, 60.0, q(queue), ordered=True, done=lambda e: seen.append(e)))
    assert waiting() == "a1 b1"
    bench.sender.script = [None]
    bench.sender.answer(0, refused(Response.SYSTEM_BUSY))
    bench.time.run_due()
    assert waiting() == "b1"  # the queue is muted
    bench.time.advance(0.02)
    assert waiting() == "b1 a1"
    bench.sender.script = [refused(Response.SYSTEM_BUSY)]
    bench.sender.answer(1)
    bench.time.advance(0.1)
    bench.sender.answer(0)
    assert bodies([ended.outgoing.request for ended in seen]) == "a1 a2 a3 b1"
    assert [ended.attempts for ended in seen] == [2, 2, 1, 1]
    assert bodies(bench.sender.requests) == "a1 b1 a1 a2 a2 a3"


def test_the_end_tells_result_attempts_and_brokers_in_every_mode(bench: Bench) -> None:
    engine, told = engine_of(bench), Told()
    for send in (engine.send, engine.submit):
        bench.sender.routes["T"] = tuple(qs("a:0"))
        bench.sender.script = [refused(Response.SYSTEM_BUSY), ConnectionLost("broken")]
        one = outgoing(done=told)
        send(one)
        bench.time.advance(5)
        assert told[-1].outgoing is one
        assert (told[-1].attempts, told[-1].brokers) == (3, ["a", "a", "a"])
        assert isinstance(told[-1].outcome, SendResult)
    assert len(told) == 2
    bench.sender.script = [refused(Response.MESSAGE_ILLEGAL)]
    with pytest.raises(MessageIllegal) as e:
        engine.send(outgoing(done=told))
    assert told[-1].outcome is e.value


def test_what_is_submitted_after_the_end_is_told_so(bench: Bench) -> None:
    engine, told = engine_of(bench), Told()
    assert engine.close(Deadline.after(0.0)) == []
    engine.submit(outgoing(done=told))
    assert [type(outcome) for outcome in told.outcomes] == [ClosedError]
    assert not engine.enqueue(outgoing(done=told))
    assert (len(told), bench.sender.calls) == (1, [])


def test_a_queue_may_be_named_in_the_first_request(bench: Bench) -> None:
    """A broker's address comes with a route, which nobody asked for so far."""
    engine, told = engine_of(bench, auto_create_topics=False), Told()
    for _ in range(2):
        engine.submit(outgoing(queue=q("b:1"), done=told))
    assert bench.sender.seen("route") == [("T", False)]
    assert [outcome.queue for outcome in told.outcomes] == qs("b:1 b:1")
    engine = engine_of(bench, auto_create_topics=False)
    engine.submit(OutgoingSend("Nowhere", SendRequest("g", b"x"), 10.0, q("a:0", "Nowhere"), done=told))
    assert isinstance(told.outcomes[-1], SendResult), "it is the broker's to say that there is no such topic"


def test_in_flight_bound_follows_brokers_and_acknowledgements(bench: Bench) -> None:
    engine, told = engine_of(bench, max_in_flight=None), Told()
    bench.sender.script = [None] * 40
    assert engine.has_room(outgoing().size)
    while engine.has_room(outgoing().size):
        engine.submit(outgoing(done=told))
    assert len(bench.sender.waiting) == 2 * INITIAL_REQUESTS_PER_BROKER
    bench.sender.answer()
    while engine.has_room(outgoing().size):
        engine.submit(outgoing(done=told))
    assert len(bench.sender.waiting) == 2 * (INITIAL_REQUESTS_PER_BROKER + 1)
    bench.sender.answer(0, refused(Response.SYSTEM_BUSY))
    bench.time.advance(1)
    bench.sender.answer(len(bench.sender.waiting) - 1)
    assert (len(told), told[-1].attempts) == (2, 2)
    assert engine.send_window.max_concurrent == 2 * ((INITIAL_REQUESTS_PER_BROKER + 1) // 2)
    assert not engine.has_room(outgoing().size)


def test_fixed_broker_bound_does_not_hold_back_waiting_sends(bench: Bench) -> None:
    engine, told = engine_of(bench, max_in_flight=None, max_in_flight_per_broker=1, max_async_bytes=10), Told()
    bench.sender.script = [None] * 8
    for _ in range(3):
        engine.submit(ordered(told))
    assert len(bench.sender.waiting) == 1
    assert not engine.has_room(outgoing().size)
    assert engine.has_room(ordered(told, body=b"x" * 7).size, ordered=True)
    assert not engine.has_room(ordered(told, body=b"x" * 8).size, ordered=True)
    engine.submit(ordered(told, "b:0"))
    assert [queue.broker_name for queue, _, _ in bench.sender.waiting] == ["a", "b"]
    for name in ("a:1", "b:1"):
        engine.submit(ordered(told, name))
    assert len(bench.sender.waiting) == 2, "one per broker, whichever they are"
    bench.sender.answer()
    bench.time.run_due()
    assert [queue.queue_id for queue, _, _ in bench.sender.waiting] == [0, 1]


def test_submit_waits_for_room_within_the_deadline(bench: Bench) -> None:
    engine, told = engine_of(bench, max_async_bytes=5), Told()
    bench.sender.script = [None] * 3
    engine.submit(outgoing(b"xxx", done=told))
    begin = bench.time.now
    with pytest.raises(SendFailed, match="1 asynchronous sends with 3 bytes are not answered yet"):
        engine.submit(outgoing(b"yyy", timeout=2.0, done=told))
    assert bench.time.now - begin == 2.0
    engine.timer.call_later(1.0, bench.sender.answer)
    engine.submit(outgoing(b"yyyyyyy", timeout=2.0, done=told))
    assert bench.time.now - begin == 3.0
    assert len(told) == len(bench.sender.waiting) == 1, "one alone always has room"


@pytest.mark.parametrize("stays", [True, False])
def test_what_waits_behind_a_batch_that_was_given_up_is_not_sent(bench: Bench, stays: bool) -> None:
    engine, told = engine_of(bench, failed_queues_stay_closed=stays), Told()
    bench.sender.script = [None, None]
    for name in ("a:0", "a:0", "a:0", "a:1"):
        engine.submit(ordered(told, name))
    bench.sender.answer(0, refused(Response.MESSAGE_ILLEGAL))
    bench.time.advance(1)
    outcomes = told.outcomes
    assert outcomes[0].broker_code == Response.MESSAGE_ILLEGAL
    assert [str(e.__cause__) for e in outcomes[1:]] == [str(outcomes[0])] * 2
    assert "not sent, because an earlier batch of its queue was given up: the server" in outcomes[1].message
    engine.submit(ordered(told))
    bench.sender.answer()
    sent = [queue.queue_id for _, queue, _ in bench.sender.calls]
    assert sent == ([0, 1] if stays else [0, 1, 0])
    kinds = [SendFailed, SendResult] if stays else [SendResult, SendResult]
    assert [type(outcome) for outcome in told.outcomes[3:]] == kinds
    assert engine.wait_until_idle(Deadline.after(0.0))
    assert (engine.send_window.request_count, engine.send_window.byte_count) == (0, 0)


def raising(*args: Any, **kwargs: Any) -> Any:
    raise ValueError("a bug")


@pytest.mark.parametrize("place", ["publish_queues", "send_async", "filter_queues", "next_action", "report"])
def test_whatever_is_raised_becomes_an_outcome(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, place: str, caplog: pytest.LogCaptureFixture
) -> None:
    engine, told = engine_of(bench), Told()
    if place in ("publish_queues", "send_async"):
        monkeypatch.setattr(bench.sender, place, raising)
    if place == "next_action":
        monkeypatch.setattr(RetryState, "next_action", raising)
    if place == "report":
        monkeypatch.setattr(engine.faults, "report", raising)
    engine.submit(outgoing(done=told, filter_queues=raising if place == "filter_queues" else None))
    bench.time.advance(11)
    (outcome,) = told.outcomes
    if place == "report":
        assert isinstance(outcome, SendResult)
    else:
        assert isinstance(outcome, SendFailed)
        assert "sending failed in an unexpected way: ValueError: a bug" in str(outcome)
        assert "bug of rocketmq-spark" in str(outcome)
    assert engine.wait_until_idle(Deadline.after(0.0))
    assert "Traceback" in caplog.text


def interrupted(*args: Any, **kwargs: Any) -> Any:
    raise KeyboardInterrupt


@pytest.mark.parametrize("retries", [0, 2])
def test_an_interrupted_pump_strands_nothing_that_it_took(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, retries: int
) -> None:
    engine, told = engine_of(bench, retries=retries), Told()
    for _ in range(3):
        assert engine.enqueue(outgoing(done=told))
    with monkeypatch.context() as ctrl_c:
        ctrl_c.setattr(bench.sender, "publish_queues", interrupted)
        with pytest.raises(KeyboardInterrupt):
            engine.dispatch_ready()
    bench.time.advance(1)
    kinds = Counter(type(outcome) for outcome in told.outcomes)
    assert kinds == (Counter({SendResult: 3}) if retries else Counter({SendResult: 2, SendFailed: 1}))
    assert engine.wait_until_idle(Deadline.after(0.0))
    assert len(bench.sender.calls) == kinds[SendResult]


def test_send_interrupted_while_waiting_for_room_has_outcome(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    producer = bench.producer(max_async_messages=1)
    bench.sender.script = [None]
    first = producer.send_async(M)
    with monkeypatch.context() as ctrl_c:
        ctrl_c.setattr(bench.timers["send"], "wait_notified", interrupted)
        with pytest.raises(KeyboardInterrupt):
            producer.send_async(M)
    bench.sender.answer()
    assert first.done()
    assert producer.flush(0.0)


def test_second_outcome_of_an_attempt_changes_nothing(bench: Bench) -> None:
    engine, told = engine_of(bench), Told()
    bench.sender.script = [None, None]
    engine.submit(outgoing(done=told))
    _, _, done = bench.sender.waiting[0]
    bench.sender.answer(0, refused(Response.SYSTEM_BUSY))
    bench.time.advance(1)
    done(ConnectionLost("told twice"))
    bench.sender.answer()
    assert [type(outcome) for outcome in told.outcomes] == [SendResult]


def test_hanging_name_server_delays_only_sends_that_need_it(bench: Bench) -> None:
    """Routes are asked for again on a thread beside the one that sends."""
    engine, told = engine_of(bench), Told()
    engine._route_executor.stopped = True  # type: ignore[attr-defined]
    bench.sender.script = [ConnectionLost("broken"), None]
    for name in ("a:0", "b:0"):
        engine.submit(ordered(told, name))
    bench.time.advance(1)
    bench.sender.answer()
    assert [outcome.queue for outcome in told.outcomes] == qs("b:0")


def test_what_waits_for_a_route_when_it_is_closed_is_not_sent(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who closed it was told that it had no answer, and may send it again by now."""
    engine, told = engine_of(bench, retries=2), Told()
    bench.sender.script = [ConnectionLost("broken")]
    ask = bench.sender.publish_queues

    def closing(topic: str, deadline: Deadline, refresh: bool = False) -> Any:
        if refresh:
            engine.close(Deadline.after(0.0))
        return ask(topic, deadline, refresh)

    monkeypatch.setattr(bench.sender, "publish_queues", closing)
    engine.submit(outgoing(done=told))
    bench.time.advance(1)
    assert [type(outcome) for outcome in told.outcomes] == [ClosedError]
    assert len(bench.sender.calls) == 1
