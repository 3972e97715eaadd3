"""What to do about the outcome of one attempt: the loop of ``DefaultMQProducerImpl.sendDefaultImpl`` as decisions.

Pure. Synchronous, asynchronous and batched sends share it, so that all of them retry alike; in Java an asynchronous
send is not retried after a broker's error answer, and its retry keeps the queue id although another broker may have
fewer queues. Differences that are meant:

* A pause precedes an attempt at a broker that already failed in this call; other brokers are tried at once, as in Java.
* A refused access is not tried again on the same queue.
* When time runs out, the error names the real cause, which Java's "call timeout" hides, and the first one beside it.
* A name server that does not answer costs no retry: nothing was tried, and it is waited for until the deadline.
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
# What is often permanent is tried this often even when retries are bounded by time alone.
DOUBTFUL_RETRIES = 2

# Nothing was sent, and nothing would be different next time.
_OURS = (LocalProtocolError, MessageRefused, OptionError, ClosedError)
# What may be stored is not sent again.
_FINAL = (*_OURS, UnprovedError)


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


class Attempts:
    """The attempts of one send so far."""

    def __init__(self, policy: RetryPolicy, pinned: bool, rng: random.Random | None = None) -> None:
        self._policy = policy
        self._pinned = pinned
        self._rng = rng
        self._pauses: Iterator[float] | None = None
        self.count = 0
        self.last_broker: str | None = None
        self.brokers: list[str] = []
        self._doubtful = 0
        self._without_route = 0
        self._first: RocketMQError | None = None
        self._kept: SendResult | None = None

    @property
    def more_possible(self) -> bool:
        """Whether another attempt may follow the next one."""
        limit = self._policy.pinned_retries if self._pinned else self._policy.retries
        return limit is None or self.count - self._without_route < limit

    def judge(
        self,
        queue: MessageQueue | None,
        outcome: SendResult | RocketMQError,
        brokers: Collection[str],
        left_s: float,
    ) -> SendResult | RocketMQError | RetryAttempt:
        """The final result, the final error, or another attempt. ``queue`` is None when none could be chosen.

        ``brokers`` are those that have queues of the topic, ``left_s`` is what is left of the deadline.
        """
        waits = _no_name_server(queue, outcome)
        may_repeat = self.more_possible or waits
        self.count += 1
        self._without_route += waits
        if queue is not None:
            self.last_broker = queue.broker_name
            self.brokers.append(queue.broker_name)
        if isinstance(outcome, SendResult):
            if outcome.status is SendStatus.SEND_OK or not self._policy.store_must_be_ok:
                return outcome
            self._kept = outcome
            refresh = False
        else:
            if not self._repeatable(outcome):
                return self._kept or outcome
            refresh = outcome.refresh_route
            self._first = self._first or outcome
        pause = self._pause(brokers)
        if not may_repeat or left_s <= pause:
            return self._over(outcome, late=may_repeat)
        return RetryAttempt(pause, refresh)

    def _repeatable(self, error: RocketMQError) -> bool:
        if isinstance(error, _FINAL):
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
        self._doubtful += 1
        return self._doubtful <= DOUBTFUL_RETRIES

    def _pause(self, brokers: Collection[str]) -> float:
        fresh = not self._pinned and bool(set(brokers) - set(self.brokers))
        if fresh:
            return 0.0
        if self._pauses is None:
            self._pauses = backoff(self._policy.first_pause_s, self._policy.max_pause_s, self._rng)
        return next(self._pauses)

    def _over(self, outcome: SendResult | RocketMQError, late: bool) -> SendResult | RocketMQError:
        if self._kept is not None:
            return self._kept
        assert isinstance(outcome, RocketMQError)
        assert self._first is not None
        if self.count == 1 and not late:
            return outcome
        why = "the send timeout is over" if late else "all retries failed"
        sent = len(self.brokers)
        tried = f"; brokers tried: {', '.join(self.brokers)}" if sent else ""
        if isinstance(outcome, OutOfTime):  # says nothing of the cause
            outcome = self._first
        first = f"the first error: {self._first.message}; " if self._first.message != outcome.message else ""
        failed = SendFailed(
            f"{why} after {sent} attempt{'' if sent == 1 else 's'}{tried}; {first}the last one: {outcome.message}",
            outcome.addr,
            outcome.broker_code,
            outcome.topic,
            outcome.queue,
            outcome.remark,
            outcome.remedy,
        )
        failed.__cause__, failed.stored = outcome, outcome.stored
        return failed


def _no_name_server(queue: MessageQueue | None, outcome: SendResult | RocketMQError) -> bool:
    """Whether the attempt ended before there was a queue, because the route was unknown."""
    return (
        queue is None
        and isinstance(outcome, RocketMQError)
        and outcome.retriable
        and not isinstance(outcome, RouteNotFound)
    )


class Report(NamedTuple):
    """What an outcome says of its broker to the fault table."""

    isolated: bool
    reachable: bool


def report_of(outcome: SendResult | RocketMQError) -> Report | None:
    """An error answer and a broken connection isolate the broker; an error of our own says nothing about it."""
    if isinstance(outcome, SendResult | BrokerNotFound):
        return Report(isolated=False, reachable=True)
    return None if isinstance(outcome, _OURS) else Report(isolated=True, reachable=False)
