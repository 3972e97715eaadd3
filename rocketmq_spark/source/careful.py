"""The same record batch as ``decode`` gives, made message by message from objects.

For windows with inner batches, and the witness that the fast path is tested against.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pyarrow as pa

from rocketmq_spark.client.ranges import Piece, Window
from rocketmq_spark.codes import Property, SysFlag
from rocketmq_spark.model import MessageQueue, ReceivedMessage
from rocketmq_spark.session import NO_FILTER, Filter
from rocketmq_spark.source import promoted
from rocketmq_spark.source.schema import EARLIEST_MS, LATEST_MS, Column, arrow_schema
from rocketmq_spark.wire.messages import decode_messages
from rocketmq_spark.wire.properties import is_reserved

Row = tuple[MessageQueue, ReceivedMessage]

_VALUES: dict[str, Callable[[MessageQueue, ReceivedMessage], Any]] = {
    "topic": lambda queue, m: queue.topic,
    "brokername": lambda queue, m: queue.broker_name,
    "queueid": lambda queue, m: m.queue_id,
    "queueoffset": lambda queue, m: m.queue_offset,
    "body": lambda queue, m: m.body,
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
}


def _microseconds(ms: int) -> int:
    return min(max(ms, EARLIEST_MS), LATEST_MS) * 1000


def _keys(text: str | None) -> list[str] | None:
    return None if text is None else [key for key in text.split(" ") if key]


def decode(
    window: Window,
    queues: Sequence[MessageQueue],
    columns: Sequence[Column],
    include_properties: str,
    filtered: Filter = NO_FILTER,
) -> pa.RecordBatch:
    """The window's messages as ``columns``."""
    rows = [row for piece in window.pieces for row in _rows(window, piece, queues[piece.number])]
    if filtered and filtered.kind == "TAG":
        wanted = set(filtered.expression.split(" || "))
        rows = [(queue, m) for queue, m in rows if m.properties.get(Property.TAGS) in wanted]
    arrays = [_column(rows, column, include_properties) for column in columns]
    return pa.RecordBatch.from_arrays(arrays, schema=arrow_schema(tuple(columns)))


def _column(rows: list[Row], column: Column, include_properties: str) -> pa.Array:
    if column.property is not None:
        texts = pa.array([m.properties.get(column.property) for _, m in rows], pa.string())
        return promoted.cast(texts, column.arrow)
    name = column.name.lower()
    if name == "properties":
        values = [_properties(m, include_properties) for _, m in rows]
    else:
        values = [_VALUES[name](queue, m) for queue, m in rows]
    return pa.array(values, column.arrow)


def _rows(window: Window, piece: Piece, queue: MessageQueue) -> Iterator[Row]:
    body = window.buffer.data[piece.begin : piece.end]
    beyond = piece.limit if piece.next_offset > piece.limit else None
    for message in decode_messages(body, queue.broker_name):
        # A pull inside an inner batch gives the whole batch. Only there do offsets before the start mean what they say.
        before = message.queue_offset < piece.start and message.sys_flag & SysFlag.INNER_BATCH
        if not before and (beyond is None or message.queue_offset < beyond):
            yield queue, message


def _properties(message: ReceivedMessage, include: str) -> list[tuple[str, str]] | None:
    if include == "none":
        return None
    return [(k, v) for k, v in message.properties.items() if include == "all" or not is_reserved(k)]
