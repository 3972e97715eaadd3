"""A program for Spark's Kafka connector, with another format, other servers, and ``kafkaColumns``."""

from __future__ import annotations

import uuid
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from rocketmq_spark import Admin, LocalBroker, foreach_batch_writer, read_rocketmq
from tests.spark.pipelines import read, read_stream, write

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

SCHEMA = "key binary, value binary, topic string, partition int, headers array<struct<key:string,value:binary>>, seen timestamp"
ROWS = [
    (b"a", b"1", 0, [("h", b"x"), ("empty", b"")]),
    (b"\xff\x00", b"2", 3, None),
    (b"two words", b"3", 1, [("h", b"\xfe")]),
    (None, b"4", 2, []),
    (b"", b"5", 2, [("base64:", b"base64:")]),
]
READ = {"kafkaColumns": "true", "includeHeaders": "true"}


def new_topic(pair: LocalBroker) -> str:
    name = f"kafka-{uuid.uuid4().hex[:8]}"
    pair.create_topic(name, queues=2)
    return name


def frame(spark: SparkSession, topic: str) -> Any:
    rows = [(key, value, topic, number, headers, None) for key, value, number, headers in ROWS]
    return spark.createDataFrame(rows, SCHEMA)


def content(rows: Any) -> list[tuple[Any, ...]]:
    def plain(row: Any) -> tuple[Any, ...]:
        headers = [(each["key"], bytes(each["value"])) for each in row["headers"] or ()]
        return row["key"] and bytes(row["key"]), bytes(row["value"]), row["partition"], headers or None

    return sorted(map(plain, rows), key=lambda row: row[1])


def expected() -> list[tuple[Any, ...]]:
    return [(key, value, number, headers or None) for key, value, number, headers in ROWS]


def test_a_batch_written_and_read(spark: SparkSession, pair: LocalBroker) -> None:
    """Two brokers with two queues each: partitions 2 and 3 are those of the second."""
    topic = new_topic(pair)
    write(frame(spark, topic), pair.name_server, kafkaColumns="true")
    found = read(spark, pair.name_server, topic, **READ)
    assert found.schema.simpleString() == (
        "struct<key:binary,value:binary,topic:string,partition:int,offset:bigint,timestamp:timestamp,timestampType:int,"
        "headers:array<struct<key:string,value:binary>>>"
    )
    rows = found.collect()
    assert content(rows) == expected()
    assert {row["topic"] for row in rows} == {topic}
    assert {row["timestampType"] for row in rows} == {0}
    assert sorted((row["partition"], row["offset"]) for row in rows) == [(0, 0), (1, 0), (2, 0), (2, 1), (3, 0)]
    queues = read(spark, pair.name_server, topic).selectExpr("cast(body as string)", "brokerName", "queueId").collect()
    places = {row["body"]: (row["brokerName"], row["queueId"]) for row in queues}
    assert (places["2"], places["5"]) == (("broker-b", 1), ("broker-b", 0))
    by_function = read_rocketmq(spark, pair.name_server, subscribe=topic, kafka_columns=True, include_headers=True)
    assert content(by_function.collect()) == expected()
    assert found.selectExpr("value").count() == len(ROWS)


@pytest.mark.parametrize("way", ["sink", "foreachBatch"])
def test_a_stream_from_topic_to_topic(way: str, spark: SparkSession, pair: LocalBroker, tmp_path: Path) -> None:
    source, target = new_topic(pair), new_topic(pair)
    write(frame(spark, source), pair.name_server, kafkaColumns="true")
    rows = read_stream(spark, pair.name_server, source, startingOffsets="earliest", maxOffsetsPerTrigger=2, **READ)
    rows = rows.drop("topic")
    writer: Any = rows.writeStream
    if way == "foreachBatch":
        send = foreach_batch_writer(name_server=pair.name_server, topic=target, kafka_columns=True)
        writer = writer.foreachBatch(send)
    else:
        writer = writer.format("rocketmq").options(nameServer=pair.name_server, topic=target, kafkaColumns=True)
    query = writer.option("checkpointLocation", str(tmp_path)).trigger(availableNow=True).start()
    query.awaitTermination(120)
    assert content(read(spark, pair.name_server, target, **READ).collect()) == expected()


def test_a_queue_that_is_added_gets_the_next_number(spark: SparkSession, pair: LocalBroker, tmp_path: Path) -> None:
    """The numbers of a stream are those of its checkpoint, also after a restart; a batch numbers the route anew."""
    topic = new_topic(pair)
    write(frame(spark, topic), pair.name_server, kafkaColumns="true")
    seen: dict[bytes, int] = {}

    def note(batch: Any, number: int) -> None:
        seen.update((bytes(row["value"]), row["partition"]) for row in batch.collect())

    def run() -> None:
        rows = read_stream(spark, pair.name_server, topic, startingOffsets="earliest", **READ)
        writer = rows.writeStream.foreachBatch(note).option("checkpointLocation", str(tmp_path))
        writer.trigger(availableNow=True).start().awaitTermination(120)

    run()
    assert seen == {value: number for _, value, number, _ in ROWS}
    with Admin(pair.name_server) as admin:
        admin.widen_topic(topic, 3)
    more = [(str(10 + number), number) for number in range(6)]
    write(
        spark.createDataFrame(more, "value string, partition int"), pair.name_server, topic=topic, kafkaColumns="true"
    )
    run()
    # The route has broker-a's three queues first; the checkpoint had two of each broker, and gets the third ones of both.
    assert [seen[str(10 + number).encode()] for number in range(6)] == [0, 1, 4, 2, 3, 5]


def test_keys_keep_their_partition_and_null_keys_are_spread(
    spark: SparkSession, rocketmq: LocalBroker, topic: str
) -> None:
    rows = [(f"k{i % 5}" if i % 2 else None, str(i)) for i in range(400)]
    write(
        spark.createDataFrame(rows, "key string, value string").repartition(3),
        rocketmq.name_server,
        topic=topic,
        kafkaColumns="true",
    )
    found = (
        read(spark, rocketmq.name_server, topic, kafkaColumns="true")
        .selectExpr("cast(key as string)", "partition")
        .collect()
    )
    places = {
        key: Counter(row["partition"] for row in found if row["key"] == key) for key in {row["key"] for row in found}
    }
    assert all(len(numbers) == 1 for key, numbers in places.items() if key is not None)
    assert len(places[None]) > 1
    assert sum(sum(numbers.values()) for numbers in places.values()) == 400


def test_sql(spark: SparkSession, rocketmq: LocalBroker, topic: str) -> None:
    write(
        spark.createDataFrame([("k", "v")], "key string, value string"),
        rocketmq.name_server,
        topic=topic,
        kafkaColumns="true",
    )
    read(spark, rocketmq.name_server, topic)
    spark.sql(
        f"CREATE OR REPLACE TEMPORARY VIEW kafka_like USING rocketmq "
        f"OPTIONS (nameServer '{rocketmq.name_server}', subscribe '{topic}', kafkaColumns 'true')"
    )
    (row,) = spark.sql("SELECT CAST(key AS STRING), CAST(value AS STRING), partition, offset FROM kafka_like").collect()
    assert (row["key"], row["value"], row["offset"]) == ("k", "v", 0)
