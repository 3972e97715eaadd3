"""Delays that brokers do not serve, on a scripted broker: which message goes as an envelope, which is refused, and why."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

from rocketmq_spark.base.clock import Deadline
from rocketmq_spark.base.codes import Response
from rocketmq_spark.errors import (
    AccessDenied,
    CallTimeout,
    ConnectionLost,
    LocalProtocolError,
    MessageRefused,
    RocketMQError,
    RouteNotFound,
)
from rocketmq_spark.model import Message, SendStatus
from rocketmq_spark.producer import delays
from rocketmq_spark.producer.delays import BrokerTimers
from rocketmq_spark.wire.envelope import CANCEL, INNER_TOPIC, QUEUE, DelayHandle, unpack
from rocketmq_spark.wire.properties import decode_properties
from tests.fakes.sender import ScriptedSender
from tests.fakes.spool import FakeSpool
from tests.fakes.timer import ManualTimer
from tests.helpers import raising
from tests.producer.bench import Bench
from tests.producer.test_spool_bridge import producer as spooling
from tests.queues import q, qs

DAYS_10 = 10 * 24 * 3600
M = Message("T", b"body", tags="paid", keys=["k"], properties={"region": "eu"}, flag=7)


@pytest.fixture
def served(bench: Bench) -> Bench:
    """Somebody consumes envelopes."""
    bench.sender.routes[INNER_TOPIC] = tuple(q(f"a:{i}", INNER_TOPIC) for i in range(2))
    bench.sender.consumed_topics.add(INNER_TOPIC)
    return bench


def only(sender: ScriptedSender) -> Any:
    ((_, queue, request),) = sender.calls
    return queue, request


@pytest.mark.parametrize(
    "timers", [{"a": 259_200_000, "b": 259_200_000}, {"a": 0, "b": 0}, {"a": 259_200_000, "b": 0}, {}]
)
@pytest.mark.parametrize("delay_s", [7, 3 * 24 * 3600, DAYS_10])
def test_what_timers_do_not_serve_goes_as_an_envelope(served: Bench, timers: dict[str, int], delay_s: int) -> None:
    served.sender.longest_timers = timers
    producer = served.producer(long_delay="dmq")
    began_ms = ManualTimer(served.time).wall_ms()
    result = producer.send(M, delay=delay_s)
    queue, request = only(served.sender)
    if 1000 * delay_s <= min(timers.values(), default=259_200_000):  # a silent broker is taken for a stock one
        assert (queue.topic, decode_properties(request.properties)["TIMER_DELAY_MS"]) == ("T", str(1000 * delay_s))
        return
    found = unpack(request.body)
    assert queue.topic == INNER_TOPIC
    assert (found.topic, found.due_ms, found.born_ms, found.flag, found.body) == (
        "T",
        began_ms + 1000 * delay_s,
        began_ms,
        7,
        b"body",
    )
    assert decode_properties(found.properties) == {
        "TAGS": "paid", "KEYS": "k", "region": "eu", "WAIT": "true", "UNIQ_KEY": result.msg_id,
    }  # fmt: skip
    assert decode_properties(request.properties) == {"UNIQ_KEY": result.msg_id, "WAIT": "true"}


def test_absolute_delay_is_kept_and_past_one_needs_no_envelope(served: Bench) -> None:
    producer = served.producer(long_delay="dmq")
    at_ms = ManualTimer(served.time).wall_ms() + 1000 * DAYS_10
    producer.send(M, deliver_at=at_ms)
    assert unpack(only(served.sender)[1].body).due_ms == at_ms
    served.sender.calls.clear()
    producer.send(M, deliver_at=at_ms - 2000 * DAYS_10)
    assert only(served.sender)[0].topic == "T"


@pytest.mark.parametrize("how", ["send", "send_async", "send_oneway"])
@pytest.mark.parametrize("auto_batch", [False, True])
def test_every_way_of_sending_makes_envelopes(served: Bench, how: str, auto_batch: bool) -> None:
    producer = served.producer(long_delay="dmq", auto_batch=auto_batch)
    told = getattr(producer, how)(M, delay=timedelta(days=10))
    served.time.run_due()
    assert only(served.sender)[0].topic == INNER_TOPIC
    if how != "send_oneway":
        result = told.result(0) if how == "send_async" else told
        handle = DelayHandle.parse(result.recall_handle)
        assert handle is not None
        assert (handle.topic, handle.msg_id) == ("T", result.msg_id)


@pytest.mark.parametrize("how", ["send", "send_async", "send_oneway"])
def test_delay_is_refused_for_broker_that_would_ignore_it(bench: Bench, how: str) -> None:
    producer = bench.producer()
    bench.sender.longest_timers = {"a": 259_200_000, "b": 0}
    with pytest.raises(MessageRefused, match=r"a delay of 7 s cannot be kept: b is older than RocketMQ 5\.0"):
        getattr(producer, how)(M, delay=7)
    getattr(producer, how)(M, delay=7, queue=q("a:0"))
    producer.send(M, delay_level=3)
    assert {queue.broker_name for _, queue, _ in bench.sender.calls[:1]} == {"a"}


def test_overlong_delay_goes_to_broker_without_long_delay_option(bench: Bench) -> None:
    bench.producer().send(M, delay=DAYS_10)
    assert only(bench.sender)[0].topic == "T"


def test_nobody_to_take_envelopes_is_an_error_and_asked_again(bench: Bench) -> None:
    producer = bench.producer(long_delay="dmq")
    words = f"no member of a consumer group consumes {INNER_TOPIC}"
    with pytest.raises(MessageRefused, match=words) as raised:
        producer.send(M, delay=DAYS_10)  # there is no such topic
    assert "rocketmq-spark delay serve" in str(raised.value)
    bench.sender.routes[INNER_TOPIC] = (q("a:0", INNER_TOPIC),)
    with pytest.raises(MessageRefused, match=words):
        producer.send_async(M, delay=DAYS_10)
    assert not bench.sender.calls
    bench.sender.consumed_topics.add(INNER_TOPIC)
    for _ in range(2):
        producer.send(M, delay=DAYS_10)
    asked = [what for what, _ in bench.sender.events].count("consumed")
    assert asked == 3, "once a while when somebody does"
    bench.time.advance(delays.CONSUMER_VALID_S)
    bench.sender.consumed_topics.clear()
    with pytest.raises(MessageRefused, match=words):
        producer.send(M, delay=DAYS_10)


def test_who_may_not_ask_who_consumes_is_believed_and_told(served: Bench, caplog: pytest.LogCaptureFixture) -> None:
    def denied(topic: str, deadline: Deadline) -> bool:
        raise AccessDenied("access denied")

    served.sender.has_online_consumer = denied  # type: ignore[method-assign]
    served.producer(long_delay="dmq").send(M, delay=DAYS_10)
    assert "cannot check whether a group consumes" in caplog.text

    def silent(topic: str, deadline: Deadline) -> bool:
        raise CallTimeout("no answer")

    served.sender.has_online_consumer = silent  # type: ignore[method-assign]
    with pytest.raises(CallTimeout):
        served.producer(long_delay="dmq").send(M, delay=DAYS_10)


def test_the_queue_that_was_chosen_goes_along(served: Bench) -> None:
    producer = served.producer(long_delay="dmq")
    producer.send(M, delay=DAYS_10, queue=q("b:1"))
    producer.send(M, delay=DAYS_10, selector=lambda queues, message, arg: queues[arg], arg=3)
    found = [decode_properties(unpack(request.body).properties).get(QUEUE) for _, _, request in served.sender.calls]
    assert found == ["b:1", f"{qs('a:0-1 b:0-1')[3].broker_name}:1"]


def test_the_envelope_counts_against_the_message_size(served: Bench) -> None:
    producer = served.producer(long_delay="dmq", max_message_size=200)
    with pytest.raises(MessageRefused, match="in the envelope that a delay of this length needs; expected at most 200"):
        producer.send(Message("T", b"x" * 150), delay=DAYS_10)
    producer.send(Message("T", b"x" * 150), delay=7)


def test_a_recall_goes_behind_its_envelope(served: Bench) -> None:
    producer = served.producer(long_delay="dmq")
    result = producer.send(M, delay=DAYS_10)
    envelope = unpack(only(served.sender)[1].body)
    assert producer.recall("T", result.recall_handle or "") == result.msg_id
    (_, first, _), *recalls = served.sender.calls
    assert recalls[0][1] == first
    cancels = [unpack(request.body) for _, _, request in recalls]
    assert {(cancel.kind, cancel.identity) for cancel in cancels} == {(CANCEL, envelope.identity)}
    # A send that was repeated left a copy in a queue that no result names.
    assert sorted(queue for _, queue, _ in recalls) == sorted(served.sender.routes[INNER_TOPIC])
    with pytest.raises(MessageRefused, match="the recall handle belongs to topic 'T'"):
        producer.recall("other", result.recall_handle or "")
    with pytest.raises(LocalProtocolError):
        producer.recall("T", "nonsense")
    served.time.advance(DAYS_10 + 1)
    with pytest.raises(MessageRefused, match=r"too late to recall .* due 1 s ago"):
        producer.recall("T", result.recall_handle or "")


def test_recall_that_misses_queue_fails_but_reaches_others(served: Bench) -> None:
    producer = served.producer(long_delay="dmq", retries=0)
    result = producer.send(M, delay=DAYS_10)
    assert result.queue is not None
    served.sender.calls.clear()
    served.sender.script = [ConnectionLost("down")]
    with pytest.raises(ConnectionLost):
        producer.recall("T", result.recall_handle or "")
    queues = served.sender.routes[INNER_TOPIC]
    assert sorted(queue for _, queue, _ in served.sender.calls) == sorted(queues)
    served.sender.calls.clear()
    assert producer.recall("T", result.recall_handle or "") == result.msg_id
    assert len(served.sender.calls) == len(queues) > 1


def test_long_delay_to_missing_topic_fails_on_send(served: Bench) -> None:
    with pytest.raises(Exception, match="no such topic") as raised:
        served.producer(long_delay="dmq", auto_create_topics=False).send(Message("other", b"x"), delay=DAYS_10)
    assert raised.value.broker_code == Response.TOPIC_NOT_EXIST  # type: ignore[attr-defined]
    assert not served.sender.calls


def test_brokers_are_asked_seldom(bench: Bench) -> None:
    sender, known = bench.sender, {}  # type: ignore[var-annotated]
    sender.longest_timers = {"a": 5, "old": 0}
    timers, soon = BrokerTimers(sender, known), Deadline.after(1)

    def asked(*brokers: str) -> int:
        sender.events.clear()
        assert timers.max_delays_ms("T", brokers, soon) == {
            n: sender.longest_timers[n] for n in brokers if n != "silent"
        }
        return len(sender.events)

    assert [asked("a"), asked("a"), BrokerTimers(sender, known).max_delays_ms("T", ["a"], soon)] == [1, 0, {"a": 5}]
    assert [asked("silent"), asked("silent"), asked("old"), asked("old")] == [1, 0, 1, 1]
    bench.time.advance(delays.SILENT_RETRY_S)
    assert [asked("silent"), asked("a")] == [1, 0]
    bench.time.advance(delays.LIMITS_VALID_S)
    assert asked("a") == 1


def test_a_broker_that_is_silent_does_what_it_said_before(served: Bench) -> None:
    """One without timers would deliver at once what reaches it when it is back."""
    served.sender.longest_timers = {"a": 0, "b": 259_200_000}
    producer = served.producer(long_delay="dmq")
    producer.send(M, delay=7, queue=q("a:0"))
    for _ in range(2):
        served.sender.longest_timers = {}
        producer.send(M, delay=7, queue=q("a:0"))
        served.time.advance(delays.LIMITS_VALID_S)
    assert [queue.topic for _, queue, _ in served.sender.calls] == [INNER_TOPIC] * 3


def test_what_is_spooled_has_no_handle_yet(served: Bench) -> None:
    from rocketmq_spark.model import SendResult
    from rocketmq_spark.producer.delays import with_recall_handle
    from rocketmq_spark.producer.encoding import EnvelopedMessage, PreparedMessage

    prepared = PreparedMessage(M, "ID", "", True, EnvelopedMessage("T", 5))
    spooled = SendResult(SendStatus.SPOOLED, "ID", None, None)
    assert with_recall_handle(spooled, prepared) is spooled


@pytest.mark.parametrize(
    "error",
    [
        ConnectionLost("down"),
        CallTimeout("no answer"),
        RouteNotFound("no route", "ns:1", Response.TOPIC_NOT_EXIST, INNER_TOPIC),
    ],
    ids=lambda error: type(error).__name__,
)
def test_long_delay_is_spooled_while_consumers_are_unknown(
    served: Bench, monkeypatch: pytest.MonkeyPatch, error: RocketMQError
) -> None:
    served.sender, spool = ScriptedSender(served.time), FakeSpool()
    served.sender.routes[INNER_TOPIC] = (q("a:0", INNER_TOPIC),)
    served.sender.masters = False
    monkeypatch.setattr(served.sender, "has_online_consumer", raising(error))
    served.sender.by_broker = {name: lambda: ConnectionLost("down") for name in "ab"}
    one = spooling(served, spool, long_delay="dmq", retries=0)
    assert one.send(M, delay=864_000).status is SendStatus.SPOOLED
    (kept,) = spool.kept
    assert (kept.topic, unpack(kept.request.body).body) == (INNER_TOPIC, M.body)
    if isinstance(error, RouteNotFound):  # while masters live the topic is missing, and nobody consumes it
        served.sender.masters = True
        monkeypatch.setattr(served.sender, "publish_queues", raising(error))
        with pytest.raises(MessageRefused, match="no member of a consumer group"):
            spooling(served, spool, long_delay="dmq").send(Message("T", b"x"), delay=864_000, queue=q("a:0"))
