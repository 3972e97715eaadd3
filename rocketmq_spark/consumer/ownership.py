"""Starts and releases queues as a rebalance decided, in an order that loses no messages.

Mirrors ``RebalanceImpl.updateProcessQueueTableInRebalance`` and ``RebalancePushImpl``. A released queue is dropped first, so
that no listener gets more of its messages. Then its offset is committed, its lock is released, and the queue is forgotten.
While an ordered listener has messages of the queue, the queue is only dropped. The offset is committed, and the lock is
released, when the listener returns, so that the committed offset takes the result of the listener into account. (Java ignores
this result, and the next owner repeats the messages.)
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

from rocketmq_spark.base.clock import Deadline
from rocketmq_spark.base.complaints import LogThrottle
from rocketmq_spark.base.threads import Timer
from rocketmq_spark.consumer.member_state import MemberState
from rocketmq_spark.consumer.offsets import OffsetStore
from rocketmq_spark.consumer.ordered import OrderedConsumeService
from rocketmq_spark.consumer.process_queue import ProcessQueue
from rocketmq_spark.consumer.rebalance import (
    ConsumeFrom,
    ConsumeFromWhere,
    StartOffset,
    StartOffsetRequests,
    start_offset,
)
from rocketmq_spark.consumer.settings import ConsumerSettings
from rocketmq_spark.errors import CallTimeout, ConnectionLost, RocketMQError
from rocketmq_spark.model import MessageQueue
from rocketmq_spark.ports import GroupMember

logger = logging.getLogger(__name__)

TIMEOUT_S = 3.0  # the timeout of requests
# The timeout of lock renewals through a Proxy. A Proxy does not answer for a broker that is down. The timeout is short, because
# listeners keep running until it ends.
NO_NOTICES_TIMEOUT_S = 1.0
HANDOVER_MS = 60_000  # how long a queue is in handover after its release, or after an attempt to start the queue
# After this time, other members get a revoked queue even if a listener still has messages of the queue.
FORCED_UNLOCK_DELAY_MS = 20_000
# If a queue appears later than this after the subscription to its topic, the queue is new, or its broker did not answer before.
START_PERIOD_MS = 5_000

StartPulls = Callable[[ProcessQueue, int], None]


class Ownership:
    """The queues of one member. The owner may set these attributes before the first queue:

    Attributes:
        subscribed_ms: Returns the time at which a topic was subscribed to, by ``Timer.lease_ms``.
        make_queue: Creates a process queue.
        ordered_service: Calls the listener in order. If a call has messages of a queue, the queue is released after the call.
    """

    def __init__(
        self,
        port: GroupMember,
        settings: ConsumerSettings,
        state: MemberState,
        store: OffsetStore,
        start_pulls: StartPulls,
        timer: Timer,
    ) -> None:
        self._port = port
        self._settings = settings
        self._member_state = state
        self._store = store
        self._start_pulls = start_pulls
        self._timer = timer
        self._lease_ms = timer.lease_ms
        self._created_ms = timer.lease_ms()
        self.subscribed_ms: Callable[[str], int] = lambda topic: 0
        self.make_queue: Callable[[MessageQueue, int], ProcessQueue] = ProcessQueue
        self.ordered_service: OrderedConsumeService | None = None
        self._has_left = False
        # Offsets of resets and corrections that no broker has stored yet. The offset of a queue in ``_queues_in_reset`` stays
        # here even after a broker has stored it. A pull that was in flight during the reset carries an older commit offset, and
        # the broker may store that offset afterwards.
        self._pending_resets: dict[MessageQueue, int] = {}
        # Queues that were released for a reset, until they are started again.
        self._queues_in_reset: set[MessageQueue] = set()
        # Queues between their release and their next start (the handover), each with the time when its handover ends. Until
        # this time, a reset also applies to the queue.
        self._handover_until_ms: dict[MessageQueue, int] = {}
        self._reset_count = 0  # changes with each reset, so that longer actions notice a reset that came meanwhile
        self._log_throttle = LogThrottle()  # limits the log lines of each topic and broker

    def drop(self, queues: Iterable[MessageQueue]) -> list[MessageQueue]:
        """Release ``queues``, and return the released queues. If a listener has messages of a queue, the queue is released
        later.
        """
        with self._member_state.lock:
            process_queues = [
                self._member_state.queues[queue] for queue in queues if queue in self._member_state.queues
            ]
            for process_queue in process_queues:
                process_queue.drop(self._lease_ms())
        idle_queues = [process_queue.queue for process_queue in process_queues if not self._is_in_use(process_queue)]
        self._release(idle_queues)
        return idle_queues

    def add(self, queues: Sequence[MessageQueue]) -> list[MessageQueue]:
        """Start ``queues``; returns the started queues. The next rebalance tries the other queues again, such as queues that
        another member has locked.
        """
        with self._member_state.lock:
            queues_to_start = [queue for queue in queues if queue not in self._member_state.queues]
            # The lease of a lock is counted from the request, because reading the offsets after the request may take long.
            requested_ms = self._lease_ms()
            self._begin_handover_locked(queues_to_start, requested_ms)
        lock_connections: Mapping[MessageQueue, object] = {}
        if self._needs_locks and queues_to_start:
            lock_connections = request_locks(self._port, self._settings.group, queues_to_start, TIMEOUT_S)
            queues_to_start = [queue for queue in queues_to_start if queue in lock_connections]
        # The set has the brokers that do not answer, so that only the first queue of each broker waits for an answer.
        unavailable_brokers: set[str] = set()
        started_queues = [
            queue
            for queue in queues_to_start
            if queue.broker_name not in unavailable_brokers
            and self._start_queue(queue, requested_ms, lock_connections.get(queue), unavailable_brokers)
        ]
        with self._member_state.lock:
            uncommitted_queues = self._member_state.offsets.changed_offsets().keys() & set(started_queues)
        # The start offsets are committed, because otherwise, after a crash, the next owner might start at a later offset and
        # lose messages.
        if uncommitted_queues:
            self._store.persist(Deadline.after(TIMEOUT_S), uncommitted_queues)
        with self._member_state.lock:
            queues_not_started = set(queues_to_start) - self._member_state.queues.keys() - set(started_queues)
        if self._needs_locks and queues_not_started:  # without ``unlock``, the next owner waits until the locks expire
            self._port.unlock(self._settings.group, queues_not_started, Deadline.after(TIMEOUT_S))
        return started_queues

    def drop_foreign_resets(self, topic: str, assigned_queues: Collection[MessageQueue]) -> None:
        """Forget pending resets of queues of the topic that are not assigned to this member. The owners of the queues apply the
        resets.
        """
        with self._member_state.lock:
            unassigned_queues = self._queues_in_reset - set(assigned_queues) - self._member_state.queues.keys()
            for queue in [queue for queue in unassigned_queues if queue.topic == topic]:
                self._queues_in_reset.discard(queue)
                self._pending_resets.pop(queue, None)

    def correct_offset(self, queue: ProcessQueue, offset: int) -> None:
        """Commit ``offset`` in place of an offset that does not exist, and release the queue. A rebalance starts the queue
        again.
        """
        with self._member_state.lock:
            if queue.dropped:
                return
        self._replace_offsets({queue.queue: offset})

    def reset(self, offsets: Mapping[MessageQueue, int]) -> None:
        """Drop cached messages, commit ``offsets``, and release the queues. A rebalance starts the queues again at these
        offsets.
        """
        owned_queues, handover_queues = self._replace_offsets(offsets)
        for text, queues in (
            ("group %s: offsets are reset to %s", owned_queues),
            (
                "group %s: offsets of queues that are between two owners are reset to %s, for the next owner",
                handover_queues,
            ),
            (
                "group %s: this member does not own these queues and did not reset them: %s",
                offsets.keys() - owned_queues - handover_queues,
            ),
        ):
            if queues:
                logger.warning(text, self._settings.group, {str(queue): offsets[queue] for queue in sorted(queues)})

    def _replace_offsets(self, offsets: Mapping[MessageQueue, int]) -> tuple[set[MessageQueue], set[MessageQueue]]:
        """Replace the offsets of owned queues, and of queues in handover; returns both sets."""
        now_ms = self._lease_ms()
        with self._member_state.lock:
            self._reset_count += 1
            process_queues = [
                self._member_state.queues[queue] for queue in offsets if queue in self._member_state.queues
            ]
            owned_queues = {process_queue.queue for process_queue in process_queues}
            handover_queues = {
                queue
                for queue in offsets
                if queue not in owned_queues and self._handover_until_ms.get(queue, 0) > now_ms
            }
            for process_queue in process_queues:
                process_queue.drop(now_ms)
                process_queue.clear()
            for queue in (*owned_queues, *handover_queues):
                self._member_state.offsets.force(queue, offsets[queue])
                self._pending_resets[queue] = offsets[queue]
            self._queues_in_reset |= owned_queues
        queues_in_use = [process_queue.queue for process_queue in process_queues if self._is_in_use(process_queue)]
        # The offsets of the queues in handover are committed now, because another member may start these queues soon. ``drop``
        # commits the offsets of the owned queues that no listener uses.
        self._store.persist(Deadline.after(TIMEOUT_S), [*queues_in_use, *handover_queues])
        self.drop(owned_queues)
        with self._member_state.lock:
            self._forget_locked([queue for queue in handover_queues if queue not in self._member_state.queues])
        return owned_queues, handover_queues

    def renew_locks(self) -> None:
        """Renew the locks of all queues. A queue without a lock is not consumed until it is locked again."""
        queues = [process_queue.queue for process_queue in self._member_state.owned_queues()]
        if queues and self._needs_locks:
            self._request_locks(queues, TIMEOUT_S if self._port.receives_notices else NO_NOTICES_TIMEOUT_S)

    def request_locks(self, queues: Sequence[ProcessQueue]) -> set[MessageQueue]:
        """Request the locks of these queues; returns the queues whose lock was granted."""
        return self._request_locks([process_queue.queue for process_queue in queues], 1.0)

    def leave(self, deadline: Deadline) -> None:
        """Release all queues, even if listeners have messages: commit offsets and release locks. After this call, no queue is
        added.
        """
        with self._member_state.lock:
            self._has_left = True
            queues = list(self._member_state.queues)
            for process_queue in self._member_state.queues.values():
                process_queue.drop(self._lease_ms())
        self._release(queues, deadline)

    @property
    def _needs_locks(self) -> bool:
        return self._settings.ordered and self._settings.clustering

    def _is_in_use(self, queue: ProcessQueue) -> bool:
        """Whether a listener has messages of a dropped queue, and the queue still waits for the listener.

        If this member has lost the broker's lock, another member may have the queue. The waiting time then begins when the lock
        was last granted, as in Java.
        """
        if self.ordered_service is None or not self.ordered_service.has_call(queue):
            return False
        waiting_since_ms = queue.dropped_ms if self.ordered_service.is_ready(queue) else queue.lock.requested_ms or 0
        return self._lease_ms() <= waiting_since_ms + FORCED_UNLOCK_DELAY_MS

    def _release(self, queues: Sequence[MessageQueue], deadline: Deadline | None = None) -> None:
        if not queues:
            return
        deadline = deadline or Deadline.after(TIMEOUT_S)
        with self._member_state.lock:
            for queue in queues:
                if (process_queue := self._member_state.queues.get(queue)) is not None:
                    # From now on, no call changes the offset, because the change might overwrite an offset of the next owner.
                    process_queue.released = True
        while True:
            # If another thread resets offsets during the commit, ``_reset_count`` changes, and the loop commits the new
            # offsets, too.
            reset_count = self._reset_count
            self._store.persist(deadline, queues)
            if self._needs_locks:
                self._port.unlock(self._settings.group, queues, deadline)
            with self._member_state.lock:
                if self._reset_count != reset_count:
                    continue
                for queue in queues:
                    self._member_state.queues.pop(queue, None)
                    self._member_state.end_offsets.pop(queue, None)
                    self._handover_until_ms[queue] = self._lease_ms() + HANDOVER_MS
                self._forget_locked(queues)
                return

    def _forget_locked(self, queues: Iterable[MessageQueue]) -> None:
        """Forget queues, but keep the offset of a reset, or a later offset, until a broker has stored the offset. The caller
        holds the lock.
        """
        never_committed_offsets = self._member_state.offsets.never_committed_offsets()
        for queue in queues:
            if queue in never_committed_offsets and queue in self._pending_resets:
                self._pending_resets[queue] = never_committed_offsets[queue]
                self._queues_in_reset.discard(queue)
            elif queue not in self._queues_in_reset:
                self._pending_resets.pop(queue, None)
            self._member_state.offsets.forget(queue)

    def _begin_handover_locked(self, queues: Iterable[MessageQueue], now_ms: int) -> None:
        """Begin the handover of queues that are started now; the caller holds the lock.

        If the last handover of a queue has expired, another member may have had the queue, so the pending reset of the queue is
        dropped.
        """
        for queue in queues:
            handover_expired = self._handover_until_ms.get(queue, 0) <= now_ms
            if (
                handover_expired
                and (offset := self._pending_resets.pop(queue, None)) is not None
                and queue not in self._queues_in_reset
            ):
                text = "group %s: dropped the reset to offset %d of %s: no broker stored it, and another member may own the queue"
                logger.warning(text, self._settings.group, offset, queue)
            self._handover_until_ms[queue] = now_ms + HANDOVER_MS

    def _start_queue(
        self, queue: MessageQueue, requested_ms: int, connection: object, unavailable_brokers: set[str]
    ) -> bool:
        with self._member_state.lock:
            self._member_state.offsets.forget(queue)
            reset_count = self._reset_count
        try:
            offset, is_stored = self._read_start_offset(queue)
        except RocketMQError as e:
            level = self._log_throttle.level((queue.topic, queue.broker_name), e)
            logger.log(level, "queue %s is not started yet, because its offset cannot be read: %s", queue, e)
            if isinstance(e, CallTimeout | ConnectionLost):  # other errors may concern a single queue
                unavailable_brokers.add(queue.broker_name)
            return False
        self._log_throttle.mark_resolved((queue.topic, queue.broker_name))
        process_queue = self.make_queue(queue, self._timer.now_ms())
        if self._needs_locks:
            process_queue.lock.grant(requested_ms, connection)
        with self._member_state.lock:
            # This start is given up if another thread started the queue first, or if a reset came after the offset was read.
            if self._has_left or queue in self._member_state.queues or self._reset_count != reset_count:
                return False
            if queue in self._pending_resets:  # the stored offset is older than the reset
                offset, is_stored = self._pending_resets[queue], False
            self._handover_until_ms.pop(queue, None)
            self._queues_in_reset.discard(queue)
            self._member_state.queues[queue] = process_queue
            self._member_state.offsets.force(queue, offset)
            if is_stored:
                self._member_state.offsets.mark_committed({queue: offset})
        self._start_pulls(process_queue, offset)
        return True

    def _read_start_offset(self, queue: MessageQueue) -> StartOffset:
        deadline = Deadline.after(TIMEOUT_S)
        requests = StartOffsetRequests(
            lambda: self._store.read(queue, deadline),
            lambda: self._port.bounds(queue, deadline).max_offset,
            lambda epoch_ms: self._port.search_offset(queue, epoch_ms, deadline, self._settings.group),
        )
        return start_offset(queue, self._consume_from(queue.topic), requests)

    def _consume_from(self, topic: str) -> ConsumeFrom:
        """Return where a queue without an offset starts.

        If a queue is created while a broadcasting member runs, a start at the end of the queue would skip messages. So the
        queue starts at the time of the subscription. This is not needed if the group shares its queues, because the broker then
        returns offset 0 for a new queue.
        """
        consume_from = self._settings.consume_from
        # The age is measured by the clock of leases, because the wall clock may have been set.
        age_ms = self._lease_ms() - max(self._created_ms, self.subscribed_ms(topic))
        if self._settings.clustering or consume_from.where is not ConsumeFromWhere.LATEST or age_ms <= START_PERIOD_MS:
            return consume_from
        return ConsumeFrom(ConsumeFromWhere.TIMESTAMP, self._timer.wall_ms() - age_ms)

    def _request_locks(self, queues: Sequence[MessageQueue], timeout_s: float) -> set[MessageQueue]:
        """Request locks of owned queues; returns the queues whose lock was granted."""
        requested_ms = self._lease_ms()
        lock_connections = request_locks(self._port, self._settings.group, queues, timeout_s)
        regained_queues: list[ProcessQueue] = []
        with self._member_state.lock:
            for queue in queues:
                process_queue = self._member_state.queues.get(queue)
                if process_queue is not None and queue not in lock_connections:
                    process_queue.lock.mark_lost()
                elif process_queue is not None and process_queue.lock.is_held(requested_ms, lock_connections[queue]):
                    process_queue.lock.grant(requested_ms, lock_connections[queue])
                elif process_queue is not None:
                    regained_queues.append(process_queue)
        deadline = Deadline.after(TIMEOUT_S)
        return lock_connections.keys() - {
            process_queue.queue
            for process_queue in regained_queues
            if not self._resume_queue(process_queue, requested_ms, lock_connections[process_queue.queue], deadline)
        }

    def _resume_queue(
        self, process_queue: ProcessQueue, requested_ms: int, connection: object, deadline: Deadline
    ) -> bool:
        """Whether this member continues with a queue whose lock it had lost for a while.

        If another member committed a higher offset meanwhile, the queue is released, and a rebalance starts it at this offset.
        """
        try:
            committed_offset = self._store.read(process_queue.queue, deadline)
        except RocketMQError as e:
            logger.info(
                "queue %s is locked again, but is not consumed yet, because its offset cannot be read: %s",
                process_queue.queue,
                e,
            )
            return False
        with self._member_state.lock:
            finished_offset = self._member_state.offsets.get(process_queue.queue)
            if committed_offset is None or finished_offset is None or committed_offset <= finished_offset:
                process_queue.lock.grant(requested_ms, connection)
                return True
            process_queue.drop(requested_ms)
        text = "group %s: another member consumed %s up to offset %d meanwhile: continuing there, not at %d"
        logger.warning(text, self._settings.group, process_queue.queue, committed_offset, finished_offset)
        if self.ordered_service is not None:
            self.ordered_service.on_queue_free()
        return False


def request_locks(
    port: GroupMember, group: str, queues: Sequence[MessageQueue], timeout_s: float
) -> dict[MessageQueue, object]:
    """Request locks; returns the queues whose lock was granted, each with the connection for which the lock is valid.

    A lock is valid only for the connection from before the request: a broker that restarts during the request may have lost the
    lock.
    """
    connections = {name: port.connection(name) for name in {queue.broker_name for queue in queues}}
    granted_queues = port.lock(group, queues, Deadline.after(timeout_s))
    return {queue: connections[queue.broker_name] or port.connection(queue.broker_name) for queue in granted_queues}
