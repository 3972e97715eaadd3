"""Which topics and queues the options mean, out of what is there. Pure."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable

from rocketmq_spark.codes import DLQ_PREFIX, RETRY_PREFIX, Perm
from rocketmq_spark.errors import OptionError, RouteNotFound
from rocketmq_spark.model import MessageQueue, QueueData, TopicRoute
from rocketmq_spark.options import Options
from rocketmq_spark.source.positions import listed
from rocketmq_spark.wire import names

_SPECIAL = (RETRY_PREFIX, DLQ_PREFIX)


def matching(options: Options, topics: Iterable[str], internal: set[str]) -> tuple[str, ...]:
    """Topics of the pattern that are for users; ``internal`` are names that RocketMQ itself uses in this cluster."""
    matches = re.compile(options.subscribe_pattern or "").fullmatch
    return tuple(topic for topic in topics if matches(topic) and _is_for_users(options, topic, internal))


def _is_for_users(options: Options, topic: str, internal: set[str]) -> bool:
    return options.include_internal if topic.startswith(_SPECIAL) else names.is_user_topic(topic, internal)


def with_known(options: Options, topics: tuple[str, ...], known: Collection[str]) -> tuple[str, ...]:
    """With topics that have positions and are not listed any more: whether they are gone is to be found out."""
    unlisted = set(known) - set(topics)
    if not unlisted:
        return topics
    matches = re.compile(options.subscribe_pattern or "").fullmatch
    return (
        *topics,
        *sorted(t for t in unlisted if matches(t) and (options.include_internal or not t.startswith(_SPECIAL))),
    )


def readable(options: Options, route: TopicRoute, tolerant: bool) -> list[MessageQueue]:
    """The queues of a topic that are read. What is missing of them is an error, unless ``tolerant``."""
    if route.static:
        raise OptionError(
            f"topic {route.topic!r} is a static topic (logical queues mapped over brokers), which cannot be read",
            remedy="Name topics with ordinary queues",
        )
    queues = route.readable()
    if options.assign:
        mine = {queue for queue in options.assign if queue.topic == route.topic}
        absent = mine - set(queues)
        if absent and not tolerant:
            raise OptionError(f"option 'assign' names queues that do not exist: {listed(absent)}")
        queues = sorted(mine & set(queues))
    if not queues and not tolerant:
        raise RouteNotFound("no queue of the topic may be read: no read permission", remedy=f"Topic: {route.topic}")
    return queues


def _on_its_broker(route: TopicRoute | None, queue: MessageQueue) -> QueueData | None:
    """What the route says about queues of the broker that has this one."""
    if route is None:
        return None
    return next((data for data in route.queues if data.broker_name == queue.broker_name), None)


def is_hidden(route: TopicRoute | None, queue: MessageQueue) -> bool:
    """Whether its broker does not read the queue any more."""
    data = _on_its_broker(route, queue)
    return data is not None and queue.queue_id >= data.read_queues


def why_absent(route: TopicRoute | None, queue: MessageQueue) -> str:
    """Why a queue gives no bounds, as far as the route tells."""
    data = _on_its_broker(route, queue)
    if route is None or queue.broker_name not in route.brokers or data is None:
        return "the route does not name its broker"
    if not data.perm & Perm.READ:
        return "no read permission"
    if is_hidden(route, queue):
        return "its broker does not read it any more"
    if not route.brokers[queue.broker_name].master:
        return "its master is down, and the slave lacks messages"
    return "its broker does not answer, or the options do not choose it"
