"""Queues that their broker does not read any more, on a scripted one; with real brokers in tests/live/growth."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from rocketmq_spark.base.clock import Deadline
from rocketmq_spark.base.codes import Request, Response
from rocketmq_spark.errors import OptionError, RocketMQError, RouteNotFound
from rocketmq_spark.model import MessageQueue
from rocketmq_spark.spark.source import removed_queues
from tests.mockbroker import close, never, ok, refuse, route
from tests.source.test_bounds_reader import again, bounds_reader, queues, scripted

__all__ = ["scripted"]


def configs(broker, views=1):
    """How often it was asked for the topic's configuration, but for the ``views``, which ask what kind of topic it is."""
    return len(broker.seen(Request.GET_TOPIC_CONFIG)) - views


def read_queues(count):
    config = {"topicName": "t", "readQueueNums": count, "writeQueueNums": count, "perm": 6}
    return ok(json.dumps(config).encode())


@pytest.mark.parametrize(
    ("told", "gone"),
    [
        (read_queues(1), {MessageQueue("t", "broker-a", 1): 30}),
        (read_queues(2), {}),
        (refuse(Response.REQUEST_CODE_NOT_SUPPORTED, "no such request"), {MessageQueue("t", "broker-a", 1): 30}),
        (refuse(Response.NO_PERMISSION, "no"), {MessageQueue("t", "broker-a", 1): 30}),
        (refuse(Response.SYSTEM_BUSY, "busy"), {}),
    ],
)
def test_queue_missing_from_route_is_gone_if_its_broker_says_so(scripted, told, gone):
    """A name server that lags behind tells the route of before the topic was widened."""
    one = bounds_reader(scripted.address)
    view = one.fetch_complete_view()
    scripted.on(Request.GET_TOPIC_CONFIG, told)
    scripted.on(Request.GET_MAX_OFFSET, ok(offset=30))
    assert one.removed_queue_ends(queues("t", 2), view) == gone
    assert one.removed_queue_ends(queues("t", 1), view) == {}


def test_broker_is_asked_rarely_about_queues_it_does_not_read(scripted, monkeypatch):
    """Again with another route or connection: the topic may have been widened, or its store may be another."""
    monkeypatch.setattr(removed_queues, "_ANSWER_VALID_S", 3600.0)
    one = bounds_reader(scripted.address)
    view = one.fetch_complete_view()
    scripted.on(Request.GET_TOPIC_CONFIG, read_queues(1))
    scripted.on(Request.GET_MAX_OFFSET, ok(offset=30))
    _, second, third = queues("t", 3)

    def asked(views=1):
        return configs(scripted, views), len(scripted.seen(Request.GET_MAX_OFFSET))

    for _ in range(3):
        assert one.removed_queue_ends([second], view) == {second: 30}
    assert asked() == (1, 1)
    assert one.removed_queue_ends([second, third], view) == {second: 30, third: 30}
    assert asked() == (2, 3)
    scripted.on(Request.GET_MAX_OFFSET, ok(offset=31))
    scripted.on(Request.GET_ROUTEINFO_BY_TOPIC, route(1, {"broker-a": scripted.address}, perm=4))
    again(one)
    assert one.removed_queue_ends([second], view) == {second: 31}
    scripted.on(Request.SEARCH_OFFSET_BY_TIMESTAMP, close)
    with pytest.raises(RocketMQError):
        one.offset_reader().search_offsets(dict.fromkeys(queues("t", 1), 1), Deadline.after(30))
    again(one)
    assert one.removed_queue_ends([second], view) == {second: 31}
    assert asked(views=3) == (4, 5)


def test_an_end_that_was_told_before_does_not_last(scripted, monkeypatch):
    """Producers may go on to write to a queue that is not read."""
    monkeypatch.setattr(removed_queues, "_ANSWER_VALID_S", 0.0)
    one = bounds_reader(scripted.address)
    view, (_, second) = one.fetch_complete_view(), queues("t", 2)
    scripted.on(Request.GET_TOPIC_CONFIG, read_queues(1))
    for end in (30, 500):
        scripted.on(Request.GET_MAX_OFFSET, ok(offset=end))
        assert one.removed_queue_ends([second], view) == {second: end}


def test_broker_answer_that_it_reads_its_queues_is_cached(scripted, monkeypatch):
    monkeypatch.setattr(removed_queues, "_ANSWER_VALID_S", 3600.0)
    one = bounds_reader(scripted.address)
    view = one.fetch_complete_view()
    scripted.on(Request.GET_TOPIC_CONFIG, read_queues(2))
    for _ in range(3):
        assert one.removed_queue_ends(queues("t", 2), view) == {}
    assert configs(scripted) == 1


@pytest.mark.parametrize("how", ["timed_out_brokers", "brokers_without_master"])
def test_absent_broker_is_not_asked_about_its_unread_queues(scripted, how):
    one = bounds_reader(scripted.address)
    view = replace(one.fetch_complete_view(), **{how: frozenset({"broker-a"})})
    assert one.removed_queue_ends(queues("t", 2), view) == {}
    assert configs(scripted) == 0


def test_hanging_broker_query_for_unread_queues_delays_few_plans(scripted):
    one = bounds_reader(scripted.address)
    view = one.fetch_complete_view()
    scripted.on(Request.GET_TOPIC_CONFIG, never)
    for _ in range(5):
        assert one.removed_queue_ends(queues("t", 2), view) == {}
    assert configs(scripted) < 5


def test_static_topics_are_refused(scripted):
    body = {"topicQueueMappingByBroker": {"broker-a": {"topic": "t", "totalQueues": 1, "bname": "broker-a"}}}
    scripted.on(Request.GET_ROUTEINFO_BY_TOPIC, route(1, {"broker-a": scripted.address}, **body))
    with pytest.raises(OptionError, match="topic 't' is a static topic"):
        bounds_reader(scripted.address).fetch_complete_view()


def test_a_topic_that_nobody_may_read(scripted):
    scripted.on(Request.GET_ROUTEINFO_BY_TOPIC, route(1, {"broker-a": scripted.address}, perm=2))
    with pytest.raises(RouteNotFound, match="no read permission"):
        bounds_reader(scripted.address).fetch_complete_view()


def test_queues_that_the_strategy_leaves_out_are_named_once(broker_cluster, make_topic, caplog):
    topic = make_topic(queues=3)
    given = {"allocationStrategy": "config", "allocationConfig": f'{{"{topic}":{{"broker-a":[0]}}}}'}
    one = bounds_reader(broker_cluster.name_server, subscribe=topic, **given)
    for _ in range(3):
        assert list(one.fetch_complete_view().bounds) == queues(topic, 1)
    lines = [
        record.getMessage() for record in caplog.records if "gives these queues to no partition" in record.getMessage()
    ]
    assert lines == [
        f"the allocation strategy gives these queues to no partition: {topic}/broker-a/1, {topic}/broker-a/2"
    ]
