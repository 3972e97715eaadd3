"""Where a consumer group, or a query by its checkpoint, goes on in each queue, and what brokers have there."""

from __future__ import annotations

import contextlib
import difflib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from rocketmq_spark.base.clock import Deadline
from rocketmq_spark.cli.connection import GROUP, Target
from rocketmq_spark.errors import AccessDenied, BrokerError, NotSupported, OffsetError, RocketMQError, RouteNotFound
from rocketmq_spark.model import MessageQueue, QueueBounds
from rocketmq_spark.model.lag import QueueLag

if TYPE_CHECKING:
    from rocketmq_spark.session import Client
    from rocketmq_spark.spark.checkpoints.entries import Read

Positions = dict[MessageQueue, int | None]


@dataclass(frozen=True, slots=True)
class QueuePositions:
    """Queues as they were at one moment, and what brokers did not tell: an error of each that did not answer."""

    rows: list[QueueLag]
    errors: list[RocketMQError] = field(default_factory=list)


def own_group(target: Target, group: str) -> str:
    """The group's name in the environment of the command."""
    from rocketmq_spark.consumer.settings import isolated
    from rocketmq_spark.options import parse

    return isolated(parse({**target.settings(), "group": group}).for_role("pull consumer"))[1]


def of_group(client: Client, group: str, topics: Sequence[str]) -> Positions:
    """All queues of the topics that the group has an offset of, None for those where it has none.

    Raises ``OffsetError`` where it has none at all.
    """
    found: Positions = {}
    for topic in topics or client.admin.consumed_topics(group):
        queues = client.routes.existing(topic).readable()
        found |= client.brokers.committed(group, queues, deadline(client))
    if all(position is None for position in found.values()):
        where = f" in {', '.join(topics)}" if topics else ""
        remedy = near_groups(client, group) or "Was something consumed and committed?"
        raise OffsetError(f"group {group} has no offsets{where}", remedy=remedy)
    return found


def near_groups(client: Client, group: str) -> str:
    """A question for who may have misspelt a group, with the nearest names; empty if brokers know it, or none that is near."""
    from rocketmq_spark.client import groups

    try:
        known = groups.groups(client.calls, client.admin)
    except RocketMQError:  # it is a hint only
        return ""
    near = difflib.get_close_matches(group, known, n=3, cutoff=0.6) if group not in known else []
    return f"Did you mean {', '.join(near)}?" if near else ""


class Reached(NamedTuple):
    """Where a query goes on: behind its last finished ``batch``, or where it began if none is. ``under_way`` is the batch that
    was begun and is not done. Sources that read ``elsewhere``, in these clusters, are left out.
    """

    batch: int | None
    positions: Positions
    under_way: Read | None
    elsewhere: Sequence[str] = ()


def of_checkpoint(target: Target, name: str, topics: Sequence[str]) -> tuple[Client, Reached]:
    """Where the query of a checkpoint goes on, and who can be asked about it.

    Raises ``OffsetError`` for what is no checkpoint, and for topics that the query does not read.
    """
    from rocketmq_spark.spark.checkpoints.entries import folder, last_batch, merged, under_way

    opened = folder(name)
    done = last_batch(opened)
    chosen = done or last_batch(opened, committed=False)
    if chosen is None:
        raise OffsetError(f"{name} has no batch yet", remedy="Wait for the first one")
    if not chosen.positions:
        raise OffsetError(f"batch {chosen.number} in {name} reads no RocketMQ topic", remedy="Name another query's")
    known = sorted({queue.topic for queue in chosen.positions})
    if wrong := sorted(set(topics) - set(known)):
        raise OffsetError(
            f"the query of {name} does not read {', '.join(wrong)}", remedy=f"It reads: {', '.join(known)}"
        )
    client = target.within(chosen.reads).client()
    here, elsewhere = chosen.within(clusters(client))
    positions: Positions = dict(here.positions)
    if done is None:
        starts = merged(offsets.start for offsets in here.sources.values())
        positions = {queue: starts.get(queue) for queue in positions}
    mine = {q: at for q, at in positions.items() if not topics or q.topic in topics}
    return client, Reached(done and done.number, mine, under_way(opened), elsewhere)


def clusters(client: Client) -> set[str]:
    """Those of all brokers that are known now; none where it may not be asked, or a Proxy does not say it."""
    try:
        return {data.cluster for data in client.routes.cluster().values()}
    except (AccessDenied, NotSupported):
        return set()


def waited_for(client: Client, read: Read) -> set[str]:
    """Brokers that a batch reads and that do not answer, as far as they are of the client's cluster."""
    here, _ = read.batch.within(clusters(client))
    return silent(client, {part.queue for part in read.ranges if part.queue in here.positions})


def left_out(elsewhere: Sequence[str]) -> str:
    """What is said of sources of other clusters."""
    return f"The query reads cluster {', '.join(elsewhere)}, too, which is not looked at: name its name server for that"


def look(client: Client, positions: Mapping[MessageQueue, int | None]) -> QueuePositions:
    """What brokers have in these queues, and when the next message of each was stored."""
    bounds, errors = bounds_of(client, positions)
    within = deadline(client)
    rows = []
    for queue in sorted(positions):
        if queue not in bounds:
            rows.append(QueueLag(queue, None, positions[queue], None))
            continue
        row = QueueLag(queue, bounds[queue].min_offset, positions[queue], bounds[queue].max_offset)
        if row.lag and row.next_offset is not None and not errors:
            try:
                stored_ms = client.brokers.store_time_ms(GROUP, queue, row.next_offset, within)
                row = row._replace(next_stored_ms=stored_ms)
            except RocketMQError as e:
                errors.append(e)
        rows.append(row)
    return QueuePositions(rows, errors)


def bounds_of(
    client: Client, queues: Mapping[MessageQueue, object]
) -> tuple[dict[MessageQueue, QueueBounds], list[RocketMQError]]:
    """Bounds as far as brokers tell them, and an error of each that does not, and of each topic without any broker."""
    errors: list[RocketMQError] = []
    routed = set()
    for topic in sorted({queue.topic for queue in queues}):
        try:
            client.routes.existing(topic)
            routed.add(topic)
        except RouteNotFound as e:
            errors.append(e)
    asked = sorted(queue for queue in queues if queue.topic in routed)
    bounds = client.brokers.bounds(asked, deadline(client), lambda error, queue: errors.append(error))
    return bounds, errors


def silent(client: Client, queues: Collection[MessageQueue]) -> set[str]:
    """The brokers of these queues that do not answer, or that no route names."""
    away: set[str] = set()

    def note(error: RocketMQError, queue: MessageQueue) -> None:
        if not isinstance(error, BrokerError):
            away.add(queue.broker_name)

    for topic in {queue.topic for queue in queues}:
        with contextlib.suppress(RouteNotFound):
            client.routes.get(topic)
    client.brokers.bounds(queues, deadline(client), note)
    return away


def deadline(client: Client) -> Deadline:
    """For what is asked of all brokers at once."""
    return Deadline.after(client.calls.request_timeout_s)
