"""Limits the bytes that wait in a process for one purpose, over all of its clients and threads."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable

from rocketmq_spark.base import process

# Together 64 MiB. They have separate limits, so that no request is rejected because half messages wait for a slow function of
# the user.
REQUESTS, HALF_MESSAGES = "requests of servers", "half messages"
_LIMIT_BYTES = 32 << 20
# Large frames that arrive, by the sizes that their servers announce: answers, and what servers push.
ANSWERS, PUSHES = "answers that arrive", "requests of servers that arrive"
ANSWERS_BYTES = 512 << 20


# Added to the bytes of a decoded message; and bytes of objects for each byte of properties, which may be short and many.
OBJECT_BYTES, _PER_PROPERTY_BYTE = 512, 8


def memory_of(body_bytes: int, property_bytes: int) -> int:
    """About the memory of a decoded message, in bytes."""
    return OBJECT_BYTES + body_bytes + _PER_PROPERTY_BYTE * property_bytes


class Budget:
    """Counts claimed bytes, up to ``limit``. A larger claim succeeds only while there is no other. Thread-safe."""

    def __init__(self, limit: int = _LIMIT_BYTES) -> None:
        self.limit = limit
        self.used = 0
        self._lock = threading.RLock()  # reentrant: garbage collection may release something here

    def claim(self, size: int) -> Callable[[], None] | None:
        """Claim ``size`` bytes. Returns a function that releases them, also if called repeatedly; None above the limit."""
        with self._lock:
            if self.used and self.used + size > self.limit:
                return None
            self.used += size
        left = [size]

        def release() -> None:
            with self._lock:
                self.used -= left.pop() if left else 0

        return release


def of(purpose: str, limit: int = _LIMIT_BYTES) -> Budget:
    """The budget of this process. A forked process has its own."""
    return process.once("budgets", purpose, functools.partial(Budget, limit))
