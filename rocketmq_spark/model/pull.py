"""Where topics are (brokers, their addresses and queues), and pulls: ranges of offsets, what is asked for, and what an
answer means.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from rocketmq_spark.base.codes import MAX_QUEUES, Perm
from rocketmq_spark.errors import RemoteProtocolError
from rocketmq_spark.model.message import MessageQueue, ReceivedMessage


class OffsetWindow(NamedTuple):
    """The offset that a pull asked for, and the one where its broker went on. A batch has offsets between them; it may begin
    before, but not before ``least``, and ends by ``most``.
    """

    start: int
    end: int
    least: int | None = None
    most: int | None = None

    def holds(self, first: int, count: int) -> bool:
        """Whether a batch of so many offsets can lie there."""
        fits = (self.least is None or self.least <= first) and (self.most is None or first + count <= self.most)
        return fits and first < self.end and first + count > self.start


MASTER_ID = 0


@dataclass(frozen=True, slots=True)
class QueueData:
    """Queues of a topic on one broker as the name server reports them: counts and permission bits (4 read, 2 write)."""

    broker_name: str
    read_queues: int
    write_queues: int
    perm: int
    topic_sys_flag: int = 0


@dataclass(frozen=True, slots=True)
class BrokerData:
    """Addresses of one broker name by broker id; 0 is the master and may be missing while it is down.

    ``acting``: what stands at 0 is a slave that acts for a master that is down (a name server with ``supportActingMaster``).
    It answers and may lack the last messages.
    """

    broker_name: str
    cluster: str
    addresses: Mapping[int, str]
    acting: bool = False

    @property
    def master(self) -> str | None:
        return self.addresses.get(MASTER_ID)

    @property
    def own_master(self) -> str | None:
        """The master, unless it is an acting one: data that the master lacks exist nowhere."""
        return None if self.acting else self.master

    @property
    def slaves(self) -> list[str]:
        """By broker id."""
        return [address for number, address in sorted(self.addresses.items()) if number != MASTER_ID]

    def replica(self, read_from: str, suggested: int = MASTER_ID) -> str | None:
        """Where to read: the master; a slave where one is wanted or suggested, or where the master is missing.

        ``read_from`` is the option: only ``master`` never leads to a slave.
        """
        if read_from == "slave":
            return self._first_slave or self.master
        if read_from == "hint":
            wanted = self.addresses.get(suggested) if suggested != MASTER_ID else None
            return wanted or self.master or self._first_slave
        return self.master

    @property
    def _first_slave(self) -> str | None:
        return next(iter(self.slaves), None)


@dataclass(frozen=True, slots=True)
class TopicRoute:
    """Where a topic lives. ``static`` is true for static (mapped) topics, which have logical queues."""

    topic: str
    queues: tuple[QueueData, ...]
    brokers: Mapping[str, BrokerData]
    order_conf: str | None = None
    static: bool = False

    def readable(self) -> list[MessageQueue]:
        """Sorted queues that may be pulled: read permission, any live replica (Java's subscribe set)."""
        return self._queues_for_readers(Perm.READ)

    def kept(self) -> list[MessageQueue]:
        """The same with those that may not be pulled now, and have their messages all the same."""
        return self._queues_for_readers(0)

    def _queues_for_readers(self, perm: int) -> list[MessageQueue]:
        return sorted(
            MessageQueue(self.topic, data.broker_name, i)
            for data in self.queues
            if data.perm & perm == perm and data.broker_name in self.brokers
            for i in range(data.read_queues)
        )

    @property
    def closed(self) -> list[str]:
        """Brokers that have queues of the topic and let nobody read them."""
        return sorted(data.broker_name for data in self.queues if data.read_queues and not data.perm & Perm.READ)

    def writable(self) -> list[MessageQueue]:
        """Queues that may be sent to, in Java's publish order: write permission and a live master.

        Raises ``RemoteProtocolError`` for an ``order_conf`` that is none: an operator writes it.

        Mirrors ``MQClientInstance.topicRouteData2TopicPublishInfo``.
        """
        if self.order_conf:
            return _ordered(self.topic, self.order_conf)
        return [
            MessageQueue(self.topic, data.broker_name, i)
            for data in sorted(self.queues, key=lambda d: d.broker_name)
            if data.perm & Perm.WRITE and data.broker_name in self.brokers and self.brokers[data.broker_name].master
            for i in range(data.write_queues)
        ]


def _ordered(topic: str, conf: str) -> list[MessageQueue]:
    try:
        parts = [item.rsplit(":", 1) for item in conf.split(";") if item]
        counts = [(name, int(count)) for name, count in parts]
        if sum(max(0, count) for _, count in counts) > MAX_QUEUES:
            raise ValueError(f"it has more than {MAX_QUEUES} queues")
    except ValueError as e:
        raise RemoteProtocolError(
            f"the route has orderTopicConf {conf!r}; expected broker:queues;…", topic=topic
        ) from e
    return [MessageQueue(topic, name, i) for name, count in counts for i in range(count)]


class OffsetRange(NamedTuple):
    """Offsets ``[start, end)`` of one queue. A tuple, as ``MessageQueue``: a batch may have one for each of 100,000 queues."""

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


class QueueBounds(NamedTuple):
    """A queue at its broker: first offset kept, next offset to be written, newest store time in ms (0 if it never had a message,
    -1 if all have expired).
    """

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
