"""Exactly-once writes: how a batch is planned, and what its tasks send.

The planner writes a note with the ends of the queues. If the batch already has a note, the planner reads the ids that were stored
after the ends in the note. A task computes the ids of its rows from their content, and omits rows that are stored. A later
attempt of a task reads the stored ids itself.
"""

from __future__ import annotations

import dataclasses
import logging
import uuid
from collections.abc import Callable, Collection, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
import pyarrow as pa
from pyspark import TaskContext

from rocketmq_spark import session
from rocketmq_spark.base import process
from rocketmq_spark.base.clock import Deadline
from rocketmq_spark.base.threads import Timer
from rocketmq_spark.columnar.arrow import Mask
from rocketmq_spark.columnar.encode.content_ids import (
    ROW_BYTES,
    BatchName,
    ContentIds,
    Hashes,
    RowHash,
    StoredRows,
)
from rocketmq_spark.columnar.encode.properties import MESSAGE_ID
from rocketmq_spark.errors import (
    BrokerNotFound,
    MessageRefused,
    OptionError,
    RocketMQError,
    UnprovedError,
)
from rocketmq_spark.model import MessageQueue, OffsetRange, SendRequest, SendResult, TopicRoute
from rocketmq_spark.options import Options
from rocketmq_spark.ports import Sender
from rocketmq_spark.queues.environment import layout_text
from rocketmq_spark.session.stored_ids import close_connections, noted_stored_ids, scan_tools
from rocketmq_spark.spark.checkpoints import batch_notes
from rocketmq_spark.spark.checkpoints.batch_notes import BatchNote
from rocketmq_spark.spark.checkpoints.files import checkpoint_folder
from rocketmq_spark.spark.sink import checks, exactly_once_checks, worker_socket
from rocketmq_spark.spark.sink.report import TaskCounts
from rocketmq_spark.stored.ends import BatchHashes, CheckQueues, QueueEnds, ScopedHashes, fetch_ends, task_key
from rocketmq_spark.stored.scan import StoredIdScan

logger = logging.getLogger(__name__)

# The maximum number of stored ids in a plan. If more ids are stored, the plan has no ids, and each task reads the stored ids of
# its rows from the brokers.
MAX_PLANNED_IDS = 1_000_000
SINK_WRITE = "sink"
_REMEDY_OF_OTHER_TOPICS = (
    "Finish the batch with these topics (further ones may be added to option 'allowedTopics'), namespace and environment. Or go "
    "back with: rocketmq-spark checkpoint rewind, which sends again what the batch has stored"
)
_QUERY_PROPERTY, _BATCH_PROPERTY = "sql.streaming.queryId", "streaming.sql.batchId"
_CHECKED_TOPICS_KEY = "topics checked for exactly-once"


@dataclass(frozen=True, slots=True)
class ExactlyOncePlan:
    """The planner's data for the tasks of a batch.

    With ``is_repeat``, an earlier run may have sent some rows of the batch. The plan of such a batch has either
    ``stored_hashes``, the hashes of stored rows by partition, or ``stored_ranges``, the ranges that each task must read.
    ``stored_counts`` are the numbers of stored rows by partition.
    """

    name: BatchName
    ends: QueueEnds
    is_repeat: bool = False
    is_streaming: bool = True
    stored_hashes: Mapping[int, bytes] | None = None
    stored_ranges: Mapping[int, Sequence[OffsetRange]] | None = None
    stored_counts: Mapping[int, int] = field(default_factory=dict)


def plan_batch(
    options: Options, checkpoint: str, write_name: str = SINK_WRITE, number: int | None = None
) -> ExactlyOncePlan:
    """Start the micro-batch ``number``, or continue it if an earlier run started it. The default of ``number`` is the last batch
    that Spark has planned.

    A repeated batch may have further topics, for example if the job now sends its bad rows to a separate topic. Before the note
    has the ends of a further topic's queues, no row of the batch is sent to this topic.
    """
    folder = checkpoint_folder(checkpoint)
    name = batch_notes.batch_name(folder, write_name, number)
    topics, scope = exactly_once_checks.written_topics(options), _scope_text(options)
    begun_batch = batch_notes.begin_batch(
        folder, name, lambda: snapshot_queue_ends(options), scope, options.exactly_once_settle
    )
    ends = begun_batch.note.ends
    noted_scope = begun_batch.note.scope
    if noted_scope != scope or not set(ends.topics) <= set(topics):
        raise OptionError(
            f"batch {name.number} was begun for {', '.join(ends.topics)}{noted_scope}, and the query now writes to "
            f"{', '.join(topics)}{scope}; the note of the batch is "
            f"{folder.name}/{batch_notes.NOTES_FOLDER}/{name.number}/{name.write_name}",
            remedy=_REMEDY_OF_OTHER_TOPICS,
        )
    if not begun_batch.had_note:
        return ExactlyOncePlan(name, ends)
    stored_hashes = _read_stored_hashes(options, name, begun_batch.note)
    hashes_by_partition = stored_hashes.hashes_by_partition()
    try:
        current_ends = snapshot_queue_ends(options)
    except RocketMQError as e:
        if not e.retriable or ends.topics != topics:
            raise
        logger.warning(
            "batch %d is sent only to the queues in its note, because new queues cannot be determined now: %s",
            name.number,
            e,
        )
        current_ends = ends
    ends = batch_notes.add_queues(folder, begun_batch.note, current_ends, options.exactly_once_settle).ends
    return ExactlyOncePlan(
        name,
        ends,
        True,
        True,
        hashes_by_partition,
        stored_hashes.ranges_by_task() if hashes_by_partition is None else None,
        stored_hashes.counts,
    )


def _scope_text(options: Options) -> str:
    """Return the namespace and environment as text. Names of topics and queues are unique only together with this text: other
    namespaces and environments may have the same names.
    """
    parts = [f"namespace {options.namespace!r}"] if options.namespace else []
    if options.environment is not None:
        layout = f"environments={layout_text(options.environments)}" if options.environments else ""
        details = [options.environment_mode, layout]
        parts.append(f"environment {options.environment!r} ({', '.join(filter(None, details))})")
    return f" in {', '.join(parts)}" if parts else ""


def plan_job(options: Options) -> ExactlyOncePlan:
    """Start a batch write. Spark may repeat a task of the write, but never repeats the whole write."""
    return ExactlyOncePlan(
        BatchName(uuid.uuid4().hex, 0, 0, b"", "job"), snapshot_queue_ends(options), is_streaming=False
    )


def snapshot_queue_ends(options: Options) -> QueueEnds:
    """Return the current ends of the queues of all topics. Raises an error if the topics do not support exactly-once writes."""
    topics = exactly_once_checks.written_topics(options)
    ends = fetch_ends(
        session.routes(options),
        session.offsets(options),
        topics,
        Deadline.after(options.send_timeout),
        options.request_timeout,
        _master_check(options),
    )
    process.get_or_create(
        _CHECKED_TOPICS_KEY, (session.connection_key(options), tuple(topics)), lambda: _check_topics(options, ends)
    )
    return ends


def _master_check(options: Options) -> CheckQueues:
    """Return a check that at least one queue of the environment has a master. Rows cannot be sent to queues of other
    environments.
    """
    environment = checks.producer_settings(options).environment
    environment_queues = checks.environment_queues(options)

    def check(route: TopicRoute, queues_with_master: Set[MessageQueue]) -> None:
        if environment is None:
            return
        if route.topic not in environment_queues:
            environment.writable_queues(
                route.readable_queues(), [queue for queue in route.writable_queues() if queue in queues_with_master]
            )
        elif not queues_with_master & set(environment_queues[route.topic]):
            raise BrokerNotFound(f"{environment_queues[route.topic][0]} has no master now", topic=route.topic)

    return check


def _check_topics(options: Options, ends: QueueEnds) -> bool:
    """Check that the messages of the topics can be read by offset, and that this user may read them."""
    offsets, deadline = session.offsets(options), Deadline.after(options.send_timeout)
    for (topic, broker), queue in {(queue.topic, queue.broker_name): queue for queue in ends.end_offsets}.items():
        if offsets.is_proxy(topic, broker, deadline):
            raise OptionError(
                "option 'deliveryGuarantee' is exactly-once, but option 'nameServer' names a Proxy, which does not say what "
                "brokers have stored",
                remedy="Name the name server of the brokers",
            )
        if session.pulls(options).is_compacted(queue):
            raise OptionError(
                f"option 'deliveryGuarantee' is exactly-once, but {topic!r} is a compaction topic, which removes messages",
                topic=topic,
            )
        offsets.sample(options.group, queue, ends.end_offsets[queue], deadline)
    for state in offsets.log_states(sorted(ends.masters), deadline).values():
        if isinstance(state, RocketMQError) and not state.retriable:
            raise state
    return True


def _read_stored_hashes(options: Options, name: BatchName, note: BatchNote) -> BatchHashes:
    """Return the hashes of those rows of a batch that are stored already. Waits for the longest settle time of all runs of the
    batch.
    """
    stored_hashes = BatchHashes(name.digest(), MAX_PLANNED_IDS)
    tools = scan_tools(options, on_ranges=stored_hashes.set_ranges)
    StoredIdScan(dataclasses.replace(tools, settle_s=max(tools.settle_s, note.settle_s)), note.ends).run(stored_hashes)
    logger.warning(
        "batch %d began earlier: %d of its rows are stored already, and will not be sent again",
        name.number,
        stored_hashes.count,
    )
    return stored_hashes


class ExactlyOnceTask:
    """The stored rows of a task, for one attempt of the task."""

    def __init__(self, options: Options, plan: ExactlyOncePlan, partition: int = 0, attempt: int = 0) -> None:
        scope = plan.name.scope(partition)
        self.plan = plan
        self._options = options
        self._topic = options.topic
        self._row_hash = RowHash(plan.name.query.encode())
        self._stored_rows = _stored_rows_of_task(options, plan, partition, attempt)
        self._stored_count = plan.stored_counts.get(int(task_key(partition)), 0)
        self.ids = ContentIds(scope, Timer("rocketmq-ids").wall_ms)
        self.stored_ids = noted_stored_ids(options, plan.ends)
        self._is_abandoned = worker_socket.watch_worker_socket()

    def count_stored(self, counts: TaskCounts) -> None:
        """Set in ``counts`` how many messages are stored, and how many of these messages match no row."""
        if self._stored_rows is not None:
            counts.unmatched = self._stored_rows.unmatched_count
        counts.found, counts.found_of_batch = self._stored_count, sum(self.plan.stored_counts.values())

    def hashes(self, batch: pa.RecordBatch, columns: Mapping[str, str], items: pa.Array, first_row: int = 0) -> Hashes:
        """Return the hashes of the rows of ``batch`` from ``first_row`` on. ``items`` are these rows, encoded without ids."""
        return self._row_hash(items, batch.slice(first_row, len(items)), columns, self._topic)

    def rows_to_send(
        self, encode_items: Callable[[], pa.Array], batch: pa.RecordBatch, columns: Mapping[str, str]
    ) -> Mask | None:
        """Return a mask of the rows of ``batch`` that must be sent, because they are not stored; None if all rows must be sent.

        ``encode_items`` returns the encoded rows. This function is called only if some rows may be stored.
        """
        if self._stored_rows is None:
            return None
        is_missing = self._stored_rows.missing_mask(self.hashes(batch, columns, encode_items()))
        if MESSAGE_ID in columns and self._stored_rows.has_surplus_rows:
            raise MessageRefused(
                f"rows of one task have the same id in column {columns[MESSAGE_ID]!r}, and some of them are stored, but it "
                "cannot be determined which",
                remedy="Option 'messageId' must name a column that identifies a row",
            )
        return None if is_missing.all() else is_missing

    def limited_sender(self, sender: Sender) -> Sender:
        """Return a sender that passes messages to ``sender``, but only for the queues in the note, and only until Spark abandons
        this attempt.
        """
        return cast(Sender, NotedQueuesSender(sender, self.plan.ends.end_offsets, self._is_abandoned))

    def end_sending(self) -> None:
        """Close the connections after this attempt has failed, because the rows of this attempt must not arrive after the next
        attempt has read the stored ids.
        """
        close_connections(self._options)

    def raise_if_abandoned(self) -> None:
        """Raise ``ClosedError`` if Spark has abandoned this attempt."""
        if self._is_abandoned():
            raise worker_socket.abandoned_error()


def _stored_rows_of_task(options: Options, plan: ExactlyOncePlan, partition: int, attempt: int) -> StoredRows | None:
    if attempt:
        hashes = ScopedHashes(plan.name.scope(partition))
        StoredIdScan(scan_tools(options), plan.ends).run(hashes)
        logger.warning(
            "attempt %d of partition %d: %d of its rows are stored already", attempt, partition, hashes.count
        )
        return StoredRows(hashes.rows())
    if not plan.is_repeat:
        return None
    if plan.stored_hashes is not None:
        return StoredRows(np.frombuffer(plan.stored_hashes.get(partition, b""), np.uint8).reshape(-1, ROW_BYTES))
    assert plan.stored_ranges is not None
    hashes = ScopedHashes(plan.name.scope(partition))
    for ids in scan_tools(options).read(plan.stored_ranges.get(int(task_key(partition)), ())):
        hashes(ids)
    return StoredRows(hashes.rows())


def check_task(plan: ExactlyOncePlan, settle_s: float) -> None:
    """Check that Spark runs this task in the batch of the plan, and with the required settings. Raises ``OptionError``."""
    context = TaskContext.get()
    if context is None:
        return
    get_property = context.getLocalProperty
    exactly_once_checks.check_settings(get_property, plan.is_streaming, "the Spark context of this task")
    exactly_once_checks.check_settle(get_property, settle_s)
    if plan.is_streaming:
        exactly_once_checks.check_batch(
            get_property, plan.name.query, plan.name.number, {"query": _QUERY_PROPERTY, "batch": _BATCH_PROPERTY}
        )
    elif get_property(_QUERY_PROPERTY) is not None:
        raise OptionError(
            "df.write with 'deliveryGuarantee' exactly-once cannot see, inside a streaming query, that a batch is repeated",
            remedy="Write with foreach_batch_writer(..., checkpoint_location=...)",
        )


class NotedQueuesSender:
    """A sender that uses only the queues in the note. Queues that were added later are used after the next plan.

    After Spark has abandoned the attempt, this sender sends nothing. The next attempt may have read the stored ids already. So
    the next attempt would not see rows that arrive later, and would send these rows again.

    A process keeps some objects for each sender. Senders with the same queues are equal, so that their tasks share these
    objects.
    """

    def __init__(
        self,
        sender: Sender,
        queues: Collection[MessageQueue],
        is_abandoned: Callable[[], bool] = worker_socket.never_abandoned,
    ) -> None:
        self._sender = sender
        self._queues = frozenset(queues)
        self._is_abandoned = is_abandoned
        self._noted_queues_by_topic: dict[str, tuple[Sequence[MessageQueue], tuple[MessageQueue, ...]]] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sender, name)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, NotedQueuesSender) and (self._sender, self._queues) == (other._sender, other._queues)

    def __hash__(self) -> int:
        return hash((self._sender, self._queues))

    def send_async(
        self,
        queue: MessageQueue,
        request: SendRequest,
        deadline: Deadline,
        done: Callable[[SendResult | RocketMQError], None],
    ) -> None:
        """Send to a queue in the note. Rejects any other queue, because a repeat of the batch reads the stored ids only from the
        queues in the note.
        """
        if self._is_abandoned():
            done(worker_socket.abandoned_error())
            return
        if queue in self._queues:
            self._sender.send_async(queue, request, deadline, done)
            return
        error = UnprovedError(
            f"the note of the batch lacks the end of {queue}: its broker had no master when the batch was begun",
            topic=queue.topic,
            queue=str(queue),
            remedy="Start the query again: the note of the batch then has this queue",
        )
        error.unsent = True
        done(error)

    def publish_queues(self, topic: str, deadline: Deadline, refresh: bool = False) -> Sequence[MessageQueue]:
        published_queues = self._sender.publish_queues(topic, deadline, refresh)
        cached_queues = self._noted_queues_by_topic.get(topic)
        if cached_queues is None or cached_queues[0] is not published_queues:
            cached_queues = self._noted_queues_by_topic[topic] = (
                published_queues,
                tuple(queue for queue in published_queues if queue in self._queues),
            )
        if not cached_queues[1]:
            raise BrokerNotFound(
                "none of the queues that the topic had when the batch was begun takes messages now",
                topic=topic,
                remedy="Start the brokers that the topic had then",
            )
        return cached_queues[1]
