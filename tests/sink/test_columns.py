"""Which DataFrames can be written: each column in each type that it may have, and everything wrong in one error."""

from __future__ import annotations

import pytest

from rocketmq_spark.spark.sink.checks import COLUMNS, check_columns
from tests.schemas import struct


@pytest.mark.parametrize(
    ("ddl", "found"),
    [
        ("body string", {"body": "body"}),
        ("body binary", {"body": "body"}),
        ("value binary", {"body": "value"}),
        ("Body binary, TAGS string", {"body": "Body", "tags": "TAGS"}),
        ("body binary, keys string", {"body": "body", "keys": "keys"}),
        ("body binary, keys array<string>", {"body": "body", "keys": "keys"}),
        ("body binary, properties map<string,string>", {"body": "body", "properties": "properties"}),
        (
            "body binary, queueId int, brokerName string, shardingKey string",
            {"body": "body", "queueid": "queueId", "brokername": "brokerName", "shardingkey": "shardingKey"},
        ),
        (
            "body binary, delayLevel tinyint, delayMs int, deliverAt timestamp, flag smallint",
            {
                "body": "body",
                "delaylevel": "delayLevel",
                "delayms": "delayMs",
                "deliverat": "deliverAt",
                "flag": "flag",
            },
        ),
    ],
)
def test_names_are_found_in_any_case(ddl, found):
    assert check_columns(struct(ddl), "t") == (found, [])


def test_a_topic_column_or_the_option():
    assert check_columns(struct("topic string, body binary"), None) == ({"topic": "topic", "body": "body"}, [])
    assert check_columns(struct("body binary"), None)[1] == ["there is neither option 'topic' nor a column 'topic'"]


@pytest.mark.parametrize(
    ("ddl", "problem"),
    [
        ("tags string", "column 'body' (or 'value') is missing; it becomes the message's body"),
        ("body int", "column 'body' is int; expected string or binary"),
        ("value array<binary>", "column 'value' is array<binary>; expected string or binary"),
        ("body binary, value binary", "column 'value' is there twice"),
        ("body binary, topic int", "column 'topic' is int; expected string"),
        ("body binary, tags array<string>", "column 'tags' is array<string>; expected string"),
        ("body binary, keys array<int>", "column 'keys' is array<int>; expected string or array<string>"),
        (
            "body binary, properties map<string,int>",
            "column 'properties' is map<string,int>; expected map<string,string>",
        ),
        ("body binary, properties string", "column 'properties' is string; expected map<string,string>"),
        ("body binary, delayMs string", "column 'delayMs' is string; expected bigint"),
        ("body binary, deliverAt bigint", "column 'deliverAt' is bigint; expected timestamp"),
        ("body binary, queueId bigint", "column 'queueId' is bigint; expected int"),
        ("body binary, brokerName string", "column 'brokerName' needs a column 'queueId'"),
        (
            "body binary, msgId string",
            f"column 'msgId' is unknown; the sink takes {', '.join(COLUMNS)}; select only columns of the sink: select(['body'])",
        ),
        (
            "id int, Value binary, city string, tags string",
            f"columns 'id', 'city' are unknown; the sink takes {', '.join(COLUMNS)}; "
            "select only columns of the sink: select(['Value', 'tags'])",
        ),
    ],
)
def test_one_problem(ddl, problem):
    assert check_columns(struct(ddl), "t")[1] == [problem]


def test_all_problems_are_found_at_once():
    problems = check_columns(struct("tags int, keyz string, properties string"), None)[1]
    assert len(problems) == 5
    for part in (
        "'tags' is int",
        "'keyz' is unknown",
        "'properties' is string",
        "'body' (or 'value')",
        "option 'topic'",
    ):
        assert any(part in problem for problem in problems)


def test_a_column_of_the_wrong_type_is_not_called_missing_too():
    assert check_columns(struct("body int, topic int"), None)[1] == [
        "column 'body' is int; expected string or binary",
        "column 'topic' is int; expected string",
    ]


@pytest.mark.parametrize("kind", ["string", "int", "bigint"])
def test_the_row_id_may_be_any_column(kind):
    found, problems = check_columns(struct(f"body binary, rowNumber {kind}"), "t", row_id="rownumber")
    assert (found, problems) == ({"body": "body", "messageid": "rowNumber"}, [])


@pytest.mark.parametrize(
    ("ddl", "problem"),
    [
        ("body binary", "option 'messageId' is 'id', but no column of the DataFrame has that name"),
        (
            "body binary, id double",
            "column 'id' is double; expected string or bigint, since option 'messageId' names it",
        ),
        (
            "body binary, id int, ID int",
            "option 'messageId' is 'id', but several columns of the DataFrame have that name",
        ),
    ],
)
def test_a_row_id_that_is_none(ddl, problem):
    assert check_columns(struct(ddl), "t", row_id="id")[1] == [problem]


@pytest.mark.parametrize(
    ("ddl", "selector", "problem"),
    [
        ("body binary", "column", "queueSelector 'column' needs a column 'queueId'"),
        ("body binary", "hash", "queueSelector 'hash' needs a column 'shardingKey'"),
        ("body binary, queueId int", "random", "column 'queueId' has no effect with queueSelector 'random'"),
    ],
)
def test_columns_and_the_selector(ddl, selector, problem):
    assert check_columns(struct(ddl), "t", selector)[1] == [problem]
