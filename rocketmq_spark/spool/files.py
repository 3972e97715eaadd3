"""The files of a RocksDB database: record headers, fsync of the write-ahead log, and damage to logs and manifest.

RocksDB trusts a record's type and length before it checks the checksum. One flipped byte there can make it wait forever
while it holds Python's lock, or end a file early without a message. The checksum covers the type and the payload, so
``headers`` finds out which type and which length were written before RocksDB reads the file.

A file is a sequence of blocks, and a record is a header and its payload within one block. Source: RocksDB's
``db/log_format.h`` and ``log_reader.cc``.
"""

from __future__ import annotations

import contextlib
import errno
import os
import struct
import weakref
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from rocketmq_spark.errors import SpoolError, SpoolFull

BLOCK = 1 << 15
_HEADER = struct.Struct("<IHB")  # checksum, length of the payload, type
# Whole, first, middle and last parts. Those of logs that are used again (5 to 8) are not written here.
_TYPES = (1, 2, 3, 4)


class Headers(NamedTuple):
    """``repaired`` are headers as they were written, by their places; ``lost`` are ranges where no record is found any more.

    A last record of which only the beginning was written is neither in a log: a kill leaves it.
    """

    repaired: dict[int, bytes]
    lost: list[tuple[int, int]]

    @property
    def problem(self) -> str | None:
        """What is wrong, None for nothing."""
        places = sorted([*self.repaired, *(start for start, _ in self.lost)])
        return f"the header of a record at byte {places[0]} was damaged" if places else None

    def applied(self, data: bytes) -> bytes:
        """The file as it was; what is lost is blank, which RocksDB steps over."""
        found = bytearray(data)
        for at, header in self.repaired.items():
            found[at : at + len(header)] = header
        for start, end in self.lost:
            found[start:end] = bytes(end - start)
        return bytes(found)


def headers(data: bytes, may_be_torn: bool = True) -> Headers:
    """What is wrong with the headers of a file. Where it may not be torn, what is there of a last record is lost."""
    repaired: dict[int, bytes] = {}
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
            repaired[first] = data[first : first + 4] + struct.pack("<HB", end - first - _HEADER.size, kind)
            seen[:] = [each for each in seen if each < first]
            at = end
        elif first == at and size < end <= block_end + 1 and kind in (0, *_TYPES):
            lost += [] if may_be_torn else [(at, size)]
            break
        else:
            lost.append((first, limit))
            at = block_end
    return Headers(repaired, lost)


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


LOG = ".log"
# RocksDB writes a table from its log when it opens, and tables from tables while it goes on.
RESERVE_BYTES = 64 << 20
# Of a view: RocksDB writes its own, and no other lock is taken.
_OWN = ("LOCK", "LOG")
# Grows whenever the memtable is another one.
_VERSION = "rocksdb.current-super-version-number"
_sync_file = getattr(os, "fdatasync", os.fsync)


def damaged_headers(path: Path) -> dict[str, Headers]:
    """Of the logs and the manifest of a folder, those with headers that RocksDB must not read, by their names.

    A manifest that ends within a record is one of them: RocksDB would leave out the table that it names, and delete it. So is
    a log behind which another one goes on: what it lost would be a gap.
    """
    found = {}
    torn = None  # the file that may be
    for file in filter(None, (manifest(path), *sorted(path.glob(f"*{LOG}"), key=_number, reverse=True))):
        with contextlib.suppress(FileNotFoundError):  # a living process goes on meanwhile
            data = file.read_bytes()
            if torn is None and file.suffix == LOG and data:
                torn = file
            if (found_headers := headers(data, file == torn)).problem:
                found[file.name] = found_headers
    return found


def _number(log: Path) -> int:
    return int(log.stem) if log.stem.isdecimal() else 0


def mirror(path: Path, into: Path, put: Callable[[Path, Path], object]) -> None:
    """The files of a folder in another one: ``put`` there, but those with damaged headers as they were written."""
    damaged = damaged_headers(path)
    for file in path.iterdir():
        if file.name in damaged:
            (into / file.name).write_bytes(damaged[file.name].applied(file.read_bytes()))
        elif file.is_file() and file.name not in _OWN:
            put(file, into / file.name)


def manifest(path: Path) -> Path | None:
    """The file that CURRENT names, there or not; None where it names none."""
    with contextlib.suppress(OSError, UnicodeDecodeError):
        kind, _, number = (path / "CURRENT").read_text("ascii").rstrip("\n").partition("-")
        if kind == "MANIFEST" and number.isdecimal():
            return path / f"{kind}-{number}"
    return None


class Wal:
    """The files of the write-ahead log, of which RocksDB begins a new one with each new memtable."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._files: dict[str, int] = {}
        self._newest = -1
        self._version: int | None = None

    def sync(self, db: Any) -> None:
        """What was written so far is on the disk. Of older files too, when there is a new one: a gap ends a recovery."""
        version = db.property_int_value(_VERSION)
        if version != self._version or version is None:
            self._look()
            for name in sorted(self._files):
                _sync_file(self._files[name])
            sync_folder(self._path)
            self._version = version
        else:
            _sync_file(self._newest)

    def _look(self) -> None:
        names = {entry.name for entry in os.scandir(self._path) if entry.name.endswith(LOG)}
        for name in names - self._files.keys():
            self._files[name] = os.open(self._path / name, os.O_RDONLY)
        for name in self._files.keys() - names:
            os.close(self._files.pop(name))
        self._newest = self._files[max(names, key=lambda name: _number(Path(name)))]

    def close(self) -> None:
        while self._files:
            os.close(self._files.popitem()[1])


# Of a disk that takes no more.
FULL = (errno.ENOSPC, errno.EDQUOT)


def full(path: Path, held: int, more: int, max_bytes: int | None) -> SpoolFull | None:
    """Why a folder that holds so many bytes has no room for more, None if it has."""
    if max_bytes is not None and held + more > max_bytes:
        return SpoolFull(
            f"the spool in {path} holds {held} bytes, and {more} more exceed the {max_bytes} of option 'spoolMaxBytes'",
            remedy="Raise it, or check why brokers accept nothing; dead letters count, too",
        )
    try:
        disk = os.statvfs(path)
    except OSError as e:
        raise SpoolError(f"cannot write the spool in {path}: {e}", remedy="Check its disk") from e
    left = disk.f_bavail * disk.f_frsize
    if left - more < RESERVE_BYTES:
        return SpoolFull(
            f"the disk of the spool in {path} has {left} bytes left, and {RESERVE_BYTES} stay free: a spool that has filled its "
            "disk could not be opened any more to send its records",
            remedy="Free space on the disk",
        )
    return None


def sync_folder(path: Path) -> None:
    """A new file is found after a power cut when its folder is on the disk."""
    folder = os.open(path, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def make_folder(path: Path) -> None:
    """A folder that is found after a power cut, and those above it."""
    missing = [folder for folder in (path, *path.parents) if not folder.exists()]
    path.mkdir(parents=True, exist_ok=True)
    for folder in missing:
        sync_folder(folder.parent)


class OneFolder(Protocol):
    """What has a folder for itself."""

    @property
    def path(self) -> Path: ...


# Of this process, open or not.
OWNERS: weakref.WeakSet[OneFolder] = weakref.WeakSet()


def is_one_of(path: Path, those: Iterable[OneFolder]) -> bool:
    """Whether the folder is that of one of them, whatever it is called."""
    for each in list(those):
        with contextlib.suppress(OSError):  # the folder of one may be gone by now, which says nothing of the others
            if each.path.samefile(path):
                return True
    return False
