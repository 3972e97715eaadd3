"""What a producer does besides sending: it refreshes routes, probes unreachable brokers, and closes when the program ends.

Mirrors the scheduled task of ``MQClientInstance`` that refreshes routes, and the detector of ``LatencyFaultToleranceImpl``.
A driver, on a timer of its own: these calls may block, and sends must not wait for them. ``watch`` registers a producer to
be closed at exit: it sends what is waiting and logs what is lost.
"""

from __future__ import annotations

import atexit
import logging
import sys
import weakref
from collections.abc import Mapping
from typing import Protocol

from rocketmq_spark.base.clock import Deadline
from rocketmq_spark.base.timer import Timer
from rocketmq_spark.errors import RocketMQError
from rocketmq_spark.ports import Sender
from rocketmq_spark.producer.engine import Engine
from rocketmq_spark.producer.settings import ProducerSettings

logger = logging.getLogger(__name__)


class Open(Protocol):
    """A producer as it is seen here."""

    settings: ProducerSettings

    def at_exit(self) -> Mapping[str, RocketMQError]:
        """Send what waits for company. What fails from now on, by message id; nothing for one that was closed."""


# What they hold keeps them alive.
_open: weakref.WeakSet[Open] = weakref.WeakSet()
_last: weakref.WeakSet[Open] = weakref.WeakSet()


def watch(producer: Open, last: bool = False) -> None:
    """From now on until it is gone; ``last``: it sends what comes of the others' last sends."""
    _open.add(producer)
    if last:
        _last.add(producer)


@atexit.register
def _leave() -> None:
    for producer in sorted(_open, key=_last.__contains__):
        lost = producer.at_exit()
        if lost:
            shown, cause = ", ".join(list(lost)[:10]), next(iter(lost.values()))
            sys.stderr.write(
                f"rocketmq-spark: the producer of group {producer.settings.group!r} was not closed, and {len(lost)} "
                f"messages are not acknowledged: {shown}{', …' if len(lost) > 10 else ''}. {cause}\n"
            )


FIRST_ROUTES_S = 0.01
DETECTOR_S = 3.0
TIMEOUT_S = 3.0


class Housekeeping:
    """What one producer does again and again, on a timer."""

    def __init__(self, sender: Sender, engine: Engine, settings: ProducerSettings) -> None:
        self._sender = sender
        self._topics = engine.topics
        self._faults = engine.faults
        self._settings = settings

    def start(self, timer: Timer) -> None:
        """Begin: routes every 30 s, the detector every 3 s while it is on."""
        settings = self._settings
        if settings.route_refresh_s:
            timer.every(settings.route_refresh_s, self.routes, FIRST_ROUTES_S)
        if settings.heartbeat_s:
            timer.every(DETECTOR_S, lambda: self.detect(timer.now_ms()), DETECTOR_S)

    def routes(self) -> None:
        """Refresh the routes and forget what is known of brokers that left."""
        try:
            self._topics.refresh(Deadline.after(TIMEOUT_S))
        except RocketMQError as e:
            logger.info("routes were not refreshed: %s", e)
            return
        self._faults.retain(self._topics.brokers())

    def detect(self, now_ms: int) -> None:
        """Ask brokers that were reported whether they answer; needs a topic that was published to."""
        topic = self._topics.any_topic()
        if topic is None or not self._faults.detecting:
            return
        for broker in self._faults.due_probes(now_ms, self._settings.detect_interval_ms):
            deadline = Deadline.after(self._settings.detect_timeout_ms / 1000)
            self._faults.probed(broker, self._sender.probe(broker, topic, deadline))
