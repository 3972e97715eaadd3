"""Row 3-16: what was added is on the disk. A kill cannot show it, for the kernel goes on; here its cache is what goes."""

from __future__ import annotations

import os
import shutil
import threading
from pathlib import Path

import pytest

from rocketmq_spark.spool import database, files
from rocketmq_spark.spool.store import Store
from tests.spool.bench import record

MESSAGES = 120


class Disk:
    """What the disk has of a folder: of a log what it had when it was synced last, and half of what came since, under the
    names that were synced.

    RocksDB syncs its tables and its manifest itself, where Python does not see it: those count as written.
    """

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder = folder
        self.logs: dict[int, int] = {}
        self.names: set[str] = set()
        self.torn = 0
        self._sync_file, self._sync_folder = files._sync_file, files.sync_folder
        monkeypatch.setattr(files, "_sync_file", self._file)
        monkeypatch.setattr(files, "sync_folder", self._names)

    def _file(self, number: int) -> None:
        # Read before: what comes while it syncs may or may not be there.
        before = os.fstat(number)
        self._sync_file(number)
        self.logs[before.st_ino] = before.st_size

    def _names(self, path: Path) -> None:
        names = set(os.listdir(path))
        self._sync_folder(path)
        if path == self.folder:
            self.names = names

    def after_a_cut(self, into: Path) -> Path:
        """The folder as it is found by the next start."""
        while True:
            shutil.rmtree(into, ignore_errors=True)
            into.mkdir()
            before = self._entries_by_owner()
            try:
                for name in before:
                    shutil.copy(self.folder / name, into / name)
            except FileNotFoundError:
                continue
            if before == self._entries_by_owner():
                break
        for name, inode in before.items():
            if name.endswith(files.LOG_SUFFIX):
                synced, size = self.logs.get(inode, 0), (into / name).stat().st_size
                self.torn += synced < size
                os.truncate(into / name, (synced + size) // 2)
                if name not in self.names:
                    (into / name).unlink()
        return into

    def _entries_by_owner(self) -> dict[str, int]:
        return {entry.name: entry.inode() for entry in os.scandir(self.folder)}


def kept(folder: Path) -> list[bytes]:
    store = Store(folder)
    found = sorted(work.record.payload for work in store.take(10**15, 10_000))
    store.close()
    return found


@pytest.mark.parametrize("sync", ["always", "batch"])
def test_what_was_added_is_there_after_a_power_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sync: str) -> None:
    monkeypatch.setattr(database, "WRITE_BUFFER_BYTES", 64 << 10)  # so that logs end and begin
    disk = Disk(tmp_path / "s", monkeypatch)
    store = Store(tmp_path / "s", sync)
    added: list[bytes] = []

    def add(first: int) -> None:
        for i in range(first, first + MESSAGES // 4):
            body = b"%05d" % i + os.urandom(2000)
            store.add([(record(body), 0)])
            added.append(body)

    threads = [threading.Thread(target=add, args=(first,)) for first in range(0, MESSAGES, MESSAGES // 4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert kept(disk.after_a_cut(tmp_path / "cut")) == sorted(added)
    assert len(disk.logs) > 1
    assert len(added) == MESSAGES
    store.close()


def test_without_syncs_a_power_cut_is_seen_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else those above could not fail."""
    disk = Disk(tmp_path / "s", monkeypatch)
    store = Store(tmp_path / "s", "never")
    store.add([(record(b"x"), 0)])
    assert kept(disk.after_a_cut(tmp_path / "cut")) == []
    assert disk.torn == 1
    store.close()
