"""The messages of every benchmark: a tag, a key, a message id and two user properties each, over eight queues."""

from __future__ import annotations

import os
import time

import numpy as np
import pyarrow as pa

from rocketmq_spark import LocalBroker
from rocketmq_spark.client.admin import Admin
from rocketmq_spark.clock import Deadline
from rocketmq_spark.model import SendRequest
from rocketmq_spark.options import parse
from rocketmq_spark.session import client
from rocketmq_spark.sink.encode import Encoder, UniqueIds

QUEUES = 8
# The stock store sizes of RocketMQ; a small broker for tests rolls its files more often.
STOCK = {"mappedFileSizeCommitLog": 1 << 30, "mappedFileSizeConsumeQueue": 300_000 * 20}


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


def fill(broker: LocalBroker, topic: str, count: int, size: int) -> None:
    """Write ``count`` messages round robin, and wait until all can be read."""
    broker.create_topic(topic, queues=QUEUES)
    sender = client(parse({"nameServer": broker.name_server})).sender
    queues = sender.publish_queues(topic, Deadline.after(10))
    encoder = Encoder(
        {name: name for name in ("body", "tags", "keys", "properties")}, 4 << 20, UniqueIds(os.urandom(8))
    )
    sent = turn = 0
    while sent < count:
        rows = min(20_000, count - sent)
        for chunk in encoder(frame(rows, size, sent)).chunks(1 << 20):
            request = SendRequest("bench", chunk.body, batch=True, born_timestamp_ms=int(time.time() * 1000))
            _send(sender, queues[turn % len(queues)], request)
            turn += 1
        sent += rows
    wait_visible(broker, topic, count)


def _send(sender: object, queue: object, request: SendRequest) -> None:
    from rocketmq_spark.errors import RocketMQError

    while True:
        try:
            sender.send(queue, request, Deadline.after(30))  # type: ignore[attr-defined]
            return
        except RocketMQError as e:
            if not e.retriable:
                raise
            time.sleep(0.05)


def visible(broker: LocalBroker, topic: str) -> int:
    with Admin(broker.name_server) as admin:
        return sum(bounds.max_offset - bounds.min_offset for bounds in admin.describe_topic(topic).values())


def wait_visible(broker: LocalBroker, topic: str, count: int, timeout_s: float = 120.0) -> None:
    """The index that readers use is built behind the acknowledgements."""
    deadline = Deadline.after(timeout_s)
    while visible(broker, topic) < count:
        if deadline.expired:
            raise SystemExit(f"{topic}: {visible(broker, topic)} of {count} messages can be read")
        time.sleep(0.01)
