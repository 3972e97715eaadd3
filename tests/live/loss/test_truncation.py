"""Messages that retention deleted: before a batch was planned, and between plan and read."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator

import pytest

from rocketmq_spark import Admin, PullConsumer
from rocketmq_spark.cli.topic_reader import TopicReader, earliest
from rocketmq_spark.errors import DataLossError
from rocketmq_spark.localbroker import LocalBroker
from rocketmq_spark.model import Message, MessageQueue
from rocketmq_spark.options import parse
from tests.live.loss.compaction import COMPACTION, post_to_compacted_topic
from tests.mockbroker import eventually
from tests.reading import Run, batch_reader, bodies, feed, names, post, read, rows

RETENTION = {
    "fileReservedTime": 0,
    "deleteWhen": ";".join(f"{hour:02d}" for hour in range(24)),
    "cleanResourceInterval": 1000,
    "deleteCommitLogFilesInterval": 1,
    "mappedFileSizeCommitLog": 4 << 20,
    "maxMessageSize": 2 << 20,
}


@pytest.fixture(scope="module")
def forgetful() -> Iterator[LocalBroker]:
    """A broker that deletes old messages, for the first time a minute after its start."""
    with LocalBroker(conf=RETENTION | COMPACTION, quiet=True) as mq:
        mq.create_topic("filler", 1)
        yield mq


@pytest.fixture
def forget(forgetful: LocalBroker) -> Callable[[str, int], None]:
    """Wait until retention has deleted everything of a topic; the next messages find their queues empty but not new."""

    def run(topic: str, at_least: int) -> None:
        for name in names(5):
            post(forgetful, [Message("filler", name.encode() + bytes(1_000_000))])
        eventually(lambda: sum(b.min_offset for b in forgetful.admin.describe_topic(topic).values()) >= at_least, 100)

    return run


@pytest.fixture
def topic(forgetful):
    (name,) = names(1, "short-lived")
    forgetful.create_topic(name, 2)
    return name


def test_before_planning(forgetful, forget, topic, lost_lines):
    run = Run(forgetful, subscribe=topic, startingOffsets="earliest", maxOffsetsPerTrigger=4)
    feed(forgetful, topic, 40)
    run.batch()
    assert len(run.read) == 4
    forget(topic, 40)
    left = set(feed(forgetful, topic, 10))

    for strict in (run, Run(forgetful, run.offset, subscribe=topic)):
        with pytest.raises(DataLossError, match=r"36 offsets.*truncated by retention") as e:
            strict.batch()
        assert "failOnDataLoss" in str(e.value)
        assert e.value.topic == topic
    assert lost_lines() == []

    for policy in ("warn", "ignore"):
        lenient = Run(forgetful, run.offset, subscribe=topic, failOnDataLoss=policy, maxOffsetsPerTrigger=4)
        lenient.drain(left)
        assert Counter(lenient.read) == Counter(left)
        assert len(lenient.read) == 10
        assert lenient.positions == {MessageQueue(topic, "broker-a", i): 25 for i in (0, 1)}
        (line,) = lost_lines()[-1:]
        assert line.startswith("36 offsets cannot be read any more")
        assert f"{topic}/broker-a/0 offsets 2 to 20 (truncated by retention)" in line
        assert lenient.reader.reportLatestOffset()["losses"] == {"truncated": {"ranges": 2, "offsets": 36}}
    assert len(lost_lines()) == 2  # one line per run: the batch of each


def test_between_planning_and_reading(forgetful, forget, topic, lost_lines):
    feed(forgetful, topic, 40)
    readers = {policy: batch_reader(forgetful, subscribe=topic, failOnDataLoss=policy) for policy in ("fail", "warn")}
    streams = {p: Run(forgetful, subscribe=topic, startingOffsets="earliest", failOnDataLoss=p) for p in readers}
    planned = {policy: list(reader.partitions()) for policy, reader in readers.items()}
    ends = {policy: stream.latest() for policy, stream in streams.items()}
    tasks = {policy: stream.plan(ends[policy]) for policy, stream in streams.items()}
    forget(topic, 40)
    left = set(feed(forgetful, topic, 4))

    for reader, parts in ((readers["fail"], planned["fail"]), (streams["fail"].reader, tasks["fail"])):
        with pytest.raises(DataLossError, match="truncated by retention"):
            rows(reader, parts)
    assert rows(readers["warn"], planned["warn"]) == []
    first = lost_lines()
    assert sorted(first) == sorted(
        f"20 offsets cannot be read any more: {topic}/broker-a/{i} offsets 0 to 20 (truncated by retention); "
        "failOnDataLoss=warn"
        for i in (0, 1)
    )
    assert rows(streams["warn"].reader, tasks["warn"]) == []
    assert len(lost_lines()) == 4
    streams["warn"].offset = ends["warn"]
    streams["warn"].drain(left)
    assert Counter(streams["warn"].read) == Counter(left)
    assert len(lost_lines()) == 4  # and no more: the next batch begins behind it


def test_a_logged_batch_that_is_planned_again_after_a_restart(forgetful, forget, topic, lost_lines):
    feed(forgetful, topic, 40)
    killed = Run(forgetful, subscribe=topic, startingOffsets="earliest")
    end = killed.latest()
    forget(topic, 40)
    feed(forgetful, topic, 4)
    again = Run(forgetful, killed.offset, subscribe=topic, failOnDataLoss="warn")
    assert rows(again.reader, again.plan(end)) == []
    (line,) = lost_lines()
    assert line.startswith("40 offsets cannot be read any more")
    assert again.reader.reportLatestOffset()["losses"] == {"truncated": {"ranges": 2, "offsets": 40}}
    with pytest.raises(DataLossError, match="40 offsets"):
        Run(forgetful, killed.offset, subscribe=topic).plan(end)


def test_starts_that_name_no_offset_lose_nothing(forgetful, forget, topic, lost_lines):
    feed(forgetful, topic, 40)
    forget(topic, 40)
    left = set(feed(forgetful, topic, 6))
    for start in ({}, {"startingTimestamp": 0}, {"startingOffsets": "earliest"}):
        assert Counter(bodies(read(forgetful, subscribe=topic, **start))) == Counter(left)
    run = Run(forgetful, subscribe=topic, startingOffsets="earliest")
    run.drain(left)
    assert Counter(run.read) == Counter(left)
    assert run.positions == {MessageQueue(topic, "broker-a", i): 23 for i in (0, 1)}
    assert lost_lines() == []
    named = {topic: {"broker-a": {"0": 0, "1": 0}}}
    with pytest.raises(DataLossError, match=r"40 offsets.*truncated by retention"):
        read(forgetful, subscribe=topic, startingOffsets=named)
    assert Counter(bodies(read(forgetful, subscribe=topic, startingOffsets=named, failOnDataLoss="warn"))) == Counter(
        left
    )


def test_an_empty_queue_whose_messages_all_expired_is_no_loss(forgetful, forget, topic, lost_lines):
    sent = feed(forgetful, topic, 10)
    run = Run(forgetful, subscribe=topic, startingOffsets="earliest")
    run.drain(sent)
    forget(topic, 10)
    for one in (run, Run(forgetful, run.offset, subscribe=topic)):
        assert one.latest() == one.offset
    more = feed(forgetful, topic, 4)
    run.drain(more)
    assert lost_lines() == []


def test_compacted_messages_are_read_after_their_log_is_gone(forgetful, forget, lost_lines):
    """Statistics tell where its log begins; the last message of each key lies before that, and a pull finds it."""
    (table,) = names(1, "table")
    forgetful.create_topic(table, 1, attributes={"cleanup.policy": "COMPACTION"})
    made = names(600)
    sent = [Message(table, body.encode(), keys=[str(n % 10)]) for n, body in enumerate(made)]
    post_to_compacted_topic(forgetful, sent, 10)
    run = Run(forgetful, subscribe=table, startingOffsets="earliest", maxOffsetsPerTrigger=300, compacted=True)
    run.batch()
    assert sum(run.positions.values()) == 300
    forget(table, 600)
    found = read(forgetful, subscribe=table)
    assert {row["keys"][0]: row["body"].decode() for row in found} == {str(n % 10): made[n] for n in range(590, 600)}
    assert bodies(read(forgetful, subscribe=table, startingOffsets={table: {"broker-a": {"0": 0}}})) == bodies(found)
    with PullConsumer(name_server=forgetful.name_server, group=names(1)[0]) as consumer:
        consumer.assign([MessageQueue(table, "broker-a", 0)])
        consumer.seek_to_beginning()
        assert next(iter(consumer)).body in {row["body"] for row in found}  # compaction may have gone on
    shown = parse({"nameServer": forgetful.name_server}).for_role("batch source")
    reader = TopicReader(shown, table, lambda part, cause: pytest.fail(f"{part} {cause}"))
    reader.seek(earliest)
    assert [message.body.decode() for message in reader.messages()] == bodies(found)
    with Admin(forgetful.name_server) as admin:
        (change,) = admin.reset_offsets("g", "earliest", [table], preview=True)
        assert change.after == found[0]["queueOffset"]
        assert [message.body.decode() for message in admin.find_messages(table, begin_ms=1, limit=100)] == bodies(found)
    for cut in (row["storeTimestamp"] for row in found[:: len(found) // 4]):
        options = {"subscribe": table, "startingOffsetsByTimestampStrategy": "latest"}
        for ms in (int(cut.timestamp() * 1000) + more for more in (-1, 0, 1)):
            whole: list[str] = []
            while whole != (now := bodies(read(forgetful, subscribe=table))):  # else its log was compacted in between
                whole = now
                until = read(forgetful, endingTimestamp=ms, **options)
                since = read(forgetful, startingTimestamp=ms, **options)
            assert bodies(until) + bodies(since) == whole
            assert all(row["storeTimestamp"].timestamp() * 1000 < ms for row in until)
            assert all(round(row["storeTimestamp"].timestamp() * 1000) >= ms for row in since)
    run.until(lambda: sum(run.positions.values()) == 600)
    assert set(made[590:]) <= set(run.read)
    assert lost_lines() == []
