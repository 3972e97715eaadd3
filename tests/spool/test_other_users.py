"""Spools belong to their user: they are private, and a task sends nothing that another user has put beside them."""

from __future__ import annotations

import contextlib
import io
import os
import stat
import subprocess
import sys
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from rocketmq_spark import Producer, options, session
from rocketmq_spark.base import folders, process
from rocketmq_spark.base.tls_files import ReloadedValue
from rocketmq_spark.cli.command import app
from rocketmq_spark.cli.spool import _collecting_errors
from rocketmq_spark.client.credentials import RotatingCredentials
from rocketmq_spark.delay.node import NodeSettings, open_node
from rocketmq_spark.errors import OptionError, SpoolError
from rocketmq_spark.model import MessageQueue, SendRequest, SpooledSend
from rocketmq_spark.producer.settings import ProducerSettings
from rocketmq_spark.session.spools import (
    _adoptable_spools,
    adopt_records,
    claim_store,
    preload,
    spools_in,
    worker_spool,
)
from rocketmq_spark.spool import owner_rights
from rocketmq_spark.spool import store as store_module
from rocketmq_spark.spool.database import Database, is_in_use
from rocketmq_spark.spool.files import copy_instruction
from rocketmq_spark.spool.owner_reader import _write_entries
from rocketmq_spark.spool.owner_rights import become_owner
from rocketmq_spark.spool.records import TOTALS, Totals
from rocketmq_spark.spool.recovery import locked
from rocketmq_spark.spool.spool import SpoolReading, record_of
from rocketmq_spark.spool.store import Store
from tests import users
from tests.spool.bench import record
from tests.test_terminal import OnTerminal

NOW_MS = 10**13


@pytest.fixture(autouse=True)
def _first_warnings() -> None:
    for kind in ("open folders", "foreign spools", "replaceable folders"):
        process.entries(kind).clear()


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
    mine = claim_store(base, lambda path: Store(path, any_owner=path.parent == base and path != planted))
    assert mine.path != planted
    for _ in range(2):
        assert adopt_records(base, mine, make, NOW_MS) == 0
    assert len(mine) == 0
    assert files_of(planted) == before
    [warning] = [line for line in caplog.messages if f"the spool in {planted} is left alone" in line]
    assert f"belongs to uid {users.OTHER if users.IS_ROOT else os.getuid()}" in warning
    copy = f"~/{planted.name}-copy"
    assert f"rocketmq-spark spool copy {planted} {copy} && rocketmq-spark spool show {copy} --records" in warning
    mine.close()


def test_a_folder_that_another_user_empties_is_not_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (emptied := tmp_path / "emptied-1").mkdir()
    mine = make(tmp_path / "worker-2")
    users.give_away(monkeypatch, emptied)
    adopt_records(tmp_path, mine, make, NOW_MS)
    assert emptied.exists()
    mine.close()


def test_folder_readable_only_by_another_user_is_skipped(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (base := tmp_path / "base").mkdir()
    base.chmod(0o1777)
    private = fill(base / "worker-1")
    with users.denied(private):
        assert spools_in(base) == [private]
        with contextlib.closing(claim_store(base, make)) as mine:
            assert mine.path != private
        with pytest.raises(SpoolError, match=r"belongs to uid \d+, and uid \d+ may not read it\. Run as its owner"):
            SpoolReading(private)
        with pytest.raises(SpoolError, match=r"belongs to uid \d+"):
            Store(private, any_owner=True)
    assert "skipping" in caplog.text or "is left alone" in caplog.text


def test_a_base_that_only_another_user_may_read_is_named(tmp_path: Path) -> None:
    base = fill(tmp_path / "base" / "worker-1").parent
    with users.denied(base), pytest.raises(SpoolError, match=r"cannot be read by uid \d+.* mkdir -m 1777"):
        claim_store(base, make)


def test_spool_of_another_user_is_opened_only_on_request(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spool = fill(tmp_path / "spool")
    uid = users.give_away(monkeypatch, *everything_in(spool))
    commands = f"spool copy {spool} ~/spool-copy && .* show ~/spool-copy --records, and then: .* send ~/spool-copy$"
    refused = rf"(?s)the spool in {spool} is not used: {spool} belongs to uid {uid}\b.*{commands}"
    with pytest.raises(SpoolError, match=refused):
        make(spool)
    with pytest.raises(SpoolError, match=refused):
        Producer("127.0.0.1:1", "g", on_send_failure="spool", spool_dir=str(spool))
    with contextlib.closing(Store(spool, any_owner=True)) as store:
        assert len(store) == 1


@pytest.mark.parametrize("is_link", [False, True])
def test_what_the_owner_changes_after_the_copy_is_not_sent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_link: bool
) -> None:
    """The commands of the instruction, as a shell runs them, with a name that it must not read as two."""
    theirs = fill(tmp_path / "base" / "worker-1 of mine")
    theirs.parent.chmod(0o755)
    if is_link:
        theirs = theirs.rename(tmp_path / "elsewhere")
        (tmp_path / "base" / "worker-1 of mine").symlink_to(theirs)
    _, copying, showing, sending = copy_instruction(tmp_path / "base" / "worker-1 of mine").split("rocketmq-spark")
    if users.IS_ROOT:  # otherwise the command would not pretend to be another user
        users.root_beside(monkeypatch, theirs)
    (home := tmp_path / "home").mkdir()
    shell = {**os.environ, "HOME": str(home)}
    command = f"{sys.executable} -m rocketmq_spark {copying.rstrip('& ')}"
    subprocess.run(command, shell=True, check=True, env=shell, cwd=Path(__file__).parents[2])
    (copy,) = home.iterdir()
    monkeypatch.setenv("HOME", str(home))
    for command, text in (("show", showing), ("send", sending)):
        name = subprocess.run(f"echo {text.split(',')[0]}", shell=True, check=True, env=shell, capture_output=True)
        assert f"spool {command} {copy}" in name.stdout.decode()
    with contextlib.closing(Store(theirs, any_owner=True)) as store:
        store.add([(record(b"later"), 1)])
    with contextlib.closing(make(copy)) as store:
        assert [work.record.payload for work in store.take(NOW_MS, 10)] == [b"planted"]


def test_an_own_spool_behind_a_link_of_another_user_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (link := tmp_path / "link").symlink_to(fill(tmp_path / "mine"))
    users.give_away(monkeypatch, link)
    with pytest.raises(SpoolError, match=rf"the spool in {link} is not used: {link} belongs to"):
        make(link)


def test_a_delay_node_does_not_use_the_folder_of_another_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (data := tmp_path / "data").mkdir()
    users.give_away(monkeypatch, data)
    monkeypatch.setattr(session, "ensure_topic", lambda *_: None)
    remedy = (
        rf"a new folder in it, .*: {data}/spool\b.* start the node with the copy, .* delay serve --data ~/data-copy$"
    )
    with pytest.raises(SpoolError, match=rf"is not used: {data} belongs .*{remedy}"):
        open_node(NodeSettings(data), name_server="127.0.0.1:1")
    session.close_all()


def test_foreign_files_added_while_spool_is_opened_are_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def plant(path: Path, read_only: bool = False) -> Database:
        (path / "planted").touch()
        users.give_away(monkeypatch, path / "planted")
        return Database(path, read_only)

    (spool := tmp_path / "spool").mkdir()
    monkeypatch.setattr(store_module, "Database", plant)
    with pytest.raises(SpoolError, match="is not used"):
        make(spool)
    Store(spool, any_owner=True).close()  # it was closed again


def test_folder_planted_by_other_user_after_check_is_not_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """RocksDB would open files through links in it before the second check."""
    planted, check = fill(tmp_path / "planted"), store_module.check_owner

    def then_plant(path: Path, *given: Any) -> None:
        check(path, *given)
        if not path.exists():
            planted.rename(path)

    monkeypatch.setattr(store_module, "check_owner", then_plant)
    with contextlib.closing(make(tmp_path / "spool")) as store:
        assert len(store) == 0
    assert planted.exists()


def test_files_of_root_in_a_spool_are_no_reason_to_refuse_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An administrator may have copied them, and could change everything anyway. The same holds for a folder of root."""
    spool = fill(tmp_path / "spool")
    if users.IS_ROOT:
        monkeypatch.setattr(os, "geteuid", lambda: users.OTHER)
    else:
        monkeypatch.setattr(folders, "ROOT_ID", os.getuid())
        monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    with contextlib.closing(make(spool)) as store:
        assert len(store) == 1


@pytest.mark.parametrize("first", [is_in_use, lambda path: fill(path, b"more"), lambda path: locked(path).__enter__()])
def test_others_may_not_take_the_lock_of_an_open_folder(tmp_path: Path, first: Callable[[Path], object]) -> None:
    """Earlier releases made folders that others may read, and whoever may read a file can lock it: then the owner could neither
    open its spool nor adopt it.
    """
    path = fill(tmp_path / "spool")
    path.chmod(0o755)
    assert mode(path / "LOCK") == 0o600
    (path / "LOCK").chmod(0o644)
    used = first(path)
    assert mode(path / "LOCK") == 0o600
    del used


def test_the_lock_of_a_new_spool_is_private_from_the_start(tmp_path: Path) -> None:
    """RocksDB would create it with the mode of the umask."""
    (tmp_path / "spool").mkdir(mode=0o755)
    before = os.umask(0)
    try:
        store = make(tmp_path / "spool")
        assert mode(tmp_path / "spool" / "LOCK") == 0o600
        assert is_in_use(tmp_path / "spool")
        store.close()
    finally:
        os.umask(before)


def test_an_open_folder_keeps_its_mode_and_is_named_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for name, bits in (("read", 0o705), ("write", 0o773), ("closed", 0o700)):
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
def test_sink_warns_of_folder_where_others_may_replace_spools(
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
        f"the spool of this process lies in {base}, in which others (mode 0777) may replace files and folders; "
        "let the owner of the folder run chmod go-w or 1777, or name another folder"
    ] * named


def test_a_producer_uses_no_folder_of_another_user_but_one_in_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As in a container that runs as root with a volume of a user of the host, who could put links there at any time."""
    (volume := tmp_path / "volume").mkdir()
    below = volume / "spool"
    if not users.IS_ROOT:
        below.mkdir()  # by root, who may
    uid = users.give_away(monkeypatch, volume)
    with pytest.raises(SpoolError, match=rf"{volume} belongs to uid {uid}\b.* Name a new folder in it.*: {below}\."):
        Producer("127.0.0.1:1", "g", on_send_failure="spool", spool_dir=str(volume))
    assert not list(volume.glob("*.log"))
    if not users.IS_ROOT:
        monkeypatch.setattr(store_module, "check_owner", lambda *_: None)
    for _ in range(2):
        Producer("127.0.0.1:1", "g", on_send_failure="spool", spool_dir=str(below)).close()
    session.close_all()
    assert (mode(below), below.stat().st_uid) == (0o700 if users.IS_ROOT else mode(below), os.getuid())
    [warning] = [line for line in caplog.messages if f"lies in {volume}, in which" in line]
    assert f"its owner, uid {uid}" in warning


SERVER = ("--name-server", "127.0.0.1:1")
COMMANDS = {"show": (), "export": (), "repair": (), "assign": SERVER, "send": (*SERVER, "--timeout", "5")}


def spool_command(name: str, path: Path) -> Result:
    with users.rights_for_good():
        done = CliRunner().invoke(app, ["spool", name, str(path), *COMMANDS[name]])
        session.close_all()
    return done


@contextlib.contextmanager
def lent(path: Path) -> Iterator[None]:
    with users.rights_for_good():
        become_owner(path)
        yield


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("kind", ["link", "pipe", "other name"])
def test_commands_open_no_spool_that_leads_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, command: str
) -> None:
    """Otherwise another user could have RocksDB, or a repair, read and write other files with the rights of root."""
    spool, mine, good = fill(tmp_path / "base" / "worker-1"), tmp_path / "mine", fill(tmp_path / "base" / "worker-2")
    users.root_beside(monkeypatch, spool)
    mine.write_text("important")
    entry = spool / "000099.sst"
    make_entry = {"link": entry.symlink_to, "pipe": lambda _: os.mkfifo(entry), "other name": entry.hardlink_to}
    make_entry[kind](mine)
    (spool / "CURRENT").unlink()
    before = sorted(spool.rglob("*"))
    done = spool_command(command, spool.parent)
    assert done.exit_code == 1
    assert f"the spool in {spool} is not used: {entry} " in done.stderr
    assert str(good) in done.stdout, "the others are used"
    assert (mine.read_text(), sorted(spool.rglob("*"))) == ("important", before)


@pytest.mark.parametrize("command", [*COMMANDS, "copy"])
@pytest.mark.parametrize("kind", ["folder", "link"])
def test_only_root_and_the_owner_open_a_spool(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, command: str
) -> None:
    """RocksDB, even to read, truncates a file of the folder, which may be a link to a file of the user of the command."""
    spool = fill(tmp_path / "spool")
    users.let_in(spool)
    users.of_root(monkeypatch, os.getuid() + 1)
    if kind == "folder":
        monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 2)
        other = os.getuid()
    else:
        (link := tmp_path / "link").symlink_to(spool)
        spool, other = link, users.give_away(monkeypatch, link)
        if not users.IS_ROOT:
            pytest.skip("a link of another user")
    before = {file: file.stat().st_mtime_ns for file in everything_in(spool.resolve())}
    if command == "copy":
        with pytest.raises(SpoolError) as refused:
            _write_entries(spool, io.BytesIO())
        error = str(refused.value)
    else:
        done = spool_command(command, spool)
        assert done.exit_code == 1
        error = done.stderr
    assert f"the spool in {spool} is not used: {spool} belongs to uid {other}" in error
    assert "Run the command as root or as that user" in error
    assert {file: file.stat().st_mtime_ns for file in everything_in(spool.resolve())} == before


def test_a_link_of_another_user_on_the_way_is_no_mere_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It leads to a folder of this user during the check, and to another one when RocksDB opens the spool."""
    fill(tmp_path / "mine" / "spool")
    (link := tmp_path / "link").symlink_to(tmp_path / "mine")
    users.of_root(monkeypatch, os.getuid() + 1)
    found = folders.Exposure(link, link.lstat(), users.OTHER)
    monkeypatch.setattr(folders, "exposures", lambda *_: iter([found]))
    with pytest.raises(SpoolError, match=rf"its owner, uid {users.OTHER}, may change {link}"), lent(link / "spool"):
        pass


def is_of(path: Path, uid: int) -> folders.Exposure:
    status = list(path.lstat())
    status[4] = uid
    return folders.Exposure(path, os.stat_result(status), uid)


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_follow_no_link_of_another_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str) -> None:
    """Its owner may change it between a check and the opening."""
    mine, link = fill(tmp_path / "mine"), tmp_path / "base" / "worker-1"
    link.parent.mkdir()
    link.symlink_to(mine)
    if users.IS_ROOT:
        users.give_away(monkeypatch, link)
    else:
        users.of_root(monkeypatch, os.getuid())
        monkeypatch.setattr(folders, "exposures", lambda path, owner=0: iter([is_of(path, users.OTHER)]))
    done = spool_command(command, link.parent)
    assert done.exit_code == 1
    assert f"its owner, uid {users.OTHER}, may change {link}. Use a folder for the spool" in done.stderr


def owners(monkeypatch: pytest.MonkeyPatch, uids: dict[Path, int]) -> None:
    """These folders are those of root and of users with these numbers."""
    mine = os.getuid()
    users.root_beside(monkeypatch, *(path for path, uid in uids.items() if uid))
    if users.IS_ROOT:
        for path, uid in uids.items():
            for each in everything_in(path):
                os.chown(each, uid, uid)
        return

    def owner(path: Path) -> os.stat_result:
        status = list(path.stat())
        status[4] = {0: folders.ROOT_ID, users.OTHER: mine}.get(uids[path], uids[path])
        return os.stat_result(status)

    monkeypatch.setattr(owner_rights, "_owner_uid", owner)
    monkeypatch.setattr(folders, "exposures", lambda *_: iter([]))
    monkeypatch.setattr(folders, "exposures_in", lambda *_: iter([]))


@pytest.mark.parametrize("command", COMMANDS)
def test_root_uses_its_own_spools_then_those_of_one_other_user(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    """Root takes the rights of the first other owner for good, so that what stays open of a spool has no more than these."""
    (base := tmp_path / "base").mkdir()
    base.chmod(0o1777)
    theirs, further, own, more = (fill(base / f"worker-{name}") for name in ("1-of-one", "2-of-another", "3", "4"))
    owners(monkeypatch, {theirs: users.OTHER, further: users.OTHER + 5, own: 0, more: users.OTHER})
    used: list[tuple[Path, bool]] = []
    real = Database._open_rocks

    def opened(db: Database, *given: bool) -> object:
        used.append((db.path, folders.has_own_rights()))
        return real(db, *given)

    monkeypatch.setattr(Database, "_open_rocks", opened)
    done = spool_command(command, base)
    assert done.exit_code == 1
    assert list(dict.fromkeys(used)) == [(own, True), (theirs, False), (more, False)]
    assert f"the spool in {further} is not used: it belongs to uid {users.OTHER + 5}, and" in done.stderr
    assert f"Run the command again with that folder: {further}" in done.stderr


def test_an_error_of_one_spool_keeps_nothing_of_it_open() -> None:
    """Frames of the error would keep a database to the end of the command, as ``failed`` keeps the error."""

    class Opened:
        pass

    def fail(opened: Opened) -> None:
        try:
            raise ValueError("first")
        except ValueError as e:
            raise OverflowError("second") from e

    failed: list[Exception] = []
    kept = Opened()
    gone = weakref.ref(kept)
    with _collecting_errors(failed):
        fail(kept)
    del kept
    assert gone() is None
    (error,) = failed
    assert f", {__file__}:" in error.__notes__[0]


def test_totals_that_no_store_has_are_counted_again(tmp_path: Path) -> None:
    spool = fill(tmp_path / "worker-1")
    with contextlib.closing(Database(spool)) as db:
        db.write([(TOTALS, Totals(depth=2**63).encode())])
    done = spool_command("show", spool)
    assert f"{spool} is damaged" in done.stderr
    with contextlib.closing(make(spool)) as store:
        assert (len(store), store.damage_count) == (1, 1)
    assert "damaged" not in spool_command("show", spool).stderr


@pytest.mark.parametrize("command", ["assign", "send"])
def test_commands_keep_the_owner_of_another_users_spool(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    """The record has an unknown kind, so nothing is sent."""
    users.root_beside(monkeypatch, fill(tmp_path / "worker-1"))
    owners = {path.stat().st_uid for path in everything_in(tmp_path / "worker-1")}
    done = spool_command("assign", tmp_path)
    if command == "send":
        done = spool_command("send", tmp_path)
        assert "is not used" not in done.stderr
        assert "1 dead" in done.stdout
    assert done.exit_code == (command == "send")
    assert {path.stat().st_uid for path in everything_in(tmp_path / "worker-1")} == owners
    assert folders.has_own_rights()


def test_root_has_only_rights_of_owner_while_spool_is_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A link that appears while RocksDB works there gets no more than its owner has."""
    spool, secret = fill(tmp_path / "worker-1"), tmp_path / "secret"
    secret.write_text("important")
    secret.chmod(0o600)
    owner = users.root_beside(monkeypatch, spool)
    with lent(spool):
        assert os.geteuid() == owner
        (spool / "000099.dbtmp").symlink_to(secret)
        if users.IS_ROOT:
            with pytest.raises(PermissionError):
                (spool / "000099.dbtmp").write_text("identity")
    assert os.geteuid() == os.getuid()


def test_spool_its_owner_cannot_reach_is_refused_with_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spool = fill(tmp_path / "rescue" / "worker-1")
    uid = users.root_beside(monkeypatch, spool)
    monkeypatch.setattr(owner_rights.folders, "is_readable_or_missing", lambda _: False)
    with (
        pytest.raises(
            SpoolError,
            match=rf"with the rights of its owner, uid {uid}\b.* run, not root: chmod u\+rwx {spool}\.",
        ),
        lent(spool),
    ):
        pass
    assert folders.has_own_rights()


def test_a_spool_that_two_users_may_change_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spool = fill(tmp_path / "base" / "worker-1")
    uid = users.root_beside(monkeypatch, spool)
    other = is_of(spool.parent, uid + 5)
    monkeypatch.setattr(folders, "exposures", lambda path, owner: iter([other] if owner == uid else []))
    refused = rf"its owner, uid {uid + 5}, may change {spool.parent}\. (Let|Use|Move)"
    with pytest.raises(SpoolError, match=refused), lent(spool):
        pass


@pytest.mark.parametrize("whose", ["another user's", "mine"])
@pytest.mark.parametrize("place", [".", "CURRENT", "whole", "..", "../.."])
@pytest.mark.parametrize("bits", [0o777, 0o775, 0o1777])
def test_a_spool_that_others_may_change_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str, bits: int, whose: str
) -> None:
    """Others could put links there at any time, which lead to files of the user whose rights the command has."""
    spool = fill(tmp_path / "above" / "base" / "worker-1")
    (spool / "whole").mkdir(0o700)
    if whose != "mine":
        users.root_beside(monkeypatch, spool)
    else:
        users.of_root(monkeypatch, os.getuid())
    path = Path(os.path.normpath(spool / place))
    with lent(spool):
        pass
    path.chmod(bits)
    monkeypatch.setattr(folders, "_is_private_group", lambda *_: False)
    above = place.startswith("..")
    if above and bits & stat.S_ISVTX:
        with lent(spool):
            return
    who = f"the group {path.stat().st_gid}" if bits == 0o775 else "others"
    change = f"chmod go-w {path}"
    run = "Run" if path.stat().st_uid == os.geteuid() else rf"Let uid {path.stat().st_uid}.* run, not root"
    refused = rf"{who} \(mode {bits:04o}\) may change {path}\. {run}: {change}"
    with pytest.raises(SpoolError, match=refused), lent(spool):
        pass
    subprocess.run(change.split(), check=True)
    with lent(spool):
        pass


def test_parent_folder_writable_by_others_warns_non_root_users(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """An ``emptyDir`` of Kubernetes has mode 0777."""
    spool = fill(tmp_path / "base" / "worker-1")
    spool.parent.chmod(0o777)
    users.of_root(monkeypatch, os.getuid() + 1)
    with lent(spool):
        pass
    assert f"the spool lies in {spool.parent}, in which others (mode 0777)" in caplog.text


def test_spool_in_volume_of_root_belongs_to_owner_of_its_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """An ``emptyDir`` of Kubernetes has mode 0777, and only root may change it."""
    spool = fill(tmp_path / "base" / "volume")
    spool.chmod(0o777)
    uid = os.getuid()
    monkeypatch.setattr(folders, "ROOT_ID", uid)
    monkeypatch.setattr(os, "geteuid", lambda: uid + 1)
    monkeypatch.setattr(folders, "exposures", lambda *_: iter([]))
    with lent(spool):
        pass
    assert (
        f"the folder {spool} keeps its mode, with which other users may write whole messages; name a new" in caplog.text
    )
    (spool / "CURRENT").chmod(0o666)
    with pytest.raises(SpoolError, match=r"others \(mode 0666\) may change .*CURRENT"), lent(spool):
        pass


def test_spool_with_files_of_other_users_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spool = fill(tmp_path / "worker-1")
    found = is_of(spool / "CURRENT", users.OTHER)
    if users.IS_ROOT:
        users.give_away(monkeypatch, spool / "CURRENT")
    else:
        monkeypatch.setattr(folders, "exposures_in", lambda *_: iter([found]))
    file = f"{spool}/CURRENT"
    refused = rf"uid {users.OTHER}, may change {file}\. Let uid {users.OTHER}.* remove {file}, not root"
    with pytest.raises(SpoolError, match=refused), lent(spool):
        pass


def test_owner_of_folder_not_its_files_decides_rights_of_root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The owner can empty the folder for the moment of a check, or leave only files of root there."""
    (spool := tmp_path / "worker-1").mkdir()
    uid = users.root_beside(monkeypatch, spool)
    with lent(spool):
        assert os.geteuid() == uid
        assert not folders.has_own_rights()
    if users.IS_ROOT:
        fill(tmp_path / "mine").rename(spool / "whole")
        with lent(spool):
            assert os.geteuid() == uid


def test_a_spool_that_has_gone_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(SpoolError, match="cannot be opened: No such file"), lent(tmp_path / "worker-1"):
        pass


SCRIPT = """
import atexit, os, sys
from pathlib import Path
import pytest
from rocketmq_spark.cli.command import app
from rocketmq_spark.cli.spool import _collecting_errors
from tests import users
users.root_beside(pytest.MonkeyPatch(), Path(sys.argv[1]))
late = []
def outside(path):
    return not isinstance(path, int) and not os.fspath(path).startswith(sys.argv[1])
def watch(event, details):
    if not users.folders.has_own_rights() and (event == "import" or event == "open" and outside(details[0])):
        late.append((event, details[0]))
sys.addaudithook(watch)
@atexit.register
def last():
    real = ({*os.getresuid()}, {*os.getresgid(), *os.getgroups()})
    wanted = ({users.OTHER}, {65534}) if users.IS_ROOT else real
    if users.folders.has_own_rights() or real != wanted or os.geteuid() == users.folders.ROOT_ID:
        late.append(("rights", real))
    print("late:", *late, file=sys.stderr)
app(["spool", sys.argv[2], *sys.argv[1:2], *sys.argv[3:]])
"""


@pytest.mark.parametrize("command", COMMANDS)
def test_root_needs_no_other_file_while_a_spool_is_open(tmp_path: Path, command: str) -> None:
    """The owner may not be able to read the package, a certificate or keys."""
    spool, given = tmp_path / "worker-1", COMMANDS[command]
    if command == "send":
        (keys := tmp_path / "keys").write_text("accessKey=a\nsecretKey=12345678")
        keys.chmod(0o600)
        given = (*given, "-o", f"credentialsFile={keys}", "--name-server", "localhost:1")
    send = SpooledSend("t", SendRequest("g", b"x"), MessageQueue("t", "a", 0), ("id",))
    with contextlib.closing(make(spool)) as store:
        store.add([(record_of(send, NOW_MS), 1)])
    users.let_in(spool)
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(spool), command, *given],
        cwd=Path(__file__).parents[2], capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == (command == "send"), done.stderr
    assert done.stderr.splitlines()[-1] == "late:", done.stderr
    assert str(spool) in done.stdout


OPENED = """
import os, sys
from pathlib import Path
import pytest
from rocketmq_spark.cli.command import app
from rocketmq_spark.spool.database import Database
from tests import users
spool = Path(sys.argv[1])
users.root_beside(pytest.MonkeyPatch(), spool)
real = Database._open_rocks
def opened(*given):
    try:
        os.close(os.open("/dev/tty", os.O_RDWR))
        print("has a terminal")
    except OSError as e:
        print("opened in", os.getcwd(), e.strerror)
    return real(*given)
Database._open_rocks = opened
os.chdir(spool.parent)
app(["spool", sys.argv[2], spool.name, *sys.argv[3:]])
"""


@pytest.mark.parametrize("command", COMMANDS)
def test_links_lead_neither_to_terminal_nor_current_folder(tmp_path: Path, command: str) -> None:
    """``/dev/tty`` and ``/proc/self/cwd/secret``. The command leads the session, as in a container, and FOLDER is relative."""
    shell = OnTerminal(sys.executable, "-c", OPENED, str(fill(tmp_path / "worker-1")), command, *COMMANDS[command])
    assert shell.end() == (command == "send"), shell.text
    assert "opened in / No such device or address" in shell.text
    assert "has a terminal" not in shell.text
    assert str(tmp_path / "worker-1") in shell.text


def test_files_readable_by_root_are_read_before_opening_spools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given = {"nameServer": "127.0.0.1:1", "tls": "true", "tlsCaFile": str(tmp_path / "missing.pem")}
    parsed = options.parse(given).for_role("producer")
    (spool := tmp_path / "worker-1").mkdir()
    preload(parsed, [spool])
    users.root_beside(monkeypatch, spool)
    with pytest.raises(OptionError, match="the TLS files cannot be used"):
        preload(parsed, [spool])
    session.close_all()


def test_files_that_only_the_own_user_may_read_stay_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    """While root has the rights of the owner of a spool: no warning, and no other keys."""
    loaded = iter(("first", "second", "third", "fourth"))
    files, keys = ReloadedValue(["missing"], lambda: next(loaded)), RotatingCredentials(lambda: next(loaded), -1.0)  # type: ignore
    assert (files.get(), keys.current()) == ("first", "second")
    files._loaded_value = "changed", "first"
    monkeypatch.setattr(folders, "_borrowed_uids", [users.OTHER])
    assert (files.get(), keys.current()) == ("first", "second")
    monkeypatch.undo()
    assert (files.get(), keys.current()) == ("third", "fourth")


def test_a_repair_copies_no_file_to_which_a_link_leads(tmp_path: Path) -> None:
    spool = fill(tmp_path / "spool")
    (spool / "CURRENT").unlink()
    (tmp_path / "secret").write_text("important")
    (spool / "000099.sst").symlink_to(tmp_path / "secret")
    with pytest.raises(SpoolError, match=r"it is a link: .*000099\.sst"):
        make(spool)
    files = [path for path in spool.rglob("*") if path.is_file() and not path.is_symlink()]
    assert not [path for path in files if b"important" in path.read_bytes()]


@pytest.mark.parametrize("name", ["worker-0-evil", "CURRENT", "whole", "emptied-0", "worker-0-evil/CURRENT"])
def test_links_planted_in_shared_folder_stop_no_other_user(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Such as a link to a folder that nobody else may read; only its owner and root could remove it."""
    (base := tmp_path / "base").mkdir()
    (private := tmp_path / "private").mkdir(0o700)
    base.chmod(0o1777)
    (planted := base / name).parent.mkdir(mode=0o755, exist_ok=True)
    planted.symlink_to(private / "x")
    if users.IS_ROOT:
        users.give_away(monkeypatch, planted, *{planted.parent} - {base})
    with users.denied(private):
        left = fill(base / "worker-1-of-this-user")
        with contextlib.closing(claim_store(base, make)) as mine:
            assert mine.path == left
            fill(base / "worker-2-of-this-user")
            assert adopt_records(base, mine, make, NOW_MS) == 1
            assert len(mine) == 2
        assert left in spools_in(base)


def test_folders_of_another_user_cost_one_look_and_one_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """That user may have made a million of them, each with a million files."""
    (base := tmp_path / "base").mkdir()
    planted = [fill(base / f"worker-{n}") for n in range(3)]
    users.give_away(monkeypatch, *planted)
    looked: list[object] = []
    for verb in ("listdir", "scandir", "open"):
        real = getattr(os, verb)
        monkeypatch.setattr(os, verb, lambda *given, real=real, **how: looked.append(given[0]) or real(*given, **how))
    for _ in range(2):
        assert _adoptable_spools(base) == []
    assert not [place for place in looked if str(place).startswith(str(base / "worker"))]
    (warning,) = caplog.messages
    assert f"the spool in {planted[0]} is left alone, as are 2 more of that user in this folder: " in warning


@pytest.mark.parametrize("bits", [0o777, 0o1777])
def test_sink_ignores_spool_folder_writable_by_others(
    tmp_path: Path, bits: int, caplog: pytest.LogCaptureFixture
) -> None:
    base = fill(tmp_path / "base")
    base.chmod(bits)
    with contextlib.closing(claim_store(base, make)) as mine:
        assert mine.path != base
        assert adopt_records(base, mine, make, NOW_MS) == 0
    (warning,) = [line for line in caplog.messages if "left alone" in line]
    assert f"the spool in {base} is left alone: {base}, in which others (mode {bits:04o}) may replace" in warning
    base.chmod(0o700)
    with contextlib.closing(claim_store(base, make)) as mine:
        assert mine.path == base
