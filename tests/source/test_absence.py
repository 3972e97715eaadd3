"""One line when queues go, one when they come back, whatever is asked between; a run to the end waits for them."""

from __future__ import annotations

import json

import pytest

from rocketmq_spark import session
from rocketmq_spark.base.codes import Request, Response
from rocketmq_spark.errors import RocketMQError
from rocketmq_spark.model import MessageQueue, QueueBounds
from rocketmq_spark.spark.source.waiting import UnavailableQueuesLog
from tests.mockbroker import NO_ROUTE, MockBroker, eventually, never, ok, refuse
from tests.reading import Run, positions
from tests.source.scripted import cluster, route, stats

STATS = Request.GET_TOPIC_STATS_INFO
A, B, C = (MessageQueue("t", broker, 0) for broker in "abc")
BOUNDS = {queue: QueueBounds(0, 1, 0) for queue in (A, B, C)}


def test_what_changes_is_told_once_with_the_reason(caplog):
    absence = UnavailableQueuesLog()
    reasons = {B: "no read permission", C: "the route does not name its broker"}
    for _ in range(3):
        absence.update([A, B, C], {A: BOUNDS[A]}, reasons.__getitem__)
    for _ in range(3):
        absence.update([A, B, C], {A: BOUNDS[A], B: BOUNDS[B]}, reasons.__getitem__)
    absence.update([A, B], BOUNDS, reasons.__getitem__)
    assert [record.getMessage() for record in caplog.records] == [
        "the stream waits for queues that it cannot read now: t/b/0 (no read permission); "
        "t/c/0 (the route does not name its broker)",
        "the stream can read these queues again: t/b/0",
        "the stream can read these queues again: t/c/0",
    ]


def test_a_queue_that_nobody_wants_any_more_goes_quietly(caplog):
    absence = UnavailableQueuesLog()
    absence.update([A, B], {A: BOUNDS[A]}, lambda _: "gone")
    absence.update([A], {A: BOUNDS[A]}, lambda _: "gone")
    absence.update([A], BOUNDS, lambda _: "gone")
    assert "again" not in caplog.text


def test_available_now_run_does_not_end_without_a_hanging_broker():
    """A stream would go on without it. What the broker said before is known, so nothing looks absent."""
    with MockBroker() as one, MockBroker({STATS: stats({B: (0, 100)})}) as hanging:
        one.on(STATS, stats({A: (5, 20)}))
        one.on(Request.GET_ROUTEINFO_BY_TOPIC, route({"a": {0: one.address}, "b": {0: hanging.address}}))
        run = Run(
            one.address, available_now=True, subscribe="t", startingOffsets="earliest", numRetries=0,
            requestTimeout="1s", readDeadline="50ms",
        )  # fmt: skip
        hanging.on(STATS, never)
        asked = len(hanging.seen(STATS))
        with pytest.raises(RocketMQError, match=r"no broker answers for .*t/b/0, which this run must"):
            eventually(lambda: run.latest() and len(hanging.seen(STATS)) > asked)
    session.close_all()


def test_available_now_ignores_pattern_topic_deleted_before_read():
    """There are no positions of it yet: only what the run has to read tells that it was there."""
    topics, new = ["t", "u"], MessageQueue("u", "a", 0)
    with MockBroker() as one:
        there = route({"a": {0: one.address}})
        listed = Request.GET_ALL_TOPIC_LIST_FROM_NAMESERVER
        one.on(listed, lambda _: ok(json.dumps({"topicList": topics}).encode()))
        one.on(Request.GET_BROKER_CLUSTER_INFO, cluster({"a": one}))
        one.on(Request.GET_ROUTEINFO_BY_TOPIC, lambda c: there if c.ext("topic") in topics else NO_ROUTE)
        gone = refuse(Response.TOPIC_NOT_EXIST, "no such topic")
        bounds = {"t": stats({A: (0, 9)}), "u": stats({new: (0, 5)})}
        one.on(Request.GET_TOPIC_STATS_INFO, lambda c: bounds[c.ext("topic")] if c.ext("topic") in topics else gone)
        begun = json.dumps({"topics": {"t": {"a": {"0": 3}}}, "v": 1})
        run = Run(
            one.address, begun, available_now=True, subscribePattern="t|u", numRetries=0, routeRefresh=0, readDeadline="1s",
        )  # fmt: skip
        topics.remove("u")
        assert positions(run.latest()) == {A: 9}
    session.close_all()
