"""How long an offset has looked lost, and when to request it again. This module is pure.

A broker skips index entries if their part of the commit log was removed. The answer still says "found", and only the number of
messages in the answer shows the gap. Decoders report such holes, and ``HoleSuspicions`` decides for how long holes are
requested again.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

from rocketmq_spark.pull.fetched import FetchedAnswer, Hole

# Range number and offset.
Position = tuple[int, int]


class LossSuspicion:
    """The suspicion that one position is lost: when it first looked lost, and the pauses between attempts."""

    def __init__(self, pauses: Iterator[float]) -> None:
        self.pauses = pauses
        # When the position first looked lost. None means that attempts failed, but the position does not look lost. Infinity
        # stands for the time of the next answer, at which the grace period starts.
        self.suspected_at: float | None = None

    def suspected_for_s(self, now: float) -> float:
        """Return for how long the position has looked lost."""
        self.suspected_at = now if self.suspected_at is None else min(self.suspected_at, now)
        return now - self.suspected_at


class LossSuspicions:
    """The suspicions by position, each with its own pauses. A suspicion ends when a message arrives. Other classes only read
    ``suspicions_by_position``.
    """

    def __init__(self, grace_s: float, pauses: Callable[[], Iterator[float]]) -> None:
        self._grace_s = grace_s
        self._pauses = pauses
        self.suspicions_by_position: dict[Position, LossSuspicion] = {}

    def suspect_loss(self, position: Position, now: float, is_reliable: bool = True) -> bool:
        """Record an answer that looks like a loss. Returns whether the position has looked lost for the whole grace period.

        ``is_reliable`` says whether the broker that answered knows what is lost. An unreliable answer starts the grace period
        again.
        """
        suspicion = self._suspicion(position)
        if not is_reliable:
            suspicion.suspected_at = None
        return suspicion.suspected_for_s(now) >= self._grace_s

    def on_address_changed(self) -> None:
        """Start the grace period of all suspected losses again, because the next answers come from another address."""
        for suspicion in self.suspicions_by_position.values():
            if suspicion.suspected_at is not None:
                suspicion.suspected_at = math.inf

    @property
    def has_suspicions(self) -> bool:
        """Whether any position looks lost."""
        return any(suspicion.suspected_at is not None for suspicion in self.suspicions_by_position.values())

    def next_retry_at(self, position: Position, now: float) -> float:
        """Return the time of the next attempt. The pause grows with each attempt."""
        return now + next(self._suspicion(position).pauses)

    def clear(self, position: Position) -> None:
        """End the suspicion of a position, because a message arrived, or the offset is lost."""
        self.suspicions_by_position.pop(position, None)

    def _suspicion(self, position: Position) -> LossSuspicion:
        return self.suspicions_by_position.setdefault(position, LossSuspicion(self._pauses()))


class HoleSuspicions:
    """The suspicions that holes are lost. A suspicion ends when the broker fills the hole, or when the grace period is over."""

    def __init__(self, grace_s: float, pauses: Callable[[], Iterator[float]]) -> None:
        self._suspicions = LossSuspicions(grace_s, pauses)

    def unconfirmed_holes(
        self, answers: Sequence[FetchedAnswer], holes: Sequence[Hole], now: float, is_reliable: bool
    ) -> list[Hole]:
        """Return the holes that may still be filled. The argument ``is_reliable`` means the same as in
        ``LossSuspicions.suspect_loss``.
        """
        return [
            hole
            for hole in holes
            if not self._suspicions.suspect_loss(
                (answers[hole.answer_index].range_number, hole.start), now, is_reliable
            )
        ]

    def on_address_changed(self) -> None:
        """Start the grace period of all holes again, because the next answers come from another address."""
        self._suspicions.on_address_changed()

    def retries(
        self, answers: Sequence[FetchedAnswer], unconfirmed_holes: Sequence[Hole], now: float
    ) -> Iterator[tuple[FetchedAnswer, float]]:
        """Yield pairs of an answer with unconfirmed holes and the time at which to request this answer again."""
        for i, hole in {hole.answer_index: hole for hole in reversed(unconfirmed_holes)}.items():
            yield answers[i], self._suspicions.next_retry_at((answers[i].range_number, hole.start), now)


def confirmed_losses(
    holes: Sequence[Hole], unconfirmed_holes: Sequence[Hole], answers: Sequence[FetchedAnswer]
) -> list[tuple[int, int, int]]:
    """Return range number, start and end of the confirmed holes before the first answer with an unconfirmed hole. Adjacent
    holes are joined.
    """
    usable_count = unconfirmed_holes[0].answer_index if unconfirmed_holes else len(answers)
    losses: list[tuple[int, int, int]] = []
    for hole in holes:
        if hole.answer_index >= usable_count:
            break
        range_number = answers[hole.answer_index].range_number
        if losses and losses[-1][0] == range_number and losses[-1][2] == hole.start:
            losses[-1] = (range_number, losses[-1][1], hole.end)
        else:
            losses.append((range_number, hole.start, hole.end))
    return losses


def split_at_unconfirmed(
    answers: Sequence[FetchedAnswer], unconfirmed_holes: Sequence[Hole]
) -> tuple[int, list[FetchedAnswer]]:
    """Return how many answers precede the first answer with an unconfirmed hole, and the later answers without unconfirmed
    holes.
    """
    answers_with_holes = {hole.answer_index for hole in unconfirmed_holes}
    usable_count = min(answers_with_holes, default=len(answers))
    return usable_count, [
        answer for i, answer in enumerate(answers[usable_count:], usable_count) if i not in answers_with_holes
    ]
