"""Which filter belongs to a topic, and what is refused before anything is asked."""

from __future__ import annotations

import pytest

from rocketmq_spark import options as options_table
from rocketmq_spark import session
from rocketmq_spark.clock import Deadline
from rocketmq_spark.errors import OptionError
from rocketmq_spark.model import NO_FILTER, Filter, MessageQueue
from rocketmq_spark.source import filters


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
    filters.validate(session.offsets(found), found, [MessageQueue(topic, "broker-a", 0)], Deadline.after(10))


def test_a_broker_compiles_the_expression(broker_cluster, topic):
    validate(broker_cluster, topic, "a > 5 AND region IN ('eu', 'us')")


def test_an_expression_that_a_broker_refuses(broker_cluster, topic):
    """Sent with a pull it would be answered with every message."""
    with pytest.raises(OptionError, match="option 'sql' is 'a >'; the broker refuses it") as caught:
        validate(broker_cluster, topic, "a >")
    assert caught.value.topic == topic
    assert "Encountered" in str(caught.value), str(caught.value)
