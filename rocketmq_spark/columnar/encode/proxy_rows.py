"""Arrow columns to messages of requests to a Proxy, without a Python step per row: the counterpart of ``encoder`` for gRPC.

A message is a field of its request. So a request is a sequence of fields, which may be cut between any two messages. The fields
of a message may be in any order. So the fields that are the same in all rows are joined into one constant.

A delayed row is sent in a separate request, often inside an envelope. So an Arrow batch with delayed rows is encoded as items
(``Encoder``), and each item becomes a message separately.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from rocketmq_spark.base.clock import epoch_ms
from rocketmq_spark.base.codes import Property
from rocketmq_spark.columnar import arrow
from rocketmq_spark.columnar.arrow import EMPTY_BYTES, Ints, Mask
from rocketmq_spark.columnar.encode import buffers, properties
from rocketmq_spark.columnar.encode.buffers import Pieces
from rocketmq_spark.columnar.encode.encoder import ITEM_OVERHEAD_BYTES, CheckedRows, Encoded, Encoder, RowTopics
from rocketmq_spark.columnar.encode.properties import (
    BadRows,
    PropertyPieces,
    TextPieces,
    has_controls,
    rows_with_controls,
)
from rocketmq_spark.grpc_proxy import encoder
from rocketmq_spark.grpc_proxy.encoder import ProxyBatch, ProxyEncoder, ProxyItem, ProxySendRequest
from rocketmq_spark.grpc_proxy.protos import MAP_KEY, MAP_VALUE, VARINTS, field_key, number_field
from rocketmq_spark.grpc_proxy.tables import MessageType

_TAGS, _KEYS, _GROUP, _PRIORITY = (
    name.encode() for name in (Property.TAGS, Property.KEYS, Property.SHARDING_KEY, Property.PRIORITY)
)
_TEXT_FIELDS = {name.encode(): first for name, first in encoder.TEXT_FIELDS.items()}
_FIFO_FIELDS = number_field("SystemProperties", "message_type", MessageType.FIFO) + field_key(
    "SystemProperties", "message_group"
)
_PRIORITY_FIELDS = number_field("SystemProperties", "message_type", MessageType.PRIORITY) + field_key(
    "SystemProperties", "priority"
)
_COMMA = b","[0]
_TYPES_BY_PROPERTY = {_GROUP: MessageType.FIFO.name, _PRIORITY: MessageType.PRIORITY.name}
_NOT_UTF8 = "a property is not UTF-8, and gRPC carries no other text"
_NULL_SCALAR = pa.nulls(1, pa.binary())[0]
_REJECTED_TEXT = "which a Proxy rejects"
_CONTROL_TEXT = f"has a control character, {_REJECTED_TEXT}"


class _ProxyCheck:
    """Finds texts that are not UTF-8, and values that a Proxy rejects. Protobuf rejects texts that are not UTF-8, and for delayed
    rows the wrong bytes would be replaced by other characters. ``rows_by_type`` has the rows of each message type other than
    NORMAL.
    """

    def __init__(self, bad_rows: BadRows) -> None:
        self.rows_by_type: dict[str, Mask] = {}
        self._bad_rows = bad_rows

    def add_property(self, name: bytes, values: pa.Array, is_filled: Mask | None) -> None:
        if name in _TYPES_BY_PROPERTY:
            self.rows_by_type[_TYPES_BY_PROPERTY[name]] = (
                np.ones(len(values), np.bool_) if is_filled is None else is_filled
            )
        name_text = name.decode("utf-8", "replace")
        if not arrow.is_utf8(name):
            self._bad_rows.add_rows(np.arange(len(values)), _NOT_UTF8)
        if has_controls(name):
            self._bad_rows.add_rows(np.arange(len(values)), f"the name {name_text!r} {_CONTROL_TEXT}")
        for row in arrow.non_utf8_rows(values):
            self._bad_rows.add_rows(np.array([row]), f"{name_text} is not UTF-8, and gRPC carries no other text")
        self._bad_rows.add_rows(rows_with_controls(values), f"{name_text} {_CONTROL_TEXT}")
        if name == _TAGS:
            self._bad_rows.add_rows(arrow.rows_with(values, b"|"), f"{name_text} has a '|', {_REJECTED_TEXT}")

    def add_entries(self, names: pa.Array, values: pa.Array, bounds: Ints) -> None:
        for entry in (*arrow.non_utf8_rows(names), *arrow.non_utf8_rows(values)):
            self._bad_rows.add_rows(np.searchsorted(bounds, [entry], side="right") - 1, _NOT_UTF8)
        entries_with_controls = np.concatenate((rows_with_controls(names), rows_with_controls(values)))
        self._bad_rows.add_rows(
            np.searchsorted(bounds, entries_with_controls, side="right") - 1, f"a property {_CONTROL_TEXT}"
        )


class _CheckedPieces(TextPieces):
    """The properties of an Arrow batch with delayed rows. They are checked here, because a later check would be too late: when
    items become messages, they are decoded as text, and bytes that are not UTF-8 are replaced.
    """

    def __init__(self, row_count: int, bad_rows: BadRows) -> None:
        super().__init__(row_count)
        self.check = _ProxyCheck(bad_rows)

    def add_property(self, name: bytes, values: pa.Array, is_filled: Mask | None = None) -> None:
        self.check.add_property(name, values, is_filled)
        super().add_property(name, values, is_filled)

    def add_entries(self, names: pa.Array, values: pa.Array, bounds: Ints) -> None:
        self.check.add_entries(names, values, bounds)
        super().add_entries(names, values, bounds)


class ProxyPieces:
    """Implements ``properties.PropertyPieces``: collects the fields of messages, and those of their system properties."""

    def __init__(self, row_count: int, bad_rows: BadRows) -> None:
        self.lengths: Ints = np.zeros(row_count, np.int64)
        self.fields, self.system_fields = Pieces(row_count), Pieces(row_count)
        self.groups: pa.Array | None = None
        self.has_priorities = False
        self.check = _ProxyCheck(bad_rows)

    def add_property(self, name: bytes, values: pa.Array, is_filled: Mask | None = None) -> None:
        self.check.add_property(name, values, is_filled)
        lengths = arrow.lengths(values) + len(name) + 2
        self.lengths += lengths if is_filled is None else np.where(is_filled, lengths, 0)
        if name in _TEXT_FIELDS:
            _add_parts(self.system_fields, (_TEXT_FIELDS[name], _varints(arrow.lengths(values)), values), is_filled)
        elif name == _KEYS:
            _add_parts(self.system_fields, (_key_fields(values),), is_filled)
        elif name == _GROUP:
            self.groups = values if is_filled is None else pc.if_else(pa.array(is_filled), values, _NULL_SCALAR)
            parts = buffers.joined(_FIFO_FIELDS, _varints(arrow.lengths(values)), values)
            normal_type = pa.scalar(encoder.NORMAL_TYPE_FIELD, pa.binary())
            self.system_fields.add_column(
                parts if is_filled is None else pc.if_else(pa.array(is_filled), parts, normal_type)
            )
        elif name == _PRIORITY:
            self.has_priorities = True
            _add_parts(
                self.system_fields,
                (_PRIORITY_FIELDS, _varints(values.cast(pa.string()).cast(pa.int64()).to_numpy())),
                is_filled,
            )
        else:
            key = MAP_KEY + VARINTS[len(name)] + name + MAP_VALUE
            sizes = arrow.lengths(values)
            value_sizes = _varints(sizes)
            entry_sizes = len(key) + arrow.lengths(value_sizes) + sizes
            _add_parts(
                self.fields, (encoder.USER_PROPERTY_FIELD, _varints(entry_sizes), key, value_sizes, values), is_filled
            )

    def add_entries(self, names: pa.Array, values: pa.Array, bounds: Ints) -> None:
        if not len(names):
            return
        name_lengths, value_lengths = arrow.lengths(names), arrow.lengths(values)
        ends = np.concatenate(([0], np.cumsum(name_lengths + value_lengths + 2)))
        self.lengths += np.diff(ends[bounds])
        name_sizes, value_sizes = _varints(name_lengths), _varints(value_lengths)
        overhead_sizes = len(MAP_KEY) + len(MAP_VALUE) + arrow.lengths(name_sizes) + arrow.lengths(value_sizes)
        encoded_entries = buffers.joined(
            encoder.USER_PROPERTY_FIELD,
            _varints(overhead_sizes + name_lengths + value_lengths),
            MAP_KEY,
            name_sizes,
            names,
            MAP_VALUE,
            value_sizes,
            values,
        )
        self.check.add_entries(names, values, bounds)
        self.fields.add_column(buffers.merged_parts(encoded_entries, bounds))


@dataclass(frozen=True, slots=True)
class ProxyEncoded(Encoded):
    """Messages as fields of a request. Each of the ``ids`` ends with a comma. ``sizes`` has the size that each message would have
    as an item in the brokers' format.

    A message with a group (``groups``) is sent in a separate request. With ``is_each_alone``, each message is sent in a separate
    request.
    """

    items: pa.Array
    ids: npt.NDArray[np.uint8]
    sizes: Ints
    groups: pa.Array | None
    is_each_alone: bool

    def joined(self) -> pa.Array:
        return self.items

    def take(self, rows: npt.NDArray[np.intp]) -> ProxyEncoded:
        row_indexes = pa.array(rows)
        groups = None if self.groups is None else self.groups.take(row_indexes)
        return ProxyEncoded(self.items.take(row_indexes), self.ids[rows], self.sizes[rows], groups, self.is_each_alone)

    def slice(self, start_row: int, end_row: int) -> ProxyEncoded:
        groups = None if self.groups is None else self.groups.slice(start_row, end_row - start_row)
        items = self.items.slice(start_row, end_row - start_row)
        return ProxyEncoded(
            items, self.ids[start_row:end_row], self.sizes[start_row:end_row], groups, self.is_each_alone
        )

    def _ends(self) -> Ints:
        return arrow.offsets(self.items).astype(np.int64)

    def _stored_ends(self) -> Ints:
        return np.concatenate(([0], np.cumsum(self.sizes)))

    def _body(self, start_row: int, end_row: int) -> ProxyBatch:
        data, offsets = arrow.data_and_offsets(self.items)
        ids = self.ids[start_row:end_row].tobytes()[:-1].decode()
        if self.groups is None and not self.is_each_alone:
            return ProxyBatch([[ProxySendRequest(bytes(data[int(offsets[start_row]) : int(offsets[end_row])]), ids)]])
        bounds = offsets[start_row : end_row + 1].tolist()
        groups = (
            [None] * (end_row - start_row)
            if self.groups is None
            else self.groups.slice(start_row, end_row - start_row).to_pylist()
        )
        return ProxyBatch.from_items(
            ProxyItem(bytes(data[bounds[i] : bounds[i + 1]]), msg_id, object() if self.is_each_alone else groups[i])
            for i, msg_id in enumerate(ids.split(","))
        )


@dataclass(frozen=True, slots=True)
class ProxyRowEncoder(Encoder):
    """Encodes Arrow batches for ``proxy``. The encoded messages contain their topics."""

    proxy: ProxyEncoder | None = None

    def _new_pieces(self, batch: pa.RecordBatch, bad_rows: BadRows) -> PropertyPieces:
        if properties.any_delay(batch, self.columns):
            return _CheckedPieces(len(batch), bad_rows)
        return ProxyPieces(len(batch), bad_rows)

    def check(self, batch: pa.RecordBatch, bad_rows: BadRows) -> CheckedRows:
        checked = Encoder.check(self, batch, bad_rows)
        pieces, flags = checked.pieces, checked.flags
        if flags is not None:
            bad_rows.add(flags != 0, lambda i: f"its flag is {flags[i]}, which gRPC cannot transport; expected 0")
        assert isinstance(pieces, ProxyPieces | _CheckedPieces)
        rows_by_type = (
            pieces.check.rows_by_type
            if checked.is_delayed is None
            else {**pieces.check.rows_by_type, MessageType.DELAY.name: checked.is_delayed}
        )
        for (first_type, has_first_type), (second_type, has_second_type) in itertools.combinations(
            rows_by_type.items(), 2
        ):
            bad_rows.add(
                has_first_type & has_second_type,
                f"it is {first_type} and {second_type}, and over gRPC it can have only one of these",
            )
        return checked

    def join(self, checked: CheckedRows, topics: RowTopics | None = None) -> Encoded:
        pieces = checked.pieces
        if not isinstance(pieces, ProxyPieces):
            return Encoder.join(self, checked)
        assert topics is not None, "a message over gRPC contains its topic"
        assert self.proxy is not None
        born_ms = epoch_ms()
        topic_encoders = [self.proxy.encoder_of(name, born_ms) for name in topics.names]
        ids = np.full((len(checked.body), self.ids.width + 1), _COMMA, np.uint8)
        self._fill_ids(ids[:, :-1])
        message_pieces = Pieces(len(checked.body))
        if topics.topic_codes is None:
            message_pieces.add_constant(topic_encoders[0].common_fields)
        else:
            message_pieces.add_column(
                pa.array([each.common_fields for each in topic_encoders], pa.binary()).take(
                    pa.array(topics.topic_codes)
                )
            )
        message_pieces.extend(pieces.fields)
        _add_message_field(
            message_pieces,
            encoder.SYSTEM_FIELD,
            _system_pieces(topic_encoders[0].common_system_fields, ids[:, :-1], pieces),
        )
        body_sizes = arrow.lengths(checked.body)
        _add_parts(message_pieces, (encoder.BODY_FIELD, _varints(body_sizes), checked.body))
        field_pieces = Pieces(len(checked.body))
        _add_message_field(field_pieces, encoder.MESSAGE_FIELD, message_pieces)
        sizes = body_sizes + pieces.lengths + self.id_bytes + ITEM_OVERHEAD_BYTES
        return ProxyEncoded(field_pieces.joined(), ids, sizes, pieces.groups, pieces.has_priorities)


def _system_pieces(common_fields: bytes, ids: npt.NDArray[np.uint8], pieces: ProxyPieces) -> Pieces:
    """The encoded system properties of each row."""
    rows, width = ids.shape
    type_field = b"" if pieces.has_priorities or pieces.groups is not None else encoder.NORMAL_TYPE_FIELD
    system_pieces = Pieces(rows)
    system_pieces.add_constant(common_fields + type_field + encoder.TEXT_FIELDS[Property.UNIQ_KEY] + VARINTS[width])
    system_pieces.add_column(buffers.fixed_width_column(np.ascontiguousarray(ids)))
    system_pieces.extend(pieces.system_fields)
    return system_pieces


def _add_message_field(pieces: Pieces, field_start: bytes, fields: Pieces) -> None:
    """Add a field whose content is a message to each row."""
    pieces.add_constant(field_start)
    pieces.add_column(_varints(fields.lengths))
    pieces.extend(fields)


def _add_parts(pieces: Pieces, parts: tuple[pa.Array | bytes, ...], is_filled: Mask | None = None) -> None:
    """Add parts to every row, or only to the rows where ``is_filled`` is true."""
    if is_filled is not None:
        pieces.add_column(pc.if_else(pa.array(is_filled), buffers.joined(*parts), EMPTY_BYTES))
        return
    for part in parts:
        pieces.add_constant(part) if isinstance(part, bytes) else pieces.add_column(part)


def _key_fields(keys: pa.Array) -> pa.Array:
    """The encoded field of each key, joined for each row."""
    if not len(arrow.rows_with(keys, encoder.KEY_SEPARATOR_BYTES)):
        return buffers.joined(encoder.KEYS_FIELD, _varints(arrow.lengths(keys)), keys)
    key_lists = pc.split_pattern(keys, encoder.KEY_SEPARATOR_BYTES)
    words = key_lists.flatten()
    fields = buffers.joined(encoder.KEYS_FIELD, _varints(arrow.lengths(words)), words)
    return buffers.merged_parts(
        fields, np.concatenate(([0], np.cumsum(pc.fill_null(pc.list_value_length(key_lists), 0).to_numpy())))
    )


def _varints(numbers: Ints) -> pa.Array:
    """Numbers in protobuf's encoding. All numbers get the width of the largest number. Protobuf accepts the padding bytes."""
    width = max(1, -(-int(numbers.max(initial=0)).bit_length() // 7))
    varints = (numbers[:, None] >> np.arange(0, 7 * width, 7) & 0x7F).astype(np.uint8)
    varints[:, :-1] |= 0x80
    return buffers.fixed_width_column(varints)
