"""Fields of protobuf messages as bytes, for what is written once for each message of a batch. Pure.

Protobuf's own objects cost 8 µs a message in Python, a multiple of what the Proxy takes for it. Numbers come from the table of
facts; a message is its fields one after the other, in any order: so fields that many messages share are made once.
"""

from __future__ import annotations

import functools

from rocketmq_spark.grpc_proxy.facts import FIELDS

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
