"""Requests made by columns are those that are made message by message, as protobuf reads them."""

from __future__ import annotations

import os

import pyarrow as pa
import pytest

from rocketmq_spark.base.codes import Property
from rocketmq_spark.columnar.encode.batch import UniqueIds
from rocketmq_spark.columnar.encode.encoder import Encoder
from rocketmq_spark.columnar.encode.proxy_request import MIN_ROWS, by_columns
from rocketmq_spark.grpc_proxy.outgoing import RequestEncoder, Topic
from rocketmq_spark.grpc_proxy.protos import proto
from rocketmq_spark.model import SendRequest
from rocketmq_spark.session import proxied
from rocketmq_spark.wire.messages import BatchItem, encode_batch

ENCODE = RequestEncoder(Topic("t", "ns%t"), 1_767_225_600_123, "host")
ROWS = 2 * MIN_ROWS


def both(body: bytes):
    """The request by columns and message by message; None for the first when that is not for it."""
    one_by_one = ENCODE(proxied.take_apart(SendRequest("g", body, batch=True)))
    return by_columns(body, ENCODE), one_by_one


def messages(data: bytes):
    return list(proto("SendMessageRequest").FromString(data).messages)


def same(body: bytes) -> None:
    quick, careful = both(body)
    assert quick is not None
    assert messages(quick.data) == messages(careful.data)
    assert (quick.ids, quick.delayed) == (careful.ids, careful.delayed)


def of_sink(rows: int, **columns: pa.Array) -> bytes:
    """As the sink encodes them, in one batch."""
    batch = pa.RecordBatch.from_pydict(columns)
    encoder = Encoder({name: name for name in columns}, 4 << 20, UniqueIds(os.urandom(8), lambda: 1_767_225_600_123))
    (chunk,) = encoder(batch).chunks(1 << 30)
    assert chunk.rows == rows
    return bytes(chunk.body)


def items(*texts: str, flag: int = 0) -> bytes:
    return encode_batch([BatchItem(b"body", text, flag) for text in texts])


@pytest.mark.parametrize("rows", [MIN_ROWS, 1000])
def test_rows_of_the_sink(rows):
    """Bodies that hold separators, and lengths of one, two and three bytes in one column."""
    numbers = range(rows)
    pairs = [[("color", "r" * (1 + n)), ("größe", "ß")] for n in numbers]
    same(
        of_sink(
            rows,
            body=pa.array([bytes([1, 2, 32]) * (1 + 40 * (n % 300)) for n in numbers], pa.binary()),
            tags=pa.array([f"tag{n % 4}" for n in numbers]),
            keys=pa.array([f"key-{n}" for n in numbers]),
            properties=pa.array(pairs, pa.map_(pa.string(), pa.string())),
        )
    )


def test_rows_without_anything_but_a_body():
    same(of_sink(ROWS, body=pa.array([b"x"] * ROWS, pa.binary())))


def test_messages_without_ids_and_with_what_the_proxy_sets_itself():
    same(items(*[f"color\x01{n}\x02WAIT\x01true\x02" for n in range(ROWS)]))


def some(text: str, at: int = 5) -> list[str]:
    """All alike but one."""
    return [text if n == at else f"UNIQ_KEY\x01{n:032}\x02TAGS\x01a\x02" for n in range(ROWS)]


@pytest.mark.parametrize(
    "texts",
    [
        pytest.param(some("UNIQ_KEY\x01I\x02"), id="fewer properties"),
        pytest.param(some("UNIQ_KEY\x01I\x02TAGX\x01a\x02"), id="another name"),
        pytest.param(some("UNIQ_KEY\x01I\x02TAGS2\x01a\x02"), id="a longer name"),
        pytest.param(some("TAGS\x01a\x02UNIQ_KEY\x01I\x02"), id="another order"),
        pytest.param(some("UNIQ_KEY\x01I\x02TAGS\x01\x02"), id="an empty value"),
        pytest.param(some("UNIQ_KEY\x01I\x02TAGS\x01a"), id="no end"),
        pytest.param(some("UNIQ_KEY\x01I\x02TAGS\x01a\x02b", at=ROWS - 1), id="something behind the last end"),
        pytest.param(some("UNIQ_KEY\x01I\x01TAGS\x02a\x02"), id="separators in another order"),
        pytest.param(some("UNIQ_KEY\x01I\x02\x01TAGS\x02"), id="an empty name"),
        pytest.param(some(""), id="none at all"),
        pytest.param([f"KEYS\x01a b{n}\x02" for n in range(ROWS)], id="several keys"),
        pytest.param(["a\x011\x02a\x012\x02"] * ROWS, id="a name twice"),
        pytest.param([f"a\x01{n}\x02" for n in range(MIN_ROWS - 1)], id="few"),
    ],
)
def test_what_is_not_alike_is_left_to_those_who_look_at_each(texts):
    quick, careful = both(items(*texts))
    assert quick is None
    assert len(messages(careful.data)) == len(texts)


@pytest.mark.parametrize("name", [Property.SHARDING_KEY, Property.DELAY, Property.PRIORITY, Property.TRANSACTION_ID])
def test_what_means_more_than_a_text_is_left_to_them_too(name):
    assert by_columns(items(*[f"{name}\x011\x02"] * ROWS), ENCODE) is None


def test_flags_and_bytes_that_are_no_text_too():
    assert by_columns(items(*["a\x011\x02"] * ROWS, flag=3), ENCODE) is None
    body = items(*["a\x011\x02"] * ROWS).replace(b"a\x011\x02", b"a\x01\xff\x02")
    assert by_columns(body, ENCODE) is None


def test_a_body_whose_sizes_do_not_add_up_is_left_to_the_decoder():
    body = items(*["a\x011\x02"] * ROWS)
    shorter = body[:24] + b"\0\1" + body[26:]  # the length of the first properties
    for broken in (
        shorter,
        body[:-1],
        body + b"x",
        b"\0\0\0\0" + body[4:],
        b"\xff" + body[1:],
        body[:16] + b"\x7f" + body[17:],
    ):
        assert by_columns(broken, ENCODE) is None
