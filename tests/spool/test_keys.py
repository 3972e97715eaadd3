"""Keys sort as what they mean: G2.7."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from rocketmq_spark.spool.records import LAST, ORDER, PENDING, Due, behind, lane_of, numbered, ordered, sequence_of

numbers = st.integers(0, LAST)
dues = st.builds(Due, numbers, numbers)


@given(st.lists(dues))
def test_3_13_g2_7_keys_are_binary_and_sort_by_time_then_sequence(given: list[Due]) -> None:
    assert [Due.parse(key) for key in sorted(due.key for due in given)] == sorted(given)
    assert all(PENDING <= due.key < behind(PENDING) and sequence_of(due.key) == due.sequence for due in given)


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
