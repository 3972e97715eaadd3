"""Spark's stream reader.

The section "How Spark calls a reader" of docs/design.md shows the order of all calls, and the process of each call. Copies of a
reader exist in three kinds of process. Spark passes only partitions to a task, so a task does not see attributes that earlier
calls in the driver have set.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from rocketmq_spark.base import process
from rocketmq_spark.base.clock import Clock
from rocketmq_spark.columnar.decode.schema import Column
from rocketmq_spark.options import Options
from rocketmq_spark.spark.compat import (
    DataSourceStreamReader,
    InputPartition,
    ReadAllAvailable,
    ReadLimit,
    ReadMaxBytes,
    ReadMaxRows,
    ReadMinRows,
    SupportsTriggerAvailableNow,
)
from rocketmq_spark.spark.source import partition_reader
from rocketmq_spark.spark.source.batch_starts import BatchStarts
from rocketmq_spark.spark.source.planning import TriggerLimits
from rocketmq_spark.spark.source.prefetch import Prefetch, enable_prefetch
from rocketmq_spark.spark.source.progress import LagLog
from rocketmq_spark.spark.source.stream import Stream


class RocketMQStreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Returns the offsets and tasks of a stream. The results depend only on Spark's offset log and the brokers, because Spark may
    call a new object at any time.

    ``supports_prefetch`` is whether Spark can take rows with these columns together with the plan of a batch.
    """

    def __init__(self, options: Options, columns: tuple[Column, ...], supports_prefetch: bool = True) -> None:
        self._options = options
        self._columns = columns
        self._clock = Clock()
        self._stream = Stream(options, self._clock)
        self._batch_starts = BatchStarts()
        self._lag_log = LagLog(options)
        self._prefetch = Prefetch(options, columns) if supports_prefetch and _PREFETCH_ENABLED else None
        self._prefetched_rows: list[Any] | None = None
        process.tune_gc_of_runner()

    def getDefaultReadLimit(self) -> ReadLimit:
        options = self._options
        if options.max_offsets_per_trigger is not None:
            return ReadMaxRows(options.max_offsets_per_trigger)
        if options.max_bytes_per_trigger is not None:
            return ReadMaxBytes(options.max_bytes_per_trigger)
        if options.min_offsets_per_trigger is not None:
            return ReadMinRows(options.min_offsets_per_trigger)
        return ReadAllAvailable()

    def initialOffset(self) -> dict[str, Any]:
        self._batch_starts.note_initial_offset_request()
        return self._stream.offset_log.to_log(self._stream.initialOffset())

    def latestOffset(self, start: dict[str, Any] | None = None, limit: ReadLimit | None = None) -> dict[str, Any]:
        if start is not None:
            return self._end_after(start, limit)
        start, is_start_processed = self._batch_starts.next_start()
        end = self._end_after(start, limit, is_start_processed)
        self._batch_starts.note_end(end)
        self._lag_log.note_planned_batch(self._clock.now(), self._stream.reportLatestOffset)
        return end

    def _end_after(
        self, start: dict[str, Any] | None, limit: ReadLimit | None, is_start_processed: bool = True
    ) -> dict[str, Any]:
        start_offsets = self._stream.initialOffset() if start is None else self._stream.offset_log.from_log(start)
        end = self._stream.latestOffset(start_offsets, self._trigger_limits(limit), is_start_processed)
        # Spark compares offsets as strings. If there are no new messages, Spark must get the same entry that it passed, so
        # ``end`` is not encoded again.
        return start if start is not None and end == start_offsets else self._stream.offset_log.to_log(end)

    def _trigger_limits(self, limit: ReadLimit | None) -> TriggerLimits:
        options = self._options
        if isinstance(limit, ReadAllAvailable):  # Spark passes this limit for Trigger.Once, which ignores the options
            return TriggerLimits()
        return TriggerLimits(
            max_offsets=int(limit.max_rows) if isinstance(limit, ReadMaxRows) else options.max_offsets_per_trigger,
            max_bytes=int(limit.max_bytes) if isinstance(limit, ReadMaxBytes) else options.max_bytes_per_trigger,
            min_offsets=int(limit.min_rows) if isinstance(limit, ReadMinRows) else options.min_offsets_per_trigger,
        )

    def reportLatestOffset(self) -> dict[str, Any] | None:
        return self._stream.reportLatestOffset()

    def prepareForTriggerAvailableNow(self) -> None:
        self._stream.prepareForTriggerAvailableNow()

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:
        self._batch_starts.note_planned_batch(end)
        offset_log = self._stream.offset_log
        planned_partitions = list(self._stream.partitions(offset_log.from_log(start), offset_log.from_log(end)))
        self._prefetched_rows = self._prefetch(planned_partitions) if self._prefetch is not None else None
        if self._prefetched_rows is not None:
            self.__class__ = _PrefetchedStreamReader
        return planned_partitions

    def read(self, partition: InputPartition) -> Iterator[Any]:
        return partition_reader.read_partition(self._options, self._columns, partition, is_streaming=True)

    def commit(self, end: dict[str, Any]) -> None:
        """Do nothing. ``latestOffset`` commits the group's offsets, because Spark does not call ``commit`` for the last batch of
        a run.
        """

    def stop(self) -> None:
        process.suppress_broken_pipes()


class _PrefetchedStreamReader(RocketMQStreamReader):
    """A stream reader has this class after ``partitions`` has read rows, until PySpark takes the rows with ``getCache``."""

    def getCache(self, start: dict[str, Any], end: dict[str, Any]) -> Iterator[Any] | None:
        rows, self._prefetched_rows = self._prefetched_rows, None
        self.__class__ = RocketMQStreamReader  # type: ignore[assignment]
        return None if rows is None else iter(rows)


_PREFETCH_ENABLED = enable_prefetch(_PrefetchedStreamReader)
