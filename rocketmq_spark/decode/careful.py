"""The same record batches as ``decode`` gives, made message by message from objects.

For windows with inner batches and for answers with messages that cannot be decoded; and the witness that the fast path
is tested against.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import pyarrow as pa

from rocketmq_spark.codes import Property, SysFlag
from rocketmq_spark.decode import promoted
from rocketmq_spark.decode.answers import placed
from rocketmq_spark.decode.bad import Bad
from rocketmq_spark.decode.schema import EARLIEST_MS, LATEST_MS, Column, arrow_schema
from rocketmq_spark.model import NO_FILTER, Filter, MessageQueue, ReceivedMessage
from rocketmq_spark.pull.window import Window
from rocketmq_spark.wire.messages import decode_leniently
from rocketmq_spark.wire.properties import is_reserved

Row = tuple[MessageQueue, ReceivedMessage]

_VALUES: dict[str, Callable[[MessageQueue, ReceivedMessage], Any]] = {
    "topic": lambda queue, m: queue.topic,
    "brokername": lambda queue, m: queue.broker_name,
    "queueid": lambda queue, m: queue.queue_id if m.decode_error and m.queue_id < 0 else m.queue_id,
    "queueoffset": lambda queue, m: m.queue_offset,
    "body": lambda queue, m: None if m.decode_error else m.body,
    "tags": lambda queue, m: m.properties.get(Property.TAGS),
    "keys": lambda queue, m: _keys(m.properties.get(Property.KEYS)),
    "borntimestamp": lambda queue, m: _microseconds(m.born_timestamp_ms),
    "storetimestamp": lambda queue, m: _microseconds(m.store_timestamp_ms),
    "msgid": lambda queue, m: m.msg_id,
    "offsetmsgid": lambda queue, m: m.offset_msg_id,
    "flag": lambda queue, m: m.flag,
    "sysflag": lambda queue, m: m.sys_flag,
    "reconsumetimes": lambda queue, m: m.reconsume_times,
    "bornhost": lambda queue, m: m.born_host,
    "storehost": lambda queue, m: m.store_host,
    "commitlogoffset": lambda queue, m: m.commit_log_offset,
    "storesize": lambda queue, m: m.store_size,
    "decodeerror": lambda queue, m: m.decode_error,
}
# What is known of a message whose parts cannot be told from each other: the rest of its row is null.
_OF_THE_QUEUE = frozenset({"topic", "brokername", "queueid", "queueoffset", "decodeerror"})


def _microseconds(ms: int) -> int:
    return min(max(ms, EARLIEST_MS), LATEST_MS) * 1000


def _keys(text: str | None) -> list[str] | None:
    return None if text is None else [key for key in text.split(" ") if key]


class Careful:
    """Decodes windows whose piece numbers index ``queues`` into batches of ``columns``."""

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

    def __call__(self, window: Window) -> pa.RecordBatch:
        """The window's messages as one batch."""
        (batch,) = self.batches(window, None)
        return batch

    def batches(self, window: Window, portion_bytes: int | None) -> Iterator[pa.RecordBatch]:
        """The same in batches of about ``portion_bytes``, at least one."""
        rows: list[Row] = []
        size, made = 0, False
        for row in self._rows(window):
            rows.append(row)
            size += row[1].store_size if row[1].decode_error else len(row[1].body) + row[1].store_size
            if portion_bytes and size >= portion_bytes:
                yield self._batch(rows)
                rows, size, made = [], 0, True
        if rows or not made:
            yield self._batch(rows)

    def _rows(self, window: Window) -> Iterator[Row]:
        for piece in window.pieces:
            queue = self._queues[piece.number]
            data = window.buffer.data[piece.begin : piece.end]
            messages = map(self._judged, decode_leniently(data, queue.broker_name))
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
        """A body that nobody wants need not be readable."""
        if message.decode_error is None or self._bodies or _unreadable(message) or _is_batch(message):
            return message
        return replace(message, decode_error=None, sys_flag=message.sys_flag & ~int(SysFlag.COMPRESSED))

    def _batch(self, rows: list[Row]) -> pa.RecordBatch:
        arrays = [self._column(rows, column) for column in self._columns]
        return pa.RecordBatch.from_arrays(arrays, schema=arrow_schema(self._columns))

    def _column(self, rows: list[Row], column: Column) -> pa.Array:
        if column.property is not None:
            texts = pa.array([m.properties.get(column.property) for _, m in rows], pa.string())
            return promoted.cast(texts, column.arrow)
        name = column.name.lower()
        value = self._properties if name == "properties" else _VALUES[name]
        known = name in _OF_THE_QUEUE
        return pa.array([value(q, m) if known or not _unreadable(m) else None for q, m in rows], column.arrow)

    def _properties(self, queue: MessageQueue, message: ReceivedMessage) -> list[tuple[str, str]] | None:
        if self._include == "none":
            return None
        return [(k, v) for k, v in message.properties.items() if self._include == "all" or not is_reserved(k)]


def _unreadable(message: ReceivedMessage) -> bool:
    """Not just its body: such a message has no topic."""
    return message.decode_error is not None and not message.topic


def _is_batch(message: ReceivedMessage) -> bool:
    return bool(message.sys_flag & SysFlag.INNER_BATCH)


def decode(
    window: Window,
    queues: Sequence[MessageQueue],
    columns: Sequence[Column],
    include_properties: str,
    filtered: Filter = NO_FILTER,
) -> pa.RecordBatch:
    """The window's messages as ``columns``; a bad one is an error."""
    return Careful(queues, columns, include_properties, filtered)(window)
