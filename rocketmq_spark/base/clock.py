"""Time as values: a deadline made once at the public call, and the pauses between tries.

Pure code gets ``now`` as an argument; only drivers read the clock, and those that tests move in time read it through ``Clock``.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import NamedTuple

_SHORTEST_S = 0.01
LONGEST_S = 1e9  # a time without end: locks take no infinity, and there is no calculating with it


class Deadline(NamedTuple):
    """A point on the monotonic clock by which a call with all its retries must end. A tuple: there is one for every send."""

    at: float

    @classmethod
    def after(cls, seconds: float) -> Deadline:
        return cls(time.monotonic() + (seconds if seconds < LONGEST_S else LONGEST_S))

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


class NowAndThen:
    """Says whether enough time has passed since it last said yes: for log lines that a flood of events would repeat."""

    def __init__(self, every_s: float) -> None:
        self._every_s = every_s
        self._next = Deadline.after(0)

    def due(self) -> bool:
        """The first time, and then every ``every_s`` seconds at most."""
        if not self._next.expired:
            return False
        self._next = Deadline.after(self._every_s)
        return True


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
