"""Log lines about unread messages, for a Spark that does not call ``reportLatestOffset``: PySpark 4.0 and 4.1.

Newer versions call it, and show the figures in the progress of the query. Losses and brokers that are away are logged with every
version.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

from rocketmq_spark.options import Options

logger = logging.getLogger(__name__)

PERIOD_S = 60.0


class LagLog:
    """Warns if a limit leaves messages unread after the first batch of a run. Then logs the lag at most once a minute.

    A lag that has grown since the previous line is a warning.
    """

    def __init__(self, options: Options) -> None:
        limits = {
            "maxOffsetsPerTrigger": options.max_offsets_per_trigger,
            "maxBytesPerTrigger": options.max_bytes_per_trigger,
        }
        self._limits = [name for name, limit in limits.items() if limit is not None]
        self._next_line_s: float | None = None
        self._lag: int | None = None
        self._first = True

    def batch_planned(self, now_s: float, report: Callable[[], Mapping[str, Any] | None]) -> None:
        """Log the lag after a batch that was planned now, if a line is due. ``report`` returns the source's figures."""
        if self._next_line_s is not None and now_s < self._next_line_s:
            return
        self._next_line_s = now_s + PERIOD_S
        figures = report() or {}
        lag = figures.get("lag")
        if lag is None:  # unknown
            return
        first, self._first = self._first, False
        if first and self._limits and lag:
            # Spark does not pass the trigger to a reader, so queries with other triggers get this line, too.
            logger.warning(
                "%s leaves %d messages unread after the first batch of this run. With trigger(availableNow=True) or "
                "trigger(once=True), this Spark runs one batch: start the query again to read more, or omit the limit and set "
                "maxRecordsPerPartition, so that one batch reads everything in small tasks",
                " and ".join(f"option {name!r}" for name in self._limits),
                lag,
            )
        elif not first:
            grew = self._lag is not None and lag > self._lag
            logger.log(
                logging.WARNING if grew else logging.INFO,
                "%d messages are unread after this batch, previously %s; behindMs: %s",
                lag,
                "unknown" if self._lag is None else self._lag,
                "unknown" if figures.get("behindMs") is None else figures["behindMs"],
            )
        self._lag = lag
