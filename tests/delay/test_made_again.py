"""An inner topic that is made again: what nodes tell each other is of the messages that they read, and of no others."""

from __future__ import annotations

import logging

import pytest

from rocketmq_spark.delay import service
from rocketmq_spark.errors import RocketMQError, ServerFault, TopicNotFound
from rocketmq_spark.model import MessageQueue
from rocketmq_spark.spool.records import IDENTITY, TARGET_RULES_NOTE, SpoolOwner
from rocketmq_spark.spool.store import Store
from tests.delay.nodes import OTHER, QUEUES, Node, Topic, World, envelope
from tests.helpers import raising

ONE, TWO = QUEUES


def turns(world: World, name: str, count: int) -> None:
    for _ in range(count):
        world.nodes[name].turn(ONE)


def test_progress_of_old_topic_committed_on_new_one_is_ignored(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its node goes on telling before it hears of it, and the queue goes to another one."""
    monkeypatch.setattr(service, "COMMIT_CHECK_S", 3600.0)
    world.node("a")
    world.node("b")
    world.topic.put(envelope("sent", 1))
    world.topic.put(envelope("sent later", 3))
    world.topic.put(envelope("waits", 500))
    turns(world, "a", 5)
    world.time.advance(2)
    turns(world, "a", 2)
    world.topic.make_again()
    world.time.advance(2)
    turns(world, "a", 2)
    assert world.offsets()[:2] == (2, 3), "told on the new one"
    for i in range(4):
        world.topic.put(envelope(f"new{i}", 20))
    turns(world, "b", 8)
    world.nodes["a"].turn()
    world.time.advance(30)
    turns(world, "b", 2)
    assert sorted(world.nodes["b"].sends.bodies) == [b"new%d" % i for i in range(4)]


@pytest.mark.parametrize("empty", [False, True])
def test_offsets_broker_keeps_for_recreated_topic_are_ignored(world: World, empty: bool) -> None:
    """Brokers before 5 do. The next owner sought an offset that the new one does not have, again and again."""
    world.node("a")
    for i in range(4):
        world.topic.put(envelope(f"old{i}", 1))
    turns(world, "a", 6)
    world.time.advance(2)
    turns(world, "a", 2)
    world.nodes["a"].service.close()
    told = dict(world.topic.offsets)
    world.topic.make_again()
    world.topic.offsets |= told
    world.node("b")
    if not empty:
        world.topic.put(envelope("new0", 9))
    turns(world, "b", 2)
    for i in range(1, 6):
        world.topic.put(envelope(f"new{i}", 9))
    turns(world, "b", 9)
    world.time.advance(30)
    turns(world, "b", 2)
    assert set(world.nodes["b"].sends.bodies) >= {b"new%d" % i for i in range(empty, 6)}


def test_earlier_release_progress_beyond_queue_end_is_ignored(world: World) -> None:
    """It did not tell by when it had read."""
    for group, number in (("g", 5), ("g_stored", 5), ("g_done_ms", 1)):
        world.topic.offsets[group, ONE] = number
    for i in range(3):
        world.topic.put(envelope(f"new{i}", 5))
    world.node("a")
    turns(world, "a", 6)
    world.time.advance(10)
    turns(world, "a", 1)
    assert sorted(world.nodes["a"].sends.bodies) == [b"new0", b"new1", b"new2"]


def test_earlier_release_progress_up_to_queue_end_is_trusted(world: World) -> None:
    for i in range(3):
        world.topic.put(envelope(f"old{i}", 5))
    for group, number in (("g", 3), ("g_stored", 3), ("g_done_ms", 1)):
        world.topic.offsets[group, ONE] = number
    world.node("a")
    turns(world, "a", 3)
    world.topic.put(envelope("new", 5))
    turns(world, "a", 3)
    world.time.advance(10)
    turns(world, "a", 1)
    assert world.nodes["a"].sends.bodies == [b"new"]


@pytest.mark.parametrize("another", [False, True])
def test_queue_empty_at_start_detects_recreated_topic(
    world: World, another: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Its broker had removed them, and so knew nothing by which to tell a topic that is made again."""
    caplog.set_level(logging.WARNING)
    for i in range(5):
        world.topic.put(envelope(f"gone{i}", 1))
    world.topic.first[ONE] = 5
    name = "a"
    world.node("a")
    turns(world, "a", 3)
    world.nodes["a"].kill()
    turns(world, "a", 3)
    assert not caplog.records, "it is the same topic"
    if another:
        world.nodes["a"].service.close()
        name = "b"
        world.node("b")
        turns(world, "b", 2)
    world.topic.make_again()
    for i in range(7):
        world.topic.put(envelope(f"new{i}", 5))
    world.nodes[name].reader.at[ONE] = 0  # a pull says that the offset is beyond the end
    turns(world, name, 11)
    world.time.advance(10)
    turns(world, name, 1)
    assert sorted(world.nodes[name].sends.bodies) == [b"new%d" % i for i in range(7)]


def test_a_queue_of_which_nothing_is_left_is_not_another_one(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever its broker answers when it is asked what it stored after a moment."""
    world.node("a")
    world.topic.put(envelope("m", 500))
    turns(world, "a", 4)
    world.topic.first[ONE] = 1
    monkeypatch.setattr(world.topic, "search_offset", lambda queue, epoch_ms, deadline, group: 0)
    world.nodes["a"].kill()
    turns(world, "a", 3)
    assert world.nodes["a"].service._checkpoints[ONE].read_end == 1
    world.time.advance(600)
    turns(world, "a", 1)
    assert world.nodes["a"].sends.bodies == [b"m"]


@pytest.mark.parametrize("more", [1, 3, 9])
@pytest.mark.parametrize("at", ["where it was", "at the new end"])
def test_running_node_reads_recreated_topic_from_beginning(
    world: World, more: int, at: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its pull waits on the broker meanwhile, and goes on behind what was read, or at the new end: so do real brokers answer."""
    monkeypatch.setattr(service, "RECREATION_CHECK_S", 0.0)
    node = world.node("a")
    for i in range(3):
        world.topic.put(envelope(f"old{i}", 1))
    turns(world, "a", 5)
    world.time.advance(2)
    turns(world, "a", 2)
    world.topic.make_again()
    for i in range(more):
        world.topic.put(envelope(f"new{i}", 9))
    node.reader.at[ONE] = min(3, more) if at == "where it was" else more
    turns(world, "a", more + 4)
    world.time.advance(10)
    turns(world, "a", 1)
    assert sorted(node.sends.bodies[3:]) == [b"new%d" % i for i in range(more)]


@pytest.mark.parametrize("error", [TopicNotFound, ServerFault])
def test_queue_whose_recreation_check_fails_is_read_again(
    world: World, monkeypatch: pytest.MonkeyPatch, error: type[RocketMQError]
) -> None:
    """It may be of a topic that was made again."""
    node = world.node("a")
    world.topic.put(envelope("m0", 1))
    turns(world, "a", 3)
    world.topic.put(envelope("m1", 1))
    with monkeypatch.context() as patch:
        patch.setattr(world.topic, "search_offset", raising(error("not now")))
        node.service._check_recreation({ONE})
        assert not node.service._checkpoints
    turns(world, "a", 3)
    world.time.advance(2)
    turns(world, "a", 1)
    assert sorted(node.sends.bodies) == [b"m0", b"m1"]


def test_nothing_is_begun_again_while_a_topic_is_the_same(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where its first messages are gone, and a broker gives an offset of before."""
    monkeypatch.setattr(service, "RECREATION_CHECK_S", 0.0)
    world.node("a")
    for i in range(3):
        world.topic.put(envelope(f"m{i}", 500))
    turns(world, "a", 6)
    begin = world.nodes["a"].service._start
    begun = []

    def noting(queue: MessageQueue) -> None:
        begun.append(queue)
        begin(queue)

    monkeypatch.setattr(world.nodes["a"].service, "_start", noting)
    turns(world, "a", 3)
    world.topic.put(envelope("m3", 500))
    turns(world, "a", 3)
    world.topic.first[ONE] = 4
    monkeypatch.setattr(world.topic, "search_offset", lambda queue, epoch_ms, deadline, group: 2)
    turns(world, "a", 3)
    assert begun == []


ANOTHER = SpoolOwner(("another:1",), "")


@pytest.mark.parametrize("more", [0, 2, 9])
def test_messages_of_other_cluster_ignore_queue_of_same_name(world: World, more: int) -> None:
    """What is told of that queue, and its next owner, know nothing of them."""
    topic = world.topic
    for i in range(5):
        topic.put(envelope(f"old{i}", 100))
    world.node("a")
    turns(world, "a", 8)
    world.nodes["b"] = other = Node(Topic(), world.nodes["a"].folder.with_name("b"), world.time)
    other.topic.now_ms += 7777
    for i in range(more):
        other.topic.put(envelope(f"new{i}", 0))
    for _ in range(more + 3):
        other.turn(ONE)
    other.turn()
    other.service.close()
    node = assigned(world, other.topic)
    for _ in range(4):
        node.turn(ONE)
    for _ in range(4):
        node.turn(TWO)
    assert len(node.store) == 5
    world.time.advance(101)
    node.turn(TWO)
    assert sorted(node.sends.bodies) == [f"old{i}".encode() for i in range(5)]


@pytest.mark.parametrize("mine", [True, False])
def test_messages_assigned_to_their_own_cluster_move_with_queue(world: World, mine: bool) -> None:
    for i in range(5):
        world.topic.put(envelope(f"m{i}", 100))
    world.node("a")
    turns(world, "a", 8)
    world.nodes["a"].store.add([], {TARGET_RULES_NOTE: b"rules"})
    node, other = assigned(world, world.topic), world.node("b")
    assert all(TARGET_RULES_NOTE not in name for name in node.store.notes())
    if mine:
        for _ in range(3):
            node.turn(ONE)
        assert len(node.store) == 5
    for _ in range(8):
        node.turn(TWO)
        other.turn(ONE)
    assert (len(node.store), len(other.store)) == (0, 5)


def test_after_damage_what_was_assigned_is_read_again(world: World) -> None:
    world.topic.put(envelope("m", 100))
    world.node("a")
    turns(world, "a", 3)
    node = assigned(world, world.topic)
    node.store.damage_count += 1
    node.store.drop_records([(IDENTITY, place) for place in node.store.places(IDENTITY)])
    for _ in range(4):
        node.turn(ONE)
    assert len(node.store) == 1


def assigned(world: World, topic: Topic) -> Node:
    """Node ``a`` after ``spool assign``, with the topic of the cluster that its folder was assigned to."""
    node = world.nodes["a"]
    node.store.set_owner(SpoolOwner(("one:1",), ""))
    node.service.close()
    store = Store(node.folder, sync="never")
    store.set_owner(ANOTHER, force=True)
    store.close()
    node.topic = topic
    node.open()
    return node


def test_a_topic_that_is_made_again_does_not_delay_others(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its messages are being read, and all queues are started again at this moment, after an error."""
    for i in range(5):
        world.topic.put(envelope(f"old{i}", 500))
    world.topic.put(envelope("m", 1), OTHER)
    node = world.node("a")
    node.turn(ONE, OTHER)
    world.topic.make_again()
    with monkeypatch.context() as patch:
        patch.setattr(node.reader, "poll", raising(TopicNotFound("no topic")))
        with pytest.raises(TopicNotFound):
            node.turn(ONE, OTHER)
    for _ in range(4):
        node.turn(ONE, OTHER)
    world.time.advance(2)
    node.turn(ONE, OTHER)
    assert node.sends.bodies == [b"m"]


def test_what_was_committed_of_an_old_topic_proves_nothing_now(world: World) -> None:
    """The next node of the queue had not read it yet. What is no envelope is due at 0, so it would seem done."""
    first, second = world.node("a"), world.node("b")
    world.topic.put(envelope("waits", 500))
    for i in range(3):
        world.topic.put(envelope(f"old{i}", 1))
    for _ in range(5):
        first.turn(ONE)
    world.time.advance(2)
    first.turn(ONE)
    assert world.offsets()[:2] == (0, 4)
    first.store.close()
    second.reader.pause(ONE)
    second.turn(ONE)
    world.topic.make_again()
    second.reader.resume(ONE)
    for i in range(3):
        world.topic.put(f"new{i}".encode())
    for _ in range(8):
        second.turn(ONE)
    assert [body for body in second.sends.bodies if body.startswith(b"new")] == [b"new0", b"new1", b"new2"]
