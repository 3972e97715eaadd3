"""Whoever comes from Spark's Kafka source reads what a thing is called here."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from pyspark.sql.types import StructType

from rocketmq_spark import Consumer, Producer
from rocketmq_spark.columnar.decode.schema import BASIC_COLUMNS, columns_of, columns_of_schema
from rocketmq_spark.errors import OptionError
from rocketmq_spark.options import TABLE, names, parse
from rocketmq_spark.spark.sink import checks

OPTIONS = {row.name for row in TABLE}
PAGE = (Path(__file__).parents[1] / "docs" / "coming-from-kafka.md").read_text("utf-8")


@pytest.mark.parametrize("name", names.KAFKA_OPTIONS)
def test_an_option_of_kafka_names_options_that_there_are(name):
    with pytest.raises(OptionError) as caught:
        parse({name: "x"})
    assert f"option {name!r} is unknown: {names.KAFKA_OPTIONS[name]}" in str(caught.value)
    named = set(re.findall(r"'(\w+)'", names.KAFKA_OPTIONS[name]))
    assert named & OPTIONS
    assert named - OPTIONS <= {column.name for column in BASIC_COLUMNS} | checks.COLUMNS.keys()


def test_other_settings_of_its_clients_lead_to_the_page():
    with pytest.raises(OptionError, match=r"see docs/coming-from-kafka\.md"):
        parse({"kafka.metrics.num.samples": "5"})


@pytest.mark.parametrize("name", names.CLIENT_OPTIONS)
def test_hint_for_option_of_other_client_names_existing_options(name):
    found = names.CLIENT_OPTIONS[name]
    named = set(re.findall(r"'(\w+)'", found))
    assert named <= OPTIONS
    assert named or "bodies are bytes" in found or "there is no option" in found
    assert name not in {re.sub("[^a-z0-9]", "", spelt.lower()) for row in TABLE for spelt in (row.name, *row.aliases)}
    with pytest.raises(OptionError) as caught:
        parse({name: "x"})
    assert f"option {name!r} is unknown: {found}" in str(caught.value)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("maxRatePerPartition", "'maxOffsetsPerTrigger'"),
        ("spark.streaming.kafka.maxRatePerPartition", "'maxOffsetsPerTrigger'"),
        ("key.deserializer", "cast(body AS string)"),
        ("kafka.value.deserializer", "cast(body AS string)"),
        ("isolation.level", "after its commit only"),
        ("kafka.isolation.level", "after its commit only"),
        ("enable.idempotence", "'deliveryGuarantee' = exactly-once of the sink"),
        ("kafka.transactional.id", "'deliveryGuarantee' = exactly-once of the sink"),
        ("kafka.subscribe", "here it is option 'subscribe'"),
        ("kafka.topic", "here it is option 'topic'"),
    ],
)
def test_options_of_tutorials_have_their_answers(name, expected):
    with pytest.raises(OptionError) as caught:
        parse({"nameServer": "h:1", name: "x"})
    assert f"option {name!r} is unknown: " in str(caught.value)
    assert expected in str(caught.value)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("retries", "'send_timeout'"),
        ("max_retries", "'send_timeout'"),
        ("retry_times_when_send_failed", "'send_timeout'"),
        ("retryTimesWhenSendAsyncFailed", "'send_timeout'"),
        ("linger_ms", "'batch_max_delay'"),
        ("linger.ms", "'batch_max_delay'"),
        ("kafka.linger.ms", "'batch_max_delay'"),
        ("bootstrap_servers", "'name_server'"),
        ("group.id", "'group'"),
        ("auto_offset_reset", "'consume_from_where'"),
        ("auto.offset.reset", "'consume_from_where'"),
        ("consume_thread_max", "'consume_thread_min'"),
        ("endpoints", "'proxy_endpoint'"),
        ("key_serializer", "bodies are bytes"),
    ],
)
def test_keywords_of_other_clients_name_keywords(name, expected):
    """The nearest name misled: retries gave num_retries, which is for metadata, and linger_ms gave machine_rooms."""
    for make in (Producer, Consumer):
        with pytest.raises(OptionError) as caught:
            make(name_server="h:1", group="g", **{name: "1"})
        assert expected in str(caught.value)
        assert "did you mean" not in str(caught.value)
        assert "rocketmq-spark help" not in str(caught.value)


@pytest.mark.parametrize("name", ["auto.offset.reset", "kafka.auto.offset.reset"])
def test_where_its_consumers_begin(name):
    with pytest.raises(OptionError, match=r"the start of a new query is option 'startingOffsets'"):
        parse({name: "earliest"})


@pytest.mark.parametrize(
    ("option", "value"),
    [("assign", '{"t":[0,1]}'), ("startingOffsets", '{"t":{"0":17}}'), ("endingOffsets", '{"t":{"0":-1}}')],
)
def test_partitions_without_a_broker_are_refused_with_the_reason(option, value):
    with pytest.raises(
        OptionError, match=r"JSON such as .*: each queue is of a broker, so its number alone is not enough"
    ):
        parse({"nameServer": "h:1", option: value})


def test_kafka_names_ignore_case_and_typos_get_nearest_option():
    assert "'nameServer'" in (names.foreign_option_equivalent("Kafka.Bootstrap.Servers") or "")
    with pytest.raises(OptionError, match="did you mean 'subscribe'"):
        parse({"subscrib": "x"})


@pytest.mark.parametrize("name", names.KAFKA_SOURCE_COLUMNS)
def test_a_column_of_its_source(name):
    there = {column.name for column in BASIC_COLUMNS}
    assert name not in {column.lower() for column in there}
    assert set(re.findall(r"'(\w+)'", names.KAFKA_SOURCE_COLUMNS[name])) <= there
    hint = re.escape(names.KAFKA_SOURCE_COLUMNS[name])
    with pytest.raises(OptionError, match=hint):
        columns_of(parse({"nameServer": "h:1", "subscribe": "t", "columns": name}))
    with pytest.raises(OptionError, match=hint):
        columns_of_schema(BASIC_COLUMNS, StructType().add(name, "string"))


@pytest.mark.parametrize("name", names.KAFKA_SINK_COLUMNS)
def test_a_column_of_its_sink(name):
    assert set(re.findall(r"'(\w+)'", names.KAFKA_SINK_COLUMNS[name])) <= checks.COLUMNS.keys() | OPTIONS
    _, problems = checks.check_columns(StructType().add("body", "string").add(name, "string"), "t")
    assert problems == [
        f"column {name!r} is unknown; the sink takes {', '.join(checks.COLUMNS)}; "
        f"for Kafka's {name!r} there is {names.KAFKA_SINK_COLUMNS[name]}, or option 'kafkaColumns' = true; "
        "select only columns of the sink: select(['body'])"
    ]


def rows(heading):
    """The first two cells of each row below a heading of docs/coming-from-kafka.md."""
    part = PAGE.partition(f"## {heading}\n")[2].partition("\n## ")[0]
    return re.findall(r"^\| `([\w.]+)` \| (?:`(\w+)`|–) \|", part, re.MULTILINE)


def test_kafka_page_names_existing_options_and_matches_hints():
    source, sink = rows("Options of the source"), rows("Options and columns of the sink")
    assert len(source) >= 25
    assert {here for _, here in source} <= OPTIONS
    assert {here for _, here in sink} <= OPTIONS | checks.COLUMNS.keys()
    for name, here in source:
        if name != here:
            assert f"'{here}'" in names.KAFKA_OPTIONS[name.lower()], name


def test_the_page_has_every_column_of_kafka():
    source = rows("RocketMQ's own columns")
    assert {name.lower() for name, _ in source} == names.KAFKA_SOURCE_COLUMNS.keys() | {"topic"}
    assert {here for _, here in source if here} <= {column.name for column in BASIC_COLUMNS}
