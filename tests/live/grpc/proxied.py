"""What tests over gRPC share: topics that the Proxy knows, producers and tasks that go through it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql.pandas.types import from_arrow_schema

from rocketmq_spark import Producer, session
from rocketmq_spark import options as options_table
from rocketmq_spark.base.clock import Deadline
from rocketmq_spark.errors import RocketMQError
from rocketmq_spark.localbroker import LocalBroker
from rocketmq_spark.options import Options
from rocketmq_spark.spark.sink import checks
from rocketmq_spark.spark.sink.report import Written
from rocketmq_spark.spark.sink.task import TaskWriter
from tests.helpers import awaited
from tests.mockbroker import eventually
from tests.reading import Row, names, read


@pytest.fixture(autouse=True)
def forgotten() -> Iterator[None]:
    """Channels end with the test."""
    yield
    session.close_all()


def new_topic(mq: LocalBroker, kind: str = "NORMAL", queues: int = 4) -> str:
    """A topic of messages of this type; it is there when the Proxy says so."""
    (topic,) = names(1, kind.lower())
    mq.create_topic(topic, queues, attributes={"message.type": kind})
    eventually(lambda: kind in known(mq, topic), 60)
    return topic


def known(mq: LocalBroker, topic: str, **options: Any) -> frozenset[str]:
    """The types that a topic takes; the Proxy keeps for a while that there is none."""
    given = parsed(mq, **options)
    try:
        session.sender(given).publish_queues(topic, Deadline.after(30.0), refresh=True)
        return session.message_types(given, topic, Deadline.after(30.0)) or frozenset()
    except RocketMQError:
        return frozenset()


def parsed(mq: LocalBroker | str, **options: Any) -> Options:
    """Those of a sink; ``mq`` may be an address."""
    endpoint = mq if isinstance(mq, str) else mq.proxy_grpc
    return options_table.parse({"transport": "grpc", "proxyEndpoint": endpoint, **options}).for_role("sink")


def producer(mq: LocalBroker, **options: Any) -> Producer:
    given = {"transport": "grpc", "proxy_endpoint": mq.proxy_grpc, "group": "g", "send_timeout": "10s", **options}
    return Producer(**given)


def write(mq: LocalBroker | str, *batches: pa.RecordBatch, **options: Any) -> Written:
    """As Spark does it: checked on the driver, then sent by a task."""
    given = parsed(mq, **options)
    columns = checks.check_sink(given, from_arrow_schema(batches[0].schema))
    checks.check_brokers(given, columns)
    return TaskWriter(given, columns).write(iter(batches))


def rows_now(mq: LocalBroker, topic: str) -> list[Row]:
    """What can be read of a topic now, over remoting."""
    return read(mq, subscribe=topic, includeProperties="all")


def stored_rows(mq: LocalBroker, topic: str, count: int) -> list[Row]:
    """What the brokers have of a topic, queue by queue: read directly, over remoting, once there are so many."""
    found = awaited(lambda: rows_now(mq, topic), lambda rows: len(rows) >= count > 0, 60)
    plain = [{**row, "properties": dict(row["properties"])} for row in found]
    return sorted(plain, key=lambda row: (row["queueId"], row["queueOffset"]))
