"""How long an offset has looked lost, and when to request it again. Pure.

A broker skips index entries whose part of the commit log is gone: the answer says "found", and only the number of its messages
shows the gap. Decoders report such holes, and ``HoleSuspicions`` says for how long they are requested again.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

from rocketmq_spark.pull.fetched import FetchedAnswer, Hole

# Range number and offset.
Place = tuple[int, int]


class LossSuspicion:
    """Tries that brought nothing so far: when they began to look like loss, and the pauses between them."""

    def __init__(self, pauses: Iterator[float]) -> None:
        self.pauses = pauses
        self.suspected_at: float | None = None

    def suspected(self, now: float) -> float:
        """For how long it has looked like loss."""
        self.suspected_at = now if self.suspected_at is None else min(self.suspected_at, now)
        return now - self.suspected_at


class LossSuspicions:
    """By place, each with pauses of its own, until something comes. ``by_place`` is to be looked at only."""

    def __init__(self, grace_s: float, pauses: Callable[[], Iterator[float]]) -> None:
        self._grace_s = grace_s
        self._pauses = pauses
        self.by_place: dict[Place, LossSuspicion] = {}

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

    def _trial(self, place: Place) -> LossSuspicion:
        return self.by_place.setdefault(place, LossSuspicion(self._pauses()))


class HoleSuspicions:
    """Holes by range and offset, until the broker fills them or they have been there for too long."""

    def __init__(self, grace_s: float, pauses: Callable[[], Iterator[float]]) -> None:
        self._trials = LossSuspicions(grace_s, pauses)

    def still(self, pieces: Sequence[FetchedAnswer], holes: Sequence[Hole], now: float, believe: bool) -> list[Hole]:
        """The holes that may still be filled. Without ``believe`` no answer so far counts."""
        return [
            hole for hole in holes if not self._trials.suspect((pieces[hole.piece].number, hole.start), now, believe)
        ]

    def forget(self) -> None:
        """The next answers come from elsewhere: no answer so far counts."""
        self._trials.forget()

    def again(
        self, pieces: Sequence[FetchedAnswer], doubted: Sequence[Hole], now: float
    ) -> Iterator[tuple[FetchedAnswer, float]]:
        """The answers with holes, each once, and when to ask for them again."""
        for i, hole in {hole.piece: hole for hole in reversed(doubted)}.items():
            yield pieces[i], self._trials.due((pieces[i].number, hole.start), now)


def confirmed_losses(
    holes: Sequence[Hole], doubted: Sequence[Hole], pieces: Sequence[FetchedAnswer]
) -> list[tuple[int, int, int]]:
    """Range number, start and end of what is lost before the first doubt, neighbours joined."""
    usable = doubted[0].piece if doubted else len(pieces)
    lost: list[tuple[int, int, int]] = []
    for hole in holes:
        if hole.piece >= usable:
            break
        number = pieces[hole.piece].number
        if lost and lost[-1][0] == number and lost[-1][2] == hole.start:
            lost[-1] = (number, lost[-1][1], hole.end)
        else:
            lost.append((number, hole.start, hole.end))
    return lost


def split_at_doubt(pieces: Sequence[FetchedAnswer], doubted: Sequence[Hole]) -> tuple[int, list[FetchedAnswer]]:
    """How many pieces come before the first doubt, and those without one behind it."""
    bad = {hole.piece for hole in doubted}
    usable = min(bad, default=len(pieces))
    return usable, [piece for i, piece in enumerate(pieces[usable:], usable) if i not in bad]
