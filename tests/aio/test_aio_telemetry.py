"""OpenTelemetry in coroutines: a task has many calls of a listener, one after the other, and each has a trace of its own."""

from __future__ import annotations

import asyncio
import time
from contextvars import copy_context
from typing import Any

import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.trace import get_current_span

from rocketmq_spark import LocalBroker, Message, aio
from rocketmq_spark.consumer.result import Context, LaterListener, OutcomeLater
from rocketmq_spark.session import telemetry
from tests.consumer.messages import QUEUE
from tests.helpers import raising
from tests.test_telemetry import Seen, carried, seen, started

__all__ = ["seen"]


class Turns(LaterListener):
    """Its calls wait for their turn."""

    def __init__(self) -> None:
        self.turns: list[Any] = []

    def __call__(self, messages: Any, context: Any) -> OutcomeLater:
        return OutcomeLater(self.turns.append, waits=True)


def test_the_span_of_a_call_that_waits_begins_with_its_turn(seen: Seen, monkeypatch: pytest.MonkeyPatch) -> None:
    waiting = Turns()
    consumer = started(waiting)
    inside: list[int] = []

    def turn(offset: int) -> None:
        consumer.listener((carried(offset),), Context(QUEUE)).begin(lambda outcome: None)
        begun_ns = time.time_ns()
        done = waiting.turns.pop()
        assert done.begins()
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
