"""The periodic work of a producer: refreshes routes, and probes brokers that failed.

Mirrors the scheduled task of ``MQClientInstance`` that refreshes routes, and the detector of ``LatencyFaultToleranceImpl``. The
work runs on a separate timer, because its requests may block, and sends must not wait for them.
"""

from __future__ import annotations

import logging

from rocketmq_spark.base.clock import Deadline
from rocketmq_spark.base.threads import Timer
from rocketmq_spark.errors import RocketMQError
from rocketmq_spark.ports import Sender
from rocketmq_spark.producer.fault_tolerance import FaultTable
from rocketmq_spark.producer.routing import RouteCache
from rocketmq_spark.producer.settings import ProducerSettings

logger = logging.getLogger(__name__)

FIRST_REFRESH_DELAY_S = 0.01
DETECTOR_INTERVAL_S = 3.0
REFRESH_TIMEOUT_S = 3.0


class Housekeeping:
    """The periodic work of one producer, on a timer."""

    def __init__(self, sender: Sender, routes: RouteCache, faults: FaultTable, settings: ProducerSettings) -> None:
        self._sender = sender
        self._routes = routes
        self._faults = faults
        self._settings = settings

    def start(self, timer: Timer) -> None:
        """Refresh routes every 30 s, and run the detector every 3 s while it is on."""
        settings = self._settings
        if settings.route_refresh_s:
            timer.call_repeatedly(settings.route_refresh_s, self.refresh_routes, FIRST_REFRESH_DELAY_S)
        if settings.heartbeat_s:
            timer.call_repeatedly(
                DETECTOR_INTERVAL_S, lambda: self.probe_faulty_brokers(timer.now_ms()), DETECTOR_INTERVAL_S
            )

    def refresh_routes(self) -> None:
        """Refresh the routes, and forget faults of brokers that left."""
        try:
            self._routes.refresh(Deadline.after(REFRESH_TIMEOUT_S))
        except RocketMQError as e:
            logger.info("routes were not refreshed: %s", e)
            return
        self._faults.retain(self._routes.brokers())

    def probe_faulty_brokers(self, now_ms: int) -> None:
        """Probe brokers with reported faults. A probe needs the name of a topic, and the producer knows no topic before its
        first send. So no broker is probed before the first send.
        """
        topic = self._routes.any_topic()
        if topic is None or not self._faults.detecting:
            return
        for broker in self._faults.brokers_to_probe(now_ms, self._settings.detect_interval_ms):
            deadline = Deadline.after(self._settings.detect_timeout_ms / 1000)
            self._faults.record_probe(broker, self._sender.probe(broker, topic, deadline))
