"""Single messages at given offsets, without the filter of a read: what a filter hides.

Two things cannot be told from filtered answers alone. A broker that looks beyond the end of what was asked for sends
messages that belong to others; on a queue whose index was shifted by a damaged message only the message *at* the end
says which. And one that skips index entries whose part of the commit log is gone looks as if the filter had skipped
them. Logs are removed from their front: while the first message of what was read is there, nothing behind it is gone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rocketmq_spark.clock import Clock
from rocketmq_spark.model import MessageQueue, OffsetRange
from rocketmq_spark.pull.fetched import Fetched, Hole, Piece, first_offset
from rocketmq_spark.pull.reader import RangeReader
from rocketmq_spark.pull.verdict import Cause, OnLoss

# How often a read that goes on is looked after: what retention removes in between looks as if it had been missed.
_EVERY_S = 1.0


class Heads:
    """Reads single messages of one broker's queues, with the patience of every read.

    ``sparse`` queues are those of compaction topics, where the next message stands for one that is not there.
    """

    def __init__(
        self, reader: Callable[[Sequence[OffsetRange], OnLoss], RangeReader], sparse: Callable[[MessageQueue], bool]
    ) -> None:
        self._reader = reader
        self._sparse = sparse

    def __call__(self, places: Sequence[tuple[MessageQueue, int]]) -> list[int | None]:
        """The offset that each place's message itself has; None for one that is gone."""
        ranges = [OffsetRange(queue, at, at + 1) for queue, at in places]
        gone: set[OffsetRange] = set()
        firsts: dict[int, int] = {}
        reader = self._reader(ranges, lambda part, _: gone.add(part))
        for fetched in reader.fetch():
            offsets = [first_offset(fetched.buffer, piece.begin) for piece in fetched.pieces]
            holes = [
                Hole(i, piece.start, piece.limit)
                for i, (piece, offset) in enumerate(zip(fetched.pieces, offsets, strict=True))
                if piece.next_offset > piece.limit
                and offset > piece.start  # an inner batch begins below what was asked for
                and not self._sparse(ranges[piece.number].queue)
            ]
            usable = reader.doubt(holes) if holes else len(offsets)
            firsts.update((fetched.pieces[i].number, offsets[i]) for i in range(usable))
        return [None if part in gone else firsts.get(i) for i, part in enumerate(ranges)]


def bounded(pieces: Sequence[Piece], queues: Sequence[MessageQueue], heads: Heads) -> list[Piece]:
    """Answers that went beyond their ends, with ends that are true of the offsets inside of their messages.

    An index is shifted for ever: below an end that is where it says, all are.
    """
    last = {piece.number: piece for piece in pieces}
    cuts = dict(zip(last.values(), heads([(queues[n], p.limit) for n, p in last.items()]), strict=True))
    shifted = {piece.number for piece, at in cuts.items() if at is not None and at > piece.limit}
    others = [piece for piece in pieces if piece.number in shifted and piece not in cuts]
    if others:
        cuts |= zip(others, heads([(queues[p.number], p.limit) for p in others]), strict=True)
    return [_bounded(piece, cuts.get(piece)) for piece in pieces]


def _bounded(piece: Piece, cut: int | None) -> Piece:
    if cut is None or cut <= piece.limit:
        return piece
    return piece._replace(limit=cut, next_offset=max(piece.next_offset, cut + 1))


class Edge:
    """Whether what a filtered read looked through was still there, asked now and then and at its end."""

    def __init__(
        self, ranges: Sequence[OffsetRange], heads: Heads, on_loss: OnLoss, clock: Clock | None = None
    ) -> None:
        self._ranges = ranges
        self._heads = heads
        self._on_loss = on_loss
        self._clock = clock or Clock()
        self._asked_at = self._clock.now()
        self._sure = [r.start for r in ranges]  # what lies below was there, or is lost and told
        self._first: dict[int, int] = {}  # the first message from there on

    def lost(self, part: OffsetRange, cause: Cause) -> None:
        """The read itself tells of a loss, which need not be told again."""
        for i, r in enumerate(self._ranges):
            if r.queue != part.queue or not r.start <= part.start < r.end:
                continue
            if cause is not Cause.TRUNCATED:  # what was there before cannot be asked for any more
                self._sure[i] = r.end
            elif part.start <= self._sure[i]:
                self._sure[i] = max(self._sure[i], part.end)
            if self._first.get(i, r.end) < self._sure[i]:
                del self._first[i]
        self._on_loss(part, cause)

    def read(self, fetched: Fetched) -> None:
        """Answers came: everything before the last of them was looked through."""
        for piece in fetched.pieces:
            offset = first_offset(fetched.buffer, piece.begin)
            if offset >= self._sure[piece.number]:
                self._first.setdefault(piece.number, offset)
        if fetched.pieces and self._clock.now() - self._asked_at >= _EVERY_S:
            number, _, limit, next_offset, _, _ = fetched.pieces[-1]
            self._ask([r.end for r in self._ranges[:number]] + [min(limit, next_offset)])

    def end(self) -> None:
        self._ask([r.end for r in self._ranges])

    def _ask(self, passed: Sequence[int]) -> None:
        """``passed``: how far each range was looked through."""
        open_ends = [i for i, end in enumerate(passed) if self._sure[i] < end]
        there = self._heads([(self._ranges[i].queue, self._sure[i]) for i in open_ends]) if open_ends else []
        for i, offset in zip(open_ends, there, strict=True):
            start, self._sure[i] = self._sure[i], passed[i]
            first = self._first.pop(i, passed[i])
            # What was found was there, and so was everything behind it.
            if offset is None and start < first:
                self._on_loss(OffsetRange(self._ranges[i].queue, start, min(first, passed[i])), Cause.TRUNCATED)
        self._asked_at = self._clock.now()
