"""What comes out when a delayed message is due. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from rocketmq_spark import codes
from rocketmq_spark.errors import DecodeError
from rocketmq_spark.wire.envelope import CANCEL, DIGEST_END, DUE_AT, KIND_AT, MAGIC, QUEUE, VERSION, digest, unpack
from rocketmq_spark.wire.properties import decode_properties

# Where bodies go that are no envelopes: they must neither stop the others nor get lost.
DEAD_TOPIC = "dmq_dead_topic"
PROBLEM = "delayProblem"
_BEGIN = MAGIC + bytes([VERSION])
_NOT_THE_USERS = codes.RESERVED_PROPERTIES | {QUEUE}
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


def released(data: bytes, dead_topic: str = DEAD_TOPIC) -> Released:
    """The original of an envelope; what is none goes as it is to ``dead_topic``, with the reason as a property."""
    try:
        envelope = unpack(data)
    except DecodeError as e:
        return Released(dead_topic, data, None, None, 0, None, {PROBLEM: str(e)}, _digest(data))
    found = decode_properties(envelope.properties)
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
