"""``rocketmq-spark offsets``: the offsets that brokers keep of a consumer group, and setting them."""

from __future__ import annotations

import re
import time
from typing import TYPE_CHECKING

import click

from rocketmq_spark.cli.command import CliGroup, SendingCommand
from rocketmq_spark.cli.connection import Target, connected
from rocketmq_spark.cli.output import Output

if TYPE_CHECKING:
    from rocketmq_spark.model import MessageQueue, QueueBounds

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
    from rocketmq_spark.options.parsing import consume_from, duration, offsets

    try:
        if re.fullmatch(r"[\d.]+\s*[a-z]+", value.strip()):
            return round((time.time() - duration(value)) * 1000)
        if not value.lstrip().startswith("{"):
            return consume_from(value)
        by_queue = offsets()(value)
        assert not isinstance(by_queue, str)
        return by_queue
    except ValueError as e:
        raise click.BadParameter(
            f'{value!r} is not {e}; 1h (so long ago) is one, and JSON such as {{"orders":{{"broker-a":{{"0":17}}}}}}'
        ) from e


def _kafkas(ctx: click.Context, param: click.Parameter, value: str | None) -> None:
    """Options of Kafka's tool are not ours."""
    if value is not None:
        raise click.UsageError(
            "--by-duration, --shift-by and --to-datetime are options of Kafka's tool. Here --to takes them all: "
            '1h (so long ago), a time, or offsets as JSON ({"orders":{"broker-a":{"0":17}}}; see offsets show)'
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
    """Show the committed offset of GROUP in each queue: the offset that it reads next, '-' (JSON: null) without one."""
    from rocketmq_spark.admin import offsets as admin_offsets
    from rocketmq_spark.admin import positions
    from rocketmq_spark.cli.positions import own_group

    client, own = target.client(), own_group(target, group)
    found = positions.of_group(client, own, topics)
    bounds, errors = positions.bounds_of(client, found)
    output.rows(_SHOWN, [{**_queue(q), **_bounds(bounds.get(q)), "offset": at} for q, at in sorted(found.items())])
    members = admin_offsets.members(client, own, found)
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
    help="earliest, latest, a time (ISO-8601 or ms), 1h (so long ago), or JSON as for startingOffsets; JSON may omit queues.",
)
@click.option("--by-duration", "--shift-by", "--to-datetime", hidden=True, expose_value=False, callback=_kafkas)
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
    from rocketmq_spark.admin import offsets as admin_offsets
    from rocketmq_spark.admin.positions import near_groups
    from rocketmq_spark.cli.positions import own_group
    from rocketmq_spark.queues.environment import environment_of

    client, own = target.client(), own_group(target, group)
    changes = admin_offsets.changes(client, own, topics, wanted, environment_of(target.options()), "--to")
    members = admin_offsets.members(client, own, [change.queue for change in changes])
    if not how["force"] and how["really"]:
        admin_offsets.check_members(own, members)
    new = all(change.before is None for change in changes)
    hint = near_groups(client, own) if new else ""  # asked before offsets are stored, which makes the group
    if how["really"]:
        admin_offsets.store(client, own, {change.queue: change.after for change in changes})
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


def _queue(queue: MessageQueue) -> dict[str, object]:
    return {"topic": queue.topic, "brokerName": queue.broker_name, "queueId": queue.queue_id}


def _bounds(bounds: QueueBounds | None) -> dict[str, object]:
    return {
        "minOffset": bounds.min_offset if bounds else None,
        "maxOffset": bounds.max_offset if bounds else None,
    }
