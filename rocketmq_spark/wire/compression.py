"""Message bodies, compressed and not: zlib, LZ4 frames and Zstandard, chosen by bits of the system flag.

A compressed body does not contain its original size, so every decompression has a limit. The formats are those of
``ZlibCompressor``, ``Lz4Compressor`` and ``ZstdCompressor`` of the Java client.

LZ4 and Zstandard use Arrow's codecs. Arrow is imported only when one of these two is needed, so that zlib, the default of all
clients, works without Arrow.
"""

from __future__ import annotations

import functools
import zlib
from typing import Any

from rocketmq_spark.base import extras
from rocketmq_spark.base.codes import COMPRESSION_MASK, SysFlag
from rocketmq_spark.errors import DecodeError, LocalProtocolError
from rocketmq_spark.wire.header import Bytes

MAX_DECOMPRESSED_BYTES = 64 * 1024 * 1024
DEFAULT_LEVEL = 5

_CHUNK_BYTES = 256 * 1024
# Bodies of at least this size are compressed only if three samples become smaller.
_MIN_SAMPLED_BYTES = 64 * 1024
_SAMPLE_BYTES = 4 * 1024
_MAX_SAMPLE_RATIO = 0.98
_CODECS = {int(SysFlag.LZ4): "lz4", int(SysFlag.ZSTD): "zstd"}


class TooLargeError(DecodeError):
    """A decompressed body exceeds its limit."""


_ZLIB_TYPES = (0, int(SysFlag.ZLIB))  # producers before 4.9.4 set no type


def compress(body: Bytes, kind: int = SysFlag.ZLIB, level: int = DEFAULT_LEVEL) -> bytes:
    """``body`` compressed as ``SysFlag.ZLIB``, ``LZ4`` or ``ZSTD``. The caller sets the flag of the type and ``COMPRESSED``."""
    if kind in _ZLIB_TYPES:
        return zlib.compress(body, level)
    codec = _CODECS.get(kind)
    if codec is None:
        raise LocalProtocolError(f"Unknown compression type {kind:#x}")
    pa = _arrow(codec)
    compressed: bytes = pa.Codec(codec, compression_level=level).compress(pa.py_buffer(body), asbytes=True)
    return compressed


def compress_if_smaller(body: Bytes, kind: int = SysFlag.ZLIB) -> bytes | None:
    """``body`` compressed, or None if the compressed body is not smaller.

    To compress data that is compressed already, such as pictures and archives, takes 25 ms per MiB and saves nothing. So a
    large body is compressed only if three samples of the body become smaller.
    """
    if len(body) >= _MIN_SAMPLED_BYTES and not _samples_shrink(body):
        return None
    compressed = compress(body, kind)
    return compressed if len(compressed) < len(body) else None


def _samples_shrink(body: Bytes) -> bool:
    last_start = len(body) - _SAMPLE_BYTES
    sample = b"".join(bytes(body[start : start + _SAMPLE_BYTES]) for start in (0, last_start // 2, last_start))
    return len(zlib.compress(sample, 1)) < _MAX_SAMPLE_RATIO * len(sample)


def decompress(body: Bytes, sys_flag: int, max_bytes: int = MAX_DECOMPRESSED_BYTES) -> bytes:
    """The original of a body that is marked as compressed. Raises ``DecodeError`` if it is damaged or exceeds ``max_bytes``."""
    kind = sys_flag & COMPRESSION_MASK
    if kind in _ZLIB_TYPES:
        return _inflate(body, max_bytes)
    codec = _CODECS.get(kind)
    if codec is None:
        raise DecodeError(f"Unknown compression type {kind:#x}")
    return _decompress_stream(body, codec, max_bytes)


@functools.cache
def _arrow(codec: str) -> Any:
    try:
        import pyarrow  # imported here, because it is large, and zlib does not need it
    except ImportError as e:
        raise LocalProtocolError(
            f"{codec} needs the codecs of pyarrow, which is not installed", remedy=extras.install_command(extras.ARROW)
        ) from e
    return pyarrow


def _inflate(body: Bytes, max_bytes: int) -> bytes:
    stream = zlib.decompressobj()
    try:
        data = stream.decompress(body, max_bytes + 1)
    except zlib.error as exc:
        raise DecodeError(f"Not a zlib body: {exc}") from exc
    if len(data) > max_bytes:
        raise _too_large("zlib", max_bytes)
    if not stream.eof:
        raise DecodeError("The zlib body is cut off")
    return data


def _decompress_stream(body: Bytes, codec: str, max_bytes: int) -> bytes:
    pa = _arrow(codec)
    chunks: list[Any] = []
    bytes_left = max_bytes + 1
    try:
        with pa.CompressedInputStream(pa.BufferReader(pa.py_buffer(body)), codec) as stream:
            # ``read`` would never free its memory after an error of the codec (docs/upstream.md).
            while bytes_left and (chunk := stream.read_buffer(min(bytes_left, _CHUNK_BYTES))):
                chunks.append(chunk)
                bytes_left -= len(chunk)
    except (OSError, MemoryError, pa.ArrowException) as exc:  # Arrow raises any of these when a codec fails
        raise DecodeError(f"Not a {codec} body: {exc}") from exc
    if not bytes_left:
        raise _too_large(codec, max_bytes)
    if not chunks and not len(body):
        raise DecodeError(f"The {codec} body is empty")
    return b"".join(chunks)


def _too_large(codec: str, max_bytes: int) -> TooLargeError:
    return TooLargeError(f"The {codec} body is larger than {max_bytes} bytes when decompressed")
