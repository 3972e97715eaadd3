"""RocksDB as a store needs it: batches that are written whole, ranges that are read in pages, and errors that say something.

A driver, and the only place that knows ``rocksdict``. RocksDB holds Python's lock while it writes, so it is not asked to
wait for the disk: that is done here, beside it, on the files of its write-ahead log, while other threads go on.
A database belongs to the process that opened it; a forked child neither uses nor closes it.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import importlib
import logging
import os
import weakref
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rocketmq_spark.errors import ClosedError, SpoolError

logger = logging.getLogger(__name__)

WRITE_BUFFER_BYTES = 16 << 20
_LOG = ".log"
# Grows whenever the memtable is another one.
_VERSION = "rocksdb.current-super-version-number"
_sync_file = getattr(os, "fdatasync", os.fsync)


class Damaged(SpoolError):
    """RocksDB found bytes that do not fit their checksum."""


class Database:
    """Keys and values in a folder, which is made. ``damage`` is what RocksDB said when it opened with losses.

    Read-only it takes no lock, and shows what was there when it was opened.
    """

    def __init__(self, path: Path, read_only: bool = False, repair: bool = False) -> None:
        self.path = path
        self.damage: str | None = None
        self._repair = repair
        self._pid = os.getpid()
        self._rocks = _rocksdict()
        if _Threads.lost:
            raise SpoolError(
                f"the spool in {path} cannot be opened: this process was forked from one that had used RocksDB, whose "
                "threads do not survive that",
                remedy="Fork before the first spool is opened, or start processes with 'spawn'",
            )
        _Threads.used = True
        self._wal = _Wal(path)
        if read_only and not is_database(path):
            raise SpoolError(f"there is no spool in {path}")
        self._db = self._opened(read_only)
        _open.add(self)

    def get(self, key: bytes) -> bytes | None:
        """The value, or None."""
        with self._errors("read"):
            value: bytes | None = self._here().get(key)
        return value

    def write(self, puts: Sequence[tuple[bytes, bytes]], deletes: Sequence[bytes] = (), sync: bool = False) -> None:
        """All of it or nothing; when it returns it survives this process, with ``sync`` the machine, too."""
        batch = self._rocks.WriteBatch(raw_mode=True)
        for key in deletes:
            batch.delete(key)
        for key, value in puts:
            batch.put(key, value)
        try:  # as ``_errors``, without what a ``with`` costs each addition
            self._here().write(batch)
            if sync:
                self._wal.sync(self._db)
        except (SpoolError, ClosedError):
            raise
        except Exception as e:
            raise self._told("write", e) from e

    def scan(self, start: bytes, end: bytes) -> Iterator[tuple[bytes, bytes]]:
        """Keys from ``start`` to before ``end`` with their values. RocksDB holds a snapshot until it is closed."""
        options = self._rocks.ReadOptions()
        options.set_iterate_upper_bound(end)
        with self._errors("read"):
            found = self._here().iter(options)
            found.seek(start)
            while found.valid():
                yield found.key(), found.value()
                found.next()
            found.status()  # raises what ended it too early

    def close(self) -> None:
        """Give the folder free. Nothing is done in a forked child, or the second time."""
        if self._pid == os.getpid() and self in _open:
            _open.discard(self)
            self._wal.close()
            db, self._db = self._db, _Closed()
            try:
                db.close()
            except Exception as e:  # noqa: BLE001 - what is not in its tables is in the log, where the next one finds it
                logger.warning("the spool in %s was closed with an error: %s", self.path, e)

    def _here(self) -> Any:
        if self._pid != os.getpid():
            raise ClosedError(
                f"the spool in {self.path} belongs to process {self._pid}, from which this one was forked"
            )
        return self._db

    def _opened(self, read_only: bool) -> Any:
        rocks = self._rocks
        access = rocks.AccessType.read_only(False) if read_only else rocks.AccessType.read_write()
        strict, lenient = (
            rocks.DBRecoveryMode.tolerate_corrupted_tail_records,
            rocks.DBRecoveryMode.skip_any_corrupted_record,
        )
        with self._errors("open"):
            if not read_only:
                _make(self.path)
            if self._repair:
                rocks.Rdict.repair(str(self.path), self._options(lenient()))
            try:
                return rocks.Rdict(str(self.path), self._options(strict()), access_type=access)
            except Exception as e:
                if not _is_damage(e):
                    raise
                self.damage = str(e)
            logger.error("the spool in %s is damaged and opened with what can be read: %s", self.path, self.damage)
            try:
                return rocks.Rdict(str(self.path), self._options(lenient()), access_type=access)
            except Exception as e:
                if read_only or not _is_damage(e):
                    raise
            rocks.Rdict.repair(str(self.path), self._options(lenient()))
            return rocks.Rdict(str(self.path), self._options(lenient()), access_type=access)

    def _options(self, recovery: Any) -> Any:
        options = self._rocks.Options(raw_mode=True)
        options.create_if_missing(True)
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
    def _errors(self, what: str) -> Iterator[None]:
        try:
            yield
        except (SpoolError, ClosedError):
            raise
        except Exception as e:  # the binding raises nothing more special
            raise self._told(what, e) from e

    def _told(self, what: str, error: Exception) -> SpoolError:
        """RocksDB's errors, which have no classes, and those of the disk, as ours."""
        text = str(error)
        if _is_damage(error):
            return Damaged(f"the spool in {self.path} is damaged: {text}")
        if "LOCK" in text:
            return SpoolError(
                f"the spool in {self.path} is in use by another process, or by another producer of this one",
                remark=text,
                remedy="Give each process a 'spoolDir' of its own",
            )
        return SpoolError(f"cannot {what} the spool in {self.path}: {text}", remedy="See to its disk")


class _Closed:
    """Stands where a database was: RocksDB's lock is free when nobody has it any more."""

    def __getattr__(self, name: str) -> Any:
        raise ClosedError("the spool is closed")


class _Wal:
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
        names = {entry.name for entry in os.scandir(self._path) if entry.name.endswith(_LOG)}
        for name in names - self._files.keys():
            self._files[name] = os.open(self._path / name, os.O_RDONLY)
        for name in self._files.keys() - names:
            os.close(self._files.pop(name))
        self._newest = self._files[max(names)]

    def close(self) -> None:
        while self._files:
            os.close(self._files.popitem()[1])


def repaired(path: Path) -> Database:
    """The same folder with what RocksDB could save."""
    return Database(path, repair=True)


def is_database(path: Path) -> bool:
    """Whether there is one, open or not."""
    return (path / "CURRENT").exists()


def in_use(path: Path) -> bool:
    """Whether a living process, perhaps this one, has it open; leaves its files alone, which opening would not."""
    if any(database.path == path for database in list(_open)):
        return True  # and its lock must not be tried: it would be gone when the file is closed
    try:
        file = os.open(path / "LOCK", os.O_RDWR)
    except OSError:
        return False
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(file)
    return False


def sync_folder(path: Path) -> None:
    """A new file is found after a power cut when its folder is on the disk."""
    folder = os.open(path, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def _make(path: Path) -> None:
    missing = [folder for folder in (path, *path.parents) if not folder.exists()]
    path.mkdir(parents=True, exist_ok=True)
    for folder in missing:
        sync_folder(folder.parent)


def _is_damage(error: Exception) -> bool:
    return str(error).startswith("Corruption")


def _rocksdict() -> Any:
    try:
        return importlib.import_module("rocksdict")
    except ImportError as e:
        raise SpoolError(
            f"the spool needs RocksDB, and the package rocksdict cannot be imported: {e}",
            remedy="Install it: pip install 'rocketmq-spark[spool]'",
        ) from e


# Those of this process that are open.
_open: weakref.WeakSet[Database] = weakref.WeakSet()


class _Threads:
    """RocksDB's own, which all databases of a process share; ``used`` here, ``lost`` in a child of such a process."""

    used = lost = False


def _let_go() -> None:
    """In a forked child: what was inherited must never be finalized, for that would write to the parent's files."""
    for database in _open:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(database._db))
    _Threads.lost = _Threads.used


os.register_at_fork(after_in_child=_let_go)
