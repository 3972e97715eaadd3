"""The nouns of RocketMQ as small frozen values.

Few of these exist at a time (queues, routes, ranges, results of calls). Messages that are read in bulk never become
objects: they stay bytes until they are Arrow columns (see ``decode/decoder.py``).
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from rocketmq_spark.codes import KEY_SEPARATOR, MAX_QUEUES, Perm, Property

MASTER_ID = 0


class MessageQueue(NamedTuple):
    """One queue of a ``topic`` on one broker; ordered as in Java: topic, ``broker_name``, ``queue_id`` (from 0).

    A tuple, because plans hash and sort tens of thousands of them.
    """

    topic: str
    broker_name: str
    queue_id: int

    def __str__(self) -> str:
        return f"{self.topic}/{self.broker_name}/{self.queue_id}"


def _words(keys: str) -> list[str]:
    return [key for key in keys.split(KEY_SEPARATOR) if key]


@dataclass(slots=True)
class Message:
    """What a producer sends.

    Args:
        topic: Where to.
        body: Bytes, not empty.
        tags: One tag, by which consumers filter.
        keys: Business keys, by which tools find the message; a text of several has blanks between, a key none.
        properties: The user's own; tags and keys are kept apart from them.
        flag: A number of the user's, 32 bits with sign.
        wait_store_ok: False asks the broker to answer before the message is flushed and replicated.
        priority: From 0 on, higher comes first; over gRPC only, for a topic with ``message.type=PRIORITY``. None has none.
    """

    topic: str
    body: bytes
    tags: str | None = None
    keys: Sequence[str] = ()
    properties: Mapping[str, str] | None = None
    flag: int = 0
    wait_store_ok: bool = True
    priority: int | None = None

    def __post_init__(self) -> None:
        if isinstance(self.keys, str):
            self.keys = _words(self.keys)


@dataclass(slots=True)  # not frozen: to make one would take six times as long, and there is one for each message
class ReceivedMessage:
    """A stored message as an object: what consumers, commands and single look-ups get (bulk reads never make these).

    Args:
        topic: The topic it was sent to; of a message of a retry topic, the topic it was first sent to.
        queue: The queue that stores it.
        queue_offset: Its offset in that queue.
        commit_log_offset: Its place in the broker's log, in bytes.
        body: The body, decompressed.
        properties: All properties, RocketMQ's own included.
        flag: Number that the producer chose.
        sys_flag: How it is stored: compressed, in a transaction, addresses of version 6.
        born_timestamp: When the producer sent it, in ms since 1970.
        store_timestamp: When the broker stored it, in ms since 1970.
        born_host: The producer, ``host:port``.
        store_host: The broker, ``host:port``.
        reconsume_times: How often a consumer group sent it back.
        prepared_transaction_offset: Place of its half message in the broker's log; 0 outside transactions.
        store_size: Bytes that it takes in the broker's log.
        offset_msg_id: The id that the broker made of its address and ``commit_log_offset``.
        decode_error: Why it could not be decoded; None when it could. With an error ``body`` is the stored bytes, and unknown
            fields are 0, empty or -1.
    """

    topic: str
    queue: MessageQueue
    queue_offset: int
    commit_log_offset: int
    body: bytes
    properties: Mapping[str, str]
    flag: int
    sys_flag: int
    born_timestamp: int
    store_timestamp: int
    born_host: str
    store_host: str
    reconsume_times: int
    prepared_transaction_offset: int
    store_size: int
    offset_msg_id: str
    decode_error: str | None = None

    @property
    def broker_name(self) -> str:
        """The broker of its queue."""
        return self.queue.broker_name

    @property
    def queue_id(self) -> int:
        """The number of its queue on that broker."""
        return self.queue.queue_id

    @property
    def tags(self) -> str | None:
        """Its tag; None without one."""
        return self.properties.get(Property.TAGS)

    @property
    def keys(self) -> list[str]:
        """Its business keys, as brokers index them."""
        return _words(self.properties.get(Property.KEYS, ""))

    @property
    def msg_id(self) -> str:
        """The id Java consumers show: the client's UNIQ_KEY when there is one, else the offset message id."""
        return self.properties.get(Property.UNIQ_KEY) or self.offset_msg_id


@dataclass(frozen=True, slots=True)
class QueueData:
    """Queues of a topic on one broker as the name server tells: counts and permission bits (4 read, 2 write)."""

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
        """The master, if it is none that only acts: what this one lacks nobody has."""
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
        return sorted(
            MessageQueue(self.topic, data.broker_name, i)
            for data in self.queues
            if data.perm & Perm.READ and data.broker_name in self.brokers
            for i in range(data.read_queues)
        )

    def writable(self) -> list[MessageQueue]:
        """Queues that may be sent to, in Java's publish order: write permission and a live master.

        Mirrors ``MQClientInstance.topicRouteData2TopicPublishInfo``.
        """
        if self.order_conf:
            parts = [item.rsplit(":", 1) for item in self.order_conf.split(";") if item]
            counts = [(name, int(count)) for name, count in parts]
            if sum(max(0, count) for _, count in counts) > MAX_QUEUES:
                raise ValueError(f"it has more than {MAX_QUEUES} queues")
            return [MessageQueue(self.topic, name, i) for name, count in counts for i in range(count)]
        return [
            MessageQueue(self.topic, data.broker_name, i)
            for data in sorted(self.queues, key=lambda d: d.broker_name)
            if data.perm & Perm.WRITE and data.broker_name in self.brokers and self.brokers[data.broker_name].master
            for i in range(data.write_queues)
        ]


@dataclass(frozen=True, slots=True, order=True)
class OffsetRange:
    """Offsets ``[start, end)`` of one queue."""

    queue: MessageQueue
    start: int
    end: int

    @property
    def size(self) -> int:
        return self.end - self.start


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

    Mirrors what ``DefaultMQPushConsumerImpl.pullMessage`` tells ``PullAPIWrapper``.

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


class SendStatus(enum.Enum):
    """How safely an acknowledged message is stored.

    ``FLUSH_DISK_TIMEOUT``, ``FLUSH_SLAVE_TIMEOUT`` and ``SLAVE_NOT_AVAILABLE``: its broker has it, but has not flushed or
    copied it as it is configured to. ``SPOOLED``: no broker has it yet; it is on this machine's disk.
    """

    SEND_OK = "SEND_OK"
    FLUSH_DISK_TIMEOUT = "FLUSH_DISK_TIMEOUT"
    FLUSH_SLAVE_TIMEOUT = "FLUSH_SLAVE_TIMEOUT"
    SLAVE_NOT_AVAILABLE = "SLAVE_NOT_AVAILABLE"
    SPOOLED = "SPOOLED"


class SendResult(NamedTuple):
    """The broker's acknowledgement of one message or of one batch. A tuple, because there is one for every message.

    Args:
        status: How safely it is stored.
        msg_id: The client's UNIQ_KEY; of a batch all of them, joined by commas.
        queue: Where it is stored; None for a SPOOLED message whose sender chose no queue.
        queue_offset: Offset of the (first) message; None for SPOOLED and for delayed messages, whose number belongs to an
            internal topic.
        offset_msg_id: The id that the broker made; None where it does not return one.
        transaction_id: The id of its transaction; None outside of one.
        recall_handle: What ``Producer.recall`` takes back a timer message by; None for other messages.
    """

    status: SendStatus
    msg_id: str
    queue: MessageQueue | None
    queue_offset: int | None
    offset_msg_id: str | None = None
    transaction_id: str | None = None
    recall_handle: str | None = None


class SendRequest(NamedTuple):
    """One send as the transport needs it: an encoded body with what goes into the request header. A tuple, as results are.

    ``body`` is a single message's (possibly compressed) body, or the encoded items when ``batch`` is true;
    ``properties`` is the encoded property string.
    """

    group: str
    body: bytes | memoryview
    properties: str = ""
    sys_flag: int = 0
    flag: int = 0
    born_timestamp_ms: int = 0
    batch: bool = False
    reconsume_times: int = 0
    max_reconsume_times: int | None = None
    default_topic_queues: int = 4


@dataclass(frozen=True, slots=True)
class SpooledSend:
    """A send that a spool keeps. Without a ``queue`` one is chosen when it is sent: by the ``selector``, which has a name,
    and its ``arg``, which JSON knows, or any.
    """

    topic: str
    request: SendRequest
    queue: MessageQueue | None = None
    msg_ids: Sequence[str] = ()
    selector: str | None = None
    arg: Any = None


class Resent(NamedTuple):
    """What came of a spooled send: the queue that has it, or the error, and whether that may pass."""

    queue: MessageQueue | None = None
    error: str | None = None
    passing: bool = False


@dataclass(frozen=True, slots=True)
class SpoolMetrics:
    """How a spool stands.

    Args:
        depth: Records that wait.
        bytes: Their bytes, as they count against ``spoolMaxBytes`` together with those of the dead.
        oldest_due_age_s: For how many seconds the first of them has been due; None while none is.
        dead: Records that were given up and are kept.
        dead_bytes: Their bytes.
        give_ups: All that were ever given up in this folder.
        delivered: Records that this process sent.
        trouble: Why nothing can be read or written now, such as a full disk; None where all is well.
    """

    depth: int
    bytes: int
    oldest_due_age_s: float | None
    dead: int
    dead_bytes: int
    give_ups: int
    delivered: int
    trouble: str | None = None
