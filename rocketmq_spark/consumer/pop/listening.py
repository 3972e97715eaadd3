"""Passes messages from a Proxy to a listener: in any order, or in the order of each message group.

Mirrors ``StandardConsumeService`` and ``FifoConsumeService`` of RocketMQ's Java client for gRPC: each call gets one message.
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
from rocketmq_spark.consumer.listener import (
    AcknowledgingContext,
    Context,
    Listener,
    OrderedAction,
    judge_concurrent,
    judge_ordered,
)
from rocketmq_spark.consumer.listener_pool import ListenerPool
from rocketmq_spark.consumer.pop.in_hand import Acknowledger, InvisibleMessage, UnackedMessages, ordering_key_of
from rocketmq_spark.consumer.settings import ConsumerSettings
from rocketmq_spark.model.message import GroupPolicy
from rocketmq_spark.options.parsing import positive_duration
from rocketmq_spark.ports import PopMember

logger = logging.getLogger(__name__)


class PopConsumeService(Protocol):
    """Passes messages to a listener."""

    def submit(self, messages: Sequence[InvisibleMessage]) -> None:
        """Queue messages of one topic, in their order."""

    def close(self) -> None:
        """Start no more retries."""


class StandardConsumeService:
    """Calls ``listener`` on the threads of ``workers``. The Proxy delivers failed messages again later."""

    def __init__(
        self,
        listener: Listener,
        port: PopMember,
        unacked: UnackedMessages,
        acknowledger: Acknowledger,
        workers: ListenerPool,
        timer: Timer,
    ) -> None:
        self._listener = listener
        self._port = port
        self._tracebacks = Tracebacks()
        self._unacked = unacked
        self._acknowledger = acknowledger
        self._workers = workers
        self._timer = timer

    def submit(self, messages: Sequence[InvisibleMessage]) -> None:
        self._workers.submit(*[partial(self._consume, invisible) for invisible in messages])

    def close(self) -> None:
        """Do nothing: the Proxy retries."""

    def _consume(self, invisible: InvisibleMessage) -> None:
        if not self._unacked.start_call(invisible, self._timer.lease_ms()):
            return
        context = Context(invisible.message.queue)
        outcome = attempt(self._listener, (invisible.message,), context)
        result = attempt(self._settle, invisible, outcome, context)
        if isinstance(result, Failure):
            _log_unreported(invisible, result)
            self._unacked.remove(invisible)

    def _settle(self, invisible: InvisibleMessage, outcome: object, context: Context) -> None:
        message, verdict = invisible.message, judge_concurrent(outcome, context, 1)
        if verdict.problem:
            _warn_of_failure(invisible, verdict.problem, self._tracebacks.due(outcome))
        self._unacked.record_outcome(invisible, bool(verdict.done_count), self._timer.lease_ms())
        if verdict.done_count:
            self._acknowledger.ack(invisible)
        elif verdict.level < 0:
            self._acknowledger.forward_to_dlq(invisible)
        else:
            attempts, policy = message.delivery_attempt, self._port.policy()
            self._acknowledger.redeliver_later(
                invisible, redelivery_pause_s(verdict.level, attempts, policy), attempts >= policy.max_attempts
            )


class FifoConsumeService:
    """Calls ``listener`` with the messages of a message group one by one, each after the acknowledgement of the previous one.

    Messages without a group keep the order of their queue. A failed message is retried in place; after the group's last
    attempt it becomes a dead letter.
    """

    def __init__(
        self,
        listener: Listener,
        port: PopMember,
        settings: ConsumerSettings,
        unacked: UnackedMessages,
        acknowledger: Acknowledger,
        workers_and_timer: tuple[ListenerPool, Timer],
    ) -> None:
        self._listener = listener
        self._port = port
        self._tracebacks = Tracebacks()
        self._suspend_ms = round(1000 * settings.suspend_time_s)
        self._unacked = unacked
        self._acknowledger = acknowledger
        self._workers, self._timer = workers_and_timer
        self._lock = threading.Lock()
        self._messages_by_key: dict[Hashable, deque[InvisibleMessage]] = {}
        self._paused_keys: set[Hashable] = set()
        self._closed = False

    def submit(self, messages: Sequence[InvisibleMessage]) -> None:
        new_keys: list[Hashable] = []
        with self._lock:
            for invisible in messages:
                key = ordering_key_of(invisible.message)
                if key not in self._messages_by_key:
                    new_keys.append(key)
                    self._messages_by_key[key] = deque()
                self._messages_by_key[key].append(invisible)
        self._workers.submit(*[partial(self._consume_key, key) for key in new_keys])

    def close(self) -> None:
        with self._lock:
            self._closed = True
            dropped = [invisible for key in self._paused_keys for invisible in self._messages_by_key[key]]
            for key in self._paused_keys:  # under the lock: otherwise a pause that ends now would start another call
                self._messages_by_key[key].clear()
            self._paused_keys.clear()
        for invisible in dropped:
            self._unacked.remove(invisible)

    def _consume_key(self, key: Hashable) -> None:
        """Consume the messages of a key until none is left, or until one has to pause before a retry."""
        with self._lock:
            self._paused_keys.discard(key)
        while (invisible := self._first_message(key)) is not None:
            if not self._unacked.start_call(invisible, self._timer.lease_ms()):
                self._drop_all(key)  # the Proxy delivers it again, and the messages behind it, too
                continue
            pause = attempt(self._consume, invisible)
            if isinstance(pause, Failure):
                _log_unreported(invisible, pause)
                pause = -1.0
            if pause is None:
                self._remove_first(key)
            elif pause < 0 or not self._pause_key(key):
                self._drop_all(key)
            else:
                self._timer.later(pause, partial(self._workers.submit, partial(self._consume_key, key)))
                return

    def _consume(self, invisible: InvisibleMessage) -> float | None:
        """Consume one message. Returns None if it is settled, -1 if that failed, and otherwise the pause before a retry."""
        message, context = invisible.message, AcknowledgingContext(invisible.message.queue)
        outcome = attempt(self._listener, (message,), context)
        verdict = judge_ordered(outcome, context, self._suspend_ms)
        is_done = verdict.action is OrderedAction.COMMIT
        if verdict.problem:
            _warn_of_failure(invisible, verdict.problem, self._tracebacks.due(outcome))
        self._unacked.record_outcome(invisible, is_done, self._timer.lease_ms())
        if not is_done and message.delivery_attempt < self._port.policy().max_attempts:
            message.delivery_attempt += 1
            self._unacked.requeue(invisible, self._timer.lease_ms())
            return verdict.pause_ms / 1000
        is_confirmed = self._acknowledger.ack(invisible) if is_done else self._acknowledger.forward_to_dlq(invisible)
        return None if is_confirmed else -1.0

    def _pause_key(self, key: Hashable) -> bool:
        with self._lock:
            if not self._closed:
                self._paused_keys.add(key)
            return not self._closed

    def _first_message(self, key: Hashable) -> InvisibleMessage | None:
        with self._lock:
            if not self._messages_by_key.get(key):
                self._messages_by_key.pop(key, None)
                return None
            return self._messages_by_key[key][0]

    def _remove_first(self, key: Hashable) -> None:
        with self._lock:
            self._messages_by_key[key].popleft()

    def _drop_all(self, key: Hashable) -> None:
        """Drop the messages of a key. The Proxy delivers them again, in their order, when their invisible time is over."""
        with self._lock:
            dropped = list(self._messages_by_key[key])
            self._messages_by_key[key].clear()
        for invisible in dropped:
            self._unacked.remove(invisible)


def redelivery_pause_s(delay_level: int, attempt: int, policy: GroupPolicy) -> float:
    """Return the pause before a redelivery: the pause of a delay level, or for level 0 the pause that the group has."""
    if delay_level:
        return positive_duration(DELAY_LEVELS[min(delay_level, len(DELAY_LEVELS)) - 1])
    return policy.pauses_s[min(attempt, len(policy.pauses_s)) - 1]


def _warn_of_failure(invisible: InvisibleMessage, problem: str, error: BaseException | None) -> None:
    logger.warning(
        "message %s of %s failed: %s", invisible.message.msg_id, invisible.message.queue, problem, exc_info=error
    )


def _log_unreported(invisible: InvisibleMessage, failure: Failure) -> None:
    text = "could not report the result of message %s of %s to the Proxy, which delivers it again"
    failure.log(logger, text, invisible.message.msg_id, invisible.message.queue)
