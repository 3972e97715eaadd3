"""Requests without an outcome: the limits of their number, the order in which they are sent, and their futures.

``InFlight`` bounds requests, their bytes, and the requests at each broker. Pure. The bound per broker adapts unless the user
set one: every batch that waits in a broker adds to the latency by which slow brokers are recognised. So the bound grows
while few requests are in flight, and halves when a request is retried.

``Pending`` has the futures and callbacks of asynchronous sends, counted so that a close can wait. It owns a lock and the
thread that runs callbacks. ``UnderWay`` is a driver with the only lock of an engine: under the lock it decides with
``OrderedQueues`` and ``InFlight``, and the engine acts after the lock is released.
"""

from __future__ import annotations

import functools
import logging
import threading
from collections.abc import Callable, Collection, Hashable, Iterator, Sequence
from concurrent.futures import Future
from concurrent.futures._base import FINISHED, RUNNING
from typing import Any, NamedTuple

from rocketmq_spark.base.clock import Deadline
from rocketmq_spark.base.threads import Failure, Timer, attempt, may_wait
from rocketmq_spark.errors import ClosedError, MessageIllegal, RocketMQError, SendFailed
from rocketmq_spark.model import SendResult, SendStatus
from rocketmq_spark.producer.attempts import RetryAttempt
from rocketmq_spark.producer.destination import OrderedQueues
from rocketmq_spark.producer.outgoing import BatchResults, Callback, Outcome, Outgoing, PromptCallback, of_batch
from rocketmq_spark.producer.settings import ProducerSettings

logger = logging.getLogger(__name__)

START, MAX_PER_BROKER, AIM_BYTES = 4, 64, 8 << 20


class InFlight:
    """Counts requests without an outcome, and limits them. ``brokers`` is the number of brokers that are published to."""

    def __init__(self, settings: ProducerSettings) -> None:
        self.requests = self.bytes = 0
        self.brokers = 1
        self.per_broker = settings.max_in_flight_per_broker or START
        self._adapts = settings.max_in_flight is None and settings.max_in_flight_per_broker is None
        self._total = settings.max_in_flight
        self._max_requests = settings.max_async_messages
        self._max_bytes = settings.max_async_bytes

    @property
    def counts_brokers(self) -> bool:
        """Whether the limit is per broker."""
        return self._total is None

    @property
    def max_out(self) -> int:
        """How many requests may be at brokers at once."""
        return self._total if self._total is not None else self.per_broker * max(1, self.brokers)

    def has_room(self, size: int, ordered: bool) -> bool:
        """Whether a request of ``size`` bytes is within the bounds; a single one always is.

        With a limit per broker, requests that may go to any queue wait in the caller, where they cost nothing. Ordered
        requests wait inside for their queue, so that a slow or muted queue does not delay the others.
        """
        if not self.requests:
            return True
        if self.bytes + size > self._max_bytes:
            return False
        if self._max_requests is not None and self.requests >= self._max_requests:
            return False
        return ordered or not self.counts_brokers or self.requests < self.max_out

    def add(self, size: int) -> None:
        self.requests += 1
        self.bytes += size

    def remove(self, size: int) -> None:
        self.requests -= 1
        self.bytes -= size

    def clear(self) -> None:
        self.requests = self.bytes = 0

    def answered(self, size: int, clean: bool) -> None:
        """A request of ``size`` bytes is acknowledged; ``clean`` if at the first attempt."""
        if not self._adapts:
            return
        if not clean:
            self.per_broker = max(1, self.per_broker // 2)
        elif size * (self.per_broker + 1) <= AIM_BYTES:
            self.per_broker = min(MAX_PER_BROKER, self.per_broker + 1)


_LAST_CALLBACKS_S = 5.0
_WAITING = frozenset(("_condition", "_waiters", "_done_callbacks"))  # of Python's futures, for waiting only


class Promise(Future[SendResult]):
    """The future result of one message.

    Creating a condition takes several times as long as everything else, and most results exist before they are requested. So
    the first waiter creates it, under the lock under which outcomes are set. Futures do not share it, because Python
    locks the futures of one ``wait`` in the order of their addresses, and a shared one would be locked in any order.
    """

    _state: str = RUNNING  # a send cannot be cancelled
    _own: SendResult | None = None
    _batch: SendResult | None = None  # of its batch, in which it is ``_at``, and has its own ids
    _at = 0
    _offset_id: str | None = None
    _exception: BaseException | None = None
    _awaited = False
    _done_callbacks: list[Callable[[Future[SendResult]], object]]

    callback: Callback | None = None
    msg_id = ""
    # The fields of ``accumulator.PlainEntry``: the promise of a plain message also carries the message.
    body, text, flag = b"", "", 0
    keys: Sequence[str] = ()

    def __init__(self, pending: Pending, callback: Callback | None, msg_id: str) -> None:
        self.pending = pending
        if callback is not None:
            self.callback = callback
        if msg_id:
            self.msg_id = msg_id

    def __getattr__(self, name: str) -> Any:
        if name not in _WAITING:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        with self.pending.lock:
            self._awaited = True  # first: after a Ctrl-C behind it, whoever sets the outcome creates what is missing
            if name not in self.__dict__:
                self._waiters, self._done_callbacks, self._condition = [], [], threading.Condition()
        return self.__dict__[name]

    @property
    def promise(self) -> Promise:
        return self

    @property
    def _result(self) -> SendResult | None:
        return self._own if self._batch is None else of_batch(self._batch, self._at, self.msg_id, self._offset_id)

    @_result.setter
    def _result(self, result: SendResult | None) -> None:
        self._own = result

    def done(self) -> bool:
        return self._state == FINISHED

    def result(self, timeout: float | None = None) -> SendResult:
        if self._state == FINISHED and (result := self._result) is not None:
            return result
        return super().result(timeout)

    def tell(self, outcome: Outcome) -> None:
        """The same, and notify waiters, without the lock."""
        if isinstance(outcome, RocketMQError):
            self.set_exception(outcome)
        else:
            self.set_result(outcome)


def _settled(promises: Sequence[Promise], outcomes: Sequence[Outcome]) -> list[tuple[Promise, Outcome]]:
    """Set the outcomes of promises; call with the lock. Returns the promises whose waiters must be notified."""
    awaited = []
    many = outcomes if isinstance(outcomes, BatchResults) else None
    for at, promise in enumerate(promises):
        if promise._awaited:
            awaited.append((promise, outcomes[at]))
            continue
        if many is not None:
            promise.msg_id, promise._offset_id = many.ids[at], many.offset_ids[at]
            promise._batch, promise._at = many.batch, at
        elif isinstance(outcome := outcomes[at], SendResult):
            promise._own = outcome
        else:
            promise._exception = outcome
        promise._state = FINISHED
    return awaited


class Pending:
    """The promises without an outcome."""

    def __init__(self, callbacks: Timer) -> None:
        self.lock = threading.RLock()
        self._callbacks = callbacks
        self._calls = False  # whether the callback thread has started
        self._none_left = threading.Condition(self.lock)
        self._count = 0
        self._lost: dict[str, RocketMQError] | None = None

    def watch(self) -> dict[str, RocketMQError]:
        """Return a dict that collects failures from now on, by message id."""
        lost: dict[str, RocketMQError] = {}
        self._lost = lost
        return lost

    def expect(self, callback: Callback | None = None, msg_id: str = "") -> Promise:
        """Return a future that ``keep`` completes once. ``callback`` is then called on the callback thread, which starts now."""
        if callback is not None and not self._calls and not isinstance(callback, PromptCallback):
            self._callbacks.begin()
            self._calls = True
        promise = Promise(self, callback, msg_id)
        with self.lock:
            self._count += 1
        return promise

    def keep(self, promises: Sequence[Promise], outcomes: Sequence[Outcome]) -> None:
        """Set the outcomes of promises. Those of a batch are set together."""
        try:
            if self._lost is not None:
                both = zip(promises, outcomes, strict=True)
                self._lost.update({promise.msg_id: o for promise, o in both if isinstance(o, RocketMQError)})
            with self.lock:
                awaited = _settled(promises, outcomes)
            for promise, outcome in awaited:
                failed = attempt(promise.tell, outcome)
                if isinstance(failed, Failure):  # Python's futures do not catch BaseException of callbacks
                    failed.log(logger, "a callback of a future failed")
            callbacks = [promise.callback for promise in promises]
            if callbacks.count(None) < len(callbacks):
                called = [(call, o) for call, o in zip(callbacks, outcomes, strict=True) if call is not None]
                if all(isinstance(callback, PromptCallback) for callback, _ in called):
                    _call_each(called)
                else:
                    self._callbacks.later(0, functools.partial(_call_each, called))
        finally:
            self.forget(len(promises))

    def forget(self, count: int = 1) -> None:
        """Count promises as done: kept, or withdrawn."""
        with self.lock:
            self._count -= count
            if not self._count:
                self._none_left.notify_all()

    def none_left(self, deadline: Deadline) -> bool:
        """Wait for all promises. Returns whether all are kept at the deadline."""
        with self.lock:
            while self._count and not deadline.expired:
                self._callbacks.hold(self._none_left, deadline.remaining())
            return not self._count

    def close(self) -> None:
        """Run the last callbacks, and end their thread."""
        self._callbacks.drain(_LAST_CALLBACKS_S)
        self._callbacks.close()


def _call_each(called: Sequence[tuple[Callback, Outcome]]) -> None:
    each = iter(called)
    while isinstance(failed := attempt(_call_rest, each), Failure):  # of user code: the other callbacks are called, too
        failed.log(logger, "a callback failed")


def _call_rest(called: Iterator[tuple[Callback, Outcome]]) -> None:
    for callback, outcome in called:
        callback(outcome)


class Landing(NamedTuple):
    behind: list[Outgoing]  # requests that fail with it
    more: bool  # whether more requests can be sent now


class UnderWay:
    """The requests of an engine without an outcome, and those that may be sent next."""

    def __init__(self, settings: ProducerSettings, timer: Timer) -> None:
        self.in_flight = InFlight(settings)
        self._stay_shut = settings.queues_stay_shut
        self._lanes = bool(settings.features.chooses_queues) and not self._stay_shut
        self._timer = timer
        self._queues: OrderedQueues[Outgoing] = OrderedQueues(self.in_flight.max_out)
        self._shut: dict[Hashable, RocketMQError] = {}
        self._lock = threading.RLock()  # entering it costs less than entering its condition
        self._changed = threading.Condition(self._lock)
        self._blocking: set[Outgoing] = set()
        self._closed = False

    def has_room(self, size: int, ordered: bool) -> bool:
        """Whether a request is within the limits. True after ``close``, so that no caller waits."""
        with self._lock:
            return self._closed or self.in_flight.has_room(size, ordered)

    def wait_for_room(self, outgoing: Outgoing) -> None:
        """Wait until the request is within the limits. Raises ``SendFailed`` at its deadline, and if the thread for retries
        cannot start: later, the thread that reads the answer could not handle this.
        """
        try:
            self._timer.begin()
        except RuntimeError as e:
            raise SendFailed(f"nothing was sent: {e}", remedy="Raise the limits of threads and processes") from e
        deadline = outgoing.deadline
        with self._lock:
            # A caller that may not wait has called ``has_room`` for the body, so only properties may exceed the limit.
            while may_wait() and not self.has_room(outgoing.size, outgoing.ordered_queue is not None):
                if deadline.expired:
                    text = f"{self.in_flight.requests} asynchronous sends with {self.in_flight.bytes} bytes are not answered yet"
                    raise SendFailed(text, remedy="Send more slowly, or wait for results")
                self._timer.hold(self._changed, deadline.remaining())

    def put(self, outgoing: Outgoing, brokers: int) -> RocketMQError | None:
        """Add it at the end of its ordered queue, or return the error of a failed request before it. Raises ``ClosedError``."""
        queue = outgoing.ordered_queue
        with self._lock:
            if self._closed:
                raise closed()
            self.in_flight.brokers = brokers
            self._queues.max_out = self.in_flight.max_out
            if queue in (shut := self._stays_shut(outgoing)):
                return shut[queue]
            self._queues.put(outgoing, queue)
            self.in_flight.add(outgoing.size)
            return None

    def behind_others(self, mine: Collection[Outgoing]) -> bool:
        with self._lock:
            return self._queues.behind_others(mine)

    def take(self) -> list[Outgoing]:
        """The requests that may be sent now."""
        with self._lock:
            return self._queues.take(self._timer.now_ms())

    def landed(self, outgoing: Outgoing, verdict: Outcome | RetryAttempt) -> Landing | None:
        """Record an outcome or a retry. Returns None if the request was given up before."""
        with self._lock:
            if outgoing.finished:
                return None
            behind: list[Outgoing] = []
            if isinstance(verdict, RetryAttempt):
                outgoing.refresh = verdict.refresh
                self._queues.again(outgoing, self._timer.now_ms() + int(verdict.pause_s * 1000))
            else:
                behind = self._finish(outgoing, verdict)
            return Landing(behind, self._queues.blocked)

    def block(self, outgoing: Outgoing) -> None:
        """Note that a caller's thread sends the request itself."""
        with self._lock:
            self._blocking.add(outgoing)

    def unblock(self, outgoing: Outgoing) -> None:
        """Note that the caller's thread has the outcome."""
        with self._lock:
            self._blocking.discard(outgoing)
            self._changed.notify_all()

    def idle(self, deadline: Deadline) -> bool:
        """Wait for all outcomes. Returns whether all are there at the deadline."""
        with self._lock:
            while (self.in_flight.requests or self._blocking) and not deadline.expired:
                self._timer.hold(self._changed, deadline.remaining())
            return not self.in_flight.requests and not self._blocking

    def close(self) -> tuple[list[Outgoing], list[Outgoing]]:
        """Give up all requests and accept no more. Returns those given up, and those that callers' threads still send."""
        with self._lock:
            self._closed = True
            left = self._queues.drop()
            for outgoing in left:
                outgoing.finished = True
            self.in_flight.clear()
            self._changed.notify_all()
            return left, list(self._blocking)

    def _stays_shut(self, outgoing: Outgoing) -> dict[Hashable, RocketMQError]:
        """Failed queues of its call or task, with the errors. A failure that concerns only waiting requests is not kept."""
        if outgoing.shut is not None:
            return outgoing.shut
        return self._shut if self._stay_shut else {}

    def _finish(self, outgoing: Outgoing, outcome: Outcome) -> list[Outgoing]:
        """The requests that fail with it: those that wait for the same queue, because they must not overtake it."""
        behind: list[Outgoing] = []
        queue = outgoing.ordered_queue
        # A lane has many message groups: if one message is rejected, those behind it belong to others.
        one = self._lanes and isinstance(outcome, MessageIllegal) and outgoing.line is None
        if queue is not None and isinstance(outcome, RocketMQError) and not one:
            behind = self._queues.shut(outgoing)
            for each in (outgoing, *behind):
                self._stays_shut(each)[queue] = outcome
        else:
            self._queues.done(outgoing)
        for each in (outgoing, *behind):
            each.finished = True
            self.in_flight.remove(each.size)
        if isinstance(outcome, SendResult):
            clean = outgoing.attempts.count == 1 and outcome.status is not SendStatus.SPOOLED
            self.in_flight.answered(outgoing.size, clean)
            self._queues.max_out = self.in_flight.max_out
        self._changed.notify_all()
        return behind


def closed() -> ClosedError:
    return ClosedError("the producer was closed before the message was acknowledged; it may have been stored")
