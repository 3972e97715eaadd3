"""``rocketmq-spark offsets``: the offsets that brokers keep of a consumer group, and setting them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import click

from rocketmq_spark.cli.command import CliGroup, SendingCommand
from rocketmq_spark.cli.connection import GROUP, Target, connected
from rocketmq_spark.cli.output import Output
from rocketmq_spark.errors import GroupNotFound, OffsetError

if TYPE_CHECKING:
    from rocketmq_spark.model import MessageQueue, QueueBounds
    from rocketmq_spark.queues.environment import Environment
    from rocketmq_spark.session import Client

_SHOWN = {
    "topic": "TOPIC",
    "brokerName": "BROKER",
    "queueId": "QUEUE",
    "minOffset": "FIRST",
    "offset": "OFFSET",
    "maxOffset": "END",
}
_CHANGED = {
    "topic": "TOPIC",
    "brokerName": "BROKER",
    "queueId": "QUEUE",
    "offset": "NOW",
    "new": "NEW",
    "effect": "EFFECT",
}

Wanted = str | int | dict["MessageQueue", int]


@dataclass(frozen=True, slots=True)
class OffsetChange:
    """Of one queue: the group's offset now, None where it has none, and the one that it gets. What is read next is there."""

    queue: MessageQueue
    before: int | None
    after: int

    @property
    def effect(self) -> str:
        if self.before is None:
            return "begins there"
        moved = self.after - self.before
        return f"skips {moved}" if moved > 0 else f"reads {-moved} again" if moved else "stays"


def _to(ctx: click.Context, param: click.Parameter, value: str) -> Wanted:
    from rocketmq_spark.options.parsing import consume_from, offsets

    try:
        if not value.lstrip().startswith("{"):
            return consume_from(value)
        by_queue = offsets()(value)
        assert not isinstance(by_queue, str)
        return by_queue
    except ValueError as e:
        raise click.BadParameter(
            f'{value!r} is not {e}; JSON such as {{"orders":{{"broker-a":{{"0":17}}}}}} is one, too'
        ) from e


@click.group(cls=CliGroup)
def offsets() -> None:
    """Show or reset the committed offsets of consumer groups. For Spark queries, use 'checkpoint' instead."""


@offsets.command()
@click.argument("group")
@click.option("--topic", "topics", multiple=True, help="Only this topic (may be repeated).")
@connected
@click.pass_obj
def show(output: Output, target: Target, group: str, topics: tuple[str, ...]) -> None:
    """Show the committed offset of GROUP in each queue: the offset that it reads next, '-' (JSON: null) without one."""
    from rocketmq_spark.cli import positions

    client, own = target.client(), positions.own_group(target, group)
    found = positions.of_group(client, own, topics)
    bounds, errors = positions.bounds_of(client, found)
    output.rows(_SHOWN, [{**_queue(q), **_bounds(bounds.get(q)), "offset": at} for q, at in sorted(found.items())])
    members = _members(client, own, found)
    output.note(f"{len(members)} members: {', '.join(members)}" if members else "The group has no member now")
    if errors:
        raise errors[0]


@offsets.command("set", cls=SendingCommand)
@click.argument("group")
@click.option(
    "--topic",
    "topics",
    multiple=True,
    help="Only this topic (may be repeated) [default: all topics for which the group has offsets].",
)
@click.option(
    "--to",
    "wanted",
    required=True,
    callback=_to,
    metavar="WHERE",
    help="earliest, latest, a time (ISO-8601 or ms), or JSON as for startingOffsets; JSON may omit queues.",
)
@click.option("--apply", "really", is_flag=True, help="Apply the change; otherwise only preview it.")
@click.option(
    "--force", is_flag=True, help="Set them although the group has members, which soon commit their own offsets again."
)
@connected
@click.pass_obj
def set_offsets(
    output: Output, /, target: Target, group: str, topics: tuple[str, ...], wanted: Wanted, **how: bool
) -> None:
    """Reset GROUP's committed offsets. Stop its members first. With --environment, only for the queues that it owns."""
    from rocketmq_spark.cli import positions
    from rocketmq_spark.queues.environment import environment_of

    client, own = target.client(), positions.own_group(target, group)
    changes = _changes(client, own, topics, wanted, environment_of(target.options()))
    members = _members(client, own, [change.queue for change in changes])
    if members and not how["force"] and how["really"]:
        raise OffsetError(
            f"group {own} has {len(members)} members, which would overwrite what is set: {', '.join(members[:3])}",
            remedy="Stop them first, or use --force",
        )
    new = all(change.before is None for change in changes)
    hint = positions.near_groups(client, own) if new else ""  # asked before offsets are stored, which makes the group
    if how["really"]:
        _store(client, own, {change.queue: change.after for change in changes})
    output.rows(
        _CHANGED,
        [
            {**_queue(c.queue), "offset": c.before, "new": c.after, "effect": c.effect, "applied": how["really"]}
            for c in changes
        ],
    )
    if hint:
        output.note(f"Brokers {'knew' if how['really'] else 'know'} no group {own}. {hint}")
    moved = sum(change.before != change.after for change in changes)
    output.note(f"{moved} of {len(changes)} offsets {'are set' if how['really'] else 'would be set: --apply does it'}")
    if members:
        output.note(
            f"The group has {len(members)} members, whose own offsets overwrite these: {', '.join(members[:3])}"
        )


def _changes(
    client: Client, group: str, topics: Sequence[str], wanted: Wanted, environment: Environment | None
) -> list[OffsetChange]:
    from rocketmq_spark.cli import positions

    if isinstance(wanted, dict):
        named = sorted({queue.topic for queue in wanted})
        if topics and (others := [topic for topic in named if topic not in topics]):
            raise OffsetError(f"--to names {', '.join(others)}, which --topic leaves out", remedy="Leave --topic out")
        topics = named
    elif not topics:
        topics = [topic for topic in client.admin.consumed_topics(group) if not topic.startswith("%RETRY%")]
    if not topics:
        hint = positions.near_groups(client, group)
        raise OffsetError(
            f"group {group} has no offsets", remedy=f"{hint} Name what it is to read with --topic".lstrip()
        )
    queues = [queue for topic in topics for queue in client.routes.existing(topic, 0.0).readable()]
    queues = environment.owned(queues) if environment is not None else queues
    before = client.brokers.committed(group, queues, positions.deadline(client))
    bounds = client.brokers.bounds(queues, positions.deadline(client))
    after = _resolved(client, wanted, bounds)
    return [OffsetChange(queue, before[queue], after[queue]) for queue in sorted(after)]


def _resolved(client: Client, wanted: Wanted, bounds: Mapping[MessageQueue, QueueBounds]) -> dict[MessageQueue, int]:
    """The new offsets. Raises ``OffsetError`` for those that a queue does not have."""
    from rocketmq_spark.cli.positions import deadline
    from rocketmq_spark.spark.source import starting_offsets

    if isinstance(wanted, int):
        return starting_offsets.at(client.brokers, GROUP, bounds, dict.fromkeys(bounds, wanted), deadline(client))
    if isinstance(wanted, str):
        return starting_offsets.resolve(wanted, bounds, "--to")
    unknown = sorted(wanted.keys() - bounds.keys())
    if unknown:
        raise OffsetError(f"--to names queues that there are not: {starting_offsets.listed(unknown)}")
    marked = {q: {-2: bounds[q].min_offset, -1: bounds[q].max_offset}.get(at, at) for q, at in wanted.items()}
    wrong = [q for q, at in marked.items() if bounds[q].clamp(at) != at]
    if wrong:
        first, bound = wrong[0], bounds[wrong[0]]
        raise OffsetError(
            f"--to: {first} is {marked[first]}, but the queue has {bound.min_offset} to {bound.max_offset}",
            topic=first.topic,
            remedy="Give an offset in between; -2 is the first, -1 the end",
        )
    return marked


def _store(client: Client, group: str, offsets: Mapping[MessageQueue, int]) -> None:
    """Set them, and read them back: what a broker did not take is an error that names the queue."""
    from rocketmq_spark.cli.positions import deadline

    failed = client.committer.commit_each(group, offsets, deadline(client))
    if lack := sorted({queue.broker_name for queue, error in failed.items() if isinstance(error, GroupNotFound)}):
        client.committer.create_group(group, lack)  # one that is to begin somewhere
        failed = client.committer.commit_each(group, offsets, deadline(client))
    if failed:
        queue, error = next(iter(failed.items()))
        raise OffsetError(
            f"{len(failed)} of {len(offsets)} offsets of group {group} were not set, of {queue} among them",
            error.addr,
            error.broker_code,
            remark=error.message if not error.remark else error.remark,
            remedy="The others are set. Look at that broker, and say it again",
        ) from error
    stored = client.brokers.committed(group, sorted(offsets), deadline(client))
    other = sorted(queue for queue, at in offsets.items() if stored[queue] != at)
    if other:
        raise OffsetError(
            f"the offset of {other[0]} was set to {offsets[other[0]]} and is {stored[other[0]]}",
            remedy="Another process commits offsets of the group: stop its members and queries",
        )


def _members(client: Client, group: str, queues: Sequence[MessageQueue] | Mapping[MessageQueue, object]) -> list[str]:
    """Ids of the group's members."""
    from rocketmq_spark.cli.positions import deadline

    found: set[str] = set()
    for broker in sorted({queue.broker_name for queue in queues}):
        found.update(client.committer.members(group, broker, deadline(client)))
    return sorted(found)


def _queue(queue: MessageQueue) -> dict[str, object]:
    return {"topic": queue.topic, "brokerName": queue.broker_name, "queueId": queue.queue_id}


def _bounds(bounds: QueueBounds | None) -> dict[str, object]:
    return {
        "minOffset": bounds.min_offset if bounds else None,
        "maxOffset": bounds.max_offset if bounds else None,
    }
