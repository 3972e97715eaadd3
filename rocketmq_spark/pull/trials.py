"""What was asked for in vain: how long it has looked like loss, and when to ask again. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

# Range number and offset.
Place = tuple[int, int]


class Trial:
    """Tries that brought nothing so far: when they began to look like loss, and the pauses between them."""

    def __init__(self, pauses: Iterator[float]) -> None:
        self.pauses = pauses
        self.suspected_at: float | None = None

    def suspected(self, now: float) -> float:
        """For how long it has looked like loss."""
        self.suspected_at = now if self.suspected_at is None else min(self.suspected_at, now)
        return now - self.suspected_at


class Trials:
    """By place, each with pauses of its own, until something comes. ``by_place`` is to be looked at only."""

    def __init__(self, grace_s: float, pauses: Callable[[], Iterator[float]]) -> None:
        self._grace_s = grace_s
        self._pauses = pauses
        self.by_place: dict[Place, Trial] = {}

    def suspect(self, place: Place, now: float, believe: bool = True) -> bool:
        """It looks like loss: whether it has for the time of grace. Without ``believe`` no answer so far counts."""
        trial = self._trial(place)
        if not believe:
            trial.suspected_at = None
        return trial.suspected(now) >= self._grace_s

    def forget(self) -> None:
        """The next answers come from elsewhere: what looks like loss still does, but no answer so far counts."""
        for trial in self.by_place.values():
            if trial.suspected_at is not None:
                trial.suspected_at = math.inf

    @property
    def suspicious(self) -> bool:
        """Whether anything looks like loss."""
        return any(trial.suspected_at is not None for trial in self.by_place.values())

    def due(self, place: Place, now: float) -> float:
        """When to ask again; each time later."""
        return now + next(self._trial(place).pauses)

    def end(self, place: Place) -> None:
        """Something came, or it is lost."""
        self.by_place.pop(place, None)

    def _trial(self, place: Place) -> Trial:
        return self.by_place.setdefault(place, Trial(self._pauses()))
