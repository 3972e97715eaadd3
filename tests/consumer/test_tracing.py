"""Traces of a consumer: the records of a listener's calls, which it must not notice."""

from __future__ import annotations

from typing import Any

import pytest

from rocketmq_spark.base.codes import Property
from rocketmq_spark.base.threads import Failure
from rocketmq_spark.consumer import tracing
from rocketmq_spark.consumer.listener import Context, DeferredListener, ListenerCall, NextCall, OrderedContext
from rocketmq_spark.consumer.settings import ConsumerSettings
from rocketmq_spark.consumer.tracing import ListenerTraces
from rocketmq_spark.wire.traces import TraceRecord
from tests.consumer.group import GroupBench
from tests.consumer.messages import QUEUE, message
from tests.helpers import raising
from tests.queues import q

CONCURRENT, ORDERED = ConsumerSettings(group="g"), ConsumerSettings(group="g", ordered=True)
SUCCESS, TIME_OUT, EXCEPTION, FAILED = "0", "1", "2", "4"


class Traces:
    """Collects the fields of records."""

    def __init__(self) -> None:
        self.records: list[list[str]] = []
        self.closed = 0
        self.traces = ListenerTraces(self._append, self._close)

    def _append(self, records: Any) -> None:
        self.records += [record.text[:-1].split("\x01") for record in records if isinstance(record, TraceRecord)]

    def _close(self, seconds: float) -> None:
        assert 0 < seconds <= 30
        self.closed += 1

    @property
    def after(self) -> list[tuple[str, str]]:
        """Success and code of each."""
        return [(record[4], record[6]) for record in self.records if record[0] == "SubAfter"]


MESSAGES = tuple(message(n, f"m{n}".encode()) for n in range(3))


def called(listener: Any, settings: ConsumerSettings = CONCURRENT, messages: Any = MESSAGES) -> tuple[Traces, object]:
    seen = Traces()
    context = OrderedContext(QUEUE) if settings.ordered else Context(QUEUE)
    return seen, seen.traces.wrap(listener, settings)(messages, context)


def test_each_message_has_a_record_before_and_one_after_the_call() -> None:
    during: list[int] = []
    seen = Traces()
    seen.traces.wrap(lambda messages, context: during.append(len(seen.records)), CONCURRENT)(MESSAGES, Context(QUEUE))
    assert during == [3]
    before, after = seen.records[:3], seen.records[3:]
    assert {record[0] for record in before} == {"SubBefore"}
    assert [record[5] for record in before] == [m.msg_id for m in MESSAGES] == [record[2] for record in after]
    assert {record[3] for record in before} == {"g"} == {record[8] for record in after}
    assert len({record[4] for record in before} | {record[1] for record in after}) == 1, "one call has one id"
    assert seen.after == [("true", SUCCESS)] * 3


def part(messages: Any, context: Any) -> None:
    context.ack_index = 0


@pytest.mark.parametrize(
    ("settings", "listener", "expected"),
    [
        (CONCURRENT, lambda messages, context: context.retry(), [("false", FAILED)] * 3),
        (CONCURRENT, lambda messages, context: "nonsense", [("false", FAILED)] * 3),
        (CONCURRENT, part, [("true", SUCCESS), ("false", FAILED), ("false", FAILED)]),
        (ORDERED, lambda messages, context: None, [("true", SUCCESS)] * 3),
        (ORDERED, lambda messages, context: context.suspend(), [("false", FAILED)] * 3),
    ],
    ids=["retry", "nonsense", "a part", "ordered", "suspended"],
)
def test_the_outcome_is_what_the_consumer_makes_of_it(settings: ConsumerSettings, listener: Any, expected: Any) -> None:
    seen, _ = called(listener, settings)
    assert seen.after == expected


@pytest.mark.parametrize("error", [ValueError("mine"), SystemExit("mine")])
def test_what_the_listener_raises_is_raised(error: BaseException) -> None:
    seen = Traces()
    with pytest.raises(type(error)):
        seen.traces.wrap(raising(error), CONCURRENT)(MESSAGES, Context(QUEUE))
    assert seen.after == [("false", EXCEPTION)] * 3


class Waiting(DeferredListener):
    """Its calls wait for their turn."""

    def __init__(self) -> None:
        self.turns: list[NextCall] = []

    def submit(self, turn: NextCall, times: int, first: bool = False) -> None:
        self.turns += [turn] * times


class Noted(ListenerCall):
    def __init__(self) -> None:
        super().__init__(MESSAGES, Context(QUEUE))
        self.heard: list[object] = []

    def __call__(self, outcome: object) -> None:
        self.heard.append(outcome)


@pytest.mark.parametrize("may", [True, False])
@pytest.mark.parametrize(
    ("outcome", "code"), [(None, ("true", SUCCESS)), (Failure(ValueError("x")), ("false", EXCEPTION))]
)
def test_a_call_that_waits_for_its_turn_is_recorded_from_then_on(
    may: bool, outcome: object, code: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, waiting, call = [1_000], Waiting(), Noted()
    monkeypatch.setattr(tracing, "epoch_ms", lambda: clock[0])
    seen = Traces()
    listener = seen.traces.wrap(waiting, CONCURRENT)
    assert isinstance(listener, DeferredListener)
    listener.submit(lambda: call if may else None, 1)
    clock[0] += 3_600_000
    assert seen.records == []
    begun = waiting.turns[0]()
    if not may:
        assert (begun, seen.records) == (None, [])
        return
    assert begun is not None
    assert (begun.messages, begun.context) == (call.messages, call.context)
    assert [(record[0], record[1]) for record in seen.records] == [("SubBefore", str(clock[0]))] * 3
    clock[0] += 300
    begun(outcome)
    assert call.heard == [outcome]
    assert seen.after == [code] * 3
    assert {record[3] for record in seen.records[3:]} == {"100"}


def test_a_listener_that_takes_too_long_has_timed_out(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([1_000, 1_000 + 15 * 60 * 1000])
    monkeypatch.setattr(tracing, "epoch_ms", lambda: next(times))
    seen, _ = called(lambda messages, context: None)
    assert seen.after == [("false", TIME_OUT)] * 3
    assert [record[3] for record in seen.records[3:]] == [str(15 * 60 * 1000 // 3)] * 3


def test_messages_whose_broker_wants_no_traces_have_none() -> None:
    quiet = message(7, b"quiet")
    object.__setattr__(quiet, "properties", {**quiet.properties, Property.TRACE_ON: "false"})
    seen, _ = called(lambda messages, context: None, messages=(quiet, *MESSAGES[:1]))
    assert [record[0] for record in seen.records] == ["SubBefore", "SubAfter"]
    seen, _ = called(part, messages=(quiet, *MESSAGES[:1]))
    assert seen.after == [("false", FAILED)], "the first of the call is done, which is the other one"


@pytest.mark.parametrize("clock", [tracing.epoch_ms, raising(RuntimeError("no time"))])
def test_a_trace_that_cannot_be_written_is_not_the_listeners(
    clock: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(tracing, "epoch_ms", clock)
    traces = ListenerTraces(raising(RuntimeError("no memory")), lambda seconds: None)
    assert traces.wrap(lambda messages, context: 5, CONCURRENT)(MESSAGES, Context(QUEUE)) == 5
    assert "a trace record could not be created" in caplog.text


def test_a_consumer_is_traced_from_its_start_to_its_end(group: GroupBench) -> None:
    seen, made = Traces(), 0

    def traces() -> ListenerTraces:
        nonlocal made
        made += 1
        return seen.traces

    group.traces = traces
    consumer, _ = group.consumer()
    consumer.subscribe("T")
    assert made == 0, "one that never starts has nothing to close"
    consumer.start(lambda messages, context: None)
    group.brokers.send(q("a:0"), b"x")
    group.time.advance(3)
    assert seen.after == [("true", SUCCESS)]
    assert (made, seen.closed) == (1, 0)
    consumer.stop(0)
    assert seen.closed == 1
