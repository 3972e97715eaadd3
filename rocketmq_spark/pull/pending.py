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
    """The offsets ``[start, end)`` of the range at index ``range_number``."""

    range_number: int
    start: int
    end: int


class PendingOffsets:
    """The pending offsets of all ranges, of which the lowest are requested first. The truth value is False if no offset is
    pending.
    """

    def __init__(self, ranges: Sequence[OffsetRange]) -> None:
        self._range_count = len(ranges)
        self._unrequested_ranges = [PendingRange(i, r.start, r.end) for i, r in enumerate(ranges) if r.size > 0]
        # Ranges that are requested again later, each with the time of its next attempt.
        self._waiting_ranges: list[tuple[float, PendingRange]] = []
        # The ranges that pulls in flight have requested, by the opaque number of the pull.
        self._ranges_in_flight: dict[int, PendingRange] = {}
        self._offsets_in_flight = 0

    def __bool__(self) -> bool:
        return bool(self._unrequested_ranges or self._waiting_ranges or self._ranges_in_flight)

    @property
    def has_unrequested_offsets(self) -> bool:
        """Whether there are offsets that may be requested at once."""
        return bool(self._unrequested_ranges)

    @property
    def pulls_in_flight(self) -> int:
        return len(self._ranges_in_flight)

    @property
    def offsets_in_flight(self) -> int:
        """The number of offsets that are requested and not answered."""
        return self._offsets_in_flight

    @property
    def next_retry_at(self) -> float | None:
        """The earliest time of a next attempt; None if no range waits for an attempt."""
        return self._waiting_ranges[0][0] if self._waiting_ranges else None

    def start_pulls(self, opaque: int, count: int, max_pulls: int = 1) -> list[PendingRange]:
        """Take the lowest unrequested offsets for at most ``max_pulls`` pulls of at most ``count`` messages, and mark the pulls
        as in flight. The opaque numbers of the pulls start at ``opaque``.
        """
        pulls: list[PendingRange] = []
        while self._unrequested_ranges and len(pulls) < max_pulls:
            range_number, start, end = self._unrequested_ranges[0]
            limit = start + count * (max_pulls - len(pulls))
            if limit < end:
                heapq.heapreplace(self._unrequested_ranges, PendingRange(range_number, limit, end))
            else:
                limit = end
                heapq.heappop(self._unrequested_ranges)
            ends = chain(range(start + count, limit, count), (limit,))
            pulls += map(PendingRange._make, zip(repeat(range_number), range(start, limit, count), ends, strict=False))
            self._offsets_in_flight += limit - start
        self._ranges_in_flight.update(zip(range(opaque, opaque + len(pulls)), pulls, strict=True))
        return pulls

    def finish_pull(self, opaque: int) -> PendingRange | None:
        """End the pull with this number, and return the range that it requested; None if no such pull is in flight."""
        requested_range = self._ranges_in_flight.pop(opaque, None)
        if requested_range is not None:
            self._offsets_in_flight -= requested_range.end - requested_range.start
        return requested_range

    def add(self, part: PendingRange) -> None:
        """Add offsets that are requested as soon as possible; an empty range is ignored."""
        if part.start < part.end:
            heapq.heappush(self._unrequested_ranges, part)

    def retry_at(self, part: PendingRange, time_s: float) -> None:
        """Add offsets that are requested at ``time_s``."""
        heapq.heappush(self._waiting_ranges, (time_s, part))

    def release_due_ranges(self, now: float) -> None:
        """Move ranges to the unrequested ranges when the time of their next attempt has come."""
        while self._waiting_ranges and self._waiting_ranges[0][0] <= now:
            self.add(heapq.heappop(self._waiting_ranges)[1])

    def on_connection_lost(self) -> None:
        """Move all ranges in flight to the unrequested ranges, because their answers will not come."""
        for requested_range in self._ranges_in_flight.values():
            self.add(requested_range)
        self._ranges_in_flight.clear()
        self._offsets_in_flight = 0

    def remove(self, removed_range: PendingRange) -> list[PendingRange]:
        """Remove the pending offsets within ``removed_range``. Returns the removed offsets in order, with adjacent ranges
        joined.
        """
        removed_parts: list[PendingRange] = []

        def remaining_parts(part: PendingRange) -> Iterator[PendingRange]:
            if (
                part.range_number != removed_range.range_number
                or part.end <= removed_range.start
                or removed_range.end <= part.start
            ):
                yield part
                return
            removed_parts.append(
                part._replace(start=max(part.start, removed_range.start), end=min(part.end, removed_range.end))
            )
            if part.start < removed_range.start:
                yield part._replace(end=removed_range.start)
            if removed_range.end < part.end:
                yield part._replace(start=removed_range.end)

        self._unrequested_ranges = [
            left_part for part in self._unrequested_ranges for left_part in remaining_parts(part)
        ]
        self._waiting_ranges = [
            (time_s, left_part) for time_s, part in self._waiting_ranges for left_part in remaining_parts(part)
        ]
        for opaque, requested_range in list(self._ranges_in_flight.items()):
            left_parts = list(remaining_parts(requested_range))
            if left_parts != [requested_range]:
                self.finish_pull(opaque)
                self._unrequested_ranges += left_parts
        heapq.heapify(self._unrequested_ranges)
        heapq.heapify(self._waiting_ranges)
        return _joined_ranges(removed_parts)

    def extend(self, answered_range: PendingRange, end: int) -> PendingRange:
        """Return ``answered_range`` together with the pending offsets directly after it, up to ``end``, and remove these
        offsets from the pending offsets.
        """
        extended_end = answered_range.end
        for part in self.remove(PendingRange(answered_range.range_number, extended_end, end)):
            if part.start == extended_end:
                extended_end = part.end
            else:
                self.add(part)
        return answered_range._replace(end=extended_end)

    def has_pending_offsets_before(self, part: PendingRange) -> bool:
        """Whether offsets of the same range before ``part`` are pending."""
        position = part[:2]
        return any(
            other[0] == position[0] and other[:2] < position
            for other in (*self._unrequested_ranges, *self._first_range_candidates())
        )

    def first_pending_position(self) -> tuple[int, int]:
        """Return the range number and the offset of the first pending offset. All messages before this position were received,
        or are lost.
        """
        return min((part[:2] for part in self._first_range_candidates()), default=(self._range_count, 0))

    def _first_range_candidates(self) -> Iterator[PendingRange]:
        """Yield the ranges that may begin with the first pending offset. Of the unrequested ranges, which are a heap, only the
        first is yielded.
        """
        yield from self._unrequested_ranges[:1]
        yield from self._ranges_in_flight.values()
        yield from (part for _, part in self._waiting_ranges)


def _joined_ranges(parts: list[PendingRange]) -> list[PendingRange]:
    joined_parts: list[PendingRange] = []
    for part in sorted(parts):
        if joined_parts and joined_parts[-1].end == part.start:
            joined_parts[-1] = joined_parts[-1]._replace(end=part.end)
        else:
            joined_parts.append(part)
    return joined_parts
