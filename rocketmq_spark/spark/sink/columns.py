"""Which columns a DataFrame may have to be written, and a check that names all wrong ones at once."""

from __future__ import annotations

from collections.abc import Mapping

from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    ByteType,
    DataType,
    IntegerType,
    LongType,
    MapType,
    ShortType,
    StringType,
    StructField,
    StructType,
    TimestampType,
)

from rocketmq_spark.columnar.encode.properties import MESSAGE_ID
from rocketmq_spark.options.names import of_kafka_column

_TEXT = (StringType,)
_BYTES = (StringType, BinaryType)
_INT = (ByteType, ShortType, IntegerType)
_LONG = (*_INT, LongType)

# Name, what it may be, and how that reads in a message.
TABLE: dict[str, str] = {
    "body": "string or binary",
    "value": "string or binary",
    "topic": "string",
    "tags": "string",
    "keys": "string or array<string>",
    "properties": "map<string,string>",
    "shardingKey": "string",
    "queueId": "int",
    "brokerName": "string",
    "delayLevel": "int",
    "delayMs": "bigint",
    "deliverAt": "timestamp",
    "flag": "int",
    "priority": "int",
}
_NAMES = {name.lower(): name for name in TABLE}
_SIMPLE: dict[str, tuple[type[DataType], ...]] = {
    "body": _BYTES,
    "value": _BYTES,
    "queueid": _INT,
    "delaylevel": _INT,
    "delayms": _LONG,
    "deliverat": (TimestampType,),
    "flag": _INT,
    "priority": _INT,
    MESSAGE_ID: (*_TEXT, *_LONG),
}
TIMERS = ("delayms", "deliverat")
DELAYS = ("delaylevel", *TIMERS)


def _fits(name: str, kind: DataType) -> bool:
    if name == "keys":
        return isinstance(kind, _TEXT) or (isinstance(kind, ArrayType) and isinstance(kind.elementType, _TEXT))
    if name == "properties":
        return isinstance(kind, MapType) and isinstance(kind.keyType, _TEXT) and isinstance(kind.valueType, _TEXT)
    return isinstance(kind, _SIMPLE.get(name, _TEXT))


def look(
    schema: StructType, topic: str | None, selector: object = None, row_id: str | None = None
) -> tuple[dict[str, str], list[str]]:
    """The DataFrame's columns by name, that of the row id too, and what is wrong with them.

    ``selector`` is None when the user named none.
    """
    by_role, problems = _known(schema, row_id)
    if row_id is not None:
        problems += _row_id(schema, row_id, by_role)
    named = {field.name.lower() for field in schema.fields}
    if not named & {"body", "value"}:
        problems.append("column 'body' (or 'value') is missing; it is what a message carries")
    if "topic" not in named and topic is None:
        problems.append("there is neither option 'topic' nor a column 'topic'")
    return by_role, problems + _needs(by_role, named, selector)


def _known(schema: StructType, row_id: str | None) -> tuple[dict[str, str], list[str]]:
    problems = []
    by_role: dict[str, str] = {}
    for field in schema.fields:
        name = field.name.lower()
        if name not in _NAMES:
            if row_id is None or name != row_id.lower():
                hint = of_kafka_column(field.name, sink=True)
                problems.append(f"column {field.name!r} is unknown; the sink takes {', '.join(TABLE)}{hint}")
        elif name in by_role or (name in ("body", "value") and "body" in by_role):
            problems.append(f"column {field.name!r} is there twice")
        elif not _fits(name, field.dataType):
            problems.append(_wrong(field, TABLE[_NAMES[name]]))
        else:
            by_role["body" if name == "value" else name] = field.name
    return by_role, problems


def _row_id(schema: StructType, row_id: str, by_role: dict[str, str]) -> list[str]:
    fields = [field for field in schema.fields if field.name.lower() == row_id.lower()]
    if len(fields) != 1:
        many = "several columns of the DataFrame are" if fields else "no column of the DataFrame is"
        return [f"option 'messageId' is {row_id!r}, but {many} called so"]
    if not _fits(MESSAGE_ID, fields[0].dataType):
        return [_wrong(fields[0], "string or bigint, since option 'messageId' names it")]
    by_role[MESSAGE_ID] = fields[0].name
    return []


def _needs(by_role: Mapping[str, str], named: set[str], selector: object) -> list[str]:
    problems = []
    if selector == "column" and "queueid" not in named:
        problems.append("queueSelector 'column' needs a column 'queueId'")
    if selector == "hash" and "shardingkey" not in named:
        problems.append("queueSelector 'hash' needs a column 'shardingKey'")
    if selector not in ("column", None) and "queueid" in named:
        problems.append(f"column {by_role.get('queueid', 'queueId')!r} means nothing with queueSelector {selector!r}")
    if "brokername" in named and "queueid" not in named:
        problems.append("column 'brokerName' needs a column 'queueId'")
    return problems


def _wrong(field: StructField, expected: str) -> str:
    return f"column {field.name!r} is {field.dataType.simpleString()}; expected {expected}"
