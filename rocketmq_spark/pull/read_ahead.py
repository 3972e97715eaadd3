"""Plain answers for a consumer that reads ahead.

``PlainRead`` ends before anything that is not plain messages from the requested offset: lost, illegal or skipped offsets, or
messages beyond the requested end. A long poll from there gets the broker's answer. An operator's reset of the group also ends
it; since only one pull of each queue receives the reset, it is noted, and the read waits for the answers to all pulls in flight
before it ends.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from itertools import groupby
from operator import itemgetter
from typing import NamedTuple

from rocketmq_spark.model import MessageQueue, OffsetRange
from rocketmq_spark.pull import reading
from rocketmq_spark.pull.fetched import FetchedAnswers
from rocketmq_spark.pull.outcomes import Cause
from rocketmq_spark.pull.pacing import MAX_PULL_DEPTH
from rocketmq_spark.pull.puller import Puller

_MIN_BYTES, _MAX_BYTES = 64 << 10, 8 << 20


_DEADLINE_S = 30.0


_NUMBER = itemgetter(0)  # of a piece: that of its range


class PlainAnswers(NamedTuple):
    """The stored messages of answers in a row from ``start`` on: next offset of each, and where its bytes end."""

    queue: MessageQueue
    start: int
    ends: list[tuple[int, int]]
    stored: bytes


class PlainRead:
    """A read of ``ranges``, all of one broker and in their order, with the ranges of a queue in a row.

    ``offsets`` and ``size`` (bytes) limit the pulls in flight, and the size of one result.
    """

    def __init__(self, puller: Puller, ranges: Sequence[OffsetRange], offsets: int, size: int) -> None:
        settings = replace(
            puller.settings,
            depth=min(MAX_PULL_DEPTH, max(1, offsets // puller.settings.batch_size)),
            max_bytes_in_flight=min(_MAX_BYTES, max(_MIN_BYTES, size)),
            fetched_rows=max(1, offsets // 2),
            grace_s=0.0,
            read_deadline_s=_DEADLINE_S,
            follows_resets=True,
        )
        self._ranges = ranges
        self._reading = reading.read(replace(puller, settings=settings), ranges, self._lost)
        self._at = {r.queue: r.start for r in reversed(ranges)}
        self._odd = False

    @property
    def whole(self) -> bool:
        """Whether the read ended at its end, or because its reader stopped."""
        return not self._odd and not self.resets

    @property
    def resets(self) -> Mapping[MessageQueue, int]:
        """Where an operator moved the group meanwhile, by queue; known when the read has ended."""
        return self._reading.resets

    def fetch(self) -> Generator[list[PlainAnswers], None, None]:
        """Yield answers until all is read, ``stop`` is called, or an answer is not plain: then ``whole`` is False.

        Raises permanent errors of a broker, and temporary ones that lasted too long.
        """
        with closing(self._reading.fetch()) as fetching:
            for fetched in fetching:
                yield self._copies(fetched)
                if self._odd:
                    return

    def stop(self) -> None:
        """End soon, also while a read waits for a broker."""
        self._reading.stop()

    def _copies(self, fetched: FetchedAnswers) -> list[PlainAnswers]:
        """Copies of the answers before the first that is not plain."""
        found = []
        view = fetched.buffer.data
        for number, of_range in groupby(fetched.pieces, key=_NUMBER):
            queue = self._ranges[number].queue
            start = at = self._at[queue]
            ends, parts, size = [], [], 0
            for _, begins_at, limit, next_offset, begin, end in of_range:
                if begins_at != at or next_offset > limit:
                    self._odd = True
                    break
                at = next_offset
                size += end - begin
                ends.append((at, size))
                parts.append(view[begin:end])
            self._at[queue] = at
            if ends:
                found.append(PlainAnswers(queue, start, ends, b"".join(parts)))
            if self._odd:
                break
        return found

    def _lost(self, part: OffsetRange, cause: Cause) -> None:
        self._odd = True
        self.stop()
