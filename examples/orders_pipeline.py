"""Orders in, totals out: a streaming job that reads one RocketMQ topic and writes another.

The job expects orders as JSON, {"order_id": "o-1", "region": "asia", "amount": 12.5, "ts": "2026-01-31T12:00:00Z"}, sums
them up per window of event time and region, and sends each total once, as JSON, when its window has ended:

    spark-submit examples/orders_pipeline.py --name-server 127.0.0.1:9876 --input orders --output order-totals \\
        --checkpoint work/orders-checkpoint

Orders to try it with: rocketmq-spark produce orders --rate 100/s
The job runs until it is stopped. Started again with the same checkpoint, it continues where it stopped. With
--available-now it reads all messages that exist at its start, and ends.
"""

from __future__ import annotations

import argparse

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as sf
from pyspark.sql.streaming.readwriter import DataStreamWriter

ORDER = "order_id string, region string, amount decimal(12,2), ts timestamp"


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


def main() -> None:
    parser = argparse.ArgumentParser(description="Totals of orders per window and region, from topic to topic")
    parser.add_argument("--name-server", required=True, help="host:port of a RocketMQ name server")
    parser.add_argument("--input", default="orders", help="topic with orders (default: %(default)s)")
    parser.add_argument("--output", default="order-totals", help="topic for totals (default: %(default)s)")
    parser.add_argument("--checkpoint", required=True, help="folder where Spark keeps offsets and state")
    parser.add_argument("--window", default="10 seconds", help="length of a window (default: %(default)s)")
    parser.add_argument("--watermark", default="10 seconds", help="how late an order may come (default: %(default)s)")
    parser.add_argument("--available-now", action="store_true", help="read what there is, then end")
    parser.add_argument("--partitions", type=int, help="state stores, fixed by the checkpoint (default: Spark's, 200)")
    args = parser.parse_args()

    spark = SparkSession.builder.appName("orders pipeline").getOrCreate()
    spark.conf.set("spark.sql.session.timeZone", "UTC")
    if args.partitions:
        spark.conf.set("spark.sql.shuffle.partitions", args.partitions)
    totals = region_totals(read_orders(spark, args.name_server, args.input), args.window, args.watermark)
    writer = write_totals(totals, args.name_server, args.output, args.checkpoint)
    if args.available_now:
        writer = writer.trigger(availableNow=True)
    query = writer.start()
    try:
        query.awaitTermination()
    finally:
        spark.stop()


if __name__ == "__main__":
    main()
