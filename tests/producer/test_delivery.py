"""Fault tolerance as the producer applies it; the rest of the delivery is tested through ``test_producer``."""

from __future__ import annotations

import logging
import threading
from collections import Counter
from typing import Any

import pytest

from rocketmq_spark.clock import Deadline
from rocketmq_spark.codes import Response
from rocketmq_spark.errors import BrokerNotFound, ConnectionLost, SendFailed
from rocketmq_spark.model import Message, SendRequest, SendResult
from rocketmq_spark.producer.delivery import Delivery, Parcel
from rocketmq_spark.producer.faults import RELEASE_4, tables
from rocketmq_spark.producer.producer import Producer
from rocketmq_spark.producer.settings import ProducerSettings
from rocketmq_spark.producer.topics import Topics
from tests.producer.scripted import Bench, ManualClockwork, refused
from tests.queues import qs

M = Message("T", b"x")


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_0_16_a_slow_broker_is_avoided_for_its_time(bench: Bench, mode: str) -> None:
    producer = bench.producer(send_latency_fault=True)
    send: Any = producer.send if mode == "sync" else producer.send_async
    bench.sender.latency_s["a"] = 0.6
    while bench.sender.brokers.count("a") == 0:
        send(M)
    bench.sender.latency_s.clear()
    bench.sender.calls.clear()
    for _ in range(20):
        send(M)
        bench.time.advance(0.099)
    assert "a" not in bench.sender.brokers
    bench.time.advance(0.1)
    for _ in range(4):
        send(M)
    assert "a" in bench.sender.brokers


@pytest.mark.parametrize(("preset", "isolation"), [("current", 10.0), ("4.x", 600.0)])
def test_0_20_a_broker_that_failed_gets_no_send_until_its_isolation_ends(
    bench: Bench, preset: str, isolation: float
) -> None:
    producer = bench.producer(send_latency_fault=True, fault_tables=tables(preset))
    bench.sender.by_broker["a"] = lambda: ConnectionLost("down")
    while "a" not in bench.sender.brokers:
        producer.send(M)
    failed_at = bench.time.now
    bench.sender.calls.clear()
    while bench.time.now < failed_at + isolation - 1:
        producer.send(M)
        bench.time.advance(isolation / 50)
    assert "a" not in bench.sender.brokers
    bench.time.advance(isolation / 25 + 1)
    for _ in range(4):
        producer.send(M)
    assert "a b" in bench.sender.brokers


def test_0_16_error_answers_isolate_and_a_missing_address_does_not(bench: Bench) -> None:
    producer = bench.producer(send_latency_fault=True)
    bench.sender.by_broker["a"] = lambda: refused(Response.SYSTEM_BUSY)
    bench.sender.by_broker["b"] = lambda: BrokerNotFound("no address")
    with pytest.raises(SendFailed):
        producer.send(M)
    now = bench.clockworks["send"].now_ms()
    assert not producer.faults.available("a", now)
    assert producer.faults.available("b", now)


def test_0_24_a_failing_fault_table_never_fails_a_send(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    producer = bench.producer(send_latency_fault=True)

    def broken(broker: str, now_ms: int) -> bool:
        raise KeyError(broker)

    monkeypatch.setattr(producer.faults, "available", broken)
    with caplog.at_level(logging.ERROR):
        for _ in range(40):
            producer.send(M)
    assert len(bench.sender.calls) == 40
    assert "going round the queues instead" in caplog.text


def test_0_29_fault_mode_is_switched_while_sending(bench: Bench) -> None:
    producer = bench.producer()
    bench.sender.by_broker["a"] = lambda: ConnectionLost("down")
    producer.faults.enabled = True
    for _ in range(8):
        producer.send(M)
    assert bench.sender.brokers.count("a") <= 1
    producer.faults.enabled = False
    for _ in range(8):
        producer.send(M)
    assert bench.sender.brokers.count("a") >= 4
    producer.faults.tables = RELEASE_4
    producer.faults.enabled = True
    bench.time.advance(11)
    for _ in range(8):
        producer.send(M)
    assert producer.faults.faults["a"].available_at_ms > bench.clockworks["send"].now_ms() + 500_000


def test_0_17_and_0_27_sixteen_threads_report_and_pick_without_loss(bench: Bench) -> None:
    producer = bench.producer(send_latency_fault=True)
    start, errors = threading.Barrier(16), []

    def work(producer: Producer) -> None:
        try:
            start.wait(10)
            for i in range(50):
                producer.send(M)
                if i % 10 == 0:
                    producer.faults.enabled = not producer.faults.enabled
        except Exception as e:  # noqa: BLE001 - shown by the assertion
            errors.append(e)

    threads = [threading.Thread(target=work, args=(producer,)) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert errors == []
    assert len(bench.sender.calls) == 800
    assert set(producer.faults.faults) <= {"a", "b"}


def test_0_15_a_route_change_starts_a_new_index(bench: Bench) -> None:
    producer = bench.producer()
    producer.send(M)
    bench.sender.routes["T"] = tuple(qs("c:0-3"))
    bench.sender.script = [refused(Response.TOPIC_NOT_EXIST)]
    producer.send(M)
    counts = Counter(producer.send(M).queue for _ in range(40))
    assert counts == dict.fromkeys(qs("c:0-3"), 10)


def parts(bench: Bench, **settings: Any) -> Delivery:
    given = ProducerSettings(group="g", **{"retries": None, "pinned_retries": None, **settings})
    return Delivery(bench.sender, Topics(bench.sender, given), given, ManualClockwork(bench.time))


def parcel(**how: Any) -> Parcel:
    return Parcel("T", SendRequest("g", b"x"), Deadline.after(10), **how)


def test_a_narrowed_parcel_goes_to_what_is_left_at_random_and_pauses_between_attempts(bench: Bench) -> None:
    delivery = parts(bench)
    only_a = lambda queues: [q for q in queues if q.broker_name == "a"]  # noqa: E731
    for _ in range(60):
        delivery.send(parcel(narrow=only_a))
    assert {queue.broker_name for _, queue, _ in bench.sender.calls} == {"a"}
    assert {queue.queue_id for _, queue, _ in bench.sender.calls} == {0, 1}
    bench.sender.script = [refused(Response.SYSTEM_BUSY)] * 3
    begin = bench.time.now
    delivery.send(parcel(narrow=only_a))
    assert bench.time.now > begin, "other brokers of the topic are no reason not to wait"


def test_time_in_a_lane_does_not_count(bench: Bench) -> None:
    delivery = parts(bench)
    queue, outcomes = qs("a:0")[0], []
    for _ in range(2):
        one = parcel(pinned=queue, lane=queue, timeout_s=10.0, done=outcomes.append)
        bench.sender.script.append(None)
        delivery.enqueue(one)
    delivery.pump()
    bench.time.advance(9.0)
    bench.sender.answer()
    bench.time.advance(0.5)
    assert bench.sender.deadlines[-1] > 9.0
    bench.time.advance(5.0)
    bench.sender.answer()
    assert [type(outcome) for outcome in outcomes] == [SendResult] * 2


def test_the_window_may_be_widened(bench: Bench) -> None:
    delivery = parts(bench, max_in_flight=1)
    bench.sender.script = [None] * 5
    for _ in range(4):
        delivery.enqueue(parcel())
    delivery.pump()
    assert len(bench.sender.waiting) == 1
    delivery.widen(3)
    delivery.pump()
    assert len(bench.sender.waiting) == 3


def in_lane(outcomes: list[Any], name: str = "a:0") -> Parcel:
    queue = qs(name)[0]
    return parcel(pinned=queue, lane=queue, timeout_s=10.0, done=outcomes.append)


@pytest.mark.parametrize("stays", [True, False])
def test_11_18_what_waits_behind_a_batch_that_was_given_up_is_not_sent(bench: Bench, stays: bool) -> None:
    delivery = parts(bench, lanes_stay_shut=stays)
    outcomes: list[Any] = []
    bench.sender.script = [None, None]
    for name in ("a:0", "a:0", "a:0", "a:1"):
        delivery.enqueue(in_lane(outcomes, name))
    delivery.pump()
    bench.sender.answer(0, refused(Response.MESSAGE_ILLEGAL))
    bench.time.advance(1)
    assert outcomes[0].broker_code == Response.MESSAGE_ILLEGAL
    assert [str(e.__cause__) for e in outcomes[1:]] == [str(outcomes[0])] * 2
    assert "not sent, because an earlier batch of its queue was given up: the server" in outcomes[1].message
    delivery.enqueue(in_lane(outcomes))
    delivery.pump()
    bench.sender.answer()
    sent = [queue.queue_id for _, queue, _ in bench.sender.calls]
    assert sent == ([0, 1] if stays else [0, 1, 0])
    kinds = [SendFailed, SendResult] if stays else [SendResult, SendResult]
    assert [type(outcome) for outcome in outcomes[3:]] == kinds
    assert delivery.idle(Deadline.after(0.0))
    assert delivery._bytes == 0


def raising(*args: Any, **kwargs: Any) -> Any:
    raise ValueError("a bug")


@pytest.mark.parametrize("place", ["publish_queues", "send_async", "narrow", "judge", "report"])
def test_11_19_whatever_is_raised_becomes_an_outcome(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, place: str, caplog: pytest.LogCaptureFixture
) -> None:
    delivery = parts(bench)
    outcomes: list[Any] = []
    one = parcel(done=outcomes.append, narrow=raising if place == "narrow" else None)
    if place in ("publish_queues", "send_async"):
        monkeypatch.setattr(bench.sender, place, raising)
    delivery.enqueue(one)
    if place == "judge":
        monkeypatch.setattr(one.attempts, "judge", raising)
    if place == "report":
        monkeypatch.setattr(delivery.faults, "report", raising)
    delivery.pump()
    bench.time.advance(11)
    (outcome,) = outcomes
    if place == "report":
        assert isinstance(outcome, SendResult)
    else:
        assert isinstance(outcome, SendFailed)
        assert "sending failed in an unexpected way: ValueError: a bug" in str(outcome)
        assert "bug of rocketmq-spark" in str(outcome)
    assert delivery.idle(Deadline.after(0.0))
    assert "Traceback" in caplog.text


def test_11_19_a_second_outcome_of_an_attempt_changes_nothing(bench: Bench) -> None:
    delivery = parts(bench)
    outcomes: list[Any] = []
    bench.sender.script = [None, None]
    delivery.enqueue(parcel(done=outcomes.append))
    delivery.pump()
    _, _, done = bench.sender.waiting[0]
    bench.sender.answer(0, refused(Response.SYSTEM_BUSY))
    bench.time.advance(1)
    done(ConnectionLost("told twice"))
    bench.sender.answer()
    assert [type(outcome) for outcome in outcomes] == [SendResult]


def test_11_22_a_name_server_that_hangs_holds_up_nobody_who_does_not_ask_it(bench: Bench) -> None:
    """Routes are asked for again on a thread beside the one that sends."""
    delivery = parts(bench)
    outcomes: list[Any] = []
    bench.sender.script = [ConnectionLost("broken"), None]
    for name in ("a:0", "b:0"):
        delivery.enqueue(in_lane(outcomes, name))
    delivery._aside.stopped = True  # type: ignore[attr-defined]
    delivery.pump()
    bench.time.advance(1)
    bench.sender.answer()
    assert [outcome.queue for outcome in outcomes] == qs("b:0")
