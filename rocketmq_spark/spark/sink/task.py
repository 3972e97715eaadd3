"""Sends the rows of one task: encodes them, splits them into batches, sends the batches, and counts the acknowledgements.

Correctness does not depend on cleanup after the task (``__del__``, threads), because a killed task cannot clean up. Its next
attempt sends the same messages again (at least once).

``producer/rows/sender`` makes batches of rows.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import queue as queues
import types
from collections.abc import Iterable, Mapping, Sequence

import pyarrow as pa
from pyspark import TaskContext

from rocketmq_spark import session
from rocketmq_spark.base import process
from rocketmq_spark.base.clock import Deadline
from rocketmq_spark.base.threads import Timer
from rocketmq_spark.columnar.encode import empty_bodies
from rocketmq_spark.columnar.encode.batch_tags import Rows
from rocketmq_spark.columnar.encode.encoder import CheckedRows
from rocketmq_spark.columnar.encode.ids import UniqueIds
from rocketmq_spark.columnar.encode.kafka import KafkaRows
from rocketmq_spark.columnar.encode.properties import BadRows
from rocketmq_spark.errors import RocketMQError, SendFailed
from rocketmq_spark.model import MessageQueue, SendStatus
from rocketmq_spark.options import Options
from rocketmq_spark.options.topic_names import TopicNames
from rocketmq_spark.producer.ambiguity import AmbiguousSendResolver
from rocketmq_spark.producer.delays import DelayRouter
from rocketmq_spark.producer.engine import Engine
from rocketmq_spark.producer.fault_tolerance import FaultTable
from rocketmq_spark.producer.outgoing import OutgoingSend, SendCompletion
from rocketmq_spark.producer.routing import set_environment_queues
from rocketmq_spark.producer.rows.routing import RoutingPlan, with_rocketmq_topics
from rocketmq_spark.producer.rows.sender import LOOKUP_STEPS, LOST_SEND_S, RowSender, RowTools
from rocketmq_spark.producer.spool_bridge import is_transient
from rocketmq_spark.session.spools import worker_spool
from rocketmq_spark.spark.compat import WriterCommitMessage
from rocketmq_spark.spark.sink import checks
from rocketmq_spark.spark.sink.exactly_once import ExactlyOncePlan, ExactlyOnceTask, check_task
from rocketmq_spark.spark.sink.report import (
    TaskCounts,
    Written,
    with_counts,
)

logger = logging.getLogger(__name__)

# A long task refreshes its routes after this time, so that it uses brokers that are up again. Java's producer refreshes its
# routes at the same interval.
ROUTE_REFRESH_S = 30.0

# How often a task that waits for an outcome checks whether Spark has abandoned the task.
ABANDONED_CHECK_S = 0.5


def _fault_table(options: Options) -> FaultTable:
    """Return the process's table of slow and failing brokers. Without this table, each short task would try the failing brokers
    again.
    """
    settings = checks.producer_settings(options)
    table_settings = settings.fault_tables, settings.send_latency_fault
    return process.get_or_create(
        "fault tables", (session.connection_key(options), *table_settings), lambda: FaultTable(*table_settings)
    )


class TaskWriter:
    """Sends the rows of one task.

    The driver determines ``environment_queues``, and ``partition_queues``, which has the queues in the order of Kafka's
    partitions (see ``checks``). If rows name their topics, the driver cannot know the topics, so the task itself determines the
    partition numbers of each topic.
    """

    def __init__(
        self,
        options: Options,
        columns: Mapping[str, str],
        partition_id: int | None = None,
        environment_queues: Mapping[str, tuple[MessageQueue, ...]] = types.MappingProxyType({}),
        exactly_once: ExactlyOnceTask | None = None,
        partition_queues: Mapping[str, tuple[MessageQueue, ...]] = types.MappingProxyType({}),
    ) -> None:
        self._options = options
        self._partition_queues = dict(partition_queues)
        self._columns = dict(columns)
        self._partition_id = partition_id
        self._exactly_once = exactly_once
        self._topic_names = TopicNames(options.topic_names, options.written_topics)
        self._sender = (
            session.sender(options) if exactly_once is None else exactly_once.limited_sender(session.sender(options))
        )
        self._settings = checks.producer_settings(options)
        if self._settings.environment is not None:
            set_environment_queues(self._sender, self._settings.environment, environment_queues)
        self._spool = worker_spool(options, self._settings)
        self._engine = Engine(self._sender, self._settings, Timer("rocketmq-sink"), _fault_table(options), self._spool)
        if exactly_once is not None:
            self._engine.ambiguity_resolver = AmbiguousSendResolver(exactly_once.stored_ids, self._engine.timer)
        self._routes = self._engine.routes
        self._outcomes: queues.SimpleQueue[tuple[int, SendCompletion]] = queues.SimpleQueue()
        long_delays = DelayRouter(
            self._sender,
            checks.timer_cache(self._sender, options),
            self._settings,
            self._engine.timer.wall_ms,
            self.is_transient,
        )
        ids = UniqueIds(os.urandom(8), self._engine.timer.wall_ms) if exactly_once is None else exactly_once.ids
        encoder = session.row_encoder(options)
        tools = RowTools(options, self._settings, self._sender, self._engine, encoder, long_delays)
        self._row_sender = RowSender(tools, self._columns, ids, self, partitions_of=self._numbered_queues)
        self._kafka_rows = KafkaRows(options.message_id) if options.kafka_columns else None
        self._counts = TaskCounts()
        self._pending_outcomes = 0
        self._first_row = 0
        self._checked_topics: set[str] = set()
        self._route_refresh_deadline = Deadline.after(ROUTE_REFRESH_S)

    def run(self, batches: Iterable[pa.RecordBatch]) -> TaskCommitMessage:
        """Call ``write``, and return the counts for the driver."""
        return TaskCommitMessage(self.write(batches), self._topic_names.original_names)

    def write(self, batches: Iterable[pa.RecordBatch]) -> Written:
        """Send all rows and wait for all acknowledgements. Raises the error of the first failure, with the counts of acknowledged
        rows.
        """
        is_complete = False
        try:
            for batch in batches:
                self._write_batch(batch)
                self._first_row += len(batch)
            while self._pending_outcomes:
                self._count_outcome()
            if self._exactly_once is not None:
                self._exactly_once.count_stored(self._counts)
            is_complete = True
            return self._counts.written()
        except RocketMQError as e:
            while not self._outcomes.empty():
                with contextlib.suppress(RocketMQError):  # only the first failure is reported
                    self._count_outcome()
            error = with_counts(e, self._counts.written())
            raise error from error.__cause__
        finally:
            self._engine.close(Deadline.after(0), spools_unsent=False)  # Spark repeats the unsent rows
            if self._exactly_once is not None and not is_complete:
                self._exactly_once.end_sending()

    def _write_batch(self, batch: pa.RecordBatch) -> None:
        """Send an Arrow batch. All of its rows are checked before any of them is sent."""
        if not len(batch):
            return
        batch = self._with_sink_columns(batch)
        if self._route_refresh_deadline.expired:
            self._routes.refresh(Deadline.after(self._options.request_timeout))
            self._route_refresh_deadline = Deadline.after(ROUTE_REFRESH_S)
            for topic in self._checked_topics:  # a topic may have moved to other brokers
                self._check_timers(topic)
        checked, plan = self._check_rows(batch)
        encoded = self._row_sender.join(batch, checked, plan)
        if self._exactly_once is not None:
            if (rows_mask := self._exactly_once.rows_to_send(encoded.joined, batch, self._columns)) is not None:
                batch, all_rows = batch.filter(pa.array(rows_mask)), batch
                self._counts.count_already_stored(len(all_rows) - len(batch))
                if not len(batch):
                    return
                checked, plan = self._check_rows(batch)
                encoded = self._row_sender.join(batch, checked, plan)
            self._row_sender.add_content_ids(
                encoded, checked, functools.partial(self._exactly_once.hashes, batch, self._columns)
            )
        self._row_sender.send(batch, checked, plan, encoded)

    def _with_sink_columns(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """Return the batch with the columns of this sink. Converts Kafka's columns and marks empty bodies if options say so."""
        if self._kafka_rows is not None:
            batch = self._kafka_rows(batch)
            self._counts.left_out = self._kafka_rows.left_out_header_count
        if self._options.empty_bodies == "mark":
            bad_rows = BadRows(self._first_row)
            batch = empty_bodies.batch_with_stand_ins(batch, self._columns, bad_rows)
            bad_rows.raise_if_any(self._partition_id)
        if self._options.topic is None:
            bad_rows = BadRows(self._first_row)
            batch = with_rocketmq_topics(batch, self._columns["topic"], self._topic_names, bad_rows)
            bad_rows.raise_if_any(self._partition_id)
        return batch

    def _check_rows(self, batch: pa.RecordBatch) -> tuple[CheckedRows, RoutingPlan]:
        """Return the encoded parts of all rows, and their queues. Raises an error that lists all bad rows."""
        return self._row_sender.check(batch, BadRows(self._first_row), self._first_row, self._partition_id)

    def check_topic(self, topic: str) -> None:
        """Check that rows can be sent to the topic, once per task."""
        if topic not in self._checked_topics:
            try:
                checks.check_topic(self._sender, topic, self._options, must_exist=topic == self._options.topic)
                deadline = Deadline.after(self._options.send_timeout)
                self._routes.wait_for_queues(topic, deadline, deadline.pause)
                self._check_timers(topic)
            except RocketMQError as e:  # if there is a spool, it requests the route later
                if not self.is_transient(e):
                    raise
            self._checked_topics.add(topic)

    def _numbered_queues(self, topic: str) -> Sequence[MessageQueue]:
        if topic not in self._partition_queues:
            self._partition_queues[topic] = checks.numbered_queues(self._sender, topic, self._options)
        return self._partition_queues[topic]

    def is_transient(self, error: RocketMQError) -> bool:
        """Whether sends that fail with ``error`` go to the spool."""
        return self._spool is not None and is_transient(error, self._sender)

    def _check_timers(self, topic: str) -> None:
        checks.check_timers(self._sender, topic, self._options, self._columns, self._routes.brokers_of(topic))

    def submit(self, outgoing: OutgoingSend) -> None:
        """Pass a batch to the engine. While the engine has no room, count the batches that have ended."""
        while not self._outcomes.empty() or not self._engine.has_room(
            outgoing.size, outgoing.ordered_queue is not None
        ):
            self._count_outcome()
        self._pending_outcomes += 1
        self._engine.submit(outgoing)

    def on_completion(self, rows: Rows, completion: SendCompletion) -> None:
        """Store the outcome of a batch; the task's thread counts it later."""
        self._outcomes.put((len(rows), completion))

    def _next_outcome(self) -> tuple[int, SendCompletion]:
        """Wait for the next batch that ends, and return its number of rows and its outcome. Raises ``SendFailed`` if no batch
        ends in time, because this is a bug of the engine.
        """
        allowed_lookups = 1 if self._exactly_once is None else LOOKUP_STEPS
        timeout_s = allowed_lookups * self._options.send_timeout + LOST_SEND_S
        deadline = Deadline.after(timeout_s)
        while not deadline.expired:
            with contextlib.suppress(queues.Empty):
                return self._outcomes.get(
                    timeout=deadline.remaining() if self._exactly_once is None else ABANDONED_CHECK_S
                )
            if self._exactly_once is not None:
                self._exactly_once.raise_if_abandoned()
        window = self._engine.send_window
        raise SendFailed(
            f"{window.request_count} batches of {window.byte_count} bytes have had no outcome for {timeout_s:g} s, longer "
            "than 'sendTimeout' allows",
            remedy="This is a bug of rocketmq-spark: please report it with the worker's log",
        )

    def _count_outcome(self) -> None:
        """Wait for one outcome and count it."""
        rows, completion = self._next_outcome()
        self._pending_outcomes -= 1
        outcome = completion.outcome
        if isinstance(outcome, RocketMQError):
            raise outcome
        if self._options.require_store_ok == "ok" and outcome.status not in (SendStatus.SEND_OK, SendStatus.SPOOLED):
            raise SendFailed(
                f"a batch was stored with {outcome.status.value} in all {completion.attempts} attempts, and option "
                "'requireStoreOk' is ok",
                topic=completion.outgoing.topic,
                queue=str(outcome.queue),
                remedy="Check whether the broker's disk and slaves keep up",
            )
        if outcome.status is SendStatus.SPOOLED:
            self._counts.count_spooled(rows)
            return
        if completion.confirmed_count:
            self._counts.count_confirmed(completion.confirmed_count)
        failed_brokers = completion.brokers[:-1]
        self._counts.count_acknowledged(
            completion.brokers[-1], rows, completion.outgoing.size, completion.attempts - 1, failed_brokers
        )


class TaskCommitMessage(WriterCommitMessage):
    """A task's counts, which Spark passes to the driver. ``topic_names`` are the names to which option ``topicNames`` applied."""

    def __init__(self, written: Written, topic_names: Sequence[str] = ()) -> None:
        self.written = written
        self.topic_names = topic_names


def write_task(
    options: Options,
    columns: dict[str, str],
    environment_queues: dict[str, tuple[MessageQueue, ...]],
    batches: Iterable[pa.RecordBatch],
    plan: ExactlyOncePlan | None = None,
    partition_queues: Mapping[str, tuple[MessageQueue, ...]] = types.MappingProxyType({}),
) -> TaskCommitMessage:
    """Send the rows of the calling task. If this is not the first attempt of the task, log a warning that rows may be in the
    topic twice.

    The warning also appears for speculative attempts, because Spark numbers them like attempts after a failure. With ``plan``,
    there is no such warning: a later attempt reads which rows are stored, and omits these rows.
    """
    task = TaskContext.get()
    partition_id = task.partitionId() if task is not None else None
    attempt = task.attemptNumber() if task is not None else 0
    if plan is not None:
        check_task(plan, options.exactly_once_settle)
        exactly_once = ExactlyOnceTask(options, plan, partition_id or 0, attempt)
        return TaskWriter(options, columns, partition_id, environment_queues, exactly_once, partition_queues).run(
            batches
        )
    if attempt > 0:
        logger.warning(
            "attempt %d of partition %s sends its rows again (a failure, or spark.speculation): rows of other attempts "
            "stay in the topic; option 'messageId' lets readers drop them",
            attempt,
            partition_id,
        )
    return TaskWriter(options, columns, partition_id, environment_queues, partition_queues=partition_queues).run(
        batches
    )
