"""``rocketmq-spark group`` and ``offsets``: shows and deletes consumer groups, and shows and resets their committed offsets.

``lag`` shows how far groups are behind.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import click

from rocketmq_spark.base.logs import escaped
from rocketmq_spark.cli.command import TIMES, CliGroup, SendingCommand, confirm, start_or_time, with_yes
from rocketmq_spark.cli.connection import Target, with_connection_options
from rocketmq_spark.cli.output import Output

if TYPE_CHECKING:
    from rocketmq_spark.model import MessageQueue, QueueBounds
    from rocketmq_spark.model.admin import GroupDescription


_QUEUE_COLUMNS = {
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
@with_connection_options
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
@with_connection_options
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
    description = groups.describe(client, own_group(target, name))
    if output.is_for_programs:
        output.item(_document(description), "")
    else:
        _print_description(output, description)
    if not description.queues:
        groups.require_masters(client)


def _print_description(output: Output, description: GroupDescription) -> None:
    from rocketmq_spark.admin import groups

    kind_text = f", {description.consume_type}, {description.message_model}" if description.members else ""
    click.echo(escaped(f"Group {description.group}: {len(description.members)} members{kind_text}"))
    output.rows(
        {"clientId": "MEMBER", "address": "ADDRESS", "language": "LANGUAGE", "version": "VERSION"},
        _member_rows(description),
    )
    output.rows({"topic": "SUBSCRIBES TO", "expression": "FILTER", "kind": "KIND"}, _subscription_rows(description))
    output.rows(_QUEUE_COLUMNS, _queue_rows(description))
    known_count = sum(row.lag is not None for row in description.queues)
    counted_text = f"{known_count} of " if 0 < known_count < len(description.queues) else ""
    output.note(groups.GRPC_MEMBERS_HINT)
    output.note(
        f"lag: {'-' if description.lag is None else description.lag} in {counted_text}{len(description.queues)} queues"
    )


def _document(description: GroupDescription) -> dict[str, object]:
    from rocketmq_spark.model.admin import total

    totals = total(description.queues, time.time_ns() // 1_000_000)
    return {
        "group": description.group,
        "members": _member_rows(description),
        "consumeType": description.consume_type,
        "messageModel": description.message_model,
        "subscriptions": _subscription_rows(description),
        "settings": {broker: dict(settings) for broker, settings in description.settings.items()},
        "lag": totals.lag,
        "behindMs": totals.behind_ms,
        "queues": _queue_rows(description),
    }


def _member_rows(description: GroupDescription) -> list[dict[str, object]]:
    return [
        {"clientId": m.client_id, "address": m.address, "language": m.language, "version": m.version}
        for m in description.members
    ]


def _subscription_rows(description: GroupDescription) -> list[dict[str, object]]:
    return [
        {"topic": topic, "expression": topic_filter.expression, "kind": topic_filter.kind}
        for topic, topic_filter in description.filters.items()
    ]


def _queue_rows(description: GroupDescription) -> list[dict[str, object]]:
    return [
        {
            "topic": row.queue.topic,
            "brokerName": row.queue.broker_name,
            "queueId": row.queue.queue_id,
            "offset": row.position,
            "maxOffset": row.max_offset,
            "lag": row.lag,
        }
        for row in description.queues
    ]


@group.command()
@click.argument("name")
@click.option(
    "--topics",
    "with_topics",
    is_flag=True,
    help="Also delete its retry topics and dead-letter topic, with their messages.",
)
@click.option("--force", is_flag=True, help="Delete it although it has members.")
@click.option("--yes", is_flag=True, help="Do not ask for confirmation.")
@with_connection_options
@click.pass_obj
def delete(output: Output, /, target: Target, name: str, with_topics: bool, force: bool, yes: bool) -> None:
    """Delete the settings and the offsets of a consumer group. Stop its members first.

    The command fails while the group has members. Brokers do not know members that consume over gRPC: such members do not
    prevent the deletion, and may get all messages again.
    """
    from rocketmq_spark.admin import groups
    from rocketmq_spark.cli.lag import own_group

    client, group_in_environment = target.client(), own_group(target, name)
    groups.check_deletable(client, group_in_environment, force)
    lost_text = " and the topics of its retries and dead letters, with their messages" if with_topics else ""
    confirm(f"Delete group {group_in_environment}, its offsets{lost_text}", yes)
    groups.delete(client, group_in_environment, with_topics, force)
    output.item({"group": group_in_environment, "deleted": True}, f"Group {group_in_environment} is deleted")


_OFFSET_COLUMNS = {
    "topic": "TOPIC",
    "brokerName": "BROKER",
    "queueId": "QUEUE",
    "minOffset": "FIRST",
    "offset": "OFFSET",
    "maxOffset": "END",
}
_CHANGE_COLUMNS = {
    "topic": "TOPIC",
    "brokerName": "BROKER",
    "queueId": "QUEUE",
    "offset": "NOW",
    "new": "NEW",
    "effect": "EFFECT",
}

OffsetTarget = str | int | dict["MessageQueue", int]


def _parse_target(ctx: click.Context, param: click.Parameter, value: str) -> OffsetTarget:
    from rocketmq_spark.options.parsing import queue_offsets

    try:
        return queue_offsets(value) if value.lstrip().startswith("{") else start_or_time(value)
    except ValueError as e:
        raise click.BadParameter(
            f'{value!r} is not {e}. Offsets are JSON such as {{"orders":{{"broker-a":{{"0":17}}}}}}'
        ) from e


def _reject_kafka_option(ctx: click.Context, param: click.Parameter, value: str | None) -> None:
    """Reject options of Kafka's tool, and name the replacement."""
    if value is not None:
        raise click.UsageError(
            "--by-duration, --shift-by and --to-datetime are options of Kafka's tool. Use --to for all of these: "
            '1h (one hour ago), a time, or offsets as JSON ({"orders":{"broker-a":{"0":17}}}; see offsets show)'
        )


@click.group(cls=CliGroup)
def offsets() -> None:
    """Show or reset the committed offsets of consumer groups. For Spark queries, use 'checkpoint' instead."""


@offsets.command()
@click.argument("group")
@click.option("--topic", "topics", multiple=True, help="Only this topic (may be repeated).")
@with_connection_options
@click.pass_obj
def show(output: Output, target: Target, group: str, topics: tuple[str, ...]) -> None:
    """Show the committed offset of GROUP in each queue: the next offset to read, or '-' (JSON: null) if there is none."""
    from rocketmq_spark.admin import groups
    from rocketmq_spark.cli.lag import own_group

    client, group_in_environment = target.client(), own_group(target, group)
    offsets_by_queue = groups.committed_offsets(client, group_in_environment, topics)
    bounds, errors = groups.bounds_of(client, offsets_by_queue)
    output.rows(
        _OFFSET_COLUMNS,
        [
            {**_queue_fields(q), **_bounds_fields(bounds.get(q)), "offset": offset}
            for q, offset in sorted(offsets_by_queue.items())
        ],
    )
    members = groups.members(client, group_in_environment, offsets_by_queue)
    sees_members = groups.lists_all_members(client, offsets_by_queue)
    where_text = "" if sees_members else " at this Proxy, which does not see members at brokers"
    output.note(
        f"{len(members)} members{where_text}: {', '.join(members)}"
        if members
        else f"The group has no member now{where_text}"
    )
    if sees_members:
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
    "target_offsets",
    required=True,
    callback=_parse_target,
    metavar="WHERE",
    help=f"earliest, latest, a time ({TIMES}), or JSON as for startingOffsets. Queues that JSON omits keep their offsets.",
)
@click.option(
    "--by-duration", "--shift-by", "--to-datetime", hidden=True, expose_value=False, callback=_reject_kafka_option
)
@with_yes
@click.option(
    "--force",
    is_flag=True,
    help="Set the offsets although the group has members, which will soon overwrite them with their own.",
)
@with_connection_options
@click.pass_obj
def set_offsets(
    output: Output, /, target: Target, group: str, topics: tuple[str, ...], target_offsets: OffsetTarget, **flags: bool
) -> None:
    """Reset GROUP's committed offsets. Stop its members first.

    The command fails while the group has members. Brokers do not know members that consume over gRPC: such members do not
    prevent the reset, and continue at the new offsets.

    With --environment, only the offsets of the environment's queues are reset.
    """
    from rocketmq_spark.admin import groups
    from rocketmq_spark.cli.lag import own_group
    from rocketmq_spark.queues.environment import environment_of

    client, group_in_environment = target.client(), own_group(target, group)
    changes = groups.offset_changes(
        client, group_in_environment, topics, target_offsets, environment_of(target.options()), "--to"
    )
    members = groups.members(client, group_in_environment, [change.queue for change in changes])
    if not flags["force"] and flags["apply_change"]:
        groups.check_members(group_in_environment, members)
    is_new_group = all(change.before is None for change in changes)
    # The hint is computed before offsets are stored, because storing offsets creates the group.
    hint = groups.similar_groups_hint(client, group_in_environment) if is_new_group else ""
    if flags["apply_change"]:
        groups.store_offsets(client, group_in_environment, {change.queue: change.after for change in changes})
        groups.warn_of_unseen_members(client, group_in_environment, [change.queue for change in changes])
    output.rows(
        _CHANGE_COLUMNS,
        [
            {
                **_queue_fields(change.queue),
                "offset": change.before,
                "new": change.after,
                "effect": change.effect,
                "applied": flags["apply_change"],
            }
            for change in changes
        ],
    )
    if hint:
        output.note(f"No broker {'had' if flags['apply_change'] else 'has'} group {group_in_environment}. {hint}")
    moved_count = sum(change.before != change.after for change in changes)
    output.note(
        f"{moved_count} of {len(changes)} offsets {'are set' if flags['apply_change'] else 'would be set: use --yes to apply'}"
    )
    if groups.lists_all_members(client, [change.queue for change in changes]):
        output.note(f"{groups.GRPC_MEMBERS_HINT}. They continue at the new offsets")
    if members:
        output.note(
            f"The group has {len(members)} members, which overwrite these offsets with their own: {', '.join(members[:3])}"
        )


def _queue_fields(queue: MessageQueue) -> dict[str, object]:
    return {"topic": queue.topic, "brokerName": queue.broker_name, "queueId": queue.queue_id}


def _bounds_fields(bounds: QueueBounds | None) -> dict[str, object]:
    return {
        "minOffset": bounds.min_offset if bounds else None,
        "maxOffset": bounds.max_offset if bounds else None,
    }
