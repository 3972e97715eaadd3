"""Decodes the requests that brokers send to group members into values of ``model/membership``, and encodes the answers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TypeVar

from rocketmq_spark.base.codes import RETRY_PREFIX, Property, Request
from rocketmq_spark.client.rpc import RpcClient
from rocketmq_spark.model import Filter, MessageQueue, ReceivedMessage
from rocketmq_spark.model.membership import (
    BrokerRequest,
    ConsumeDirectly,
    DirectResult,
    GetConsumedOffsets,
    GetRunningInfo,
    MembersChanged,
    Membership,
    RequestAnswer,
    RequestCallback,
    ResetOffsets,
    RunningInfo,
)
from rocketmq_spark.wire import bodies, rpc
from rocketmq_spark.wire.bodies import GroupMembership
from rocketmq_spark.wire.header import Command
from rocketmq_spark.wire.messages import single_message
from rocketmq_spark.wire.names import Scope
from rocketmq_spark.wire.properties import Subscription, parse_subscription

Value = TypeVar("Value")


def group_membership(group: str, membership: Membership) -> GroupMembership:
    """Return what heartbeats report about a consumer, with topics and groups as users name them."""
    return GroupMembership(
        group,
        {topic: _subscription(topic_filter) for topic, topic_filter in membership.subscriptions.items()},
        membership.consume_type,
        membership.message_model,
        membership.consume_from_where,
        membership.unit_mode,
        membership.versions_ms,
        {topic: topic_filter.kind for topic, topic_filter in membership.subscriptions.items()},
    )


def _subscription(topic_filter: Filter) -> Subscription:
    return (
        parse_subscription(topic_filter.expression)
        if topic_filter.kind == "TAG"
        else Subscription(topic_filter.expression)
    )


class BrokerRequests:
    """The ``request_handler`` of a ``RegisteredMember``: parses a command, calls ``handler``, and encodes the answer."""

    def __init__(self, rpc_client: RpcClient, group: str, handler: RequestCallback) -> None:
        self._rpc_client = rpc_client
        self._group = group
        self._handler = handler
        self._parsers: dict[int, Callable[[Command], BrokerRequest]] = {
            Request.NOTIFY_CONSUMER_IDS_CHANGED: lambda command: MembersChanged(),
            Request.RESET_CONSUMER_CLIENT_OFFSET: self._parse_reset,
            Request.GET_CONSUMER_STATUS_FROM_CLIENT: self._parse_offsets_request,
            Request.GET_CONSUMER_RUNNING_INFO: self._parse_info_request,
            Request.CONSUME_MESSAGE_DIRECTLY: self._parse_consume_directly,
        }

    def __call__(self, address: str, command: Command) -> Command | None:
        """Handle a request. Returns the answer; None if the request is unknown or has no answer."""
        parse = self._parsers.get(command.code)
        if parse is None:
            return None
        request = parse(command)
        answer = self._handler(address, request)
        return None if answer is None else rpc.row_by_code[command.code].reply(command, self._encode_answer(answer))

    def _user_name(self, name: str) -> str:
        return self._rpc_client.scope.user_name(name)

    def _parse_reset(self, command: Command) -> BrokerRequest:
        fields = rpc.RESET_CONSUMER_CLIENT_OFFSET.arguments(command)
        offsets = bodies.reset_offsets(command.body)
        user_offsets = {
            q._replace(topic=self._user_name(q.topic)): offset
            for q, offset in offsets.items()
            if self._rpc_client.scope.is_reversible(q.topic)
        }
        return ResetOffsets(self._user_name(fields["topic"]), user_offsets)

    def _parse_offsets_request(self, command: Command) -> BrokerRequest:
        return GetConsumedOffsets(self._user_name(rpc.GET_CONSUMER_STATUS_FROM_CLIENT.arguments(command)["topic"]))

    def _parse_info_request(self, command: Command) -> BrokerRequest:
        return GetRunningInfo(bool(rpc.GET_CONSUMER_RUNNING_INFO.arguments(command)["jstackEnable"]))

    def _parse_consume_directly(self, command: Command) -> BrokerRequest:
        fields = rpc.CONSUME_MESSAGE_DIRECTLY.arguments(command)
        # The body stays compressed until the member accepts the message: 64 KiB may expand to gigabytes.
        broker = fields["brokerName"] or ""
        message, scope = single_message(command.body, broker, "to be consumed directly"), self._rpc_client.scope
        # A topic of another namespace keeps its prefix, because without the prefix it would look like a topic of this namespace.
        original_topic = message.properties.get(Property.RETRY_TOPIC)
        is_in_scope = original_topic is None or scope.is_reversible(original_topic)
        return ConsumeDirectly(with_user_names(message, scope) if is_in_scope else with_stored_names(message, scope))

    def _encode_answer(self, answer: RequestAnswer) -> bytes:
        if isinstance(answer, DirectResult):
            return bodies.direct_result(answer)
        if isinstance(answer, RunningInfo):
            name_on_wire = self._rpc_client.name_on_wire
            info = replace(
                answer,
                queues=_keys_on_wire(self._rpc_client, answer.queues),
                topics={name_on_wire(topic): figures for topic, figures in answer.topics.items()},
            )
            return bodies.running_info(
                info, group_membership(self._group, answer.membership).with_names_on_wire(name_on_wire)
            )
        return bodies.consumer_offsets(_keys_on_wire(self._rpc_client, answer))


def _keys_on_wire(rpc_client: RpcClient, value_by_queue: Mapping[MessageQueue, Value]) -> dict[MessageQueue, Value]:
    return {rpc_client.queue_on_wire(queue): value for queue, value in value_by_queue.items()}


def with_user_names(message: ReceivedMessage, scope: Scope) -> ReceivedMessage:
    """Return a message with its topic and queue as users name them.

    A message of a retry topic gets its original topic, which a property names. Every client that may write to the retry topic
    can set this property. A dead letter keeps the dead-letter topic, as in Java. Mirrors
    ``DefaultMQPushConsumerImpl.resetRetryAndNamespace``.
    """
    stored_message = with_stored_names(message, scope)
    original_topic = (
        message.properties.get(Property.RETRY_TOPIC) if stored_message.topic.startswith(RETRY_PREFIX) else None
    )
    return replace(stored_message, topic=scope.user_name(original_topic)) if original_topic else stored_message


def with_stored_names(message: ReceivedMessage, scope: Scope) -> ReceivedMessage:
    """Return a message with the topic and queue in which the broker stores the message, as users name them."""
    queue = message.queue._replace(topic=scope.user_name(message.queue.topic))
    is_unchanged = (queue, queue.topic) == (message.queue, message.topic)
    return message if is_unchanged else replace(message, queue=queue, topic=queue.topic)
