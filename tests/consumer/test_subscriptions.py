from __future__ import annotations

import pytest

from rocketmq_spark.consumer.settings import Subscriptions, TopicFilter, checked_topic, parse_filter
from rocketmq_spark.errors import OptionError
from rocketmq_spark.model import NO_FILTER, Filter


@pytest.mark.parametrize(
    ("tags", "sql", "expected"),
    [
        (None, None, NO_FILTER),
        ("*", None, NO_FILTER),
        ("", None, NO_FILTER),
        (" * ", None, NO_FILTER),
        ("a || b", None, Filter("a || b")),
        (None, "a > 1", Filter("a > 1", "SQL92")),
    ],
)
def test_a_subscription_has_tags_or_sql_or_neither(tags, sql, expected):
    assert parse_filter(tags, sql) == expected


@pytest.mark.parametrize(
    ("tags", "sql", "text"),
    [
        ("a", "b", "at most one"),
        ("||", None, "expected '\\*', or one or several tags such as"),
        (" ", None, "tags are ' '; expected '\\*', or one or several tags such as"),
        ("\t || ", None, "expected '\\*', or one or several tags such as"),
        (None, " ", "sql is ' '; expected an SQL92 expression"),
        (b"a", None, "tags is b'a'; expected a str"),
        (["a", "b"], None, "tags is ..a', 'b'.; expected a str"),
        ("a || \udc80", None, r"tags are 'a || .udc80'; expected characters that can be sent"),
        (None, "a = '\udc80'", "sql is .*; expected characters that can be sent"),
    ],
)
def test_what_cannot_be_meant_is_said(tags, sql, text):
    with pytest.raises(OptionError, match=text):
        parse_filter(tags, sql)


def test_the_retry_topic_is_among_them_where_queues_are_shared() -> None:
    found = Subscriptions("g", True, lambda: 5)
    assert not found
    found.add("T", Filter("a"))
    assert found
    assert found.filters() == {"T": Filter("a"), "%RETRY%g": NO_FILTER}
    broadcasting = Subscriptions("g", False, lambda: 5)
    broadcasting.add("T", NO_FILTER)
    assert broadcasting.filters() == {"T": NO_FILTER}


def test_each_change_raises_version_of_its_topic_alone() -> None:
    found = Subscriptions("g", True, lambda: 5)

    def versions() -> dict[str, int]:
        return {topic: each.version_ms for topic, each in found.topic_filters().items()}

    assert versions() == {"%RETRY%g": 5}
    found.add("T", NO_FILTER)
    found.add("U", NO_FILTER)
    assert versions() == {"%RETRY%g": 5, "T": 6, "U": 7}
    found.touch("T")
    found.touch("gone")
    assert versions() == {"%RETRY%g": 5, "T": 8, "U": 7}
    found.remove("T")
    assert (found.get("T"), versions()) == (None, {"%RETRY%g": 5, "U": 7})
    found.add("T", Filter("a"))
    found.touch("%RETRY%g")
    assert versions() == {"%RETRY%g": 10, "T": 9, "U": 7}
    assert found.get("T") == TopicFilter(Filter("a"), 9, 9)


def test_what_is_not_subscribed_to_has_no_filter() -> None:
    found = Subscriptions("g", True, lambda: 5)
    found.add("T", Filter("a"))
    assert (found.filter("T"), found.filter("U")) == (Filter("a"), NO_FILTER)
    found.remove("T")
    assert found.filter("T") == NO_FILTER


def test_names_of_topics_are_checked() -> None:
    with pytest.raises(OptionError, match="topic is 'a b'; expected the name of a topic"):
        checked_topic("a b")
