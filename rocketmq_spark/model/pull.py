"""Routes of topics (brokers, their addresses and queues), ranges of offsets, and pulls: requests and answers."""

from __future__ import annotations

import enum
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from rocketmq_spark.base.codes import MAX_QUEUES, Perm
from rocketmq_spark.errors import RemoteProtocolError
from rocketmq_spark.model.message import MessageQueue, ReceivedMessage


class OffsetWindow(NamedTuple):
    """The offset that a pull requested, and the next offset that the broker returned.

    Each batch of the answer has at least one offset in this window. The batch may begin before ``start``, but not before
    ``min_offset``, and ends at ``max_offset`` or earlier.
    """

    start: int
    end: int
    min_offset: int | None = None
    max_offset: int | None = None

    def may_contain(self, first_offset: int, count: int) -> bool:
        """Whether a batch of ``count`` offsets from ``first_offset`` on is possible in this window."""
        is_in_queue = (self.min_offset is None or self.min_offset <= first_offset) and (
            self.max_offset is None or first_offset + count <= self.max_offset
        )
        return is_in_queue and first_offset < self.end and first_offset + count > self.start


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
    """Addresses of one broker name by broker id. The id 0 is that of the master, and may be missing while the master is down.

    If ``has_acting_master`` is true, the master is down, and a slave that acts for it has the id 0. Name servers report this with
    ``supportActingMaster``. The acting slave answers requests, but may lack the last messages.
    """

    broker_name: str
    cluster: str
    addresses: Mapping[int, str]
    has_acting_master: bool = False

    @property
    def master(self) -> str | None:
        return self.addresses.get(MASTER_ID)

    @property
    def own_master(self) -> str | None:
        """The real master; None if a slave acts for it. Only the real master has all acknowledged messages."""
        return None if self.has_acting_master else self.master

    @property
    def slaves(self) -> list[str]:
        """The addresses of the slaves, sorted by broker id."""
        return [address for broker_id, address in sorted(self.addresses.items()) if broker_id != MASTER_ID]

    @property
    def replicas(self) -> list[str]:
        """The addresses of the master, if there is one, and of the slaves."""
        return [address for address in (self.master, *self.slaves) if address is not None]

    def replica(self, read_from: str, suggested_id: int = MASTER_ID) -> str | None:
        """Return the address to read from; None if no replica has an address. ``read_from`` is the value of the option.

        With ``slave``, the address is that of a slave, or of the master if there is no slave. With ``hint``, the address is that
        of the replica that the broker suggested, or else of the master, or else of a slave. With ``master``, no slave is used.
        """
        if read_from == "slave":
            return self._first_slave or self.master
        if read_from == "hint":
            suggested_address = self.addresses.get(suggested_id) if suggested_id != MASTER_ID else None
            return suggested_address or self.master or self._first_slave
        return self.master

    @property
    def _first_slave(self) -> str | None:
        return next(iter(self.slaves), None)


@dataclass(frozen=True)  # no slots, because cached properties need a ``__dict__``
class TopicRoute:
    """Where a topic lives. ``static`` is true for static (mapped) topics, which have logical queues."""

    topic: str
    queues: tuple[QueueData, ...]
    brokers: Mapping[str, BrokerData]
    order_conf: str | None = None
    static: bool = False

    def readable_queues(self) -> list[MessageQueue]:
        """Sorted queues that may be pulled, with read permission and any live replica (Java's subscribe set)."""
        return self._queues_for_readers(Perm.READ)

    @functools.cached_property
    def subscribe_set(self) -> tuple[MessageQueue, ...]:
        """The ``readable_queues``, kept as long as the route."""
        return tuple(self.readable_queues())

    @functools.cached_property
    def publish_set(self) -> tuple[MessageQueue, ...]:
        """The ``writable_queues``, kept as long as the route."""
        return tuple(self.writable_queues())

    def stored_queues(self) -> list[MessageQueue]:
        """All queues that store messages: the ``readable_queues``, and queues without read permission."""
        return self._queues_for_readers(0)

    def partition_queues(self) -> list[MessageQueue]:
        """Sorted queues that a broker has for readers or for senders, whatever their permissions are now. The index in this list
        is Kafka's partition number (option ``kafkaColumns``).
        """
        return sorted(
            MessageQueue(self.topic, data.broker_name, i)
            for data in self.queues
            for i in range(max(data.read_queues, data.write_queues))
        )

    def _queues_for_readers(self, perm: int) -> list[MessageQueue]:
        return sorted(
            MessageQueue(self.topic, data.broker_name, i)
            for data in self.queues
            if data.perm & perm == perm and data.broker_name in self.brokers
            for i in range(data.read_queues)
        )

    @property
    def unreadable_brokers(self) -> list[str]:
        """Brokers that have queues of the topic, but do not permit reads."""
        return sorted(data.broker_name for data in self.queues if data.read_queues and not data.perm & Perm.READ)

    def writable_queues(self) -> list[MessageQueue]:
        """Queues that may be sent to, in Java's publish order: write permission and a live master.

        Raises ``RemoteProtocolError`` if ``order_conf``, which operators write, is malformed.

        Mirrors ``MQClientInstance.topicRouteData2TopicPublishInfo``.
        """
        if self.order_conf:
            return _queues_of_order_conf(self.topic, self.order_conf)
        return [
            MessageQueue(self.topic, data.broker_name, i)
            for data in sorted(self.queues, key=lambda d: d.broker_name)
            if data.perm & Perm.WRITE and data.broker_name in self.brokers and self.brokers[data.broker_name].master
            for i in range(data.write_queues)
        ]


def _queues_of_order_conf(topic: str, conf: str) -> list[MessageQueue]:
    try:
        parts = [item.rsplit(":", 1) for item in conf.split(";") if item]
        counts = [(name, int(count)) for name, count in parts]
        if sum(max(0, count) for _, count in counts) > MAX_QUEUES:
            raise ValueError(f"it has more than {MAX_QUEUES} queues")
    except ValueError as e:
        raise RemoteProtocolError(
            f"the route has orderTopicConf {conf[:200]!r}; expected broker:queues;…", topic=topic
        ) from e
    return [MessageQueue(topic, name, i) for name, count in counts for i in range(count)]


class OffsetRange(NamedTuple):
    """Offsets ``[start, end)`` of one queue. A NamedTuple, because it is cheap to create, and a batch may have a range for each
    of 100,000 queues.
    """

    queue: MessageQueue
    start: int
    end: int

    @property
    def size(self) -> int:
        return self.end - self.start


class QueueEnd(NamedTuple):
    """The end of a queue, and the address of the master that reported it. Another replica may lack messages before this end."""

    offset: int
    master: str


class QueueBounds(NamedTuple):
    """A queue at its broker: the first offset kept, the next offset to be written, and the newest store time in ms. The time is 0
    if the queue never had a message, and -1 if all messages have expired.
    """

    min_offset: int
    max_offset: int
    last_update_ms: int

    def clamp(self, offset: int) -> int:
        """The offset in these bounds that is nearest to ``offset``."""
        return min(max(offset, self.min_offset), self.max_offset)


@dataclass(frozen=True, slots=True)
class Filter:
    """Which messages of a topic a broker returns: a tag expression (``TAG``) or an SQL expression (``SQL92``)."""

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
        filter: Which messages to return. Brokers compare only hashes of tags, so this client compares the tags in the answer.
        post_filter: True sends the filter with the pull; with False, the broker uses the filter of the last heartbeat.
        version_ms: When the subscription was made; a broker that has a newer subscription rejects the pull.
        suspend_s: How long a broker holds the request while there are no new messages; with 0, it answers at once.
        commit_offset: The group's offset of the queue, which the master stores with the request; None to store none.
        broker_id: The replica to send to, as the last answer suggested it; 0 for the master.
        max_bytes: The largest answer in bytes, which brokers before 5.0 ignore; None for no limit.
        decoded: False leaves messages as they are stored, to be decoded later.
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
    """The outcome of a pull, as in Java's ``PullStatus``."""

    FOUND = "FOUND"
    NO_NEW_MSG = "NO_NEW_MSG"
    NO_MATCHED_MSG = "NO_MATCHED_MSG"
    OFFSET_ILLEGAL = "OFFSET_ILLEGAL"


@dataclass(frozen=True, slots=True)
class PullAnswer:
    """A broker's answer to a ``PullRequest``.

    ``next_offset`` is the offset of the next request; after OFFSET_ILLEGAL, it is the nearest existing offset. ``messages`` has
    only messages that match the filter, so ``messages`` may be empty although the status is FOUND. A message that cannot be
    decoded has a ``decode_error``. If the request has ``decoded=False``, ``stored_messages`` has all messages as bytes, also
    messages that do not match, and ``read_messages`` decodes the messages that match. If an answer would be too large, it has
    only the first messages, and ``next_offset`` is the offset after these messages. ``is_reset`` says that an operator moved the
    group to ``next_offset``; the broker reports this move only once.
    """

    status: PullStatus
    next_offset: int
    min_offset: int
    max_offset: int
    messages: Sequence[ReceivedMessage] = ()
    broker_id: int = MASTER_ID
    stored_messages: bytes | memoryview = b""
    read_messages: Callable[[], Iterable[ReceivedMessage]] = tuple
    is_reset: bool = False


class LogState(NamedTuple):
    """A broker's commit log.

    Args:
        max_offset: The end of the log.
        index_lag: How many bytes the index is behind the end.
        head_wait_ms: How long the first queued send has waited.
        measured_s: Time on the monotonic clock when the broker reported these values.
        lock_ms: How long a send has held the lock of the log; all other sends wait for this lock.
    """

    max_offset: int
    index_lag: int
    head_wait_ms: int
    measured_s: float
    lock_ms: int = 0

    @property
    def indexed_end(self) -> int:
        """The position up to which the index has the messages, so that they can be read from their queues."""
        return self.max_offset - self.index_lag
