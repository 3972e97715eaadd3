"""Nodes that come and go, and disks that are lost: holes (f) and (g) of the list G3. The stores are real."""

from __future__ import annotations

from collections import Counter

import pytest

from rocketmq_spark.base.clock import Deadline
from rocketmq_spark.delay import service
from rocketmq_spark.delay.release import checkpoints_of
from rocketmq_spark.model import MessageQueue, Resent
from rocketmq_spark.spool.records import TOTALS
from rocketmq_spark.wire.envelope import INNER_TOPIC
from tests.delay.nodes import QUEUES, Node, World, envelope

ONE, TWO = QUEUES


def test_lost_disk_is_rebuilt_from_topic_without_sent_messages(world: World) -> None:
    node = world.node("a")
    for name, seconds in (("far", 1000), ("m1", 1), ("m2", 2), ("late", 500)):
        world.topic.put(envelope(name, seconds))
    for _ in range(5):
        node.turn(ONE)
    world.time.advance(10)
    node.turn(ONE)
    assert (node.sends.bodies, world.offsets()[0]) == ([b"m1", b"m2"], 0)
    node.store.close()
    fresh = world.node("fresh")
    for _ in range(6):
        fresh.turn(ONE)
    world.time.advance(1000)
    assert fresh.sends.bodies == [b"late", b"far"]
    fresh.turn(ONE)
    assert world.offsets()[0] == 4


def test_a_lost_disk_loses_no_message_that_has_a_copy_left(world: World) -> None:
    """A repeated send stored a second copy in another queue; the first one goes, with its broker or by retention."""
    a = world.node("a")
    for queue in (ONE, TWO):
        world.topic.put(envelope("m", 500), queue)
    for _ in range(6):
        a.turn(ONE, TWO)
    assert (world.offsets(ONE)[:2], world.offsets(TWO)[:2]) == ((0, 1), (0, 1))
    world.topic.first[ONE] = 1
    b = world.node("b")
    for _ in range(6):
        b.turn(ONE, TWO)
    world.time.advance(600)
    for _ in range(3):
        b.turn(ONE, TWO)
    assert b.sends.bodies == [b"m"]
    assert world.offsets(TWO)[0] == 1


def test_a_queue_without_messages_delays_no_other(world: World) -> None:
    """Retention has deleted all that was not done."""
    a = world.node("a")
    for queue in (ONE, TWO):
        world.topic.put(envelope(str(queue.queue_id), 500), queue)
    for _ in range(6):
        a.turn(ONE, TWO)
    world.topic.first[ONE] = 1
    b = world.node("b")
    for _ in range(3):
        b.turn(ONE, TWO)
    world.time.advance(600)
    b.turn(ONE, TWO)
    assert b.sends.bodies == [b"1"]


def test_a_message_of_two_queues_stays_with_one_of_them(world: World) -> None:
    """Else the commits of the queue that stays would pass its copy, which is the only one when the other goes."""
    a = world.node("a")
    for queue in (ONE, TWO):
        world.topic.put(envelope("m", 500), queue)
    for _ in range(6):
        a.turn(ONE, TWO)
    for _ in range(3):
        a.turn(TWO)
    assert (a.service.waiting_count, world.offsets(TWO)[0]) == (1, 0)
    for _ in range(3):
        a.turn()
    assert a.service.waiting_count == 0, "the next owners read both copies"


def test_envelopes_expired_from_inner_topic_are_reported(world: World, caplog: pytest.LogCaptureFixture) -> None:
    """The disk that has them sends them all the same."""
    node = world.node("a")
    world.topic.put(envelope("m", 5 * 3600))
    node.turn(ONE)
    node.turn(ONE)
    assert "a message waits for 5.0 hours, but broker-a keeps messages for 1.0" in caplog.text
    world.topic.first[ONE] = 1
    node.kill()
    node.turn(ONE)
    world.time.advance(5 * 3600)
    assert node.sends.bodies == [b"m"]
    world.topic.offsets[("g", ONE)] = 0
    fresh = world.node("fresh")
    fresh.turn(ONE)
    assert "begins at 1, and envelopes from 0 on are not done" in caplog.text


def test_queue_handover_between_nodes_sends_nothing_twice(world: World) -> None:
    one, two = world.node("one"), world.node("two")
    names = [f"m{i}" for i in range(20)]
    for i, name in enumerate(names):
        world.topic.put(envelope(name, 2 * i + 1), QUEUES[i % 2])
    for _ in range(12):
        one.turn(ONE, TWO)
    world.time.advance(10)  # some are sent
    one.turn(ONE, TWO)
    one.turn(ONE)  # another node has come
    for _ in range(12):
        two.turn(TWO)
    world.time.advance(10)
    for node, queues in ((one, [ONE]), (two, [TWO])):
        node.turn(*queues)
    two.turn()  # and gone
    for _ in range(12):
        one.turn(ONE, TWO)
    world.time.advance(30)
    one.turn(ONE, TWO)
    assert len(one.store) == len(two.store) == 0
    assert two.sends.bodies
    assert Counter(one.sends.bodies + two.sends.bodies) == Counter(name.encode() for name in names)


def test_a_node_that_is_closed_tells_what_was_answered_at_last(world: World) -> None:
    """Told before what is under way has its end, the next node would send that again."""
    one, two = world.node("one"), world.node("two")
    one.sends.answer = lambda send: None
    for name in ("m0", "m1"):  # of two topics, each of which gets one message until it answers
        world.topic.put(envelope(name, 1, name))
    for _ in range(3):
        one.turn(ONE)
    world.time.advance(2)
    assert one.sends.bodies == [b"m0", b"m1"]
    while one.sends.waiting:
        one.sends.waiting.pop(0)(Resent(MessageQueue("orders", "broker-a", 0)))
    one.service.close()
    for _ in range(3):
        two.turn(ONE)
    world.time.advance(10)
    assert (world.offsets()[0], two.sends.bodies) == (2, [])


@pytest.mark.parametrize("fails", ["for a moment", "for good", "the last time"])
def test_a_message_that_is_out_when_its_queue_goes_goes_with_it(world: World, fails: str) -> None:
    """Else the node without the queue sends it once more, hours later, or reports that it was given up."""
    a, b = world.node("a"), world.node("b")
    down = Resent(None, "down", is_temporary=fails != "for good")
    a.sends.answer = lambda send: down if fails == "the last time" and len(a.sends.sent) < 11 else None
    world.topic.put(envelope("m", 5))
    for _ in range(2):
        a.turn(ONE)
    world.time.advance(6000)
    tried = len(a.sends.sent)
    assert tried == (11 if fails == "the last time" else 1)
    for _ in range(3):
        a.turn(TWO)
        b.turn(ONE)
    assert b.sends.bodies == [b"m"]
    a.sends.waiting.pop(0)(down)
    world.time.advance(6000)
    a.turn(TWO)
    assert ([send.topic for send in a.sends.sent], a.service.waiting_count) == (["orders"] * tried, 0)
    assert (a.store.totals.dead, a.store.totals.give_ups) == (0, 0)


def test_successor_of_dead_node_repeats_only_uncommitted_sends(world: World) -> None:
    one, two = world.node("one"), world.node("two")
    for i in range(6):
        world.topic.put(envelope(f"m{i}", i + 1))
    for _ in range(7):
        one.turn(ONE)
    world.time.advance(2)
    one.turn(ONE)
    world.time.advance(1)  # sent, and not told
    one.store.close()
    for _ in range(7):
        two.turn(ONE)
    world.time.advance(10)
    assert one.sends.bodies == [b"m0", b"m1", b"m2"]
    assert two.sends.bodies == [b"m2", b"m3", b"m4", b"m5"]


def test_envelope_next_owner_cannot_read_is_sent_by_old_owner(world: World) -> None:
    node = world.node("a")
    for name in ("m0", "m1"):
        world.topic.put(envelope(name, 100))
    for _ in range(3):
        node.turn(ONE)
    world.topic.first[ONE] = 1
    node.turn()
    assert len(node.store) == 1
    world.time.advance(100)
    assert node.sends.bodies == [b"m0"]


def test_who_was_away_for_long_puts_nothing_back(world: World) -> None:
    """A machine that slept says nothing of queues that another one has had since, though it did more than it said."""
    one, two = world.node("one"), world.node("two")
    one.sends.answer = lambda send: None if send.msg_ids == ("m1",) else Resent(send.queue)
    for i in range(2):
        world.topic.put(envelope(f"m{i}", i + 1))
    for node in (one, one, one, two, two, two):
        node.turn(ONE)
    world.time.advance(3)
    two.turn(ONE)
    after = world.offsets()
    assert after[0] == 2
    one.turn()
    assert (one.sends.bodies, world.offsets()) == ([b"m0", b"m1"], after)


def test_what_is_read_once_more_counts_once(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """As when a queue goes and comes back between two looks; brokers were not told yet."""
    node = world.node("a")
    for name, seconds in (("far", 100), ("m", 1)):
        world.topic.put(envelope(name, seconds))
    for _ in range(2):
        node.turn(ONE)
    world.topic.silent = True
    world.time.advance(1)
    monkeypatch.setattr(service, "PAGE", 1)
    node.reader.at[ONE] = 0
    for _ in range(2):
        node.turn(ONE)
        assert node.service._checkpoints[ONE].read_end == 2
    world.time.advance(1)
    assert node.sends.bodies == [b"m"]


def test_what_came_before_a_queue_was_begun_comes_again(world: World) -> None:
    node = world.node("a")
    for i in range(4):
        world.topic.put(envelope(f"m{i}", 1))
    node.reader.at = {ONE: 3}  # where the group was when it was asked first
    for _ in range(2):
        node.service.turn()
    world.time.advance(1)
    assert sorted(node.sends.bodies) == [b"m0", b"m1", b"m2", b"m3"]


def _one_killed(world: World, due: int) -> tuple[Node, Node]:
    """Of two nodes that shared the queues, with a message in each: the other has both now."""
    one, two = world.node("one"), world.node("two")
    for queue in QUEUES:
        world.topic.put(envelope(f"m{queue.queue_id}", due), queue)
    for _ in range(3):
        one.turn(ONE, TWO)
    one.kill()
    for _ in range(3):
        two.turn(TWO)
    return one, two


def test_node_sends_nothing_before_it_knows_progress_of_others(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    one, two = _one_killed(world, due=10)
    world.time.advance(10)
    two.turn(TWO)
    monkeypatch.setattr(service, "HAND_OVER_S", 60.0)
    for _ in range(3):
        one.turn(ONE, TWO)
    assert (one.sends.bodies, two.sends.bodies) == ([], [b"m1"])
    one.service._queues_to_start[TWO] = Deadline(0.0)
    for _ in range(2):
        one.turn(ONE, TWO)
    assert one.sends.bodies == [b"m0"]


def test_a_restart_leaves_what_went_to_others_meanwhile(world: World) -> None:
    one, two = _one_killed(world, due=100)
    one.turn(ONE)
    assert (len(one.store), len(two.store)) == (1, 1)
    world.time.advance(100)
    assert sorted(one.sends.bodies + two.sends.bodies) == [b"m0", b"m1"]


def test_a_node_without_queues_sends_what_only_it_has(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    node = world.node("a")
    world.topic.put(envelope("m", 5))
    node.turn(ONE)
    node.turn(ONE)
    world.topic.first[ONE] = 1
    node.kill()
    node.turn()
    assert node.sends.bodies == []
    monkeypatch.setattr(node.service, "_join_deadline", Deadline(0.0))
    world.time.advance(5)
    node.turn()
    assert node.sends.bodies == [b"m"]


def test_previous_owner_of_queue_gets_time_to_commit_progress(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service, "HAND_OVER_S", 60.0)
    one, two = world.node("one"), world.node("two")
    for i in range(3):
        world.topic.put(envelope(f"m{i}", i + 1))
    for _ in range(3):
        one.turn(ONE)
    for _ in range(3):
        two.turn(ONE)  # nothing of it is read yet
    world.time.advance(2)
    one.turn()  # it hears of it now
    assert one.sends.bodies == [b"m0", b"m1"]
    two.service._queues_to_start[ONE] = Deadline(0.0)
    for _ in range(3):
        two.turn(ONE)
    world.time.advance(2)
    assert two.sends.bodies == [b"m2"]
    two.turn(ONE)
    two.kill()
    two.turn(ONE)
    assert two.service._checkpoints, "its own queue it has at once"


@pytest.mark.parametrize("when", ["it runs", "it is away"])
@pytest.mark.parametrize("more", [1, 9])
def test_recreated_inner_topic_is_read_from_beginning(world: World, when: str, more: int) -> None:
    """Whether it has fewer messages or more than the node had read; what waits of the old one is sent, too."""
    node = world.node("a")
    for i in range(4):
        world.topic.put(envelope(f"old{i}", 50 if i else 1))
    for _ in range(6):
        node.turn(ONE)
    world.time.advance(2)
    node.turn(ONE)
    assert node.sends.bodies == [b"old0"]
    world.topic.make_again()
    for i in range(more):
        world.topic.put(envelope(f"new{i}", 60))
    if when == "it is away":
        node.kill()
    else:
        node.reader.at[ONE] = 0  # a pull says that the offset is beyond the end
    for _ in range(2 * more + 4):
        node.turn(ONE)
    assert world.offsets()[:2] == (0, more)
    assert len(node.store) == 3 + more
    world.time.advance(100)
    for _ in range(3):
        node.turn(ONE)
    assert sorted(node.sends.bodies) == sorted(
        [*(b"old%d" % i for i in range(4)), *(b"new%d" % i for i in range(more))]
    )
    assert world.offsets()[0] == more


def test_messages_replacing_lost_ones_of_broker_are_read(world: World) -> None:
    node = world.node("a")
    for i in range(6):
        world.topic.put(envelope(f"m{i}", 1))
    for _ in range(8):
        node.turn(ONE)
    world.time.advance(2)
    node.turn(ONE)
    assert len(node.sends.bodies) == 6
    for _ in range(2):
        world.topic.messages[ONE].pop()
        world.topic.times_ms[ONE].pop()
    for i in range(3):
        world.topic.put(envelope(f"n{i}", 5))
    node.kill()
    for _ in range(6):
        node.turn(ONE)
    world.time.advance(10)
    node.turn(ONE)
    assert sorted(node.sends.bodies) == [b"m0", b"m1", b"m2", b"m3", b"m4", b"m5", b"n0", b"n1", b"n2"]


def test_progress_of_other_node_on_recreated_topic_is_kept(world: World) -> None:
    first, second = world.node("a"), world.node("b")
    for i in range(4):
        world.topic.put(envelope(f"old{i}", 500))
    for _ in range(6):
        first.turn(ONE)
    first.service.close()
    world.topic.make_again()
    for i in range(6):
        world.topic.put(envelope(f"new{i}", 1 if i < 2 else 20))
    for _ in range(8):
        second.turn(ONE)
    world.time.advance(3)
    second.turn(ONE)
    second.turn(ONE)
    assert second.sends.bodies == [b"new0", b"new1"]
    second.service.close()
    first.open()
    for _ in range(8):
        first.turn(ONE)
    world.time.advance(30)
    for _ in range(3):
        first.turn(ONE)
    assert sorted(first.sends.bodies) == [b"new2", b"new3", b"new4", b"new5"]


def test_the_name_of_a_broker_may_have_a_slash(world: World) -> None:
    queue = MessageQueue(INNER_TOPIC, "eu/broker-a", 3)
    world.topic.messages[queue], world.topic.times_ms[queue], world.topic.first[queue] = [], [], 0
    world.topic.put(envelope("m", 5), queue)
    node = world.node("a")
    for _ in range(3):
        node.turn(queue)
    node.kill()
    node.turn(queue)
    assert list(checkpoints_of(node.store.notes())) == [queue]
    world.time.advance(6)
    node.turn(queue)
    assert node.sends.bodies == [b"m"]


@pytest.mark.parametrize("damaged", [False, True])
def test_what_came_back_from_the_dead_outlives_its_queue(world: World, damaged: bool) -> None:
    """The next owner begins behind it, so nobody else has it: a try that fails must not give it its old place again."""
    node = world.node("a")
    node.sends.answer = lambda send: Resent(None, "no permission")
    for _ in range(2):
        node.turn(ONE)
    for name, seconds in (("given up", 1), ("far", 5000)):
        world.topic.put(envelope(name, seconds))
        node.turn(ONE)
    world.time.advance(2)
    node.turn(ONE)
    assert (node.store.totals.dead, world.offsets()[0]) == (1, 1)
    assert node.store.revive(node.now_ms()) == 1
    if damaged:
        node.store._db.write([], [TOTALS])
        node.kill()
    node.sends.answer = lambda send: Resent(None, "busy", is_temporary=True)
    for _ in range(3):
        node.turn(ONE)
        world.time.advance(1)
    assert len(node.store) == 2
    other = world.node("b")
    for _ in range(4):
        node.turn(TWO)
        other.turn(ONE)
    assert (len(node.store), len(other.store)) == (1, 1)
    node.sends.sent.clear()
    node.sends.answer = lambda send: Resent(ONE)
    for _ in range(40):
        world.time.advance(60)
        node.turn(TWO)
    assert node.sends.bodies == [b"given up"]
    node.store.close()


@pytest.mark.parametrize("how", ["its node dies", "its queue changes hands"])
def test_what_is_no_envelope_and_waits_is_the_next_owners(world: World, how: str) -> None:
    """It is due at the first of all moments: that one may not be told as the one up to which all is done."""
    first, second = world.node("a"), world.node("b")
    first.sends.answer = lambda send: Resent(None, "the topic of dead letters has no master", is_temporary=True)
    world.topic.put(b"garbage")
    for _ in range(3):
        first.turn(ONE)
    assert (len(first.sends.sent), world.offsets()) == (1, (0, 1, 0))
    if how == "its node dies":
        first.store.close()
    else:
        first.turn()
        assert len(first.store) == 0
    for _ in range(3):
        second.turn(ONE)
    assert second.sends.bodies == [b"garbage"]


def test_envelopes_only_on_disk_outlive_loss_and_regain_of_queue(world: World) -> None:
    """What the next owner says is done is what it could read."""
    first, second = world.node("a"), world.node("b")
    for i in range(3):
        world.topic.put(envelope(f"old{i}", 5000))
        first.turn(ONE)
    first.turn(ONE)
    world.topic.first[ONE] = 2
    first.turn()
    assert len(first.store) == 2
    world.topic.put(envelope("new", 6000))
    for _ in range(4):
        second.turn(ONE)
    assert world.offsets()[0] == 2
    second.turn()
    for _ in range(3):
        first.turn(ONE)
    assert (len(first.store), len(second.store)) == (4, 0)
    world.time.advance(7000)
    first.turn(ONE)
    assert sorted(first.sends.bodies) == [b"new", b"old0", b"old1", b"old2"]


@pytest.mark.parametrize(
    "when", ["before it is read", "while a try of an old one fails", "after a try of an old one failed"]
)
def test_envelopes_of_old_inner_topic_outlive_revoked_queue(world: World, when: str) -> None:
    """The new topic has other messages at these offsets: they are nobody's but this node's."""
    first, second = world.node("a"), world.node("b")
    for i in range(3):
        world.topic.put(envelope(f"old{i}", 10, f"orders{i}"))
        first.turn(ONE)
    first.turn(ONE)
    if when.startswith("while"):
        first.sends.answer = lambda send: None
        world.time.advance(11)
        first.turn(ONE)
        assert len(first.sends.waiting) == 3
    world.topic.make_again()
    for i in range(4):
        world.topic.put(envelope(f"new{i}", 500))
    if not when.startswith("before"):
        first.reader.at[ONE] = 0
        for _ in range(8):
            first.turn(ONE)
        assert len(first.store) == 7
        first.sends.answer = lambda send: Resent(None, "busy", is_temporary=True)
        world.time.advance(11)
        while first.sends.waiting:
            first.sends.waiting.pop(0)(Resent(None, "busy", is_temporary=True))
        first.turn(ONE)
    first.turn()
    assert len(first.store) == 3
    for _ in range(6):
        second.turn(ONE)
    first.sends.answer = lambda send: Resent(MessageQueue(send.topic, "broker-a", 0))
    for _ in range(30):
        world.time.advance(20)
        first.turn()
        second.turn(ONE)
    assert {b"old0", b"old1", b"old2"} <= set(first.sends.bodies)
    assert sorted(second.sends.bodies) == [b"new0", b"new1", b"new2", b"new3"]
    assert (len(first.store), first.store.totals.size) == (0, 0)


def test_node_that_read_nothing_detects_recreated_inner_topic(world: World) -> None:
    """It began behind all that was done, and took what lay at the same offsets for the same."""
    first, second = world.node("a"), world.node("b")
    for i in range(4):
        world.topic.put(envelope(f"old{i}", -1))
        first.turn(ONE)
    for _ in range(2):
        first.turn(ONE)
    first.turn()
    for _ in range(2):
        second.turn(ONE)
    assert second.service._checkpoints[ONE].newest_store_ms == world.topic.times_ms[ONE][3]
    world.topic.make_again()
    for i in range(6):
        world.topic.put(envelope(f"new{i}", 5))
    second.reader.at[ONE] = 0
    for _ in range(9):
        second.turn(ONE)
    world.time.advance(6)
    second.turn(ONE)
    assert sorted(second.sends.bodies) == [b"new%d" % i for i in range(6)]
