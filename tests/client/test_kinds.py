"""What kind of topic one is."""

from __future__ import annotations

import pytest

from rocketmq_spark.base import codes
from rocketmq_spark.base.clock import Deadline
from rocketmq_spark.base.codes import BATCH_QUEUE, Request, Response
from rocketmq_spark.client import topic_attributes
from rocketmq_spark.client.topic_attributes import TopicAttributesCache, is_batched
from rocketmq_spark.errors import AccessDenied, BrokerBusy
from rocketmq_spark.localbroker import LocalBroker
from rocketmq_spark.model import MessageQueue
from rocketmq_spark.model.send import BatchStorage
from rocketmq_spark.wire.header import Command
from tests.client.conftest import Parts
from tests.mockbroker import MockBroker, never, refuse, route, topic_config

WHOLE = BatchStorage(as_one_message=True)
KINDS = {"batched": WHOLE, "ordinary": BatchStorage(), "compacted": BatchStorage(is_compacted=True)}

CONFIG = Request.GET_TOPIC_CONFIG
QUEUE = MessageQueue("t", "broker-a", 0)


@pytest.fixture
def stale(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is known is at once too old."""
    monkeypatch.setattr(topic_attributes, "ATTRIBUTES_AGE_S", -1.0)


def batched(parts: Parts) -> bool:
    return parts.kinds.stores_batches(QUEUE, parts.soon)


def test_a_topic_is_asked_about_once(broker: MockBroker, parts: Parts) -> None:
    broker.on(CONFIG, topic_config(queue_type=BATCH_QUEUE))
    assert not parts.kinds.is_cached(QUEUE)
    assert [batched(parts) for _ in range(3)] == [True] * 3
    assert parts.kinds.is_cached(QUEUE._replace(queue_id=5))
    assert not parts.kinds.is_cached(QUEUE._replace(topic="u"))
    (asked,) = broker.seen(CONFIG)
    assert (asked.ext["topic"], asked.ext["bname"]) == ("t", "broker-a")


@pytest.mark.usefixtures("stale")
def test_a_topic_that_was_made_again_may_be_of_another_kind(broker: MockBroker, parts: Parts) -> None:
    assert not batched(parts)
    broker.on(CONFIG, topic_config(queue_type=BATCH_QUEUE))
    assert batched(parts)


@pytest.mark.usefixtures("stale")
def test_what_was_known_holds_while_the_broker_does_not_answer(broker: MockBroker, parts: Parts) -> None:
    broker.on(CONFIG, refuse(Response.SYSTEM_BUSY))
    with pytest.raises(BrokerBusy):
        batched(parts)
    broker.on(CONFIG, topic_config(queue_type=BATCH_QUEUE))
    assert batched(parts)
    broker.on(CONFIG, refuse(Response.SYSTEM_BUSY))
    assert batched(parts)


@pytest.mark.parametrize(
    ("version", "attributes"), [(codes.FIRST_VERSION_WITH_ATTRIBUTES - 1, {}), (codes.VERSION, None)]
)
def test_old_broker_means_ordinary_topic_and_proxy_means_unknown(
    version: int, attributes: object, broker: MockBroker, parts: Parts
) -> None:
    broker.on(CONFIG, Command(int(Response.REQUEST_CODE_NOT_SUPPORTED), version=version))
    assert parts.kinds.attributes("t", "broker-a", parts.soon) == attributes
    assert batched(parts) == (attributes is None)


def test_who_may_not_ask_is_told_so_and_does_not_ask_again(broker: MockBroker, parts: Parts) -> None:
    broker.on(CONFIG, refuse(Response.NO_PERMISSION))
    for _ in range(2):
        with pytest.raises(AccessDenied):
            batched(parts)
    assert len(broker.seen(CONFIG)) == 1


def test_the_first_broker_that_answers_says_it_for_a_sender(
    broker: MockBroker, parts: Parts, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(topic_attributes, "MAX_REFUSAL_DURATION_S", 0.0)
    with MockBroker() as other:
        broker.on(Request.GET_ROUTEINFO_BY_TOPIC, route(2, {"broker-a": broker.address, "broker-b": other.address}))
        broker.on(CONFIG, refuse(Response.SYSTEM_BUSY))
        other.on(CONFIG, topic_config(queue_type=BATCH_QUEUE))
        assert [parts.sender.batch_storage("t", parts.soon) for _ in range(2)] == [WHOLE, WHOLE]
        assert (len(broker.seen(CONFIG)), len(other.seen(CONFIG))) == (1, 1)  # who was silent is left out for a while
        other.on(CONFIG, refuse(Response.SYSTEM_BUSY))
        assert TopicAttributesCache(parts.rpc_client, parts.routes).batch_storage("t", ["broker-b"], parts.soon) is None


def test_topic_kind_denied_by_brokers_counts_as_ordinary(broker: MockBroker, parts: Parts) -> None:
    """The kind never becomes known: messages that went alone until then would go alone for ever."""
    with MockBroker() as other:
        broker.on(Request.GET_ROUTEINFO_BY_TOPIC, route(2, {"broker-a": broker.address, "broker-b": other.address}))
        broker.on(CONFIG, refuse(Response.NO_PERMISSION))
        other.on(CONFIG, topic_config(queue_type=BATCH_QUEUE))
        assert [parts.sender.batch_storage("t", parts.soon) for _ in range(2)] == [WHOLE, WHOLE]
        other.on(CONFIG, refuse(Response.NO_PERMISSION))
        assert [parts.sender.batch_storage("u", parts.soon) for _ in range(2)] == [BatchStorage()] * 2
        assert (len(broker.seen(CONFIG)), len(other.seen(CONFIG))) == (2, 2)


def test_a_broker_that_fails_at_once_is_asked_again_soon(
    broker: MockBroker, parts: Parts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It costs no time, and the kind must be known when a spool sends its batches: that is when the broker is back."""
    monkeypatch.setattr(topic_attributes, "PAUSE_AFTER_REFUSAL_S", 0.0)
    monkeypatch.setattr(topic_attributes, "MAX_REFUSAL_DURATION_S", 1e9)
    broker.on(CONFIG, refuse(Response.SYSTEM_BUSY))
    assert parts.sender.batch_storage("t", parts.soon) is None
    broker.on(CONFIG, topic_config(queue_type=BATCH_QUEUE))
    assert parts.sender.batch_storage("t", parts.soon) == WHOLE


def test_a_broker_that_hangs_leaves_time_for_those_that_answer(broker: MockBroker, parts: Parts) -> None:
    with MockBroker() as other:
        broker.on(Request.GET_ROUTEINFO_BY_TOPIC, route(2, {"broker-a": broker.address, "broker-b": other.address}))
        broker.on(CONFIG, never)
        other.on(CONFIG, topic_config(queue_type=BATCH_QUEUE))
        assert parts.sender.batch_storage("t", Deadline.after(4.0)) == WHOLE


def test_a_broker_that_hangs_is_asked_last_about_other_topics(broker: MockBroker, parts: Parts) -> None:
    """Otherwise a write to many topics would wait for it once for each of them."""
    with MockBroker() as other:
        broker.on(Request.GET_ROUTEINFO_BY_TOPIC, route(2, {"broker-a": broker.address, "broker-b": other.address}))
        broker.on(CONFIG, never)
        found = [parts.sender.batch_storage(topic, Deadline.after(2.0)) for topic in "tuv"]
        assert found == [BatchStorage()] * 3
        assert [command.ext["topic"] for command in broker.seen(CONFIG)] == ["t"]
        other.on(CONFIG, refuse(Response.SYSTEM_BUSY))
        broker.on(CONFIG, topic_config(queue_type=BATCH_QUEUE))
        assert parts.sender.batch_storage("w", parts.soon) == WHOLE


def test_unknown_batch_storage_is_requested_again_later(
    broker: MockBroker, parts: Parts, monkeypatch: pytest.MonkeyPatch
) -> None:
    broker.on(CONFIG, Command(int(Response.REQUEST_CODE_NOT_SUPPORTED), version=codes.VERSION))  # a proxy
    assert [parts.sender.batch_storage("t", parts.soon) for _ in range(2)] == [BatchStorage()] * 2
    assert len(broker.seen(CONFIG)) == 1
    monkeypatch.setattr(topic_attributes, "ATTRIBUTES_AGE_S", -1.0)
    broker.on(CONFIG, topic_config(queue_type=BATCH_QUEUE))
    assert parts.sender.batch_storage("t", parts.soon) == WHOLE
    broker.on(Request.GET_ROUTEINFO_BY_TOPIC, refuse(Response.TOPIC_NOT_EXIST))
    assert parts.sender.batch_storage("u", parts.soon) is None


def test_attributes_that_are_not_known_are_no_answer() -> None:
    assert [is_batched(each) for each in (None, {}, {"queue.type": "SimpleCQ"}, {"queue.type": "BatchCQ"})] == [
        None, False, False, True,
    ]  # fmt: skip


def test_a_real_broker_tells(real: Parts, broker_cluster: LocalBroker) -> None:
    broker_cluster.create_topic("kinds-batched", 1, batch=True)
    broker_cluster.create_topic("kinds-ordinary", 1)
    broker_cluster.create_topic("kinds-compacted", 1, attributes={"cleanup.policy": "COMPACTION"})
    found = {kind: real.sender.batch_storage(f"kinds-{kind}", Deadline.after(10.0)) for kind in KINDS}
    assert found == KINDS
