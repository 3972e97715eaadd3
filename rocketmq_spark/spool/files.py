"""The files of a RocksDB database: its write-ahead log on the disk, and what is wrong with logs and manifest. A driver."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rocketmq_spark.spool.log_format import Headers, headers

LOG = ".log"
# Of a view: RocksDB writes its own, and nobody else's lock is taken.
_OWN = ("LOCK", "LOG")
# Grows whenever the memtable is another one.
_VERSION = "rocksdb.current-super-version-number"
_sync_file = getattr(os, "fdatasync", os.fsync)


def damaged_headers(path: Path) -> dict[str, Headers]:
    """Of the logs and the manifest of a folder, those with headers that RocksDB must not read, by their names."""
    found = {}
    for file in (*sorted(path.glob(f"*{LOG}")), *_manifest(path)):
        with contextlib.suppress(FileNotFoundError):  # a living process goes on meanwhile
            if (told := headers(file.read_bytes())).problem:
                found[file.name] = told
    return found


def mirror(path: Path, into: Path, put: Callable[[Path, Path], object]) -> None:
    """The files of a folder in another one: ``put`` there, but those with damaged headers as they were written."""
    damaged = damaged_headers(path)
    for file in path.iterdir():
        if file.name in damaged:
            (into / file.name).write_bytes(damaged[file.name].applied(file.read_bytes()))
        elif file.is_file() and file.name not in _OWN:
            put(file, into / file.name)


def _manifest(path: Path) -> list[Path]:
    with contextlib.suppress(OSError, UnicodeDecodeError):
        name = (path / "CURRENT").read_text().strip()
        if name.startswith("MANIFEST-") and "/" not in name:
            return [path / name]
    return []


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
        self._newest = self._files[max(names)]

    def close(self) -> None:
        while self._files:
            os.close(self._files.popitem()[1])


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
