"""Records of the message trace, as Java's ``TraceDataEncoder`` writes and RocketMQ's tools read them. Pure.

The body of a trace message contains any number of records. The keys of a trace message are the ids and keys of the traced
messages, so that tools find the trace message by an id or a key of a traced message.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from rocketmq_spark.base.codes import KEY_SEPARATOR, Property

_FIELD_SEPARATOR, _RECORD_SEPARATOR = "\x01", "\x02"
_SEPARATORS = re.compile(f"[{_FIELD_SEPARATOR}{_RECORD_SEPARATOR}]")
_NULL = "null"
DEFAULT_REGION = "DefaultRegion"

# Limits of one trace message. The limits are large because a query for traces returns at most 64 messages. Brokers accept 32 KB
# of keys.
MAX_RECORDS, MAX_CHARACTERS, MAX_KEY_BYTES = 100, 100_000, 24_000


class TraceRecord(NamedTuple):
    """One record, and the keys by which tools find it; the first key is the message id."""

    text: str
    keys: tuple[str, ...]


class TracedMessage(NamedTuple):
    """The data of a message that its trace records contain."""

    topic: str
    msg_id: str
    tags: str | None
    keys: str | None
    region: str

    @classmethod
    def from_properties(cls, topic: str, properties: Mapping[str, str], region: str | None = None) -> TracedMessage:
        """The data of a message from its properties. A message of a batch has no region, so pass the region of the batch."""

        def get(name: str, default: str | None = None) -> str | None:
            # An id or key of another client may contain a separator, which would damage other records.
            value = properties.get(name, default)
            return value and _SEPARATORS.sub("?", value)

        region = region or get(Property.MSG_REGION) or DEFAULT_REGION
        return cls(topic, get(Property.UNIQ_KEY) or "", get(Property.TAGS), get(Property.KEYS), region)

    def record(self, *fields: object) -> TraceRecord:
        # Ids of other clients may have any text.
        search_keys = f"{self.msg_id}{KEY_SEPARATOR}{self.keys or ''}".split(KEY_SEPARATOR)
        text = _FIELD_SEPARATOR.join(_text(field) for field in fields) + _RECORD_SEPARATOR
        return TraceRecord(text, tuple(key for key in search_keys if key))


class MessageKind(enum.IntEnum):
    """Kinds of messages; the numbers are those of Java's ``MessageType``."""

    NORMAL = 0
    HALF = 1
    COMMIT = 2
    DELAY = 3

    @classmethod
    def of(cls, properties: Mapping[str, str]) -> MessageKind:
        """The kind of a message that is sent, by its properties."""
        if properties.get(Property.TRANSACTION_PREPARED) == "true":
            return cls.HALF
        return cls.DELAY if _DELAY_PROPERTIES & properties.keys() else cls.NORMAL


_DELAY_PROPERTIES = frozenset(
    (Property.DELAY, Property.TIMER_DELIVER_MS, Property.TIMER_DELAY_MS, Property.TIMER_DELAY_SEC)
)


class ConsumeReturn(enum.IntEnum):
    """Results of listeners; the numbers are those of Java's ``ConsumeReturnType``."""

    SUCCESS = 0
    TIME_OUT = 1
    EXCEPTION = 2
    FAILED = 4


class Acknowledgement(NamedTuple):
    """A stored message: its size and kind, and the broker's answer."""

    body_bytes: int
    kind: MessageKind
    host: str
    offset_msg_id: str | None
    ok: bool


def publish_record(
    message: TracedMessage, group: str, started_ms: int, cost_ms: int, acknowledgement: Acknowledgement
) -> TraceRecord:
    """The record of a message that a broker has stored."""
    return message.record(
        "Pub", started_ms, message.region, group, message.topic, message.msg_id, message.tags, message.keys,
        acknowledgement.host, acknowledgement.body_bytes, cost_ms, acknowledgement.kind.value,
        acknowledgement.offset_msg_id, acknowledgement.ok,
    )  # fmt: skip


def consume_start_record(message: TracedMessage, group: str, request_id: str, now_ms: int, attempt: int) -> TraceRecord:
    """The record of a message before its listener is called; ``attempt`` counts from 0."""
    return message.record("SubBefore", now_ms, message.region, group, request_id, message.msg_id, attempt, message.keys)


def consume_end_record(
    message: TracedMessage, group: str, request_id: str, now_ms: int, cost_ms: int, result: ConsumeReturn
) -> TraceRecord:
    """The record of a message after its listener has returned."""
    has_succeeded = result is ConsumeReturn.SUCCESS
    return message.record(
        "SubAfter", request_id, message.msg_id, cost_ms, has_succeeded, message.keys, result.value, now_ms, group
    )  # fmt: skip


def transaction_end_record(
    message: TracedMessage, group: str, now_ms: int, transaction_id: str, state: str, from_check: bool
) -> TraceRecord:
    """The record of a decision on a half message; ``state`` is a name of Java's ``LocalTransactionState``."""
    return message.record(
        "EndTransaction", now_ms, message.region, group, message.topic, message.msg_id, message.tags, message.keys, "",
        MessageKind.COMMIT.value, transaction_id, state, from_check,
    )  # fmt: skip


def recall_record(message: TracedMessage, group: str, now_ms: int, has_succeeded: bool) -> TraceRecord:
    """The record of an attempt to cancel a delayed message."""
    return message.record("Recall", now_ms, message.region, group, message.topic, message.msg_id, has_succeeded)


def trace_messages(records: Iterable[TraceRecord]) -> Iterator[tuple[str, Sequence[str], int]]:
    """The trace messages for ``records``: body, keys, and number of records of each."""
    texts: list[str] = []
    keys: dict[str, None] = {}
    size = key_bytes = 0
    for record in records:
        new_keys = [key for key in _limited_keys(record.keys) if key not in keys]
        new_key_bytes = sum(len(key.encode()) + 1 for key in new_keys)
        if texts and (
            len(texts) == MAX_RECORDS
            or size + len(record.text) > MAX_CHARACTERS
            or key_bytes + new_key_bytes > MAX_KEY_BYTES
        ):
            yield "".join(texts), tuple(keys), len(texts)
            texts, keys, size, key_bytes, new_keys = [], {}, 0, 0, list(_limited_keys(record.keys))
            new_key_bytes = sum(len(key.encode()) + 1 for key in new_keys)
        texts.append(record.text)
        keys.update(dict.fromkeys(new_keys))
        size += len(record.text)
        key_bytes += new_key_bytes
    if texts:
        yield "".join(texts), tuple(keys), len(texts)


def _limited_keys(keys: Sequence[str]) -> Iterator[str]:
    """The message id, and the first keys, up to the limit of a trace message."""
    bytes_left = MAX_KEY_BYTES
    for key in dict.fromkeys(keys):
        bytes_left -= len(key.encode()) + 1
        if bytes_left < 0:
            return
        yield key


def _text(field: object) -> str:
    if field is None:
        return _NULL
    return str(field).lower() if isinstance(field, bool) else str(field)
