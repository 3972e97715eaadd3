"""The engine where the system gives no more threads, as in a container with a limit of processes."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from rocketmq_spark.base.clock import Deadline
from rocketmq_spark.base.codes import Response
from rocketmq_spark.base.threads import Timer
from rocketmq_spark.errors import ConnectionLost, SendFailed, UnprovedError
from rocketmq_spark.model import Message, MessageQueue, SendRequest, SendResult, SendStatus, SpooledSend
from rocketmq_spark.producer.accumulator import BatchEntry, BatchKey, BatchLimits, MessageBatch
from rocketmq_spark.producer.batching import Batcher
from rocketmq_spark.producer.engine import Engine
from rocketmq_spark.producer.futures import FutureRegistry
from rocketmq_spark.producer.outgoing import Outcome, OutgoingSend, SendCompletion
from rocketmq_spark.producer.producer import BaseProducer
from rocketmq_spark.producer.send_queue import SendQueue
from rocketmq_spark.producer.settings import ProducerSettings
from tests.fakes.sender import ScriptedSender, refused
from tests.fakes.spool import FakeSpool
from tests.fakes.timer import ManualTimer, Time
from tests.helpers import no_more_threads, raising, waits_in
from tests.producer.bench import Bench
from tests.producer.test_ambiguity import Broker, batch, run
from tests.producer.test_spool_bridge import down, producer
from tests.queues import q

M = Message("T", b"x")


@pytest.fixture
def threaded(bench: Bench) -> Iterator[BaseProducer]:
    """A producer whose timers have threads, which start when they are needed."""
    made = BaseProducer(bench.sender, ProducerSettings(group="g", heartbeat_s=0, route_refresh_s=0))
    yield made
    made.close(0.01)


def test_send_without_threads_fails_before_anything_is_sent(
    bench: Bench, threaded: BaseProducer, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as exhausted:
        no_more_threads(exhausted)
        with pytest.raises(SendFailed, match="nothing was sent: can't start new thread"):
            threaded.send_async(M)
        with pytest.raises(RuntimeError):
            threaded.send_async(M, callback=print)
        with pytest.raises(RuntimeError):
            BaseProducer(bench.sender, ProducerSettings(group="g", heartbeat_s=0, route_refresh_s=0, auto_batch=True))
    assert bench.sender.calls == []
    assert threaded.flush(0.0)


def test_who_closes_waits_for_a_send_of_another_thread(bench: Bench) -> None:
    """Else it would be told that the send has no answer, which comes a moment later."""
    sending, go_on = threading.Event(), threading.Event()

    class Slow(ScriptedSender):
        def send(self, queue: MessageQueue, request: SendRequest, deadline: Deadline) -> SendResult:
            sending.set()
            assert go_on.wait(60)
            return super().send(queue, request, deadline)

    made, left = (
        BaseProducer(Slow(bench.time), ProducerSettings(group="g", heartbeat_s=0, route_refresh_s=0)),
        list[Any](),
    )
    closer = threading.Thread(target=lambda: left.append(made.close(60.0)))
    with ThreadPoolExecutor(1) as another:
        sent = another.submit(made.send, M)
        try:
            assert sending.wait(60)
            closer.start()
            waits_in(closer, SendQueue.wait_until_idle)
        finally:
            go_on.set()
        assert sent.result(60).status is SendStatus.SEND_OK
    closer.join(60)
    assert left == [[]]


def test_failed_attempt_is_retried_without_new_threads(
    bench: Bench, threaded: BaseProducer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the route is asked for first, which has a thread beside the one that sends."""
    bench.sender.script = [None, refused(Response.SYSTEM_BUSY)]
    result = threaded.send_async(M)
    no_more_threads(monkeypatch)
    bench.sender.answer(0, ConnectionLost("broken"))
    assert result.result(60).status is SendStatus.SEND_OK
    assert len(bench.sender.calls) == 3


def test_send_waiting_for_slot_goes_out_without_new_threads(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    producer = BaseProducer(
        bench.sender, ProducerSettings(group="g", heartbeat_s=0, route_refresh_s=0, max_in_flight=1)
    )
    bench.sender.script = [None]
    results = [producer.send_async(M) for _ in range(2)]
    no_more_threads(monkeypatch)
    bench.sender.answer()
    assert [result.result(60).status for result in results] == [SendStatus.SEND_OK] * 2
    producer.close(0.01)


def test_failed_send_is_spooled_without_new_threads(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    bench.sender, spool = ScriptedSender(bench.time), FakeSpool()
    made = producer(bench, spool, retries=0)
    assert made._engine._spool_bridge is not None
    monkeypatch.setattr(
        made._engine._spool_bridge._timer, "call_later", raising(RuntimeError("can't start new thread"))
    )
    bench.sender.script = [down()]
    assert made.send_async(M).result(0).status is SendStatus.SPOOLED
    assert len(spool.kept) == 1


def test_a_look_for_which_there_is_no_thread_is_an_outcome(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its request would stay under way for good. The next one is looked up, where there is a thread again."""
    broker, threads, later = Broker([("all", "timeout")] * 2), [False, True], ManualTimer.call_later

    class Look(ManualTimer):
        def call_later(self, seconds: float, call: Callable[[], None]) -> None:
            if not threads.pop(0):
                raise RuntimeError("can't start new thread")
            later(self, seconds, call)

    def beside(timer: ManualTimer, name: str) -> ManualTimer:
        return (Look if name.startswith("confirm-") else ManualTimer)(timer.time)

    monkeypatch.setattr(ManualTimer, "with_own_thread", beside)
    unproved, confirmed = run(bench, broker, [batch("x"), batch("y")], [None, None])
    assert isinstance(unproved.outcome, UnprovedError)
    assert "can't start new thread" in unproved.outcome.message
    assert confirmed.confirmed_count == 1
    assert broker.stored == {"x": 1, "y": 1}
    assert threads == []


class _SeenLock:
    """A lock that says who waits for it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.contended = threading.Event()

    def __enter__(self) -> None:
        if not self._lock.acquire(blocking=False):
            self.contended.set()
            self._lock.acquire()

    def __exit__(self, *error: object) -> None:
        self._lock.release()


class _SlowOwner:
    """Of its batches; while the first one gets its place another thread begins and fills the second."""

    def __init__(self, batcher: Batcher) -> None:
        self.lock = _SeenLock()
        batcher._lock = self.lock  # type: ignore[assignment]
        self._batcher = batcher
        self._pending = FutureRegistry(ManualTimer(Time()))
        self._other = threading.Thread(target=self.add, args=("second",))
        self.placed: list[str] = []

    def add(self, name: str) -> None:
        entry = BatchEntry(b"x" * 20, 20, name, (), self._pending.create(msg_id=name))
        self._batcher.add(BatchKey("T", q("a:0"), True, None, False), entry, self)

    def enqueue_batch(self, batch: MessageBatch, done: Callable[[Outcome], None]) -> bool:
        name = batch.entries[0].msg_id
        if name == "first":
            self._other.start()
            while self._other.is_alive() and not self.lock.contended.is_set():
                self._other.join(0.001)
        self.placed.append(name)
        return True

    def dispatch_ready(self, on_other_thread: bool = False) -> None:
        pass

    def all_placed(self) -> list[str]:
        self._other.join(60)
        return self.placed


def test_batch_takes_its_queue_place_before_next_batch_does() -> None:
    batcher = Batcher(ManualTimer(Time()))
    batcher.accumulator.limits = BatchLimits(max_bytes=10)
    owner = _SlowOwner(batcher)
    owner.add("first")
    assert owner.all_placed() == ["first", "second"]


def test_what_the_spool_is_keeping_at_the_close_is_kept_once(bench: Bench) -> None:
    """It is still under way then, and who gives up what is under way would keep it a second time."""
    begun, go_on = threading.Event(), threading.Event()

    class SlowSpool(FakeSpool):
        def keep(self, sends: Sequence[SpooledSend]) -> None:
            (begun if not begun.is_set() else go_on).set()
            go_on.wait(60)
            super().keep(sends)

    bench.sender, spool = ScriptedSender(bench.time), SlowSpool()
    bench.sender.script = [down()]
    settings = ProducerSettings(group="g", retries=0, heartbeat_s=0, route_refresh_s=0)
    engine = Engine(bench.sender, settings, Timer("rocketmq-test"), spool=spool)
    ended: list[SendCompletion] = []
    engine.submit(OutgoingSend("T", SendRequest("g", b"x"), 60.0, done=ended.append))
    assert begun.wait(60)
    spooling = engine._spool_bridge
    assert spooling is not None
    drain = spooling.drain
    spooling.drain = lambda: (go_on.set(), drain())  # type: ignore[assignment, func-returns-value]
    engine.close(Deadline.after(0))
    assert len(spool.kept) == len(ended) == 1
