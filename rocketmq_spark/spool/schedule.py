"""When what failed is tried again. Pure.

Seed 003's steps, counted from each failure. Its answer for a number beyond the table (10 s) is never reached, for that is
when it gives up.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

STEPS_S = (3, 5, 30, 60, 120, 300, 480, 600, 900, 1800)


@dataclass(frozen=True, slots=True)
class Schedule:
    """Pauses in seconds: the first one after the failure that led here, each other one after a failed try."""

    steps_s: Sequence[float] = STEPS_S

    def due_ms(self, tries: int, now_ms: int) -> int | None:
        """When it is tried again after so many failed tries, the last of which was now; None: never."""
        if tries >= len(self.steps_s):
            return None
        return now_ms + round(1000 * self.steps_s[tries])


class SteadyClock:
    """Milliseconds since 1970 that go on evenly whatever is done to the machine's clock, and never go back.

    They begin at the machine's time, or at ``not_before_ms``, the latest moment that an earlier process wrote down: after
    a clock was put back what is due keeps its distance. A clock that is put forward while nobody runs makes records due,
    as time does.
    """

    def __init__(self, wall_ms: Callable[[], int], monotonic_ms: Callable[[], int], not_before_ms: int = 0) -> None:
        self._monotonic_ms = monotonic_ms
        self._offset_ms = max(wall_ms(), not_before_ms) - monotonic_ms()

    def __call__(self) -> int:
        return self._monotonic_ms() + self._offset_ms
