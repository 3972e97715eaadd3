"""A queue is handed over in several writes. If one of them fails, or the node is killed between two, nothing is lost."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import pytest

from rocketmq_spark.delay import queue_records
from rocketmq_spark.delay.release import checkpoints_of
from rocketmq_spark.errors import SpoolError
from rocketmq_spark.model import MessageQueue
from rocketmq_spark.spool.database import Database
from tests.delay.nodes import QUEUES, Node, World, envelope

ONE, TWO = QUEUES
COUNT = 6
WRITES = 5  # of a hand-over: two notes, and the records
NAMES = [f"m{i}" for i in range(COUNT)]


class Killed(BaseException):
    """Not an error that a node handles."""


@pytest.fixture
def fails_after(monkeypatch: pytest.MonkeyPatch) -> Callable[[int, BaseException], None]:
    """Lets so many writes through, and then raises an error once. Records are handed over in pairs."""
    monkeypatch.setattr(queue_records, "PAGE", 2)
    write = Database.write

    def plan(writes: int, error: BaseException) -> None:
        left = iter(range(writes))

        def limited(
            self: Database, puts: Iterable[tuple[bytes, bytes]], deletes: Iterable[bytes] = (), sync: bool = False
        ) -> None:
            if next(left, None) is None:
                monkeypatch.setattr(Database, "write", write)
                raise error
            write(self, puts, deletes, sync)

        monkeypatch.setattr(Database, "write", limited)

    return plan


def _begun(world: World, name: str, *queues: MessageQueue) -> Node:
    """A node that has read everything."""
    node = world.node(name)
    for _ in range(COUNT + 3):
        node.turn(*(queues or QUEUES[:1]))
    return node


@pytest.mark.parametrize("other_between", [False, True])
@pytest.mark.parametrize("writes", range(WRITES))
@pytest.mark.parametrize("how", ["killed", "error"])
def test_a_queue_that_comes_back_is_read_again(
    world: World, fails_after: Callable[[int, BaseException], None], how: str, writes: int, other_between: bool
) -> None:
    for name in NAMES:
        world.topic.put(envelope(name, 1000))
    node, error = _begun(world, "a"), Killed() if how == "killed" else SpoolError("the disk is away")
    fails_after(writes, error)
    with pytest.raises(type(error)):
        node.turn()
    if how == "killed":
        node.kill()
    sent = list(node.sends.bodies)
    if other_between:
        other = _begun(world, "b")
        assert len(other.store) == COUNT
        other.turn()
    for _ in range(COUNT + 3):
        node.turn(ONE)
    world.time.advance(1000)
    node.turn(ONE)
    assert sent == []
    assert sorted(node.sends.bodies) == [name.encode() for name in NAMES]
    assert world.offsets()[0] == COUNT


@pytest.mark.parametrize("writes", range(WRITES))
@pytest.mark.parametrize("how", ["killed", "error"])
def test_an_interrupted_hand_over_is_completed(
    world: World, fails_after: Callable[[int, BaseException], None], how: str, writes: int
) -> None:
    """By the next turn, or by the next process; and the next owner reads everything."""
    for name in NAMES:
        world.topic.put(envelope(name, 1000))
    node, error = _begun(world, "a", ONE, TWO), Killed() if how == "killed" else SpoolError("the disk is away")
    fails_after(writes, error)
    with pytest.raises(type(error)):
        node.turn(TWO)
    if how == "killed":
        node.kill()
    for _ in range(3):
        node.turn(TWO)
    assert (len(node.store), ONE in checkpoints_of(node.store.notes()), world.offsets()[0]) == (0, False, 0)
    other = _begun(world, "b")
    world.time.advance(1000)
    assert (node.sends.bodies, sorted(other.sends.bodies)) == ([], [name.encode() for name in NAMES])


@pytest.mark.parametrize("writes", range(WRITES - 1))
def test_records_of_a_topic_that_is_made_again_stay(
    world: World, fails_after: Callable[[int, BaseException], None], writes: int
) -> None:
    """The new topic has other messages at their offsets, so its next owner does not read them."""
    for name in NAMES:
        world.topic.put(envelope(name, 1000))
    node = _begun(world, "a", ONE, TWO)
    fails_after(writes, Killed())
    with pytest.raises(Killed):
        node.turn(TWO)
    node.kill()
    left = len(node.store)
    world.topic.make_again()
    world.topic.put(envelope("new", 1000))
    for _ in range(3):
        node.turn(TWO)
    assert len(node.store) == left > 0
    _begun(world, "b")
    node.turn(TWO)
    for _ in range(3):
        node.turn(ONE, TWO)
    world.time.advance(1000)
    assert set(node.sends.bodies) >= {name.encode() for name in NAMES[-left:]}


def test_a_queue_that_lost_its_last_messages_is_read_again(
    world: World, fails_after: Callable[[int, BaseException], None]
) -> None:
    for name in NAMES:
        world.topic.put(envelope(name, 1000))
    node = _begun(world, "a")
    fails_after(2, Killed())
    with pytest.raises(Killed):
        node.turn()
    node.kill()
    for _ in range(2):
        world.topic.messages[ONE].pop()
        world.topic.times_ms[ONE].pop()
    for i in range(2):
        world.topic.put(envelope(f"new{i}", 1000))
    for _ in range(COUNT + 3):
        node.turn(ONE)
    world.time.advance(1000)
    assert set(node.sends.bodies) == {b"new0", b"new1", *(name.encode() for name in NAMES)}
