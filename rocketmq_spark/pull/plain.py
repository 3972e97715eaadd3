"""Ranges as copies of plain answers, for a consumer that reads ahead and follows brokers in everything else.

It ends before anything that is not plain messages from the offset asked for: what is lost, illegal, jumped over, or goes on
beyond what was asked for. A long poll from there gets the broker's word about it.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import closing
from dataclasses import replace
from typing import NamedTuple

from rocketmq_spark.model import MessageQueue, OffsetRange
from rocketmq_spark.pull import reading
from rocketmq_spark.pull.fetched import Fetched, Piece
from rocketmq_spark.pull.pacing import DEPTH
from rocketmq_spark.pull.puller import Puller
from rocketmq_spark.pull.verdict import Cause

_MIN_BYTES, _MAX_BYTES = 64 << 10, 8 << 20
_DEADLINE_S = 30.0


class Answered(NamedTuple):
    """The stored messages of offsets ``[start, next_offset)``. The bytes are the reader's own."""

    queue: MessageQueue
    start: int
    next_offset: int
    stored: memoryview


class _Odd(Exception):
    """Not for this kind of read."""


class PlainRun:
    """A read of ``ranges``, all of one broker and in their order, a queue's ranges one behind the other.

    ``offsets`` and ``size`` (bytes) bound what is under way, and what comes at once.
    """

    def __init__(self, puller: Puller, ranges: Sequence[OffsetRange], offsets: int, size: int) -> None:
        settings = replace(
            puller.settings,
            depth=min(DEPTH, max(1, offsets // puller.settings.batch_size)),
            max_bytes_in_flight=min(_MAX_BYTES, max(_MIN_BYTES, size)),
            fetched_rows=max(1, offsets // 2),
            grace_s=0.0,
            read_deadline_s=_DEADLINE_S,
        )
        self._ranges = ranges
        self._reading = reading.read(replace(puller, settings=settings), ranges, _lost)
        self._at = {r.queue: r.start for r in reversed(ranges)}
        self.whole = True

    def fetch(self) -> Generator[list[Answered], None, None]:
        """What comes, until all is read, ``stop`` was called, or something is odd: then ``whole`` is False.

        Raises what a broker refuses for good, and what lasted.
        """
        with closing(self._reading.fetch()) as fetching:
            try:
                for fetched in fetching:
                    yield self._copies(fetched)
                    if not self.whole:
                        return
            except _Odd:
                self.whole = False

    def stop(self) -> None:
        """End soon, whoever waits for a broker now."""
        self._reading.stop()

    def _copies(self, fetched: Fetched) -> list[Answered]:
        """The answers up to the first odd one, on bytes that outlive the buffer."""
        pieces = fetched.pieces
        low, high = min(piece.begin for piece in pieces), max(piece.end for piece in pieces)
        copy = memoryview(fetched.buffer[low:high].tobytes())
        found = []
        for piece in pieces:
            queue = self._ranges[piece.number].queue
            if not self._plain(queue, piece):
                self.whole = False
                break
            self._at[queue] = piece.next_offset
            found.append(Answered(queue, piece.start, piece.next_offset, copy[piece.begin - low : piece.end - low]))
        return found

    def _plain(self, queue: MessageQueue, piece: Piece) -> bool:
        return piece.start == self._at[queue] and piece.next_offset <= piece.limit


def _lost(part: OffsetRange, cause: Cause) -> None:
    raise _Odd(part, cause)
