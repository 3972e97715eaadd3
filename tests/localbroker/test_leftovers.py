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
from rocketmq_spark.localbroker import processes, servers, workspace
from rocketmq_spark.localbroker.processes import DATA_FLAG, PortAssignments
from rocketmq_spark.localbroker.workspace import TEMPORARY_PREFIX, reserve
from tests import users


@pytest.fixture
def run(tmp_path: Path) -> Path:
    (tmp_path / "run").mkdir()
    return tmp_path / "run"


@pytest.fixture
def children() -> Iterator[list[subprocess.Popen[bytes]]]:
    on_started: list[subprocess.Popen[bytes]] = []
    yield on_started
    for child in on_started:
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
    (data / "in-use").touch()
    record = run / "dead.json"
    record.write_text(json.dumps({"data": str(data), "delete": delete}))
    return record


def test_a_claim_comes_and_goes(run: Path) -> None:
    taken = reserve(run, None, keeps_data=False)
    assert taken.data.name.startswith(TEMPORARY_PREFIX)
    assert len(list(run.glob("*.json"))) == 1
    taken.release(delete=True)
    assert not taken.data.exists()
    assert [p.name for p in run.iterdir()] == ["lock"]


def test_a_given_folder_is_made_and_kept(run: Path, tmp_path: Path) -> None:
    taken = reserve(run, tmp_path / "a" / "b", keeps_data=True)
    taken.release(delete=False)
    assert (tmp_path / "a" / "b").is_dir()


def test_processes_and_folder_of_the_dead_go(
    run: Path, tmp_path: Path, children: list[subprocess.Popen[bytes]]
) -> None:
    data = tmp_path / f"{TEMPORARY_PREFIX}x"
    record = _left_behind(run, data)
    theirs, others = _sleeper(children, f"{DATA_FLAG}{data}"), _sleeper(children, f"{DATA_FLAG}{data}-2")
    reserve(run, None, keeps_data=False).release(delete=True)
    assert theirs.wait(60) == -9
    assert others.poll() is None
    assert not data.exists()
    assert not record.exists()


def test_data_that_was_to_be_kept_is_kept(run: Path, tmp_path: Path) -> None:
    record = _left_behind(run, tmp_path / "mine", delete=False)
    reserve(run, None, keeps_data=False).release(delete=True)
    assert (tmp_path / "mine" / "store").exists()
    assert not record.exists()


def test_a_folder_to_keep_is_kept_when_its_process_is_killed(run: Path) -> None:
    killed = reserve(run, None, keeps_data=True)
    for lock in killed._locks:
        lock.close()
    reserve(run, None, keeps_data=False).release(delete=True)
    kept = killed.data.is_dir()
    shutil.rmtree(killed.data, ignore_errors=True)
    assert kept
    assert not list(run.glob("*.json"))


def test_only_folders_with_our_name_are_deleted(run: Path, tmp_path: Path) -> None:
    _left_behind(run, tmp_path / "precious")
    reserve(run, None, keeps_data=False).release(delete=True)
    assert (tmp_path / "precious" / "store").exists()


def test_a_record_of_another_user_is_left_alone(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, children: list[subprocess.Popen[bytes]]
) -> None:
    """It could name any folder and process of this user."""
    child = _sleeper(children, f"{DATA_FLAG}{tmp_path / f'{TEMPORARY_PREFIX}mine'}")
    record = _left_behind(run, tmp_path / f"{TEMPORARY_PREFIX}mine")
    users.give_away(monkeypatch, record)
    monkeypatch.setattr(workspace, "_check_data_folder", lambda _: None)
    reserve(run, None, keeps_data=False).release(delete=True)
    assert (child.poll(), (tmp_path / f"{TEMPORARY_PREFIX}mine").exists(), record.exists()) == (None, True, True)


def test_the_living_are_left_alone(run: Path, tmp_path: Path, children: list[subprocess.Popen[bytes]]) -> None:
    data = tmp_path / f"{TEMPORARY_PREFIX}x"
    record = _left_behind(run, data)
    child = _sleeper(children, f"{DATA_FLAG}{data}")
    with record.open() as holder:
        fcntl.flock(holder, fcntl.LOCK_EX)
        reserve(run, None, keeps_data=False).release(delete=True)
    assert child.poll() is None
    assert data.exists()
    assert record.exists()


def test_a_folder_that_was_taken_up_again_is_left_alone(
    run: Path, tmp_path: Path, children: list[subprocess.Popen[bytes]]
) -> None:
    """By an owner with another cache, which does not see the record of the dead."""
    data = tmp_path / f"{TEMPORARY_PREFIX}x"
    record = _left_behind(run, data)
    (tmp_path / "run-2").mkdir()
    taken = reserve(tmp_path / "run-2", data, keeps_data=True)
    child = _sleeper(children, f"{DATA_FLAG}{data}")
    reserve(run, None, keeps_data=False).release(delete=True)
    assert child.poll() is None
    assert (data / "store").exists()
    assert record.exists()
    taken.release(delete=False)
    reserve(run, None, keeps_data=False).release(delete=True)
    assert child.wait(60) == -9
    assert not data.exists()
    assert not record.exists()


def test_servers_whose_folder_is_gone_go_too(
    run: Path, tmp_path: Path, children: list[subprocess.Popen[bytes]]
) -> None:
    data = tmp_path / f"{TEMPORARY_PREFIX}x"
    record = _left_behind(run, data)
    shutil.rmtree(data)
    child = _sleeper(children, f"{DATA_FLAG}{data}")
    reserve(run, None, keeps_data=False).release(delete=True)
    assert child.wait(60) == -9
    assert not record.exists()


def test_a_damaged_record_is_no_error(run: Path) -> None:
    (run / "x.json").write_text("{")
    reserve(run, None, keeps_data=False).release(delete=True)


def test_a_data_folder_has_one_owner(run: Path, tmp_path: Path) -> None:
    taken = reserve(run, tmp_path / "data", keeps_data=True)
    with pytest.raises(LocalBrokerError, match=r"The data folder .*/data is in use by another LocalBroker\. Stop"):
        reserve(run, tmp_path / "data", keeps_data=True)
    taken.release(delete=False)
    reserve(run, tmp_path / "data", keeps_data=True).release(delete=False)


def test_nobody_may_exchange_the_configuration_of_servers(tmp_path: Path) -> None:
    """The JVM reads it later. An older version made these folders with the modes of the umask."""
    data = tmp_path / "data"
    (data / "namesrv").mkdir(parents=True)
    (data / "namesrv" / "logback.xml").touch()
    (data / "namesrv" / "logback.xml").chmod(0o666)
    data.chmod(0o755)
    (data / "namesrv").chmod(0o755)
    workspace._check_data_folder(data)
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
        LocalBrokerError, match=rf"The data folder {data} is not used: .* belongs to uid {uid}.*Choose another folder"
    ):
        reserve(run, data, keeps_data=True)
    assert (tmp_path / "precious").read_text() == "important"


def test_other_users_lose_the_right_to_write_to_a_data_folder(
    run: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (data := tmp_path / "shared" / "data").mkdir(parents=True)
    for folder in (data, data.parent):
        folder.chmod(0o777)
    reserve(run, data, keeps_data=True).release(delete=False)
    assert stat.S_IMODE(data.stat().st_mode) == 0o755
    assert f"the data folder of LocalBroker lies in {data.parent}, in which others (mode 0777)" in caplog.text


def test_what_others_may_have_moved_into_a_data_folder_stays(run: Path, tmp_path: Path) -> None:
    """They rename a folder of its user to the name of a broker, whose temporary files a start deletes. Also at the next start."""
    thesis = tmp_path / "data" / "project" / "tmp" / "thesis.tex"
    thesis.parent.mkdir(parents=True)
    thesis.touch()
    data = tmp_path / "data"
    data.chmod(0o777)
    (data / "project").rename(data / "broker-a")
    for _ in range(2):
        with pytest.raises(
            LocalBrokerError, match=rf"is not used: others may write to it, .* {data}/broker-a.*chmod go-w"
        ):
            reserve(run, data, keeps_data=True)
    data.chmod(0o755)
    reserve(run, data, keeps_data=True).release(delete=False)
    assert (data / "broker-a" / "tmp" / "thesis.tex").exists()


@pytest.mark.parametrize(
    ("folder", "mode"),
    [(".", 0o1777), (".", 0o3777), ("broker-a", 0o777), ("broker-a", 0o1777), ("broker-a/tmp", 0o777)],
)
def test_a_folder_of_a_broker_in_which_others_wrote_stays(run: Path, tmp_path: Path, folder: str, mode: int) -> None:
    """The sticky bit keeps others from moving things out of a folder, not into it."""
    data = tmp_path / "data"
    (thesis := data / "broker-a" / "tmp" / "thesis.tex").parent.mkdir(parents=True)
    thesis.touch()
    for path in (data, data / "broker-a", data / "broker-a" / "tmp"):
        path.chmod(0o755)
    (data / folder).chmod(mode)
    modes = {path: path.stat().st_mode for path in (data, *data.rglob("*"))}
    for _ in range(2):
        with pytest.raises(
            LocalBrokerError, match=r"is not used: (all users|others) may write to .*new (one|folder) in it"
        ):
            reserve(run, data, keeps_data=True)
    assert modes == {path: path.stat().st_mode for path in (data, *data.rglob("*"))}


@pytest.mark.parametrize("mode", [0o1777, 0o1775 | 0o002])
def test_a_folder_of_all_users_is_no_data_folder(run: Path, tmp_path: Path, mode: int) -> None:
    """Such as /tmp: without its mode, other users lose it."""
    (data := tmp_path / "data").mkdir()
    data.chmod(mode)
    with pytest.raises(
        LocalBrokerError, match=rf"all users may write to it \(mode {mode:04o}\): name a new folder in it"
    ):
        reserve(run, data, keeps_data=True)
    assert stat.S_IMODE(data.stat().st_mode) == mode
    reserve(run, data / "new", keeps_data=True).release(delete=False)


@pytest.mark.parametrize("place", ["broker-a", "namesrv", "proxy", "in-use", "ports.json"])
@pytest.mark.parametrize("kind", ["link", "second name", "pipe"])
def test_a_place_of_a_cluster_is_no_link_or_pipe(run: Path, tmp_path: Path, place: str, kind: str) -> None:
    """Servers would write elsewhere, or wait for ever."""
    (data := tmp_path / "data").mkdir(0o700)
    (work := tmp_path / "work").mkdir()
    (work / "file").touch()
    (work / "file").chmod(0o664)
    if kind == "link":
        (data / place).symlink_to(work)
    elif kind == "pipe":
        os.mkfifo(data / place)
    else:
        (data / place).hardlink_to(work / "file")
        (work / "file").chmod(0o644)
    mode = (work / "file").stat().st_mode
    with pytest.raises(LocalBrokerError, match=rf"{data / place} (is a link|has another name|is neither)"):
        reserve(run, data, keeps_data=True)
    assert (work / "file").stat().st_mode == mode


@pytest.mark.parametrize("mode", [0o700, 0o755])
def test_a_folder_that_only_its_user_may_write_is_used_again(run: Path, tmp_path: Path, mode: int) -> None:
    for name in ("broker-a/store", "namesrv", "proxy", "mine"):
        (tmp_path / "data" / name).mkdir(parents=True)
    for path in (tmp_path / "data").rglob("*"):
        path.chmod(mode)
    (tmp_path / "data").chmod(mode)
    (tmp_path / "data" / "mine").chmod(0o777)
    for _ in range(2):
        reserve(run, tmp_path / "data", keeps_data=True).release(delete=False)
    assert stat.S_IMODE((tmp_path / "data" / "mine").stat().st_mode) == 0o777


@pytest.mark.parametrize("kind", ["link", "second name", "pipe"])
def test_servers_write_to_no_other_file_of_their_user(run: Path, tmp_path: Path, kind: str) -> None:
    home = tmp_path / "data" / "broker-a"
    home.mkdir(parents=True)
    (profile := tmp_path / "profile").touch()
    planted = home / "out.txt"
    {"link": planted.symlink_to, "second name": planted.hardlink_to, "pipe": lambda _: os.mkfifo(planted)}[kind](
        profile
    )
    with pytest.raises(LocalBrokerError, match=rf"{planted} (is a link|has another name|is neither)"):
        reserve(run, tmp_path / "data", keeps_data=True)


def test_files_of_a_cluster_are_written_without_following_links(tmp_path: Path) -> None:
    (precious := tmp_path / "precious").write_text("important")
    (tmp_path / "ports.json").symlink_to(precious)
    PortAssignments(tmp_path / "ports.json", {}).assign("namesrv", (0,))
    (tmp_path / "broker-a").mkdir()
    (tmp_path / "broker-a" / "logback.xml").symlink_to(precious)
    servers._prepare_home(tmp_path, "broker-a")
    assert precious.read_text() == "important"
    assert not (tmp_path / "ports.json").is_symlink()


@pytest.mark.parametrize("kind", ["theirs", "pipe", "link"])
def test_a_folder_that_was_made_again_by_others_stops_no_start(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """After a cleaner of /tmp has removed it. A pipe would keep all starts waiting."""
    data = tmp_path / f"{TEMPORARY_PREFIX}x"
    record = _left_behind(run, data)
    lock, target = data / "in-use", tmp_path / "elsewhere"
    lock.unlink()
    lock.symlink_to(target) if kind == "link" else os.mkfifo(lock)
    if kind == "theirs":
        users.give_away(monkeypatch, data)
    if kind == "theirs" and not users.IS_ROOT:  # so is the record
        monkeypatch.setattr(folders, "foreign_file", lambda path, root_may_own=True: path if path == data else None)
    monkeypatch.setattr(workspace, "_check_data_folder", lambda _: None)
    reserve(run, None, keeps_data=False).release(delete=True)
    assert (data.exists(), target.exists()) == (True, False)
    assert record.exists() == (kind != "theirs")


@pytest.mark.parametrize("look", ["foreign_file", "foreign_file_in", "revoke_write", "revoke_write_all"])
@pytest.mark.parametrize("kind", ["link", "file", "folder"])
def test_nothing_is_planted_while_a_data_folder_is_checked(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, look: str
) -> None:
    """Others may have had folders below it that anyone may change. They try each time this process looks at something. The
    first look finds no such folder here, because others have opened it later.
    """
    home = tmp_path / "data" / "namesrv" / "store"
    home.mkdir(parents=True)
    for folder, mode in ((home.parent.parent, 0o755), (home.parent, 0o755), (home, 0o777)):
        folder.chmod(mode)
    planted = home / "out.txt"

    def plant(real: object) -> object:
        def first(*given: object) -> object:
            if home.stat().st_mode & 0o002 and not os.path.lexists(planted):
                {"link": lambda: planted.symlink_to(run), "file": planted.touch, "folder": planted.mkdir}[kind]()
                users.give_away(monkeypatch, planted)
            return real(*given)  # type: ignore[operator]

        return first

    monkeypatch.setattr(folders, look, plant(getattr(folders, look)))
    monkeypatch.setattr(folders, "subfolders", lambda _: iter(()))
    with pytest.raises(LocalBrokerError, match=r"is not used: .*belongs to uid"):
        reserve(run, tmp_path / "data", keeps_data=True)


def test_files_of_others_in_a_closed_folder_stay_an_error(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also a file whose mode is not that of an open one."""
    file = tmp_path / "data" / "namesrv" / "out.txt"
    file.parent.mkdir(parents=True)
    file.touch(0o644)
    found = folders.Exposure(file, file.stat(), users.OTHER)
    monkeypatch.setattr(folders, "exposures_in", lambda path, *_: iter([found] if file.parent == path else []))
    with pytest.raises(LocalBrokerError, match=rf"its owner, uid {users.OTHER}, may write to {file}"):
        reserve(run, tmp_path / "data", keeps_data=True)


def test_other_files_in_a_data_folder_keep_mode_and_owner(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    results = tmp_path / "project" / "results"
    results.mkdir(parents=True)
    (results / "shared.csv").touch()
    (results / "theirs.csv").touch()
    results.chmod(0o775)
    (results / "shared.csv").chmod(0o664)
    if users.IS_ROOT:
        users.give_away(monkeypatch, results / "theirs.csv")
    reserve(run, tmp_path / "project", keeps_data=True).release(delete=False)
    modes = [stat.S_IMODE(path.stat().st_mode) for path in (results, results / "shared.csv")]
    assert modes == [0o775, 0o664]


@pytest.fixture
def any_mode() -> Iterator[None]:
    before = os.umask(0)
    yield
    os.umask(before)


@pytest.mark.usefixtures("any_mode")
def test_records_and_locks_are_private_whatever_the_umask_is(run: Path, tmp_path: Path) -> None:
    (run / "lock").touch(0o666)  # of an older version
    taken = reserve(run, tmp_path / "data", keeps_data=True)
    files = [run / "lock", *run.glob("*.json"), tmp_path / "data" / "in-use"]
    taken.release(delete=False)
    assert len(files) == 3
    assert {stat.S_IMODE(path.stat().st_mode) for path in (run / "lock", tmp_path / "data" / "in-use")} == {0o600}


@pytest.mark.usefixtures("any_mode")
def test_a_record_is_private_while_its_process_lives(run: Path) -> None:
    taken = reserve(run, None, keeps_data=False)
    mode = stat.S_IMODE(taken._record_file.stat().st_mode)
    taken.release(delete=True)
    assert mode == 0o600


def test_a_record_that_others_could_have_written_is_not_believed(
    run: Path, tmp_path: Path, children: list[subprocess.Popen[bytes]]
) -> None:
    """It could name any folder and process of this user. An older version gave records the mode of the umask."""
    data = tmp_path / f"{TEMPORARY_PREFIX}mine"
    child = _sleeper(children, f"{DATA_FLAG}{data}")
    record = _left_behind(run, data)
    record.chmod(0o666)
    reserve(run, None, keeps_data=False).release(delete=True)
    assert (child.poll(), data.exists(), record.exists()) == (None, True, False)


def test_a_folder_that_no_cluster_has_reserved_is_not_deleted(run: Path, tmp_path: Path) -> None:
    """Such as a checkout, whose name begins like that of a temporary folder."""
    data = tmp_path / f"{TEMPORARY_PREFIX}main"
    _left_behind(run, data)
    (data / "in-use").unlink()
    reserve(run, None, keeps_data=False).release(delete=True)
    assert (data / "store").exists()


@pytest.mark.usefixtures("any_mode")
def test_what_servers_write_is_private_whatever_the_umask_is(tmp_path: Path) -> None:
    script = f"mkdir {tmp_path}/made; touch {tmp_path}/file"
    processes.spawn(["/bin/sh", "-c", script], tmp_path / "out.txt").wait()
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in tmp_path.iterdir()}
    assert modes == {"made": 0o700, "file": 0o600, "out.txt": 0o600}


def test_the_output_of_a_server_follows_no_link(tmp_path: Path) -> None:
    (precious := tmp_path / "precious").write_text("important")
    (tmp_path / "out.txt").symlink_to(precious)
    with pytest.raises(OSError, match="it is a link"):
        processes.spawn(["/bin/sh", "-c", "echo printed"], tmp_path / "out.txt")
    assert precious.read_text() == "important"


@pytest.mark.usefixtures("any_mode")
def test_the_first_file_of_a_store_is_private(tmp_path: Path) -> None:
    servers._write_timer_checkpoint(tmp_path / "store")
    made = [path.stat().st_mode & 0o077 for path in (tmp_path / "store").rglob("*")]
    assert made == [0, 0]
