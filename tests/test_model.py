"""The nouns: order, permissions of routes, and what is derived from stored messages."""

import dataclasses
import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rocketmq_spark.errors import RemoteProtocolError
from rocketmq_spark.model import (
    BrokerData,
    Message,
    MessageQueue,
    OffsetRange,
    QueueBounds,
    QueueData,
    ReceivedMessage,
    TopicRoute,
)
from tests.strategies import queues

BROKERS = {
    "a": BrokerData("a", "c", {0: "a:1", 1: "a:2"}),
    "b": BrokerData("b", "c", {1: "b:2"}),
}


def route(*data: QueueData, order_conf: str | None = None) -> TopicRoute:
    return TopicRoute("t", data, BROKERS, order_conf)


def queue(broker: str, number: int) -> MessageQueue:
    return MessageQueue("t", broker, number)


@given(st.lists(queues))
def test_queues_are_ordered_as_in_java(found):
    assert sorted(found) == sorted(found, key=lambda q: (q.topic, q.broker_name, q.queue_id))


def test_queues_are_keys_and_read_well():
    assert {queue("a", 1): 5}[queue("a", 1)] == 5
    assert str(queue("a", 1)) == "t/a/1"
    assert pickle.loads(pickle.dumps(queue("a", 1))) == queue("a", 1)


@pytest.mark.parametrize(
    ("perm", "readable", "writable"), [(6, 2, 1), (4, 2, 0), (2, 0, 1), (0, 0, 0), (7, 2, 1)], ids=str
)
def test_permissions(perm, readable, writable):
    found = route(QueueData("a", 2, 1, perm))
    assert (len(found.readable_queues()), len(found.writable_queues())) == (readable, writable)


def test_readable_needs_any_replica_and_writable_a_master():
    found = route(QueueData("b", 1, 1, 6), QueueData("a", 1, 1, 6), QueueData("gone", 4, 4, 6))
    assert found.readable_queues() == [queue("a", 0), queue("b", 0)]
    assert found.writable_queues() == [queue("a", 0)]


def test_ordered_topics_name_their_queues():
    assert route(order_conf="b:2;a:1").writable_queues() == [queue("b", 0), queue("b", 1), queue("a", 0)]


@pytest.mark.parametrize("order_conf", ["a:200001", "a:150000;b:50001", "a:99999999999999", "a:x", "a"])
def test_an_order_of_more_queues_than_anybody_means_is_none(order_conf):
    with pytest.raises(RemoteProtocolError, match=f"orderTopicConf '{order_conf}'; expected broker:queues"):
        TopicRoute("t", (), {}, order_conf).writable_queues()


def test_the_master_may_be_missing():
    assert BROKERS["a"].master == "a:1"
    assert BROKERS["b"].master is None


@pytest.mark.parametrize(
    ("broker", "wanted", "address"),
    [
        ("a", "master", "a:1"),
        ("a", "hint", "a:1"),
        ("a", "slave", "a:2"),
        ("b", "master", None),
        ("b", "hint", "b:2"),
        ("b", "slave", "b:2"),
    ],
)
def test_where_to_read(broker, wanted, address):
    assert BROKERS[broker].replica(wanted) == address


def test_one_key_may_be_given_as_text():
    assert Message("t", b"x", keys="k").keys == ["k"]
    assert Message("t", b"x", keys="k l").keys == ["k", "l"]
    assert Message("t", b"x", keys=["k", "l"]).keys == ["k", "l"]
    assert Message("t", b"x").keys == ()


def received(**properties: str) -> ReceivedMessage:
    values = {field.name: 0 for field in dataclasses.fields(ReceivedMessage)}
    return ReceivedMessage(**{**values, "properties": properties, "offset_msg_id": "0A00"})  # type: ignore[arg-type]


def test_what_a_stored_message_tells():
    message = received(TAGS="vip", KEYS="k1  k\t2", UNIQ_KEY="7F00")
    assert (message.tags, message.keys, message.msg_id) == ("vip", ["k1", "k\t2"], "7F00")
    assert (received().tags, received().keys, received().msg_id) == (None, [], "0A00")


def test_the_size_of_a_range():
    assert OffsetRange(queue("a", 0), 5, 9).size == 4


@pytest.mark.parametrize(("offset", "nearest"), [(1, 2), (2, 2), (5, 5), (9, 9), (10, 9)])
def test_the_nearest_offset_that_can_be_read(offset, nearest):
    assert QueueBounds(2, 9, 0).clamp(offset) == nearest
