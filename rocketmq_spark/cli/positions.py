"""The positions of a consumer group, or of a query by its checkpoint, in each queue, and the bounds of the queues."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, NamedTuple

from rocketmq_spark.admin import deadline
from rocketmq_spark.admin.groups import Positions
from rocketmq_spark.cli.connection import Target
from rocketmq_spark.errors import AccessDenied, BrokerError, NotSupported, OffsetError, RocketMQError, RouteNotFound
from rocketmq_spark.model import MessageQueue

if TYPE_CHECKING:
    from rocketmq_spark.session import Client
    from rocketmq_spark.spark.checkpoints.entries import Read


def own_group(target: Target, group: str) -> str:
    """The group's name in the environment of the command."""
    from rocketmq_spark.consumer.settings import isolated
    from rocketmq_spark.options import parse

    return isolated(parse({**target.settings(), "group": group}).for_role("pull consumer"))[1]


class Reached(NamedTuple):
    """The positions of a query: after its last finished ``batch``, or its start without one. ``under_way`` is the unfinished
    batch. Sources that read from other clusters (``elsewhere``) are not included.
    """

    batch: int | None
    positions: Positions
    under_way: Read | None
    elsewhere: Sequence[str] = ()


def of_checkpoint(target: Target, name: str, topics: Sequence[str]) -> tuple[Client, Reached]:
    """The positions of a checkpoint's query, and a client for its brokers.

    Raises ``OffsetError`` for a folder that is no checkpoint, and for topics that the query does not read.
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
    """The clusters of all registered brokers; empty without the right to ask, and for a Proxy, which does not report them."""
    try:
        return {data.cluster for data in client.routes.cluster().values()}
    except (AccessDenied, NotSupported):
        return set()


def waited_for(client: Client, read: Read) -> set[str]:
    """Brokers of the client's cluster that a batch reads and that do not answer."""
    here, _ = read.batch.within(clusters(client))
    return silent(client, {part.queue for part in read.ranges if part.queue in here.positions})


def left_out(elsewhere: Sequence[str]) -> str:
    """The note about sources of other clusters."""
    names = ", ".join(elsewhere)
    return (
        f"The query reads cluster {names}, too, which is not checked: to check it, give the name server of that cluster"
    )


def silent(client: Client, queues: Collection[MessageQueue]) -> set[str]:
    """The brokers of these queues that do not answer, or that are in no route."""
    away: set[str] = set()

    def note(error: RocketMQError, queue: MessageQueue) -> None:
        if not isinstance(error, BrokerError):
            away.add(queue.broker_name)

    for topic in {queue.topic for queue in queues}:
        with contextlib.suppress(RouteNotFound):
            client.routes.get(topic)
    client.brokers.bounds(queues, deadline(client), note)
    return away
