"""A transport whose batches are lists of messages: producers and the sink never look into what they send."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from pyspark.sql.pandas.types import from_arrow_schema

from rocketmq_spark import session
from rocketmq_spark.columnar import arrow
from rocketmq_spark.columnar.encode.encoder import CheckedRows, Encoded, Encoder, RowTopics
from rocketmq_spark.errors import ConnectionLost
from rocketmq_spark.model import Message, MessageQueue, SendRequest, SendResult, SendStatus
from rocketmq_spark.model.send import SentMessage
from rocketmq_spark.producer.outgoing import messages_in_batch
from rocketmq_spark.producer.producer import BaseProducer
from rocketmq_spark.producer.settings import ProducerSettings
from rocketmq_spark.spark.sink import checks
from rocketmq_spark.spark.sink.report import Written
from rocketmq_spark.spark.sink.task import TaskWriter
from rocketmq_spark.wire.properties import decode_properties
from tests.fakes.sender import ScriptedSender
from tests.fakes.spool import FakeSpool
from tests.fakes.timer import Time
from tests.live.writes import frame, numbered, sink_options

# What a message takes beside its body: nothing else counts on this wire.
HEAD = 1000


class MemoryBatch(list[SentMessage]):
    """Implements ``model.send.Batch``."""

    def __len__(self) -> int:
        return sum(HEAD + len(message.body) for message in self)

    def messages(self) -> list[SentMessage]:
        return [*self]


class MemoryItem:
    def __init__(self, message: SentMessage) -> None:
        self.message = message

    def __len__(self) -> int:
        return HEAD + len(self.message.body)


class MemoryEncoder:
    """Implements ``model.send.MessageEncoder``."""

    def encode_item(self, topic: str, body: bytes, properties: str, flag: int, born_ms: int) -> MemoryItem:
        return MemoryItem(SentMessage(body, decode_properties(properties), flag))

    def encode_batch(self, items: list[MemoryItem]) -> MemoryBatch:
        return MemoryBatch(item.message for item in items)


class MemorySender(ScriptedSender):
    """Implements ``ports.Sender``."""

    encoder: Any = MemoryEncoder()

    def __init__(self) -> None:
        super().__init__(Time())
        self.batches: list[MemoryBatch] = []
        self.lost = False

    def _outcome(self, mode: str, queue: MessageQueue, request: SendRequest, deadline: Any) -> Any:
        if self.lost:
            return ConnectionLost("gone")
        if not request.batch:
            self.batches.append(MemoryBatch([SentMessage(request.body, decode_properties(request.properties))]))
            return SendResult(SendStatus.SEND_OK, "", queue, 1, "OFF")
        assert isinstance(request.body, MemoryBatch)
        self.batches.append(request.body)
        return SendResult(SendStatus.SEND_OK, "", queue, 1, ",".join("OFF" for _ in request.body))

    @property
    def stored(self) -> list[SentMessage]:
        return [message for batch in self.batches for message in batch]


class MemoryPieces:
    """Implements ``columnar.encode.properties.PropertyPieces``."""

    def __init__(self, rows: int) -> None:
        self.lengths = np.zeros(rows, np.int64)
        self.rows: list[dict[str, str]] = [{} for _ in range(rows)]

    def add_property(self, name: bytes, values: pa.Array, filled: Any = None) -> None:
        for i, value in enumerate(values.to_pylist()):
            if filled is None or filled[i]:
                self.rows[i][name.decode()] = value.decode()

    def add_entries(self, names: pa.Array, values: pa.Array, bounds: Any) -> None:
        pairs = list(zip(names.to_pylist(), values.to_pylist(), strict=True))
        for row, (begin, end) in zip(self.rows, itertools.pairwise(bounds.tolist()), strict=True):
            row.update({name.decode(): value.decode() for name, value in pairs[begin:end]})


@dataclass(frozen=True, slots=True)
class MemoryEncoded(Encoded):
    items: pa.Array
    messages: list[SentMessage]

    def take(self, rows: Any) -> MemoryEncoded:
        return MemoryEncoded(self.items.take(pa.array(rows)), [self.messages[i] for i in rows])

    def slice(self, start: int, end: int) -> MemoryEncoded:
        return MemoryEncoded(self.items.slice(start, end - start), self.messages[start:end])

    def _ends(self) -> Any:
        return arrow.offsets(self.items)

    def _body(self, start: int, end: int) -> MemoryBatch:
        return MemoryBatch(self.messages[start:end])


class MemoryRowEncoder(Encoder):
    def _new_pieces(self, batch: pa.RecordBatch, bad_rows: Any) -> MemoryPieces:
        return MemoryPieces(len(batch))

    def join(self, checked: CheckedRows, topics: RowTopics | None = None) -> MemoryEncoded:
        codes = itertools.repeat(0) if topics.topic_codes is None else topics.topic_codes
        messages = [
            SentMessage(body, {**row, "of": topics.names[code]})
            for body, row, code in zip(checked.body.to_pylist(), checked.pieces.rows, codes, strict=False)
        ]
        return MemoryEncoded(pa.array([bytes(HEAD + len(message.body)) for message in messages]), messages)


@pytest.fixture
def sender() -> MemorySender:
    return MemorySender()


def producer(sender: MemorySender, **more: Any) -> BaseProducer:
    spool = more.pop("spool", None)
    settings = ProducerSettings(group="g", heartbeat_s=0, route_refresh_s=0, **more)
    return BaseProducer(sender, settings, spool=spool)


def test_a_message_an_explicit_batch_and_automatic_ones(sender: MemorySender) -> None:
    messages = [Message("T", f"{n}".encode(), tags="a", properties={"n": f"{n}"}) for n in range(6)]
    with producer(sender, auto_batch=True, batch_max_bytes=1, batch_max_delay_ms=30_000) as sends:
        one = sends.send(messages[0], timeout_s=5)
        two = sends.send_batch(messages[1:3])
        rest = [sends.send_async(message) for message in messages[3:]]
        assert sends.flush()
    assert [message.body for message in sender.stored] == [message.body for message in messages]
    assert [message.properties["n"] for message in sender.stored] == [f"{n}" for n in range(6)]
    ids = [message.properties["UNIQ_KEY"] for message in sender.stored]
    assert ids == [one.msg_id, *two.msg_id.split(","), *[each.result().msg_id for each in rest]]


def test_batches_have_the_size_of_this_transport(sender: MemorySender) -> None:
    with producer(sender, auto_batch=True, total_batch_max_bytes=3 * HEAD, batch_max_delay_ms=30_000) as sends:
        sent = [sends.send_async(Message("T", b"x")) for _ in range(4)]
        assert sends.flush()
        assert {each.result().status for each in sent} == {SendStatus.SEND_OK}
    assert sorted(map(len, sender.batches)) == [HEAD + 1, 3 * (HEAD + 1)]


def test_unsent_messages_are_spooled_in_common_format(sender: MemorySender) -> None:
    spool, sender.lost = FakeSpool(), True
    with producer(sender, auto_batch=True, spool=spool, retries=0) as sends:
        sent = [sends.send_async(Message("T", f"{n}".encode(), tags="a")) for n in range(3)]
        assert sends.flush()
        assert {each.result().status for each in sent} == {SendStatus.SPOOLED}
    kept = [message for send in spool.kept for message in kept_messages(send.request)]
    assert [(message.body, message.properties["TAGS"]) for message in kept] == [(b"0", "a"), (b"1", "a"), (b"2", "a")]


def kept_messages(request: SendRequest) -> list[SentMessage]:
    assert isinstance(request.data, bytes)
    if request.batch:
        return [*messages_in_batch(request)]
    return [SentMessage(request.data, decode_properties(request.properties))]


def write(sender: MemorySender, monkeypatch: pytest.MonkeyPatch, rows: pa.RecordBatch, **given: Any) -> Written:
    monkeypatch.setattr(session, "sender", lambda options: sender)
    monkeypatch.setattr(session, "row_encoder", lambda options: MemoryRowEncoder)
    options = sink_options("nobody:9876", **given)
    names = checks.check_sink(options, from_arrow_schema(rows.schema))
    return TaskWriter(options, names, None, {}).write([rows])


@pytest.mark.parametrize("given", [{}, {"autoBatch": "false"}], ids=["batches", "one by one"])
def test_the_sink(sender: MemorySender, monkeypatch: pytest.MonkeyPatch, given: dict[str, str]) -> None:
    rows = frame(
        body=numbered(40), tags=["t"] * 40, properties=[[("p", "v")], [("q", "w"), ("p", "u")]] * 20,
    )  # fmt: skip
    done = write(sender, monkeypatch, rows, topic="T", batchMaxBytes=10 * (HEAD + 6), **given)
    assert (done.rows, done.batches) == (40, 40 if given else 4)
    assert sorted(message.body for message in sender.stored) == [body.encode() for body in numbered(40)]
    assert all(message.properties["of"] == "T" and message.properties["TAGS"] == "t" for message in sender.stored)
    assert {message.properties["p"] for message in sender.stored} == {"v", "u"}
    assert {len(batch) for batch in sender.batches} == {(1 if given else 10) * (HEAD + 6)}


def test_rows_of_several_topics_say_theirs(sender: MemorySender, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever order they are sent in."""
    sender.routes["U"] = tuple(MessageQueue("U", "a", i) for i in range(2))
    names = ["T", "U", "U", "T", "U"] * 4
    write(sender, monkeypatch, frame(body=[f"{name}{n}" for n, name in enumerate(names)], topic=names))
    assert len(sender.stored) == 20
    assert all(message.body.decode().startswith(message.properties["of"]) for message in sender.stored)
    assert {message.body[:1].decode() for batch in sender.batches for message in batch} == {"T", "U"}


def test_the_sink_spools_for_it(sender: MemorySender, monkeypatch: pytest.MonkeyPatch) -> None:
    spool, sender.lost = FakeSpool(), True
    monkeypatch.setattr("rocketmq_spark.spark.sink.task.worker_spool", lambda options, settings: spool)
    done = write(
        sender, monkeypatch, frame(body=numbered(6)), topic="T", batchMaxBytes=2 * (HEAD + 6), sendTimeout="1s"
    )
    assert done.spooled == 6
    kept = [bytes(message.body) for send in spool.kept for message in kept_messages(send.request)]
    assert sorted(kept) == [body.encode() for body in numbered(6)]
