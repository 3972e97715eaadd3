"""Streams and batches of ``subscribePattern`` whose topics do not exist yet, or not any more; on a scripted broker."""

from __future__ import annotations

import json

import pytest

from rocketmq_spark import session
from rocketmq_spark.base.codes import Request, Response
from rocketmq_spark.errors import BrokerNotFound, CheckpointMismatch, OffsetError, OptionError, RouteNotFound
from rocketmq_spark.model import MessageQueue, OffsetRange
from tests.mockbroker import NO_ROUTE, MockBroker, ok, refuse, topic_config
from tests.reading import Run, canonical, plan, positions, ranges_of
from tests.source.scripted import cluster, route, stats

A = MessageQueue("family-a", "broker-a", 0)
PATTERN = {
    "subscribe": None,
    "subscribePattern": "family-.*",
    "numRetries": 0,
    "requestTimeout": "5s",
    "routeRefresh": 0,
}


@pytest.fixture
def broker():
    """Name server and broker-a in one, with one topic that does not match."""
    with MockBroker() as one:
        one.on(Request.GET_BROKER_CLUSTER_INFO, cluster({"broker-a": one}))
        expose(one, "other")
        yield one
    session.close_all()


def expose(broker, *topics, end=20):
    there = route({"broker-a": {0: broker.address}})
    broker.on(Request.GET_ALL_TOPIC_LIST_FROM_NAMESERVER, ok(json.dumps({"topicList": topics}).encode()))
    broker.on(Request.GET_ROUTEINFO_BY_TOPIC, lambda call: there if call.ext("topic") in topics else NO_ROUTE)

    def bounds(call):
        topic = call.ext("topic")
        known = stats({MessageQueue(topic, "broker-a", 0): (0, end)})
        return known if topic in topics else refuse(Response.TOPIC_NOT_EXIST, "no such topic")

    broker.on(Request.GET_TOPIC_STATS_INFO, bounds)


@pytest.mark.parametrize(
    "start",
    [{"startingOffsets": "earliest"}, {"startingOffsets": "latest"}, {"startingTimestamp": 5},
     {"startingOffsets": "committed", "group": "g"}],
)  # fmt: skip
def test_a_new_query_waits_for_the_first_topic(broker, start, caplog):
    run = Run(broker.address, **PATTERN, **start)
    assert run.positions == {}
    assert run.latest() == run.offset
    assert "no topic matches option 'subscribePattern' 'family-.*' yet" in caplog.text
    assert run.plan(run.offset) == []
    expose(broker, "other", "family-a")
    end = run.ahead()
    assert ranges_of(run.plan(end)) == [[OffsetRange(A, 0, 20)]]
    again = Run(broker.address, run.offset, **PATTERN)
    assert ranges_of(again.plan(end)) == [[OffsetRange(A, 0, 20)]]


def test_what_began_in_a_batch_that_was_not_logged_is_read_again(broker):
    """With asynchronous progress tracking a restart repeats all batches since the last logged one, as one batch."""
    b = A._replace(topic="family-b")
    expose(broker, "family-a")
    run = Run(broker.address, startingOffsets="earliest", **PATTERN)
    logged = run.offset = run.ahead()
    for end, count in ((26, 32), (29, 6)):  # only the last one of these batches is logged
        expose(broker, "family-a", "family-b", end=end)
        run.offset = run.ahead(count)
    again = Run(broker.address, logged, **PATTERN)
    assert ranges_of(again.plan(run.offset)) == [[OffsetRange(A, 20, 29), OffsetRange(b, 0, 29)]]
    session.close_all()
    broker.on(
        Request.GET_TOPIC_STATS_INFO, lambda call: stats({MessageQueue(call.ext("topic"), "broker-a", 0): (3, 29)})
    )
    again = Run(broker.address, logged, failOnDataLoss="fail", **PATTERN)
    assert ranges_of(again.plan(run.offset)) == [[OffsetRange(A, 20, 29), OffsetRange(b, 3, 29)]]
    again = Run(
        broker.address, canonical({**json.loads(logged), "topics": {"family-a": {"broker-a": {"0": 40}}}}), **PATTERN
    )
    assert ranges_of(again.plan(run.offset)) == [[OffsetRange(A, 3, 29), OffsetRange(b, 3, 29)]]


def test_first_batch_before_latest_offsets_reads_nothing_older(broker):
    """It was logged and not finished. A restart at ``latest`` finds a later start, and the logged end says that it was empty."""
    expose(broker, "family-a")
    logged = Run(broker.address, startingOffsets="latest", **PATTERN).offset
    expose(broker, "family-a", end=30)
    session.close_all()
    again = Run(broker.address, startingOffsets="latest", **PATTERN)
    assert (positions(logged), again.positions) == ({A: 20}, {A: 30})
    assert again.plan(logged) == []


@pytest.mark.parametrize("ended", [False, True])
def test_a_query_that_waits_keeps_its_namespace(broker, ended):
    """Nothing is logged in another one, which would shut both out. So it is after all topics were deleted."""
    run = Run(broker.address, namespace="dev", **PATTERN, startingOffsets="latest")
    topics = ["prod%family-a", *(["dev%family-a"] if ended else [])]
    expose(broker, *topics)
    waiting = run.ahead() if ended else run.offset
    if ended:
        waiting = canonical({**json.loads(waiting), "topics": {}, "marks": {}})
    with pytest.raises(CheckpointMismatch, match="of namespace 'dev', and this query of namespace 'prod'"):
        Run(broker.address, waiting, namespace="prod", **PATTERN).latest()
    expose(broker, "prod%family-a", "dev%family-a")
    again = Run(broker.address, waiting, namespace="dev", **PATTERN)
    assert list(positions(again.ahead())) == [A]


@pytest.mark.parametrize("available_now", [False, True])
def test_a_query_whose_topics_were_all_deleted_starts_again(broker, available_now):
    expose(broker, "family-a")
    given = {**PATTERN, "failOnDataLoss": "ignore", "available_now": available_now}
    first = Run(broker.address, startingOffsets="earliest", **given)
    first.offset = first.ahead()
    expose(broker, "other")
    again = Run(broker.address, first.offset, **given)
    again.offset = again.ahead()
    assert again.positions == {}
    third = Run(broker.address, again.offset, **given)
    assert third.latest() == third.offset
    expose(broker, "family-a", end=7)
    fourth = Run(broker.address, again.offset, **given)
    assert ranges_of(fourth.plan(fourth.ahead())) == [[OffsetRange(A, 0, 7)]]


def test_a_run_to_the_end_of_no_topic_ends(broker):
    run = Run(broker.address, available_now=True, startingOffsets="earliest", **PATTERN)
    expose(broker, "family-a")
    assert run.latest() == run.offset


def test_a_start_waits_for_a_topic_as_long_as_topic_wait(broker):
    """A stream starts after it; a batch fails, because it has nothing to wait for."""
    listed = [ok(json.dumps({"topicList": names}).encode()) for names in (["other"], ["other", "family-a"])]
    for begin in (
        lambda: Run(broker.address, startingOffsets="earliest", topicWait="20s", **PATTERN).positions == {A: 0},
        lambda: plan(broker.address, topicWait="20s", **PATTERN) == [[OffsetRange(A, 0, 20)]],
    ):
        expose(broker, "family-a")
        broker.on(Request.GET_ALL_TOPIC_LIST_FROM_NAMESERVER, [listed[0], listed[0], listed[1]])
        assert begin()


@pytest.mark.parametrize("offset", [None, '{"reads":{"clusters":["c"]},"topics":{},"v":1}'], ids=["new", "restart"])
def test_available_now_run_reads_the_awaited_topic(broker, offset):
    """Its ends are those of the topics that exist when the wait is over."""
    listed = [ok(json.dumps({"topicList": names}).encode()) for names in (["other"], ["other", "family-a"])]
    expose(broker, "family-a")
    broker.on(Request.GET_ALL_TOPIC_LIST_FROM_NAMESERVER, [listed[0]] * 4 + [listed[1]])
    run = Run(broker.address, offset, available_now=True, startingOffsets="earliest", topicWait="20s", **PATTERN)
    assert positions(run.latest()) == {A: 20}


@pytest.mark.parametrize("offset", [None, '{"reads":{"clusters":["c"]},"topics":{},"v":1}'], ids=["new", "restart"])
def test_available_now_run_waits_once_for_a_topic(broker, offset):
    """It ends without one. A first start has waited already when Spark asks for the end."""
    run = Run(broker.address, offset, available_now=True, topicWait="600ms", **PATTERN)
    for waits in (offset is not None, False):
        before = len(broker.seen(Request.GET_ALL_TOPIC_LIST_FROM_NAMESERVER))
        assert run.latest() == run.offset
        looks = len(broker.seen(Request.GET_ALL_TOPIC_LIST_FROM_NAMESERVER)) - before
        assert (looks > 3) == waits, looks


def test_a_batch_of_no_topic_is_an_error(broker):
    with pytest.raises(RouteNotFound, match=r"no topic matches option 'subscribePattern' 'family-\.\*'.*'topicWait'"):
        plan(broker.address, **PATTERN)


def test_starting_offsets_of_nonexistent_queues_are_an_error(broker):
    run = Run(broker.address, startingOffsets={"family-a": {"broker-a": {"0": 3}}}, **PATTERN)
    with pytest.raises(OffsetError, match="names queues that are not read: family-a/broker-a/0"):
        run.latest()


def test_topics_are_unknown_while_no_broker_is_registered(broker):
    """A start with ``latest`` would take them for new ones, and read all of their messages, when the broker is back."""
    broker.on(Request.GET_BROKER_CLUSTER_INFO, cluster({}))
    broker.on(Request.GET_ALL_TOPIC_LIST_FROM_NAMESERVER, ok(b'{"topicList":[]}'))
    for begin in (lambda: Run(broker.address, **PATTERN), lambda: plan(broker.address, **PATTERN)):
        with pytest.raises(BrokerNotFound, match="no broker is registered"):
            begin()


def test_brokers_check_sql_of_the_first_topic_that_comes_later(broker):
    run = Run(broker.address, sql="a >", startingOffsets="earliest", **PATTERN)
    assert run.latest() == run.offset
    broker.on(Request.CHECK_CLIENT_CONFIG, refuse(Response.SUBSCRIPTION_PARSE_FAILED, "cannot parse"))
    broker.on(Request.GET_TOPIC_CONFIG, topic_config())
    expose(broker, "family-a")
    with pytest.raises(OptionError, match="option 'sql' is 'a >'; the broker rejects it"):
        run.ahead()


def test_wait_for_a_first_topic_rarely_asks_name_servers(broker):
    run = Run(broker.address, **{**PATTERN, "routeRefresh": "30s"})
    asked = len(broker.seen(Request.GET_ALL_TOPIC_LIST_FROM_NAMESERVER))
    for _ in range(5):
        assert run.latest() == run.offset
    assert len(broker.seen(Request.GET_ALL_TOPIC_LIST_FROM_NAMESERVER)) <= asked + 2
