"""PySpark 3.5, without data sources in Python: ``write_rocketmq``, ``foreach_batch_writer`` and ``read_rocketmq``.

``make test-3.5`` runs it, with the PySpark of this Python.
"""

from __future__ import annotations

import tempfile
from collections import Counter
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pyspark
from pyspark.sql import SparkSession

from rocketmq_spark import (
    PullConsumer,
    RocketMQError,
    exactly_once_conf,
    explain,
    foreach_batch_writer,
    low_latency_conf,
    read_rocketmq,
    register,
    write_rocketmq,
)
from rocketmq_spark.localbroker import LocalBroker

ROWS = 20_000
LINES = 500


def read(name_server: str, topic: str, count: int) -> Counter[tuple[str, str | None, str | None, str | None]]:
    """The body, tags, first key and a property of all stored messages, counted."""
    found: Counter[tuple[str, str | None, str | None, str | None]] = Counter()
    with PullConsumer(name_server, f"{topic}-readers", consume_from_where="earliest") as consumer:
        consumer.subscribe(topic)
        while found.total() < count or consumer.poll(0.5):
            for message in consumer.poll(10.0):
                found[message.body.decode(), message.tags, message.keys[0], message.properties.get("place")] += 1
    return found


def written_by_batch(spark: SparkSession, name_server: str) -> None:
    frame = spark.range(ROWS).selectExpr(
        "cast(id as string) body",
        "if(id % 2 = 0, 'even', 'odd') tags",
        "array(concat('k', id)) keys",
        "map('place', cast(id % 7 as string)) properties",
    )
    done = write_rocketmq(frame.repartition(4), name_server, topic="batch")
    assert done.rows == ROWS, done
    expected = Counter((str(i), "odd" if i % 2 else "even", f"k{i}", str(i % 7)) for i in range(ROWS))
    assert read(name_server, "batch", ROWS) == expected


def written_by_streams(spark: SparkSession, name_server: str, folder: Path, topic: str, **options: Any) -> None:
    """Two runs of a query; new lines arrive between them."""
    checkpoint, lines = str(folder / topic), folder / f"{topic}-lines"
    lines.mkdir()
    for run in range(2):
        (lines / f"{run}.txt").write_text("".join(f"{run}-{i}\n" for i in range(LINES)))
        rows = spark.readStream.text(str(lines)).selectExpr("value body", "array(value) keys")
        if options:
            options["checkpoint_location"] = checkpoint
        write = foreach_batch_writer(name_server, topic=topic, **options)
        query = rows.writeStream.foreachBatch(write).option("checkpointLocation", checkpoint)
        query.trigger(availableNow=True).start().awaitTermination()
        assert write.total.rows == LINES, write.total
    expected = Counter((f"{run}-{i}", None, f"{run}-{i}", None) for run in range(2) for i in range(LINES))
    assert read(name_server, topic, 2 * LINES) == expected


def read_by_function(spark: SparkSession, name_server: str) -> None:
    """The columns of all written rows; a second action reads the same rows."""
    frame = read_rocketmq(spark, name_server, subscribe="batch", metadata="full", property_columns={"place": "bigint"})
    expected = Counter((str(i), "odd" if i % 2 else "even", f"k{i}", i % 7, str(i % 7)) for i in range(ROWS))
    for _ in range(2):
        rows = frame.select("body", "tags", "keys", "place", "properties", "storeTimestamp", "queueOffset").collect()
        found = Counter(
            (bytes(row.body).decode(), row.tags, row["keys"][0], row.place, row.properties["place"]) for row in rows
        )
        assert found == expected
        assert {row.storeTimestamp.year for row in rows} == {datetime.now(UTC).year}
    assert frame.groupBy("tags").count().count() == 2


def refused(spark: SparkSession, name_server: str) -> str:
    """The error of ``register`` on a PySpark without data sources in Python; "registered" if there is none."""
    try:
        register(spark)
    except RocketMQError as e:
        return explain(e)
    return "registered"


def main() -> None:
    folder = Path(tempfile.mkdtemp())
    spark = (
        SparkSession.builder.master("local[2]")
        .config(map={**exactly_once_conf(), **low_latency_conf()})
        .config("spark.ui.enabled", "false")
        .config("spark.ui.showConsoleProgress", "false")
        .getOrCreate()
    )
    with LocalBroker() as broker:
        for topic in ("batch", "stream", "once"):
            broker.create_topic(topic, queues=4)
        written_by_batch(spark, broker.name_server)
        read_by_function(spark, broker.name_server)
        written_by_streams(spark, broker.name_server, folder, "stream")
        written_by_streams(spark, broker.name_server, folder, "once", delivery_guarantee="exactly-once")
        said = refused(spark, broker.name_server)
    spark.stop()
    has_sources = hasattr(spark, "dataSource")
    assert said == "registered" if has_sources else "register needs pyspark.sql.datasource.DataSource" in said, said
    print(f"PySpark {pyspark.__version__}: {ROWS} rows and {4 * LINES} lines written and read back; register: {said}")


if __name__ == "__main__":
    main()
