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
    """Offsets ``[start, end)`` of the range with number ``number``."""

    number: int
    start: int
    end: int


class PendingOffsets:
    """Slots of all ranges, given out lowest first. False when nothing is missing any more."""

    def __init__(self, ranges: Sequence[OffsetRange]) -> None:
        self._ranges = len(ranges)
        self._todo = [PendingRange(i, r.start, r.end) for i, r in enumerate(ranges) if r.size > 0]
        self._parked: list[tuple[float, PendingRange]] = []
        self._in_flight: dict[int, PendingRange] = {}
        self._asked = 0

    def __bool__(self) -> bool:
        return bool(self._todo or self._parked or self._in_flight)

    @property
    def todo(self) -> bool:
        """Whether something may be asked for at once."""
        return bool(self._todo)

    @property
    def in_flight(self) -> int:
        return len(self._in_flight)

    @property
    def asked(self) -> int:
        """How many offsets are under way."""
        return self._asked

    @property
    def next_due(self) -> float | None:
        """When the first parked slot may be tried again."""
        return self._parked[0][0] if self._parked else None

    def send(self, opaque: int, count: int, max_slots: int = 1) -> list[PendingRange]:
        """Take the lowest offsets of what is to be asked for, as ``max_slots`` slots of ``count`` or as many as there
        are; they are under way with the numbers from ``opaque`` on."""
        slots: list[PendingRange] = []
        while self._todo and len(slots) < max_slots:
            number, start, end = self._todo[0]
            limit = start + count * (max_slots - len(slots))
            if limit < end:
                heapq.heapreplace(self._todo, PendingRange(number, limit, end))
            else:
                limit = end
                heapq.heappop(self._todo)
            ends = chain(range(start + count, limit, count), (limit,))
            slots += map(PendingRange._make, zip(repeat(number), range(start, limit, count), ends, strict=False))
            self._asked += limit - start
        self._in_flight.update(zip(range(opaque, opaque + len(slots)), slots, strict=True))
        return slots

    def answered(self, opaque: int) -> PendingRange | None:
        """What was asked with this number; None if no range waits for it."""
        slot = self._in_flight.pop(opaque, None)
        if slot is not None:
            self._asked -= slot.end - slot.start
        return slot

    def put(self, slot: PendingRange) -> None:
        """To be asked for at once. An empty slot is nothing."""
        if slot.start < slot.end:
            heapq.heappush(self._todo, slot)

    def park(self, slot: PendingRange, due: float) -> None:
        heapq.heappush(self._parked, (due, slot))

    def unpark(self, now: float) -> None:
        while self._parked and self._parked[0][0] <= now:
            self.put(heapq.heappop(self._parked)[1])

    def recall(self) -> None:
        """Nothing is under way any more: the connection is gone."""
        for slot in self._in_flight.values():
            self.put(slot)
        self._in_flight.clear()
        self._asked = 0

    def cut(self, gone: PendingRange) -> list[PendingRange]:
        """Give up what is missing within ``gone``; the parts that were, in order, neighbours joined."""
        cut: list[PendingRange] = []

        def rest(slot: PendingRange) -> Iterator[PendingRange]:
            if slot.number != gone.number or slot.end <= gone.start or gone.end <= slot.start:
                yield slot
                return
            cut.append(PendingRange(slot.number, max(slot.start, gone.start), min(slot.end, gone.end)))
            if slot.start < gone.start:
                yield slot._replace(end=gone.start)
            if gone.end < slot.end:
                yield slot._replace(start=gone.end)

        self._todo = [part for slot in self._todo for part in rest(slot)]
        self._parked = [(due, part) for due, slot in self._parked for part in rest(slot)]
        for opaque, slot in list(self._in_flight.items()):
            left = list(rest(slot))
            if left != [slot]:
                self.answered(opaque)
                self._todo += left
        heapq.heapify(self._todo)
        heapq.heapify(self._parked)
        return _joined(cut)

    def claim(self, slot: PendingRange, end: int) -> PendingRange:
        """What of the offsets before ``end`` is missing right behind ``slot``, which was answered, together with it: no longer
        missing.
        """
        high = slot.end
        for part in self.cut(PendingRange(slot.number, high, end)):
            if part.start == high:
                high = part.end
            else:
                self.put(part)
        return slot._replace(end=high)

    def misses_before(self, slot: PendingRange) -> bool:
        """Whether something of the same range and below ``slot`` is missing."""
        at = slot[:2]
        return any(other[0] == at[0] and other[:2] < at for other in (*self._todo, *self._lowest()))

    def frontier(self) -> tuple[int, int]:
        """Range and offset of the first that is missing; everything before it is there or lost."""
        return min((slot[:2] for slot in self._lowest()), default=(self._ranges, 0))

    def _lowest(self) -> Iterator[PendingRange]:
        """Of what is to be asked for only the lowest: enough to find the first of all."""
        yield from self._todo[:1]
        yield from self._in_flight.values()
        yield from (slot for _, slot in self._parked)


def _joined(slots: list[PendingRange]) -> list[PendingRange]:
    joined: list[PendingRange] = []
    for slot in sorted(slots):
        if joined and joined[-1].end == slot.start:
            joined[-1] = joined[-1]._replace(end=slot.end)
        else:
            joined.append(slot)
    return joined
