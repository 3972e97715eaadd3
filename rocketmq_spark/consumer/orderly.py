"""Messages to a listener, those of a queue one batch after the other: Java's ``ConsumeMessageOrderlyService``.

In a group that shares its queues the broker's lock says that nobody else has the queue, also while it changes hands. What
failed is tried again in place, and the queue waits for it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial

from rocketmq_spark.consumer.held import Held
from rocketmq_spark.consumer.process_queue import ProcessQueue
from rocketmq_spark.consumer.result import (
    Listener,
    OrderedContext,
    OrderedVerdict,
    Raised,
    Step,
    ask,
    once_more,
    ordered,
)
from rocketmq_spark.consumer.send_back import SendBack
from rocketmq_spark.consumer.settings import ConsumerSettings
from rocketmq_spark.consumer.workers import Workers
from rocketmq_spark.model import ReceivedMessage
from rocketmq_spark.timer import Timer

logger = logging.getLogger(__name__)

RELOCK_S, LOCKED_S, REFUSED_S = 0.1, 0.01, 3.0
FAILED = (Step.AGAIN, Step.ROLLBACK)
MAX_TURN_MS = 60_000  # then other queues have a thread before this one goes on


class Orderly:
    """Calls ``listener`` on the workers' threads. ``relock`` asks for the lock of a queue; None: nobody else has it anyway.

    ``left`` is called when a queue that was dropped has no listener any more.
    """

    def __init__(
        self,
        listener: Listener,
        settings: ConsumerSettings,
        held: Held,
        workers: Workers,
        timer: Timer,
        send_back: SendBack | None,
    ) -> None:
        self._listener = listener
        self._settings = settings
        self._held = held
        self._workers = workers
        self._timer = timer
        self._send_back = send_back
        self.relock: Callable[[ProcessQueue], bool] | None = None
        self.left: Callable[[], None] = lambda: None
        self._busy: dict[int, Sequence[ReceivedMessage]] = {}
        self._running: set[ProcessQueue] = set()  # queues with a task, waiting or under way
        self._calling: set[ProcessQueue] = set()  # queues whose listener is called at this moment

    def ready(self, queue: ProcessQueue) -> bool:
        """Whether the queue is locked for us (``pulling.Consuming``)."""
        return self.relock is None or queue.lock.held(self._timer.now_ms())

    def submit(self, queue: ProcessQueue, messages: Sequence[ReceivedMessage]) -> None:
        """There is something in ``queue``: one task has it until it is empty."""
        with self._held.lock:
            if queue in self._running:
                return
            self._running.add(queue)
        self._again(queue, 0)

    def unfinished(self) -> list[ReceivedMessage]:
        """What listeners have at this moment."""
        with self._held.lock:
            return [message for messages in self._busy.values() for message in messages]

    @property
    def auto_commit(self) -> bool:
        """Whether returning None finishes messages."""
        return self._settings.auto_commit

    def calling(self, queue: ProcessQueue) -> bool:
        """Whether a listener has messages of the queue. Of a dropped queue it gets no more."""
        with self._held.lock:
            return queue in self._calling

    def call(self, messages: Sequence[ReceivedMessage], context: OrderedContext) -> object:
        """What the listener makes of messages that it is asked to consume now."""
        return ask(self._listener, messages, context)

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
                self._timer.later(RELOCK_S, partial(self._workers.submit, partial(self._lock_again, queue)))
                return
            if self._timer.now_ms() - began_ms > MAX_TURN_MS:
                self._again(queue, LOCKED_S)
                return
            messages = self._taken(queue)
            if not messages:
                return
            pause_s = self._consume(queue, messages)
            if pause_s is not None:
                self._again(queue, pause_s)
                return

    def _lock_again(self, queue: ProcessQueue) -> None:
        got = not queue.dropped and self.relock is not None and self.relock(queue)
        self._again(queue, LOCKED_S if got else REFUSED_S)

    def _taken(self, queue: ProcessQueue) -> list[ReceivedMessage]:
        """The next batch; when there is none, the queue has no task any more."""
        with self._held.lock:
            messages = [] if queue.dropped else queue.take(self._settings.consume_batch_max_size)
            if messages:
                self._calling.add(queue)
                self._busy[id(messages)] = messages
            else:
                self._running.discard(queue)
        return messages

    def _consume(self, queue: ProcessQueue, messages: list[ReceivedMessage]) -> float | None:
        """One batch; gives the pause before the queue goes on, None if it goes on at once."""
        context, began_ms = OrderedContext(queue.queue, self._settings.auto_commit), self._timer.now_ms()
        outcome = self.call(messages, context)
        spent_ms = self._timer.now_ms() - began_ms
        verdict = ordered(outcome, context, round(1000 * self._settings.suspend_time_s))
        if verdict.why:
            trace = outcome.error if isinstance(outcome, Raised) else None
            logger.warning("messages of %s are tried again: %s", queue.queue, verdict.why, exc_info=trace)
        spent = verdict.step is Step.AGAIN and not queue.dropped and self._given_up(messages)
        failed = len(messages) if verdict.step in FAILED else 0
        with self._held.lock:
            figures, done = self._held.figures, len(messages) - failed
            figures.consumed(queue.queue.topic, done, failed, spent_ms, self._timer.now_ms())
            pause_s = self._settled(queue, messages, verdict, spent)
            self._calling.discard(queue)
            del self._busy[id(messages)]
        if queue.dropped:
            self.left()
        return pause_s

    def _given_up(self, messages: Sequence[ReceivedMessage]) -> bool:
        """Whether all of them have come often enough, and brokers took them: dead letters."""
        limit = self._settings.max_reconsume_times
        if self._send_back is None or any(message.reconsume_times < limit for message in messages):
            return False
        return all(self._send_back(message, 0) for message in messages)

    def _settled(
        self, queue: ProcessQueue, messages: Sequence[ReceivedMessage], verdict: OrderedVerdict, spent: bool
    ) -> float | None:
        """With the lock: what the verdict does to the queue."""
        self._held.counts["failed" if verdict.step in FAILED else "consumed"] += len(messages)
        queue.last_consume_ms = self._timer.now_ms()
        if verdict.step is Step.COMMIT or spent:
            offset = queue.commit()
            if offset is not None and not queue.dropped:
                self._held.offsets.put(queue.queue, offset)
            return None
        if verdict.step is Step.CONTINUE:
            return None
        if verdict.step is Step.ROLLBACK:
            queue.rollback()
        else:
            queue.put_back([once_more(message) for message in messages])
        return verdict.pause_ms / 1000
