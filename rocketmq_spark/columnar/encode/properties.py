"""Properties of rows, and the rows that cannot be sent (``BadRows``).

``add_properties`` collects the properties of rows: tags, keys, the user's map, and other columns that RocketMQ stores as
properties. The form of the properties depends on the transport: for brokers, ``TextPieces`` makes property strings. ``BadRows``
collects the problems of all checks of an Arrow batch and raises them as one error.

In most DataFrames, the maps of all rows have the same names in the same order. One comparison of memory detects this case. Each
name is then a constant that is checked once, and only the values are columns.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from rocketmq_spark.base import codes
from rocketmq_spark.base.codes import ROW_ID, TRANSIENT_PROPERTY_PREFIX
from rocketmq_spark.columnar import arrow
from rocketmq_spark.columnar.arrow import EMPTY_BYTES, Ints, Mask
from rocketmq_spark.columnar.encode import buffers
from rocketmq_spark.columnar.encode.buffers import Pieces
from rocketmq_spark.errors import MessageRefused

MAX_SHOWN = 10

# The problem of bad rows: one text for all of them, or a function of the row's number in the batch.
Reason = str | Callable[[int], str]


class BadRows:
    """Bad rows with their reasons; an error shows the first ten. Subclasses replace the words that an error uses for a row and
    for the unsent rows.
    """

    noun, unsent_text, numbering_text = "row", "their Arrow batch", "Rows are counted from 0 within their partition"
    is_of_sink = True  # whether an error may advise to set an option of the sink

    def __init__(self, first_row: int = 0) -> None:
        self._first_row = first_row
        self._reasons: dict[int, str] = {}
        self._remedies: dict[str, None] = {}

    def add_remedy(self, remedy: str) -> None:
        """Add an option of the sink that would accept bad rows. The error names this option once, after the reasons."""
        if self.is_of_sink:
            self._remedies[remedy] = None

    def add(self, is_bad: npt.NDArray[np.bool_], reason: Reason) -> None:
        """Add the rows that are true in ``is_bad``. A row that was added before keeps its first reason."""
        if is_bad.any():
            self.add_rows(np.flatnonzero(is_bad), reason)

    def add_rows(self, rows: npt.NDArray[np.intp], reason: Reason) -> None:
        """Add rows by their numbers in the batch."""
        for i in rows.tolist():
            if i not in self._reasons:
                self._reasons[i] = reason if isinstance(reason, str) else reason(i)

    def reasons_by_row(self) -> list[tuple[int, str]]:
        return sorted(self._reasons.items())

    def raise_if_any(self, partition: int | None = None) -> None:
        """Raises ``MessageRefused`` if there was a bad row; rows are counted from the start of the partition."""
        if not self._reasons:
            return
        faults = self.reasons_by_row()
        noun = self.noun
        shown_text = "; ".join(f"{noun} {self._first_row + i}: {reason}" for i, reason in faults[:MAX_SHOWN])
        more_text = f"; and {len(faults) - MAX_SHOWN} more" if len(faults) > MAX_SHOWN else ""
        partition_text = "" if partition is None else f" of partition {partition}"
        raise MessageRefused(
            f"{len(faults)} {noun}s{partition_text} cannot be sent, and nothing of {self.unsent_text} was sent: "
            f"{shown_text}{more_text}",
            remedy=". ".join([self.numbering_text, *self._remedies]),
        )


# Control characters, as in ``encoding.prepare``. In UTF-8, a control character above 127 has two bytes.
_CONTROLS, _HIGH_CONTROL = bytes([*range(32), 127]), re.compile(b"\xc2[\x80-\x9f]")


def rows_with_controls(values: pa.Array) -> Ints:
    """The indexes of the values that have a control character; a Proxy rejects such values in properties."""
    data, ends = arrow.data_and_offsets(values)
    if not has_controls(bytes(data[int(ends[0]) : int(ends[-1])])):
        return np.empty(0, np.int64)
    return np.array([i for i, value in enumerate(values.to_pylist()) if value and has_controls(value)], np.int64)


def has_controls(data: bytes) -> bool:
    return len(data.translate(None, _CONTROLS)) < len(data) or (
        not data.isascii() and _HIGH_CONTROL.search(data) is not None
    )


_NAME_END, _VALUE_END = b"\x01", b"\x02"
_SEPARATORS = _NAME_END + _VALUE_END
# If rows have more properties than this, the names of the rows are not compared with each other.
_MAX_SHARED_NAMES = 16


class PropertyPieces(Protocol):
    """Collects the properties of all rows, name by name. ``lengths`` are the lengths of the property strings, which brokers
    limit.
    """

    lengths: Ints

    def add_property(self, name: bytes, values: pa.Array, is_filled: Mask | None = None) -> None:
        """Add a property to each row, or only to the rows where ``is_filled`` is true. The added values are not null, and not
        empty.
        """

    def add_entries(self, names: pa.Array, values: pa.Array, bounds: Ints) -> None:
        """Add the properties between two consecutive ``bounds`` to each row."""


class TextPieces(Pieces):
    """Property strings: ``name 0x01 value 0x02``. There is no escaping: a separator inside a value would split the value."""

    def add_property(self, name: bytes, values: pa.Array, is_filled: Mask | None = None) -> None:
        start = name + _NAME_END
        if is_filled is None:
            self.add_constant(start)
            self.add_column(values)
            self.add_constant(_VALUE_END)
        else:
            self.add_column(pc.if_else(pa.array(is_filled), buffers.joined(start, values, _VALUE_END), EMPTY_BYTES))

    def add_entries(self, names: pa.Array, values: pa.Array, bounds: Ints) -> None:
        self.add_column(buffers.merged_parts(buffers.joined(names, _NAME_END, values, _VALUE_END), bounds))


def add_map(
    pieces: PropertyPieces, column: Any, bad_rows: BadRows, reserved_names: pa.Array, must_sort: bool = False
) -> None:
    """Add the entries of each row's map of properties. With ``must_sort``, the entries of a row are sorted by name. Null values
    are omitted, as in Java.
    """
    column = arrow.one_array(column)
    if column.null_count:  # a null map may have hidden entries
        column = pc.if_else(column.is_valid(), column, pa.scalar([], column.type))
    entry_offsets = arrow.offsets(column)
    first_entry, end_entry = int(entry_offsets[0]), int(entry_offsets[-1])
    if first_entry == end_entry:
        return
    names, values = (
        arrow.as_bytes(column.keys[first_entry:end_entry]),
        arrow.as_bytes(column.items[first_entry:end_entry]),
    )
    bounds = (entry_offsets - first_entry).astype(np.int64)
    entries_per_row = _common_entries_per_row(names, bounds) if not values.null_count else 0
    if entries_per_row:
        _add_entries_of_same_names(pieces, names[:entries_per_row], values, bad_rows, reserved_names, must_sort)
        return
    if must_sort and (order := _order_by_name(names, bounds)) is not None:
        names, values = names.take(order), values.take(order)
    _add_entries(pieces, names, values, bounds, bad_rows, reserved_names)


def _common_entries_per_row(names: pa.Array, bounds: Ints) -> int:
    """The number of entries of every row, if all rows have the same names in the same order; otherwise 0."""
    rows = len(bounds) - 1
    entries_per_row = int(bounds[1])
    if (
        not 0 < entries_per_row <= _MAX_SHARED_NAMES
        or entries_per_row * rows != len(names)
        or bool((np.diff(bounds) != entries_per_row).any())
    ):
        return 0
    data, ends = arrow.data_and_offsets(names)
    start, size = int(ends[0]), int(ends[entries_per_row] - ends[0])
    sizes = np.diff(ends).reshape(rows, entries_per_row)
    has_same_sizes = len(data) >= start + size * rows and bool((sizes == sizes[0]).all())
    return (
        entries_per_row
        if has_same_sizes and bytes(data[start : start + size * rows]) == bytes(data[start : start + size]) * rows
        else 0
    )


def _add_entries_of_same_names(
    pieces: PropertyPieces,
    names: pa.Array,
    values: pa.Array,
    bad_rows: BadRows,
    reserved_names: pa.Array,
    must_sort: bool,
) -> None:
    entries_per_row, rows = len(names), len(values) // len(names)
    all_rows, faults = np.arange(rows), _name_faults(names, reserved_names)
    for reason in faults.values():
        bad_rows.add_rows(all_rows, reason)
    bad_entries = arrow.rows_with(values, _SEPARATORS)
    bad_rows.add_rows(bad_entries // entries_per_row, "a property's value contains the separator 0x01 or 0x02")
    for entry in np.flatnonzero(arrow.lengths(values) == 0):
        bad_rows.add_rows(
            np.array([entry // entries_per_row]), _empty_value_reason(names[int(entry) % entries_per_row])
        )
    legal_names = [(i, name) for i, name in enumerate(names.to_pylist()) if i not in faults]
    for i, name in sorted(legal_names, key=lambda each: each[1]) if must_sort else legal_names:
        pieces.add_property(
            name, values if entries_per_row == 1 else values.take(pa.array(np.arange(i, len(values), entries_per_row)))
        )


def _add_entries(
    pieces: PropertyPieces, names: pa.Array, values: pa.Array, bounds: Ints, bad_rows: BadRows, reserved_names: pa.Array
) -> None:
    if values.null_count:
        is_present = arrow.to_mask(values.is_valid())
        bounds = np.concatenate(([0], np.cumsum(is_present)))[bounds]
        names, values = names.filter(pa.array(is_present)), values.filter(pa.array(is_present))
    faults = _name_faults(names, reserved_names)
    for entry in arrow.rows_with(values, _SEPARATORS).tolist():
        faults.setdefault(entry, "a property's value contains the separator 0x01 or 0x02")
    for entry in np.flatnonzero(arrow.lengths(values) == 0).tolist():
        faults.setdefault(entry, _empty_value_reason(names[entry]))
    for entry, reason in faults.items():
        row = np.searchsorted(bounds, [entry], side="right") - 1
        bad_rows.add_rows(row, reason)
    pieces.add_entries(names, values, bounds)


def _order_by_name(names: pa.Array, bounds: Ints) -> pa.Array | None:
    """The order in which each row's entries are sorted by name; None if the entries are already sorted."""
    encoded_names = names.dictionary_encode()
    distinct_names = encoded_names.dictionary.to_pylist()
    ranks = np.empty(len(distinct_names), np.int64)
    ranks[sorted(range(len(distinct_names)), key=distinct_names.__getitem__)] = np.arange(len(distinct_names))
    rows = np.repeat(np.arange(len(bounds) - 1), np.diff(bounds))
    row_and_name_ranks = rows * len(distinct_names) + ranks[encoded_names.indices.to_numpy()]
    return (
        None
        if bool((np.diff(row_and_name_ranks) >= 0).all())
        else pa.array(np.argsort(row_and_name_ranks, kind="stable"))
    )


def _empty_value_reason(name: pa.Scalar) -> str:
    text = name.as_py().decode("utf-8", "replace")
    return f"property {text!r} is empty; brokers drop empty properties, null omits the property"


def _name_faults(names: pa.Array, reserved_names: pa.Array) -> dict[int, str]:
    """The problem of each entry's name."""
    faults = {int(i): "a property has an empty name" for i in np.flatnonzero(arrow.lengths(names) == 0)}
    for entry in arrow.rows_with(names, _SEPARATORS).tolist():
        faults.setdefault(entry, "a property's name contains the separator 0x01 or 0x02")
    is_reserved = pc.or_(pc.is_in(names, reserved_names), pc.starts_with(names, TRANSIENT_PROPERTY_PREFIX))
    for entry in np.flatnonzero(arrow.to_mask(is_reserved)).tolist():
        name = names[entry].as_py().decode("utf-8", "replace")
        faults.setdefault(entry, f"a property has a name that is RocketMQ's own, such as {name}")
    return faults


MESSAGE_ID = "messageid"

_KEY_SEPARATOR = codes.KEY_SEPARATOR.encode()
_KEY_LIST = pa.list_(pa.string())
_TEXT_PROPERTIES = (
    ("tags", codes.Property.TAGS),
    ("shardingkey", codes.Property.SHARDING_KEY),
)


def add_properties(
    pieces: PropertyPieces,
    batch: pa.RecordBatch,
    columns: Mapping[str, str],
    bad_rows: BadRows,
    must_sort: bool = False,
) -> None:
    """Add all properties except message ids and delays. With ``must_sort``, equal maps become equal strings."""
    for column, name in _TEXT_PROPERTIES:
        if column in columns:
            _add_filled(pieces, name, arrow.as_bytes(batch.column(columns[column])), bad_rows, columns[column])
    if "keys" in columns:
        _check_keys(batch.column(columns["keys"]), bad_rows, columns["keys"])
        _add_filled(pieces, codes.Property.KEYS, keys_of(batch.column(columns["keys"])), bad_rows, columns["keys"])
    if "priority" in columns:
        _add_priorities(pieces, batch.column(columns["priority"]), bad_rows, columns["priority"])
    if MESSAGE_ID in columns:
        _add_row_ids(pieces, batch.column(columns[MESSAGE_ID]), bad_rows, columns[MESSAGE_ID])
    if "properties" in columns:
        added_names = (ROW_ID,) if MESSAGE_ID in columns else ()
        add_map(pieces, batch.column(columns["properties"]), bad_rows, _reserved_names(added_names), must_sort)


def add_delays(
    pieces: PropertyPieces, batch: pa.RecordBatch, columns: Mapping[str, str], bad_rows: BadRows
) -> Mask | None:
    """Add the delay property of each delayed row. Returns which rows are delayed, or None if no row is delayed."""
    values_by_column = _delay_values(batch, columns)
    if not values_by_column:
        return None
    delay_counts = np.zeros(len(batch), np.int64)
    for name, values in values_by_column.items():
        bad_rows.add(values < 0, f"{columns[name]} is negative")
        bad_rows.add(values > codes.LONGEST_DELAY_MS, f"{columns[name]} is more than {codes.LONGEST_DELAY_MS}")
        delay_counts += values != 0
    bad_rows.add(delay_counts > 1, f"more than one of {', '.join(columns[n] for n in values_by_column)} delays the row")
    if not delay_counts.any():
        return None
    for name, values in values_by_column.items():
        pieces.add_property(
            _DELAY_NAMES[name].encode(), pa.array(values).cast(pa.string()).view(pa.binary()), values > 0
        )
    has_delay: Mask = delay_counts > 0
    return has_delay


# Columns that need the timers of brokers.
TIMER_COLUMNS = ("delayms", "deliverat")
_DELAY_NAMES = {
    "delaylevel": codes.Property.DELAY,
    "delayms": codes.Property.TIMER_DELAY_MS,
    "deliverat": codes.Property.TIMER_DELIVER_MS,
}


def _delay_values(batch: pa.RecordBatch, columns: Mapping[str, str]) -> dict[str, Ints]:
    return {name: _numbers(batch.column(columns[name]), name) for name in _DELAY_NAMES if name in columns}


def any_delay(batch: pa.RecordBatch, columns: Mapping[str, str]) -> bool:
    return any(bool(values.any()) for values in _delay_values(batch, columns).values())


def _numbers(column: Any, name: str) -> Ints:
    """The values as levels or milliseconds; 0 for null."""
    values = pc.fill_null(arrow.one_array(column).cast(pa.int64()), 0).to_numpy()
    if name == "deliverat":  # microseconds, rounded up so that no message is early
        values = -(-values // 1000)
    numbers: Ints = values
    return numbers


def _add_filled(pieces: PropertyPieces, name: str, values: pa.Array, bad_rows: BadRows, column: str) -> None:
    """Add a property to all rows in which it is neither null nor empty."""
    bad_rows.add_rows(arrow.rows_with(values, _NAME_END + _VALUE_END), f"{column} contains the separator 0x01 or 0x02")
    pieces.add_property(name.encode(), values, arrow.non_empty_mask(values))


def _add_priorities(pieces: PropertyPieces, column: Any, bad_rows: BadRows, name: str) -> None:
    """Add a priority to every row, because a priority topic accepts only messages with a priority. Rows without a value get
    priority 0.
    """
    values = pc.fill_null(arrow.one_array(column).cast(pa.int64()), 0)
    bad_rows.add(values.to_numpy() < 0, f"{name} is negative")
    bad_rows.add(values.to_numpy() >> 31 > 0, f"{name} takes more than 31 bits")
    _add_filled(pieces, codes.Property.PRIORITY, values.cast(pa.string()).view(pa.binary()), bad_rows, name)


def _add_row_ids(pieces: PropertyPieces, column: Any, bad_rows: BadRows, name: str) -> None:
    ids = arrow.one_array(column)
    values = arrow.as_bytes(ids if pa.types.is_string(ids.type) else ids.cast(pa.string()))
    is_filled = arrow.non_empty_mask(values)
    if is_filled is not None:
        bad_rows.add(~is_filled, f"{name} is null or empty, which identifies no row")
    for row in arrow.non_utf8_rows(values):
        bad_rows.add_rows(np.array([row]), f"{name} is not UTF-8, and readers could not tell it from other ids")
    _add_filled(pieces, ROW_ID, values, bad_rows, name)


def _check_keys(column: Any, bad_rows: BadRows, name: str) -> None:
    """Reject keys with blanks: brokers, tools and readers split the stored text at blanks, so a key with a blank would become
    several keys.
    """
    column = arrow.one_array(column)
    if not pa.types.is_list(column.type):
        return
    keys = arrow.as_bytes(column.flatten())
    keys_with_blanks = arrow.rows_with(keys, _KEY_SEPARATOR)
    if len(keys_with_blanks):
        ends = np.cumsum(pc.fill_null(pc.list_value_length(column), 0).to_numpy())
        for entry, row in zip(
            keys_with_blanks.tolist(), np.searchsorted(ends, keys_with_blanks, side="right"), strict=True
        ):
            key = keys[entry].as_py().decode("utf-8", "replace")
            bad_rows.add_rows(np.array([row]), f"{name} has the key {key!r}, and RocketMQ splits keys at blanks")


def keys_of(column: Any) -> pa.Array:
    """Keys as RocketMQ stores them: one text with blanks between them."""
    column = arrow.one_array(column)
    if not pa.types.is_list(column.type):
        return arrow.as_bytes(column)
    keys = arrow.as_bytes(column.flatten())
    # If a list with a null were joined, the whole result would be null. An empty key would leave a blank.
    if keys.null_count or bool((arrow.lengths(keys) == 0).any()):
        # The keys are read as bytes, because a key need not be UTF-8.
        rows = column.cast(pa.list_(pa.binary())).to_pylist()
        return pa.array([None if r is None else _KEY_SEPARATOR.join(k for k in r if k) for r in rows], pa.binary())
    if not column.null_count and len(keys) == len(column) and bool((arrow.lengths(column) == 1).all()):
        return keys
    return arrow.as_bytes(pc.binary_join(column.cast(_KEY_LIST), " "))


@functools.cache
def _reserved_names(added_names: tuple[str, ...]) -> pa.Array:
    return pa.array(sorted(name.encode() for name in (*codes.RESERVED_PROPERTIES, *added_names)), pa.binary())
