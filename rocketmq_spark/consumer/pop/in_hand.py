"""Messages that a Proxy delivered to a consumer with a listener, and their state until they are acknowledged.

``InHand`` is the state, guarded by one lock. It sends no requests: callers hold the lock for a decision and release
it before they act. ``Settling`` acknowledges messages, makes them visible again, or extends their invisible duration. If
that fails, no message is lost: the Proxy delivers it again when its invisible duration is over.
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
from rocketmq_spark.consumer.push.member_state import ConsumerFigures
from rocketmq_spark.consumer.settings import ConsumerSettings
from rocketmq_spark.errors import ClosedError, NotFound, RocketMQError
from rocketmq_spark.model.membership import ConsumerStats, TopicFigures
from rocketmq_spark.model.message import PoppedMessage, memory_of_popped
from rocketmq_spark.ports import PopMember
from rocketmq_spark.wire.names import dlq_topic

logger = logging.getLogger(__name__)


@dataclass(eq=False, slots=True)
class InvisibleMessage:
    """A message that is invisible to other members until ``until_ms``, which is extended until it is acknowledged.

    ``since_ms`` is when it arrived, or when the listener got it; ``caller`` is the thread whose listener has it. ``begun``
    is True from its first call on, also while it waits for a retry. The lock ``asking`` allows one request at a time, because
    each request invalidates the receipt of the others. ``line`` is its topic and the key of its order there; ``body`` is its
    original body, because a listener may change the message; ``size`` is about its memory, in bytes.
    """

    message: PoppedMessage
    until_ms: int
    since_ms: int
    line: tuple[str, Hashable]
    body: bytes
    size: int
    caller: int | None = None
    begun: bool = False
    settled: bool = False
    asking: threading.Lock = field(default_factory=threading.Lock)


# Messages of a topic that no listener has may have so much memory. Beyond it, those that wait for a retry or behind another one
# are given up: a few large ones of another client must not keep the other queues from being read.
_MOST_BYTES = 256 << 20


def by_itself(message: PoppedMessage) -> Hashable:
    """Return a line with only this message, for unordered consumers."""
    return id(message)


def line_of(message: PoppedMessage) -> Hashable:
    """Return the line of a message. An ordered listener gets the messages of a line one after the other."""
    return message.queue if message.message_group is None else (message.topic, message.message_group)


class InHand:
    """The unacknowledged messages of one consumer. Times are those of ``Timer.lease_ms``, which includes sleep of the machine.

    The listener gets messages of one ``line`` one after the other.
    """

    def __init__(self, line: Callable[[PoppedMessage], Hashable] = by_itself) -> None:
        self._line = line
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._lent: dict[int, InvisibleMessage] = {}  # by identity, in the order of arrival
        # By topic: how many messages each line has, and lines of which one was begun. Kept, for every poller asks all the time.
        self._lines: defaultdict[str, Counter[Hashable]] = defaultdict(Counter)
        self._begun: defaultdict[str, Counter[Hashable]] = defaultdict(Counter)
        self._bytes: Counter[str] = Counter()  # by topic, of the messages that no listener has
        self._cut: set[tuple[str, Hashable]] = (
            set()
        )  # lines whose next messages were given up behind one that a listener has
        self._counts: Counter[str] = Counter()
        self._figures = ConsumerFigures()

    def came(self, topic: str, messages: Sequence[PoppedMessage], until_ms: int, now_ms: int) -> list[InvisibleMessage]:
        """Add messages that arrived now, and return them, without those of a line that was cut: they are redelivered in order."""
        lent = [
            InvisibleMessage(one, until_ms, now_ms, (one.topic, self._line(one)), one.body, memory_of_popped(one))
            for one in messages
        ]
        with self._lock:
            self._figures.pulled(topic, len(messages), None, now_ms)
            lent = [one for one in lent if one.line not in self._cut]
            self._lent |= {id(one): one for one in lent}
            for one in lent:
                _count(self._lines, one.line)
                self._bytes[one.line[0]] += one.size
        return lent

    def begin(self, lent: InvisibleMessage, now_ms: int) -> bool:
        """Give the message to this thread's listener. False if it was given up, or its invisible time is over: another member may
        have it.
        """
        with self._lock:
            if id(lent) not in self._lent or now_ms >= lent.until_ms:
                self._forget(lent)
                return False
            self._bytes[lent.line[0]] -= lent.size
            lent.caller, lent.since_ms = threading.get_ident(), now_ms
            if not lent.begun:
                lent.begun = True
                _count(self._begun, lent.line)
                self._changed.notify_all()
            return True

    def called(self, lent: InvisibleMessage, done: bool, now_ms: int) -> None:
        """Record the outcome of the listener call."""
        with self._lock:
            self._counts["consumed" if done else "failed"] += 1
            self._figures.consumed(lent.message.topic, int(done), int(not done), now_ms - lent.since_ms, now_ms)

    def waits(self, lent: InvisibleMessage, now_ms: int) -> None:
        """Take the message back from the listener for a retry, with its original body."""
        with self._lock:
            lent.message.body = lent.body
            lent.caller, lent.since_ms = None, now_ms
            self._bytes[lent.line[0]] += lent.size

    def end(self, lent: InvisibleMessage, sent_back: bool = False) -> None:
        """Remove the message. ``sent_back``: it is delivered again later."""
        with self._lock:
            self._counts["sent back"] += sent_back
            self._forget(lent)

    def all(self) -> list[InvisibleMessage]:
        with self._lock:
            return list(self._lent.values())

    def room(self, topic: str, waiting: int, wait_s: float) -> bool:
        """Wait until fewer than ``waiting`` messages of a topic are ready for a listener; returns False after the timeout.

        Messages that wait behind another one or for a retry do not count: otherwise one that hangs or fails would block all.
        Brokers deliver no more messages of their queues meanwhile. Those that no listener has have at most ``_MOST_BYTES``, and
        what is under way: beyond it, those with most are given up, and redelivered when their invisible time is over.
        """
        with self._lock:
            return self._changed.wait_for(lambda: self._waiting(topic) < waiting and self._has_room(topic), wait_s)

    def _has_room(self, topic: str) -> bool:
        if self._bytes[topic] < _MOST_BYTES:
            return True
        lines: defaultdict[tuple[str, Hashable], list[InvisibleMessage]] = defaultdict(list)
        for one in self._lent.values():
            if one.caller is None and one.line[0] == topic and one.line[1] in self._begun.get(topic, ()):
                lines[one.line].append(one)
        for line in sorted(lines, key=lambda line: sum(one.size for one in lines[line]), reverse=True):
            if self._bytes[topic] < _MOST_BYTES:
                break
            logger.warning(
                "%d messages of topic %s that wait are given up: they need much memory", len(lines[line]), topic
            )
            self._cut.add(line)
            for one in lines[line]:
                self._forget(one)
                one.message, one.body = replace(one.message, body=b"", properties={}), b""
        return self._bytes[topic] < _MOST_BYTES

    def finish(self, deadline: Deadline) -> list[PoppedMessage]:
        """Wait until all messages are settled; returns those that listeners still have after the timeout.

        A listener that calls this blocks the messages behind it, so only running calls are waited for then.
        """
        me = threading.get_ident()
        with self._lock:
            ended = {me, None} if any(one.caller == me for one in self._lent.values()) else set()
            self._changed.wait_for(
                lambda: all(one.caller in ended for one in self._lent.values()), max(0.0, deadline.remaining())
            )
            return [one.message for one in self._lent.values() if one.caller is not None]

    def stats(self) -> ConsumerStats:
        with self._lock:
            counts = self._counts
            return ConsumerStats(counts["consumed"], counts["failed"], counts["sent back"], len(self._lent))

    def figures(self, topics: Iterable[str], now_ms: int) -> dict[str, TopicFigures]:
        """Return the recent figures of each topic."""
        with self._lock:
            return self._figures.all(topics, now_ms)

    def _waiting(self, topic: str) -> int:
        return len(self._lines.get(topic, ())) - len(self._begun.get(topic, ()))

    def _forget(self, lent: InvisibleMessage) -> None:
        if self._lent.pop(id(lent), None) is None:
            return
        _count(self._lines, lent.line, -1)
        if lent.line[1] not in self._lines.get(lent.line[0], ()):
            self._cut.discard(lent.line)
        if lent.caller is None:
            self._bytes[lent.line[0]] -= lent.size
        if lent.begun:
            _count(self._begun, lent.line, -1)
        self._changed.notify_all()


def _count(counts: defaultdict[str, Counter[Hashable]], line: tuple[str, Hashable], more: int = 1) -> None:
    """Count messages per line and topic; removes counts of 0."""
    topic, waits_for = line
    counts[topic][waits_for] += more
    if not counts[topic][waits_for]:
        del counts[topic][waits_for]
    if not counts[topic]:
        del counts[topic]


# The invisible time, and the interval at which it is extended: two extensions may fail.
INVISIBLE_S, LOOK_S = 30.0, 10.0
# Of many messages on one way so many threads ask for more time, each for so many at least: one by one a Proxy that takes long
# for each has no answer for the last ones before their time is over.
_RENEWERS, _FOR_EACH = 8, 32


def _is_due(lent: InvisibleMessage, now_ms: int) -> bool:
    return lent.until_ms - now_ms <= 1000 * (INVISIBLE_S - LOOK_S)


class Settling:
    """Of one consumer."""

    def __init__(self, port: PopMember, settings: ConsumerSettings, in_hand: InHand, timer: Timer) -> None:
        self._port = port
        self._settings = settings
        self._in_hand = in_hand
        self._timer = timer
        self._closed = False
        self._renewing: set[Hashable] = set()  # threads that ask for more time: an endpoint, a broker and a number

    def close(self) -> None:
        """Later acknowledgements fail locally; the broker redelivers the messages."""
        self._closed = True

    def done(self, lent: InvisibleMessage) -> bool:
        """Acknowledge a message; returns whether the Proxy confirmed. Only then may the next message of its group be consumed."""
        return self._settle(lent, self._port.ack, "acknowledged")

    def dead(self, lent: InvisibleMessage) -> bool:
        """Move a message to the dead letters; returns whether the Proxy confirmed."""
        settled = self._settle(lent, self._port.forward_to_dlq, "given up")
        return settled and self._log_dead(lent)

    def later(self, lent: InvisibleMessage, pause_s: float, last: bool = False) -> bool:
        """Have a message delivered again after a pause, or become a dead letter then if this was its ``last`` attempt.

        Returns whether the Proxy confirmed.
        """

        def change(message: PoppedMessage, deadline: Deadline) -> None:
            self._port.change_invisible(message, pause_s, deadline)

        settled = self._settle(lent, change, "sent back", True)
        return settled and (not last or self._log_dead(lent))

    def _log_dead(self, lent: InvisibleMessage) -> bool:
        message, topic = lent.message, dlq_topic(self._settings.group)
        text = "message %s of %s is a dead letter now, in topic %s, after attempt %d"
        logger.warning(text, message.msg_id, message.queue, topic, message.delivery_attempt)
        return True

    def renew(self) -> None:
        """Extend the invisible time of all messages, except those that a listener has had for too long (their line waits if the
        listener is ordered). A broker or endpoint that hangs does not delay the others.
        """
        now_ms = self._timer.lease_ms()
        due: defaultdict[Hashable, list[InvisibleMessage]] = defaultdict(list)
        for lent in self._in_hand.all():
            if now_ms - lent.since_ms > 1000 * self._settings.consume_timeout_s and lent.caller is not None:
                outcome = "its queue waits" if self._settings.ordered else "others may get it"
                logger.warning("the listener has had message %s for too long: %s", lent.message.msg_id, outcome)
                if not self._settings.ordered:
                    continue
            if _is_due(lent, now_ms):
                due[lent.message.endpoint, lent.message.queue.broker_name].append(lent)
        for way, these in due.items():
            share = max(_FOR_EACH, -(-len(these) // _RENEWERS))
            for at in range(0, len(these), share):
                self._begin_renewing((way, at // share), these[at : at + share])

    def _begin_renewing(self, who: Hashable, due: Sequence[InvisibleMessage]) -> None:
        if who in self._renewing:
            return
        self._renewing.add(who)
        ended = partial(self._renewing.discard, who)
        try:
            start_thread(f"rocketmq-{self._settings.group}-renew", partial(self._renew_each, due), ended, False)
        except RuntimeError as e:
            ended()
            logger.warning("cannot extend the invisible time of messages: no thread can be started: %s", e)

    def _renew_each(self, due: Sequence[InvisibleMessage]) -> None:
        for lent in due:
            self._renew(lent)

    def _renew(self, lent: InvisibleMessage) -> None:
        with lent.asking:
            now_ms = self._timer.lease_ms()
            if lent.settled or self._closed or not _is_due(lent, now_ms):  # settled, or extended by another thread
                return
            try:
                self._port.change_invisible(lent.message, INVISIBLE_S, self._soon())
                lent.until_ms = now_ms + round(1000 * INVISIBLE_S)
            except NotFound as e:
                lent.until_ms = now_ms
                logger.warning(
                    "the invisible time of message %s is over, it is delivered again: %s", lent.message.msg_id, e
                )
            except RocketMQError as e:
                logger.info("message %s: its invisible time could not be extended yet: %s", lent.message.msg_id, e)

    def _settle(
        self,
        lent: InvisibleMessage,
        verb: Callable[[PoppedMessage, Deadline], None],
        what: str,
        sent_back: bool = False,
    ) -> bool:
        settled = True
        with lent.asking:
            lent.settled = True
            try:
                if self._closed:
                    raise ClosedError("the consumer was stopped")
                verb(lent.message, self._soon())
            except RocketMQError as e:
                settled = False
                logger.warning("message %s could not be %s, it is delivered again: %s", lent.message.msg_id, what, e)
        self._in_hand.end(lent, sent_back and settled)
        return settled

    def _soon(self) -> Deadline:
        return Deadline.after(self._settings.request_timeout_s)
