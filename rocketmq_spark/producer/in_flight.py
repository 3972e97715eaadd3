"""Requests without an outcome: the limits of their number, the order in which they are sent, and their futures.

``SendWindow`` bounds requests, their bytes, and the requests at each broker. Pure. The bound per broker adapts unless the user
set one: every batch that waits in a broker adds to the latency by which slow brokers are recognised. So the bound grows
while few requests are in flight, and halves when a request is retried.

``FutureRegistry`` has the futures and callbacks of asynchronous sends, counted so that a close can wait. It owns a lock and the
thread that runs callbacks. ``SendQueue`` is a driver with the only lock of an engine: under the lock it decides with
``OrderedQueues`` and ``SendWindow``, and the engine acts after the lock is released.
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
from rocketmq_spark.producer.outgoing import (
    BatchResults,
    Callback,
    NonblockingCallback,
    Outcome,
    OutgoingSend,
    result_in_batch,
)
from rocketmq_spark.producer.settings import ProducerSettings

logger = logging.getLogger(__name__)

INITIAL_PER_BROKER, MAX_PER_BROKER, TARGET_BYTES = 4, 64, 8 << 20


class SendWindow:
    """Counts requests without an outcome, and limits them. ``brokers`` is the number of brokers that are published to."""

    def __init__(self, settings: ProducerSettings) -> None:
        self.requests = self.bytes = 0
        self.brokers = 1
        self.per_broker = settings.max_in_flight_per_broker or INITIAL_PER_BROKER
        self._adapts = settings.max_in_flight is None and settings.max_in_flight_per_broker is None
        self._max_in_flight = settings.max_in_flight
        self._max_requests = settings.max_async_messages
        self._max_bytes = settings.max_async_bytes

    @property
    def counts_brokers(self) -> bool:
        """Whether the limit is per broker."""
        return self._max_in_flight is None

    @property
    def max_concurrent(self) -> int:
        """How many requests may be at brokers at once."""
        return self._max_in_flight if self._max_in_flight is not None else self.per_broker * max(1, self.brokers)

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
        return ordered or not self.counts_brokers or self.requests < self.max_concurrent

    def add(self, size: int) -> None:
        self.requests += 1
        self.bytes += size

    def remove(self, size: int) -> None:
        self.requests -= 1
        self.bytes -= size

    def clear(self) -> None:
        self.requests = self.bytes = 0

    def record_acknowledged(self, size: int, clean: bool) -> None:
        """A request of ``size`` bytes is acknowledged; ``clean`` if at the first attempt."""
        if not self._adapts:
            return
        if not clean:
            self.per_broker = max(1, self.per_broker // 2)
        elif size * (self.per_broker + 1) <= TARGET_BYTES:
            self.per_broker = min(MAX_PER_BROKER, self.per_broker + 1)


_CLOSE_CALLBACKS_S = 5.0
_CONDITION_ATTRIBUTES = frozenset(
    ("_condition", "_waiters", "_done_callbacks")
)  # of Python's futures, for waiting only


class Promise(Future[SendResult]):
    """The future result of one message.

    Creating a condition takes several times as long as everything else, and most results exist before they are requested. So
    the first waiter creates it, under the lock under which outcomes are set. Futures do not share it, because Python
    locks the futures of one ``wait`` in the order of their addresses, and a shared one would be locked in any order.
    """

    _state: str = RUNNING  # a send cannot be cancelled
    _own_result: SendResult | None = None
    _batch_result: SendResult | None = None  # of its batch, in which it is ``_at``, and has its own ids
    _index = 0
    _offset_msg_id: str | None = None
    _exception: BaseException | None = None
    _has_waiters = False
    _done_callbacks: list[Callable[[Future[SendResult]], object]]

    callback: Callback | None = None
    msg_id = ""
    # The fields of ``accumulator.PlainEntry``: the promise of a plain message also carries the message.
    body, text, flag = b"", "", 0
    keys: Sequence[str] = ()

    def __init__(self, pending: FutureRegistry, callback: Callback | None, msg_id: str) -> None:
        self.registry = pending
        if callback is not None:
            self.callback = callback
        if msg_id:
            self.msg_id = msg_id

    def __getattr__(self, name: str) -> Any:
        if name not in _CONDITION_ATTRIBUTES:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        with self.registry.lock:
            self._has_waiters = (
                True  # first: after a Ctrl-C behind it, whoever sets the outcome creates what is missing
            )
            if name not in self.__dict__:
                self._waiters, self._done_callbacks, self._condition = [], [], threading.Condition()
        return self.__dict__[name]

    @property
    def promise(self) -> Promise:
        return self

    @property
    def _result(self) -> SendResult | None:
        return (
            self._own_result
            if self._batch_result is None
            else result_in_batch(self._batch_result, self._index, self.msg_id, self._offset_msg_id)
        )

    @_result.setter
    def _result(self, result: SendResult | None) -> None:
        self._own_result = result

    def done(self) -> bool:
        return self._state == FINISHED

    def result(self, timeout: float | None = None) -> SendResult:
        if self._state == FINISHED and (result := self._result) is not None:
            return result
        return super().result(timeout)

    def set_outcome(self, outcome: Outcome) -> None:
        """The same, and notify waiters, without the lock."""
        if isinstance(outcome, RocketMQError):
            self.set_exception(outcome)
        else:
            self.set_result(outcome)


def _set_outcomes(promises: Sequence[Promise], outcomes: Sequence[Outcome]) -> list[tuple[Promise, Outcome]]:
    """Set the outcomes of promises; call with the lock. Returns the promises whose waiters must be notified."""
    awaited = []
    many = outcomes if isinstance(outcomes, BatchResults) else None
    for at, promise in enumerate(promises):
        if promise._has_waiters:
            awaited.append((promise, outcomes[at]))
            continue
        if many is not None:
            promise.msg_id, promise._offset_msg_id = many.ids[at], many.offset_ids[at]
            promise._batch_result, promise._index = many.batch, at
        elif isinstance(outcome := outcomes[at], SendResult):
            promise._own_result = outcome
        else:
            promise._exception = outcome
        promise._state = FINISHED
    return awaited


class FutureRegistry:
    """The promises without an outcome."""

    def __init__(self, callbacks: Timer) -> None:
        self.lock = threading.RLock()
        self._callbacks = callbacks
        self._callbacks_started = False  # whether the callback thread has started
        self._empty = threading.Condition(self.lock)
        self._count = 0
        self._failures: dict[str, RocketMQError] | None = None

    def collect_failures(self) -> dict[str, RocketMQError]:
        """Return a dict that collects failures from now on, by message id."""
        lost: dict[str, RocketMQError] = {}
        self._failures = lost
        return lost

    def create(self, callback: Callback | None = None, msg_id: str = "") -> Promise:
        """Return a future that ``keep`` completes once. ``callback`` is then called on the callback thread, which starts now."""
        if callback is not None and not self._callbacks_started and not isinstance(callback, NonblockingCallback):
            self._callbacks.begin()
            self._callbacks_started = True
        promise = Promise(self, callback, msg_id)
        with self.lock:
            self._count += 1
        return promise

    def resolve(self, promises: Sequence[Promise], outcomes: Sequence[Outcome]) -> None:
        """Set the outcomes of promises. Those of a batch are set together."""
        try:
            if self._failures is not None:
                both = zip(promises, outcomes, strict=True)
                self._failures.update({promise.msg_id: o for promise, o in both if isinstance(o, RocketMQError)})
            with self.lock:
                awaited = _set_outcomes(promises, outcomes)
            for promise, outcome in awaited:
                failed = attempt(promise.set_outcome, outcome)
                if isinstance(failed, Failure):  # Python's futures do not catch BaseException of callbacks
                    failed.log(logger, "a callback of a future failed")
            callbacks = [promise.callback for promise in promises]
            if callbacks.count(None) < len(callbacks):
                called = [(call, o) for call, o in zip(callbacks, outcomes, strict=True) if call is not None]
                if all(isinstance(callback, NonblockingCallback) for callback, _ in called):
                    _call_each(called)
                else:
                    self._callbacks.later(0, functools.partial(_call_each, called))
        finally:
            self.discard(len(promises))

    def discard(self, count: int = 1) -> None:
        """Count promises as done: kept, or withdrawn."""
        with self.lock:
            self._count -= count
            if not self._count:
                self._empty.notify_all()

    def wait_until_empty(self, deadline: Deadline) -> bool:
        """Wait for all promises. Returns whether all are kept at the deadline."""
        with self.lock:
            while self._count and not deadline.expired:
                self._callbacks.hold(self._empty, deadline.remaining())
            return not self._count

    def close(self) -> None:
        """Run the last callbacks, and end their thread."""
        self._callbacks.drain(_CLOSE_CALLBACKS_S)
        self._callbacks.close()


def _call_each(called: Sequence[tuple[Callback, Outcome]]) -> None:
    each = iter(called)
    while isinstance(
        failed := attempt(_call_until_error, each), Failure
    ):  # of user code: the other callbacks are called, too
        failed.log(logger, "a callback failed")


def _call_until_error(called: Iterator[tuple[Callback, Outcome]]) -> None:
    for callback, outcome in called:
        callback(outcome)


class CompletionEffects(NamedTuple):
    followers: list[OutgoingSend]  # requests that fail with it
    can_send_more: bool  # whether more requests can be sent now


class SendQueue:
    """The requests of an engine without an outcome, and those that may be sent next."""

    def __init__(self, settings: ProducerSettings, timer: Timer) -> None:
        self.in_flight = SendWindow(settings)
        self._failed_queues_stay_closed = settings.failed_queues_stay_closed
        self._uses_lanes = bool(settings.features.chooses_queues) and not self._failed_queues_stay_closed
        self._timer = timer
        self._queues: OrderedQueues[OutgoingSend] = OrderedQueues(self.in_flight.max_concurrent)
        self._failed_queues: dict[Hashable, RocketMQError] = {}
        self._lock = threading.RLock()  # entering it costs less than entering its condition
        self._changed = threading.Condition(self._lock)
        self._blocking_sends: set[OutgoingSend] = set()
        self._closed = False

    def has_room(self, size: int, ordered: bool) -> bool:
        """Whether a request is within the limits. True after ``close``, so that no caller waits."""
        with self._lock:
            return self._closed or self.in_flight.has_room(size, ordered)

    def wait_for_room(self, outgoing: OutgoingSend) -> None:
        """Wait until the request is within the limits. Raises ``SendFailed`` at its deadline, and if the thread for retries
        cannot start: later, the thread that reads the answer could not handle this.
        """
        try:
            self._timer.begin()
        except RuntimeError as e:
            raise SendFailed(f"nothing was sent: {e}", remedy="Raise the limits of threads and processes") from e
        deadline = outgoing.deadline_from_now
        with self._lock:
            # A caller that may not wait has called ``has_room`` for the body, so only properties may exceed the limit.
            while may_wait() and not self.has_room(outgoing.size, outgoing.ordered_queue is not None):
                if deadline.expired:
                    text = f"{self.in_flight.requests} asynchronous sends with {self.in_flight.bytes} bytes are not answered yet"
                    raise SendFailed(text, remedy="Send more slowly, or wait for results")
                self._timer.hold(self._changed, deadline.remaining())

    def put(self, outgoing: OutgoingSend, brokers: int) -> RocketMQError | None:
        """Add it at the end of its ordered queue, or return the error of a failed request before it. Raises ``ClosedError``."""
        queue = outgoing.ordered_queue
        with self._lock:
            if self._closed:
                raise closed()
            self.in_flight.brokers = brokers
            self._queues.max_concurrent = self.in_flight.max_concurrent
            if queue in (shut := self._failed_queues_of(outgoing)):
                return shut[queue]
            self._queues.put(outgoing, queue)
            self.in_flight.add(outgoing.size)
            return None

    def waits_for_others(self, mine: Collection[OutgoingSend]) -> bool:
        with self._lock:
            return self._queues.waits_for_others(mine)

    def take_ready(self) -> list[OutgoingSend]:
        """The requests that may be sent now."""
        with self._lock:
            return self._queues.take_ready(self._timer.now_ms())

    def record_verdict(self, outgoing: OutgoingSend, verdict: Outcome | RetryAttempt) -> CompletionEffects | None:
        """Record an outcome or a retry. Returns None if the request was given up before."""
        with self._lock:
            if outgoing.finished:
                return None
            behind: list[OutgoingSend] = []
            if isinstance(verdict, RetryAttempt):
                outgoing.refresh_route = verdict.refresh
                self._queues.requeue(outgoing, self._timer.now_ms() + int(verdict.pause_s * 1000))
            else:
                behind = self._finish(outgoing, verdict)
            return CompletionEffects(behind, self._queues.is_limited)

    def add_blocking(self, outgoing: OutgoingSend) -> None:
        """Note that a caller's thread sends the request itself."""
        with self._lock:
            self._blocking_sends.add(outgoing)

    def remove_blocking(self, outgoing: OutgoingSend) -> None:
        """Note that the caller's thread has the outcome."""
        with self._lock:
            self._blocking_sends.discard(outgoing)
            self._changed.notify_all()

    def wait_until_idle(self, deadline: Deadline) -> bool:
        """Wait for all outcomes. Returns whether all are there at the deadline."""
        with self._lock:
            while (self.in_flight.requests or self._blocking_sends) and not deadline.expired:
                self._timer.hold(self._changed, deadline.remaining())
            return not self.in_flight.requests and not self._blocking_sends

    def close(self) -> tuple[list[OutgoingSend], list[OutgoingSend]]:
        """Give up all requests and accept no more. Returns those given up, and those that callers' threads still send."""
        with self._lock:
            self._closed = True
            left = self._queues.clear()
            for outgoing in left:
                outgoing.finished = True
            self.in_flight.clear()
            self._changed.notify_all()
            return left, list(self._blocking_sends)

    def _failed_queues_of(self, outgoing: OutgoingSend) -> dict[Hashable, RocketMQError]:
        """Failed queues of its call or task, with the errors. A failure that concerns only waiting requests is not kept."""
        if outgoing.failed_queues is not None:
            return outgoing.failed_queues
        return self._failed_queues if self._failed_queues_stay_closed else {}

    def _finish(self, outgoing: OutgoingSend, outcome: Outcome) -> list[OutgoingSend]:
        """The requests that fail with it: those that wait for the same queue, because they must not overtake it."""
        behind: list[OutgoingSend] = []
        queue = outgoing.ordered_queue
        # A lane has many message groups: if one message is rejected, those behind it belong to others.
        one = self._uses_lanes and isinstance(outcome, MessageIllegal) and outgoing.ordering_key is None
        if queue is not None and isinstance(outcome, RocketMQError) and not one:
            behind = self._queues.fail(outgoing)
            for each in (outgoing, *behind):
                self._failed_queues_of(each)[queue] = outcome
        else:
            self._queues.complete(outgoing)
        for each in (outgoing, *behind):
            each.finished = True
            self.in_flight.remove(each.size)
        if isinstance(outcome, SendResult):
            clean = outgoing.retry_state.count == 1 and outcome.status is not SendStatus.SPOOLED
            self.in_flight.record_acknowledged(outgoing.size, clean)
            self._queues.max_concurrent = self.in_flight.max_concurrent
        self._changed.notify_all()
        return behind


def closed() -> ClosedError:
    return ClosedError("the producer was closed before the message was acknowledged; it may have been stored")
