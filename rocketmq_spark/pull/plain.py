"""Ranges as copies of plain answers, for a consumer that reads ahead and follows brokers in everything else.

It ends before anything that is not plain messages from the offset asked for: what is lost, illegal, jumped over, or goes on
beyond what was asked for. A long poll from there gets the broker's word about it. An operator's reset of the group ends it, too:
that is told to one pull only, so it is noted.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import closing
from dataclasses import replace
from itertools import groupby
from operator import itemgetter
from typing import NamedTuple

from rocketmq_spark.model import MessageQueue, OffsetRange
from rocketmq_spark.pull import reading
from rocketmq_spark.pull.fetched import Fetched
from rocketmq_spark.pull.pacing import DEPTH
from rocketmq_spark.pull.puller import Puller
from rocketmq_spark.pull.verdict import Cause, GroupReset

_MIN_BYTES, _MAX_BYTES = 64 << 10, 8 << 20
_DEADLINE_S = 30.0
_NUMBER = itemgetter(0)  # of a piece: that of its range


class PlainAnswers(NamedTuple):
    """The stored messages of answers in a row from ``start`` on: next offset of each, and where its bytes end."""

    queue: MessageQueue
    start: int
    ends: list[tuple[int, int]]
    stored: bytes


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
            follows_resets=True,
        )
        self._ranges = ranges
        self._reading = reading.read(replace(puller, settings=settings), ranges, _lost)
        self._at = {r.queue: r.start for r in reversed(ranges)}
        self.whole = True
        self.reset: tuple[MessageQueue, int] | None = None

    def fetch(self) -> Generator[list[PlainAnswers], None, None]:
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
            except GroupReset as e:
                self.whole, self.reset = False, (e.queue, e.offset)

    def stop(self) -> None:
        """End soon, whoever waits for a broker now."""
        self._reading.stop()

    def _copies(self, fetched: Fetched) -> list[PlainAnswers]:
        """The answers up to the first odd one, on bytes that outlive the buffer."""
        found = []
        view = fetched.buffer.data
        for number, of_range in groupby(fetched.pieces, key=_NUMBER):
            queue = self._ranges[number].queue
            start = at = self._at[queue]
            ends, parts, size = [], [], 0
            for _, begins_at, limit, next_offset, begin, end in of_range:
                if begins_at != at or next_offset > limit:
                    self.whole = False
                    break
                at = next_offset
                size += end - begin
                ends.append((at, size))
                parts.append(view[begin:end])
            self._at[queue] = at
            if ends:
                found.append(PlainAnswers(queue, start, ends, b"".join(parts)))
            if not self.whole:
                break
        return found


def _lost(part: OffsetRange, cause: Cause) -> None:
    raise _Odd(part, cause)
