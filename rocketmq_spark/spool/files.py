"""The files of a RocksDB database: record headers, fsync of the write-ahead log, and damage to logs and manifest.

RocksDB trusts a record's type and length before it verifies the checksum. One flipped byte there can make RocksDB wait forever
while it holds Python's lock, or end the file early without a message. The checksum covers the type and the payload, so
``find_header_damage`` can find the original type and length before RocksDB reads the file.

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


class HeaderDamage(NamedTuple):
    """The damage to a file: ``repaired`` are the original headers by position, ``lost`` are ranges in which no record was found.

    If only the beginning of a log's last record was written, that is not damage: a killed process leaves such a record.
    """

    repaired: dict[int, bytes]
    lost: list[tuple[int, int]]

    @property
    def problem(self) -> str | None:
        """A description of the damage, or None."""
        positions = sorted([*self.repaired, *(start for start, _ in self.lost)])
        return f"the header of a record at byte {positions[0]} was damaged" if positions else None

    def repair(self, data: bytes) -> bytes:
        """Return the file with its original headers. Lost ranges are filled with zeros, which RocksDB skips."""
        repaired = bytearray(data)
        for at, header in self.repaired.items():
            repaired[at : at + len(header)] = header
        for start, end in self.lost:
            repaired[start:end] = bytes(end - start)
        return bytes(repaired)


def find_header_damage(data: bytes, may_be_torn: bool = True) -> HeaderDamage:
    """Find damage to the headers of a file. An incomplete last record is damage unless the file ``may_be_torn``."""
    repaired: dict[int, bytes] = {}
    lost: list[tuple[int, int]] = []
    at, size = 0, len(data)
    record_starts: list[int] = []  # positions of the records in this block
    while at < size:
        block_end = at - at % BLOCK + BLOCK
        limit = min(block_end, size)
        if not at % BLOCK:
            record_starts.clear()
        kind, end = _parse_header(data, at) if at + _HEADER.size <= limit else (0, block_end + 1)
        if end <= limit and (kind in _TYPES or _checksum_matches(data, at, kind, end)):  # or a type of a newer RocksDB
            record_starts.append(at)
            at = end
            continue
        head = data[at : min(at + _HEADER.size, limit)]
        if not any(head) and (len(head) == _HEADER.size or limit == block_end):
            at = block_end  # zeros: the end of a block, or the rest of a write after a power failure
            continue
        # A changed length leads to a position without a header.
        damaged_at = next(
            (start for start in record_starts if not _checksum_matches(data, start, *_parse_header(data, start))), at
        )
        if damaged_at + _HEADER.size <= limit and (header := _original_header(data, damaged_at, limit)) is not None:
            kind, end = header
            repaired[damaged_at] = data[damaged_at : damaged_at + 4] + struct.pack(
                "<HB", end - damaged_at - _HEADER.size, kind
            )
            record_starts[:] = [start for start in record_starts if start < damaged_at]
            at = end
        elif damaged_at == at and size < end <= block_end + 1 and kind in (0, *_TYPES):
            lost += [] if may_be_torn else [(at, size)]
            break
        else:
            lost.append((damaged_at, limit))
            at = block_end
    return HeaderDamage(repaired, lost)


def _parse_header(data: bytes, at: int) -> tuple[int, int]:
    """The type and the end of a record, by its header."""
    _, length, kind = _HEADER.unpack_from(data, at)
    return kind, at + _HEADER.size + length


def _checksum_matches(data: bytes, at: int, kind: int, end: int) -> bool:
    return _checksum(data, at) == _masked(_crc32c(bytes([kind]) + data[at + _HEADER.size : end]))


def _original_header(data: bytes, at: int, limit: int) -> tuple[int, int] | None:
    """The original type and end of the record at ``at``; None if both were changed."""
    kind, end = _parse_header(data, at)
    if (
        end <= limit
        and (
            original_kind := next(
                (other_kind for other_kind in _TYPES if _checksum_matches(data, at, other_kind, end)), None
            )
        )
        is not None
    ):
        return original_kind, end
    stored_crc, crc = _checksum(data, at), _crc32c(bytes([kind]))
    for end in range(at + _HEADER.size, limit + 1):
        if _masked(crc) == stored_crc:
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


LOG_SUFFIX = ".log"
# Prefixes of folders in a ``spoolDir`` that are spools themselves: of a worker of a sink, and of one that is being removed.
WORKER_PREFIX, EMPTIED_PREFIX = "worker-", "emptied-"
SPOOL_PREFIXES = (WORKER_PREFIX, EMPTIED_PREFIX)
# Space that RocksDB needs itself: it writes a table from its log when it opens, and merges tables while it runs.
RESERVE_BYTES = 64 << 20
SPACE_CHECK_S, SPACE_CHECK_BYTES = (
    0.05,
    1 << 20,
)  # how long, and for how many more bytes, the free space of the disk counts as known
# Files that a mirror does not copy: RocksDB writes its own LOG there, and needs no LOCK.
_NOT_MIRRORED = ("LOCK", "LOG")
# This number grows when RocksDB changes its memtable.
_MEMTABLE_VERSION = "rocksdb.current-super-version-number"
_sync_file = getattr(os, "fdatasync", os.fsync)


def damaged_headers(path: Path) -> dict[str, HeaderDamage]:
    """The logs and the manifest of a folder whose headers RocksDB must not read, by file name.

    A manifest that ends within a record is included, because RocksDB would omit and delete the table that the record names.
    A log that ends within a record is included if another log follows, because its lost writes would be a gap.
    """
    damaged = {}
    last_log = None  # the only one that may end within a record
    for file in filter(None, (manifest(path), *sorted(path.glob(f"*{LOG_SUFFIX}"), key=_log_number, reverse=True))):
        with contextlib.suppress(FileNotFoundError):  # a running process may delete files meanwhile
            data = folders.read_regular(file)
            if last_log is None and file.suffix == LOG_SUFFIX and data:
                last_log = file
            if (damage := find_header_damage(data, file == last_log)).problem:
                damaged[file.name] = damage
    return damaged


def _log_number(log: Path) -> int:
    return int(log.stem) if log.stem.isdecimal() else 0


def mirror(path: Path, into: Path, put: Callable[[Path, Path], object]) -> None:
    """Put the files of a folder into another one with ``put``; files with damaged headers are written with repaired headers."""
    damaged = damaged_headers(path)
    for file in path.iterdir():
        if file.name in damaged:
            (into / file.name).write_bytes(damaged[file.name].repair(folders.read_regular(file)))
        elif file.is_file() and file.name not in _NOT_MIRRORED:
            put(file, into / file.name)


def manifest(path: Path) -> Path | None:
    """The file that CURRENT names, even if it does not exist; None if CURRENT names none."""
    with contextlib.suppress(OSError, UnicodeDecodeError):
        kind, _, number = folders.read_regular(path / "CURRENT").decode("ascii").rstrip("\n").partition("-")
        if kind == "MANIFEST" and number.isdecimal():
            return path / f"{kind}-{number}"
    return None


class WriteAheadLog:
    """The files of the write-ahead log. RocksDB begins a new one with each new memtable."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._files: dict[str, int] = {}
        self._newest_file = -1
        self._version: int | None = None

    def sync(self, db: Any) -> None:
        """Flush all writes so far to the disk. If there is a new file, older ones are flushed too, because recovery stops at a
        gap.
        """
        version = db.property_int_value(_MEMTABLE_VERSION)
        if version != self._version or version is None:
            self._open_new_files()
            for name in sorted(self._files):
                _sync_file(self._files[name])
            sync_folder(self._path)
            self._version = version
        else:
            _sync_file(self._newest_file)

    def _open_new_files(self) -> None:
        names = {entry.name for entry in os.scandir(self._path) if entry.name.endswith(LOG_SUFFIX)}
        for name in names - self._files.keys():
            self._files[name] = folders.open_regular(self._path / name)
        for name in self._files.keys() - names:
            os.close(self._files.pop(name))
        self._newest_file = self._files[max(names, key=lambda name: _log_number(Path(name)))]

    def close(self) -> None:
        while self._files:
            os.close(self._files.popitem()[1])


# Errors of a full disk.
DISK_FULL_ERRNOS = (errno.ENOSPC, errno.EDQUOT)


class FreeSpace:
    """Checks whether a folder has room: below ``max_bytes``, and with ``RESERVE_BYTES`` left on its disk.

    The disk is queried at most every ``SPACE_CHECK_S`` seconds, or after ``SPACE_CHECK_BYTES``, because a query takes a sixth of
    the time of an addition. Other writers add less than the reserve in between.
    """

    def __init__(self, path: Path, max_bytes: int | None) -> None:
        self._path = path
        self._max_bytes = max_bytes
        self._free_bytes = 0  # bytes that may be added without a query of the disk, until ``_valid_until``
        self._valid_until = Deadline.after(0)

    def check(self, used: int, more: int) -> SpoolFull | None:
        """Return None, and count ``more`` bytes as added, or the error if the folder with ``used`` bytes has no room for them."""
        if self._max_bytes is not None and used + more > self._max_bytes:
            return SpoolFull(
                f"the spool in {self._path} holds {used} bytes, and {more} more exceed the {self._max_bytes} of option "
                "'spoolMaxBytes'",
                remedy="Raise it, or check why brokers accept nothing; dead letters count, too",
            )
        if more > self._free_bytes or self._valid_until.expired:
            try:
                disk = os.statvfs(self._path)
            except OSError as e:
                raise SpoolError(f"cannot write the spool in {self._path}: {e}", remedy="Check its disk") from e
            free = disk.f_bavail * disk.f_frsize
            if free - more < RESERVE_BYTES:
                self._free_bytes = 0
                return SpoolFull(
                    f"the disk of the spool in {self._path} has {free} bytes left, and {RESERVE_BYTES} stay free: a spool that "
                    "has filled its disk could not be opened any more to send its records",
                    remedy="Free space on the disk",
                )
            self._free_bytes, self._valid_until = (
                min(free - RESERVE_BYTES, more + SPACE_CHECK_BYTES),
                Deadline.after(SPACE_CHECK_S),
            )
        self._free_bytes -= more
        return None


def sync_folder(path: Path) -> None:
    """Flush a folder to the disk, so that its new files survive a power failure."""
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
    """The purpose of a copy of another user's folder: a clause for errors, and the command without the path of the copy."""

    action: str
    command: str


COPY_TO_SEND = CopyUse("send the copy", "spool send")
COPY_TO_SERVE = CopyUse("start the node with the copy", "delay serve --data")


def check_owner(path: Path, use: CopyUse = COPY_TO_SEND) -> None:
    """Raise ``SpoolError`` if another user owns the folder, a file in it, or the link to it: that user could choose what this
    process sends with its rights, and which files it opens. The error recommends a copy, and names the ``use`` of the copy.
    """
    if (foreign := folders.foreign_file_in(path, SPOOL_PREFIXES)) is not None:
        raise SpoolError(
            f"the spool in {path} is not used: {foreign}",
            remedy=f"Name a new folder in it, which this process creates for itself alone: {path / 'spool'}. If the folder has "
            f"records, {copy_instruction(path, use)}",
        )


def copy_instruction(path: Path, use: CopyUse = COPY_TO_SEND) -> str:
    """Return the instruction for sending the messages of another user. It begins with a small letter, as part of a sentence."""
    name, copy = shlex.quote(str(path)), f"~/{shlex.quote(f'{path.absolute().name}-copy')}"
    return (
        f"copy it as root to a new folder, look at the copy and {use.action}, because only root and its owner can open it, its "
        "owner can change it until it is sent, and its messages are sent with the keys of the user who runs the command: "
        f"rocketmq-spark spool copy {name} {copy} && "
        f"rocketmq-spark spool show {copy} --records, and then: rocketmq-spark {use.command} {copy}"
    )


def check_temporary_folder() -> None:
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
        exposure = folders.temporary_exposure()
    except PermissionError as e:  # root chose the folder, and this process now has the rights of the spool's owner
        user = folders.user_text(os.geteuid())
        raise SpoolError(f"{user} cannot enter the folder for temporary files, {e.filename}", remedy=remedy) from e
    if exposure is None:
        return
    text = f"a temporary folder for messages would lie in {exposure}"
    if is_root or exposure.uid is not None:
        raise SpoolError(text, remedy=remedy)
    process.get_or_create("open temporary folders", exposure.path, lambda: logger.warning("%s. %s", text, remedy))


def not_readable_error(path: Path) -> SpoolError:
    """Return the error for a folder that this user may not read."""
    try:
        belongs = f"belongs to uid {folders.owner_uid(path.stat())}"
    except OSError:  # a link into a folder that this user may not enter
        belongs = "belongs to an unknown user"
    return SpoolError(
        f"the spool in {path} {belongs}, and uid {os.geteuid()} may not read it",
        remedy="Run as its owner, or as root",
    )


class FolderUser(Protocol):
    """An object that uses a folder exclusively."""

    @property
    def path(self) -> Path: ...


# The objects of this process that use a folder, also while their databases are closed.
FOLDER_USERS: weakref.WeakSet[FolderUser] = weakref.WeakSet()


def is_used_by_any(path: Path, users: Iterable[FolderUser]) -> bool:
    """Whether one of the ``users`` uses this folder, under any name."""
    for user in list(users):
        with contextlib.suppress(OSError):  # a folder may have been deleted; the others are still checked
            if user.path.samefile(path):
                return True
    return False
