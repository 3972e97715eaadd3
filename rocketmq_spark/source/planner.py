"""What a batch reads: pure arithmetic over positions, bounds and limits. Nothing here asks a broker."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from rocketmq_spark.model import MessageQueue, OffsetRange, QueueBounds
from rocketmq_spark.source.offsets import Offsets, Positions

Bounds = Mapping[MessageQueue, QueueBounds]


@dataclass(frozen=True, slots=True)
class WentBack:
    """A queue whose end lies before the position that a checkpoint holds."""

    queue: MessageQueue
    position: int
    end: int


def next_end(start: Offsets, ends: Positions, begins: Positions, limit: int | None) -> Offsets:
    """Where a batch from ``start`` ends, given the ``ends`` of queues and the ``begins`` of those that are new.

    Queues that stand still keep their position; a queue never moves back here. With a ``limit`` every queue gets its
    share of it in proportion to its backlog, at least one message, as in Spark's Kafka source.
    """
    positions = dict(start.positions)
    fresh = {queue: begins[queue] for queue in ends if queue not in positions}
    positions.update(fresh)
    backlog = {queue: end - positions[queue] for queue, end in ends.items() if end > positions[queue]}
    if not backlog:
        return start if not fresh else Offsets(positions, fresh)
    for queue, count in shares(backlog, limit).items():
        positions[queue] += count
    return Offsets(positions, fresh)


def shares(backlog: Mapping[MessageQueue, int], limit: int | None) -> dict[MessageQueue, int]:
    """How much of its backlog each queue may read. Queues with little are not starved by those with much."""
    total = sum(backlog.values())
    if limit is None or total <= limit:
        return dict(backlog)
    given = {}
    for queue in sorted(backlog):
        exact = limit * backlog[queue] / total
        given[queue] = min(backlog[queue], max(1, int(exact)))
    return given


def first_batch(initial: Offsets, end: Offsets) -> Offsets:
    """The end of the very first batch, which carries where that batch began."""
    return end if end.start == initial.positions else Offsets(end.positions, dict(initial.positions))


def ranges(start: Offsets, end: Offsets) -> list[OffsetRange]:
    """What lies between two offsets, sorted by queue, without empty ranges.

    A beginning that the end carries wins: see ``offsets``. A queue that ``end`` no longer names is not read.
    """
    found = []
    for queue in sorted(end.positions):
        begin = end.start.get(queue, start.positions.get(queue))
        if begin is not None and end.positions[queue] > begin:
            found.append(OffsetRange(queue, begin, end.positions[queue]))
    return found


def went_back(positions: Positions, bounds: Bounds) -> list[WentBack]:
    """Queues that end before the position to go on from."""
    return [
        WentBack(queue, position, bounds[queue].max_offset)
        for queue, position in sorted(positions.items())
        if queue in bounds and bounds[queue].max_offset < position
    ]


def truncated(found: Iterable[OffsetRange], bounds: Bounds) -> list[OffsetRange]:
    """The parts of ranges that lie before the minimum: deleted by retention."""
    return [
        OffsetRange(r.queue, r.start, min(r.end, bounds[r.queue].min_offset))
        for r in found
        if r.queue in bounds and r.start < bounds[r.queue].min_offset
    ]
