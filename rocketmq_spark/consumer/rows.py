"""Rows: what a listener of record batches gets in one call (option ``arrow``), and the queue that keeps them.

``Rows`` is one item of a process queue: a whole answer, what a filter leaves of it, or a part of at most
``consumeMessageBatchMaxSize`` rows. It is also the sequence of its messages, which are made only if somebody looks at them: to
send back those that failed, for traces, and for the result of ``stop``. So pulls, limits of the cache, offsets, locks and
rebalances are those of a listener of messages.

``RowsOfAnswers`` makes them. Many plain messages are decoded by columns. Few ones, those of a filter or of the retry topic, and
everything unusual (a message that cannot be decoded, offsets that damage has changed) become messages first and then a batch, so
that the rows are those that a listener of messages would get.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, overload

from rocketmq_spark.base.codes import RETRY_PREFIX
from rocketmq_spark.consumer.process_queue import ProcessQueue, once_more
from rocketmq_spark.consumer.pull.assigned import FetchedPart
from rocketmq_spark.consumer.result import LaterListener, Listener, ListenerCall, Turn
from rocketmq_spark.model import ReceivedMessage
from rocketmq_spark.wire.messages import portion

logger = logging.getLogger(__name__)

# Decoding by columns takes 0.3 ms for any number of rows; making messages and then columns 5 us for each row.
FEW = 48

Batch = Any  # a ``pyarrow.RecordBatch``
ToBatch = Callable[[Sequence[ReceivedMessage]], Batch]


class Rows(Sequence[ReceivedMessage]):
    """Rows of one queue in its order: ``batch``, and the messages that they show.

    ``queue_offset`` is the first offset, ``next_offset`` the one after the last; ``size`` is in bytes. ``times`` counts attempts
    in place.
    """

    __slots__ = ("_batch", "_count", "_messages", "_times", "next_offset", "queue_offset", "size")

    def __init__(
        self,
        offsets: tuple[int, int],
        count: int,
        size: int,
        batch: Callable[[], Batch],
        messages: Callable[[], Sequence[ReceivedMessage]],
        times: int = 0,
    ) -> None:
        self.queue_offset, self.next_offset = offsets
        self.size = size
        self._count = count
        self._batch = batch
        self._messages = messages
        self._times = times

    @classmethod
    def of(cls, messages: Sequence[ReceivedMessage], to_batch: ToBatch, offsets: tuple[int, int] | None = None) -> Rows:
        """The rows of these messages; of the given ``offsets``, if they stand for more messages."""
        size = sum(len(message.body) + max(0, message.store_size) for message in messages)
        offsets = offsets or (messages[0].queue_offset, messages[-1].queue_offset + 1)
        return cls(offsets, len(messages), size, partial(to_batch, messages), lambda: messages)

    @property
    def batch(self) -> Batch:
        return self._batch()

    def once_more(self) -> Rows:
        """The same rows, with one more attempt."""
        offsets = self.queue_offset, self.next_offset
        return Rows(offsets, self._count, self.size, self._batch, self._messages, self._times + 1)

    def __len__(self) -> int:
        return self._count

    @overload
    def __getitem__(self, index: int) -> ReceivedMessage: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[ReceivedMessage]: ...
    def __getitem__(self, index: int | slice) -> ReceivedMessage | Sequence[ReceivedMessage]:
        messages = self._messages()
        if isinstance(index, int):
            return self._tried(messages[index])
        found = messages[index] if len(messages) == self._count else messages  # see ``_Stored``
        return [self._tried(message) for message in found]

    def __iter__(self) -> Iterator[ReceivedMessage]:
        return map(self._tried, self._messages())

    def _tried(self, message: ReceivedMessage) -> ReceivedMessage:
        return once_more(message, self._times) if self._times else message


class RowsQueue(ProcessQueue):
    """The unfinished rows of a queue. Counts and limits are those of rows. ``to_batch`` makes a batch of messages that are left
    of a call.
    """

    def __init__(self, to_batch: ToBatch, *queue_and_time: Any) -> None:
        super().__init__(*queue_and_time)
        self._to_batch = to_batch
        self._sizes: dict[int, tuple[int, int]] = {}

    def put(self, messages: Iterable[Rows]) -> int:
        new = 0
        for rows in messages:
            if self._place(rows):
                self._replace(rows)  # it may have other rows than the earlier one
                continue
            new += len(rows)
            self._count(rows)
            self._put_end = rows.next_offset
        return new

    def size_of(self, messages: Sequence[Rows]) -> int:
        return sum(map(len, messages))

    def calls(self, messages: Sequence[Rows], size: int) -> tuple[Iterator[Rows], int]:
        return iter(deque(messages).popleft, None), len(messages)  # any thread may take one, and then it is not held

    def remove(self, messages: Sequence[ReceivedMessage]) -> int | None:
        """Remove the rows of a finished call. What ``again`` or ``settle`` leave of a call is theirs to keep."""
        if not self._waiting:
            return None
        if isinstance(messages, Rows) and self._waiting.pop(messages.queue_offset, None) is not None:
            self._uncount(messages.queue_offset)
        return self._next()

    def take(self, count: int) -> Sequence[ReceivedMessage]:
        """Take the first rows, as they were put."""
        rows = self.first()
        if rows is None:
            return ()
        self._taken[rows.queue_offset] = self._waiting.pop(rows.queue_offset)
        taken: Rows = rows
        return taken

    def retry(self, messages: Sequence[ReceivedMessage], alone: bool) -> None:
        if isinstance(messages, Rows):
            self.put_back([messages.once_more()])
            return
        taken = next((rows for rows in self._taken.values() if _covers(rows, messages[0])), None)
        if taken is None:  # a reset came meanwhile
            return
        del self._taken[taken.queue_offset]
        self._uncount(taken.queue_offset)
        ends = [message.queue_offset for message in messages[1:]] + [taken.next_offset]
        for message, end in zip(messages, ends, strict=True):
            rows = Rows.of([message], self._to_batch, (message.queue_offset, end)).once_more()
            self._place(rows)
            self._count(rows)

    def bury(self, messages: Sequence[ReceivedMessage]) -> None:
        """Mark taken rows as dead letters if all of them are. ``retry`` keeps the others of a call."""
        self._dead.update(
            offset
            for offset, rows in self._taken.items()
            if messages and len(messages) == len(rows) and _covers(rows, messages[0])
        )

    def again(self, call: Sequence[ReceivedMessage], left: Sequence[ReceivedMessage]) -> Sequence[Rows]:
        whole = left if isinstance(left, Rows) else self._rest(call, left)
        rows = whole.once_more()
        self._replace(rows)
        return [rows]

    def late(self, call: Sequence[ReceivedMessage]) -> Sequence[ReceivedMessage]:
        first: Rows | None = self.first()
        return first if first is not None and isinstance(call, Rows) and first.queue_offset == call.queue_offset else ()

    def settle(self, late: Sequence[ReceivedMessage], left: Sequence[ReceivedMessage]) -> None:
        if left:
            self._replace(self._rest(late, left))
        else:
            self.remove(late)

    def unfinished(self, call: Sequence[ReceivedMessage], messages: Sequence[ReceivedMessage]) -> list[ReceivedMessage]:
        rows = self._waiting.get(_rows(call).queue_offset)
        if rows is None:
            return []
        if rows is call:
            return list(messages)
        left = {message.queue_offset for message in rows}
        return [message for message in messages if message.queue_offset in left]

    def _rest(self, call: Sequence[ReceivedMessage], left: Sequence[ReceivedMessage]) -> Rows:
        """What is left of the rows of a call. It stands for all of them: the offset does not pass the first one before."""
        rows = _rows(call)
        return Rows.of(left, self._to_batch, (rows.queue_offset, rows.next_offset))

    def _replace(self, rows: Rows) -> None:
        if rows.queue_offset in self._waiting:
            self._uncount(rows.queue_offset)
            self._waiting[rows.queue_offset] = rows
            self._count(rows)

    def _count(self, rows: Rows) -> None:
        self._sizes[rows.queue_offset] = count, size = len(rows), rows.size
        self.count += count
        self.bytes += size

    def _uncount(self, offset: int) -> None:
        count, size = self._sizes.pop(offset)
        self.count -= count
        self.bytes -= size

    def _end(self, message: Any) -> int:
        end: int = message.next_offset
        return end


def _rows(call: Sequence[ReceivedMessage]) -> Rows:
    assert isinstance(call, Rows)
    return call


def _covers(rows: Rows, message: ReceivedMessage) -> bool:
    return rows.queue_offset <= message.queue_offset < rows.next_offset


class _Stored:
    """The stored messages of a part, decoded if one of its rows failed; ``count`` is the number of its rows.

    Both decoders should find the same messages. If their numbers differ after all, a row stands for every message of the part:
    they are delivered again, but none is lost.
    """

    def __init__(self, part: FetchedPart, count: int) -> None:
        self._part = part
        self._count = count
        self._messages: list[ReceivedMessage] | None = None

    def rows(self, start: int, stop: int) -> Sequence[ReceivedMessage]:
        if self._messages is None:
            self._messages = list(self._part.read())
        if len(self._messages) != self._count:
            text = "%s from offset %d: %d rows are %d messages, so all of them count as failed"
            logger.warning(text, self._part.queue, self._part.start, self._count, len(self._messages))
            return self._messages
        return self._messages[start:stop]


class RowsOfAnswers:
    """Makes ``Rows`` of at most ``most`` rows of fetched answers. ``by_columns`` decodes parts together; None if one is unusual.
    ``to_batch`` makes a batch of messages.
    """

    def __init__(
        self, most: int, by_columns: Callable[[Sequence[FetchedPart]], Batch | None], to_batch: ToBatch
    ) -> None:
        self._most = most
        self._by_columns = by_columns
        self.to_batch = to_batch

    def __call__(self, parts: Sequence[FetchedPart]) -> Iterator[tuple[list[Rows], int | None]]:
        """Yield of each part its rows, and the offset from which on messages are left because the others are too large."""
        together = self._together(parts)
        for number, part in enumerate(parts):
            rows = self._decoded(part) if together is None else together[number]
            yield self._of_messages(part) if rows is None else (rows, None)

    def _together(self, parts: Sequence[FetchedPart]) -> list[list[Rows]] | None:
        """Rows of several parts, decoded at once. None if they are not one row for each offset."""
        counts = [part.count for part in parts]
        if len(parts) == 1 or sum(counts) < FEW or not all(map(_plain, parts)):
            return None
        batch = self._by_columns(parts)
        if batch is None or batch.num_rows != sum(counts):
            return None
        found, at = [], 0
        for part, count in zip(parts, counts, strict=True):
            rows = self._cut(part, batch.slice(at, count), batch.nbytes * count // batch.num_rows)
            if rows is None:
                return None
            found.append(rows)
            at += count
        return found

    def _decoded(self, part: FetchedPart) -> list[Rows] | None:
        if part.count < FEW or not _plain(part) or (batch := self._by_columns([part])) is None:
            return None
        return self._cut(part, batch, batch.nbytes)

    def _cut(self, part: FetchedPart, batch: Batch, size: int) -> list[Rows] | None:
        """The rows of a part; None if damage may have changed where its messages say that they are."""
        offsets, count = batch.column("queueOffset").to_numpy(), batch.num_rows
        if not _in_place(batch, offsets, part):
            return None
        stored, size = _Stored(part, count), size + len(part.stored)
        made = []
        for start in range(0, count, self._most):
            stop = min(start + self._most, count)
            rows = batch if stop - start == count else batch.slice(start, stop - start)
            ends = int(offsets[start]), int(offsets[stop - 1]) + 1
            bytes_of = size * (stop - start) // count
            made.append(Rows(ends, stop - start, bytes_of, partial(_same, rows), partial(stored.rows, start, stop)))
        return made

    def _of_messages(self, part: FetchedPart) -> tuple[list[Rows], int | None]:
        messages, left = portion(part.read())
        for message in messages:
            if message.decode_error is not None:
                text = "%s: the message at offset %d cannot be decoded, a row without its body: %s"
                logger.warning(text, part.queue, message.queue_offset, message.decode_error)
        pieces = (messages[start : start + self._most] for start in range(0, len(messages), self._most))
        return [Rows.of(each, self.to_batch) for each in pieces], None if left is None else left.queue_offset


def _same(batch: Batch) -> Batch:
    return batch


def _plain(part: FetchedPart) -> bool:
    """Whether every stored message is a row under the topic of its queue. The offsets of messages that a filter leaves out may be
    damaged, too, and they tell where the others are.
    """
    return not part.filter and not part.queue.topic.startswith(RETRY_PREFIX)


def _in_place(batch: Batch, offsets: Any, part: FetchedPart) -> bool:
    """Whether the queue and the offsets inside the messages are possible."""
    if not len(offsets):
        return True
    within = part.start <= offsets[0] and offsets[-1] < part.next_offset and (offsets[1:] > offsets[:-1]).all()
    return bool(within and (batch.column("queueId").to_numpy() == part.queue.queue_id).all())


class _BatchCall(ListenerCall):
    """A call with a batch, made when it is asked for: what fails then is the listener's failure."""

    __slots__ = ("_call", "_to_batch")

    def __init__(self, call: ListenerCall, to_batch: ToBatch) -> None:
        self.context, self._call, self._to_batch = call.context, call, to_batch

    @property
    def messages(self) -> Batch:
        return batch_of(self._call.messages, self._to_batch)

    def __call__(self, outcome: object) -> None:
        self._call(outcome)


class _BatchListener(LaterListener):
    """A listener of batches whose calls wait for their turn."""

    def __init__(self, listener: LaterListener, to_batch: ToBatch) -> None:
        self._listener = listener
        self._to_batch = to_batch

    def submit(self, turn: Turn, times: int, first: bool = False) -> None:
        self._listener.submit(partial(self._begun, turn), times, first)

    def _begun(self, turn: Turn) -> ListenerCall | None:
        call = turn()
        return None if call is None else _BatchCall(call, self._to_batch)


def of_batches(listener: Listener, to_batch: ToBatch) -> Listener:
    """Return a listener that passes the batches of ``Rows`` to ``listener``."""
    if isinstance(listener, LaterListener):
        return _BatchListener(listener, to_batch)
    return lambda messages, context: listener(batch_of(messages, to_batch), context)


def batch_of(messages: Sequence[ReceivedMessage], to_batch: ToBatch) -> Batch:
    """The batch of a call. ``mqadmin`` may send a single message."""
    return messages.batch if isinstance(messages, Rows) else to_batch(messages)
