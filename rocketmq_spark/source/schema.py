"""The columns of the source: one table for Spark's types, Arrow's types and their order."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import pyarrow as pa

TIMESTAMP = pa.timestamp("us", tz="UTC")
KEYS = pa.list_(pa.string())
PROPERTIES = pa.map_(pa.string(), pa.string())


@dataclass(frozen=True, slots=True)
class Column:
    """A column's name, its type in Spark's DDL and in Arrow."""

    name: str
    ddl: str
    arrow: pa.DataType


BASIC: tuple[Column, ...] = (
    Column("topic", "string", pa.string()),
    Column("brokerName", "string", pa.string()),
    Column("queueId", "int", pa.int32()),
    Column("queueOffset", "bigint", pa.int64()),
    Column("body", "binary", pa.binary()),
    Column("tags", "string", pa.string()),
    Column("keys", "array<string>", KEYS),
    Column("bornTimestamp", "timestamp", TIMESTAMP),
    Column("storeTimestamp", "timestamp", TIMESTAMP),
    Column("msgId", "string", pa.string()),
    Column("properties", "map<string,string>", PROPERTIES),
)


def ddl(columns: tuple[Column, ...] = BASIC) -> str:
    """The columns as a Spark schema text."""
    return ", ".join(f"{column.name} {column.ddl}" for column in columns)


@functools.lru_cache(maxsize=32)
def arrow_schema(columns: tuple[Column, ...] = BASIC) -> pa.Schema:
    """What every record batch of these columns must carry; all fields are nullable, as Spark expects."""
    return pa.schema([pa.field(column.name, column.arrow) for column in columns])
