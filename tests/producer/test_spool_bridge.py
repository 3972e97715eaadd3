"""Which failures go to the spool, and what becomes of order; the spool is a list that the test looks at."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from rocketmq_spark.base.codes import Property, Response
from rocketmq_spark.errors import (
    BrokerNotFound,
    CallTimeout,
    CertificateRefused,
    ConnectionLost,
    InvalidParameter,
    MessageIllegal,
    MessageRefused,
    OptionError,
    RocketMQError,
    RouteNotFound,
    SelectorError,
    SendFailed,
    SpoolFull,
)
from rocketmq_spark.model import (
    Message,
    Resent,
    SendRequest,
    SendResult,
    SendStatus,
    SpooledSend,
)
from rocketmq_spark.producer.producer import BaseProducer
from rocketmq_spark.producer.resender import EngineResender
from rocketmq_spark.producer.settings import ProducerSettings
from rocketmq_spark.producer.spool_bridge import is_storable_selector, is_transient, selector_function
from rocketmq_spark.queues.environment import Environment
from rocketmq_spark.queues.selection import select
from rocketmq_spark.wire.envelope import INNER_TOPIC, QUEUE, unpack
from rocketmq_spark.wire.properties import decode_properties
from tests.fakes.sender import ScriptedSender, refused
from tests.fakes.spool import FakeSpool
from tests.helpers import raising
from tests.producer.bench import Bench
from tests.queues import q, qs

M = Message("T", b"x")
MISSING = RouteNotFound("the name server knows no such topic", "ns:9876", Response.TOPIC_NOT_EXIST, "T")


@pytest.fixture
def spool(bench: Bench) -> FakeSpool:
    bench.sender = ScriptedSender(bench.time)
    return FakeSpool()


def producer(bench: Bench, spool: FakeSpool, **settings: Any) -> BaseProducer:
    chosen = {"group": "g", "heartbeat_s": 0, "route_refresh_s": 0, **settings}
    made = BaseProducer(bench.sender, ProducerSettings(**chosen), None, bench.timer, spool)
    bench.producers.append(made)
    return made


def down(*_: object) -> RocketMQError:
    return ConnectionLost("down")


def spool_timer(bench: Bench) -> None:
    bench.time.run_due()


def caused(cause: RocketMQError) -> SendFailed:
    error = SendFailed("all retries failed")
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (CallTimeout("no answer"), True),
        (ConnectionLost("broke"), True),
        (refused(Response.SYSTEM_BUSY), True),
        (refused(Response.FLOW_CONTROL), True),
        (refused(Response.SERVICE_NOT_AVAILABLE), True),
        (refused(Response.GO_AWAY), True),
        (BrokerNotFound("no master"), True),
        (caused(caused(refused(Response.SYSTEM_BUSY))), True),
        (CertificateRefused("another name"), False),
        (refused(Response.NO_PERMISSION), False),
        (refused(Response.MESSAGE_ILLEGAL), False),
        (refused(Response.TOPIC_NOT_EXIST), False),
        (refused(Response.SYSTEM_ERROR), False),
        (InvalidParameter("bad queue"), False),
        (RouteNotFound("no write permission"), False),
        (caused(MessageIllegal("too long")), False),
        (SendFailed("out of room"), False),
    ],
    ids=lambda value: value.message if isinstance(value, RocketMQError) else str(value),
)
def test_what_may_pass(bench: Bench, spool: FakeSpool, error: RocketMQError, expected: bool) -> None:
    assert is_transient(error, bench.sender) is expected


@pytest.mark.parametrize(
    ("masters", "expected"), [(True, False), (False, True), (ConnectionLost("no name server answers"), True)]
)
def test_a_topic_is_missing_while_masters_live(
    bench: Bench, spool: FakeSpool, masters: bool | RocketMQError, expected: bool
) -> None:
    bench.sender.masters = masters
    bench.sender.routes.clear()
    assert is_transient(MISSING, bench.sender) is expected


@pytest.mark.parametrize("now", [tuple(qs("a:0")), BrokerNotFound("no master"), ConnectionLost("gone")], ids=str)
def test_topic_that_appears_during_master_query_is_not_missing(bench: Bench, spool: FakeSpool, now: object) -> None:
    bench.sender.routes["T"] = now
    assert is_transient(MISSING, bench.sender)


@pytest.mark.parametrize("mode", ["sync", "async", "batch", "auto_batch"])
def test_sends_to_busy_brokers_are_retried_then_spooled_with_id(bench: Bench, spool: FakeSpool, mode: str) -> None:
    bench.sender.by_broker = {name: lambda: refused(Response.SYSTEM_BUSY) for name in "ab"}
    one = producer(bench, spool, auto_batch=mode == "auto_batch")
    result: SendResult
    if mode == "sync":
        result = one.send(M)
    elif mode == "batch":
        result = one.send_batch([M, M])
    else:
        future = one.send_async(M)
        bench.time.advance(3)
        result = future.result(0)
    assert (result.status, result.queue, result.queue_offset) == (SendStatus.SPOOLED, None, None)
    assert len(bench.sender.calls) == 3
    (kept,) = spool.kept
    assert ",".join(kept.msg_ids) == result.msg_id
    if mode in ("sync", "async"):
        assert decode_properties(kept.request.properties)["UNIQ_KEY"] == result.msg_id
    assert kept.request is bench.sender.requests[0]


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_permanent_failure_is_an_error_as_without_a_spool(bench: Bench, spool: FakeSpool, mode: str) -> None:
    bench.sender.script = [refused(Response.MESSAGE_ILLEGAL)]
    one = producer(bench, spool)

    def send() -> SendResult:
        if mode == "sync":
            return one.send(M)
        future = one.send_async(M)
        spool_timer(bench)
        return future.result(0)

    with pytest.raises(MessageIllegal):
        send()
    assert spool.kept == []


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_first_send_without_any_master_is_spooled_without_queue(bench: Bench, spool: FakeSpool, mode: str) -> None:
    bench.sender.masters = False
    bench.sender.routes.clear()
    one = producer(bench, spool)
    if mode == "sync":
        assert one.send(M).status is SendStatus.SPOOLED
    else:
        future = one.send_async(M)
        spool_timer(bench)
        assert future.result(0).status is SendStatus.SPOOLED
    assert [(send.topic, send.queue) for send in spool.kept] == [("T", None)]


def test_a_missing_topic_while_masters_live_is_an_error(bench: Bench, spool: FakeSpool) -> None:
    bench.sender.routes.clear()
    with pytest.raises(RouteNotFound):
        producer(bench, spool).send(M)
    assert spool.kept == []


def test_a_selector_without_a_route_is_kept_and_chooses_later(bench: Bench, spool: FakeSpool) -> None:
    bench.sender.routes["T"] = ConnectionLost("no name server answers")
    one = producer(bench, spool)
    assert one.send(M, selector="hash", arg="customer-7").status is SendStatus.SPOOLED
    (kept,) = spool.kept
    assert (kept.queue, kept.selector, kept.arg) == (None, "hash", "customer-7")
    bench.sender.routes["T"] = tuple(qs("a:0-1 b:0-1"))
    assert one.send(M, selector="hash", arg="customer-7").status is SendStatus.SPOOLED  # not past the first
    assert one.send(M, selector="hash", arg="customer-8").status is SendStatus.SEND_OK
    assert len(spool.kept) == 2


@pytest.mark.parametrize("selector", ["roundRobin", "environment"])
def test_default_selector_by_name_is_spooled_in_its_environment(bench: Bench, spool: FakeSpool, selector: str) -> None:
    bench.sender.routes["T"] = ConnectionLost("no name server answers")
    one = producer(bench, spool, environment=Environment.of(2, 2))
    assert one.send(M, selector=selector).status is SendStatus.SPOOLED
    assert [(kept.queue, kept.selector) for kept in spool.kept] == [(None, None)]
    bench.sender.routes["T"] = tuple(qs("a:0-1 b:0-1"))
    resender = EngineResender(bench.sender, one.settings, bench.timer("x-resend"))
    ended: list[Resent] = []
    resender.resend(spool.kept[0], ended.append)
    assert [resent.queue in qs("a:1 b:1") for resent in ended] == [True]


@pytest.mark.parametrize(
    ("selector", "arg"),
    [("hash", None), ("hash", 1.5), ("machineRoom", ""), ("environment", "x"), ("hsh", "7"), ("no.such:callable", 1)],
)
def test_selector_failing_for_any_queues_raises_without_spooling(
    bench: Bench, spool: FakeSpool, selector: str, arg: object
) -> None:
    bench.sender.routes["T"] = ConnectionLost("no name server answers")
    with pytest.raises((SelectorError, OptionError)):
        producer(bench, spool).send(M, selector=selector, arg=arg)
    assert spool.kept == []


def test_selector_that_cannot_be_stored_fails_as_without_a_spool(bench: Bench, spool: FakeSpool) -> None:
    bench.sender.routes["T"] = ConnectionLost("no name server answers")
    with pytest.raises(ConnectionLost):
        producer(bench, spool).send(M, selector=lambda queues, message, arg: queues[0])
    assert not is_storable_selector("hash", object())
    assert not is_storable_selector(None, 1)
    assert not is_storable_selector("hash", "\ud800")
    assert not is_storable_selector("my.module:choose", 1), "a file does not say which code runs"
    assert is_storable_selector("hash", "7")
    assert not is_storable_selector("hash", "x" * 60_000), "the name of its lane has a length"
    assert not is_storable_selector("hash\ud800", 1)
    deep: list[object] = []
    for _ in range(100_000):
        deep = [deep]
    assert not is_storable_selector("hash", deep)
    (chosen,) = selector_function("T", "hash", "7")(qs("a:0-3"))
    assert chosen in qs("a:0-3")


def test_queue_named_before_any_route_is_spooled_for_that_queue(bench: Bench, spool: FakeSpool) -> None:
    bench.sender.routes["T"] = ConnectionLost("no name server answers")
    result = producer(bench, spool).send(M, queue=q("a:1"))
    assert (result.status, result.queue) == (SendStatus.SPOOLED, q("a:1"))
    assert spool.kept[0].queue == q("a:1")


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_queue_with_spooled_messages_sends_behind_them(bench: Bench, spool: FakeSpool, mode: str) -> None:
    one = producer(bench, spool)
    bench.sender.script = [down]
    assert one.send(M, queue=q("a:0")).status is SendStatus.SPOOLED
    calls = len(bench.sender.calls)
    second = Message("T", b"second")
    if mode == "sync":
        assert one.send(second, queue=q("a:0")).status is SendStatus.SPOOLED
    else:
        future = one.send_async(second, queue=q("a:0"))
        spool_timer(bench)
        assert future.result(0).status is SendStatus.SPOOLED
    assert len(bench.sender.calls) == calls
    assert [send.request.body for send in spool.kept] == [b"x", b"second"]
    assert one.send(M, queue=q("a:1")).status is SendStatus.SEND_OK
    assert one.send(M).status is SendStatus.SEND_OK
    spool.kept.clear()
    assert one.send(M, queue=q("a:0")).status is SendStatus.SEND_OK


def test_sends_behind_a_spooled_batch_are_spooled_in_order(bench: Bench, spool: FakeSpool) -> None:
    one = producer(bench, spool, auto_batch=True)
    bench.sender.script = [None]
    futures = []
    for i in range(4):
        futures.append(one.send_async(Message("T", str(i).encode()), queue=q("a:0")))
        bench.time.advance(0.02)
    assert len(bench.sender.calls) == 1
    bench.sender.answer(outcome=down)
    bench.time.advance(0)
    assert [future.result(0).status for future in futures] == [SendStatus.SPOOLED] * 4
    assert [list(send.msg_ids) for send in spool.kept] == [[future.result(0).msg_id] for future in futures]
    assert len(bench.sender.calls) == 1


def test_each_message_of_an_accumulated_batch_is_told_its_own_id(bench: Bench, spool: FakeSpool) -> None:
    bench.sender.by_broker = {name: lambda: ConnectionLost("down") for name in "ab"}
    one = producer(bench, spool, auto_batch=True)
    futures = [one.send_async(M) for _ in range(3)]
    bench.time.advance(3)
    results = [future.result(0) for future in futures]
    assert {result.status for result in results} == {SendStatus.SPOOLED}
    (kept,) = spool.kept
    assert [result.msg_id for result in results] == list(kept.msg_ids)


def test_asynchronous_failures_of_a_moment_are_kept_by_one_call(bench: Bench, spool: FakeSpool) -> None:
    one = producer(bench, spool, retries=0)
    bench.sender.script = [None] * 20
    futures = [one.send_async(M) for _ in range(20)]
    while bench.sender.waiting:
        bench.sender.answer(outcome=down)
    assert not any(future.done() for future in futures)
    spool_timer(bench)
    assert {future.result(0).status for future in futures} == {SendStatus.SPOOLED}
    assert spool.calls == 1


def test_full_spool_keeps_sends_that_fit_and_the_others_fail(bench: Bench, spool: FakeSpool) -> None:
    spool.room = 2
    one = producer(bench, spool, retries=0)
    bench.sender.script = [None] * 3
    futures = [one.send_async(M) for _ in range(3)]
    while bench.sender.waiting:
        bench.sender.answer(outcome=down)
    spool_timer(bench)
    assert [future.result(0).status for future in futures[:2]] == [SendStatus.SPOOLED] * 2
    bench.sender.script = [down]
    for call in (lambda: futures[2].result(0), lambda: one.send(M)):
        with pytest.raises(ConnectionLost) as caught:
            call()
        assert "it is full" in caught.value.__notes__[0]


def test_what_must_not_overtake_fails_when_the_spool_is_full(bench: Bench, spool: FakeSpool) -> None:
    one = producer(bench, spool)
    bench.sender.script = [down]
    one.send(M, queue=q("a:0"))
    spool.room = 1
    with pytest.raises(SpoolFull):
        one.send(M, queue=q("a:0"))


def test_a_broker_that_takes_something_is_told(bench: Bench, spool: FakeSpool) -> None:
    one = producer(bench, spool)
    sync = one.send(M).queue
    future = one.send_async(M)
    assert spool.answers == [sync, future.result(0).queue]


def test_unanswered_sends_at_close_are_all_spooled(bench: Bench, spool: FakeSpool) -> None:
    one = producer(bench, spool)
    bench.sender.script = [None] * 5
    futures = [one.send_async(M) for _ in range(5)]
    assert one.close(0.5) == []
    assert {future.result(0).status for future in futures} == {SendStatus.SPOOLED}
    assert [send.msg_ids[0] for send in spool.kept] == [future.result(0).msg_id for future in futures]
    assert spool.closed


def test_what_is_left_is_spooled_when_the_close_is_interrupted(
    bench: Bench, spool: FakeSpool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*args: object) -> None:
        raise SystemExit

    one = producer(bench, spool)
    bench.sender.script = [None]
    future = one.send_async(M)
    monkeypatch.setattr(bench.timers["callback"], "wait_notified", interrupted)
    with pytest.raises(SystemExit):
        one.close()
    assert future.result(0).status is SendStatus.SPOOLED
    assert len(spool.kept) == 1
    assert spool.closed


def test_a_relative_delay_counts_from_the_send_that_was_spooled(bench: Bench, spool: FakeSpool) -> None:
    bench.sender.masters = False
    bench.sender.routes.clear()
    one = producer(bench, spool)
    one.send(M, delay=7.5)
    one.send(M, deliver_at=1_900_000_000_000)
    one.send(M, delay_level=3)
    one.send(replace(M, properties={"about": "TIMER_DELAY_MS"}))
    found = [decode_properties(send.request.properties) for send in spool.kept]
    due = {Property.TIMER_DELIVER_MS: str(spool.kept[0].request.born_timestamp_ms + 7500)}
    names = (Property.TIMER_DELAY_MS, Property.TIMER_DELAY_SEC, Property.TIMER_DELIVER_MS, Property.DELAY)
    timed = [{name: each[name] for name in names if name in each} for each in found]
    assert timed == [due, {Property.TIMER_DELIVER_MS: "1900000000000"}, {Property.DELAY: "3"}, {}]
    assert found[0].keys() - due.keys() == found[1].keys() - due.keys()
    assert found[3]["about"] == "TIMER_DELAY_MS"


def test_metrics_are_the_spools(bench: Bench, spool: FakeSpool) -> None:
    assert producer(bench, spool).spool_metrics() == spool.metrics()
    assert bench.producer().spool_metrics() is None


def consumed(bench: Bench) -> None:
    """Somebody takes envelopes."""
    bench.sender.routes[INNER_TOPIC] = tuple(q(f"a:{i}", INNER_TOPIC) for i in range(2))
    bench.sender.consumed_topics.add(INNER_TOPIC)


def test_recall_succeeds_or_raises_and_is_never_spooled(bench: Bench, spool: FakeSpool) -> None:
    consumed(bench)
    one = producer(bench, spool, long_delay="dmq", retries=0)
    result = one.send(M, delay=864_000)
    bench.sender.by_broker = {name: lambda: ConnectionLost("down") for name in "ab"}
    assert one.send(M).status is SendStatus.SPOOLED
    with pytest.raises(ConnectionLost):
        one.recall("T", result.recall_handle or "")
    assert [kept.topic for kept in spool.kept] == ["T"]
    bench.sender.by_broker = {}
    assert one.recall("T", result.recall_handle or "") == result.msg_id


@pytest.mark.parametrize(
    "chosen", [{"selector": "hash", "arg": "customer-7"}, {}], ids=["by a selector", "by environment"]
)
def test_a_long_delay_whose_queue_cannot_be_chosen_is_refused(
    bench: Bench, spool: FakeSpool, chosen: dict[str, Any]
) -> None:
    consumed(bench)
    environment = None if chosen else Environment.of(2, 2)
    one = producer(bench, spool, long_delay="dmq", environment=environment)
    bench.sender.routes["T"] = ConnectionLost("no name server answers")
    with pytest.raises(MessageRefused, match="no name server reports the queues") as raised:
        one.send(M, delay=864_000, **chosen)
    assert raised.value.topic == "T"
    assert not spool.kept
    bench.sender.routes["T"] = tuple(qs("a:0-1 b:0-1"))
    if chosen:  # one before it waits to be chosen
        spool.kept.append(SpooledSend("T", SendRequest("g", b""), selector="hash", arg="customer-7"))
    one.send(M, delay=864_000, **chosen)
    request = bench.sender.calls[-1][2]
    assert isinstance(request, SendRequest)
    found = q(decode_properties(unpack(request.body).properties)[QUEUE])
    assert found == select("hash", qs("a:0-1 b:0-1"), M, "customer-7") if chosen else found in qs("a:1 b:1")


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_unexpected_spool_failure_fails_the_send_without_hanging(
    bench: Bench, spool: FakeSpool, monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    monkeypatch.setattr(spool, "keep", raising(OSError("Input/output error")))
    one = producer(bench, spool)
    bench.sender.script = [down]
    if mode == "async":
        future = one.send_async(M, queue=q("a:0"))
        spool_timer(bench)
        raised = future.exception(0)
    else:
        with pytest.raises(RocketMQError) as caught:
            one.send(M, queue=q("a:0"))
        raised = caught.value
    assert isinstance(raised, ConnectionLost)
    assert "Input/output error" in str(getattr(raised, "__notes__", ""))
