from __future__ import annotations

from typing import Any

import pytest

from rocketmq_spark.base.clock import Deadline
from rocketmq_spark.errors import CallTimeout, ConnectionLost, OptionError, RouteNotFound
from rocketmq_spark.producer.routing import RouteCache
from rocketmq_spark.producer.settings import ProducerSettings
from rocketmq_spark.queues.environment import Environment
from rocketmq_spark.wire.envelope import INNER_TOPIC
from tests.fakes.sender import ScriptedSender
from tests.fakes.timer import Time
from tests.producer.bench import Bench
from tests.queues import names, qs


@pytest.fixture
def sender() -> ScriptedSender:
    return ScriptedSender(Time())


def topics(sender: ScriptedSender, **settings: Any) -> RouteCache:
    return RouteCache(sender, ProducerSettings(group="g", **settings))


SOON = Deadline(1e12)


def test_a_known_list_is_the_same_object_and_costs_no_question(sender: ScriptedSender) -> None:
    known = topics(sender)
    first = known.queues("T", SOON)
    assert known.queues("T", SOON) is first is sender.routes["T"]
    assert sender.seen("route") == [("T", False)]


def test_route_refresh_asks_again_and_survives_dead_name_server(
    sender: ScriptedSender, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rocketmq_spark.producer.routing.REFRESH_PAUSE_S", 0.0)
    known = topics(sender)
    first = known.queues("T", SOON)
    sender.routes["T"] = ConnectionLost("no name server answers")
    assert known.queues("T", SOON, refresh=True) is first
    known.refresh(SOON)
    assert known.queues("T", SOON) is first
    sender.routes["T"] = tuple(qs("c:0", "T"))
    assert names(list(known.queues("T", SOON, refresh=True))) == "c:0"
    assert known.brokers() == known.brokers_of("T") == {"c"}


def test_after_a_failed_refresh_nobody_asks_for_a_moment(bench: Bench) -> None:
    known = topics(bench.sender)
    first, bench.sender.routes["T"] = known.queues("T", SOON), ConnectionLost("no name server answers")
    for _ in range(5):
        assert known.queues("T", SOON, refresh=True) is first
    assert bench.sender.seen("route").count(("T", True)) == 1
    bench.time.advance(0.5)
    bench.sender.routes["T"] = tuple(qs("c:0", "T"))
    assert known.queues("T", SOON, refresh=True) == tuple(qs("c:0"))


def test_name_server_is_awaited_and_the_first_error_told(bench: Bench) -> None:
    known, route = topics(bench.sender), bench.sender.routes["T"]
    bench.sender.routes["T"] = ConnectionLost("no name server answers: refused")

    def pause(seconds: float) -> None:
        bench.time.advance(seconds)
        bench.sender.routes["T"] = CallTimeout("the time was over") if seconds < 0.9 else route

    assert known.wait_for_queues("T", Deadline.after(30), pause) == route
    bench.sender.routes["U"] = ConnectionLost("no name server answers: refused")
    with pytest.raises(ConnectionLost, match="refused"):
        known.wait_for_queues("U", Deadline.after(3), bench.time.advance)
    with pytest.raises(RouteNotFound):
        known.wait_for_queues("Nowhere", Deadline.after(3), bench.time.advance)


def test_no_route_is_an_error_that_names_the_topic(sender: ScriptedSender) -> None:
    with pytest.raises(RouteNotFound) as e:
        topics(sender).queues("Nowhere", SOON)
    assert e.value.topic == "Nowhere"
    sender.routes["T"] = ConnectionLost("no name server answers")
    with pytest.raises(ConnectionLost) as lost:
        topics(sender).queues("T", SOON)
    assert lost.value.code != e.value.code


def test_a_new_topic_is_published_through_the_template(sender: ScriptedSender) -> None:
    sender.routes["TBW102"] = tuple(qs("a:0-7 b:0-1", "TBW102"))
    known = topics(sender)
    found = known.queues("New", SOON)
    assert list(found) == qs("a:0-3 b:0-1", "New")
    assert known.queues("New", SOON, refresh=True) is found
    with pytest.raises(RouteNotFound):
        topics(sender, auto_create_topics=False).queues("New", SOON)


def test_unwritable_topic_is_not_published_through_the_template(sender: ScriptedSender) -> None:
    sender.routes["TBW102"] = tuple(qs("a:0-7", "TBW102"))
    sender.routes["ReadOnly"] = RouteNotFound("no queue of the topic is writable", topic="ReadOnly")
    with pytest.raises(RouteNotFound, match="is writable"):
        topics(sender).queues("ReadOnly", SOON)


@pytest.mark.parametrize("auto_create", [True, False])
def test_refresh_adds_new_queues_and_keeps_routes_that_vanished(sender: ScriptedSender, auto_create: bool) -> None:
    """A name server that has restarted knows nothing but what has registered since: the template of another broker."""
    known = topics(sender, auto_create_topics=auto_create)
    sender.routes["TBW102"] = tuple(qs("b:0-7", "TBW102"))
    sender.routes["U"] = tuple(qs("a:0", "U"))
    for topic in ("T", "U"):
        known.queues(topic, SOON)
    sender.routes["T"] = tuple(qs("a:0-7"))
    del sender.routes["U"]
    known.refresh(SOON)
    assert len(known.queues("T", SOON)) == 8
    for refresh in (False, True):
        assert known.queues("U", SOON, refresh) == tuple(qs("a:0", "U"))
    assert known.brokers_of("U") == {"a"}
    assert ("TBW102", False) not in sender.seen("route")


def test_uncreated_topic_uses_template_route_until_it_has_one(sender: ScriptedSender) -> None:
    sender.routes["TBW102"] = tuple(qs("a:0", "TBW102"))
    known = topics(sender)
    assert known.queues("New", SOON) == tuple(qs("a:0", "New"))
    sender.routes["TBW102"] = tuple(qs("a:0 b:0", "TBW102"))
    assert known.queues("New", SOON, refresh=True) == tuple(qs("a:0 b:0", "New"))
    sender.routes["New"] = tuple(qs("b:0-3", "New"))
    assert known.queues("New", SOON, refresh=True) == tuple(qs("b:0-3", "New"))
    del sender.routes["New"]
    assert known.queues("New", SOON, refresh=True) == tuple(qs("b:0-3", "New"))


def test_an_environment_sees_its_own_queues_only(sender: ScriptedSender) -> None:
    known = topics(sender, environment=Environment.of(2, 2))
    found = known.queues("T", SOON)
    assert names(list(found)) == "a:1 b:1"
    assert known.queues("T", SOON, refresh=True) is found
    with pytest.raises(OptionError, match="'environments' is 9"):
        topics(sender, environment=Environment.of(9, 9)).queues("T", SOON)


def test_environment_positions_count_queues_that_take_no_writes(sender: ScriptedSender) -> None:
    """Sorted, a:2 and a:3 lie before b:0: without them environment 3 would be b:0, which environment 5 reads."""
    sender.read_only = tuple(qs("a:2-3"))
    assert names(list(topics(sender, environment=Environment.of(5)).queues("T", SOON))) == "b:0"
    with pytest.raises(OptionError, match=r"owns T/a/2, none of which takes messages now"):
        topics(sender, environment=Environment.of(3)).queues("T", SOON)


def test_an_environment_that_counts_all_queues_makes_no_topic(sender: ScriptedSender) -> None:
    """Its queue would be one of the template's, and another environment's in the topic that comes to be."""
    sender.routes["TBW102"] = tuple(qs("a:0-3", "TBW102"))
    known = topics(sender, environment=Environment.of(2))
    with pytest.raises(RouteNotFound, match="no such topic"):
        known.queues("new", SOON)
    sender.routes["new"] = tuple(qs("b:0-3", "new"))
    assert names(list(known.queues("new", SOON, refresh=True))) == "b:1"


def test_an_environment_of_a_count_makes_topics(sender: ScriptedSender) -> None:
    sender.routes["TBW102"] = tuple(qs("a:0-3", "TBW102"))
    known = topics(sender, environment=Environment.of(2, 2))
    assert names(list(known.queues("new", SOON))) == "a:1 a:3"
    sender.routes["new"] = tuple(qs("b:0-3", "new"))
    assert names(list(known.queues("new", SOON, refresh=True))) == "b:1 b:3"


def test_an_environment_counts_the_queues_that_its_readers_count(
    sender: ScriptedSender, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that are only written to are nobody's: readers would count others."""
    monkeypatch.setattr(sender, "all_queues", lambda topic, deadline: tuple(qs("a:2-3 b:2-3")))
    sender.routes["T"] = tuple(qs("a:0-3 b:0-3"))
    assert names(list(topics(sender, environment=Environment.of(1)).queues("T", SOON))) == "a:2"
    monkeypatch.setattr(sender, "all_queues", lambda topic, deadline: ())
    with pytest.raises(OptionError, match="environment '2' owns none of T/a/0, "):
        topics(sender, environment=Environment.of(2)).queues("T", SOON)


def test_environment_queues_are_counted_once_per_process(
    sender: ScriptedSender,
) -> None:
    first, other = (topics(sender, environment=Environment.of(1)) for _ in range(2))
    assert names(list(first.queues("T", SOON))) == "a:0"
    sender.routes["T"] = tuple(qs("b:0-1"))  # broker a left the route, and b:0 is another environment's
    assert names(list(other.queues("T", SOON))) == "a:0"
    assert names(list(first.queues("T", SOON, refresh=True))) == "a:0"
    assert first.brokers_of("T") == {"a"}
    last = ScriptedSender(Time())
    assert names(list(topics(last, environment=Environment.of(4)).queues("T", SOON))) == "b:1"
    last.routes["T"] = tuple(qs("a:0-1"))  # which have no fourth
    assert names(list(topics(last, environment=Environment.of(4)).queues("T", SOON))) == "b:1"
    elsewhere = topics(ScriptedSender(Time(), "b:0-1"), environment=Environment.of(1))
    assert names(list(elsewhere.queues("T", SOON))) == "b:0"
    counted = topics(sender, environment=Environment.of(1, 2))
    assert names(list(counted.queues("T", SOON))) == "b:0"


def test_an_environment_uses_all_queues_of_the_delay_service(sender: ScriptedSender) -> None:
    sender.routes[INNER_TOPIC] = tuple(qs("a:0-1", INNER_TOPIC))
    for environment in (Environment.of(5), Environment.of(5, 5)):
        assert topics(sender, environment=environment).queues(INNER_TOPIC, SOON) == sender.routes[INNER_TOPIC]


def test_a_missing_topic_names_near_topics_once_for_many_sends(
    sender: ScriptedSender, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str | None] = []

    def nearest(error: RouteNotFound) -> RouteNotFound:
        asked.append(error.topic)
        return RouteNotFound(error.message, error.addr, error.broker_code, error.topic, remedy="Did you mean orders?")

    monkeypatch.setattr(sender, "with_similar_topics", nearest)
    known = topics(sender)
    sender.routes.clear()
    for topic in ("ordres", "ordres", "prcies"):
        with pytest.raises(RouteNotFound, match=r"knows no such topic.*Did you mean orders\?"):
            known.queues(topic, SOON)
    assert asked == ["ordres", "prcies"]
    sender.routes["closed"] = RouteNotFound("no queue of the topic is writable", topic="closed")
    with pytest.raises(RouteNotFound) as caught:
        known.queues("closed", SOON)
    assert (caught.value.remedy, asked) == (None, ["ordres", "prcies"])
