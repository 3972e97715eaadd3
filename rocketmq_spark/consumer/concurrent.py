"""Messages to a listener, many at once and in any order: Java's ``ConsumeMessageConcurrentlyService``.

What failed is sent back, so that the offset of a queue goes on; what could not even be sent back is handed to the listener
again. Only results of queues that are still ours count.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import partial

from rocketmq_spark.consumer import expiry
from rocketmq_spark.consumer.held import Held
from rocketmq_spark.consumer.process_queue import ProcessQueue
from rocketmq_spark.consumer.result import Context, Listener, Raised, Verdict, ask, concurrent, once_more, slices
from rocketmq_spark.consumer.send_back import SendBack
from rocketmq_spark.consumer.settings import ConsumerSettings
from rocketmq_spark.consumer.workers import Workers
from rocketmq_spark.model import ReceivedMessage
from rocketmq_spark.timer import Timer

logger = logging.getLogger(__name__)

AGAIN_S = 5.0


class Concurrent:
    """Calls ``listener`` on the workers' threads. ``send_back`` None: a broadcasting consumer, whose failures are dropped."""

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
        self._size = settings.consume_batch_max_size
        self._timeout_ms = round(1000 * settings.consume_timeout_s)
        self._held = held
        self._workers = workers
        self._timer = timer
        self._send_back = send_back
        self.busy: dict[int, Sequence[ReceivedMessage]] = {}  # what listeners have now, by the identity of its list

    def ready(self, queue: ProcessQueue) -> bool:
        """A queue may be pulled at any time (``pulling.Consuming``)."""
        return True

    def submit(self, queue: ProcessQueue, messages: Sequence[ReceivedMessage]) -> None:
        """In parts of ``consumeMessageBatchMaxSize``."""
        for part in slices(messages, self._size):
            self._workers.submit(partial(self._consume, queue, part))

    def call(self, messages: Sequence[ReceivedMessage], context: Context) -> object:
        """What the listener makes of messages that it is asked to consume now."""
        return ask(self._listener, messages, context)

    def clean(self) -> None:
        """Send back what a listener has had for longer than ``consumeTimeout``, so that the queue's offset can go on."""
        for queue in self._held.owned():
            for _ in range(expiry.MAX_AT_ONCE):
                with self._held.lock:
                    late = expiry.expired(queue, self._timer.now_ms(), self._timeout_ms)
                if late is None:
                    break
                logger.warning(
                    "the listener has had message %s of %s for too long: it is sent back", late.msg_id, queue.queue
                )
                if self._send_back is None or self._send_back(late, expiry.DELAY_LEVEL):
                    with self._held.lock:
                        queue.remove([late])

    def _consume(self, queue: ProcessQueue, messages: Sequence[ReceivedMessage]) -> None:
        if queue.dropped:
            return
        context, began_ms = Context(queue.queue), self._timer.now_ms()
        with self._held.lock:
            queue.started(messages, began_ms)
            self.busy[id(messages)] = messages
        try:
            outcome = self.call(messages, context)
        finally:
            with self._held.lock:
                del self.busy[id(messages)]
        spent_ms = self._timer.now_ms() - began_ms
        self._settle(queue, messages, concurrent(outcome, context, len(messages)), outcome, spent_ms)

    def _settle(
        self,
        queue: ProcessQueue,
        messages: Sequence[ReceivedMessage],
        verdict: Verdict,
        outcome: object,
        spent_ms: int,
    ) -> None:
        if verdict.why:
            trace = outcome.error if isinstance(outcome, Raised) else None
            logger.warning("messages of %s come again: %s", queue.queue, verdict.why, exc_info=trace)
        if queue.dropped:
            return
        failed = messages[verdict.done :]
        left = self._handed_back(queue, failed, verdict.level) if failed else []
        with self._held.lock:
            self._held.counts["consumed"] += verdict.done
            self._held.counts["failed"] += len(failed)
            finished = [m for m in messages if m not in left] if left else messages
            self._held.finished(queue, queue.remove(finished))
            queue.last_consume_ms = now_ms = self._timer.now_ms()
            self._held.figures.consumed(queue.queue.topic, verdict.done, len(failed), spent_ms, now_ms)
            again = [once_more(message) for message in left]
            for message in again:
                queue.replace(message)
        if again:
            self._timer.later(AGAIN_S, partial(self.submit, queue, again))

    def _handed_back(self, queue: ProcessQueue, failed: Sequence[ReceivedMessage], level: int) -> list[ReceivedMessage]:
        """Those that nobody took."""
        if self._send_back is None:
            for message in failed:
                logger.warning("message %s failed and is dropped: the group is broadcasting", message.msg_id)
            return []
        with self._held.lock:
            here = [
                message for message in failed if message in queue
            ]  # the others are sent back already: they were late
        return [message for message in here if not self._send_back(message, level)]
