"""RocksDB's log files and manifests: the headers of their records, looked at before RocksDB reads them. Pure.

RocksDB believes a record's type and length before it looks at the checksum. One flipped byte there lets it wait for ever,
with Python's lock in its hand, or end a file early without a word. The checksum covers the type and the payload, so that
it tells which type and which length were written.

A file is a sequence of blocks, and a record of it a header and its payload within one block. Source: RocksDB's
``db/log_format.h`` and ``log_reader.cc``.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

BLOCK = 1 << 15
_HEADER = struct.Struct("<IHB")  # checksum, length of the payload, type
# Whole, first, middle and last parts. Those of logs that are used again (5 to 8) are not written here.
_TYPES = (1, 2, 3, 4)


class Headers(NamedTuple):
    """``mended`` are headers as they were written, by their places; ``lost`` are ranges where no record is found any more.

    A last record of which only the beginning was written is neither: a kill leaves it.
    """

    mended: dict[int, bytes]
    lost: list[tuple[int, int]]

    @property
    def problem(self) -> str | None:
        """What is wrong, None for nothing."""
        places = sorted([*self.mended, *(start for start, _ in self.lost)])
        return f"the header of a record at byte {places[0]} was damaged" if places else None

    def applied(self, data: bytes) -> bytes:
        """The file as it was; what is lost is blank, which RocksDB steps over."""
        found = bytearray(data)
        for at, header in self.mended.items():
            found[at : at + len(header)] = header
        for start, end in self.lost:
            found[start:end] = bytes(end - start)
        return bytes(found)


def headers(data: bytes) -> Headers:
    """What is wrong with the headers of a file."""
    mended: dict[int, bytes] = {}
    lost: list[tuple[int, int]] = []
    at, size = 0, len(data)
    seen: list[int] = []  # records of this block
    while at < size:
        block_end = at - at % BLOCK + BLOCK
        limit = min(block_end, size)
        if not at % BLOCK:
            seen.clear()
        kind, end = _told(data, at) if at + _HEADER.size <= limit else (0, block_end + 1)
        if end <= limit and (kind in _TYPES or _fits(data, at, kind, end)):  # or a type of a newer RocksDB
            seen.append(at)
            at = end
            continue
        head = data[at : min(at + _HEADER.size, limit)]
        if not any(head) and (len(head) == _HEADER.size or limit == block_end):
            at = block_end  # blank: the end of a block, or what a power cut left of a write
            continue
        # A length that was changed leads to what is no header.
        first = next((each for each in seen if not _fits(data, each, *_told(data, each))), at)
        if first + _HEADER.size <= limit and (found := _written(data, first, limit)) is not None:
            kind, end = found
            mended[first] = data[first : first + 4] + struct.pack("<HB", end - first - _HEADER.size, kind)
            seen[:] = [each for each in seen if each < first]
            at = end
        elif first == at and size < end <= block_end + 1 and kind in (0, *_TYPES):
            break  # torn
        else:
            lost.append((first, limit))
            at = block_end
    return Headers(mended, lost)


def _told(data: bytes, at: int) -> tuple[int, int]:
    """The type of a record, and where it ends."""
    _, length, kind = _HEADER.unpack_from(data, at)
    return kind, at + _HEADER.size + length


def _fits(data: bytes, at: int, kind: int, end: int) -> bool:
    return _checksum(data, at) == _masked(_crc32c(bytes([kind]) + data[at + _HEADER.size : end]))


def _written(data: bytes, at: int, limit: int) -> tuple[int, int] | None:
    """The type that a record at ``at`` had, and where it ended, if one of both was changed."""
    kind, end = _told(data, at)
    if end <= limit and (found := next((each for each in _TYPES if _fits(data, at, each, end)), None)) is not None:
        return found, end
    wanted, crc = _checksum(data, at), _crc32c(bytes([kind]))
    for end in range(at + _HEADER.size, limit + 1):
        if _masked(crc) == wanted:
            return kind, end
        crc = _crc32c(data[end : end + 1], crc)
    return None


def _checksum(data: bytes, at: int) -> int:
    crc: int = _HEADER.unpack_from(data, at)[0]
    return crc


def _masked(crc: int) -> int:
    """As it is stored: a checksum of what holds checksums says little."""
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


def _crc32c(data: bytes, crc: int = 0) -> int:
    """Castagnoli's, byte by byte: it is asked for damaged records only."""
    crc ^= 0xFFFFFFFF
    for byte in data:
        crc = _TABLE[(crc ^ byte) & 0xFF] ^ crc >> 8
    return crc ^ 0xFFFFFFFF


def _remainder(byte: int) -> int:
    for _ in range(8):
        byte = byte >> 1 ^ (0x82F63B78 if byte & 1 else 0)
    return byte


_TABLE = tuple(map(_remainder, range(256)))
