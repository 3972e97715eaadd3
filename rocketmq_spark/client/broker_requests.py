"""Consumer groups over remoting: requests that brokers send to members, and the readers of a topic.

``BrokerRequests`` turns commands from brokers into values of ``model/membership`` and answers back into commands.
``readers`` lists the consumers of a topic.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TypeVar

from rocketmq_spark.base.codes import RETRY_PREFIX, Property, Request
from rocketmq_spark.client.admin import BaseAdmin, consume_progress
from rocketmq_spark.client.routes import require_brokers
from rocketmq_spark.client.rpc import RpcClient
from rocketmq_spark.errors import BrokerError, CallTimeout, ConnectionLost, RemoteProtocolError, RocketMQError
from rocketmq_spark.model import Filter, MessageQueue, ReceivedMessage, TopicRoute
from rocketmq_spark.model.membership import (
    Answer,
    Asked,
    BrokerRequest,
    ConsumeDirectly,
    DirectResult,
    InfoAsked,
    MembersChanged,
    Membership,
    OffsetsAsked,
    ResetOffsets,
    RunningInfo,
)
from rocketmq_spark.wire import bodies, member_bodies, rpc
from rocketmq_spark.wire.bodies import GroupMembership
from rocketmq_spark.wire.header import Command
from rocketmq_spark.wire.messages import only_message
from rocketmq_spark.wire.names import Scope, is_user_group
from rocketmq_spark.wire.properties import Subscription, parse_subscription

logger = logging.getLogger(__name__)

Value = TypeVar("Value")


def group_membership(group: str, membership: Membership) -> GroupMembership:
    """What heartbeats say, in the user's names."""
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
    """The ``request_handler`` of a group's member in ``client/instance``: takes a command apart and has it answered."""

    def __init__(self, calls: RpcClient, group: str, handler: Asked) -> None:
        self._calls = calls
        self._group = group
        self._handler = handler
        self._parsers: dict[int, Callable[[Command], BrokerRequest]] = {
            Request.NOTIFY_CONSUMER_IDS_CHANGED: lambda command: MembersChanged(),
            Request.RESET_CONSUMER_CLIENT_OFFSET: self._parse_reset,
            Request.GET_CONSUMER_STATUS_FROM_CLIENT: self._parse_offsets_request,
            Request.GET_CONSUMER_RUNNING_INFO: self._parse_info_request,
            Request.CONSUME_MESSAGE_DIRECTLY: self._parse_direct,
        }

    def __call__(self, address: str, command: Command) -> Command | None:
        """None refuses the request: it is unknown here, or needs no answer."""
        parse = self._parsers.get(command.code)
        if parse is None:
            return None
        request = parse(command)
        answer = self._handler(address, request)
        return None if answer is None else rpc.by_code[command.code].reply(command, self._encode_answer(answer))

    def _plain(self, name: str) -> str:
        return self._calls.scope.plain(name)

    def _parse_reset(self, command: Command) -> BrokerRequest:
        fields = rpc.RESET_CONSUMER_CLIENT_OFFSET.arguments(command)
        offsets = bodies.reset_offsets(command.body)
        plain = {
            q._replace(topic=self._plain(q.topic)): offset
            for q, offset in offsets.items()
            if self._calls.scope.reaches(q.topic)
        }
        return ResetOffsets(self._plain(fields["topic"]), plain)

    def _parse_offsets_request(self, command: Command) -> BrokerRequest:
        return OffsetsAsked(self._plain(rpc.GET_CONSUMER_STATUS_FROM_CLIENT.arguments(command)["topic"]))

    def _parse_info_request(self, command: Command) -> BrokerRequest:
        return InfoAsked(bool(rpc.GET_CONSUMER_RUNNING_INFO.arguments(command)["jstackEnable"]))

    def _parse_direct(self, command: Command) -> BrokerRequest:
        fields = rpc.CONSUME_MESSAGE_DIRECTLY.arguments(command)
        # The body stays compressed until the member accepts the message: 64 KiB could become gigabytes.
        broker = fields["brokerName"] or ""
        message, scope = only_message(command.body, broker, "to be consumed directly"), self._calls.scope
        # Without the prefix of its namespace, a topic of another namespace would look like a topic of this one.
        origin = message.properties.get(Property.RETRY_TOPIC)
        inside = origin is None or scope.reaches(origin)
        return ConsumeDirectly(with_user_names(message, scope) if inside else as_stored(message, scope))

    def _encode_answer(self, answer: Answer) -> bytes:
        if isinstance(answer, DirectResult):
            return member_bodies.direct_result(answer)
        if isinstance(answer, RunningInfo):
            name = self._calls.on_wire
            info = replace(
                answer,
                queues=_on_wire(self._calls, answer.queues),
                topics={name(topic): figures for topic, figures in answer.topics.items()},
            )
            return member_bodies.running_info(info, group_membership(self._group, answer.membership).on_wire(name))
        return member_bodies.consumer_offsets(_on_wire(self._calls, answer))


def _on_wire(calls: RpcClient, table: Mapping[MessageQueue, Value]) -> dict[MessageQueue, Value]:
    return {calls.queue_on_wire(queue): value for queue, value in table.items()}


def with_user_names(message: ReceivedMessage, scope: Scope) -> ReceivedMessage:
    """Return a message with its topic and queue in the user's names.

    A message of a retry topic gets the topic that its properties name as its first topic. Every client that may write to the
    retry topic can set these properties. A dead letter keeps the dead-letter topic, as in Java. Mirrors
    ``DefaultMQPushConsumerImpl.resetRetryAndNamespace``.
    """
    stored = as_stored(message, scope)
    origin = message.properties.get(Property.RETRY_TOPIC) if stored.topic.startswith(RETRY_PREFIX) else None
    return replace(stored, topic=scope.plain(origin)) if origin else stored


def as_stored(message: ReceivedMessage, scope: Scope) -> ReceivedMessage:
    """Return a message with the topic and queue in which the broker stores it, in the user's names."""
    queue = message.queue._replace(topic=scope.plain(message.queue.topic))
    same = (queue, queue.topic) == (message.queue, message.topic)
    return message if same else replace(message, queue=queue, topic=queue.topic)


@dataclass(frozen=True, slots=True)
class GroupReader:
    """A member of a group and the queues of the topic that it has; None where it did not say.

    A group without members is a reader without ``member``: it has the queues in which it has an offset. ``is_in_scope`` says
    whether the group is of the client's own namespace and environment.
    """

    group: str
    member: str | None
    queues: tuple[MessageQueue, ...] | None
    is_in_scope: bool = True


def readers(calls: RpcClient, admin: BaseAdmin, topic: str) -> list[GroupReader]:
    """All of a topic, by group and member."""
    route = admin.route(topic)
    masters = {data.broker_name: data.master for data in route.brokers.values() if data.master}
    groups: set[str] = set()
    for name, address in masters.items():
        command = rpc.QUERY_TOPIC_CONSUME_BY_WHO.request(topic=calls.on_wire(topic), bname=name)
        groups.update(bodies.group_list(calls.request(address, command).body))
    return [reader for group in sorted(groups) for reader in _readers_of_group(calls, route, group, masters)]


def groups(calls: RpcClient, admin: BaseAdmin) -> list[str]:
    """All consumer groups that brokers know, by the user's names, without RocketMQ's own and those of other namespaces."""
    group_names: set[str] = set()
    for name, data in require_brokers(admin.cluster()).items():
        if address := data.replica("hint"):  # a slave has the groups of its master
            answer = calls.request(address, rpc.GET_ALL_SUBSCRIPTIONGROUP_CONFIG.request(bname=name))
            group_names |= bodies.subscription_groups(answer.body).keys()
    return sorted(
        calls.scope.plain(group) for group in group_names if is_user_group(group) and calls.scope.contains(group)
    )


def _readers_of_group(
    calls: RpcClient, route: TopicRoute, group: str, masters: Mapping[str, str]
) -> Iterator[GroupReader]:
    plain, inside = calls.scope.plain(group), calls.scope.holds(group)
    members = _members(calls, group, masters)
    for member, address in sorted(members.items()):
        yield GroupReader(plain, member, _queues_of_member(calls, route.topic, (group, member), address), inside)
    if not members:
        progress = consume_progress(calls, route, group)
        yield GroupReader(plain, None, tuple(sorted(q for q, at in progress.items() if at.consumer_offset > 0)), inside)


def _members(calls: RpcClient, group: str, masters: Mapping[str, str]) -> dict[str, str]:
    """The address of a broker that each member is connected to."""
    broker_of_member: dict[str, str] = {}
    for address in masters.values():
        command = rpc.GET_CONSUMER_LIST_BY_GROUP.request(consumerGroup=group)
        try:
            broker_of_member |= dict.fromkeys(bodies.consumer_ids(calls.request(address, command).body), address)
        except BrokerError:  # so a broker says that it knows no member
            continue
    return broker_of_member


def member_subscriptions(calls: RpcClient, admin: BaseAdmin, group: str) -> dict[str, dict[str, Filter] | None]:
    """What each member of a group wants of each topic, by the user's names; None of one that did not say."""
    subscriptions: dict[str, dict[str, Filter] | None] = {}
    on_wire = calls.on_wire(group)
    masters = {name: data.master for name, data in admin.cluster().items() if data.master}
    for member, address in sorted(_members(calls, on_wire, masters).items()):
        command = rpc.GET_CONSUMER_RUNNING_INFO.request(consumerGroup=on_wire, clientId=member, jstackEnable=False)
        try:
            filters = bodies.member_filters(calls.request(address, command).body)
        except (BrokerError, CallTimeout, ConnectionLost, RemoteProtocolError) as e:
            _log_unknown_member(e, member)
            subscriptions[member] = None
        else:
            plain = {calls.scope.plain(topic): f for topic, f in filters.items() if calls.scope.reaches(topic)}
            subscriptions[member] = {topic: f for topic, f in plain.items() if not topic.startswith(RETRY_PREFIX)}
    return subscriptions


def _queues_of_member(
    calls: RpcClient, topic: str, group_and_member: tuple[str, str], address: str
) -> tuple[MessageQueue, ...] | None:
    group, member = group_and_member
    command = rpc.GET_CONSUMER_RUNNING_INFO.request(consumerGroup=group, clientId=member, jstackEnable=False)
    try:
        queues = bodies.held_queues(calls.request(address, command).body)
    except (BrokerError, CallTimeout, ConnectionLost, RemoteProtocolError) as e:
        _log_unknown_member(e, member)
        return None
    on_wire = calls.on_wire(topic)
    return tuple(queue._replace(topic=topic) for queue in queues if queue.topic == on_wire)


def _log_unknown_member(error: RocketMQError, member: str) -> None:
    logger.info("cannot determine what member %s reads: %s", member, error)
