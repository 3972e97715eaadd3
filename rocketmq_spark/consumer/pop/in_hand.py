"""Messages that a Proxy handed to a consumer with a listener: their state until they are acknowledged.

``InHand`` is the state, guarded by one lock. It asks nothing of the Proxy: callers hold the lock for a decision and release
it before they act. ``Settling`` acknowledges messages, makes them visible again, or extends their invisible duration. If
that fails, no message is lost: the Proxy delivers it again when its invisible duration is over.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial

from rocketmq_spark.base.clock import Deadline
from rocketmq_spark.base.threads import start_thread
from rocketmq_spark.base.timer import Timer
from rocketmq_spark.consumer.push.member_state import ConsumerFigures
from rocketmq_spark.consumer.settings import ConsumerSettings
from rocketmq_spark.errors import ClosedError, NotFound, RocketMQError
from rocketmq_spark.model.membership import ConsumerStats, TopicFigures
from rocketmq_spark.model.message import PoppedMessage
from rocketmq_spark.ports import PopMember
from rocketmq_spark.wire.names import dlq_topic

logger = logging.getLogger(__name__)


@dataclass(eq=False, slots=True)
class InvisibleMessage:
    """A message that is invisible to others until ``until_ms``, which is extended while the message is in hand.

    ``since_ms`` is when it came, or when the listener got it; ``caller`` is the thread whose listener has it. ``begun`` holds
    from its first call on, also while it waits to be tried again. One question about it is asked at a time, under ``asking``:
    each makes the receipt void that the others would bring along. ``line`` is its topic and what it waits for there, and
    ``body`` its body, as they came: a listener may change the message.
    """

    message: PoppedMessage
    until_ms: int
    since_ms: int
    line: tuple[str, Hashable]
    body: bytes
    caller: int | None = None
    begun: bool = False
    settled: bool = False
    asking: threading.Lock = field(default_factory=threading.Lock)


def by_itself(message: PoppedMessage) -> Hashable:
    """The line of a message that waits for no other."""
    return id(message)


def line_of(message: PoppedMessage) -> Hashable:
    """Those with the same go to an ordered listener one after the other."""
    return message.queue if message.message_group is None else (message.topic, message.message_group)


class InHand:
    """Of one consumer; times are ``Timer.lease_ms``: the broker counts, too, while this machine sleeps.

    Messages of one ``line`` go to the listener one after the other.
    """

    def __init__(self, line: Callable[[PoppedMessage], Hashable] = by_itself) -> None:
        self._line = line
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._lent: dict[int, InvisibleMessage] = {}  # by identity, in the order in which they came
        # By topic: how many messages each line has, and lines of which one was begun. Kept, for every poller asks all the time.
        self._lines: defaultdict[str, Counter[Hashable]] = defaultdict(Counter)
        self._begun: defaultdict[str, Counter[Hashable]] = defaultdict(Counter)
        self._counts: Counter[str] = Counter()
        self._figures = ConsumerFigures()

    def came(self, topic: str, messages: Sequence[PoppedMessage], until_ms: int, now_ms: int) -> list[InvisibleMessage]:
        """These were handed out now."""
        lent = [InvisibleMessage(one, until_ms, now_ms, (one.topic, self._line(one)), one.body) for one in messages]
        with self._lock:
            self._figures.pulled(topic, len(messages), None, now_ms)
            self._lent |= {id(one): one for one in lent}
            for one in lent:
                _count(self._lines, one.line)
        return lent

    def begin(self, lent: InvisibleMessage, now_ms: int) -> bool:
        """The listener of this thread gets it, unless its time is over: another consumer may have it then."""
        with self._lock:
            if now_ms >= lent.until_ms:
                self._forget(lent)
                return False
            lent.caller, lent.since_ms = threading.get_ident(), now_ms
            if not lent.begun:
                lent.begun = True
                _count(self._begun, lent.line)
                self._changed.notify_all()
            return True

    def called(self, lent: InvisibleMessage, done: bool, now_ms: int) -> None:
        """What the listener made of it."""
        with self._lock:
            self._counts["consumed" if done else "failed"] += 1
            self._figures.consumed(lent.message.topic, int(done), int(not done), now_ms - lent.since_ms, now_ms)

    def waits(self, lent: InvisibleMessage, now_ms: int) -> None:
        """The listener has it no more, and gets it again, as it came."""
        with self._lock:
            lent.message.body = lent.body
            lent.caller, lent.since_ms = None, now_ms

    def end(self, lent: InvisibleMessage, sent_back: bool = False) -> None:
        """It is not ours any more; ``sent_back``: to be handed out later."""
        with self._lock:
            self._counts["sent back"] += sent_back
            self._forget(lent)

    def all(self) -> list[InvisibleMessage]:
        with self._lock:
            return list(self._lent.values())

    def room(self, topic: str, waiting: int, wait_s: float) -> bool:
        """Whether fewer than ``waiting`` messages of a topic could go to a listener, now or within so many seconds. Those that
        wait behind another do not count, nor does one that waits to be tried again: what hangs or fails would be in the way of
        all. Of their queues brokers hand out no more then.
        """
        with self._lock:
            return self._changed.wait_for(lambda: self._waiting(topic) < waiting, wait_s)

    def finish(self, deadline: Deadline) -> list[PoppedMessage]:
        """Wait until nothing is in hand, and give what listeners still have in the end.

        A listener that asks this itself holds up others behind it: only those that are called already are waited for then.
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
        """What became of each topic's messages lately."""
        with self._lock:
            return self._figures.all(topics, now_ms)

    def _waiting(self, topic: str) -> int:
        return len(self._lines.get(topic, ())) - len(self._begun.get(topic, ()))

    def _forget(self, lent: InvisibleMessage) -> None:
        if self._lent.pop(id(lent), None) is None:
            return
        _count(self._lines, lent.line, -1)
        if lent.begun:
            _count(self._begun, lent.line, -1)
        self._changed.notify_all()


def _count(counts: defaultdict[str, Counter[Hashable]], line: tuple[str, Hashable], more: int = 1) -> None:
    """Nothing is kept of lines and topics that have none."""
    topic, waits_for = line
    counts[topic][waits_for] += more
    if not counts[topic][waits_for]:
        del counts[topic][waits_for]
    if not counts[topic]:
        del counts[topic]


# For how long messages are asked for, and how often those in hand get as much again: two looks may fail.
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
        """Whether the Proxy knows: only then may the next message of its group be consumed."""
        return self._settle(lent, self._port.ack, "acknowledged")

    def dead(self, lent: InvisibleMessage) -> bool:
        """It goes to the dead letters; whether the Proxy knows."""
        settled = self._settle(lent, self._port.forward_to_dlq, "given up")
        return settled and self._log_dead(lent)

    def later(self, lent: InvisibleMessage, pause_s: float, last: bool = False) -> bool:
        """It is handed out again after so long, or is a dead letter then if this was its ``last`` attempt; whether the Proxy
        knows.
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
        """More time for what is in hand, but for what a listener has had for too long: where it is ordered, its queue waits. A
        broker that hangs, or an endpoint, does not keep others from being extended.
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
            logger.warning("messages in hand have no more time yet: no thread to ask for it: %s", e)

    def _renew_each(self, due: Sequence[InvisibleMessage]) -> None:
        for lent in due:
            self._renew(lent)

    def _renew(self, lent: InvisibleMessage) -> None:
        with lent.asking:
            now_ms = self._timer.lease_ms()
            if lent.settled or self._closed or not _is_due(lent, now_ms):  # settled, or renewed by another thread
                return
            try:
                self._port.change_invisible(lent.message, INVISIBLE_S, self._soon())
                lent.until_ms = now_ms + round(1000 * INVISIBLE_S)
            except NotFound as e:
                lent.until_ms = now_ms
                logger.warning("message %s is not ours any more: %s", lent.message.msg_id, e)
            except RocketMQError as e:
                logger.info("message %s has no more time yet: %s", lent.message.msg_id, e)

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
                logger.warning("message %s could not be %s, it comes again: %s", lent.message.msg_id, what, e)
        self._in_hand.end(lent, sent_back and settled)
        return settled

    def _soon(self) -> Deadline:
        return Deadline.after(self._settings.request_timeout_s)
