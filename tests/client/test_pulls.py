"""What a read asks beside its pulls."""

from __future__ import annotations

import pytest

from rocketmq_spark.base.clock import Deadline
from rocketmq_spark.base.codes import BATCH_QUEUE, COMPACTION, Request, Response
from rocketmq_spark.base.retry import Retry
from rocketmq_spark.client.credentials import Credentials
from rocketmq_spark.client.pull_source import RemotingPulls
from rocketmq_spark.errors import AccessDenied, CallTimeout
from rocketmq_spark.model import MessageQueue
from tests.client.conftest import Parts
from tests.mockbroker import MockBroker, never, refuse, topic_config

QUEUE = MessageQueue("t", "broker-a", 0)


def test_a_compaction_topic_is_asked_for_once(broker: MockBroker, parts: Parts) -> None:
    broker.on(Request.GET_TOPIC_CONFIG, topic_config(cleanup_policy=COMPACTION))
    assert parts.pulls.is_compacted(QUEUE)
    assert parts.pulls.is_compacted(QUEUE._replace(queue_id=1))
    assert len(broker.seen(Request.GET_TOPIC_CONFIG)) == 1


def test_a_batch_topic_is_known_by_the_same_answer(broker: MockBroker, parts: Parts) -> None:
    broker.on(Request.GET_TOPIC_CONFIG, topic_config(queue_type=BATCH_QUEUE))
    assert (parts.pulls.stores_batches(QUEUE), parts.pulls.is_compacted(QUEUE)) == (True, False)
    assert len(broker.seen(Request.GET_TOPIC_CONFIG)) == 1


def test_brokers_filter_nothing_of_a_compaction_topic(broker: MockBroker, parts: Parts) -> None:
    broker.on(Request.GET_TOPIC_CONFIG, topic_config(cleanup_policy="COMPACTION"))
    assert (parts.pulls.stores_batches(QUEUE), parts.pulls.is_compacted(QUEUE)) == (True, True)


def test_reader_asks_for_the_topic_kind_again_after_a_second(
    broker: MockBroker, parts: Parts, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 0.0
    monkeypatch.setattr("rocketmq_spark.client.topic_attributes.time.monotonic", lambda: now)
    assert not parts.pulls.stores_batches(QUEUE)
    broker.on(Request.GET_TOPIC_CONFIG, topic_config(queue_type=BATCH_QUEUE))
    now = 0.9
    assert not parts.pulls.stores_batches(QUEUE)
    now = 1.1
    assert parts.pulls.stores_batches(QUEUE)


def test_topic_at_a_proxy_may_be_batched_but_not_compacted(broker: MockBroker, parts: Parts) -> None:
    broker.on(Request.GET_TOPIC_CONFIG, refuse(Response.REQUEST_CODE_NOT_SUPPORTED, "no such request"))
    assert (parts.pulls.stores_batches(QUEUE), parts.pulls.is_compacted(QUEUE)) == (True, False)


def test_who_may_not_know_is_told_what_for(broker: MockBroker, parts: Parts) -> None:
    broker.on(Request.GET_TOPIC_CONFIG, refuse(Response.NO_PERMISSION, "no"))
    with pytest.raises(AccessDenied, match="right for compaction topics only"):
        parts.pulls.is_compacted(QUEUE)
    with pytest.raises(AccessDenied, match=r"do not filter .* a batch topic"):
        parts.pulls.stores_batches(QUEUE)


def test_topic_kind_request_with_retries_ends_at_its_deadline(broker: MockBroker, parts: Parts) -> None:
    broker.on(Request.GET_TOPIC_CONFIG, never)
    pulls = RemotingPulls(parts.rpc_client, parts.routes, parts.kinds, Retry(1, 0.01))
    for ask in (pulls.stores_batches, pulls.is_compacted):
        with pytest.raises(CallTimeout):
            ask(QUEUE, Deadline.after(0.05))
    heard = broker.seen(Request.GET_TOPIC_CONFIG)  # on a slow machine the time may be over before
    assert len(heard) <= 2


def test_routes_are_those_of_now_and_names_those_of_the_wire(broker: MockBroker, parts: Parts) -> None:
    for _ in range(2):
        assert parts.pulls.route("t", parts.soon).brokers["broker-a"].master == broker.address
    assert len(broker.seen(Request.GET_ROUTEINFO_BY_TOPIC)) == 2
    assert parts.pulls.name_on_wire("t") == "t"


def test_who_signs(broker: MockBroker, parts: Parts) -> None:
    assert parts.pulls.signing_keys() is None
    signing = Parts(broker.address, credentials=Credentials("me", "hush"))
    assert signing.pulls.signing_keys() == ("me", "hush", None)
    signing.pool.close()
