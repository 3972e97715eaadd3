"""The futures and callbacks of asynchronous sends, counted so that a close can wait for them."""

from __future__ import annotations

import functools
import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from concurrent.futures._base import FINISHED, RUNNING
from typing import Any

from rocketmq_spark.base.clock import Deadline
from rocketmq_spark.base.threads import Failure, Timer, capture
from rocketmq_spark.errors import RocketMQError
from rocketmq_spark.model import SendResult
from rocketmq_spark.producer.outgoing import BatchResults, Callback, NonblockingCallback, Outcome, result_in_batch

logger = logging.getLogger(__name__)

_CALLBACK_DRAIN_TIMEOUT_S = 5.0
# Attributes of Python's futures that only waiters need.
_CONDITION_ATTRIBUTES = frozenset(("_condition", "_waiters", "_done_callbacks"))


class Promise(Future[SendResult]):
    """The future result of one message.

    Creating a condition takes several times as long as creating the other attributes, and most results exist before a caller
    waits for them. So the first waiter creates the condition, under the same lock under which outcomes are set. Futures do not
    share conditions. ``concurrent.futures.wait`` locks the conditions of its futures in the order of the futures' addresses, so
    two calls could lock shared conditions in different orders, and wait for each other forever.
    """

    _state: str = RUNNING  # a send cannot be cancelled
    _own_result: SendResult | None = None
    _batch_result: SendResult | None = None  # the result of the batch that contains the message
    _index_in_batch = 0
    _offset_msg_id: str | None = None
    _exception: BaseException | None = None
    _has_waiters = False
    _done_callbacks: list[Callable[[Future[SendResult]], object]]

    callback: Callback | None = None
    msg_id = ""
    # The fields of ``accumulator.PlainEntry``: the promise of a plain message also carries the message.
    body, properties_text, flag = b"", "", 0
    keys: Sequence[str] = ()

    def __init__(self, registry: FutureRegistry, callback: Callback | None, msg_id: str) -> None:
        self.registry = registry
        if callback is not None:
            self.callback = callback
        if msg_id:
            self.msg_id = msg_id

    def __getattr__(self, name: str) -> Any:
        if name not in _CONDITION_ATTRIBUTES:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        with self.registry.lock:
            # ``_has_waiters`` is set first. Then, if Ctrl-C interrupts the next statements, the thread that sets the outcome
            # still sees that there is a waiter, and creates the condition.
            self._has_waiters = True
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
            else result_in_batch(self._batch_result, self._index_in_batch, self.msg_id, self._offset_msg_id)
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
        """Set the outcome and notify waiters. Call without the lock."""
        if isinstance(outcome, RocketMQError):
            self.set_exception(outcome)
        else:
            self.set_result(outcome)


def _set_outcomes(promises: Sequence[Promise], outcomes: Sequence[Outcome]) -> list[tuple[Promise, Outcome]]:
    """Set the outcomes of promises; call with the lock. Returns the promises whose waiters must be notified."""
    waited_promises = []
    batch_results = outcomes if isinstance(outcomes, BatchResults) else None
    for index, promise in enumerate(promises):
        if promise._has_waiters:
            waited_promises.append((promise, outcomes[index]))
            continue
        if batch_results is not None:
            promise.msg_id, promise._offset_msg_id = batch_results.ids[index], batch_results.offset_ids[index]
            promise._batch_result, promise._index_in_batch = batch_results.batch_result, index
        elif isinstance(outcome := outcomes[index], SendResult):
            promise._own_result = outcome
        else:
            promise._exception = outcome
        promise._state = FINISHED
    return waited_promises


class FutureRegistry:
    """Counts the promises without an outcome, and calls callbacks. Owns the lock of its promises, and the callback thread."""

    def __init__(self, callback_timer: Timer) -> None:
        self.lock = threading.RLock()
        self._callback_timer = callback_timer
        self._is_callback_timer_started = False  # whether the callback thread has started
        self._empty_condition = threading.Condition(self.lock)
        self._unresolved_count = 0
        self._failures_by_id: dict[str, RocketMQError] | None = None

    def collect_failures(self) -> dict[str, RocketMQError]:
        """Return a dict to which failures are added from now on, by message id."""
        failures: dict[str, RocketMQError] = {}
        self._failures_by_id = failures
        return failures

    def create(self, callback: Callback | None = None, msg_id: str = "") -> Promise:
        """Return a future that ``resolve`` completes. Starts the callback thread if ``callback`` needs it."""
        if (
            callback is not None
            and not self._is_callback_timer_started
            and not isinstance(callback, NonblockingCallback)
        ):
            self._callback_timer.start()
            self._is_callback_timer_started = True
        promise = Promise(self, callback, msg_id)
        with self.lock:
            self._unresolved_count += 1
        return promise

    def resolve(self, promises: Sequence[Promise], outcomes: Sequence[Outcome]) -> None:
        """Set the outcomes of promises, under one lock for all messages of a batch, and call their callbacks."""
        try:
            if self._failures_by_id is not None:
                promises_with_outcomes = zip(promises, outcomes, strict=True)
                self._failures_by_id.update(
                    {promise.msg_id: o for promise, o in promises_with_outcomes if isinstance(o, RocketMQError)}
                )
            with self.lock:
                waited_promises = _set_outcomes(promises, outcomes)
            for promise, outcome in waited_promises:
                failure = capture(promise.set_outcome, outcome)
                if isinstance(failure, Failure):  # Python's futures do not catch BaseException of callbacks
                    failure.log(logger, "a callback of a future failed")
            callbacks = [promise.callback for promise in promises]
            if callbacks.count(None) < len(callbacks):
                callback_calls = [
                    (callback, o) for callback, o in zip(callbacks, outcomes, strict=True) if callback is not None
                ]
                if all(isinstance(callback, NonblockingCallback) for callback, _ in callback_calls):
                    _call_each(callback_calls)
                else:
                    self._callback_timer.call_later(0, functools.partial(_call_each, callback_calls))
        finally:
            self.discard(len(promises))

    def discard(self, count: int = 1) -> None:
        """Stop counting promises, because they are resolved or withdrawn."""
        with self.lock:
            self._unresolved_count -= count
            if not self._unresolved_count:
                self._empty_condition.notify_all()

    def wait_until_empty(self, deadline: Deadline) -> bool:
        """Wait for all promises. Returns whether all promises are resolved at the deadline."""
        with self.lock:
            while self._unresolved_count and not deadline.expired:
                self._callback_timer.wait_notified(self._empty_condition, deadline.remaining())
            return not self._unresolved_count

    def close(self) -> None:
        """Run the last callbacks, and end their thread."""
        self._callback_timer.drain(_CALLBACK_DRAIN_TIMEOUT_S)
        self._callback_timer.close()


def _call_each(calls: Sequence[tuple[Callback, Outcome]]) -> None:
    remaining_calls = iter(calls)
    # After an error of user code the other callbacks are still called.
    while isinstance(failure := capture(_call_until_error, remaining_calls), Failure):
        failure.log(logger, "a callback failed")


def _call_until_error(calls: Iterator[tuple[Callback, Outcome]]) -> None:
    for callback, outcome in calls:
        callback(outcome)
