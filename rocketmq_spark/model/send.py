"""Sends: requests, results, and the form in which a spool stores them."""

from __future__ import annotations

import enum
import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence, Sized
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from rocketmq_spark.base.codes import KEY_SEPARATOR, RESERVED_PROPERTIES, TRANSIENT_PROPERTY_PREFIX, Property
from rocketmq_spark.errors import RemoteProtocolError
from rocketmq_spark.model.message import MessageQueue, PoppedMessage, ReceivedMessage

# A tuple is used, because each evaluation of ``bytes | memoryview`` makes an object.
_BYTES_TYPES = (bytes, memoryview)


class SendStatus(enum.Enum):
    """How safely a message is stored.

    ``SEND_OK``: stored as the broker is configured. ``FLUSH_DISK_TIMEOUT``, ``FLUSH_SLAVE_TIMEOUT`` and ``SLAVE_NOT_AVAILABLE``:
    the broker has the message, but has not flushed it or copied it to a slave in time. ``SPOOLED``: no broker has the message
    yet; it is on this machine's disk (``onSendFailure=spool``).
    """

    SEND_OK = "SEND_OK"
    FLUSH_DISK_TIMEOUT = "FLUSH_DISK_TIMEOUT"
    FLUSH_SLAVE_TIMEOUT = "FLUSH_SLAVE_TIMEOUT"
    SLAVE_NOT_AVAILABLE = "SLAVE_NOT_AVAILABLE"
    SPOOLED = "SPOOLED"


class BatchStorage(NamedTuple):
    """How brokers store the batches of a topic.

    Args:
        as_one_message: As one message, which needs a batch id (``queue.type=BatchCQ``).
        is_compacted: Brokers leave out messages without a key, although they acknowledge the batch (a compaction topic).
        needs_group: A Proxy rejects messages without a sharding key (over gRPC, in a topic with ``message.type=FIFO``).
    """

    as_one_message: bool = False
    is_compacted: bool = False
    needs_group: bool = False


class SendResult(NamedTuple):
    """The broker's acknowledgement of one message or of one batch. A NamedTuple, because it is cheap to create, and every
    message has a result.

    Args:
        status: How safely it is stored.
        msg_id: The message id (UNIQ_KEY). For a batch, the ids of all messages joined by commas.
        queue: The queue that stores it; None for a SPOOLED message without a chosen queue, and for a batch whose
            messages may be in different queues (``confirmAmbiguous``). Over gRPC its ``queue_id`` is -1, because
            the Proxy does not name the queue.
        queue_offset: Offset of the (first) message. None for SPOOLED and delayed messages, and for messages that were found
            stored after a send without an answer (``confirmAmbiguous``). Over gRPC also None if the status is not SEND_OK, or if
            a batch took several requests.
        offset_msg_id: The id that the broker assigned; None if the broker does not return one.
        transaction_id: The id of its transaction; None outside of transactions.
        recall_handle: The handle by which ``Producer.recall`` cancels a delayed message; None for other messages.
        region_id: The region of the broker that stored it, for traces; None over gRPC, or if the broker has ``traceOn=false``.
    """

    status: SendStatus
    msg_id: str
    queue: MessageQueue | None
    queue_offset: int | None
    offset_msg_id: str | None = None
    transaction_id: str | None = None
    recall_handle: str | None = None
    region_id: str | None = None


@dataclass(frozen=True, slots=True)
class Reply:
    """The answer to a request (``Producer.request``).

    Args:
        body: The body, decompressed.
        properties: The replier's own properties.
        tags: Its tag; None without one.
        keys: Its business keys.
        flag: The flag that the replier set.
        born_timestamp: When it was sent, in ms since 1970 by the replier's clock.
        born_host: The replier, ``host:port``; None if the broker does not say it.
    """

    body: bytes
    properties: Mapping[str, str]
    tags: str | None = None
    keys: Sequence[str] = ()
    flag: int = 0
    born_timestamp: int = 0
    born_host: str | None = None


class TransactionState(enum.Enum):
    """The decision on a half message: ``COMMIT`` delivers the message, ``ROLLBACK`` drops the message, ``UNKNOWN`` means that
    there is no decision yet.
    """

    COMMIT = "COMMIT"
    ROLLBACK = "ROLLBACK"
    UNKNOWN = "UNKNOWN"


class HalfState(enum.Enum):
    """The state of a half message as this process knows it. ``UNKNOWN``: a decision was sent, and may not have arrived."""

    PREPARED = "PREPARED"
    COMMITTED = "COMMITTED"
    ROLLED_BACK = "ROLLED_BACK"
    UNKNOWN = "UNKNOWN"


# The longest id that a key contains. If an id is longer, the key contains only the beginning of the id and a hash. Ids of this
# package have 32 characters.
_MAX_ID_CHARACTERS = 64


class HalfPlace(NamedTuple):
    """Identifies a half message for its broker: by the position over remoting, and by the ids through a Proxy.

    ``half_offset`` is an offset of the internal topic. ``commit_log_offset`` is a position in bytes; None through a Proxy.
    ``digest`` is the message's ``content_digest``.
    """

    topic: str
    broker_name: str
    group: str
    msg_id: str
    transaction_id: str
    half_offset: int | None = None
    commit_log_offset: int | None = None
    digest: bytes = b""

    @property
    def key(self) -> str:
        """A key of the message. Copies of the message have the same key. Another message has another key, even if both messages
        have the same id.
        """
        # The id is shortened, because other clients may choose long ids, and keys of many messages are kept.
        msg_id = self.msg_id
        if len(msg_id) > _MAX_ID_CHARACTERS:
            msg_id = f"{msg_id[:_MAX_ID_CHARACTERS]}… {hashlib.sha256(msg_id.encode('utf-8', 'surrogatepass')).hexdigest()[:32]}"
        return f"{msg_id} {self.digest.hex()[:32]}"

    @classmethod
    def of(cls, result: SendResult, group: str, topic: str, msg_id: str) -> HalfPlace:
        """Return the position and ids of a half message. ``result`` is the result of the message's send. Raises
        ``RemoteProtocolError`` if the broker returned no position.
        """
        assert result.queue is not None
        offset_msg_id = result.offset_msg_id or ""
        try:
            # The id ends with the position of the message.
            position = int(offset_msg_id[-16:], 16) if offset_msg_id else None
        except ValueError as e:
            raise RemoteProtocolError(
                f"the half message has id {offset_msg_id!r}, which has no position", topic=topic
            ) from e
        transaction_id = result.transaction_id or msg_id
        return cls(topic, result.queue.broker_name, group, msg_id, transaction_id, result.queue_offset, position)


# RocketMQ's own properties that belong to the content of a message, and those that a broker adds to a half message. The digest
# omits only the properties that a broker adds, because another property may, for instance, change the delivery time.
_CONTENT_PROPERTIES = (Property.TAGS, Property.KEYS, Property.SHARDING_KEY)
_BROKER_PROPERTIES = frozenset({
    Property.UNIQ_KEY, Property.WAIT, Property.INSTANCE_ID, Property.PRODUCER_GROUP, Property.TRANSACTION_PREPARED,
    Property.TRANSACTION_ID, Property.TRANSACTION_CHECK_TIMES, Property.TRANSACTION_PREPARED_QUEUE_OFFSET,
    Property.CHECK_IMMUNITY_TIME, Property.REAL_TOPIC, Property.REAL_QUEUE_ID, Property.MSG_REGION, Property.TRACE_ON,
    Property.TRACE_CONTEXT, Property.CLUSTER, Property.MESSAGE_TYPE, Property.BORN_HOST, Property.BORN_TIMESTAMP,
    Property.CRC32, Property.MIN_OFFSET, Property.MAX_OFFSET,
})  # fmt: skip


def content_digest(topic: str, body: bytes | memoryview, properties: Mapping[str, str]) -> bytes:
    """Return a digest of a message's content. A message id does not identify a message, because any sender can use the id of
    another message.

    ``properties`` are those of the stored message. A half message and the copies that its broker makes have the same digest.
    """
    texts = [topic]
    for name in sorted(properties):
        is_reserved = name in RESERVED_PROPERTIES or name.startswith(TRANSIENT_PROPERTY_PREFIX)
        if name in _CONTENT_PROPERTIES or (is_reserved and name not in _BROKER_PROPERTIES) or not is_reserved:
            texts += (name, properties[name])
    digest = hashlib.sha256()
    for part in (*(text.encode("utf-8", "replace") for text in texts), body):
        digest.update(len(part).to_bytes(8, "big"))
        digest.update(part)
    return digest.digest()


def stored_content_digest(message: ReceivedMessage | PoppedMessage) -> bytes:
    """Return the ``content_digest`` of a half message that a broker checks."""
    properties = message.properties
    if isinstance(message, PoppedMessage):
        reserved_properties = {
            Property.TAGS: message.tags,
            Property.KEYS: KEY_SEPARATOR.join(message.keys),
            Property.SHARDING_KEY: message.message_group,
        }
        properties = {**properties, **{name: value for name, value in reserved_properties.items() if value}}
    return content_digest(message.topic, message.body, properties)


# A transport calls this when a broker requests a decision. The call does not block: if a user's function has to decide, the call
# returns a function that the transport calls on another thread.
HalfCheck = Callable[[ReceivedMessage | PoppedMessage, HalfPlace], TransactionState | Callable[[], TransactionState]]


class SentMessage(NamedTuple):
    """One message of a send, with its properties in stored form."""

    body: bytes | memoryview
    properties: Mapping[str, str]
    flag: int = 0


class Batch(Protocol):
    """The encoded messages of one send. Only the ``MessageEncoder`` that encoded the messages can read the batch."""

    def __len__(self) -> int:
        """Return the number of bytes of the batch on the wire."""

    def messages(self) -> Sequence[SentMessage]:
        """Decode the messages, for spools and traces. A send does not call this method."""


class MessageEncoder(Protocol):
    """Encodes single messages into the batches of a transport. Pure. ``session.row_encoder`` does this for columns."""

    def encode_item(self, topic: str, body: bytes | memoryview, properties: str, flag: int, born_ms: int) -> Sized:
        """Return one encoded message as a part of a batch. The length of the returned value is what the message adds to a
        batch. ``properties`` is the encoded property string.

        Raises ``MessageRefused`` if the transport cannot encode the message.
        """

    def encode_batch(self, items: Iterable[Any]) -> bytes | Batch:
        """Return the body of a batch of these items."""


class SendRequest(NamedTuple):
    """One send for a transport: a message or a batch, and the fields that apply to the whole send. A NamedTuple, because it is
    cheap to create, and every send has a request.

    ``body`` is the (possibly compressed) body of a single message; if ``batch`` is set, a batch. A batch is the object of the
    transport's encoder, or bytes in the layout of ``wire.messages.encode_batch``. Spools store such bytes, and every transport
    accepts them. ``properties`` is the encoded property string of the message or of the batch itself.
    """

    group: str
    body: bytes | memoryview | Batch
    properties: str = ""
    sys_flag: int = 0
    flag: int = 0
    born_timestamp_ms: int = 0
    batch: bool = False
    reconsume_times: int = 0
    max_reconsume_times: int | None = None
    default_topic_queues: int = 4

    @property
    def data(self) -> bytes | memoryview:
        """The body as bytes. Must not be used if the body is a batch object of a transport's encoder."""
        assert isinstance(self.body, _BYTES_TYPES), "a batch that only its transport can read"
        return self.body


@dataclass(frozen=True, slots=True)
class SpooledSend:
    """A send that a spool stores, with its body as bytes. Without ``queue``, the spool chooses the queue when it sends the
    record. The selector with the name ``selector`` then chooses, with the JSON value ``arg`` as its argument; without
    ``selector``, any queue is chosen.
    """

    topic: str
    request: SendRequest
    queue: MessageQueue | None = None
    msg_ids: Sequence[str] = ()
    selector: str | None = None
    arg: Any = None


class Resent(NamedTuple):
    """The outcome of a spooled send: the queue that stores it, or the error, and whether the error is temporary."""

    queue: MessageQueue | None = None
    error: str | None = None
    is_temporary: bool = False


@dataclass(frozen=True, slots=True)
class SpoolMetrics:
    """The state of a spool.

    Args:
        depth: Records that wait.
        bytes: Bytes of the records that wait. ``spoolMaxBytes`` limits the sum of ``bytes`` and ``dead_bytes``.
        oldest_due_age_s: Seconds since the first record that waits became due; None while no record is due.
        dead: Records that were given up and are kept.
        dead_bytes: Bytes of the records that were given up.
        give_ups: Number of records that were ever given up in the spool's folder.
        delivered: Records that this process sent.
        trouble: Why the spool cannot be read or written now, such as a full disk; None if it can.
    """

    depth: int
    bytes: int
    oldest_due_age_s: float | None
    dead: int
    dead_bytes: int
    give_ups: int
    delivered: int
    trouble: str | None = None
