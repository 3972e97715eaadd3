"""Where a queue is read from when it becomes ours.

Mirrors ``RebalancePushImpl.computePullFromWhereWithException``. A group's stored offset decides; the mode of the consumer is
asked only where there is none. A question that failed is no answer: it raises, and the queue is tried again later. (Up to
4.9.8 Java took every error for "none" and jumped to the end.)
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from rocketmq_spark.codes import RETRY_PREFIX
from rocketmq_spark.errors import OffsetError
from rocketmq_spark.model import MessageQueue


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
    """Where a queue begins; ``stored``: the group has that offset already. Where it has not, a later start may be another one."""

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
        return Start(_checked(queue, "stored", stored))
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
