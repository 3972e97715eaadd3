"""The files of a RocksDB database: record headers, fsync of the write-ahead log, and damage to logs and manifest.

RocksDB trusts a record's type and length before it verifies the checksum. With one flipped byte in a header, RocksDB may wait
forever while it holds Python's lock, or may ignore the rest of the file without a message. The checksum covers the type and the
payload, so ``find_header_damage`` can find the original type and length before RocksDB reads the file.

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

BLOCK_BYTES = 1 << 15
_HEADER = struct.Struct("<IHB")  # checksum, length of the payload, type
# The types of RocksDB's records: a whole record, or the first, a middle or the last part of a record. RocksDB uses types 5 to 8
# in recycled logs only.
_RECORD_TYPES = (1, 2, 3, 4)


class HeaderDamage(NamedTuple):
    """The damage to a file: the original headers by position, and the ranges in which no record was found.

    An incomplete last record of a log is not damage, because a killed process leaves such a record.
    """

    original_headers: dict[int, bytes]
    lost_ranges: list[tuple[int, int]]

    @property
    def problem(self) -> str | None:
        """A description of the damage; None if there is no damage."""
        positions = sorted([*self.original_headers, *(start for start, _ in self.lost_ranges)])
        return f"the header of a record at byte {positions[0]} was damaged" if positions else None

    def repair(self, data: bytes) -> bytes:
        """Return the file with its original headers. Lost ranges are filled with zeros, which RocksDB skips."""
        repaired_data = bytearray(data)
        for position, header in self.original_headers.items():
            repaired_data[position : position + len(header)] = header
        for start, end in self.lost_ranges:
            repaired_data[start:end] = bytes(end - start)
        return bytes(repaired_data)


def find_header_damage(data: bytes, may_be_torn: bool = True) -> HeaderDamage:
    """Find damage to the headers of a file. An incomplete last record counts as damage only if ``may_be_torn`` is false."""
    original_headers: dict[int, bytes] = {}
    lost_ranges: list[tuple[int, int]] = []
    position, size = 0, len(data)
    record_starts: list[int] = []  # the positions of the records in the current block
    while position < size:
        block_end = position - position % BLOCK_BYTES + BLOCK_BYTES
        limit = min(block_end, size)
        if not position % BLOCK_BYTES:
            record_starts.clear()
        kind, end = _parse_header(data, position) if position + _HEADER.size <= limit else (0, block_end + 1)
        if end <= limit and (
            kind in _RECORD_TYPES or _checksum_matches(data, position, kind, end)
        ):  # a newer RocksDB may have other types
            record_starts.append(position)
            position = end
            continue
        header_bytes = data[position : min(position + _HEADER.size, limit)]
        if not any(header_bytes) and (len(header_bytes) == _HEADER.size or limit == block_end):
            position = block_end  # these zeros end a block, or are left by a power failure
            continue
        # A wrong length of an earlier record leads to a wrong ``position``, so the earlier records of the block are checked
        # first.
        damaged_position = next(
            (start for start in record_starts if not _checksum_matches(data, start, *_parse_header(data, start))),
            position,
        )
        if (
            damaged_position + _HEADER.size <= limit
            and (header := _original_header(data, damaged_position, limit)) is not None
        ):
            kind, end = header
            original_headers[damaged_position] = data[damaged_position : damaged_position + 4] + struct.pack(
                "<HB", end - damaged_position - _HEADER.size, kind
            )
            record_starts[:] = [start for start in record_starts if start < damaged_position]
            position = end
        elif damaged_position == position and size < end <= block_end + 1 and kind in (0, *_RECORD_TYPES):
            lost_ranges += [] if may_be_torn else [(position, size)]
            break
        else:
            lost_ranges.append((damaged_position, limit))
            position = block_end
    return HeaderDamage(original_headers, lost_ranges)


def _parse_header(data: bytes, position: int) -> tuple[int, int]:
    """Return the type and the end of a record, as its header gives them."""
    _, length, kind = _HEADER.unpack_from(data, position)
    return kind, position + _HEADER.size + length


def _checksum_matches(data: bytes, position: int, kind: int, end: int) -> bool:
    return _checksum(data, position) == _masked_checksum(_crc32c(bytes([kind]) + data[position + _HEADER.size : end]))


def _original_header(data: bytes, position: int, limit: int) -> tuple[int, int] | None:
    """Return the original type and end of the record at ``position``; None if both were changed."""
    kind, end = _parse_header(data, position)
    if (
        end <= limit
        and (
            original_kind := next(
                (other_kind for other_kind in _RECORD_TYPES if _checksum_matches(data, position, other_kind, end)), None
            )
        )
        is not None
    ):
        return original_kind, end
    stored_crc, crc = _checksum(data, position), _crc32c(bytes([kind]))
    for end in range(position + _HEADER.size, limit + 1):
        if _masked_checksum(crc) == stored_crc:
            return kind, end
        crc = _crc32c(data[end : end + 1], crc)
    return None


def _checksum(data: bytes, position: int) -> int:
    crc: int = _HEADER.unpack_from(data, position)[0]
    return crc


def _masked_checksum(crc: int) -> int:
    """The stored form of a checksum. RocksDB masks checksums, because checksums of data that contain checksums are weak."""
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


def _crc32c(data: bytes, crc: int = 0) -> int:
    """Return the CRC-32C (Castagnoli). Computing it byte by byte is fast enough, because only damaged records need it."""
    crc ^= 0xFFFFFFFF
    for byte in data:
        crc = _CRC_TABLE[(crc ^ byte) & 0xFF] ^ crc >> 8
    return crc ^ 0xFFFFFFFF


def _crc_remainder(byte: int) -> int:
    for _ in range(8):
        byte = byte >> 1 ^ (0x82F63B78 if byte & 1 else 0)
    return byte


_CRC_TABLE = tuple(map(_crc_remainder, range(256)))


LOG_SUFFIX = ".log"
# Prefixes of the names of folders in a ``spoolDir`` that are spools. A folder has the first prefix while a sink's worker uses it,
# and the second prefix while it is being removed.
WORKER_PREFIX, EMPTIED_PREFIX = "worker-", "emptied-"
SPOOL_PREFIXES = (WORKER_PREFIX, EMPTIED_PREFIX)
# Disk space that RocksDB needs, because it writes a table from its log when a database is opened, and merges tables while it
# runs.
RESERVE_BYTES = 64 << 20
# The free disk space is queried again after this time, or after this many added bytes.
SPACE_CHECK_S, SPACE_CHECK_BYTES = 0.05, 1 << 20
# Files that a mirror does not copy: RocksDB writes a LOG of its own in the mirror, and needs no LOCK there.
_NOT_MIRRORED_FILES = ("LOCK", "LOG")
# The name of a property of RocksDB: a number that grows when RocksDB changes its memtable.
_MEMTABLE_VERSION = "rocksdb.current-super-version-number"
_sync_file = getattr(os, "fdatasync", os.fsync)


def damaged_headers(path: Path) -> dict[str, HeaderDamage]:
    """Return the damage to headers in the logs and in the manifest, by file name. Files without such damage are omitted.
    RocksDB must not read the damaged headers.

    A manifest that ends within a record is included, because RocksDB would omit and delete the table that the record names. A
    log that ends within a record is included if another log follows, because the lost writes would be a gap before the writes
    of the other log.
    """
    damage_by_name = {}
    last_log = None  # only the newest log may end within a record
    for file in filter(None, (manifest(path), *sorted(path.glob(f"*{LOG_SUFFIX}"), key=_log_number, reverse=True))):
        with contextlib.suppress(FileNotFoundError):  # a running process may have deleted the file
            data = folders.read_regular(file)
            if last_log is None and file.suffix == LOG_SUFFIX and data:
                last_log = file
            if (damage := find_header_damage(data, file == last_log)).problem:
                damage_by_name[file.name] = damage
    return damage_by_name


def _log_number(log: Path) -> int:
    return int(log.stem) if log.stem.isdecimal() else 0


def mirror(path: Path, mirror_path: Path, place_file: Callable[[Path, Path], object]) -> None:
    """Put the files of a folder into ``mirror_path`` with ``place_file``. Files with damaged headers are written with repaired
    headers.
    """
    damage_by_name = damaged_headers(path)
    for file in path.iterdir():
        if file.name in damage_by_name:
            (mirror_path / file.name).write_bytes(damage_by_name[file.name].repair(folders.read_regular(file)))
        elif file.is_file() and file.name not in _NOT_MIRRORED_FILES:
            place_file(file, mirror_path / file.name)


def manifest(path: Path) -> Path | None:
    """Return the file that CURRENT names, even if this file does not exist. Return None if CURRENT names no file."""
    with contextlib.suppress(OSError, UnicodeDecodeError):
        kind, _, number = folders.read_regular(path / "CURRENT").decode("ascii").rstrip("\n").partition("-")
        if kind == "MANIFEST" and number.isdecimal():
            return path / f"{kind}-{number}"
    return None


class WriteAheadLog:
    """The files of the write-ahead log. RocksDB begins a new file with each new memtable."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._descriptor_by_name: dict[str, int] = {}
        self._newest_descriptor = -1
        self._memtable_version: int | None = None

    def sync(self, db: Any) -> None:
        """Flush all writes so far to the disk. If there is a new file, older files are flushed, too, because recovery stops at a
        gap.
        """
        version = db.property_int_value(_MEMTABLE_VERSION)
        if version != self._memtable_version or version is None:
            self._open_new_files()
            for name in sorted(self._descriptor_by_name):
                _sync_file(self._descriptor_by_name[name])
            sync_folder(self._path)
            self._memtable_version = version
        else:
            _sync_file(self._newest_descriptor)

    def _open_new_files(self) -> None:
        names = {entry.name for entry in os.scandir(self._path) if entry.name.endswith(LOG_SUFFIX)}
        for name in names - self._descriptor_by_name.keys():
            self._descriptor_by_name[name] = folders.open_regular(self._path / name)
        for name in self._descriptor_by_name.keys() - names:
            os.close(self._descriptor_by_name.pop(name))
        self._newest_descriptor = self._descriptor_by_name[max(names, key=lambda name: _log_number(Path(name)))]

    def close(self) -> None:
        while self._descriptor_by_name:
            os.close(self._descriptor_by_name.popitem()[1])


# Errors of a full disk.
DISK_FULL_ERRNOS = (errno.ENOSPC, errno.EDQUOT)


class FreeSpace:
    """Checks whether a folder has room: below ``max_bytes``, and with ``RESERVE_BYTES`` left on its disk.

    The disk is queried again only after ``SPACE_CHECK_S`` seconds or ``SPACE_CHECK_BYTES`` added bytes, because a query takes a
    sixth of the time of an addition. Between two queries, other writers are expected to add less than the reserve.
    """

    def __init__(self, path: Path, max_bytes: int | None) -> None:
        self._path = path
        self._max_bytes = max_bytes
        self._bytes_until_check = 0  # bytes that may be added before ``_check_deadline`` without a query of the disk
        self._check_deadline = Deadline.after(0)

    def check(self, used_bytes: int, added_bytes: int) -> SpoolFull | None:
        """If a folder that has ``used_bytes`` has no room for ``added_bytes``, return the error. Otherwise count ``added_bytes``
        as added, and return None.
        """
        if self._max_bytes is not None and used_bytes + added_bytes > self._max_bytes:
            return SpoolFull(
                f"the spool in {self._path} holds {used_bytes} bytes, and {added_bytes} more exceed the {self._max_bytes} of "
                "option 'spoolMaxBytes'",
                remedy="Raise this option, or check why brokers accept nothing; dead letters count, too",
            )
        if added_bytes > self._bytes_until_check or self._check_deadline.expired:
            try:
                disk_status = os.statvfs(self._path)
            except OSError as e:
                raise SpoolError(f"cannot write the spool in {self._path}: {e}", remedy="Check its disk") from e
            disk_free_bytes = disk_status.f_bavail * disk_status.f_frsize
            if disk_free_bytes - added_bytes < RESERVE_BYTES:
                self._bytes_until_check = 0
                return SpoolFull(
                    f"the disk of the spool in {self._path} has {disk_free_bytes} bytes left, and {RESERVE_BYTES} stay free: a "
                    "spool that has filled its disk could not be opened any more to send its records",
                    remedy="Free space on the disk",
                )
            self._bytes_until_check, self._check_deadline = (
                min(disk_free_bytes - RESERVE_BYTES, added_bytes + SPACE_CHECK_BYTES),
                Deadline.after(SPACE_CHECK_S),
            )
        self._bytes_until_check -= added_bytes
        return None


def sync_folder(path: Path) -> None:
    """Flush a folder to the disk, so that its new files survive a power failure."""
    folder_descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(folder_descriptor)
    finally:
        os.close(folder_descriptor)


def make_folder(path: Path) -> None:
    """Create a folder and its parents for this user alone, and flush them, so that they survive a power failure."""
    for folder in folders.make_folders(path):
        sync_folder(folder.parent)


class CopyUse(NamedTuple):
    """The purpose of a copy of another user's folder: a clause for errors, and the command without the path of the copy."""

    action: str
    command: str


COPY_TO_SEND = CopyUse("send the copy", "spool send")
COPY_TO_SERVE = CopyUse("start the node with the copy", "delay serve --data")


def check_owner(path: Path, use: CopyUse = COPY_TO_SEND) -> None:
    """Raise ``SpoolError`` if another user owns the folder, a file in it, or the link to it. The other user could choose what
    this process sends with its rights, and which files this process opens. The error recommends a copy of the spool, for the
    purpose ``use``.
    """
    if (foreign_file := folders.foreign_file_in(path, SPOOL_PREFIXES)) is not None:
        raise SpoolError(
            f"the spool in {path} is not used: {foreign_file}",
            remedy=f"Name a new folder in it, which this process creates for itself alone: {path / 'spool'}. If the folder has "
            f"records, {copy_instruction(path, use)}",
        )


def copy_instruction(path: Path, use: CopyUse = COPY_TO_SEND) -> str:
    """Return the instruction for sending the messages of another user, as a clause that begins with a small letter."""
    path_text, copy_text = shlex.quote(str(path)), f"~/{shlex.quote(f'{path.absolute().name}-copy')}"
    return (
        f"copy it as root to a new folder, look at the copy and {use.action}, because only root and its owner can open it, its "
        "owner can change it until it is sent, and its messages are sent with the keys of the user who runs the command: "
        f"rocketmq-spark spool copy {path_text} {copy_text} && "
        f"rocketmq-spark spool show {copy_text} --records, and then: rocketmq-spark {use.command} {copy_text}"
    )


def check_temporary_folder() -> None:
    """Raise ``SpoolError`` if other users can replace a folder that is created among temporary files. These users would read the
    messages in the folder, or choose which messages this process reads.

    If this user is not root, the mode of a folder only causes a warning, because the folder may be a volume of Kubernetes.
    """
    is_root = folders.error_reader_uid() == folders.ROOT_ID
    remedy = (
        "Set the variable TMPDIR to a folder that only you and root may change, or that has the sticky bit (mode 1777)"
    )
    if is_root:  # root's child processes that run as the owner of a spool also use the folder
        remedy = (
            "Set the variable TMPDIR to a folder that only root may change and everyone may enter. The folders above it need "
            "the same rights: mode 0755, or with the sticky bit (mode 1777)"
        )
    try:
        exposure = folders.temporary_folder_exposure()
    except PermissionError as e:  # this process runs as the owner of the spool, but root chose the folder
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
        owner_clause = f"belongs to uid {folders.owner_uid(path.stat())}"
    except OSError:  # the path is a link into a folder that this user may not enter
        owner_clause = "belongs to an unknown user"
    return SpoolError(
        f"the spool in {path} {owner_clause}, and uid {os.geteuid()} may not read it",
        remedy="Run as its owner, or as root",
    )


class FolderUser(Protocol):
    """An object that uses a folder, which no other object may use meanwhile."""

    @property
    def path(self) -> Path: ...


# The objects of this process that use a folder, also while their databases are closed.
FOLDER_USERS: weakref.WeakSet[FolderUser] = weakref.WeakSet()


def is_used_by_any(path: Path, users: Iterable[FolderUser]) -> bool:
    """Whether one of the ``users`` uses this folder, under any name."""
    for user in list(users):
        with contextlib.suppress(OSError):  # a folder that was deleted is skipped
            if user.path.samefile(path):
                return True
    return False
