"""Whatever a broker, a name server or a Proxy says, each public call ends in its time with a value or a documented error."""

from __future__ import annotations

import resource
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, Protocol

import pytest

from rocketmq_spark import Consumer, Message, Producer, PullConsumer, SimpleConsumer, session
from rocketmq_spark.base.clock import Deadline
from rocketmq_spark.client.admin import BaseAdmin
from rocketmq_spark.errors import RocketMQError
from rocketmq_spark.model import MessageQueue
from rocketmq_spark.wire.identifiers import RecallHandle
from tests.fuzz.hostile import Hostile
from tests.fuzz.hostile_proxy import hostile_proxy
from tests.mockbroker import eventually
from tests.reading import batch_reader, rows, stream_reader
from tests.scale import SCALE

ROUNDS = 400 if SCALE >= 1 else 16
pytestmark = pytest.mark.timeout(3600 if SCALE >= 1 else 900)
CALL_S = 30.0
MAX_GROWTH = 256 << 20
SHORT = {"request_timeout": "300ms", "connect_timeout": "300ms"}
READ = {"subscribe": "t", "requestTimeout": "300ms", "readDeadline": "600ms", "topicWait": "300ms", "numRetries": 1,
        "retryInterval": "20ms", "connectTimeout": "300ms", "startingOffsets": "earliest"}  # fmt: skip
HANDLE = str(RecallHandle("t", "broker-a", 1, "7F00000100002A9F0000000000000001"))
QUEUE = MessageQueue("t", "broker-a", 0)


class Peer(Protocol):
    address: str
    faults: int  # of a hundred answers


def send(peer: Peer) -> object:
    with Producer(name_server=peer.address, group="g", send_timeout="400ms", **SHORT) as producer:
        acts: list[Callable[[], object]] = [
            lambda: producer.queues("t"),
            lambda: producer.send(Message("t", b"x", keys=["k"])),
            lambda: producer.send(Message("t", b"x"), queue=QUEUE, delay=7),
            lambda: producer.send_batch([Message("t", b"x"), Message("t", b"y")]),
            lambda: producer.send_async(Message("t", b"x")).result(CALL_S),
            lambda: producer.send_oneway(Message("t", b"x")),
        ]
        return [tried(act) for act in acts]


def poll(peer: Peer) -> object:
    with PullConsumer(name_server=peer.address, group="g", consume_from_where="earliest", **SHORT) as consumer:
        tried(lambda: consumer.assign([QUEUE]))
        return [
            tried(lambda: consumer.poll(0.3)),
            tried(lambda: consumer.poll_arrow(0.3)),
            tried(lambda: consumer.commit()),
            tried(lambda: consumer.committed(QUEUE)),
            tried(lambda: consumer.seek(QUEUE, 0)),
            tried(lambda: consumer.poll(0.3)),
        ]


def subscribed(peer: Peer) -> object:
    with PullConsumer(name_server=peer.address, group="g", consume_from_where="earliest", **SHORT) as consumer:
        tried(lambda: consumer.subscribe("t", tags="t"))
        return [tried(lambda: consumer.poll(0.3)), tried(lambda: consumer.assignment())]


def consume(peer: Peer) -> object:
    got = threading.Semaphore(0)
    with Consumer(name_server=peer.address, group="g", consume_from_where="earliest", **SHORT) as consumer:
        consumer.subscribe("t")
        tried(lambda: consumer.start(lambda messages, context: got.release()))
        came = got.acquire(timeout=1.0 if peer.faults else CALL_S / 2)
        return [tried(consumer.stats), came or RocketMQError("nothing came"), tried(lambda: consumer.stop(2.0))]


def batch(peer: Peer) -> object:
    reader = batch_reader(peer.address, **READ)
    return rows(reader, reader.partitions())


def stream(peer: Peer) -> object:
    reader = stream_reader(peer.address, **READ)
    start = reader.initialOffset()
    end = reader.latestOffset(start, reader.getDefaultReadLimit())
    return rows(reader, reader.partitions(start, end))


def administer(peer: Peer) -> object:
    with BaseAdmin(peer.address) as admin:
        return [
            tried(act)
            for act in (
                admin.topics,
                lambda: admin.describe_topic("t"),
                lambda: admin.create_topic("u", 2, timeout_s=5.0),
            )
        ]


PROXIED: dict[str, Any] = {"transport": "grpc", **SHORT}


def proxied_send(peer: Peer) -> object:
    with Producer(proxy_endpoint=peer.address, group="g", send_timeout="400ms", **PROXIED) as producer:
        acts: list[Callable[[], object]] = [
            lambda: producer.send(Message("t", b"x", keys=["k"])),
            lambda: producer.send(Message("t", b"x"), delay=7),
            lambda: producer.send(Message("t", b"x"), selector="hash", arg="k"),
            lambda: producer.send_batch([Message("t", b"x"), Message("t", b"y")]),
            lambda: producer.send_async(Message("t", b"x")).result(CALL_S),
            lambda: producer.recall("t", HANDLE),
        ]
        return [tried(act) for act in acts]


def received(peer: Peer) -> object:
    with SimpleConsumer(proxy_endpoint=peer.address, group="g", **SHORT) as consumer:
        tried(lambda: consumer.subscribe("t"))
        found = tried(lambda: consumer.receive(4, wait="300ms"))
        if not isinstance(found, list):
            return [found]
        ways = [consumer.ack, consumer.forward_to_dlq, lambda one: consumer.change_invisible(one, "1s")]
        return [found, *(tried(partial(way, one)) for one, way in zip(found, ways, strict=False))]


def listened(peer: Peer) -> object:
    got = threading.Semaphore(0)
    with Consumer(proxy_endpoint=peer.address, group="g", **PROXIED) as consumer:
        tried(lambda: consumer.subscribe("t"))
        tried(lambda: consumer.start(lambda messages, context: got.release()))
        came = got.acquire(timeout=1.0 if peer.faults else CALL_S / 2)
        return [tried(consumer.stats), came or RocketMQError("nothing came"), tried(lambda: consumer.stop(2.0))]


def tried(act: Callable[[], object]) -> object:
    try:
        return act()
    except RocketMQError as e:
        return e


def threads() -> set[threading.Thread]:
    """Threads of the package, without the one that waits in each process for clients that are dropped without ``close``."""
    named = (thread for thread in threading.enumerate() if thread.name.startswith("rocketmq"))
    return {thread for thread in named if thread.name != "rocketmq-dropped"}


def ends(call: Callable[[Peer], object], made: Callable[[int, int], AbstractContextManager[Peer]]) -> None:
    """Each of many rounds, and nothing is left of it."""
    session.close_all()
    others = threads()  # of whoever ran before in this process
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    values = errors = 0
    for seed in range(ROUNDS):
        with made(seed, (0, 10, 40, 90)[seed % 4]) as at:
            deadline = Deadline.after(CALL_S)
            outcome = tried(lambda: call(at))
            assert not deadline.expired, f"seed {seed}: it took longer than {CALL_S:g} s"
            session.close_all()
        said = outcome if isinstance(outcome, list) else [outcome]
        errors += any(isinstance(one, RocketMQError) for one in said)
        values += not any(isinstance(one, RocketMQError) for one in said)
        eventually(lambda: threads() <= others, CALL_S)
    assert 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) < MAX_GROWTH
    assert values, "nothing came through: the peer is not what it is taken for"
    assert errors, "nothing was broken"
    print(f"{call.__name__}: {ROUNDS} rounds, {values} well, {errors} with an error")


@pytest.mark.parametrize(
    "call", [send, poll, subscribed, consume, batch, stream, administer], ids=lambda call: call.__name__
)
def test_hostile_broker_ends_each_call_with_value_or_own_error(call: Callable[[Peer], object]) -> None:
    ends(call, Hostile)


@pytest.mark.parametrize("call", [proxied_send, received, listened], ids=lambda call: call.__name__)
def test_hostile_proxy_ends_each_call_with_value_or_own_error(call: Callable[[Peer], object]) -> None:
    ends(call, hostile_proxy)
