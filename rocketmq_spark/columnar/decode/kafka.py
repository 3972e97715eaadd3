"""The columns of Spark's Kafka source (option ``kafkaColumns``), made of the columns of this source.

``key`` is the sharding key, or the keys joined by spaces. If a property cannot hold some bytes, the sink stores these as base64
after ``BASE64_MARK`` (``encode.kafka``); this module decodes them. A message that the sink stored for a row without a body
(``emptyBodies=mark``) gets a null or empty value.
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
from rocketmq_spark.columnar.decode.schema import BASIC_COLUMNS, HEADERS, KAFKA, READ_QUEUE_ID, Column
from rocketmq_spark.model import MessageQueue
from rocketmq_spark.wire.properties import BASE64_MARK, DELETED_PROPERTY, EMPTY_BODY, NULL_BODY, STAND_IN_BODY

# These names have a leading space, so that they differ from all names of users' property columns.
_SHARDING_KEY = Column(" sharding key", "string", pa.string(), Property.SHARDING_KEY)
_DELETED = Column(" deleted", "string", pa.string(), DELETED_PROPERTY)
_SOURCE_COLUMNS = {column.name: column for column in (*BASIC_COLUMNS, READ_QUEUE_ID)}
# For each column of Kafka, the columns from which it is made.
_SOURCE_NAMES = {
    "key": ("keys",),
    "value": ("body",),
    "topic": ("topic",),
    "partition": ("topic", READ_QUEUE_ID.name),
    "offset": ("queueOffset",),
    "timestamp": ("bornTimestamp",),
    "timestampType": (),
    "headers": ("body", "properties"),
}
_KAFKA_NAMES = {column.name.lower(): column.name for column in (*KAFKA, HEADERS)}


def columns_to_decode(columns: Sequence[Column]) -> tuple[Column, ...]:
    """The columns to decode for ``columns``, including the columns of properties."""
    kafka_columns = [column for column in columns if column.property is None]
    names = dict.fromkeys(part for column in kafka_columns for part in _SOURCE_NAMES[_KAFKA_NAMES[column.name.lower()]])
    property_columns = [column for column in columns if column.property is not None]
    kafka_names = {column.name.lower() for column in kafka_columns}
    key_columns = [_SHARDING_KEY] if "key" in kafka_names else []
    deleted_columns = [_DELETED] if kafka_names & {"value", "headers"} else []
    # At least one column is decoded, because Spark counts the rows even if it needs no column.
    return (
        *(_SOURCE_COLUMNS[name] for name in names or ("queueOffset",)),
        *key_columns,
        *deleted_columns,
        *property_columns,
    )


def kafka_batch(
    batch: pa.RecordBatch, columns: Sequence[Column], broker_name: str, partition_numbers: Mapping[MessageQueue, int]
) -> pa.RecordBatch:
    """Converts a batch of one broker's messages, decoded with ``columns_to_decode(columns)``, to Kafka's ``columns``.

    ``partition_numbers`` has the partition number of each queue.
    """
    arrays = [
        _property_values(batch.column(column.name))
        if column.property is not None
        else _kafka_column(batch, column, broker_name, partition_numbers)
        for column in columns
    ]
    return pa.RecordBatch.from_arrays(arrays, schema=pa.schema([pa.field(c.name, c.arrow_type) for c in columns]))


def _property_values(values: pa.Array) -> pa.Array:
    """The values of a property column. A string marked as base64 is decoded if the decoded bytes are UTF-8; otherwise, it stays
    unchanged.
    """
    if not pa.types.is_string(values.type) or not pc.any(pc.starts_with(values, BASE64_MARK)).as_py():
        return values
    texts = values.to_pylist()
    for row, value in enumerate(_decoded_strings(values).to_pylist()):
        with contextlib.suppress(UnicodeDecodeError):
            texts[row] = None if value is None else value.decode()
    return pa.array(texts, pa.string())


def _kafka_column(
    batch: pa.RecordBatch, column: Column, broker_name: str, partition_numbers: Mapping[MessageQueue, int]
) -> pa.Array:
    match _KAFKA_NAMES[column.name.lower()]:
        case "key":
            return _keys(batch)
        case "partition":
            return _partitions(batch, broker_name, partition_numbers)
        case "timestampType":  # the value 0 means Kafka's CreateTime
            return arrow.integers(np.zeros(len(batch), np.int32), pa.int32())
        case "value":
            return _values(batch)
        case "headers":
            return _headers(batch)
        case name:
            return batch.column(_SOURCE_NAMES[name][0])


def _keys(batch: pa.RecordBatch) -> pa.Array:
    keys = batch.column("keys")
    key_texts = batch.column(_SHARDING_KEY.name)
    if key_texts.null_count and keys.null_count < len(keys):
        joined_keys = pc.binary_join(keys, " ")
        key_texts = pc.coalesce(key_texts, pc.if_else(pc.equal(joined_keys, ""), None, joined_keys))
    return _decoded_strings(key_texts)


def _partitions(batch: pa.RecordBatch, broker_name: str, partition_numbers: Mapping[MessageQueue, int]) -> pa.Array:
    """The partition number of each row's queue. Every topic of the batch is looked up with every queue id. Some of these pairs
    are no queue, but such pairs occur in no row.
    """
    topics = arrow.one_array(batch.column("topic")).dictionary_encode()
    ids = batch.column(READ_QUEUE_ID.name).dictionary_encode()
    queues = [
        MessageQueue(topic, broker_name, queue_id)
        for topic in topics.dictionary.to_pylist()
        for queue_id in ids.dictionary.to_pylist()
    ]
    pair_index_of_row = topics.indices.to_numpy().astype(np.int64) * len(ids.dictionary) + ids.indices.to_numpy()
    return pa.array([partition_numbers.get(queue) for queue in queues], pa.int32()).take(pa.array(pair_index_of_row))


def _values(batch: pa.RecordBatch) -> pa.Array:
    is_stand_in = _stand_in_mask(batch)
    if is_stand_in is None:
        return batch.column("body")
    values = pc.if_else(is_stand_in, pa.scalar(b"", pa.binary()), batch.column("body"))
    is_null = pc.and_(is_stand_in, pc.fill_null(pc.equal(batch.column(_DELETED.name), NULL_BODY), False))
    return pc.if_else(is_null, None, values)


def _stand_in_mask(batch: pa.RecordBatch) -> pa.Array | None:
    """Which messages stand for a row without a body: those whose property and body are both as ``emptyBodies=mark`` sets them.
    None if there is no such message.
    """
    marks = batch.column(_DELETED.name)
    if marks.null_count == len(marks):
        return None
    is_marked = pc.and_(
        pc.is_in(marks, pa.array([NULL_BODY, EMPTY_BODY])), pc.equal(batch.column("body"), pa.scalar(STAND_IN_BODY))
    )
    is_stand_in = pc.fill_null(is_marked, False)
    return is_stand_in if pc.any(is_stand_in).as_py() else None


def _headers(batch: pa.RecordBatch) -> pa.Array:
    """The entries of each map; null for an empty map, as in Spark's Kafka source."""
    properties = batch.column("properties")
    is_stand_in = _stand_in_mask(batch)
    if is_stand_in is not None:
        rows = properties.to_pylist()
        for row in np.flatnonzero(arrow.to_mask(is_stand_in)).tolist():
            rows[row] = [entry for entry in rows[row] if entry[0] != DELETED_PROPERTY]
        properties = pa.array(rows, properties.type)
    bounds = properties.offsets.to_numpy()
    entries = pa.StructArray.from_arrays([properties.keys, _decoded_strings(properties.items)], ["key", "value"])
    offsets = pa.array(bounds, pa.int32(), mask=np.append(np.diff(bounds) == 0, False))
    return pa.ListArray.from_arrays(offsets, entries)


def _decoded_strings(texts: pa.Array) -> pa.Array:
    """Strings as bytes. Strings that are marked as base64 are decoded; a marked string that is not valid base64 stays
    as it is.
    """
    is_marked = pc.fill_null(pc.starts_with(texts, BASE64_MARK), False)
    if not pc.any(is_marked).as_py():
        return texts.cast(pa.binary())
    values = texts.cast(pa.binary()).to_pylist()
    for row in np.flatnonzero(arrow.to_mask(is_marked)).tolist():
        try:
            values[row] = base64.b64decode(values[row][len(BASE64_MARK) :], validate=True)
        except binascii.Error:  # another client wrote a marked string that is not base64
            continue
    return pa.array(values, pa.binary())
