"""Arrow columns as buffers: bytes, offsets, lengths, joined pieces, Java's hashes, and columns cut from received bytes. Pure.

``Pieces`` and ``joined`` join parts row by row. A join costs a few nanoseconds per piece and row whatever its size, so
pieces of equal width are made by numpy, and adjacent constants are merged.

``slices`` cuts a column out of a buffer: Arrow makes one copy per value, Python none. An Arrow array over the whole buffer
with the offsets ``0, start, end, start, end, …`` has the requested slices as its odd elements, and one ``take`` extracts
them. The other elements, whose offsets may decrease, are never read.

``hash_codes`` is Java's string hash of a whole column at once. A string's hash is a sum of products, so one running sum over all
code units of the column gives every hash as the difference of two entries; 32-bit arithmetic that wraps is what Java does too.

Columns are made from buffers because ``pa.array`` would import pandas, which takes more than 0.1 s.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from rocketmq_spark.errors import DecodeError, OptionError

Bytes = npt.NDArray[np.uint8]
Ints = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]

# Not made by ``pa.scalar``, which imports pandas to check the type of its argument: a quarter of a second in every process.
EMPTY_BYTES = pa.Array.from_buffers(pa.binary(), 1, [None, pa.py_buffer(bytes(8)), pa.py_buffer(b"")])[0]
_ONE_ZERO = np.zeros(1, np.int32)


def combined(column: Any) -> pa.Array:
    """A column as one array."""
    return column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column


def as_bytes(column: Any) -> pa.Array:
    """A text or binary column as binary, without a copy."""
    column = combined(column)
    if pa.types.is_binary(column.type):
        return column
    return column.view(pa.binary()) if pa.types.is_string(column.type) else column.cast(pa.binary())


def offsets(array: pa.Array) -> npt.NDArray[np.int32]:
    return np.frombuffer(array.buffers()[1], np.int32, len(array) + 1, array.offset * 4) if len(array) else _ONE_ZERO


def lengths(array: pa.Array) -> Ints:
    return np.diff(offsets(array)).astype(np.int64)


def data_and_offsets(array: pa.Array) -> tuple[memoryview, npt.NDArray[np.int32]]:
    """Bytes of a binary array and offsets into them."""
    data = array.buffers()[2]
    return memoryview(data) if data is not None else memoryview(b""), offsets(array)


def copied(data: memoryview) -> memoryview:
    """A copy of the bytes in Arrow's memory, which reuses its pages, while a large ``bytes`` gets new pages each time."""
    own = pa.allocate_buffer(len(data))
    np.frombuffer(own, np.uint8)[:] = np.frombuffer(data, np.uint8)
    return memoryview(own)


def fixed_width(rows: npt.NDArray[np.uint8]) -> pa.Array:
    """Rows of equal width as a binary column, without a copy."""
    count, width = rows.shape
    ends = np.arange(count + 1, dtype=np.int32) * np.int32(width)
    return pa.Array.from_buffers(pa.binary(), count, [None, pa.py_buffer(ends), pa.py_buffer(rows)])


def to_mask(array: Any) -> Mask:
    """A boolean array without nulls as numpy."""
    flags: Mask = array.to_numpy(zero_copy_only=False)
    return flags


def null_mask(array: pa.Array) -> Mask | None:
    """Which rows are null; None if no row is."""
    return to_mask(array.is_null()) if array.null_count else None


def non_empty_mask(array: pa.Array) -> Mask | None:
    """Which rows are neither null nor empty; None if all rows are."""
    here: Mask = lengths(array) > 0
    missing = null_mask(array)
    if missing is not None:
        here &= ~missing
    return None if here.all() else here


def rows_with(values: pa.Array, wanted: bytes) -> npt.NDArray[np.intp]:
    """The numbers of the rows that contain any of the bytes in ``wanted``."""
    data, ends = data_and_offsets(values)
    if len(ends) < 2:
        return np.zeros(0, np.intp)
    used = bytes(data[int(ends[0]) : int(ends[-1])])
    if all(used.find(byte) < 0 for byte in wanted):
        return np.zeros(0, np.intp)
    places = np.flatnonzero(np.isin(np.frombuffer(used, np.uint8), np.frombuffer(wanted, np.uint8))) + ends[0]
    rows: npt.NDArray[np.intp] = np.searchsorted(ends, places, side="right") - 1
    return rows


def is_utf8(data: bytes) -> bool:
    """Whether bytes are UTF-8."""
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return True


def non_utf8_rows(values: pa.Array) -> list[int]:
    """The indexes of the values that are not UTF-8. Spark does not check ``cast(slices as string)``."""
    data, ends = data_and_offsets(values)
    used = bytes(data[int(ends[0]) : int(ends[-1])])
    if used.isascii():
        return []
    first = np.frombuffer(used, np.uint8)[(ends[:-1] - ends[0])[np.diff(ends) > 0]]
    if is_utf8(used) and not bool(
        (first & 0xC0 == 0x80).any()
    ):  # and no value begins inside a character of the previous value
        return []
    return [i for i, value in enumerate(values.to_pylist()) if value is not None and not is_utf8(value)]


class Pieces:
    """Collects the pieces of rows in order, and the sum of their lengths in each row."""

    def __init__(self, rows: int) -> None:
        self.lengths: Ints = np.zeros(rows, np.int64)
        self._pieces: list[pa.Array | bytes] = []

    def add_constant(self, data: bytes) -> None:
        """Add the same bytes to every row."""
        self.lengths += len(data)
        if self._pieces and isinstance(self._pieces[-1], bytes):
            data = self._pieces.pop() + data
        self._pieces.append(data)

    def add_column(self, values: pa.Array) -> None:
        """Add a binary column without nulls."""
        self.lengths += lengths(values)
        self._pieces.append(values)

    def extend(self, other: Pieces) -> None:
        """Add all pieces of another ``Pieces`` with the same number of rows."""
        for piece in other._pieces:
            if isinstance(piece, bytes):
                self.add_constant(piece)
            else:
                self.add_column(piece)

    def joined(self) -> pa.Array:
        """The joined rows; a row is null if one of its pieces is."""
        return joined(*self._pieces)

    def split(self) -> tuple[bytes, list[pa.Array | bytes]]:
        """The constant that every row starts with, and the pieces after it."""
        first = self._pieces[0] if self._pieces else None
        return (first, self._pieces[1:]) if isinstance(first, bytes) else (b"", self._pieces[:])


def joined(*parts: pa.Array | bytes) -> pa.Array:
    """Joins columns and constants row by row; a row is null if one of its parts is."""
    return pc.binary_join_element_wise(
        *[pa.scalar(p, pa.binary()) if isinstance(p, bytes) else p for p in parts], EMPTY_BYTES
    )


def regrouped(parts: pa.Array, bounds: npt.NDArray[np.integer]) -> pa.Array:
    """Merges the parts between two consecutive ``bounds`` into one value. Their bytes are adjacent, so only the offsets are
    new.
    """
    data, ends = data_and_offsets(parts)
    whole = np.ascontiguousarray(ends[bounds] if len(parts) else np.zeros(len(bounds)), np.int32)
    return pa.Array.from_buffers(pa.binary(), len(bounds) - 1, [None, pa.py_buffer(whole), pa.py_buffer(data)])


_ODD_NUMBERS: list[pa.Array] = [pa.nulls(0, pa.int64())]


def odd_numbers(count: int) -> pa.Array:
    """1, 3, 5, … as an Arrow array."""
    if len(_ODD_NUMBERS[0]) < count:
        _ODD_NUMBERS[0] = integers(np.arange(1, max(1 << 15, 4 * count), 2, dtype=np.int64), pa.int64())
    return _ODD_NUMBERS[0][:count]


# Positions in Arrow's binary arrays have 32 bits.
_MAX_BYTES = (1 << 31) - 1


def slices(buffer: Any, starts: Ints, ends: Ints) -> pa.Array:
    """``buffer[start:end]`` of every row as a binary array."""
    count = len(starts)
    if count == 0:
        return pa.nulls(0, pa.binary())
    if len(buffer) > _MAX_BYTES:
        buffer, starts, ends = _with_narrow_offsets(buffer, starts, ends)
    offsets = np.empty(2 * count + 1, np.int32)
    offsets[0] = 0
    offsets[1::2] = starts
    offsets[2::2] = ends
    laid = pa.Array.from_buffers(pa.binary(), 2 * count, [None, pa.py_buffer(offsets), pa.py_buffer(buffer)])
    return pc.take(laid, odd_numbers(count), boundscheck=False)


def _with_narrow_offsets(buffer: Any, starts: Ints, ends: Ints) -> tuple[Any, Ints, Ints]:
    """The same slices, relative to the part of the buffer that contains them."""
    low, high = int(starts.min()), int(ends.max())
    if high - low > _MAX_BYTES:
        raise DecodeError(
            f"{high - low} bytes of messages are too many for one Arrow array, which has at most {_MAX_BYTES}",
            remedy="Lower option 'maxBytesInFlight'",
        )
    return buffer[low:high], starts - low, ends - low


def array_and_offsets(array: pa.Array) -> tuple[Bytes, npt.NDArray[np.int32]]:
    """Bytes and offsets of a binary array whose first row begins at 0."""
    _, offsets, content = array.buffers()
    positions = np.frombuffer(offsets, np.int32, len(array) + 1, array.offset * 4)
    return np.frombuffer(content, np.uint8) if content is not None else np.empty(0, np.uint8), positions


def validity_bitmap(present: Mask) -> pa.Buffer:
    return pa.py_buffer(np.packbits(present, bitorder="little"))


def valid_mask(column: pa.Array) -> Mask:
    """Which rows are not null."""
    if not column.null_count:
        return np.ones(len(column), bool)
    bits = np.unpackbits(np.frombuffer(column.buffers()[0], np.uint8), bitorder="little")
    return bits[column.offset : column.offset + len(column)].astype(bool)


def true_mask(column: pa.Array) -> Mask:
    """Which rows are true; null counts as false. Arrow's own conversion to numpy would import pandas."""
    bits = np.unpackbits(np.frombuffer(column.buffers()[1], np.uint8), bitorder="little")
    return bits[column.offset : column.offset + len(column)].astype(bool) & valid_mask(column)


def to_strings(array: pa.Array, present: Mask | None, ascii_only: bool) -> pa.Array:
    """A binary array as text, null where not ``valid_mask``; bytes that are not UTF-8 become replacement characters."""
    _, offsets, content = array.buffers()
    if not ascii_only and not _is_all_utf8(array):
        return pa.array(
            [
                value.decode("utf-8", "replace") if present is None or present[i] else None
                for i, value in enumerate(array.to_pylist())
            ],
            pa.string(),
        )
    bitmap = None if present is None else validity_bitmap(present)
    return pa.Array.from_buffers(pa.string(), len(array), [bitmap, offsets, content], offset=array.offset)


def _is_all_utf8(array: pa.Array) -> bool:
    try:
        array.cast(pa.string())
    except pa.ArrowInvalid:
        return False
    return True


def repeated(value: str, count: int) -> pa.Array:
    """A column with one value in every row."""
    return _tiled((value,), count)


class _Tiles:
    """Cache of repeated texts, because the batches of one query repeat the same few."""

    def __init__(self, keep: int = 64) -> None:
        self._made: dict[tuple[str, ...], pa.Array] = {}
        self._keep = keep

    def __call__(self, values: tuple[str, ...], times: int) -> pa.Array:
        array = self._made.get(values)
        if array is None or len(array) < times * len(values):
            if len(self._made) >= self._keep:
                self._made.clear()
            array = self._made[values] = _tile(values, max(times, 1 << 14))
        return array[: times * len(values)]


def _tile(values: tuple[str, ...], times: int) -> pa.Array:
    encoded = [value.encode() for value in values]
    lengths = np.tile(np.array([len(value) for value in encoded], np.int32), times)
    offsets = np.zeros(len(lengths) + 1, np.int32)
    np.cumsum(lengths, out=offsets[1:])
    content = pa.py_buffer(b"".join(encoded) * times)
    return pa.Array.from_buffers(pa.string(), len(lengths), [None, pa.py_buffer(offsets), content])


_tiled = _Tiles()


def tiled(values: tuple[str, ...], times: int) -> pa.Array:
    """``values`` in order, repeated ``times`` times."""
    return _tiled(values, times)


def integers(values: npt.NDArray[Any], kind: pa.DataType) -> pa.Array:
    """A number or timestamp column over the native bytes of ``values``, without a copy."""
    return pa.Array.from_buffers(kind, len(values), [None, pa.py_buffer(values)])


def null_column(kind: pa.DataType, count: int) -> pa.Array:
    return pa.nulls(count, kind)


_HEX = np.array([ord(a) | ord(b) << 8 for a in "0123456789ABCDEF" for b in "0123456789ABCDEF"], np.uint16)


def hexadecimal(rows: Bytes) -> pa.Array:
    """Upper-case hex text of each row of a 2-d byte array."""
    count, width = rows.shape
    content = np.ascontiguousarray(_HEX[rows])
    offsets = np.arange(count + 1, dtype=np.int32) * (2 * width)
    offsets = offsets.astype(np.int32)
    return pa.Array.from_buffers(pa.string(), count, [None, pa.py_buffer(offsets), pa.py_buffer(content)])


def hash_codes(strings: Any) -> npt.NDArray[np.int32]:
    """``String.hashCode`` of each text; ``to_strings`` is a pyarrow string array, a numpy array or a sequence of str."""
    if hasattr(strings, "combine_chunks"):  # a chunked array
        return _concatenated([hash_codes(chunk) for chunk in strings.chunks])
    if hasattr(strings, "buffers"):
        return _hash_arrow(strings)
    return _hash_texts(strings)


def _concatenated(parts: list[npt.NDArray[np.int32]]) -> npt.NDArray[np.int32]:
    return np.concatenate(parts) if parts else np.zeros(0, np.int32)


def _hash_texts(texts: Sequence[str]) -> npt.NDArray[np.int32]:
    if any(text is None for text in texts):
        raise OptionError("cannot hash None: every row needs a key")
    items = [str(text) for text in texts]
    ends = np.cumsum(np.fromiter(map(len, items), np.int64, len(items)))
    joined = "".join(items)
    if joined.isascii():
        return _hashes(np.frombuffer(joined.encode("ascii"), np.uint8), np.concatenate(([0], ends)))
    points = np.frombuffer(joined.encode("utf-32-le", "surrogatepass"), np.uint32)
    units = np.frombuffer(joined.encode("utf-16-le", "surrogatepass"), np.uint16)
    return _hashes(units, _unit_offsets(1 + (points > 0xFFFF), np.concatenate(([0], ends))))


def _hash_arrow(array: Any) -> npt.NDArray[np.int32]:
    """The hashes of a ``string`` or ``large_string`` array, computed from its buffers; also for slices."""
    if str(array.type) not in ("string", "large_string"):
        raise OptionError(f"cannot hash a column of {array.type}: expected string")
    if array.null_count:
        raise OptionError(f"cannot hash null: {array.null_count} of {len(array)} rows have no key")
    if not len(array):
        return np.zeros(0, np.int32)
    _, offset_buffer, data = array.buffers()
    kind = np.int64 if str(array.type) == "large_string" else np.int32
    offsets = np.frombuffer(offset_buffer, kind)[array.offset : array.offset + len(array) + 1].astype(np.int64)
    raw = np.frombuffer(data, np.uint8)[offsets[0] : offsets[-1]] if data is not None else np.zeros(0, np.uint8)
    offsets = offsets - offsets[0]
    if not (raw & 0x80).any():
        return _hashes(raw, offsets)
    # A UTF-8 sequence starts one UTF-16 unit, or two when it has four bytes; its other bytes start none.
    widths = ((raw & 0xC0) != 0x80).astype(np.int64) + (raw >= 0xF0)
    units = np.frombuffer(raw.tobytes().decode("utf-8").encode("utf-16-le"), np.uint16)
    return _hashes(units, _unit_offsets(widths, offsets))


def _unit_offsets(widths: npt.NDArray[Any], offsets: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Converts offsets that count elements to offsets that count UTF-16 units; ``widths`` has the units of each element."""
    return np.concatenate(([0], np.cumsum(widths, dtype=np.int64)))[offsets]


def _hashes(units: npt.NDArray[Any], offsets: npt.NDArray[np.int64]) -> npt.NDArray[np.int32]:
    """Hashes of the texts ``units[offsets[i]:offsets[i + 1]]``; the offsets start at zero and end with the units."""
    lengths = np.diff(offsets)
    powers = np.full(max(int(lengths.max(initial=0)), 1), 31, np.uint32)
    powers[0] = 1
    powers = np.cumprod(powers, dtype=np.uint32)
    to_end = np.repeat(offsets[1:], lengths) - 1 - np.arange(offsets[-1])
    terms = units.astype(np.uint32) * powers[to_end]
    sums = np.concatenate((np.zeros(1, np.uint32), np.cumsum(terms, dtype=np.uint32)))
    hashes: npt.NDArray[np.int32] = (sums[offsets[1:]] - sums[offsets[:-1]]).view(np.int32)
    return hashes
