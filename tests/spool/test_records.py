"""Envelopes come back, and what is damaged says so."""

from __future__ import annotations

import contextlib
import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rocketmq_spark.errors import DecodeError
from rocketmq_spark.spool.records import Due, PendingKey, Record, RecordState, Totals, decode_record

numbers = st.integers(0, 2**64 - 1)
marks = st.lists(st.tuples(st.binary(max_size=9), st.binary(max_size=9)), max_size=3).map(tuple)
records = st.builds(
    Record, st.text(max_size=30), st.binary(max_size=100), numbers, st.text(max_size=30), st.binary(max_size=30), marks
)
states = st.builds(RecordState, st.integers(0, 65535), numbers, st.text(max_size=60))


@given(records)
def test_record_with_any_names_is_decoded_as_it_was_encoded(one: Record) -> None:
    assert Record.decode(one.encode()) == one


@given(states)
def test_a_state_comes_back(one: RecordState) -> None:
    assert RecordState.decode(one.encode()) == one


@given(st.builds(Totals, *[numbers] * 7))
def test_totals_come_back(one: Totals) -> None:
    """Numbers that no store reaches are damage: Python could not use them as lengths."""
    possible = max(dataclasses.astuple(one)) <= 2**62
    assert Totals.decode(one.encode()) == (one if possible else None)


@given(records, st.data())
def test_bit_that_fell_over_is_found(one: Record, data: st.DataObject) -> None:
    encoded = bytearray(one.encode())
    at = data.draw(st.integers(0, len(encoded) - 1))
    encoded[at] ^= 1 << data.draw(st.integers(0, 7))
    assert isinstance(decode_record(bytes(encoded)), DecodeError)


@given(st.binary(max_size=80))
def test_garbage_is_a_value_or_a_decode_error(data: bytes) -> None:
    for kind in (Record, RecordState, Totals):
        with contextlib.suppress(DecodeError):
            assert isinstance(kind.decode(data), kind)


def test_a_later_version_is_named() -> None:
    for one in (Record("k", b"x", 1), RecordState(0, 1), Totals()):
        data = bytearray(one.encode())
        data[0] = 9
        with pytest.raises(DecodeError, match=r"version 9; this release reads version [12]"):
            type(one).decode(bytes(data))


def test_a_missing_record_is_said_to_be_missing() -> None:
    assert "missing" in str(decode_record(None))


def test_a_reason_may_have_any_characters() -> None:
    """What a broker says comes as JSON, which has characters that no encoding has."""
    state = RecordState(1, 2, "lone \ud800")
    assert RecordState.decode(state.encode()) == RecordState(1, 2, "lone ?")


@pytest.mark.parametrize(
    ("written", "target"), [(b"\1\0\3" + b"\0" * 8 + b"\0\2h1down", "h1"), (b"\2" + b"\0" * 12, ""), (b"?", "")]
)
def test_the_target_in_a_state_of_an_earlier_release_is_found(written: bytes, target: str) -> None:
    assert RecordState.legacy_target(written) == target
    if target:
        assert RecordState.decode(written) == RecordState(3, 0, "down")


@given(records)
def test_the_place_of_an_encoded_record_is_that_of_the_record(one: Record) -> None:
    assert Record.pending_key_of_data(one.encode(), Due(7, 1)) == one.pending_key(Due(7, 1))
    assert Record.pending_key_of_data(one.encode()[:9], Due(7, 1)) == PendingKey("", False, Due(7, 1))


def test_only_totals_with_pending_records_bar_earlier_releases() -> None:
    assert [Totals(depth=depth, dead=7).encode()[0] for depth in (0, 1)] == [1, 2]
    assert Totals.with_indexed_version(Totals(5).encode()) == b"\2" + Totals(5).encode()[1:]


def test_the_error_of_an_unreadable_record_has_no_frames() -> None:
    """With frames, it would be in a cycle with variables of callers, and keep an iterator of RocksDB until a collection."""
    error = decode_record(b"damaged")
    assert isinstance(error, DecodeError)
    assert (error.__traceback__, error.__cause__, error.__context__) == (None, None, None)
