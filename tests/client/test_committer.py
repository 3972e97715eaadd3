"""Offsets of a group, and the group where there is none."""

from __future__ import annotations

import json
import threading

import pytest

from rocketmq_spark.base.clock import Deadline
from rocketmq_spark.base.codes import Request, Response
from rocketmq_spark.errors import BrokerBusy, CallTimeout, GroupNotFound
from rocketmq_spark.model import MessageQueue
from tests.client.conftest import Parts
from tests.mockbroker import Call, MockBroker, never, of_proxy, ok, refuse, route

QUEUE = MessageQueue("t", "broker-a", 0)


def test_offsets_are_stored_and_errors_are_reported(broker: MockBroker, parts: Parts) -> None:
    parts.routes.get("t")
    broker.on(Request.UPDATE_CONSUMER_OFFSET, [ok(), refuse(Response.SUBSCRIPTION_GROUP_NOT_EXIST, "no group")])
    assert parts.committer.commit_each("g", {QUEUE: 5}, parts.soon) == {}
    failed = parts.committer.commit_each("g", {QUEUE: 6}, parts.soon, 1.0)
    assert [type(error) for error in failed.values()] == [GroupNotFound]
    stored = broker.seen(Request.UPDATE_CONSUMER_OFFSET)
    assert [(c.ext["consumerGroup"], c.ext["commitOffset"]) for c in stored] == [("g", "5"), ("g", "6")]


def in_300_ms(call: Call) -> None:
    """As a broker that is not beside us; later than whose time is over already is looked for once more."""
    threading.Timer(0.3, call.answer, (ok(),)).start()


def test_hanging_broker_delays_no_commits_to_other_brokers(broker: MockBroker) -> None:
    with MockBroker() as hangs:
        parts = Parts(broker.address)
        broker.on(Request.GET_ROUTEINFO_BY_TOPIC, route(2, {"broker-a": hangs.address, "broker-b": broker.address}))
        broker.on(Request.UPDATE_CONSUMER_OFFSET, in_300_ms)
        hangs.on(Request.UPDATE_CONSUMER_OFFSET, never)
        parts.routes.get("t")
        queues = [MessageQueue("t", name, number) for name in ("broker-a", "broker-b") for number in range(2)]
        failed = parts.committer.commit_each("g", dict.fromkeys(queues, 5), Deadline.after(3.0))
        assert {queue.broker_name: type(error) for queue, error in failed.items()} == {"broker-a": CallTimeout}
        assert len(failed) == len(broker.seen(Request.UPDATE_CONSUMER_OFFSET)) == 2
        parts.pool.close()


def test_all_that_failed_is_told_and_not_only_the_first(broker: MockBroker, parts: Parts) -> None:
    """What is not told counts as stored: nobody would store it again."""
    with MockBroker({Request.UPDATE_CONSUMER_OFFSET: refuse(Response.SYSTEM_BUSY, "busy")}) as other:
        broker.on(Request.GET_ROUTEINFO_BY_TOPIC, route(2, {"broker-a": broker.address, "broker-b": other.address}))
        parts.routes.get("t")
        queues = [MessageQueue("t", name, number) for name in ("broker-a", "broker-b") for number in range(3)]
        first = refuse(Response.SYSTEM_BUSY, "busy")
        broker.on(Request.UPDATE_CONSUMER_OFFSET, first)
        assert parts.committer.commit_each("g", dict.fromkeys(queues, 5), parts.soon).keys() == set(queues)
        broker.on(Request.UPDATE_CONSUMER_OFFSET, lambda call: ok() if call.ext("queueId") == "0" else first)
        other.on(Request.UPDATE_CONSUMER_OFFSET, ok())
        failed = parts.committer.commit_each("g", dict.fromkeys(queues, 5), parts.soon)
        assert sorted(failed) == queues[1:3]


def test_an_offset_whose_broker_is_not_waited_for_is_not_stored(broker: MockBroker) -> None:
    with MockBroker({Request.UPDATE_CONSUMER_OFFSET: never}) as hangs:
        parts = Parts(broker.address)
        broker.on(Request.GET_ROUTEINFO_BY_TOPIC, route(1, {"broker-a": hangs.address, "broker-b": broker.address}))
        broker.on(Request.UPDATE_CONSUMER_OFFSET, ok())
        parts.routes.get("t")
        slow, quick = QUEUE, QUEUE._replace(broker_name="broker-b")
        deadline = Deadline.after(600.0)
        failed = parts.committer.commit_each("g", {slow: 5, quick: 5}, deadline, 0.02)
        assert [(queue, type(error)) for queue, error in failed.items()] == [(slow, CallTimeout)]
        assert deadline.remaining() > 300.0, "half of the time is not waited for"
        parts.pool.close()


def test_members(broker: MockBroker, parts: Parts) -> None:
    parts.routes.get("t")
    broker.on(Request.GET_CONSUMER_LIST_BY_GROUP, ok(json.dumps({"consumerIdList": ["me@1"]}).encode()))
    assert parts.committer.members("g", "broker-a", parts.soon) == ["me@1"]


def test_a_group_is_made_with_its_retry_topic(broker: MockBroker, parts: Parts) -> None:
    cluster = {
        "brokerAddrTable": {
            "broker-a": {"brokerName": "broker-a", "cluster": "c", "brokerAddrs": {"0": broker.address}}
        },
        "clusterAddrTable": {"c": ["broker-a"]},
    }
    body = {
        "brokerDatas": [{"brokerName": "broker-a", "cluster": "c", "brokerAddrs": {"0": broker.address}}],
        "queueDatas": [{"brokerName": "broker-a", "readQueueNums": 1, "writeQueueNums": 1, "perm": 6}],
    }
    broker.on(Request.GET_BROKER_CLUSTER_INFO, ok(json.dumps(cluster).encode()))
    broker.on(Request.GET_ROUTEINFO_BY_TOPIC, ok(json.dumps(body).encode()))
    broker.on(Request.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP, ok())
    broker.on(Request.UPDATE_AND_CREATE_TOPIC, ok())
    parts.committer.create_group("g", {QUEUE: 5})
    parts.committer.create_retry_topic("g", 1.0)
    (made,) = broker.seen(Request.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP)
    assert json.loads(bytes(made.body))["groupName"] == "g"
    assert broker.seen(Request.UPDATE_AND_CREATE_TOPIC)[0].ext["topic"] == "%RETRY%g"


def at_proxy(broker: MockBroker, known: bool) -> None:
    """The broker answers as a Proxy, whose broker creates groups at their first pull, or does not."""
    no_group = refuse(Response.SUBSCRIPTION_GROUP_NOT_EXIST, "no group")
    not_found = ok(nextBeginOffset=5, minOffset=0, maxOffset=5, suggestWhichBrokerId=0)
    not_found.code = Response.PULL_NOT_FOUND
    broker.on(Request.GET_ROUTEINFO_BY_TOPIC, of_proxy(route(2, {"broker-a": broker.address})))
    broker.on(Request.GET_BROKER_CLUSTER_INFO, of_proxy(refuse(Response.REQUEST_CODE_NOT_SUPPORTED, "type 106")))
    broker.on(Request.PULL_MESSAGE, of_proxy(not_found if known else no_group))
    broker.on(
        Request.UPDATE_CONSUMER_OFFSET,
        lambda call: of_proxy(ok() if known and broker.seen(Request.PULL_MESSAGE) else no_group),
    )


def test_behind_a_proxy_a_group_is_created_by_a_pull(broker: MockBroker, parts: Parts) -> None:
    at_proxy(broker, known=True)
    parts.routes.get("t")
    offsets = dict.fromkeys((QUEUE, QUEUE._replace(queue_id=1)), 5)
    assert parts.committer.commit_each("g", offsets, parts.soon)
    parts.committer.create_group("g", offsets)
    assert parts.committer.commit_each("g", offsets, parts.soon) == {}
    (pull,) = broker.seen(Request.PULL_MESSAGE)
    assert (pull.ext["consumerGroup"], pull.ext["queueOffset"], pull.ext["suspendTimeoutMillis"]) == ("g", "5", "0")


def test_a_group_that_is_not_created_names_the_remedy(broker: MockBroker, parts: Parts) -> None:
    at_proxy(broker, known=False)
    parts.routes.get("t")
    with pytest.raises(
        GroupNotFound, match="does not know group 'g', and a Proxy does not let it be created"
    ) as caught:
        parts.committer.create_group("g", {QUEUE: 5})
    assert "mqadmin updateSubGroup -g g" in (caught.value.remedy or "")


def test_a_pull_that_creates_a_group_may_fail_for_now(broker: MockBroker, parts: Parts) -> None:
    at_proxy(broker, known=True)
    parts.routes.get("t")
    broker.on(Request.PULL_MESSAGE, of_proxy(refuse(Response.SYSTEM_BUSY)))
    with pytest.raises(BrokerBusy):
        parts.committer.create_group("g", {QUEUE: 5})
    broker.on(Request.PULL_MESSAGE, of_proxy(refuse(Response.SUBSCRIPTION_NOT_EXIST)))  # the group is there then
    parts.committer.create_group("g", {QUEUE: 5})
