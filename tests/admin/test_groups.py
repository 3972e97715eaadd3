"""Groups: what is known of one, and what is deleted with it."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest

from rocketmq_spark.admin import groups, topics
from rocketmq_spark.base.codes import Request, Response
from rocketmq_spark.errors import (
    AccessDenied,
    BrokerNotFound,
    CallTimeout,
    GroupNotFound,
    OffsetError,
    OptionError,
    RocketMQError,
    RouteNotFound,
)
from rocketmq_spark.model import Filter, MessageQueue
from rocketmq_spark.model.admin import GroupConnection
from rocketmq_spark.wire.names import Scope
from tests.client.conftest import Parts
from tests.mockbroker import NO_ROUTE, MockBroker, cluster, ok, refuse, route

SETTINGS, ONLINE = Request.GET_ALL_SUBSCRIPTIONGROUP_CONFIG, Request.GET_CONSUMER_CONNECTION_LIST
STATS, BOUNDS, AT = Request.GET_CONSUME_STATS, Request.GET_TOPIC_STATS_INFO, Request.QUERY_CONSUMER_OFFSET
DELETE = Request.DELETE_SUBSCRIPTIONGROUP
OFFLINE = refuse(Response.CONSUMER_NOT_ONLINE, "the consumer group[g] not online")


def body(**values: Any) -> Any:
    return ok(json.dumps(values).encode())


def member(name: str) -> dict[str, object]:
    return {"clientId": name, "clientAddr": "h:1", "language": "JAVA", "version": 513}


def by_queue(*entries: tuple[int, dict[str, int]]) -> Any:
    """As fastjson writes it: the keys are objects."""
    rows = (
        f'{{"brokerName":"broker-a","queueId":{queue},"topic":"t"}}:{json.dumps(values)}' for queue, values in entries
    )
    return ok(('{"offsetTable":{' + ",".join(rows) + "}}").encode())


@pytest.fixture
def group(broker: MockBroker, tools: Parts) -> Parts:
    """Group ``g`` with settings and an offset, and no member."""
    broker.on(SETTINGS, body(subscriptionGroupTable={"g": {"groupName": "g", "retryMaxTimes": 3}}))
    broker.on(ONLINE, OFFLINE)
    broker.on(STATS, by_queue((0, {"brokerOffset": 9, "consumerOffset": 5})))
    broker.on(BOUNDS, by_queue(*((n, {"minOffset": 2, "maxOffset": 9, "lastUpdateTimestamp": 0}) for n in (0, 1))))
    broker.on(AT, [ok(offset=5), refuse(Response.QUERY_NOT_FOUND)])
    broker.on(Request.PULL_MESSAGE, refuse(Response.PULL_NOT_FOUND))
    broker.on(DELETE, ok())
    return tools


def test_brokers_that_answer_tell_ages_although_another_is_away(broker: MockBroker, group: Parts) -> None:
    here, away = MessageQueue("t", "broker-a", 0), MessageQueue("t", "broker-b", 0)
    broker.on(Request.GET_ROUTEINFO_BY_TOPIC, route(1, {"broker-a": broker.address, "broker-b": "127.0.0.1:1"}))
    asked: list[MessageQueue] = []

    def stored(group: str, queue: MessageQueue, offset: int, within: object) -> int:
        asked.append(queue)
        if len(asked) == 2:
            raise CallTimeout("no answer in time")
        return 1_000 * offset

    group.offset_reader.store_time_ms = stored  # type: ignore[method-assign]
    look = groups.queue_lags(group, {here: 5, away: 3})
    assert [(row.lag, row.next_stored_ms) for row in look.rows] == [(4, 5_000), (None, None)]
    assert len(look.errors) == 1
    more = [here._replace(queue_id=number) for number in (1, 0)]
    look = groups.queue_lags(group, dict.fromkeys(more, 5))
    assert [row.next_stored_ms for row in look.rows] == [None, None]
    assert [type(error) for error in look.errors] == [CallTimeout], "an age that is missing is no age of 0"
    assert asked == [here, here], "a broker that did not answer is not asked about its other queues"


def test_lag_of_a_deleted_topic_is_an_error_beside_other_lags(broker: MockBroker, group: Parts) -> None:
    """Or ``lag`` of a query would end with 0 although nobody knows what of that topic is not read."""
    found = route(1, {"broker-a": broker.address})
    broker.on(Request.GET_ROUTEINFO_BY_TOPIC, lambda call: found if call.ext("topic") == "t" else NO_ROUTE)
    here, gone = MessageQueue("t", "broker-a", 0), MessageQueue("gone", "broker-a", 0)
    look = groups.queue_lags(group, {here: 5, gone: 3})
    assert [(row.queue, row.lag) for row in look.rows] == [(gone, None), (here, 4)]
    assert [type(error) for error in look.errors] == [RouteNotFound]


def test_offsets_work_on_topics_without_read_permission(broker: MockBroker, group: Parts) -> None:
    """Who sets offsets may have closed it for that. It had no offsets then, or there were none to set."""
    broker.on(Request.GET_ROUTEINFO_BY_TOPIC, route(2, {"broker-a": broker.address}, perm=2))
    broker.on(Request.PULL_MESSAGE, refuse(Response.NO_PERMISSION, "pulling message is forbidden", forbiddenType=3))
    assert [row.position for row in groups.describe(group, "g").queues] == [5, None]
    broker.on(AT, [ok(offset=5), refuse(Response.QUERY_NOT_FOUND)])
    changes = groups.offset_changes(group, "g", ["t"], "earliest")
    assert [(change.before, change.after) for change in changes] == [(5, 2), (None, 2)]


def test_without_any_broker_nothing_is_said_not_to_be_there(broker: MockBroker, group: Parts) -> None:
    broker.on(Request.GET_BROKER_CLUSTER_INFO, body(brokerAddrTable={}, clusterAddrTable={}))
    broker.on(Request.GET_ALL_TOPIC_LIST_FROM_NAMESERVER, body(topicList=[]))
    for ask in (
        lambda: groups.names(group),
        lambda: groups.describe(group, "g"),
        lambda: groups.committed_offsets(group, "g", []),
        lambda: groups.offset_changes(group, "g", [], "earliest"),
        lambda: topics.names(group),
    ):
        with pytest.raises(BrokerNotFound, match="no broker is registered"):
            ask()


def test_a_group_is_described(broker: MockBroker, group: Parts) -> None:
    table = {"t": {"subString": "a || b"}, "%RETRY%g": {"subString": "*"}}
    broker.on(
        ONLINE,
        body(
            connectionSet=[member("c2"), member("c1")],
            subscriptionTable=table,
            consumeType="CONSUME_PASSIVELY",
            messageModel="CLUSTERING",
            consumeFromWhere="CONSUME_FROM_LAST_OFFSET",
        ),
    )
    found = groups.describe(group, "g")
    assert found.members == [GroupConnection(name, "h:1", "JAVA", 513) for name in ("c1", "c2")]
    assert (found.consume_type, found.message_model) == ("CONSUME_PASSIVELY", "CLUSTERING")
    assert found.filters == {"t": Filter("a || b")}
    assert found.settings == {"broker-a": {"groupName": "g", "retryMaxTimes": 3}}
    assert [(row.queue.queue_id, row.position, row.lag) for row in found.queues] == [(0, 5, 4), (1, None, None)]
    assert found.lag == 4


def test_queues_that_a_topic_has_since_a_moment_are_there(broker: MockBroker, group: Parts) -> None:
    """A route that was known for less than 30 s told of those before: after a widening lag was that of some queues."""
    assert len(groups.describe(group, "g").queues) == 2
    broker.on(Request.GET_ROUTEINFO_BY_TOPIC, route(3, {"broker-a": broker.address}))
    broker.on(AT, ok(offset=5))
    assert len(groups.committed_offsets(group, "g", ["t"])) == len(groups.describe(group, "g").queues) == 3
    broker.on(Request.GET_ROUTEINFO_BY_TOPIC, route(1, {"broker-a": broker.address}))
    assert len(groups.describe(group, "g").queues) == 1


def test_topics_of_a_group_are_those_of_all_brokers(broker: MockBroker, group: Parts) -> None:
    """Lag would be that of some, and offsets would be set in some, without a word of the others."""
    with MockBroker() as other:
        both = {"broker-a": {"0": broker.address}, "broker-b": {"0": other.address}}
        broker.on(Request.GET_BROKER_CLUSTER_INFO, cluster(both))
        rows = (
            '{"offsetTable":{{"brokerName":"broker-b","queueId":0,"topic":"u"}:{"brokerOffset":9,"consumerOffset":5}}}'
        )
        other.on(STATS, ok(rows.encode()))
        other.on(AT, ok(offset=6))
        at = {"t": route(1, {"broker-a": broker.address}), "u": route(1, {"broker-b": other.address})}
        broker.on(Request.GET_ROUTEINFO_BY_TOPIC, lambda call: at[call.ext("topic")])
        assert group.admin.consumed_topics("g") == ["t", "u"]
        first, second = MessageQueue("t", "broker-a", 0), MessageQueue("u", "broker-b", 0)
        assert groups.committed_offsets(group, "g", []) == {first: 5, second: 6}
        both = route(1, {"broker-a": broker.address, "broker-b": other.address})
        broker.on(Request.GET_ROUTEINFO_BY_TOPIC, both)
        for server, name in ((broker, "broker-a"), (other, "broker-b")):
            server.on(AT, ok(offset=5))
            values = '{"minOffset":2,"maxOffset":9,"lastUpdateTimestamp":0}'
            rows = [f'{{"brokerName":"{name}","queueId":0,"topic":"{topic}"}}:{values}' for topic in "tu"]
            bounds = [ok(('{"offsetTable":{' + row + "}}").encode()) for row in rows]
            server.on(BOUNDS, lambda call, bounds=bounds: bounds["tu".index(call.ext("topic"))])
        changes = groups.offset_changes(group, "g", ["t"], "latest")
        later = groups.offset_changes(group, "g", ["u", "t"], "latest")
        assert {one.queue.topic for one in later} == {"t", "u"}
        assert [(one.queue.broker_name, one.after) for one in changes] == [("broker-a", 9), ("broker-b", 9)]


def test_group_is_described_and_deleted_across_all_brokers(broker: MockBroker, group: Parts) -> None:
    """A member that has not reached the first broker is there all the same."""
    with MockBroker() as other:
        other.on(SETTINGS, body(subscriptionGroupTable={}))
        other.on(STATS, by_queue())
        kind = {"consumeType": "CONSUME_PASSIVELY", "messageModel": "CLUSTERING", "consumeFromWhere": "X"}
        for one, name, topic in ((broker, "c1", "t"), (other, "c2", "u")):
            one.on(ONLINE, body(connectionSet=[member(name)], subscriptionTable={topic: {"subString": "*"}}, **kind))
        both = {"broker-a": {"0": broker.address}, "broker-b": {"0": other.address}}
        broker.on(Request.GET_BROKER_CLUSTER_INFO, cluster(both))
        found = groups.describe(group, "g")
        assert ([one.client_id for one in found.members], list(found.filters)) == (["c1", "c2"], ["t", "u"])
        with pytest.raises(OffsetError, match="group g has 2 members, which would create the group again: c1, c2"):
            groups.delete(group, "g")
        broker.on(ONLINE, OFFLINE)
        with pytest.raises(OffsetError, match="group g has 1 members, which would create the group again: c2"):
            groups.delete(group, "g")
        assert broker.seen(DELETE) == other.seen(DELETE) == []
        other.on(DELETE, ok())
        groups.delete(group, "g", force=True)
        assert [len(one.seen(DELETE)) for one in (broker, other)] == [1, 1], "what one keeps would come back"
        other.on(DELETE, refuse(Response.SYSTEM_ERROR, "no"))
        with pytest.raises(RocketMQError, match="It is done on broker-a, and not on broker-b"):
            groups.delete(group, "g", force=True)


def test_a_group_that_has_consumed_nothing(broker: MockBroker, group: Parts) -> None:
    broker.on(STATS, ok(b'{"offsetTable":{}}'))
    found = groups.describe(group, "g")
    assert (found.members, found.queues, found.lag, found.consume_type) == ([], [], None, None)


def test_a_group_that_brokers_do_not_know(broker: MockBroker, group: Parts) -> None:
    broker.on(STATS, ok(b'{"offsetTable":{}}'))
    for verb in (groups.describe, groups.delete):
        with pytest.raises(GroupNotFound, match=r"no broker has group gg.*Did you mean g\?"):
            verb(group, "gg")
    assert broker.seen(DELETE) == []


def test_a_group_of_which_offsets_alone_are_left_is_known(broker: MockBroker, group: Parts) -> None:
    broker.on(SETTINGS, body(subscriptionGroupTable={}))
    assert groups.describe(group, "g").settings == {}
    groups.delete(group, "g")
    assert [command.ext["groupName"] for command in broker.seen(DELETE)] == ["g"]


def test_a_broker_that_refuses_is_no_group_without_members(broker: MockBroker, group: Parts) -> None:
    broker.on(ONLINE, refuse(Response.SYSTEM_BUSY, "busy"))
    with pytest.raises(RocketMQError, match="busy"):
        groups.describe(group, "g")
    with pytest.raises(RocketMQError, match="busy"):
        groups.delete(group, "g")
    assert broker.seen(DELETE) == []


def test_a_group_with_members_is_deleted_by_force_only(broker: MockBroker, group: Parts) -> None:
    broker.on(ONLINE, body(connectionSet=[member("c1")]))
    with pytest.raises(OffsetError, match=r"group g has 1 members, which would create the group again: c1"):
        groups.delete(group, "g")
    assert broker.seen(DELETE) == []
    groups.delete(group, "g", force=True)
    (asked,) = broker.seen(DELETE)
    assert asked.ext == {"groupName": "g", "cleanOffset": "true", "removeOffset": "true", "bname": "broker-a"}


def test_topics_are_deleted_on_request(broker: MockBroker, group: Parts) -> None:
    """Retries and dead letters are messages; a group need not have either."""
    for code in (Request.DELETE_TOPIC_IN_BROKER, Request.DELETE_TOPIC_IN_NAMESRV):
        broker.on(code, ok())
    groups.delete(group, "g")
    assert broker.seen(Request.DELETE_TOPIC_IN_BROKER) == []
    there = route(1, {"broker-a": broker.address})
    broker.on(
        Request.GET_ROUTEINFO_BY_TOPIC, lambda call: NO_ROUTE if call.ext("topic").startswith("%RETRY%") else there
    )
    groups.delete(group, "g", topics=True)
    assert [command.ext["topic"] for command in broker.seen(Request.DELETE_TOPIC_IN_BROKER)] == ["%DLQ%g"]
    broker.on(Request.DELETE_TOPIC_IN_BROKER, refuse(Response.SYSTEM_BUSY, "busy"))
    with pytest.raises(RocketMQError, match="busy"):
        groups.delete(group, "g", topics=True)
    assert len(broker.seen(DELETE)) == 2, "the group is there to say it again"


def test_retries_of_pops_are_deleted_with_the_others(broker: MockBroker, group: Parts) -> None:
    """A group that pops has a retry topic for each of its topics. A group made again would get what they have."""
    for code in (Request.DELETE_TOPIC_IN_BROKER, Request.DELETE_TOPIC_IN_NAMESRV, DELETE):
        broker.on(code, ok())
    there = route(1, {"broker-a": broker.address})
    broker.on(Request.GET_ROUTEINFO_BY_TOPIC, lambda call: NO_ROUTE if "+" in call.ext("topic") else there)
    groups.delete(group, "g", topics=True)
    deleted = [command.ext["topic"] for command in broker.seen(Request.DELETE_TOPIC_IN_BROKER)]
    assert deleted == ["%RETRY%g", "%DLQ%g", "%RETRY%g_t"]
    # Another group's own retries may have the same name.
    both = {name: {"groupName": name} for name in ("g", "g_t")}
    broker.on(SETTINGS, body(subscriptionGroupTable=both))
    groups.delete(group, "g", topics=True)
    assert [command.ext["topic"] for command in broker.seen(Request.DELETE_TOPIC_IN_BROKER)][3:] == deleted[:2]


def test_delete_group_deletes_nothing_while_a_master_is_away(broker: MockBroker, group: Parts) -> None:
    table = {"broker-a": {"0": broker.address}, "broker-b": {"1": "127.0.0.1:1"}}
    broker.on(Request.GET_BROKER_CLUSTER_INFO, cluster(table))
    with pytest.raises(BrokerNotFound, match="no master of broker-b is registered"):
        groups.delete(group, "g")
    assert broker.seen(DELETE) == []


def test_group_offsets_are_an_error_while_the_master_is_away(broker: MockBroker, group: Parts) -> None:
    """Its slave has none: of many versions they do not get them."""
    with MockBroker() as slave:
        slave.on(SETTINGS, body(subscriptionGroupTable={}))
        slave.on(ONLINE, OFFLINE)
        slave.on(STATS, by_queue())
        broker.on(Request.GET_BROKER_CLUSTER_INFO, cluster({"broker-a": {"1": slave.address}}))
        for ask in (
            lambda: groups.committed_offsets(group, "g", []),
            lambda: groups.offset_changes(group, "g", [], "earliest"),
            lambda: groups.describe(group, "g"),
        ):
            with pytest.raises(BrokerNotFound, match="no master of broker-a is registered"):
                ask()


def test_who_may_not_see_ages_is_told_the_lag(broker: MockBroker, group: Parts) -> None:
    broker.on(Request.PULL_MESSAGE, refuse(Response.NO_PERMISSION, "no permission to access Group:rocketmq-spark-cli"))
    found = groups.describe(group, "g")
    assert (found.lag, [row.next_stored_ms for row in found.queues]) == (4, [None, None])
    broker.on(AT, ok(offset=5))
    broker.on(BOUNDS, refuse(Response.NO_PERMISSION, "no permission to access Topic:t"))
    with pytest.raises(AccessDenied):
        groups.describe(group, "g")


def test_offsets_that_nobody_may_set(broker: MockBroker, group: Parts) -> None:
    first, second = (MessageQueue("t", "broker-a", number) for number in (0, 1))
    group.routes.get_existing("t")
    broker.on(Request.UPDATE_CONSUMER_OFFSET, refuse(Response.NO_PERMISSION, "no permission to access Group:g"))
    with pytest.raises(AccessDenied):
        groups.store_offsets(group, "g", {first: 3, second: 3})
    broker.on(Request.UPDATE_CONSUMER_OFFSET, refuse(Response.SYSTEM_ERROR, "no"))
    with pytest.raises(OffsetError, match="2 of 2 offsets of group g were not set") as e:
        groups.store_offsets(group, "g", {first: 3, second: 3})
    assert e.value.remedy == "Check that broker, and try again"


def test_store_offsets_creates_the_group_on_brokers_lacking_it() -> None:
    """One of its brokers was added after the group was made."""
    queues = [MessageQueue("t", broker, 0) for broker in ("broker-a", "broker-b")]
    known, stored = {"broker-a"}, dict[MessageQueue, int]()

    def commit_each(group: str, offsets: dict[MessageQueue, int], within: object) -> dict[MessageQueue, RocketMQError]:
        stored.update({queue: at for queue, at in offsets.items() if queue.broker_name in known})
        return {queue: GroupNotFound("no group") for queue in offsets if queue.broker_name not in known}

    def create_group(group: str, offsets: dict[MessageQueue, int]) -> None:
        assert (group, offsets) == ("g", {queues[1]: 3}), "settings of the others are kept"
        known.add("broker-b")

    tools: Any = SimpleNamespace(
        committer=SimpleNamespace(commit_each=commit_each, create_group=create_group),
        offset_reader=SimpleNamespace(committed=lambda *asked: stored),
        rpc_client=SimpleNamespace(request_timeout_s=1.0),
    )
    groups.store_offsets(tools, "g", dict.fromkeys(queues, 3))
    assert stored == dict.fromkeys(queues, 3)


def test_members_are_those_that_any_broker_of_the_queues_knows() -> None:
    """Offsets that are set would be overwritten by those of one that has reached another broker only."""
    known = {"broker-a": {"one"}, "broker-b": {"one", "two"}}
    committer = SimpleNamespace(members=lambda group, broker, deadline: known[broker])
    tools: Any = SimpleNamespace(committer=committer, rpc_client=SimpleNamespace(request_timeout_s=1.0))
    queues = [MessageQueue("t", broker, number) for broker in known for number in range(2)]
    assert groups.members(tools, "g", queues) == ["one", "two"]
    assert groups.members(tools, "g", queues[:2]) == ["one"]


def test_store_offsets_reports_offset_replaced_by_other_process(broker: MockBroker, group: Parts) -> None:
    first, second = (MessageQueue("t", "broker-a", number) for number in (0, 1))
    group.routes.get_existing("t")
    broker.on(Request.UPDATE_CONSUMER_OFFSET, ok())
    broker.on(AT, lambda call: ok(offset=3 + int(call.ext("queueId"))))
    with pytest.raises(OffsetError, match="the offset of t/broker-a/1 was set to 3 and is 4") as e:
        groups.store_offsets(group, "g", {first: 3, second: 3})
    assert "Another process commits offsets" in (e.value.remedy or "")


def test_offsets_of_retries_are_changed_by_name_only(broker: MockBroker, group: Parts, monkeypatch: Any) -> None:
    monkeypatch.setattr(type(group.admin), "consumed_topics", lambda admin, name: ["%RETRY%g", "t"])
    changes = groups.offset_changes(group, "g", [], "earliest")
    assert {change.queue.topic for change in changes} == {"t"}


def test_illegal_group_names_and_system_groups_are_refused(broker: MockBroker, group: Parts) -> None:
    with pytest.raises(OptionError, match="a b, contains illegal characters"):
        groups.offset_changes(group, "a b", ["t"], "earliest")
    with pytest.raises(OptionError, match="group CID_RMQ_SYS_TRANS is RocketMQ's own"):
        groups.delete(group, "CID_RMQ_SYS_TRANS")
    assert broker.seen(DELETE) == []


def test_a_group_is_known_while_its_master_is_away(broker: MockBroker, group: Parts) -> None:
    """Its slave says so: it was not in the list, and ``GroupNotFound`` otherwise."""
    with MockBroker() as slave:
        slave.on(SETTINGS, body(subscriptionGroupTable={"h": {"groupName": "h"}}))
        slave.on(ONLINE, OFFLINE)
        slave.on(STATS, by_queue())
        table = {"broker-a": {"0": broker.address}, "broker-b": {"1": slave.address}}
        broker.on(Request.GET_BROKER_CLUSTER_INFO, cluster(table))
        broker.on(STATS, by_queue())
        assert groups.names(group) == ["g", "h"]
        assert list(groups.describe(group, "h").settings) == ["broker-b"]
        slave.on(STATS, by_queue((0, {"brokerOffset": 9, "consumerOffset": 5})))
        assert group.admin.consumed_topics("h") == ["t"]


def test_delete_group_in_suffix_environment_keeps_other_topics(broker: MockBroker, group: Parts) -> None:
    """Retries of group ``g_dev_t`` have the name that those of ``g`` of topic ``t`` would have; a ``t`` outside is another."""
    inside = Parts(broker.address, scope=Scope("", "dev"))
    for code in (Request.DELETE_TOPIC_IN_BROKER, Request.DELETE_TOPIC_IN_NAMESRV):
        broker.on(code, ok())
    assert inside.admin.consumed_topics("g") == []
    stats = by_queue((0, {"brokerOffset": 9, "consumerOffset": 5}))
    broker.on(STATS, ok(bytes(stats.body).replace(b'"t"', b'"t_dev"')))
    assert inside.admin.consumed_topics("g") == ["t"]
    table = {name: {"groupName": name} for name in ("g", "g_dev", "g_dev_t_dev")}
    broker.on(SETTINGS, body(subscriptionGroupTable=table))
    groups.delete(inside, "g", topics=True)
    deleted = [command.ext["topic"] for command in broker.seen(Request.DELETE_TOPIC_IN_BROKER)]
    assert deleted == ["%RETRY%g_dev", "%DLQ%g_dev", "%RETRY%g_dev+t_dev"]
    del table["g_dev_t_dev"]
    broker.on(SETTINGS, body(subscriptionGroupTable=table))
    groups.delete(inside, "g", topics=True)
    again = [command.ext["topic"] for command in broker.seen(Request.DELETE_TOPIC_IN_BROKER)][3:]
    assert again == [*deleted, "%RETRY%g_dev_t_dev"]
    assert [command.ext["groupName"] for command in broker.seen(DELETE)] == ["g_dev"] * 2
    inside.close()
