"""``rocketmq-spark lag``: how far a consumer group, or a query by its checkpoint, is behind."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

import click

from rocketmq_spark.cli.command import Command
from rocketmq_spark.cli.connection import GROUP, Target, connected
from rocketmq_spark.cli.output import Output
from rocketmq_spark.clock import Deadline
from rocketmq_spark.errors import OffsetError, OptionError, RouteNotFound

if TYPE_CHECKING:
    from rocketmq_spark.lag import QueueLag
    from rocketmq_spark.model import MessageQueue, TopicRoute
    from rocketmq_spark.session import Client

_HEADINGS = {
    "topic": "TOPIC",
    "brokerName": "BROKER",
    "queueId": "QUEUE",
    "minOffset": "FIRST",
    "position": "NEXT",
    "maxOffset": "END",
    "lag": "BEHIND",
    "age": "SINCE",
}


@click.command(cls=Command)
@click.option("--group", metavar="NAME", help="A consumer group.")
@click.option("--topic", "topics", multiple=True, help="Of the group, only this topic (may be repeated).")
@click.option(
    "--checkpoint",
    type=click.Path(path_type=Path),
    metavar="FOLDER",
    help="The checkpointLocation of a query: what its last finished micro-batch has read.",
)
@connected
@click.pass_obj
def lag(output: Output, target: Target, group: str | None, topics: tuple[str, ...], checkpoint: Path | None) -> None:
    """How many messages a group or a query has not read yet, by queue, and since when the next one waits.

    With --json one object: lag, lost, behindMs, and queues. What is not known is null.
    """
    from rocketmq_spark.lag import total

    if (group is None) == (checkpoint is None):
        raise OptionError("lag needs either --group NAME or --checkpoint FOLDER")
    client = target.client()
    if group is not None:
        own = _own_group(target, group)
        positions = _of_group(client, own, topics)
        about: dict[str, object] = {"group": own}
        if not positions:
            raise OffsetError(
                f"group {own} has no offsets{_in(topics)}", remedy="Was something consumed and committed?"
            )
    else:
        assert checkpoint is not None
        number, positions = _of_checkpoint(checkpoint, topics)
        about = {"checkpoint": str(checkpoint), "batchId": number}
    now_ms = time.time_ns() // 1_000_000
    rows = _rows(client, positions)
    every = total(rows, now_ms)
    values = {
        **about,
        "lag": every.lag,
        "lost": every.lost,
        "behindMs": every.behind_ms,
        "unknownQueues": every.unknown_queues,
        "queues": [_queue(row, now_ms) for row in rows],
    }
    if output.machine:
        output.item(values, "")
        return
    output.rows(_HEADINGS, [{**_queue(row, now_ms), "age": _since(row)} for row in rows])
    output.note(f"{every.lag} messages behind in {len(rows)} queues")
    if every.lost:
        output.note(f"{every.lost} messages were removed before they were read: the topic's retention is too short")
    if every.unknown_queues:
        output.note(f"queues of which no offset is known: {every.unknown_queues}")


def _own_group(target: Target, group: str) -> str:
    """The group's name in the environment of the command."""
    from rocketmq_spark.consumer.settings import isolated
    from rocketmq_spark.options import parse

    return isolated(parse({**target.settings(), "group": group}).for_role("pull consumer"))[1]


def _of_group(client: Client, group: str, topics: Sequence[str]) -> dict[MessageQueue, int | None]:
    """All queues of the topics that the group has an offset of, None for those where it has none."""
    found: dict[MessageQueue, int | None] = {}
    for topic in topics or client.admin.consumed_topics(group):
        queues = _route(client, topic).readable()
        found |= client.brokers.committed(group, queues, Deadline.after(client.calls.request_timeout_s))
    return found if any(position is not None for position in found.values()) else {}


def _of_checkpoint(folder: Path, topics: Sequence[str]) -> tuple[int | None, dict[MessageQueue, int | None]]:
    """Where the query goes on: behind its last finished batch, or where it began if none is finished."""
    from rocketmq_spark.source.checkpoint import last_batch

    done, begun = last_batch(folder), last_batch(folder, committed=False)
    chosen = done or begun
    if chosen is None:
        raise OffsetError(f"{folder} has no batch yet")
    positions: dict[MessageQueue, int | None] = {}
    for offsets in chosen.sources.values():
        positions |= offsets.positions if done else {queue: offsets.start.get(queue) for queue in offsets.positions}
    if not positions:
        raise OffsetError(f"batch {chosen.number} in {folder} reads no RocketMQ topic")
    return (done.number if done else None), {q: at for q, at in positions.items() if not topics or q.topic in topics}


def _rows(client: Client, positions: Mapping[MessageQueue, int | None]) -> list[QueueLag]:
    from rocketmq_spark.lag import QueueLag

    for topic in {queue.topic for queue in positions}:
        _route(client, topic)
    deadline = Deadline.after(client.calls.request_timeout_s)
    bounds = client.brokers.bounds(sorted(positions), deadline)
    rows = []
    for queue in sorted(bounds):
        row = QueueLag(queue, bounds[queue].min_offset, positions[queue], bounds[queue].max_offset)
        if row.lag and row.next_offset is not None:
            stored_ms = client.brokers.store_time_ms(GROUP, queue, row.next_offset, deadline)
            row = row._replace(next_stored_ms=stored_ms)
        rows.append(row)
    return rows


def _route(client: Client, topic: str) -> TopicRoute:
    try:
        return client.routes.get(topic)
    except RouteNotFound as e:
        raise client.routes.missing_topic(e) from e


def _queue(row: QueueLag, now_ms: int) -> dict[str, object]:
    return {
        "topic": row.queue.topic,
        "brokerName": row.queue.broker_name,
        "queueId": row.queue.queue_id,
        "minOffset": row.min_offset,
        "position": row.position,
        "maxOffset": row.max_offset,
        "lag": row.lag,
        "lost": row.lost,
        "behindMs": row.behind_ms(now_ms),
    }


def _since(row: QueueLag) -> str | None:
    if row.next_stored_ms is None:
        return None
    return datetime.fromtimestamp(row.next_stored_ms / 1000, UTC).isoformat(" ", "seconds").removesuffix("+00:00")


def _in(topics: Sequence[str]) -> str:
    return f" in {', '.join(topics)}" if topics else ""
