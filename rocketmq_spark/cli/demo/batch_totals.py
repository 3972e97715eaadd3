"""When to kill Spark's driver: in a batch that has stored totals and is not finished, because Spark must repeat such a batch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Batches:
    """The newest batch that Spark has begun, and the newest batch that it has finished, according to its checkpoint; -1 if there
    is none.
    """

    newest_begun: int
    newest_finished: int

    @property
    def is_in_flight(self) -> bool:
        return self.newest_begun > self.newest_finished


@dataclass(frozen=True, slots=True)
class Kill:
    """A kill of Spark's driver. ``batch`` is the batch that the kill interrupted, None if no batch was in flight; ``stored`` is
    the number of totals of this batch in the topic.
    """

    batch: int | None
    stored: int

    def __str__(self) -> str:
        if self.batch is None:
            return "kill -9 of Spark's driver between two batches"
        return f"kill -9 of Spark's driver in batch {self.batch}, {self.stored} of its totals stored"


class BatchTotals:
    """Remembers how many totals were stored when no batch was in flight."""

    def __init__(self) -> None:
        # The newest finished batch when no batch was in flight, and how many totals were stored then.
        self._last_idle_batch_and_total_count: tuple[int, int] | None = None

    def stored(self, batches_before: Batches, total_count: int, batches_after: Batches) -> int | None:
        """Return how many totals the batch in flight has stored; None if no batch is in flight, or the number is unknown.
        ``total_count`` is the number of totals in the topic, counted after ``batches_before`` was listed and before
        ``batches_after`` was listed.
        """
        if batches_before == batches_after and not batches_after.is_in_flight:
            self._last_idle_batch_and_total_count = batches_after.newest_finished, total_count
        if (
            not batches_after.is_in_flight
            or self._last_idle_batch_and_total_count is None
            or self._last_idle_batch_and_total_count[0] != batches_after.newest_finished
        ):
            return None
        stored_count = total_count - self._last_idle_batch_and_total_count[1]
        return stored_count if stored_count >= 0 else None  # a count below 0 means that a broker omitted a queue
