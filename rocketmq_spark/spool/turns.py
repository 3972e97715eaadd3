"""Decides of which targets records may be handed out now. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

from rocketmq_spark.spool.lanes import Joins, no_others
from rocketmq_spark.spool.records import Record

# Pauses between the attempts for a target that fails, in ms: from the second failure without a success on, each twice as long.
PAUSE_MS, LONGEST_PAUSE_MS = 10, 1000


class Window(NamedTuple):
    """Limits for a target that failed: how many of its records may be out at once, and until when none may be handed out.
    ``failures`` counts the attempts that failed one after the other since the last answer.
    """

    size: int
    failures: int = 0
    pause_until_ms: int = 0

    def failed(self, now_ms: int) -> Window:
        """The window after a failed attempt, or after several that were out together."""
        # A large exponent would be a large number.
        pause_ms = min(LONGEST_PAUSE_MS, PAUSE_MS << min(self.failures - 1, 10)) if self.failures else 0
        return Window(1, self.failures + 1, now_ms + pause_ms)


class Turns:
    """Decides which records may be handed out now. For each target, records that are ``out`` already count, too: a target with a
    window may have as many as that allows, another one as many as ``share``.

    ``refused`` are the targets of due records that must wait, and ``next_ms`` is the end of the first of their pauses.
    """

    def __init__(self, windows: Mapping[str, Window], share: int, out: Iterable[str], now_ms: int) -> None:
        self._windows = windows
        self._default = Window(share)
        self._now_ms = now_ms
        self._out = Counter(out)
        self.refused: set[str] = set()
        self.next_ms: int | None = None

    def joins(self, joins: Joins) -> Joins:
        """``joins``, except that records of a target with a window of one are sent alone."""

        def joined(first: Record) -> Callable[[Record], bool]:
            window = self._windows.get(first.target)
            return (joins if window is None or window.size > 1 else no_others)(first)

        return joined

    def accepts(self, target: str) -> bool:
        """Whether a record of the target may be handed out."""
        window = self._windows.get(target, self._default if target else None)
        if window is None:
            return True
        if self._out[target] < window.size and window.pause_until_ms <= self._now_ms:
            return True
        self.refused.add(target)
        if self._out[target] < window.size and (self.next_ms is None or window.pause_until_ms < self.next_ms):
            self.next_ms = window.pause_until_ms
        return False

    def took(self, target: str) -> None:
        """Note that a record is handed out."""
        self._out[target] += 1
