"""Determines where the next batch starts, for a Spark that calls ``latestOffset()`` without a start, as PySpark 4.0 and 4.1 do.

A batch starts at the last end that this run returned. The first batch of a run starts at the newest end in Spark's offset log or,
in a new query, at the initial offset. The order of Spark's calls shows which of these holds:

* A run of a query with a checkpoint begins with ``partitions(x, x)``, where ``x`` is the newest end in the log. If the batch that
  ends at ``x`` is not committed, Spark runs this batch before it calls ``latestOffset()``.
* In a new query, ``latestOffset()`` comes first, and ``initialOffset()`` before the batch is planned.
* Later calls of ``partitions`` do not move the start: Spark may plan a batch never (it prunes a source whose rows are not used)
  or again (a program kept the DataFrame of the batch).

With ``spark.sql.streaming.triggerAvailableNowWrapper.enabled`` Spark calls in another order. At a restart, it asks for an end
before it passes the newest logged end. That end would be computed from the wrong start, so ``BatchStarts`` raises an error before
Spark logs it. In a new query, Spark uses the first end for its only batch, and calls ``latestOffset()`` again for a report alone.
So a batch counts as finished only if Spark has planned it and then asks for another end.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from rocketmq_spark.errors import OptionError


class BatchStart(NamedTuple):
    """The start of a batch: ``offset`` as Spark logs it, None for the initial offset.

    ``finished`` is whether Spark has read everything before it.
    """

    offset: dict[str, Any] | None
    finished: bool


class BatchStarts:
    """The end that a run has reached, which is the start of its next batch.

    A reader has one, and calls its methods in the order in which Spark calls the reader's.
    """

    def __init__(self) -> None:
        self._start = BatchStart(None, finished=False)
        # Whether an end was computed from the initial offset, and Spark has not shown yet that the query is new.
        self._unconfirmed = False

    def next_start(self) -> BatchStart:
        """Return the start of the batch whose end Spark asks for. Raises ``OptionError`` if Spark has not passed it yet."""
        self._check_order()
        return self._start

    def end_returned(self, end: dict[str, Any]) -> None:
        """Note that ``latestOffset`` returned ``end``; if nothing is new, ``end`` is the offset in ``next_start()``."""
        if end != self._start.offset:
            self._unconfirmed = self._start.offset is None
            self._start = BatchStart(end, finished=False)

    def initial_offset_requested(self) -> None:
        """Note that Spark called ``initialOffset``, which it does only if no batch before the current one was logged."""
        self._unconfirmed = False

    def batch_planned(self, end: dict[str, Any]) -> None:
        """Note that Spark called ``partitions`` for the batch up to ``end``, which it runs before it asks for another end."""
        self._check_order()
        if self._start.offset is None or end == self._start.offset:
            self._start = BatchStart(self._start.offset or end, finished=True)

    def _check_order(self) -> None:
        if self._unconfirmed:
            raise OptionError(
                "Spark asked for the end of a batch before it passed the start from the checkpoint, so the batch could read "
                "messages twice. Spark does this if spark.sql.streaming.triggerAvailableNowWrapper.enabled is true. Nothing was "
                "read or committed",
                remedy="Set spark.sql.streaming.triggerAvailableNowWrapper.enabled to false. Without it, "
                "trigger(availableNow=True) reads the same messages, in one batch",
            )
