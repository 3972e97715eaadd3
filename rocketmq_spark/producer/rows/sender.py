"""Sends rows of Arrow batches: checks and encodes them, splits them into batches by topic and queue, and creates requests.

A task of the sink and ``Producer.send_arrow`` use this module. The owner of the rows (``RowOwner``) checks topics, waits while
the limits are reached, and gets each completion. The only requests of this module are those for routes and for types of topics.

A broker stores a batch of a batch topic as one message, with an id, and with the tag and keys that all of its rows share. A
filter compares only the batch's tag, so ``group_by_tag`` groups rows of one tag where their order allows it.
"""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from typing import NamedTuple, Protocol, overload

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from rocketmq_spark.base import codes
from rocketmq_spark.base.clock import Deadline, backoff
from rocketmq_spark.base.codes import Property
from rocketmq_spark.columnar import arrow
from rocketmq_spark.columnar.encode.batch_tags import BatchTagKeys, Rows, rows_without_key
from rocketmq_spark.columnar.encode.content_ids import ContentIds, Hashes
from rocketmq_spark.columnar.encode.encoder import CheckedRows, Encoded, EncodedItems, Encoder, Growth
from rocketmq_spark.columnar.encode.ids import RecordingIds, UniqueIds
from rocketmq_spark.columnar.encode.properties import BadRows
from rocketmq_spark.errors import RocketMQError
from rocketmq_spark.model import Message, MessageQueue
from rocketmq_spark.model.send import BatchStorage
from rocketmq_spark.options import Options, transport
from rocketmq_spark.ports import Sender
from rocketmq_spark.producer import encoding
from rocketmq_spark.producer.accumulator import MAX_KEYWORD_BYTES
from rocketmq_spark.producer.delays import DelayRouter
from rocketmq_spark.producer.encoding import How, PreparedMessage
from rocketmq_spark.producer.engine import Engine
from rocketmq_spark.producer.outgoing import OutgoingSend, SendCompletion
from rocketmq_spark.producer.rows import routing
from rocketmq_spark.producer.rows.routing import PartitionLookup, QueueList, RoutingPlan, RowRange, TopicRows
from rocketmq_spark.producer.settings import ProducerSettings
from rocketmq_spark.wire.messages import decode_batch

logger = logging.getLogger(__name__)

# The maximum number of tags in an Arrow batch whose rows are grouped by tag. With more tags, the groups would be small.
MAX_TAGS = 16

# The pause before a topic's storage is requested again, if the last request was slow and got no answer.
SILENT_RETRY_S = 30.0

# How long after the send timeout a request counts as lost, if no request completes.
LOST_SEND_S = 60.0
# The number of steps of a look-up of a batch that may be stored. Each step may take as long as the send timeout.
LOOKUP_STEPS = 4


class StoragePlan:
    """Applies the requirements of a topic's type to its rows. Rows of a compaction topic need a key. Over gRPC, rows of a topic
    of ordered messages need a sharding key. For a batch topic, the plan decides which rows form a batch, and the properties of
    the batch.
    """

    def __init__(self, options: Options, columns: Mapping[str, str], sender: Sender, now_ms: Callable[[], int]) -> None:
        self._options = options
        self._columns = columns
        self._sender = sender
        self._ids = UniqueIds(os.urandom(8), now_ms)
        self._batch_properties: BatchTagKeys | None = None
        self._storage_retry_deadlines: dict[str, Deadline] = {}
        # Over remoting without batches, no check is needed, because the broker itself rejects a bad single message and names
        # the reason.
        self._must_check_rows = options.auto_batch or bool(transport.features(options).queue_choice_problem)

    def check(self, batch: pa.RecordBatch, topics: Sequence[TopicRows], bad_rows: BadRows) -> None:
        """Add to ``bad_rows`` the rows that a broker would acknowledge but not store, and those that a Proxy would reject."""
        for rows in topics if self._must_check_rows else ():
            storage = self._storage(rows.topic)
            if storage is not None and storage.is_compacted:
                numbers = rows.row_numbers()
                keyless_numbers = numbers[rows_without_key(batch, self._columns)[numbers]]
                bad_rows.add_rows(keyless_numbers, encoding.no_key_reason(rows.topic))
            if storage is not None and storage.needs_group:
                key = "key" if self._options.kafka_columns else "shardingKey"
                bad_rows.add_rows(rows.row_numbers()[self._no_group_mask(rows)], _no_group_reason(rows.topic, key))

    def _no_group_mask(self, rows: TopicRows) -> npt.NDArray[np.bool_]:
        if "shardingkey" not in self._columns:
            return np.ones(len(rows.row_numbers()), np.bool_)
        filled_mask = arrow.non_empty_mask(arrow.as_bytes(rows.column(self._columns["shardingkey"])))
        return np.zeros(len(rows.row_numbers()), np.bool_) if filled_mask is None else ~filled_mask

    def split_by_tag(self, batch: pa.RecordBatch, plan: RoutingPlan) -> RoutingPlan:
        """Return the plan of ``batch``. If a topic stores a batch as one message, the topic's ranges are split by tag. Later
        calls of ``properties`` are about this batch.
        """
        self._batch_properties = None
        if not self._options.auto_batch or not any(
            self._is_stored_whole(topic) for topic in {s.topic for s in plan.ranges}
        ):
            return plan
        self._batch_properties = BatchTagKeys(batch, self._columns, MAX_KEYWORD_BYTES)
        return group_by_tag(plan, self._batch_properties, self._is_stored_whole, self._options.batch_by_tag)

    def properties(self, topic: str, rows: Rows) -> dict[str, str]:
        """The properties of a batch of these rows; empty if its messages are stored separately."""
        if self._batch_properties is None or not self._is_stored_whole(topic):
            return {}
        shared_properties = self._batch_properties.properties(rows)
        if shared_properties is None:
            return {}
        batch_id = np.empty((1, 32), np.uint8)
        self._ids.fill(batch_id)
        return {Property.UNIQ_KEY: batch_id.tobytes().decode(), **shared_properties}

    def _is_stored_whole(self, topic: str) -> bool:
        return (storage := self._storage(topic)) is not None and storage.as_one_message

    def _storage(self, topic: str) -> BatchStorage | None:
        if (retry_deadline := self._storage_retry_deadlines.get(topic)) is not None and not retry_deadline.expired:
            return None
        deadline = Deadline.after(timeout_s := self._options.request_timeout)
        storage = self._sender.batch_storage(topic, deadline)
        # After a slow request without an answer, no request is sent for ``SILENT_RETRY_S``, because each Arrow batch would wait
        # for the answer.
        if storage is None and deadline.remaining() < timeout_s / 2:
            self._storage_retry_deadlines[topic] = Deadline.after(SILENT_RETRY_S)
        return storage


def group_by_tag(
    plan: RoutingPlan, batch_properties: BatchTagKeys, is_stored_whole: Callable[[str], bool], batch_by_tag: str
) -> RoutingPlan:
    """The plan with a range for each tag. ``batch_by_tag`` is the option ``batchByTag``.

    Rows that choose their queue are grouped by tag only if the option is ``true``, because grouping changes the order of rows
    with different tags.
    """
    if (
        batch_by_tag == "false"
        or not batch_properties.tag_count
        or (batch_by_tag == "auto" and batch_properties.tag_count > MAX_TAGS)
    ):
        return plan
    orders, ranges, start = [], [], 0
    for row_range in plan.ranges:
        rows = plan.rows(row_range)
        may_group = is_stored_whole(row_range.topic) and (row_range.queue is None or batch_by_tag == "true")
        for part in batch_properties.rows_by_tag(rows) if may_group else [rows]:
            orders.append(part)
            ranges.append(RowRange(row_range.topic, row_range.queue, start, start + len(part)))
            start += len(part)
    return plan if len(ranges) == len(plan.ranges) else RoutingPlan(np.concatenate(orders), ranges)


class RowIds(Sequence[str]):
    """The message ids of a request. An id becomes a string when it is read, because most ids are never read."""

    def __init__(self, ids: npt.NDArray[np.uint8], rows: Rows) -> None:
        self._ids = ids
        self._rows = rows

    def __len__(self) -> int:
        return len(self._rows)

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[str]: ...
    def __getitem__(self, index: int | slice) -> str | Sequence[str]:
        if isinstance(index, slice):
            return RowIds(self._ids, self._rows[index])
        return str(self._ids[self._rows[index]].tobytes(), "ascii")

    def __iter__(self) -> Iterator[str]:
        return (self[index] for index in range(len(self)))

    def __repr__(self) -> str:
        return f"<{len(self)} message ids from {self[0]}>" if len(self) else "()"


class RowOwner(Protocol):
    """The owner of the rows that are sent: a task of the sink, or a call of a producer."""

    def check_topic(self, topic: str) -> None:
        """Check a topic of an Arrow batch. This method is called before any row of the batch is sent. Raises an error if no rows
        can be sent to the topic.
        """

    def is_transient(self, error: RocketMQError) -> bool:
        """Whether the error is temporary, and the producer has a spool for sends that fail with a temporary error."""

    def submit(self, outgoing: OutgoingSend) -> None:
        """Wait until the request is within the limits, and submit it to the engine."""

    def on_completion(self, rows: Rows, completion: SendCompletion) -> None:
        """Receive the completion of the request of ``rows``. This method is called on any thread, and must not block."""


class RowTools(NamedTuple):
    """The objects that a ``RowSender`` uses. ``make_encoder`` is the function that ``session.row_encoder`` returns."""

    options: Options
    settings: ProducerSettings
    sender: Sender
    engine: Engine
    make_encoder: Callable[..., Encoder]
    long_delays: DelayRouter


def batch_bytes(options: Options) -> int:
    """The maximum bytes of a batch of rows; 0 if each row is sent as a single message."""
    return min(options.batch_max_bytes or 0, options.max_message_size) if options.auto_batch else 0


class RowChecks(NamedTuple):
    """All checks of the rows of an Arrow batch, before any row is sent. ``check_topic`` is the method of ``RowOwner``."""

    encoder: Encoder
    router: routing.Router
    storage: StoragePlan
    check_topic: Callable[[str], None]

    def __call__(
        self, batch: pa.RecordBatch, bad_rows: BadRows, first_row: int, partition: int | None = None
    ) -> tuple[CheckedRows, RoutingPlan]:
        """The checked columns, and the routing plan. Raises an error if there are bad rows. ``first_row`` is the number of the
        batch's first row.
        """
        checked = self.encoder.check(batch, bad_rows)
        topics = self.router.topics(batch, bad_rows, first_row)
        if self.router.needs_good_rows:
            bad_rows.raise_if_any(partition)
        for rows in topics:
            self.check_topic(rows.topic)
        self.storage.check(batch, topics, bad_rows)
        if self.router.needs_good_rows:
            bad_rows.raise_if_any(partition)
        plan = self.router.plan(topics, bad_rows)
        bad_rows.raise_if_any(partition)
        return checked, plan


class RowSender:
    """Sends the Arrow batches of one owner. ``columns`` has the names of their columns by role.

    ``failed_queues`` is the same as in ``OutgoingSend``. ``queues`` caches the queues of topics, and may be shared by several
    senders. ``partitions_of`` returns the queues of a topic in the order of Kafka's partitions.
    """

    def __init__(
        self,
        tools: RowTools,
        columns: Mapping[str, str],
        ids: UniqueIds | ContentIds,
        owner: RowOwner,
        failed_queues: dict[Hashable, RocketMQError] | None = None,
        queues: dict[str, QueueList] | None = None,
        partitions_of: PartitionLookup = routing.no_partition_numbers,
    ) -> None:
        options, settings = tools.options, tools.settings
        self._options, self._settings = options, settings
        self._engine, self._long_delays = tools.engine, tools.long_delays
        self._columns, self._ids, self._owner, self._failed_queues = columns, ids, owner, failed_queues
        self._batch_bytes = batch_bytes(options)
        single_row_columns = {"shardingkey", "priority"} & columns.keys()
        self._max_batch_rows = settings.features.max_single_requests if single_row_columns else None
        # The bytes that a Proxy adds to each message.
        self._growth = Growth(settings.features.server_added_bytes, options.max_message_size)
        self._encoder = tools.make_encoder(columns, options.max_message_size, ids, self._batch_bytes)
        self._storage = StoragePlan(options, columns, tools.sender, self._engine.timer.wall_ms)
        # In an environment there is no wait, because its queues do not change.
        wait_for_brokers = self._wait_for_brokers if settings.environment is None else None
        router = routing.Router(options, columns, self._queues, queues, partitions_of, wait_for_brokers)
        self.check = RowChecks(self._encoder, router, self._storage, owner.check_topic)
        self._first_row = 0  # the number of the first row of the current Arrow batch
        self._filter_queues = routing.queue_filter(options)

    def join(self, batch: pa.RecordBatch, checked: CheckedRows, plan: RoutingPlan) -> Encoded:
        """The encoded rows. Ids that depend on the content are missing until ``add_content_ids`` writes them."""
        return self._encoder.join(checked, plan.topics(len(batch)))

    def add_content_ids(
        self, encoded: Encoded, checked: CheckedRows, hashes: Callable[[pa.Array, int], Hashes]
    ) -> None:
        """Write the ids that depend on the content into the rows that ``join`` has encoded (``Encoder.add_content_ids``)."""
        assert isinstance(encoded, EncodedItems)
        self._encoder.add_content_ids(encoded, checked, hashes)

    def send(
        self, batch: pa.RecordBatch, checked: CheckedRows, plan: RoutingPlan, encoded: Encoded, first_row: int = 0
    ) -> None:
        """Submit the rows in requests. The owner gets completions with the row numbers; the number of the first row is
        ``first_row``.
        """
        self._first_row = first_row
        plan = self._storage.split_by_tag(batch, plan)
        delayed_mask = checked.is_delayed
        if plan.order is not None:
            encoded = encoded.take(plan.order)
            delayed_mask = delayed_mask[plan.order] if delayed_mask is not None else None
        for row_range in plan.ranges:
            part, numbers = encoded.slice(row_range.start, row_range.end), plan.rows(row_range)
            if delayed_mask is not None and delayed_mask[row_range.start : row_range.end].any():
                is_delayed = delayed_mask[row_range.start : row_range.end]
                self._send_range(row_range, part.take(np.flatnonzero(is_delayed)), numbers[is_delayed], is_delayed=True)
                part, numbers = part.take(np.flatnonzero(~is_delayed)), numbers[~is_delayed]
            self._send_range(row_range, part, numbers)

    def _send_range(self, row_range: RowRange, encoded: Encoded, rows: Rows, is_delayed: bool = False) -> None:
        """Submit the rows of a range. Each delayed row is sent as a single message, because brokers ignore delays in a batch.
        Delayed rows have no order.
        """
        is_single = is_delayed or row_range.topic.startswith(codes.RETRY_PREFIX)
        max_bytes, start = 0 if is_single else self._batch_bytes, 0
        for chunk in encoded.chunks(max_bytes, self._max_batch_rows, self._growth):
            chunk_rows = rows[start : start + chunk.row_count]
            start += chunk.row_count
            now_ms, destination = self._engine.timer.wall_ms(), How(row_range.queue)
            if len(chunk.body) <= max_bytes or not isinstance(chunk.body, memoryview):
                topic, properties = row_range.topic, self._storage.properties(row_range.topic, chunk_rows)
                request = encoding.batch_request(chunk.body, properties, self._settings, now_ms)
            else:  # a row that is too large for a batch, or must not be in one
                prepared = _single_message(row_range.topic, chunk.body)
                if is_delayed and self._options.long_delay == "dmq":
                    prepared, destination = self._long_delay(prepared, destination)
                topic, request = prepared.message.topic, encoding.single_request(prepared, self._settings, now_ms)
            self._owner.submit(
                OutgoingSend(
                    topic,
                    request,
                    self._options.send_timeout,
                    destination.queue,
                    ordered=not is_delayed,
                    filter_queues=self._filter_queues if topic == row_range.topic else None,
                    done=functools.partial(self._owner.on_completion, chunk_rows + self._first_row),
                    msg_ids=RowIds(self._ids.last_ids, chunk_rows) if isinstance(self._ids, RecordingIds) else (),
                    failed_queues=self._failed_queues,
                )
            )

    def _long_delay(self, prepared: PreparedMessage, destination: How) -> tuple[PreparedMessage, How]:
        topic, deadline = prepared.message.topic, Deadline.after(self._options.send_timeout)

        def queues_or_empty() -> Sequence[MessageQueue]:
            try:
                return self._queues(topic, False)
            except RocketMQError as e:
                if not self._owner.is_transient(e):
                    raise
                return ()

        return self._long_delays.route(prepared, destination, queues_or_empty, deadline)

    def _queues(self, topic: str, refresh: bool) -> Sequence[MessageQueue]:
        return self._engine.routes.queues(topic, Deadline.after(self._options.send_timeout), refresh)

    def _wait_for_brokers(self, topic: str, brokers: Collection[str], deadline: Deadline) -> Sequence[MessageQueue]:
        """Wait until each of ``brokers`` has a queue that accepts messages, or until ``deadline``. Returns the queues of the
        topic.
        """
        logger.warning(
            "topic %s: rows name partitions of %s, which no name server lists as writable now; waiting for %g s at most, option "
            "'sendTimeout'",
            topic,
            ", ".join(sorted(brokers)),
            round(max(0.0, deadline.remaining()), 1),
        )
        pauses = backoff(0.1, 2.0)
        while True:
            # The wait for another topic may have used all of the time.
            fetch_deadline = Deadline.after(self._options.request_timeout) if deadline.expired else deadline
            queues = self._engine.routes.queues(topic, fetch_deadline, refresh=True)
            if set(brokers) <= {queue.broker_name for queue in queues} or deadline.expired:
                return queues
            deadline.pause(next(pauses))


def _no_group_reason(topic: str, key: str) -> str:
    return f"there is no {key}, and topic {topic!r} (message.type=FIFO) accepts only messages with a {key}"


def _single_message(topic: str, body: memoryview) -> PreparedMessage:
    """A row as a single message."""
    (item,) = decode_batch(body)
    return PreparedMessage(Message(topic, bytes(item.body), flag=item.flag), "", item.properties, False)
