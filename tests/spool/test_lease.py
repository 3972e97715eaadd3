"""Workers' folders in a folder that machines share: each machine has locks of its own, and a note says who uses a folder."""

from __future__ import annotations

import logging
import os
import shutil
from pathlib import Path

import pytest

from rocketmq_spark.errors import ClosedError, SpoolError
from rocketmq_spark.session.spools import adopt, claim
from rocketmq_spark.spool import lease
from rocketmq_spark.spool.files import HOST
from rocketmq_spark.spool.lease import LAPSE_S, LeasedStore
from rocketmq_spark.spool.records import Done
from rocketmq_spark.spool.store import Store
from tests.spool.bench import record

NOW_MS = 10**13


def make(path: Path) -> LeasedStore:
    return LeasedStore(path, sync="never")


def on_another_machine(monkeypatch: pytest.MonkeyPatch, shared: Path, *used: str) -> Path:
    """From now on this is another machine, which has mounted the folder, and does not see the locks of processes that run now.

    RocksDB itself knows the names of files that its process has locked.
    """
    for name in used:
        (shared / name / "LOCK").rename(shared / name / "LOCK-elsewhere")
    monkeypatch.setattr(lease, "MACHINE", "another machine")
    for place in ("files.OWNERS", "lease.OWNERS", "database.OWNERS", "store.OWNERS", "database._open"):
        monkeypatch.setattr(f"rocketmq_spark.spool.{place}", set())
    mount = shared.with_name("mount")
    mount.symlink_to(shared)
    return mount


@pytest.fixture
def shared(tmp_path: Path) -> Path:
    folder = tmp_path / "shared"
    folder.mkdir()
    return folder


def silent(folder: Path) -> None:
    """Make the last touch as old as the lease may be."""
    touched = os.stat(folder / HOST).st_mtime - LAPSE_S - 1
    os.utime(folder / HOST, (touched, touched))


def bodies(store: Store) -> list[bytes]:
    works = store.take(NOW_MS, 100)
    store.settle([(work, Done()) for work in works], NOW_MS)
    return [work.record.payload for work in works]


def test_the_folder_of_a_process_of_another_machine_is_left_alone(
    shared: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    theirs = make(shared / "worker-1")
    theirs.add([(record(b"1"), 1)])
    mount = on_another_machine(monkeypatch, shared, "worker-1")
    caplog.set_level(logging.WARNING, "rocketmq_spark")
    ours = claim(mount, make)
    assert ours.path.name != "worker-1"
    assert [adopt(mount, ours, make, NOW_MS) for _ in range(2)] == [0, 0]
    (warning,) = [text for text in caplog.messages if "left alone" in text]
    assert f"process {os.getpid()} of another machine" in warning
    assert f"rocketmq-spark spool send {mount / 'worker-1'}" in warning
    with pytest.raises(SpoolError, match=r"is in use: process \d+ of another machine"):
        make(mount / "worker-1")
    theirs.add([(record(b"2"), 1)])
    assert bodies(theirs) == [b"1", b"2"]
    theirs.close()
    ours.close()


def test_the_folder_is_taken_over_once_its_process_is_silent(shared: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As when a container comes back on another machine, or this machine was restarted."""
    theirs = make(shared / "worker-1")
    theirs.add([(record(b"1"), 1)])
    mount = on_another_machine(monkeypatch, shared, "worker-1")
    silent(theirs.path)
    ours = make(mount / "worker-2")
    assert adopt(mount, ours, make, NOW_MS) == 1
    assert bodies(ours) == [b"1"]
    ours.close()


def test_who_stood_still_finds_that_the_folder_was_taken_and_writes_nothing(
    shared: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    theirs = make(shared / "worker-1")
    theirs.add([(record(b"1"), 1)])
    mount = on_another_machine(monkeypatch, shared, "worker-1")
    silent(theirs.path)
    ours = make(mount / "worker-1")
    monkeypatch.setattr(theirs._lease._timer, "lease_ms", lambda: theirs._lease._touched_ms + 1000 * int(LAPSE_S))
    with pytest.raises(SpoolError, match="another process has taken the spool"):
        theirs.add([(record(b"2"), 1)])
    assert theirs.is_lost
    with pytest.raises(ClosedError):
        theirs.take(NOW_MS, 1)
    before = sorted(os.listdir(ours.path))
    theirs.close()
    assert sorted(os.listdir(ours.path)) == before
    assert bodies(ours) == [b"1"]
    ours.close()


def test_a_process_that_ends_as_it_should_leaves_no_note(shared: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    theirs = make(shared / "worker-1")
    assert (theirs.path / HOST).exists()
    theirs.add([(record(b"1"), 1)])
    theirs.close()
    assert not (theirs.path / HOST).exists()
    monkeypatch.setattr(lease, "MACHINE", "another machine")
    ours = claim(shared, make)
    assert ours.path == theirs.path
    ours.close()


def test_a_note_of_a_dead_process_of_this_machine_holds_nobody_up(shared: Path) -> None:
    left = make(shared / "worker-1")
    left.add([(record(b"1"), 1)])
    note = (left.path / HOST).read_text()
    left.close()
    (left.path / HOST).write_text(note)
    ours = claim(shared, make)
    assert (ours.path, bodies(ours)) == (left.path, [b"1"])
    ours.close()


def test_a_copy_is_nobodys(shared: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    theirs = make(shared / "worker-1")
    theirs.add([(record(b"1"), 1)])
    shutil.copytree(theirs.path, shared / "worker-1-copy")
    monkeypatch.setattr(lease, "MACHINE", "another machine")
    copy = make(shared / "worker-1-copy")
    assert bodies(copy) == [b"1"]
    copy.close()
    theirs.close()


def test_of_two_machines_that_take_a_folder_one_gets_it(shared: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second one has looked at the note before the first one took the folder."""
    theirs = make(shared / "worker-1")
    mount = on_another_machine(monkeypatch, shared, "worker-1")
    silent(theirs.path)
    look, first = lease.elsewhere, []

    def late(path: Path) -> str | None:
        monkeypatch.setattr(lease, "elsewhere", look)
        found = look(path)
        first.append(make(shared.with_name("third") / path.name))
        return found

    monkeypatch.setattr(lease, "elsewhere", late)
    shared.with_name("third").symlink_to(shared)
    with pytest.raises(SpoolError, match="another process was faster"):
        make(mount / "worker-1")
    first[0]._lease.touch()
    assert not first[0].is_lost
    first[0].close()


def test_a_repair_keeps_the_note(shared: Path) -> None:
    mine = make(shared / "worker-1")
    mine.add([(record(b"1"), 1)])
    mine._failed = mine._damaged = True
    assert len(bodies(mine)) == 1
    mine._lease.touch()
    assert not mine.is_lost
    mine.close()
