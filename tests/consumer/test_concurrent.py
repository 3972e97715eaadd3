from __future__ import annotations

import contextlib
import itertools
import logging
import sys
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rocketmq_spark.base.clock import Deadline
from rocketmq_spark.base.codes import INNER_BATCH_MASK
from rocketmq_spark.base.threads import KeyedExecutor, Timer
from rocketmq_spark.consumer.concurrent import ConcurrentConsumeService
from rocketmq_spark.consumer.listener_pool import ListenerPool
from rocketmq_spark.consumer.member_state import MemberState
from rocketmq_spark.consumer.process_queue import ProcessQueue, Thresholds
from rocketmq_spark.consumer.settings import ConsumerSettings
from rocketmq_spark.errors import CallTimeout
from tests.consumer.group import GroupBench
from tests.consumer.messages import QUEUE, message, messages
from tests.helpers import RAISED, raising
from tests.mockbroker import eventually
from tests.queues import q

A = q("a:0")


class Textless(Exception):
    def __str__(self) -> str:
        raise SystemExit("no text")

    __repr__ = __str__


def started(group: GroupBench, listener: Any = None, **how: Any) -> Any:
    """A member that pulls already."""
    consumer, port = group.start(listener, **how)
    group.time.advance(1)
    return consumer, port


def test_listeners_get_slices_of_a_pull(group: GroupBench) -> None:
    sizes: list[int] = []
    started(group, lambda messages, context: sizes.append(len(messages)), consume_batch_max_size=10)
    group.brokers.send(A, *(b"x" for _ in range(32)))
    group.time.advance(1)
    assert sum(sizes) == 32
    assert max(sizes) == 10


def test_slow_listener_stops_its_pulls_at_the_cache_limit(group: GroupBench) -> None:
    consumer, port = started(group)
    group.workers[0].held = True
    group.brokers.send(A, *(b"x" for _ in range(3000)))
    group.time.advance(5)
    assert 1000 < consumer.stats().cached <= 1000 + 32
    pulled = sum(request.queue == A for request in port.seen("pull"))
    group.time.advance(5)
    assert sum(request.queue == A for request in port.seen("pull")) == pulled
    group.workers[0].let_go()
    group.time.advance(60)
    assert len(group.got) == 3000
    assert consumer.stats().cached == 0


def test_only_what_comes_after_the_ack_index_fails(group: GroupBench) -> None:
    def listener(messages: Any, context: Any) -> None:
        context.ack_index, context.delay_level = 1, 7

    consumer, port = started(group, listener, consume_batch_max_size=4)
    group.workers[0].held = True
    group.brokers.send(A, b"0")
    group.brokers.send(A, b"1", b"2", b"3", b"4")
    group.time.advance(0.1)
    group.workers[0].let_go()
    group.time.advance(0.1)
    assert port.seen("send_back") == [(b"3", 7, 16), (b"4", 7, 16)]
    stats = consumer.stats()
    assert (stats.consumed, stats.failed) == (3, 2)


def test_message_not_sent_back_comes_again_and_holds_the_offset(group: GroupBench) -> None:
    consumer, _ = started(group, lambda messages, context: context.retry() if messages[0].body == b"bad" else None)
    group.brokers.failing |= {"send_back": CallTimeout("late"), "send_to_retry": CallTimeout("late")}
    group.brokers.send(A, b"bad", b"good")
    group.time.advance(4.9)
    assert group.got == [("m1", b"bad", 0), ("m1", b"good", 0)]
    group.time.advance(10.1)
    assert group.got[2:] == [("m1", b"bad", 1), ("m1", b"bad", 2), ("m1", b"bad", 3)][: len(group.got) - 2]
    assert len(group.got) >= 4
    assert group.brokers.offsets.get(A, 0) == 0
    group.brokers.failing.clear()
    group.time.advance(12)
    assert group.brokers.offsets[A] == 2
    assert consumer.stats().cached == 0


def test_of_a_batch_only_what_nobody_takes_back_comes_again(group: GroupBench) -> None:
    def listener(messages: Any, context: Any) -> None:
        context.ack_index = len(messages) - 2 if messages[-1].body == b"bad" else None

    consumer, _ = started(group, listener, consume_batch_max_size=3)
    group.workers[0].held = True
    group.brokers.failing |= {"send_back": CallTimeout("late"), "send_to_retry": CallTimeout("late")}
    group.brokers.send(A, b"0")
    group.brokers.send(A, b"1", b"2", b"bad")
    group.time.advance(0.1)
    group.workers[0].let_go()
    group.time.advance(5.1)
    assert group.bodies() == [b"0", b"1", b"2", b"bad", b"bad"]
    held = consumer._running.state.queues[A]
    assert (held.count, held.last_consume_ms) == (1, int(group.time.now * 1000) - 100)


def test_last_attempt_counts_local_retries_and_makes_dead_letter(
    group: GroupBench, caplog: pytest.LogCaptureFixture
) -> None:
    """The log names a dead letter, so there is one."""
    group.brokers.failing |= {"send_back": CallTimeout("late"), "send_to_retry": CallTimeout("late")}
    started(group, lambda messages, context: context.retry(), max_retries=1)
    group.brokers.send(A, b"0")
    group.time.advance(4)
    group.brokers.failing.clear()
    group.time.advance(60)
    assert group.got == [("m1", b"0", 0), ("m1", b"0", 1)]
    assert [dead.body for dead in group.brokers.dead] == [b"0"]
    assert caplog.text.count("is a dead letter now") == 1


@pytest.mark.parametrize("fails", [False, True])
def test_message_of_a_hanging_listener_goes_to_the_retry_topic(group: GroupBench, fails: bool) -> None:
    """Once, also when it fails in the end; as it was stored, whatever the listener has made of it."""
    inside, go_on = threading.Event(), threading.Event()

    def listener(messages: Any, context: Any) -> Any:
        if messages[0].body == b"hangs" and not messages[0].reconsume_times:
            messages[0].body = b"changed"
            inside.set()
            assert go_on.wait(60)
            return context.retry() if fails else None
        return None

    _consumer, port = started(group, listener, consume_timeout_s=60.0)
    hanging: list[threading.Thread] = []
    workers, submit = group.workers[0], group.workers[0].submit

    def beside(work: Any) -> None:
        thread = threading.Thread(target=work)
        hanging.append(thread)
        thread.start()

    workers.submit = beside  # type: ignore[method-assign]
    group.brokers.send(A, b"hangs")
    group.time.advance(0.1)
    assert inside.wait(60)
    workers.submit = submit  # type: ignore[method-assign]
    group.brokers.send(A, b"next")
    group.time.advance(130)
    assert port.seen("send_back") == [(b"hangs", 3, 16)]
    assert ("m1", b"hangs", 1) in group.got
    group.brokers.send(A, b"after")
    group.time.advance(6)
    assert group.brokers.offsets[A] == 3
    go_on.set()
    hanging[0].join(60)
    assert port.seen("send_back") == [(b"hangs", 3, 16)]


@pytest.mark.parametrize("error", [*RAISED, Textless()], ids=lambda error: type(error).__name__)
def test_whatever_a_listener_raises_is_a_failed_message(error: BaseException) -> None:
    held, queue, workers = MemberState(Thresholds()), ProcessQueue(QUEUE), ListenerPool("w", 4)
    held.queues[QUEUE] = queue
    back: list[int] = []
    send_back: Any = lambda message, level: not back.append(message.queue_offset)  # noqa: E731 - it is to be true
    consuming = ConcurrentConsumeService(
        raising(error), ConsumerSettings(group="g"), held, workers, Timer("t"), send_back, KeyedExecutor()
    )
    queue.put(messages(*range(20)))
    consuming.submit(queue, messages(*range(20)))
    eventually(lambda: queue.count == 0)
    assert sorted(back) == list(range(20))
    assert sum(thread.name.startswith("w-") for thread in threading.enumerate()) == 4
    assert (held.stats().failed, held.offsets.get(QUEUE), consuming.unfinished_messages()) == (20, 20, [])
    assert workers.close(Deadline.after(30))


@pytest.mark.parametrize(
    "does",
    [
        lambda messages, context: context.retry("3"),
        lambda messages, context: context.retry(None),
        lambda messages, context: setattr(context, "ack_index", 0.5),
        lambda messages, context: setattr(context, "delay_level", "3"),
        lambda messages, context: Textless(),
        lambda messages, context: messages.pop(0),
    ],
)
def test_wrong_return_fails_the_message_and_not_the_queue(group: GroupBench, does: Any) -> None:
    consumer, port = started(group, lambda found, context: does(found, context) if found[0].body == b"bad" else None)
    group.brokers.send(A, b"bad", b"good")
    group.time.advance(0.1)
    assert port.seen("send_back") == [(b"bad", 0, 16)]
    assert consumer.stats().cached == 0
    consumer.stop()
    assert group.brokers.offsets[A] == 2


def test_what_cannot_even_be_handed_back_comes_again(group: GroupBench, caplog: pytest.LogCaptureFixture) -> None:
    """Whatever the reason, a bug of ours too: the message is not lost, and neither is the offset of its queue."""
    consumer, port = started(group, lambda messages, context: context.retry())
    port.send_back = raising(SystemExit("a bug"))
    group.brokers.send(A, b"bad")
    group.time.advance(0.1)
    assert "could not be returned to the broker" in caplog.text
    del port.send_back
    group.time.advance(5.1)
    assert [(body, times) for _, body, times in group.got] == [(b"bad", 0), (b"bad", 1)]
    assert consumer.stats().cached == 0


def test_a_log_handler_that_raises_costs_no_message(group: GroupBench) -> None:
    consumer, port = started(group, lambda messages, context: 1 / 0)

    class Breaks(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            raise fails.pop()

    fails: list[BaseException] = [SystemExit("no log")]
    handler, log = Breaks(logging.WARNING), logging.getLogger("rocketmq_spark.consumer.concurrent")
    log.addHandler(handler)
    try:
        group.brokers.send(A, b"bad")
        with contextlib.suppress(IndexError):
            group.time.advance(0.1)
    finally:
        log.removeHandler(handler)
    assert fails == []
    group.time.advance(6)
    assert port.seen("send_back") == [(b"bad", 0, 16)]
    assert consumer.stats().cached == 0


def test_message_timeout_counts_from_the_start_of_its_call(group: GroupBench, monkeypatch: pytest.MonkeyPatch) -> None:
    consumer, port = started(group, consume_timeout_s=60.0)
    consuming = consumer._running._consume_service
    monkeypatch.setattr(consuming, "_finish", lambda *given: None)  # as if the thread had gone
    group.brokers.send(A, b"lost")
    group.time.advance(1)
    monkeypatch.undo()
    assert consumer.stats().cached == 1
    group.time.advance(130)
    assert port.seen("send_back") == [(b"lost", 3, 16)]
    assert ("m1", b"lost", 1) in group.got


def test_late_message_refused_by_brokers_is_tried_once_per_run(
    group: GroupBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is the first one of its queue again, and each try may take its time from the storing of offsets, which it holds up."""
    consumer, port = started(group, consume_timeout_s=60.0)
    # As if the listener had it still.
    monkeypatch.setattr(consumer._running._consume_service, "_finish", lambda *given: None)
    group.brokers.send(A, b"slow", b"slower")
    group.time.advance(1)
    monkeypatch.undo()
    group.brokers.failing |= {"send_back": CallTimeout("late"), "send_to_retry": CallTimeout("late")}
    for runs in (0, 1, 2):
        assert len(port.seen("send_back")) == len(port.seen("send_to_retry")) == runs
        group.time.advance(60 + 60 * (not runs))
    group.brokers.send(A, b"quick")
    group.time.advance(30)
    assert (group.bodies()[-1], consumer.stats().cached, group.brokers.offsets[A]) == (b"quick", 2, 0)
    group.brokers.failing.clear()
    group.time.advance(61)
    assert [body for body, *_ in port.seen("send_back")] == [b"slow", b"slow", b"slow", b"slow", b"slower"]
    assert (consumer.stats().cached, group.brokers.offsets[A]) == (0, 3)


def test_redelivered_message_that_takes_too_long_is_sent_back(
    group: GroupBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    def listener(messages: Any, context: Any) -> Any:
        group.time.now += 0.25
        return None if messages[0].reconsume_times else context.retry()

    consumer, port = started(group, listener, consume_timeout_s=60.0)
    group.brokers.failing |= {"send_back": CallTimeout("late"), "send_to_retry": CallTimeout("late")}
    group.brokers.send(A, b"slow")
    group.time.advance(1)
    assert consumer.stats().topics["T"].consume_ms == 250.0
    group.brokers.failing.clear()
    # As if the listener had it still.
    monkeypatch.setattr(consumer._running._consume_service, "_finish", lambda *given: None)
    group.time.advance(6)
    monkeypatch.undo()
    group.time.advance(130)
    assert port.seen("send_back") == [(b"slow", 0, 16), (b"slow", 3, 16)]
    assert consumer.stats().cached == 0


@pytest.mark.parametrize("clustering", [True, False])
def test_log_says_whether_a_late_message_is_sent_back_or_dropped(
    group: GroupBench, clustering: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch
) -> None:
    consumer, port = started(group, consume_timeout_s=60.0, clustering=clustering, offsets_folder=tmp_path)
    # As if the listener had it still.
    monkeypatch.setattr(consumer._running._consume_service, "_finish", lambda *given: None)
    group.brokers.send(A, b"slow")
    group.time.advance(1)
    monkeypatch.undo()
    group.time.advance(130)
    (text,) = [record.getMessage() for record in caplog.records if "for too long" in record.getMessage()]
    assert text.endswith("it is sent back" if clustering else "it is dropped: the group is broadcasting")
    assert bool(port.seen("send_back")) == clustering
    assert consumer.stats().cached == 0


def test_broadcasting_group_drops_a_failed_message_and_logs_it(
    group: GroupBench, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    _, port = started(group, raising(ZeroDivisionError()), clustering=False, offsets_folder=tmp_path)
    group.brokers.send(A, b"bad")
    group.time.advance(60)
    assert (group.bodies(), port.seen("send_back")) == ([b"bad"], [])
    assert f"message {message(0, b'bad', A).msg_id} failed and is dropped: the group is broadcasting" in caplog.text


@pytest.mark.parametrize("late", [False, True])
def test_results_of_a_queue_that_is_gone_mean_nothing(group: GroupBench, late: bool) -> None:
    def listener(messages: Any, context: Any) -> Any:
        held.dropped = True  # late: dropped while the listener has it
        return context.retry()

    consumer, port = group.start(listener)
    group.time.advance(1)
    group.workers[0].held = True
    group.brokers.send(A, b"1")
    group.time.advance(0.1)
    assert group.workers[0].waiting
    held = consumer._running.state.queues[A]
    held.dropped = not late
    group.workers[0].let_go()
    group.time.advance(0.1)
    assert group.bodies() == ([b"1"] if late else [])
    assert port.seen("send_back") == []
    assert consumer.stats().failed == 0


def test_messages_finished_by_many_threads_at_once_all_count() -> None:
    held, queue, workers = MemberState(Thresholds()), ProcessQueue(QUEUE), ListenerPool("w", 8)
    held.queues[QUEUE] = queue
    called, all_called = itertools.count(1), threading.Event()

    def listener(messages: Any, context: Any) -> None:
        if next(called) == 3000:
            all_called.set()

    often = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        consuming = ConcurrentConsumeService(
            listener, ConsumerSettings(group="g"), held, workers, Timer("t"), None, KeyedExecutor()
        )
        queue.put(messages(*range(3000)))
        consuming.submit(queue, messages(*range(3000)))
        assert all_called.wait(60)
        assert workers.close(Deadline.after(30))
    finally:
        sys.setswitchinterval(often)
    assert (queue.count, held.stats().consumed, held.offsets.get(QUEUE)) == (0, 3000, 3000)
    assert consuming.unfinished_messages() == []


def test_a_batch_that_cannot_be_decoded_stops_no_queue(group: GroupBench) -> None:
    group.brokers.send(A, b"bad", b"good")
    bad = replace(group.brokers.queues[A].messages[0], decode_error="malformed", sys_flag=int(INNER_BATCH_MASK))
    group.brokers.queues[A].messages[0] = bad
    _, port = started(group, lambda messages, context: 1 / 0 if messages[0].decode_error else None)
    group.time.advance(60)
    assert sorted(group.bodies()) == [b"bad", b"good"]
    assert (port.seen("send_back"), port.seen("send_to_retry")) == ([], [b"bad"])
    assert group.brokers.offsets[A] == 2
