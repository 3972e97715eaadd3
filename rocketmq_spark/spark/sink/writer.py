"""Spark's writers of batches and streams.

The writers check the write on the driver, create a ``TaskWriter`` in each task, and log the counts that tasks return in commit
messages. Spark creates the writer of a stream twice per micro-batch. So a process makes the checks that send requests to brokers
at most once, and a process that only commits makes none of these checks.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import pyarrow as pa
from pyspark.sql.types import StructType

from rocketmq_spark.base import process
from rocketmq_spark.errors import OptionError
from rocketmq_spark.model import MessageQueue
from rocketmq_spark.options import Options
from rocketmq_spark.producer.rows.routing import log_choice
from rocketmq_spark.spark.checkpoints.owners import check_owner
from rocketmq_spark.spark.compat import DataSourceArrowWriter, DataSourceStreamArrowWriter, WriterCommitMessage
from rocketmq_spark.spark.sink import checks, exactly_once_checks
from rocketmq_spark.spark.sink.exactly_once import ExactlyOncePlan, plan_batch, plan_job
from rocketmq_spark.spark.sink.report import (
    Written,
    total,
    warn_of_omitted_headers,
    warn_of_unmatched_messages,
)
from rocketmq_spark.spark.sink.task import TaskCommitMessage, write_task

logger = logging.getLogger(__name__)


_COMMIT_WORKER = "pyspark.sql.worker.python_streaming_sink_runner"


class _DriverWriter:
    """The common part of batch and stream writers.

    Spark pickles only writers that tasks will use, so the first pickling starts the batch. Spark pickles each of these writers
    twice, and both copies have the same plan.
    """

    def __init__(self, options: Options, schema: StructType, is_stream: bool, checkpoint: str | None = None) -> None:
        self.options = options
        self.columns = checks.check_sink(options, schema, is_stream)
        if is_stream and checkpoint is None and exactly_once_checks.is_exactly_once(options):
            raise OptionError(
                "option 'deliveryGuarantee' is exactly-once, and the sink does not know the checkpoint: Spark does not "
                "show the sink spark.sql.streaming.checkpointLocation",
                remedy="Give the writer .option('checkpointLocation', ...)",
            )
        if exactly_once_checks.is_exactly_once(options):
            exactly_once_checks.check_registered_settings()
        if not process.is_worker(_COMMIT_WORKER):
            # A commit makes no such checks: the rows are sent already, so a commit must not fail because brokers are down.
            if checkpoint is not None:
                check_owner(checkpoint)
            checks.check_brokers(options, self.columns, once_per_process=is_stream)
            log_choice(options, self.columns, once=is_stream)
        self.environment_queues = checks.environment_queues(options)
        self.checkpoint = checkpoint
        self.partition_queues: dict[str, tuple[MessageQueue, ...]] | None = None
        self.plan: ExactlyOncePlan | None = None

    def __getstate__(self) -> dict[str, Any]:
        if self.partition_queues is None:
            self.partition_queues = checks.partition_queues(self.options, self.columns)
        if self.plan is None and exactly_once_checks.is_exactly_once(self.options):
            self.plan = plan_batch(self.options, self.checkpoint) if self.checkpoint else plan_job(self.options)
        return self.__dict__.copy()

    def write_batches(self, iterator: Iterator[pa.RecordBatch]) -> TaskCommitMessage:
        return write_task(
            self.options, self.columns, self.environment_queues, iterator, self.plan, self.partition_queues or {}
        )

    def commit(self, messages: list[WriterCommitMessage | None], write_text: str) -> None:
        self.log(messages, write_text)
        names = [name for message in messages if isinstance(message, TaskCommitMessage) for name in message.topic_names]
        checks.check_topic_names(self.options, names)

    def log(self, messages: list[WriterCommitMessage | None], write_text: str) -> Written:
        written = total(message.written if isinstance(message, TaskCommitMessage) else None for message in messages)
        logger.info("%s: %s", write_text, written)
        warn_of_unmatched_messages(written, write_text)
        warn_of_omitted_headers(written, write_text)
        return written


class RocketMQWriter(DataSourceArrowWriter):
    """Writes a batch DataFrame."""

    def __init__(self, options: Options, schema: StructType) -> None:
        self._writer = _DriverWriter(options, schema, is_stream=False)

    def write(self, iterator: Iterator[pa.RecordBatch]) -> TaskCommitMessage:
        return self._writer.write_batches(iterator)

    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        self._writer.commit(messages, "written")

    def abort(self, messages: list[WriterCommitMessage | None]) -> None:
        written = self._writer.log(messages, "the write failed; acknowledged before that")
        logger.warning(
            "a failed write leaves %d rows or more in the topic; the next attempt sends them again", written.rows
        )


class RocketMQStreamWriter(DataSourceStreamArrowWriter):
    """Writes the micro-batches of a stream in append mode."""

    def __init__(self, options: Options, schema: StructType, checkpoint: str | None = None) -> None:
        self._writer = _DriverWriter(options, schema, True, checkpoint)

    def write(self, iterator: Iterator[pa.RecordBatch]) -> TaskCommitMessage:
        return self._writer.write_batches(iterator)

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:
        self._writer.commit(messages, f"batch {batchId}")

    def abort(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:
        self._writer.log(messages, f"batch {batchId} failed; acknowledged before that")
