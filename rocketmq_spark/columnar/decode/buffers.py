"""Columns cut from received bytes. Pure.

``slices`` cuts a column out of a buffer: Arrow copies each value once, and no Python object is made per value. An Arrow array
over the whole buffer with the offsets ``0, start, end, start, end, …`` has the requested slices as its odd elements, and one
``take`` extracts them. The other elements, whose offsets may decrease, are never read.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from rocketmq_spark.columnar.arrow import Bytes, Ints, Mask, integers, valid_mask
from rocketmq_spark.errors import DecodeError

_ODD_NUMBERS: list[pa.Array] = [pa.nulls(0, pa.int64())]


def odd_numbers(count: int) -> pa.Array:
    """1, 3, 5, … as an Arrow array."""
    if len(_ODD_NUMBERS[0]) < count:
        _ODD_NUMBERS[0] = integers(np.arange(1, max(1 << 15, 4 * count), 2, dtype=np.int64), pa.int64())
    return _ODD_NUMBERS[0][:count]


# The limit of an Arrow binary array, whose offsets are signed 32-bit numbers.
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
    pieces = pa.Array.from_buffers(pa.binary(), 2 * count, [None, pa.py_buffer(offsets), pa.py_buffer(buffer)])
    return pc.take(pieces, odd_numbers(count), boundscheck=False)


def _with_narrow_offsets(buffer: Any, starts: Ints, ends: Ints) -> tuple[Any, Ints, Ints]:
    """The part of the buffer that contains all slices, and the starts and ends of the slices in this part."""
    low, high = int(starts.min()), int(ends.max())
    if high - low > _MAX_BYTES:
        raise DecodeError(
            f"{high - low} bytes of messages are too many for one Arrow array, which has at most {_MAX_BYTES}",
            remedy="Lower option 'maxBytesInFlight'",
        )
    return buffer[low:high], starts - low, ends - low


def true_mask(column: pa.Array) -> Mask:
    """Which rows are true; null counts as false. Arrow's own conversion to numpy would import pandas."""
    bits = np.unpackbits(np.frombuffer(column.buffers()[1], np.uint8), bitorder="little")
    return bits[column.offset : column.offset + len(column)].astype(bool) & valid_mask(column)


_HEX = np.array([ord(a) | ord(b) << 8 for a in "0123456789ABCDEF" for b in "0123456789ABCDEF"], np.uint16)


def hex_texts(rows: Bytes) -> pa.Array:
    """Upper-case hex text of each row of a 2-d byte array."""
    count, width = rows.shape
    content = np.ascontiguousarray(_HEX[rows])
    offsets = np.arange(count + 1, dtype=np.int32) * (2 * width)
    offsets = offsets.astype(np.int32)
    return pa.Array.from_buffers(pa.string(), count, [None, pa.py_buffer(offsets), pa.py_buffer(content)])
