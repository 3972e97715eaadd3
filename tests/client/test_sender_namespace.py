"""Every verb of a producer stays in its namespace: a name that is sent as the user wrote it is another tenant's."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future
from typing import Any

import pytest

from rocketmq_spark.base.codes import FIRST_WITH_TIMERS, Request
from rocketmq_spark.model import MessageQueue, SendRequest
from rocketmq_spark.wire.names import Scope
from tests.client.conftest import Parts
from tests.mockbroker import MockBroker, ok

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
def test_11_26_topic_and_group_of_a_send(broker: MockBroker, tenant: Parts, mode: str, batch: bool) -> None:
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


def test_11_26_topic_and_group_of_everything_else(broker: MockBroker, tenant: Parts) -> None:
    sender, soon = tenant.sender, tenant.soon
    sender.publish_queues("t", soon)
    sender.recall("t", "broker-a", "handle", "g", soon)
    assert sender.probe("broker-a", "t", soon)
    assert sender.timers("t", ["broker-a"], soon) == {"broker-a": 259_200_000}
    assert ANSWER.version >= FIRST_WITH_TIMERS
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
