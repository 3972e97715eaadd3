"""A started consumer of a Proxy's messages: its parts, their timers, and the threads that receive messages.

``Pollers`` has one thread for each broker of each topic. The thread waits until there is room for messages, and then requests
messages from the Proxy, which holds the request until a message arrives.
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
from rocketmq_spark.consumer.listener import Listener
from rocketmq_spark.consumer.pop.in_hand import (
    INVISIBLE_S,
    RENEW_S,
    Acknowledger,
    InvisibleMessage,
    UnackedMessages,
    ordering_key_of,
)
from rocketmq_spark.consumer.pop.listening import FifoConsumeService, PopConsumeService, StandardConsumeService
from rocketmq_spark.consumer.settings import MAX_WAIT_S, ConsumerSettings, Subscriptions
from rocketmq_spark.consumer.tools import CLOSE_TIMEOUT_S, STATS_S, TIMEOUT_S, ConsumerTools
from rocketmq_spark.errors import ClosedError, OptionError, RocketMQError
from rocketmq_spark.model.membership import ConsumerStats, TopicFigures
from rocketmq_spark.model.message import Place, PoppedMessage
from rocketmq_spark.ports import PopMember

logger = logging.getLogger(__name__)

# The interval of checks for new and removed topics and brokers.
POLLER_CHECK_S = 10.0
_ROOM_WAIT_S = 1.0
_EARLY_RENEW_S = 1.0


class Pollers:
    """The pollers of one consumer: threads that receive messages. ``submit`` gets the messages of one topic, in their order."""

    def __init__(
        self,
        port: PopMember,
        settings: ConsumerSettings,
        subscriptions: Subscriptions,
        unacked: UnackedMessages,
        timer: Timer,
        submit: Callable[[Sequence[InvisibleMessage]], None],
    ) -> None:
        self._port = port
        self._settings = settings
        self._subscriptions = subscriptions
        self._unacked = unacked
        self._timer = timer
        self._submit = submit
        self._lock = threading.Lock()
        self._threads: dict[Place, threading.Thread] = {}
        self._places: set[Place] = set()  # the places that should have a poller
        self._closed = threading.Event()
        self._complaints = Complaints()  # of places

    @property
    def closed(self) -> bool:
        return self._closed.is_set()

    def update_pollers(self) -> None:
        """Start pollers for new places. Pollers of removed places exit."""
        places = {
            (topic, place) for topic in self._subscriptions.filters() for place in range(self._place_count(topic))
        }
        with self._lock:
            self._places = places
            for place in sorted(places - self._threads.keys()):
                if self._closed.is_set():
                    return
                name = f"rocketmq-{self._settings.group}-pop-{place[0]}-{place[1]}"
                on_end = partial(self._on_poller_end, place)
                # The next check restarts a poller that failed, so that an immediate failure does not loop.
                self._threads[place] = start_thread(name, partial(self._run, place), on_end, again=False)

    def close(self) -> None:
        """Pass no more messages to the listener. Pending requests end when the port is closed; call ``join`` after that."""
        self._closed.set()

    def join(self, deadline: Deadline) -> None:
        """Wait for the polling threads."""
        with self._lock:
            threads = list(self._threads.values())
        for thread in threads:
            thread.join(max(0.0, deadline.remaining()))

    def _run(self, place: Place) -> None:
        while not self._is_obsolete(place):
            try:
                self._poll_once(place)
            except RocketMQError as e:
                if not self._closed.is_set():
                    level = self._complaints.level(place, e)
                    logger.log(level, "cannot receive messages of %s now, retrying: %s", place[0], e)
                self._closed.wait(self._settings.pull_delay_on_error_s)

    def _on_poller_end(self, place: Place) -> None:
        with self._lock:
            del self._threads[place]
            self._complaints.over(place)

    def _poll_once(self, place: Place) -> None:
        """Wait for room, send one request, and pass its messages on."""
        topic, _ = place
        if not self._unacked.wait_for_room(topic, self._settings.threads, _ROOM_WAIT_S):
            return
        deadline = Deadline.after(MAX_WAIT_S + self._settings.request_timeout_s)
        # The invisible time began after this moment. The answer may be read much later, if the process was suspended.
        requested_ms = self._timer.lease_ms()
        messages = self._port.receive(place, self._settings.pull_batch_size, INVISIBLE_S, MAX_WAIT_S, deadline)
        if self._complaints.over(place):
            logger.warning("messages of %s are received again", topic)
        if not messages or self._is_obsolete(place):
            return  # the Proxy delivers messages that arrive after the close to other members
        until_ms = requested_ms + round(1000 * INVISIBLE_S)
        if arrived := self._unacked.add(topic, messages, until_ms, self._timer.lease_ms()):
            self._submit(arrived)

    def _is_obsolete(self, place: Place) -> bool:
        # The subscriptions are checked, too, so that an unsubscribed topic is not polled until the next update.
        is_subscribed = place in self._places and self._subscriptions.get(place[0]) is not None
        return self._closed.is_set() or not is_subscribed or not keeps_order(self._settings, self._port)

    def _place_count(self, topic: str) -> int:
        try:
            return self._port.places(topic, Deadline.after(self._settings.request_timeout_s))
        except RocketMQError as e:
            logger.info("topic %s has no route yet: %s", topic, e)
            return sum(polled_topic == topic for polled_topic, _ in self._places)


def keeps_order(settings: ConsumerSettings, port: PopMember) -> bool:
    """Whether the Proxy delivers in the order that the settings require. It may report a change at any time."""
    return not settings.ordered or port.policy().ordered


START_S = 10.0

_numbers = itertools.count()


class RunningPopConsumer:
    """One started consumer; with ``ordered`` settings, ``listener`` is an ordered one."""

    def __init__(
        self,
        port: PopMember,
        settings: ConsumerSettings,
        subscriptions: Subscriptions,
        listener: Listener,
        tools: ConsumerTools,
    ) -> None:
        name = f"rocketmq-{settings.group}-{next(_numbers)}"
        self._port = port
        self._settings = settings
        self._subscriptions = subscriptions
        self._check_timer, self._renew_timer = tools.timer(f"{name}-check"), tools.timer(f"{name}-renew")
        self._workers = tools.workers(f"{name}-listener", settings.threads)
        self._unacked = UnackedMessages(ordering_key_of) if settings.ordered else UnackedMessages()
        self._acknowledger = Acknowledger(port, settings, self._unacked, self._renew_timer)
        self._consume_service = self._new_consume_service(listener)
        self._pollers = Pollers(port, settings, subscriptions, self._unacked, self._renew_timer, self._submit)
        # Held while subscriptions are sent, so that the Proxy gets the newest ones last.
        self._subscribe_lock = threading.RLock()

    def start(self) -> None:
        """Join the group and start to receive messages.

        Raises ``RocketMQError`` if no Proxy answers, and ``OptionError`` if 'ordered' is true and the group is not ordered.
        """
        self._subscribe()
        self._check_order()
        self._check_timer.every(POLLER_CHECK_S, self._check, 0.0)
        self._renew_timer.every(RENEW_S, self._acknowledger.renew, RENEW_S)
        self._check_timer.every(STATS_S, self._log_stats, STATS_S)

    def send_subscriptions(self) -> None:
        """Report changed subscriptions to the Proxy."""
        self._subscribe()
        self._check_timer.later(0.0, self._check)

    def stop(self, deadline: Deadline) -> list[PoppedMessage]:
        """Settle all messages and leave; returns those that listeners still had at ``deadline``. May be repeated."""
        try:
            self._pollers.close()
            self._consume_service.close()
            unfinished = self._unacked.wait_until_settled(deadline)
            if unfinished:
                logger.warning("group %s: listeners did not finish before the timeout", self._settings.group)
            self._workers.close(deadline)
            for timer in (self._check_timer, self._renew_timer):
                timer.close(CLOSE_TIMEOUT_S)
            return unfinished
        finally:  # also if Ctrl-C ends the wait
            self._acknowledger.close()
            # The Proxy gets its own time to answer, even if listeners used all of theirs.
            self._port.close(Deadline.after(TIMEOUT_S))
            self._pollers.join(Deadline.after(TIMEOUT_S))

    @property
    def is_listener_thread(self) -> bool:
        """Whether the calling thread runs a listener; ``stop`` waits for these threads."""
        return self._workers.is_worker_thread

    def stats(self) -> ConsumerStats:
        return self._unacked.stats()

    def figures(self) -> dict[str, TopicFigures]:
        """Return the recent figures of each topic."""
        return self._unacked.figures(self._subscriptions.filters(), self._renew_timer.lease_ms())

    def _new_consume_service(self, listener: Listener) -> PopConsumeService:
        port, unacked, acknowledger, workers = self._port, self._unacked, self._acknowledger, self._workers
        if not self._settings.ordered:
            return StandardConsumeService(listener, port, unacked, acknowledger, workers, self._renew_timer)
        return FifoConsumeService(listener, port, self._settings, unacked, acknowledger, (workers, self._renew_timer))

    def _submit(self, messages: Sequence[InvisibleMessage]) -> None:
        self._consume_service.submit(messages)
        remaining_ms = messages[0].until_ms - self._renew_timer.lease_ms()
        if remaining_ms <= 1000 * RENEW_S:
            self._acknowledger.renew()
        elif remaining_ms <= 1000 * (INVISIBLE_S - RENEW_S):
            # The next regular renewal may be too late. After a second, a quick listener has finished, and needs no renewal.
            self._renew_timer.later(_EARLY_RENEW_S, self._acknowledger.renew)

    def _subscribe(self) -> None:
        with self._subscribe_lock:
            if self._pollers.closed:  # the request would make a stopped consumer a member again
                raise ClosedError("the consumer is closed")
            self._join()

    def _join(self) -> None:
        try:
            self._port.subscribe(self._subscriptions.filters(), Deadline.after(START_S))
        finally:
            if (
                self._pollers.closed
            ):  # another thread stopped the consumer during the request, and may have left before it
                self._port.close(Deadline.after(TIMEOUT_S))

    def _check_order(self) -> None:
        if not keeps_order(self._settings, self._port):
            raise OptionError(
                f"option 'ordered' is true, but brokers deliver messages of group {self._settings.group!r} in any order; "
                "expected a group with consumeMessageOrderly",
                remedy="Run mqadmin updateSubGroup -o true on every broker, or set 'ordered' to false",
            )

    def _check(self) -> None:
        self._workers.start_missing()  # if the system could not start a thread before, work may be waiting for it
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
