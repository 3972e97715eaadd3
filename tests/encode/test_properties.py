"""Columns as properties, and delays."""

from datetime import UTC, datetime

import pyarrow as pa
import pytest

from rocketmq_spark.columnar.encode import buffers, properties
from rocketmq_spark.columnar.encode.properties import BadRows, TextPieces
from rocketmq_spark.wire.properties import decode_properties
from tests.live.writes import frame


def made(batch, delays=False, **columns):
    """Properties of every row, its bad_rows, and the delayed rows."""
    names = {name.lower(): name for name in batch.schema.names} | columns
    pieces, bad_rows = TextPieces(len(batch)), BadRows()
    delayed = None
    if delays:
        delayed = properties.add_delays(pieces, batch, names, bad_rows)
    else:
        properties.add_properties(pieces, batch, names, bad_rows)
    start, rest = pieces.split()
    joined = buffers.joined(pa.array([start] * len(batch), pa.binary()), *rest).to_pylist()
    assert pieces.lengths.tolist() == [len(item) for item in joined]
    found = [decode_properties(item.decode()) for item in joined]
    return found, dict(bad_rows.reasons_by_row()), None if delayed is None else delayed.tolist()


def test_every_column_has_its_name():
    batch = frame(tags=["t", None], keys=[["a", "b"], None], shardingKey=["s", ""], properties=[[("p", "v")], None])
    assert made(batch)[0] == [{"TAGS": "t", "KEYS": "a b", "__SHARDINGKEY": "s", "p": "v"}, {}]


@pytest.mark.parametrize(
    ("keys", "text"),
    [
        ([["a"], ["b"]], ["a", "b"]),
        ([["a", None], []], ["a", ""]),
        ([["a"], None], ["a", ""]),
        ([[None], ["x", "y"]], ["", "x y"]),
    ],
)
def test_keys_as_lists(keys, text):
    assert [row.get("KEYS", "") for row in made(frame(keys=keys))[0]] == text


def test_keys_of_large_texts():
    """As Spark has them with spark.sql.execution.arrow.useLargeVarTypes."""
    keys = pa.array([["a"], ["b", ""], ["c", "d"]], pa.list_(pa.large_string())).slice(1)
    assert [row["KEYS"] for row in made(frame(keys=keys))[0]] == ["b", "c d"]


def test_a_priority_is_0_where_it_is_null_and_none_is_negative():
    found, bad_rows, _ = made(frame(priority=pa.array([7, None, -1], pa.int32())))
    assert [row["_SYS_MSG_PRIORITY_"] for row in found] == ["7", "0", "-1"]
    assert bad_rows == {2: "priority is negative"}


def test_keys_as_text():
    assert made(frame(keys=pa.array(["a b", None])))[0] == [{"KEYS": "a b"}, {}]


@pytest.mark.parametrize("column", ["tags", "shardingKey", "keys"])
def test_separators_are_faults(column):
    batch = frame(**{column: pa.array(["fine", "a\x01b", "\x02"])})
    assert made(batch)[1] == dict.fromkeys((1, 2), f"{column} contains the separator 0x01 or 0x02")


@pytest.mark.parametrize("kind", [pa.string(), pa.large_string()])
def test_a_key_with_a_blank_is_a_fault_of_its_row(kind):
    keys = [["fine"], None, ["a", None, "John Smith"], [], ["", " "], ["b\tc"], ["x y", "z "]]
    batch = frame(keys=pa.array(keys, pa.list_(kind)))
    said = {2: "John Smith", 4: " ", 6: "x y"}
    for first in (0, 2):
        assert made(batch.slice(first))[1] == {
            row - first: f"keys has the key {key!r}, and RocketMQ splits keys at blanks" for row, key in said.items()
        }


def test_entries_that_a_null_row_owns_are_nobodys_keys():
    values, bounds = pa.array(["John Smith", "k"]), pa.array([0, 1, 2], pa.int32())
    keys = pa.ListArray.from_arrays(bounds, values, mask=pa.array([True, False]))
    assert made(frame(keys=keys))[:2] == ([{}, {"KEYS": "k"}], {})


@pytest.mark.parametrize("ids", [pa.array(["7", None, ""]), pa.array([7, None, None])])
def test_row_ids(ids):
    found, bad_rows, _ = made(frame(id=ids), messageid="id")
    assert found[0] == {"SPARK_ROW_ID": "7"}
    assert bad_rows == dict.fromkeys((1, 2), "id is null or empty, which identifies no row")


def test_with_row_ids_nobody_else_sets_the_property():
    rows = frame(properties=[[("SPARK_ROW_ID", "mine")]], id=["1"])
    assert made(rows.select(["properties"]))[0] == [{"SPARK_ROW_ID": "mine"}]
    assert "RocketMQ's own, such as SPARK_ROW_ID" in made(rows, messageid="id")[1][0]


def test_delays_of_each_kind():
    moment = datetime(2030, 1, 1, 0, 0, 0, 1, tzinfo=UTC)
    batch = frame(
        delayLevel=[3, None, None, 0], delayMs=[None, 1500, None, 0], deliverAt=[None, None, moment, None],
    )  # fmt: skip
    found, bad_rows, delayed = made(batch, delays=True)
    assert found == [{"DELAY": "3"}, {"TIMER_DELAY_MS": "1500"}, {"TIMER_DELIVER_MS": "1893456000001"}, {}]
    assert (bad_rows, delayed) == ({}, [True, True, True, False])


def test_no_delay_is_none():
    assert made(frame(delayMs=[None, 0]), delays=True)[2] is None
    assert made(frame(body=["x"]), delays=True)[2] is None


def test_delays_that_contradict_or_are_negative():
    rows = frame(delayLevel=[1, -1, None, None], delayMs=[1, None, -5, (1 << 63) - 1])
    bad_rows = made(rows, delays=True)[1]
    assert bad_rows == {
        0: "more than one of delayLevel, delayMs delays the row",
        1: "delayLevel is negative",
        2: "delayMs is negative",
        3: "delayMs is more than 4611686018427387904",  # with the time added it would be due at once
    }
