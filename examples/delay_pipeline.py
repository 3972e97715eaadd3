"""Delays of any length as a Spark job: messages wait in dmq_inner_topic and come to their own topic when they are due.

    spark-submit examples/delay_pipeline.py --name-server 127.0.0.1:9876 --checkpoint work/delay-checkpoint

The checkpoint holds the waiting messages, so run only one job with it at a time. The job runs until it is stopped. After a
restart it continues where it stopped, and sends messages that became due in the meantime at once.
"""

from __future__ import annotations

import argparse

from pyspark.sql import SparkSession
from pyspark.sql.streaming.readwriter import DataStreamWriter

from rocketmq_spark.delay import INNER_TOPIC, delayed
from rocketmq_spark.delay.stream import present

CONF = {
    "spark.sql.streaming.stateStore.providerClass": "org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider",
    # Each micro-batch then writes only its changes, not the files of RocksDB.
    "spark.sql.streaming.stateStore.rocksdb.changelogCheckpointing.enabled": "true",
    # Rows that a Python worker gets at once: others may send messages of kilobytes that become megabytes.
    "spark.sql.execution.arrow.maxRecordsPerBatch": "64",
}


def pipeline(spark: SparkSession, name_server: str, inner_topic: str, checkpoint: str) -> DataStreamWriter:
    """Return the stream; the caller starts it."""
    messages = (
        spark.readStream.format("rocketmq")
        .option("nameServer", name_server)
        .option("subscribe", inner_topic)
        .option("startingOffsets", "earliest")
        .option("columns", "body")
        .option("maxOffsetsPerTrigger", "10000")
        .option("badMessage", "null")  # a message that cannot be decoded must not hold up the others
        .load()
    )
    return (
        delayed(messages, sink={"nameServer": name_server})
        .writeStream.format("rocketmq")
        .outputMode("append")
        .option("nameServer", name_server)
        .option("messageId", "msgId")
        .option("checkpointLocation", checkpoint)
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="Sends messages of dmq_inner_topic to their topics when they are due")
    parser.add_argument("--name-server", required=True, help="host:port of a RocketMQ name server")
    parser.add_argument("--inner-topic", default=INNER_TOPIC, help="where messages wait (default: %(default)s)")
    parser.add_argument("--checkpoint", required=True, help="folder where Spark keeps offsets and waiting messages")
    parser.add_argument("--interval", default="1 second", help="how often due messages are sent (default: %(default)s)")
    args = parser.parse_args()

    spark = SparkSession.builder.appName("delay pipeline").config(map=CONF).getOrCreate()
    stream = pipeline(spark, args.name_server, args.inner_topic, args.checkpoint).trigger(processingTime=args.interval)
    try:
        with present(args.inner_topic, name_server=args.name_server):  # for producers that check for a subscriber
            stream.start().awaitTermination()
    finally:
        spark.stop()


if __name__ == "__main__":
    main()
