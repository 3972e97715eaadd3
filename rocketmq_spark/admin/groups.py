"""Consumer groups: list, describe, delete."""

from __future__ import annotations

from collections.abc import Mapping

from rocketmq_spark.admin import offsets, positions
from rocketmq_spark.admin.tools import AdminTools, ask_each
from rocketmq_spark.base.codes import DLQ_PREFIX, RETRY_PREFIX, Response
from rocketmq_spark.client import groups
from rocketmq_spark.client.admin import masters_of
from rocketmq_spark.errors import GroupNotFound, RouteNotFound
from rocketmq_spark.model.admin import GroupDescription, GroupOnline
from rocketmq_spark.wire import bodies, rpc


def names(tools: AdminTools) -> list[str]:
    """All groups that brokers know, sorted, without RocketMQ's own."""
    return groups.groups(tools.calls, tools.admin)


def describe(tools: AdminTools, group: str) -> GroupDescription:
    """A group's settings, members and lag. Raises ``GroupNotFound``, with the nearest names, where brokers know nothing of it."""
    masters = _asked(tools)
    settings, online = _settings(tools, group, masters), _online(tools, group, masters)
    topics = _consumed(tools, group, bool(settings or online))
    look = positions.look(tools, positions.of_group(tools, group, topics)) if topics else positions.QueuePositions([])
    if look.errors:
        raise look.errors[0]
    scope = tools.calls.scope
    members = {member.client_id: member for there in online for member in there.members}
    filters = {scope.plain(topic): f for there in online for topic, f in there.filters.items() if scope.reaches(topic)}
    return GroupDescription(
        group,
        settings,
        [member for _, member in sorted(members.items())],
        online[0].consume_type if online else None,
        online[0].message_model if online else None,
        {topic: wanted for topic, wanted in sorted(filters.items()) if not topic.startswith(RETRY_PREFIX)},
        look.rows,
    )


def _settings(tools: AdminTools, group: str, masters: Mapping[str, str]) -> dict[str, Mapping[str, object]]:
    """The group's settings on each broker that has any."""
    row = rpc.GET_ALL_SUBSCRIPTIONGROUP_CONFIG
    asked = {name: (address, row.request(bname=name)) for name, address in masters.items()}
    on_wire = tools.calls.on_wire(group)
    answers = {name: bodies.subscription_groups(a.body) for name, a in ask_each(tools, asked, (Response.SUCCESS,))}
    return {name: all_groups[on_wire] for name, all_groups in answers.items() if on_wire in all_groups}


def _online(tools: AdminTools, group: str, masters: Mapping[str, str]) -> list[GroupOnline]:
    """The group's members on each broker that has any."""
    row, on_wire = rpc.GET_CONSUMER_CONNECTION_LIST, tools.calls.on_wire(group)
    asked = {name: (address, row.request(consumerGroup=on_wire, bname=name)) for name, address in masters.items()}
    answers = ask_each(tools, asked, (Response.SUCCESS, Response.CONSUMER_NOT_ONLINE))
    return [bodies.group_online(a.body) for _, a in answers if a.code == Response.SUCCESS]


def _consumed(tools: AdminTools, group: str, known: bool) -> list[str]:
    """Topics in which the group has offsets. Raises ``GroupNotFound`` for one that has none and is not ``known`` otherwise."""
    topics = tools.admin.consumed_topics(group)
    if not topics and not known:
        raise GroupNotFound(f"brokers know no group {group}", remedy=positions.near_groups(tools, group) or None)
    return topics


def delete(tools: AdminTools, group: str, topics: bool = False, force: bool = False) -> None:
    """Delete a group and its offsets on all masters; with ``topics`` its retry and dead-letter topics, too.

    Raises ``GroupNotFound`` where brokers know nothing of it, and unless ``force`` ``OffsetError`` where it has members.
    Mirrors ``DeleteSubscriptionGroupCommand``, which always deletes the topics, and offsets with ``-r true``.
    """
    check_deletable(tools, group, force)
    # Brokers before 5.0 have the other name for the same.
    row, on_wire = rpc.DELETE_SUBSCRIPTIONGROUP, tools.calls.on_wire(group)
    asked = {
        name: (address, row.request(groupName=on_wire, cleanOffset=True, removeOffset=True, bname=name))
        for name, address in masters_of(tools.admin.cluster()).items()
    }
    for _ in ask_each(tools, asked, (Response.SUCCESS,)):
        pass
    for prefix in (RETRY_PREFIX, DLQ_PREFIX) if topics else ():
        try:
            tools.admin.delete_topic(prefix + group)
        except RouteNotFound:
            continue


def check_deletable(tools: AdminTools, group: str, force: bool = False) -> None:
    """The errors of ``delete``, without a change. A master that is away would keep the group: ``BrokerNotFound``."""
    masters = masters_of(tools.admin.cluster())
    online = _online(tools, group, masters)
    _consumed(tools, group, bool(online or _settings(tools, group, masters)))
    if not force:
        offsets.check_members(group, sorted({member.client_id for there in online for member in there.members}))


def _asked(tools: AdminTools) -> dict[str, str]:
    """Who knows of groups: all masters; where one is away its slave, which has its groups, and whose members tell it, too."""
    return {name: at for name, data in sorted(tools.admin.cluster().items()) if (at := data.replica("hint"))}
