"""Messages as users send and receive them, and queues. Contains also messages that a Proxy hands out for a limited time (POP),
and the settings of a consumer group that the Proxy reports.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from rocketmq_spark.base.budget import estimated_memory
from rocketmq_spark.base.codes import KEY_SEPARATOR, Property


class MessageQueue(NamedTuple):
    """One queue of a ``topic`` on one broker; ordered as in Java: topic, ``broker_name``, ``queue_id`` (from 0).

    A NamedTuple, because tuples are fast to hash and to sort, and the plan of a micro-batch may have tens of thousands of
    queues.
    """

    topic: str
    broker_name: str
    queue_id: int

    def __str__(self) -> str:
        return f"{self.topic}/{self.broker_name}/{self.queue_id}"


def _split_keys(keys: str) -> list[str]:
    return [key for key in keys.split(KEY_SEPARATOR) if key]


@dataclass(slots=True)
class Message:
    """What a producer sends.

    Args:
        topic: The topic to send to.
        body: Bytes, not empty.
        tags: One tag, by which consumers filter.
        keys: Business keys, by which tools find the message: a sequence of keys without spaces, or one string of keys separated
            by spaces.
        properties: The user's own properties, without tags and keys.
        flag: A signed 32-bit integer of the application, which RocketMQ does not interpret.
        wait_store_ok: False asks the broker to answer before the message is flushed and replicated.
        priority: 0 or more; higher priorities are delivered first. Over gRPC only, for topics with ``message.type=PRIORITY``.
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
            self.keys = _split_keys(self.keys)


@dataclass(slots=True)
class KeyedMessage(Message):
    """A copy of a stored message that is sent with the message's sharding key. The sharding key is a reserved property, which
    ``Message`` rejects.
    """

    sharding_key: str | None = None


class _StoredFields:
    """Decodes a field of a message when the field is read, unless it was set before (``wire.stored_fields``).

    The decoded value is kept only for ``properties``, which most listeners read several times. If other values were kept, too,
    they could overwrite a value that another thread sets at the same moment.
    """

    if TYPE_CHECKING:  # with ``__getattr__``, type checkers would accept attributes of any name
        _decode_field: Callable[[str, Any], Any]
        _head: bytes
        _properties: bytes
    else:
        __slots__ = ("_decode_field", "_head", "_properties")

        def __getattr__(self, name: str) -> Any:
            if name in _LAZY_FIELDS:
                try:
                    decode = self._decode_field
                except AttributeError:  # a field of a complete message was deleted
                    pass
                else:
                    return decode(name, self)
            # Raises the same AttributeError again. The error may come from the code of a property.
            return object.__getattribute__(self, name)

        def __getstate__(self) -> Any:
            """Return only the fields. Earlier releases do not have the other attributes, and could not unpickle a message with
            them.
            """
            state = object.__getstate__(self)
            if isinstance(state, tuple):
                for name in _StoredFields.__slots__:
                    state[1].pop(name, None)
            return state


@dataclass(slots=True)  # not frozen: a frozen message takes six times as long to create
class ReceivedMessage(_StoredFields):
    """A stored message, as consumers and ``Admin`` return it. Reads of Spark and ``poll_arrow`` do not create these.

    Args:
        topic: The topic it was sent to. For a message of a retry topic, the original topic.
        queue: The queue that stores it.
        queue_offset: Its offset in that queue.
        commit_log_offset: Its position in the broker's commit log, in bytes.
        body: The body, decompressed.
        properties: All properties, RocketMQ's own included.
        flag: The number that the producer set.
        sys_flag: Bits that say how it is stored: compression, transaction state, IPv6 addresses.
        born_timestamp: When the producer sent it, in ms since 1970.
        store_timestamp: When the broker stored it, in ms since 1970.
        born_host: The producer, ``host:port``.
        store_host: The broker, ``host:port``.
        reconsume_times: How often a consumer group sent it back, or a consumer retried it in place.
        prepared_transaction_offset: Position of its half message in the commit log, in bytes; 0 outside transactions.
        store_size: Its size in the commit log, in bytes.
        offset_msg_id: The id that the broker gave it: the broker's address and ``commit_log_offset``.
        decode_error: Why it could not be decoded; None if it could. With an error, ``body`` has the stored bytes, and unknown
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
        return _split_keys(self.properties.get(Property.KEYS, ""))

    @property
    def msg_id(self) -> str:
        """The id that Java consumers show: the one that its producer gave it (UNIQ_KEY), or ``offset_msg_id`` without one."""
        return self.properties.get(Property.UNIQ_KEY) or self.offset_msg_id


_LAZY_FIELDS = set(ReceivedMessage.__match_args__) - {"topic", "queue", "queue_offset", "body", "decode_error"}


@dataclass(slots=True)
class PoppedMessage:
    """A message received from a Proxy. It is delivered again when its invisible time ends, unless it is acknowledged before.

    Args:
        topic: The topic it was sent to.
        queue: The queue that stores it.
        queue_offset: Its offset in that queue.
        body: The body, decompressed.
        tags: Its tag, None without one.
        keys: Its business keys.
        properties: The user's own properties.
        born_timestamp: When it was sent, in ms since 1970.
        store_timestamp: When it was stored, in ms since 1970; None if the Proxy does not report it.
        msg_id: The id that its producer gave it.
        delivery_attempt: How often it was delivered, including this time.
        message_group: The message group within which it keeps its order; None without one.
        receipt: The receipt handle of this delivery. It changes when the invisible time is changed.
        endpoint: The address of the Proxy that delivered it.
        decode_error: Why its body could not be decompressed; ``body`` is then as stored. None if there was no error.
    """

    topic: str
    queue: MessageQueue
    queue_offset: int
    body: bytes
    tags: str | None
    keys: list[str]
    properties: Mapping[str, str]
    born_timestamp: int
    store_timestamp: int | None
    msg_id: str
    delivery_attempt: int
    message_group: str | None
    receipt: str
    endpoint: str
    decode_error: str | None = None

    @property
    def reconsume_times(self) -> int:
        """How often it was delivered before."""
        return self.delivery_attempt - 1


def estimated_popped_memory(message: PoppedMessage) -> int:
    """Return about how many bytes of memory a popped message needs; ``wire.messages.message_memory`` is for other messages."""
    texts = [*message.properties.keys(), *message.properties.values(), *message.keys]
    return estimated_memory(len(message.body), sum(map(len, texts)) + 2 * len(texts))


PopTarget = tuple[str, int]  # the source of popped messages: a topic, and the index of one of its brokers


@dataclass(frozen=True, slots=True)
class GroupPolicy:
    """Settings of a consumer group that a Proxy reports. These settings are the number of attempts before a message becomes a
    dead letter, whether messages keep their order, and the pauses in seconds before each redelivery. The last pause applies to
    all further redeliveries.
    """

    max_attempts: int
    ordered: bool
    redelivery_pauses_s: Sequence[float]
