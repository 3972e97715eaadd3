"""Headers of RocksDB's records: what is torn, what is blank, what was changed, and what it was."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rocketmq_spark.spool.files import BLOCK_BYTES, _crc32c, _masked_checksum, find_header_damage


def record(payload: bytes, kind: int = 1) -> bytes:
    crc = _masked_checksum(_crc32c(bytes([kind]) + payload))
    return crc.to_bytes(4, "little") + len(payload).to_bytes(2, "little") + bytes([kind]) + payload


def test_the_checksum_is_castagnolis() -> None:
    # RFC 3720, B.4
    assert _crc32c(b"123456789") == 0xE3069283
    assert _crc32c(bytes(32)) == 0x8A9136AA
    assert _crc32c(b"6789", _crc32c(b"12345")) == 0xE3069283


@given(st.lists(st.binary(max_size=50), min_size=1, max_size=8), st.data())
def test_changed_log_header_is_repaired_and_torn_end_is_valid(payloads: list[bytes], data: st.DataObject) -> None:
    whole = b"".join(map(record, payloads))
    assert find_header_damage(whole).problem is None
    assert find_header_damage(whole[: data.draw(st.integers(0, len(whole)))]).problem is None
    places = [sum(7 + len(each) for each in payloads[:i]) for i in range(len(payloads))]
    place = data.draw(st.sampled_from(places))
    at = place + data.draw(st.sampled_from([4, 5, 6]))
    broken = bytearray(whole)
    broken[at] ^= data.draw(st.integers(1, 255))
    found = find_header_damage(bytes(broken))
    assert not found.lost_ranges
    if found.problem is None:
        assert broken[place + 6] in (1, 2, 3, 4), "RocksDB itself finds only what keeps the chain of records"
    else:
        assert found.repair(bytes(broken)) == whole
        assert f"at byte {place} " in found.problem


@pytest.mark.parametrize("length", [0, 3, 7, 100])
def test_blank_ends_are_no_damage(length: int) -> None:
    assert find_header_damage(record(b"x") + bytes(length)).problem is None
    full = record(b"x" * (BLOCK_BYTES - 7 - 8 - 3)) + record(b"y")
    assert find_header_damage(full + bytes(BLOCK_BYTES - len(full)) + record(b"next")).problem is None


def test_a_type_of_a_newer_rocksdb_is_none_either() -> None:
    assert find_header_damage(record(b"x") + record(b"y", kind=130) + record(b"z")).problem is None


def test_what_fits_no_checksum_is_lost_to_the_end_of_its_block() -> None:
    first, second = record(b"x" * 50), record(b"y" * 50)
    broken = bytearray(first + second + bytes(BLOCK_BYTES - 114) + first)
    broken[60], broken[63] = 0x33, 0x77  # of the second's header: its checksum and its type
    found = find_header_damage(bytes(broken))
    assert (found.original_headers, found.lost_ranges) == ({}, [(57, BLOCK_BYTES)])
    assert found.repair(bytes(broken)) == first + bytes(BLOCK_BYTES - 57) + first


@pytest.mark.parametrize("cut", [1, 6, 7, 20])
def test_torn_end_of_complete_log_file_counts_as_lost_record(cut: int) -> None:
    first, second = record(b"x" * 50), record(b"y" * 50)
    torn = first + second[:cut]
    assert find_header_damage(torn).problem is None
    found = find_header_damage(torn, may_be_torn=False)
    assert found.lost_ranges == [(57, 57 + cut)]
    assert found.repair(torn) == first + bytes(cut)
    assert find_header_damage(first, may_be_torn=False).problem is None
