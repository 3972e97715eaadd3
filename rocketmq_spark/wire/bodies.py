"""JSON and text bodies of requests and answers, as values of the domain.

Decoders accept missing and additional fields, because servers of many releases answer. A value of the wrong type raises
``RemoteProtocolError``. Nothing here knows which request a body belongs to.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from rocketmq_spark.base.codes import (
    MAX_INT,
    MAX_JSON_BYTES,
    MAX_QUEUES,
    MAX_RETRY_OR_DLQ_TOPIC_LENGTH,
    MAX_TABLE_BYTES,
    VERSION,
    Perm,
)
from rocketmq_spark.errors import LocalProtocolError, RemoteProtocolError
from rocketmq_spark.model import BrokerData, Filter, MessageQueue, QueueBounds, QueueData, TopicRoute
from rocketmq_spark.model.admin import GroupConnection, GroupOnline
from rocketmq_spark.model.membership import DirectResult, QueueInfo, RunningInfo, TopicFigures
from rocketmq_spark.wire.header import Bytes
from rocketmq_spark.wire.loose_json import read_json
from rocketmq_spark.wire.properties import Subscription


@dataclass(frozen=True, slots=True)
class Cluster:
    """All brokers that are registered with a name server, and the brokers of each cluster."""

    brokers: Mapping[str, BrokerData]
    clusters: Mapping[str, tuple[str, ...]]


@dataclass(frozen=True, slots=True)
class ConsumeProgress:
    """A group's position in one queue; ``last_timestamp_ms`` is the store time of the last consumed message."""

    broker_offset: int
    consumer_offset: int
    pull_offset: int
    last_timestamp_ms: int


@dataclass(frozen=True, slots=True)
class TopicConfig:
    """The configuration of a topic on one broker. Message type, queue type and clean-up policy are attributes."""

    topic: str
    read_queues: int
    write_queues: int
    perm: int
    filter_type: str
    sys_flag: int
    order: bool
    attributes: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class GroupMembership:
    """The consumer data of a heartbeat."""

    group: str
    subscriptions: Mapping[str, Subscription]
    consume_type: str = "CONSUME_PASSIVELY"
    message_model: str = "CLUSTERING"
    consume_from_where: str = "CONSUME_FROM_LAST_OFFSET"
    unit_mode: bool = False
    versions_ms: Mapping[str, int] = field(default_factory=dict)
    expression_types: Mapping[str, str] = field(default_factory=dict)

    def with_names_on_wire(self, to_wire_name: Callable[[str], str]) -> GroupMembership:
        """The same membership with topic names as they are on the wire."""
        return replace(
            self,
            subscriptions={to_wire_name(topic): subscription for topic, subscription in self.subscriptions.items()},
            versions_ms={to_wire_name(topic): version for topic, version in self.versions_ms.items()},
            expression_types={to_wire_name(topic): kind for topic, kind in self.expression_types.items()},
        )


def _checked_int(value: Any, minimum: int = -(1 << 63), maximum: int = (1 << 63) - 1) -> int:
    """A whole number of a body. Raises ``ValueError`` for a number outside the range, because callers must not act on it."""
    number = int(value)
    if not minimum <= number <= maximum or (isinstance(value, float) and number != value):
        raise ValueError(f"{str(value)[:40]} is no whole number from {minimum} to {maximum}")
    return number


# Maximum numbers of characters: ``MAX_NAME`` for names of brokers, clusters, topics and groups; ``MAX_ADDRESS`` for addresses
# (host names have at most 253); ``_MAX_TEXT`` for ids of clients and attributes of topics; ``_MAX_ORDER_CONF`` for the queues of
# an ordered topic. Other strings are limited only by the size of the body.
MAX_NAME, MAX_ADDRESS, _MAX_TEXT, _MAX_ORDER_CONF = MAX_RETRY_OR_DLQ_TOPIC_LENGTH, 300, 4096, 1 << 20
_MAX_ATTRIBUTES = 100


def _checked_text(value: Any, maximum: int = MAX_JSON_BYTES) -> str:
    """Returns a text of a body. Raises ``ValueError`` for a text of more than ``maximum`` characters, or a value of another
    type.
    """
    if not isinstance(value, str) or len(value) > maximum:
        description = f"a text of {len(value)} characters" if isinstance(value, str) else f"{str(value)[:40]!r}"
        raise ValueError(f"{description}, expected a text of at most {maximum} characters")
    return value


@contextmanager
def _protocol_errors(subject: str) -> Iterator[None]:
    try:
        yield
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as exc:
        raise RemoteProtocolError(f"Unexpected {subject}: {type(exc).__name__} {exc}") from exc


# Maximum numbers of brokers and addresses in one answer. The numbers are limited, because clients keep all brokers and addresses.
MAX_ROUTE_BROKERS, _MAX_ADDRESSES = 4096, 16_384


def route(topic: str, body: Bytes) -> TopicRoute:
    """Answer to GET_ROUTEINFO_BY_TOPIC. The answer may have queues without their broker, and brokers without queues; the
    methods of the route omit both.

    ``has_acting_master`` of a broker means that a slave may be acting as master. ``has_acting_master`` is also true if the topic
    has no write permission, because the answer is the same in both cases.
    """
    with _protocol_errors("route"):
        data = read_json(body)
        _check_brokers("queueDatas", data.get("queueDatas") or ())
        _check_brokers("brokerDatas", data.get("brokerDatas") or ())
        queues = tuple(
            QueueData(
                broker_name=_checked_text(item["brokerName"], MAX_NAME),
                read_queues=_checked_int(item["readQueueNums"], 0, MAX_QUEUES),
                write_queues=_checked_int(item["writeQueueNums"], 0, MAX_QUEUES),
                perm=_checked_int(item["perm"]),
                topic_sys_flag=_checked_int(item.get("topicSysFlag") or 0),
            )
            for item in data.get("queueDatas") or ()
        )
        _checked_int(sum(max(queue_data.read_queues, queue_data.write_queues) for queue_data in queues), 0, MAX_QUEUES)
        brokers_without_write = {queue_data.broker_name for queue_data in queues} - {
            queue_data.broker_name for queue_data in queues if queue_data.perm & Perm.WRITE
        }
        brokers = {
            (broker := _broker(item)).broker_name: replace(
                broker,
                has_acting_master=bool(item.get("enableActingMaster"))
                and bool(broker.master)
                and broker.broker_name in brokers_without_write,
            )
            for item in data.get("brokerDatas") or ()
        }
        order_conf = data.get("orderTopicConf")
        is_static = bool(data.get("topicQueueMappingByBroker"))
        return TopicRoute(
            topic,
            queues,
            brokers,
            None if order_conf is None else _checked_text(order_conf, _MAX_ORDER_CONF),
            is_static,
        )


def cluster(body: Bytes) -> Cluster:
    """Answer to GET_BROKER_CLUSTER_INFO."""
    with _protocol_errors("cluster"):
        data = read_json(body)
        table = data.get("brokerAddrTable") or {}
        _check_brokers("brokers", table.values())
        brokers = {_checked_text(name, MAX_NAME): _broker(item) for name, item in table.items()}
        clusters = {
            _checked_text(name, MAX_NAME): tuple(sorted(_checked_text(member, MAX_NAME) for member in members))
            for name, members in (data.get("clusterAddrTable") or {}).items()
        }
        return Cluster(brokers, clusters)


def _broker(item: Mapping[str, Any]) -> BrokerData:
    addresses = {
        _checked_int(broker_id): _checked_text(address, MAX_ADDRESS)
        for broker_id, address in (item.get("brokerAddrs") or {}).items()
    }
    return BrokerData(
        _checked_text(item["brokerName"], MAX_NAME), _checked_text(item.get("cluster") or "", MAX_NAME), addresses
    )


def _check_brokers(list_name: str, items: Collection[Mapping[str, Any]]) -> None:
    if len(items) > MAX_ROUTE_BROKERS:
        raise ValueError(f"{len(items)} {list_name}, expected at most {MAX_ROUTE_BROKERS}")
    _checked_int(sum(len(item.get("brokerAddrs") or ()) for item in items), 0, _MAX_ADDRESSES)


# An entry as brokers of 5.5.0 write it. A driver reads thousands of entries for every plan, so a pattern reads bodies of this
# form, and the JSON parser reads only bodies of another form.
_STATS_ENTRY = (
    rb'\{"brokerName":"(%s)","queueId":(%s),"topic":"%s"\}:'
    rb'\{"lastUpdateTimestamp":(%s),"maxOffset":(%s),"minOffset":(%s)\}'
)
_NAME, _NUMBER = rb'[^"\\\x80-\xff]{0,%d}' % MAX_NAME, rb"\d{1,18}"
_STATS = re.compile(_STATS_ENTRY % (_NAME, _NUMBER, _NAME, _NUMBER, _NUMBER, _NUMBER))
_ALL_STATS = re.compile(rb'\{"offsetTable":\{%b(?:,%b)*\},"topicPutTps":[0-9.E-]+\}' % ((_STATS.pattern,) * 2))


def topic_stats(topic: str, body: Bytes) -> dict[MessageQueue, QueueBounds]:
    """Answer to GET_TOPIC_STATS_INFO: bounds of all queues of ``topic`` on one broker."""
    if len(body) <= MAX_TABLE_BYTES and _ALL_STATS.fullmatch(body):
        return {
            MessageQueue(topic, broker.decode(), int(queue)): QueueBounds(int(low), int(high), int(updated))
            for broker, queue, updated, high, low in _STATS.findall(body)
        }
    with _protocol_errors("topic statistics"):
        return {
            queue: QueueBounds(
                _checked_int(item["minOffset"]),
                _checked_int(item["maxOffset"]),
                _checked_int(item.get("lastUpdateTimestamp") or 0),
            )
            for queue, item in _entries_by_queue(body, "offsetTable", topic)
        }


def consume_stats(body: Bytes) -> dict[MessageQueue, ConsumeProgress]:
    """Answer to GET_CONSUME_STATS: queues of one or of many topics."""
    with _protocol_errors("consumer statistics"):
        return {
            queue: ConsumeProgress(
                broker_offset=_checked_int(item["brokerOffset"]),
                consumer_offset=_checked_int(item["consumerOffset"]),
                pull_offset=_checked_int(item.get("pullOffset") or 0),
                last_timestamp_ms=_checked_int(item.get("lastTimestamp") or 0),
            )
            for queue, item in _entries_by_queue(body, "offsetTable")
        }


def reset_offsets(body: Bytes) -> dict[MessageQueue, int]:
    """Answer to INVOKE_BROKER_TO_RESET_OFFSET, and body of RESET_CONSUMER_CLIENT_OFFSET: the new offsets."""
    with _protocol_errors("offsets"):
        return {queue: _checked_int(offset) for queue, offset in _entries_by_queue(body, "offsetTable")}


def _entries_by_queue(body: Bytes, table_name: str, topic: str | None = None) -> Iterator[tuple[MessageQueue, Any]]:
    for key, item in (read_json(body, is_table=True).get(table_name) or {}).items():
        queue_fields = dict(key)
        yield _queue({**queue_fields, "topic": topic or queue_fields["topic"]}), item


def topic_list(body: Bytes) -> list[str]:
    """Topics of GET_ALL_TOPIC_LIST_FROM_NAMESERVER with system topics, sorted. Names that no request can contain are omitted."""
    # An empty name, or one that contains half of a surrogate pair, would make a request for all topics fail.
    return sorted(name for name in _names(body, "topicList") if name and name == name.encode(errors="ignore").decode())


def group_list(body: Bytes) -> list[str]:
    """Groups of QUERY_TOPIC_CONSUME_BY_WHO, sorted."""
    return sorted(_names(body, "groupList"))


def owned_queues(body: Bytes) -> list[MessageQueue]:
    """The queues that a member owns according to its answer to GET_CONSUMER_RUNNING_INFO, sorted."""
    with _protocol_errors("running consumer"):
        return sorted(queue for queue, _ in _entries_by_queue(body, "mqTable"))


def consumer_ids(body: Bytes) -> list[str]:
    """Client ids of GET_CONSUMER_LIST_BY_GROUP, sorted as a rebalance needs them.

    Servers list a client once for each of its connections. A client that has reconnected is listed twice until its old
    connection expires, which may take two minutes at another Proxy. If such a client counted as two members, no member would
    read the queues of the second member.
    """
    return sorted(set(_names(body, "consumerIdList", _MAX_TEXT)))


def group_filters(body: Bytes) -> dict[str, Filter]:
    """The filter of a group for each topic (GET_CONSUMER_CONNECTION_LIST). Brokers keep only the filters of the latest
    heartbeat.
    """
    with _protocol_errors("consumer connections"):
        table = read_json(body).get("subscriptionTable") or {}
        return {_checked_text(topic): _filter(data) for topic, data in table.items()}


def group_online(body: Bytes) -> GroupOnline:
    """Answer to GET_CONSUMER_CONNECTION_LIST."""
    filters = group_filters(body)
    with _protocol_errors("consumer connections"):
        data = read_json(body)
        members = (
            GroupConnection(
                _checked_text(member["clientId"]),
                _checked_text(member["clientAddr"]),
                _checked_text(member["language"]),
                _checked_int(member["version"]),
            )
            for member in data.get("connectionSet") or ()
        )
        settings = [_checked_text(data.get(name) or "") for name in ("consumeType", "messageModel", "consumeFromWhere")]
        return GroupOnline(
            sorted(members, key=lambda member: member.client_id), settings[0], settings[1], settings[2], filters
        )


def member_filters(body: Bytes) -> dict[str, Filter]:
    """The filter of a member for each topic, from its answer to GET_CONSUMER_RUNNING_INFO."""
    with _protocol_errors("running consumer"):
        return {_checked_text(data["topic"]): _filter(data) for data in read_json(body).get("subscriptionSet") or ()}


def _filter(data: Mapping[str, Any]) -> Filter:
    return Filter(_checked_text(data.get("subString") or "*"), _checked_text(data.get("expressionType") or "TAG"))


def _names(body: Bytes, key: str, maximum: int = MAX_NAME) -> list[str]:
    """Return the names of a list, and omit names that are too long. Clients choose some names, and one bad name must not fail the
    whole list.
    """
    with _protocol_errors(key):
        return [name for name in map(_checked_text, read_json(body).get(key) or ()) if len(name) <= maximum]


def topic_config(body: Bytes, name_in_table: str | None = None) -> TopicConfig:
    """The topic of an answer to GET_TOPIC_CONFIG, or topic ``name_in_table`` of an answer to GET_ALL_TOPIC_CONFIG."""
    with _protocol_errors("topic configuration"):
        data = read_json(body) if name_in_table is None else read_json(body)["topicConfigTable"][name_in_table]
        attributes = data.get("attributes") or {}
        _checked_int(len(attributes), 0, _MAX_ATTRIBUTES)
        return TopicConfig(
            topic=_checked_text(data["topicName"], MAX_NAME),
            read_queues=_checked_int(data["readQueueNums"], 0, MAX_QUEUES),
            write_queues=_checked_int(data["writeQueueNums"], 0, MAX_QUEUES),
            perm=_checked_int(data["perm"]),
            filter_type=_checked_text(data.get("topicFilterType") or "SINGLE_TAG", MAX_NAME),
            sys_flag=_checked_int(data.get("topicSysFlag") or 0),
            order=bool(data.get("order")),
            attributes={
                _checked_text(name, MAX_NAME): _checked_text(value, _MAX_TEXT) for name, value in attributes.items()
            },
        )


def subscription_groups(body: Bytes) -> dict[str, dict[str, Any]]:
    """Groups of GET_ALL_SUBSCRIPTIONGROUP_CONFIG; their settings have the broker's names."""
    with _protocol_errors("consumer groups"):
        return {str(name): dict(item) for name, item in (read_json(body).get("subscriptionGroupTable") or {}).items()}


def runtime_info(body: Bytes) -> dict[str, str]:
    """Answer to GET_BROKER_RUNTIME_INFO: values by name."""
    with _protocol_errors("table"):
        return {str(name): str(value) for name, value in (read_json(body).get("table") or {}).items()}


def locked_queues(body: Bytes) -> list[MessageQueue]:
    """Answer to LOCK_BATCH_MQ: the queues that the broker has locked for this client, sorted."""
    return _queues(body, "lockOKMQSet")


def queues_to_lock(body: Bytes) -> list[MessageQueue]:
    """The queues that a body of LOCK_BATCH_MQ or UNLOCK_BATCH_MQ names, sorted."""
    return _queues(body, "mqSet")


def _queues(body: Bytes, key: str) -> list[MessageQueue]:
    with _protocol_errors(key):
        return sorted(map(_queue, read_json(body).get(key) or ()))


def _queue(item: Mapping[str, Any]) -> MessageQueue:
    return MessageQueue(
        _checked_text(item["topic"], MAX_NAME),
        _checked_text(item["brokerName"], MAX_NAME),
        _checked_int(item["queueId"]),
    )


def lock_request(group: str, client_id: str, queues: Sequence[MessageQueue], only_this_broker: bool = False) -> bytes:
    """Body of LOCK_BATCH_MQ and UNLOCK_BATCH_MQ."""
    return _dump(
        {
            "clientId": client_id,
            "consumerGroup": group,
            "mqSet": [
                {"brokerName": queue.broker_name, "queueId": queue.queue_id, "topic": queue.topic} for queue in queues
            ],
            "onlyThisBroker": only_this_broker,
        }
    )


def consume_mode_query(group: str, topic: str, client_id: str) -> bytes:
    """Body of QUERY_ASSIGNMENT for a broadcasting member. The answer has every queue, whether or not the group has members."""
    return _dump(
        {
            "clientId": client_id,
            "consumerGroup": group,
            "messageModel": "BROADCASTING",
            "strategyName": "AVG",
            "topic": topic,
        }
    )


def consume_mode(body: Bytes) -> str | None:
    """Return the consume mode (PULL or POP) of an answer to QUERY_ASSIGNMENT; None if the answer assigns no queue."""
    with _protocol_errors("assignment"):
        modes = [_checked_text(item["mode"], MAX_NAME) for item in read_json(body).get("messageQueueAssignments") or ()]
        return modes[0] if modes else None


def heartbeat(
    client_id: str, producer_groups: Sequence[str] = (), memberships: Sequence[GroupMembership] = ()
) -> bytes:
    """Body of HEART_BEAT. This client becomes a member of each consumer group in the body, and these groups rebalance."""
    return _dump(
        {
            "clientID": client_id,
            "consumerDataSet": [_membership(member) for member in memberships],
            "heartbeatFingerprint": 0,
            "producerDataSet": [{"groupName": group} for group in producer_groups],
            "withoutSub": False,
        }
    )


def _membership(membership: GroupMembership) -> dict[str, Any]:
    return {
        "consumeFromWhere": membership.consume_from_where,
        "consumeType": membership.consume_type,
        "groupName": membership.group,
        "messageModel": membership.message_model,
        "subscriptionDataSet": subscription_data(membership),
        "unitMode": membership.unit_mode,
    }


def subscription_data(membership: GroupMembership) -> list[dict[str, Any]]:
    """A consumer's subscriptions in the form of a heartbeat."""
    return [
        {
            "classFilterMode": False,
            "codeSet": list(subscription.codes),
            "expressionType": membership.expression_types.get(topic, "TAG"),
            "subString": subscription.sub_string,
            "subVersion": membership.versions_ms.get(topic, 0),
            "tagsSet": list(subscription.tags),
            "topic": topic,
        }
        for topic, subscription in membership.subscriptions.items()
    ]


def client_config_check(group: str, topic: str, sql: str) -> bytes:
    """Body of CHECK_CLIENT_CONFIG for an SQL expression."""
    subscription = {"expressionType": "SQL92", "subString": sql, "subVersion": 1, "topic": topic}
    unused_fields = {"classFilterMode": False, "codeSet": [], "tagsSet": []}
    return _dump({"clientId": "rocketmq-spark", "group": group, "subscriptionData": subscription | unused_fields})


def topic_registration(configs: Mapping[str, TopicConfig]) -> bytes:
    """Body of REGISTER_TOPIC_IN_NAMESRV: the queues of a topic by the names of brokers."""
    fields = ("brokerName", "readQueueNums", "writeQueueNums", "perm", "topicSysFlag")
    queues = [
        (name, config.read_queues, config.write_queues, config.perm, config.sys_flag)
        for name, config in configs.items()
    ]
    return _dump({"queueDatas": [dict(zip(fields, values, strict=True)) for values in queues]})


def subscription_group(group: str, **settings: Any) -> bytes:
    """Body of UPDATE_AND_CREATE_SUBSCRIPTIONGROUP; missing settings take the broker's defaults."""
    return _dump({"groupName": group, **settings})


# A real configuration has about 20 KiB. In memory, a line may need fifty times its bytes.
_MAX_CONFIG_BYTES = 1 << 20


def read_config(body: Bytes) -> dict[str, str]:
    """Answer to GET_BROKER_CONFIG: lines of ``name=value``."""
    with _protocol_errors("configuration"):
        if len(body) > _MAX_CONFIG_BYTES:
            raise ValueError(f"it has {len(body)} bytes; expected at most {_MAX_CONFIG_BYTES}")
        pairs = (line.split("=", 1) for line in str(body, "utf-8").splitlines() if "=" in line)
        return {name.strip(): value.strip() for name, value in pairs}


def config_number(config: Mapping[str, str], name: str) -> int | None:
    """The setting ``name`` of a broker as a number from 0 to Java's largest int; None if it is missing or has another value."""
    text = config.get(name, "")
    return int(text) if re.fullmatch(r"[0-9]{1,10}", text) and int(text) <= MAX_INT else None


def write_config(values: Mapping[str, str]) -> bytes:
    """Body of UPDATE_BROKER_CONFIG. Values are escaped, because the broker parses the body as a Java properties file."""
    lines = []
    for name, value in values.items():
        if not re.fullmatch(r"[A-Za-z0-9_.-]+", name) or "\n" in value or "\r" in value:
            # The error omits the value, which may be a secret.
            raise LocalProtocolError(
                f"A broker cannot take the setting {name!r}: a name has letters, digits, '_', '.' and '-', a value no line breaks"
            )
        # JSON escapes backslashes and characters beyond ASCII in the same way as a properties file.
        lines.append(f"{name}={json.dumps(value)[1:-1]}\n")
    return "".join(lines).encode()


# --- JSON bodies of a consumer's answers to brokers, as fastjson writes ``GetConsumerStatusBody``, ``ConsumerRunningInfo`` and
# ``ConsumeMessageDirectlyResult``. Topics have their names on the wire.

_MIB = 1 << 20


def consumer_offsets(offsets: Mapping[MessageQueue, int]) -> bytes:
    """Answer to GET_CONSUMER_STATUS_FROM_CLIENT."""
    return b'{"messageQueueTable":%b}' % _with_queue_keys(offsets)


def direct_result(result: DirectResult) -> bytes:
    """Answer to CONSUME_MESSAGE_DIRECTLY."""
    values = {
        "autoCommit": result.auto_commit,
        "consumeResult": result.outcome.value,
        "order": result.ordered,
        "remark": result.remark,
        "spentTimeMills": result.spent_ms,
    }
    return _dump({name: value for name, value in values.items() if value is not None})


def running_info(info: RunningInfo, membership: GroupMembership) -> bytes:
    """Answer to GET_CONSUMER_RUNNING_INFO; ``membership`` is that of the heartbeats, with names on the wire."""
    properties = {
        **info.properties,
        "PROP_CLIENT_VERSION": f"V{VERSION}",
        "PROP_CONSUMEORDERLY": str(info.ordered).lower(),
        "PROP_CONSUMER_START_TIMESTAMP": str(info.started_ms),
        "PROP_CONSUME_TYPE": membership.consume_type,
        "PROP_THREADPOOL_CORE_SIZE": str(info.threads),
    }
    parts = {
        "mqPopTable": b"{}",
        "mqTable": _with_queue_keys({queue: _queue_info(queue_info) for queue, queue_info in info.queues.items()}),
        "properties": _dump(properties),
        "statusTable": _dump({topic: _figures(figures) for topic, figures in sorted(info.topics.items())}),
        "subscriptionSet": _dump(subscription_data(membership)),
        "userConsumerInfo": b"{}",
    }
    if info.stacks is not None:
        parts["jstack"] = _dump(info.stacks)
    return b"{%b}" % b",".join(b'"%b":%b' % (name.encode(), part) for name, part in parts.items())


def _queue_info(info: QueueInfo) -> dict[str, Any]:
    """Figures of a queue. Java requires every number, so unknown numbers are 0."""
    return {
        "cachedMsgCount": info.cached_count,
        "cachedMsgMaxOffset": info.cached_max_offset or 0,
        "cachedMsgMinOffset": info.cached_min_offset or 0,
        "cachedMsgSizeInMiB": info.cached_bytes // _MIB,
        "commitOffset": info.commit_offset or 0,
        "droped": info.dropped,
        "lastConsumeTimestamp": info.last_consume_ms or 0,
        "lastLockTimestamp": info.last_lock_ms or 0,
        "lastPullTimestamp": info.last_pull_ms or 0,
        "locked": info.locked,
        "transactionMsgCount": 0,
        "transactionMsgMaxOffset": 0,
        "transactionMsgMinOffset": 0,
        "tryUnlockTimes": 0,
    }


def _figures(figures: TopicFigures) -> dict[str, Any]:
    """Figures of a topic; unknown figures are 0, as in ``_queue_info``."""
    return {
        "consumeFailedMsgs": figures.failed,
        "consumeFailedTPS": figures.failed_per_s,
        "consumeOKTPS": figures.consumed_per_s,
        "consumeRT": figures.consume_ms or 0.0,
        "pullRT": figures.pull_ms or 0.0,
        "pullTPS": figures.pulled_per_s,
    }


def _with_queue_keys(table: Mapping[MessageQueue, Any]) -> bytes:
    """A map with queues as keys. Objects as keys are not JSON, but Java writes and reads them."""
    entries = (
        b"%b:%b"
        % (_dump({"brokerName": queue.broker_name, "queueId": queue.queue_id, "topic": queue.topic}), _dump(value))
        for queue, value in sorted(table.items())
    )
    return b"{%b}" % b",".join(entries)


def _dump(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()
