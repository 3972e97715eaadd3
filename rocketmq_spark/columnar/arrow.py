"""Arrow columns as buffers: bytes, offsets, lengths, and pieces of rows that are joined in one go. Pure.

A join costs a few nanoseconds per piece and row, whatever its size; so pieces of equal width are made by numpy and
constants next to each other are one.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

Ints = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]

# Not by ``pa.scalar``, which imports pandas to see whether it is given some of it: a quarter of a second in every process.
NOTHING = pa.Array.from_buffers(pa.binary(), 1, [None, pa.py_buffer(bytes(8)), pa.py_buffer(b"")])[0]
_ONE_ZERO = np.zeros(1, np.int32)


def plain(column: Any) -> pa.Array:
    """A column as one array."""
    return column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column


def as_bytes(column: Any) -> pa.Array:
    """A text or binary column as binary, without a copy."""
    column = plain(column)
    if pa.types.is_binary(column.type):
        return column
    return column.view(pa.binary()) if pa.types.is_string(column.type) else column.cast(pa.binary())


def offsets(array: pa.Array) -> npt.NDArray[np.int32]:
    return np.frombuffer(array.buffers()[1], np.int32, len(array) + 1, array.offset * 4) if len(array) else _ONE_ZERO


def lengths(array: pa.Array) -> Ints:
    return np.diff(offsets(array)).astype(np.int64)


def content(array: pa.Array) -> tuple[memoryview, npt.NDArray[np.int32]]:
    """Bytes of a binary array and offsets into them."""
    data = array.buffers()[2]
    return memoryview(data) if data is not None else memoryview(b""), offsets(array)


def copied(data: memoryview) -> memoryview:
    """The same bytes in memory of their own: Arrow's, which keeps its pages, where a large ``bytes`` gets new ones each time."""
    own = pa.allocate_buffer(len(data))
    np.frombuffer(own, np.uint8)[:] = np.frombuffer(data, np.uint8)
    return memoryview(own)


def fixed(rows: npt.NDArray[np.uint8]) -> pa.Array:
    """Rows of equal width as a binary column, without a copy."""
    count, width = rows.shape
    ends = np.arange(count + 1, dtype=np.int32) * np.int32(width)
    return pa.Array.from_buffers(pa.binary(), count, [None, pa.py_buffer(ends), pa.py_buffer(rows)])


def flags(array: Any) -> Flags:
    """A boolean array without nulls as numpy."""
    flags: Flags = array.to_numpy(zero_copy_only=False)
    return flags


def nulls(array: pa.Array) -> Flags | None:
    """Which rows are null; None when none is."""
    return flags(array.is_null()) if array.null_count else None


def filled(array: pa.Array) -> Flags | None:
    """Which rows are neither null nor empty; None when all are."""
    here: Flags = lengths(array) > 0
    missing = nulls(array)
    if missing is not None:
        here &= ~missing
    return None if here.all() else here


def rows_with(values: pa.Array, wanted: bytes) -> npt.NDArray[np.intp]:
    """Rows that contain any of the bytes in ``wanted``."""
    data, ends = content(values)
    if len(ends) < 2:
        return np.zeros(0, np.intp)
    used = bytes(data[int(ends[0]) : int(ends[-1])])
    if all(used.find(byte) < 0 for byte in wanted):
        return np.zeros(0, np.intp)
    places = np.flatnonzero(np.isin(np.frombuffer(used, np.uint8), np.frombuffer(wanted, np.uint8))) + ends[0]
    rows: npt.NDArray[np.intp] = np.searchsorted(ends, places, side="right") - 1
    return rows


class Pieces:
    """What every row is joined from, in order, with the sum of the lengths."""

    def __init__(self, rows: int) -> None:
        self.lengths: Ints = np.zeros(rows, np.int64)
        self._pieces: list[pa.Array | bytes] = []

    def constant(self, data: bytes) -> None:
        """The same bytes in every row."""
        self.lengths += len(data)
        if self._pieces and isinstance(self._pieces[-1], bytes):
            data = self._pieces.pop() + data
        self._pieces.append(data)

    def column(self, values: pa.Array) -> None:
        """A binary column without nulls."""
        self.lengths += lengths(values)
        self._pieces.append(values)

    def extend(self, other: Pieces) -> None:
        """All pieces of another one, of as many rows."""
        for piece in other._pieces:
            if isinstance(piece, bytes):
                self.constant(piece)
            else:
                self.column(piece)

    def joined(self) -> pa.Array:
        """The rows; null where a piece is."""
        return joined(*self._pieces)

    def split(self) -> tuple[bytes, list[pa.Array | bytes]]:
        """The constant that every row starts with, and the pieces after it."""
        first = self._pieces[0] if self._pieces else None
        return (first, self._pieces[1:]) if isinstance(first, bytes) else (b"", self._pieces[:])


def joined(*parts: pa.Array | bytes) -> pa.Array:
    """Columns and constants row by row; null where one of them is."""
    return pc.binary_join_element_wise(
        *[pa.scalar(p, pa.binary()) if isinstance(p, bytes) else p for p in parts], NOTHING
    )
