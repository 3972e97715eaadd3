"""Converts rows with the columns of Spark's Kafka sink (option ``kafkaColumns``) into rows of this sink.

The rules for keys, headers and base64 are those of docs/coming-from-kafka.md, Columns. ``decode.kafka`` converts back.
"""

from __future__ import annotations

import base64
import logging
from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from rocketmq_spark.base import codes
from rocketmq_spark.columnar import arrow
from rocketmq_spark.columnar.encode.columns import BYTES, INT, TEXT, RowColumn
from rocketmq_spark.columnar.encode.columns import COLUMNS as SINK_COLUMNS
from rocketmq_spark.columnar.encode.properties import MESSAGE_ID, has_controls, rows_with_controls
from rocketmq_spark.wire.properties import (
    BASE64_MARK,
    DELETED_PROPERTY,
    EMPTY_BODY,
    NULL_BODY,
    STAND_IN_BODY,
    is_reserved,
)

logger = logging.getLogger(__name__)

HEADERS = "headers"  # the kind of a column of headers
# For each column, the permitted kinds, and the text in an error that names the permitted types.
COLUMNS: dict[str, tuple[tuple[str, ...], str]] = {
    "key": ((TEXT, BYTES), "string or binary"),
    "value": ((TEXT, BYTES), "string or binary"),
    "topic": ((TEXT,), "string"),
    "partition": ((INT,), "int"),
    "headers": ((HEADERS,), "array<struct<key:string,value:binary>>"),
}
PARTITION = "partition"
# The sink's columns (role: name) that each Kafka column becomes. Names appear in errors, so they are Kafka's where possible.
_ROLES = {
    "key": {"shardingkey": "key", "keys": "keys"},
    "value": {"body": "value"},
    "topic": {"topic": "topic"},
    "partition": {PARTITION: "partition"},
    "headers": {"properties": "headers"},
}
# A longer key is only the sharding key, and is not in the message's keys, because all properties together may have at most
# 32,767 bytes.
_MAX_KEY_BYTES = 8192


def check_columns(
    columns: Sequence[RowColumn], topic: str | None, row_id: str | None = None
) -> tuple[dict[str, str], list[str]]:
    """Returns the columns that ``KafkaRows`` makes, by role, and the problems with the DataFrame's columns.

    Unknown columns are ignored, as in Spark's Kafka sink; columns of this sink are a problem, because they would have no effect.
    """
    problems: list[str] = []
    column_by_role: dict[str, str] = {}
    for column in columns:
        name = column.name.lower()
        is_id = row_id is not None and name == row_id.lower()
        if row_id is not None and is_id:
            if MESSAGE_ID in column_by_role:
                problems.append(
                    f"option 'messageId' is {row_id!r}, but several columns of the DataFrame have that name"
                )
            if not column.fits(MESSAGE_ID):
                problems.append(column.type_problem("string or bigint, since option 'messageId' names it"))
            column_by_role[MESSAGE_ID] = _id_name(row_id)
        if name in COLUMNS:
            kinds, text = COLUMNS[name]
            if column_by_role.keys() & _ROLES[name].keys():
                problems.append(f"column {column.name!r} is there twice")
            elif column.kind not in kinds:
                problems.append(column.type_problem(text))
            column_by_role |= _ROLES[name]
        elif not is_id and name in {sink_name.lower() for sink_name in SINK_COLUMNS}:
            problems.append(
                f"column {column.name!r} has no effect with option 'kafkaColumns', which takes {', '.join(COLUMNS)}: drop it, "
                "or write without the option"
            )
    if row_id is not None and MESSAGE_ID not in column_by_role:
        problems.append(f"option 'messageId' is {row_id!r}, but no column of the DataFrame has that name")
    if "body" not in column_by_role:
        problems.append("column 'value' is missing; it becomes the body")
    if "topic" not in column_by_role and topic is None:
        problems.append("there is neither option 'topic' nor a column 'topic'")
    return column_by_role, problems


def _id_name(row_id: str) -> str:
    """The name of the id column in the converted batch. It differs from ``row_id`` if another converted column has that name."""
    taken_names = {name.lower() for sink_names in _ROLES.values() for name in sink_names.values()}
    return f"{row_id} (messageId)" if row_id.lower() in taken_names else row_id


class KafkaRows:
    """Converts the Arrow batches of a task, and counts headers that are left out. ``row_id`` is option ``messageId``."""

    def __init__(self, row_id: str | None = None) -> None:
        self._row_id = row_id
        self._reserved_names = (codes.ROW_ID,) if row_id is not None else ()
        self.left_out_header_count = 0

    def __call__(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """The rows with the columns that ``check_columns`` names."""
        kafka_arrays = {name.lower(): arrow.one_array(batch.column(i)) for i, name in enumerate(batch.schema.names)}
        sink_arrays: dict[str, pa.Array] = {"value": kafka_arrays["value"]}
        if "key" in kafka_arrays:
            sink_arrays["key"] = as_property_texts(arrow.as_bytes(kafka_arrays["key"]))
            sink_arrays["keys"] = _texts_as_keys(sink_arrays["key"])
        if "headers" in kafka_arrays:
            sink_arrays["headers"] = self._properties(kafka_arrays["headers"], arrow.as_bytes(kafka_arrays["value"]))
        for name in ("topic", "partition"):
            if name in kafka_arrays:
                sink_arrays[name] = kafka_arrays[name]
        if self._row_id is not None:
            sink_arrays[_id_name(self._row_id)] = kafka_arrays[self._row_id.lower()]
        return pa.RecordBatch.from_arrays(list(sink_arrays.values()), names=list(sink_arrays))

    def _properties(self, headers: pa.Array, bodies: pa.Array) -> pa.Array:
        header_offsets = arrow.offsets(headers)
        counts = np.diff(header_offsets)
        if headers.null_count:
            counts = np.where(arrow.to_mask(headers.is_valid()), counts, 0)
        entries = headers.flatten()  # does not contain the hidden headers of null rows
        # By position, because the fields may also be named "KEY" and "VALUE".
        names, values = entries.field(0), entries.field(1)
        if entries.null_count:
            is_valid = entries.is_valid()
            names, values = pc.if_else(is_valid, names, None), pc.if_else(is_valid, values, None)
        bounds = np.concatenate(([0], np.cumsum(counts)))
        is_kept = self._kept_mask(names, values, bounds)
        if is_kept is not None:
            count_before = self.left_out_header_count
            self.left_out_header_count += int((~is_kept).sum())
            if not count_before:
                logger.info(
                    "a task leaves out headers that cannot be stored; the first one is %r",
                    _name(names, int(np.flatnonzero(~is_kept)[0])),
                )
            names, values = names.filter(pa.array(is_kept)), values.filter(pa.array(is_kept))
            bounds = np.concatenate(([0], np.cumsum(is_kept)))[bounds]
        values = arrow.as_bytes(values)
        texts = as_property_texts(values, _headers_like_mark(arrow.as_bytes(names), values, bounds, bodies))
        return pa.MapArray.from_arrays(arrow.integers(bounds.astype(np.int32), pa.int32()), names, texts)

    def _kept_mask(
        self, names: pa.Array, values: pa.Array, bounds: npt.NDArray[np.int64]
    ) -> npt.NDArray[np.bool_] | None:
        """Which headers are stored; None if all headers are stored."""
        encoded_names = arrow.as_bytes(names).dictionary_encode()
        distinct_names = encoded_names.dictionary.to_pylist()
        name_codes = pc.fill_null(encoded_names.indices.cast(pa.int64()), len(distinct_names)).to_numpy()
        is_legal_name = np.array([*(_is_legal_name(name, self._reserved_names) for name in distinct_names), False])
        is_kept: npt.NDArray[np.bool_] = is_legal_name[name_codes] & arrow.to_mask(values.is_valid())
        rows = np.repeat(np.arange(len(bounds) - 1), np.diff(bounds))
        row_and_name_codes = rows * (len(distinct_names) + 1) + name_codes
        reversed_kept_indexes = np.flatnonzero(is_kept)[::-1]
        _, last_indexes = np.unique(row_and_name_codes[reversed_kept_indexes], return_index=True)
        if len(last_indexes) < len(reversed_kept_indexes):
            is_kept = np.zeros(len(is_kept), np.bool_)
            is_kept[reversed_kept_indexes[last_indexes]] = True
        return None if is_kept.all() else is_kept


def _name(names: pa.Array, header_number: int) -> str | None:
    """The name of a header for a log line."""
    name = arrow.as_bytes(names)[header_number].as_py()
    return None if name is None else str(name, "utf-8", "replace")


def _is_legal_name(name: bytes, reserved_names: Sequence[str]) -> bool:
    """Whether a property may have this name."""
    if not name or has_controls(name) or not arrow.is_utf8(name):
        return False
    return not is_reserved(name.decode()) and name.decode() not in reserved_names


def _texts_as_keys(texts: pa.Array) -> pa.Array:
    """The texts that can be a message's key; null for others."""
    cannot_be_key = pc.or_(pc.match_substring(texts, codes.KEY_SEPARATOR), pc.starts_with(texts, BASE64_MARK))
    cannot_be_key = pc.or_(cannot_be_key, pc.greater(pc.binary_length(texts), _MAX_KEY_BYTES))
    return pc.if_else(pc.fill_null(cannot_be_key, True), None, texts)


def _headers_like_mark(
    names: pa.Array, values: pa.Array, bounds: npt.NDArray[np.int64], bodies: pa.Array
) -> npt.NDArray[np.intp]:
    """The indexes of headers that look like the mark of an empty body, in rows whose body equals ``STAND_IN_BODY``. For a
    message with such a header, readers would return a null or empty value.
    """
    rows = np.flatnonzero(arrow.to_mask(pc.fill_null(pc.equal(bodies, pa.scalar(STAND_IN_BODY, pa.binary())), False)))
    if not len(rows):
        return rows
    marks = pa.array([NULL_BODY.encode(), EMPTY_BODY.encode()], pa.binary())
    looks_like_mark = pc.and_(
        pc.equal(names, pa.scalar(DELETED_PROPERTY.encode(), pa.binary())), pc.is_in(values, marks)
    )
    headers = np.flatnonzero(arrow.to_mask(pc.fill_null(looks_like_mark, False)))
    return headers[np.isin(np.searchsorted(bounds, headers, side="right") - 1, rows)]


def as_property_texts(values: pa.Array, base64_rows: Iterable[int] = ()) -> pa.Array:
    """Bytes as texts. Bytes that a property cannot hold, and all bytes in ``base64_rows``, become base64."""
    needs_base64 = pc.or_(pc.equal(pc.binary_length(values), 0), pc.starts_with(values, BASE64_MARK.encode()))
    encoded_rows = {
        *np.flatnonzero(arrow.to_mask(pc.fill_null(needs_base64, False))).tolist(),
        *rows_with_controls(values).tolist(),
        *map(int, base64_rows),
    }
    try:
        texts = values.cast(pa.string())
        if not encoded_rows and not pc.any(pc.utf8_is_space(texts)).as_py():
            return texts
    except pa.ArrowInvalid:  # raised if some values are not UTF-8
        pass
    return pa.array(
        [_property_text(value, row in encoded_rows) for row, value in enumerate(values.to_pylist())], pa.string()
    )


def _property_text(value: bytes | None, needs_base64: bool) -> str | None:
    if value is None:
        return None
    if not needs_base64:
        try:
            text = value.decode()
        except UnicodeDecodeError:
            pass
        else:
            if not text.isspace():
                return text
    return BASE64_MARK + base64.b64encode(value).decode()
