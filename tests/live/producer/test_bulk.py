"""What ``send_arrow``, ``send_many`` and automatic batches store, read by RocketMQ's own Java client."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any

import pyarrow as pa
import pytest

from rocketmq_spark import Message, Producer, PullConsumer, SendResult, SendStatus
from rocketmq_spark.errors import MessageRefused
from rocketmq_spark.localbroker import LocalBroker
from rocketmq_spark.model import MessageQueue
from tests.helpers import stored, total
from tests.witness import JavaPeer, Record

Make = Callable[..., str]


def places(found: Iterable[Record]) -> dict[str, tuple[str, int, int]]:
    """By message id."""
    return {record.id: record.place for record in found}


def promised(sent: Iterable[object]) -> dict[str, tuple[str, int, int | None]]:
    """The same as the producer says it."""
    results = [each for each in sent if isinstance(each, SendResult) and each.queue is not None]
    return {
        each.msg_id: (each.queue.broker_name, each.queue.queue_id, each.queue_offset)  # type: ignore[union-attr]
        for each in results
    }


@pytest.mark.parametrize("kind", [{}, {"attributes": {"queue.type": "BatchCQ"}}], ids=["ordinary", "batch topic"])
def test_rows_are_where_the_result_says_they_are(
    rocketmq: LocalBroker, make_topic: Make, java_peer: JavaPeer, kind: dict[str, Any]
) -> None:
    topic, rng = make_topic(**kind), random.Random(3)
    rows = pa.table(
        {
            "body": [rng.randbytes(rng.randrange(1, 900)) for _ in range(3000)],
            "tags": [None if i % 5 == 0 else f"t{i % 3}" for i in range(3000)],
            "keys": [[f"k{i}", f"l{i}"] for i in range(3000)],
            "properties": pa.array([[("p", f"ü{i}")] for i in range(3000)], pa.map_(pa.string(), pa.string())),
        }
    )
    with Producer(rocketmq.name_server, "g", batch_max_bytes="64k") as producer:
        sent = producer.send_arrow(rows, topic)
        sent.raise_for_failed()
    assert {each.status for each in sent if isinstance(each, SendResult)} == {SendStatus.SEND_OK}
    found = java_peer.read(topic, 3000)
    assert len(found) == 3000
    assert places(found) == promised(sent)
    by_id = {record.id: record for record in found}
    in_order = [by_id[msg_id] for msg_id in sent.table["msgId"].to_pylist()]
    expected = rows.to_pydict()
    assert [record.body for record in in_order] == expected["body"]
    assert [(record.tags, record.keys) for record in in_order] == list(
        zip(expected["tags"], expected["keys"], strict=True)
    )
    assert [record.user_properties for record in in_order] == [dict(each) for each in expected["properties"]]


def test_rows_and_messages_of_a_key_keep_their_order(
    rocketmq: LocalBroker, make_topic: Make, java_peer: JavaPeer
) -> None:
    topic = make_topic(queues=5)
    keys = [f"k{i % 13}" for i in range(4000)]
    reader = pa.table({"body": [f"{i:05}" for i in range(4000)], "shardingKey": keys}).to_reader(max_chunksize=300)
    with Producer(rocketmq.name_server, "g", batch_max_bytes="4k") as producer:
        producer.send_arrow(reader, topic, selector="hash").raise_for_failed()
        messages = (Message(topic, f"{i:05}".encode(), properties={"key": keys[i - 4000]}) for i in range(4000, 8000))
        sent = producer.send_many(messages, key=lambda each: (each.properties or {})["key"])
        sent.raise_for_failed()
    assert len(sent) == 4000
    of_key: dict[str, list[tuple[int, bytes]]] = defaultdict(list)
    for record in java_peer.read(topic, 8000):
        of_key[record.properties["__SHARDINGKEY"]].append((record.queue, record.body))
    assert sum(map(len, of_key.values())) == 8000
    for found in of_key.values():
        assert len({queue for queue, _ in found}) == 1
        assert [body for _, body in found] == sorted(body for _, body in found)
    hashed = java_peer.hash_queues(make_topic(queues=5), sorted(of_key))
    assert [of_key[key][0][0] for key in sorted(of_key)] == hashed


def test_messages_to_a_queue_and_to_several_topics(
    rocketmq: LocalBroker, make_topic: Make, java_peer: JavaPeer
) -> None:
    one, two = make_topic(queues=3), make_topic(queues=3)
    with Producer(rocketmq.name_server, "g") as producer:
        given = [
            Message((one, two)[i % 2], f"{i}".encode(), tags=f"t{i % 2}", keys=[f"k{i}"], flag=i) for i in range(60)
        ]
        sent = producer.send_many(given)
        pinned = producer.send_many([Message(one, b"pinned")] * 9, queue=producer.queues(one)[2])
        with pytest.raises(MessageRefused, match="message 1: body is empty"):
            producer.send_many([Message(one, b"x"), Message(one, b"")])
    found = [*java_peer.read(one, 39), *java_peer.read(two, 30)]
    assert places(found) == promised([*sent, *pinned])
    assert {record.queue for record in found if record.body == b"pinned"} == {2}
    assert java_peer.query(two, "k7") == [sent[7].msg_id]  # type: ignore[union-attr]
    assert sorted((m.flag, m.body) for m in stored(rocketmq, two, 30)) == [
        (i, f"{i}".encode()) for i in range(1, 60, 2)
    ]


def test_delayed_rows_come_later_with_their_ids(rocketmq: LocalBroker, topic: str, java_peer: JavaPeer) -> None:
    rows = pa.table({"body": ["now", "soon", "level"], "delayMs": [0, 1500, 0], "delayLevel": [None, None, 1]})
    with Producer(rocketmq.name_server, "g") as producer:
        sent = producer.send_arrow(rows, topic)
        sent.raise_for_failed()
    assert total(rocketmq, topic, 3) == 3
    found = {record.id: record for record in java_peer.read(topic, 3)}
    assert [found[msg_id].body for msg_id in sent.table["msgId"].to_pylist()] == [b"now", b"soon", b"level"]
    assert [each.queue_offset is None for each in sent] == [False, True, True]  # type: ignore[union-attr]
    born = found[sent[0].msg_id].born  # type: ignore[union-attr]
    assert all(found[each.msg_id].stored - born > 900 for each in sent[1:])  # type: ignore[union-attr]


def test_an_environment_and_a_namespace_are_kept(rocketmq: LocalBroker, make_topic: Make) -> None:
    topic = make_topic(queues=6)
    with Producer(rocketmq.name_server, "g", environment="1", environments="3", batch_max_bytes=100) as producer:
        sent = producer.send_arrow(pa.table({"body": [f"{i}" for i in range(40)]}), topic)
        many = producer.send_many([Message(topic, b"x")] * 5, key=lambda _: "k")
    queues = {each.queue.queue_id for each in (*sent, *many) if isinstance(each, SendResult) and each.queue}
    assert queues <= {0, 3}
    assert len(queues) == 2
    rocketmq.create_topic(f"space%{topic}")
    with Producer(rocketmq.name_server, "g", namespace="space") as producer:
        producer.send_arrow(pa.table({"body": ["inside"]}), topic).raise_for_failed()
    with PullConsumer(rocketmq.name_server, "g", namespace="space", consume_from_where="earliest") as consumer:
        consumer.assign([MessageQueue(topic, rocketmq.brokers[0], i) for i in range(8)])
        consumer.seek_to_beginning(*consumer.assignment())
        found: list[bytes] = []
        while not found:
            found = [message.body for message in consumer.poll(5.0)]
    assert found == [b"inside"]


def test_automatic_batches_store_plain_messages_as_ever(rocketmq: LocalBroker, topic: str, java_peer: JavaPeer) -> None:
    given = [
        Message(
            topic, f"{i}".encode(), (None, "a", "ü")[i % 3], [f"k{i}"] * (i % 2), {"p": "v"} if i % 5 == 0 else None
        )
        for i in range(600)
    ]
    with Producer(rocketmq.name_server, "g", auto_batch=True) as producer:
        sent = [future.result(60) for future in [producer.send_async(each) for each in given]]
    found = {record.id: record for record in java_peer.read(topic, 600)}
    assert {msg_id: record.place for msg_id, record in found.items()} == promised(sent)
    for result, message in zip(sent, given, strict=True):
        record = found[result.msg_id]
        assert (record.body, record.tags, record.keys or []) == (message.body, message.tags, list(message.keys))
        assert record.user_properties == dict(message.properties or {})
    assert {record.properties["WAIT"] for record in found.values()} == {"true"}
