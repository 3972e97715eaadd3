"""Messages of a topic for a person: in the order in which they were stored, queue by queue merged, and followed.

Built for looking, not for volume; bulk reads go through ``source``. Messages that retention has deleted in the
meantime are passed over, and told to ``on_loss``.
"""

from __future__ import annotations

import heapq
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from itertools import groupby

from rocketmq_spark import session
from rocketmq_spark.client.pull import Cause
from rocketmq_spark.client.ranges import RangeReader
from rocketmq_spark.clock import Deadline
from rocketmq_spark.errors import RouteNotFound
from rocketmq_spark.model import MessageQueue, OffsetRange, QueueBounds, ReceivedMessage
from rocketmq_spark.options import Options
from rocketmq_spark.wire.messages import decode_messages
from rocketmq_spark.wire.subscription import ALL, parse_subscription

# How far one queue is read ahead, its messages held to be merged with the others'; further when a filter drops most.
_CHUNK, _FILTERED_CHUNK = 256, 8192
_REST_S = 0.1
_ROUTE_AGE_S = 10.0

OnLoss = Callable[[OffsetRange, Cause], None]
# Where to begin, given the bounds of all queues.
Start = Callable[[dict[MessageQueue, QueueBounds]], dict[MessageQueue, int]]


class TopicReader:
    """Reads one topic from a position in each queue; ``messages`` goes on where it was left.

    ``tags`` (``a || b``) are filtered on the broker and, since that compares hashes, here again.
    """

    def __init__(self, options: Options, topic: str, on_loss: OnLoss, tags: str | None = None) -> None:
        self._options = options
        self._client = session.client(options)
        self._topic = topic
        self._on_loss = on_loss
        self._wanted = parse_subscription(tags)
        self._filter = session.Filter(" || ".join(self._wanted.tags) or ALL)
        self._chunk = _FILTERED_CHUNK if self._filter else _CHUNK
        self._next: dict[MessageQueue, int] = {}
        self._held: dict[MessageQueue, deque[ReceivedMessage]] = {}

    def seek(self, start: Start) -> None:
        """Positions in every queue there is now. A topic that does not exist is told with the nearest names."""
        try:
            self._client.routes.get(self._topic, 0.0)
        except RouteNotFound as e:
            raise self._client.routes.missing_topic(e) from e
        self._next = start(self._bounds())

    def seek_time(self, epoch_ms: int) -> None:
        """The first messages stored at or after a moment."""

        def start(bounds: dict[MessageQueue, QueueBounds]) -> dict[MessageQueue, int]:
            found = self._client.brokers.search_offsets(dict.fromkeys(bounds, epoch_ms), Deadline.after(10.0))
            return {q: min(max(at, bounds[q].min_offset), bounds[q].max_offset) for q, at in found.items()}

        self.seek(start)

    def messages(self, follow: bool = False) -> Iterator[ReceivedMessage]:
        """Everything up to the end as it is now, or without end."""
        while True:
            bounds = self._bounds()
            for queue, bound in bounds.items():
                self._next.setdefault(queue, bound.min_offset)  # a queue that was added later
            ends = {queue: bound.max_offset for queue, bound in bounds.items()}
            yield from self._merged(ends)
            if not follow:
                return
            time.sleep(_REST_S)

    def _merged(self, ends: dict[MessageQueue, int]) -> Iterator[ReceivedMessage]:
        heads: list[tuple[int, MessageQueue]] = []
        self._fill(list(ends), ends, heads)
        while heads:
            _, queue = heapq.heappop(heads)
            held = self._held[queue]
            yield held.popleft()
            if held:
                heapq.heappush(heads, (held[0].store_timestamp_ms, queue))
            else:
                self._fill([queue], ends, heads)

    def _fill(
        self, queues: Sequence[MessageQueue], ends: dict[MessageQueue, int], heads: list[tuple[int, MessageQueue]]
    ) -> None:
        """Read on in ``queues`` until each has something to show or has come to its end."""
        hungry = [q for q in queues if self._next[q] < ends[q]]
        while hungry:
            self._read([OffsetRange(q, self._next[q], min(self._next[q] + self._chunk, ends[q])) for q in hungry])
            hungry = [q for q in hungry if not self._held[q] and self._next[q] < ends[q]]
        for queue in queues:
            if self._held.get(queue):
                heapq.heappush(heads, (self._held[queue][0].store_timestamp_ms, queue))

    def _read(self, ranges: Sequence[OffsetRange]) -> None:
        for broker_name, group in groupby(sorted(ranges, key=lambda r: r.queue.broker_name), _broker_name):
            part = list(group)
            dial = self._client.bulk(broker_name, self._topic)
            templates = [self._client.pull_template(r.queue, self._options.group, self._filter) for r in part]
            settings = session.pull_settings(self._options, bool(self._filter))
            for r in part:
                self._held[r.queue] = deque()
            for window in RangeReader(part, dial, templates, settings, self._on_loss).windows():
                for piece in window.pieces:
                    body = window.buffer[piece.begin : piece.end].tobytes()
                    self._held[part[piece.number].queue].extend(
                        m
                        for m in decode_messages(body, broker_name)
                        if piece.start <= m.queue_offset < piece.limit and self._wanted.accepts(m.tags)
                    )
            for r in part:
                self._next[r.queue] = r.end

    def _bounds(self) -> dict[MessageQueue, QueueBounds]:
        def ask() -> dict[MessageQueue, QueueBounds]:
            queues = self._client.routes.get(self._topic, _ROUTE_AGE_S).readable()
            return self._client.brokers.bounds(queues, Deadline.after(10.0))

        return self._client.retry.run(ask)


def _broker_name(part: OffsetRange) -> str:
    return part.queue.broker_name


def earliest(bounds: dict[MessageQueue, QueueBounds]) -> dict[MessageQueue, int]:
    return {queue: bound.min_offset for queue, bound in bounds.items()}


def latest(bounds: dict[MessageQueue, QueueBounds]) -> dict[MessageQueue, int]:
    return {queue: bound.max_offset for queue, bound in bounds.items()}


def at_offset(offset: int) -> Start:
    """The same offset in every queue, as far as the queue has it."""

    def start(bounds: dict[MessageQueue, QueueBounds]) -> dict[MessageQueue, int]:
        return {q: min(max(offset, b.min_offset), b.max_offset) for q, b in bounds.items()}

    return start
