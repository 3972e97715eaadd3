"""Time as values: deadlines, which a public call creates once, and the pauses between attempts.

Pure code gets ``now`` as an argument. Only code that does I/O reads the clock. If tests control its time, such code reads the
clock through ``Clock``.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import NamedTuple

_MIN_PAUSE_S = 0.01
NO_TIMEOUT_S = 1e9  # stands for no timeout, because locks do not accept infinity


class Deadline(NamedTuple):
    """The time on the monotonic clock at which a call with all its retries must end. A NamedTuple, because it is cheap to
    create, and each send creates a deadline.
    """

    end_s: float

    @classmethod
    def after(cls, seconds: float) -> Deadline:
        return cls(time.monotonic() + (seconds if seconds < NO_TIMEOUT_S else NO_TIMEOUT_S))

    def remaining(self) -> float:
        """Seconds left, never below zero."""
        return max(0.0, self.end_s - time.monotonic())

    @property
    def expired(self) -> bool:
        return time.monotonic() >= self.end_s

    def pause(self, seconds: float) -> None:
        """Block the calling thread for ``seconds``, but at most until the deadline, and at least for ``_MIN_PAUSE_S``."""
        time.sleep(max(_MIN_PAUSE_S, min(seconds, self.remaining())))

    def within(self, seconds: float) -> Deadline:
        """Return the deadline of one attempt: ``seconds`` from now, but not after this deadline."""
        return Deadline(min(self.end_s, time.monotonic() + seconds))


class RateLimit:
    """Limits how often something is done, such as logging a line that repeats."""

    def __init__(self, period_s: float, limit: int = 1) -> None:
        self._period_s = period_s
        self._limit = self._remaining_calls = limit
        self._period_end = Deadline.after(0)

    def due(self) -> bool:
        """Return True for the first ``limit`` calls of each period of ``period_s`` seconds, then False."""
        if self._period_end.expired:
            self._period_end, self._remaining_calls = Deadline.after(self._period_s), self._limit
        self._remaining_calls -= 1
        return self._remaining_calls >= 0


def epoch_ms() -> int:
    """Return the current time in ms since 1970, the unit of message times."""
    return time.time_ns() // 1_000_000


def utc_text(epoch_ms: int, timespec: str = "milliseconds") -> str:
    """Return text such as ``2026-01-31T12:00:00.000Z``. A message may contain any number as a time. For a number outside the
    range of dates, return ``@`` and the number.
    """
    try:
        moment = datetime.fromtimestamp(epoch_ms / 1000, UTC)
    except (ValueError, OverflowError, OSError):
        return f"@{epoch_ms}"
    return moment.isoformat(timespec=timespec).replace("+00:00", "Z")


def wait_until(condition: Callable[[], object], deadline: Deadline, poll_interval_s: float) -> bool:
    """Call ``condition`` every ``poll_interval_s`` seconds, at least once, until it returns a true value. Returns whether the
    condition was true before ``deadline``.
    """
    while not condition():
        if deadline.expired:
            return False
        deadline.pause(poll_interval_s)
    return True


def backoff(initial_s: float, max_s: float = 30.0, rng: random.Random | None = None) -> Iterator[float]:
    """Yield pauses in seconds. The pauses double up to ``max_s``. Each pause is shortened by a random part, up to half of it, so
    that clients do not retry together.
    """
    rng = rng or random.Random()
    pause_s = initial_s
    while True:
        yield pause_s * (0.5 + rng.random() / 2)
        pause_s = min(pause_s * 2, max_s)


@dataclass(frozen=True, slots=True)
class Clock:
    """The system's clock, and pauses between attempts. Tests replace this object."""

    now: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep
    pauses: Callable[[], Iterator[float]] = lambda: backoff(0.02, 1.0)
