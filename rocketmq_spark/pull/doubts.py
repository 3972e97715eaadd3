"""How long a broker is doubted whose answers jump over offsets. Pure.

A broker skips index entries whose part of the commit log is gone and goes on behind them: the answer says "found", and
only the number of its messages tells. Who decodes the answers sees that and names the holes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from rocketmq_spark.pull.fetched import Hole, Piece
from rocketmq_spark.pull.trials import Trials


class Doubts:
    """Holes by range and offset, until the broker fills them or they have been there for too long."""

    def __init__(self, grace_s: float, pauses: Callable[[], Iterator[float]]) -> None:
        self._trials = Trials(grace_s, pauses)

    def still(self, pieces: Sequence[Piece], holes: Sequence[Hole], now: float, believe: bool) -> list[Hole]:
        """The holes that may still be filled. Without ``believe`` no answer so far counts."""
        return [
            hole for hole in holes if not self._trials.suspect((pieces[hole.piece].number, hole.start), now, believe)
        ]

    def forget(self) -> None:
        """The next answers come from elsewhere: no answer so far counts."""
        self._trials.forget()

    def again(self, pieces: Sequence[Piece], doubted: Sequence[Hole], now: float) -> Iterator[tuple[Piece, float]]:
        """The answers with holes, each once, and when to ask for them again."""
        for i, hole in {hole.piece: hole for hole in reversed(doubted)}.items():
            yield pieces[i], self._trials.due((pieces[i].number, hole.start), now)


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
