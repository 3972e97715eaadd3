"""Every verb of producers and consumers stays in its namespace: a name that is sent as the user wrote it is another tenant's."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import Future
from typing import Any

import pytest

from rocketmq_spark.base.codes import FIRST_VERSION_WITH_TIMERS, Request
from rocketmq_spark.model import MessageQueue, SendRequest
from rocketmq_spark.wire.names import Scope
from tests.client.conftest import Parts
from tests.client.test_send_back import message
from tests.mockbroker import MockBroker, ok, topic_config

QUEUE = MessageQueue("t", "broker-a", 1)
ANSWER = ok(msgId="0A", queueId=1, queueOffset=7)


@pytest.fixture
def tenant(broker: MockBroker) -> Iterator[Parts]:
    one = Parts(broker.address, scope=Scope("ns"))
    for code in (Request.SEND_MESSAGE_V2, Request.SEND_BATCH_MESSAGE):
        broker.on(code, ANSWER)
    broker.on(Request.RECALL_MESSAGE, ok(msgId="0A"))
    for code in (Request.GET_MAX_OFFSET, Request.HEART_BEAT, Request.UNREGISTER_CLIENT):
        broker.on(code, ok(offset=1))
    yield one
    one.pool.close()


def later(parts: Parts, request: SendRequest) -> None:
    told: Future[Any] = Future()
    parts.sender.send_async(QUEUE, request, parts.soon, told.set_result)
    told.result(60)


@pytest.mark.parametrize("batch", [False, True])
@pytest.mark.parametrize("mode", ["sync", "async", "oneway"])
def test_topic_and_group_of_a_send(broker: MockBroker, tenant: Parts, mode: str, batch: bool) -> None:
    request = SendRequest("g", b"x", batch=batch)
    if mode == "sync":
        tenant.sender.send(QUEUE, request, tenant.soon)
    elif mode == "async":
        later(tenant, request)
    else:
        tenant.sender.send_oneway(QUEUE, request, tenant.soon)
    code = Request.SEND_BATCH_MESSAGE if batch else Request.SEND_MESSAGE_V2
    broker.wait_for(lambda: bool(broker.seen(code)))
    (sent,) = broker.seen(code)
    assert (sent.ext["a"], sent.ext["b"], sent.ext["c"]) == ("ns%g", "ns%t", "TBW102")
    assert {command.ext["topic"] for command in broker.seen(Request.GET_ROUTEINFO_BY_TOPIC)} == {"ns%t"}


def test_topic_and_group_of_everything_else(broker: MockBroker, tenant: Parts) -> None:
    sender, soon = tenant.sender, tenant.soon
    sender.publish_queues("t", soon)
    sender.recall("t", "broker-a", "handle", "g", soon)
    assert sender.probe("broker-a", "t", soon)
    assert sender.max_timer_delays_ms("t", ["broker-a"], soon) == {"broker-a": 259_200_000}
    assert ANSWER.version >= FIRST_VERSION_WITH_TIMERS
    leave = sender.join("g", 0.0)
    tenant.instance.heartbeat(soon)
    leave(soon)
    (recall,) = broker.seen(Request.RECALL_MESSAGE)
    assert (recall.ext["topic"], recall.ext["producerGroup"]) == ("ns%t", "ns%g")
    assert [command.ext["topic"] for command in broker.seen(Request.GET_MAX_OFFSET)] == ["ns%t"] * 2
    (beat,) = broker.seen(Request.HEART_BEAT)
    assert b'"groupName":"ns%g"' in bytes(beat.body)
    (bye,) = broker.seen(Request.UNREGISTER_CLIENT)
    assert bye.ext["producerGroup"] == "ns%g"


def test_topic_and_group_of_what_a_member_asks_of_a_queue(broker: MockBroker, tenant: Parts) -> None:
    """With a plain name, a group of that name outside would hold its locks, have its offsets and get its retries."""
    mine, locks = (
        {"topic": "ns%t", "brokerName": "broker-a", "queueId": 1},
        (Request.LOCK_BATCH_MQ, Request.UNLOCK_BATCH_MQ),
    )
    broker.on(locks[0], ok(json.dumps({"lockOKMQSet": [mine]}).encode()))
    broker.on(Request.GET_CONSUMER_LIST_BY_GROUP, ok(b'{"consumerIdList":["one"]}'))
    for code in (locks[1], Request.UPDATE_CONSUMER_OFFSET, Request.CONSUMER_SEND_MSG_BACK):
        broker.on(code, ok())
    broker.on(Request.QUERY_CONSUMER_OFFSET, ok(offset=8))
    member, soon = tenant.member, tenant.soon
    assert member.members("g", "t", soon) == ["one"]
    assert member.lock("g", [QUEUE], soon) == {QUEUE}
    member.unlock("g", [QUEUE], soon)
    assert member.committed("g", QUEUE, soon) == 8
    assert member.commit("g", {QUEUE: 9}, soon) == {}
    member.send_back("g", message(), -1, 16, soon)
    member.send_to_retry("g", message(), 16, soon)
    for code in locks:
        (lock,) = broker.seen(code)
        asked = json.loads(bytes(lock.body))
        assert (asked["consumerGroup"], asked["mqSet"]) == ("ns%g", [mine])
    about = (Request.GET_CONSUMER_LIST_BY_GROUP, Request.QUERY_CONSUMER_OFFSET, Request.UPDATE_CONSUMER_OFFSET)
    assert [broker.seen(code)[0].ext["consumerGroup"] for code in about] == ["ns%g"] * 3
    assert [broker.seen(code)[0].ext["topic"] for code in about[1:]] == ["ns%t"] * 2
    (back,) = broker.seen(Request.CONSUMER_SEND_MSG_BACK)
    assert (back.ext["group"], back.ext["originTopic"]) == ("ns%g", "ns%t")
    (copy,) = broker.seen(Request.SEND_MESSAGE_V2)
    assert copy.ext["b"] == "%RETRY%ns%g"
    assert "RETRY_TOPIC\x01ns%t\x02" in copy.ext["i"]


def test_topic_and_group_of_what_readers_ask(broker: MockBroker, tenant: Parts) -> None:
    """Else the topic of that name outside says how this one stores batches, or whether its filter is right."""
    broker.on(Request.CHECK_CLIENT_CONFIG, ok())
    broker.on(Request.GET_MAX_OFFSET, ok(offset=0))
    broker.on(Request.GET_TOPIC_CONFIG, topic_config())
    broker.on(Request.PULL_MESSAGE, ok(nextBeginOffset=1, minOffset=0, maxOffset=1))
    brokers, soon = tenant.offset_reader, tenant.soon
    tenant.routes.get("t")
    assert not brokers.is_proxy("t", "broker-a", soon)
    assert brokers.read_queue_count("t", "broker-a", soon) is not None
    assert tenant.kinds.attributes("t", "broker-a", soon) == {}
    tenant.broker_client.attributes([("broker-a", "t")], soon)
    brokers.check_filter("broker-a", "g", "t", "a > 1", soon)
    brokers.sample("g", QUEUE, 0, soon)
    kinds = [command.ext["topic"] for command in broker.seen(Request.GET_TOPIC_CONFIG)]
    assert kinds == ["ns%t"] * 3
    assert broker.seen(Request.GET_MAX_OFFSET)[0].ext["topic"] == "ns%t"
    (check,) = broker.seen(Request.CHECK_CLIENT_CONFIG)
    told = json.loads(bytes(check.body))
    assert (told["group"], told["subscriptionData"]["topic"]) == ("ns%g", "ns%t")
    (pull,) = broker.seen(Request.PULL_MESSAGE)
    assert (pull.ext["consumerGroup"], pull.ext["topic"]) == ("ns%g", "ns%t")
