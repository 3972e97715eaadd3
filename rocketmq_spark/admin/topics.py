"""Topics: list, describe, create, update, widen, shrink, delete.

A topic belongs to the masters of a cluster. Functions that change it return when the route shows the change.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from rocketmq_spark.admin import AdminTools, ask_each
from rocketmq_spark.base.codes import CLEANUP_POLICY, MESSAGE_TYPE, QUEUE_TYPE, Perm, Response, TopicType
from rocketmq_spark.client.admin import batch_attributes
from rocketmq_spark.client.routes import format_queue_counts, masters_of, require_brokers
from rocketmq_spark.errors import NotSupported, OptionError, RocketMQError, ServerFault
from rocketmq_spark.model import QueueData, TopicRoute
from rocketmq_spark.model.admin import TopicDescription, TopicOnBroker, TopicQueues, permission
from rocketmq_spark.wire import bodies, rpc
from rocketmq_spark.wire.names import is_user_topic, topic_problem


def names(tools: AdminTools, system: bool = False) -> list[str]:
    """All topics, sorted; RocketMQ's own, retry and dead-letter topics too if ``system``."""
    cluster = require_brokers(tools.admin.cluster())
    own = {*cluster, *(data.cluster for data in cluster.values())}
    return [name for name in tools.admin.topics() if system or is_user_topic(name, own)]


def describe(tools: AdminTools, topic: str) -> TopicDescription:
    """How brokers keep a topic, and what its queues have. Raises ``RouteNotFound`` with the nearest names."""
    route = tools.admin.routes.get_existing(topic, 0.0)
    return TopicDescription(topic, _on_brokers(tools, route), tools.admin.describe_topic(topic))


def _on_brokers(tools: AdminTools, route: TopicRoute) -> dict[str, TopicOnBroker]:
    topic = route.topic
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
    return brokers


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
    if problem := topic_problem(topic, tools.calls.scope):
        raise OptionError(problem)
    if there := tools.admin.queues_of(topic, brokers):
        raise OptionError(
            f"topic {topic} exists already; its queues: {format_queue_counts(there)}",
            remedy=f"Use it as it is. To change it: rocketmq-spark topic widen {topic} --queues N, or topic shrink; to create "
            "it on another broker, use --broker",
        )
    return _queues(tools.admin.create_topic(topic, queues, brokers, attributes=given))


def widen(
    tools: AdminTools, topic: str, queues: int, brokers: Sequence[str] | None = None, named: str = "queues"
) -> TopicQueues:
    """Give a topic more queues. ``named`` is the name of ``queues`` in errors."""
    there = _there(tools, topic, brokers)
    _check_queues(topic, queues, there, named)
    return _queues(tools.admin.resize_topic(topic, queues, list(there)))


def shrink(
    tools: AdminTools,
    topic: str,
    queues: int,
    brokers: Sequence[str] | None = None,
    preview: bool = False,
    named: str = "queues",
) -> TopicQueues:
    """Remove the queues with the highest ids; the result has the number of messages that cannot be read then.

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


# As which text a user gives a permission.
PERMISSIONS = {permission(bits): bits for bits in (Perm.READ | Perm.WRITE, Perm.READ, Perm.WRITE)}
# Attributes that a topic has from its creation on, and what it has without them.
_FIXED = {QUEUE_TYPE: "SimpleCQ", CLEANUP_POLICY: "DELETE"}


class TopicChange(NamedTuple):
    """Changes to a topic. Fields that are None, and attributes that are not named, stay as they are."""

    queues: int | None = None
    permission: str | None = None
    order: bool | None = None
    attributes: Mapping[str, str] = {}


def update(
    tools: AdminTools,
    topic: str,
    change: TopicChange,
    brokers: Sequence[str] | None = None,
    named: str = "queues",
) -> TopicDescription:
    """Change a topic on the masters of ``brokers`` (default: all that have it); it gets no fewer queues.

    Everything that can be checked is checked first, so that a refused change has changed nothing on any broker.
    """
    if not any(wanted is not None for wanted in change[:3]) and not change.attributes:
        raise OptionError("there is nothing to change; expected queues, a permission, an order or attributes")
    if change.permission not in (None, *PERMISSIONS):
        raise OptionError(f"permission is {change.permission!r}; expected {', '.join(PERMISSIONS)}")
    there = _there(tools, topic, brokers)
    _check_queues(topic, change.queues, there, named)
    masters_of(tools.admin.cluster(), sorted(there))  # of a broker whose master is away it is not known what it has
    attributes = _new_attributes(tools, topic, change, there)
    configs = {name: _changed(tools.admin.topic_config(topic, name), change, attributes[name]) for name in there}
    try:
        tools.admin.change_topic(topic, configs)
    except ServerFault as e:
        if not change.attributes:
            raise
        asked = ", ".join(f"{name}={value}" for name, value in change.attributes.items())
        said = f"a broker does not take {asked}"
        raise OptionError(said, e.addr, topic=topic, remark=e.remark, remedy=e.remedy) from e
    after = describe(tools, topic)
    if lost := sorted(name for name in configs if name in after.brokers and not _has(after.brokers[name], change)):
        raise RocketMQError(
            f"topic {topic} lacks the new settings on {', '.join(lost)}: another process changed it at the same time",
            remedy=f"Check its settings (rocketmq-spark topic describe {topic}), and try again",
        )
    return after


def _has(kept: TopicOnBroker, change: TopicChange) -> bool:
    """But for attributes: a change puts back all the rest of a topic. Of an old broker it is known what routes show alone."""
    queues = change.queues in (None, kept.write_queues)
    old = kept.message_type is None
    return queues and (old or (change.permission in (None, kept.permission) and change.order in (None, kept.order)))


def _new_attributes(
    tools: AdminTools, topic: str, change: TopicChange, there: Mapping[str, QueueData]
) -> dict[str, dict[str, str]]:
    """What each broker lacks of the attributes. Brokers take none again that stays for ever, though its value be the same.

    Those before 5.0 have none, and put the order back to what name servers say at once.
    """
    if not change.attributes and change.order is None:
        return {name: {} for name in there}
    kept = _on_brokers(tools, tools.admin.routes.get_existing(topic, 0.0))
    found: dict[str, dict[str, str]] = {}
    for name in there:
        if name not in kept or kept[name].message_type is None:
            lacks = "has no attributes" if change.attributes else "takes the order from name servers"
            raise NotSupported(
                f"broker {name} is older than RocketMQ 5.0 and {lacks}; nothing was changed",
                topic=topic,
                remedy=None if change.attributes else "Set it there: mqadmin updateOrderConf",
            )
        now = {**_FIXED, **kept[name].attributes}
        found[name] = {key: value for key, value in change.attributes.items() if now.get(key) != value}
        if fixed := sorted(found[name].keys() & _FIXED):
            raise OptionError(
                f"attribute {fixed[0]!r} of topic {topic} is {now[fixed[0]]!r} and cannot be changed; nothing was changed",
                remedy="Create another topic with it",
            )
    return found


def _changed(now: bodies.TopicConfig, change: TopicChange, attributes: Mapping[str, str]) -> bodies.TopicConfig:
    perm = now.perm
    if change.permission is not None:
        perm = perm & ~(Perm.READ | Perm.WRITE) | PERMISSIONS[change.permission]
    return replace(
        now,
        read_queues=change.queues or now.read_queues,
        write_queues=change.queues or now.write_queues,
        perm=int(perm),
        order=now.order if change.order is None else change.order,
        attributes=attributes,
    )


def _there(tools: AdminTools, topic: str, brokers: Sequence[str] | None) -> dict[str, QueueData]:
    """What a topic has on the brokers that are named. Raises an error where it is not."""
    tools.admin.routes.get_existing(topic, 0.0)
    there = tools.admin.queues_of(topic, brokers)
    if missing := sorted(set(brokers or ()) - there.keys()):
        raise OptionError(
            f"topic {topic} is not on {', '.join(missing)}",
            remedy=f"Create it there: rocketmq-spark topic create {topic} --broker {missing[0]}",
        )
    return there


def _check_queues(topic: str, queues: int | None, there: Mapping[str, QueueData], named: str) -> None:
    """That there are no fewer than a topic has."""
    if queues is not None and any(max(data.read_queues, data.write_queues) > queues for data in there.values()):
        raise _wrong_way(named, topic, queues, there, "shrink")


def _wrong_way(named: str, topic: str, queues: int, there: Mapping[str, QueueData], other: str) -> OptionError:
    more = "fewer than" if other == "shrink" else "more than"
    return OptionError(
        f"{named} is {queues}, {more} topic {topic} has: {format_queue_counts(there)}",
        remedy=f"Use: rocketmq-spark topic {other}",
    )


def _queues(route: TopicRoute, hidden: int = 0) -> TopicQueues:
    return TopicQueues(route.topic, {data.broker_name: data for data in route.queues}, hidden)


def delete(tools: AdminTools, topic: str) -> None:
    """Delete a topic with its messages. Raises ``RouteNotFound`` with the nearest names."""
    tools.admin.routes.get_existing(topic, 0.0)
    tools.admin.delete_topic(topic)
