"""``Consumer`` over gRPC, whose listener gets what a real Proxy hands out."""

from __future__ import annotations

import threading
import time
import uuid
from collections import Counter, defaultdict

from rocketmq_spark import Admin, Consumer, Message, SimpleConsumer
from rocketmq_spark.base.codes import DLQ_PREFIX
from rocketmq_spark.consumer.simple import MIN_INVISIBLE_S
from rocketmq_spark.grpc_proxy.member import ProxyMember
from rocketmq_spark.localbroker import LocalBroker
from rocketmq_spark.model import ReceivedMessage
from tests.live.grpc.popper import lease
from tests.live.grpc.proxied import forgotten, known, new_topic, producer, stored_rows
from tests.mockbroker import eventually
from tests.witness import java_send

__all__ = ["forgotten"]


def consumer(mq: LocalBroker, group: str, **options: object) -> Consumer:
    return Consumer(transport="grpc", proxy_endpoint=mq.proxy_grpc, group=group, **options)


def test_failed_messages_are_retried_and_end_as_dead_letters(proxied, caplog):
    topic, group = new_topic(proxied), "tries-twice"
    proxied.admin.create_group(group, settings={"retryMaxTimes": 1})
    got: Counter[str] = Counter()
    lock = threading.Lock()

    def listener(messages, context):
        (message,) = messages
        with lock:
            got[message.msg_id] += 1
        if message.body == b"poison" or (message.body == b"later" and not message.reconsume_times):
            return context.retry(1)
        return None

    with consumer(proxied, group) as member, producer(proxied) as sends:
        member.subscribe(topic)
        member.start(listener)
        good = {one.id for one in java_send(proxied.name_server, topic, 50)}
        poison, later = (sends.send(Message(topic, body)).msg_id for body in (b"poison", b"later"))
        eventually(lambda: got.keys() >= {*good, poison, later} and got[poison] == got[later] == 2, 60)
        eventually(lambda: DLQ_PREFIX + group in proxied.admin.topics(), 60)
        dead = stored_rows(proxied, DLQ_PREFIX + group, 1)
        eventually(lambda: not member.stats().cached, 60)
        stats = member.stats()
    assert [row["msgId"] for row in dead] == [poison]
    assert got == Counter({**dict.fromkeys(good, 1), poison: 2, later: 2})
    assert (stats.consumed, stats.failed, stats.sent_back) == (51, 3, 3)
    assert "could not be" not in caplog.text


def test_ordered_group_gets_each_message_group_in_order(proxied):
    topic, group = new_topic(proxied, "FIFO"), "in-order"
    proxied.admin.create_group(group, settings={"consumeMessageOrderly": True})
    failed: set[bytes] = set()
    got: defaultdict[str, list[int]] = defaultdict(list)

    def listener(messages, context):
        (message,) = messages
        if message.body in (b"3", b"7") and message.msg_id not in failed:
            failed.add(message.msg_id)
            return context.suspend(10)
        got[message.message_group].append(int(message.body))
        return None

    with consumer(proxied, group, ordered=True) as member, producer(proxied) as sends:
        member.subscribe(topic)
        for n in range(12):
            for key in "abc":
                sends.send(Message(topic, f"{n}".encode()), selector="hash", arg=key)
        member.start(listener)
        eventually(lambda: sum(map(len, got.values())) >= 36, 60)
        eventually(lambda: not member.stats().cached, 60)
    assert got == {key: list(range(12)) for key in "abc"}


def test_slow_listener_keeps_its_message_beyond_one_lease(proxied, monkeypatch, caplog):
    topic = new_topic(proxied, queues=1)
    lease(MIN_INVISIBLE_S, monkeypatch.setattr)  # the shortest that a Proxy gives
    began, renewed = [], []
    change, goes_on = ProxyMember.change_invisible, threading.Event()

    def noted(*how):
        change(*how)
        renewed.append(time.monotonic())

    def listener(messages, context):
        began.append((messages[0].body, time.monotonic()))
        if messages[0].body == b"long":
            assert goes_on.wait(60)

    monkeypatch.setattr(ProxyMember, "change_invisible", noted)
    with consumer(proxied, f"long-{topic}") as member, producer(proxied) as sends:
        member.subscribe(topic)
        member.start(listener)
        sends.send(Message(topic, b"long"))
        # By the receipt that came with the message nothing more can be had then.
        eventually(lambda: began and renewed and renewed[-1] > began[0][1] + MIN_INVISIBLE_S, 60)
        goes_on.set()
        eventually(lambda: not member.stats().cached, 60)
        sends.send(Message(topic, b"next"))
        eventually(lambda: member.stats().consumed == 2, 60)
    assert [body for body, _ in began] == [b"long", b"next"]
    assert not [text for text in ("invisible time of message", "could not be") if text in caplog.text]


def test_namespace_keeps_messages_inside_under_users_names(proxied):
    topic, group = new_topic(proxied), f"shop-{uuid.uuid4().hex[:6]}"
    proxied.create_topic(f"shop%{topic}", 1)
    proxied.admin.create_group(f"shop%{group}", settings={"retryMaxTimes": 1})
    eventually(lambda: bool(known(proxied, topic, namespace="shop")), 60)
    with producer(proxied) as others, producer(proxied, namespace="shop") as mine:
        others.send(Message(topic, b"of others"))
        done, dead = (mine.send(Message(topic, body)).msg_id for body in (b"done", b"poison"))
    assert {row["msgId"] for row in stored_rows(proxied, f"shop%{topic}", 2)} == {done, dead}
    got: Counter[tuple[str, str]] = Counter()
    lock = threading.Lock()

    def listener(messages, context):
        (message,) = messages
        with lock:
            got[message.msg_id, message.topic] += 1
        return context.retry(1) if message.body == b"poison" else None

    with consumer(proxied, group, namespace="shop") as member:
        member.subscribe(topic)
        member.start(listener)
        letters = f"{DLQ_PREFIX}shop%{group}"
        eventually(lambda: letters in proxied.admin.topics(), 60)
        (row,) = stored_rows(proxied, letters, 1)
    assert row["msgId"] == dead
    assert got == Counter({(done, topic): 1, (dead, topic): 2})
    with SimpleConsumer(proxy_endpoint=proxied.proxy_grpc, group=f"{group}-simple", namespace="shop") as simple:
        simple.subscribe(topic)
        found: list[ReceivedMessage] = []
        eventually(lambda: found.extend(simple.receive(invisible="60s")) or len(found) >= 2, 60)
        for message in found:
            simple.ack(message)
    assert {(message.msg_id, message.topic) for message in found} == {(done, topic), (dead, topic)}
    with Admin(proxied.name_server) as admin:
        made = {name for name in admin.groups() if group in name}
    assert made == {f"shop%{group}", f"shop%{group}-simple"}
