"""Offsets without a message that are no loss: filters, compaction, inner batches, and replicas that lag."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections import Counter
from collections.abc import Iterator

import pyarrow as pa
import pytest

from rocketmq_spark import Producer
from rocketmq_spark.base.clock import Deadline
from rocketmq_spark.errors import DataLossError, MessageRefused, OptionError, RocketMQError
from rocketmq_spark.localbroker import LocalBroker
from rocketmq_spark.model import Message, MessageQueue
from tests.fix_clusters import WITHOUT_TIMERS
from tests.helpers import killed
from tests.live.loss.compaction import COMPACTION, post_to_compacted_topic
from tests.mockbroker import eventually
from tests.reading import Row, Run, batch_reader, bodies, feed, names, positions, post, read, rows
from tests.scale import scaled
from tests.witness import java_send, md5

# Message id, queue, offset, digest of the body.
Place = tuple[str, int, int, str]


@pytest.fixture
def many(rocketmq, make_topic) -> tuple[str, int]:
    topic, count = make_topic(queues=4), scaled(1_000_000)
    body = bytes(10)
    post(rocketmq, [Message(topic, body, tags="common", properties={"n": "1"}) for _ in range(count)])
    return topic, count


def test_filter_without_match_finishes_batch_and_moves_on(rocketmq, many, lost_lines):
    topic, count = many
    for chosen in ({"sql": "n = 2"}, {"tags": "rare"}):
        run = Run(rocketmq, subscribe=topic, startingOffsets="earliest", **chosen)
        end = run.latest()
        assert sum(positions(end).values()) == count
        assert rows(run.reader, run.plan(end)) == []
        run.offset = end
        assert run.batch() == []
        assert read(rocketmq, subscribe=topic, **chosen) == []
        run.drain(feed(rocketmq, topic, 4, tags="rare" if "tags" in chosen else "common", properties={"n": "2"}))
        count += 4
        assert len(run.read) == 4
        assert Counter(bodies(read(rocketmq, subscribe=topic, **chosen))) == Counter(run.read)
    assert lost_lines() == []


def test_batch_consume_queues_hold_several_messages_per_entry(rocketmq, make_topic, lost_lines):
    topic = make_topic(queues=2, attributes={"queue.type": "BatchCQ"})
    sent = feed(rocketmq, topic, 200)
    assert sorted(bodies(read(rocketmq, subscribe=topic))) == sorted(sent)
    run = Run(rocketmq, subscribe=topic, startingOffsets="earliest", maxOffsetsPerTrigger=30)
    run.drain(sent)
    assert sorted(run.read) == sorted(sent)
    tasks = list(rows_by_task(rocketmq, topic))
    assert sorted(body for task in tasks for body in task) == sorted(sent)
    assert len(tasks) > 10
    assert lost_lines() == []


@pytest.mark.parametrize("batch", [7, 2500])
def test_java_batches_are_read_once_from_any_starting_offset(rocketmq, make_topic, lost_lines, batch):
    """Java's own ids are the witness; limits and starting offsets lie in the middle of batches."""
    topic = make_topic(queues=2, attributes={"queue.type": "BatchCQ"})
    sent = Counter(
        (r.id, r.queue, r.offset, r.md5) for r in java_send(rocketmq.name_server, topic, 10_000, batch=batch)
    )
    assert len(sent) == 10_000
    assert Counter(batch_places(rocketmq, topic)) == sent
    starts = json.dumps({topic: {"broker-a": {"0": 1234, "1": 1236}}})
    behind = Counter(place for place in sent if place[2] >= (1234, 1236)[place[1]])
    assert Counter(batch_places(rocketmq, topic, startingOffsets=starts)) == behind
    run = Run(rocketmq, subscribe=topic, startingOffsets="earliest", maxOffsetsPerTrigger=3333)
    found: list[Row] = []
    while len(found) < 10_000:
        end = run.ahead()
        part = rows(run.reader, run.plan(end))
        assert 0 < len(part) <= 3333
        found, run.offset = found + part, end
    assert Counter(map(_of_row, found)) == sent
    assert lost_lines() == []


def test_tags_of_a_batch_topic_are_those_of_its_messages(rocketmq, make_topic, lost_lines):
    """Brokers would drop batches without the tag, whatever they hold; sql, which only brokers know, is refused."""
    batched, ordinary = make_topic(queues=2, attributes={"queue.type": "BatchCQ"}), make_topic(queues=2)
    wanted = [feed(rocketmq, topic, 40, tags="a") for topic in (batched, ordinary)]
    for topic in (batched, ordinary):
        feed(rocketmq, topic, 40, tags="b")
    both = f"{batched},{ordinary}"
    assert Counter(bodies(read(rocketmq, subscribe=both, tags="a || c"))) == Counter(wanted[0] + wanted[1])
    run = Run(rocketmq, subscribe=both, tags="a", startingOffsets="earliest", maxOffsetsPerTrigger=30)
    run.drain(wanted[0] + wanted[1])
    with pytest.raises(OptionError, match="is a batch topic"):
        read(rocketmq, subscribe=both, sql="TAGS = 'a'")
    assert lost_lines() == []


def batch_places(mq: LocalBroker, topic: str, **options: object) -> Iterator[Place]:
    reader = batch_reader(mq, subscribe=topic, **options)
    yield from map(_of_row, rows(reader, reader.partitions()))


def _of_row(row: Row) -> Place:
    return row["msgId"], row["queueId"], row["queueOffset"], md5(row["body"])


def rows_by_task(mq: LocalBroker, topic: str) -> Iterator[list[str]]:
    reader = batch_reader(mq, subscribe=topic, maxRecordsPerPartition=7)
    for partition in reader.partitions():
        yield bodies(rows(reader, [partition]))


def test_compaction_of_older_messages_is_no_data_loss(make_cluster, lost_lines):
    mq = make_cluster(COMPACTION)
    mq.create_topic("table", 1, attributes={"cleanup.policy": "COMPACTION"})
    count = 600
    made = names(count)
    sent = [Message("table", body.encode(), keys=[str(n % 10)], tags="ab"[n % 2]) for n, body in enumerate(made)]
    post_to_compacted_topic(mq, sent, 10)
    run = Run(mq, subscribe="table", startingOffsets="earliest", compacted=True)
    found = read(mq, subscribe="table")
    assert {row["keys"][0]: row["body"].decode() for row in found} == {str(n % 10): made[n] for n in range(590, 600)}
    assert bodies(read(mq, subscribe="table", tags="a")) == bodies(row for row in found if row["tags"] == "a")
    with pytest.raises(OptionError, match="a compaction topic, which brokers do not filter"):
        read(mq, subscribe="table", sql="TAGS = 'a'")
    run.until(lambda: sum(run.positions.values()) == count)
    assert not Counter(made[590:]) - Counter(run.read)
    assert not Counter(run.read) - Counter(made)
    assert lost_lines() == []
    keyless = Message("table", b"nobody keeps it")
    with Producer(name_server=mq.name_server, group="tables", auto_batch=True) as producer:
        with pytest.raises(MessageRefused, match="Message 1 of a batch has no key, but 'table' is a compaction topic"):
            producer.send_batch([Message("table", b"kept", keys="k"), keyless])
        with pytest.raises(MessageRefused, match="row 1: no key, but 'table' is a compaction topic"):
            producer.send_arrow(pa.table({"body": [b"kept", b"not"], "keys": ["k", None]}), "table")
        for sent in [producer.send_async(keyless) for _ in range(2)]:
            with pytest.raises(RocketMQError, match="Required message key is missing"):
                sent.result(20)


HOLED = {False: "orders", True: "batches"}


@pytest.fixture(scope="module")
def holed():
    """A broker that has lost a file of its log of each topic, an ordinary and a batch one; what was there, and what was in it."""
    conf = {**WITHOUT_TIMERS, "mappedFileSizeCommitLog": 1 << 20, "maxMessageSize": 512 << 10}
    with LocalBroker(conf=conf, quiet=True) as mq:
        known = {}
        for batch, topic in HOLED.items():
            mq.create_topic(topic, 2, batch=batch)
            for _ in range(40 if batch else 4):  # not compressed, and both queues in each file
                post(mq, [Message(topic, os.urandom(10_000)) for _ in range(10 if batch else 100)])
            known[topic] = read(mq, subscribe=topic, metadata="full")
        mq.stop("broker-a")
        lost = {}
        for topic, before in known.items():
            first = min(r["commitLogOffset"] for r in before)
            logs = sorted((mq.data / "broker-a" / "store" / "commitlog").iterdir())
            gone = next(path for path in logs if int(path.name) > first)
            gone.unlink()
            begin = int(gone.name)
            lost[topic] = {place(r) for r in before if begin <= r["commitLogOffset"] < begin + (1 << 20)}
        mq.restart("broker-a")
        yield mq, known, lost


@pytest.mark.parametrize("batch", [False, True])
def test_missing_log_file_is_data_loss_despite_found_answer(batch, holed, lost_lines):
    """Index and minimum know nothing of it: the broker skips its messages and goes on behind them."""
    topic = HOLED[batch]
    mq, before, lost = holed[0], holed[1][topic], holed[2][topic]
    assert len(before) == 400
    assert (len({r["commitLogOffset"] for r in before}) < 400) == batch
    assert len(lost) > 50
    options = {"subscribe": topic, "readDeadline": "6s"}
    with pytest.raises(DataLossError, match=rf"{topic}/broker-a/\d offsets \d+ to \d+ \(truncated by retention\)"):
        read(mq, **options)
    assert lost_lines() == []
    left = read(mq, failOnDataLoss="warn", **options)
    assert Counter(map(place, left)) == Counter(map(place, before)) - Counter(lost)
    told = [(int(q), n) for line in lost_lines() for q, a, b in PLACE.findall(line) for n in range(int(a), int(b))]
    assert Counter(told) == Counter(lost)


def place(row: Row) -> tuple[int, int]:
    return row["queueId"], row["queueOffset"]


PLACE = re.compile(r"broker-a/(\d) offsets (\d+) to (\d+) ")


def lagging(mq: LocalBroker, topic: str) -> set[str]:
    """A slave that has only the end of what its master has; all messages."""
    slave = mq.slaves[0]
    mq.create_topic(topic, 2)
    killed(mq, slave)
    sent = set(feed(mq, topic, 10, queues=[0]))
    mq.create_topic("filler", 1)
    for _ in range(5):
        post(mq, [Message("filler", bytes(1_000_000))])
    sent |= set(feed(mq, topic, 10, queues=[1]))
    shutil.rmtree(mq.data / slave / "store")
    mq.restart(slave)
    mq_servers = mq._servers
    assert mq_servers is not None
    for name in (topic, "filler"):  # which it would ask its master for in a minute
        mq_servers.registration.copy_topic(name, "broker-a", mq_servers.server(slave))
    return sent


@pytest.mark.parametrize("where", ["slave", "hint"])
def test_slave_that_lags_behind_master_is_never_trusted(where, make_cluster, lost_lines):
    """Asked for offsets that it does not have it answers "success, nothing there"."""
    mq = make_cluster({"mappedFileSizeCommitLog": 4 << 20, "maxMessageSize": 2 << 20}, slaves=1)
    sent = lagging(mq, "orders")
    options = {"subscribe": "orders", "readFrom": where, "readDeadline": "30s", "requestTimeout": "1s"}
    assert Counter(bodies(read(mq, **options))) == Counter(sent)
    run = Run(mq, startingOffsets="earliest", **options)
    run.drain(sent)
    assert sorted(run.read) == sorted(sent)
    fresh = Run(mq, startingOffsets="earliest", **options)
    killed(mq, "broker-a")
    # What is planned of the last answers of the dead is waited for: that is another test's.
    eventually(lambda: positions(fresh.latest()).get(MessageQueue("orders", "broker-a", 0), 0) == 0)
    deadline = Deadline.after(3)
    while not deadline.expired:
        fresh.batch()
    assert not Counter(fresh.read) - Counter(sent)  # nothing or the half that it has; the other half is waited for
    assert not [queue for queue, at in fresh.positions.items() if queue.queue_id == 0 and at != 0]
    mq.restart("broker-a")
    fresh.drain(sent)
    assert sorted(fresh.read) == sorted(sent)
    assert lost_lines() == []
