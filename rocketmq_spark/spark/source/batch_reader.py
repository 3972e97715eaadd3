"""Spark's batch reader, which uses predicates to shorten the ranges that it reads, or as a filter on the broker.

Spark applies every predicate to the rows again. So a read with predicates may return rows that do not match, but must return all
rows that match. Predicates on times do not shorten ranges. A broker finds the offset of a time by a binary search, and this
search skips matching messages if the clock of the broker was ever set back.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rocketmq_spark import session
from rocketmq_spark.base import process
from rocketmq_spark.base.clock import Clock
from rocketmq_spark.columnar.decode.schema import Column
from rocketmq_spark.errors import RocketMQError
from rocketmq_spark.model import MessageQueue, OffsetRange
from rocketmq_spark.options import Options
from rocketmq_spark.ports import OffsetReader
from rocketmq_spark.spark.compat import (
    DataSourceReader,
    EqualNullSafe,
    EqualTo,
    Filter,
    GreaterThan,
    GreaterThanOrEqual,
    In,
    InputPartition,
    LessThan,
    LessThanOrEqual,
)
from rocketmq_spark.spark.source import data_loss, kafka_partitions, partition_reader, partitioning, planning
from rocketmq_spark.spark.source.bounds_reader import BoundsReader, check_filter, planning_deadline
from rocketmq_spark.spark.source.data_loss import Loss
from rocketmq_spark.spark.source.offsets import Bounds, Offsets
from rocketmq_spark.spark.source.partitioning import Partitioning
from rocketmq_spark.spark.source.starting_offsets import check_start_before_end, ending_offsets, starting_offsets
from rocketmq_spark.spark.source.subscribed_topics import SubscribedTopics, no_matching_topic_error
from rocketmq_spark.spark.source.waiting import (
    WaitLimits,
    fetch_bounds_of_masters,
    retry_until,
    with_compaction_start,
)

_PUSHDOWN_WORKER = "pyspark.sql.worker.data_source_pushdown_filters"

_ValuePredicate = Callable[[Any], bool]


def is_pushdown_enabled() -> bool:
    """Whether Spark will push predicates to a reader that this process creates.

    If Spark's conf disables the pushdown, Spark rejects a reader that has ``pushFilters``. A process that plans a read cannot
    read Spark's conf, but it knows which worker module of PySpark it runs. Spark runs the module that pushes predicates only if
    the pushdown is enabled.
    """
    return process.is_worker(_PUSHDOWN_WORKER)


@dataclass(slots=True)
class Predicates:
    """The conditions of all predicates on each column. None in a field means no condition."""

    tests_by_column: dict[str, list[_ValuePredicate]]
    start_offset: int | None = None
    end_offset: int | None = None
    tags: frozenset[str] | None = None

    def prune(self, r: OffsetRange, has_aligned_offsets: bool = True) -> OffsetRange | None:
        """Return the part of a range where rows may match; None if no row can match.

        If ``has_aligned_offsets`` is False, entry N of the broker's index of the queue may lead to a message with a larger
        offset than N. So the lower bound of a predicate on offsets does not shorten the range.
        """
        column_values = {"topic": r.queue.topic, "brokername": r.queue.broker_name, "queueid": r.queue.queue_id}
        if not all(test(column_values[name]) for name, tests in self.tests_by_column.items() for test in tests):
            return None
        start = r.start if self.start_offset is None or not has_aligned_offsets else max(r.start, self.start_offset)
        end = r.end if self.end_offset is None else min(r.end, self.end_offset)
        return OffsetRange(r.queue, start, end) if end > start else None


def parse_filters(filters: Iterable[Filter]) -> Predicates:
    """Return the conditions of ``filters`` that can shorten ranges, or that a broker can check."""
    predicates = Predicates({})
    for predicate in filters:
        attribute: tuple[str, ...] = getattr(predicate, "attribute", ())
        if len(attribute) == 1:
            _add_predicate(predicates, attribute[0].lower(), predicate)
    return predicates


def _add_predicate(predicates: Predicates, name: str, predicate: Filter) -> None:
    if name in ("topic", "brokername", "queueid"):
        test = _test_of(predicate)
        if test is not None:
            predicates.tests_by_column.setdefault(name, []).append(test)
    elif name == "tags":
        tags = _allowed_values(predicate)
        if tags is not None and all(_is_plain_tag(tag) for tag in tags):
            predicates.tags = frozenset(tags) if predicates.tags is None else predicates.tags & frozenset(tags)
    elif name == "queueoffset":
        low_offset, end_offset = _integer_interval(predicate)
        predicates.start_offset = _larger_bound(predicates.start_offset, low_offset)
        predicates.end_offset = _smaller_bound(predicates.end_offset, end_offset)


def _allowed_values(predicate: Filter) -> tuple[Any, ...] | None:
    match predicate:
        case EqualTo(_, value) | EqualNullSafe(_, value):
            return (value,)
        case In(_, values):
            return tuple(values)
    return None


def _test_of(predicate: Filter) -> _ValuePredicate | None:
    values = _allowed_values(predicate)
    if values is not None:
        return lambda value: value in values
    match predicate:
        case GreaterThan(_, bound):
            return lambda value: bool(value > bound)
        case GreaterThanOrEqual(_, bound):
            return lambda value: bool(value >= bound)
        case LessThan(_, bound):
            return lambda value: bool(value < bound)
        case LessThanOrEqual(_, bound):
            return lambda value: bool(value <= bound)
    return None


def _integer_interval(predicate: Filter) -> tuple[int | None, int | None]:
    """Return the integers that can match, as ``[low, end)``. None as ``low`` or ``end`` means no bound."""
    match predicate:
        case EqualTo(_, value) | EqualNullSafe(_, value):
            number = _as_int(value)
            return (number, None if number is None else number + 1)
        case In(_, values) if values:
            numbers = [_as_int(value) for value in values]
            known_numbers = [number for number in numbers if number is not None]
            return (min(known_numbers), max(known_numbers) + 1) if len(known_numbers) == len(numbers) else (None, None)
        case GreaterThan(_, value) | GreaterThanOrEqual(_, value):
            return (_as_int(value), None)  # also for ``>``: Spark then drops the row with ``value``
        case LessThan(_, value) | LessThanOrEqual(_, value):
            number = _as_int(value)
            return (None, None if number is None else number + 1)
    return (None, None)


def _as_int(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _larger_bound(bound: int | None, new_bound: int | None) -> int | None:
    return bound if new_bound is None else new_bound if bound is None else max(bound, new_bound)


def _smaller_bound(bound: int | None, new_bound: int | None) -> int | None:
    return bound if new_bound is None else new_bound if bound is None else min(bound, new_bound)


def _is_plain_tag(tag: object) -> bool:
    """Whether a broker's tag expression with this text matches exactly this tag."""
    return isinstance(tag, str) and tag != "" and tag != "*" and "|" not in tag and tag == tag.strip()


logger = logging.getLogger(__name__)


class RocketMQReader(DataSourceReader):
    """The reader of one batch. The start and the end of the batch are determined once, when Spark plans the read."""

    def __init__(self, options: Options, columns: tuple[Column, ...]) -> None:
        self._options = options
        self._columns = columns
        self._predicates: Predicates | None = None

    def partitions(self) -> Sequence[InputPartition]:
        options = self._options
        reader, wait_limits = BoundsReader(options), WaitLimits.of_start(options)
        bounds, ranges, losses = retry_until(reader, lambda: self._plan_ranges(reader, wait_limits), wait_limits)
        data_loss.report_data_loss(options.fail_on_data_loss, losses)
        mismatched_queues = partition_reader.replica_mismatches(options, *reader.ports, ranges)
        tasks = partitioning.plan_tasks(Partitioning.of(options), bounds, ranges)
        partition_numbers = _partition_numbers(reader, bounds) if options.kafka_columns else {}
        return list(
            partition_reader.input_partitions(reader.ports.routes, tasks, mismatched_queues, numbers=partition_numbers)
        )

    def _plan_ranges(
        self, reader: BoundsReader, wait_limits: WaitLimits
    ) -> tuple[Bounds, list[OffsetRange], list[Loss]]:
        """Return the bounds of the queues, the ranges to read, and the losses of messages that cannot be read any more."""
        options = self._options
        view = fetch_bounds_of_masters(reader, options, wait_limits)
        if not view.topics:
            raise no_matching_topic_error(options)
        bounds, offset_reader = view.bounds, reader.ports.offsets
        check_filter(options, bounds)
        start = starting_offsets(offset_reader, options, bounds, planning_deadline(options))
        end = ending_offsets(offset_reader, options, bounds, planning_deadline(options))
        check_start_before_end(options, start, end, bounds)
        view = with_compaction_start(reader, options, view, start)
        ranges, losses = planning.readable_ranges(planning.ranges(Offsets(start), Offsets(end)), view)
        if self._predicates is not None:
            ranges = _pruned_ranges(ranges, self._predicates, offset_reader, options)
        return bounds, ranges, losses

    def read(self, partition: InputPartition) -> Iterator[Any]:
        return partition_reader.read_partition(self._options, self._columns, partition)


def _partition_numbers(reader: BoundsReader, queues: Iterable[MessageQueue]) -> dict[MessageQueue, int]:
    routed_queues = reader.partition_queues({queue.topic for queue in queues})
    return kafka_partitions.partition_numbers(kafka_partitions.with_new_queues({}, (*routed_queues, *queues)))


class PushdownReader(RocketMQReader):
    """A batch reader to which Spark pushes predicates. If Spark's conf disables the pushdown, Spark rejects this reader."""

    def pushFilters(self, filters: list[Filter]) -> Iterable[Filter]:
        self._predicates = parse_filters(filters)
        tags = self._predicates.tags
        if tags and self._options.tags is None and self._options.sql is None:
            topics = _tag_filterable_topics(self._options)
            if topics:
                self._options = replace(self._options, tags=dict.fromkeys(topics, " || ".join(sorted(tags))))
        return filters  # Spark applies all filters to the rows again


def _tag_filterable_topics(options: Options) -> list[str]:
    """Return the topics whose messages brokers can filter by tags; none if a broker does not answer.

    For a batch topic (``queue.type=BatchCQ``), brokers know only the tags of whole batches, so a filter would omit messages that
    match.
    """
    route_reader, pull_source = session.routes(options), session.pulls(options)
    topics = []
    try:
        for topic in SubscribedTopics(options, Clock()).current(route_reader, ()):
            queue_of_each_broker = {MessageQueue(topic, name, 0) for name in route_reader.get(topic).brokers}
            if not any(pull_source.stores_batches(queue) for queue in queue_of_each_broker):
                topics.append(topic)
    except RocketMQError as e:
        logger.info("brokers do not filter by tags for predicates: %s", e)
        return []
    return topics


def _pruned_ranges(
    ranges: list[OffsetRange], predicates: Predicates, offset_reader: OffsetReader, options: Options
) -> list[OffsetRange]:
    start_offset = predicates.start_offset
    # Entry N of the broker's index of a queue normally leads to the message with offset N. If the index was damaged, every
    # entry after the damage leads to a message with a larger offset. So if an entry leads to the right message, all entries
    # before it do so, too.
    checked_offsets = (
        {}
        if start_offset is None
        else {r.queue: min(start_offset, r.end - 1) for r in ranges if r.start < start_offset}
    )
    store_times_ms = (
        offset_reader.store_times_ms(options.group, checked_offsets, planning_deadline(options))
        if checked_offsets
        else {}
    )
    shifted_queues = checked_offsets.keys() - store_times_ms.keys()
    return [part for r in ranges if (part := predicates.prune(r, r.queue not in shifted_queues)) is not None]
