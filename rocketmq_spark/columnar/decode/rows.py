"""Messages as columns: from positions in a buffer, or message by message from objects.

``ColumnBuilder`` implements ``schema.MessageRows``, one method for each kind of column: fixed fields (numbers, times, hosts,
message ids) and properties.

``ReferenceDecoder`` makes the same record batches from objects, and decides which messages belong to an answer. It is used for
messages that are objects already, for unusual inner batches, and for answers with bad messages. The fast path (``decoder``)
makes the same decisions for all answers of a buffer at once. Tests compare the fast path with ``ReferenceDecoder``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from rocketmq_spark.base import codes
from rocketmq_spark.base.codes import Property, SysFlag
from rocketmq_spark.columnar import arrow
from rocketmq_spark.columnar.decode import buffers, property_columns, stored_messages
from rocketmq_spark.columnar.decode import properties as props
from rocketmq_spark.columnar.decode.schema import (
    BASIC_COLUMNS,
    EARLIEST_MS,
    LATEST_MS,
    PROPERTIES_TYPE,
    BadMessages,
    Column,
    arrow_schema,
    is_time,
)
from rocketmq_spark.columnar.decode.stored_messages import Malformed, StoredMessages
from rocketmq_spark.model import NO_FILTER, Filter, MessageQueue, ReceivedMessage
from rocketmq_spark.model.pull import OffsetWindow
from rocketmq_spark.pull.fetched import FetchedAnswer, FetchedAnswers, Hole
from rocketmq_spark.wire.identifiers import host_text
from rocketmq_spark.wire.messages import DecodeSettings, decode_one, find_messages

_HOST_FLAGS = {"bornHost": codes.SysFlag.BORNHOST_V6, "storeHost": codes.SysFlag.STOREHOST_V6}


def numbers(messages: StoredMessages, field: str, kind: pa.DataType) -> pa.Array:
    return arrow.integers(messages.fixed_field(field).astype(kind.to_pandas_dtype()), kind)


def timestamps(messages: StoredMessages, field: str, kind: pa.DataType) -> pa.Array:
    """A column of milliseconds as microseconds; null for times outside the years 1 to 9999."""
    ms = messages.fixed_field(field).astype(np.int64)
    is_impossible = (ms < EARLIEST_MS) | (ms > LATEST_MS)
    if not is_impossible.any():
        return arrow.integers(ms * 1000, kind)
    return pa.array(np.where(is_impossible, 0, ms) * 1000, pa.int64(), mask=is_impossible).cast(kind)


def system_flags(messages: StoredMessages) -> npt.NDArray[np.int32]:
    """The system flags without ``COMPRESSED``, because bodies are returned decompressed. As in Java, a message with an empty body
    keeps this flag.
    """
    compressed_flags = codes.SysFlag.COMPRESSED * (messages.body_end > messages.body_start)
    return messages.sys_flags & ~compressed_flags.astype(np.int32)


def hosts(messages: StoredMessages, field: str) -> pa.Array:
    """``address:port`` texts; each host is formatted once."""
    distinct_hosts, host_index_of_row = np.unique(
        np.frombuffer(messages.fixed_field(field).tobytes(), ">u8"), return_inverse=True
    )
    texts = [_host_text(host.tobytes()) for host in distinct_hosts.reshape(-1, 1)]
    column = pa.array(texts, pa.string()).take(pa.array(host_index_of_row))
    ipv6_rows = np.flatnonzero((messages.sys_flags & _HOST_FLAGS[field]) != 0)
    if not len(ipv6_rows):
        return column
    values = column.to_pylist()
    for row in ipv6_rows.tolist():
        values[row] = _host_text(_ipv6_host(messages, row, field == "storeHost"))
    return pa.array(values, pa.string())


def _host_text(host: bytes) -> str:
    return host_text(host[:-4], int.from_bytes(host[-4:], "big", signed=True))


def _ipv6_host(messages: StoredMessages, row: int, is_store_host: bool) -> bytes:
    """The bytes of an IPv6 host: sixteen of the address and four of the port."""
    position = int(messages.starts[row]) + 48
    if is_store_host:
        position += 16 + (12 if messages.sys_flags[row] & codes.SysFlag.BORNHOST_V6 else 0)
    return messages.buffer[position : position + 20].tobytes()


def offset_message_ids(messages: StoredMessages) -> pa.Array:
    """Hex of store host and commit log offset: 32 characters, or 56 if the store host is IPv6."""
    host = messages.fixed_field("storeHost")
    rows = np.empty((len(messages), 16), np.uint8)
    rows[:, :8] = _as_byte_rows(host)
    rows[:, 8:] = _as_byte_rows(messages.fixed_field("commitLogOffset"))
    ids = buffers.hex_texts(rows)
    ipv6_rows = np.flatnonzero((messages.sys_flags & codes.SysFlag.STOREHOST_V6) != 0)
    if not len(ipv6_rows):
        return ids
    values = ids.to_pylist()
    for row in ipv6_rows.tolist():
        offset = messages.fixed_field("commitLogOffset")[row : row + 1].tobytes()
        values[row] = (_ipv6_host(messages, row, is_store_host=True) + offset).hex().upper()
    return pa.array(values, pa.string())


def _as_byte_rows(field: npt.NDArray[Any]) -> npt.NDArray[np.uint8]:
    return np.frombuffer(field.tobytes(), np.uint8).reshape(-1, 8)


@dataclass(frozen=True, slots=True)
class ColumnBuilder:
    """Builds columns of fetched messages from their fixed fields, the columns of their properties, and the queues of the
    answers.
    """

    messages: StoredMessages
    property_columns: props.PropertyColumns
    queues: Sequence[MessageQueue]

    def queue_text(self, field: str) -> pa.Array:
        """A text that depends only on the queue, so most rows have the same text."""
        texts = [getattr(queue, field) for queue in self.queues]
        if len(set(texts)) == 1:
            return arrow.constant_column(texts[0], len(self.messages))
        return pa.array(texts, pa.string()).take(self._queue_index_of_row())

    def queue_id(self, kind: pa.DataType) -> pa.Array:
        """The id of the queue that was read, which may differ from the id in the message (static topics)."""
        return pa.array([queue.queue_id for queue in self.queues], kind).take(self._queue_index_of_row())

    def _queue_index_of_row(self) -> pa.Array:
        number_of_row = stored_messages.answer_field(self.messages.answers, "range_number")[self.messages.answer_of_row]
        return arrow.integers(number_of_row, pa.int64())

    def number(self, field: str, kind: pa.DataType) -> pa.Array:
        return numbers(self.messages, field, kind)

    def timestamp(self, field: str, kind: pa.DataType) -> pa.Array:
        return timestamps(self.messages, field, kind)

    def host(self, field: str) -> pa.Array:
        return hosts(self.messages, field)

    def flags(self, kind: pa.DataType) -> pa.Array:
        return arrow.integers(system_flags(self.messages), kind)

    def tags(self) -> pa.Array:
        return self.property_columns.tags

    def keys(self) -> pa.Array:
        return self.property_columns.keys

    def properties(self) -> pa.Array:
        maps = self.property_columns.properties
        return maps if maps is not None else arrow.null_column(PROPERTIES_TYPE, len(self.messages))

    def offset_message_id(self) -> pa.Array:
        return offset_message_ids(self.messages)

    def message_id(self) -> pa.Array:
        """The client's message id, or the offset message id if there is none, as in Java consumers."""
        ids = self.property_columns.msg_id
        assert ids is not None
        if not ids.null_count:
            return ids
        return pc.coalesce(ids, offset_message_ids(self.messages))

    def null_column(self, kind: pa.DataType) -> pa.Array:
        return arrow.null_column(kind, len(self.messages))


# Gets answers and the holes in their offsets, and returns how many of the answers may be used.
CountUsableAnswers = Callable[[Sequence[FetchedAnswer], Sequence[Hole]], int]
# Gets answers whose next offset is beyond their limit. Returns these answers with limits that match the offsets inside their
# messages.
CorrectEnds = Callable[[Sequence[FetchedAnswer]], Sequence[FetchedAnswer]]


class AnswerCheck(NamedTuple):
    """The check of one answer: whether its messages can be located, whether some messages may be beyond its limit, and the
    holes in its offsets.
    """

    is_readable: bool
    exceeds_limit: bool
    holes: list[Hole]


def check_each_answer(fetched: FetchedAnswers) -> list[AnswerCheck]:
    """Checks the answers one by one."""
    checks = []
    for i, answer in enumerate(fetched.answers):
        ends_after_limit = answer.next_offset > answer.limit
        try:
            messages = stored_messages.locate(fetched.buffer, [answer])
        except Malformed:
            checks.append(AnswerCheck(False, ends_after_limit, []))
            continue
        holes = [hole._replace(answer_index=i) for hole in stored_messages.holes(messages)]
        # The head of an inner batch has only the offset of its first message, so later messages may be beyond the limit.
        reaches_limit = (
            messages.combined_flags & SysFlag.INNER_BATCH or (messages.fixed_field("queueOffset") >= answer.limit).any()
        )
        checks.append(AnswerCheck(True, ends_after_limit and bool(reaches_limit), holes))
    return checks


def usable_answers(
    fetched: FetchedAnswers, count_usable_answers: CountUsableAnswers, correct_ends: CorrectEnds
) -> list[FetchedAnswer]:
    """Return the answers that may be used. If messages of an answer may have offsets beyond its limit, the limit is corrected."""
    checks = check_each_answer(fetched)
    count = count_usable_answers(fetched.answers, [hole for check in checks for hole in check.holes])
    return with_correct_ends(fetched.answers[:count], [check.exceeds_limit for check in checks[:count]], correct_ends)


def with_correct_ends(
    answers: Sequence[FetchedAnswer], exceeds_limit: Sequence[bool], correct_ends: CorrectEnds
) -> list[FetchedAnswer]:
    """Return the answers. An answer for which ``exceeds_limit`` is true gets a corrected limit."""
    long_answers = [answer for answer, exceeds in zip(answers, exceeds_limit, strict=True) if exceeds]
    corrected_answers = dict(zip(long_answers, correct_ends(long_answers), strict=True)) if long_answers else {}
    return [corrected_answers.get(answer, answer) for answer in answers]


def messages_in_range(
    messages: Iterable[ReceivedMessage], answer: FetchedAnswer, is_dense: bool = True
) -> Iterator[ReceivedMessage]:
    """The messages of an answer that belong to its request, as objects.

    If a message cannot be decoded and its offset is unknown, it gets the offset that follows the previous message. With
    ``is_dense``, every offset has a message, so this message gets a row for each offset before the next message.
    """
    end = min(answer.limit, answer.next_offset)
    next_offset, lost_message = answer.start, None
    for message in messages:
        if message.queue_offset < 0 and message.decode_error is not None:
            lost_message = lost_message or message
            continue
        if lost_message is not None:
            yield from _placeholder_rows(lost_message, next_offset, min(message.queue_offset, end), is_dense)
            lost_message = None
        # A pull that starts inside an inner batch returns the whole batch. An offset before the start is right only in an inner
        # batch. An offset after the end is right only if the broker's next offset is also after the end. In other cases, the
        # offset is damaged, and the message is kept.
        is_before_start = message.queue_offset < answer.start and message.sys_flag & SysFlag.INNER_BATCH
        if not is_before_start and (answer.next_offset <= answer.limit or message.queue_offset < answer.limit):
            yield message
        next_offset = max(next_offset, message.queue_offset + 1)
    if lost_message is not None:
        yield from _placeholder_rows(lost_message, next_offset, end, is_dense)


def _placeholder_rows(message: ReceivedMessage, start: int, end: int, is_dense: bool) -> Iterator[ReceivedMessage]:
    # The message gets at least one row: if the messages around it are damaged, too, their offsets may leave no offset free.
    for offset in range(start, max(end if is_dense else 0, start + 1)):
        yield replace(message, queue_offset=offset)


Row = tuple[MessageQueue, ReceivedMessage]
# The approximate size of a row in a batch, without the body and the properties.
_ITEM_OVERHEAD_BYTES = 256


class ReferenceDecoder:
    """Decodes fetched answers into batches of ``columns``. ``range_number`` of an answer is an index of ``queues``."""

    def __init__(
        self,
        queues: Sequence[MessageQueue],
        columns: Sequence[Column],
        include_properties: str,
        topic_filter: Filter = NO_FILTER,
        bad_messages: BadMessages | None = None,
    ) -> None:
        self._queues = queues
        self._columns = tuple(columns)
        self._include_properties = include_properties
        self._topic_filter = topic_filter
        self._tags = set(topic_filter.expression.split(" || ")) if topic_filter and topic_filter.kind == "TAG" else None
        self._bad_messages = bad_messages or BadMessages()
        self._decodes_bodies = any(column.name.lower() == "body" for column in columns if column.property is None)

    def __call__(self, fetched: FetchedAnswers) -> pa.RecordBatch:
        """All messages as one batch."""
        (batch,) = self.batches(fetched, None)
        return batch

    def batches(self, fetched: FetchedAnswers, portion_bytes: int | None) -> Iterator[pa.RecordBatch]:
        """All messages in batches of about ``portion_bytes``, at least one batch."""
        rows: list[Row] = []
        size, has_yielded = 0, False
        for row in self._rows(fetched):
            rows.append(row)
            size += _approximate_bytes(row[1])
            if portion_bytes and size >= portion_bytes:
                yield self._batch(rows)
                rows, size, has_yielded = [], 0, True
        if rows or not has_yielded:
            yield self._batch(rows)

    def _rows(self, fetched: FetchedAnswers) -> Iterator[Row]:
        for answer in fetched.answers:
            queue = self._queues[answer.range_number]
            data = fetched.buffer.data[answer.begin : answer.end]
            window = OffsetWindow(answer.start, answer.next_offset)
            messages = map(
                self._without_error_of_unselected_body,
                self._decoded_messages(bytes(data), DecodeSettings(queue.broker_name, window=window)),
            )
            for message in messages_in_range(messages, answer, is_dense=not self._topic_filter):
                if message.decode_error is not None:
                    self._bad_messages.add(queue, message.queue_offset, message.decode_error)
                    if self._bad_messages.skips:
                        continue
                if self._tags is None or _is_unreadable(message) or message.properties.get(Property.TAGS) in self._tags:
                    yield queue, message

    def _decoded_messages(self, data: bytes, settings: DecodeSettings) -> Iterator[ReceivedMessage]:
        """All messages, one by one. The body of a message stays compressed if column ``body`` is not selected; only inner batches
        are always decompressed.
        """
        compressed_settings = settings._replace(max_body_bytes=None)
        for location in find_messages(data):
            *_, is_inner_batch = location
            for message in decode_one(
                data, location, settings if self._decodes_bodies or is_inner_batch else compressed_settings
            ):
                stays_unchanged = self._decodes_bodies or message.decode_error is not None or _is_batch(message)
                yield (
                    message
                    if stays_unchanged
                    else replace(message, sys_flag=message.sys_flag & ~int(SysFlag.COMPRESSED))
                )

    def _without_error_of_unselected_body(self, message: ReceivedMessage) -> ReceivedMessage:
        """Removes the error of a message whose body is unreadable but not selected."""
        if message.decode_error is None or self._decodes_bodies or _is_unreadable(message) or _is_batch(message):
            return message
        return replace(message, decode_error=None, sys_flag=message.sys_flag & ~int(SysFlag.COMPRESSED))

    def _batch(self, rows: list[Row]) -> pa.RecordBatch:
        arrays = [self._column(rows, column) for column in self._columns]
        return pa.RecordBatch.from_arrays(arrays, schema=arrow_schema(self._columns))

    def _column(self, rows: list[Row], column: Column) -> pa.Array:
        if column.property is not None:
            texts = pa.array([m.properties.get(column.property) for _, m in rows], pa.string())
            return property_columns.cast(texts, column.arrow_type)
        value_of_message, is_of_queue, include_properties = (
            column.from_message,
            column.is_of_queue,
            self._include_properties,
        )
        assert value_of_message is not None
        values = [
            value_of_message(q, m, include_properties) if is_of_queue or not _is_unreadable(m) else None
            for q, m in rows
        ]
        if is_time(column):
            for (queue, message), time in zip(rows, values, strict=True):
                if time is None and not _is_unreadable(message):
                    self._bad_messages.add_impossible_times(column.name, queue, message.queue_offset, 1)
        return pa.array(values, column.arrow_type)


def batch_of_messages(messages: Sequence[ReceivedMessage], columns: Sequence[Column] = BASIC_COLUMNS) -> pa.RecordBatch:
    """Received messages as rows. The topic of a retried message is the topic to which the message was sent first, as in the
    ``ReceivedMessage``. A message that cannot be decoded has no body.
    """
    rows = [(m.queue._replace(topic=m.topic or m.queue.topic), m) for m in messages]
    return ReferenceDecoder((), columns, "user")._batch(rows)


def _approximate_bytes(message: ReceivedMessage) -> int:
    """The approximate size of one message as a row; a message of an inner batch counts without the other messages of
    the batch.
    """
    if message.decode_error is not None:
        return message.store_size
    if not _is_batch(message):
        return len(message.body) + message.store_size
    return len(message.body) + _ITEM_OVERHEAD_BYTES + sum(map(len, message.properties.values()))


def _is_unreadable(message: ReceivedMessage) -> bool:
    """Whether more than the body of a message is unreadable. A message with only an unreadable body still has a topic."""
    return message.decode_error is not None and not message.topic


def _is_batch(message: ReceivedMessage) -> bool:
    return bool(message.sys_flag & SysFlag.INNER_BATCH)


def decode(
    fetched: FetchedAnswers,
    queues: Sequence[MessageQueue],
    columns: Sequence[Column],
    include_properties: str,
    topic_filter: Filter = NO_FILTER,
) -> pa.RecordBatch:
    """Fetched messages as ``columns``; a bad message is an error."""
    return ReferenceDecoder(queues, columns, include_properties, topic_filter)(fetched)
