"""The rebalances of one member of a group.

``Rebalancing`` requests queues and members from brokers, decides with ``consumer/rebalance``, and applies the decision. Mirrors
``RebalanceService``. ``Rebalancing`` has its own thread, so that a broker that hangs delays neither pulls, listeners nor
commits.
"""

from __future__ import annotations

import contextlib
import logging
import math
import threading
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TypeVar

from rocketmq_spark.base.clock import Deadline
from rocketmq_spark.base.codes import RETRY_PREFIX
from rocketmq_spark.base.complaints import LogThrottle
from rocketmq_spark.base.threads import Failure, Timer, capture
from rocketmq_spark.consumer import rebalance
from rocketmq_spark.consumer.member_state import MemberState
from rocketmq_spark.consumer.ownership import Ownership
from rocketmq_spark.consumer.process_queue import ProcessQueue, divide_thresholds
from rocketmq_spark.consumer.settings import ConsumerSettings, Subscriptions
from rocketmq_spark.errors import (
    AccessDenied,
    NotSupported,
    OptionError,
    RocketMQError,
    ServerFault,
)
from rocketmq_spark.model import MessageQueue
from rocketmq_spark.ports import GroupMember
from rocketmq_spark.queues.environment import EnvironmentQueues

logger = logging.getLogger(__name__)

TIMEOUT_S = 3.0  # the timeout of requests
RELEASE_RETRY_S = 0.5  # pause before the next run if a listener still has messages of a released queue

T = TypeVar("T")


class Rebalancing:
    """Runs the rebalances of one member on ``timer``. Only ``Reregistration`` uses the same timer."""

    def __init__(
        self,
        port: GroupMember,
        settings: ConsumerSettings,
        state: MemberState,
        subscriptions: Subscriptions,
        ownership: Ownership,
        timer: Timer,
    ) -> None:
        self._port = port
        self._settings = settings
        self._member_state = state
        self._subscriptions = subscriptions
        self._ownership = ownership
        self._timer = timer
        self._environment_queues = EnvironmentQueues(settings.environment)
        self.balanced_topics: set[str] = set()  # topics of which this member once had all its assigned queues
        self._lock = threading.Lock()
        self._next_run_ms = math.inf  # when the next run is due
        self._last_run_ms = -math.inf  # when the last run started
        self._is_started = self._is_stopped = self._is_closed = False
        self._pending_resets: deque[Callable[[], None]] = deque()  # calls of ``Ownership.reset`` to make
        # Whether a broker does not know this member, because the broker restarted or is new. If so, a heartbeat is sent at
        # once, because until the heartbeat, the broker's list of the members does not include this member.
        self._is_unlisted = False
        # Failures in a row, by topic and subject of the request.
        self._failure_counts: Counter[tuple[str, str]] = Counter()
        self._log_throttle = LogThrottle()  # limits the log lines of each topic and subject of a request

    def schedule(self, delay_s: float = 0.0) -> None:
        """Rebalance in ``delay_s`` seconds, unless a run is due earlier; at most once per second."""
        with self._lock:
            if self._is_stopped or not self._is_started:
                return
            now_ms = self._timer.now_ms()
            due_ms = max(now_ms + 1000 * delay_s, self._last_run_ms + 1000 * rebalance.MIN_REBALANCE_INTERVAL_S)
            if due_ms >= self._next_run_ms:
                return
            self._timer.call_later((due_ms - now_ms) / 1000, partial(self._run_if_due, due_ms))
            self._next_run_ms = due_ms  # if the timer cannot start its thread, the next call tries again

    def start(self) -> None:
        """Rebalance now, after the brokers know this member.

        Calls of ``schedule`` before ``start`` are ignored. They would start a run too early, and the run that this method
        starts would have to wait for a second.
        """
        self._is_started = True
        self.schedule()

    def wait_for_first_run(self, wait_s: float) -> None:
        """Wait for a run that is due now."""
        self._timer.drain(wait_s)

    def stop(self) -> None:
        """Start no more runs."""
        with self._lock:
            self._is_stopped = True

    def close(self, wait_s: float) -> None:
        """Start no more runs, and wait up to ``wait_s`` for a run to end. If a run goes on after the timeout, the run adds no
        queue after ``Ownership.leave``.
        """
        self.stop()
        self._timer.close(wait_s)
        self._is_closed = True
        self.apply_resets()

    def correct_offset_soon(self, queue: ProcessQueue, offset: int) -> None:
        """Correct an offset that does not exist, on the rebalance thread, because ``Pulling`` must not wait."""
        self._run_soon(partial(self._ownership.correct_offset, queue, offset))

    def reset(self, offsets: Mapping[MessageQueue, int]) -> None:
        """Reset queues to ``offsets``. If the consumer is stopping, the offsets are committed for the next owner before the
        consumer leaves.
        """
        self.reset_soon(offsets)
        if self._is_closed:
            self.apply_resets()

    def reset_soon(self, offsets: Mapping[MessageQueue, int]) -> None:
        """Reset queues to ``offsets`` without waiting for brokers. ``RunningConsumer.stop`` applies resets that are still
        pending.
        """
        self._pending_resets.append(partial(self._ownership.reset, dict(offsets)))
        self._run_soon(self.apply_resets)

    def run(self) -> bool:
        """Rebalance all topics; returns whether this member now has exactly its assigned queues of each topic."""
        topics = self._subscriptions.filters()
        self._ownership.drop(rebalance.unsubscribed_queues(self._owned_queues(), topics.keys()))
        all_balanced, any_changed, self._is_unlisted = True, False, False
        for topic in topics:
            result = capture(self._rebalance_topic, topic)
            if isinstance(result, Failure):  # one topic's failure must not affect the others
                result.log(logger, "topic %s could not be rebalanced", topic)
                result = False, False
            is_balanced, is_changed = result
            all_balanced &= is_balanced
            any_changed |= is_changed
        if any_changed or self._is_unlisted:
            self._port.heartbeat(Deadline.after(TIMEOUT_S))
        return all_balanced

    def _run_if_due(self, due_ms: float) -> None:
        with self._lock:
            if due_ms != self._next_run_ms or self._is_stopped:
                return
            self._next_run_ms, self._last_run_ms = math.inf, self._timer.now_ms()
        is_balanced = False
        try:
            is_balanced = self.run()
        finally:
            self.schedule(
                rebalance.rebalance_wait_s(
                    is_balanced, self._settings.rebalance_interval_s, self._port.receives_notices
                )
            )

    def apply_resets(self) -> None:
        """Apply pending resets; waits for brokers."""
        with contextlib.suppress(IndexError):
            while True:
                result = capture(self._pending_resets.popleft())
                if isinstance(result, Failure):
                    result.log(logger, "group %s: offsets could not be reset", self._settings.group)

    def _run_soon(self, work: Callable[[], None]) -> None:
        def run_then_rebalance() -> None:
            try:
                work()
            finally:
                self.schedule()

        self._timer.call_later(0, run_then_rebalance)

    def _rebalance_topic(self, topic: str) -> tuple[bool, bool]:
        """Rebalance a topic; returns whether it is balanced, and whether queues changed."""
        allocation = self._allocation_of(topic)
        if allocation.problem is not None:
            level = self._log_throttle.level((topic, "strategy"), allocation.problem)
            logger.log(
                level,
                "the assignment of topic %s stays unchanged, because the allocation strategy failed: %s",
                topic,
                allocation.problem,
            )
        change = rebalance.queue_change(self._owned_queues(), topic, allocation, self._timer.now_ms())
        dropped_queues = self._ownership.drop(change.queues_to_drop)
        self.apply_resets()  # the next owner must read the offset of a reset that came during the release
        if allocation.queues is not None:
            self._ownership.drop_foreign_resets(topic, allocation.queues)
        added_queues = self._ownership.add(change.queues_to_add)
        if len(dropped_queues) < len(change.queues_to_drop):
            self.schedule(RELEASE_RETRY_S)
        if dropped_queues or added_queues:
            self._record_change(topic, dropped_queues, added_queues)
        is_balanced = rebalance.is_balanced(self._owned_queues(), topic, allocation)
        if is_balanced and allocation.queues is not None:
            self.balanced_topics.add(topic)
        return is_balanced, bool(dropped_queues or added_queues)

    def _allocation_of(self, topic: str) -> rebalance.Allocation:
        deadline = Deadline.after(TIMEOUT_S)
        queues = self._answer_or_none(topic, "queues", lambda: self.queues(topic, deadline))
        if not self._settings.clustering:
            return rebalance.allocate_broadcasting(queues)
        if queues is None:
            return rebalance.UNKNOWN_ALLOCATION
        members = self._answer_or_none(
            topic, "members", lambda: self._port.members(self._settings.group, topic, deadline)
        )
        self._is_unlisted |= members is not None and self._port.client_id not in members
        return rebalance.allocate_clustering(self._settings.allocate, self._port.client_id, queues, members)

    def queues(self, topic: str, deadline: Deadline) -> Sequence[MessageQueue]:
        """Return the queues that the group shares. Raises ``OptionError`` if no queue belongs to the environment."""
        return self._environment_queues(self._port.queues(topic, deadline))

    def _answer_or_none(self, topic: str, subject: str, request: Callable[[], T]) -> T | None:
        """Return the answer to a request; None if the request fails. A failure is logged as a warning if it is the second or a
        later failure in a row, or if a retry would not help, as after denied access.
        """
        try:
            answer = request()
        except OptionError as e:
            level = self._log_throttle.level((topic, subject), e)
            logger.log(level, "the assignment of topic %s stays unchanged: %s", topic, e)
            return None
        except RocketMQError as e:
            self._failure_counts[topic, subject] += 1
            self._is_unlisted |= subject == "members" and isinstance(e, ServerFault)
            is_lasting = self._failure_counts[topic, subject] > 1 or isinstance(e, AccessDenied | NotSupported)
            should_warn = is_lasting and not topic.startswith(RETRY_PREFIX)
            level = self._log_throttle.level((topic, subject), e) if should_warn else logging.INFO
            text = "group %s: cannot read the %s of topic %s, its assignment stays unchanged: %s"
            logger.log(level, text, self._settings.group, subject, topic, e)
            return None
        self._failure_counts.pop((topic, subject), None)
        self._log_throttle.mark_resolved((topic, subject))
        return answer

    def _owned_queues(self) -> dict[MessageQueue, ProcessQueue]:
        with self._member_state.lock:
            return dict(self._member_state.queues)

    def _record_change(
        self, topic: str, dropped_queues: Sequence[MessageQueue], added_queues: Sequence[MessageQueue]
    ) -> None:
        self._subscriptions.touch(topic)
        with self._member_state.lock:
            queue_count = sum(queue.topic == topic for queue in self._member_state.queues)
            self._member_state.counts["rebalances"] += 1
            settings = self._settings
            self._member_state.thresholds[topic] = divide_thresholds(
                settings.thresholds, settings.topic_max_count, settings.topic_max_bytes, queue_count
            )
        logger.info(
            "group %s, topic %s: %d queues revoked, %d assigned, %d now",
            settings.group,
            topic,
            len(dropped_queues),
            len(added_queues),
            queue_count,
        )
