"""OpenTelemetry in coroutines: a task has many calls of a listener, one after the other, and each has a trace of its own."""

from __future__ import annotations

import asyncio
import time
from contextvars import ContextVar, copy_context
from types import SimpleNamespace
from typing import Any

import pytest
from opentelemetry.baggage.propagation import W3CBaggagePropagator
from opentelemetry.propagators.composite import CompositePropagator
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.trace import get_current_span
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from rocketmq_spark import LocalBroker, Message, Producer, aio
from rocketmq_spark.base.threads import Failure
from rocketmq_spark.consumer.listener import Context, DeferredListener, NextCall
from rocketmq_spark.session import consumers, telemetry
from tests.aio.conftest import Heard, producing, run
from tests.aio.test_aio_transactions import stored
from tests.consumer.messages import QUEUE, message
from tests.fakes.sender import ScriptedSender
from tests.helpers import raising
from tests.test_telemetry import Seen, attributes, carried, seen, started

__all__ = ["seen"]


class Turns(DeferredListener):
    """Its calls wait for their turn."""

    def __init__(self) -> None:
        self.turns: list[NextCall] = []

    def submit(self, turn: NextCall, times: int, first: bool = False) -> None:
        self.turns += [turn] * times


def test_the_span_of_a_call_that_waits_begins_with_its_turn(seen: Seen, monkeypatch: pytest.MonkeyPatch) -> None:
    waiting = Turns()
    consumer = started(waiting)
    inside, heard = list[int](), list[object]()

    def turn(offset: int) -> None:
        consumer.listener.submit(lambda: Heard((carried(offset),), heard.append), 1)
        begun_ns = time.time_ns()
        done = waiting.turns.pop()()
        assert done is not None
        inside.append(get_current_span().get_span_context().span_id)
        done(None)
        if len(inside) == 1:
            assert (seen.spans[0].start_time or 0) >= begun_ns

    def one_after_the_other() -> None:
        turn(0)
        monkeypatch.setattr(telemetry.propagate, "extract", raising(RuntimeError("broken")))
        turn(1)

    copy_context().run(one_after_the_other)
    (span,) = seen.spans
    assert inside == [span.get_span_context().span_id, 0], "a call without a span does not run in that of the last one"


def test_an_outcome_that_comes_later_ends_the_span_then(seen: Seen) -> None:
    waiting, heard = Turns(), list[object]()
    started(waiting).listener.submit(lambda: Heard((carried(0),), heard.append), 1)
    call = copy_context().run(waiting.turns.pop())
    assert call is not None
    assert seen.spans == ()
    failure = Failure(ValueError("late"))
    call(failure)
    assert heard == [failure]
    assert attributes(seen.spans[0])["error.type"] == "ValueError"


def test_span_of_several_messages_has_no_parent_of_earlier_call(seen: Seen) -> None:
    waiting = Turns()
    consumer = started(waiting)

    heard: list[object] = []

    def one_after_the_other() -> None:
        for messages in ((carried(0, 1),), (carried(1, 2), carried(2, 3))):
            consumer.listener.submit(lambda messages=messages: Heard(messages, heard.append), 1)
            done = waiting.turns.pop()()
            assert done is not None
            done(None)

    copy_context().run(one_after_the_other)
    first, second = seen.spans
    assert first.get_span_context().trace_id == 1
    assert second.parent is None
    assert [link.context.trace_id for link in second.links] == [2, 3]


@pytest.mark.parametrize("names", [["baggage", "tracecontext"], ["baggage"]])
def test_missing_trace_context_is_not_taken_from_the_caller(
    seen: Seen, monkeypatch: pytest.MonkeyPatch, names: list[str]
) -> None:
    """Some propagators give the context of the caller then: a link from a span to itself, and a foreign parent."""
    known = {"baggage": W3CBaggagePropagator(), "tracecontext": TraceContextTextMapPropagator()}
    both = CompositePropagator([known[name] for name in names])  # type: ignore[list-item]
    monkeypatch.setattr(telemetry.propagate, "extract", both.extract)
    poller = SimpleNamespace(poll=lambda: [message(0)])
    telemetry.Instrumentation("g", "me", None).instrument_receives(poller, "poll")
    consumer = started(lambda messages, context: None)
    with seen.tracers.get_tracer("test").start_as_current_span("other"):
        poller.poll()
        consumer.listener((message(1),), Context(QUEUE))
    receive, process, _ = seen.spans
    assert list(receive.links) == []
    assert process.parent is None


def test_transaction_block_sends_in_the_trace_of_its_coroutine(seen: Seen, sender: ScriptedSender) -> None:
    sender.script = [stored]

    async def body() -> None:
        async with producing(transaction_check=lambda message: "COMMIT", open_telemetry=True) as producer:
            with seen.tracers.get_tracer("test").start_as_current_span("order"):
                async with producer.transaction(Message("T", b"x")):
                    pass

    run(body)
    send, order = seen.spans
    assert send.parent is not None
    assert send.parent.span_id == order.get_span_context().span_id


@pytest.mark.parametrize("over", ["remoting", "grpc"])
def test_a_context_that_a_proxy_would_refuse_stays_behind(
    seen: Seen, sender: ScriptedSender, monkeypatch: pytest.MonkeyPatch, over: str
) -> None:
    """A Proxy refuses the message otherwise, which it takes without OpenTelemetry."""
    where: Any = {"transport": "grpc", "proxy_endpoint": "h:1"} if over == "grpc" else {"name_server": "h:1"}
    monkeypatch.setattr("rocketmq_spark.session.producers.replies", lambda options: None)
    few = {f"p{n}": "v" for n in range(telemetry.MAX_PROPERTIES - 1)}
    large = {"p": "é" * (telemetry.MAX_PROPERTIES_BYTES // 2 - 70)}
    with Producer(group="g", open_telemetry=True, **where) as producer:
        for properties in (few, {**few, "one": "more"}, {**large, "one": "x" * 70}, {**large, "one": "x" * 71}):
            producer.send(Message("T", b"x", properties=properties))
    carried = ["traceparent" in request.properties for request in sender.requests]
    assert carried == ([True, False, True, False] if over == "grpc" else [True] * 4)


def test_messages_are_received_in_the_context_of_their_coroutine(monkeypatch: pytest.MonkeyPatch) -> None:
    mine: ContextVar[str] = ContextVar("mine")
    stub = SimpleNamespace(receive=lambda *given: [mine.get()], close=lambda: None)
    monkeypatch.setattr(consumers, "SimpleConsumer", lambda *names, **options: stub)

    async def body() -> None:
        mine.set("this one")
        async with aio.SimpleConsumer(group="g") as consumer:
            assert await consumer.receive() == ["this one"]

    run(body)


async def spans_of(found: list[int]) -> None:
    found.append(get_current_span().get_span_context().span_id)
    await asyncio.sleep(0)
    found.append(get_current_span().get_span_context().span_id)


def test_coroutines_send_and_listen_in_their_traces(rocketmq: LocalBroker, topic: str, seen: Seen) -> None:
    inside: list[int] = []

    async def program() -> None:
        tracer = seen.tracers.get_tracer("test")
        over = asyncio.Event()

        async def order(name: str) -> None:
            with tracer.start_as_current_span(name):
                await asyncio.sleep(0)
                await producer.send(Message(topic, name.encode()))

        async def listen(messages: Any, context: Any) -> None:
            await spans_of(inside)
            if len(inside) == 4:
                over.set()

        async with aio.Producer(rocketmq.name_server, "shop", open_telemetry=True) as producer:
            await asyncio.gather(order("one"), order("two"))
        consumer = aio.Consumer(rocketmq.name_server, f"c-{topic}", open_telemetry=True, consume_from_where="earliest")
        async with consumer:
            await consumer.subscribe(topic)
            await consumer.start(listen)
            await asyncio.wait_for(over.wait(), 60)

    asyncio.run(program())
    by_name: dict[str, list[ReadableSpan]] = {}
    for span in seen.spans:
        by_name.setdefault(span.name.split()[0], []).append(span)
    orders = {span.get_span_context().span_id for span in (*by_name["one"], *by_name["two"])}
    assert {span.parent.span_id for span in by_name["send"] if span.parent} == orders
    sends = {span.get_span_context().span_id for span in by_name["send"]}
    assert {span.parent.span_id for span in by_name["process"] if span.parent} == sends
    processes = sorted(span.get_span_context().span_id for span in by_name["process"])
    assert sorted(inside) == sorted([*processes, *processes]), (
        "each coroutine runs in its span, before and after an await"
    )
