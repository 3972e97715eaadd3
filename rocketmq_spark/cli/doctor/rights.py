"""What brokers say to the questions of a source and to a message of a sink: whether a user has the rights."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from rocketmq_spark.admin import deadline
from rocketmq_spark.errors import AccessDenied, GroupNotFound, RocketMQError
from rocketmq_spark.model import MessageQueue, SendRequest, TopicRoute
from rocketmq_spark.model.admin import GROUP

if TYPE_CHECKING:
    from rocketmq_spark.session import Client


def to_read(client: Client, route: TopicRoute, queues: Sequence[MessageQueue], group: str) -> RocketMQError | None:
    """The worst answer of the brokers of these queues to a source."""
    return _worst(queues, lambda queue: _read(client, route, queue, group))


def to_write(client: Client, route: TopicRoute, queues: Sequence[MessageQueue]) -> RocketMQError | None:
    """The worst answer of the brokers of these queues to a sink."""
    return _worst(queues, lambda queue: _written(client, route, queue))


def _worst(queues: Sequence[MessageQueue], ask: Callable[[MessageQueue], RocketMQError | None]) -> RocketMQError | None:
    """What a queue of each broker led to, denials first: each broker has rights and groups of its own."""
    errors = [ask(queue) for queue in {queue.broker_name: queue for queue in queues}.values()]
    found = [error for error in errors if error is not None]
    return next((error for error in found if isinstance(error, AccessDenied)), found[0] if found else None)


def _read(client: Client, route: TopicRoute, queue: MessageQueue, group: str) -> RocketMQError | None:
    """What comes of the questions that a source asks: offsets, then messages as the group.

    Those of a queue that there is not: an operator's reset waits at a broker for the next pull of the group.
    """
    nowhere = queue._replace(queue_id=max(data.read_queues for data in route.queues) + 1_000)
    within = deadline(client)
    try:
        client.brokers.bounds([queue], within)
    except RocketMQError as e:
        return e
    try:
        client.brokers.sample(group, nowhere, 0, within)
    except RocketMQError as e:
        return e if isinstance(e, AccessDenied | GroupNotFound) or e.broker_code is None else None
    return None


def _written(client: Client, route: TopicRoute, queue: MessageQueue) -> RocketMQError | None:
    """What a broker says to a message for a queue that there is not, which it cannot store; rights are looked at before."""
    nowhere = queue._replace(queue_id=max(data.write_queues for data in route.queues) + 1_000)
    try:
        client.sender.send(nowhere, SendRequest(GROUP, b"x"), deadline(client))
    except AccessDenied as e:
        return e
    except RocketMQError as e:
        return None if e.broker_code is not None else e
    return None
