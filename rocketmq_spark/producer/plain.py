"""Plain messages of automatic batches: one tuple each. They are encoded together when their batch is sent. Pure.

A plain message is for any queue, without delay and priority, of a topic whose batches are not stored whole. The checks are those
of ``encoding.prepare``. A message that is not plain, or that every broker would reject, goes there, which reports the error.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence, Sized
from typing import Any, NamedTuple

from rocketmq_spark.base import codes
from rocketmq_spark.base.codes import Property
from rocketmq_spark.errors import MessageRefused
from rocketmq_spark.model import Message
from rocketmq_spark.model.send import MessageEncoder
from rocketmq_spark.producer.accumulator import BatchEntry, BatchKey, MessageBatch
from rocketmq_spark.producer.encoding import check_topic
from rocketmq_spark.wire.names import Scope
from rocketmq_spark.wire.properties import encode_properties


class PlainTemplate(NamedTuple):
    """The common part of the plain messages of a topic and tag: the text of their properties, and the bytes that one adds to a
    batch besides its body. ``room`` is the number of bytes left for more properties.
    """

    key: BatchKey
    text: str
    size: int
    room: int


_SAMPLE_ID = "0" * 32
_BLANK, _KEYS, _ID = codes.KEY_SEPARATOR, f"{Property.KEYS}\x01", f"{Property.UNIQ_KEY}\x01"
_STR = {str}  # ``encoding.prepare`` handles other types, such as None
_RESERVED, _TRANSIENT = codes.RESERVED_PROPERTIES, codes.TRANSIENT_PROPERTY_PREFIX


def plain_template(
    topic: Any, tag: Any, waits: Any, encoder: MessageEncoder, scope: Scope | None = None
) -> PlainTemplate | None:
    """None for messages that are sent separately, or that every broker would reject."""
    if not isinstance(topic, str) or not isinstance(tag, str | None) or not isinstance(waits, bool):
        return None
    if topic.startswith(codes.RETRY_PREFIX):
        return None
    try:
        check_topic(topic, scope)
        text = encode_properties({Property.TAGS: tag or None, Property.WAIT: "true" if waits else "false"})
        whole = encode_properties({Property.UNIQ_KEY: _SAMPLE_ID}) + text
        size = len(encoder.item(topic, b"", whole, 0, 0))
    except MessageRefused:
        return None
    room = codes.SINGLE_MAX_PROPERTIES - len(whole.encode())
    return None if room < 0 else PlainTemplate(BatchKey(topic, None, waits, tag or None, False), text, size, room)


def encode_plain_properties(message: Message, kind: PlainTemplate) -> tuple[str, int] | None:
    """The text of all properties but the id, and the bytes that it adds to that of its kind. None if the message is not plain."""
    flag, keys, own = message.flag, message.keys, message.properties
    if message.priority is not None or type(flag) is not int or not -(2**31) <= flag < 2**31:
        return None
    more = ""
    try:
        if keys:
            words = _BLANK.join(keys)
            if words.count(_BLANK) >= len(keys):
                return None
            more = f"{_KEYS}{words}\x02"
        if own:
            values = own.values()
            if (
                not ({*map(type, own), *map(type, values)} <= _STR)
                or "" in own
                or "" in values
                or not _RESERVED.isdisjoint(own)
            ):
                return None
            more += "".join([f"{name}\x01{value}\x02" for name, value in own.items()])
        size = len(more) if more.isascii() else len(more.encode())
    except (TypeError, AttributeError, UnicodeEncodeError):
        return None
    pairs = bool(keys) + (len(own) if own else 0)
    whole = more.count("\x01") == pairs == more.count("\x02") and _TRANSIENT not in more
    return (more + kind.text, size) if whole and size <= kind.room else None


def encode_batch_messages(
    batch: MessageBatch, take: Callable[[int], Sequence[str]], encoder: MessageEncoder, now_ms: int
) -> None:
    """Create the ids of the plain messages of a batch, and encode them, when the batch is sent."""
    if not batch.has_plain:
        return
    topic, item = batch.key.topic, encoder.item
    sealed: list[Sized] = []
    for entry, msg_id in zip(batch.entries, take(len(batch.entries)), strict=True):
        if isinstance(entry, BatchEntry):
            sealed.append(entry.item)
            continue
        entry.msg_id = msg_id
        sealed.append(item(topic, entry.body, f"{entry.text}{_ID}{msg_id}\x02", entry.flag, now_ms))
        entry.body, entry.text = b"", ""  # a kept future must not keep them
    batch.encoded_items, batch.has_plain = sealed, False
