"""Property texts to typed columns. A text that is not of the type becomes null: unknown, never zero."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, date, datetime
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from rocketmq_spark.source.schema import TIMESTAMP

_BOOLEANS = {"true": True, "false": False, "1": True, "0": False}


def cast(texts: pa.Array, kind: pa.DataType) -> pa.Array:
    """``texts`` as ``kind``: all at once where every text fits, else one by one."""
    if pa.types.is_string(kind):
        return texts
    if pa.types.is_binary(kind):
        return texts.cast(pa.binary())
    if kind != TIMESTAMP and not pa.types.is_boolean(kind):
        try:
            return pc.cast(texts, kind)
        except pa.ArrowInvalid:
            pass  # at least one text does not fit
    convert = _converter(kind)
    return pa.array([None if text is None else convert(text.strip()) for text in texts.to_pylist()], kind)


def _converter(kind: pa.DataType) -> Callable[[str], Any]:
    def convert(text: str) -> Any:
        try:
            value = _parse(text, kind)
            pa.scalar(value, kind)
        except (ValueError, OverflowError, pa.ArrowInvalid):
            return None
        return value

    return convert


def _parse(text: str, kind: pa.DataType) -> Any:
    if pa.types.is_boolean(kind):
        return _BOOLEANS.get(text.lower())
    if pa.types.is_integer(kind):
        return int(text)
    if pa.types.is_floating(kind):
        return float(text)
    if pa.types.is_date(kind):
        return date.fromisoformat(text)
    # Times: ISO-8601, without a zone in UTC, or epoch milliseconds.
    if text.lstrip("-").isdigit():
        return int(text) * 1000
    moment = datetime.fromisoformat(text)
    return moment if moment.tzinfo else moment.replace(tzinfo=UTC)
