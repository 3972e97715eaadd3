"""What our sink wrote is read by RocketMQ's own client: body, tags, keys and properties are equal."""

from __future__ import annotations

import pyarrow as pa
import pytest

from tests.fix_spark import drain
from tests.scale import scaled
from tests.spark.pipelines import once, read_stream, records, write
from tests.witness import KINDS, content, java_read, java_send, md5

COUNT = scaled(200_000)

SCHEMA = pa.schema(
    [
        ("body", pa.binary()),
        ("tags", pa.string()),
        ("keys", pa.list_(pa.string())),
        ("properties", pa.map_(pa.string(), pa.string())),
    ]
)


def variety(count):
    """Rows of every kind: empty tags and keys, texts of many scripts, nothing but a body, 60 KiB."""
    for i in range(count):
        kind = i % 5
        if kind == 0:
            yield b"bare %d" % i, None, None, None
        elif kind == 1:
            yield f"消息 é 🚀 {i}".encode(), f"标签{i % 3}", [f"ключ{i}", "schlüssel"], {"región": f"日本 🚀 {i}"}
        elif kind == 2:
            yield b"%09d" % i + b"\x00\x01\x02\xff" * (15 << 10), "big", [], {}
        elif kind == 3:
            yield b"empty %d" % i, "", [""], {"kept": "x", "null": None}
        else:
            yield b"packs well " * 1000 + b"%d" % i, "tag", [f"k{i}"], {f"p{j}": str(i) for j in range(8)}


def contents(rows):
    """As readers see them: no empty tags or keys, no properties that are null."""
    return [
        content(md5(body), tags, [k for k in keys or [] if k], {k: v for k, v in (properties or {}).items() if v})
        for body, tags, keys, properties in rows
    ]


def test_batch_of_every_kind(spark, broker_cluster, topic):
    rows = list(variety(scaled(5000)))
    columns = [pa.array(column, field.type) for column, field in zip(zip(*rows, strict=True), SCHEMA, strict=True)]
    write(spark.createDataFrame(pa.table(columns, SCHEMA)), broker_cluster.name_server, topic=topic)
    seen = java_read(broker_cluster.name_server, topic)
    assert sorted(record.content for record in seen) == sorted(contents(rows))
    assert len(once((record.id, ()) for record in seen)) == len(rows)
    assert {record.queue for record in seen} <= set(range(8))


def test_many(spark, broker_cluster, topic):
    frame = spark.range(0, COUNT, 1, 4).selectExpr(
        "rpad(concat('body:', id, ':'), 1024, 'x') value",
        "concat('tag', id % 7) tags",
        "concat('key', id) keys",
        "map('number', cast(id as string)) properties",
    )
    # Small enough that each of four tasks, which begin at any queue, goes round all of them.
    write(frame, broker_cluster.name_server, topic=topic, batchMaxBytes="256k")
    expected = [
        content(md5(f"body:{i}:".ljust(1024, "x").encode()), f"tag{i % 7}", [f"key{i}"], {"number": str(i)})
        for i in range(COUNT)
    ]
    seen = java_read(broker_cluster.name_server, topic)
    assert sorted(record.content for record in seen) == sorted(expected)
    assert len(once((record.id, ()) for record in seen)) == COUNT
    assert {record.queue for record in seen} == set(range(8))


def test_rows_go_to_the_topic_that_they_name(spark, broker_cluster, make_topic):
    topics = [make_topic(queues=2) for _ in range(3)]
    names = ", ".join(f"'{topic}'" for topic in topics)
    frame = spark.range(3000).selectExpr(
        "cast(id as string) body", f"element_at(array({names}), cast(id % 3 + 1 as int)) topic"
    )
    write(frame, broker_cluster.name_server)
    for i, topic in enumerate(topics):
        seen = [record.md5 for record in java_read(broker_cluster.name_server, topic)]
        assert sorted(seen) == sorted(md5(b"%d" % number) for number in range(i, 3000, 3))


@pytest.mark.parametrize("per_trigger", [10, 1000])
def test_stream_from_topic_to_topic(spark, broker_cluster, make_topic, tmp_path, per_trigger):
    """Java writes, a stream copies, Java reads; small batches and one large."""
    name_server, source, target = broker_cluster.name_server, make_topic(), make_topic()
    sent = java_send(name_server, source, 64, kinds=KINDS, batch=5)
    writer = (
        read_stream(spark, name_server, source, startingOffsets="earliest", maxOffsetsPerTrigger=per_trigger)
        .select("body", "tags", "keys", "properties")
        .writeStream.format("rocketmq")
        .option("nameServer", name_server)
        .option("topic", target)
        .option("checkpointLocation", str(tmp_path))
        .trigger(availableNow=True)
    )
    drain(writer.start)
    seen = java_read(name_server, target)
    assert sorted(record.content for record in seen) == sorted(record.content for record in sent)
    assert records(seen).keys().isdisjoint(records(sent)), "a copy is a message of its own"
