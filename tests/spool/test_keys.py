"""Keys sort as what they mean: G2.7."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from rocketmq_spark.spool.records import (
    LAST,
    ORDER,
    PENDING,
    Due,
    PendingPlace,
    behind,
    behind_group,
    due_in,
    lane_of,
    numbered,
    ordered,
    sequence_of,
)

numbers = st.integers(0, LAST)
dues = st.builds(Due, numbers, numbers)
places = st.builds(PendingPlace, st.text(max_size=9), st.booleans(), dues)


@given(st.text(max_size=9), st.booleans(), st.lists(dues))
def test_3_13_g2_7_keys_are_binary_and_sort_by_time_then_sequence(target: str, waits: bool, given: list[Due]) -> None:
    keys = sorted(PendingPlace(target, waits, due).key for due in given)
    assert [due_in(key) for key in keys] == sorted(given)
    assert [Due.parse(due.encoded) for due in given] == given
    assert all(sequence_of(key) == due_in(key).sequence for key in keys)


@given(places, places)
def test_a_group_holds_the_records_of_its_target_only(one: PendingPlace, other: PendingPlace) -> None:
    assert PendingPlace.parse(one.key) == one
    assert PENDING <= one.key < behind(PENDING)
    within = other.group <= one.key < behind_group(other.group)
    assert within == (one.group == other.group) == ((one.target, one.waits) == (other.target, other.waits))


@given(st.binary(max_size=20), numbers, st.binary(max_size=20), numbers)
def test_a_lane_holds_its_own_records_only(lane: bytes, first: int, other: bytes, second: int) -> None:
    key = ordered(lane, first)
    assert lane_of(key) == lane
    assert sequence_of(key) == first
    within = ordered(other, 0) <= key <= ordered(other, LAST)
    assert within == (lane == other)
    assert ORDER <= key < behind(ORDER)
    assert (key < ordered(lane, second)) == (first < second)


@given(numbers, numbers)
def test_numbered_keys_sort_by_number(first: int, second: int) -> None:
    assert (numbered(b"r", first) < numbered(b"r", second)) == (first < second)
    assert sequence_of(numbered(b"d", first)) == first
