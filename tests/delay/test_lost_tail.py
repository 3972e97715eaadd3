"""A broker that lost its last messages, and numbers of a node that was killed while it committed them."""

from __future__ import annotations

import shutil

import pytest

from rocketmq_spark.delay import service
from tests.delay.nodes import QUEUES, Node, World, envelope

ONE = QUEUES[0]


@pytest.fixture
def two(world: World, monkeypatch: pytest.MonkeyPatch) -> tuple[Node, Node]:
    """Node ``a`` has read ten messages, and was killed; ``b`` has not begun, and there are twenty."""
    monkeypatch.setattr(service, "JOIN_S", 0.0)
    monkeypatch.setattr(service, "RECREATION_CHECK_S", 0.0)
    monkeypatch.setattr(service, "PAGE", 1)
    a, b = world.node("a"), world.node("b")
    for count in (10, 20):
        for i in range(count - 10, count):
            world.topic.put(envelope(f"m{i}", 1000))
        if count == 10:
            turns(a, 12)
            a.kill()
    return a, b


def turns(node: Node, count: int) -> None:
    for _ in range(count):
        node.turn(ONE)


def sent_in_the_end(world: World, node: Node) -> set[bytes]:
    for _ in range(3):
        world.time.advance(2000)
        turns(node, 3)
    return set(node.sends.bodies)


def bodies(name: str, count: int) -> set[bytes]:
    return {f"{name}{i}".encode() for i in range(count)}


@pytest.mark.parametrize("loses_disk", [False, True])
@pytest.mark.parametrize("is_killed", [False, True])
def test_messages_that_the_topic_still_has_are_sent(
    world: World, two: tuple[Node, Node], is_killed: bool, loses_disk: bool
) -> None:
    """A node that returned had not read as far as another one before it, and so not what is before the lost messages."""
    a, b = two
    turns(b, 24)
    for _ in range(3):
        b.turn()
    turns(a, 3)
    assert (len(a.store), world.offsets()[:2]) == (12, (0, 20))
    if is_killed:
        a.kill()
    world.topic.lose_last(5)
    for i in range(5):
        world.topic.put(envelope(f"n{i}", 1000))
    turns(a, 30)
    assert world.offsets()[0] == 0
    if loses_disk:
        a.store.close()
        shutil.rmtree(a.folder)
        a.open()
        turns(a, 30)
    assert sent_in_the_end(world, a) == bodies("m", 15) | bodies("n", 5)


def test_what_a_node_alone_has_read_stays_a_message_of_its_queue(world: World, two: tuple[Node, Node]) -> None:
    """So what is before the lost messages is not done."""
    a, _ = two
    turns(a, 24)
    world.topic.lose_last(5)
    for i in range(7):
        world.topic.put(envelope(f"n{i}", 1000))
    turns(a, 30)
    assert (len(a.store), world.offsets()[0]) == (20 + 7, 0)
    assert sent_in_the_end(world, a) == bodies("m", 20) | bodies("n", 7)


def test_a_queue_is_read_although_others_committed_no_store_time(world: World, two: tuple[Node, Node]) -> None:
    """The node that has read further was killed between two numbers of its first commit."""
    a, b = two
    world.topic.offsets.clear()
    world.topic.takes = 0
    turns(b, 22)
    world.topic.takes = 2
    turns(b, 1)
    b.kill()
    world.topic.takes = -1
    assert sorted(group for group, _ in world.topic.offsets) == ["g", "g_progress"]
    turns(a, 20)
    assert len(a.store) == 20
    assert sent_in_the_end(world, a) == bodies("m", 20)


def test_a_running_node_reads_on_without_others_store_time(world: World, two: tuple[Node, Node]) -> None:
    a, _ = two
    turns(a, 2)
    assert (len(a.store), world.offsets()[:2]) == (11, (0, 11))
    world.topic.offsets["g_progress", ONE] += 9
    del world.topic.offsets["g_newest_ms", ONE]
    assert world.offsets()[:2] == (0, 20)
    turns(a, 20)
    assert len(a.store) == 20
    assert sent_in_the_end(world, a) == bodies("m", 20)
