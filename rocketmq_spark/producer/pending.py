"""Results that someone waits for: futures and callbacks of asynchronous sends, counted so that a close can wait.

A driver: it owns a lock and the thread on which callbacks run.
"""

from __future__ import annotations

import functools
import logging
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from concurrent.futures._base import FINISHED, RUNNING
from typing import Any

from rocketmq_spark.clock import Deadline
from rocketmq_spark.errors import RocketMQError
from rocketmq_spark.failures import Failure, attempt
from rocketmq_spark.model import SendResult
from rocketmq_spark.producer.outgoing import Outcome
from rocketmq_spark.timer import Timer

logger = logging.getLogger(__name__)

Callback = Callable[[Outcome], None]

_LAST_CALLBACKS_S = 5.0
# What Python's futures have for those who wait for them.
_WAITING = frozenset(("_condition", "_waiters", "_done_callbacks"))


class Promise(Future[SendResult]):
    """The future result of one message.

    A condition takes several times as long to make as all the rest, and most results are there when they are asked for: so it
    is made with the first who waits, under the lock under which outcomes are handed over. It is each future's own, for Python
    locks the futures of one ``wait`` in the order of their addresses: a shared one would be locked in any order.
    """

    _state: str = RUNNING  # what is on its way cannot be called back
    _result: SendResult | None = None
    _exception: BaseException | None = None
    _awaited = False
    _done_callbacks: list[Callable[[Future[SendResult]], object]]

    def __init__(self, pending: Pending, callback: Callback | None, msg_id: str) -> None:
        self.pending = pending
        self.callback = callback
        self.msg_id = msg_id

    def __getattr__(self, name: str) -> Any:
        if name not in _WAITING:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        with self.pending.lock:
            if not self._awaited:
                self._waiters, self._done_callbacks, self._condition = [], [], threading.Condition()
                self._awaited = True
        return self.__dict__[name]

    def done(self) -> bool:
        return self._state == FINISHED

    def result(self, timeout: float | None = None) -> SendResult:
        if self._state == FINISHED and self._result is not None:
            return self._result
        return super().result(timeout)

    def keep(self, outcome: Outcome) -> bool:
        """Take the outcome, with the lock; False when somebody may wait for it, who must be told."""
        if self._awaited:
            return False
        if isinstance(outcome, RocketMQError):
            self._exception = outcome
        else:
            self._result = outcome
        self._state = FINISHED
        return True

    def tell(self, outcome: Outcome) -> None:
        """The same, and those who wait are told, without the lock."""
        if isinstance(outcome, RocketMQError):
            self.set_exception(outcome)
        else:
            self.set_result(outcome)


Kept = tuple[Promise, Outcome]


class Pending:
    """Outcomes that were promised and are not there yet."""

    def __init__(self, callbacks: Timer) -> None:
        self.lock = threading.RLock()
        self._callbacks = callbacks
        self._none_left = threading.Condition(self.lock)
        self._count = 0
        self._lost: dict[str, RocketMQError] | None = None

    def watch(self) -> dict[str, RocketMQError]:
        """Fills with what fails from now on."""
        lost: dict[str, RocketMQError] = {}
        self._lost = lost
        return lost

    def expect(self, callback: Callback | None = None, msg_id: str = "") -> Promise:
        """A future that ``keep`` completes, once; then ``callback`` is called, too."""
        promise = Promise(self, callback, msg_id)
        with self.lock:
            self._count += 1
        return promise

    def keep(self, kept: Sequence[Kept]) -> None:
        """The outcomes are there: together, for those of a batch come together."""
        try:
            if self._lost is not None:
                self._lost.update({promise.msg_id: o for promise, o in kept if isinstance(o, RocketMQError)})
            with self.lock:
                awaited = [each for each in kept if not each[0].keep(each[1])]
            for promise, outcome in awaited:
                failed = attempt(promise.tell, outcome)
                if isinstance(failed, Failure):  # Python's futures let through what is no Exception
                    failed.log(logger, "a callback of a future failed")
            if called := [(promise.callback, outcome) for promise, outcome in kept if promise.callback is not None]:
                self._callbacks.later(0, functools.partial(_call_each, called))
        finally:
            self.forget(len(kept))

    def forget(self, count: int = 1) -> None:
        """So many promises less: kept, or taken back."""
        with self.lock:
            self._count -= count
            if not self._count:
                self._none_left.notify_all()

    def none_left(self, deadline: Deadline) -> bool:
        """Whether all promises are kept by then."""
        with self.lock:
            while self._count and not deadline.expired:
                self._callbacks.hold(self._none_left, deadline.remaining())
            return not self._count

    def close(self) -> None:
        """Let the last callbacks run, and end their thread."""
        self._callbacks.drain(_LAST_CALLBACKS_S)
        self._callbacks.close()


def _call_each(called: Sequence[tuple[Callback, Outcome]]) -> None:
    for callback, outcome in called:
        failed = attempt(callback, outcome)
        if isinstance(failed, Failure):  # a user's code: it must not cost the others their outcomes
            failed.log(logger, "a callback failed")
