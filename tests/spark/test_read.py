"""What RocketMQ's own client wrote is read once: by a batch, and by a stream that is cut into many batches."""

from __future__ import annotations

import datetime
import json
from collections import Counter

import pytest

from tests.fix_spark import ONE_BATCH, drain, finish
from tests.helpers import killed
from tests.reading import feed
from tests.scale import scaled
from tests.spark.pipelines import holds, once, read, read_stream, records, rows_of, same
from tests.witness import KINDS, java_send

COUNT = scaled(200_000)


@pytest.fixture(scope="module")
def written(broker_cluster):
    """A topic of 8 queues with messages of 1 KiB, and some of every kind, alone and in batches."""
    broker_cluster.create_topic("spark-read", 8)
    to = (broker_cluster.name_server, "spark-read")
    sent = java_send(*to, COUNT, size=1024, batch=100)
    sent += java_send(*to, scaled(2000), kinds=KINDS, size=300, first=COUNT)
    sent += java_send(*to, scaled(2000), kinds=KINDS, size=300, first=2 * COUNT, batch=20)
    return "spark-read", records(sent)


def test_batch(spark, broker_cluster, written):
    topic, expected = written
    same(once(rows_of(read(spark, broker_cluster.name_server, topic))), expected)


def test_available_now_in_at_least_five_batches(spark, broker_cluster, written, tmp_path):
    topic, expected = written
    frame = read_stream(
        spark,
        broker_cluster.name_server,
        topic,
        startingOffsets="earliest",
        maxOffsetsPerTrigger=len(expected) // 5 - 10,
    )
    batches: dict[int, list] = {}
    writer = (
        frame.writeStream.foreachBatch(lambda batch, number: batches.update({number: rows_of(batch)}))
        .option("checkpointLocation", str(tmp_path))
        .trigger(availableNow=True)
    )
    queries = []
    drain(lambda: queries.append(writer.start()) or queries[-1])
    same(once(row for rows in batches.values() for row in rows), expected)
    assert len(batches) >= 5
    sizes = [[p["numInputRows"] for p in query.recentProgress if p["numInputRows"]] for query in queries]
    assert [size for run in sizes for size in run] == list(map(len, batches.values()))
    assert max(map(len, sizes)) == (1 if ONE_BATCH else len(batches))
    assert max(map(len, batches.values())) <= len(expected) // 5 - 10 + 8


def test_a_part_by_offsets(spark, broker_cluster, written):
    topic, expected = written
    start, end = (json.dumps({topic: {"broker-a": {str(i): base + i for i in range(8)}}}) for base in (5, 105))
    found = once(rows_of(read(spark, broker_cluster.name_server, topic, startingOffsets=start, endingOffsets=end)))
    same(found, {name: row for name, row in expected.items() if 5 <= row[0][2] - row[0][1] < 105})


def test_all_columns_of_a_message(spark, broker_cluster, topic):
    before = datetime.datetime.now(datetime.UTC) - datetime.timedelta(seconds=5)
    (sent,) = java_send(broker_cluster.name_server, topic, 1, kinds=["unicode"], run="r")
    found = read(spark, broker_cluster.name_server, topic)
    holds(
        found.selectExpr(
            "topic", "brokerName", "queueId", "queueOffset", "msgId", "left(cast(body as string), 6) start",
            "md5(body) md5", "tags", "keys", "sort_array(map_entries(properties)) properties",
        ),
        "topic string, brokerName string, queueId int, queueOffset bigint, msgId string, start string, "
        "md5 string, tags string, keys array<string>, properties array<struct<key: string, value: string>>",
        [(
            topic, "broker-a", sent.queue, 0, sent.id, "r:0:消息",
            sent.md5, "标签0", ["ключ0", "schlüssel0"], [("región", "日本 🚀 0"), ("run", "r")],
        )],
    )  # fmt: skip
    (row,) = found.select("bornTimestamp", "storeTimestamp").toArrow().to_pylist()
    now = datetime.datetime.now(datetime.UTC) + datetime.timedelta(seconds=5)
    assert before < row["bornTimestamp"] < now
    assert before < row["storeTimestamp"] < now


def test_an_empty_topic_has_no_rows(spark, broker_cluster, topic):
    assert read(spark, broker_cluster.name_server, topic).count() == 0


def test_columns_that_nobody_asks_for(spark, broker_cluster, written):
    topic, expected = written
    frame = read(spark, broker_cluster.name_server, topic, columns="msgId,queueId", includeProperties="none")
    assert frame.columns == ["queueId", "msgId"]
    assert Counter(row.msgId for row in frame.collect()) == Counter(expected.keys())


def test_a_small_batch_is_read_with_its_plan(spark, lone, tmp_path):
    """Its rows are there although the broker is gone when the first task starts."""
    lone.create_topic("small", queues=4)
    sent = feed(lone, "small", 12)
    found: list[list[str]] = []

    def take(batch, number):
        killed(lone, "broker-a")
        rows = batch.selectExpr("cast(body as string) text")
        found.extend(sorted(row.text for row in rows.collect()) for _ in range(2))

    frame = read_stream(spark, lone.name_server, "small", startingOffsets="earliest")
    query = frame.writeStream.foreachBatch(take).option("checkpointLocation", str(tmp_path)).trigger(availableNow=True)
    finish(query.start())
    assert found == [sorted(sent)] * 2
