"""Values out of byte positions: every slice is what Python would cut."""

from __future__ import annotations

import itertools

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rocketmq_spark.columnar import arrow
from rocketmq_spark.columnar.decode import buffers
from rocketmq_spark.errors import DecodeError


@st.composite
def cuts(draw):
    buffer = draw(st.binary(min_size=1, max_size=60))
    at = st.integers(0, len(buffer))
    pairs = draw(st.lists(st.tuples(at, at).map(sorted), max_size=12))
    return buffer, pairs


def laid(buffer, pairs):
    starts, ends = (np.array([pair[i] for pair in pairs], np.int64) for i in (0, 1))
    return buffers.slices(np.frombuffer(buffer, np.uint8), starts, ends)


@given(cuts())
def test_binary(case):
    buffer, pairs = case
    found = laid(buffer, pairs)
    found.validate(full=True)
    assert found.to_pylist() == [buffer[start:end] for start, end in pairs]
    content, positions = arrow.array_and_offsets(found)
    assert [bytes(content[a:b]) for a, b in itertools.pairwise(positions)] == found.to_pylist()


@given(cuts(), st.data())
def test_strings(case, data):
    buffer, pairs = case
    present = np.array(data.draw(st.lists(st.booleans(), min_size=len(pairs), max_size=len(pairs))), bool)
    for mask in (None, present):
        found = arrow.to_strings(laid(buffer, pairs), mask, buffer.isascii())
        found.validate(full=True)
        assert found.to_pylist() == [
            buffer[start:end].decode("utf-8", "replace") if mask is None or mask[i] else None
            for i, (start, end) in enumerate(pairs)
        ]


@pytest.mark.parametrize("count", [0, 1, 5, 70_000])
def test_repeated(count):
    found = arrow.constant_column("größe", count)
    found.validate(full=True)
    assert (len(found), found.unique().to_pylist()) == (count, ["größe"] if count else [])


def test_tiles_are_kept_and_grow():
    assert arrow.tiled_column(("a", "bc"), 3).to_pylist() == ["a", "bc"] * 3
    assert arrow.tiled_column(("a", "bc"), 40_000).to_pylist() == ["a", "bc"] * 40_000
    for i in range(200):
        assert arrow.tiled_column((str(i),), 2).to_pylist() == [str(i)] * 2


def test_integers_and_nulls():
    assert arrow.integers(np.array([1, -2], np.int64), pa.int64()).to_pylist() == [1, -2]
    assert arrow.null_column(pa.string(), 2).to_pylist() == [None, None]


@given(st.lists(st.binary(min_size=4, max_size=4), max_size=9))
def test_hexadecimal(rows):
    found = buffers.hex_texts(np.array([list(row) for row in rows], np.uint8).reshape(len(rows), 4))
    assert found.to_pylist() == [row.hex().upper() for row in rows]


def test_odds_grow_on_demand():
    assert buffers.odd_numbers(3).to_pylist() == [1, 3, 5]
    assert buffers.odd_numbers(100_000)[-1].as_py() == 199_999


@pytest.mark.parametrize("base", [(1 << 31) - 4, (1 << 31) + 7, (1 << 32) + 1])
def test_positions_beyond_31_bits_do_not_wrap(base):
    buffer = np.zeros(base + 10, np.uint8)  # of which only the touched pages exist
    buffer[base : base + 6] = np.frombuffer(b"abcdef", np.uint8)
    found = buffers.slices(buffer, np.array([base + 3, base], np.int64), np.array([base + 6, base + 3], np.int64))
    found.validate(full=True)
    assert found.to_pylist() == [b"def", b"abc"]


def test_more_than_an_array_can_hold_is_an_error_with_its_remedy():
    buffer = np.zeros((1 << 31) + 1, np.uint8)
    with pytest.raises(DecodeError, match="2147483648 bytes of messages are too many for one Arrow array") as e:
        buffers.slices(buffer, np.array([0, 1 << 31], np.int64), np.array([1, 1 << 31], np.int64))
    assert "Lower option 'maxBytesInFlight'" in str(e.value)
