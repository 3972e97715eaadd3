"""Messages made by columns are those that are made one by one of the same rows, as protobuf reads them."""

from __future__ import annotations

import itertools

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rocketmq_spark.columnar.encode import proxy_rows
from rocketmq_spark.columnar.encode.encoder import Encoder, Growth, RowTopics
from rocketmq_spark.columnar.encode.ids import UniqueIds
from rocketmq_spark.columnar.encode.proxy_rows import ProxyRowEncoder
from rocketmq_spark.errors import MessageRefused
from rocketmq_spark.grpc_proxy.encoder import ProxyBatch, ProxyEncoder
from rocketmq_spark.grpc_proxy.protos import proto
from rocketmq_spark.model import SendRequest
from rocketmq_spark.producer.outgoing import to_storable
from rocketmq_spark.session import proxy_clients
from rocketmq_spark.wire.messages import decode_batch
from tests.encode.test_encoder import NAMES, batch_of
from tests.encode.test_encoder import rows as encoder_rows
from tests.live.writes import frame

BORN = 1_767_225_600_123
ONE = RowTopics(["t"])
PROXY = ProxyEncoder(lambda topic: f"ns%{topic}", "host", proxy_clients.sent_messages)


_SHOWN = {code: 0x2400 + code for code in (*range(32), *range(127, 160), ord("|"))}


def shown(value):
    """Without what a Proxy refuses."""
    if isinstance(value, list | tuple):
        return type(value)(map(shown, value))
    return value.translate(_SHOWN) if isinstance(value, str) else value


def any_rows():
    return encoder_rows().filter(bool).map(shown)


@pytest.fixture(autouse=True, scope="module")
def _clock():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(proxy_rows, "epoch_ms", lambda: BORN)
        yield


def encoder(kind, columns, **more):
    return kind(columns, 4 << 20, UniqueIds(b"taskid00", lambda: BORN), **more)


def encoded(batch, columns=None, topics=ONE):
    """The rows by columns."""
    columns = columns or {name.lower(): name for name in batch.schema.names}
    encode, bad_rows = encoder(ProxyRowEncoder, columns, proxy=PROXY), proxy_rows.BadRows()
    checked = encode.check(batch, bad_rows)
    bad_rows.raise_if_any()
    return encode.join(checked, topics=topics)


def items_of(batch, columns=None):
    """The rows as brokers take them."""
    columns = columns or {name.lower(): name for name in batch.schema.names}
    return [bytes(chunk.body) for chunk in encoder(Encoder, columns)(batch).chunks(0)]


def one_by_one(items, topic="t"):
    return PROXY.batch_of(topic, SendRequest("g", b"".join(items), batch=True, born_timestamp_ms=BORN))


def read(made):
    """What the requests of a batch say, with the ids that their answers are compared with."""
    parse = proto("SendMessageRequest").FromString
    return [[(list(parse(each.data).messages), each.ids, each.is_delayed) for each in chain] for chain in made.chains]


def whole(made):
    """All rows as one batch."""
    (chunk,) = made.chunks(1 << 30)
    assert chunk.row_count == len(made)
    assert len(chunk.body) == sum(len(each.data) for chain in chunk.body.chains for each in chain)
    return chunk.body


def same(batch, columns=None):
    assert read(whole(encoded(batch, columns))) == read(one_by_one(items_of(batch, columns)))


@given(any_rows(), st.data())
def test_any_rows(made, data):
    rows = batch_of([(*row[:4], 0) for row in made])
    same(rows, NAMES)
    same(rows.slice(data.draw(st.integers(0, len(made) - 1))), NAMES)


@pytest.mark.parametrize("count", [1, 1000])
def test_rows_of_one_writer(count):
    """Bodies that hold separators, and lengths of one, two and three bytes in one column."""
    numbers = range(count)
    same(
        frame(
            body=pa.array([bytes([1, 2, 32]) * (1 + 40 * (n % 300)) for n in numbers], pa.binary()),
            tags=[f"tag{n % 4}" for n in numbers],
            keys=[f"key-{n}" for n in numbers],
            properties=[[("color", "r" * (1 + n)), ("größe", "ß")] for n in numbers],
        )
    )


def test_several_keys_and_none():
    same(frame(body=["x"] * 5, keys=[["a", "bc"], None, ["d"], [], ["e", "", "f"]]))
    same(frame(body=["x"] * 4, keys=pa.array(["a  b", "", None, " "])))


def test_groups_and_priorities_are_requests_of_their_own():
    same(frame(body=list("abcd"), shardingKey=["g", None, "h", "g"]))
    same(frame(body=list("abcd"), shardingKey=["g", "", "h", None]))
    same(frame(body=list("abcd"), shardingKey=["g", "h", "h", "g"]))
    made = whole(encoded(frame(body=list("abc"), priority=pa.array([300, None, 0], pa.int32()))))
    careful = one_by_one(items_of(frame(body=list("abc"), priority=pa.array([300, None, 0], pa.int32()))))
    assert read(made) == read(careful)
    assert [len(chain) for chain in made.chains] == [1, 1, 1]


@pytest.mark.parametrize("keys", [{}, {"shardingKey": ["g", None, "h", "g", "h"]}], ids=["plain", "groups"])
def test_some_rows_keep_their_ids_and_groups(keys):
    """Those of one topic, or in the order of a plan: else what was stored would count as failed, and groups lose their order."""
    rows = frame(body=list("abcde"), **keys)
    for start, end in ((0, 2), (2, 5)):
        assert read(whole(encoded(rows).slice(start, end))) == read(one_by_one(items_of(rows)[start:end]))
    order = [3, 4, 0, 1]
    assert read(whole(encoded(rows).take(np.array(order)))) == read(one_by_one([items_of(rows)[row] for row in order]))


def test_rows_of_several_topics():
    rows = frame(body=list("abc"))
    made = whole(encoded(rows, topics=RowTopics(["t", "other"], [0, 1, 0])))
    a, b, c = items_of(rows)
    expected = [read(one_by_one([item], topic))[0][0][0][0] for item, topic in ((a, "t"), (b, "other"), (c, "t"))]
    assert read(made)[0][0][0] == expected


def test_batch_with_delays_is_encoded_row_by_row_as_for_brokers():
    rows = frame(body=list("abc"), delayMs=[5, None, 0], keys=["a", "b", "c"])
    chunks = list(encoded(rows).chunks(0))
    assert [bytes(chunk.body) for chunk in chunks] == items_of(rows)
    same(frame(body=["a"], delayMs=[0], delayLevel=pa.array([None], pa.int32())))


@given(any_rows(), st.integers(1, 300), st.none() | st.integers(1, 4), st.data())
def test_chunks_are_whole_messages_in_order(made, max_bytes, max_rows, data):
    rows = batch_of([(*row[:4], 0) for row in made])
    picked = data.draw(st.permutations(range(len(made))))
    taken = encoded(rows, NAMES).take(pa.array(picked).to_numpy()).slice(0, len(made))
    chunks = list(taken.chunks(max_bytes, max_rows))
    found = [message for chunk in chunks for message in chunk.body.messages()]
    assert [message.body for message in found] == [made[i][0] for i in picked]
    ids = ",".join(each.ids for chunk in chunks for chain in chunk.body.chains for each in chain).split(",")
    assert ids == [message.properties["UNIQ_KEY"] for message in found]
    for chunk in chunks:
        assert len(chunk.body) <= max_bytes or chunk.row_count == 1
        assert max_rows is None or chunk.row_count <= max_rows


@given(any_rows(), st.integers(1, 100), st.integers(100, 900))
def test_what_brokers_count_is_bounded_as_for_their_own_items(made, item_bytes, most):
    """The Proxy hands the rows on in the layout of items."""
    rows = batch_of([(*row[:4], 0) for row in made])
    chunks = list(encoded(rows, NAMES).chunks(1 << 30, growth=Growth(item_bytes, most)))
    expected = encoder(Encoder, NAMES)(rows).chunks(1 << 30, growth=Growth(item_bytes, most))
    assert [chunk.row_count for chunk in chunks] == [chunk.row_count for chunk in expected]


@given(any_rows())
def test_each_row_has_the_size_of_its_item(made):
    rows = batch_of([(*row[:4], 0) for row in made])
    ends = encoded(rows, NAMES)._stored_ends().tolist()
    assert [end - begin for begin, end in itertools.pairwise(ends)] == [len(item) for item in items_of(rows, NAMES)]


def test_a_spool_gets_the_items_of_brokers():
    rows = frame(body=["a", "b"], tags=["t", None], properties=[[("p", "v")], None])
    request = SendRequest("g", whole(encoded(rows)), batch=True)
    kept = to_storable(request)
    assert proxy_clients.sent_messages(kept) == one_by_one(items_of(rows)).messages()
    (row,) = encoded(rows.slice(0, 1)).chunks(0)
    single = to_storable(SendRequest("g", row.body, batch=True))
    assert (single.batch, single.body) == (False, b"a")
    assert proxy_clients.sent_messages(single) == row.body.messages()
    assert isinstance(row.body, ProxyBatch)
    assert len(decode_batch(kept.data)) == 2


@pytest.mark.parametrize(
    ("columns", "said"),
    [
        ({"flag": pa.array([0, 3], pa.int32())}, "row 1: its flag is 3, which gRPC cannot transport"),
        ({"shardingKey": [None, "g"], "priority": pa.array([1, 2])}, "row 1: it is FIFO and PRIORITY"),
        ({"shardingKey": ["f", "g"], "delayMs": [None, 5]}, "1 rows .* row 1: it is FIFO and DELAY"),
        ({"priority": pa.array([1, 2]), "delayMs": [5, None]}, "1 rows .* row 0: it is PRIORITY and DELAY"),
        ({"tags": pa.array([b"a", b"\xff"])}, "row 1: TAGS is not UTF-8"),
        (
            {"properties": pa.array([[(b"a", b"x")], [(b"a", b"\xff")]], pa.map_(pa.binary(), pa.binary()))},
            "row 1: a is",
        ),
        ({"properties": pa.array([[], [(b"\xff", b"x")]], pa.map_(pa.binary(), pa.binary()))}, "row 1: a property is"),
        (
            {"properties": pa.array([[(b"\xff", b"x")], [(b"\xff", b"y")]], pa.map_(pa.binary(), pa.binary()))},
            "2 rows .* row 0: a property is not UTF-8",
        ),
        ({"tags": pa.array([b"a", b"\xff"]), "delayMs": [5, None]}, "row 1: TAGS is not UTF-8"),
        ({"tags": pa.array([b"a\xc3", b"\xa9b"]), "delayMs": [5, None]}, "2 rows .* row 0: TAGS is not UTF-8"),
        ({"tags": ["a", "b\n"]}, "1 rows .* row 1: TAGS has a control character"),
        ({"tags": ["a|b", "c"]}, "1 rows .* row 0: TAGS has a '\\|', which a Proxy rejects"),
        ({"keys": [["k\x7f"], None]}, "1 rows .* row 0: KEYS has a control character"),
        (
            {"shardingKey": ["é", "g\x85"], "delayMs": [5, None]},
            "2 rows .* row 1: __SHARDINGKEY has a control character",
        ),
        ({"properties": [[("a", "x")], [("a", "\t")]]}, "1 rows .* row 1: a has a control character"),
        ({"properties": [[("a\r", "x")], [("a\r", "y")]]}, "2 rows .* row 0: the name 'a.r' has a control character"),
        (
            {"properties": [[("a", "x")], [("b", "y"), ("c\0", "z")]]},
            "1 rows .* row 1: a property has a control character",
        ),
        ({"properties": [[("_SYS_MSG_PRIORITY_", "high")]] * 2}, "2 rows .* RocketMQ's own"),
        (
            {
                "properties": pa.array([[], [(b"a", b"\xff")]], pa.map_(pa.binary(), pa.binary())),
                "delayMs": [5, None],
            },
            "row 1: a property is",
        ),
    ],
)
def test_what_grpc_cannot_carry_is_a_fault_of_its_row(columns, said):
    with pytest.raises(MessageRefused, match=said):
        encoded(frame(body=["x", "y"], **columns))
