"""The Spark session of the benchmarks, and what is read and written with it."""

from __future__ import annotations

import logging
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pyspark.sql import DataFrame, SparkSession

from benchmarks import ceiling
from rocketmq_spark import LocalBroker, exactly_once_conf

_QUIET = {
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.log.level": "ERROR",
}
FAST = {
    "spark.driver.memory": "2g",
    "spark.sql.shuffle.partitions": "2",
    "spark.sql.adaptive.enabled": "false",
    "spark.python.daemon.module": "rocketmq_spark.daemon",
    "spark.python.unix.domain.socket.enabled": "true",
    "spark.sql.execution.python.udf.buffer.size": "1048576",
    **exactly_once_conf(),
}


def session(jars: Sequence[Path] = ()) -> SparkSession:
    """With the settings that docs/performance.md recommends."""
    made = plain_session(jars, FAST)
    ceiling.register(made)
    return made


def plain_session(jars: Sequence[Path], conf: Mapping[str, str], slots: int = 2) -> SparkSession:
    """A quiet local session, else with Spark's defaults."""
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
    logging.getLogger("py4j").setLevel(logging.WARNING)
    builder = SparkSession.builder.master(f"local[{slots}]").appName("rocketmq-spark-bench")
    jar_conf = {"spark.jars": ",".join(map(str, jars))} if jars else {}
    for name, value in {**_QUIET, **jar_conf, **conf}.items():
        builder = builder.config(name, value)
    return builder.getOrCreate()


def source(spark: SparkSession, broker: LocalBroker, topic: str, **options: str) -> DataFrame:
    reader = spark.read.format("rocketmq").option("nameServer", broker.name_server).option("subscribe", topic)
    return reader.options(**options).load()


def counted(frame: DataFrame, name: str) -> tuple[DataFrame, Any]:
    """``frame`` with a count observed on the way: a second pass would be a second read."""
    from pyspark.sql import Observation
    from pyspark.sql.functions import count, lit

    seen = Observation(name)
    return frame.observe(seen, count(lit(1)).alias("rows")), seen


def stream(spark: SparkSession, broker: LocalBroker, topic: str) -> DataFrame:
    reader = spark.readStream.format("rocketmq").option("nameServer", broker.name_server).option("subscribe", topic)
    return reader.option("startingOffsets", "earliest").load()


def available_now(stream: DataFrame) -> int:
    """Read everything as a stream that ends; rows read."""
    with tempfile.TemporaryDirectory() as folder:
        writer = stream.writeStream.format("noop").option("checkpointLocation", folder)
        query = writer.trigger(availableNow=True).start()
        query.awaitTermination()
        return sum(progress["numInputRows"] for progress in query.recentProgress)


def rows(spark: SparkSession, count: int, size: int, *more: str, slots: int = 2) -> DataFrame:
    """``count`` rows to write, generated in the JVM; with one body, as Java's producers send it, for making them is not meant."""
    return spark.range(0, count, 1, slots).selectExpr(
        f"X'{os.urandom(size).hex()}' body",
        "concat('tag', id % 4) tags",
        "concat('key-', id) keys",
        "map('region', 'eu-west', 'amount', cast(id as string)) properties",
        *more,
    )
