"""The original that is sent when a delayed message is due, and a node's progress in a queue of envelopes. Pure.

For a node that takes over a queue, the group's offset alone is not enough: it stays at the oldest envelope whose original was
not sent, and many later ones may have been sent. So a node commits three numbers (``Progress``), as offsets of three groups
(``envelope_records``).
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
from rocketmq_spark.wire.envelope import (
    CANCEL,
    DIGEST_END,
    DUE_AT,
    KIND_AT,
    MAGIC,
    QUEUE,
    VERSION,
    Opened,
    digest,
    unpack,
)
from rocketmq_spark.wire.names import is_user_topic, topic_problem
from rocketmq_spark.wire.properties import decode_properties, encode_properties

_SEEN = struct.Struct(">6Q")
_EARLIER = struct.Struct(">5Q")  # of releases that did not write the last number


class Progress(NamedTuple):
    """All envelopes before offset ``oldest`` are done; of those before ``stored`` also all that were due by ``done_ms``."""

    oldest: int
    stored: int
    done_ms: int

    def done(self, offset: int, due_ms: int) -> bool:
        """Whether the original of an envelope was sent for sure. A moment of 0 says of none: what is no envelope is due at 0, and
        may wait then.
        """
        return offset < self.oldest or (offset < self.stored and due_ms <= self.done_ms and self.done_ms > 0)

    def then(self, later: Progress) -> Progress:
        """What is true after both. Envelopes that come late put ``done_ms`` back: then what was said before says more, unless
        all that it spoke of is done. A moment of a clock that was ahead would be kept for as long as it was.
        """
        oldest = max(self.oldest, later.oldest)
        newer = later.stored >= self.stored and (later.done_ms >= self.done_ms or oldest >= self.stored)
        stored, done_ms = (later if newer else self)[1:]
        return Progress(oldest, stored, done_ms)

    def cut(self, at: int) -> Progress:
        """What still holds when a broker's messages from ``at`` on are others than those that this speaks of."""
        return Progress(min(self.oldest, at), min(self.stored, at), self.done_ms)


class Seen(NamedTuple):
    """What a node wrote down of a queue: all from ``begin`` to before ``stored`` is in its store, or done; and what it committed.

    ``newest_ms`` is the latest store time of what it read: what a broker stored later than that lies at ``stored`` or behind.
    0 where nothing was read.
    """

    begin: int
    stored: int
    committed: Progress
    newest_ms: int = 0

    @property
    def read(self) -> tuple[int, int]:
        """Up to which offset, and the store time."""
        return self.stored, self.newest_ms

    def encode(self) -> bytes:
        return _SEEN.pack(self.begin, self.stored, *self.committed, self.newest_ms)

    def is_other(self, message: ReceivedMessage) -> bool:
        """Whether it lies where another one was read: the topic was made again."""
        return message.queue_offset < self.stored and 0 < self.newest_ms < message.store_timestamp

    def cut(self, at: int) -> Seen:
        """What still holds when a broker's messages from ``at`` on are others than those that were read."""
        return Seen(min(self.begin, at), at, self.committed.cut(at), self.newest_ms)

    @classmethod
    def decode(cls, data: bytes | None) -> Seen | None:
        """None where nothing is written, or what only another release reads: then the queue is read again."""
        if not data or len(data) not in (_EARLIER.size, _SEEN.size):
            return None
        layout = _EARLIER if len(data) == _EARLIER.size else _SEEN
        begin, stored, oldest, committed, done_ms, *newest_ms = layout.unpack(data)
        return cls(begin, stored, Progress(oldest, committed, done_ms), *newest_ms)


def note_of(queue: MessageQueue) -> bytes:
    """The name of the note that a ``Seen`` of the queue is."""
    return str(queue).encode()


def noted(notes: Mapping[bytes, bytes]) -> dict[MessageQueue, Seen]:
    """What is written down of queues."""
    found = {}
    for name, value in notes.items():
        if (seen := Seen.decode(value)) is not None:
            topic, _, rest = name.decode().partition("/")
            broker_name, _, number = rest.rpartition("/")  # a broker's name may have one, too
            found[MessageQueue(topic, broker_name, int(number))] = seen
    return found


def resumed(seen: Seen | None, committed: Progress | None, first: int) -> Seen:
    """Where a node begins with a queue that it gets: where it was, if it has all since the oldest that is not done; else there.

    ``committed`` is what the last node of the queue said, ``first`` the first offset that the broker keeps.
    """
    if committed is None:
        return seen or Seen(first, first, Progress(first, first, 0))
    if seen is not None and seen.begin <= committed.oldest <= seen.stored:
        return seen._replace(committed=committed)
    return Seen(committed.oldest, committed.oldest, committed)


_AHEAD_MS = 86_400_000  # of this machine's clock a broker's may be


def newest_before(offset: int, now_ms: int, search: Callable[[int], int]) -> int:
    """When the message before ``offset`` was stored; 0 where it is not found. ``search`` gives the first offset of a moment or
    later.
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


# Where bodies go that are no envelopes: they must neither stop the others nor get lost.
DEAD_TOPIC = "dmq_dead_topic"
EMPTY = b"(empty)"  # brokers take no empty body
PROBLEM = "delayProblem"
_BEGIN = MAGIC + bytes([VERSION])
_NOT_THE_USERS = codes.RESERVED_PROPERTIES | {QUEUE}
# What an original keeps of RocketMQ's own properties: the others would have a broker do what only its node may ask for.
_KEPT = {
    codes.Property.TAGS, codes.Property.KEYS, codes.Property.UNIQ_KEY, codes.Property.WAIT, codes.Property.SHARDING_KEY,
}  # fmt: skip
_DROPPED = _NOT_THE_USERS - _KEPT
_MAX_PROPERTIES = codes.MAX_PROPERTIES_BYTES - codes.BROKER_PROPERTIES_RESERVE
_MAX_QUEUE = 1_000_000
_REASON_CHARS = 500
ALL_TOPICS = ("*",)
SCHEMA = (
    "topic string, body binary, tags string, keys string, flag int, shardingKey string, "
    "properties map<string,string>, msgId string"
)


class Released(NamedTuple):
    """A row for the sink, in the order of ``SCHEMA``.

    ``msg_id`` is what the original's sender gave it, or a digest of the envelope: one that comes twice has the same.
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
    """The properties that the message of an envelope may keep, also as they are stored, and the queue that was chosen."""

    properties: dict[str, str]
    stored: str
    queue: MessageQueue | None


def original(opened: Opened, topics: Collection[str] = ALL_TOPICS) -> Original:
    """What of an envelope is delivered. Raises ``DecodeError`` for what no producer could have sent.

    Otherwise a writer of envelopes could have the node write to other topics: ``topics`` are patterns, as of a
    shell, of where it may; system topics, retries and dead letters of groups are never among them.
    """
    problem = _topic_refusal(opened.topic, tuple(topics))
    if problem is None and not opened.body:
        problem = "the message in the envelope has no body"
    found = decode_properties(opened.properties)
    kept, stored = found, opened.properties
    if not _DROPPED.isdisjoint(found) or not _are_stored_so(stored, found):
        kept, stored = {name: value for name, value in found.items() if name not in _DROPPED}, ""
    if problem is None and not stored:
        try:
            stored = encode_properties(kept, _MAX_PROPERTIES)
        except MessageRefused as e:
            problem = e.message
    if problem is not None:
        raise DecodeError(f"the message in this envelope is not delivered: {problem[:_REASON_CHARS]}")
    return Original(kept, stored, _chosen(opened.topic, found.get(QUEUE, "")))


def _are_stored_so(text: str, properties: Collection[str]) -> bool:
    """Whether ``text``, of which ``properties`` were read, is what they are encoded to, and short enough. If not sure, no."""
    pairs = len(properties)
    parted = text.count("\x01") == text.count("\x02") == pairs and text.endswith("\x02")
    return parted and text.isascii() and len(text) <= _MAX_PROPERTIES


@functools.lru_cache(1024)  # messages go to few topics
def _topic_refusal(topic: str, patterns: tuple[str, ...]) -> str | None:
    if (problem := topic_problem(topic)) is not None:
        return problem
    if not is_user_topic(topic):
        return f"topic {topic} takes no messages of users"
    if not any(fnmatchcase(topic, pattern) for pattern in patterns):
        return f"topic {topic} is none of those that messages may be delivered to: {', '.join(patterns)}"
    return None


def _chosen(topic: str, text: str) -> MessageQueue | None:
    """The queue that its sender chose; None for none, and for what is no queue."""
    broker_name, _, number = text.rpartition(":")
    if broker_name and number.isascii() and number.isdecimal() and len(number) < 10 and int(number) < _MAX_QUEUE:
        return MessageQueue(topic, broker_name, int(number))
    return None


def reason(error: DecodeError) -> dict[str, str]:
    """The property of a dead letter that says why it is one."""
    return {PROBLEM: str(error).replace("\x01", "?").replace("\x02", "?")[: 2 * _REASON_CHARS]}


def released(data: bytes, dead_topic: str = DEAD_TOPIC, topics: Collection[str] = ALL_TOPICS) -> Released:
    """The original of an envelope; what is none goes as it is to ``dead_topic``, with the reason as a property."""
    try:
        envelope = unpack(data)
        found = original(envelope, topics).properties
    except DecodeError as e:
        return Released(dead_topic, data or EMPTY, None, None, 0, None, reason(e), _digest(data))
    return Released(
        envelope.topic,
        envelope.body,
        found.get(codes.Property.TAGS),
        found.get(codes.Property.KEYS),
        envelope.flag,
        found.get(codes.Property.SHARDING_KEY),
        {name: value for name, value in found.items() if name not in _NOT_THE_USERS},
        found.get(codes.Property.UNIQ_KEY) or _digest(data),
    )


def _digest(data: bytes) -> str:
    return digest(data).hex().upper()


def once(bodies: Iterable[bytes]) -> Iterator[bytes]:
    """Each message once, and none that one of them takes back. One that was sent again has the same due time and digest."""
    found: dict[bytes, bytes] = {}
    cancelled = set()
    for body in bodies:
        if is_cancel(body):
            cancelled.add(_identity(body))
        else:
            found.setdefault(_identity(body), body)
    return (body for identity, body in found.items() if identity not in cancelled)


def is_cancel(data: bytes) -> bool:
    """Whether it takes another envelope back."""
    return _whole(data) and data[KIND_AT] == CANCEL


def _identity(data: bytes) -> bytes:
    """Of what is no envelope all of it."""
    return data[DUE_AT:DIGEST_END] if _whole(data) else data


def _whole(data: bytes) -> bool:
    return data.startswith(_BEGIN) and len(data) >= DIGEST_END
