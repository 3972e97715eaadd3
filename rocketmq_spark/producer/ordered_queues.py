"""The order of what is to be sent: one thing at a time per queue, and a thing that must be sent again stays first.

While one of the things of a queue is out, or waits for its next try, the queue is muted; so nothing can overtake a
retry. Things without a queue are free. Pure: the clock is an argument, locks are the caller's.
Mirrors what Kafka's accumulator does with muted partitions; RocketMQ's Java client gives no order to pipelined sends.
"""

from __future__ import annotations

import heapq
import itertools
from collections import deque
from collections.abc import Hashable
from typing import Generic, TypeVar

T = TypeVar("T", bound=Hashable)


class OrderedQueues(Generic[T]):
    """Waiting things by queue, and those that are out; at most ``max_out`` are out at once."""

    def __init__(self, max_out: int) -> None:
        self.max_out = max_out
        self._waiting: dict[Hashable, deque[T]] = {}
        self._out: dict[T, Hashable] = {}
        self._ready: deque[Hashable] = deque()
        self._muted: list[tuple[int, int, Hashable]] = []
        self._numbers = itertools.count()

    def __len__(self) -> int:
        """Everything that is not done."""
        return len(self._out) + sum(map(len, self._waiting.values()))

    def put(self, thing: T, queue: Hashable | None = None) -> None:
        """Add ``thing`` at the end of its queue; None makes a queue of its own."""
        queue = ("free", next(self._numbers)) if queue is None else ("ordered", queue)
        known = queue in self._waiting
        self._waiting.setdefault(queue, deque()).append(thing)
        if not known:
            self._ready.append(queue)

    def take(self, now_ms: int) -> list[T]:
        """What may go out now, in the order in which queues became free."""
        while self._muted and self._muted[0][0] <= now_ms:
            self._ready.append(heapq.heappop(self._muted)[2])
        taken = []
        while self._ready and len(self._out) < self.max_out:
            queue = self._ready.popleft()
            thing = self._waiting[queue].popleft()
            self._out[thing] = queue
            taken.append(thing)
        return taken

    def done(self, thing: T) -> None:
        """``thing`` has its answer: the next one of its queue may go."""
        queue = self._out.pop(thing)
        if self._waiting[queue]:
            self._ready.append(queue)
        else:
            del self._waiting[queue]

    def shut(self, thing: T) -> list[T]:
        """``thing`` has failed for good: nothing of its queue may follow it, and what waits there is given up."""
        return list(self._waiting.pop(self._out.pop(thing)))

    def again(self, thing: T, not_before_ms: int) -> None:
        """``thing`` must be sent once more: it goes back to the front, and its queue is muted until then."""
        queue = self._out.pop(thing)
        self._waiting[queue].appendleft(thing)
        heapq.heappush(self._muted, (not_before_ms, next(self._numbers), queue))

    @property
    def blocked(self) -> bool:
        """Whether something could go out if ``max_out`` were larger."""
        return bool(self._ready)

    def drop(self) -> list[T]:
        """Give up everything that is not done and return it, what is out first."""
        dropped = [*self._out, *(thing for things in self._waiting.values() for thing in things)]
        self._out.clear()
        self._waiting.clear()
        self._ready.clear()
        self._muted.clear()
        return dropped
