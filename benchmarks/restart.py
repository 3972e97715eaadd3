"""Restarts of exactly-once writes: what the look at stored rows costs beyond the time in which brokers settle.

A batch of a million rows, all stored and not committed, in a topic to which others write at 50,000 messages a second; and
1,024 queues on eight brokers.
"""

from __future__ import annotations

import contextlib
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from pyspark.errors import StreamingQueryException
from pyspark.sql import DataFrame, SparkSession
from rich.table import Table

from benchmarks import harness, spark, workload
from benchmarks.harness import Found
from rocketmq_spark import LocalBroker, foreach_batch_writer
from rocketmq_spark.options import parse
from rocketmq_spark.session.stored_ids import scan_tools
from rocketmq_spark.spark.sink.exactly_once import snapshot_queue_ends
from rocketmq_spark.spark.sink.report import Written
from rocketmq_spark.stored.scan import StoredIdScan

ROWS, SIZE, OTHERS_PER_S = 1_000_000, 100, 50_000
BROKERS, QUEUES = 8, 1024
SETTLE_S = 10.0
_DIED = "as if the driver had died here"
_BATCH = 2_000  # messages of others that go as one


def run(session: SparkSession, found: Found) -> None:
    found["restart"] = {}
    with workload.broker() as broker:
        found["restart"][f"{ROWS:,} rows"] = _batch(session, broker)
    with workload.broker(brokers=BROKERS) as broker:
        found["restart"][f"{QUEUES:,} queues"] = _queues(broker)
    table = Table(title=f"A look at what is stored, seconds; brokers settle in {SETTLE_S:g} s of it")
    columns = ("first", "repeat", "beyond settling", "messages read")
    for column in ("case", *columns):
        table.add_column(column, justify="left" if column == "case" else "right")
    for case, row in found["restart"].items():
        table.add_row(case, *(f"{row[name]:,.1f}" if name in row else "" for name in columns))
    harness.show(table)


def _batch(session: SparkSession, broker: LocalBroker) -> dict[str, float]:
    topic = "restart-rows"
    broker.create_topic(topic, queues=workload.QUEUES)
    rows = spark.rows(session, ROWS, SIZE)
    with tempfile.TemporaryDirectory() as folder, _others(broker, topic):
        begin = workload.visible(broker, topic)
        first = _written(session, broker, topic, rows, folder, fail=True)
        again = _written(session, broker, topic, rows, folder, fail=False)
        seen = workload.visible(broker, topic) - begin
    harness.expect("first write", first.report.sent, ROWS)
    harness.expect("repeat", again.report.already_stored, ROWS)
    beyond = again.seconds - SETTLE_S
    return {"first": first.seconds, "repeat": again.seconds, "beyond settling": beyond, "messages read": float(seen)}


class _Run(NamedTuple):
    """How long the writer took for the batch, and what it reports."""

    seconds: float
    report: Written


def _written(session: SparkSession, broker: LocalBroker, topic: str, rows: DataFrame, folder: str, fail: bool) -> _Run:
    """With ``fail`` the batch ends after its rows, and before Spark notes that."""
    runs: list[_Run] = []
    checkpoint = str(Path(folder, "checkpoint"))
    writer = foreach_batch_writer(
        broker.name_server, topic=topic, checkpoint_location=checkpoint,
        delivery_guarantee="exactly-once", exactly_once_settle=round(SETTLE_S * 1000),
    )  # fmt: skip

    def write(_: DataFrame, number: int) -> None:
        if number == 0:  # the restart has one more
            begin = time.perf_counter()
            writer(rows, number)
            assert writer.last_report is not None
            runs.append(_Run(time.perf_counter() - begin, writer.last_report))
        if fail:
            raise RuntimeError(_DIED)

    clock = session.readStream.format("rate-micro-batch").option("rowsPerBatch", 1).load()
    query = clock.writeStream.foreachBatch(write).option("checkpointLocation", checkpoint)
    try:
        query.trigger(availableNow=True).start().awaitTermination()
    except StreamingQueryException as e:
        if not fail or _DIED not in str(e):
            raise
    (run,) = runs
    return run


@contextlib.contextmanager
def _others(broker: LocalBroker, topic: str) -> Iterator[None]:
    """Messages of others, as fast as they are meant to come; a slow machine sends what it can."""
    over = threading.Event()
    (body,) = workload.bodies(_BATCH, SIZE)

    def paced() -> Iterator[bytes]:
        begin, sent = time.perf_counter(), 0
        while not over.is_set():
            yield body
            sent += _BATCH
            over.wait(max(0.0, sent / OTHERS_PER_S - (time.perf_counter() - begin)))

    with ThreadPoolExecutor(1) as pool:
        sending = pool.submit(workload.send, broker, topic, paced(), 1)
        try:
            yield
        finally:
            over.set()
            sending.result()


def _queues(broker: LocalBroker) -> dict[str, float]:
    """A look at queues of which each has something new."""
    topic = "restart-queues"
    broker.create_topic(topic, queues=QUEUES // BROKERS)
    options = parse(
        {"nameServer": broker.name_server, "topic": topic, "deliveryGuarantee": "exactly-once",
         "exactlyOnceSettle": str(round(SETTLE_S * 1000))}
    ).for_role("sink")  # fmt: skip
    ends = snapshot_queue_ends(options)
    harness.expect("queues", len(ends.end_offsets), QUEUES)
    (body,) = workload.bodies(1, SIZE)
    workload.send(broker, topic, [body] * QUEUES)
    workload.wait_visible(broker, topic, QUEUES)
    ids: list[int] = []
    begin = time.perf_counter()
    StoredIdScan(scan_tools(options), ends).run(lambda found: ids.append(len(found)))
    seconds = time.perf_counter() - begin
    harness.expect("look", sum(ids), QUEUES)
    return {"repeat": seconds, "beyond settling": seconds - SETTLE_S, "messages read": float(QUEUES)}
