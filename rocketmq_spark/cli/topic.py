"""``rocketmq-spark topic``: administration of topics. The cluster must permit it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import click

from rocketmq_spark.cli.command import CliGroup
from rocketmq_spark.cli.connection import Target, connected, pairs
from rocketmq_spark.cli.output import Output, moment
from rocketmq_spark.errors import OptionError

if TYPE_CHECKING:
    from rocketmq_spark.model import QueueData, TopicRoute


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
    from rocketmq_spark.client.admin import batch_attributes, shown_queues

    admin = target.client().admin
    attributes = batch_attributes(kind["attribute"]) if kind["batch"] else kind["attribute"]
    if there := admin.queues_of(name, brokers or None):
        raise OptionError(
            f"topic {name} is there: it has {shown_queues(there)}",
            remedy=f"To change that: rocketmq-spark topic widen {name} --queues N, or topic shrink; to create it on another "
            "broker, name that with --broker",
        )
    _show(output, admin.create_topic(name, queues, brokers or None, attributes=attributes))


def _show(output: Output, route: TopicRoute, hidden: int | None = None) -> None:
    """How many queues the topic has now, and how many messages went out of sight."""
    where = sorted(data.broker_name for data in route.queues)
    total = sum(data.write_queues for data in route.queues)
    text = f"Topic {route.topic} has {total} queues on {', '.join(where)}"
    row = {"topic": route.topic, "brokers": where, "queues": total}
    if hidden is not None:
        text, row = f"{text}; {hidden} messages are out of sight", {**row, "outOfSight": hidden}
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
    there = _there(target, name, brokers)
    if any(max(data.read_queues, data.write_queues) > queues for data in there.values()):
        raise _wrong_way(name, queues, there, "shrink")
    _show(output, target.client().admin.resize_topic(name, queues, list(there)))


@topic.command()
@_resized
@click.option("--yes", is_flag=True, help="Do not ask for confirmation.")
@connected
@click.pass_obj
def shrink(output: Output, target: Target, name: str, queues: int, brokers: tuple[str, ...], yes: bool) -> None:
    """Remove queues from a topic: those with the highest ids.

    The messages of the removed queues cannot be read until you add the queues again. The command first shows how many there are.
    """
    there = _there(target, name, brokers)
    if any(min(data.read_queues, data.write_queues) < queues for data in there.values()):
        raise _wrong_way(name, queues, there, "widen")
    admin = target.client().admin
    gone = {q: b for q, b in admin.describe_topic(name).items() if q.broker_name in there and q.queue_id >= queues}
    hidden = sum(bounds.max_offset - bounds.min_offset for bounds in gone.values())
    _confirm(f"Take {len(gone)} queues away from topic {name}: {hidden} messages go out of sight", yes)
    _show(output, admin.resize_topic(name, queues, list(there)), hidden)


def _there(target: Target, name: str, brokers: tuple[str, ...]) -> dict[str, QueueData]:
    """What a topic has on the brokers that are named. Raises an error where it is not."""
    admin = target.client().admin
    admin.routes.existing(name, 0.0)
    there = admin.queues_of(name, brokers or None)
    if missing := sorted(set(brokers) - there.keys()):
        raise OptionError(
            f"topic {name} is not on {', '.join(missing)}",
            remedy=f"Create it there: rocketmq-spark topic create {name} --broker {missing[0]}",
        )
    return there


def _wrong_way(name: str, queues: int, there: dict[str, QueueData], other: str) -> OptionError:
    from rocketmq_spark.client.admin import shown_queues

    more = "fewer than" if other == "shrink" else "more than"
    return OptionError(
        f"--queues is {queues}, {more} topic {name} has: {shown_queues(there)}",
        remedy=f"That is for: rocketmq-spark topic {other}",
    )


def _confirm(what: str, yes: bool) -> None:
    """Go on if the user says so, by ``--yes`` or on a terminal."""
    if not yes:
        if not sys.stdin.isatty():
            raise click.UsageError(f"{what}. There is no terminal to ask on: give --yes")
        click.confirm(f"{what}?", abort=True, err=True)


@topic.command("list")
@click.option("--all", "everything", is_flag=True, help="Include RocketMQ's own topics.")
@connected
@click.pass_obj
def list_topics(output: Output, target: Target, everything: bool) -> None:
    """List the topics of a cluster, one per line."""
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
    """Show offsets and message times of each queue of a topic."""
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
@click.option("--yes", is_flag=True, help="Do not ask for confirmation.")
@connected
@click.pass_obj
def delete(output: Output, target: Target, name: str, yes: bool) -> None:
    """Delete a topic and all of its messages."""
    admin = target.client().admin
    admin.routes.existing(name, 0.0)
    _confirm(f"Delete topic {name} with all its messages", yes)
    admin.delete_topic(name)
    output.item({"topic": name, "deleted": True}, f"Topic {name} is deleted")
