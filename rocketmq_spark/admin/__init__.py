"""Administration of topics, groups, stored messages and brokers, for ``Admin`` and the commands.

The modules of the package share ``AdminTools`` and the functions of this module. ``AdminTools`` are the parts of a client
(``session.Client``) that send requests.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Protocol

from rocketmq_spark.base.clock import Deadline
from rocketmq_spark.client.admin import BaseAdmin, add_partial_result
from rocketmq_spark.client.committer import RemotingCommitter
from rocketmq_spark.client.offsets import RemotingOffsetReader
from rocketmq_spark.client.routes import Routes
from rocketmq_spark.client.rpc import RpcClient, error_from_response
from rocketmq_spark.errors import RocketMQError
from rocketmq_spark.model import MessageQueue, QueueBounds
from rocketmq_spark.model.admin import GROUP
from rocketmq_spark.wire.header import Command


class AdminTools(Protocol):
    """Parts of a client. All parts except ``rpc_client`` accept topics and groups as users name them. ``rpc_client`` accepts
    the names on the wire, which include the namespace.
    """

    @property
    def rpc_client(self) -> RpcClient:
        """Sends requests to addresses."""

    @property
    def routes(self) -> Routes:
        """Returns the routes of topics."""

    @property
    def offset_reader(self) -> RemotingOffsetReader:
        """Requests offsets of queues."""

    @property
    def committer(self) -> RemotingCommitter:
        """Commits offsets of groups."""

    @property
    def admin(self) -> BaseAdmin:
        """Sends requests to the masters of a cluster."""


def deadline(tools: AdminTools) -> Deadline:
    """Return the deadline of requests that are sent to all brokers in parallel."""
    return Deadline.after(tools.rpc_client.request_timeout_s)


def with_kept_minimums(
    tools: AdminTools,
    bounds: Mapping[MessageQueue, QueueBounds],
    positions: Mapping[MessageQueue, int | None] | None = None,
    on_error: Callable[[RocketMQError, MessageQueue], None] | None = None,
) -> dict[MessageQueue, QueueBounds]:
    """Return ``bounds`` with the real minimums of compaction topics. For such a topic, a broker keeps messages below the
    minimum that it reports.

    With the ``positions`` of a reader, a queue whose position is at or above the reported minimum is not checked. In a
    compaction topic, the returned minimum is never above the position, so messages that compaction has removed do not count as
    lost. With ``on_error``, queues whose minimum could not be determined are omitted; without ``on_error``, the error is
    raised.
    """
    failed_queues: set[MessageQueue] = set()
    known_positions = {queue: position for queue, position in (positions or {}).items() if position is not None}

    def on_failure(error: RocketMQError, queue: MessageQueue) -> None:
        if on_error is None:
            raise error
        failed_queues.add(queue)
        on_error(error, queue)

    queues_to_check = [
        queue for queue, reported_bounds in bounds.items() if known_positions.get(queue, 0) < reported_bounds.min_offset
    ]
    kept_offsets = (
        tools.offset_reader.first_kept_offsets(GROUP, queues_to_check, deadline(tools), on_failure)
        if queues_to_check
        else {}
    )
    minimums = {
        queue: min(offset, bounds[queue].min_offset, known_positions.get(queue, offset))
        for queue, offset in kept_offsets.items()
    }
    return {
        q: reported_bounds._replace(min_offset=minimums.get(q, reported_bounds.min_offset))
        for q, reported_bounds in bounds.items()
        if q not in failed_queues
    }


def request_each(
    tools: AdminTools,
    requests: Mapping[str, tuple[str, Command]],
    accepted_codes: Sequence[int],
    is_change: bool = False,
) -> Iterator[tuple[str, Command]]:
    """Send requests in parallel, and yield each answer with its key. ``requests`` has an address and a request for each key.

    Raises the first error. With ``is_change``, the requests change something, and the error lists the servers that have applied
    the change.
    """
    answers = tools.rpc_client.invoke_each(list(requests.values()), deadline(tools))
    outcomes = {
        key: error_from_response(answer, address)
        if isinstance(answer, Command) and answer.code not in accepted_codes
        else answer
        for (key, (address, _)), answer in zip(requests.items(), answers, strict=True)
    }
    errors = {key: outcome for key, outcome in outcomes.items() if isinstance(outcome, RocketMQError)}
    for key, outcome in outcomes.items():
        if isinstance(outcome, RocketMQError):
            if is_change:
                add_partial_result(outcome, [other for other in requests if other not in errors], errors)
            raise outcome
        yield key, outcome
