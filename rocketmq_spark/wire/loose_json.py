"""Reads the JSON that RocketMQ's servers write, which is not always JSON.

Two things a strict parser rejects are common: map keys that are bare numbers, ``{0:"host"}``, and map keys that are
objects, ``{{"queueId":0}:1}``. Wherever a value starts, the strict parser is tried first, because it is written in C; only
containers that it rejects are parsed here. This module does not depend on the bodies of particular requests.
"""

from __future__ import annotations

import json
import re
from typing import Any

from rocketmq_spark.errors import RemoteProtocolError
from rocketmq_spark.wire.header import Bytes

_MAX_DEPTH = 32  # real bodies have five levels; each level may cost one more pass over the levels below it
# An answer about 200,000 queues has 40 MiB. The objects of a larger body would need too much memory.
_MAX_BYTES = 64 << 20
# For each error the strict parser counts all lines before it, which is slow. After this many errors it is not tried any more.
_MAX_TRIES = 1000

_strict = json.JSONDecoder()
_SPACE = re.compile(r"[ \t\r\n]*")
_BARE_KEY = re.compile(r"-?[0-9]+|null|true|false")


def read_json(body: Bytes) -> Any:
    """The value of a whole body; raises ``RemoteProtocolError`` for anything else.

    A bare key becomes its text, ``"0"``; an object as key becomes the tuple of its (name, value) pairs, sorted by name.
    """
    if len(body) > _MAX_BYTES:
        raise RemoteProtocolError(f"A JSON body of {len(body)} bytes; expected at most {_MAX_BYTES}")
    try:
        text = str(body, "utf-8")
        try:
            return json.loads(text)
        except json.JSONDecodeError:
            value, end = _Walk(text).value(_skip(text, 0), 0)
        if _skip(text, end) != len(text):
            raise ValueError(f"something follows the value at {end}")
    except (ValueError, RecursionError) as exc:
        raise RemoteProtocolError(f"Unreadable JSON body: {exc or type(exc).__name__}") from exc
    return value


def _skip(text: str, at: int) -> int:
    match = _SPACE.match(text, at)
    return match.end() if match else at


class _Walk:
    """Parses the containers of a text that the strict parser rejects."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._tries = _MAX_TRIES

    def value(self, at: int, depth: int) -> tuple[Any, int]:
        """The value that starts at ``at``, and the position of its end."""
        if depth > _MAX_DEPTH:
            raise ValueError(f"nested too deeply at {at}")
        first = self._text[at : at + 1]
        walks = {"{": self._object, "[": self._array}
        if self._tries or first not in walks:
            try:
                return _strict.raw_decode(self._text, at)
            except json.JSONDecodeError:
                self._tries -= 1
        if first not in walks:
            raise ValueError(f"no value at {at}")
        return walks[first](at, depth)

    def _object(self, at: int, depth: int) -> tuple[dict[Any, Any], int]:
        text, items = self._text, dict[Any, Any]()
        at = _skip(text, at + 1)
        if text[at : at + 1] == "}":
            return items, at + 1
        while True:
            key, at = self._key(at, depth)
            at = _skip(text, at)
            if text[at : at + 1] != ":":
                raise ValueError(f"no colon at {at}")
            items[key], at = self.value(_skip(text, at + 1), depth + 1)
            at, more = _separator(text, at, "}")
            if not more:
                return items, at

    def _array(self, at: int, depth: int) -> tuple[list[Any], int]:
        text, values = self._text, list[Any]()
        at = _skip(text, at + 1)
        if text[at : at + 1] == "]":
            return values, at + 1
        while True:
            value, at = self.value(at, depth + 1)
            values.append(value)
            at, more = _separator(text, at, "]")
            if not more:
                return values, at

    def _key(self, at: int, depth: int) -> tuple[Any, int]:
        if self._text[at : at + 1] in ('"', "{"):
            key, end = self.value(at, depth + 1)
            return _freeze(key), end
        match = _BARE_KEY.match(self._text, at)
        if match is None:
            raise ValueError(f"no key at {at}")
        return match.group(), match.end()


def _separator(text: str, at: int, closing: str) -> tuple[int, bool]:
    """The position after a comma (then True: more values follow) or after the closing bracket."""
    at = _skip(text, at)
    char = text[at : at + 1]
    if char == ",":
        return _skip(text, at + 1), True
    if char == closing:
        return at + 1, False
    raise ValueError(f"neither comma nor {closing} at {at}")


def _freeze(value: Any) -> Any:
    if isinstance(value, dict):
        # Sorted by name alone: names differ, so values of different types are never compared.
        return tuple((name, _freeze(value[name])) for name in sorted(value, key=str))
    if isinstance(value, list):
        return tuple(map(_freeze, value))
    return value
