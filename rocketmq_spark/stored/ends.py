"""The ends of queues, noted before anything is sent, and the ids of the messages that were stored after them.

If a queue ends before its noted end, its broker has lost messages. In this case nothing can be proved, because later messages may
have taken the offsets of the lost messages. Only the ids of messages are decoded, and only ids with the prefix of the writer
(``scope``) are kept.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from rocketmq_spark.base.clock import Deadline, backoff, utc_text
from rocketmq_spark.columnar import arrow
from rocketmq_spark.columnar.decode.decoder import Decoder
from rocketmq_spark.columnar.decode.schema import BASIC_COLUMNS, BadMessages
from rocketmq_spark.columnar.encode.content_ids import (
    COMPARED_DIGITS,
    ID_DIGITS,
    PARTITION_BYTES,
    ROW_BYTES,
    SCOPE_BYTES,
)
from rocketmq_spark.errors import BrokerNotFound, CallTimeout, RocketMQError, UnprovedError
from rocketmq_spark.model import NO_FILTER, MessageQueue, OffsetRange, QueueBounds, TopicRoute
from rocketmq_spark.ports import OffsetReader, RouteReader
from rocketmq_spark.pull import reading
from rocketmq_spark.pull.outcomes import Cause
from rocketmq_spark.pull.puller import Puller

OR_AT_LEAST_ONCE = "or run this batch once with option 'deliveryGuarantee' at-least-once, which may repeat rows"

# A function that gets the route of a topic and those queues whose brokers have masters. It raises an error if these queues cannot
# take the rows.
CheckQueues = Callable[[TopicRoute, Set[MessageQueue]], None]


@dataclass(frozen=True, slots=True)
class QueueEnds:
    """The end of each queue, and the address of each broker's master.

    ``stored_ms`` is the store time of each queue's last message, or 0 if that message had expired. The store time shows whether a
    queue's topic was deleted and created again: the new queue has the same name, but another store time. Queues with an unknown
    store time are not in ``stored_ms``.
    """

    end_offsets: Mapping[MessageQueue, int]
    masters: Mapping[str, str]
    stored_ms: Mapping[MessageQueue, int] = field(default_factory=dict)

    @property
    def topics(self) -> list[str]:
        return sorted({queue.topic for queue in self.end_offsets})

    def ends_of_topics(self, topics: Iterable[str]) -> QueueEnds:
        """The ends of the queues of ``topics``."""
        kept_topics = set(topics)
        return self.ends_of_queues(queue for queue in self.end_offsets if queue.topic in kept_topics)

    def with_further_queues(self, other: QueueEnds) -> QueueEnds:
        """The ends of all queues of this object, and the ends of ``other`` for further queues."""
        further_times = {queue: time_ms for queue, time_ms in other.stored_ms.items() if queue not in self.end_offsets}
        return QueueEnds(
            {**other.end_offsets, **self.end_offsets},
            {**other.masters, **self.masters},
            {**further_times, **self.stored_ms},
        )

    def ends_of_queues(self, queues: Iterable[MessageQueue]) -> QueueEnds:
        """The ends of ``queues``. Queues without a noted end are omitted."""
        kept_queues = {queue for queue in queues if queue in self.end_offsets}
        broker_names = {queue.broker_name for queue in kept_queues}
        return QueueEnds(
            {queue: end for queue, end in self.end_offsets.items() if queue in kept_queues},
            {name: address for name, address in self.masters.items() if name in broker_names},
            {queue: time_ms for queue, time_ms in self.stored_ms.items() if queue in kept_queues},
        )

    def to_json(self) -> dict[str, Any]:
        brokers = {name: {"master": self.masters[name]} for name in sorted(self.masters)}
        return {
            "topics": _numbers_by_topic(self.end_offsets),
            "brokers": brokers,
            "stored": _numbers_by_topic(self.stored_ms),
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> QueueEnds:
        """The reverse of ``to_json``. Raises ``KeyError``, ``TypeError`` or ``ValueError`` for other values."""
        masters = {name: str(data["master"]) for name, data in value["brokers"].items()}
        return cls(_numbers_by_queue(value["topics"]), masters, _numbers_by_queue(value.get("stored", {})))

    def ranges(self, later_ends: Mapping[MessageQueue, int]) -> list[OffsetRange]:
        """The ranges from the noted ends to ``later_ends``, without empty ranges, broker by broker."""
        order = sorted(self.end_offsets, key=lambda queue: (queue.broker_name, queue))
        return [
            OffsetRange(q, self.end_offsets[q], later_ends[q]) for q in order if self.end_offsets[q] < later_ends[q]
        ]

    def check_bounds(self, bounds: Mapping[MessageQueue, QueueBounds]) -> None:
        """Raises ``UnprovedError`` if messages after a noted end are missing."""
        for queue, end in sorted(self.end_offsets.items()):
            current_bounds = bounds.get(queue)
            if current_bounds is None:
                problem = "its broker does not report it any more"
            elif current_bounds.max_offset < end:
                problem = f"it ends at offset {current_bounds.max_offset} now, and ended at {end} before"
            elif current_bounds.min_offset > end:
                problem = f"retention deleted offsets {end} to {current_bounds.min_offset}, which may be of this batch"
            else:
                continue
            raise _unproved_error(queue, problem)

    @property
    def last_offsets(self) -> dict[MessageQueue, int]:
        """The offset of the last message before each end, for queues in ``stored_ms``."""
        return {queue: self.end_offsets[queue] - 1 for queue in sorted(self.stored_ms)}

    def check_store_times(self, current_times: Mapping[MessageQueue, int]) -> None:
        """Raises ``UnprovedError`` if the message before an end has another store time than the noted time. Messages that
        retention has deleted since then are not checked.
        """
        for queue, stored_ms in sorted(current_times.items()):
            noted_store_ms = self.stored_ms.get(queue, stored_ms)
            if noted_store_ms == stored_ms:
                continue
            previous_state = f"stored at {utc_text(noted_store_ms)}" if noted_store_ms else "not kept any more"
            raise _unproved_error(
                queue,
                f"the message before offset {self.end_offsets[queue]} was {previous_state}, and now there is one stored at "
                f"{utc_text(stored_ms)}: the topic was created again, or its broker lost messages",
            )


def _unproved_error(queue: MessageQueue, problem: str) -> UnprovedError:
    return UnprovedError(
        f"what is stored in {queue} cannot be proved: {problem}", topic=queue.topic, queue=str(queue),
        remedy=f"Restore the topic and its messages, {OR_AT_LEAST_ONCE}",
    )  # fmt: skip


def _numbers_by_topic(numbers: Mapping[MessageQueue, int]) -> dict[str, dict[str, dict[str, int]]]:
    """The numbers by topic, broker and queue id."""
    topics: dict[str, dict[str, dict[str, int]]] = {}
    for queue, number in sorted(numbers.items()):
        topics.setdefault(queue.topic, {}).setdefault(queue.broker_name, {})[str(queue.queue_id)] = number
    return topics


def _numbers_by_queue(topics: Mapping[str, Any]) -> dict[MessageQueue, int]:
    return {
        MessageQueue(topic, broker_name, int(queue_id)): int(value)
        for topic, brokers in topics.items()
        for broker_name, values in brokers.items()
        for queue_id, value in values.items()
    }


def fetch_ends(
    routes: RouteReader,
    offsets: OffsetReader,
    topics: Sequence[str],
    deadline: Deadline,
    request_timeout_s: float,
    check_queues: CheckQueues = lambda route, queues_with_master: None,
) -> QueueEnds:
    """The ends of the queues of ``topics`` whose brokers have masters. Retries until ``deadline``, then raises the error of a
    broker that does not answer, or of ``check_queues`` if the queues do not suffice.
    """
    error: RocketMQError | None = None
    for pause in backoff(0.1, 1.0):
        has_full_time = deadline.remaining() >= request_timeout_s
        try:
            request_deadline = Deadline.after(request_timeout_s).within(deadline.remaining())
            return _fetch_ends_once(routes, offsets, topics, request_deadline, check_queues)
        except RocketMQError as e:
            # The last attempt may have less time than a request needs. A timeout of the last attempt would hide the error of the
            # previous attempt.
            if error is None or has_full_time or not isinstance(e, CallTimeout):
                error = e
            if not e.retriable or deadline.expired:
                raise error from error.__cause__
        deadline.pause(pause)
    raise AssertionError("``backoff`` yields pauses forever")


def _fetch_ends_once(
    routes: RouteReader, offsets: OffsetReader, topics: Sequence[str], deadline: Deadline, check_queues: CheckQueues
) -> QueueEnds:
    queues: list[MessageQueue] = []
    for topic in topics:
        route = routes.get(topic, 0.0, deadline)
        route_queues = {*route.readable_queues(), *route.writable_queues()}
        # Tasks send only to brokers with a master. A slave that acts as master is not enough, because the slave stops acting when
        # the master returns.
        queues_with_master = {
            queue for queue in route_queues if (data := route.brokers.get(queue.broker_name)) and data.own_master
        }
        if not queues_with_master:
            raise BrokerNotFound("no broker of the topic has a master of its own now", topic=topic)
        check_queues(route, queues_with_master)
        queues += queues_with_master
    broker_names = sorted({queue.broker_name for queue in queues})
    masters = {name: routes.address(name) for name in broker_names}
    bounds = offsets.bounds(queues, deadline)
    unreported_queues = [queue for queue in queues if queue not in bounds]
    if unreported_queues:
        raise UnprovedError(
            f"broker {unreported_queues[0].broker_name} reports no end of {unreported_queues[0]}",
            topic=unreported_queues[0].topic,
            remedy="Give the topic as many queues for reading as for writing",
        )
    return QueueEnds({queue: bounds[queue].max_offset for queue in sorted(queues)}, masters, last_store_times(bounds))


def last_store_times(bounds: Mapping[MessageQueue, QueueBounds]) -> dict[MessageQueue, int]:
    """The store time of the last message of each queue, for ``QueueEnds``."""
    return {
        queue: max(0, queue_bounds.last_update_ms)
        for queue, queue_bounds in sorted(bounds.items())
        if queue_bounds.max_offset > 0
        and (queue_bounds.last_update_ms > 0 or queue_bounds.min_offset == queue_bounds.max_offset)
    }


Bytes = npt.NDArray[np.uint8]
Ints = npt.NDArray[np.int64]

_ID_COLUMNS = tuple(column for column in BASIC_COLUMNS if column.name == "msgId")
_VALUE_BY_DIGIT = np.zeros(256, np.uint8)
for _digit, _value in zip(b"0123456789ABCDEF", range(16), strict=True):
    _VALUE_BY_DIGIT[_digit] = _value


# How many bytes are decoded at once. Messages of other producers are decoded, too, and all messages with their bodies.
_PORTION_BYTES = 16 << 20


def id_reader(
    open_puller: Callable[[], Puller], on_ranges: Callable[[Sequence[OffsetRange]], None] = lambda parts: None
) -> Callable[[Sequence[OffsetRange]], Iterator[pa.Array]]:
    """Returns a function that reads the ids of all messages in ranges, one broker after the other. Before the function yields
    ids, it calls ``on_ranges`` with the ranges of these ids.

    The function raises ``UnprovedError`` for missing messages, and ``DecodeError`` for a message that cannot be decoded.
    """

    def read(ranges: Sequence[OffsetRange]) -> Iterator[pa.Array]:
        puller = open_puller()
        for _, broker_ranges in groupby(ranges, key=lambda part: part.queue.broker_name):
            pull_source = reading.read(puller, list(broker_ranges), _raise_on_loss)
            decoder = Decoder(
                pull_source.queues,
                _ID_COLUMNS,
                "none",
                NO_FILTER,
                pull_source.usable_answer_counter,
                pull_source.with_true_ends,
                BadMessages(),
            )
            for fetched in pull_source.fetch():
                on_ranges(
                    [
                        OffsetRange(
                            pull_source.queues[answer.range_number], answer.start, min(answer.next_offset, answer.limit)
                        )
                        for answer in fetched.answers
                    ]
                )
                for batch in decoder.batches(fetched, _PORTION_BYTES):
                    yield batch.column(0)

    return read


def ids_in_scope(ids: pa.Array, scope: bytes) -> pa.Array:
    """The content ids (ids computed from a row's content) that begin with ``scope``."""
    is_in_scope = pc.and_(pc.starts_with(ids, scope.hex().upper()), pc.equal(pc.binary_length(ids), ID_DIGITS))
    return ids.filter(pc.fill_null(is_in_scope, False))


def compared_bytes(ids: pa.Array, scope_bytes: int) -> Bytes:
    """The part of content ids that is compared, without the first ``scope_bytes`` bytes: one row per id."""
    data, ends = arrow.data_and_offsets(ids)
    digits = np.frombuffer(data, np.uint8)[int(ends[0]) : int(ends[-1])].reshape(len(ids), ID_DIGITS)
    values = _VALUE_BY_DIGIT[digits[:, 2 * scope_bytes : COMPARED_DIGITS]]
    compared: Bytes = values[:, ::2] * np.uint8(16) + values[:, 1::2]
    return compared


class ScopedHashes:
    """Collects what ``compared_bytes`` returns for the ids that begin with ``scope``."""

    def __init__(self, scope: bytes) -> None:
        self._scope = scope
        self._row_blocks: list[Bytes] = []
        self.count = 0

    def __call__(self, ids: pa.Array) -> None:
        scoped_ids = ids_in_scope(ids, self._scope)
        if len(scoped_ids):
            self.count += len(scoped_ids)
            self._keep_rows(compared_bytes(scoped_ids, len(self._scope)))

    def _keep_rows(self, rows: Bytes) -> None:
        self._row_blocks.append(rows)

    def rows(self) -> Bytes:
        """The compared parts of all ids, one row per id."""
        return np.concatenate([np.empty((0, SCOPE_BYTES + ROW_BYTES - len(self._scope)), np.uint8), *self._row_blocks])


# Up to this number of ranges, each task has its own range per queue. With more ranges, all tasks share one range per queue.
MAX_TASK_RANGES = 200_000
# All tasks with this number or a higher number share one key and one set of ranges. Without this limit, a producer that copies
# the scope of a batch could use up memory with ids of any number of tasks.
MAX_TASKS = 100_000

RangeByQueue = dict[MessageQueue, OffsetRange]


class BatchHashes(ScopedHashes):
    """The hashes of a whole batch, at most ``limit``, and for each task the ranges that contain its messages. A task sends its
    rows within a short time, so its ranges are short.
    """

    def __init__(self, scope: bytes, limit: int) -> None:
        super().__init__(scope)
        self._limit = limit
        self._current_ranges: Sequence[OffsetRange] = ()
        self.counts: Counter[int] = Counter()  # ids of each ``task_key``
        self._ranges_by_task: dict[int, RangeByQueue] = {}
        self._shared_ranges: RangeByQueue | None = None

    def set_ranges(self, ranges: Sequence[OffsetRange]) -> None:
        """Set the ranges of the ids that the next calls of this object will get."""
        self._current_ranges = ranges

    def _keep_rows(self, rows: Bytes) -> None:
        if self.count > self._limit:
            self._row_blocks.clear()
        else:
            self._row_blocks.append(rows)
        task_keys, counts = (
            values.tolist() for values in np.unique(task_key(_partition_numbers(rows)), return_counts=True)
        )
        for key, count in zip(task_keys, counts, strict=True):
            self.counts[key] += count
            self._ranges_by_task.setdefault(key, {} if self._shared_ranges is None else self._shared_ranges)
        for ranges in {
            id(ranges_of_task): ranges_of_task for ranges_of_task in map(self._ranges_by_task.__getitem__, task_keys)
        }.values():
            _widen(ranges, self._current_ranges)
        if self._shared_ranges is None and sum(map(len, self._ranges_by_task.values())) > MAX_TASK_RANGES:
            self._shared_ranges = {}
            for ranges in self._ranges_by_task.values():
                _widen(self._shared_ranges, ranges.values())
            self._ranges_by_task = dict.fromkeys(self._ranges_by_task, self._shared_ranges)

    def hashes_by_partition(self) -> dict[int, bytes] | None:
        """The hashes by partition (the number of the task); None if there are more than ``limit`` hashes."""
        if self.count > self._limit:
            return None
        rows = self.rows()
        row_partitions = _partition_numbers(rows)
        order = np.argsort(row_partitions, kind="stable")  # one sort for all tasks, because there may be thousands
        partition_numbers, starts = np.unique(row_partitions[order], return_index=True)
        blocks = np.split(rows[order, PARTITION_BYTES:], starts[1:])
        return {number: block.tobytes() for number, block in zip(partition_numbers.tolist(), blocks, strict=False)}

    def ranges_by_task(self) -> dict[int, list[OffsetRange]]:
        """Return, for each ``task_key``, the ranges that contain all messages of the task, broker by broker."""
        lists = {
            id(ranges): sorted(ranges.values(), key=lambda part: (part.queue.broker_name, part.queue))
            for ranges in self._ranges_by_task.values()
        }
        return {number: lists[id(ranges)] for number, ranges in self._ranges_by_task.items()}


def _widen(ranges: RangeByQueue, added_ranges: Iterable[OffsetRange]) -> None:
    for added_range in added_ranges:
        previous_range = ranges.get(added_range.queue, added_range)
        ranges[added_range.queue] = OffsetRange(
            added_range.queue, min(previous_range.start, added_range.start), max(previous_range.end, added_range.end)
        )


def task_key(numbers: Any) -> Any:
    """The key of a task in the tables of a batch, from the number of the task. For an array of numbers, returns an array of
    keys.
    """
    return np.minimum(numbers, MAX_TASKS)


def _partition_numbers(rows: Bytes) -> Ints:
    """The number of the task of each row of a batch."""
    numbers: Ints = rows[:, 0].astype(np.int64) << 16 | rows[:, 1].astype(np.int64) << 8 | rows[:, 2]
    return numbers


def _raise_on_loss(part: OffsetRange, cause: Cause) -> None:
    raise UnprovedError(
        f"what is stored in {part.queue} cannot be proved: offsets {part.start} to {part.end} are gone ({cause.value})",
        topic=part.queue.topic,
        queue=str(part.queue),
        remedy=f"Restore the topic and its messages, {OR_AT_LEAST_ONCE}",
    )
