"""Decides which queues a member drops and adds, and at which offset an added queue begins. Pure.

The rebalance mirrors ``RebalanceImpl``. Every member sorts the same lists and applies the same strategy, so all come to the
same result without talking to each other. If the queues or the members of the group are unknown, or the strategy raises, the
member keeps what it owns. The caller asks brokers, carries out the change, and runs the rebalance again in ``wait_s``.

The start offset mirrors ``RebalancePushImpl.computePullFromWhereWithException``. A group's committed offset decides; the
option ``consumeFromWhere`` counts only if there is none. If a request fails, the error is raised, and the queue is retried later.
(Java up to 4.9.8 treated every error as "no offset" and continued at the end.)
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from rocketmq_spark.base.codes import RETRY_PREFIX
from rocketmq_spark.base.java import string_order
from rocketmq_spark.base.threads import Failure, attempt
from rocketmq_spark.consumer.process_queue import ProcessQueue
from rocketmq_spark.errors import OffsetError
from rocketmq_spark.model import MessageQueue
from rocketmq_spark.queues.environment import queue_order


class ConsumeFromWhere(enum.Enum):
    """Java's ``ConsumeFromWhere``, without its synonyms."""

    LATEST = "CONSUME_FROM_LAST_OFFSET"
    EARLIEST = "CONSUME_FROM_FIRST_OFFSET"
    TIMESTAMP = "CONSUME_FROM_TIMESTAMP"


@dataclass(frozen=True, slots=True)
class ConsumeFrom:
    """Where a queue without a committed offset begins; ``TIMESTAMP`` has a time in ms since 1970."""

    where: ConsumeFromWhere = ConsumeFromWhere.LATEST
    timestamp_ms: int = 0

    @classmethod
    def of(cls, value: str | int) -> ConsumeFrom:
        """Parse option 'consumeFromWhere': a name of ``Where``, or ms since 1970."""
        return (
            cls(ConsumeFromWhere.TIMESTAMP, value) if isinstance(value, int) else cls(ConsumeFromWhere[value.upper()])
        )


class StartOffset(NamedTuple):
    """Where a queue begins. ``stored``: the broker has this offset of the group; otherwise a later start may differ."""

    offset: int
    committed: bool = True


@dataclass(frozen=True, slots=True)
class StartOffsetRequests:
    """Requests to the queue's broker. Each raises ``RocketMQError`` if it fails.

    ``stored`` returns None only if the broker reports that the group has no offset.
    """

    committed: Callable[[], int | None]
    max_offset: Callable[[], int]
    offset_at_time: Callable[[int], int]


def start_offset(queue: MessageQueue, consume_from: ConsumeFrom, requests: StartOffsetRequests) -> StartOffset:
    """Return the first offset to pull, at least 0. Raises the errors of the requests.

    A retry topic begins at 0 in every mode, because all of its messages failed in this group. Java begins at its end with
    ``CONSUME_FROM_TIMESTAMP``, and loses messages that were sent back before a member had the queue.
    """
    committed = requests.committed()
    if committed is not None:
        # 0 may mean a young queue without an offset. A later request would return None, and the mode would decide.
        return StartOffset(_checked(queue, "stored", committed), committed > 0)
    if queue.topic.startswith(RETRY_PREFIX) or consume_from.where is ConsumeFromWhere.EARLIEST:
        return StartOffset(0, False)  # the first pull corrects an offset that is too small
    if consume_from.where is ConsumeFromWhere.LATEST:
        end = _checked(queue, "maximum", requests.max_offset())
        # A broker says 0 of a young queue, but nothing of an empty one: if its first message came between the two requests, it
        # would be skipped, as Java skips it. So the broker is asked once more, and may know an offset of another member, too.
        committed = requests.committed() if end > 0 else None
        return (
            StartOffset(end, False)
            if committed is None
            else StartOffset(_checked(queue, "stored", committed), committed > 0)
        )
    offset = requests.offset_at_time(consume_from.timestamp_ms)
    return StartOffset(_checked(queue, f"time {consume_from.timestamp_ms}", offset), False)


def _checked(queue: MessageQueue, source: str, offset: int) -> int:
    if offset < 0:
        raise OffsetError(
            f"the offset of {source} is {offset}; expected one of at least 0",
            topic=queue.topic,
            queue=str(queue),
            remedy="The queue is tried again at the next rebalance; see the broker's log",
        )
    return offset


REBALANCE_INTERVAL_S = 20.0
UNBALANCED_WAIT_S = 1.0  # since 5.2.0
NO_NOTICES_WAIT_S = 5.0  # until this member releases the queues of a new one, both read them
MIN_INTERVAL_S = 1.0
PULL_EXPIRES_MS = 120_000

# Client id, queues and ids of all members to the queues of the client.
Allocate = Callable[[str, Sequence[MessageQueue], Sequence[str]], Sequence[MessageQueue]]


@dataclass(frozen=True, slots=True)
class Allocation:
    """This member's share of a topic's queues; None: it keeps its queues.

    ``problem`` is why the strategy failed. Only then the member counts as not balanced and retries soon.
    """

    queues: frozenset[MessageQueue] | None
    problem: Failure | None = None

    @property
    def is_known(self) -> bool:
        return self.queues is not None


UNCHANGED = Allocation(None)


@dataclass(frozen=True, slots=True)
class QueueChange:
    """The queues of one topic to drop and then to add; both sorted."""

    drop: tuple[MessageQueue, ...] = ()
    add: tuple[MessageQueue, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.drop or self.add)


def allocate_broadcasting(queues: Collection[MessageQueue] | None) -> Allocation:
    """Return all queues, for every member."""
    return UNCHANGED if queues is None else Allocation(frozenset(queues))


def allocate_clustering(
    allocate: Allocate, client_id: str, queues: Collection[MessageQueue] | None, members: Collection[str] | None
) -> Allocation:
    """Return this member's share by the strategy.

    An empty list of members counts as unknown, because a broker that has just started knows no members yet.
    """
    if queues is None or not members:
        return UNCHANGED
    ordered = sorted(queues, key=queue_order), sorted(members, key=string_order)
    allocated = attempt(lambda: frozenset(allocate(client_id, *ordered)))  # the strategy may be a user's function
    return Allocation(None, allocated) if isinstance(allocated, Failure) else Allocation(allocated)


def queue_change(
    owned: Mapping[MessageQueue, ProcessQueue], topic: str, allocation: Allocation, now_ms: int
) -> QueueChange:
    """Return the change from the queues of ``topic`` in ``owned`` to ``share``.

    A queue whose pulls have stopped is dropped and added again, which restarts them. So is a dropped queue that is not
    released yet because an orderly listener has its messages; it is added when the listener returns.
    """
    if allocation.queues is None:
        return QueueChange()
    owned_of_topic = {queue: process_queue for queue, process_queue in owned.items() if queue.topic == topic}
    stale = {
        q for q, held in owned_of_topic.items() if not held.dropped and now_ms - held.last_pull_ms > PULL_EXPIRES_MS
    }
    dropped = {q for q, held in owned_of_topic.items() if held.dropped or q not in allocation.queues}
    return QueueChange(_sorted(dropped | stale), _sorted(allocation.queues - (owned_of_topic.keys() - dropped - stale)))


def unsubscribed_queues(owned: Iterable[MessageQueue], topics: Collection[str]) -> tuple[MessageQueue, ...]:
    """Return owned queues of topics without a subscription. Unlike in Java, their offsets are committed before the release."""
    return _sorted(queue for queue in owned if queue.topic not in topics)


def is_balanced(owned: Mapping[MessageQueue, ProcessQueue], topic: str, allocation: Allocation) -> bool:
    """Whether the member owns exactly its share. True if the share is unknown."""
    if allocation.queues is None:
        return allocation.problem is None
    return allocation.queues == {
        q for q, process_queue in owned.items() if q.topic == topic and not process_queue.dropped
    }


def wait_s(balanced: bool, interval_s: float = REBALANCE_INTERVAL_S, has_notices: bool = True) -> float:
    """Return the seconds until the next regular run; ``interval_s`` is Java's ``waitInterval``.

    Without ``has_notices``, servers do not report changes of the group to its members.
    """
    if not balanced:
        return min(UNBALANCED_WAIT_S, interval_s)
    return interval_s if has_notices else min(NO_NOTICES_WAIT_S, interval_s)


def _sorted(queues: Iterable[MessageQueue]) -> tuple[MessageQueue, ...]:
    return tuple(sorted(queues, key=queue_order))
