"""Reads small batches in the driver, without a Python task.

The driver reads the rows of a small batch while it plans the batch, and passes them to Spark with the plan. PySpark has this
feature for ``SimpleDataSourceStreamReader``: after each call of ``partitions``, PySpark's runner checks whether the reader is an
instance of the private class ``_SimpleStreamReaderWrapper``. For such an instance, the runner takes the rows from ``getCache``,
and Spark keeps them as a block; a task that does not find the block reads its partition normally. ``enable_prefetch`` registers
the source's reader class as a subclass of the wrapper. Because the wrapper is private, the driver reads batches only with the
versions of PySpark with which the tests run. With other versions, tasks read all batches.

If the read in the driver takes long, fails, finds a loss or is too large, a task reads the batch instead, and reports errors.
After a failed read, tasks also read the next batches: one batch after the first failure, and more batches after each further
failure.

Spark stores the rows with its serializer. With ``spark.kryo.registrationRequired`` Kryo rejects the classes of arrays and maps,
and the query fails. So ``register(spark)`` sets the environment variable that makes tasks read every batch.
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
from rocketmq_spark.pull.outcomes import Cause
from rocketmq_spark.spark.conf import READ_BY_TASKS
from rocketmq_spark.spark.source.partition_reader import RangePartition, read_partition

logger = logging.getLogger(__name__)


TESTED_PYSPARK_VERSIONS = ("4.0.", "4.1.", "4.2.", "4.3.")


# A task takes 20 to 90 ms to start, and then reads as fast as the driver, so larger batches gain little.
MAX_PREFETCH_ROWS = 1000
MAX_PREFETCH_BYTES = 1 << 20
# How long the driver waits for a broker; a task waits up to ``readDeadline``.
_PREFETCH_DEADLINE_S = 1.0
# If a batch seems too large, the estimated row size is multiplied by this factor, so that the driver reads one of the next
# batches nevertheless, and measures the size again.
_ESTIMATE_DECAY = 0.9
# The maximum number of batches that the driver leaves to tasks after failed reads. A failed read may delay a batch by a second.
_MAX_SKIPPED_BATCHES = 31


def enable_prefetch(reader: type) -> bool:
    """Make PySpark take rows from instances of ``reader``. Returns whether PySpark will do so."""
    if os.environ.get(READ_BY_TASKS) or not pyspark.__version__.startswith(TESTED_PYSPARK_VERSIONS):
        return False
    try:
        from pyspark.sql.datasource_internal import _SimpleStreamReaderWrapper
    except ImportError:
        return False
    _SimpleStreamReaderWrapper.register(reader)
    return True


class Prefetch:
    """Reads a batch that has one task, if the batch is small."""

    def __init__(self, options: Options, columns: tuple[Column, ...]) -> None:
        self._options = replace(
            options,
            read_deadline=min(options.read_deadline, _PREFETCH_DEADLINE_S),
            max_bytes_in_flight=min(options.max_bytes_in_flight, MAX_PREFETCH_BYTES),
        )
        self._columns = columns
        # The estimated size of a row, from the last batch that was read.
        self._row_bytes = 0.0
        # The number of batches to leave to tasks after a failed read, and the number of batches that were left to tasks.
        self._batch_count_to_skip = self._skipped_batch_count = 0

    def __call__(self, partitions: Sequence[RangePartition]) -> list[pa.RecordBatch] | None:
        """Return the rows of a planned batch; None if a task should read them."""
        if len(partitions) != 1:
            return None
        row_count = sum(r.size for r in partitions[0].ranges)
        if row_count > MAX_PREFETCH_ROWS:
            return None
        if row_count * self._row_bytes > MAX_PREFETCH_BYTES:
            self._row_bytes *= _ESTIMATE_DECAY
            return None
        if self._skipped_batch_count < self._batch_count_to_skip:
            self._skipped_batch_count += 1
            return None
        return self._read(partitions[0])

    def _read(self, partition: RangePartition) -> list[pa.RecordBatch] | None:
        batches: list[pa.RecordBatch] = []
        row_count = total_bytes = 0
        try:
            for batch in read_partition(
                self._options, self._columns, partition, is_streaming=True, on_loss=_decline_on_loss
            ):
                batches.append(batch)
                row_count, total_bytes = row_count + len(batch), total_bytes + batch.nbytes
                if total_bytes > MAX_PREFETCH_BYTES:
                    break
        except Exception as e:  # noqa: BLE001 - Spark repeats a failed task, but an error in the plan would end the query
            logger.info("a task reads this batch, because the driver could not: %s: %s", type(e).__name__, e)
            self._batch_count_to_skip, self._skipped_batch_count = (
                min(2 * self._batch_count_to_skip + 1, _MAX_SKIPPED_BATCHES),
                0,
            )
            return None
        self._batch_count_to_skip = 0
        if row_count:
            self._row_bytes = total_bytes / row_count
        return batches if total_bytes <= MAX_PREFETCH_BYTES else None


class _PossibleLoss(Exception):
    """Messages may be lost. A task decides whether messages are lost, because a task waits longer for the broker."""


def _decline_on_loss(lost_range: OffsetRange, cause: Cause) -> None:
    raise _PossibleLoss(f"{lost_range.queue} from {lost_range.start} to {lost_range.end}: {cause}")
