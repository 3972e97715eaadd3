"""Listeners whose outcomes come later: what counts when, and what a stop waits for."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

from rocketmq_spark.base.clock import Deadline
from rocketmq_spark.base.threads import Failure
from rocketmq_spark.consumer.push.concurrent import Concurrent
from rocketmq_spark.consumer.result import OutcomeLater, TakesOutcome
from rocketmq_spark.model.membership import ConsumeDirectly, DirectOutcome
from tests.consumer.group import GroupBench
from tests.consumer.messages import message
from tests.producer.scripted import ManualTimer
from tests.queues import q

A = q("a:0")


class Outcomes:
    """A listener that says nothing yet; the test says it for each call."""

    def __init__(self) -> None:
        self.open: list[Callable[[object], None]] = []

    def __call__(self, messages: Any, context: Any) -> OutcomeLater:
        return OutcomeLater(self.open.append)


def consuming(group: GroupBench) -> Concurrent:
    (consumer,) = group.consumers
    assert consumer._running is not None
    made = consumer._running._consuming
    assert isinstance(made, Concurrent)
    return made


def test_messages_are_done_when_their_outcome_is_there_and_in_any_order(group: GroupBench) -> None:
    outcomes = Outcomes()
    consumer, _ = group.start(outcomes)
    group.time.advance(3)
    group.brokers.send(A, b"0", b"1", b"2")
    group.time.advance(1)
    assert len(outcomes.open) == 3
    outcomes.open[2](None)
    outcomes.open[1](None)
    group.time.advance(10)
    assert group.brokers.offsets.get(A, 0) == 0
    assert not consuming(group).idle(Deadline.after(0))
    outcomes.open[0](None)
    group.time.advance(10)
    assert group.brokers.offsets[A] == 3
    assert consuming(group).idle(Deadline.after(0))
    assert consumer.stats().consumed == 3


@pytest.mark.parametrize("outcome", [Failure(KeyError("k")), "nonsense"])
def test_what_failed_later_comes_again(group: GroupBench, outcome: object) -> None:
    outcomes = Outcomes()
    group.start(outcomes)
    group.time.advance(3)
    group.brokers.send(A, b"0")
    group.time.advance(1)
    outcomes.open.pop()(outcome)
    group.time.advance(60)
    assert group.got[-1][1:] == (b"0", 1)
    outcomes.open.pop()(None)


def test_what_cannot_be_begun_has_failed(group: GroupBench) -> None:
    def closed(done: Callable[[object], None]) -> None:
        raise RuntimeError("the event loop is closed")

    group.start(lambda messages, context: OutcomeLater(closed) if not messages[0].reconsume_times else None)
    group.time.advance(3)
    group.brokers.send(A, b"0")
    group.time.advance(60)
    assert [times for _, _, times in group.got] == [0, 1]
    assert consuming(group).idle(Deadline.after(0))


def test_a_stop_returns_what_has_no_outcome_yet(group: GroupBench) -> None:
    outcomes = Outcomes()
    consumer, _ = group.start(outcomes)
    group.time.advance(3)
    group.brokers.send(A, b"0", b"1")
    group.time.advance(1)
    outcomes.open[0](None)
    assert [each.body for each in consumer.stop(0.05)] == [b"1"]
    outcomes.open[1](None)  # too late: the queue is another member's


def test_a_stop_waits_for_what_has_no_outcome_yet(group: GroupBench) -> None:
    outcomes = Outcomes()
    consumer, _ = group.start(outcomes)
    group.time.advance(3)
    group.brokers.send(A, b"0")
    group.time.advance(1)
    ManualTimer(group.time).later(2.0, lambda: outcomes.open[0](None))
    assert consumer.stop(5.0) == []
    assert group.brokers.offsets[A] == 1


def test_a_message_that_is_to_be_consumed_now_has_its_outcome(group: GroupBench) -> None:
    _, port = group.start(lambda messages, context: OutcomeLater(lambda done: done(None)))
    group.time.advance(3)
    result = port.asked("a:1", ConsumeDirectly(message(7)))
    assert result.outcome is DirectOutcome.SUCCESS

    def closed(done: Callable[[object], None]) -> None:
        raise RuntimeError("closed")

    consuming(group)._listener = lambda messages, context: OutcomeLater(closed)
    assert port.asked("a:1", ConsumeDirectly(message(7))).outcome is DirectOutcome.THROW_EXCEPTION


class InLine(Outcomes):
    """A listener that has a line of its own."""

    def __call__(self, messages: Any, context: Any) -> OutcomeLater:
        return OutcomeLater(self.open.append, waits=True)

    def begins(self, index: int) -> bool:
        taker = self.open[index]
        assert isinstance(taker, TakesOutcome)
        return taker.begins()


def test_a_listener_with_a_line_begins_nothing_when_its_consumer_stops(group: GroupBench) -> None:
    line = InLine()
    consumer, _ = group.start(line)
    group.time.advance(3)
    group.brokers.send(A, b"0", b"1", b"2")
    group.time.advance(1)
    assert line.begins(0)
    made = consuming(group)
    made.close()
    assert not made.idle(Deadline.after(0))
    assert [line.begins(1), line.begins(2)] == [False, False]
    assert [each.body for each in made.unfinished()] == [b"0"]
    line.open[0](None)
    assert made.idle(Deadline.after(0))
    assert consumer.stop(0.05) == []
    assert group.brokers.offsets[A] == 1


def test_a_listener_with_a_line_begins_nothing_of_a_queue_that_went_to_another_member(group: GroupBench) -> None:
    line = InLine()
    group.start(line, name="b")
    group.time.advance(3)
    group.brokers.send(A, b"0")
    group.time.advance(1)
    group.start(name="a")
    group.time.advance(40)
    assert group.got == [("b", b"0", 0), ("a", b"0", 0)]
    assert not line.begins(0)
    assert consuming_of(group, 0).idle(Deadline.after(0))


def consuming_of(group: GroupBench, index: int) -> Concurrent:
    running = group.consumers[index]._running
    assert running is not None
    made = running._consuming
    assert isinstance(made, Concurrent)
    return made


def test_the_time_in_a_line_is_not_the_listener_s(group: GroupBench) -> None:
    """It was sent back after ``consumeTimeout``, and then the listener got it, too."""
    line = InLine()
    consumer, port = group.start(line)
    group.time.advance(3)
    group.brokers.send(A, b"0")
    group.time.advance(2000)
    assert not port.seen("send_back")
    assert line.begins(0)
    group.time.advance(850)
    assert not port.seen("send_back")
    group.time.advance(1000)
    assert port.seen("send_back")
    line.open[0](None)
    consumer.stop(0.05)


def test_a_message_that_is_consumed_now_is_waited_for_until_the_consumer_stops(
    group: GroupBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rocketmq_spark.consumer.push.concurrent._ASK_S", 0.01)
    begun, results = threading.Event(), list[Any]()
    consumer, port = group.start(lambda messages, context: OutcomeLater(lambda done: begun.set()))
    asked = port.asked
    asking = threading.Thread(target=lambda: results.append(asked("a:1", ConsumeDirectly(message(7)))), daemon=True)
    asking.start()
    assert begun.wait(60)
    consumer.stop(0.05)
    asking.join(60)
    assert [result.outcome for result in results] == [DirectOutcome.THROW_EXCEPTION]
