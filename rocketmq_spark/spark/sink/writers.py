"""Spark's batch and stream writer: checks on the driver, a task writer per task, counts in the commit message.

The constructor of a stream's writer runs twice per micro-batch, so whatever asks brokers is done once per process, and not
where Spark only commits.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql.datasource import DataSourceArrowWriter, DataSourceStreamArrowWriter, WriterCommitMessage
from pyspark.sql.types import StructType

from rocketmq_spark.base import process
from rocketmq_spark.errors import OptionError
from rocketmq_spark.model import MessageQueue
from rocketmq_spark.options import Options
from rocketmq_spark.spark.sink import checks, guarantee
from rocketmq_spark.spark.sink.once import OncePlan, TaskOnce, check_task, plan_batch, plan_job
from rocketmq_spark.spark.sink.report import Written, total
from rocketmq_spark.spark.sink.task import TaskWriter

logger = logging.getLogger(__name__)

_COMMITS = "pyspark.sql.worker.python_streaming_sink_runner"


class _Writer:
    """What batch and stream writers share.

    Spark pickles a writer that tasks are to use, and no other: with the first pickling the batch begins. The writer is pickled
    twice, and the answer is the same.
    """

    def __init__(self, options: Options, schema: StructType, stream: bool, checkpoint: str | None = None) -> None:
        self.options = options
        self.names = checks.check(options, schema, stream)
        if stream and checkpoint is None and guarantee.wanted(options):
            raise OptionError(
                "option 'deliveryGuarantee' is exactly-once, and the sink does not know the checkpoint: Spark does not "
                "show it spark.sql.streaming.checkpointLocation",
                remedy="Give the writer .option('checkpointLocation', ...)",
            )
        if not process.is_for(_COMMITS):  # what was sent must not fail there because brokers are away
            checks.check_brokers(options, self.names, once=stream)
        self.positions = checks.positions(options)
        self.checkpoint = checkpoint
        self.once: OncePlan | None = None

    def __getstate__(self) -> dict[str, Any]:
        if self.once is None and guarantee.wanted(self.options):
            self.once = plan_batch(self.options, self.checkpoint) if self.checkpoint else plan_job(self.options)
        return self.__dict__.copy()

    def write_batches(self, iterator: Iterator[pa.RecordBatch]) -> Written:
        return write_task(self.options, self.names, self.positions, iterator, self.once)

    def log(self, messages: list[WriterCommitMessage | None], what: str) -> Written:
        written = total(messages)
        logger.info("%s: %s", what, written)
        warn_of_unmatched(written, what)
        return written


def warn_of_unmatched(written: Written, what: str) -> None:
    """Once for a batch."""
    if written.unmatched:
        logger.warning(
            "%s: %d messages that an earlier attempt stored match no row of the repeat. It made other rows, or cut them into "
            "other tasks; they stay in the topic",
            what,
            written.unmatched,
        )


def write_task(
    options: Options,
    names: dict[str, str],
    positions: dict[str, tuple[MessageQueue, ...]],
    iterator: Iterator[pa.RecordBatch],
    once: OncePlan | None = None,
) -> Written:
    """Send the rows of the task that calls this. A later attempt says that rows may be in the topic twice.

    Writers cannot see whether ``spark.speculation`` is on, but a second attempt beside a running one is numbered like
    one after a failure, and both have the same consequence. With ``once`` a later attempt looks what is stored.
    """
    task = TaskContext.get()
    partition = task.partitionId() if task is not None else None
    attempt = task.attemptNumber() if task is not None else 0
    if once is not None:
        check_task(once, options.exactly_once_settle)
        mine = TaskOnce(options, once, partition or 0, attempt)
        return TaskWriter(options, names, partition, positions, mine).write(iterator)
    if attempt > 0:
        logger.warning(
            "attempt %d of partition %s sends its rows again (a failure, or spark.speculation): rows of other attempts "
            "stay in the topic; option 'messageId' lets readers drop them",
            attempt,
            partition,
        )
    return TaskWriter(options, names, partition, positions).write(iterator)


class RocketMQWriter(DataSourceArrowWriter):
    """Writes a batch DataFrame."""

    def __init__(self, options: Options, schema: StructType) -> None:
        self._writer = _Writer(options, schema, stream=False)

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        return self._writer.write_batches(iterator)

    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        self._writer.log(messages, "written")

    def abort(self, messages: list[WriterCommitMessage | None]) -> None:
        done = self._writer.log(messages, "the write failed; acknowledged before that")
        logger.warning("a failed write leaves %d rows or more in the topic; the next try sends them again", done.rows)


class RocketMQStreamWriter(DataSourceStreamArrowWriter):
    """Writes the micro-batches of a stream in append mode."""

    def __init__(self, options: Options, schema: StructType, checkpoint: str | None = None) -> None:
        self._writer = _Writer(options, schema, True, checkpoint)

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        return self._writer.write_batches(iterator)

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:
        self._writer.log(messages, f"batch {batchId}")

    def abort(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:
        self._writer.log(messages, f"batch {batchId} failed; acknowledged before that")
