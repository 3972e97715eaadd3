"""Log lines about unread messages, for a Spark that does not ask for a report: PySpark 4.0 and 4.1.

Newer ones call ``reportLatestOffset``, and show the figures in the progress of the query. Losses and brokers that are away are
logged with every version.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

from rocketmq_spark.options import Options

logger = logging.getLogger(__name__)

PERIOD_S = 60.0


class LagLog:
    """Logs if the first batch of a run leaves messages, then a line each minute: a warning if more is unread than before."""

    def __init__(self, options: Options) -> None:
        limits = {
            "maxOffsetsPerTrigger": options.max_offsets_per_trigger,
            "maxBytesPerTrigger": options.max_bytes_per_trigger,
        }
        self._limits = [name for name, limit in limits.items() if limit is not None]
        self._next_s: float | None = None
        self._lag: int | None = None
        self._first = True

    def planned(self, now_s: float, report: Callable[[], Mapping[str, Any] | None]) -> None:
        """A batch was planned; ``report`` returns what is unread after it."""
        if self._next_s is not None and now_s < self._next_s:
            return
        self._next_s = now_s + PERIOD_S
        figures = report() or {}
        lag = figures.get("lag")
        if lag is None:  # unknown
            return
        first, self._first = self._first, False
        if first and self._limits and lag:
            # No method of a reader learns the trigger, so a query of any other trigger gets this line, too.
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
                "%d messages are unread after this batch; %s before; the oldest was first seen %s ms ago",
                lag,
                "unknown" if self._lag is None else self._lag,
                "unknown" if figures.get("behindMs") is None else figures["behindMs"],
            )
        self._lag = lag
