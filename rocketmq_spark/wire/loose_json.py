"""Reads the JSON that RocketMQ's servers write, which is not always JSON.

Two forms are common that a strict parser rejects: map keys that are bare numbers, ``{0:"host"}``, and map keys that are objects,
``{{"queueId":0}:1}``. The strict parser is tried first for every value, because it is written in C. This module parses only
containers that the strict parser rejects. This module does not know the bodies of particular requests.

A body may come from a hostile server. So the bytes and values of a body are limited before it is parsed. While it is parsed,
the values that are parsed here and the failed attempts of the strict parser are limited.
"""

from __future__ import annotations

import json
import re
from typing import Any

from rocketmq_spark.base.codes import MAX_JSON_BYTES, MAX_TABLE_BYTES
from rocketmq_spark.errors import RemoteProtocolError
from rocketmq_spark.wire.header import Bytes

_MAX_DEPTH = 32  # real bodies have five levels; each level may cost one more pass over the levels below it
# The strict parser is not used any more after this many errors: for each error it counts all lines before the error, which is
# slow.
_MAX_FAILED_ATTEMPTS = 1000
# A value takes up to 150 bytes of memory, and about a microsecond if it is parsed here.
_MAX_VALUES, _MAX_PARSED_VALUES = 1_000_000, 250_000
# The limits of values and of parsed values for tables of queues. Statistics of 200,000 queues have 1.6 million values, 400,000 of
# which are parsed here.
_MAX_TABLE_VALUES, _MAX_TABLE_PARSED_VALUES = 2_500_000, 1_250_000
# The maximum number of characters that the strict parser reads in failed attempts is ``_FAILED_PASSES`` times the length of the
# text, plus ``_FAILED_CHARACTERS``.
_FAILED_PASSES, _FAILED_CHARACTERS = 3, 1 << 20
_LINE_COUNT_SPEEDUP = 16  # counting lines for an error is this many times faster than parsing

_strict_decoder = json.JSONDecoder()
_SPACE = re.compile(r"[ \t\r\n]*")
_BARE_KEY = re.compile(r"-?[0-9]+|null|true|false")
_LONG = 1 << 63


def read_json(body: Bytes, is_table: bool = False) -> Any:
    """The value of a body. Raises ``RemoteProtocolError`` if the body is not one value.

    A bare key becomes its text, ``"0"``. An object as key becomes the tuple of its (name, value) pairs, sorted by name. With
    ``is_table``, the body may be as large as a table of 200,000 queues.
    """
    max_bytes = MAX_TABLE_BYTES if is_table else MAX_JSON_BYTES
    if len(body) > max_bytes:
        raise RemoteProtocolError(f"A JSON body of {len(body)} bytes; expected at most {max_bytes}")
    try:
        text = str(body, "utf-8")
        _check_values(text, _MAX_TABLE_VALUES if is_table else _MAX_VALUES)
        value, end = _LooseParser(text, _MAX_TABLE_PARSED_VALUES if is_table else _MAX_PARSED_VALUES).value(
            _skip_blanks(text, 0), 0
        )
        if _skip_blanks(text, end) != len(text):
            raise ValueError(f"the value ends at {end}, but more text follows")
    except (ValueError, RecursionError) as exc:
        raise RemoteProtocolError(f"Unreadable JSON body: {exc or type(exc).__name__}") from exc
    return value


def _check_values(text: str, max_values: int) -> None:
    """Raise ``ValueError`` for more than ``max_values`` values. Each value except the first follows a bracket or a comma, so
    this function counts brackets and commas. Those inside of texts count, too, but no server sends so many brackets and commas.
    """
    if len(text) > max_values and sum(map(text.count, ",{[")) > max_values:
        raise ValueError(f"it has more than {max_values} values")


def _skip_blanks(text: str, position: int) -> int:
    match = _SPACE.match(text, position)
    return match.end() if match else position


class _LooseParser:
    """Parses the containers of a text that the strict parser rejects: at most ``max_values`` values, nested ones included."""

    def __init__(self, text: str, max_values: int) -> None:
        self._text = text
        self._max_values = self._values_left = max_values
        self._attempts_left = _MAX_FAILED_ATTEMPTS
        self._failed_characters_left = _FAILED_PASSES * len(text) + _FAILED_CHARACTERS

    def value(self, position: int, depth: int) -> tuple[Any, int]:
        """The value that starts at ``position``, and the position of its end."""
        if depth > _MAX_DEPTH:
            raise ValueError(f"nested too deeply at {position}")
        self._values_left -= 1
        if self._values_left < 0:
            raise ValueError(f"more than {self._max_values} values are in containers that are not JSON")
        first_character = self._text[position : position + 1]
        parse_container = self._object if first_character == "{" else self._array if first_character == "[" else None
        if parse_container is None or self._attempts_left:
            try:
                return _strict_decoder.raw_decode(self._text, position)
            except json.JSONDecodeError as e:
                self._failed_characters_left -= e.pos - position + e.pos // _LINE_COUNT_SPEEDUP
                self._attempts_left = self._attempts_left - 1 if self._failed_characters_left > 0 else 0
        if parse_container is None:
            raise ValueError(f"no value at {position}")
        return parse_container(position, depth)

    def _object(self, position: int, depth: int) -> tuple[dict[Any, Any], int]:
        text, items = self._text, dict[Any, Any]()
        position = _skip_blanks(text, position + 1)
        if text[position : position + 1] == "}":
            return items, position + 1
        while True:
            key, position = self._key(position, depth)
            if text[position : position + 1] != ":":
                position = _skip_blanks(text, position)
                if text[position : position + 1] != ":":
                    raise ValueError(f"no colon at {position}")
            position += 1
            if text[position : position + 1] in _BLANKS:
                position = _skip_blanks(text, position)
            items[key], position = self.value(position, depth + 1)
            position, has_more = _separator(text, position, "}")
            if not has_more:
                return items, position

    def _array(self, position: int, depth: int) -> tuple[list[Any], int]:
        text, values = self._text, list[Any]()
        position = _skip_blanks(text, position + 1)
        if text[position : position + 1] == "]":
            return values, position + 1
        while True:
            value, position = self.value(position, depth + 1)
            values.append(value)
            position, has_more = _separator(text, position, "]")
            if not has_more:
                return values, position

    def _key(self, position: int, depth: int) -> tuple[Any, int]:
        if self._text[position : position + 1] in ('"', "{"):
            key, end = self.value(position, depth + 1)
            return _hashable_key(key), end
        match = _BARE_KEY.match(self._text, position)
        if match is None:
            raise ValueError(f"no key at {position}")
        return match.group(), match.end()


_BLANKS = " \t\r\n"


def _separator(text: str, position: int, closing: str) -> tuple[int, bool]:
    """The position after the comma or the closing bracket, and whether it was a comma, so that another value follows."""
    character = text[position : position + 1]
    if character in _BLANKS:
        position = _skip_blanks(text, position)
        character = text[position : position + 1]
    if character == ",":
        position += 1
        return (_skip_blanks(text, position) if text[position : position + 1] in _BLANKS else position), True
    if character == closing:
        return position + 1, False
    raise ValueError(f"neither comma nor {closing} at {position}")


def _hashable_key(value: Any) -> Any:
    if isinstance(value, dict):
        # Names differ, so the sort never compares values of different types.
        return tuple((name, _hashable_key(value[name])) for name in sorted(value, key=str))
    if isinstance(value, list):
        return tuple(map(_hashable_key, value))
    if isinstance(value, int) and not -_LONG <= value < _LONG:
        # A sender can choose any number of larger integers with the same hash in Python, which make a dict very slow.
        raise ValueError(f"the number {str(value)[:40]} in a key; expected 64 bits")
    return value
