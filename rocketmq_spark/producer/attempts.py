"""The meaning of an attempt's outcome: whether the send is retried, and whether producers avoid the broker.

``RetryState`` is the loop of ``DefaultMQProducerImpl.sendDefaultImpl`` as decisions. Pure. Synchronous, asynchronous and batched
sends share it, so that all of them retry alike; in Java an asynchronous send is not retried after a broker's error answer, and
its retry keeps the queue id although another broker may have fewer queues. Deliberate differences:

* A pause precedes an attempt at a broker that already failed in this call; other brokers are tried at once, as in Java.
* After an access denial, the same queue is not tried again.
* When time runs out, the error names the real cause, which Java's "call timeout" hides, and the first one beside it.
* A name server that does not answer costs no retry: nothing was tried, and the send waits for it until the deadline.

``FaultTable`` is latency fault tolerance: it mirrors ``MQFaultStrategy`` and ``LatencyFaultToleranceImpl`` of Java today; the
longer durations of releases before 5.1.4 are the preset ``4.x``. The clock is an argument. Several producers and tasks may
share a table, so it has a lock for changes and iterations; looking up a broker needs none. Differences from flaws in Java's
code:

* Only the detector restores the reachable flag, yet Java also clears it on a broker's error answer while no
  detector runs; a broker that merely answered an error then ranks below one that is down. Here the flag counts only
  while a detector runs (``detecting``).
* Items of brokers that left the cluster are deleted by Java's detector only; here ``retain`` follows the routes.
* The fallback of old releases relabels a queue of the published list. Nothing here changes the list.

As in Java, the first choice checks only the isolation time, so a broker whose isolation is over gets a message although
no probe has reached it yet. A probe may fail for other reasons than sends, and the cost is one attempt.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from rocketmq_spark.base.clock import backoff
from rocketmq_spark.base.codes import Response
from rocketmq_spark.errors import (
    AccessDenied,
    BrokerError,
    BrokerNotFound,
    CallTimeout,
    ClosedError,
    InvalidParameter,
    LocalProtocolError,
    MessageRefused,
    OptionError,
    RocketMQError,
    RouteNotFound,
    SendFailed,
    UnprovedError,
)
from rocketmq_spark.model import MessageQueue, SendResult, SendStatus
from rocketmq_spark.queues.selection import RoundRobin

RETRY_CODES = frozenset(
    (
        Response.TOPIC_NOT_EXIST,
        Response.SERVICE_NOT_AVAILABLE,
        Response.SYSTEM_ERROR,
        Response.SYSTEM_BUSY,
        Response.NO_PERMISSION,
        Response.NO_BUYER_ID,
        Response.NOT_IN_CURRENT_UNIT,
        Response.GO_AWAY,
    )
)
# Retries after errors that are often permanent, even if retries are limited only by time.
MAX_UNCERTAIN_RETRIES = 2

# Nothing was sent, and a retry would fail in the same way.
_LOCAL_ERRORS = (LocalProtocolError, MessageRefused, OptionError, ClosedError)
# Errors that are not retried; after UnprovedError, the message may be stored.
_NOT_RETRIED = (*_LOCAL_ERRORS, UnprovedError)


class OutOfTime(CallTimeout):
    """The deadline had passed before anything was tried."""


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """How often an attempt is repeated: a number, or None for as long as the deadline allows.

    ``pinned_retries`` is for sends to a queue that the caller or a selector chose; Java makes none.
    """

    retries: int | None = 2
    pinned_retries: int | None = 0
    codes: frozenset[int] = RETRY_CODES
    store_must_be_ok: bool = False
    first_pause_s: float = 0.01
    max_pause_s: float = 1.0


class RetryAttempt(NamedTuple):
    """Make another attempt after a pause; ``refresh`` asks for the route first."""

    pause_s: float
    refresh: bool


class RetryState:
    """The attempts of one send so far."""

    def __init__(self, policy: RetryPolicy, pinned: bool, rng: random.Random | None = None) -> None:
        self._policy = policy
        self._pinned = pinned
        self._rng = rng
        self._pauses: Iterator[float] | None = None
        self.count = 0
        self.last_broker: str | None = None
        self.brokers: list[str] = []
        self._uncertain_retries = 0
        self._route_failures = 0
        self._first_error: RocketMQError | None = None
        self._degraded_result: SendResult | None = None

    @property
    def more_possible(self) -> bool:
        """Whether another attempt may follow the next one."""
        limit = self._policy.pinned_retries if self._pinned else self._policy.retries
        return limit is None or self.count - self._route_failures < limit

    def next_action(
        self,
        queue: MessageQueue | None,
        outcome: SendResult | RocketMQError,
        brokers: Collection[str],
        left_s: float,
    ) -> SendResult | RocketMQError | RetryAttempt:
        """The final result, the final error, or another attempt. ``queue`` is None when none could be chosen.

        ``brokers`` are those that have queues of the topic, ``left_s`` is what is left of the deadline.
        """
        waits = _is_route_failure(queue, outcome)
        may_repeat = self.more_possible or waits
        self.count += 1
        self._route_failures += waits
        if queue is not None:
            self.last_broker = queue.broker_name
            self.brokers.append(queue.broker_name)
        if isinstance(outcome, SendResult):
            if outcome.status is SendStatus.SEND_OK or not self._policy.store_must_be_ok:
                return outcome
            self._degraded_result = outcome
            refresh = False
        else:
            if not self._is_retriable(outcome):
                return self._degraded_result or outcome
            refresh = outcome.refresh_route
            self._first_error = self._first_error or outcome
        pause = self._next_pause(brokers)
        if not may_repeat or left_s <= pause:
            return self._give_up(outcome, late=may_repeat)
        return RetryAttempt(pause, refresh)

    def _is_retriable(self, error: RocketMQError) -> bool:
        if isinstance(error, _NOT_RETRIED):
            return False
        if isinstance(error, AccessDenied) and self._pinned:
            return False
        if isinstance(error, RouteNotFound):  # Java does not look for a missing topic twice
            return (self._policy.pinned_retries if self._pinned else self._policy.retries) is None
        # A queue that its broker does not have (any more) may be chosen anew after a look at the route.
        moves = isinstance(error, InvalidParameter) and not self._pinned
        if isinstance(error, BrokerError) and not (error.retriable or moves or error.broker_code in self._policy.codes):
            return False
        if error.retriable:
            return True
        self._uncertain_retries += 1
        return self._uncertain_retries <= MAX_UNCERTAIN_RETRIES

    def _next_pause(self, brokers: Collection[str]) -> float:
        fresh = not self._pinned and bool(set(brokers) - set(self.brokers))
        if fresh:
            return 0.0
        if self._pauses is None:
            self._pauses = backoff(self._policy.first_pause_s, self._policy.max_pause_s, self._rng)
        return next(self._pauses)

    def _give_up(self, outcome: SendResult | RocketMQError, late: bool) -> SendResult | RocketMQError:
        if self._degraded_result is not None:
            return self._degraded_result
        assert isinstance(outcome, RocketMQError)
        assert self._first_error is not None
        if self.count == 1 and not late:
            return outcome
        sent = len(self.brokers)
        over = "the send timeout expired" if late else "all retries failed"
        after = f"after {sent} attempt{'' if sent == 1 else 's'}" if sent else "before the first attempt"
        tried = f"; brokers tried: {', '.join(self.brokers)}" if sent else ""
        if isinstance(outcome, OutOfTime):  # says nothing of the cause
            outcome = self._first_error
        differ = self._first_error.message != outcome.message
        errors = f"the first error: {self._first_error.message}; the last error: " if differ else "the error: "
        failed = SendFailed(
            f"{over} {after}{tried}; {errors}{outcome.message}",
            outcome.addr,
            outcome.broker_code,
            outcome.topic,
            outcome.queue,
            outcome.remark,
            outcome.remedy,
        )
        failed.__cause__, failed.stored = outcome, outcome.stored
        return failed


def _is_route_failure(queue: MessageQueue | None, outcome: SendResult | RocketMQError) -> bool:
    """Whether the attempt ended before there was a queue, because the route was unknown."""
    return (
        queue is None
        and isinstance(outcome, RocketMQError)
        and outcome.retriable
        and not isinstance(outcome, RouteNotFound)
    )


class BrokerReport(NamedTuple):
    """What an outcome says of its broker to the fault table."""

    isolated: bool
    reachable: bool


def broker_report(outcome: SendResult | RocketMQError) -> BrokerReport | None:
    """An error answer and a broken connection isolate the broker; an error of our own says nothing about it."""
    if isinstance(outcome, SendResult | BrokerNotFound):
        return BrokerReport(isolated=False, reachable=True)
    return None if isinstance(outcome, _LOCAL_ERRORS) else BrokerReport(isolated=True, reachable=False)


LATENCIES_MS = (50, 100, 550, 1800, 3000, 5000, 15000)
DURATIONS_MS = (0, 0, 2000, 5000, 6000, 10000, 30000)


@dataclass(frozen=True, slots=True)
class FaultTables:
    """For how long a broker is avoided after a send: ``not_available_ms[i]`` for the last ``i`` whose ``latency_max_ms[i]`` the
    latency reaches. A failed send counts as one that took ``isolated_ms``.
    """

    latency_max_ms: tuple[int, ...] = LATENCIES_MS
    not_available_ms: tuple[int, ...] = DURATIONS_MS
    isolated_ms: int = 10_000

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
        """The entry of the largest threshold that ``latency_ms`` reaches; 0 below the first."""
        for threshold, duration in zip(reversed(self.latency_max_ms), reversed(self.not_available_ms), strict=True):
            if latency_ms >= threshold:
                return duration
        return 0


CURRENT = FaultTables()
RELEASE_4 = FaultTables(
    (50, 100, 550, 1000, 2000, 3000, 15000), (0, 0, 30000, 60000, 120000, 180000, 600000), isolated_ms=30_000
)
PRESETS: Mapping[str, FaultTables] = {"current": CURRENT, "4.x": RELEASE_4}


@dataclass(slots=True)
class BrokerHealth:
    """What is known of one broker; ``available_at_ms`` is when it may be used again."""

    latency_ms: int = 0
    available_at_ms: int = 0
    probe_at_ms: int = 0
    reachable: bool = True


class FaultTable:
    """The latencies and failures of brokers, and the choice of a queue that avoids slow and failing brokers.

    Three attributes may be changed at any time. ``enabled``: whether brokers are avoided. ``detecting``: whether failed brokers
    are probed, so that brokers that answer are preferred. ``tables``: for how long a broker is avoided after which latency.
    """

    def __init__(self, tables: FaultTables = CURRENT, enabled: bool = False, detecting: bool = False) -> None:
        self.tables = tables
        self.enabled = enabled
        self.detecting = detecting
        self.faults: dict[str, BrokerHealth] = {}
        self._lock = threading.Lock()

    def report(self, broker: str, latency_ms: int, now_ms: int, isolated: bool = False, reachable: bool = True) -> None:
        """Record the end of a send to ``broker``. A better report does not shorten the time for which the broker is avoided."""
        if not self.enabled:
            return
        duration = self.tables.duration_ms(self.tables.isolated_ms if isolated else latency_ms)
        with self._lock:
            fault = self.faults.setdefault(broker, BrokerHealth())
            fault.latency_ms = latency_ms
            fault.reachable = reachable
            if duration:
                fault.available_at_ms = max(fault.available_at_ms, now_ms + duration)

    def available(self, broker: str, now_ms: int) -> bool:
        fault = self.faults.get(broker)
        return fault is None or now_ms >= fault.available_at_ms

    def reachable(self, broker: str) -> bool:
        fault = self.faults.get(broker)
        return not self.detecting or fault is None or fault.reachable

    def pick(
        self, queues: Sequence[MessageQueue], index: RoundRobin, last_broker: str | None, now_ms: int
    ) -> MessageQueue:
        """The next queue on a broker other than ``last_broker`` that is not avoided; else on another reachable one; else any.

        With ``enabled`` False it is the plain round robin. One index is used throughout, as in Java, and moves on every probe.
        """
        if not self.enabled:
            return index.pick(queues, last_broker)

        for good in (lambda broker: self.available(broker, now_ms), self.reachable):
            if found := index.first(queues, _other_than(last_broker, good)):
                return found
        return queues[index.next() % len(queues)]

    def due_probes(self, now_ms: int, interval_ms: int) -> list[str]:
        """Brokers whose reachability the detector should test now; each comes again after ``interval_ms``."""
        with self._lock:
            due = [broker for broker, fault in self.faults.items() if now_ms >= fault.probe_at_ms]
            for broker in due:
                self.faults[broker].probe_at_ms = now_ms + interval_ms
        return due

    def record_probe(self, broker: str, answered: bool) -> None:
        """Record whether ``broker`` answered a probe. An answer makes the broker reachable again, but does not shorten the time
        for which it is avoided; without an answer, nothing changes.
        """
        with self._lock:
            if answered and broker in self.faults:
                self.faults[broker].reachable = True

    def retain(self, brokers: Collection[str]) -> None:
        """Forget brokers that no route names any more."""
        with self._lock:
            for broker in [broker for broker in self.faults if broker not in brokers]:
                del self.faults[broker]


def _other_than(last_broker: str | None, good: Callable[[str], bool]) -> Callable[[MessageQueue], bool]:
    return lambda queue: queue.broker_name != last_broker and good(queue.broker_name)


def fault_tables(
    preset: str = "current", latency_max_ms: Sequence[int] = (), durations_ms: Sequence[int] = ()
) -> FaultTables:
    """The tables of a preset, with either list replaced by the user's."""
    if preset not in PRESETS:
        raise OptionError(f"option 'sendLatencyFault' names {preset!r}; expected one of {', '.join(PRESETS)}")
    base = PRESETS[preset]
    return FaultTables(
        tuple(latency_max_ms) or base.latency_max_ms, tuple(durations_ms) or base.not_available_ms, base.isolated_ms
    )
