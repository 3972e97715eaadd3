"""Spark's batch and stream writer. A task encodes Arrow batches and returns when every message is acknowledged.

Nothing is left to ``finally``, ``__del__`` or a thread after the task: a killed task gets no chance to clean up, and
what it sent will be sent again by its next attempt. That is at-least-once delivery.
"""

from __future__ import annotations

import logging
import os
import queue as queues
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql.datasource import DataSourceArrowWriter, DataSourceStreamArrowWriter, WriterCommitMessage
from pyspark.sql.types import StructType

from rocketmq_spark import session
from rocketmq_spark.clock import Deadline, backoff
from rocketmq_spark.errors import MessageRefused, RocketMQError, RouteNotFound
from rocketmq_spark.model import SendRequest, SendResult
from rocketmq_spark.options import Options
from rocketmq_spark.producer.clockwork import Clockwork
from rocketmq_spark.producer.delivery import Delivery, Parcel
from rocketmq_spark.producer.settings import ProducerSettings
from rocketmq_spark.producer.topics import Topics
from rocketmq_spark.sink import columns
from rocketmq_spark.sink.encode import Encoded, Encoder, UniqueIds

if TYPE_CHECKING:
    from rocketmq_spark.session import Client

logger = logging.getLogger(__name__)

GROUP = "rocketmq_spark_sink"
MAX_IN_FLIGHT = 4
BATCH_MAX_BYTES = 1 << 20
# One attempt of a batch; a broker that swallows requests is left after this and another one tried.
ATTEMPT_S = 10.0


@dataclass(frozen=True, slots=True)
class Written(WriterCommitMessage):
    """What one task had acknowledged: rows, bytes of bodies and properties on the wire, batches, repeated attempts."""

    rows: int = 0
    bytes: int = 0
    batches: int = 0
    retries: int = 0

    def __add__(self, other: Written) -> Written:
        return Written(
            self.rows + other.rows,
            self.bytes + other.bytes,
            self.batches + other.batches,
            self.retries + other.retries,
        )


class TaskWriter:
    """Sends the rows of one task."""

    def __init__(self, options: Options, names: Mapping[str, str]) -> None:
        self._options = options
        self._names = dict(names)
        self._client: Client = session.client(options)
        self._clockwork = Clockwork("rocketmq-sink")
        settings = ProducerSettings(
            group=GROUP,
            send_timeout_s=options.send_timeout,
            attempt_timeout_s=ATTEMPT_S,
            retries=None,
            pinned_retries=None,
            send_latency_fault=True,
            auto_create_topics=False,
            max_in_flight=MAX_IN_FLIGHT,
            heartbeat_s=0,
            route_refresh_s=0,
        )
        topics = Topics(self._client.sender, settings)
        self._delivery = Delivery(self._client.sender, topics, settings, self._clockwork)
        self._outcomes: queues.SimpleQueue[tuple[Parcel, int, SendResult | RocketMQError]] = queues.SimpleQueue()
        self._in_flight = 0
        self._encoder = Encoder(self._names, options.max_message_size, UniqueIds(os.urandom(8)))
        self._written = Written()
        self._row = 0
        self._topics_seen: set[str] = set()

    def write(self, batches: Iterator[pa.RecordBatch]) -> Written:
        """Send everything and wait for all acknowledgements. Raises the first failure."""
        try:
            for batch in batches:
                # All rows are encoded, and so checked, before any of them is sent.
                for topic, part in self._encoded(batch):
                    self._send(topic, part)
                self._row += len(batch)
            while self._in_flight:
                self._settle()
            return self._written
        finally:
            self._delivery.close(Deadline.after(0))
            self._clockwork.close()

    def _encoded(self, batch: pa.RecordBatch) -> list[tuple[str, Encoded]]:
        """The batch's items by topic; unknown topics are refused here."""
        encoded = self._encoder(batch, self._row)
        if self._options.topic is not None:
            parts = [(self._options.topic, encoded)]
        else:
            column = self._topics(batch)
            names = pc.unique(column).to_pylist()
            rows = {name: pc.indices_nonzero(pc.equal(column, name)) for name in names} if len(names) > 1 else {}
            parts = [(name, encoded.take(rows[name]) if rows else encoded) for name in names]
        for topic, _ in parts:
            if topic not in self._topics_seen:
                check_topic(self._client, topic, self._options)
                self._topics_seen.add(topic)
        return parts

    def _topics(self, batch: pa.RecordBatch) -> pa.Array:
        column = batch.column(self._names["topic"])
        named = pc.fill_null(pc.greater(pc.binary_length(column), 0), False)
        if not pc.all(named).as_py() and len(batch):
            rows = [str(self._row + i) for i, good in enumerate(named.to_pylist()) if not good]
            raise MessageRefused(
                f"{len(rows)} rows have no topic, and nothing of their Arrow batch was sent: {', '.join(rows[:10])}",
                remedy="Fill column 'topic', or give option 'topic'; rows are counted from 0 within their partition",
            )
        return column

    def _send(self, topic: str, encoded: Encoded) -> None:
        for chunk in encoded.chunks(self._options.batch_max_bytes or BATCH_MAX_BYTES):
            while self._in_flight >= MAX_IN_FLIGHT:
                self._settle()
            request = SendRequest(GROUP, chunk.body, batch=True, born_timestamp_ms=int(time.time() * 1000))
            parcel = Parcel(topic, request, Deadline.after(self._options.send_timeout))
            parcel.done = self._receipt(parcel, chunk.rows)
            self._in_flight += 1
            self._delivery.enqueue(parcel)
            self._delivery.pump()

    def _receipt(self, parcel: Parcel, count: int) -> Callable[[SendResult | RocketMQError], None]:
        return lambda outcome: self._outcomes.put((parcel, count, outcome))

    def _settle(self) -> None:
        """Wait for one outcome."""
        parcel, count, outcome = self._outcomes.get()
        self._in_flight -= 1
        if isinstance(outcome, RocketMQError):
            raise outcome
        size = len(parcel.request.body)
        self._written += Written(count, size, 1, parcel.attempts.count - 1)


def check_topic(one: Client, topic: str, options: Options) -> None:
    """That rows can be sent to ``topic``: it exists and has a queue that takes writes.

    While no broker at all is up the answer is not known, and is waited for as long as a send would wait.
    """
    deadline = Deadline.after(options.send_timeout)
    pauses = backoff(0.1, 2.0)
    while True:
        try:
            one.retry.run(lambda: one.sender.publish_queues(topic, deadline), deadline)
            return
        except RouteNotFound as e:
            if e.broker_code is None or deadline.expired or one.routes.any_broker():
                raise one.routes.missing_topic(e) if e.broker_code is not None else e from e
            logger.warning("no broker is up; waiting to write to %s", topic)
            threading.Event().wait(min(next(pauses), deadline.remaining()))


class _Writer:
    """What batch and stream writers share. Checks that need no broker are made here, on the driver."""

    def __init__(self, options: Options, schema: StructType) -> None:
        self.options = options
        self.names = columns.check(schema, options.topic)
        if options.topic is not None:
            check_topic(session.client(options), options.topic, options)

    def write_batches(self, iterator: Iterator[pa.RecordBatch]) -> Written:
        return TaskWriter(self.options, self.names).write(iterator)

    def log(self, messages: list[Any], what: str) -> Written:
        total = sum((m for m in messages if isinstance(m, Written)), Written())
        counts = (total.rows, total.batches, total.bytes, total.retries)
        logger.info("%s: %d rows in %d batches, %d bytes, %d retries", what, *counts)
        return total


class RocketMQWriter(DataSourceArrowWriter):
    """Writes a batch frame."""

    def __init__(self, options: Options, schema: StructType) -> None:
        self._writer = _Writer(options, schema)

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
        self._writer = _Writer(options, schema)

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        return self._writer.write_batches(iterator)

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:
        self._writer.log(messages, f"batch {batchId}")

    def abort(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:
        self._writer.log(messages, f"batch {batchId} failed; acknowledged before that")
