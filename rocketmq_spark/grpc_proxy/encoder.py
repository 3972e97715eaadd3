"""Encodes a producer's messages as requests to a Proxy. Pure. In these requests, RocketMQ's own properties are fields. Over
remoting, they are properties.

The Proxy rejects RocketMQ's own property names among the user's properties.

A request contains messages of one topic: either several normal messages, or one message of another type. The Proxy rejects a
delayed message in a request with other messages. A message of a message group is sent alone, because for a request with several
messages the Proxy chooses any queue, even if all messages are of one group. Then messages of the group would be in several
queues and lose their order. A message with a priority is sent alone, because the priority determines the queue.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from rocketmq_spark.base.codes import DELAY_LEVELS, KEY_SEPARATOR, RESERVED_PROPERTIES, Property, timer_due_ms
from rocketmq_spark.errors import MessageRefused
from rocketmq_spark.grpc_proxy.protos import (
    MAP_KEY,
    MAP_VALUE,
    VARINTS,
    content_field,
    field_key,
    get_ms,
    number_field,
    proto,
    set_ms,
)
from rocketmq_spark.grpc_proxy.tables import Encoding, MessageType
from rocketmq_spark.model.send import SendRequest, SentMessage
from rocketmq_spark.options.parsing import positive_duration

# Properties that the Proxy sets itself.
PROXY_PROPERTIES = frozenset((Property.WAIT, Property.INSTANCE_ID))
_DELAY_PROPERTIES = frozenset(
    (Property.DELAY, Property.TIMER_DELAY_SEC, Property.TIMER_DELAY_MS, Property.TIMER_DELIVER_MS)
)
# Properties that give a message another type than NORMAL. Such a message is sent alone in a request.
_TYPED_PROPERTIES = frozenset(
    (Property.SHARDING_KEY, Property.PRIORITY, Property.TRANSACTION_PREPARED, *_DELAY_PROPERTIES)
)
KEY_SEPARATOR_BYTES = KEY_SEPARATOR.encode()
# Encoded keys of fields: a message in a request, a user property in a message, and so on.
MESSAGE_FIELD, USER_PROPERTY_FIELD = (
    field_key("SendMessageRequest", "messages"),
    field_key("Message", "user_properties"),
)
SYSTEM_FIELD, BODY_FIELD = field_key("Message", "system_properties"), field_key("Message", "body")
KEYS_FIELD = field_key("SystemProperties", "keys")
TEXT_FIELDS = {
    Property.TAGS: field_key("SystemProperties", "tag"),
    Property.UNIQ_KEY: field_key("SystemProperties", "message_id"),
}
NORMAL_TYPE_FIELD = number_field("SystemProperties", "message_type", MessageType.NORMAL)


class TopicName(NamedTuple):
    """A topic: its name for users, and its name on the wire."""

    name: str
    name_on_wire: str


class ProxySendRequest(NamedTuple):
    """An encoded ``SendMessageRequest``. Its answer must contain the messages' ``ids``, which are joined by commas."""

    data: bytes
    ids: str
    is_delayed: bool = False


class ProxyItem:
    """A message as a field of a request.

    A message with an ``order_key`` is sent alone, after the previous message of this key is acknowledged. Messages without a
    key are sent together.
    """

    __slots__ = ("data", "is_delayed", "msg_id", "order_key")

    def __init__(self, data: bytes, msg_id: str, order_key: Hashable = None, is_delayed: bool = False) -> None:
        self.data = data
        self.msg_id = msg_id
        self.order_key = order_key
        self.is_delayed = is_delayed

    def __len__(self) -> int:
        return len(self.data)


class ProxyBatch:
    """Implements ``model.send.Batch`` as chains of requests. The requests of a chain are sent one after the other; chains are
    sent in parallel.
    """

    __slots__ = ("_size", "chains")

    def __init__(self, chains: Sequence[Sequence[ProxySendRequest]]) -> None:
        self.chains = chains
        self._size = sum(len(request.data) for chain in chains for request in chain)

    @classmethod
    def from_items(cls, items: Iterable[ProxyItem]) -> ProxyBatch:
        normal_items: list[ProxyItem] = []
        chains: dict[Hashable, list[ProxySendRequest]] = {}
        for item in items:
            if item.order_key is None:
                normal_items.append(item)
            else:
                chains.setdefault(item.order_key, []).append(ProxySendRequest(item.data, item.msg_id, item.is_delayed))
        if not normal_items:
            return cls(list(chains.values()))
        data, ids = b"".join([item.data for item in normal_items]), ",".join([item.msg_id for item in normal_items])
        return cls([[ProxySendRequest(data, ids)], *chains.values()])

    def __len__(self) -> int:
        return self._size

    def messages(self) -> list[SentMessage]:
        decode = proto("SendMessageRequest").FromString
        return [
            _decoded_message(message)
            for chain in self.chains
            for request in chain
            for message in decode(request.data).messages
        ]


def _decoded_message(message: Any) -> SentMessage:
    """Return the message that was encoded, without the properties that the Proxy sets itself."""
    system_properties, properties = message.system_properties, dict(message.user_properties)
    if system_properties.HasField("tag"):
        properties[Property.TAGS] = system_properties.tag
    if system_properties.keys:
        properties[Property.KEYS] = KEY_SEPARATOR.join(system_properties.keys)
    if system_properties.message_id:
        properties[Property.UNIQ_KEY] = system_properties.message_id
    if system_properties.HasField("message_group"):
        properties[Property.SHARDING_KEY] = system_properties.message_group
    if system_properties.HasField("priority"):
        properties[Property.PRIORITY] = str(system_properties.priority)
    if system_properties.HasField("delivery_timestamp"):
        properties[Property.TIMER_DELIVER_MS] = str(get_ms(system_properties.delivery_timestamp))
    return SentMessage(message.body, properties)


class ProxyEncoder:
    """Implements ``model.send.MessageEncoder``. ``messages_of`` decodes the messages of a send whose body is bytes."""

    def __init__(
        self, name_on_wire: Callable[[str], str], host: str, messages_of: Callable[[SendRequest], Sequence[SentMessage]]
    ) -> None:
        self._name_on_wire = name_on_wire
        self._host = host
        self._messages_of = messages_of
        # The topic and the born time of the last encoder, and this encoder.
        self._last_encoder = "", 0, RequestEncoder(TopicName("", ""), 0, host)

    def encoder_of(self, topic: str, born_ms: int) -> RequestEncoder:
        """Return the encoder of messages for a topic with this born time."""
        last_topic, last_born_ms, encoder = self._last_encoder
        if (last_topic, last_born_ms) != (topic, born_ms):
            encoder = RequestEncoder(TopicName(topic, self._name_on_wire(topic)), born_ms, self._host)
            self._last_encoder = topic, born_ms, encoder
        return encoder

    def encode_item(self, topic: str, body: bytes | memoryview, properties: str, flag: int, born_ms: int) -> ProxyItem:
        (message,) = self._messages_of(SendRequest("", body, properties, flag=flag))
        return self.encoder_of(topic, born_ms)(message)

    def encode_batch(self, items: Iterable[ProxyItem]) -> ProxyBatch:
        return ProxyBatch.from_items(items)

    def batch_of(self, topic: str, request: SendRequest) -> ProxyBatch:
        """Return the requests of a send. The body of the send is a batch of this encoder, or bytes that are encoded here."""
        if isinstance(request.body, ProxyBatch):
            return request.body
        return ProxyBatch.from_items(map(self.encoder_of(topic, request.born_timestamp_ms), self._messages_of(request)))


class RequestEncoder:
    """Encodes messages of one topic and born time. Copies each body once.

    ``common_fields`` are the encoded fields that all messages share. ``common_system_fields`` are the encoded fields that the
    system properties of all messages share.
    """

    def __init__(self, topic: TopicName, born_ms: int, host: str) -> None:
        self._topic = topic
        self._born_ms = born_ms
        self.common_fields = content_field(
            "Message", "topic", content_field("Resource", "name", topic.name_on_wire.encode())
        )
        self.common_system_fields = b"".join(
            (
                number_field("SystemProperties", "body_encoding", Encoding.IDENTITY),
                content_field("SystemProperties", "born_timestamp", _timestamp(born_ms)),
                content_field("SystemProperties", "born_host", host.encode()),
            )
        )
        self._property_starts: dict[str, bytes] = {}

    def __call__(self, message: SentMessage) -> ProxyItem:
        """Encode a message. Raises ``MessageRefused`` for a property for which the protocol has no field."""
        size, properties = len(message.body), message.properties
        head = self._fields_before_body(message) + BODY_FIELD + VARINTS[size]
        data, msg_id = (
            b"".join((MESSAGE_FIELD, VARINTS[len(head) + size], head, message.body)),
            properties.get(Property.UNIQ_KEY, ""),
        )
        if _TYPED_PROPERTIES.isdisjoint(properties):
            return ProxyItem(data, msg_id)
        order_key: Hashable = properties.get(Property.SHARDING_KEY)
        is_delayed = not _DELAY_PROPERTIES.isdisjoint(properties)
        return ProxyItem(data, msg_id, object() if order_key is None else order_key, is_delayed)

    def _fields_before_body(self, message: SentMessage) -> bytes:
        """Return all encoded fields of a message except its body."""
        if message.flag:
            raise MessageRefused(
                f"the message's flag is {message.flag}, which gRPC cannot transport; expected 0",
                topic=self._topic.name,
                remedy="Send the flag as a property, or use transport=remoting",
            )
        fields, system_fields, has_type = self.common_fields, self.common_system_fields, False
        for name, value in message.properties.items():
            data = value.encode()
            if name in TEXT_FIELDS:
                system_fields += TEXT_FIELDS[name] + VARINTS[len(data)] + data
            elif name not in RESERVED_PROPERTIES:
                property_start = self._property_starts.get(name) or self.property_start(name)
                entry = property_start + VARINTS[len(data)] + data
                fields += USER_PROPERTY_FIELD + VARINTS[len(entry)] + entry
            elif name == Property.KEYS:
                system_fields += b"".join(
                    [KEYS_FIELD + VARINTS[len(key)] + key for key in data.split(KEY_SEPARATOR_BYTES)]
                )
            elif name in _TYPED_PROPERTIES:
                has_type = True
            elif name not in PROXY_PROPERTIES:
                raise MessageRefused(
                    f"property {name} cannot be sent through the Proxy over gRPC", topic=self._topic.name
                )
        system_fields += self._type_fields(message.properties) if has_type else NORMAL_TYPE_FIELD
        return fields + SYSTEM_FIELD + VARINTS[len(system_fields)] + system_fields

    def property_start(self, name: str) -> bytes:
        """Return the encoded start of an entry of the user's properties: its name and the key of its value."""
        data = name.encode()
        self._property_starts[name] = start = MAP_KEY + VARINTS[len(data)] + data + MAP_VALUE
        return start

    def _type_fields(self, properties: Mapping[str, str]) -> bytes:
        """Return the encoded type of a message and the fields of this type. Raises ``MessageRefused`` for several types."""
        fields_by_type = {}
        if Property.SHARDING_KEY in properties:
            group = properties[Property.SHARDING_KEY].encode()
            fields_by_type[MessageType.FIFO] = content_field("SystemProperties", "message_group", group)
        due_ms = _due_ms(properties, self._born_ms, self._topic.name)
        if due_ms is not None:
            fields_by_type[MessageType.DELAY] = content_field(
                "SystemProperties", "delivery_timestamp", _timestamp(due_ms)
            )
        if Property.TRANSACTION_PREPARED in properties:
            fields_by_type[MessageType.TRANSACTION] = b""
        if Property.PRIORITY in properties:
            priority = int(properties[Property.PRIORITY])
            fields_by_type[MessageType.PRIORITY] = number_field("SystemProperties", "priority", priority)
        if len(fields_by_type) > 1:
            names = " and ".join(message_type.name for message_type in fields_by_type)
            raise MessageRefused(
                f"the message is {names}, and over gRPC it can have only one of these", topic=self._topic.name
            )
        ((message_type, fields),) = fields_by_type.items()
        return _type_field(message_type) + fields


def _type_field(message_type: MessageType) -> bytes:
    return number_field("SystemProperties", "message_type", message_type)


def _timestamp(epoch_ms: int) -> bytes:
    """Return the encoded fields of a ``Timestamp``."""
    timestamp = proto("SystemProperties")().born_timestamp
    set_ms(timestamp, epoch_ms)
    return bytes(timestamp.SerializeToString())


def _due_ms(properties: Mapping[str, str], born_ms: int, topic: str) -> int | None:
    """Return the delivery time of a message; None if it is not delayed. A delay level counts as the delay that it has by default
    in RocketMQ.
    """
    due_ms = timer_due_ms(properties, born_ms)
    if due_ms is not None or Property.DELAY not in properties:
        return due_ms
    level = int(properties[Property.DELAY])
    if level > len(DELAY_LEVELS):
        raise MessageRefused(
            f"delay level {level}: over gRPC, the highest level is {len(DELAY_LEVELS)}",
            topic=topic,
            remedy="Give the delay in seconds",
        )
    return born_ms + round(1000 * positive_duration(DELAY_LEVELS[level - 1]))
