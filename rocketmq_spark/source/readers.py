"""Spark's batch and stream reader. They hold options and columns only; connections open where they are used.

Call order and process of every method: docs/design.md, "Readers". Three copies of a stream reader live in three kinds
of process, so that nothing set in one call is seen by a task; only partitions travel.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import pyarrow as pa
from pyspark.sql.datasource import DataSourceReader, DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxRows,
    SupportsTriggerAvailableNow,
)

from rocketmq_spark import session
from rocketmq_spark.client.pull import Cause
from rocketmq_spark.client.ranges import RangeReader
from rocketmq_spark.errors import OffsetError, RocketMQError
from rocketmq_spark.model import MessageQueue, OffsetRange
from rocketmq_spark.options import Options
from rocketmq_spark.source import loss, planner
from rocketmq_spark.source.catalog import Bounds, Catalog, resolve
from rocketmq_spark.source.decode import Decoder
from rocketmq_spark.source.offsets import Offsets
from rocketmq_spark.source.schema import Column

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RangePartition(InputPartition):
    """What one task reads: ranges, and the addresses of their brokers as far as the driver knew them."""

    ranges: tuple[OffsetRange, ...]
    addresses: dict[str, str]

    @property
    def value(self) -> Any:
        return self.ranges


def read(options: Options, columns: tuple[Column, ...], partition: RangePartition) -> Iterator[pa.RecordBatch]:
    """The messages of a partition: one stream of pulls per broker, queue after queue."""
    one = session.client(options)
    settings = session.pull_settings(options)
    by_broker = sorted(partition.ranges, key=lambda r: (r.queue.broker_name, r.queue))
    for broker_name, group in groupby(by_broker, key=lambda r: r.queue.broker_name):
        ranges = list(group)
        connect = one.bulk(broker_name, partition.addresses.get(broker_name), ranges[0].queue.topic)
        templates = [one.pull_template(r.queue, options.group) for r in ranges]
        reader = RangeReader(ranges, connect, templates, settings, lambda part, cause: _lost(options, part, cause))
        decoder = Decoder([r.queue for r in ranges], columns)
        for window in reader.windows():
            yield decoder(window)


def _lost(options: Options, part: OffsetRange, cause: Cause) -> None:
    loss.report(options.fail_on_data_loss, [(part, cause)])


def partitions(ranges: Sequence[OffsetRange], catalog: Catalog) -> list[RangePartition]:
    """One partition for each queue with something to read."""
    addresses = {}
    for broker_name in {r.queue.broker_name for r in ranges}:
        try:
            addresses[broker_name] = catalog.client.routes.address(broker_name)
        except RocketMQError as e:
            logger.info("tasks look up broker %s themselves: %s", broker_name, e)
    return [RangePartition((r,), {n: a for n, a in addresses.items() if n == r.queue.broker_name}) for r in ranges]


class RocketMQReader(DataSourceReader):
    """A batch read between two resolved positions."""

    def __init__(self, options: Options, columns: tuple[Column, ...]) -> None:
        self._options = options
        self._columns = columns

    def partitions(self) -> Sequence[InputPartition]:
        catalog = Catalog(self._options)
        bounds = catalog.sweep()
        start = resolve(self._options.starting_offsets, bounds, "startingOffsets")
        end = resolve(self._options.ending_offsets, bounds, "endingOffsets")
        backwards = sorted(str(queue) for queue in start if start[queue] > end[queue])
        if backwards:
            raise OffsetError(f"options 'startingOffsets' and 'endingOffsets' run backwards in {', '.join(backwards)}")
        ranges = _readable(planner.ranges(Offsets(start), Offsets(end)), bounds, self._options)
        return list(partitions(ranges, catalog))

    def read(self, partition: InputPartition) -> Iterator[Any]:
        assert isinstance(partition, RangePartition)
        return read(self._options, self._columns, partition)


def _readable(ranges: list[OffsetRange], bounds: Bounds, options: Options) -> list[OffsetRange]:
    """The ranges without what retention has deleted, which is reported."""
    lost = planner.truncated(ranges, bounds)
    loss.report(options.fail_on_data_loss, [(part, Cause.TRUNCATED) for part in lost])
    if not lost:
        return ranges
    begins = {part.queue: part.end for part in lost}
    cut = [OffsetRange(r.queue, begins.get(r.queue, r.start), r.end) for r in ranges]
    return [r for r in cut if r.size > 0]


class RocketMQStreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Positions of a stream. Spark's offset log is the only truth; this object caches, and may be new at any call."""

    def __init__(self, options: Options, columns: tuple[Column, ...]) -> None:
        self._options = options
        self._columns = columns
        self._catalog = Catalog(options)
        self._initial: Offsets | None = None
        self._frozen: dict[MessageQueue, int] | None = None

    def getDefaultReadLimit(self) -> ReadLimit:
        limit = self._options.max_offsets_per_trigger
        return ReadAllAvailable() if limit is None else ReadMaxRows(limit)

    def initialOffset(self) -> dict[str, Any]:
        # Spark asks twice and plans with the second answer: what "latest" means must not change in between.
        if self._initial is None:
            positions = resolve(self._options.starting_offsets, self._catalog.sweep(), "startingOffsets")
            self._initial = Offsets(positions)
        return self._initial.to_json()

    def latestOffset(self, start: dict[str, Any] | None = None, limit: ReadLimit | None = None) -> dict[str, Any]:
        begin = Offsets.from_json(start if start is not None else self.initialOffset())
        bounds = self._catalog.recent()
        lost = [
            (OffsetRange(back.queue, back.end, back.position), Cause.WENT_BACK)
            for back in planner.went_back(begin.positions, bounds)
        ]
        loss.report(self._options.fail_on_data_loss, lost)
        ends = self._frozen if self._frozen is not None else {q: b.max_offset for q, b in bounds.items()}
        begins = {q: bounds[q].min_offset for q in ends if q in bounds}
        end = planner.next_end(begin, {q: e for q, e in ends.items() if q in begins}, begins, self._cap(limit))
        if end is begin:
            return begin.to_json() if start is None else start
        if self._initial is not None and begin.positions == self._initial.positions and not begin.start:
            end = planner.first_batch(self._initial, end)
        return end.to_json()

    def _cap(self, limit: ReadLimit | None) -> int | None:
        if isinstance(limit, ReadMaxRows):
            return int(limit.max_rows)
        # Trigger.Once says so explicitly and means it: everything in one batch.
        return None if isinstance(limit, ReadAllAvailable) else self._options.max_offsets_per_trigger

    def reportLatestOffset(self) -> dict[str, Any] | None:
        bounds = self._catalog.recent()
        return Offsets({queue: b.max_offset for queue, b in bounds.items()}).to_json()

    def prepareForTriggerAvailableNow(self) -> None:
        self._frozen = {queue: b.max_offset for queue, b in self._catalog.sweep().items()}

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:
        ranges = planner.ranges(Offsets.from_json(start), Offsets.from_json(end))
        if not ranges:
            return []
        ranges = _readable(ranges, self._catalog.recent(), self._options)
        return list(partitions(ranges, self._catalog))

    def read(self, partition: InputPartition) -> Iterator[Any]:
        assert isinstance(partition, RangePartition)
        return read(self._options, self._columns, partition)

    def commit(self, end: dict[str, Any]) -> None:
        """Nothing to do: positions live in Spark's checkpoint."""
