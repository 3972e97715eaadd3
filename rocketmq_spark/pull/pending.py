"""Offsets that are still to be read. Pure.

Every offset of the ranges that was neither received nor lost is in exactly one place of ``PendingOffsets``: to be requested,
waiting for its next attempt, or in flight.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from itertools import chain, repeat
from typing import NamedTuple

from rocketmq_spark.model import OffsetRange


class PendingRange(NamedTuple):
    """Offsets ``[start, end)`` of the range at index ``range_number``."""

    range_number: int
    start: int
    end: int


class PendingOffsets:
    """The pending offsets of all ranges; the lowest are requested first. False if no offset is pending."""

    def __init__(self, ranges: Sequence[OffsetRange]) -> None:
        self._range_count = len(ranges)
        self._unrequested = [PendingRange(i, r.start, r.end) for i, r in enumerate(ranges) if r.size > 0]
        # Ranges that are requested again later, each with the time of its next attempt.
        self._waiting: list[tuple[float, PendingRange]] = []
        # By the opaque number of the pull.
        self._in_flight: dict[int, PendingRange] = {}
        self._offsets_in_flight = 0

    def __bool__(self) -> bool:
        return bool(self._unrequested or self._waiting or self._in_flight)

    @property
    def has_unrequested(self) -> bool:
        """Whether there are offsets that may be requested at once."""
        return bool(self._unrequested)

    @property
    def pulls_in_flight(self) -> int:
        return len(self._in_flight)

    @property
    def offsets_in_flight(self) -> int:
        """The number of offsets that are requested and not answered."""
        return self._offsets_in_flight

    @property
    def next_retry_at(self) -> float | None:
        """The time of the first next attempt; None if no range waits for one."""
        return self._waiting[0][0] if self._waiting else None

    def start_pulls(self, opaque: int, count: int, max_pulls: int = 1) -> list[PendingRange]:
        """Take the lowest unrequested offsets for at most ``max_pulls`` pulls of at most ``count`` messages. The pulls are in
        flight from now on, with the numbers from ``opaque`` on.
        """
        pulls: list[PendingRange] = []
        while self._unrequested and len(pulls) < max_pulls:
            number, start, end = self._unrequested[0]
            limit = start + count * (max_pulls - len(pulls))
            if limit < end:
                heapq.heapreplace(self._unrequested, PendingRange(number, limit, end))
            else:
                limit = end
                heapq.heappop(self._unrequested)
            ends = chain(range(start + count, limit, count), (limit,))
            pulls += map(PendingRange._make, zip(repeat(number), range(start, limit, count), ends, strict=False))
            self._offsets_in_flight += limit - start
        self._in_flight.update(zip(range(opaque, opaque + len(pulls)), pulls, strict=True))
        return pulls

    def finish_pull(self, opaque: int) -> PendingRange | None:
        """Return what the pull with this number requested; None if it is not in flight."""
        requested = self._in_flight.pop(opaque, None)
        if requested is not None:
            self._offsets_in_flight -= requested.end - requested.start
        return requested

    def add(self, part: PendingRange) -> None:
        """Add offsets that are requested as soon as possible. An empty range adds nothing."""
        if part.start < part.end:
            heapq.heappush(self._unrequested, part)

    def retry_at(self, part: PendingRange, time_s: float) -> None:
        """Add offsets that are requested at ``time_s``."""
        heapq.heappush(self._waiting, (time_s, part))

    def release_due(self, now: float) -> None:
        """Make the ranges whose next attempt is due unrequested."""
        while self._waiting and self._waiting[0][0] <= now:
            self.add(heapq.heappop(self._waiting)[1])

    def connection_lost(self) -> None:
        """Make all offsets in flight unrequested: no answer comes any more."""
        for requested in self._in_flight.values():
            self.add(requested)
        self._in_flight.clear()
        self._offsets_in_flight = 0

    def remove(self, removed: PendingRange) -> list[PendingRange]:
        """Remove the pending offsets within ``removed``. Returns them in order, with neighbours joined."""
        removed_parts: list[PendingRange] = []

        def remaining(part: PendingRange) -> Iterator[PendingRange]:
            if part.range_number != removed.range_number or part.end <= removed.start or removed.end <= part.start:
                yield part
                return
            removed_parts.append(part._replace(start=max(part.start, removed.start), end=min(part.end, removed.end)))
            if part.start < removed.start:
                yield part._replace(end=removed.start)
            if removed.end < part.end:
                yield part._replace(start=removed.end)

        self._unrequested = [left for part in self._unrequested for left in remaining(part)]
        self._waiting = [(time_s, left) for time_s, part in self._waiting for left in remaining(part)]
        for opaque, requested in list(self._in_flight.items()):
            left_parts = list(remaining(requested))
            if left_parts != [requested]:
                self.finish_pull(opaque)
                self._unrequested += left_parts
        heapq.heapify(self._unrequested)
        heapq.heapify(self._waiting)
        return _joined(removed_parts)

    def extend(self, answered: PendingRange, end: int) -> PendingRange:
        """Return ``answered`` together with the pending offsets directly after it, up to ``end``. They are no longer pending."""
        extended_end = answered.end
        for part in self.remove(PendingRange(answered.range_number, extended_end, end)):
            if part.start == extended_end:
                extended_end = part.end
            else:
                self.add(part)
        return answered._replace(end=extended_end)

    def has_pending_before(self, part: PendingRange) -> bool:
        """Whether offsets of the same range before ``part`` are pending."""
        position = part[:2]
        return any(
            other[0] == position[0] and other[:2] < position for other in (*self._unrequested, *self._candidates())
        )

    def first_pending(self) -> tuple[int, int]:
        """Range number and offset of the first pending offset: everything before it was received, or is lost."""
        return min((part[:2] for part in self._candidates()), default=(self._range_count, 0))

    def _candidates(self) -> Iterator[PendingRange]:
        """The ranges among which the first pending one is: of the unrequested ones, the top of the heap is enough."""
        yield from self._unrequested[:1]
        yield from self._in_flight.values()
        yield from (part for _, part in self._waiting)


def _joined(parts: list[PendingRange]) -> list[PendingRange]:
    joined: list[PendingRange] = []
    for part in sorted(parts):
        if joined and joined[-1].end == part.start:
            joined[-1] = joined[-1]._replace(end=part.end)
        else:
            joined.append(part)
    return joined
