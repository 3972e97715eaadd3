"""The messages of a usual answer. Most fields of these messages are decoded at the first access.

Nearly all answers are usual: each message is complete, in Java's first layout, with IPv4 addresses, neither compressed nor a
batch, and at a later offset than the previous message. A listener reads the body and perhaps a few properties, so only the
offset and the body are decoded immediately, which takes a quarter of the time of ``messages.decode_one``. Answers that are not
usual are decoded by ``messages.decode_one``.

A message has copies of its bytes, not views, because a view would keep the whole answer in memory, up to 16 MiB.
"""

from __future__ import annotations

import struct
from typing import Any

from rocketmq_spark.base.codes import INNER_BATCH_MASK, MESSAGE_MAGIC_V1, SysFlag
from rocketmq_spark.model import MessageQueue, ReceivedMessage
from rocketmq_spark.wire.identifiers import host_text, offset_msg_id
from rocketmq_spark.wire.properties import StoredProperties

# Size, magic, queue offset, system flag, body length. All fields of a head are in ``messages``, with the layouts of IPv6.
_USUAL_HEAD = struct.Struct(">ii12xq8xi44xi")
_MIN_BYTES = _USUAL_HEAD.size + 1 + 2
_V1 = MESSAGE_MAGIC_V1 - (1 << 32)  # read as a signed number
_UNUSUAL_FLAGS = int(SysFlag.BORNHOST_V6 | SysFlag.STOREHOST_V6 | SysFlag.COMPRESSED | INNER_BATCH_MASK)

_INT, _LONG = struct.Struct(">i"), struct.Struct(">q")
_NUMBER_FIELDS = {
    "store_size": (_INT, 0),
    "flag": (_INT, 16),
    "commit_log_offset": (_LONG, 28),
    "sys_flag": (_INT, 36),
    "born_timestamp": (_LONG, 40),
    "store_timestamp": (_LONG, 56),
    "reconsume_times": (_INT, 72),
    "prepared_transaction_offset": (_LONG, 76),
}
_HOST_FIELDS = {"born_host": 48, "store_host": 64}


def decode_field(name: str, message: ReceivedMessage) -> Any:
    """Decode a field of a message, whose ``_head`` has the bytes that are stored before the body."""
    if name == "properties":
        message.properties = properties = StoredProperties(message._properties)
        return properties
    head = message._head
    if name in _HOST_FIELDS:
        return host_text(*_address(head, _HOST_FIELDS[name]))
    if name == "offset_msg_id":
        return offset_msg_id(*_address(head, _HOST_FIELDS["store_host"]), decode_field("commit_log_offset", message))
    layout, position = _NUMBER_FIELDS[name]
    return layout.unpack_from(head, position)[0]


def _address(head: bytes, position: int) -> tuple[bytes, int]:
    return head[position : position + 4], _INT.unpack_from(head, position + 4)[0]


def usual_messages(data: bytes, start: int, end: int, queue: MessageQueue) -> list[ReceivedMessage] | None:
    """The messages of ``queue`` in an answer with offsets from ``start`` to below ``end``; None if the answer is not usual.

    All messages of a consumer are decoded here, so this function avoids calls and objects wherever possible.
    """
    messages: list[ReceivedMessage] = []
    new, cls, unpack, topic = ReceivedMessage.__new__, ReceivedMessage, _USUAL_HEAD.unpack_from, queue.topic
    position, data_length, head_length = 0, len(data), _USUAL_HEAD.size
    last_position = data_length - _MIN_BYTES  # the last position at which a message can begin
    while position < data_length:
        if position > last_position:
            return None
        size, magic, offset, sys_flag, body_length = unpack(data, position)
        body_at = position + head_length
        body_end, message_end = body_at + body_length, position + size
        if (
            magic != _V1
            or sys_flag & _UNUSUAL_FLAGS
            or offset < start
            or body_length < 0
            or not body_end < message_end <= data_length
        ):
            return None
        length_at = body_end + 1 + data[body_end]  # the position of the length of the properties
        if length_at + 2 > message_end or length_at + 2 + (data[length_at] << 8 | data[length_at + 1]) != message_end:
            return None
        message = new(cls)
        message.topic, message.queue, message.queue_offset = topic, queue, offset
        message.body, message.decode_error = data[body_at:body_end], None
        message._head, message._properties, message._decode_field = (
            data[position:body_at],
            data[length_at + 2 : message_end],
            decode_field,
        )
        messages.append(message)
        start, position = offset + 1, message_end
    return messages if start <= end else None
