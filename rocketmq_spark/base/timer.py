"""Time and threads for producers and client instances: the clock, pauses, and one daemon thread that calls what is due.

A driver: it owns a thread and a lock, and knows nothing of messages. Tests replace it by one whose time they move.
"""

from __future__ import annotations

import contextlib
import heapq
import itertools
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from queue import Empty, SimpleQueue
from typing import Any

from rocketmq_spark.base.threads import start_thread

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
            # Before the call is noted: where there is no thread, or Ctrl-C comes, the caller hears of it. The thread waits
            # for the lock when it wakes; one that slept on would not be woken by later calls either.
            self._start()
            entry = (time.monotonic() + seconds, next(self._numbers), call)
            if not self._due or entry < self._due[0]:
                self._wakes.put(None)
            heapq.heappush(self._due, entry)

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
