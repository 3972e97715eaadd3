"""Plans a batch: where each queue continues and ends, which messages were lost, and which queues the batch waits for. Pure.

``begin`` has the positions that Spark passes, and ``view`` the current state of the queues. ``frozen`` has the ends of an
AvailableNow run, which reads only messages that existed at its start; it is None for other runs.

Tasks cannot report back to a Python source, so the size of messages is estimated from samples of unread messages.
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
    """The state of the queues at one moment: bounds, deleted topics, and brokers that have no master now.

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
    """Return ``begin`` without topics that the options no longer choose; unchanged if no topic is known now."""
    if not topics or all(queue.topic in topics for queue in begin.positions):
        return begin
    kept = {queue: position for queue, position in begin.positions.items() if queue.topic in topics}
    return Offsets(kept, {}, {q: mark for q, mark in begin.newest_store_ms.items() if q in kept}, begin.source_identity)


def without_stale_replicas(begin: Offsets, view: QueuesView) -> QueuesView:
    """Return the view without queues of slaves that lack the message at the position, and without new queues of slaves. These
    queues wait for their master.
    """
    if not view.brokers_without_master:
        return view
    kept = {
        queue: bounds
        for queue, bounds in view.bounds.items()
        if queue.broker_name not in view.brokers_without_master or _has_next_messages(queue, bounds, begin)
    }
    return replace(view, bounds=kept)


def _has_next_messages(queue: MessageQueue, bounds: QueueBounds, begin: Offsets) -> bool:
    """Whether a slave has the next messages of a queue, or the queue was read to its end.

    If the newest message of the slave is older than the messages that were read, the topic was deleted and created again, and the
    slave still has the old topic.
    """
    position = begin.positions.get(queue, -1)
    if not bounds.min_offset <= position <= bounds.max_offset:
        return False
    return position == bounds.max_offset or bounds.last_update_ms >= begin.newest_store_ms.get(queue, 0)


def without_timed_out(view: QueuesView) -> QueuesView:
    """Return the view without queues of brokers that timed out: to plan them would delay the batch of the other queues."""
    if not view.timed_out_brokers:
        return view
    return replace(
        view, bounds={q: bounds for q, bounds in view.bounds.items() if q.broker_name not in view.timed_out_brokers}
    )


def pending_queues(begin: Offsets, view: QueuesView, frozen: Positions | None) -> list[MessageQueue]:
    """Return the queues that an AvailableNow run has not read to its ends, and that have no messages to read now."""
    return [
        queue
        for queue, end in (frozen or {}).items()
        if not view.is_topic_deleted(queue)
        and end > begin.positions.get(queue, 0)
        and _lags_behind_target(queue, end, begin, view)
    ]


def _lags_behind_target(queue: MessageQueue, end: int, begin: Offsets, view: QueuesView) -> bool:
    """Whether a queue that must be read to ``end`` has no messages to read now, as on a slave that lags behind its master."""
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
    """Return ``begin`` adapted to changes of its queues, and the losses. Returns ``begin`` itself if no position changed.

    Queues of deleted topics lose their position; queues that were created again are read from their first message. The offsets
    alone do not show that the queues in ``remade`` were created again. The queues in ``hidden`` are no longer read by their
    broker, which still reports their ends. If such an end is before the position, the topic was created again with fewer queues,
    and the queue loses its position.
    """
    hidden = dict(sorted((hidden or {}).items()))
    vanished = {q for q, end in hidden.items() if end < begin.positions[q]}
    back = [
        *ranges_past_end(begin.positions, view.bounds),
        *(OffsetRange(q, end, begin.positions[q]) for q, end in hidden.items() if q in vanished),
    ]
    restart = {part.queue: view.bounds[part.queue].min_offset for part in back if part.queue not in vanished}
    # The loss includes the messages after the position that an AvailableNow run had to read.
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
    # After a position was moved, messages before it may be newer than any message that was read.
    marks = {queue: mark for queue, mark in begin.newest_store_ms.items() if queue not in begins and queue in positions}
    return Offsets(positions, begins, marks, begin.source_identity), losses


def _loss_of_unknown_size(begin: Offsets, queue: MessageQueue) -> OffsetRange:
    """The loss at a position that is no longer valid. An empty range stands for an unknown number of offsets."""
    return OffsetRange(queue, begin.positions[queue], begin.positions[queue])


def lost_target_ranges(
    begin: Offsets, view: QueuesView, frozen: Positions | None, hidden: Mapping[MessageQueue, int]
) -> list[OffsetRange]:
    """Return the messages that existed when an AvailableNow run began, and that the queue does not have any more."""
    frozen = frozen or {}
    return [
        OffsetRange(queue, now, frozen[queue])
        for queue, now in sorted(capped_target(view, frozen, hidden).items())
        if begin.positions.get(queue, 0) <= now < frozen[queue]
    ]


def capped_target(view: QueuesView, frozen: Positions, hidden: Mapping[MessageQueue, int]) -> Positions:
    """Return the ends of an AvailableNow run, lowered to the current ends, so that a loss is reported once."""
    bounds = view.master_bounds()
    reported = {**hidden, **{queue: bounds[queue].max_offset for queue in frozen if queue in bounds}}
    return {queue: min(end, reported.get(queue, end)) for queue, end in frozen.items()}


def readable_ends(view: QueuesView, frozen: Positions | None) -> dict[MessageQueue, int]:
    """Return the ends up to which the batch may read. An AvailableNow end is lowered if the queue ends before it now."""
    if frozen is None:
        return view.ends()
    return {q: min(end, view.bounds[q].max_offset) for q, end in frozen.items() if q in view.bounds}


def batch_end(begin: Offsets, after: Offsets, end: Offsets, view: QueuesView, initial: Offsets | None) -> Offsets:
    """Return ``end`` with the starts of new queues and the newest store times.

    ``after`` is the result of ``apply_queue_changes`` for ``begin``.
    """
    start = {**({} if after is begin else after.new_queue_starts), **({} if end is after else end.new_queue_starts)}
    whole = Offsets(end.positions, start)
    if initial is not None and begin == initial:
        whole = with_initial_starts(initial, whole)
    return replace(whole, newest_store_ms=newest_store_ms(whole.positions, after, view.bounds))


def readable_ranges(ranges: Sequence[OffsetRange], view: QueuesView) -> tuple[list[OffsetRange], list[Loss]]:
    """Return the ranges without messages that retention deleted and without deleted topics, and these losses."""
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
    """Return the ends of the ranges of a batch that an earlier run planned, with the newest store times of its plan."""
    return Offsets({r.queue: r.end for r in ranges if r.queue in view.bounds}, newest_store_ms=end.newest_store_ms)


def drop_recreated(
    ranges: Sequence[OffsetRange], view: QueuesView, remade: Collection[MessageQueue]
) -> tuple[list[OffsetRange], list[Loss]]:
    """Return the ranges without queues that were created again while the query was down, and these losses: at the same offsets,
    such a queue has other messages.

    If a queue ends before its range, the next batch reads it from its first message, so this batch omits it, too.
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
    """Return the end of a batch from ``begin`` to at most ``ends``; ``begin`` itself if there are no new messages or queues.

    New queues start at ``begins``. A queue without new messages keeps its position, and no position decreases. ``max_offsets`` is
    divided among the queues in proportion to their backlogs, with at least one message each, as in Spark's Kafka source.
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
    """Return the number of unread offsets of each queue that has any."""
    return {q: end - at for q, end in ends.items() if (at := positions.get(q)) is not None and end > at}


def from_min_offsets(begin: Offsets, bounds: Bounds) -> Offsets:
    """Return ``begin`` with positions raised to the minimum offsets: deleted messages must not use up the limit of a batch."""
    low = {q: bounds[q].min_offset for q, p in begin.positions.items() if q in bounds and p < bounds[q].min_offset}
    return replace(begin, positions={**begin.positions, **low}, new_queue_starts={}) if low else begin


def rate_limit(waiting: Mapping[MessageQueue, int], max_offsets: int | None) -> dict[MessageQueue, int]:
    """Return how many offsets of its backlog each queue may read: at least one, also if the backlog is small."""
    total = sum(waiting.values())
    if max_offsets is None or total <= max_offsets:
        return dict(waiting)
    return {queue: min(count, max(1, max_offsets * count // total)) for queue, count in sorted(waiting.items())}


def with_initial_starts(initial: Offsets, end: Offsets) -> Offsets:
    """Return the end of batch 0 with the initial offsets as starts of its queues."""
    return replace(end, new_queue_starts={**initial.positions, **end.new_queue_starts})


def ranges(start: Offsets, end: Offsets) -> list[OffsetRange]:
    """Return the ranges of a batch from ``start`` to ``end``, sorted by queue, without empty ranges.

    If ``end`` records the start of a queue, it overrides the position in ``start`` (see ``offsets``). Queues that ``end`` does
    not name are not read.
    """
    # PySpark 4.0 and 4.1 plan this empty batch at each restart. The recorded starts belong to the batch before it.
    if start == end:
        return []
    between = []
    for queue in sorted(end.positions):
        begin, until = end.new_queue_starts.get(queue, start.positions.get(queue)), end.positions[queue]
        if begin is not None and until > begin:
            between.append(OffsetRange(queue, begin, until))
    return between


def new_queue_ranges(start: Offsets, end: Offsets) -> list[OffsetRange]:
    """Return ranges from offset 0 for queues that were new, or were created again, in a batch between ``start`` and ``end``.

    With asynchronous progress tracking Spark does not log each batch. After a restart it repeats all batches since the last
    logged one as a single batch, whose ``end`` has only the starts of queues that were new in the last of them.
    """
    return [
        OffsetRange(queue, 0, position)
        for queue, position in sorted(end.positions.items())
        if queue not in end.new_queue_starts and position > 0 and start.positions.get(queue, math.inf) > position
    ]


def combined_start(start: Offsets, end: Offsets) -> Offsets:
    """Return ``start`` with the source identity of ``end``, and with the starts of queues that were new after ``start``."""
    begins = {**dict.fromkeys(end.positions, 0), **start.positions, **end.new_queue_starts}
    return replace(start, positions=begins, source_identity={**start.source_identity, **end.source_identity})


def ranges_past_end(positions: Positions, bounds: Bounds) -> list[OffsetRange]:
    """Return the range between the end of a queue and its position, for each queue that ends before its position."""
    return [
        OffsetRange(queue, bounds[queue].max_offset, position)
        for queue, position in sorted((q, p) for q, p in positions.items() if q in bounds and bounds[q].max_offset < p)
    ]


def truncated(planned: Iterable[OffsetRange], bounds: Bounds) -> list[OffsetRange]:
    """Return the parts of the ranges before the minimum offsets, which retention deleted."""
    return [
        OffsetRange(r.queue, r.start, min(r.end, bounds[r.queue].min_offset))
        for r in planned
        if (there := bounds.get(r.queue)) is not None and r.start < there.min_offset
    ]


def without_lost(planned: Iterable[OffsetRange], lost: Iterable[OffsetRange]) -> list[OffsetRange]:
    """Return the ranges without the offsets up to the end of ``lost`` in each queue, and without empty ranges."""
    begins: dict[MessageQueue, int] = {}
    for part in lost:
        begins[part.queue] = max(part.end, begins.get(part.queue, 0))
    if not begins:
        return [r for r in planned if r.end > r.start]
    cut = [OffsetRange(r.queue, max(r.start, begins.get(r.queue, r.start)), r.end) for r in planned]
    return [r for r in cut if r.size > 0]


def newest_store_ms(positions: Positions, before: Offsets, bounds: Bounds) -> dict[MessageQueue, int]:
    """Return the newest store time of each queue that has been read; see ``offsets``.

    The time in ``before`` remains valid while the queue has unread messages, or nothing was read since. Otherwise, messages that
    were read since may be newer: with the old time, they would look like those of a topic that was created again. If a queue was
    read to its end, the time is that of its last message, also if the clock of the broker was set back.
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
    """The read limit of a batch; None: no limit."""

    max_offsets: int | None = None
    max_bytes: int | None = None
    min_offsets: int | None = None


class ReadLimitPolicy:
    """Decides how many offsets a batch may read. Remembers when the last batch was planned, and the mean size of messages.

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
        """Return the maximum number of offsets in this batch: None without a limit, 0 to wait for more messages.

        ``sample`` returns the size in bytes of some unread messages of a queue, and the number of offsets that they span.
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
        """Note that a batch was planned at ``now``."""
        self._planned_at_s = now

    def nothing_to_read(self, now: float) -> None:
        """Note that no queue has unread messages. In the first plan of a run, this counts as the first batch."""
        if self._planned_at_s == -math.inf:
            self._planned_at_s = now

    @property
    def has_no_sample(self) -> bool:
        """Whether no broker has returned a sample yet; then ``ASSUMED_MESSAGE_BYTES`` is the size of a message."""
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
