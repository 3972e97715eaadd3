"""The permitted columns of rows and their types. All problems are reported at once.

The rules are the same for a DataFrame and for Arrow data: ``check_columns`` gets ``RowColumn`` values, whose kind is one of
``KINDS``. ``row_columns`` makes these values from an Arrow schema, and ``converted_batch`` converts the columns of an Arrow batch
to the types that the encoder reads.

``message_batch`` makes the columns of messages, with a few passes over all messages instead of many steps per message. Pure.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from rocketmq_spark.base import codes
from rocketmq_spark.base.java import java_hash
from rocketmq_spark.base.threads import Failure, capture
from rocketmq_spark.columnar import arrow
from rocketmq_spark.columnar.encode.properties import MESSAGE_ID, BadRows
from rocketmq_spark.errors import MessageRefused, OptionError
from rocketmq_spark.model import Message, MessageQueue
from rocketmq_spark.options.names import kafka_column_hint
from rocketmq_spark.options.transport import TransportFeatures
from rocketmq_spark.wire.properties import message_problem

# The text in an error that names the permitted types of each column.
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
_NAMES_BY_LOWER = {name.lower(): name for name in COLUMNS}
TEXT, BYTES, INT, LONG, TIMESTAMP, TEXTS, TEXT_MAP = KINDS = (
    "string",
    "binary",
    "int",
    "long",
    "timestamp",
    "array<string>",
    "map<string,string>",
)
_ACCEPTED_KINDS: dict[str, tuple[str, ...]] = {
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
    """The name and type of a column. ``shown_type`` is the type for errors. A ``kind`` that is not in ``KINDS`` is never
    permitted.
    """

    name: str
    kind: str
    shown_type: str

    def fits(self, role: str) -> bool:
        return self.kind in _ACCEPTED_KINDS.get(role, (TEXT,))

    def type_problem(self, expected: str) -> str:
        return f"column {self.name!r} is {self.shown_type}; expected {expected}"


def check_columns(
    columns: Sequence[RowColumn], topic: str | None, selector: object = None, row_id: str | None = None
) -> tuple[dict[str, str], list[str]]:
    """The columns by role, including the column of the row id, and the problems with the columns. ``selector`` is None if the
    user set no selector.
    """
    column_by_role, problems = _columns_by_role(columns, row_id)
    if row_id is not None:
        problems += _row_id_problems(columns, row_id, column_by_role)
    column_names = {column.name.lower() for column in columns}
    if not column_names & {"body", "value"}:
        problems.append("column 'body' (or 'value') is missing; it becomes the message's body")
    if "topic" not in column_names and topic is None:
        problems.append("there is neither option 'topic' nor a column 'topic'")
    return column_by_role, problems + _selector_problems(column_by_role, column_names, selector)


def check_features(column_by_role: Mapping[str, str], features: TransportFeatures) -> list[str]:
    """The problems with columns that a transport does not support."""
    problems = []
    if "priority" in column_by_role and not features.supports_priorities:
        problems.append(
            f"column {column_by_role['priority']!r} is for messages over gRPC only; expected option 'transport' grpc"
        )
    if "partition" in column_by_role and features.queue_choice_problem:
        problems.append("column 'partition' has no effect over gRPC, where the server chooses queues: drop it")
    return problems


def _columns_by_role(columns: Sequence[RowColumn], row_id: str | None) -> tuple[dict[str, str], list[str]]:
    known_names = _NAMES_BY_LOWER.keys() if row_id is None else {*_NAMES_BY_LOWER, row_id.lower()}
    unknown_names = [column.name for column in columns if column.name.lower() not in known_names]
    problems = (
        [
            _unknown_columns_problem(
                unknown_names, [column.name for column in columns if column.name.lower() in known_names]
            )
        ]
        if unknown_names
        else []
    )
    column_by_role: dict[str, str] = {}
    for column in columns:
        name = column.name.lower()
        if name not in _NAMES_BY_LOWER:
            continue
        if name in column_by_role or (name in ("body", "value") and "body" in column_by_role):
            problems.append(f"column {column.name!r} is there twice")
        elif not column.fits(name):
            problems.append(column.type_problem(COLUMNS[_NAMES_BY_LOWER[name]]))
        else:
            column_by_role["body" if name == "value" else name] = column.name
    return column_by_role, problems


def _unknown_columns_problem(names: Sequence[str], known_names: Sequence[str]) -> str:
    subject = f"column {names[0]!r} is" if len(names) == 1 else f"columns {', '.join(map(repr, names))} are"
    hints = "".join(kafka_column_hint(name, for_sink=True) for name in names)
    if {"body", "value"} & {name.lower() for name in known_names}:
        remedy = f"select only columns of the sink: select({[*known_names]})"
    else:
        remedy = "name the column of the body, and omit the others: selectExpr('… AS body')"
    return f"{subject} unknown; the sink takes {', '.join(COLUMNS)}{hints}; {remedy}"


def _row_id_problems(columns: Sequence[RowColumn], row_id: str, column_by_role: dict[str, str]) -> list[str]:
    id_columns = [column for column in columns if column.name.lower() == row_id.lower()]
    if len(id_columns) != 1:
        columns_text = "several columns of the DataFrame have" if id_columns else "no column of the DataFrame has"
        return [f"option 'messageId' is {row_id!r}, but {columns_text} that name"]
    if not id_columns[0].fits(MESSAGE_ID):
        return [id_columns[0].type_problem("string or bigint, since option 'messageId' names it")]
    column_by_role[MESSAGE_ID] = id_columns[0].name
    return []


def _selector_problems(column_by_role: Mapping[str, str], column_names: set[str], selector: object) -> list[str]:
    problems = []
    if selector == "column" and "queueid" not in column_names:
        problems.append("queueSelector 'column' needs a column 'queueId'")
    if selector == "hash" and "shardingkey" not in column_names:
        problems.append("queueSelector 'hash' needs a column 'shardingKey'")
    if selector not in ("column", None) and "queueid" in column_names:
        problems.append(
            f"column {column_by_role.get('queueid', 'queueId')!r} has no effect with queueSelector {selector!r}"
        )
    if "brokername" in column_names and "queueid" not in column_names:
        problems.append("column 'brokerName' needs a column 'queueId'")
    return problems


def _is_text(arrow_type: pa.DataType) -> bool:
    return bool(
        pa.types.is_string(arrow_type) or pa.types.is_large_string(arrow_type) or pa.types.is_string_view(arrow_type)
    )


def _is_bytes(arrow_type: pa.DataType) -> bool:
    is_view = pa.types.is_binary_view(arrow_type) or pa.types.is_fixed_size_binary(arrow_type)
    return bool(pa.types.is_binary(arrow_type) or pa.types.is_large_binary(arrow_type) or is_view)


def _is_list(arrow_type: pa.DataType) -> bool:
    return bool(pa.types.is_list(arrow_type) or pa.types.is_large_list(arrow_type)) and _is_text(arrow_type.value_type)


def _is_map(arrow_type: pa.DataType) -> bool:
    return bool(pa.types.is_map(arrow_type)) and _is_text(arrow_type.key_type) and _is_text(arrow_type.item_type)


# Python's integers are 64-bit numbers in Arrow. Timestamps need a time zone, because without one they are ambiguous.
_KINDS_OF_ARROW: tuple[tuple[Callable[[pa.DataType], bool], str, pa.DataType], ...] = (
    (_is_text, TEXT, pa.string()),
    (_is_bytes, BYTES, pa.binary()),
    (lambda arrow_type: bool(pa.types.is_integer(arrow_type)) and arrow_type != pa.uint64(), INT, pa.int64()),
    (
        lambda arrow_type: bool(pa.types.is_timestamp(arrow_type)) and arrow_type.tz is not None,
        TIMESTAMP,
        pa.timestamp("us", "UTC"),
    ),
    (_is_list, TEXTS, pa.list_(pa.string())),
    (_is_map, TEXT_MAP, pa.map_(pa.string(), pa.string())),
)


# The kinds of columns whose Arrow type may be ``null``. For null bodies, an error names the rows. In the other columns, null
# means any queue.
_KINDS_OF_NULLS = {"body": BYTES, "value": BYTES, "shardingkey": TEXT, "queueid": INT, "brokername": TEXT}


def row_columns(schema: pa.Schema) -> list[RowColumn]:
    """The columns of an Arrow schema. Columns of type ``null`` are omitted, except those of ``_KINDS_OF_NULLS``."""
    return [
        RowColumn(field.name, _kind(field.name, field.type), str(field.type))
        for field in schema
        if not pa.types.is_null(field.type) or field.name.lower() in _KINDS_OF_NULLS
    ]


def _kind(name: str, arrow_type: pa.DataType) -> str:
    if pa.types.is_null(arrow_type):
        return _KINDS_OF_NULLS[name.lower()]
    if pa.types.is_dictionary(arrow_type):
        arrow_type = arrow_type.value_type
    return next((kind for fits, kind, _ in _KINDS_OF_ARROW if fits(arrow_type)), "")


def converted_batch(batch: pa.RecordBatch, columns: Mapping[str, str]) -> pa.RecordBatch:
    """The ``columns`` with a role, converted to the types that the encoder reads."""
    names = list(columns.values())
    return pa.RecordBatch.from_arrays([_converted_column(batch.column(name), name) for name in names], names=names)


def converted_bytes(batch: pa.RecordBatch) -> int:
    """The approximate size of ``converted_batch``'s result, in which values that rows share are repeated for each row."""
    return sum(_column_bytes(column) for column in batch.columns)


def _column_bytes(column: pa.Array) -> int:
    arrow_type = column.type
    if pa.types.is_dictionary(arrow_type):
        values = column.dictionary
        if not (_is_text(values.type) or _is_bytes(values.type)):
            return int(column.nbytes)
        sizes = _sizes(values)[column.indices.drop_null().to_numpy()]
    elif pa.types.is_string_view(arrow_type) or pa.types.is_binary_view(arrow_type):
        sizes = _sizes(column)
    else:
        return int(column.nbytes)
    return int(sizes.sum()) + 4 * len(column)


def _sizes(values: pa.Array) -> npt.NDArray[np.int64]:
    """The length of each text. For a null row, this may be any length up to that of the data."""
    if not (pa.types.is_string_view(values.type) or pa.types.is_binary_view(values.type)):
        sizes: npt.NDArray[np.int64] = pc.fill_null(pc.binary_length(values).cast(pa.int64()), 0).to_numpy()
        return sizes
    views = np.frombuffer(values.buffers()[1], np.int32).reshape(-1, 4)  # a view begins with the length
    return views[values.offset : values.offset + len(values), 0].astype(np.int64)


def _converted_column(column: pa.Array, name: str) -> pa.Array:
    arrow_type = column.type.value_type if pa.types.is_dictionary(column.type) else column.type
    if pa.types.is_null(arrow_type):
        arrow_type = next(encoder_type for _, kind, encoder_type in _KINDS_OF_ARROW if kind == _kind(name, arrow_type))
    target_type = next((encoder_type for fits, _, encoder_type in _KINDS_OF_ARROW if fits(arrow_type)), pa.binary())
    if column.type == target_type:
        return column
    # Nanoseconds are truncated to microseconds.
    is_exact = not (pa.types.is_timestamp(arrow_type) and arrow_type.unit == "ns")
    try:
        if pa.types.is_dictionary(column.type):
            return column.dictionary.cast(target_type, safe=is_exact).take(column.indices)
        return column.cast(target_type, safe=is_exact)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as e:
        raise MessageRefused(f"column {name!r} is {column.type}, which cannot be read as {target_type}: {e}") from e


_BODY_TYPES = (bytes, bytearray, memoryview)
_SEPARATOR = codes.KEY_SEPARATOR
_NO_PROPERTIES: dict[str, str] = {}
# The maximum size of a column, whose offsets are signed 32-bit numbers.
MAX_COLUMN_BYTES = 2**31 - 1
# The role of a column with Java's hash of each sharding key. This role is used if some keys are not texts, because the hash of
# a number differs from the hash of its text.
KEY_HASH = "keyhash"

ShardingKeyOf = Callable[[Message], object]


def message_batch(
    messages: Sequence[Message],
    bad_rows: BadRows,
    queue: MessageQueue | None = None,
    sharding_key_of: ShardingKeyOf | None = None,
) -> pa.RecordBatch:
    """The columns of ``messages`` by role, without columns that no message needs. Raises an error if a message has a value of a
    wrong type.

    ``queue`` is the queue of all messages. ``sharding_key_of`` returns the sharding key of a message, or None for any queue.
    """
    try:
        arrays = _columns(messages, bad_rows, sharding_key_of)
    except Exception:
        for number, message in enumerate(messages):
            problem = message_problem(message)
            if problem is None and isinstance(
                failure := capture(_columns, [message], BadRows(), sharding_key_of), Failure
            ):
                problem = str(failure)
            if problem is not None:
                bad_rows.add_rows(np.array([number]), problem)
        bad_rows.raise_if_any()
        raise
    if queue is not None:
        arrays["queueid"] = arrow.integers(np.full(len(messages), queue.queue_id, np.int64), pa.int64())
        arrays["brokername"] = arrow.constant_column(queue.broker_name, len(messages))
    return pa.RecordBatch.from_arrays(list(arrays.values()), names=list(arrays))


def _columns(
    messages: Sequence[Message], bad_rows: BadRows, sharding_key_of: ShardingKeyOf | None
) -> dict[str, pa.Array]:
    arrays = {"body": _bodies([each.body for each in messages]), "topic": _topics([each.topic for each in messages])}
    if any(tags := [each.tags for each in messages]):
        arrays["tags"] = _texts(["" if tag is None else tag for tag in tags])
    if any(keys := [each.keys for each in messages]):
        arrays["keys"] = _keys(keys, bad_rows)
    if any(property_maps := [each.properties for each in messages]):
        arrays["properties"] = _maps(property_maps)
    if any(flags := [each.flag for each in messages]):
        arrays["flag"] = _numbers(flags)
    priorities = [each.priority for each in messages]
    if (count_without_priority := priorities.count(None)) < len(messages):
        arrays["priority"] = _numbers([each or 0 for each in priorities])
        if count_without_priority:
            bad_rows.add(_none_mask(priorities), "it has no priority, and others have one: send it with another call")
    if not {*map(type, waits_for_store := [each.wait_store_ok for each in messages])} <= {bool}:
        raise TypeError("wait_store_ok must be True or False")
    if not all(waits_for_store):
        bad_rows.add(~np.array(waits_for_store, np.bool_), "its wait_store_ok is False: send it with send")
    if sharding_key_of is not None:
        sharding_keys = [sharding_key_of(message) for message in messages]
        texts = _texts(["" if sharding_key is None else str(sharding_key) for sharding_key in sharding_keys])
        arrays["shardingkey"] = (
            pc.if_else(pa.array(_none_mask(sharding_keys)), None, texts) if None in sharding_keys else texts
        )
        if not {*map(type, sharding_keys)} <= {str, type(None)}:
            arrays[KEY_HASH] = _hashes(sharding_keys, bad_rows)
    return arrays


def _hashes(sharding_keys: Sequence[object], bad_rows: BadRows) -> pa.Array:
    hashes = np.zeros(len(sharding_keys), np.int64)
    for row, sharding_key in enumerate(sharding_keys):
        if sharding_key is None:
            continue
        try:
            hashes[row] = java_hash(sharding_key)
        except OptionError as e:
            bad_rows.add_rows(np.array([row]), f"its key: {e.message}")
    return arrow.integers(hashes, pa.int64())


def _none_mask(values: Sequence[object]) -> Any:
    return np.fromiter((each is None for each in values), np.bool_, len(values))


def _bodies(bodies: list[Any]) -> pa.Array:
    if not {*map(type, bodies)} <= {bytes}:
        for body in bodies:
            if not isinstance(body, _BODY_TYPES):
                raise TypeError(f"the message body is {type(body).__name__}; expected bytes")
        bodies = [bytes(body) for body in bodies]
    return _binary(b"".join(bodies), bodies, pa.binary())


def _topics(topics: list[str]) -> pa.Array:
    all_same = topics.count(topics[0]) == len(topics) and isinstance(topics[0], str)
    return arrow.constant_column(topics[0], len(topics)) if all_same else _texts(topics)


def _texts(texts: Sequence[str]) -> pa.Array:
    joined = "".join(texts)
    if joined.isascii():
        return _binary(joined.encode(), texts, pa.string())
    encoded = [text.encode() for text in texts]
    return _binary(b"".join(encoded), encoded, pa.string())


def _binary(content: bytes, values: Sequence[Any], arrow_type: pa.DataType) -> pa.Array:
    if len(content) > MAX_COLUMN_BYTES:
        raise MessageRefused(
            f"{len(values)} messages have {len(content)} bytes together, but at most {MAX_COLUMN_BYTES} can be sent at once",
            remedy="Send large messages with send",
        )
    return pa.Array.from_buffers(arrow_type, len(values), [None, pa.py_buffer(_offsets(values)), pa.py_buffer(content)])


def _offsets(values: Sequence[Any]) -> Any:
    offsets = np.zeros(len(values) + 1, np.int32)
    np.cumsum(np.fromiter(map(len, values), np.int64, len(values)), out=offsets[1:])
    return offsets


def _keys(keys: Sequence[Sequence[str]], bad_rows: BadRows) -> pa.Array:
    texts = [_SEPARATOR.join(each) if each else "" for each in keys]
    if _SEPARATOR in "".join(texts):
        for row, (text, each) in enumerate(zip(texts, keys, strict=True)):
            if each and text.count(_SEPARATOR) >= len(each):
                bad_key = next(key for key in each if _SEPARATOR in key)
                bad_rows.add_rows(np.array([row]), f"key {bad_key!r} has a blank, and RocketMQ splits keys at blanks")
    return _texts(texts)


def _maps(property_maps: Sequence[Any]) -> pa.Array:
    maps = [each or _NO_PROPERTIES for each in property_maps]
    values = [value for each in maps for value in each.values()]
    if None in values:  # omitted, as in Java
        maps = [{name: value for name, value in each.items() if value is not None} for each in maps]
        values = [value for each in maps for value in each.values()]
    names = [name for each in maps for name in each]
    if not {*map(type, names), *map(type, values)} <= {str}:
        if not all(isinstance(part, str) for part in (*names, *values)):
            raise TypeError("names and values of properties must be str")
        values = [str(value) for value in values]
    return pa.MapArray.from_arrays(arrow.integers(_offsets(maps), pa.int32()), _texts(names), _texts(values))


def _numbers(numbers: Sequence[int]) -> pa.Array:
    if not {*map(type, numbers)} <= {int}:
        raise TypeError("flag and priority are whole numbers")
    return arrow.integers(np.array(numbers, np.int64), pa.int64())
