"""Spark's batch and stream writer: checks on the driver, a task writer per task, counts in the commit message.

The constructor of a stream's writer runs twice per micro-batch. So checks that need brokers run once per process, and not in
the process in which Spark only commits.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import pyarrow as pa
from pyspark.sql.datasource import DataSourceArrowWriter, DataSourceStreamArrowWriter, WriterCommitMessage
from pyspark.sql.types import StructType

from rocketmq_spark.base import process
from rocketmq_spark.errors import OptionError
from rocketmq_spark.options import Options
from rocketmq_spark.spark.sink import checks, guarantee
from rocketmq_spark.spark.sink.once import OncePlan, plan_batch, plan_job
from rocketmq_spark.spark.sink.report import Written, total, warn_of_unmatched
from rocketmq_spark.spark.sink.task import write_task

logger = logging.getLogger(__name__)

_COMMITS = "pyspark.sql.worker.python_streaming_sink_runner"


class _Writer:
    """The common part of batch and stream writers.

    Spark pickles only writers that tasks will use, so the first pickling begins the batch. Spark pickles such a writer twice; the
    second time the same plan is used.
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
        if not process.is_for(_COMMITS):  # a commit of sent rows must not fail because brokers are down
            checks.check_brokers(options, self.names, once=stream)
        self.positions = checks.positions(options)
        self.checkpoint = checkpoint
        self.once: OncePlan | None = None

    def __getstate__(self) -> dict[str, Any]:
        if self.once is None and guarantee.wanted(self.options):
            self.once = plan_batch(self.options, self.checkpoint) if self.checkpoint else plan_job(self.options)
        return self.__dict__.copy()

    def write_batches(self, iterator: Iterator[pa.RecordBatch]) -> TaskCommitMessage:
        return TaskCommitMessage(write_task(self.options, self.names, self.positions, iterator, self.once))

    def log(self, messages: list[WriterCommitMessage | None], what: str) -> Written:
        written = total(message.written if isinstance(message, TaskCommitMessage) else None for message in messages)
        logger.info("%s: %s", what, written)
        warn_of_unmatched(written, what)
        return written


class TaskCommitMessage(WriterCommitMessage):
    """A task's counts, which Spark passes to the driver."""

    def __init__(self, written: Written) -> None:
        self.written = written


class RocketMQWriter(DataSourceArrowWriter):
    """Writes a batch DataFrame."""

    def __init__(self, options: Options, schema: StructType) -> None:
        self._writer = _Writer(options, schema, stream=False)

    def write(self, iterator: Iterator[pa.RecordBatch]) -> TaskCommitMessage:
        return self._writer.write_batches(iterator)

    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        self._writer.log(messages, "written")

    def abort(self, messages: list[WriterCommitMessage | None]) -> None:
        done = self._writer.log(messages, "the write failed; acknowledged before that")
        logger.warning(
            "a failed write leaves %d rows or more in the topic; the next attempt sends them again", done.rows
        )


class RocketMQStreamWriter(DataSourceStreamArrowWriter):
    """Writes the micro-batches of a stream in append mode."""

    def __init__(self, options: Options, schema: StructType, checkpoint: str | None = None) -> None:
        self._writer = _Writer(options, schema, True, checkpoint)

    def write(self, iterator: Iterator[pa.RecordBatch]) -> TaskCommitMessage:
        return self._writer.write_batches(iterator)

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:
        self._writer.log(messages, f"batch {batchId}")

    def abort(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:
        self._writer.log(messages, f"batch {batchId} failed; acknowledged before that")
