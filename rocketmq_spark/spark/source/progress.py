"""Reports the lag and the losses of a stream.

The report stands beside the ends of the queues in ``sources[i].latestOffset`` of a query's progress, from which
``rocketmq_spark.progress`` reads it. Planning has fetched all of its figures, so it needs no further requests. PySpark 4.0 and
4.1 do not ask for a report: ``LagLog`` logs the lag there.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from rocketmq_spark.options import Options
from rocketmq_spark.spark.source.data_loss import Loss
from rocketmq_spark.spark.source.offsets import Bounds, Offsets
from rocketmq_spark.spark.source.planning import QueuesView, backlog

logger = logging.getLogger(__name__)


# The maximum number of samples, and of queues in all samples: each report goes through all of them.
_MAX_SAMPLES, _MAX_SAMPLED_QUEUES = 32, 20_000


class ProgressReport:
    """Reports the lag and the losses of a run. To find the age of unread messages, it keeps samples of the ends of queues."""

    def __init__(self) -> None:
        # The bounds of the queues at earlier times (ms), oldest first.
        self._samples: list[tuple[int, Bounds]] = []
        self._losses: dict[str, dict[str, int | None]] = {}
        # The last report, with the poll and the end that it describes: ages grow with each poll.
        self._last: tuple[int, QueuesView, Offsets | None, dict[str, Any]] | None = None

    def add_losses(self, losses: Iterable[Loss]) -> None:
        """Count losses that the query skips. An empty range stands for an unknown number of offsets."""
        for part, cause in losses:
            of_cause = self._losses.setdefault(cause.name.lower(), {"ranges": 0, "offsets": 0})
            offsets_before = of_cause["offsets"]
            of_cause["ranges"] = (of_cause["ranges"] or 0) + 1
            of_cause["offsets"] = None if offsets_before is None or part.size <= 0 else offsets_before + part.size

    def report(self, view: QueuesView, end: Offsets | None, now_ms: int) -> dict[str, Any]:
        """Return the report. ``end`` is the end of the last batch; before the first batch it is None, and the lag is unknown."""
        if self._last is None or self._last[:3] != (view.poll_number, view, end):
            figures = self._figures(view, end, now_ms)
            self._last = view.poll_number, view, end, {**figures, **Offsets(view.ends()).to_json()}
        return self._last[3]

    def _figures(self, view: QueuesView, end: Offsets | None, now_ms: int) -> dict[str, Any]:
        self._add_sample(view.bounds, now_ms)
        unavailable = (
            {q for q in end.positions if q not in view.bounds and not view.is_topic_deleted(q)} if end else set()
        )
        answering = {queue.broker_name for queue in view.bounds}
        return {
            **self._lag(view.bounds, end, now_ms),
            "queues": len(view.bounds),
            "queuesAway": len(unavailable),
            "brokersAway": sorted({queue.broker_name for queue in unavailable} - answering),
            "losses": {cause: dict(counts) for cause, counts in sorted(self._losses.items())},
        }

    def _lag(self, bounds: Bounds, end: Offsets | None, now_ms: int) -> dict[str, int | None]:
        if end is None or not bounds:
            return {"lag": None, "behindMs": None}
        positions = {q: max(end.positions.get(q, b.min_offset), b.min_offset) for q, b in bounds.items()}
        backlogs = backlog(positions, {queue: b.max_offset for queue, b in bounds.items()})
        while len(self._samples) > 1 and _is_read(self._samples[1][1], positions):
            del self._samples[0]
        first_seen = [self._first_seen_ms(queue, positions[queue]) for queue in backlogs]
        known_times = [ms for ms in first_seen if ms is not None]
        behind_ms = None if len(known_times) < len(first_seen) else now_ms - min(known_times, default=now_ms)
        return {"lag": sum(backlogs.values()), "behindMs": behind_ms}

    def _first_seen_ms(self, queue: Any, offset: int) -> int | None:
        """Return when a sample first had the message at ``offset``; None if the first sample of its queue had it."""
        ends = ((ms, bounds[queue].max_offset) for ms, bounds in self._samples if queue in bounds)
        first_sample = next(ends, None)
        if first_sample is None or first_sample[1] > offset:
            return None
        return next((ms for ms, max_offset in ends if max_offset > offset), None)

    def _add_sample(self, bounds: Bounds, now_ms: int) -> None:
        if self._samples and self._samples[-1][1] == bounds:
            return
        samples = self._samples
        samples.append((now_ms, bounds))
        if len(samples) > max(3, min(_MAX_SAMPLES, _MAX_SAMPLED_QUEUES // max(1, len(bounds)))):
            # The sample with the closest neighbours is removed. The first two stay, because they show the oldest unread message.
            del samples[min(range(2, len(samples) - 1), key=lambda i: samples[i + 1][0] - samples[i - 1][0])]


def _is_read(bounds: Bounds, positions: dict[Any, int]) -> bool:
    """Whether all messages that a sample had are read."""
    return all(positions.get(queue, b.max_offset) >= b.max_offset for queue, b in bounds.items())


PERIOD_S = 60.0


class LagLog:
    """Logs the lag for PySpark 4.0 and 4.1, which do not call ``reportLatestOffset``.

    It warns if a limit leaves messages unread after the first batch of a run. Then it logs the lag at most once a minute, as a
    warning if the lag has grown. Losses and unavailable brokers are logged with every version.
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
        """Note that a batch was planned at ``now_s``, and log the lag if a line is due. ``report`` returns the figures."""
        if self._next_line_s is not None and now_s < self._next_line_s:
            return
        self._next_line_s = now_s + PERIOD_S
        figures = report() or {}
        lag = figures.get("lag")
        if lag is None:  # unknown
            return
        is_first, self._first = self._first, False
        if is_first and self._limits and lag:
            # Spark does not pass the trigger to a reader, so queries with other triggers get this line, too.
            logger.warning(
                "%s leaves %d messages unread after the first batch of this run. With trigger(availableNow=True) or "
                "trigger(once=True), this Spark runs one batch: start the query again to read more, or omit the limit and set "
                "maxRecordsPerPartition, so that one batch reads everything in small tasks",
                " and ".join(f"option {name!r}" for name in self._limits),
                lag,
            )
        elif not is_first:
            has_grown = self._lag is not None and lag > self._lag
            logger.log(
                logging.WARNING if has_grown else logging.INFO,
                "%d messages are unread after this batch, previously %s; behindMs: %s",
                lag,
                "unknown" if self._lag is None else self._lag,
                "unknown" if figures.get("behindMs") is None else figures["behindMs"],
            )
        self._lag = lag
