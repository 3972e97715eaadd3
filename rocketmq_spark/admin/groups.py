"""Administration of consumer groups: list, describe and delete groups, compute their lag, and set their offsets."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from rocketmq_spark.admin import AdminTools, deadline, request_each, with_kept_minimums
from rocketmq_spark.base import arguments
from rocketmq_spark.base.arguments import similar_names
from rocketmq_spark.base.codes import DLQ_PREFIX, RETRY_PREFIX, Response
from rocketmq_spark.client import topic_readers
from rocketmq_spark.client.routes import masters_of, require_brokers
from rocketmq_spark.client.rpc import with_proxy_remedy
from rocketmq_spark.errors import (
    AccessDenied,
    GroupNotFound,
    NotReadable,
    NotSupported,
    OffsetError,
    OptionError,
    RocketMQError,
    RouteNotFound,
)
from rocketmq_spark.model import MessageQueue, QueueBounds
from rocketmq_spark.model.admin import GROUP, GroupDescription, GroupOnline, OffsetChange, QueueLag
from rocketmq_spark.options.parsing import EARLIEST, LATEST
from rocketmq_spark.queues.environment import Environment
from rocketmq_spark.wire import bodies, rpc
from rocketmq_spark.wire.names import group_problem, is_user_group

logger = logging.getLogger(__name__)

Positions = dict[MessageQueue, int | None]


@dataclass(frozen=True, slots=True)
class QueuePositions:
    """Bounds, position and lag of queues at one moment, and the errors of brokers that did not answer."""

    rows: list[QueueLag]
    errors: list[RocketMQError] = field(default_factory=list)


def committed_offsets(tools: AdminTools, group: str, topics: Sequence[str]) -> Positions:
    """Return the committed offsets of a group by queue; None for queues without an offset. Includes all queues of
    ``topics``, or without ``topics``, all queues of the topics in which the group has offsets.

    Raises ``OffsetError`` if the group has no offset.
    """
    positions: Positions = {}
    for topic in topics or _consumed_topics(tools, group):
        # The route is not taken from the cache, because the number of queues may change.
        queues = tools.routes.get_existing(topic, 0.0).stored_queues()
        positions |= tools.offset_reader.committed(group, queues, deadline(tools))
    if all(position is None for position in positions.values()):
        require_masters(tools)
        where_text = f" in {', '.join(topics)}" if topics else ""
        remedy = " ".join(filter(None, [similar_groups_hint(tools, group), new_group_remedy(group, topics)]))
        raise OffsetError(f"group {group} has no offsets{where_text}", remedy=remedy)
    return positions


def require_masters(tools: AdminTools) -> None:
    """Raise ``BrokerNotFound`` if a master is not registered. In many versions of RocketMQ, slaves do not have the offsets of
    groups, so without the master it is unknown whether a group has offsets.
    """
    try:
        masters_of(tools.admin.cluster())
    except NotSupported:  # a Proxy needs no check: if it does not reach a broker's master, requests for the broker fail
        return


def _consumed_topics(tools: AdminTools, group: str) -> list[str]:
    with with_proxy_remedy("Name the topics: topics= of the method, --topic of the command"):
        return tools.admin.consumed_topics(group)


def new_group_remedy(group: str, topics: Sequence[str] = ()) -> str:
    """Return the remedy for a group that has no offsets."""
    return (
        "A new group starts where option 'consumeFromWhere' says, by default at the end. To start it elsewhere: "
        f"rocketmq-spark offsets set {group} --topic {topics[0] if topics else 'TOPIC'} --to earliest --yes"
    )


def similar_groups_hint(tools: AdminTools, group: str) -> str:
    """Return a hint with similar group names. The hint is empty if brokers know the group, or if there is no similar name."""
    try:
        existing_groups = topic_readers.groups(tools.rpc_client, tools.admin)
    except RocketMQError:  # the hint is optional
        return ""
    similar_groups = similar_names(group, existing_groups, 3, 0.6) if group not in existing_groups else []
    return f"Did you mean {', '.join(similar_groups)}?" if similar_groups else ""


def queue_lags(
    tools: AdminTools, positions: Mapping[MessageQueue, int | None], new_queues: Collection[MessageQueue] = ()
) -> QueuePositions:
    """Return bounds and lag of these queues, and the store time of the next message of each queue.

    For a queue in ``new_queues`` without a position, the next message is the first message of the queue.
    """
    bounds, errors = bounds_of(tools, positions)
    request_deadline = deadline(tools)
    rows = []
    unavailable_brokers: set[str] = set()  # brokers that did not answer; they get no further requests
    for queue in sorted(positions):
        if queue not in bounds:
            rows.append(QueueLag(queue, None, positions[queue], None))
            continue
        queue_bounds, position = bounds[queue], positions[queue]
        if position is None and queue in new_queues:
            position = queue_bounds.min_offset
        row = QueueLag(queue, queue_bounds.min_offset, position, queue_bounds.max_offset)
        if row.lag and row.next_offset is not None and queue.broker_name not in unavailable_brokers:
            try:
                stored_ms = tools.offset_reader.store_time_ms(GROUP, queue, row.next_offset, request_deadline)
                row = row._replace(next_stored_ms=stored_ms)
            except NotReadable:  # the topic has no read permission; the row lacks only the store time
                pass
            except RocketMQError as e:
                errors.append(e)
                unavailable_brokers.add(queue.broker_name)
        rows.append(row)
    return QueuePositions(rows, errors)


def bounds_of(
    tools: AdminTools, positions: Mapping[MessageQueue, int | None]
) -> tuple[dict[MessageQueue, QueueBounds], list[RocketMQError]]:
    """Return the bounds of queues, and errors: for brokers that do not answer, and for topics without a route.

    In a compaction topic, the returned minimum of a queue is never above the position, so messages that compaction has removed
    do not count as lost.
    """
    errors: list[RocketMQError] = []
    topics_with_route = set()
    for topic in sorted({queue.topic for queue in positions}):
        try:
            tools.routes.get_existing(topic)
            topics_with_route.add(topic)
        except RouteNotFound as e:
            errors.append(e)
    queues = sorted(queue for queue in positions if queue.topic in topics_with_route)

    def on_error(error: RocketMQError, queue: MessageQueue) -> None:
        errors.append(error)

    bounds = tools.offset_reader.bounds(queues, deadline(tools), on_error)
    return with_kept_minimums(tools, bounds, positions, on_error), errors


# A target is ``earliest`` or -2, ``latest`` or -1, a time in ms since 1970, or an offset for each queue. Among the offsets, -2
# means the first offset, and -1 means the end.
OffsetTarget = str | int | Mapping[MessageQueue, int]


def offset_changes(
    tools: AdminTools,
    group: str,
    topics: Sequence[str],
    target: OffsetTarget,
    environment: Environment | None = None,
    argument_name: str = "to",
) -> list[OffsetChange]:
    """Return the changes that setting a group's offsets to ``target`` would make. Changes nothing.

    Without ``topics``, the changes are in all topics in which the group has offsets, except retry topics. ``argument_name`` is
    the name of ``target`` in errors. Raises ``OffsetError`` for offsets that a queue does not have.
    """
    if problem := group_problem(group):
        raise OptionError(problem)
    target = _checked_target(target, argument_name)
    if isinstance(target, Mapping):
        topics_of_target = sorted({queue.topic for queue in target})
        if topics and (other_topics := [topic for topic in topics_of_target if topic not in topics]):
            raise OffsetError(
                f"{argument_name} names {', '.join(other_topics)}, which --topic excludes", remedy="Omit --topic"
            )
        topics = topics_of_target
    elif not topics:
        topics = [topic for topic in _consumed_topics(tools, group) if not topic.startswith(RETRY_PREFIX)]
    if not topics:
        require_masters(tools)
        hint = similar_groups_hint(tools, group)
        raise OffsetError(f"group {group} has no offsets", remedy=f"{hint} Name the topics with --topic".lstrip())
    queues = [queue for topic in topics for queue in tools.routes.get_existing(topic, 0.0).stored_queues()]
    queues = environment.owned(queues) if environment is not None else queues
    current_offsets = tools.offset_reader.committed(group, queues, deadline(tools))
    bounds = tools.offset_reader.bounds(queues, deadline(tools))
    bounds = bounds if target == "latest" else with_kept_minimums(tools, bounds)
    target_offsets = _target_offsets(tools, target, bounds, argument_name)
    return [OffsetChange(queue, current_offsets[queue], target_offsets[queue]) for queue in sorted(target_offsets)]


_SPECIAL_OFFSETS = {EARLIEST: "earliest", LATEST: "latest"}


def _checked_target(target: object, argument_name: str) -> OffsetTarget:
    """Return ``target``; -2 becomes ``earliest``, and -1 becomes ``latest``.

    Raises ``OptionError`` for a wrong type, and ``OffsetError`` for a wrong value.
    """
    expected_text = "earliest (or -2), latest (or -1), a time in ms since 1970, or offsets by queue"
    if isinstance(target, Mapping):
        for queue, offset in target.items():
            arguments.check_instance(f"a queue of {argument_name}", queue, MessageQueue, "a MessageQueue")
            if not arguments.is_integer(offset):
                raise arguments.argument_error(
                    f"{argument_name} of {queue}",
                    offset,
                    "an offset (a whole number), -2 for the first one, or -1 for the end",
                )
        return target
    if arguments.is_integer(target):
        number: int = int(target)  # type: ignore[call-overload]
        if number >= 0 or number in _SPECIAL_OFFSETS:
            return _SPECIAL_OFFSETS.get(number, number)
    elif not isinstance(target, str):
        raise arguments.argument_error(argument_name, target, expected_text)
    elif target in _SPECIAL_OFFSETS.values():
        return target
    raise OffsetError(f"{argument_name} is {arguments.short_repr(target)}; expected {expected_text}")


def _target_offsets(
    tools: AdminTools, target: OffsetTarget, bounds: Mapping[MessageQueue, QueueBounds], argument_name: str
) -> dict[MessageQueue, int]:
    if isinstance(target, int):
        times_ms = dict.fromkeys(bounds, target)
        offsets_at_time = tools.offset_reader.search_offsets(times_ms, deadline(tools), group=GROUP)
        return {queue: bounds[queue].clamp(offset) for queue, offset in offsets_at_time.items()}
    if isinstance(target, str):
        return {queue: b.min_offset if target == "earliest" else b.max_offset for queue, b in bounds.items()}
    unknown_queues = sorted(target.keys() - bounds.keys())
    if unknown_queues:
        raise OffsetError(f"{argument_name} names queues that do not exist: {', '.join(map(str, unknown_queues[:10]))}")
    offsets = {
        q: {EARLIEST: bounds[q].min_offset, LATEST: bounds[q].max_offset}.get(offset, offset)
        for q, offset in target.items()
    }
    invalid_queues = [q for q, offset in offsets.items() if bounds[q].clamp(offset) != offset]
    if invalid_queues:
        queue, queue_bounds = invalid_queues[0], bounds[invalid_queues[0]]
        raise OffsetError(
            f"{argument_name}: {queue} is {offsets[queue]}, but the queue has {queue_bounds.min_offset} to "
            f"{queue_bounds.max_offset}",
            topic=queue.topic,
            remedy="Give an offset in this range, -2 for the first offset, or -1 for the end",
        )
    return offsets


def members(tools: AdminTools, group: str, queues: Iterable[MessageQueue]) -> list[str]:
    """Return the ids of the members of the group, as the brokers of these queues report them."""
    member_ids: set[str] = set()
    for broker in sorted({queue.broker_name for queue in queues}):
        member_ids.update(tools.committer.members(group, broker, deadline(tools)))
    return sorted(member_ids)


def check_members(group: str, online_members: Sequence[str], consequence: str = "overwrite these offsets") -> None:
    """Raise ``OffsetError`` if there are ``online_members``. In the error, ``consequence`` says what these members would do."""
    if online_members:
        raise OffsetError(
            f"group {group} has {len(online_members)} members, which would {consequence}: {', '.join(online_members[:3])}",
            remedy="Stop them first, or use --force",
        )


def store_offsets(tools: AdminTools, group: str, offsets: Mapping[MessageQueue, int]) -> None:
    """Commit offsets and read them back. Raises ``OffsetError`` with the queue if a broker did not store an offset."""
    errors = tools.committer.commit_each(group, offsets, deadline(tools))
    if new_offsets := {queue: offsets[queue] for queue, error in errors.items() if isinstance(error, GroupNotFound)}:
        tools.committer.create_group(group, new_offsets)  # a new group
        errors = tools.committer.commit_each(group, offsets, deadline(tools))
    if errors:
        queue, error = next(iter(errors.items()))
        if isinstance(error, AccessDenied):
            raise error
        remedy_start = "The other offsets are set. " if len(errors) < len(offsets) else ""
        raise OffsetError(
            f"{len(errors)} of {len(offsets)} offsets of group {group} were not set, for example the offset of {queue}",
            error.addr,
            error.broker_code,
            remark=error.message if not error.remark else error.remark,
            remedy=f"{remedy_start}Check that broker, and try again",
        ) from error
    stored_offsets = tools.offset_reader.committed(group, sorted(offsets), deadline(tools))
    unstored_queues = sorted(queue for queue, offset in offsets.items() if stored_offsets[queue] != offset)
    if unstored_queues:
        raise OffsetError(
            f"the offset of {unstored_queues[0]} was set to {offsets[unstored_queues[0]]} and is "
            f"{stored_offsets[unstored_queues[0]]}",
            remedy="Another process commits offsets of the group: stop the group's members and queries",
        )


GRPC_MEMBERS_HINT = "Members that consume over gRPC are not listed, because only their Proxy knows them"


def lists_all_members(tools: AdminTools, queues: Iterable[MessageQueue]) -> bool:
    """Whether ``members`` returns all members of a group that do not use gRPC. False at a Proxy, which does not see the members
    that are connected to brokers.
    """
    return all(map(tools.committer.lists_all_members, {queue.broker_name for queue in queues}))


def warn_of_unseen_members(tools: AdminTools, group: str, queues: Iterable[MessageQueue]) -> None:
    """Warn if a Proxy stored offsets of these queues, because members that the Proxy does not see may overwrite the offsets."""
    if not lists_all_members(tools, queues):
        logger.warning(
            "the offsets of group %s were set through a Proxy, which does not see members that are connected to brokers: such "
            "members overwrite these offsets, so stop them first",
            group,
        )


def names(tools: AdminTools) -> list[str]:
    """Return all groups that brokers know, sorted, without RocketMQ's own groups."""
    return topic_readers.groups(tools.rpc_client, tools.admin)


def describe(tools: AdminTools, group: str) -> GroupDescription:
    """Return a group's settings, members and lag. Raises ``GroupNotFound``, with similar names, if no broker knows the group."""
    addresses = _group_brokers(tools)
    settings, online_groups = (
        _group_settings(tools, group, addresses),
        _online_members(tools, group, addresses),
    )
    topics = _topics_with_offsets(tools, group, bool(settings or online_groups))
    lags = queue_lags(tools, committed_offsets(tools, group, topics)) if topics else QueuePositions([])
    # A user may lack the permission to read messages and their store times. If only the store times cannot be read, return
    # everything else.
    errors = [
        e for e in lags.errors if not isinstance(e, AccessDenied) or any(row.max_offset is None for row in lags.rows)
    ]
    if errors:
        raise errors[0]
    scope = tools.rpc_client.scope
    members = {member.client_id: member for online_group in online_groups for member in online_group.members}
    filters = {
        scope.user_name(topic): topic_filter
        for online_group in online_groups
        for topic, topic_filter in online_group.filters.items()
        if scope.is_reversible(topic)
    }
    return GroupDescription(
        group,
        settings,
        [member for _, member in sorted(members.items())],
        online_groups[0].consume_type if online_groups else None,
        online_groups[0].message_model if online_groups else None,
        {topic: topic_filter for topic, topic_filter in sorted(filters.items()) if not topic.startswith(RETRY_PREFIX)},
        lags.rows,
    )


def _group_settings(tools: AdminTools, group: str, addresses: Mapping[str, str]) -> dict[str, Mapping[str, object]]:
    """Return the settings of the group, by broker. Brokers without the group are missing."""
    rpc_row = rpc.GET_ALL_SUBSCRIPTIONGROUP_CONFIG
    requests = {name: (address, rpc_row.request(bname=name)) for name, address in addresses.items()}
    name_on_wire = tools.rpc_client.name_on_wire(group)
    groups_by_broker = {
        name: bodies.subscription_groups(a.body) for name, a in request_each(tools, requests, (Response.SUCCESS,))
    }
    return {
        name: all_groups[name_on_wire] for name, all_groups in groups_by_broker.items() if name_on_wire in all_groups
    }


def _online_members(tools: AdminTools, group: str, addresses: Mapping[str, str]) -> list[GroupOnline]:
    """Return the members of the group on each broker. Brokers without members are missing."""
    rpc_row, name_on_wire = rpc.GET_CONSUMER_CONNECTION_LIST, tools.rpc_client.name_on_wire(group)
    requests = {
        name: (address, rpc_row.request(consumerGroup=name_on_wire, bname=name)) for name, address in addresses.items()
    }
    answers = request_each(tools, requests, (Response.SUCCESS, Response.CONSUMER_NOT_ONLINE))
    return [bodies.group_online(a.body) for _, a in answers if a.code == Response.SUCCESS]


def _topics_with_offsets(tools: AdminTools, group: str, is_known_group: bool) -> list[str]:
    """Return the topics in which the group has offsets. Raises ``GroupNotFound`` if there are no such topics, unless
    ``is_known_group`` says that the group exists.
    """
    topics = tools.admin.consumed_topics(group)
    if not topics and not is_known_group:
        require_masters(tools)
        raise GroupNotFound(f"no broker has group {group}", remedy=similar_groups_hint(tools, group) or None)
    return topics


def delete(tools: AdminTools, group: str, topics: bool = False, force: bool = False) -> None:
    """Delete a group and its offsets on all masters. With ``topics``, also delete the group's retry and dead-letter topics.

    Raises ``GroupNotFound`` if no broker knows the group. Without ``force``, raises ``OffsetError`` if the group has members.
    Mirrors Java's ``DeleteSubscriptionGroupCommand -r true``. With ``-c``, the Java command always deletes the retry and
    dead-letter topics, too.
    """
    check_deletable(tools, group, force)
    # The topics are deleted before the group, because the group's offsets are needed to find the topics.
    for topic in _retry_and_dead_letter_topics(tools, group) if topics else ():
        try:
            tools.admin.delete_topic(topic)
        except RouteNotFound:
            continue
    # ``removeOffset`` is the name of ``cleanOffset`` before RocketMQ 5.0.
    rpc_row, name_on_wire = rpc.DELETE_SUBSCRIPTIONGROUP, tools.rpc_client.name_on_wire(group)
    requests = {
        name: (address, rpc_row.request(groupName=name_on_wire, cleanOffset=True, removeOffset=True, bname=name))
        for name, address in masters_of(tools.admin.cluster()).items()
    }
    for _ in request_each(tools, requests, (Response.SUCCESS,), is_change=True):
        pass


def _retry_and_dead_letter_topics(tools: AdminTools, group: str) -> list[str]:
    """Return the names of retry and dead-letter topics that a group may have.

    A group that pops has a retry topic for each of its topics, named as by ``KeyBuilder.buildPopRetryTopic``. A name that is also
    the retry topic of another group is omitted.
    """
    retry_topic, name_on_wire = RETRY_PREFIX + group, tools.rpc_client.name_on_wire
    topics = [topic for topic in tools.admin.consumed_topics(group) if not topic.startswith(RETRY_PREFIX)]
    pop_retry_topics = {
        name_on_wire(retry_topic) + separator + name_on_wire(topic) for topic in topics for separator in "+_"
    }
    retry_topics_of_others = (
        {name_on_wire(RETRY_PREFIX + other) for other in names(tools)} if pop_retry_topics else set()
    )
    return [retry_topic, DLQ_PREFIX + group, *sorted(pop_retry_topics - retry_topics_of_others)]


def check_deletable(tools: AdminTools, group: str, force: bool = False) -> None:
    """Raise the errors that ``delete`` would raise, but delete nothing. Also raises ``BrokerNotFound`` if a master is not
    registered, because the group would stay on this master.
    """
    if not is_user_group(tools.rpc_client.name_on_wire(group)):
        raise OptionError(f"group {group} is RocketMQ's own, and RocketMQ needs its offsets; nothing was deleted")
    masters = masters_of(tools.admin.cluster())
    online_groups = _online_members(tools, group, masters)
    _topics_with_offsets(tools, group, bool(online_groups or _group_settings(tools, group, masters)))
    if not force:
        check_members(
            group,
            sorted({member.client_id for online_group in online_groups for member in online_group.members}),
            "create the group again",
        )


def _group_brokers(tools: AdminTools) -> dict[str, str]:
    """Return the addresses of brokers that know groups, by broker name: the master, or a slave if the master is not registered. A
    slave has the groups and heartbeats of its master.
    """
    return {
        name: address
        for name, data in sorted(require_brokers(tools.admin.cluster()).items())
        if (address := data.replica("hint"))
    }
