"""A timer without a thread, and the time that a test moves."""

from __future__ import annotations

import heapq
import itertools
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from rocketmq_spark.base.threads import Timer


class Time:
    """One clock for deadlines, pauses and everything that is due later."""

    def __init__(self) -> None:
        self.now = 1_000.0
        self.due: list[tuple[float, int, Timer, Callable[[], None]]] = []
        self.numbers = itertools.count()
        self.slept_ms = 0  # of the machine, which this clock has not noticed

    def monotonic(self) -> float:
        return self.now

    def advance(self, seconds: float) -> None:
        """Move time, calling what comes due on the way."""
        end = self.now + seconds
        while self.due and self.due[0][0] <= end + 1e-9:
            at, _, _, call = heapq.heappop(self.due)
            self.now = max(self.now, at)
            call()
        self.now = end

    def run_due(self) -> None:
        self.advance(0.0)


class ManualTimer(Timer):
    """A timer without a thread."""

    def __init__(self, time: Time) -> None:
        super().__init__("manual")
        self.time = time
        self.pauses: list[float] = []
        self.stopped = False  # as if its thread had died

    def with_own_thread(self, name: str) -> Timer:
        return ManualTimer(self.time)

    def now_ms(self) -> int:
        return int(self.time.now * 1000 + 1e-6)

    def lease_ms(self) -> int:
        return self.now_ms() + self.time.slept_ms

    def wall_ms(self) -> int:
        return 1_700_000_000_000 + self.now_ms()

    def pause(self, seconds: float) -> None:
        self.pauses.append(seconds)
        self.time.advance(seconds)

    def wait(self, future: Future[Any], seconds: float) -> bool:
        if not future.done():
            self.time.advance(seconds)
        return future.done()

    def wait_notified(self, changed: threading.Condition, seconds: float) -> None:
        next_due = self.time.due[0][0] - self.time.now if self.time.due else seconds
        self.time.advance(min(seconds, max(next_due, 0.0)))

    def call_later(self, seconds: float, call: Callable[[], None]) -> None:
        if not self._closed and not self.stopped:
            heapq.heappush(self.time.due, (self.time.now + seconds, next(self.time.numbers), self, call))

    def start(self) -> None:
        pass

    def drain(self, seconds: float) -> None:
        self.time.run_due()

    def close(self, wait_s: float = 5.0) -> None:
        self._closed = True
        self.time.due = [entry for entry in self.time.due if entry[2] is not self]
        heapq.heapify(self.time.due)
