"""RocksDB for a store: atomic batches of writes, reads in pages, and errors that name the folder and the cause.

This module is a driver, and the only module that imports ``rocksdict``. RocksDB holds Python's global lock while it writes. So
RocksDB must not flush its files to the disk, because all threads would wait. Instead, this module flushes the files of the
write-ahead log, while other threads run. A database belongs to the process that opened it. A forked child does not use or close
the database.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import importlib
import itertools
import logging
import os
import tempfile
import weakref
from collections.abc import Generator, Iterator, Sequence
from pathlib import Path
from typing import Any

from rocketmq_spark.base import extras, process
from rocketmq_spark.base.folders import is_readable_or_missing, open_lock
from rocketmq_spark.errors import ClosedError, SpoolError, SpoolFull
from rocketmq_spark.spool.files import (
    DISK_FULL_ERRNOS,
    FOLDER_USERS,
    LOG_SUFFIX,
    FolderUser,
    WriteAheadLog,
    check_temporary_folder,
    damaged_headers,
    is_used_by_any,
    make_folder,
    manifest,
    mirror,
    not_readable_error,
)

logger = logging.getLogger(__name__)

WRITE_BUFFER_BYTES = 16 << 20
# The name of a folder inside the folder of a database. The folder contains the complete new files that will replace damaged
# files; see ``salvage``.
COMPLETE_FOLDER = "whole"

REPAIR_REMEDY = "Keep what can be read, without sending it, and then look again: rocketmq-spark spool repair FOLDER"


class Damaged(SpoolError):
    """RocksDB found bytes that do not match their checksum. The store catches this error and repairs itself."""

    retriable = True


class Database:
    """A database of keys and values in a folder. The folder is created if it is missing. ``damage`` describes what was damaged if
    the database was opened with losses.

    A read-only database takes no lock, shows the state at the time of opening, and omits unreadable entries. ``gaps`` are the
    ranges of keys that scans skipped. Only a read-only database with ``is_tolerant`` is used in spite of damage; every other
    database raises ``Damaged``.
    """

    def __init__(self, path: Path, read_only: bool = False, is_tolerant: bool = True) -> None:
        self.path = path
        self.damage: str | None = None
        self.gaps: list[tuple[bytes, bytes]] = []
        self.read_only = read_only
        self._pid = os.getpid()
        self._mirror: tempfile.TemporaryDirectory[str] | None = None
        self._rocks = _rocksdict()
        if _RocksThreads.were_lost:
            raise SpoolError(
                f"the spool in {path} cannot be opened: this process was forked from one that had used RocksDB, and the "
                "threads of RocksDB do not survive a fork",
                remedy="Fork before the first spool is opened, or start processes with 'spawn'",
            )
        _RocksThreads.were_started = True
        if not read_only and is_used_by_any(
            path, _writable_databases()
        ):  # RocksDB's lock does not exclude this process
            raise _in_use_error(path, "it is open in this process")
        self._write_ahead_log = WriteAheadLog(path)
        if read_only and not is_database(path):
            raise SpoolError(f"there is no spool in {path}")
        try:
            self._db = self._open_rocks(read_only, read_only and is_tolerant)
        except BaseException:
            self._clean_up()
            raise
        _open_databases.add(self)

    def get(self, key: bytes) -> bytes | None:
        """Return the value of a key; None if the key does not exist."""
        try:
            with self._converted_errors("read"):
                value: bytes | None = self._rocks_db().get(key)
        except Damaged:
            if not self.read_only:
                raise
            self.gaps.append((key, key + b"\0"))
            return None
        return value

    def write(self, puts: Sequence[tuple[bytes, bytes]], deletes: Sequence[bytes] = (), sync: bool = False) -> None:
        """Write everything or nothing. After the write, the data survive a crash of this process, and with ``sync`` also a crash
        of the machine.
        """
        batch = self._rocks.WriteBatch(raw_mode=True)
        for key in deletes:
            batch.delete(key)
        for key, value in puts:
            batch.put(key, value)
        try:  # handles errors as ``_converted_errors`` does; a ``with`` block would take too long
            self._rocks_db().write(batch)
            if sync:
                self._write_ahead_log.sync(self._db)
        except (SpoolError, ClosedError):
            raise
        except Exception as e:
            raise self._spool_error("write", e) from e

    def scan(self, start: bytes, end: bytes) -> Generator[tuple[bytes, bytes], None, None]:
        """Yield the keys from ``start`` to before ``end``, with their values. RocksDB holds a snapshot until the iterator is
        closed.
        """
        position: bytes | None = start
        while position is not None:
            iterator = self._iterator(end)
            last_key = None
            try:
                with self._converted_errors("read"):
                    iterator.seek(position)
                    while iterator.valid():
                        last_key = iterator.key()
                        yield last_key, iterator.value()
                        iterator.next()
                    iterator.status()  # raises the error if an error ended the iteration
                return
            except Damaged:
                if not self.read_only:
                    raise
                gap_start = position if last_key is None else last_key
                position = _next_readable(iterator, gap_start, end)
                self.gaps.append((gap_start, position or end))
            finally:
                # The traceback of an error must not reference the iterator, because RocksDB would then keep the folder's lock.
                del iterator

    def last_key(self, start: bytes, end: bytes) -> bytes | None:
        """Return the last key from ``start`` to before ``end``; None if there is no such key."""
        iterator = self._iterator(end)
        try:
            with self._converted_errors("read"):
                iterator.seek_for_prev(end)
                key: bytes | None = iterator.key() if iterator.valid() else None
                iterator.status()
        finally:
            del iterator  # for the same reason as in ``scan``
        return None if key is None or key < start else key

    def _iterator(self, end: bytes) -> Any:
        options = self._rocks.ReadOptions()
        options.set_iterate_upper_bound(end)
        with self._converted_errors("read"):
            return self._rocks_db().iter(options)

    def close(self) -> None:
        """Close the database, and release its folder. A call in a forked child and a second call do nothing."""
        if self._pid == os.getpid() and self in _open_databases:
            _open_databases.discard(self)
            self._write_ahead_log.close()
            db, self._db = self._db, _ClosedDatabase()
            try:
                db.close()
            except Exception as e:  # noqa: BLE001 - data that did not reach a table are in the log, and the next open reads them
                logger.warning("the spool in %s was closed with an error: %s", self.path, e)
            self._clean_up()

    def _rocks_db(self) -> Any:
        if self._pid != os.getpid():
            raise ClosedError(
                f"the spool in {self.path} belongs to process {self._pid}, from which this one was forked"
            )
        return self._db

    def _open_rocks(self, read_only: bool, is_tolerant: bool) -> Any:
        rocks, recovery_modes = self._rocks, self._rocks.DBRecoveryMode
        access_type = rocks.AccessType.read_only(False) if read_only else rocks.AccessType.read_write()
        with self._converted_errors("open"):
            if not read_only:
                make_folder(self.path)
            if not is_readable_or_missing(self.path):
                raise not_readable_error(self.path)
            if is_database(self.path) and manifest(self.path) is None:  # RocksDB would delete all files
                raise Damaged(
                    f"the spool in {self.path} is damaged: its file CURRENT is missing, or does not name a manifest",
                    remedy=REPAIR_REMEDY,
                )
            path = self.path
            if is_database(path) and not any(path.glob(f"*{LOG_SUFFIX}")):
                # Every database has a log, even if it is empty.
                self.damage = "its log is gone"
                if not is_tolerant:
                    raise Damaged(f"the spool in {path} is damaged: {self.damage}", remedy=REPAIR_REMEDY)
            if damage_by_file := damaged_headers(path):
                name, header_damage = next(iter(damage_by_file.items()))
                self.damage = f"{header_damage.problem} of {name}"
                # RocksDB would silently omit tables that the manifest no longer names.
                if not is_tolerant or any(
                    damage.lost_ranges for name, damage in damage_by_file.items() if not name.endswith(LOG_SUFFIX)
                ):
                    raise Damaged(f"the spool in {path} is damaged: {self.damage}", remedy=REPAIR_REMEDY)
                path = self._make_mirror()
                if not any(damage.lost_ranges for damage in damage_by_file.values()):
                    self.damage = None
            if not read_only:
                # This process closes the file before RocksDB locks it. A later close would release RocksDB's lock.
                os.close(open_lock(path / "LOCK", os.O_RDWR | os.O_CREAT))
            try:
                return self._open_with(path, self._options(recovery_modes.absolute_consistency()), access_type)
            except Exception as e:
                if not _is_damage(e):
                    raise
                problem = str(e)
                if read_only and not is_tolerant:
                    raise Damaged(f"the spool in {self.path} is damaged: {problem}", remedy=REPAIR_REMEDY) from e
            with contextlib.suppress(Exception):
                db = self._open_with(path, self._options(recovery_modes.tolerate_corrupted_tail_records()), access_type)
                logger.warning(
                    "the log of the spool in %s ends within a write: this write and all later writes are lost, an unknown number "
                    "of records. A power cut or a full disk does this to writes that were not acknowledged: %s",
                    self.path, problem,
                )  # fmt: skip
                return db
            if not read_only:
                raise Damaged(f"the spool in {self.path} is damaged: {problem}", remedy=REPAIR_REMEDY)
            # Without paranoid checks, RocksDB does not check whole tables at opening, so scans can read intact blocks one by one.
            db = self._open_with(
                path, self._options(recovery_modes.skip_any_corrupted_record(), is_paranoid=False), access_type
            )
            self.damage = problem
            return db

    def _open_with(self, path: Path, options: Any, access_type: Any) -> Any:
        """Open a database. ``options`` are also passed for the column family, because rocksdict otherwise reads options from a
        file in the folder.
        """
        return self._rocks.Rdict(str(path), options, column_families={"default": options}, access_type=access_type)

    def _make_mirror(self) -> Path:
        """Make a copy of the database's folder. In the copy, damaged headers are repaired."""
        check_temporary_folder()
        self._mirror = tempfile.TemporaryDirectory(prefix="rocketmq-spark-spool-")
        folder = Path(self._mirror.name)
        mirror(self.path.resolve(), folder, lambda file, link: link.symlink_to(file))
        return folder

    def _clean_up(self) -> None:
        if self._mirror is not None:
            self._mirror.cleanup()

    def _options(self, recovery: Any, is_paranoid: bool = True) -> Any:
        options = self._rocks.Options(raw_mode=True)
        options.create_if_missing(True)
        options.set_paranoid_checks(is_paranoid)
        options.set_wal_recovery_mode(recovery)
        options.set_write_buffer_size(WRITE_BUFFER_BYTES)
        options.set_max_total_wal_size(4 * WRITE_BUFFER_BYTES)
        options.set_max_background_jobs(2)
        options.set_max_open_files(256)
        options.set_keep_log_file_num(2)
        options.set_stats_dump_period_sec(0)
        options.set_compression_type(self._rocks.DBCompressionType.lz4())
        return options

    @contextlib.contextmanager
    def _converted_errors(self, action: str) -> Iterator[None]:
        try:
            yield
        except (SpoolError, ClosedError):
            raise
        except Exception as e:  # rocksdict has no error class
            raise self._spool_error(action, e) from e

    def _spool_error(self, action: str, error: Exception) -> SpoolError:
        """Return the ``SpoolError`` for an error of RocksDB or of the disk. rocksdict has no error classes, so the text of the
        error decides.
        """
        text = str(error)
        if _is_damage(error):
            return Damaged(f"the spool in {self.path} is damaged: {text}", remedy=REPAIR_REMEDY)
        if any(os.strerror(number) in text for number in DISK_FULL_ERRNOS):
            return SpoolFull(f"cannot {action} the spool in {self.path}: {text}", remedy="Free space on the disk")
        if os.strerror(errno.EACCES) in text:
            return SpoolError(
                f"cannot {action} the spool in {self.path} as uid {os.geteuid()}: {text}",
                remedy="Let this user write to all files there; a folder that several users share needs: mkdir -m 1777",
            )
        if "LOCK" in text:
            return _in_use_error(self.path, text)
        return SpoolError(f"cannot {action} the spool in {self.path}: {text}", remedy="Check its disk")


class _ClosedDatabase:
    """Replaces RocksDB's database after the close, because RocksDB releases its lock only when no object refers to its
    database.
    """

    def __getattr__(self, name: str) -> Any:
        raise ClosedError("the spool is closed")


def rebuild_database(path: Path) -> None:
    """Let RocksDB repair a database from its files. If a table has a bad block, RocksDB omits the whole table."""
    with contextlib.suppress(Exception):  # data that RocksDB could not repair are then missing
        _rocksdict().Rdict.repair(str(path), _rocksdict().Options(raw_mode=True))


_MAX_ENTRIES = 1_000_000  # a limit, because a folder may have any number of files


def is_database(path: Path) -> bool:
    """Whether the folder contains a database, open or not. Also returns True if files of the database are missing, or if this
    user may not read the folder.
    """
    try:
        os.lstat(f"{path}/.")
        with os.scandir(path) as entries:
            names = (entry.name for entry in itertools.islice(entries, _MAX_ENTRIES))
            return any(name in ("CURRENT", COMPLETE_FOLDER) or name.endswith(".sst") for name in names)
    except PermissionError:
        return True
    except OSError:
        return False


def is_in_use(path: Path) -> bool:
    """Whether a running process, perhaps this one, has the database open. This check changes no files, but opening a database
    would change some.
    """
    if _is_used_here(path):
        return True  # do not try the lock: closing the file would release the lock of this process
    try:
        lock_file = open_lock(path / "LOCK")
    except OSError:
        return False
    try:
        fcntl.lockf(lock_file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(lock_file)
    return False


def reserve_folder(user: FolderUser) -> None:
    """Reserve the folder of ``user`` until ``user`` is removed from ``FOLDER_USERS``, also while its database is closed to be
    reopened or repaired. Raises ``SpoolError`` if this process uses the folder already.
    """
    with process.entry_lock("spools", "occupied"):  # a lock for this purpose only: ``samefile`` may hang with a disk
        if _is_used_here(user.path):
            raise _in_use_error(user.path, "it is open in this process")
        FOLDER_USERS.add(user)


def _is_used_here(path: Path) -> bool:
    """Whether this process uses the folder, even if its database is closed now. The folder is also found if it is used under
    another path: relative, through a link, or of another mount.
    """
    return is_used_by_any(path, FOLDER_USERS) or is_used_by_any(path, _writable_databases())


def _writable_databases() -> list[Database]:
    return [database for database in list(_open_databases) if not database.read_only]


def _in_use_error(path: Path, remark: str) -> SpoolError:
    return SpoolError(
        f"the spool in {path} is in use by another process, or by another producer of this one",
        remark=remark,
        remedy="Give each process a 'spoolDir' of its own",
    )


_KEY_BYTES = 64


def _next_readable(iterator: Any, start: bytes, end: bytes) -> bytes | None:
    """Return the first key after ``start`` at which an iterator that found damage can continue. Return None if no key before
    ``end`` is readable.

    Keys are compared as numbers of a fixed width. First, steps of doubling size look for a readable key. Then a binary search
    between the last two positions finds the first readable key.
    """
    low, last_number, step = _as_number(start), _as_number(end) - 1, 1
    while not _can_read(iterator, _as_key(min(low + step, last_number))):
        if low + step >= last_number:
            return None
        step *= 2
    unreadable_number, readable_number = low + step // 2, min(low + step, last_number)
    while readable_number - unreadable_number > 1:
        middle = (unreadable_number + readable_number) // 2
        if _can_read(iterator, _as_key(middle)):
            readable_number = middle
        else:
            unreadable_number = middle
    return _as_key(readable_number)


def _can_read(iterator: Any, key: bytes) -> bool:
    iterator.seek(key)
    if iterator.valid():
        return True
    try:
        iterator.status()
    except Exception as e:
        if not _is_damage(e):
            raise
        return False
    return True


def _as_number(key: bytes) -> int:
    return int.from_bytes(key[:_KEY_BYTES].ljust(_KEY_BYTES, b"\0"))


def _as_key(number: int) -> bytes:
    return number.to_bytes(_KEY_BYTES)


def _is_damage(error: Exception) -> bool:
    """Whether an error means that bytes do not match their checksum, or that a referenced file is missing."""
    text = str(error)
    return text.startswith("Corruption") or ("No such file" in text and (".sst" in text or "MANIFEST" in text))


def _rocksdict() -> Any:
    try:
        return importlib.import_module("rocksdict")
    except ImportError as e:
        raise SpoolError(
            f"the spool needs RocksDB, and the package rocksdict cannot be imported: {e}",
            remedy=f"Install it: {extras.install_command(extras.SPOOL)}",
        ) from e


# The open databases of this process.
_open_databases: weakref.WeakSet[Database] = weakref.WeakSet()


class _RocksThreads:
    """The state of RocksDB's threads, which all databases of a process share. ``were_started`` is true if this process has
    started the threads. ``were_lost`` is true if this process was forked from a process that had started the threads.
    """

    were_started = were_lost = False


def _keep_inherited_databases() -> None:
    """Called in a forked child. Keeps references to the inherited databases, because the destructor of a database would write
    to the parent's files.
    """
    for database in _open_databases:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(database._db))
    _RocksThreads.were_lost = _RocksThreads.were_started


os.register_at_fork(after_in_child=_keep_inherited_databases)
