"""A message on its way to a service that delays it: what the topic ``dmq_inner_topic`` carries as bodies.

Big-endian: ``RDMQ``, version, when it is due and when it was born (epoch ms), the message's flag, then topic, property
string and body, the former two with their lengths before them. The due time stands at a fixed place, so that a query
finds it without taking the rest apart. It is absolute: what a service is late in consuming does not add to the delay.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

from rocketmq_spark.errors import DecodeError

INNER_TOPIC = "dmq_inner_topic"
MAGIC = b"RDMQ"
VERSION = 1
_HEAD = struct.Struct(">4sBqqiHI")


class Envelope(NamedTuple):
    """A message as it is to be sent when it is due; ``properties`` is a stored property string, with its message id."""

    topic: str
    due_ms: int
    born_ms: int
    flag: int
    properties: str
    body: bytes

    def pack(self) -> bytes:
        topic, properties = self.topic.encode(), self.properties.encode()
        head = _HEAD.pack(MAGIC, VERSION, self.due_ms, self.born_ms, self.flag, len(topic), len(properties))
        return b"".join((head, topic, properties, self.body))


def unpack(data: bytes) -> Envelope:
    """Raises ``DecodeError`` for what ``Envelope.pack`` of this version did not make."""
    if len(data) < _HEAD.size or data[:4] != MAGIC:
        raise DecodeError(
            f"{len(data)} bytes that begin with {data[:4].hex(' ')!r} are no envelope of a delayed message"
        )
    _, version, due_ms, born_ms, flag, topic_size, properties_size = _HEAD.unpack_from(data)
    if version != VERSION:
        raise DecodeError(
            f"the envelope of a delayed message has version {version}; expected {VERSION}",
            remedy="Update whatever delays messages before what sends them",
        )
    body_at = _HEAD.size + topic_size + properties_size
    if topic_size == 0 or body_at > len(data):
        raise DecodeError(
            f"the envelope of a delayed message has {len(data)} bytes, "
            f"a topic of {topic_size} and properties of {properties_size}"
        )
    try:
        topic, properties = (
            data[_HEAD.size : _HEAD.size + topic_size].decode(),
            data[_HEAD.size + topic_size : body_at].decode(),
        )
    except UnicodeDecodeError as e:
        raise DecodeError(f"the envelope of a delayed message has a name that is no text: {e}") from e
    return Envelope(topic, due_ms, born_ms, flag, properties, bytes(data[body_at:]))
