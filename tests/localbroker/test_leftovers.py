"""What the dead leave: found by the next start, and only theirs is touched."""

from __future__ import annotations

import fcntl
import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from rocketmq_spark.errors import LocalBrokerError
from rocketmq_spark.localbroker.process import MARK
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
