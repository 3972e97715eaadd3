"""Property strings of many messages as columns: tags, keys, message id, and the map of all user properties.

A string is ``name 0x01 value 0x02`` repeated. All strings are copied into one blob. One comparison finds every separator; names
and values are between the separators. Messages of one producer usually have the same names in the same order: if all messages
do, each name is decoded once. Otherwise, each name is classified by its signature. Strings whose separators do not alternate
are decoded one by one, with Java's rules.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from rocketmq_spark.base.codes import Property
from rocketmq_spark.columnar import arrow
from rocketmq_spark.columnar.decode import buffers, property_names
from rocketmq_spark.columnar.decode.schema import KEYS_TYPE, PROPERTIES_TYPE
from rocketmq_spark.wire.properties import decode_properties

Bytes = npt.NDArray[np.uint8]
Ints = npt.NDArray[np.int64]

_NAME_END, _VALUE_END = 1, 2
_PAD_BYTES = 16


@dataclass(frozen=True, slots=True)
class Pairs:
    """Names and values of all rows as positions in one blob. Row ``i`` has the pairs from ``first_pair[i]`` on, before
    ``first_pair[i + 1]``.
    """

    blob: Bytes
    row_starts: Ints
    first_pair: Ints
    name_start: Ints
    name_length: Ints
    value_start: Ints
    value_end: Ints
    ascii_only: bool

    @property
    def row_count(self) -> int:
        return len(self.first_pair) - 1

    def row_of_pair(self) -> Ints:
        return np.repeat(np.arange(self.row_count), np.diff(self.first_pair))


def locate(buffer: Bytes, starts: Ints, ends: Ints) -> Pairs:
    """Find names and values of the property strings ``buffer[start:end]``, one string per row."""
    return _split(*_concatenate(buffer, starts, ends)) or _locate_one_by_one(buffer, starts, ends)


def _concatenate(buffer: Bytes, starts: Ints, ends: Ints) -> tuple[Bytes, Ints]:
    """The concatenated strings, each with its last separator, and ``_PAD_BYTES`` more bytes for reading ahead."""
    # If a string lacks its last separator, its copy is one byte longer, for the separator.
    lacks_end = (buffer[ends - 1] != _VALUE_END) & (ends > starts)
    any_lacks_end = bool(lacks_end.any())
    string_ends = ends + lacks_end if any_lacks_end else ends
    last_end = int(string_ends[-1]) if len(string_ends) else 0
    strings = buffers.slices(buffer, np.append(starts, last_end), np.append(string_ends, last_end + _PAD_BYTES))
    blob, offsets = arrow.array_and_offsets(strings)
    row_starts = offsets[:-1].astype(np.int64)
    if any_lacks_end:
        blob = blob.copy()
        blob[row_starts[1:][lacks_end] - 1] = _VALUE_END
    return blob, row_starts


def _split(blob: Bytes, offsets: Ints) -> Pairs | None:
    """The pairs, or None if a string does not alternate between the two separators, or has an empty part."""
    content = blob[: offsets[-1]]
    separators = np.flatnonzero(content <= _VALUE_END)
    if len(separators) % 2:
        return None
    kinds = content[separators]
    if not ((kinds[0::2] == _NAME_END).all() and (kinds[1::2] == _VALUE_END).all()):
        return None
    name_end, value_end = separators[0::2], separators[1::2]
    name_start = np.empty_like(name_end)
    if len(name_end):
        name_start[0] = 0
        name_start[1:] = value_end[:-1] + 1
    name_length = name_end - name_start
    if len(name_end) and (name_length.min() < 1 or (value_end - name_end).min() < 2):
        return None
    ascii_only = not len(content) or int(content.max()) < 0x80
    return Pairs(
        blob, offsets, _first_pairs(offsets, value_end), name_start, name_length, name_end + 1, value_end, ascii_only
    )


def _first_pairs(offsets: Ints, value_end: Ints) -> Ints:
    """The number of each row's first pair."""
    row_count, pair_count = len(offsets) - 1, len(value_end)
    if row_count and pair_count % row_count == 0:
        pairs_per_row = pair_count // row_count
        if pairs_per_row and np.array_equal(value_end[pairs_per_row - 1 :: pairs_per_row], offsets[1:] - 1):
            return np.arange(row_count + 1) * pairs_per_row
    return np.searchsorted(value_end, offsets).astype(np.int64)


def _locate_one_by_one(buffer: Bytes, starts: Ints, ends: Ints) -> Pairs:
    """Like ``locate``, for strings that no RocketMQ client writes. Decodes each string by Java's rules."""
    parts: list[bytes] = []
    counts = []
    for start, end in zip(starts.tolist(), ends.tolist(), strict=True):
        pairs = decode_properties(bytes(buffer[start:end]).decode("utf-8", "replace"))
        parts += [part.encode("utf-8", "replace") for pair in pairs.items() for part in pair]
        counts.append(len(pairs))
    bounds = np.zeros(len(parts) + 1, np.int64)
    np.cumsum([len(part) for part in parts], out=bounds[1:])
    first_pairs = np.zeros(len(counts) + 1, np.int64)
    np.cumsum(counts, out=first_pairs[1:])
    blob = np.frombuffer(b"".join(parts) + bytes(_PAD_BYTES), np.uint8)
    ascii_only = int(blob.max()) < 0x80
    row_starts = bounds[2 * first_pairs]
    lengths = np.diff(bounds)
    return Pairs(blob, row_starts, first_pairs, bounds[:-1:2], lengths[0::2], bounds[1:-1:2], bounds[2::2], ascii_only)


@dataclass(frozen=True, slots=True)
class PropertySelection:
    """The columns to build. ``properties`` is ``none``, ``user`` or ``all``."""

    tags: bool = True
    keys: bool = True
    msg_id: bool = True
    properties: str = "user"
    property_columns: tuple[str, ...] = ()

    @property
    def selects_any(self) -> bool:
        return self.tags or self.keys or self.msg_id or self.properties != "none" or bool(self.property_columns)


@dataclass(slots=True)
class PropertyColumns:
    """Text columns, null if a message lacks the property; only the selected ones are set."""

    tags: pa.Array | None = None
    keys: pa.Array | None = None
    msg_id: pa.Array | None = None
    properties: pa.Array | None = None
    property_columns: dict[str, pa.Array] = field(default_factory=dict)


def build_columns(pairs: Pairs, selection: PropertySelection) -> PropertyColumns:
    """Build the selected columns."""
    common_names = _common_names(pairs)
    column_source: _RowsWithSameNames | _RowsWithMixedNames = (
        _RowsWithSameNames(pairs, common_names) if common_names is not None else _RowsWithMixedNames(pairs)
    )
    columns = PropertyColumns()
    if selection.tags:
        columns.tags = column_source.column(Property.TAGS)
    if selection.keys:
        columns.keys = _split_keys(column_source.column(Property.KEYS))
    if selection.msg_id:
        columns.msg_id = column_source.column(Property.UNIQ_KEY)
    if selection.properties != "none":
        columns.properties = column_source.property_map(all_names=selection.properties == "all")
    columns.property_columns = {name: column_source.column(name) for name in selection.property_columns}
    return columns


def _common_names(pairs: Pairs) -> tuple[str, ...] | None:
    """The names, if every row has the same names in the same order without a repetition; otherwise None."""
    row_count = pairs.row_count
    if row_count == 0 or len(pairs.name_start) % row_count:
        return None
    names_per_row = len(pairs.name_start) // row_count
    if not np.array_equal(pairs.first_pair, np.arange(row_count + 1) * names_per_row):
        return None
    starts = pairs.name_start.reshape(row_count, names_per_row)
    lengths = pairs.name_length.reshape(row_count, names_per_row)
    if not (lengths == lengths[0]).all():
        return None
    names = []
    for j in range(names_per_row):
        length = int(lengths[0, j])
        name = bytes(pairs.blob[starts[0, j] : starts[0, j] + length])
        if not _same_text(pairs.blob, starts[:, j], name):
            return None
        names.append(name.decode("utf-8", "replace"))
    return tuple(names) if len(set(names)) == names_per_row else None


def _same_text(blob: Bytes, starts: Ints, text: bytes) -> bool:
    """Whether the bytes at every start are ``text``, compared eight bytes at a time."""
    words = property_names.words(blob)
    position = 0
    while position < len(text):
        part = text[position : position + 8]
        mask = np.uint64((1 << (8 * len(part))) - 1)
        if not ((words[starts + position] & mask) == np.uint64(int.from_bytes(part, "little"))).all():
            return False
        position += 8
    return True


class _RowsWithSameNames:
    """Rows that all have the same names in the same order, so that the pairs of one property are at regular distances."""

    def __init__(self, pairs: Pairs, names: tuple[str, ...]) -> None:
        self._pairs = pairs
        self._names = names
        self._value_start = pairs.value_start.reshape(pairs.row_count, len(names))
        self._value_end = pairs.value_end.reshape(pairs.row_count, len(names))

    def column(self, name: str) -> pa.Array:
        if name not in self._names:
            return arrow.null_column(pa.string(), self._pairs.row_count)
        name_index = self._names.index(name)
        values = buffers.slices(self._pairs.blob, self._value_start[:, name_index], self._value_end[:, name_index])
        return arrow.to_strings(values, None, self._pairs.ascii_only)

    def property_map(self, all_names: bool) -> pa.Array:
        chosen_indexes = [j for j, name in enumerate(self._names) if all_names or not property_names.is_system(name)]
        row_count = self._pairs.row_count
        start, end = self._value_start[:, chosen_indexes].ravel(), self._value_end[:, chosen_indexes].ravel()
        values = arrow.to_strings(buffers.slices(self._pairs.blob, start, end), None, self._pairs.ascii_only)
        names = (
            arrow.tiled_column(tuple(self._names[j] for j in chosen_indexes), row_count)
            if chosen_indexes
            else pa.nulls(0, pa.string())
        )
        return _map_column(np.arange(row_count + 1, dtype=np.int32) * len(chosen_indexes), names, values)


class _RowsWithMixedNames:
    """Rows with differing names: each pair is classified by its name's signature."""

    def __init__(self, pairs: Pairs) -> None:
        self._pairs = pairs
        self._signatures = property_names.signatures(pairs.blob, pairs.name_start, pairs.name_length)
        self._name_ids = property_names.classify(pairs.blob, pairs.name_start, pairs.name_length, self._signatures)
        self._row_of_pair = pairs.row_of_pair()

    def column(self, name: str) -> pa.Array:
        pairs = self._pairs
        pairs_with_name = np.flatnonzero(self._name_mask(name))
        rows = self._row_of_pair[pairs_with_name]
        # Rows without the property get an empty slice at their beginning, so that positions never decrease.
        start = pairs.row_starts[:-1].copy()
        end = start.copy()
        start[rows] = pairs.value_start[pairs_with_name]  # the last value of a repeated name counts
        end[rows] = pairs.value_end[pairs_with_name]
        has_property = np.zeros(pairs.row_count, bool)
        has_property[rows] = True
        values = buffers.slices(pairs.blob, start, end)
        return arrow.to_strings(values, None if has_property.all() else has_property, pairs.ascii_only)

    def _name_mask(self, name: str) -> npt.NDArray[np.bool_]:
        if name in property_names.ID_BY_NAME:
            return np.asarray(self._name_ids == property_names.ID_BY_NAME[name])
        name_bytes = name.encode()
        padded_name = np.frombuffer(name_bytes + bytes(8), np.uint8)
        signature = property_names.signatures(padded_name, np.array([0]), np.array([len(name_bytes)]))[0]
        has_name = self._signatures == signature
        if len(name_bytes) > 16:
            for i in np.flatnonzero(has_name).tolist():
                start = self._pairs.name_start[i]
                has_name[i] = bytes(self._pairs.blob[start : start + self._pairs.name_length[i]]) == name_bytes
        return np.asarray(has_name)

    def property_map(self, all_names: bool) -> pa.Array:
        pairs = self._pairs
        chosen_pairs = (
            np.flatnonzero(self._name_ids == property_names.USER) if not all_names else np.arange(len(self._name_ids))
        )
        chosen_pairs = self._without_repeats(chosen_pairs)
        offsets = np.zeros(pairs.row_count + 1, np.int32)
        np.cumsum(np.bincount(self._row_of_pair[chosen_pairs], minlength=pairs.row_count), out=offsets[1:])
        start, length = pairs.name_start[chosen_pairs], pairs.name_length[chosen_pairs]
        names = arrow.to_strings(buffers.slices(pairs.blob, start, start + length), None, pairs.ascii_only)
        values = buffers.slices(pairs.blob, pairs.value_start[chosen_pairs], pairs.value_end[chosen_pairs])
        return _map_column(offsets, names, arrow.to_strings(values, None, pairs.ascii_only))

    def _without_repeats(self, chosen_pairs: npt.NDArray[np.intp]) -> npt.NDArray[np.intp]:
        """Return ``chosen_pairs`` with only the last pair of each name in a message, as in Java's map."""
        rows = self._row_of_pair[chosen_pairs]
        with np.errstate(over="ignore"):
            name_and_row_hashes = self._signatures[chosen_pairs] + rows.astype(np.uint64) * np.uint64(
                0x9E3779B97F4A7C15
            )
        if len(np.unique(name_and_row_hashes)) == len(name_and_row_hashes):
            return chosen_pairs
        last_pairs: dict[tuple[int, bytes], int] = {}
        pairs = self._pairs
        for i, row in zip(chosen_pairs.tolist(), rows.tolist(), strict=True):
            start = pairs.name_start[i]
            last_pairs[row, bytes(pairs.blob[start : start + pairs.name_length[i]])] = i
        return np.array(sorted(last_pairs.values()), np.intp)


def _map_column(offsets: npt.NDArray[Any], names: pa.Array, values: pa.Array) -> pa.Array:
    entries = pa.StructArray.from_arrays(
        [names, values], fields=[PROPERTIES_TYPE.key_field, PROPERTIES_TYPE.item_field]
    )
    count = len(offsets) - 1
    return pa.Array.from_buffers(
        PROPERTIES_TYPE, count, [None, pa.py_buffer(offsets.astype(np.int32))], children=[entries]
    )


def _split_keys(column: pa.Array) -> pa.Array:
    """Splits the text of KEYS at blanks. Empty keys are omitted."""
    content = (
        arrow.array_and_offsets(column.cast(pa.binary()))[0]
        if column.null_count < len(column)
        else np.empty(0, np.uint8)
    )
    if not (content == ord(" ")).any():
        is_present = arrow.valid_mask(column)
        offsets = np.zeros(len(column) + 1, np.int32)
        np.cumsum(is_present, out=offsets[1:])
        bitmap = None if is_present.all() else arrow.validity_bitmap(is_present)
        return pa.Array.from_buffers(
            KEYS_TYPE, len(column), [bitmap, pa.py_buffer(offsets)], children=[column.drop_null()]
        )
    key_lists = pc.split_pattern(column, " ")
    if pc.min(pc.binary_length(key_lists.values)).as_py():  # the shortest key is not empty, so no key is empty
        return key_lists.cast(KEYS_TYPE)
    return pa.array([None if row is None else [key for key in row if key] for row in key_lists.to_pylist()], KEYS_TYPE)
