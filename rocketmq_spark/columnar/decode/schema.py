"""The columns of the source, each as one entry of ``BASIC_COLUMNS`` or ``FULL_COLUMNS``, and option ``badMessage``.

An entry has the column's types in Spark and Arrow, a function that makes the column from located messages (``MessageRows``, the
fast path), and a function that returns the value of one message (the reference decoder).
"""

from __future__ import annotations

import functools
import json
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol

import pyarrow as pa

from rocketmq_spark.base.codes import Property
from rocketmq_spark.errors import DecodeError, OptionError
from rocketmq_spark.model import MessageQueue, ReceivedMessage
from rocketmq_spark.options import Options
from rocketmq_spark.options.names import kafka_column_hint
from rocketmq_spark.wire.properties import is_reserved

if TYPE_CHECKING:
    from pyspark.sql.types import StructType

logger = logging.getLogger(__name__)

TIMESTAMP = pa.timestamp("us", tz="UTC")
# The years 1 to 9999, which Spark and Python can show. Senders choose the born timestamp, so it may have any value. A time
# outside these years is null. If such a time became the end of the year 9999, watermarks would move to the year 9999, and Spark
# would drop all later rows.
EARLIEST_MS, LATEST_MS = -62_135_596_800_000, 253_402_300_799_999
KEYS_TYPE = pa.list_(pa.string())
PROPERTIES_TYPE = pa.map_(pa.string(), pa.string())


class MessageRows(Protocol):
    """Located messages, implemented by ``rows.ColumnBuilder``."""

    def queue_text(self, field: str) -> pa.Array: ...
    def queue_id(self, kind: pa.DataType) -> pa.Array: ...
    def number(self, field: str, kind: pa.DataType) -> pa.Array: ...
    def timestamp(self, field: str, kind: pa.DataType) -> pa.Array: ...
    def host(self, field: str) -> pa.Array: ...
    def flags(self, kind: pa.DataType) -> pa.Array: ...
    def tags(self) -> pa.Array: ...
    def keys(self) -> pa.Array: ...
    def properties(self) -> pa.Array: ...
    def offset_message_id(self) -> pa.Array: ...
    def message_id(self) -> pa.Array: ...
    def null_column(self, kind: pa.DataType) -> pa.Array: ...


FromRows = Callable[[MessageRows, pa.DataType], pa.Array]
# Returns a column's value from queue, message, and option ``includeProperties``.
FromMessage = Callable[[MessageQueue, ReceivedMessage, str], Any]


@dataclass(frozen=True, slots=True)
class Column:
    """A column's name, and its types in Spark's DDL and in Arrow. For a column of a property, ``property`` is the name of the
    property.

    If ``from_rows`` is None, the column is copied portion by portion. A message that cannot be decoded has values only in columns
    for which ``is_of_queue`` is true.
    """

    name: str
    ddl: str
    arrow_type: pa.DataType
    property: str | None = None
    from_rows: FromRows | None = field(default=None, compare=False, repr=False)
    from_message: FromMessage | None = field(default=None, compare=False, repr=False)
    is_of_queue: bool = field(default=False, compare=False, repr=False)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickles the column without its functions, because tasks have the same table of columns."""
        return _column_by_name, (self.name, self.ddl, self.property)


def is_time(column: Column) -> bool:
    """Whether a column is a timestamp of the message, and not one of its properties."""
    return column.property is None and column.arrow_type == TIMESTAMP


def _column_by_name(name: str, ddl: str, property_name: str | None) -> Column:
    if property_name is not None:
        return Column(name, ddl, _PROPERTY_TYPES[ddl], property_name)
    column = next(
        c for c in (*BASIC_COLUMNS, *FULL_COLUMNS, DECODE_ERROR, *KAFKA, HEADERS) if c.name.lower() == name.lower()
    )
    return replace(column, name=name)


def _message_column(
    name: str, ddl: str, arrow_type: pa.DataType, from_rows: FromRows | None, from_message: FromMessage
) -> Column:
    return Column(name, ddl, arrow_type, None, from_rows, from_message)


def _queue_column(
    name: str, ddl: str, arrow_type: pa.DataType, from_rows: FromRows, from_message: FromMessage
) -> Column:
    return Column(name, ddl, arrow_type, None, from_rows, from_message, True)


def _microseconds(ms: int) -> int | None:
    return ms * 1000 if EARLIEST_MS <= ms <= LATEST_MS else None


def _keys(text: str | None) -> list[str] | None:
    return None if text is None else [key for key in text.split(" ") if key]


def _properties(properties: Mapping[str, str], include_properties: str) -> list[tuple[str, str]] | None:
    if include_properties == "none":
        return None
    return [(name, value) for name, value in properties.items() if include_properties == "all" or not is_reserved(name)]


# fmt: off
BASIC_COLUMNS: tuple[Column, ...] = (
    _queue_column("topic", "string", pa.string(),
              lambda rows, kind: rows.queue_text("topic"), lambda queue, m, _: queue.topic),
    _queue_column("brokerName", "string", pa.string(),
              lambda rows, kind: rows.queue_text("broker_name"), lambda queue, m, _: queue.broker_name),
    _queue_column("queueId", "int", pa.int32(),
              lambda rows, kind: rows.number("queueId", kind),
              lambda queue, m, _: queue.queue_id if m.decode_error and m.queue_id < 0 else m.queue_id),
    _queue_column("queueOffset", "bigint", pa.int64(),
              lambda rows, kind: rows.number("queueOffset", kind), lambda queue, m, _: m.queue_offset),
    _message_column("body", "binary", pa.binary(), None, lambda queue, m, _: None if m.decode_error else m.body),
    _message_column("tags", "string", pa.string(),
         lambda rows, kind: rows.tags(), lambda queue, m, _: m.properties.get(Property.TAGS)),
    _message_column("keys", "array<string>", KEYS_TYPE,
         lambda rows, kind: rows.keys(), lambda queue, m, _: _keys(m.properties.get(Property.KEYS))),
    _message_column("bornTimestamp", "timestamp", TIMESTAMP,
         lambda rows, kind: rows.timestamp("bornTimestamp", kind),
         lambda queue, m, _: _microseconds(m.born_timestamp)),
    _message_column("storeTimestamp", "timestamp", TIMESTAMP,
         lambda rows, kind: rows.timestamp("storeTimestamp", kind),
         lambda queue, m, _: _microseconds(m.store_timestamp)),
    _message_column("msgId", "string", pa.string(), lambda rows, kind: rows.message_id(), lambda queue, m, _: m.msg_id),
    _message_column("properties", "map<string,string>", PROPERTIES_TYPE,
         lambda rows, kind: rows.properties(), lambda queue, m, include: _properties(m.properties, include)),
)

# Columns that ``metadata=full`` adds.
FULL_COLUMNS: tuple[Column, ...] = (
    _message_column("offsetMsgId", "string", pa.string(),
         lambda rows, kind: rows.offset_message_id(), lambda queue, m, _: m.offset_msg_id),
    _message_column("flag", "int", pa.int32(), lambda rows, kind: rows.number("flag", kind), lambda queue, m, _: m.flag),
    _message_column("sysFlag", "int", pa.int32(), lambda rows, kind: rows.flags(kind), lambda queue, m, _: m.sys_flag),
    _message_column("reconsumeTimes", "int", pa.int32(),
         lambda rows, kind: rows.number("reconsumeTimes", kind), lambda queue, m, _: m.reconsume_times),
    _message_column("bornHost", "string", pa.string(),
         lambda rows, kind: rows.host("bornHost"), lambda queue, m, _: m.born_host),
    _message_column("storeHost", "string", pa.string(),
         lambda rows, kind: rows.host("storeHost"), lambda queue, m, _: m.store_host),
    _message_column("commitLogOffset", "bigint", pa.int64(),
         lambda rows, kind: rows.number("commitLogOffset", kind), lambda queue, m, _: m.commit_log_offset),
    _message_column("storeSize", "int", pa.int32(),
         lambda rows, kind: rows.number("size", kind), lambda queue, m, _: m.store_size),
)

# The last column of ``metadata=full`` with ``badMessage=null``.
DECODE_ERROR = _queue_column("decodeError", "string", pa.string(),
                         lambda rows, kind: rows.null_column(kind), lambda queue, m, _: m.decode_error)

# The queue id from which ``partition`` is made. The name has a leading space, so that it differs from all names of users'
# columns.
READ_QUEUE_ID = _queue_column(" read queue id", "int", pa.int32(),
                          lambda rows, kind: rows.queue_id(kind), lambda queue, m, _: queue.queue_id)
# fmt: on

# The columns of Spark's Kafka source, which ``decode.kafka`` makes from this source's own columns.
KAFKA: tuple[Column, ...] = (
    Column("key", "binary", pa.binary()),
    Column("value", "binary", pa.binary()),
    Column("topic", "string", pa.string()),
    Column("partition", "int", pa.int32()),
    Column("offset", "bigint", pa.int64()),
    Column("timestamp", "timestamp", TIMESTAMP),
    Column("timestampType", "int", pa.int32()),
)
_HEADER_TYPE = pa.struct([pa.field("key", pa.string()), pa.field("value", pa.binary())])
HEADERS = Column("headers", "array<struct<key:string,value:binary>>", pa.list_(_HEADER_TYPE))

_PROPERTY_TYPES = {
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
    """The columns that the options select, in schema order. Raises ``OptionError``."""
    basic_columns: tuple[Column, ...] = BASIC_COLUMNS
    if options.kafka_columns:
        basic_columns = (*KAFKA, HEADERS) if options.include_headers else KAFKA
    known_names = {column.name.lower() for column in (*BASIC_COLUMNS, *FULL_COLUMNS, DECODE_ERROR, *basic_columns)}
    property_columns = tuple(Column(name, kind, _PROPERTY_TYPES[kind], name) for name, kind in options.property_columns)
    problems = [
        f"option 'propertyColumns' names {column.name!r}, which is a column already"
        for column in property_columns
        if column.name.lower() in known_names
    ]
    if options.kafka_columns and options.metadata == "full":
        problems.append("option 'metadata' is 'full', whose columns 'kafkaColumns' does not have: give one of the two")
    if options.include_headers and not options.kafka_columns:
        problems.append("option 'includeHeaders' needs 'kafkaColumns': without it, headers are the column properties")
    if options.include_headers and options.include_properties == "none":
        problems.append(
            "option 'includeProperties' is 'none', and 'includeHeaders' needs the properties: give one of the two"
        )
    full_columns = () if options.kafka_columns else FULL_COLUMNS
    error_columns = (DECODE_ERROR,) if full_columns and options.bad_message == "null" else ()
    if not options.columns:
        selected_columns = (
            (*basic_columns, *full_columns, *property_columns, *error_columns)
            if options.metadata == "full"
            else (*basic_columns, *property_columns)
        )
    else:
        column_by_name = {
            column.name.lower(): column for column in (*basic_columns, *full_columns, *property_columns, *error_columns)
        }
        problems += [
            f"option 'columns' names {name!r}; expected any of {', '.join(c.name for c in column_by_name.values())}"
            f"{kafka_column_hint(name)}"
            for name in options.columns
            if name.lower() not in column_by_name
        ]
        chosen_names = {name.lower() for name in options.columns}
        selected_columns = tuple(column for lower, column in column_by_name.items() if lower in chosen_names)
    if problems:
        raise OptionError.of(problems)
    return selected_columns


def columns_of_schema(columns: tuple[Column, ...], schema: StructType) -> tuple[Column, ...]:
    """The columns that a schema given to ``.schema(…)`` selects, in its order. Raises ``OptionError``."""
    column_by_name = {column.name.lower(): column for column in columns}
    problems, selected_columns = [], []
    for schema_field in schema.fields:
        column = column_by_name.get(schema_field.name.lower())
        spark_type = schema_field.dataType.simpleString()
        if column is None:
            problems.append(
                f"the schema names {schema_field.name!r}; the columns are {ddl(columns)}{kafka_column_hint(schema_field.name)}"
            )
        elif spark_type != column.ddl:
            problems.append(f"the schema has {schema_field.name!r} as {spark_type}; it is {column.ddl}")
        else:
            selected_columns.append(replace(column, name=schema_field.name))
    if problems:
        raise OptionError.of(problems)
    return tuple(selected_columns)


def ddl(columns: tuple[Column, ...] = BASIC_COLUMNS) -> str:
    """The columns as a Spark schema text."""
    return ", ".join(
        f"`{column.name}` {column.ddl}" if column.property else f"{column.name} {column.ddl}" for column in columns
    )


@functools.lru_cache(maxsize=32)
def arrow_schema(columns: tuple[Column, ...] = BASIC_COLUMNS) -> pa.Schema:
    """The schema of every record batch of these columns; all fields are nullable, as Spark expects."""
    return pa.schema([pa.field(column.name, column.arrow_type) for column in columns])


_MAX_LOGGED = 10
_REMEDY = (
    "Look at it with: rocketmq-spark tail {topic} --no-follow --count 1 --from '{place}'; to continue, set option "
    "'badMessage' to 'null' (a row whose body is null, with "
    "the cause in column decodeError of metadata=full) or to 'skip' (it is counted and logged)"
)


def undecodable_error(
    queue: MessageQueue, offset: int, reason: str, message_text: str = "the message at"
) -> DecodeError:
    """Return the error of ``badMessage=fail``. The remedy has the command that shows the message."""
    start_json = json.dumps({queue.topic: {queue.broker_name: {str(queue.queue_id): offset}}}, separators=(",", ":"))
    remedy = _REMEDY.format(topic=queue.topic, place=start_json)
    text = f"{message_text} offset {offset} cannot be decoded: {reason}"
    return DecodeError(text, topic=queue.topic, queue=str(queue), remedy=remedy)


class BadMessages:
    """Handles a task's bad messages as option ``badMessage`` says, and counts them. Logs the first bad messages, and at the end
    of the task the number of all bad messages.

    Also counts times outside the years 1 to 9999. Such times are null, whatever ``badMessage`` says.
    """

    def __init__(self, policy: str = "fail") -> None:
        self.policy = policy
        self.count = 0
        # By column: queue and offset of the first message with an impossible time, and the number of these messages.
        self._impossible_times: dict[str, tuple[MessageQueue, int, int]] = {}

    @property
    def fails(self) -> bool:
        return self.policy == "fail"

    @property
    def skips(self) -> bool:
        return self.policy == "skip"

    def add(self, queue: MessageQueue, offset: int, reason: str) -> None:
        """Raises an error for a bad message, or counts it."""
        if self.fails:
            raise undecodable_error(queue, offset, reason)
        self.count += 1
        if self.count <= _MAX_LOGGED:
            row_text = "is left out" if self.skips else "its row has no body"
            logger.warning(
                "%s: the message at offset %d cannot be decoded, and %s: %s", queue, offset, row_text, reason
            )

    def add_impossible_times(self, column: str, queue: MessageQueue, offset: int, count: int) -> None:
        """Counts ``count`` messages whose time in ``column`` is impossible; the first of them is at ``offset``."""
        first_queue, first_offset, previous_count = self._impossible_times.get(column, (queue, offset, 0))
        self._impossible_times[column] = first_queue, first_offset, previous_count + count

    def log_summary(self) -> None:
        """Logs the numbers of bad messages and of impossible times; call it at the end of a task."""
        if self.count > _MAX_LOGGED:
            logger.warning("%d messages in all cannot be decoded; badMessage=%s", self.count, self.policy)
        for column, (queue, offset, count) in sorted(self._impossible_times.items()):
            rows = f"{count} row{'s' if count > 1 else ''}"
            text = (
                "%s is null in %s, because the time is outside the years 1 to 9999; the first row is at offset %d of %s"
            )
            logger.warning(text, column, rows, offset, queue)
