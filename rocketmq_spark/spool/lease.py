"""The lease of a worker's folder, for file systems that several machines share.

RocksDB's lock shows whether a process of this machine uses a folder. Some shared file systems keep locks to each machine (NFS
with ``nolock`` or ``local_lock``, FUSE file systems of object stores), and two processes that write to one database destroy it.
So a process notes in its folder on which machine it runs, and touches this file every ``BEAT_S``. A process on another machine
takes the folder ``LAPSE_S`` after the last touch. A process that has not touched its file for a while looks, before it adds
records, whether the folder is still its own, and never uses a folder again that another process has taken.

A machine is one start of a kernel: containers on it share its locks. A restart, or a container on another machine, looks like
another machine, so the folder is free when the lease has lapsed. Ages are differences of times that the file system sets: the
clocks of machines do not matter.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import tempfile
import threading
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rocketmq_spark.base import folders
from rocketmq_spark.base.threads import Timer
from rocketmq_spark.errors import SpoolError
from rocketmq_spark.spool.files import HOST, OWNERS, WORKER, make_folder
from rocketmq_spark.spool.records import Record, RecordState
from rocketmq_spark.spool.store import Store

logger = logging.getLogger(__name__)

BEAT_S, LAPSE_S = 5.0, 120.0
_UNSURE_MS = round(500 * LAPSE_S)  # without a touch for so long, the file is read before records are added


class Holder(NamedTuple):
    """Who noted that it uses a folder, and when it did so last, in ns by the file system."""

    text: str
    machine: str
    host: str
    pid: int
    folder: str
    touched_ns: int


def _machine() -> str:
    """What all processes have in common that share locks with this one."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text("ascii").strip()
    except OSError:  # not Linux
        return os.uname().nodename


MACHINE = _machine()  # now: later, root may have taken the rights of the owner of a spool


def elsewhere(path: Path) -> str | None:
    """Say who on another machine may use the folder, as the part of a sentence; None if nobody does."""
    try:
        holder = _holder(path / HOST)
        if holder is None or holder.machine == MACHINE or holder.folder != path.name:  # of another name: it is a copy
            return None
        silent_s = (_now_ns(path) - holder.touched_ns) / 1e9
    except OSError:  # opening it for writing raises the error
        return None
    if silent_s >= LAPSE_S:
        return None
    return (
        f"process {holder.pid} of another machine (host {holder.host}), which noted {max(0.0, silent_s):.0f} s ago that it "
        f"uses it, may run; the folder is free when that is {LAPSE_S:g} s ago"
    )


def open_folder(path: Path, *how: Any, **more: Any) -> Store:
    """Open the store of a folder, with a lease if it is a worker's, which other processes take over."""
    return (LeasedStore if path.name.startswith(WORKER) else Store)(path, *how, **more)


class LeasedStore(Store):
    """A store whose folder processes of other machines leave alone. Raises ``SpoolError`` if one may use it."""

    def __init__(self, path: Path, *how: Any, **more: Any) -> None:
        self._lease = Lease(path.absolute(), self._abandon)
        try:
            super().__init__(path, *how, **more)
            self._lease.begin()
        except BaseException:
            self.close()
            raise

    @property
    def is_lost(self) -> bool:
        """Whether another process has taken the folder."""
        return self._lease.is_lost

    def add(
        self,
        records: Sequence[tuple[Record, int]],
        notes: Mapping[bytes, bytes] | None = None,
        states: Sequence[RecordState] | None = None,
    ) -> None:
        self._lease.check()
        super().add(records, notes, states)

    def close(self) -> None:
        if self.is_lost:
            self._abandon()
        elif hasattr(self, "_db"):
            super().close()
        self._lease.release()

    def _abandon(self) -> None:
        """Write nothing more. The database stays open: closing it would write to files that the other process uses."""
        self._closed = True
        OWNERS.discard(self)


class Lease:
    """The note of this process in a folder. Thread-safe. ``on_loss`` is called when another process has taken the folder."""

    def __init__(self, folder: Path, on_loss: Callable[[], None]) -> None:
        self.is_lost = False
        self._folder, self._file = folder, folder / HOST
        self._on_loss = on_loss
        self._text = json.dumps([MACHINE, os.uname().nodename, os.getpid(), folder.name, uuid.uuid4().hex])
        self._timer = Timer("rocketmq-spool-lease")
        self._lock = threading.Lock()
        self._touched_ms = self._timer.lease_ms()
        with contextlib.suppress(OSError):  # the store raises the error, which says more
            make_folder(folder)
            self._take()

    def _take(self) -> None:
        """Before the database is opened. A note of this machine stays: the lock says whether its process lives."""
        holder = _holder(self._file)
        if holder is not None and holder.machine == MACHINE:
            return
        if (who := elsewhere(self._folder)) is not None:
            raise self._in_use(who)
        if holder is not None:
            aside = self._file.with_name(f"{HOST}-{uuid.uuid4().hex}")
            try:
                self._file.rename(aside)
            except FileNotFoundError as e:
                raise self._in_use("another process was faster") from e
            if _holder(aside) != holder:  # it lives, or another process was faster
                aside.rename(self._file)
                raise self._in_use("another process was faster")
            aside.unlink()
        try:
            with open(folders.open_regular(self._file, os.O_WRONLY | os.O_CREAT | os.O_EXCL), "w") as file:
                file.write(self._text)
        except FileExistsError as e:
            if (holder := _holder(self._file)) is None or holder.machine != MACHINE:
                raise self._in_use("another process was faster") from e

    def begin(self) -> None:
        """After the database was opened: its lock shows that no other process of this machine uses the folder."""
        try:
            folders.write_new(self._file, self._text)
        except OSError as e:
            raise SpoolError(f"cannot write the spool in {self._folder}: {e}", remedy="Check its disk") from e
        self._touched_ms = self._timer.lease_ms()
        self._timer.every(BEAT_S, self.touch, BEAT_S)

    def touch(self) -> None:
        """Say that this process uses the folder, or find that another one has taken it."""
        with self._lock:
            if self.is_lost:
                return
            now_ms = self._timer.lease_ms()
            try:
                os.utime(self._file, follow_symlinks=False)
                holder = _holder(self._file)
            except FileNotFoundError:
                holder = None
            except OSError:  # the disk does not answer; ``check`` tries again
                return
            if holder is not None and holder.text == self._text:
                self._touched_ms = now_ms
                return
            self.is_lost = True
        logger.error(
            "the spool in %s is not used any more: this process stood still for more than %g s, and %s has taken its records",
            self._folder, LAPSE_S, "another one" if holder is None else f"process {holder.pid} of host {holder.host}",
        )  # fmt: skip
        self._on_loss()

    def check(self) -> None:
        """Raise ``SpoolError`` if another process has taken the folder, or may have."""
        if self._timer.lease_ms() - self._touched_ms > _UNSURE_MS:
            self.touch()
            if not self.is_lost and self._timer.lease_ms() - self._touched_ms > _UNSURE_MS:
                raise SpoolError(f"the disk of the spool in {self._folder} does not answer", remedy="Check its disk")
        if self.is_lost:
            raise SpoolError(f"another process has taken the spool in {self._folder}")

    def release(self) -> None:
        """Remove the note, so that another machine need not wait."""
        self._timer.close()
        with contextlib.suppress(OSError):
            holder = _holder(self._file)
            if holder is not None and holder.text == self._text:
                self._file.unlink()

    def _in_use(self, who: str) -> SpoolError:
        return SpoolError(f"the spool in {self._folder} is in use: {who}")


def _holder(file: Path) -> Holder | None:
    """Return what a note says; None if there is none, or if it is no note of this release."""
    try:
        with open(folders.open_regular(file), encoding="utf-8") as opened:
            text, touched_ns = opened.read(1 << 12), os.fstat(opened.fileno()).st_mtime_ns
        where, host, pid, folder, _ = json.loads(text)
        return Holder(text, str(where), str(host), int(pid), str(folder), touched_ns)
    except FileNotFoundError:
        return None
    except (ValueError, TypeError, RecursionError):
        return None


def _now_ns(folder: Path) -> int:
    """The time of the file system, by a new file in the folder."""
    with tempfile.TemporaryFile(dir=folder) as file:
        file.write(b".")
        file.flush()
        return os.fstat(file.fileno()).st_mtime_ns
