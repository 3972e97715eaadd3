"""Topics that were deleted and made again: which queues can be checked, and what decides."""

from __future__ import annotations

import pytest

from rocketmq_spark.clock import Deadline
from rocketmq_spark.model import MessageQueue, QueueBounds
from rocketmq_spark.source.loss import recreated, suspects
from rocketmq_spark.source.offsets import Offsets

A, B = MessageQueue("t", "b", 0), MessageQueue("t", "b", 1)


class Brokers:
    """Says where messages younger than a time begin, and when messages were stored."""

    def __init__(self, younger, stored=None):
        self.younger, self.stored, self.asked = younger, stored or {}, []

    def search_offsets(self, times_ms, deadline):
        self.asked.append(dict(times_ms))
        return {queue: self.younger[queue] for queue in times_ms}

    def store_time_ms(self, group, queue, offset, deadline):
        return self.stored.get((queue, offset))


def found(younger, stored=None, mark=1000, position=10):
    client = Brokers({A: younger}, stored)
    result = recreated(client, "g", {A: position}, {A: mark}, Deadline.after(1))
    assert client.asked == [{A: mark + 1}]
    return result


def test_younger_messages_after_the_position_are_new_ones():
    assert found(10) == []
    assert found(15) == []


def test_younger_messages_before_the_position_are_another_topics():
    assert found(0, {(A, 9): 2000}) == [A]


@pytest.mark.parametrize("stored", [{(A, 9): 1000}, {(A, 9): 400}, {}])
def test_the_message_before_the_position_has_the_last_word(stored):
    """Clocks of masters differ; after a fail-over times may run backwards."""
    assert found(5, stored) == []


def test_without_suspects_nobody_is_asked():
    assert recreated(Brokers({}), "g", {}, {}, Deadline.after(1)) == []


@pytest.mark.parametrize(
    ("position", "low", "high", "suspected"),
    [(5, 0, 9, True), (9, 0, 9, True), (10, 0, 9, False), (5, 5, 9, False), (0, 0, 9, False)],
)
def test_a_mark_can_be_checked_where_the_last_message_read_still_is(position, low, high, suspected):
    offsets = Offsets({A: position}, marks={A: 1000})
    assert suspects(offsets, {A: QueueBounds(low, high, 0)}) == ({A: 1000} if suspected else {})


def test_only_the_queues_that_are_asked_for():
    offsets = Offsets({A: 5, B: 5}, marks={A: 1, B: 2})
    bounds = dict.fromkeys((A, B), QueueBounds(0, 9, 0))
    assert suspects(offsets, bounds) == {A: 1, B: 2}
    assert suspects(offsets, bounds, {B}) == {B: 2}
    assert suspects(offsets, {A: bounds[A]}) == {A: 1}
