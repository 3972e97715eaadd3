"""Traces of a producer: what is recorded of sends, decisions and recalls, and that tracing never is in the way."""

from __future__ import annotations

import logging
import re
import threading
from collections.abc import Sequence
from typing import Any, cast

import pytest

from rocketmq_spark.base.clock import Deadline
from rocketmq_spark.base.codes import TRACE_TOPIC, Property
from rocketmq_spark.base.threads import Timer
from rocketmq_spark.errors import CallTimeout, OptionError, RouteNotFound
from rocketmq_spark.model import Message, MessageQueue, ReceivedMessage, SendRequest, SendResult, SendStatus
from rocketmq_spark.model.send import HalfPlace, TransactionState
from rocketmq_spark.ports import Sender
from rocketmq_spark.producer import at_exit, tracing
from rocketmq_spark.producer.producer import BaseProducer
from rocketmq_spark.producer.settings import ProducerSettings
from rocketmq_spark.producer.tracing import TracedSender, TraceProducer
from rocketmq_spark.session import producers
from rocketmq_spark.wire import traces
from rocketmq_spark.wire.messages import decode_batch
from rocketmq_spark.wire.properties import decode_properties
from rocketmq_spark.wire.traces import TraceRecord
from tests.fakes.sender import ScriptedSender
from tests.fakes.timer import Time
from tests.helpers import raising
from tests.producer.bench import Bench
from tests.queues import q, qs

PLACE = "7F00000100002A9F0000000000000064"


def in_region(queue: MessageQueue, request: SendRequest, region: str | None = "east") -> SendResult:
    count = len(decode_batch(bytes(request.body))) if request.batch else 1
    return SendResult(SendStatus.SEND_OK, "", queue, 7, ",".join([PLACE] * count), region_id=region)


class Traced:
    """A producer whose sender is traced, and the fields of the records."""

    def __init__(self, bench: Bench, **settings: Any) -> None:
        self.records: list[list[str]] = []
        sender = cast(
            Sender, TracedSender(cast(Sender, bench.sender), self.take, "shop", TRACE_TOPIC, bench.timer("x-w").wall_ms)
        )
        chosen = {"group": "shop", "heartbeat_s": 0, "route_refresh_s": 0, **settings}
        self.producer = BaseProducer(sender, ProducerSettings(**chosen), None, bench.timer)
        bench.producers.append(self.producer)
        self.sender = sender

    def take(self, records: Sequence[TraceRecord]) -> None:
        self.records += [record.text[:-1].split("\x01") for record in records]


def test_a_stored_message_has_a_record_and_a_failed_one_has_none(bench: Bench) -> None:
    traced = Traced(bench)
    bench.sender.latency_s = {"a": 0.25}
    bench.sender.script = [CallTimeout("slow"), in_region]
    result = traced.producer.send(Message("T", b"12345", tags="paid", keys=["k1", "k2"]), queue=None)
    (record,) = traced.records
    assert record[:8] == ["Pub", record[1], "east", "shop", "T", result.msg_id, "paid", "k1 k2"]
    assert record[8:] == ["127.0.0.1:10911", "5", record[10], "0", PLACE, "true"]
    assert record[10] in ("0", "250")


def test_what_is_stored_less_safely_is_no_success(bench: Bench) -> None:
    traced = Traced(bench)
    bench.sender.script = [
        lambda queue, request: in_region(queue, request)._replace(status=SendStatus.FLUSH_DISK_TIMEOUT)
    ]
    traced.producer.send(Message("T", b"x"))
    assert traced.records[0][-1] == "false"


def test_each_message_of_a_batch_is_found_by_its_id(bench: Bench) -> None:
    traced = Traced(bench)
    bench.sender.script = [in_region]
    result = traced.producer.send_batch([Message("T", b"1", keys=["one"]), Message("T", b"22", tags="b")])
    assert [(r[5], r[6], r[7], r[9]) for r in traced.records] == [
        (result.msg_id.split(",")[0], "null", "one", "1"),
        (result.msg_id.split(",")[1], "b", "null", "2"),
    ]


def test_async_send_is_traced_before_its_caller_gets_the_result(bench: Bench) -> None:
    traced, heard = Traced(bench), []
    bench.sender.script = [None]
    traced.producer.send_async(Message("T", b"x")).add_done_callback(lambda future: heard.append(len(traced.records)))
    assert not traced.records
    bench.sender.answer(0, in_region)
    bench.time.run_due()
    assert heard == [1]


@pytest.mark.parametrize("region", [None, "east"])
def test_brokers_and_topics_that_want_no_traces_get_none(bench: Bench, region: str | None) -> None:
    traced = Traced(bench)
    bench.sender.routes[TRACE_TOPIC] = tuple(qs("a:0", TRACE_TOPIC))
    bench.sender.script = [lambda queue, request: in_region(queue, request, region)]
    traced.producer.send(Message("T" if region is None else TRACE_TOPIC, b"x"))
    assert traced.records == []


def test_a_server_that_wants_no_traces_is_named_once(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    """By default a Proxy wants none of sends: an enabled trace would be missing in silence."""
    traced = Traced(bench)
    bench.sender.script = [lambda queue, request: in_region(queue, request, None)] * 2
    for _ in range(2):
        traced.producer.send(Message("T", b"x"))
    (line,) = (record.getMessage() for record in caplog.records if "traceOn" in record.getMessage())
    assert re.match(r"sends of group shop to T/[ab]/\d are not traced", line)
    assert "rmq-proxy.json" in line


def test_a_record_that_cannot_be_made_fails_no_send(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    traced = Traced(bench)
    bench.sender.script = [lambda queue, request: in_region(queue, request)._replace(offset_msg_id="no id")]
    assert traced.producer.send(Message("T", b"x")).status is SendStatus.SEND_OK
    assert traced.records == []
    assert "a trace record could not be created" in caplog.text


def test_delays_half_messages_decisions_and_recalls(bench: Bench) -> None:
    traced = Traced(bench)
    bench.sender.script = [in_region, in_region]
    traced.producer.send(Message("T", b"x"), delay_level=3)
    half = SendRequest("shop", b"x", f"{Property.UNIQ_KEY}\x01H\x02{Property.TRANSACTION_PREPARED}\x01true\x02")
    traced.sender.send(q("a:0"), half, Deadline.after(1))
    place = HalfPlace("T", "a", "shop", "H", "TX")
    traced.sender.end_transaction(place, TransactionState.ROLLBACK, Deadline.after(1))
    traced.sender.recall("T", "a", "handle", "shop", Deadline.after(1))
    assert [record[0] for record in traced.records] == ["Pub", "Pub", "EndTransaction", "Recall"]
    assert [record[11] for record in traced.records[:2]] == ["3", "1"]
    assert traced.records[2][5] == "H"
    assert traced.records[2][10:] == ["TX", "ROLLBACK_MESSAGE", "false"]
    assert traced.records[3][4:] == ["T", "ID", "true"]


@pytest.mark.parametrize("late", [False, True])
def test_answers_to_brokers_that_ask_are_traced(bench: Bench, late: bool) -> None:
    traced = Traced(bench)

    def check(message: Any, place: HalfPlace) -> Any:
        return (lambda: TransactionState.COMMIT) if late else TransactionState.COMMIT

    traced.sender.join("shop", 0, check)
    asked = cast(Any, bench.sender.check)
    message = cast(ReceivedMessage, type("Half", (), {"properties": {"TAGS": "paid", "KEYS": "k"}, "topic": "T"})())
    said = asked(message, HalfPlace("T", "a", "shop", "H", "TX"))
    if late:
        assert traced.records == []
        said = said()
    assert said is TransactionState.COMMIT
    (record,) = traced.records
    assert record[4:8] == ["T", "H", "paid", "k"]
    assert record[10:] == ["TX", "COMMIT_MESSAGE", "true"]


class Sending:
    """A producer of traces, and the bodies that it sent."""

    def __init__(self, bench: Bench, topic: str = "T") -> None:
        self.bench = bench
        self.producer = TraceProducer(cast(Sender, bench.sender), "shop", "PRODUCE", topic, bench.timer)
        bench.producers.append(self.producer)

    @property
    def bodies(self) -> list[str]:
        return [bytes(request.body).decode() for request in self.bench.sender.requests]


def record(n: int = 0) -> TraceRecord:
    return TraceRecord(f"{n}\x02", (f"id{n}", "key"))


def test_records_go_out_together_after_a_second(bench: Bench) -> None:
    sending = Sending(bench)
    sending.producer.append([record(0)])
    bench.time.advance(tracing.FLUSH_S / 2)
    sending.producer.append([record(1)])
    bench.time.advance(tracing.FLUSH_S / 2 - 0.001)
    assert sending.bodies == []
    bench.time.advance(0.001)
    assert sending.bodies == ["0\x021\x02"]
    keys = decode_properties(bench.sender.requests[0].properties)[Property.KEYS]
    assert keys.split() == ["id0", "key", "id1"]
    sending.producer.append([record(2)])
    bench.time.advance(tracing.FLUSH_S)
    assert sending.bodies[1:] == ["2\x02"]


def test_a_hundred_do_not_wait(bench: Bench) -> None:
    sending = Sending(bench)
    sending.producer.append([record(n) for n in range(tracing.FLUSH_RECORDS)])
    bench.time.run_due()
    assert len(sending.bodies) == 1


def test_trace_close_sends_collected_records_and_takes_no_more(bench: Bench) -> None:
    sending = Sending(bench)
    sending.producer.append([record()])
    sending.producer.close()
    assert sending.bodies == ["0\x02"]
    sending.producer.append([record()])
    bench.time.advance(10)
    sending.producer.close()
    assert len(sending.bodies) == 1


def test_the_end_of_the_program_sends_what_was_collected(bench: Bench) -> None:
    sending = Sending(bench)
    sending.producer.append([record()])
    assert sending.producer.at_exit(Deadline.after(30)) == {}
    assert sending.bodies == ["0\x02"]


def test_a_trace_topic_that_is_not_there_costs_a_line_a_minute(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    bench.sender.routes["N"] = RouteNotFound("no such topic", topic="N")
    sending = Sending(bench, "N")
    with caplog.at_level(logging.WARNING):
        for n in range(20):
            sending.producer.append([record(n)])
            bench.time.advance(tracing.FLUSH_S)
    assert caplog.text.count("trace records of") == 1
    assert "traceTopicEnable=true" in caplog.text
    caplog.clear()
    bench.time.advance(tracing.LOSS_LOG_INTERVAL_S)
    sending.producer.append([record()])
    bench.time.advance(tracing.FLUSH_S)
    assert "21 trace records of" in caplog.text


def test_trace_buffer_is_bounded_and_has_room_after_sending(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(tracing, "MAX_BUFFERED_RECORDS", 3)
    bench.sender.script = [None]
    sending = Sending(bench)
    sending.producer.append([record(0), record(1)])
    bench.time.advance(tracing.FLUSH_S)
    sending.producer.append([record(2), record(3)])  # those before have no answer yet
    assert "2 trace records of" in caplog.text
    assert "3 records wait, because they are added faster than they are sent" in caplog.text
    assert "traceTopicEnable" not in caplog.text, "which is no remedy"
    sending.producer.append([record(4)])
    bench.sender.answer()
    bench.time.advance(tracing.FLUSH_S)
    sending.producer.append([record(5), record(6), record(7)])
    bench.time.advance(tracing.FLUSH_S)
    assert sending.bodies == ["0\x021\x02", "4\x02", "5\x026\x027\x02"]


@pytest.mark.parametrize("ending", ["close", "exit"])
def test_trace_close_is_bounded_while_no_name_server_answers(bench: Bench, ending: str) -> None:
    def silent(topic: str, deadline: Deadline, refresh: bool = False) -> Any:
        bench.time.now += max(0.05, deadline.remaining())  # whoever asks takes some time
        raise CallTimeout("silent")

    bench.sender.publish_queues = silent  # type: ignore[method-assign]
    sending = Sending(bench)
    bench.timers["flush"].stopped = True  # its thread waits for a route
    for n in range(0, tracing.MAX_BUFFERED_RECORDS - 100, 50):
        sending.producer.append([record(n + i) for i in range(50)])
    before = bench.time.now
    if ending == "close":
        sending.producer.close(1.0)
    else:
        sending.producer.at_exit(Deadline.after(30))
    assert bench.time.now - before <= tracing.MAX_EXIT_S


def test_a_close_waits_for_records_that_are_being_sent(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    asked, go = threading.Event(), threading.Event()

    def slow(topic: str, deadline: Deadline, refresh: bool = False) -> Any:
        asked.set()
        assert go.wait(60)
        return bench.sender.routes["T"]

    drain = Timer.drain

    def drained(timer: Timer, seconds: float) -> None:
        go.set()
        drain(timer, seconds)

    monkeypatch.setattr(Timer, "drain", drained)
    bench.sender.publish_queues = slow  # type: ignore[method-assign]
    traces = TraceProducer(cast(Sender, bench.sender), "shop", "PRODUCE", "T")
    traces.append([record(n) for n in range(tracing.FLUSH_RECORDS)])
    assert asked.wait(60)
    assert traces.close() == []
    assert len(bench.sender.requests) == 1


def test_trace_records_that_cannot_be_sent_free_their_room(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(tracing, "MAX_BUFFERED_RECORDS", 1)
    sending = Sending(bench)
    monkeypatch.setattr(sending.producer, "send_async", raising(RuntimeError("can't start new thread")))
    sending.producer.append([record(0)])
    bench.time.advance(tracing.FLUSH_S)
    assert "1 trace records of" in caplog.text
    monkeypatch.undo()
    sending.producer.append([record(1)])
    bench.time.advance(tracing.FLUSH_S)
    assert sending.bodies == ["1\x02"]


def test_the_last_sends_of_a_program_are_traced(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    sending = Sending(bench, TRACE_TOPIC)
    bench.sender.routes[TRACE_TOPIC] = tuple(qs("a:0", TRACE_TOPIC))
    bench.sender.script = [in_region]
    traced = Traced(bench, auto_batch=True)
    traced.sender._append = sending.producer.append
    traced.producer.send_async(Message("T", b"lingers"))
    monkeypatch.setattr(at_exit, "_open_producers", [sending.producer, traced.producer])
    at_exit._close_producers()
    assert [body[:3] for body in sending.bodies[1:]] == ["Pub"]


def test_who_sends_traces_is_in_no_group(bench: Bench) -> None:
    """Brokers would have to be asked to forget it, which takes its time where one hangs."""
    Sending(bench).producer.close()
    assert (bench.sender.seen("join"), bench.sender.seen("leave")) == ([], [])


def test_traced_producer_starts_even_without_a_thread_for_traces(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(producers, "sender", lambda options: ScriptedSender(Time()))
    monkeypatch.setattr(Timer, "start", raising(RuntimeError("can't start new thread")))
    with producers.Producer("h:1", "g", enable_trace=True):
        assert "group g is not traced: can't start new thread" in caplog.text


def test_who_cannot_send_traces_leaves_no_thread(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(BaseProducer, "__init__", raising(RuntimeError("can't start new thread")))
    with pytest.raises(RuntimeError, match="thread"):
        TraceProducer(cast(Sender, bench.sender), "refused", "PRODUCE", "T")
    assert not [thread.name for thread in threading.enumerate() if "-refused-" in thread.name]


def test_refused_producer_leaves_no_trace_thread() -> None:
    with pytest.raises(OptionError, match="exactlyOnceSettle"):
        producers.Producer("h:1", "refused", enable_trace=True, exactly_once_settle="3s")
    assert not [thread.name for thread in threading.enumerate() if "-refused-" in thread.name]


def test_the_records_of_a_batch_are_made_where_they_are_sent(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not on the thread that reads answers: those behind would come too late."""
    made: list[int] = []
    published = traces.publish_record

    def counted(*args: Any) -> TraceRecord:
        made.append(1)
        return published(*args)

    monkeypatch.setattr(traces, "publish_record", counted)
    sending, traced = Sending(bench), Traced(bench)
    traced.sender._append = sending.producer.append
    bench.sender.script = [in_region]
    traced.producer.send_batch([Message("T", b"%d" % i) for i in range(3)])
    assert made == []
    assert sending.producer._buffered_count == 3
    bench.time.advance(tracing.FLUSH_S)
    assert (len(made), sending.bodies[-1].count("Pub\x01"), sending.producer._buffered_count) == (3, 3, 0)


def test_a_batch_whose_records_cannot_be_made_leaves_its_room(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    sending = Sending(bench)
    for make in (raising(ValueError("no id")), lambda: [record(7)]):
        sending.producer.append(tracing._BatchRecords(5, make))
    assert sending.producer._buffered_count == 10
    bench.time.advance(tracing.FLUSH_S)
    assert (sending.bodies, sending.producer._buffered_count) == (["7\x02"], 0)
    assert "trace records could not be created" in caplog.text


def test_a_batch_that_waits_counts_for_its_bytes(bench: Bench) -> None:
    found: list[int] = []
    traced = Traced(bench)
    traced.sender._append = lambda records: found.append(len(records))
    bench.sender.script = [in_region, in_region]
    traced.producer.send_batch([Message("T", b"x" * 100_000)] * 2)
    traced.producer.send_batch([Message("T", b"x")] * 2)
    assert found == [48, 2]
