"""Protobuf messages of the Proxy's protocol: as classes, and as bytes for what is written once per message of a batch.

The classes are made from the table in ``facts``, in a pool of their own, so that nothing collides with what another library
registers in the common pool under the same names. The edition of the file distinguishes an unset field from a zero, and
rejects text that is not UTF-8. Enumerations are plain numbers, which have the same bytes, and may be newer than the table.

``start``, ``number`` and ``content`` write fields as bytes: protobuf's own objects cost 8 µs a message in Python, a multiple
of the time that the Proxy takes. Fields may be in any order, so fields that many messages share are made once.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, duration_pb2, message_factory, timestamp_pb2

from rocketmq_spark.grpc_proxy.facts import FIELDS, PACKAGE, ProtoField

_VARINT, _LENGTH_DELIMITED = 0, 2
_KEPT = 1 << 14


class _Varints(dict[int, bytes]):
    """Numbers as protobuf writes them; the small ones, which are asked for again and again, are kept."""

    def __missing__(self, number: int) -> bytes:
        made, left = bytearray(), number
        while left > 0x7F:
            made.append(left & 0x7F | 0x80)
            left >>= 7
        made.append(left)
        varint = bytes(made)
        if number < _KEPT:
            self[number] = varint
        return varint


# Of lengths and other numbers that are not negative.
VARINTS = _Varints()


@functools.cache
def start(message: str, name: str) -> bytes:
    """What a field begins with; behind it stand the length and the content, or a number."""
    (field,) = (one for one in FIELDS if (one.message, one.name) == (message, name))
    delimited = field.kind not in ("enum", "int32", "int64", "bool")
    return VARINTS[field.number << 3 | (_LENGTH_DELIMITED if delimited else _VARINT)]


def number(message: str, name: str, value: int) -> bytes:
    """A field of kind ``enum``, or a number that is not negative."""
    return start(message, name) + VARINTS[value]


def content(message: str, name: str, data: bytes) -> bytes:
    """A field that is a text as UTF-8, bytes, or the fields of another message."""
    return start(message, name) + VARINTS[len(data)] + data


# An entry of a map is a message of two fields.
MAP_KEY, MAP_VALUE = (VARINTS[which << 3 | _LENGTH_DELIMITED] for which in (1, 2))


_FILE = "rocketmq_spark/grpc_proxy.proto"
# No clock and no lock can wait for longer than some centuries; no caller needs a year.
_MAX_SECONDS = 365 * 86_400
_KNOWN = {"time": "google.protobuf.Timestamp", "duration": "google.protobuf.Duration"}
_TYPES: Mapping[str, Any] = {
    name: getattr(descriptor_pb2.FieldDescriptorProto, f"TYPE_{name.upper()}")
    for name in ("string", "bytes", "bool", "int32", "int64", "float")
} | {"enum": descriptor_pb2.FieldDescriptorProto.TYPE_INT32}
_MESSAGE = descriptor_pb2.FieldDescriptorProto.TYPE_MESSAGE
_OPTIONAL, _REPEATED = (
    descriptor_pb2.FieldDescriptorProto.LABEL_OPTIONAL,
    descriptor_pb2.FieldDescriptorProto.LABEL_REPEATED,
)


@functools.cache
def proto(name: str) -> Any:
    """The class of a message of the table."""
    return message_factory.GetMessageClass(_pool().FindMessageTypeByName(f"{PACKAGE}.{name}"))


@functools.cache
def _pool() -> descriptor_pool.DescriptorPool:
    pool = descriptor_pool.DescriptorPool()
    for known in (timestamp_pb2, duration_pb2):
        pool.AddSerializedFile(known.DESCRIPTOR.serialized_pb)
    pool.Add(_file())
    return pool


def _file() -> descriptor_pb2.FileDescriptorProto:
    file = descriptor_pb2.FileDescriptorProto(name=_FILE, package=PACKAGE, syntax="editions")
    file.edition = descriptor_pb2.EDITION_2023
    file.dependency.extend(known.DESCRIPTOR.name for known in (timestamp_pb2, duration_pb2))
    for name in dict.fromkeys(field.message for field in FIELDS):
        made = file.message_type.add(name=name)
        for field in (field for field in FIELDS if field.message == name):
            _add(made, field)
    return file


def _add(message: descriptor_pb2.DescriptorProto, field: ProtoField) -> None:
    made = message.field.add(name=field.name, number=field.number, label=_REPEATED if field.repeated else _OPTIONAL)
    if field.kind in _TYPES:
        made.type = _TYPES[field.kind]
        return
    made.type = _MESSAGE
    if field.kind == "map":
        made.label = _REPEATED
        entry = message.nested_type.add(name=f"{field.name.title().replace('_', '')}Entry")
        entry.options.map_entry = True
        for number, name in enumerate(("key", "value"), 1):
            entry.field.add(name=name, number=number, label=_OPTIONAL, type=_TYPES["string"])
        made.type_name = f".{PACKAGE}.{message.name}.{entry.name}"
    else:
        made.type_name = "." + _KNOWN.get(field.kind, f"{PACKAGE}.{field.kind}")


def set_ms(timestamp: Any, epoch_ms: int) -> None:
    """Fill in a field of kind ``time``."""
    timestamp.seconds, rest = divmod(epoch_ms, 1000)
    timestamp.nanos = rest * 1_000_000


def get_ms(timestamp: Any) -> int:
    """The milliseconds since 1970 of a field of kind ``time``."""
    return int(timestamp.seconds) * 1000 + int(timestamp.nanos) // 1_000_000


def set_seconds(duration: Any, seconds: float) -> None:
    """Fill in a field of kind ``duration``."""
    us = round(seconds * 1_000_000)
    duration.seconds, rest = divmod(us, 1_000_000)
    duration.nanos = rest * 1000


def get_seconds(duration: Any) -> float:
    """The seconds of a field of kind ``duration``, from 0 to a year."""
    return float(min(max(0.0, duration.seconds + duration.nanos / 1e9), _MAX_SECONDS))
