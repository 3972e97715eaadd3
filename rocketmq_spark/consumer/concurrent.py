"""Calls a listener with messages of several queues at once, in any order: Java's ``ConsumeMessageConcurrentlyService``.

Failed messages are sent back, so that the committed offset can advance. A message that cannot be sent back goes to the
listener again. Results of a queue count only while this member owns the queue.

A listener that does not return would keep the offset from advancing. ``late_messages`` finds the messages of such a call, as
Java's ``ProcessQueue.cleanExpiredMsg`` does. The function checks only the call that has the first message of a queue, because
only the first message keeps the offset from advancing.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from itertools import repeat
from queue import Empty, SimpleQueue
from typing import Any

from rocketmq_spark.base.clock import Deadline
from rocketmq_spark.base.threads import Failure, KeyedExecutor, Timer, TracebackLimit, capture
from rocketmq_spark.consumer.listener import (
    Context,
    DeferredListener,
    Listener,
    ListenerCall,
    Replier,
    judge_concurrent_outcome,
    with_replier,
)
from rocketmq_spark.consumer.listener_pool import ListenerPool
from rocketmq_spark.consumer.member_state import MemberState
from rocketmq_spark.consumer.process_queue import ProcessQueue
from rocketmq_spark.consumer.send_back import DROPPED_TEXT, SendBack, send_all_back
from rocketmq_spark.consumer.settings import ConsumerSettings
from rocketmq_spark.errors import ClosedError
from rocketmq_spark.model import MessageQueue, ReceivedMessage

logger = logging.getLogger(__name__)

_IDLE_CHECK_INTERVAL_S = 0.01  # how often ``wait_for_calls`` checks whether calls still run
_CLOSED_CHECK_INTERVAL_S = 1.0  # how often a waiting direct call checks whether this service was closed
# A run sends back late messages call by call, and stops when it has sent back at least this many messages.
MAX_LATE_MESSAGES_PER_RUN = 16
LATE_MESSAGE_DELAY_LEVEL = 3  # the delay level with which late messages are sent back


class ConcurrentCall(ListenerCall):
    """One call of the listener: its messages (perhaps ``Rows``), its start, and its result. ``on_outcome`` is called once.

    The first ``done_count`` messages succeeded. The other ``finished_messages`` were sent back, and a broker accepted them. If
    ``has_outcome`` is True, the messages of the call are not late, because the thread that has the outcome sends the failed
    messages back.
    """

    __slots__ = ("_on_outcome", "done_count", "ended_ms", "finished_messages", "has_outcome", "queue", "started_ms")

    def __init__(
        self,
        queue: ProcessQueue,
        messages: Sequence[ReceivedMessage],
        started_ms: int,
        context: Any = None,
        on_outcome: Callable[[ConcurrentCall, object], None] = lambda call, outcome: None,
    ) -> None:
        self.queue, self.messages, self.started_ms = queue, messages, started_ms
        self.context, self._on_outcome = context, on_outcome
        self.done_count, self.ended_ms, self.has_outcome = 0, started_ms, False
        self.finished_messages: Sequence[ReceivedMessage] = ()

    def __call__(self, outcome: object) -> None:
        self._on_outcome(self, outcome)


class _DirectCall(ListenerCall):
    """A call that a broker requested (request 309)."""

    __slots__ = ("outcome_queue",)

    def __init__(self, messages: Sequence[ReceivedMessage], context: Context) -> None:
        super().__init__(messages, context)
        self.outcome_queue: SimpleQueue[object] = SimpleQueue()

    def __call__(self, outcome: object) -> None:
        self.outcome_queue.put(outcome)


def late_messages(
    queue: ProcessQueue, calls: Iterable[ConcurrentCall], now_ms: int, timeout_ms: int
) -> Sequence[ReceivedMessage]:
    """Return the late messages of a queue: a call has had them for longer than ``timeout_ms``, and the offset waits for them."""
    if queue.dropped:
        return ()
    late_calls = (
        call for call in calls if call.queue is queue and not call.has_outcome and now_ms - call.started_ms > timeout_ms
    )
    return next(filter(len, (queue.late_messages(call.messages) for call in late_calls)), ())


RETRY_DELAY_S = 5.0  # the pause before the listener gets messages again that no broker accepted


class ConcurrentConsumeService:
    """Calls ``listener`` on the threads of ``workers``. Without ``send_back`` (broadcasting), failed messages are dropped.

    A message is late if a listener has had it for longer than ``consumeTimeout``. ``late_return_threads`` runs one thread for
    each queue with late messages.
    """

    def __init__(
        self,
        listener: Listener,
        settings: ConsumerSettings,
        state: MemberState,
        workers: ListenerPool,
        timer: Timer,
        send_back: SendBack | None,
        late_return_threads: KeyedExecutor,
    ) -> None:
        self._listener = listener
        self._batch_size = settings.consume_batch_max_size
        self._timeout_ms = round(1000 * settings.consume_timeout_s)
        self._member_state = state
        self._workers = workers
        self._timer = timer
        self._send_back = send_back
        self._tracebacks = TracebackLimit()
        self.replier: Replier | None = None  # sends replies to requests
        # The calls by ``id``. The dictionary is changed without a lock, in single steps of the interpreter: see
        # ``_record_results``. A call stays in the dictionary until its messages are finished or wait for another call. So if
        # anything fails, the messages become late messages, which are sent back.
        self._calls: dict[int, ConcurrentCall] = {}
        self._ended_calls: deque[ConcurrentCall] = deque()  # ended calls whose results are not recorded yet
        self._result_lock = threading.Lock()  # held by the thread that records results
        self._late_return_threads = late_return_threads
        # Each queue whose late messages are being sent back has a lock in this dictionary. A failed call of the queue waits for
        # the lock, and then sends back only its messages that were not sent back as late messages.
        self._return_locks: dict[ProcessQueue, threading.Lock] = {}
        self._closed = False

    def is_ready(self, queue: ProcessQueue) -> bool:
        """Return True, because a concurrent consumer may pull a queue at any time (see ``pulling.ConsumeService``)."""
        return True

    def close(self) -> None:
        """Start no more calls of the listener."""
        self._closed = True

    def submit(self, queue: ProcessQueue, messages: Sequence[Any]) -> None:
        """Queue messages for the listener, in batches of ``consumeMessageBatchMaxSize``. Each ``Rows`` is a batch of its
        own.
        """
        batches, call_count = queue.split_into_calls(messages, self._batch_size)
        # All calls share one object, because each run of the garbage collector visits the objects that wait for a thread.
        next_call = partial(self._start_call, queue, batches)
        if not isinstance(self._listener, DeferredListener):
            self._workers.submit(*repeat(partial(self._consume, next_call), call_count))
        elif isinstance(refusal := capture(self._listener.submit, next_call, call_count), Failure):
            self._workers.submit(*repeat(partial(self._consume, next_call, refusal), call_count))

    def _start_call(self, queue: ProcessQueue, batches: Iterator[Sequence[ReceivedMessage]]) -> ConcurrentCall | None:
        """Create the next call, whose time starts now. Returns None if the listener must not be called."""
        messages = next(batches)
        call = ConcurrentCall(
            queue, messages, self._timer.now_ms(), self.context(queue.queue, messages), self._on_outcome
        )
        # The call is added before the check. Otherwise, a thread that closes this service between the two steps would not see
        # the call, and would not wait for it.
        self._calls[id(call)] = call
        if queue.dropped or self._closed:
            self._calls.pop(id(call), None)
            return None
        return call

    def _consume(self, next_call: Callable[[], ConcurrentCall | None], refusal: Failure | None = None) -> None:
        """Call the listener. If the listener's event loop was closed, ``refusal`` is set, and this worker sends the messages
        back instead.
        """
        if (call := next_call()) is not None:
            self._on_outcome(call, refusal or capture(self._listener, call.messages, call.context))

    def context(self, queue: MessageQueue, messages: Sequence[ReceivedMessage]) -> Context:
        """Return the context for these messages."""
        return with_replier(Context(queue), messages, self.replier)

    def call_directly(self, messages: Sequence[ReceivedMessage], context: Context) -> object:
        """Call the listener now (request 309), and return its outcome."""
        if not isinstance(self._listener, DeferredListener):
            return capture(self._listener, messages, context)
        call = _DirectCall(messages, context)
        submission = capture(self._listener.submit, lambda: None if self._closed else call, 1, True)
        while not isinstance(submission, Failure):
            try:
                return call.outcome_queue.get(timeout=_CLOSED_CHECK_INTERVAL_S)
            except Empty:
                if self._closed:  # a cancelled call has no outcome
                    return Failure(ClosedError("the consumer is closed"))
        return submission

    def wait_for_calls(self, deadline: Deadline) -> bool:
        """Wait for calls that do not run on threads of the workers; returns False after the deadline."""
        if not isinstance(self._listener, DeferredListener):
            return True
        while self._calls and not deadline.expired:
            self._timer.pause(_IDLE_CHECK_INTERVAL_S)
        return not self._calls

    def unfinished_messages(self) -> list[ReceivedMessage]:
        """Return the messages that listeners are processing now."""
        return [message for call in list(self._calls.values()) for message in call.messages]

    def send_late_messages_back(self) -> None:
        """Send late messages back, so that the offset of their queue can advance.

        Each queue has a separate thread, because a slow broker may take minutes for the rows of a call. A slow broker must not
        delay the calling thread, which also stores offsets, or the late messages of other queues.
        """
        for queue in self._member_state.owned_queues():
            if self._late_return_threads.has_work(queue.queue) or not self._late_messages(queue):
                continue
            try:
                self._late_return_threads.run(queue.queue, partial(self._send_late_messages_of_queue_back, queue))
            except RuntimeError as e:
                logger.warning("late messages of %s are not sent back yet: no thread can start: %s", queue.queue, e)
                return

    def _late_messages(self, queue: ProcessQueue) -> Sequence[ReceivedMessage]:
        with self._member_state.lock:
            return late_messages(queue, list(self._calls.values()), self._timer.now_ms(), self._timeout_ms)

    def _send_late_messages_of_queue_back(self, queue: ProcessQueue) -> None:
        """Send back the late messages of a queue, until the queue has no late messages or no broker accepts them."""
        remaining_count = MAX_LATE_MESSAGES_PER_RUN
        # The lock is created before the search for late messages, so that a call that fails after the search finds the lock.
        lock = self._return_locks.setdefault(queue, threading.Lock())
        try:
            while remaining_count > 0 and not self._closed:
                with lock:
                    late_batch, unsent_messages = self._send_late_messages_of_call_back(queue)
                if unsent_messages or not late_batch:
                    return  # the next search would have the same result
                remaining_count -= len(late_batch)
        finally:
            del self._return_locks[queue]

    def _send_late_messages_of_call_back(
        self, queue: ProcessQueue
    ) -> tuple[Sequence[ReceivedMessage], Sequence[ReceivedMessage]]:
        """Send back the late messages of one call. Returns the late messages, and the messages among them that no broker
        accepted.
        """
        late_batch = self._late_messages(queue)
        action = "sent back" if self._send_back is not None else DROPPED_TEXT
        for message in late_batch:
            text = "the listener has had message %s of %s for too long: it is %s"
            logger.warning(text, message.msg_id, queue.queue, action)

        def is_over() -> bool:
            """Whether the call has succeeded meanwhile, or the queue was dropped."""
            with self._member_state.lock:
                return queue.dropped or not queue.late_messages(late_batch)

        unsent_messages = send_all_back(
            late_batch,
            lambda message: self._send_one_back(queue.with_original_body(message), LATE_MESSAGE_DELAY_LEVEL),
            is_over,
        )
        if late_batch:
            with self._member_state.lock:
                queue.finish_late_messages(late_batch, unsent_messages)
        return late_batch, unsent_messages

    def _on_outcome(self, call: ConcurrentCall, outcome: object) -> None:
        if outcome is None and call.context.ack_index is None:  # nearly all calls take this branch, which is fast
            self._finish(call, len(call.messages), call.messages)
            return
        result = capture(self._handle_failure, call, outcome)
        if isinstance(result, Failure):
            result.log(logger, "messages of %s could not be returned to the broker", call.queue.queue)
            self._retry_later(call, call.messages)

    def _handle_failure(self, call: ConcurrentCall, outcome: object) -> None:
        """Send the messages that did not succeed back to brokers, and record the result."""
        queue, messages = call.queue, call.messages
        call.has_outcome = True
        verdict = judge_concurrent_outcome(outcome, call.context, len(messages))
        if verdict.problem:
            error = self._tracebacks.due(outcome)
            logger.warning("messages of %s failed: %s", queue.queue, verdict.problem, exc_info=error)
        failed_messages = [] if queue.dropped else messages[verdict.done_count :]
        unsent_messages = (
            self._send_failed_messages_back(call, failed_messages, verdict.delay_level) if failed_messages else []
        )
        unsent_offsets = {message.queue_offset for message in unsent_messages}
        finished_messages = (
            [message for message in messages if message.queue_offset not in unsent_offsets]
            if unsent_messages
            else messages
        )
        self._finish(call, verdict.done_count, finished_messages)
        if unsent_messages:
            self._retry_later(call, unsent_messages)

    def _finish(self, call: ConcurrentCall, done_count: int, finished_messages: Sequence[ReceivedMessage]) -> None:
        call.done_count, call.finished_messages, call.ended_ms = done_count, finished_messages, self._timer.now_ms()
        self._ended_calls.append(call)
        self._record_results()

    def _record_results(self) -> None:
        """Record the results of all threads. If another thread is recording results, that thread also records the result of
        this thread.

        No thread waits for another thread. If threads waited, the interpreter would switch threads for each message, and the
        calls of a quick listener would take three times as long.
        """
        while self._ended_calls and self._result_lock.acquire(blocking=False):
            try:
                with self._member_state.lock:
                    while self._ended_calls:
                        self._record_locked(self._ended_calls.popleft())
            finally:
                self._result_lock.release()

    def _record_locked(self, call: ConcurrentCall) -> None:
        """Record a result; the caller holds the lock. Results of a dropped queue are ignored."""
        queue, done_count, state = call.queue, call.done_count, self._member_state
        if queue.dropped:
            self._calls.pop(id(call), None)
            return
        failed_count = len(call.messages) - done_count
        state.counts["consumed"] += done_count
        if failed_count:
            state.counts["failed"] += failed_count
        count_before = queue.count
        state.record_finished_locked(queue, queue.remove(call.finished_messages))
        if count_before > state.resume_threshold >= queue.count:
            state.room_available.notify_all()
        queue.last_consume_ms = call.ended_ms
        state.figures.record_call(
            queue.queue.topic, done_count, failed_count, call.ended_ms - call.started_ms, call.ended_ms
        )
        self._calls.pop(id(call), None)

    def _retry_later(self, call: ConcurrentCall, unsent_messages: Sequence[ReceivedMessage]) -> None:
        """Call the listener again with messages that could not be sent back."""
        with self._member_state.lock:
            messages_to_retry = call.queue.requeue(call.messages, unsent_messages)
            self._calls.pop(id(call), None)
        self._timer.call_later(RETRY_DELAY_S, partial(self.submit, call.queue, messages_to_retry))

    def _send_failed_messages_back(
        self, call: ConcurrentCall, failed_messages: Sequence[ReceivedMessage], delay_level: int
    ) -> list[ReceivedMessage]:
        """Send messages of a call back. Returns the messages that no broker accepted."""
        if self._send_back is None:
            for message in failed_messages:
                logger.warning("message %s failed and is %s", message.msg_id, DROPPED_TEXT)
            return []
        queue = call.queue
        is_late = self._timer.now_ms() - call.started_ms > self._timeout_ms
        with (self._return_locks.get(queue) if is_late else None) or nullcontext(), self._member_state.lock:
            cached_messages = queue.messages_still_cached(call.messages, failed_messages)
        return send_all_back(
            cached_messages,
            lambda message: self._send_one_back(queue.with_original_body(message), delay_level),
            lambda: queue.dropped,
        )

    def _send_one_back(self, message: ReceivedMessage, delay_level: int) -> bool:
        """Send a message back, and return whether a broker accepted the message. In a broadcasting group, return True, because
        the group drops failed messages.
        """
        if self._send_back is None:
            return True
        send_outcome = capture(self._send_back, message, delay_level)
        if isinstance(send_outcome, Failure):
            send_outcome.log(logger, "message %s could not be returned to the broker", message.msg_id)
            return False
        return send_outcome
