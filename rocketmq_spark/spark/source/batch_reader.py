"""Spark's batch reader, which uses predicates to shorten ranges, or as a filter on the broker.

Spark applies every predicate again. So a pruned read may return rows that do not match, but must return all rows that match.
Predicates on times prune nothing: a broker finds a time by a binary search, which skips matching messages if the broker's clock
was ever set back.
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
from rocketmq_spark.spark.source.starting_offsets import check_order, ending_offsets, starting_offsets
from rocketmq_spark.spark.source.subscribed_topics import SubscribedTopics, no_matching_topic
from rocketmq_spark.spark.source.waiting import (
    WaitLimits,
    fetch_bounds_of_masters,
    retry_until,
    with_compaction_start,
)

_PUSHDOWN_WORKER = "pyspark.sql.worker.data_source_pushdown_filters"

_Test = Callable[[Any], bool]


def pushdown_enabled() -> bool:
    """Whether Spark will push predicates to a reader that is made in this process.

    If Spark's conf disables the pushdown, Spark rejects a reader that has ``pushFilters``. A planner process cannot read the
    conf, but it can see its worker module: only if the pushdown is enabled, Spark runs the one that pushes predicates.
    """
    return process.is_worker(_PUSHDOWN_WORKER)


@dataclass(slots=True)
class Predicates:
    """The conditions of all predicates on each column; None: no condition."""

    tests: dict[str, list[_Test]]
    offset_from: int | None = None
    offset_to: int | None = None
    tags: frozenset[str] | None = None

    def prune(self, r: OffsetRange, offsets_aligned: bool = True) -> OffsetRange | None:
        """Return the part of a range where rows may match; None if no row can match.

        ``offsets_aligned`` is False if messages of the range may have larger offsets than their positions: the lower bound of
        offsets then prunes nothing.
        """
        values = {"topic": r.queue.topic, "brokername": r.queue.broker_name, "queueid": r.queue.queue_id}
        if not all(test(values[name]) for name, tests in self.tests.items() for test in tests):
            return None
        start = r.start if self.offset_from is None or not offsets_aligned else max(r.start, self.offset_from)
        end = r.end if self.offset_to is None else min(r.end, self.offset_to)
        return OffsetRange(r.queue, start, end) if end > start else None


def parse_filters(filters: Iterable[Filter]) -> Predicates:
    """Return the conditions of ``filters`` that can shorten ranges, or that a broker can check."""
    predicates = Predicates({})
    for predicate in filters:
        attribute: tuple[str, ...] = getattr(predicate, "attribute", ())
        if len(attribute) == 1:
            _add_filter(predicates, attribute[0].lower(), predicate)
    return predicates


def _add_filter(predicates: Predicates, name: str, predicate: Filter) -> None:
    if name in ("topic", "brokername", "queueid"):
        test = _test(predicate)
        if test is not None:
            predicates.tests.setdefault(name, []).append(test)
    elif name == "tags":
        tags = _allowed_values(predicate)
        if tags is not None and all(_is_plain_tag(tag) for tag in tags):
            predicates.tags = frozenset(tags) if predicates.tags is None else predicates.tags & frozenset(tags)
    elif name == "queueoffset":
        low, high = _interval(predicate)
        predicates.offset_from = _max_known(predicates.offset_from, low)
        predicates.offset_to = _min_known(predicates.offset_to, high)


def _allowed_values(predicate: Filter) -> tuple[Any, ...] | None:
    match predicate:
        case EqualTo(_, value) | EqualNullSafe(_, value):
            return (value,)
        case In(_, values):
            return tuple(values)
    return None


def _test(predicate: Filter) -> _Test | None:
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


def _interval(predicate: Filter) -> tuple[int | None, int | None]:
    """The integers that can match, as ``[low, high)``; None: no bound."""
    match predicate:
        case EqualTo(_, value) | EqualNullSafe(_, value):
            number = _as_int(value)
            return (number, None if number is None else number + 1)
        case In(_, values) if values:
            numbers = [_as_int(value) for value in values]
            known = [number for number in numbers if number is not None]
            return (min(known), max(known) + 1) if len(known) == len(numbers) else (None, None)
        case GreaterThan(_, value) | GreaterThanOrEqual(_, value):
            return (_as_int(value), None)  # for ``>``, Spark drops the one row too many
        case LessThan(_, value) | LessThanOrEqual(_, value):
            number = _as_int(value)
            return (None, None if number is None else number + 1)
    return (None, None)


def _as_int(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _max_known(known: int | None, new: int | None) -> int | None:
    return known if new is None else new if known is None else max(known, new)


def _min_known(known: int | None, new: int | None) -> int | None:
    return known if new is None else new if known is None else min(known, new)


def _is_plain_tag(tag: object) -> bool:
    """Whether a broker's tag expression with this text matches exactly this tag."""
    return isinstance(tag, str) and tag != "" and tag != "*" and "|" not in tag and tag == tag.strip()


logger = logging.getLogger(__name__)


class RocketMQReader(DataSourceReader):
    """A batch read. Its start and end are resolved once, when Spark plans it."""

    def __init__(self, options: Options, columns: tuple[Column, ...]) -> None:
        self._options = options
        self._columns = columns
        self._predicates: Predicates | None = None

    def partitions(self) -> Sequence[InputPartition]:
        options = self._options
        reader, limits = BoundsReader(options), WaitLimits.of_start(options)
        bounds, ranges, losses = retry_until(reader, lambda: self._plan_ranges(reader, limits), limits)
        data_loss.report_data_loss(options.fail_on_data_loss, losses)
        mismatched = partition_reader.replica_mismatches(options, *reader.ports, ranges)
        tasks = partitioning.plan_tasks(Partitioning.of(options), bounds, ranges)
        partition_numbers = _partition_numbers(reader, bounds) if options.kafka_columns else {}
        return list(
            partition_reader.input_partitions(reader.ports.routes, tasks, mismatched, numbers=partition_numbers)
        )

    def _plan_ranges(self, reader: BoundsReader, limits: WaitLimits) -> tuple[Bounds, list[OffsetRange], list[Loss]]:
        """Return the bounds of the queues, the ranges to read, and the losses before them."""
        options = self._options
        view = fetch_bounds_of_masters(reader, options, limits)
        if not view.topics:
            raise no_matching_topic(options)
        bounds, offsets = view.bounds, reader.ports.offsets
        check_filter(options, bounds)
        start = starting_offsets(offsets, options, bounds, planning_deadline(options))
        end = ending_offsets(offsets, options, bounds, planning_deadline(options))
        check_order(options, start, end, bounds)
        view = with_compaction_start(reader, options, view, start)
        ranges, losses = planning.readable_ranges(planning.ranges(Offsets(start), Offsets(end)), view)
        if self._predicates is not None:
            ranges = _pruned_ranges(ranges, self._predicates, offsets, options)
        return bounds, ranges, losses

    def read(self, partition: InputPartition) -> Iterator[Any]:
        return partition_reader.read_partition(self._options, self._columns, partition)


def _partition_numbers(reader: BoundsReader, queues: Iterable[MessageQueue]) -> dict[MessageQueue, int]:
    routed_queues = reader.partition_queues({queue.topic for queue in queues})
    return kafka_partitions.partition_numbers(kafka_partitions.with_new_queues({}, (*routed_queues, *queues)))


class PrunedReader(RocketMQReader):
    """A batch reader to which Spark pushes predicates. Spark rejects it if its conf disables the pushdown."""

    def pushFilters(self, filters: list[Filter]) -> Iterable[Filter]:
        self._predicates = parse_filters(filters)
        tags = self._predicates.tags
        if tags and self._options.tags is None and self._options.sql is None:
            topics = _topics_filtered_by_tag(self._options)
            if topics:
                self._options = replace(self._options, tags=dict.fromkeys(topics, " || ".join(sorted(tags))))
        return filters  # Spark applies all of them again


def _topics_filtered_by_tag(options: Options) -> list[str]:
    """Return the topics whose messages brokers can filter by tags; none if a broker does not answer.

    For a batch topic (``queue.type=BatchCQ``), brokers know only the tags of whole batches, and would leave out messages.
    """
    routes, pulls = session.routes(options), session.pulls(options)
    topics = []
    try:
        for topic in SubscribedTopics(options, Clock()).current(routes, ()):
            first_queues = {MessageQueue(topic, name, 0) for name in routes.get(topic).brokers}
            if not any(pulls.stores_batches(queue) for queue in first_queues):
                topics.append(topic)
    except RocketMQError as e:
        logger.info("brokers do not filter by tags for predicates: %s", e)
        return []
    return topics


def _pruned_ranges(
    ranges: list[OffsetRange], predicates: Predicates, offsets: OffsetReader, options: Options
) -> list[OffsetRange]:
    offset_from = predicates.offset_from
    # If the index of a queue was damaged, all later positions stay shifted. A message that is stored at its own offset shows that
    # no position before it is shifted.
    checked_offsets = (
        {} if offset_from is None else {r.queue: min(offset_from, r.end - 1) for r in ranges if r.start < offset_from}
    )
    stored = (
        offsets.store_times_ms(options.group, checked_offsets, planning_deadline(options)) if checked_offsets else {}
    )
    shifted = checked_offsets.keys() - stored.keys()
    return [part for r in ranges if (part := predicates.prune(r, r.queue not in shifted)) is not None]
