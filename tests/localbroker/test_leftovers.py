"""What the dead leave: found by the next start, and only theirs is touched."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from rocketmq_spark.base import folders
from rocketmq_spark.errors import LocalBrokerError
from rocketmq_spark.localbroker import servers, site
from rocketmq_spark.localbroker.process import MARK, PortBook
from rocketmq_spark.localbroker.site import TEMPORARY, claim
from tests import users


@pytest.fixture
def run(tmp_path: Path) -> Path:
    (tmp_path / "run").mkdir()
    return tmp_path / "run"


@pytest.fixture
def children() -> Iterator[list[subprocess.Popen[bytes]]]:
    started: list[subprocess.Popen[bytes]] = []
    yield started
    for child in started:
        child.kill()
        child.wait()


def _sleeper(children: list[subprocess.Popen[bytes]], mark: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-c", "import time; print(flush=True); time.sleep(600)", mark]
    child = subprocess.Popen(command, stdout=subprocess.PIPE)
    children.append(child)
    # Popen returns before the kernel shows the command line, by which it is to be found.
    assert child.stdout is not None
    with child.stdout as shown:
        assert shown.readline()
    return child


def _left_behind(run: Path, data: Path, delete: bool = True) -> Path:
    data.mkdir()
    (data / "store").touch()
    record = run / "dead.json"
    record.write_text(json.dumps({"data": str(data), "delete": delete}))
    return record


def test_a_claim_comes_and_goes(run: Path) -> None:
    taken = claim(run, None, keep=False)
    assert taken.data.name.startswith(TEMPORARY)
    assert len(list(run.glob("*.json"))) == 1
    taken.release(delete=True)
    assert not taken.data.exists()
    assert [p.name for p in run.iterdir()] == ["lock"]


def test_a_given_folder_is_made_and_kept(run: Path, tmp_path: Path) -> None:
    taken = claim(run, tmp_path / "a" / "b", keep=True)
    taken.release(delete=False)
    assert (tmp_path / "a" / "b").is_dir()


def test_processes_and_folder_of_the_dead_go(
    run: Path, tmp_path: Path, children: list[subprocess.Popen[bytes]]
) -> None:
    data = tmp_path / f"{TEMPORARY}x"
    record = _left_behind(run, data)
    theirs, others = _sleeper(children, f"{MARK}{data}"), _sleeper(children, f"{MARK}{data}-2")
    claim(run, None, keep=False).release(delete=True)
    assert theirs.wait(60) == -9
    assert others.poll() is None
    assert not data.exists()
    assert not record.exists()


def test_data_that_was_to_be_kept_is_kept(run: Path, tmp_path: Path) -> None:
    record = _left_behind(run, tmp_path / "mine", delete=False)
    claim(run, None, keep=False).release(delete=True)
    assert (tmp_path / "mine" / "store").exists()
    assert not record.exists()


def test_a_temporary_folder_that_was_to_be_kept_is_kept_when_its_process_is_killed(run: Path) -> None:
    killed = claim(run, None, keep=True)
    for lock in killed._locks:
        lock.close()
    claim(run, None, keep=False).release(delete=True)
    kept = killed.data.is_dir()
    shutil.rmtree(killed.data, ignore_errors=True)
    assert kept
    assert not list(run.glob("*.json"))


def test_only_folders_with_our_name_are_deleted(run: Path, tmp_path: Path) -> None:
    _left_behind(run, tmp_path / "precious")
    claim(run, None, keep=False).release(delete=True)
    assert (tmp_path / "precious" / "store").exists()


def test_a_record_of_another_user_is_left_alone(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, children: list[subprocess.Popen[bytes]]
) -> None:
    """It could name any folder and process of this user."""
    child = _sleeper(children, f"{MARK}{tmp_path / f'{TEMPORARY}mine'}")
    record = _left_behind(run, tmp_path / f"{TEMPORARY}mine")
    users.give_away(monkeypatch, record)
    monkeypatch.setattr(site, "_check", lambda _: None)
    claim(run, None, keep=False).release(delete=True)
    assert (child.poll(), (tmp_path / f"{TEMPORARY}mine").exists(), record.exists()) == (None, True, True)


def test_the_living_are_left_alone(run: Path, tmp_path: Path, children: list[subprocess.Popen[bytes]]) -> None:
    data = tmp_path / f"{TEMPORARY}x"
    record = _left_behind(run, data)
    child = _sleeper(children, f"{MARK}{data}")
    with record.open() as holder:
        fcntl.flock(holder, fcntl.LOCK_EX)
        claim(run, None, keep=False).release(delete=True)
    assert child.poll() is None
    assert data.exists()
    assert record.exists()


def test_a_folder_that_was_taken_up_again_is_left_alone(
    run: Path, tmp_path: Path, children: list[subprocess.Popen[bytes]]
) -> None:
    """By an owner with another cache, which does not see the record of the dead."""
    data = tmp_path / f"{TEMPORARY}x"
    record = _left_behind(run, data)
    (tmp_path / "run-2").mkdir()
    taken = claim(tmp_path / "run-2", data, keep=True)
    child = _sleeper(children, f"{MARK}{data}")
    claim(run, None, keep=False).release(delete=True)
    assert child.poll() is None
    assert (data / "store").exists()
    assert record.exists()
    taken.release(delete=False)
    claim(run, None, keep=False).release(delete=True)
    assert child.wait(60) == -9
    assert not data.exists()
    assert not record.exists()


def test_servers_whose_folder_is_gone_go_too(
    run: Path, tmp_path: Path, children: list[subprocess.Popen[bytes]]
) -> None:
    data = tmp_path / f"{TEMPORARY}x"
    record = _left_behind(run, data)
    shutil.rmtree(data)
    child = _sleeper(children, f"{MARK}{data}")
    claim(run, None, keep=False).release(delete=True)
    assert child.wait(60) == -9
    assert not record.exists()


def test_a_damaged_record_is_no_error(run: Path) -> None:
    (run / "x.json").write_text("{")
    claim(run, None, keep=False).release(delete=True)


def test_a_data_folder_has_one_owner(run: Path, tmp_path: Path) -> None:
    taken = claim(run, tmp_path / "data", keep=True)
    with pytest.raises(LocalBrokerError, match=r"The data folder .*/data is in use by another LocalBroker\. Stop"):
        claim(run, tmp_path / "data", keep=True)
    taken.release(delete=False)
    claim(run, tmp_path / "data", keep=True).release(delete=False)


def test_nobody_may_exchange_the_configuration_of_servers(tmp_path: Path) -> None:
    """The JVM reads it later. An older version made these folders with the modes of the umask."""
    data = tmp_path / "data"
    (data / "namesrv").mkdir(parents=True)
    (data / "namesrv" / "logback.xml").touch()
    for path in (data, data / "namesrv", data / "namesrv" / "logback.xml"):
        path.chmod(0o777)
    site._check(data)
    assert not any(path.stat().st_mode & 0o022 for path in (data, *data.rglob("*")))


@pytest.mark.parametrize("place", [".", "broker-a", "ports.json"])
def test_a_data_folder_of_another_user_is_not_used(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    """Its owner could exchange configuration, or lead files that are written elsewhere."""
    (data := tmp_path / "data").mkdir()
    (data / "broker-a").mkdir()
    (tmp_path / "precious").write_text("important")
    (data / "ports.json").symlink_to(tmp_path / "precious")
    uid = users.give_away(monkeypatch, data / place)
    with pytest.raises(
        LocalBrokerError, match=rf"The data folder {data} is not used: .* belongs to uid {uid}.*chown -R"
    ):
        claim(run, data, keep=True)
    assert (tmp_path / "precious").read_text() == "important"


def test_other_users_lose_the_right_to_write_to_a_data_folder(
    run: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (data := tmp_path / "shared" / "data").mkdir(parents=True)
    for folder in (data, data.parent):
        folder.chmod(0o777)
    claim(run, data, keep=True).release(delete=False)
    assert stat.S_IMODE(data.stat().st_mode) == 0o755
    assert f"the data folder of LocalBroker lies in {data.parent}, in which others (mode 0777)" in caplog.text


def test_files_of_a_cluster_are_written_without_following_links(tmp_path: Path) -> None:
    (precious := tmp_path / "precious").write_text("important")
    (tmp_path / "ports.json").symlink_to(precious)
    PortBook(tmp_path / "ports.json", {}).assign("namesrv", (0,))
    (tmp_path / "broker-a").mkdir()
    (tmp_path / "broker-a" / "logback.xml").symlink_to(precious)
    servers._home(tmp_path, "broker-a")
    assert precious.read_text() == "important"
    assert not (tmp_path / "ports.json").is_symlink()


@pytest.mark.parametrize("kind", ["theirs", "pipe", "link"])
def test_a_folder_that_was_made_again_by_others_stops_no_start(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """After a cleaner of /tmp has removed it. A pipe would keep all starts waiting."""
    data = tmp_path / f"{TEMPORARY}x"
    record = _left_behind(run, data)
    lock, target = data / "in-use", tmp_path / "elsewhere"
    lock.symlink_to(target) if kind == "link" else os.mkfifo(lock)
    if kind == "theirs":
        users.give_away(monkeypatch, data)
    if kind == "theirs" and not users.IS_ROOT:  # so is the record
        monkeypatch.setattr(folders, "foreign", lambda path, root_may=True: path if path == data else None)
    monkeypatch.setattr(site, "_check", lambda _: None)
    claim(run, None, keep=False).release(delete=True)
    assert (data.exists(), target.exists()) == (True, False)
    assert record.exists() == (kind != "theirs")
