"""Passes messages from a Proxy to a listener: in any order, or those of a message group one after the other.

Mirrors ``StandardConsumeService`` and ``FifoConsumeService`` of RocketMQ's Java client for gRPC: a listener gets one message.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Hashable, Sequence
from functools import partial
from typing import Protocol

from rocketmq_spark.base.codes import DELAY_LEVELS
from rocketmq_spark.base.threads import Failure, Timer, Tracebacks, attempt
from rocketmq_spark.consumer.pop.in_hand import InHand, InvisibleMessage, Settling, line_of
from rocketmq_spark.consumer.push.workers import Workers
from rocketmq_spark.consumer.result import (
    AcknowledgingContext,
    Context,
    Listener,
    OrderedAction,
    judge_concurrent,
    judge_ordered,
)
from rocketmq_spark.consumer.settings import ConsumerSettings
from rocketmq_spark.model.message import GroupPolicy
from rocketmq_spark.options.parsing import positive_duration
from rocketmq_spark.ports import PopMember

logger = logging.getLogger(__name__)


class Listening(Protocol):
    """Passes messages to a listener."""

    def submit(self, lent: Sequence[InvisibleMessage]) -> None:
        """Queue messages of one topic, in their order."""

    def close(self) -> None:
        """Begin no more retries."""


class InAnyOrder:
    """Calls ``listener`` on the threads of the workers. The Proxy redelivers failed messages later."""

    def __init__(
        self, listener: Listener, port: PopMember, in_hand: InHand, settling: Settling, workers: Workers, timer: Timer
    ) -> None:
        self._listener = listener
        self._port = port
        self._tracebacks = Tracebacks()
        self._in_hand = in_hand
        self._settling = settling
        self._workers = workers
        self._timer = timer

    def submit(self, lent: Sequence[InvisibleMessage]) -> None:
        self._workers.submit(*[partial(self._consume, one) for one in lent])

    def close(self) -> None:
        """Does nothing: the Proxy retries."""

    def _consume(self, lent: InvisibleMessage) -> None:
        if not self._in_hand.begin(lent, self._timer.lease_ms()):
            return
        context = Context(lent.message.queue)
        outcome = attempt(self._listener, (lent.message,), context)
        settled = attempt(self._settle, lent, outcome, context)
        if isinstance(settled, Failure):
            _log_unsettled(lent, settled)
            self._in_hand.end(lent)

    def _settle(self, lent: InvisibleMessage, outcome: object, context: Context) -> None:
        message, verdict = lent.message, judge_concurrent(outcome, context, 1)
        if verdict.problem:
            _warn_of_failure(lent, verdict.problem, self._tracebacks.due(outcome))
        self._in_hand.called(lent, bool(verdict.done_count), self._timer.lease_ms())
        if verdict.done_count:
            self._settling.done(lent)
        elif verdict.level < 0:
            self._settling.dead(lent)
        else:
            tries, policy = message.delivery_attempt, self._port.policy()
            self._settling.later(lent, pause_s(verdict.level, tries, policy), tries >= policy.max_attempts)


class InOrder:
    """Calls ``listener`` with the messages of a message group one by one, each after the acknowledgement of the previous one.

    Messages without a group keep the order of their queue. A failed message is retried in place; after the group's last
    attempt it becomes a dead letter.
    """

    def __init__(
        self,
        listener: Listener,
        port: PopMember,
        settings: ConsumerSettings,
        in_hand: InHand,
        settling: Settling,
        work: tuple[Workers, Timer],
    ) -> None:
        self._listener = listener
        self._port = port
        self._tracebacks = Tracebacks()
        self._suspend_ms = round(1000 * settings.suspend_time_s)
        self._in_hand = in_hand
        self._settling = settling
        self._workers, self._timer = work
        self._lock = threading.Lock()
        self._lines: dict[Hashable, deque[InvisibleMessage]] = {}
        self._paused: set[Hashable] = set()
        self._closed = False

    def submit(self, lent: Sequence[InvisibleMessage]) -> None:
        begun: list[Hashable] = []
        with self._lock:
            for one in lent:
                key = line_of(one.message)
                if key not in self._lines:
                    begun.append(key)
                    self._lines[key] = deque()
                self._lines[key].append(one)
        self._workers.submit(*[partial(self._work, key) for key in begun])

    def close(self) -> None:
        with self._lock:
            self._closed = True
            left = [one for key in self._paused for one in self._lines[key]]
            for key in self._paused:  # now: one whose pause ends at this moment would go to the listener
                self._lines[key].clear()
            self._paused.clear()
        for one in left:
            self._in_hand.end(one)

    def _work(self, key: Hashable) -> None:
        """Consume the messages of a line until it is empty or has to pause."""
        with self._lock:
            self._paused.discard(key)
        while (lent := self._first(key)) is not None:
            if not self._in_hand.begin(lent, self._timer.lease_ms()):
                self._drop(key)  # it is redelivered, and so are the messages behind it
                continue
            again_s = attempt(self._consume, lent)
            if isinstance(again_s, Failure):
                _log_unsettled(lent, again_s)
                again_s = -1.0
            if again_s is None:
                self._take(key)
            elif again_s < 0 or not self._pauses(key):
                self._drop(key)
            else:
                self._timer.later(again_s, partial(self._workers.submit, partial(self._work, key)))
                return

    def _consume(self, lent: InvisibleMessage) -> float | None:
        """Consume one message. Returns None if it is settled, a negative number if that failed, else the pause until a retry."""
        message, context = lent.message, AcknowledgingContext(lent.message.queue)
        outcome = attempt(self._listener, (message,), context)
        verdict = judge_ordered(outcome, context, self._suspend_ms)
        done = verdict.action is OrderedAction.COMMIT
        if verdict.problem:
            _warn_of_failure(lent, verdict.problem, self._tracebacks.due(outcome))
        self._in_hand.called(lent, done, self._timer.lease_ms())
        if not done and message.delivery_attempt < self._port.policy().max_attempts:
            message.delivery_attempt += 1
            self._in_hand.waits(lent, self._timer.lease_ms())
            return verdict.pause_ms / 1000
        settled = self._settling.done(lent) if done else self._settling.dead(lent)
        return None if settled else -1.0

    def _pauses(self, key: Hashable) -> bool:
        with self._lock:
            if not self._closed:
                self._paused.add(key)
            return not self._closed

    def _first(self, key: Hashable) -> InvisibleMessage | None:
        with self._lock:
            if not self._lines.get(key):
                self._lines.pop(key, None)
                return None
            return self._lines[key][0]

    def _take(self, key: Hashable) -> None:
        with self._lock:
            self._lines[key].popleft()

    def _drop(self, key: Hashable) -> None:
        """Drop messages: they are redelivered in order when their invisible time is over."""
        with self._lock:
            lent = list(self._lines[key])
            self._lines[key].clear()
        for one in lent:
            self._in_hand.end(one)


def pause_s(level: int, attempt: int, policy: GroupPolicy) -> float:
    """Return the pause before a redelivery: that of a delay level, or for level 0 that of the group's settings."""
    if level:
        return positive_duration(DELAY_LEVELS[min(level, len(DELAY_LEVELS)) - 1])
    return policy.pauses_s[min(attempt, len(policy.pauses_s)) - 1]


def _warn_of_failure(lent: InvisibleMessage, why: str, traceback_of: BaseException | None) -> None:
    logger.warning("message %s of %s failed: %s", lent.message.msg_id, lent.message.queue, why, exc_info=traceback_of)


def _log_unsettled(lent: InvisibleMessage, failure: Failure) -> None:
    text = "could not report the result of message %s of %s to the Proxy, it is delivered again"
    failure.log(logger, text, lent.message.msg_id, lent.message.queue)
