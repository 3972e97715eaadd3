"""The original that is sent when a delayed message is due, and a node's progress in a queue of envelopes. Pure.

For a node that takes over a queue, the group's offset alone is not enough: it stays at the oldest envelope whose original was
not sent, while the originals of many later ones may have been sent. So a node commits three numbers (``Progress``) and a store
time (see ``commits``).
"""

from __future__ import annotations

import functools
import struct
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from fnmatch import fnmatchcase
from typing import NamedTuple

from rocketmq_spark.base import codes
from rocketmq_spark.errors import DecodeError, MessageRefused
from rocketmq_spark.model import MessageQueue, ReceivedMessage
from rocketmq_spark.spool.records import DOUBTFUL_PREFIX
from rocketmq_spark.wire.envelope import (
    CANCEL,
    DIGEST_END,
    DUE_AT,
    INNER_TOPIC,
    KIND_AT,
    MAGIC,
    QUEUE,
    VERSION,
    DecodedEnvelope,
    digest,
    unpack,
)
from rocketmq_spark.wire.names import is_user_topic, topic_problem
from rocketmq_spark.wire.properties import decode_properties, encode_properties, is_reserved

# The first byte of a checkpoint: whether the queue's records are being handed over.
_OWNED, _HANDING_OVER = 2, 3
_CHECKPOINT = struct.Struct(">B6Q")
# The layouts of releases up to 0.1, and of those that did not write the last number. Their progress may be from two nodes.
_LAYOUT_0_1, _OLDEST_LAYOUT = struct.Struct(">6Q"), struct.Struct(">5Q")


class Progress(NamedTuple):
    """All envelopes before offset ``oldest`` are done, and of those before ``read_end`` all that were due by ``done_ms``."""

    oldest: int
    read_end: int
    done_ms: int

    def is_done(self, offset: int, due_ms: int) -> bool:
        """Whether the original of an envelope was certainly sent. A ``done_ms`` of 0 proves nothing: bodies that are no envelopes
        are due at 0, and may still wait.
        """
        return offset < self.oldest or (offset < self.read_end and due_ms <= self.done_ms and self.done_ms > 0)

    def followed_by(self, later: Progress) -> Progress:
        """The progress after this one and ``later``. If envelopes that arrived late have set ``done_ms`` back, this progress is
        kept because it claims more, unless all that it covers is done.
        """
        oldest = max(self.oldest, later.oldest)
        use_later = later.read_end >= self.read_end and (later.done_ms >= self.done_ms or oldest >= self.read_end)
        stored, done_ms = (later if use_later else self)[1:]
        return Progress(oldest, stored, done_ms)

    def merged(self, other: Progress) -> Progress:
        """One progress that claims what both claim. ``done_ms`` is that of the node that has read further."""
        further = max(self, other, key=lambda progress: progress[1:])
        return Progress(max(self.oldest, other.oldest), further.read_end, further.done_ms)

    def limited_to(self, now_ms: int) -> Progress:
        """This progress without claims about moments after now. Such a moment is from a clock that was ahead, and would hide all
        progress until then (see ``followed_by``).
        """
        return self._replace(done_ms=min(self.done_ms, now_ms))

    def truncated(self, offset: int) -> Progress:
        """The part that remains valid if the broker's messages from ``offset`` on are other ones than those covered here."""
        return Progress(min(self.oldest, offset), min(self.read_end, offset), self.done_ms)


def advanced(
    committed: Progress, oldest: int, read_end: int, first_waiting_ms: int | None, last_done_due_ms: int, now_ms: int
) -> Progress:
    """The progress after ``committed`` of a node that has read up to ``read_end`` and has nothing waiting before ``oldest``.

    ``first_waiting_ms`` is the due time of the first waiting envelope, and ``last_done_due_ms`` the latest one of done envelopes.
    The progress reaches to the latter, but not beyond now: otherwise, after a clock was ahead for a moment, no progress would be
    committed until then (see ``followed_by``). A moment that was committed with such a clock is lowered.
    """
    before = committed.limited_to(now_ms)
    done_ms = min(now_ms, max(last_done_due_ms, before.done_ms))
    if first_waiting_ms is not None:
        done_ms = min(done_ms, max(0, first_waiting_ms - 1))
    return before.followed_by(Progress(oldest, read_end, done_ms))


class QueueCheckpoint(NamedTuple):
    """A node's note about a queue: all envelopes from ``read_start`` to before ``read_end`` are done or in the node's store; and
    the last commit.

    ``newest_ms`` is the latest store time of the envelopes read (0 if none): messages with a later store time must be at
    ``read_end`` or after it. ``is_handing_over`` is true while the records are handed over. That takes several writes, so some
    records that are not done may already be deleted.
    """

    read_start: int
    read_end: int
    committed: Progress
    newest_ms: int = 0
    is_handing_over: bool = False

    @property
    def last_read(self) -> tuple[int, int]:
        """The end of the envelopes that this node, or the one that committed the progress, has read, and their latest store
        time.
        """
        return max(self.read_end, self.committed.read_end), self.newest_ms

    def encode(self) -> bytes:
        state = _HANDING_OVER if self.is_handing_over else _OWNED
        return _CHECKPOINT.pack(state, self.read_start, self.read_end, *self.committed, self.newest_ms)

    def shows_recreation(self, message: ReceivedMessage) -> bool:
        """Whether another message was read at this offset before, so that the topic was created again."""
        return message.queue_offset < self.read_end and 0 < self.newest_ms < message.store_timestamp

    def truncated(self, offset: int) -> QueueCheckpoint:
        """The part that remains valid if the broker's messages from ``offset`` on are other ones than those that were read.
        ``offset`` may be after the last message that this node has read, because another node may have read further.
        """
        return self._replace(
            read_start=min(self.read_start, offset),
            read_end=min(self.read_end, offset),
            committed=self.committed.truncated(offset),
        )

    @classmethod
    def decode(cls, data: bytes | None) -> QueueCheckpoint | None:
        """Decode a note. Returns None if it is empty or of an unknown format; then the queue is read again. In notes of earlier
        releases, only the offset before which all are done is certain (see ``commits``).
        """
        if not data:
            return None
        if len(data) == _CHECKPOINT.size and data[0] in (_OWNED, _HANDING_OVER):
            state, begin, stored, oldest, committed, done_ms, newest_ms = _CHECKPOINT.unpack(data)
            return cls(begin, stored, Progress(oldest, committed, done_ms), newest_ms, state == _HANDING_OVER)
        for layout in (_LAYOUT_0_1, _OLDEST_LAYOUT):
            if len(data) == layout.size:
                begin, stored, oldest, _, _, *newest = layout.unpack(data)
                return cls(begin, stored, Progress(oldest, oldest, 0), *newest)
        return None


def note_name(queue: MessageQueue) -> bytes:
    """The name under which the ``QueueCheckpoint`` of a queue is stored."""
    return str(queue).encode()


def checkpoints_of(notes: Mapping[bytes, bytes], doubtful: bool = False) -> dict[MessageQueue, QueueCheckpoint]:
    """The stored checkpoints by queue; with ``doubtful``, those from the time of another owner."""
    checkpoints = {}
    for name, value in notes.items():
        if name.startswith(DOUBTFUL_PREFIX) == doubtful and (checkpoint := QueueCheckpoint.decode(value)) is not None:
            name = name.removeprefix(DOUBTFUL_PREFIX)
            topic, _, rest = name.decode().partition("/")
            broker_name, _, number = rest.rpartition("/")  # from the right: a broker's name may contain a slash
            checkpoints[MessageQueue(topic, broker_name, int(number))] = checkpoint
    return checkpoints


def resume(checkpoint: QueueCheckpoint | None, committed: Progress | None, min_offset: int) -> QueueCheckpoint:
    """The checkpoint at which a node starts a newly assigned queue: its own one if its store has all envelopes from the oldest
    undone one on; otherwise the oldest undone envelope. After an interrupted hand-over, the store may lack envelopes.

    ``committed`` is the progress of the queue's last node, ``min_offset`` the first offset that the broker keeps.
    """
    if checkpoint is not None and checkpoint.is_handing_over:
        checkpoint = checkpoint.truncated(checkpoint.read_start)._replace(is_handing_over=False)
    if committed is None:
        return checkpoint or QueueCheckpoint(min_offset, min_offset, Progress(min_offset, min_offset, 0))
    if checkpoint is not None and checkpoint.read_start <= committed.oldest <= checkpoint.read_end:
        return checkpoint._replace(committed=committed)
    return QueueCheckpoint(committed.oldest, committed.oldest, committed)


_AHEAD_MS = 86_400_000  # a broker's clock may be this much ahead of the machine's


def newest_store_ms_before(offset: int, now_ms: int, search: Callable[[int], int]) -> int:
    """The store time of the message before ``offset``, or 0 if it is not found. ``search`` returns the first offset at or after a
    moment.
    """
    found_ms, beyond_ms = 0, now_ms + _AHEAD_MS
    if search(beyond_ms) < offset:
        return 0
    while beyond_ms - found_ms > 1:
        middle_ms = (found_ms + beyond_ms) // 2
        if search(middle_ms) < offset:
            found_ms = middle_ms
        else:
            beyond_ms = middle_ms
    return found_ms


# The topic for bodies that are not envelopes: they must neither block others nor get lost.
DEAD_TOPIC = "dmq_dead_topic"
EMPTY = b"(empty)"  # brokers reject an empty body
PROBLEM, TOPIC = "delayProblem", "delayTopic"
_ENVELOPE_START = MAGIC + bytes([VERSION])
_INTERNAL_PROPERTIES = codes.RESERVED_PROPERTIES | {QUEUE}
# RocketMQ's properties that an original keeps. With others, a sender could make the broker act with the node's rights.
_DELIVERED_PROPERTIES = {
    codes.Property.TAGS, codes.Property.KEYS, codes.Property.UNIQ_KEY, codes.Property.WAIT, codes.Property.SHARDING_KEY,
}  # fmt: skip
_MAX_PROPERTIES = codes.SINGLE_MAX_PROPERTIES_BYTES
# The sink writes its own message id, and ``msgId`` as a property.
_SINK_PROPERTY_BYTES = 1024
_MAX_NAME_CHARS, _MAX_QUEUE_ID = 255, 1_000_000
_REASON_CHARS = 500
ALL_TOPICS = ("*",)
SCHEMA = (
    "topic string, body binary, tags string, keys string, flag int, shardingKey string, "
    "properties map<string,string>, msgId string"
)


class SinkRow(NamedTuple):
    """A row for the sink, in the order of ``SCHEMA``.

    ``msg_id`` is the id from the original's sender, or a digest of the envelope, so that a repeated envelope has the same id.
    """

    topic: str
    body: bytes
    tags: str | None
    keys: str | None
    flag: int
    sharding_key: str | None
    properties: dict[str, str]
    msg_id: str


class Original(NamedTuple):
    """The properties that an envelope's message keeps, decoded and encoded, and the queue that its sender chose."""

    properties: dict[str, str]
    encoded: str
    queue: MessageQueue | None


class Delivery(NamedTuple):
    """What an envelope delivers; ``original`` is None for one that cancels another."""

    envelope: DecodedEnvelope
    original: Original | None


# Whether envelopes are read from a topic.
HasEnvelopes = Callable[[str], bool]


def has_default_name(topic: str) -> bool:
    """Whether a topic may be the default topic of envelopes. Its name may contain a namespace or an environment."""
    return INNER_TOPIC in topic


def delivery(
    data: bytes,
    topics: Collection[str] = ALL_TOPICS,
    max_bytes: int = codes.MAX_BODY_BYTES,
    has_envelopes: HasEnvelopes = has_default_name,
) -> Delivery:
    """Reads an envelope. Raises only ``DecodeError``, if the envelope's content cannot or may not be delivered.

    So all bad envelopes become dead letters, and none of them ends a node or a query, or delays other messages.
    """
    try:
        envelope = unpack(data)
        return Delivery(
            envelope, None if envelope.kind == CANCEL else original(envelope, topics, max_bytes, has_envelopes)
        )
    except DecodeError:
        raise
    except Exception as e:  # content of any client must not stop the messages of others
        raise DecodeError(f"this envelope is not delivered: {type(e).__name__}: {str(e)[:_REASON_CHARS]}") from e


def original(
    envelope: DecodedEnvelope,
    topics: Collection[str] = ALL_TOPICS,
    max_bytes: int = codes.MAX_BODY_BYTES,
    has_envelopes: HasEnvelopes = has_default_name,
) -> Original:
    """The message that an envelope delivers. Raises ``DecodeError`` for envelopes that no producer could have sent.

    ``topics`` are shell patterns of the permitted topics, because anyone who can write envelopes could otherwise make the node
    write to other topics. System, retry and dead-letter topics are never permitted, nor is one that ``has_envelopes``.
    """
    problem = _topic_refusal(envelope.topic, tuple(topics))
    if problem is None and has_envelopes(envelope.topic):
        problem = (
            f"topic {envelope.topic} has the envelopes, and many within each other would be sent one after the other"
        )
    if problem is None and not envelope.body:
        problem = "the message in the envelope has no body"
    if problem is None and len(envelope.body) > max_bytes:
        problem = f"its body has more than the {max_bytes} bytes that option 'maxMessageSize' permits"
    properties = decode_properties(envelope.properties)
    delivered, encoded = properties, envelope.properties
    if not (_encodes_unchanged(encoded, properties) and all(map(_is_delivered, properties))):
        delivered, encoded = {name: value for name, value in properties.items() if _is_delivered(name)}, ""
    if problem is None and not encoded:
        try:
            encoded = encode_properties(delivered, _MAX_PROPERTIES)
        except MessageRefused as e:
            problem = e.message
    if problem is not None:
        raise DecodeError(f"the message in this envelope is not delivered: {problem[:_REASON_CHARS]}")
    return Original(delivered, encoded, _chosen_queue(envelope.topic, properties.get(QUEUE, "")))


def _is_delivered(name: str) -> bool:
    return name in _DELIVERED_PROPERTIES or not _is_internal(name)


def _is_internal(name: str) -> bool:
    """Whether only RocketMQ or this package sets the property."""
    return name in _INTERNAL_PROPERTIES or is_reserved(name)


def _encodes_unchanged(text: str, properties: Collection[str]) -> bool:
    """Whether ``properties``, which were decoded from ``text``, certainly encode to ``text``, and it is short enough."""
    pairs = len(properties)
    has_all_separators = text.count("\x01") == text.count("\x02") == pairs and text.endswith("\x02")
    return has_all_separators and text.isascii() and len(text) <= _MAX_PROPERTIES


@functools.lru_cache(1024)  # most messages go to few topics
def _topic_refusal(topic: str, patterns: tuple[str, ...]) -> str | None:
    if (problem := topic_problem(topic)) is not None:
        return problem
    if not is_user_topic(topic):
        return f"topic {topic} takes no messages of users"
    if not any(fnmatchcase(topic, pattern) for pattern in patterns):
        return f"topic {topic} is none of those that messages may be delivered to: {', '.join(patterns)}"
    return None


def _chosen_queue(topic: str, text: str) -> MessageQueue | None:
    """The queue that the sender chose; None if there is none, or if the text is not a queue."""
    broker_name, _, number = text.rpartition(":")
    if (
        0 < len(broker_name) <= _MAX_NAME_CHARS
        and number.isascii()
        and number.isdecimal()
        and len(number) < 10
        and int(number) < _MAX_QUEUE_ID
    ):
        return MessageQueue(topic, broker_name, int(number))
    return None


class DeadLetter(NamedTuple):
    """The body of a dead letter, and the property with its reason."""

    body: bytes
    properties: dict[str, str]


def dead_letter(data: bytes, error: DecodeError, max_bytes: int = codes.MAX_BODY_BYTES) -> DeadLetter:
    """The dead letter of a body that is not delivered. The body is truncated to what a message may have."""
    return DeadLetter(data[:max_bytes] or EMPTY, {PROBLEM: reason_text(str(error)) + truncation_note(data, max_bytes)})


def truncation_note(data: bytes, max_bytes: int) -> str:
    """A note that a dead letter has only the first bytes of a body, as the end of the reason. Empty if it has the whole body."""
    return f"; these are its first {max_bytes} bytes" if len(data) > max_bytes else ""


def reason_text(reason: str) -> str:
    """A reason as a property. It may quote an envelope, and a Proxy rejects control characters."""
    text = "".join(c if c.isprintable() else "?" for c in reason[: 2 * _REASON_CHARS])
    return text.encode(errors="replace").decode()


def sink_row(
    data: bytes,
    dead_topic: str = DEAD_TOPIC,
    topics: Collection[str] = ALL_TOPICS,
    max_bytes: int = codes.MAX_BODY_BYTES,
    refusal: Callable[[str], str | None] | None = None,
) -> SinkRow:
    """The row for the original of an envelope. A body that is not an envelope goes to ``dead_topic``, with the reason as a
    property.

    ``refusal`` returns why the sink would refuse all messages of a topic, or None.
    """
    try:
        envelope, original = delivery(data, topics, max_bytes)
        if original is None:
            raise DecodeError("the envelope cancels another one")
        properties, msg_id = original.properties, original.properties.get(codes.Property.UNIQ_KEY, "")
        if not 0 < len(msg_id) <= _MAX_NAME_CHARS:
            msg_id = _digest(data)
        size = len(original.encoded.encode())
        if size > _MAX_PROPERTIES - _SINK_PROPERTY_BYTES:
            raise DecodeError(f"its properties have {size} bytes, and the sink adds its own")
        if refusal is not None and (why := refusal(envelope.topic)) is not None:
            raise DecodeError(why[:_REASON_CHARS])
    except DecodeError as e:
        return dead_letter_row(data, e, dead_topic, max_bytes)
    return SinkRow(
        envelope.topic,
        envelope.body,
        properties.get(codes.Property.TAGS),
        properties.get(codes.Property.KEYS),
        envelope.flag,
        properties.get(codes.Property.SHARDING_KEY),
        {name: value for name, value in properties.items() if not (_is_internal(name) or name == codes.ROW_ID)},
        msg_id,
    )


def dead_letter_row(data: bytes, error: DecodeError, dead_topic: str, max_bytes: int = codes.MAX_BODY_BYTES) -> SinkRow:
    """The row of a body that is not delivered."""
    body, properties = dead_letter(data, error, max_bytes)
    return SinkRow(dead_topic, body, None, None, 0, None, properties, _digest(data))


def _digest(data: bytes) -> str:
    return digest(data).hex().upper()


def without_duplicates(bodies: Iterable[bytes]) -> Iterator[bytes]:
    """Drops repeated envelopes (same due time and digest), and those that another one of them cancels."""
    bodies_by_identity: dict[bytes, bytes] = {}
    cancelled = set()
    for body in bodies:
        if is_cancellation(body):
            cancelled.add(identity_of(body))
        else:
            bodies_by_identity.setdefault(identity_of(body), body)
    return (body for identity, body in bodies_by_identity.items() if identity not in cancelled)


def is_cancellation(data: bytes) -> bool:
    """Whether a body is an envelope that cancels another one."""
    return _is_envelope(data) and data[KIND_AT] == CANCEL


def identity_of(data: bytes) -> bytes:
    """The identity of an envelope; for other bodies a digest of the whole body."""
    return data[DUE_AT:DIGEST_END] if _is_envelope(data) else digest(data)


def _is_envelope(data: bytes) -> bool:
    return data.startswith(_ENVELOPE_START) and len(data) >= DIGEST_END
