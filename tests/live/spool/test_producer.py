"""Rows 3-11, 3-12, 3-21, 3-24, 3-25: a producer whose broker dies and comes back; every id that was given out arrives."""

from __future__ import annotations

import itertools
import subprocess
import sys
import threading
import time
from collections import Counter, defaultdict
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

from rocketmq_spark import LocalBroker, Message, Producer, session
from rocketmq_spark.errors import CallTimeout, ConnectionLost, RocketMQError, RouteNotFound
from rocketmq_spark.model import MessageQueue, SendResult, SendStatus
from rocketmq_spark.producer.settings import SendContext
from rocketmq_spark.spool.spool import SpoolReading
from tests.helpers import killed, stored
from tests.mockbroker import eventually
from tests.reading import names
from tests.scale import SCALE
from tests.witness import JavaPeer, content, java_read, md5

ROOT = Path(__file__).parents[3]
OUTAGE_S = 30 if SCALE >= 1 else 1


@pytest.fixture
def topic(lone: LocalBroker) -> str:
    (name,) = names(1, "spooled")
    lone.create_topic(name, queues=4)
    return name


def producer(mq: LocalBroker, folder: Path, **options: Any) -> Producer:
    given = {"on_send_failure": "spool", "spool_dir": str(folder), "send_timeout": "1s", "group": "g_spool", **options}
    return Producer(name_server=mq.name_server, **given)


def depth(one: Producer) -> int:
    metrics = one.spool_metrics()
    assert metrics is not None
    return metrics.depth


def drain(one: Producer, timeout_s: float = 60) -> None:
    try:
        eventually(lambda: depth(one) == 0, timeout_s)
    except AssertionError:  # what waits, and for what
        assert one._spool is not None
        redelivery, reading = one._spool.redelivery, SpoolReading(one._spool.path)  # type: ignore[attr-defined]
        waiting = [(entry.due_ms, entry.state) for entry in itertools.islice(reading.entries(), 5)]
        reading.close()
        pytest.fail(f"{one.spool_metrics()}; now {one._spool.now_ms()}, first {waiting}; {vars(redelivery)}")  # type: ignore[attr-defined]


def doubtful(one: Producer) -> dict[str, set[str]]:
    """How attempts of a message end after which a broker may have it, whether they are the producer's or the spool's."""
    failed: defaultdict[str, set[str]] = defaultdict(set)

    def note(attempt: SendContext) -> None:
        error = attempt.error
        lost = isinstance(error, ConnectionLost) and not isinstance(error.__cause__, ConnectionRefusedError)
        if isinstance(error, CallTimeout) or lost:
            for msg_id in attempt.msg_ids:
                failed[msg_id].add(type(error).__name__)

    one.add_hook(after=note)
    one._spool._resender._engine.hooks.add(after=note)  # type: ignore[union-attr]
    return failed


@pytest.mark.parametrize("sync", ["always", "batch", "never"])
def test_every_id_arrives_after_broker_kill_and_restart(
    lone: LocalBroker, topic: str, tmp_path: Path, sync: str
) -> None:
    count = (100_000 if sync == "batch" else 20_000) if SCALE >= 1 else 1500
    killed_at, restarted_at = count // 10, 9 * count // 10
    futures: list[Future[SendResult]] = []
    with producer(lone, tmp_path / "s", spool_sync=sync, max_message_size="1m") as one:
        failed = doubtful(one)

        def send(numbers: range, seconds: float = 0) -> None:
            until = time.monotonic() + seconds
            for left, number in zip(range(len(numbers), 0, -1), numbers, strict=True):
                futures.append(one.send_async(Message(topic, b"%06d" % number)))
                if left % 100 == 0 and seconds:
                    gone.wait(max(0.0, until - time.monotonic()) * 100 / left)

        gone = threading.Event()
        send(range(killed_at))
        killed(lone, "broker-a")
        send(range(killed_at, restarted_at), OUTAGE_S)
        down = one.send(Message(topic, b"down"))
        assert down.status is SendStatus.SPOOLED
        lone.restart("broker-a")
        send(range(restarted_at, count))
        results = [down, *(future.result(120) for future in futures)]
        drain(one, 300)
        assert one.spool_metrics().give_ups == 0
    given = Counter(result.msg_id for result in results)
    assert max(given.values()) == 1
    spooled = {result.msg_id for result in results if result.status is SendStatus.SPOOLED}
    assert len(spooled) > restarted_at - killed_at
    found = stored(lone, topic, len(given))
    arrived = Counter(message.msg_id for message in found)
    assert arrived.keys() == given.keys()
    twice = {msg_id for msg_id, times in arrived.items() if times > 1}
    causes = Counter(str(sorted(failed[msg_id])) for msg_id in twice)
    print(f"{sync}: {count} sent, {len(spooled)} spooled, {len(twice)} arrived more than once: {dict(causes)}")
    assert all(failed[msg_id] for msg_id in twice)  # an attempt whose answer was lost, or came too late


def test_a_queue_chosen_by_key_keeps_its_order_over_an_outage(lone: LocalBroker, topic: str, tmp_path: Path) -> None:
    queue = MessageQueue(topic, "broker-a", 2)
    with producer(lone, tmp_path / "s", send_timeout="500ms") as one:
        bodies = [b"%03d" % i for i in range(60)]
        for body in bodies[:10]:
            assert one.send(Message(topic, body), queue=queue, timeout_s=20).status is SendStatus.SEND_OK
        killed(lone, "broker-a")
        for body in bodies[10:20]:
            assert one.send(Message(topic, body), queue=queue).status is SendStatus.SPOOLED
        lone.restart("broker-a")
        for body in bodies[20:]:  # behind them at first, directly when none waits any more
            one.send(Message(topic, body), queue=queue)
        drain(one)
        assert one.send(Message(topic, b"end"), queue=queue, timeout_s=20).status is SendStatus.SEND_OK
    found = [message.body for message in stored(lone, topic, 61) if message.queue_id == 2]
    assert list(dict.fromkeys(found)) == [*bodies, b"end"]


def test_messages_spooled_for_queue_go_batched_and_read_as_sent(lone: LocalBroker, topic: str, tmp_path: Path) -> None:
    queue, sent = MessageQueue(topic, "broker-a", 1), []
    with producer(lone, tmp_path / "s", send_timeout="500ms") as one:
        one.send(Message(topic, b"first"), queue=queue, timeout_s=20)
        killed(lone, "broker-a")
        for number in range(300):
            large = b"x" * 5000 if number % 100 == 50 else b""  # is compressed, which no message of a batch may be
            message = Message(
                topic,
                b"%d" % number + large,
                f"tag-{number // 40}",
                [f"k{number}", "all"],
                {"p": f"{number}"},
                flag=number,
            )
            result = one.send(message, queue=queue)
            assert result.status is SendStatus.SPOOLED
            sent.append((result.msg_id, message))
        tries: Counter[int] = Counter()
        one._spool._resender._engine.hooks.add(  # type: ignore[union-attr]
            after=lambda attempt: tries.update([len(attempt.msg_ids)] if attempt.error is None else [])
        )
        lone.restart("broker-a")
        drain(one)
    assert sum(tries.values()) < 100
    assert sum(size * count for size, count in tries.items()) == 300
    found = {record.id: record for record in sorted(java_read(lone.name_server, topic, 301), key=lambda one: one.place)}
    in_order = [found[msg_id] for msg_id, _ in sent]
    assert in_order == sorted(in_order, key=lambda one: one.offset), "as they were sent"
    for record, (_, message) in zip(in_order, sent, strict=True):
        assert (record.queue, record.flag, record.tags, record.keys) == (1, message.flag, message.tags, message.keys)
        assert record.user_properties == message.properties
        assert record.content == content(md5(message.body), message.tags, message.keys, message.properties)


def test_first_send_without_master_is_spooled_without_queue(lone: LocalBroker, topic: str, tmp_path: Path) -> None:
    killed(lone, "broker-a")
    session.close_all()
    with producer(lone, tmp_path / "s") as one:
        first = one.send(Message(topic, b"first"))
        assert (first.status, first.queue) == (SendStatus.SPOOLED, None)
        hashed = one.send(Message(topic, b"hashed"), selector="hash", arg="customer-7")
        assert (hashed.status, hashed.queue) == (SendStatus.SPOOLED, None)
        lone.restart("broker-a")
        drain(one)
    messages = stored(lone, topic, 2)
    assert {message.body for message in messages} == {b"first", b"hashed"}
    session.close_all()
    with producer(lone, tmp_path / "s") as one:
        direct = one.send(Message(topic, b"again"), selector="hash", arg="customer-7")
    assert direct.queue is not None
    (place,) = {message.queue_id for message in messages if message.body == b"hashed"}
    assert place == direct.queue.queue_id


def test_absent_name_server_spools_but_missing_topic_fails(lone: LocalBroker, topic: str, tmp_path: Path) -> None:
    with Producer(
        name_server="127.0.0.1:1",
        group="g",
        on_send_failure="spool",
        spool_dir=str(tmp_path / "s"),
        send_timeout="300ms",
    ) as one:
        assert one.send(Message(topic, b"x")).status is SendStatus.SPOOLED
        assert one.send(Message(topic, b"x"), queue=MessageQueue(topic, "broker-a", 1)).status is SendStatus.SPOOLED
    with producer(lone, tmp_path / "other") as one:
        with pytest.raises(RouteNotFound):
            one.send(Message("missing-topic", b"x"), selector="hash", arg="7", timeout_s=60)  # time to be told so
        with pytest.raises(RocketMQError):
            one.send(Message(topic, b""))
        assert depth(one) == 0


CHILD = """
import os, sys
from rocketmq_spark import Message, Producer
server, folder, topic = sys.argv[1:]
one = Producer(name_server=server, group="g", on_send_failure="spool", spool_dir=folder, send_timeout="500ms")
result = one.send(Message(topic, b"kept"))
os.write(1, f"{result.status.name} {result.msg_id}".encode())
os.kill(os.getpid(), 9)
"""


def test_process_killed_after_spooling_loses_no_message(lone: LocalBroker, topic: str, tmp_path: Path) -> None:
    killed(lone, "broker-a")
    command = [sys.executable, "-c", CHILD, lone.name_server, str(tmp_path / "s"), topic]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60, cwd=ROOT)
    status, msg_id = done.stdout.split()
    assert (done.returncode, status) == (-9, "SPOOLED"), done.stderr
    lone.restart("broker-a")
    with producer(lone, tmp_path / "s") as one:
        drain(one)
    assert [message.msg_id for message in stored(lone, topic, 1)] == [msg_id]
    (java,) = JavaPeer(lone.name_server).read(topic, 1)
    assert java.id == msg_id
