"""Stored messages and batches as objects, for consumers, single look-ups, and messages that the columnar decoder cannot decode.

Java's decoder silently drops the rest of an answer at the first bad message. Here every bad message raises
``DecodeError`` with its position, and ``boundaries`` lets a caller skip it. The layout is that of Java's ``MessageDecoder`` and
``MessageExtEncoder``.
"""

from __future__ import annotations

import contextlib
import itertools
import re
import struct
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import NamedTuple

from rocketmq_spark.base.budget import MESSAGE_OVERHEAD_BYTES, estimated_memory
from rocketmq_spark.base.codes import INNER_BATCH_MASK, MESSAGE_MAGIC_V1, MESSAGE_MAGIC_V2, Property, SysFlag
from rocketmq_spark.errors import DecodeError, MessageRefused, RemoteProtocolError
from rocketmq_spark.model import MessageQueue, ReceivedMessage
from rocketmq_spark.model.pull import OffsetWindow
from rocketmq_spark.wire.compression import MAX_DECOMPRESSED_BYTES, TooLargeError, decompress
from rocketmq_spark.wire.header import Bytes
from rocketmq_spark.wire.identifiers import host_text, offset_msg_id
from rocketmq_spark.wire.properties import StoredProperties, inner_base_and_count, properties_size

_HEAD = struct.Struct(">iIIiiqqiq")  # size, magic, body CRC, queue id, flag, queue offset, commit log offset, sys, born
_SYS_FLAG_AT = 39  # last byte of the system flag
_SIZE_OFFSET_FLAG = struct.Struct(">i16xq8xi")  # size, queue offset and system flag out of the head
_V6 = SysFlag.BORNHOST_V6 | SysFlag.STOREHOST_V6
# The head, then born host, store time, store host, reconsume times, prepared transaction offset, body length.
_FIXED_FIELDS = {
    0: struct.Struct(_HEAD.format + "4siq4siiqi"),
    int(SysFlag.BORNHOST_V6): struct.Struct(_HEAD.format + "16siq4siiqi"),
    int(SysFlag.STOREHOST_V6): struct.Struct(_HEAD.format + "4siq16siiqi"),
    int(_V6): struct.Struct(_HEAD.format + "16siq16siiqi"),
}
_MAGIC = re.compile(b"|".join(re.escape(n.to_bytes(4, "big")) for n in (MESSAGE_MAGIC_V1, MESSAGE_MAGIC_V2)))
_SHORT = struct.Struct(">h")
_LENGTH = struct.Struct(
    ">H"
)  # length of a topic or of properties; lengths above a signed short are decoded, but never encoded
_INT = struct.Struct(">i")
_MIN_MESSAGE_BYTES = _FIXED_FIELDS[0].size + 1 + _SHORT.size

# These flags are plain numbers, because arithmetic with members of an enumeration takes a microsecond.
_V6_BITS, _COMPRESSED = int(_V6), int(SysFlag.COMPRESSED)
_INNER_BATCH = int(INNER_BATCH_MASK)
_ITEM = struct.Struct(">iiiii")  # size, magic and CRC (not read), flag, body length
_MIN_ITEM_BYTES = _ITEM.size + _SHORT.size
# A few compressed kilobytes may become gigabytes. So this is the maximum memory, objects included, for the messages of an answer
# that are decoded at once.
PORTION_BYTES = 64 << 20
# If a batch has more than ``_LARGE_BATCH_BYTES`` bytes, its messages are decoded when they are used.
_LARGE_BATCH_BYTES = 1 << 20


class BatchItem(NamedTuple):
    """One message of a batch; ``properties`` is its encoded property string."""

    body: Bytes
    properties: str = ""
    flag: int = 0


# Start and end of a stored message, its queue offset, and whether it is an inner batch. The queue offset is None if the size of
# the message does not fit the answer.
MessageBounds = tuple[int, int, int | None, bool]


class DecodeSettings(NamedTuple):
    """How to decode messages. With ``queue``, all messages get this queue and its topic, whatever is stored in the messages. A
    batch with offsets outside of ``window`` counts as damaged. Without ``max_body_bytes``, compressed bodies stay compressed.
    Messages that exceed ``budget`` are not decoded.
    """

    broker_name: str
    check_crc: bool = False
    max_body_bytes: int | None = MAX_DECOMPRESSED_BYTES
    queue: MessageQueue | None = None
    window: OffsetWindow | None = None
    budget: DecodeBudget | None = None
    is_budget_limit: bool = False  # whether ``max_body_bytes`` is the rest of a memory budget


def message_memory(message: ReceivedMessage) -> int:
    """The approximate memory of a decoded message in bytes: its body, its properties as objects, and its other objects.

    A few kilobytes from another client may become a body of 64 MiB, or millions of messages without a body. So code that collects
    decoded messages counts their memory.
    """
    return estimated_memory(len(message.body), properties_size(message.properties))


NO_MEMORY = "the messages that are held fill their memory limit, so this message is returned as it is stored"
BODY_OMITTED = "the messages that are held fill their memory limit, so the body of this message is omitted"


class DecodeBudget:
    """Memory for decoded messages, ``limit`` bytes as ``message_memory`` counts them. Not thread-safe."""

    def __init__(self, limit: int) -> None:
        self.remaining_bytes = limit

    def decode(self, data: bytes, bounds: MessageBounds, settings: DecodeSettings) -> Iterable[ReceivedMessage]:
        """The messages at ``bounds``, if they fit into the remaining memory; otherwise one message that is not decoded, with
        ``NO_MEMORY`` as its ``decode_error``.
        """
        remaining_bytes = max(0, self.remaining_bytes)
        limit = settings.max_body_bytes
        settings = settings._replace(
            budget=None,
            max_body_bytes=None if limit is None else min(limit, remaining_bytes),
            is_budget_limit=limit is not None and remaining_bytes < limit,
        )
        messages: list[ReceivedMessage] = []
        used_bytes = 0
        for message in decode_one(data, bounds, settings):
            messages.append(message)
            used_bytes += message_memory(message)
            if used_bytes > remaining_bytes and len(messages) > 1:  # a batch, whose items are decoded one by one
                messages = [_undecodable_message(data[bounds[0] : bounds[1]], True, DecodeError(NO_MEMORY), settings)]
                break
        self.remaining_bytes -= sum(map(message_memory, messages))
        return messages

    def decompress(self, message: ReceivedMessage) -> ReceivedMessage:
        """Decompresses a message. If the remaining memory is too small, the message keeps its compressed body, or loses its
        body.
        """
        message = decompressed(message, max(0, self.remaining_bytes))
        if message_memory(message) > self.remaining_bytes and message.decode_error is None:
            message = replace(message, body=b"", decode_error=BODY_OMITTED)
        self.remaining_bytes -= message_memory(message)
        return message


class UnwrapBudget(DecodeBudget):
    """Memory for the next messages of several queues. Single messages stay compressed. Batches are unwrapped, and a batch uses
    memory until its last message was returned.
    """

    def decode(self, data: bytes, bounds: MessageBounds, settings: DecodeSettings) -> Iterable[ReceivedMessage]:
        *_, is_batch = bounds
        if not is_batch:
            return decode_one(data, bounds, settings._replace(budget=None, max_body_bytes=None))
        return self._unwrapped_messages(data, bounds, settings)

    def _unwrapped_messages(
        self, data: bytes, bounds: MessageBounds, settings: DecodeSettings
    ) -> Iterator[ReceivedMessage]:
        remaining_before = self.remaining_bytes
        messages = super().decode(data, bounds, settings)
        used_bytes = remaining_before - self.remaining_bytes
        try:
            yield from messages
        finally:
            self.remaining_bytes += used_bytes


def decompressed(message: ReceivedMessage, max_bytes: int = MAX_DECOMPRESSED_BYTES) -> ReceivedMessage:
    """Decompresses the body of a message that was decoded with its compressed body."""
    if not message.sys_flag & _COMPRESSED or message.decode_error is not None:
        return message
    try:
        body = decompress(message.body, message.sys_flag, min(max_bytes, MAX_DECOMPRESSED_BYTES))
    except DecodeError as e:
        exceeds_budget = max_bytes < MAX_DECOMPRESSED_BYTES and isinstance(e, TooLargeError)
        return replace(message, decode_error=NO_MEMORY if exceeds_budget else e.message)
    return replace(message, body=body, sys_flag=message.sys_flag & ~_COMPRESSED)


def boundaries(body: Bytes) -> Iterator[tuple[int, int]]:
    """Start and end of each message in an answer, by their sizes only. Raises ``DecodeError`` if a size does not fit."""
    start = 0
    while start < len(body):
        size = _INT.unpack_from(body, start)[0] if len(body) - start >= _INT.size else 0
        if not _MIN_MESSAGE_BYTES <= size <= len(body) - start:
            raise DecodeError(f"A message of {size} bytes at byte {start} does not fit an answer of {len(body)} bytes")
        yield start, start + size
        start += size


class Stamp(NamedTuple):
    """Where and when a message was stored, and whether it is an inner batch. The ``offset`` of a batch is that of its first
    message.
    """

    offset: int
    stored_ms: int
    is_inner_batch: bool


def first_stamp(body: Bytes) -> Stamp | None:
    """The stamp of an answer's first message, even if that message cannot be decoded. None if the answer has no message."""
    if len(body) < _MIN_MESSAGE_BYTES:
        return None
    magic, sys_flag = _HEAD.unpack_from(body)[1], body[_SYS_FLAG_AT]
    fixed_fields = _FIXED_FIELDS[sys_flag & _V6_BITS]
    if magic not in (MESSAGE_MAGIC_V1, MESSAGE_MAGIC_V2) or len(body) < fixed_fields.size:
        return None
    fields = fixed_fields.unpack_from(body)
    return Stamp(fields[5], fields[11], bool(fields[7] & SysFlag.INNER_BATCH))


def decode_messages(
    body: Bytes, broker_name: str = "", check_crc: bool = False, max_body_bytes: int = MAX_DECOMPRESSED_BYTES
) -> list[ReceivedMessage]:
    """All messages of an answer, decompressed, inner batches unwrapped."""
    settings = DecodeSettings(broker_name, check_crc, max_body_bytes)
    return [message for start, end in boundaries(body) for message in decode_at(body, start, end, settings)]


def single_message(body: Bytes, broker_name: str, purpose: str, address: str | None = None) -> ReceivedMessage:
    """The only message that a server pushes in a request. The body of the message stays compressed.

    Raises ``RemoteProtocolError`` for several messages or a batch, before anything is decompressed.
    """
    settings = DecodeSettings(broker_name, max_body_bytes=None)
    bounds = list(itertools.islice(boundaries(body), 2))
    if len(bounds) != 1:
        problem = "more than one message" if bounds else "no message"
        raise RemoteProtocolError(f"{problem} came {purpose}, expected 1", address)
    data = bytes(body)
    stamp = first_stamp(data)
    if stamp is not None and stamp.is_inner_batch:
        raise RemoteProtocolError(f"a batch came {purpose}, expected one message", address)
    (message,) = decode_at(data, 0, len(data), settings)
    return message


def decode_at(body: Bytes, start: int, end: int, settings: DecodeSettings) -> list[ReceivedMessage]:
    """The messages between two ``boundaries``: one message, or the messages of an inner batch."""
    data = bytes(memoryview(body)[start:end])
    try:
        return list(_decode_and_unwrap(data, 0, len(data), settings))
    except DecodeError as exc:
        raise DecodeError(
            f"The message at byte {start} of an answer: {exc.message}", queue=_position_text(data, settings.broker_name)
        ) from exc


def decode_leniently(
    body: Bytes,
    broker_name: str = "",
    max_body_bytes: int | None = MAX_DECOMPRESSED_BYTES,
    queue: MessageQueue | None = None,
    window: OffsetWindow | None = None,
    budget: DecodeBudget | None = None,
) -> Iterator[ReceivedMessage]:
    """Decodes messages one by one; a message that cannot be decoded is returned raw, with the reason as its ``decode_error``.

    With ``queue``, all messages get this queue and its topic, whatever is stored in the messages. An inner batch with offsets
    outside of ``window``, or a message that exceeds ``budget``, counts as a message that cannot be decoded.
    """
    data, settings = bytes(body), DecodeSettings(broker_name, False, max_body_bytes, queue, window, budget)
    for bounds in find_messages(data):
        yield from decode_one(data, bounds, settings)


def decode_one(data: bytes, bounds: MessageBounds, settings: DecodeSettings) -> Iterable[ReceivedMessage]:
    """Like ``decode_leniently``, for one result of ``find_messages``, which may be an inner batch."""
    if settings.budget is not None:
        return settings.budget.decode(data, bounds, settings)
    begin, end, offset, _ = bounds
    try:
        if offset is None:
            raise DecodeError("the size of a message does not fit its answer")
        return _decode_and_unwrap(data, begin, end, settings)
    except DecodeError as exc:
        if settings.is_budget_limit and isinstance(exc, TooLargeError):
            exc = DecodeError(NO_MEMORY)
        return [_undecodable_message(data[begin:end], offset is not None, exc, settings)]


def find_messages(data: bytes) -> list[MessageBounds]:
    """The positions of all messages in an answer, including damaged ones and inner batches."""
    all_bounds: list[MessageBounds] = []
    start, data_length, unpack_head = 0, len(data), _SIZE_OFFSET_FLAG.unpack_from
    while start < data_length:
        size, offset, sys_flag = unpack_head(data, start) if data_length - start >= _MIN_MESSAGE_BYTES else (0, 0, 0)
        if _MIN_MESSAGE_BYTES <= size <= data_length - start:
            all_bounds.append((start, start + size, offset, sys_flag & _INNER_BATCH == _INNER_BATCH))
            start += size
        else:
            end = _next_message(data, start)
            all_bounds.append((start, end, None, False))
            start = end
    return all_bounds


def first_portion(messages: Iterable[ReceivedMessage]) -> tuple[list[ReceivedMessage], ReceivedMessage | None]:
    """Return the first messages, up to ``PORTION_BYTES`` bytes but at least one message, and the next message; None without a
    next message.
    """
    if (
        isinstance(messages, list)
        and MESSAGE_OVERHEAD_BYTES * len(messages) + sum([len(m.body) for m in messages]) < PORTION_BYTES
    ):
        return messages, None
    portion: list[ReceivedMessage] = []
    bytes_left, remaining_messages = PORTION_BYTES, iter(messages)
    for message in remaining_messages:
        portion.append(message)
        bytes_left -= message_memory(message)
        if bytes_left <= 0:
            return portion, next(remaining_messages, None)
    return portion, None


def _next_message(data: bytes, bad_start: int) -> int:
    """The position of the next message after a message with a wrong size: the first position from which the sizes of messages
    lead to the end of the data.
    """
    dead_ends: set[int] = set()  # positions from which the sizes do not lead to the end
    for match in _MAGIC.finditer(data, bad_start + _INT.size + 1):
        visited_starts = []
        start = end = match.start() - _INT.size
        while end < len(data) and end not in dead_ends:
            visited_starts.append(end)
            size = _INT.unpack_from(data, end)[0] if len(data) - end >= _INT.size else 0
            end += size if size >= _MIN_MESSAGE_BYTES else len(data)
        if end == len(data):
            return start
        dead_ends.update(visited_starts)
    return len(data)


class _OutsideWindowError(DecodeError):
    """The offsets of an inner batch are outside of the window."""


def _undecodable_message(
    data: bytes, has_valid_size: bool, error: DecodeError, settings: DecodeSettings
) -> ReceivedMessage:
    """A bad message with its readable fields. Its body is the stored body, or the whole message if its parts do not fit."""
    reason = error.message
    with contextlib.suppress(struct.error, DecodeError):
        if has_valid_size:
            message = _decode(data, 0, len(data), settings._replace(max_body_bytes=None))
            has_plausible_offset = not isinstance(error, _OutsideWindowError) and _has_possible_offset(
                message, settings.window
            )
            return replace(
                message, queue_offset=message.queue_offset if has_plausible_offset else -1, decode_error=reason
            )
    head = _HEAD.unpack_from(data) if has_valid_size else (0, 0, 0, -1, 0, -1, 0, 0, 0)
    _, _, _, queue_id, flag, queue_offset, log_offset, sys_flag, born_ms = head
    return ReceivedMessage(
        topic=settings.queue.topic if settings.queue else "",
        queue=settings.queue or MessageQueue("", settings.broker_name, queue_id),
        queue_offset=queue_offset,
        commit_log_offset=log_offset,
        body=data,
        properties={},
        flag=flag,
        sys_flag=sys_flag,
        born_timestamp=born_ms,
        store_timestamp=0,
        born_host="",
        store_host="",
        reconsume_times=0,
        prepared_transaction_offset=0,
        store_size=len(data),
        offset_msg_id="",
        decode_error=reason,
    )


def _decode_and_unwrap(data: bytes, start: int, end: int, settings: DecodeSettings) -> Iterable[ReceivedMessage]:
    """One message, or the messages of an inner batch. Raises ``DecodeError``."""
    if end - start < _MIN_MESSAGE_BYTES:
        raise DecodeError(f"{end - start} bytes are fewer than a message has")
    try:
        message = _decode(data, start, end, settings)
    except struct.error as exc:
        raise DecodeError(str(exc)) from exc
    return _unwrap(message, settings) if message.sys_flag & _INNER_BATCH == _INNER_BATCH else [message]


def _decode(data: bytes, start: int, end: int, settings: DecodeSettings) -> ReceivedMessage:
    """The message in ``data[start:end]``, which has at least the size of the shortest message."""
    fixed_fields = _FIXED_FIELDS[data[start + _SYS_FLAG_AT] & _V6_BITS]
    (
        size, magic, crc, queue_id, flag, queue_offset, log_offset, sys_flag, born_ms,
        born_ip, born_port, store_ms, store_ip, store_port, reconsume_times, prepared_offset, length,
    ) = fixed_fields.unpack_from(data, start)  # fmt: skip
    body_at = start + fixed_fields.size
    body_end = body_at + length
    if length < 0 or body_end >= end:
        raise DecodeError(f"a body of {length} bytes does not fit a message of {end - start} bytes")
    if magic == MESSAGE_MAGIC_V1:
        topic_at = body_end + 1
        topic_end = topic_at + data[topic_at - 1]
    elif magic == MESSAGE_MAGIC_V2:
        topic_at = body_end + 2
        topic_end = topic_at + _LENGTH.unpack_from(data, body_end)[0]
    else:
        raise DecodeError(f"unknown magic {magic:#010x}")
    properties_at = topic_end + 2
    # If the parts are in order and end where the message ends, all of them are inside it.
    has_valid_order = size == end - start and topic_at <= topic_end and properties_at <= end
    if not has_valid_order or properties_at + _LENGTH.unpack_from(data, topic_end)[0] != end:
        raise DecodeError(
            f"the message is damaged: its size field says {size} bytes, it has {end - start}, and its parts do not end there"
        )
    body = data[body_at:body_end]
    if settings.check_crc and body_crc(body) != crc:
        raise DecodeError("its body does not match its CRC")
    queue = settings.queue or MessageQueue(_text(data[topic_at:topic_end]), settings.broker_name, queue_id)
    if sys_flag & _COMPRESSED and body and settings.max_body_bytes is not None:
        body = decompress(body, sys_flag, settings.max_body_bytes)
        sys_flag &= ~_COMPRESSED
    return ReceivedMessage(
        queue.topic, queue, queue_offset, log_offset, body, StoredProperties(data[properties_at:end]), flag, sys_flag,
        born_ms, store_ms, host_text(born_ip, born_port), host_text(store_ip, store_port), reconsume_times, prepared_offset, size,
        offset_msg_id(store_ip, store_port, log_offset),
    )  # fmt: skip


def _has_possible_offset(message: ReceivedMessage, window: OffsetWindow | None) -> bool:
    """Whether a stored message can have its offset. The offset of an inner batch must be inside ``window``; a single message
    can have any offset.
    """
    is_inside = window is None or window.start <= message.queue_offset < window.end
    return is_inside or message.sys_flag & _INNER_BATCH != _INNER_BATCH


def _unwrap(outer_message: ReceivedMessage, settings: DecodeSettings) -> Iterable[ReceivedMessage]:
    """The messages of an inner batch. All messages are checked before the first one is returned."""
    window = settings.window
    if len(outer_message.body) <= _LARGE_BATCH_BYTES:
        items = decode_batch(outer_message.body)
        messages: Iterable[ReceivedMessage] = list(_unwrapped_items(outer_message, items))
        first_offset, item_count = outer_message.queue_offset, len(items)
    else:
        first_offset, item_count = outer_message.queue_offset, sum(1 for _ in _item_positions(outer_message.body))
        messages = _unwrapped_items(outer_message, _items(outer_message.body))
    assert isinstance(outer_message.properties, StoredProperties)
    stored_base, stored_count = inner_base_and_count(outer_message.properties.stored)
    # A broker counts messages by their sizes, and a reader counts them by their parts. If a sender made these counts differ,
    # some messages would get offsets that belong to the next batches.
    if stored_count not in (None, item_count):
        raise DecodeError(f"a batch has {item_count} messages, but its broker counted {stored_count}")
    has_wrong_base = stored_base not in (None, first_offset)
    if window is not None and item_count and (has_wrong_base or not window.may_contain(first_offset, item_count)):
        raise _OutsideWindowError(
            f"a batch of offsets {first_offset} to {first_offset + item_count} is outside of the requested offsets"
        )
    return messages


def _unwrapped_items(outer_message: ReceivedMessage, items: Iterable[BatchItem]) -> Iterator[ReceivedMessage]:
    for i, item in enumerate(items):
        yield replace(
            outer_message,
            queue_offset=outer_message.queue_offset + i,
            flag=item.flag,
            body=bytes(item.body),
            properties=StoredProperties(item.properties.encode()),
        )


def _text(data: Bytes) -> str:
    # As in Java: readers must not fail because a producer in another language used another encoding.
    return str(data, "utf-8", "replace")


def _position_text(data: bytes, broker_name: str) -> str | None:
    if len(data) < _HEAD.size:
        return None
    fields = _HEAD.unpack_from(data)
    return f"{broker_name}/{fields[3]} offset {fields[5]}"


def body_crc(stored_body: Bytes) -> int:
    """The CRC of a body as it is stored. A compressed body has the CRC of its compressed bytes."""
    return zlib.crc32(stored_body) & 0x7FFFFFFF


def crc_property(crc: int) -> str:
    """The value of the CRC property that brokers may append: ten digits, the least significant first."""
    return f"{Property.CRC32}\x01{f'{crc:010d}'[::-1]}\x02"


def encode_batch(items: Iterable[BatchItem]) -> bytes:
    """Body of SEND_BATCH_MESSAGE. The broker stores the property strings unchanged."""
    parts: list[bytes] = []
    for body, property_string, flag in items:
        try:
            parts.append(encode_item(body, property_string, flag))
        except MessageRefused as e:
            raise MessageRefused(f"Message {len(parts)} of a batch: {e.message}") from e.__cause__
    return b"".join(parts)


def encode_item(body: Bytes, property_string: str, flag: int) -> bytes:
    """One message of a body of SEND_BATCH_MESSAGE, with its encoded property string."""
    try:
        properties = property_string.encode()
        size = _MIN_ITEM_BYTES + len(body) + len(properties)
        return b"".join((_ITEM.pack(size, 0, 0, flag, len(body)), body, _SHORT.pack(len(properties)), properties))
    except (struct.error, UnicodeEncodeError) as exc:
        raise MessageRefused(f"The message does not fit the layout of a batch: {exc}") from exc


def _part_end(start: int, length: int, batch_bytes: int) -> int:
    """The end of a part that begins at ``start``. Raises ``DecodeError`` if the end is not within ``batch_bytes``."""
    if length < 0 or start + length > batch_bytes:
        raise DecodeError(f"a part of {length} bytes at {start} does not fit {batch_bytes} bytes")
    return start + length


def decode_batch(body: Bytes) -> list[BatchItem]:
    """The messages of a batch body; their bodies are views into it. As in Java, the total sizes of the messages are ignored."""
    return list(_items(body))


def _items(body: Bytes) -> Iterator[BatchItem]:
    view = memoryview(body)
    for flag, body_at, properties_at, end in _item_positions(body):
        yield BatchItem(view[body_at : properties_at - _SHORT.size], _text(view[properties_at:end]), flag)


def _item_positions(body: Bytes) -> Iterator[tuple[int, int, int, int]]:
    """The flag of each item, the starts of its body and its properties, and its end. Raises ``DecodeError``."""
    start, number, batch_bytes = 0, 0, len(body)
    while start < batch_bytes:
        try:
            _, _, _, flag, length = _ITEM.unpack_from(body, start)
            body_at = start + _ITEM.size
            properties_at = _part_end(body_at, length, batch_bytes) + _SHORT.size
            end = _part_end(properties_at, _LENGTH.unpack_from(body, properties_at - _SHORT.size)[0], batch_bytes)
        except (struct.error, DecodeError) as exc:
            raise DecodeError(f"Item {number} of a batch, at byte {start}, is malformed") from exc
        yield flag, body_at, properties_at, end
        start, number = end, number + 1
