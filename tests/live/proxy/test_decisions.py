"""Transactions and requests for replies through a Proxy's Remoting port, which reports success before brokers know of it."""

from __future__ import annotations

from collections import Counter

import pytest

from rocketmq_spark import Message, Producer, ReceivedMessage
from rocketmq_spark.errors import NotSupported, ReplyTimeout
from rocketmq_spark.localbroker import LocalBroker
from rocketmq_spark.model.send import HalfState
from rocketmq_spark.producer import transactions
from tests.helpers import stored_now
from tests.live.grpc.proxied import new_topic
from tests.mockbroker import eventually
from tests.witness import java_read


def test_decisions_of_an_open_producer_arrive_at_the_check(asking_proxy: LocalBroker) -> None:
    topic = new_topic(asking_proxy, "TRANSACTION", 2)
    asked: list[bytes] = []

    def unsure(message: ReceivedMessage) -> str:
        asked.append(message.body)
        return "UNKNOWN"

    with Producer(asking_proxy.proxy_server, f"shop-{topic}", transaction_check=unsure) as producer:
        for i in range(5):
            with producer.transaction(Message(topic, b"yes %d" % i)) as half:
                pass
            assert half.state is HalfState.COMMITTED
            with pytest.raises(KeyError), producer.transaction(Message(topic, b"no %d" % i)) as half:
                raise KeyError
            assert half.state is HalfState.ROLLED_BACK
        eventually(lambda: len(stored_now(asking_proxy, topic)) == 5, 120)
    wanted = Counter(b"yes %d" % i for i in range(5))
    assert Counter(record.body for record in java_read(asking_proxy.name_server, topic, 5, bodies=True)) == wanted
    assert asked == [], "the process answers with its decisions"


def test_a_commit_right_before_close_is_left_to_the_group(asking_proxy: LocalBroker) -> None:
    topic = new_topic(asking_proxy, "TRANSACTION", 1)
    group, checked = f"shop-{topic}", list[bytes]()

    def was_saved(message: ReceivedMessage) -> str:
        checked.append(message.body)
        return "COMMIT"

    with (
        Producer(asking_proxy.proxy_server, group, transaction_check=was_saved) as first,
        first.transaction(Message(topic, b"first")),
    ):
        pass
    transactions._registry.clear()  # as in another process
    with Producer(asking_proxy.name_server, group, transaction_check=was_saved) as second:
        second.send_half(Message(topic, b"second")).rollback()
        eventually(lambda: [one.body for one in stored_now(asking_proxy, topic)] == [b"first"], 120)
    assert set(checked) == {b"first"}


def test_a_request_for_a_reply_is_refused_before_it_is_sent(asking_proxy: LocalBroker) -> None:
    topic = new_topic(asking_proxy, "NORMAL", 1)
    refused = pytest.raises(NotSupported, match="a Proxy does not forward replies")
    with Producer(asking_proxy.proxy_server, "askers") as producer, refused:
        producer.request(Message(topic, b"question"), timeout_s=20)
    with Producer(asking_proxy.name_server, "askers") as producer, pytest.raises(ReplyTimeout):
        producer.request(Message(topic, b"to the brokers"), timeout_s=5)
    assert [one.body for one in stored_now(asking_proxy, topic)] == [b"to the brokers"]
