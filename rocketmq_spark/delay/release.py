"""The original that is sent when a delayed message is due, and a node's progress in a queue of envelopes. Pure.

For a node that takes over a queue, the group's offset alone is not enough: it stays at the oldest envelope whose original was
not sent, while the originals of many later ones may have been sent. So a node commits three numbers (``Progress``), and a store
time (``commits``).
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
from rocketmq_spark.spool.records import DOUBTFUL
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

# The first byte of a note: whether the queue's records are being handed over.
_STAYING, _LEAVING = 2, 3
_SEEN = struct.Struct(">B6Q")
# The layouts of releases up to 0.1, and of those that did not write the last number. Their progress may be that of two nodes.
_EARLIER, _EARLIEST = struct.Struct(">6Q"), struct.Struct(">5Q")


class Progress(NamedTuple):
    """All envelopes before offset ``oldest`` are done, and of those before ``stored`` all that were due by ``done_ms``."""

    oldest: int
    stored: int
    done_ms: int

    def done(self, offset: int, due_ms: int) -> bool:
        """Whether the original of an envelope was certainly sent. A ``done_ms`` of 0 proves nothing: bodies that are no envelopes
        are due at 0, and may still wait.
        """
        return offset < self.oldest or (offset < self.stored and due_ms <= self.done_ms and self.done_ms > 0)

    def then(self, later: Progress) -> Progress:
        """The progress after this one and ``later``. Envelopes that arrive late set ``done_ms`` back: then this progress is kept,
        because it claims more, unless everything it covers is done.
        """
        oldest = max(self.oldest, later.oldest)
        newer = later.stored >= self.stored and (later.done_ms >= self.done_ms or oldest >= self.stored)
        stored, done_ms = (later if newer else self)[1:]
        return Progress(oldest, stored, done_ms)

    def joined(self, other: Progress) -> Progress:
        """What both claim, as one progress: of two moments that of the node that read further."""
        further = max(self, other, key=lambda progress: progress[1:])
        return Progress(max(self.oldest, other.oldest), further.stored, further.done_ms)

    def until(self, now_ms: int) -> Progress:
        """The part that does not claim anything of later moments. A moment after now is that of a clock that was ahead, and
        would hide all progress until then (``then``).
        """
        return self._replace(done_ms=min(self.done_ms, now_ms))

    def cut(self, at: int) -> Progress:
        """The part that remains valid if the broker's messages from ``at`` on are other ones than those covered here."""
        return Progress(min(self.oldest, at), min(self.stored, at), self.done_ms)


def advanced(
    committed: Progress, oldest: int, stored: int, waits_from_ms: int | None, ended_ms: int, now_ms: int
) -> Progress:
    """The progress after ``committed`` of a node that has read up to ``stored`` and has nothing waiting before ``oldest``.

    ``waits_from_ms`` is the due time of the first envelope that waits, and ``ended_ms`` the latest one of those that are done.
    The progress reaches to the latter, but not further than now: otherwise, after a clock that was ahead for a moment, nothing
    that is done until then would be committed (``then``). A moment that was committed with such a clock is lowered.
    """
    before = committed.until(now_ms)
    done_ms = min(now_ms, max(ended_ms, before.done_ms))
    if waits_from_ms is not None:
        done_ms = min(done_ms, max(0, waits_from_ms - 1))
    return before.then(Progress(oldest, stored, done_ms))


class Seen(NamedTuple):
    """A node's note about a queue: all envelopes from ``begin`` to before ``stored`` are in its store or done; and its last
    commit.

    ``newest_ms`` is the latest store time of the envelopes read (0 if none): messages with a later store time must be at
    ``stored`` or after it. ``leaving`` is true while the records are handed over. That takes several writes, so some records
    that are not done may already be deleted.
    """

    begin: int
    stored: int
    committed: Progress
    newest_ms: int = 0
    leaving: bool = False

    @property
    def read(self) -> tuple[int, int]:
        """The end of the envelopes read, here or by the node that committed the progress, and their latest store time."""
        return max(self.stored, self.committed.stored), self.newest_ms

    def encode(self) -> bytes:
        state = _LEAVING if self.leaving else _STAYING
        return _SEEN.pack(state, self.begin, self.stored, *self.committed, self.newest_ms)

    def is_other(self, message: ReceivedMessage) -> bool:
        """Whether another message was read at this offset before, so that the topic was created again."""
        return message.queue_offset < self.stored and 0 < self.newest_ms < message.store_timestamp

    def cut(self, at: int) -> Seen:
        """The part that remains valid if the broker's messages from ``at`` on are other ones than those that were read. ``at``
        may be after the last message that this node has read, because another node may have read further.
        """
        return self._replace(begin=min(self.begin, at), stored=min(self.stored, at), committed=self.committed.cut(at))

    @classmethod
    def decode(cls, data: bytes | None) -> Seen | None:
        """Decodes a note. Returns None if it is empty or of an unknown format; then the queue is read again. Of the progress that
        an earlier release noted, only the offset before which all are done is certain, as in ``commits``.
        """
        if not data:
            return None
        if len(data) == _SEEN.size and data[0] in (_STAYING, _LEAVING):
            state, begin, stored, oldest, committed, done_ms, newest_ms = _SEEN.unpack(data)
            return cls(begin, stored, Progress(oldest, committed, done_ms), newest_ms, state == _LEAVING)
        for layout in (_EARLIER, _EARLIEST):
            if len(data) == layout.size:
                begin, stored, oldest, _, _, *newest = layout.unpack(data)
                return cls(begin, stored, Progress(oldest, oldest, 0), *newest)
        return None


def note_of(queue: MessageQueue) -> bytes:
    """The name under which the ``Seen`` of a queue is stored."""
    return str(queue).encode()


def noted(notes: Mapping[bytes, bytes], doubtful: bool = False) -> dict[MessageQueue, Seen]:
    """The stored notes by queue; with ``doubtful`` those made while the records belonged to another owner."""
    found = {}
    for name, value in notes.items():
        if name.startswith(DOUBTFUL) == doubtful and (seen := Seen.decode(value)) is not None:
            name = name.removeprefix(DOUBTFUL)
            topic, _, rest = name.decode().partition("/")
            broker_name, _, number = rest.rpartition("/")  # from the right: a broker's name may contain a slash
            found[MessageQueue(topic, broker_name, int(number))] = seen
    return found


def resumed(seen: Seen | None, committed: Progress | None, first: int) -> Seen:
    """Where a node starts to read a newly assigned queue: at its own position if its store has all envelopes from the oldest
    undone one on; otherwise at the oldest undone envelope. After an interrupted hand-over, the store may have no envelopes.

    ``committed`` is the progress of the queue's last node, ``first`` the first offset that the broker keeps.
    """
    if seen is not None and seen.leaving:
        seen = seen.cut(seen.begin)._replace(leaving=False)
    if committed is None:
        return seen or Seen(first, first, Progress(first, first, 0))
    if seen is not None and seen.begin <= committed.oldest <= seen.stored:
        return seen._replace(committed=committed)
    return Seen(committed.oldest, committed.oldest, committed)


_AHEAD_MS = 86_400_000  # by so much a broker's clock may be ahead of this machine's


def newest_before(offset: int, now_ms: int, search: Callable[[int], int]) -> int:
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


# The topic for bodies that are no envelopes: they must neither block others nor get lost.
DEAD_TOPIC = "dmq_dead_topic"
EMPTY = b"(empty)"  # brokers reject an empty body
PROBLEM, TOPIC = "delayProblem", "delayTopic"
_BEGIN = MAGIC + bytes([VERSION])
_NOT_THE_USERS = codes.RESERVED_PROPERTIES | {QUEUE}
# RocketMQ's own properties that an original keeps. With others, a sender could make the broker do things with the node's rights.
_KEPT = {
    codes.Property.TAGS, codes.Property.KEYS, codes.Property.UNIQ_KEY, codes.Property.WAIT, codes.Property.SHARDING_KEY,
}  # fmt: skip
_MAX_PROPERTIES = codes.SINGLE_MAX_PROPERTIES
# The sink writes its own message id, and ``msgId`` as a property.
_SINKS_PROPERTIES = 1024
_MAX_NAME, _MAX_QUEUE = 255, 1_000_000
_REASON_CHARS = 500
ALL_TOPICS = ("*",)
SCHEMA = (
    "topic string, body binary, tags string, keys string, flag int, shardingKey string, "
    "properties map<string,string>, msgId string"
)


class Released(NamedTuple):
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
    """The properties that an envelope's message may keep, also encoded, and the queue that its sender chose."""

    properties: dict[str, str]
    stored: str
    queue: MessageQueue | None


class Delivery(NamedTuple):
    """What an envelope delivers; ``original`` is None for one that cancels another."""

    opened: DecodedEnvelope
    original: Original | None


# Whether envelopes are read from a topic.
HasEnvelopes = Callable[[str], bool]


def has_default_name(topic: str) -> bool:
    """Whether it may be the usual topic of envelopes: a name may have the namespace or the environment already."""
    return INNER_TOPIC in topic


def delivery(
    data: bytes,
    topics: Collection[str] = ALL_TOPICS,
    max_bytes: int = codes.MAX_BODY_BYTES,
    has_envelopes: HasEnvelopes = has_default_name,
) -> Delivery:
    """Reads an envelope. Raises ``DecodeError``, and nothing else, if it cannot or may not be delivered because of its content.

    So a bad envelope becomes a dead letter in one place, and neither ends a node or a query nor delays other messages.
    """
    try:
        opened = unpack(data)
        return Delivery(opened, None if opened.kind == CANCEL else original(opened, topics, max_bytes, has_envelopes))
    except DecodeError:
        raise
    except Exception as e:  # whatever another client wrote must not stop the messages of others
        raise DecodeError(f"this envelope is not delivered: {type(e).__name__}: {str(e)[:_REASON_CHARS]}") from e


def original(
    opened: DecodedEnvelope,
    topics: Collection[str] = ALL_TOPICS,
    max_bytes: int = codes.MAX_BODY_BYTES,
    has_envelopes: HasEnvelopes = has_default_name,
) -> Original:
    """The message that an envelope delivers. Raises ``DecodeError`` for envelopes that no producer could have sent.

    ``topics`` are shell patterns of the permitted topics, because anyone who can write envelopes could otherwise make the node
    write to other topics. System, retry and dead-letter topics are never permitted, nor is one that ``has_envelopes``.
    """
    problem = _topic_refusal(opened.topic, tuple(topics))
    if problem is None and has_envelopes(opened.topic):
        problem = (
            f"topic {opened.topic} has the envelopes, and many within each other would be sent one after the other"
        )
    if problem is None and not opened.body:
        problem = "the message in the envelope has no body"
    if problem is None and len(opened.body) > max_bytes:
        problem = f"its body has more than the {max_bytes} bytes that option 'maxMessageSize' permits"
    found = decode_properties(opened.properties)
    kept, stored = found, opened.properties
    if not (_are_stored_so(stored, found) and all(map(_is_kept, found))):
        kept, stored = {name: value for name, value in found.items() if _is_kept(name)}, ""
    if problem is None and not stored:
        try:
            stored = encode_properties(kept, _MAX_PROPERTIES)
        except MessageRefused as e:
            problem = e.message
    if problem is not None:
        raise DecodeError(f"the message in this envelope is not delivered: {problem[:_REASON_CHARS]}")
    return Original(kept, stored, _chosen(opened.topic, found.get(QUEUE, "")))


def _is_kept(name: str) -> bool:
    return name in _KEPT or not _is_ours(name)


def _is_ours(name: str) -> bool:
    """Whether only RocketMQ or this package sets the property."""
    return name in _NOT_THE_USERS or is_reserved(name)


def _are_stored_so(text: str, properties: Collection[str]) -> bool:
    """Whether encoding ``properties``, which were decoded from ``text``, results in ``text`` again, and it is short enough. False
    if that is not certain.
    """
    pairs = len(properties)
    parted = text.count("\x01") == text.count("\x02") == pairs and text.endswith("\x02")
    return parted and text.isascii() and len(text) <= _MAX_PROPERTIES


@functools.lru_cache(1024)  # most messages go to few topics
def _topic_refusal(topic: str, patterns: tuple[str, ...]) -> str | None:
    if (problem := topic_problem(topic)) is not None:
        return problem
    if not is_user_topic(topic):
        return f"topic {topic} takes no messages of users"
    if not any(fnmatchcase(topic, pattern) for pattern in patterns):
        return f"topic {topic} is none of those that messages may be delivered to: {', '.join(patterns)}"
    return None


def _chosen(topic: str, text: str) -> MessageQueue | None:
    """The queue that the sender chose; None if there is none, or if the text is not a queue."""
    broker_name, _, number = text.rpartition(":")
    if (
        0 < len(broker_name) <= _MAX_NAME
        and number.isascii()
        and number.isdecimal()
        and len(number) < 10
        and int(number) < _MAX_QUEUE
    ):
        return MessageQueue(topic, broker_name, int(number))
    return None


class DeadLetter(NamedTuple):
    """The body of a dead letter, and the property with its reason."""

    body: bytes
    properties: dict[str, str]


def dead_letter(data: bytes, error: DecodeError, max_bytes: int = codes.MAX_BODY_BYTES) -> DeadLetter:
    """A body that is not delivered, as much of it as a message may have."""
    return DeadLetter(data[:max_bytes] or EMPTY, {PROBLEM: reason_text(str(error)) + cut(data, max_bytes)})


def cut(data: bytes, max_bytes: int) -> str:
    """The end of the reason in a dead letter that has only a part of the body. Empty if it has the whole body."""
    return f"; these are its first {max_bytes} bytes" if len(data) > max_bytes else ""


def reason_text(reason: str) -> str:
    """A reason as a property: it may name parts of an envelope, and a Proxy takes no control characters."""
    text = "".join(c if c.isprintable() else "?" for c in reason[: 2 * _REASON_CHARS])
    return text.encode(errors="replace").decode()


def released(
    data: bytes,
    dead_topic: str = DEAD_TOPIC,
    topics: Collection[str] = ALL_TOPICS,
    max_bytes: int = codes.MAX_BODY_BYTES,
    refusal: Callable[[str], str | None] | None = None,
) -> Released:
    """The original of an envelope. A body that is no envelope goes to ``dead_topic``, with the reason as a property.

    ``refusal`` returns why the sink would refuse all messages of a topic, or None.
    """
    try:
        envelope, known = delivery(data, topics, max_bytes)
        if known is None:
            raise DecodeError("the envelope cancels another one")
        found, msg_id = known.properties, known.properties.get(codes.Property.UNIQ_KEY, "")
        if not 0 < len(msg_id) <= _MAX_NAME:
            msg_id = _digest(data)
        size = len(known.stored.encode())
        if size > _MAX_PROPERTIES - _SINKS_PROPERTIES:
            raise DecodeError(f"its properties have {size} bytes, and the sink adds its own")
        if refusal is not None and (why := refusal(envelope.topic)) is not None:
            raise DecodeError(why[:_REASON_CHARS])
    except DecodeError as e:
        return dead(data, e, dead_topic, max_bytes)
    return Released(
        envelope.topic,
        envelope.body,
        found.get(codes.Property.TAGS),
        found.get(codes.Property.KEYS),
        envelope.flag,
        found.get(codes.Property.SHARDING_KEY),
        {name: value for name, value in found.items() if not (_is_ours(name) or name == codes.ROW_ID)},
        msg_id,
    )


def dead(data: bytes, error: DecodeError, dead_topic: str, max_bytes: int = codes.MAX_BODY_BYTES) -> Released:
    """The row of a body that is not delivered."""
    body, properties = dead_letter(data, error, max_bytes)
    return Released(dead_topic, body, None, None, 0, None, properties, _digest(data))


def _digest(data: bytes) -> str:
    return digest(data).hex().upper()


def once(bodies: Iterable[bytes]) -> Iterator[bytes]:
    """Drops repeated envelopes (same due time and digest), and those that another one of them cancels."""
    found: dict[bytes, bytes] = {}
    cancelled = set()
    for body in bodies:
        if is_cancel(body):
            cancelled.add(identity_of(body))
        else:
            found.setdefault(identity_of(body), body)
    return (body for identity, body in found.items() if identity not in cancelled)


def is_cancel(data: bytes) -> bool:
    """Whether it is an envelope that cancels another one."""
    return _whole(data) and data[KIND_AT] == CANCEL


def identity_of(data: bytes) -> bytes:
    """The identity of an envelope; for other bodies a digest of the whole body."""
    return data[DUE_AT:DIGEST_END] if _whole(data) else digest(data)


def _whole(data: bytes) -> bool:
    return data.startswith(_BEGIN) and len(data) >= DIGEST_END
