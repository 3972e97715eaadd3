"""Who reads a topic, out of what brokers and members answer; on real ones in tests/cli/test_environment.py."""

from __future__ import annotations

import json
import logging

import pytest

from rocketmq_spark.base.codes import Request, Response
from rocketmq_spark.client.admin import BaseAdmin
from rocketmq_spark.client.topic_readers import GroupReader, groups, member_subscriptions, readers
from rocketmq_spark.model import Filter, MessageQueue
from rocketmq_spark.wire.names import Scope
from tests.client.conftest import Parts
from tests.mockbroker import Call, Command, MockBroker, cluster, ok, refuse, route


def by_queue(table: str, **values: str) -> bytes:
    """A body whose keys are queues; ``topic__id`` names one."""
    entries = []
    for name, value in values.items():
        topic, _, number = name.rpartition("__")
        entries.append(f'{{"brokerName":"broker-a","queueId":{number},"topic":"{topic}"}}:{value}')
    return f'{{"{table}":{{{",".join(entries)}}}}}'.encode()


@pytest.fixture
def asked(broker: MockBroker) -> MockBroker:
    groups, members = {"groupList": ["g_dev", "away_dev", "other"]}, {"g_dev": ["m1", "m2"], "other": ["m3"]}

    def list_members(call: Call) -> Command:
        ids = members.get(str(call.ext("consumerGroup")))
        return ok(json.dumps({"consumerIdList": ids}).encode()) if ids else refuse(Response.SYSTEM_ERROR, "no consumer")

    def info(call: Call) -> Command:
        if call.ext("clientId") == "m2":
            return refuse(Response.SYSTEM_ERROR, "it is gone")
        member_subscriptions = [
            {"topic": "t_dev", "subString": "a || b", "expressionType": "TAG"},
            {"topic": "%RETRY%g_dev", "subString": "*"},
        ]
        held = by_queue("mqTable", t_dev__1="{}", u__0="{}")
        return ok(held[:-1] + b',"subscriptionSet":' + json.dumps(member_subscriptions).encode() + b"}")

    progress = '{"brokerOffset":9,"consumerOffset":%d,"lastTimestamp":0}'
    broker.on(Request.QUERY_TOPIC_CONSUME_BY_WHO, ok(json.dumps(groups).encode()))
    broker.on(Request.GET_CONSUMER_LIST_BY_GROUP, list_members)
    broker.on(Request.GET_CONSUMER_RUNNING_INFO, info)
    broker.on(Request.GET_CONSUME_STATS, ok(by_queue("offsetTable", t_dev__0=progress % 0, t_dev__1=progress % 4)))
    return broker


def test_readers_list_queues_of_members_and_memberless_groups(
    asked: MockBroker, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    parts = Parts(asked.address, scope=Scope(suffix="dev"))
    one = (MessageQueue("t", "broker-a", 1),)
    assert readers(parts.rpc_client, parts.admin, "t") == [
        GroupReader("away", None, one),
        GroupReader("g", "m1", one),
        GroupReader("g", "m2", None),
        GroupReader("other", "m3", one, is_in_scope=False),
    ]
    parts.close()
    (line,) = caplog.messages
    assert line.startswith("cannot determine what member m2 reads: ")
    assert "it is gone" in line


def test_group_outside_environment_is_queried_by_its_own_name(asked: MockBroker) -> None:
    """With the ending of the environment that name is another group's."""
    asked.on(Request.QUERY_TOPIC_CONSUME_BY_WHO, ok(b'{"groupList":["gone"]}'))
    asked.on(Request.GET_CONSUMER_LIST_BY_GROUP, refuse(Response.SYSTEM_ERROR, "no consumer"))
    parts = Parts(asked.address, scope=Scope(suffix="dev"))
    one = (MessageQueue("t", "broker-a", 1),)
    assert readers(parts.rpc_client, parts.admin, "t") == [GroupReader("gone", None, one, is_in_scope=False)]
    (command,) = asked.seen(Request.GET_CONSUME_STATS)
    assert (command.ext["consumerGroup"], command.ext["topic"]) == ("gone", "t_dev")
    assert len(asked.seen(Request.GET_ROUTEINFO_BY_TOPIC)) == 1
    parts.close()


def test_what_each_member_wants(asked: MockBroker) -> None:
    table = f'{{"brokerAddrTable":{{"broker-a":{{"brokerName":"broker-a","brokerAddrs":{{0:"{asked.address}"}}}}}}}}'
    asked.on(Request.GET_BROKER_CLUSTER_INFO, ok(table.encode()))
    parts = Parts(asked.address, scope=Scope(suffix="dev"))
    assert member_subscriptions(parts.rpc_client, parts.admin, "g") == {"m1": {"t": Filter("a || b")}, "m2": None}
    assert member_subscriptions(parts.rpc_client, parts.admin, "nobody") == {}
    parts.close()


def test_groups_are_those_of_users_in_the_namespace(broker: MockBroker) -> None:
    parts = Parts(broker.address, scope=Scope("ns"))
    table = f'{{"brokerAddrTable":{{"a":{{"brokerName":"a","cluster":"c","brokerAddrs":{{0:"{broker.address}"}}}}}}}}'
    broker.on(Request.GET_BROKER_CLUSTER_INFO, ok(table.encode()))
    groups_there = {
        name: {"groupName": name} for name in ("ns%g", "other%h", "i", "TOOLS_CONSUMER", "CID_RMQ_SYS_TRANS")
    }
    broker.on(
        Request.GET_ALL_SUBSCRIPTIONGROUP_CONFIG, ok(json.dumps({"subscriptionGroupTable": groups_there}).encode())
    )
    assert groups(parts.rpc_client, BaseAdmin(broker.address, parts.rpc_client)) == ["g"]
    parts.pool.close()
    parts = Parts(broker.address)
    assert groups(parts.rpc_client, BaseAdmin(broker.address, parts.rpc_client)) == ["i", "ns%g", "other%h"]
    parts.pool.close()


def test_readers_are_those_that_any_broker_knows(broker: MockBroker, parts: Parts) -> None:
    """A member is connected to the brokers of its queues; another may know no member, or another group."""
    info = ok(b'{"mqTable":{},"subscriptionSet":[{"topic":"t","subString":"*"}]}')
    with MockBroker() as second, MockBroker() as third:
        at = {"broker-a": broker, "broker-b": second, "broker-c": third}
        broker.on(Request.GET_ROUTEINFO_BY_TOPIC, route(1, {name: server.address for name, server in at.items()}))
        broker.on(Request.GET_BROKER_CLUSTER_INFO, cluster({name: {"0": one.address} for name, one in at.items()}))
        there = {"broker-a": (["g"], None), "broker-b": (["g", "h"], ["m1"]), "broker-c": ([], ["m2"])}
        for name, (ids, members) in there.items():
            at[name].on(Request.QUERY_TOPIC_CONSUME_BY_WHO, ok(json.dumps({"groupList": ids}).encode()))
            none = refuse(Response.SYSTEM_ERROR, "no consumer")
            found = none if members is None else ok(json.dumps({"consumerIdList": members}).encode())
            at[name].on(Request.GET_CONSUMER_LIST_BY_GROUP, found)
            at[name].on(Request.GET_CONSUMER_RUNNING_INFO, info)
        shown = [(reader.group, reader.member, reader.queues) for reader in readers(parts.rpc_client, parts.admin, "t")]
        assert shown == [(group, member, ()) for group in "gh" for member in ("m1", "m2")]
        second.on(Request.GET_CONSUMER_RUNNING_INFO, refuse(Response.SYSTEM_ERROR, "it is gone"))
        assert member_subscriptions(parts.rpc_client, parts.admin, "g") == {"m1": None, "m2": {"t": Filter("*")}}
