"""Compressed bodies: Java's are read, ours are read back, and none grows beyond its bound."""

import random
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rocketmq_spark.base.codes import SysFlag
from rocketmq_spark.errors import DecodeError, LocalProtocolError
from rocketmq_spark.wire import compression
from rocketmq_spark.wire.compression import compress, compress_if_smaller, decompress
from tests.harness import check_decoder, left_behind, outcome, peak_bytes, vectors

KINDS = [SysFlag.ZLIB, SysFlag.LZ4, SysFlag.ZSTD]
every_kind = pytest.mark.parametrize("kind", KINDS)


def test_stored_vectors_include_every_kind_of_compressed_body():
    flags = {case["sys_flag"] & 0x701 for case in vectors("stored_messages")}
    assert {0x1, 0x101, 0x201, 0x301} <= flags  # decoded in test_messages.py


@every_kind
@given(body=st.binary(min_size=1, max_size=3000), level=st.integers(1, 9))
def test_there_and_back(kind, body, level):
    packed = compress(body, kind, level)
    assert decompress(packed, kind | SysFlag.COMPRESSED) == body
    assert decompress(memoryview(packed), kind, len(body)) == body


@every_kind
def test_formats_describe_themselves(kind):
    magic = {SysFlag.ZLIB: b"\x78", SysFlag.LZ4: b"\x04\x22\x4d\x18", SysFlag.ZSTD: b"\x28\xb5\x2f\xfd"}[kind]
    assert compress(b"body", kind).startswith(magic)


def test_old_producers_name_no_type():
    assert decompress(zlib.compress(b"body"), SysFlag.COMPRESSED) == b"body"
    assert compress(b"body", 0) == compress(b"body", SysFlag.ZLIB)


@every_kind
def test_every_cut_is_noticed(kind):
    body = bytes(range(256)) * 20
    packed = compress(body, kind)
    check_decoder(lambda data: decompress(data, kind), packed, body)
    step = max(1, len(packed) // 300)
    for end in range(0, len(packed), step):
        assert outcome(lambda data: decompress(data, kind), packed[:end]) is DecodeError


@every_kind
def test_the_bound(kind):
    packed = compress(bytes(1_000_000), kind)
    assert len(decompress(packed, kind, 1_000_000)) == 1_000_000
    with pytest.raises(DecodeError, match="larger than 999999"):
        decompress(packed, kind, 999_999)


@every_kind
def test_the_exact_bound_of_every_body(kind):
    """64 MiB, whoever asks without one of his own."""
    max_bytes = 64 << 20
    assert len(decompress(compress(bytes(max_bytes), kind), kind)) == max_bytes
    with pytest.raises(DecodeError, match=f"larger than {max_bytes} bytes"):
        decompress(compress(bytes(max_bytes + 1), kind), kind)


@every_kind
def test_bombs_do_not_unfold(kind):
    packed = compress(bytes(200_000_000), kind)
    assert peak_bytes(lambda: decompress(packed, kind, 1_000_000)) < 3_500_000


@every_kind
def test_bodies_that_cannot_be_decompressed_leave_nothing_behind(kind):
    packed = compress(b"".join(b"%d " % i for i in range(2000)), kind)
    broken = packed[:12] + b"\xff" * 16

    def fail() -> None:
        with pytest.raises(DecodeError):
            decompress(broken, kind)

    assert left_behind(fail, 100) < 100_000  # a whole chunk each is 26 MB


@every_kind
@pytest.mark.parametrize(
    "body", [b"", b"plain text", bytes(100), b"\x04\x22\x4d\x18", b"\x28\xb5\x2f\xfd", b"\x78\x9c"]
)
def test_other_bytes_are_refused(kind, body):
    with pytest.raises(DecodeError):
        decompress(body, kind)


def test_unknown_types():
    for kind in (0x400, 0x500, 0x700):
        with pytest.raises(DecodeError, match="Unknown"):
            decompress(b"x", kind | SysFlag.COMPRESSED)
        with pytest.raises(LocalProtocolError, match="Unknown"):
            compress(b"x", kind)


@pytest.mark.parametrize("kind", [SysFlag.ZLIB, SysFlag.LZ4, SysFlag.ZSTD])
@pytest.mark.parametrize("size", [0, 1, 5_000, 65_535, 65_536, 1 << 20])
def test_only_what_becomes_smaller_is_compressed(kind, size):
    packed = random.Random(size).randbytes(size)
    assert compress_if_smaller(packed, kind) is None
    text = b"abcdefgh" * (size // 8)
    if size >= 5_000:
        assert decompress(compress_if_smaller(text, kind), kind) == text
        assert len(compress_if_smaller(text, kind)) < size


@pytest.mark.parametrize("plain", ["start", "middle", "end"])
def test_one_compressible_part_of_a_large_body_is_enough(plain):
    parts = {name: random.Random(name).randbytes(100_000) for name in ("start", "middle", "end")} | {
        plain: bytes(100_000)
    }
    body = b"".join(parts.values())
    assert decompress(compress_if_smaller(memoryview(body)), SysFlag.ZLIB) == body


def test_a_large_body_that_was_compressed_before_is_sampled_only(monkeypatch):
    monkeypatch.setattr(compression, "compress", lambda *_: pytest.fail("the whole of it"))
    assert compress_if_smaller(random.Random(1).randbytes(65_536)) is None
