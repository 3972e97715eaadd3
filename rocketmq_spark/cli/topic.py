"""``rocketmq-spark topic``: administration of topics. The cluster must permit it."""

from __future__ import annotations

import sys
from typing import Any

import click

from rocketmq_spark.cli.command import Group
from rocketmq_spark.cli.connection import Target, connected, pairs
from rocketmq_spark.cli.output import Output, moment


@click.group(cls=Group)
def topic() -> None:
    """Create, list, describe and delete topics."""


@topic.command()
@click.argument("name")
@click.option("--queues", type=click.IntRange(1), default=8, show_default=True, help="Queues on each broker.")
@click.option("--broker", "brokers", multiple=True, help="Only on this broker (may be repeated; default: all).")
@click.option("--attribute", multiple=True, callback=pairs, metavar="NAME=VALUE", help="Such as message.type=FIFO.")
@click.option(
    "--batch", is_flag=True, help="A batch topic: it stores batches whole, which is quicker (docs/batch-topics.md)."
)
@connected
@click.pass_obj
def create(output: Output, /, target: Target, name: str, queues: int, brokers: tuple[str, ...], **kind: Any) -> None:
    """Create a topic, or change how many queues it has. What kind it is stays as it is."""
    from rocketmq_spark.client.admin import batch_attributes

    attributes = batch_attributes(kind["attribute"]) if kind["batch"] else kind["attribute"]
    route = target.client().admin.create_topic(name, queues, brokers or None, attributes=attributes)
    where = sorted(data.broker_name for data in route.queues)
    total = sum(data.write_queues for data in route.queues)
    output.item(
        {"topic": name, "brokers": where, "queues": total},
        f"Topic {name} has {total} queues on {', '.join(where)}",
    )


@topic.command("list")
@click.option("--all", "everything", is_flag=True, help="RocketMQ's own topics, too.")
@connected
@click.pass_obj
def list_topics(output: Output, target: Target, everything: bool) -> None:
    """The topics of a cluster, one a line."""
    from rocketmq_spark.wire.names import is_user_topic

    admin = target.client().admin
    cluster = admin.cluster()
    own = {*cluster, *(data.cluster for data in cluster.values())}
    names = [name for name in admin.topics() if everything or is_user_topic(name, own)]
    for name in names:
        output.item({"topic": name}, name)
    if not names:
        output.note("There are no topics. Create one with: rocketmq-spark topic create NAME")


@topic.command()
@click.argument("name")
@connected
@click.pass_obj
def describe(output: Output, target: Target, name: str) -> None:
    """Offsets and age of each queue of a topic."""
    admin = target.client().admin
    admin.routes.existing(name, 0.0)
    bounds = admin.describe_topic(name)
    rows = [
        {
            "topic": name,
            "brokerName": queue.broker_name,
            "queueId": queue.queue_id,
            "minOffset": b.min_offset,
            "maxOffset": b.max_offset,
            "messages": b.max_offset - b.min_offset,
            "lastUpdate": moment(b.last_update_ms),
        }
        for queue, b in bounds.items()
    ]
    headings = {
        "brokerName": "BROKER",
        "queueId": "QUEUE",
        "minOffset": "FIRST",
        "maxOffset": "END",
        "messages": "MESSAGES",
        "lastUpdate": "LAST MESSAGE",
    }
    output.rows(headings, rows)
    total = sum(b.max_offset - b.min_offset for b in bounds.values())
    output.note(f"{total} messages in {len(rows)} queues")


@topic.command()
@click.argument("name")
@click.option("--yes", is_flag=True, help="Do not ask.")
@connected
@click.pass_obj
def delete(output: Output, target: Target, name: str, yes: bool) -> None:
    """Delete a topic with all its messages."""
    admin = target.client().admin
    admin.routes.existing(name, 0.0)
    if not yes:
        if not sys.stdin.isatty():
            raise click.UsageError("There is no terminal to ask on: give --yes")
        click.confirm(f"Delete topic {name} with all its messages?", abort=True, err=True)
    admin.delete_topic(name)
    output.item({"topic": name, "deleted": True}, f"Topic {name} is deleted")
