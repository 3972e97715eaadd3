"""The demo's streaming query and Spark's driver, which runs the query. The demo kills the driver and starts it again.

The query reads orders as JSON and writes totals per window and region as JSON. The query is plain Spark except for the two
``format("rocketmq")``. ``examples/orders_pipeline.py`` is a job with the same functions. A test compares the functions.

The command of the driver is ``python -m rocketmq_spark.cli.demo.job FD``. The driver reads two lines from standard input: the
``DemoEnvironment`` as JSON, and ``finish`` when all orders are written. The driver ends when its input ends. It writes lines of
JSON to the descriptor FD: ``progress`` of each batch, ``failed`` if the query fails, and at the end ``totals``, the sums over
the totals that it has read back.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import sys
from collections.abc import Iterator
from typing import IO

from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as sf
from pyspark.sql.streaming.query import StreamingQuery
from pyspark.sql.streaming.readwriter import DataStreamWriter

from rocketmq_spark.base import folders
from rocketmq_spark.cli.demo.environment import FINISH, DemoEnvironment
from rocketmq_spark.spark.conf import exactly_once_conf, private_socket_settings
from rocketmq_spark.spark.datasource import register
from rocketmq_spark.spark.monitoring.explain import explain

ORDER = "order_id string, region string, amount decimal(12,2), ts timestamp"
TOTAL = "window_start timestamp, window_end timestamp, region string, orders bigint, amount decimal(22,2)"
WINDOW = "5 seconds"
WATERMARK = "5 seconds"
_REPORT_INTERVAL_S = 0.25

# The JVM runs without the C2 compiler, because in such a short run this compiler would double the CPU time.
_JAVA_OPTIONS = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"
_SPARK_CONF = {
    **exactly_once_conf(),
    "spark.python.daemon.module": "rocketmq_spark.daemon",
    # Without authentication, every user of this machine may connect to the driver's ports, and run code in it.
    "spark.authenticate": "true",
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    "spark.driver.host": "127.0.0.1",
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.driver.memory": "1g",
    "spark.sql.shuffle.partitions": "2",
    "spark.sql.adaptive.enabled": "false",
    "spark.sql.session.timeZone": "UTC",
    "spark.sql.catalogImplementation": "in-memory",
    "spark.sql.execution.python.udf.buffer.size": str(1 << 20),
    "spark.sql.streaming.numRecentProgressUpdates": "100000",
    "spark.sql.streaming.stopTimeout": "10s",
    "spark.log.level": "ERROR",
}


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
    """Read the totals back as a batch."""
    messages = spark.read.format("rocketmq").option("nameServer", name_server).option("subscribe", topic).load()
    return messages.select(sf.from_json(sf.col("body").cast("string"), TOTAL).alias("t")).select("t.*")


@contextlib.contextmanager
def _spark_session(environment: DemoEnvironment) -> Iterator[SparkSession]:
    os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
    builder = SparkSession.builder.master("local[2]").appName("rocketmq-spark demo")
    # A driver that is killed does not delete its temporary files. The next run in this folder deletes them.
    folders.make_folders(temporary_folder := environment.folder / "tmp")
    quoted_folder = str(temporary_folder).replace("\\", "\\\\").replace('"', '\\"')
    folder_conf = {
        "spark.driver.extraJavaOptions": f'{_JAVA_OPTIONS} -Djava.io.tmpdir="{quoted_folder}"',
        "spark.sql.warehouse.dir": str(environment.folder / "warehouse"),
        "spark.local.dir": "local",  # relative, because Spark splits paths at commas, which the folder may contain
    }
    folders.make_folders(socket_folder := environment.folder / "sockets")
    for name, value in {**_SPARK_CONF, **folder_conf, **private_socket_settings(socket_folder)}.items():
        builder = builder.config(name, value)
    spark = builder.getOrCreate()
    # Spark does not find Python data sources by itself if the path of its Python contains a space.
    register(spark)
    try:
        yield spark
    finally:
        spark.stop()


def _start(spark: SparkSession, environment: DemoEnvironment) -> StreamingQuery:
    totals = region_totals(read_orders(spark, environment.name_server, environment.orders), WINDOW, WATERMARK)
    writer = write_totals(totals, environment.name_server, environment.totals, str(environment.checkpoint))
    if environment.exactly_once:
        # The shortest settling time that is allowed, because a repeated batch waits until this time has passed.
        writer = writer.option("deliveryGuarantee", "exactly-once").option("exactlyOnceSettle", "4s")
    else:
        writer = writer.option("transport", "grpc").option("proxyEndpoint", environment.proxy)
    return writer.queryName("demo").trigger(processingTime="1 second").start()


class _Reports:
    """Writes the reports for the demo, each progress of the query once."""

    def __init__(self, query: StreamingQuery, file: IO[str]) -> None:
        self._query = query
        self._file = file
        self._reported_count = 0

    def write(self, **report: object) -> None:
        print(json.dumps(report), file=self._file, flush=True)

    def write_progress(self) -> None:
        # Spark keeps every progress of the query (numRecentProgressUpdates), in order.
        for progress in self._query.recentProgress[self._reported_count :]:
            self._reported_count += 1
            late_count = sum(operator.numRowsDroppedByWatermark for operator in progress.stateOperators)
            self.write(progress={"rows": progress.numInputRows, "ms": progress.batchDuration, "late": late_count})


def _totals(spark: SparkSession, environment: DemoEnvironment) -> dict[str, int]:
    """Read the totals back as a batch, and return sums over them. A total that is stored more than once counts once."""
    stored_totals = read_totals(spark, environment.name_server, environment.totals)
    different_totals = stored_totals.groupBy(*stored_totals.columns).agg(sf.count("*").alias("copies"))
    ((count, repeated, orders, amount),) = different_totals.agg(
        sf.count("*"), sf.count_if(sf.col("copies") > 1), sf.sum("orders"), sf.sum("amount")
    ).collect()
    return {"different": count, "repeated": repeated, "orders": orders or 0, "cents": int((amount or 0) * 100)}


def main() -> None:
    report_file = os.fdopen(int(sys.argv[1]), "w", encoding="utf-8")
    commands = os.fdopen(0, "rb", buffering=0)  # without a buffer, so that select sees every line
    environment = DemoEnvironment.from_json(commands.readline())
    with _spark_session(environment) as spark:
        query = _start(spark, environment)
        reports = _Reports(query, report_file)
        try:
            while not select.select([commands], [], [], _REPORT_INTERVAL_S)[0]:
                reports.write_progress()
                if (error := query.exception()) is not None:
                    raise error
            if commands.readline().strip() != FINISH:
                return
            query.processAllAvailable()  # also waits for the batch without rows that emits the last windows
        except PySparkException as e:
            reports.write(failed=explain(e))
            return
        reports.write_progress()
        query.stop()
        reports.write(totals=_totals(spark, environment))


if __name__ == "__main__":
    main()
