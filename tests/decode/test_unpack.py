"""Portions of compressed bodies, cut by what the bodies become."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest

from rocketmq_spark.base.codes import SysFlag
from rocketmq_spark.columnar.decode import decoder, stored_messages
from rocketmq_spark.columnar.decode.decoder import Decoder
from rocketmq_spark.columnar.decode.rows import ReferenceDecoder
from rocketmq_spark.columnar.decode.schema import BASIC_COLUMNS, DECODE_ERROR, FULL_COLUMNS, BadMessages
from rocketmq_spark.wire import compression
from rocketmq_spark.wire.messages import BatchItem, encode_batch
from tests.decode.fetching import QUEUES, Answer, fetch, one, stored

KINDS = [SysFlag.ZLIB, SysFlag.LZ4, SysFlag.ZSTD]


def zeros(size: int, offset: int, kind: int = SysFlag.ZSTD) -> bytes:
    body = compression.compress(bytes(size), kind)
    return stored(body, queue_offset=offset, sys_flag=SysFlag.COMPRESSED | kind)


def sizes(fetched, rows: slice, portion: int | None) -> list[list[int | None]]:
    found = stored_messages.locate(fetched.buffer, fetched.answers)
    return [
        [None if b is None else len(b) for b in part.bodies]
        for part in decoder.decompressed_bodies(found, rows, portion)
    ]


@pytest.mark.parametrize(
    ("portion", "expected"),
    [
        (None, [[100, 200, 300, 400]]),
        (300, [[100, 200], [300], [400]]),
        (301, [[100, 200, 300], [400]]),
        (1, [[100], [200], [300], [400]]),
        (1000, [[100, 200, 300, 400]]),
        (1001, [[100, 200, 300, 400]]),
    ],
)
def test_a_part_ends_as_soon_as_it_is_full(portion, expected):
    fetched = one(*(zeros(100 * i, i) for i in range(1, 5)))
    assert sizes(fetched, slice(0, 4), portion) == expected


def test_nothing_is_one_part():
    assert sizes(one(zeros(1, 0)), slice(1, 1), 100) == [[]]


def test_what_is_bad_is_told_by_its_place_in_the_part():
    bad = stored(b"x", sys_flag=SysFlag.COMPRESSED, queue_offset=2)
    fetched = one(zeros(50, 0), zeros(50, 1), bad, stored(b"plain", queue_offset=3))
    found = stored_messages.locate(fetched.buffer, fetched.answers)
    first, second = decoder.decompressed_bodies(found, slice(0, 4), 100)
    assert (first.first_row, second.first_row, second.bodies) == (0, 2, [None, b"plain"])
    assert list(second.reasons) == [0]
    assert "zlib" in second.reasons[0]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "decode", [Decoder(QUEUES), ReferenceDecoder(QUEUES, BASIC_COLUMNS, "user")], ids=["fast", "careful"]
)
def test_megabytes_of_zeros_come_in_many_batches(kind, decode):
    """Of a buffer of some kilobytes."""
    fetched = one(*(zeros(1 << 20, i, kind) for i in range(16)))
    batches = list(decode.batches(fetched, 1 << 20))
    assert [len(batch) for batch in batches] == [1] * 16
    assert pa.Table.from_batches(batches).column("queueOffset").to_pylist() == list(range(16))


def test_compressed_inner_batches_come_in_many_batches():
    inner = encode_batch([BatchItem(bytes(1 << 19), "") for _ in range(4)])
    packed = compression.compress(inner, SysFlag.ZSTD)
    flags = SysFlag.NEED_UNWRAP | SysFlag.INNER_BATCH | SysFlag.COMPRESSED | SysFlag.ZSTD
    fetched = one(*(stored(packed, queue_offset=4 * i, sys_flag=flags) for i in range(4)))
    assert [len(batch) for batch in Decoder(QUEUES).batches(fetched, 1 << 20)] == [2] * 8


def test_the_columns_tell_what_is_bad():
    arrays = [pa.array([1, 2]), pa.nulls(2, pa.string()), pa.array([b"x", None], pa.binary())]
    columns = [next(c for c in FULL_COLUMNS if c.name == "sysFlag"), DECODE_ERROR, BASIC_COLUMNS[4]]
    checked = decoder.arrays_with_errors(arrays, columns, {1: "why"}, np.array([1, 3], np.int32))
    assert [array.to_pylist() for array in checked] == [[1, 3], [None, "why"], [b"x", None]]


def test_messages_of_a_batch_do_not_count_as_the_batch_each() -> None:
    """On the careful path, where one bad neighbour sends them: a batch of each row would take a third of a millisecond a row."""
    flags = int(SysFlag.NEED_UNWRAP | SysFlag.INNER_BATCH)
    body = encode_batch([BatchItem(b"x" * 10)] * 30_000)
    bad, good = (stored(one, queue_offset=at, sys_flag=flags) for at, one in enumerate((b"garbled", body)))
    fetched = fetch(Answer([bad, good], limit=30_001, next_offset=30_001))
    sizes = [len(batch) for batch in Decoder(QUEUES, bad_messages=BadMessages("null")).batches(fetched, 1 << 20)]
    assert sum(sizes) == 30_001
    assert len(sizes) < 20
