"""``rocketmq-spark group`` and ``offsets``: consumer groups, the offsets that brokers keep of them, and setting those.

Their lag is watched by ``lag``.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import click

from rocketmq_spark.base.logs import escaped
from rocketmq_spark.cli.command import TIMES, CliGroup, SendingCommand, confirm, start_or_time, with_yes
from rocketmq_spark.cli.connection import Target, connected
from rocketmq_spark.cli.output import Output

if TYPE_CHECKING:
    from rocketmq_spark.model import MessageQueue, QueueBounds
    from rocketmq_spark.model.admin import GroupDescription


_QUEUES = {
    "topic": "TOPIC",
    "brokerName": "BROKER",
    "queueId": "QUEUE",
    "offset": "OFFSET",
    "maxOffset": "END",
    "lag": "LAG",
}


@click.group(cls=CliGroup)
def group() -> None:
    """List, describe and delete consumer groups."""


@group.command("list")
@connected
@click.pass_obj
def list_groups(output: Output, target: Target) -> None:
    """List the consumer groups that brokers know, one per line."""
    from rocketmq_spark.admin import groups

    names = groups.names(target.client())
    for name in names:
        output.item({"group": name}, name)
    if not names:
        output.note("There are no consumer groups")


@group.command()
@click.argument("name")
@connected
@click.pass_obj
def describe(output: Output, target: Target, name: str) -> None:
    """Show the members, subscriptions and lag of a consumer group.

    Members that consume over gRPC are not shown: only their Proxy knows them.

    --json prints one object: group, members, consumeType, messageModel, subscriptions, settings (of each broker), lag, behindMs
    and queues.
    """
    from rocketmq_spark.admin import groups
    from rocketmq_spark.cli.lag import own_group

    client = target.client()
    there = groups.describe(client, own_group(target, name))
    if output.machine:
        output.item(_document(there), "")
    else:
        _show(output, there)
    if not there.queues:
        groups.require_masters(client)


def _show(output: Output, there: GroupDescription) -> None:
    from rocketmq_spark.admin import groups

    kind = f", {there.consume_type}, {there.message_model}" if there.members else ""
    click.echo(escaped(f"Group {there.group}: {len(there.members)} members{kind}"))
    output.rows(
        {"clientId": "MEMBER", "address": "ADDRESS", "language": "LANGUAGE", "version": "VERSION"}, _members(there)
    )
    output.rows({"topic": "SUBSCRIBES TO", "expression": "FILTER", "kind": "KIND"}, _subscriptions(there))
    output.rows(_QUEUES, _queues(there))
    known = sum(row.lag is not None for row in there.queues)
    part = f"{known} of " if 0 < known < len(there.queues) else ""
    output.note(groups.GRPC_MEMBERS_HINT)
    output.note(f"lag: {'-' if there.lag is None else there.lag} in {part}{len(there.queues)} queues")


def _document(there: GroupDescription) -> dict[str, object]:
    from rocketmq_spark.model.admin import total

    every = total(there.queues, time.time_ns() // 1_000_000)
    return {
        "group": there.group,
        "members": _members(there),
        "consumeType": there.consume_type,
        "messageModel": there.message_model,
        "subscriptions": _subscriptions(there),
        "settings": {broker: dict(settings) for broker, settings in there.settings.items()},
        "lag": every.lag,
        "behindMs": every.behind_ms,
        "queues": _queues(there),
    }


def _members(there: GroupDescription) -> list[dict[str, object]]:
    return [
        {"clientId": m.client_id, "address": m.address, "language": m.language, "version": m.version}
        for m in there.members
    ]


def _subscriptions(there: GroupDescription) -> list[dict[str, object]]:
    return [
        {"topic": topic, "expression": wanted.expression, "kind": wanted.kind}
        for topic, wanted in there.filters.items()
    ]


def _queues(there: GroupDescription) -> list[dict[str, object]]:
    return [
        {
            "topic": row.queue.topic,
            "brokerName": row.queue.broker_name,
            "queueId": row.queue.queue_id,
            "offset": row.position,
            "maxOffset": row.max_offset,
            "lag": row.lag,
        }
        for row in there.queues
    ]


@group.command()
@click.argument("name")
@click.option("--topics", is_flag=True, help="Also delete its retry topics and dead-letter topic, with their messages.")
@click.option("--force", is_flag=True, help="Delete it although it has members.")
@click.option("--yes", is_flag=True, help="Do not ask for confirmation.")
@connected
@click.pass_obj
def delete(output: Output, /, target: Target, name: str, topics: bool, force: bool, yes: bool) -> None:
    """Delete the settings and the offsets of a consumer group. Stop its members first.

    It fails while the group has members. Brokers do not know members that consume over gRPC: these do not prevent the
    deletion, and may get all messages again.
    """
    from rocketmq_spark.admin import groups
    from rocketmq_spark.cli.lag import own_group

    client, own = target.client(), own_group(target, name)
    groups.check_deletable(client, own, force)
    lost = " and the topics of its retries and dead letters, with their messages" if topics else ""
    confirm(f"Delete group {own}, its offsets{lost}", yes)
    groups.delete(client, own, topics, force)
    output.item({"group": own, "deleted": True}, f"Group {own} is deleted")


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


def _to(ctx: click.Context, param: click.Parameter, value: str) -> Wanted:
    from rocketmq_spark.options.parsing import queue_offsets

    try:
        return queue_offsets(value) if value.lstrip().startswith("{") else start_or_time(value)
    except ValueError as e:
        raise click.BadParameter(
            f'{value!r} is not {e}, and JSON such as {{"orders":{{"broker-a":{{"0":17}}}}}}'
        ) from e


def _kafkas(ctx: click.Context, param: click.Parameter, value: str | None) -> None:
    """Options of Kafka's tool are not ours."""
    if value is not None:
        raise click.UsageError(
            "--by-duration, --shift-by and --to-datetime are options of Kafka's tool. Here --to takes them all: "
            '1h (one hour ago), a time, or offsets as JSON ({"orders":{"broker-a":{"0":17}}}; see offsets show)'
        )


@click.group(cls=CliGroup)
def offsets() -> None:
    """Show or reset the committed offsets of consumer groups. For Spark queries, use 'checkpoint' instead."""


@offsets.command()
@click.argument("group")
@click.option("--topic", "topics", multiple=True, help="Only this topic (may be repeated).")
@connected
@click.pass_obj
def show(output: Output, target: Target, group: str, topics: tuple[str, ...]) -> None:
    """Show the committed offset of GROUP in each queue: the next offset to read, or '-' (JSON: null) if there is none."""
    from rocketmq_spark.admin import groups
    from rocketmq_spark.cli.lag import own_group

    client, own = target.client(), own_group(target, group)
    found = groups.committed_offsets(client, own, topics)
    bounds, errors = groups.bounds_of(client, found)
    output.rows(_SHOWN, [{**_queue(q), **_bounds(bounds.get(q)), "offset": at} for q, at in sorted(found.items())])
    members = groups.members(client, own, found)
    at_brokers = groups.lists_all_members(client, found)
    where = "" if at_brokers else " at this Proxy, which does not see members at brokers"
    output.note(
        f"{len(members)} members{where}: {', '.join(members)}" if members else f"The group has no member now{where}"
    )
    if at_brokers:
        output.note(groups.GRPC_MEMBERS_HINT)
    if errors:
        raise errors[0]


@offsets.command("set", cls=SendingCommand)
@click.argument("group")
@click.option(
    "--topic",
    "topics",
    multiple=True,
    help="Only this topic (may be repeated) [default: all topics for which the group has offsets, except its retry topic].",
)
@click.option(
    "--to",
    "wanted",
    required=True,
    callback=_to,
    metavar="WHERE",
    help=f"earliest, latest, a time ({TIMES}), or JSON as for startingOffsets. Queues that JSON omits keep their offsets.",
)
@click.option("--by-duration", "--shift-by", "--to-datetime", hidden=True, expose_value=False, callback=_kafkas)
@with_yes
@click.option(
    "--force",
    is_flag=True,
    help="Set the offsets although the group has members, which will soon overwrite them with their own.",
)
@connected
@click.pass_obj
def set_offsets(
    output: Output, /, target: Target, group: str, topics: tuple[str, ...], wanted: Wanted, **how: bool
) -> None:
    """Reset GROUP's committed offsets. Stop its members first.

    It fails while the group has members. Brokers do not know members that consume over gRPC: these do not prevent it, and
    continue at the new offsets.

    With --environment, only the offsets of the environment's queues are reset.
    """
    from rocketmq_spark.admin import groups
    from rocketmq_spark.cli.lag import own_group
    from rocketmq_spark.queues.environment import environment_of

    client, own = target.client(), own_group(target, group)
    changes = groups.offset_changes(client, own, topics, wanted, environment_of(target.options()), "--to")
    members = groups.members(client, own, [change.queue for change in changes])
    if not how["force"] and how["really"]:
        groups.check_members(own, members)
    new = all(change.before is None for change in changes)
    # Before offsets are stored, which creates the group.
    hint = groups.similar_groups_hint(client, own) if new else ""
    if how["really"]:
        groups.store_offsets(client, own, {change.queue: change.after for change in changes})
        groups.warn_of_unseen_members(client, own, [change.queue for change in changes])
    output.rows(
        _CHANGED,
        [
            {**_queue(c.queue), "offset": c.before, "new": c.after, "effect": c.effect, "applied": how["really"]}
            for c in changes
        ],
    )
    if hint:
        output.note(f"No broker {'had' if how['really'] else 'has'} group {own}. {hint}")
    moved = sum(change.before != change.after for change in changes)
    output.note(
        f"{moved} of {len(changes)} offsets {'are set' if how['really'] else 'would be set: use --yes to apply'}"
    )
    if groups.lists_all_members(client, [change.queue for change in changes]):
        output.note(f"{groups.GRPC_MEMBERS_HINT}. They continue at the new offsets")
    if members:
        output.note(
            f"The group has {len(members)} members, whose own offsets overwrite these: {', '.join(members[:3])}"
        )


def _queue(queue: MessageQueue) -> dict[str, object]:
    return {"topic": queue.topic, "brokerName": queue.broker_name, "queueId": queue.queue_id}


def _bounds(bounds: QueueBounds | None) -> dict[str, object]:
    return {
        "minOffset": bounds.min_offset if bounds else None,
        "maxOffset": bounds.max_offset if bounds else None,
    }
