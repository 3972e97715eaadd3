"""Arrow columns as buffers: bytes, offsets, lengths and masks. Pure.

Columns are made from buffers because ``pa.array`` would import pandas, which takes more than 0.1 s.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

Bytes = npt.NDArray[np.uint8]
Ints = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]

# This array is not made with ``pa.scalar``, which imports pandas: the import takes a quarter of a second in every process.
EMPTY_BYTES = pa.Array.from_buffers(pa.binary(), 1, [None, pa.py_buffer(bytes(8)), pa.py_buffer(b"")])[0]
_ONE_ZERO = np.zeros(1, np.int32)


def one_array(column: Any) -> pa.Array:
    """A column as one array."""
    return column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column


def as_bytes(column: Any) -> pa.Array:
    """A text or binary column as binary, without a copy."""
    column = one_array(column)
    if pa.types.is_binary(column.type):
        return column
    return column.view(pa.binary()) if pa.types.is_string(column.type) else column.cast(pa.binary())


def offsets(array: pa.Array) -> npt.NDArray[np.int32]:
    return np.frombuffer(array.buffers()[1], np.int32, len(array) + 1, array.offset * 4) if len(array) else _ONE_ZERO


def lengths(array: pa.Array) -> Ints:
    return np.diff(offsets(array)).astype(np.int64)


def data_and_offsets(array: pa.Array) -> tuple[memoryview, npt.NDArray[np.int32]]:
    """The data of a binary array, and the offsets into this data."""
    data = array.buffers()[2]
    return memoryview(data) if data is not None else memoryview(b""), offsets(array)


def to_mask(array: Any) -> Mask:
    """A boolean array without nulls as numpy."""
    flags: Mask = array.to_numpy(zero_copy_only=False)
    return flags


def null_mask(array: pa.Array) -> Mask | None:
    """Which rows are null; None if no row is null."""
    return to_mask(array.is_null()) if array.null_count else None


def non_empty_mask(array: pa.Array) -> Mask | None:
    """Which rows have a value that is not empty; None if all rows have such a value."""
    non_empty: Mask = lengths(array) > 0
    nulls = null_mask(array)
    if nulls is not None:
        non_empty &= ~nulls
    return None if non_empty.all() else non_empty


def rows_with(values: pa.Array, searched_bytes: bytes) -> npt.NDArray[np.intp]:
    """The row numbers of the values that contain any of the bytes in ``searched_bytes``."""
    data, ends = data_and_offsets(values)
    if len(ends) < 2:
        return np.zeros(0, np.intp)
    content = bytes(data[int(ends[0]) : int(ends[-1])])
    if all(content.find(byte) < 0 for byte in searched_bytes):
        return np.zeros(0, np.intp)
    positions = (
        np.flatnonzero(np.isin(np.frombuffer(content, np.uint8), np.frombuffer(searched_bytes, np.uint8))) + ends[0]
    )
    rows: npt.NDArray[np.intp] = np.searchsorted(ends, positions, side="right") - 1
    return rows


def is_utf8(data: bytes) -> bool:
    """Whether bytes are UTF-8."""
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return True


def non_utf8_rows(values: pa.Array) -> list[int]:
    """The indexes of the values that are not UTF-8. Spark does not check ``cast(binary as string)``."""
    data, ends = data_and_offsets(values)
    content = bytes(data[int(ends[0]) : int(ends[-1])])
    if content.isascii():
        return []
    first_bytes = np.frombuffer(content, np.uint8)[(ends[:-1] - ends[0])[np.diff(ends) > 0]]
    if is_utf8(content) and not bool((first_bytes & 0xC0 == 0x80).any()):
        # All bytes together are UTF-8, and no value begins inside a character, so each value is UTF-8.
        return []
    return [i for i, value in enumerate(values.to_pylist()) if value is not None and not is_utf8(value)]


def array_and_offsets(array: pa.Array) -> tuple[Bytes, npt.NDArray[np.int32]]:
    """Bytes and offsets of a binary array whose first row begins at 0."""
    _, offsets, content = array.buffers()
    positions = np.frombuffer(offsets, np.int32, len(array) + 1, array.offset * 4)
    return np.frombuffer(content, np.uint8) if content is not None else np.empty(0, np.uint8), positions


def validity_bitmap(is_present: Mask) -> pa.Buffer:
    return pa.py_buffer(np.packbits(is_present, bitorder="little"))


def valid_mask(column: pa.Array) -> Mask:
    """Which rows are not null."""
    if not column.null_count:
        return np.ones(len(column), bool)
    bits = np.unpackbits(np.frombuffer(column.buffers()[0], np.uint8), bitorder="little")
    return bits[column.offset : column.offset + len(column)].astype(bool)


def to_strings(array: pa.Array, is_present: Mask | None, ascii_only: bool) -> pa.Array:
    """A binary array as text. Rows where ``is_present`` is false become null, and bytes that are not UTF-8 become replacement
    characters.
    """
    _, offsets, content = array.buffers()
    if not ascii_only and not _is_all_utf8(array):
        return pa.array(
            [
                value.decode("utf-8", "replace") if is_present is None or is_present[i] else None
                for i, value in enumerate(array.to_pylist())
            ],
            pa.string(),
        )
    bitmap = None if is_present is None else validity_bitmap(is_present)
    return pa.Array.from_buffers(pa.string(), len(array), [bitmap, offsets, content], offset=array.offset)


def _is_all_utf8(array: pa.Array) -> bool:
    try:
        array.cast(pa.string())
    except pa.ArrowInvalid:
        return False
    return True


def constant_column(value: str, count: int) -> pa.Array:
    """A column with one value in every row."""
    return _tile_cache((value,), count)


class _TileCache:
    """Cache of repeated texts, because the batches of one query repeat a few texts."""

    def __init__(self, max_entries: int = 64) -> None:
        self._arrays: dict[tuple[str, ...], pa.Array] = {}
        self._max_entries = max_entries

    def __call__(self, values: tuple[str, ...], count: int) -> pa.Array:
        array = self._arrays.get(values)
        if array is None or len(array) < count * len(values):
            if len(self._arrays) >= self._max_entries:
                self._arrays.clear()
            array = self._arrays[values] = _tile(values, max(count, 1 << 14))
        return array[: count * len(values)]


def _tile(values: tuple[str, ...], count: int) -> pa.Array:
    encoded = [value.encode() for value in values]
    lengths = np.tile(np.array([len(value) for value in encoded], np.int32), count)
    offsets = np.zeros(len(lengths) + 1, np.int32)
    np.cumsum(lengths, out=offsets[1:])
    content = pa.py_buffer(b"".join(encoded) * count)
    return pa.Array.from_buffers(pa.string(), len(lengths), [None, pa.py_buffer(offsets), content])


_tile_cache = _TileCache()


def tiled_column(values: tuple[str, ...], count: int) -> pa.Array:
    """A column that repeats the sequence ``values`` ``count`` times."""
    return _tile_cache(values, count)


def integers(values: npt.NDArray[Any], kind: pa.DataType) -> pa.Array:
    """A number or timestamp column over the native bytes of ``values``, without a copy."""
    return pa.Array.from_buffers(kind, len(values), [None, pa.py_buffer(values)])


def null_column(kind: pa.DataType, count: int) -> pa.Array:
    return pa.nulls(count, kind)
