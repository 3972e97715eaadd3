"""Whoever comes from Spark's Kafka source reads what a thing is called here."""

from __future__ import annotations

import re

import pytest
from pyspark.sql.types import StructType

from rocketmq_spark import kafka_names
from rocketmq_spark.decode.schema import BASIC, chosen, columns_of
from rocketmq_spark.errors import OptionError
from rocketmq_spark.options import TABLE, parse
from rocketmq_spark.sink import columns

OPTIONS = {row.name for row in TABLE}


@pytest.mark.parametrize("name", kafka_names.OPTIONS)
def test_an_option_of_kafka_names_options_that_there_are(name):
    with pytest.raises(OptionError) as caught:
        parse({name: "x"})
    assert f"option {name!r} is unknown: {kafka_names.OPTIONS[name]}" in str(caught.value)
    named = set(re.findall(r"'(\w+)'", kafka_names.OPTIONS[name]))
    assert named & OPTIONS
    assert named - OPTIONS <= {column.name for column in BASIC} | columns.TABLE.keys()


def test_other_settings_of_its_clients_lead_to_the_page():
    with pytest.raises(OptionError, match=r"docs/coming-from-kafka\.md"):
        parse({"kafka.linger.ms": "5"})


def test_names_are_matched_without_case_and_others_are_left_to_the_nearest():
    assert "'nameServer'" in (kafka_names.of_option("Kafka.Bootstrap.Servers") or "")
    with pytest.raises(OptionError, match="did you mean 'subscribe'"):
        parse({"subscrib": "x"})


@pytest.mark.parametrize("name", kafka_names.SOURCE_COLUMNS)
def test_a_column_of_its_source(name):
    there = {column.name for column in BASIC}
    assert name not in {column.lower() for column in there}
    assert set(re.findall(r"'(\w+)'", kafka_names.SOURCE_COLUMNS[name])) <= there
    hint = re.escape(kafka_names.SOURCE_COLUMNS[name])
    with pytest.raises(OptionError, match=hint):
        columns_of(parse({"nameServer": "h:1", "subscribe": "t", "columns": name}))
    with pytest.raises(OptionError, match=hint):
        chosen(BASIC, StructType().add(name, "string"))


@pytest.mark.parametrize("name", kafka_names.SINK_COLUMNS)
def test_a_column_of_its_sink(name):
    assert set(re.findall(r"'(\w+)'", kafka_names.SINK_COLUMNS[name])) <= columns.TABLE.keys() | OPTIONS
    _, problems = columns.look(StructType().add("body", "string").add(name, "string"), "t")
    assert problems == [
        f"column {name!r} is unknown; the sink takes {', '.join(columns.TABLE)}; "
        f"for Kafka's {name!r} there is {kafka_names.SINK_COLUMNS[name]}"
    ]
