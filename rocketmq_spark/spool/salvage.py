"""A damaged database: what can be read is moved to a new one in the same folder, and the damaged files are kept beside it.

A driver. One block that cannot be read costs what stands in it. Where RocksDB finds nothing of a table any more, or does
not open at all, a copy that it put together again is asked for what is missing: such a copy may hold what was settled.

It may be killed at any point: the new files take their place in steps that the next one to open the folder finishes.
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from rocketmq_spark.errors import SpoolError
from rocketmq_spark.spool.database import WHOLE, Damaged, Database, rebuild
from rocketmq_spark.spool.files import mirror, sync_folder
from rocketmq_spark.spool.keys import TOTALS

# Folders within that of the database. A new one is ``NEW`` until it is complete and ``WHOLE`` from then on; the old files
# go to ``LEAVING``, which is given a name of its own when all are there.
_NEW, _LEAVING, _COPY, DAMAGED = "salvaged", "leaving", "copy", "damaged"
_PORTION, _PORTION_BYTES = 1000, 8 << 20
_ALL = (b"\0", b"\xff")


class Salvaged(NamedTuple):
    """Where the damaged files are, and whether what was counted before can be trusted. ``rebuilt`` are the areas of which a
    rebuilt copy gave something: that may have been over before.
    """

    folder: Path
    counted: bool
    rebuilt: frozenset[bytes] = frozenset()


def salvage(path: Path) -> Salvaged:
    """Make a database of what can be read. It must not be open. Raises ``SpoolError`` where its folder is in use."""
    with held(path):
        new = Database(path / _NEW)
        try:
            gaps, counted = _copy_readable(path, new)
            rebuilt = _copy_rebuilt(path, new, gaps) if gaps else frozenset()
        finally:
            new.close()
        (path / _NEW / "LOCK").unlink(missing_ok=True)
        (path / _LEAVING).mkdir()
        (path / _NEW).rename(path / WHOLE)
        sync_folder(path)
        return Salvaged(_exchange(path), counted, rebuilt)


def finish(path: Path) -> None:
    """What a process that died left of such work: finished, or taken away where the old files are still the truth."""
    try:
        left = any((path / name).exists() for name in (_NEW, WHOLE, _LEAVING, _COPY))
    except OSError as e:  # a disk that fails, or a mount that has gone
        raise SpoolError(f"the spool in {path} cannot be looked at: {e}", remedy="See to its disk") from e
    if left:
        with held(path):
            pass


def _copy_readable(path: Path, new: Database) -> tuple[list[tuple[bytes, bytes]], bool]:
    """The ranges that could not be read, and whether the totals could, and no log had lost any."""
    try:
        old = Database(path, read_only=True)
    except SpoolError:
        return [_ALL], False
    try:
        counted = False
        for key in _copied(old, new, *_ALL):
            counted = counted or key == TOTALS
        return old.gaps, counted and old.damage is None
    finally:
        old.close()


def _copy_rebuilt(path: Path, new: Database, gaps: list[tuple[bytes, bytes]]) -> frozenset[bytes]:
    """The areas of which it gave something."""
    areas: set[bytes] = set()
    copy = path / _COPY
    copy.mkdir()
    mirror(path, copy, shutil.copyfile)
    rebuild(copy)
    with contextlib.suppress(Damaged):  # then nothing more can be had
        rebuilt = Database(copy, read_only=True)
        try:
            for start, end in gaps:
                areas.update(key[:1] for key in _copied(rebuilt, new, start, end))
        finally:
            rebuilt.close()
    shutil.rmtree(copy)
    return frozenset(areas)


def _copied(old: Database, new: Database, start: bytes, end: bytes) -> Iterator[bytes]:
    """The keys that are copied, in portions; what the new one has stays."""
    portion: list[tuple[bytes, bytes]] = []
    size = 0
    for key, value in old.scan(start, end):
        if new.get(key) is None:
            portion.append((key, value))
            size += len(value)
            yield key
        if len(portion) >= _PORTION or size >= _PORTION_BYTES:
            new.write(portion)
            portion, size = [], 0
    new.write(portion, sync=True)


@contextlib.contextmanager
def held(path: Path) -> Iterator[None]:
    """With RocksDB's own lock, and nothing left of an earlier time. Raises ``SpoolError`` where a process has it open."""
    try:
        lock = os.open(path / "LOCK", os.O_RDWR | os.O_CREAT, 0o600)
        try:
            try:
                fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as e:
                raise SpoolError(f"the spool in {path} is in use by another process") from e
            if (path / WHOLE).exists():
                _exchange(path)
            for name in (_NEW, _LEAVING, _COPY):
                shutil.rmtree(path / name, ignore_errors=True)
            yield
        finally:
            os.close(lock)
    except OSError as e:  # a full disk, most likely: the old files are still the truth, or the next one goes on
        raise SpoolError(f"the damaged spool in {path} could not be put together again: {e}") from e


def _exchange(path: Path) -> Path:
    """The old files out, the new ones in; where the old ones are."""
    kept = next(one for n in itertools.count(1) if not (one := path / f"{DAMAGED}-{n}").exists())
    if (path / _LEAVING).exists():
        for file in _files(path):
            file.rename(path / _LEAVING / file.name)
        (path / _LEAVING).rename(kept)
        sync_folder(path)
    # CURRENT last: with it there is a database.
    for file in sorted(_files(path / WHOLE), key=lambda file: file.name == "CURRENT"):
        file.rename(path / file.name)
    (path / WHOLE).rmdir()
    sync_folder(path)
    return kept


def _files(path: Path) -> list[Path]:
    return [file for file in path.iterdir() if file.is_file() and file.name != "LOCK"]
