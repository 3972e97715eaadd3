"""Reports the lag and the losses of a stream.

The figures of the report stand beside the ends of the queues in ``sources[i].latestOffset`` of a query's progress, where
``rocketmq_spark.progress`` reads them. Planning has fetched all figures, so the report needs no further requests. PySpark 4.0 and
4.1 do not ask for a report: with these versions, ``LagLog`` logs the lag.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from rocketmq_spark.options import Options
from rocketmq_spark.spark.source.data_loss import Loss
from rocketmq_spark.spark.source.offsets import Bounds, Offsets
from rocketmq_spark.spark.source.planning import QueuesView, backlog_by_queue

logger = logging.getLogger(__name__)


# The maximum number of samples, and the maximum number of queues in all samples. Both are limited, because each report goes
# through all samples.
_MAX_SAMPLES, _MAX_SAMPLED_QUEUES = 32, 20_000


class ProgressReport:
    """Reports the lag and the losses of a run. To find the age of unread messages, it keeps samples of the ends of queues."""

    def __init__(self) -> None:
        # The bounds of the queues at earlier times (ms), oldest first.
        self._samples: list[tuple[int, Bounds]] = []
        self._losses: dict[str, dict[str, int | None]] = {}
        # The last report, with the poll, the view and the end that it describes. Each poll needs a new report, because the ages
        # of messages grow.
        self._last_report: tuple[int, QueuesView, Offsets | None, dict[str, Any]] | None = None

    def add_losses(self, losses: Iterable[Loss]) -> None:
        """Count losses that the query skipped. The empty range of a loss stands for an unknown number of offsets."""
        for lost_range, cause in losses:
            counts = self._losses.setdefault(cause.name.lower(), {"ranges": 0, "offsets": 0})
            offsets_before = counts["offsets"]
            counts["ranges"] = (counts["ranges"] or 0) + 1
            counts["offsets"] = (
                None if offsets_before is None or lost_range.size <= 0 else offsets_before + lost_range.size
            )

    def report(self, view: QueuesView, end: Offsets | None, now_ms: int) -> dict[str, Any]:
        """Return the report. ``end`` is the end of the last batch; before the first batch it is None, and the lag is unknown."""
        if self._last_report is None or self._last_report[:3] != (view.poll_number, view, end):
            figures = self._figures(view, end, now_ms)
            self._last_report = view.poll_number, view, end, {**figures, **Offsets(view.ends()).to_json()}
        return self._last_report[3]

    def _figures(self, view: QueuesView, end: Offsets | None, now_ms: int) -> dict[str, Any]:
        self._add_sample(view.bounds, now_ms)
        unavailable_queues = (
            {q for q in end.positions if q not in view.bounds and not view.is_topic_deleted(q)} if end else set()
        )
        answering_brokers = {queue.broker_name for queue in view.bounds}
        return {
            **self._lag_figures(view.bounds, end, now_ms),
            "queues": len(view.bounds),
            "queuesAway": len(unavailable_queues),
            "brokersAway": sorted({queue.broker_name for queue in unavailable_queues} - answering_brokers),
            "losses": {cause: dict(counts) for cause, counts in sorted(self._losses.items())},
        }

    def _lag_figures(self, bounds: Bounds, end: Offsets | None, now_ms: int) -> dict[str, int | None]:
        if end is None or not bounds:
            return {"lag": None, "behindMs": None}
        positions = {q: max(end.positions.get(q, b.min_offset), b.min_offset) for q, b in bounds.items()}
        backlogs = backlog_by_queue(positions, {queue: b.max_offset for queue, b in bounds.items()})
        while len(self._samples) > 1 and _has_read_sample(self._samples[1][1], positions):
            del self._samples[0]
        first_seen_times_ms = [self._first_seen_ms(queue, positions[queue]) for queue in backlogs]
        known_times_ms = [ms for ms in first_seen_times_ms if ms is not None]
        behind_ms = (
            None if len(known_times_ms) < len(first_seen_times_ms) else now_ms - min(known_times_ms, default=now_ms)
        )
        return {"lag": sum(backlogs.values()), "behindMs": behind_ms}

    def _first_seen_ms(self, queue: Any, offset: int) -> int | None:
        """Return the time of the first sample in which the queue had a message at ``offset``. If this is the queue's first
        sample, the message may be much older, so its time is unknown, and the result is None.
        """
        sampled_ends = ((ms, bounds[queue].max_offset) for ms, bounds in self._samples if queue in bounds)
        first_sample = next(sampled_ends, None)
        if first_sample is None or first_sample[1] > offset:
            return None
        return next((ms for ms, max_offset in sampled_ends if max_offset > offset), None)

    def _add_sample(self, bounds: Bounds, now_ms: int) -> None:
        if self._samples and self._samples[-1][1] == bounds:
            return
        samples = self._samples
        samples.append((now_ms, bounds))
        if len(samples) > max(3, min(_MAX_SAMPLES, _MAX_SAMPLED_QUEUES // max(1, len(bounds)))):
            # Remove the sample whose neighbours are closest in time. The first two samples stay, because they show the age of the
            # oldest unread message.
            del samples[min(range(2, len(samples) - 1), key=lambda i: samples[i + 1][0] - samples[i - 1][0])]


def _has_read_sample(bounds: Bounds, positions: dict[Any, int]) -> bool:
    """Whether the query has read all messages that existed at the time of a sample."""
    return all(positions.get(queue, b.max_offset) >= b.max_offset for queue, b in bounds.items())


LOG_PERIOD_S = 60.0


class LagLog:
    """Logs the lag for PySpark 4.0 and 4.1, which do not call ``reportLatestOffset``.

    ``LagLog`` warns if a limit leaves messages unread after the first batch of a run. After the first batch, ``LagLog`` logs the
    lag at most once a minute, as a warning if the lag has grown. Losses and unavailable brokers are logged with every version of
    PySpark.
    """

    def __init__(self, options: Options) -> None:
        limit_by_name = {
            "maxOffsetsPerTrigger": options.max_offsets_per_trigger,
            "maxBytesPerTrigger": options.max_bytes_per_trigger,
        }
        self._limit_names = [name for name, limit in limit_by_name.items() if limit is not None]
        self._next_log_s: float | None = None
        self._lag: int | None = None
        self._is_first_batch = True

    def note_planned_batch(self, now_s: float, get_figures: Callable[[], Mapping[str, Any] | None]) -> None:
        """Note that a batch was planned at ``now_s``, and log the lag if a line is due. ``get_figures`` returns the figures."""
        if self._next_log_s is not None and now_s < self._next_log_s:
            return
        self._next_log_s = now_s + LOG_PERIOD_S
        figures = get_figures() or {}
        lag = figures.get("lag")
        if lag is None:  # unknown
            return
        is_first_batch, self._is_first_batch = self._is_first_batch, False
        if is_first_batch and self._limit_names and lag:
            # Spark does not pass the trigger to a reader, so queries with other triggers get this warning, too.
            logger.warning(
                "%s leaves %d messages unread after the first batch of this run. With trigger(availableNow=True) or "
                "trigger(once=True), this Spark runs one batch: start the query again to read more, or omit the limit and set "
                "maxRecordsPerPartition, so that one batch reads everything in small tasks",
                " and ".join(f"option {name!r}" for name in self._limit_names),
                lag,
            )
        elif not is_first_batch:
            has_grown = self._lag is not None and lag > self._lag
            logger.log(
                logging.WARNING if has_grown else logging.INFO,
                "%d messages are unread after this batch, previously %s; behindMs: %s",
                lag,
                "unknown" if self._lag is None else self._lag,
                "unknown" if figures.get("behindMs") is None else figures["behindMs"],
            )
        self._lag = lag
