"""Rows that cannot be sent: collected over all checks of an Arrow batch, then raised as one error."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from rocketmq_spark.errors import MessageRefused

SHOWN = 10

# What is wrong with a row: the same for all of them, or by its number in the batch.
Reason = str | Callable[[int], str]


class BadRows:
    """Bad rows with their reasons; the first ten are shown."""

    def __init__(self, first_row: int = 0) -> None:
        self._first_row = first_row
        self._found: dict[int, str] = {}

    def add(self, bad: npt.NDArray[np.bool_], reason: Reason) -> None:
        """Rows that are true in ``bad``; the first reason of a row counts."""
        if bad.any():
            self.rows(np.flatnonzero(bad), reason)

    def rows(self, rows: npt.NDArray[np.intp], reason: Reason) -> None:
        """Rows by their numbers in the batch."""
        for i in rows.tolist():
            if i not in self._found:
                self._found[i] = reason if isinstance(reason, str) else reason(i)

    def found(self) -> list[tuple[int, str]]:
        return sorted(self._found.items())

    def raise_if_any(self, partition: int | None = None) -> None:
        """``MessageRefused`` if there was a bad row; rows are counted from where the partition starts."""
        if not self._found:
            return
        faults = self.found()
        shown = "; ".join(f"row {self._first_row + i}: {reason}" for i, reason in faults[:SHOWN])
        more = f"; and {len(faults) - SHOWN} more" if len(faults) > SHOWN else ""
        where = "" if partition is None else f" of partition {partition}"
        raise MessageRefused(
            f"{len(faults)} rows{where} cannot be sent, and nothing of their Arrow batch was sent: {shown}{more}",
            remedy="Rows are counted from 0 within their partition",
        )
