"""Which queue a message goes to, before the send and for each attempt, and the order within a queue.

``Destinations`` returns the queue that the caller named or that a selector chose, if any. It asks for routes, and waits for
a name server that does not answer. ``QueueChooser`` returns that queue, or the next one on a good broker; each thread has a
round robin of its own. Selectors themselves are in ``queues/selection``, those of rows in ``rows/routing``.

``OrderedQueues`` keeps the order of sends: one at a time per queue, and a send that is to be repeated stays first. While a
send of a queue is out or waits for its next attempt, the queue is muted, so nothing overtakes a retry. Sends without a queue
are free. It is pure. Kafka's accumulator mutes partitions in the same way; RocketMQ's Java client does not order pipelined
sends.
"""

from __future__ import annotations

import contextlib
import copy
import heapq
import itertools
import logging
import threading
from collections import deque
from collections.abc import Collection, Hashable, Sequence
from typing import Generic, NamedTuple, TypeVar

from rocketmq_spark.base.clock import Deadline
from rocketmq_spark.base.threads import Timer
from rocketmq_spark.errors import CallTimeout, MessageRefused, RocketMQError, RouteNotFound, SelectorError
from rocketmq_spark.model import Message, MessageQueue, SendRequest, SpooledSend
from rocketmq_spark.ports import Sender, Spool
from rocketmq_spark.producer import encoding
from rocketmq_spark.producer.attempts import FaultTable, OutOfTime, RetryState
from rocketmq_spark.producer.encoding import DEFAULT_HOW, How
from rocketmq_spark.producer.outgoing import OutgoingSend, Queues
from rocketmq_spark.producer.spooling import is_storable_selector, is_transient
from rocketmq_spark.producer.topics import RouteCache
from rocketmq_spark.queues.environment import Environment
from rocketmq_spark.queues.selection import RoundRobin, Select, check_arg, select

logger = logging.getLogger(__name__)

T = TypeVar("T", bound=Hashable)


class OrderedQueues(Generic[T]):
    """Waiting things by queue, and those that are out; at most ``max_out`` are out at once."""

    def __init__(self, max_out: int) -> None:
        self.max_concurrent = max_out
        self._waiting: dict[Hashable, deque[T]] = {}
        self._in_flight: dict[T, Hashable] = {}
        self._ready_queues: deque[Hashable] = deque()
        self._muted_queues: list[tuple[int, int, Hashable]] = []
        self._sequence = itertools.count()

    def __len__(self) -> int:
        """Everything that is not done."""
        return len(self._in_flight) + sum(map(len, self._waiting.values()))

    def put(self, thing: T, queue: Hashable | None = None) -> None:
        """Add ``thing`` at the end of its queue; None makes a queue of its own."""
        queue = ("free", next(self._sequence)) if queue is None else ("ordered", queue)
        known = queue in self._waiting
        self._waiting.setdefault(queue, deque()).append(thing)
        if not known:
            self._ready_queues.append(queue)

    def take_ready(self, now_ms: int) -> list[T]:
        """What may go out now, in the order in which queues became free."""
        while self._muted_queues and self._muted_queues[0][0] <= now_ms:
            self._ready_queues.append(heapq.heappop(self._muted_queues)[2])
        taken = []
        while self._ready_queues and len(self._in_flight) < self.max_concurrent:
            queue = self._ready_queues.popleft()
            thing = self._waiting[queue].popleft()
            self._in_flight[thing] = queue
            taken.append(thing)
        return taken

    def complete(self, thing: T) -> None:
        """``thing`` has its answer: the next one of its queue may go."""
        queue = self._in_flight.pop(thing)
        if self._waiting[queue]:
            self._ready_queues.append(queue)
        else:
            del self._waiting[queue]

    def fail(self, thing: T) -> list[T]:
        """``thing`` has failed for good: nothing of its queue may follow it, and what waits there is given up."""
        return list(self._waiting.pop(self._in_flight.pop(thing)))

    def requeue(self, thing: T, not_before_ms: int) -> None:
        """``thing`` must be sent once more: it goes back to the front, and its queue is muted until then."""
        queue = self._in_flight.pop(thing)
        self._waiting[queue].appendleft(thing)
        heapq.heappush(self._muted_queues, (not_before_ms, next(self._sequence), queue))

    def waits_for_others(self, mine: Collection[T]) -> bool:
        """Whether some of ``mine`` wait for things that are not: in a queue, or because no more may be out."""
        others = {queue for thing, queue in self._in_flight.items() if thing not in mine}
        if others and self._ready_queues and len(self._in_flight) >= self.max_concurrent:
            return True
        return any(thing in mine for queue in others for thing in self._waiting[queue])

    @property
    def is_limited(self) -> bool:
        """Whether something could go out if ``max_out`` were larger."""
        return bool(self._ready_queues)

    def clear(self) -> list[T]:
        """Give up everything that is not done and return it, what is out first."""
        dropped = [*self._in_flight, *(thing for things in self._waiting.values() for thing in things)]
        self._in_flight.clear()
        self._waiting.clear()
        self._ready_queues.clear()
        self._muted_queues.clear()
        return dropped


class QueueChooser:
    """Chooses for every attempt of an engine."""

    def __init__(self, topics: RouteCache, faults: FaultTable, timer: Timer) -> None:
        self._topics = topics
        self._faults = faults
        self._timer = timer
        self._round_robins = threading.local()

    def choose(self, outgoing: OutgoingSend, attempts: RetryState, deadline: Deadline, refresh: bool) -> MessageQueue:
        """The queue of the next attempt; with ``refresh`` the route is asked for first."""
        if deadline.expired:
            raise OutOfTime("the send timeout is over", topic=outgoing.topic)
        if outgoing.queue is not None:
            self._ensure_address(outgoing.topic, deadline, refresh)
            return outgoing.queue
        queues = self._topics.queues(outgoing.topic, deadline, refresh)
        if outgoing.filter_queues is not None:
            queues, index = outgoing.filter_queues(queues), RoundRobin()
        else:
            index = self._round_robin(outgoing.topic, queues)
        if attempts.count and self._faults.enabled:
            index.reset()
        return self._pick(queues, index, attempts.last_broker)

    def _ensure_address(self, topic: str, deadline: Deadline, refresh: bool) -> None:
        """A broker's address comes with a route."""
        if refresh:
            self._topics.queues(topic, deadline, refresh=True)
        elif self._topics.any_topic() is None:  # perhaps there was no question for an address so far
            with contextlib.suppress(RouteNotFound):
                self._topics.queues(topic, deadline)

    def _pick(self, queues: Queues, index: RoundRobin, last_broker: str | None) -> MessageQueue:
        try:
            return self._faults.pick(queues, index, last_broker, self._timer.now_ms())
        except Exception:  # the choice of a queue must never be why a message is not sent
            logger.exception("fault tolerance failed; going round the queues instead")
            return index.pick(queues, last_broker)

    def _round_robin(self, topic: str, queues: Queues) -> RoundRobin:
        """This thread's index into ``queues``; a new list starts a new one, as a new publish info does in Java."""
        indexes: dict[str, tuple[Queues, RoundRobin]] = self._round_robins.__dict__
        known = indexes.get(topic)
        if known is None or known[0] is not queues:
            known = indexes[topic] = (queues, RoundRobin())
        return known[1]


class SpoolFallback(NamedTuple):
    """A spool takes what has no route yet; ``sender`` knows whether one may come."""

    spool: Spool
    sender: Sender

    def holds_earlier(self, topic: str, selector: str, arg: object) -> bool:
        """Whether something of the same choice waits in the spool, which must not be overtaken."""
        return self.spool.holds(SpooledSend(topic, _EMPTY_REQUEST, selector=selector, arg=arg))

    def is_transient(self, error: RocketMQError) -> bool:
        return is_transient(error, self.sender)


_EMPTY_REQUEST = SendRequest("", b"")


class Destinations:
    """Finds and checks the place of each message of a producer. With ``later`` it may be found when it is sent."""

    def __init__(
        self, topics: RouteCache, timer: Timer, environment: Environment | None, later: SpoolFallback | None = None
    ) -> None:
        self.spool_fallback = later
        self._topics = topics
        self._timer = timer
        self._environment = environment

    def queues(self, topic: str, deadline: Deadline) -> Sequence[MessageQueue]:
        """The queues that messages of ``topic`` can go to."""
        return self._topics.wait_for_queues(topic, deadline, self._timer.pause)

    def queues_or_empty(self, topic: str, deadline: Deadline) -> Sequence[MessageQueue]:
        """The same; none where a spool takes what has no route yet."""
        try:
            return self.queues(topic, deadline)
        except RocketMQError as e:
            if self.spool_fallback is None or not self.spool_fallback.is_transient(e):
                raise
            return ()

    def resolve(self, message: Message, how: How, deadline: Deadline) -> How:
        """The place of ``message``: a queue, any, or what a selector, by its name and argument, chooses when there is a route."""
        queue, selector = how.queue, how.selector
        if queue is not None and selector is not None:
            raise MessageRefused("a message goes to a queue or through a selector, not both", topic=message.topic)
        if selector is not None:
            return self._apply_selector(message, selector, how.arg, deadline)
        if queue is None:
            return DEFAULT_HOW
        self.check_queue(message.topic, queue, deadline)
        return How(queue)

    def check_queue(self, topic: str, queue: MessageQueue | None, deadline: Deadline) -> None:
        """That ``queue``, if one is named, is of the topic and of the producer's environment."""
        if queue is None:
            return
        encoding.check_queue(topic, queue)
        if self._topics.any_topic() is None:  # perhaps there was no question for an address so far
            try:
                self.queues(topic, deadline)
            except RouteNotFound:
                pass
            except RocketMQError as e:
                if self.spool_fallback is None or not self.spool_fallback.is_transient(e):
                    raise
        environment = self._environment
        if environment is not None and queue not in self.queues(topic, deadline):
            raise MessageRefused(f"{queue} does not belong to environment {environment.name!r}", topic=topic)

    def _apply_selector(self, message: Message, selector: str | Select, arg: object, deadline: Deadline) -> How:
        name = selector.lower() if isinstance(selector, str) else ""
        if name == "roundrobin" or (name == "environment" and self._environment is not None and arg is None):
            return DEFAULT_HOW  # the default: avoids bad brokers, may be retried elsewhere, stays in the environment
        later = self.spool_fallback
        if later is None or not isinstance(selector, str) or not is_storable_selector(selector, arg):
            if later is not None and isinstance(selector, str):
                check_arg(selector, arg)  # as of what is kept: before anybody waits for a route
            return How(self._select_queue(message, selector, arg, deadline))
        if later.holds_earlier(message.topic, selector, arg):
            return How(None, selector, arg)
        try:
            return How(self._select_queue(message, selector, arg, deadline))
        except RocketMQError as e:
            if isinstance(e, SelectorError) or not later.is_transient(e):
                raise
            check_arg(selector, arg)  # what fails whatever queues there are is not kept
            return How(None, selector, arg)

    def _select_queue(self, message: Message, selector: str | Select, arg: object, deadline: Deadline) -> MessageQueue:
        queues = self.queues(message.topic, deadline)
        queue = select(selector, queues, copy.copy(message), arg)
        if deadline.expired:
            raise CallTimeout("sendSelectImpl call timeout: selecting a queue took too long", topic=message.topic)
        return queue
