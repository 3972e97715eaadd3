"""Messages of a topic for people: the queues are merged by store time, and may be followed.

Made for inspection, not for volume; bulk reads use ``spark/source``. Messages that retention has deleted in the
meantime are skipped and reported to ``on_loss``.
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
from rocketmq_spark.wire.properties import ALL, parse_subscription

logger = logging.getLogger(__name__)

# Messages of one queue that are read ahead, to be merged with those of other queues; more if a filter drops most.
_CHUNK, _FILTERED_CHUNK = 256, 8192
# Before the size of messages is known.
_FIRST_CHUNK = 32
# Limit of stored bytes held for all queues, and of the memory of unwrapped batches. One message is decompressed at a time.
_HELD_BYTES = 64 << 20
_REST_S = 0.1
_ROUTE_AGE_S = 10.0

# Returns the start offsets for the bounds of all queues.
Start = Callable[[dict[MessageQueue, QueueBounds]], dict[MessageQueue, int]]
# The next message of a queue: its store time, and its position in the commit log, which orders those of one millisecond.
Head = tuple[int, str, int, MessageQueue]


class TopicReader:
    """Reads one topic from a position in each queue; ``messages`` continues where it stopped.

    ``tags`` (``a || b``) are filtered on the broker and again here, because the broker compares only hashes.
    """

    def __init__(self, options: Options, topic: str, on_loss: OnLoss, tags: str | None = None) -> None:
        self._client = session.client(options)
        self._puller = session.puller(options, read_from="master")
        self._topic = topic
        self._own = EnvironmentQueues(environment_of(options))
        self._on_loss = on_loss
        self._wanted = parse_subscription(tags)
        self._filter = Filter(" || ".join(self._wanted.tags) or ALL)
        self._chunk = _FILTERED_CHUNK if self._filter else _CHUNK
        self._next: dict[MessageQueue, int] = {}
        self._begins: Mapping[MessageQueue, int] | None = None
        self._ends: Mapping[MessageQueue, int] = {}
        # Messages of each queue that are read ahead: fewer if they are large.
        self._ahead: dict[MessageQueue, int] = {}
        self._heads: dict[MessageQueue, ReceivedMessage] = {}
        self._held: dict[MessageQueue, Iterator[ReceivedMessage]] = {}
        self._batches = UnwrapBudget(_HELD_BYTES)

    def seek(self, start: Start) -> None:
        """Set the position of every existing queue. For a topic that does not exist, the error suggests the nearest names."""
        route = self._client.routes.get_existing(self._topic, 0.0)
        if route.closed and not route.readable():
            raise closed(route)
        if route.closed:
            logger.warning(
                "what topic %s has on %s is omitted: no read permission", self._topic, ", ".join(route.closed)
            )
        self._batches = UnwrapBudget(_HELD_BYTES)
        self._next = start(self._client.retry.run(lambda: with_kept_minimums(self._client, self._bounds())))
        self._ahead, self._heads, self._held = {}, {}, {}

    def seek_offsets(self, begins: Mapping[MessageQueue, int], ends: Mapping[MessageQueue, int] | None = None) -> None:
        """Read only the queues of ``begins``, each from its offset, and up to that of ``ends`` if it has one.

        Both may be ``EARLIEST`` or ``LATEST``. Offsets that are no longer kept go to ``on_loss``. Raises ``OffsetError`` for
        queues that do not exist, and for offsets after a queue's end.
        """
        self._begins, self._ends = begins, ends or {}
        self.seek(self._at_begins)

    def _at_begins(self, bounds: dict[MessageQueue, QueueBounds]) -> dict[MessageQueue, int]:
        assert self._begins is not None
        if unknown := sorted(self._begins.keys() - bounds.keys()):
            names = ", ".join(map(str, unknown[:10]))
            raise OffsetError(
                f"{self._topic} has no such queues, or they have no read permission: {names}",
                remedy=f"Look with: rocketmq-spark topic describe {self._topic}",
            )
        starts = {}
        for queue, given in self._begins.items():
            bound, begin = bounds[queue], _offset(given, bounds[queue])
            if begin > bound.max_offset:
                raise OffsetError(
                    f"{queue} ends at {bound.max_offset}, before {begin}: {Cause.WENT_BACK.value}", topic=self._topic
                )
            starts[queue] = bound.clamp(begin)
            lost = OffsetRange(queue, begin, max(begin, min(starts[queue], self._end(queue, bound))))
            if lost.size:
                self._on_loss(lost, Cause.TRUNCATED)
        return starts

    def _end(self, queue: MessageQueue, bound: QueueBounds) -> int:
        return min(_offset(self._ends.get(queue, LATEST), bound), bound.max_offset)

    def seek_time(self, epoch_ms: int) -> None:
        """Start at the first messages stored at or after a time."""

        def start(bounds: dict[MessageQueue, QueueBounds]) -> dict[MessageQueue, int]:
            offsets = self._client.brokers.search_offsets(
                dict.fromkeys(bounds, epoch_ms), Deadline.after(10.0), group=GROUP
            )
            return {q: bounds[q].clamp(at) for q, at in offsets.items()}

        self.seek(start)

    def messages(self, follow: bool = False) -> Iterator[ReceivedMessage]:
        """Yield all messages up to the current end; with ``follow``, without end."""
        while True:
            bounds = self._bounds()
            for queue, bound in bounds.items():
                self._follow(queue, bound)
            ends = {queue: self._end(queue, bound) for queue, bound in bounds.items()}
            yield from self._merged(ends)
            if not follow:
                return
            time.sleep(_REST_S)

    def _follow(self, queue: MessageQueue, bound: QueueBounds) -> None:
        """Read a queue from its start if it was added later or created again."""
        position = self._next.setdefault(queue, bound.min_offset)
        if bound.max_offset < position:
            self._on_loss(OffsetRange(queue, bound.max_offset, position), Cause.WENT_BACK)
            self._next[queue] = bound.min_offset

    def _merged(self, ends: dict[MessageQueue, int]) -> Iterator[ReceivedMessage]:
        heads: list[Head] = []
        self._fill(list(ends), ends, heads)
        while heads:
            queue = heapq.heappop(heads)[-1]
            message = self._heads.pop(queue)
            self._advance(queue)
            yield decompressed(message)
            self._fill([queue], ends, heads)

    def _advance(self, queue: MessageQueue) -> None:
        following = next(self._held.get(queue, iter(())), None)
        if following is not None:
            self._heads[queue] = following

    def _fill(self, queues: Sequence[MessageQueue], ends: dict[MessageQueue, int], heads: list[Head]) -> None:
        """Read ``queues`` until each has a message or has reached its end."""
        while hungry := [q for q in queues if q not in self._heads and self._next[q] < ends[q]]:
            ahead = {q: self._ahead.get(q, min(self._chunk, _FIRST_CHUNK)) for q in hungry}
            self._read([OffsetRange(q, self._next[q], min(self._next[q] + ahead[q], ends[q])) for q in hungry])
            for queue in hungry:
                self._advance(queue)
        for queue in queues:
            if queue in self._heads:
                one = self._heads[queue]
                heapq.heappush(heads, (one.store_timestamp, one.broker_name, one.commit_log_offset, queue))

    def _read(self, ranges: Sequence[OffsetRange]) -> None:
        room = _HELD_BYTES // len(self._next)
        for _, group in groupby(sorted(ranges, key=lambda r: r.queue.broker_name), _broker_name):
            part = list(group)
            at_brokers = self._puller.broker_filter(part[0].queue, self._filter)
            pulls = reading.read(self._puller, part, self._on_loss, at_brokers)
            held = [HeldAnswers(room) for _ in part]
            for fetched in pulls.fetch():
                for answer in usable_answers(fetched, pulls.usable_count, pulls.with_true_ends):
                    held[answer.range_number].take(fetched, answer)
            for r, mine in zip(part, held, strict=True):
                self._next[r.queue], self._ahead[r.queue] = mine.went(r, self._chunk)
                self._held[r.queue] = self._messages(r.queue, mine)

    def _messages(self, queue: MessageQueue, held: HeldAnswers) -> Iterator[ReceivedMessage]:
        for answer, stored in held.answers():
            window = OffsetWindow(answer.start, answer.next_offset)
            found = decode_leniently(stored, queue.broker_name, queue=queue, window=window, budget=self._batches)
            for message in messages_in_range(found, answer, dense=not self._filter):
                if self._wanted.accepts(message.tags) or message.decode_error is not None:
                    yield message

    def _bounds(self) -> dict[MessageQueue, QueueBounds]:
        def ask() -> dict[MessageQueue, QueueBounds]:
            queues = self._own(self._client.routes.get(self._topic, _ROUTE_AGE_S).readable())
            if self._begins is not None:
                queues = [queue for queue in queues if queue in self._begins]
            return self._client.brokers.bounds(queues, Deadline.after(10.0))

        return self._client.retry.run(ask)


class HeldAnswers:
    """Undecoded answers of one queue, up to ``room`` bytes. The rest is requested again later."""

    def __init__(self, room: int) -> None:
        self._room = room
        self._bytes = 0
        self._answers: deque[tuple[FetchedAnswer, bytes]] = deque()
        self._stopped_at: int | None = None

    def take(self, fetched: FetchedAnswers, answer: FetchedAnswer) -> None:
        if self._stopped_at is None and self._answers and self._bytes + answer.end - answer.begin > self._room:
            self._stopped_at = answer.start
        if self._stopped_at is None:
            self._answers.append((answer, fetched.buffer[answer.begin : answer.end].tobytes()))
            self._bytes += answer.end - answer.begin

    def went(self, r: OffsetRange, max_offsets: int) -> tuple[int, int]:
        """The next offset, and the number of offsets to read then, by the size of these answers."""
        end = r.end if self._stopped_at is None else self._stopped_at
        return end, max(1, min(max_offsets, (end - r.start) * self._room // max(1, self._bytes)))

    def answers(self) -> Iterator[tuple[FetchedAnswer, bytes]]:
        while self._answers:
            yield self._answers.popleft()


def _broker_name(part: OffsetRange) -> str:
    return part.queue.broker_name


def closed(route: TopicRoute) -> NotReadable:
    """The error for a topic that is not readable, although it may have messages."""
    return NotReadable(
        f"topic {route.topic} has no read permission on {', '.join(route.closed)}",
        topic=route.topic,
        remedy=f"To see it: rocketmq-spark topic describe {route.topic}; to change it: rocketmq-spark topic update "
        f"{route.topic} --permission RW. If it is RW already, the broker's setting brokerPermission denies reading",
    )


def earliest(bounds: dict[MessageQueue, QueueBounds]) -> dict[MessageQueue, int]:
    return {queue: bound.min_offset for queue, bound in bounds.items()}


def latest(bounds: dict[MessageQueue, QueueBounds]) -> dict[MessageQueue, int]:
    return {queue: bound.max_offset for queue, bound in bounds.items()}


def _offset(given: int, bound: QueueBounds) -> int:
    return {EARLIEST: bound.min_offset, LATEST: bound.max_offset}.get(given, given)


def at_offset(offset: int) -> Start:
    """The same offset in every queue, limited to the queue's bounds."""

    def start(bounds: dict[MessageQueue, QueueBounds]) -> dict[MessageQueue, int]:
        return {q: b.clamp(offset) for q, b in bounds.items()}

    return start
