"""Results that someone waits for: futures and callbacks of asynchronous sends, counted so that a close can wait.

A driver: it owns a lock and the thread on which callbacks run.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future

from rocketmq_spark.clock import Deadline
from rocketmq_spark.errors import RocketMQError
from rocketmq_spark.model import SendResult
from rocketmq_spark.producer.outgoing import Outcome
from rocketmq_spark.timer import Timer

Callback = Callable[[Outcome], None]

_LAST_CALLBACKS_S = 5.0


class Pending:
    """Outcomes that were promised and are not there yet."""

    def __init__(self, callbacks: Timer) -> None:
        self._callbacks = callbacks
        self._changed = threading.Condition()
        self._count = 0
        self._lost: dict[str, RocketMQError] | None = None

    def watch(self) -> dict[str, RocketMQError]:
        """Fills with what fails from now on."""
        lost: dict[str, RocketMQError] = {}
        self._lost = lost
        return lost

    def expect(self, callback: Callback | None = None, msg_id: str = "") -> tuple[Future[SendResult], Callback]:
        """A future, and its completion: called once, with the outcome, it sets the future and has ``callback`` called."""
        result: Future[SendResult] = Future()
        result.set_running_or_notify_cancel()  # what is on its way cannot be called back
        with self._changed:
            self._count += 1

        def completion(outcome: Outcome) -> None:
            if callback is not None:
                self._callbacks.later(0, lambda: callback(outcome))
            if isinstance(outcome, RocketMQError):
                if self._lost is not None:
                    self._lost[msg_id] = outcome
                result.set_exception(outcome)
            else:
                result.set_result(outcome)
            self.forget()

        return result, completion

    def forget(self) -> None:
        """One promise less: kept, or taken back."""
        with self._changed:
            self._count -= 1
            self._changed.notify_all()

    def none_left(self, deadline: Deadline) -> bool:
        """Whether all promises are kept by then."""
        with self._changed:
            while self._count and not deadline.expired:
                self._callbacks.hold(self._changed, deadline.remaining())
            return not self._count

    def close(self) -> None:
        """Let the last callbacks run, and end their thread."""
        self._callbacks.drain(_LAST_CALLBACKS_S)
        self._callbacks.close()
