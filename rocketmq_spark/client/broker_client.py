"""Requests to brokers by name, many at a time.

A request about a queue goes to the broker of the queue. A request that fails does not affect the others. Every request names
the broker in field ``bname``, because a Proxy needs the name. Brokers ignore this field for ordinary topics.
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
from rocketmq_spark.wire.messages import first_stamp

T = TypeVar("T")

# The response codes of pulls that have not failed.
PULL_CODES = (Response.SUCCESS, Response.PULL_NOT_FOUND, Response.PULL_RETRY_IMMEDIATELY, Response.PULL_OFFSET_MOVED)
_OFFSET_RESET_ANSWER = Response.PULL_OFFSET_MOVED, codes.OFFSET_RESET


@dataclass(frozen=True, slots=True)
class BrokerCommand:
    """A request for the broker with this name. Errors of the request name ``topic`` and ``queue``."""

    broker_name: str
    command: Command
    topic: str
    queue: MessageQueue | None = None


Attributes = Mapping[str, str]
AttributesByTopic = Mapping[tuple[str, str], Attributes | RocketMQError]


class BrokerClient:
    """Sends requests to brokers by name. The addresses of the brokers come from the routes of a client."""

    def __init__(self, rpc_client: RpcClient, routes: Routes) -> None:
        self.rpc_client = rpc_client
        self._routes = routes

    def queue_command(self, rpc_row: rpc.RequestRow, queue: MessageQueue, **fields: Any) -> BrokerCommand:
        """Return the request of a row of ``wire/rpc`` about a queue."""
        command = rpc_row.request(
            topic=self.rpc_client.name_on_wire(queue.topic), queueId=queue.queue_id, bname=queue.broker_name, **fields
        )
        return BrokerCommand(queue.broker_name, command, queue.topic, queue)

    def pull_command_at(self, group: str, queue: MessageQueue, offset: int, count: int = 1) -> BrokerCommand:
        return self.queue_command(
            rpc.PULL_MESSAGE,
            queue,
            consumerGroup=self.rpc_client.name_on_wire(group),
            queueOffset=offset,
            maxMsgNums=count,
            subscription=NO_FILTER.expression,
            expressionType=NO_FILTER.kind,
            **rpc.IMMEDIATE_PULL,
        )

    def request_pulls(
        self, pull_commands: Sequence[BrokerCommand], deadline: Deadline, read_from: str = "master"
    ) -> list[Command | RocketMQError]:
        """Like ``request_each``, but repeats each pull whose answer only reports that an operator reset the offset."""
        answers = self.request_each(pull_commands, deadline, PULL_CODES, read_from)
        while reset_indexes := [
            i for i, a in enumerate(answers) if isinstance(a, Command) and (a.code, a.remark) == _OFFSET_RESET_ANSWER
        ]:
            repeated_answers = self.request_each(
                [pull_commands[i] for i in reset_indexes], deadline, PULL_CODES, read_from
            )
            for i, answer in zip(reset_indexes, repeated_answers, strict=True):
                answers[i] = answer
        return answers

    def attributes(self, keys: Iterable[tuple[str, str]], deadline: Deadline) -> AttributesByTopic:
        """Request the attributes of topics on brokers. ``keys`` are pairs of broker and topic. The value of a key may be an
        error.
        """
        commands = [
            BrokerCommand(
                broker, rpc.GET_TOPIC_CONFIG.request(topic=self.rpc_client.name_on_wire(topic), bname=broker), topic
            )
            for broker, topic in sorted(keys)
        ]
        return {
            (command.broker_name, command.topic): answer
            if isinstance(answer, RocketMQError)
            else bodies.topic_config(answer.body).attributes
            for command, answer in zip(commands, self.request_each(commands, deadline), strict=True)
        }

    def first_kept_offset(self, group: str, queue: MessageQueue, time_ms: int, deadline: Deadline) -> int:
        """Return the offset of the first message that was stored at or after a time, in a queue of a compaction topic. This
        offset may be below the minimum offset of the queue.
        """

        def next_store_time_ms(offset: int) -> int:
            (answer,) = self.request_pulls([self.pull_command_at(group, queue, offset)], deadline)
            if isinstance(answer, RocketMQError):
                raise answer
            stamp = first_stamp(answer.body) if answer.code == Response.SUCCESS else None
            return time_ms if stamp is None else stamp.stored_ms

        (answer,) = self.request_all([self.queue_command(rpc.GET_MAX_OFFSET, queue)], deadline)
        return bisect.bisect_left(range(rpc.GET_MAX_OFFSET.answer(answer)["offset"]), time_ms, key=next_store_time_ms)

    def broker_config(self, broker_name: str, deadline: Deadline) -> Command | RocketMQError | None:
        """Return the answer with the configuration of a broker's master, or the error; None if others on the network could read
        the passwords in the configuration.
        """
        try:
            address = self._routes.address(broker_name)
        except RocketMQError as e:
            return e
        if not self.rpc_client.is_private(address):
            return None
        command = BrokerCommand(broker_name, rpc.GET_BROKER_CONFIG.request(bname=broker_name), "")
        (answer,) = self.rpc_client.invoke_each([(address, command.command)], deadline)
        return _answer_or_error(answer, command, address, (Response.SUCCESS,))

    def remove_unrouted_entries(self, table: dict[tuple[str, str], T]) -> None:
        """Remove the entries of ``table`` whose broker and topic are in no cached route. The keys of ``table`` are pairs of
        broker and topic.
        """
        routed_topics = self._routes.cached_topic_brokers()
        for key in [key for key in list(table) if key[::-1] not in routed_topics]:
            table.pop(key, None)

    def late_brokers(self) -> frozenset[str]:
        """The brokers that have not yet answered a request of ``request_with_grace``."""
        late_addresses = self.rpc_client.late_answers
        if not late_addresses:
            return frozenset()
        return frozenset(
            b.broker_name for b in self._routes.brokers() if late_addresses.keys() & set(b.addresses.values())
        )

    def connection(self, broker_name: str) -> tuple[str, int] | None:
        """The address of the broker's master, and the number of the last attempt to connect to it; None while no route has a
        master of the broker.
        """
        try:
            address = self._routes.address(broker_name, "master")
        except RocketMQError:
            return None
        return address, self.rpc_client.pool.last_attempt(address)

    def request_all(
        self,
        commands: Sequence[BrokerCommand],
        deadline: Deadline,
        accepted_codes: Container[int] = (Response.SUCCESS,),
        read_from: str = "master",
    ) -> list[Command]:
        """Send all requests at once. Returns the answers in order, or raises the first error after all have ended."""
        answers = []
        for answer in self.request_each(commands, deadline, accepted_codes, read_from):
            if isinstance(answer, RocketMQError):
                raise answer
            answers.append(answer)
        return answers

    def request_each(
        self,
        commands: Sequence[BrokerCommand],
        deadline: Deadline,
        accepted_codes: Container[int] = (Response.SUCCESS,),
        read_from: str = "master",
    ) -> list[Command | RocketMQError]:
        """Send all requests at once. Returns answers and errors in order."""
        answers = self.request_with_grace(commands, deadline, read_from, accepted_codes=accepted_codes)
        return [answer for answer in answers if answer is not None]

    def request_with_grace(
        self,
        commands: Sequence[BrokerCommand],
        deadline: Deadline,
        read_from: str = "master",
        grace_s: float | None = None,
        accepted_codes: Container[int] = (Response.SUCCESS,),
    ) -> list[Command | RocketMQError | None]:
        """As ``request_each``. With ``grace_s``, returns None for brokers that are more than ``grace_s`` slower than
        the others.
        """
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
            self.rpc_client.invoke_each(requests, deadline)
            if grace_s is None
            else self.rpc_client.invoke_with_grace(requests, deadline, grace_s)
        )
        answers = iter(outcomes)
        return [
            _answer_or_error(next(answers), broker_command, address, accepted_codes)
            if isinstance(address, str)
            else address
            for broker_command, address in zip(commands, addresses, strict=True)
        ]


# Above this number of cached entries, the entries of topics that are in no cached route are removed.
SWEEP_ABOVE_ENTRIES = 64


def has_attribute(attributes: AttributesByTopic, queue: MessageQueue, name: str, value: str) -> bool | None:
    """Whether the topic of a queue has this value of an attribute; None if the broker of the queue did not report attributes."""
    topic_attributes = attributes[queue.broker_name, queue.topic]
    return None if isinstance(topic_attributes, RocketMQError) else topic_attributes.get(name) == value


def raise_if_retriable(attributes: AttributesByTopic) -> AttributesByTopic:
    """Return ``attributes``. Raises the first retriable error in ``attributes``."""
    for topic_attributes in attributes.values():
        if isinstance(topic_attributes, RocketMQError) and topic_attributes.retriable:
            raise topic_attributes
    return attributes


def first_queues(queues: Iterable[MessageQueue]) -> dict[tuple[str, str], MessageQueue]:
    """The first queue of every broker and topic."""
    return {(queue.broker_name, queue.topic): queue for queue in sorted(queues, reverse=True)}


def _answer_or_error(
    result: Command | RocketMQError | None, command: BrokerCommand, address: str, accepted_codes: Container[int]
) -> Command | RocketMQError | None:
    if result is None or isinstance(result, RocketMQError) or result.code in accepted_codes:
        return result
    queue = str(command.queue) if command.queue else None
    return error_from_response(result, address, command.topic or None, queue)
