"""Decides from the outcome of an attempt whether the send ends or is retried.

``RetryState`` makes the decisions of the loop in ``DefaultMQProducerImpl.sendDefaultImpl``, without requests, threads or clocks.
Synchronous, asynchronous and batched sends use ``RetryState``, so that all of them are retried alike. In Java, an asynchronous
send is not retried after a broker's error answer. After other errors, the send is retried with the same queue id, although the
next broker may have fewer queues. Deliberate differences:

* A pause precedes an attempt at a broker that already failed in this call; other brokers are tried at once, as in Java.
* After an access denial, the same queue is not tried again.
* When time runs out, the error names the first and the last cause, which Java's "call timeout" hides.
* If no name server answers, the attempt does not count as a retry, because nothing was sent. Attempts without a route are
  repeated until the deadline.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from rocketmq_spark.base.clock import backoff
from rocketmq_spark.base.codes import Response
from rocketmq_spark.errors import (
    AccessDenied,
    BrokerError,
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
# The maximum number of retries after errors that are often permanent. This maximum applies even if only the timeout limits other
# retries.
MAX_UNCERTAIN_RETRIES = 2

# After these errors nothing was sent, and a retry would fail in the same way.
LOCAL_ERRORS = (LocalProtocolError, MessageRefused, OptionError, ClosedError)
# Errors that are not retried. After an UnprovedError the message may be stored.
_FINAL_ERRORS = (*LOCAL_ERRORS, UnprovedError)


class OutOfTime(CallTimeout):
    """The deadline had passed before the attempt began."""


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """How often an attempt is repeated. The field ``retries`` is a number, or None for as many retries as the deadline allows.

    ``pinned_retries`` is for sends to a queue that the caller or a selector chose. Java does not retry sends to a chosen queue.
    """

    retries: int | None = 2
    pinned_retries: int | None = 0
    codes: frozenset[int] = RETRY_CODES
    store_must_be_ok: bool = False
    first_pause_s: float = 0.01
    max_pause_s: float = 1.0


class RetryAttempt(NamedTuple):
    """Make another attempt after a pause. With ``refresh`` the route is fetched first."""

    pause_s: float
    refresh: bool


class RetryState:
    """The attempts of one send so far, from which the next step follows."""

    def __init__(self, policy: RetryPolicy, pinned: bool, rng: random.Random | None = None) -> None:
        self._policy = policy
        self._is_pinned = pinned
        self._rng = rng
        self._pauses: Iterator[float] | None = None
        self.attempt_count = 0  # attempts, also those that failed before a queue was chosen
        self.last_broker: str | None = None
        self.tried_brokers: list[str] = []
        self._uncertain_retry_count = 0  # retries after errors that are often permanent
        self._route_failure_count = 0  # attempts that ended without a route; they do not count as retries
        self._first_error: RocketMQError | None = None
        self._degraded_result: SendResult | None = None  # the message is stored, less safely than required

    @property
    def may_retry(self) -> bool:
        """Whether another attempt may follow the next one."""
        limit = self._policy.pinned_retries if self._is_pinned else self._policy.retries
        return limit is None or self.attempt_count - self._route_failure_count < limit

    def next_action(
        self,
        queue: MessageQueue | None,
        outcome: SendResult | RocketMQError,
        route_brokers: Collection[str],
        remaining_s: float,
    ) -> SendResult | RocketMQError | RetryAttempt:
        """The final result, the final error, or another attempt. ``queue`` is None if the attempt failed before a queue was
        chosen.

        ``route_brokers`` are the brokers with queues of the topic, ``remaining_s`` the seconds until the deadline.
        """
        is_route_failure = _is_route_failure(queue, outcome)
        may_retry = self.may_retry or is_route_failure
        self.attempt_count += 1
        self._route_failure_count += is_route_failure
        if queue is not None:
            self.last_broker = queue.broker_name
            self.tried_brokers.append(queue.broker_name)
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
        pause = self._next_pause(route_brokers)
        if not may_retry or remaining_s <= pause:
            return self._give_up(outcome, is_late=may_retry)
        return RetryAttempt(pause, refresh)

    def _is_retriable(self, error: RocketMQError) -> bool:
        if isinstance(error, _FINAL_ERRORS):
            return False
        if isinstance(error, AccessDenied) and self._is_pinned:
            return False
        if isinstance(error, RouteNotFound):  # Java does not retry a missing topic either
            return (self._policy.pinned_retries if self._is_pinned else self._policy.retries) is None
        # If a broker does not have the queue any more, another queue may be chosen from the refreshed route.
        may_choose_again = isinstance(error, InvalidParameter) and not self._is_pinned
        if isinstance(error, BrokerError) and not (
            error.retriable or may_choose_again or error.broker_code in self._policy.codes
        ):
            return False
        if error.retriable:
            return True
        self._uncertain_retry_count += 1
        return self._uncertain_retry_count <= MAX_UNCERTAIN_RETRIES

    def _next_pause(self, route_brokers: Collection[str]) -> float:
        has_untried_broker = not self._is_pinned and bool(set(route_brokers) - set(self.tried_brokers))
        if has_untried_broker:
            return 0.0
        if self._pauses is None:
            self._pauses = backoff(self._policy.first_pause_s, self._policy.max_pause_s, self._rng)
        return next(self._pauses)

    def _give_up(self, outcome: SendResult | RocketMQError, is_late: bool) -> SendResult | RocketMQError:
        if self._degraded_result is not None:
            return self._degraded_result
        assert isinstance(outcome, RocketMQError)
        assert self._first_error is not None
        if self.attempt_count == 1 and not is_late:
            return outcome
        broker_attempt_count = len(self.tried_brokers)
        summary = "the send timeout expired" if is_late else "all retries failed"
        count_text = (
            f"after {broker_attempt_count} attempt{'' if broker_attempt_count == 1 else 's'}"
            if broker_attempt_count
            else "before the first attempt"
        )
        brokers_text = f"; brokers tried: {', '.join(self.tried_brokers)}" if broker_attempt_count else ""
        if isinstance(outcome, OutOfTime):  # ``OutOfTime`` names no cause, but the first error does
            outcome = self._first_error
        errors_differ = self._first_error.message != outcome.message
        errors_text = (
            f"the first error: {self._first_error.message}; the last error: " if errors_differ else "the error: "
        )
        final_error = SendFailed(
            f"{summary} {count_text}{brokers_text}; {errors_text}{outcome.message}",
            outcome.addr,
            outcome.broker_code,
            outcome.topic,
            outcome.queue,
            outcome.remark,
            outcome.remedy,
        )
        final_error.__cause__, final_error.stored = outcome, outcome.stored
        return final_error


def _is_route_failure(queue: MessageQueue | None, outcome: SendResult | RocketMQError) -> bool:
    """Whether the attempt ended before there was a queue, because the route was unknown."""
    return (
        queue is None
        and isinstance(outcome, RocketMQError)
        and outcome.retriable
        and not isinstance(outcome, RouteNotFound)
    )
