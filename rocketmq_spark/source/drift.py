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

    @property
    def lossless(self) -> bool:
        return self in (State.READ, State.BEHIND, State.NEW)


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
) -> list[Drift]:
    """Every queue of either side. ``made_again`` are queues whose topic was deleted and created since; ``away`` are brokers that
    did not answer.
    """
    found = []
    for queue in sorted({*positions, *bounds}):
        position, bound = positions.get(queue), bounds.get(queue)
        found.append(Drift(queue, position, bound, *_state(queue, position, bound, queue in made_again, away)))
    return found


def _state(
    queue: MessageQueue, position: int | None, bound: QueueBounds | None, made_again: bool, away: Collection[str]
) -> tuple[State, int | None]:
    if bound is None:
        return (State.AWAY, None) if queue.broker_name in away else (State.GONE, None)
    if position is None:
        return State.NEW, bound.max_offset - bound.min_offset
    if made_again:
        return State.MADE_AGAIN, bound.max_offset - bound.min_offset
    if position > bound.max_offset:
        return State.WENT_BACK, position - bound.max_offset
    if position < bound.min_offset:
        return State.LOST, bound.min_offset - position
    return (State.BEHIND, bound.max_offset - position) if position < bound.max_offset else (State.READ, 0)
