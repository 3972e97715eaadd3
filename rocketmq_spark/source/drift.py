"""What has become of a reader's queues since it read them last. Pure."""

from __future__ import annotations

import enum
from collections.abc import Collection, Mapping
from typing import NamedTuple

from rocketmq_spark.model import MessageQueue, QueueBounds


class State(enum.Enum):
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
        return self in (State.READ, State.BEHIND, State.NEW)

    @property
    def waits(self) -> bool:
        """Whether its broker is waited for, and nobody knows of a loss."""
        return self in (State.AWAY, State.UNREGISTERED)


class Drift(NamedTuple):
    """One queue: where the reader goes on, what its broker has, and ``offsets``: messages behind, lost, or to read anew."""

    queue: MessageQueue
    position: int | None
    bounds: QueueBounds | None
    state: State
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
            state = State.AWAY if queue.broker_name in away else State.GONE
            found.append(
                Drift(queue, position, None, State.UNREGISTERED if queue.broker_name in unregistered else state)
            )
        else:
            found.append(Drift(queue, position, bound, *_state(position, bound, queue in made_again)))
    return found


def _state(position: int | None, bound: QueueBounds, made_again: bool) -> tuple[State, int | None]:
    if position is None:
        return State.NEW, bound.max_offset - bound.min_offset
    if made_again:
        return State.MADE_AGAIN, bound.max_offset - bound.min_offset
    if position > bound.max_offset:
        return State.WENT_BACK, position - bound.max_offset
    if position < bound.min_offset:
        return State.LOST, bound.min_offset - position
    return (State.BEHIND, bound.max_offset - position) if position < bound.max_offset else (State.READ, 0)
