"""Batches that Spark does not plan, or plans again: every message after them is read once.

Tests marked ``soak`` are for ``make soak ONLY=pyspark``: only PySpark before 4.2 leaves the start of a batch to the source.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from rocketmq_spark.localbroker import LocalBroker
from rocketmq_spark.spark.monitoring.queries import end_offsets
from rocketmq_spark.spark.source.offsets import Offsets
from tests.fix_spark import wait_until
from tests.reading import feed
from tests.scale import soak
from tests.spark.pipelines import read_stream

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

LIMIT = 7


class Reading:
    """A query whose runs continue one checkpoint. Keeps the bodies of all batches."""

    def __init__(self, checkpoint: Path, broker: LocalBroker) -> None:
        self.checkpoint, self.broker = checkpoint, broker
        self.sent: list[str] = []
        self.bodies: list[str] = []

    def keep(self, batch: DataFrame, number: int) -> None:
        self.bodies += [bytes(row["body"]).decode() for row in batch.collect()]

    def feed(self, topic: str, count: int) -> None:
        self.sent += feed(self.broker, topic, count)

    def run(self, frame: DataFrame, *topics: str) -> None:
        """A run that reads all messages, then ten new ones of each of ``topics`` in turn."""
        writer = frame.writeStream.foreachBatch(self.keep).option("checkpointLocation", str(self.checkpoint))
        query = writer.start()
        try:
            wait_until(query, lambda: self._passed(query))
            for topic in topics:
                self.feed(topic, 10)
                wait_until(query, lambda: self._passed(query))
        finally:
            query.stop()

    def _passed(self, query: StreamingQuery) -> bool:
        ends = end_offsets(query.lastProgress) if query.lastProgress else []
        positions = [offset for end in ends if end for offset in Offsets.from_json(end).positions.values()]
        return sum(positions) == len(self.sent)


@pytest.fixture
def stream(spark: SparkSession, rocketmq: LocalBroker) -> Callable[[str], DataFrame]:
    def made(topic: str) -> DataFrame:
        options = {"startingOffsets": "earliest", "maxOffsetsPerTrigger": LIMIT}
        return read_stream(spark, rocketmq.name_server, topic, **options).select("body")

    return made


@soak
def test_an_idle_source_beside_a_busy_one_reads_all_once(
    rocketmq: LocalBroker, make_topic: Callable[..., str], stream: Callable[[str], DataFrame], tmp_path: Path
) -> None:
    busy, idle = make_topic(queues=2), make_topic(queues=2)
    reading = Reading(tmp_path, rocketmq)
    reading.feed(busy, 20)
    reading.feed(idle, 5)
    for topics in ((busy, busy), (busy, idle), (idle, busy)):
        reading.run(stream(busy).union(stream(idle)), *topics)
    assert sorted(reading.bodies) == sorted(reading.sent)


def test_a_join_with_an_empty_table_reads_nothing_twice_later(
    spark: SparkSession, rocketmq: LocalBroker, topic: str, stream: Callable[[str], DataFrame], tmp_path: Path
) -> None:
    reading = Reading(tmp_path, rocketmq)
    reading.feed(topic, 20)
    reading.run(stream(topic).join(spark.createDataFrame([], "body binary"), "body"), topic)
    assert reading.bodies == []
    reading.run(stream(topic), topic, topic)
    assert sorted(reading.bodies) == sorted(reading.sent[30:])


@soak
def test_a_kept_dataframe_reads_the_rows_of_its_batch_again(
    rocketmq: LocalBroker, topic: str, stream: Callable[[str], DataFrame], tmp_path: Path
) -> None:
    kept: list[tuple[DataFrame, int]] = []
    again: list[tuple[int, int]] = []

    class Keeping(Reading):
        def keep(self, batch: DataFrame, number: int) -> None:
            again.extend((frame.count(), size) for frame, size in kept)
            kept.append((batch, batch.count()))
            super().keep(batch, number)

    reading = Keeping(tmp_path, rocketmq)
    reading.feed(topic, 20)
    reading.run(stream(topic), topic)
    assert len(again) >= 6
    assert [count for count, _ in again] == [size for _, size in again]
    kept.clear()
    reading.run(stream(topic), topic)
    assert sorted(reading.bodies) == sorted(reading.sent)
