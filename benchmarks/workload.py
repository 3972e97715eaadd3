"""The messages of every benchmark: a tag, a key, a message id and two user properties each, over eight queues."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pyarrow as pa

from rocketmq_spark import LocalBroker, Message, Producer
from rocketmq_spark.base.clock import Deadline
from rocketmq_spark.base.codes import Property, SysFlag
from rocketmq_spark.client.admin import BaseAdmin
from rocketmq_spark.columnar.encode.encoder import Encoder
from rocketmq_spark.columnar.encode.ids import UniqueIds
from rocketmq_spark.errors import RocketMQError
from rocketmq_spark.model import MessageQueue, SendRequest
from rocketmq_spark.options import parse
from rocketmq_spark.ports import Sender
from rocketmq_spark.session import client
from rocketmq_spark.wire import compression
from rocketmq_spark.wire.properties import encode_properties

QUEUES = 8
_ROWS = 20_000
# The stock store sizes of RocketMQ, of an index file in entries; a small broker for tests rolls its files more often.
QUEUE_FILE = 300_000
STORE = {"mappedFileSizeCommitLog": 1 << 30, "mappedFileSizeConsumeQueue": QUEUE_FILE * 20}


def broker(brokers: int = 1, proxy: bool = False) -> LocalBroker:
    """Brokers, and a Proxy, as an operator runs them: with both compilers, which those for tests do without, and memory."""
    jvm = ("-XX:TieredStopAtLevel=4", "-XX:MaxDirectMemorySize=1g")
    return LocalBroker(brokers=brokers, proxy=proxy, conf=STORE, heap_mb=1536, jvm=jvm, quiet=True)


def frame(count: int, size: int, first: int = 0) -> pa.RecordBatch:
    """``count`` rows as the sink takes them."""
    numbers = np.arange(first, first + count)
    body = os.urandom(size)
    return pa.RecordBatch.from_pydict(
        {
            "body": pa.array([body] * count, pa.binary()),
            "tags": pa.array([f"tag{i % 4}" for i in numbers.tolist()]),
            "keys": pa.array([f"key-{i}" for i in numbers.tolist()]),
            "properties": pa.array(
                [[("region", "eu-west"), ("amount", str(i))] for i in numbers.tolist()],
                pa.map_(pa.string(), pa.string()),
            ),
        }
    )


def bodies(count: int, size: int) -> Iterator[bytes]:
    """The messages as batch bodies of at most 1 MiB."""
    encoder = Encoder(
        {name: name for name in ("body", "tags", "keys", "properties")},
        4 << 20,
        UniqueIds(os.urandom(8), lambda: time.time_ns() // 1_000_000),
    )
    for first in range(0, count, _ROWS):
        for chunk in encoder(frame(min(_ROWS, count - first), size, first)).chunks(1 << 20):
            assert isinstance(chunk.body, memoryview)
            yield bytes(chunk.body)


def send(broker: LocalBroker, topic: str, batches: Iterable[bytes], depth: int = 4, whole: bool = False) -> None:
    """Send batch bodies round robin, ``depth`` at a time; ``whole`` gives each an id, so that a batch topic stores it as one."""
    sender = client(parse({"nameServer": broker.name_server})).sender
    queues = sender.publish_queues(topic, Deadline.after(10))

    def one(turn_and_body: tuple[int, bytes]) -> None:
        turn, body = turn_and_body
        properties = encode_properties({Property.UNIQ_KEY: f"{turn:032}"}) if whole else ""
        request = SendRequest("bench", body, properties, batch=True, born_timestamp_ms=int(time.time() * 1000))
        _send(sender, queues[turn % len(queues)], request)

    with ThreadPoolExecutor(depth) as pool:
        for _ in pool.map(one, enumerate(batches)):
            pass


def fill(broker: LocalBroker, topic: str, count: int, size: int, whole: bool = False) -> None:
    """Write ``count`` messages round robin, and wait until all can be read; ``whole`` for a batch topic."""
    broker.create_topic(topic, queues=QUEUES, batch=whole)
    send(broker, topic, bodies(count, size), whole=whole)
    wait_visible(broker, topic, count)


def fill_compressed(broker: LocalBroker, topic: str, count: int, body: bytes, kind: SysFlag) -> None:
    """Write one body ``count`` times, each a message of its own, for a batch is compressed as a whole or not at all."""
    broker.create_topic(topic, queues=1)
    sender = client(parse({"nameServer": broker.name_server})).sender
    (queue,) = sender.publish_queues(topic, Deadline.after(10))
    packed = compression.compress(body, kind)
    for _ in range(count):
        _send(sender, queue, SendRequest("bench", packed, sys_flag=SysFlag.COMPRESSED | kind))
    wait_visible(broker, topic, count)


def message(topic: str, body: bytes, i: int) -> Message:
    """One of them as a producer takes it."""
    properties = {"region": "eu-west", "amount": str(i)}
    return Message(topic, body, tags=f"tag{i % 4}", keys=[f"key-{i}"], properties=properties)


def produce(producer: Producer, topic: str, count: int, size: int) -> None:
    """Hand ``count`` messages to ``producer`` and wait for all their results."""
    body = os.urandom(size)
    for future in [producer.send_async(message(topic, body, i)) for i in range(count)]:
        future.result()


def _send(sender: Sender, queue: MessageQueue, request: SendRequest) -> None:
    while True:
        try:
            sender.send(queue, request, Deadline.after(30))
            return
        except RocketMQError as e:
            if not e.retriable:
                raise
            time.sleep(0.05)


def visible(broker: LocalBroker, topic: str) -> int:
    with BaseAdmin(broker.name_server) as admin:
        return sum(bounds.max_offset - bounds.min_offset for bounds in admin.describe_topic(topic).values())


def wait_visible(broker: LocalBroker, topic: str, count: int, timeout_s: float = 120.0) -> None:
    """The index that readers use is built behind the acknowledgements."""
    deadline = Deadline.after(timeout_s)
    while visible(broker, topic) < count:
        if deadline.expired:
            raise SystemExit(f"{topic}: {visible(broker, topic)} of {count} messages can be read")
        time.sleep(0.01)
