"""A window of pulled answers to one Arrow record batch, without a Python step per message.

``frames`` finds the messages, ``properties`` takes their property strings apart, ``slices`` copies values; this module
puts the columns together. Windows with inner batches, which hold messages within messages, go through the careful path
(``careful``), which gives the same batch from objects.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from rocketmq_spark import codes
from rocketmq_spark.client.ranges import Piece, Window
from rocketmq_spark.errors import DecodeError
from rocketmq_spark.model import MessageQueue
from rocketmq_spark.session import NO_FILTER, Filter
from rocketmq_spark.source import careful, frames, header, promoted, slices
from rocketmq_spark.source import properties as props
from rocketmq_spark.source.frames import Frames, Malformed
from rocketmq_spark.source.schema import BASIC, PROPERTIES, Column, arrow_schema
from rocketmq_spark.wire import compression

_INNER = codes.SysFlag.INNER_BATCH


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
        pieces = window.pieces
        try:
            found = frames.read(window.buffer, pieces)
            if found.any_flags & _INNER and ((found.sys_flags & _INNER) != 0).any():
                return careful.decode(window, self.queues, self.columns, self.include_properties, self.filtered)
            return self._batch(_trimmed(found, pieces), pieces)
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

    def _batch(self, found: Frames, pieces: list[Piece]) -> pa.RecordBatch:
        wanted = self.wanted
        made = props.Columns()
        if wanted.anything:
            pairs = props.locate(found.buffer, found.properties_start, found.properties_end)
            made = props.columns(pairs, wanted)
        number_of_row = np.fromiter((piece.number for piece in pieces), np.intp, len(pieces))[found.piece_of_row]
        build: dict[str, Callable[[], pa.Array]] = {
            "topic": lambda: self._constant(number_of_row, lambda queue: queue.topic),
            "brokername": lambda: self._constant(number_of_row, lambda queue: queue.broker_name),
            "body": lambda: _bodies(found),
            "tags": lambda: made.tags,
            "keys": lambda: made.keys,
            "msgid": lambda: _message_ids(found, made.msg_id),
            "properties": lambda: _or_nulls(made.properties, len(found)),
        }
        arrays = []
        for column in self.columns:
            if column.property is not None:
                arrays.append(promoted.cast(made.promoted[column.property], column.arrow))
            elif column.name.lower() in build:
                arrays.append(build[column.name.lower()]())
            else:
                arrays.append(header.column(found, column))
        batch = pa.RecordBatch.from_arrays(arrays, schema=arrow_schema(self.columns))
        return self._exact(batch, made)

    def _exact(self, batch: pa.RecordBatch, made: props.Columns) -> pa.RecordBatch:
        """Without rows whose tag merely has the hash of a wanted one."""
        if not self.filtered or self.filtered.kind != "TAG":
            return batch
        mask = pc.is_in(made.tags, pa.array(self.filtered.expression.split(" || "), pa.string()))
        return batch if pc.all(mask).as_py() else batch.filter(mask)

    def _constant(self, number_of_row: npt.NDArray[np.intp], name_of: Callable[[MessageQueue], str]) -> pa.Array:
        """A text that depends on the queue alone, which in most windows means the same in every row."""
        names = [name_of(queue) for queue in self.queues]
        if len(set(names)) == 1:
            return slices.repeated(names[0], len(number_of_row))
        return pa.array(names, pa.string()).take(slices.integers(number_of_row, pa.int64()))


def _trimmed(found: Frames, pieces: list[Piece]) -> Frames:
    """Without the messages that an answer gave beyond what it was asked for: those belong to another pull.

    Only where the broker itself went on beyond the end: on a queue whose index was shifted by a damaged message the
    offset inside a message may reach the end although its position does not.
    """
    if all(piece.next_offset <= piece.limit for piece in pieces):
        return found
    limits = np.fromiter(
        (piece.limit if piece.next_offset > piece.limit else 1 << 62 for piece in pieces), np.int64, len(pieces)
    )
    inside = found.head["queueOffset"] < limits[found.piece_of_row]
    return found if inside.all() else found.keep(inside)


def _or_nulls(array: pa.Array | None, count: int) -> pa.Array:
    return array if array is not None else slices.nulls(PROPERTIES, count)


def _bodies(found: Frames) -> pa.Array:
    bodies = slices.binary(found.buffer, found.body_start, found.body_end)
    if not found.any_flags & codes.SysFlag.COMPRESSED:
        return bodies
    packed = ((found.sys_flags & codes.SysFlag.COMPRESSED) != 0) & (found.body_end > found.body_start)
    values = bodies.to_pylist()
    for row in np.flatnonzero(packed).tolist():
        try:
            values[row] = compression.decompress(values[row], int(found.sys_flags[row]))
        except DecodeError as e:
            raise Malformed(int(found.starts[row]), e.message) from e
    return pa.array(values, pa.binary())


def _message_ids(found: Frames, unique: pa.Array | None) -> pa.Array:
    """The client's id, and where a message has none the offset message id, as Java consumers show it."""
    assert unique is not None
    if not unique.null_count:
        return unique
    return pc.coalesce(unique, header.offset_message_ids(found))
