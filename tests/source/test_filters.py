"""Which topics and queues the options mean, which filter belongs to a topic, and what is refused before anything is asked."""

from __future__ import annotations

import pytest

from rocketmq_spark import options as options_table
from rocketmq_spark import session
from rocketmq_spark.clock import Deadline
from rocketmq_spark.errors import OptionError, RouteNotFound
from rocketmq_spark.model import NO_FILTER, BrokerData, Filter, MessageQueue, QueueData, TopicRoute
from rocketmq_spark.source import filters
from rocketmq_spark.source.offsets import Offsets


def options(name_server="h:1", **given):
    return options_table.parse({"nameServer": name_server, "subscribe": "t,u", **given}).for_role("batch source")


@pytest.mark.parametrize(
    ("given", "of_t", "of_u"),
    [
        ({}, NO_FILTER, NO_FILTER),
        ({"tags": "*"}, NO_FILTER, NO_FILTER),
        ({"tags": "b||  a || b"}, Filter("a || b", "TAG"), Filter("a || b", "TAG")),
        ({"tags": '{"t": "a", "u": "*"}'}, Filter("a", "TAG"), NO_FILTER),
        ({"sql": "x > 5"}, Filter("x > 5", "SQL92"), Filter("x > 5", "SQL92")),
        ({"sql": '{"u": "x > 5"}'}, NO_FILTER, Filter("x > 5", "SQL92")),
    ],
)
def test_of_topic(given, of_t, of_u):
    found = options(**given)
    assert (filters.of_topic(found, "t"), filters.of_topic(found, "u")) == (of_t, of_u)


def test_no_filter_is_false():
    assert not NO_FILTER
    assert Filter("a")


def test_two_kinds_exclude_each_other():
    with pytest.raises(OptionError, match="options 'tags' and 'sql' exclude each other"):
        filters.check(options(tags="a", sql="x > 5"))


@pytest.mark.parametrize("tags", ["||", " || ||", '{"t": "||"}'])
def test_tags_that_are_none(tags):
    with pytest.raises(OptionError, match=r"expected tags separated by \|\|"):
        filters.check(options(tags=tags))


@pytest.mark.parametrize("tags", ["*", "a", "a||b", '{"t": "a", "u": "*"}'])
def test_tags_that_are_fine(tags):
    filters.check(options(tags=tags))


def test_offsets_remember_the_filter():
    assert filters.recorded(options()) == filters.recorded(options(tags="*")) == {}
    assert filters.recorded(options(tags="a || b")) == {"tags": "a || b"}
    assert filters.recorded(options(sql='{"t":"x > 5"}')) == {"sql": {"t": "x > 5"}}


def validate(broker_cluster, topic, sql):
    found = options(broker_cluster.name_server, subscribe=topic, sql=sql)
    session.routes(found).get(topic)
    filters.validate(
        session.offsets(found), found, [MessageQueue(topic, "broker-a", 0)], Deadline.after(10), lambda _: False
    )


def test_a_broker_compiles_the_expression(broker_cluster, topic):
    validate(broker_cluster, topic, "a > 5 AND region IN ('eu', 'us')")


def test_an_expression_that_a_broker_refuses(broker_cluster, topic):
    """Sent with a pull it would be answered with every message."""
    with pytest.raises(OptionError, match="option 'sql' is 'a >'; the broker refuses it") as caught:
        validate(broker_cluster, topic, "a >")
    assert caught.value.topic == topic
    assert "Encountered" in str(caught.value), str(caught.value)


# --- topics and queues


A0, A1, B0 = MessageQueue("t", "a", 0), MessageQueue("t", "a", 1), MessageQueue("t", "b", 0)


def meaning(**given):
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
    made = meaning(subscribePattern=pattern, includeInternal=internal_too)
    assert filters.matching(made, LISTED, {"orders-cluster"}) == expected


@pytest.mark.parametrize(("internal_too", "more"), [(False, ("orders-us",)), (True, ("%DLQ%orders-g", "orders-us"))])
def test_topics_with_positions_are_asked_for_although_they_are_not_listed(internal_too, more):
    made = meaning(subscribePattern=".*orders.*", includeInternal=internal_too)
    known = ["orders-us", "orders-eu", "prices", "%DLQ%orders-g"]
    assert filters.with_known(made, ("orders-eu",), known) == ("orders-eu", *more)
    assert filters.with_known(made, ("orders-eu",), ["orders-eu"]) == ("orders-eu",)


def test_queues_that_are_read():
    assert filters.readable(meaning(), route(), False) == [A0, A1]
    assigned = meaning(assign='{"t":{"a":[1]}}')
    assert filters.readable(assigned, route(), False) == [A1]


def test_assigned_queues_that_are_away_are_an_error_at_a_start_only():
    assigned = meaning(assign='{"t":{"a":[1],"b":[0]}}')
    with pytest.raises(OptionError, match="option 'assign' names queues that do not exist: t/b/0"):
        filters.readable(assigned, route(), False)
    assert filters.readable(assigned, route(), True) == [A1]


def test_a_topic_without_read_permission():
    with pytest.raises(RouteNotFound, match="no read permission"):
        filters.readable(meaning(), route(perm=2), False)
    assert filters.readable(meaning(), route(perm=2), True) == []


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
    assert filters.why_absent(known, queue) == reason
    assert filters.is_hidden(known, queue) == (reason == "its broker does not read it any more")


class Answers:
    def is_proxy(self, topic, broker_name, deadline):
        return False


def test_an_expression_for_a_batch_topic_is_refused():
    """Brokers would compare it with the properties of whole batches."""
    with pytest.raises(OptionError, match=r"t is a batch topic.*Filter with option 'tags'"):
        filters.validate(
            Answers(), options(sql="a > 5"), [MessageQueue("t", "b", 0)], Deadline.after(1), lambda _: True
        )


NAMED = {"environment": "dev", "environments": '{"dev": [0], "test": {"broker-a": [1]}}'}
SUFFIX = {"environment": "dev", "environmentMode": "suffix"}
QUEUE, OTHER, DEAD = (MessageQueue(topic, "broker-a", number) for topic, number in (("t", 0), ("t", 1), ("%DLQ%g", 3)))


@pytest.mark.parametrize(
    ("given", "record"),
    [(NAMED, {"environment": "dev"}), (SUFFIX, {"environment": "dev", "environmentMode": "suffix"})],
)
def test_offsets_remember_the_environment(given, record):
    found = options(**given)
    assert filters.recorded(found) == record
    filters.check_environment(found, Offsets({OTHER: 1}, filter=record))


@pytest.mark.parametrize(
    ("given", "offsets", "problem"),
    [
        (
            {},
            Offsets({QUEUE: 1}, filter={"environment": "dev"}),
            "of environment 'dev', and this query of no environment",
        ),
        (
            NAMED,
            Offsets({QUEUE: 1}, filter={"environment": "test"}),
            "of environment 'test', and this query of env",
        ),
        (NAMED, Offsets({QUEUE: 1, OTHER: 1}), "of no environment, and this query of environment 'dev'"),
        ({"environment": "1"}, Offsets({QUEUE: 1}), "of no environment, and this query of environment '1'"),
        ({"environment": "1"}, Offsets({QUEUE: 1}, environment={QUEUE: 2}), "and this query of environment '1'"),
        (SUFFIX, Offsets({QUEUE: 1}), "and this query of environment 'dev' with 'suffix'"),
        (
            NAMED,
            Offsets({QUEUE: 1}, filter=filters.recorded(options(**SUFFIX))),
            "of environment 'dev' with 'suffix', and",
        ),
    ],
)
def test_a_checkpoint_of_another_environment_is_refused(given, offsets, problem):
    with pytest.raises(OptionError, match=problem):
        filters.check_environment(options(**given), offsets)


@pytest.mark.parametrize(
    ("given", "offsets"),
    [
        ({}, Offsets({QUEUE: 1, OTHER: 2})),
        (SUFFIX, Offsets({})),
        (NAMED, Offsets({QUEUE: 1, DEAD: 1})),  # positions from before the environment was written down
        ({"environment": "2"}, Offsets({QUEUE: 1}, environment={QUEUE: 2})),
    ],
)
def test_a_checkpoint_of_the_same_environment_is_taken(given, offsets):
    filters.check_environment(options(**given), offsets)
