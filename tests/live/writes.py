"""Task writers without Spark, on a real broker: rows in, requests and stored messages out."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql.pandas.types import from_arrow_schema

from rocketmq_spark import options as options_table
from rocketmq_spark import session
from rocketmq_spark.localbroker import LocalBroker
from rocketmq_spark.model import MessageQueue, ReceivedMessage
from rocketmq_spark.options import Options
from rocketmq_spark.spark.sink import checks
from rocketmq_spark.spark.sink.report import Written
from rocketmq_spark.spark.sink.task import TaskWriter
from tests.live.producer.recording import RecordingSender

TYPES = {
    "keys": pa.list_(pa.string()),
    "properties": pa.map_(pa.string(), pa.string()),
    "queueId": pa.int32(),
    "delayLevel": pa.int32(),
    "delayMs": pa.int64(),
    "deliverAt": pa.timestamp("us", tz="UTC"),
    "flag": pa.int32(),
}


def frame(**columns: Any) -> pa.RecordBatch:
    """An Arrow batch as Spark makes it; columns are strings unless ``TYPES`` says otherwise."""
    arrays = {
        name: values if isinstance(values, pa.Array) else pa.array(values, TYPES.get(name, pa.string()))
        for name, values in columns.items()
    }
    return pa.RecordBatch.from_pydict(arrays)


def numbered(count: int, first: int = 0) -> list[str]:
    return [f"{i:06}" for i in range(first, first + count)]


def sink_options(name_server: str, **given: object) -> Options:
    return options_table.parse({"nameServer": name_server, **given}).for_role("sink")


class Writes:
    """Writes batches and keeps what was sent."""

    def __init__(self, name_server: str, monkeypatch: pytest.MonkeyPatch) -> None:
        self.name_server = name_server
        self.monkeypatch = monkeypatch
        self.sender: RecordingSender | None = None
        self.kind = RecordingSender

    def __call__(self, *batches: pa.RecordBatch, **given: object) -> Written:
        return self.stream(iter(batches), batches[0].schema, **given)

    def stream(self, batches: Iterator[pa.RecordBatch], schema: pa.Schema, **given: object) -> Written:
        options = sink_options(self.name_server, **given)
        client = session.client(options)
        self.sender = self.kind(client)
        recorded = dataclasses.replace(client, sender=self.sender)
        with self.monkeypatch.context() as patched:
            patched.setattr(session, "client", lambda options: recorded)
            names = checks.check_sink(options, from_arrow_schema(schema))
            return TaskWriter(options, names, None, checks.environment_queues(options)).write(batches)

    @property
    def requests(self) -> list[tuple[MessageQueue, Any]]:
        assert self.sender is not None
        return [(queue, request) for _, queue, request in self.sender.sends]


@pytest.fixture
def writes(rocketmq: LocalBroker, monkeypatch: pytest.MonkeyPatch) -> Writes:
    return Writes(rocketmq.name_server, monkeypatch)


def bodies(messages: list[ReceivedMessage]) -> list[str]:
    return [message.body.decode() for message in messages]


def by_queue(messages: list[ReceivedMessage]) -> dict[int, list[str]]:
    found: dict[int, list[str]] = {}
    for message in messages:
        found.setdefault(message.queue_id, []).append(message.body.decode())
    return found


Make = Callable[..., str]
