"""``send_arrow`` and ``send_many`` over a scripted sender."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any
from unittest.mock import Mock

import pyarrow as pa
import pytest

from rocketmq_spark import options as options_table
from rocketmq_spark.base.codes import Response
from rocketmq_spark.columnar.encode.encoder import Encoder
from rocketmq_spark.errors import (
    ClosedError,
    ConnectionLost,
    MessageRefused,
    OptionError,
    RocketMQError,
    SendFailed,
)
from rocketmq_spark.model import Message, MessageQueue, SendRequest, SendResult, SendStatus
from rocketmq_spark.model.pull import QueueEnd
from rocketmq_spark.producer import encoding
from rocketmq_spark.producer.ambiguity import AmbiguousSendResolver
from rocketmq_spark.producer.bulk import BulkProducer
from rocketmq_spark.producer.encoding import batch_request
from rocketmq_spark.producer.outgoing import OutgoingSend
from rocketmq_spark.producer.rows import inputs
from rocketmq_spark.producer.rows.sent import SentRows
from rocketmq_spark.producer.settings import ProducerSettings
from rocketmq_spark.queues.selection import select
from rocketmq_spark.wire.messages import decode_batch
from rocketmq_spark.wire.properties import decode_properties
from tests.fakes.sender import ScriptedSender, ok, refused
from tests.fakes.spool import FakeSpool
from tests.fakes.timer import ManualTimer
from tests.producer.bench import Bench
from tests.queues import qs

LOST = ConnectionLost("gone", "host:1")


class Bulk:
    """A bench whose producers send many messages at once."""

    def __init__(self, bench: Bench) -> None:
        self.bench, self.sender = bench, bench.sender

    def producer(self, options: dict[str, object] | None = None, spool: Any = None, **settings: Any) -> BulkProducer:
        given = {"nameServer": "x:1", "group": "g", **(options or {})}
        chosen = options_table.parse(given).for_role("producer")
        made = BulkProducer(
            self.sender,
            ProducerSettings(**{"group": "g", "heartbeat_s": 0, "route_refresh_s": 0, **settings}),
            make_timer=self.bench.timer,
            options=chosen,
            row_encoder=lambda: Encoder,
            spool=spool,
        )
        self.bench.producers.append(made)
        return made

    @property
    def sent(self) -> list[tuple[MessageQueue, list[tuple[str, dict[str, str]]]]]:
        """The queue of each request, and body and properties of its messages."""
        return [(queue, messages(request)) for _, queue, request in self.sender.calls]

    @property
    def bodies(self) -> list[list[str]]:
        return [[body for body, _ in found] for _, found in self.sent]


def messages(request: SendRequest) -> list[tuple[str, dict[str, str]]]:
    if not request.batch:
        return [(bytes(request.data).decode(), decode_properties(request.properties))]
    return [(bytes(item.body).decode(), decode_properties(item.properties)) for item in decode_batch(request.data)]


@pytest.fixture
def bulk(bench: Bench) -> Bulk:
    return Bulk(bench)


def table(*bodies: str, **columns: Any) -> pa.Table:
    return pa.table({"body": list(bodies), **columns})


def in_batches(monkeypatch: pytest.MonkeyPatch, rows: int) -> None:
    """Portions, and so batches, of at most so many rows."""
    monkeypatch.setattr(inputs, "PORTION_ROWS", rows)
    monkeypatch.setattr(inputs, "SMALL_CHUNK_ROWS", 0)


def test_rows_go_as_one_batch_with_a_result_for_each(bulk: Bulk) -> None:
    rows = table("a", "b", "c", tags=["t", None, "t"], keys=[["k", "l"], [], None])
    sent = bulk.producer().send_arrow(rows, "T")
    ((queue, found),) = bulk.sent
    assert [(body, p.get("TAGS"), p.get("KEYS")) for body, p in found] == [
        ("a", "t", "k l"),
        ("b", None, None),
        ("c", "t", None),
    ]
    ids = [properties["UNIQ_KEY"] for _, properties in found]
    assert list(sent) == [SendResult(SendStatus.SEND_OK, ids[i], queue, 100 + i, f"OFF{100 + i}") for i in range(3)]
    assert sent[-1] == sent[2]
    assert sent[1:] == [sent[1], sent[2]]
    assert sent.table.to_pydict() == {
        "status": ["SEND_OK"] * 3,
        "brokerName": [queue.broker_name] * 3,
        "queueId": [queue.queue_id] * 3,
        "queueOffset": [100, 101, 102],
        "msgId": ids,
        "error": [None] * 3,
    }
    assert (len(sent), sent.failed.tolist(), repr(sent)) == (3, [], "SentRows(3 rows, 0 of them failed)")
    sent.raise_for_failed()


def test_batches_go_round_the_queues_and_are_cut_by_size(bulk: Bulk, monkeypatch: pytest.MonkeyPatch) -> None:
    sent = bulk.producer({"batchMaxBytes": 250}).send_arrow(table(*map(str, range(12))), "T")
    assert [row for batch in bulk.bodies for row in batch] == [str(i) for i in range(12)]
    assert len(bulk.sent) > 2
    assert len({queue for queue, _ in bulk.sent}) == min(4, len(bulk.sent))
    assert [messages(request)[0][0] for request in bulk.sender.requests] == [batch[0] for batch in bulk.bodies]
    places = [
        (queue, 100 * number + at) for number, (queue, found) in enumerate(bulk.sent, 1) for at in range(len(found))
    ]
    assert [(each.queue, each.queue_offset) for each in sent if isinstance(each, SendResult)] == places


def test_nothing_is_nothing(bulk: Bulk) -> None:
    sent = bulk.producer().send_arrow(table(), "T")
    assert (len(sent), list(sent), sent.table.num_rows, sent.failed.tolist()) == (0, [], 0, [])
    assert list(bulk.producer().send_arrow(table("a").slice(0, 0).to_reader(), "T")) == []


@pytest.mark.parametrize("selector", [None, "hash"])
def test_the_rows_of_a_key_go_to_its_queue_in_order(
    bulk: Bulk, monkeypatch: pytest.MonkeyPatch, selector: str | None
) -> None:
    in_batches(monkeypatch, 10)
    keys = [f"k{i % 7}" for i in range(50)]
    given = {} if selector is None else {"selector": selector}
    sent = bulk.producer().send_arrow(table(*map(str, range(50)), shardingKey=keys), "T", **given)
    for i, outcome in enumerate(sent):
        assert isinstance(outcome, SendResult)
        assert outcome.queue == select("hash", qs("a:0-1 b:0-1"), None, keys[i])  # type: ignore[arg-type]
    for queue in qs("a:0-1 b:0-1"):
        mine = [int(body) for at, found in bulk.sent for body, _ in found if at == queue]
        assert mine == sorted(mine)


def test_a_column_names_the_queue(bulk: Bulk) -> None:
    rows = table("x", "y", "z", queueId=[1, 0, 1], brokerName=["b", "a", "b"])
    sent = bulk.producer().send_arrow(rows, "T")
    assert [each.queue for each in sent if isinstance(each, SendResult)] == list(qs("b:1 a:0 b:1"))
    with pytest.raises(
        MessageRefused, match=r"1 rows cannot be sent, and nothing of this call .*: row 1: .* no queue 7 on"
    ):
        bulk.producer().send_arrow(table("x", "y", queueId=[1, 7], brokerName=["b", "b"]), "T")


@pytest.mark.parametrize("given", [{}, {"selector": "hash"}])
@pytest.mark.parametrize("keys", [["k", None, "", None], [None] * 4], ids=["some", "none"])
def test_rows_without_a_sharding_key_go_to_queues_in_turn(
    bulk: Bulk, keys: list[str | None], given: dict[str, Any]
) -> None:
    """Also if no row has one, so that the column has no type."""
    producer = bulk.producer()
    anywhere = [body for body, key in zip("wxyz", keys, strict=True) if not key]
    for _ in range(4):
        producer.send_arrow(table(*"wxyz", shardingKey=keys), "T", **given).raise_for_failed()
    assert {at for at, found in bulk.sent if [body for body, _ in found] == anywhere} == {*qs("a:0-1 b:0-1")}


def test_round_robin_on_request_spreads_the_rows_of_a_key(bulk: Bulk) -> None:
    producer = bulk.producer()
    for _ in range(4):
        producer.send_arrow(table("x", shardingKey=["k"]), "T", selector="roundRobin").raise_for_failed()
    assert {at for at, _ in bulk.sent} == {*qs("a:0-1 b:0-1")}


@pytest.mark.parametrize("names", [["queueId"], ["queueId", "brokerName"]])
@pytest.mark.parametrize("some", [False, True])
def test_rows_that_name_no_queue_go_to_queues_in_turn(bulk: Bulk, names: list[str], some: bool) -> None:
    named = {"queueId": 1, "brokerName": "b"}
    bulk.sender.routes["T"] = tuple(qs("b:0-3"))
    columns = {name: [named[name] if some else None, None] for name in names}
    producer = bulk.producer()
    for _ in range(4):
        producer.send_arrow(table("x", "y", **columns), "T").raise_for_failed()
    assert {at for at, found in bulk.sent if "y" in [body for body, _ in found]} == {*qs("b:0-3")}
    assert not some or {at for at, found in bulk.sent if "x" in [body for body, _ in found]} == {*qs("b:1")}


def test_a_function_chooses_for_each_row(bulk: Bulk) -> None:
    def last(queues: list[MessageQueue], message: Any, key: object) -> MessageQueue:
        return queues[-1] if message.body == b"x" else queues[0]

    sent = bulk.producer().send_arrow(table("x", "y"), "T", selector=last)
    assert [each.queue for each in sent if isinstance(each, SendResult)] == list(qs("b:1 a:0"))


def test_rows_name_their_topics(bulk: Bulk) -> None:
    bulk.sender.routes["U"] = tuple(qs("c:0", topic="U"))
    sent = bulk.producer().send_arrow(table("x", "y", "z", topic=["T", "U", "T"]))
    assert [each.queue.topic for each in sent if isinstance(each, SendResult) and each.queue] == ["T", "U", "T"]
    assert sorted(bulk.bodies) == [["x", "z"], ["y"]]


def test_bad_rows_anywhere_in_a_table_send_nothing(bulk: Bulk, monkeypatch: pytest.MonkeyPatch) -> None:
    in_batches(monkeypatch, 2)
    producer = bulk.producer()
    with pytest.raises(MessageRefused) as e:
        producer.send_arrow(table("a", "b", "c", "d", ""), "T")
    assert e.value.message == (
        "1 rows cannot be sent, and nothing of this call was sent: row 4: body is empty, which brokers refuse"
    )
    assert e.value.remedy == "Rows are counted from 0 within the call"
    with pytest.raises(MessageRefused, match="row 3: flag takes more than 32 bits"):
        producer.send_arrow(table("a", "b", "c", "d", flag=[1, -(2**31), 2**31 - 1, 2**31]), "T")
    assert bulk.sender.calls == []


def test_of_a_reader_what_came_before_a_bad_row_is_sent(bulk: Bulk) -> None:
    reader = pa.RecordBatchReader.from_batches(
        pa.schema({"body": pa.string()}),
        [pa.record_batch({"body": each}) for each in (["a", "b"], ["c", "d"], ["e", ""], ["f"])],
    )
    with pytest.raises(MessageRefused, match="nothing of their Arrow batch was sent: row 5: body is empty") as e:
        bulk.producer().send_arrow(reader, "T")
    assert bulk.bodies == [["a", "b"], ["c", "d"]]
    assert e.value.remedy == "Rows are counted from 0 within the call. The Arrow batches before theirs were sent"
    assert e.value.__notes__ == ["Before that: SentRows(4 rows, 0 of them failed)"]


def test_a_reader_that_raises_ends_the_call_when_all_have_ended(bulk: Bulk) -> None:
    def batches() -> Iterator[pa.RecordBatch]:
        yield pa.record_batch({"body": ["a"]})
        raise ValueError("mine")

    with pytest.raises(ValueError, match="mine"):
        bulk.producer().send_arrow(pa.RecordBatchReader.from_batches(pa.schema({"body": pa.string()}), batches()), "T")
    assert bulk.bodies == [["a"]]


def test_error_in_middle_of_portion_is_raised_with_sent_rows(bulk: Bulk, monkeypatch: pytest.MonkeyPatch) -> None:
    in_batches(monkeypatch, 3)
    made = itertools.count()

    def no_memory(*given: Any) -> SendRequest:
        if next(made) == 2:
            raise MemoryError("mine")
        return batch_request(*given)

    monkeypatch.setattr(encoding, "batch_request", no_memory)
    rows = table(*"abcdef", queueId=[0, 0, 0, 0, 1, 1], brokerName=["a"] * 6)
    with pytest.raises(MemoryError, match="mine") as e:
        bulk.producer().send_arrow(rows, "T")
    assert bulk.bodies == [["a", "b", "c"], ["d"]]
    assert e.value.__notes__ == ["Before that: SentRows(6 rows, 2 of them failed)"]


def test_what_fails_is_in_the_result(bulk: Bulk, monkeypatch: pytest.MonkeyPatch) -> None:
    in_batches(monkeypatch, 2)
    bulk.sender.script = [ok, refused(Response.MESSAGE_ILLEGAL), ok]
    rows = table("a", "b", "c", "d", "e")
    sent = bulk.producer().send_arrow(rows, "T")
    assert sent.failed.tolist() == [2, 3]
    assert rows.take(sent.failed)["body"].to_pylist() == ["c", "d"]
    assert isinstance(sent[2], RocketMQError)
    assert sent.table["status"].to_pylist() == ["SEND_OK", "SEND_OK", None, None, "SEND_OK"]
    assert sent.table["queueOffset"].to_pylist() == [100, 101, None, None, 100]
    assert [bool(each) for each in sent.table["error"].to_pylist()] == [False, False, True, True, False]
    with pytest.raises(RocketMQError) as e:
        sent.raise_for_failed()
    assert e.value.__notes__ == ["2 of 5 rows failed, the first of them row 2"]
    assert repr(sent) == "SentRows(5 rows, 2 of them failed)"


def test_what_may_go_anywhere_is_tried_elsewhere(bulk: Bulk) -> None:
    bulk.sender.script = [LOST]
    sent = bulk.producer().send_arrow(table("a", "b"), "T")
    assert sent.failed.tolist() == []
    assert len({queue.broker_name for _, queue, _ in bulk.sender.calls}) == 2


def test_nothing_of_the_call_follows_a_failure_to_its_queue(bulk: Bulk, monkeypatch: pytest.MonkeyPatch) -> None:
    in_batches(monkeypatch, 2)
    bulk.sender.script = [ok, LOST]
    rows = table(*"abcdefgh", queueId=[0, 1] * 4, brokerName=["a"] * 8)
    producer = bulk.producer()
    sent = producer.send_arrow(rows, "T")
    assert bulk.bodies == [["a"], ["b"], ["c"], ["e"], ["g"]]
    assert sent.failed.tolist() == [1, 3, 5, 7]
    assert isinstance(sent[3], SendFailed)
    assert "an earlier batch of its queue was given up" in str(sent[3])
    assert producer.send_arrow(rows, "T").failed.tolist() == [], "the next call starts anew"


def test_rows_behind_one_without_room_do_not_reach_its_queue(bulk: Bulk, monkeypatch: pytest.MonkeyPatch) -> None:
    in_batches(monkeypatch, 1)
    producer = bulk.producer()
    submit, full = producer._engine.submit, [SendFailed("others have filled the room")]

    def submitted(outgoing: OutgoingSend) -> None:
        if len(bulk.sender.calls) == 1 and full:
            raise full.pop()
        submit(outgoing)

    monkeypatch.setattr(producer._engine, "submit", submitted)
    sent = producer.send_arrow(table(*"abcde", queueId=[0, 0, 0, 1, 0], brokerName=["a"] * 5), "T")
    assert bulk.bodies == [["a"], ["d"]]
    assert sent.failed.tolist() == [1, 2, 4]
    assert "others have filled the room" in str(sent[1])


class Slow(ScriptedSender):
    """Answers 10 ms later; ``most`` is the largest number of bytes that were out at once."""

    most = 0

    def send_async(self, queue, request, deadline, done):  # type: ignore[no-untyped-def]
        self.calls.append(("async", queue, request))
        self.waiting.append((queue, request, done))
        self.most = max(self.most, sum(len(each.data) for _, each, _ in self.waiting))
        ManualTimer(self.time).call_later(0.01, self.answer)


@pytest.mark.parametrize("columns", [{}, {"queueId": [0] * 40}])
def test_bytes_out_are_bounded(bulk: Bulk, columns: dict[str, Any]) -> None:
    bulk.sender = bulk.bench.sender = Slow(bulk.bench.time, "a:0")
    producer = bulk.producer({"batchMaxBytes": 100, "totalBatchMaxBytes": 8192})
    sent = producer.send_arrow(table(*map(str, range(40)), **columns), "T")
    assert sent.failed.tolist() == []
    assert [row for batch in bulk.bodies for row in batch] == [str(i) for i in range(40)]
    assert bulk.sender.most <= 100 if columns else 300 < bulk.sender.most <= 800
    assert len(bulk.bodies) == 40


def test_producer_closed_meanwhile_fails_each_remaining_row(bulk: Bulk, monkeypatch: pytest.MonkeyPatch) -> None:
    in_batches(monkeypatch, 1)
    producer = bulk.producer()

    def closes(queue: MessageQueue, request: SendRequest) -> SendResult:
        producer._close_lock.acquire()
        return ok(queue, request)

    bulk.sender.script = [closes]
    sent = producer.send_arrow(table("a", "b", "c"), "T")
    producer._close_lock.release()
    assert bulk.bodies == [["a"]]
    assert sent.failed.tolist() == [1, 2]
    assert isinstance(sent[2], ClosedError)
    assert len(set(sent.table["msgId"].to_pylist())) == 3
    producer.close()
    with pytest.raises(ClosedError):
        producer.send_arrow(table("a"), "T")


def test_closed_producer_stops_reading_record_batch_reader(bulk: Bulk) -> None:
    producer, read = bulk.producer(), 0

    def endless() -> Iterator[pa.RecordBatch]:
        nonlocal read
        while read < 9:
            read += 1
            yield pa.record_batch({"body": [str(read)]})

    def closes(queue: MessageQueue, request: SendRequest) -> SendResult:
        producer._close_lock.acquire()
        return ok(queue, request)

    bulk.sender.script = [closes]
    sent = producer.send_arrow(pa.RecordBatchReader.from_batches(pa.schema({"body": pa.string()}), endless()), "T")
    producer._close_lock.release()
    assert (bulk.bodies, read, sent.failed.tolist()) == ([["1"]], 2, [1])
    assert isinstance(sent[1], ClosedError)


def test_of_a_table_all_chunks_are_checked_before_any_is_sent(bulk: Bulk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inputs, "SMALL_CHUNK_ROWS", 0)
    rows = pa.concat_tables([table("a", "b"), table("c", "")])
    assert rows["body"].num_chunks == 2
    with pytest.raises(MessageRefused, match="nothing of this call was sent: row 3: body is empty"):
        bulk.producer().send_arrow(rows, "T")
    assert bulk.sender.calls == []


def test_a_call_may_have_a_time_of_its_own(bulk: Bulk) -> None:
    producer = bulk.producer({"sendTimeout": "30s"}, retries=0)
    bulk.sender.script = [LOST, LOST, LOST, LOST]
    producer.send_arrow(table("a"), "T", timeout_s=2.0)
    producer.send_many([Message("T", b"a")], timeout_s=2.0)
    assert bulk.sender.deadlines
    assert max(bulk.sender.deadlines) <= 2.0
    producer.send_arrow(table("a"), "T")
    assert bulk.sender.deadlines[-1] > 2.0


def test_ctrl_c_is_the_users(bulk: Bulk) -> None:
    def interrupted(queue: MessageQueue, request: SendRequest) -> SendResult:
        raise KeyboardInterrupt

    bulk.sender.script = [interrupted]
    with pytest.raises(KeyboardInterrupt):
        bulk.producer().send_arrow(table("a"), "T")


def test_a_spool_takes_what_may_pass(bulk: Bulk) -> None:
    bulk.sender.by_broker = {"a": lambda: LOST, "b": lambda: LOST}
    spool = FakeSpool()
    sent = bulk.producer(spool=spool, retries=0).send_arrow(table("a", "b"), "T")
    assert [each.status for each in sent if isinstance(each, SendResult)] == [SendStatus.SPOOLED] * 2
    assert sent.table["queueOffset"].to_pylist() == [None, None]
    (kept,) = spool.kept
    assert list(kept.msg_ids) == sent.table["msgId"].to_pylist()


def test_a_batch_topic_gets_the_tag_and_the_keys_of_a_batch(bulk: Bulk) -> None:
    bulk.sender.batch_topics["T"] = True
    bulk.producer().send_arrow(table("a", "b", "c", tags=["s", "t", "s"], keys=["k", "l", "m"]), "T")
    said = [decode_properties(request.properties) for request in bulk.sender.requests]
    assert [(each["TAGS"], each["KEYS"]) for each in said] == [("s", "k m"), ("t", "l")]
    assert bulk.bodies == [["a", "c"], ["b"]]


def test_delayed_rows_travel_alone(bulk: Bulk) -> None:
    rows = table("a", "b", "c", delayLevel=[0, 3, None])
    sent = bulk.producer().send_arrow(rows, "T")
    assert sorted(bulk.bodies) == [["a", "c"], ["b"]]
    assert [each.msg_id for each in sent if isinstance(each, SendResult)] == sent.table["msgId"].to_pylist()
    bulk.sender.longest_timers["b"] = 0
    with pytest.raises(MessageRefused, match=r"column 'delayMs' cannot be kept: b is older than RocketMQ 5\.0"):
        bulk.producer().send_arrow(table("a", delayMs=[5]), "T")
    with pytest.raises(OptionError, match="column 'delayMs' cannot be sent with option 'longDelay' dmq"):
        bulk.producer({"longDelay": "dmq"}).send_arrow(table("a", delayMs=[5]), "T")


def test_delayed_rows_travel_alone_among_several_queues(bulk: Bulk) -> None:
    placed = {"queueId": [1, 0, 1, 0, 1, 0, 0], "brokerName": ["a"] * 7}
    bulk.producer().send_arrow(table(*"abcdefg", **placed, delayLevel=[3, 0, 0, 5, 0, 0, 5]), "T")
    sent = ((queue.queue_id, messages(request), request.batch) for _, queue, request in bulk.sender.calls)
    found = sorted((queue, [(body, said.get("DELAY")) for body, said in each], batch) for queue, each, batch in sent)
    assert found == [
        (0, [("b", None), ("f", None)], True),
        (0, [("d", "5")], False),
        (0, [("g", "5")], False),
        (1, [("a", "3")], False),
        (1, [("c", None), ("e", None)], True),
    ]


def test_rows_of_a_retry_topic_travel_alone(bulk: Bulk) -> None:
    bulk.sender.routes["%RETRY%g"] = tuple(qs("a:0", "%RETRY%g"))
    bulk.producer().send_arrow(table("a", "b"), "%RETRY%g")
    assert (bulk.bodies, [request.batch for request in bulk.sender.requests]) == ([["a"], ["b"]], [False, False])


def test_hooks_see_each_batch_with_its_ids(bulk: Bulk) -> None:
    seen: list[Any] = []
    producer = bulk.producer()
    producer.add_hook(
        before=lambda context: seen.append((list(context.msg_ids), context.msg_ids[1:][0], repr(context.msg_ids)))
    )
    sent = producer.send_arrow(table("a", "b"), "T")
    ids = sent.table["msgId"].to_pylist()
    assert seen == [(ids, ids[1], f"<2 message ids from {ids[0]}>")]


def test_what_waits_for_company_goes_before_the_rows(bulk: Bulk) -> None:
    from rocketmq_spark.model import Message

    producer = bulk.producer(auto_batch=True)
    producer.send_async(Message("T", b"first"))
    producer.send_arrow(table("a"), "T")
    assert bulk.bodies == [["first"], ["a"]]


def test_error_naming_stored_messages_fails_only_the_rest(bulk: Bulk) -> None:
    """Over gRPC messages of a batch may be requests of their own."""

    def partly(queue: MessageQueue, request: SendRequest) -> RocketMQError:
        ids = [properties["UNIQ_KEY"] for _, properties in messages(request)]
        error = refused(Response.MESSAGE_ILLEGAL)
        error.stored = {ids[0]: SendResult(SendStatus.SEND_OK, ids[0], queue, 5)}
        error.skipped_ids = (ids[2],)
        return error

    bulk.sender.script = [partly]
    sent: SentRows = bulk.producer().send_arrow(table("a", "b", "c"), "T")
    assert sent.failed.tolist() == [1, 2]
    assert isinstance(sent[0], SendResult)
    assert sent[0].queue_offset == 5
    assert "an earlier message of its group was rejected" in str(sent[2])


def test_rows_that_may_lie_in_two_queues_have_none(bulk: Bulk) -> None:
    """After an attempt without an answer a part is found stored, and the rest is sent elsewhere."""

    def lost(queue: MessageQueue, request: SendRequest) -> RocketMQError:
        found = [properties["UNIQ_KEY"] for _, properties in messages(request)]
        stored.find_stored.side_effect = [{*found[:count]}]
        return LOST

    stored = Mock(end=lambda queue: QueueEnd(0, "host:1"))
    producer = bulk.producer()
    producer._engine.ambiguity_resolver = AmbiguousSendResolver(stored, producer._engine.timer)
    for count in (1, 2):
        bulk.sender.script = [lost]
        sent = producer.send_arrow(table("a", "b"), "T")
        named = [queue.broker_name for _, queue, _ in bulk.sender.calls[-1:]] if count == 2 else [None]
        assert (
            sent.table.select(["status", "brokerName", "queueOffset"]).to_pylist()
            == [{"status": "SEND_OK", "brokerName": named[0], "queueOffset": None}] * 2
        )
        assert [each.msg_id for each in sent if isinstance(each, SendResult)] == sent.table["msgId"].to_pylist()
    assert sorted(bulk.bodies) == [["a", "b"], ["a", "b"], ["b"]]
