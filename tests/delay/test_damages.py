"""Any accident with any file of a node: each envelope that was not sent is sent, none before its time, and none that was sent."""

from __future__ import annotations

import random
import shutil
from collections import Counter
from pathlib import Path
from typing import NamedTuple

import pytest

from rocketmq_spark.delay.envelope_records import DELAYED_KIND, space_of
from rocketmq_spark.delay.release import note_name
from rocketmq_spark.errors import RocketMQError
from rocketmq_spark.model import Resent, SpooledSend
from rocketmq_spark.spool.records import IDENTITY, Record
from tests.delay.nodes import QUEUES, START_MS, Node, Topic, World, at_once, envelope
from tests.spool.damages import damage

COUNT, SEEDS = 260, 16


def due_s(number: int) -> int:
    return 5 + number * 37 % 200


def number_of(send: SpooledSend) -> int:
    return int(bytes(send.request.body)[1:])


class Whole(NamedTuple):
    """A world whose node was killed: the folder has two tables and a log; what it had sent."""

    world: World
    folder: Path
    sent: frozenset[int]


def turn(node: Node) -> None:
    node.turn(*QUEUES)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Whole:
    world = World(tmp_path_factory.mktemp("whole"))
    with pytest.MonkeyPatch.context() as patch:
        at_once(patch)
        node = world.node("a")
        turn(node)
        for begin, end in ((0, 100), (100, 200), (200, COUNT)):
            if begin:  # what the log has becomes a table
                node.kill()
                turn(node)
            for number in range(begin, end):
                world.topic.put(envelope(f"m{number}", due_s(number)), QUEUES[number % 2])
            for _ in range(3):
                turn(node)
                world.time.advance(6)
            turn(node)
    folder = shutil.copytree(node.folder, node.folder.with_name("killed"))
    node.store.close()
    assert len([*folder.glob("*.sst")]) == 2
    assert any(log.stat().st_size for log in folder.glob("*.log"))
    return Whole(world, folder, frozenset(map(number_of, node.sends.sent)))


def again(whole: Whole, folder: Path) -> World:
    """The same moment once more."""
    world, topic = World(folder), Topic()
    topic.messages, topic.times_ms = whole.world.topic.messages, whole.world.topic.times_ms
    topic.offsets, topic.now_ms = dict(whole.world.topic.offsets), whole.world.topic.now_ms
    world.topic, world.time.now = topic, whole.world.time.now
    return world


@pytest.mark.parametrize("seed", range(SEEDS))
def test_damaged_file_loses_no_envelope_and_sends_none_early(
    whole: Whole, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    at_once(monkeypatch)
    rng = random.Random(seed)
    for number in range(5):
        world = again(whole, tmp_path / str(number))
        case = f"{damage(rng, shutil.copytree(whole.folder, tmp_path / str(number) / 'a'))}, seed {seed}"
        node, early, failed = world.node("a"), [], 0

        def sends(send: SpooledSend, node: Node = node, early: list[int] = early) -> Resent:
            if node.now_ms() < START_MS + 1000 * due_s(number_of(send)):
                early.append(number_of(send))
            return Resent(send.queue or QUEUES[0])

        node.sends.answer = sends
        for _ in range(60):
            try:
                turn(node)
            except RocketMQError:
                failed += 1
            world.time.advance(5)
        found = Counter(map(number_of, node.sends.sent))
        assert (early, failed <= 3) == ([], True), case
        assert set(found) == set(range(COUNT)) - whole.sent, case
        assert max(found.values()) <= 2, case
        assert (len(node.store), node.store.totals.dead) == (0, 0), case
        node.store.close()


def test_a_note_that_was_written_after_the_damage_does_not_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread that sends may find damage while this one stores a position, which would pass over what was lost."""
    at_once(monkeypatch)
    world = World(tmp_path)
    node = world.node("a")
    for number, queue in enumerate(QUEUES):
        world.topic.put(envelope(f"m{number}", 100), queue)
    for _ in range(2):
        turn(node)
    assert len(node.store) == 2
    space = space_of(QUEUES[0])
    assert node.store.drop_records([(space, place) for place in node.store.places(space)]) == 1
    assert note_name(QUEUES[0]) in node.store.notes()
    node.store.damage_count += 1
    for _ in range(2):
        turn(node)
    world.time.advance(100)
    turn(node)
    assert sorted(map(number_of, node.sends.sent)) == [0, 1]
    node.store.close()


@pytest.mark.parametrize(
    "marks",
    [((IDENTITY, b"abc"),), ((IDENTITY, b""),), tuple((space_of(queue), b"x") for queue in QUEUES)],
    ids=["identity", "empty", "queue"],
)
def test_a_mark_that_cannot_be_read_does_not_stop_a_node(
    world: World, caplog: pytest.LogCaptureFixture, marks: tuple[tuple[bytes, bytes], ...]
) -> None:
    """Each turn failed, so that nothing was read or sent, also after a restart."""
    node = world.node("a")
    node.store.add(
        [(Record(DELAYED_KIND, envelope("marked", 5), START_MS, "topic orders", marks=marks), START_MS + 5000)]
    )
    world.topic.put(envelope("m", 7))
    for _ in range(4):
        node.turn(*QUEUES)
    assert world.offsets()[0] == 0, "the message waits"
    world.time.advance(8)
    for _ in range(4):
        node.turn(*QUEUES)
    assert node.sends.bodies == [b"marked", b"m"]
    assert world.offsets()[0] == 1
    assert [each.message for each in caplog.records if "which no release writes" in each.message] != []
