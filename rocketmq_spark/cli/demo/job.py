"""The demo's streaming query and its Spark session.

The query reads orders as JSON and writes totals per window and region as JSON. It is plain Spark except for the two
``format("rocketmq")``. ``examples/orders_pipeline.py`` has the same functions as a job; a test compares them.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as sf
from pyspark.sql.streaming.readwriter import DataStreamWriter

from rocketmq_spark.cli.demo.stage import Stage, handle_ctrl_c, stop_once

ORDER = "order_id string, region string, amount decimal(12,2), ts timestamp"
TOTAL = "window_start timestamp, window_end timestamp, region string, orders bigint, amount decimal(22,2)"


def read_orders(spark: SparkSession, name_server: str, topic: str) -> DataFrame:
    """The topic as a stream of orders, from its beginning. A body that is not an order gives nulls, which no total includes."""
    messages = (
        spark.readStream.format("rocketmq")
        .option("nameServer", name_server)
        .option("subscribe", topic)
        .option("startingOffsets", "earliest")
        .load()
    )
    return messages.select(sf.from_json(sf.col("body").cast("string"), ORDER).alias("o")).select("o.*")


def region_totals(orders: DataFrame, window: str, watermark: str) -> DataFrame:
    """Orders and their amount per window of event time and region; a window ends when the watermark passes it."""
    return (
        orders.withWatermark("ts", watermark)
        .groupBy(sf.window("ts", window).alias("w"), "region")
        .agg(sf.count("*").alias("orders"), sf.sum("amount").alias("amount"))
        .select("w.start", "w.end", "region", "orders", "amount")
        .toDF("window_start", "window_end", "region", "orders", "amount")
    )


def as_messages(totals: DataFrame) -> DataFrame:
    """Return the columns of the sink: the total as JSON, its region as tags, region and window as key."""
    return totals.select(
        sf.to_json(sf.struct("*")).alias("body"),
        sf.col("region").alias("tags"),
        sf.concat_ws("@", "region", sf.date_format("window_start", "yyyyMMdd'T'HHmmss")).alias("keys"),
    )


def write_totals(totals: DataFrame, name_server: str, topic: str, checkpoint: str) -> DataStreamWriter:
    """Return the writer. Append mode sends each total once, when its window has ended."""
    return (
        as_messages(totals)
        .writeStream.format("rocketmq")
        .outputMode("append")
        .option("nameServer", name_server)
        .option("topic", topic)
        .option("checkpointLocation", checkpoint)
    )


def read_totals(spark: SparkSession, name_server: str, topic: str) -> DataFrame:
    """What was written, read back as a batch."""
    messages = spark.read.format("rocketmq").option("nameServer", name_server).option("subscribe", topic).load()
    return messages.select(sf.from_json(sf.col("body").cast("string"), TOTAL).alias("t")).select("t.*")


_SPARK = {
    # A minute is too short for the second compiler to pay: with it the driver takes twice the processor time.
    "spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC",
    "spark.python.daemon.module": "rocketmq_spark.daemon",
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    "spark.driver.host": "127.0.0.1",
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.driver.memory": "1g",
    "spark.sql.shuffle.partitions": "2",
    "spark.sql.adaptive.enabled": "false",
    "spark.sql.session.timeZone": "UTC",
    "spark.sql.catalogImplementation": "in-memory",
    "spark.python.unix.domain.socket.enabled": "true",
    "spark.sql.execution.python.udf.buffer.size": str(1 << 20),
    "spark.sql.streaming.numRecentProgressUpdates": "100000",
    "spark.sql.streaming.stopTimeout": "10s",
    "spark.log.level": "ERROR",
}


@contextlib.contextmanager
def spark_session(made: Stage) -> Iterator[SparkSession]:
    """A local Spark that says nothing here: what it prints goes to a file of the run."""
    os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
    builder = SparkSession.builder.master("local[2]").appName("rocketmq-spark demo")
    places = {"spark.sql.warehouse.dir": str(made.folder / "warehouse"), "spark.local.dir": str(made.folder / "local")}
    for name, value in {**_SPARK, **places}.items():
        builder = builder.config(name, value)
    with _printing_to(made.spark_log):
        spark = builder.getOrCreate()
    handle_ctrl_c(stop_once)  # PySpark's own handler cancels jobs, whose failures would be the last thing to be seen
    try:
        yield spark
    finally:
        spark.stop()


@contextlib.contextmanager
def _printing_to(path: Path) -> Iterator[None]:
    """File descriptors 1 and 2 lead to ``path``: children that start inside keep them for life."""
    sys.stdout.flush()
    sys.stderr.flush()
    saved = [(fd, os.dup(fd)) for fd in (1, 2)]
    try:
        with path.open("ab") as log:
            for fd, _ in saved:
                os.dup2(log.fileno(), fd)
        yield
    finally:
        for fd, copy in saved:
            os.dup2(copy, fd)
            os.close(copy)
