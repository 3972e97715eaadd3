"""When to kill Spark's driver: in a batch that has stored totals and is not finished, which Spark must repeat."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Batches:
    """The newest batch that Spark has begun, and the newest that it has finished, by its checkpoint; -1: none."""

    begun: int
    finished: int

    @property
    def in_flight(self) -> bool:
        return self.begun > self.finished


@dataclass(frozen=True, slots=True)
class Kill:
    """``batch``: the batch that was not finished, None if there was none. ``stored``: how many of its totals were stored."""

    batch: int | None
    stored: int

    def __str__(self) -> str:
        if self.batch is None:
            return "kill -9 of Spark's driver between two batches"
        return f"kill -9 of Spark's driver in batch {self.batch}, {self.stored} of its totals stored"


class BatchTotals:
    """Remembers how many totals were stored when no batch was in flight."""

    def __init__(self) -> None:
        self._settled: tuple[int, int] | None = None

    def stored(self, before: Batches, totals: int, after: Batches) -> int | None:
        """How many totals the batch in flight has stored; None if none is, or if it is not known. ``totals`` is the number of
        totals in the topic, counted after ``before`` was listed and before ``after``.
        """
        if before == after and not after.in_flight:
            self._settled = after.finished, totals
        if not after.in_flight or self._settled is None or self._settled[0] != after.finished:
            return None
        stored = totals - self._settled[1]
        return stored if stored >= 0 else None  # a broker left out a queue
