"""Messages to a listener, those of a queue one batch after the other: Java's ``ConsumeMessageOrderlyService``.

In a group that shares its queues the broker's lock says that no other member has the queue, also while it changes hands. Here a
queue has one call at a time, whichever process queue it belongs to: after a reset, and after the repair of an offset, the new
one waits for the listener of the old one. What failed is tried again in place, and the queue waits for it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import NamedTuple

from rocketmq_spark.base.threads import Failure, attempt
from rocketmq_spark.base.timer import Timer
from rocketmq_spark.consumer.process_queue import ProcessQueue, full
from rocketmq_spark.consumer.push.member_state import MemberState
from rocketmq_spark.consumer.push.workers import DROPPED, SendBack, Workers
from rocketmq_spark.consumer.result import (
    MIN_SUSPEND_MS,
    Listener,
    OrderedContext,
    OrderedVerdict,
    Replier,
    Step,
    once_more,
    ordered,
    replying,
)
from rocketmq_spark.consumer.settings import ConsumerSettings
from rocketmq_spark.model import MessageQueue, ReceivedMessage

logger = logging.getLogger(__name__)

RELOCK_S, LOCKED_S, REFUSED_S = 0.1, 0.01, 3.0
FAILED = (Step.AGAIN, Step.ROLLBACK)
MAX_TURN_MS = 60_000  # then other queues have a thread before this one goes on


class _Call(NamedTuple):
    """A listener has these messages of a queue."""

    queue: ProcessQueue
    messages: tuple[ReceivedMessage, ...]


class _Judged(NamedTuple):
    """What happens to the messages of a call: ``dead`` are dead letters now, ``left`` are the others.

    ``refused``: no broker took those that are left, after their last attempt.
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
        self.replier: Replier | None = None  # how requests are answered
        self.relock: Callable[[Sequence[ProcessQueue]], Collection[MessageQueue]] | None = None
        self.locks = timer
        self._unlocked: list[ProcessQueue] = []  # those whose tasks wait for their locks
        self.left: Callable[[], None] = lambda: None
        self._tasks: set[ProcessQueue] = set()  # queues with a task, waiting or under way
        self._calls: dict[MessageQueue, _Call] = {}
        self._next: dict[MessageQueue, ProcessQueue] = {}  # waits for the call of the process queue before it
        self._closed = False

    def ready(self, queue: ProcessQueue) -> bool:
        """Whether the queue is locked for us (``pulling.Consuming``)."""
        return self.relock is None or queue.lock.held(self._timer.lease_ms())

    def submit(self, queue: ProcessQueue, messages: Sequence[ReceivedMessage]) -> None:
        """There is something in ``queue``: one task has it until it is empty."""
        with self._held.lock:
            if queue in self._tasks:
                return
            self._tasks.add(queue)
        self._again(queue, 0)

    def close(self) -> None:
        """No listener is called any more."""
        with self._held.lock:
            self._closed = True

    def unfinished(self) -> list[ReceivedMessage]:
        """What listeners have at this moment."""
        with self._held.lock:
            return [message for call in self._calls.values() for message in call.messages]

    @property
    def auto_commit(self) -> bool:
        """Whether returning None finishes messages."""
        return self._settings.auto_commit

    def calling(self, queue: ProcessQueue) -> bool:
        """Whether a listener has messages of the queue. Of a dropped queue it gets no more."""
        with self._held.lock:
            call = self._calls.get(queue.queue)
            return call is not None and call.queue is queue

    def context(self, queue: MessageQueue, messages: Sequence[ReceivedMessage]) -> OrderedContext:
        """What the listener gets with these messages."""
        return replying(OrderedContext(queue, self._settings.auto_commit), messages, self.replier)

    def call(self, messages: Sequence[ReceivedMessage], context: OrderedContext) -> object:
        """What the listener makes of messages that it is asked to consume now."""
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
                self.locks.later(RELOCK_S, self._lock_again)
                with self._held.lock:
                    self._unlocked.append(queue)
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
        """For all that wait, in one question for each broker."""
        with self._held.lock:
            queues, self._unlocked = self._unlocked, []
        got: Collection[MessageQueue] | Failure = ()
        wanted = [queue for queue in queues if not queue.dropped]
        if wanted and self.relock is not None:
            got = attempt(self.relock, wanted)
        if isinstance(got, Failure):
            for queue in wanted:
                logger.warning("whether %s is locked is not known, it is asked again: %s", queue.queue, got)
            got = ()
        for queue in queues:
            self._again(queue, LOCKED_S if queue.queue in got else REFUSED_S)

    def _begun(self, queue: ProcessQueue) -> _Call | None:
        """A call with the next batch. None: there is none, and no task any more; or the queue's last call is not over yet."""
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
            call = self._calls[queue.queue] = _Call(queue, tuple(messages))
            return call

    def _consume(self, call: _Call) -> float | None:
        """One batch; gives the pause before the queue goes on, None if it goes on at once."""
        queue = call.queue
        context, began_ms = self.context(queue.queue, call.messages), self._timer.now_ms()
        outcome = self.call(call.messages, context)
        spent_ms = self._timer.now_ms() - began_ms
        judged = attempt(self._judged, call, outcome, context)
        if isinstance(judged, Failure):
            judged.log(logger, "what becomes of messages of %s is not known, they are tried again", queue.queue)
            again = OrderedVerdict(Step.AGAIN, max(MIN_SUSPEND_MS, self._suspend_ms))
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
            text = "%s stands still until its listener commits, which gets no more messages of it: %s"
            logger.warning(text, queue.queue, why)
        if queue.dropped:
            self.left()
        return pause_s

    def _stands(self, queue: ProcessQueue) -> str | None:
        """With the lock. Why the queue is not pulled, where all that is cached of it was consumed and not committed."""
        if queue.dropped or queue.waiting:
            return None
        return full(queue, self._held.thresholds_of(queue.queue.topic))

    def _judged(self, call: _Call, outcome: object, context: OrderedContext) -> _Judged:
        """Dead letters are no longer in the way, as in Java."""
        verdict = ordered(outcome, context, self._suspend_ms)
        if verdict.why:
            trace = outcome.error if isinstance(outcome, Failure) else None
            logger.warning("messages of %s failed: %s", call.queue.queue, verdict.why, exc_info=trace)
        failed, messages = verdict.step in FAILED, call.messages
        limit = self._settings.max_reconsume_times
        last = all(message.reconsume_times >= limit for message in messages)  # when all have come often enough
        if verdict.step is not Step.AGAIN or call.queue.dropped or not last:
            return _Judged(failed, verdict, messages)
        taken = [self._took(call.queue.as_pulled(message)) for message in messages]
        left = [message for message, took in zip(messages, taken, strict=True) if not took]
        dead = [message for message, took in zip(messages, taken, strict=True) if took]
        if not left:
            verdict = OrderedVerdict(Step.COMMIT if context.auto_commit else Step.CONTINUE)
        return _Judged(failed, verdict, left, dead, refused=True)

    def _took(self, message: ReceivedMessage) -> bool:
        """Whether it is a dead letter. What fails for one must not make a dead letter of the others a second time.

        Where the group is broadcasting it is dropped.
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
        """With the lock: what the verdict does to the queue. Dead letters stay taken until what comes again is finished."""
        verdict = judged.verdict
        queue.bury(judged.dead)
        if verdict.step is Step.COMMIT:
            offset = queue.commit()
            if offset is not None and not queue.dropped:
                self._held.offsets.move_to(queue.queue, offset)
            return None
        if verdict.step is Step.CONTINUE:
            return None
        if verdict.step is Step.ROLLBACK:
            queue.rollback()
        else:
            queue.put_back([once_more(queue.as_pulled(message)) for message in judged.left], alone=judged.refused)
        return verdict.pause_ms / 1000
