"""The coordination of a ``PullConsumer``: its membership in the group, rebalances, commits, and refreshes of routes.

The consumer joins the group with its first subscription. The polling thread commits and refreshes routes. Rebalances run on the
polling thread or on the thread of a timer, because a member must release queues even while it processes messages.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections import deque
from collections.abc import Callable, Collection, Mapping, MutableSet

from rocketmq_spark.base.clock import Clock, Deadline, RateLimit
from rocketmq_spark.base.complaints import LogThrottle
from rocketmq_spark.base.process import signal_safe
from rocketmq_spark.base.threads import Timer
from rocketmq_spark.consumer.assigned import FetchedPart, UncommittedOffsets
from rocketmq_spark.consumer.group_health import COMPARISON_INTERVAL_S, ConsumeModes, SubscriptionConflicts
from rocketmq_spark.consumer.offsets import OffsetRequests
from rocketmq_spark.consumer.polls import Polls
from rocketmq_spark.consumer.reachability import Reachability
from rocketmq_spark.consumer.rebalance import Allocation, StartOffset, allocate_clustering, rebalance_wait_s
from rocketmq_spark.consumer.settings import ConsumerSettings, Subscriptions
from rocketmq_spark.errors import CallTimeout, ConnectionLost, InvalidParameter, RocketMQError, ServerFault
from rocketmq_spark.model import Filter, MessageQueue
from rocketmq_spark.model.membership import Membership, RequestCallback
from rocketmq_spark.ports import GroupMember

logger = logging.getLogger(__name__)

HEARTBEAT_INTERVAL_S = 30.0
MIN_HEARTBEAT_GAP_S = 3.0  # the shortest interval of extra heartbeats to brokers that do not know this member


class PullMembership:
    """The membership of a consumer in its group: subscriptions, heartbeats, and allocated queues."""

    def __init__(
        self,
        member: GroupMember,
        settings: ConsumerSettings,
        subscriptions: Subscriptions,
        offsets: OffsetRequests,
        clock: Clock,
        reachability: Reachability,
    ) -> None:
        self._reachability = reachability
        self._member = member
        self._settings = settings
        self._subscriptions = subscriptions
        self._offsets = offsets
        self._clock = clock
        self._leave_group: Callable[[Deadline], None] | None = None  # None while the consumer is not in the group
        self._next_check_at = 0.0  # when the next rebalance is due
        self._heartbeat_limit = RateLimit(MIN_HEARTBEAT_GAP_S)
        self.subscription_conflicts = SubscriptionConflicts(member, settings.group, subscriptions)
        self.consume_modes = ConsumeModes(member, settings.group, subscriptions)
        self._is_unlisted = False  # whether a broker does not know this member, because the broker restarted
        self._log_throttle = LogThrottle()  # limits the log lines by topic, and by topic and broker
        self.is_balanced = False  # whether the last check allocated the queues of all topics

    @property
    def topics(self) -> Collection[str]:
        return self._subscriptions.topic_filters().keys()

    def set_subscription(self, topic: str, topic_filter: Filter | None, request_handler: RequestCallback) -> None:
        """Subscribe to a topic, or unsubscribe if ``topic_filter`` is None. A heartbeat reports the change to brokers, which
        may then send requests.

        If the queues cannot be fetched, or if this process already has a member of the group, this method raises, and changes
        nothing.
        """
        if topic_filter is not None:
            self._offsets.queues(topic)
        if self._leave_group is None:
            self._leave_group = self._member.join(
                self._settings.group, self.membership, request_handler, HEARTBEAT_INTERVAL_S
            )
        if topic_filter is not None:
            self._subscriptions.add(topic, topic_filter)
        else:
            self._subscriptions.remove(topic)
        try:
            self._member.heartbeat(self._offsets.request_deadline())
        finally:  # the next check is due even after Ctrl-C
            self._next_check_at = 0.0

    def membership(self) -> Membership:
        """Return the content of heartbeats."""
        topic_filters = self._subscriptions.topic_filters()
        return Membership(
            {topic: topic_filter.filter for topic, topic_filter in topic_filters.items()},
            {topic: topic_filter.version_ms for topic, topic_filter in topic_filters.items()},
            "CONSUME_ACTIVELY",
        )

    def check_soon(self) -> None:
        """Make the next check due, because the group has changed."""
        self._next_check_at = 0.0

    def wait_s(self) -> float:
        """Return the seconds until the next check."""
        return max(0.0, self._next_check_at - self._clock.now())

    def allocate(self, owned_queues: Collection[MessageQueue]) -> dict[MessageQueue, StartOffset | None]:
        """Return the queues allocated to this member, with the start offset of new queues, and None for owned queues.

        If the queues or members of a topic cannot be fetched, the owned queues of the topic stay. If a start offset cannot be
        read, the next check, a second later, tries to read it again.
        """
        self.is_balanced, self._is_unlisted = True, False
        # The time is set before the requests, so that a call of ``check_soon`` during the requests has an effect.
        self._next_check_at = self._clock.now() + rebalance_wait_s(True, receives_notices=self._member.receives_notices)
        start_offsets: dict[MessageQueue, StartOffset | None] = {}
        unavailable_brokers: set[str] = set()  # of each of these brokers, only the first queue waits for an answer
        for topic in self.topics:
            allocation = self._allocation_of(topic)
            owned_queues_of_topic = {queue for queue in owned_queues if queue.topic == topic}
            for queue in sorted(owned_queues_of_topic if allocation.queues is None else allocation.queues):
                if queue in owned_queues_of_topic:
                    start_offsets[queue] = None
                elif queue.broker_name not in unavailable_brokers:
                    start_offset = self._start_offset(queue, unavailable_brokers)
                    if start_offset is not None:
                        start_offsets[queue] = start_offset
        if self._is_unlisted and self._heartbeat_limit.due():
            # The heartbeat registers this member again, and makes the broker notify all members.
            self._member.heartbeat(self._offsets.request_deadline())
        if not self.is_balanced:
            self._next_check_at = min(self._next_check_at, self._clock.now() + rebalance_wait_s(False))
        return start_offsets

    def _start_offset(self, queue: MessageQueue, unavailable_brokers: MutableSet[str]) -> StartOffset | None:
        try:
            start_offset = self._offsets.start_offset_of(queue)
        except RocketMQError as e:
            self.is_balanced = False
            self._reachability.on_failure(queue.broker_name, e)
            level = self._log_throttle.level((queue.topic, queue.broker_name), e)
            logger.log(level, "%s is assigned, but its start offset cannot be read yet: %s", queue, e)
            if isinstance(e, CallTimeout | ConnectionLost):  # other errors may concern a single queue
                unavailable_brokers.add(queue.broker_name)
            return None
        self._reachability.on_queue_read(queue.broker_name)
        self._log_throttle.mark_resolved((queue.topic, queue.broker_name))
        return start_offset

    def _allocation_of(self, topic: str) -> Allocation:
        try:
            queues = self._offsets.queues(topic)
            members = self._member.members(self._settings.group, topic, self._offsets.request_deadline())
        except RocketMQError as e:
            self._reachability.on_failure(topic, e, self._member.receives_notices)
            self._log_unchanged_assignment(topic, e)
            self._is_unlisted |= isinstance(e, ServerFault)
            return Allocation(None)
        # A Proxy answers this request without asking a broker, so its answer does not show that the brokers can be reached. A
        # member receives no notices from a Proxy.
        self._reachability.on_answer(topic, self._member.receives_notices)
        self._is_unlisted |= self._member.client_id not in members
        allocation = allocate_clustering(self._settings.allocate, self._member.client_id, queues, members)
        if allocation.problem is not None or not members:
            self._log_unchanged_assignment(topic, allocation.problem or "no member is known yet")
        else:
            self._log_throttle.mark_resolved(topic)
        return allocation

    def _log_unchanged_assignment(self, topic: str, reason: object) -> None:
        self.is_balanced = False
        logger.log(
            self._log_throttle.level(topic, reason), "the assignment of topic %s stays unchanged: %s", topic, reason
        )

    def leave(self) -> None:
        """Unregister from the brokers, so that other members take over."""
        if self._leave_group is not None:
            self._leave_group(self._offsets.request_deadline())
            self._leave_group = None  # set after the call, so that a second call repeats an interrupted call


BACKGROUND_CHECK_INTERVAL_S = 1.0  # the interval of checks between polls
# The interval at which all offsets are committed, even offsets that were committed before. This corrects older offsets on
# brokers: a master that was down may return with older offsets, or a disconnected member may commit older offsets of a queue
# that this member owns now. (Java commits all offsets each time.)
RECOMMIT_INTERVAL_S = 30.0
MIN_WAIT_S = 0.01  # the minimum wait of a poll while another thread rebalances


class Upkeep:
    """Runs the rebalances and commits of one consumer."""

    def __init__(
        self,
        settings: ConsumerSettings,
        polls: Polls,
        offsets: OffsetRequests,
        group: PullMembership,
        clock: Clock,
        timer: Timer,
    ) -> None:
        self._settings = settings
        self._polls = polls
        self._offsets = offsets
        self._group = group
        self._clock = clock
        self._timer = timer
        self._rebalance_lock = threading.Lock()  # allows one rebalance at a time
        # The id of the thread that has ``_rebalance_lock``. The id has no meaning while the lock is free.
        self._rebalancing_thread: int | None = None
        self._commit_lock = threading.RLock()  # allows one commit at a time; reentrant for commits in signal handlers
        self._uncommitted_offsets: UncommittedOffsets = {}  # finished offsets of released queues, until they are committed
        self._pending_resets: deque[tuple[MessageQueue, int, bool]] = deque()  # pending calls of ``on_reset``
        polls.on_released_queue_reset = self.on_reset
        self._runs_in_background = False  # whether the timer checks between polls
        self._next_commit_at = clock.now() + settings.auto_commit_interval_s
        self._next_recommit_at = clock.now() + RECOMMIT_INTERVAL_S
        self._next_refresh_at = clock.now() + settings.route_refresh_s

    def start_poll(self, timeout_s: float) -> Deadline:
        """Start a poll. If a commit is due, commit offsets. If a refresh is due, refresh the routes. Returns the deadline of
        the poll.

        Messages that the last poll returned are finished. Messages that the last poll took but did not return wait again.
        """
        deadline = Deadline.after(timeout_s)
        now = self._clock.now()
        repeat_commits = now >= self._next_recommit_at
        if repeat_commits:
            self._next_recommit_at = now + RECOMMIT_INTERVAL_S
        self._polls.start_poll(repeat_commits)
        if self._settings.auto_commit and now >= self._next_commit_at:
            self._next_commit_at = now + self._settings.auto_commit_interval_s
            self.commit_finished()
        if now >= self._next_refresh_at:
            self._next_refresh_at = now + self._settings.route_refresh_s
            for topic in sorted({queue.topic for queue in self._polls.assigned_queues()}):
                try:
                    self._offsets.queues(topic)
                except RocketMQError as e:
                    logger.info("the route of %s cannot be refreshed: %s", topic, e)
                    if isinstance(e, CallTimeout | ConnectionLost):
                        break  # requests for the other topics would go to the same name servers
        return deadline

    def next_parts(self, deadline: Deadline, max_parts: int) -> list[FetchedPart]:
        """Wait for messages until ``deadline``, and rebalance when due.

        Raises ``ConnectionLost`` if no broker has answered for a minute since the first poll.
        """
        reachability = self._polls.reachability
        while True:
            answer_deadline = deadline.within(reachability.remaining_s())
            parts = self._next_parts(answer_deadline, max_parts)
            if parts or self._polls.closed:
                return parts
            reachability.check_empty_poll()
            if deadline.expired or not answer_deadline.expired:
                return []

    def _next_parts(self, deadline: Deadline, max_parts: int) -> list[FetchedPart]:
        while True:
            if not self._group.topics:
                return self._polls.wait(deadline, max_parts)
            try:
                # Cached messages are returned without a check of the group, because the check may hang. The timer also checks
                # the group.
                if self._runs_in_background and (parts := self._polls.wait(Deadline.after(0), max_parts)):
                    return parts
                self.rebalance_if_due()
                self._polls.reachability.raise_permanent_failure()
                parts = self._polls.wait(deadline.within(max(MIN_WAIT_S, self._group.wait_s())), max_parts)
            except (InvalidParameter, ServerFault):  # errors for a missing queue (``ServerFault``: brokers before 5.0)
                if not self._is_gone(self._polls.failed_queue):
                    raise
                self.rebalance_if_due()
                continue
            if parts or deadline.expired or self._polls.closed:
                return parts

    def _is_gone(self, queue: MessageQueue | None) -> bool:
        """Return whether ``queue``, which its broker rejected, no longer exists. If the queue no longer exists, make the next
        check due.

        A queue can disappear if its topic gets fewer read queues, or is created again with fewer queues.
        """
        try:
            if queue is None or queue in self._offsets.queues(queue.topic, refresh=True):
                return False
        except RocketMQError as e:
            logger.info("cannot check whether queue %s still exists: %s", queue, e)
            return False
        logger.warning("queue %s no longer exists", queue)
        self._group.check_soon()
        return True

    def start_background(self) -> None:
        """Start to rebalance on the timer, too, so that rebalances also run between polls."""
        if self._runs_in_background:
            self._timer.call_later(0, self.rebalance_if_due)
            return
        self._timer.call_later(BACKGROUND_CHECK_INTERVAL_S, self._check_in_background)
        # The flag is set after the first call of the timer. If the timer cannot start its thread, the next call of this method
        # tries again.
        self._runs_in_background = True
        self._timer.call_repeatedly(
            COMPARISON_INTERVAL_S,
            lambda: self._group.subscription_conflicts.check(self._offsets.request_deadline()),
            COMPARISON_INTERVAL_S,
        )
        self._timer.call_repeatedly(
            COMPARISON_INTERVAL_S, lambda: self._group.consume_modes.check(self._offsets.request_deadline()), 0.0
        )

    def _check_in_background(self) -> None:
        try:
            self.rebalance_if_due()
        finally:
            self._timer.call_later(BACKGROUND_CHECK_INTERVAL_S, self._check_in_background)

    def on_group_change(self) -> None:
        """Rebalance soon, because a broker reported a change of the group."""
        self._group.check_soon()
        self._polls.wake()
        self._timer.call_later(0, self.rebalance_if_due)

    def on_reset(self, queue: MessageQueue, offset: int, was_released: bool = True) -> None:
        """Apply a reset of a queue that is not assigned, on the timer.

        ``was_released`` means that the reset came with the answer to a pull of a released queue. No other pull reports the reset
        again, so the offset is committed for the next owner. Without ``was_released``, a broker reported the reset to all
        members, and the reset matters only if a rebalance is acquiring the queue.
        """
        if not was_released and not self._rebalance_lock.locked():
            return
        self._pending_resets.append((queue, offset, was_released))
        with contextlib.suppress(RuntimeError):  # if the timer cannot start its thread, ``close`` applies the reset
            self._timer.call_later(0, self._apply_resets_exclusively)

    def _apply_resets_exclusively(self) -> None:
        with self._rebalance_lock:  # a running rebalance may be reading the start offset of the queue
            self._rebalancing_thread = threading.get_ident()
            self._apply_resets()

    def _apply_resets(self) -> None:
        """Commit pending resets, because a release may have committed offsets from before the resets."""
        with contextlib.suppress(IndexError):
            while True:
                queue, offset, was_released = self._pending_resets.popleft()
                self._uncommitted_offsets = {
                    other_queue: other_offset
                    for other_queue, other_offset in self._uncommitted_offsets.items()
                    if other_queue != queue
                }
                owned_offsets = self._polls.reset({queue: offset})
                if was_released:
                    text = "%s was released, and its broker reset it to offset %d: committing the offset for the next owner"
                    logger.warning(text, queue, offset)
                elif owned_offsets:
                    logger.warning("%s was assigned meanwhile: resetting it to offset %d", queue, offset)
                self.commit({queue: offset} if was_released else owned_offsets)

    def rebalance_if_due(self) -> None:
        """Rebalance if a check is due and no thread is rebalancing."""
        if self._group.topics and not self._group.wait_s() and not self._rebalance_lock.locked():
            self.rebalance()

    def apply_assignment(self, start_offsets: Mapping[MessageQueue, StartOffset | None]) -> None:
        """Assign these queues (see ``AssignedQueues.assign``), and commit the finished offsets of released queues.

        If the group has no offset for a new queue, the start offset is committed, too. Without this commit, the next owner
        might start at a later offset after a crash, and skip messages.
        """
        if not self._settings.auto_commit:
            self._polls.assign(start_offsets)
            return
        # Each function is called after earlier commits have ended, so that the returned offsets include the effects of an
        # earlier reset.
        self._commit_one_at_a_time(lambda: self._assign_and_commit(start_offsets))
        self._commit_one_at_a_time(self._polls.never_committed_offsets)

    def rebalance(self) -> None:
        """Rebalance now. If another thread is rebalancing, wait for it first. If this thread is rebalancing already, do
        nothing.

        The ``with`` statement releases the lock even after Ctrl-C.
        """
        if self._rebalance_lock.locked() and self._rebalancing_thread == threading.get_ident():
            return
        with self._rebalance_lock:
            self._rebalancing_thread = threading.get_ident()
            try:
                self._rebalance()
            finally:
                self._rebalancing_thread = None

    @signal_safe
    def close(self) -> None:
        """Stop rebalances, release all queues, commit finished offsets with option 'autoCommit', and leave the group.

        After an interruption, the method may be called again.
        """
        self._timer.close()
        with self._commit_lock:
            try:
                self._assign_and_commit({})
                self._apply_resets()
            finally:
                self._group.leave()

    def _rebalance(self) -> None:
        if self._polls.closed:
            return
        owned_queues = self._polls.assigned_queues()
        try:
            start_offsets = self._group.allocate(owned_queues)
            if start_offsets.keys() != set(owned_queues) or self._uncommitted_offsets:
                text = "group %s: %d queues are assigned now, %d before"
                logger.info(text, self._settings.group, len(start_offsets), len(owned_queues))
                self.apply_assignment(start_offsets)
        except BaseException:
            # After an error or Ctrl-C, the assignment may be incomplete, so the regular check in 20 s is too late.
            self._group.check_soon()
            raise

    def commit_finished(self) -> dict[MessageQueue, RocketMQError]:
        """Commit all finished offsets, after the commits of other threads. Returns the errors by queue."""
        return self._commit_one_at_a_time(self._polls.finish_returned_messages)

    def commit(self, offsets: Mapping[MessageQueue, int]) -> dict[MessageQueue, RocketMQError]:
        """Commit offsets, after the commits of other threads. Returns the errors by queue.

        Only one commit runs at a time, because an offset from before a reset must not reach the broker after the offset of the
        reset.
        """
        return self._commit_one_at_a_time(lambda: offsets)

    def _commit_one_at_a_time(
        self, get_offsets: Callable[[], Mapping[MessageQueue, int]]
    ) -> dict[MessageQueue, RocketMQError]:
        with self._commit_lock:
            return self._send_commit(get_offsets())

    def _assign_and_commit(self, start_offsets: Mapping[MessageQueue, StartOffset | None]) -> UncommittedOffsets:
        """Replace the assigned queues, and commit the finished offsets of the released queues.

        Queues that an interrupted call released are included. Returns an empty dict, because the caller need not commit any
        offset.
        """
        self._uncommitted_offsets = {
            queue: offset for queue, offset in self._uncommitted_offsets.items() if queue not in start_offsets
        }
        self._polls.assign(start_offsets, self._uncommitted_offsets)
        if self._settings.auto_commit:
            self._send_commit(self._uncommitted_offsets)
        self._uncommitted_offsets = {}
        return self._uncommitted_offsets

    def _send_commit(self, offsets: Mapping[MessageQueue, int]) -> dict[MessageQueue, RocketMQError]:
        errors = self._offsets.commit(offsets)
        self._polls.mark_committed({queue: offset for queue, offset in offsets.items() if queue not in errors})
        return errors
