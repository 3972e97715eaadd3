"""The choice of queues on brokers that are fast and available (latency fault tolerance).

Mirrors ``MQFaultStrategy`` and ``LatencyFaultToleranceImpl`` of Java today; the longer durations of releases before 5.1.4 are the
preset ``4.x``. The clock is an argument. Several producers and tasks may share a ``FaultTable``, so it has a lock for changes and
iterations. To look up a broker, the lock is not needed. This module avoids flaws of Java's code:

* Only a running detector sets a broker's reachable flag again. In Java an error answer clears the flag even if no detector runs,
  so the broker stays ranked below brokers that are down. Here the flag counts only while a detector runs (``detecting``).
* Only Java's detector deletes the items of brokers that left the cluster; here ``retain`` follows the routes.
* If all brokers are avoided, old Java releases overwrite the broker's name in a queue of the published list. This module never
  changes a list of queues.

As in Java, the first choice checks only the isolation time. So after its isolation, a broker gets a message even if no probe has
reached it. An answer to a probe is not required, because a probe may fail for a reason that does not affect sends, and a failed
send costs only one attempt.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from rocketmq_spark.errors import BrokerNotFound, OptionError, RocketMQError
from rocketmq_spark.model import MessageQueue, SendResult
from rocketmq_spark.producer.retry import LOCAL_ERRORS
from rocketmq_spark.queues.selection import RoundRobin


class BrokerReport(NamedTuple):
    """The state of a broker that follows from the outcome of an attempt."""

    isolated: bool
    reachable: bool


def broker_report(outcome: SendResult | RocketMQError) -> BrokerReport | None:
    """Return the report for the fault table. An error answer or a broken connection isolates the broker. None after a local
    error, because such an error says nothing about the broker.
    """
    if isinstance(outcome, SendResult | BrokerNotFound):
        return BrokerReport(isolated=False, reachable=True)
    return None if isinstance(outcome, LOCAL_ERRORS) else BrokerReport(isolated=True, reachable=False)


LATENCIES_MS = (50, 100, 550, 1800, 3000, 5000, 15000)
NOT_AVAILABLE_MS = (0, 0, 2000, 5000, 6000, 10000, 30000)


@dataclass(frozen=True, slots=True)
class FaultTables:
    """How long a broker is avoided after an attempt. The time is ``not_available_ms[i]``, where ``i`` is the largest index for
    which the latency of the attempt is at least ``latency_max_ms[i]``. A failed attempt counts as an attempt that took
    ``failure_latency_ms``.
    """

    latency_max_ms: tuple[int, ...] = LATENCIES_MS
    not_available_ms: tuple[int, ...] = NOT_AVAILABLE_MS
    failure_latency_ms: int = 10_000

    def __post_init__(self) -> None:
        latencies, durations = self.latency_max_ms, self.not_available_ms
        if not latencies or list(latencies) != sorted(set(latencies)) or latencies[0] < 0:
            raise OptionError(f"option 'latencyMax' is {list(latencies)}; expected growing latencies in ms")
        if len(durations) != len(latencies) or min(durations) < 0:
            raise OptionError(
                f"option 'notAvailableDuration' is {list(durations)}; expected {len(latencies)} durations in ms, one "
                "for each entry of 'latencyMax'"
            )

    def duration_ms(self, latency_ms: int) -> int:
        """How long a broker is avoided after an attempt that took ``latency_ms``: the duration of the largest threshold that
        the latency reaches.
        """
        for threshold, duration in zip(reversed(self.latency_max_ms), reversed(self.not_available_ms), strict=True):
            if latency_ms >= threshold:
                return duration
        return 0


CURRENT_RELEASE = FaultTables()
RELEASE_4 = FaultTables(
    (50, 100, 550, 1000, 2000, 3000, 15000), (0, 0, 30000, 60000, 120000, 180000, 600000), failure_latency_ms=30_000
)
PRESETS: Mapping[str, FaultTables] = {"current": CURRENT_RELEASE, "4.x": RELEASE_4}


@dataclass(slots=True)
class BrokerHealth:
    """The last latency and state of one broker, which is avoided until ``available_at_ms``."""

    latency_ms: int = 0
    available_at_ms: int = 0
    probe_at_ms: int = 0
    reachable: bool = True


class FaultTable:
    """The latencies and failures of brokers, and the choice of a queue that avoids slow and failing brokers.

    Three attributes may be changed at any time. ``enabled`` says whether brokers are avoided. ``detecting`` says whether failed
    brokers are probed, so that brokers that answer are preferred. ``tables`` has the times for which a broker is avoided, by
    latency.
    """

    def __init__(self, tables: FaultTables = CURRENT_RELEASE, enabled: bool = False, detecting: bool = False) -> None:
        self.tables = tables
        self.enabled = enabled
        self.detecting = detecting
        self.faults: dict[str, BrokerHealth] = {}  # by broker name; includes brokers in good health
        self._lock = threading.Lock()

    def report(self, broker: str, latency_ms: int, now_ms: int, isolated: bool = False, reachable: bool = True) -> None:
        """Record an attempt at ``broker``. A better report does not shorten the time for which the broker is avoided."""
        if not self.enabled:
            return
        avoided_ms = self.tables.duration_ms(self.tables.failure_latency_ms if isolated else latency_ms)
        with self._lock:
            health = self.faults.setdefault(broker, BrokerHealth())
            health.latency_ms = latency_ms
            health.reachable = reachable
            if avoided_ms:
                health.available_at_ms = max(health.available_at_ms, now_ms + avoided_ms)

    def available(self, broker: str, now_ms: int) -> bool:
        health = self.faults.get(broker)
        return health is None or now_ms >= health.available_at_ms

    def reachable(self, broker: str) -> bool:
        health = self.faults.get(broker)
        return not self.detecting or health is None or health.reachable

    def pick(
        self, queues: Sequence[MessageQueue], round_robin: RoundRobin, last_broker: str | None, now_ms: int
    ) -> MessageQueue:
        """Return the next queue whose broker is not avoided and is not ``last_broker``. If all other brokers are avoided, return
        a queue on a reachable broker other than ``last_broker``. If no other broker is reachable, return any queue.

        If ``enabled`` is False, the queues are chosen by plain round robin. As in Java, all steps share one index, and each
        examined queue advances the index.
        """
        if not self.enabled:
            return round_robin.pick(queues, last_broker)

        for is_good in (lambda broker: self.available(broker, now_ms), self.reachable):
            if queue := round_robin.next_fitting(queues, _other_broker_predicate(last_broker, is_good)):
                return queue
        return queues[round_robin.next() % len(queues)]

    def brokers_to_probe(self, now_ms: int, interval_ms: int) -> list[str]:
        """The brokers that the detector should probe now. Each of these brokers is due again after ``interval_ms``."""
        with self._lock:
            due_brokers = [broker for broker, health in self.faults.items() if now_ms >= health.probe_at_ms]
            for broker in due_brokers:
                self.faults[broker].probe_at_ms = now_ms + interval_ms
        return due_brokers

    def record_probe(self, broker: str, has_answered: bool) -> None:
        """Record whether ``broker`` answered a probe. An answer makes the broker reachable again, but does not shorten the time
        for which the broker is avoided. Without an answer, nothing changes.
        """
        with self._lock:
            if has_answered and broker in self.faults:
                self.faults[broker].reachable = True

    def retain(self, brokers: Collection[str]) -> None:
        """Remove all brokers except ``brokers``, which are in a route."""
        with self._lock:
            for broker in [broker for broker in self.faults if broker not in brokers]:
                del self.faults[broker]


def _other_broker_predicate(last_broker: str | None, is_good: Callable[[str], bool]) -> Callable[[MessageQueue], bool]:
    return lambda queue: queue.broker_name != last_broker and is_good(queue.broker_name)


def fault_tables(
    preset: str = "current", latency_max_ms: Sequence[int] = (), durations_ms: Sequence[int] = ()
) -> FaultTables:
    """The tables of a preset. Each list that the user has set replaces the list of the preset."""
    if preset not in PRESETS:
        raise OptionError(f"option 'sendLatencyFault' names {preset!r}; expected one of {', '.join(PRESETS)}")
    base = PRESETS[preset]
    return FaultTables(
        tuple(latency_max_ms) or base.latency_max_ms,
        tuple(durations_ms) or base.not_available_ms,
        base.failure_latency_ms,
    )
