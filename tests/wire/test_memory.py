"""How much memory the messages of another client may take."""

from __future__ import annotations

import struct
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rocketmq_spark.base.budget import MESSAGE_OVERHEAD_BYTES
from rocketmq_spark.base.codes import INNER_BATCH_MASK, SysFlag
from rocketmq_spark.errors import RemoteProtocolError
from rocketmq_spark.wire.messages import (
    BODY_OMITTED,
    NO_MEMORY,
    BatchItem,
    DecodeBudget,
    UnwrapBudget,
    decode_leniently,
    decompressed,
    encode_batch,
    message_memory,
    single_message,
)
from tests.harness import peak_bytes, store

PACKED = int(SysFlag.COMPRESSED | SysFlag.ZLIB)
EMPTY = struct.pack(">iiiiiH", 0, 0, 0, 0, 0, 0)
MIB = 1 << 20


def batch(items: bytes) -> bytes:
    return store("t", zlib.compress(items), sys_flag=int(INNER_BATCH_MASK) | PACKED)


def zeros(size: int) -> bytes:
    return store("t", zlib.compress(bytes(size)), sys_flag=PACKED)


def test_messages_without_bodies_take_memory_too() -> None:
    data = batch(EMPTY * 20_000)
    room = DecodeBudget(10_000 * MESSAGE_OVERHEAD_BYTES)
    (found,) = decode_leniently(data, budget=room)
    assert (found.decode_error, found.body) == (NO_MEMORY, zlib.compress(EMPTY * 20_000))
    roomy = DecodeBudget(20_001 * MESSAGE_OVERHEAD_BYTES)
    assert len(list(decode_leniently(data, budget=roomy))) == 20_000
    assert roomy.remaining_bytes == MESSAGE_OVERHEAD_BYTES


def test_a_batch_of_large_properties_does_not_fit_either() -> None:
    text = "".join(f"n{i}\x01v\x02" for i in range(4000))
    data = batch(encode_batch([BatchItem(b"", text, 0)] * 100))
    (found,) = decode_leniently(data, budget=DecodeBudget(4 * MIB))
    assert found.decode_error == NO_MEMORY


def test_what_does_not_fit_is_not_inflated() -> None:
    data = b"".join(batch(EMPTY * 500_000) for _ in range(8)) + b"".join(zeros(60 * MIB) for _ in range(8))
    assert peak_bytes(lambda: list(decode_leniently(data, budget=DecodeBudget(2 * MIB)))) < 24 * MIB


def test_smaller_messages_come_after_one_that_does_not_fit() -> None:
    data = zeros(2 * MIB) + zeros(1000) + store("t", b"plain")
    found = list(decode_leniently(data, budget=DecodeBudget(MIB)))
    assert [(m.decode_error, len(m.body)) for m in found[1:]] == [(None, 1000), (None, 5)]
    assert found[0].decode_error == NO_MEMORY


def test_damage_is_not_taken_for_a_lack_of_room() -> None:
    damaged = store("t", b"no zlib", sys_flag=PACKED)
    (found,) = decode_leniently(damaged, budget=DecodeBudget(1000))
    assert "Not a zlib body" in (found.decode_error or "")


def test_next_messages_stay_compressed_and_batches_free_memory() -> None:
    room = UnwrapBudget(MIB)
    data = zeros(60 * MIB) + batch(encode_batch([BatchItem(b"a", "", 0), BatchItem(b"b", "", 0)])) + zeros(10)
    messages = decode_leniently(data, budget=room)
    first = next(messages)
    assert (len(first.body) < MIB, len(decompressed(first).body), room.remaining_bytes) == (True, 60 * MIB, MIB)
    assert (next(messages).body, room.remaining_bytes < MIB) == (b"a", True)
    assert [decompressed(m).body for m in messages] == [b"b", bytes(10)]
    assert room.remaining_bytes == MIB


def test_what_was_kept_compressed_fits_or_stays_so() -> None:
    kept = list(decode_leniently(zeros(MIB) * 2 + store("t", bytes(MIB)), budget=UnwrapBudget(MIB)))
    room = DecodeBudget(MIB + MIB // 2)
    found = [room.decompress(message) for message in kept]
    assert [(len(m.body) == MIB, m.decode_error) for m in found] == [
        (True, None),
        (False, NO_MEMORY),
        (False, BODY_OMITTED),
    ]


@given(
    st.lists(st.sampled_from([zeros(5000), batch(EMPTY * 30), store("t", b"x"), b"?" * 99]), max_size=9),
    st.integers(0, 60_000),
)
def test_no_message_is_lost_for_lack_of_room(parts: list[bytes], limit: int) -> None:
    data = b"".join(parts)
    found = list(decode_leniently(data, budget=DecodeBudget(limit)))
    whole = list(decode_leniently(data))
    assert sum(m.decode_error is None for m in whole) >= sum(m.decode_error is None for m in found)
    packed = [m for m in found if m.decode_error == NO_MEMORY]
    assert len(found) + 29 * sum(bool(m.sys_flag & int(SysFlag.INNER_BATCH)) for m in packed) == len(whole)
    held = sum(message_memory(m) for m in found if m.decode_error is None and m.body != b"x")
    assert held <= limit + MESSAGE_OVERHEAD_BYTES


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b"", "no message came"),
        (zeros(9) * 2, "more than one message came"),
        (batch(EMPTY * 3), "a batch came"),
        (store("t", EMPTY * 3, sys_flag=int(INNER_BATCH_MASK)), "a batch came"),
    ],
)
def test_a_server_pushes_one_message(body: bytes, said: str) -> None:
    with pytest.raises(RemoteProtocolError, match=f"{said} here, expected"):
        single_message(body, "b", "here")


def test_a_pushed_message_is_inflated_when_it_is_opened() -> None:
    found = single_message(zeros(60 * MIB), "b", "here")
    assert len(found.body) < MIB
    assert len(decompressed(found).body) == 60 * MIB
    assert decompressed(found, MIB).decode_error == NO_MEMORY
