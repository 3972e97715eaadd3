"""Whether a pull consumer reaches its brokers. While brokers do not answer, empty polls warn or fail."""

from __future__ import annotations

import logging
import math
from collections.abc import Hashable

from rocketmq_spark.base.clock import Clock, NowAndThen
from rocketmq_spark.errors import (
    AccessDenied,
    BrokerError,
    CertificateRefused,
    ConnectionLost,
    NotSupported,
    RemoteProtocolError,
    RocketMQError,
    RouteNotFound,
    copy_of,
)

logger = logging.getLogger(__name__)

UNREACHED_S = 60.0  # polls fail after this time without one answer of a broker
_WARNED_S = 60.0


class Contact:
    """Whether brokers answer a consumer that polls. An empty poll warns while a broker does not answer, and fails if none has
    ever answered. A refusal that no retry can change is a warning, too, and an error while no queue can be read.

    Several threads call this without a lock, so a method reads an attribute that may become None only once. A lost update only
    delays a warning or an error until the next failure.
    """

    def __init__(self, group: str, clock: Clock) -> None:
        self._group = group
        self._clock = clock
        self._since: float | None = None  # the first poll, or the last one that failed
        self._reached = False
        self._reads = False  # whether a queue could be read
        # The broker or topic of the last failed request, and the error.
        self._trouble: tuple[Hashable, RocketMQError] | None = None
        self._warnings = NowAndThen(_WARNED_S)

    def answered(self, asked: Hashable, by_broker: bool = True) -> None:
        """Note an answer to a request about ``asked``, a broker or topic.

        Not ``by_broker``: a Proxy answered by itself, which does not show that the Proxy reaches a broker.
        """
        self._settle(asked)
        if by_broker:
            self._reached = True
        elif self._trouble is None:
            self._since = None  # a member without queues gets no other answers

    def _settle(self, asked: Hashable) -> None:
        trouble = self._trouble
        if trouble is not None and trouble[0] == asked:
            self._trouble = None

    def reads(self, broker_name: str) -> None:
        """Note that the broker answered a request of this group about a queue."""
        self._reads = True
        self.answered(broker_name)

    def failed(self, asked: Hashable, error: RocketMQError, by_broker: bool = True) -> None:
        """Note a failed request about ``asked``. A broker's refusal is an answer, and a topic that does not exist yet is fine."""
        if by_broker and isinstance(error, BrokerError):
            self._reached = True
        if isinstance(error, RouteNotFound) or (isinstance(error, BrokerError) and error.retriable):
            self._settle(asked)
        else:
            self._trouble = asked, error

    def check_servers(self) -> None:
        """Raise the last error if no retry can change it: access is denied, or the server serves no clients of this kind.

        Only while no queue was read, or no broker answered: otherwise the error concerns a single server.
        """
        trouble = self._trouble
        if trouble is None:
            return
        _, error = trouble
        if isinstance(error, NotSupported | AccessDenied) and not self._reads:
            self._trouble = None  # the next refusal sets it again
            raise copy_of(error)
        if isinstance(error, RemoteProtocolError | CertificateRefused) and not self._reached:
            raise copy_of(error)

    def left_s(self) -> float:
        """Return the seconds that a poll may still wait for the first answer."""
        now, since = self._clock.now(), self._since
        if since is None:
            since = self._since = now
        return math.inf if self._reached else max(0.0, since + UNREACHED_S - now)

    def check(self) -> None:
        """Warn if a poll returned nothing while a broker does not answer or refuses.

        Raises ``ConnectionLost`` if no broker has answered for a minute since the first poll.
        """
        is_over = not self.left_s()
        if is_over:
            self._since = None
        trouble = self._trouble
        if trouble is None:
            return
        _, error = trouble
        if is_over:
            raise ConnectionLost(
                f"group {self._group}: no broker has answered for {UNREACHED_S:.0f} s: {error.message}",
                error.addr,
                error.broker_code,
                error.topic,
                remedy=error.remedy or "To look for the cause: rocketmq-spark doctor",
            ) from error
        if self._warnings.due():
            text = "group %s: a poll returned nothing, and %s: %s"
            why = "no broker has answered yet"
            if self._reached:
                why = "a broker refuses" if isinstance(error, BrokerError) else "a broker does not answer"
            logger.warning(text, self._group, why, error)
        if self._reached:
            self._trouble = None  # the next failure sets it again
