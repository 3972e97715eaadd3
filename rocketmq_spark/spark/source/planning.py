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
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from rocketmq_spark.model import MessageQueue, OffsetRange, QueueBounds
from rocketmq_spark.pull.answers import Cause
from rocketmq_spark.spark.source.data_loss import Loss
from rocketmq_spark.spark.source.offsets import Bounds, Offsets, Positions


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
    return Offsets(kept, {}, {q: mark for q, mark in begin.newest_store_ms.items() if q in kept}, begin.source_identity)


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
    return position == bounds.max_offset or bounds.last_update_ms >= begin.newest_store_ms.get(queue, 0)


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
        *ranges_past_end(begin.positions, view.bounds),
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
    marks = {queue: mark for queue, mark in begin.newest_store_ms.items() if queue not in begins and queue in positions}
    return Offsets(positions, begins, marks, begin.source_identity), losses


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
    start = {**({} if after is begin else after.new_queue_starts), **({} if end is after else end.new_queue_starts)}
    whole = Offsets(end.positions, start)
    if initial is not None and begin == initial:
        whole = with_initial_starts(initial, whole)
    return replace(whole, newest_store_ms=newest_store_ms(whole.positions, after, view.bounds))


def readable_ranges(ranges: Sequence[OffsetRange], view: QueuesView) -> tuple[list[OffsetRange], list[Loss]]:
    """The ranges of a batch without what retention has deleted, and without topics that are gone."""
    deleted = (
        [r for r in ranges if view.is_topic_deleted(r.queue)]
        if view.deleted_topics or view.topics_missing_on_broker
        else []
    )
    truncated_ranges = truncated(ranges, view.master_bounds())
    losses = [
        *((part, Cause.TRUNCATED) for part in truncated_ranges),
        *((part, Cause.TOPIC_DELETED) for part in deleted),
    ]
    return without_lost(ranges, [*truncated_ranges, *deleted]), losses


def logged_end(ranges: Sequence[OffsetRange], end: Offsets, view: QueuesView) -> Offsets:
    """Where the ranges of a batch end that was planned in an earlier run, with the marks of its plan."""
    return Offsets({r.queue: r.end for r in ranges if r.queue in view.bounds}, newest_store_ms=end.newest_store_ms)


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


# The weight of a new sample in the estimated size of messages; earlier samples have the rest.
_SAMPLE_WEIGHT = 0.2


# The broker's default limit of a message (maxMessageSize). It is the estimated size while there is no sample.
ASSUMED_MESSAGE_BYTES = 4 << 20


SAMPLED_QUEUES = 4


def next_end(begin: Offsets, ends: Positions, begins: Positions, max_offsets: int | None = None) -> Offsets:
    """Where a batch from ``begin`` ends, given the ``ends`` of queues and the ``begins`` of those that are new.

    A queue without new messages keeps its position; no queue moves back here. ``max_offsets`` is divided among the queues in
    proportion to their backlogs, with at least one message each, as in Spark's Kafka source. Returns ``begin`` itself if nothing
    is new.
    """
    positions = dict(begin.positions)
    fresh = {queue: begins[queue] for queue in ends if queue not in positions}
    positions.update(fresh)
    waiting = backlog(positions, ends)
    if not waiting and not fresh:
        return begin
    for queue, count in rate_limit(waiting, max_offsets).items():
        positions[queue] += count
    return Offsets(positions, fresh)


def backlog(positions: Positions, ends: Positions) -> dict[MessageQueue, int]:
    """The number of unread offsets of each queue that has any."""
    return {q: end - at for q, end in ends.items() if (at := positions.get(q)) is not None and end > at}


def from_min_offsets(begin: Offsets, bounds: Bounds) -> Offsets:
    """``begin`` without positions below the minimum offsets: messages that retention deleted must not use up a batch's limit."""
    low = {q: bounds[q].min_offset for q, p in begin.positions.items() if q in bounds and p < bounds[q].min_offset}
    return replace(begin, positions={**begin.positions, **low}, new_queue_starts={}) if low else begin


def rate_limit(waiting: Mapping[MessageQueue, int], max_offsets: int | None) -> dict[MessageQueue, int]:
    """How many offsets of its backlog each queue may read. A queue with a small backlog gets at least one."""
    total = sum(waiting.values())
    if max_offsets is None or total <= max_offsets:
        return dict(waiting)
    return {queue: min(count, max(1, max_offsets * count // total)) for queue, count in sorted(waiting.items())}


def with_initial_starts(initial: Offsets, end: Offsets) -> Offsets:
    """The end of batch 0, with the start of this batch."""
    return replace(end, new_queue_starts={**initial.positions, **end.new_queue_starts})


def ranges(start: Offsets, end: Offsets) -> list[OffsetRange]:
    """The ranges of a batch from ``start`` to ``end``, sorted by queue, without empty ranges.

    If ``end`` has the start of a queue, this start overrides the one in ``start``: see ``offsets``. A queue that ``end`` does not
    name is not read.
    """
    # PySpark 4.0 and 4.1 plan such an empty batch at each restart. ``end.start`` is then of the batch that ended at ``end``.
    if start == end:
        return []
    between = []
    for queue in sorted(end.positions):
        begin, until = end.new_queue_starts.get(queue, start.positions.get(queue)), end.positions[queue]
        if begin is not None and until > begin:
            between.append(OffsetRange(queue, begin, until))
    return between


def new_queue_ranges(start: Offsets, end: Offsets) -> list[OffsetRange]:
    """The ranges, from offset 0, of queues that were new, or were created again, in a batch between ``start`` and ``end``.

    With asynchronous progress tracking Spark does not log each batch. After a restart it repeats all batches since the last
    logged one as a single batch, whose ``end`` has only the starts of queues that were new in the last of them.
    """
    return [
        OffsetRange(queue, 0, position)
        for queue, position in sorted(end.positions.items())
        if queue not in end.new_queue_starts and position > 0 and start.positions.get(queue, math.inf) > position
    ]


def combined_start(start: Offsets, end: Offsets) -> Offsets:
    """``start`` with what ``end`` adds: what the source reads, and the starts of queues that began between the two."""
    begins = {**dict.fromkeys(end.positions, 0), **start.positions, **end.new_queue_starts}
    return replace(start, positions=begins, source_identity={**start.source_identity, **end.source_identity})


def ranges_past_end(positions: Positions, bounds: Bounds) -> list[OffsetRange]:
    """The ranges between the end of a queue and a position that is after this end."""
    return [
        OffsetRange(queue, bounds[queue].max_offset, position)
        for queue, position in sorted((q, p) for q, p in positions.items() if q in bounds and bounds[q].max_offset < p)
    ]


def truncated(planned: Iterable[OffsetRange], bounds: Bounds) -> list[OffsetRange]:
    """The parts of ranges that lie before the minimum: deleted by retention."""
    return [
        OffsetRange(r.queue, r.start, min(r.end, bounds[r.queue].min_offset))
        for r in planned
        if (there := bounds.get(r.queue)) is not None and r.start < there.min_offset
    ]


def without_lost(planned: Iterable[OffsetRange], lost: Iterable[OffsetRange]) -> list[OffsetRange]:
    """The ranges, or parts of ranges, without the offsets that were lost at the beginnings of queues."""
    begins: dict[MessageQueue, int] = {}
    for part in lost:
        begins[part.queue] = max(part.end, begins.get(part.queue, 0))
    if not begins:
        return [r for r in planned if r.end > r.start]
    cut = [OffsetRange(r.queue, max(r.start, begins.get(r.queue, r.start)), r.end) for r in planned]
    return [r for r in cut if r.size > 0]


def newest_store_ms(positions: Positions, before: Offsets, bounds: Bounds) -> dict[MessageQueue, int]:
    """The newest store time seen of every queue that was read at all; see ``offsets``.

    A mark that was known ``before`` serves on while nothing was read behind it that is still there. Messages that were
    may be younger: where the age is unknown, a mark would take them for another topic's. At the end of a queue the
    last message that was read is its newest one, also when a clock was put back.
    """
    marked = {}
    for queue, position in positions.items():
        known = before.newest_store_ms.get(queue, 0)
        if (there := bounds.get(queue)) is not None:
            first, end, newest = there
            stays = position < end if newest > 0 else position in (before.positions.get(queue), first)
            known = max(newest, known if stays else 0)
        if position > 0 and known > 0:
            marked[queue] = known
    return marked


@dataclass(frozen=True, slots=True)
class TriggerLimits:
    """Limits of one batch; None: no limit."""

    max_offsets: int | None = None
    max_bytes: int | None = None
    min_offsets: int | None = None


class ReadLimitPolicy:
    """Limits batches by offsets and bytes. Remembers when the last batch was planned, and how large messages are.

    As in Spark's Kafka source, the first batch of a run does not wait for ``minOffsetsPerTrigger``. Otherwise runs that are
    shorter than ``maxTriggerDelay`` would read nothing.
    """

    def __init__(self, max_delay_s: float) -> None:
        self._max_delay_s = max_delay_s
        self._planned_at_s = -math.inf
        self._message_bytes: float | None = None

    def max_offsets(
        self,
        waiting: Mapping[MessageQueue, int],
        limits: TriggerLimits,
        sample: Callable[[MessageQueue], tuple[int, int]],
        now: float,
    ) -> int | None:
        """The maximum number of offsets in this batch: None without a limit, 0 to wait for more messages.

        ``sample`` returns the size in bytes of some unread messages of a queue, and how many offsets these messages span.
        """
        total = sum(waiting.values())
        if total and now - self._planned_at_s < self._max_delay_s and total < (limits.min_offsets or 0):
            return 0
        if not total or limits.max_bytes is None:
            return limits.max_offsets
        self._update_message_bytes(waiting, sample)
        fitting = max(1, int(limits.max_bytes / (self._message_bytes or ASSUMED_MESSAGE_BYTES)))
        return fitting if limits.max_offsets is None else min(limits.max_offsets, fitting)

    def batch_planned(self, now: float) -> None:
        """A batch was planned."""
        self._planned_at_s = now

    def nothing_to_read(self, now: float) -> None:
        """No queue has unread messages. In the first plan of a run, this counts as the first batch."""
        if self._planned_at_s == -math.inf:
            self._planned_at_s = now

    @property
    def has_no_sample(self) -> bool:
        """Whether no broker has returned a sample yet, so that the size of messages is a guess."""
        return not self._message_bytes

    def _update_message_bytes(
        self, waiting: Mapping[MessageQueue, int], sample: Callable[[MessageQueue], tuple[int, int]]
    ) -> None:
        largest = sorted(waiting, key=lambda queue: -waiting[queue])[:SAMPLED_QUEUES]
        samples = [sample(queue) for queue in largest]
        messages = sum(count for _, count in samples)
        if not messages:
            return
        mean = sum(size for size, _ in samples) / messages
        known = self._message_bytes
        self._message_bytes = mean if known is None else known + _SAMPLE_WEIGHT * (mean - known)
