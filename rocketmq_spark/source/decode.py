"""A window of pulled answers to one Arrow record batch, without a Python step per message.

``frames`` finds the messages, ``properties`` takes their property strings apart, ``slices`` copies values; this module
puts the columns together. Windows with inner batches, which hold messages within messages, go through the careful path
(``careful``), which gives the same batch from objects.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from rocketmq_spark import codes
from rocketmq_spark.client.ranges import Window
from rocketmq_spark.errors import DecodeError
from rocketmq_spark.model import MessageQueue
from rocketmq_spark.session import NO_FILTER, Filter
from rocketmq_spark.source import careful, frames, header, promoted, slices
from rocketmq_spark.source import properties as props
from rocketmq_spark.source.frames import Frames, Malformed
from rocketmq_spark.source.schema import BASIC, PROPERTIES, Column, arrow_schema
from rocketmq_spark.wire import compression

# Plain numbers: an enumeration costs a microsecond an operation.
_INNER = int(codes.SysFlag.INNER_BATCH)
_COMPRESSED = int(codes.SysFlag.COMPRESSED)


@dataclass(frozen=True)
class Decoder:
    """Decodes windows whose piece numbers index ``queues`` into batches of ``columns``."""

    queues: Sequence[MessageQueue]
    columns: tuple[Column, ...] = BASIC
    include_properties: str = "user"
    filtered: Filter = NO_FILTER
    wanted: props.Wanted = field(init=False)

    def __post_init__(self) -> None:
        names = {column.name.lower() for column in self.columns if column.property is None}
        by_tag = bool(self.filtered) and self.filtered.kind == "TAG"
        wanted = props.Wanted(
            "tags" in names or by_tag,
            "keys" in names,
            "msgid" in names,
            self.include_properties if "properties" in names else "none",
            tuple(column.property for column in self.columns if column.property is not None),
        )
        object.__setattr__(self, "wanted", wanted)

    def __call__(self, window: Window) -> pa.RecordBatch:
        """The window's messages in its order. Raises ``DecodeError`` with queue and offset of a bad message."""
        (batch,) = self.batches(window, None)
        return batch

    def batches(self, window: Window, portion_bytes: int | None) -> Iterator[pa.RecordBatch]:
        """The same in batches of about ``portion_bytes``, to be taken while the window is valid."""
        try:
            found = frames.read(window.buffer, window.pieces)
            if found.any_flags & _INNER and ((found.sys_flags & _INNER) != 0).any():
                whole = careful.decode(window, self.queues, self.columns, self.include_properties, self.filtered)
                yield from (whole[rows] for rows in _portions(len(whole), whole.nbytes, portion_bytes))
            else:
                yield from self._batches(_trimmed(found), portion_bytes)
        except Malformed as e:
            raise self._decode_error(window, e.at, e.why) from e

    def _decode_error(self, window: Window, at: int, why: str) -> DecodeError:
        piece = next(piece for piece in window.pieces if piece.begin <= at < piece.end)
        queue = self.queues[piece.number]
        return DecodeError(
            f"a message at or after offset {piece.start} cannot be decoded: {why}",
            topic=queue.topic,
            queue=str(queue),
            remedy="Look at it with: rocketmq-spark tail; to step over it, start the query behind that offset",
        )

    def _batches(self, found: Frames, portion_bytes: int | None) -> Iterator[pa.RecordBatch]:
        """Bodies, most of the bytes, are copied portion by portion, which stay in a core's cache that way between
        Arrow, the socket and the JVM; and the memory of one is taken for the next."""
        wanted = self.wanted
        made = props.Columns()
        if wanted.anything:
            pairs = props.locate(found.buffer, found.properties_start, found.properties_end)
            made = props.columns(pairs, wanted)
        number_of_row = frames.field(found.pieces, "number")[found.piece_of_row]
        build: dict[str, Callable[[], pa.Array]] = {
            "topic": lambda: self._constant(number_of_row, lambda queue: queue.topic),
            "brokername": lambda: self._constant(number_of_row, lambda queue: queue.broker_name),
            "tags": lambda: made.tags,
            "keys": lambda: made.keys,
            "msgid": lambda: _message_ids(found, made.msg_id),
            "properties": lambda: _or_nulls(made.properties, len(found)),
        }
        arrays: list[pa.Array | None] = []
        for column in self.columns:
            name = column.name.lower()
            if column.property is not None:
                arrays.append(promoted.cast(made.promoted[column.property], column.arrow))
            elif name == "body":
                arrays.append(None)
            elif name in build:
                arrays.append(build[name]())
            else:
                arrays.append(header.column(found, column))
        body_bytes = int((found.body_end - found.body_start).sum())
        size = sum(body_bytes if array is None else array.nbytes for array in arrays)
        schema, exact = arrow_schema(self.columns), self._exact(made)
        for rows in _portions(len(found), size, portion_bytes):
            parts = [_bodies(found, rows) if array is None else array[rows] for array in arrays]
            batch = pa.RecordBatch.from_arrays(parts, schema=schema)
            yield batch if exact is None else batch.filter(exact[rows])

    def _exact(self, made: props.Columns) -> pa.Array | None:
        """Which rows really have a wanted tag, where some merely have the hash of one."""
        if not self.filtered or self.filtered.kind != "TAG":
            return None
        mask = pc.is_in(made.tags, pa.array(self.filtered.expression.split(" || "), pa.string()))
        return None if pc.all(mask).as_py() else mask

    def _constant(self, number_of_row: npt.NDArray[np.intp], name_of: Callable[[MessageQueue], str]) -> pa.Array:
        """A text that depends on the queue alone, which in most windows means the same in every row."""
        names = [name_of(queue) for queue in self.queues]
        if len(set(names)) == 1:
            return slices.repeated(names[0], len(number_of_row))
        return pa.array(names, pa.string()).take(slices.integers(number_of_row, pa.int64()))


def _portions(rows: int, size: int, portion_bytes: int | None) -> list[slice]:
    """Equal parts of ``rows`` rows that have ``size`` bytes together; always one, so that a schema gets through."""
    parts = math.ceil(size / portion_bytes) if portion_bytes else 1
    step = max(1, math.ceil(rows / max(1, parts)))
    return [slice(start, start + step) for start in range(0, max(1, rows), step)]


def _trimmed(found: Frames) -> Frames:
    """Without the messages that an answer gave beyond what it was asked for: those belong to another pull.

    Only where the broker itself went on beyond the end: on a queue whose index was shifted by a damaged message the
    offset inside a message may reach the end although its position does not.
    """
    limits = frames.field(found.pieces, "limit")
    beyond = frames.field(found.pieces, "next_offset") > limits
    if not beyond.any():
        return found
    limits = np.where(beyond, limits, 1 << 62)
    inside = found.head["queueOffset"] < limits[found.piece_of_row]
    return found if inside.all() else found.keep(inside)


def _or_nulls(array: pa.Array | None, count: int) -> pa.Array:
    return array if array is not None else slices.nulls(PROPERTIES, count)


def _bodies(found: Frames, rows: slice) -> pa.Array:
    starts, ends = found.body_start[rows], found.body_end[rows]
    bodies = slices.binary(found.buffer, starts, ends)
    if not found.any_flags & _COMPRESSED:
        return bodies
    flags = found.sys_flags[rows]
    packed = ((flags & _COMPRESSED) != 0) & (ends > starts)
    values = bodies.to_pylist()
    for row in np.flatnonzero(packed).tolist():
        try:
            values[row] = compression.decompress(values[row], int(flags[row]))
        except DecodeError as e:
            raise Malformed(int(found.starts[rows][row]), e.message) from e
    return pa.array(values, pa.binary())


def _message_ids(found: Frames, unique: pa.Array | None) -> pa.Array:
    """The client's id, and where a message has none the offset message id, as Java consumers show it."""
    assert unique is not None
    if not unique.null_count:
        return unique
    return pc.coalesce(unique, header.offset_message_ids(found))
