"""Which consumers read a topic: what brokers know of its groups, and what their members say of themselves."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from rocketmq_spark.client.admin import Admin
from rocketmq_spark.client.calls import Calls
from rocketmq_spark.codes import RETRY_PREFIX
from rocketmq_spark.errors import BrokerError, CallTimeout, ConnectionLost, RemoteProtocolError, RocketMQError
from rocketmq_spark.model import Filter, MessageQueue
from rocketmq_spark.wire import bodies, rpc
from rocketmq_spark.wire.names import is_user_group

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class GroupReader:
    """A member of a group and the queues of the topic that it has; None where it did not say.

    A group without members is a reader without ``member``: it has the queues in which it has an offset. ``inside`` says
    whether the group is of the client's own namespace and environment.
    """

    group: str
    member: str | None
    queues: tuple[MessageQueue, ...] | None
    inside: bool = True


def readers(calls: Calls, admin: Admin, topic: str) -> list[GroupReader]:
    """All of a topic, by group and member."""
    masters = {data.broker_name: data.master for data in admin.route(topic).brokers.values() if data.master}
    groups: set[str] = set()
    for name, address in masters.items():
        command = rpc.QUERY_TOPIC_CONSUME_BY_WHO.request(topic=calls.on_wire(topic), bname=name)
        groups.update(bodies.group_list(calls.ask(address, command).body))
    return [reader for group in sorted(groups) for reader in _of_group(calls, admin, topic, group, masters)]


def groups(calls: Calls, admin: Admin) -> list[str]:
    """All consumer groups that brokers know, by the user's names, without RocketMQ's own and those of other namespaces."""
    found: set[str] = set()
    for name, data in admin.cluster().items():
        if data.master:
            answer = calls.ask(data.master, rpc.GET_ALL_SUBSCRIPTIONGROUP_CONFIG.request(bname=name))
            found |= bodies.subscription_groups(answer.body).keys()
    return sorted(calls.scope.plain(group) for group in found if is_user_group(group) and calls.scope.holds(group))


def _of_group(calls: Calls, admin: Admin, topic: str, group: str, masters: Mapping[str, str]) -> Iterator[GroupReader]:
    plain, inside = calls.scope.plain(group), calls.scope.holds(group)
    members = _members(calls, group, masters)
    for member, address in sorted(members.items()):
        yield GroupReader(plain, member, _held(calls, topic, (group, member), address), inside)
    if not members:
        progress = admin.consume_stats(plain, topic)
        yield GroupReader(plain, None, tuple(sorted(q for q, at in progress.items() if at.consumer_offset > 0)), inside)


def _members(calls: Calls, group: str, masters: Mapping[str, str]) -> dict[str, str]:
    """The address of a broker that each member is connected to."""
    found: dict[str, str] = {}
    for address in masters.values():
        command = rpc.GET_CONSUMER_LIST_BY_GROUP.request(consumerGroup=group)
        try:
            found |= dict.fromkeys(bodies.consumer_ids(calls.ask(address, command).body), address)
        except BrokerError:  # so a broker says that it knows no member
            continue
    return found


def wanted(calls: Calls, admin: Admin, group: str) -> dict[str, dict[str, Filter] | None]:
    """What each member of a group wants of each topic, by the user's names; None of one that did not say."""
    found: dict[str, dict[str, Filter] | None] = {}
    on_wire = calls.on_wire(group)
    masters = {name: data.master for name, data in admin.cluster().items() if data.master}
    for member, address in sorted(_members(calls, on_wire, masters).items()):
        command = rpc.GET_CONSUMER_RUNNING_INFO.request(consumerGroup=on_wire, clientId=member, jstackEnable=False)
        try:
            told = bodies.member_filters(calls.ask(address, command).body)
        except (BrokerError, CallTimeout, ConnectionLost, RemoteProtocolError) as e:
            _told(e, member)
            found[member] = None
        else:
            plain = {calls.scope.plain(topic): f for topic, f in told.items() if calls.scope.reaches(topic)}
            found[member] = {topic: f for topic, f in plain.items() if not topic.startswith(RETRY_PREFIX)}
    return found


def _held(calls: Calls, topic: str, who: tuple[str, str], address: str) -> tuple[MessageQueue, ...] | None:
    group, member = who
    command = rpc.GET_CONSUMER_RUNNING_INFO.request(consumerGroup=group, clientId=member, jstackEnable=False)
    try:
        held = bodies.held_queues(calls.ask(address, command).body)
    except (BrokerError, CallTimeout, ConnectionLost, RemoteProtocolError) as e:
        _told(e, member)
        return None
    on_wire = calls.on_wire(topic)
    return tuple(queue._replace(topic=topic) for queue in held if queue.topic == on_wire)


def _told(error: RocketMQError, member: str) -> None:
    logger.info("what member %s reads is not known: %s", member, error)
