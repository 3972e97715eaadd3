"""The original message that is sent when a delayed message is due, and a node's progress in a queue of envelopes. Pure.

For a node that takes over a queue, the group's offset alone is not enough: the offset stays at the oldest envelope whose original
was not sent. The originals of many later envelopes may have been sent. So a node commits three numbers (``Progress``) and a store
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
# The layout of releases up to 0.1, and the layout of the earliest releases, which did not write ``newest_store_ms``. The numbers
# of a progress in these layouts may be from two nodes.
_LAYOUT_0_1, _OLDEST_LAYOUT = struct.Struct(">6Q"), struct.Struct(">5Q")


class Progress(NamedTuple):
    """All envelopes before ``oldest_offset`` are done. Of the envelopes before ``read_end``, all that were due by ``done_ms``
    are done.
    """

    oldest_offset: int
    read_end: int
    done_ms: int

    def is_done(self, offset: int, due_ms: int) -> bool:
        """Whether the original of an envelope was certainly sent. A ``done_ms`` of 0 proves nothing, because bodies that are no
        envelopes are due at 0, and may still wait.
        """
        return offset < self.oldest_offset or (offset < self.read_end and due_ms <= self.done_ms and self.done_ms > 0)

    def followed_by(self, later_progress: Progress) -> Progress:
        """Return the progress after this progress and ``later_progress``. If envelopes have arrived that were already due,
        ``later_progress`` has a lower ``done_ms``. Then ``later_progress`` is used only if all envelopes that this progress
        covers are done, because this progress claims more while one of these envelopes waits.
        """
        oldest_offset = max(self.oldest_offset, later_progress.oldest_offset)
        uses_later_progress = later_progress.read_end >= self.read_end and (
            later_progress.done_ms >= self.done_ms or oldest_offset >= self.read_end
        )
        read_end, done_ms = (later_progress if uses_later_progress else self)[1:]
        return Progress(oldest_offset, read_end, done_ms)

    def merged_with(self, other: Progress) -> Progress:
        """Return a progress that claims what this progress and ``other`` claim together. ``done_ms`` is from the node that has
        read further.
        """
        further_progress = max(self, other, key=lambda progress: progress[1:])
        return Progress(
            max(self.oldest_offset, other.oldest_offset), further_progress.read_end, further_progress.done_ms
        )

    def limited_to(self, now_ms: int) -> Progress:
        """Return this progress with a ``done_ms`` that is not after ``now_ms``. A later moment is from a clock that was ahead.
        With a ``done_ms`` in the future, no new progress would count until this moment comes (see ``followed_by``).
        """
        return self._replace(done_ms=min(self.done_ms, now_ms))

    def truncated_at(self, offset: int) -> Progress:
        """Return the part that remains valid if the broker's messages from ``offset`` on differ from the messages that this
        progress covers.
        """
        return Progress(min(self.oldest_offset, offset), min(self.read_end, offset), self.done_ms)


def advanced_progress(
    committed_progress: Progress,
    oldest_offset: int,
    read_end: int,
    first_waiting_due_ms: int | None,
    last_done_due_ms: int,
    now_ms: int,
) -> Progress:
    """Return the progress that follows ``committed_progress`` when a node has read up to ``read_end``, and no envelope before
    ``oldest_offset`` waits.

    ``first_waiting_due_ms`` is the earliest due time of the waiting envelopes, and ``last_done_due_ms`` the latest due time of
    the done envelopes. The new ``done_ms`` is at most ``now_ms``, even if ``last_done_due_ms`` or ``committed_progress`` has a
    later moment. With a moment from a clock that was ahead, no progress would be committed until the clock reaches the moment
    again (see ``followed_by``).
    """
    limited_progress = committed_progress.limited_to(now_ms)
    done_ms = min(now_ms, max(last_done_due_ms, limited_progress.done_ms))
    if first_waiting_due_ms is not None:
        done_ms = min(done_ms, max(0, first_waiting_due_ms - 1))
    return limited_progress.followed_by(Progress(oldest_offset, read_end, done_ms))


class QueueCheckpoint(NamedTuple):
    """What a node has stored about a queue. All envelopes from ``read_start`` to before ``read_end`` are done or in the node's
    store. ``committed`` is the progress of the last commit.

    ``newest_store_ms`` is the latest store time of the envelopes read (0 if none): messages with a later store time must be at
    ``read_end`` or after it. ``is_handing_over`` is true while the records are handed over. While they are handed over, some
    records that are not done may already be deleted, because a hand-over takes several writes.
    """

    read_start: int
    read_end: int
    committed: Progress
    newest_store_ms: int = 0
    is_handing_over: bool = False

    @property
    def end_and_newest_store_ms(self) -> tuple[int, int]:
        """The offset up to which this node, or the node that committed the progress, has read, and the latest store time before
        this offset.
        """
        return max(self.read_end, self.committed.read_end), self.newest_store_ms

    def encode(self) -> bytes:
        state = _HANDING_OVER if self.is_handing_over else _OWNED
        return _CHECKPOINT.pack(state, self.read_start, self.read_end, *self.committed, self.newest_store_ms)

    def shows_recreation(self, message: ReceivedMessage) -> bool:
        """Whether the message has an offset that was already read, but a later store time than all messages that were read. If
        so, the topic was created again.
        """
        return message.queue_offset < self.read_end and 0 < self.newest_store_ms < message.store_timestamp

    def truncated_at(self, offset: int) -> QueueCheckpoint:
        """Return the part that remains valid if the broker's messages from ``offset`` on differ from the messages that were
        read. ``offset`` may be after the last message that this node has read, because another node may have read further.
        """
        return self._replace(
            read_start=min(self.read_start, offset),
            read_end=min(self.read_end, offset),
            committed=self.committed.truncated_at(offset),
        )

    @classmethod
    def decode(cls, data: bytes | None) -> QueueCheckpoint | None:
        """Decode a note. Returns None for a note that is empty or of an unknown format; the queue is then read again. In notes of
        earlier releases, only the offset before which all envelopes are done is certain (see ``commits``).
        """
        if not data:
            return None
        if len(data) == _CHECKPOINT.size and data[0] in (_OWNED, _HANDING_OVER):
            state, read_start, read_end, oldest_offset, committed_end, done_ms, newest_store_ms = _CHECKPOINT.unpack(
                data
            )
            return cls(
                read_start,
                read_end,
                Progress(oldest_offset, committed_end, done_ms),
                newest_store_ms,
                state == _HANDING_OVER,
            )
        for layout in (_LAYOUT_0_1, _OLDEST_LAYOUT):
            if len(data) == layout.size:
                read_start, read_end, oldest_offset, _, _, *newest_values = layout.unpack(data)
                return cls(read_start, read_end, Progress(oldest_offset, oldest_offset, 0), *newest_values)
        return None


def note_name(queue: MessageQueue) -> bytes:
    """The name under which the ``QueueCheckpoint`` of a queue is stored."""
    return str(queue).encode()


def checkpoints_of(notes: Mapping[bytes, bytes], doubtful: bool = False) -> dict[MessageQueue, QueueCheckpoint]:
    """Return the stored checkpoints by queue; with ``doubtful``, the checkpoints from the time of another owner."""
    checkpoints = {}
    for name, value in notes.items():
        if name.startswith(DOUBTFUL_PREFIX) == doubtful and (checkpoint := QueueCheckpoint.decode(value)) is not None:
            name = name.removeprefix(DOUBTFUL_PREFIX)
            topic, _, broker_and_id = name.decode().partition("/")
            # The text is split at its last slash, because the name of a broker may contain a slash.
            broker_name, _, queue_id = broker_and_id.rpartition("/")
            checkpoints[MessageQueue(topic, broker_name, int(queue_id))] = checkpoint
    return checkpoints


def resumed_checkpoint(
    checkpoint: QueueCheckpoint | None, committed: Progress | None, min_offset: int
) -> QueueCheckpoint:
    """Return the checkpoint at which a node starts a newly assigned queue. If the oldest envelope that is not done is in the
    range that the node's store covers, return the node's own checkpoint. Otherwise return a checkpoint at the oldest envelope
    that is not done. After an interrupted hand-over, the store may lack envelopes.

    ``committed`` is the progress of the queue's last node, ``min_offset`` is the first offset that the broker keeps.
    """
    if checkpoint is not None and checkpoint.is_handing_over:
        checkpoint = checkpoint.truncated_at(checkpoint.read_start)._replace(is_handing_over=False)
    if committed is None:
        return checkpoint or QueueCheckpoint(min_offset, min_offset, Progress(min_offset, min_offset, 0))
    if checkpoint is not None and checkpoint.read_start <= committed.oldest_offset <= checkpoint.read_end:
        return checkpoint._replace(committed=committed)
    return QueueCheckpoint(committed.oldest_offset, committed.oldest_offset, committed)


_MAX_CLOCK_AHEAD_MS = 86_400_000  # how far a broker's clock may be ahead of this machine's clock


def newest_store_ms_before(offset: int, now_ms: int, search: Callable[[int], int]) -> int:
    """Return the store time of the message before ``offset``; 0 if no such message is found. ``search`` returns the first
    offset at or after a moment.
    """
    low_ms, high_ms = 0, now_ms + _MAX_CLOCK_AHEAD_MS
    if search(high_ms) < offset:
        return 0
    while high_ms - low_ms > 1:
        middle_ms = (low_ms + high_ms) // 2
        if search(middle_ms) < offset:
            low_ms = middle_ms
        else:
            high_ms = middle_ms
    return low_ms


# The topic for bodies that are not envelopes. These bodies are kept there, and do not block other messages.
DEAD_TOPIC = "dmq_dead_topic"
EMPTY_BODY = b"(empty)"  # brokers reject an empty body
PROBLEM_PROPERTY, TOPIC_PROPERTY = "delayProblem", "delayTopic"
_ENVELOPE_START = MAGIC + bytes([VERSION])
_INTERNAL_PROPERTIES = codes.RESERVED_PROPERTIES | {QUEUE}
# RocketMQ's properties that an original keeps. All other properties of RocketMQ are dropped, because with them a sender could
# make the broker act with the node's rights.
_DELIVERED_PROPERTIES = {
    codes.Property.TAGS, codes.Property.KEYS, codes.Property.UNIQ_KEY, codes.Property.WAIT, codes.Property.SHARDING_KEY,
}  # fmt: skip
_MAX_PROPERTIES_BYTES = codes.SINGLE_MAX_PROPERTIES_BYTES
# Room for the message id and the property ``msgId``, which the sink adds.
_SINK_PROPERTY_BYTES = 1024
_MAX_NAME_CHARS, _MAX_QUEUE_ID = 255, 1_000_000
_MAX_REASON_CHARS = 500
ALL_TOPICS = ("*",)
SINK_SCHEMA = (
    "topic string, body binary, tags string, keys string, flag int, shardingKey string, "
    "properties map<string,string>, msgId string"
)


class SinkRow(NamedTuple):
    """A row for the sink, in the order of ``SINK_SCHEMA``.

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
    encoded_properties: str
    queue: MessageQueue | None


class Delivery(NamedTuple):
    """What an envelope delivers. ``original`` is None if the envelope cancels another envelope."""

    envelope: DecodedEnvelope
    original: Original | None


# A function that returns whether envelopes are read from a topic.
HasEnvelopes = Callable[[str], bool]


def has_default_name(topic: str) -> bool:
    """Whether a topic may be the default topic of envelopes. Brokers may know this topic by a name with a namespace or an
    environment.
    """
    return INNER_TOPIC in topic


def delivery(
    data: bytes,
    topics: Collection[str] = ALL_TOPICS,
    max_bytes: int = codes.MAX_BODY_BYTES,
    has_envelopes: HasEnvelopes = has_default_name,
) -> Delivery:
    """Return what an envelope delivers. Raises only ``DecodeError``, for content that cannot or may not be delivered.

    So every bad envelope becomes a dead letter. It does not end a node or a query, and does not delay other messages.
    """
    try:
        envelope = unpack(data)
        return Delivery(
            envelope, None if envelope.kind == CANCEL else original(envelope, topics, max_bytes, has_envelopes)
        )
    except DecodeError:
        raise
    except Exception as e:  # no content may stop other messages
        raise DecodeError(f"this envelope is not delivered: {type(e).__name__}: {str(e)[:_MAX_REASON_CHARS]}") from e


def original(
    envelope: DecodedEnvelope,
    topics: Collection[str] = ALL_TOPICS,
    max_bytes: int = codes.MAX_BODY_BYTES,
    has_envelopes: HasEnvelopes = has_default_name,
) -> Original:
    """The message that an envelope delivers. Raises ``DecodeError`` for envelopes that no producer could have sent.

    ``topics`` are shell patterns of the permitted topics. The patterns limit the topics to which the node sends. Without the
    patterns, everyone who can write envelopes could choose any topic of users. System topics, retry topics, dead-letter topics
    and topics that contain envelopes are never permitted.
    """
    problem = _topic_refusal(envelope.topic, tuple(topics))
    if problem is None and has_envelopes(envelope.topic):
        problem = f"topic {envelope.topic} contains envelopes, and an envelope must not deliver another envelope"
    if problem is None and not envelope.body:
        problem = "the message in the envelope has no body"
    if problem is None and len(envelope.body) > max_bytes:
        problem = f"its body has more than the {max_bytes} bytes that option 'maxMessageSize' permits"
    properties = decode_properties(envelope.properties)
    delivered_properties, encoded_properties = properties, envelope.properties
    if not (_encodes_unchanged(encoded_properties, properties) and all(map(_is_delivered_property, properties))):
        delivered_properties, encoded_properties = (
            {name: value for name, value in properties.items() if _is_delivered_property(name)},
            "",
        )
    if problem is None and not encoded_properties:
        try:
            encoded_properties = encode_properties(delivered_properties, _MAX_PROPERTIES_BYTES)
        except MessageRefused as e:
            problem = e.message
    if problem is not None:
        raise DecodeError(f"the message in this envelope is not delivered: {problem[:_MAX_REASON_CHARS]}")
    return Original(delivered_properties, encoded_properties, _chosen_queue(envelope.topic, properties.get(QUEUE, "")))


def _is_delivered_property(name: str) -> bool:
    return name in _DELIVERED_PROPERTIES or not _is_internal_property(name)


def _is_internal_property(name: str) -> bool:
    """Whether only RocketMQ or this package sets the property."""
    return name in _INTERNAL_PROPERTIES or is_reserved(name)


def _encodes_unchanged(text: str, properties: Collection[str]) -> bool:
    """Whether ``properties``, which were decoded from ``text``, certainly encode to ``text``, and ``text`` is short enough."""
    pair_count = len(properties)
    has_all_separators = text.count("\x01") == text.count("\x02") == pair_count and text.endswith("\x02")
    return has_all_separators and text.isascii() and len(text) <= _MAX_PROPERTIES_BYTES


@functools.lru_cache(1024)  # cached, because most messages go to few topics
def _topic_refusal(topic: str, patterns: tuple[str, ...]) -> str | None:
    if (problem := topic_problem(topic)) is not None:
        return problem
    if not is_user_topic(topic):
        return f"topic {topic} takes no messages of users"
    if not any(fnmatchcase(topic, pattern) for pattern in patterns):
        return f"topic {topic} is none of those that messages may be delivered to: {', '.join(patterns)}"
    return None


def _chosen_queue(topic: str, text: str) -> MessageQueue | None:
    """Return the queue that the sender chose; None if it chose no queue, or if the text is not a queue."""
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
    """Return the dead letter of a body that is not delivered. The body is truncated to ``max_bytes``."""
    return DeadLetter(
        data[:max_bytes] or EMPTY_BODY, {PROBLEM_PROPERTY: reason_text(str(error)) + truncation_note(data, max_bytes)}
    )


def truncation_note(data: bytes, max_bytes: int) -> str:
    """Return a clause at the end of a reason, which says that the dead letter has only the first bytes of the body. Return an
    empty text if the dead letter has the whole body.
    """
    return f"; these are its first {max_bytes} bytes" if len(data) > max_bytes else ""


def reason_text(reason: str) -> str:
    """Return a reason as the value of a property. The reason may quote an envelope, and a Proxy rejects control characters, so
    these are replaced.
    """
    text = "".join(c if c.isprintable() else "?" for c in reason[: 2 * _MAX_REASON_CHARS])
    return text.encode(errors="replace").decode()


def sink_row(
    data: bytes,
    dead_topic: str = DEAD_TOPIC,
    topics: Collection[str] = ALL_TOPICS,
    max_bytes: int = codes.MAX_BODY_BYTES,
    refusal: Callable[[str], str | None] | None = None,
) -> SinkRow:
    """Return the row for the original of an envelope. The row of a body that is not an envelope goes to ``dead_topic``, with
    the reason as a property.

    ``refusal`` returns why the sink would refuse all messages of a topic, or None.
    """
    try:
        envelope, original = delivery(data, topics, max_bytes)
        if original is None:
            raise DecodeError("the envelope cancels another one")
        properties, msg_id = original.properties, original.properties.get(codes.Property.UNIQ_KEY, "")
        if not 0 < len(msg_id) <= _MAX_NAME_CHARS:
            msg_id = _digest_text(data)
        size = len(original.encoded_properties.encode())
        if size > _MAX_PROPERTIES_BYTES - _SINK_PROPERTY_BYTES:
            raise DecodeError(
                f"its properties have {size} bytes, which leaves no room for the properties that the sink adds"
            )
        if refusal is not None and (reason := refusal(envelope.topic)) is not None:
            raise DecodeError(reason[:_MAX_REASON_CHARS])
    except DecodeError as e:
        return dead_letter_row(data, e, dead_topic, max_bytes)
    return SinkRow(
        envelope.topic,
        envelope.body,
        properties.get(codes.Property.TAGS),
        properties.get(codes.Property.KEYS),
        envelope.flag,
        properties.get(codes.Property.SHARDING_KEY),
        {
            name: value
            for name, value in properties.items()
            if not (_is_internal_property(name) or name == codes.ROW_ID)
        },
        msg_id,
    )


def dead_letter_row(data: bytes, error: DecodeError, dead_topic: str, max_bytes: int = codes.MAX_BODY_BYTES) -> SinkRow:
    """The row of a body that is not delivered."""
    body, properties = dead_letter(data, error, max_bytes)
    return SinkRow(dead_topic, body, None, None, 0, None, properties, _digest_text(data))


def _digest_text(data: bytes) -> str:
    return digest(data).hex().upper()


def without_duplicates(bodies: Iterable[bytes]) -> Iterator[bytes]:
    """Drop repeated envelopes (same due time and digest), and envelopes that another envelope of ``bodies`` cancels."""
    bodies_by_identity: dict[bytes, bytes] = {}
    cancelled_identities = set()
    for body in bodies:
        if is_cancellation(body):
            cancelled_identities.add(identity_of(body))
        else:
            bodies_by_identity.setdefault(identity_of(body), body)
    return (body for identity, body in bodies_by_identity.items() if identity not in cancelled_identities)


def is_cancellation(data: bytes) -> bool:
    """Whether a body is an envelope that cancels another envelope."""
    return _is_envelope(data) and data[KIND_AT] == CANCEL


def identity_of(data: bytes) -> bytes:
    """The identity of an envelope; for other bodies a digest of the whole body."""
    return data[DUE_AT:DIGEST_END] if _is_envelope(data) else digest(data)


def _is_envelope(data: bytes) -> bool:
    return data.startswith(_ENVELOPE_START) and len(data) >= DIGEST_END
