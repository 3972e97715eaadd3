"""Property texts as typed columns: what is of the type, and null for all else."""

from __future__ import annotations

import datetime
import itertools

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rocketmq_spark.columnar.decode.property_columns import cast
from rocketmq_spark.columnar.decode.schema import TIMESTAMP
from tests.harness import in_one_test

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


STRANGE = [
    "0x10", "0xffffffff", "1_000", "١٢", "²", "+5", "-5", "007", "--5", "1e3", "1.5", ".5", "5.", "nan", "inf", "-Infinity",
    "0x1p3",
    "1e400", "2147483647", "2147483648", "-2147483649", "9223372036854775807", "9223372036854775808", "1" * 5000,
    " 7 ", "\u00a07", "7\x1f",
    "", " ", "true", "TRUE", "yes", "1", "0", "2026-02-30", "20260131", "2026-W05-6", "0000-01-01", "0999-01-01", "2026-01-31",
    "2026-01-31T12:00:00Z", "2026-01-31T12:00:00.1234567Z", "2026-01-31 12:00:00,5", "2026-01-31T12", "99999999999999999", "-1",
]  # fmt: skip


@given(st.lists(st.sampled_from(STRANGE) | st.none() | st.text(max_size=12)), st.sampled_from(_KINDS))
def test_a_text_means_the_same_alone_and_among_others(texts, kind):
    together = cast(pa.array(texts, pa.string()), kind)
    alone = [cast(pa.array([text], pa.string()), kind) for text in texts]
    assert list(map(repr, together.to_pylist())) == [
        repr(one[0].as_py()) for one in alone
    ]  # NaN is not equal to itself


KINDS = (pa.int32(), pa.int64(), pa.float32(), pa.float64(), pa.date32(), TIMESTAMP)
NO_NUMBERS = ("0x10", "0xffffffff", "1_000", "١٢", "²", "--5", "\u00a07", "1.5.5")
BESIDE: tuple[list[str | None], ...] = ([], ["1"], ["x"], [None])


@in_one_test(("kind", "text", "beside"), itertools.product(KINDS, NO_NUMBERS, BESIDE))
def test_what_is_no_number_is_null_beside_anything(kind, text, beside):
    assert cast(pa.array([text, *beside], pa.string()), kind)[0].as_py() is None


@pytest.mark.parametrize(
    ("kind", "text", "value"),
    [
        (pa.int32(), "+5", 5), (pa.int32(), "007", 7), (pa.int32(), "2147483647", 2**31 - 1),
        (pa.int32(), "-2147483648", -(2**31)),
        (pa.int64(), "9223372036854775807", 2**63 - 1), (pa.int64(), "-9223372036854775808", -(2**63)),
        (pa.float64(), ".5", 0.5),
        (pa.float64(), "5.", 5.0), (pa.float64(), "-inf", float("-inf")), (pa.float64(), "1e400", float("inf")),
        (pa.float32(), "16777217", 16777216.0), (pa.date32(), "20260131", None), (TIMESTAMP, "2026-W05-6", None),
        (TIMESTAMP, "253402300800000", None), (pa.bool_(), "yes", None),
    ],
)  # fmt: skip
def test_edges(kind, text, value):
    for beside in ([], ["1"], ["no"]):
        assert cast(pa.array([text, *beside], pa.string()), kind)[0].as_py() == value
