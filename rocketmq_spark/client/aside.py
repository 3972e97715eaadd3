"""Work that may block, beside the thread that has it: one thread for each key, in the order in which work came.

A thread lives while there is work for its key, so that a host that has vanished holds up nobody but those who want it.
"""

from __future__ import annotations

import functools
import threading
from collections import deque
from collections.abc import Callable, Hashable

from rocketmq_spark.failures import start_thread


class Aside:
    """Threads by key; ``limit`` is how much may wait for one of them."""

    def __init__(self, limit: int | None = None) -> None:
        self._limit = limit
        self._lock = threading.Lock()
        self._work: dict[Hashable, deque[Callable[[], None]]] = {}

    def busy(self, key: Hashable) -> bool:
        """Whether work of ``key`` waits or is under way: what comes now must wait behind it."""
        return key in self._work

    def run(self, key: Hashable, work: Callable[[], None]) -> None:
        """Have ``work`` done soon. Raises ``RuntimeError`` when there can be no more threads, or too much waits."""
        with self._lock:
            waiting = self._work.get(key)
            if waiting is not None:
                if self._limit is not None and len(waiting) >= self._limit:
                    raise RuntimeError(f"{len(waiting)} requests wait for one thread")
                waiting.append(work)
                return
            start_thread(f"rocketmq-aside-{key}", functools.partial(self._run, key))
            self._work[key] = deque([work])

    def _run(self, key: Hashable) -> None:
        while (work := self._next(key)) is not None:
            work()

    def _next(self, key: Hashable) -> Callable[[], None] | None:
        with self._lock:
            waiting = self._work[key]
            if waiting:
                return waiting.popleft()
            del self._work[key]
            return None
