"""Writes a stream of orders to a topic through a Proxy over gRPC, for networks in which brokers cannot be reached.

    spark-submit examples/grpc_sink.py --proxy 127.0.0.1:8081 --topic orders --checkpoint work/grpc-checkpoint --rows 1000

Each customer is a message group, which keeps the order of its messages: create the topic with message.type=FIFO. With --plain,
messages have no order, and the topic is an ordinary one. Needs pip install '.[grpc]' (in a clone) on all workers.
"""

from __future__ import annotations

import argparse

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.readwriter import DataStreamWriter


def orders(spark: SparkSession, rows_per_second: int, last: int) -> DataFrame:
    """Return orders numbered from 0 to below ``last``, in one partition, because only there a group keeps its order."""
    source = spark.readStream.format("rate").option("rowsPerSecond", rows_per_second).option("numPartitions", 1)
    return (
        source.load()
        .where(f"value < {last}")
        .selectExpr(
            "to_json(struct(value AS order, value % 17 AS customer)) AS body",
            "concat('customer-', value % 17) AS shardingKey",
            "array(cast(value AS string)) AS keys",
        )
    )


def pipeline(rows: DataFrame, proxy: str, topic: str, checkpoint: str) -> DataStreamWriter:
    """Return the stream; the caller starts it."""
    return (
        rows.writeStream.format("rocketmq")
        .option("transport", "grpc")
        .option("proxyEndpoint", proxy)
        .option("topic", topic)
        .option("checkpointLocation", checkpoint)
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="Sends orders through a Proxy over gRPC")
    parser.add_argument("--proxy", required=True, help="host:port of the Proxy's gRPC port, several with ;")
    parser.add_argument("--topic", required=True, help="topic for the orders")
    parser.add_argument("--checkpoint", required=True, help="folder where Spark keeps its progress")
    parser.add_argument("--rows", type=int, default=1_000_000, help="how many orders (default: %(default)s)")
    parser.add_argument("--rate", type=int, default=1000, help="orders a second (default: %(default)s)")
    parser.add_argument("--seconds", type=float, help="end after this time (default: run until stopped)")
    parser.add_argument("--plain", action="store_true", help="no message groups, for an ordinary topic")
    args = parser.parse_args()

    spark = SparkSession.builder.appName("grpc sink").getOrCreate()
    try:
        rows = orders(spark, args.rate, args.rows)
        rows = rows.drop("shardingKey") if args.plain else rows
        pipeline(rows, args.proxy, args.topic, args.checkpoint).start().awaitTermination(args.seconds)
    finally:
        spark.stop()


if __name__ == "__main__":
    main()
