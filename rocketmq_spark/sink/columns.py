"""Which columns a frame may have to be written, and a check that names all wrong ones at once."""

from __future__ import annotations

from pyspark.sql.types import ArrayType, BinaryType, DataType, MapType, StringType, StructType

from rocketmq_spark.errors import OptionError

_TEXT = (StringType,)
_BYTES = (StringType, BinaryType)

# Name, what it may be, and how that reads in a message.
TABLE: dict[str, str] = {
    "body": "string or binary",
    "value": "string or binary",
    "topic": "string",
    "tags": "string",
    "keys": "string or array<string>",
    "properties": "map<string,string>",
}


def _fits(name: str, kind: DataType) -> bool:
    if name in ("body", "value"):
        return isinstance(kind, _BYTES)
    if name == "keys":
        return isinstance(kind, _TEXT) or (isinstance(kind, ArrayType) and isinstance(kind.elementType, _TEXT))
    if name == "properties":
        return isinstance(kind, MapType) and isinstance(kind.keyType, _TEXT) and isinstance(kind.valueType, _TEXT)
    return isinstance(kind, _TEXT)


def check(schema: StructType, topic: str | None) -> dict[str, str]:
    """The frame's column for each name of the table. Raises one ``OptionError`` that lists everything wrong."""
    problems = []
    found: dict[str, str] = {}
    for field in schema.fields:
        name = field.name.lower()
        if name not in TABLE:
            problems.append(f"column {field.name!r} is unknown; the sink takes {', '.join(TABLE)}")
        elif name in found or (name in ("body", "value") and "body" in found):
            problems.append(f"column {field.name!r} is there twice")
        elif not _fits(name, field.dataType):
            problems.append(f"column {field.name!r} is {field.dataType.simpleString()}; expected {TABLE[name]}")
        else:
            found["body" if name == "value" else name] = field.name
    if "body" not in found and not any("'body'" in p or "'value'" in p for p in problems):
        problems.append("column 'body' (or 'value') is missing; it is what a message carries")
    if "topic" not in found and topic is None and not any("'topic'" in p for p in problems):
        problems.append("there is neither option 'topic' nor a column 'topic'")
    if problems:
        raise OptionError.of(problems)
    return found
