from __future__ import annotations

import logging

import pytest

from rocketmq_spark.base.clock import Deadline
from rocketmq_spark.errors import ConnectionLost
from rocketmq_spark.model import Message
from tests.producer.bench import Bench
from tests.queues import qs

M = Message("T", b"x")


def test_producer_joins_group_with_configured_heartbeat_interval(bench: Bench) -> None:
    bench.producer(heartbeat_s=30.0)
    assert bench.sender.seen("join") == [("g", 30.0)]


def test_routes_refresh_every_30_s_and_new_queues_get_sends(bench: Bench) -> None:
    producer = bench.producer(route_refresh_s=30.0)
    producer.send(M)
    bench.sender.routes["T"] = tuple(qs("a:0-7"))
    bench.time.advance(35)
    assert bench.sender.seen("refresh") == [0.01, 30.01]
    bench.sender.calls.clear()
    for _ in range(16):
        producer.send(M)
    assert {queue for _, queue, _ in bench.sender.calls} == set(qs("a:0-7"))


def test_broker_gone_from_routes_gets_no_sends_or_fault_entry(bench: Bench) -> None:
    producer = bench.producer(route_refresh_s=30.0, send_latency_fault=True)
    for _ in range(8):
        producer.send(M)
    assert set(producer.faults.faults) == {"a", "b"}
    bench.sender.routes["T"] = tuple(qs("a:0-1"))
    bench.time.advance(35)
    assert set(producer.faults.faults) == {"a"}
    bench.sender.calls.clear()
    for _ in range(8):
        producer.send(M)
    assert set(bench.sender.brokers.split()) == {"a"}


def test_queues_of_all_brokers_take_turns(bench: Bench) -> None:
    producer = bench.producer()
    for _ in range(8):
        producer.send(M)
    assert [bench.sender.brokers.count(broker) for broker in "ab"] == [4, 4]


def test_detector_probes_reported_brokers_every_three_seconds(bench: Bench) -> None:
    producer = bench.producer(heartbeat_s=30.0, send_latency_fault=True, detector=True)
    bench.time.advance(4)
    assert bench.sender.seen("probe") == []  # nothing was published to yet
    bench.sender.by_broker["a"] = lambda: ConnectionLost("down")
    for _ in range(4):
        producer.send(M)
    assert not producer.faults.reachable("a")
    bench.sender.probes["a"] = False
    bench.time.advance(2)
    assert sorted(bench.sender.seen("probe")) == [("a", "T", 0.2), ("b", "T", 0.2)]
    assert not producer.faults.reachable("a")
    bench.sender.probes["a"] = True
    bench.time.advance(3)
    assert producer.faults.reachable("a")
    assert not producer.faults.available("a", bench.timers["send"].now_ms())


def test_the_detector_is_switched_on_while_running(bench: Bench) -> None:
    producer = bench.producer(heartbeat_s=30.0, send_latency_fault=True)
    producer.send(M)
    bench.time.advance(7)
    assert bench.sender.seen("probe") == []
    producer.faults.detecting = True
    bench.time.advance(3)
    assert len(bench.sender.seen("probe")) == 1


def test_a_failing_name_server_or_broker_stops_no_timer(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    bench.producer(heartbeat_s=30.0, route_refresh_s=30.0)
    times: list[str] = []

    def fail(name: str) -> None:
        times.append(name)
        raise ConnectionLost("down")

    monkeypatch.setattr(bench.sender, "refresh_routes", lambda deadline: fail("routes"))
    with caplog.at_level(logging.INFO):
        bench.time.advance(65)
    assert times.count("routes") == 3
    assert "routes were not refreshed" in caplog.text
    assert Deadline.after(1).remaining() == 1


def test_closing_stops_all_timers(bench: Bench) -> None:
    producer = bench.producer(heartbeat_s=30.0, route_refresh_s=30.0)
    producer.close()
    assert bench.time.due == []
