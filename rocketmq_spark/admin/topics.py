"""Topics: list, describe, create, widen, shrink; and their stored messages by ids and keys.

A topic is of the masters of a cluster, and a change of it ends when the route shows it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from rocketmq_spark.admin.tools import AdminTools, ask_each
from rocketmq_spark.base.codes import MESSAGE_TYPE, Response, TopicType
from rocketmq_spark.client.admin import batch_attributes, shown_queues
from rocketmq_spark.client.groups import own
from rocketmq_spark.errors import LocalProtocolError, NotFound, OptionError
from rocketmq_spark.model import QueueData, ReceivedMessage, TopicRoute
from rocketmq_spark.model.admin import TopicDescription, TopicOnBroker, TopicQueues, permission
from rocketmq_spark.wire import bodies, rpc
from rocketmq_spark.wire.identifiers import OffsetMessageId
from rocketmq_spark.wire.messages import decode_leniently
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


# A broker gives 32 to a question unless it is configured to give more, and 64 at most (maxMsgsNumBatch).
MOST = 64
_EVER_MS = (1 << 63) - 1


class IndexSearch(NamedTuple):
    """What the index of a broker is asked for; ``unique``: an id that a producer gave."""

    key: str
    begin_ms: int
    end_ms: int
    limit: int
    unique: bool = False


def message_by_id(tools: AdminTools, message_id: str, topic: str | None = None) -> ReceivedMessage:
    """The message with an id: an offset message id, or with ``topic`` also the id that its producer gave it.

    Both have the same form. An offset message id names a broker's address, so one that names none of this cluster's is
    taken for a producer's. Raises ``NotFound``. Mirrors ``DefaultMQAdminExtImpl.queryMessage``.
    """
    place = _place(message_id)
    at = None if place is None else _broker_at(tools, place.host)
    if place is not None and at is not None:
        message = _at(tools, at, place, topic)
        if message is not None and (topic is None or topic in (message.topic, message.queue.topic)):
            return message
    if topic is None:
        if at is not None:
            raise _not_found(message_id)
        raise NotFound(
            f"id {message_id} is not of a message of these brokers",
            remedy="For an id that its producer gave, give the topic, too; an offset message id names one of the brokers",
        )
    search = IndexSearch(message_id, 0, _EVER_MS, MOST, True)
    found = [m for m in _indexed(tools, topic, search) if m.msg_id == message_id]
    if not found:
        raise _not_found(message_id, topic)
    return min(found, key=lambda message: message.store_timestamp)


def messages_by_key(
    tools: AdminTools, topic: str, key: str, begin_ms: int | None = None, end_ms: int | None = None, limit: int = 32
) -> list[ReceivedMessage]:
    """Messages of a topic with a business key, or whose producer gave them this id, as they were stored.

    The newest ``limit`` of each broker, stored from ``begin_ms`` to ``end_ms``.
    """
    if not 0 < limit <= MOST:
        raise OptionError(f"limit is {limit}; expected 1 to {MOST}, what a broker gives to one question")
    search = IndexSearch(key, begin_ms or 0, _EVER_MS if end_ms is None else end_ms, limit)
    # What an index finds has the hash of the key.
    return [m for m in _indexed(tools, topic, search) if key in m.keys or key == m.msg_id]


def _place(message_id: str) -> OffsetMessageId | None:
    try:
        return OffsetMessageId.parse(message_id)
    except LocalProtocolError:
        return None


def _broker_at(tools: AdminTools, host: str) -> str | None:
    """The name of the broker at an address; only those of the cluster are asked."""
    for name, data in tools.admin.cluster().items():
        if host in data.addresses.values():
            return name
    return None


def _at(tools: AdminTools, broker: str, place: OffsetMessageId, topic: str | None) -> ReceivedMessage | None:
    on_wire = None if topic is None else tools.calls.on_wire(topic)
    command = rpc.VIEW_MESSAGE_BY_ID.request(offset=place.offset, topic=on_wire, bname=broker)
    # "can not find message by the offset": code 1
    answer = tools.calls.ask(place.host, command, accept=(Response.SUCCESS, Response.SYSTEM_ERROR))
    if answer.code != Response.SUCCESS:
        return None
    # What a broker reads in the midst of a message is anything.
    found = [m for m in decode_leniently(answer.body, broker) if m.commit_log_offset == place.offset]
    return own(found[0], tools.calls.scope) if found else None


def _indexed(tools: AdminTools, topic: str, search: IndexSearch) -> list[ReceivedMessage]:
    """What the indexes of the topic's masters have, in the order of storing. Where a master is away its slave is asked."""
    route = tools.admin.routes.existing(topic, 0.0)
    asked = {
        name: (
            address,
            rpc.QUERY_MESSAGE.request(
                topic=tools.calls.on_wire(topic),
                key=search.key,
                maxNum=search.limit,
                beginTimestamp=search.begin_ms,
                endTimestamp=search.end_ms,
                _UNIQUE_KEY_QUERY=search.unique or None,
                bname=name,
            ),
        )
        for name, data in sorted(route.brokers.items())
        if (address := data.replica("hint"))
    }
    found: list[ReceivedMessage] = []
    for name, answer in ask_each(tools, asked, (Response.SUCCESS, Response.QUERY_NOT_FOUND)):
        if answer.code == Response.SUCCESS:
            found += (own(message, tools.calls.scope) for message in decode_leniently(answer.body, name))
    return sorted(found, key=lambda message: (message.store_timestamp, message.queue, message.queue_offset))


def _not_found(message_id: str, topic: str | None = None) -> NotFound:
    return NotFound(f"there is no message with id {message_id}", topic=topic)
