"""Consumer groups: list, describe, delete; their offsets beside the bounds of queues; setting their offsets."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from rocketmq_spark.admin import AdminTools, ask_each, deadline, with_kept
from rocketmq_spark.base import arguments
from rocketmq_spark.base.arguments import nearest
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
    """The state of queues at one moment, and the errors of brokers that did not answer."""

    rows: list[QueueLag]
    errors: list[RocketMQError] = field(default_factory=list)


def of_group(tools: AdminTools, group: str, topics: Sequence[str]) -> Positions:
    """The group's offsets in all queues of the topics in which it has any; None for queues without one.

    Raises ``OffsetError`` if the group has no offset.
    """
    found: Positions = {}
    for topic in topics or _consumed_topics(tools, group):
        queues = tools.routes.get_existing(topic, 0.0).kept()  # the number of queues may have changed
        found |= tools.brokers.committed(group, queues, deadline(tools))
    if all(position is None for position in found.values()):
        check_masters(tools)
        where = f" in {', '.join(topics)}" if topics else ""
        remedy = " ".join(filter(None, [near_groups(tools, group), new_group(group, topics)]))
        raise OffsetError(f"group {group} has no offsets{where}", remedy=remedy)
    return found


def check_masters(tools: AdminTools) -> None:
    """Raises ``BrokerNotFound`` if a master is away: in many versions of RocketMQ, slaves do not have the offsets, so it is
    unknown whether the group has any.
    """
    try:
        masters_of(tools.admin.cluster())
    except NotSupported:  # from a Proxy, which answers requests for a broker only if it reaches the broker's master
        return


def _consumed_topics(tools: AdminTools, group: str) -> list[str]:
    with with_proxy_remedy("Name the topics: topics= of the method, --topic of the command"):
        return tools.admin.consumed_topics(group)


def new_group(group: str, topics: Sequence[str] = ()) -> str:
    """The remedy for a group that has no offsets."""
    return (
        "A new group starts where option 'consumeFromWhere' says, by default at the end. To start it elsewhere: "
        f"rocketmq-spark offsets set {group} --topic {topics[0] if topics else 'TOPIC'} --to earliest --yes"
    )


def near_groups(tools: AdminTools, group: str) -> str:
    """A hint with similar group names; empty if brokers know the group, or no similar one."""
    try:
        known = topic_readers.groups(tools.calls, tools.admin)
    except RocketMQError:  # without the hint, the error is still complete
        return ""
    near = nearest(group, known, 3, 0.6) if group not in known else []
    return f"Did you mean {', '.join(near)}?" if near else ""


def look_at(
    tools: AdminTools, positions: Mapping[MessageQueue, int | None], new: Collection[MessageQueue] = ()
) -> QueuePositions:
    """Return the bounds of these queues, and the store time of the next message of each.

    Of a queue in ``new`` without a position, the next message is the first one.
    """
    bounds, errors = bounds_of(tools, positions)
    within = deadline(tools)
    rows = []
    silent: set[str] = set()  # brokers that did not answer: they get no further requests
    for queue in sorted(positions):
        if queue not in bounds:
            rows.append(QueueLag(queue, None, positions[queue], None))
            continue
        bound, position = bounds[queue], positions[queue]
        if position is None and queue in new:
            position = bound.min_offset
        row = QueueLag(queue, bound.min_offset, position, bound.max_offset)
        if row.lag and row.next_offset is not None and queue.broker_name not in silent:
            try:
                stored_ms = tools.brokers.store_time_ms(GROUP, queue, row.next_offset, within)
                row = row._replace(next_stored_ms=stored_ms)
            except NotReadable:  # the topic is not readable now; only this time is missing
                pass
            except RocketMQError as e:
                errors.append(e)
                silent.add(queue.broker_name)
        rows.append(row)
    return QueuePositions(rows, errors)


def bounds_of(
    tools: AdminTools, positions: Mapping[MessageQueue, int | None]
) -> tuple[dict[MessageQueue, QueueBounds], list[RocketMQError]]:
    """Bounds of queues, and the errors of brokers that do not answer and of topics without a broker.

    The minimum of a compaction topic is at most the reader's position, because compaction is not a loss of unread messages.
    """
    errors: list[RocketMQError] = []
    routed = set()
    for topic in sorted({queue.topic for queue in positions}):
        try:
            tools.routes.get_existing(topic)
            routed.add(topic)
        except RouteNotFound as e:
            errors.append(e)
    asked = sorted(queue for queue in positions if queue.topic in routed)

    def note(error: RocketMQError, queue: MessageQueue) -> None:
        errors.append(error)

    bounds = tools.brokers.bounds(asked, deadline(tools), note)
    return with_kept(tools, bounds, positions, note), errors


# ``earliest`` or -2, ``latest`` or -1, a time in ms since 1970, or an offset for each queue (-2 the first, -1 the end).
Wanted = str | int | Mapping[MessageQueue, int]


def offset_changes(
    tools: AdminTools,
    group: str,
    topics: Sequence[str],
    wanted: Wanted,
    environment: Environment | None = None,
    named: str = "to",
) -> list[OffsetChange]:
    """The changes that setting a group's offsets would make. Without ``topics``, in all topics with offsets, except retry topics.

    ``named`` is the name of ``wanted`` in errors. Raises ``OffsetError`` for offsets that a queue does not have.
    """
    if problem := group_problem(group):
        raise OptionError(problem)
    wanted = _checked(wanted, named)
    if isinstance(wanted, Mapping):
        mentioned = sorted({queue.topic for queue in wanted})
        if topics and (others := [topic for topic in mentioned if topic not in topics]):
            raise OffsetError(f"{named} names {', '.join(others)}, which --topic excludes", remedy="Omit --topic")
        topics = mentioned
    elif not topics:
        topics = [topic for topic in _consumed_topics(tools, group) if not topic.startswith(RETRY_PREFIX)]
    if not topics:
        check_masters(tools)
        hint = near_groups(tools, group)
        raise OffsetError(
            f"group {group} has no offsets", remedy=f"{hint} Name what it is to read with --topic".lstrip()
        )
    queues = [queue for topic in topics for queue in tools.routes.get_existing(topic, 0.0).kept()]
    queues = environment.owned(queues) if environment is not None else queues
    before = tools.brokers.committed(group, queues, deadline(tools))
    bounds = tools.brokers.bounds(queues, deadline(tools))
    bounds = bounds if wanted == "latest" else with_kept(tools, bounds)
    after = _resolved(tools, wanted, bounds, named)
    return [OffsetChange(queue, before[queue], after[queue]) for queue in sorted(after)]


_MARKS = {EARLIEST: "earliest", LATEST: "latest"}


def _checked(wanted: object, named: str) -> Wanted:
    """Return ``wanted``, with -2 as ``earliest`` and -1 as ``latest``.

    Raises ``OptionError`` for a wrong type, and ``OffsetError`` for a wrong value.
    """
    expected = "earliest (or -2), latest (or -1), a time in ms since 1970, or offsets by queue"
    if isinstance(wanted, Mapping):
        for queue, offset in wanted.items():
            arguments.instance(f"a queue of {named}", queue, MessageQueue, "a MessageQueue")
            if not arguments.is_whole(offset):
                raise arguments.wrong(
                    f"{named} of {queue}", offset, "an offset (a whole number), -2 for the first one, or -1 for the end"
                )
        return wanted
    if arguments.is_whole(wanted):
        number: int = int(wanted)  # type: ignore[call-overload]
        if number >= 0 or number in _MARKS:
            return _MARKS.get(number, number)
    elif not isinstance(wanted, str):
        raise arguments.wrong(named, wanted, expected)
    elif wanted in _MARKS.values():
        return wanted
    raise OffsetError(f"{named} is {arguments.shown(wanted)}; expected {expected}")


def _resolved(
    tools: AdminTools, wanted: Wanted, bounds: Mapping[MessageQueue, QueueBounds], named: str
) -> dict[MessageQueue, int]:
    if isinstance(wanted, int):
        times = dict.fromkeys(bounds, wanted)
        answered = tools.brokers.search_offsets(times, deadline(tools), group=GROUP)
        return {queue: bounds[queue].clamp(offset) for queue, offset in answered.items()}
    if isinstance(wanted, str):
        return {queue: b.min_offset if wanted == "earliest" else b.max_offset for queue, b in bounds.items()}
    unknown = sorted(wanted.keys() - bounds.keys())
    if unknown:
        raise OffsetError(f"{named} names queues that do not exist: {', '.join(map(str, unknown[:10]))}")
    marked = {q: {EARLIEST: bounds[q].min_offset, LATEST: bounds[q].max_offset}.get(at, at) for q, at in wanted.items()}
    wrong = [q for q, at in marked.items() if bounds[q].clamp(at) != at]
    if wrong:
        first, bound = wrong[0], bounds[wrong[0]]
        raise OffsetError(
            f"{named}: {first} is {marked[first]}, but the queue has {bound.min_offset} to {bound.max_offset}",
            topic=first.topic,
            remedy="Give an offset in between; -2 is the first, -1 the end",
        )
    return marked


def members(tools: AdminTools, group: str, queues: Iterable[MessageQueue]) -> list[str]:
    """Ids of the group's members, as the brokers of these queues know them."""
    found: set[str] = set()
    for broker in sorted({queue.broker_name for queue in queues}):
        found.update(tools.committer.members(group, broker, deadline(tools)))
    return sorted(found)


def check_members(group: str, online: Sequence[str], would: str = "overwrite what is set") -> None:
    """Raises ``OffsetError`` if a group has members, whose own offsets would overwrite what is set."""
    if online:
        raise OffsetError(
            f"group {group} has {len(online)} members, which would {would}: {', '.join(online[:3])}",
            remedy="Stop them first, or use --force",
        )


def store_offsets(tools: AdminTools, group: str, offsets: Mapping[MessageQueue, int]) -> None:
    """Set offsets and read them back. An offset that a broker did not store is an error that names the queue."""
    failed = tools.committer.commit_each(group, offsets, deadline(tools))
    if unknown := {queue: offsets[queue] for queue, error in failed.items() if isinstance(error, GroupNotFound)}:
        tools.committer.create_group(group, unknown)  # a new group
        failed = tools.committer.commit_each(group, offsets, deadline(tools))
    if failed:
        queue, error = next(iter(failed.items()))
        if isinstance(error, AccessDenied):
            raise error
        others = "The others are set. " if len(failed) < len(offsets) else ""
        raise OffsetError(
            f"{len(failed)} of {len(offsets)} offsets of group {group} were not set, of {queue} among them",
            error.addr,
            error.broker_code,
            remark=error.message if not error.remark else error.remark,
            remedy=f"{others}Check that broker, and try again",
        ) from error
    stored = tools.brokers.committed(group, sorted(offsets), deadline(tools))
    other = sorted(queue for queue, at in offsets.items() if stored[queue] != at)
    if other:
        raise OffsetError(
            f"the offset of {other[0]} was set to {offsets[other[0]]} and is {stored[other[0]]}",
            remedy="Another process commits offsets of the group: stop its members and queries",
        )


UNSEEN = "Members that consume over gRPC are not listed: only their Proxy knows them"


def knows_members(tools: AdminTools, queues: Iterable[MessageQueue]) -> bool:
    """Whether ``members`` returns all members of a group except those over gRPC. A Proxy does not see members at brokers."""
    return all(map(tools.committer.knows_members, {queue.broker_name for queue in queues}))


def warn_of_unseen(tools: AdminTools, group: str, queues: Iterable[MessageQueue]) -> None:
    """Warn if a Proxy stored offsets of these queues, because members that it does not see may overwrite them."""
    if not knows_members(tools, queues):
        logger.warning(
            "the offsets of group %s were set through a Proxy, which does not see members that are connected to brokers: such "
            "members overwrite these offsets, so stop them first",
            group,
        )


def names(tools: AdminTools) -> list[str]:
    """All groups that brokers know, sorted, without RocketMQ's own."""
    return topic_readers.groups(tools.calls, tools.admin)


def describe(tools: AdminTools, group: str) -> GroupDescription:
    """A group's settings, members and lag. Raises ``GroupNotFound``, with the nearest names, if no broker knows it."""
    masters = _asked(tools)
    settings, online = _settings(tools, group, masters), _online(tools, group, masters)
    topics = _consumed(tools, group, bool(settings or online))
    look = look_at(tools, of_group(tools, group, topics)) if topics else QueuePositions([])
    # The ages of messages need more rights; without these, the rest is still described.
    half = [
        e for e in look.errors if not isinstance(e, AccessDenied) or any(row.max_offset is None for row in look.rows)
    ]
    if half:
        raise half[0]
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
    """Topics in which the group has offsets. Raises ``GroupNotFound`` if it has none and is not ``known``."""
    topics = tools.admin.consumed_topics(group)
    if not topics and not known:
        check_masters(tools)
        raise GroupNotFound(f"no broker has group {group}", remedy=near_groups(tools, group) or None)
    return topics


def delete(tools: AdminTools, group: str, topics: bool = False, force: bool = False) -> None:
    """Delete a group and its offsets on all masters; with ``topics`` its retry and dead-letter topics, too.

    Raises ``GroupNotFound`` if no broker knows it and, without ``force``, ``OffsetError`` if it has members.
    Mirrors ``DeleteSubscriptionGroupCommand``, which with ``-c`` always deletes the topics, and offsets with ``-r true``.
    """
    check_deletable(tools, group, force)
    # First, because after the deletion of the group its topics cannot be found.
    for topic in _own_topics(tools, group) if topics else ():
        try:
            tools.admin.delete_topic(topic)
        except RouteNotFound:
            continue
    # Brokers before 5.0 use the other name for the same field.
    row, on_wire = rpc.DELETE_SUBSCRIPTIONGROUP, tools.calls.on_wire(group)
    asked = {
        name: (address, row.request(groupName=on_wire, cleanOffset=True, removeOffset=True, bname=name))
        for name, address in masters_of(tools.admin.cluster()).items()
    }
    for _ in ask_each(tools, asked, (Response.SUCCESS,), change=True):
        pass


def _own_topics(tools: AdminTools, group: str) -> list[str]:
    """Topics of retries and dead letters that a group may have.

    A group that pops has a retry topic for each of its topics, named as ``KeyBuilder.buildPopRetryTopic`` does. Another group's
    retries may have that name, too, and stay.
    """
    own, on_wire = RETRY_PREFIX + group, tools.calls.on_wire
    topics = [topic for topic in tools.admin.consumed_topics(group) if not topic.startswith(RETRY_PREFIX)]
    of_pops = {on_wire(own) + separator + on_wire(topic) for topic in topics for separator in "+_"}
    others = {on_wire(RETRY_PREFIX + other) for other in names(tools)} if of_pops else set()
    return [own, DLQ_PREFIX + group, *sorted(of_pops - others)]


def check_deletable(tools: AdminTools, group: str, force: bool = False) -> None:
    """Raise the errors of ``delete`` without a change. A master that is away would keep the group: ``BrokerNotFound``."""
    if not is_user_group(tools.calls.on_wire(group)):
        raise OptionError(f"group {group} is RocketMQ's own, which needs its offsets; nothing was deleted")
    masters = masters_of(tools.admin.cluster())
    online = _online(tools, group, masters)
    _consumed(tools, group, bool(online or _settings(tools, group, masters)))
    if not force:
        check_members(
            group, sorted({member.client_id for there in online for member in there.members}), "make it again"
        )


def _asked(tools: AdminTools) -> dict[str, str]:
    """The brokers to ask about groups: all masters, or the slave of one that is away, which has its groups and heartbeats."""
    return {
        name: at
        for name, data in sorted(require_brokers(tools.admin.cluster()).items())
        if (at := data.replica("hint"))
    }
