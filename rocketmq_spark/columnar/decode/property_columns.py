"""Property texts as typed columns.

``cast`` converts texts to a column's type. A text that is not of the type becomes null, never zero. One pattern per type
(docs/options.md has the table) defines which texts are valid, so the result for a text does not depend on the other texts of
the column. Arrow's own cast accepts more texts than the patterns. So Arrow casts only texts on which its cast and the pattern
agree.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from datetime import UTC, date, datetime
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from rocketmq_spark.columnar.decode.schema import EARLIEST_MS, LATEST_MS, TIMESTAMP

_BOOLEANS = {"true": True, "false": False, "1": True, "0": False}
_BLANKS = " \t\r\n"
_INTEGER = re.compile(r"[+-]?[0-9]{1,40}")
_NUMBER = re.compile(r"[+-]?([0-9]+(\.[0-9]*)?|\.[0-9]+)([eE][+-]?[0-9]+)?|NaN|[+-]?(Infinity|inf)", re.IGNORECASE)
_DATE = re.compile(r"[0-9]{4}-[0-9]{2}-[0-9]{2}")
_TIME = re.compile(
    r"[0-9]{4}-[0-9]{2}-[0-9]{2}([T ][0-9]{2}:[0-9]{2}(:[0-9]{2}([.,][0-9]{1,6})?)?(Z|[+-][0-9]{2}:?[0-9]{2})?)?"
)

# For texts of these forms, Arrow's cast agrees with the patterns above. The texts are too short to overflow.
_ARROW_PATTERNS = {
    pa.int32(): "^-?[0-9]{1,9}$",
    pa.int64(): "^-?[0-9]{1,18}$",
    pa.float64(): r"^-?[0-9]{1,30}(\.[0-9]{1,30})?$",
}


def cast(texts: pa.Array, kind: pa.DataType) -> pa.Array:
    """``texts`` as ``kind``: cast in one call if all texts are in the plain form that Arrow accepts; otherwise parsed one by
    one.
    """
    if pa.types.is_string(kind):
        return texts
    if pa.types.is_binary(kind):
        return texts.cast(pa.binary())
    if kind == pa.float32():  # always through float64, because rounding twice can differ from rounding once
        return cast(texts, pa.float64()).cast(kind, safe=False)
    plain_pattern = _ARROW_PATTERNS.get(kind)
    if plain_pattern is not None and pc.all(pc.match_substring_regex(texts, plain_pattern)).as_py() is not False:
        return pc.cast(texts, kind)
    parse = _PARSERS[kind]
    return pa.array([None if text is None else parse(text.strip(_BLANKS)) for text in texts.to_pylist()], kind)


def _integer_parser(bits: int) -> Callable[[str], int | None]:
    def parse(text: str) -> int | None:
        value = int(text) if _INTEGER.fullmatch(text) else None
        return value if value is not None and -(1 << bits) <= value < 1 << bits else None

    return parse


def _parse_number(text: str) -> float | None:
    return float(text) if _NUMBER.fullmatch(text) else None


def _parse_date(text: str) -> date | None:
    try:
        return date.fromisoformat(text) if _DATE.fullmatch(text) else None
    except ValueError:
        return None


def _parse_time(text: str) -> int | None:
    """The microseconds of a text in ISO-8601 (UTC if the text has no zone) or in epoch milliseconds."""
    if _INTEGER.fullmatch(text):
        ms = int(text)
        return ms * 1000 if EARLIEST_MS <= ms <= LATEST_MS else None
    if not _TIME.fullmatch(text):
        return None
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        return None
    time_since_epoch = (moment if moment.tzinfo else moment.replace(tzinfo=UTC)) - datetime(1970, 1, 1, tzinfo=UTC)
    micros = (time_since_epoch.days * 86_400 + time_since_epoch.seconds) * 1_000_000 + time_since_epoch.microseconds
    return micros if EARLIEST_MS <= micros // 1000 <= LATEST_MS else None


_PARSERS: dict[pa.DataType, Callable[[str], Any]] = {
    pa.bool_(): lambda text: _BOOLEANS.get(text.lower()) if text.isascii() else None,
    pa.int32(): _integer_parser(31),
    pa.int64(): _integer_parser(63),
    pa.float64(): _parse_number,
    pa.date32(): _parse_date,
    TIMESTAMP: _parse_time,
}
