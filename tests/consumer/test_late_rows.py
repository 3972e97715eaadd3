"""A call that takes too long and then fails: its rows are sent back by two threads, each row by one of them."""

from __future__ import annotations

import threading
from collections import Counter
from typing import Any

from rocketmq_spark.errors import CallTimeout
from tests.consumer.group import GroupBench
from tests.consumer.test_arrow import A, arrow, numbers, started
from tests.mockbroker import eventually

__all__ = ["arrow"]


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


def test_a_call_that_fails_while_its_rows_are_sent_back_sends_none_of_them_again(arrow: GroupBench) -> None:
    consumer, port, go_on = hanging(arrow)
    consumer._running._consuming._returning = door = Door()
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


def test_a_broker_that_hangs_is_tried_with_some_of_many_late_rows(arrow: GroupBench) -> None:
    """The offsets of other queues are stored by the same thread."""
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
