"""Which offsets an answer to a pull covers."""

from __future__ import annotations

from typing import NamedTuple


class OffsetWindow(NamedTuple):
    """The offset that a pull asked for, and the one where its broker went on. A batch has offsets between them; it may begin
    before, but not before ``least``, and ends by ``most``.
    """

    start: int
    end: int
    least: int | None = None
    most: int | None = None

    def holds(self, first: int, count: int) -> bool:
        """Whether a batch of so many offsets can lie there."""
        fits = (self.least is None or self.least <= first) and (self.most is None or first + count <= self.most)
        return fits and first < self.end and first + count > self.start
