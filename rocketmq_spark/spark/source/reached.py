"""Where the next batch begins, for a Spark that calls ``latestOffset()`` without a start, as PySpark 4.0 and 4.1 do.

The start is the last end that this run returned, else the newest end in Spark's offset log, else the initial offset (None here).
Spark's calls tell them apart:

* A run of a query with a checkpoint begins with ``partitions(x, x)``, where ``x`` is the newest end in the log. If its batch is
  not committed, Spark runs the batch before it calls ``latestOffset()``.
* In a new query, ``latestOffset()`` comes first, and ``initialOffset()`` before the plan of the batch.
* Later plans say nothing new: a batch may be planned never (Spark prunes a source without use) or again (a DataFrame that a
  program kept), so no plan moves the start.

With ``spark.sql.streaming.triggerAvailableNowWrapper.enabled`` the order is another one. At a restart, Spark asks for an end
before it says what the log has: the end would be computed from the wrong start, so ``ReachedEnd`` raises an error before Spark
logs it. In a new query, Spark uses the first end for its only batch, and calls ``latestOffset()`` again just to report it. So an
end counts as finished work only after Spark has planned its batch.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from rocketmq_spark.errors import OptionError


class Begin(NamedTuple):
    """The start of a batch: None for the initial offset. ``finished`` is whether Spark has read what lies before it."""

    entry: dict[str, Any] | None
    finished: bool


class ReachedEnd:
    """The end of a run so far. One reader has one, and calls it in the order of Spark's calls."""

    def __init__(self) -> None:
        self._begin = Begin(None, finished=False)
        # Whether the end was computed from the initial offset, and Spark has not yet confirmed that the query is new.
        self._unconfirmed = False

    def begin(self) -> Begin:
        """Where the batch begins whose end Spark asks for."""
        self._check_order()
        return self._begin

    def answered(self, end: dict[str, Any]) -> None:
        """Spark got ``end`` for the batch that starts at ``begin()``; the same object if there is nothing new."""
        if end is not self._begin.entry:
            self._unconfirmed = self._begin.entry is None
            self._begin = Begin(end, finished=False)

    def began_anew(self) -> None:
        """Spark asked for the initial offset: no end of this query was logged before this batch."""
        self._unconfirmed = False

    def planned(self, end: dict[str, Any]) -> None:
        """Spark asked for the tasks up to ``end``. It runs them before it asks for another end."""
        self._check_order()
        if self._begin.entry is None or end == self._begin.entry:
            self._begin = Begin(self._begin.entry or end, finished=True)

    def _check_order(self) -> None:
        if self._unconfirmed:
            raise OptionError(
                "Spark asked for the end of a batch before it said where the batch starts. It does so if "
                "spark.sql.streaming.triggerAvailableNowWrapper.enabled is true and the query has a checkpoint: the batch could "
                "read messages twice. Nothing was read or committed",
                remedy="Set spark.sql.streaming.triggerAvailableNowWrapper.enabled to false. Without it, "
                "trigger(availableNow=True) reads the same, in one batch",
            )
