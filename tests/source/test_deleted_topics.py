"""Queries whose loss of a deleted topic was accepted: they start again, however often, and read the topic if it is created again.

The end that is logged after the loss has no positions of the topic, but it says that the query reads it.
"""

from __future__ import annotations

import json

import pytest

from rocketmq_spark.base.codes import Request, Response
from rocketmq_spark.errors import DataLossError, RouteNotFound
from rocketmq_spark.model import MessageQueue, OffsetRange
from rocketmq_spark.spark.source.offsets import Offsets
from tests.mockbroker import MockBroker, eventually, ok, refuse
from tests.reading import Run, positions, ranges_of
from tests.source.scripted import cluster, route, stats
from tests.source.test_repeated_batches import QUEUES, QUICK, ROUTE, broker, expose, log

__all__ = ["broker"]

T, U = ([queue for queue in QUEUES if queue.topic == topic] for topic in "tu")
SOON = {**QUICK, "readDeadline": "5s"}
OPTIONS = {
    "subscribe": SOON,
    "assign": {**SOON, "subscribe": None, "assign": json.dumps({topic: {"broker-a": [0, 1, 2, 3]} for topic in "tu"})},
    "environment": {**SOON, "environment": "1", "environments": "1"},
    "pattern": {**SOON, "subscribe": None, "subscribePattern": "t|u"},
}


@pytest.fixture(params=OPTIONS)
def chosen(request):
    return {**OPTIONS[request.param], "failOnDataLoss": "warn"}


BY_NAME = {**SOON, "failOnDataLoss": "warn"}


def has(broker, t=None, u=None):
    """Each queue of ``t`` ends there, and each of ``u``; None is a topic that does not exist."""
    there = {topic: end for topic, end in (("t", t), ("u", u)) if end is not None}
    expose(broker, {queue: (0, there[queue.topic]) for queue in QUEUES if queue.topic in there})
    listed = ok(json.dumps({"topicList": sorted(there)}).encode())
    broker.on(Request.GET_ALL_TOPIC_LIST_FROM_NAMESERVER, listed)


def topics(end):
    return {queue.topic for queue in positions(end)}


def survived(broker, options):
    """The end of a batch after which ``u`` was deleted, and that of the next one, which accepted the loss."""
    has(broker, t=20, u=20)
    run = Run(broker.address, startingOffsets="earliest", **options)
    first = run.latest()
    run.plan(first)
    has(broker, t=30)
    run.offset = first
    return first, run.ahead()


@pytest.mark.parametrize("available_now", [False, True])
def test_a_query_starts_again_after_it_accepted_the_loss(broker, chosen, available_now):
    _, end = survived(broker, chosen)
    assert topics(end) == {"t"}
    for count in (30, 40, 50):
        has(broker, t=count)
        again = Run(broker.address, end, available_now=available_now, **chosen)
        if count > 30:
            end = again.latest()
        assert again.latest() == end if count == 30 else positions(end) == dict.fromkeys(T, count)


def test_a_topic_created_again_while_the_query_is_down_is_new(broker, chosen, caplog):
    _, end = survived(broker, chosen)
    has(broker, t=30, u=5)
    run = Run(broker.address, end, **chosen)
    assert ranges_of(run.plan(run.latest())) == [[OffsetRange(queue, 0, 5) for queue in U]]
    assert "topics that are not in the checkpoint start at their first offset: u" in caplog.text


def test_a_topic_created_again_while_the_query_runs_is_new(broker, chosen):
    _, end = survived(broker, chosen)
    run = Run(broker.address, end, **chosen)
    assert run.latest() == end
    has(broker, t=30, u=5)
    assert ranges_of(run.plan(run.ahead())) == [[OffsetRange(queue, 0, 5) for queue in U]]


def test_restarts_follow_batch_0_without_its_deleted_topic(broker, chosen):
    has(broker, t=20, u=20)
    end = Run(broker.address, startingOffsets="earliest", **chosen).latest()
    has(broker, t=20)
    run = Run(broker.address, **chosen)
    run.plan(end)
    run.offset = end
    end = run.latest()
    assert topics(end) == {"t"}
    for _ in range(2):
        assert Run(broker.address, end, **chosen).latest() == end


@pytest.mark.parametrize("more", [20, 30])
def test_a_batch_that_dropped_a_topic_is_repeated(broker, chosen, more):
    has(broker, t=20, u=20)
    run = Run(broker.address, startingOffsets="earliest", **chosen)
    run.offset = run.latest()
    run.plan(run.offset)
    has(broker, t=more)
    end = run.ahead()
    again = Run(broker.address, run.offset, **chosen)
    assert ranges_of(again.plan(end)) == ([[OffsetRange(queue, 20, 30) for queue in T]] if more > 20 else [])
    again.offset = end
    assert again.latest() == end
    assert Run(broker.address, end, **chosen).latest() == end


@pytest.mark.parametrize("left", ["", "t"])
def test_batch_0_that_dropped_topics_is_repeated(broker, chosen, left):
    """They are deleted between the start of the query and the end of its first batch."""
    has(broker, t=20, u=20)
    run = Run(broker.address, startingOffsets="latest", **chosen)
    has(broker, **dict.fromkeys(left, 20))
    end = run.ahead()
    assert topics(end) == {*left}
    again = Run(broker.address, **chosen)
    assert again.plan(end) == []
    again.offset = end
    assert again.latest() == end
    has(broker, t=20, u=5)
    assert topics(again.ahead()) == {"t", "u"}


def unlogged(broker, options, dropped):
    """With asynchronous progress ``u`` begins in a batch that is not logged; the next one is, which perhaps dropped ``u``."""
    has(broker, t=20, u=20)
    start = log(dict.fromkeys(T, 10))
    run = Run(broker.address, start, **options)
    run.offset = run.latest()
    run.plan(run.offset)
    has(broker, t=30, u=None if dropped else 30)
    end = run.ahead()
    assert "start" not in json.loads(end)
    assert topics(end) == ({"t"} if dropped else {"t", "u"})
    has(broker, t=30)
    return start, end


@pytest.mark.parametrize("dropped", [False, True])
def test_a_topic_that_began_in_an_unlogged_batch_is_known(broker, chosen, dropped):
    start, end = unlogged(broker, chosen, dropped)
    again = Run(broker.address, start, **chosen)
    assert ranges_of(again.plan(end)) == [[OffsetRange(queue, 10, 30) for queue in T]]
    again.offset = end
    assert topics(again.latest()) == {"t"}


def test_a_topic_that_began_in_an_unlogged_batch_is_a_loss(broker):
    start, end = unlogged(broker, BY_NAME, dropped=False)
    with pytest.raises(DataLossError, match="topic deleted"):
        Run(broker.address, start, **SOON).plan(end)


def test_a_broker_that_never_had_the_topic_may_be_away(broker):
    """Its positions left the offsets, so nothing depends on whether another broker has it now."""
    _, end = survived(broker, BY_NAME)
    away = type("Away", (), {"address": "127.0.0.1:1"})
    broker.on(Request.GET_BROKER_CLUSTER_INFO, cluster({"broker-a": broker, "broker-b": away}))
    try:
        assert Run(broker.address, end, **BY_NAME).latest() == end
    finally:
        broker.on(Request.GET_BROKER_CLUSTER_INFO, cluster({"broker-a": broker}))


def test_a_name_server_that_still_names_the_deleted_topic(broker):
    _, end = survived(broker, BY_NAME)
    broker.on(ROUTE, route({"broker-a": {0: broker.address}}, queues=4))
    assert Run(broker.address, end, **BY_NAME).latest() == end


@pytest.mark.parametrize("logged", [False, True])
def test_a_topic_that_never_existed_is_an_error(broker, logged):
    has(broker, t=20)
    offset = None
    if logged:
        run = Run(broker.address, startingOffsets="earliest", **{**BY_NAME, "subscribe": "t"})
        offset = run.latest()
    for _ in range(2):
        with pytest.raises(RouteNotFound, match="rocketmq-spark topic create u"):
            Run(broker.address, offset, **BY_NAME).latest()


def test_a_topic_that_left_the_subscription_must_exist_again(broker):
    has(broker, t=20, u=20)
    end = Run(broker.address, startingOffsets="earliest", **BY_NAME).latest()
    has(broker, t=30)
    alone = {**BY_NAME, "subscribe": "t"}
    end = Run(broker.address, end, **alone).latest()
    with pytest.raises(RouteNotFound, match="topic u"):
        Run(broker.address, end, **BY_NAME).latest()


def test_an_end_of_an_earlier_release_is_continued(broker):
    """It does not say what the query reads by name. With nothing new it stays as it is; the next batch says it."""
    has(broker, t=20, u=20)
    older = log(dict.fromkeys(QUEUES, 20))
    assert Run(broker.address, older, **BY_NAME).latest() == older
    has(broker, t=30)
    end = Run(broker.address, older, **BY_NAME).latest()
    assert topics(end) == {"t"}
    assert json.loads(end)["reads"]["subscribe"] == ["t", "u"]
    assert Run(broker.address, end, **BY_NAME).latest() == end


def test_the_order_of_topics_makes_no_difference(broker):
    has(broker, t=20, u=20)
    one, other = (
        Run(broker.address, startingOffsets="earliest", **{**BY_NAME, "subscribe": text}).latest()
        for text in ("t,u", "u,t,u")
    )
    assert one == other


# --- on one broker only


AWAY = MessageQueue("t", "broker-b", 0)


@pytest.fixture
def second(broker):
    """broker-b, which is up; the route of ``t`` names broker-a only, and the query has read ``t`` on both."""
    has(broker, t=120)
    with MockBroker() as server:
        broker.on(Request.GET_BROKER_CLUSTER_INFO, cluster({"broker-a": broker, "broker-b": server}))
        server.on(Request.GET_TOPIC_STATS_INFO, refuse(Response.TOPIC_NOT_EXIST))
        yield server


def both_read(broker, available_now=False, **given):
    logged = Offsets({T[0]: 100, AWAY: 100}, newest_store_ms={T[0]: 1000, AWAY: 1000}).to_json()
    text = json.dumps(logged, separators=(",", ":"))
    options = {**SOON, "subscribe": "t", **given}
    return Run(broker.address, text, available_now=available_now, **options)


@pytest.mark.parametrize("available_now", [False, True])
def test_a_topic_deleted_on_a_broker_without_route_is_a_loss(broker, second, available_now):
    with pytest.raises(DataLossError, match=r"t/broker-b/0 from offset 100 on \(topic deleted\)"):
        both_read(broker, available_now).ahead()
    run = both_read(broker, available_now, failOnDataLoss="warn")
    assert AWAY not in positions(run.ahead())


def test_a_broker_without_route_that_has_the_topic_is_waited_for(broker, second):
    second.on(Request.GET_TOPIC_STATS_INFO, stats({AWAY: (0, 100)}))
    assert positions(both_read(broker).ahead())[AWAY] == 100


def test_a_broker_that_is_gone_is_waited_for(broker, second):
    broker.on(Request.GET_BROKER_CLUSTER_INFO, cluster({"broker-a": broker}))
    run = both_read(broker)
    assert positions(run.ahead())[AWAY] == 100
    assert not second.seen(Request.GET_TOPIC_STATS_INFO)


def test_a_broker_that_left_the_route_is_asked_seldom(broker, second):
    second.on(Request.GET_TOPIC_STATS_INFO, stats({AWAY: (0, 100)}))
    run = both_read(broker)
    run.offset = run.ahead()
    asked, polls = len(second.seen(Request.GET_TOPIC_STATS_INFO)), len(broker.seen(Request.GET_TOPIC_STATS_INFO))
    eventually(lambda: run.latest() and len(broker.seen(Request.GET_TOPIC_STATS_INFO)) > polls + 3)
    assert len(second.seen(Request.GET_TOPIC_STATS_INFO)) <= asked + 1


@pytest.mark.parametrize("silent", ["name server", "broker"])
def test_a_server_that_hangs_delays_polls_seldom(broker, second, silent, monkeypatch):
    """Its answer would only say that the topic is gone on a broker without a route."""
    if silent == "name server":
        broker.on(Request.GET_BROKER_CLUSTER_INFO, lambda call: None)
    else:
        second.on(Request.GET_TOPIC_STATS_INFO, lambda call: None)
    run = both_read(broker, requestTimeout="1s")
    run.offset = run.ahead()
    server, code = (
        (broker, Request.GET_BROKER_CLUSTER_INFO) if silent == "name server" else (second, Request.GET_TOPIC_STATS_INFO)
    )
    eventually(lambda: run.latest() and server.seen(code))
    asked, polls = len(server.seen(code)), len(broker.seen(Request.GET_TOPIC_STATS_INFO))
    eventually(lambda: run.latest() and len(broker.seen(Request.GET_TOPIC_STATS_INFO)) > polls + 8)
    assert len(server.seen(code)) <= asked + 1
    assert AWAY in positions(run.offset)
