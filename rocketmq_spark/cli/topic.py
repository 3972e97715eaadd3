"""``rocketmq-spark topic`` and ``environment``: administers topics, and shows which environments write and read their queues."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any

import click

from rocketmq_spark.cli.command import CliGroup, confirm
from rocketmq_spark.cli.connection import Target, parse_pairs, with_connection_options
from rocketmq_spark.cli.numbers import IntRange
from rocketmq_spark.cli.output import Output, time_text

if TYPE_CHECKING:
    from rocketmq_spark.client.topic_readers import GroupReader
    from rocketmq_spark.model import MessageQueue
    from rocketmq_spark.model.admin import TopicQueues
    from rocketmq_spark.options import Options


@click.group(cls=CliGroup)
def topic() -> None:
    """Create, list, describe, update, widen, shrink and delete topics."""


@topic.command()
@click.argument("name")
@click.option("--queues", type=IntRange(1), default=8, show_default=True, help="Queues on each broker.")
@click.option("--broker", "brokers", multiple=True, help="Only on this broker (may be repeated; default: all).")
@click.option(
    "--attribute",
    multiple=True,
    callback=parse_pairs,
    metavar="NAME=VALUE",
    help="Attribute, such as message.type=FIFO (may be repeated).",
)
@click.option(
    "--batch",
    is_flag=True,
    help="Create a batch topic, which stores batches whole and is faster (docs/batch-topics.md).",
)
@with_connection_options
@click.pass_obj
def create(
    output: Output, /, target: Target, name: str, queues: int, brokers: tuple[str, ...], **arguments: Any
) -> None:
    """Create a topic. Fails if one of the brokers already has the topic."""
    from rocketmq_spark.admin import topics

    _show(
        output,
        topics.create(target.client(), name, queues, brokers or None, arguments["attribute"], arguments["batch"]),
    )


def _show(output: Output, topic_queues: TopicQueues, is_shrunk: bool = False) -> None:
    """Print the number of queues of the topic, and after a shrink how many messages can no longer be read."""
    broker_names, queue_count = sorted(topic_queues.brokers), topic_queues.write_queues
    text = f"Topic {topic_queues.topic} has {queue_count} queues on {', '.join(broker_names)}"
    row = {"topic": topic_queues.topic, "brokers": broker_names, "queues": queue_count}
    if is_shrunk:
        text, row = (
            f"{text}; {topic_queues.hidden} messages are out of sight",
            {**row, "outOfSight": topic_queues.hidden},
        )
    output.item(row, text)


def _resize_options(function: Callable[..., None]) -> Callable[..., None]:
    """Add the arguments of commands that change the number of queues."""
    for add in (
        click.option("--broker", "brokers", multiple=True, help="Only on this broker (may be repeated; default: all)."),
        click.option("--queues", type=IntRange(1), required=True, help="Queues on each broker from now on."),
        click.argument("name"),
    ):
        function = add(function)
    return function


@topic.command()
@_resize_options
@with_connection_options
@click.pass_obj
def widen(output: Output, target: Target, name: str, queues: int, brokers: tuple[str, ...]) -> None:
    """Add queues to a topic.

    Messages stay in their queues. Hash selectors use the new queues from now on, so new messages of a key may go to another queue
    than earlier messages of this key.
    """
    from rocketmq_spark.admin import topics

    _show(output, topics.widen(target.client(), name, queues, brokers or None, "--queues"))


def _check_not_shared(target: Target, name: str, effect: str = "remove messages of all environments") -> None:
    """Raise ``OptionError`` if the target has an environment that shares the topic, because the command would change the topic
    for all environments.
    """
    from rocketmq_spark.errors import OptionError
    from rocketmq_spark.queues.environment import environment_of

    options = target.options()
    if environment_of(options) is not None:
        raise OptionError(
            f"topic {name} is shared by environments, and {options.environment_source} names one of them: this would {effect}",
            remedy="To change the topic for all environments, omit the environment. If the environment has its own topics, set "
            "environmentMode=suffix",
        )


@topic.command()
@click.argument("name")
@click.option("--queues", type=IntRange(1), help="Queues on each broker from now on; to have fewer, use 'shrink'.")
@click.option(
    "--permission",
    type=click.Choice(["RW", "R", "W"], case_sensitive=False),
    help="RW: read and write; R: brokers reject new messages; W: brokers reject readers.",
)
@click.option(
    "--order/--no-order",
    default=None,
    help="Set or clear the topic's order flag.",
)
@click.option(
    "--attribute",
    multiple=True,
    callback=parse_pairs,
    metavar="NAME=VALUE",
    help="Set an attribute, such as message.type=FIFO (may be repeated).",
)
@click.option("--broker", "brokers", multiple=True, help="Only on this broker (may be repeated; default: all).")
@with_connection_options
@click.pass_obj
def update(
    output: Output, /, target: Target, name: str, queues: int | None, brokers: tuple[str, ...], **arguments: Any
) -> None:
    """Change a topic. Settings that are not given are kept."""
    from rocketmq_spark.admin import topics

    if queues is None and arguments["permission"] is None and arguments["order"] is None and not arguments["attribute"]:
        raise click.UsageError("Give what is to change: --queues, --permission, --order, --no-order or --attribute")
    if arguments["permission"] in ("R", "W"):
        _check_not_shared(target, name, "stop the producers or the consumers of all environments")
    change = topics.TopicChange(queues, arguments["permission"], arguments["order"], arguments["attribute"])
    topic_queues = topics.update(target.client(), name, change, brokers or None, "--queues")
    for broker, config in sorted(topic_queues.brokers.items()):
        row = {
            "topic": name,
            "brokerName": broker,
            "queues": config.write_queues,
            "permission": config.permission,
            "type": config.message_type,
            "order": config.order,
            "attributes": dict(config.attributes),
        }
        properties = [f"{key} {row[key]}" for key in ("permission", "type") if row[key]]
        properties += ["ordered"] if config.order else []
        output.item(row, f"Topic {name} has {config.write_queues} queues on {broker}: {', '.join(properties)}")


@topic.command()
@_resize_options
@click.option("--yes", is_flag=True, help="Do not ask for confirmation.")
@with_connection_options
@click.pass_obj
def shrink(output: Output, target: Target, name: str, queues: int, brokers: tuple[str, ...], yes: bool) -> None:
    """Remove the queues with the highest ids from a topic.

    The messages of the removed queues cannot be read until you add the queues again. Before it asks for confirmation, the
    command shows the number of messages that cannot be read.
    """
    from rocketmq_spark.admin import topics

    _check_not_shared(target, name)
    client, broker_names = target.client(), brokers or None
    preview = topics.shrink(client, name, queues, broker_names, preview=True, argument_name="--queues")
    removed_queues = sum(data.read_queues - queues for data in preview.brokers.values())
    confirm(f"Take {removed_queues} queues away from topic {name}: {preview.hidden} messages go out of sight", yes)
    _show(output, topics.shrink(client, name, queues, broker_names, argument_name="--queues"), is_shrunk=True)


@topic.command("list")
@click.option(
    "--all",
    "with_system_topics",
    is_flag=True,
    help="Include RocketMQ's own topics, and those of retries and dead letters.",
)
@with_connection_options
@click.pass_obj
def list_topics(output: Output, target: Target, with_system_topics: bool) -> None:
    """List the topics of a cluster, one per line."""
    from rocketmq_spark.admin import topics

    names = topics.names(target.client(), with_system_topics)
    for name in names:
        output.item({"topic": name}, name)
    if not names:
        output.note("There are no topics. Create one with: rocketmq-spark topic create NAME")


@topic.command()
@click.argument("name")
@with_connection_options
@click.pass_obj
def describe(output: Output, target: Target, name: str) -> None:
    """Show offsets and last message time of each queue of a topic.

    Also shows the type and the permission that the topic has on the broker of the queue.
    """
    from rocketmq_spark.admin import topics
    from rocketmq_spark.base.codes import BATCH_QUEUE, QUEUE_TYPE

    description = topics.describe(target.client(), name)
    batch_brokers = {
        name for name, config in description.brokers.items() if config.attributes.get(QUEUE_TYPE) == BATCH_QUEUE
    }
    rows = [
        {
            "topic": name,
            "brokerName": queue.broker_name,
            "queueId": queue.queue_id,
            "minOffset": queue_bounds.min_offset,
            "maxOffset": queue_bounds.max_offset,
            "messages": queue_bounds.max_offset - queue_bounds.min_offset,
            "lastUpdate": time_text(queue_bounds.last_update_ms),
            "type": config.message_type if config else None,
            "permission": config.permission if config else None,
            "batch": queue.broker_name in batch_brokers,
        }
        for queue, queue_bounds in description.queues.items()
        for config in [description.brokers.get(queue.broker_name)]  # no attributes are known while the master is down
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
    output.note(f"{description.messages} messages in {len(rows)} queues{' of a batch topic' if batch_brokers else ''}")


@topic.command()
@click.argument("name")
@click.option("--yes", is_flag=True, help="Do not ask for confirmation.")
@with_connection_options
@click.pass_obj
def delete(output: Output, target: Target, name: str, yes: bool) -> None:
    """Delete a topic and all of its messages."""
    from rocketmq_spark.admin import topics

    _check_not_shared(target, name)
    client = target.client()
    client.admin.routes.get_existing(name, 0.0)
    confirm(f"Delete topic {name} with all its messages", yes)
    topics.delete(client, name)
    output.item({"topic": name, "deleted": True}, f"Topic {name} is deleted")


_ENVIRONMENT_COLUMNS = {
    "brokerName": "BROKER",
    "queueId": "QUEUE",
    "environment": "WRITTEN BY",
    "messages": "MESSAGES",
    "shown": "READ BY",
}


@click.group(cls=CliGroup)
def environment() -> None:
    """Show how environments (dev, test, ...) share a topic."""


@environment.command()
@click.argument("topic")
@with_connection_options
@click.pass_obj
def show(output: Output, target: Target, topic: str) -> None:
    """Show which environments write and read each queue of TOPIC.

    Writers are computed from -o environments=..., because brokers do not store them: give the value that the producers use.
    Readers are reported by the members of consumer groups. A group without members is shown at the queues for which it has
    committed offsets.
    """
    from rocketmq_spark.client.topic_readers import readers

    options, client = target.options(), target.client()
    route = client.admin.routes.get_existing(topic, 0.0)
    bounds = client.admin.describe_topic(topic)
    writable_queues = set(route.writable_queues())
    environment_of_queue = _environment_of_queues(options, sorted({*bounds, *writable_queues}))
    group_readers = readers(client.rpc_client, client.admin, topic)
    rows = []
    for queue in sorted({*bounds, *writable_queues}):
        name = environment_of_queue.get(queue)
        reader_rows = list(_reader_rows(options, queue, name, group_readers))
        rows.append(
            {
                "topic": topic,
                "brokerName": queue.broker_name,
                "queueId": queue.queue_id,
                "environment": name,
                "writable": queue in writable_queues,
                "messages": bounds[queue].max_offset - bounds[queue].min_offset if queue in bounds else None,
                "readers": reader_rows,
            }
        )
    output.rows(_ENVIRONMENT_COLUMNS, rows if output.is_for_programs else map(_text_row, rows))
    for reader in group_readers:
        if reader.queues is None:
            output.note(f"What {reader.member} of group {reader.group} reads is not known: it did not answer")
    if options.environment_mode == "queues" and options.environments is None:
        output.note("Without -o environments=... the n-th queue is taken to be of environment n")
    if any(reader_row["foreign"] for row in rows for reader_row in row["readers"]):  # type: ignore[attr-defined]
        output.note("! reads what belongs to another environment")


def _environment_of_queues(options: Options, queues: Sequence[MessageQueue]) -> Mapping[MessageQueue, str]:
    from rocketmq_spark.queues.environment import owners, suffix_of

    suffix = suffix_of(options)
    return dict.fromkeys(queues, suffix) if suffix else owners(queues, options.environments)


def _reader_rows(
    options: Options, queue: MessageQueue, queue_environment: str | None, group_readers: Sequence[GroupReader]
) -> Iterator[dict[str, object]]:
    from rocketmq_spark.queues.environment import environment_of_group

    for reader in group_readers:
        if queue in (reader.queues or ()):
            has_topic_suffix = options.environment_mode == "suffix" and reader.is_in_scope
            reader_environment = options.environment if has_topic_suffix else environment_of_group(reader.group)
            reader_row = {"group": reader.group, "member": reader.member, "environment": reader_environment}
            yield {**reader_row, "foreign": reader_environment != queue_environment}


def _text_row(row: dict[str, object]) -> dict[str, object]:
    """Return a row as text: each group above its members, with ``!`` before a group of another environment."""
    readers: list[dict[str, object]] = row["readers"]  # type: ignore[assignment]
    lines: list[str] = []
    for group, members in groupby(readers, key=lambda reader: f"{'! ' if reader['foreign'] else ''}{reader['group']}"):
        lines += [group, *(f"  {reader['member'] or '(no member)'}" for reader in members)]
    return {**row, "environment": row["environment"] if row["writable"] else None, "shown": lines or None}
