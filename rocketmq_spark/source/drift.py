"""What has become of a reader's queues since it read them last. Pure."""

from __future__ import annotations

import enum
from collections.abc import Collection, Mapping
from typing import NamedTuple

from rocketmq_spark.model import MessageQueue, QueueBounds


class DriftState(enum.Enum):
    """``lossless`` states are those in which nothing is missing."""

    READ = "read"
    BEHIND = "behind"
    NEW = "new"
    LOST = "lost"
    WENT_BACK = "went back"
    MADE_AGAIN = "made again"
    GONE = "gone"
    AWAY = "not told"
    UNREGISTERED = "not registered"

    @property
    def lossless(self) -> bool:
        return self in (DriftState.READ, DriftState.BEHIND, DriftState.NEW)

    @property
    def waits(self) -> bool:
        """Whether its broker is waited for, and nobody knows of a loss."""
        return self in (DriftState.AWAY, DriftState.UNREGISTERED)


class Drift(NamedTuple):
    """One queue: where the reader goes on, what its broker has, and ``offsets``: messages behind, lost, or to read anew."""

    queue: MessageQueue
    position: int | None
    bounds: QueueBounds | None
    state: DriftState
    offsets: int | None = None


def drift(
    positions: Mapping[MessageQueue, int | None],
    bounds: Mapping[MessageQueue, QueueBounds],
    made_again: Collection[MessageQueue] = (),
    away: Collection[str] = (),
    unregistered: Collection[str] = (),
) -> list[Drift]:
    """Every queue of either side. ``made_again`` are queues whose topic was deleted and created since; ``away`` are brokers that
    did not answer, ``unregistered`` those that no name server knows now.
    """
    found = []
    for queue in sorted({*positions, *bounds}):
        position, bound = positions.get(queue), bounds.get(queue)
        if bound is None:
            state = DriftState.AWAY if queue.broker_name in away else DriftState.GONE
            found.append(
                Drift(queue, position, None, DriftState.UNREGISTERED if queue.broker_name in unregistered else state)
            )
        else:
            found.append(Drift(queue, position, bound, *_state(position, bound, queue in made_again)))
    return found


def _state(position: int | None, bound: QueueBounds, made_again: bool) -> tuple[DriftState, int | None]:
    if position is None:
        return DriftState.NEW, bound.max_offset - bound.min_offset
    if made_again:
        return DriftState.MADE_AGAIN, bound.max_offset - bound.min_offset
    if position > bound.max_offset:
        return DriftState.WENT_BACK, position - bound.max_offset
    if position < bound.min_offset:
        return DriftState.LOST, bound.min_offset - position
    return (DriftState.BEHIND, bound.max_offset - position) if position < bound.max_offset else (DriftState.READ, 0)
