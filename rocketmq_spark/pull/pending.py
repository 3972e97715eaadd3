"""Offsets that are still to be read, when a failed pull is repeated, and holes in answers. Pure.

Every offset of the ranges that was neither received nor lost is in exactly one place of ``PendingOffsets``: to be asked for,
waiting for its next attempt, or under way.

``LossSuspicions`` has how long an offset has looked lost, and when to ask again. A broker skips index entries whose part of the
commit log is gone: the answer says "found", and only the number of its messages shows the gap. Decoders report such holes,
and ``HoleSuspicions`` says for how long they are asked for again.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterator, Sequence
from itertools import chain, repeat
from typing import NamedTuple

from rocketmq_spark.model import OffsetRange
from rocketmq_spark.pull.answers import FetchedAnswer, Hole

# Range number and offset.
Place = tuple[int, int]


class LossSuspicion:
    """Tries that brought nothing so far: when they began to look like loss, and the pauses between them."""

    def __init__(self, pauses: Iterator[float]) -> None:
        self.pauses = pauses
        self.suspected_at: float | None = None

    def suspected(self, now: float) -> float:
        """For how long it has looked like loss."""
        self.suspected_at = now if self.suspected_at is None else min(self.suspected_at, now)
        return now - self.suspected_at


class LossSuspicions:
    """By place, each with pauses of its own, until something comes. ``by_place`` is to be looked at only."""

    def __init__(self, grace_s: float, pauses: Callable[[], Iterator[float]]) -> None:
        self._grace_s = grace_s
        self._pauses = pauses
        self.by_place: dict[Place, LossSuspicion] = {}

    def suspect(self, place: Place, now: float, believe: bool = True) -> bool:
        """It looks like loss: whether it has for the time of grace. Without ``believe`` no answer so far counts."""
        trial = self._trial(place)
        if not believe:
            trial.suspected_at = None
        return trial.suspected(now) >= self._grace_s

    def forget(self) -> None:
        """The next answers come from elsewhere: what looks like loss still does, but no answer so far counts."""
        for trial in self.by_place.values():
            if trial.suspected_at is not None:
                trial.suspected_at = math.inf

    @property
    def suspicious(self) -> bool:
        """Whether anything looks like loss."""
        return any(trial.suspected_at is not None for trial in self.by_place.values())

    def due(self, place: Place, now: float) -> float:
        """When to ask again; each time later."""
        return now + next(self._trial(place).pauses)

    def end(self, place: Place) -> None:
        """Something came, or it is lost."""
        self.by_place.pop(place, None)

    def _trial(self, place: Place) -> LossSuspicion:
        return self.by_place.setdefault(place, LossSuspicion(self._pauses()))


class HoleSuspicions:
    """Holes by range and offset, until the broker fills them or they have been there for too long."""

    def __init__(self, grace_s: float, pauses: Callable[[], Iterator[float]]) -> None:
        self._trials = LossSuspicions(grace_s, pauses)

    def still(self, pieces: Sequence[FetchedAnswer], holes: Sequence[Hole], now: float, believe: bool) -> list[Hole]:
        """The holes that may still be filled. Without ``believe`` no answer so far counts."""
        return [
            hole for hole in holes if not self._trials.suspect((pieces[hole.piece].number, hole.start), now, believe)
        ]

    def forget(self) -> None:
        """The next answers come from elsewhere: no answer so far counts."""
        self._trials.forget()

    def again(
        self, pieces: Sequence[FetchedAnswer], doubted: Sequence[Hole], now: float
    ) -> Iterator[tuple[FetchedAnswer, float]]:
        """The answers with holes, each once, and when to ask for them again."""
        for i, hole in {hole.piece: hole for hole in reversed(doubted)}.items():
            yield pieces[i], self._trials.due((pieces[i].number, hole.start), now)


def confirmed_losses(
    holes: Sequence[Hole], doubted: Sequence[Hole], pieces: Sequence[FetchedAnswer]
) -> list[tuple[int, int, int]]:
    """Range number, start and end of what is lost before the first doubt, neighbours joined."""
    usable = doubted[0].piece if doubted else len(pieces)
    lost: list[tuple[int, int, int]] = []
    for hole in holes:
        if hole.piece >= usable:
            break
        number = pieces[hole.piece].number
        if lost and lost[-1][0] == number and lost[-1][2] == hole.start:
            lost[-1] = (number, lost[-1][1], hole.end)
        else:
            lost.append((number, hole.start, hole.end))
    return lost


def split_at_doubt(pieces: Sequence[FetchedAnswer], doubted: Sequence[Hole]) -> tuple[int, list[FetchedAnswer]]:
    """How many pieces come before the first doubt, and those without one behind it."""
    bad = {hole.piece for hole in doubted}
    usable = min(bad, default=len(pieces))
    return usable, [piece for i, piece in enumerate(pieces[usable:], usable) if i not in bad]


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
