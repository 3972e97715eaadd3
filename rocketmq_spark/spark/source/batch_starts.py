"""Determines where the next batch starts, for a Spark that calls ``latestOffset()`` without a start, as PySpark 4.0 and 4.1 do.

A batch starts at the last end that this run returned. The first batch of a run starts at the newest end in Spark's offset log or,
in a new query, at the initial offset. The order of Spark's calls shows where the batch starts:

* A run of a query with a checkpoint begins with ``partitions(x, x)``, where ``x`` is the newest end in the log. If the batch that
  ends at ``x`` is not committed, Spark runs this batch before it calls ``latestOffset()``.
* In a new query, Spark calls ``latestOffset()`` first, and calls ``initialOffset()`` before it plans the batch.
* Later calls of ``partitions`` do not move the start. Spark may never plan a batch, because Spark omits a source whose rows are
  not used. Spark may also plan a batch twice, if a program kept the DataFrame of the batch.

With ``spark.sql.streaming.triggerAvailableNowWrapper.enabled`` Spark calls the methods in another order. At a restart, Spark asks
for the end of a batch before it passes the newest logged end. In this case, ``BatchStarts`` raises an error, because the end
would be computed from a wrong start. In a new query, the only batch ends at the first end that ``latestOffset()`` returns. Spark
then calls ``latestOffset()`` again, but only to report progress, and the batch is not finished yet. So a batch counts as finished
only if Spark has planned it, and later asks for another end.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from rocketmq_spark.errors import OptionError


class BatchStart(NamedTuple):
    """The start of a batch. ``offset`` is the log entry of the start, or None for the initial offset.

    ``is_finished`` is whether Spark has read everything before ``offset``.
    """

    offset: dict[str, Any] | None
    is_finished: bool


class BatchStarts:
    """The end that a run has reached, which is the start of its next batch.

    Each reader has its own ``BatchStarts``. When Spark calls a method of the reader, the reader calls the corresponding method of
    ``BatchStarts``.
    """

    def __init__(self) -> None:
        self._start = BatchStart(None, is_finished=False)
        # Whether an end was computed from the initial offset before Spark's calls have shown that the query is new.
        self._is_unconfirmed = False

    def next_start(self) -> BatchStart:
        """Return the start of the batch whose end Spark asks for. Raises ``OptionError`` if Spark has not passed the start."""
        self._check_call_order()
        return self._start

    def note_end(self, end: dict[str, Any]) -> None:
        """Note that ``latestOffset`` returned ``end``. If there are no new messages, ``end`` is the offset in
        ``next_start()``.
        """
        if end != self._start.offset:
            self._is_unconfirmed = self._start.offset is None
            self._start = BatchStart(end, is_finished=False)

    def note_initial_offset_request(self) -> None:
        """Note that Spark called ``initialOffset``, which it does only if no batch before the current one was logged."""
        self._is_unconfirmed = False

    def note_planned_batch(self, end: dict[str, Any]) -> None:
        """Note that Spark called ``partitions`` for the batch up to ``end``. Spark runs this batch before it asks for another
        end.
        """
        self._check_call_order()
        if self._start.offset is None or end == self._start.offset:
            self._start = BatchStart(self._start.offset or end, is_finished=True)

    def _check_call_order(self) -> None:
        if self._is_unconfirmed:
            raise OptionError(
                "Spark asked for the end of a batch before it passed the start from the checkpoint, so the batch could read "
                "messages twice. Spark asks in this order if spark.sql.streaming.triggerAvailableNowWrapper.enabled is true. "
                "Nothing was read or committed",
                remedy="Set spark.sql.streaming.triggerAvailableNowWrapper.enabled to false. Without this wrapper, "
                "trigger(availableNow=True) reads the same messages, in one batch",
            )
