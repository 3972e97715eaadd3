"""Calls a listener with one batch of a queue at a time, in order: Java's ``ConsumeMessageOrderlyService``.

If the group shares its queues, the broker's lock keeps other members from consuming a queue, also while the queue changes
owners. In this process, a queue has one call at a time. After a reset or a corrected offset, the new process queue waits for
the running call of the old process queue. Failed messages are retried in place, and their queue waits for them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import NamedTuple

from rocketmq_spark.base.threads import Failure, Timer, TracebackLimit, capture
from rocketmq_spark.consumer.listener import (
    MIN_SUSPEND_MS,
    Listener,
    OrderedAction,
    OrderedContext,
    OrderedVerdict,
    Replier,
    judge_ordered_outcome,
    with_replier,
)
from rocketmq_spark.consumer.listener_pool import ListenerPool
from rocketmq_spark.consumer.member_state import MemberState
from rocketmq_spark.consumer.process_queue import ProcessQueue, pause_reason
from rocketmq_spark.consumer.send_back import DROPPED_TEXT, SendBack, send_all_back
from rocketmq_spark.consumer.settings import ConsumerSettings
from rocketmq_spark.model import MessageQueue, ReceivedMessage

logger = logging.getLogger(__name__)

# The pause before a lock is requested, before a task continues, and before a refused lock is requested again.
LOCK_REQUEST_DELAY_S, RESUME_DELAY_S, LOCK_RETRY_DELAY_S = 0.1, 0.01, 3.0
FAILED_ACTIONS = (OrderedAction.RETRY, OrderedAction.ROLLBACK)
MAX_TASK_MS = 60_000  # after this time, a task gives its thread to other queues before it continues


class _Call(NamedTuple):
    """A call of the listener with messages of a queue."""

    queue: ProcessQueue
    messages: Sequence[ReceivedMessage]  # perhaps ``Rows``


class _CallResult(NamedTuple):
    """The result of a call."""

    has_failed: bool
    verdict: OrderedVerdict
    retryable_messages: Sequence[ReceivedMessage]  # the messages of the call that are not dead letters
    dead_letters: Sequence[ReceivedMessage] = ()
    # Whether ``retryable_messages`` had their last attempt, but no broker accepted them as dead letters.
    has_dlq_failed: bool = False


class OrderedConsumeService:
    """Calls ``listener`` on the threads of ``workers``. The owner may set these attributes before the first message:

    Attributes:
        request_locks: Requests the locks of queues, and returns the queues whose lock was granted. The value is None if the
            queues need no locks, because no other member can have them.
        lock_timer: Runs ``request_locks``, so that a broker that hangs does not block the threads of the listener.
        connection: Returns the current connection to a broker (see ``ports.GroupMember``).
        on_queue_free: Called when the listener has returned the messages of a dropped queue.
        replier: Sends replies to requests.
    """

    def __init__(
        self,
        listener: Listener,
        settings: ConsumerSettings,
        state: MemberState,
        workers: ListenerPool,
        timer: Timer,
        send_back: SendBack | None,
    ) -> None:
        self._listener = listener
        self._settings = settings
        self._suspend_ms = round(1000 * settings.suspend_time_s)
        self._member_state = state
        self._workers = workers
        self._timer = timer
        self._send_back = send_back
        self._tracebacks = TracebackLimit()
        self.replier: Replier | None = None
        self.request_locks: Callable[[Sequence[ProcessQueue]], Collection[MessageQueue]] | None = None
        self.lock_timer = timer
        self.connection: Callable[[str], object] = lambda broker_name: None
        self._queues_waiting_for_lock: list[ProcessQueue] = []  # queues whose tasks wait for the broker's lock
        # Queues whose lock is requested next, because their tasks or their pulls wait for it.
        self._queues_to_lock: set[ProcessQueue] = set()
        # Queues whose last request was refused less than ``LOCK_RETRY_DELAY_S`` ago.
        self._refused_queues: set[ProcessQueue] = set()
        self.on_queue_free: Callable[[], None] = lambda: None
        self._scheduled_queues: set[ProcessQueue] = set()  # queues with a task that waits or runs
        self._calls: dict[MessageQueue, _Call] = {}  # running calls of the listener
        # New process queues that wait until the call of the old process queue of the same queue ends.
        self._successors: dict[MessageQueue, ProcessQueue] = {}
        self._closed = False

    def is_ready(self, queue: ProcessQueue) -> bool:
        """Whether this member has the broker's lock of the queue (``pulling.ConsumeService``)."""
        if self.request_locks is None:
            return True
        return queue.lock.is_held(self._timer.lease_ms(), self.connection(queue.queue.broker_name))

    def request_lock_soon(self, queue: ProcessQueue) -> None:
        """Request the lock of a queue for which ``is_ready`` is False, also while the listener has messages of the queue."""
        with self._member_state.lock:
            if queue in self._queues_to_lock or queue in self._refused_queues:
                return
            self._queues_to_lock.add(queue)
        # The lock of the state is released first, because ``_request_locks_now`` needs it, and may run at once.
        self.lock_timer.call_later(LOCK_REQUEST_DELAY_S, self._request_locks_now)

    def submit(self, queue: ProcessQueue, messages: Sequence[ReceivedMessage]) -> None:
        """Schedule the task of ``queue``, which consumes the queue until no message is left."""
        with self._member_state.lock:
            if queue in self._scheduled_queues:
                return
            self._scheduled_queues.add(queue)
        self._schedule(queue, 0)

    def close(self) -> None:
        """Start no more calls of the listener."""
        with self._member_state.lock:
            self._closed = True

    def unfinished_messages(self) -> list[ReceivedMessage]:
        """Return the messages that listeners have now."""
        with self._member_state.lock:
            return [message for call in self._calls.values() for message in call.messages]

    @property
    def auto_commit(self) -> bool:
        """Whether a listener finishes its messages by returning None."""
        return self._settings.auto_commit

    def has_call(self, queue: ProcessQueue) -> bool:
        """Whether a listener has messages of the queue."""
        with self._member_state.lock:
            call = self._calls.get(queue.queue)
            return call is not None and call.queue is queue

    def context(self, queue: MessageQueue, messages: Sequence[ReceivedMessage]) -> OrderedContext:
        """Return the context for these messages."""
        return with_replier(OrderedContext(queue, self._settings.auto_commit), messages, self.replier)

    def call_directly(self, messages: Sequence[ReceivedMessage], context: OrderedContext) -> object:
        """Call the listener now (request 309), and return its outcome."""
        return capture(self._listener, messages, context)

    def _schedule(self, queue: ProcessQueue, delay_s: float) -> None:
        work = partial(self._run_task, queue)
        if delay_s:
            self._timer.call_later(delay_s, partial(self._workers.submit, work))
        else:
            self._workers.submit(work)

    def _run_task(self, queue: ProcessQueue) -> None:
        started_ms = self._timer.now_ms()
        while True:
            if not self.is_ready(queue) and not queue.dropped:
                with self._member_state.lock:
                    self._queues_waiting_for_lock.append(queue)
                    self._queues_to_lock.add(queue)
                # The timer is called last, because ``_request_locks_now`` may run at once. It resumes only queues that are in
                # the list already.
                self.lock_timer.call_later(LOCK_REQUEST_DELAY_S, self._request_locks_now)
                return
            if self._timer.now_ms() - started_ms > MAX_TASK_MS:
                self._schedule(queue, RESUME_DELAY_S)
                return
            call = self._start_call(queue)
            if call is None:
                return
            pause_s = self._consume(call)
            if pause_s is not None:
                self._schedule(queue, pause_s)
                return

    def _request_locks_now(self) -> None:
        """Request the locks of all waiting queues, with one request per broker."""
        with self._member_state.lock:
            waiting_queues, self._queues_waiting_for_lock = self._queues_waiting_for_lock, []
            queues_to_lock, self._queues_to_lock = self._queues_to_lock, set()
        granted_queues: Collection[MessageQueue] | Failure = ()
        owned_queues = [queue for queue in queues_to_lock if not queue.dropped]
        if owned_queues and self.request_locks is not None:
            granted_queues = capture(self.request_locks, owned_queues)
        if isinstance(granted_queues, Failure):
            for queue in owned_queues:
                logger.warning("could not lock %s, retrying: %s", queue.queue, granted_queues)
            granted_queues = ()
        refused_queues = {queue for queue in owned_queues if queue.queue not in granted_queues}
        self._refused_queues |= refused_queues
        self._timer.call_later(LOCK_RETRY_DELAY_S, partial(self._refused_queues.difference_update, refused_queues))
        for queue in waiting_queues:
            self._schedule(queue, RESUME_DELAY_S if queue.queue in granted_queues else LOCK_RETRY_DELAY_S)

    def _start_call(self, queue: ProcessQueue) -> _Call | None:
        """Start a call with the next batch. Returns None if there is no batch, or if another call of the queue still runs.

        If this method returns None, the task ends. If another call of the queue runs, that call starts a new task when it ends.
        """
        with self._member_state.lock:
            if self._closed or queue.dropped:
                self._scheduled_queues.discard(queue)
                return None
            if queue.queue in self._calls:
                if (predecessor := self._successors.get(queue.queue)) is not None:
                    self._scheduled_queues.discard(predecessor)
                self._successors[queue.queue] = queue
                return None
            messages = queue.take(self._settings.consume_batch_max_size)
            if not messages:
                self._scheduled_queues.discard(queue)
                return None
            call = self._calls[queue.queue] = _Call(queue, messages)
            return call

    def _consume(self, call: _Call) -> float | None:
        """Consume one batch. Returns the pause in seconds before the next batch; None for no pause."""
        queue = call.queue
        context, started_ms = self.context(queue.queue, call.messages), self._timer.now_ms()
        outcome = self.call_directly(call.messages, context)
        duration_ms = self._timer.now_ms() - started_ms
        result = capture(self._result_of, call, outcome, context)
        if isinstance(result, Failure):
            result.log(logger, "could not handle the result of a call with messages of %s, retrying them", queue.queue)
            retry_verdict = OrderedVerdict(OrderedAction.RETRY, max(MIN_SUSPEND_MS, self._suspend_ms))
            result = _CallResult(True, retry_verdict, call.messages)
        with self._member_state.lock:
            del self._calls[queue.queue]
            successor = self._successors.pop(queue.queue, None)
            queue.last_consume_ms = now_ms = self._timer.now_ms()
            done_count = 0 if result.has_failed else len(call.messages)
            self._member_state.counts["failed" if result.has_failed else "consumed"] += len(call.messages)
            self._member_state.figures.record_call(
                queue.queue.topic, done_count, len(call.messages) - done_count, duration_ms, now_ms
            )
            pause_s = self._apply_locked(queue, result)
            stall_reason = self._stall_reason_locked(queue)
        if successor is not None:
            self._schedule(successor, 0)
        if stall_reason is not None:
            text = "%s is stalled: its listener gets no more messages until it commits: %s"
            logger.warning(text, queue.queue, stall_reason)
        if queue.dropped:
            self.on_queue_free()
        return pause_s

    def _stall_reason_locked(self, queue: ProcessQueue) -> str | None:
        """Return why the queue is stalled; None if it is not stalled. A stalled queue has a full cache of messages that are
        consumed, but not committed. The caller holds the lock.
        """
        if queue.dropped or queue.waiting_count:
            return None
        return pause_reason(queue, self._member_state.thresholds_of(queue.queue.topic))

    def _result_of(self, call: _Call, outcome: object, context: OrderedContext) -> _CallResult:
        """Return the result of a call. Messages that had their last attempt become dead letters, as in Java."""
        verdict = judge_ordered_outcome(outcome, context, self._suspend_ms)
        if verdict.problem:
            error = self._tracebacks.due(outcome)
            logger.warning("messages of %s failed: %s", call.queue.queue, verdict.problem, exc_info=error)
        has_failed, messages = verdict.action in FAILED_ACTIONS, call.messages
        max_reconsume_times = self._settings.max_reconsume_times
        if verdict.action is not OrderedAction.RETRY or call.queue.dropped:
            return _CallResult(has_failed, verdict, messages)
        if any(message.reconsume_times < max_reconsume_times for message in messages):  # some have attempts left
            return _CallResult(has_failed, verdict, messages)
        queue = call.queue
        unsent_messages = send_all_back(
            messages, lambda message: self._make_dead_letter(queue.with_original_body(message)), lambda: queue.dropped
        )
        unsent_offsets = {message.queue_offset for message in unsent_messages}
        dead_letters = [message for message in messages if message.queue_offset not in unsent_offsets]
        if not unsent_messages:
            verdict = OrderedVerdict(OrderedAction.COMMIT if context.auto_commit else OrderedAction.CONTINUE)
        return _CallResult(has_failed, verdict, unsent_messages, dead_letters, has_dlq_failed=True)

    def _make_dead_letter(self, message: ReceivedMessage) -> bool:
        """Make a message a dead letter, and return whether a broker accepted the message. Broadcasting groups drop the message.

        This method does not raise, because after an error, the call would be retried, and the other messages would become dead
        letters a second time.
        """
        if self._send_back is None:
            logger.warning("message %s failed and is %s", message.msg_id, DROPPED_TEXT)
            return True
        send_outcome = capture(self._send_back.make_dead_letter, message)
        if isinstance(send_outcome, Failure):
            send_outcome.log(logger, "message %s could not be made a dead letter", message.msg_id)
            return False
        return send_outcome

    def _apply_locked(self, queue: ProcessQueue, result: _CallResult) -> float | None:
        """Apply the verdict to the queue, and return the pause before the next call. The caller holds the lock.

        Dead letters stay in the queue until the messages before them are finished.
        """
        verdict = result.verdict
        queue.mark_dead_letters(result.dead_letters)
        if verdict.action is OrderedAction.COMMIT:
            offset = queue.commit()
            if offset is not None and not queue.released:
                self._member_state.offsets.set(queue.queue, offset)
            return None
        if verdict.action is OrderedAction.CONTINUE:
            return None
        if verdict.action is OrderedAction.ROLLBACK:
            queue.rollback()
        else:
            queue.put_back_for_retry(result.retryable_messages, one_by_one=result.has_dlq_failed)
        return verdict.pause_ms / 1000
