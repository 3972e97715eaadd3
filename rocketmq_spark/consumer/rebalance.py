"""The decisions of a rebalance: which queues a member drops and adds, and the start offset of an added queue. Pure.

The rebalance mirrors ``RebalanceImpl``. All members sort the same lists and apply the same strategy, so they get the same result
without a coordinator. If the queues or the members of the group are unknown, or the strategy raises, the member keeps its
queues. The caller sends the requests, applies the change, and rebalances again after ``rebalance_wait_s``.

The start offset mirrors ``RebalancePushImpl.computePullFromWhereWithException``. A queue starts at the committed offset of the
group. If the group has no committed offset, the option ``consumeFromWhere`` decides. If a request fails, ``start_offset``
raises its error, and the caller retries the queue later. (Java up to 4.9.8 treated every error as "no offset" and continued at
the end.)
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from rocketmq_spark.base.codes import RETRY_PREFIX
from rocketmq_spark.base.java import string_sort_key
from rocketmq_spark.base.threads import Failure, capture
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
    """Where a queue without a committed offset starts. ``timestamp_ms`` is the time of ``TIMESTAMP``, in ms since 1970."""

    where: ConsumeFromWhere = ConsumeFromWhere.LATEST
    timestamp_ms: int = 0

    @classmethod
    def parse(cls, value: str | int) -> ConsumeFrom:
        """Parse option 'consumeFromWhere': a name of ``ConsumeFromWhere``, or ms since 1970."""
        return (
            cls(ConsumeFromWhere.TIMESTAMP, value) if isinstance(value, int) else cls(ConsumeFromWhere[value.upper()])
        )


class StartOffset(NamedTuple):
    """The offset at which a queue starts.

    ``is_committed`` means that the broker has stored this offset for the group. If False, a later start may get another offset.
    """

    offset: int
    is_committed: bool = True


@dataclass(frozen=True, slots=True)
class StartOffsetRequests:
    """Functions that send the requests for a start offset to the queue's broker, and raise ``RocketMQError``.

    ``committed_offset`` returns None only if the broker reports that the group has no offset.
    """

    committed_offset: Callable[[], int | None]
    max_offset: Callable[[], int]
    offset_at_time: Callable[[int], int]


def start_offset(queue: MessageQueue, consume_from: ConsumeFrom, requests: StartOffsetRequests) -> StartOffset:
    """Return the first offset to pull. Raises the errors of the requests.

    A retry topic always begins at 0, because all of its messages failed in this group. (Java begins at the end of the retry
    topic with ``CONSUME_FROM_TIMESTAMP``. This loses messages that were sent back before a member had the queue.)
    """
    committed_offset = requests.committed_offset()
    if committed_offset is not None:
        # The offset 0 is not always a committed offset, because a broker also returns 0 for a new queue. A later request for
        # the same queue may return None.
        return StartOffset(_checked_offset(queue, "committed offset", committed_offset), committed_offset > 0)
    if queue.topic.startswith(RETRY_PREFIX) or consume_from.where is ConsumeFromWhere.EARLIEST:
        return StartOffset(0, False)  # if offset 0 is too small, the first pull corrects it
    if consume_from.where is ConsumeFromWhere.LATEST:
        end_offset = _checked_offset(queue, "maximum offset", requests.max_offset())
        # A broker returns the offset 0 for a new queue that has a message, but no offset for an empty queue. If the first
        # message arrives between the request for the committed offset and the request for the end offset, a start at the end
        # offset would skip the message, as in Java. So the committed offset is requested a second time. Another member may also
        # have committed an offset between the requests.
        committed_offset = requests.committed_offset() if end_offset > 0 else None
        return (
            StartOffset(end_offset, False)
            if committed_offset is None
            else StartOffset(_checked_offset(queue, "committed offset", committed_offset), committed_offset > 0)
        )
    offset = requests.offset_at_time(consume_from.timestamp_ms)
    return StartOffset(_checked_offset(queue, f"offset at time {consume_from.timestamp_ms}", offset), False)


def _checked_offset(queue: MessageQueue, source: str, offset: int) -> int:
    if offset < 0:
        raise OffsetError(
            f"the {source} is {offset}; expected a number of at least 0",
            topic=queue.topic,
            queue=str(queue),
            remedy="See the log of the broker. The next rebalance retries the queue",
        )
    return offset


REBALANCE_INTERVAL_S = 20.0
UNBALANCED_WAIT_S = 1.0  # as in Java since 5.2.0
# Without notices, rebalances are more frequent, because until its next rebalance, this member may read queues that a new member
# already reads.
NO_NOTICES_WAIT_S = 5.0
MIN_REBALANCE_INTERVAL_S = 1.0
MAX_PULL_SILENCE_MS = 120_000  # a queue that was not pulled for this long is dropped and added again

# A strategy gets a client id, the queues, and the client ids of all members, and returns the queues of the client with the id.
Allocate = Callable[[str, Sequence[MessageQueue], Sequence[str]], Sequence[MessageQueue]]


@dataclass(frozen=True, slots=True)
class Allocation:
    """The queues of one topic that are allocated to this member; None if the allocation is unknown, so that the member keeps
    its queues.

    ``problem`` is the failure of the allocation strategy. If there is a problem, the member is not balanced, and retries soon.
    """

    queues: frozenset[MessageQueue] | None
    problem: Failure | None = None

    @property
    def is_known(self) -> bool:
        return self.queues is not None


UNKNOWN_ALLOCATION = Allocation(None)


@dataclass(frozen=True, slots=True)
class QueueChange:
    """The queues of one topic to drop and then to add; both sorted."""

    queues_to_drop: tuple[MessageQueue, ...] = ()
    queues_to_add: tuple[MessageQueue, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.queues_to_drop or self.queues_to_add)


def allocate_broadcasting(queues: Collection[MessageQueue] | None) -> Allocation:
    """Allocate all queues to this member."""
    return UNKNOWN_ALLOCATION if queues is None else Allocation(frozenset(queues))


def allocate_clustering(
    allocate: Allocate, client_id: str, queues: Collection[MessageQueue] | None, members: Collection[str] | None
) -> Allocation:
    """Allocate queues to this member by the strategy.

    An empty list of members counts as unknown, because a broker that was just started does not know the members yet.
    """
    if queues is None or not members:
        return UNKNOWN_ALLOCATION
    sorted_lists = sorted(queues, key=queue_order), sorted(members, key=string_sort_key)
    # Any exception is captured, because the strategy may be a user's function.
    allocated_queues = capture(lambda: frozenset(allocate(client_id, *sorted_lists)))
    return Allocation(None, allocated_queues) if isinstance(allocated_queues, Failure) else Allocation(allocated_queues)


def queue_change(
    owned_queues: Mapping[MessageQueue, ProcessQueue], topic: str, allocation: Allocation, now_ms: int
) -> QueueChange:
    """Return the change from the queues of ``topic`` in ``owned_queues`` to ``allocation``.

    A queue whose pulls have stopped is dropped and added again, which restarts the pulls. If an ordered listener still has
    messages of a dropped queue, the queue is dropped again now, and is added when the listener returns.
    """
    if allocation.queues is None:
        return QueueChange()
    topic_queues = {queue: process_queue for queue, process_queue in owned_queues.items() if queue.topic == topic}
    stale_queues = {
        queue
        for queue, process_queue in topic_queues.items()
        if not process_queue.dropped and now_ms - process_queue.last_pull_ms > MAX_PULL_SILENCE_MS
    }
    dropped_queues = {
        queue
        for queue, process_queue in topic_queues.items()
        if process_queue.dropped or queue not in allocation.queues
    }
    return QueueChange(
        _sorted(dropped_queues | stale_queues),
        _sorted(allocation.queues - (topic_queues.keys() - dropped_queues - stale_queues)),
    )


def unsubscribed_queues(owned_queues: Iterable[MessageQueue], topics: Collection[str]) -> tuple[MessageQueue, ...]:
    """Return the owned queues of topics without a subscription. (Java releases such queues without a commit.)"""
    return _sorted(queue for queue in owned_queues if queue.topic not in topics)


def is_balanced(owned_queues: Mapping[MessageQueue, ProcessQueue], topic: str, allocation: Allocation) -> bool:
    """Whether the member owns exactly its allocated queues. An unknown allocation without a problem counts as balanced."""
    if allocation.queues is None:
        return allocation.problem is None
    return allocation.queues == {
        q for q, process_queue in owned_queues.items() if q.topic == topic and not process_queue.dropped
    }


def rebalance_wait_s(
    is_balanced: bool, interval_s: float = REBALANCE_INTERVAL_S, receives_notices: bool = True
) -> float:
    """Return the seconds until the next regular rebalance; ``interval_s`` is Java's ``waitInterval``.

    Without ``receives_notices``, no server notifies this member of changes of the group.
    """
    if not is_balanced:
        return min(UNBALANCED_WAIT_S, interval_s)
    return interval_s if receives_notices else min(NO_NOTICES_WAIT_S, interval_s)


def _sorted(queues: Iterable[MessageQueue]) -> tuple[MessageQueue, ...]:
    return tuple(sorted(queues, key=queue_order))
