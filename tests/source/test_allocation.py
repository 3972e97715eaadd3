"""Queues to tasks: every offset in exactly one, whatever the strategy, and splitting as Spark's Kafka source does."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rocketmq_spark import options as options_table
from rocketmq_spark.model import MessageQueue, OffsetRange
from rocketmq_spark.options.table import MAX_TASKS
from rocketmq_spark.spark.source.partitioning import (
    ROWS_PER_TASK,
    Partitioning,
    allocated_queues,
    partition_count,
    partition_id,
    plan_tasks,
    split_tasks,
)

QUEUES = [MessageQueue(topic, broker, i) for topic in "tu" for broker in ("broker-a", "broker-b") for i in range(3)]


def options(**given):
    return options_table.parse({"nameServer": "h:1", "subscribe": "t,u", **given}).for_role("batch source")


def rules(**given):
    return Partitioning.of(options(**given))


def everything_to_nobody_and_all(consumer, queues, consumers):
    """A strategy of the user that gives the first queue to all partitions and the last to none."""
    return queues[:1] if consumer != consumers[0] else queues[:-1]


@st.composite
def ranges(draw):
    sizes = draw(st.dictionaries(st.sampled_from(QUEUES), st.tuples(st.integers(0, 99), st.integers(0, 400))))
    return [OffsetRange(queue, start, start + size) for queue, (start, size) in sorted(sizes.items())]


def offsets_of(found):
    return sorted((r.queue, offset) for task in found for r in task for offset in range(r.start, r.end))


_STRATEGIES = st.sampled_from(
    [
        {},
        {"allocationStrategy": "averagelyByCircle"},
        {"allocationStrategy": "consistentHash"},
        {"allocationStrategy": "config", "allocationConfig": '{"t":{"broker-a":[0,1,2],"broker-b":[0]}}'},
        {"allocationStrategy": "machineRoom", "machineRooms": "room1"},
        {"allocationStrategy": everything_to_nobody_and_all},
    ]
)


@given(ranges(), _STRATEGIES, st.none() | st.integers(1, 9), st.none() | st.integers(1, 30), st.integers(1, 600))
def test_every_offset_is_in_exactly_one_task(wanted, strategy, partitions, min_tasks, max_rows):
    """What was planned is never dropped, even if the strategy would give it to nobody now."""
    given = {"numPartitions": partitions, "minPartitions": min_tasks, "maxRecordsPerPartition": max_rows, **strategy}
    found = plan_tasks(rules(**{name: value for name, value in given.items() if value is not None}), QUEUES, wanted)
    assert offsets_of(found) == offsets_of([wanted])
    assert all(r.size > 0 for task in found for r in task)
    assert all(sum(r.size for r in task) <= max_rows for task in found)
    assert all(task for task in found)


@given(ranges(), st.integers(1, 40))
def test_minimum_number_of_tasks_is_reached_with_enough_rows(wanted, min_tasks):
    alone = [[r] for r in wanted if r.size]
    found = split_tasks(alone, min_tasks, None)
    assert offsets_of(found) == offsets_of([wanted])
    assert len(found) >= len(alone)
    rows = sum(r.size for r in wanted)
    # Rounding may leave it short, as in Spark's calculator, by less than one per task there was.
    assert len(found) > min(min_tasks, rows) - max(1, len(alone))


def test_a_plan_has_no_more_tasks_than_a_driver_can_hold():
    wanted = [OffsetRange(queue, 0, 10**12) for queue in QUEUES]
    found = split_tasks([wanted], None, 500_000)
    assert len(found) == MAX_TASKS
    assert sum(r.size for task in found for r in task) == len(QUEUES) * 10**12
    assert len(split_tasks([wanted], None, 10**12)) == len(QUEUES)


def test_a_hot_queue_is_cut_and_small_ones_stay_whole():
    hot, cold = OffsetRange(QUEUES[0], 0, 1000), OffsetRange(QUEUES[1], 0, 10)
    found = split_tasks([[hot], [cold]], 5, None)
    assert [[(r.start, r.end) for r in task] for task in found] == [
        [(0, 250)], [(250, 500)], [(500, 750)], [(750, 1000)], [(0, 10)],
    ]  # fmt: skip


def test_parts_are_nearly_equal_over_several_ranges():
    task = [OffsetRange(QUEUES[0], 0, 5), OffsetRange(QUEUES[1], 10, 17)]
    found = split_tasks([task], None, 4)
    assert [sum(r.size for r in part) for part in found] == [4, 4, 4]
    assert offsets_of(found) == offsets_of([task])


@pytest.mark.parametrize(
    ("rows", "count"), [(1, 1), (ROWS_PER_TASK, 1), (ROWS_PER_TASK + 1, 2), (100 * ROWS_PER_TASK, 3)]
)
def test_the_number_of_partitions_follows_the_backlog(rows, count):
    """Up to one per queue."""
    found = [OffsetRange(queue, 0, part) for queue, part in zip(QUEUES, (rows, 0, 0), strict=False)]
    assert partition_count(rules(), found) == count
    assert partition_count(rules(numPartitions=7), found) == 7


def test_consumers_of_the_strategy_are_partitions():
    assert [partition_id(i) for i in (0, 12)] == ["partition-00000", "partition-00012"]
    seen = []

    def strategy(consumer, queues, consumers):
        seen.append((consumer, tuple(consumers), {queue.topic for queue in queues}))
        return queues if consumer == consumers[0] else []

    found = plan_tasks(
        rules(allocationStrategy=strategy, numPartitions=2), QUEUES, [OffsetRange(q, 0, 1) for q in QUEUES]
    )
    assert len(found) == 1
    assert {consumers for _, consumers, _ in seen} == {("partition-00000", "partition-00001")}
    assert all(len(topics) == 1 for _, _, topics in seen), "topic by topic, as in Java"


def test_a_queue_given_to_several_is_read_by_the_first():
    given = options(allocationStrategy=everything_to_nobody_and_all, numPartitions=3)
    found = plan_tasks(Partitioning.of(given), QUEUES[:3], [OffsetRange(q, 0, 1) for q in QUEUES[:2]])
    assert [[r.queue for r in task] for task in found] == [QUEUES[:2]]


def test_queues_given_to_nobody_are_left_out():
    given = options(allocationStrategy="config", allocationConfig='{"u":{"broker-a":[0,2]}}')
    mine, left_out = allocated_queues(given, QUEUES)
    assert mine == [MessageQueue("u", "broker-a", i) for i in (0, 2)]
    assert left_out == set(QUEUES) - set(mine)


def test_environment_strategy_reports_other_queues_as_left_out():
    given = options(allocationStrategy="environment", environment="1", environments="3")
    mine, left_out = allocated_queues(given, QUEUES)
    assert mine
    assert left_out == set(QUEUES) - set(mine) != set()


def test_task_shares_round_half_up_and_cuts_stay_below_maximum():
    small, large = [OffsetRange(QUEUES[0], 0, 25)], [OffsetRange(QUEUES[1], 0, 75)]
    # 1.5 and 4.5 of six tasks: two and five.
    found = split_tasks([small, large], 6, None)
    assert [sum(r.size for r in task) for task in found] == [12, 13, 15, 15, 15, 15, 15]
    assert [[r.size for r in task] for task in split_tasks([[OffsetRange(QUEUES[0], 0, 9)]], None, 4)] == [
        [3],
        [3],
        [3],
    ]


@pytest.mark.parametrize("strategy", ["averagely", "averagelyByCircle", "consistentHash"])
def test_complete_strategies_leave_nothing_out(strategy):
    assert allocated_queues(options(allocationStrategy=strategy), list(reversed(QUEUES))) == (
        sorted(QUEUES),
        frozenset(),
    )


def test_an_environment_is_a_part_of_the_queues():
    mine, left_out = allocated_queues(options(environment="1", environments="3"), QUEUES)
    assert set(mine) < set(QUEUES)
    assert {queue.topic for queue in mine} == {"t", "u"}
    assert left_out == frozenset()


def test_nothing_to_read_is_no_task():
    assert plan_tasks(rules(), QUEUES, []) == []
    assert plan_tasks(rules(), QUEUES, [OffsetRange(QUEUES[0], 5, 5)]) == []
