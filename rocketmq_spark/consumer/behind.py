"""Queues of a consumer that are far behind their ends, which are read ahead: which, what of them, and when. Pure.

A long poll asks for one answer and waits for it. Where the end of a queue is known to be many answers away, the offsets of
the next ones are known too, and many pulls may be under way at once. Half of what may wait of a queue waits, the other half
is on its way.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from rocketmq_spark.consumer.assigned import Ask
from rocketmq_spark.model import MessageQueue, OffsetRange

# As many answers a queue is behind at least: for fewer no connection is made.
FAR_ANSWERS = 32
# As many answers at least are half of what may wait; below that, asking one after the other does as well.
MIN_HALF = 4
# Ranges of one read, which then begins anew: at ends that are farther away by then.
MAX_RANGES = 1024


@dataclass(frozen=True, slots=True)
class Bounds:
    """Messages of a pull, and of one queue the offsets and the bytes that may wait to be consumed.

    A read that finds no room for ``patience_s`` ends; who takes messages tells of room, and it is looked at every ``recheck_s``.
    """

    count: int
    max_waiting: int
    max_bytes: int
    patience_s: float = math.inf
    recheck_s: float | None = None

    @property
    def half(self) -> int:
        return self.max_waiting // 2


class ReadAheadQueue(Protocol):
    """One queue: ``assigned.AssignedQueue``, ``backlog.BacklogQueue``."""

    token: int
    asked: bool
    pull_at: int
    end: int | None
    broker_id: int
    retry_at: float
    calm_until: float

    @property
    def paused(self) -> bool: ...
    @property
    def waiting(self) -> int: ...
    @property
    def bytes(self) -> int: ...


@dataclass(frozen=True, slots=True)
class Stretch:
    """What is known of a queue, from the ``ask`` that would come next to its end."""

    ask: Ask
    end: int


class ReadPace(enum.Enum):
    """What a read that is under way does next."""

    GO = "go"
    WAIT = "wait"
    STOP = "stop"


def far_behind(
    places: Mapping[MessageQueue, ReadAheadQueue], now: float, bounds: Bounds, plain: Callable[[MessageQueue], bool]
) -> dict[str, list[Stretch]]:
    """By broker, the queues to be read ahead, of those that nobody asks for. Only ``plain`` ones: of a filtered queue the
    broker itself looks through hundreds of offsets for an answer, and where the next one begins cannot be known."""
    found: dict[str, list[Stretch]] = {}
    if bounds.half < MIN_HALF * bounds.count:
        return found
    for queue, place in places.items():
        if place.asked or place.paused or place.end is None or max(place.retry_at, place.calm_until) > now:
            continue
        if full(place, bounds):
            continue
        if place.end - place.pull_at >= FAR_ANSWERS * bounds.count and plain(queue):
            ask = Ask(queue, place.pull_at, place.broker_id, place.token)
            found.setdefault(queue.broker_name, []).append(Stretch(ask, place.end))
    return found


def full(place: ReadAheadQueue, bounds: Bounds) -> bool:
    """Whether there is no room for what would be on its way."""
    return place.waiting > bounds.half or place.bytes > bounds.max_bytes // 2


def ranges(stretches: Sequence[Stretch], size: int) -> list[OffsetRange]:
    """``size`` offsets of each in turn, so that no queue waits for another; not more than ``MAX_RANGES``, nor none."""
    made: list[OffsetRange] = []
    starts = [stretch.ask.offset for stretch in stretches]
    while len(made) < MAX_RANGES:
        before = len(made)
        for i, stretch in enumerate(stretches):
            if starts[i] < stretch.end:
                end = min(stretch.end, starts[i] + size)
                made.append(OffsetRange(stretch.ask.queue, starts[i], end))
                starts[i] = end
        if len(made) == before:
            break
    return made


def pace(places: Mapping[MessageQueue, ReadAheadQueue], stretches: Sequence[Stretch], bounds: Bounds) -> ReadPace:
    """Stop for a queue that was sought, paused or given up; wait while enough of one waits to be polled."""
    waits = False
    for stretch in stretches:
        place = places.get(stretch.ask.queue)
        if place is None or place.token != stretch.ask.token or place.paused:
            return ReadPace.STOP
        waits = waits or full(place, bounds)
    return ReadPace.WAIT if waits else ReadPace.GO
