"""The permitted columns of rows and their types. All problems are reported at once.

The rules are the same for a DataFrame and for Arrow data: ``check_columns`` gets ``RowColumn`` values, whose kind is a word of
``KINDS``. ``of_arrow`` makes them from an Arrow schema, ``plain_batch`` converts its columns to the types that the encoder reads.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from rocketmq_spark.columnar.encode.properties import MESSAGE_ID
from rocketmq_spark.errors import MessageRefused
from rocketmq_spark.options.names import of_kafka_column
from rocketmq_spark.options.transport import TransportFeatures

# Name, permitted kinds, and their text in an error.
COLUMNS: dict[str, str] = {
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
_NAMES = {name.lower(): name for name in COLUMNS}
TEXT, BYTES, INT, LONG, TIMESTAMP, TEXTS, TEXT_MAP = KINDS = (
    "string",
    "binary",
    "int",
    "long",
    "timestamp",
    "array<string>",
    "map<string,string>",
)
_TAKEN: dict[str, tuple[str, ...]] = {
    "body": (TEXT, BYTES),
    "value": (TEXT, BYTES),
    "keys": (TEXT, TEXTS),
    "properties": (TEXT_MAP,),
    "queueid": (INT,),
    "delaylevel": (INT,),
    "delayms": (INT, LONG),
    "deliverat": (TIMESTAMP,),
    "flag": (INT,),
    "priority": (INT,),
    MESSAGE_ID: (TEXT, INT, LONG),
}


class RowColumn(NamedTuple):
    """A column with its name and type as the user sees them; a ``kind`` that is not in ``KINDS`` is never permitted."""

    name: str
    kind: str
    shown: str

    def fits(self, role: str) -> bool:
        return self.kind in _TAKEN.get(role, (TEXT,))

    def wrong(self, expected: str) -> str:
        return f"column {self.name!r} is {self.shown}; expected {expected}"


def check_columns(
    columns: Sequence[RowColumn], topic: str | None, selector: object = None, row_id: str | None = None
) -> tuple[dict[str, str], list[str]]:
    """The columns by role, including that of the row id, and the problems with them.

    ``selector`` is None if the user set none.
    """
    by_role, problems = _known_columns(columns, row_id)
    if row_id is not None:
        problems += _row_id(columns, row_id, by_role)
    named = {column.name.lower() for column in columns}
    if not named & {"body", "value"}:
        problems.append("column 'body' (or 'value') is missing; it is what a message carries")
    if "topic" not in named and topic is None:
        problems.append("there is neither option 'topic' nor a column 'topic'")
    return by_role, problems + _needs(by_role, named, selector)


def check_features(by_role: Mapping[str, str], features: TransportFeatures) -> list[str]:
    """The problems with columns that a transport does not support."""
    if "priority" in by_role and not features.priorities:
        return [f"column {by_role['priority']!r} is for messages over gRPC only; expected option 'transport' grpc"]
    return []


def _known_columns(columns: Sequence[RowColumn], row_id: str | None) -> tuple[dict[str, str], list[str]]:
    problems = []
    by_role: dict[str, str] = {}
    for column in columns:
        name = column.name.lower()
        if name not in _NAMES:
            if row_id is None or name != row_id.lower():
                hint = of_kafka_column(column.name, sink=True)
                problems.append(f"column {column.name!r} is unknown; the sink takes {', '.join(COLUMNS)}{hint}")
        elif name in by_role or (name in ("body", "value") and "body" in by_role):
            problems.append(f"column {column.name!r} is there twice")
        elif not column.fits(name):
            problems.append(column.wrong(COLUMNS[_NAMES[name]]))
        else:
            by_role["body" if name == "value" else name] = column.name
    return by_role, problems


def _row_id(columns: Sequence[RowColumn], row_id: str, by_role: dict[str, str]) -> list[str]:
    found = [column for column in columns if column.name.lower() == row_id.lower()]
    if len(found) != 1:
        many = "several columns of the DataFrame are" if found else "no column of the DataFrame is"
        return [f"option 'messageId' is {row_id!r}, but {many} called so"]
    if not found[0].fits(MESSAGE_ID):
        return [found[0].wrong("string or bigint, since option 'messageId' names it")]
    by_role[MESSAGE_ID] = found[0].name
    return []


def _needs(by_role: Mapping[str, str], named: set[str], selector: object) -> list[str]:
    problems = []
    if selector == "column" and "queueid" not in named:
        problems.append("queueSelector 'column' needs a column 'queueId'")
    if selector == "hash" and "shardingkey" not in named:
        problems.append("queueSelector 'hash' needs a column 'shardingKey'")
    if selector not in ("column", None) and "queueid" in named:
        problems.append(f"column {by_role.get('queueid', 'queueId')!r} has no effect with queueSelector {selector!r}")
    if "brokername" in named and "queueid" not in named:
        problems.append("column 'brokerName' needs a column 'queueId'")
    return problems


def _is_text(kind: pa.DataType) -> bool:
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind))


def _is_bytes(kind: pa.DataType) -> bool:
    views = pa.types.is_binary_view(kind) or pa.types.is_fixed_size_binary(kind)
    return bool(pa.types.is_binary(kind) or pa.types.is_large_binary(kind) or views)


def _is_list(kind: pa.DataType) -> bool:
    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind)) and _is_text(kind.value_type)


def _is_map(kind: pa.DataType) -> bool:
    return bool(pa.types.is_map(kind)) and _is_text(kind.key_type) and _is_text(kind.item_type)


# Python's integers are 64-bit numbers in Arrow. Timestamps need a time zone, because without one they are ambiguous.
_OF_ARROW: tuple[tuple[Callable[[pa.DataType], bool], str, pa.DataType], ...] = (
    (_is_text, TEXT, pa.string()),
    (_is_bytes, BYTES, pa.binary()),
    (lambda kind: bool(pa.types.is_integer(kind)) and kind != pa.uint64(), INT, pa.int64()),
    (lambda kind: bool(pa.types.is_timestamp(kind)) and kind.tz is not None, TIMESTAMP, pa.timestamp("us", "UTC")),
    (_is_list, TEXTS, pa.list_(pa.string())),
    (_is_map, TEXT_MAP, pa.map_(pa.string(), pa.string())),
)


def of_arrow(schema: pa.Schema) -> list[RowColumn]:
    """The columns of an Arrow schema. Columns of type null are omitted."""
    return [
        RowColumn(field.name, _kind(field.type), str(field.type))
        for field in schema
        if not pa.types.is_null(field.type) or field.name.lower() in ("body", "value")
    ]


def _kind(kind: pa.DataType) -> str:
    if pa.types.is_null(kind):
        return BYTES
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    return next((name for fits, name, _ in _OF_ARROW if fits(kind)), "")


def plain_batch(batch: pa.RecordBatch, columns: Mapping[str, str]) -> pa.RecordBatch:
    """The ``columns`` with a role, converted to the types that the encoder reads."""
    names = list(columns.values())
    return pa.RecordBatch.from_arrays([_plain(batch.column(name), name) for name in names], names=names)


def plain_bytes(batch: pa.RecordBatch) -> int:
    """The approximate size of ``plain_batch``'s result, in which values that rows share are repeated for each row."""
    return sum(_bytes(column) for column in batch.columns)


def _bytes(column: pa.Array) -> int:
    kind = column.type
    if pa.types.is_dictionary(kind):
        values = column.dictionary
        if not (_is_text(values.type) or _is_bytes(values.type)):
            return int(column.nbytes)
        sizes = _sizes(values)[column.indices.drop_null().to_numpy()]
    elif pa.types.is_string_view(kind) or pa.types.is_binary_view(kind):
        sizes = _sizes(column)
    else:
        return int(column.nbytes)
    return int(sizes.sum()) + 4 * len(column)


def _sizes(values: pa.Array) -> npt.NDArray[np.int64]:
    """The length of each text. Null rows have any length up to that of the data."""
    if not (pa.types.is_string_view(values.type) or pa.types.is_binary_view(values.type)):
        sizes: npt.NDArray[np.int64] = pc.fill_null(pc.binary_length(values).cast(pa.int64()), 0).to_numpy()
        return sizes
    views = np.frombuffer(values.buffers()[1], np.int32).reshape(-1, 4)  # a view begins with the length
    return views[values.offset : values.offset + len(values), 0].astype(np.int64)


def _plain(column: pa.Array, name: str) -> pa.Array:
    kind = column.type.value_type if pa.types.is_dictionary(column.type) else column.type
    target = next((wanted for fits, _, wanted in _OF_ARROW if fits(kind)), pa.binary())
    if column.type == target:
        return column
    # Nanoseconds are truncated to microseconds.
    safe = not (pa.types.is_timestamp(kind) and kind.unit == "ns")
    try:
        if pa.types.is_dictionary(column.type):
            return column.dictionary.cast(target, safe=safe).take(column.indices)
        return column.cast(target, safe=safe)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as e:
        raise MessageRefused(f"column {name!r} is {column.type}, which cannot be read as {target}: {e}") from e
