"""Which queue a sender says a message goes to: one that is named, one that a selector chooses, or none.

A driver in so far as it asks for routes, and waits for a name server that does not answer.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any, NamedTuple

from rocketmq_spark.clock import Deadline
from rocketmq_spark.errors import CallTimeout, MessageRefused, RocketMQError, RouteNotFound, SelectorError
from rocketmq_spark.model import Message, MessageQueue, SendRequest, SpooledSend
from rocketmq_spark.ports import Sender, Spool
from rocketmq_spark.producer import encoding
from rocketmq_spark.producer.encoding import How
from rocketmq_spark.producer.spooling import passing, storable
from rocketmq_spark.producer.topics import Topics
from rocketmq_spark.queues.environment import Environment
from rocketmq_spark.queues.selection import Select, check_arg, select
from rocketmq_spark.timer import Timer


class Destination(NamedTuple):
    """Where a message goes: a queue, any, or what a selector, by its name and argument, chooses when there is a route."""

    queue: MessageQueue | None = None
    selection: tuple[str, Any] | None = None

    @property
    def known(self) -> bool:
        """Whether there is nothing left to choose by a selector."""
        return self.selection is None


_ANYWHERE = Destination()


class Later(NamedTuple):
    """A spool takes what has no route yet; ``sender`` knows whether one may come."""

    spool: Spool
    sender: Sender

    def waits(self, topic: str, selector: str, arg: object) -> bool:
        """Whether something of the same choice waits in the spool, which must not be overtaken."""
        return self.spool.holds(SpooledSend(topic, _NOTHING, selector=selector, arg=arg))

    def may_pass(self, error: RocketMQError) -> bool:
        return passing(error, self.sender)


_NOTHING = SendRequest("", b"")


class Destinations:
    """Finds and checks the place of each message of a producer. With ``later`` it may be found when it is sent."""

    def __init__(
        self, topics: Topics, timer: Timer, environment: Environment | None, later: Later | None = None
    ) -> None:
        self._later = later
        self._topics = topics
        self._timer = timer
        self._environment = environment

    def queues(self, topic: str, deadline: Deadline) -> Sequence[MessageQueue]:
        """The queues that messages of ``topic`` can go to."""
        return self._topics.awaited(topic, deadline, self._timer.pause)

    def at_hand(self, topic: str, deadline: Deadline) -> Sequence[MessageQueue]:
        """The same; none where a spool takes what has no route yet."""
        try:
            return self.queues(topic, deadline)
        except RocketMQError as e:
            if self._later is None or not self._later.may_pass(e):
                raise
            return ()

    def of(self, message: Message, how: How, deadline: Deadline) -> Destination:
        """The place of ``message``."""
        queue, selector = how.queue, how.selector
        if queue is not None and selector is not None:
            raise MessageRefused("a message goes to a queue or through a selector, not both", topic=message.topic)
        if selector is not None:
            return self._select(message, selector, how.arg, deadline)
        if queue is None:
            return _ANYWHERE
        self.check(message.topic, queue, deadline)
        return Destination(queue)

    def check(self, topic: str, queue: MessageQueue | None, deadline: Deadline) -> None:
        """That ``queue``, if one is named, is of the topic and of the producer's environment."""
        if queue is None:
            return
        encoding.check_queue(topic, queue)
        if self._topics.any_topic() is None:  # nobody asked for an address so far, perhaps
            try:
                self.queues(topic, deadline)
            except RouteNotFound:
                pass
            except RocketMQError as e:
                if self._later is None or not self._later.may_pass(e):
                    raise
        environment = self._environment
        if environment is not None and queue not in self.queues(topic, deadline):
            raise MessageRefused(f"{queue} does not belong to environment {environment.name!r}", topic=topic)

    def _select(self, message: Message, selector: str | Select, arg: object, deadline: Deadline) -> Destination:
        name = selector.lower() if isinstance(selector, str) else ""
        if name == "roundrobin" or (name == "environment" and self._environment is not None and arg is None):
            return Destination()  # the default: avoids bad brokers, may be retried elsewhere, stays in the environment
        later = self._later
        if later is None or not isinstance(selector, str) or not storable(selector, arg):
            if later is not None and isinstance(selector, str):
                check_arg(selector, arg)  # as of what is kept: before anybody waits for a route
            return Destination(self._selected(message, selector, arg, deadline))
        if later.waits(message.topic, selector, arg):
            return Destination(None, (selector, arg))
        try:
            return Destination(self._selected(message, selector, arg, deadline))
        except RocketMQError as e:
            if isinstance(e, SelectorError) or not later.may_pass(e):
                raise
            check_arg(selector, arg)  # what fails whatever queues there are is not kept
            return Destination(None, (selector, arg))

    def _selected(self, message: Message, selector: str | Select, arg: object, deadline: Deadline) -> MessageQueue:
        queues = self.queues(message.topic, deadline)
        queue = select(selector, queues, copy.copy(message), arg)
        if deadline.expired:
            raise CallTimeout("sendSelectImpl call timeout: selecting a queue took too long", topic=message.topic)
        return queue
