"""Plans against a model of a few lines: every offset in exactly one range, and nobody starves."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from rocketmq_spark.model import MessageQueue, OffsetRange, QueueBounds
from rocketmq_spark.spark.source import planning
from rocketmq_spark.spark.source.offsets import Offsets
from rocketmq_spark.spark.source.planning import (
    MAX_SAMPLED_QUEUES,
    ReadLimitPolicy,
    TriggerLimits,
    next_end,
    offsets_to_read,
    ranges,
)
from tests.reading import canonical

QUEUES = [MessageQueue(topic, broker, i) for topic in "tu" for broker in "ab" for i in range(2)]
A, B, C = QUEUES[:3]

_BACKLOGS = st.dictionaries(st.sampled_from(QUEUES), st.integers(1, 1 << 40), min_size=1)
_POSITIONS = st.dictionaries(st.sampled_from(QUEUES), st.integers(0, 50))


def offsets_of(found):
    """The model: single offsets."""
    return [(r.queue, offset) for r in found for offset in range(r.start, r.end)]


@given(_BACKLOGS, st.none() | st.integers(1, 1 << 41))
def test_shares(waiting, max_offsets):
    given = offsets_to_read(waiting, max_offsets)
    assert given.keys() == waiting.keys()
    assert all(1 <= given[queue] <= waiting[queue] for queue in waiting), (
        "nobody starves, nobody gets what is not there"
    )
    total = sum(waiting.values())
    if max_offsets is None or total <= max_offsets:
        assert given == waiting
        return
    assert sum(given.values()) <= max_offsets + len(waiting), "at most one more per queue"
    for queue, count in given.items():
        assert abs(count - max_offsets * waiting[queue] / total) <= 1, "in proportion to the backlog"


@given(_POSITIONS, _POSITIONS, _POSITIONS, st.none() | st.integers(1, 60))
def test_a_batch_reads_each_offset_between_its_ends_once(begin, ends, begins, max_offsets):
    begins = {queue: min(begins.get(queue, 0), end) for queue, end in ends.items()}
    start = Offsets(begin)
    end = next_end(start, ends, begins, max_offsets)
    found = ranges(start, end)
    assert found == sorted(found)
    assert all(r.size > 0 for r in found)
    read = offsets_of(found)
    assert len(read) == len(set(read))
    for queue in {*begin, *ends}:
        first = begin.get(queue, begins.get(queue))
        mine = [offset for of, offset in read if of == queue]
        assert mine == list(range(first, end.positions[queue]))
        assert end.positions[queue] <= max(first, ends.get(queue, first)), "not beyond what is there, and never back"
    waiting = {queue for queue, stop in ends.items() if stop > begin.get(queue, begins[queue])}
    assert {r.queue for r in found} == waiting
    # The very same object tells the caller that there is nothing new.
    assert (end is start) == (not waiting and ends.keys() <= begin.keys())


def test_a_limit_is_met_to_within_one_per_queue():
    end = next_end(Offsets({A: 0, B: 0, C: 0}), {A: 1000, B: 10, C: 1}, {}, 101)
    assert end.positions == {A: 99, B: 1, C: 1}


def test_a_new_queue_starts_at_its_beginning_and_the_end_says_so():
    end = next_end(Offsets({A: 5}), {A: 7, B: 40}, {A: 0, B: 30})
    assert end == Offsets({A: 7, B: 40}, {B: 30})
    assert ranges(Offsets({A: 5}), end) == [OffsetRange(A, 5, 7), OffsetRange(B, 30, 40)]
    # An empty one enters the offsets too, lest it start at another place later.
    assert next_end(Offsets({A: 5}), {A: 5, B: 30}, {A: 0, B: 30}) == Offsets({A: 5, B: 30}, {B: 30})


def test_a_queue_that_is_away_keeps_its_position():
    assert next_end(Offsets({A: 5, B: 7}), {A: 9}, {A: 0}).positions == {A: 9, B: 7}


def test_the_beginning_in_the_end_wins():
    """Spark asks again where a query begins when its first batch was not committed; "latest" is later then."""
    first = planning.with_initial_starts(Offsets({A: 3, B: 4}), Offsets({A: 8, B: 4, C: 2}, {C: 1}))
    assert first.new_queue_starts == {A: 3, B: 4, C: 1}
    assert ranges(Offsets({A: 100, B: 100, C: 100}), first) == [OffsetRange(A, 3, 8), OffsetRange(C, 1, 2)]
    assert ranges(first, first) == []


def test_queues_that_the_end_does_not_name_are_not_read():
    assert ranges(Offsets({A: 0, B: 0}), Offsets({B: 2})) == [OffsetRange(B, 0, 2)]
    assert ranges(Offsets({A: 0}), Offsets({B: 2})) == []


def bounds(**of):
    return {queue: QueueBounds(low, high, 0) for queue, (low, high) in zip((A, B, C), of.values(), strict=False)}


def test_what_went_back():
    found = planning.ranges_past_end({A: 5, B: 5, C: 5}, bounds(a=(0, 4), b=(0, 5)))
    assert found == [OffsetRange(A, 4, 5)]


@given(st.integers(0, 9), st.integers(1, 9), st.integers(0, 20))
def test_truncated_parts_and_the_rest_are_the_whole(start, size, minimum):
    whole = [OffsetRange(A, start, start + size)]
    lost = planning.truncated_ranges(whole, {A: QueueBounds(minimum, 100, 0)})
    rest = planning.without_lost_offsets(whole, lost)
    assert offsets_of(lost) + offsets_of(rest) == offsets_of(whole)
    assert all(offset < minimum for _, offset in offsets_of(lost))
    assert all(offset >= minimum for _, offset in offsets_of(rest))


def test_what_was_lost_before_a_range_does_not_bring_it_back():
    later = OffsetRange(A, 5, 9)
    assert planning.without_lost_offsets([later], [OffsetRange(A, 0, 3)]) == [later]
    assert planning.without_lost_offsets([later, OffsetRange(B, 0, 2)], [OffsetRange(A, 5, 9)]) == [
        OffsetRange(B, 0, 2)
    ]


def test_positions_before_the_minimum_are_lifted():
    begin = Offsets({A: 3, B: 3, C: 3}, new_queue_starts={A: 1, B: 0})
    lifted = planning.raised_to_min_offsets(begin, bounds(a=(5, 9), b=(2, 9)))
    assert lifted.positions == {A: 5, B: 3, C: 3}
    assert lifted.new_queue_starts == {}, "what was read is not read again where a batch ends there"
    assert planning.raised_to_min_offsets(begin, bounds(a=(3, 9))) is begin


def test_marks_are_of_queues_that_were_read():
    now = {A: QueueBounds(0, 9, 1000), B: QueueBounds(0, 9, 900), C: QueueBounds(0, 0, 0)}
    assert planning.newest_store_ms({A: 5, B: 9, C: 0}, Offsets({}, newest_store_ms={B: 950}), now) == {A: 1000, B: 900}
    assert planning.newest_store_ms({B: 8}, Offsets({}, newest_store_ms={B: 950}), now) == {B: 950}
    assert planning.newest_store_ms({A: 5, B: 0}, Offsets({}, newest_store_ms={A: 700}), {}) == {A: 700}


@pytest.mark.parametrize(("position", "low", "kept"), [(5, 0, True), (7, 0, False), (7, 7, True)])
@pytest.mark.parametrize("untold", [0, -1])
def test_store_time_mark_ends_after_younger_undated_messages(position, low, kept, untold):
    """Else they would be taken for those of a topic that was made again."""
    before = Offsets({A: 5}, newest_store_ms={A: 700})
    assert planning.newest_store_ms({A: position}, before, {A: QueueBounds(low, 9, untold)}) == (
        {A: 700} if kept else {}
    )


# --- how much a batch may read


WAITING = [MessageQueue("t", "b", i) for i in range(6)]


def never(queue):
    raise AssertionError("no sample is needed")


def test_offsets_are_passed_on():
    assert ReadLimitPolicy(900).max_offsets({WAITING[0]: 10}, TriggerLimits(), never, 0.0) is None
    assert ReadLimitPolicy(900).max_offsets({WAITING[0]: 10}, TriggerLimits(max_offsets=4), never, 0.0) == 4
    assert (
        ReadLimitPolicy(900).max_offsets({}, TriggerLimits(max_offsets=4, min_offsets=2, max_bytes=1), never, 0.0) == 4
    )


def test_waits_for_enough_or_for_the_delay():
    admission = ReadLimitPolicy(60.0)
    few, many = {WAITING[0]: 3}, {WAITING[0]: 3, WAITING[1]: 7}
    wanted = TriggerLimits(min_offsets=10)
    assert admission.max_offsets({}, wanted, never, 0.0) is None
    admission.note_nothing_to_read(0.0)
    assert admission.max_offsets(few, wanted, never, 0.0) == 0
    assert admission.max_offsets(many, wanted, never, 0.0) is None
    admission.note_planned_batch(0.0)
    assert admission.max_offsets(few, wanted, never, 59.0) == 0
    admission.note_nothing_to_read(59.0)
    assert admission.max_offsets(few, wanted, never, 60.0) is None
    admission.note_planned_batch(60.0)
    # From then on the next delay runs.
    assert admission.max_offsets(few, wanted, never, 119.0) == 0
    assert admission.max_offsets(few, TriggerLimits(min_offsets=10, max_offsets=2), never, 120.0) == 2


def test_the_first_plan_of_a_run_does_not_wait_for_more():
    admission, few, wanted = ReadLimitPolicy(60.0), {WAITING[0]: 3}, TriggerLimits(min_offsets=10)
    for _ in range(2):  # the first try may fail after that
        assert admission.max_offsets(few, wanted, never, 5.0) is None
    admission.note_planned_batch(5.0)
    assert admission.max_offsets(few, wanted, never, 5.0) == 0
    assert admission.max_offsets(few, wanted, never, 65.0) is None


def test_bytes_become_offsets_by_samples():
    admission = ReadLimitPolicy(900)
    waiting = dict.fromkeys(WAITING, 1000)
    asked = []

    def sample(queue):
        asked.append(queue)
        return 5000, 10

    assert admission.max_offsets(waiting, TriggerLimits(max_bytes=100_000), sample, 0.0) == 200
    assert len(asked) == MAX_SAMPLED_QUEUES
    assert admission.max_offsets(waiting, TriggerLimits(max_bytes=100_000, max_offsets=30), sample, 0.0) == 30
    assert admission.max_offsets(waiting, TriggerLimits(max_bytes=10), sample, 0.0) == 1, "a batch makes progress"


def test_sizes_are_learnt_slowly():
    admission = ReadLimitPolicy(900)
    wanted = TriggerLimits(max_bytes=100_000)
    assert admission.max_offsets({WAITING[0]: 5}, wanted, lambda queue: (1000, 10), 0.0) == 1000
    # A fifth of the way from 100 to 600 bytes.
    assert admission.max_offsets({WAITING[0]: 5}, wanted, lambda queue: (6000, 10), 0.0) == 500


def test_the_queues_with_most_are_sampled():
    asked = []
    waiting = {queue: 10 * (i + 1) for i, queue in enumerate(WAITING)}
    ReadLimitPolicy(900).max_offsets(
        waiting, TriggerLimits(max_bytes=1), lambda queue: asked.append(queue) or (1, 1), 0.0
    )
    assert asked == WAITING[:1:-1]


@pytest.mark.parametrize(("max_offsets", "expected"), [(None, 16), (7, 7), (50, 16)])
def test_without_a_sample_messages_are_taken_to_be_large(max_offsets, expected):
    admission, wanted = ReadLimitPolicy(900), TriggerLimits(max_offsets=max_offsets, max_bytes=64 << 20)
    waiting = {WAITING[0]: 50_000_000}
    assert admission.max_offsets(waiting, wanted, lambda queue: (0, 0), 0.0) == expected
    assert admission.has_no_sample
    assert (
        admission.max_offsets(waiting, TriggerLimits(max_bytes=64 << 20), lambda queue: (1 << 20, 1 << 10), 0.0)
        == 1 << 16
    )
    assert not admission.has_no_sample
    assert admission.max_offsets(waiting, TriggerLimits(max_bytes=64 << 20), lambda queue: (0, 0), 0.0) == 1 << 16


# --- batch after batch


class Stream(RuleBasedStateMachine):
    """A stream of batches over queues that grow, come and are away: everything is read once, in order."""

    @initialize(ends=_POSITIONS)
    def start(self, ends):
        self.ends = dict(ends)
        self.offsets = Offsets(dict.fromkeys(ends, 0))
        self.read = []

    @rule(queue=st.sampled_from(QUEUES), more=st.integers(0, 30))
    def grow(self, queue, more):
        self.ends[queue] = self.ends.get(queue, 0) + more

    @rule(max_offsets=st.none() | st.integers(1, 25), away=st.sets(st.sampled_from(QUEUES)), replayed=st.booleans())
    def batch(self, max_offsets, away, replayed):
        seen = {queue: end for queue, end in self.ends.items() if queue not in away}
        end = next_end(self.offsets, seen, dict.fromkeys(seen, 0), max_offsets)
        if end is self.offsets:
            return  # to Spark equal offsets are no batch
        before = Offsets.from_json(canonical(self.offsets.to_json())) if replayed else self.offsets
        self.read += offsets_of(ranges(before, Offsets.from_json(canonical(end.to_json())) if replayed else end))
        self.offsets = end

    @invariant()
    def each_offset_once_and_none_skipped(self):
        for queue, position in self.offsets.positions.items():
            assert [offset for of, offset in self.read if of == queue] == list(range(position))


TestStream = Stream.TestCase
