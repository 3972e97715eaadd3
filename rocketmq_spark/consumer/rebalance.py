"""Which queues a member drops and which it adds: from what it owns, what there is and who is there to what is to be done.

Mirrors ``RebalanceImpl``. Every member sorts the same lists and applies the same strategy, so that all come to one result
without speaking to each other. What is not known changes nothing: no list of queues or of members means to keep what is
owned, and so does a strategy that raises.

Pure: the caller asks brokers, carries out the change, and runs it again, in ``wait_s``.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from rocketmq_spark.consumer.process_queue import ProcessQueue
from rocketmq_spark.failures import Failure, attempt
from rocketmq_spark.java_strings import string_order
from rocketmq_spark.model import MessageQueue
from rocketmq_spark.queues.environment import queue_order

WAIT_S = 20.0
UNBALANCED_WAIT_S = 1.0  # since 5.2.0
MIN_INTERVAL_S = 1.0
PULL_EXPIRES_MS = 120_000

# Own id, queues, ids of all members: the own queues.
Allocate = Callable[[str, Sequence[MessageQueue], Sequence[str]], Sequence[MessageQueue]]


@dataclass(frozen=True, slots=True)
class QueueShare:
    """The queues of a topic that are this member's; None: it keeps what it has.

    ``problem`` is why a strategy gave none. Only then the member counts as not balanced and soon tries again.
    """

    queues: frozenset[MessageQueue] | None
    problem: Failure | None = None

    @property
    def known(self) -> bool:
        return self.queues is not None


KEPT = QueueShare(None)


@dataclass(frozen=True, slots=True)
class QueueChange:
    """What is to be done for one topic, in this order; both sorted."""

    drop: tuple[MessageQueue, ...] = ()
    add: tuple[MessageQueue, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.drop or self.add)


def broadcasting_share(queues: Collection[MessageQueue] | None) -> QueueShare:
    """Every member has all queues."""
    return KEPT if queues is None else QueueShare(frozenset(queues))


def clustering_share(
    allocate: Allocate, me: str, queues: Collection[MessageQueue] | None, members: Collection[str] | None
) -> QueueShare:
    """This member's part by the strategy.

    An empty list of members is ignored as none is: a broker that has just started knows nobody yet.
    """
    if queues is None or not members:
        return KEPT
    ordered = sorted(queues, key=queue_order), sorted(members, key=string_order)
    given = attempt(lambda: frozenset(allocate(me, *ordered)))  # a user's own code, perhaps
    return QueueShare(None, given) if isinstance(given, Failure) else QueueShare(given)


def change(owned: Mapping[MessageQueue, ProcessQueue], topic: str, share: QueueShare, now_ms: int) -> QueueChange:
    """What leads from the queues of ``topic`` among ``owned`` to ``share``.

    A queue whose pulls have stopped is dropped and added again, which heals it. So is one that was dropped and could not be
    given up yet: an orderly listener is busy with it, and as long as it is the queue is not added.
    """
    if share.queues is None:
        return QueueChange()
    mine = {queue: held for queue, held in owned.items() if queue.topic == topic}
    stale = {q for q, held in mine.items() if not held.dropped and now_ms - held.last_pull_ms > PULL_EXPIRES_MS}
    gone = {q for q, held in mine.items() if held.dropped or q not in share.queues}
    return QueueChange(_sorted(gone | stale), _sorted(share.queues - (mine.keys() - gone - stale)))


def strangers(owned: Iterable[MessageQueue], topics: Collection[str]) -> tuple[MessageQueue, ...]:
    """Queues of topics that are not subscribed to any more. Their offsets are stored before they go, unlike Java's."""
    return _sorted(queue for queue in owned if queue.topic not in topics)


def is_balanced(owned: Mapping[MessageQueue, ProcessQueue], topic: str, share: QueueShare) -> bool:
    """Whether the member has exactly its part now; a part that is not known counts as had."""
    if share.queues is None:
        return share.problem is None
    return share.queues == {q for q, held in owned.items() if q.topic == topic and not held.dropped}


def wait_s(balanced: bool, interval_s: float = WAIT_S) -> float:
    """Until the next run, if nothing asks for one before; ``interval_s`` is Java's ``waitInterval``."""
    return interval_s if balanced else min(UNBALANCED_WAIT_S, interval_s)


def _sorted(queues: Iterable[MessageQueue]) -> tuple[MessageQueue, ...]:
    return tuple(sorted(queues, key=queue_order))
