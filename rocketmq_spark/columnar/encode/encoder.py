"""Arrow columns to batch bodies, without a Python step per row.

A batch item is ``total size, 0, 0, flag, body length, body, properties length, properties``. Its parts are made as
Arrow columns and joined row by row in one go: the data buffer of the result is the batch body, and its offsets tell
where it may be cut. Rows that no broker would take are found first, all of them, so that nothing of a faulty batch is
sent.
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
from rocketmq_spark.columnar.arrow import Flags, Ints
from rocketmq_spark.columnar.encode import properties
from rocketmq_spark.columnar.encode.batch import UniqueIds
from rocketmq_spark.columnar.encode.content_ids import ContentIds, Hashes
from rocketmq_spark.columnar.encode.properties import BadRows, PropertyPieces, TextPieces
from rocketmq_spark.model.send import Batch

_HEAD_BYTES = 20
OVERHEAD = _HEAD_BYTES + 2
_ID_START = f"{codes.Property.UNIQ_KEY}\x01".encode()


class Growth(NamedTuple):
    """By how much at most an item grows on its way to the broker, and what a batch may have there."""

    item_bytes: int = 0
    max_bytes: int = 0


_NOT_GROWN = Growth()


class Chunk(NamedTuple):
    """One batch on the wire and how many rows it has: a memoryview of items, or what another transport's encoder makes."""

    body: memoryview | Batch
    rows: int


class RowTopics(NamedTuple):
    """The topics of an Arrow batch, and which of them each row has, where they are several."""

    names: Sequence[str]
    codes: Ints | None = None


class Encoded:
    """Rows of an Arrow batch as items: all in their order, or some in another."""

    __slots__ = ()

    def __len__(self) -> int:
        return len(self._ends()) - 1

    def joined(self) -> pa.Array:
        """The items as a binary column."""
        raise NotImplementedError

    def take(self, rows: npt.NDArray[np.intp]) -> Encoded:
        """Some of the items, in the order of ``rows``."""
        raise NotImplementedError

    def slice(self, start: int, end: int) -> Encoded:
        raise NotImplementedError

    def chunks(self, max_bytes: int, max_rows: int | None = None, grown: Growth = _NOT_GROWN) -> Iterator[Chunk]:
        """Cut into batches of at most ``max_bytes`` and ``max_rows``; a larger single item makes a batch of its own.

        None keeps more than twice its bytes: who waits for a queue keeps those of its rows, and not of all others.
        """
        ends = self._ends()
        start, rows = 0, len(ends) - 1
        stored = self._stored() + grown.item_bytes * np.arange(rows + 1) if grown.item_bytes else None
        while start < rows:
            limit = int(ends[start]) + max_bytes
            end = int(np.searchsorted(ends, limit, side="right")) - 1
            if stored is not None:
                end = min(end, int(np.searchsorted(stored, stored[start] + grown.max_bytes, side="right")) - 1)
            end = max(start + 1, end)
            end = end if max_rows is None else min(end, start + max_rows)
            yield Chunk(self._body(start, end), end - start)
            start = end

    def _ends(self) -> Ints:
        """Where each item ends, behind where the first one begins."""
        raise NotImplementedError

    def _stored(self) -> Ints:
        """The same in the layout that brokers count."""
        return self._ends()

    def _body(self, start: int, end: int) -> memoryview | Batch:
        raise NotImplementedError


# To join or to take fewer rows than that costs more than the copy that it saves.
_FEW_ROWS = 64


# Completes items that were joined, in place; the number of the first of them.
Complete = Callable[[pa.Array, int], None]


class ItemParts:
    """What the items of an Arrow batch are joined of, and where they end. All are joined only where it has to be."""

    def __init__(self, columns: Sequence[pa.Array | bytes], sizes: Ints) -> None:
        self._columns = columns
        self._items: pa.Array | None = None
        self._complete: Complete | None = None
        self.sizes = sizes
        self.ends = np.concatenate(([0], np.cumsum(sizes)))

    @property
    def items(self) -> pa.Array:
        if self._items is None:
            self._items = self._joined(self._columns, 0)
        return self._items

    def complete(self, how: Complete) -> None:
        """Complete items as they are joined, while they are in the processor's cache; and those that were joined already."""
        self._complete = how
        if self._items is not None:
            how(self._items, 0)

    def _joined(self, columns: Sequence[pa.Array | bytes], first: int) -> pa.Array:
        items = arrow.joined(*columns)
        if self._complete is not None:
            self._complete(items, first)
        return items

    def between(self, start: int, end: int) -> memoryview:
        """Items that follow each other, as the data buffer of a join of their own, or a copy of a part of the large one."""
        if self._items is None and end - start >= _FEW_ROWS:
            columns = [part if isinstance(part, bytes) else part.slice(start, end - start) for part in self._columns]
            return arrow.content(self._joined(columns, start))[0]
        data, ends = arrow.content(self.items)
        body = data[int(ends[start]) : int(ends[end])]
        return body if 2 * len(body) >= len(data) else arrow.copied(body)

    def of(self, rows: npt.NDArray[np.intp]) -> memoryview:
        """Some items, in the order of ``rows``, as one buffer."""
        if len(rows) >= _FEW_ROWS:
            return arrow.content(self.items.take(pa.array(rows)))[0]
        data, ends = arrow.content(self.items)
        return memoryview(b"".join([data[int(ends[row]) : int(ends[row + 1])] for row in rows.tolist()]))


@dataclass(frozen=True, slots=True)
class EncodedItems(Encoded):
    """Items of batches of brokers: those of ``rows``, or without them the ones from ``first`` to ``last``."""

    parts: ItemParts
    first: int
    last: int
    rows: npt.NDArray[np.intp] | None = None

    def joined(self) -> pa.Array:
        items = self.parts.items
        return items.slice(self.first, self.last - self.first) if self.rows is None else items.take(pa.array(self.rows))

    def take(self, rows: npt.NDArray[np.intp]) -> EncodedItems:
        mine = rows + self.first if self.rows is None else self.rows[rows]
        return EncodedItems(self.parts, 0, len(mine), mine)

    def slice(self, start: int, end: int) -> EncodedItems:
        if self.rows is not None:
            return EncodedItems(self.parts, 0, end - start, self.rows[start:end])
        return EncodedItems(self.parts, self.first + start, self.first + end)

    def _ends(self) -> Ints:
        if self.rows is None:
            return self.parts.ends[self.first : self.last + 1]
        return np.concatenate(([0], np.cumsum(self.parts.sizes[self.rows])))

    def _body(self, start: int, end: int) -> memoryview:
        if self.rows is None:
            return self.parts.between(self.first + start, self.first + end)
        return self.parts.of(self.rows[start:end])


@dataclass(frozen=True, slots=True)
class Checked:
    """The parts of every row, looked through; ``delayed`` are the rows that must not travel in a batch."""

    body: pa.Array
    pieces: PropertyPieces
    flags: Ints | None
    delayed: Flags | None


@dataclass(frozen=True, slots=True)
class Encoder:
    """Encodes Arrow batches whose columns are named by ``columns`` (name in the sink's table to name in the DataFrame).

    Items of more than ``alone_above`` bytes travel alone, where the broker adds to the properties.
    """

    columns: Mapping[str, str]
    max_message_size: int
    ids: UniqueIds | ContentIds
    alone_above: int = codes.MAX_BATCH_BYTES

    @property
    def id_bytes(self) -> int:
        """What the id takes of a row's properties."""
        return len(_ID_START) + self.ids.width + 1

    def __call__(self, batch: pa.RecordBatch, first_row: int = 0) -> Encoded:
        """The items of ``batch``. Raises ``MessageRefused`` naming bad rows, counted from ``first_row``."""
        bad_rows = BadRows(first_row)
        checked = self.check(batch, bad_rows)
        bad_rows.raise_if_any()
        return self.join(checked)

    def check(self, batch: pa.RecordBatch, bad_rows: BadRows) -> Checked:
        """Everything but the joining; bad rows are noted."""
        body = arrow.as_bytes(batch.column(self.columns["body"]))
        self._check_bodies(body, bad_rows)
        pieces = self._pieces(batch, bad_rows)
        properties.add_properties(pieces, batch, self.columns, bad_rows, by_name=isinstance(self.ids, ContentIds))
        delayed = properties.add_delays(pieces, batch, self.columns, bad_rows)
        self._check_lengths(arrow.lengths(body), pieces.lengths + self.id_bytes, delayed, bad_rows)
        flags = None
        if "flag" in self.columns:
            flags = pc.fill_null(arrow.plain(batch.column(self.columns["flag"])).cast(pa.int64()), 0).to_numpy()
            bad_rows.add(flags != flags.astype(np.int32), f"{self.columns['flag']} takes more than 32 bits")
        return Checked(body, pieces, flags, delayed)

    def _pieces(self, batch: pa.RecordBatch, bad_rows: BadRows) -> PropertyPieces:
        return TextPieces(len(batch))

    def join(self, checked: Checked, topics: RowTopics | None = None) -> Encoded:
        """The items of a batch without bad rows; ids of content are left out (``identify``). Some transports need the topic."""
        assert isinstance(checked.pieces, TextPieces)
        rows = len(checked.body)
        body_lengths = arrow.lengths(checked.body)
        lengths = checked.pieces.lengths + self.id_bytes
        head = np.zeros((rows, 5), ">i4")
        head[:, 0] = body_lengths + lengths + OVERHEAD
        if checked.flags is not None:
            head[:, 3] = checked.flags
        head[:, 4] = body_lengths
        start, pieces = checked.pieces.split()
        middle = arrow.fixed(self._middle(lengths, start))
        columns = (arrow.fixed(head.view(np.uint8).reshape(rows, _HEAD_BYTES)), checked.body, middle, *pieces)
        return EncodedItems(ItemParts(columns, body_lengths + lengths + OVERHEAD), 0, rows)

    def _middle(self, lengths: Ints, after: bytes) -> Any:
        """Properties length, message id, and the constant that the other properties start with: all of one width."""
        start = 2 + len(_ID_START)
        end = start + self.ids.width
        middle = np.empty((len(lengths), end + 1 + len(after)), np.uint8)
        middle[:, 0] = lengths >> 8
        middle[:, 1] = lengths & 0xFF
        middle[:, 2:start] = np.frombuffer(_ID_START, np.uint8)
        self._fill(middle[:, start:end])
        middle[:, end:] = np.frombuffer(b"\x02" + after, np.uint8)
        return middle

    def _fill(self, target: npt.NDArray[np.uint8]) -> None:
        """The id of each row; zeros where it is made of the content, of which it is no part."""
        if isinstance(self.ids, ContentIds):
            target[:] = 0
        else:
            self.ids.fill(target)

    def identify(self, encoded: EncodedItems, checked: Checked, hashes: Callable[[pa.Array, int], Hashes]) -> None:
        """Have the ids of content written into the items that ``join`` has made of ``checked``, before anything is taken of
        them. ``hashes`` are those of items that follow each other, from the number of the first of them on.
        """
        ids, lengths = self.ids, arrow.lengths(checked.body)
        assert isinstance(ids, ContentIds)

        def complete(items: pa.Array, first: int) -> None:
            data, ends = arrow.data(items)
            made = np.empty((len(items), ids.width), np.uint8)
            ids.fill(made, hashes(items, first))
            spaces = np.ndarray((len(data) - ids.width + 1,), f"V{ids.width}", data, strides=(1,))
            places = ends[:-1] + lengths[first : first + len(items)] + _HEAD_BYTES + 2 + len(_ID_START)
            spaces[places] = made.view(spaces.dtype)[:, 0]

        encoded.parts.complete(complete)

    def _check_bodies(self, body: pa.Array, bad_rows: BadRows) -> None:
        nulls = arrow.nulls(body)
        lengths = arrow.lengths(body)
        if nulls is not None:
            bad_rows.add(nulls, "body is null")
            lengths = np.where(nulls, 1, lengths)
        bad_rows.add(lengths == 0, "body is empty, which brokers refuse")
        max_bytes = self.max_message_size
        bad_rows.add(
            lengths > max_bytes, lambda i: f"body of {lengths[i]} bytes, option 'maxMessageSize' is {max_bytes}"
        )

    def _check_lengths(self, body: Ints, lengths: Ints, delayed: Flags | None, bad_rows: BadRows) -> None:
        max_bytes, single = codes.MAX_PROPERTIES_BYTES, codes.SINGLE_MAX_PROPERTIES
        bad_rows.add(lengths > max_bytes, lambda i: f"properties of {lengths[i]} bytes, {max_bytes} at most")
        if bool((lengths > single).any()):
            alone = body + lengths + OVERHEAD > self.alone_above
            if delayed is not None:
                alone |= delayed
            bad_rows.add(
                alone & (lengths > single),
                lambda i: f"properties of {lengths[i]} bytes, {single} at most in a message that travels alone",
            )
