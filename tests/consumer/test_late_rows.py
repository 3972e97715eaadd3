"""A call that takes too long and then fails: its rows are sent back by two threads, each row by one of them."""

from __future__ import annotations

import threading
from collections import Counter
from typing import Any

import pytest

from rocketmq_spark.base.threads import KeyedExecutor
from rocketmq_spark.errors import CallTimeout
from tests.consumer.group import GroupBench
from tests.consumer.test_arrow import A, arrow, numbers, started
from tests.mockbroker import eventually
from tests.queues import q

__all__ = ["arrow"]

B = q("b:0")


class Door:
    """A lock that says when somebody waits for it."""

    def __init__(self) -> None:
        self.lock, self.waits = threading.Lock(), threading.Event()

    def __enter__(self) -> None:
        if not self.lock.acquire(blocking=False):
            self.waits.set()
            assert self.lock.acquire(timeout=60)

    def __exit__(self, *error: object) -> None:
        self.lock.release()


def hanging(arrow: GroupBench, rows: int = 3) -> tuple[Any, Any, threading.Event]:
    """A member whose listener hangs with so many rows until it may go on, and then fails."""
    inside, go_on = threading.Event(), threading.Event()

    def listener(batch: Any, context: Any) -> Any:
        if context.queue != A:
            return None
        inside.set()
        assert go_on.wait(60)
        return context.retry()

    consumer, port = started(arrow, listener, consume_timeout_s=60.0)
    arrow.workers[0].threads = []
    arrow.brokers.send(A, *numbers(rows))
    arrow.time.advance(0.1)
    assert inside.wait(60)
    return consumer, port, go_on


def test_failed_call_does_not_send_late_rows_back_twice(arrow: GroupBench) -> None:
    consumer, port, go_on = hanging(arrow)
    running, door = consumer._running, Door()
    running._consume_service._return_locks[running.state.queues[A]] = door
    (thread,) = arrow.workers[0].threads or []
    send_back = port.send_back

    def first(*given: Any) -> None:
        port.send_back = send_back
        send_back(*given)
        go_on.set()
        eventually(lambda: door.waits.is_set() or not thread.is_alive(), 60)

    port.send_back = first
    arrow.time.advance(121)
    thread.join(60)
    assert Counter(body for body, _, _ in port.seen("send_back")) == Counter(numbers(3))
    arrow.time.advance(10)
    assert arrow.brokers.offsets[A] == 3
    assert consumer.stats().failed == 3


def test_rows_that_are_on_their_way_back_are_not_late(arrow: GroupBench) -> None:
    _, port, go_on = hanging(arrow)
    (thread,) = arrow.workers[0].threads or []
    send_back, sending, over = port.send_back, threading.Event(), threading.Event()

    def slow(*given: Any) -> None:
        sending.set()
        assert over.wait(60)
        send_back(*given)

    port.send_back = slow
    go_on.set()
    assert sending.wait(60)
    port.send_back = send_back
    arrow.time.advance(121)
    assert port.seen("send_back") == []
    over.set()
    thread.join(60)
    assert Counter(body for body, _, _ in port.seen("send_back")) == Counter(numbers(3))
    arrow.time.advance(10)
    assert arrow.brokers.offsets[A] == 3


def test_sending_late_rows_back_delays_no_commit_of_other_queues(arrow: GroupBench) -> None:
    arrow.aside = KeyedExecutor
    _, port, go_on = hanging(arrow)
    send_back, sending, goes_through = port.send_back, threading.Event(), threading.Event()

    def slow(*given: Any) -> None:
        sending.set()
        assert goes_through.wait(10)
        send_back(*given)

    port.send_back = slow
    arrow.time.advance(121)
    assert sending.wait(60)
    arrow.brokers.send(B, b"x")
    arrow.time.advance(0.1)
    for thread in arrow.workers[0].threads[1:]:
        thread.join(60)
    arrow.time.advance(10)
    assert arrow.brokers.offsets[B] == 1
    assert arrow.brokers.offsets[A] == 0
    goes_through.set()
    eventually(lambda: len(port.seen("send_back")) == 3, 60)
    go_on.set()


def test_late_rows_of_one_queue_do_not_wait_for_those_of_another(arrow: GroupBench) -> None:
    arrow.aside = KeyedExecutor
    go_on, goes_through = threading.Event(), threading.Event()
    _, port = started(arrow, lambda batch, context: go_on.wait(60) and None, consume_timeout_s=60.0)
    send_back = port.send_back

    def slow_at_a(group: str, message: Any, *how: Any) -> None:
        if message.queue == A:
            assert goes_through.wait(10)
        send_back(group, message, *how)

    port.send_back = slow_at_a
    arrow.workers[0].threads = []
    arrow.brokers.send(A, *numbers(3))
    arrow.brokers.send(B, b"x")
    arrow.time.advance(121)
    eventually(lambda: [body for body, _, _ in port.seen("send_back")] == [b"x"], 60)
    goes_through.set()
    eventually(lambda: len(port.seen("send_back")) == 4, 60)
    go_on.set()


def test_a_call_that_fails_in_time_does_not_wait_for_late_rows(arrow: GroupBench) -> None:
    arrow.aside = KeyedExecutor
    _, port, go_on = hanging(arrow)
    send_back, sending, goes_through = port.send_back, threading.Event(), threading.Event()

    def slow_at_first(group: str, message: Any, *how: Any) -> None:
        if message.body == b"0":
            sending.set()
            assert goes_through.wait(10)
        send_back(group, message, *how)

    port.send_back = slow_at_first
    arrow.time.advance(121)
    assert sending.wait(60)
    go_on.set()  # later calls fail at once
    arrow.brokers.send(A, b"quick")
    arrow.time.advance(0.1)
    eventually(lambda: [body for body, _, _ in port.seen("send_back")] == [b"quick"], 60)
    goes_through.set()
    eventually(lambda: len(port.seen("send_back")) == 4, 60)


def test_late_call_that_succeeds_stops_sending_its_rows_back(arrow: GroupBench) -> None:
    inside, go_on = threading.Event(), threading.Event()

    def listener(batch: Any, context: Any) -> None:
        if context.queue == A:
            inside.set()
            assert go_on.wait(60)

    _, port = started(arrow, listener, consume_timeout_s=60.0)
    arrow.workers[0].threads = []
    arrow.brokers.send(A, *numbers(3))
    arrow.time.advance(0.1)
    assert inside.wait(60)
    (thread,) = arrow.workers[0].threads
    send_back = port.send_back

    def first(*given: Any) -> None:
        send_back(*given)
        go_on.set()
        thread.join(60)

    port.send_back = first
    arrow.time.advance(121)
    assert [body for body, _, _ in port.seen("send_back")] == [b"0"]
    arrow.time.advance(10)
    assert arrow.brokers.offsets[A] == 3


@pytest.mark.parametrize("ordered", [False, True])
def test_failed_call_gives_up_a_hanging_broker_after_few_rows(arrow: GroupBench, ordered: bool) -> None:
    tried = list[bytes]()

    def hangs(group: str, message: Any, *how: Any) -> None:
        tried.append(message.body)
        arrow.time.now += 4.0
        raise CallTimeout("not in time")

    how = {"ordered": True, "max_retries": 0} if ordered else {}
    _, port = started(arrow, lambda batch, context: context.retry(), **how)
    port.send_back = port.send_to_retry = hangs
    arrow.brokers.send(A, *numbers(9))
    arrow.time.advance(0.1)
    assert tried == [body for body in numbers(2) for _ in range(2)]


def test_hanging_broker_is_tried_with_only_some_late_rows(arrow: GroupBench) -> None:
    _, port, go_on = hanging(arrow, 9)
    (thread,) = arrow.workers[0].threads or []
    send_back, tried = port.send_back, list[bytes]()
    arrow.brokers.failing["send_to_retry"] = CallTimeout("not in time")

    def hangs(group: str, message: Any, *how: Any) -> None:
        tried.append(message.body)
        arrow.time.now += 4.0
        raise CallTimeout("not in time")

    port.send_back = hangs
    arrow.time.advance(121)
    assert tried == numbers(3), "after ten seconds it is left alone"
    port.send_back = send_back
    arrow.brokers.failing.clear()
    go_on.set()
    thread.join(60)
    arrow.time.advance(10)
    assert Counter(body for body, _, _ in port.seen("send_back")) == Counter(numbers(9))
    assert arrow.brokers.offsets[A] == 9
