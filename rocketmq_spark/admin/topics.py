"""Administration of topics: list, describe, create, update, widen, shrink, delete.

A topic is configured on each master of a cluster. Functions that change a topic return when its route shows the change.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from rocketmq_spark.admin import AdminTools, request_each
from rocketmq_spark.base.codes import CLEANUP_POLICY, MESSAGE_TYPE, QUEUE_TYPE, Perm, Response, TopicType
from rocketmq_spark.client.admin import batch_attributes
from rocketmq_spark.client.routes import format_queue_counts, masters_of, require_brokers
from rocketmq_spark.errors import NotSupported, OptionError, RocketMQError, ServerFault
from rocketmq_spark.model import QueueData, TopicRoute
from rocketmq_spark.model.admin import TopicDescription, TopicOnBroker, TopicQueues, permission
from rocketmq_spark.wire import bodies, rpc
from rocketmq_spark.wire.names import is_user_topic, topic_problem


def names(tools: AdminTools, with_system_topics: bool = False) -> list[str]:
    """Return all topics, sorted. With ``with_system_topics``, includes RocketMQ's own topics, retry topics and dead-letter
    topics.
    """
    cluster = require_brokers(tools.admin.cluster())
    system_names = {*cluster, *(data.cluster for data in cluster.values())}
    return [name for name in tools.admin.topics() if with_system_topics or is_user_topic(name, system_names)]


def describe(tools: AdminTools, topic: str) -> TopicDescription:
    """Return the settings of a topic by broker, and the bounds of its queues. Raises ``RouteNotFound``, which suggests similar
    names, if the topic does not exist.
    """
    route = tools.admin.routes.get_existing(topic, 0.0)
    return TopicDescription(topic, _settings_by_broker(tools, route), tools.admin.describe_topic(topic))


def _settings_by_broker(tools: AdminTools, route: TopicRoute) -> dict[str, TopicOnBroker]:
    topic = route.topic
    masters = {name: data.master for name, data in sorted(route.brokers.items()) if data.master}
    requests = {
        name: (address, rpc.GET_TOPIC_CONFIG.request(topic=tools.rpc_client.name_on_wire(topic), bname=name))
        for name, address in masters.items()
    }
    data_by_broker = {data.broker_name: data for data in route.queues}
    brokers: dict[str, TopicOnBroker] = {}
    for name, answer in request_each(tools, requests, (Response.SUCCESS, Response.REQUEST_CODE_NOT_SUPPORTED)):
        if answer.code == Response.SUCCESS:
            brokers[name] = _settings_from_config(bodies.topic_config(answer.body))
        elif name in data_by_broker:  # the broker is older than 5.0, or a Proxy answers
            brokers[name] = _settings_from_route(data_by_broker[name], bool(route.order_conf))
    return brokers


def _settings_from_config(config: bodies.TopicConfig) -> TopicOnBroker:
    message_type = config.attributes.get(MESSAGE_TYPE, TopicType.NORMAL)
    return TopicOnBroker(
        config.read_queues, config.write_queues, permission(config.perm), message_type, config.order, config.attributes
    )


def _settings_from_route(data: QueueData, order: bool) -> TopicOnBroker:
    return TopicOnBroker(data.read_queues, data.write_queues, permission(data.perm), None, order, {})


def create(
    tools: AdminTools,
    topic: str,
    queues: int,
    brokers: Sequence[str] | None,
    attributes: Mapping[str, str],
    batch: bool = False,
) -> TopicQueues:
    """Create a topic on the masters of ``brokers`` (default: all). Raises ``OptionError`` if one of these brokers already has
    the topic.
    """
    all_attributes = batch_attributes(attributes) if batch else attributes
    if problem := topic_problem(topic, tools.rpc_client.scope):
        raise OptionError(problem)
    if existing_queues := tools.admin.queues_of(topic, brokers):
        raise OptionError(
            f"topic {topic} exists already; its queues: {format_queue_counts(existing_queues)}",
            remedy=f"Use it as it is. To change it: rocketmq-spark topic widen {topic} --queues N, or topic shrink; to create "
            "it on another broker, use --broker",
        )
    return _topic_queues(tools.admin.create_topic(topic, queues, brokers, attributes=all_attributes))


def widen(
    tools: AdminTools, topic: str, queues: int, brokers: Sequence[str] | None = None, argument_name: str = "queues"
) -> TopicQueues:
    """Add queues to a topic. ``argument_name`` is the name of ``queues`` in errors."""
    existing_queues = _existing_queues(tools, topic, brokers)
    _require_no_fewer_queues(topic, queues, existing_queues, argument_name)
    return _topic_queues(tools.admin.resize_topic(topic, queues, list(existing_queues)))


def shrink(
    tools: AdminTools,
    topic: str,
    queues: int,
    brokers: Sequence[str] | None = None,
    preview: bool = False,
    argument_name: str = "queues",
) -> TopicQueues:
    """Remove the queues with the highest ids. The messages in the removed queues cannot be read. The result has the number of
    these messages.

    With ``preview``, nothing is changed, and the result has the current queues of the topic.
    """
    existing_queues = _existing_queues(tools, topic, brokers)
    if any(min(data.read_queues, data.write_queues) < queues for data in existing_queues.values()):
        raise _wrong_direction_error(argument_name, topic, queues, existing_queues, "widen")
    bounds = tools.admin.describe_topic(topic)
    removed_bounds = [
        queue_bounds
        for queue, queue_bounds in bounds.items()
        if queue.broker_name in existing_queues and queue.queue_id >= queues
    ]
    hidden_count = sum(queue_bounds.max_offset - queue_bounds.min_offset for queue_bounds in removed_bounds)
    if preview:
        return TopicQueues(topic, existing_queues, hidden_count)
    return _topic_queues(tools.admin.resize_topic(topic, queues, list(existing_queues)), hidden_count)


# Permissions by the text that a user enters.
PERMISSIONS = {permission(bits): bits for bits in (Perm.READ | Perm.WRITE, Perm.READ, Perm.WRITE)}
# Attributes that cannot change after the creation of a topic, with their defaults.
_IMMUTABLE_ATTRIBUTES = {QUEUE_TYPE: "SimpleCQ", CLEANUP_POLICY: "DELETE"}


class TopicChange(NamedTuple):
    """Changes to a topic. Fields that are None, and attributes that are missing, do not change."""

    queues: int | None = None
    permission: str | None = None
    order: bool | None = None
    attributes: Mapping[str, str] = {}


def update(
    tools: AdminTools,
    topic: str,
    change: TopicChange,
    brokers: Sequence[str] | None = None,
    argument_name: str = "queues",
) -> TopicDescription:
    """Change a topic on the masters of ``brokers`` (default: all brokers that have the topic). The number of queues cannot
    decrease.

    Checks as much as possible before the first broker is changed, so that an invalid change is applied on no broker.
    """
    if not any(field is not None for field in change[:3]) and not change.attributes:
        raise OptionError("there is nothing to change; expected queues, a permission, an order or attributes")
    if change.permission not in (None, *PERMISSIONS):
        raise OptionError(f"permission is {change.permission!r}; expected {', '.join(PERMISSIONS)}")
    existing_queues = _existing_queues(tools, topic, brokers)
    _require_no_fewer_queues(topic, change.queues, existing_queues, argument_name)
    masters_of(
        tools.admin.cluster(), sorted(existing_queues)
    )  # raises an error for a broker whose master is not registered
    attributes = _new_attributes(tools, topic, change, existing_queues)
    configs = {
        name: _changed_config(tools.admin.topic_config(topic, name), change, attributes[name])
        for name in existing_queues
    }
    try:
        tools.admin.change_topic(topic, configs)
    except ServerFault as e:
        if not change.attributes:
            raise
        changed_attributes = ", ".join(f"{name}={value}" for name, value in change.attributes.items())
        text = f"a broker rejects {changed_attributes}"
        raise OptionError(text, e.addr, topic=topic, remark=e.remark, remedy=e.remedy) from e
    description = describe(tools, topic)
    if failed_brokers := sorted(
        name for name in configs if name in description.brokers and not _is_applied(description.brokers[name], change)
    ):
        raise RocketMQError(
            f"topic {topic} lacks the new settings on {', '.join(failed_brokers)}: another process changed it at the same time",
            remedy=f"Check its settings (rocketmq-spark topic describe {topic}), and try again",
        )
    return description


def _is_applied(settings: TopicOnBroker, change: TopicChange) -> bool:
    """Whether ``settings`` show the change. Attributes are not compared, because another process cannot overwrite them by
    accident: its request changes only the attributes that it names. For a broker before 5.0, only the number of queues is
    compared. This number comes from the route.
    """
    has_queues = change.queues in (None, settings.write_queues)
    is_old_broker = settings.message_type is None
    return has_queues and (
        is_old_broker or (change.permission in (None, settings.permission) and change.order in (None, settings.order))
    )


def _new_attributes(
    tools: AdminTools, topic: str, change: TopicChange, existing_queues: Mapping[str, QueueData]
) -> dict[str, dict[str, str]]:
    """Return by broker the attributes of the change that differ from the current ones. A broker rejects an immutable attribute,
    even with the same value.

    Raises ``NotSupported`` if the change has attributes or an order, and a broker is older than 5.0. Such a broker has no
    attributes, and immediately resets the order to the configuration of the name servers.
    """
    if not change.attributes and change.order is None:
        return {name: {} for name in existing_queues}
    settings = _settings_by_broker(tools, tools.admin.routes.get_existing(topic, 0.0))
    new_attributes: dict[str, dict[str, str]] = {}
    for name in existing_queues:
        if name not in settings or settings[name].message_type is None:
            reason = "has no attributes" if change.attributes else "reads the order from name servers"
            raise NotSupported(
                f"broker {name} is older than RocketMQ 5.0 and {reason}; nothing was changed",
                topic=topic,
                remedy=None if change.attributes else "Set the order at the name servers: mqadmin updateOrderConf",
            )
        current_attributes = {**_IMMUTABLE_ATTRIBUTES, **settings[name].attributes}
        new_attributes[name] = {
            key: value for key, value in change.attributes.items() if current_attributes.get(key) != value
        }
        if immutable_names := sorted(new_attributes[name].keys() & _IMMUTABLE_ATTRIBUTES):
            raise OptionError(
                f"attribute {immutable_names[0]!r} of topic {topic} is {current_attributes[immutable_names[0]]!r} and "
                "cannot be changed; nothing was changed",
                remedy="Create another topic with this attribute",
            )
    return new_attributes


def _changed_config(
    current_config: bodies.TopicConfig, change: TopicChange, attributes: Mapping[str, str]
) -> bodies.TopicConfig:
    perm = current_config.perm
    if change.permission is not None:
        perm = perm & ~(Perm.READ | Perm.WRITE) | PERMISSIONS[change.permission]
    return replace(
        current_config,
        read_queues=change.queues or current_config.read_queues,
        write_queues=change.queues or current_config.write_queues,
        perm=int(perm),
        order=current_config.order if change.order is None else change.order,
        attributes=attributes,
    )


def _existing_queues(tools: AdminTools, topic: str, brokers: Sequence[str] | None) -> dict[str, QueueData]:
    """Return the queues of a topic on ``brokers`` (default: all brokers that have the topic). Raises ``OptionError`` if one of
    ``brokers`` does not have the topic.
    """
    tools.admin.routes.get_existing(topic, 0.0)
    existing_queues = tools.admin.queues_of(topic, brokers)
    if missing_brokers := sorted(set(brokers or ()) - existing_queues.keys()):
        raise OptionError(
            f"topic {topic} is not on {', '.join(missing_brokers)}",
            remedy=f"Create the topic on this broker: rocketmq-spark topic create {topic} --broker {missing_brokers[0]}",
        )
    return existing_queues


def _require_no_fewer_queues(
    topic: str, queues: int | None, existing_queues: Mapping[str, QueueData], argument_name: str
) -> None:
    """Raise ``OptionError`` if the topic has more than ``queues`` queues on a broker."""
    if queues is not None and any(
        max(data.read_queues, data.write_queues) > queues for data in existing_queues.values()
    ):
        raise _wrong_direction_error(argument_name, topic, queues, existing_queues, "shrink")


def _wrong_direction_error(
    argument_name: str, topic: str, queues: int, existing_queues: Mapping[str, QueueData], command: str
) -> OptionError:
    comparison = "fewer than" if command == "shrink" else "more than"
    return OptionError(
        f"{argument_name} is {queues}, {comparison} topic {topic} has: {format_queue_counts(existing_queues)}",
        remedy=f"Use: rocketmq-spark topic {command}",
    )


def _topic_queues(route: TopicRoute, hidden_count: int = 0) -> TopicQueues:
    return TopicQueues(route.topic, {data.broker_name: data for data in route.queues}, hidden_count)


def delete(tools: AdminTools, topic: str) -> None:
    """Delete a topic with its messages. Raises ``RouteNotFound``, which suggests similar names, if the topic does not exist."""
    tools.admin.routes.get_existing(topic, 0.0)
    tools.admin.delete_topic(topic)
