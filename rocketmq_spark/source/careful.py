"""The same record batch as ``decode`` gives, made message by message from objects.

For windows with inner batches, and the witness that the fast path is tested against.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pyarrow as pa

from rocketmq_spark.client.ranges import Piece, Window
from rocketmq_spark.codes import Property
from rocketmq_spark.model import MessageQueue, ReceivedMessage
from rocketmq_spark.source.schema import Column, arrow_schema
from rocketmq_spark.wire.messages import decode_messages
from rocketmq_spark.wire.properties import is_reserved

Row = tuple[MessageQueue, ReceivedMessage]

_VALUES: dict[str, Callable[[MessageQueue, ReceivedMessage], Any]] = {
    "topic": lambda queue, m: queue.topic,
    "brokerName": lambda queue, m: queue.broker_name,
    "queueId": lambda queue, m: m.queue_id,
    "queueOffset": lambda queue, m: m.queue_offset,
    "body": lambda queue, m: m.body,
    "tags": lambda queue, m: m.properties.get(Property.TAGS),
    "keys": lambda queue, m: _keys(m.properties.get(Property.KEYS)),
    "bornTimestamp": lambda queue, m: m.born_timestamp_ms * 1000,
    "storeTimestamp": lambda queue, m: m.store_timestamp_ms * 1000,
    "msgId": lambda queue, m: m.msg_id,
}


def _keys(text: str | None) -> list[str] | None:
    return None if text is None else [key for key in text.split(" ") if key]


def decode(
    window: Window, queues: Sequence[MessageQueue], columns: Sequence[Column], include_properties: str
) -> pa.RecordBatch:
    """The window's messages as ``columns``."""
    rows = [row for piece in window.pieces for row in _rows(window, piece, queues[piece.number])]
    arrays = []
    for column in columns:
        if column.name == "properties":
            values = [_properties(m, include_properties) for _, m in rows]
        else:
            values = [_VALUES[column.name](queue, m) for queue, m in rows]
        arrays.append(pa.array(values, column.arrow))
    return pa.RecordBatch.from_arrays(arrays, schema=arrow_schema(tuple(columns)))


def _rows(window: Window, piece: Piece, queue: MessageQueue) -> Iterator[Row]:
    body = window.buffer.data[piece.begin : piece.end]
    beyond = piece.limit if piece.next_offset > piece.limit else None
    for message in decode_messages(body, queue.broker_name):
        # A pull inside an inner batch gives the whole batch.
        if message.queue_offset >= piece.start and (beyond is None or message.queue_offset < beyond):
            yield queue, message


def _properties(message: ReceivedMessage, include: str) -> list[tuple[str, str]] | None:
    if include == "none":
        return None
    return [(k, v) for k, v in message.properties.items() if include == "all" or not is_reserved(k)]
