"""Requests for information about queues, many at a time, and about a topic.

A request about a queue goes to the broker of the queue, and one that fails does not affect others. Every request names the
broker (``bname``): brokers ignore it for ordinary topics, a Proxy needs it.

Information about a topic: its type, the longest delay of its brokers, and whether any consumer reads it. Attributes are
cached: ``queue.type`` cannot change, but a topic can be deleted and created again.
"""

from __future__ import annotations

import bisect
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from rocketmq_spark.base import codes
from rocketmq_spark.base.clock import Deadline
from rocketmq_spark.base.codes import Response
from rocketmq_spark.client.routes import Routes
from rocketmq_spark.client.rpc import RpcClient, error_from_response
from rocketmq_spark.errors import RocketMQError
from rocketmq_spark.model import NO_FILTER, MessageQueue
from rocketmq_spark.wire import bodies, rpc
from rocketmq_spark.wire.header import Command
from rocketmq_spark.wire.messages import stamp

T = TypeVar("T")

# Response codes of a pull that has an outcome, even if there is no message.
PULLED = (Response.SUCCESS, Response.PULL_NOT_FOUND, Response.PULL_RETRY_IMMEDIATELY, Response.PULL_OFFSET_MOVED)
_RESET = Response.PULL_OFFSET_MOVED, codes.OFFSET_RESET


@dataclass(frozen=True, slots=True)
class BrokerCommand:
    """A request for one broker and the function that interprets the answer."""

    broker_name: str
    command: Command
    topic: str
    queue: MessageQueue | None = None


Attributes = Mapping[str, str]
AttributesByTopic = Mapping[tuple[str, str], Attributes | RocketMQError]


class BrokerClient:
    """Asks brokers by name, over the connections and with the routes of a client."""

    def __init__(self, calls: RpcClient, routes: Routes) -> None:
        self.calls = calls
        self._routes = routes

    def for_queue(self, row: rpc.Row, queue: MessageQueue, **fields: Any) -> BrokerCommand:
        """The request of a row of ``wire/rpc`` about a queue."""
        command = row.request(
            topic=self.calls.on_wire(queue.topic), queueId=queue.queue_id, bname=queue.broker_name, **fields
        )
        return BrokerCommand(queue.broker_name, command, queue.topic, queue)

    def pull_at(self, group: str, queue: MessageQueue, offset: int, count: int = 1) -> BrokerCommand:
        return self.for_queue(
            rpc.PULL_MESSAGE,
            queue,
            consumerGroup=self.calls.on_wire(group),
            queueOffset=offset,
            maxMsgNums=count,
            subscription=NO_FILTER.expression,
            expressionType=NO_FILTER.kind,
            **rpc.FLEETING,
        )

    def request_pulls(
        self, pulls: Sequence[BrokerCommand], deadline: Deadline, read_from: str = "master"
    ) -> list[Command | RocketMQError]:
        """As ``request_each``. A broker reports an operator's reset in one answer, without a result: such a pull is repeated."""
        answers = self.request_each(pulls, deadline, PULLED, read_from)
        while reset := [i for i, a in enumerate(answers) if isinstance(a, Command) and (a.code, a.remark) == _RESET]:
            repeated = self.request_each([pulls[i] for i in reset], deadline, PULLED, read_from)
            for i, answer in zip(reset, repeated, strict=True):
                answers[i] = answer
        return answers

    def attributes(self, keys: Iterable[tuple[str, str]], deadline: Deadline) -> AttributesByTopic:
        """Current attributes of topics on brokers, or the error. ``keys`` are pairs of broker and topic."""
        commands = [
            BrokerCommand(broker, rpc.GET_TOPIC_CONFIG.request(topic=self.calls.on_wire(topic), bname=broker), topic)
            for broker, topic in sorted(keys)
        ]
        return {
            (command.broker_name, command.topic): answer
            if isinstance(answer, RocketMQError)
            else bodies.topic_config(answer.body).attributes
            for command, answer in zip(commands, self.request_each(commands, deadline), strict=True)
        }

    def first_kept(self, group: str, queue: MessageQueue, time_ms: int, deadline: Deadline) -> int:
        """The first kept offset of a compaction topic that was stored at or after a time, even if messages are missing there, or
        below the minimum of its index.
        """

        def next_ms(offset: int) -> int:
            (answer,) = self.request_pulls([self.pull_at(group, queue, offset)], deadline)
            if isinstance(answer, RocketMQError):
                raise answer
            first = stamp(answer.body) if answer.code == Response.SUCCESS else None
            return time_ms if first is None else first.stored_ms

        (answer,) = self.request_all([self.for_queue(rpc.GET_MAX_OFFSET, queue)], deadline)
        return bisect.bisect_left(range(rpc.GET_MAX_OFFSET.answer(answer)["offset"]), time_ms, key=next_ms)

    def broker_config(self, broker_name: str, deadline: Deadline) -> Command | RocketMQError | None:
        """Return a master's answer with its settings, or the error; None if the network could read the passwords in it."""
        try:
            address = self._routes.address(broker_name)
        except RocketMQError as e:
            return e
        if not self.calls.is_private(address):
            return None
        command = BrokerCommand(broker_name, rpc.GET_BROKER_CONFIG.request(bname=broker_name), "")
        (answer,) = self.calls.invoke_each([(address, command.command)], deadline)
        return _checked(answer, command, address, (Response.SUCCESS,))

    def remove_unrouted(self, table: dict[tuple[str, str], T]) -> None:
        """Forget what is kept by broker and topic if no route has the broker for the topic."""
        routed = self._routes.cached_topic_brokers()
        for key in [key for key in list(table) if key[::-1] not in routed]:
            table.pop(key, None)

    def late_brokers(self) -> frozenset[str]:
        """Brokers that have not answered yet, and for which calls no longer wait."""
        late_addresses = self.calls.late_answers
        if not late_addresses:
            return frozenset()
        return frozenset(
            b.broker_name for b in self._routes.brokers() if late_addresses.keys() & set(b.addresses.values())
        )

    def connection(self, broker_name: str) -> tuple[str, int] | None:
        """Address of the broker's master and the number of connections made to it; None while no route has the broker."""
        try:
            address = self._routes.address(broker_name, "master")
        except RocketMQError:
            return None
        return address, self.calls.pool.attempts(address)

    def request_all(
        self,
        commands: Sequence[BrokerCommand],
        deadline: Deadline,
        accept: Container[int] = (Response.SUCCESS,),
        read_from: str = "master",
    ) -> list[Command]:
        """Ask all at once; return answers in order. After all have ended, raises the error of the first that failed."""
        answers = []
        for answer in self.request_each(commands, deadline, accept, read_from):
            if isinstance(answer, RocketMQError):
                raise answer
            answers.append(answer)
        return answers

    def request_each(
        self,
        commands: Sequence[BrokerCommand],
        deadline: Deadline,
        accept: Container[int] = (Response.SUCCESS,),
        read_from: str = "master",
    ) -> list[Command | RocketMQError]:
        """Ask all at once; return answers and errors in order."""
        answers = self.request_with_grace(commands, deadline, read_from, accept=accept)
        return [answer for answer in answers if answer is not None]

    def request_with_grace(
        self,
        commands: Sequence[BrokerCommand],
        deadline: Deadline,
        read_from: str = "master",
        grace_s: float | None = None,
        accept: Container[int] = (Response.SUCCESS,),
    ) -> list[Command | RocketMQError | None]:
        """Answers and errors in order; with ``grace_s``, None for each question without an answer after that time."""
        address_of: dict[str, str | RocketMQError] = {}
        for name in {broker_command.broker_name for broker_command in commands}:
            try:
                address_of[name] = self._routes.address(name, read_from)
            except RocketMQError as e:
                address_of[name] = e
        addresses = [address_of[broker_command.broker_name] for broker_command in commands]
        requests = [(a, q.command) for a, q in zip(addresses, commands, strict=True) if isinstance(a, str)]
        outcomes: Sequence[Command | RocketMQError | None]
        outcomes = (
            self.calls.invoke_each(requests, deadline)
            if grace_s is None
            else self.calls.invoke_with_grace(requests, deadline, grace_s)
        )
        answers = iter(outcomes)
        return [
            _checked(next(answers), broker_command, address, accept) if isinstance(address, str) else address
            for broker_command, address in zip(commands, addresses, strict=True)
        ]


# So many entries about topics may be kept before those that no route has are looked for.
SWEEP_ABOVE_ENTRIES = 64


def has_attribute(attributes: AttributesByTopic, queue: MessageQueue, name: str, value: str) -> bool | None:
    """Whether the topic of a queue has an attribute; None if its broker does not report attributes."""
    of_topic = attributes[queue.broker_name, queue.topic]
    return None if isinstance(of_topic, RocketMQError) else of_topic.get(name) == value


def raise_if_retriable(attributes: AttributesByTopic) -> AttributesByTopic:
    """Return ``attributes``. Raises a broker's error if the broker may answer later."""
    for of_topic in attributes.values():
        if isinstance(of_topic, RocketMQError) and of_topic.retriable:
            raise of_topic
    return attributes


def first_queues(queues: Iterable[MessageQueue]) -> dict[tuple[str, str], MessageQueue]:
    """The lowest queue of every broker and topic."""
    return {(queue.broker_name, queue.topic): queue for queue in sorted(queues, reverse=True)}


def _checked(
    result: Command | RocketMQError | None, command: BrokerCommand, address: str, accept: Container[int]
) -> Command | RocketMQError | None:
    if result is None or isinstance(result, RocketMQError) or result.code in accept:
        return result
    queue = str(command.queue) if command.queue else None
    return error_from_response(result, address, command.topic or None, queue)
