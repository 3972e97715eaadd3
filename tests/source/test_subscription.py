"""Which topics and queues the options mean, and why one of them is not there."""

from __future__ import annotations

import pytest

from rocketmq_spark import options as options_table
from rocketmq_spark.errors import OptionError, RouteNotFound
from rocketmq_spark.model import BrokerData, MessageQueue, QueueData, TopicRoute
from rocketmq_spark.source import subscription

A0, A1, B0 = MessageQueue("t", "a", 0), MessageQueue("t", "a", 1), MessageQueue("t", "b", 0)


def options(**given):
    found = {
        "nameServer": "h:1",
        **({} if given.keys() & {"assign", "subscribePattern"} else {"subscribe": "t"}),
        **given,
    }
    return options_table.parse(found).for_role("stream source")


def route(read=2, perm=6, addresses=None):
    brokers = {"a": BrokerData("a", "c", addresses or {0: "h:2"})}
    return TopicRoute("t", (QueueData("a", read, read, perm),), brokers)


LISTED = ["orders-eu", "orders-us", "prices", "%RETRY%orders-g", "%DLQ%orders-g", "orders-cluster", "TBW102"]


@pytest.mark.parametrize(
    ("pattern", "internal_too", "expected"),
    [
        ("orders-.*", False, ("orders-eu", "orders-us")),
        ("orders-e", False, ()),  # the whole name
        (".*orders-.*", True, ("orders-eu", "orders-us", "%RETRY%orders-g", "%DLQ%orders-g")),
        (".*", False, ("orders-eu", "orders-us", "prices")),
    ],
)
def test_a_pattern_means_topics_of_users(pattern, internal_too, expected):
    made = options(subscribePattern=pattern, includeInternal=internal_too)
    assert subscription.matching(made, LISTED, {"orders-cluster"}) == expected


@pytest.mark.parametrize(("internal_too", "more"), [(False, ("orders-us",)), (True, ("%DLQ%orders-g", "orders-us"))])
def test_topics_with_positions_are_asked_for_although_they_are_not_listed(internal_too, more):
    made = options(subscribePattern=".*orders.*", includeInternal=internal_too)
    known = ["orders-us", "orders-eu", "prices", "%DLQ%orders-g"]
    assert subscription.with_known(made, ("orders-eu",), known) == ("orders-eu", *more)
    assert subscription.with_known(made, ("orders-eu",), ["orders-eu"]) == ("orders-eu",)


def test_queues_that_are_read():
    assert subscription.readable(options(), route(), False) == [A0, A1]
    assigned = options(assign='{"t":{"a":[1]}}')
    assert subscription.readable(assigned, route(), False) == [A1]


def test_assigned_queues_that_are_away_are_an_error_at_a_start_only():
    assigned = options(assign='{"t":{"a":[1],"b":[0]}}')
    with pytest.raises(OptionError, match="option 'assign' names queues that do not exist: t/b/0"):
        subscription.readable(assigned, route(), False)
    assert subscription.readable(assigned, route(), True) == [A1]


def test_a_topic_without_read_permission():
    with pytest.raises(RouteNotFound, match="no read permission"):
        subscription.readable(options(), route(perm=2), False)
    assert subscription.readable(options(), route(perm=2), True) == []


@pytest.mark.parametrize(
    ("known", "queue", "reason"),
    [
        (None, A0, "the route does not name its broker"),
        (route(), B0, "the route does not name its broker"),
        (route(perm=2), A0, "no read permission"),
        (route(read=1), A1, "its broker does not read it any more"),
        (route(addresses={1: "h:3"}), A0, "its master is down, and the slave lacks messages"),
        (route(), A0, "its broker does not answer, or the options do not choose it"),
    ],
)
def test_why_a_queue_is_absent(known, queue, reason):
    assert subscription.why_absent(known, queue) == reason
    assert subscription.is_hidden(known, queue) == (reason == "its broker does not read it any more")
