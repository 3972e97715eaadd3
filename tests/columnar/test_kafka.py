"""Option ``kafkaColumns``: what the sink stores of Kafka's columns, and what the source makes of it."""

from __future__ import annotations

import logging

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyspark.sql.types import ArrayType, BinaryType, StringType, StructField, StructType

from rocketmq_spark import options as options_table
from rocketmq_spark.base.codes import Perm
from rocketmq_spark.columnar.decode import kafka as decode
from rocketmq_spark.columnar.decode.decoder import Decoder
from rocketmq_spark.columnar.decode.schema import HEADERS, KAFKA, READ_QUEUE_ID, Column, columns_of, ddl
from rocketmq_spark.columnar.encode import empty_bodies
from rocketmq_spark.columnar.encode import kafka as encode
from rocketmq_spark.columnar.encode.columns import RowColumn
from rocketmq_spark.columnar.encode.encoder import Encoder
from rocketmq_spark.columnar.encode.ids import UniqueIds
from rocketmq_spark.columnar.encode.properties import BadRows
from rocketmq_spark.columnar.encode.proxy_rows import ProxyRowEncoder
from rocketmq_spark.errors import MessageRefused, OptionError
from rocketmq_spark.model import MessageQueue, QueueData, TopicRoute
from rocketmq_spark.producer.rows.routing import ByPartition, Router, TopicRows
from rocketmq_spark.spark.sink import checks
from rocketmq_spark.spark.source import kafka_partitions
from tests.decode.fetching import QUEUES, one
from tests.decode.fetching import stored as decoder_input
from tests.live.writes import sink_options

HEADER_LIST = HEADERS.arrow_type
Q = [MessageQueue("t", broker, number) for broker in ("broker-a", "broker-b") for number in (0, 1)]


def converted(**columns):
    rows = encode.KafkaRows()
    return rows(pa.RecordBatch.from_pydict(columns)), rows


def stored(batch: pa.RecordBatch) -> pa.RecordBatch:
    """The columns that a source decodes of what ``batch`` stores."""
    count = len(batch)
    names = set(batch.schema.names)
    keys = batch.column("keys").to_pylist() if "keys" in names else [None] * count
    headers = next((batch.column(name) for name in ("headers", "properties") if name in names), None)
    maps = [None] * count if headers is None else headers.to_pylist()
    found = {
        "topic": pa.array(["t"] * count),
        READ_QUEUE_ID.name: pa.array([1] * count, pa.int32()),
        "queueOffset": pa.array(range(count), pa.int64()),
        "body": batch.column("value" if "value" in names else "body").cast(pa.binary()),
        "keys": pa.array([None if key is None else [key] for key in keys], pa.list_(pa.string())),
        "bornTimestamp": pa.array([0] * count, pa.timestamp("us", "UTC")),
        decode._SHARDING_KEY.name: batch.column("key") if "key" in names else pa.nulls(count, pa.string()),
        decode._DELETED.name: pa.array([dict(row or ()).get("deleted") for row in maps], pa.string()),
        "properties": pa.nulls(count, pa.map_(pa.string(), pa.string())) if headers is None else headers,
    }
    return pa.RecordBatch.from_pydict(found)


def read_back(batch: pa.RecordBatch) -> pa.RecordBatch:
    return decode.kafka_batch(stored(batch), (*KAFKA, HEADERS), "broker-b", {Q[3]: 3})


@given(st.lists(st.none() | st.binary(max_size=12) | st.text(max_size=6).map(str.encode), min_size=1))
def test_any_key_comes_back(keys):
    made, _ = converted(value=pa.array([b"v"] * len(keys)), key=pa.array(keys, pa.binary()))
    assert read_back(made).column("key").to_pylist() == keys


def test_a_property_column_has_the_text_of_a_header():
    given = ["plain", "", " ", "a\nb", "base64:x", b"\xff", None]
    column = Column("h", "string", pa.string(), "h")
    number = Column("n", "bigint", pa.int64(), "n")
    values = pa.array([None if each is None else each.encode() if isinstance(each, str) else each for each in given])
    batch = pa.RecordBatch.from_arrays([encode.as_property_texts(values), pa.array(range(7), pa.int64())], ["h", "n"])
    assert decode.kafka_batch(batch, (column, number), "b", {}).to_pydict() == {
        "h": [*given[:5], "base64:/w==", None],
        "n": list(range(7)),
    }


names = st.text(st.characters(exclude_categories=["Cs", "Cc"]), min_size=1, max_size=5).filter(
    lambda n: encode._is_legal_name(n.encode(), ())
)


@given(st.lists(st.none() | st.dictionaries(names, st.binary(max_size=8), max_size=3), min_size=1))
def test_any_legal_headers_come_back(rows):
    given = pa.array(
        [None if row is None else [{"key": k, "value": v} for k, v in row.items()] for row in rows], HEADER_LIST
    )
    made, converter = converted(value=pa.array([b"v"] * len(rows)), headers=given)
    found = read_back(made).column("headers").to_pylist()
    assert [{each["key"]: each["value"] for each in row or ()} for row in found] == [row or {} for row in rows]
    assert all(row is None or row for row in found), "null without any"
    assert converter.left_out_header_count == 0


def test_headers_that_cannot_be_stored_are_left_out_and_counted(caplog):
    headers = [
        [("a", b"1"), ("", b"x"), ("b", None), ("TAGS", b"x"), ("a", b"2")],
        [("a\x01", b"x"), ("c", b"3")],
        None,
        [],
    ]
    column = pa.array(
        [None if row is None else [{"key": k, "value": v} for k, v in row] for row in headers], HEADER_LIST
    )
    with caplog.at_level(logging.INFO):
        made, converter = converted(value=pa.array([b"v"] * 4), headers=column)
        converter(pa.RecordBatch.from_pydict({"value": pa.array([b"v"] * 4), "headers": column}))
    found = [
        [(each["key"], each["value"]) for each in row or ()] for row in read_back(made).column("headers").to_pylist()
    ]
    assert found == [[("a", b"2")], [("c", b"3")], [], []]
    assert converter.left_out_header_count == 2 * 5
    assert caplog.text.count("a task leaves out headers that cannot be stored; the first one is 'a'") == 1


def test_a_slice_of_rows_keeps_its_headers():
    column = pa.array([[{"key": f"h{i}", "value": b"%d" % i}] for i in range(6)], HEADER_LIST)
    batch = pa.RecordBatch.from_pydict({"value": pa.array([b"v"] * 6), "headers": column}).slice(2, 3)
    made = encode.KafkaRows()(batch)
    assert [dict(row) for row in made.column("headers").to_pylist()] == [{"h2": "2"}, {"h3": "3"}, {"h4": "4"}]
    found = decode.kafka_batch(stored(made).slice(1, 2), (HEADERS,), "broker-b", {}).column("headers")
    assert found.to_pylist() == [[{"key": "h3", "value": b"3"}], [{"key": "h4", "value": b"4"}]]


@pytest.mark.parametrize("headers", [None, [("h", b"1")]])
def test_null_and_empty_values_come_back(headers):
    entries = None if headers is None else [{"key": k, "value": v} for k, v in headers]
    values = [None, b"", b"x", b"\0"]
    made, _ = converted(value=pa.array(values, pa.binary()), headers=pa.array([entries] * 4, HEADER_LIST))
    bad = BadRows()
    full = empty_bodies.batch_with_stand_ins(made, {"body": "value", "properties": "headers"}, bad)
    assert bad.reasons_by_row() == []
    assert full.column("value").to_pylist() == [b"\0", b"\0", b"x", b"\0"]
    found = read_back(full)
    assert found.column("value").to_pylist() == values
    assert found.column("headers").to_pylist() == [entries] * 4


def test_property_named_deleted_is_kept_unless_the_body_is_empty():
    column = pa.array([[("deleted", "null")], [("deleted", "yes")]], pa.map_(pa.string(), pa.string()))
    bad = BadRows()
    batch = pa.RecordBatch.from_pydict({"body": pa.array([b"x", b""]), "properties": column})
    full = empty_bodies.batch_with_stand_ins(batch, {"body": "body", "properties": "properties"}, bad)
    assert bad.reasons_by_row() == [
        (1, "its body is null or empty, and its properties have 'deleted', which option 'emptyBodies' sets: rename it")
    ]
    assert read_back(full).column("value").to_pylist()[0] == b"x"


@given(
    st.lists(
        st.tuples(
            st.sampled_from([None, b"", b"x"]),
            st.none() | st.lists(st.tuples(st.sampled_from(["a", "b"]), st.none() | st.binary(max_size=2)), max_size=3),
        ),
        min_size=1,
        max_size=8,
    ),
    st.integers(0, 8),
)
def test_a_mark_is_one_more_property(rows, start):
    bodies, maps = zip(*rows, strict=True)
    column = pa.array(maps, pa.map_(pa.string(), pa.binary()))
    texts = pa.MapArray.from_arrays(column.offsets, column.keys, column.items.view(pa.string()))
    texts = pc.if_else(column.is_valid(), texts, None)
    batch = pa.RecordBatch.from_pydict({"body": pa.array(bodies, pa.binary()), "p": texts}).slice(start)
    full = empty_bodies.batch_with_stand_ins(batch, {"body": "body", "properties": "p"}, BadRows()).column("p")
    marks = {None: [("deleted", b"null")], b"": [("deleted", b"empty")], b"x": []}
    found = full.cast(column.type).to_pylist()
    assert [row or [] for row in found] == [(own or []) + marks[body] for body, own in rows[start:]]


def test_hidden_entries_of_a_null_map_stay_hidden():
    whole = pa.array([[("deleted", "x")], [("h", "1")]], pa.map_(pa.string(), pa.string()))
    null = pa.Array.from_buffers(
        whole.type, 2, [pa.py_buffer(b"\x02"), whole.buffers()[1]], children=[whole_entries(whole)]
    )
    assert null.to_pylist() == [None, [("h", "1")]]
    batch = pa.RecordBatch.from_arrays([pa.array([None, None], pa.binary()), null], names=["body", "p"])
    bad = BadRows()
    full = empty_bodies.batch_with_stand_ins(batch, {"body": "body", "properties": "p"}, bad)
    assert bad.reasons_by_row() == []
    assert full.column("p").to_pylist() == [[("deleted", "null")], [("h", "1"), ("deleted", "null")]]


def whole_entries(maps: pa.MapArray) -> pa.StructArray:
    entry = maps.type
    fields = [pa.field("key", entry.key_type, nullable=False), pa.field("value", entry.item_type)]
    return pa.StructArray.from_arrays([maps.keys, maps.items], fields=fields)


def test_a_mark_is_no_id_of_a_row():
    batch = pa.RecordBatch.from_pydict({"body": pa.array(["x", None, ""])})
    bad = BadRows()
    names = {"body": "body", "properties": "properties", "messageid": "body"}
    empty_bodies.batch_with_stand_ins(batch, names, bad)
    reason = (
        "its body is null or empty, and option 'messageId' names this column, so the row has no id: name another column"
    )
    assert bad.reasons_by_row() == [(1, reason), (2, reason)]


def test_without_an_empty_body_a_batch_gets_the_column_only():
    batch = pa.RecordBatch.from_pydict({"body": pa.array(["x"])})
    full = empty_bodies.batch_with_stand_ins(batch, {"body": "body", "properties": "properties"}, BadRows())
    assert full.to_pylist() == [{"body": "x", "properties": None}]


@pytest.mark.parametrize(
    ("key", "sharding", "keys"),
    [
        (b"one", "one", "one"),
        (b"two words", "two words", None),
        (b"", "base64:", None),
        (b"\xff", "base64:/w==", None),
        (b"base64:x", "base64:YmFzZTY0Ong=", None),
        (b"a\x02", "base64:YQI=", None),
        (b"a\n", "base64:YQo=", None),
        ("a\x80".encode(), "base64:YcKA", None),
        (b" ", "base64:IA==", None),
        (b"k" * 8192, "k" * 8192, "k" * 8192),
        (b"k" * 8193, "k" * 8193, None),
        (None, None, None),
    ],
)
def test_a_key_becomes_the_sharding_key_and_a_key_that_finds_it(key, sharding, keys):
    made, _ = converted(value=pa.array([b"v"]), key=pa.array([key], pa.binary()))
    assert (made.column("key").to_pylist(), made.column("keys").to_pylist()) == ([sharding], [keys])


@pytest.mark.parametrize("row_id", ["key", "body", "shardingKey", "keys", "properties", "ID"])
def test_the_row_id_replaces_no_other_column(row_id):
    columns = {"key": ["k"], "value": ["v"], **({} if row_id == "key" else {row_id: ["id-1"]})}
    given = [RowColumn(name, "string", "string") for name in columns]
    roles, problems = encode.check_columns(given, "t", row_id)
    assert problems == []
    name = f"{row_id} (messageId)" if row_id in ("key", "keys") else row_id
    assert roles == {"shardingkey": "key", "keys": "keys", "body": "value", "messageid": name}
    made = encode.KafkaRows(row_id)(pa.RecordBatch.from_pydict(columns))
    (row,) = made.select(list(roles.values())).to_pylist()
    assert row == {"key": "k", "keys": "k", "value": "v", name: "k" if row_id == "key" else "id-1"}


def test_two_columns_of_the_row_ids_name_are_a_problem():
    given = [RowColumn(name, "string", "string") for name in ("value", "id", "ID")]
    assert encode.check_columns(given, "t", "id")[1] == [
        "option 'messageId' is 'id', but several columns of the DataFrame have that name"
    ]


def test_keys_of_other_producers_are_joined_and_not_decoded():
    batch = pa.RecordBatch.from_pydict(
        {
            "keys": pa.array([["a", "b"], None, ["c"], []], pa.list_(pa.string())),
            decode._SHARDING_KEY.name: pa.array([None, None, "base64:?", None]),
        }
    )
    assert decode._keys(batch).to_pylist() == [b"a b", None, b"base64:?", None]


@pytest.mark.parametrize("keys", [b"KEYS\x01a b\x02", b""])
@pytest.mark.parametrize("row", ["fast", "odd"])
def test_an_empty_sharding_key_does_not_hide_the_keys(keys, row):
    odd = b"\x02\x02" if row == "odd" else b""
    message = decoder_input(b"x", b"__SHARDINGKEY\x01\x02" + keys + odd, queue_offset=0)
    batch = Decoder(QUEUES, decode.columns_to_decode(KAFKA[:1]))(one(message))
    assert decode.kafka_batch(batch, KAFKA[:1], "b", {}).to_pylist() == [{"key": b"a b" if keys else None}]


def test_every_column_of_kafka():
    made, _ = converted(value=pa.array(["x"]), key=pa.array(["k"]))
    assert read_back(made).to_pylist()[0] | {"timestamp": None} == {
        "key": b"k", "value": b"x", "topic": "t", "partition": 3, "offset": 0, "timestamp": None, "timestampType": 0,
        "headers": None,
    }  # fmt: skip


def test_partitions_of_several_topics_of_a_broker():
    ids = pa.array([0, 1, 1], pa.int32())
    batch = pa.RecordBatch.from_pydict({"topic": pa.array(["u", "t", "u"]), READ_QUEUE_ID.name: ids})
    numbers = {Q[2]: 8, Q[3]: 9, MessageQueue("u", "broker-b", 0): 4, MessageQueue("u", "broker-b", 1): 5, Q[1]: 7}
    assert decode._partitions(batch, "broker-b", numbers).to_pylist() == [4, 9, 5]
    of_one = {Q[2]: 8, Q[3]: 9}
    assert decode._partitions(batch, "broker-b", of_one).to_pylist() == [None, 9, None], "unknown is null"


def options(role="batch source", **given):
    return options_table.parse({"name_server": "n:1", "kafka_columns": True, **given}).for_role(role)


def test_the_schema_is_that_of_sparks_kafka_source():
    assert ddl(columns_of(options())) == (
        "key binary, value binary, topic string, partition int, offset bigint, timestamp timestamp, timestampType int"
    )
    assert ddl(columns_of(options(include_headers=True))).endswith(", headers array<struct<key:string,value:binary>>")
    assert ddl(columns_of(options(columns="VALUE,offset", property_columns="amount:bigint"))) == (
        "value binary, offset bigint"
    )
    assert ddl(columns_of(options(property_columns="amount:bigint"))).endswith("timestampType int, `amount` bigint")


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"metadata": "full"}, "option 'metadata' is 'full'"),
        ({"property_columns": "queueId:int"}, "which is a column already"),
        ({"property_columns": "value:int"}, "which is a column already"),
        ({"columns": "body"}, "option 'columns' names 'body'; expected any of key, value"),
        ({"kafka_columns": False, "include_headers": True}, "'includeHeaders' needs 'kafkaColumns'"),
        (
            {"include_headers": True, "include_properties": "none"},
            "'includeProperties' is 'none', and 'includeHeaders' needs",
        ),
    ],
)
def test_what_does_not_go_with_it_is_refused(given, told):
    with pytest.raises(OptionError, match=told):
        columns_of(options(**given))


def test_the_sink_takes_kafkas_columns_and_ignores_others():
    given = [RowColumn(name, kind, kind) for name, kind in (("KEY", "string"), ("value", "binary"), ("shop", "date"))]
    roles, problems = encode.check_columns(given, "t")
    assert problems == []
    assert roles == {"shardingkey": "key", "keys": "keys", "body": "value"}


def test_headers_whose_fields_have_another_case_are_stored():
    parts = [StructField("KEY", StringType()), StructField("Value", BinaryType())]
    schema = StructType([StructField("value", StringType()), StructField("headers", ArrayType(StructType(parts)))])
    given = checks.check_sink(sink_options("n:1", kafkaColumns=True, topic="t"), schema)
    assert given["properties"] == "headers"
    entry = pa.struct([("KEY", pa.string()), ("Value", pa.binary())])
    made, _ = converted(value=["v"], headers=pa.array([[{"KEY": "h", "Value": b"1"}]], pa.list_(entry)))
    assert read_back(made).column("headers").to_pylist() == [[{"key": "h", "value": b"1"}]]


def test_errors_of_rows_name_the_columns_of_the_user():
    rows = {
        "key": pa.array([b"k" * 40_000, None, b"k"], pa.binary()),
        "value": pa.array([b"v", None, b""], pa.binary()),
    }
    made, _ = converted(**rows)
    bad = BadRows()
    names = {"body": "value", "shardingkey": "key", "keys": "keys"}
    Encoder(names, 4 << 20, UniqueIds(b"12345678", lambda: 0)).check(made, bad)
    assert [(row, text.split(",")[0]) for row, text in bad.reasons_by_row()] == [
        (0, "properties of 40057 bytes"), (1, "value is null"), (2, "value is empty"),
    ]  # fmt: skip
    with pytest.raises(
        MessageRefused, match=r"partition\. Option 'emptyBodies' = mark sends rows whose body is null or empty"
    ):
        bad.raise_if_any()


marks = st.sampled_from([b"null", b"empty", b"yes", b"base64:bnVsbA=="])
mark_names = st.sampled_from(["deleted", "Deleted", "h"])


@given(
    st.lists(
        st.tuples(st.sampled_from([None, b"", b"\0", b"\0\0"]), st.dictionaries(mark_names, marks, max_size=3)),
        min_size=1,
    )
)
def test_a_message_is_a_tombstone_only_if_its_value_was_null(rows):
    rows = [(value, headers) for value, headers in rows if value or "deleted" not in headers] or [(None, {})]
    values = pa.array([value for value, _ in rows], pa.binary())
    headers = pa.array([[{"key": k, "value": v} for k, v in row.items()] for _, row in rows], HEADER_LIST)
    made, _ = converted(value=values, headers=headers)
    bad = BadRows()
    full = empty_bodies.batch_with_stand_ins(made, {"body": "value", "properties": "headers"}, bad)
    assert bad.reasons_by_row() == []
    found = read_back(full)
    assert found.column("value").to_pylist() == values.to_pylist()
    assert [{each["key"]: each["value"] for each in row or ()} for row in found.column("headers").to_pylist()] == [
        row for _, row in rows
    ]


def test_only_headers_beside_the_stand_in_are_stored_as_base64():
    column = pa.array([[("deleted", b"null")], [("deleted", b"null"), ("h", b"null")]], HEADER_LIST)
    made, _ = converted(value=pa.array([b"x", b"\0"]), headers=column)
    assert made.column("headers").to_pylist() == [
        [("deleted", "null")],
        [("deleted", "base64:bnVsbA=="), ("h", "null")],
    ]


def test_header_named_deleted_is_refused_for_an_empty_value():
    made, _ = converted(value=pa.array([None], pa.binary()), headers=pa.array([[("deleted", b"x")]], HEADER_LIST))
    bad = BadRows()
    empty_bodies.batch_with_stand_ins(made, {"body": "value", "properties": "headers"}, bad)
    assert bad.reasons_by_row() == [
        (0, "its value is null or empty, and its headers have 'deleted', which option 'emptyBodies' sets: rename it")
    ]


def test_no_property_of_a_row_has_what_a_proxy_refuses():
    odd = [b"a\nb", b"\x7f", "\x85".encode(), b"\t", b" ", "\u3000".encode(), b"\0"]
    headers = pa.array([[("h", each), ("n\tame", b"x")] for each in odd], HEADER_LIST)
    made, converter = converted(value=[b"v"] * len(odd), key=pa.array(odd, pa.binary()), headers=headers)
    bad = BadRows()
    names = {"body": "value", "shardingkey": "key", "keys": "keys", "properties": "headers"}
    ProxyRowEncoder(names, 4 << 20, UniqueIds(b"12345678", lambda: 0)).check(made, bad)
    assert (bad.reasons_by_row(), converter.left_out_header_count) == ([], len(odd))
    assert all(not text.isspace() for text in made.column("key").to_pylist())
    found = read_back(made)
    assert found.column("key").to_pylist() == odd
    assert found.column("headers").to_pylist() == [[{"key": "h", "value": each}] for each in odd]


@pytest.mark.parametrize(
    ("columns", "told"),
    [
        ([("key", "string")], "column 'value' is missing"),
        ([("value", "long")], "column 'value' is bigint; expected string or binary"),
        ([("value", "string"), ("partition", "string")], "column 'partition' is string; expected int"),
        ([("value", "string"), ("queueId", "int")], "column 'queueId' has no effect with option 'kafkaColumns'"),
        ([("value", "string"), ("tags", "string")], "column 'tags' has no effect with option 'kafkaColumns'"),
        ([("value", "string"), ("Value", "string")], "column 'Value' is there twice"),
    ],
)
def test_wrong_columns_of_the_sink_are_named(columns, told):
    _, problems = encode.check_columns([RowColumn(n, k, {"long": "bigint"}.get(k, k)) for n, k in columns], "t")
    assert [problem for problem in problems if told in problem]


def chosen(queues, numbered=Q, **columns):
    bad = BadRows()
    batch = pa.RecordBatch.from_pydict(columns)
    select = ByPartition({name.lower(): name for name in columns}, lambda topic: numbered)
    return select(TopicRows(batch, "t", None, 0), queues, bad).tolist(), bad.reasons_by_row()


def numbering_router(queues, columns, numbered=Q, wait_for_brokers=None):
    """A router of topic t whose rows name partitions."""
    options = options_table.parse({"name_server": "n:1", "topic": "t"}).for_role("sink")
    names = {name.lower(): name for name in columns}
    return Router(options, names, queues, partitions_of=lambda topic: numbered, wait_for_brokers=wait_for_brokers)


def queues_of_rows(router, **columns):
    """The queue of each row, and the bad rows."""
    bad = BadRows()
    batch = pa.RecordBatch.from_pydict(columns)
    plan = router.plan(router.topics(batch, bad, 0), bad)
    places = {row: share.queue for share in plan.ranges for row in plan.rows(share).tolist()}
    return [places[row] for row in range(len(batch))], bad.reasons_by_row()


def test_partition_number_is_independent_of_queue_order():
    places, bad = chosen([Q[2], Q[0], Q[3], Q[1]], partition=pa.array([0, 1, 2, 3, None], pa.int32()))
    assert (places, bad) == ([1, 3, 0, 2, 4], [])


def test_a_row_without_partition_goes_to_the_queue_of_its_key():
    columns = {"partition": pa.array([3, None, None], pa.int32()), "shardingKey": pa.array(["a", "a", None])}
    router = numbering_router(lambda topic, refresh: Q, columns)
    assert queues_of_rows(router, **columns) == ([Q[3], Q[97 % 4], None], [])


def test_a_key_keeps_its_queue_when_a_row_names_one_that_is_new():
    routes = [Q[:2], Q]
    router = numbering_router(lambda topic, refresh: routes[refresh], ["partition", "shardingKey"])
    keys = pa.array(["a", "b", "c", "d"])

    def of_keys(first=None):
        found, bad = queues_of_rows(
            router,
            partition=pa.array([first, None, None, None, None], pa.int32()),
            shardingKey=["x", *keys.to_pylist()],
        )
        assert bad == []
        return found

    before = of_keys()
    assert of_keys(3) == [Q[3], *before[1:]]
    assert of_keys() == before


def test_a_partition_that_does_not_exist_is_an_error_of_its_row():
    _, bad = chosen(Q, partition=pa.array([4, 0, -1], pa.int32()))
    there = "but topic 't' has partitions 0 to 3, on broker-a, broker-b (a broker that is down has none: start it, "
    there += "then write again)"
    assert bad == [(0, f"partition is 4, {there}"), (2, f"partition is -1, {there}")]


def test_unwritable_partition_is_an_error_and_shifts_no_other():
    places, bad = chosen([Q[3], Q[0]], partition=pa.array([0, 2, 3, 1], pa.int32()))
    assert (places[0], places[2]) == (1, 0)
    now = "and this queue does not accept messages now: start its broker, or make the queue writable, then write again"
    assert bad == [
        (1, f"partition is 2, which is queue t/broker-b/0, {now}"),
        (3, f"partition is 1, which is queue t/broker-a/1, {now}"),
    ]


def test_the_numbers_of_a_write_stay_when_its_route_changes():
    """A queue that is new in the route is written by the next write only."""
    routes = [[Q[2]], Q]
    router = numbering_router(lambda topic, refresh: routes[refresh], ["partition"], Q[1:])

    def plan(*numbers):
        return queues_of_rows(router, partition=pa.array(numbers, pa.int32()))

    assert plan(1, 1) == ([Q[2], Q[2]], [])
    ((row, reason),) = plan(3)[1]
    assert (row, "partition is 3, but topic 't' has partitions 0 to 2" in reason) == (0, True)
    assert [plan(number)[0] for number in range(3)] == [[Q[1]], [Q[2]], [Q[3]]]


def test_a_task_waits_once_for_the_broker_of_a_partition():
    waits = []

    def wait_for_brokers(topic, brokers, deadline):
        waits.append((topic, brokers))
        return Q if len(waits) == 1 else Q[:2]

    router = numbering_router(
        lambda topic, refresh: Q[:2], ["partition", "shardingKey"], wait_for_brokers=wait_for_brokers
    )
    columns = {"partition": pa.array([3, 1, None], pa.int32()), "shardingKey": ["x", "x", "c"]}
    assert queues_of_rows(router, **columns) == ([Q[3], Q[1], Q[99 % 4]], []), "keys use all queues, too"
    assert waits == [("t", {"broker-b"})]


def test_a_broker_that_stays_away_is_waited_for_once():
    waits = []
    router = numbering_router(
        lambda topic, refresh: Q[:2],
        ["partition"],
        wait_for_brokers=lambda topic, brokers, _: waits.append(brokers) or Q[:2],
    )
    for _ in range(2):
        ((row, reason),) = queues_of_rows(router, partition=pa.array([0, 2], pa.int32()))[1]
        assert (row, "which is queue t/broker-b/0" in reason) == (1, True)
    assert waits == [{"broker-b"}]


@pytest.mark.parametrize(("partition", "writable"), [(4, Q[:2]), (-1, Q[:2]), (3, Q[:3])])
def test_nothing_is_awaited_for_a_partition_that_cannot_come(partition, writable):
    """A broker that is listed with other queues has closed this one."""
    router = numbering_router(
        lambda topic, refresh: writable, ["partition"], wait_for_brokers=lambda topic, brokers, _: 1 / 0
    )
    assert len(queues_of_rows(router, partition=pa.array([partition], pa.int32()))[1]) == 1


def test_queues_are_numbered_before_the_route_is_taken():
    """Numbering waits for brokers that are not listed yet; a route from before that would lack them for keys."""
    listed = [Q[:2]]

    def number(topic):
        listed[0] = Q
        return Q

    options = options_table.parse({"name_server": "n:1"}).for_role("sink")
    names = {"topic": "topic", "partition": "partition", "shardingkey": "shardingKey"}
    router = Router(options, names, lambda topic, refresh: listed[0], partitions_of=number)
    columns = {"topic": ["t", "t"], "partition": pa.array([None, 0], pa.int32()), "shardingKey": ["c", None]}
    assert queues_of_rows(router, **columns) == ([Q[99 % 4], Q[0]], [])


def test_partitions_count_queues_for_reading_or_writing():
    queues = (QueueData("broker-b", 2, 1, Perm.WRITE), QueueData("broker-a", 1, 2, Perm.READ), QueueData("c", 1, 1, 0))
    route = TopicRoute("t", queues, {})
    assert route.partition_queues() == [*Q, MessageQueue("t", "c", 0)]


def test_new_queues_get_the_next_numbers():
    first = kafka_partitions.with_new_queues({}, [Q[1], Q[0], Q[3]])
    assert first == {"t": [["broker-a", 0, 2], ["broker-b", 1, 1]]}
    assert kafka_partitions.with_new_queues(first, [Q[0]]) is first
    more = kafka_partitions.with_new_queues(first, [*Q, MessageQueue("s", "broker-a", 0)])
    numbers = kafka_partitions.partition_numbers(more)
    assert {queue: numbers[queue] for queue in Q} == {Q[0]: 0, Q[1]: 1, Q[3]: 2, Q[2]: 3}
    assert numbers[MessageQueue("s", "broker-a", 0)] == 0


queue = st.builds(MessageQueue, st.sampled_from("tu"), st.sampled_from(["a", "b"]), st.integers(0, 9))


@given(st.lists(st.sets(queue)))
def test_numbers_are_dense_and_never_change(steps):
    runs, before = {}, {}
    for queues in steps:
        runs = kafka_partitions.with_new_queues(runs, queues)
        numbers = kafka_partitions.partition_numbers(runs)
        assert before.items() <= numbers.items()
        assert queues <= numbers.keys()
        for topic in "tu":
            mine = sorted(number for queue, number in numbers.items() if queue.topic == topic)
            assert mine == list(range(len(mine)))
        before = numbers


def test_rows_without_any_column_still_count():
    assert [column.name for column in decode.columns_to_decode(())] == ["queueOffset"]
    batch = pa.RecordBatch.from_pydict({"queueOffset": np.arange(3)})
    assert decode.kafka_batch(batch, (), "b", {}).num_columns == 0
