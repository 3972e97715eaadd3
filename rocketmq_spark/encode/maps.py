"""A map column as property strings.

Most DataFrames make their maps with the same names in the same order in every row. One comparison of memory tells; then the
names are constants, only the values are columns, and the names are checked once.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from rocketmq_spark.codes import TRANSIENT_PROPERTY_PREFIX
from rocketmq_spark.columnar import arrow
from rocketmq_spark.columnar.arrow import Ints, Pieces
from rocketmq_spark.encode.bad_rows import BadRows

_SEPARATORS = b"\x01\x02"
_MAX_CONSTANT = 16


def add_map(pieces: Pieces, column: Any, bad_rows: BadRows, reserved: pa.Array) -> None:
    """The user's map of every row; null values are left out, as Java does."""
    column = arrow.plain(column)
    if column.null_count:  # a null map may own entries that nobody sees
        column = pc.if_else(column.is_valid(), column, pa.scalar([], column.type))
    first = arrow.offsets(column)
    lo, hi = int(first[0]), int(first[-1])
    if lo == hi:
        return
    names, values = arrow.as_bytes(column.keys[lo:hi]), arrow.as_bytes(column.items[lo:hi])
    width = _constant_width(names, (first - lo).astype(np.int64)) if not values.null_count else 0
    if width:
        _add_constant(pieces, names[:width], values, bad_rows, reserved)
    else:
        pieces.column(_strings(names, values, (first - lo).astype(np.int64), bad_rows, reserved))


def _constant_width(names: pa.Array, bounds: Ints) -> int:
    """How many entries every row has, if all have the same names in the same order; else 0."""
    rows = len(bounds) - 1
    width = int(bounds[1])
    if not 0 < width <= _MAX_CONSTANT or width * rows != len(names) or bool((np.diff(bounds) != width).any()):
        return 0
    data, ends = arrow.content(names)
    start, size = int(ends[0]), int(ends[width] - ends[0])
    sizes = np.diff(ends).reshape(rows, width)
    same = len(data) >= start + size * rows and bool((sizes == sizes[0]).all())
    return width if same and bytes(data[start : start + size * rows]) == bytes(data[start : start + size]) * rows else 0


def _add_constant(pieces: Pieces, names: pa.Array, values: pa.Array, bad_rows: BadRows, reserved: pa.Array) -> None:
    width, rows = len(names), len(values) // len(names)
    everywhere = np.arange(rows)
    for reason in _name_faults(names, reserved).values():
        bad_rows.rows(everywhere, reason)
    bad = arrow.rows_with(values, _SEPARATORS)
    bad_rows.rows(bad // width, "a property's value contains the separator 0x01 or 0x02")
    for entry in np.flatnonzero(arrow.lengths(values) == 0):
        bad_rows.rows(np.array([entry // width]), _empty(names[int(entry) % width]))
    for i, name in enumerate(names.to_pylist()):
        pieces.constant(name + b"\x01")
        pieces.column(values if width == 1 else values.take(pa.array(np.arange(i, len(values), width))))
        pieces.constant(b"\x02")


def _strings(names: pa.Array, values: pa.Array, bounds: Ints, bad_rows: BadRows, reserved: pa.Array) -> pa.Array:
    rows = len(bounds) - 1
    if values.null_count:
        keep = arrow.flags(values.is_valid())
        bounds = np.concatenate(([0], np.cumsum(keep)))[bounds]
        names, values = names.filter(pa.array(keep)), values.filter(pa.array(keep))
    faults = _name_faults(names, reserved)
    for entry in arrow.rows_with(values, _SEPARATORS).tolist():
        faults.setdefault(entry, "a property's value contains the separator 0x01 or 0x02")
    for entry in np.flatnonzero(arrow.lengths(values) == 0).tolist():
        faults.setdefault(entry, _empty(names[entry]))
    for entry, reason in faults.items():
        row = np.searchsorted(bounds, [entry], side="right") - 1
        bad_rows.rows(row, reason)
    items = arrow.joined(names, b"\x01", values, b"\x02")
    # The entries of a row lie together, so the row's string is there already: only its bounds are new.
    data, ends = arrow.content(items)
    whole = np.ascontiguousarray(ends[bounds] if len(items) else np.zeros(rows + 1), np.int32)
    return pa.Array.from_buffers(pa.binary(), rows, [None, pa.py_buffer(whole), pa.py_buffer(data)])


def _empty(name: pa.Scalar) -> str:
    return f"property {name.as_py().decode('utf-8', 'replace')!r} is empty; brokers drop such a one, null leaves it out"


def _name_faults(names: pa.Array, reserved: pa.Array) -> dict[int, str]:
    """What is wrong with names, by entry."""
    faults = {int(i): "a property has an empty name" for i in np.flatnonzero(arrow.lengths(names) == 0)}
    for entry in arrow.rows_with(names, _SEPARATORS).tolist():
        faults.setdefault(entry, "a property's name contains the separator 0x01 or 0x02")
    taken = pc.or_(pc.is_in(names, reserved), pc.starts_with(names, TRANSIENT_PROPERTY_PREFIX))
    for entry in np.flatnonzero(arrow.flags(taken)).tolist():
        name = names[entry].as_py().decode("utf-8", "replace")
        faults.setdefault(entry, f"a property has a name that is RocketMQ's own, such as {name}")
    return faults
