"""Pulled, unfinished messages of one queue (Java's ``ProcessQueue``), and the decision when to pull the queue again.

Messages are sorted by queue offset. Removing finished ones returns the offset up to which all are finished, which is the one
that may be committed. An orderly consumer takes messages from the front and then commits them or puts them back.

``Rows`` of a listener of record batches are kept in the same way, one item a call: ``rows.RowsQueue``.

Pure: the caller holds its lock, passes the time, and acts on the result. Offsets mostly arrive in order, so the sorted
offsets are a deque that drops removed ones only when they reach one of its ends.

Pulls mirror ``DefaultMQPushConsumerImpl.pullMessage`` and its callback. Pulling never waits for listeners: thresholds of
what is cached (``Thresholds``) delay it instead.
"""

from __future__ import annotations

import operator
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import repeat
from typing import Any

from rocketmq_spark.base.codes import MAX_INT, Response
from rocketmq_spark.errors import RocketMQError
from rocketmq_spark.model import MessageQueue, PullAnswer, PullStatus, ReceivedMessage

LOCK_EXPIRES_MS = 30_000  # the client renews within this time; the broker's lock lasts 60 s


class QueueLock:
    """The broker's lock of a queue. ``granted_ms`` is when the last granted lock was requested.

    Times are those of ``Timer.lease_ms``, which includes time in which this machine sleeps. Brokers keep locks in memory, so
    a lock counts only while the connection lasts on which it was granted: a broker that restarts may give it to another member.
    """

    def __init__(self) -> None:
        self.granted_ms: int | None = None
        self._connection: object = None
        self._lost = False

    def grant(self, requested_ms: int, connection: object) -> None:
        """Note a lock that was requested at ``asked_ms``. The broker's time began at that moment or later."""
        self.granted_ms, self._connection, self._lost = requested_ms, connection, False

    def mark_lost(self) -> None:
        """Note that the broker refused the lock."""
        self._lost = True

    def is_held(self, now_ms: int, connection: object) -> bool:
        """Whether this member certainly has the lock. ``connection`` is the one to the broker now, None if there is none."""
        if self.granted_ms is None or self._lost or connection is None or connection != self._connection:
            return False
        return now_ms - self.granted_ms <= LOCK_EXPIRES_MS


def with_next_attempt(message: ReceivedMessage, times: int = 1) -> ReceivedMessage:
    """Return the message with its number of attempts increased, for redeliveries that no broker counts.

    Its sender chose the number that is stored: it may be negative, or the largest one.
    """
    return replace(message, reconsume_times=min(max(0, message.reconsume_times) + times, MAX_INT))


def in_batches(messages: Sequence[ReceivedMessage], size: int) -> Iterator[tuple[ReceivedMessage, ...]]:
    """Return consecutive parts of at most ``size`` messages, as tuples, so that listeners cannot change them.

    Several threads may take parts at the same time, which a generator would refuse. Each part is returned once, and not held.
    """
    if size > 1:
        batches = deque([tuple(messages[start : start + size]) for start in range(0, len(messages), size)])
        return map(operator.call, repeat(batches.popleft, len(batches)))
    remaining = deque(messages)  # no tuples yet: each run of the garbage collector would look at those that wait

    def next_message(_: int) -> tuple[ReceivedMessage]:
        return (remaining.popleft(),)

    return map(next_message, range(len(remaining)))


class MessageCache:
    """Items of one queue, sorted by offset: messages, or ``Rows``. They wait, are taken, or are finished."""

    def __init__(self) -> None:
        self.count = 0
        self.bytes = 0
        self._waiting: dict[int, Any] = {}  # messages, or ``Rows``
        self._taken: dict[int, Any] = {}
        self._bodies: dict[int, bytes] = {}  # the bodies as pulled: a listener may change its message
        self._dead_letters: set[int] = set()  # taken messages that are dead letters
        self._taken_alone: set[int] = set()  # messages that are taken alone
        self._sorted_offsets: deque[int] = deque()
        self._end_of_last_put: int | None = None  # the offset after the last one that was put

    def put(self, messages: Iterable[Any]) -> int:
        """Add pulled messages; returns how many are new. A message with a known offset replaces the earlier one."""
        new_count = 0
        for message in messages:
            if not self._insert(message):
                new_count += 1
                self.count += 1
                self.bytes += len(message.body)
                self._bodies[message.queue_offset] = message.body
                self._end_of_last_put = message.queue_offset + 1
        return new_count

    def remove(self, messages: Sequence[ReceivedMessage]) -> int | None:
        """Remove finished messages; returns the offset to commit, never beyond an unfinished one. None if nothing was cached."""
        waiting = self._waiting
        if not waiting:
            return None
        for message in messages:
            offset = message.queue_offset
            if waiting.pop(offset, None) is not None:
                self._subtract(offset)
        return self._next_offset()

    def take(self, count: int) -> Sequence[ReceivedMessage]:
        """Take up to ``count`` messages from the front, for one call. They are neither waiting nor finished then."""
        taken: list[ReceivedMessage] = []
        while len(taken) < count and (message := self.first()) is not None:
            if (taken_alone := message.queue_offset in self._taken_alone) and taken:
                break
            taken.append(self._waiting.pop(message.queue_offset))
            self._taken[message.queue_offset] = message
            if taken_alone:
                break
        return tuple(taken)

    def commit(self) -> int | None:
        """Finish all taken messages; returns the offset after the last one, None if none were taken.

        Dead letters after a message that waits again stay taken until it is finished, because the offset must not pass it.
        """
        first = self.first()
        committed = [offset for offset in self._taken if first is None or offset < first.queue_offset]
        if not committed:
            return None
        end = self._end_offset(self._taken[max(committed)])
        for offset in committed:
            del self._taken[offset]
            self._subtract(offset)
        self._dead_letters.difference_update(committed)
        self._taken_alone.difference_update(committed)
        return end

    def rollback(self) -> None:
        """Put all taken messages back, except dead letters, which a broker has."""
        self.put_back([message for offset, message in self._taken.items() if offset not in self._dead_letters])

    def put_back(self, messages: Sequence[Any], one_by_one: bool = False) -> None:
        """Put these taken messages back, with their new number of attempts.

        ``alone``: each is taken alone from now on, so that it does not make others fail.
        """
        for message in sorted(messages, key=lambda m: m.queue_offset, reverse=True):
            if self._taken.pop(message.queue_offset, None) is not None:
                self._insert(message)
                if one_by_one:
                    self._taken_alone.add(message.queue_offset)

    def mark_dead_letters(self, messages: Sequence[ReceivedMessage]) -> None:
        """Mark these taken messages as dead letters, which are not put back."""
        self._dead_letters.update(message.queue_offset for message in messages if message.queue_offset in self._taken)

    def with_original_body(self, message: ReceivedMessage) -> ReceivedMessage:
        """Return the message with its pulled body, for its next delivery; unchanged if it is not cached."""
        body = self._bodies.get(message.queue_offset, message.body)
        return message if body is message.body else replace(message, body=body)

    def replace(self, message: ReceivedMessage) -> None:
        """Replace the waiting message of an offset."""
        if message.queue_offset in self._waiting:
            self._waiting[message.queue_offset] = message

    def __contains__(self, message: ReceivedMessage) -> bool:
        return message.queue_offset in self._waiting

    def first(self) -> Any:
        """Return the waiting message, or ``Rows``, with the smallest offset; None if nothing waits."""
        while self._sorted_offsets and self._sorted_offsets[0] not in self._waiting:
            self._sorted_offsets.popleft()
        return self._waiting[self._sorted_offsets[0]] if self._sorted_offsets else None

    @property
    def span(self) -> int:
        """Offsets from the first to the last waiting message."""
        if self.first() is None:
            return 0
        while self._sorted_offsets[-1] not in self._waiting:
            self._sorted_offsets.pop()
        return self._end_offset(self._waiting[self._sorted_offsets[-1]]) - 1 - self._sorted_offsets[0]

    @property
    def waiting(self) -> int:
        """The number of messages that are not taken."""
        return len(self._waiting)

    @property
    def offsets(self) -> tuple[int, int] | None:
        """The first and the last waiting offset."""
        first = self.first()
        return None if first is None else (first.queue_offset, first.queue_offset + self.span)

    def clear(self) -> None:
        """Forget all messages, as a reset of the offset does."""
        for collection in (self._waiting, self._taken, self._bodies, self._dead_letters, self._taken_alone):
            collection.clear()
        self._sorted_offsets.clear()
        self.count = self.bytes = 0
        self._end_of_last_put = None

    def _insert(self, message: Any) -> bool:
        """Add a waiting message; returns whether its offset was present already."""
        offset = message.queue_offset
        if offset in self._taken:
            return True
        is_present = offset in self._waiting
        self._waiting[offset] = message
        if not self._sorted_offsets or offset > self._sorted_offsets[-1]:
            self._sorted_offsets.append(offset)
        elif offset < self._sorted_offsets[0]:
            self._sorted_offsets.appendleft(offset)
        elif (
            not is_present and offset != self._sorted_offsets[0]
        ):  # at either end it may be there, from before it was removed
            self._sorted_offsets = deque(sorted(self._waiting))
        return is_present

    def _subtract(self, offset: int) -> None:
        self.count -= 1
        self.bytes -= len(self._bodies.pop(offset))

    def _next_offset(self) -> int | None:
        return self._end_of_last_put if self.first() is None else self._sorted_offsets[0]

    def _end_offset(self, message: Any) -> int:
        """The offset after a message, or after the last one of ``Rows``."""
        end: int = message.queue_offset + 1
        return end


class ProcessQueue(MessageCache):
    """The unfinished messages of ``queue``, and what becomes of those of a listener's call.

    A ``dropped`` queue is neither pulled nor passed to a listener. It is locked until the call of an ordered listener that has
    messages of it ends, so that call still moves the offset, unless the queue was ``released`` before. Concurrent calls do not:
    their queue is released at once.
    """

    def __init__(self, queue: MessageQueue, now_ms: int = 0) -> None:
        super().__init__()
        self.queue = queue
        self.dropped = False
        self.released = False
        self.dropped_ms = 0  # by the clock of leases
        self.last_pull_ms = now_ms
        self.end_updated_ms = now_ms  # when a broker said at last where it ends
        self.last_consume_ms = now_ms
        self.lock = QueueLock()

    def drop(self, now_ms: int) -> None:
        """Pass no more messages to a listener. Times are those of ``Timer.lease_ms``; the first one counts."""
        if not self.dropped:
            self.dropped, self.dropped_ms = True, now_ms

    def message_count(self, messages: Sequence[Any]) -> int:
        """The number of messages in what ``put`` takes."""
        return len(messages)

    def split_into_calls(self, messages: Sequence[Any], size: int) -> tuple[Iterator[Sequence[ReceivedMessage]], int]:
        """Return the calls of a concurrent listener that gets at most ``size`` messages in each, and their number."""
        return in_batches(messages, size), -(-len(messages) // size)

    def requeue(self, call: Sequence[ReceivedMessage], failed: Sequence[ReceivedMessage]) -> Sequence[Any]:
        """Let ``left``, of the messages of a call, wait for one more attempt; returns what the listener is called with."""
        retried = [with_next_attempt(self.with_original_body(message)) for message in failed]
        for message in retried:
            self.replace(message)
        return retried

    def late_messages(self, call: Sequence[ReceivedMessage]) -> Sequence[ReceivedMessage]:
        """The messages of a call that hold up the offset: the first one, if the call has it."""
        first = self.first()
        return (first,) if first is not None and any(message is first for message in call) else ()

    def finish_late(self, late: Sequence[ReceivedMessage], unsent: Sequence[ReceivedMessage]) -> None:
        """Of the ``late`` messages only ``left`` are unfinished."""
        self.remove([message for message in late if message not in unsent])

    def still_cached(
        self, call: Sequence[ReceivedMessage], messages: Sequence[ReceivedMessage]
    ) -> list[ReceivedMessage]:
        """Those of ``messages``, of a call, that still wait: the others were late, and a broker has them."""
        return [message for message in messages if message in self]

    def put_back_for_retry(self, messages: Sequence[ReceivedMessage], one_by_one: bool) -> None:
        """Put back messages of a call that failed, for one more attempt; ``alone`` as in ``put_back``."""
        self.put_back([with_next_attempt(self.with_original_body(message)) for message in messages], one_by_one)


FULL_PAUSE_S = 0.05
BUSY_PAUSE_S = 0.02
PAUSED_S = 1.0
FIRST_PULL_DELAY_S = 0.5  # after a rebalance, as since 5.0.0: the previous owner has released the queue by then


@dataclass(frozen=True, slots=True)
class Thresholds:
    """Limits of one queue's cache. ``max_span`` None, for an orderly listener: no limit of the span of offsets."""

    max_count: int = 1000
    max_bytes: int = 100 << 20
    max_span: int | None = 2000


def divide_thresholds(
    thresholds: Thresholds, topic_count: int | None, topic_bytes: int | None, queues: int
) -> Thresholds:
    """Divide the thresholds of a topic by its number of ``queues``; at least 1 each."""
    divisor = max(1, queues)
    return Thresholds(
        thresholds.max_count if topic_count is None else max(1, topic_count // divisor),
        thresholds.max_bytes if topic_bytes is None else max(1, topic_bytes // divisor),
        thresholds.max_span,
    )


def pause_reason(queue: ProcessQueue, thresholds: Thresholds) -> str | None:
    """Return why the queue is not pulled now; None if it is."""
    if queue.count > thresholds.max_count:
        return f"{queue.count} messages are cached, more than {thresholds.max_count}"
    if queue.bytes > thresholds.max_bytes:
        return f"{queue.bytes} bytes are cached, more than {thresholds.max_bytes}"
    if thresholds.max_span is not None and queue.span > thresholds.max_span:
        return f"cached offsets span {queue.span}, more than {thresholds.max_span}"
    return None


@dataclass(frozen=True, slots=True)
class PullDecision:
    """What follows from an answer.

    ``messages`` are cached and consumed. ``finished`` is an offset before which nothing is left to do; it is noted if nothing
    is cached. The next pull is at ``offset`` in ``pause_s`` seconds. ``repair`` is set instead if the offset was illegal: the
    new offset, which is committed; the queue is released, and a rebalance adds it again.
    """

    offset: int
    pause_s: float = 0.0
    messages: Sequence[ReceivedMessage] = ()
    finished_offset: int | None = None
    corrected_offset: int | None = None


def decide_next_pull(
    offset: int, answer: PullAnswer | RocketMQError, interval_s: float, error_s: float
) -> PullDecision:
    """Decide what follows from the ``answer`` to the pull at ``offset``. Pauses are ``pullInterval`` and the one after errors."""
    if isinstance(answer, RocketMQError):
        return PullDecision(offset, BUSY_PAUSE_S if answer.broker_code == Response.FLOW_CONTROL else error_s)
    if answer.status is PullStatus.OFFSET_ILLEGAL:
        return PullDecision(offset, corrected_offset=answer.next_offset)
    if answer.status is not PullStatus.FOUND:
        return PullDecision(answer.next_offset, finished_offset=answer.next_offset)
    if not answer.messages:  # a tag's hash matched, its text did not
        return PullDecision(answer.next_offset, finished_offset=answer.next_offset)
    return PullDecision(answer.next_offset, interval_s, answer.messages)
