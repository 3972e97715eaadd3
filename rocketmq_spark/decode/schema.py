"""The columns of the source: one table for Spark's types, Arrow's types and their order."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import pyarrow as pa

from rocketmq_spark.errors import OptionError
from rocketmq_spark.options import Options

if TYPE_CHECKING:
    from pyspark.sql.types import StructType

TIMESTAMP = pa.timestamp("us", tz="UTC")
# The years 1 to 9999, which Spark and Python can show. Senders choose the born timestamp, so it may be anything.
EARLIEST_MS, LATEST_MS = -62_135_596_800_000, 253_402_300_799_999
KEYS = pa.list_(pa.string())
PROPERTIES = pa.map_(pa.string(), pa.string())


@dataclass(frozen=True, slots=True)
class Column:
    """A column's name, its type in Spark's DDL and in Arrow; ``property`` is what it is promoted from."""

    name: str
    ddl: str
    arrow: pa.DataType
    property: str | None = None


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


# What ``metadata=full`` adds.
FULL: tuple[Column, ...] = (
    Column("offsetMsgId", "string", pa.string()),
    Column("flag", "int", pa.int32()),
    Column("sysFlag", "int", pa.int32()),
    Column("reconsumeTimes", "int", pa.int32()),
    Column("bornHost", "string", pa.string()),
    Column("storeHost", "string", pa.string()),
    Column("commitLogOffset", "bigint", pa.int64()),
    Column("storeSize", "int", pa.int32()),
)

# What ``metadata=full`` adds with ``badMessage=null``, as the last one.
DECODE_ERROR = Column("decodeError", "string", pa.string())

_PROMOTED = {
    "string": pa.string(),
    "boolean": pa.bool_(),
    "int": pa.int32(),
    "bigint": pa.int64(),
    "float": pa.float32(),
    "double": pa.float64(),
    "date": pa.date32(),
    "timestamp": TIMESTAMP,
    "binary": pa.binary(),
}


def columns_of(options: Options) -> tuple[Column, ...]:
    """The columns that the options ask for, in schema order. Raises ``OptionError``."""
    known = {column.name.lower(): column for column in (*BASIC, *FULL, DECODE_ERROR)}
    promoted = tuple(Column(name, kind, _PROMOTED[kind], name) for name, kind in options.property_columns)
    problems = [
        f"option 'propertyColumns' names {column.name!r}, which is a column already"
        for column in promoted
        if column.name.lower() in known
    ]
    errors = (DECODE_ERROR,) if options.bad_message == "null" else ()
    available = (*BASIC, *promoted) if options.metadata != "full" else (*BASIC, *FULL, *promoted, *errors)
    if not options.columns:
        wanted = available
    else:
        by_name = {column.name.lower(): column for column in (*BASIC, *FULL, *promoted, *errors)}
        problems += [
            f"option 'columns' names {name!r}; expected any of {', '.join(c.name for c in by_name.values())}"
            for name in options.columns
            if name.lower() not in by_name
        ]
        chosen = {name.lower() for name in options.columns}
        wanted = tuple(column for lower, column in by_name.items() if lower in chosen)
    if problems:
        raise OptionError.of(problems)
    return wanted


def chosen(columns: tuple[Column, ...], schema: StructType) -> tuple[Column, ...]:
    """``columns`` as a schema given to ``.schema(…)`` picks and orders them. Raises ``OptionError``."""
    by_name = {column.name.lower(): column for column in columns}
    problems, found = [], []
    for field in schema.fields:
        column = by_name.get(field.name.lower())
        kind = field.dataType.simpleString()
        if column is None:
            problems.append(f"the schema names {field.name!r}; the columns are {ddl(columns)}")
        elif kind != column.ddl:
            problems.append(f"the schema has {field.name!r} as {kind}; it is {column.ddl}")
        else:
            found.append(replace(column, name=field.name))
    if problems:
        raise OptionError.of(problems)
    return tuple(found)


def ddl(columns: tuple[Column, ...] = BASIC) -> str:
    """The columns as a Spark schema text."""
    return ", ".join(
        f"`{column.name}` {column.ddl}" if column.property else f"{column.name} {column.ddl}" for column in columns
    )


@functools.lru_cache(maxsize=32)
def arrow_schema(columns: tuple[Column, ...] = BASIC) -> pa.Schema:
    """What every record batch of these columns must carry; all fields are nullable, as Spark expects."""
    return pa.schema([pa.field(column.name, column.arrow) for column in columns])
