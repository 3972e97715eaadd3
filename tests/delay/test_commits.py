"""A node's numbers at the brokers, which are commits of four groups: what is there when not all got through."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from rocketmq_spark.delay import service
from rocketmq_spark.delay.commits import CommittedProgress, GroupNames, ProgressCommits
from rocketmq_spark.delay.release import Progress
from rocketmq_spark.errors import AccessDenied, RemoteProtocolError
from rocketmq_spark.model import MessageQueue
from tests.delay.nodes import OTHER, QUEUES, Topic, World, envelope

ONE, TWO = QUEUES
OLD, NEW = CommittedProgress(Progress(1, 10, 5_678), 7_000), CommittedProgress(Progress(2, 20, 4_321), 8_000)


@pytest.mark.parametrize(
    ("taken", "oldest", "stored", "done_ms", "newest_store_ms"),
    [
        (0, 1, 10, 5_678, 7_000),
        (1, 1, 20, 4_000, 7_000),  # the milliseconds belong to the other numbers
        (2, 2, 20, 4_000, 7_000),  # an old store time has messages read again; a new one would hide a topic made again
        (3, 2, 20, 4_000, 8_000),
        (4, 2, 20, 4_321, 8_000),
    ],
)
def test_interrupted_commits_make_next_owner_skip_nothing(
    taken: int, oldest: int, stored: int, done_ms: int, newest_store_ms: int
) -> None:
    topic = Topic()
    commits = ProgressCommits(topic, GroupNames("g"), lambda group, brokers: None)
    assert commits.commit({ONE: OLD})
    topic.takes = taken
    news = {ONE: NEW}
    assert commits.commit(news) == (taken == 4)
    assert news.keys() == ({ONE} if taken == 4 else set())
    assert commits.fetch(ONE) == CommittedProgress(Progress(oldest, stored, done_ms), newest_store_ms)


def test_what_is_done_was_read_whoever_committed_it() -> None:
    topic = Topic()
    commits = ProgressCommits(topic, GroupNames("g"), lambda group, brokers: None)
    for taken, told in (
        (4, CommittedProgress(Progress(5, 5, 1_000), 7_000)),
        (2, CommittedProgress(Progress(6, 6, 2_000), 8_000)),
        (1, CommittedProgress(Progress(5, 5, 3_000), 7_000)),
    ):
        topic.takes = taken
        commits.commit({ONE: told})
    topic.takes = -1
    assert commits.fetch(ONE) == CommittedProgress(Progress(6, 6, 3_000), 7_000)


def test_after_two_partial_commits_the_next_node_reads_on(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """The numbers are the oldest one of the first node, the end of the second, and the store time before both."""
    monkeypatch.setattr(service, "RECREATION_CHECK_S", 0.0)
    for i in range(5):
        world.topic.put(envelope(f"m{i}", 1))
    first = world.node("first")
    for _ in range(8):
        first.turn(ONE)
    world.time.advance(5)
    for _ in range(2):
        first.turn(ONE)
    assert world.offsets()[:2] == (5, 5)
    world.topic.put(envelope("m5", 1))
    world.topic.takes = 0
    for _ in range(2):
        first.turn(ONE)
        world.time.advance(1)
    for node, taken in ((first, 2), (world.node("second"), 1)):
        world.topic.takes = taken
        node.turn(ONE)
        node.store.close()
    world.topic.takes = -1
    oldest, progress, _, newest_store_ms = (world.topic.offsets[(group, ONE)] for group in GroupNames("g").all_groups)
    assert (oldest, progress & 7, newest_store_ms) == (6, 5, world.topic.times_ms[ONE][4])
    third = world.node("third")
    for i in range(6, 9):
        world.topic.put(envelope(f"m{i}", 1))
    for _ in range(8):
        third.turn(ONE)
        world.time.advance(1)
    assert {b"m6", b"m7", b"m8"} <= set(third.sends.bodies)
    assert world.offsets()[0] == 9


def test_message_unacknowledged_at_commit_is_sent_by_next_node(world: World) -> None:
    one, two = world.node("one"), world.node("two")
    one.sends.answer = lambda send: None
    world.topic.put(envelope("m", 1))
    for _ in range(3):
        one.turn(ONE)
    world.time.advance(2)
    one.turn(ONE)
    assert (one.sends.bodies, world.offsets()[:2]) == ([b"m"], (0, 1))
    one.store.close()
    for _ in range(5):
        two.turn(ONE)
    world.time.advance(10)
    assert two.sends.bodies == [b"m"]


@pytest.mark.parametrize("number", [-5, 1 << 63])
def test_a_number_that_is_no_offset_is_an_error(number: int) -> None:
    for group in (*GroupNames("g").all_groups, GroupNames("g").legacy_group):
        topic = Topic()
        topic.offsets = {(each, ONE): 0 for each in GroupNames("g").all_groups} | {(group, ONE): number}
        with pytest.raises(RemoteProtocolError, match=str(number)):
            ProgressCommits(topic, GroupNames("g"), lambda group, brokers: None).fetch(ONE)


def test_broker_refusing_group_stops_no_commits_to_others() -> None:
    topic = Topic()
    topic.groups = set()

    def make(group: str, brokers: Mapping[MessageQueue, int]) -> None:
        if OTHER in brokers:
            raise AccessDenied("no")
        topic.groups.add(group)

    news = {OTHER: NEW, ONE: NEW}
    assert not ProgressCommits(topic, GroupNames("g"), make).commit(news)
    assert news.keys() == {ONE}


def test_a_group_that_no_broker_lets_be_created_is_an_error() -> None:
    def make(group: str, brokers: Mapping[MessageQueue, int]) -> None:
        raise AccessDenied("no")

    topic = Topic()
    topic.groups = set()
    with pytest.raises(AccessDenied):
        ProgressCommits(topic, GroupNames("g"), make).commit({ONE: NEW})
