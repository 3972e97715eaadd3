"""A started consumer of a Proxy's messages (``PopRunning``): its parts, their timers, and the threads that receive messages.

``Popping`` has a thread for each broker of each topic. It waits at the Proxy until messages arrive, and here until there is
room.
"""

from __future__ import annotations

import itertools
import logging
import threading
from collections.abc import Callable, Sequence
from functools import partial

from rocketmq_spark.base.clock import Deadline
from rocketmq_spark.base.complaints import Complaints
from rocketmq_spark.base.threads import Timer, start_thread
from rocketmq_spark.consumer.pop.in_hand import INVISIBLE_S, InHand, InvisibleMessage, Settling, line_of
from rocketmq_spark.consumer.pop.in_hand import LOOK_S as RENEW_S
from rocketmq_spark.consumer.pop.listening import InAnyOrder, InOrder, Listening
from rocketmq_spark.consumer.push.running import HANGS_S, STATS_S, TIMEOUT_S, ConsumerTools
from rocketmq_spark.consumer.result import Listener
from rocketmq_spark.consumer.settings import MAX_WAIT_S, ConsumerSettings, Subscriptions
from rocketmq_spark.errors import ClosedError, OptionError, RocketMQError
from rocketmq_spark.model.membership import ConsumerStats, TopicFigures
from rocketmq_spark.model.message import Place, PoppedMessage
from rocketmq_spark.ports import PopMember

logger = logging.getLogger(__name__)

# The interval of checks for new and removed topics and brokers.
LOOK_S = 10.0
_ROOM_S = 1.0
_SOON_S = 1.0


class Popping:
    """The pollers of one consumer. ``submit`` gets the messages of one topic, in their order."""

    def __init__(
        self,
        port: PopMember,
        settings: ConsumerSettings,
        subscriptions: Subscriptions,
        in_hand: InHand,
        timer: Timer,
        submit: Callable[[Sequence[InvisibleMessage]], None],
    ) -> None:
        self._port = port
        self._settings = settings
        self._subscriptions = subscriptions
        self._in_hand = in_hand
        self._timer = timer
        self._submit = submit
        self._lock = threading.Lock()
        self._threads: dict[Place, threading.Thread] = {}
        self._wanted: set[Place] = set()
        self._closed = threading.Event()
        self._complaints = Complaints()  # of places

    @property
    def closed(self) -> bool:
        return self._closed.is_set()

    def look(self) -> None:
        """Start missing pollers; obsolete ones exit."""
        wanted = {(topic, place) for topic in self._subscriptions.all() for place in range(self._places(topic))}
        with self._lock:
            self._wanted = wanted
            for place in sorted(wanted - self._threads.keys()):
                if self._closed.is_set():
                    return
                name = f"rocketmq-{self._settings.group}-pop-{place[0]}-{place[1]}"
                ended = partial(self._ended, place)
                # The next check restarts a poller that failed, so that an immediate failure does not loop.
                self._threads[place] = start_thread(name, partial(self._run, place), ended, again=False)

    def close(self) -> None:
        """Pass no more messages to the listener. Pending requests end with the port's connections; call ``join`` after that."""
        self._closed.set()

    def join(self, deadline: Deadline) -> None:
        """Wait for the polling threads."""
        with self._lock:
            threads = list(self._threads.values())
        for thread in threads:
            thread.join(max(0.0, deadline.remaining()))

    def _run(self, place: Place) -> None:
        while not self._over(place):
            try:
                self._turn(place)
            except RocketMQError as e:
                if not self._closed.is_set():
                    level = self._complaints.level(place, e)
                    logger.log(level, "cannot receive messages of %s now, retrying: %s", place[0], e)
                self._closed.wait(self._settings.pull_delay_on_error_s)

    def _ended(self, place: Place) -> None:
        with self._lock:
            del self._threads[place]
            self._complaints.over(place)

    def _turn(self, place: Place) -> None:
        """Send one request when there is room."""
        topic, _ = place
        if not self._in_hand.room(topic, self._settings.threads, _ROOM_S):
            return
        deadline = Deadline.after(MAX_WAIT_S + self._settings.request_timeout_s)
        # The invisible time began after this moment. The answer may be read much later, if the process was suspended.
        asked_ms = self._timer.lease_ms()
        found = self._port.receive(place, self._settings.pull_batch_size, INVISIBLE_S, MAX_WAIT_S, deadline)
        if self._complaints.over(place):
            logger.warning("messages of %s are received again", topic)
        if not found or self._over(place):
            return  # others get messages that arrived after the close
        until_ms = asked_ms + round(1000 * INVISIBLE_S)
        if lent := self._in_hand.came(topic, found, until_ms, self._timer.lease_ms()):  # none of a line that was cut
            self._submit(lent)

    def _over(self, place: Place) -> bool:
        # a change of subscription counts at once
        wanted = place in self._wanted and self._subscriptions.get(place[0]) is not None
        return self._closed.is_set() or not wanted or not keeps_order(self._settings, self._port)

    def _places(self, topic: str) -> int:
        try:
            return self._port.places(topic, Deadline.after(self._settings.request_timeout_s))
        except RocketMQError as e:
            logger.info("topic %s has no route yet: %s", topic, e)
            return sum(known == topic for known, _ in self._wanted)


def keeps_order(settings: ConsumerSettings, port: PopMember) -> bool:
    """Whether the group delivers in the order that the settings require. The Proxy may report a change later."""
    return not settings.ordered or port.policy().ordered


START_S = 10.0

_numbers = itertools.count()


class PopRunning:
    """One started consumer; with ``ordered`` settings, ``listener`` is an ordered one."""

    def __init__(
        self,
        port: PopMember,
        settings: ConsumerSettings,
        subscriptions: Subscriptions,
        listener: Listener,
        make: ConsumerTools,
    ) -> None:
        name = f"rocketmq-{settings.group}-{next(_numbers)}"
        self._port = port
        self._settings = settings
        self._subscriptions = subscriptions
        self._looks, self._renewals = make.timer(f"{name}-look"), make.timer(f"{name}-renew")
        self._workers = make.workers(f"{name}-listener", settings.threads)
        self._in_hand = InHand(line_of) if settings.ordered else InHand()
        self._settling = Settling(port, settings, self._in_hand, self._renewals)
        self._listening = self._listening_of(listener)
        self._popping = Popping(port, settings, subscriptions, self._in_hand, self._renewals, self._submit)
        self._telling = threading.RLock()  # held while a change is reported, so that the Proxy gets the newest one last

    def begin(self) -> None:
        """Join the group and start to receive messages.

        Raises ``RocketMQError`` if no Proxy answers, and ``OptionError`` if 'ordered' is true and the group is not ordered.
        """
        self._subscribe()
        self._check_order()
        self._looks.every(LOOK_S, self._look, 0.0)
        self._renewals.every(RENEW_S, self._settling.renew, RENEW_S)
        self._looks.every(STATS_S, self._log_stats, STATS_S)

    def changed(self) -> None:
        """Report changed subscriptions to the Proxy."""
        self._subscribe()
        self._looks.later(0.0, self._look)

    def end(self, deadline: Deadline) -> list[PoppedMessage]:
        """Settle all messages and leave; returns those that listeners still had at ``deadline``. May be repeated."""
        try:
            self._popping.close()
            self._listening.close()
            unfinished = self._in_hand.finish(deadline)
            if unfinished:
                logger.warning("group %s: listeners did not finish before the timeout", self._settings.group)
            self._workers.close(deadline)
            for timer in (self._looks, self._renewals):
                timer.close(HANGS_S)
            return unfinished
        finally:  # where Ctrl-C ends the wait, too
            self._settling.close()
            # The time for a Proxy that does not answer, whatever time listeners had.
            self._port.close(Deadline.after(TIMEOUT_S))
            self._popping.join(Deadline.after(TIMEOUT_S))

    @property
    def listens_here(self) -> bool:
        """Whether the calling thread runs a listener; ``end`` waits for these."""
        return self._workers.here

    def stats(self) -> ConsumerStats:
        return self._in_hand.stats()

    def figures(self) -> dict[str, TopicFigures]:
        """Return the recent figures of each topic."""
        return self._in_hand.figures(self._subscriptions.all(), self._renewals.lease_ms())

    def _listening_of(self, listener: Listener) -> Listening:
        port, in_hand, settling, workers = self._port, self._in_hand, self._settling, self._workers
        if not self._settings.ordered:
            return InAnyOrder(listener, port, in_hand, settling, workers, self._renewals)
        return InOrder(listener, port, self._settings, in_hand, settling, (workers, self._renewals))

    def _submit(self, lent: Sequence[InvisibleMessage]) -> None:
        self._listening.submit(lent)
        left_ms = lent[0].until_ms - self._renewals.lease_ms()
        if left_ms <= 1000 * RENEW_S:
            self._settling.renew()
        elif left_ms <= 1000 * (INVISIBLE_S - RENEW_S):  # the next look may come too late; a quick listener needs none
            self._renewals.later(_SOON_S, self._settling.renew)

    def _subscribe(self) -> None:
        with self._telling:
            if self._popping.closed:  # meanwhile: it would join again
                raise ClosedError("the consumer is closed")
            self._join()

    def _join(self) -> None:
        try:
            self._port.subscribe(self._subscriptions.all(), Deadline.after(START_S))
        finally:
            if self._popping.closed:  # meanwhile, by another thread, which may have left already
                self._port.close(Deadline.after(TIMEOUT_S))

    def _check_order(self) -> None:
        if not keeps_order(self._settings, self._port):
            raise OptionError(
                f"option 'ordered' is true, but brokers hand out messages of group {self._settings.group!r} in any order; "
                "expected a group with consumeMessageOrderly",
                remedy="mqadmin updateSubGroup -o true makes it such a group",
            )

    def _look(self) -> None:
        self._workers.start_missing()  # where the system had no threads to give, work waits for them
        if not keeps_order(self._settings, self._port):
            logger.error(
                "group %s requests no messages: option 'ordered' is true, but brokers deliver them in any order now. "
                "Run mqadmin updateSubGroup -o true on every broker to keep the order",
                self._settings.group,
            )
            return
        self._popping.look()

    def _log_stats(self) -> None:
        logger.info("group %s: %s", self._settings.group, self.stats())
