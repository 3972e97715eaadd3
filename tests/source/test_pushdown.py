"""Predicates of Spark as fewer ranges: never a row too few."""

from __future__ import annotations

import operator
from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyspark.sql.datasource import (
    EqualNullSafe,
    EqualTo,
    GreaterThan,
    GreaterThanOrEqual,
    In,
    IsNotNull,
    LessThan,
    LessThanOrEqual,
    Not,
    StringContains,
)

from rocketmq_spark import options as options_table
from rocketmq_spark.model import MessageQueue, OffsetRange, QueueBounds
from rocketmq_spark.spark.source import readers
from rocketmq_spark.spark.source.readers import CLOCK_MARGIN_MS, pushdown_enabled, understand

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


@given(st.lists(predicates(), max_size=4))
def test_no_row_that_matches_is_lost(found):
    understood = understand([one for one, _ in found])
    for queue in (MessageQueue(t, b, i) for t in "tu" for b in "ab" for i in range(3)):
        kept = understood.keep(OffsetRange(queue, 0, 20))
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
    understood = understand(
        [EqualTo(("queueId",), 1), GreaterThanOrEqual(("queueOffset",), 5), LessThan(("queueOffset",), 8)]
    )
    queue = MessageQueue("t", "a", 1)
    assert understood.keep(OffsetRange(queue, 0, 20)) == OffsetRange(queue, 5, 9)
    assert understood.keep(OffsetRange(MessageQueue("t", "a", 2), 0, 20)) is None
    assert understood.keep(OffsetRange(queue, 10, 20)) is None


def test_times_keep_a_margin_for_clocks():
    noon = datetime(2026, 1, 31, 12, tzinfo=UTC)
    ms = int(noon.timestamp() * 1000)
    understood = understand(
        [GreaterThan(("storeTimestamp",), noon), LessThanOrEqual(("storeTimestamp",), noon + timedelta(seconds=1))]
    )
    assert understood.by_time
    assert understood.time_from_ms == ms - CLOCK_MARGIN_MS
    assert understood.time_to_ms == ms + 1001 + CLOCK_MARGIN_MS


def test_offsets_cut_no_queue_whose_index_is_shifted():
    """The offsets in its rows are ahead of where these lie, from a damaged message on."""
    usual, shifted, behind = (MessageQueue("t", "a", number) for number in range(3))
    ranges = [OffsetRange(queue, 0, 9) for queue in (usual, shifted)] + [OffsetRange(behind, 0, 4)]

    class Offsets:
        def store_times_ms(self, group, looks, deadline):
            assert looks == {usual: 5, shifted: 5, behind: 3}
            return {usual: 7}

    understood = understand([GreaterThanOrEqual(("queueOffset",), 5), LessThan(("queueOffset",), 8)])
    given = options_table.parse({"nameServer": "x:1", "subscribe": "t"}).for_role("batch source")
    cut = readers._pruned(ranges, understood, Offsets(), {}, given)
    assert cut == [OffsetRange(usual, 5, 9), OffsetRange(shifted, 0, 9), OffsetRange(behind, 0, 4)]


def test_times_cut_ranges_and_make_none_longer():
    inside, before, behind, past = (MessageQueue("t", "a", number) for number in range(4))
    ranges = [OffsetRange(queue, 5, 9) for queue in (inside, before, behind, past)]
    found = {inside: (6, 8), before: (2, 7), behind: (7, 20), past: (0, 5)}
    bounds = dict.fromkeys(found, QueueBounds(0, 30, 0))

    class Offsets:
        def search_offsets(self, times, deadline, group=""):
            assert set(times.values()) <= {low, high}
            return {queue: found[queue][time == high] for queue, time in times.items()}

    noon = datetime(2026, 1, 31, 12, tzinfo=UTC)
    understood = understand([GreaterThan(("storeTimestamp",), noon), LessThan(("storeTimestamp",), noon)])
    low, high = understood.time_from_ms, understood.time_to_ms
    given = options_table.parse({"nameServer": "x:1", "subscribe": "t"}).for_role("batch source")
    cut = readers._pruned(ranges, understood, Offsets(), bounds, given)
    assert cut == [OffsetRange(inside, 6, 8), OffsetRange(before, 5, 7), OffsetRange(behind, 7, 9)]


def test_a_time_without_a_zone_says_nothing():
    assert not understand([GreaterThan(("storeTimestamp",), datetime(2026, 1, 31))]).by_time


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
    assert understand(filters).tags == (None if tags is None else frozenset(tags))


@pytest.mark.parametrize("given", [{"tags": "a"}, {"sql": "x > 1"}, {}])
def test_tags_of_predicates_replace_no_filter_of_the_options(given, monkeypatch):
    monkeypatch.setattr(readers, "_tagged", lambda options: ["t"])
    made = options_table.parse({"nameServer": "x:1", "subscribe": "t", **given}).for_role("batch source")
    reader = readers.PrunedReader(made, ())
    reader.pushFilters([In(("tags",), ("b", "c"))])
    assert (reader._options.tags, reader._options.sql) == ((made.tags, made.sql) if given else ({"t": "b || c"}, None))


def test_what_is_not_understood_says_nothing():
    understood = understand(
        [
            Not(EqualTo(("topic",), "t")),
            IsNotNull(("topic",)),
            StringContains(("topic",), "x"),
            EqualTo(("a", "topic"), "u"),
        ]
    )
    whole = OffsetRange(MessageQueue("t", "a", 0), 3, 9)
    assert understood.keep(whole) == whole
    assert (understood.tags, understood.by_time) == (None, False)


def test_not_enabled_outside_of_sparks_planner():
    assert not pushdown_enabled()
