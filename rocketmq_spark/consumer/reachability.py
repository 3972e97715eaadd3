"""Whether brokers answer a pull consumer. While brokers do not answer, empty polls warn or fail."""

from __future__ import annotations

import logging
import math
from collections.abc import Hashable

from rocketmq_spark.base.clock import Clock, RateLimit
from rocketmq_spark.errors import (
    AccessDenied,
    BrokerError,
    CertificateRefused,
    ConnectionLost,
    NotSupported,
    RemoteProtocolError,
    RocketMQError,
    RouteNotFound,
    copy_error,
)

logger = logging.getLogger(__name__)

MAX_UNREACHED_S = 60.0  # polls fail if no broker answers for this time
_WARNING_INTERVAL_S = 60.0


class Reachability:
    """Whether brokers answer a consumer that polls.

    An empty poll logs a warning while a broker does not answer, and fails if no broker has ever answered. A permanent refusal
    is also logged as a warning, and an empty poll raises the refusal while no queue can be read.

    Several threads use this object without a lock. Because another thread may set an attribute to None, each method reads the
    attribute only once. A lost update only delays a warning or an error until the next failure.
    """

    def __init__(self, group: str, clock: Clock) -> None:
        self._group = group
        self._clock = clock
        self._waiting_since: float | None = None  # the time of the first poll, or of the first poll after a failed poll
        self._has_broker_answered = False
        self._queue_was_read = False
        # The broker or topic of the last failed request, and the error.
        self._last_failure: tuple[Hashable, RocketMQError] | None = None
        self._warning_limit = RateLimit(_WARNING_INTERVAL_S)

    def on_answer(self, target: Hashable, is_broker_answer: bool = True) -> None:
        """Record an answer to a request about ``target``, a broker or topic.

        ``is_broker_answer`` is False if a Proxy answered without a request to a broker.
        """
        self._clear_failure(target)
        if is_broker_answer:
            self._has_broker_answered = True
        elif self._last_failure is None:
            # A member without queues gets answers only from the Proxy. If ``_waiting_since`` stayed set, polls of this member
            # would fail as if no broker answered.
            self._waiting_since = None

    def _clear_failure(self, target: Hashable) -> None:
        last_failure = self._last_failure
        if last_failure is not None and last_failure[0] == target:
            self._last_failure = None

    def on_queue_read(self, broker_name: str) -> None:
        """Record that the broker answered a request of this group about a queue."""
        self._queue_was_read = True
        self.on_answer(broker_name)

    def on_failure(self, target: Hashable, error: RocketMQError, is_broker_answer: bool = True) -> None:
        """Record a failed request about ``target``. A broker's refusal counts as an answer, and a missing topic is no failure."""
        if is_broker_answer and isinstance(error, BrokerError):
            self._has_broker_answered = True
        if isinstance(error, RouteNotFound) or (isinstance(error, BrokerError) and error.retriable):
            self._clear_failure(target)
        else:
            self._last_failure = target, error

    def raise_permanent_failure(self) -> None:
        """Raise the last error if it is permanent: access is denied, or the server does not support this client.

        The error is not raised after a queue was read or a broker answered, because the error then concerns a single server.
        """
        last_failure = self._last_failure
        if last_failure is None:
            return
        _, error = last_failure
        if isinstance(error, NotSupported | AccessDenied) and not self._queue_was_read:
            self._last_failure = None  # the next refusal sets the attribute again
            raise copy_error(error)
        if isinstance(error, RemoteProtocolError | CertificateRefused) and not self._has_broker_answered:
            raise copy_error(error)

    def remaining_s(self) -> float:
        """Return the seconds that a poll may still wait for the first answer."""
        now, waiting_since = self._clock.now(), self._waiting_since
        if waiting_since is None:
            waiting_since = self._waiting_since = now
        return math.inf if self._has_broker_answered else max(0.0, waiting_since + MAX_UNREACHED_S - now)

    def check_empty_poll(self) -> None:
        """Warn if a poll returned nothing while a broker does not answer or refuses.

        Raises ``ConnectionLost`` if no broker has answered for a minute since the first poll.
        """
        timed_out = not self.remaining_s()
        if timed_out:
            self._waiting_since = None
        last_failure = self._last_failure
        if last_failure is None:
            return
        _, error = last_failure
        if timed_out:
            raise ConnectionLost(
                f"group {self._group}: no broker has answered for {MAX_UNREACHED_S:.0f} s: {error.message}",
                error.addr,
                error.broker_code,
                error.topic,
                remedy=error.remedy or "To look for the cause: rocketmq-spark doctor",
            ) from error
        if self._warning_limit.due():
            text = "group %s: a poll returned nothing, and %s: %s"
            cause = "no broker has answered yet"
            if self._has_broker_answered:
                cause = "a broker refuses" if isinstance(error, BrokerError) else "a broker does not answer"
            logger.warning(text, self._group, cause, error)
        if self._has_broker_answered:
            self._last_failure = None  # the next failure sets the attribute again
