"""Deadlines, pauses, and a thread that calls what is due.

Time as values: a deadline made once at the public call, and the pauses between tries.

Pure code gets ``now`` as an argument; only drivers read the clock, and those that tests move in time read it through ``Clock``.

Time and threads for producers and client instances: the clock, pauses, and one daemon thread that calls what is due.

A driver: it owns a thread and a lock, and knows nothing of messages. Tests replace it by one whose time they move.
"""

from __future__ import annotations

import contextlib
import heapq
import itertools
import random
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import dataclass
from datetime import UTC, datetime
from queue import Empty, SimpleQueue
from typing import Any, NamedTuple

from rocketmq_spark.base.threads import start_thread

_SHORTEST_S = 0.01


class Deadline(NamedTuple):
    """A point on the monotonic clock by which a call with all its retries must end. A tuple: there is one for every send."""

    at: float

    @classmethod
    def after(cls, seconds: float) -> Deadline:
        return cls(time.monotonic() + seconds)

    def remaining(self) -> float:
        """Seconds left, never below zero."""
        return max(0.0, self.at - time.monotonic())

    @property
    def expired(self) -> bool:
        return time.monotonic() >= self.at

    def pause(self, seconds: float) -> None:
        """Hold the calling thread for ``seconds``, but not past this point for long: a last try comes after it."""
        time.sleep(max(_SHORTEST_S, min(seconds, self.remaining())))

    def within(self, seconds: float) -> Deadline:
        """The earlier of this deadline and ``seconds`` from now: the share of one attempt."""
        return Deadline(min(self.at, time.monotonic() + seconds))


def epoch_ms() -> int:
    """Now, as times of messages are written."""
    return time.time_ns() // 1_000_000


def utc_text(epoch_ms: int, timespec: str = "milliseconds") -> str:
    """``2026-01-31T12:00:00.000Z``; what no calendar has, for messages may bear any number, as ``@`` and the number."""
    try:
        moment = datetime.fromtimestamp(epoch_ms / 1000, UTC)
    except (ValueError, OverflowError, OSError):
        return f"@{epoch_ms}"
    return moment.isoformat(timespec=timespec).replace("+00:00", "Z")


def wait_until(done: Callable[[], object], deadline: Deadline, every_s: float) -> bool:
    """Look every ``every_s`` seconds, and at least once, whether it is ``done``; False when ``deadline`` comes first."""
    while not done():
        if deadline.expired:
            return False
        deadline.pause(every_s)
    return True


def backoff(initial_s: float, max_s: float = 30.0, rng: random.Random | None = None) -> Iterator[float]:
    """Endless pauses in seconds: doubling up to ``max_s``, each drawn from its upper half to spread clients out."""
    rng = rng or random.Random()
    pause = initial_s
    while True:
        yield pause * (0.5 + rng.random() / 2)
        pause = min(pause * 2, max_s)


@dataclass(frozen=True, slots=True)
class Clock:
    """Time as a driver sees it, and pauses between two tries of the same thing."""

    now: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep
    pauses: Callable[[], Iterator[float]] = lambda: backoff(0.02, 1.0)


_LEASES = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)  # Linux has both, and the second one sleeps, too


class Timer:
    """Calls made later, on a thread that starts with the first of them."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()
        self._lock = threading.Lock()
        self._wakes: SimpleQueue[None] = SimpleQueue()  # a condition of Python's takes several times as long
        self._thread: threading.Thread | None = None
        self._closed = False

    def beside(self, name: str) -> Timer:
        """Another one with a thread of its own, for calls that may block."""
        return Timer(f"{self._name}-{name}")

    def now_ms(self) -> int:
        """A clock that never goes back, for intervals."""
        return time.monotonic_ns() // 1_000_000

    def lease_ms(self) -> int:
        """A clock that never goes back, and goes on while the machine sleeps: for what others give for a time, and count, too."""
        return time.clock_gettime_ns(_LEASES) // 1_000_000

    def wall_ms(self) -> int:
        """Epoch milliseconds, for what is written into messages."""
        return time.time_ns() // 1_000_000

    def pause(self, seconds: float) -> None:
        """Hold the calling thread."""
        time.sleep(seconds)

    def wait(self, future: Future[Any], seconds: float) -> bool:
        """Whether ``future`` is done within ``seconds``."""
        try:
            future.exception(seconds)
        except FutureTimeout:
            return future.done()
        return True

    def hold(self, changed: threading.Condition, seconds: float) -> None:
        """Wait until ``changed``, which the caller holds, is notified, or for ``seconds``."""
        changed.wait(seconds)

    def later(self, seconds: float, call: Callable[[], None]) -> None:
        """Call once on the thread, ``seconds`` from now; never after ``close``."""
        with self._lock:
            if self._closed:
                return
            self._start()  # before the call is noted: where there is no thread, the caller hears of it
            entry = (time.monotonic() + seconds, next(self._numbers), call)
            heapq.heappush(self._due, entry)
            is_next = self._due[0] is entry
        if is_next:
            self._wakes.put(None)

    def soon(self, call: Callable[[], None]) -> None:
        """Call once on the thread, or here where the system gives no more threads."""
        try:
            self.later(0, call)
        except RuntimeError:
            call()

    def begin(self) -> None:
        """Start the thread now, for who could do nothing about it later. Raises ``RuntimeError`` if there can be none."""
        with self._lock:
            if not self._closed:
                self._start()

    def every(self, seconds: float, call: Callable[[], None], first_s: float) -> None:
        """Call again and again, ``seconds`` after each end, whatever the call raises."""

        def turn() -> None:
            try:
                call()
            finally:
                self.later(seconds, turn)

        self.later(first_s, turn)

    def drain(self, seconds: float) -> None:
        """Wait for the calls that are due already, unless this is one of them."""
        if self._thread is None or self._thread is threading.current_thread():
            return
        drained = threading.Event()
        self.later(0, drained.set)
        drained.wait(seconds)

    def close(self, wait_s: float = 5.0) -> None:
        """Forget what was not called yet and end the thread; a call under way is waited for a moment."""
        with self._lock:
            self._closed = True
            self._due.clear()
            thread = self._thread
        self._wakes.put(None)
        if thread is not None and thread is not threading.current_thread():
            thread.join(wait_s)

    def _start(self) -> None:
        if self._thread is None:
            self._thread = start_thread(self._name, self._run)

    def _run(self) -> None:
        while (call := self._next()) is not None:
            call()

    def _next(self) -> Callable[[], None] | None:
        while True:
            with self._lock:
                if self._closed:
                    return None
                wait = self._due[0][0] - time.monotonic() if self._due else None
                if wait is not None and wait <= 0:
                    return heapq.heappop(self._due)[2]
            with contextlib.suppress(Empty):  # a wait of centuries is more than a lock takes
                self._wakes.get(timeout=None if wait is None else min(wait, threading.TIMEOUT_MAX))
