"""Rows of the acceptance list that need a real broker: what the producer sends, and what Java makes of it."""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest

from rocketmq_spark import Producer, options, session
from rocketmq_spark.base.clock import Deadline
from rocketmq_spark.base.codes import Response
from rocketmq_spark.base.threads import Timer
from rocketmq_spark.errors import AccessDenied, ConnectionLost, MessageRefused, RouteNotFound, SendFailed
from rocketmq_spark.localbroker import LocalBroker
from rocketmq_spark.model import Message, MessageQueue, SendStatus
from rocketmq_spark.producer.encoding import batch_request
from rocketmq_spark.producer.engine import Engine
from rocketmq_spark.producer.outgoing import OutgoingSend
from rocketmq_spark.producer.producer import BaseProducer
from rocketmq_spark.producer.settings import ProducerSettings
from rocketmq_spark.queues.environment import Environment
from rocketmq_spark.queues.selection import select_by_hash
from rocketmq_spark.wire.messages import BatchItem, decode_batch, encode_batch
from tests.helpers import awaited, counts, stored, total
from tests.live.producer.recording import RecordingSender, recorded
from tests.witness import JavaPeer


@pytest.fixture
def producers(rocketmq: LocalBroker) -> Iterator[Callable[..., tuple[BaseProducer, RecordingSender]]]:
    """Makes producers that record what they send; closed after the test."""
    made: list[BaseProducer] = []

    def make(**settings: Any) -> tuple[BaseProducer, RecordingSender]:
        producer, sender = recorded(rocketmq.name_server, **settings)
        made.append(producer)
        return producer, sender

    yield make
    for producer in made:
        producer.close()


def test_queue_selector_and_default_arrive_where_they_should(
    rocketmq: LocalBroker, rocketmq_topic: str, producers: Any
) -> None:
    producer, _ = producers()
    queues = producer.queues(rocketmq_topic)
    for _ in range(5):
        producer.send(Message(rocketmq_topic, b"x"), queue=queues[3])
        producer.send(Message(rocketmq_topic, b"x"), selector=lambda queues, message, arg: queues[6])
        producer.send_oneway(Message(rocketmq_topic, b"x"), selector=lambda queues, message, arg: queues[6])
        producer.send_async(Message(rocketmq_topic, b"x"), queue=queues[1]).result(60)
    assert counts(rocketmq, rocketmq_topic, 20) == {1: 5, 3: 5, 6: 10}


@pytest.mark.parametrize("mode", ["sync", "async", "oneway", "batch", "auto batch", "submit"])
def test_queue_may_be_named_in_the_first_send_of_a_client(
    rocketmq: LocalBroker, rocketmq_topic: str, mode: str
) -> None:
    one = options.parse({"nameServer": rocketmq.name_server}).for_role("producer")
    fresh = session._create_client(one)  # of which nobody asked anything
    queue, message = MessageQueue(rocketmq_topic, rocketmq.brokers[0], 5), Message(rocketmq_topic, b"x")
    settings = ProducerSettings(group="g_live", auto_batch=mode == "auto batch")
    with BaseProducer(fresh.sender, settings) as producer:
        if mode in ("sync", "auto batch"):
            assert producer.send(message, queue=queue).queue == queue
        elif mode == "async":
            assert producer.send_async(message, queue=queue).result(60).queue == queue
        elif mode == "oneway":
            producer.send_oneway(message, queue=queue)
        elif mode == "batch":
            assert producer.send_batch([message], queue=queue).queue == queue
        else:
            engine, done = Engine(fresh.sender, settings, Timer("live")), Future[Any]()
            request = batch_request(encode_batch([BatchItem(b"x", "")]), {}, settings, 0)
            engine.submit(OutgoingSend(rocketmq_topic, request, 10.0, queue, ordered=True, done=done.set_result))
            assert done.result(60).outcome.queue == queue
            assert engine.close(Deadline.after(1.0)) == []
        assert counts(rocketmq, rocketmq_topic, 1) == {5: 1}
    fresh.rpc_client.pool.close()


def test_sends_of_one_thread_spread_evenly_over_queues(
    rocketmq: LocalBroker, rocketmq_topic: str, producers: Any
) -> None:
    producer, _ = producers()
    for _ in range(800):
        producer.send(Message(rocketmq_topic, b"x"))
    assert counts(rocketmq, rocketmq_topic, 800) == dict.fromkeys(range(8), 100)


def test_random_is_uniform(rocketmq: LocalBroker, rocketmq_topic: str, producers: Any) -> None:
    producer, _ = producers()
    sent = [producer.send_async(Message(rocketmq_topic, b"x"), selector="random") for _ in range(1000)]
    assert all(result.result(60).status is SendStatus.SEND_OK for result in sent)
    found = counts(rocketmq, rocketmq_topic, 1000)
    assert sum((found.get(i, 0) - 125) ** 2 / 125 for i in range(8)) < 29.9  # chi-square, 7 degrees, 0.01 %


def test_hash_is_the_java_clients_queue_for_ten_thousand_strings(
    make_rocketmq_topic: Callable[..., str], producers: Any, java_peer: JavaPeer
) -> None:
    topic = make_rocketmq_topic(queues=7)
    rng = random.Random(42)
    alphabets = ("abcXYZ0189-_:/ ", "äßéñ€", "中文日本語한국", "\U0001f600\U0001f680\U00020000\ue000")
    keys = ["".join(rng.choices(rng.choice(alphabets), k=rng.randrange(1, 24))) for _ in range(9_997)]
    keys += ["polygenelubricants", "GydZG_", "DESIGNING WORKHOUSES"]
    producer, _ = producers()
    queues = producer.queues(topic)
    java = java_peer.hash_queues(topic, keys)
    assert [select_by_hash(queues, key).queue_id for key in keys] == java
    ours = [producer.send_async(Message(topic, b"x"), selector="hash", arg=key) for key in keys[-100:]]
    assert [result.result(60).queue.queue_id for result in ours] == java[-100:]


def test_unknown_topic_and_absent_name_server_errors_differ(rocketmq: LocalBroker, producers: Any) -> None:
    producer, _ = producers(auto_create_topics=False)
    with pytest.raises(RouteNotFound, match="no-such-topic"):
        producer.send(Message("no-such-topic", b"x"))
    nobody, _ = recorded("127.0.0.1:1", send_timeout_s=0.5)
    with nobody, pytest.raises((ConnectionLost, SendFailed), match="no name server answers"):
        nobody.send(Message("no-such-topic", b"x"))


def test_a_misspelt_topic_is_an_error_and_no_new_topic(rocketmq: LocalBroker, producers: Any) -> None:
    producer, _ = producers()
    topic = f"slip-{time.time_ns()}"
    with pytest.raises(RouteNotFound, match="the name server knows no such topic"):
        producer.send(Message(topic, b"x"))
    assert topic not in rocketmq.admin.topics()


def test_a_misspelt_topic_names_the_near_one(rocketmq: LocalBroker, topic: str, producers: Any) -> None:
    producer, _ = producers()
    for send in (producer.send, lambda message: producer.send_async(message).result(60)):
        with pytest.raises(RouteNotFound, match=f"Did you mean {topic}"):
            send(Message(f"{topic}x", b"x"))


def test_first_message_creates_topic_where_brokers_allow_it(
    make_cluster: Callable[..., LocalBroker],
) -> None:
    mq = make_cluster(conf={"autoCreateTopicEnable": True})
    producer, _ = recorded(mq.name_server)
    with producer:
        assert producer.send(Message("auto", b"x")).queue.queue_id < 4
    assert total(mq, "auto", 1) == 1


def test_the_broker_knows_the_producers_group_and_language(
    rocketmq: LocalBroker, rocketmq_topic: str, producers: Any, java_peer: JavaPeer
) -> None:
    producer, _ = producers(group="g_heartbeat", heartbeat_s=0.5)
    producer.send(Message(rocketmq_topic, b"x"))
    address = rocketmq.address(rocketmq.brokers[0])

    def known() -> list[str]:
        with contextlib.suppress(RuntimeError):  # there is no such group before its first heartbeat
            return java_peer.producers(address, "g_heartbeat")
        return []

    assert awaited(known) == [f"{producer.client_id} PYTHON"]


def test_java_reads_everything_as_sent_without_broker_settings(
    rocketmq_topic: str, producers: Any, java_peer: JavaPeer
) -> None:
    producer, _ = producers()
    large = b"compress me " * 1000
    single = Message(rocketmq_topic, b"single", tags="vip", keys=["k1", "k2"], properties={"ключ": "значение"}, flag=7)
    sent = {
        producer.send(single).msg_id: b"single",
        producer.send(Message(rocketmq_topic, large)).msg_id: large,
        producer.send_async(Message(rocketmq_topic, b"async")).result(60).msg_id: b"async",
    }
    batch = [Message(rocketmq_topic, f"batch-{i}".encode(), tags=f"t{i}", keys=[f"b{i}"]) for i in range(3)]
    ids = producer.send_batch(batch).msg_id.split(",")
    sent.update({msg_id: message.body for msg_id, message in zip(ids, batch, strict=True)})
    read = {message.id: message for message in java_peer.read(rocketmq_topic, len(sent))}
    assert {msg_id: message.body for msg_id, message in read.items()} == sent
    one = read[next(iter(sent))]
    assert (one.tags, one.keys, one.flag, one.properties["ключ"]) == ("vip", ["k1", "k2"], 7, "значение")
    assert [(read[i].tags, read[i].keys) for i in ids] == [("t0", ["b0"]), ("t1", ["b1"]), ("t2", ["b2"])]
    assert java_peer.query(rocketmq_topic, "b1") == [ids[1]]
    assert java_peer.query(rocketmq_topic, "k2") == [next(iter(sent))]


def test_fifty_threads_get_a_batchs_throughput_and_a_result_each(
    rocketmq_topic: str, producers: Any, java_peer: JavaPeer
) -> None:
    producer, sender = producers(auto_batch=True, batch_max_delay_ms=50)
    with ThreadPoolExecutor(50) as pool:
        results = list(pool.map(lambda i: producer.send(Message(rocketmq_topic, str(i).encode())), range(500)))
    # About twenty; the slower the broker, the further apart its threads go on, and the fewer meet in a batch.
    assert len(sender.sends) < 250
    assert all(request.batch for _, _, request in sender.sends)
    read = {message.id: message for message in java_peer.read(rocketmq_topic, 500)}
    for i, result in enumerate(results):
        message = read[result.msg_id]
        assert message.body == str(i).encode()
        assert message.place == (result.queue.broker_name, result.queue.queue_id, result.queue_offset)


def test_batches_for_a_queue_arrive_there_in_order(
    rocketmq: LocalBroker, rocketmq_topic: str, producers: Any, java_peer: JavaPeer
) -> None:
    producer, _ = producers(auto_batch=True, batch_max_bytes=200)
    queue = producer.queues(rocketmq_topic)[5]
    results = [producer.send_async(Message(rocketmq_topic, f"{i:04}".encode()), queue=queue) for i in range(2000)]
    assert [result.result(60).queue_offset for result in results] == list(range(2000))
    assert counts(rocketmq, rocketmq_topic, 2000) == {5: 2000}
    assert [message.body for message in java_peer.read(rocketmq_topic, 2000)] == [
        f"{i:04}".encode() for i in range(2000)
    ]


def test_every_message_of_a_batch_is_found_by_its_own_key(
    rocketmq_topic: str, producers: Any, java_peer: JavaPeer
) -> None:
    producer, sender = producers(auto_batch=True, batch_max_delay_ms=30_000)
    sent = [producer.send_async(Message(rocketmq_topic, b"x", keys=[f"own-{i}"])) for i in range(10)]
    assert producer.flush(60)
    ids = [result.result(60).msg_id for result in sent]
    assert len(sender.sends) == 1
    assert java_peer.query(rocketmq_topic, "own-7") == [ids[7]]


def test_batchcq_topic_keeps_batch_with_one_id_and_all_keys(
    make_rocketmq_topic: Callable[..., str], producers: Any, java_peer: JavaPeer
) -> None:
    topic = make_rocketmq_topic(queues=1, attributes={"queue.type": "BatchCQ"})
    producer, _ = producers(auto_batch=True, batch_max_delay_ms=30_000)
    sent = [producer.send_async(Message(topic, f"{i}".encode(), tags="t", keys=[f"bcq-{i}"])) for i in range(3)]
    assert producer.flush(60)
    results = [result.result(60) for result in sent]
    assert len({result.msg_id for result in results}) == 1
    assert {result.queue_offset for result in results} == {0}
    assert sorted(message.body for message in java_peer.read(topic, 3)) == [b"0", b"1", b"2"]
    for i in range(3):
        assert java_peer.query(topic, f"bcq-{i}") != []


def test_unbatched_send_is_single_and_explicit_batch_stays_whole(rocketmq_topic: str, producers: Any) -> None:
    producer, sender = producers(auto_batch=True)
    producer.send(Message(rocketmq_topic, b"x"), delay_level=1)
    producer.send(Message(rocketmq_topic, b"x"), delay=1)
    producer.send(Message(rocketmq_topic, b"x"), timeout_s=5.0)
    assert [request.batch for _, _, request in sender.sends] == [False] * 3
    producer.send_batch([Message(rocketmq_topic, b"1"), Message(rocketmq_topic, b"2")])
    ((_, _, request),) = sender.sends[3:]
    assert [bytes(item.body) for item in decode_batch(bytes(request.body))] == [b"1", b"2"]


def test_delays_are_never_early_and_recalled_message_never_fires(
    rocketmq: LocalBroker, make_rocketmq_topic: Callable[..., str], producers: Any
) -> None:
    topics = [make_rocketmq_topic(queues=1) for _ in range(4)]
    producer, _ = producers()
    begin_ms = int(time.time() * 1000)
    level = producer.send(Message(topics[0], b"level 1"), delay_level=1)
    timer = producer.send(Message(topics[1], b"timer"), delay=2)
    producer.send(Message(topics[2], b"moment"), deliver_at=begin_ms + 3000)
    recalled = producer.send(Message(topics[3], b"never"), delay=5)
    assert (level.queue_offset, timer.queue_offset) == (None, None)
    assert producer.recall(topics[3], recalled.recall_handle or "") == recalled.msg_id
    last = producer.send(Message(topics[3], b"last"), delay=6)  # when it is there the recalled one was due before
    for topic, due_ms in zip(topics, (1000, 2000, 3000), strict=False):
        (message,) = stored(rocketmq, topic, 1)
        assert message.store_timestamp >= begin_ms + due_ms - 150  # timers have steps of a tenth of a second here
    assert [message.msg_id for message in stored(rocketmq, topics[3], 1)] == [last.msg_id]


@pytest.mark.parametrize(
    ("place", "inside"),
    [({"namespace": "shop"}, "shop%{}"), ({"environment": "dev", "environment_mode": "suffix"}, "{}_dev")],
    ids=["namespace", "suffix"],
)
def test_delay_in_namespace_is_recalled_by_users_topic_name(
    rocketmq: LocalBroker, topic: str, place: dict[str, Any], inside: str
) -> None:
    rocketmq.create_topic(inside.format(topic), queues=1)
    with Producer(rocketmq.name_server, "g", **place) as producer:
        recalled = producer.send(Message(topic, b"never"), delay=3)
        with pytest.raises(MessageRefused, match="the recall handle belongs to topic"):
            producer.recall(f"{topic}-other", recalled.recall_handle or "")
        assert producer.recall(topic, recalled.recall_handle or "") == recalled.msg_id
        last = producer.send(Message(topic, b"last"), delay=4)
    assert [message.msg_id for message in stored(rocketmq, inside.format(topic), 1)] == [last.msg_id]


def test_java_reads_delayed_messages_not_before_they_are_due(
    make_rocketmq_topic: Callable[..., str], producers: Any, java_peer: JavaPeer
) -> None:
    topic = make_rocketmq_topic(queues=1)
    producer, _ = producers()
    waits: dict[bytes, dict[str, Any]] = {
        b"level 2": {"delay_level": 2},
        b"timer": {"delay": 4},
        b"moment": {"deliver_at": int(time.time() * 1000) + 3000},
        b"now": {},
    }
    due = {}
    for body, how in waits.items():
        # A busy machine may take seconds from one send to the next, so each message has a moment of its own.
        due[body] = int(time.time() * 1000) + {b"level 2": 5000, b"timer": 4000}.get(body, 0)
        producer.send(Message(topic, body), **how)
    due[b"moment"] = waits[b"moment"]["deliver_at"]
    read = java_peer.read(topic, 4)
    assert sorted(record.body for record in read) == sorted(waits)
    for record in read:
        # Timers have steps of a tenth of a second here.
        assert record.seen >= record.stored >= due[record.body] - 150, record


def test_three_environments_never_meet(
    rocketmq: LocalBroker, rocketmq_topic: str, producers: Any, java_peer: JavaPeer
) -> None:
    for n in (1, 2, 3):
        producer, _ = producers(environment=Environment.of(n, 3), auto_batch=n == 3)
        sent = [producer.send_async(Message(rocketmq_topic, f"env{n}".encode())) for _ in range(300)]
        assert all(result.result(60).queue.queue_id % 3 == n - 1 for result in sent)
    foreign = [m for m in java_peer.read(rocketmq_topic, 900) if m.body != f"env{m.queue % 3 + 1}".encode()]
    assert foreign == []
    assert total(rocketmq, rocketmq_topic, 900) == 900


REFUSED: list[tuple[Message, dict[str, Any]]] = [
    (Message("", b""), {}),
    (Message("", b"x" * (4 * 1024 * 1024 + 1)), {}),
    (Message("", b"x", properties={"a\x01": "b"}), {}),
    (Message("", b"x", properties={"a": "b\x02"}), {}),
    (Message("", b"x", properties={"UNIQ_KEY": "mine"}), {}),
    (Message("", b"x", properties={"INNER_NUM": "3"}), {}),
    (Message("", b"x", properties={"a": "b" * 40_000}), {}),
]


def test_sending_traps_are_refused_before_the_broker_sees_them(
    rocketmq: LocalBroker, rocketmq_topic: str, producers: Any
) -> None:
    producer, sender = producers()
    for message, how in REFUSED:
        message.topic = rocketmq_topic
        with pytest.raises(MessageRefused):
            producer.send(message, **how)
    with pytest.raises(MessageRefused, match="encoded batch has"):
        producer.send_batch([Message(rocketmq_topic, b"x" * 3_000_000)] * 2)
    assert sender.sends == []
    assert producer.send(Message(rocketmq_topic, b"x" * (4 * 1024 * 1024))).status is SendStatus.SEND_OK
    assert total(rocketmq, rocketmq_topic, 1) == 1


def test_a_topic_without_write_permission_gets_nothing(
    rocketmq: LocalBroker, rocketmq_topic: str, producers: Any
) -> None:
    rocketmq.admin.create_topic(rocketmq_topic, 8, perm=4)
    producer, sender = producers()
    with pytest.raises(RouteNotFound, match="is writable"):
        producer.send(Message(rocketmq_topic, b"x"))
    assert sender.sends == []
    rocketmq.admin.create_topic(rocketmq_topic, 8, perm=6)
    assert producer.send(Message(rocketmq_topic, b"x")).status is SendStatus.SEND_OK


def test_an_illegal_queue_is_an_error_with_the_brokers_words(rocketmq_topic: str, producers: Any) -> None:
    producer, _ = producers()
    broker = producer.queues(rocketmq_topic)[0].broker_name
    with pytest.raises(Exception, match=r"queueId\[99\] is illegal") as e:
        producer.send(Message(rocketmq_topic, b"x"), queue=MessageQueue(rocketmq_topic, broker, 99))
    assert e.value.broker_code == Response.INVALID_PARAMETER  # type: ignore[attr-defined]
    assert not isinstance(e.value, AccessDenied)
