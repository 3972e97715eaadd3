"""Predicates of Spark as fewer ranges: never a row too few."""

from __future__ import annotations

import bisect
import operator
from dataclasses import dataclass
from datetime import UTC, datetime

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from rocketmq_spark import options as options_table
from rocketmq_spark import ports
from rocketmq_spark.model import MessageQueue, OffsetRange
from rocketmq_spark.spark.compat import (
    EqualNullSafe,
    EqualTo,
    Filter,
    GreaterThan,
    GreaterThanOrEqual,
    In,
    LessThan,
    LessThanOrEqual,
)
from rocketmq_spark.spark.source import batch_reader
from rocketmq_spark.spark.source.batch_reader import is_pushdown_enabled, parse_filters
from tests.fakes.ports import Fake

_COMPARED = {
    EqualTo: operator.eq,
    EqualNullSafe: operator.eq,
    GreaterThan: operator.gt,
    GreaterThanOrEqual: operator.ge,
    LessThan: operator.lt,
    LessThanOrEqual: operator.le,
}
COLUMNS = {
    "topic": st.sampled_from(["t", "u"]),
    "brokerName": st.sampled_from(["a", "b"]),
    "queueId": st.integers(0, 3),
    "queueOffset": st.integers(-3, 25),
}


@st.composite
def predicates(draw):
    """A filter of Spark and what it means for a row."""
    column = draw(st.sampled_from(sorted(COLUMNS)))
    values = COLUMNS[column]
    if draw(st.booleans()):
        chosen = draw(st.lists(values, max_size=3))
        return In((column,), tuple(chosen)), lambda row: row[column] in chosen
    kind, value = draw(st.sampled_from(sorted(_COMPARED, key=str))), draw(values)
    return kind((column,), value), lambda row: _COMPARED[kind](row[column], value)


def at_hour(hour):
    return datetime.fromtimestamp(hour * 3600, UTC)


@st.composite
def predicates_of_times(draw):
    """A filter of Spark on store times, and what it means for one."""
    kind, hour = draw(st.sampled_from(sorted(_COMPARED, key=str))), at_hour(draw(st.integers(0, 100)))
    return kind(("storeTimestamp",), hour), lambda stored: _COMPARED[kind](stored, hour)


@given(st.lists(predicates(), max_size=4))
def test_no_row_that_matches_is_lost(found):
    understood = parse_filters([one for one, _ in found])
    for queue in (MessageQueue(t, b, i) for t in "tu" for b in "ab" for i in range(3)):
        kept = understood.prune(OffsetRange(queue, 0, 20))
        inside = range(kept.start, kept.end) if kept else range(0)
        for offset in range(20):
            row = {
                "topic": queue.topic,
                "brokerName": queue.broker_name,
                "queueId": queue.queue_id,
                "queueOffset": offset,
            }
            if all(matches(row) for _, matches in found):
                assert offset in inside


def test_ranges_shrink():
    understood = parse_filters(
        [EqualTo(("queueId",), 1), GreaterThanOrEqual(("queueOffset",), 5), LessThan(("queueOffset",), 8)]
    )
    queue = MessageQueue("t", "a", 1)
    assert understood.prune(OffsetRange(queue, 0, 20)) == OffsetRange(queue, 5, 9)
    assert understood.prune(OffsetRange(MessageQueue("t", "a", 2), 0, 20)) is None
    assert understood.prune(OffsetRange(queue, 10, 20)) is None


class Searched:
    """A broker that finds a time as RocketMQ 5 does: by a binary search over the messages of a queue."""

    def __init__(self, stored_h):
        self._stored_ms = [hour * 3_600_000 for hour in stored_h]

    def search_offsets(self, times_ms, deadline, on_error=None, group=None):
        return {queue: bisect.bisect_left(self._stored_ms, time_ms) for queue, time_ms in times_ms.items()}


@given(st.lists(st.integers(0, 100), min_size=1, max_size=20), predicates_of_times())
@example([0, 1, 0, 0], (GreaterThanOrEqual(("storeTimestamp",), at_hour(1)), lambda stored: stored >= at_hour(1)))
def test_times_prune_no_row_whatever_the_clocks_said(stored_h, predicate):
    """Store times of a queue in any order: the clock of a broker may have been set back, by any time."""
    whole = OffsetRange(MessageQueue("t", "a", 0), 0, len(stored_h))
    given = options_table.parse({"nameServer": "x:1", "subscribe": "t"}).for_role("batch source")
    (kept,) = batch_reader._pruned_ranges(
        [whole], parse_filters([predicate[0]]), Fake(ports.OffsetReader, Searched(stored_h)), given
    )
    matching = [at for at, hour in enumerate(stored_h) if predicate[1](at_hour(hour))]
    assert all(kept.start <= at < kept.end for at in matching)


def test_offsets_cut_no_queue_whose_index_is_shifted():
    """The offsets in its rows are ahead of where these lie, from a damaged message on."""
    usual, shifted, behind = (MessageQueue("t", "a", number) for number in range(3))
    ranges = [OffsetRange(queue, 0, 9) for queue in (usual, shifted)] + [OffsetRange(behind, 0, 4)]

    class Offsets:
        def store_times_ms(self, group, looks, deadline):
            assert looks == {usual: 5, shifted: 5, behind: 3}
            return {usual: 7}

    understood = parse_filters([GreaterThanOrEqual(("queueOffset",), 5), LessThan(("queueOffset",), 8)])
    given = options_table.parse({"nameServer": "x:1", "subscribe": "t"}).for_role("batch source")
    cut = batch_reader._pruned_ranges(ranges, understood, Fake(ports.OffsetReader, Offsets()), given)
    assert cut == [OffsetRange(usual, 5, 9), OffsetRange(shifted, 0, 9), OffsetRange(behind, 0, 4)]


@pytest.mark.parametrize(
    ("filters", "tags"),
    [
        ([EqualTo(("tags",), "a")], {"a"}),
        ([In(("tags",), ("a", "b"))], {"a", "b"}),
        ([In(("TAGS",), ("a", "b")), EqualTo(("tags",), "b")], {"b"}),
        ([EqualTo(("tags",), " a")], None),
        ([EqualTo(("tags",), "a || b")], None),
        ([EqualTo(("tags",), "*")], None),
        ([EqualTo(("tags",), "")], None),
        ([EqualNullSafe(("tags",), None)], None),
        ([GreaterThan(("tags",), "a")], None),
    ],
)
def test_tags(filters, tags):
    assert parse_filters(filters).tags == (None if tags is None else frozenset(tags))


@pytest.mark.parametrize("given", [{"tags": "a"}, {"sql": "x > 1"}, {}])
def test_tags_of_predicates_replace_no_filter_of_the_options(given, monkeypatch):
    monkeypatch.setattr(batch_reader, "_tag_filterable_topics", lambda options: ["t"])
    made = options_table.parse({"nameServer": "x:1", "subscribe": "t", **given}).for_role("batch source")
    reader = batch_reader.PushdownReader(made, ())
    reader.pushFilters([In(("tags",), ("b", "c"))])
    assert (reader._options.tags, reader._options.sql) == ((made.tags, made.sql) if given else ({"t": "b || c"}, None))


@dataclass(frozen=True)
class WithoutAttribute(Filter):
    """Like ``Not`` and others of Spark's predicates, which PySpark 4.0 does not have."""

    child: Filter


@dataclass(frozen=True)
class OfAnotherKind(Filter):
    """Like ``StringContains``."""

    attribute: tuple[str, ...]
    value: str


def test_what_is_not_understood_says_nothing():
    understood = parse_filters(
        [
            WithoutAttribute(EqualTo(("topic",), "t")),
            OfAnotherKind(("topic",), "x"),
            EqualTo(("a", "topic"), "u"),
        ]
    )
    whole = OffsetRange(MessageQueue("t", "a", 0), 3, 9)
    assert understood.prune(whole) == whole
    assert understood.tags is None


def test_not_enabled_outside_of_sparks_planner():
    assert not is_pushdown_enabled()
