"""What exists at a moment."""

from __future__ import annotations

from rocketmq_spark.model import MessageQueue, QueueBounds
from rocketmq_spark.source.view import View

A, B = MessageQueue("t", "a", 0), MessageQueue("t", "b", 0)
BOUNDS = {A: QueueBounds(5, 20, 0), B: QueueBounds(0, 7, 0)}


def test_a_topic_is_lacking_everywhere_or_on_one_broker():
    assert not View(BOUNDS).lacks(A)
    assert View(deleted=frozenset({"t"})).lacks(A)
    forgotten = View(forgotten=frozenset({("t", "a")}))
    assert (forgotten.lacks(A), forgotten.lacks(B)) == (True, False)


def test_slaves_say_what_can_be_read_and_not_what_is_lost():
    view = View(BOUNDS, orphans=frozenset({"b"}))
    assert view.ends() == {A: 20, B: 7}
    assert view.of_masters() == {A: BOUNDS[A]}
