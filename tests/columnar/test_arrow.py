"""Buffers of Arrow columns, whole and sliced."""

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rocketmq_spark.columnar import arrow
from rocketmq_spark.columnar.encode import buffers

TEXTS = st.lists(st.none() | st.text(max_size=5), max_size=20)


@given(TEXTS, st.integers(0, 5), st.integers(0, 5))
def test_lengths_nulls_and_filled_of_any_slice(texts, cut, end):
    column = pa.array(texts, pa.string())[cut : len(texts) - end]
    values = column.to_pylist()
    for array in (
        arrow.as_bytes(column),
        arrow.as_bytes(pa.chunked_array([column])),
        arrow.as_bytes(column.cast("large_string")),
    ):
        assert array.to_pylist() == [None if v is None else v.encode() for v in values]
        assert arrow.lengths(array).tolist() == [len((v or "").encode()) for v in values]
        filled = arrow.non_empty_mask(array)
        assert (np.ones(len(values), bool) if filled is None else filled).tolist() == [bool(v) for v in values]
        nulls = arrow.null_mask(array)
        assert (np.zeros(len(values), bool) if nulls is None else nulls).tolist() == [v is None for v in values]


@given(st.lists(st.binary(max_size=6), max_size=30), st.integers(0, 4))
def test_rows_with_some_bytes(values, cut):
    column = pa.array(values, pa.binary())[cut:]
    found = {int(i) for i in arrow.rows_with(column, b"\x01\x02")}
    assert found == {i for i, value in enumerate(values[cut:]) if b"\x01" in value or b"\x02" in value}


def test_pieces_join_constants_that_are_neighbours():
    pieces = buffers.Pieces(2)
    pieces.add_constant(b"a")
    pieces.add_constant(b"b")
    pieces.add_column(pa.array([b"1", b"22"]))
    pieces.add_constant(b"c")
    assert pieces.lengths.tolist() == [4, 5]
    start, rest = pieces.split()
    assert start == b"ab"
    assert buffers.joined(pa.array([b"<", b"<"]), *rest).to_pylist() == [b"<1c", b"<22c"]
    assert buffers.Pieces(3).split() == (b"", [])


def test_fixed_rows():
    assert buffers.fixed_width_column(np.frombuffer(b"abcdef", np.uint8).reshape(3, 2)).to_pylist() == [
        b"ab",
        b"cd",
        b"ef",
    ]


@pytest.mark.parametrize("column", [pa.array([], pa.string()), pa.chunked_array([], pa.string())])
def test_nothing(column):
    array = arrow.as_bytes(column)
    assert arrow.lengths(array).tolist() == []
    assert len(arrow.rows_with(array, b"\x01")) == 0
    assert bytes(arrow.data_and_offsets(array)[0]) == b""
