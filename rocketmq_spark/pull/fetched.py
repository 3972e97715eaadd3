"""Answers that were received and not decoded yet: the interface to decoders.

``ReceivedAnswers`` knows which answers may be decoded and which part of the buffer is still needed. ``spans`` finds the offsets
of a stored message in the broker's index; an inner batch also has them in properties that the broker sets.
"""

from __future__ import annotations

import struct
from bisect import bisect_left
from collections.abc import Collection, Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from rocketmq_spark.base import codes
from rocketmq_spark.base.codes import SysFlag
from rocketmq_spark.remoting.bulk import BulkStream
from rocketmq_spark.wire.properties import inner_numbers

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt


_BATCH, _UNWRAP = int(codes.SysFlag.INNER_BATCH), int(codes.SysFlag.NEED_UNWRAP)


def spans(entries: Iterable[tuple[int, int, bytes]], start: int, end: int) -> list[tuple[int, int]] | None:
    """The offsets of each message of an answer that has those from ``start`` to ``end``, by its own offset, flags and
    properties. None if they are impossible, or a batch has no such properties.
    """
    found: list[tuple[int, int]] = []
    at = start
    for first, flag, text in entries:
        count = 1
        if flag & _BATCH:
            base, wrote = inner_numbers(text)
            if wrote is None and flag & _UNWRAP:
                return None
            first, count = first if base is None else base, wrote or 1
        behind = first + count
        if not at < behind <= end or (found and first < at):
            return None
        found.append((first, behind))
        at = behind
    return found


# Positions of the offset and the flags in a stored message.
_OFFSET_AT, _FLAGS_AT = 20, 36


_OFFSET = struct.Struct(">q")


_FLAGS = struct.Struct(">i")


_INNER = int(SysFlag.INNER_BATCH)


class FetchedAnswer(NamedTuple):
    """Messages of one answer: number of the range, requested offset, requested end, next offset of the broker, bytes."""

    number: int
    start: int
    limit: int
    next_offset: int
    begin: int
    end: int


class FetchedAnswers(NamedTuple):
    """Answers in one buffer, in the order of ranges and offsets. Valid until the next ones are fetched."""

    buffer: npt.NDArray[np.uint8]
    pieces: list[FetchedAnswer]


def offset_count(pieces: Iterable[FetchedAnswer]) -> int:
    """The number of offsets that the pieces cover."""
    return sum(min(piece.next_offset, piece.limit) - piece.start for piece in pieces)


def first_offset(buffer: npt.NDArray[np.uint8], begin: int) -> int:
    """The offset stored in the message at ``begin``."""
    offset: int = _OFFSET.unpack_from(buffer.data, begin + _OFFSET_AT)[0]
    return offset


def is_inner_batch(buffer: npt.NDArray[np.uint8], begin: int) -> bool:
    """Whether the message at ``begin`` is an inner batch, which is returned whole for each of its offsets."""
    return bool(_FLAGS.unpack_from(buffer.data, begin + _FLAGS_AT)[0] & _INNER)


class Hole(NamedTuple):
    """Offsets ``[start, end)`` for which the answer at index ``piece`` has no messages."""

    piece: int
    start: int
    end: int


class ReceivedAnswers:
    """``pieces`` in any order, and ``rows``, the number of offsets that they cover; the reader adds to both."""

    def __init__(self) -> None:
        self.pieces: list[FetchedAnswer] = []
        self.rows = 0
        self.lent: list[FetchedAnswer] = []  # pieces that are being decoded
        self._returned: list[FetchedAnswer] = []  # pieces given back undecoded
        self._begin = 0  # where these pieces begin in the buffer

    def add(self, piece: FetchedAnswer, rows: int) -> None:
        self.pieces.append(piece)
        self.rows += rows

    def before(self, frontier: tuple[int, int]) -> tuple[list[FetchedAnswer], list[FetchedAnswer]]:
        """The pieces before the first missing offset, in order, and the others."""
        self.pieces.sort()
        split = bisect_left(self.pieces, frontier)
        return self.pieces[:split], self.pieces[split:]

    def remove(self, pieces: Collection[FetchedAnswer]) -> None:
        """Remove pieces that must not be delivered."""
        removed = set(pieces)
        self.pieces = [piece for piece in self.pieces if piece not in removed]
        self.rows -= offset_count(pieces)

    def give_back(self, pieces: Sequence[FetchedAnswer]) -> None:
        """Return lent pieces, which are delivered again."""
        self._returned = list(pieces)

    def keep(self, rest: list[FetchedAnswer], rows: int, stream: BulkStream) -> None:
        """Keep only ``rest`` and the pieces given back. The buffer is compacted if an equal amount might not fit."""
        if self._returned:
            rest, self._returned = self._returned + rest, []
            rows = offset_count(rest)
        self.pieces, self.rows, self.lent = rest, rows, []
        if stream.full or stream.room < stream.filled - self._begin:
            moved = stream.turn((piece.begin, piece.end) for piece in self.pieces)
            self.pieces = [
                piece._replace(begin=moved[piece.begin], end=moved[piece.begin] + piece.end - piece.begin)
                for piece in self.pieces
            ]
        self._begin = stream.filled

    def drop(self) -> list[FetchedAnswer]:
        """Drop all pieces, whose stream and buffer are gone. Returns them, to be requested again."""
        lost, self.pieces, self.rows, self._begin = self.pieces, [], 0, 0
        return lost
