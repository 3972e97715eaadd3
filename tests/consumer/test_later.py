"""Listeners whose outcomes come later: what counts when, and what a stop waits for."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from rocketmq_spark.base.clock import Deadline
from rocketmq_spark.base.threads import Failure
from rocketmq_spark.consumer.concurrent import ConcurrentConsumeService
from rocketmq_spark.consumer.listener import DeferredListener, ListenerCall, NextCall
from rocketmq_spark.model.membership import ConsumeDirectly, DirectOutcome
from tests.consumer.group import GroupBench
from tests.consumer.messages import message
from tests.fakes.timer import ManualTimer
from tests.queues import q

A = q("a:0")


class Elsewhere(DeferredListener):
    """A listener whose calls wait until the test takes them, and says what came of them."""

    def __init__(self, *, takes: bool = True) -> None:
        self.takes = takes
        self.turns: list[NextCall] = []
        self.open: list[ListenerCall] = []

    def submit(self, turn: NextCall, times: int, first: bool = False) -> None:
        if not self.takes:
            raise RuntimeError("the event loop is closed")
        self.turns += [turn] * times

    def begin(self, count: int = 1) -> int:
        """Begin so many of those that wait; returns how many may be called."""
        calls = [self.turns.pop(0)() for _ in range(count)]
        begun = [call for call in calls if call is not None]
        self.open += begun
        return len(begun)


def consuming(group: GroupBench) -> ConcurrentConsumeService:
    (consumer,) = group.consumers
    assert consumer._running is not None
    made = consumer._running._consume_service
    assert isinstance(made, ConcurrentConsumeService)
    return made


def test_deferred_outcomes_finish_messages_in_any_order(group: GroupBench) -> None:
    line = Elsewhere()
    consumer, _ = group.start(line)
    group.time.advance(3)
    group.brokers.send(A, b"0", b"1", b"2")
    group.time.advance(1)
    assert line.begin(3) == 3
    assert [call.messages[0].body for call in line.open] == [b"0", b"1", b"2"]
    line.open[2](None)
    line.open[1](None)
    group.time.advance(10)
    assert group.brokers.offsets.get(A, 0) == 0
    assert not consuming(group).wait_for_calls(Deadline.after(0))
    line.open[0](None)
    group.time.advance(10)
    assert group.brokers.offsets[A] == 3
    assert consuming(group).wait_for_calls(Deadline.after(0))
    assert consumer.stats().consumed == 3


@pytest.mark.parametrize("outcome", [Failure(KeyError("k")), "nonsense"])
def test_what_failed_later_comes_again(group: GroupBench, outcome: object) -> None:
    line = Elsewhere()
    group.start(line)
    group.time.advance(3)
    group.brokers.send(A, b"0")
    group.time.advance(1)
    line.begin()
    line.open.pop()(outcome)
    group.time.advance(60)
    line.begin()
    (message,) = line.open[0].messages
    assert (message.body, message.reconsume_times) == (b"0", 1)
    line.open.pop()(None)


def test_what_cannot_wait_has_failed(group: GroupBench) -> None:
    line = Elsewhere(takes=False)
    _, port = group.start(line)
    group.time.advance(3)
    group.brokers.send(A, b"0", b"1")
    group.time.advance(1)
    assert len(port.seen("send_back")) == 2
    assert consuming(group).wait_for_calls(Deadline.after(0))
    line.takes = True
    group.time.advance(60)
    line.begin(2)
    assert sorted((m.body, m.reconsume_times) for call in line.open for m in call.messages) == [(b"0", 1), (b"1", 1)]
    for call in line.open:
        call(None)


def test_a_stop_returns_what_has_no_outcome_yet(group: GroupBench) -> None:
    line = Elsewhere()
    consumer, _ = group.start(line)
    group.time.advance(3)
    group.brokers.send(A, b"0", b"1")
    group.time.advance(1)
    line.begin(2)
    line.open[0](None)
    assert [each.body for each in consumer.stop(0.05)] == [b"1"]
    line.open[1](None)  # too late: the queue is another member's


def test_a_stop_waits_for_what_has_no_outcome_yet(group: GroupBench) -> None:
    line = Elsewhere()
    consumer, _ = group.start(line)
    group.time.advance(3)
    group.brokers.send(A, b"0")
    group.time.advance(1)
    line.begin()
    ManualTimer(group.time).call_later(2.0, lambda: line.open[0](None))
    assert consumer.stop(5.0) == []
    assert group.brokers.offsets[A] == 1


def test_a_message_that_is_to_be_consumed_now_has_its_outcome(group: GroupBench) -> None:
    firsts: list[bool] = []

    class AtOnce(DeferredListener):
        def submit(self, turn: NextCall, times: int, first: bool = False) -> None:
            firsts.append(first)
            for _ in range(times):
                call = turn()
                assert call is not None
                call(None)

    _, port = group.start(AtOnce())
    group.time.advance(3)
    result = port.asked("a:1", ConsumeDirectly(message(7)))
    assert result.outcome is DirectOutcome.SUCCESS
    assert firsts == [True]
    consuming(group)._listener = Elsewhere(takes=False)
    assert port.asked("a:1", ConsumeDirectly(message(7))).outcome is DirectOutcome.THROW_EXCEPTION


def test_nothing_begins_when_the_consumer_stops(group: GroupBench) -> None:
    line = Elsewhere()
    consumer, _ = group.start(line)
    group.time.advance(3)
    group.brokers.send(A, b"0", b"1", b"2")
    group.time.advance(1)
    assert line.begin() == 1
    made = consuming(group)
    made.close()
    assert not made.wait_for_calls(Deadline.after(0))
    assert line.begin(2) == 0
    assert [each.body for each in made.unfinished_messages()] == [b"0"]
    line.open[0](None)
    assert made.wait_for_calls(Deadline.after(0))
    assert consumer.stop(0.05) == []
    assert group.brokers.offsets[A] == 1


def test_a_stop_sees_a_call_that_begins_while_it_closes(group: GroupBench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever looks whether the consumer is closed is among the calls that a stop waits for."""
    line = Elsewhere()
    group.start(line)
    group.time.advance(3)
    group.brokers.send(A, b"0")
    group.time.advance(1)
    made = consuming(group)
    seen: list[bool] = []

    class Looked:
        def __bool__(self) -> bool:
            seen.append(made.wait_for_calls(Deadline.after(0)))
            return False

    monkeypatch.setattr(made, "_closed", Looked())
    assert line.begin() == 1
    assert seen == [False]
    line.open[0](None)


def test_nothing_begins_of_a_queue_that_went_to_another_member(group: GroupBench) -> None:
    line = Elsewhere()
    group.start(line, name="b")
    group.time.advance(3)
    group.brokers.send(A, b"0")
    group.time.advance(1)
    group.start(name="a")
    group.time.advance(40)
    assert group.got == [("a", b"0", 0)]
    assert line.begin() == 0
    assert consuming_of(group, 0).wait_for_calls(Deadline.after(0))


def consuming_of(group: GroupBench, index: int) -> ConcurrentConsumeService:
    running = group.consumers[index]._running
    assert running is not None
    made = running._consume_service
    assert isinstance(made, ConcurrentConsumeService)
    return made


def test_the_time_before_its_turn_is_not_the_listener_s(group: GroupBench) -> None:
    """It was sent back after ``consumeTimeout``, and then the listener got it, too."""
    line = Elsewhere()
    consumer, port = group.start(line)
    group.time.advance(3)
    group.brokers.send(A, b"0")
    group.time.advance(2000)
    assert not port.seen("send_back")
    assert line.begin() == 1
    group.time.advance(850)
    assert not port.seen("send_back")
    group.time.advance(1000)
    assert port.seen("send_back")
    line.open[0](None)
    consumer.stop(0.05)


def test_stop_ends_the_wait_for_a_directly_consumed_message(group: GroupBench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rocketmq_spark.consumer.concurrent._CLOSED_CHECK_INTERVAL_S", 0.01)
    begun, results = threading.Event(), list[Any]()

    class Silent(DeferredListener):
        def submit(self, turn: NextCall, times: int, first: bool = False) -> None:
            begun.set()

    consumer, port = group.start(Silent())
    asked = port.asked
    asking = threading.Thread(target=lambda: results.append(asked("a:1", ConsumeDirectly(message(7)))), daemon=True)
    asking.start()
    assert begun.wait(60)
    consumer.stop(0.05)
    asking.join(60)
    assert [result.outcome for result in results] == [DirectOutcome.THROW_EXCEPTION]
