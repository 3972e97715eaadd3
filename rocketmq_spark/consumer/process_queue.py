"""The process queue: pulled, unfinished messages of one queue (Java's ``ProcessQueue``), and when to pull the queue again.

Messages are sorted by queue offset. Removing finished messages returns the offset that may be committed: all messages before
this offset are finished. An ordered consumer takes messages from the front, and then commits them or puts them back.

If the listener gets record batches, ``rows.RowsQueue`` does the same: its items are ``Rows``, one for each call.

This module is pure: the caller holds a lock, passes the time, and acts on the result.

Pulls mirror ``DefaultMQPushConsumerImpl.pullMessage`` and its callback. Pulls do not wait for listeners, but limits on the
cached messages (``Thresholds``) delay the pulls of a slow listener.
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

LOCK_LEASE_MS = 30_000  # the client renews a lock within this time; on the broker, a lock lasts 60 s


class QueueLock:
    """The lock that a broker granted to this member for one queue.

    Times are those of ``Timer.lease_ms``, which includes time in which this machine sleeps. Brokers keep locks in memory. A
    broker that restarts may grant a lock to another member, so a lock is valid only while the connection on which it was
    granted stays open.
    """

    def __init__(self) -> None:
        self.requested_ms: int | None = None  # when the last granted lock was requested
        self._connection: object = None
        self._is_lost = False

    def grant(self, requested_ms: int, connection: object) -> None:
        """Record a lock that was requested at ``requested_ms``. The broker's lease did not begin before ``requested_ms``."""
        self.requested_ms, self._connection, self._is_lost = requested_ms, connection, False

    def mark_lost(self) -> None:
        """Record that the broker refused the lock."""
        self._is_lost = True

    def is_held(self, now_ms: int, connection: object) -> bool:
        """Whether this member certainly has the lock. ``connection`` is the current connection to the broker, or None."""
        if self.requested_ms is None or self._is_lost or connection is None or connection != self._connection:
            return False
        return now_ms - self.requested_ms <= LOCK_LEASE_MS


def with_next_attempt(message: ReceivedMessage, added_attempts: int = 1) -> ReceivedMessage:
    """Return the message with a higher number of attempts, for redeliveries that the broker does not count.

    The result is clamped, because a sender can store any number, such as a negative or the largest possible number.
    """
    return replace(message, reconsume_times=min(max(0, message.reconsume_times) + added_attempts, MAX_INT))


def in_batches(messages: Sequence[ReceivedMessage], size: int) -> Iterator[tuple[ReceivedMessage, ...]]:
    """Return consecutive batches of at most ``size`` messages, as tuples, because listeners must not change a batch.

    Several threads may take batches from the iterator at the same time. (A generator would raise ``ValueError`` if two threads
    called it.) The iterator returns each batch once, and keeps no reference to a returned batch.
    """
    if size > 1:
        batches = deque([tuple(messages[start : start + size]) for start in range(0, len(messages), size)])
        return map(operator.call, repeat(batches.popleft, len(batches)))
    # Each tuple is created when a thread takes it, because each run of the garbage collector would traverse all waiting tuples.
    remaining_messages = deque(messages)

    def next_message(_: int) -> tuple[ReceivedMessage]:
        return (remaining_messages.popleft(),)

    return map(next_message, range(len(remaining_messages)))


class MessageCache:
    """Items of one queue, sorted by offset. An item is a message or ``Rows``. An item is waiting, taken by a call, or finished.

    Most offsets arrive in order, so the sorted offsets are kept in a deque. A removed offset stays in the deque until it
    reaches an end.
    """

    def __init__(self) -> None:
        self.count = 0  # how many messages, or rows, are cached
        self.bytes = 0  # how many bytes they have
        self._waiting_items: dict[int, Any] = {}  # messages, or ``Rows``
        self._taken_items: dict[int, Any] = {}  # items of running calls, and consumed items that are not committed
        self._bodies: dict[int, bytes] = {}  # the pulled bodies, because a listener may change its message
        self._dead_letter_offsets: set[int] = set()  # offsets of taken messages that are dead letters
        self._single_call_offsets: set[int] = set()  # offsets of messages that get calls without other messages
        self._sorted_offsets: deque[int] = deque()  # offsets of the waiting items, and of some removed items
        self._end_of_last_put: int | None = None  # the offset after the message that was put last

    def put(self, messages: Iterable[Any]) -> int:
        """Add pulled messages; returns how many are new. If a message with the same offset is already waiting, the
        new message replaces it.
        """
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
        """Remove finished messages; returns the offset to commit, which is never beyond an unfinished message.

        Returns None if no message was waiting.
        """
        waiting_items = self._waiting_items
        if not waiting_items:
            return None
        for message in messages:
            offset = message.queue_offset
            if waiting_items.pop(offset, None) is not None:
                self._subtract(offset)
        return self._next_offset()

    def take(self, count: int) -> Sequence[ReceivedMessage]:
        """Take up to ``count`` messages from the front, for one call."""
        taken_messages: list[ReceivedMessage] = []
        while len(taken_messages) < count and (message := self.first_item()) is not None:
            if (is_single_call := message.queue_offset in self._single_call_offsets) and taken_messages:
                break
            taken_messages.append(self._waiting_items.pop(message.queue_offset))
            self._taken_items[message.queue_offset] = message
            if is_single_call:
                break
        return tuple(taken_messages)

    def commit(self) -> int | None:
        """Finish all taken messages; returns the offset after the last of them, or None if no message was taken.

        A dead letter stays taken while a message before it waits for a retry, because the offset must not pass that message.
        """
        first_message = self.first_item()
        committed_offsets = [
            offset for offset in self._taken_items if first_message is None or offset < first_message.queue_offset
        ]
        if not committed_offsets:
            return None
        end_offset = self._end_offset(self._taken_items[max(committed_offsets)])
        for offset in committed_offsets:
            del self._taken_items[offset]
            self._subtract(offset)
        self._dead_letter_offsets.difference_update(committed_offsets)
        self._single_call_offsets.difference_update(committed_offsets)
        return end_offset

    def rollback(self) -> None:
        """Put all taken messages back, except dead letters, which a broker has stored."""
        self.put_back(
            [message for offset, message in self._taken_items.items() if offset not in self._dead_letter_offsets]
        )

    def put_back(self, messages: Sequence[Any], one_by_one: bool = False) -> None:
        """Put these taken messages back, with their new number of attempts.

        With ``one_by_one``, each of these messages gets a call of its own from now on, so that it does not make other messages
        fail.
        """
        for message in sorted(messages, key=lambda m: m.queue_offset, reverse=True):
            if self._taken_items.pop(message.queue_offset, None) is not None:
                self._insert(message)
                if one_by_one:
                    self._single_call_offsets.add(message.queue_offset)

    def mark_dead_letters(self, messages: Sequence[ReceivedMessage]) -> None:
        """Mark these taken messages as dead letters, which are not put back."""
        self._dead_letter_offsets.update(
            message.queue_offset for message in messages if message.queue_offset in self._taken_items
        )

    def with_original_body(self, message: ReceivedMessage) -> ReceivedMessage:
        """Return the message with its pulled body, for its next delivery. A message that is not cached is returned
        unchanged.
        """
        body = self._bodies.get(message.queue_offset, message.body)
        return message if body is message.body else replace(message, body=body)

    def replace(self, message: ReceivedMessage) -> None:
        """Replace the waiting message with the same offset, if there is one."""
        if message.queue_offset in self._waiting_items:
            self._waiting_items[message.queue_offset] = message

    def __contains__(self, message: ReceivedMessage) -> bool:
        return message.queue_offset in self._waiting_items

    def first_item(self) -> Any:
        """Return the waiting item with the smallest offset; None if no item waits."""
        while self._sorted_offsets and self._sorted_offsets[0] not in self._waiting_items:
            self._sorted_offsets.popleft()
        return self._waiting_items[self._sorted_offsets[0]] if self._sorted_offsets else None

    @property
    def span(self) -> int:
        """The difference between the offsets of the first and the last waiting message."""
        if self.first_item() is None:
            return 0
        while self._sorted_offsets[-1] not in self._waiting_items:
            self._sorted_offsets.pop()
        return self._end_offset(self._waiting_items[self._sorted_offsets[-1]]) - 1 - self._sorted_offsets[0]

    @property
    def waiting_count(self) -> int:
        """The number of messages that are not taken."""
        return len(self._waiting_items)

    @property
    def offsets(self) -> tuple[int, int] | None:
        """The first and the last waiting offset."""
        first_message = self.first_item()
        return None if first_message is None else (first_message.queue_offset, first_message.queue_offset + self.span)

    def clear(self) -> None:
        """Remove all messages, for a reset of the offset."""
        for collection in (
            self._waiting_items,
            self._taken_items,
            self._bodies,
            self._dead_letter_offsets,
            self._single_call_offsets,
        ):
            collection.clear()
        self._sorted_offsets.clear()
        self.count = self.bytes = 0
        self._end_of_last_put = None

    def _insert(self, message: Any) -> bool:
        """Add a waiting message; returns whether its offset was present already."""
        offset = message.queue_offset
        if offset in self._taken_items:
            return True
        is_present = offset in self._waiting_items
        self._waiting_items[offset] = message
        if not self._sorted_offsets or offset > self._sorted_offsets[-1]:
            self._sorted_offsets.append(offset)
        elif offset < self._sorted_offsets[0]:
            self._sorted_offsets.appendleft(offset)
        elif not is_present and offset != self._sorted_offsets[0]:
            # If a removed offset is still at an end of the deque, the offset needs no second entry.
            self._sorted_offsets = deque(sorted(self._waiting_items))
        return is_present

    def _subtract(self, offset: int) -> None:
        self.count -= 1
        self.bytes -= len(self._bodies.pop(offset))

    def _next_offset(self) -> int | None:
        return self._end_of_last_put if self.first_item() is None else self._sorted_offsets[0]

    def _end_offset(self, message: Any) -> int:
        """Return the offset after a message, or after the last message of ``Rows``."""
        end_offset: int = message.queue_offset + 1
        return end_offset


class ProcessQueue(MessageCache):
    """The unfinished messages of ``queue``, with methods that apply a listener's results to the messages.

    A ``dropped`` queue is not pulled, and no listener gets messages of it. If an ordered listener still has messages of the
    queue, the queue stays locked until the listener's call ends. The result of the call may still advance the offset, unless
    the queue is ``released`` earlier. The result of a concurrent call has no effect, because the queue of such a call is
    released at once.
    """

    def __init__(self, queue: MessageQueue, now_ms: int = 0) -> None:
        super().__init__()
        self.queue = queue
        self.dropped = False
        self.released = False
        self.dropped_ms = 0  # when the queue was dropped, by ``Timer.lease_ms``
        self.last_pull_ms = now_ms
        self.end_updated_ms = now_ms  # when a broker last reported the end offset
        self.last_consume_ms = now_ms
        self.lock = QueueLock()

    def drop(self, now_ms: int) -> None:
        """Pass no more messages to a listener. The first call sets ``dropped_ms`` to ``now_ms``, a time of
        ``Timer.lease_ms``.
        """
        if not self.dropped:
            self.dropped, self.dropped_ms = True, now_ms

    def message_count(self, messages: Sequence[Any]) -> int:
        """Return the number of messages, or rows, in an argument of ``put``."""
        return len(messages)

    def split_into_calls(self, messages: Sequence[Any], size: int) -> tuple[Iterator[Sequence[ReceivedMessage]], int]:
        """Return batches of at most ``size`` messages for the calls of a concurrent listener, and the number of batches."""
        return in_batches(messages, size), -(-len(messages) // size)

    def requeue(
        self, call_messages: Sequence[ReceivedMessage], failed_messages: Sequence[ReceivedMessage]
    ) -> Sequence[Any]:
        """Put the failed messages of a call back for one more attempt; returns the argument of ``submit`` for this attempt."""
        retried_messages = [with_next_attempt(self.with_original_body(message)) for message in failed_messages]
        for message in retried_messages:
            self.replace(message)
        return retried_messages

    def late_messages(self, call_messages: Sequence[ReceivedMessage]) -> Sequence[ReceivedMessage]:
        """Return the messages of a call that keep the offset from advancing: the first waiting message, if the call has it."""
        first_message = self.first_item()
        return (
            (first_message,)
            if first_message is not None and any(message is first_message for message in call_messages)
            else ()
        )

    def finish_late_messages(
        self, late_messages: Sequence[ReceivedMessage], unsent_messages: Sequence[ReceivedMessage]
    ) -> None:
        """Finish the ``late_messages`` that are not among the ``unsent_messages``."""
        self.remove([message for message in late_messages if message not in unsent_messages])

    def messages_still_cached(
        self, call_messages: Sequence[ReceivedMessage], messages: Sequence[ReceivedMessage]
    ) -> list[ReceivedMessage]:
        """Return the ``messages`` of a call that are still cached. The other messages were late, and were sent back."""
        return [message for message in messages if message in self]

    def put_back_for_retry(self, messages: Sequence[ReceivedMessage], one_by_one: bool) -> None:
        """Put back messages of a failed call, for one more attempt. ``one_by_one`` is as in ``put_back``."""
        self.put_back([with_next_attempt(self.with_original_body(message)) for message in messages], one_by_one)


FULL_CACHE_PAUSE_S = 0.05  # the pause before the next check of a full cache
BUSY_BROKER_PAUSE_S = 0.02  # the pause before the next pull from a broker that is busy
FIRST_PULL_DELAY_S = 0.5  # gives the previous owner time to release the queue, as in Java since 5.0.0


@dataclass(frozen=True, slots=True)
class Thresholds:
    """Limits on the cached messages of one queue. Without ``max_span`` (ordered listeners), the span of offsets has no limit."""

    max_count: int = 1000
    max_bytes: int = 100 << 20
    max_span: int | None = 2000


def divide_thresholds(
    thresholds: Thresholds, topic_max_count: int | None, topic_max_bytes: int | None, queue_count: int
) -> Thresholds:
    """Divide the thresholds of a topic by its number of queues. Each divided threshold is at least 1."""
    divisor = max(1, queue_count)
    return Thresholds(
        thresholds.max_count if topic_max_count is None else max(1, topic_max_count // divisor),
        thresholds.max_bytes if topic_max_bytes is None else max(1, topic_max_bytes // divisor),
        thresholds.max_span,
    )


def pause_reason(queue: ProcessQueue, thresholds: Thresholds) -> str | None:
    """Return why the cache of the queue is full, as text; None if the queue may be pulled."""
    if queue.count > thresholds.max_count:
        return f"{queue.count} messages are cached, more than {thresholds.max_count}"
    if queue.bytes > thresholds.max_bytes:
        return f"{queue.bytes} bytes are cached, more than {thresholds.max_bytes}"
    if thresholds.max_span is not None and queue.span > thresholds.max_span:
        return f"cached offsets span {queue.span}, more than {thresholds.max_span}"
    return None


@dataclass(frozen=True, slots=True)
class PullDecision:
    """What to do after the answer to a pull.

    Attributes:
        offset: The offset of the next pull.
        pause_s: Seconds until the next pull.
        messages: The messages to cache and consume.
        finished_offset: All messages before this offset are finished, if the cache is empty.
        corrected_offset: The offset to commit if the broker has no message at the requested offset. The other attributes are
            then ignored, the queue is released, and a rebalance adds the queue again.
    """

    offset: int
    pause_s: float = 0.0
    messages: Sequence[ReceivedMessage] = ()
    finished_offset: int | None = None
    corrected_offset: int | None = None


def decide_next_pull(
    offset: int, answer: PullAnswer | RocketMQError, interval_s: float, error_pause_s: float
) -> PullDecision:
    """Decide what to do after the ``answer`` to the pull at ``offset``.

    The options set the pauses ``interval_s`` and ``error_pause_s``.
    """
    if isinstance(answer, RocketMQError):
        return PullDecision(
            offset, BUSY_BROKER_PAUSE_S if answer.broker_code == Response.FLOW_CONTROL else error_pause_s
        )
    if answer.status is PullStatus.OFFSET_ILLEGAL:
        return PullDecision(offset, corrected_offset=answer.next_offset)
    if answer.status is not PullStatus.FOUND:
        return PullDecision(answer.next_offset, finished_offset=answer.next_offset)
    if not answer.messages:  # the broker compares only hashes of tags, so this client may filter out all messages
        return PullDecision(answer.next_offset, finished_offset=answer.next_offset)
    return PullDecision(answer.next_offset, interval_s, answer.messages)
