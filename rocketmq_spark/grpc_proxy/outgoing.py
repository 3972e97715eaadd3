"""From what a producer sends to the messages of a request: what is stored as properties over remoting has fields here. Pure.

The Proxy refuses RocketMQ's own names as the user's properties. A request holds messages of one topic, several if they are
normal ones. One that is delayed the Proxy takes alone only. One of a message group must travel alone, too: for a request of
several the Proxy chooses any queue, although all are of one group, and its order would be lost. So would a priority, which
is nothing else than a queue.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from rocketmq_spark.base.codes import DELAY_LEVELS, KEY_SEPARATOR, RESERVED_PROPERTIES, Property, timer_due_ms
from rocketmq_spark.errors import MessageRefused
from rocketmq_spark.grpc_proxy.facts import Encoding, MessageType
from rocketmq_spark.grpc_proxy.protos import MAP_KEY, MAP_VALUE, VARINTS, content, get_ms, number, proto, set_ms, start
from rocketmq_spark.model.send import SendRequest, SentMessage
from rocketmq_spark.options.parsing import positive_duration

# What the Proxy sets itself.
LEFT_OUT = frozenset((Property.WAIT, Property.INSTANCE_ID))
_TIMING = frozenset((Property.DELAY, Property.TIMER_DELAY_SEC, Property.TIMER_DELAY_MS, Property.TIMER_DELIVER_MS))
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


class Topic(NamedTuple):
    """Its name for users, and on the wire."""

    name: str
    on_wire: str


class ProxySendRequest(NamedTuple):
    """A ``SendMessageRequest`` as it is sent, and what its answer is compared with: the messages' ids, joined by commas."""

    data: bytes
    ids: str
    delayed: bool = False


class ProxyItem:
    """A message as a field of a request. Those of one ``line`` travel alone, one after the other; those without one together."""

    __slots__ = ("data", "delayed", "line", "msg_id")

    def __init__(self, data: bytes, msg_id: str, line: Hashable = None, delayed: bool = False) -> None:
        self.data = data
        self.msg_id = msg_id
        self.line = line
        self.delayed = delayed

    def __len__(self) -> int:
        return len(self.data)


class ProxyBatch:
    """Implements ``model.send.Batch``: requests in chains. Those of a chain go one after the other, chains at once."""

    __slots__ = ("_size", "chains")

    def __init__(self, chains: Sequence[Sequence[ProxySendRequest]]) -> None:
        self.chains = chains
        self._size = sum(len(request.data) for chain in chains for request in chain)

    @classmethod
    def of(cls, items: Iterable[ProxyItem]) -> ProxyBatch:
        normal: list[ProxyItem] = []
        lines: dict[Hashable, list[ProxySendRequest]] = {}
        for item in items:
            if item.line is None:
                normal.append(item)
            else:
                lines.setdefault(item.line, []).append(ProxySendRequest(item.data, item.msg_id, item.delayed))
        if not normal:
            return cls(list(lines.values()))
        data, ids = b"".join([item.data for item in normal]), ",".join([item.msg_id for item in normal])
        return cls([[ProxySendRequest(data, ids)], *lines.values()])

    def __len__(self) -> int:
        return self._size

    def messages(self) -> list[SentMessage]:
        read = proto("SendMessageRequest").FromString
        return [_sent(one) for chain in self.chains for request in chain for one in read(request.data).messages]


def _sent(message: Any) -> SentMessage:
    """A message as it was before it was encoded, but for what the Proxy sets itself."""
    system, properties = message.system_properties, dict(message.user_properties)
    if system.HasField("tag"):
        properties[Property.TAGS] = system.tag
    if system.keys:
        properties[Property.KEYS] = KEY_SEPARATOR.join(system.keys)
    if system.message_id:
        properties[Property.UNIQ_KEY] = system.message_id
    if system.HasField("message_group"):
        properties[Property.SHARDING_KEY] = system.message_group
    if system.HasField("priority"):
        properties[Property.PRIORITY] = str(system.priority)
    if system.HasField("delivery_timestamp"):
        properties[Property.TIMER_DELIVER_MS] = str(get_ms(system.delivery_timestamp))
    return SentMessage(message.body, properties)


class ProxyEncoder:
    """Implements ``model.send.MessageEncoder``. ``messages_of`` gives the messages of a send whose body is bytes."""

    def __init__(
        self, on_wire: Callable[[str], str], host: str, messages_of: Callable[[SendRequest], Sequence[SentMessage]]
    ) -> None:
        self._on_wire = on_wire
        self._host = host
        self._messages_of = messages_of
        self._last = "", 0, RequestEncoder(Topic("", ""), 0, host)

    def of(self, topic: str, born_ms: int) -> RequestEncoder:
        """What encodes messages for a topic that were born in this millisecond."""
        known, at_ms, made = self._last
        if (known, at_ms) != (topic, born_ms):
            made = RequestEncoder(Topic(topic, self._on_wire(topic)), born_ms, self._host)
            self._last = topic, born_ms, made
        return made

    def item(self, topic: str, body: bytes | memoryview, properties: str, flag: int, born_ms: int) -> ProxyItem:
        (message,) = self._messages_of(SendRequest("", body, properties, flag=flag))
        return self.of(topic, born_ms)(message)

    def batch(self, items: Iterable[ProxyItem]) -> ProxyBatch:
        return ProxyBatch.of(items)

    def encoded(self, topic: str, request: SendRequest) -> ProxyBatch:
        """The requests of a send; they are made here unless it is a batch of this encoder."""
        if isinstance(request.body, ProxyBatch):
            return request.body
        return ProxyBatch.of(map(self.of(topic, request.born_timestamp_ms), self._messages_of(request)))


class RequestEncoder:
    """Makes the messages of one topic and birth. What they have in common is made once; their bodies are copied once.

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

    def __call__(self, part: SentMessage) -> ProxyItem:
        """Raises ``MessageRefused`` for what the Proxy has no field for."""
        size, properties = len(part.body), part.properties
        head = self._head(part) + BODY + VARINTS[size]
        data, msg_id = (
            b"".join((MESSAGE, VARINTS[len(head) + size], head, part.body)),
            properties.get(Property.UNIQ_KEY, ""),
        )
        if _TYPES.isdisjoint(properties):
            return ProxyItem(data, msg_id)
        line: Hashable = properties.get(Property.SHARDING_KEY)
        delayed = not _TIMING.isdisjoint(properties)
        return ProxyItem(data, msg_id, object() if line is None else line, delayed)

    def _head(self, part: SentMessage) -> bytes:
        """All fields of a message but its body."""
        if part.flag:
            raise MessageRefused(
                f"the message's flag is {part.flag}, which gRPC cannot transport; expected 0",
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
                f"the message is {names}, and over gRPC it can have only one of these", topic=self._topic.name
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
