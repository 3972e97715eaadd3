"""Answers that were received and not read yet, as pieces of a stream's buffer: which of them may be handed out, and what
of the buffer is still needed."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

from rocketmq_spark.pull.fetched import Piece, covered
from rocketmq_spark.pull.missing import Slot
from rocketmq_spark.remoting.bulk import BulkStream


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

    def drop(self) -> list[Slot]:
        """Bodies lived in the buffer of a stream that is gone: their offsets, to be asked for again."""
        lost = [Slot(piece.number, piece.start, min(piece.next_offset, piece.limit)) for piece in self.pieces]
        self.pieces, self.rows, self._begin = [], 0, 0
        return lost
