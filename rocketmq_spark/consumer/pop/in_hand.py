"""Messages that a Proxy delivered to a consumer with a listener, and their state until they are acknowledged.

``UnackedMessages`` has the state, guarded by one lock. It sends no requests. ``Acknowledger`` sends them: it acknowledges
messages, makes them visible again, or extends their invisible time. If a request fails, no message is lost: the Proxy delivers
the message again when its invisible time is over.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from rocketmq_spark.base.clock import Deadline
from rocketmq_spark.base.threads import Timer, start_thread
from rocketmq_spark.consumer.figures import ConsumerFigures
from rocketmq_spark.consumer.settings import ConsumerSettings
from rocketmq_spark.errors import ClosedError, NotFound, RocketMQError
from rocketmq_spark.model.membership import ConsumerStats, TopicFigures
from rocketmq_spark.model.message import PoppedMessage, memory_of_popped
from rocketmq_spark.ports import PopMember
from rocketmq_spark.wire.names import dlq_topic

logger = logging.getLogger(__name__)


@dataclass(eq=False, slots=True)
class InvisibleMessage:
    """A message that is invisible to other members. ``Acknowledger`` extends that time until the message is settled."""

    message: PoppedMessage
    until_ms: int  # when it becomes visible again
    since_ms: int  # when it arrived; during a call of the listener, when the call started
    ordering_key: tuple[str, Hashable]  # the topic, and the key of the message in ``UnackedMessages``
    body: bytes  # the original body, because a listener may change the message
    memory_bytes: int  # about how much memory it uses
    listener_thread: int | None = None  # the id of the thread whose listener has it
    was_delivered: bool = False  # to the listener, at least once; also while it waits for a retry
    is_settled: bool = False  # acknowledged, sent back or forwarded, or the request for that failed
    # Allows one request at a time, because each request invalidates the receipt that the others use.
    request_lock: threading.Lock = field(default_factory=threading.Lock)


# The most memory for messages of one topic that wait for a listener. Beyond it, messages that wait for a retry or behind another
# message are dropped, so that a few large messages cannot stop the other queues.
MAX_WAITING_BYTES = 256 << 20


def unique_key(message: PoppedMessage) -> Hashable:
    """Return a key that only this message has, for consumers without an order."""
    return id(message)


def ordering_key_of(message: PoppedMessage) -> Hashable:
    """Return the key of a message: its message group, or its queue if it has none. Messages of one key keep their order."""
    return message.queue if message.message_group is None else (message.topic, message.message_group)


class UnackedMessages:
    """The unacknowledged messages of one consumer. Times are those of ``Timer.lease_ms``, which includes sleep of the machine.

    The listener gets messages with the same ordering key one after the other.
    """

    def __init__(self, ordering_key_of: Callable[[PoppedMessage], Hashable] = unique_key) -> None:
        self._ordering_key_of = ordering_key_of
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._messages: dict[int, InvisibleMessage] = {}  # by identity, in the order of arrival
        # By topic and key: how many messages there are, and how many of them were delivered to the listener. Counted at each
        # change, because every poller reads the counts before each request.
        self._count_by_key: defaultdict[str, Counter[Hashable]] = defaultdict(Counter)
        self._delivered_by_key: defaultdict[str, Counter[Hashable]] = defaultdict(Counter)
        self._waiting_bytes: Counter[str] = Counter()  # by topic, of the messages that no listener has
        # Keys whose waiting messages were dropped to save memory, while the listener had one. Until the end of that call, new
        # messages of the key are not accepted: the Proxy delivers all of them again, in their order.
        self._dropped_keys: set[tuple[str, Hashable]] = set()
        self._counts: Counter[str] = Counter()
        self._figures = ConsumerFigures()

    def add(self, topic: str, messages: Sequence[PoppedMessage], until_ms: int, now_ms: int) -> list[InvisibleMessage]:
        """Add messages that arrived now. Returns them, without those whose key was dropped."""
        arrived = [
            InvisibleMessage(
                message,
                until_ms,
                now_ms,
                (message.topic, self._ordering_key_of(message)),
                message.body,
                memory_of_popped(message),
            )
            for message in messages
        ]
        with self._lock:
            self._figures.record_pull(topic, len(messages), None, now_ms)
            arrived = [new for new in arrived if new.ordering_key not in self._dropped_keys]
            for invisible in arrived:
                self._messages[id(invisible)] = invisible
                _add_count(self._count_by_key, invisible.ordering_key)
                self._waiting_bytes[invisible.ordering_key[0]] += invisible.memory_bytes
        return arrived

    def start_call(self, invisible: InvisibleMessage, now_ms: int) -> bool:
        """Record that this thread passes the message to the listener.

        Returns False if the listener must not get it: the message was dropped, or its invisible time is over, so that another
        member may have it.
        """
        with self._lock:
            if id(invisible) not in self._messages or now_ms >= invisible.until_ms:
                self._remove_locked(invisible)
                return False
            self._waiting_bytes[invisible.ordering_key[0]] -= invisible.memory_bytes
            invisible.listener_thread, invisible.since_ms = threading.get_ident(), now_ms
            if not invisible.was_delivered:
                invisible.was_delivered = True
                _add_count(self._delivered_by_key, invisible.ordering_key)
                self._changed.notify_all()
            return True

    def record_outcome(self, invisible: InvisibleMessage, is_done: bool, now_ms: int) -> None:
        """Record the outcome of the listener call."""
        with self._lock:
            self._counts["consumed" if is_done else "failed"] += 1
            self._figures.record_call(
                invisible.message.topic, int(is_done), int(not is_done), now_ms - invisible.since_ms, now_ms
            )

    def requeue(self, invisible: InvisibleMessage, now_ms: int) -> None:
        """Take the message back from the listener for a retry, with its original body."""
        with self._lock:
            invisible.message.body = invisible.body
            invisible.listener_thread, invisible.since_ms = None, now_ms
            self._waiting_bytes[invisible.ordering_key[0]] += invisible.memory_bytes

    def remove(self, invisible: InvisibleMessage, sent_back: bool = False) -> None:
        """Remove the message. ``sent_back``: it is delivered again later."""
        with self._lock:
            self._counts["sent back"] += sent_back
            self._remove_locked(invisible)

    def all(self) -> list[InvisibleMessage]:
        with self._lock:
            return list(self._messages.values())

    def wait_for_room(self, topic: str, max_waiting: int, wait_s: float) -> bool:
        """Wait until fewer than ``max_waiting`` messages of a topic are ready for a listener; returns False after the timeout.

        Messages that wait behind another message of their key, or for a retry, do not count. Otherwise one message that hangs or
        fails would block all other keys. If the waiting messages need more than ``MAX_WAITING_BYTES``, the keys with the most
        bytes are dropped, and the Proxy delivers their messages again when their invisible time is over.
        """
        with self._lock:
            return self._changed.wait_for(
                lambda: self._waiting_count(topic) < max_waiting and self._make_room_locked(topic), wait_s
            )

    def _make_room_locked(self, topic: str) -> bool:
        if self._waiting_bytes[topic] < MAX_WAITING_BYTES:
            return True
        droppable: defaultdict[tuple[str, Hashable], list[InvisibleMessage]] = defaultdict(list)
        for invisible in self._messages.values():
            if (
                invisible.listener_thread is None
                and invisible.ordering_key[0] == topic
                and invisible.ordering_key[1] in self._delivered_by_key.get(topic, ())
            ):
                droppable[invisible.ordering_key].append(invisible)
        for key in sorted(
            droppable, key=lambda key: sum(invisible.memory_bytes for invisible in droppable[key]), reverse=True
        ):
            if self._waiting_bytes[topic] < MAX_WAITING_BYTES:
                break
            logger.warning(
                "dropped %d waiting messages of topic %s to free memory: the Proxy delivers them again",
                len(droppable[key]),
                topic,
            )
            self._dropped_keys.add(key)
            for invisible in droppable[key]:
                self._remove_locked(invisible)
                invisible.message, invisible.body = replace(invisible.message, body=b"", properties={}), b""
        return self._waiting_bytes[topic] < MAX_WAITING_BYTES

    def wait_until_settled(self, deadline: Deadline) -> list[PoppedMessage]:
        """Wait until all messages are settled; returns those that listeners still have after the timeout.

        If a listener calls this method, the messages behind its own cannot be consumed. So only the other running calls are
        waited for.
        """
        this_thread = threading.get_ident()
        with self._lock:
            finished_threads = (
                {this_thread, None}
                if any(invisible.listener_thread == this_thread for invisible in self._messages.values())
                else set()
            )
            self._changed.wait_for(
                lambda: all(waiting.listener_thread in finished_threads for waiting in self._messages.values()),
                max(0.0, deadline.remaining()),
            )
            return [called.message for called in self._messages.values() if called.listener_thread is not None]

    def stats(self) -> ConsumerStats:
        with self._lock:
            counts = self._counts
            return ConsumerStats(counts["consumed"], counts["failed"], counts["sent back"], len(self._messages))

    def figures(self, topics: Iterable[str], now_ms: int) -> dict[str, TopicFigures]:
        """Return the recent figures of each topic."""
        with self._lock:
            return self._figures.for_topics(topics, now_ms)

    def _waiting_count(self, topic: str) -> int:
        return len(self._count_by_key.get(topic, ())) - len(self._delivered_by_key.get(topic, ()))

    def _remove_locked(self, invisible: InvisibleMessage) -> None:
        if self._messages.pop(id(invisible), None) is None:
            return
        _add_count(self._count_by_key, invisible.ordering_key, -1)
        if invisible.ordering_key[1] not in self._count_by_key.get(invisible.ordering_key[0], ()):
            self._dropped_keys.discard(invisible.ordering_key)
        if invisible.listener_thread is None:
            self._waiting_bytes[invisible.ordering_key[0]] -= invisible.memory_bytes
        if invisible.was_delivered:
            _add_count(self._delivered_by_key, invisible.ordering_key, -1)
        self._changed.notify_all()


def _add_count(counts: defaultdict[str, Counter[Hashable]], key: tuple[str, Hashable], increment: int = 1) -> None:
    """Add to the count of a topic and key. Removes counts of 0."""
    topic, topic_key = key
    counts[topic][topic_key] += increment
    if not counts[topic][topic_key]:
        del counts[topic][topic_key]
    if not counts[topic]:
        del counts[topic]


# The invisible time, and the interval at which it is extended: two extensions in a row may fail.
INVISIBLE_S, RENEW_S = 30.0, 10.0
# Several threads extend the invisible time of the messages of one broker, each of at least 32. With a single thread and a slow
# Proxy, the time of the last messages would be over before their requests are sent.
_MAX_RENEW_THREADS, _MIN_PER_RENEW_THREAD = 8, 32


def _is_due(invisible: InvisibleMessage, now_ms: int) -> bool:
    return invisible.until_ms - now_ms <= 1000 * (INVISIBLE_S - RENEW_S)


class Acknowledger:
    """Settles the messages of one consumer, and extends their invisible time until then. Safe to use from several threads."""

    def __init__(self, port: PopMember, settings: ConsumerSettings, unacked: UnackedMessages, timer: Timer) -> None:
        self._port = port
        self._settings = settings
        self._unacked = unacked
        self._timer = timer
        self._closed = False
        self._renew_threads: set[Hashable] = (
            set()
        )  # running threads that extend invisible times: an endpoint, a broker, a number

    def close(self) -> None:
        """Later acknowledgements fail locally; the broker redelivers the messages."""
        self._closed = True

    def ack(self, invisible: InvisibleMessage) -> bool:
        """Acknowledge a message; returns whether the Proxy confirmed. Only then may the next message of its key be consumed."""
        return self._settle(invisible, self._port.ack, "acknowledged")

    def forward_to_dlq(self, invisible: InvisibleMessage) -> bool:
        """Move a message to the dead letters; returns whether the Proxy confirmed."""
        is_confirmed = self._settle(invisible, self._port.forward_to_dlq, "moved to the dead letters")
        return is_confirmed and self._log_dead_letter(invisible)

    def redeliver_later(self, invisible: InvisibleMessage, pause_s: float, is_last: bool = False) -> bool:
        """Let the Proxy deliver a message again after a pause; after the last attempt, it becomes a dead letter instead.

        Returns whether the Proxy confirmed.
        """

        def change(message: PoppedMessage, deadline: Deadline) -> None:
            self._port.change_invisible(message, pause_s, deadline)

        is_confirmed = self._settle(invisible, change, "sent back", True)
        return is_confirmed and (not is_last or self._log_dead_letter(invisible))

    def _log_dead_letter(self, invisible: InvisibleMessage) -> bool:
        message, topic = invisible.message, dlq_topic(self._settings.group)
        text = "message %s of %s is a dead letter now, in topic %s, after attempt %d"
        logger.warning(text, message.msg_id, message.queue, topic, message.delivery_attempt)
        return True

    def renew(self) -> None:
        """Extend the invisible time of all messages for which it is due, with separate threads for each broker and endpoint.

        The time of a message that a listener has had for longer than ``consumeTimeout`` is extended only for ordered consumers:
        their next messages wait for it. Otherwise another member gets the message.
        """
        now_ms = self._timer.lease_ms()
        due: defaultdict[Hashable, list[InvisibleMessage]] = defaultdict(list)
        for invisible in self._unacked.all():
            if (
                now_ms - invisible.since_ms > 1000 * self._settings.consume_timeout_s
                and invisible.listener_thread is not None
            ):
                consequence = "its queue waits" if self._settings.ordered else "other members may get it"
                logger.warning(
                    "the listener has had message %s for too long: %s", invisible.message.msg_id, consequence
                )
                if not self._settings.ordered:
                    continue
            if _is_due(invisible, now_ms):
                due[invisible.message.endpoint, invisible.message.queue.broker_name].append(invisible)
        for broker, messages in due.items():
            per_thread = max(_MIN_PER_RENEW_THREAD, -(-len(messages) // _MAX_RENEW_THREADS))
            for start in range(0, len(messages), per_thread):
                self._start_renew_thread((broker, start // per_thread), messages[start : start + per_thread])

    def _start_renew_thread(self, thread_key: Hashable, due: Sequence[InvisibleMessage]) -> None:
        if thread_key in self._renew_threads:
            return
        self._renew_threads.add(thread_key)
        on_end = partial(self._renew_threads.discard, thread_key)
        try:
            start_thread(f"rocketmq-{self._settings.group}-renew", partial(self._renew_all, due), on_end, False)
        except RuntimeError as e:
            on_end()
            logger.warning("cannot extend the invisible time of messages: no thread can be started: %s", e)

    def _renew_all(self, due: Sequence[InvisibleMessage]) -> None:
        for invisible in due:
            self._renew_one(invisible)

    def _renew_one(self, invisible: InvisibleMessage) -> None:
        with invisible.request_lock:
            now_ms = self._timer.lease_ms()
            # Another thread may have settled the message, or extended its time, since the search.
            if invisible.is_settled or self._closed or not _is_due(invisible, now_ms):
                return
            try:
                self._port.change_invisible(invisible.message, INVISIBLE_S, self._request_deadline())
                invisible.until_ms = now_ms + round(1000 * INVISIBLE_S)
            except NotFound as e:
                invisible.until_ms = now_ms
                logger.warning(
                    "the invisible time of message %s is over, the Proxy delivers it again: %s",
                    invisible.message.msg_id,
                    e,
                )
            except RocketMQError as e:
                logger.info(
                    "the invisible time of message %s could not be extended yet: %s", invisible.message.msg_id, e
                )

    def _settle(
        self,
        invisible: InvisibleMessage,
        request: Callable[[PoppedMessage, Deadline], None],
        action: str,
        sent_back: bool = False,
    ) -> bool:
        is_confirmed = True
        with invisible.request_lock:
            invisible.is_settled = True
            try:
                if self._closed:
                    raise ClosedError("the consumer was stopped")
                request(invisible.message, self._request_deadline())
            except RocketMQError as e:
                is_confirmed = False
                logger.warning(
                    "message %s could not be %s, the Proxy delivers it again: %s", invisible.message.msg_id, action, e
                )
        self._unacked.remove(invisible, sent_back and is_confirmed)
        return is_confirmed

    def _request_deadline(self) -> Deadline:
        return Deadline.after(self._settings.request_timeout_s)
