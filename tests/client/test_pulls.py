"""What a read asks beside its pulls."""

from __future__ import annotations

import json

import pytest

from rocketmq_spark.client.credentials import Credentials
from rocketmq_spark.codes import BATCH_QUEUE, CLEANUP_POLICY, COMPACTION, QUEUE_TYPE, Request, Response
from rocketmq_spark.errors import AccessDenied
from rocketmq_spark.model import MessageQueue
from tests.client.conftest import Parts
from tests.mockbroker import MockBroker, ok, refuse

QUEUE = MessageQueue("t", "broker-a", 0)


@pytest.fixture
def clustered(broker: MockBroker) -> MockBroker:
    data = {"brokerName": "broker-a", "cluster": "c", "brokerAddrs": {"0": broker.address}}
    cluster = {"brokerAddrTable": {"broker-a": data}, "clusterAddrTable": {"c": ["broker-a"]}}
    broker.on(Request.GET_BROKER_CLUSTER_INFO, ok(json.dumps(cluster).encode()))
    return broker


def config(**attributes: str) -> bytes:
    return json.dumps(
        {
            "topicName": "t",
            "readQueueNums": 1,
            "writeQueueNums": 1,
            "perm": 6,
            "topicFilterType": "SINGLE_TAG",
            "topicSysFlag": 0,
            "order": False,
            "attributes": {name.replace("_", "."): value for name, value in attributes.items()},
        }
    ).encode()


def test_a_compaction_topic_is_asked_for_once(clustered: MockBroker, parts: Parts) -> None:
    clustered.on(Request.GET_TOPIC_CONFIG, ok(config(**{CLEANUP_POLICY: COMPACTION})))
    assert parts.pulls.compacted(QUEUE)
    assert parts.pulls.compacted(QUEUE._replace(queue_id=1))
    assert len(clustered.seen(Request.GET_TOPIC_CONFIG)) == 1
    assert parts.pulls.attributes("t", "broker-a") == {CLEANUP_POLICY: COMPACTION}


def test_a_batch_topic_is_known_by_the_same_answer(clustered: MockBroker, parts: Parts) -> None:
    clustered.on(Request.GET_TOPIC_CONFIG, ok(config(**{QUEUE_TYPE: BATCH_QUEUE})))
    assert (parts.pulls.batched(QUEUE), parts.pulls.compacted(QUEUE)) == (True, False)
    assert len(clustered.seen(Request.GET_TOPIC_CONFIG)) == 1


def test_an_old_broker_has_none(clustered: MockBroker, parts: Parts) -> None:
    clustered.on(Request.GET_TOPIC_CONFIG, refuse(Response.REQUEST_CODE_NOT_SUPPORTED, "no such request"))
    assert not parts.pulls.compacted(QUEUE)


def test_who_may_not_know_is_told_what_for(clustered: MockBroker, parts: Parts) -> None:
    clustered.on(Request.GET_TOPIC_CONFIG, refuse(Response.NO_PERMISSION, "no"))
    with pytest.raises(AccessDenied, match="right for compaction topics only"):
        parts.pulls.compacted(QUEUE)
    with pytest.raises(AccessDenied, match=r"do not filter .* a batch topic"):
        parts.pulls.batched(QUEUE)


def test_routes_are_those_of_now_and_names_those_of_the_wire(broker: MockBroker, parts: Parts) -> None:
    for _ in range(2):
        assert parts.pulls.route("t", parts.soon).brokers["broker-a"].master == broker.address
    assert len(broker.seen(Request.GET_ROUTEINFO_BY_TOPIC)) == 2
    assert parts.pulls.on_wire("t") == "t"


def test_who_signs(broker: MockBroker, parts: Parts) -> None:
    assert parts.pulls.keys() is None
    signing = Parts(broker.address, credentials=Credentials("me", "hush"))
    assert signing.pulls.keys() == ("me", "hush", None)
    signing.pool.close()
