"""The rows that a listener of record batches gets in one call (option ``arrow``).

``Rows`` is one item of a process queue: the messages of one answer that match the filter, or a part of them with at most
``consumeMessageBatchMaxSize`` rows. ``Rows`` is also a sequence of messages. The message objects are created only if they are
needed: to send failed messages back, for traces, and for the result of ``stop``. A process queue has ``Rows`` in place of
messages. So pulls, limits of the cache, offsets, locks and rebalances work for a listener of batches as for a listener of
messages.

``RowsDecoder`` creates ``Rows``. It decodes an answer with many plain messages directly into columns. In all other cases, it
creates the message objects first, so that the rows equal the messages that a listener of messages gets. The other cases are: an
answer with few messages, a filter, the retry topic, messages that cannot be decoded, and damaged offsets.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, overload

from rocketmq_spark.base.codes import RETRY_PREFIX
from rocketmq_spark.consumer.assigned import FetchedPart
from rocketmq_spark.consumer.listener import DeferredListener, Listener, ListenerCall, NextCall
from rocketmq_spark.consumer.process_queue import ProcessQueue, with_next_attempt
from rocketmq_spark.model import ReceivedMessage
from rocketmq_spark.wire.messages import first_portion

logger = logging.getLogger(__name__)

# Decoding directly into columns takes 0.3 ms for any number of rows. Creating messages and then columns takes 5 us for each
# row.
MIN_COLUMNAR_ROWS = 48

Batch = Any  # a ``pyarrow.RecordBatch``
ToBatch = Callable[[Sequence[ReceivedMessage]], Batch]


class Rows(Sequence[ReceivedMessage]):
    """Consecutive rows of one queue: their record batch, and their messages.

    ``queue_offset`` is the first offset, and ``next_offset`` is the offset after the last message. ``attempts`` is the number of
    earlier attempts in this process.
    """

    __slots__ = ("_attempts", "_count", "_make_batch", "_read_messages", "byte_count", "next_offset", "queue_offset")

    def __init__(
        self,
        offsets: tuple[int, int],
        count: int,
        byte_count: int,
        make_batch: Callable[[], Batch],
        read_messages: Callable[[], Sequence[ReceivedMessage]],
        attempts: int = 0,
    ) -> None:
        self.queue_offset, self.next_offset = offsets
        self.byte_count = byte_count
        self._count = count
        self._make_batch = make_batch
        self._read_messages = read_messages
        self._attempts = attempts

    @classmethod
    def from_messages(
        cls, messages: Sequence[ReceivedMessage], to_batch: ToBatch, offsets: tuple[int, int] | None = None
    ) -> Rows:
        """Return the rows of these messages. ``offsets`` is the range of the rows, if it is larger than the range of the
        messages.
        """
        byte_count = sum(len(message.body) + max(0, message.store_size) for message in messages)
        offsets = offsets or (messages[0].queue_offset, messages[-1].queue_offset + 1)
        return cls(offsets, len(messages), byte_count, partial(to_batch, messages), lambda: messages)

    @property
    def batch(self) -> Batch:
        return self._make_batch()

    def with_next_attempt(self) -> Rows:
        """Return the same rows with one more attempt."""
        offsets = self.queue_offset, self.next_offset
        return Rows(offsets, self._count, self.byte_count, self._make_batch, self._read_messages, self._attempts + 1)

    def __len__(self) -> int:
        return self._count

    @overload
    def __getitem__(self, index: int) -> ReceivedMessage: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[ReceivedMessage]: ...
    def __getitem__(self, index: int | slice) -> ReceivedMessage | Sequence[ReceivedMessage]:
        messages = self._read_messages()
        if isinstance(index, int):
            return self._with_attempts(messages[index])
        selected_messages = messages[index] if len(messages) == self._count else messages  # see ``_StoredMessages``
        return [self._with_attempts(message) for message in selected_messages]

    def __iter__(self) -> Iterator[ReceivedMessage]:
        return map(self._with_attempts, self._read_messages())

    def _with_attempts(self, message: ReceivedMessage) -> ReceivedMessage:
        return with_next_attempt(message, self._attempts) if self._attempts else message


class RowsQueue(ProcessQueue):
    """The process queue of a listener of record batches. The items are ``Rows``, and counts and limits are numbers of rows.

    ``to_batch`` creates the record batch for messages of a call that are delivered again.
    """

    def __init__(self, to_batch: ToBatch, *queue_and_time: Any) -> None:
        super().__init__(*queue_and_time)
        self._to_batch = to_batch
        self._sizes: dict[int, tuple[int, int]] = {}  # by offset: the number of rows of an item, and its bytes

    def put(self, messages: Iterable[Rows]) -> int:
        new_count = 0
        for rows in messages:
            if self._insert(rows):
                self._replace(rows)  # the new item may differ in its rows
                continue
            new_count += len(rows)
            self._add(rows)
            self._end_of_last_put = rows.next_offset
        return new_count

    def message_count(self, messages: Sequence[Rows]) -> int:
        return sum(map(len, messages))

    def split_into_calls(self, messages: Sequence[Rows], size: int) -> tuple[Iterator[Rows], int]:
        # Any thread may take the next item. The iterator keeps no reference to a taken item.
        return iter(deque(messages).popleft, None), len(messages)

    def remove(self, messages: Sequence[ReceivedMessage]) -> int | None:
        """Remove the rows of a finished call. ``requeue`` and ``finish_late_messages`` keep unfinished rows."""
        if not self._waiting_items:
            return None
        if isinstance(messages, Rows) and self._waiting_items.pop(messages.queue_offset, None) is not None:
            self._subtract(messages.queue_offset)
        return self._next_offset()

    def take(self, count: int) -> Sequence[ReceivedMessage]:
        """Take the first item, whatever its number of rows: ``count`` has no effect."""
        rows = self.first_item()
        if rows is None:
            return ()
        self._taken_items[rows.queue_offset] = self._waiting_items.pop(rows.queue_offset)
        taken_rows: Rows = rows
        return taken_rows

    def put_back_for_retry(self, messages: Sequence[ReceivedMessage], one_by_one: bool) -> None:
        if isinstance(messages, Rows):
            self.put_back([messages.with_next_attempt()])
            return
        taken_rows = next((rows for rows in self._taken_items.values() if _contains(rows, messages[0])), None)
        if taken_rows is None:  # a reset during the call removed the rows
            return
        del self._taken_items[taken_rows.queue_offset]
        self._subtract(taken_rows.queue_offset)
        end_offsets = [message.queue_offset for message in messages[1:]] + [taken_rows.next_offset]
        for message, end_offset in zip(messages, end_offsets, strict=True):
            rows = Rows.from_messages([message], self._to_batch, (message.queue_offset, end_offset)).with_next_attempt()
            self._insert(rows)
            self._add(rows)

    def mark_dead_letters(self, messages: Sequence[ReceivedMessage]) -> None:
        """Mark a taken item as dead letters, if all of its messages are dead letters. From other items,
        ``put_back_for_retry`` keeps the messages that are not dead letters.
        """
        self._dead_letter_offsets.update(
            offset
            for offset, rows in self._taken_items.items()
            if messages and len(messages) == len(rows) and _contains(rows, messages[0])
        )

    def requeue(
        self, call_messages: Sequence[ReceivedMessage], failed_messages: Sequence[ReceivedMessage]
    ) -> Sequence[Rows]:
        rows_to_retry = (
            failed_messages
            if isinstance(failed_messages, Rows)
            else self._remaining_rows(call_messages, failed_messages)
        )
        rows = rows_to_retry.with_next_attempt()
        self._replace(rows)
        return [rows]

    def late_messages(self, call_messages: Sequence[ReceivedMessage]) -> Sequence[ReceivedMessage]:
        first_rows: Rows | None = self.first_item()
        return (
            first_rows
            if first_rows is not None
            and isinstance(call_messages, Rows)
            and first_rows.queue_offset == call_messages.queue_offset
            else ()
        )

    def finish_late_messages(
        self, late_messages: Sequence[ReceivedMessage], unsent_messages: Sequence[ReceivedMessage]
    ) -> None:
        if unsent_messages:
            self._replace(self._remaining_rows(late_messages, unsent_messages))
        else:
            self.remove(late_messages)

    def messages_still_cached(
        self, call_messages: Sequence[ReceivedMessage], messages: Sequence[ReceivedMessage]
    ) -> list[ReceivedMessage]:
        rows = self._waiting_items.get(as_rows(call_messages).queue_offset)
        if rows is None:
            return []
        if rows is call_messages:
            return list(messages)
        cached_offsets = {message.queue_offset for message in rows}
        return [message for message in messages if message.queue_offset in cached_offsets]

    def _remaining_rows(
        self, call_messages: Sequence[ReceivedMessage], remaining_messages: Sequence[ReceivedMessage]
    ) -> Rows:
        """Return an item with the remaining messages of a call. The item has the offset range of all rows of the call, so that
        the committed offset does not pass the call.
        """
        rows = as_rows(call_messages)
        return Rows.from_messages(remaining_messages, self._to_batch, (rows.queue_offset, rows.next_offset))

    def _replace(self, rows: Rows) -> None:
        if rows.queue_offset in self._waiting_items:
            self._subtract(rows.queue_offset)
            self._waiting_items[rows.queue_offset] = rows
            self._add(rows)

    def _add(self, rows: Rows) -> None:
        self._sizes[rows.queue_offset] = count, byte_count = len(rows), rows.byte_count
        self.count += count
        self.bytes += byte_count

    def _subtract(self, offset: int) -> None:
        count, byte_count = self._sizes.pop(offset)
        self.count -= count
        self.bytes -= byte_count

    def _end_offset(self, message: Any) -> int:
        end_offset: int = message.next_offset
        return end_offset


def as_rows(call_messages: Sequence[ReceivedMessage]) -> Rows:
    assert isinstance(call_messages, Rows)
    return call_messages


def _contains(rows: Rows, message: ReceivedMessage) -> bool:
    return rows.queue_offset <= message.queue_offset < rows.next_offset


class _StoredMessages:
    """The messages of a part that was decoded into ``count`` rows. The messages are decoded only if a row of the part fails.

    The decoder of rows and the decoder of messages should find the same messages. If the numbers of messages and rows differ
    nevertheless, each row stands for all messages of the part. Messages may then be delivered again, but no message is lost.
    """

    def __init__(self, part: FetchedPart, count: int) -> None:
        self._part = part
        self._count = count
        self._messages: list[ReceivedMessage] | None = None

    def messages_of_rows(self, start: int, stop: int) -> Sequence[ReceivedMessage]:
        if self._messages is None:
            self._messages = list(self._part.read())
        if len(self._messages) != self._count:
            text = "%s from offset %d: %d rows were decoded, but %d messages; all of these messages count as failed"
            logger.warning(text, self._part.queue, self._part.start, self._count, len(self._messages))
            return self._messages
        return self._messages[start:stop]


class RowsDecoder:
    """Decodes fetched parts into ``Rows`` with at most ``max_rows`` rows.

    ``decode_columns`` decodes several parts into one batch, or returns None for unusual messages. ``to_batch`` creates a batch
    from message objects.
    """

    def __init__(
        self, max_rows: int, decode_columns: Callable[[Sequence[FetchedPart]], Batch | None], to_batch: ToBatch
    ) -> None:
        self._max_rows = max_rows
        self._decode_columns = decode_columns
        self.to_batch = to_batch

    def __call__(self, parts: Sequence[FetchedPart]) -> Iterator[tuple[list[Rows], int | None]]:
        """Yield, for each part, its rows and the offset of the first message that was left out because the messages before it
        are too large. The offset is None if no message was left out.
        """
        rows_of_parts = self._decode_together(parts)
        for index, part in enumerate(parts):
            rows = self._decode_part(part) if rows_of_parts is None else rows_of_parts[index]
            yield self._decode_messages(part) if rows is None else (rows, None)

    def _decode_together(self, parts: Sequence[FetchedPart]) -> list[list[Rows]] | None:
        """Return the rows of several parts, decoded together; None if the parts do not have exactly one row for each offset."""
        counts = [part.offset_count for part in parts]
        if len(parts) == 1 or sum(counts) < MIN_COLUMNAR_ROWS or not all(map(_is_plain, parts)):
            return None
        batch = self._decode_columns(parts)
        if batch is None or batch.num_rows != sum(counts):
            return None
        rows_of_parts, first_row = [], 0
        for part, count in zip(parts, counts, strict=True):
            rows = self._split(part, batch.slice(first_row, count), batch.nbytes * count // batch.num_rows)
            if rows is None:
                return None
            rows_of_parts.append(rows)
            first_row += count
        return rows_of_parts

    def _decode_part(self, part: FetchedPart) -> list[Rows] | None:
        if (
            part.offset_count < MIN_COLUMNAR_ROWS
            or not _is_plain(part)
            or (batch := self._decode_columns([part])) is None
        ):
            return None
        return self._split(part, batch, batch.nbytes)

    def _split(self, part: FetchedPart, batch: Batch, byte_count: int) -> list[Rows] | None:
        """Return the rows of a part; None if the offsets in its messages may be damaged."""
        offsets, count = batch.column("queueOffset").to_numpy(), batch.num_rows
        if not _has_valid_offsets(batch, offsets, part):
            return None
        stored_messages, byte_count = _StoredMessages(part, count), byte_count + len(part.stored)
        pieces = []
        for start in range(0, count, self._max_rows):
            stop = min(start + self._max_rows, count)
            piece_batch = batch if stop - start == count else batch.slice(start, stop - start)
            piece_offsets = int(offsets[start]), int(offsets[stop - 1]) + 1
            piece_bytes = byte_count * (stop - start) // count
            pieces.append(
                Rows(
                    piece_offsets,
                    stop - start,
                    piece_bytes,
                    partial(_same_batch, piece_batch),
                    partial(stored_messages.messages_of_rows, start, stop),
                )
            )
        return pieces

    def _decode_messages(self, part: FetchedPart) -> tuple[list[Rows], int | None]:
        messages, left_out_message = first_portion(part.read())
        for message in messages:
            if message.decode_error is not None:
                text = "%s: the message at offset %d cannot be decoded; its row has no body: %s"
                logger.warning(text, part.queue, message.queue_offset, message.decode_error)
        pieces = (messages[start : start + self._max_rows] for start in range(0, len(messages), self._max_rows))
        return [
            Rows.from_messages(piece, self.to_batch) for piece in pieces
        ], None if left_out_message is None else left_out_message.queue_offset


def _same_batch(batch: Batch) -> Batch:
    return batch


def _is_plain(part: FetchedPart) -> bool:
    """Whether each stored message becomes one row with the topic of its queue.

    With a filter, offsets cannot be checked, because the skipped messages may be damaged, too.
    """
    return not part.filter and not part.queue.topic.startswith(RETRY_PREFIX)


def _has_valid_offsets(batch: Batch, offsets: Any, part: FetchedPart) -> bool:
    """Whether the queue and the offsets inside the messages are possible."""
    if not len(offsets):
        return True
    is_in_range = part.start <= offsets[0] and offsets[-1] < part.next_offset and (offsets[1:] > offsets[:-1]).all()
    return bool(is_in_range and (batch.column("queueId").to_numpy() == part.queue.queue_id).all())


class _BatchCall(ListenerCall):
    """A call with a record batch. The batch is created when the listener's thread reads it, so an error counts as a failure of
    the listener.
    """

    __slots__ = ("_call", "_to_batch")

    def __init__(self, call: ListenerCall, to_batch: ToBatch) -> None:
        self.context, self._call, self._to_batch = call.context, call, to_batch

    @property
    def messages(self) -> Batch:
        return batch_of(self._call.messages, self._to_batch)

    def __call__(self, outcome: object) -> None:
        self._call(outcome)


class _BatchListener(DeferredListener):
    """A deferred listener of record batches."""

    def __init__(self, listener: DeferredListener, to_batch: ToBatch) -> None:
        self._listener = listener
        self._to_batch = to_batch

    def submit(self, next_call: NextCall, count: int, at_front: bool = False) -> None:
        self._listener.submit(partial(self._next_batch_call, next_call), count, at_front)

    def _next_batch_call(self, next_call: NextCall) -> ListenerCall | None:
        call = next_call()
        return None if call is None else _BatchCall(call, self._to_batch)


def batch_listener(listener: Listener, to_batch: ToBatch) -> Listener:
    """Return a listener that passes the batches of ``Rows`` to ``listener``."""
    if isinstance(listener, DeferredListener):
        return _BatchListener(listener, to_batch)
    return lambda messages, context: listener(batch_of(messages, to_batch), context)


def batch_of(messages: Sequence[ReceivedMessage], to_batch: ToBatch) -> Batch:
    """Return the record batch of a call. ``mqadmin`` may send a single message, which is not ``Rows``."""
    return messages.batch if isinstance(messages, Rows) else to_batch(messages)
