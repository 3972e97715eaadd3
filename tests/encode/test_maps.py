"""A map column as property strings: the same for constant names and for any others."""

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rocketmq_spark.columnar.encode import buffers
from rocketmq_spark.columnar.encode.properties import BadRows, TextPieces, add_map

MAPS = pa.map_(pa.string(), pa.string())
RESERVED = pa.array([b"TAGS", b"KEYS"])


def strings(column):
    pieces, bad_rows = TextPieces(len(column)), BadRows()
    add_map(pieces, column, bad_rows, RESERVED)
    start, rest = pieces.split()
    joined = buffers.joined(pa.array([start] * len(column), pa.binary()), *rest).to_pylist()
    assert pieces.lengths.tolist() == [len(item) for item in joined]
    return [item.decode() for item in joined], dict(bad_rows.reasons_by_row())


def expected(rows):
    return ["".join(f"{k}\x01{v}\x02" for k, v in row or () if v is not None) for row in rows]


NAMES = st.text("abcé", min_size=1, max_size=4)
TEXTS = st.text("xyzü ", min_size=1, max_size=4)
VALUES = st.none() | TEXTS
ROWS = st.lists(st.none() | st.lists(st.tuples(NAMES, VALUES), max_size=3), max_size=12)


@given(ROWS, st.integers(0, 3))
def test_any_maps_sliced(rows, cut):
    found, bad_rows = strings(pa.array(rows, MAPS)[cut:])
    assert found == expected(rows[cut:])
    assert bad_rows == {}


@given(
    st.lists(NAMES, min_size=1, max_size=3),
    st.lists(st.lists(TEXTS, min_size=3, max_size=3), min_size=1, max_size=9),
    st.integers(0, 3),
)
def test_the_same_names_in_every_row(names, values, cut):
    rows = [list(zip(names, row, strict=False)) for row in values]
    found, bad_rows = strings(pa.array(rows, MAPS)[cut:])
    assert found == expected(rows[cut:])
    assert bad_rows == {}


@pytest.mark.parametrize("more", [[], [("other", "x")]], ids=["constant", "varying"])
@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        ("", "x", "empty name"),
        ("a\x02", "x", "name contains the separator"),
        ("TAGS", "x", "RocketMQ's own, such as TAGS"),
        ("__RMQ.TRANSIENT.X", "x", "RocketMQ's own"),
    ],
)
def test_bad_names(more, name, value, reason):
    rows = [[(name, value)], [(name, value)], [(name, value), *more]]
    _, bad_rows = strings(pa.array(rows, MAPS))
    assert bad_rows.keys() == {0, 1, 2}
    assert all(reason in found for found in bad_rows.values())


@pytest.mark.parametrize("more", [[], [("b", None)], [("b", "x")]], ids=["constant", "with a null", "varying"])
def test_empty_values_are_refused_by_row_and_name(more):
    rows = [[("a", "x"), ("c", "x")], [("a", ""), ("c", "x")], [("a", "x"), ("c", ""), *more]]
    hint = "is empty; brokers drop empty properties, null omits the property"
    assert strings(pa.array(rows, MAPS))[1] == {1: f"property 'a' {hint}", 2: f"property 'c' {hint}"}


@pytest.mark.parametrize("more", [[], [("b", "x")]], ids=["constant", "varying"])
def test_bad_values_name_their_row(more):
    rows = [[("a", "x"), ("c", "x")], [("a", "x"), ("c", "\x01")], [("a", "x"), ("c", "y"), *more]]
    assert strings(pa.array(rows, MAPS))[1] == {1: "a property's value contains the separator 0x01 or 0x02"}


def test_null_maps_that_own_entries_show_none():
    whole = pa.array([[("a", "1")], [("b", "2")]], MAPS)
    hidden = pa.MapArray.from_arrays(whole.offsets, whole.keys, whole.items, mask=pa.array([False, True]))
    assert strings(hidden)[0] == ["a\x011\x02", ""]
