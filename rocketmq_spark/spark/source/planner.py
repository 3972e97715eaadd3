"""What a batch reads: arithmetic over positions, bounds and limits. Pure.

Tasks cannot report back to a Python source, so the size of messages is estimated from samples of unread messages.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace

from rocketmq_spark.model import MessageQueue, OffsetRange
from rocketmq_spark.spark.source.offsets import Bounds, Offsets, Positions

# A sample says a fifth; the rest is what earlier ones said.
_LEARNING = 0.2
# What a message may have at most as brokers are delivered (maxMessageSize): taken for its size while there is no sample.
LARGEST_BYTES = 4 << 20
SAMPLED_QUEUES = 4


def next_end(begin: Offsets, ends: Positions, begins: Positions, max_offsets: int | None = None) -> Offsets:
    """Where a batch from ``begin`` ends, given the ``ends`` of queues and the ``begins`` of those that are new.

    Queues that stand still keep their position; a queue never moves back here. With ``max_offsets`` every queue gets its
    share of it in proportion to its backlog, at least one message, as in Spark's Kafka source. Gives ``begin`` itself
    when nothing is new.
    """
    positions = dict(begin.positions)
    fresh = {queue: begins[queue] for queue in ends if queue not in positions}
    positions.update(fresh)
    waiting = backlog(positions, ends)
    if not waiting and not fresh:
        return begin
    for queue, count in shares(waiting, max_offsets).items():
        positions[queue] += count
    return Offsets(positions, fresh)


def backlog(positions: Positions, ends: Positions) -> dict[MessageQueue, int]:
    """Offsets to read by queue, without the queues that have none."""
    return {q: end - at for q, end in ends.items() if (at := positions.get(q)) is not None and end > at}


def above_minimum(begin: Offsets, bounds: Bounds) -> Offsets:
    """``begin`` where messages still are: what retention deleted takes no share of a batch, however much it was."""
    low = {q: bounds[q].min_offset for q, p in begin.positions.items() if q in bounds and p < bounds[q].min_offset}
    return replace(begin, positions={**begin.positions, **low}, start={}) if low else begin


def shares(waiting: Mapping[MessageQueue, int], max_offsets: int | None) -> dict[MessageQueue, int]:
    """How much of its backlog each queue may read. Queues with little are not starved by those with much."""
    total = sum(waiting.values())
    if max_offsets is None or total <= max_offsets:
        return dict(waiting)
    return {queue: min(count, max(1, max_offsets * count // total)) for queue, count in sorted(waiting.items())}


def first_batch(initial: Offsets, end: Offsets) -> Offsets:
    """The end of the very first batch, which carries where that batch began."""
    return replace(end, start={**initial.positions, **end.start})


def ranges(start: Offsets, end: Offsets) -> list[OffsetRange]:
    """What lies between two offsets, sorted by queue, without empty ranges.

    A beginning that the end carries wins: see ``offsets``. A queue that ``end`` no longer names is not read.
    """
    # PySpark 4.0 and 4.1 plan this at each restart. An end that carries beginnings describes the batch before it.
    if start == end:
        return []
    between = []
    for queue in sorted(end.positions):
        begin, until = end.start.get(queue, start.positions.get(queue)), end.positions[queue]
        if begin is not None and until > begin:
            between.append(OffsetRange(queue, begin, until))
    return between


def begun_between(start: Offsets, end: Offsets) -> list[OffsetRange]:
    """Queues that began, or began again, in a batch between the two offsets, from their first offset on.

    With asynchronous progress tracking Spark does not log each batch. After a restart it repeats all batches since the last one
    that it logged, as one, so ``end`` does not carry the beginnings of those between.
    """
    return [
        OffsetRange(queue, 0, position)
        for queue, position in sorted(end.positions.items())
        if queue not in end.start and position > 0 and start.positions.get(queue, math.inf) > position
    ]


def went_back(positions: Positions, bounds: Bounds) -> list[OffsetRange]:
    """What lies between the end of a queue and the later position to go on from."""
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


def without(planned: Iterable[OffsetRange], lost: Iterable[OffsetRange]) -> list[OffsetRange]:
    """The ranges, or parts of ranges, without the offsets that were lost at the beginnings of queues."""
    begins: dict[MessageQueue, int] = {}
    for part in lost:
        begins[part.queue] = max(part.end, begins.get(part.queue, 0))
    if not begins:
        return [r for r in planned if r.end > r.start]
    cut = [OffsetRange(r.queue, max(r.start, begins.get(r.queue, r.start)), r.end) for r in planned]
    return [r for r in cut if r.size > 0]


def marks(positions: Positions, before: Offsets, bounds: Bounds) -> dict[MessageQueue, int]:
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
    """Limits of one batch; None means none."""

    max_offsets: int | None = None
    max_bytes: int | None = None
    min_offsets: int | None = None


class Admission:
    """State between batches: when the last one was planned, and how large messages are.

    As in Spark's Kafka source, the first batch of a run takes what is unread, and only later batches wait for more. Otherwise
    runs that are shorter than the delay would read nothing.
    """

    def __init__(self, max_delay_s: float) -> None:
        self._max_delay_s = max_delay_s
        self._admitted_at = -math.inf
        self._message_bytes: float | None = None

    def max_offsets(
        self,
        waiting: Mapping[MessageQueue, int],
        wanted: TriggerLimits,
        sample: Callable[[MessageQueue], tuple[int, int]],
        now: float,
    ) -> int | None:
        """The most offsets of this batch, None without a limit, 0 to wait for more.

        ``sample`` gives bytes of some messages that wait in a queue, and how many offsets they take.
        """
        total = sum(waiting.values())
        if total and now - self._admitted_at < self._max_delay_s and total < (wanted.min_offsets or 0):
            return 0
        if not total or wanted.max_bytes is None:
            return wanted.max_offsets
        self._learn(waiting, sample)
        fitting = max(1, int(wanted.max_bytes / (self._message_bytes or LARGEST_BYTES)))
        return fitting if wanted.max_offsets is None else min(wanted.max_offsets, fitting)

    def admitted(self, now: float) -> None:
        """A batch was planned."""
        self._admitted_at = now

    def found_nothing(self, now: float) -> None:
        """All queues were looked at, and have nothing unread. For the first plan of a run, this counts as a batch."""
        if self._admitted_at == -math.inf:
            self._admitted_at = now

    @property
    def guesses(self) -> bool:
        """Whether there was no sample yet by which bytes could be made offsets."""
        return not self._message_bytes

    def _learn(self, waiting: Mapping[MessageQueue, int], sample: Callable[[MessageQueue], tuple[int, int]]) -> None:
        largest = sorted(waiting, key=lambda queue: -waiting[queue])[:SAMPLED_QUEUES]
        samples = [sample(queue) for queue in largest]
        messages = sum(count for _, count in samples)
        if not messages:
            return
        mean = sum(size for size, _ in samples) / messages
        known = self._message_bytes
        self._message_bytes = mean if known is None else known + _LEARNING * (mean - known)
