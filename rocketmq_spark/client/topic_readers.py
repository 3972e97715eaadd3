"""The consumer groups of a topic or a cluster, their members, and what each member reads."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from rocketmq_spark.base.codes import RETRY_PREFIX
from rocketmq_spark.client.admin import BaseAdmin, consume_progress
from rocketmq_spark.client.routes import require_brokers
from rocketmq_spark.client.rpc import RpcClient
from rocketmq_spark.errors import BrokerError, CallTimeout, ConnectionLost, RemoteProtocolError, RocketMQError
from rocketmq_spark.model import Filter, MessageQueue, TopicRoute
from rocketmq_spark.wire import bodies, rpc
from rocketmq_spark.wire.names import is_user_group

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class GroupReader:
    """A member of a group, and its queues of the topic; ``queues`` is None if the member did not report them.

    For a group without members, ``member`` is None, and ``queues`` are the queues for which the group has offsets.
    ``is_in_scope`` says whether the group belongs to the client's namespace and environment.
    """

    group: str
    member: str | None
    queues: tuple[MessageQueue, ...] | None
    is_in_scope: bool = True


def readers(rpc_client: RpcClient, admin: BaseAdmin, topic: str) -> list[GroupReader]:
    """Return all readers of a topic, sorted by group and member."""
    route = admin.route(topic)
    masters = {data.broker_name: data.master for data in route.brokers.values() if data.master}
    groups: set[str] = set()
    for name, address in masters.items():
        command = rpc.QUERY_TOPIC_CONSUME_BY_WHO.request(topic=rpc_client.name_on_wire(topic), bname=name)
        groups.update(bodies.group_list(rpc_client.request(address, command).body))
    return [reader for group in sorted(groups) for reader in _readers_of_group(rpc_client, route, group, masters)]


def groups(rpc_client: RpcClient, admin: BaseAdmin) -> list[str]:
    """Return the consumer groups of all brokers, as users name them. Omits internal groups, and groups of other namespaces."""
    group_names: set[str] = set()
    for name, data in require_brokers(admin.cluster()).items():
        if address := data.replica("hint"):  # a slave replicates the groups of its master
            answer = rpc_client.request(address, rpc.GET_ALL_SUBSCRIPTIONGROUP_CONFIG.request(bname=name))
            group_names |= bodies.subscription_groups(answer.body).keys()
    return sorted(
        rpc_client.scope.user_name(group)
        for group in group_names
        if is_user_group(group) and rpc_client.scope.contains(group)
    )


def _readers_of_group(
    rpc_client: RpcClient, route: TopicRoute, group: str, masters: Mapping[str, str]
) -> Iterator[GroupReader]:
    user_group, is_in_scope = rpc_client.scope.user_name(group), rpc_client.scope.has_affixes(group)
    members = _members(rpc_client, group, masters)
    for member, address in sorted(members.items()):
        yield GroupReader(
            user_group, member, _queues_of_member(rpc_client, route.topic, (group, member), address), is_in_scope
        )
    if not members:
        progress = consume_progress(rpc_client, route, group)
        yield GroupReader(
            user_group,
            None,
            tuple(sorted(q for q, queue_progress in progress.items() if queue_progress.consumer_offset > 0)),
            is_in_scope,
        )


def _members(rpc_client: RpcClient, group: str, masters: Mapping[str, str]) -> dict[str, str]:
    """Return the members of a group, each with the address of a broker that it is connected to."""
    address_of_member: dict[str, str] = {}
    for address in masters.values():
        command = rpc.GET_CONSUMER_LIST_BY_GROUP.request(consumerGroup=group)
        try:
            address_of_member |= dict.fromkeys(bodies.consumer_ids(rpc_client.request(address, command).body), address)
        except BrokerError:  # a broker without members of the group answers with an error
            continue
    return address_of_member


def member_subscriptions(rpc_client: RpcClient, admin: BaseAdmin, group: str) -> dict[str, dict[str, Filter] | None]:
    """Return the filters of each member of a group by topic, with topics as users name them; None for a member that did not
    report its subscriptions.
    """
    subscriptions: dict[str, dict[str, Filter] | None] = {}
    name_on_wire = rpc_client.name_on_wire(group)
    masters = {name: data.master for name, data in admin.cluster().items() if data.master}
    for member, address in sorted(_members(rpc_client, name_on_wire, masters).items()):
        command = rpc.GET_CONSUMER_RUNNING_INFO.request(consumerGroup=name_on_wire, clientId=member, jstackEnable=False)
        try:
            filters = bodies.member_filters(rpc_client.request(address, command).body)
        except (BrokerError, CallTimeout, ConnectionLost, RemoteProtocolError) as e:
            _log_unknown_member(e, member)
            subscriptions[member] = None
        else:
            user_filters = {
                rpc_client.scope.user_name(topic): f
                for topic, f in filters.items()
                if rpc_client.scope.is_reversible(topic)
            }
            subscriptions[member] = {
                topic: f for topic, f in user_filters.items() if not topic.startswith(RETRY_PREFIX)
            }
    return subscriptions


def _queues_of_member(
    rpc_client: RpcClient, topic: str, group_and_member: tuple[str, str], address: str
) -> tuple[MessageQueue, ...] | None:
    group, member = group_and_member
    command = rpc.GET_CONSUMER_RUNNING_INFO.request(consumerGroup=group, clientId=member, jstackEnable=False)
    try:
        queues = bodies.owned_queues(rpc_client.request(address, command).body)
    except (BrokerError, CallTimeout, ConnectionLost, RemoteProtocolError) as e:
        _log_unknown_member(e, member)
        return None
    name_on_wire = rpc_client.name_on_wire(topic)
    return tuple(queue._replace(topic=topic) for queue in queues if queue.topic == name_on_wire)


def _log_unknown_member(error: RocketMQError, member: str) -> None:
    logger.info("cannot determine what member %s reads: %s", member, error)
