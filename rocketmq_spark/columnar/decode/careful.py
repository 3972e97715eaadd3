"""Message by message, from objects: which messages belong to an answer, and the same record batches as ``decode`` gives.

For messages as objects, for buffers with inner batches and for answers with messages that cannot be decoded; and the witness
that the fast path is tested against. What the fast path decides of all answers of a buffer at once (``decoder``) is the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

import pyarrow as pa

from rocketmq_spark.base.codes import Property, SysFlag
from rocketmq_spark.columnar.decode import property_columns, stored_messages
from rocketmq_spark.columnar.decode.schema import Bad, Column, arrow_schema
from rocketmq_spark.columnar.decode.stored_messages import Malformed
from rocketmq_spark.model import NO_FILTER, Filter, MessageQueue, ReceivedMessage
from rocketmq_spark.model.pull import OffsetWindow
from rocketmq_spark.pull.answers import Fetched, Hole, Piece
from rocketmq_spark.wire.messages import decode_leniently

# Says how many answers may be used, given the offsets that they jump over.
OnHoles = Callable[[Sequence[Piece], Sequence[Hole]], int]
# Gives answers that went beyond their ends ones that are true of the offsets inside of messages.
OnBeyond = Callable[[Sequence[Piece]], Sequence[Piece]]


class AnswerCheck(NamedTuple):
    """What an answer is when it is looked at alone: whether its messages can be located, whether some may belong to
    another pull, and what it jumps over."""

    whole: bool
    beyond: bool
    holes: list[Hole]


def apart(fetched: Fetched) -> list[AnswerCheck]:
    """A look at each answer."""
    looks = []
    for i, piece in enumerate(fetched.pieces):
        beyond = piece.next_offset > piece.limit
        try:
            messages = stored_messages.locate(fetched.buffer, [piece])
        except Malformed:
            looks.append(AnswerCheck(False, beyond, []))
            continue
        holes = [hole._replace(piece=i) for hole in stored_messages.holes(messages)]
        # An inner batch has offsets behind the one that stands in its head.
        last = messages.any_flags & SysFlag.INNER_BATCH or (messages.part("queueOffset") >= piece.limit).any()
        looks.append(AnswerCheck(True, beyond and bool(last), holes))
    return looks


def usable(fetched: Fetched, on_holes: OnHoles, on_beyond: OnBeyond) -> list[Piece]:
    """The answers that may be used, with ends that are true of the offsets inside of their messages."""
    looks = apart(fetched)
    count = on_holes(fetched.pieces, [hole for look in looks for hole in look.holes])
    return ended(fetched.pieces[:count], [look.beyond for look in looks[:count]], on_beyond)


def ended(pieces: Sequence[Piece], beyond: Sequence[bool], on_beyond: OnBeyond) -> list[Piece]:
    """The answers, those that are ``beyond`` with true ends."""
    odd = [piece for piece, is_odd in zip(pieces, beyond, strict=True) if is_odd]
    meant = dict(zip(odd, on_beyond(odd), strict=True)) if odd else {}
    return [meant.get(piece, piece) for piece in pieces]


def placed(messages: Iterable[ReceivedMessage], piece: Piece, dense: bool = True) -> Iterator[ReceivedMessage]:
    """The messages of an answer that belong to what was asked for, as objects.

    Those of unknown offset, which could not be decoded, stand for what is missing between their neighbours; one row for
    each offset where every offset has a message (``dense``).
    """
    end = min(piece.limit, piece.next_offset)
    at, lost = piece.start, None
    for message in messages:
        if message.queue_offset < 0 and message.decode_error is not None:
            lost = lost or message
            continue
        if lost is not None:
            yield from _standing(lost, at, min(message.queue_offset, end), dense)
            lost = None
        # A pull inside an inner batch gives the whole batch. Only there do offsets before the start mean what they say;
        # those behind the end only where the broker itself went on beyond it.
        before = message.queue_offset < piece.start and message.sys_flag & SysFlag.INNER_BATCH
        if not before and (piece.next_offset <= piece.limit or message.queue_offset < piece.limit):
            yield message
        at = max(at, message.queue_offset + 1)
    if lost is not None:
        yield from _standing(lost, at, end, dense)


def _standing(message: ReceivedMessage, start: int, end: int, dense: bool) -> Iterator[ReceivedMessage]:
    # At least once: where neighbours are damaged too, or shifted, nothing may be missing between them.
    for offset in range(start, max(end if dense else 0, start + 1)):
        yield replace(message, queue_offset=offset)


Row = tuple[MessageQueue, ReceivedMessage]
# Of a message of a batch beside its body and its properties.
_BATCHED_BYTES = 256


class Careful:
    """Decodes what was fetched, whose piece numbers index ``queues`` into batches of ``columns``."""

    def __init__(
        self,
        queues: Sequence[MessageQueue],
        columns: Sequence[Column],
        include_properties: str,
        filtered: Filter = NO_FILTER,
        bad: Bad | None = None,
    ) -> None:
        self._queues = queues
        self._columns = tuple(columns)
        self._include = include_properties
        self._filtered = filtered
        self._wanted = set(filtered.expression.split(" || ")) if filtered and filtered.kind == "TAG" else None
        self._bad = bad or Bad()
        self._bodies = any(column.name.lower() == "body" for column in columns if column.property is None)

    def __call__(self, fetched: Fetched) -> pa.RecordBatch:
        """Its messages as one batch."""
        (batch,) = self.batches(fetched, None)
        return batch

    def batches(self, fetched: Fetched, portion_bytes: int | None) -> Iterator[pa.RecordBatch]:
        """The same in batches of about ``portion_bytes``, at least one."""
        rows: list[Row] = []
        size, made = 0, False
        for row in self._rows(fetched):
            rows.append(row)
            size += _size(row[1])
            if portion_bytes and size >= portion_bytes:
                yield self._batch(rows)
                rows, size, made = [], 0, True
        if rows or not made:
            yield self._batch(rows)

    def _rows(self, fetched: Fetched) -> Iterator[Row]:
        for piece in fetched.pieces:
            queue = self._queues[piece.number]
            data = fetched.buffer.data[piece.begin : piece.end]
            window = OffsetWindow(piece.start, piece.next_offset)
            messages = map(self._judged, decode_leniently(data, queue.broker_name, window=window))
            for message in placed(messages, piece, dense=not self._filtered):
                if message.decode_error is not None:
                    self._bad.met(queue, message.queue_offset, message.decode_error)
                    if self._bad.skips:
                        continue
                if (
                    self._wanted is None
                    or _unreadable(message)
                    or message.properties.get(Property.TAGS) in self._wanted
                ):
                    yield queue, message

    def _judged(self, message: ReceivedMessage) -> ReceivedMessage:
        """A body that is not selected need not be readable."""
        if message.decode_error is None or self._bodies or _unreadable(message) or _is_batch(message):
            return message
        return replace(message, decode_error=None, sys_flag=message.sys_flag & ~int(SysFlag.COMPRESSED))

    def _batch(self, rows: list[Row]) -> pa.RecordBatch:
        arrays = [self._column(rows, column) for column in self._columns]
        return pa.RecordBatch.from_arrays(arrays, schema=arrow_schema(self._columns))

    def _column(self, rows: list[Row], column: Column) -> pa.Array:
        if column.property is not None:
            texts = pa.array([m.properties.get(column.property) for _, m in rows], pa.string())
            return property_columns.cast(texts, column.arrow)
        value, known, include = column.reference, column.of_queue, self._include
        assert value is not None
        return pa.array([value(q, m, include) if known or not _unreadable(m) else None for q, m in rows], column.arrow)


def _size(message: ReceivedMessage) -> int:
    """About what it has as a row. One of a batch does not have the bytes of all of it."""
    if message.decode_error is not None:
        return message.store_size
    if not _is_batch(message):
        return len(message.body) + message.store_size
    return len(message.body) + _BATCHED_BYTES + sum(map(len, message.properties.values()))


def _unreadable(message: ReceivedMessage) -> bool:
    """Not just its body: such a message has no topic."""
    return message.decode_error is not None and not message.topic


def _is_batch(message: ReceivedMessage) -> bool:
    return bool(message.sys_flag & SysFlag.INNER_BATCH)


def decode(
    fetched: Fetched,
    queues: Sequence[MessageQueue],
    columns: Sequence[Column],
    include_properties: str,
    filtered: Filter = NO_FILTER,
) -> pa.RecordBatch:
    """What was fetched as ``columns``; a bad one is an error."""
    return Careful(queues, columns, include_properties, filtered)(fetched)
