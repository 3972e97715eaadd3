"""Which queues a member drops and adds, and from which offset an added queue is read. Pure.

The rebalance mirrors ``RebalanceImpl``. Every member sorts the same lists and applies the same strategy, so all come to the
same result without talking to each other. If the queues or the members of the group are unknown, or the strategy raises, the
member keeps what it owns. The caller asks brokers, carries out the change, and runs the rebalance again in ``wait_s``.

The start offset mirrors ``RebalancePushImpl.computePullFromWhereWithException``. A group's committed offset decides; the
option ``consumeFromWhere`` counts only if there is none. A question that fails raises, and the queue is tried again later.
(Up to 4.9.8 Java took every error for "no offset" and jumped to the end.)
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


class Where(enum.Enum):
    """Java's ``ConsumeFromWhere``, without the names that mean the same."""

    LATEST = "CONSUME_FROM_LAST_OFFSET"
    EARLIEST = "CONSUME_FROM_FIRST_OFFSET"
    TIMESTAMP = "CONSUME_FROM_TIMESTAMP"


@dataclass(frozen=True, slots=True)
class ConsumeFrom:
    """The mode; of ``TIMESTAMP`` also the epoch ms."""

    where: Where = Where.LATEST
    timestamp_ms: int = 0

    @classmethod
    def of(cls, value: str | int) -> ConsumeFrom:
        """That of option 'consumeFromWhere': a name of ``Where``, or epoch ms."""
        return cls(Where.TIMESTAMP, value) if isinstance(value, int) else cls(Where[value.upper()])


class Start(NamedTuple):
    """Where a queue begins; ``stored``: the group surely has that offset. Where it has not, a later start may be another one."""

    offset: int
    stored: bool = True


@dataclass(frozen=True, slots=True)
class StartQuestions:
    """What may have to be asked of the queue's broker. Each raises ``RocketMQError`` when it has no answer.

    ``stored`` gives None where the broker says for sure that the group has no offset.
    """

    stored: Callable[[], int | None]
    max_offset: Callable[[], int]
    search: Callable[[int], int]


def start_offset(queue: MessageQueue, consume_from: ConsumeFrom, ask: StartQuestions) -> Start:
    """The first offset to pull, never below zero. Raises what a question raises.

    A retry topic starts at 0 in every mode: all of it failed in this group, so none of it is old news. Java asks for its
    end by ``CONSUME_FROM_TIMESTAMP``, and loses what was sent back before a member had the queue.
    """
    stored = ask.stored()
    if stored is not None:
        # 0 may be the answer for a young queue of which the group has no offset: later it is None, and the mode would decide.
        return Start(_checked(queue, "stored", stored), stored > 0)
    if queue.topic.startswith(RETRY_PREFIX) or consume_from.where is Where.EARLIEST:
        return Start(0, False)  # too small is put right by the first pull
    if consume_from.where is Where.LATEST:
        return Start(_checked(queue, "maximum", ask.max_offset()), False)
    found = ask.search(consume_from.timestamp_ms)
    return Start(_checked(queue, f"time {consume_from.timestamp_ms}", found), False)


def _checked(queue: MessageQueue, what: str, offset: int) -> int:
    if offset < 0:
        raise OffsetError(
            f"the offset of {what} is {offset}; expected one of at least 0",
            topic=queue.topic,
            queue=str(queue),
            remedy="The queue is tried again at the next rebalance; see the broker's log",
        )
    return offset


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

    An empty list of members is ignored as none is: a broker that has just started knows no member yet.
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
