"""From what a producer sends to the messages of a request: what is stored as properties over remoting has fields here. Pure.

The Proxy refuses RocketMQ's own names as the user's properties. A request holds messages of one topic, several if they are
normal ones. One that is delayed the Proxy takes alone only. One of a message group must travel alone, too: for a request of
several the Proxy chooses any queue, although all are of one group, and its order would be lost.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from rocketmq_spark.codes import DELAY_LEVELS, KEY_SEPARATOR, RESERVED_PROPERTIES, Property
from rocketmq_spark.errors import MessageRefused
from rocketmq_spark.grpc_proxy.facts import Encoding, MessageType
from rocketmq_spark.grpc_proxy.protos import proto, set_ms
from rocketmq_spark.parsing import positive_duration

# What the Proxy sets itself.
_LEFT_OUT = frozenset((Property.WAIT, Property.INSTANCE_ID))
_TIMING = (Property.DELAY, Property.TIMER_DELAY_SEC, Property.TIMER_DELAY_MS, Property.TIMER_DELIVER_MS)
_FIELDS = frozenset(
    (Property.TAGS, Property.KEYS, Property.UNIQ_KEY, Property.SHARDING_KEY, Property.PRIORITY, *_TIMING, *_LEFT_OUT)
)


class Part(NamedTuple):
    """One message of a request, with its properties as they are stored."""

    body: bytes
    properties: Mapping[str, str]
    flag: int = 0


class Topic(NamedTuple):
    """Its name for users, and on the wire."""

    name: str
    on_wire: str


def chains(parts: Sequence[Part]) -> list[list[list[Part]]]:
    """The parts of each request, in chains: the requests of a chain go one after the other, chains at once."""
    normal: list[Part] = []
    groups: dict[str, list[list[Part]]] = {}
    alone: list[list[list[Part]]] = []
    for part in parts:
        group = part.properties.get(Property.SHARDING_KEY)
        if group is not None:
            groups.setdefault(group, []).append([part])
        elif any(name in part.properties for name in _TIMING):
            alone.append([[part]])
        else:
            normal.append(part)
    return [*([[normal]] if normal else []), *groups.values(), *alone]


def message(topic: Topic, part: Part, born_ms: int, host: str) -> Any:
    """One message as the Proxy takes it. Raises ``MessageRefused`` for what it has no field for."""
    if part.flag:
        raise MessageRefused(
            f"the message's flag is {part.flag}, which gRPC does not carry; expected 0",
            topic=topic.name,
            remedy="Send it as a property, or with transport=remoting",
        )
    made = proto("Message")(body=part.body)
    made.topic.name = topic.on_wire
    system = made.system_properties
    system.body_encoding = Encoding.IDENTITY
    system.born_host = host
    set_ms(system.born_timestamp, born_ms)
    system.message_type = _typed(system, part.properties, born_ms, topic)
    for name, value in part.properties.items():
        if name not in RESERVED_PROPERTIES:
            made.user_properties[name] = value
        elif name not in _FIELDS:
            raise MessageRefused(f"property {name} cannot be sent through the Proxy over gRPC", topic=topic.name)
    return made


def _typed(system: Any, properties: Mapping[str, str], born_ms: int, topic: Topic) -> MessageType:
    """Fill in what has a field of its own; gives the message's type, of which it has one only."""
    system.message_id = properties.get(Property.UNIQ_KEY, "")
    if Property.TAGS in properties:
        system.tag = properties[Property.TAGS]
    system.keys.extend(properties.get(Property.KEYS, "").split(KEY_SEPARATOR) if Property.KEYS in properties else ())
    types = []
    if Property.SHARDING_KEY in properties:
        types.append(MessageType.FIFO)
        system.message_group = properties[Property.SHARDING_KEY]
    due_ms = _due_ms(properties, born_ms, topic.name)
    if due_ms is not None:
        types.append(MessageType.DELAY)
        set_ms(system.delivery_timestamp, due_ms)
    if Property.PRIORITY in properties:
        types.append(MessageType.PRIORITY)
        system.priority = int(properties[Property.PRIORITY])
    if len(types) > 1:
        names = " and ".join(kind.name for kind in types)
        raise MessageRefused(f"the message is {names}, and over gRPC it can be one of them only", topic=topic.name)
    return types[0] if types else MessageType.NORMAL


def _due_ms(properties: Mapping[str, str], born_ms: int, topic: str) -> int | None:
    """When a message is to be delivered; None where it is not delayed. Levels are those of a broker that has the stock ones."""
    if Property.TIMER_DELIVER_MS in properties:
        return int(properties[Property.TIMER_DELIVER_MS])
    if Property.TIMER_DELAY_MS in properties:
        return born_ms + int(properties[Property.TIMER_DELAY_MS])
    if Property.TIMER_DELAY_SEC in properties:
        return born_ms + 1000 * int(properties[Property.TIMER_DELAY_SEC])
    if Property.DELAY not in properties:
        return None
    level = int(properties[Property.DELAY])
    if level > len(DELAY_LEVELS):
        raise MessageRefused(
            f"delay level {level}: over gRPC there are {len(DELAY_LEVELS)}",
            topic=topic,
            remedy="Give the delay in seconds",
        )
    return born_ms + round(1000 * positive_duration(DELAY_LEVELS[level - 1]))
