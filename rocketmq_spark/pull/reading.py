"""The one way to read ranges, for tasks and for the command line: so both agree which messages belong to an answer.

Who decodes what was fetched sees what an answer jumps over and what it has beyond its end; what that means is said here.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Generator, Sequence

from rocketmq_spark.model import NO_FILTER, Filter, OffsetRange
from rocketmq_spark.pull.fetched import Fetched, Hole, Piece
from rocketmq_spark.pull.heads import Edge, Heads, bounded
from rocketmq_spark.pull.puller import Puller
from rocketmq_spark.pull.verdict import OnLoss


def read(
    puller: Puller,
    ranges: Sequence[OffsetRange],
    on_loss: OnLoss,
    filtered: Filter = NO_FILTER,
    known: str | None = None,
) -> RangesReading:
    """A read of ``ranges``, all of one broker and in their order; ``known`` is the address that the plan knew.

    ``on_loss`` is told of offsets that cannot be read any more; it may raise. ``filtered`` is what brokers filter by, for all
    queues alike: ``Puller.at_brokers``. Of batch topics they filter no single messages, only batches by the batch's own tags.
    """
    return RangesReading(puller, ranges, on_loss, filtered, known)


class RangesReading:
    """Ranges that are being read."""

    def __init__(
        self, puller: Puller, ranges: Sequence[OffsetRange], on_loss: OnLoss, filtered: Filter, known: str | None
    ) -> None:
        self.queues = [r.queue for r in ranges]
        self._compacted = puller.compacted
        self._heads: Heads | None = None
        self._edge: Edge | None = None
        if filtered:
            self._heads = Heads(functools.partial(puller.reader, known=known), puller.compacted)
            self._edge = Edge(ranges, self._heads, on_loss)
            on_loss = self._edge.lost
        self._reader = puller.reader(ranges, on_loss, filtered, known)

    def fetch(self) -> Generator[Fetched, None, None]:
        """All messages of the ranges, buffer by buffer. A dropped iterator closes the connection too."""
        for fetched in self._reader.fetch():
            if self._edge is not None:
                self._edge.read(fetched)
            yield fetched
        if self._edge is not None:
            self._edge.end()

    def stop(self) -> None:
        """Have ``fetch`` end soon, from another thread; what was not given out by then is not."""
        self._reader.stop()

    @property
    def on_holes(self) -> Callable[[Sequence[Piece], Sequence[Hole]], int] | None:
        """``usable``, where holes mean anything."""
        return self.usable if self._heads is None else None

    def usable(self, pieces: Sequence[Piece], holes: Sequence[Hole]) -> int:
        """How many of the answers at hand may be used, where some jump over offsets: the others come again.

        A filter makes holes, and so does compaction; otherwise they are doubted, and lost in the end.
        """
        if self._heads is not None:
            return len(pieces)
        doubted = [hole for hole in holes if not self._compacted(self.queues[pieces[hole.piece].number])]
        return self._reader.doubt(doubted) if doubted else len(pieces)

    def bounded(self, pieces: Sequence[Piece]) -> Sequence[Piece]:
        """Answers that went beyond their ends, with ends that are true of the offsets inside of their messages.

        Only a filter hides that; without one the ends are true.
        """
        return pieces if self._heads is None else bounded(pieces, self.queues, self._heads)
