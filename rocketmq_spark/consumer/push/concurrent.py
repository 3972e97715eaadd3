"""Messages to a listener, many at once and in any order: Java's ``ConsumeMessageConcurrentlyService``.

Failed messages are sent back, so that the committed offset can advance. A message that cannot be sent back goes to the
listener again. Results of a queue count only while this member owns the queue.

A listener that does not return would keep the offset from advancing: ``expired`` finds its message, as Java's
``ProcessQueue.cleanExpiredMsg`` does. It looks at the first message of a queue only, because only that one holds up the
offset.
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
from rocketmq_spark.base.threads import Aside, Failure, Timer, Tracebacks, attempt
from rocketmq_spark.consumer.process_queue import ProcessQueue
from rocketmq_spark.consumer.push.member_state import MemberState
from rocketmq_spark.consumer.push.workers import DROPPED, SendBack, Workers, send_each
from rocketmq_spark.consumer.result import (
    Context,
    DeferredListener,
    Listener,
    ListenerCall,
    Replier,
    judge_concurrent,
    with_replier,
)
from rocketmq_spark.consumer.settings import ConsumerSettings
from rocketmq_spark.errors import ClosedError
from rocketmq_spark.model import MessageQueue, ReceivedMessage

logger = logging.getLogger(__name__)

_LOOK_S = 0.01
_ASK_S = 1.0
MAX_AT_ONCE = 16  # of one queue in one run; more if one call has more
DELAY_LEVEL = 3


class Call(ListenerCall):
    """One call of the listener: its messages, perhaps ``Rows``, when it began, and its result, of which ``taken`` is called once.

    The first ``done`` messages succeeded. ``finished`` ones are done, or a broker has taken them back. A ``settled`` call does
    not expire any more, because the thread that has its result sends its messages back.
    """

    __slots__ = ("_taken", "began_ms", "done", "ended_ms", "finished", "queue", "settled")

    def __init__(
        self,
        queue: ProcessQueue,
        messages: Sequence[ReceivedMessage],
        began_ms: int,
        context: Any = None,
        taken: Callable[[Call, object], None] = lambda call, outcome: None,
    ) -> None:
        self.queue, self.messages, self.began_ms = queue, messages, began_ms
        self.context, self._taken = context, taken
        self.done, self.ended_ms, self.settled = 0, began_ms, False
        self.finished: Sequence[ReceivedMessage] = ()

    def __call__(self, outcome: object) -> None:
        self._taken(self, outcome)


class _Asked(ListenerCall):
    """A call that a broker asked for (request 309)."""

    __slots__ = ("outcome",)

    def __init__(self, messages: Sequence[ReceivedMessage], context: Context) -> None:
        super().__init__(messages, context)
        self.outcome: SimpleQueue[object] = SimpleQueue()

    def __call__(self, outcome: object) -> None:
        self.outcome.put(outcome)


def expired(queue: ProcessQueue, calls: Iterable[Call], now_ms: int, timeout_ms: int) -> Sequence[ReceivedMessage]:
    """The messages that hold up the offset if one of ``calls`` has had them for longer than ``timeout_ms``, else none."""
    if queue.dropped:
        return ()
    late = (c for c in calls if c.queue is queue and not c.settled and now_ms - c.began_ms > timeout_ms)
    return next(filter(len, (queue.late_messages(call.messages) for call in late)), ())


AGAIN_S = 5.0


class Concurrent:
    """Calls ``listener`` on the threads of the workers. Without ``send_back`` (broadcasting), failed messages are dropped.

    Late messages are those that a listener has had for longer than ``consumeTimeout``. ``late_returns`` runs one thread for each
    queue with late messages.
    """

    def __init__(
        self,
        listener: Listener,
        settings: ConsumerSettings,
        held: MemberState,
        workers: Workers,
        timer: Timer,
        send_back: SendBack | None,
        late_returns: Aside,
    ) -> None:
        self._listener = listener
        self._size = settings.consume_batch_max_size
        self._timeout_ms = round(1000 * settings.consume_timeout_s)
        self._held = held
        self._workers = workers
        self._timer = timer
        self._send_back = send_back
        self._tracebacks = Tracebacks()
        self.replier: Replier | None = None  # how requests are answered
        # Changed in single steps of the interpreter, without a lock: see ``_note_results``. A call stays until its messages are
        # finished or wait for another one, so that they expire whatever happens on the way.
        self._calls: dict[int, Call] = {}  # by identity
        self._results: deque[Call] = deque()
        self._noting = threading.Lock()
        self._late_returns = late_returns
        # Each queue whose late messages are being sent back has a lock here. A call that fails at that time waits for the lock,
        # and then sends back only its other messages.
        self._return_locks: dict[ProcessQueue, threading.Lock] = {}
        self._closed = False

    def ready(self, queue: ProcessQueue) -> bool:
        """A queue may be pulled at any time (``pulling.Consuming``)."""
        return True

    def close(self) -> None:
        """Begin no more listener calls."""
        self._closed = True

    def submit(self, queue: ProcessQueue, messages: Sequence[Any]) -> None:
        """Queue messages for the listener, in batches of ``consumeMessageBatchMaxSize``; ``Rows`` as they are."""
        parts, calls = queue.split_into_calls(messages, self._size)
        # One object for all calls: those that wait for a thread are looked at by each run of the garbage collector.
        turn = partial(self._begun, queue, parts)
        if not isinstance(self._listener, DeferredListener):
            self._workers.submit(*repeat(partial(self._consume, turn), calls))
        elif isinstance(refused := attempt(self._listener.submit, turn, calls), Failure):
            self._workers.submit(*repeat(partial(self._consume, turn, refused), calls))

    def _begun(self, queue: ProcessQueue, parts: Iterator[Sequence[ReceivedMessage]]) -> Call | None:
        """Start the time of the next call; None if the listener must not be called."""
        messages = next(parts)
        call = Call(queue, messages, self._timer.now_ms(), self.context(queue.queue, messages), self._called)
        self._calls[id(call)] = call  # first: who closes this, and then waits for calls, must see it
        if queue.dropped or self._closed:
            self._calls.pop(id(call), None)
            return None
        return call

    def _consume(self, turn: Callable[[], Call | None], refused: Failure | None = None) -> None:
        """Call the listener. If its event loop was closed, the messages were ``refused`` and are sent back here, on a worker."""
        if (call := turn()) is not None:
            self._called(call, refused or attempt(self._listener, call.messages, call.context))

    def context(self, queue: MessageQueue, messages: Sequence[ReceivedMessage]) -> Context:
        """Return the context for these messages."""
        return with_replier(Context(queue), messages, self.replier)

    def call(self, messages: Sequence[ReceivedMessage], context: Context) -> object:
        """Call the listener now (request 309), and return its outcome."""
        if not isinstance(self._listener, DeferredListener):
            return attempt(self._listener, messages, context)
        call = _Asked(messages, context)
        begun = attempt(self._listener.submit, lambda: None if self._closed else call, 1, True)
        while not isinstance(begun, Failure):
            try:
                return call.outcome.get(timeout=_ASK_S)
            except Empty:
                if self._closed:  # a cancelled call has no outcome
                    return Failure(ClosedError("the consumer is closed"))
        return begun

    def idle(self, deadline: Deadline) -> bool:
        """Wait for calls that run on no thread of the workers; returns False after the deadline."""
        if not isinstance(self._listener, DeferredListener):
            return True
        while self._calls and not deadline.expired:
            self._timer.pause(_LOOK_S)
        return not self._calls

    def unfinished(self) -> list[ReceivedMessage]:
        """Return the messages that listeners have now."""
        return [message for call in list(self._calls.values()) for message in call.messages]

    def clean(self) -> None:
        """Send late messages back, so that the offset of their queue can advance.

        Each queue has a separate thread: a slow broker may take minutes for the rows of a call, and must delay neither the thread
        that calls this method, which stores offsets, nor the late messages of other queues.
        """
        for queue in self._held.owned():
            if self._late_returns.busy(queue.queue) or not self._late(queue):
                continue
            try:
                self._late_returns.run(queue.queue, partial(self._send_late_back, queue))
            except RuntimeError as e:
                logger.warning("late messages of %s are not sent back yet: no thread can start: %s", queue.queue, e)
                return

    def _late(self, queue: ProcessQueue) -> Sequence[ReceivedMessage]:
        with self._held.lock:
            return expired(queue, list(self._calls.values()), self._timer.now_ms(), self._timeout_ms)

    def _send_late_back(self, queue: ProcessQueue) -> None:
        """Send back the late messages of a queue, until the queue has none or no broker accepts them."""
        room = MAX_AT_ONCE
        # The lock exists before the search for late messages, so that a call that is settled after the search finds the lock.
        lock = self._return_locks.setdefault(queue, threading.Lock())
        try:
            while room > 0 and not self._closed:
                with lock:
                    late, left = self._send_late_call_back(queue)
                if left or not late:
                    return  # the next search would find the same messages
                room -= len(late)
        finally:
            del self._return_locks[queue]

    def _send_late_call_back(self, queue: ProcessQueue) -> tuple[Sequence[ReceivedMessage], Sequence[ReceivedMessage]]:
        """Send back the late messages of one call. Returns these messages, and those of them that no broker accepted."""
        late = self._late(queue)
        what = "sent back" if self._send_back is not None else DROPPED
        for message in late:
            text = "the listener has had message %s of %s for too long: it is %s"
            logger.warning(text, message.msg_id, queue.queue, what)

        def is_over() -> bool:
            """Whether the call succeeded meanwhile, or the queue has another owner."""
            with self._held.lock:
                return queue.dropped or not queue.late_messages(late)

        left = send_each(late, lambda message: self._took(queue.with_original_body(message), DELAY_LEVEL), is_over)
        if late:
            with self._held.lock:
                queue.finish_late(late, left)
        return late, left

    def _called(self, call: Call, outcome: object) -> None:
        if outcome is None and call.context.ack_index is None:  # nearly always; ``concurrent`` would say the same
            self._finished(call, len(call.messages), call.messages)
            return
        settled = attempt(self._settle, call, outcome)
        if isinstance(settled, Failure):
            settled.log(logger, "messages of %s could not be returned to the broker", call.queue.queue)
            self._again(call, call.messages)

    def _settle(self, call: Call, outcome: object) -> None:
        """Return messages that are not done to a broker."""
        queue, messages = call.queue, call.messages
        call.settled = True
        verdict = judge_concurrent(outcome, call.context, len(messages))
        if verdict.problem:
            trace = self._tracebacks.due(outcome)
            logger.warning("messages of %s failed: %s", queue.queue, verdict.problem, exc_info=trace)
        failed = [] if queue.dropped else messages[verdict.done_count :]
        left = self._handed_back(call, failed, verdict.level) if failed else []
        waits = {message.queue_offset for message in left}
        done = [message for message in messages if message.queue_offset not in waits] if left else messages
        self._finished(call, verdict.done_count, done)
        if left:
            self._again(call, left)

    def _finished(self, call: Call, done: int, finished: Sequence[ReceivedMessage]) -> None:
        call.done, call.finished, call.ended_ms = done, finished, self._timer.now_ms()
        self._results.append(call)
        self._note_results()

    def _note_results(self) -> None:
        """Record results: one thread at a time does it for all threads, and the others continue.

        Threads that waited for each other here would hand over the interpreter with each message, which costs three times
        what a quick listener's message costs otherwise.
        """
        while self._results and self._noting.acquire(blocking=False):
            try:
                with self._held.lock:
                    while self._results:
                        self._note(self._results.popleft())
            finally:
                self._noting.release()

    def _note(self, call: Call) -> None:
        """Record a result; the caller holds the lock. Results of a dropped queue are ignored."""
        queue, done, held = call.queue, call.done, self._held
        if queue.dropped:
            self._calls.pop(id(call), None)
            return
        failed = len(call.messages) - done
        held.counts["consumed"] += done
        if failed:
            held.counts["failed"] += failed
        before = queue.count
        held.finished(queue, queue.remove(call.finished))
        if before > held.low >= queue.count:
            held.changed.notify_all()
        queue.last_consume_ms = call.ended_ms
        held.figures.consumed(queue.queue.topic, done, failed, call.ended_ms - call.began_ms, call.ended_ms)
        self._calls.pop(id(call), None)

    def _again(self, call: Call, left: Sequence[ReceivedMessage]) -> None:
        """Call the listener again with messages that could not be sent back."""
        with self._held.lock:
            again = call.queue.requeue(call.messages, left)
            self._calls.pop(id(call), None)
        self._timer.later(AGAIN_S, partial(self.submit, call.queue, again))

    def _handed_back(self, call: Call, failed: Sequence[ReceivedMessage], level: int) -> list[ReceivedMessage]:
        """Return messages of a call to brokers; returns those that failed."""
        if self._send_back is None:
            for message in failed:
                logger.warning("message %s failed and is %s", message.msg_id, DROPPED)
            return []
        queue = call.queue
        is_late = self._timer.now_ms() - call.began_ms > self._timeout_ms
        with (self._return_locks.get(queue) if is_late else None) or nullcontext(), self._held.lock:
            unfinished = queue.still_cached(call.messages, failed)
        return send_each(
            unfinished, lambda message: self._took(queue.with_original_body(message), level), lambda: queue.dropped
        )

    def _took(self, message: ReceivedMessage, level: int) -> bool:
        """Whether a broker has taken the message back. Broadcasting: True, because failed messages are dropped."""
        if self._send_back is None:
            return True
        taken = attempt(self._send_back, message, level)
        if isinstance(taken, Failure):
            taken.log(logger, "message %s could not be returned to the broker", message.msg_id)
            return False
        return taken
