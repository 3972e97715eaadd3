"""Streaming writes while brokers die and come back, or refuse for a while: what is committed is there."""

from __future__ import annotations

import logging
import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from rocketmq_spark import foreach_batch_writer
from rocketmq_spark.base.clock import Deadline
from rocketmq_spark.localbroker import LocalBroker
from rocketmq_spark.model import MessageQueue
from rocketmq_spark.spark.sink.report import total
from tests.fix_spark import wait_until
from tests.helpers import indexed, killed, stored, stored_now
from tests.live.writes import bodies
from tests.reading import names
from tests.scale import scaled
from tests.sink.test_outage import Unwilling
from tests.spark.pipelines import failed_tasks

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

BATCHES = 20
ROWS = scaled(200_000) // BATCHES


def numbers(spark: SparkSession, rows: int = ROWS) -> Any:
    """Micro-batch n has the numbers from n * ``rows`` on, again and again the same ones."""
    source = spark.readStream.format("rate-micro-batch").option("rowsPerBatch", rows).option("numPartitions", 2)
    return source.load().selectExpr("cast(value as string) body", "concat('k', value % 50) shardingKey")


TRACKING = {
    "asyncProgressTrackingEnabled": True,
    "asyncProgressTrackingCheckpointIntervalMs": 600_000,
    "_asyncProgressTrackingOverrideSinkSupportCheck": True,
}


def stored_numbers(broker: LocalBroker, topic: str) -> list[int]:
    return [int(body) for body in bodies(stored_now(broker, topic))]


def progressed(query: Any) -> int:
    """Batches that are finished."""
    return query.lastProgress["batchId"] + 1 if query.lastProgress else 0


def held(until: Path, first: int) -> Any:
    """What gives rows on, those from ``first`` on when the file ``until`` is there."""

    def pass_on(batches: Any) -> Any:
        for batch in batches:
            while max(map(int, batch.column("body").to_pylist()), default=0) >= first and not until.exists():
                time.sleep(0.01)
            yield batch

    return pass_on


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("selector", ["roundRobin", "hash"])
def test_a_broker_killed_and_restarted_loses_no_row(
    spark: SparkSession, pair: LocalBroker, tmp_path: Path, record_property: Any, selector: str
) -> None:
    """It dies between two batches, the second of which has its rows only then.

    That is early: a route of more than half a minute ago would be asked for again, and then name the other broker alone.
    """
    (topic,) = names(1, "killed")
    pair.create_topic(topic, queues=4)
    dead, struck = tmp_path / "dead", 2
    others = [MessageQueue(topic, "broker-b", i) for i in range(4)]
    rows = numbers(spark).mapInArrow(held(dead, struck * ROWS), "body string, shardingKey string")
    query = (
        rows.writeStream.format("rocketmq").option("nameServer", pair.name_server).option("topic", topic)
        .option("queueSelector", selector).option("checkpointLocation", str(tmp_path / "checkpoint")).start()
    )  # fmt: skip

    def at_the_other() -> int:
        return sum(pair.admin.offset_reader.max_offsets(others, Deadline.after(10.0)).values())

    try:
        wait_until(query, lambda: progressed(query) >= struck)
        indexed(pair)  # so that what comes is of the next batch
        before = at_the_other()
        killed(pair, "broker-a")
        dead.touch()
        if selector == "roundRobin":
            wait_until(query, lambda: progressed(query) >= struck + 5, 120.0)
        wait_until(query, lambda: at_the_other() > before)
        back_ms = time.time() * 1000
        pair.restart("broker-a")
        wait_until(query, lambda: progressed(query) >= BATCHES, 240.0)
    finally:
        query.stop()
    committed = len(list((tmp_path / "checkpoint" / "commits").glob("[0-9]*"))) * ROWS
    messages = stored(pair, topic, committed)
    found = Counter(map(int, bodies(messages)))
    missing = set(range(committed)) - found.keys()
    assert not missing, f"{len(missing)} missing, such as {sorted(missing)[:5]}"
    felt = [message for message in messages if int(message.body) // ROWS == struck]
    early = {message.queue.broker_name for message in felt if message.store_timestamp < back_ms}
    late = {message.queue.broker_name for message in felt} - early
    assert (early, late) == ({"broker-b"}, {"broker-a"} if selector == "hash" else set())
    record_property("duplicates", sum(found.values()) - len(found))


def test_progress_that_spark_tracks_later_loses_no_row(
    spark: SparkSession, rocketmq: LocalBroker, topic: str, tmp_path: Path
) -> None:
    """Spark's own override lets it use the sink. A restart repeats the batches that Spark had not logged."""

    def run(batches: int) -> None:
        writer = numbers(spark, 10).writeStream.format("rocketmq").options(**TRACKING, topic=topic)
        query = writer.option("nameServer", rocketmq.name_server).option("checkpointLocation", str(tmp_path)).start()
        first = stored_numbers(rocketmq, topic)
        try:
            wait_until(query, lambda: len(set(stored_numbers(rocketmq, topic)) - set(first)) >= 10 * batches, 120.0)
        finally:
            query.stop()

    run(5)
    logged = len(list((tmp_path / "commits").glob("[0-9]*")))
    assert logged < 5, "Spark logs each batch, so nothing is tracked later"
    run(5)
    found = Counter(stored_numbers(rocketmq, topic))
    unfinished = max(found) // 10 * 10  # the query may have been stopped in the midst of its last batch
    assert set(found) >= set(range(unfinished))
    assert max(found.values()) > 1, "no batch was repeated"


def test_a_broker_that_refuses_for_a_while_fails_no_task(spark: SparkSession, tmp_path: Path) -> None:
    failed = failed_tasks(spark)
    with Unwilling() as broker:
        query = (
            numbers(spark, 400).writeStream.format("rocketmq").option("nameServer", broker.address)
            .option("topic", "t").option("queueSelector", "hash").option("sendTimeout", "60s")
            .option("checkpointLocation", str(tmp_path)).start()
        )  # fmt: skip
        try:
            wait_until(query, lambda: progressed(query) >= 4 and time.monotonic() > broker.until, 200.0)
            assert failed_tasks(spark) == failed
        finally:
            query.stop()
        committed = len(list((tmp_path / "commits").glob("[0-9]*"))) * 400
        assert set(map(int, (b for queue in broker.kept.values() for b in queue))) >= set(range(committed))


def test_update_mode_foreach_batch_stream_survives_broker_kill(
    spark: SparkSession, pair: LocalBroker, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The reports say which broker took what. Each task begins at any queue: one is killed when both had rows."""
    reports: list[Any] = []
    killed_in: list[int] = []
    (topic,) = names(1, "killed")
    pair.create_topic(topic, queues=2)
    writer = foreach_batch_writer(name_server=pair.name_server, topic=topic, send_timeout="60s")

    def write(df: Any, batch_id: int) -> None:
        if not killed_in and total(reports).brokers.keys() == {"broker-a", "broker-b"}:
            killed(pair, "broker-a")
            killed_in.append(batch_id)
        writer(df, batch_id)
        reports.append(writer.last_report)

    counts = numbers(spark, 500).groupBy("shardingKey").count().selectExpr("concat(shardingKey, ':', count) body")
    with caplog.at_level(logging.INFO, "rocketmq_spark.spark.sink"):
        query = counts.writeStream.outputMode("update").option("checkpointLocation", str(tmp_path)).foreachBatch(write)
        running = query.start()
        try:
            wait_until(running, lambda: killed_in and len(reports) >= killed_in[0] + 4, 120.0)
        finally:
            running.stop()
    later = reports[killed_in[0] :]
    assert {name for report in later for name, part in report.brokers.items() if part.rows} == {"broker-b"}
    assert all(report.rows == 50 for report in reports)
    assert "batch 3: 50 rows in" in caplog.text
