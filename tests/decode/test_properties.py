"""Property strings as columns, against Java's rules row by row."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from rocketmq_spark.columnar.decode import properties as props
from rocketmq_spark.wire.properties import decode_properties, is_reserved
from tests.decode.fetching import SLACK, clean_properties, odd_properties
from tests.harness import unhex, vectors


def laid(strings):
    buffer = np.frombuffer(bytearray(b"".join(b"<>" + string for string in strings) + SLACK), np.uint8)
    ends = np.cumsum([len(string) + 2 for string in strings], dtype=np.int64)
    return buffer, ends - [len(string) for string in strings], ends


def columns(strings, **wanted):
    return props.build_columns(props.locate(*laid(strings)), props.PropertySelection(**wanted))


def model(strings):
    return [decode_properties(string.decode("utf-8", "replace")) for string in strings]


_UNIFORM = st.lists(st.sampled_from([b"TAGS", b"KEYS", b"UNIQ_KEY", b"a", b"b"]), max_size=4, unique=True).flatmap(
    lambda names: st.lists(clean_properties(names), max_size=6)
)


@given(_UNIFORM | st.lists(odd_properties(), max_size=6))
def test_columns(strings):
    rows = model(strings)
    made = columns(strings, properties="all", property_columns=("a", "region", "user-property-with-a-long-name"))
    for column, name in ((made.tags, "TAGS"), (made.msg_id, "UNIQ_KEY")):
        assert column.to_pylist() == [row.get(name) for row in rows]
    assert made.keys.to_pylist() == [
        None if (text := row.get("KEYS")) is None else [key for key in text.split(" ") if key] for row in rows
    ]
    assert [dict(row) for row in made.properties.to_pylist()] == rows
    assert sum(map(len, made.properties.to_pylist())) == sum(map(len, rows)), "no name twice"
    for name, column in made.property_columns.items():
        column.validate(full=True)
        assert column.to_pylist() == [row.get(name) for row in rows]


@given(_UNIFORM | st.lists(odd_properties(), max_size=6))
def test_the_users_own(strings):
    made = columns(strings, properties="user")
    assert [dict(row) for row in made.properties.to_pylist()] == [
        {name: value for name, value in row.items() if not is_reserved(name)} for row in model(strings)
    ]


def test_only_what_is_wanted_is_made():
    made = columns([b"TAGS\x01a\x02"], tags=False, keys=False, msg_id=False, properties="none")
    assert (made.tags, made.keys, made.msg_id, made.properties, made.property_columns) == (None, None, None, None, {})
    assert not props.PropertySelection(False, False, False, "none").selects_any
    assert props.PropertySelection(False, False, False, "none", ("x",)).selects_any


def test_strings_of_java():
    cases = vectors("properties")
    strings = [unhex(case["encoded_utf8"]) for case in cases]
    made = columns(strings, properties="all")
    assert [dict(row) for row in made.properties.to_pylist()] == [case["decoded"] for case in cases]
    for string, case in zip(strings, cases, strict=True):
        assert dict(columns([string], properties="all").properties.to_pylist()[0]) == case["decoded"]
