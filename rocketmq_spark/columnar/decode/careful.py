"""The same record batches as ``decode`` gives, made message by message from objects.

For buffers with inner batches and for answers with messages that cannot be decoded; and the witness that the fast path
is tested against.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import pyarrow as pa

from rocketmq_spark.base.codes import Property, SysFlag
from rocketmq_spark.columnar.decode import property_columns
from rocketmq_spark.columnar.decode.answers import placed
from rocketmq_spark.columnar.decode.schema import Bad, Column, arrow_schema
from rocketmq_spark.model import NO_FILTER, Filter, MessageQueue, ReceivedMessage
from rocketmq_spark.pull.fetched import Fetched
from rocketmq_spark.wire.messages import decode_leniently
from rocketmq_spark.wire.window import OffsetWindow

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
