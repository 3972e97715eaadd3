"""``rocketmq-spark environment``: which queues of a topic belong to which environment, and who keeps to that."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import TYPE_CHECKING

import click

from rocketmq_spark.cli.command import CliGroup
from rocketmq_spark.cli.connection import Target, connected
from rocketmq_spark.cli.output import Output

if TYPE_CHECKING:
    from rocketmq_spark.client.groups import GroupReader
    from rocketmq_spark.model import MessageQueue
    from rocketmq_spark.options import Options

_HEADINGS = {
    "brokerName": "BROKER",
    "queueId": "QUEUE",
    "environment": "WRITTEN BY",
    "messages": "MESSAGES",
    "shown": "READ BY",
}


@click.group(cls=CliGroup)
def environment() -> None:
    """Show how environments share a topic."""


@environment.command()
@click.argument("topic")
@connected
@click.pass_obj
def show(output: Output, target: Target, topic: str) -> None:
    """Show which environments write and read each queue of TOPIC.

    Writers are computed from -o environments=..., because brokers do not store them: give the value that the producers use.
    Readers are what the members of consumer groups report. A group without members is shown at the queues for which it has
    committed offsets.
    """
    from rocketmq_spark.client.groups import readers

    options, client = target.options(), target.client()
    route = client.admin.routes.existing(topic, 0.0)
    bounds = client.admin.describe_topic(topic)
    writable = set(route.writable())
    named = _names(options, sorted({*bounds, *writable}))
    found = readers(client.calls, client.admin, topic)
    rows = []
    for queue in sorted({*bounds, *writable}):
        name = named.get(queue)
        found_readers = list(_readers(options, queue, name, found))
        rows.append(
            {
                "topic": topic,
                "brokerName": queue.broker_name,
                "queueId": queue.queue_id,
                "environment": name,
                "writable": queue in writable,
                "messages": bounds[queue].max_offset - bounds[queue].min_offset if queue in bounds else None,
                "readers": found_readers,
            }
        )
    output.rows(_HEADINGS, rows if output.machine else map(_shown, rows))
    for reader in found:
        if reader.queues is None:
            output.note(f"What {reader.member} of group {reader.group} reads is not known: it did not answer")
    if options.environment_mode == "queues" and options.environments is None:
        output.note("Without -o environments=... the n-th queue is taken to be of environment n")
    if any(found_readers["foreign"] for row in rows for found_readers in row["readers"]):  # type: ignore[attr-defined]
        output.note("! reads what belongs to another environment")


def _names(options: Options, queues: Sequence[MessageQueue]) -> Mapping[MessageQueue, str]:
    from rocketmq_spark.queues.environment import owners, suffix_of

    suffix = suffix_of(options)
    return dict.fromkeys(queues, suffix) if suffix else owners(queues, options.environments)


def _readers(
    options: Options, queue: MessageQueue, name: str | None, found: Sequence[GroupReader]
) -> Iterator[dict[str, object]]:
    from rocketmq_spark.queues.environment import environment_of_group

    for reader in found:
        if queue in (reader.queues or ()):
            own = options.environment_mode == "suffix" and reader.inside
            mine = options.environment if own else environment_of_group(reader.group)
            reader_row = {"group": reader.group, "member": reader.member, "environment": mine}
            yield {**reader_row, "foreign": mine != name}


def _shown(row: dict[str, object]) -> dict[str, object]:
    """For people: a group stands above its members, ``!`` before one of another environment."""
    readers: list[dict[str, object]] = row["readers"]  # type: ignore[assignment]
    lines: list[str] = []
    for group, members in groupby(readers, key=lambda one: f"{'! ' if one['foreign'] else ''}{one['group']}"):
        lines += [group, *(f"  {one['member'] or '(no member)'}" for one in members)]
    return {**row, "environment": row["environment"] if row["writable"] else None, "shown": lines or None}
