"""Spark schemas from their text without a session, which Spark's own parser needs."""

from __future__ import annotations

import re

from pyspark.sql import types

_SIMPLE: dict[str, types.DataType] = {
    kind().simpleString(): kind()
    for kind in (
        types.BinaryType, types.BooleanType, types.ByteType, types.DateType, types.DoubleType, types.FloatType,
        types.IntegerType, types.LongType, types.ShortType, types.StringType, types.TimestampType,
    )
}  # fmt: skip


def struct(ddl: str) -> types.StructType:
    """``body binary, keys array<string>`` as a schema."""
    fields = [part.strip().split(" ", 1) for part in re.split(r",(?![^<]*>)", ddl)]
    return types.StructType([types.StructField(name.strip("`"), _kind(kind)) for name, kind in fields])


def _kind(text: str) -> types.DataType:
    if match := re.fullmatch(r"array<(.+)>", text):
        return types.ArrayType(_kind(match[1]))
    if match := re.fullmatch(r"map<(.+),(.+)>", text):
        return types.MapType(_kind(match[1]), _kind(match[2]))
    return _SIMPLE[text]
