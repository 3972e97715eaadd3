"""System property names, recognised for many messages at once, and property texts as typed columns.

``classify`` recognises a name by its first and last eight bytes and its length. That triple is exact for names of up to
sixteen bytes; the few longer system names are compared in full.

``cast`` converts texts to a column's type. A text that is not of the type becomes null, never zero. One pattern per type
(docs/options.md has the table) defines which texts are valid, whatever other texts the column has: Arrow's own cast accepts
more, so it only gets texts on which both agree.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from datetime import UTC, date, datetime
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from rocketmq_spark.base import codes
from rocketmq_spark.columnar.decode.schema import EARLIEST_MS, LATEST_MS, TIMESTAMP

Bytes = npt.NDArray[np.uint8]
Ints = npt.NDArray[np.int64]
Words = npt.NDArray[np.uint64]

USER = 0
TAGS, KEYS, UNIQ_KEY = 1, 2, 3
_SPECIAL = (codes.Property.TAGS, codes.Property.KEYS, codes.Property.UNIQ_KEY)
_PREFIX = codes.TRANSIENT_PROPERTY_PREFIX
# Names with the prefix are recognised by it.
_OTHER_NAMES = sorted(name for name in codes.RESERVED_PROPERTIES - set(_SPECIAL) if not name.startswith(_PREFIX))
NAMES: tuple[str, ...] = ("", *_SPECIAL, *_OTHER_NAMES)
IDS = {name: i for i, name in enumerate(NAMES) if i}

_MASKS = np.array([(1 << (8 * n)) - 1 for n in range(8)] + [(1 << 64) - 1], np.uint64)
_ROTATE = np.uint64(0x9E3779B97F4A7C15)
_BITS = np.uint64(52)


def is_system(name: str) -> bool:
    return name in IDS or name.startswith(_PREFIX)


def words(content: Bytes) -> Words:
    """The eight bytes at every position, little-endian; ``content`` must have eight bytes after the last position used."""
    return np.ndarray((len(content) - 7,), "<u8", content, strides=(1,))


def signatures(content: Bytes, starts: Ints, lengths: Ints) -> Words:
    """A number per name that differs for names that differ in length, first or last eight bytes."""
    at = words(content)
    first = at[starts] & _MASKS[np.minimum(lengths, 8)]
    tail = np.where(lengths > 8, at[np.maximum(starts + lengths - 8, 0)], np.uint64(0))
    with np.errstate(over="ignore"):
        mixed: Words = (first ^ (tail * _ROTATE) ^ (tail >> np.uint64(29))) + lengths.astype(np.uint64) * np.uint64(
            0xC2B2AE3D27D4EB4F
        )
    return mixed


def _signature_of(name: str) -> int:
    raw = np.frombuffer(name.encode() + bytes(8), np.uint8)
    return int(signatures(raw, np.array([0]), np.array([len(name.encode())]))[0])


def _hash_table() -> tuple[np.uint64, npt.NDArray[np.uint8], Words]:
    """A multiplier without collisions among the system's names, the id in each slot, and each id's signature."""
    assert len(_PREFIX) == 16, "the prefix is compared as two words"
    signature = np.array([0] + [_signature_of(name) for name in NAMES[1:]], np.uint64)
    assert len(set(signature.tolist())) == len(signature), "two system names share length, first and last eight bytes"
    multiplier = 0x9E3779B97F4A7C15
    while True:
        with np.errstate(over="ignore"):
            slots = ((signature[1:] * np.uint64(multiplier)) >> _BITS).astype(np.intp)
        if len(set(slots.tolist())) == len(slots):
            ids = np.zeros(1 << 12, np.uint8)
            ids[slots] = np.arange(1, len(NAMES))
            return np.uint64(multiplier), ids, signature
        multiplier = (multiplier * 6364136223846793005 + 1442695040888963407) & 0xFFFFFFFFFFFFFFFF


_PREFIX_WORDS = np.frombuffer(_PREFIX.encode(), "<u8")
_MULTIPLIER, _IDS_BY_SLOT, _SIGNATURES = _hash_table()
_LONG = np.array([len(name.encode()) > 16 for name in NAMES])


def classify(content: Bytes, starts: Ints, lengths: Ints, signature: Words) -> npt.NDArray[np.uint8]:
    """The id of each name (an index into ``NAMES``), 0 for the user's own."""
    with np.errstate(over="ignore"):
        candidate = _IDS_BY_SLOT[((signature * _MULTIPLIER) >> _BITS).astype(np.intp)]
    ids = np.where(_SIGNATURES[candidate] == signature, candidate, np.uint8(0))
    for i in np.flatnonzero(_LONG[ids]).tolist():
        if bytes(content[starts[i] : starts[i] + lengths[i]]).decode("utf-8", "replace") != NAMES[ids[i]]:
            ids[i] = 0
    at = words(content)
    long = np.flatnonzero(lengths >= len(_PREFIX))
    transient = (at[starts[long]] == _PREFIX_WORDS[0]) & (at[starts[long] + 8] == _PREFIX_WORDS[1])
    ids[long[transient]] = len(NAMES)
    return ids


_BOOLEANS = {"true": True, "false": False, "1": True, "0": False}
_BLANKS = " \t\r\n"
_INTEGER = re.compile(r"[+-]?[0-9]{1,40}")
_NUMBER = re.compile(r"[+-]?([0-9]+(\.[0-9]*)?|\.[0-9]+)([eE][+-]?[0-9]+)?|NaN|[+-]?(Infinity|inf)", re.IGNORECASE)
_DATE = re.compile(r"[0-9]{4}-[0-9]{2}-[0-9]{2}")
_TIME = re.compile(
    r"[0-9]{4}-[0-9]{2}-[0-9]{2}([T ][0-9]{2}:[0-9]{2}(:[0-9]{2}([.,][0-9]{1,6})?)?(Z|[+-][0-9]{2}:?[0-9]{2})?)?"
)

# Texts that Arrow casts as the patterns above define, in one call; they are too short to overflow.
_ARROW_PATTERNS = {
    pa.int32(): "^-?[0-9]{1,9}$",
    pa.int64(): "^-?[0-9]{1,18}$",
    pa.float64(): r"^-?[0-9]{1,30}(\.[0-9]{1,30})?$",
}


def cast(texts: pa.Array, kind: pa.DataType) -> pa.Array:
    """``texts`` as ``kind``: in one call if every text is a plain one, otherwise one by one."""
    if pa.types.is_string(kind):
        return texts
    if pa.types.is_binary(kind):
        return texts.cast(pa.binary())
    if kind == pa.float32():  # on both paths, because rounding twice can differ from rounding once
        return cast(texts, pa.float64()).cast(kind, safe=False)
    plain = _ARROW_PATTERNS.get(kind)
    if plain is not None and pc.all(pc.match_substring_regex(texts, plain)).as_py() is not False:
        return pc.cast(texts, kind)
    parse = _PARSERS[kind]
    return pa.array([None if text is None else parse(text.strip(_BLANKS)) for text in texts.to_pylist()], kind)


def _integer(bits: int) -> Callable[[str], int | None]:
    def parse(text: str) -> int | None:
        value = int(text) if _INTEGER.fullmatch(text) else None
        return value if value is not None and -(1 << bits) <= value < 1 << bits else None

    return parse


def _number(text: str) -> float | None:
    return float(text) if _NUMBER.fullmatch(text) else None


def _date(text: str) -> date | None:
    try:
        return date.fromisoformat(text) if _DATE.fullmatch(text) else None
    except ValueError:
        return None


def _time(text: str) -> int | None:
    """The microseconds of a text: ISO-8601 (UTC without a zone), or epoch milliseconds."""
    if _INTEGER.fullmatch(text):
        ms = int(text)
        return ms * 1000 if EARLIEST_MS <= ms <= LATEST_MS else None
    if not _TIME.fullmatch(text):
        return None
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        return None
    since = (moment if moment.tzinfo else moment.replace(tzinfo=UTC)) - datetime(1970, 1, 1, tzinfo=UTC)
    micros = (since.days * 86_400 + since.seconds) * 1_000_000 + since.microseconds
    return micros if EARLIEST_MS <= micros // 1000 <= LATEST_MS else None


_PARSERS: dict[pa.DataType, Callable[[str], Any]] = {
    pa.bool_(): lambda text: _BOOLEANS.get(text.lower()) if text.isascii() else None,
    pa.int32(): _integer(31),
    pa.int64(): _integer(63),
    pa.float64(): _number,
    pa.date32(): _date,
    TIMESTAMP: _time,
}
