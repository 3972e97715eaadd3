"""What a batch reads: arithmetic over positions, bounds and limits. Pure.

Tasks cannot report back to a Python source, so the size of messages is estimated from samples of unread messages.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace

from rocketmq_spark.model import MessageQueue, OffsetRange
from rocketmq_spark.spark.source.offsets import Bounds, Offsets, Positions

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
    return replace(begin, positions={**begin.positions, **low}, start={}) if low else begin


def rate_limit(waiting: Mapping[MessageQueue, int], max_offsets: int | None) -> dict[MessageQueue, int]:
    """How many offsets of its backlog each queue may read. A queue with a small backlog gets at least one."""
    total = sum(waiting.values())
    if max_offsets is None or total <= max_offsets:
        return dict(waiting)
    return {queue: min(count, max(1, max_offsets * count // total)) for queue, count in sorted(waiting.items())}


def with_initial_starts(initial: Offsets, end: Offsets) -> Offsets:
    """The end of batch 0, with the start of this batch."""
    return replace(end, start={**initial.positions, **end.start})


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
        begin, until = end.start.get(queue, start.positions.get(queue)), end.positions[queue]
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
        if queue not in end.start and position > 0 and start.positions.get(queue, math.inf) > position
    ]


def combined_start(start: Offsets, end: Offsets) -> Offsets:
    """``start`` with what ``end`` adds: what the source reads, and the starts of queues that began between the two."""
    begins = {**dict.fromkeys(end.positions, 0), **start.positions, **end.start}
    return replace(start, positions=begins, reads={**start.reads, **end.reads})


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
        known = before.marks.get(queue, 0)
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
