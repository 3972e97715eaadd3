"""The class-data archive: made in the background by a real JVM, never in the way."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from rocketmq_spark.localbroker import distribution
from rocketmq_spark.localbroker.java import CLASS_LIST, Archive, Java, find_java
from rocketmq_spark.localbroker.processes import spawn
from tests import users

CLASSES = "# note\njava/lang/Object id: 0\njava/lang/String id: 1\norg/apache/commons/cli/Option id: 7\norg/apac"


@pytest.fixture(scope="module")
def jar() -> Path:
    return next(p for p in distribution.fetch(["core"]) if p.name.startswith("commons-cli"))


@pytest.fixture
def home(tmp_path: Path) -> Path:
    (tmp_path / CLASS_LIST).write_text(CLASSES)
    return tmp_path


def _finish(archive: Archive, home: Path) -> None:
    archive.start_dump([home, home], spawn)
    for thread in threading.enumerate():
        if thread.name == "class-data archive":
            thread.join(60)


def test_made_once_and_fit_for_the_jvm(home: Path, jar: Path) -> None:
    java = find_java()
    archive = Archive(home / "archives", java, [jar])
    assert archive.flags(home) == [f"-XX:DumpLoadedClassList={home / CLASS_LIST}"]
    _finish(archive, home)
    assert {p.suffix for p in (home / "archives").iterdir()} == {".jsa", ".lock"}
    assert archive.flags(home)[0] == f"-XX:SharedArchiveFile={archive.path}"
    command = [str(java.path), "-Xshare:on", *archive.flags(home), "-XX:+UseSerialGC", "-cp", str(jar), "-version"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert archive.discard()
    assert not archive.discard()


@pytest.fixture
def user_archives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Those of the user's own cache, which is empty."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "user"))
    monkeypatch.setattr(sys, "platform", "linux")
    return tmp_path / "user" / "rocketmq-spark" / "archives"


@pytest.mark.parametrize("change", ["owner", "mode", "folder", "cache", "folder mode", "above", "above mode"])
def test_an_archive_that_others_may_change_is_not_used(
    home: Path, jar: Path, monkeypatch: pytest.MonkeyPatch, user_archives: Path, change: str
) -> None:
    """The JVM does not compare its code with the jars."""
    folder = home / "above" / "cache" / "archives"
    folder.mkdir(parents=True)
    archive = Archive(folder, Java(Path("/bin/false"), 17, "x"), [jar])
    archive.path.write_bytes(b"planted")
    assert archive.flags(home)[0] == f"-XX:SharedArchiveFile={archive.path}"
    place = {"owner": archive.path, "mode": archive.path, "cache": folder.parent}.get(change, folder)
    place = folder.parents[1] if "above" in change else place
    if "mode" in change:
        place.chmod(0o777)
    else:
        users.give_away(monkeypatch, place)
    made_again = Archive(folder, Java(Path("/bin/false"), 17, "x"), [jar])
    for each in (archive, made_again):
        assert each.flags(home) == [f"-XX:DumpLoadedClassList={home / CLASS_LIST}"]
    replaceable = change in ("owner", "mode") and (users.IS_ROOT or change == "mode")
    assert made_again.path.parent == (folder if replaceable else user_archives)


def test_an_archive_that_others_could_change_is_made_again(home: Path, jar: Path) -> None:
    archive = Archive(home / "archives", find_java(), [jar])
    (home / "archives").mkdir()
    archive.path.write_bytes(b"planted")
    archive.path.chmod(0o666)
    (elsewhere := home / "elsewhere").write_text("mine")
    for suffix in (".classes", ".part", ".log"):
        archive.path.with_suffix(suffix).symlink_to(elsewhere)
    _finish(archive, home)
    assert archive.flags(home)[0] == f"-XX:SharedArchiveFile={archive.path}"
    assert archive.path.read_bytes() != b"planted"
    assert elsewhere.read_text() == "mine"


def test_the_key_tells_jvms_and_jars_apart(tmp_path: Path, jar: Path) -> None:
    java = find_java()
    copy = tmp_path / "copy.jar"
    copy.write_bytes(jar.read_bytes())
    paths = {
        Archive(tmp_path, java, [jar]).path,
        Archive(tmp_path, Java(java.path, java.major_version, "another build"), [jar]).path,
        Archive(tmp_path, java, [copy]).path,
        Archive(tmp_path, java, [jar, copy]).path,
    }
    assert len(paths) == 4
    assert Archive(tmp_path, java, [jar]).path in paths


def test_a_failed_dump_leaves_nothing(home: Path, jar: Path) -> None:
    java = Java(Path("/bin/false"), 17, "broken")
    archive = Archive(home / "archives", java, [jar])
    _finish(archive, home)
    assert {p.suffix for p in (home / "archives").iterdir()} == {".lock"}


def test_a_missing_list_is_no_error(tmp_path: Path, jar: Path) -> None:
    archive = Archive(tmp_path / "archives", find_java(), [jar])
    _finish(archive, tmp_path)
    assert not archive.path.exists()


def test_another_process_is_at_it(home: Path, jar: Path) -> None:
    archive = Archive(home / "archives", find_java(), [jar])
    archive.path.parent.mkdir()
    with archive.path.with_suffix(".lock").open("a") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        _finish(archive, home)
    assert not archive.path.exists()


def test_stop_ends_a_dump(home: Path, jar: Path) -> None:
    slow = home / "java"
    slow.write_text("#!/bin/sh\nexec sleep 600\n")
    slow.chmod(0o755)
    archive = Archive(home / "archives", Java(slow, 17, "slow"), [jar])
    on_started, dumps = threading.Event(), list[subprocess.Popen[bytes]]()

    def spawn_and_tell(command: list[str], log: Path) -> subprocess.Popen[bytes]:
        dumps.append(spawn(command, log))
        on_started.set()
        return dumps[-1]

    archive.start_dump([home], spawn_and_tell)
    assert on_started.wait(60)
    archive.stop()
    _finish(archive, home)
    assert not archive.path.exists()
    assert [child.returncode for child in dumps] == [-signal.SIGKILL]


def test_a_folder_that_cannot_be_written_is_no_error(home: Path, jar: Path) -> None:
    archive = Archive(home / CLASS_LIST / "archives", find_java(), [jar])
    _finish(archive, home)


def test_old_archives_go(home: Path, jar: Path) -> None:
    folder = home / "archives"
    folder.mkdir()
    for i in range(9):
        (folder / f"{i:016x}.jsa").touch()
    archive = Archive(folder, find_java(), [jar])
    _finish(archive, home)
    left = list(folder.glob("*.jsa"))
    assert archive.path in left
    assert len(left) == 6


def test_files_of_killed_dumps_are_deleted_running_ones_stay(home: Path, jar: Path) -> None:
    left, busy, kept = "a" * 16, "b" * 16, "c" * 16
    folder = home / "archives"
    folder.mkdir()
    for name, age_s in (
        (f"{left}.classes", 7200),
        (f"{left}.log", 7200),
        (f"{left}.lock", 7200),
        (f"{busy}.lock", 60),
        (f"{kept}.lock", 7200),
        ("chapter.log", 7200),
        ("notes.txt", 7200),
    ):
        (folder / name).touch()
        os.utime(folder / name, (time.time() - age_s,) * 2)
    (folder / f"{kept}.jsa").touch()
    archive = Archive(folder, find_java(), [jar])
    archive.path.with_suffix(".lock").touch()
    os.utime(archive.path.with_suffix(".lock"), (0, 0))
    _finish(archive, home)
    mine = {archive.path.name, archive.path.with_suffix(".lock").name}
    assert {p.name for p in folder.iterdir()} == {
        f"{busy}.lock",
        f"{kept}.jsa",
        f"{kept}.lock",
        "chapter.log",
        "notes.txt",
        *mine,
    }
    assert archive.path.with_suffix(".lock").stat().st_mtime > time.time() - 3600, (
        "others would think that it is nobody's"
    )
