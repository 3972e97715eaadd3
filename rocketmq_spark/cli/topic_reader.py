"""Reads the messages of a topic in the order of their store times, for commands that show them.

The reader is made for inspection, not for volume; bulk reads use ``spark/source``. If brokers delete messages before
the reader reads them, the reader skips these messages, and reports them to ``on_loss``.
"""

from __future__ import annotations

import heapq
import logging
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import groupby

from rocketmq_spark import session
from rocketmq_spark.admin import with_kept_minimums
from rocketmq_spark.base.clock import Deadline
from rocketmq_spark.columnar.decode.rows import messages_in_range, usable_answers
from rocketmq_spark.errors import NotReadable, OffsetError
from rocketmq_spark.model import Filter, MessageQueue, OffsetRange, QueueBounds, ReceivedMessage, TopicRoute
from rocketmq_spark.model.admin import GROUP
from rocketmq_spark.model.pull import OffsetWindow
from rocketmq_spark.options import Options
from rocketmq_spark.options.parsing import EARLIEST, LATEST
from rocketmq_spark.pull import reading
from rocketmq_spark.pull.fetched import FetchedAnswer, FetchedAnswers
from rocketmq_spark.pull.outcomes import Cause, OnLoss
from rocketmq_spark.queues.environment import EnvironmentQueues, environment_of
from rocketmq_spark.wire.messages import UnwrapBudget, decode_leniently, decompressed
from rocketmq_spark.wire.properties import ALL_TAGS, parse_subscription

logger = logging.getLogger(__name__)

# The number of offsets that are read ahead in each queue, to merge the queues. The number is larger with a filter, because a
# filter drops most messages.
_READ_AHEAD, _FILTERED_READ_AHEAD = 256, 8192
# The number of offsets of the first read of a queue, when the size of its messages is unknown.
_FIRST_READ_AHEAD = 32
# Limit of the stored bytes in buffers of all queues, and of the memory of unwrapped batches. Each message is decompressed only
# when it is returned.
_MAX_BUFFERED_BYTES = 64 << 20
_POLL_INTERVAL_S = 0.1
_MAX_ROUTE_AGE_S = 10.0

# A function that returns the start offsets for the bounds of all queues.
StartFunction = Callable[[dict[MessageQueue, QueueBounds]], dict[MessageQueue, int]]
# The next message of a queue, in a form that sorts by time: its store time, its broker, its position in the commit log, and the
# queue.
HeapEntry = tuple[int, str, int, MessageQueue]


class TopicReader:
    """Reads one topic from a position in each queue. Each call of ``messages`` continues where the last call stopped.

    ``tags`` (``a || b``) are filtered on the broker and again here, because the broker compares only hashes.
    """

    def __init__(self, options: Options, topic: str, on_loss: OnLoss, tags: str | None = None) -> None:
        self._client = session.client(options)
        self._puller = session.puller(options, read_from="master")
        self._topic = topic
        self._environment_queues = EnvironmentQueues(environment_of(options))
        self._on_loss = on_loss
        self._subscription = parse_subscription(tags)
        self._filter = Filter(" || ".join(self._subscription.tags) or ALL_TAGS)
        self._max_read_ahead = _FILTERED_READ_AHEAD if self._filter else _READ_AHEAD
        self._next_offsets: dict[MessageQueue, int] = {}
        self._start_offsets: Mapping[MessageQueue, int] | None = None
        self._end_offsets: Mapping[MessageQueue, int] = {}
        # How many offsets to read next in each queue; the number is small if the messages are large.
        self._read_ahead: dict[MessageQueue, int] = {}
        self._next_messages: dict[MessageQueue, ReceivedMessage] = {}  # the next message of each queue
        self._buffered_messages: dict[
            MessageQueue, Iterator[ReceivedMessage]
        ] = {}  # the messages after ``_next_messages``
        self._unwrap_budget = UnwrapBudget(_MAX_BUFFERED_BYTES)

    def seek(self, find_start_offsets: StartFunction) -> None:
        """Set the position of every existing queue. For a topic that does not exist, the error suggests similar names."""
        route = self._client.routes.get_existing(self._topic, 0.0)
        if route.unreadable_brokers and not route.readable_queues():
            raise not_readable_error(route)
        if route.unreadable_brokers:
            logger.warning(
                "topic %s has no read permission on %s: the messages on these brokers are omitted",
                self._topic,
                ", ".join(route.unreadable_brokers),
            )
        self._unwrap_budget = UnwrapBudget(_MAX_BUFFERED_BYTES)
        self._next_offsets = find_start_offsets(
            self._client.retry.run(lambda: with_kept_minimums(self._client, self._bounds()))
        )
        self._read_ahead, self._next_messages, self._buffered_messages = {}, {}, {}

    def seek_offsets(
        self, start_offsets: Mapping[MessageQueue, int], end_offsets: Mapping[MessageQueue, int] | None = None
    ) -> None:
        """Read only the queues in ``start_offsets``. A queue is read from its offset in ``start_offsets``. If the queue is also
        in ``end_offsets``, it is read up to the offset there. Offsets may be ``EARLIEST`` or ``LATEST``. Offsets that are no
        longer kept go to ``on_loss``. Raises ``OffsetError`` for queues that do not exist, and for offsets after a queue's end.
        """
        self._start_offsets, self._end_offsets = start_offsets, end_offsets or {}
        self.seek(self._start_at_offsets)

    def _start_at_offsets(self, bounds: dict[MessageQueue, QueueBounds]) -> dict[MessageQueue, int]:
        assert self._start_offsets is not None
        if unknown_queues := sorted(self._start_offsets.keys() - bounds.keys()):
            queue_names = ", ".join(map(str, unknown_queues[:10]))
            raise OffsetError(
                f"{self._topic} has no such queues, or they have no read permission: {queue_names}",
                remedy=f"Look with: rocketmq-spark topic describe {self._topic}",
            )
        clamped_starts = {}
        for queue, start_or_constant in self._start_offsets.items():
            queue_bounds, start = bounds[queue], _resolve_offset(start_or_constant, bounds[queue])
            if start > queue_bounds.max_offset:
                raise OffsetError(
                    f"{queue} ends at {queue_bounds.max_offset}, before {start}: {Cause.WENT_BACK.value}",
                    topic=self._topic,
                )
            clamped_starts[queue] = queue_bounds.clamp(start)
            lost_range = OffsetRange(
                queue, start, max(start, min(clamped_starts[queue], self._end_of(queue, queue_bounds)))
            )
            if lost_range.size:
                self._on_loss(lost_range, Cause.TRUNCATED)
        return clamped_starts

    def _end_of(self, queue: MessageQueue, bounds: QueueBounds) -> int:
        return min(_resolve_offset(self._end_offsets.get(queue, LATEST), bounds), bounds.max_offset)

    def seek_time(self, epoch_ms: int) -> None:
        """Start at the first messages stored at or after a time."""

        def find_start_offsets(bounds: dict[MessageQueue, QueueBounds]) -> dict[MessageQueue, int]:
            offsets = self._client.offset_reader.search_offsets(
                dict.fromkeys(bounds, epoch_ms), Deadline.after(10.0), group=GROUP
            )
            return {q: bounds[q].clamp(offset) for q, offset in offsets.items()}

        self.seek(find_start_offsets)

    def messages(self, follow: bool = False) -> Iterator[ReceivedMessage]:
        """Yield all messages up to the current end; with ``follow``, without end."""
        while True:
            bounds = self._bounds()
            for queue, queue_bounds in bounds.items():
                self._follow_queue(queue, queue_bounds)
            ends = {queue: self._end_of(queue, queue_bounds) for queue, queue_bounds in bounds.items()}
            yield from self._merge(ends)
            if not follow:
                return
            time.sleep(_POLL_INTERVAL_S)

    def _follow_queue(self, queue: MessageQueue, bounds: QueueBounds) -> None:
        """If a queue is new or was created again, begin at its first message."""
        position = self._next_offsets.setdefault(queue, bounds.min_offset)
        if bounds.max_offset < position:
            self._on_loss(OffsetRange(queue, bounds.max_offset, position), Cause.WENT_BACK)
            self._next_offsets[queue] = bounds.min_offset

    def _merge(self, ends: dict[MessageQueue, int]) -> Iterator[ReceivedMessage]:
        heap: list[HeapEntry] = []
        self._fill(list(ends), ends, heap)
        while heap:
            queue = heapq.heappop(heap)[-1]
            message = self._next_messages.pop(queue)
            self._advance(queue)
            yield decompressed(message)
            self._fill([queue], ends, heap)

    def _advance(self, queue: MessageQueue) -> None:
        next_message = next(self._buffered_messages.get(queue, iter(())), None)
        if next_message is not None:
            self._next_messages[queue] = next_message

    def _fill(self, queues: Sequence[MessageQueue], ends: dict[MessageQueue, int], heap: list[HeapEntry]) -> None:
        """Read ``queues`` until each queue has a message or has reached its end."""
        while queues_to_read := [q for q in queues if q not in self._next_messages and self._next_offsets[q] < ends[q]]:
            read_counts = {
                q: self._read_ahead.get(q, min(self._max_read_ahead, _FIRST_READ_AHEAD)) for q in queues_to_read
            }
            self._read(
                [
                    OffsetRange(q, self._next_offsets[q], min(self._next_offsets[q] + read_counts[q], ends[q]))
                    for q in queues_to_read
                ]
            )
            for queue in queues_to_read:
                self._advance(queue)
        for queue in queues:
            if queue in self._next_messages:
                message = self._next_messages[queue]
                heapq.heappush(heap, (message.store_timestamp, message.broker_name, message.commit_log_offset, queue))

    def _read(self, ranges: Sequence[OffsetRange]) -> None:
        max_bytes = _MAX_BUFFERED_BYTES // len(self._next_offsets)
        for _, group in groupby(sorted(ranges, key=lambda offset_range: offset_range.queue.broker_name), _broker_name):
            broker_ranges = list(group)
            broker_filter = self._puller.broker_filter(broker_ranges[0].queue, self._filter)
            pulls = reading.read(self._puller, broker_ranges, self._on_loss, broker_filter)
            buffers = [BufferedAnswers(max_bytes) for _ in broker_ranges]
            for fetched_answers in pulls.fetch():
                for answer in usable_answers(fetched_answers, pulls.count_usable_answers, pulls.with_true_ends):
                    buffers[answer.range_number].add(fetched_answers, answer)
            for offset_range, buffer in zip(broker_ranges, buffers, strict=True):
                self._next_offsets[offset_range.queue], self._read_ahead[offset_range.queue] = buffer.next_read(
                    offset_range, self._max_read_ahead
                )
                self._buffered_messages[offset_range.queue] = self._messages(offset_range.queue, buffer)

    def _messages(self, queue: MessageQueue, buffer: BufferedAnswers) -> Iterator[ReceivedMessage]:
        for answer, stored_bytes in buffer.answers():
            window = OffsetWindow(answer.start, answer.next_offset)
            decoded_messages = decode_leniently(
                stored_bytes, queue.broker_name, queue=queue, window=window, budget=self._unwrap_budget
            )
            for message in messages_in_range(decoded_messages, answer, is_dense=not self._filter):
                if self._subscription.accepts(message.tags) or message.decode_error is not None:
                    yield message

    def _bounds(self) -> dict[MessageQueue, QueueBounds]:
        def fetch() -> dict[MessageQueue, QueueBounds]:
            queues = self._environment_queues(self._client.routes.get(self._topic, _MAX_ROUTE_AGE_S).readable_queues())
            if self._start_offsets is not None:
                queues = [queue for queue in queues if queue in self._start_offsets]
            return self._client.offset_reader.bounds(queues, Deadline.after(10.0))

        return self._client.retry.run(fetch)


class BufferedAnswers:
    """Buffers undecoded answers of one queue, up to ``max_bytes``. Answers above this limit are dropped, and requested again
    later.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._buffered_bytes = 0
        self._answers: deque[tuple[FetchedAnswer, bytes]] = deque()
        self._first_dropped_offset: int | None = None  # the start of the first dropped answer

    def add(self, fetched_answers: FetchedAnswers, answer: FetchedAnswer) -> None:
        if (
            self._first_dropped_offset is None
            and self._answers
            and self._buffered_bytes + answer.end - answer.begin > self._max_bytes
        ):
            self._first_dropped_offset = answer.start
        if self._first_dropped_offset is None:
            self._answers.append((answer, fetched_answers.buffer[answer.begin : answer.end].tobytes()))
            self._buffered_bytes += answer.end - answer.begin

    def next_read(self, offset_range: OffsetRange, max_offsets: int) -> tuple[int, int]:
        """Return the next offset to read, and how many offsets to read from there. The number of offsets is estimated from the
        size of the buffered answers.
        """
        end = offset_range.end if self._first_dropped_offset is None else self._first_dropped_offset
        return end, max(
            1, min(max_offsets, (end - offset_range.start) * self._max_bytes // max(1, self._buffered_bytes))
        )

    def answers(self) -> Iterator[tuple[FetchedAnswer, bytes]]:
        while self._answers:
            yield self._answers.popleft()


def _broker_name(offset_range: OffsetRange) -> str:
    return offset_range.queue.broker_name


def not_readable_error(route: TopicRoute) -> NotReadable:
    """Return the error for a topic without read permission. Such a topic may have messages."""
    return NotReadable(
        f"topic {route.topic} has no read permission on {', '.join(route.unreadable_brokers)}",
        topic=route.topic,
        remedy=f"To see it: rocketmq-spark topic describe {route.topic}; to change it: rocketmq-spark topic update "
        f"{route.topic} --permission RW. If it is RW already, the broker's setting brokerPermission denies reading",
    )


def earliest(bounds: dict[MessageQueue, QueueBounds]) -> dict[MessageQueue, int]:
    return {queue: bound.min_offset for queue, bound in bounds.items()}


def latest(bounds: dict[MessageQueue, QueueBounds]) -> dict[MessageQueue, int]:
    return {queue: bound.max_offset for queue, bound in bounds.items()}


def _resolve_offset(offset_or_constant: int, bounds: QueueBounds) -> int:
    return {EARLIEST: bounds.min_offset, LATEST: bounds.max_offset}.get(offset_or_constant, offset_or_constant)


def at_offset(offset: int) -> StartFunction:
    """Start at the same offset in every queue, limited to the queue's bounds."""

    def find_start_offsets(bounds: dict[MessageQueue, QueueBounds]) -> dict[MessageQueue, int]:
        return {q: bounds_of_queue.clamp(offset) for q, bounds_of_queue in bounds.items()}

    return find_start_offsets
