"""Property texts as typed columns: what is of the type, and null for all else."""

from __future__ import annotations

import datetime

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rocketmq_spark.source.promoted import cast
from rocketmq_spark.source.schema import TIMESTAMP

UTC = datetime.UTC


@pytest.mark.parametrize(
    ("kind", "texts", "expected"),
    [
        (pa.string(), ["a", "", None], ["a", "", None]),
        (pa.binary(), ["ä", None], ["ä".encode(), None]),
        (pa.int32(), ["1", "-7", None], [1, -7, None]),
        (pa.int32(), ["1", "x", " 2 ", "2147483648", "", None], [1, None, 2, None, None, None]),
        (pa.int64(), ["9223372036854775807", "9223372036854775808", "1.5"], [(1 << 63) - 1, None, None]),
        (pa.float64(), ["1.5", "-2e3", "x", None], [1.5, -2000.0, None, None]),
        (pa.bool_(), ["true", "FALSE", "1", "0", "yes", None], [True, False, True, False, None, None]),
        (pa.date32(), ["2026-01-31", "31.1.2026", None], [datetime.date(2026, 1, 31), None, None]),
        (
            TIMESTAMP,
            ["2026-01-31T12:00:00Z", "2026-01-31T12:00:00+02:00", "2026-01-31 12:00:00", "1000", "-1", "x", None],
            [
                datetime.datetime(2026, 1, 31, 12, tzinfo=UTC),
                datetime.datetime(2026, 1, 31, 10, tzinfo=UTC),
                datetime.datetime(2026, 1, 31, 12, tzinfo=UTC),
                datetime.datetime(1970, 1, 1, 0, 0, 1, tzinfo=UTC),
                datetime.datetime(1969, 12, 31, 23, 59, 59, 999000, tzinfo=UTC),
                None,
                None,
            ],
        ),
    ],
)
def test_cast(kind, texts, expected):
    found = cast(pa.array(texts, pa.string()), kind)
    assert found.type == kind
    assert found.to_pylist() == expected


_KINDS = [pa.int32(), pa.int64(), pa.float32(), pa.float64(), pa.bool_(), pa.date32(), TIMESTAMP]


@given(
    st.lists(st.none() | st.text(max_size=25) | st.integers().map(str) | st.datetimes().map(str)),
    st.sampled_from(_KINDS),
)
def test_any_text_is_a_value_or_null(texts, kind):
    found = cast(pa.array(texts, pa.string()), kind)
    found.validate(full=True)
    assert (found.type, len(found)) == (kind, len(texts))


@given(st.lists(st.none() | st.integers(-(1 << 31), (1 << 31) - 1)), st.booleans())
def test_one_bad_text_spoils_no_other(numbers, spoilt):
    texts = [None if number is None else str(number) for number in numbers]
    found = cast(pa.array([*texts, *(["?"] if spoilt else [])], pa.string()), pa.int32())
    assert found.to_pylist() == [*numbers, *([None] if spoilt else [])]
