"""Encoded bytes of rows, joined from columns and constants. Pure.

``Pieces`` and ``joined`` join pieces row by row. A join costs a few nanoseconds per piece and row, whatever the size of the
pieces. To have fewer pieces, numpy joins adjacent parts of equal width into one piece, and adjacent constants are merged.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from rocketmq_spark.columnar.arrow import EMPTY_BYTES, Ints, data_and_offsets, lengths


def arrow_copy(data: memoryview) -> memoryview:
    """A copy of the bytes in memory of Arrow. Arrow reuses its pages, but each large ``bytes`` would get new pages."""
    buffer = pa.allocate_buffer(len(data))
    np.frombuffer(buffer, np.uint8)[:] = np.frombuffer(data, np.uint8)
    return memoryview(buffer)


def fixed_width_column(rows: npt.NDArray[np.uint8]) -> pa.Array:
    """Rows of equal width as a binary column, without a copy."""
    count, width = rows.shape
    ends = np.arange(count + 1, dtype=np.int32) * np.int32(width)
    return pa.Array.from_buffers(pa.binary(), count, [None, pa.py_buffer(ends), pa.py_buffer(rows)])


class Pieces:
    """Collects the pieces of rows in order, and the sum of their lengths in each row."""

    def __init__(self, row_count: int) -> None:
        self.lengths: Ints = np.zeros(row_count, np.int64)
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

    def extend(self, pieces: Pieces) -> None:
        """Add all pieces of another ``Pieces`` with the same number of rows."""
        for piece in pieces._pieces:
            if isinstance(piece, bytes):
                self.add_constant(piece)
            else:
                self.add_column(piece)

    def joined(self) -> pa.Array:
        """The joined rows; a row is null if one of its pieces is."""
        return joined(*self._pieces)

    def split(self) -> tuple[bytes, list[pa.Array | bytes]]:
        """The constant that every row starts with, and the pieces after it."""
        first_piece = self._pieces[0] if self._pieces else None
        return (first_piece, self._pieces[1:]) if isinstance(first_piece, bytes) else (b"", self._pieces[:])


def joined(*parts: pa.Array | bytes) -> pa.Array:
    """Joins columns and constants row by row; a row is null if one of its parts is."""
    return pc.binary_join_element_wise(
        *[pa.scalar(p, pa.binary()) if isinstance(p, bytes) else p for p in parts], EMPTY_BYTES
    )


def merged_parts(parts: pa.Array, bounds: npt.NDArray[np.integer]) -> pa.Array:
    """Merges the parts between two consecutive ``bounds`` into one value. The bytes of these parts are adjacent, so only the
    offsets are new.
    """
    data, ends = data_and_offsets(parts)
    value_offsets = np.ascontiguousarray(ends[bounds] if len(parts) else np.zeros(len(bounds)), np.int32)
    return pa.Array.from_buffers(pa.binary(), len(bounds) - 1, [None, pa.py_buffer(value_offsets), pa.py_buffer(data)])
