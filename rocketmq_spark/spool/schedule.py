"""When a failed record is tried again, and which targets are unreachable. Pure.

The steps of ``Schedule`` are those of seed 003, counted from each failure. Its value for a number beyond the table (10 s) is
never used, because the record is given up then.

``UnreachableTargets`` makes the records of a target due at once when the target answers again. A broker that answers some
requests and refuses others must not use up all tries of a record in a moment: after each failure that follows such a call
the next one is delayed, by the steps of the schedule. It then comes without another answer, because there may be no other
send.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
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
    a clock was put back what is due keeps its distance. A clock that is put forward while no process runs makes records due,
    as time does.
    """

    def __init__(self, wall_ms: Callable[[], int], monotonic_ms: Callable[[], int], not_before_ms: int = 0) -> None:
        self._monotonic_ms = monotonic_ms
        self._offset_ms = max(wall_ms(), not_before_ms) - monotonic_ms()

    def __call__(self) -> int:
        return self._monotonic_ms() + self._offset_ms


# After so long without a failure a target begins anew.
FORGOTTEN_MS = 1000 * STEPS_S[-1]


@dataclass(slots=True)
class _Silence:
    not_before_ms: int
    failed_ms: int
    calls: int = 0
    called: bool = False
    answered_ms: int | None = None  # since it failed, and there was no call yet


class UnreachableTargets:
    """Targets that failed. Times are ms of a clock that does not go back."""

    def __init__(self) -> None:
        self._silent: dict[str, _Silence] = {}
        self._assumed_ms: int | None = None

    def __bool__(self) -> bool:
        return bool(self._silent) or self._assumed_ms is not None

    def assume(self, now_ms: int) -> None:
        """Any target may have failed before: there was no question yet."""
        self._assumed_ms = now_ms

    def failed(self, target: str, now_ms: int, since_ms: int | None = None) -> None:
        """Something for ``target`` could not be sent, tried from ``since_ms`` on: an answer that came later still counts."""
        known = self._silent.get(target)
        if known is None or now_ms - known.failed_ms >= FORGOTTEN_MS:
            self._silent[target] = _Silence(now_ms, now_ms)
            return
        if known.called:
            step = STEPS_S[min(known.calls, len(STEPS_S)) - 1]
            known.not_before_ms, known.called = now_ms + 1000 * step, False
        known.failed_ms = now_ms
        if known.answered_ms is not None and (since_ms is None or known.answered_ms < since_ms):
            known.answered_ms = None

    def answered(self, targets: Iterable[str], now_ms: int) -> set[str]:
        """Those of ``targets`` that were silent and are to be called now."""
        for target in targets:
            if target not in self._silent and self._assumed_ms is not None:
                self.failed(target, self._assumed_ms)
            if target in self._silent:
                self._silent[target].answered_ms = now_ms
        return self.due(now_ms)

    def due(self, now_ms: int) -> set[str]:
        """Those that have answered since they failed and are to be called now."""
        due = {target for target, known in self._silent.items() if _is_pending(known) and known.not_before_ms <= now_ms}
        for target in due:
            known = self._silent[target]
            known.called, known.calls = True, known.calls + 1
        return due

    def next_ms(self) -> int | None:
        """When one is to be called that has answered too early for that."""
        return min((known.not_before_ms for known in self._silent.values() if _is_pending(known)), default=None)

    def forget(self) -> None:
        """Nothing waits any more."""
        self._silent.clear()
        self._assumed_ms = None


def _is_pending(known: _Silence) -> bool:
    return known.answered_ms is not None and not known.called
