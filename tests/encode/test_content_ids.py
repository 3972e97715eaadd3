"""Ids of content: equal rows have equal ones in whatever order they come, and nothing else has."""

from __future__ import annotations

import collections
import random
from datetime import datetime

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rocketmq_spark.columnar.encode.content_ids import BatchName, ContentIds, RowHash, StoredRows
from rocketmq_spark.columnar.encode.encoder import Encoder
from rocketmq_spark.columnar.encode.ids import UniqueIds
from rocketmq_spark.columnar.encode.properties import BadRows
from rocketmq_spark.wire.identifiers import UniqKey, UniqKeys
from rocketmq_spark.wire.messages import decode_batch
from rocketmq_spark.wire.properties import decode_properties

NOVEMBER = datetime(2026, 11, 30, 23, 59, 59)
NAME = BatchName("query", 0, 7, b"offsets", "sink")
KEY = b"query"

SCHEMA = {
    "topic": pa.string(),
    "body": pa.binary(),
    "tags": pa.string(),
    "keys": pa.list_(pa.string()),
    "properties": pa.map_(pa.string(), pa.string()),
    "shardingKey": pa.string(),
    "flag": pa.int32(),
    "queueId": pa.int32(),
    "brokerName": pa.string(),
}
COLUMNS = {name.lower(): name for name in SCHEMA}


def of_size(size, seed):
    return random.Random(seed).randbytes(size)


_texts = st.none() | st.sampled_from(["", "a", "b", "ab", "x" * 9])
_rows = st.fixed_dictionaries(
    {
        "topic": st.sampled_from(["t", "u"]),
        "body": st.binary(max_size=40)  # lengths at which XXH3 goes another way, and beyond
        | st.builds(of_size, st.sampled_from([128, 129, 240, 241, 1024, 1025, 4099]), st.integers(0, 3)),
        "tags": _texts,
        "keys": st.none() | st.lists(st.sampled_from(["k", "l"]), max_size=2),
        "properties": st.none() | st.dictionaries(st.sampled_from("abc"), st.none() | st.sampled_from("xyz")),
        "shardingKey": _texts,
        "flag": st.none() | st.integers(-2, 2),
        "queueId": st.integers(0, 3),
        "brokerName": _texts,
    }
)


def frame(rows):
    columns = {
        name: pa.array([list(row[name].items()) if isinstance(row[name], dict) else row[name] for row in rows], kind)
        for name, kind in SCHEMA.items()
    }
    return pa.RecordBatch.from_pydict(columns)


def hashed(batch, columns=COLUMNS, topic=None, key=KEY):
    encoder = Encoder(columns, 1 << 20, ContentIds(NAME.scope(0), at()))
    return RowHash(key)(encoder.join(encoder.check(batch, BadRows())).joined(), batch, columns, topic)


def hashes(rows, columns=COLUMNS, topic=None, key=KEY):
    return [bytes(row) for row in hashed(frame(rows), columns, topic, key)]


def hashes_of(bodies):
    return hashed(pa.record_batch({"body": pa.array(bodies, pa.binary())}), {"body": "body"}, "t")


def content(row):
    """What is stored of a row: what is empty is as good as none, and a map has no order."""
    entries = row["properties"] or {}
    kept = frozenset((name, value) for name, value in entries.items() if value is not None)
    keys = " ".join(row["keys"] or ())
    return (
        row["topic"], row["body"], row["tags"] or "", keys, kept, row["shardingKey"] or "", row["flag"] or 0,
        row["queueId"], row["brokerName"] or "",
    )  # fmt: skip


@given(st.lists(_rows, min_size=1, max_size=12), st.randoms())
def test_hashes_ignore_order_of_rows_and_properties(rows, rng):
    found = hashes(rows)
    by_content = collections.defaultdict(set)
    for row, made in zip(rows, found, strict=True):
        by_content[content(row)].add(made)
    assert all(len(made) == 1 for made in by_content.values())
    assert len(set().union(*by_content.values())) == len(by_content)
    order = rng.sample(range(len(rows)), len(rows))
    shuffled = []
    for i in order:
        entries = list((rows[i]["properties"] or {}).items())
        rng.shuffle(entries)
        shuffled.append({**rows[i], "properties": dict(entries) or rows[i]["properties"]})
    assert hashes(shuffled) == [found[i] for i in order]
    alone = [hashes([row])[0] for row in rows]
    assert alone == found


@given(st.lists(_rows, min_size=1, max_size=4))
def test_a_slice_hashes_like_a_copy(rows):
    batch = frame([*rows, *rows])
    assert [bytes(row) for row in hashed(batch.slice(len(rows)))] == hashes(rows)


def test_a_row_hashes_alike_whatever_lengths_lie_beside_it():
    rng = random.Random(5)
    bodies = [rng.randbytes(rng.choice((rng.randrange(30), rng.randrange(2060), 2048, 4096, 9999))) for _ in range(600)]

    def of(some):
        return [bytes(row) for row in hashes_of(some)]

    assert of(bodies) == [of([body])[0] for body in bodies]
    assert of(bodies[:300] * 40) == of(bodies[:300]) * 40


def test_every_bit_of_a_body_counts():
    rng = random.Random(6)
    for length in [*range(1, 34), 1001, 6150]:
        body = rng.randbytes(length)
        places = (
            set(range(length))
            if length < 40
            else {0, 3, 4, 7, 8, 991, 992, 993, 999, 1000, length // 2, length - 7, length - 1}
        )
        flipped = [body[:at] + bytes([body[at] ^ 1 << bit]) + body[at + 1 :] for at in places for bit in range(8)]
        turned = [body[2048:4096] + body[:2048] + body[4096:]] if length > 4096 else []  # parts that are hashed as one
        some = [body, body + b"\0", body[:-1], *flipped, *turned]
        made = hashes_of(some)
        for part in (made[:, :8], made[:, 8:]):  # both halves
            assert len({bytes(row) for row in part}) == len(some)


def test_swapped_parts_of_large_body_change_its_hash():
    """Also those that move by as much to the left as others to the right."""
    rng = random.Random(8)
    none, some = rng.randbytes(2048), rng.randbytes(2048)
    bodies = [
        b"".join((none, some)[where >> at & 1] for at in range(8)) + end for where in range(256) for end in (b"", b"x")
    ]
    made = hashes_of(bodies)
    for part in (made[:, :8], made[:, 8:]):
        assert len({bytes(row) for row in part}) == len(bodies)


def test_a_batch_that_an_earlier_build_began_has_the_same_hashes():
    """On every machine, so that a query can be finished elsewhere; a change of these needs a new version of the notes."""
    row = {
        "topic": "t", "body": b"body " * 900, "tags": "a", "keys": ["k", "l"], "properties": {"b": "2", "a": "1"},
        "shardingKey": "s", "flag": 3, "queueId": 1, "brokerName": "broker-a",
    }  # fmt: skip
    small = dict.fromkeys(SCHEMA) | {"topic": "t", "body": b"b", "queueId": 0}
    assert [made.hex() for made in hashes([row, small])] == ["381744ad8b81cef131b100b8", "4f7d9cc54cfe49f9db4ec8a0"]


def test_hash_ignores_column_order_but_not_column_of_value():
    row = dict.fromkeys(SCHEMA) | {"topic": "t", "body": b"b", "tags": "x", "queueId": 1}
    (first,) = hashes([row])
    turned = dict(reversed(COLUMNS.items()))
    assert hashes([row], turned) == [first]
    others = [row | {"tags": "b", "body": b"x"}, row | {"tags": None, "shardingKey": "x"}, row | {"topic": "b"}]
    assert len({first, *hashes(others)}) == 4
    assert hashes([row], key=b"other") != [first]


def test_many_different_rows_have_different_hashes():
    count = 300_000
    made = hashes_of([str(i).encode() for i in range(count)])
    first, second = made[:, :6], made[:, 6:]
    for half, width in ((made, 12), (first, 6), (second, 6)):
        assert len(np.unique(np.ascontiguousarray(half).view(f"V{width}"))) == count
    bits = np.unpackbits(made[:10_000], axis=1).mean(axis=0)
    assert ((bits > 0.45) & (bits < 0.55)).all(), "every bit is as often 0 as 1"


def test_with_row_ids_these_are_the_content():
    ids = pa.array([1, 2, 1], pa.int64())
    batch = pa.RecordBatch.from_pydict({"body": pa.array([b"a", b"a", b"c"]), "id": ids})
    columns = {"body": "body", "messageid": "id"}
    first, second, third = hashed(batch, columns, "t").tolist()
    assert first == third != second
    for queue, broker in ((0, "a"), (1, "b")):  # a repeat may go elsewhere
        where = {"queueId": pa.array([queue] * 3, pa.int32()), "brokerName": pa.array([broker] * 3)}
        placed = pa.RecordBatch.from_pydict({"body": batch["body"], "id": ids, **where})
        placed_columns = {**columns, "queueid": "queueId", "brokername": "brokerName"}
        assert hashed(placed, placed_columns, "t").tolist() == [first, second, third]
    assert hashed(batch, columns, "u").tolist()[0] != first


def test_query_epoch_batch_offsets_write_and_partition_separate():
    others = [
        NAME._replace(query="other"), NAME._replace(epoch=1), NAME._replace(number=8), NAME._replace(offsets=b"offset"),
        NAME._replace(write_name="s2"), NAME._replace(offsets=b"offsetss", write_name="ink"),
    ]  # fmt: skip
    scopes = {name.scope(0) for name in (NAME, *others)} | {NAME.scope(1)}
    assert len(scopes) == len(others) + 2
    assert all(len(scope) == 10 for scope in scopes)
    assert NAME.scope(0)[:7] == NAME.scope(1)[:7]
    with pytest.raises(ValueError, match="16777216"):
        NAME.scope(1 << 24)


def texts(ids, made):
    rows = np.empty((len(made), 56), np.uint8)
    ids.fill(rows, made)
    return [bytes(row).decode() for row in rows]


def at(moment=NOVEMBER):
    return lambda: round(moment.timestamp() * 1000)


def test_java_reads_id_time_and_wrapped_counter_repeats_no_id():
    made = np.frombuffer(random.Random(1).randbytes(12) * 140_000, np.uint8).reshape(-1, 12)
    ids = ContentIds(NAME.scope(3), at())
    found = texts(ids, made) + texts(ids, made[:10])
    assert len(set(found)) == len(found)
    java = UniqKey.parse(UniqKeys(random.Random(0)).next(at()())).month_ms
    parsed = [UniqKey.parse(text) for text in (found[0], found[65_535], found[65_536], found[-1])]
    assert [(key.month_ms - java, key.counter) for key in parsed] == [(0, 0), (0, 65_535), (1, 0), (2, 8_937)]
    compared = {text[:44] for text in found}
    assert compared == {(NAME.scope(3) + made[0].tobytes()).hex().upper()}


def test_time_of_id_follows_clock_across_month_change():
    made = np.zeros((1, 12), np.uint8)
    moments = [NOVEMBER, NOVEMBER, datetime(2026, 12, 1, 0, 0, 1)]
    ids = ContentIds(NAME.scope(0), lambda: at(moments[0])())
    while moments:
        java = UniqKey.parse(UniqKeys(random.Random(0)).next(at(moments[0])()))
        assert UniqKey.parse(texts(ids, made)[0]).month_ms == java.month_ms
        del moments[0]


def test_equal_rows_of_one_millisecond_have_ids_of_their_own():
    ids, row = ContentIds(NAME.scope(0), at()), np.zeros((1, 12), np.uint8)
    assert len({texts(ids, row)[0] for _ in range(3)}) == 3


def test_the_encoder_writes_them():
    rows = [dict.fromkeys(SCHEMA) | {"topic": "t", "body": b"%d" % i, "queueId": 0} for i in range(3)]
    encoder = Encoder({"body": "body"}, 100, ContentIds(NAME.scope(1), at()))
    plain = Encoder({"body": "body"}, 100, UniqueIds(b"12345678", at()))
    batch = frame(rows)
    bad = plain(batch)  # of another width
    checked = encoder.check(batch, BadRows())
    encoded = encoder.join(checked)
    made = RowHash(KEY)(encoded.joined(), batch, {"body": "body"}, "t")
    encoder.add_content_ids(encoded, checked, lambda items, first: made[first : first + len(items)])
    assert len(bad) == len(encoded) == 3
    (chunk,) = encoded.chunks(1 << 20)
    items = decode_batch(chunk.body)
    assert [bytes(item.body) for item in items] == [b"0", b"1", b"2"]
    ids = [decode_properties(item.properties)["UNIQ_KEY"] for item in items]
    assert [text[:44] for text in ids] == [(NAME.scope(1) + row.tobytes()).hex().upper() for row in made]


@pytest.mark.parametrize("order", [None, np.arange(200) ** 2 % 200], ids=["in order", "in another order"])
@pytest.mark.parametrize("looked", [False, True])
def test_row_ids_are_equal_in_batches_joined_one_by_one(order, looked):
    rows = [dict.fromkeys(SCHEMA) | {"topic": f"t{i % 3}", "body": b"%d" % (i % 90) * 20} for i in range(200)]
    columns, batch = {"body": "body", "topic": "topic"}, frame(rows)
    encoder = Encoder(columns, 10_000, ContentIds(NAME.scope(1), at()))
    checked, hashed = encoder.check(batch, BadRows()), RowHash(KEY)
    whole = hashed(encoder.join(checked).joined(), batch, columns, None)
    encoded = encoder.join(checked)
    if looked:
        encoded.joined()
    parts = []

    def made(items, first):
        parts.append((first, len(items)))
        return hashed(items, batch.slice(first, len(items)), columns, None)

    encoder.add_content_ids(encoded, checked, made)
    encoded = encoded if order is None else encoded.take(order)
    items = [item for chunk in encoded.chunks(16_000) for item in decode_batch(chunk.body)]
    ids = [decode_properties(item.properties)["UNIQ_KEY"] for item in items]
    assert [text[:44] for text in ids] == [
        (NAME.scope(1) + whole[row].tobytes()).hex().upper() for row in (range(200) if order is None else order)
    ]
    assert len(set(ids)) == (200 if order is None else len(set(order)))
    assert (len(parts) > 1) is (order is None and not looked), parts


def test_a_short_last_chunk_does_not_hash_the_others_again():
    rows = [dict.fromkeys(SCHEMA) | {"body": b"%03d" % i} for i in range(200)]
    columns, batch = {"body": "body"}, frame(rows)
    encoder = Encoder(columns, 10_000, ContentIds(NAME.scope(1), at()))
    checked, hashed, parts = encoder.check(batch, BadRows()), RowHash(KEY), []
    encoded = encoder.join(checked)

    def made(items, first):
        parts.append((first, len(items)))
        return hashed(items, batch.slice(first, len(items)), columns, "t")

    encoder.add_content_ids(encoded, checked, made)
    size = len(next(encoded.chunks(1 << 20)).body) // 200
    parts.clear()
    encoded = encoder.join(checked)
    encoder.add_content_ids(encoded, checked, made)
    items = [item for chunk in encoded.chunks(90 * size) for item in decode_batch(chunk.body)]
    assert [bytes(item.body) for item in items] == [row["body"] for row in rows]
    assert parts == [(0, 90), (90, 90), (180, 20)]


@given(st.lists(st.integers(0, 5), max_size=20), st.lists(st.lists(st.integers(0, 5), max_size=8), max_size=4))
def test_stored_rows_are_counted_over_the_batches(stored, batches):
    def made(numbers):
        return np.array([list(n.to_bytes(12, "little")) for n in numbers], np.uint8).reshape(-1, 12)

    rows, left = StoredRows(made(stored)), collections.Counter(stored)
    for batch in batches:
        expected = []
        for number in batch:
            expected.append(not left[number])
            left[number] -= left[number] > 0
        assert rows.missing_mask(made(batch)).tolist() == expected
    assert rows.unmatched_count == left.total()
