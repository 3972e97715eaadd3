"""Spark's batch and stream writer: checks on the driver, a task writer per task, counts in the commit message.

The constructor of a stream's writer runs twice per micro-batch, so whatever asks brokers is done once per process, and not
where Spark only commits.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql.datasource import DataSourceArrowWriter, DataSourceStreamArrowWriter, WriterCommitMessage
from pyspark.sql.types import StructType

from rocketmq_spark.base import process
from rocketmq_spark.model import MessageQueue
from rocketmq_spark.options import Options
from rocketmq_spark.spark.sink import checks
from rocketmq_spark.spark.sink.report import Written, total
from rocketmq_spark.spark.sink.task import TaskWriter

logger = logging.getLogger(__name__)

_COMMITS = "pyspark.sql.worker.python_streaming_sink_runner"


class _Writer:
    """What batch and stream writers share."""

    def __init__(self, options: Options, schema: StructType, stream: bool) -> None:
        self.options = options
        self.names = checks.check(options, schema, stream)
        if not process.is_for(_COMMITS):  # what was sent must not fail there because brokers are away
            checks.check_brokers(options, self.names, once=stream)
        self.positions = checks.positions(options)

    def write_batches(self, iterator: Iterator[pa.RecordBatch]) -> Written:
        return write_task(self.options, self.names, self.positions, iterator)

    def log(self, messages: list[WriterCommitMessage | None], what: str) -> Written:
        written = total(messages)
        logger.info("%s: %s", what, written)
        return written


def write_task(
    options: Options,
    names: dict[str, str],
    positions: dict[str, tuple[MessageQueue, ...]],
    iterator: Iterator[pa.RecordBatch],
) -> Written:
    """Send the rows of the task that calls this. A later attempt says that rows may be in the topic twice.

    Spark tells no writer whether ``spark.speculation`` is on, but a second attempt beside a running one is numbered like
    one after a failure, and both have the same consequence.
    """
    task = TaskContext.get()
    partition = task.partitionId() if task is not None else None
    if task is not None and task.attemptNumber() > 0:
        logger.warning(
            "attempt %d of partition %s sends its rows again (a failure, or spark.speculation): rows of other attempts "
            "stay in the topic; option 'messageId' lets readers drop them",
            task.attemptNumber(),
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

    def __init__(self, options: Options, schema: StructType) -> None:
        self._writer = _Writer(options, schema, stream=True)

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        return self._writer.write_batches(iterator)

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:
        self._writer.log(messages, f"batch {batchId}")

    def abort(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:
        self._writer.log(messages, f"batch {batchId} failed; acknowledged before that")
