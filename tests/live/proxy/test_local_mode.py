"""A Proxy in LOCAL mode, as ``mqbroker --enable-proxy`` starts it: its Remoting port serves no clients, and errors say so."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable

import pytest

from rocketmq_spark import Consumer, Message, Producer, PullConsumer, ReceivedMessage, SimpleConsumer, session
from rocketmq_spark.errors import ConnectionLost, GroupNotFound, LocalBrokerError, RocketMQError, ServiceNotAvailable
from rocketmq_spark.localbroker import LocalBroker
from tests.live.grpc.proxied import new_topic
from tests.mockbroker import eventually
from tests.reading import bodies, read


@pytest.fixture
def topic(local_proxy: LocalBroker) -> str:
    session.close_all()
    return new_topic(local_proxy, queues=2)


def received(mq: LocalBroker, group: str, topic: str) -> None:
    with SimpleConsumer(proxy_endpoint=mq.proxy_grpc, group=group) as consumer:
        consumer.subscribe(topic)
        # Without timers this broker returns no messages, but it knows the group.
        with contextlib.suppress(ServiceNotAvailable):
            consumer.receive(1)


def listened(mq: LocalBroker, group: str, topic: str) -> None:
    with Consumer(transport="grpc", proxy_endpoint=mq.proxy_grpc, group=group) as consumer:
        consumer.subscribe(topic)
        consumer.start(lambda message, context: None)


def test_the_broker_and_the_grpc_port_serve_clients(local_proxy: LocalBroker, topic: str) -> None:
    with Producer(transport="grpc", proxy_endpoint=local_proxy.proxy_grpc, group="p") as producer:
        producer.send(Message(topic, b"over gRPC"))
    with Producer(local_proxy.name_server, "p") as producer:
        producer.send(Message(topic, b"to the broker"))
    eventually(lambda: len(read(local_proxy, subscribe=topic)) == 2, 60)
    assert sorted(bodies(read(local_proxy, subscribe=topic))) == ["over gRPC", "to the broker"]


def subscribed_poll(consumer: PullConsumer, topic: str) -> list[ReceivedMessage]:
    consumer.subscribe(topic)
    return consumer.poll(60.0)


@pytest.mark.parametrize("consume", [received, listened])
def test_a_new_group_over_grpc_must_be_created(
    local_proxy: LocalBroker, topic: str, consume: Callable[[LocalBroker, str, str], None]
) -> None:
    group = f"g-{consume.__name__}-{topic}"
    with pytest.raises(
        GroupNotFound, match=r"does not know the group.*Admin\.create_group at the brokers' name server"
    ):
        consume(local_proxy, group, topic)
    local_proxy.admin.create_group(group)
    consume(local_proxy, group, topic)


@pytest.mark.parametrize("port", ["proxy_server", "proxy_grpc"])
def test_other_ports_name_the_ways_that_work(local_proxy: LocalBroker, topic: str, port: str) -> None:
    server = getattr(local_proxy, port)
    with Producer(server, "p") as producer, pytest.raises(RocketMQError) as sending:
        producer.send(Message(topic, b"x"))
    with pytest.raises(RocketMQError) as reading:
        read(server, subscribe=topic, numRetries=0)
    with PullConsumer(server, f"g-{topic}") as consumer, pytest.raises(RocketMQError) as polling:
        subscribed_poll(consumer, topic)
    for caught in (sending, reading, polling):
        text = str(caught.value)
        assert all(words in text for words in ("gRPC", "9876", "transport=grpc")), text
        assert "demands TLS" not in text


def test_a_mapped_poll_ends_although_the_proxy_answers(
    local_proxy: LocalBroker, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The Proxy returns a route and members, but reaches no broker for Remoting clients."""
    monkeypatch.setattr("rocketmq_spark.consumer.reachability.MAX_UNREACHED_S", 8.0)
    with (
        PullConsumer(local_proxy.proxy_server, f"g-{topic}", address_map="nameServer") as consumer,
        pytest.raises(ConnectionLost, match=r"no broker has answered.*transport=grpc"),
    ):
        subscribed_poll(consumer, topic)


def test_the_broker_restarts_with_its_proxy(local_proxy: LocalBroker, topic: str) -> None:
    before = (local_proxy.data / "broker-a" / "broker.conf").read_text()
    local_proxy.restart("proxy", {"maxDelayTimeMills": 5000})
    fields = json.loads((local_proxy.data / "broker-a" / "rmq-proxy.json").read_text())
    assert fields["maxDelayTimeMills"] == 5000
    assert (local_proxy.data / "broker-a" / "broker.conf").read_text() == before
    assert local_proxy.address("proxy") == local_proxy.proxy_server
    with Producer(local_proxy.name_server, "p") as producer:
        producer.send(Message(topic, b"to the broker"))
    with pytest.raises(LocalBrokerError, match="runs in the process of one broker, but there are 2"):
        local_proxy.add_broker()
