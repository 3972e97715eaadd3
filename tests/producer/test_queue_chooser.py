"""The queue of each attempt; with brokers that fail it is tested through ``test_engine`` and ``test_producer``."""

from __future__ import annotations

from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from rocketmq_spark.base.clock import Deadline
from rocketmq_spark.errors import CallTimeout, RouteNotFound
from rocketmq_spark.model import MessageQueue, SendRequest
from rocketmq_spark.producer.fault_tolerance import FaultTable
from rocketmq_spark.producer.outgoing import OutgoingSend
from rocketmq_spark.producer.retry import OutOfTime, RetryPolicy, RetryState
from rocketmq_spark.producer.routing import QueueChooser, RouteCache
from rocketmq_spark.producer.settings import ProducerSettings
from tests.fakes.timer import ManualTimer
from tests.producer.bench import Bench
from tests.queues import q, qs

REQUEST = SendRequest("g", b"x")


class Chooser:
    def __init__(self, bench: Bench, **faults: Any) -> None:
        topics = RouteCache(bench.sender, ProducerSettings(group="g", auto_create_topics=False))
        self.faults = FaultTable(**faults)
        self.choice = QueueChooser(topics, self.faults, ManualTimer(bench.time))

    def __call__(self, topic: str = "T", timeout: float = 3.0, refresh: bool = False, **how: Any) -> MessageQueue:
        attempts = RetryState(RetryPolicy(), pinned=False)
        outgoing = OutgoingSend(topic, REQUEST, timeout, **how)
        return self.choice.choose(outgoing, attempts, Deadline.after(timeout), refresh)


def test_every_thread_goes_round_by_itself(bench: Bench) -> None:
    choose = Chooser(bench)
    with ThreadPoolExecutor(3) as threads:
        for found in threads.map(lambda _: Counter(choose() for _ in range(40)), range(3)):
            assert found == dict.fromkeys(qs("a:0-1 b:0-1"), 10)


def test_named_queue_is_used_even_when_its_broker_is_isolated(bench: Bench) -> None:
    choose = Chooser(bench, enabled=True)
    choose.faults.report("a", 9_000_000, 1_000_000, isolated=True)
    assert {choose(queue=q("a:1")) for _ in range(5)} == {q("a:1")}
    assert {choose().broker_name for _ in range(8)} == {"b"}


def test_named_queue_asks_for_the_route_once_unless_refreshed(bench: Bench) -> None:
    choose = Chooser(bench)
    for _ in range(3):
        choose(queue=q("a:1"))
    assert bench.sender.seen("route") == [("T", False)]
    choose(queue=q("a:1"), refresh=True)
    assert bench.sender.seen("route") == [("T", False), ("T", True)]


def test_a_topic_without_route_stops_only_those_who_need_one(bench: Bench) -> None:
    choose = Chooser(bench)
    queue = q("a:0", "Nowhere")
    assert choose("Nowhere", queue=queue) == queue
    with pytest.raises(RouteNotFound):
        choose("Nowhere")


def test_queue_filter_gets_all_queues_and_choice_is_random(bench: Bench) -> None:
    choose, seen = Chooser(bench), []

    def only_b(queues: Any) -> Any:
        seen.append(list(queues))
        return [queue for queue in queues if queue.broker_name == "b"]

    found = [choose(filter_queues=only_b) for _ in range(60)]
    assert set(found) == set(qs("b:0-1"))
    assert found[:2] * 30 != found, "it does not go round"
    assert seen == [qs("a:0-1 b:0-1")] * 60


def test_nothing_is_asked_when_the_time_is_over(bench: Bench) -> None:
    with pytest.raises(OutOfTime, match="the send timeout is over") as e:
        Chooser(bench)(timeout=0.0)
    assert isinstance(e.value, CallTimeout)
    assert bench.sender.events == []
