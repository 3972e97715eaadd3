"""Option ``topicNames``: names with dots become names of RocketMQ wherever an option names a topic."""

from __future__ import annotations

import pickle

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rocketmq_spark.columnar.encode.properties import BadRows
from rocketmq_spark.errors import OptionError
from rocketmq_spark.model import MessageQueue
from rocketmq_spark.options import Options, parse
from rocketmq_spark.options.topic_names import TopicNames
from rocketmq_spark.producer.rows.routing import with_rocketmq_topics
from rocketmq_spark.spark.sink import exactly_once_checks
from rocketmq_spark.spark.source import checkpoint_identity
from rocketmq_spark.spark.source.checks import check_source

DOTTED, PLAIN = "db.shop.orders", "db_shop_orders"
QUEUE, RENAMED = MessageQueue(DOTTED, "b.1", 0), MessageQueue(PLAIN, "b.1", 0)
BY_QUEUE = f'{{"{DOTTED}":{{"b.1":{{"0":17}}}}}}'


def parsed(**options: str) -> Options:
    return parse({"nameServer": "h:1", "topicNames": "dotsToUnderscores", **options})


@pytest.mark.parametrize(
    ("option", "value", "expected"),
    [
        ("subscribe", f"{DOTTED},bills", (PLAIN, "bills")),
        ("assign", f'{{"{DOTTED}":{{"b.1":[0]}}}}', (RENAMED,)),
        ("topic", DOTTED, PLAIN),
        ("allowedTopics", f"bills,{DOTTED}", ("bills", PLAIN)),
        ("startingOffsets", BY_QUEUE, {RENAMED: 17}),
        ("startingOffsets", f'{{"{DOTTED}":"latest"}}', {PLAIN: -1}),
        ("startingOffsets", "earliest", "earliest"),
        ("endingOffsets", BY_QUEUE, {RENAMED: 17}),
        ("startingOffsetsByTimestamp", BY_QUEUE, {RENAMED: 17}),
        ("endingOffsetsByTimestamp", BY_QUEUE, {RENAMED: 17}),
        ("tags", f'{{"{DOTTED}":"a.b"}}', {PLAIN: "a.b"}),
        ("tags", "a.b", "a.b"),
        ("sql", f'{{"{DOTTED}":"x > 1.5"}}', {PLAIN: "x > 1.5"}),
        ("sql", "x > 1.5", "x > 1.5"),
        ("group", "billing.job", "billing.job"),
        ("subscribePattern", r"db\..*", r"db\..*"),
    ],
)
def test_options_that_name_topics_have_rocketmqs_names(option: str, value: str, expected: object) -> None:
    field = "".join(f"_{letter.lower()}" if letter.isupper() else letter for letter in option)
    assert getattr(parsed(**{option: value}), field) == expected
    exact = parse({"nameServer": "h:1", option: value})
    assert getattr(exact, field) == getattr(parsed(**{option: value, "topicNames": "EXACT"}), field)
    if value != expected and isinstance(expected, str):
        assert getattr(exact, field) == value


@pytest.mark.parametrize("option", ["subscribe", "allowedTopics"])
def test_two_names_of_one_topic_are_an_error(option: str) -> None:
    with pytest.raises(OptionError) as caught:
        parsed(**{option: "a.b,c,a_b"})
    assert caught.value.message == (
        f"option '{option}': topics 'a.b' and 'a_b' are both 'a_b' with option 'topicNames' dotsToUnderscores; "
        "rename one of them"
    )
    assert parse({"nameServer": "h:1", option: "a.b,c,a_b"})


def test_two_names_in_json_are_an_error() -> None:
    with pytest.raises(OptionError, match=r"option 'startingOffsets': topics 'a\.b' and 'a_b' are both 'a_b'"):
        parsed(startingOffsets='{"a.b":"earliest","a_b":{"x":{"0":1}}}')


def test_an_expression_is_not_renamed() -> None:
    with pytest.raises(
        OptionError, match="'topicNames' is 'dotsToUnderscores', which does not apply to option 'subscribePattern'"
    ):
        check_source(parsed(subscribePattern=r"db\..*"), "stream source")


def test_the_offset_log_has_rocketmqs_names() -> None:
    dotted = check_source(parsed(subscribe=DOTTED), "stream source")
    plain = check_source(parse({"nameServer": "h:1", "subscribe": PLAIN}), "stream source")
    assert checkpoint_identity.source_identity(dotted) == checkpoint_identity.source_identity(plain)
    assert checkpoint_identity.source_identity(dotted)["subscribe"] == [PLAIN]


def test_exactly_once_notes_the_ends_of_rocketmqs_topics() -> None:
    assert exactly_once_checks.written_topics(parsed(allowedTopics=f"bills,{DOTTED}").for_role("sink")) == [
        "bills",
        PLAIN,
    ]


def rows(*topics: str | None) -> pa.RecordBatch:
    return pa.RecordBatch.from_pydict(
        {"t": pa.array(topics, pa.string()), "body": [str(i) for i in range(len(topics))]}
    )


def test_the_column_has_rocketmqs_names() -> None:
    bad_rows = BadRows(0)
    names = TopicNames("dotsToUnderscores")
    found = with_rocketmq_topics(rows("a.b", None, "c", "a.b", ""), "t", names, bad_rows)
    assert found["t"].to_pylist() == ["a_b", None, "c", "a_b", ""]
    assert found["body"].to_pylist() == ["0", "1", "2", "3", "4"]
    assert not bad_rows.reasons_by_row()
    batch = rows("a.b", "a_b")
    assert with_rocketmq_topics(batch, "t", TopicNames("exact"), bad_rows) is batch


def test_rows_that_name_a_topic_in_two_ways_are_bad() -> None:
    """Also rows of another Arrow batch of the task, and rows that spell a topic in another way than ``allowedTopics``."""
    names = TopicNames("dotsToUnderscores", pickle.loads(pickle.dumps(parsed(allowedTopics="x.y,a.b"))).written_topics)
    for batch, bad in ((rows("a.b", "x.y"), set()), (rows("x.y", "a_b", None, "a_b"), {1, 3}), (rows("x_y"), {0})):
        bad_rows = BadRows(0)
        with_rocketmq_topics(batch, "t", names, bad_rows)
        assert {number for number, _ in bad_rows.reasons_by_row()} == bad
        assert all(reason.endswith("; rename one of them") for _, reason in bad_rows.reasons_by_row())


@given(st.lists(st.text("ab._-", min_size=1, max_size=4)))
def test_different_names_never_become_one(written: list[str]) -> None:
    names, renamed_to = TopicNames("dotsToUnderscores"), dict[str, str]()
    for name in written:
        try:
            renamed_to[name] = names.rocketmq_name(name)
        except ValueError:
            assert any(other != name and names.rocketmq_name(other) == name.replace(".", "_") for other in renamed_to)
    assert len(set(renamed_to.values())) == len(renamed_to)
    assert not any("." in name for name in renamed_to.values())
