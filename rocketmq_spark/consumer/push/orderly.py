"""Passes messages to a listener, one batch at a time per queue: Java's ``ConsumeMessageOrderlyService``.

If the group shares its queues, the broker's lock keeps other members from consuming a queue, also while it changes owners. In
this process a queue has one call at a time: after a reset or a repaired offset, the new process queue waits for the listener
of the old one. Failed messages are retried in place, and their queue waits for them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import NamedTuple

from rocketmq_spark.base.threads import Failure, Timer, Tracebacks, attempt
from rocketmq_spark.consumer.process_queue import ProcessQueue, pause_reason
from rocketmq_spark.consumer.push.member_state import MemberState
from rocketmq_spark.consumer.push.workers import DROPPED, SendBack, Workers, send_each
from rocketmq_spark.consumer.result import (
    MIN_SUSPEND_MS,
    Listener,
    OrderedAction,
    OrderedContext,
    OrderedVerdict,
    Replier,
    judge_ordered,
    with_replier,
)
from rocketmq_spark.consumer.settings import ConsumerSettings
from rocketmq_spark.model import MessageQueue, ReceivedMessage

logger = logging.getLogger(__name__)

RELOCK_S, LOCKED_S, REFUSED_S = 0.1, 0.01, 3.0
FAILED = (OrderedAction.RETRY, OrderedAction.ROLLBACK)
MAX_TURN_MS = 60_000  # then other queues have a thread before this one goes on


class _Call(NamedTuple):
    """A call of the listener with messages of a queue."""

    queue: ProcessQueue
    messages: Sequence[ReceivedMessage]  # perhaps ``Rows``


class _Judged(NamedTuple):
    """The result of a call. ``dead`` messages are dead letters now, ``left`` are the others.

    ``refused``: ``left`` had their last attempt, but no broker accepted them as dead letters.
    """

    failed: bool
    verdict: OrderedVerdict
    left: Sequence[ReceivedMessage]
    dead: Sequence[ReceivedMessage] = ()
    refused: bool = False


class Orderly:
    """Calls ``listener`` on the workers' threads. ``relock`` asks for the locks of queues and gives those that were granted,
    on the thread of ``locks``: a broker that hangs takes none from the listener. None: no other member can have a queue.

    ``left`` is called when a queue that was dropped has no listener any more.
    """

    def __init__(
        self,
        listener: Listener,
        settings: ConsumerSettings,
        held: MemberState,
        workers: Workers,
        timer: Timer,
        send_back: SendBack | None,
    ) -> None:
        self._listener = listener
        self._settings = settings
        self._suspend_ms = round(1000 * settings.suspend_time_s)
        self._held = held
        self._workers = workers
        self._timer = timer
        self._send_back = send_back
        self._tracebacks = Tracebacks()
        self.replier: Replier | None = None  # how requests are answered
        self.relock: Callable[[Sequence[ProcessQueue]], Collection[MessageQueue]] | None = None
        self.locks = timer
        self.connection: Callable[[str], object] = lambda broker_name: None  # see ``ports.GroupMember``
        self._unlocked: list[ProcessQueue] = []  # queues whose tasks wait for the broker's lock
        self._asking: set[ProcessQueue] = set()  # these, and others that need it
        self._refused: set[ProcessQueue] = set()  # those that did not get it a moment ago
        self.left: Callable[[], None] = lambda: None
        self._tasks: set[ProcessQueue] = set()  # queues with a task, waiting or under way
        self._calls: dict[MessageQueue, _Call] = {}
        self._next: dict[MessageQueue, ProcessQueue] = {}  # process queues that wait for the call of their predecessor
        self._closed = False

    def ready(self, queue: ProcessQueue) -> bool:
        """Whether this member has the broker's lock of the queue (``pulling.Consuming``)."""
        if self.relock is None:
            return True
        return queue.lock.is_held(self._timer.lease_ms(), self.connection(queue.queue.broker_name))

    def lock_soon(self, queue: ProcessQueue) -> None:
        """Request the lock of a queue that is not ``ready``, also while the listener has messages of it."""
        with self._held.lock:
            if queue in self._asking or queue in self._refused:
                return
            self._asking.add(queue)
        self.locks.later(RELOCK_S, self._lock_again)  # not before: it may run at once

    def submit(self, queue: ProcessQueue, messages: Sequence[ReceivedMessage]) -> None:
        """Schedule the task of ``queue``, which consumes it until it is empty."""
        with self._held.lock:
            if queue in self._tasks:
                return
            self._tasks.add(queue)
        self._again(queue, 0)

    def close(self) -> None:
        """Begin no more listener calls."""
        with self._held.lock:
            self._closed = True

    def unfinished(self) -> list[ReceivedMessage]:
        """Return the messages that listeners have now."""
        with self._held.lock:
            return [message for call in self._calls.values() for message in call.messages]

    @property
    def auto_commit(self) -> bool:
        """Whether returning None finishes messages."""
        return self._settings.auto_commit

    def calling(self, queue: ProcessQueue) -> bool:
        """Whether a listener has messages of the queue."""
        with self._held.lock:
            call = self._calls.get(queue.queue)
            return call is not None and call.queue is queue

    def context(self, queue: MessageQueue, messages: Sequence[ReceivedMessage]) -> OrderedContext:
        """Return the context for these messages."""
        return with_replier(OrderedContext(queue, self._settings.auto_commit), messages, self.replier)

    def call(self, messages: Sequence[ReceivedMessage], context: OrderedContext) -> object:
        """Call the listener now (request 309), and return its outcome."""
        return attempt(self._listener, messages, context)

    def _again(self, queue: ProcessQueue, in_s: float) -> None:
        work = partial(self._work, queue)
        if in_s:
            self._timer.later(in_s, partial(self._workers.submit, work))
        else:
            self._workers.submit(work)

    def _work(self, queue: ProcessQueue) -> None:
        began_ms = self._timer.now_ms()
        while True:
            if not self.ready(queue) and not queue.dropped:
                with self._held.lock:
                    self._unlocked.append(queue)
                    self._asking.add(queue)
                self.locks.later(RELOCK_S, self._lock_again)  # not before: nothing else would have this task go on
                return
            if self._timer.now_ms() - began_ms > MAX_TURN_MS:
                self._again(queue, LOCKED_S)
                return
            call = self._begun(queue)
            if call is None:
                return
            pause_s = self._consume(call)
            if pause_s is not None:
                self._again(queue, pause_s)
                return

    def _lock_again(self) -> None:
        """Request the locks of all waiting queues, with one request per broker."""
        with self._held.lock:
            queues, self._unlocked = self._unlocked, []
            asking, self._asking = self._asking, set()
        got: Collection[MessageQueue] | Failure = ()
        wanted = [queue for queue in asking if not queue.dropped]
        if wanted and self.relock is not None:
            got = attempt(self.relock, wanted)
        if isinstance(got, Failure):
            for queue in wanted:
                logger.warning("could not lock %s, retrying: %s", queue.queue, got)
            got = ()
        refused = {queue for queue in wanted if queue.queue not in got}
        self._refused |= refused
        self._timer.later(REFUSED_S, partial(self._refused.difference_update, refused))
        for queue in queues:
            self._again(queue, LOCKED_S if queue.queue in got else REFUSED_S)

    def _begun(self, queue: ProcessQueue) -> _Call | None:
        """Begin a call with the next batch. None if nothing waits, which ends the task, or if the last call still runs."""
        with self._held.lock:
            if self._closed or queue.dropped:
                self._tasks.discard(queue)
                return None
            if queue.queue in self._calls:
                if (before := self._next.get(queue.queue)) is not None:
                    self._tasks.discard(before)
                self._next[queue.queue] = queue
                return None
            messages = queue.take(self._settings.consume_batch_max_size)
            if not messages:
                self._tasks.discard(queue)
                return None
            call = self._calls[queue.queue] = _Call(queue, messages)
            return call

    def _consume(self, call: _Call) -> float | None:
        """Consume one batch; returns the pause in seconds before the next one, None for no pause."""
        queue = call.queue
        context, began_ms = self.context(queue.queue, call.messages), self._timer.now_ms()
        outcome = self.call(call.messages, context)
        spent_ms = self._timer.now_ms() - began_ms
        judged = attempt(self._judged, call, outcome, context)
        if isinstance(judged, Failure):
            judged.log(logger, "could not handle the result of messages of %s, they are retried", queue.queue)
            again = OrderedVerdict(OrderedAction.RETRY, max(MIN_SUSPEND_MS, self._suspend_ms))
            judged = _Judged(True, again, call.messages)
        with self._held.lock:
            del self._calls[queue.queue]
            behind = self._next.pop(queue.queue, None)
            queue.last_consume_ms = now_ms = self._timer.now_ms()
            done = 0 if judged.failed else len(call.messages)
            self._held.counts["failed" if judged.failed else "consumed"] += len(call.messages)
            self._held.figures.consumed(queue.queue.topic, done, len(call.messages) - done, spent_ms, now_ms)
            pause_s = self._settled(queue, judged)
            why = self._stands(queue)
        if behind is not None:
            self._again(behind, 0)
        if why is not None:
            text = "%s is stalled: its listener has to commit, but gets no more messages before it does: %s"
            logger.warning(text, queue.queue, why)
        if queue.dropped:
            self.left()
        return pause_s

    def _stands(self, queue: ProcessQueue) -> str | None:
        """Why the queue is stalled: its cache is full of consumed, uncommitted messages. None if it is not. Needs the lock."""
        if queue.dropped or queue.waiting:
            return None
        return pause_reason(queue, self._held.thresholds_of(queue.queue.topic))

    def _judged(self, call: _Call, outcome: object, context: OrderedContext) -> _Judged:
        """Decide what a call's outcome means. Dead letters no longer block the queue, as in Java."""
        verdict = judge_ordered(outcome, context, self._suspend_ms)
        if verdict.problem:
            trace = self._tracebacks.due(outcome)
            logger.warning("messages of %s failed: %s", call.queue.queue, verdict.problem, exc_info=trace)
        failed, messages = verdict.action in FAILED, call.messages
        limit = self._settings.max_reconsume_times
        if verdict.action is not OrderedAction.RETRY or call.queue.dropped:
            return _Judged(failed, verdict, messages)
        if any(message.reconsume_times < limit for message in messages):  # not all have come often enough
            return _Judged(failed, verdict, messages)
        queue = call.queue
        left = send_each(messages, lambda message: self._took(queue.with_original_body(message)), lambda: queue.dropped)
        waits = {message.queue_offset for message in left}
        dead = [message for message in messages if message.queue_offset not in waits]
        if not left:
            verdict = OrderedVerdict(OrderedAction.COMMIT if context.auto_commit else OrderedAction.CONTINUE)
        return _Judged(failed, verdict, left, dead, refused=True)

    def _took(self, message: ReceivedMessage) -> bool:
        """Whether the message is a dead letter now. A failure here must not send the other ones to the dead letters again.

        Broadcasting groups drop it.
        """
        if self._send_back is None:
            logger.warning("message %s failed and is %s", message.msg_id, DROPPED)
            return True
        taken = attempt(self._send_back.dead, message)
        if isinstance(taken, Failure):
            taken.log(logger, "message %s could not be made a dead letter", message.msg_id)
            return False
        return taken

    def _settled(self, queue: ProcessQueue, judged: _Judged) -> float | None:
        """Apply the verdict to the queue; needs the lock. Dead letters stay taken until the messages before them are finished."""
        verdict = judged.verdict
        queue.mark_dead_letters(judged.dead)
        if verdict.action is OrderedAction.COMMIT:
            offset = queue.commit()
            if offset is not None and not queue.released:
                self._held.offsets.move_to(queue.queue, offset)
            return None
        if verdict.action is OrderedAction.CONTINUE:
            return None
        if verdict.action is OrderedAction.ROLLBACK:
            queue.rollback()
        else:
            queue.put_back_for_retry(judged.left, one_by_one=judged.refused)
        return verdict.pause_ms / 1000
