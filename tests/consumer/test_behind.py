"""Which queues are read ahead, what of them, and when such a read goes on."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from rocketmq_spark.consumer.assigned import AssignedQueue, FetchRequest
from rocketmq_spark.consumer.prefetch import (
    MAX_RANGES,
    BacklogRange,
    PrefetchLimits,
    ReadPace,
    lagging_queues,
    next_pace,
    offset_ranges_in_turn,
)
from rocketmq_spark.consumer.rebalance import StartOffset
from rocketmq_spark.model import MessageQueue, OffsetRange

A, B, C = (MessageQueue("t", broker, i) for broker, i in (("a", 0), ("a", 1), ("b", 0)))
BOUNDS = PrefetchLimits(pull_batch_size=32, max_count=1000, max_bytes=1 << 20)


def place(at: int = 0, end: int | None = 5000, **changed: object) -> AssignedQueue:
    made = AssignedQueue.from_start(StartOffset(at))
    made.end_offset = end
    for name, value in changed.items():
        setattr(made, name, value)
    return made


def far(
    places: Mapping[MessageQueue, AssignedQueue], bounds: PrefetchLimits = BOUNDS, plain: bool = True
) -> list[MessageQueue]:
    found = lagging_queues(places, 10.0, bounds, lambda queue: plain)
    return [stretch.request.queue for stretches in found.values() for stretch in stretches]


def test_lagging_queues_are_read_per_broker_from_their_offsets() -> None:
    found = lagging_queues({A: place(7), B: place(0, 1023), C: place()}, 10.0, BOUNDS, lambda queue: True)
    assert found == {
        "a": [BacklogRange(FetchRequest(A, 7, 0, 0), 5000)],
        "b": [BacklogRange(FetchRequest(C, 0, 0, 0), 5000)],
    }


@pytest.mark.parametrize(
    "second",
    [
        {"is_fetching": True},
        {"paused": True},
        {"retry_at": 10.1},
        {"cooldown_until": 10.1},
        {"end": None},
        {"end": 1023},
        {"at": 3977},
    ],
    ids=lambda second: next(iter(second)),
)
def test_all_others_are_polled(second: dict[str, int]) -> None:
    assert far({A: place()}) == [A]
    assert far({A: place(**second)}) == []


def test_filtered_queues_and_small_thresholds_are_polled() -> None:
    assert far({A: place()}, plain=False) == []
    assert far({A: place()}, PrefetchLimits(32, 255, 1 << 20)) == []
    assert far({A: place()}, PrefetchLimits(32, 256, 1 << 20)) == [A]


def test_queues_take_turns_up_to_their_ends() -> None:
    stretches = [BacklogRange(FetchRequest(A, 0, 0, 1), 250), BacklogRange(FetchRequest(B, 10, 0, 2), 120)]
    assert offset_ranges_in_turn(stretches, 100) == [
        OffsetRange(A, 0, 100),
        OffsetRange(B, 10, 110),
        OffsetRange(A, 100, 200),
        OffsetRange(B, 110, 120),
        OffsetRange(A, 200, 250),
    ]


def test_a_read_has_an_end() -> None:
    assert len(offset_ranges_in_turn([BacklogRange(FetchRequest(A, 0, 0, 1), 1 << 40)], 100)) == MAX_RANGES


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({}, ReadPace.GO),
        ({"cached_count": 500, "cached_bytes": 1 << 19}, ReadPace.GO),
        ({"cached_count": 501}, ReadPace.WAIT),
        ({"cached_bytes": (1 << 19) + 1}, ReadPace.WAIT),
        ({"cached_count": 501, "paused": True}, ReadPace.STOP),
        ({"token": 4}, ReadPace.STOP),
    ],
)
def test_read_waits_for_room_and_stops_after_a_seek_or_pause(changed: dict[str, int], expected: ReadPace) -> None:
    stretches = [BacklogRange(FetchRequest(A, 0, 0, 0), 9), BacklogRange(FetchRequest(B, 0, 0, 0), 9)]
    assert next_pace({A: place(), B: place(**changed)}, stretches, BOUNDS) is expected


def test_a_read_stops_for_a_queue_that_was_given_up() -> None:
    assert next_pace({A: place()}, [BacklogRange(FetchRequest(B, 0, 0, 0), 9)], BOUNDS) is ReadPace.STOP
