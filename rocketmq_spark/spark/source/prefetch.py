"""Reads the rows of a small batch in the driver during planning and passes them to Spark with the plan, without a Python task.

PySpark does so for ``SimpleDataSourceStreamReader``. After each ``partitions`` its runner checks whether the reader is the
private wrapper of such a reader. If so, it takes the rows from ``getCache``, and Spark keeps them as a block; a task that does
not find the block reads its partition normally. ``may_hand_over`` registers the source's reader class as such a wrapper.
This is a private interface, so it is used only with the versions of PySpark that the tests run; with others, tasks read.

The driver only tries. If a read takes long, fails, finds a loss or is too large, the task reads, and reports errors. After reads
that failed, the next batches are left to tasks, too, more of them each time.

Spark stores the rows with its serializer. With ``spark.kryo.registrationRequired`` Kryo refuses the classes of arrays and maps,
and the query ends. So ``register(spark)`` sets the environment variable that makes tasks read every batch.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from dataclasses import replace

import pyarrow as pa
import pyspark

from rocketmq_spark.columnar.decode.schema import Column
from rocketmq_spark.model import OffsetRange
from rocketmq_spark.options import Options
from rocketmq_spark.pull.answers import Cause
from rocketmq_spark.spark.source import tasks
from rocketmq_spark.spark.source.tasks import RangePartition
from rocketmq_spark.spark.tuning import READ_BY_TASKS

logger = logging.getLogger(__name__)

TESTED = ("4.2.", "4.3.")
# Starting a task takes 20 to 90 ms, and it reads as fast as the driver, so larger batches gain little.
MAX_ROWS = 1000
MAX_BYTES = 1 << 20
# If a broker does not answer, the task waits for it.
_PATIENCE_S = 1.0
# Factor of the estimated row size after each batch that was estimated as too large, so that the estimate is tested again.
_DOUBT = 0.9
# The most batches that are left to tasks after failed reads. Each of these took up to a second, and the next may, too.
_LONGEST_PAUSE = 31


def may_hand_over(reader: type) -> bool:
    """Make PySpark take rows from instances of ``reader``. Returns whether it will."""
    if os.environ.get(READ_BY_TASKS) or not pyspark.__version__.startswith(TESTED):
        return False
    try:
        from pyspark.sql.datasource_internal import _SimpleStreamReaderWrapper
    except ImportError:
        return False
    _SimpleStreamReaderWrapper.register(reader)
    return True


class Prefetch:
    """Reads batches of one task, if they are small."""

    def __init__(self, options: Options, columns: tuple[Column, ...]) -> None:
        self._options = replace(
            options,
            read_deadline=min(options.read_deadline, _PATIENCE_S),
            max_bytes_in_flight=min(options.max_bytes_in_flight, MAX_BYTES),
        )
        self._columns = columns
        self._row_bytes = 0.0  # of the last batch that was read
        self._pause = self._left_out = 0  # batches to leave to tasks, and how many were

    def __call__(self, planned: Sequence[RangePartition]) -> list[pa.RecordBatch] | None:
        """The rows of a plan; None if a task should read them."""
        if len(planned) != 1:
            return None
        rows = sum(r.size for r in planned[0].ranges)
        if rows > MAX_ROWS:
            return None
        if rows * self._row_bytes > MAX_BYTES:
            self._row_bytes *= _DOUBT
            return None
        if self._left_out < self._pause:
            self._left_out += 1
            return None
        return self._read(planned[0])

    def _read(self, partition: RangePartition) -> list[pa.RecordBatch] | None:
        read: list[pa.RecordBatch] = []
        rows = size = 0
        try:
            for batch in tasks.read(self._options, self._columns, partition, streaming=True, on_loss=_leave):
                read.append(batch)
                rows, size = rows + len(batch), size + batch.nbytes
                if size > MAX_BYTES:
                    break
        except Exception as e:  # noqa: BLE001 - Spark repeats a task, and an error of a plan ends the query
            logger.info("a task reads what the driver did not: %s: %s", type(e).__name__, e)
            self._pause, self._left_out = min(2 * self._pause + 1, _LONGEST_PAUSE), 0
            return None
        self._pause = 0
        if rows:
            self._row_bytes = size / rows
        return read if size <= MAX_BYTES else None


class _Lost(Exception):
    """Possible loss. The task decides about it, because it waits longer."""


def _leave(part: OffsetRange, cause: Cause) -> None:
    raise _Lost(f"{part.queue} from {part.start} to {part.end}: {cause}")
