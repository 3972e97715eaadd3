"""Which queue an attempt goes to: the one that was chosen, or the next one on a good broker.

A driver in so far as it asks for routes; several threads use one. Each thread goes round the queues by itself.
"""

from __future__ import annotations

import contextlib
import logging
import threading

from rocketmq_spark.clock import Deadline
from rocketmq_spark.errors import RouteNotFound
from rocketmq_spark.model import MessageQueue
from rocketmq_spark.producer.attempts import Attempts, OutOfTime
from rocketmq_spark.producer.faults import FaultTable
from rocketmq_spark.producer.outgoing import Outgoing, Queues
from rocketmq_spark.producer.topics import Topics
from rocketmq_spark.queues.selection import RoundRobin
from rocketmq_spark.timer import Timer

logger = logging.getLogger(__name__)


class QueueChoice:
    """Chooses for every attempt of an engine."""

    def __init__(self, topics: Topics, faults: FaultTable, timer: Timer) -> None:
        self._topics = topics
        self._faults = faults
        self._timer = timer
        self._indexes = threading.local()

    def queue(self, outgoing: Outgoing, attempts: Attempts, deadline: Deadline, refresh: bool) -> MessageQueue:
        """The queue of the next attempt; with ``refresh`` the route is asked for first."""
        if deadline.expired:
            raise OutOfTime("the send timeout is over", topic=outgoing.topic)
        if outgoing.queue is not None:
            self._prepare(outgoing.topic, deadline, refresh)
            return outgoing.queue
        queues = self._topics.queues(outgoing.topic, deadline, refresh)
        if outgoing.candidates is not None:
            queues, index = outgoing.candidates(queues), RoundRobin()
        else:
            index = self._index(outgoing.topic, queues)
        if attempts.count and self._faults.enabled:
            index.reset()
        return self._pick(queues, index, attempts.last_broker)

    def _prepare(self, topic: str, deadline: Deadline, refresh: bool) -> None:
        """A broker's address comes with a route."""
        if refresh:
            self._topics.queues(topic, deadline, refresh=True)
        elif self._topics.any_topic() is None:  # nobody asked for an address so far, perhaps
            with contextlib.suppress(RouteNotFound):
                self._topics.queues(topic, deadline)

    def _pick(self, queues: Queues, index: RoundRobin, last_broker: str | None) -> MessageQueue:
        try:
            return self._faults.pick(queues, index, last_broker, self._timer.now_ms())
        except Exception:  # the choice of a queue must never be why a message is not sent
            logger.exception("fault tolerance failed; going round the queues instead")
            return index.pick(queues, last_broker)

    def _index(self, topic: str, queues: Queues) -> RoundRobin:
        """This thread's index into ``queues``; a new list starts a new one, as a new publish info does in Java."""
        indexes: dict[str, tuple[Queues, RoundRobin]] = self._indexes.__dict__
        known = indexes.get(topic)
        if known is None or known[0] is not queues:
            known = indexes[topic] = (queues, RoundRobin())
        return known[1]
