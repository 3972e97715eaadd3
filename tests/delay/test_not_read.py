"""What a node holds of queues that nobody reads any more is sent from there."""

from __future__ import annotations

import pytest

from rocketmq_spark.model import MessageQueue
from tests.delay.nodes import QUEUES, World, envelope

ONE, TWO = QUEUES


@pytest.mark.parametrize("restarted", [False, True])
def test_messages_of_queue_no_longer_read_are_sent_by_old_owner(world: World, restarted: bool) -> None:
    """The topic keeps it, but has no next owner: fewer read queues."""
    first, second = world.node("a"), world.node("b")
    for i in range(2):
        world.topic.put(envelope(f"m{i}", 10 + i), TWO)
    for _ in range(4):
        first.turn(ONE, TWO)
    world.topic.unread.add(TWO)
    if restarted:
        first.kill()
    for _ in range(4):
        first.turn(ONE)
    world.time.advance(10.5)
    first.turn(ONE)
    world.topic.unread.clear()  # read again, by another one
    for _ in range(4):
        first.turn(ONE)
        second.turn(TWO)
    world.time.advance(1)
    second.turn(TWO)
    first.turn(ONE)
    assert (first.sends.bodies, second.sends.bodies[-1:]) == ([b"m0"], [b"m1"])
    assert (len(first.store), len(second.store)) == (0, 0)
    assert restarted or len(second.sends.bodies) == 1


def test_envelopes_of_formerly_read_inner_topic_are_sent(world: World) -> None:
    """Nobody else reads it."""
    before = MessageQueue("another_inner_topic", "broker-a", 0)
    world.topic.messages[before], world.topic.times_ms[before], world.topic.first[before] = [], [], 0
    node = world.node("a")
    world.topic.put(envelope("m", 10), before)
    for _ in range(4):
        node.turn(before)
    node.kill()
    for _ in range(4):
        node.turn(ONE)
    world.time.advance(11)
    node.turn(ONE)
    assert node.sends.bodies == [b"m"]
