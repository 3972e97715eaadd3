"""The order of what is to be sent: one thing at a time per lane, and a thing that must be sent again stays first.

A lane is a queue whose order matters. While one of its things is out, or waits for its next try, the lane is mute; so
nothing can overtake a retry. Things without a lane are free. Pure: the clock is an argument, locks are the caller's.
Mirrors what Kafka's accumulator does with muted partitions; RocketMQ's Java client gives no order to pipelined sends.
"""

from __future__ import annotations

import heapq
import itertools
from collections import deque
from collections.abc import Hashable
from typing import Generic, TypeVar

T = TypeVar("T", bound=Hashable)


class Lanes(Generic[T]):
    """Waiting things by lane, and those that are out; at most ``window`` are out at once."""

    def __init__(self, window: int) -> None:
        self.window = window
        self._waiting: dict[Hashable, deque[T]] = {}
        self._out: dict[T, Hashable] = {}
        self._ready: deque[Hashable] = deque()
        self._mute: list[tuple[int, int, Hashable]] = []
        self._numbers = itertools.count()

    def __len__(self) -> int:
        """Everything that is not done."""
        return len(self._out) + sum(map(len, self._waiting.values()))

    def put(self, thing: T, lane: Hashable | None = None) -> None:
        """Add ``thing`` at the end of its lane; None makes a lane of its own."""
        lane = ("free", next(self._numbers)) if lane is None else ("lane", lane)
        known = lane in self._waiting
        self._waiting.setdefault(lane, deque()).append(thing)
        if not known:
            self._ready.append(lane)

    def take(self, now_ms: int) -> list[T]:
        """What may go out now, in the order in which lanes became free."""
        while self._mute and self._mute[0][0] <= now_ms:
            self._ready.append(heapq.heappop(self._mute)[2])
        taken = []
        while self._ready and len(self._out) < self.window:
            lane = self._ready.popleft()
            thing = self._waiting[lane].popleft()
            self._out[thing] = lane
            taken.append(thing)
        return taken

    def done(self, thing: T) -> None:
        """``thing`` has its answer: the next one of its lane may go."""
        lane = self._out.pop(thing)
        if self._waiting[lane]:
            self._ready.append(lane)
        else:
            del self._waiting[lane]

    def shut(self, thing: T) -> list[T]:
        """``thing`` has failed for good: nothing of its lane may follow it, and what waits there is given up."""
        return list(self._waiting.pop(self._out.pop(thing)))

    def again(self, thing: T, not_before_ms: int) -> None:
        """``thing`` must be sent once more: it goes back to the front, and its lane is mute until then."""
        lane = self._out.pop(thing)
        self._waiting[lane].appendleft(thing)
        heapq.heappush(self._mute, (not_before_ms, next(self._numbers), lane))

    @property
    def blocked(self) -> bool:
        """Whether something could go out if the window were larger."""
        return bool(self._ready)

    def drop(self) -> list[T]:
        """Give up everything that is not done and return it, what is out first."""
        dropped = [*self._out, *(thing for things in self._waiting.values() for thing in things)]
        self._out.clear()
        self._waiting.clear()
        self._ready.clear()
        self._mute.clear()
        return dropped
