"""Exactly-once writes: the work of the planner and of the tasks.

The planner notes the ends of the queues. If there is already a note for the batch, it reads the ids that were stored since. A
task computes the ids of its rows from their content and omits rows that are stored; a later attempt reads the stored ids itself.
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
from rocketmq_spark.columnar.arrow import Flags
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
from rocketmq_spark.session.looks import hang_up, look_tools, noted_ids
from rocketmq_spark.spark.checkpoints import notes
from rocketmq_spark.spark.checkpoints.entries import checkpoint_folder
from rocketmq_spark.spark.checkpoints.notes import BatchNote
from rocketmq_spark.spark.sink import checks, guarantee
from rocketmq_spark.spark.sink.report import Tally
from rocketmq_spark.stored.ends import BatchHashes, Enough, QueueEnds, ScopedHashes, ends_now, known_task
from rocketmq_spark.stored.look import Look

logger = logging.getLogger(__name__)

# With more ids than this, the plan does not contain them, and each task reads its own.
MAX_IDS = 1_000_000
SINK = "sink"
OTHER_TOPICS = (
    "Finish the batch with these topics (further ones may be added to option 'allowedTopics'), namespace and environment. Or go "
    "back with: rocketmq-spark checkpoint rewind, which sends again what the batch has stored"
)
_QUERY, _BATCH = "sql.streaming.queryId", "streaming.sql.batchId"
_CHECKED = "topics checked for exactly-once"


@dataclass(frozen=True, slots=True)
class OncePlan:
    """The planner's data for the tasks of a batch. ``begun`` tells whether an earlier run may have sent some of its rows.

    If so, ``found`` has the hashes of stored rows by partition, or ``places`` the ranges that each task must read. ``counts`` are
    the numbers of stored rows by partition.
    """

    name: BatchName
    ends: QueueEnds
    begun: bool = False
    streaming: bool = True
    found: Mapping[int, bytes] | None = None
    places: Mapping[int, Sequence[OffsetRange]] | None = None
    counts: Mapping[int, int] = field(default_factory=dict)


def plan_batch(options: Options, checkpoint: str, write: str = SINK, number: int | None = None) -> OncePlan:
    """Begin a micro-batch, by default the last one that Spark has planned.

    A batch that was begun may be finished with further topics, as by a job that now sends its bad rows to one of their own:
    nothing of the batch can be there before the note has the ends of that topic.
    """
    folder = checkpoint_folder(checkpoint)
    name = notes.batch_name(folder, write, number)
    topics, within = guarantee.topics(options), _within(options)
    made = notes.begin(folder, name, lambda: noted(options), within, options.exactly_once_settle)
    ends = made.note.ends
    before = made.note.within
    if before != within or not set(ends.topics) <= set(topics):
        raise OptionError(
            f"batch {name.number} was begun for {', '.join(ends.topics)}{before}, and the query now writes to "
            f"{', '.join(topics)}{within}; the note of the batch is {folder.name}/{notes.ROOM}/{name.number}/{name.write}",
            remedy=OTHER_TOPICS,
        )
    if not made.before:
        return OncePlan(name, ends)
    hashes = _found(options, name, made.note)
    found = hashes.by_partition()
    try:
        now = noted(options)
    except RocketMQError as e:
        if not e.retriable or ends.topics != topics:
            raise
        logger.warning("batch %d goes to the queues of its note, although there may be others now: %s", name.number, e)
        now = ends
    ends = notes.extend(folder, made.note, now, options.exactly_once_settle).ends
    return OncePlan(name, ends, True, True, found, hashes.places() if found is None else None, hashes.counts)


def _within(options: Options) -> str:
    """The namespace and environment of the topics: in others, the same names mean other topics or queues."""
    words = [f"namespace {options.namespace!r}"] if options.namespace else []
    if options.environment is not None:
        layout = f"environments={layout_text(options.environments)}" if options.environments else ""
        how = [options.environment_mode, layout]
        words.append(f"environment {options.environment!r} ({', '.join(filter(None, how))})")
    return f" in {', '.join(words)}" if words else ""


def plan_job(options: Options) -> OncePlan:
    """Begin a batch write. Spark may repeat its tasks, but not the write."""
    return OncePlan(BatchName(uuid.uuid4().hex, 0, 0, b"", "job"), noted(options), streaming=False)


def noted(options: Options) -> QueueEnds:
    """The current ends of all topics' queues. Raises an error if a query cannot write to them exactly once."""
    topics = guarantee.topics(options)
    ends = ends_now(
        session.routes(options),
        session.offsets(options),
        topics,
        Deadline.after(options.send_timeout),
        options.request_timeout,
        _enough(options),
    )
    process.once(_CHECKED, (session.connection_key(options), tuple(topics)), lambda: _check(options, ends))
    return ends


def _enough(options: Options) -> Enough:
    """Requires a queue of the environment whose broker has a master, because its rows cannot go anywhere else."""
    environment = checks.settings(options).environment
    kept = checks.positions(options)

    def enough(route: TopicRoute, led: Set[MessageQueue]) -> None:
        if environment is None:
            return
        if route.topic not in kept:
            environment.publish(route.readable(), [queue for queue in route.writable() if queue in led])
        elif not led & set(kept[route.topic]):
            raise BrokerNotFound(f"{kept[route.topic][0]} has no master now", topic=route.topic)

    return enough


def _check(options: Options, ends: QueueEnds) -> bool:
    """Checks that the messages of the topics can be looked up later, and that this user may read them."""
    offsets, deadline = session.offsets(options), Deadline.after(options.send_timeout)
    for (topic, broker), queue in {(queue.topic, queue.broker_name): queue for queue in ends.queues}.items():
        if offsets.is_proxy(topic, broker, deadline):
            raise OptionError(
                "option 'deliveryGuarantee' is exactly-once, but option 'nameServer' names a Proxy, which does not say what "
                "brokers have stored",
                remedy="Name the name server of the brokers",
            )
        if session.pulls(options).compacted(queue):
            raise OptionError(
                f"option 'deliveryGuarantee' is exactly-once, but {topic!r} is a compaction topic, which removes messages",
                topic=topic,
            )
        offsets.sample(options.group, queue, ends.queues[queue], deadline)
    for state in offsets.log_states(sorted(ends.masters), deadline).values():
        if isinstance(state, RocketMQError) and not state.retriable:
            raise state
    return True


def _found(options: Options, name: BatchName, note: BatchNote) -> BatchHashes:
    """The hashes of a batch's stored rows. If an earlier run had a longer settle time, the look waits for that."""
    hashes = BatchHashes(name.digest(), MAX_IDS)
    tools = look_tools(options, placed=hashes.placed)
    Look(dataclasses.replace(tools, settle_s=max(tools.settle_s, note.settle_s)), note.ends).run(hashes)
    logger.warning(
        "batch %d began earlier: %d of its rows are stored already, and will not be sent again",
        name.number,
        hashes.count,
    )
    return hashes


class TaskOnce:
    """One attempt of one task."""

    def __init__(self, options: Options, plan: OncePlan, partition: int = 0, attempt: int = 0) -> None:
        scope = plan.name.scope(partition)
        self.plan = plan
        self._options = options
        self._topic = options.topic
        self._hash = RowHash(plan.name.query.encode())
        self._rows = _stored_rows(options, plan, partition, attempt)
        self._found = plan.counts.get(int(known_task(partition)), 0)
        self.ids = ContentIds(scope, Timer("rocketmq-ids").wall_ms)
        self.stored = noted_ids(options, plan.ends)
        self._given_up = guarantee.watch()

    def count(self, tally: Tally) -> None:
        """Count the stored messages in ``tally``, and those that no row has matched."""
        if self._rows is not None:
            tally.unmatched = self._rows.left
        tally.found, tally.found_of_batch = self._found, sum(self.plan.counts.values())

    def hashes(self, batch: pa.RecordBatch, columns: Mapping[str, str], items: pa.Array, first: int = 0) -> Hashes:
        """The hashes of the rows of ``batch`` from ``first`` on; ``items`` are these rows as encoded messages without ids."""
        return self._hash(items, batch.slice(first, len(items)), columns, self._topic)

    def missing(self, items: Callable[[], pa.Array], batch: pa.RecordBatch, columns: Mapping[str, str]) -> Flags | None:
        """Which rows of ``batch`` must be sent, because they are not stored; None if all of them must be sent.

        ``items`` is called only if some rows may be stored.
        """
        if self._rows is None:
            return None
        missing = self._rows.missing(self.hashes(batch, columns, items()))
        if MESSAGE_ID in columns and self._rows.exceeded:
            raise MessageRefused(
                f"rows of one task have the same id in column {columns[MESSAGE_ID]!r}, and some of them are stored: which of "
                "them cannot be determined",
                remedy="Option 'messageId' must name a column that identifies a row",
            )
        return None if missing.all() else missing

    def sender(self, sender: Sender) -> Sender:
        """``sender``, limited to the queues in the note. It stops sending when Spark gives up this attempt."""
        return cast(Sender, NotedSender(sender, self.plan.ends.queues, self._given_up))

    def end_sending(self) -> None:
        """Close the connections after this attempt has failed: unsent data must not arrive after the next attempt has looked."""
        hang_up(self._options)

    def check_wanted(self) -> None:
        """Raises ``ClosedError`` if Spark has given up this attempt."""
        if self._given_up():
            raise guarantee.given_up_error()


def _stored_rows(options: Options, plan: OncePlan, partition: int, attempt: int) -> StoredRows | None:
    if attempt:
        hashes = ScopedHashes(plan.name.scope(partition))
        Look(look_tools(options), plan.ends).run(hashes)
        logger.warning(
            "attempt %d of partition %d: %d of its rows are stored already", attempt, partition, hashes.count
        )
        return StoredRows(hashes.rows())
    if not plan.begun:
        return None
    if plan.found is not None:
        return StoredRows(np.frombuffer(plan.found.get(partition, b""), np.uint8).reshape(-1, ROW_BYTES))
    assert plan.places is not None
    hashes = ScopedHashes(plan.name.scope(partition))
    for ids in look_tools(options).read(plan.places.get(int(known_task(partition)), ())):
        hashes(ids)
    return StoredRows(hashes.rows())


def check_task(plan: OncePlan, settle_s: float) -> None:
    """Checks that Spark runs this task in the batch of the plan, and with the required settings."""
    context = TaskContext.get()
    if context is None:
        return
    get = context.getLocalProperty
    guarantee.check_settings(get, plan.streaming, "the Spark context of this task")
    guarantee.check_settle(get, settle_s)
    if plan.streaming:
        guarantee.check_batch(get, plan.name.query, plan.name.number, {"query": _QUERY, "batch": _BATCH})
    elif get(_QUERY) is not None:
        raise OptionError(
            "df.write with 'deliveryGuarantee' exactly-once cannot see, inside a streaming query, that a batch is repeated",
            remedy="Write with foreach_batch_writer(..., checkpoint_location=...)",
        )


class NotedSender:
    """A sender that uses only the noted queues. Queues that have joined a route since are used from the next plan on.

    It sends nothing once its attempt is ``given_up``, because the next attempt may have looked already. Senders of one process
    with the same queues are equal, so that tasks share the objects that a process keeps for each sender.
    """

    def __init__(
        self, sender: Sender, noted: Collection[MessageQueue], given_up: Callable[[], bool] = guarantee.never_given_up
    ) -> None:
        self._sender = sender
        self._noted = frozenset(noted)
        self._given_up = given_up
        self._known: dict[str, tuple[Sequence[MessageQueue], tuple[MessageQueue, ...]]] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sender, name)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, NotedSender) and (self._sender, self._noted) == (other._sender, other._noted)

    def __hash__(self) -> int:
        return hash((self._sender, self._noted))

    def send_async(
        self,
        queue: MessageQueue,
        request: SendRequest,
        deadline: Deadline,
        done: Callable[[SendResult | RocketMQError], None],
    ) -> None:
        """Rejects queues that were not noted, because a repeat would not look there."""
        if self._given_up():
            done(guarantee.given_up_error())
            return
        if queue in self._noted:
            self._sender.send_async(queue, request, deadline, done)
            return
        error = UnprovedError(
            f"the note of the batch lacks the end of {queue}: its broker had no master when the batch was begun",
            topic=queue.topic,
            queue=str(queue),
            remedy="Start the query again, which notes it",
        )
        error.unsent = True
        done(error)

    def publish_queues(self, topic: str, deadline: Deadline, refresh: bool = False) -> Sequence[MessageQueue]:
        found = self._sender.publish_queues(topic, deadline, refresh)
        known = self._known.get(topic)
        if known is None or known[0] is not found:
            known = self._known[topic] = found, tuple(queue for queue in found if queue in self._noted)
        if not known[1]:
            raise BrokerNotFound(
                "none of the queues that the topic had when the batch was begun takes messages now",
                topic=topic,
                remedy="Start the brokers that the topic had then",
            )
        return known[1]
