"""Arrow columns to batch bodies, without a Python step per row.

A batch item is ``total size, 0, 0, flag, body length, body, properties length, properties``. The parts of items are Arrow
columns, which one call joins row by row. The data buffer of the result is the batch body, and the offsets of the result are the
positions where the body may be cut. The encoder first finds all rows that brokers would reject: if an Arrow batch has such a
row, no row of this Arrow batch is sent.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from rocketmq_spark.base import codes
from rocketmq_spark.columnar import arrow
from rocketmq_spark.columnar.arrow import Ints, Mask
from rocketmq_spark.columnar.encode import buffers, properties
from rocketmq_spark.columnar.encode.content_ids import ContentIds, Hashes
from rocketmq_spark.columnar.encode.ids import UniqueIds
from rocketmq_spark.columnar.encode.properties import BadRows, PropertyPieces, TextPieces
from rocketmq_spark.model.send import Batch

_HEAD_BYTES = 20
ITEM_OVERHEAD_BYTES = _HEAD_BYTES + 2
_ID_START = f"{codes.Property.UNIQ_KEY}\x01".encode()


class Growth(NamedTuple):
    """How many bytes may be added to an item before the item reaches the broker, and the maximum size of a batch at
    the broker.
    """

    item_bytes: int = 0
    max_bytes: int = 0


_NO_GROWTH = Growth()


class Chunk(NamedTuple):
    """One batch to be sent, and its number of rows. ``body`` has the items; over gRPC, it is the ``Batch`` of the
    gRPC encoder.
    """

    body: memoryview | Batch
    row_count: int


class RowTopics(NamedTuple):
    """The topics of an Arrow batch, and if there are several, the topic of each row."""

    names: Sequence[str]
    topic_codes: Ints | None = None


class Encoded:
    """Rows of an Arrow batch as items: all rows in order, or some in another order."""

    __slots__ = ()

    def __len__(self) -> int:
        return len(self._ends()) - 1

    def joined(self) -> pa.Array:
        """The items as a binary column."""
        raise NotImplementedError

    def take(self, rows: npt.NDArray[np.intp]) -> Encoded:
        """The items of ``rows``, in the order of ``rows``."""
        raise NotImplementedError

    def slice(self, start_row: int, end_row: int) -> Encoded:
        raise NotImplementedError

    def chunks(self, max_bytes: int, max_rows: int | None = None, growth: Growth = _NO_GROWTH) -> Iterator[Chunk]:
        """Cut the items into batches of at most ``max_bytes`` and ``max_rows``. An item of more than ``max_bytes`` is the only
        item of its batch.

        A batch keeps at most twice its own bytes in memory: a batch that waits for its queue must not keep all other rows in
        memory.
        """
        ends = self._ends()
        start_row, row_count = 0, len(ends) - 1
        stored_ends = self._stored_ends() + growth.item_bytes * np.arange(row_count + 1) if growth.item_bytes else None
        while start_row < row_count:
            limit = int(ends[start_row]) + max_bytes
            end_row = int(np.searchsorted(ends, limit, side="right")) - 1
            if stored_ends is not None:
                end_row = min(
                    end_row,
                    int(np.searchsorted(stored_ends, stored_ends[start_row] + growth.max_bytes, side="right")) - 1,
                )
            end_row = max(start_row + 1, end_row)
            end_row = end_row if max_rows is None else min(end_row, start_row + max_rows)
            yield Chunk(self._body(start_row, end_row), end_row - start_row)
            start_row = end_row

    def _ends(self) -> Ints:
        """The begin of the first item, and the ends of all items."""
        raise NotImplementedError

    def _stored_ends(self) -> Ints:
        """The ends of the items in the form that brokers store. Brokers limit the size of stored items."""
        return self._ends()

    def _body(self, start_row: int, end_row: int) -> memoryview | Batch:
        raise NotImplementedError


# For fewer rows, a copy of the joined items is cheaper than a separate join or ``take``.
_MIN_JOINED_ROWS = 64


# Gets joined items and the number of the first item, and completes the items in place.
CompleteItems = Callable[[pa.Array, int], None]


class ItemParts:
    """The parts of an Arrow batch's items, and the ends of the items. All items are joined at once only if the caller needs all
    of them.
    """

    def __init__(self, columns: Sequence[pa.Array | bytes], sizes: Ints) -> None:
        self._columns = columns
        self._items: pa.Array | None = None
        self._complete: CompleteItems | None = None
        self._is_split = False  # True after some items were joined without the other items
        self.sizes = sizes
        self.ends = np.concatenate(([0], np.cumsum(sizes)))

    @property
    def items(self) -> pa.Array:
        if self._items is None:
            self._items = self._joined(self._columns, 0)
        return self._items

    def complete(self, complete_items: CompleteItems) -> None:
        """If the items are already joined, complete them now; otherwise, each later join completes the items that it joins."""
        self._complete = complete_items
        if self._items is not None:
            complete_items(self._items, 0)

    def _joined(self, columns: Sequence[pa.Array | bytes], first_row: int) -> pa.Array:
        items = buffers.joined(*columns)
        if self._complete is not None:
            self._complete(items, first_row)
        return items

    def slice(self, start_row: int, end_row: int) -> memoryview:
        """Consecutive items: the data buffer of a separate join, or a copy of a part of all joined items."""
        if self._items is None and (self._is_split or end_row - start_row >= _MIN_JOINED_ROWS):
            # From now on, even a short slice is joined separately: otherwise a short last slice would join all items.
            self._is_split = True
            columns = [
                part if isinstance(part, bytes) else part.slice(start_row, end_row - start_row)
                for part in self._columns
            ]
            return arrow.data_and_offsets(self._joined(columns, start_row))[0]
        data, ends = arrow.data_and_offsets(self.items)
        body = data[int(ends[start_row]) : int(ends[end_row])]
        return body if 2 * len(body) >= len(data) else buffers.arrow_copy(body)

    def take(self, rows: npt.NDArray[np.intp]) -> memoryview:
        """Some items, in the order of ``rows``, as one buffer."""
        if len(rows) >= _MIN_JOINED_ROWS:
            return arrow.data_and_offsets(self.items.take(pa.array(rows)))[0]
        data, ends = arrow.data_and_offsets(self.items)
        return memoryview(b"".join([data[int(ends[row]) : int(ends[row + 1])] for row in rows.tolist()]))


@dataclass(frozen=True, slots=True)
class EncodedItems(Encoded):
    """Items in the format of brokers: the items of ``rows``, or, if ``rows`` is None, the items from ``first_row`` on, before
    ``end_row``.
    """

    parts: ItemParts
    first_row: int
    end_row: int
    rows: npt.NDArray[np.intp] | None = None

    def joined(self) -> pa.Array:
        items = self.parts.items
        return (
            items.slice(self.first_row, self.end_row - self.first_row)
            if self.rows is None
            else items.take(pa.array(self.rows))
        )

    def take(self, rows: npt.NDArray[np.intp]) -> EncodedItems:
        taken_rows = rows + self.first_row if self.rows is None else self.rows[rows]
        return EncodedItems(self.parts, 0, len(taken_rows), taken_rows)

    def slice(self, start_row: int, end_row: int) -> EncodedItems:
        if self.rows is not None:
            return EncodedItems(self.parts, 0, end_row - start_row, self.rows[start_row:end_row])
        return EncodedItems(self.parts, self.first_row + start_row, self.first_row + end_row)

    def _ends(self) -> Ints:
        if self.rows is None:
            return self.parts.ends[self.first_row : self.end_row + 1]
        return np.concatenate(([0], np.cumsum(self.parts.sizes[self.rows])))

    def _body(self, start_row: int, end_row: int) -> memoryview:
        if self.rows is None:
            return self.parts.slice(self.first_row + start_row, self.first_row + end_row)
        return self.parts.take(self.rows[start_row:end_row])


@dataclass(frozen=True, slots=True)
class CheckedRows:
    """The checked parts of every row; ``is_delayed`` are the rows that must not be sent in a batch."""

    body: pa.Array
    pieces: PropertyPieces
    flags: Ints | None
    is_delayed: Mask | None


@dataclass(frozen=True, slots=True)
class Encoder:
    """Encodes Arrow batches. ``columns`` has, for each column of the sink, the name of this column in the DataFrame.

    Items of more than ``single_above_bytes`` bytes are sent alone. The broker adds properties to a message that is sent alone,
    so the limit for the properties of such a message is lower.
    """

    columns: Mapping[str, str]
    max_message_size: int
    ids: UniqueIds | ContentIds
    single_above_bytes: int = codes.MAX_BATCH_BYTES

    @property
    def id_bytes(self) -> int:
        """The bytes of the id in a row's properties."""
        return len(_ID_START) + self.ids.width + 1

    def __call__(self, batch: pa.RecordBatch, first_row: int = 0) -> Encoded:
        """The items of ``batch``. Raises ``MessageRefused`` naming bad rows, counted from ``first_row``."""
        bad_rows = BadRows(first_row)
        checked = self.check(batch, bad_rows)
        bad_rows.raise_if_any()
        return self.join(checked)

    def check(self, batch: pa.RecordBatch, bad_rows: BadRows) -> CheckedRows:
        """Check the rows and make the parts of their items, without joining the parts. Adds bad rows to ``bad_rows``."""
        body = arrow.as_bytes(batch.column(self.columns["body"]))
        self._check_bodies(body, bad_rows)
        pieces = self._new_pieces(batch, bad_rows)
        properties.add_properties(pieces, batch, self.columns, bad_rows, must_sort=isinstance(self.ids, ContentIds))
        is_delayed = properties.add_delays(pieces, batch, self.columns, bad_rows)
        self._check_lengths(arrow.lengths(body), pieces.lengths + self.id_bytes, is_delayed, bad_rows)
        flags = None
        if "flag" in self.columns:
            flags = pc.fill_null(arrow.one_array(batch.column(self.columns["flag"])).cast(pa.int64()), 0).to_numpy()
            bad_rows.add(flags != flags.astype(np.int32), f"{self.columns['flag']} takes more than 32 bits")
        return CheckedRows(body, pieces, flags, is_delayed)

    def _new_pieces(self, batch: pa.RecordBatch, bad_rows: BadRows) -> PropertyPieces:
        return TextPieces(len(batch))

    def join(self, checked: CheckedRows, topics: RowTopics | None = None) -> Encoded:
        """The items of a batch without bad rows. Content ids are added later (``add_content_ids``). The encoder of a Proxy needs
        the ``topics``.
        """
        assert isinstance(checked.pieces, TextPieces)
        rows = len(checked.body)
        body_lengths = arrow.lengths(checked.body)
        property_lengths = checked.pieces.lengths + self.id_bytes
        head = np.zeros((rows, 5), ">i4")
        head[:, 0] = body_lengths + property_lengths + ITEM_OVERHEAD_BYTES
        if checked.flags is not None:
            head[:, 3] = checked.flags
        head[:, 4] = body_lengths
        first_constant, pieces = checked.pieces.split()
        middle_part = buffers.fixed_width_column(self._middle(property_lengths, first_constant))
        columns = (
            buffers.fixed_width_column(head.view(np.uint8).reshape(rows, _HEAD_BYTES)),
            checked.body,
            middle_part,
            *pieces,
        )
        return EncodedItems(ItemParts(columns, body_lengths + property_lengths + ITEM_OVERHEAD_BYTES), 0, rows)

    def _middle(self, property_lengths: Ints, next_constant: bytes) -> Any:
        """The part of each item between the body and the other properties. In each row, this part has the length of the
        properties, the message id, and ``next_constant``, with which the other properties begin. All rows have the same width.
        """
        start = 2 + len(_ID_START)
        end = start + self.ids.width
        middle = np.empty((len(property_lengths), end + 1 + len(next_constant)), np.uint8)
        middle[:, 0] = property_lengths >> 8
        middle[:, 1] = property_lengths & 0xFF
        middle[:, 2:start] = np.frombuffer(_ID_START, np.uint8)
        self._fill_ids(middle[:, start:end])
        middle[:, end:] = np.frombuffer(b"\x02" + next_constant, np.uint8)
        return middle

    def _fill_ids(self, target: npt.NDArray[np.uint8]) -> None:
        """Write the id of each row. If ids are computed from content, write zeros instead, because the hashed content does not
        include the id.
        """
        if isinstance(self.ids, ContentIds):
            target[:] = 0
        else:
            self.ids.fill(target)

    def add_content_ids(
        self, encoded: EncodedItems, checked: CheckedRows, hashes: Callable[[pa.Array, int], Hashes]
    ) -> None:
        """Add content ids to the items that ``join`` has made of ``checked``. Call this method before the items are used.
        ``hashes`` gets consecutive items and the number of the first item, and returns the hash of each item.
        """
        ids, lengths = self.ids, arrow.lengths(checked.body)
        assert isinstance(ids, ContentIds)

        def complete(items: pa.Array, first_row: int) -> None:
            data, ends = arrow.array_and_offsets(items)
            new_ids = np.empty((len(items), ids.width), np.uint8)
            ids.fill(new_ids, hashes(items, first_row))
            id_at_position = np.ndarray((len(data) - ids.width + 1,), f"V{ids.width}", data, strides=(1,))
            id_positions = ends[:-1] + lengths[first_row : first_row + len(items)] + _HEAD_BYTES + 2 + len(_ID_START)
            id_at_position[id_positions] = new_ids.view(id_at_position.dtype)[:, 0]

        encoded.parts.complete(complete)

    def _check_bodies(self, body: pa.Array, bad_rows: BadRows) -> None:
        name, nulls = self.columns["body"], arrow.null_mask(body)
        lengths = arrow.lengths(body)
        if nulls is not None:
            bad_rows.add(nulls, f"{name} is null")
            lengths = np.where(nulls, 1, lengths)
        bad_rows.add(lengths == 0, f"{name} is empty, which brokers refuse")
        if nulls is not None or bool((lengths == 0).any()):
            bad_rows.add_remedy("Option 'emptyBodies' = mark sends rows whose body is null or empty")
        max_bytes = self.max_message_size
        bad_rows.add(
            lengths > max_bytes, lambda i: f"{name} of {lengths[i]} bytes, option 'maxMessageSize' is {max_bytes}"
        )

    def _check_lengths(
        self, body_lengths: Ints, property_lengths: Ints, is_delayed: Mask | None, bad_rows: BadRows
    ) -> None:
        max_bytes, max_single_bytes = codes.MAX_PROPERTIES_BYTES, codes.SINGLE_MAX_PROPERTIES_BYTES
        bad_rows.add(
            property_lengths > max_bytes, lambda i: f"properties of {property_lengths[i]} bytes, {max_bytes} at most"
        )
        if bool((property_lengths > max_single_bytes).any()):
            is_alone = body_lengths + property_lengths + ITEM_OVERHEAD_BYTES > self.single_above_bytes
            if is_delayed is not None:
                is_alone |= is_delayed
            bad_rows.add(
                is_alone & (property_lengths > max_single_bytes),
                lambda i: (
                    f"properties of {property_lengths[i]} bytes, {max_single_bytes} at most in a message that travels alone"
                ),
            )
