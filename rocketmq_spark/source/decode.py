"""A window of pulled answers to one Arrow record batch, without a Python step per message.

``frames`` finds the messages, ``properties`` takes their property strings apart, ``slices`` copies values; this module
puts the columns together. Windows with inner batches, which hold messages within messages, go through the careful path
(``careful``), which gives the same batch from objects.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from rocketmq_spark import codes
from rocketmq_spark.client.ranges import Piece, Window
from rocketmq_spark.errors import DecodeError
from rocketmq_spark.model import MessageQueue
from rocketmq_spark.source import careful, frames, slices
from rocketmq_spark.source import properties as props
from rocketmq_spark.source.frames import Frames, Malformed
from rocketmq_spark.source.schema import BASIC, PROPERTIES, TIMESTAMP, Column, arrow_schema
from rocketmq_spark.wire import compression

_INNER = codes.SysFlag.INNER_BATCH


@dataclass(frozen=True)
class Decoder:
    """Decodes windows whose piece numbers index ``queues`` into batches of ``columns``."""

    queues: Sequence[MessageQueue]
    columns: tuple[Column, ...] = BASIC
    include_properties: str = "user"
    wanted: props.Wanted = field(init=False)

    def __post_init__(self) -> None:
        names = {column.name for column in self.columns}
        wanted = props.Wanted(
            "tags" in names,
            "keys" in names,
            "msgId" in names,
            self.include_properties if "properties" in names else "none",
        )
        object.__setattr__(self, "wanted", wanted)

    def __call__(self, window: Window) -> pa.RecordBatch:
        """The window's messages in its order. Raises ``DecodeError`` with queue and offset of a bad message."""
        pieces = window.pieces
        try:
            found = frames.read(window.buffer, pieces)
            if found.any_flags & _INNER and ((found.sys_flags & _INNER) != 0).any():
                return careful.decode(window, self.queues, self.columns, self.include_properties)
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
        if wanted.tags or wanted.keys or wanted.msg_id or wanted.properties != "none":
            pairs = props.locate(found.buffer, found.properties_start, found.properties_end)
            made = props.columns(pairs, wanted)
        index_of_row = np.fromiter((piece.number for piece in pieces), np.intp, len(pieces))[found.piece_of_row]
        build: dict[str, Callable[[], pa.Array]] = {
            "topic": lambda: self._constant(index_of_row, lambda queue: queue.topic),
            "brokerName": lambda: self._constant(index_of_row, lambda queue: queue.broker_name),
            "queueId": lambda: slices.integers(found.head["queueId"].astype(np.int32), pa.int32()),
            "queueOffset": lambda: slices.integers(found.head["queueOffset"].astype(np.int64), pa.int64()),
            "body": lambda: _bodies(found),
            "tags": lambda: made.tags,
            "keys": lambda: made.keys,
            "bornTimestamp": lambda: _timestamps(found.head["bornTimestamp"]),
            "storeTimestamp": lambda: _timestamps(found.store_part("storeTimestamp")),
            "msgId": lambda: _message_ids(found, made.msg_id),
            "properties": lambda: _or_nulls(made.properties, len(found)),
        }
        arrays = [build[column.name]() for column in self.columns]
        return pa.RecordBatch.from_arrays(arrays, schema=arrow_schema(self.columns))

    def _constant(self, index_of_row: npt.NDArray[np.intp], name_of: Callable[[MessageQueue], str]) -> pa.Array:
        """A text that depends on the queue alone, which in most windows means the same in every row."""
        names = [name_of(queue) for queue in self.queues]
        if len(set(names)) == 1:
            return slices.repeated(names[0], len(index_of_row))
        return pa.array(names, pa.string()).take(pa.array(index_of_row))


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


def _timestamps(milliseconds: npt.NDArray[Any]) -> pa.Array:
    return slices.integers(milliseconds.astype(np.int64) * 1000, TIMESTAMP)


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
    return pc.coalesce(unique, offset_message_ids(found))


def offset_message_ids(found: Frames) -> pa.Array:
    """Hex of store host and commit log offset: 32 characters, 56 where the store host is IPv6."""
    host = found.store_part("storeHost")
    rows = np.empty((len(found), 16), np.uint8)
    rows[:, :8] = np.frombuffer(host.tobytes(), np.uint8).reshape(-1, 8)
    rows[:, 8:] = np.frombuffer(found.head["commitLogOffset"].tobytes(), np.uint8).reshape(-1, 8)
    short = slices.hexadecimal(rows)
    if not found.any_flags & codes.SysFlag.STOREHOST_V6:
        return short
    values = short.to_pylist()
    for row in np.flatnonzero((found.sys_flags & codes.SysFlag.STOREHOST_V6) != 0).tolist():
        at = int(found.starts[row]) + 64 + (12 if found.sys_flags[row] & codes.SysFlag.BORNHOST_V6 else 0)
        address = found.buffer[at : at + 20].tobytes() + found.head["commitLogOffset"][row : row + 1].tobytes()
        values[row] = address.hex().upper()
    return pa.array(values, pa.string())
