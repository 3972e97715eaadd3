"""Delays of any length as a Spark job: messages wait in dmq_inner_topic and come to their own topic when they are due.

    spark-submit examples/delay_pipeline.py --name-server 127.0.0.1:9876 --checkpoint /tmp/delay-checkpoint

The checkpoint holds what waits; one job with it at a time. The job runs until it is stopped, and goes on where it was
when it is started again: what fell due meanwhile is sent at once.
"""

from __future__ import annotations

import argparse

from pyspark.sql import SparkSession
from pyspark.sql.streaming.readwriter import DataStreamWriter

from rocketmq_spark.delay import INNER_TOPIC, delayed
from rocketmq_spark.delay.stream import present

CONF = {
    "spark.sql.streaming.stateStore.providerClass": "org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider",
    # Only what changed is written with each micro-batch, not the files of RocksDB.
    "spark.sql.streaming.stateStore.rocksdb.changelogCheckpointing.enabled": "true",
}


def pipeline(spark: SparkSession, name_server: str, inner_topic: str, checkpoint: str) -> DataStreamWriter:
    """The stream, not yet started."""
    messages = (
        spark.readStream.format("rocketmq")
        .option("nameServer", name_server)
        .option("subscribe", inner_topic)
        .option("startingOffsets", "earliest")
        .option("columns", "body")
        .load()
    )
    return (
        delayed(messages)
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
    parser.add_argument("--checkpoint", required=True, help="folder where Spark keeps offsets and what waits")
    parser.add_argument("--interval", default="1 second", help="how often it looks what is due (default: %(default)s)")
    args = parser.parse_args()

    spark = SparkSession.builder.appName("delay pipeline").config(map=CONF).getOrCreate()
    stream = pipeline(spark, args.name_server, args.inner_topic, args.checkpoint).trigger(processingTime=args.interval)
    try:
        with present(args.inner_topic, name_server=args.name_server):  # longDelay=dmq asks whether anybody reads
            stream.start().awaitTermination()
    finally:
        spark.stop()


if __name__ == "__main__":
    main()
