"""Envelopes: the bodies of messages in the topic ``dmq_inner_topic``. Each envelope has a message to send later.

Layout, big-endian: ``RDMQ``, version, kind, due time (epoch ms), digest of the message id, born time (epoch ms), the message's
flag, then topic, property string and body; topic and properties follow their lengths. Due time and digest together identify the
message. Due time and digest have fixed positions, so a query can read them without decoding the rest. The due time is absolute,
so a service that consumes the envelope late does not delay the message further. A ``CANCEL`` envelope has empty properties and
an empty body, and cancels the message with the same due time and digest.
"""

from __future__ import annotations

import hashlib
import struct
from typing import NamedTuple

from rocketmq_spark.errors import DecodeError, LocalProtocolError
from rocketmq_spark.wire.identifiers import decode_handle, encode_handle

INNER_TOPIC = "dmq_inner_topic"
MAGIC = b"RDMQ"
VERSION = 1
MESSAGE, CANCEL = 0, 1
# A property of envelopes only: broker and id of the queue that the sender chose.
QUEUE = "DMQ_QUEUE"
_HEAD = struct.Struct(">4sBBq16sqiHI")
# Positions of kind, due time and digest.
KIND_AT, DUE_AT, DIGEST_AT, DIGEST_END = 5, 6, 14, 30
_HANDLE_VERSION = "dmq1"


class Envelope(NamedTuple):
    """A message as the service will send it; ``properties`` is an encoded property string that includes ``msg_id``."""

    topic: str
    due_ms: int
    msg_id: str
    born_ms: int
    flag: int
    properties: str
    body: bytes
    kind: int = MESSAGE

    def pack(self) -> bytes:
        topic, properties = self.topic.encode(), self.properties.encode()
        id_digest = digest(self.msg_id.encode())
        head = _HEAD.pack(
            MAGIC, VERSION, self.kind, self.due_ms, id_digest, self.born_ms, self.flag, len(topic), len(properties)
        )
        return b"".join((head, topic, properties, self.body))


class DecodedEnvelope(NamedTuple):
    """A decoded envelope; ``identity`` (due time and digest) identifies its message."""

    topic: str
    due_ms: int
    identity: bytes
    born_ms: int
    flag: int
    properties: str
    body: bytes
    kind: int


def digest(data: bytes) -> bytes:
    """The digest of a message id, or of other bytes that identify a message without an id."""
    return hashlib.blake2b(data, digest_size=DIGEST_END - DIGEST_AT).digest()


def cancel_envelope(topic: str, due_ms: int, msg_id: str, now_ms: int) -> bytes:
    """The envelope that cancels a delayed message."""
    return Envelope(topic, due_ms, msg_id, now_ms, 0, "", b"", CANCEL).pack()


def unpack(data: bytes) -> DecodedEnvelope:
    """Decodes an envelope. Raises ``DecodeError`` for data that ``Envelope.pack`` of this version did not make."""
    if len(data) < _HEAD.size or data[:4] != MAGIC:
        raise DecodeError(
            f"{len(data)} bytes that begin with {data[:4].hex(' ')!r} are no envelope of a delayed message"
        )
    _, version, kind, due_ms, _, born_ms, flag, topic_size, properties_size = _HEAD.unpack_from(data)
    if version != VERSION or kind not in (MESSAGE, CANCEL):
        raise DecodeError(
            f"the envelope of a delayed message has version {version} and kind {kind}; expected version {VERSION}",
            remedy="Update the delay service before the producers",
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
        raise DecodeError(f"the envelope of a delayed message has a topic or properties that are not UTF-8: {e}") from e
    identity = data[DUE_AT:DIGEST_END]
    return DecodedEnvelope(topic, due_ms, bytes(identity), born_ms, flag, properties, bytes(data[body_at:]), kind)


class DelayHandle(NamedTuple):
    """Identifies a delayed message for ``recall``. The handle names the queue of the envelope, so that a cancellation is stored
    in the same queue, after the envelope.
    """

    topic: str
    broker_name: str
    queue_id: int
    due_ms: int
    msg_id: str

    def __str__(self) -> str:
        return encode_handle(_HANDLE_VERSION, self.topic, self.broker_name, self.queue_id, self.due_ms, self.msg_id)

    @classmethod
    def parse(cls, text: str) -> DelayHandle | None:
        """The handle in ``text``, or None for a handle of another kind, such as a broker's."""
        try:
            version, *parts = decode_handle(text)
        except ValueError:
            return None
        if version != _HANDLE_VERSION:
            return None
        try:
            topic, broker_name, queue_id, due_ms, msg_id = parts
            return cls(topic, broker_name, int(queue_id), int(due_ms), msg_id)
        except ValueError as e:
            raise LocalProtocolError(f"{text!r} is not a recall handle: {e}") from e
