"""A row's properties as pieces to be joined: tags, keys, the user's map and what RocketMQ calls its other columns."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from rocketmq_spark import codes
from rocketmq_spark.columnar import arrow
from rocketmq_spark.columnar.arrow import NOTHING, Flags, Ints, Pieces
from rocketmq_spark.encode.bad_rows import BadRows
from rocketmq_spark.encode.maps import add_map

# The property that carries a row's id (option ``messageId``). It is the user's, so readers show it.
ROW_ID = "SPARK_ROW_ID"
MESSAGE_ID = "messageid"

_NAME_END, _VALUE_END = b"\x01", b"\x02"
_BLANK = codes.KEY_SEPARATOR.encode()
_KEY_LIST = pa.list_(pa.string())
_PLAIN = (
    ("tags", codes.Property.TAGS),
    ("shardingkey", codes.Property.SHARDING_KEY),
)


def of_batch(batch: pa.RecordBatch, columns: Mapping[str, str], bad_rows: BadRows) -> Pieces:
    """Everything but message ids and delays."""
    pieces = Pieces(len(batch))
    for column, name in _PLAIN:
        if column in columns:
            _add(pieces, name, arrow.as_bytes(batch.column(columns[column])), bad_rows, columns[column])
    if "keys" in columns:
        _check_keys(batch.column(columns["keys"]), bad_rows, columns["keys"])
        _add(pieces, codes.Property.KEYS, keys_of(batch.column(columns["keys"])), bad_rows, columns["keys"])
    if "priority" in columns:
        _add_priorities(pieces, batch.column(columns["priority"]), bad_rows, columns["priority"])
    if MESSAGE_ID in columns:
        _add_row_ids(pieces, batch.column(columns[MESSAGE_ID]), bad_rows, columns[MESSAGE_ID])
    if "properties" in columns:
        own = (ROW_ID,) if MESSAGE_ID in columns else ()
        add_map(pieces, batch.column(columns["properties"]), bad_rows, _reserved(own))
    return pieces


def add_delays(pieces: Pieces, batch: pa.RecordBatch, columns: Mapping[str, str], bad_rows: BadRows) -> Flags | None:
    """The property of each delayed row; which rows these are, None when there is none."""
    numbers = {name: _numbers(batch.column(columns[name]), name) for name in _DELAY_NAMES if name in columns}
    if not numbers:
        return None
    delayed = np.zeros(len(batch), np.int64)
    for name, values in numbers.items():
        bad_rows.add(values < 0, f"{columns[name]} is negative")
        bad_rows.add(values > codes.LONGEST_DELAY_MS, f"{columns[name]} is more than {codes.LONGEST_DELAY_MS}")
        delayed += values != 0
    bad_rows.add(delayed > 1, f"more than one of {', '.join(columns[n] for n in numbers)} delays the row")
    if not delayed.any():
        return None
    for name, values in numbers.items():
        present = pa.array(values > 0)
        texts = pa.array(values).cast(pa.string()).view(pa.binary())
        made = arrow.joined(_DELAY_NAMES[name].encode() + _NAME_END, texts, _VALUE_END)
        pieces.column(pc.if_else(present, made, NOTHING))
    has_delay: Flags = delayed > 0
    return has_delay


_DELAY_NAMES = {
    "delaylevel": codes.Property.DELAY,
    "delayms": codes.Property.TIMER_DELAY_MS,
    "deliverat": codes.Property.TIMER_DELIVER_MS,
}


def _numbers(column: Any, name: str) -> Ints:
    """Levels, or milliseconds; 0 for null."""
    values = pc.fill_null(arrow.plain(column).cast(pa.int64()), 0).to_numpy()
    if name == "deliverat":  # microseconds; a moment is never too early
        values = -(-values // 1000)
    numbers: Ints = values
    return numbers


def _add(pieces: Pieces, name: str, values: pa.Array, bad_rows: BadRows, column: str) -> None:
    """``name 0x01 value 0x02`` for every value that is neither null nor empty, nothing for the others.

    No escaping exists: a separator inside a value would tear the properties apart.
    """
    bad_rows.rows(arrow.rows_with(values, _NAME_END + _VALUE_END), f"{column} contains the separator 0x01 or 0x02")
    start = name.encode() + _NAME_END
    filled = arrow.filled(values)
    if filled is None:
        pieces.constant(start)
        pieces.column(values)
        pieces.constant(_VALUE_END)
    else:
        made = pc.if_else(pa.array(filled), arrow.joined(start, values, _VALUE_END), NOTHING)
        pieces.column(made)


def _add_priorities(pieces: Pieces, column: Any, bad_rows: BadRows, name: str) -> None:
    """Of every row, for a topic takes messages with a priority only: 0 for null."""
    values = pc.fill_null(arrow.plain(column).cast(pa.int64()), 0)
    bad_rows.add(values.to_numpy() < 0, f"{name} is negative")
    _add(pieces, codes.Property.PRIORITY, values.cast(pa.string()).view(pa.binary()), bad_rows, name)


def _add_row_ids(pieces: Pieces, column: Any, bad_rows: BadRows, name: str) -> None:
    ids = arrow.plain(column)
    values = arrow.as_bytes(ids if pa.types.is_string(ids.type) else ids.cast(pa.string()))
    filled = arrow.filled(values)
    if filled is not None:
        bad_rows.add(~filled, f"{name} is null or empty, which identifies no row")
    _add(pieces, ROW_ID, values, bad_rows, name)


def _check_keys(column: Any, bad_rows: BadRows, name: str) -> None:
    """Brokers, tools and readers split what is stored at blanks, so that an element with one would be several keys."""
    column = arrow.plain(column)
    if not pa.types.is_list(column.type):
        return
    keys = arrow.as_bytes(column.flatten())
    split = arrow.rows_with(keys, _BLANK)
    if len(split):
        ends = np.cumsum(pc.fill_null(pc.list_value_length(column), 0).to_numpy())
        for entry, row in zip(split.tolist(), np.searchsorted(ends, split, side="right"), strict=True):
            key = keys[entry].as_py().decode("utf-8", "replace")
            bad_rows.rows(np.array([row]), f"{name} has the key {key!r}, and RocketMQ splits keys at blanks")


def keys_of(column: Any) -> pa.Array:
    """Keys as RocketMQ keeps them: one text, blanks between."""
    column = arrow.plain(column)
    if not pa.types.is_list(column.type):
        return arrow.as_bytes(column)
    keys = column.flatten()
    # Joining a list with a null in it would drop the whole list, and an empty key would leave a blank.
    if keys.null_count or bool((arrow.lengths(keys) == 0).any()):
        rows = column.to_pylist()
        return arrow.as_bytes(pa.array([None if r is None else " ".join(k for k in r if k) for r in rows], pa.string()))
    if not column.null_count and len(keys) == len(column) and bool((arrow.lengths(column) == 1).all()):
        return arrow.as_bytes(keys)
    return arrow.as_bytes(pc.binary_join(column.cast(_KEY_LIST), " "))


@functools.cache
def _reserved(more: tuple[str, ...]) -> pa.Array:
    return pa.array(sorted(name.encode() for name in (*codes.RESERVED_PROPERTIES, *more)), pa.binary())
