"""Which names are the system's, looked up for a whole column at once."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from rocketmq_spark.base.codes import RESERVED_PROPERTIES, TRANSIENT_PROPERTY_PREFIX
from rocketmq_spark.columnar.decode import property_names
from rocketmq_spark.wire.properties import is_reserved


def ids_of(names):
    blob = np.frombuffer(b"".join(names) + bytes(16), np.uint8)
    lengths = np.array([len(name) for name in names], np.int64)
    starts = np.cumsum(lengths) - lengths
    return property_names.classify(blob, starts, lengths, property_names.signatures(blob, starts, lengths)).tolist()


@pytest.mark.parametrize("name", sorted(RESERVED_PROPERTIES))
def test_every_name_of_the_system_is_known(name):
    (found,) = ids_of([name.encode()])
    assert found == property_names.ID_BY_NAME.get(name, len(property_names.NAMES))
    assert found != property_names.USER
    assert property_names.is_system(name)


def test_the_three_that_have_columns():
    assert ids_of([b"TAGS", b"KEYS", b"UNIQ_KEY"]) == [
        property_names.TAGS,
        property_names.KEYS,
        property_names.UNIQ_KEY,
    ]


_NEAR = st.sampled_from(sorted(RESERVED_PROPERTIES)).flatmap(
    lambda name: st.tuples(st.integers(0, len(name) - 1), st.characters(codec="ascii")).map(
        lambda change: name[: change[0]] + change[1] + name[change[0] + 1 :]
    )
)


@given(st.lists(st.text(min_size=1, max_size=40) | _NEAR | st.sampled_from(sorted(RESERVED_PROPERTIES)), max_size=20))
@example([TRANSIENT_PROPERTY_PREFIX, TRANSIENT_PROPERTY_PREFIX + "x", TRANSIENT_PROPERTY_PREFIX[:-1]])
def test_system_and_user(names):
    found = ids_of([name.encode("utf-8", "replace") for name in names])
    assert [of != property_names.USER for of in found] == [is_reserved(name) for name in names]
    assert [is_reserved(name) for name in names] == [property_names.is_system(name) for name in names]


def test_long_names_are_compared_in_full():
    """Same length, same first and last eight bytes."""
    name = "CHECK_IMMUNITY_TIME_IN_SECONDS"
    other = name[:8] + name[8:-8].lower() + name[-8:]
    assert name in RESERVED_PROPERTIES
    assert ids_of([name.encode(), other.encode()]) == [property_names.ID_BY_NAME[name], property_names.USER]


def test_signatures_differ_in_length_beginning_and_end():
    names = [
        b"a",
        b"aa",
        b"aaaaaaaa",
        b"aaaaaaaaa",
        b"baaaaaaaaaaaaaaa",
        b"aaaaaaaaaaaaaaab",
        b"aaaaaaaaaaaaaaaa",
        b"b",
    ]
    blob = np.frombuffer(b"".join(names) + bytes(16), np.uint8)
    lengths = np.array([len(name) for name in names], np.int64)
    assert len(set(property_names.signatures(blob, np.cumsum(lengths) - lengths, lengths).tolist())) == len(names)
