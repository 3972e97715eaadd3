"""The files of a database: which are synced, and which RocksDB must not read as they are."""

from __future__ import annotations

import os
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from rocketmq_spark.errors import SpoolFull
from rocketmq_spark.spool import files
from rocketmq_spark.spool.database import Database
from rocketmq_spark.spool.files import damaged_headers, mirror


def synced_files(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the files whose bytes were to be on the disk, in turn."""
    synced: list[str] = []
    monkeypatch.setattr(
        files, "_sync_file", lambda number: synced.append(Path(os.readlink(f"/proc/self/fd/{number}")).name)
    )
    return synced


class Versions:
    """As much of RocksDB as says that the memtable is another one."""

    number = 1

    def property_int_value(self, name: str) -> int:
        return self.number


def test_new_log_file_syncs_all_log_files_then_only_newest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A recovery ends at the first gap, so an older file must not lack what a younger one builds on."""
    synced = synced_files(monkeypatch)
    monkeypatch.setattr(files, "sync_folder", lambda path: synced.append("folder"))
    (tmp_path / "000004.log").touch()
    versions, wal = Versions(), files.WriteAheadLog(tmp_path)
    wal.sync(versions)
    wal.sync(versions)
    assert synced == ["000004.log", "folder", "000004.log"]
    synced.clear()
    (tmp_path / "000007.log").touch()
    versions.number = 2
    wal.sync(versions)
    wal.sync(versions)
    assert synced == ["000004.log", "000007.log", "folder", "000007.log"]
    (tmp_path / "000004.log").unlink()
    versions.number = 3
    wal.sync(versions)
    assert list(wal._descriptor_by_name) == ["000007.log"]
    for name in ("999999.log", "1000003.log"):
        (tmp_path / name).touch()
    versions.number = 4
    wal.sync(versions)
    wal.sync(versions)
    assert synced[-1] == "1000003.log"
    wal.close()


def test_a_damaged_head_is_found_and_mirrored_as_it_was_written(tmp_path: Path) -> None:
    db = Database(tmp_path / "db")
    db.write([(b"key", b"value")])
    (log,) = (tmp_path / "db").glob("*.log")
    data = log.read_bytes()
    assert damaged_headers(tmp_path / "db") == {}
    log.write_bytes(data[:6] + b"\5" + data[7:])
    assert list(damaged_headers(tmp_path / "db")) == [log.name]
    (tmp_path / "mirror").mkdir()
    mirror(tmp_path / "db", tmp_path / "mirror", lambda file, link: link.symlink_to(file))
    assert (tmp_path / "mirror" / log.name).read_bytes() == data
    assert not (tmp_path / "mirror" / "LOCK").exists()
    assert (tmp_path / "mirror" / "CURRENT").is_symlink()
    log.write_bytes(data)
    db.close()


@pytest.mark.parametrize(("last", "is_damaged"), [(b"", False), (b"more", True)])
def test_a_torn_end_behind_which_another_log_goes_on_is_damage(tmp_path: Path, last: bytes, is_damaged: bool) -> None:
    """RocksDB goes on with the next one, and what was lost before that is a gap. An empty one is that of a start."""
    db = Database(tmp_path / "db")
    db.write([(b"key", b"value")])
    (log,) = (tmp_path / "db").glob("*.log")
    data = log.read_bytes()
    log.write_bytes(data[:-3])
    (tmp_path / "db" / "1000003.log").write_bytes(data if last else b"")
    assert list(damaged_headers(tmp_path / "db")) == ([log.name] if is_damaged else [])
    log.write_bytes(data)
    db.close()


def test_free_disk_space_is_checked_after_some_bytes_and_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now_s, left, asked = 100.0, files.RESERVE_BYTES + 3 * files.SPACE_CHECK_BYTES, 0

    def statvfs(_: Path) -> SimpleNamespace:
        nonlocal asked
        asked += 1
        return SimpleNamespace(f_bavail=left, f_frsize=1)

    monkeypatch.setattr(os, "statvfs", statvfs)
    monkeypatch.setattr(time, "monotonic", lambda: now_s)
    room, kib = files.FreeSpace(tmp_path, None), 1 << 10
    assert {room.check(0, kib) for _ in range(1 + files.SPACE_CHECK_BYTES // kib)} == {None}
    assert asked == 1
    room.check(0, kib)
    assert asked == 2, "as many bytes were added as an answer is good for"
    now_s += files.SPACE_CHECK_S
    room.check(0, kib)
    assert asked == 3
    left = files.RESERVE_BYTES + kib
    now_s += files.SPACE_CHECK_S
    assert room.check(0, kib) is None
    left -= kib
    assert isinstance(room.check(0, 1), SpoolFull)


def test_new_folder_and_its_parents_survive_power_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else what was kept in it is gone with its name, however often its files were synced."""
    synced: list[Path] = []
    monkeypatch.setattr(files, "sync_folder", synced.append)
    for _ in range(2):
        files.make_folder(tmp_path / "spools" / "worker")
    assert sorted(synced) == [tmp_path, tmp_path / "spools"]
