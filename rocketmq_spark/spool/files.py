"""The files of a RocksDB database: record headers, fsync of the write-ahead log, and damage to logs and manifest.

RocksDB trusts a record's type and length before it verifies the checksum. One flipped byte there can make it wait forever
while it holds Python's lock, or end a file early without a message. The checksum covers the type and the payload, so
``headers`` can find the original type and length before RocksDB reads the file.

A file is a sequence of blocks, and a record is a header and its payload within one block. Source: RocksDB's
``db/log_format.h`` and ``log_reader.cc``.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import shlex
import struct
import weakref
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from rocketmq_spark.base import folders, process
from rocketmq_spark.base.clock import Deadline
from rocketmq_spark.errors import SpoolError, SpoolFull

logger = logging.getLogger(__name__)

BLOCK = 1 << 15
_HEADER = struct.Struct("<IHB")  # checksum, length of the payload, type
# Whole, first, middle and last parts. The types of recycled logs (5 to 8) are not used here.
_TYPES = (1, 2, 3, 4)


class Headers(NamedTuple):
    """The damage to a file: ``repaired`` are the original headers by position, ``lost`` are ranges in which no record was found.

    If only the beginning of a log's last record was written, that is not damage: a killed process leaves such a record.
    """

    repaired: dict[int, bytes]
    lost: list[tuple[int, int]]

    @property
    def problem(self) -> str | None:
        """A description of the damage, or None."""
        places = sorted([*self.repaired, *(start for start, _ in self.lost)])
        return f"the header of a record at byte {places[0]} was damaged" if places else None

    def applied(self, data: bytes) -> bytes:
        """The file with its original headers. Lost ranges are filled with zeros, which RocksDB skips."""
        found = bytearray(data)
        for at, header in self.repaired.items():
            found[at : at + len(header)] = header
        for start, end in self.lost:
            found[start:end] = bytes(end - start)
        return bytes(found)


def headers(data: bytes, may_be_torn: bool = True) -> Headers:
    """The damage to the headers of a file. Unless it ``may_be_torn``, an incomplete last record counts as lost."""
    repaired: dict[int, bytes] = {}
    lost: list[tuple[int, int]] = []
    at, size = 0, len(data)
    seen: list[int] = []  # positions of the records in this block
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
            at = block_end  # zeros: the end of a block, or the rest of a write after a power failure
            continue
        # A changed length leads to a position without a header.
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
    """The type and the end of a record, by its header."""
    _, length, kind = _HEADER.unpack_from(data, at)
    return kind, at + _HEADER.size + length


def _fits(data: bytes, at: int, kind: int, end: int) -> bool:
    return _checksum(data, at) == _masked(_crc32c(bytes([kind]) + data[at + _HEADER.size : end]))


def _written(data: bytes, at: int, limit: int) -> tuple[int, int] | None:
    """The original type and end of the record at ``at``, if only one of both was changed; otherwise None."""
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
    """The stored form of a checksum. RocksDB masks checksums, because checksums of data that contain checksums are weak."""
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


def _crc32c(data: bytes, crc: int = 0) -> int:
    """The CRC-32C (Castagnoli). Its byte-by-byte form is fast enough for damaged records."""
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
# Prefixes of folders in a ``spoolDir`` that are spools themselves: of a worker of a sink, and of one that is being removed.
WORKER, EMPTIED = "worker-", "emptied-"
OF_OTHERS = (WORKER, EMPTIED)
# Space that RocksDB needs itself: it writes a table from its log when it opens, and merges tables while it runs.
RESERVE_BYTES = 64 << 20
ASK_S, ASK_BYTES = 0.05, 1 << 20  # how long, and for how many more bytes, an answer about the disk's room is used
# Files that a mirror does not copy: RocksDB writes its own log there, and takes no other lock.
_OWN = ("LOCK", "LOG")
# This number grows when RocksDB changes its memtable.
_VERSION = "rocksdb.current-super-version-number"
_sync_file = getattr(os, "fdatasync", os.fsync)


def damaged_headers(path: Path) -> dict[str, Headers]:
    """The logs and the manifest of a folder whose headers RocksDB must not read, by file name.

    A manifest that ends within a record is one of them, because RocksDB would omit and delete the table which that record
    names. A log that ends within a record while another log follows is one, too, because its lost writes would be a gap.
    """
    found = {}
    torn = None  # the only file that may end within a record
    for file in filter(None, (manifest(path), *sorted(path.glob(f"*{LOG}"), key=_number, reverse=True))):
        with contextlib.suppress(FileNotFoundError):  # a running process may delete files meanwhile
            data = folders.read_regular(file)
            if torn is None and file.suffix == LOG and data:
                torn = file
            if (found_headers := headers(data, file == torn)).problem:
                found[file.name] = found_headers
    return found


def _number(log: Path) -> int:
    return int(log.stem) if log.stem.isdecimal() else 0


def mirror(path: Path, into: Path, put: Callable[[Path, Path], object]) -> None:
    """Put the files of a folder into another one with ``put``; files with damaged headers are written with repaired headers."""
    damaged = damaged_headers(path)
    for file in path.iterdir():
        if file.name in damaged:
            (into / file.name).write_bytes(damaged[file.name].applied(folders.read_regular(file)))
        elif file.is_file() and file.name not in _OWN:
            put(file, into / file.name)


def manifest(path: Path) -> Path | None:
    """The file that CURRENT names, even if it does not exist; None if CURRENT names none."""
    with contextlib.suppress(OSError, UnicodeDecodeError):
        kind, _, number = folders.read_regular(path / "CURRENT").decode("ascii").rstrip("\n").partition("-")
        if kind == "MANIFEST" and number.isdecimal():
            return path / f"{kind}-{number}"
    return None


class Wal:
    """The files of the write-ahead log. RocksDB begins a new one with each new memtable."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._files: dict[str, int] = {}
        self._newest = -1
        self._version: int | None = None

    def sync(self, db: Any) -> None:
        """Flush all writes so far to the disk. When there is a new file, older ones are flushed too: recovery stops at a gap."""
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
            self._files[name] = folders.open_regular(self._path / name)
        for name in self._files.keys() - names:
            os.close(self._files.pop(name))
        self._newest = self._files[max(names, key=lambda name: _number(Path(name)))]

    def close(self) -> None:
        while self._files:
            os.close(self._files.popitem()[1])


# Errors of a full disk.
FULL = (errno.ENOSPC, errno.EDQUOT)


class FreeSpace:
    """Whether a folder has room for more: below ``max_bytes``, and on its disk beyond ``RESERVE_BYTES``.

    The disk is asked at most every ``ASK_S`` seconds, and again after ``ASK_BYTES``, because the question takes a sixth of the
    time of an addition. What other writers add in between is less than the reserve.
    """

    def __init__(self, path: Path, max_bytes: int | None) -> None:
        self._path = path
        self._max_bytes = max_bytes
        self._left = 0  # bytes that may be added without a question, until then
        self._until = Deadline.after(0)

    def problem(self, held: int, more: int) -> SpoolFull | None:
        """The error if the folder, which has ``held`` bytes, has no room for ``more``, or None: then they count as added."""
        if self._max_bytes is not None and held + more > self._max_bytes:
            return SpoolFull(
                f"the spool in {self._path} holds {held} bytes, and {more} more exceed the {self._max_bytes} of option "
                "'spoolMaxBytes'",
                remedy="Raise it, or check why brokers accept nothing; dead letters count, too",
            )
        if more > self._left or self._until.expired:
            try:
                disk = os.statvfs(self._path)
            except OSError as e:
                raise SpoolError(f"cannot write the spool in {self._path}: {e}", remedy="Check its disk") from e
            free = disk.f_bavail * disk.f_frsize
            if free - more < RESERVE_BYTES:
                self._left = 0
                return SpoolFull(
                    f"the disk of the spool in {self._path} has {free} bytes left, and {RESERVE_BYTES} stay free: a spool that "
                    "has filled its disk could not be opened any more to send its records",
                    remedy="Free space on the disk",
                )
            self._left, self._until = min(free - RESERVE_BYTES, more + ASK_BYTES), Deadline.after(ASK_S)
        self._left -= more
        return None


def sync_folder(path: Path) -> None:
    """Flush a folder to the disk: only then do its new files survive a power failure."""
    folder = os.open(path, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def make_folder(path: Path) -> None:
    """Create a folder and its parents, for this user alone, so that they survive a power failure."""
    for folder in folders.make_folders(path):
        sync_folder(folder.parent)


class CopyUse(NamedTuple):
    """The use of a copy of another user's folder: a part of a sentence, and the command without the path of the copy."""

    what: str
    command: str


SENT = CopyUse("send the copy", "spool send")
SERVED = CopyUse("start the node with the copy", "delay serve --data")


def check_owner(path: Path, use: CopyUse = SENT) -> None:
    """Raise ``SpoolError`` if another user owns the folder, a file in it, or the link to it: that user could choose what this
    process sends with its rights, and which files it opens. The error recommends a copy, and names the ``use`` of the copy.
    """
    if (found := folders.foreign_in(path, OF_OTHERS)) is not None:
        raise SpoolError(
            f"the spool in {path} is not used: {found}",
            remedy=f"Name a new folder in it, which this process creates for itself alone: {path / 'spool'}. If the folder has "
            f"records, {look_first(path, use)}",
        )


def look_first(path: Path, use: CopyUse = SENT) -> str:
    """Return the instruction for sending the messages of another user. It begins with a small letter, as part of a sentence."""
    name, copy = shlex.quote(str(path)), f"~/{shlex.quote(f'{path.absolute().name}-copy')}"
    return (
        f"copy it as root to a new folder, look at the copy and {use.what}, because only root and its owner can open it, its "
        "owner can change it until it is sent, and its messages are sent with the keys of the user who runs the command: "
        f"rocketmq-spark spool copy {name} {copy} && "
        f"rocketmq-spark spool show {copy} --records, and then: rocketmq-spark {use.command} {copy}"
    )


def check_temporary() -> None:
    """Raise ``SpoolError`` if other users can replace a folder that is created among temporary files: they would read messages
    there, or choose which ones this process reads.

    For users other than root, the mode of a folder only causes a warning, because it may be a volume of Kubernetes.
    """
    is_root = folders.error_reader() == folders.ROOT
    remedy = (
        "Set the variable TMPDIR to a folder that only you and root may change, or that has the sticky bit (mode 1777)"
    )
    if is_root:  # root's processes with the rights of a spool's owner need the folder, too
        remedy = (
            "Set the variable TMPDIR to a folder that only root may change and everyone may enter, as those above it: mode "
            "0755, or with the sticky bit (mode 1777)"
        )
    try:
        found = folders.temporary_exposure()
    except PermissionError as e:  # root chose the folder, and this process now has the rights of the spool's owner
        user = folders.user_text(os.geteuid())
        raise SpoolError(f"{user} cannot enter the folder for temporary files, {e.filename}", remedy=remedy) from e
    if found is None:
        return
    text = f"a temporary folder for messages would lie in {found}"
    if is_root or found.uid is not None:
        raise SpoolError(text, remedy=remedy)
    process.get_or_create("open temporary folders", found.path, lambda: logger.warning("%s. %s", text, remedy))


def not_readable(path: Path) -> SpoolError:
    """Return the error for a folder that this user may not read."""
    try:
        of = f"belongs to uid {folders.owner_uid(path.stat())}"
    except OSError:  # a link into a folder that this user may not enter
        of = "belongs to an unknown user"
    return SpoolError(
        f"the spool in {path} {of}, and uid {os.geteuid()} may not read it",
        remedy="Run as its owner, or as root",
    )


class OneFolder(Protocol):
    """An object that uses a folder exclusively."""

    @property
    def path(self) -> Path: ...


# The owners of folders in this process, whether their databases are open or not.
OWNERS: weakref.WeakSet[OneFolder] = weakref.WeakSet()


def is_one_of(path: Path, those: Iterable[OneFolder]) -> bool:
    """Whether one of the owners uses this folder, under any name."""
    for each in list(those):
        with contextlib.suppress(OSError):  # an owner's folder may have been deleted; the others are still checked
            if each.path.samefile(path):
                return True
    return False
