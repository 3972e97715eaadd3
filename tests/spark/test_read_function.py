"""``read_rocketmq``: the rows of the format as a function, also for PySpark without data sources in Python."""

from __future__ import annotations

import time
from types import SimpleNamespace

import pytest

from rocketmq_spark import read_rocketmq
from rocketmq_spark.errors import OffsetError, OptionError
from tests.reading import feed
from tests.spark import pipelines
from tests.spark.pipelines import holds_bodies

FULL = {"metadata": "full", "propertyColumns": "n:bigint,when:timestamp", "badMessage": "null"}


@pytest.fixture
def kinds(rocketmq, topic):
    """A topic of messages with values for all columns, and of messages with a body alone."""
    now_ms = int(time.time() * 1000)
    feed(rocketmq, topic, 20)
    feed(rocketmq, topic, 20, tags="vip", keys=["k1", "k2"], properties={"n": "7", "when": str(now_ms), "é": "ü"})
    return topic


def test_rows_and_columns_are_those_of_the_format(spark, rocketmq, kinds):
    expected = pipelines.read(spark, rocketmq.name_server, kinds, **FULL)
    found = read_rocketmq(
        spark,
        rocketmq.name_server,
        subscribe=kinds,
        metadata="full",
        property_columns={"n": "bigint", "when": "timestamp"},
        bad_message="null",
        num_partitions=2,
    )
    assert found.rdd.getNumPartitions() == 2
    assert found.schema == expected.schema
    rows = [frame.orderBy("queueId", "queueOffset").collect() for frame in (found, expected)]
    assert rows[0] == rows[1]
    assert len(rows[0]) == 40


def test_options_in_camel_case_and_chosen_columns(spark, rocketmq, kinds):
    found = read_rocketmq(
        spark,
        nameServer=rocketmq.name_server,
        subscribe=[kinds],
        columns="body,tags",
        tags="vip",
        maxRecordsPerPartition=3,
    )
    assert found.columns == ["body", "tags"]
    assert [row["tags"] for row in found.collect()] == ["vip"] * 20


def test_every_action_reads_what_was_there_at_the_call(spark, rocketmq, topic):
    sent = feed(rocketmq, topic, 10)
    found = read_rocketmq(spark, rocketmq.name_server, subscribe=topic)
    feed(rocketmq, topic, 10)
    for _ in range(2):
        holds_bodies(found, sent)


def test_an_empty_topic_has_no_rows_and_all_columns(spark, rocketmq, topic):
    found = read_rocketmq(spark, rocketmq.name_server, subscribe=topic)
    assert found.count() == 0
    assert found.schema == pipelines.read(spark, rocketmq.name_server, topic).schema


def test_wrong_options_are_the_errors_of_the_format(spark, rocketmq, topic):
    with pytest.raises(OptionError, match="none is given"):
        read_rocketmq(spark, rocketmq.name_server)
    with pytest.raises(OptionError, match="option 'starting_offset' is unknown; did you mean 'starting_offsets'"):
        read_rocketmq(spark, rocketmq.name_server, subscribe=topic, starting_offset="earliest")
    with pytest.raises(OptionError, match="option 'max_offsets_per_trigger' does not belong to a batch source"):
        read_rocketmq(spark, rocketmq.name_server, subscribe=topic, max_offsets_per_trigger=3)
    feed(rocketmq, topic, 8, queues=[0])
    offsets = {topic: {"broker-a": {str(i): 7 if i == 0 else -2 for i in range(8)}}}
    ends = {topic: {"broker-a": {str(i): 3 if i == 0 else -1 for i in range(8)}}}
    with pytest.raises(OffsetError, match="the start is after the end"):
        read_rocketmq(spark, rocketmq.name_server, subscribe=topic, starting_offsets=offsets, ending_offsets=ends)


def test_without_a_spark_context_the_error_names_the_format(rocketmq, topic):
    with pytest.raises(OptionError, match="needs a SparkContext") as caught:
        read_rocketmq(SimpleNamespace(), rocketmq.name_server, subscribe=topic)
    assert 'spark.read.format("rocketmq")' in str(caught.value)
