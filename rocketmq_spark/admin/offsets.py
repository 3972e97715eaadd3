"""The offsets that brokers keep of a consumer group: which there would be, and setting them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from rocketmq_spark.admin.positions import near_groups
from rocketmq_spark.admin.tools import AdminTools, deadline
from rocketmq_spark.base.codes import RETRY_PREFIX
from rocketmq_spark.errors import GroupNotFound, OffsetError
from rocketmq_spark.model import MessageQueue, QueueBounds
from rocketmq_spark.model.admin import GROUP, OffsetChange
from rocketmq_spark.options.parsing import EARLIEST, LATEST
from rocketmq_spark.queues.environment import Environment

# ``earliest``, ``latest``, a time in ms since 1970, or an offset for each queue (-2 the first, -1 the end).
Wanted = str | int | Mapping[MessageQueue, int]


def changes(
    tools: AdminTools,
    group: str,
    topics: Sequence[str],
    wanted: Wanted,
    environment: Environment | None = None,
    named: str = "to",
) -> list[OffsetChange]:
    """What setting a group's offsets would change. Without ``topics`` in all in which it has offsets, but for retries.

    ``named`` is what errors call ``wanted``. Raises ``OffsetError`` for offsets that a queue does not have.
    """
    if isinstance(wanted, Mapping):
        mentioned = sorted({queue.topic for queue in wanted})
        if topics and (others := [topic for topic in mentioned if topic not in topics]):
            raise OffsetError(
                f"{named} names {', '.join(others)}, which --topic leaves out", remedy="Leave --topic out"
            )
        topics = mentioned
    elif not topics:
        topics = [topic for topic in tools.admin.consumed_topics(group) if not topic.startswith(RETRY_PREFIX)]
    if not topics:
        hint = near_groups(tools, group)
        raise OffsetError(
            f"group {group} has no offsets", remedy=f"{hint} Name what it is to read with --topic".lstrip()
        )
    queues = [queue for topic in topics for queue in tools.routes.existing(topic, 0.0).readable()]
    queues = environment.owned(queues) if environment is not None else queues
    before = tools.brokers.committed(group, queues, deadline(tools))
    bounds = tools.brokers.bounds(queues, deadline(tools))
    after = _resolved(tools, wanted, bounds, named)
    return [OffsetChange(queue, before[queue], after[queue]) for queue in sorted(after)]


def _resolved(
    tools: AdminTools, wanted: Wanted, bounds: Mapping[MessageQueue, QueueBounds], named: str
) -> dict[MessageQueue, int]:
    if isinstance(wanted, int):
        times = dict.fromkeys(bounds, wanted)
        answered = tools.brokers.search_offsets(times, deadline(tools), group=GROUP)
        return {queue: bounds[queue].clamp(offset) for queue, offset in answered.items()}
    if isinstance(wanted, str):
        if wanted not in ("earliest", "latest"):
            raise OffsetError(f"{named} is {wanted!r}; expected earliest, latest, a time in ms, or offsets by queue")
        return {queue: b.min_offset if wanted == "earliest" else b.max_offset for queue, b in bounds.items()}
    unknown = sorted(wanted.keys() - bounds.keys())
    if unknown:
        raise OffsetError(f"{named} names queues that there are not: {', '.join(map(str, unknown[:10]))}")
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


def check_members(group: str, online: Sequence[str]) -> None:
    """Raises ``OffsetError`` if a group has members, whose own offsets would overwrite what is set."""
    if online:
        raise OffsetError(
            f"group {group} has {len(online)} members, which would overwrite what is set: {', '.join(online[:3])}",
            remedy="Stop them first, or use --force",
        )


def store(tools: AdminTools, group: str, offsets: Mapping[MessageQueue, int]) -> None:
    """Set them, and read them back: what a broker did not take is an error that names the queue."""
    failed = tools.committer.commit_each(group, offsets, deadline(tools))
    if lack := sorted({queue.broker_name for queue, error in failed.items() if isinstance(error, GroupNotFound)}):
        tools.committer.create_group(group, lack)  # one that is to begin somewhere
        failed = tools.committer.commit_each(group, offsets, deadline(tools))
    if failed:
        queue, error = next(iter(failed.items()))
        raise OffsetError(
            f"{len(failed)} of {len(offsets)} offsets of group {group} were not set, of {queue} among them",
            error.addr,
            error.broker_code,
            remark=error.message if not error.remark else error.remark,
            remedy="The others are set. Look at that broker, and say it again",
        ) from error
    stored = tools.brokers.committed(group, sorted(offsets), deadline(tools))
    other = sorted(queue for queue, at in offsets.items() if stored[queue] != at)
    if other:
        raise OffsetError(
            f"the offset of {other[0]} was set to {offsets[other[0]]} and is {stored[other[0]]}",
            remedy="Another process commits offsets of the group: stop its members and queries",
        )
