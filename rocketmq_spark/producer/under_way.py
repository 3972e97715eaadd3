"""The requests of an engine that have no outcome yet: their order, their bounds, and who waits for them.

The one lock of an engine is here. A driver: what is decided under the lock is decided by ``ordered_queues`` and ``in_flight``,
and acted upon by the engine, outside of it.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import NamedTuple

from rocketmq_spark.clock import Deadline
from rocketmq_spark.errors import ClosedError, RocketMQError, SendFailed
from rocketmq_spark.model import MessageQueue, SendResult, SendStatus
from rocketmq_spark.producer.attempts import Attempts, RetryAttempt
from rocketmq_spark.producer.in_flight import InFlight
from rocketmq_spark.producer.ordered_queues import OrderedQueues
from rocketmq_spark.producer.outgoing import Outcome, Outgoing
from rocketmq_spark.producer.settings import ProducerSettings
from rocketmq_spark.timer import Timer


@dataclass(slots=True, eq=False)
class Sending:
    """A request under way. ``refresh`` when the route is to be asked for before the next attempt."""

    outgoing: Outgoing
    deadline: Deadline
    attempts: Attempts
    refresh: bool = False
    finished: bool = False


class Landing(NamedTuple):
    """What follows an outcome: the requests that fail ``behind`` it; ``more`` when something could go out at once."""

    behind: list[Sending]
    more: bool


class UnderWay:
    """Knows what is under way, and what may go out next."""

    def __init__(self, settings: ProducerSettings, timer: Timer) -> None:
        self.in_flight = InFlight(settings)
        self._stay_shut = settings.queues_stay_shut
        self._timer = timer
        self._queues: OrderedQueues[Sending] = OrderedQueues(self.in_flight.max_out)
        self._shut: dict[MessageQueue | None, RocketMQError] = {}
        self._lock = threading.RLock()  # to enter and leave it costs less than its condition
        self._changed = threading.Condition(self._lock)
        self._blocking: set[Sending] = set()
        self._closed = False

    def has_room(self, outgoing: Outgoing) -> bool:
        """Whether it is within the bounds; when closed there is nothing to wait for."""
        with self._lock:
            return self._has_room(outgoing)

    def wait_for_room(self, outgoing: Outgoing) -> None:
        """Until it is within the bounds; ``SendFailed`` in the end."""
        deadline = outgoing.deadline
        with self._lock:
            while not self._has_room(outgoing):
                if deadline.expired:
                    raise SendFailed(
                        f"{self.in_flight.requests} asynchronous sends with {self.in_flight.bytes} bytes are not "
                        "answered yet",
                        remedy="Send more slowly, or wait for results",
                    )
                self._timer.hold(self._changed, deadline.remaining())

    def put(self, sending: Sending, brokers: int) -> RocketMQError | None:
        """Add it at the end of its queue's order, or say why what was before it failed. ``ClosedError`` when closed."""
        queue = sending.outgoing.ordered_queue
        with self._lock:
            if self._closed:
                raise closed()
            self.in_flight.brokers = brokers
            self._queues.max_out = self.in_flight.max_out
            if queue in self._shut:
                return self._shut[queue]
            self._queues.put(sending, queue)
            self.in_flight.add(sending.outgoing.size)
            return None

    def take(self) -> list[Sending]:
        """What may go out now."""
        with self._lock:
            return self._queues.take(self._timer.now_ms())

    def landed(self, sending: Sending, verdict: Outcome | RetryAttempt) -> Landing | None:
        """It ended, or is to be sent again; None when it was given up before that."""
        with self._lock:
            if sending.finished:
                return None
            behind: list[Sending] = []
            if isinstance(verdict, RetryAttempt):
                sending.refresh = verdict.refresh
                self._queues.again(sending, self._timer.now_ms() + int(verdict.pause_s * 1000))
            else:
                behind = self._finish(sending, verdict)
            return Landing(behind, self._queues.blocked)

    def block(self, sending: Sending) -> None:
        """A thread sends it by itself from now on."""
        with self._lock:
            self._blocking.add(sending)

    def unblock(self, sending: Sending) -> None:
        """The thread has its outcome."""
        with self._lock:
            self._blocking.discard(sending)
            self._changed.notify_all()

    def idle(self, deadline: Deadline) -> bool:
        """Whether everything has its outcome by then."""
        with self._lock:
            while (self.in_flight.requests or self._blocking) and not deadline.expired:
                self._timer.hold(self._changed, deadline.remaining())
            return not self.in_flight.requests and not self._blocking

    def close(self) -> tuple[list[Sending], list[Sending]]:
        """Give up everything and take nothing more; what is given up, and what threads still wait for."""
        with self._lock:
            self._closed = True
            left = self._queues.drop()
            for sending in left:
                sending.finished = True
            self.in_flight.clear()
            self._changed.notify_all()
            return left, list(self._blocking)

    def _has_room(self, outgoing: Outgoing) -> bool:
        return self._closed or self.in_flight.has_room(outgoing.size, outgoing.ordered_queue is not None)

    def _finish(self, sending: Sending, outcome: Outcome) -> list[Sending]:
        """What fails with it: the requests that wait for the same queue, since none may overtake another."""
        behind: list[Sending] = []
        queue = sending.outgoing.ordered_queue
        if queue is not None and isinstance(outcome, RocketMQError):
            behind = self._queues.shut(sending)
            if self._stay_shut:
                self._shut[queue] = outcome
        else:
            self._queues.done(sending)
        for each in (sending, *behind):
            each.finished = True
            self.in_flight.remove(each.outgoing.size)
        if isinstance(outcome, SendResult):
            clean = sending.attempts.count == 1 and outcome.status is not SendStatus.SPOOLED
            self.in_flight.answered(sending.outgoing.size, clean)
            self._queues.max_out = self.in_flight.max_out
        self._changed.notify_all()
        return behind


def closed() -> ClosedError:
    return ClosedError("the producer was closed before the message was acknowledged; it may have been stored")
