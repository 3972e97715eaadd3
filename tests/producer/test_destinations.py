"""Named queues and selectors by themselves; what a producer makes of them is in ``test_producer``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from rocketmq_spark.base.clock import Deadline
from rocketmq_spark.errors import CallTimeout, ConnectionLost, MessageRefused, RouteNotFound
from rocketmq_spark.model import Message, MessageQueue
from rocketmq_spark.producer.encoding import How
from rocketmq_spark.producer.routing import Destinations, RouteCache
from rocketmq_spark.producer.settings import ProducerSettings
from rocketmq_spark.queues.environment import Environment
from tests.fakes.timer import ManualTimer
from tests.producer.bench import Bench
from tests.queues import q, qs

M = Message("T", b"x")


def destinations(bench: Bench, environment: Environment | None = None) -> Destinations:
    settings = ProducerSettings(group="g", auto_create_topics=False, environment=environment)
    return Destinations(RouteCache(bench.sender, settings), ManualTimer(bench.time), environment)


def of(found: Destinations, message: Message = M, **how: Any) -> MessageQueue | None:
    place = found.resolve(message, How(**how), Deadline.after(3.0))
    assert place.selector is None
    return place.queue


def test_message_without_queue_choice_asks_for_no_route(bench: Bench) -> None:
    assert of(destinations(bench)) is None
    assert bench.sender.events == []


def test_a_queue_or_a_selector_and_not_both(bench: Bench) -> None:
    found = destinations(bench)
    assert of(found, queue=q("b:1")) == q("b:1")
    assert of(found, selector=lambda queues, message, arg: queues[arg], arg=2) == q("b:0")
    with pytest.raises(MessageRefused, match="a queue or through a selector, not both"):
        of(found, queue=q("b:1"), selector="random")


def test_queue_of_another_topic_is_refused_without_requests(bench: Bench) -> None:
    with pytest.raises(MessageRefused, match="message's topic not equal mq's topic"):
        of(destinations(bench), queue=q("a:0", "Other"))
    assert bench.sender.events == []


def test_explicit_queue_asks_route_once_and_allows_missing_topic(bench: Bench) -> None:
    found = destinations(bench)
    missing = q("a:0", "Nowhere")
    assert of(found, Message("Nowhere", b"x"), queue=missing) == missing
    assert bench.sender.seen("route") == [("Nowhere", False)]
    for _ in range(2):
        of(found, queue=q("a:0"))
    assert bench.sender.seen("route") == [("Nowhere", False), ("T", False)]
    with pytest.raises(RouteNotFound):
        of(found, Message("Nowhere", b"x"), selector="random")


def test_the_default_by_name_leaves_the_choice_to_each_attempt(bench: Bench) -> None:
    assert of(destinations(bench), selector="RoundRobin") is None
    mine = Environment.of(2, 2)
    found = destinations(bench, mine)
    assert of(found, selector="environment") is None
    assert of(found, selector="environment", arg=1) in qs("a:1 b:1")


def test_an_environment_is_never_left(bench: Bench) -> None:
    found = destinations(bench, Environment.of(2, 2))
    assert list(found.queues("T", Deadline.after(3.0))) == qs("a:1 b:1")
    assert of(found, queue=q("b:1")) == q("b:1")
    with pytest.raises(MessageRefused, match="T/b/0 does not belong to environment '2'"):
        of(found, queue=q("b:0"))


def test_absent_name_server_is_awaited_but_slow_selector_fails(bench: Bench) -> None:
    found, there = destinations(bench), bench.sender.routes["T"]
    bench.sender.routes["T"] = ConnectionLost("no name server answers", "ns:9876")
    with pytest.raises(ConnectionLost, match="no name server answers"):
        of(found, selector="random")
    assert len(bench.sender.events) > 3
    bench.sender.routes["T"] = there

    def slow(queues: list[MessageQueue], message: Message, arg: object) -> MessageQueue:
        bench.time.advance(3.1)
        return queues[0]

    with pytest.raises(CallTimeout, match="selecting a queue took too long"):
        of(found, selector=slow)


def test_a_oneway_send_waits_for_a_name_server_too(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has one attempt, so no other look at the route follows."""
    away, ask = [ConnectionLost("no name server answers", "ns:9876")] * 2, bench.sender.publish_queues

    def asked(*args: Any) -> Sequence[MessageQueue]:
        if away:
            raise away.pop()
        return ask(*args)

    monkeypatch.setattr(bench.sender, "publish_queues", asked)
    bench.producer().send_oneway(M)
    assert [mode for mode, _, _ in bench.sender.calls] == ["oneway"]
    assert not away
