"""Windows of answers to pulls, and the offsets that such answers jump over. Pure.

A broker skips index entries whose part of the commit log is gone and goes on behind them: the answer says "found", and
only the number of its messages tells. Who decodes a window sees that; how long the broker is doubted is decided here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt


class Piece(NamedTuple):
    """Messages of one answer: range number, offset asked, end of what was asked, where the broker went on, bytes."""

    number: int
    start: int
    limit: int
    next_offset: int
    begin: int
    end: int


class Window(NamedTuple):
    """Answers in one buffer, in the order of ranges and offsets. Valid until the next one is asked for."""

    buffer: npt.NDArray[np.uint8]
    pieces: list[Piece]


def covered(pieces: Iterable[Piece]) -> int:
    """How many offsets the pieces answer."""
    return sum(min(piece.next_offset, piece.limit) - piece.start for piece in pieces)


class Hole(NamedTuple):
    """Offsets ``[start, end)`` that the answer at index ``piece`` of a window should have had messages for."""

    piece: int
    start: int
    end: int


class Trial:
    """Tries that brought nothing so far: when they began to look like loss, and the pauses between them."""

    def __init__(self, pauses: Iterator[float]) -> None:
        self.pauses = pauses
        self.suspected_at: float | None = None

    def suspected(self, now: float) -> float:
        """For how long it has looked like loss."""
        if self.suspected_at is None:
            self.suspected_at = now
        return now - self.suspected_at


class Doubts:
    """Holes by range and offset, until the broker fills them or they have been there for too long."""

    def __init__(self, grace_s: float, pauses: Callable[[], Iterator[float]]) -> None:
        self._grace_s = grace_s
        self._pauses = pauses
        self._trials: dict[tuple[int, int], Trial] = {}

    def still(self, pieces: Sequence[Piece], holes: Sequence[Hole], now: float, believe: bool) -> list[Hole]:
        """The holes that may still be filled. Without ``believe`` no answer so far counts."""
        doubted = []
        for hole in holes:
            key = pieces[hole.piece].number, hole.start
            trial = self._trials.setdefault(key, Trial(self._pauses()))
            if not believe:
                trial.suspected_at = None
            if trial.suspected(now) < self._grace_s:
                doubted.append(hole)
        return doubted

    def again(self, pieces: Sequence[Piece], doubted: Sequence[Hole], now: float) -> Iterator[tuple[Piece, float]]:
        """The answers with holes, each once, and when to ask for them again."""
        for i, hole in {hole.piece: hole for hole in reversed(doubted)}.items():
            yield pieces[i], now + next(self._trials[pieces[i].number, hole.start].pauses)


def lasting(holes: Sequence[Hole], doubted: Sequence[Hole], pieces: Sequence[Piece]) -> list[tuple[int, int, int]]:
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


def undoubted(pieces: Sequence[Piece], doubted: Sequence[Hole]) -> tuple[int, list[Piece]]:
    """How many pieces come before the first doubt, and those without one behind it."""
    bad = {hole.piece for hole in doubted}
    usable = min(bad, default=len(pieces))
    return usable, [piece for i, piece in enumerate(pieces[usable:], usable) if i not in bad]
