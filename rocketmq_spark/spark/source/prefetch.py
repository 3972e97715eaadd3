"""The rows of a small batch, read by the driver while it plans and handed to Spark with the plan: no Python task starts for them.

PySpark does so for its ``SimpleDataSourceStreamReader``. After each ``partitions`` its runner asks whether the reader is the
private wrapper of one, takes the rows from ``getCache`` then, and Spark keeps them as a block; a task that does not find it
reads its partition as ever. ``may_hand_over`` registers a class of ours as such a wrapper, for a reader that has rows at hand.
This is no interface, so it is done with the versions of PySpark that the tests run, and with others each batch is read by tasks.

The driver only tries. What takes long, fails, is lost or is too large is left to the task, which has the time, and the words;
and the next batches, too, the more the longer it goes on.

Spark keeps the rows as its serializer writes them. A Kryo that demands to know every class does not know those of arrays and
maps, and the query ends; so ``register(spark)`` has tasks read then, by a variable of the environment.
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
# A task takes 20 to 90 ms to begin, and as long to read as the driver does: what is larger gains little.
MAX_ROWS = 1000
MAX_BYTES = 1 << 20
# A broker that does not answer is waited for by the task.
_PATIENCE_S = 1.0
# By how much the size of a row is believed to be smaller with each batch that was thought to be too large.
_DOUBT = 0.9
# The most batches that are left to tasks after tries that failed: each cost a second, and the next one may, too.
_LONGEST_PAUSE = 31


def may_hand_over(reader: type) -> bool:
    """Have PySpark take rows from instances of ``reader``. Returns whether it does."""
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
        self._pause = self._left_out = 0  # batches to leave out, and how many of them were

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
    """Whether messages are lost is judged by the task, which waits longer for them."""


def _leave(part: OffsetRange, cause: Cause) -> None:
    raise _Lost(f"{part.queue} from {part.start} to {part.end}: {cause}")
