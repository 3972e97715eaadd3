"""``rocketmq-spark topic``: administration of topics. The cluster must permit it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import click

from rocketmq_spark.cli.command import CliGroup, confirm
from rocketmq_spark.cli.connection import Target, connected, pairs
from rocketmq_spark.cli.output import Output, moment

if TYPE_CHECKING:
    from rocketmq_spark.model.admin import TopicQueues


@click.group(cls=CliGroup)
def topic() -> None:
    """Create, list, describe, widen, shrink and delete topics."""


@topic.command()
@click.argument("name")
@click.option("--queues", type=click.IntRange(1), default=8, show_default=True, help="Queues on each broker.")
@click.option("--broker", "brokers", multiple=True, help="Only on this broker (may be repeated; default: all).")
@click.option(
    "--attribute",
    multiple=True,
    callback=pairs,
    metavar="NAME=VALUE",
    help="Attribute, such as message.type=FIFO (may be repeated).",
)
@click.option(
    "--batch",
    is_flag=True,
    help="Create a batch topic, which stores batches whole and is faster (docs/batch-topics.md).",
)
@connected
@click.pass_obj
def create(output: Output, /, target: Target, name: str, queues: int, brokers: tuple[str, ...], **kind: Any) -> None:
    """Create a topic on the brokers that do not have it yet."""
    from rocketmq_spark.admin import topics

    _show(output, topics.create(target.client(), name, queues, brokers or None, kind["attribute"], kind["batch"]))


def _show(output: Output, there: TopicQueues, shrunk: bool = False) -> None:
    """How many queues the topic has now, and how many messages went out of sight."""
    where, total = sorted(there.brokers), there.write_queues
    text = f"Topic {there.topic} has {total} queues on {', '.join(where)}"
    row = {"topic": there.topic, "brokers": where, "queues": total}
    if shrunk:
        text, row = f"{text}; {there.hidden} messages are out of sight", {**row, "outOfSight": there.hidden}
    output.item(row, text)


def _resized(function: Callable[..., None]) -> Callable[..., None]:
    """What commands take that change the number of queues."""
    for add in (
        click.option("--broker", "brokers", multiple=True, help="Only on this broker (may be repeated; default: all)."),
        click.option("--queues", type=click.IntRange(1), required=True, help="Queues on each broker from now on."),
        click.argument("name"),
    ):
        function = add(function)
    return function


@topic.command()
@_resized
@connected
@click.pass_obj
def widen(output: Output, target: Target, name: str, queues: int, brokers: tuple[str, ...]) -> None:
    """Add queues to a topic.

    Messages stay in their queues. From then on, hash selectors use the new queues too, so a key may move to another queue.
    """
    from rocketmq_spark.admin import topics

    _show(output, topics.widen(target.client(), name, queues, brokers or None, "--queues"))


def _refuse_part(target: Target, name: str) -> None:
    """With an environment other commands keep to its queues. These take the messages of all of them."""
    from rocketmq_spark.errors import OptionError
    from rocketmq_spark.queues.environment import environment_of

    options = target.options()
    if environment_of(options) is not None:
        raise OptionError(
            f"topic {name} is shared by environments, and {options.environment_source} names one of them: this would take the "
            "messages of all",
            remedy="To do that leave the environment out; one with topics of its own has environmentMode=suffix",
        )


@topic.command()
@_resized
@click.option("--yes", is_flag=True, help="Do not ask for confirmation.")
@connected
@click.pass_obj
def shrink(output: Output, target: Target, name: str, queues: int, brokers: tuple[str, ...], yes: bool) -> None:
    """Remove queues from a topic: those with the highest ids.

    The messages of the removed queues cannot be read until you add the queues again. The command first shows how many there are.
    """
    from rocketmq_spark.admin import topics

    _refuse_part(target, name)
    client, only = target.client(), brokers or None
    now = topics.shrink(client, name, queues, only, preview=True, named="--queues")
    gone = sum(data.read_queues - queues for data in now.brokers.values())
    confirm(f"Take {gone} queues away from topic {name}: {now.hidden} messages go out of sight", yes)
    _show(output, topics.shrink(client, name, queues, only, named="--queues"), shrunk=True)


@topic.command("list")
@click.option("--all", "everything", is_flag=True, help="Include RocketMQ's own topics.")
@connected
@click.pass_obj
def list_topics(output: Output, target: Target, everything: bool) -> None:
    """List the topics of a cluster, one per line."""
    from rocketmq_spark.admin import topics

    names = topics.names(target.client(), everything)
    for name in names:
        output.item({"topic": name}, name)
    if not names:
        output.note("There are no topics. Create one with: rocketmq-spark topic create NAME")


@topic.command()
@click.argument("name")
@connected
@click.pass_obj
def describe(output: Output, target: Target, name: str) -> None:
    """Show offsets and message times of each queue of a topic, with the type and the permission of the topic on its broker."""
    from rocketmq_spark.admin import topics

    there = topics.describe(target.client(), name)
    rows = [
        {
            "topic": name,
            "brokerName": queue.broker_name,
            "queueId": queue.queue_id,
            "minOffset": b.min_offset,
            "maxOffset": b.max_offset,
            "messages": b.max_offset - b.min_offset,
            "lastUpdate": moment(b.last_update_ms),
            "type": kept.message_type if kept else None,
            "permission": kept.permission if kept else None,
        }
        for queue, b in there.queues.items()
        for kept in [there.brokers.get(queue.broker_name)]  # None: its master is away
    ]
    headings = {
        "brokerName": "BROKER",
        "queueId": "QUEUE",
        "minOffset": "FIRST",
        "maxOffset": "END",
        "messages": "MESSAGES",
        "lastUpdate": "LAST MESSAGE",
        "type": "TYPE",
        "permission": "PERMISSION",
    }
    output.rows(headings, rows)
    output.note(f"{there.messages} messages in {len(rows)} queues")


@topic.command()
@click.argument("name")
@click.option("--yes", is_flag=True, help="Do not ask for confirmation.")
@connected
@click.pass_obj
def delete(output: Output, target: Target, name: str, yes: bool) -> None:
    """Delete a topic and all of its messages."""
    from rocketmq_spark.admin import topics

    _refuse_part(target, name)
    client = target.client()
    client.admin.routes.existing(name, 0.0)
    confirm(f"Delete topic {name} with all its messages", yes)
    topics.delete(client, name)
    output.item({"topic": name, "deleted": True}, f"Topic {name} is deleted")
