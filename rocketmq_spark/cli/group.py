"""``rocketmq-spark group``: consumer groups. Their offsets are set by ``offsets``, their lag is watched by ``lag``."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import click

from rocketmq_spark.cli.command import CliGroup, confirm
from rocketmq_spark.cli.connection import Target, connected
from rocketmq_spark.cli.output import Output

if TYPE_CHECKING:
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

    --json prints one object: group, members, consumeType, messageModel, subscriptions, settings (of each broker), lag, behindMs
    and queues.
    """
    from rocketmq_spark.admin import groups
    from rocketmq_spark.cli.positions import own_group

    there = groups.describe(target.client(), own_group(target, name))
    if output.machine:
        output.item(_document(there), "")
        return
    kind = f", {there.consume_type}, {there.message_model}" if there.members else ""
    click.echo(f"Group {there.group}: {len(there.members)} members{kind}")
    output.rows(
        {"clientId": "MEMBER", "address": "ADDRESS", "language": "LANGUAGE", "version": "VERSION"}, _members(there)
    )
    output.rows({"topic": "SUBSCRIBES TO", "expression": "FILTER", "kind": "KIND"}, _subscriptions(there))
    output.rows(_QUEUES, _queues(there))
    output.note(f"lag: {'-' if there.lag is None else there.lag} in {len(there.queues)} queues")


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
@click.option(
    "--topics", is_flag=True, help="Also delete the topics of its retries and dead letters, with their messages."
)
@click.option("--force", is_flag=True, help="Delete it although it has members.")
@click.option("--yes", is_flag=True, help="Do not ask for confirmation.")
@connected
@click.pass_obj
def delete(output: Output, /, target: Target, name: str, topics: bool, force: bool, yes: bool) -> None:
    """Delete the settings and the offsets of a consumer group. Stop its members first."""
    from rocketmq_spark.admin import groups
    from rocketmq_spark.cli.positions import own_group

    client, own = target.client(), own_group(target, name)
    groups.check_deletable(client, own, force)
    lost = " and the topics of its retries and dead letters, with their messages" if topics else ""
    confirm(f"Delete group {own}, its offsets{lost}", yes)
    groups.delete(client, own, topics, force)
    output.item({"group": own, "deleted": True}, f"Group {own} is deleted")
