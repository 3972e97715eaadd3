"""From what a producer sends to the messages of a request: what is stored as properties over remoting has fields here. Pure.

The Proxy refuses RocketMQ's own names as the user's properties. A request holds messages of one topic, several if they are
normal ones. One that is delayed the Proxy takes alone only. One of a message group must travel alone, too: for a request of
several the Proxy chooses any queue, although all are of one group, and its order would be lost. So would a priority, which
is nothing else than a queue.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from rocketmq_spark.base.codes import DELAY_LEVELS, KEY_SEPARATOR, RESERVED_PROPERTIES, Property, timer_due_ms
from rocketmq_spark.errors import MessageRefused
from rocketmq_spark.grpc_proxy.facts import Encoding, MessageType
from rocketmq_spark.grpc_proxy.protos import MAP_KEY, MAP_VALUE, VARINTS, content, number, proto, set_ms, start
from rocketmq_spark.options.parsing import positive_duration

# What the Proxy sets itself.
LEFT_OUT = frozenset((Property.WAIT, Property.INSTANCE_ID))
_TIMING = (Property.DELAY, Property.TIMER_DELAY_SEC, Property.TIMER_DELAY_MS, Property.TIMER_DELIVER_MS)
# What makes a message one of another type than NORMAL, which has it travel in a request of its own.
_TYPES = frozenset((Property.SHARDING_KEY, Property.PRIORITY, Property.TRANSACTION_PREPARED, *_TIMING))
KEY_SEPARATOR_BYTES = KEY_SEPARATOR.encode()
# What the fields of a message begin with.
MESSAGE, USER = start("SendMessageRequest", "messages"), start("Message", "user_properties")
SYSTEM, BODY = start("Message", "system_properties"), start("Message", "body")
KEY = start("SystemProperties", "keys")
TEXTS = {
    Property.TAGS: start("SystemProperties", "tag"),
    Property.UNIQ_KEY: start("SystemProperties", "message_id"),
}
NORMAL = number("SystemProperties", "message_type", MessageType.NORMAL)


class RequestMessage(NamedTuple):
    """One message of a request, with its properties as they are stored."""

    body: bytes | memoryview
    properties: Mapping[str, str]
    flag: int = 0


class Topic(NamedTuple):
    """Its name for users, and on the wire."""

    name: str
    on_wire: str


def chains(parts: Sequence[RequestMessage]) -> list[list[list[RequestMessage]]]:
    """The parts of each request, in chains: the requests of a chain go one after the other, chains at once."""
    normal: list[RequestMessage] = []
    groups: dict[str, list[list[RequestMessage]]] = {}
    alone: list[list[list[RequestMessage]]] = []
    for part in parts:
        if _TYPES.isdisjoint(part.properties):
            normal.append(part)
        elif (group := part.properties.get(Property.SHARDING_KEY)) is not None:
            groups.setdefault(group, []).append([part])
        else:
            alone.append([[part]])
    return [*([[normal]] if normal else []), *groups.values(), *alone]


class ProxySendRequest(NamedTuple):
    """A ``SendMessageRequest`` as it is sent, and what its answer is compared with: the messages' ids, joined by commas."""

    data: bytes
    ids: str
    delayed: bool


class RequestEncoder:
    """Makes the requests of one send. What its messages have in common is made once; their bodies are copied once.

    ``first`` are the fields of each message, and ``system`` those of its system properties, that are the same in all.
    """

    def __init__(self, topic: Topic, born_ms: int, host: str) -> None:
        self._topic = topic
        self._born_ms = born_ms
        self.first = content("Message", "topic", content("Resource", "name", topic.on_wire.encode()))
        self.system = b"".join(
            (
                number("SystemProperties", "body_encoding", Encoding.IDENTITY),
                content("SystemProperties", "born_timestamp", _moment(born_ms)),
                content("SystemProperties", "born_host", host.encode()),
            )
        )
        self._named: dict[str, bytes] = {}

    def __call__(self, parts: Sequence[RequestMessage]) -> ProxySendRequest:
        """Raises ``MessageRefused`` for what the Proxy has no field for."""
        pieces: list[bytes | memoryview] = []
        for part in parts:
            head = self._head(part)
            size = len(part.body)
            head += BODY + VARINTS[size]
            pieces += (MESSAGE + VARINTS[len(head) + size] + head, part.body)
        ids = ",".join([part.properties.get(Property.UNIQ_KEY, "") for part in parts])
        return ProxySendRequest(b"".join(pieces), ids, any(name in parts[0].properties for name in _TIMING))

    def _head(self, part: RequestMessage) -> bytes:
        """All fields of a message but its body."""
        if part.flag:
            raise MessageRefused(
                f"the message's flag is {part.flag}, which gRPC does not carry; expected 0",
                topic=self._topic.name,
                remedy="Send it as a property, or with transport=remoting",
            )
        fields, system, typed = self.first, self.system, False
        for name, value in part.properties.items():
            data = value.encode()
            if name in TEXTS:
                system += TEXTS[name] + VARINTS[len(data)] + data
            elif name not in RESERVED_PROPERTIES:
                key = self._named.get(name) or self.name(name)
                entry = key + VARINTS[len(data)] + data
                fields += USER + VARINTS[len(entry)] + entry
            elif name == Property.KEYS:
                system += b"".join([KEY + VARINTS[len(key)] + key for key in data.split(KEY_SEPARATOR_BYTES)])
            elif name in _TYPES:
                typed = True
            elif name not in LEFT_OUT:
                raise MessageRefused(
                    f"property {name} cannot be sent through the Proxy over gRPC", topic=self._topic.name
                )
        system += self._typed(part.properties) if typed else NORMAL
        return fields + SYSTEM + VARINTS[len(system)] + system

    def name(self, name: str) -> bytes:
        """What an entry of the user's properties begins with."""
        data = name.encode()
        self._named[name] = made = MAP_KEY + VARINTS[len(data)] + data + MAP_VALUE
        return made

    def _typed(self, properties: Mapping[str, str]) -> bytes:
        """The message's type, of which it has one only, and what belongs to it."""
        found = {}
        if Property.SHARDING_KEY in properties:
            group = properties[Property.SHARDING_KEY].encode()
            found[MessageType.FIFO] = content("SystemProperties", "message_group", group)
        due_ms = _due_ms(properties, self._born_ms, self._topic.name)
        if due_ms is not None:
            found[MessageType.DELAY] = content("SystemProperties", "delivery_timestamp", _moment(due_ms))
        if Property.TRANSACTION_PREPARED in properties:
            found[MessageType.TRANSACTION] = b""
        if Property.PRIORITY in properties:
            priority = int(properties[Property.PRIORITY])
            found[MessageType.PRIORITY] = number("SystemProperties", "priority", priority)
        if len(found) > 1:
            names = " and ".join(kind.name for kind in found)
            raise MessageRefused(
                f"the message is {names}, and over gRPC it can be one of them only", topic=self._topic.name
            )
        ((kind, fields),) = found.items()
        return _type(kind) + fields


def _type(kind: MessageType) -> bytes:
    return number("SystemProperties", "message_type", kind)


def _moment(epoch_ms: int) -> bytes:
    """The fields of a time."""
    made = proto("SystemProperties")().born_timestamp
    set_ms(made, epoch_ms)
    return bytes(made.SerializeToString())


def _due_ms(properties: Mapping[str, str], born_ms: int, topic: str) -> int | None:
    """When a message is to be delivered; None where it is not delayed. Levels are those of a broker that has the stock ones."""
    due_ms = timer_due_ms(properties, born_ms)
    if due_ms is not None or Property.DELAY not in properties:
        return due_ms
    level = int(properties[Property.DELAY])
    if level > len(DELAY_LEVELS):
        raise MessageRefused(
            f"delay level {level}: over gRPC there are {len(DELAY_LEVELS)}",
            topic=topic,
            remedy="Give the delay in seconds",
        )
    return born_ms + round(1000 * positive_duration(DELAY_LEVELS[level - 1]))
