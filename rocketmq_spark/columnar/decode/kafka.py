"""The columns of Spark's Kafka source (option ``kafkaColumns``), made of the columns of this source.

``key`` is the sharding key, or the keys joined by blanks. Texts that begin with ``BASE64_MARK`` are base64: RocketMQ stores keys
and properties as texts, so the sink writes bytes that are no text in this form (``encode.kafka``), and here they become bytes
again. A message that stands for one without a body (option ``emptyBodies`` of the sink) gets its null or empty value back.
"""

from __future__ import annotations

import base64
import binascii
import contextlib
from collections.abc import Mapping, Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from rocketmq_spark.base.codes import Property
from rocketmq_spark.columnar import arrow
from rocketmq_spark.columnar.decode.schema import BASIC, HEADERS, KAFKA, READ_QUEUE_ID, Column
from rocketmq_spark.model import MessageQueue
from rocketmq_spark.wire.properties import BASE64_MARK, DELETED, EMPTY_BODY, NULL_BODY, STAND_IN_BODY

# Their names are no names of columns that a user could give.
_SHARDING_KEY = Column(" sharding key", "string", pa.string(), Property.SHARDING_KEY)
_DELETED = Column(" deleted", "string", pa.string(), DELETED)
_OURS = {column.name: column for column in (*BASIC, READ_QUEUE_ID)}
# The columns that a column of Kafka is made of.
_PARTS = {
    "key": ("keys",),
    "value": ("body",),
    "topic": ("topic",),
    "partition": ("topic", READ_QUEUE_ID.name),
    "offset": ("queueOffset",),
    "timestamp": ("bornTimestamp",),
    "timestampType": (),
    "headers": ("body", "properties"),
}
_NAMES = {column.name.lower(): column.name for column in (*KAFKA, HEADERS)}


def parts(columns: Sequence[Column]) -> tuple[Column, ...]:
    """The columns to decode for ``columns``, those of properties included."""
    wanted = [column for column in columns if column.property is None]
    names = dict.fromkeys(part for column in wanted for part in _PARTS[_NAMES[column.name.lower()]])
    of_properties = [column for column in columns if column.property is not None]
    known = {column.name.lower() for column in wanted}
    keyed = [_SHARDING_KEY] if "key" in known else []
    deleted = [_DELETED] if known & {"value", "headers"} else []
    # Without any column, Spark still counts the rows.
    return (*(_OURS[name] for name in names or ("queueOffset",)), *keyed, *deleted, *of_properties)


def rows(
    batch: pa.RecordBatch, columns: Sequence[Column], broker_name: str, numbers: Mapping[MessageQueue, int]
) -> pa.RecordBatch:
    """The decoded ``parts`` of messages of one broker as ``columns``; ``numbers`` are the partitions of its queues."""
    made = [
        _property(batch.column(column.name))
        if column.property is not None
        else _made(batch, column, broker_name, numbers)
        for column in columns
    ]
    return pa.RecordBatch.from_arrays(made, schema=pa.schema([pa.field(c.name, c.arrow) for c in columns]))


def _property(values: pa.Array) -> pa.Array:
    """The values of a column of properties. Texts that are marked as base64 are the header's text, unless it was no text."""
    if not pa.types.is_string(values.type) or not pc.any(pc.starts_with(values, BASE64_MARK)).as_py():
        return values
    texts = values.to_pylist()
    for row, value in enumerate(unmarked(values).to_pylist()):
        with contextlib.suppress(UnicodeDecodeError):
            texts[row] = None if value is None else value.decode()
    return pa.array(texts, pa.string())


def _made(batch: pa.RecordBatch, column: Column, broker_name: str, numbers: Mapping[MessageQueue, int]) -> pa.Array:
    match _NAMES[column.name.lower()]:
        case "key":
            return _keys(batch)
        case "partition":
            return _partitions(batch, broker_name, numbers)
        case "timestampType":  # Kafka's number of "the time when the producer made the message"
            return arrow.integers(np.zeros(len(batch), np.int32), pa.int32())
        case "value":
            return _values(batch)
        case "headers":
            return _headers(batch)
        case name:
            return batch.column(_PARTS[name][0])


def _keys(batch: pa.RecordBatch) -> pa.Array:
    keys = batch.column("keys")
    found = batch.column(_SHARDING_KEY.name)
    if found.null_count and keys.null_count < len(keys):
        joined = pc.binary_join(keys, " ")
        found = pc.coalesce(found, pc.if_else(pc.equal(joined, ""), None, joined))
    return unmarked(found)


def _partitions(batch: pa.RecordBatch, broker_name: str, numbers: Mapping[MessageQueue, int]) -> pa.Array:
    """The number of each row's queue; null for a queue without a number."""
    topics = arrow.plain(batch.column("topic")).dictionary_encode()
    ids = batch.column(READ_QUEUE_ID.name).dictionary_encode()
    queues = [
        MessageQueue(topic, broker_name, queue_id)
        for topic in topics.dictionary.to_pylist()
        for queue_id in ids.dictionary.to_pylist()
    ]
    places = topics.indices.to_numpy().astype(np.int64) * len(ids.dictionary) + ids.indices.to_numpy()
    return pa.array([numbers.get(queue) for queue in queues], pa.int32()).take(pa.array(places))


def _values(batch: pa.RecordBatch) -> pa.Array:
    stands = _stands_for_nothing(batch)
    if stands is None:
        return batch.column("body")
    values = pc.if_else(stands, pa.scalar(b"", pa.binary()), batch.column("body"))
    null = pc.and_(stands, pc.fill_null(pc.equal(batch.column(_DELETED.name), NULL_BODY), False))
    return pc.if_else(null, None, values)


def _stands_for_nothing(batch: pa.RecordBatch) -> pa.Array | None:
    """Which messages stand for one without a body; None if none does. Both the property and the body say so."""
    marks = batch.column(_DELETED.name)
    if marks.null_count == len(marks):
        return None
    marked = pc.and_(
        pc.is_in(marks, pa.array([NULL_BODY, EMPTY_BODY])), pc.equal(batch.column("body"), pa.scalar(STAND_IN_BODY))
    )
    found = pc.fill_null(marked, False)
    return found if pc.any(found).as_py() else None


def _headers(batch: pa.RecordBatch) -> pa.Array:
    """The entries of each map; null without any, as in Spark's Kafka source."""
    properties = batch.column("properties")
    stands = _stands_for_nothing(batch)
    if stands is not None:
        rows = properties.to_pylist()
        for row in np.flatnonzero(arrow.flags(stands)).tolist():
            rows[row] = [entry for entry in rows[row] or () if entry[0] != DELETED]
        properties = pa.array(rows, properties.type)
    bounds = properties.offsets.to_numpy()
    entries = pa.StructArray.from_arrays([properties.keys, unmarked(properties.items)], ["key", "value"])
    offsets = pa.array(bounds, pa.int32(), mask=np.append(np.diff(bounds) == 0, False))
    return pa.ListArray.from_arrays(offsets, entries)


def unmarked(texts: pa.Array) -> pa.Array:
    """Texts as bytes; those that are marked as base64 are decoded, unless they are none."""
    found = pc.fill_null(pc.starts_with(texts, BASE64_MARK), False)
    if not pc.any(found).as_py():
        return texts.cast(pa.binary())
    values = texts.cast(pa.binary()).to_pylist()
    for row in np.flatnonzero(arrow.flags(found)).tolist():
        try:
            values[row] = base64.b64decode(values[row][len(BASE64_MARK) :], validate=True)
        except binascii.Error:  # a text that only looks like it
            continue
    return pa.array(values, pa.binary())
