"""OpenTelemetry: the spans of sends and of what consumers do with messages, the context between them, and the metrics."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import threading
import time
import weakref
from collections.abc import Iterator
from operator import itemgetter
from types import SimpleNamespace
from typing import Any

import pytest
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode, get_current_span

from rocketmq_spark import Consumer, LocalBroker, Message, Producer, PullConsumer
from rocketmq_spark.consumer.listener import Context, OrderedContext
from rocketmq_spark.errors import CallTimeout, OptionError
from rocketmq_spark.producer.producer import BaseProducer
from rocketmq_spark.producer.request_reply import RequestProducer
from rocketmq_spark.producer.settings import ProducerSettings
from rocketmq_spark.session import extras, producers, telemetry
from rocketmq_spark.session.telemetry import Instrumentation
from tests.consumer.group import group
from tests.consumer.messages import QUEUE, message
from tests.consumer.pull_bench import AT_ONCE, A, bodies, made
from tests.fakes.group_member import QueueMember
from tests.fakes.sender import ScriptedSender
from tests.fakes.timer import Time
from tests.helpers import awaited, raising
from tests.producer.bench import Bench, bench

__all__ = ["bench", "group"]


class Seen:
    """The spans that ended, and the metrics."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._spans, self._metrics = InMemorySpanExporter(), InMemoryMetricReader()
        self.tracers, self.meters = TracerProvider(), MeterProvider([self._metrics])
        self.tracers.add_span_processor(SimpleSpanProcessor(self._spans))
        monkeypatch.setattr(telemetry.trace, "get_tracer", self.tracers.get_tracer)
        monkeypatch.setattr(telemetry.metrics, "get_meter", self.meters.get_meter)
        monkeypatch.setattr(telemetry, "_observed_consumers", weakref.WeakKeyDictionary())

    @property
    def spans(self) -> tuple[ReadableSpan, ...]:
        return self._spans.get_finished_spans()

    def points(self, name: str) -> list[Any]:
        found = self._metrics.get_metrics_data()
        scopes = [] if found is None else [scope for each in found.resource_metrics for scope in each.scope_metrics]
        return [
            point for scope in scopes for one in scope.metrics if one.name == name for point in one.data.data_points
        ]


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> Iterator[Seen]:
    made = Seen(monkeypatch)
    yield made
    made.tracers.shutdown()
    made.meters.shutdown()


def instrumented(bench: Bench, **settings: Any) -> BaseProducer:
    chosen = {"group": "g", "heartbeat_s": 0, "route_refresh_s": 0, **settings}
    producer = RequestProducer(bench.sender, ProducerSettings(**chosen), make_timer=bench.timer)
    bench.producers.append(producer)
    Instrumentation("g", "me", "ns").instrument_producer(producer)
    return producer


def parent_of(properties: str) -> str:
    """The span id in the properties of a request."""
    (found,) = (pair for pair in properties.split("\x02") if pair.startswith("traceparent\x01"))
    return found.split("-")[2]


def span_id(span: ReadableSpan) -> str:
    return format(span.get_span_context().span_id, "016x")


def attributes(span: ReadableSpan) -> dict[str, Any]:
    return dict(span.attributes or {})


def test_a_send_is_a_span_whose_context_goes_with_the_message(bench: Bench, seen: Seen) -> None:
    mine = Message("T", b"12345", tags="paid", keys=["k1", "k2"], properties={"a": "b"})
    with seen.tracers.get_tracer("test").start_as_current_span("order") as outer:
        result = instrumented(bench).send(mine)
    span, _ = seen.spans
    assert (span.name, span.kind) == ("send T", SpanKind.PRODUCER)
    assert span.parent is not None
    assert span.parent.span_id == outer.get_span_context().span_id
    assert attributes(span) == {
        "messaging.system": "rocketmq",
        "messaging.client.id": "me",
        "messaging.rocketmq.namespace": "ns",
        "messaging.operation.name": "send",
        "messaging.operation.type": "send",
        "messaging.destination.name": "T",
        "messaging.destination.partition.id": str(result.queue.queue_id if result.queue else None),
        "messaging.message.id": result.msg_id,
        "messaging.message.body.size": 5,
        "messaging.rocketmq.message.tag": "paid",
        "messaging.rocketmq.message.keys": ("k1", "k2"),
    }
    (request,) = bench.sender.requests
    assert parent_of(request.properties) == span_id(span)
    assert "a\x01b\x02" in request.properties
    assert mine.properties == {"a": "b"}, "the caller's message is not changed"
    (point,) = seen.points("rocketmq_send_cost_time")
    assert point.count == 1
    assert dict(point.attributes) == {"topic": "T", "client_id": "me", "invocation_status": "success"}


def test_a_send_that_fails_is_a_span_with_its_error(bench: Bench, seen: Seen) -> None:
    bench.sender.script = [CallTimeout("slow")] * 3
    with pytest.raises(Exception, match="slow") as raised:
        instrumented(bench).send(Message("T", b"x"))
    (span,) = seen.spans
    assert span.status.status_code is StatusCode.ERROR
    assert attributes(span)["error.type"] == type(raised.value).__name__
    assert [event.name for event in span.events] == ["exception"]
    assert seen.points("rocketmq_send_cost_time")[0].attributes["invocation_status"] == "failure"


@pytest.mark.parametrize("fails", [False, True])
def test_an_asynchronous_send_ends_with_its_answer(bench: Bench, seen: Seen, fails: bool) -> None:
    bench.sender.script = [None]
    future = instrumented(bench, retries=0).send_async(Message("T", b"x"))
    assert seen.spans == ()
    bench.sender.answer(0, CallTimeout("slow") if fails else None)
    bench.time.run_due()
    (span,) = awaited(lambda: seen.spans)
    assert (future.exception() is not None, span.status.status_code is StatusCode.ERROR) == (fails, fails)


def test_batched_messages_keep_the_context_of_their_own_send(bench: Bench, seen: Seen) -> None:
    producer = instrumented(bench, auto_batch=True)
    futures = [producer.send_async(Message("T", b"x", keys=[f"k{i}"])) for i in range(3)]
    producer.flush()
    assert all(future.result(1) for future in futures)
    assert len(seen.spans) == 3
    (request,) = bench.sender.requests
    assert all(span_id(span).encode() in bytes(request.body) for span in seen.spans)


def test_an_exporter_that_blocks_holds_up_no_answer(
    bench: Bench, seen: Seen, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(telemetry, "END_SPANS_TIMEOUT_S", 60.0)
    slow = Slow()
    seen.tracers.add_span_processor(SimpleSpanProcessor(slow))
    bench.sender.script = [None] * 4
    monkeypatch.setattr(telemetry, "MAX_WAITING_SPANS", 1)
    producer = instrumented(bench)
    futures = [producer.send_async(Message("T", b"x")) for _ in range(4)]
    before_ns = time.time_ns()
    for _ in futures:
        bench.sender.answer()
        bench.time.run_due()
        assert slow.entered.wait(60)
    assert all(future.done() for future in futures)
    after_ns = time.time_ns()
    assert caplog.text.count("spans of sends are lost") == 1
    slow.go.set()
    producer.flush()
    assert len(seen.spans) == 2, "one ends, one waits, and two are lost"
    assert all(before_ns <= (span.end_time or 0) <= after_ns for span in seen.spans)


def test_a_child_forked_while_a_span_is_handed_over_closes(bench: Bench, seen: Seen) -> None:
    producer, made = instrumented(bench), Instrumentation("g", "me", "ns")
    made.instrument_producer(producer)
    with made._end_executor._lock:
        if not (child := os.fork()):
            signal.alarm(20)
            os._exit(producer.close() != [])
    assert os.waitpid(child, 0)[1] == 0


class Slow(SpanExporter):
    def __init__(self) -> None:
        self.entered, self.go = threading.Event(), threading.Event()

    def export(self, spans: Any) -> SpanExportResult:
        self.entered.set()
        assert self.go.wait(60)
        return SpanExportResult.SUCCESS


def test_a_batch_is_one_span(bench: Bench, seen: Seen) -> None:
    result = instrumented(bench).send_batch([Message("T", b"1"), Message("T", b"22")])
    (span,) = seen.spans
    assert attributes(span)["messaging.message.id"] == result.msg_id
    assert attributes(span)["messaging.batch.message_count"] == 2
    assert bytes(bench.sender.requests[0].body).count(span_id(span).encode()) == 2


SENDS = ("send", "send_async", "send_oneway", "send_half", "send_batch", "request_async")


@pytest.mark.parametrize("name", SENDS)
def test_what_the_producer_refuses_is_raised_and_ends_its_span(bench: Bench, seen: Seen, name: str) -> None:
    producer = Producer.__new__(Producer)
    for each in SENDS:
        setattr(producer, each, raising(OptionError("refused")))
    Instrumentation("g", "me", None).instrument_producer(producer)
    with pytest.raises(OptionError, match="refused"):
        getattr(producer, name)([Message("T", b"x")] if name == "send_batch" else Message("T", b"x"))
    assert [span.status.status_code for span in seen.spans] == [StatusCode.ERROR]


def test_an_empty_batch_is_refused_as_without_telemetry(bench: Bench, seen: Seen) -> None:
    with pytest.raises(Exception, match=r"batch|messages"):
        instrumented(bench).send_batch([])
    assert seen.spans == ()


@pytest.mark.parametrize(
    "more",
    [{"TAGS": "x"}, {"uberctx-user": ""}, {"": "x"}, {"a\x01": "b"}, {"a": "b\x02"}, {"n": 5}, {5: "n"}, {"a": None}],
    ids=repr,
)
def test_what_no_property_can_carry_stays_behind(
    bench: Bench, seen: Seen, monkeypatch: pytest.MonkeyPatch, more: Any
) -> None:
    inject = telemetry.propagate.inject

    def injected(carrier: Any, context: Any) -> None:
        carrier.update(more)
        inject(carrier, context)

    monkeypatch.setattr(telemetry.propagate, "inject", injected)
    instrumented(bench).send(Message("T", b"x"))
    (span,), (request,) = seen.spans, bench.sender.requests
    assert parent_of(request.properties) == span_id(span)
    assert span.status.status_code is StatusCode.UNSET


@pytest.mark.parametrize("name", ["send", "send_async", "send_oneway", "send_batch"])
def test_a_context_for_which_a_message_has_no_room_stays_behind(
    bench: Bench, seen: Seen, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    large = {"baggage": "x" * 20_000}
    monkeypatch.setattr(telemetry.propagate, "inject", lambda carrier, context: carrier.update(large))
    one = Message("T", b"x", properties={"mine": "y" * 13_000})
    getattr(instrumented(bench, max_message_size=30_000), name)([one] * 2 if name == "send_batch" else one)
    bench.time.run_due()
    awaited(lambda: seen.spans)
    (request,) = bench.sender.requests
    assert "baggage" not in request.properties
    assert b"baggage" not in bytes(request.body)
    (span,) = seen.spans
    assert span.status.status_code is StatusCode.UNSET


def test_a_meter_that_fails_costs_no_span(bench: Bench, seen: Seen, monkeypatch: pytest.MonkeyPatch) -> None:
    producer = RequestProducer(bench.sender, ProducerSettings(group="g", heartbeat_s=0), make_timer=bench.timer)
    bench.producers.append(producer)
    made = Instrumentation("g", "me", "ns")
    for each in ("_send_cost_time", "_delivery_latency", "_process_time"):
        monkeypatch.setattr(made, each, SimpleNamespace(record=raising(RuntimeError("broken"))))
    made.instrument_producer(producer)
    producer.send(Message("T", b"x"))
    consumer = Started()
    made.instrument_consumer(consumer, "_new_running")
    consumer.start(lambda messages, context: None)
    consumer.listener((carried(0),), Context(QUEUE))
    assert [span.name for span in seen.spans] == ["send T", "process T"]


def test_an_opentelemetry_that_fails_at_start_prevents_no_send(
    seen: Seen, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(telemetry.trace, "get_tracer", raising(RuntimeError("broken")))
    monkeypatch.setattr(producers, "sender", lambda options: ScriptedSender(Time()))
    with Producer("h:1", "g", open_telemetry=True) as producer:
        assert producer.send(Message("T", b"x")).msg_id
    assert "OpenTelemetry failed" in caplog.text


def test_a_tracer_that_fails_fails_no_send(
    bench: Bench, seen: Seen, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(telemetry.propagate, "inject", raising(RuntimeError("broken")))
    assert instrumented(bench).send(Message("T", b"x")).msg_id
    assert "OpenTelemetry failed" in caplog.text


class Started:
    """A consumer that keeps its listener."""

    settings = SimpleNamespace(clustering=True, arrow=False)
    listener: Any = None

    def start(self, listener: Any) -> None:
        self._new_running(listener)

    def _new_running(self, listener: Any) -> None:
        self.listener = listener

    def stats(self) -> Any:
        return SimpleNamespace(cached=7)


def started(listener: Any) -> Started:
    consumer = Started()
    Instrumentation("g", "me", None).instrument_consumer(consumer, "_new_running")
    consumer.start(listener)
    return consumer


def listening(listener: Any, messages: Any, context: Any) -> object:
    """What a wrapped listener returns."""
    return started(listener).listener(messages, context)


def carried(offset: int, trace: int = 1) -> Any:
    found = message(offset)
    found.properties = {
        **found.properties,
        "traceparent": f"00-{trace:032x}-{offset + 1:016x}-01",
        "TAGS": "paid",
        "KEYS": "k",
    }
    return found


def test_a_listener_runs_in_the_trace_of_its_message(seen: Seen) -> None:
    inside: list[int] = []
    one = carried(0)
    consumer = started(lambda m, c: inside.append(get_current_span().get_span_context().span_id))
    consumer.listener((one,), Context(QUEUE))
    (span,) = seen.spans
    assert (span.name, span.kind) == ("process T", SpanKind.CONSUMER)
    assert inside == [span.get_span_context().span_id]
    assert (span.get_span_context().trace_id, span.parent and span.parent.span_id) == (1, 1)
    assert attributes(span) == {
        "messaging.system": "rocketmq",
        "messaging.client.id": "me",
        "messaging.operation.name": "process",
        "messaging.operation.type": "process",
        "messaging.destination.name": "T",
        "messaging.consumer.group.name": "g",
        "messaging.rocketmq.consumption_model": "clustering",
        "messaging.message.body.size": len(one.body),
        "messaging.message.id": one.msg_id,
        "messaging.rocketmq.message.tag": "paid",
        "messaging.rocketmq.message.keys": ("k",),
    }
    assert not get_current_span().get_span_context().is_valid, "the context ends with the call"
    assert seen.points("rocketmq_process_time")[0].count == 1
    assert seen.points("rocketmq_delivery_latency")[0].count == 1
    assert [point.value for point in seen.points("rocketmq_consumer_cached_messages")] == [7]


def test_the_caches_of_all_consumers_are_observed(seen: Seen) -> None:
    consumers = [started(lambda m, c: None) for _ in range(2)]
    assert [point.value for point in seen.points("rocketmq_consumer_cached_messages")] != []
    for each, (group_name, cached) in zip(consumers, [("one", 1), ("two", 2)], strict=True):
        each.stats = lambda cached=cached: SimpleNamespace(cached=cached)  # type: ignore[method-assign]
        Instrumentation(group_name, "me", None).instrument_consumer(each, "_new_running")
    found = {p.attributes["consumer_group"]: p.value for p in seen.points("rocketmq_consumer_cached_messages")}
    assert found == {"one": 1, "two": 2}


def test_a_consumer_that_is_gone_is_not_kept_for_its_metrics(seen: Seen) -> None:
    one = weakref.ref(started(lambda m, c: None))
    gc.collect()
    assert one() is None
    assert seen.points("rocketmq_consumer_cached_messages") == []


def test_a_call_with_several_messages_is_linked_to_their_traces(seen: Seen) -> None:
    plain = message(9)
    listening(lambda messages, context: None, (carried(0, 1), carried(1, 2), plain), Context(QUEUE))
    (span,) = seen.spans
    assert span.parent is None
    assert [(link.context.trace_id, link.context.span_id) for link in span.links] == [(1, 1), (2, 2)]
    assert attributes(span)["messaging.batch.message_count"] == 3


@pytest.mark.parametrize(
    ("listener", "context", "failed"),
    [
        (lambda m, c: c.retry(), Context(QUEUE), True),
        (lambda m, c: None, OrderedContext(QUEUE), False),
        (lambda m, c: c.suspend(), OrderedContext(QUEUE), True),
    ],
    ids=["retry", "ordered", "suspended"],
)
def test_what_is_not_done_is_an_error_of_its_span(seen: Seen, listener: Any, context: Any, failed: bool) -> None:
    assert listening(listener, (carried(0),), context) == listener((carried(0),), context), "the consumer hears of it"
    (span,) = seen.spans
    assert (span.status.status_code is StatusCode.ERROR) == failed
    assert seen.points("rocketmq_process_time")[0].attributes["invocation_status"] == (
        "failure" if failed else "success"
    )


def test_what_the_listener_raises_is_raised_and_in_its_span(seen: Seen) -> None:
    with pytest.raises(ValueError, match="mine"):
        listening(raising(ValueError("mine")), (carried(0),), Context(QUEUE))
    (span,) = seen.spans
    assert attributes(span)["error.type"] == "ValueError"


@pytest.mark.parametrize("stops", [KeyboardInterrupt, None])
def test_what_ctrl_c_keeps_from_who_polls_comes_again(seen: Seen, monkeypatch: pytest.MonkeyPatch, stops: Any) -> None:
    with made(fake := QueueMember([A], high=2)) as consumer:
        consumer.assign([A])
        Instrumentation("g", "me", None).instrument_receives(consumer, "_poll", itemgetter(0))
        with monkeypatch.context() as patched, pytest.raises(stops) if stops else contextlib.nullcontext():
            if stops is not None:
                patched.setattr(telemetry.propagate, "extract", raising(stops()))
            assert bodies(consumer.poll(AT_ONCE)) == [0, 1]
        assert bodies(consumer.poll(AT_ONCE)) == ([0, 1] if stops else [])
        consumer.commit()
    assert fake.stored == {A: 2}


class Mute(ValueError):
    def __str__(self) -> str:
        raise RuntimeError("no text")


def test_an_error_without_a_text_ends_its_span(seen: Seen) -> None:
    with pytest.raises(Mute):
        listening(raising(Mute()), (carried(0),), Context(QUEUE))
    (span,) = seen.spans
    assert attributes(span)["error.type"] == "Mute"
    assert span.status.description == "<Mute without a text>"


def test_a_tracer_that_fails_fails_no_listener(seen: Seen, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(telemetry.propagate, "extract", raising(RuntimeError("broken")))
    given = ((carried(0),), Context(QUEUE))
    assert listening(lambda messages, context: [messages, context], *given) == [*given]


def test_a_poll_is_a_span_that_is_linked_to_the_sends(seen: Seen) -> None:
    answers = iter([[], [carried(0), carried(1)]])
    consumer = SimpleNamespace(poll=lambda timeout_s: next(answers))
    Instrumentation("g", "me", None).instrument_receives(consumer, "poll")
    assert consumer.poll(1) == []
    assert seen.spans == ()
    assert len(consumer.poll(timeout_s=1)) == 2
    (span,) = seen.spans
    assert (span.name, span.kind, len(span.links)) == ("receive T", SpanKind.CLIENT, 2)


def test_without_the_package_the_option_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extras, "is_installed", lambda module: module != "opentelemetry")
    with pytest.raises(OptionError, match=r"openTelemetry.*\n?.*opentelemetry-api"):
        Consumer("127.0.0.1:1", "g", open_telemetry=True)


def test_a_trace_goes_from_a_producer_to_its_consumers(rocketmq: LocalBroker, topic: str, seen: Seen) -> None:
    with Producer(rocketmq.name_server, "shop", open_telemetry=True) as producer:
        producer.send(Message(topic, b"x"))
    with PullConsumer(
        rocketmq.name_server, f"pull-{topic}", open_telemetry=True, consume_from_where="earliest"
    ) as pull:
        pull.subscribe(topic)
        while not pull.poll():
            pass
    heard: list[int] = []
    with Consumer(
        rocketmq.name_server, f"push-{topic}", open_telemetry=True, consume_from_where="earliest"
    ) as consumer:
        consumer.subscribe(topic)
        consumer.start(lambda messages, context: heard.append(get_current_span().get_span_context().trace_id))
        awaited(lambda: len(seen.spans) == 3)
    send, receive, process = seen.spans
    assert [span.name.split()[0] for span in (send, receive, process)] == ["send", "receive", "process"]
    assert process.parent is not None
    assert process.parent.span_id == send.get_span_context().span_id == receive.links[0].context.span_id
    assert heard == [send.get_span_context().trace_id]
