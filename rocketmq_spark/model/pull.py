"""Pulls: ranges of offsets, what is asked for, and what an answer means."""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from rocketmq_spark.model.message import MessageQueue, ReceivedMessage
from rocketmq_spark.model.route import MASTER_ID


@dataclass(frozen=True, slots=True, order=True)
class OffsetRange:
    """Offsets ``[start, end)`` of one queue."""

    queue: MessageQueue
    start: int
    end: int

    @property
    def size(self) -> int:
        return self.end - self.start


class QueueEnd(NamedTuple):
    """Where a queue ended, and the address of the master that said so: another copy may lack what that one stored."""

    offset: int
    master: str


@dataclass(frozen=True, slots=True)
class QueueBounds:
    """A queue at its broker: first offset kept, next offset to be written, newest store time in ms (0 if none)."""

    min_offset: int
    max_offset: int
    last_update_ms: int

    def clamp(self, offset: int) -> int:
        """The nearest offset that can be read next."""
        return min(max(offset, self.min_offset), self.max_offset)


@dataclass(frozen=True, slots=True)
class Filter:
    """What a broker sends of a topic: a tag expression (``TAG``) or an SQL one (``SQL92``)."""

    expression: str = "*"
    kind: str = "TAG"

    def __bool__(self) -> bool:
        return self.expression != "*"


NO_FILTER = Filter()


@dataclass(frozen=True, slots=True)
class PullRequest:
    """One pull of a member of ``group``: at most ``count`` messages of ``queue`` from ``offset`` on.

    Mirrors what ``DefaultMQPushConsumerImpl.pullMessage`` passes to ``PullAPIWrapper``.

    Args:
        filter: What is wanted; tags are compared once more by text when the answer comes.
        post_filter: Send the filter along; otherwise the broker takes the one of the last heartbeat.
        version_ms: When the subscription was made; a broker that knows a newer one refuses.
        suspend_s: How long a broker keeps the request while there is nothing new; 0: it answers at once.
        commit_offset: The group's offset of the queue, stored on the way if the request goes to the master; None for none.
        broker_id: The replica to ask: what the last answer suggested, 0 for the master.
        max_bytes: A bound of the answer in bytes, as far as the broker knows it (since 5.0); None for none.
        decoded: False leaves messages as they are stored, to be read later.
    """

    group: str
    queue: MessageQueue
    offset: int
    count: int = 32
    filter: Filter = NO_FILTER
    post_filter: bool = False
    version_ms: int = 0
    suspend_s: float = 15.0
    commit_offset: int | None = None
    broker_id: int = MASTER_ID
    max_bytes: int | None = None
    decoded: bool = True


class PullStatus(enum.Enum):
    """What came of a pull, as in Java's ``PullStatus``."""

    FOUND = "FOUND"
    NO_NEW_MSG = "NO_NEW_MSG"
    NO_MATCHED_MSG = "NO_MATCHED_MSG"
    OFFSET_ILLEGAL = "OFFSET_ILLEGAL"


@dataclass(frozen=True, slots=True)
class PullAnswer:
    """A broker's answer to a ``PullRequest``.

    ``next_offset`` is where to go on: after OFFSET_ILLEGAL the nearest offset that there is. ``messages`` are those that
    were wanted, so that there may be none although some were FOUND; one that cannot be decoded has a ``decode_error``.
    If the request was not to decode them they are ``stored``, the unwanted too, and ``read`` gives what ``messages`` would be,
    one by one. Of an answer that becomes large they are the first, and ``next_offset`` is that of the next one.
    ``reset``: an operator moved the group to ``next_offset``, which its broker says once.
    """

    status: PullStatus
    next_offset: int
    min_offset: int
    max_offset: int
    messages: Sequence[ReceivedMessage] = ()
    broker_id: int = MASTER_ID
    stored: bytes | memoryview = b""
    read: Callable[[], Iterable[ReceivedMessage]] = tuple
    reset: bool = False


class LogState(NamedTuple):
    """A broker's commit log: its end, how far its index is behind, how long the first send in its queue waits, when that
    was known, by the monotonic clock, and for how long one send has had the log for itself, behind which others wait.
    """

    max_offset: int
    behind: int
    head_wait_ms: int
    at_s: float
    lock_ms: int = 0

    @property
    def indexed(self) -> int:
        """Up to where messages can be read from their queues."""
        return self.max_offset - self.behind
