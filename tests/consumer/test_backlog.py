"""Members of a group that are far behind read ahead: each message once, and what holds back pulls holds back reads."""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import pytest

from rocketmq_spark.base.clock import Deadline
from rocketmq_spark.base.threads import Timer
from rocketmq_spark.columnar.decode.rows import batch_of_messages
from rocketmq_spark.consumer import prefetch
from rocketmq_spark.consumer.assigned import FetchedPart, FetchRequest
from rocketmq_spark.consumer.member_state import MemberState
from rocketmq_spark.consumer.prefetch import BacklogQueues, BacklogReader
from rocketmq_spark.consumer.process_queue import ProcessQueue, Thresholds
from rocketmq_spark.consumer.push import BaseConsumer
from rocketmq_spark.consumer.rows import RowsDecoder
from rocketmq_spark.consumer.settings import ConsumerSettings
from rocketmq_spark.consumer.tools import ConsumerTools
from rocketmq_spark.model import MASTER_ID, MessageQueue, ReceivedMessage
from rocketmq_spark.wire import messages
from tests.consumer.messages import messages as found_at
from tests.consumer.reads import COUNT, Reads
from tests.fakes.group_member import FakeBrokers, FakeMember
from tests.fakes.timer import Time
from tests.helpers import RAISED, no_more_threads
from tests.mockbroker import WAIT_S, eventually
from tests.queues import q

A, B = q("a:0"), q("a:1")


class Bench:
    """Two queues of one broker, and members that read them; ``got`` is what listeners were given, by queue."""

    def __init__(self) -> None:
        self.brokers = FakeBrokers(Time(), {"T": "a:0-1"})
        self.brokers.offsets = {A: 0, B: 0}
        self.reads = Reads()
        self.got: dict[MessageQueue, Counter[int]] = {A: Counter(), B: Counter()}
        self.port = FakeMember(self.brokers, "me")
        self.consumer: BaseConsumer | None = None
        self.rows: RowsDecoder | None = None  # for listeners of record batches

    def fill(self, queue: MessageQueue, count: int) -> None:
        self.brokers.send(queue, *(b"x",) * count)

    def start(
        self, listener: Callable[..., Any] = lambda message: None, tags: str | None = None, **how: Any
    ) -> BaseConsumer:
        settings: dict[str, Any] = {"thresholds": Thresholds(40, 1 << 20, 400), "pull_batch_size": COUNT, "threads": 4}
        how_to = BacklogReader(self.reads.begin, lambda *given: self.messages(*given))
        made = ConsumerTools(backlog_reader=how_to, rows_decoder=self.rows)
        self.consumer = consumer = BaseConsumer(self.port, ConsumerSettings(group="g", **settings | how), made)
        consumer.subscribe("T", tags=tags)

        def noting(messages: Any, context: Any) -> Any:
            if self.rows is not None:
                self.got[context.queue].update(messages.column("queueOffset").to_pylist())
                return listener(messages)
            for each in messages:
                self.got[each.queue][each.queue_offset] += 1
            return listener(messages[0])

        consumer.start(noting)
        return consumer

    def consumed(self, queue: MessageQueue, count: int) -> bool:
        return self.got[queue].copy() == Counter(range(count))

    def pulls(self, queue: MessageQueue) -> list[int]:
        return [request.offset for request in self.port.seen("pull") if request.queue == queue]

    def messages(
        self, queue: MessageQueue, start: int, end: int, stored: bytes | memoryview
    ) -> Sequence[ReceivedMessage]:
        return self.brokers.queues[queue].messages[start : start + len(stored)]


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """No listener is slow: else pulls, which fill more, take over on a busy machine."""
    monkeypatch.setattr(prefetch, "MAX_FULL_S", 600.0)


@pytest.mark.usefixtures("patient")
@pytest.mark.parametrize("ordered", [False, True])
def test_a_backlog_of_rows_is_read_ahead_in_order(bench: Bench, ordered: bool) -> None:
    bench.rows = RowsDecoder(1024, lambda parts: None, batch_of_messages)
    bench.fill(A, 1000)
    bench.fill(B, 600)
    firsts: list[tuple[int, int]] = []

    def listener(batch: Any) -> None:
        firsts.append((batch.column("queueId")[0].as_py(), batch.column("queueOffset")[0].as_py()))

    consumer = bench.start(listener, ordered=ordered, arrow=True)
    eventually(lambda: bench.consumed(A, 1000) and bench.consumed(B, 600))
    assert len(bench.pulls(A)) < 50
    assert bench.reads.runs
    eventually(lambda: consumer.stats().cached == 0)
    consumer.stop(WAIT_S)
    assert bench.brokers.offsets == {A: 1000, B: 600}
    if ordered:
        assert [at for queue, at in firsts if queue == 0] == sorted(at for queue, at in firsts if queue == 0)


def test_an_ordered_listener_of_messages_is_not_read_ahead(bench: Bench) -> None:
    bench.fill(A, 300)
    bench.start(ordered=True)
    eventually(lambda: bench.consumed(A, 300))
    assert not bench.reads.runs


def one_by_one(free: threading.Semaphore) -> Callable[[ReceivedMessage], object]:
    """A listener that finishes a message for each release."""
    return lambda message: None if free.acquire(timeout=WAIT_S) else 1 / 0


@pytest.fixture
def bench() -> Iterator[Bench]:
    made = Bench()
    yield made
    if made.consumer is not None:
        made.consumer.stop(WAIT_S)
    assert not [
        thread for thread in threading.enumerate() if thread.is_alive() and thread.name.startswith("rocketmq-ahead")
    ]
    assert all(run.closed for run in made.reads.runs)


@pytest.mark.usefixtures("patient")
def test_a_backlog_is_read_ahead_and_what_comes_then_is_pulled(bench: Bench) -> None:
    bench.fill(A, 1000)
    bench.fill(B, 600)
    consumer = bench.start()
    eventually(lambda: bench.consumed(A, 1000) and bench.consumed(B, 600))
    assert len(bench.pulls(A)) < 50
    bench.fill(A, 3)
    eventually(lambda: bench.consumed(A, 1003))
    eventually(lambda: consumer.stats().cached == 0)
    assert consumer.stats().topics["T"].pulled_per_s > 0
    consumer.stop(WAIT_S)
    assert bench.brokers.offsets == {A: 1003, B: 600}


def test_a_reset_that_a_read_ahead_is_told_of_is_followed(bench: Bench) -> None:
    bench.fill(A, 2000)
    bench.reads.reset, bench.reads.reset_from = 1990, 400
    consumer = bench.start()
    eventually(lambda: bench.got[A][1999] == 1)
    consumer.stop(WAIT_S)
    assert bench.brokers.offsets[A] == 2000
    assert 1500 not in bench.got[A]


def test_reset_from_read_ahead_of_an_earlier_owner_is_applied() -> None:
    """The queue was given up, and perhaps came back, while the read was under way; no other answer tells of the reset."""
    held = MemberState(Thresholds(40, 1 << 20, 400))
    reads = BacklogReader(Reads().begin, lambda *given: ())
    behind = BacklogQueues(ConsumerSettings(group="g"), held, Timer("t"), reads)
    noted: list[Mapping[MessageQueue, int]] = []
    behind.reset_offsets_soon = noted.append
    held.queues[A] = ProcessQueue(A)
    behind.reset(FetchRequest(A, 100, MASTER_ID, token=7), 5)
    behind.reset(FetchRequest(B, 100, MASTER_ID, token=8), 6)
    assert noted == [{A: 5}, {B: 6}]


def test_read_ahead_of_an_earlier_owner_is_discarded() -> None:
    """The queue was given up, and came back at an earlier offset."""
    held = MemberState(Thresholds(400, 1 << 20, 4000))
    behind = BacklogQueues(
        ConsumerSettings(group="g"), held, Timer("t"), BacklogReader(Reads().begin, lambda *given: ())
    )
    before, now = ProcessQueue(A), ProcessQueue(A)
    asked: list[FetchRequest] = []
    for queue, offset in ((before, 5000), (now, 0)):
        place = behind._backlog_queue(queue)
        place.pull_offset = offset
        asked.append(FetchRequest(A, offset, MASTER_ID, place.token))
        queue.dropped = queue is before
    late, mine = asked
    part = FetchedPart(A, 5000, [(5002, 2)], b"xx", lambda start, end, stored: found_at(*range(start, end)))
    for ask, given in ((late, False), (mine, True)):
        assert behind.accept(ask, part) is given
        behind.process_accepted_parts([(ask, part)])
        assert (now.count, behind.states[A].pull_offset, before.count) == ((2, 5002, 0) if given else (0, 0, 0))


def test_what_becomes_large_is_pulled_from_there_on(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(messages, "PORTION_BYTES", 1)
    bench.fill(A, 300)
    bench.fill(B, 300)
    consumer = bench.start()
    eventually(lambda: bench.consumed(A, 300) and bench.consumed(B, 300))
    assert "are too large together; pulling from offset" in caplog.text
    consumer.stop(WAIT_S)
    assert bench.brokers.offsets == {A: 300, B: 300}


def test_what_fails_is_sent_back(bench: Bench) -> None:
    bench.fill(A, 1000)
    bench.start(lambda message: 1 / 0 if message.queue_offset % 100 == 7 else None)
    eventually(lambda: bench.consumed(A, 1000) and len(bench.port.seen("send_back")) == 10)


def test_a_listener_that_hangs_holds_back_its_queue_and_no_other(bench: Bench) -> None:
    go_on = threading.Event()
    bench.fill(A, 1000)
    bench.fill(B, 1000)
    hanging = {(A, 5), (A, 406)}  # as in Java the span is that of what is not finished: two of them hold it open
    consumer = bench.start(
        lambda message: go_on.wait(WAIT_S) if (message.queue, message.queue_offset) in hanging else None
    )
    eventually(lambda: bench.consumed(B, 1000))
    eventually(lambda: bench.got[A][406] and consumer.stats().cached == 2)
    assert max(bench.got[A].copy()) <= 406 + 40 + COUNT  # what was on its way: no more than may wait
    go_on.set()
    eventually(lambda: bench.consumed(A, 1000))


def test_where_listeners_are_slow_pulls_go_on(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefetch, "COOLDOWN_S", 600.0)
    monkeypatch.setattr(prefetch, "MAX_FULL_S", 0.01)
    monkeypatch.setattr(prefetch, "RECHECK_INTERVAL_S", 0.001)
    free = threading.Semaphore(0)
    bench.fill(A, 1000)
    bench.start(one_by_one(free))
    eventually(lambda: bench.reads.runs and bench.reads.runs[0].closed)
    given = bench.reads.given
    for _ in range(1000):
        free.release()
    eventually(lambda: bench.consumed(A, 1000))
    assert (len(bench.reads.runs), bench.reads.given) == (1, given)  # for a while no read is tried again
    assert len(bench.pulls(A)) > 200


@pytest.mark.usefixtures("patient")
def test_no_more_waits_than_may(bench: Bench) -> None:
    free = threading.Semaphore(0)
    bench.fill(A, 1000)
    consumer = bench.start(one_by_one(free))
    for done in range(100):
        eventually(lambda: consumer.stats().cached > 20)
        assert consumer.stats().cached <= 20 + COUNT, done
        free.release()
    free.release(900)
    eventually(lambda: bench.consumed(A, 1000))


def test_what_was_pulled_counts_too(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """A read that is tried again does not add to what pulls have filled."""
    monkeypatch.setattr(prefetch, "MAX_FULL_S", 0.01)
    monkeypatch.setattr(prefetch, "RECHECK_INTERVAL_S", 0.001)
    monkeypatch.setattr(prefetch, "COOLDOWN_S", 0.0)
    free = threading.Semaphore(0)
    bench.fill(A, 1000)
    consumer = bench.start(one_by_one(free))
    eventually(lambda: consumer.stats().cached > 40)
    assert consumer.stats().cached <= 40 + COUNT
    runs = len(bench.reads.runs)
    free.release(10)  # room for some pulls, but not for a read
    eventually(lambda: sum(bench.got[A].values()) >= 10 and consumer.stats().cached > 40)
    assert consumer.stats().cached <= 40 + COUNT
    assert len(bench.reads.runs) == runs
    free.release(990)
    eventually(lambda: bench.consumed(A, 1000))


@pytest.mark.parametrize(
    "how",
    [
        {"tags": "x"},
        {"ordered": True},
        {"pull_interval_s": 0.001},
        {"topic_max_count": 80},
        {"topic_max_bytes": 1 << 20},
    ],
)
def test_what_is_filtered_ordered_or_paced_is_pulled(bench: Bench, how: dict[str, Any]) -> None:
    bench.fill(A, 300)
    bench.start(**how)
    eventually(lambda: bench.consumed(A, 300))
    assert not bench.reads.runs


def test_a_read_ends_when_only_some_of_the_topic_is_wanted(bench: Bench) -> None:
    free = threading.Semaphore(0)
    bench.fill(A, 1000)
    consumer = bench.start(one_by_one(free))
    eventually(lambda: bench.reads.given)
    consumer.subscribe("T", tags="x")
    free.release(1000)
    eventually(lambda: bench.consumed(A, 1000))
    assert len(bench.reads.runs) == 1
    assert bench.port.seen("pull")[-1].filter.expression == "x"


def test_a_queue_that_goes_is_read_no_more_and_the_others_go_on(bench: Bench) -> None:
    free = threading.Semaphore(0)
    bench.fill(A, 1000)
    bench.fill(B, 1000)
    consumer = bench.start(one_by_one(free))
    eventually(lambda: bench.reads.given_of[A] >= 2)
    assert consumer._running is not None
    held = consumer._running.state
    FakeMember(bench.brokers, "first of all").heartbeat(Deadline.after(WAIT_S))  # it has A from now on
    eventually(lambda: [each.queue for each in held.owned_queues()] == [B])
    before = bench.got[A].copy()
    free.release(2000)
    eventually(lambda: bench.consumed(B, 1000))
    assert (bench.got[A] - before).total() <= 4  # those that threads had begun
    assert bench.reads.given_of[A] < 20


def test_what_is_odd_is_left_to_pulls(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefetch, "COOLDOWN_S", 600.0)
    bench.reads.odd = 300
    bench.fill(A, 1000)
    bench.start()
    eventually(lambda: bench.consumed(A, 1000))
    assert len(bench.reads.runs) == 1
    assert len(bench.pulls(A)) >= 170


@pytest.mark.parametrize("error", RAISED, ids=lambda error: type(error).__name__)
def test_what_cannot_be_made_messages_is_pulled(
    bench: Bench, error: BaseException, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The position moves when messages are there: what fails on the way is asked for again, and by pulls."""
    monkeypatch.setattr(prefetch, "COOLDOWN_S", 600.0)
    real, fails = bench.messages, [1]

    def messages(queue: MessageQueue, start: int, end: int, stored: bytes | memoryview) -> Sequence[ReceivedMessage]:
        if start >= 40 and fails.pop():
            raise error
        return real(queue, start, end, stored)

    monkeypatch.setattr(bench, "messages", messages)
    bench.fill(A, 1000)
    consumer = bench.start()
    eventually(lambda: bench.consumed(A, 1000))
    assert f"the work of thread rocketmq-ahead-a failed: {type(error).__name__}: mine" in caplog.text
    eventually(lambda: consumer.stats().cached == 0)


def test_undecodable_read_ahead_holds_back_no_later_read(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefetch, "COOLDOWN_S", 0.0)
    real, fails = bench.messages, [1] * 20

    def messages(queue: MessageQueue, start: int, end: int, stored: bytes | memoryview) -> Sequence[ReceivedMessage]:
        if fails:
            raise ZeroDivisionError(fails.pop())
        return real(queue, start, end, stored)

    monkeypatch.setattr(bench, "messages", messages)
    bench.fill(A, 3000)
    bench.start()
    eventually(lambda: bench.consumed(A, 3000))
    assert fails == []
    assert len(bench.pulls(A)) < 300


def test_bytes_on_their_way_are_counted_down(bench: Bench) -> None:
    """Else a backlog is held back for bytes that came long ago."""
    bench.fill(A, 1000)
    bench.start(thresholds=Thresholds(40, 100, 400))
    eventually(lambda: bench.consumed(A, 1000))
    assert len(bench.pulls(A)) < 50


def test_without_a_thread_for_it_a_backlog_is_pulled(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    no_more_threads(monkeypatch, "rocketmq-ahead")
    bench.fill(A, 300)
    bench.start()
    eventually(lambda: bench.consumed(A, 300))
    assert "cannot read ahead the backlog of broker a: can't start new thread" in caplog.text
    assert not bench.reads.runs


def test_a_read_that_hangs_is_stopped_with_the_consumer(bench: Bench) -> None:
    bench.reads.hangs = True
    bench.fill(A, 1000)
    bench.start()
    eventually(lambda: bench.reads.runs)
