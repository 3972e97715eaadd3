"""Keys sort as what they mean: G2.7."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from rocketmq_spark.spool.records import (
    LAST_SEQUENCE,
    ORDER,
    PENDING,
    Due,
    PendingKey,
    area_end,
    due_of_key,
    group_end,
    lane_key,
    lane_of,
    record_key,
    sequence_of,
)

numbers = st.integers(0, LAST_SEQUENCE)
dues = st.builds(Due, numbers, numbers)
places = st.builds(PendingKey, st.text(max_size=9), st.booleans(), dues)


@given(st.text(max_size=9), st.booleans(), st.lists(dues))
def test_pending_keys_are_binary_and_sort_by_time_then_sequence(target: str, waits: bool, given: list[Due]) -> None:
    keys = sorted(PendingKey(target, waits, due).encoded for due in given)
    assert [due_of_key(key) for key in keys] == sorted(given)
    assert [Due.parse(due.mark_value) for due in given] == given
    assert all(sequence_of(key) == due_of_key(key).sequence for key in keys)


@given(places, places)
def test_a_group_holds_the_records_of_its_target_only(one: PendingKey, other: PendingKey) -> None:
    assert PendingKey.parse(one.encoded) == one
    assert PENDING <= one.encoded < area_end(PENDING)
    within = other.group <= one.encoded < group_end(other.group)
    assert (
        within
        == (one.group == other.group)
        == ((one.target, one.waits_for_answer) == (other.target, other.waits_for_answer))
    )


@given(st.binary(max_size=20), numbers, st.binary(max_size=20), numbers)
def test_a_lane_holds_its_own_records_only(lane: bytes, first: int, other: bytes, second: int) -> None:
    key = lane_key(lane, first)
    assert lane_of(key) == lane
    assert sequence_of(key) == first
    within = lane_key(other, 0) <= key <= lane_key(other, LAST_SEQUENCE)
    assert within == (lane == other)
    assert ORDER <= key < area_end(ORDER)
    assert (key < lane_key(lane, second)) == (first < second)


@given(numbers, numbers)
def test_numbered_keys_sort_by_number(first: int, second: int) -> None:
    assert (record_key(b"r", first) < record_key(b"r", second)) == (first < second)
    assert sequence_of(record_key(b"d", first)) == first
