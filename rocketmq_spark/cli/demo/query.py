"""The demo's streaming query: orders as JSON in, totals per window and region out, as JSON again.

Plain Spark; the only things of ours are the two ``format("rocketmq")``. examples/orders_pipeline.py holds the same
functions as a job of its own (a test compares them).
"""

from __future__ import annotations

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as sf
from pyspark.sql.streaming.readwriter import DataStreamWriter

ORDER = "order_id string, region string, amount decimal(12,2), ts timestamp"
TOTAL = "window_start timestamp, window_end timestamp, region string, orders bigint, amount decimal(22,2)"


def read_orders(spark: SparkSession, name_server: str, topic: str) -> DataFrame:
    """The topic as a stream of orders, from its beginning. A body that is no order gives nulls, and counts nowhere."""
    messages = (
        spark.readStream.format("rocketmq")
        .option("nameServer", name_server)
        .option("subscribe", topic)
        .option("startingOffsets", "earliest")
        .load()
    )
    return messages.select(sf.from_json(sf.col("body").cast("string"), ORDER).alias("o")).select("o.*")


def region_totals(orders: DataFrame, window: str, watermark: str) -> DataFrame:
    """Orders and their amount per window of event time and region; a window ends when no order of it is expected."""
    return (
        orders.withWatermark("ts", watermark)
        .groupBy(sf.window("ts", window).alias("w"), "region")
        .agg(sf.count("*").alias("orders"), sf.sum("amount").alias("amount"))
        .select("w.start", "w.end", "region", "orders", "amount")
        .toDF("window_start", "window_end", "region", "orders", "amount")
    )


def as_messages(totals: DataFrame) -> DataFrame:
    """The columns that the sink takes: the total as JSON, its region as tags, region and window as key."""
    return totals.select(
        sf.to_json(sf.struct("*")).alias("body"),
        sf.col("region").alias("tags"),
        sf.concat_ws("@", "region", sf.date_format("window_start", "yyyyMMdd'T'HHmmss")).alias("keys"),
    )


def write_totals(totals: DataFrame, name_server: str, topic: str, checkpoint: str) -> DataStreamWriter:
    """How the stream is written; append mode, so each total is sent once, when its window has ended."""
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
