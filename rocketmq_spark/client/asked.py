"""What brokers ask of a consumer, from commands to questions in the user's names, and answers back to commands."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TypeVar

from rocketmq_spark.client.calls import Calls
from rocketmq_spark.codes import Property, Request
from rocketmq_spark.errors import RemoteProtocolError
from rocketmq_spark.membership import (
    Answer,
    Asked,
    ConsumeDirectly,
    DirectResult,
    InfoAsked,
    MembersChanged,
    Membership,
    OffsetsAsked,
    Question,
    ResetOffsets,
    RunningInfo,
)
from rocketmq_spark.model import Filter, MessageQueue, ReceivedMessage
from rocketmq_spark.wire import bodies, member_bodies, rpc
from rocketmq_spark.wire.bodies import GroupMembership
from rocketmq_spark.wire.header import Command
from rocketmq_spark.wire.messages import decode_messages
from rocketmq_spark.wire.names import Scope
from rocketmq_spark.wire.subscription import Subscription, parse_subscription

Value = TypeVar("Value")


def told(group: str, membership: Membership) -> GroupMembership:
    """What heartbeats say, in the user's names."""
    return GroupMembership(
        group,
        {topic: _subscription(wanted) for topic, wanted in membership.subscriptions.items()},
        membership.consume_type,
        membership.message_model,
        membership.consume_from_where,
        membership.unit_mode,
        membership.versions_ms,
        {topic: wanted.kind for topic, wanted in membership.subscriptions.items()},
    )


def _subscription(wanted: Filter) -> Subscription:
    return parse_subscription(wanted.expression) if wanted.kind == "TAG" else Subscription(wanted.expression)


class BrokerRequests:
    """The ``asked`` of a group's member in ``client/instance``: takes a command apart and has it answered."""

    def __init__(self, calls: Calls, group: str, asked: Asked) -> None:
        self._calls = calls
        self._group = group
        self._asked = asked
        self._take_apart: dict[int, Callable[[Command], Question]] = {
            Request.NOTIFY_CONSUMER_IDS_CHANGED: lambda command: MembersChanged(),
            Request.RESET_CONSUMER_CLIENT_OFFSET: self._reset,
            Request.GET_CONSUMER_STATUS_FROM_CLIENT: self._offsets_asked,
            Request.GET_CONSUMER_RUNNING_INFO: self._info_asked,
            Request.CONSUME_MESSAGE_DIRECTLY: self._direct,
        }

    def __call__(self, address: str, command: Command) -> Command | None:
        """None refuses: for what nobody knows here, and what needs no answer."""
        take_apart = self._take_apart.get(command.code)
        if take_apart is None:
            return None
        question = take_apart(command)
        answer = self._asked(address, question)
        return None if answer is None else rpc.by_code[command.code].reply(command, self._body(answer))

    def _plain(self, name: str) -> str:
        return self._calls.scope.plain(name)

    def _reset(self, command: Command) -> Question:
        fields = rpc.RESET_CONSUMER_CLIENT_OFFSET.arguments(command)
        offsets = bodies.reset_offsets(command.body)
        plain = {
            q._replace(topic=self._plain(q.topic)): offset
            for q, offset in offsets.items()
            if self._calls.scope.reaches(q.topic)
        }
        return ResetOffsets(self._plain(fields["topic"]), plain)

    def _offsets_asked(self, command: Command) -> Question:
        return OffsetsAsked(self._plain(rpc.GET_CONSUMER_STATUS_FROM_CLIENT.arguments(command)["topic"]))

    def _info_asked(self, command: Command) -> Question:
        return InfoAsked(bool(rpc.GET_CONSUMER_RUNNING_INFO.arguments(command)["jstackEnable"]))

    def _direct(self, command: Command) -> Question:
        fields = rpc.CONSUME_MESSAGE_DIRECTLY.arguments(command)
        messages = decode_messages(command.body, fields["brokerName"] or "")
        if len(messages) != 1:
            raise RemoteProtocolError(f"{len(messages)} messages came to be consumed directly, expected 1")
        return ConsumeDirectly(own(messages[0], self._calls.scope))

    def _body(self, answer: Answer) -> bytes:
        if isinstance(answer, DirectResult):
            return member_bodies.direct_result(answer)
        if isinstance(answer, RunningInfo):
            name = self._calls.on_wire
            info = replace(
                answer,
                queues=_on_wire(self._calls, answer.queues),
                topics={name(topic): figures for topic, figures in answer.topics.items()},
            )
            return member_bodies.running_info(info, told(self._group, answer.membership).on_wire(name))
        return member_bodies.consumer_offsets(_on_wire(self._calls, answer))


def _on_wire(calls: Calls, table: Mapping[MessageQueue, Value]) -> dict[MessageQueue, Value]:
    return {calls.queue_on_wire(queue): value for queue, value in table.items()}


def own(message: ReceivedMessage, scope: Scope) -> ReceivedMessage:
    """A message in the user's names, and of the topic that it was first sent to where it comes from a retry topic.

    Mirrors ``DefaultMQPushConsumerImpl.resetRetryAndNamespace``.
    """
    queue = message.queue._replace(topic=scope.plain(message.queue.topic))
    origin = message.properties.get(Property.RETRY_TOPIC)
    topic = scope.plain(origin) if origin else queue.topic
    return message if (queue, topic) == (message.queue, message.topic) else replace(message, queue=queue, topic=topic)
