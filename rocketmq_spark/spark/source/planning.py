"""The decisions of a plan, and the report of a stream's progress.

A plan decides where each queue continues, which messages were lost, and which queues it waits for. Pure. ``begin`` are the
positions that Spark passes, ``view`` is the current state of queues, ``frozen`` are the ends of a run that reads only messages
that existed at its start (AvailableNow); None for other runs.

The report (lag, unavailable brokers, losses) is beside the ends of queues in ``sources[i].latestOffset`` of a query's
progress. It is made from the answers that planning needs anyway, without further requests. ``progress`` reads it. Every data
loss passes through ``report_data_loss``, which option ``failOnDataLoss`` controls.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from rocketmq_spark.errors import DataLossError
from rocketmq_spark.model import MessageQueue, OffsetRange, QueueBounds
from rocketmq_spark.pull.answers import Cause
from rocketmq_spark.spark.source import planner
from rocketmq_spark.spark.source.offsets import Bounds, Offsets, Positions
from rocketmq_spark.spark.source.planner import backlog

Loss = tuple[OffsetRange, Cause]


@dataclass(frozen=True, slots=True)
class QueuesView:
    """The state of queues at one moment, topics that are known to be deleted, and brokers that only have slaves now.

    ``topics_missing_on_broker`` are topics with brokers that no longer have them, although others do. ``timed_out_brokers``
    brokers have
    not answered in time, so their bounds are older. ``connections`` are those that existed before brokers were asked.

    A slave may lack messages of its master: its bounds show what can be read there, not what is lost.
    """

    bounds: Bounds = field(default_factory=dict)
    deleted_topics: frozenset[str] = frozenset()
    topics_missing_on_broker: frozenset[tuple[str, str]] = frozenset()
    brokers_without_master: frozenset[str] = frozenset()
    timed_out_brokers: frozenset[str] = frozenset()
    connections: Mapping[str, object] = field(default_factory=dict)

    def is_topic_deleted(self, queue: MessageQueue) -> bool:
        """Whether the queue's topic was deleted, everywhere or on its broker."""
        return queue.topic in self.deleted_topics or (queue.topic, queue.broker_name) in self.topics_missing_on_broker

    def ends(self) -> dict[MessageQueue, int]:
        return {queue: bounds.max_offset for queue, bounds in self.bounds.items()}

    def master_bounds(self) -> Bounds:
        """The bounds that masters report. If only slaves are up, it is unknown whether a topic was created again."""
        if not self.brokers_without_master:
            return self.bounds
        return {
            queue: bounds
            for queue, bounds in self.bounds.items()
            if queue.broker_name not in self.brokers_without_master
        }


def drop_unsubscribed(begin: Offsets, topics: Collection[str]) -> Offsets:
    """``begin`` without topics that are no longer subscribed to; unchanged while no topic is known."""
    if not topics or all(queue.topic in topics for queue in begin.positions):
        return begin
    kept = {queue: position for queue, position in begin.positions.items() if queue.topic in topics}
    return Offsets(kept, {}, {q: mark for q, mark in begin.marks.items() if q in kept}, begin.reads)


def without_stale_replicas(begin: Offsets, view: QueuesView) -> QueuesView:
    """The view without queues of slaves that lack the messages at the position, or that are new: these wait for their master."""
    if not view.brokers_without_master:
        return view
    kept = {
        queue: bounds
        for queue, bounds in view.bounds.items()
        if queue.broker_name not in view.brokers_without_master or _has_next_messages(queue, bounds, begin)
    }
    return replace(view, bounds=kept)


def _has_next_messages(queue: MessageQueue, bounds: QueueBounds, begin: Offsets) -> bool:
    """Whether a slave has the next messages, if there are any.

    Messages older than those that were read belong to a topic that was deleted and created again: a slave keeps the old index.
    """
    position = begin.positions.get(queue, -1)
    if not bounds.min_offset <= position <= bounds.max_offset:
        return False
    return position == bounds.max_offset or bounds.last_update_ms >= begin.marks.get(queue, 0)


def without_timed_out(view: QueuesView) -> QueuesView:
    """The view without queues of silent brokers: planning them would delay the batch, and with it the other queues."""
    if not view.timed_out_brokers:
        return view
    return replace(
        view, bounds={q: bounds for q, bounds in view.bounds.items() if q.broker_name not in view.timed_out_brokers}
    )


def pending_queues(begin: Offsets, view: QueuesView, frozen: Positions | None) -> list[MessageQueue]:
    """Queues that a run must read further before it ends, and that return no messages now."""
    return [
        queue
        for queue, end in (frozen or {}).items()
        if not view.is_topic_deleted(queue)
        and end > begin.positions.get(queue, 0)
        and _lags_behind_target(queue, end, begin, view)
    ]


def _lags_behind_target(queue: MessageQueue, end: int, begin: Offsets, view: QueuesView) -> bool:
    """Whether a queue that must be read up to ``end`` has no more messages now, as on a slave that lags behind its master."""
    bounds = view.bounds.get(queue)
    if bounds is None or queue.broker_name not in view.brokers_without_master:
        return bounds is None
    return bounds.max_offset < end and begin.positions.get(queue, bounds.min_offset) >= bounds.max_offset


def apply_queue_changes(
    begin: Offsets,
    view: QueuesView,
    frozen: Positions | None,
    remade: Iterable[MessageQueue] = (),
    hidden: Mapping[MessageQueue, int] | None = None,
) -> tuple[Offsets, list[Loss]]:
    """``begin`` adapted to changes of its queues, and the losses: deleted topics, and queues to read from their start.

    ``remade`` queues were created again, although their offsets do not show it; ``hidden`` ones are no longer readable at their
    broker, which still reports their ends. If such an end is before the position, the topic was created again with fewer queues,
    and the position leaves the offsets. Returns ``begin`` itself if no position changed.
    """
    hidden = dict(sorted((hidden or {}).items()))
    vanished = {q for q, end in hidden.items() if end < begin.positions[q]}
    back = [
        *planner.ranges_past_end(begin.positions, view.bounds),
        *(OffsetRange(q, end, begin.positions[q]) for q, end in hidden.items() if q in vanished),
    ]
    restart = {part.queue: view.bounds[part.queue].min_offset for part in back if part.queue not in vanished}
    # Including the messages after the position that the run had to read.
    until = {part.queue: max(part.end, (frozen or {}).get(part.queue, 0)) for part in back}
    losses = [(OffsetRange(part.queue, part.start, until[part.queue]), Cause.WENT_BACK) for part in back]
    losses += [(part, Cause.WENT_BACK) for part in lost_target_ranges(begin, view, frozen, hidden)]
    for queue in remade:
        losses.append((_loss_of_unknown_size(begin, queue), Cause.WENT_BACK))
        restart[queue] = view.bounds[queue].min_offset
    gone = view.deleted_topics or view.topics_missing_on_broker
    dropped = sorted(queue for queue in begin.positions if view.is_topic_deleted(queue)) if gone else []
    losses += [(_loss_of_unknown_size(begin, queue), Cause.TOPIC_DELETED) for queue in dropped]
    unread = {q: end for q, end in hidden.items() if end > begin.positions[q]}
    losses += [(OffsetRange(q, begin.positions[q], end), Cause.QUEUE_GONE) for q, end in unread.items()]
    if not restart and not dropped and not unread and not vanished:
        return begin, losses
    begins = {**restart, **unread}
    leaving = vanished.union(dropped)
    positions = {q: position for q, position in begin.positions.items() if q not in leaving} | begins
    # Unread messages before a moved position are younger than the mark.
    marks = {queue: mark for queue, mark in begin.marks.items() if queue not in begins and queue in positions}
    return Offsets(positions, begins, marks, begin.reads), losses


def _loss_of_unknown_size(begin: Offsets, queue: MessageQueue) -> OffsetRange:
    """The loss at a position that is no longer valid; its size is unknown."""
    return OffsetRange(queue, begin.positions[queue], begin.positions[queue])


def lost_target_ranges(
    begin: Offsets, view: QueuesView, frozen: Positions | None, hidden: Mapping[MessageQueue, int]
) -> list[OffsetRange]:
    """Losses of messages that existed when the run began: the end of a queue went back."""
    frozen = frozen or {}
    return [
        OffsetRange(queue, now, frozen[queue])
        for queue, now in sorted(capped_target(view, frozen, hidden).items())
        if begin.positions.get(queue, 0) <= now < frozen[queue]
    ]


def capped_target(view: QueuesView, frozen: Positions, hidden: Mapping[MessageQueue, int]) -> Positions:
    """The ends of a run, lowered to messages that still exist, so that a loss is reported once."""
    bounds = view.master_bounds()
    reported = {**hidden, **{queue: bounds[queue].max_offset for queue in frozen if queue in bounds}}
    return {queue: min(end, reported.get(queue, end)) for queue, end in frozen.items()}


def readable_ends(view: QueuesView, frozen: Positions | None) -> dict[MessageQueue, int]:
    """How far may be read. Frozen ends are checked each time: a queue may have vanished or gone back since."""
    if frozen is None:
        return view.ends()
    return {q: min(end, view.bounds[q].max_offset) for q, end in frozen.items() if q in view.bounds}


def batch_end(begin: Offsets, after: Offsets, end: Offsets, view: QueuesView, initial: Offsets | None) -> Offsets:
    """``end`` with where it began and its marks. ``after`` is what ``apply_queue_changes`` made of ``begin``."""
    start = {**({} if after is begin else after.start), **({} if end is after else end.start)}
    whole = Offsets(end.positions, start)
    if initial is not None and begin == initial:
        whole = planner.with_initial_starts(initial, whole)
    return replace(whole, marks=planner.newest_store_ms(whole.positions, after, view.bounds))


def readable_ranges(ranges: Sequence[OffsetRange], view: QueuesView) -> tuple[list[OffsetRange], list[Loss]]:
    """The ranges of a batch without what retention has deleted, and without topics that are gone."""
    deleted = (
        [r for r in ranges if view.is_topic_deleted(r.queue)]
        if view.deleted_topics or view.topics_missing_on_broker
        else []
    )
    truncated = planner.truncated(ranges, view.master_bounds())
    losses = [
        *((part, Cause.TRUNCATED) for part in truncated),
        *((part, Cause.TOPIC_DELETED) for part in deleted),
    ]
    return planner.without_lost(ranges, [*truncated, *deleted]), losses


def logged_end(ranges: Sequence[OffsetRange], end: Offsets, view: QueuesView) -> Offsets:
    """Where the ranges of a batch end that was planned in an earlier run, with the marks of its plan."""
    return Offsets({r.queue: r.end for r in ranges if r.queue in view.bounds}, marks=end.marks)


def drop_recreated(
    ranges: Sequence[OffsetRange], view: QueuesView, remade: Collection[MessageQueue]
) -> tuple[list[OffsetRange], list[Loss]]:
    """Without the ranges of queues that went back while the query was down: their offsets mean other messages.

    A queue that ends before its range is read from its start by the next batch, so nothing of it is read here.
    """
    bounds = view.master_bounds()
    lost = {r.queue for r in ranges if r.queue in remade or (r.queue in bounds and bounds[r.queue].max_offset < r.end)}
    return [r for r in ranges if r.queue not in lost], [(r, Cause.WENT_BACK) for r in ranges if r.queue in lost]


logger = logging.getLogger(__name__)

# Looks at ends that are kept: at most so many, and of so many queues in all, for each report goes through them.
_MAX_SAMPLES, _MAX_SAMPLED_QUEUES = 32, 20_000


class ProgressReporter:
    """The looks and losses of a run. Of the last look and of where the last batch ends ``report_data_loss`` makes a report."""

    def __init__(self) -> None:
        self._samples: list[tuple[int, Bounds]] = []
        self._losses: dict[str, dict[str, int | None]] = {}

    def add_losses(self, parts: Iterable[Loss]) -> None:
        """Losses that the query goes on without. A part of no size is one whose size is unknown."""
        for part, cause in parts:
            of_cause = self._losses.setdefault(cause.name.lower(), {"ranges": 0, "offsets": 0})
            so_far = of_cause["offsets"]
            of_cause["ranges"] = (of_cause["ranges"] or 0) + 1
            of_cause["offsets"] = None if so_far is None or part.size <= 0 else so_far + part.size

    def report(self, view: QueuesView, end: Offsets | None, now_ms: int) -> dict[str, Any]:
        """The report: with ``end`` None, before a batch was planned, how far the run is behind is not known."""
        self._add_sample(view.bounds, now_ms)
        away = {q for q in end.positions if q not in view.bounds and not view.is_topic_deleted(q)} if end else set()
        answering = {queue.broker_name for queue in view.bounds}
        return {
            **self._lag(view.bounds, end, now_ms),
            "queues": len(view.bounds),
            "queuesAway": len(away),
            "brokersAway": sorted({queue.broker_name for queue in away} - answering),
            "losses": {cause: dict(counts) for cause, counts in sorted(self._losses.items())},
        }

    def _lag(self, bounds: Bounds, end: Offsets | None, now_ms: int) -> dict[str, int | None]:
        if end is None or not bounds:
            return {"lag": None, "behindMs": None}
        at = {q: max(end.positions.get(q, b.min_offset), b.min_offset) for q, b in bounds.items()}
        waiting = backlog(at, {queue: b.max_offset for queue, b in bounds.items()})
        while len(self._samples) > 1 and _is_read(self._samples[1][1], at):
            del self._samples[0]
        since = [self._first_seen_ms(queue, at[queue]) for queue in waiting]
        known = [ms for ms in since if ms is not None]
        behind_ms = None if len(known) < len(since) else now_ms - min(known, default=now_ms)
        return {"lag": sum(waiting.values()), "behindMs": behind_ms}

    def _first_seen_ms(self, queue: Any, offset: int) -> int | None:
        """When the message at ``offset`` was first seen to be there; None when it was at the first look at its queue."""
        seen = ((ms, bounds[queue].max_offset) for ms, bounds in self._samples if queue in bounds)
        first = next(seen, None)
        if first is None or first[1] > offset:
            return None
        return next((ms for ms, max_offset in seen if max_offset > offset), None)

    def _add_sample(self, bounds: Bounds, now_ms: int) -> None:
        if self._samples and self._samples[-1][1] == bounds:
            return
        looks = self._samples
        looks.append((now_ms, bounds))
        if len(looks) > max(3, min(_MAX_SAMPLES, _MAX_SAMPLED_QUEUES // max(1, len(bounds)))):
            # The one closest to its neighbours goes; the first two are what the message that waits longest is known by.
            del looks[min(range(2, len(looks) - 1), key=lambda i: looks[i + 1][0] - looks[i - 1][0])]


def _is_read(bounds: Bounds, at: dict[Any, int]) -> bool:
    """Whether all that was there at a look is read."""
    return all(at.get(queue, b.max_offset) >= b.max_offset for queue, b in bounds.items())


_REMEDY = "Set option 'failOnDataLoss' to 'warn' or 'ignore' to go on without these offsets"
_REMEDY_OF_RESET = f"{_REMEDY}; a stream then reads all present messages of a queue that went back"


def _range_text(part: OffsetRange) -> str:
    """The text of a lost part. A part without a size stands for all offsets from its start on; their number is unknown."""
    where = f"offsets {part.start} to {part.end}" if part.size > 0 else f"from offset {part.start} on"
    return f"{part.queue} {where}"


def _count_text(parts: Sequence[OffsetRange]) -> str:
    sizes = [part.size for part in parts if part.size > 0]
    if not sizes:
        return "an unknown number of"
    return f"{'at least ' if len(sizes) < len(parts) else ''}{sum(sizes)}"


def report_data_loss(policy: str, lost: Sequence[tuple[OffsetRange, Cause]]) -> None:
    """Fail, warn or note that offsets cannot be read. One call is one line, or one error."""
    if not lost:
        return
    shown = "; ".join(f"{_range_text(part)} ({cause.value})" for part, cause in lost[:10])
    more = f" and {len(lost) - 10} more" if len(lost) > 10 else ""
    text = f"{_count_text([part for part, _ in lost])} offsets cannot be read any more: {shown}{more}"
    if policy == "fail":
        first = lost[0][0].queue
        remedy = _REMEDY_OF_RESET if any(cause is Cause.WENT_BACK for _, cause in lost) else _REMEDY
        raise DataLossError(text, topic=first.topic, queue=str(first), remedy=remedy)
    logger.log(logging.WARNING if policy == "warn" else logging.INFO, "%s; failOnDataLoss=%s", text, policy)
