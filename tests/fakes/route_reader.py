"""Routes of one topic, ``t``, with two queues on one broker."""

from __future__ import annotations

from rocketmq_spark import ports
from rocketmq_spark.base.codes import Perm
from rocketmq_spark.model import BrokerData, MessageQueue, QueueData, TopicRoute
from tests.fakes.ports import Fake

QUEUES = [MessageQueue("t", "broker-a", i) for i in range(2)]
ROUTE = TopicRoute(
    "t",
    (QueueData("broker-a", 2, 2, int(Perm.READ | Perm.WRITE)),),
    {"broker-a": BrokerData("broker-a", "c", {0: "a:1"})},
)


def route_reader() -> Fake:
    return Fake(
        ports.RouteReader,
        get=lambda topic, *how: ROUTE,
        refresh=lambda topics, *how: frozenset(),
        address=lambda name, *how: "a:1",
        topics=lambda: ["t"],
        cluster=lambda: ROUTE.brokers,
    )
