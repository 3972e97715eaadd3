"""Spools belong to their user: they are private, and a task sends nothing that another user has put beside them."""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner

from rocketmq_spark import Producer, options, session
from rocketmq_spark.base import folders, process
from rocketmq_spark.cli.command import app
from rocketmq_spark.delay.node import NodeSettings, open_node
from rocketmq_spark.errors import SpoolError
from rocketmq_spark.producer.settings import ProducerSettings
from rocketmq_spark.session.spools import adopt, claim, spools, worker_spool
from rocketmq_spark.spool import store as store_module
from rocketmq_spark.spool.database import Database
from rocketmq_spark.spool.records import Done
from rocketmq_spark.spool.spool import SpoolReading
from rocketmq_spark.spool.store import Store
from tests import users
from tests.spool.bench import record

NOW_MS = 10**13


@pytest.fixture(autouse=True)
def _first_warnings() -> None:
    for kind in ("open folders", "foreign spools", "replaceable folders"):
        process.kept(kind).clear()


def make(path: Path) -> Store:
    return Store(path, sync="never")


def fill(path: Path, payload: bytes = b"planted") -> Path:
    store = make(path)
    store.add([(record(payload), 1)])
    store.close()
    return path


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def everything_in(path: Path) -> list[Path]:
    return [path, *path.rglob("*")]


@pytest.mark.parametrize("umask", [0, 0o022])
def test_a_new_spool_and_the_folders_above_it_are_private(tmp_path: Path, umask: int) -> None:
    before = os.umask(umask)
    try:
        fill(tmp_path / "new" / "spools" / "worker-1")
    finally:
        os.umask(before)
    assert {mode(path) for path in (tmp_path / "new").rglob("*") if path.is_dir()} | {mode(tmp_path / "new")} == {0o700}


def test_what_a_repair_keeps_is_private(tmp_path: Path) -> None:
    (tmp_path / "spool").mkdir(0o755)
    fill(tmp_path / "spool")
    (tmp_path / "spool" / "CURRENT").unlink()
    make(tmp_path / "spool").close()
    assert mode(tmp_path / "spool" / "damaged-1") == 0o700


def files_of(path: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in path.iterdir() if file.is_file()}


def a_folder(base: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    users.give_away(monkeypatch, *everything_in(fill(base / "worker-1")))
    return base / "worker-1"


def a_folder_alone(base: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    users.give_away(monkeypatch, fill(base / "worker-1"))
    return base / "worker-1"


def a_file_in_it(base: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    users.give_away(monkeypatch, fill(base / "worker-1") / "CURRENT")
    return base / "worker-1"


def complete_files_in_it(base: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (whole := fill(base / "worker-1") / "whole").mkdir()
    users.give_away(monkeypatch, whole)
    return base / "worker-1"


def a_link_to_it(base: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (base / "worker-1").symlink_to(fill(base.with_name("theirs")))
    users.give_away(monkeypatch, *everything_in(base.with_name("theirs")))
    return base / "worker-1"


def their_link_to_mine(base: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (base / "worker-1").symlink_to(fill(base.with_name("mine")))
    users.give_away(monkeypatch, base / "worker-1")
    return base / "worker-1"


def the_base_itself(base: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    users.give_away(monkeypatch, fill(base))
    return base


def files_in_the_base(base: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    users.give_away(monkeypatch, *fill(base).iterdir())
    return base


@pytest.mark.parametrize(
    "plant",
    [
        a_folder,
        a_folder_alone,
        a_file_in_it,
        complete_files_in_it,
        a_link_to_it,
        their_link_to_mine,
        the_base_itself,
        files_in_the_base,
    ],
)
def test_a_task_takes_over_nothing_of_another_user(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    plant: Callable[[Path, pytest.MonkeyPatch], Path],
) -> None:
    (base := tmp_path / "base").mkdir()
    planted = plant(base, monkeypatch)
    before = files_of(planted)
    mine = claim(base, lambda path: Store(path, any_owner=path.parent == base and path != planted))
    assert mine.path != planted
    for _ in range(2):
        assert adopt(base, mine, make, NOW_MS) == 0
    assert len(mine) == 0
    assert files_of(planted) == before
    [warning] = [line for line in caplog.messages if f"the spool in {planted} is left alone" in line]
    assert f"belongs to uid {users.OTHER if users.IS_ROOT else os.getuid()}" in warning
    assert f"rocketmq-spark spool send {planted}" in warning
    mine.close()


def test_a_folder_that_another_user_empties_is_not_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (emptied := tmp_path / "emptied-1").mkdir()
    mine = make(tmp_path / "worker-2")
    users.give_away(monkeypatch, emptied)
    adopt(tmp_path, mine, make, NOW_MS)
    assert emptied.exists()
    mine.close()


def test_a_folder_that_only_another_user_may_read_is_one_of_a_shared_base(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (base := tmp_path / "base").mkdir()
    base.chmod(0o1777)
    private = fill(base / "worker-1")
    with users.denied(private):
        assert spools(base) == [private]
        with contextlib.closing(claim(base, make)) as mine:
            assert mine.path != private
        with pytest.raises(SpoolError, match=r"belongs to uid \d+, and uid \d+ may not read it\. Run as its owner"):
            SpoolReading(private)
        with pytest.raises(SpoolError, match=r"belongs to uid \d+"):
            Store(private, any_owner=True)
    assert "skipping" in caplog.text or "is left alone" in caplog.text


def test_a_base_that_only_another_user_may_read_is_named(tmp_path: Path) -> None:
    base = fill(tmp_path / "base" / "worker-1").parent
    with users.denied(base), pytest.raises(SpoolError, match=r"cannot be read by uid \d+.* mkdir -m 1777"):
        claim(base, make)


def test_a_spool_of_another_user_is_opened_only_if_that_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spool = fill(tmp_path / "spool")
    uid = users.give_away(monkeypatch, *everything_in(spool))
    refused = rf"the spool in {spool} is not used: {spool} belongs to uid {uid}, and .* 'rocketmq-spark spool send'"
    with pytest.raises(SpoolError, match=refused):
        make(spool)
    with pytest.raises(SpoolError, match=refused):
        Producer("127.0.0.1:1", "g", on_send_failure="spool", spool_dir=str(spool))
    with contextlib.closing(Store(spool, any_owner=True)) as store:
        assert len(store) == 1


def test_a_delay_node_does_not_use_the_folder_of_another_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spool = fill(tmp_path / "data")
    users.give_away(monkeypatch, *everything_in(spool))
    monkeypatch.setattr(session, "ensure_topic", lambda *_: None)
    with pytest.raises(SpoolError, match="is not used"):
        open_node(NodeSettings(spool), name_server="127.0.0.1:1")
    session.close_all()


def test_a_folder_that_is_put_there_while_a_spool_is_created_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    planted = fill(tmp_path / "planted")

    def plant(path: Path, read_only: bool = False) -> Database:
        if not path.exists():
            planted.rename(path)
            users.give_away(monkeypatch, path)
        return Database(path, read_only)

    monkeypatch.setattr(store_module, "Database", plant)
    with pytest.raises(SpoolError, match="is not used"):
        make(tmp_path / "spool")
    with contextlib.closing(Store(tmp_path / "spool", any_owner=True)) as store:
        assert len(store) == 1, "and it was closed again"


def test_files_of_root_in_a_spool_are_no_reason_to_refuse_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An administrator may have copied them, and may do everything anyway. So are spools in a folder that root has made."""
    spool = fill(tmp_path / "spool")
    if users.IS_ROOT:
        monkeypatch.setattr(os, "geteuid", lambda: users.OTHER)
    else:
        monkeypatch.setattr(folders, "ROOT", os.getuid())
        monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    with contextlib.closing(make(spool)) as store:
        assert len(store) == 1


def test_an_open_folder_keeps_its_mode_and_is_named_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for name, bits in (("read", 0o750), ("write", 0o773), ("closed", 0o700)):
        (tmp_path / name).mkdir()
        (tmp_path / name).chmod(bits)
        for _ in range(2):
            fill(tmp_path / name)
        assert mode(tmp_path / name) == bits
    assert [line for line in caplog.messages if "chmod" in line] == [
        f"the folder {tmp_path / name} keeps its mode, with which other users may {name} whole messages; "
        f"protect it with: chmod 700 {tmp_path / name}"
        for name in ("read", "write")
    ]


@pytest.mark.parametrize(("bits", "named"), [(0o777, True), (0o1777, False), (0o755, False)])
def test_a_sinks_folder_in_which_others_may_replace_spools_is_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, bits: int, named: bool
) -> None:
    (base := tmp_path / "base").mkdir()
    base.chmod(bits)
    given = {"nameServer": "127.0.0.1:1", "onSendFailure": "spool", "spoolDir": str(base), "topic": "t"}
    parsed = options.parse(given).for_role("sink")
    for _ in range(2):
        worker_spool(parsed, ProducerSettings.of(parsed))
    session.close_all()
    assert [line for line in caplog.messages if "may replace" in line] == [
        f"option 'spoolDir' is {base}, in which others (mode 0777) may replace the folders of this user; "
        "protect it with chown and chmod 1777"
    ] * named


def test_a_sinks_folder_of_another_user_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    uid = users.give_away(monkeypatch, tmp_path)
    folders.warn_if_replaceable(tmp_path, "spoolDir")
    assert f"in which its owner, uid {uid}, may replace the folders of this user" in caplog.text


@pytest.mark.parametrize("command", ["assign", "send"])
def test_commands_open_a_spool_of_another_user_and_leave_it_his(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    """The record is of an unknown kind, so that nothing is sent."""
    users.give_away(monkeypatch, *everything_in(fill(tmp_path / "worker-1")))
    owners = {path.stat().st_uid for path in everything_in(tmp_path / "worker-1")}
    server = ("--name-server", "127.0.0.1:1")
    done = CliRunner().invoke(app, ["spool", "assign", str(tmp_path), *server])
    if command == "send":
        done = CliRunner().invoke(app, ["spool", "send", str(tmp_path), *server, "--timeout", "5"])
        assert "is not used" not in done.stderr
        assert "1 dead" in done.stdout
    assert done.exit_code == (command == "send")
    assert {path.stat().st_uid for path in everything_in(tmp_path / "worker-1")} == owners
    session.close_all()


def test_root_gives_what_it_makes_in_a_folder_to_the_owner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not the files of root that were there, nor a second name of one: its owner may have linked it into the folder."""
    spool, outside = fill(tmp_path / "spool"), tmp_path / "outside"
    theirs = everything_in(spool)
    (spool / "worker-1").mkdir()
    for path in (outside, spool / "of root", spool / "worker-1" / "file"):
        path.touch()
    if users.IS_ROOT:
        users.give_away(monkeypatch, *theirs)
    else:
        monkeypatch.setattr(folders, "ROOT", os.getuid())
    owner, given, change = spool.stat(), set[int](), os.fchown

    def fchown(file: int, uid: int, gid: int) -> None:
        given.add(os.fstat(file).st_ino)
        assert (uid, gid) == (owner.st_uid, owner.st_gid)
        change(file, uid, gid)

    monkeypatch.setattr(os, "fchown", fchown)
    with folders.owner_kept(spool, ("worker-",)):
        with contextlib.closing(Store(spool, any_owner=True)) as store:
            store.settle([(work, Done()) for work in store.take(NOW_MS, 1)], NOW_MS)
        (spool / "linked").hardlink_to(outside)
        (spool / "link").symlink_to(outside)
        for folder in (spool / "inner", spool / "worker-1" / "inner"):
            folder.mkdir()
            (folder / "file").touch()
    made = {path.relative_to(spool) for path in spool.rglob("*") if path.lstat().st_ino in given}
    assert {Path("CURRENT"), Path("inner"), Path("inner/file")} <= made
    assert not made & {
        Path(name) for name in ("linked", "link", "of root", "worker-1", "worker-1/file", "worker-1/inner")
    }
