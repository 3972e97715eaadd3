"""Which queue a sender says a message goes to: one that is named, one that a selector chooses, or none.

A driver in so far as it asks for routes, and waits for a name server that does not answer.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Sequence

from rocketmq_spark.clock import Deadline
from rocketmq_spark.errors import CallTimeout, MessageRefused, RouteNotFound
from rocketmq_spark.model import Message, MessageQueue
from rocketmq_spark.producer import encoding
from rocketmq_spark.producer.encoding import How
from rocketmq_spark.producer.topics import Topics
from rocketmq_spark.queues.environment import Environment
from rocketmq_spark.queues.selection import Select, select
from rocketmq_spark.timer import Timer


class Destinations:
    """Finds and checks the queue of each message of a producer."""

    def __init__(self, topics: Topics, timer: Timer, environment: Environment | None) -> None:
        self._topics = topics
        self._timer = timer
        self._environment = environment

    def queues(self, topic: str, deadline: Deadline) -> Sequence[MessageQueue]:
        """The queues that messages of ``topic`` can go to."""
        return self._topics.awaited(topic, deadline, self._timer.pause)

    def of(self, message: Message, how: How, deadline: Deadline) -> MessageQueue | None:
        """The queue of ``message``; None when it may go to any."""
        queue, selector = how.queue, how.selector
        if queue is not None and selector is not None:
            raise MessageRefused("a message goes to a queue or through a selector, not both", topic=message.topic)
        if selector is not None:
            return self._select(message, selector, how.arg, deadline)
        self.check(message.topic, queue, deadline)
        return queue

    def check(self, topic: str, queue: MessageQueue | None, deadline: Deadline) -> None:
        """That ``queue``, if one is named, is of the topic and of the producer's environment."""
        if queue is None:
            return
        encoding.check_queue(topic, queue)
        if self._topics.any_topic() is None:  # nobody asked for an address so far, perhaps
            with contextlib.suppress(RouteNotFound):
                self.queues(topic, deadline)
        environment = self._environment
        if environment is not None and queue not in self.queues(topic, deadline):
            raise MessageRefused(f"{queue} does not belong to environment {environment.name!r}", topic=topic)

    def _select(self, message: Message, selector: str | Select, arg: object, deadline: Deadline) -> MessageQueue | None:
        queues = self.queues(message.topic, deadline)
        name = selector.lower() if isinstance(selector, str) else ""
        if name == "roundrobin" or (name == "environment" and self._environment is not None and arg is None):
            return None  # the default: avoids bad brokers, may be retried elsewhere, stays in the environment
        queue = select(selector, queues, copy.copy(message), arg)
        if deadline.expired:
            raise CallTimeout("sendSelectImpl call timeout: selecting a queue took too long", topic=message.topic)
        return queue
