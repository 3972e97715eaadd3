"""One clear error for each mistake, by text: what a user reads in a traceback of Spark."""

from __future__ import annotations

import re

import pytest

from tests.fix_spark import finish
from tests.spark.pipelines import read, read_stream, write

NOWHERE = "127.0.0.1:1"


def text_of(act) -> str:
    """The last line with a code of ours, without Spark's wrapping."""
    with pytest.raises(Exception) as caught:
        act()
    text = str(caught.value)
    found = re.findall(r"\[ROCKETMQ_[A-Z_]+\].*?(?=\n\S|\n *SQLSTATE|\Z)", text, re.DOTALL)
    assert found, text
    return " ".join(found[-1].split())


@pytest.fixture
def orders(broker_cluster):
    broker_cluster.create_topic("orders-of-errors", 2)
    return broker_cluster.name_server


def stream(spark, tmp_path, **options):
    options = {"startingOffsets": "earliest", **options}
    frame = read_stream(spark, options.pop("nameServer"), options.pop("subscribe"), **options)
    finish(
        frame.writeStream.format("noop").option("checkpointLocation", str(tmp_path)).trigger(availableNow=True).start()
    )


@pytest.mark.parametrize("kind", ["batch", "stream", "sink"])
def test_unknown_topic(spark, orders, tmp_path, kind):
    text = text_of(
        {
            "batch": lambda: read(spark, orders, "orders-of-error").count(),
            "stream": lambda: stream(spark, tmp_path, nameServer=orders, subscribe="orders-of-error"),
            "sink": lambda: write(spark.sql("select 'b' body"), orders, topic="orders-of-error"),
        }[kind]
    )
    assert text.startswith("[ROCKETMQ_ROUTE_NOT_FOUND] the name server knows no such topic")
    assert f"at {orders}, topic orders-of-error" in text
    assert "Did you mean orders-of-errors" in text  # other tests may have similar topics
    assert "rocketmq-spark topic create orders-of-error" in text


@pytest.mark.parametrize("kind", ["batch", "stream", "sink"])
def test_unreachable_name_server(spark, tmp_path, kind):
    options = {"numRetries": 0, "nameServer": NOWHERE}
    text = text_of(
        {
            "batch": lambda: read(spark, NOWHERE, "orders", numRetries=0).count(),
            "stream": lambda: stream(spark, tmp_path, subscribe="orders", **options),
            "sink": lambda: write(spark.sql("select 'b' body"), NOWHERE, topic="orders", sendTimeout="1s"),
        }[kind]
    )
    assert text.startswith("[ROCKETMQ_CONNECTION_LOST] no name server answers: ")
    assert f"at {NOWHERE}" in text
    assert "Connection refused" in text
    assert "Check option 'nameServer' and that the name server runs" in text


def test_all_bad_options_are_told_at_once(spark, orders):
    text = text_of(
        lambda: read(spark, orders, "orders", pullDepth="x", failOnDataLoss="perhaps", subscrib="y", tls="j")
    )
    assert text.startswith("[ROCKETMQ_OPTION]")
    assert "option 'pullDepth' is 'x'; expected a whole number from 1 to 1024" in text
    assert "option 'failOnDataLoss' is 'perhaps'; expected one of fail, warn, ignore" in text
    assert "option 'tls' is 'j'; expected true or false" in text
    assert "option 'subscrib' is unknown; did you mean 'subscribe'?" in text


def test_bad_offset_json(spark, orders):
    text = text_of(lambda: read(spark, orders, "orders", startingOffsets='{"orders":'))
    assert (
        """option 'startingOffsets' is '{"orders":'; expected JSON such as {"orders":{"broker-a":{"0":17,"1":-2}}}"""
        in text
    )
    assert "line 1 column 11" in text


@pytest.mark.parametrize(
    ("offsets", "expected"),
    [
        ('{"orders-of-errors":{"broker-a":{"0":0}}}', "must name every queue; it lacks orders-of-errors/broker-a/1"),
        (
            '{"orders-of-errors":{"broker-a":{"0":0,"1":0,"7":0}}}',
            "names queues that are not read: orders-of-errors/broker-a/7",
        ),
        (
            '{"orders-of-errors":{"broker-a":{"0":0,"1":99}}}',
            "orders-of-errors/broker-a/1 is 99, but the queue ends at 0",
        ),
    ],
)
def test_offsets_that_do_not_fit_the_topic(spark, orders, offsets, expected):
    text = text_of(lambda: read(spark, orders, "orders-of-errors", startingOffsets=offsets).count())
    assert text.startswith("[ROCKETMQ_OFFSET] option 'startingOffsets'")
    assert expected in text


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"startingOffsets": "latest"}, "a batch that starts at the end reads nothing"),
        ({"maxOffsetsPerTrigger": 5}, "option 'maxOffsetsPerTrigger' does not belong to a batch source"),
        ({"sendTimeout": "3s"}, "option 'sendTimeout' does not belong to a batch source; it is for: sink, producer"),
    ],
)
def test_options_in_the_wrong_place(spark, orders, options, expected):
    assert expected in text_of(lambda: read(spark, orders, "orders-of-errors", **options).count())


def test_missing_options(spark, orders):
    assert "option 'nameServer' is required" in text_of(lambda: spark.read.format("rocketmq").load().count())
    nothing_to_read = spark.read.format("rocketmq").option("nameServer", orders)
    assert "'subscribe', 'subscribePattern' and 'assign'" in text_of(lambda: nothing_to_read.load().count())


def test_a_wrong_schema_of_a_sink_is_told_at_once(spark, orders):
    frame = spark.sql("select 1 body, 'x' tagz, 2 tags, array(1) keys, map('a', 1) properties")
    text = text_of(lambda: write(frame, orders, topic="orders-of-errors"))
    assert text.startswith("[ROCKETMQ_OPTION]")
    assert "column 'body' is int; expected string or binary" in text
    assert "column 'tagz' is unknown" in text
    assert "column 'tags' is int; expected string" in text
    assert "column 'keys' is array<int>; expected string or array<string>" in text
    assert "column 'properties' is map<string,int>; expected map<string,string>" in text


def test_a_sink_needs_a_body_and_a_topic(spark, orders):
    text = text_of(lambda: write(spark.sql("select 'x' tags"), orders))
    assert "column 'body' (or 'value') is missing" in text
    assert "there is neither option 'topic' nor a column 'topic'" in text


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        (["if(id = 3, null, 'b') body"], "row 3: body is null"),
        (
            ["'b' body", "map(if(id = 3, 'TAGS', 'x'), 'y') properties"],
            "row 3: a property has a name that is RocketMQ's own",
        ),
    ],
    ids=["null", "reserved"],
)
def test_a_bad_row_is_named_and_nothing_of_its_batch_is_sent(spark, broker_cluster, topic, row, expected):
    """All reasons are in tests/encode/test_encoder.py."""
    frame = spark.range(0, 10, 1, 1).selectExpr(*row)
    text = text_of(lambda: write(frame, broker_cluster.name_server, topic=topic))
    assert text.startswith("[ROCKETMQ_MESSAGE_REFUSED] 1 rows")
    assert expected in text
    assert not any(b.max_offset for b in broker_cluster.admin.describe_topic(topic).values())


def test_topics_are_not_overwritten(spark, orders):
    frame = spark.sql("select 'x' body").write.format("rocketmq").option("nameServer", orders).option("topic", "t")
    assert 'Write with .mode("append")' in text_of(lambda: frame.mode("overwrite").save())


def test_a_schema_that_is_not_ours(spark, orders):
    frame = spark.read.format("rocketmq").option("nameServer", orders).option("subscribe", "orders-of-errors")
    text = text_of(lambda: frame.schema("body binary, price double, tags int").load().count())
    assert "the schema names 'price'" in text
    assert "the schema has 'tags' as int; it is string" in text
