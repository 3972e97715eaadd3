"""Messages that were pulled of one queue and are not finished (Java's ``ProcessQueue``), and when the queue is pulled again.

Messages are sorted by queue offset. Removing finished ones returns the offset up to which all are finished, which is the one
that may be committed. An orderly consumer takes messages from the front and then commits them or puts them back.

Pure: the caller holds its lock, passes the time, and acts on the result. Offsets mostly arrive in order, so the sorted
offsets are a deque that drops removed ones only when they reach one of its ends.

Pulls mirror ``DefaultMQPushConsumerImpl.pullMessage`` and its callback. Pulling never waits for listeners: thresholds of
what is cached (``Thresholds``) delay it instead.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from rocketmq_spark.base.codes import Response
from rocketmq_spark.errors import RocketMQError
from rocketmq_spark.model import MessageQueue, PullAnswer, PullStatus, ReceivedMessage

LOCK_EXPIRES_MS = 30_000  # on our side; the broker's lock lives 60 s


class QueueLock:
    """The broker's lock of a queue, as far as this member knows. ``granted_ms`` is when the last one was asked for.

    Times are of ``Timer.lease_ms``: the broker counts, too, while this machine sleeps.
    """

    def __init__(self) -> None:
        self.granted_ms: int | None = None
        self._lost = False

    def grant(self, asked_ms: int) -> None:
        """The broker gave the queue to this client, which asked at ``asked_ms``: the broker's time began no sooner."""
        self.granted_ms, self._lost = asked_ms, False

    def lose(self) -> None:
        """The broker did not."""
        self._lost = True

    def held(self, now_ms: int) -> bool:
        """Whether it is ours for sure."""
        return self.granted_ms is not None and not self._lost and now_ms - self.granted_ms <= LOCK_EXPIRES_MS


class ProcessQueue:
    """The unfinished messages of ``queue``. Once ``dropped`` the queue is not ours any more, and no result of it counts."""

    def __init__(self, queue: MessageQueue, now_ms: int = 0) -> None:
        self.queue = queue
        self.dropped = False
        self.last_pull_ms = now_ms
        self.last_consume_ms = now_ms
        self.lock = QueueLock()
        self.count = 0
        self.bytes = 0
        self._waiting: dict[int, ReceivedMessage] = {}
        self._taken: dict[int, ReceivedMessage] = {}
        self._bodies: dict[int, bytes] = {}  # as they were pulled: a listener may put something else in its message
        self._dead: set[int] = set()  # of the taken ones those that are dead letters
        self._alone: set[int] = set()  # those that are taken without others
        self._sorted: deque[int] = deque()
        self._max_put: int | None = None

    def put(self, messages: Iterable[ReceivedMessage]) -> int:
        """Keep what was pulled, and say how many of them are new; a repeated offset replaces its message uncounted."""
        new = 0
        for message in messages:
            if not self._place(message):
                new += 1
                self.count += 1
                self.bytes += len(message.body)
                self._bodies[message.queue_offset] = message.body
                self._max_put = message.queue_offset
        return new

    def remove(self, messages: Iterable[ReceivedMessage]) -> int | None:
        """Forget finished ones; gives the offset to commit, None when nothing was here. It never passes an unfinished one."""
        if not self._waiting:
            return None
        for message in messages:
            if self._waiting.pop(message.queue_offset, None) is not None:
                self._uncount(message.queue_offset)
        return self._next()

    def take(self, count: int) -> list[ReceivedMessage]:
        """Up to ``count`` from the front, which are then neither waiting nor finished."""
        taken: list[ReceivedMessage] = []
        while len(taken) < count and (message := self.first()) is not None:
            if (alone := message.queue_offset in self._alone) and taken:
                break
            taken.append(self._waiting.pop(message.queue_offset))
            self._taken[message.queue_offset] = message
            if alone:
                break
        return taken

    def commit(self) -> int | None:
        """All that were taken are finished; gives the offset after the last of them, None when there are none.

        Dead letters behind a message that waits again stay taken until it is finished: the offset must not pass it.
        """
        first = self.first()
        done = [offset for offset in self._taken if first is None or offset < first.queue_offset]
        if not done:
            return None
        for offset in done:
            del self._taken[offset]
            self._uncount(offset)
        self._dead.difference_update(done)
        self._alone.difference_update(done)
        return max(done) + 1

    def rollback(self) -> None:
        """All that were taken wait again, except dead letters: a broker has them."""
        self.put_back([message for offset, message in self._taken.items() if offset not in self._dead])

    def put_back(self, messages: Sequence[ReceivedMessage], alone: bool = False) -> None:
        """Those of the taken ones wait again, as they are given here: their count of attempts may have grown.

        ``alone``: each is taken without others from now on, so that others do not fail with it.
        """
        for message in sorted(messages, key=lambda m: m.queue_offset, reverse=True):
            if self._taken.pop(message.queue_offset, None) is not None:
                self._place(message)
                if alone:
                    self._alone.add(message.queue_offset)

    def bury(self, messages: Iterable[ReceivedMessage]) -> None:
        """Those of the taken ones are dead letters, and never wait again."""
        self._dead.update(message.queue_offset for message in messages if message.queue_offset in self._taken)

    def as_pulled(self, message: ReceivedMessage) -> ReceivedMessage:
        """The message with the body that it came with, for who gets it next; one that is not here as it is."""
        body = self._bodies.get(message.queue_offset, message.body)
        return message if body is message.body else replace(message, body=body)

    def replace(self, message: ReceivedMessage) -> None:
        """The message of an offset that waits is this one now."""
        if message.queue_offset in self._waiting:
            self._waiting[message.queue_offset] = message

    def __contains__(self, message: ReceivedMessage) -> bool:
        return message.queue_offset in self._waiting

    def first(self) -> ReceivedMessage | None:
        """The waiting message of the smallest offset."""
        while self._sorted and self._sorted[0] not in self._waiting:
            self._sorted.popleft()
        return self._waiting[self._sorted[0]] if self._sorted else None

    @property
    def span(self) -> int:
        """Offsets from the first to the last waiting message."""
        if self.first() is None:
            return 0
        while self._sorted[-1] not in self._waiting:
            self._sorted.pop()
        return self._sorted[-1] - self._sorted[0]

    @property
    def waiting(self) -> int:
        """How many are not taken."""
        return len(self._waiting)

    @property
    def offsets(self) -> tuple[int, int] | None:
        """The first and the last offset that waits."""
        first = self.first()
        return None if first is None else (first.queue_offset, first.queue_offset + self.span)

    def clear(self) -> None:
        """Forget all messages, as a reset of the offset does."""
        for part in (self._waiting, self._taken, self._bodies, self._dead, self._alone):
            part.clear()
        self._sorted.clear()
        self.count = self.bytes = 0
        self._max_put = None

    def _place(self, message: ReceivedMessage) -> bool:
        """Put it among the waiting ones; whether its offset was here already."""
        offset = message.queue_offset
        if offset in self._taken:
            return True
        known = offset in self._waiting
        self._waiting[offset] = message
        if not self._sorted or offset > self._sorted[-1]:
            self._sorted.append(offset)
        elif offset < self._sorted[0]:
            self._sorted.appendleft(offset)
        elif not known and offset != self._sorted[0]:  # at either end it may be there, from before it was removed
            self._sorted = deque(sorted(self._waiting))
        return known

    def _uncount(self, offset: int) -> None:
        self.count -= 1
        self.bytes -= len(self._bodies.pop(offset))

    def _next(self) -> int | None:
        first = self.first()
        if first is not None:
            return first.queue_offset
        return None if self._max_put is None else self._max_put + 1


FULL_S = 0.05
BUSY_S = 0.02
PAUSED_S = 1.0
FIRST_PULL_S = 0.5  # after a rebalance, since 5.0.0: a queue that is handed over is given up by then


@dataclass(frozen=True, slots=True)
class Thresholds:
    """Of one queue's cache. ``max_span`` None: offsets may lie as far apart as they do, for an orderly listener."""

    max_count: int = 1000
    max_bytes: int = 100 << 20
    max_span: int | None = 2000


def divided(thresholds: Thresholds, topic_count: int | None, topic_bytes: int | None, queues: int) -> Thresholds:
    """Thresholds of one of ``queues`` where those of the whole topic are given; each keeps at least 1."""
    share = max(1, queues)
    return Thresholds(
        thresholds.max_count if topic_count is None else max(1, topic_count // share),
        thresholds.max_bytes if topic_bytes is None else max(1, topic_bytes // share),
        thresholds.max_span,
    )


def full(queue: ProcessQueue, thresholds: Thresholds) -> str | None:
    """Why the queue is not pulled now; None if it is."""
    if queue.count > thresholds.max_count:
        return f"{queue.count} messages are cached, more than {thresholds.max_count}"
    if queue.bytes > thresholds.max_bytes:
        return f"{queue.bytes} bytes are cached, more than {thresholds.max_bytes}"
    if thresholds.max_span is not None and queue.span > thresholds.max_span:
        return f"cached offsets span {queue.span}, more than {thresholds.max_span}"
    return None


@dataclass(frozen=True, slots=True)
class NextPull:
    """What an answer leads to.

    ``messages`` are to be cached and consumed; ``finished`` is an offset up to which nothing is left to do, to be noted if
    nothing is cached; then the next pull, at ``offset`` in ``pause_s``. ``repair`` is instead the right offset of a queue
    whose own was not to be had: it is noted and frozen, stored, and the queue is given up, to be added again.
    """

    offset: int
    pause_s: float = 0.0
    messages: Sequence[ReceivedMessage] = ()
    finished: int | None = None
    repair: int | None = None


def next_pull(offset: int, answer: PullAnswer | RocketMQError, interval_s: float, error_s: float) -> NextPull:
    """What ``answer`` to the pull at ``offset`` leads to; pauses are ``pullInterval`` and the one after errors."""
    if isinstance(answer, RocketMQError):
        return NextPull(offset, BUSY_S if answer.broker_code == Response.FLOW_CONTROL else error_s)
    if answer.status is PullStatus.OFFSET_ILLEGAL:
        return NextPull(offset, repair=answer.next_offset)
    if answer.status is not PullStatus.FOUND:
        return NextPull(answer.next_offset, finished=answer.next_offset)
    if not answer.messages:  # a tag's hash matched, its text did not
        return NextPull(answer.next_offset, finished=answer.next_offset)
    return NextPull(answer.next_offset, interval_s, answer.messages)
