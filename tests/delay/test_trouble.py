"""A node in trouble: a broker that does not answer, a turn that fails, a store that meets damage. The store is real."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest

from rocketmq_spark.base.clock import Deadline
from rocketmq_spark.delay import service
from rocketmq_spark.errors import AccessDenied, CallTimeout, RemoteProtocolError, RocketMQError, SpoolError
from rocketmq_spark.model import MessageQueue, ReceivedMessage, Resent
from rocketmq_spark.spool.database import Damaged
from rocketmq_spark.spool.records import PENDING, RECORD, area_end
from rocketmq_spark.spool.store import Store
from rocketmq_spark.wire.envelope import cancel_envelope
from tests.delay.nodes import OTHER, QUEUES, START_MS, World, envelope

ONE = QUEUES[0]


@pytest.mark.parametrize("before", [(ONE,), (ONE, OTHER)], ids=["gained", "lost"])
def test_unresponsive_broker_costs_no_envelope_of_other_brokers(
    world: World, before: tuple[MessageQueue, ...], caplog: pytest.LogCaptureFixture
) -> None:
    """What came of other queues in the same turn was dropped, and what lay behind it was noted as stored."""
    node = world.node("a")
    world.topic.put(envelope("other", 10), OTHER)
    for _ in range(3):
        node.turn(*before)
    now = (ONE,) if OTHER in before else (ONE, OTHER)
    world.topic.away.add(OTHER.broker_name)
    for i in range(3):
        world.topic.put(envelope(f"m{i}", 5), ONE)
        node.turn(*now)
        assert node.service._checkpoints[ONE].read_end == i + 1
    assert caplog.text.count("its broker does not answer") == 1, "once when it begins"
    world.time.advance(5)
    assert node.sends.bodies == [b"m0", b"m1", b"m2"]
    world.topic.away.clear()
    for _ in range(3):
        node.turn(*now)
    assert (OTHER in node.service._checkpoints) == (OTHER in now)
    assert len(node.store) == (OTHER in now), "who has the queue now has its messages"


@pytest.mark.parametrize("held", [False, True], ids=["has nothing of it", "has what another may have sent"])
def test_starting_node_does_not_wait_for_unreachable_broker(world: World, held: bool) -> None:
    """All that it had of other brokers was late by half a minute. What it holds of that broker's queue another may have sent."""
    node = world.node("a")
    world.topic.put(envelope("m", 5), ONE)
    world.topic.put(envelope("other", 5 if held else -5), OTHER)
    for _ in range(3):
        node.turn(ONE, OTHER)
    world.topic.away.add(OTHER.broker_name)
    node.kill()
    for _ in range(2):
        node.turn(ONE, OTHER)
        world.time.advance(6)
    assert node.sends.bodies == ([] if held else [b"other", b"m"])
    node.service._join_deadline = Deadline(0.0)
    node.turn(ONE, OTHER)
    assert sorted(node.sends.bodies) == [b"m", b"other"]


def test_what_was_polled_in_a_turn_that_failed_is_polled_again(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    node = world.node("a")
    for _ in range(2):
        node.turn(ONE)
    world.topic.put(envelope("m0", 5), ONE)

    def own(mine: set[MessageQueue]) -> None:
        raise CallTimeout("no answer")

    with monkeypatch.context() as patch:
        patch.setattr(node.service, "_update_assignment", own)
        with pytest.raises(CallTimeout):
            node.turn(ONE)
    world.topic.put(envelope("m1", 5), ONE)
    for _ in range(3):
        node.turn(ONE)
    world.time.advance(5)
    assert sorted(node.sends.bodies) == [b"m0", b"m1"]


@pytest.mark.parametrize("by", ["the turn", "who sends"])
def test_damage_that_is_met_in_the_middle_of_a_turn_costs_none(
    world: World, by: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither what was polled, nor what the damage took: the next write would else note that all before it is stored."""
    node = world.node("a")
    for _ in range(2):
        node.turn(ONE)
    world.topic.put(envelope("before", 5), ONE)
    node.turn(ONE)
    record = next(key for key, _ in node.store._db.scan(RECORD, area_end(RECORD)))
    pending = next(key for key, _ in node.store._db.scan(PENDING, area_end(PENDING)))
    node.store._db.write([], [record, pending])  # as a lost block takes it
    world.topic.put(envelope("met", 5), ONE)

    def get(key: bytes) -> bytes | None:
        raise Damaged("a block")

    poll = node.reader.poll

    def met(timeout_s: float = 5.0) -> list[ReceivedMessage]:
        with contextlib.suppress(Damaged):
            node.store.drop_records([(b"any", b"")])
        node.store.notes()
        monkeypatch.setattr(node.reader, "poll", poll)
        return poll(timeout_s)

    monkeypatch.setattr(node.store._db, "get", get)
    if by == "the turn":
        with pytest.raises(Damaged):
            node.turn(ONE)
    else:
        monkeypatch.setattr(node.reader, "poll", met)
        node.turn(ONE)
    world.topic.put(envelope("behind", 5), ONE)
    for _ in range(4):
        node.turn(ONE)
    world.time.advance(5)
    assert {b"before", b"met", b"behind"} == set(node.sends.bodies)


@pytest.mark.parametrize("killed", [False, True])
@pytest.mark.parametrize(("step", "nth"), [("add", 1), ("add", 2), ("drop_records", 1)])
def test_cancel_holds_whichever_store_write_fails(
    world: World, monkeypatch: pytest.MonkeyPatch, killed: bool, step: str, nth: int
) -> None:
    """Envelope and cancel are read in one turn, in which one of its writes is the last."""
    node = world.node("a")
    for _ in range(2):
        node.turn(ONE)
    world.topic.put(envelope("m", 50), ONE)
    world.topic.put(cancel_envelope("orders", START_MS + 50_000, "m", START_MS), ONE)
    real, left = getattr(Store, step), [None] * (nth - 1)

    def fails_in_the_end(store: Store, *given: Any) -> Any:
        if not left:
            raise SpoolError("no space left on device")
        left.pop()
        return real(store, *given)

    with monkeypatch.context() as patch:
        patch.setattr(Store, step, fails_in_the_end)
        with pytest.raises(SpoolError):
            node.turn(ONE)
    if killed:
        node.kill()
    for _ in range(4):
        node.turn(ONE)
    assert len(node.store) == 0
    world.time.advance(60)
    node.turn(ONE)
    assert node.sends.bodies == []


def test_partial_commits_never_claim_too_much_progress(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Envelopes that are overdue put the moment back up to which all is done."""
    node = world.node("a")
    world.topic.put(envelope("early", 1), ONE)
    for _ in range(3):
        node.turn(ONE)
    world.time.advance(1000)
    for _ in range(2):
        node.turn(ONE)
    node.sends.answer = lambda send: Resent(None, "busy", is_temporary=True)
    commit, groups = world.topic.commit, []

    def first_only(group: str, offsets: Any, deadline: Deadline) -> dict[MessageQueue, RocketMQError]:
        groups.append(group)
        return (
            commit(group, offsets, deadline)
            if len(groups) < count
            else dict.fromkeys(offsets, CallTimeout("no answer"))
        )

    for count in (1, 2, 3):
        world.topic.put(envelope(f"late {count}", 500 + count), ONE)
        groups.clear()
        with monkeypatch.context() as patch:
            patch.setattr(world.topic, "commit", first_only)
            node.turn(ONE)
        assert len(groups) >= count, "nothing was told that failed"
    node.store.close()
    other = world.node("b")
    for _ in range(5):
        other.turn(ONE)
        world.time.advance(5)
    assert sorted(other.sends.bodies) == [b"late 1", b"late 2", b"late 3"]


@pytest.mark.parametrize("ended", [False, True], ids=["gave it up", "had ended"])
def test_node_that_regains_queue_briefly_has_nothing_sent_again(
    world: World, ended: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It told how far another had read, with the store time of what it had read itself: as if the topic were another one."""
    monkeypatch.setattr(service, "PAGE", 1)
    back, other = world.node("back"), world.node("other")
    world.topic.put(envelope("m0", 10))
    for _ in range(2):
        back.turn(ONE)
    back.service.close() if ended else back.turn()
    for i in range(1, 9):
        world.topic.put(envelope(f"m{i}", i / 2))
    for _ in range(10):
        other.turn(ONE)
    world.time.advance(5)
    for _ in range(2):
        other.turn(ONE)
    assert other.sends.bodies == [b"m%d" % i for i in range(1, 9)]
    other.turn()
    if ended:
        back.open()
    for _ in range(3):
        back.turn(ONE)
    back.service._catch_up_deadline = Deadline(0.0)
    back.turn(ONE)
    world.time.advance(6)
    back.turn(ONE)
    assert back.service._checkpoints[ONE].read_end < 9 == back.service._checkpoints[ONE].committed.read_end
    last = world.node("last")
    for _ in range(12):
        last.turn(ONE)
    assert sorted(back.sends.bodies + last.sends.bodies) == [b"m0"]
    assert "made again" not in caplog.text


def test_what_takes_back_counts_as_read_when_that_is_done(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a message that another node has stays there, and is sent."""
    node = world.node("a")
    world.topic.put(envelope("m", 5))
    node.turn(ONE)
    node.turn(ONE)
    world.topic.put(cancel_envelope("orders", START_MS + 5000, "m", START_MS))

    def full(*args: object) -> int:
        raise OSError("no space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(node.store, "drop_records", full)
        node.reader.own(ONE)
        with pytest.raises(OSError, match="no space"):
            node.service.turn()
    node.kill()
    for _ in range(3):
        node.turn(ONE)
    world.time.advance(10)
    node.turn(ONE)
    assert node.sends.bodies == []


@pytest.mark.parametrize("answer", [-5, 1 << 63, AccessDenied("no"), RemoteProtocolError("x")], ids=repr)
def test_what_one_broker_says_of_groups_stops_no_queue_of_others(
    world: World, monkeypatch: pytest.MonkeyPatch, answer: int | RocketMQError
) -> None:
    node, committed = world.node("a"), world.topic.committed
    world.topic.put(envelope("first", 10), ONE)
    node.turn(ONE, OTHER)

    def hostile(group: str, queue: MessageQueue, deadline: Deadline, zero_if_new: bool = True) -> int | None:
        if queue != OTHER:
            return committed(group, queue, deadline, zero_if_new)
        if isinstance(answer, RocketMQError):
            raise answer
        return answer

    monkeypatch.setattr(world.topic, "committed", hostile)
    monkeypatch.setattr(service, "COMMIT_CHECK_S", 0.0)
    for key in range(3):
        world.topic.put(envelope(f"m{key}", 10), ONE)
        node.turn(ONE, OTHER)
    assert node.service.stored_count == 4


def test_a_refused_pull_of_one_broker_ends_no_node(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    node = world.node("a")
    world.topic.put(envelope("first", 10), ONE)
    node.turn(ONE, OTHER)
    poll, refusals = node.reader.poll, [AccessDenied("no")]

    def denied(timeout_s: float = 5.0) -> list[ReceivedMessage]:
        if refusals:
            raise refusals.pop()
        return poll(timeout_s)

    monkeypatch.setattr(node.reader, "poll", denied)
    world.topic.put(envelope("second", 10), ONE)
    for _ in range(2):
        node.turn(ONE, OTHER)
    assert (refusals, node.service.stored_count) == ([], 2)
