"""What a producer does beside sending: fresh routes, probes of brokers that could not be reached.

Mirrors the scheduled task of ``MQClientInstance`` that refreshes routes, and the detector of ``LatencyFaultToleranceImpl``.
A driver, on a timer of its own: these calls may block, and sends must not wait for them.
"""

from __future__ import annotations

import logging

from rocketmq_spark.clock import Deadline
from rocketmq_spark.errors import RocketMQError
from rocketmq_spark.ports import Sender
from rocketmq_spark.producer.engine import Engine
from rocketmq_spark.producer.settings import ProducerSettings
from rocketmq_spark.timer import Timer

logger = logging.getLogger(__name__)

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
