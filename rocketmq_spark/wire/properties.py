"""Property strings of messages (``name 0x01 value 0x02``, repeated, without escaping), and tag expressions (``*`` or ``a || b``).

Decoding is as lenient as Java's (``MessageDecoder.string2messageProperties``): malformed parts are dropped. Encoding rejects
names and values that decoding would split. The names that have a meaning for RocketMQ are in ``codes.Property``.

A broker compares only 32-bit hashes of tags, so clients compare the texts of the tags again. Tag expressions mirror
``FilterAPI`` of the Java client. SQL92 filters are not parsed here.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from rocketmq_spark.base.arguments import is_integer, short_repr
from rocketmq_spark.base.codes import (
    KEY_SEPARATOR,
    MAX_PROPERTIES_BYTES,
    RESERVED_PROPERTIES,
    TRANSIENT_PROPERTY_PREFIX,
    Property,
)
from rocketmq_spark.base.java import string_hash
from rocketmq_spark.errors import MessageRefused
from rocketmq_spark.model import Message

ALL_TAGS = "*"
# Prefix of a property's value in base64, for bytes that are not UTF-8 or that a property cannot hold (option ``kafkaColumns``).
BASE64_MARK = "base64:"
# If option ``emptyBodies`` is ``mark``, the sink stores this body for a row without a body. A property of the message then says
# whether the row's body was null.
STAND_IN_BODY = b"\0"
DELETED_PROPERTY, NULL_BODY, EMPTY_BODY = "deleted", "null", "empty"

# The characters that Java's trim() removes: all up to the blank, but not the no-break space.
_BLANKS = "".join(map(chr, range(0x21)))


@dataclass(frozen=True, slots=True)
class Subscription:
    """The tags to which a group subscribes in a topic. Without tags, the group gets all messages."""

    sub_string: str = ALL_TAGS
    tags: tuple[str, ...] = ()
    codes: tuple[int, ...] = ()

    def accepts(self, tag: str | None) -> bool:
        """Whether the subscription includes a message with this tag. Brokers also return messages with other tags whose hash is
        equal.
        """
        return not self.tags or tag in self.tags


def parse_subscription(expression: str | None) -> Subscription:
    """The tags of an expression and their hashes, sorted. Raises ``ValueError`` if the expression consists of ``||`` only."""
    if not expression or expression == ALL_TAGS:
        return Subscription()
    parts = expression.split("||")
    while parts and not parts[-1]:  # Java's split() drops empty texts at the end
        parts.pop()
    if not parts:
        raise ValueError(f"No tag in the expression {expression!r}")
    tags = tuple(sorted({part.strip(_BLANKS) for part in parts} - {""}))
    return Subscription(expression, tags, tuple(sorted({string_hash(tag) for tag in tags})))


def parse_user_subscription(expression: str | None) -> Subscription:
    """Like ``parse_subscription``, but for an expression of a user: also raises ``ValueError`` if it has only blanks.

    Java's client accepts such an expression. No message matches it, but the offsets of the group move past all messages.
    """
    if expression and expression.strip(_BLANKS) == ALL_TAGS:
        return Subscription()
    subscription = parse_subscription(expression)
    if expression and expression != ALL_TAGS and not subscription.tags:
        raise ValueError(f"No tag in the expression {expression!r}")
    return subscription


_NAME_END = "\x01"
_VALUE_END = "\x02"


def encode_properties(properties: Mapping[str, str | None], max_bytes: int = MAX_PROPERTIES_BYTES) -> str:
    """The property string; None values are omitted. ``max_bytes`` limits its UTF-8 form."""
    text = "".join([f"{name}\x01{value}\x02" for name, value in properties.items() if value is not None])
    pair_count = (
        len(properties) if None not in properties.values() else sum(value is not None for value in properties.values())
    )
    # One count over the whole text is cheaper than two searches in each part.
    if text.count(_NAME_END) != pair_count or text.count(_VALUE_END) != pair_count or "" in properties:
        raise MessageRefused(f"Property {_bad_property(properties)!r} is empty or contains the separator 0x01 or 0x02")
    size = len(text) if text.isascii() else _utf8_size(text)
    if size > max_bytes:
        raise MessageRefused(f"Properties of {size} bytes exceed the {max_bytes} bytes that a message may carry")
    return text


def decode_properties(text: str) -> dict[str, str]:
    """Names and values. If a name is repeated, its last value counts; empty names and values are dropped."""
    properties: dict[str, str] = {}
    for pair in text.split(_VALUE_END):
        name, _, value = pair.partition(_NAME_END)
        if name and value:
            properties[name] = value
    return properties


class StoredProperties(Mapping[str, str]):
    """Properties of a stored message, which are decoded at the first access. This saves time if a listener reads only bodies."""

    __slots__ = ("_decoded", "_stored")

    def __init__(self, stored: bytes) -> None:
        self._stored = stored
        self._decoded: dict[str, str] | None = None

    def _all_properties(self) -> dict[str, str]:
        if self._decoded is None:
            # As in Java, bytes that are not UTF-8 are replaced: readers must not fail because a producer used another encoding.
            self._decoded = decode_properties(str(self._stored, "utf-8", "replace"))
        return self._decoded

    @property
    def stored(self) -> bytes:
        """The property string, as the broker stores it."""
        return self._stored

    def __getitem__(self, name: str) -> str:
        return self._all_properties()[name]

    def get(self, name: str, default: Any = None) -> Any:
        return self._all_properties().get(name, default)

    def __iter__(self) -> Iterator[str]:
        return iter(self._all_properties())

    def __len__(self) -> int:
        return len(self._all_properties())

    def __repr__(self) -> str:
        return repr(self._all_properties())


def inner_base_and_count(stored: bytes) -> tuple[int | None, int | None]:
    """The first offset and the number of offsets that a broker wrote into the properties of an inner batch. A missing value is
    None.
    """
    return _number_property(stored, Property.INNER_BASE), _number_property(stored, Property.INNER_NUM)


def _number_property(stored: bytes, name: str) -> int | None:
    # If a name is repeated, its last value counts, as in ``decode_properties``.
    _, separator, following_bytes = (b"\x02" + stored).rpartition(f"\x02{name}\x01".encode())
    value = following_bytes.partition(b"\x02")[0]
    return int(value[:20]) if separator and value.isdigit() else None


def properties_size(properties: Mapping[str, str]) -> int:
    """The size of stored properties in bytes; of decoded properties, in characters."""
    if isinstance(properties, StoredProperties):
        return len(properties._stored)
    return sum(len(name) + len(value) + 2 for name, value in properties.items())


def message_problem(message: object) -> str | None:
    """Return the text of an error if a part of a user's message has a wrong type, otherwise None."""
    if not isinstance(message, Message):
        return f"the message is {short_repr(message)}; expected a Message"
    fields: Any = message  # its fields may have any type, whatever they are declared as
    keys, user_properties, flag = fields.keys, fields.properties, fields.flag
    is_list = isinstance(keys, Collection) and not isinstance(keys, str | bytes | bytearray | memoryview | Mapping)
    if not isinstance(fields.topic, str | None):
        return f"the message's topic is {short_repr(fields.topic)}; expected a str"
    if not isinstance(fields.tags, str | None):
        return f"the message's tags are {short_repr(fields.tags)}; expected a str with one tag, or None"
    if keys is not None and not (is_list and all(isinstance(key, str) for key in keys)):
        return f"the message's keys are {short_repr(keys)}; expected a str, or a list of str"
    if user_properties is not None and not isinstance(user_properties, Mapping):
        return f"the message's properties are {short_repr(user_properties)}; expected a dict of str by str"
    for name, value in (user_properties or {}).items():
        if not isinstance(name, str):
            return f"the name of property {short_repr(name)} is {type(name).__name__}; expected a str"
        if not isinstance(value, str | None):
            return f"property {name!r} is {short_repr(value)}; expected a str"
    if not is_integer(flag) or not -(2**31) <= flag < 2**31:
        return f"the message's flag is {short_repr(flag)}; expected a signed 32-bit int"
    if not isinstance(fields.wait_store_ok, bool):
        return f"the message's wait_store_ok is {short_repr(fields.wait_store_ok)}; expected True or False"
    return None


def check_message(message: object) -> None:
    """Raise ``MessageRefused`` if a part of a user's message has a wrong type."""
    if problem := message_problem(message):
        topic = getattr(message, "topic", None)
        raise MessageRefused(problem, topic=topic if isinstance(topic, str) else None)


def message_properties(message: Message, **system: str | None) -> dict[str, str | None]:
    """All properties to be stored with ``message``: its tags, keys and own properties, then ``system`` by wire name.

    Raises if the message's own properties contain a name that belongs to RocketMQ.
    """
    properties: dict[str, str | None] = {}
    if message.keys:
        properties[Property.KEYS] = text = KEY_SEPARATOR.join(message.keys)
        if text.count(KEY_SEPARATOR) >= len(message.keys):
            key_with_blank = next(key for key in message.keys if KEY_SEPARATOR in key)
            raise MessageRefused(
                f"Key {key_with_blank!r} has a blank, and RocketMQ splits keys at blanks: give each word as a key, or one "
                "text of all",
                topic=message.topic,
            )
    if message.tags:
        properties[Property.TAGS] = message.tags
    if user_properties := message.properties:
        for name in user_properties:
            if is_reserved(name):
                raise MessageRefused(f"Property {name} belongs to RocketMQ and cannot be set", topic=message.topic)
        if "" in user_properties.values():
            empty_name = next(name for name, value in user_properties.items() if value == "")
            raise MessageRefused(
                f"Property {empty_name!r} is empty, and brokers drop empty properties", topic=message.topic
            )
        properties.update(user_properties)
    properties.update(system)
    return properties


def is_reserved(name: str) -> bool:
    """Whether a property is RocketMQ's own. Users cannot set it, and their properties do not include it."""
    return name in RESERVED_PROPERTIES or name.startswith(TRANSIENT_PROPERTY_PREFIX)


def _utf8_size(text: str) -> int:
    try:
        return len(text.encode())
    except UnicodeEncodeError as exc:
        raise MessageRefused(f"Properties cannot be written as UTF-8: {exc.reason}") from exc


def _bad_property(properties: Mapping[str, str | None]) -> str:
    for name, value in properties.items():
        if value is not None and (not name or {_NAME_END, _VALUE_END} & {*name, *value}):
            return name
    return ""
