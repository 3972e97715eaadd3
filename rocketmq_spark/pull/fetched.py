"""Fetched answers to pulls and the offsets that they skip: the interface between readers and decoders.

``Collected`` holds the answers that were received and not read yet: which may be handed out, and which part of the buffer is
still needed.
"""

from __future__ import annotations

import struct
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from rocketmq_spark.base.codes import SysFlag
from rocketmq_spark.remoting.bulk import BulkStream

# Where a stored message has its offset and its flags.
_OFFSET_AT, _FLAGS_AT = 20, 36
_OFFSET = struct.Struct(">q")
_FLAGS = struct.Struct(">i")
_INNER = int(SysFlag.INNER_BATCH)


class Piece(NamedTuple):
    """Messages of one answer: range number, offset asked, end of what was asked, where the broker went on, bytes."""

    number: int
    start: int
    limit: int
    next_offset: int
    begin: int
    end: int


class Fetched(NamedTuple):
    """Answers in one buffer, in the order of ranges and offsets. Valid until more is asked for."""

    buffer: npt.NDArray[np.uint8]
    pieces: list[Piece]


def covered(pieces: Iterable[Piece]) -> int:
    """How many offsets the pieces answer."""
    return sum(min(piece.next_offset, piece.limit) - piece.start for piece in pieces)


def first_offset(buffer: npt.NDArray[np.uint8], begin: int) -> int:
    """The offset that the message at ``begin`` itself has."""
    offset: int = _OFFSET.unpack_from(buffer.data, begin + _OFFSET_AT)[0]
    return offset


def is_inner_batch(buffer: npt.NDArray[np.uint8], begin: int) -> bool:
    """Whether the message at ``begin`` is one that holds many, which come together whichever of them is asked for."""
    return bool(_FLAGS.unpack_from(buffer.data, begin + _FLAGS_AT)[0] & _INNER)


class Hole(NamedTuple):
    """Offsets ``[start, end)`` that the answer at index ``piece`` should have had messages for."""

    piece: int
    start: int
    end: int


class Collected:
    """``pieces`` in any order and ``rows``, the offsets that they answer: the reader adds to both."""

    def __init__(self) -> None:
        self.pieces: list[Piece] = []
        self.rows = 0
        self.lent: list[Piece] = []  # what is handed out
        self._returned: list[Piece] = []  # what came back of it
        self._begin = 0  # where in the buffer what is handed out begins

    def add(self, piece: Piece, rows: int) -> None:
        self.pieces.append(piece)
        self.rows += rows

    def before(self, frontier: tuple[int, int]) -> tuple[list[Piece], list[Piece]]:
        """What lies before the first offset that is missing, in order, and the rest."""
        self.pieces.sort()
        split = bisect_left(self.pieces, frontier)
        return self.pieces[:split], self.pieces[split:]

    def give_back(self, pieces: Sequence[Piece]) -> None:
        """Of what is handed out: they come again."""
        self._returned = list(pieces)

    def keep(self, rest: list[Piece], rows: int, stream: BulkStream) -> None:
        """``rest`` and what was given back are all that is left; the buffer turns where as much might not fit again."""
        if self._returned:
            rest, self._returned = self._returned + rest, []
            rows = covered(rest)
        self.pieces, self.rows, self.lent = rest, rows, []
        if stream.full or stream.room < stream.filled - self._begin:
            moved = stream.turn((piece.begin, piece.end) for piece in self.pieces)
            self.pieces = [
                piece._replace(begin=moved[piece.begin], end=moved[piece.begin] + piece.end - piece.begin)
                for piece in self.pieces
            ]
        self._begin = stream.filled

    def drop(self) -> list[Piece]:
        """Bodies lived in the buffer of a stream that is gone: what they answer is to be asked for again."""
        lost, self.pieces, self.rows, self._begin = self.pieces, [], 0, 0
        return lost
