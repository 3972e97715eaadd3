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
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from itertools import repeat
from queue import Empty, SimpleQueue
from typing import Any, NamedTuple

from rocketmq_spark.base.clock import Deadline
from rocketmq_spark.base.threads import Failure, Timer, attempt
from rocketmq_spark.consumer.process_queue import ProcessQueue
from rocketmq_spark.consumer.push.member_state import MemberState
from rocketmq_spark.consumer.push.workers import DROPPED, SendBack, Workers
from rocketmq_spark.consumer.result import (
    Context,
    Listener,
    OutcomeLater,
    Replier,
    TakesOutcome,
    concurrent,
    replying,
)
from rocketmq_spark.consumer.settings import ConsumerSettings
from rocketmq_spark.errors import ClosedError
from rocketmq_spark.model import MessageQueue, ReceivedMessage

logger = logging.getLogger(__name__)

_LOOK_S = 0.01
_ASK_S = 1.0
MAX_AT_ONCE = 16  # of one queue in one run; more if one call has more
DELAY_LEVEL = 3


class Call(NamedTuple):
    """A call of the listener: its messages, perhaps ``Rows``, and when it began."""

    queue: ProcessQueue
    messages: Sequence[ReceivedMessage]
    began_ms: int


def expired(queue: ProcessQueue, calls: Iterable[Call], now_ms: int, timeout_ms: int) -> Sequence[ReceivedMessage]:
    """The messages that hold up the offset if one of ``calls`` has had them for longer than ``timeout_ms``, else none."""
    if queue.dropped:
        return ()
    late = (call for call in calls if call.queue is queue and now_ms - call.began_ms > timeout_ms)
    return next(filter(len, (queue.late(call.messages) for call in late)), ())


AGAIN_S = 5.0


class _Result(NamedTuple):
    """The result of a call. ``finished`` messages are done, or a broker has taken them back."""

    call: Call
    done: int
    finished: Sequence[ReceivedMessage]
    ended_ms: int


class _Later(TakesOutcome):
    """Takes the outcome of one call that ends later."""

    __slots__ = ("_call", "_consuming", "_context")

    def __init__(self, consuming: Concurrent, call: Call, context: Context) -> None:
        self._consuming, self._call, self._context = consuming, call, context

    def begins(self) -> bool:
        begun = self._consuming.begins(self._call)
        self._call = begun or self._call
        return begun is not None

    def __call__(self, outcome: object) -> None:
        self._consuming.called(self._call, self._context, outcome)


class Concurrent:
    """Calls ``listener`` on the threads of the workers. Without ``send_back`` (broadcasting), failed messages are dropped."""

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
        self._size = settings.consume_batch_max_size
        self._timeout_ms = round(1000 * settings.consume_timeout_s)
        self._held = held
        self._workers = workers
        self._timer = timer
        self._send_back = send_back
        self.replier: Replier | None = None  # how requests are answered
        # Both are changed in single steps of the interpreter, without a lock: see ``_note_results``. A call stays until its
        # messages are finished or wait for another one, so that they expire whatever happens on the way.
        self._calls: dict[int, Call] = {}  # by identity
        self._later: dict[int, Call] = {}  # calls whose listener runs on no thread (coroutines)
        self._results: deque[_Result] = deque()
        self._noting = threading.Lock()
        self._closed = False

    def ready(self, queue: ProcessQueue) -> bool:
        """A queue may be pulled at any time (``pulling.Consuming``)."""
        return True

    def close(self) -> None:
        """Begin no more listener calls."""
        self._closed = True

    def submit(self, queue: ProcessQueue, messages: Sequence[Any]) -> None:
        """Queue messages for the listener, in batches of ``consumeMessageBatchMaxSize``; ``Rows`` as they are."""
        parts, calls = queue.calls(messages, self._size)
        # One object for all calls: those that wait for a thread are looked at by each run of the garbage collector.
        self._workers.submit(*repeat(partial(self._next, queue, parts), calls))

    def _next(self, queue: ProcessQueue, parts: Iterator[Sequence[ReceivedMessage]]) -> None:
        self._consume(queue, next(parts))

    def context(self, queue: MessageQueue, messages: Sequence[ReceivedMessage]) -> Context:
        """Return the context for these messages."""
        return replying(Context(queue), messages, self.replier)

    def call(self, messages: Sequence[ReceivedMessage], context: Context) -> object:
        """Call the listener now (request 309), and return its outcome."""
        outcome = attempt(self._listener, messages, context)
        if not isinstance(outcome, OutcomeLater):
            return outcome
        given: SimpleQueue[object] = SimpleQueue()
        begun = attempt(outcome.begin, given.put)
        while not isinstance(begun, Failure):
            try:
                return given.get(timeout=_ASK_S)
            except Empty:
                if self._closed:  # a cancelled call has no outcome
                    return Failure(ClosedError("the consumer is closed"))
        return begun

    def idle(self, deadline: Deadline) -> bool:
        """Wait for the outcomes of calls that end later; returns False after the deadline."""
        while self._later and not deadline.expired:
            self._timer.pause(_LOOK_S)
        return not self._later

    def unfinished(self) -> list[ReceivedMessage]:
        """Return the messages that listeners have now."""
        return [message for call in list(self._calls.values()) for message in call.messages]

    def clean(self) -> None:
        """Send back messages that a listener has had for longer than ``consumeTimeout``, so that the offset can advance."""
        for queue in self._held.owned():
            room = MAX_AT_ONCE
            while room > 0:
                with self._held.lock:
                    late = expired(queue, list(self._calls.values()), self._timer.now_ms(), self._timeout_ms)
                if not late:
                    break
                text = "the listener has had message %s of %s for too long: it is %s"
                what = "sent back" if self._send_back is not None else DROPPED
                for message in late:
                    logger.warning(text, message.msg_id, queue.queue, what)
                left = [message for message in late if not self._took(queue.as_pulled(message), DELAY_LEVEL)]
                with self._held.lock:
                    queue.settle(late, left)
                if left:
                    break  # they would be the next ones again; what else waits for this thread goes first
                room -= len(late)

    def _consume(self, queue: ProcessQueue, messages: Sequence[ReceivedMessage]) -> None:
        if queue.dropped or self._closed:
            return
        context, call = self.context(queue.queue, messages), Call(queue, messages, self._timer.now_ms())
        self._calls[id(call)] = call
        outcome = attempt(self._listener, messages, context)
        if isinstance(outcome, OutcomeLater):
            self._later[id(call)] = call
            if outcome.waits:  # its time has not begun
                self._calls.pop(id(call), None)
            begun = attempt(outcome.begin, _Later(self, call, context))
            if not isinstance(begun, Failure):
                return
            outcome = begun
        self.called(call, context, outcome)

    def begins(self, call: Call) -> Call | None:
        """Start the time of the call. Returns False if the listener must not be called."""
        begun = call._replace(began_ms=self._timer.now_ms())
        may = not call.queue.dropped and not self._closed
        if may:
            self._calls[id(begun)] = self._later[id(begun)] = begun
        self._later.pop(id(call), None)  # not before: who waits for all must see one of both
        return begun if may else None

    def called(self, call: Call, context: Context, outcome: object) -> None:
        queue, messages = call.queue, call.messages
        self._later.pop(id(call), None)
        if outcome is None and context.ack_index is None:  # nearly always; ``concurrent`` would say the same
            self._finished(call, len(messages), messages)
            return
        settled = attempt(self._settle, call, outcome, context)
        if isinstance(settled, Failure):
            settled.log(logger, "messages of %s could not be returned to the broker", queue.queue)
            self._again(call, messages)

    def _settle(self, call: Call, outcome: object, context: Context) -> None:
        """Return messages that are not done to a broker."""
        queue, messages = call.queue, call.messages
        verdict = concurrent(outcome, context, len(messages))
        if verdict.why:
            trace = outcome.error if isinstance(outcome, Failure) else None
            logger.warning("messages of %s failed: %s", queue.queue, verdict.why, exc_info=trace)
        failed = [] if queue.dropped else messages[verdict.done :]
        left = self._handed_back(call, failed, verdict.level) if failed else []
        waits = {message.queue_offset for message in left}
        done = [message for message in messages if message.queue_offset not in waits] if left else messages
        self._finished(call, verdict.done, done)
        if left:
            self._again(call, left)

    def _finished(self, call: Call, done: int, finished: Sequence[ReceivedMessage]) -> None:
        self._results.append(_Result(call, done, finished, self._timer.now_ms()))
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

    def _note(self, result: _Result) -> None:
        """Record results; the caller holds the lock. Results of a dropped queue are ignored."""
        (queue, messages, began_ms), done, held = result.call, result.done, self._held
        if queue.dropped:
            self._calls.pop(id(result.call), None)
            return
        failed = len(messages) - done
        held.counts["consumed"] += done
        if failed:
            held.counts["failed"] += failed
        before = queue.count
        held.finished(queue, queue.remove(result.finished))
        if before > held.low >= queue.count:
            held.changed.notify_all()
        queue.last_consume_ms = result.ended_ms
        held.figures.consumed(queue.queue.topic, done, failed, result.ended_ms - began_ms, result.ended_ms)
        self._calls.pop(id(result.call), None)

    def _again(self, call: Call, left: Sequence[ReceivedMessage]) -> None:
        """Call the listener again with messages that could not be sent back."""
        with self._held.lock:
            again = call.queue.again(call.messages, left)
            self._calls.pop(id(call), None)
        self._timer.later(AGAIN_S, partial(self.submit, call.queue, again))

    def _handed_back(self, call: Call, failed: Sequence[ReceivedMessage], level: int) -> list[ReceivedMessage]:
        """Return messages of a call to brokers; returns those that failed."""
        if self._send_back is None:
            for message in failed:
                logger.warning("message %s failed and is %s", message.msg_id, DROPPED)
            return []
        with self._held.lock:
            here = call.queue.unfinished(call.messages, failed)
        return [message for message in here if not self._took(call.queue.as_pulled(message), level)]

    def _took(self, message: ReceivedMessage, level: int) -> bool:
        """Whether a broker has taken the message back. Broadcasting: True, because failed messages are dropped."""
        if self._send_back is None:
            return True
        taken = attempt(self._send_back, message, level)
        if isinstance(taken, Failure):
            taken.log(logger, "message %s could not be returned to the broker", message.msg_id)
            return False
        return taken
