"""What comes out when a delayed message is due. Pure."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from rocketmq_spark import codes
from rocketmq_spark.errors import DecodeError
from rocketmq_spark.wire.envelope import unpack
from rocketmq_spark.wire.properties import decode_properties

# Where bodies go that are no envelopes: they must neither stop the others nor get lost.
DEAD_TOPIC = "dmq_dead_topic"
PROBLEM = "delayProblem"
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
        {name: value for name, value in found.items() if name not in codes.RESERVED_PROPERTIES},
        found.get(codes.Property.UNIQ_KEY) or _digest(data),
    )


def _digest(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=16).hexdigest().upper()


def once(bodies: Iterable[bytes]) -> Iterator[bytes]:
    """Each envelope once. One that was delivered or sent again has the same bytes: id and due time are in it."""
    return iter(dict.fromkeys(bodies))
