"""The query of a checkpoint: which queues it reads next, from which positions, and which brokers it waits for."""

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
    from rocketmq_spark.spark.checkpoints.offset_log import BatchRead, LoggedBatch


class QueryPositions(NamedTuple):
    """The positions at which a query continues: after its last finished batch, which has ``finished_batch_number``, or at its
    start if no batch is finished.

    ``new_queues`` are the queues that no finished batch has planned. A new queue without a position is read from its first
    message. If there are ``errors``, ``new_queues`` may be incomplete. ``other_clusters`` are the clusters whose sources are not
    included.
    """

    finished_batch_number: int | None
    positions: Positions
    new_queues: frozenset[MessageQueue]
    unfinished_batch: BatchRead | None
    other_clusters: Sequence[str] = ()
    errors: Sequence[RocketMQError] = ()


def next_positions(target: Target, name: str, topics: Sequence[str]) -> tuple[Client, QueryPositions]:
    """Return the positions of a checkpoint's query, and a client for its brokers.

    Raises ``OffsetError`` for a folder that is no checkpoint, and for topics that the query does not read.
    """
    from rocketmq_spark.spark.checkpoints.files import open_folder
    from rocketmq_spark.spark.checkpoints.offset_log import last_batch, lowest_positions, uncommitted_batch
    from rocketmq_spark.spark.source import checkpoint_identity

    checkpoint_folder = open_folder(name)
    last_finished_batch = last_batch(checkpoint_folder)
    batch = last_finished_batch or last_batch(checkpoint_folder, committed=False)
    if batch is None:
        raise OffsetError(f"{name} has no batch yet", remedy="Wait for the first batch")
    if not batch.sources:
        raise OffsetError(
            f"batch {batch.number} in {name} reads no RocketMQ topic", remedy="Name the checkpoint of another query"
        )
    unfinished_batch = uncommitted_batch(checkpoint_folder)
    client = target.in_checkpoint_scope(batch.source_identities).client()
    cluster_names = clusters(client)
    batch_here, other_clusters = batch.batch_of_clusters(cluster_names)
    new_queues, errors = unplanned_queues(client, batch_here)
    start_offsets: dict[MessageQueue, int] = {}
    if unfinished_batch is not None:  # the log of this batch also has the start offsets of new sources
        planned_sources = unfinished_batch.batch.batch_of_clusters(cluster_names)[0].sources
        start_offsets = lowest_positions(offsets.new_queue_starts for offsets in planned_sources.values())
        new_queues |= {
            queue
            for number, offsets in planned_sources.items()
            if number not in batch_here.sources
            for queue in offsets.new_queue_starts
        }
    positions: Positions = dict(batch_here.positions)
    if last_finished_batch is None:
        positions = {queue: start_offsets.get(queue) for queue in positions}
    positions |= {queue: start_offsets.get(queue) for queue in new_queues}
    recorded_topics = {
        topic for identity in batch_here.source_identities for topic in checkpoint_identity.recorded_topics(identity)
    }
    read_topics = sorted({queue.topic for queue in positions} | recorded_topics)
    if unread_topics := sorted(set(topics) - set(read_topics)):
        raise OffsetError(
            f"the query of {name} does not read {', '.join(unread_topics)}",
            remedy=f"It reads: {', '.join(read_topics)}",
        )
    chosen_positions = {queue: position for queue, position in positions.items() if not topics or queue.topic in topics}
    chosen_new_queues = frozenset(new_queues & chosen_positions.keys())
    number = None if last_finished_batch is None else last_finished_batch.number
    return client, QueryPositions(number, chosen_positions, chosen_new_queues, unfinished_batch, other_clusters, errors)


def unplanned_queues(client: Client, batch: LoggedBatch) -> tuple[set[MessageQueue], list[RocketMQError]]:
    """Return the queues that the next batch reads in addition to those of ``batch``: new queues, queues of topics that were
    deleted and created again, and queues of new topics that match a pattern. Also returns errors; if there are errors, queues
    may be missing in the result.
    """
    from rocketmq_spark.spark.source import checkpoint_identity, subscription

    new_queues: set[MessageQueue] = set()
    errors: list[RocketMQError] = []
    for offsets in batch.sources.values():
        known_topics = {queue.topic for queue in offsets.positions}
        topics = checkpoint_identity.recorded_topics(offsets.source_identity)
        if (pattern := checkpoint_identity.recorded_pattern(offsets.source_identity)) is not None:
            try:
                cluster = client.routes.cluster()
                internal_names = {*cluster, *(data.cluster for data in cluster.values())}
                topics |= {*subscription.matching_topics(pattern, client.routes.topics(), internal_names)}
            except RocketMQError as e:
                errors.append(e)
        queues: list[MessageQueue] = []
        for topic in sorted(known_topics | topics):
            try:
                queues += client.routes.get_existing(topic, 0.0).readable_queues()
            except RouteNotFound as e:
                # A missing topic that was never read is no error: it was deleted after the name server listed it, or its loss was
                # accepted.
                if topic in known_topics:
                    errors.append(e)
        new_queues |= {*checkpoint_identity.queues_of_next_batch(offsets, queues)} - offsets.positions.keys()
    return new_queues, errors


def clusters(client: Client) -> set[str]:
    """Return the clusters of all registered brokers. Returns an empty set if the user lacks the permission, or at a Proxy,
    because a Proxy does not report clusters.
    """
    try:
        return {data.cluster for data in client.routes.cluster().values()}
    except (AccessDenied, NotSupported):
        return set()


def silent_brokers_of(client: Client, batch_read: BatchRead) -> set[str]:
    """Return the brokers from which a batch reads and which do not answer. Only brokers of the client's cluster are checked."""
    batch_here, _ = batch_read.batch.batch_of_clusters(clusters(client))
    return silent_brokers(client, {part.queue for part in batch_read.ranges if part.queue in batch_here.positions})


def other_clusters_note(other_clusters: Sequence[str]) -> str:
    """Return the note about sources of other clusters."""
    names = ", ".join(other_clusters)
    return (
        f"The query reads cluster {names}, too, which is not checked: to check it, give the name server of that cluster"
    )


def silent_brokers(client: Client, queues: Collection[MessageQueue]) -> set[str]:
    """Return the brokers of these queues that do not answer, or that are in no route."""
    from rocketmq_spark.admin import deadline

    silent_names: set[str] = set()

    def note_error(error: RocketMQError, queue: MessageQueue) -> None:
        if not isinstance(error, BrokerError):
            silent_names.add(queue.broker_name)

    for topic in {queue.topic for queue in queues}:
        with contextlib.suppress(RouteNotFound):
            client.routes.get(topic)
    client.offset_reader.bounds(queues, deadline(client), note_error)
    return silent_names
