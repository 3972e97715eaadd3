"""The account that a run of a stream gives of itself (lag, unavailable brokers, losses), and the one path for data loss.

The account stands beside the ends of queues in ``sources[i].latestOffset`` of a query's progress, and is made from the
answers that planning needs anyway: it asks brokers nothing. ``progress`` reads it. Every data loss goes through ``settled``
or ``report``, which option ``failOnDataLoss`` controls.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from typing import Any

from rocketmq_spark.errors import DataLossError
from rocketmq_spark.model import OffsetRange
from rocketmq_spark.pull.answers import Cause
from rocketmq_spark.spark.source.decisions import Loss, QueuesView
from rocketmq_spark.spark.source.offsets import Bounds, Offsets
from rocketmq_spark.spark.source.planner import backlog

logger = logging.getLogger(__name__)

# Looks at ends that are kept: at most so many, and of so many queues in all, for each report goes through them.
_LOOKS, _LOOKS_OF_QUEUES = 32, 20_000


class Account:
    """The looks and losses of a run. Of the last look and of where the last batch ends ``report`` makes a report."""

    def __init__(self) -> None:
        self._looks: list[tuple[int, Bounds]] = []
        self._losses: dict[str, dict[str, int | None]] = {}

    def lost(self, parts: Iterable[Loss]) -> None:
        """Losses that the query goes on without. A part of no size is one whose size is unknown."""
        for part, cause in parts:
            of_cause = self._losses.setdefault(cause.name.lower(), {"ranges": 0, "offsets": 0})
            so_far = of_cause["offsets"]
            of_cause["ranges"] = (of_cause["ranges"] or 0) + 1
            of_cause["offsets"] = None if so_far is None or part.size <= 0 else so_far + part.size

    def report(self, view: QueuesView, end: Offsets | None, now_ms: int) -> dict[str, Any]:
        """The report: with ``end`` None, before a batch was planned, how far the run is behind is not known."""
        self._look(view.bounds, now_ms)
        away = {q for q in end.positions if q not in view.bounds and not view.lacks(q)} if end else set()
        answering = {queue.broker_name for queue in view.bounds}
        return {
            **self._behind(view.bounds, end, now_ms),
            "queues": len(view.bounds),
            "queuesAway": len(away),
            "brokersAway": sorted({queue.broker_name for queue in away} - answering),
            "losses": {cause: dict(counts) for cause, counts in sorted(self._losses.items())},
        }

    def _behind(self, bounds: Bounds, end: Offsets | None, now_ms: int) -> dict[str, int | None]:
        if end is None or not bounds:
            return {"lag": None, "behindMs": None}
        at = {q: max(end.positions.get(q, b.min_offset), b.min_offset) for q, b in bounds.items()}
        waiting = backlog(at, {queue: b.max_offset for queue, b in bounds.items()})
        while len(self._looks) > 1 and _read(self._looks[1][1], at):
            del self._looks[0]
        since = [self._since(queue, at[queue]) for queue in waiting]
        known = [ms for ms in since if ms is not None]
        behind_ms = None if len(known) < len(since) else now_ms - min(known, default=now_ms)
        return {"lag": sum(waiting.values()), "behindMs": behind_ms}

    def _since(self, queue: Any, offset: int) -> int | None:
        """When the message at ``offset`` was first seen to be there; None when it was at the first look at its queue."""
        seen = ((ms, bounds[queue].max_offset) for ms, bounds in self._looks if queue in bounds)
        first = next(seen, None)
        if first is None or first[1] > offset:
            return None
        return next((ms for ms, max_offset in seen if max_offset > offset), None)

    def _look(self, bounds: Bounds, now_ms: int) -> None:
        if self._looks and self._looks[-1][1] == bounds:
            return
        looks = self._looks
        looks.append((now_ms, bounds))
        if len(looks) > max(3, min(_LOOKS, _LOOKS_OF_QUEUES // max(1, len(bounds)))):
            # The one closest to its neighbours goes; the first two are what the message that waits longest is known by.
            del looks[min(range(2, len(looks) - 1), key=lambda i: looks[i + 1][0] - looks[i - 1][0])]


def _read(bounds: Bounds, at: dict[Any, int]) -> bool:
    """Whether all that was there at a look is read."""
    return all(at.get(queue, b.max_offset) >= b.max_offset for queue, b in bounds.items())


_REMEDY = "Set option 'failOnDataLoss' to 'warn' or 'ignore' to go on without these offsets"


def settled(policy: str, ranges: list[OffsetRange], lost: Sequence[tuple[OffsetRange, Cause]]) -> list[OffsetRange]:
    """What is left of a plan after its losses were reported: the one step of batches and streams."""
    report(policy, lost)
    return ranges


def report(policy: str, lost: Sequence[tuple[OffsetRange, Cause]]) -> None:
    """Fail, warn or note that offsets cannot be read. One call is one line, or one error."""
    if not lost:
        return
    count = sum(max(0, part.size) for part, _ in lost)
    shown = "; ".join(f"{part.queue} offsets {part.start} to {part.end} ({cause.value})" for part, cause in lost[:10])
    more = f" and {len(lost) - 10} more" if len(lost) > 10 else ""
    text = f"{count} offsets cannot be read any more: {shown}{more}"
    if policy == "fail":
        first = lost[0][0].queue
        raise DataLossError(text, topic=first.topic, queue=str(first), remedy=_REMEDY)
    logger.log(logging.WARNING if policy == "warn" else logging.INFO, "%s; failOnDataLoss=%s", text, policy)
