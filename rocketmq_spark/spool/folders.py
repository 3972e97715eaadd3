"""Spool folders: one below ``spoolDir`` for each process that writes. Those of dead processes are adopted.

A process leaves its folder as it is when it ends. RocksDB's lock shows whether the process is alive, because the lock ends
with it.
"""

from __future__ import annotations

import logging
import os
import shutil
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from rocketmq_spark.base import extras
from rocketmq_spark.errors import OptionError, SpoolError, SpoolFull
from rocketmq_spark.options import Options, option_name
from rocketmq_spark.queues.environment import layout_text
from rocketmq_spark.spool.database import Database, in_use, is_database
from rocketmq_spark.spool.records import RECORD, Done, SpoolOwner, behind
from rocketmq_spark.spool.recovery import DAMAGED, held
from rocketmq_spark.spool.store import Store

logger = logging.getLogger(__name__)

_OF_SPOOL = ("spool_dir", "spool_sync", "spool_max_bytes")


@dataclass(frozen=True, slots=True)
class SpoolSettings:
    """Where a spool is, how safe ``add`` is when it returns, and how many bytes it may hold."""

    folder: Path
    sync: str
    max_bytes: int

    @classmethod
    def of(cls, options: Options) -> SpoolSettings | None:
        """None where sends may fail. One ``OptionError`` lists what is wrong."""
        found = problems(options)
        if found:
            raise OptionError.of(found)
        if options.on_send_failure != "spool":
            return None
        assert options.spool_dir is not None
        return cls(Path(options.spool_dir).expanduser(), options.spool_sync, options.spool_max_bytes)


def problems(options: Options) -> list[str]:
    """What is wrong with them, each a sentence without its full stop."""
    if options.on_send_failure != "spool":
        return [
            f"option {option_name(field)!r} means nothing without 'onSendFailure' spool"
            for field in _OF_SPOOL
            if field in options.given
        ]
    found = []
    if options.spool_dir is None:
        found.append("option 'onSendFailure' is 'spool', which needs option 'spoolDir': a folder on a disk that stays")
    if not extras.installed("rocksdict"):
        command = extras.command(extras.SPOOL)
        found.append(f"option 'onSendFailure' is 'spool', which needs the package rocksdict: {command}")
    return found


def owner_of(options: Options, purpose: str = "") -> SpoolOwner:
    """Whose records a spool holds that is opened with these options."""
    environment = f"environment {options.environment!r} ({options.environment_mode})" if options.environment else ""
    if environment and options.environments is not None:
        environment += f", of {layout_text(options.environments)}"
    return SpoolOwner(tuple(sorted(options.cluster)), options.namespace or "", environment, purpose)


_PREFIX, _EMPTIED = "worker-", "emptied-"
_PAGE, _PAGE_BYTES = 500, 8 << 20
_ENDLESS_MS = 2**63


def spools(folder: Path) -> list[Path]:
    """The spools of a folder: itself, and those of workers below it."""
    if not folder.is_dir():
        return []
    below = sorted(each for each in folder.iterdir() if each.name.startswith(_PREFIX) and is_database(each))
    return [folder, *below] if is_database(folder) else below


def claim(folder: Path, make: Callable[[Path], Store]) -> Store:
    """A store of this process's own: that of a dead process, or a new one."""
    for path in spools(folder):
        if in_use(path):
            continue
        try:
            return make(path)
        except SpoolError as e:  # another process was quicker, or the folder is in trouble
            logger.warning("skipping the spool in %s: %s", path, e)
    return make(folder / f"{_PREFIX}{os.getpid()}-{uuid.uuid4().hex[:12]}")


def adopt(folder: Path, into: Store, make: Callable[[Path], Store], now_ms: int) -> int:
    """Move what other dead processes left into a store of this one; how many records.

    A portion is added to the one before it leaves the other, so that a kill may double some and loses none. The dead
    letters stay, with their folder, and so does what ``into`` has no room for: it is no trouble of who adopts. What was due
    by a clock that was ahead of ``now_ms`` keeps its distance.
    """
    moved = 0
    for emptied in folder.glob(f"{_EMPTIED}*"):  # of who was killed while it removed one
        shutil.rmtree(emptied, ignore_errors=True)
    for path in spools(folder):
        if in_use(path):
            continue
        try:
            store = make(path)
            try:
                for count in _move(store, into, max(0, store.totals.last_ms - now_ms)):
                    moved += count
                empty = store.totals.all_bytes == 0
            finally:
                store.close()
            if empty and path != folder and not any(path.glob(f"{DAMAGED}-*")):
                _remove(path)
        except SpoolFull as e:
            logger.warning("the records of the spool in %s stay there for now: %s", path, e)
            break
        except SpoolError as e:
            logger.warning("skipping the spool in %s: %s", path, e)
    return moved


def _remove(path: Path) -> None:
    """Remove a folder of which nothing is left.

    Not while it is open: when RocksDB closes, it deletes what it does not know in the folder of that name, also the log of
    a process that has made the folder again. By one rename, with the lock: who opens it meanwhile finds all of it or nothing.
    """
    emptied = path.with_name(f"{_EMPTIED}{uuid.uuid4().hex}")
    with held(path):
        db = Database(path, read_only=True)
        try:
            left = next(db.scan(RECORD, behind(RECORD)), None) or db.gaps or db.damage
        finally:
            db.close()
        if not left:  # else another process was there in between
            path.rename(emptied)
    shutil.rmtree(emptied, ignore_errors=True)


def _move(store: Store, into: Store, ahead_ms: int) -> Iterator[int]:
    while taken := store.take(_ENDLESS_MS, _PAGE, _PAGE_BYTES):
        notes = {name: value for name, value in store.notes().items() if value}  # what is empty says nothing
        into.add([(work.record, max(0, work.due.due_ms - ahead_ms)) for work in taken], notes)
        store.settle([(work, Done()) for work in taken], 0)
        yield len(taken)
