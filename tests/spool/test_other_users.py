"""Spools belong to their user: they are private, and a task sends nothing that another user has put beside them."""

from __future__ import annotations

import contextlib
import os
import re
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from rocketmq_spark import Producer, options, session
from rocketmq_spark.base import folders, process
from rocketmq_spark.base.tls_files import Reloaded
from rocketmq_spark.cli.command import app
from rocketmq_spark.client.calls import RotatingCredentials
from rocketmq_spark.delay.node import NodeSettings, open_node
from rocketmq_spark.errors import OptionError, SpoolError
from rocketmq_spark.model import MessageQueue, SendRequest, SpooledSend
from rocketmq_spark.producer.settings import ProducerSettings
from rocketmq_spark.session.spools import adopt, claim, prepare, spools, worker_spool
from rocketmq_spark.spool import lending
from rocketmq_spark.spool import store as store_module
from rocketmq_spark.spool.database import Database
from rocketmq_spark.spool.lending import lent
from rocketmq_spark.spool.spool import SpoolReading, record_of
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
    refused = rf"the spool in {spool} is not used: {spool}/\S+ belongs to uid {uid}\b.*show {spool}.*spool send {spool}"
    with pytest.raises(SpoolError, match=refused):
        make(spool)
    with pytest.raises(SpoolError, match=refused):
        Producer("127.0.0.1:1", "g", on_send_failure="spool", spool_dir=str(spool))
    with contextlib.closing(Store(spool, any_owner=True)) as store:
        assert len(store) == 1


def test_an_own_spool_behind_a_link_of_another_user_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (link := tmp_path / "link").symlink_to(fill(tmp_path / "mine"))
    users.give_away(monkeypatch, link)
    monkeypatch.setattr(folders, "foreign_inside", lambda *_: None)
    with pytest.raises(SpoolError, match=rf"the spool in {link} is not used: {link} belongs to"):
        make(link)


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
            users.give_away(monkeypatch, *everything_in(path))
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
        f"the spool of this process lies in {base}, in which others (mode 0777) may replace files and folders; "
        "protect it with chown, and chmod go-w or 1777"
    ] * named


@pytest.mark.parametrize("place", ["spool", "parent"])
def test_an_own_spool_in_a_folder_of_another_user_is_used_with_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, place: str
) -> None:
    """As in a container that runs as root, with a volume that belongs to a user of its host."""
    (spool := tmp_path / "parent" / "spool").mkdir(parents=True)
    theirs = spool if place == "spool" else spool.parent
    uid = users.give_away(monkeypatch, theirs)
    monkeypatch.setattr(folders, "foreign_inside", folders.foreign_inside if users.IS_ROOT else lambda *_: None)
    given = {"on_send_failure": "spool", "spool_dir": str(spool)}
    for _ in range(2):
        Producer("127.0.0.1:1", "g", **given).close()  # type: ignore[arg-type]
    session.close_all()
    [warning] = [line for line in caplog.messages if f"lies in {theirs}, in which" in line]
    assert f"its owner, uid {uid}" in warning


SERVER = ("--name-server", "127.0.0.1:1")
COMMANDS = {"show": (), "export": (), "assign": SERVER, "send": (*SERVER, "--timeout", "5")}


def spool_command(name: str, path: Path) -> Result:
    done = CliRunner().invoke(app, ["spool", name, str(path), *COMMANDS[name]])
    session.close_all()
    return done


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("kind", ["link", "pipe", "other name"])
def test_commands_open_no_spool_that_leads_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, command: str
) -> None:
    """What RocksDB or a repair would read or write there, another user could get at with the rights of root."""
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


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_follow_no_link_of_another_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str) -> None:
    """Its owner may change it between a check and the opening."""
    mine, link = fill(tmp_path / "mine"), tmp_path / "base" / "worker-1"
    link.parent.mkdir()
    link.symlink_to(mine)
    monkeypatch.setattr(folders, "_unmapped", set)
    users.give_away(monkeypatch, link)
    done = spool_command(command, link.parent)
    assert done.exit_code == 1
    if users.IS_ROOT:
        assert f"the link {link} belongs to uid {users.OTHER}" in done.stderr
    assert re.search(r"the link \S+ belongs to uid \d+.*, who may let it lead elsewhere", done.stderr)


@pytest.mark.parametrize("command", ["assign", "send"])
def test_commands_open_a_spool_of_another_user_and_leave_it_his(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    """The record is of an unknown kind, so that nothing is sent."""
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


def test_root_reaches_only_what_the_owner_reaches_while_a_spool_is_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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


def test_a_spool_that_the_owner_does_not_reach_is_refused_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spool = fill(tmp_path / "rescue" / "worker-1")
    uid = users.root_beside(monkeypatch, spool)
    monkeypatch.setattr(lending.folders, "is_readable", lambda _: False)
    with pytest.raises(SpoolError, match=rf"with the rights of its owner, uid {uid}\b.* chown -R root"), lent(spool):
        pass
    assert folders.has_own_rights()


def test_a_spool_that_two_users_may_change_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spool = fill(tmp_path / "base" / "worker-1")
    uid = users.root_beside(monkeypatch, spool)
    ways = folders.exposures
    other = folders.Exposure(spool.parent, os.stat_result((0o40755, 1, 1, 1, uid + 5, 1, 0, 0, 0, 0)), uid + 5)
    monkeypatch.setattr(folders, "exposures", lambda path: [*ways(path), other])
    with pytest.raises(SpoolError, match=r"uid \d+.* and uid \d+.* may change it"), lent(spool):
        pass
    monkeypatch.setattr(folders, "exposures", ways)
    spool.parent.chmod(0o777)
    with pytest.raises(SpoolError, match=rf"lies in {spool.parent}, in which others .*: chmod \+t"), lent(spool):
        pass


def test_root_uses_its_files_in_a_folder_of_another_user_with_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As in a container that runs as root, with a volume that belongs to a user of its host."""
    (spool := tmp_path / "volume").mkdir()
    users.root_beside(monkeypatch, spool)
    monkeypatch.setattr(folders, "foreign_inside", lambda path, but=(): None)
    fill(spool)
    with lent(spool):
        assert folders.has_own_rights()
        assert SpoolReading(spool).totals is not None
    assert f"the spool of this process lies in {spool}, in which its owner, uid" in caplog.text


SCRIPT = """
import os, sys
from pathlib import Path
import pytest
from rocketmq_spark.cli.command import app
from tests import users
users.root_beside(pytest.MonkeyPatch(), Path(sys.argv[1]))
late = []
def outside(path):
    return not isinstance(path, int) and not os.fspath(path).startswith(sys.argv[1])
def watch(event, details):
    if os.geteuid() != os.getuid() and (event == "import" or event == "open" and outside(details[0])):
        late.append((event, details[0]))
sys.addaudithook(watch)
try:
    app(["spool", sys.argv[2], *sys.argv[1:2], *sys.argv[3:]])
finally:
    users.folders.has_own_rights() or late.append("rights")
    print("late:", *late, file=sys.stderr)
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


def test_files_that_root_may_read_are_read_before_spools_are_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = {"nameServer": "127.0.0.1:1", "tls": "true", "tlsCaFile": str(tmp_path / "missing.pem")}
    parsed = options.parse(given).for_role("producer")
    spool = fill(tmp_path / "worker-1")
    prepare(parsed, [spool])
    users.root_beside(monkeypatch, spool)
    with pytest.raises(OptionError, match="the TLS files cannot be used"):
        prepare(parsed, [spool])
    session.close_all()


def test_files_that_only_the_own_user_may_read_stay_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    """While root has the rights of the owner of a spool: no warning, and no other keys."""
    loaded = iter(("first", "second", "third", "fourth"))
    files, keys = Reloaded(["missing"], lambda: next(loaded)), RotatingCredentials(lambda: next(loaded), -1.0)  # type: ignore
    assert (files.get(), keys.current()) == ("first", "second")
    files._loaded = "changed", "first"
    monkeypatch.setattr(folders, "_lent", [users.OTHER])
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
