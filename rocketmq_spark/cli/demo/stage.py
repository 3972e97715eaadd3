"""The demo's broker, topics and Spark session, its streaming query, and the figures that the demo shows.

The query reads orders as JSON and writes totals per window and region as JSON. It is plain Spark except for the two
``format("rocketmq")``. ``examples/orders_pipeline.py`` has the same functions as a job; a test compares them. The figures
are counts from Spark's progress, offsets from the broker, and the newest totals.
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import json
import os
import shutil
import signal
import sys
import threading
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import IO

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as sf
from pyspark.sql.streaming.listener import StreamingQueryProgress
from pyspark.sql.streaming.query import StreamingQuery
from pyspark.sql.streaming.readwriter import DataStreamWriter

from rocketmq_spark import options as options_table
from rocketmq_spark import session
from rocketmq_spark.base import folders
from rocketmq_spark.base.clock import Deadline
from rocketmq_spark.cli.reading import TopicReader, earliest
from rocketmq_spark.client.admin import BaseAdmin
from rocketmq_spark.errors import RocketMQError
from rocketmq_spark.localbroker import LocalBroker, distro
from rocketmq_spark.model import MessageQueue
from rocketmq_spark.spark.monitoring.queries import ends_of
from rocketmq_spark.spark.source.offsets import Offsets

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


# What a micro-batch costs is mostly set-up of tasks: few queues and few partitions make it quick.
QUEUES = 4
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


@dataclass(frozen=True, slots=True)
class Stage:
    """A broker to use, the two topics on it, and the folder of this run; ``broker_data`` None: it is not ours.

    ``proxy`` is the Proxy through which totals are written, over gRPC; None: they go to the broker.
    """

    name_server: str
    orders: str
    totals: str
    folder: Path
    broker_data: Path | None
    proxy: str | None = None

    @property
    def spark_log(self) -> Path:
        return self.folder / "spark.log"


@contextlib.contextmanager
def stage(name_server: str | None, grpc: bool = False, proxy: str | None = None) -> Iterator[Stage]:
    """A broker of our own with fresh data (``grpc``: and a Proxy), or new topics on one that exists, with its ``proxy``."""
    base = distro.cache_folder() / "demo"
    with contextlib.ExitStack() as stack:
        with distro.writing_to(base), distro.exclusive(base / "lock"):
            folder = _free_folder(base, stack)
            if name_server is None:
                mq = stack.enter_context(LocalBroker(data=folder / "broker", proxy=grpc, queues=QUEUES))
                made = Stage(
                    mq.name_server, "orders", "order-totals", folder, folder / "broker", mq.proxy_grpc if grpc else None
                )
            else:
                suffix = uuid.uuid4().hex[:6]
                made = Stage(name_server, f"demo-orders-{suffix}", f"demo-totals-{suffix}", folder, None, proxy)
        with BaseAdmin(made.name_server) as admin:
            for topic in (made.orders, made.totals):
                admin.create_topic(topic, QUEUES)
        yield made


def _free_folder(base: Path, stack: contextlib.ExitStack) -> Path:
    """The first of run-1, run-2, ... that is not in use, emptied. A broker started on its data counts as use."""
    for number in itertools.count(1):
        folder = base / f"run-{number}"
        folders.make(folder / "broker")
        own = (folder / "in-use").open("a")
        if _locks(own) and _is_free(folder / "broker" / "in-use"):
            stack.callback(own.close)
            for path in folder.iterdir():
                if path.is_dir():
                    shutil.rmtree(path)
            return folder
        own.close()
    raise AssertionError


def _is_free(path: Path) -> bool:
    with path.open("a") as lock:
        return _locks(lock)


def _locks(file: IO[str]) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


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
    _handle_ctrl_c(_stop_once)  # PySpark's own handler cancels jobs, whose failures would be the last thing to be seen
    try:
        yield spark
    finally:
        spark.stop()


@contextlib.contextmanager
def one_ctrl_c() -> Iterator[None]:
    """Ctrl-C raises ``KeyboardInterrupt`` once; a second one does not disturb the tidying up after the first."""
    _handle_ctrl_c(_stop_once)
    try:
        yield
    finally:
        _handle_ctrl_c(signal.default_int_handler)


def _stop_once(number: int, frame: FrameType | None) -> None:
    _handle_ctrl_c(signal.SIG_IGN)
    print("Stopping ...", file=sys.stderr)
    raise KeyboardInterrupt


def _handle_ctrl_c(handler: Callable[[int, FrameType | None], object] | signal.Handlers) -> None:
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, handler)


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


OBSERVED = "totals"


@dataclass(slots=True)
class DemoState:
    """The demo at one moment. ``sent`` and ``phase`` are filled in by the writer of the orders."""

    phase: str = "starting"
    elapsed_s: float = 0.0
    sent: int = 0
    read: int = 0
    totals_written: int = 0
    orders_aggregated: int = 0
    totals_seen: int = 0
    dropped_late: int = 0
    lag: dict[str, int] = field(default_factory=dict)
    batch_ms: list[int] = field(default_factory=list)
    window: str = ""
    window_totals: dict[str, tuple[int, str]] = field(default_factory=dict)

    def document(self) -> Mapping[str, object]:
        return {
            "event": "progress",
            "phase": self.phase,
            "elapsedSeconds": round(self.elapsed_s, 1),
            "messagesIn": self.sent,
            "messagesRead": self.read,
            "totalsOut": self.totals_written,
            "ordersAggregated": self.orders_aggregated,
            "lag": self.lag,
            "batches": len(self.batch_ms),
            "lastBatchMs": self.batch_ms[-1] if self.batch_ms else None,
        }


class DemoWatch:
    """Keeps a ``DemoState`` up to date. Not for several threads."""

    def __init__(self, made: Stage, query: StreamingQuery) -> None:
        self.sight = DemoState()
        self._query = query
        self._topic = made.orders
        options = options_table.parse({"name_server": made.name_server}).for_role("batch source")
        self._client = session.client(options)
        self._returned = TopicReader(options, made.totals, lambda part, cause: None)
        self._returned.seek(earliest)
        self._progress: dict[tuple[int, str], StreamingQueryProgress] = {}
        self._positions: Mapping[MessageQueue, int] = {}

    def look(self) -> DemoState:
        """Ask Spark and the broker. A broker that does not answer leaves its numbers as they were."""
        self._ask_spark()
        try:
            self._ask_broker()
        except RocketMQError as e:
            if not e.retriable:
                raise
        return self.sight

    def _ask_spark(self) -> None:
        for progress in self._query.recentProgress:
            self._progress[progress.batchId, progress.timestamp] = progress
        reports = list(self._progress.values())
        sight = self.sight
        sight.read = sum(p.numInputRows for p in reports)
        observed = [p.observedMetrics[OBSERVED].asDict() for p in reports if OBSERVED in p.observedMetrics]
        sight.totals_written = sum(row["totals"] or 0 for row in observed)
        sight.orders_aggregated = sum(row["orders"] or 0 for row in observed)
        sight.dropped_late = sum(o.numRowsDroppedByWatermark for p in reports for o in p.stateOperators)
        sight.batch_ms = [p.batchDuration for p in reports if p.numInputRows]
        ends = [end for report in reports for end in ends_of(report) if end]
        if ends:
            self._positions = Offsets.from_json(ends[-1]).positions

    def _ask_broker(self) -> None:
        queues = self._client.routes.get(self._topic).readable()
        bounds = self._client.brokers.bounds(queues, Deadline.after(1.0))
        self.sight.lag = {
            f"{queue.broker_name}/{queue.queue_id}": max(0, b.max_offset - self._positions.get(queue, 0))
            for queue, b in bounds.items()
        }
        for message in self._returned.messages():
            self.sight.totals_seen += 1
            total = json.loads(message.body)
            if total["window_start"] > self.sight.window:
                self.sight.window = total["window_start"]
                self.sight.window_totals = {}
            if total["window_start"] == self.sight.window:
                self.sight.window_totals[total["region"]] = (total["orders"], f"{total['amount']:,.2f}")
