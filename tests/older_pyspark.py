"""Writes with the PySpark of this Python, which may be older than the source needs, and reads it back.

``make soak ONLY=pyspark`` runs it with several.
"""

from __future__ import annotations

import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import pyspark
from pyspark.sql import DataFrame, SparkSession

from rocketmq_spark import PullConsumer, exactly_once_conf, explain, foreach_batch_writer, write_rocketmq
from rocketmq_spark.localbroker import LocalBroker

ROWS = 20_000
LINES = 500


def read(name_server: str, topic: str, count: int) -> Counter[tuple[str, str | None, str | None, str | None]]:
    """Bodies, tags, keys and a property of all that is stored."""
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
    wanted = Counter((str(i), "odd" if i % 2 else "even", f"k{i}", str(i % 7)) for i in range(ROWS))
    assert read(name_server, "batch", ROWS) == wanted


def written_by_streams(spark: SparkSession, name_server: str, folder: Path, topic: str, **options: Any) -> None:
    """Two runs of a query, which has more to read the second time."""
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
    wanted = Counter((f"{run}-{i}", None, f"{run}-{i}", None) for run in range(2) for i in range(LINES))
    assert read(name_server, topic, 2 * LINES) == wanted


def refused(spark: SparkSession, name_server: str) -> str:
    """What a user reads who asks for the source, or the sink, where this PySpark is too old for it."""
    frame: DataFrame = spark.range(1).selectExpr("cast(id as string) body")
    said = []
    for act in (
        lambda: spark.read.format("rocketmq").option("nameServer", name_server).option("topic", "batch").load().count(),
        lambda: (
            frame.write.format("rocketmq")
            .mode("append")
            .option("nameServer", name_server)
            .option("topic", "batch")
            .save()
        ),
    ):
        try:
            act()
        except Exception as e:  # noqa: BLE001 - whatever Spark raises
            said.append(explain(e) or str(e).splitlines()[0])
        else:
            said.append("done")
    return " / ".join(said)


def main() -> None:
    folder = Path(tempfile.mkdtemp())
    spark = (
        SparkSession.builder.master("local[2]")
        .config(map=exactly_once_conf())
        .config("spark.ui.enabled", "false")
        .config("spark.ui.showConsoleProgress", "false")
        .getOrCreate()
    )
    with LocalBroker() as broker:
        for topic in ("batch", "stream", "once"):
            broker.create_topic(topic, queues=4)
        written_by_batch(spark, broker.name_server)
        written_by_streams(spark, broker.name_server, folder, "stream")
        written_by_streams(spark, broker.name_server, folder, "once", delivery_guarantee="exactly-once")
        said = refused(spark, broker.name_server)
    spark.stop()
    print(
        f"PySpark {pyspark.__version__}: {ROWS} rows and {4 * LINES} lines written and read back; the source and the sink: {said}"
    )


if __name__ == "__main__":
    main()
