"""Group offsets on the broker: the next offset to read, of finished work only, and visible to RocketMQ's own tools."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from types import SimpleNamespace

import pytest

from rocketmq_spark import session
from rocketmq_spark.base.clock import Deadline
from rocketmq_spark.base.codes import RETRY_PREFIX
from rocketmq_spark.errors import CallTimeout, OffsetError, OptionError
from rocketmq_spark.localbroker import LocalBroker
from rocketmq_spark.model import MessageQueue
from rocketmq_spark.spark.monitoring.group_offset_listener import GroupOffsetListener
from rocketmq_spark.wire import bodies as wire_bodies
from rocketmq_spark.wire import rpc
from rocketmq_spark.wire.bodies import GroupMembership
from rocketmq_spark.wire.properties import Subscription
from tests.helpers import progress_json
from tests.mockbroker import eventually
from tests.reading import Run, bodies, canonical, feed, read
from tests.witness import mqadmin


@pytest.fixture
def group(topic: str) -> str:
    return f"g-{topic}"


def stored(mq: LocalBroker, group: str, topic: str) -> dict[MessageQueue, int | None]:
    """What a client would start from, by a question of its own."""
    queues = mq.admin.route(topic).readable_queues()
    return mq.admin.offset_reader.committed(group, queues, Deadline.after(10))


def test_offsets_are_the_next_to_read_after_each_batch(rocketmq, topic, group):
    sent = feed(rocketmq, topic, 80)
    run = Run(rocketmq, subscribe=topic, startingOffsets="earliest", group=group, maxOffsetsPerTrigger=24)
    while True:
        finished = run.positions
        end = run.latest()
        # Asked for the next batch: what came before is finished, what comes now is not.
        assert stored(rocketmq, group, topic) == finished
        if end == run.offset:
            break
        run.plan(end)
        assert stored(rocketmq, group, topic) == finished
        run.batch()
    assert Counter(run.read) == Counter(sent)
    # Another reader of the group goes on exactly there.
    more = feed(rocketmq, topic, 8)
    assert Counter(bodies(read(rocketmq, subscribe=topic, startingOffsets="committed", group=group))) == Counter(more)


def test_offsets_are_there_after_available_now(rocketmq, topic, group):
    sent = feed(rocketmq, topic, 24)
    options = {"subscribe": topic, "startingOffsets": "earliest", "group": group}
    run = Run(rocketmq, available_now=True, **options)
    while run.batch():
        pass
    assert Counter(run.read) == Counter(sent)
    assert stored(rocketmq, group, topic) == run.positions
    assert sum(run.positions.values()) == 24


def test_offsets_are_committed_at_the_next_start_after_a_stop(rocketmq, topic, group):
    feed(rocketmq, topic, 24)
    options = {"subscribe": topic, "startingOffsets": "earliest", "group": group}
    run = Run(rocketmq, **options)
    run.batch()
    assert set(stored(rocketmq, group, topic).values()) == {0}
    again = Run(rocketmq, run.offset, **options)
    again.latest()
    assert stored(rocketmq, group, topic) == run.positions


def test_repeated_batch_commits_nothing_before_it_is_done(rocketmq, topic, group):
    feed(rocketmq, topic, 24)
    options = {"subscribe": topic, "startingOffsets": "earliest", "group": group}
    run = Run(rocketmq, **options)
    end = run.latest()
    before = stored(rocketmq, group, topic)
    again = Run(rocketmq, run.offset, **options)
    again.plan(end)
    assert stored(rocketmq, group, topic) == before


def progress(*offsets: str) -> SimpleNamespace:
    """As Spark tells listeners."""
    return SimpleNamespace(progress=SimpleNamespace(json=progress_json(*offsets), runId="r"))


def test_a_listener_commits_at_once(rocketmq, topic, group, make_topic):
    other = make_topic(queues=1)
    run = Run(rocketmq, subscribe=[topic, other], startingOffsets="earliest")
    run.drain([*feed(rocketmq, topic, 24), *feed(rocketmq, other, 3)])
    session.close_all()  # the driver program has its own connections and routes
    listener = GroupOffsetListener(nameServer=rocketmq.name_server, group=group, subscribe=topic)
    listener.onQueryProgress(progress('{"a": 1}', "7", run.offset))
    mine = {queue: offset for queue, offset in run.positions.items() if queue.topic == topic}
    assert stored(rocketmq, group, topic) == mine
    assert set(stored(rocketmq, group, other).values()) == {None}
    everything = GroupOffsetListener(name_server=rocketmq.name_server, group=group)
    everything.onQueryProgress(progress(run.offset))
    assert stored(rocketmq, group, other) == {MessageQueue(other, "broker-a", 0): 3}
    with pytest.raises(OptionError, match="'group'"):
        GroupOffsetListener(name_server=rocketmq.name_server)


def test_nothing_is_committed_and_no_group_made_without_group(rocketmq, topic):
    known = set(rocketmq.admin.topics())
    sent = feed(rocketmq, topic, 8)
    run = Run(rocketmq, subscribe=topic, startingOffsets="earliest")
    run.drain(sent)
    run.batch()
    assert set(stored(rocketmq, "rocketmq_spark", topic).values()) == {None}
    assert not [name for name in set(rocketmq.admin.topics()) - known if name.startswith(RETRY_PREFIX)]


def test_rocketmq_s_own_tool_shows_the_progress(rocketmq, topic, group):
    """mqadmin consumerProgress, as an operator calls it."""
    sent = feed(rocketmq, topic, 80)
    run = Run(rocketmq, subscribe=topic, startingOffsets="earliest", group=group, maxOffsetsPerTrigger=24)
    run.batch()
    run.batch()
    finished = dict(run.positions)
    run.latest()
    table = consumer_progress(rocketmq, group)
    mine = {
        MessageQueue(row[0], row[1], int(row[2])): (int(row[3]), int(row[4]), int(row[5]))
        for row in table
        if row[0] == topic
    }
    assert mine == {queue: (10, offset, 10 - offset) for queue, offset in finished.items()}
    assert sum(lag for _, _, lag in mine.values()) == len(sent) - len(run.read)


def consumer_progress(mq: LocalBroker, group: str) -> list[list[str]]:
    """The rows of the tool's table."""
    printed = mqadmin("consumerProgress", "-n", mq.name_server, "-g", group)
    lines = itertools.dropwhile(lambda line: not line.startswith("#Topic"), printed.splitlines())
    rows = [line.split() for line in itertools.islice(lines, 1, None)]
    assert rows, printed
    return list(itertools.takewhile(lambda row: len(row) >= 8, rows))


def test_live_members_are_warned_about(rocketmq, topic, group, caplog):
    feed(rocketmq, topic, 8)
    rocketmq.admin.create_group(group)
    run = Run(rocketmq, subscribe=topic, startingOffsets="earliest", group=group)
    run.batch()
    run.latest()
    assert "live members" not in caplog.text
    member = GroupMembership(group, {topic: Subscription()})
    heartbeat = rpc.HEART_BEAT.request(wire_bodies.heartbeat("10.0.0.9@java", memberships=[member]))
    calls, address = rocketmq.admin.offset_reader.rpc_client, rocketmq.address("broker-a")
    calls.request(address, heartbeat)
    again = Run(rocketmq, run.offset, subscribe=topic, group=group)
    again.latest()
    # A member that is not heard of for two minutes would be dropped with its connection, which is all tests'.
    calls.request(address, rpc.UNREGISTER_CLIENT.request(clientID="10.0.0.9@java", consumerGroup=group))
    (line,) = [record.getMessage() for record in caplog.records if "live members" in record.getMessage()]
    assert group in line
    assert "10.0.0.9@java" in line


def test_a_lookup_that_fails_is_an_error_and_no_rewind(rocketmq, topic, group, make_proxy):
    feed(rocketmq, topic, 8)
    run = Run(rocketmq, subscribe=topic, startingOffsets="earliest", group=group)
    run.batch()
    run.latest()
    address = rocketmq.address("broker-a")
    proxy = make_proxy(address)
    asked = {
        "subscribe": topic,
        "group": group,
        "startingOffsets": "committed",
        "committedFallback": "earliest",
        "addressMap": {address: proxy.address},
        "requestTimeout": "3s",
        "numRetries": 0,
    }
    assert Run(rocketmq, **asked).positions == run.positions
    proxy.black_hole()
    with pytest.raises(CallTimeout):
        Run(rocketmq, **asked)


def test_unresponsive_broker_delays_only_committing(rocketmq, topic, group, make_proxy, caplog):
    sent = feed(rocketmq, topic, 8)
    run = Run(rocketmq, subscribe=topic, startingOffsets="earliest", group=group)
    run.drain(sent)

    def fails(committer, group, offsets, *how):
        return dict.fromkeys(offsets, CallTimeout("nobody answers"))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(session.client(run.reader._options).committer), "commit_each", fails)
        assert run.latest() == run.offset
    assert caplog.text.count("committed later") == 1
    eventually(lambda: run.latest() and "are committed now, after earlier failures" in caplog.text)
    assert stored(rocketmq, group, topic) == run.positions


def test_offsets_of_version_1_are_read_and_newer_ones_refused(rocketmq, topic):
    sent = feed(rocketmq, topic, 8)
    by_hand = {"topics": {topic: {"broker-a": {str(i): 0 for i in range(8)}}}}
    for offset in (by_hand, {**by_hand, "v": 1}):
        run = Run(rocketmq, json.dumps(offset), subscribe=topic)
        run.drain(sent)
        assert sorted(run.read) == sorted(sent)
        assert canonical(json.loads(run.offset)) == run.offset
    with pytest.raises(OffsetError, match="newer rocketmq-spark"):
        Run(rocketmq, json.dumps({**by_hand, "v": 2}), subscribe=topic).latest()


def test_a_deleted_topic_keeps_no_other_from_being_committed(rocketmq, topic, group, make_topic):
    other = make_topic(queues=1)
    options = {"subscribe": [topic, other], "startingOffsets": "earliest", "group": group, "failOnDataLoss": "warn"}
    run = Run(rocketmq, **options)
    run.drain([*feed(rocketmq, topic, 8), *feed(rocketmq, other, 3)])
    rocketmq.admin.delete_topic(topic)
    again = Run(rocketmq, run.offset, **options)
    again.drain(feed(rocketmq, other, 2))
    again.latest()
    assert stored(rocketmq, group, other) == {MessageQueue(other, "broker-a", 0): 5}
