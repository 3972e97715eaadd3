"""Transactions through a real Proxy."""

from __future__ import annotations

from collections import Counter

import pytest

from rocketmq_spark import Message, PoppedMessage, Producer
from rocketmq_spark.localbroker import LocalBroker
from rocketmq_spark.model.send import HalfState
from rocketmq_spark.producer import transactions
from tests.helpers import stored_now
from tests.live.grpc.proxied import new_topic
from tests.mockbroker import eventually
from tests.witness import java_read


def test_decisions_and_questions_go_through_the_proxy(asking_proxy: LocalBroker) -> None:
    topic = new_topic(asking_proxy, "TRANSACTION", 2)
    saved: set[bytes] = set()
    asked: list[bytes] = []

    def was_saved(message: PoppedMessage) -> str:
        asked.append(message.body)
        return "COMMIT" if message.body in saved else "ROLLBACK"

    with Producer(
        transport="grpc", proxy_endpoint=asking_proxy.proxy_grpc, group="shop", transaction_check=was_saved
    ) as producer:
        for i in range(5):
            with producer.transaction(Message(topic, b"yes %d" % i, keys=[f"k{i}"])) as half:
                pass
            assert half.state is HalfState.COMMITTED
            with pytest.raises(KeyError), producer.transaction(Message(topic, b"no %d" % i)):
                raise KeyError
        for i in range(3):
            producer.send_half(Message(topic, b"left %d" % i))
            producer.send_half(Message(topic, b"lost %d" % i))
        saved |= {b"left %d" % i for i in range(3)}
        transactions._registry._recent_fates.clear()  # as in another process
        eventually(lambda: len(set(asked)) == 6, 90)
        eventually(lambda: len(stored_now(asking_proxy, topic)) == 8, 60)
    wanted = Counter([*(b"yes %d" % i for i in range(5)), *saved])
    assert Counter(record.body for record in java_read(asking_proxy.name_server, topic, 8, bodies=True)) == wanted
