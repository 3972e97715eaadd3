"""The one way to read ranges: for tasks, commands, and consumers that read ahead.

All readers agree which messages belong to an answer, because this module decides it. A decoder sees what an answer skips and
what it has beyond its end; ``RangesReading`` decides what that means.

``SingleMessageReader`` reads single messages without the filter of the read, for two things that filtered answers do not show. A
broker that looks beyond the requested end sends messages that belong to others; on a queue whose index was shifted by a damaged
message only the message *at* the end shows which. And a broker that skips index entries whose part of the commit log is gone
looks as if the filter had skipped them. Logs are removed from their front: while the first message of a read is there,
nothing behind it is gone.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import closing
from typing import TYPE_CHECKING

from rocketmq_spark.base.clock import Clock
from rocketmq_spark.model import NO_FILTER, Filter, MessageQueue, OffsetRange
from rocketmq_spark.pull.fetched import FetchedAnswer, FetchedAnswers, Hole, first_offset
from rocketmq_spark.pull.outcomes import Cause, OnLoss
from rocketmq_spark.pull.puller import Puller
from rocketmq_spark.pull.range_reader import RangeReader

if TYPE_CHECKING:
    from rocketmq_spark.pull.recreated import RecreatedTopics


# Interval of checks during a read: messages that retention removes between two checks count as possibly skipped.
_EVERY_S = 1.0


class SingleMessageReader:
    """Reads single messages of one broker's queues, with the patience of every read.

    ``sparse`` queues are those of compaction topics, where a missing message is replaced by the next one.
    """

    def __init__(
        self, reader: Callable[[Sequence[OffsetRange], OnLoss], RangeReader], sparse: Callable[[MessageQueue], bool]
    ) -> None:
        self._reader = reader
        self._sparse = sparse

    def __call__(self, places: Sequence[tuple[MessageQueue, int]]) -> list[int | None]:
        """The offset stored in the message at each place; None if it is gone."""
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
                and offset > piece.start  # an inner batch may begin before the requested offset
                and not self._sparse(ranges[piece.number].queue)
            ]
            usable = reader.doubt(holes) if holes else len(offsets)
            firsts.update((fetched.pieces[i].number, offsets[i]) for i in range(usable))
        return [None if part in gone else firsts.get(i) for i, part in enumerate(ranges)]


def bounded(
    pieces: Sequence[FetchedAnswer], queues: Sequence[MessageQueue], heads: SingleMessageReader
) -> list[FetchedAnswer]:
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


def _bounded(piece: FetchedAnswer, cut: int | None) -> FetchedAnswer:
    if cut is None or cut <= piece.limit:
        return piece
    return piece._replace(limit=cut, next_offset=max(piece.next_offset, cut + 1))


class FilteredReadCheck:
    """Checks during a filtered read, and at its end, that the searched offsets still existed."""

    def __init__(
        self, ranges: Sequence[OffsetRange], heads: SingleMessageReader, on_loss: OnLoss, clock: Clock | None = None
    ) -> None:
        self._ranges = ranges
        self._heads = heads
        self._on_loss = on_loss
        self._clock = clock or Clock()
        self._asked_at = self._clock.now()
        self._sure = [r.start for r in ranges]  # offsets below existed, or are reported as lost
        self._first: dict[int, int] = {}  # the first message from this offset on

    def lost(self, part: OffsetRange, cause: Cause) -> None:
        """The read itself reports a loss, so it is not reported again."""
        for i, r in enumerate(self._ranges):
            if r.queue != part.queue or not r.start <= part.start < r.end:
                continue
            if cause is not Cause.TRUNCATED:  # earlier messages cannot be requested any more
                self._sure[i] = r.end
            elif part.start <= self._sure[i]:
                self._sure[i] = max(self._sure[i], part.end)
            if self._first.get(i, r.end) < self._sure[i]:
                del self._first[i]
        self._on_loss(part, cause)

    def read(self, fetched: FetchedAnswers) -> None:
        """Answers arrived: the broker has searched everything before the last of them."""
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
        """``passed``: how far each range was searched."""
        open_ends = [i for i, end in enumerate(passed) if self._sure[i] < end]
        there = self._heads([(self._ranges[i].queue, self._sure[i]) for i in open_ends]) if open_ends else []
        for i, offset in zip(open_ends, there, strict=True):
            start, self._sure[i] = self._sure[i], passed[i]
            first = self._first.pop(i, passed[i])
            # A found message existed, and so did everything after it.
            if offset is None and start < first:
                self._on_loss(OffsetRange(self._ranges[i].queue, start, min(first, passed[i])), Cause.TRUNCATED)
        self._asked_at = self._clock.now()


def read(
    puller: Puller,
    ranges: Sequence[OffsetRange],
    on_loss: OnLoss,
    filtered: Filter = NO_FILTER,
    known: str | None = None,
    recreated: RecreatedTopics | None = None,
) -> RangesReading:
    """A read of ``ranges``, all of one broker and in their order; ``known`` is the broker's address when the read was planned.
    ``recreated`` recognises messages of topics that were created again since then; they count as lost.

    ``on_loss`` receives offsets that cannot be read any more; it may raise. ``filtered`` is what brokers filter by, for all
    queues alike: ``Puller.at_brokers``. Of batch topics they filter no single messages, only batches by the batch's own tags.
    """
    return RangesReading(puller, ranges, on_loss, filtered, known, recreated)


class RangesReading:
    """Ranges that are being read."""

    def __init__(
        self,
        puller: Puller,
        ranges: Sequence[OffsetRange],
        on_loss: OnLoss,
        filtered: Filter,
        known: str | None,
        recreated: RecreatedTopics | None,
    ) -> None:
        self.queues = [r.queue for r in ranges]
        self._compacted = puller.compacted
        self._heads: SingleMessageReader | None = None
        self._edge: FilteredReadCheck | None = None
        if filtered:
            self._heads = SingleMessageReader(functools.partial(puller.reader, known=known), puller.compacted)
            self._edge = FilteredReadCheck(ranges, self._heads, on_loss)
            on_loss = self._edge.lost
        self._reader = puller.reader(ranges, on_loss, filtered, known, recreated)

    def fetch(self) -> Generator[FetchedAnswers, None, None]:
        """All messages of the ranges, buffer by buffer. A dropped iterator closes the connection too."""
        with closing(self._reader.fetch()) as fetching:
            for fetched in fetching:
                if self._edge is not None:
                    self._edge.read(fetched)
                yield fetched
        if self._edge is not None:
            self._edge.end()

    def stop(self) -> None:
        """Make ``fetch`` end soon, from another thread, without further messages."""
        self._reader.stop()

    @property
    def resets(self) -> Mapping[MessageQueue, int]:
        """Where an operator moved the group meanwhile, by queue; known when the read has ended."""
        return self._reader.resets

    @property
    def on_holes(self) -> Callable[[Sequence[FetchedAnswer], Sequence[Hole]], int] | None:
        """``usable`` if holes matter for this read, else None."""
        return self.usable if self._heads is None else None

    def usable(self, pieces: Sequence[FetchedAnswer], holes: Sequence[Hole]) -> int:
        """The number of answers that may be used if some skip offsets; the others are requested again.

        Filters and compaction cause holes. Other holes are requested again for a while, and then count as lost.
        """
        if self._heads is not None:
            return len(pieces)
        doubted = [hole for hole in holes if not self._compacted(self.queues[pieces[hole.piece].number])]
        return self._reader.doubt(doubted) if doubted else len(pieces)

    def bounded(self, pieces: Sequence[FetchedAnswer]) -> Sequence[FetchedAnswer]:
        """Answers that went beyond their ends, with ends that are true of the offsets inside of their messages.

        Only a filter hides wrong ends; without one the ends are right.
        """
        return pieces if self._heads is None else bounded(pieces, self.queues, self._heads)
