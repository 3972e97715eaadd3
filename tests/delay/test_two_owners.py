"""Two nodes that both commit the progress of a queue, since one of them stood still, or is of an earlier release."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rocketmq_spark.base.clock import Deadline
from rocketmq_spark.delay import service
from rocketmq_spark.delay.commits import CommittedOffsets, CommittedProgress, GroupNames
from rocketmq_spark.delay.release import Progress, note_name
from rocketmq_spark.errors import RocketMQError
from rocketmq_spark.model import MessageQueue, Resent, SpooledSend
from tests.delay.nodes import QUEUES, START_MS, Node, Topic, World, envelope

ONE, TWO = QUEUES
GROUPS = GroupNames("g").all_groups
EARLIER = ("g", "g_stored", "g_done_ms", "g_newest_ms")
BASE = 1 << 40


def earlier_progress(topic: Topic, queue: MessageQueue = ONE) -> Progress | None:
    """The progress as releases up to 0.1 read it."""
    oldest, stored, done_ms, _ = (topic.offsets.get((group, queue)) for group in EARLIER)
    return None if oldest is None else Progress(oldest, oldest if stored is None else stored, done_ms or 0)


def commit_as_earlier(topic: Topic, progress: Progress, queue: MessageQueue = ONE) -> None:
    newest_store_ms = topic.times_ms[queue][progress.read_end - 1]
    topic.offsets |= {(group, queue): at for group, at in zip(EARLIER, (*progress, newest_store_ms), strict=True)}


def frozen(node: Node) -> None:
    """It reads nothing, and has not looked at the numbers of others lately."""
    node.reader.poll = lambda timeout_s=5.0: []  # type: ignore[method-assign]
    for shared in node.service._commit_states.values():
        shared.next_check_deadline = Deadline.after(3600)


def away(*names: str) -> Any:
    def answer(send: SpooledSend) -> Resent:
        is_away = send.msg_ids[0] in names
        return Resent(None, "no master", is_temporary=True) if is_away else Resent(ONE)

    return answer


COMMITTED = st.builds(
    lambda oldest, more, done_ms, newest_store_ms: CommittedProgress(Progress(oldest, oldest + more, done_ms), newest_store_ms),
    st.integers(BASE, BASE + 2**29), st.integers(0, 2**29), st.integers(1_600_000_000_000, 1_600_000_000_000 + 5000),
    st.integers(0, 2**42),
)  # fmt: skip


@given(COMMITTED)
def test_committed_numbers_are_read_as_they_were_written(committed: CommittedProgress) -> None:
    numbers = committed.encode()
    assert all(0 <= number < 1 << 63 for number in numbers)
    assert CommittedProgress.decode(numbers) == committed


@given(COMMITTED, COMMITTED, st.lists(st.booleans(), min_size=4, max_size=4), st.data())
def test_mixed_progress_of_two_nodes_claims_no_more_than_either(
    one: CommittedProgress, two: CommittedProgress, whose: list[bool], data: st.DataObject
) -> None:
    mixed = CommittedOffsets(
        *(b if other else a for a, b, other in zip(one.encode(), two.encode(), whose, strict=True))
    )
    found = CommittedProgress.decode(mixed).progress
    ends = [
        each for progress in (one.progress, two.progress, found) for each in (progress.oldest_offset, progress.read_end)
    ]
    offset = data.draw(st.sampled_from(ends)) + data.draw(st.integers(-1, 1))
    moments = [progress.done_ms for progress in (one.progress, two.progress, found)]
    due_ms = data.draw(st.sampled_from(moments)) + data.draw(st.sampled_from((-1000, -1, 0, 1, 1000)))
    if found.is_done(offset, due_ms):
        assert one.progress.is_done(offset, due_ms) or two.progress.is_done(offset, due_ms)


def test_a_progress_that_is_too_long_is_cut() -> None:
    claims = CommittedProgress.decode(CommittedProgress(Progress(5, 1 << 40, 1 << 62), 7).encode()).progress
    assert claims.oldest_offset == 5
    assert 5 < claims.read_end < 1 << 40
    assert claims.done_ms < 1 << 62


@pytest.mark.parametrize("after", GROUPS)
def test_nodes_that_commit_at_the_same_moment_lose_nothing(world: World, after: str) -> None:
    """The four commits of one that wakes fall between two of the other one, which has an overdue message."""
    a, b, c = world.node("a"), world.node("b"), world.node("c")
    for name, seconds in (("far", 10_000), ("early", 55)):
        world.topic.put(envelope(name, seconds))
    for _ in range(4):
        a.turn(ONE)
    b.sends.answer = away("OVERDUE")
    world.topic.put(envelope("OVERDUE", 50))
    for _ in range(6):
        b.turn(ONE)
    world.time.advance(60)
    b.turn(ONE)
    world.topic.put(envelope("new", 20_000))
    frozen(a)
    frozen(b)
    b.reader.poll = type(b.reader).poll.__get__(b.reader)  # type: ignore[method-assign]
    commit, woke = world.topic.commit, []

    def between(
        group: str, offsets: Mapping[MessageQueue, int], deadline: Deadline
    ) -> dict[MessageQueue, RocketMQError]:
        errors = commit(group, offsets, deadline)
        if group == after and not woke:
            woke.append(group)
            a.turn(ONE)
        return errors

    world.topic.commit = between  # type: ignore[method-assign]
    b.turn(ONE)
    assert woke
    a.turn()
    for _ in range(3):
        b.turn(ONE)
    b.turn()
    for _ in range(8):
        c.turn(ONE)
    assert b"OVERDUE" in c.sends.bodies


def _reading_as_earlier(world: World) -> tuple[Node, Progress]:
    """A node that sent some and holds others back, and what a node of an earlier release reads of that."""
    node = world.node("a")
    node.sends.answer = away("OVERDUE")
    for name, seconds in (("far", 10_000), ("sent", 55), ("OVERDUE", 50), ("sent, too", 40)):
        world.topic.put(envelope(name, seconds))
    for _ in range(6):
        node.turn(ONE)
    world.time.advance(60)
    world.topic.put(envelope("later", 70))
    for _ in range(3):
        node.turn(ONE)
    assert world.offsets() == (0, 5, START_MS + 49_999)
    found = earlier_progress(world.topic)
    assert found is not None
    return node, found


@pytest.mark.parametrize("before", [None, Progress(0, 3, START_MS + 53_000)], ids=["at first", "after a release"])
def test_a_node_of_an_earlier_release_takes_nothing_as_done(world: World, before: Progress | None) -> None:
    """Whether its release had the queue before or not; of two of its nodes, whose numbers may be mixed."""
    for name in ("far", "sent", "OVERDUE"):
        world.topic.put(envelope(name, 0))
    for messages in (world.topic.messages, world.topic.times_ms):
        if before is not None:
            commit_as_earlier(world.topic, before)
        messages[ONE].clear()  # type: ignore[attr-defined]
    node, found = _reading_as_earlier(world)
    due_s = (10_000, 55, 50, 40, 70)
    done = [found.is_done(offset, START_MS + 1000 * due) for offset, due in enumerate(due_s)]
    assert not any(done)
    node.sends.answer = away()
    world.time.advance(3)
    world.time.advance(20_000)
    for _ in range(3):
        node.turn(ONE)
    found = earlier_progress(world.topic)
    assert found is not None
    assert found.is_done(4, START_MS + 70_000), "all are"


def test_numbers_of_two_nodes_of_an_earlier_release_lose_nothing(world: World) -> None:
    """One had read a message that it could not send, and the moment is that of the other one."""
    for name, seconds in (("far", 10_000), ("sent", 55), ("OVERDUE", 50), ("new", 20_000)):
        world.topic.put(envelope(name, seconds))
    commit_as_earlier(world.topic, Progress(0, 4, START_MS + 60_000))
    world.time.advance(60)
    node = world.node("a")
    for _ in range(8):
        node.turn(ONE)
    assert sorted(node.sends.bodies) == [b"OVERDUE", b"sent"]
    assert world.topic.offsets["g_done_ms", ONE] == 0


def _of_an_earlier_release(node: Node, progress: Progress, newest_store_ms: int) -> None:
    """Its folder is as such a release left it."""
    note = struct.pack(">6Q", 0, progress.read_end, *progress, newest_store_ms)
    node.store.add([], {note_name(ONE): note})


@pytest.mark.parametrize("mixed", [False, True])
def test_node_that_keeps_folder_at_upgrade_repeats_nothing(world: World, mixed: bool) -> None:
    """Its own store knows better than the numbers what was sent."""
    node = world.node("a")
    node.sends.answer = away("OVERDUE")
    for name, seconds in (("far", 10_000), ("sent", 55), ("OVERDUE", 50)):
        world.topic.put(envelope(name, seconds))
    for _ in range(5):
        node.turn(ONE)
    world.time.advance(60)
    node.turn(ONE)
    world.topic.offsets.clear()
    before = Progress(0, 3, START_MS + (60_000 if mixed else 49_999))
    commit_as_earlier(world.topic, before)
    _of_an_earlier_release(node, before, world.topic.times_ms[ONE][2])
    node.kill()
    node.sends.sent.clear()
    node.sends.answer = away()
    world.topic.put(envelope("new", 65))
    for _ in range(6):
        node.turn(ONE)
    world.time.advance(60)
    node.turn(ONE)
    assert sorted(node.sends.bodies) == [b"OVERDUE", b"new"]
    assert world.offsets() == (0, 4, START_MS + 65_000)


def test_nodes_of_both_releases_may_have_a_queue_in_turn(world: World) -> None:
    """What this release committed before still holds after the other one had the queue."""
    first = world.node("a")
    for name, seconds in (("far", 10_000), ("sent", 5), ("waits", 500)):
        world.topic.put(envelope(name, seconds))
    for _ in range(5):
        first.turn(ONE)
    world.time.advance(10)
    first.turn(ONE)
    first.turn()
    commit_as_earlier(world.topic, Progress(0, 3, START_MS + 600_000))
    second = world.node("b")
    for _ in range(5):
        second.turn(ONE)
    assert (second.sends.bodies, len(second.store)) == ([], 2)
    world.time.advance(500)
    second.turn(ONE)
    assert world.topic.offsets["g_done_ms", ONE] == 0, "or a node of the other one would combine it with newer numbers"


@pytest.mark.parametrize("when", ["while it runs", "before it gives the queue up", "before it ends"])
def test_an_owner_repairs_what_a_node_that_stood_still_committed(
    world: World, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    """Also one that has nothing waiting: otherwise a third node would send everything again."""
    one, two, three = (world.node(name) for name in ("one", "two", "three"))
    world.topic.put(envelope("m0", 50))
    for _ in range(3):
        one.turn(ONE)
    frozen(one)
    for i in range(1, 6):
        world.topic.put(envelope(f"n{i}", 60 + i))
    for _ in range(10):
        two.turn(ONE)
    world.time.advance(100)
    for _ in range(3):
        two.turn(ONE)
    after = world.offsets()
    assert after[:2] == (6, 6)
    if when != "while it runs":
        frozen(two)
    one.turn(ONE)
    assert world.offsets()[:2] == (1, 1)
    if when == "before it ends":
        two.service.close()
    else:
        two.turn(ONE)
        if when == "before it gives the queue up":
            assert world.offsets()[:2] == (1, 1)
            two.turn()
    assert world.offsets() == after
    for _ in range(10):
        three.turn(ONE)
    assert three.sends.bodies == []


def test_a_node_that_wakes_looks_before_it_commits(world: World) -> None:
    one, two = world.node("one"), world.node("two")
    for name, seconds in (("far", 10_000), ("m", 50)):
        world.topic.put(envelope(name, seconds))
    for _ in range(4):
        one.turn(ONE)
    world.topic.put(envelope("n", 55))
    for _ in range(5):
        two.turn(ONE)
    world.time.advance(100)
    two.turn(ONE)
    after = world.offsets()
    assert after == (0, 3, START_MS + 55_000)
    frozen(one)
    one.service._commit_states[ONE].next_check_deadline = Deadline(0.0)
    one.turn(ONE)
    one.turn()
    assert world.offsets() == after


def test_what_waits_here_is_not_done_because_others_say_so(world: World, caplog: pytest.LogCaptureFixture) -> None:
    """Numbers that contradict the store are overwritten if they are still there at the next look, and its records stay."""
    node = world.node("a")
    for name, seconds in (("far", 10_000), ("m", 50)):
        world.topic.put(envelope(name, seconds))
    for _ in range(4):
        node.turn(ONE)
    before = world.offsets()
    others = CommittedProgress(Progress(2, 2, START_MS + 60_000), world.topic.times_ms[ONE][1]).encode()
    world.topic.offsets |= {(group, ONE): number for group, number in zip(GROUPS, others, strict=True)}
    node.turn(ONE)
    assert world.offsets()[0] == 2
    assert "another node committed envelopes as done" in caplog.text
    node.turn(ONE)
    assert world.offsets()[:2] == before[:2]
    world.topic.offsets |= {(group, ONE): number for group, number in zip(GROUPS, others, strict=True)}
    node.turn()
    assert (world.offsets()[0], len(node.store)) == (2, 2), "the next owner does not read them"
    world.time.advance(20_000)
    node.turn()
    assert node.sends.bodies == [b"m", b"far"]


def test_numbers_that_cannot_be_read_back_are_not_overwritten(world: World) -> None:
    one, two = world.node("one"), world.node("two")
    world.topic.put(envelope("m", 50))
    world.topic.put(envelope("far", 5000))
    for node in (one, two):
        for _ in range(4):
            node.turn(ONE)
    world.topic.put(envelope("n", 55))
    for _ in range(3):
        two.turn(ONE)
    world.time.advance(100)
    for _ in range(2):
        two.turn(ONE)
    after = world.offsets()
    frozen(one)
    one.service._commit_states[ONE].next_check_deadline = Deadline(0.0)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(world.topic, "committed", _no_answer)
        one.turn(ONE)
    assert world.offsets() == after


def _no_answer(*_: object) -> int:
    from rocketmq_spark.errors import CallTimeout

    raise CallTimeout("no answer")


def test_queue_revoked_before_restart_is_left_to_next_owner(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its records would be sent from here, too."""
    one, two = world.node("one"), world.node("two")
    world.topic.put(envelope("m", 50))
    for _ in range(3):
        one.turn(ONE)
    one.turn(ONE, TWO)
    monkeypatch.setattr(service, "HAND_OVER_S", 60.0)
    world.topic.offsets |= {
        (group, ONE): number
        for group, number in zip(GROUPS, CommittedProgress(Progress(0, 0, 0), 1).encode(), strict=True)
    }
    one.service._restart([ONE])
    one.turn(ONE, TWO)
    assert ONE not in one.service._checkpoints
    one.turn(TWO)
    monkeypatch.setattr(service, "HAND_OVER_S", 0.0)
    for _ in range(3):
        two.turn(ONE)
    world.time.advance(60)
    assert (one.sends.bodies, two.sends.bodies) == ([], [b"m"])


def test_a_node_that_returns_knows_what_it_committed_itself(world: World) -> None:
    """Others put its numbers back while it was away; it does not read again what is before its beginning."""
    for i in range(4):
        world.topic.put(envelope(f"m{i}", 5 if i < 3 else 500))
    other, node = world.node("other"), world.node("node")
    for _ in range(6):
        other.turn(ONE)
    before = dict(world.topic.offsets)
    world.time.advance(10)
    other.turn(ONE)
    other.turn()
    for _ in range(3):
        node.turn(ONE)
    after = world.offsets()
    assert (after[0], node.service._checkpoints[ONE].read_start) == (3, 3)
    node.kill()
    world.topic.offsets |= before
    for _ in range(6):
        node.turn(ONE)
    assert (node.sends.bodies, world.offsets()[:2]) == ([], after[:2])


def test_node_asleep_during_topic_recreation_commits_nothing(world: World) -> None:
    one, two = world.node("one"), world.node("two")
    for i in range(9):
        world.topic.put(envelope(f"old{i}", 5))
    for _ in range(11):
        one.turn(ONE)
    world.time.advance(10)
    one.turn(ONE)
    assert world.offsets()[0] == 9
    world.topic.make_again()
    for i in range(4):
        world.topic.put(envelope(f"new{i}", 5 if i else 5000))
    for _ in range(7):
        two.turn(ONE)
    after = world.offsets()
    assert after[:2] == (0, 4)
    one.turn()
    assert world.offsets() == after


def test_queue_revoked_right_after_start_is_committed(world: World) -> None:
    node = world.node("a")
    for i in range(3):
        world.topic.put(envelope(f"m{i}", 5 if i < 2 else 5000))
    for _ in range(5):
        node.turn(ONE)
    world.time.advance(10)
    node.kill()
    world.topic.takes = 0
    node.turn(ONE)
    assert world.offsets()[0] == 0
    world.topic.takes = -1
    node.turn()
    assert world.offsets()[:2] == (2, 3)


@pytest.mark.parametrize("waits", [False, True], ids=["with nothing", "with a message that waits here"])
def test_node_that_wakes_with_its_queue_skips_sent_messages(world: World, waits: bool) -> None:
    """It reads on where it was; the other node had the queue only while this one stood still."""
    one, two = world.node("one"), world.node("two")
    one.sends.answer = away("m0")
    for name, seconds in (("m0", 50 if waits else 5000), ("far", 9000)):
        world.topic.put(envelope(name, seconds))
    for _ in range(4):
        one.turn(ONE)
    for i in range(5):
        world.topic.put(envelope(f"n{i}", 60 + i))
    for _ in range(10):
        two.turn(ONE)
    world.time.advance(100)
    two.turn(ONE)
    assert len(two.sends.bodies) == 5 + waits
    two.turn()
    for _ in range(10):
        one.turn(ONE)
    world.time.advance(10)
    assert set(one.sends.bodies) <= {b"m0"}
