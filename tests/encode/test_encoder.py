"""Arrow batches to batch bodies: what the row-wise encoder makes of the same messages, and every refusal by its row."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rocketmq_spark.base.codes import RESERVED_PROPERTIES
from rocketmq_spark.columnar.encode import buffers
from rocketmq_spark.columnar.encode.encoder import Encoder, Growth
from rocketmq_spark.columnar.encode.ids import UniqueIds
from rocketmq_spark.errors import MessageRefused
from rocketmq_spark.wire.messages import decode_batch, encode_batch
from rocketmq_spark.wire.properties import decode_properties, encode_properties, is_reserved

SCHEMA = pa.schema(
    [
        ("body", pa.binary()),
        ("tags", pa.string()),
        ("keys", pa.list_(pa.string())),
        ("properties", pa.map_(pa.string(), pa.string())),
        ("flag", pa.int32()),
    ]
)
NAMES = {name: name for name in SCHEMA.names}


def encoder(columns=NAMES, **more):
    return Encoder(columns, **{"max_message_size": 1 << 20, "ids": UniqueIds(b"taskid00", lambda: 0), **more})


def batch_of(rows, schema=SCHEMA):
    columns = list(zip(*rows, strict=True)) or [()] * len(schema)
    return pa.RecordBatch.from_arrays(
        [pa.array(column, field.type) for column, field in zip(columns, schema, strict=True)], schema=schema
    )


def body_of(encoded):
    return b"".join(bytes(chunk.body) for chunk in encoded.chunks(1 << 30))


def items_of(encoded):
    """The items without their message ids, which are checked; properties as a map."""
    data = body_of(encoded)
    items = decode_batch(data)
    assert encode_batch(items) == data
    found, ids = [], []
    for item in items:
        properties = decode_properties(item.properties)
        ids.append(properties.pop("UNIQ_KEY"))
        assert len(item.properties.encode()) == len(encode_properties(properties).encode()) + len("UNIQ_KEY") + 34
        found.append((bytes(item.body), properties, item.flag))
    assert len(set(ids)) == len(ids)
    assert all(len(name) == 32 for name in ids)
    return found


def expected(row):
    body, tags, keys, own, flag = row
    properties = {name: value for name, value in own or [] if value}
    if tags:
        properties["TAGS"] = tags
    if keys is not None and (text := " ".join(key for key in keys if key)):
        properties["KEYS"] = text
    return body, properties, flag or 0


_TEXTS = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\x01\x02"), min_size=1, max_size=8)
_PROPERTY_NAMES = _TEXTS.filter(lambda name: not is_reserved(name)) | st.sampled_from(["a", "region", "tags", "ü"])
_ONE_MAP = st.dictionaries(_PROPERTY_NAMES, _TEXTS, max_size=4).map(lambda d: list(d.items()))
_ODD_MAP = st.dictionaries(_PROPERTY_NAMES, st.none() | _TEXTS, max_size=4).map(lambda d: list(d.items()))
_KEYS = st.lists(_TEXTS.map(lambda t: t.replace(" ", "_")), max_size=3)


@st.composite
def rows(draw):
    """Rows of one writer, whose maps have the same names, or of many."""
    names = draw(st.none() | st.lists(_PROPERTY_NAMES, min_size=1, max_size=3, unique=True))
    alike = (
        st.tuples(*[st.tuples(st.just(name), _TEXTS) for name in names]).map(list) if names else _ODD_MAP | st.none()
    )
    tags = draw(st.sampled_from([_TEXTS, st.none() | _TEXTS | st.just("")]))
    keys = draw(
        st.sampled_from(
            [_KEYS.filter(bool), st.none() | _KEYS, st.lists(st.none() | _TEXTS.map(str.split).map("".join))]
        )
    )
    row = st.tuples(
        st.binary(min_size=1, max_size=30), tags, keys, alike, st.none() | st.integers(-(1 << 31), (1 << 31) - 1)
    )
    return draw(st.lists(row, max_size=12))


@given(rows(), st.data())
def test_equals_the_row_wise_encoding(made, data):
    assert items_of(encoder()(batch_of(made))) == [expected(row) for row in made]
    # A slice of a batch has offsets that do not begin at 0.
    start = data.draw(st.integers(0, len(made)))
    sliced = batch_of(made).slice(start)
    assert items_of(encoder()(sliced)) == [expected(row) for row in made[start:]]


@given(rows(), st.integers(1, 300), st.none() | st.integers(1, 4))
def test_chunks_are_whole_items_in_order(made, max_bytes, max_rows):
    encoded = encoder()(batch_of(made))
    chunks = [
        (decode_batch(chunk.body), len(chunk.body), chunk.row_count) for chunk in encoded.chunks(max_bytes, max_rows)
    ]
    assert [bytes(item.body) for items, _, _ in chunks for item in items] == [row[0] for row in made]
    for items, size, count in chunks:
        assert len(items) == count > 0
        assert size <= max_bytes or count == 1
        assert max_rows is None or count <= max_rows
    # None could have taken the first item of the next.
    for (_, size, count), (after, _, _) in itertools.pairwise(chunks):
        assert count == max_rows or size + len(encode_batch(after[:1])) > max_bytes


@given(rows(), st.integers(1, 300), st.integers(1, 100), st.integers(1, 900))
def test_chunks_of_items_that_grow_on_their_way(made, max_bytes, item_bytes, most):
    growth = Growth(item_bytes, most)
    chunks = [
        (len(chunk.body), chunk.row_count) for chunk in encoder()(batch_of(made)).chunks(max_bytes, growth=growth)
    ]
    assert sum(rows for _, rows in chunks) == len(made)
    for size, count in chunks:
        assert count == 1 or (size <= max_bytes and size + count * item_bytes <= most)


@given(rows(), st.data())
def test_some_of_the_rows(made, data):
    picked = data.draw(st.lists(st.integers(0, max(0, len(made) - 1)), unique=True) if made else st.just([]))
    encoded = encoder()(batch_of(made))
    wanted = [expected(made[i]) for i in picked]
    assert items_of(encoded.take(np.array(picked, np.int64))) == wanted
    assert items_of(encoded.slice(0, len(made))) == [expected(row) for row in made]


@pytest.mark.parametrize("joined", [False, True])
@pytest.mark.parametrize("max_bytes", [0, 1000, 20_000, 1 << 20])
def test_chunks_of_parts_in_any_order_are_those_of_the_rows(max_bytes, joined):
    """Chunks of few rows are made in another way than those of many, and so are those of items that are joined already."""
    encoded = encoder()(batch_of([(b"%d" % i * (i % 30 + 1), "t", [f"k{i}"], None, 0) for i in range(600)]))
    if joined:
        encoded.joined()
    order = random.Random(7).sample(range(600), 500)
    found = [
        (list(part.chunks(max_bytes)), part, rows)
        for part, rows in (
            (encoded, range(600)),
            (encoded.slice(10, 590).slice(5, 400), range(15, 410)),
            (encoded.take(np.array(order)), order),
            (encoded.take(np.array(order)).slice(100, 450), order[100:450]),
            (encoded.slice(50, 550).take(np.array(order[:300]) // 2), [50 + row // 2 for row in order[:300]]),
            (encoded.take(np.array(order)).take(np.arange(400, 0, -2)), [order[i] for i in range(400, 0, -2)]),
        )
    ]
    items = encoded.joined().to_pylist()
    assert [bytes(decode_batch(item)[0].body) for item in items] == [b"%d" % i * (i % 30 + 1) for i in range(600)]
    for chunks, part, rows in found:
        wanted = [items[row] for row in rows]
        assert len(part) == len(wanted)
        assert part.joined().to_pylist() == wanted
        assert b"".join(bytes(chunk.body) for chunk in chunks) == b"".join(wanted)
        assert [chunk.row_count for chunk in chunks] == [len(decode_batch(chunk.body)) for chunk in chunks]
        assert all(len(chunk.body) <= max_bytes or chunk.row_count == 1 for chunk in chunks)


@pytest.mark.parametrize("max_bytes", [150, 1000, 15_000, 70_000, 1 << 20])
def test_a_batch_holds_at_most_twice_its_bytes(max_bytes):
    """Of one hundred batches of rows a sixtieth each waits for its queue."""
    rows = batch_of([(bytes(100), "t", ["k"], None, 0)] * 600)
    before = pa.total_allocated_bytes()
    waiting = [next(encoder()(rows).slice(300, 310).chunks(max_bytes)) for _ in range(100)]
    for whole in [encoder()(rows) for _ in range(10)]:
        waiting += whole.chunks(max_bytes)
    counted = sum(len(chunk.body) for chunk in waiting)
    del whole
    assert pa.total_allocated_bytes() - before <= 2 * counted


def test_a_text_body_is_its_utf8():
    schema = pa.schema([("value", pa.string())])
    encoded = encoder({"body": "value"})(batch_of([("été 🚀",)], schema))
    assert items_of(encoded) == [("été 🚀".encode(), {}, 0)]


@pytest.mark.parametrize("kind", [pa.large_binary(), pa.large_string(), pa.string()])
def test_large_types(kind):
    """What Spark sends with useLargeVarTypes."""
    schema = pa.schema([("body", kind), ("tags", pa.large_string()), ("keys", pa.list_(pa.large_string()))])
    made = [("b", "t", ["k", "l"]), ("c", None, None)]
    if kind == pa.large_binary():
        made = [(body.encode(), *rest) for body, *rest in made]
    encoded = encoder({name: name for name in schema.names})(batch_of(made, schema))
    assert items_of(encoded) == [(b"b", {"TAGS": "t", "KEYS": "k l"}, 0), (b"c", {}, 0)]


def test_keys_as_one_text():
    schema = pa.schema([("body", pa.binary()), ("keys", pa.string())])
    encoded = encoder({"body": "body", "keys": "keys"})(batch_of([(b"b", "k1 k2"), (b"c", ""), (b"d", None)], schema))
    assert [properties for _, properties, _ in items_of(encoded)] == [{"KEYS": "k1 k2"}, {}, {}]


def test_empty_keys_are_no_keys():
    schema = pa.schema([("body", pa.binary()), ("keys", pa.list_(pa.string()))])
    made = batch_of([(b"b", ["k1", "", "k2"]), (b"c", ["k1", ""]), (b"d", [""]), (b"e", [])], schema)
    encoded = encoder({"body": "body", "keys": "keys"})(made)
    assert [properties for _, properties, _ in items_of(encoded)] == [{"KEYS": "k1 k2"}, {"KEYS": "k1"}, {}, {}]


def test_null_maps_may_own_entries_that_nobody_sees():
    entries = pa.StructArray.from_arrays([pa.array(["TAGS", "a"]), pa.array(["\x01", "b"])], names=["key", "value"])
    entries = pa.StructArray.from_arrays(
        entries.flatten(), fields=[pa.field("key", pa.string(), nullable=False), pa.field("value", pa.string())]
    )
    maps = pa.Array.from_buffers(
        pa.map_(pa.string(), pa.string()),
        2,
        [pa.py_buffer(b"\x02"), pa.py_buffer(b"\0\0\0\0\1\0\0\0\2\0\0\0")],
        children=[entries],
    )
    batch = pa.RecordBatch.from_arrays([pa.array([b"x", b"y"]), maps], names=["body", "properties"])
    encoded = encoder({"body": "body", "properties": "properties"})(batch)
    assert items_of(encoded) == [(b"x", {}, 0), (b"y", {"a": "b"}, 0)]


def test_message_ids_go_on_from_batch_to_batch():
    encode = encoder({"body": "body"})
    schema = pa.schema([("body", pa.binary())])
    ids = [
        decode_properties(item.properties)["UNIQ_KEY"]
        for _ in range(3)
        for item in decode_batch(body_of(encode(batch_of([(b"x",)] * 4, schema))))
    ]
    assert len(set(ids)) == 12
    assert ids == sorted(ids)
    assert {name[:16] for name in ids} == {b"taskid00".hex().upper()}


# --- refusals

FINE = (b"body", "tag", ["key"], [("a", "b")], 0)


def bad(**columns):
    return tuple(columns.get(name, value) for name, value in zip(SCHEMA.names, FINE, strict=True))


REFUSALS = [
    (bad(body=None), "body is null"),
    (bad(body=b""), "body is empty"),
    (bad(body=b"x" * 1001), "body of 1001 bytes, option 'maxMessageSize' is 1000"),
    (bad(tags="a\x01b"), "tags contains the separator"),
    (bad(tags="\x02"), "tags contains the separator"),
    (bad(keys=["a", "b\x02"]), "keys contains the separator"),
    (bad(properties=[("a\x01", "b")]), "a property's name contains the separator"),
    (bad(properties=[("a", "b\x02c")]), "a property's value contains the separator"),
    (bad(properties=[("", "b")]), "a property has an empty name"),
    (bad(properties=[("a", "b"), ("UNIQ_KEY", "x")]), "RocketMQ's own, such as UNIQ_KEY"),
    (bad(properties=[("__RMQ.TRANSIENT.x", "x")]), "RocketMQ's own, such as __RMQ.TRANSIENT.x"),
    (bad(properties=[("a", "x" * 40_000)]), "bytes, 32767 at most"),
]


@pytest.mark.parametrize(("row", "reason"), REFUSALS, ids=[reason for _, reason in REFUSALS])
@pytest.mark.parametrize("alone", [True, False])
def test_a_bad_row_is_named(row, reason, alone):
    made = [row] * 3 if alone else [FINE, row, FINE]
    with pytest.raises(MessageRefused) as caught:
        encoder(max_message_size=1000)(batch_of(made), first_row=500)
    text = str(caught.value)
    assert f"row {500 if alone else 501}: " in text
    assert reason in text
    assert f"{3 if alone else 1} rows cannot be sent, and nothing of their Arrow batch was sent" in text


def test_all_bad_rows_are_named_up_to_ten():
    made = [bad(body=None), FINE, bad(tags="\x01")] * 6
    with pytest.raises(MessageRefused) as caught:
        encoder()(batch_of(made))
    text = str(caught.value)
    assert text.count(" row ") == 10
    assert "12 rows cannot be sent" in text
    assert "row 0: body is null; row 2: tags contains the separator 0x01 or 0x02; row 3: body is null" in text
    assert "; and 2 more" in text


def test_every_reserved_name_is_refused():
    for name in RESERVED_PROPERTIES:
        with pytest.raises(MessageRefused, match="RocketMQ's own"):
            encoder()(batch_of([bad(properties=[(name, "x")])]))


@pytest.mark.parametrize("size", [32_600, 32_700])
def test_exactly_as_many_properties_as_fit(size):
    """UNIQ_KEY counts too; what travels alone leaves room for what a broker adds."""
    row = bad(tags=None, keys=None, properties=[("a", "x" * size)])
    assert items_of(encoder()(batch_of([row])))[0][1] == {"a": "x" * size}
    with pytest.raises(MessageRefused, match="at most in a message that travels alone"):
        encoder(single_above_bytes=1000)(batch_of([row]))


def own(size):
    """A row whose whole properties, message id and all, have ``size`` bytes."""
    return bad(tags=None, keys=None, properties=[("a", "x" * (size - len("UNIQ_KEY") - 34 - 3))])


def refusal(encode, row, schema=SCHEMA):
    try:
        encode(batch_of([row], schema))
    except MessageRefused as e:
        return e.message
    return None


def test_the_last_byte_of_properties():
    (chunk,) = encoder()(batch_of([own(32_767)])).chunks(1)
    (item,) = decode_batch(chunk.body)
    assert len(item.properties) == 32_767
    assert "properties of 32768 bytes, 32767 at most" in refusal(encoder(), own(32_768))


def test_the_last_byte_of_properties_that_travel_alone():
    alone = encoder(single_above_bytes=1000)
    assert refusal(alone, own(32_511)) is None
    assert "properties of 32512 bytes, 32511 at most in a message that travels alone" in refusal(alone, own(32_512))
    with pytest.raises(MessageRefused, match=r"1 rows cannot be sent.*row 1: properties of 32512 bytes"):
        alone(batch_of([own(32_511), own(32_512)]))
    size = 22 + len(FINE[0]) + 32_512
    assert refusal(encoder(single_above_bytes=size), own(32_512)) is None, "as long as a batch may be is not alone"
    assert "travels alone" in refusal(encoder(single_above_bytes=size - 1), own(32_512))


def test_what_is_delayed_travels_alone_however_small_it_is():
    schema = SCHEMA.append(pa.field("delaylevel", pa.int32()))
    encode = encoder({**NAMES, "delaylevel": "delaylevel"})
    assert refusal(encode, (*own(32_500), None), schema) is None
    assert "at most in a message that travels alone" in refusal(encode, (*own(32_507), 1), schema)


def test_the_last_byte_of_a_body():
    assert refusal(encoder(max_message_size=1000), bad(body=b"x" * 1000)) is None
    assert "body of 1001 bytes" in refusal(encoder(max_message_size=1000), bad(body=b"x" * 1001))


def test_chunk_is_filled_to_its_last_byte():
    encoded = encoder()(batch_of([FINE] * 4))
    size = len(body_of(encoded)) // 4
    assert [chunk.row_count for chunk in encoded.chunks(2 * size)] == [2, 2]
    assert [chunk.row_count for chunk in encoded.chunks(2 * size - 1)] == [1] * 4
    assert [chunk.row_count for chunk in encoded.chunks(2 * size + 1)] == [2, 2]


def test_a_chunk_has_no_more_rows_than_it_may():
    encoded = encoder()(batch_of([FINE] * 7))
    size = len(body_of(encoded)) // 7
    assert [chunk.row_count for chunk in encoded.chunks(1 << 20, 3)] == [3, 3, 1]
    assert [chunk.row_count for chunk in encoded.chunks(2 * size, 3)] == [2, 2, 2, 1]
    assert b"".join(bytes(chunk.body) for chunk in encoded.chunks(1 << 20, 3)) == body_of(encoded)


def test_every_row_is_joined_once_even_in_small_last_chunk(monkeypatch):
    encoded = encoder()(batch_of([FINE] * 250))
    counts = []
    joined = buffers.joined

    def counted(*parts):
        counts.append(len(items := joined(*parts)))
        return items

    monkeypatch.setattr(buffers, "joined", counted)
    assert [chunk.row_count for chunk in encoded.chunks(1 << 20, 100)] == [100, 100, 50]
    assert sum(counts) == 250


def test_nothing_is_an_empty_batch():
    encoded = encoder()(batch_of([]))
    assert len(encoded) == 0
    assert list(encoded.chunks(100)) == []
