"""Chooses the queue of each row, and splits an Arrow batch into ranges of rows of one topic and queue.

A ``RowSelector`` returns an index into the topic's queues for each row, for a whole column at once if possible. A row without a
sharding key or queue id may go to any queue, as in Kafka, and gets ``len(queues)`` as its index. A row whose queue does not exist
is added to ``BadRows``; its index is 0, and is never used. ``Router`` splits an Arrow batch into ranges of rows that go to one
topic, and to one queue if rows choose their queue.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from rocketmq_spark.base import process
from rocketmq_spark.base.arguments import short_repr
from rocketmq_spark.base.clock import Deadline
from rocketmq_spark.columnar import arrow
from rocketmq_spark.columnar.arrow import Ints
from rocketmq_spark.columnar.encode.columns import KEY_HASH
from rocketmq_spark.columnar.encode.encoder import RowTopics
from rocketmq_spark.columnar.encode.properties import BadRows
from rocketmq_spark.columnar.java_hashes import hash_codes
from rocketmq_spark.errors import MessageRefused, SelectorError
from rocketmq_spark.model import Message, MessageQueue
from rocketmq_spark.options import Options, transport
from rocketmq_spark.options.names import resolve
from rocketmq_spark.options.topic_names import EXACT, TopicNames, dots_hint
from rocketmq_spark.producer.encoding import check_topic
from rocketmq_spark.queues.environment import scope_of
from rocketmq_spark.queues.selection import Selector, queues_on_brokers_in_rooms, select_by_callable

logger = logging.getLogger(__name__)

_NO_QUEUE, _AMBIGUOUS_QUEUE = -1, -2

QueueList = Sequence[MessageQueue]
# The queues of a topic in the order of Kafka's partitions.
PartitionLookup = Callable[[str], QueueList]


class TopicRows(NamedTuple):
    """The rows of one topic in an Arrow batch. If ``row_indices`` is None, all rows of the batch have this topic. ``first_row``
    is the row number of the batch's first row.
    """

    batch: pa.RecordBatch
    topic: str
    row_indices: npt.NDArray[np.intp] | None
    first_row: int

    def row_numbers(self) -> npt.NDArray[np.intp]:
        return np.arange(len(self.batch)) if self.row_indices is None else self.row_indices

    def column(self, name: str) -> pa.Array:
        column = arrow.one_array(self.batch.column(name))
        return column if self.row_indices is None else column.take(pa.array(self.row_indices))


def utf8_texts(column: pa.Array, name: str, row_numbers: npt.NDArray[np.intp], bad_rows: BadRows) -> pa.Array:
    """A column of strings, with null in place of each string that is not UTF-8. Rows whose string is not UTF-8 are bad.
    ``row_numbers`` are the numbers of the column's rows.
    """
    bad_indexes = arrow.non_utf8_rows(arrow.as_bytes(column))
    if not bad_indexes:
        return column
    for row in bad_indexes:
        value = column[row].as_buffer().to_pybytes()
        bad_rows.add_rows(row_numbers[row : row + 1], f"{name} is not UTF-8: {short_repr(value)}")
    return pc.if_else(pa.array(~np.isin(np.arange(len(column)), bad_indexes)), column, None)


def with_rocketmq_topics(batch: pa.RecordBatch, column: str, names: TopicNames, bad_rows: BadRows) -> pa.RecordBatch:
    """The batch with RocketMQ's names of topics in ``column``. A row is bad if an earlier row has another name for the same
    topic.
    """
    if names.rule == EXACT:
        return batch
    encoded = utf8_texts(
        arrow.one_array(batch.column(column)), column, np.arange(len(batch)), bad_rows
    ).dictionary_encode()
    topic_names: list[str] = encoded.dictionary.to_pylist()
    for code, name in enumerate(topic_names):
        try:
            topic_names[code] = names.rocketmq_name(name)
        except ValueError as e:
            bad_rows.add(
                arrow.to_mask(pc.fill_null(pc.equal(encoded.indices, code), False)), f"{e}; rename one of them"
            )
    values = pa.array(topic_names, pa.string()).take(encoded.indices)
    return batch.set_column(batch.schema.get_field_index(column), column, values)


class RowSelector(Protocol):
    """Chooses a queue for every row. If ``needs_good_rows`` is true, the rows must be checked first, because user code sees
    them.
    """

    needs_good_rows: bool

    def __call__(self, rows: TopicRows, queues: Sequence[MessageQueue], bad_rows: BadRows) -> Ints:
        """An index into ``queues`` per row; ``len(queues)`` for a row that may go to any queue."""


class ByHash:
    """``SelectMessageQueueByHash`` of the sharding key; any queue for a row whose key is null or empty."""

    needs_good_rows = False

    def __init__(self, columns: Mapping[str, str]) -> None:
        self._column = columns["shardingkey"]
        self._hash_column = columns.get(KEY_HASH)

    def __call__(self, rows: TopicRows, queues: Sequence[MessageQueue], bad_rows: BadRows) -> Ints:
        keys = utf8_texts(rows.column(self._column), self._column, rows.row_numbers(), bad_rows)
        filled_mask = arrow.non_empty_mask(arrow.as_bytes(keys))
        if filled_mask is not None:
            keys = pc.fill_null(keys, "")
        hashes = hash_codes(keys) if self._hash_column is None else rows.column(self._hash_column).to_numpy()
        queue_indexes: Ints = np.abs(hashes.astype(np.int64)) % len(queues)
        if filled_mask is not None:
            queue_indexes[~filled_mask] = len(queues)
        return queue_indexes


class ByColumn:
    """The queue that the row names. If a row names no queue, ``Router`` lets ``other_selector`` choose one. Without
    ``other_selector``, a row that names no queue may go to any queue.
    """

    needs_good_rows = False

    def __init__(self, columns: Mapping[str, str], other_selector: RowSelector | None = None) -> None:
        self.other_selector = other_selector
        self._id_column = columns["queueid"]
        self._broker_column = columns.get("brokername")

    def __call__(self, rows: TopicRows, queues: Sequence[MessageQueue], bad_rows: BadRows) -> Ints:
        queue_ids = rows.column(self._id_column).cast(pa.int64())
        no_queue_mask = arrow.null_mask(queue_ids)
        ids = pc.fill_null(queue_ids, -1).to_numpy()
        brokers = None
        if self._broker_column is not None:
            brokers = utf8_texts(rows.column(self._broker_column), self._broker_column, rows.row_numbers(), bad_rows)
        queue_indexes = self._look_up(ids, brokers, queues)
        if no_queue_mask is not None:
            if brokers is not None:
                no_queue_mask &= ~arrow.to_mask(brokers.is_valid())
            queue_indexes[no_queue_mask] = len(queues)
        bad_indexes = np.flatnonzero(queue_indexes < 0)
        if len(bad_indexes):
            row_numbers = rows.row_numbers()
            for index in bad_indexes.tolist():
                broker = brokers[index].as_py() if brokers is not None else None
                if not queue_ids[index].is_valid:
                    reason = (
                        f"{self._id_column} is null, and {self._broker_column} is {broker!r}; expected both or neither"
                    )
                elif brokers is not None and broker is None:
                    reason = (
                        f"{self._broker_column} is null, and {self._id_column} is {int(ids[index])}; "
                        "expected both or neither"
                    )
                else:
                    reason = _missing_queue_reason(
                        rows.topic, int(ids[index]), broker, is_ambiguous=queue_indexes[index] == _AMBIGUOUS_QUEUE
                    )
                bad_rows.add_rows(row_numbers[index : index + 1], reason)
            queue_indexes = np.maximum(queue_indexes, 0)
        return queue_indexes

    def _look_up(self, ids: Ints, brokers: pa.Array | None, queues: Sequence[MessageQueue]) -> Ints:
        """Looks queues up in a table of brokers and queue ids. The last row and the last column of the table stand for unknown
        brokers and unknown queue ids.
        """
        max_id = 1 + max(queue.queue_id for queue in queues)
        names: list[str | None]
        if brokers is None:
            names, table_rows = [None], np.zeros(len(ids), np.int64)
        else:
            encoded = brokers.dictionary_encode()
            names = encoded.dictionary.to_pylist()
            table_rows = pc.fill_null(encoded.indices.cast(pa.int64()), len(names)).to_numpy()
        table = np.full((len(names) + 1, max_id + 1), _NO_QUEUE, np.int64)
        for index, queue in enumerate(queues):
            for table_row, name in enumerate(names):
                if name is None:
                    is_taken = table[table_row, queue.queue_id] != _NO_QUEUE
                    table[table_row, queue.queue_id] = _AMBIGUOUS_QUEUE if is_taken else index
                elif name == queue.broker_name:
                    table[table_row, queue.queue_id] = index
        queue_indexes: Ints = table[table_rows, np.where((ids < 0) | (ids > max_id), max_id, ids)]
        return queue_indexes


def _missing_queue_reason(topic: str, queue_id: int, broker: str | None, is_ambiguous: bool) -> str:
    if is_ambiguous:
        return f"queue {queue_id} of topic {topic!r} is on several brokers; name the broker too"
    broker_text = f" on broker {broker!r}" if broker is not None else ""
    hint = f"its queues: rocketmq-spark topic describe {topic}"
    return f"topic {topic!r} has no queue {queue_id}{broker_text} that accepts messages; {hint}"


class ByPartition:
    """The queue whose partition number is in the row. The number is an index into the queues that ``partitions_of`` returns for
    the topic. Some of these queues may not accept messages now. A row without a number goes to the queue of its key, or to any
    queue if it has no key.
    """

    needs_good_rows = False

    def __init__(self, columns: Mapping[str, str], partitions_of: PartitionLookup) -> None:
        self._column = columns["partition"]
        self._partitions_of = partitions_of
        self.other_selector = ByHash(columns) if "shardingkey" in columns else None

    def number_queues(self, topic: str) -> None:
        """Number the queues of a topic. May wait for brokers that name servers do not list yet. If the route is fetched after
        this call, it contains these brokers.
        """
        self._partitions_of(topic)

    def missing_brokers(self, rows: TopicRows, queues: QueueList) -> set[str]:
        """Return the brokers that have a partition named by a row, but no queue in ``queues``."""
        partitions = self._partitions_of(rows.topic)
        partition_numbers = pc.unique(rows.column(self._column)).drop_null().to_pylist()
        present_brokers = {queue.broker_name for queue in queues}
        return {
            partitions[number].broker_name for number in partition_numbers if 0 <= number < len(partitions)
        } - present_brokers

    def __call__(self, rows: TopicRows, queues: Sequence[MessageQueue], bad_rows: BadRows) -> Ints:
        column = rows.column(self._column)
        has_number = arrow.to_mask(column.is_valid())
        partition_numbers = pc.fill_null(column.cast(pa.int64()), 0).to_numpy()
        partitions = self._partitions_of(rows.topic)
        index_by_queue = {queue: index for index, queue in enumerate(queues)}
        missing_number = len(partitions)  # replaces a row's number if no partition has this number
        queue_indexes = np.array([*(index_by_queue.get(queue, _NO_QUEUE) for queue in partitions), _NO_QUEUE], np.int64)
        partition_numbers = np.where(
            (partition_numbers < 0) | (partition_numbers >= missing_number), missing_number, partition_numbers
        )
        named_indexes = queue_indexes[partition_numbers]
        for row in np.flatnonzero(has_number & (named_indexes == _NO_QUEUE)).tolist():
            row_text = f"{self._column} is {column[row].as_py()}"
            if partition_numbers[row] == missing_number:
                brokers_text = ", ".join(dict.fromkeys(queue.broker_name for queue in partitions))
                reason = (
                    f"{row_text}, but topic {rows.topic!r} has partitions 0 to {missing_number - 1}, on {brokers_text} "
                    "(a broker that is down has none: start it, then write again)"
                )
            else:
                queue = partitions[int(partition_numbers[row])]
                reason = (
                    f"{row_text}, which is queue {queue}, and this queue does not accept messages now: start its broker, or make "
                    "the queue writable, then write again"
                )
            bad_rows.add_rows(rows.row_numbers()[row : row + 1], reason)
        return np.where(has_number, np.maximum(named_indexes, 0), len(queues))


class ByCallable:
    """A user's function, called row by row with the queues, the message and its sharding key."""

    needs_good_rows = True

    def __init__(self, columns: Mapping[str, str], function: Selector) -> None:
        self._columns = columns
        self._function = function

    def __call__(self, rows: TopicRows, queues: Sequence[MessageQueue], bad_rows: BadRows) -> Ints:
        if self._add_bad_rows(rows, bad_rows):
            return np.zeros(len(rows.row_numbers()), np.int64)
        values = {name: self._values(rows, name) for name in ("body", "tags", "keys", "properties", "shardingkey")}
        index_by_queue = {queue: index for index, queue in enumerate(queues)}
        queue_indexes = np.empty(len(values["body"]), np.int64)
        for index, (body, tags, keys, properties, key) in enumerate(zip(*values.values(), strict=True)):
            message = Message(rows.topic, body, tags, keys or (), dict(properties or ()))
            try:
                queue_indexes[index] = index_by_queue[select_by_callable(self._function, queues, message, key or None)]
            except SelectorError as e:
                row = rows.first_row + int(rows.row_numbers()[index])
                raise SelectorError(f"row {row}: {e.message}; nothing of its Arrow batch was sent") from e
        return queue_indexes

    def _add_bad_rows(self, rows: TopicRows, bad_rows: BadRows) -> bool:
        """Add each row with a string that is not UTF-8 to ``bad_rows``, because a selector function cannot get this string.
        Returns whether the rows have a bad row.
        """
        is_good = True
        for name in ("tags", "keys", "properties", "shardingkey"):
            if name in self._columns:
                bad_indexes = _rows_not_utf8(rows.column(self._columns[name]))
                bad_rows.add_rows(
                    rows.row_numbers()[bad_indexes],
                    f"{self._columns[name]} is not UTF-8, and the queue selector is a function",
                )
                is_good = is_good and not len(bad_indexes)
        return not is_good

    def _values(self, rows: TopicRows, name: str) -> list[Any]:
        if name not in self._columns:
            return [None] * len(rows.row_numbers())
        column = rows.column(self._columns[name])
        values: list[Any] = (arrow.as_bytes(column) if name == "body" else column).to_pylist()
        return values


def _rows_not_utf8(column: pa.Array) -> npt.NDArray[np.intp]:
    """The rows in which a string is not UTF-8. ``column`` has strings, lists of strings, or maps."""
    if pa.types.is_string(column.type):
        return np.array(arrow.non_utf8_rows(arrow.as_bytes(column)), np.intp)
    bounds = arrow.offsets(column)
    parts = (column.keys, column.items) if pa.types.is_map(column.type) else (column.values,)
    bad_value_indexes = [index for part in parts for index in arrow.non_utf8_rows(arrow.as_bytes(part))]
    rows = np.unique(np.searchsorted(bounds, bad_value_indexes, side="right") - 1)
    return rows[(rows >= 0) & (rows < len(column))].astype(np.intp)


QueueFilter = Callable[[QueueList], QueueList]


class RowRange(NamedTuple):
    """Rows ``start`` to ``end`` in the order of the plan. If ``queue`` is None, the rows may go to any queue."""

    topic: str
    queue: MessageQueue | None
    start: int
    end: int


class RoutingPlan(NamedTuple):
    """The ranges of an Arrow batch. ``order`` has the row numbers in the order of the plan; None if the order does not change."""

    order: npt.NDArray[np.intp] | None
    ranges: list[RowRange]

    def rows(self, row_range: RowRange) -> npt.NDArray[np.intp]:
        """Row numbers of ``row_range`` in the Arrow batch."""
        return (
            np.arange(row_range.start, row_range.end)
            if self.order is None
            else self.order[row_range.start : row_range.end]
        )

    def topics(self, count: int) -> RowTopics:
        """The topic of each of the ``count`` rows of the Arrow batch."""
        names = list(dict.fromkeys(row_range.topic for row_range in self.ranges))
        if len(names) == 1:
            return RowTopics(names)
        codes = np.empty(count, np.int64)
        for row_range in self.ranges:
            codes[self.rows(row_range)] = names.index(row_range.topic)
        return RowTopics(names, codes)


def selector_of(options: Options, columns: Mapping[str, str]) -> str | Callable[..., object]:
    """Return the selector of option ``queueSelector``, or otherwise the selector that a column ``partition``, ``queueId`` or
    ``shardingKey`` implies.

    Over gRPC the Proxy chooses queues, and a sharding key becomes the message group.
    """
    if transport.features(options).queue_choice_problem and "shardingkey" in columns:
        return "hash"
    if "queue_selector" not in options.given_fields:
        return next((selector for role, selector in _IMPLIED_SELECTORS.items() if role in columns), "roundRobin")
    selector: str | Callable[..., object] = options.queue_selector
    return selector


# The selectors that columns imply. A row that names its queue needs no key, so the columns that name a queue come first.
_IMPLIED_SELECTORS = {"partition": "partition", "queueid": "column", "shardingkey": "hash"}


def log_choice(options: Options, columns: Mapping[str, str], once: bool = False) -> None:
    """Log which column implies the selector, if a column does. With ``once``, this process logs it only once per topic."""
    selector = selector_of(options, columns)
    role = next((role for role, implied in _IMPLIED_SELECTORS.items() if implied == selector), None)
    if role is None or "queue_selector" in options.given_fields or transport.features(options).queue_choice_problem:
        return
    name, topics_text = columns[role], f"topic {options.topic}" if options.topic is not None else "topics of the rows"
    advice = (
        "drop the column to let queueSelector choose"
        if selector == "partition"
        else f"as with queueSelector={selector}; set option 'queueSelector' for another choice"
    )
    log = functools.partial(
        logger.info,
        "%s: column %r chooses the queue of each row; rows in which it is null%s go round robin, unless another column "
        "chooses (%s)",
        topics_text,
        name,
        " or empty" if selector == "hash" and not options.kafka_columns else "",  # Kafka's empty key counts as a key
        advice,
    )
    if once:
        process.get_or_create("chosen selectors", (options.cluster, topics_text, name), log)
    else:
        log()


def no_partition_numbers(topic: str) -> QueueList:
    raise AssertionError(f"rows of topic {topic!r} name partitions, and their queues have no numbers")


def row_selector(
    options: Options, columns: Mapping[str, str], partitions_of: PartitionLookup = no_partition_numbers
) -> RowSelector | None:
    """The selector that chooses per row; None if whole batches may go to any queue."""
    match selector_of(options, columns):
        case "hash":
            return ByHash(columns)
        case "column":
            uses_keys = "queue_selector" not in options.given_fields and "shardingkey" in columns
            return ByColumn(columns, ByHash(columns) if uses_keys else None)
        case "partition":
            return ByPartition(columns, partitions_of)
        case "roundRobin" | "random" | "machineRoom" | "environment":
            return None
        case selector:
            return ByCallable(columns, resolve(selector, "queueSelector"))


def queue_filter(options: Options) -> QueueFilter | None:
    """Return the filter for the queues of a batch whose rows do not choose a queue. The batch goes to a random queue that passes
    the filter. Returns None if batches go to the queues round robin.
    """
    if options.queue_selector == "machineRoom":
        return lambda queues: queues_on_brokers_in_rooms(queues, options.machine_rooms)
    return _all_queues if options.queue_selector == "random" else None


def _all_queues(queues: QueueList) -> QueueList:
    return queues


class Router:
    """Plans the Arrow batches of one task.

    ``queues(topic, refresh)`` returns a topic's queues. The first list for a topic is kept while the task runs, so that a key
    keeps its queue. Routers of one call have the same ``shared_queues``. If a row names a queue that is not in the list, the
    route is refreshed, at most once per batch. After a refresh, rows that name a queue use the newest list. Rows with a key still
    use the first list.

    ``partitions_of`` returns a topic's queues by partition number. A partition keeps its number while the task runs. If rows name
    a partition of a broker that has no queue in the route, ``wait_for_brokers`` is called once per task and topic.
    ``wait_for_brokers`` returns the topic's queues when the named brokers have queues, or at a deadline. All topics of an Arrow
    batch have the same deadline.
    """

    def __init__(
        self,
        options: Options,
        columns: Mapping[str, str],
        queues: Callable[[str, bool], QueueList],
        shared_queues: dict[str, QueueList] | None = None,
        partitions_of: PartitionLookup = no_partition_numbers,
        wait_for_brokers: Callable[[str, Collection[str], Deadline], QueueList] | None = None,
    ) -> None:
        self._topic = options.topic
        self._scope = scope_of(options)
        self._allowed_topics = frozenset(options.allowed_topics)
        self._column = columns.get("topic")
        self._selector = row_selector(options, columns, partitions_of)
        self._queues_of = queues
        self._wait_for_brokers = wait_for_brokers
        self._waited_topics: set[str] = set()
        self._patience_s = options.send_timeout
        self._deadline: Deadline | None = None  # the end of the waits for one Arrow batch, set at the first wait
        self._first_queues: dict[str, QueueList] = {} if shared_queues is None else shared_queues
        self._newest_queues: dict[str, QueueList] = {}

    @property
    def needs_good_rows(self) -> bool:
        """Whether all rows must be checked before ``plan`` is called, because user code sees the rows."""
        return self._selector is not None and self._selector.needs_good_rows

    def topics(self, batch: pa.RecordBatch, bad_rows: BadRows, first_row: int) -> list[TopicRows]:
        """The rows of each topic. Rows without a topic, and rows whose topic is illegal or not in ``allowedTopics``, are
        bad.
        """
        if not len(batch):
            return []
        if self._topic is not None:
            return [TopicRows(batch, self._topic, None, first_row)]
        assert self._column is not None
        column = utf8_texts(arrow.one_array(batch.column(self._column)), self._column, np.arange(len(batch)), bad_rows)
        named_mask = pc.fill_null(pc.greater(pc.binary_length(column), 0), False)
        bad_rows.add(~arrow.to_mask(named_mask), f"{self._column} is null or empty; expected the name of a topic")
        topics_with_rows = []
        names = [name for name in pc.unique(column).to_pylist() if name]
        for name in names:
            rows_of_topic = (
                None if len(names) == 1 else pc.indices_nonzero(pc.equal(column, name)).to_numpy().astype(np.intp)
            )
            rows = TopicRows(batch, name, rows_of_topic, first_row)
            try:
                check_topic(name, self._scope)
            except MessageRefused as e:
                bad_rows.add_rows(rows.row_numbers(), f"topic {name!r}: {e.message}")
                if remedy := dots_hint(name):
                    bad_rows.add_remedy(remedy.replace("; option", "Option"))
                continue
            if self._allowed_topics and name not in self._allowed_topics:
                bad_rows.add_rows(
                    rows.row_numbers(),
                    f"topic {name!r} is not in option 'allowedTopics': add it there, or filter such rows",
                )
            else:
                topics_with_rows.append(rows)
        return topics_with_rows

    def plan(self, topics: Sequence[TopicRows], bad_rows: BadRows) -> RoutingPlan:
        """The ranges of the rows. Rows of one queue keep their order."""
        self._deadline = None
        if len(topics) == 1 and topics[0].row_indices is None and self._selector is None:
            return RoutingPlan(None, [RowRange(topics[0].topic, None, 0, len(topics[0].batch))])
        orders, ranges = [], []
        topic_start = 0
        for rows in topics:
            order, parts = self._plan_topic(rows, bad_rows)
            orders.append(order)
            ranges += [
                RowRange(rows.topic, queue, topic_start + start, topic_start + end) for queue, start, end in parts
            ]
            topic_start += len(order)
        return RoutingPlan(np.concatenate(orders) if orders else None, ranges)

    def _plan_topic(
        self, rows: TopicRows, bad_rows: BadRows
    ) -> tuple[npt.NDArray[np.intp], list[tuple[MessageQueue | None, int, int]]]:
        numbers = rows.row_numbers()
        if self._selector is None:
            return numbers, [(None, 0, len(numbers))]
        queues, queue_indexes = self._choose_queues(rows, bad_rows)
        # 16-bit integers are sorted by radix sort, which is faster.
        narrow_indexes = queue_indexes.astype(np.int16) if len(queues) < 1 << 15 else queue_indexes
        order = np.argsort(narrow_indexes, kind="stable")
        destinations: list[MessageQueue | None] = [*queues, None]
        counts = np.bincount(queue_indexes, minlength=len(destinations))
        range_ends = np.cumsum(counts)
        parts = [
            (destinations[i], int(range_ends[i] - counts[i]), int(range_ends[i]))
            for i in np.flatnonzero(counts).tolist()
        ]
        return numbers[order], parts

    def _choose_queues(self, rows: TopicRows, bad_rows: BadRows) -> tuple[QueueList, npt.NDArray[np.int64]]:
        assert self._selector is not None
        if isinstance(self._selector, ByPartition):
            self._selector.number_queues(rows.topic)
        first_queues = self._first_queues.get(rows.topic)
        is_new = first_queues is None
        if first_queues is None:
            first_queues = self._first_queues[rows.topic] = self._queues_of(rows.topic, False)
        if not isinstance(self._selector, ByColumn | ByPartition):
            return first_queues, self._selector(rows, first_queues, bad_rows)
        newest_queues = self._newest_queues.get(rows.topic, first_queues)
        trial_bad_rows = BadRows()
        named_indexes = self._selector(rows, newest_queues, trial_bad_rows)
        if trial_bad_rows.reasons_by_row():
            # A refreshed route may have the queues that the rows name.
            newest_queues = self._newest_queues[rows.topic] = self._refreshed_queues(rows)
            if is_new:  # no key has a queue yet, so keys can use all queues, too
                first_queues = self._first_queues[rows.topic] = newest_queues
            named_indexes = self._selector(rows, newest_queues, bad_rows)
        queues, queue_indexes = first_queues, named_indexes
        if newest_queues is not first_queues:
            queues = list(dict.fromkeys((*first_queues, *newest_queues)))
            index_by_queue = {queue: index for index, queue in enumerate(queues)}
            queue_indexes = np.array([*map(index_by_queue.__getitem__, newest_queues), len(queues)])[named_indexes]
        if self._selector.other_selector is not None:
            other_indexes = self._selector.other_selector(rows, first_queues, bad_rows)
            queue_indexes = np.where(
                (named_indexes == len(newest_queues)) & (other_indexes < len(first_queues)),
                other_indexes,
                queue_indexes,
            )
        return queues, queue_indexes

    def _refreshed_queues(self, rows: TopicRows) -> QueueList:
        """The newest queues of the topic. Waits, once for each topic, for brokers whose partitions the rows name."""
        topic, queues = rows.topic, self._queues_of(rows.topic, True)
        if (
            not isinstance(self._selector, ByPartition)
            or self._wait_for_brokers is None
            or topic in self._waited_topics
        ):
            return queues
        missing_brokers = self._selector.missing_brokers(rows, queues)
        if not missing_brokers:
            return queues
        self._waited_topics.add(topic)
        self._deadline = self._deadline or Deadline.after(self._patience_s)
        return self._wait_for_brokers(topic, missing_brokers, self._deadline)
