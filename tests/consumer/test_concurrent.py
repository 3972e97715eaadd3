from __future__ import annotations

import itertools
import sys
import threading
from typing import Any

import pytest

from rocketmq_spark.clock import Deadline
from rocketmq_spark.consumer.concurrent import Concurrent
from rocketmq_spark.consumer.flow import Thresholds
from rocketmq_spark.consumer.held import Held
from rocketmq_spark.consumer.process_queue import ProcessQueue
from rocketmq_spark.consumer.settings import ConsumerSettings
from rocketmq_spark.consumer.workers import Workers
from rocketmq_spark.errors import CallTimeout
from rocketmq_spark.timer import Timer
from tests.consumer.group import GroupBench
from tests.consumer.messages import QUEUE, messages
from tests.queues import q

A = q("a:0")


def started(group: GroupBench, listener: Any = None, **how: Any) -> Any:
    """A member that pulls already."""
    consumer, port = group.start(listener, **how)
    group.time.advance(1)
    return consumer, port


def test_1_16_listeners_get_slices_of_a_pull(group: GroupBench) -> None:
    sizes: list[int] = []
    started(group, lambda messages, context: sizes.append(len(messages)), consume_batch_max_size=10)
    group.brokers.send(A, *(b"x" for _ in range(32)))
    group.time.advance(1)
    assert sum(sizes) == 32
    assert max(sizes) == 10


def test_1_30_a_slow_listener_stops_the_pulls_at_the_bound_and_holds_up_nobody(group: GroupBench) -> None:
    consumer, port = started(group)
    group.workers[0].held = True
    group.brokers.send(A, *(b"x" for _ in range(3000)))
    group.time.advance(5)
    assert 1000 < consumer.stats()["cached"] <= 1000 + 32
    pulled = sum(request.queue == A for request in port.seen("pull"))
    group.time.advance(5)
    assert sum(request.queue == A for request in port.seen("pull")) == pulled
    group.workers[0].let_go()
    group.time.advance(60)
    assert len(group.got) == 3000
    assert consumer.stats()["cached"] == 0


def test_1_20_only_what_comes_after_the_ack_index_fails(group: GroupBench) -> None:
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
    assert (stats["consumed"], stats["failed"]) == (3, 2)


def test_1_21_what_nobody_takes_back_comes_again_in_five_seconds_and_holds_the_offset(group: GroupBench) -> None:
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
    assert consumer.stats()["cached"] == 0


def test_1_18_a_listener_that_hangs_loses_its_message_to_the_retry_topic(group: GroupBench) -> None:
    inside, go_on = threading.Event(), threading.Event()

    def listener(messages: Any, context: Any) -> None:
        if messages[0].body == b"hangs" and not messages[0].reconsume_times:
            inside.set()
            assert go_on.wait(10)

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
    assert inside.wait(5)
    workers.submit = submit  # type: ignore[method-assign]
    group.brokers.send(A, b"next")
    group.time.advance(130)
    assert port.seen("send_back") == [(b"hangs", 3, 16)]
    assert ("m1", b"hangs", 1) in group.got
    group.brokers.send(A, b"after")
    group.time.advance(6)
    assert group.brokers.offsets[A] == 3
    go_on.set()
    hanging[0].join(5)
    assert port.seen("send_back") == [(b"hangs", 3, 16)]


@pytest.mark.parametrize("late", [False, True])
def test_4_17_results_of_a_queue_that_is_gone_mean_nothing(group: GroupBench, late: bool) -> None:
    consumer, port = started(group, lambda messages, context: context.retry())
    group.workers[0].held = True
    group.brokers.send(A, b"1")
    group.time.advance(0.1)
    held = consumer._running.held.queues[A]
    if late:  # dropped while the listener has it

        def dropping(messages: Any, context: Any) -> Any:
            held.dropped = True
            return context.retry()

        consuming = consumer._running._consuming
        assert isinstance(consuming, Concurrent)
        consuming._listener = dropping
    else:
        held.dropped = True
    group.workers[0].let_go()
    group.time.advance(0.1)
    assert port.seen("send_back") == []
    assert consumer.stats()["failed"] == 0


def test_what_many_threads_finish_at_once_is_noted_to_the_last_message() -> None:
    held, queue, workers = Held(Thresholds()), ProcessQueue(QUEUE), Workers("w", 8)
    held.queues[QUEUE] = queue
    called, all_called = itertools.count(1), threading.Event()

    def listener(messages: Any, context: Any) -> None:
        if next(called) == 3000:
            all_called.set()

    often = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        consuming = Concurrent(listener, ConsumerSettings(group="g"), held, workers, Timer("t"), None)
        queue.put(messages(*range(3000)))
        consuming.submit(queue, messages(*range(3000)))
        assert all_called.wait(30)
        assert workers.close(Deadline.after(30))
    finally:
        sys.setswitchinterval(often)
    assert (queue.count, held.stats().consumed, held.offsets.get(QUEUE)) == (0, 3000, 3000)
    assert consuming.unfinished() == []
