"""A program for Spark's Kafka connector, with another format, other servers, and ``kafkaColumns``."""

from __future__ import annotations

import json
import uuid
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from pyspark.errors import StreamingQueryException

from rocketmq_spark import Admin, LocalBroker, foreach_batch_writer, read_rocketmq
from rocketmq_spark.model import MessageQueue
from tests.reading import feed
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
    queues = [MessageQueue(topic, broker, number) for broker in ("broker-a", "broker-b") for number in range(3)]
    sent = [feed(pair, topic, 1, queues=[queue])[0] for queue in queues]
    run()
    # The checkpoint had two queues of each broker, and gets the third ones of both.
    assert [seen[body.encode()] for body in sent] == [0, 1, 4, 2, 3, 5]


def test_keys_keep_their_partition_and_null_keys_are_spread(
    spark: SparkSession, rocketmq: LocalBroker, topic: str
) -> None:
    rows = [(f"k{i % 5}" if i % 2 else None, str(i)) for i in range(400)]
    write(
        spark.createDataFrame(rows, "key string, value string").repartition(12),
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


def test_null_and_empty_values(spark: SparkSession, rocketmq: LocalBroker, topic: str) -> None:
    """SPARK-27494. A tombstone has a key and no value."""
    rows = [("a", None), ("b", b""), (None, b"x"), ("c", b"\0")]
    frame = spark.createDataFrame(rows, "key string, value binary")
    with pytest.raises(Exception, match="value is null"):
        write(frame, rocketmq.name_server, topic=topic, kafkaColumns="true")
    write(frame, rocketmq.name_server, topic=topic, kafkaColumns="true", emptyBodies="mark")
    found = read(spark, rocketmq.name_server, topic, **READ).selectExpr("cast(key as string)", "value", "headers")
    values = {(row["key"], row["value"] and bytes(row["value"]), row["headers"]) for row in found.collect()}
    assert values == {("a", None, None), ("b", b"", None), (None, b"x", None), ("c", b"\0", None)}


def test_partition_beats_key_and_last_of_repeated_headers_counts(spark: SparkSession, pair: LocalBroker) -> None:
    topic = new_topic(pair)
    headers = [("h", b"1"), ("h", b"2")]
    rows = [("same key", str(number), number, headers) for number in range(4)]
    schema = "key string, value string, partition int, headers array<struct<key:string,value:binary>>"
    write(spark.createDataFrame(rows, schema), pair.name_server, topic=topic, kafkaColumns="true")
    found = read(spark, pair.name_server, topic, **READ).selectExpr("cast(value as string)", "partition", "headers")
    assert sorted((row["value"], row["partition"]) for row in found.collect()) == [(str(n), n) for n in range(4)]
    assert {(each["key"], bytes(each["value"])) for row in found.collect() for each in row["headers"]} == {("h", b"2")}


def test_topic_option_overrides_the_column_and_one_is_required(
    spark: SparkSession, rocketmq: LocalBroker, make_topic: Any
) -> None:
    by_column, by_option = make_topic(), make_topic()
    frame = spark.createDataFrame([("v", by_column)], "value string, topic string")
    write(frame, rocketmq.name_server, kafkaColumns="true")
    write(frame, rocketmq.name_server, kafkaColumns="true", topic=by_option)
    for topic in (by_column, by_option):
        (row,) = read(spark, rocketmq.name_server, topic, kafkaColumns="true").collect()
        assert row["topic"] == topic
    with pytest.raises(Exception, match="neither option 'topic' nor a column 'topic'"):
        write(frame.drop("topic"), rocketmq.name_server, kafkaColumns="true")
    with pytest.raises(Exception, match="column 'value' is missing"):
        write(frame.drop("value"), rocketmq.name_server, kafkaColumns="true")


def test_assigned_queues_keep_their_partitions(spark: SparkSession, pair: LocalBroker) -> None:
    topic = new_topic(pair)
    write(frame(spark, topic), pair.name_server, kafkaColumns="true")
    reader = spark.read.format("rocketmq").option("nameServer", pair.name_server).option("kafkaColumns", "true")
    rows = reader.option("assign", f'{{"{topic}":{{"broker-b":[1]}}}}').load()
    assert [(row["partition"], bytes(row["value"])) for row in rows.collect()] == [(3, b"2")]


def test_a_partition_beside_a_selector_is_refused(spark: SparkSession, rocketmq: LocalBroker, topic: str) -> None:
    """Spark's Kafka sink lets the column go before ``kafka.partitioner.class``; here one of the two must go."""
    frame = spark.createDataFrame([("v", 0)], "value string, partition int")
    with pytest.raises(Exception, match="column 'partition' has no effect with queueSelector 'hash'"):
        write(frame, rocketmq.name_server, topic=topic, kafkaColumns="true", queueSelector="hash")


def test_a_null_topic_fails_the_write(spark: SparkSession, rocketmq: LocalBroker) -> None:
    frame = spark.createDataFrame([(None, "v")], "topic string, value string")
    with pytest.raises(Exception, match="row 0: topic is null or empty"):
        write(frame, rocketmq.name_server, kafkaColumns="true")


@pytest.mark.parametrize(
    ("schema", "told"),
    [
        ("value int", "column 'value' is int; expected string or binary"),
        ("value string, key int", "column 'key' is int; expected string or binary"),
        ("value string, topic binary", "column 'topic' is binary; expected string"),
        ("value string, partition string", "column 'partition' is string; expected int"),
        ("value string, headers array<string>", "column 'headers' is array<string>; expected array<struct<"),
    ],
)
def test_columns_of_wrong_types_are_refused(
    spark: SparkSession, rocketmq: LocalBroker, topic: str, schema: str, told: str
) -> None:
    with pytest.raises(Exception, match=told):
        write(spark.createDataFrame([], schema), rocketmq.name_server, topic=topic, kafkaColumns="true")


def test_names_of_columns_have_any_case(spark: SparkSession, rocketmq: LocalBroker, topic: str) -> None:
    headers = "array(named_struct('KEY', 'h', 'Value', cast('1' AS binary))) Headers"
    rows = spark.range(1).selectExpr("'k' KEY", "'v' Value", headers, "'x' ignored")
    write(rows, rocketmq.name_server, topic=topic, kafkaColumns="true")
    (row,) = read(spark, rocketmq.name_server, topic, **READ).selectExpr("cast(key AS string)", "headers").collect()
    assert (row["key"], [(each["key"], bytes(each["value"])) for each in row["headers"]]) == ("k", [("h", b"1")])


def test_a_partition_that_does_not_exist_fails_the_write(
    spark: SparkSession, rocketmq: LocalBroker, topic: str
) -> None:
    frame = spark.createDataFrame([("v", 1000)], "value string, partition int")
    with pytest.raises(Exception, match="partition is 1000, but topic"):
        write(frame, rocketmq.name_server, topic=topic, kafkaColumns="true")


def test_the_option_is_switched_on_for_a_repeated_batch(spark: SparkSession, pair: LocalBroker, tmp_path: Path) -> None:
    """A batch without rows logs the numbers, so that no later run makes others."""
    topic, batches = new_topic(pair), list[tuple[int, list[tuple[int, str]]]]()

    def run(function: Any, **given: str) -> None:
        rows = read_stream(spark, pair.name_server, topic, startingOffsets="earliest", **given)
        writer = rows.writeStream.foreachBatch(function).option("checkpointLocation", str(tmp_path / "checkpoint"))
        query = writer.trigger(availableNow=True).start()
        assert query.awaitTermination(120)

    def fail(batch: Any, number: int) -> None:
        raise RuntimeError("stopped in the batch")

    def keep(batch: Any, number: int) -> None:
        rows = batch.selectExpr("partition", "cast(value as string) as value").collect()
        batches.append((number, sorted((row["partition"], row["value"]) for row in rows)))

    write(frame(spark, topic), pair.name_server, kafkaColumns="true")
    with pytest.raises(StreamingQueryException, match="stopped in the batch"):
        run(fail)
    run(keep, kafkaColumns="true")
    expected = sorted((number, value.decode()) for _, value, number, _ in ROWS)
    assert [batch for batch in batches if batch[1]] == [(0, expected)]
    offsets = tmp_path / "checkpoint" / "offsets"
    last = (offsets / str(max(int(file.name) for file in offsets.iterdir() if file.name.isdecimal()))).read_text()
    assert json.loads(last.splitlines()[-1])["partitions"] == {topic: [["broker-a", 0, 2], ["broker-b", 0, 2]]}
    done = len(batches)
    run(keep, kafkaColumns="true")
    assert batches[done:] == [], "numbers are logged once"
