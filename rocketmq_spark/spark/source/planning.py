"""Plans a batch: where each queue continues and ends, which messages were lost, and which queues the batch waits for. Pure.

``start`` has the positions that Spark passes, and ``view`` the current state of the queues. ``target_ends`` has the ends of an
AvailableNow run, which reads only messages that existed at its start; it is None for other runs.

Tasks of a Python source cannot report to the driver, so the driver estimates the size of messages from samples of unread
messages.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import itemgetter

from rocketmq_spark.model import MessageQueue, OffsetRange, QueueBounds
from rocketmq_spark.pull.outcomes import Cause
from rocketmq_spark.spark.source.data_loss import Loss
from rocketmq_spark.spark.source.offsets import Bounds, Offsets, Positions


@dataclass(frozen=True, slots=True)
class QueuesView:
    """The state of the queues at one moment: bounds, deleted topics, and brokers that have no master now.

    ``topics_missing_on_broker`` has pairs of a topic and a broker: other brokers still have the topic, and this broker no longer
    has it. ``timed_out_brokers`` have not answered in time, so their bounds are older. ``connections`` has for each broker the
    first and the last connection over which its bounds may have come. ``topics`` are the topics to which the source subscribed at
    that moment. Views of different polls may be equal, but their ``poll_number`` differs.

    A slave may lack messages of its master, so the bounds of a slave show which messages can be read, but not which messages are
    lost.
    """

    bounds: Bounds = field(default_factory=dict)
    deleted_topics: frozenset[str] = frozenset()
    topics_missing_on_broker: frozenset[tuple[str, str]] = frozenset()
    brokers_without_master: frozenset[str] = frozenset()
    timed_out_brokers: frozenset[str] = frozenset()
    connections: Mapping[str, tuple[object, object]] = field(default_factory=dict)
    topics: frozenset[str] = frozenset()
    poll_number: int = field(default=0, compare=False)

    def is_topic_deleted(self, queue: MessageQueue) -> bool:
        """Whether the queue's topic was deleted, everywhere or on its broker."""
        return queue.topic in self.deleted_topics or (queue.topic, queue.broker_name) in self.topics_missing_on_broker

    def ends(self) -> dict[MessageQueue, int]:
        return {queue: bounds.max_offset for queue, bounds in self.bounds.items()}

    def master_bounds(self) -> Bounds:
        """Return the bounds that masters report. The bounds of slaves do not show whether a topic was created again."""
        if not self.brokers_without_master:
            return self.bounds
        return {
            queue: bounds
            for queue, bounds in self.bounds.items()
            if queue.broker_name not in self.brokers_without_master
        }


def has_store_times(view: QueuesView) -> bool:
    """Whether brokers report for each queue when its newest message was stored. An empty queue has no such time."""
    return min(map(itemgetter(2), view.bounds.values()), default=0) > 0


def without_unsubscribed_topics(start: Offsets, topics: Collection[str]) -> Offsets:
    """Return ``start`` without topics that the options no longer choose. While no topic is known, returns ``start`` unchanged."""
    if not topics or {queue.topic for queue in start.positions}.issubset(topics):
        return start
    kept_positions = {queue: position for queue, position in start.positions.items() if queue.topic in topics}
    return Offsets(
        kept_positions,
        {},
        {q: store_ms for q, store_ms in start.newest_store_ms.items() if q in kept_positions},
        start.source_identity,
    )


def without_stale_replicas(start: Offsets, view: QueuesView) -> QueuesView:
    """Return the view without some of the queues whose master is down: new queues, and queues whose slave lacks the message at
    the position of the query. The query reads these queues when the master is up again.
    """
    if not view.brokers_without_master:
        return view
    kept_bounds = {
        queue: bounds
        for queue, bounds in view.bounds.items()
        if queue.broker_name not in view.brokers_without_master or _has_next_messages(queue, bounds, start)
    }
    return replace(view, bounds=kept_bounds)


def _has_next_messages(queue: MessageQueue, bounds: QueueBounds, start: Offsets) -> bool:
    """Whether a slave has the next message of a queue, or the queue was read to the end that the slave has.

    If the newest message of the slave is older than the messages that the query has read, the topic was deleted and created
    again, and the slave has the wrong topic.
    """
    position = start.positions.get(queue, -1)
    if not bounds.min_offset <= position <= bounds.max_offset:
        return False
    return position == bounds.max_offset or bounds.last_update_ms >= start.newest_store_ms.get(queue, 0)


def without_timed_out_brokers(view: QueuesView) -> QueuesView:
    """Return the view without queues of brokers that timed out, because these queues would delay the batch of the other
    queues.
    """
    if not view.timed_out_brokers:
        return view
    return replace(
        view, bounds={q: bounds for q, bounds in view.bounds.items() if q.broker_name not in view.timed_out_brokers}
    )


def pending_queues(start: Offsets, view: QueuesView, target_ends: Positions | None) -> list[MessageQueue]:
    """Return the queues that an AvailableNow run must still read, and that have no messages to read now."""
    if target_ends is None:
        return []
    return [
        queue
        for queue, end in target_ends.items()
        if not view.is_topic_deleted(queue)
        and end > start.positions.get(queue, 0)
        and _lags_behind_target(queue, end, start, view)
    ]


def _lags_behind_target(queue: MessageQueue, end: int, start: Offsets, view: QueuesView) -> bool:
    """Whether a queue that must be read to ``end`` has no messages to read now, as on a slave that lags behind its master."""
    bounds = view.bounds.get(queue)
    if bounds is None or queue.broker_name not in view.brokers_without_master:
        return bounds is None
    return bounds.max_offset < end and start.positions.get(queue, bounds.min_offset) >= bounds.max_offset


def apply_queue_changes(
    start: Offsets,
    view: QueuesView,
    target_ends: Positions | None,
    recreated_queues: Collection[MessageQueue] = (),
    removed_ends: Mapping[MessageQueue, int] | None = None,
) -> tuple[Offsets, list[Loss]]:
    """Return ``start`` adapted to changes of its queues, and the losses. Returns ``start`` if no position changed.

    Queues of deleted topics lose their position. Queues that were created again are read from their first message.
    ``recreated_queues`` are queues that were created again although their offsets alone do not show this. ``removed_ends`` has
    the queues that clients can no longer read, with the ends that brokers still report. If such an end is before the position
    of the query, the topic was created again with fewer queues, and the queue loses its position.
    """
    past_end_ranges = ranges_past_end(start.positions, view.bounds)
    has_deleted_topics = view.deleted_topics or view.topics_missing_on_broker
    if not (past_end_ranges or recreated_queues or removed_ends or has_deleted_topics or target_ends):
        return start, []
    removed_ends = dict(sorted((removed_ends or {}).items()))
    vanished_queues = {q for q, end in removed_ends.items() if end < start.positions[q]}
    past_end_ranges += [
        OffsetRange(q, end, start.positions[q]) for q, end in removed_ends.items() if q in vanished_queues
    ]
    new_starts = {
        part.queue: view.bounds[part.queue].min_offset for part in past_end_ranges if part.queue not in vanished_queues
    }
    # An AvailableNow run must read up to the queue's target end, so the loss reaches at least to this end.
    loss_ends = {part.queue: max(part.end, (target_ends or {}).get(part.queue, 0)) for part in past_end_ranges}
    losses = [(OffsetRange(part.queue, part.start, loss_ends[part.queue]), Cause.WENT_BACK) for part in past_end_ranges]
    losses += [(part, Cause.WENT_BACK) for part in lost_target_ranges(start, view, target_ends, removed_ends)]
    for queue in recreated_queues:
        losses.append((_loss_of_unknown_size(start, queue), Cause.WENT_BACK))
        new_starts[queue] = view.bounds[queue].min_offset
    deleted_queues = (
        sorted(queue for queue in start.positions if view.is_topic_deleted(queue)) if has_deleted_topics else []
    )
    losses += [(_loss_of_unknown_size(start, queue), Cause.TOPIC_DELETED) for queue in deleted_queues]
    unread_ends = {q: end for q, end in removed_ends.items() if end > start.positions[q]}
    losses += [(OffsetRange(q, start.positions[q], end), Cause.QUEUE_GONE) for q, end in unread_ends.items()]
    if not new_starts and not deleted_queues and not unread_ends and not vanished_queues:
        return start, losses
    moved_positions = {**new_starts, **unread_ends}
    dropped_queues = vanished_queues.union(deleted_queues)
    positions = {q: position for q, position in start.positions.items() if q not in dropped_queues} | moved_positions
    # If a position was moved, messages before the new position may be newer than any message that was read. So the recorded
    # store time may be too old, and is dropped.
    newest_store_ms = {
        queue: store_ms
        for queue, store_ms in start.newest_store_ms.items()
        if queue not in moved_positions and queue in positions
    }
    return Offsets(positions, moved_positions, newest_store_ms, start.source_identity), losses


def _loss_of_unknown_size(start: Offsets, queue: MessageQueue) -> OffsetRange:
    """Return a loss at the position of ``queue``, which is no longer valid. The empty range stands for an unknown number of
    offsets.
    """
    return OffsetRange(queue, start.positions[queue], start.positions[queue])


def lost_target_ranges(
    start: Offsets, view: QueuesView, target_ends: Positions | None, removed_ends: Mapping[MessageQueue, int]
) -> list[OffsetRange]:
    """Return the ranges of messages that existed when an AvailableNow run began, and that their queues do not have any more."""
    target_ends = target_ends or {}
    return [
        OffsetRange(queue, end, target_ends[queue])
        for queue, end in sorted(capped_target_ends(view, target_ends, removed_ends).items())
        if start.positions.get(queue, 0) <= end < target_ends[queue]
    ]


def capped_target_ends(view: QueuesView, target_ends: Positions, removed_ends: Mapping[MessageQueue, int]) -> Positions:
    """Return the ends of an AvailableNow run, each lowered to the queue's current end if that is smaller. So messages between a
    lowered end and its earlier value are reported as lost only once.
    """
    bounds = view.master_bounds()
    current_ends = {**removed_ends, **{queue: bounds[queue].max_offset for queue in target_ends if queue in bounds}}
    return {queue: min(end, current_ends.get(queue, end)) for queue, end in target_ends.items()}


def readable_ends(view: QueuesView, target_ends: Positions | None) -> dict[MessageQueue, int]:
    """Return the ends up to which the batch may read. If a queue now ends before the end of an AvailableNow run, the queue's
    current end counts.
    """
    if target_ends is None:
        return view.ends()
    return {q: min(end, view.bounds[q].max_offset) for q, end in target_ends.items() if q in view.bounds}


def batch_end(
    start: Offsets, adapted_start: Offsets, end: Offsets, view: QueuesView, initial_offsets: Offsets | None
) -> Offsets:
    """Return ``end`` with the starts of new queues and the newest store times.

    ``adapted_start`` is the result of ``apply_queue_changes`` for ``start``.
    """
    new_queue_starts = {
        **({} if adapted_start == start else adapted_start.new_queue_starts),
        **({} if end == adapted_start else end.new_queue_starts),
    }
    complete_end = Offsets(end.positions, new_queue_starts)
    if initial_offsets is not None and start == initial_offsets:
        complete_end = with_initial_starts(initial_offsets, complete_end)
    return replace(complete_end, newest_store_ms=newest_store_ms(complete_end.positions, adapted_start, view.bounds))


def readable_ranges(ranges: Sequence[OffsetRange], view: QueuesView) -> tuple[list[OffsetRange], list[Loss]]:
    """Return the ranges that can be read, and the losses: messages that retention deleted, and messages of deleted topics."""
    deleted_ranges = (
        [r for r in ranges if view.is_topic_deleted(r.queue)]
        if view.deleted_topics or view.topics_missing_on_broker
        else []
    )
    truncated_parts = truncated_ranges(ranges, view.master_bounds())
    losses = [
        *((part, Cause.TRUNCATED) for part in truncated_parts),
        *((part, Cause.TOPIC_DELETED) for part in deleted_ranges),
    ]
    return without_lost_offsets(ranges, [*truncated_parts, *deleted_ranges]), losses


def logged_end(ranges: Sequence[OffsetRange], end: Offsets, view: QueuesView) -> Offsets:
    """Return the ends of the ranges of a batch that an earlier run planned, with the newest store times that the earlier run
    recorded.
    """
    return Offsets({r.queue: r.end for r in ranges if r.queue in view.bounds}, newest_store_ms=end.newest_store_ms)


def without_recreated_queues(
    ranges: Sequence[OffsetRange], view: QueuesView, recreated_queues: Collection[MessageQueue]
) -> tuple[list[OffsetRange], list[Loss]]:
    """Return the ranges without queues that were created again while the query was down, and the ranges of these queues as
    losses. At the same offsets, a queue that was created again has other messages.

    This batch also omits each queue that ends before the end of its range; the next batch reads these queues from their first
    messages.
    """
    bounds = view.master_bounds()
    lost_queues = {
        r.queue
        for r in ranges
        if r.queue in recreated_queues or (r.queue in bounds and bounds[r.queue].max_offset < r.end)
    }
    return [r for r in ranges if r.queue not in lost_queues], [
        (r, Cause.WENT_BACK) for r in ranges if r.queue in lost_queues
    ]


logger = logging.getLogger(__name__)


# The weight of a new sample in the estimated size of messages. All earlier samples together have the remaining weight.
_SAMPLE_WEIGHT = 0.2
# The estimated size of a message while there is no sample. The value is the broker's default maxMessageSize.
ASSUMED_MESSAGE_BYTES = 4 << 20
MAX_SAMPLED_QUEUES = 4


def next_end(start: Offsets, ends: Positions, first_offsets: Positions, max_offsets: int | None = None) -> Offsets:
    """Return the end of a batch from ``start`` to at most ``ends``; ``start`` itself if there are no new messages or queues.

    New queues start at ``first_offsets``. A queue without new messages keeps its position, and no position decreases.
    ``max_offsets`` is divided among the queues in proportion to their backlogs, with at least one message each, as in Spark's
    Kafka source.
    """
    positions = dict(start.positions)
    new_queue_starts = {queue: first_offsets[queue] for queue in ends if queue not in positions}
    positions.update(new_queue_starts)
    backlogs = backlog_by_queue(positions, ends)
    if not backlogs and not new_queue_starts:
        return start
    for queue, count in offsets_to_read(backlogs, max_offsets).items():
        positions[queue] += count
    return Offsets(positions, new_queue_starts)


def backlog_by_queue(positions: Positions, ends: Positions) -> dict[MessageQueue, int]:
    """Return the number of unread offsets of each queue that has unread offsets."""
    return {
        q: end - position for q, end in ends.items() if (position := positions.get(q)) is not None and end > position
    }


def raised_to_min_offsets(start: Offsets, bounds: Bounds) -> Offsets:
    """Return ``start`` with positions raised to the minimum offsets, because deleted messages must not count towards the limit of
    a batch.
    """
    raised_positions = {
        q: bounds[q].min_offset
        for q, position in start.positions.items()
        if q in bounds and position < bounds[q].min_offset
    }
    return (
        replace(start, positions={**start.positions, **raised_positions}, new_queue_starts={})
        if raised_positions
        else start
    )


def offsets_to_read(backlogs: Mapping[MessageQueue, int], max_offsets: int | None) -> dict[MessageQueue, int]:
    """Return the number of offsets that the batch may read from each queue. This number is at least 1, even if the queue has a
    small part of all backlogs.
    """
    unread_count = sum(backlogs.values())
    if max_offsets is None or unread_count <= max_offsets:
        return dict(backlogs)
    return {queue: min(count, max(1, max_offsets * count // unread_count)) for queue, count in sorted(backlogs.items())}


def with_initial_starts(initial_offsets: Offsets, end: Offsets) -> Offsets:
    """Return the end of batch 0 with the initial offsets as starts of its queues."""
    return replace(end, new_queue_starts={**initial_offsets.positions, **end.new_queue_starts})


def ranges(start: Offsets, end: Offsets) -> list[OffsetRange]:
    """Return the ranges of a batch from ``start`` to ``end``, sorted by queue, without empty ranges.

    If ``end`` records the start of a queue, the recorded start counts instead of the position in ``start`` (see ``offsets``).
    Queues that ``end`` does not name are not read.
    """
    # PySpark 4.0 and 4.1 plan an empty batch at each restart. The end of the empty batch is the end of the previous batch, and
    # records the starts of that batch.
    if start == end:
        return []
    batch_ranges = []
    for queue in sorted(end.positions):
        start_offset, end_offset = end.new_queue_starts.get(queue, start.positions.get(queue)), end.positions[queue]
        if start_offset is not None and end_offset > start_offset:
            batch_ranges.append(OffsetRange(queue, start_offset, end_offset))
    return batch_ranges


def new_queue_ranges(start: Offsets, end: Offsets) -> list[OffsetRange]:
    """Return ranges from offset 0 for queues that were new, or were created again, in a batch between ``start`` and ``end``.

    With asynchronous progress tracking, Spark does not log each batch. After a restart, Spark repeats all batches since the last
    logged batch as a single batch. ``end`` is the end of this single batch. It records the starts of queues that were new in the
    last of the repeated batches, but no starts of the earlier batches.
    """
    return [
        OffsetRange(queue, 0, position)
        for queue, position in sorted(end.positions.items())
        if queue not in end.new_queue_starts and position > 0 and start.positions.get(queue, math.inf) > position
    ]


def combined_start(start: Offsets, end: Offsets) -> Offsets:
    """Return ``start`` with the source identity of ``end``, and with the starts of the queues that were new, or were created
    again, after ``start``.
    """
    positions = {**dict.fromkeys(end.positions, 0), **start.positions, **end.new_queue_starts}
    return replace(start, positions=positions, source_identity={**start.source_identity, **end.source_identity})


def ranges_past_end(positions: Positions, bounds: Bounds) -> list[OffsetRange]:
    """For each queue that ends before its position, return the range from the end to the position."""
    return sorted(
        [
            OffsetRange(queue, queue_bounds.max_offset, position)
            for queue, position in positions.items()
            if (queue_bounds := bounds.get(queue)) is not None and queue_bounds.max_offset < position
        ]
    )


def truncated_ranges(ranges: Iterable[OffsetRange], bounds: Bounds) -> list[OffsetRange]:
    """Return the parts of the ranges before the minimum offsets, which retention deleted."""
    return [
        OffsetRange(r.queue, r.start, min(r.end, bounds[r.queue].min_offset))
        for r in ranges
        if (queue_bounds := bounds.get(r.queue)) is not None and r.start < queue_bounds.min_offset
    ]


def without_lost_offsets(ranges: Iterable[OffsetRange], lost_ranges: Iterable[OffsetRange]) -> list[OffsetRange]:
    """Return the ranges without the offsets before the last end of ``lost_ranges`` in each queue, and without empty ranges."""
    lost_ends: dict[MessageQueue, int] = {}
    for part in lost_ranges:
        lost_ends[part.queue] = max(part.end, lost_ends.get(part.queue, 0))
    if not lost_ends:
        return [r for r in ranges if r.end > r.start]
    shortened_ranges = [OffsetRange(r.queue, max(r.start, lost_ends.get(r.queue, r.start)), r.end) for r in ranges]
    return [r for r in shortened_ranges if r.size > 0]


def newest_store_ms(positions: Positions, offsets_before: Offsets, bounds: Bounds) -> dict[MessageQueue, int]:
    """Return the newest store time of each queue that has been read; see ``offsets``.

    If the bounds have a store time and the queue has unread messages, the later of this time and the time in ``offsets_before``
    counts. If the bounds have a store time and the queue was read to its end, the time of the bounds counts, also if the clock of
    the broker was set back.

    If the bounds have no store time, the time in ``offsets_before`` counts unless the query has since read a message that still
    exists. After such a read, the time in ``offsets_before`` may be too old. With this time, the message that was read would look
    like a message of a topic that was created again.
    """
    store_ms_by_queue = {}
    for queue, position in positions.items():
        newest_read_ms = offsets_before.newest_store_ms.get(queue, 0)
        if (queue_bounds := bounds.get(queue)) is not None:
            min_offset, max_offset, newest_ms = queue_bounds
            is_earlier_time_valid = (
                position < max_offset
                if newest_ms > 0
                else position in (offsets_before.positions.get(queue), min_offset)
            )
            newest_read_ms = max(newest_ms, newest_read_ms if is_earlier_time_valid else 0)
        if position > 0 and newest_read_ms > 0:
            store_ms_by_queue[queue] = newest_read_ms
    return store_ms_by_queue


@dataclass(frozen=True, slots=True)
class TriggerLimits:
    """The read limits of a batch. None in a field means no limit."""

    max_offsets: int | None = None
    max_bytes: int | None = None
    min_offsets: int | None = None


class ReadLimitPolicy:
    """Decides how many offsets a batch may read. Remembers when the last batch was planned, and the mean size of the sampled
    messages.

    As in Spark's Kafka source, the first batch of a run does not wait for ``minOffsetsPerTrigger``, so that a run which is
    shorter than ``maxTriggerDelay`` reads some messages.
    """

    def __init__(self, max_delay_s: float) -> None:
        self._max_delay_s = max_delay_s
        self._planned_at_s = -math.inf
        self._mean_message_bytes: float | None = None

    def max_offsets(
        self,
        backlogs: Mapping[MessageQueue, int],
        limits: TriggerLimits,
        fetch_sample: Callable[[MessageQueue], tuple[int, int]],
        now_s: float,
    ) -> int | None:
        """Return the maximum number of offsets in this batch. None means no limit, and 0 means that the batch waits for more
        messages.

        ``fetch_sample`` returns the size in bytes of some unread messages of a queue, and the number of offsets that they span.
        """
        unread_count = sum(backlogs.values())
        if unread_count and now_s - self._planned_at_s < self._max_delay_s and unread_count < (limits.min_offsets or 0):
            return 0
        if not unread_count or limits.max_bytes is None:
            return limits.max_offsets
        self._update_mean_message_bytes(backlogs, fetch_sample)
        max_offsets_by_bytes = max(1, int(limits.max_bytes / (self._mean_message_bytes or ASSUMED_MESSAGE_BYTES)))
        return max_offsets_by_bytes if limits.max_offsets is None else min(limits.max_offsets, max_offsets_by_bytes)

    def note_planned_batch(self, now_s: float) -> None:
        """Note that a batch was planned at ``now_s``."""
        self._planned_at_s = now_s

    def note_nothing_to_read(self, now_s: float) -> None:
        """Note that no queue has unread messages. The first plan of a run counts as the first batch of the run, even if it had
        nothing to read.
        """
        if self._planned_at_s == -math.inf:
            self._planned_at_s = now_s

    @property
    def has_no_sample(self) -> bool:
        """Whether no broker has returned a sample yet. Without a sample, ``ASSUMED_MESSAGE_BYTES`` is the estimated size of a
        message.
        """
        return not self._mean_message_bytes

    def _update_mean_message_bytes(
        self, backlogs: Mapping[MessageQueue, int], fetch_sample: Callable[[MessageQueue], tuple[int, int]]
    ) -> None:
        sampled_queues = sorted(backlogs, key=lambda queue: -backlogs[queue])[:MAX_SAMPLED_QUEUES]
        samples = [fetch_sample(queue) for queue in sampled_queues]
        message_count = sum(count for _, count in samples)
        if not message_count:
            return
        mean_bytes = sum(size for size, _ in samples) / message_count
        estimated_bytes = self._mean_message_bytes
        self._mean_message_bytes = (
            mean_bytes if estimated_bytes is None else estimated_bytes + _SAMPLE_WEIGHT * (mean_bytes - estimated_bytes)
        )
