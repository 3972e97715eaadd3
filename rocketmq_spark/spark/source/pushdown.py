"""Spark's predicates as fewer and shorter ranges, or as a filter on the broker. Pure.

Nothing is taken off Spark's hands: it applies every predicate again, so that pruning may only ever be too generous.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from pyspark.sql.datasource import (
    EqualNullSafe,
    EqualTo,
    Filter,
    GreaterThan,
    GreaterThanOrEqual,
    In,
    LessThan,
    LessThanOrEqual,
)

from rocketmq_spark.base import process
from rocketmq_spark.model import OffsetRange

# Masters' clocks differ a little, so store times inside a queue may run backwards after a fail-over.
CLOCK_MARGIN_MS = 60_000
_WORKER = "pyspark.sql.worker.data_source_pushdown_filters"

_Test = Callable[[Any], bool]


def enabled() -> bool:
    """Whether Spark is about to push filters: it refuses readers that could when its conf says no.

    The conf cannot be asked in a planner process, but which worker module runs there can.
    """
    return process.is_for(_WORKER)


@dataclass(slots=True)
class Predicates:
    """What the predicates, all of which must hold, say of each column; None says nothing."""

    tests: dict[str, list[_Test]]
    offset_from: int | None = None
    offset_to: int | None = None
    time_from_ms: int | None = None
    time_to_ms: int | None = None
    tags: frozenset[str] | None = None

    @property
    def by_time(self) -> bool:
        return self.time_from_ms is not None or self.time_to_ms is not None

    def keep(self, r: OffsetRange) -> OffsetRange | None:
        """The part of a range where rows may match; None for nothing."""
        facts = {"topic": r.queue.topic, "brokername": r.queue.broker_name, "queueid": r.queue.queue_id}
        if not all(test(facts[name]) for name, tests in self.tests.items() for test in tests):
            return None
        start = r.start if self.offset_from is None else max(r.start, self.offset_from)
        end = r.end if self.offset_to is None else min(r.end, self.offset_to)
        return OffsetRange(r.queue, start, end) if end > start else None


def understand(filters: Iterable[Filter]) -> Predicates:
    """What can be used of ``filters``."""
    predicates = Predicates({})
    for predicate in filters:
        attribute: tuple[str, ...] = getattr(predicate, "attribute", ())
        if len(attribute) == 1:
            _take(predicates, attribute[0].lower(), predicate)
    return predicates


def _take(predicates: Predicates, name: str, predicate: Filter) -> None:
    if name in ("topic", "brokername", "queueid"):
        test = _test(predicate)
        if test is not None:
            predicates.tests.setdefault(name, []).append(test)
    elif name == "tags":
        tags = _values(predicate)
        if tags is not None and all(_is_plain_tag(tag) for tag in tags):
            predicates.tags = frozenset(tags) if predicates.tags is None else predicates.tags & frozenset(tags)
    elif name == "queueoffset":
        low, high = _interval(predicate, 1)
        predicates.offset_from = _later(predicates.offset_from, low)
        predicates.offset_to = _earlier(predicates.offset_to, high)
    elif name == "storetimestamp":
        low, high = _interval(predicate, 1)
        predicates.time_from_ms = _later(predicates.time_from_ms, None if low is None else low - CLOCK_MARGIN_MS)
        predicates.time_to_ms = _earlier(predicates.time_to_ms, None if high is None else high + CLOCK_MARGIN_MS)


def _values(predicate: Filter) -> tuple[Any, ...] | None:
    match predicate:
        case EqualTo(_, value) | EqualNullSafe(_, value):
            return (value,)
        case In(_, values):
            return tuple(values)
    return None


def _test(predicate: Filter) -> _Test | None:
    values = _values(predicate)
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


def _interval(predicate: Filter, step: int) -> tuple[int | None, int | None]:
    """Whole numbers ``[low, high)`` that can match; times as epoch ms."""
    match predicate:
        case EqualTo(_, value) | EqualNullSafe(_, value):
            number = _number(value)
            return (number, None if number is None else number + step)
        case In(_, values) if values:
            numbers = [_number(value) for value in values]
            known = [number for number in numbers if number is not None]
            return (min(known), max(known) + step) if len(known) == len(numbers) else (None, None)
        case GreaterThan(_, value) | GreaterThanOrEqual(_, value):
            return (_number(value), None)  # one offset too many does no harm
        case LessThan(_, value) | LessThanOrEqual(_, value):
            number = _number(value)
            return (None, None if number is None else number + step)
    return (None, None)


def _number(value: Any) -> int | None:
    if isinstance(value, datetime):
        # Spark hands times over with a zone; one without could be local or UTC, and is not used.
        return int(value.timestamp() * 1000) if value.tzinfo else None
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _later(known: int | None, new: int | None) -> int | None:
    return known if new is None else new if known is None else max(known, new)


def _earlier(known: int | None, new: int | None) -> int | None:
    return known if new is None else new if known is None else min(known, new)


def _is_plain_tag(tag: object) -> bool:
    """A text that the broker's expression reads as exactly this tag."""
    return isinstance(tag, str) and tag != "" and tag != "*" and "|" not in tag and tag == tag.strip()
