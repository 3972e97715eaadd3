"""Arrow columns to batch bodies, without a Python step per row.

A batch item is ``total size, 0, 0, flag, body length, body, properties length, properties``. Its four parts are made as
Arrow columns and joined row by row in one go: the data buffer of the result is the batch body, and its offsets tell
where it may be cut. Rows that no broker would take are found first, all of them, so that nothing of a faulty batch is
sent.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from rocketmq_spark import codes
from rocketmq_spark.errors import MessageRefused

Ints = npt.NDArray[np.int64]

_HEAD_BYTES = 20
_OVERHEAD = _HEAD_BYTES + 2
_NAME_END, _VALUE_END = b"\x01", b"\x02"
_SHOWN = 10
_KEY_LIST = pa.list_(pa.string())
_NOTHING = pa.scalar(b"", pa.binary())


class Chunk(NamedTuple):
    """Items of one batch on the wire: their bytes and how many they are."""

    body: memoryview
    rows: int


@dataclass(frozen=True, slots=True)
class Encoded:
    """The items of an Arrow batch as a binary column, in the order of its rows."""

    items: pa.Array

    def __len__(self) -> int:
        return len(self.items)

    def take(self, rows: Any) -> Encoded:
        """Some of the items, in the order of ``rows``."""
        return Encoded(self.items.take(rows))

    def chunks(self, max_bytes: int) -> Iterator[Chunk]:
        """Cut into batches of at most ``max_bytes``; a larger single item makes a batch of its own."""
        data, offsets = _content(self.items)
        start, rows = 0, len(self)
        while start < rows:
            limit = int(offsets[start]) + max_bytes
            end = max(start + 1, int(np.searchsorted(offsets, limit, side="right")) - 1)
            yield Chunk(data[int(offsets[start]) : int(offsets[end])], end - start)
            start = end


class UniqueIds:
    """Message ids of a task: 32 hex characters, a prefix that is the task's own and a counter."""

    def __init__(self, prefix: bytes) -> None:
        if len(prefix) != 8:
            raise ValueError("the prefix of message ids has 8 bytes")
        self._prefix = np.frombuffer(prefix, np.uint8)
        self._next = 0

    def take(self, count: int) -> npt.NDArray[np.uint8]:
        """``count`` ids as rows of 32 ASCII characters."""
        raw = np.empty((count, 16), np.uint8)
        raw[:, :8] = self._prefix
        numbers = np.arange(self._next, self._next + count, dtype=">u8")
        raw[:, 8:] = numbers.view(np.uint8).reshape(count, 8)
        self._next += count
        return _HEX[raw].view(np.uint8).reshape(count, 32)


_HEX = np.array([ord(a) | ord(b) << 8 for a in "0123456789ABCDEF" for b in "0123456789ABCDEF"], np.uint16)


@dataclass(frozen=True, slots=True)
class Encoder:
    """Encodes Arrow batches whose columns are named by ``columns`` (name in the sink's table to name in the frame)."""

    columns: Mapping[str, str]
    max_message_size: int
    ids: UniqueIds

    def __call__(self, batch: pa.RecordBatch, first_row: int = 0) -> Encoded:
        """The items of ``batch``. Raises ``MessageRefused`` naming bad rows, counted from ``first_row``."""
        body = _bytes(batch.column(self.columns["body"]))
        faults = _Faults(first_row)
        self._check_bodies(body, faults)
        properties = self._properties(batch, faults)
        lengths = _lengths(properties)
        faults.add(lengths > codes.MAX_PROPERTIES_BYTES, lambda i: f"properties of {lengths[i]} bytes, 32767 at most")
        faults.raise_if_any()
        body_lengths = _lengths(body)
        sizes = body_lengths + lengths + _OVERHEAD
        head = np.zeros((len(batch), 5), ">i4")
        head[:, 0] = sizes
        head[:, 4] = body_lengths
        tails = lengths.astype(">u2")
        joined = pc.binary_join_element_wise(
            _fixed(head.view(np.uint8).reshape(len(batch), _HEAD_BYTES)),
            body,
            _fixed(tails.view(np.uint8).reshape(len(batch), 2)),
            properties,
            _NOTHING,
        )
        return Encoded(joined)

    def _check_bodies(self, body: pa.Array, faults: _Faults) -> None:
        nulls = body.is_null().to_numpy(zero_copy_only=False) if body.null_count else None
        lengths = _lengths(body)
        if nulls is not None:
            faults.add(nulls, lambda i: "body is null")
        empty = (lengths == 0) if nulls is None else (lengths == 0) & ~nulls
        faults.add(empty, lambda i: "body is empty, which brokers refuse")
        most = self.max_message_size
        faults.add(lengths > most, lambda i: f"body of {lengths[i]} bytes, option 'maxMessageSize' is {most}")

    def _properties(self, batch: pa.RecordBatch, faults: _Faults) -> pa.Array:
        parts = []
        if "properties" in self.columns:
            parts.append(_map_properties(batch.column(self.columns["properties"]), faults))
        if "tags" in self.columns:
            tags = _bytes(batch.column(self.columns["tags"]))
            parts.append(_named(codes.Property.TAGS, tags, faults, "tags"))
        if "keys" in self.columns:
            parts.append(_named(codes.Property.KEYS, _keys(batch.column(self.columns["keys"])), faults, "keys"))
        parts.append(_id_properties(self.ids.take(len(batch))))
        if len(parts) == 1:
            return parts[0]
        return pc.binary_join_element_wise(*parts, _NOTHING)


class _Faults:
    """Bad rows with their reasons; the first ten are shown."""

    def __init__(self, first_row: int) -> None:
        self._first_row = first_row
        self._found: dict[int, str] = {}

    def add(self, bad: npt.NDArray[np.bool_], reason: Callable[[int], str]) -> None:
        if bad.any():
            for i in np.flatnonzero(bad).tolist():
                self._found.setdefault(i, reason(i))

    def found(self) -> list[tuple[int, str]]:
        return sorted(self._found.items())

    def raise_if_any(self) -> None:
        if not self._found:
            return
        rows = sorted(self._found)
        shown = "; ".join(f"row {self._first_row + i}: {self._found[i]}" for i in rows[:_SHOWN])
        more = f"; and {len(rows) - _SHOWN} more" if len(rows) > _SHOWN else ""
        raise MessageRefused(
            f"{len(rows)} rows cannot be sent, and nothing of their Arrow batch was sent: {shown}{more}",
            remedy="Rows are counted from 0 within their partition",
        )


def _bytes(column: pa.Array) -> pa.Array:
    """A text or binary column as binary."""
    if isinstance(column, pa.ChunkedArray):
        column = column.combine_chunks()
    return column if pa.types.is_binary(column.type) else column.cast(pa.binary())


def _offsets(array: pa.Array) -> npt.NDArray[np.int32]:
    return np.frombuffer(array.buffers()[1], np.int32, len(array) + 1, array.offset * 4) if len(array) else _ONE_ZERO


_ONE_ZERO = np.zeros(1, np.int32)


def _lengths(array: pa.Array) -> Ints:
    return np.diff(_offsets(array)).astype(np.int64)


def _content(array: pa.Array) -> tuple[memoryview, npt.NDArray[np.int32]]:
    """Bytes of a binary array and offsets into them."""
    content = array.buffers()[2]
    return memoryview(content) if content is not None else memoryview(b""), _offsets(array)


def _fixed(rows: npt.NDArray[np.uint8]) -> pa.Array:
    """Rows of equal width as a binary column, without a copy."""
    count, width = rows.shape
    offsets = np.arange(count + 1, dtype=np.int32) * np.int32(width)
    return pa.Array.from_buffers(pa.binary(), count, [None, pa.py_buffer(offsets), pa.py_buffer(rows)])


def _id_properties(ids: npt.NDArray[np.uint8]) -> pa.Array:
    name = codes.Property.UNIQ_KEY.encode() + _NAME_END
    rows = np.empty((len(ids), len(name) + 33), np.uint8)
    rows[:, : len(name)] = np.frombuffer(name, np.uint8)
    rows[:, len(name) : -1] = ids
    rows[:, -1] = _VALUE_END[0]
    return _fixed(rows)


def _named(name: str, values: pa.Array, faults: _Faults, column: str) -> pa.Array:
    """``name 0x01 value 0x02`` for every value that is neither null nor empty, nothing for the others."""
    _check_separators(values, faults, column)
    made = pc.binary_join_element_wise(
        pa.scalar(name.encode() + _NAME_END, pa.binary()), values, pa.scalar(_VALUE_END, pa.binary()), _NOTHING
    )
    present = pc.fill_null(pc.greater(pc.binary_length(values), 0), False)
    return made if pc.all(present).as_py() else pc.if_else(present, made, _NOTHING)


def _check_separators(values: pa.Array, faults: _Faults, column: str) -> None:
    """No escaping exists: a separator inside a value would tear the properties apart."""
    data, offsets = _content(values)
    if len(offsets) < 2:
        return
    used = np.frombuffer(data, np.uint8)[offsets[0] : offsets[-1]] if len(data) else np.empty(0, np.uint8)
    places = np.flatnonzero((used == 1) | (used == 2))
    if len(places):
        rows = np.searchsorted(offsets, places + offsets[0], side="right") - 1
        bad = np.zeros(len(values), bool)
        bad[rows] = True
        faults.add(bad, lambda i: f"{column} contains the separator 0x01 or 0x02")


def _keys(column: pa.Array) -> pa.Array:
    """Keys as RocketMQ keeps them: one text, blanks between."""
    if isinstance(column, pa.ChunkedArray):
        column = column.combine_chunks()
    if pa.types.is_list(column.type):
        if column.flatten().null_count:  # joining a list with a null in it would drop the whole list
            rows = column.to_pylist()
            column = pa.array([None if r is None else " ".join(k for k in r if k) for r in rows], pa.string())
        else:
            column = pc.binary_join(column.cast(_KEY_LIST), " ")
    return _bytes(column)


@functools.cache
def _reserved() -> pa.Array:
    return pa.array(sorted(name.encode() for name in codes.RESERVED_PROPERTIES), pa.binary())


def _map_properties(column: Any, faults: _Faults) -> pa.Array:
    """The user's map of every row as a property string; null values are left out, as Java does."""
    if isinstance(column, pa.ChunkedArray):
        column = column.combine_chunks()
    first = _offsets(column)
    if column.null_count:  # a null map may own entries that nobody sees
        column = pc.if_else(column.is_valid(), column, pa.scalar([], column.type))
        first = _offsets(column)
    lo, hi = int(first[0]), int(first[-1])
    names, values = _bytes(column.keys[lo:hi]), _bytes(column.items[lo:hi])
    bounds = (first - first[0]).astype(np.int64)
    if values.null_count:
        keep = values.is_valid().to_numpy(zero_copy_only=False)
        bounds = np.concatenate(([0], np.cumsum(keep)))[bounds]
        names, values = names.filter(pa.array(keep)), values.filter(pa.array(keep))
    _check_map(names, values, bounds, faults)
    items = pc.binary_join_element_wise(
        names, pa.scalar(_NAME_END, pa.binary()), values, pa.scalar(_VALUE_END, pa.binary()), _NOTHING
    )
    # The entries of a row lie together, so the row's string is there already: only its bounds are new.
    data, offsets = _content(items)
    whole = np.ascontiguousarray(offsets[bounds] if len(items) else np.zeros(len(column) + 1), np.int32)
    return pa.Array.from_buffers(pa.binary(), len(column), [None, pa.py_buffer(whole), pa.py_buffer(data)])


def _check_map(names: pa.Array, values: pa.Array, bounds: Ints, faults: _Faults) -> None:
    rows = len(bounds) - 1

    def row_of(entries: npt.NDArray[np.intp]) -> npt.NDArray[np.bool_]:
        bad = np.zeros(rows, bool)
        bad[np.searchsorted(bounds, entries, side="right") - 1] = True
        return bad

    entry_faults = _Faults(0)
    _check_separators(names, entry_faults, "a property's name")
    _check_separators(values, entry_faults, "a property's value")
    for entry, reason in entry_faults.found():
        faults.add(row_of(np.array([entry])), lambda i, reason=reason: reason)  # type: ignore[misc]
    empty = np.flatnonzero(_lengths(names) == 0)
    if len(empty):
        faults.add(row_of(empty), lambda i: "a property has an empty name")
    reserved = pc.is_in(names, _reserved()).to_numpy(zero_copy_only=False)
    if reserved.any():
        first = names[int(np.flatnonzero(reserved)[0])].as_py().decode()
        faults.add(
            row_of(np.flatnonzero(reserved)), lambda i: f"a property has a name that is RocketMQ's own, such as {first}"
        )
