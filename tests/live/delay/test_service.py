"""Delays of any length through the service, on real brokers: one that has timers, and one that is as a 4.9 in this."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from rocketmq_spark import Message, Producer, PullConsumer
from rocketmq_spark.delay.release import DEAD_TOPIC, PROBLEM_PROPERTY
from rocketmq_spark.errors import MessageRefused
from rocketmq_spark.localbroker import LocalBroker
from rocketmq_spark.model import ReceivedMessage
from rocketmq_spark.wire.envelope import INNER_TOPIC
from tests.helpers import awaited, stored, total
from tests.live.delay.serving import DAYS_10, Node
from tests.witness import JavaPeer


@pytest.fixture
def producing(rocketmq: LocalBroker) -> Iterator[Producer]:
    with Producer(name_server=rocketmq.name_server, group="g_delay", long_delay="dmq") as one:
        yield one


@pytest.fixture
def node(rocketmq: LocalBroker, tmp_path: Path) -> Iterator[Node]:
    with Node(tmp_path / "node", name_server=rocketmq.name_server) as one:
        yield one


def in_its_time(found: list[ReceivedMessage], due_ms: int) -> None:
    """Never early. (How late is a benchmark's business.)"""
    assert [message for message in found if message.store_timestamp < due_ms] == []


def test_long_delays_work_on_brokers_with_and_without_timers(
    rocketmq: LocalBroker, producing: Producer, node: Node, make_topic: Any,
    make_cluster: Callable[..., LocalBroker], tmp_path: Path,
) -> None:  # fmt: skip
    old = make_cluster(conf={"timerWheelEnable": "false"})
    given = {"name_server": old.name_server}
    near, far = make_topic(queues=1), make_topic(queues=1)
    for topic in (near, far):
        old.create_topic(topic, queues=1)
    refused = pytest.raises(MessageRefused, match=r"cannot be kept: broker-a is older .* has timerWheelEnable=false")
    with Producer(**given, group="p") as plain, refused:
        plain.send(Message(near, b"x"), delay=7)
    with Producer(**given, group="g", long_delay="dmq") as on_old:
        with pytest.raises(MessageRefused, match="no member of a consumer group consumes dmq_inner_topic"):
            on_old.send(Message(near, b"x"), delay=7)
        with Node(tmp_path / "n", **given) as old_node:
            sent_ms = int(time.time() * 1000)
            for producer, inner in ((producing, near), (on_old, INNER_TOPIC)):
                result = producer.send(Message(near, b"7 s"), delay=7)
                assert result.queue is not None
                assert result.queue.topic == inner
                producer.send(Message(far, b"10 days"), delay=timedelta(days=10))
                producer.send(Message(near, b"not yet 10 days"), delay=timedelta(days=10, minutes=-2))
            in_its_time(stored(old, near, 1), sent_ms + 7000)
            in_its_time(stored(rocketmq, near, 1), sent_ms + 7000 - 150)  # its timers have steps of a tenth of a second
            for mq, one in ((rocketmq, node), (old, old_node)):
                assert one.holds(2)
                one.step_s = DAYS_10 - 60
                assert [message.body for message in stored(mq, near, 2)][1:] == [b"not yet 10 days"]
                assert total(mq, far) == 0  # though the clock was put forward, as the other one says
                one.step_s = DAYS_10
                assert [message.body for message in stored(mq, far, 1)] == [b"10 days"]
    nobody = pytest.raises(MessageRefused, match="no member of a consumer group")
    with Producer(**given, group="g2", long_delay="dmq") as producer, nobody:
        producer.send(Message(near, b"x"), delay=7)


@pytest.mark.parametrize(
    "where",
    [({"namespace": "shop"}, "shop%{}"), ({"environment": "dev", "environment_mode": "suffix"}, "{}_dev")],
    ids=["namespace", "suffix"],
)
def test_namespaced_delay_service_delivers_inside_its_namespace(
    rocketmq: LocalBroker, make_topic: Any, producing: Producer, node: Node, tmp_path: Path,
    where: tuple[dict[str, Any], str],
) -> None:  # fmt: skip
    """``producing`` and ``node`` are outside, where topics have the same names, and a service is none for those inside."""
    (place, inside), topic, late = where, make_topic(queues=1), timedelta(days=10)
    given = {"name_server": rocketmq.name_server, **place}
    rocketmq.create_topic(inside.format(topic), queues=1)
    producing.send(Message(topic, b"outside"), delay=late)
    with Producer(**given, group="g_inside", long_delay="dmq") as producer, Node(tmp_path / "inside", **given) as own:
        gone, _ = (producer.send(Message(topic, body), delay=late) for body in (b"gone", b"inside"))
        assert own.holds(2)
        assert gone.recall_handle is not None
        assert producer.recall(topic, gone.recall_handle) == gone.msg_id
        assert own.holds(1)
        own.step_s = node.step_s = DAYS_10
        for name, body in ((inside.format(topic), b"inside"), (topic, b"outside")):
            assert [message.body for message in stored(rocketmq, name, 1)] == [body]
        assert own.holds(0)
        assert node.holds(0)
        assert [total(rocketmq, name) for name in (inside.format(topic), topic)] == [1, 1]
    nobody = pytest.raises(MessageRefused, match="no member of a consumer group consumes dmq_inner_topic")
    with Producer(**given, group="g_later", long_delay="dmq") as producer, nobody:
        producer.send(Message(topic, b"x"), delay=late)


def test_javas_consumer_gets_the_original_by_its_tag_and_its_key(
    rocketmq: LocalBroker, topic: str, producing: Producer, node: Node, java_peer: JavaPeer
) -> None:
    sent = [
        Message(
            topic,
            f"m{i}".encode() * 2000,
            tags=f"tag{i % 2}",
            keys=[f"{topic}-k{i}", "x"],
            properties={"名": "名"},
            flag=i,
        )
        for i in range(4)
    ]
    results = [producing.send(message, delay=DAYS_10) for message in sent]
    assert node.holds(4)
    node.step_s = DAYS_10
    stored(rocketmq, topic, 4)
    read = {record.id: record for record in java_peer.read(topic, 4)}
    assert read.keys() == {result.msg_id for result in results}
    for message, result in zip(sent, results, strict=True):
        record = read[result.msg_id]
        assert (record.body, record.tags, record.keys, record.flag) == (
            message.body, message.tags, list(message.keys), message.flag,
        )  # fmt: skip
        assert record.user_properties == {"名": "名"}
    with PullConsumer(name_server=rocketmq.name_server, group="g_tags", consume_from_where="earliest") as filtering:
        filtering.subscribe(topic, tags="tag1")
        polled = [*filtering.poll(10), *filtering.poll(10)]
    assert sorted(message.msg_id for message in polled) == sorted(results[i].msg_id for i in (1, 3))
    assert java_peer.query(topic, f"{topic}-k3") == [results[3].msg_id]


def test_the_chosen_queue_of_the_sender_is_kept(
    rocketmq: LocalBroker, make_topic: Any, producing: Producer, node: Node
) -> None:
    topic = make_topic(queues=8)
    for key in range(12):
        producing.send(Message(topic, str(key).encode()), delay=DAYS_10, selector="hash", arg=f"customer-{key}")
    assert node.holds(12)
    node.step_s = DAYS_10
    late = {message.body: message.queue_id for message in stored(rocketmq, topic, 12)}
    for key in range(12):
        now = producing.send(Message(topic, b"now"), selector="hash", arg=f"customer-{key}")
        assert now.queue is not None
        assert late[str(key).encode()] == now.queue.queue_id


def test_a_recalled_message_never_comes(rocketmq: LocalBroker, topic: str, producing: Producer, node: Node) -> None:
    kept, gone = (producing.send(Message(topic, body), delay=DAYS_10) for body in (b"kept", b"gone"))
    assert node.holds(2)
    assert gone.recall_handle is not None
    assert producing.recall(topic, gone.recall_handle) == gone.msg_id
    assert node.holds(1)
    node.step_s = DAYS_10
    assert [message.msg_id for message in stored(rocketmq, topic, 1)] == [kept.msg_id]
    assert node.holds(0)
    assert len(stored(rocketmq, topic, 1)) == 1


def test_a_body_that_is_no_envelope_is_a_dead_letter(
    rocketmq: LocalBroker, topic: str, producing: Producer, node: Node
) -> None:
    mark = topic.encode()
    producing.send(Message(INNER_TOPIC, mark))
    producing.send(Message(topic, b"good"), delay=DAYS_10)
    assert node.holds(1)
    node.step_s = DAYS_10
    assert [message.body for message in stored(rocketmq, topic, 1)] == [b"good"]
    (dead,) = awaited(lambda: [message for message in stored(rocketmq, DEAD_TOPIC, 1) if message.body == mark])
    assert "no envelope of a delayed message" in dead.properties[PROBLEM_PROPERTY]


def test_delay_store_survives_restart_and_new_disk_is_rebuilt(
    rocketmq: LocalBroker, topic: str, producing: Producer, tmp_path: Path
) -> None:
    given = {"name_server": rocketmq.name_server}
    with Node(tmp_path / "a", **given) as node:
        ids = [producing.send(Message(topic, b"x"), delay=DAYS_10).msg_id for _ in range(30)]
        assert node.holds(30)
    with Node(tmp_path / "a", **given) as node:
        assert node.holds(30)
        assert node.service.stored_count == 0
    with Node(tmp_path / "b", **given) as node:
        assert node.holds(30)
        node.step_s = DAYS_10
        assert sorted(message.msg_id for message in stored(rocketmq, topic, 30)) == sorted(ids)
        assert node.holds(0)
    with Node(tmp_path / "c", **given) as node:
        assert node.service.waiting_count == 0
