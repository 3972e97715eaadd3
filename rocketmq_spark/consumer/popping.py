"""Asks a Proxy for messages: a thread for each broker of each topic, which waits there until some come or room is made here."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Collection, Sequence
from functools import partial

from rocketmq_spark.clock import Deadline
from rocketmq_spark.consumer.in_hand import InHand, Lent
from rocketmq_spark.consumer.pop_settings import MAX_WAIT_S, PopSettings
from rocketmq_spark.consumer.settling import INVISIBLE_S
from rocketmq_spark.errors import RocketMQError
from rocketmq_spark.failures import start_thread
from rocketmq_spark.ports import PopMember
from rocketmq_spark.timer import Timer

logger = logging.getLogger(__name__)

# How often is looked for topics and brokers that are new or gone.
LOOK_S = 10.0
_ROOM_S = 1.0

Place = tuple[str, int]


class Popping:
    """Of one consumer; ``submit`` gets what comes, of one topic and in its order."""

    def __init__(
        self,
        port: PopMember,
        settings: PopSettings,
        in_hand: InHand,
        timer: Timer,
        submit: Callable[[Sequence[Lent]], None],
    ) -> None:
        self._port = port
        self._settings = settings
        self._in_hand = in_hand
        self._timer = timer
        self._submit = submit
        self._lock = threading.Lock()
        self._threads: dict[Place, threading.Thread] = {}
        self._wanted: set[Place] = set()
        self._closed = threading.Event()

    def look(self, topics: Collection[str]) -> None:
        """Begin to ask where nobody asks yet; who asks for what is not wanted any more ends by itself."""
        wanted = {(topic, place) for topic in topics for place in range(self._places(topic))}
        with self._lock:
            self._wanted = wanted
            for place in sorted(wanted - self._threads.keys()):
                if self._closed.is_set():
                    return
                name = f"rocketmq-{self._settings.group}-pop-{place[0]}-{place[1]}"
                ended = partial(self._ended, place)
                # One that fails is started again by the next look, so that what fails at once is not tried all the time.
                self._threads[place] = start_thread(name, partial(self._run, place), ended, again=False)

    def close(self) -> None:
        """Nothing is handed on from now on. Questions under way end with the port's connections: then ``join``."""
        self._closed.set()

    def join(self, deadline: Deadline) -> None:
        """Wait for the threads."""
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
                    logger.warning("no messages of %s for now: %s", place[0], e)
                self._closed.wait(self._settings.error_pause_s)

    def _ended(self, place: Place) -> None:
        with self._lock:
            del self._threads[place]

    def _turn(self, place: Place) -> None:
        """Ask once, when there is room."""
        topic, at = place
        if not self._in_hand.room(topic, self._settings.threads, _ROOM_S):
            return
        deadline = Deadline.after(MAX_WAIT_S + self._settings.request_timeout_s)
        found = self._port.receive(topic, at, self._settings.batch_size, INVISIBLE_S, MAX_WAIT_S, deadline)
        if not found or self._over(place):
            return  # what came too late is handed to others when its time is over
        now_ms = self._timer.now_ms()
        self._submit(self._in_hand.came(topic, found, now_ms + round(1000 * INVISIBLE_S), now_ms))

    def _over(self, place: Place) -> bool:
        return self._closed.is_set() or place not in self._wanted

    def _places(self, topic: str) -> int:
        try:
            return self._port.places(topic, Deadline.after(self._settings.request_timeout_s))
        except RocketMQError as e:
            logger.info("topic %s is not known yet: %s", topic, e)
            return sum(known == topic for known, _ in self._wanted)
