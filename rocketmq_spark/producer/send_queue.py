"""The sends of an engine that have no outcome. This module limits the number of these sends, and keeps their order.

``SendWindow`` limits the number of requests, the bytes of requests, and the number of requests at each broker. It has no lock and
no clock. If the user set no limit per broker, the limit per broker adapts. Slow brokers are recognised by their latency. With a
large limit, many batches wait in a broker, and the waits raise the latency of fast brokers, too. So the limit grows only while
few bytes are in flight, and halves if a request is retried.

``OrderedQueues`` keeps the order of sends. It has no lock and no clock. Each ordered queue has at most one send in flight. A send
that is retried stays first: its queue is muted until the next attempt, as Kafka's accumulator mutes partitions. Sends without a
queue have no order. RocketMQ's Java client does not order pipelined sends.

``SendQueue`` has the only lock of an engine. While it holds the lock, ``SendQueue`` decides which requests may be sent, with
``SendWindow`` and ``OrderedQueues``. The engine sends them after the lock is released.
"""

from __future__ import annotations

import heapq
import itertools
import logging
import threading
from collections import deque
from collections.abc import Collection, Hashable
from typing import Generic, NamedTuple, TypeVar

from rocketmq_spark.base.clock import Deadline
from rocketmq_spark.base.threads import Timer, may_block
from rocketmq_spark.errors import ClosedError, MessageIllegal, RocketMQError, SendFailed
from rocketmq_spark.model import SendResult, SendStatus
from rocketmq_spark.producer.outgoing import (
    Outcome,
    OutgoingSend,
)
from rocketmq_spark.producer.retry import RetryAttempt
from rocketmq_spark.producer.settings import ProducerSettings

logger = logging.getLogger(__name__)

INITIAL_REQUESTS_PER_BROKER, MAX_REQUESTS_PER_BROKER, TARGET_BYTES_IN_FLIGHT = 4, 64, 8 << 20


class SendWindow:
    """Counts requests without an outcome, and limits them. ``broker_count`` is the number of brokers that the producer sends
    to.
    """

    def __init__(self, settings: ProducerSettings) -> None:
        self.request_count = self.byte_count = 0
        self.broker_count = 1
        self.max_per_broker = settings.max_in_flight_per_broker or INITIAL_REQUESTS_PER_BROKER
        self._limit_adapts = settings.max_in_flight is None and settings.max_in_flight_per_broker is None
        self._max_in_flight = settings.max_in_flight
        self._max_requests = settings.max_async_messages
        self._max_bytes = settings.max_async_bytes

    @property
    def has_limit_per_broker(self) -> bool:
        """Whether the limit is per broker."""
        return self._max_in_flight is None

    @property
    def max_concurrent(self) -> int:
        """The maximum number of requests at brokers at once."""
        return (
            self._max_in_flight if self._max_in_flight is not None else self.max_per_broker * max(1, self.broker_count)
        )

    def has_room(self, size: int, ordered: bool) -> bool:
        """Whether a request of ``size`` bytes is within the limits. Always True if the window counts no other request.

        With a limit per broker, requests that may go to any queue wait in the caller, where they cost nothing. Ordered requests
        wait for their queue in ``OrderedQueues``, so that a slow or muted queue does not delay other queues.
        """
        if not self.request_count:
            return True
        if self.byte_count + size > self._max_bytes:
            return False
        if self._max_requests is not None and self.request_count >= self._max_requests:
            return False
        return ordered or not self.has_limit_per_broker or self.request_count < self.max_concurrent

    def add(self, size: int) -> None:
        self.request_count += 1
        self.byte_count += size

    def remove(self, size: int) -> None:
        self.request_count -= 1
        self.byte_count -= size

    def clear(self) -> None:
        self.request_count = self.byte_count = 0

    def record_acknowledged(self, size: int, is_first_attempt: bool) -> None:
        """Record that a request of ``size`` bytes was acknowledged. ``is_first_attempt`` says whether the request's first
        attempt was acknowledged.
        """
        if not self._limit_adapts:
            return
        if not is_first_attempt:
            self.max_per_broker = max(1, self.max_per_broker // 2)
        elif size * (self.max_per_broker + 1) <= TARGET_BYTES_IN_FLIGHT:
            self.max_per_broker = min(MAX_REQUESTS_PER_BROKER, self.max_per_broker + 1)


T = TypeVar("T", bound=Hashable)


class OrderedQueues(Generic[T]):
    """The items that wait, by queue, and the items in flight, of which there are at most ``max_concurrent``."""

    def __init__(self, max_concurrent: int) -> None:
        self.max_concurrent = max_concurrent
        self._waiting_items: dict[Hashable, deque[T]] = {}
        self._in_flight: dict[T, Hashable] = {}  # the queue of each item
        self._ready_queues: deque[Hashable] = deque()
        self._muted_queues: list[tuple[int, int, Hashable]] = []  # a heap; each begins with the end of the pause in ms
        self._sequence_numbers = itertools.count()

    def __len__(self) -> int:
        """The number of items that are not complete."""
        return len(self._in_flight) + sum(map(len, self._waiting_items.values()))

    def put(self, item: T, queue: Hashable | None = None) -> None:
        """Add ``item`` at the end of ``queue``. Without a queue, the item waits for no other."""
        queue = ("free", next(self._sequence_numbers)) if queue is None else ("ordered", queue)
        queue_exists = queue in self._waiting_items
        self._waiting_items.setdefault(queue, deque()).append(item)
        if not queue_exists:
            self._ready_queues.append(queue)

    def take_ready(self, now_ms: int) -> list[T]:
        """The items to send now, in the order in which their queues became ready. The returned items count as in flight."""
        while self._muted_queues and self._muted_queues[0][0] <= now_ms:
            self._ready_queues.append(heapq.heappop(self._muted_queues)[2])
        ready_items = []
        while self._ready_queues and len(self._in_flight) < self.max_concurrent:
            queue = self._ready_queues.popleft()
            item = self._waiting_items[queue].popleft()
            self._in_flight[item] = queue
            ready_items.append(item)
        return ready_items

    def complete(self, item: T) -> None:
        """Remove ``item``, which has its answer. The next item of its queue becomes ready."""
        queue = self._in_flight.pop(item)
        if self._waiting_items[queue]:
            self._ready_queues.append(queue)
        else:
            del self._waiting_items[queue]

    def fail(self, item: T) -> list[T]:
        """Remove ``item``, which has failed, and its queue. Returns the items that waited in the queue and must not be sent."""
        return list(self._waiting_items.pop(self._in_flight.pop(item)))

    def requeue(self, item: T, not_before_ms: int) -> None:
        """Put ``item`` back at the front of its queue for a retry, and mute the queue until ``not_before_ms``."""
        queue = self._in_flight.pop(item)
        self._waiting_items[queue].appendleft(item)
        heapq.heappush(self._muted_queues, (not_before_ms, next(self._sequence_numbers), queue))

    def waits_for_others(self, own_items: Collection[T]) -> bool:
        """Whether some of ``own_items`` wait for items of other callers: in a queue, or because ``max_concurrent`` is reached."""
        queues_of_others = {queue for item, queue in self._in_flight.items() if item not in own_items}
        if queues_of_others and self._ready_queues and len(self._in_flight) >= self.max_concurrent:
            return True
        return any(item in own_items for queue in queues_of_others for item in self._waiting_items[queue])

    @property
    def is_limited(self) -> bool:
        """Whether more items could be sent if ``max_concurrent`` were larger."""
        return bool(self._ready_queues)

    def clear(self) -> list[T]:
        """Remove all items and return them, those in flight first."""
        dropped_items = [*self._in_flight, *(item for items in self._waiting_items.values() for item in items)]
        self._in_flight.clear()
        self._waiting_items.clear()
        self._ready_queues.clear()
        self._muted_queues.clear()
        return dropped_items


class CompletionEffects(NamedTuple):
    """The effects of a verdict on other requests."""

    followers: list[OutgoingSend]  # later requests of the ordered queue, which fail with the request
    can_send_more: bool  # whether more requests can be sent now


class SendQueue:
    """The requests of an engine that have no outcome. One lock guards these requests."""

    def __init__(self, settings: ProducerSettings, timer: Timer) -> None:
        self.window = SendWindow(settings)
        self._failed_queues_stay_closed = settings.failed_queues_stay_closed
        # Over gRPC, where a Proxy chooses queues, an ordered queue is not a broker's queue. It is a *lane*: an ordered stream
        # with the messages of many message groups.
        self._uses_lanes = bool(settings.features.queue_choice_problem) and not self._failed_queues_stay_closed
        self._timer = timer
        self._queues: OrderedQueues[OutgoingSend] = OrderedQueues(self.window.max_concurrent)
        self._failed_queues: dict[Hashable, RocketMQError] = {}  # stays empty unless failed queues stay closed
        self._lock = threading.RLock()  # ``with`` statements use the lock, because ``with self._changed`` takes longer
        self._changed = threading.Condition(self._lock)  # notified when a request has its outcome
        self._blocking_sends: set[OutgoingSend] = set()  # requests that their callers' threads send
        self._closed = False

    def has_room(self, size: int, ordered: bool) -> bool:
        """Whether a request is within the limits. True after ``close``, so that no caller waits."""
        with self._lock:
            return self._closed or self.window.has_room(size, ordered)

    def wait_for_room(self, outgoing: OutgoingSend) -> None:
        """Wait until the request is within the limits. Raises ``SendFailed`` at the request's deadline. Also raises
        ``SendFailed`` if the thread for retries cannot start, because the thread that reads answers could not report this later.
        """
        try:
            self._timer.start()
        except RuntimeError as e:
            raise SendFailed(f"nothing was sent: {e}", remedy="Raise the limits of threads and processes") from e
        deadline = outgoing.deadline_from_now
        with self._lock:
            # A caller that must not wait has already called ``has_room`` with the bytes of the body. So only the properties of
            # the request may exceed the limit.
            while may_block() and not self.has_room(outgoing.size, outgoing.ordered_queue is not None):
                if deadline.expired:
                    window = self.window
                    problem = (
                        f"{window.request_count} asynchronous sends with {window.byte_count} bytes are not answered yet"
                    )
                    raise SendFailed(problem, remedy="Send more slowly, or wait for results")
                self._timer.wait_notified(self._changed, deadline.remaining())

    def put(self, outgoing: OutgoingSend, broker_count: int) -> RocketMQError | None:
        """Add the request at the end of its ordered queue. If the queue has failed, returns the error instead. Raises
        ``ClosedError``.
        """
        queue = outgoing.ordered_queue
        with self._lock:
            if self._closed:
                raise closed_error()
            self.window.broker_count = broker_count
            self._queues.max_concurrent = self.window.max_concurrent
            if queue in (failed_queues := self._failed_queues_of(outgoing)):
                return failed_queues[queue]
            self._queues.put(outgoing, queue)
            self.window.add(outgoing.size)
            return None

    def waits_for_others(self, own_sends: Collection[OutgoingSend]) -> bool:
        with self._lock:
            return self._queues.waits_for_others(own_sends)

    def take_ready(self) -> list[OutgoingSend]:
        """The requests that may be sent now."""
        with self._lock:
            return self._queues.take_ready(self._timer.now_ms())

    def record_verdict(self, outgoing: OutgoingSend, verdict: Outcome | RetryAttempt) -> CompletionEffects | None:
        """Record an outcome or a retry. Returns None if the request has an outcome already."""
        with self._lock:
            if outgoing.finished:
                return None
            followers: list[OutgoingSend] = []
            if isinstance(verdict, RetryAttempt):
                outgoing.refresh_route = verdict.refresh
                self._queues.requeue(outgoing, self._timer.now_ms() + int(verdict.pause_s * 1000))
            else:
                followers = self._finish(outgoing, verdict)
            return CompletionEffects(followers, self._queues.is_limited)

    def add_blocking_send(self, outgoing: OutgoingSend) -> None:
        """Count a request that a caller's thread sends, so that ``wait_until_idle`` and ``close`` include the request."""
        with self._lock:
            self._blocking_sends.add(outgoing)

    def remove_blocking_send(self, outgoing: OutgoingSend) -> None:
        """Remove a request whose outcome the caller's thread has."""
        with self._lock:
            self._blocking_sends.discard(outgoing)
            self._changed.notify_all()

    def wait_until_idle(self, deadline: Deadline) -> bool:
        """Wait for all outcomes. Returns whether all requests have an outcome at the deadline."""
        with self._lock:
            while (self.window.request_count or self._blocking_sends) and not deadline.expired:
                self._timer.wait_notified(self._changed, deadline.remaining())
            return not self.window.request_count and not self._blocking_sends

    def close(self) -> tuple[list[OutgoingSend], list[OutgoingSend]]:
        """Drop all requests and accept no more. Returns the dropped requests, and those that callers' threads still send."""
        with self._lock:
            self._closed = True
            unfinished_sends = self._queues.clear()
            for outgoing in unfinished_sends:
                outgoing.finished = True
            self.window.clear()
            self._changed.notify_all()
            return unfinished_sends, list(self._blocking_sends)

    def _failed_queues_of(self, outgoing: OutgoingSend) -> dict[Hashable, RocketMQError]:
        """The failed queues of the request's call or task, with the errors. The mapping is empty if failed queues do not stay
        closed.
        """
        if outgoing.failed_queues is not None:
            return outgoing.failed_queues
        return self._failed_queues if self._failed_queues_stay_closed else {}

    def _finish(self, outgoing: OutgoingSend, outcome: Outcome) -> list[OutgoingSend]:
        """Remove a request that has its outcome. If the request failed, later requests of its ordered queue would overtake it, so
        these requests fail, too. Returns these requests.
        """
        followers: list[OutgoingSend] = []
        queue = outgoing.ordered_queue
        # Over gRPC an ordered queue is a lane of many message groups. If one message is rejected, the messages behind it do not
        # fail, because they may belong to other groups.
        fails_alone = self._uses_lanes and isinstance(outcome, MessageIllegal) and outgoing.ordering_key is None
        if queue is not None and isinstance(outcome, RocketMQError) and not fails_alone:
            followers = self._queues.fail(outgoing)
            for send in (outgoing, *followers):
                self._failed_queues_of(send)[queue] = outcome
        else:
            self._queues.complete(outgoing)
        for send in (outgoing, *followers):
            send.finished = True
            self.window.remove(send.size)
        if isinstance(outcome, SendResult):
            is_first_attempt = outgoing.retry_state.attempt_count == 1 and outcome.status is not SendStatus.SPOOLED
            self.window.record_acknowledged(outgoing.size, is_first_attempt)
            self._queues.max_concurrent = self.window.max_concurrent
        self._changed.notify_all()
        return followers


def closed_error() -> ClosedError:
    return ClosedError("the producer was closed before the message was acknowledged; it may have been stored")
