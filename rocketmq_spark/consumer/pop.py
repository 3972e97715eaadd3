"""A started consumer of a Proxy's messages (POP): the member has no queues, and the Proxy delivers each message to one member.

``RunningPopConsumer`` connects the parts and their timers:

- ``Pollers`` has one thread for each broker of each topic. The thread waits until there is room for messages, and then requests
  messages from the Proxy, which holds the request until a message arrives.
- ``StandardConsumeService`` and ``FifoConsumeService`` pass the messages to the listener, one in each call: in any order, or in
  the order of each message group. Both classes mirror the classes of the same names in RocketMQ's Java client for gRPC.
- ``UnackedMessages`` has the state of the messages, guarded by one lock, and sends no requests.
- ``Acknowledger`` acknowledges messages, makes them visible again, or extends their invisible time. If a request fails, no
  message is lost: the Proxy delivers the message again when its invisible time is over.
"""

from __future__ import annotations

import itertools
import logging
import threading
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Protocol

from rocketmq_spark.base.clock import Deadline
from rocketmq_spark.base.codes import DELAY_LEVELS
from rocketmq_spark.base.complaints import LogThrottle
from rocketmq_spark.base.threads import Failure, Timer, TracebackLimit, capture, start_thread
from rocketmq_spark.consumer.figures import ConsumerFigures
from rocketmq_spark.consumer.listener import (
    AcknowledgingContext,
    Context,
    Listener,
    OrderedAction,
    judge_concurrent_outcome,
    judge_ordered_outcome,
)
from rocketmq_spark.consumer.listener_pool import ListenerPool
from rocketmq_spark.consumer.settings import MAX_WAIT_S, ConsumerSettings, Subscriptions
from rocketmq_spark.consumer.tools import CLOSE_TIMEOUT_S, STATS_INTERVAL_S, TIMEOUT_S, ConsumerTools
from rocketmq_spark.errors import ClosedError, NotFound, OptionError, RocketMQError
from rocketmq_spark.model.membership import ConsumerStats, TopicFigures
from rocketmq_spark.model.message import GroupPolicy, PoppedMessage, PopTarget, estimated_popped_memory
from rocketmq_spark.options.parsing import positive_duration
from rocketmq_spark.ports import PopMember
from rocketmq_spark.wire.names import dlq_topic

logger = logging.getLogger(__name__)


@dataclass(eq=False, slots=True)
class InvisibleMessage:
    """A message that is invisible to other members. ``Acknowledger`` extends the invisible time until the message is settled."""

    message: PoppedMessage
    invisible_until_ms: int  # when the message becomes visible again
    held_since_ms: int  # when the message arrived, or when the running call of the listener started
    ordering_key: tuple[str, Hashable]  # the topic, and the key of the message in ``UnackedMessages``
    body: bytes  # the original body, because a listener may change the message
    memory_bytes: int  # about how much memory the message uses
    listener_thread: int | None = None  # the id of the thread whose listener has the message
    was_delivered: bool = False  # whether the listener has received the message at least once
    is_settled: bool = False  # whether the request to acknowledge, send back or forward the message has ended
    # The lock allows one request at a time, because each request invalidates the receipt that other requests use.
    request_lock: threading.Lock = field(default_factory=threading.Lock)


# The most memory for messages of one topic that wait for a listener. Beyond this limit, messages are dropped if they wait for a
# retry, or wait until another message of their key is done. So a few large messages cannot stop the other queues.
MAX_WAITING_BYTES = 256 << 20


def unique_key(message: PoppedMessage) -> Hashable:
    """Return a key that only this message has, for consumers without an order."""
    return id(message)


def ordering_key_of(message: PoppedMessage) -> Hashable:
    """Return the key of a message: its message group, or its queue if the message has no group. Messages of one key keep their
    order.
    """
    return message.queue if message.message_group is None else (message.topic, message.message_group)


class UnackedMessages:
    """The unacknowledged messages of one consumer. Times are those of ``Timer.lease_ms``, which advances while the machine
    sleeps.

    The listener gets messages with the same ordering key one after the other.
    """

    def __init__(self, ordering_key_of: Callable[[PoppedMessage], Hashable] = unique_key) -> None:
        self._ordering_key_of = ordering_key_of
        self._lock = threading.Lock()
        self._condition = threading.Condition(self._lock)
        self._messages: dict[int, InvisibleMessage] = {}  # the messages by identity, in the order of arrival
        # How many messages each topic and key has, and how many of them were delivered to the listener. The counts are updated
        # at each change, because every poller reads the counts before each request.
        self._count_by_key: defaultdict[str, Counter[Hashable]] = defaultdict(Counter)
        self._delivered_count_by_key: defaultdict[str, Counter[Hashable]] = defaultdict(Counter)
        self._waiting_bytes: Counter[str] = Counter()  # by topic: the bytes of the messages that no listener has
        # Keys whose waiting messages were dropped to save memory while the listener had a message of the key. Until the
        # listener's call ends, new messages of the key are not accepted, because the Proxy delivers all messages of the key
        # again, in their order.
        self._dropped_keys: set[tuple[str, Hashable]] = set()
        self._counts: Counter[str] = Counter()  # since the start, of "consumed", "failed" and "sent back"
        self._figures = ConsumerFigures()

    def add(
        self, topic: str, messages: Sequence[PoppedMessage], invisible_until_ms: int, now_ms: int
    ) -> list[InvisibleMessage]:
        """Add messages that arrived now. Returns the added messages; messages whose key was dropped are left out."""
        new_messages = [
            InvisibleMessage(
                message,
                invisible_until_ms,
                now_ms,
                (message.topic, self._ordering_key_of(message)),
                message.body,
                estimated_popped_memory(message),
            )
            for message in messages
        ]
        with self._lock:
            self._figures.record_pull(topic, len(messages), None, now_ms)
            new_messages = [message for message in new_messages if message.ordering_key not in self._dropped_keys]
            for invisible_message in new_messages:
                self._messages[id(invisible_message)] = invisible_message
                _add_count(self._count_by_key, invisible_message.ordering_key)
                self._waiting_bytes[invisible_message.ordering_key[0]] += invisible_message.memory_bytes
        return new_messages

    def start_call(self, invisible_message: InvisibleMessage, now_ms: int) -> bool:
        """Record that this thread passes the message to the listener.

        Returns False if the message was dropped, or if its invisible time is over: another member may then have the message,
        and the listener must not get it.
        """
        with self._lock:
            if id(invisible_message) not in self._messages or now_ms >= invisible_message.invisible_until_ms:
                self._remove_locked(invisible_message)
                return False
            self._waiting_bytes[invisible_message.ordering_key[0]] -= invisible_message.memory_bytes
            invisible_message.listener_thread, invisible_message.held_since_ms = threading.get_ident(), now_ms
            if not invisible_message.was_delivered:
                invisible_message.was_delivered = True
                _add_count(self._delivered_count_by_key, invisible_message.ordering_key)
                self._condition.notify_all()
            return True

    def record_outcome(self, invisible_message: InvisibleMessage, is_done: bool, now_ms: int) -> None:
        """Record the outcome of the listener call."""
        with self._lock:
            self._counts["consumed" if is_done else "failed"] += 1
            self._figures.record_call(
                invisible_message.message.topic,
                int(is_done),
                int(not is_done),
                now_ms - invisible_message.held_since_ms,
                now_ms,
            )

    def requeue(self, invisible_message: InvisibleMessage, now_ms: int) -> None:
        """Take the message back from the listener for a retry, with its original body."""
        with self._lock:
            invisible_message.message.body = invisible_message.body
            invisible_message.listener_thread, invisible_message.held_since_ms = None, now_ms
            self._waiting_bytes[invisible_message.ordering_key[0]] += invisible_message.memory_bytes

    def remove(self, invisible_message: InvisibleMessage, sent_back: bool = False) -> None:
        """Remove the message. ``sent_back`` means that the Proxy delivers the message again later."""
        with self._lock:
            self._counts["sent back"] += sent_back
            self._remove_locked(invisible_message)

    def all_messages(self) -> list[InvisibleMessage]:
        with self._lock:
            return list(self._messages.values())

    def wait_for_room(self, topic: str, max_waiting_count: int, wait_s: float) -> bool:
        """Wait until fewer than ``max_waiting_count`` messages of a topic are ready; returns False after the timeout.

        Messages that wait for a retry, or for another message of their key, do not count as ready. Otherwise, a message that
        hangs or fails would block other keys. If the waiting messages need more than ``MAX_WAITING_BYTES``, the keys with the
        most bytes are dropped, and the Proxy delivers their messages again when their invisible time is over.
        """
        with self._lock:
            return self._condition.wait_for(
                lambda: self._waiting_count(topic) < max_waiting_count and self._make_room_locked(topic), wait_s
            )

    def _make_room_locked(self, topic: str) -> bool:
        if self._waiting_bytes[topic] < MAX_WAITING_BYTES:
            return True
        droppable_messages_by_key: defaultdict[tuple[str, Hashable], list[InvisibleMessage]] = defaultdict(list)
        for invisible_message in self._messages.values():
            if (
                invisible_message.listener_thread is None
                and invisible_message.ordering_key[0] == topic
                and invisible_message.ordering_key[1] in self._delivered_count_by_key.get(topic, ())
            ):
                droppable_messages_by_key[invisible_message.ordering_key].append(invisible_message)
        for key in sorted(
            droppable_messages_by_key,
            key=lambda key: sum(invisible_message.memory_bytes for invisible_message in droppable_messages_by_key[key]),
            reverse=True,
        ):
            if self._waiting_bytes[topic] < MAX_WAITING_BYTES:
                break
            logger.warning(
                "dropped %d waiting messages of topic %s to free memory: the Proxy delivers them again",
                len(droppable_messages_by_key[key]),
                topic,
            )
            self._dropped_keys.add(key)
            for invisible_message in droppable_messages_by_key[key]:
                self._remove_locked(invisible_message)
                invisible_message.message, invisible_message.body = (
                    replace(invisible_message.message, body=b"", properties={}),
                    b"",
                )
        return self._waiting_bytes[topic] < MAX_WAITING_BYTES

    def wait_until_settled(self, deadline: Deadline) -> list[PoppedMessage]:
        """Wait until all messages are settled, and return the messages that listeners still have after the timeout.

        If a listener calls this method, the method waits only for the other running calls. Messages that wait for the message
        of this listener cannot be consumed before the listener returns.
        """
        this_thread_id = threading.get_ident()
        with self._lock:
            ignored_thread_ids = (
                {this_thread_id, None}
                if any(
                    invisible_message.listener_thread == this_thread_id for invisible_message in self._messages.values()
                )
                else set()
            )
            self._condition.wait_for(
                lambda: all(
                    invisible_message.listener_thread in ignored_thread_ids
                    for invisible_message in self._messages.values()
                ),
                max(0.0, deadline.remaining()),
            )
            return [
                invisible_message.message
                for invisible_message in self._messages.values()
                if invisible_message.listener_thread is not None
            ]

    def stats(self) -> ConsumerStats:
        with self._lock:
            counts = self._counts
            return ConsumerStats(counts["consumed"], counts["failed"], counts["sent back"], len(self._messages))

    def figures(self, topics: Iterable[str], now_ms: int) -> dict[str, TopicFigures]:
        """Return the recent figures of each topic."""
        with self._lock:
            return self._figures.figures_of_topics(topics, now_ms)

    def _waiting_count(self, topic: str) -> int:
        return len(self._count_by_key.get(topic, ())) - len(self._delivered_count_by_key.get(topic, ()))

    def _remove_locked(self, invisible_message: InvisibleMessage) -> None:
        if self._messages.pop(id(invisible_message), None) is None:
            return
        _add_count(self._count_by_key, invisible_message.ordering_key, -1)
        if invisible_message.ordering_key[1] not in self._count_by_key.get(invisible_message.ordering_key[0], ()):
            self._dropped_keys.discard(invisible_message.ordering_key)
        if invisible_message.listener_thread is None:
            self._waiting_bytes[invisible_message.ordering_key[0]] -= invisible_message.memory_bytes
        if invisible_message.was_delivered:
            _add_count(self._delivered_count_by_key, invisible_message.ordering_key, -1)
        self._condition.notify_all()


def _add_count(counts: defaultdict[str, Counter[Hashable]], key: tuple[str, Hashable], increment: int = 1) -> None:
    """Add to the count of a topic and key. Removes counts of 0."""
    topic, topic_key = key
    counts[topic][topic_key] += increment
    if not counts[topic][topic_key]:
        del counts[topic][topic_key]
    if not counts[topic]:
        del counts[topic]


# The invisible time, and the interval at which it is extended. A message stays invisible even if one extension fails.
INVISIBLE_S, RENEW_INTERVAL_S = 30.0, 10.0
# Several threads extend the invisible time of the messages of one broker, and each thread has at least 32 messages. With a
# single thread and a slow Proxy, the invisible time of the last messages would end before their requests are sent.
_MAX_RENEW_THREADS, _MIN_MESSAGES_PER_RENEW_THREAD = 8, 32


def _is_renewal_due(invisible_message: InvisibleMessage, now_ms: int) -> bool:
    return invisible_message.invisible_until_ms - now_ms <= 1000 * (INVISIBLE_S - RENEW_INTERVAL_S)


class Acknowledger:
    """Settles the messages of one consumer, and extends the invisible time of messages that are not settled yet. Several
    threads may use this object.
    """

    def __init__(
        self, port: PopMember, settings: ConsumerSettings, unacked_messages: UnackedMessages, timer: Timer
    ) -> None:
        self._port = port
        self._settings = settings
        self._unacked_messages = unacked_messages
        self._timer = timer
        self._closed = False
        # Running threads that extend invisible times: an endpoint, a broker, a number.
        self._renew_threads: set[Hashable] = set()

    def close(self) -> None:
        """Close this object: later acknowledgements fail without a request, so that the broker delivers the messages again."""
        self._closed = True

    def ack(self, invisible_message: InvisibleMessage) -> bool:
        """Acknowledge a message, and return whether the Proxy confirmed. If not, the next message of the key must not be
        consumed.
        """
        return self._settle(invisible_message, self._port.ack, "acknowledged")

    def forward_to_dlq(self, invisible_message: InvisibleMessage) -> bool:
        """Move a message to the dead letters; returns whether the Proxy confirmed."""
        is_confirmed = self._settle(invisible_message, self._port.forward_to_dlq, "moved to the dead letters")
        return is_confirmed and self._log_dead_letter(invisible_message)

    def redeliver_later(
        self, invisible_message: InvisibleMessage, pause_s: float, is_last_attempt: bool = False
    ) -> bool:
        """Let the Proxy deliver a message again after a pause. After the last attempt, the message becomes a dead letter.

        Returns whether the Proxy confirmed.
        """

        def change_invisible(message: PoppedMessage, deadline: Deadline) -> None:
            self._port.change_invisible(message, pause_s, deadline)

        is_confirmed = self._settle(invisible_message, change_invisible, "sent back", True)
        return is_confirmed and (not is_last_attempt or self._log_dead_letter(invisible_message))

    def _log_dead_letter(self, invisible_message: InvisibleMessage) -> bool:
        message, topic = invisible_message.message, dlq_topic(self._settings.group)
        text = "message %s of %s is a dead letter now, in topic %s, after attempt %d"
        logger.warning(text, message.msg_id, message.queue, topic, message.delivery_attempt)
        return True

    def renew(self) -> None:
        """Extend the invisible time of all messages for which it is due, with separate threads for each broker and endpoint.

        If a listener has had a message for longer than ``consumeTimeout``, only an ordered consumer extends the time, because
        its next messages wait for the message. Other consumers do not extend the time, so that another member gets the message.
        """
        now_ms = self._timer.lease_ms()
        due_messages_by_broker: defaultdict[Hashable, list[InvisibleMessage]] = defaultdict(list)
        for invisible_message in self._unacked_messages.all_messages():
            if (
                now_ms - invisible_message.held_since_ms > 1000 * self._settings.consume_timeout_s
                and invisible_message.listener_thread is not None
            ):
                consequence = "its queue waits" if self._settings.ordered else "other members may get it"
                logger.warning(
                    "the listener has had message %s for too long: %s", invisible_message.message.msg_id, consequence
                )
                if not self._settings.ordered:
                    continue
            if _is_renewal_due(invisible_message, now_ms):
                due_messages_by_broker[
                    invisible_message.message.endpoint, invisible_message.message.queue.broker_name
                ].append(invisible_message)
        for broker, messages in due_messages_by_broker.items():
            messages_per_thread = max(_MIN_MESSAGES_PER_RENEW_THREAD, -(-len(messages) // _MAX_RENEW_THREADS))
            for start in range(0, len(messages), messages_per_thread):
                self._start_renew_thread(
                    (broker, start // messages_per_thread), messages[start : start + messages_per_thread]
                )

    def _start_renew_thread(self, thread_key: Hashable, due_messages: Sequence[InvisibleMessage]) -> None:
        if thread_key in self._renew_threads:
            return
        self._renew_threads.add(thread_key)
        on_end = partial(self._renew_threads.discard, thread_key)
        try:
            start_thread(
                f"rocketmq-{self._settings.group}-renew", partial(self._renew_all, due_messages), on_end, False
            )
        except RuntimeError as e:
            on_end()
            logger.warning("cannot extend the invisible time of messages: no thread can be started: %s", e)

    def _renew_all(self, due_messages: Sequence[InvisibleMessage]) -> None:
        for invisible_message in due_messages:
            self._renew_one(invisible_message)

    def _renew_one(self, invisible_message: InvisibleMessage) -> None:
        with invisible_message.request_lock:
            now_ms = self._timer.lease_ms()
            # Another thread may have settled the message, or extended its time, since the search.
            if invisible_message.is_settled or self._closed or not _is_renewal_due(invisible_message, now_ms):
                return
            try:
                self._port.change_invisible(invisible_message.message, INVISIBLE_S, self._request_deadline())
                invisible_message.invisible_until_ms = now_ms + round(1000 * INVISIBLE_S)
            except NotFound as e:
                invisible_message.invisible_until_ms = now_ms
                logger.warning(
                    "the invisible time of message %s is over, the Proxy delivers it again: %s",
                    invisible_message.message.msg_id,
                    e,
                )
            except RocketMQError as e:
                logger.info(
                    "the invisible time of message %s could not be extended yet: %s",
                    invisible_message.message.msg_id,
                    e,
                )

    def _settle(
        self,
        invisible_message: InvisibleMessage,
        request: Callable[[PoppedMessage, Deadline], None],
        action: str,
        sent_back: bool = False,
    ) -> bool:
        is_confirmed = True
        with invisible_message.request_lock:
            invisible_message.is_settled = True
            try:
                if self._closed:
                    raise ClosedError("the consumer was stopped")
                request(invisible_message.message, self._request_deadline())
            except RocketMQError as e:
                is_confirmed = False
                logger.warning(
                    "message %s could not be %s, the Proxy delivers it again: %s",
                    invisible_message.message.msg_id,
                    action,
                    e,
                )
        self._unacked_messages.remove(invisible_message, sent_back and is_confirmed)
        return is_confirmed

    def _request_deadline(self) -> Deadline:
        return Deadline.after(self._settings.request_timeout_s)


class PopConsumeService(Protocol):
    """Passes messages to a listener."""

    def submit(self, messages: Sequence[InvisibleMessage]) -> None:
        """Queue messages of one topic, in their order."""

    def close(self) -> None:
        """Start no more retries."""


class StandardConsumeService:
    """Calls ``listener`` on the threads of ``workers``. The Proxy delivers failed messages again later."""

    def __init__(
        self,
        listener: Listener,
        port: PopMember,
        unacked_messages: UnackedMessages,
        acknowledger: Acknowledger,
        workers: ListenerPool,
        timer: Timer,
    ) -> None:
        self._listener = listener
        self._port = port
        self._tracebacks = TracebackLimit()
        self._unacked_messages = unacked_messages
        self._acknowledger = acknowledger
        self._workers = workers
        self._timer = timer

    def submit(self, messages: Sequence[InvisibleMessage]) -> None:
        self._workers.submit(*[partial(self._consume, invisible_message) for invisible_message in messages])

    def close(self) -> None:
        """Do nothing: the Proxy retries."""

    def _consume(self, invisible_message: InvisibleMessage) -> None:
        if not self._unacked_messages.start_call(invisible_message, self._timer.lease_ms()):
            return
        context = Context(invisible_message.message.queue)
        outcome = capture(self._listener, (invisible_message.message,), context)
        result = capture(self._settle, invisible_message, outcome, context)
        if isinstance(result, Failure):
            _log_unreported_outcome(invisible_message, result)
            self._unacked_messages.remove(invisible_message)

    def _settle(self, invisible_message: InvisibleMessage, outcome: object, context: Context) -> None:
        message, verdict = invisible_message.message, judge_concurrent_outcome(outcome, context, 1)
        if verdict.problem:
            _warn_of_failure(invisible_message, verdict.problem, self._tracebacks.due(outcome))
        self._unacked_messages.record_outcome(invisible_message, bool(verdict.done_count), self._timer.lease_ms())
        if verdict.done_count:
            self._acknowledger.ack(invisible_message)
        elif verdict.delay_level < 0:
            self._acknowledger.forward_to_dlq(invisible_message)
        else:
            attempts, policy = message.delivery_attempt, self._port.policy()
            self._acknowledger.redeliver_later(
                invisible_message,
                redelivery_pause_s(verdict.delay_level, attempts, policy),
                attempts >= policy.max_attempts,
            )


class FifoConsumeService:
    """Calls ``listener`` with the messages of a message group one by one, each after the acknowledgement of the previous
    message.

    Messages without a group keep the order of their queue. A failed message is retried in place; after the group's last
    attempt it becomes a dead letter.
    """

    def __init__(
        self,
        listener: Listener,
        port: PopMember,
        settings: ConsumerSettings,
        unacked_messages: UnackedMessages,
        acknowledger: Acknowledger,
        workers_and_timer: tuple[ListenerPool, Timer],
    ) -> None:
        self._listener = listener
        self._port = port
        self._tracebacks = TracebackLimit()
        self._suspend_ms = round(1000 * settings.suspend_time_s)
        self._unacked_messages = unacked_messages
        self._acknowledger = acknowledger
        self._workers, self._timer = workers_and_timer
        self._lock = threading.Lock()
        self._messages_by_key: dict[Hashable, deque[InvisibleMessage]] = {}
        self._paused_keys: set[Hashable] = set()
        self._closed = False

    def submit(self, messages: Sequence[InvisibleMessage]) -> None:
        new_keys: list[Hashable] = []
        with self._lock:
            for invisible_message in messages:
                key = ordering_key_of(invisible_message.message)
                if key not in self._messages_by_key:
                    new_keys.append(key)
                    self._messages_by_key[key] = deque()
                self._messages_by_key[key].append(invisible_message)
        self._workers.submit(*[partial(self._consume_key, key) for key in new_keys])

    def close(self) -> None:
        with self._lock:
            self._closed = True
            dropped_messages = [
                invisible_message for key in self._paused_keys for invisible_message in self._messages_by_key[key]
            ]
            for key in self._paused_keys:  # while the lock is held, no pause can end and start a call
                self._messages_by_key[key].clear()
            self._paused_keys.clear()
        for invisible_message in dropped_messages:
            self._unacked_messages.remove(invisible_message)

    def _consume_key(self, key: Hashable) -> None:
        """Consume the messages of a key until no message is left, or until a message must wait for a retry."""
        with self._lock:
            self._paused_keys.discard(key)
        while (invisible_message := self._first_message(key)) is not None:
            if not self._unacked_messages.start_call(invisible_message, self._timer.lease_ms()):
                self._drop_messages_of_key(key)  # the Proxy delivers this message and the messages behind it again
                continue
            pause_s = capture(self._consume, invisible_message)
            if isinstance(pause_s, Failure):
                _log_unreported_outcome(invisible_message, pause_s)
                pause_s = -1.0
            if pause_s is None:
                self._remove_first_message(key)
            elif pause_s < 0 or not self._pause_key(key):
                self._drop_messages_of_key(key)
            else:
                self._timer.call_later(pause_s, partial(self._workers.submit, partial(self._consume_key, key)))
                return

    def _consume(self, invisible_message: InvisibleMessage) -> float | None:
        """Consume one message. Returns None if the message was settled, -1 if the request to settle it failed, and the pause
        before the next attempt if the message failed.
        """
        message, context = invisible_message.message, AcknowledgingContext(invisible_message.message.queue)
        outcome = capture(self._listener, (message,), context)
        verdict = judge_ordered_outcome(outcome, context, self._suspend_ms)
        is_done = verdict.action is OrderedAction.COMMIT
        if verdict.problem:
            _warn_of_failure(invisible_message, verdict.problem, self._tracebacks.due(outcome))
        self._unacked_messages.record_outcome(invisible_message, is_done, self._timer.lease_ms())
        if not is_done and message.delivery_attempt < self._port.policy().max_attempts:
            message.delivery_attempt += 1
            self._unacked_messages.requeue(invisible_message, self._timer.lease_ms())
            return verdict.pause_ms / 1000
        is_confirmed = (
            self._acknowledger.ack(invisible_message)
            if is_done
            else self._acknowledger.forward_to_dlq(invisible_message)
        )
        return None if is_confirmed else -1.0

    def _pause_key(self, key: Hashable) -> bool:
        with self._lock:
            if not self._closed:
                self._paused_keys.add(key)
            return not self._closed

    def _first_message(self, key: Hashable) -> InvisibleMessage | None:
        with self._lock:
            if not self._messages_by_key.get(key):
                self._messages_by_key.pop(key, None)
                return None
            return self._messages_by_key[key][0]

    def _remove_first_message(self, key: Hashable) -> None:
        with self._lock:
            self._messages_by_key[key].popleft()

    def _drop_messages_of_key(self, key: Hashable) -> None:
        """Drop the messages of a key. The Proxy delivers them again, in their order, when their invisible time is over."""
        with self._lock:
            dropped_messages = list(self._messages_by_key[key])
            self._messages_by_key[key].clear()
        for invisible_message in dropped_messages:
            self._unacked_messages.remove(invisible_message)


def redelivery_pause_s(delay_level: int, attempt: int, policy: GroupPolicy) -> float:
    """Return the pause before a redelivery: the pause of the delay level, or for level 0 the pause of the group's policy."""
    if delay_level:
        return positive_duration(DELAY_LEVELS[min(delay_level, len(DELAY_LEVELS)) - 1])
    return policy.redelivery_pauses_s[min(attempt, len(policy.redelivery_pauses_s)) - 1]


def _warn_of_failure(invisible_message: InvisibleMessage, problem: str, error: BaseException | None) -> None:
    logger.warning(
        "message %s of %s failed: %s",
        invisible_message.message.msg_id,
        invisible_message.message.queue,
        problem,
        exc_info=error,
    )


def _log_unreported_outcome(invisible_message: InvisibleMessage, failure: Failure) -> None:
    text = "could not report the result of message %s of %s to the Proxy, which delivers it again"
    failure.log(logger, text, invisible_message.message.msg_id, invisible_message.message.queue)


# The interval of checks for new and removed topics and brokers.
POLLER_CHECK_INTERVAL_S = 10.0
_ROOM_WAIT_S = 1.0  # how long a poller waits for room before it checks whether it must exit
# The pause before an extra renewal, for messages whose next regular renewal may come too late.
_EXTRA_RENEW_DELAY_S = 1.0


class Pollers:
    """The pollers of one consumer: threads that receive messages. ``submit`` gets the messages of one topic, in their order."""

    def __init__(
        self,
        port: PopMember,
        settings: ConsumerSettings,
        subscriptions: Subscriptions,
        unacked_messages: UnackedMessages,
        timer: Timer,
        submit: Callable[[Sequence[InvisibleMessage]], None],
    ) -> None:
        self._port = port
        self._settings = settings
        self._subscriptions = subscriptions
        self._unacked_messages = unacked_messages
        self._timer = timer
        self._submit = submit
        self._lock = threading.Lock()
        self._threads: dict[PopTarget, threading.Thread] = {}
        self._targets: set[PopTarget] = set()  # the targets that should have a poller
        self._closed = threading.Event()
        self._log_throttle = LogThrottle()  # by target

    @property
    def closed(self) -> bool:
        return self._closed.is_set()

    def update_pollers(self) -> None:
        """Start pollers for new targets. Pollers of removed targets exit."""
        targets = {
            (topic, target) for topic in self._subscriptions.filters() for target in range(self._target_count(topic))
        }
        with self._lock:
            self._targets = targets
            for target in sorted(targets - self._threads.keys()):
                if self._closed.is_set():
                    return
                name = f"rocketmq-{self._settings.group}-pop-{target[0]}-{target[1]}"
                on_end = partial(self._on_poller_end, target)
                # If a poller fails, only the next check restarts it, so that a lasting failure causes no loop of restarts.
                self._threads[target] = start_thread(name, partial(self._run, target), on_end, restart=False)

    def close(self) -> None:
        """Pass no more messages to the listener. Pending requests end when the port is closed, so the caller closes the port
        before it calls ``join``.
        """
        self._closed.set()

    def join(self, deadline: Deadline) -> None:
        """Wait for the polling threads."""
        with self._lock:
            threads = list(self._threads.values())
        for thread in threads:
            thread.join(max(0.0, deadline.remaining()))

    def _run(self, target: PopTarget) -> None:
        while not self._is_obsolete(target):
            try:
                self._poll_once(target)
            except RocketMQError as e:
                if not self._closed.is_set():
                    level = self._log_throttle.level(target, e)
                    logger.log(level, "cannot receive messages of %s now, retrying: %s", target[0], e)
                self._closed.wait(self._settings.pull_delay_on_error_s)

    def _on_poller_end(self, target: PopTarget) -> None:
        with self._lock:
            del self._threads[target]
            self._log_throttle.mark_resolved(target)

    def _poll_once(self, target: PopTarget) -> None:
        """Wait for room, send one request, and pass its messages on."""
        topic, _ = target
        if not self._unacked_messages.wait_for_room(topic, self._settings.threads, _ROOM_WAIT_S):
            return
        deadline = Deadline.after(MAX_WAIT_S + self._settings.request_timeout_s)
        # The time is taken before the request, because the invisible time begins at the Proxy. If the process is suspended, it
        # may read the answer much later.
        requested_ms = self._timer.lease_ms()
        messages = self._port.receive(target, self._settings.pull_batch_size, INVISIBLE_S, MAX_WAIT_S, deadline)
        if self._log_throttle.mark_resolved(target):
            logger.warning("messages of %s are received again", topic)
        if not messages or self._is_obsolete(target):
            return  # if messages arrive after the close, the Proxy delivers them to other members
        invisible_until_ms = requested_ms + round(1000 * INVISIBLE_S)
        if new_messages := self._unacked_messages.add(topic, messages, invisible_until_ms, self._timer.lease_ms()):
            self._submit(new_messages)

    def _is_obsolete(self, target: PopTarget) -> bool:
        # ``_targets`` may have an unsubscribed topic until the next update, so the subscriptions are checked, too.
        is_subscribed = target in self._targets and self._subscriptions.get(target[0]) is not None
        return self._closed.is_set() or not is_subscribed or not keeps_order(self._settings, self._port)

    def _target_count(self, topic: str) -> int:
        try:
            return self._port.target_count(topic, Deadline.after(self._settings.request_timeout_s))
        except RocketMQError as e:
            logger.info("topic %s has no route yet: %s", topic, e)
            return sum(polled_topic == topic for polled_topic, _ in self._targets)


def keeps_order(settings: ConsumerSettings, port: PopMember) -> bool:
    """Whether the Proxy delivers messages in the order that the settings require. The result may change at any time, because
    the Proxy may report another policy.
    """
    return not settings.ordered or port.policy().ordered


START_TIMEOUT_S = 10.0
_consumer_numbers = itertools.count()


class RunningPopConsumer:
    """One started consumer. If the settings are ``ordered``, ``listener`` is an ordered listener."""

    def __init__(
        self,
        port: PopMember,
        settings: ConsumerSettings,
        subscriptions: Subscriptions,
        listener: Listener,
        tools: ConsumerTools,
    ) -> None:
        name = f"rocketmq-{settings.group}-{next(_consumer_numbers)}"
        self._port = port
        self._settings = settings
        self._subscriptions = subscriptions
        self._check_timer, self._renew_timer = tools.make_timer(f"{name}-check"), tools.make_timer(f"{name}-renew")
        self._workers = tools.make_workers(f"{name}-listener", settings.threads)
        self._unacked_messages = UnackedMessages(ordering_key_of) if settings.ordered else UnackedMessages()
        self._acknowledger = Acknowledger(port, settings, self._unacked_messages, self._renew_timer)
        self._consume_service = self._new_consume_service(listener)
        self._pollers = Pollers(port, settings, subscriptions, self._unacked_messages, self._renew_timer, self._submit)
        # Held while subscriptions are sent, so that the Proxy gets the newest subscriptions last.
        self._subscribe_lock = threading.RLock()

    def start(self) -> None:
        """Join the group and start to receive messages.

        Raises ``RocketMQError`` if no Proxy answers, and ``OptionError`` if 'ordered' is true and the group is not ordered.
        """
        self._subscribe()
        self._check_order()
        self._check_timer.call_repeatedly(POLLER_CHECK_INTERVAL_S, self._check, 0.0)
        self._renew_timer.call_repeatedly(RENEW_INTERVAL_S, self._acknowledger.renew, RENEW_INTERVAL_S)
        self._check_timer.call_repeatedly(STATS_INTERVAL_S, self._log_stats, STATS_INTERVAL_S)

    def send_subscriptions(self) -> None:
        """Report changed subscriptions to the Proxy."""
        self._subscribe()
        self._check_timer.call_later(0.0, self._check)

    def stop(self, deadline: Deadline) -> list[PoppedMessage]:
        """Settle all messages and leave. Returns the messages that listeners still had at ``deadline``. This method may be
        called again.
        """
        try:
            self._pollers.close()
            self._consume_service.close()
            unfinished_messages = self._unacked_messages.wait_until_settled(deadline)
            if unfinished_messages:
                logger.warning("group %s: listeners did not finish before the timeout", self._settings.group)
            self._workers.close(deadline)
            for timer in (self._check_timer, self._renew_timer):
                timer.close(CLOSE_TIMEOUT_S)
            return unfinished_messages
        finally:  # the consumer leaves even if Ctrl-C ends the wait
            self._acknowledger.close()
            # The Proxy gets its own time to answer, even if listeners used all of their time.
            self._port.close(Deadline.after(TIMEOUT_S))
            self._pollers.join(Deadline.after(TIMEOUT_S))

    @property
    def is_listener_thread(self) -> bool:
        """Whether the calling thread runs a listener; ``stop`` waits for these threads."""
        return self._workers.is_worker_thread

    def stats(self) -> ConsumerStats:
        return self._unacked_messages.stats()

    def figures(self) -> dict[str, TopicFigures]:
        """Return the recent figures of each topic."""
        return self._unacked_messages.figures(self._subscriptions.filters(), self._renew_timer.lease_ms())

    def _new_consume_service(self, listener: Listener) -> PopConsumeService:
        port, unacked_messages, acknowledger, workers = (
            self._port,
            self._unacked_messages,
            self._acknowledger,
            self._workers,
        )
        if not self._settings.ordered:
            return StandardConsumeService(listener, port, unacked_messages, acknowledger, workers, self._renew_timer)
        return FifoConsumeService(
            listener, port, self._settings, unacked_messages, acknowledger, (workers, self._renew_timer)
        )

    def _submit(self, messages: Sequence[InvisibleMessage]) -> None:
        self._consume_service.submit(messages)
        remaining_ms = messages[0].invisible_until_ms - self._renew_timer.lease_ms()
        if remaining_ms <= 1000 * RENEW_INTERVAL_S:
            self._acknowledger.renew()
        elif remaining_ms <= 1000 * (INVISIBLE_S - RENEW_INTERVAL_S):
            # The next regular renewal may come too late. The extra renewal waits for a second: if a quick listener has finished
            # by then, its messages need no renewal.
            self._renew_timer.call_later(_EXTRA_RENEW_DELAY_S, self._acknowledger.renew)

    def _subscribe(self) -> None:
        with self._subscribe_lock:
            if self._pollers.closed:  # the request would make a stopped consumer a member again
                raise ClosedError("the consumer is closed")
            self._join()

    def _join(self) -> None:
        try:
            self._port.subscribe(self._subscriptions.filters(), Deadline.after(START_TIMEOUT_S))
        finally:
            if self._pollers.closed:
                # Another thread stopped the consumer during the request. That thread may have left the group before the request
                # joined the group, so this thread leaves again.
                self._port.close(Deadline.after(TIMEOUT_S))

    def _check_order(self) -> None:
        if not keeps_order(self._settings, self._port):
            raise OptionError(
                f"option 'ordered' is true, but brokers deliver messages of group {self._settings.group!r} in any order; "
                "expected a group with consumeMessageOrderly",
                remedy="Run mqadmin updateSubGroup -o true on every broker, or set 'ordered' to false",
            )

    def _check(self) -> None:
        self._workers.start_missing_threads()  # an earlier start of a thread may have failed
        if not keeps_order(self._settings, self._port):
            logger.error(
                "group %s requests no messages: option 'ordered' is true, but brokers deliver them in any order now. "
                "Run mqadmin updateSubGroup -o true on every broker to keep the order",
                self._settings.group,
            )
            return
        self._pollers.update_pollers()

    def _log_stats(self) -> None:
        logger.info("group %s: %s", self._settings.group, self.stats())
