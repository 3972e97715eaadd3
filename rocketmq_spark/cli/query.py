"""The query of a checkpoint, as brokers see it now: which queues it reads, where it continues, and which brokers it waits for."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, NamedTuple

from rocketmq_spark.cli.connection import Target
from rocketmq_spark.errors import (
    AccessDenied,
    BrokerError,
    NotSupported,
    OffsetError,
    RocketMQError,
    RouteNotFound,
)
from rocketmq_spark.model import MessageQueue

if TYPE_CHECKING:
    from rocketmq_spark.admin.groups import Positions
    from rocketmq_spark.session import Client
    from rocketmq_spark.spark.checkpoints.entries import LoggedBatch, Read


class QueryPositions(NamedTuple):
    """Where a query continues: after its last finished ``batch``, or at its start without one. ``under_way`` is the unfinished
    batch.

    ``new`` are the queues that no finished batch has planned: without a position, the query begins at their first message.
    ``errors`` say why it is unknown whether there are more of them. Sources of other clusters (``elsewhere``) are not included.
    """

    batch: int | None
    positions: Positions
    new: frozenset[MessageQueue]
    under_way: Read | None
    elsewhere: Sequence[str] = ()
    errors: Sequence[RocketMQError] = ()


def next_positions(target: Target, name: str, topics: Sequence[str]) -> tuple[Client, QueryPositions]:
    """The positions of a checkpoint's query, and a client for its brokers.

    Raises ``OffsetError`` for a folder that is no checkpoint, and for topics that the query does not read.
    """
    from rocketmq_spark.spark.checkpoints.entries import folder, last_batch, merged, under_way

    opened = folder(name)
    done = last_batch(opened)
    chosen = done or last_batch(opened, committed=False)
    if chosen is None:
        raise OffsetError(f"{name} has no batch yet", remedy="Wait for the first one")
    if not chosen.sources:
        raise OffsetError(f"batch {chosen.number} in {name} reads no RocketMQ topic", remedy="Name another query's")
    unfinished = under_way(opened)
    client = target.within(chosen.reads).client()
    names = clusters(client)
    here, elsewhere = chosen.within(names)
    new, errors = unplanned(client, here)
    starts: dict[MessageQueue, int] = {}
    if unfinished is not None:  # it has logged where it begins, also in sources that no finished batch has
        planned = unfinished.batch.within(names)[0].sources
        starts = merged(offsets.start for offsets in planned.values())
        new |= {queue for at, offsets in planned.items() if at not in here.sources for queue in offsets.start}
    positions: Positions = dict(here.positions)
    if done is None:
        positions = {queue: starts.get(queue) for queue in positions}
    positions |= {queue: starts.get(queue) for queue in new}
    known = sorted({queue.topic for queue in positions})
    if wrong := sorted(set(topics) - set(known)):
        raise OffsetError(
            f"the query of {name} does not read {', '.join(wrong)}", remedy=f"It reads: {', '.join(known)}"
        )
    mine = {q: at for q, at in positions.items() if not topics or q.topic in topics}
    number = None if done is None else done.number
    return client, QueryPositions(number, mine, frozenset(new & mine.keys()), unfinished, elsewhere, errors)


def unplanned(client: Client, batch: LoggedBatch) -> tuple[set[MessageQueue], list[RocketMQError]]:
    """The queues that the sources of a batch read in the next one, and that this one does not name: new queues, and those of
    new topics of a pattern. Also the errors because of which there may be more.
    """
    from rocketmq_spark.spark.source import filters

    new: set[MessageQueue] = set()
    errors: list[RocketMQError] = []
    for offsets in batch.sources.values():
        known = {queue.topic for queue in offsets.positions}
        matched: set[str] = set()
        if (pattern := filters.recorded_pattern(offsets.reads)) is not None:
            try:
                cluster = client.routes.cluster()
                internal = {*cluster, *(data.cluster for data in cluster.values())}
                matched = {*filters.matching(pattern, client.routes.topics(), internal)}
            except RocketMQError as e:
                errors.append(e)
        queues: list[MessageQueue] = []
        for topic in sorted(known | matched):
            try:
                queues += client.routes.existing(topic, 0.0).readable()
            except RouteNotFound as e:
                if topic in known:  # else it was deleted since topics were listed
                    errors.append(e)
        new |= {*filters.read_next(offsets, queues)} - offsets.positions.keys()
    return new, errors


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
    from rocketmq_spark.admin import deadline

    away: set[str] = set()

    def note(error: RocketMQError, queue: MessageQueue) -> None:
        if not isinstance(error, BrokerError):
            away.add(queue.broker_name)

    for topic in {queue.topic for queue in queues}:
        with contextlib.suppress(RouteNotFound):
            client.routes.get(topic)
    client.brokers.bounds(queues, deadline(client), note)
    return away
