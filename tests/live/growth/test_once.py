"""Plans: whatever the strategy, the split and the limits, every offset is in exactly one range."""

from __future__ import annotations

from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from rocketmq_spark import options
from rocketmq_spark.model import MessageQueue, OffsetRange, QueueBounds
from rocketmq_spark.spark.source import partitioning, planning
from rocketmq_spark.spark.source.offsets import Offsets
from rocketmq_spark.spark.source.partitioning import Partitioning
from tests.reading import canonical
from tests.scale import examples

BROKERS = ("room1@a", "room1@b", "room2@c")


@st.composite
def states(draw: st.DrawFn) -> dict[MessageQueue, tuple[int, int]]:
    """Queues with their start and end."""
    found = {}
    for topic in draw(st.sets(st.sampled_from("tuv"), min_size=1)):
        for broker in draw(st.sets(st.sampled_from(BROKERS), min_size=1)):
            for number in range(draw(st.integers(1, 5))):
                start = draw(st.integers(0, 40))
                found[MessageQueue(topic, broker, number)] = (start, start + draw(st.integers(0, 60)))
    return found


STRATEGIES = st.one_of(
    st.fixed_dictionaries(
        {"allocationStrategy": st.sampled_from(["averagely", "averagelyByCircle", "consistentHash"])}
    ),
    st.just({"allocationStrategy": "machineRoom", "machineRooms": "room1"}),
    st.just({"allocationStrategy": "machineRoom", "machineRooms": "room1,room2"}),
    st.just({"allocationStrategy": "machineRoomNearby", "partitionRooms": "room1,room2,room1"}),
    st.just({"allocationStrategy": "environment", "environment": "1", "environments": "1"}),
    st.just({"allocationStrategy": "environment", "environment": "1"}),
    st.just({"environment": "1", "environments": "2"}),
    st.just({"allocationStrategy": "config", "allocationConfig": '{"t": {"room1@a": [0, 0, 1], "room2@c": [0]}}'}),
    st.just(
        {"allocationStrategy": "config", "allocationConfig": '{"partition-00001": ["u/room1@b/0", "t/room1@a/0"]}'}
    ),
)


@st.composite
def planned(draw: st.DrawFn) -> dict[str, object]:
    numbers = {
        name: draw(st.none() | st.integers(1, maximum))
        for name, maximum in (("numPartitions", 7), ("minPartitions", 20), ("maxRecordsPerPartition", 30))
    }
    return {**draw(STRATEGIES), **{name: n for name, n in numbers.items() if n is not None}}


@settings(max_examples=examples(400), deadline=None)
@given(states(), planned())
def test_every_offset_is_in_exactly_one_range_and_in_order(state, how):
    parsed = options.parse({"nameServer": "h:1", "subscribe": "t", **how}).for_role("batch source")
    covered, left_out = partitioning.allocated_queues(parsed, sorted(state))
    assert set(covered) | left_out <= set(state)
    assert not set(covered) & left_out
    ranges = [OffsetRange(queue, *state[queue]) for queue in covered]
    tasks = partitioning.plan_tasks(Partitioning.of(parsed), covered, ranges)
    # The model: the offsets of each queue that is read, one by one.
    counted = Counter((r.queue, n) for task in tasks for r in task for n in range(r.start, r.end))
    expected = [(queue, n) for queue in covered for n in range(*state[queue])]
    assert counted == Counter(expected)
    assert all(task and all(r.size > 0 for r in task) for task in tasks)
    for queue in covered:
        parts = [(r.start, r.end) for task in tasks for r in task if r.queue == queue]
        assert parts == sorted(parts)
    max_rows = how.get("maxRecordsPerPartition")
    assert all(sum(r.size for r in task) <= (max_rows or 500_000) for task in tasks)


@settings(max_examples=examples(300), deadline=None)
@given(states(), st.integers(1, 50), st.randoms(use_true_random=False))
def test_successive_batches_cover_everything_once(state, max_offsets, rng):
    """The planner against a set of offsets: queues grow while it goes on, and new ones appear."""
    first = {queue: start for queue, (start, _) in state.items() if rng.random() < 0.7}
    begin, seen = Offsets(first), Counter()
    for _ in range(400):
        ends = {queue: end for queue, (_, end) in state.items()}
        begins = {queue: start for queue, (start, _) in state.items()}
        end = planning.next_end(begin, ends, begins, max_offsets)
        if end is begin:
            break
        found = planning.ranges(begin, end)
        assert sum(r.size for r in found) <= max_offsets + len(state)
        seen.update((r.queue, n) for r in found for n in range(r.start, r.end))
        begin = Offsets.from_json(canonical(end.to_json()))
    assert seen == Counter((queue, n) for queue, (start, end) in state.items() for n in range(start, end))


@settings(max_examples=examples(200), deadline=None)
@given(states(), st.randoms(use_true_random=False), st.booleans())
def test_equal_offsets_are_equal_texts(state, rng, filtered):
    """Spark compares texts: another order of keys would be an endless sequence of empty batches."""
    positions = {queue: start for queue, (start, _) in state.items()}
    marks = {queue: 1_700_000_000_000 + end for queue, (_, end) in state.items()}
    rule = {"tags": {"t": "a || b", "u": "c"}} if filtered else {}
    shuffled = list(positions)
    rng.shuffle(shuffled)
    one = Offsets(positions, dict(positions), marks, rule)
    other = Offsets(
        {queue: positions[queue] for queue in shuffled},
        {queue: positions[queue] for queue in reversed(shuffled)},
        {queue: marks[queue] for queue in shuffled},
        {"tags": {"u": "c", "t": "a || b"}} if filtered else {},
    )
    text = canonical(one.to_json())
    assert text == canonical(other.to_json())
    assert canonical(Offsets.from_json(text).to_json()) == text


def test_what_lies_below_the_minimum_takes_no_share_of_a_batch():
    queue, other = MessageQueue("t", "a", 0), MessageQueue("t", "a", 1)
    begin = Offsets({queue: 5, other: 7}, {queue: 5}, {queue: 1})
    bounds = {queue: QueueBounds(1000, 1010, 2), other: QueueBounds(0, 9, 2)}
    live = planning.raised_to_min_offsets(begin, bounds)
    assert live.positions == {queue: 1000, other: 7}
    assert (live.new_queue_starts, live.newest_store_ms) == ({}, {queue: 1})
    assert planning.raised_to_min_offsets(live, bounds) is live
