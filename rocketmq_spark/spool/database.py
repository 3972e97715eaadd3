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
import tempfile
import weakref
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rocketmq_spark.base import extras, process
from rocketmq_spark.errors import ClosedError, SpoolError, SpoolFull
from rocketmq_spark.spool.files import (
    FULL,
    LOG,
    OWNERS,
    OneFolder,
    Wal,
    damaged_headers,
    is_one_of,
    make_folder,
    manifest,
    mirror,
)

logger = logging.getLogger(__name__)

WRITE_BUFFER_BYTES = 16 << 20
# A folder within that of a database: new files that are complete, and that take the place of damaged ones; see ``salvage``.
WHOLE = "whole"

OPEN_IT = "What opens it to send from it, such as 'spool send', keeps what can be read, and says what is lost"


class Damaged(SpoolError):
    """RocksDB found bytes that do not fit their checksum. The store that meets them makes itself whole again."""

    retriable = True


class Database:
    """Keys and values in a folder, which is made. ``damage`` is what RocksDB said when it opened with losses.

    Read-only it takes no lock, shows what was there when it was opened, and leaves out what cannot be read: ``gaps`` are
    the ranges of keys that a scan stepped over. Otherwise damage raises ``Damaged``.
    """

    def __init__(self, path: Path, read_only: bool = False) -> None:
        self.path = path
        self.damage: str | None = None
        self.gaps: list[tuple[bytes, bytes]] = []
        self.read_only = read_only
        self._pid = os.getpid()
        self._mirror: tempfile.TemporaryDirectory[str] | None = None
        self._rocks = _rocksdict()
        if _Threads.lost:
            raise SpoolError(
                f"the spool in {path} cannot be opened: this process was forked from one that had used RocksDB, whose "
                "threads do not survive that",
                remedy="Fork before the first spool is opened, or start processes with 'spawn'",
            )
        _Threads.used = True
        if not read_only and is_one_of(path, _written()):  # by any of its names: RocksDB's own lock is one of processes
            raise _in_use(path, "it is open in this process")
        self._wal = Wal(path)
        if read_only and not is_database(path):
            raise SpoolError(f"there is no spool in {path}")
        try:
            self._db = self._opened(read_only)
        except BaseException:
            self._clean_up()
            raise
        _open.add(self)

    def get(self, key: bytes) -> bytes | None:
        """The value, or None."""
        try:
            with self._errors("read"):
                value: bytes | None = self._here().get(key)
        except Damaged:
            if not self.read_only:
                raise
            self.gaps.append((key, key + b"\0"))
            return None
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
        at: bytes | None = start
        while at is not None:
            found = self._iterator(end)
            last = None
            try:
                with self._errors("read"):
                    found.seek(at)
                    while found.valid():
                        last = found.key()
                        yield last, found.value()
                        found.next()
                    found.status()  # raises what ended it too early
                return
            except Damaged:
                if not self.read_only:
                    raise
                begin = at if last is None else last
                at = _next_readable(found, begin, end)
                self.gaps.append((begin, at or end))
            finally:
                del found  # an error's traceback would keep it, and with it the folder's lock

    def _iterator(self, end: bytes) -> Any:
        options = self._rocks.ReadOptions()
        options.set_iterate_upper_bound(end)
        with self._errors("read"):
            return self._here().iter(options)

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
            self._clean_up()

    def _here(self) -> Any:
        if self._pid != os.getpid():
            raise ClosedError(
                f"the spool in {self.path} belongs to process {self._pid}, from which this one was forked"
            )
        return self._db

    def _opened(self, read_only: bool) -> Any:
        rocks = self._rocks
        access = rocks.AccessType.read_only(False) if read_only else rocks.AccessType.read_write()
        complete, to_a_torn_end, all_that_fits = (
            rocks.DBRecoveryMode.absolute_consistency,
            rocks.DBRecoveryMode.tolerate_corrupted_tail_records,
            rocks.DBRecoveryMode.skip_any_corrupted_record,
        )
        with self._errors("open"):
            if not read_only:
                make_folder(self.path)
            if is_database(self.path) and manifest(self.path) is None:  # RocksDB would begin anew, and delete them
                raise Damaged(
                    f"the spool in {self.path} is damaged: its file CURRENT is gone, or names nothing", remedy=OPEN_IT
                )
            path = self.path
            if is_database(path) and not any(path.glob(f"*{LOG}")):  # each one has a log, be it empty
                self.damage = "its log is gone"
                if not read_only:
                    raise Damaged(f"the spool in {path} is damaged: {self.damage}", remedy=OPEN_IT)
            if damaged := damaged_headers(path):
                name, headers = next(iter(damaged.items()))
                self.damage = f"{headers.problem} of {name}"
                # Tables that a manifest does not name any more would be left out without a word.
                if not read_only or any(each.lost for name, each in damaged.items() if not name.endswith(LOG)):
                    raise Damaged(f"the spool in {path} is damaged: {self.damage}", remedy=OPEN_IT)
                path = self._mirrored()
                if not any(each.lost for each in damaged.values()):
                    self.damage = None
            try:
                return rocks.Rdict(str(path), self._options(complete()), access_type=access)
            except Exception as e:
                if not _is_damage(e):
                    raise
                problem = str(e)
            with contextlib.suppress(Exception):
                found = rocks.Rdict(str(path), self._options(to_a_torn_end()), access_type=access)
                logger.warning(
                    "the log of the spool in %s ends within a write: this write and later ones are lost, an unknown number "
                    "of records. A power cut or a full disk does this to writes that were not acknowledged: %s",
                    self.path, problem,
                )  # fmt: skip
                return found
            if not read_only:
                raise Damaged(f"the spool in {self.path} is damaged: {problem}", remedy=OPEN_IT)
            # Without a look at its tables, whose other blocks are found one by one.
            found = rocks.Rdict(str(path), self._options(all_that_fits(), paranoid=False), access_type=access)
            self.damage = problem
            return found

    def _mirrored(self) -> Path:
        """Of a folder with damaged headers, beside it: the same with headers as they were written."""
        self._mirror = tempfile.TemporaryDirectory(prefix="rocketmq-spark-spool-")
        there = Path(self._mirror.name)
        mirror(self.path.resolve(), there, lambda file, link: link.symlink_to(file))
        return there

    def _clean_up(self) -> None:
        if self._mirror is not None:
            self._mirror.cleanup()

    def _options(self, recovery: Any, paranoid: bool = True) -> Any:
        options = self._rocks.Options(raw_mode=True)
        options.create_if_missing(True)
        options.set_paranoid_checks(paranoid)
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
            return Damaged(f"the spool in {self.path} is damaged: {text}", remedy=OPEN_IT)
        if any(os.strerror(number) in text for number in FULL):
            return SpoolFull(f"cannot {what} the spool in {self.path}: {text}", remedy="Free space on the disk")
        if "LOCK" in text:
            return _in_use(self.path, text)
        return SpoolError(f"cannot {what} the spool in {self.path}: {text}", remedy="Check its disk")


class _Closed:
    """Stands where a database was: RocksDB's lock is free when no process has it any more."""

    def __getattr__(self, name: str) -> Any:
        raise ClosedError("the spool is closed")


def rebuild(path: Path) -> None:
    """Have RocksDB put together again what it finds in a folder's files. It leaves out whole tables for one block."""
    with contextlib.suppress(Exception):  # what it could not do is not there afterwards
        _rocksdict().Rdict.repair(str(path), _rocksdict().Options(raw_mode=True))


def is_database(path: Path) -> bool:
    """Whether there is one, open or not, or its files, of which one was lost."""
    return (path / "CURRENT").exists() or any(path.glob("*.sst")) or (path / WHOLE).exists()


def in_use(path: Path) -> bool:
    """Whether a living process, perhaps this one, has it open; leaves its files alone, which opening would not."""
    if _opened_here(path):
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


def occupy(store: OneFolder) -> None:
    """The folder is that of ``store`` as long as it is one of ``OWNERS``, also while its database is closed to be opened anew,
    or is put together again. Raises ``SpoolError`` where this process has it already.
    """
    with process.lock():
        if _opened_here(store.path):
            raise _in_use(store.path, "it is open in this process")
        OWNERS.add(store)


def _opened_here(path: Path) -> bool:
    """Whether this process has the folder, open or not, under whatever name: relative, by a link, or mounted elsewhere."""
    return is_one_of(path, OWNERS) or is_one_of(path, _written())


def _written() -> list[Database]:
    return [each for each in list(_open) if not each.read_only]


def _in_use(path: Path, remark: str) -> SpoolError:
    return SpoolError(
        f"the spool in {path} is in use by another process, or by another producer of this one",
        remark=remark,
        remedy="Give each process a 'spoolDir' of its own",
    )


_WIDTH = 64


def _next_readable(found: Any, begin: bytes, end: bytes) -> bytes | None:
    """The first key behind ``begin`` at which an iterator that met damage can go on; None where there is none before ``end``.

    Keys are numbers here, of so many bytes. Steps that double find one that can be read; the first one lies between that
    and the step before it.
    """
    low, last, step = _as_number(begin), _as_number(end) - 1, 1
    while not _can_read(found, _as_key(min(low + step, last))):
        if low + step >= last:
            return None
        step *= 2
    bad, good = low + step // 2, min(low + step, last)
    while good - bad > 1:
        middle = (bad + good) // 2
        if _can_read(found, _as_key(middle)):
            good = middle
        else:
            bad = middle
    return _as_key(good)


def _can_read(found: Any, key: bytes) -> bool:
    found.seek(key)
    if found.valid():
        return True
    try:
        found.status()
    except Exception as e:
        if not _is_damage(e):
            raise
        return False
    return True


def _as_number(key: bytes) -> int:
    return int.from_bytes(key[:_WIDTH].ljust(_WIDTH, b"\0"))


def _as_key(number: int) -> bytes:
    return number.to_bytes(_WIDTH)


def _is_damage(error: Exception) -> bool:
    """Bytes that do not fit their checksum, or a file that others name and that is not there."""
    text = str(error)
    return text.startswith("Corruption") or ("No such file" in text and (".sst" in text or "MANIFEST" in text))


def _rocksdict() -> Any:
    try:
        return importlib.import_module("rocksdict")
    except ImportError as e:
        raise SpoolError(
            f"the spool needs RocksDB, and the package rocksdict cannot be imported: {e}",
            remedy=f"Install it: {extras.command(extras.SPOOL)}",
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
