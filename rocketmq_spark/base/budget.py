"""A limit of the bytes that wait in a process for one purpose, whichever client or thread they wait for."""

from __future__ import annotations

import threading
from collections.abc import Callable

from rocketmq_spark.base import process

# Together 64 MiB. They are separate, so that half messages that wait for a slow function of the user reject no other request.
REQUESTS, HALF_MESSAGES = "requests of servers", "half messages"
_LIMIT_BYTES = 32 << 20


class Budget:
    """Thread-safe. Something larger than ``limit`` waits only alone."""

    def __init__(self, limit: int = _LIMIT_BYTES) -> None:
        self.limit = limit
        self.used = 0
        self._lock = threading.RLock()  # reentrant: garbage collection may release something here

    def claim(self, size: int) -> Callable[[], None] | None:
        """Returns the function that releases ``size`` bytes again, which may be called repeatedly; None if too much waits."""
        with self._lock:
            if self.used and self.used + size > self.limit:
                return None
            self.used += size
        left = [size]

        def release() -> None:
            with self._lock:
                self.used -= left.pop() if left else 0

        return release


def of(purpose: str) -> Budget:
    """The budget of this process. A forked process has its own."""
    return process.once("budgets", purpose, Budget)
