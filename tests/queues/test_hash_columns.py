from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rocketmq_spark.base.java import string_hash
from rocketmq_spark.columnar.java_hashes import hash_codes
from rocketmq_spark.errors import OptionError
from tests.queues import read

STRINGS = [case for case in read("select_by_hash") if case["arg_type"] == "String"]
TEXTS = [case["arg"] for case in STRINGS]
HASHES = [case["java_hash"] for case in STRINGS]


def test_every_string_vector_from_python_numpy_and_arrow() -> None:
    encodable = [(t, h) for t, h in zip(TEXTS, HASHES, strict=True) if not any("\ud800" <= c <= "\udfff" for c in t)]
    texts, hashes = [t for t, _ in encodable], [h for _, h in encodable]
    assert hash_codes(TEXTS).tolist() == HASHES
    assert hash_codes(np.array(texts, object)).tolist() == hashes
    for kind in (pa.string(), pa.large_string()):
        assert hash_codes(pa.array(texts, kind)).tolist() == hashes
        assert hash_codes(pa.chunked_array([texts[:5], texts[5:], []], kind)).tolist() == hashes
    assert hash_codes(TEXTS).dtype == np.int32


@settings(deadline=None)
@given(st.lists(st.text(st.characters(exclude_categories=["Cs"]))), st.integers(0, 3), st.integers(0, 3))
def test_slices_of_a_column_hash_like_single_strings(texts: list[str], head: int, tail: int) -> None:
    array = pa.array(texts, pa.string())[head:]
    array = array[: max(len(array) - tail, 0)]
    expected = [string_hash(t) for t in array.to_pylist()]
    assert hash_codes(array).tolist() == expected
    assert hash_codes(array.to_pylist()).tolist() == expected


def test_empty_columns() -> None:
    assert hash_codes([]).tolist() == []
    assert hash_codes(pa.array([], pa.string())).tolist() == []
    assert hash_codes(pa.chunked_array([], pa.string())).tolist() == []
    assert hash_codes(pa.array(["", ""])).tolist() == [0, 0]


def test_missing_keys_and_other_types_are_refused() -> None:
    with pytest.raises(OptionError, match="1 of 3 rows have no key"):
        hash_codes(pa.array(["a", None, "b"]))
    with pytest.raises(OptionError, match="every row needs a key"):
        hash_codes(["a", None])
    with pytest.raises(OptionError, match="column of int64: expected string"):
        hash_codes(pa.array([1]))
