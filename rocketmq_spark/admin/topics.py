"""Topics: list, describe, create, widen, shrink. Each is of the masters of a cluster, and ends when the route shows it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rocketmq_spark.admin.tools import AdminTools, ask_each
from rocketmq_spark.base.codes import MESSAGE_TYPE, Response, TopicType
from rocketmq_spark.client.admin import batch_attributes, shown_queues
from rocketmq_spark.errors import OptionError
from rocketmq_spark.model import QueueData, TopicRoute
from rocketmq_spark.model.admin import TopicDescription, TopicOnBroker, TopicQueues, permission
from rocketmq_spark.wire import bodies, rpc
from rocketmq_spark.wire.names import is_user_topic


def names(tools: AdminTools, system: bool = False) -> list[str]:
    """All topics, sorted; RocketMQ's own, retry and dead-letter topics too if ``system``."""
    cluster = tools.admin.cluster()
    own = {*cluster, *(data.cluster for data in cluster.values())}
    return [name for name in tools.admin.topics() if system or is_user_topic(name, own)]


def describe(tools: AdminTools, topic: str) -> TopicDescription:
    """How brokers keep a topic, and what its queues have. Raises ``RouteNotFound`` with the nearest names."""
    route = tools.admin.routes.existing(topic, 0.0)
    masters = {name: data.master for name, data in sorted(route.brokers.items()) if data.master}
    asked = {
        name: (address, rpc.GET_TOPIC_CONFIG.request(topic=tools.calls.on_wire(topic), bname=name))
        for name, address in masters.items()
    }
    by_route = {data.broker_name: data for data in route.queues}
    brokers: dict[str, TopicOnBroker] = {}
    for name, answer in ask_each(tools, asked, (Response.SUCCESS, Response.REQUEST_CODE_NOT_SUPPORTED)):
        if answer.code == Response.SUCCESS:
            brokers[name] = _kept(bodies.topic_config(answer.body))
        elif name in by_route:  # a broker before 5.0, or a Proxy
            brokers[name] = _routed(by_route[name], bool(route.order_conf))
    return TopicDescription(topic, brokers, tools.admin.describe_topic(topic))


def _kept(config: bodies.TopicConfig) -> TopicOnBroker:
    kind = config.attributes.get(MESSAGE_TYPE, TopicType.NORMAL)
    return TopicOnBroker(
        config.read_queues, config.write_queues, permission(config.perm), kind, config.order, config.attributes
    )


def _routed(data: QueueData, order: bool) -> TopicOnBroker:
    return TopicOnBroker(data.read_queues, data.write_queues, permission(data.perm), None, order, {})


def create(
    tools: AdminTools,
    topic: str,
    queues: int,
    brokers: Sequence[str] | None,
    attributes: Mapping[str, str],
    batch: bool = False,
) -> TopicQueues:
    """Create a topic on the masters of ``brokers`` (default: all). Raises ``OptionError`` if it is on one of them."""
    given = batch_attributes(attributes) if batch else attributes
    if there := tools.admin.queues_of(topic, brokers):
        raise OptionError(
            f"topic {topic} is there: it has {shown_queues(there)}",
            remedy=f"To change that: rocketmq-spark topic widen {topic} --queues N, or topic shrink; to create it on another "
            "broker, name that with --broker",
        )
    return _queues(tools.admin.create_topic(topic, queues, brokers, attributes=given))


def widen(
    tools: AdminTools, topic: str, queues: int, brokers: Sequence[str] | None = None, named: str = "queues"
) -> TopicQueues:
    """Give a topic more queues. ``named`` is what errors call their number."""
    there = _there(tools, topic, brokers)
    if any(max(data.read_queues, data.write_queues) > queues for data in there.values()):
        raise _wrong_way(named, topic, queues, there, "shrink")
    return _queues(tools.admin.resize_topic(topic, queues, list(there)))


def shrink(
    tools: AdminTools,
    topic: str,
    queues: int,
    brokers: Sequence[str] | None = None,
    preview: bool = False,
    named: str = "queues",
) -> TopicQueues:
    """Take the queues with the highest ids away; the result says how many messages go out of sight with them.

    With ``preview`` nothing is changed, and the result has the queues that the topic has now.
    """
    there = _there(tools, topic, brokers)
    if any(min(data.read_queues, data.write_queues) < queues for data in there.values()):
        raise _wrong_way(named, topic, queues, there, "widen")
    bounds = tools.admin.describe_topic(topic)
    gone = [b for q, b in bounds.items() if q.broker_name in there and q.queue_id >= queues]
    hidden = sum(b.max_offset - b.min_offset for b in gone)
    if preview:
        return TopicQueues(topic, there, hidden)
    return _queues(tools.admin.resize_topic(topic, queues, list(there)), hidden)


def _there(tools: AdminTools, topic: str, brokers: Sequence[str] | None) -> dict[str, QueueData]:
    """What a topic has on the brokers that are named. Raises an error where it is not."""
    tools.admin.routes.existing(topic, 0.0)
    there = tools.admin.queues_of(topic, brokers)
    if missing := sorted(set(brokers or ()) - there.keys()):
        raise OptionError(
            f"topic {topic} is not on {', '.join(missing)}",
            remedy=f"Create it there: rocketmq-spark topic create {topic} --broker {missing[0]}",
        )
    return there


def _wrong_way(named: str, topic: str, queues: int, there: Mapping[str, QueueData], other: str) -> OptionError:
    more = "fewer than" if other == "shrink" else "more than"
    return OptionError(
        f"{named} is {queues}, {more} topic {topic} has: {shown_queues(there)}",
        remedy=f"That is for: rocketmq-spark topic {other}",
    )


def _queues(route: TopicRoute, hidden: int = 0) -> TopicQueues:
    return TopicQueues(route.topic, {data.broker_name: data for data in route.queues}, hidden)


def delete(tools: AdminTools, topic: str) -> None:
    """Delete a topic with its messages. Raises ``RouteNotFound`` with the nearest names."""
    tools.admin.routes.existing(topic, 0.0)
    tools.admin.delete_topic(topic)
