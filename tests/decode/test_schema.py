"""The columns of the source: exactly what Spark expects, for every choice of columns."""

from __future__ import annotations

import pickle
from dataclasses import replace

import pyarrow as pa
import pytest
from pyspark.sql.pandas.types import to_arrow_schema

from rocketmq_spark import options as options_table
from rocketmq_spark.columnar.decode.decoder import Decoder
from rocketmq_spark.columnar.decode.schema import (
    BASIC_COLUMNS,
    DECODE_ERROR,
    FULL_COLUMNS,
    arrow_schema,
    columns_of,
    columns_of_schema,
    ddl,
)
from rocketmq_spark.errors import OptionError
from tests.decode.fetching import QUEUES, one, stored, text
from tests.schemas import struct

BASIC_NAMES = [column.name for column in BASIC_COLUMNS]


def options(**given):
    return options_table.parse({"nameServer": "h:1", "subscribe": "t", **given}).for_role("batch source")


def test_the_columns_of_the_contract():
    assert ddl() == (
        "topic string, brokerName string, queueId int, queueOffset bigint, body binary, tags string, keys array<string>, "
        "bornTimestamp timestamp, storeTimestamp timestamp, msgId string, properties map<string,string>"
    )


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"metadata": "full"},
        {"columns": "msgId,body,topic"},
        {"includeProperties": "none"},
        {
            "propertyColumns": "a:bigint, when:timestamp, d:date, f:float, b:boolean, n:int, x:double, s:string, raw:binary"
        },
    ],
)
def test_each_batch_has_the_schema_that_spark_expects(given):
    """Spark compares the first batch of a task only."""
    found = options(**given)
    columns = columns_of(found)
    expected = to_arrow_schema(struct(ddl(columns)), timezone="UTC")
    assert arrow_schema(columns).equals(expected)
    decoder = Decoder(QUEUES, columns, found.include_properties)
    examples = [
        one(),
        one(stored()),
        one(stored(b"b", text(TAGS="t", KEYS="k", UNIQ_KEY="u", a="7"))),
        one(*(stored(b"b", text(a="x"), queue_offset=i) for i in range(50))),
        one(stored(properties=b"odd"), stored(born=(bytes(16), 1), sys_flag=1, body=b"")),
    ]
    for fetched in examples:
        assert decoder(fetched).schema.equals(expected)


def test_the_help_of_metadata_names_the_columns_that_it_adds():
    (row,) = (row for row in options_table.TABLE if row.name == "metadata")
    assert row.help == f"`full` adds {', '.join(column.name for column in FULL_COLUMNS)}"


def test_columns_come_in_schema_order():
    assert [c.name for c in columns_of(options(columns="msgid, Body"))] == ["body", "msgId"]
    assert [c.name for c in columns_of(options(columns="storeSize,topic"))] == ["topic", "storeSize"]
    full = columns_of(options(metadata="full", propertyColumns="a:int"))
    assert [c.name for c in full] == [*BASIC_NAMES, *(c.name for c in FULL_COLUMNS), "a"]


def test_unknown_columns_are_refused():
    with pytest.raises(OptionError) as caught:
        columns_of(options(columns="body,price", propertyColumns="tags:string"))
    assert "option 'propertyColumns' names 'tags', which is a column already" in str(caught.value)
    assert "option 'columns' names 'price'; expected any of topic, brokerName" in str(caught.value)


def test_a_schema_of_the_user_picks_and_orders():
    found = columns_of_schema(BASIC_COLUMNS, struct("MSGID string, body binary"))
    assert [(c.name, c.arrow_type) for c in found] == [("MSGID", pa.string()), ("body", pa.binary())]
    batch = Decoder(QUEUES, found)(one(stored(b"x", text(UNIQ_KEY="u"))))
    assert batch.to_pylist() == [{"MSGID": "u", "body": b"x"}]


def test_a_schema_that_does_not_fit_is_refused():
    with pytest.raises(OptionError) as caught:
        columns_of_schema(BASIC_COLUMNS, struct("body string, price double"))
    assert "the schema has 'body' as string; it is binary" in str(caught.value)
    assert f"the schema names 'price'; the columns are {ddl()}" in str(caught.value)


def test_a_column_travels_as_what_it_is_called():
    property_column = columns_of(options(propertyColumns="n:bigint"))[-1]
    for column in (
        *BASIC_COLUMNS,
        *FULL_COLUMNS,
        DECODE_ERROR,
        replace(BASIC_COLUMNS[2], name="QUEUEID"),
        property_column,
    ):
        data = pickle.dumps(column)
        again = pickle.loads(data)
        assert (again, again.from_rows, again.from_message) == (column, column.from_rows, column.from_message)
        assert len(data) < 120
