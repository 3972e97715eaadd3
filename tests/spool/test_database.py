"""RocksDB's ways to fail, and what a fork inherits."""

from __future__ import annotations

import builtins
import errno
import importlib
import os
import resource
import shutil
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rocketmq_spark.errors import ClosedError, SpoolError, SpoolFull
from rocketmq_spark.spool import database, files
from rocketmq_spark.spool.database import Damaged, Database, is_database, is_in_use
from tests.helpers import raising
from tests.spool.test_files import synced_files


def test_new_folder_is_made_and_its_parents_are_synced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[Path] = []
    monkeypatch.setattr(files, "sync_folder", synced.append)
    db = Database(tmp_path / "a" / "b")
    assert synced == [tmp_path / "a", tmp_path]
    assert is_database(tmp_path / "a" / "b")
    db.close()


def test_a_range_is_read_in_order_to_before_its_end(tmp_path: Path) -> None:
    db = Database(tmp_path)
    db.write([(b"b1", b"1"), (b"a1", b"2"), (b"a2", b"3")])
    assert list(db.scan(b"a", b"b")) == [(b"a1", b"2"), (b"a2", b"3")]
    db.write([(b"a3", b"4")], [b"a1"])
    assert [key for key, _ in db.scan(b"a", b"b")] == [b"a2", b"a3"]
    assert db.get(b"a1") is None
    db.close()


def test_options_come_from_this_package_and_not_from_the_folder(tmp_path: Path) -> None:
    """A damaged or crafted file of them is no reason to fail."""
    db = Database(tmp_path)
    db.write([(b"a", b"1")])
    db.close()
    newest = max(tmp_path.glob("OPTIONS-*"))
    own = newest.read_text()
    for setting, other in (("BytewiseComparator", "X"), ("compression=kLZ4Compression", "compression=kNoCompression")):
        assert setting in own
        newest.write_text(own.replace(setting, other))
        for read_only in (True, False):
            db = Database(tmp_path, read_only=read_only)
            assert db.get(b"a") == b"1"
            db.close()
        newest = max(tmp_path.glob("OPTIONS-*"))
        assert newest.read_text() == own


def test_a_scan_that_met_damage_leaves_the_folder_free(tmp_path: Path) -> None:
    """Though its error is still at hand: an iterator in a traceback would keep RocksDB's lock."""
    db = Database(tmp_path)
    db.write([(b"%04d" % i, os.urandom(100)) for i in range(500)])
    db.close()
    (table,) = tmp_path.glob("*.sst")
    data = bytearray(table.read_bytes())
    data[len(data) // 2] ^= 1
    table.write_bytes(data)
    db = Database(tmp_path)
    with pytest.raises(Damaged) as caught:
        list(db.scan(b"\0", b"\xff"))
    db.close()
    Database(tmp_path).close()
    assert caught.value.retriable
    reading = Database(tmp_path, read_only=True)
    assert 400 < len(list(reading.scan(b"\0", b"\xff"))) < 500
    assert len(reading.gaps) == 1
    reading.close()


def test_rocksdb_says_when_its_memtable_is_another_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(database, "WRITE_BUFFER_BYTES", 64 << 10)
    synced = synced_files(monkeypatch)
    db = Database(tmp_path)
    db.write([(b"k", b"v")], sync=True)
    first = synced[-1]
    for i in range(60):
        db.write([(b"%d" % i, os.urandom(4096))], sync=True)
        assert synced[-1] == max(path.name for path in tmp_path.glob("*.log"))
    assert synced[-1] > first
    db.close()


def test_folder_in_use_is_said_to_be(tmp_path: Path) -> None:
    db = Database(tmp_path)
    code = f"from pathlib import Path\nfrom rocketmq_spark.spool.database import Database\nDatabase(Path({str(tmp_path)!r}))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode != 0
    assert f"[ROCKETMQ_SPOOL] the spool in {tmp_path} is in use by another process" in done.stderr
    assert "Give each process a 'spoolDir' of its own" in done.stderr
    assert [key for key, _ in Database(tmp_path, read_only=True).scan(b"\0", b"\xff")] == []
    db.close()


def test_one_folder_has_one_owner_whatever_it_is_called(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """RocksDB's lock is one of processes, and its own list of a process goes by names."""
    db = Database(tmp_path / "s")
    (tmp_path / "link").symlink_to(tmp_path / "s")
    monkeypatch.chdir(tmp_path)
    for path in (Path("s"), tmp_path / "link", tmp_path / "s" / ".." / "s"):
        with pytest.raises(SpoolError, match="is in use by another process, or by another producer of this one"):
            Database(path)
        assert is_in_use(path)
        Database(path, read_only=True).close()
    db.close()
    Database(tmp_path / "link").close()


def test_folder_in_use_is_detected_without_changing_it(tmp_path: Path) -> None:
    db = Database(tmp_path)
    files = sorted(path.name for path in tmp_path.iterdir())
    code = (
        "from pathlib import Path\nfrom rocketmq_spark.spool.database import is_in_use\n"
        f"print(is_in_use(Path({str(tmp_path)!r})))"
    )

    def another_sees() -> str:
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
        return done.stdout.strip()

    assert is_in_use(tmp_path)
    assert another_sees() == "True"  # also after this process has asked: that did not drop its lock
    assert sorted(path.name for path in tmp_path.iterdir()) == files
    db.close()
    assert not is_in_use(tmp_path)
    assert another_sees() == "False"
    assert not is_in_use(tmp_path / "nowhere")


def test_a_folder_that_has_gone_takes_no_other_its_lock(tmp_path: Path) -> None:
    """A question about it would drop RocksDB's, and another process would write to the same files."""
    gone = [Database(tmp_path / str(number)) for number in range(6)]
    mine = [Database(tmp_path / f"mine-{number}") for number in range(2)]
    for each in gone:
        shutil.rmtree(each.path)
    assert all(is_in_use(each.path) for each in mine)
    for each in (*gone, *mine):
        each.close()


def test_a_folder_that_cannot_be_made_is_an_error_of_ours(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(SpoolError, match=r"cannot open the spool in .*file/s"):
        Database(tmp_path / "file" / "s")
    with pytest.raises(SpoolError, match="there is no spool in"):
        Database(tmp_path / "nowhere", read_only=True)
    assert not (tmp_path / "nowhere").exists()


def test_without_the_package_it_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    load = builtins.__import__

    def blocked(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.startswith("rocksdict"):
            raise ImportError("No module named 'rocksdict'")
        return load(name, *args, **kwargs)

    def no_module(name: str) -> Any:
        return blocked(name)

    monkeypatch.setattr(importlib, "import_module", no_module)
    with pytest.raises(SpoolError, match=r"pip install 'rocksdict>=0.3.29'"):
        Database(tmp_path)


def test_a_closed_one_says_so(tmp_path: Path) -> None:
    db = Database(tmp_path)
    db.close()
    db.close()
    with pytest.raises(ClosedError, match="is closed"):
        db.get(b"k")


def test_a_forked_child_neither_uses_nor_closes_it(tmp_path: Path) -> None:
    db = Database(tmp_path)
    db.write([(b"k", b"1")])
    child = os.fork()
    if child == 0:
        code = 1
        try:
            db.write([(b"k", b"2")])
        except ClosedError as e:
            db.close()
            code = 0 if "belongs to process" in str(e) else 2
        os._exit(code)
    assert os.waitpid(child, 0)[1] == 0
    db.write([(b"l", b"3")])
    assert (db.get(b"k"), db.get(b"l")) == (b"1", b"3")
    db.close()
    again = Database(tmp_path)
    assert again.get(b"l") == b"3"
    again.close()


def test_forked_child_of_process_with_spool_is_refused_a_spool(tmp_path: Path) -> None:
    """RocksDB would wait for threads that are not there."""
    Database(tmp_path / "parent").close()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            Database(tmp_path / "child")
        except SpoolError as e:
            code = 0 if "forked from one that had used RocksDB" in str(e) else 2
        os._exit(code)
    assert os.waitpid(child, 0)[1] == 0


def test_a_forked_child_may_end_as_any_program_does(tmp_path: Path) -> None:
    """Python's end finalizes what is left; what was inherited must be left out, or it writes to the parent's files."""
    code = textwrap.dedent(
        """
        import os, sys
        from pathlib import Path
        from rocketmq_spark.spool.database import Database
        db = Database(Path(sys.argv[1]))
        db.write([(b"k", b"1")])
        if os.fork() == 0:
            del db
            sys.exit(0)
        _, status = os.wait()
        assert status == 0, status
        db.write([(b"l", b"2")])
        db.close()
        again = Database(Path(sys.argv[1]))
        print(again.get(b"k"), again.get(b"l"))
        """
    )
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code, str(tmp_path)],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert (done.returncode, done.stdout) == (0, "b'1' b'2'\n"), done.stderr


def test_full_disk_raises_error_and_loses_no_stored_record(tmp_path: Path) -> None:
    """A limit on the size of files stands for the disk: writes fail in the same place."""
    code = textwrap.dedent(
        """
        import resource, sys
        from pathlib import Path
        from rocketmq_spark.errors import SpoolError
        from rocketmq_spark.spool.records import Record
        from rocketmq_spark.spool.store import Store
        store = Store(Path(sys.argv[1]))
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, hard))
        kept, errors = [], 0
        for i in range(90):
            try:
                store.add([(Record("k", b"%d" % i + b"x" * 10_000, 1), 1)])
                kept.append(i)
            except SpoolError as e:
                errors += 1
                if errors == 3:
                    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        print(errors, len(kept))
        found = []
        while works := store.take(10, 100):
            found += [int(work.record.payload.rstrip(b"x")) for work in works]
        missing = set(kept) - set(found)
        print(sorted(missing), len(found) - len(set(found)), len(store) == len(found))
        """
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)],
        capture_output=True, text=True, check=False, timeout=60,
        preexec_fn=lambda: signal.signal(signal.SIGXFSZ, signal.SIG_IGN),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    first, second = done.stdout.splitlines()
    errors, kept = map(int, first.split())
    assert (errors, kept) == (3, 87)  # after each failure it is opened again
    assert second == "[] 0 True"


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_a_disk_that_takes_no_more_is_told_from_one_that_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """Who waits for room must not wait for a disk that is dead."""
    db = Database(tmp_path)
    text = f"IO error: {os.strerror(number)}: While appending to file: {tmp_path}/000004.log"
    for said, kind in ((text, SpoolFull), ("IO error: Input/output error: While appending to file", SpoolError)):
        monkeypatch.setattr(db, "_db", SimpleNamespace(write=raising(OSError(said))))
        with pytest.raises(SpoolError) as caught:
            db.write([(b"k", b"1")])
        assert type(caught.value) is kind
    monkeypatch.undo()
    db.close()


def test_files_are_not_left_open(tmp_path: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    db = Database(tmp_path)
    db.write([(b"k", b"v")], sync=True)
    db.close()
    assert len(os.listdir("/proc/self/fd")) == before
    assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] > before
