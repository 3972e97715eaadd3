from __future__ import annotations

import json
import os
import signal
import stat
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rocketmq_spark.base import process
from rocketmq_spark.consumer import offsets
from rocketmq_spark.consumer.member_state import MemberState
from rocketmq_spark.consumer.offsets import FileOffsets, LocalOffsets, offsets_path
from rocketmq_spark.consumer.process_queue import Thresholds
from rocketmq_spark.errors import OffsetError, OptionError
from tests import users
from tests.queues import q
from tests.strategies import queues

A, B = q("a:0"), q("b:7", "U")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return offsets_path(tmp_path, "host@DEFAULT", "g", ("ns:9876",))


def test_what_is_stored_is_there_after_a_restart_and_readable(path: Path) -> None:
    assert path.parts[-4:] == ("host@DEFAULT", "g", "ns:9876", "offsets.json")
    assert LocalOffsets(path).load() == {}
    LocalOffsets(path).store({B: 2, A: 1})
    assert LocalOffsets(path).load() == {A: 1, B: 2}
    assert path.read_text() == '{"topics":{"T":{"a":{"0":1}},"U":{"b":{"7":2}}},"v":1}'


@given(st.dictionaries(queues, st.integers(0, (1 << 63) - 1), max_size=9))
def test_any_queues_come_back(tmp_path_factory: pytest.TempPathFactory, offsets: dict[object, int]) -> None:
    store = LocalOffsets(tmp_path_factory.mktemp("offsets") / "offsets.json")
    store.store(offsets)
    assert store.load() == offsets


@pytest.mark.parametrize(
    "damage", ["", "[" * 100_000, '{"topics":{"T":{"a":{"0":1', "[]", '{"topics":{"T":{"a":{"0":-1}}}}', '{"v":1}']
)
def test_damaged_offset_file_yields_to_backup_and_is_never_one(path: Path, damage: str) -> None:
    store = LocalOffsets(path)
    store.store({A: 1})
    store.store({A: 2})
    path.write_text(damage)
    assert store.load() == {A: 1}
    store.store({A: 3})
    path.write_text(damage)
    assert store.load() == {A: 1}


def test_damaged_offset_file_and_backup_are_an_error(path: Path) -> None:
    store = LocalOffsets(path)
    store.store({A: 1})
    store.store({A: 2})
    path.write_text("nonsense")
    backup = path.with_name("offsets.json.bak")
    backup.write_text(json.dumps({"topics": 1}))
    with pytest.raises(OffsetError) as raised:
        store.load()
    assert str(path) in str(raised.value)
    assert str(backup) in str(raised.value)
    assert "start without offsets" in str(raised.value)


def test_failed_removal_of_offsets_restores_no_older_offset(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, real, left = LocalOffsets(path), os.unlink, [1]
    store.store({A: 1})
    store.store({A: 2})

    def dies(name: object, **how: object) -> None:
        left[0] -= 1
        if left[0] < 0:
            raise OSError("read-only")
        real(name, **how)

    monkeypatch.setattr(os, "unlink", dies)
    with pytest.raises(OffsetError, match=r"cannot be removed from .*read-only"):
        store.remove()
    assert store.load() == {A: 2}
    left[0] = 2
    store.remove()
    assert store.load() == {}


def test_a_damaged_only_file_is_no_empty_one(path: Path) -> None:
    path.parent.mkdir(parents=True)
    path.write_text("nonsense")
    with pytest.raises(OffsetError, match="cannot be read"):
        LocalOffsets(path).load()


def test_two_processes_that_store_at_once_mix_nothing(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, other, real = LocalOffsets(path), LocalOffsets(path), os.fsync
    store.store({A: 0})
    turns = [lambda: other.store({A: 2, B: 2})]

    def beside(descriptor: int) -> None:
        if turns:
            turns.pop()()  # while the first one has written, and not replaced anything yet
        real(descriptor)

    monkeypatch.setattr(os, "fsync", beside)
    store.store({A: 1})
    assert store.load() == {A: 1}
    assert sorted(each.name for each in path.parent.iterdir()) == ["offsets.json", "offsets.json.bak"]
    path.unlink()
    assert store.load() in ({A: 0}, {A: 2, B: 2})


def test_a_process_that_dies_while_it_writes_leaves_the_old_file(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = LocalOffsets(path)
    store.store({A: 1})

    def dies(descriptor: int) -> None:
        raise OSError("the disk is full")

    monkeypatch.setattr(os, "fsync", dies)
    with pytest.raises(OffsetError, match=r"cannot be stored in .*the disk is full"):
        store.store({A: 2})
    assert store.load() == {A: 1}


def test_what_is_stored_has_its_name_after_a_power_cut(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its folder is synced behind the file that was renamed in it."""
    store, real, synced = LocalOffsets(path), os.fsync, list[tuple[bool, int]]()
    store.store({A: 1})

    def noted(descriptor: int) -> None:
        synced.append((os.fstat(descriptor).st_ino == path.parent.stat().st_ino, path.stat().st_ino))
        real(descriptor)

    monkeypatch.setattr(os, "fsync", noted)
    store.store({A: 2})
    assert synced[-1] == (True, path.stat().st_ino)


def test_a_file_has_one_owner_in_a_process_under_any_name(path: Path, tmp_path: Path) -> None:
    """Of two the slower one would go on where the faster one was, and messages between would be lost."""
    one = LocalOffsets(path)
    one.lock()
    one.lock()
    (tmp_path / "link").symlink_to(path.parent)
    for other in (path, tmp_path / "link" / path.name):
        with pytest.raises(OptionError, match="localOffsetsDir"):
            LocalOffsets(other).lock()
    other = LocalOffsets(path.parent.with_name("another") / path.name)
    other.lock()
    other.unlock()
    one.unlock()
    one.unlock()
    LocalOffsets(path).lock()


HOLDER = """
import sys
from pathlib import Path
from rocketmq_spark.consumer.offsets import LocalOffsets
one = LocalOffsets(Path(sys.argv[1]))
one.lock()
print("held", flush=True)
sys.stdin.read()
"""


def test_new_folders_and_files_of_offsets_are_private(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        path = offsets_path(tmp_path / "new", "host@DEFAULT", "g", ("ns:9876",))
        LocalOffsets(path).lock()
        LocalOffsets(path).store({A: 1})
    finally:
        os.umask(before)
    assert {stat.S_IMODE(folder.stat().st_mode) for folder in path.parents[:4]} == {0o700}


def test_offset_file_is_private_whatever_the_umask(path: Path) -> None:
    """Others could make the consumer skip messages. An older version made folders with the mode of the umask."""
    path.parent.mkdir(parents=True, mode=0o755)
    before = os.umask(0)
    try:
        LocalOffsets(path).store({A: 5})
    finally:
        os.umask(before)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_others_may_not_take_the_lock(path: Path) -> None:
    """An older version made it with the mode of the umask, and whoever may read a file can lock it."""
    path.parent.mkdir(parents=True, mode=0o755)
    (lock := path.with_name("offsets.json.lock")).touch()
    lock.chmod(0o644)
    (offsets := LocalOffsets(path)).lock()
    offsets.unlock()
    assert stat.S_IMODE(lock.stat().st_mode) == 0o600


@pytest.mark.parametrize("place", ["offsets.json", "offsets.json.bak", ".", ".."])
def test_offsets_of_another_user_are_not_used(path: Path, monkeypatch: pytest.MonkeyPatch, place: str) -> None:
    """They could skip messages of this one."""
    LocalOffsets(path).store({A: 1})
    LocalOffsets(path).store({A: 2})
    uid = users.give_away(monkeypatch, path.parent / place)
    with pytest.raises(
        OffsetError, match=rf"are not used: .* belongs to uid {uid}, .* Choose another 'localOffsetsDir'"
    ):
        LocalOffsets(path).load()


@pytest.mark.parametrize("planted", ["", "earlier", "earlier/folder"])
def test_nothing_is_created_where_a_link_of_another_user_leads(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, planted: str
) -> None:
    """Such as /etc/nologin, by a consumer of root."""
    file, target = path.parents[1] / path.name if planted else path, tmp_path / "elsewhere"
    file.parent.mkdir(parents=True)
    if planted == "earlier/folder":
        users.give_away(monkeypatch, file.parents[1])
    else:
        (lock := file.with_name("offsets.json.lock")).symlink_to(target)
        users.give_away(monkeypatch, lock)
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(OffsetError, match=r"are not used: .* belongs to uid"):
        FileOffsets(LocalOffsets(path), MemberState(Thresholds(40, 1 << 20, 400)), lambda *_: 0).open()
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("above", [0, 1, 2, 3], ids=["cluster", "group", "client", "localOffsetsDir"])
def test_offsets_in_a_folder_of_another_user_are_not_used(
    path: Path, monkeypatch: pytest.MonkeyPatch, above: int
) -> None:
    """That user could rename the folders below, so that the consumer skips messages."""
    LocalOffsets(path).store({A: 1})
    users.give_away(monkeypatch, path.parents[above])
    with pytest.raises(OffsetError, match=r"are not used: .* belongs to uid"):
        LocalOffsets(path).load()


@pytest.mark.parametrize("above", [1, 2], ids=["client", "localOffsetsDir"])
def test_earlier_offsets_below_a_folder_of_others_are_not_used(
    path: Path, monkeypatch: pytest.MonkeyPatch, above: int
) -> None:
    earlier = LocalOffsets(path).legacy_file()
    earlier.store({A: 1})
    users.give_away(monkeypatch, path.parents[above + 1])
    with pytest.raises(OffsetError, match=r"are not used: .* belongs to uid"):
        earlier.load()


def test_a_lock_of_another_user_is_not_used(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    LocalOffsets(path).store({A: 1})
    (lock := path.with_name("offsets.json.lock")).touch()
    users.give_away(monkeypatch, lock)
    with pytest.raises(OffsetError, match="are not used"):
        LocalOffsets(path).lock()


@pytest.mark.parametrize("kind", ["link", "pipe"])
def test_a_lock_that_is_no_file_is_not_opened(path: Path, tmp_path: Path, kind: str) -> None:
    path.parent.mkdir(parents=True)
    lock = path.with_name("offsets.json.lock")
    lock.symlink_to(tmp_path / "elsewhere") if kind == "link" else os.mkfifo(lock)
    LocalOffsets(path).lock()
    assert not (tmp_path / "elsewhere").exists()


def test_a_link_of_another_user_leads_to_no_offsets(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    elsewhere = path.parents[1] / "elsewhere.json"
    LocalOffsets(elsewhere).store({A: 1})
    path.parent.mkdir(parents=True)
    path.symlink_to(elsewhere)
    users.give_away(monkeypatch, path)
    with pytest.raises(OffsetError, match="are not used"):
        LocalOffsets(path).load()


def test_offsets_of_another_user_are_not_taken_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    theirs, mine = (offsets_path(tmp_path, "host@DEFAULT", "g", servers) for servers in (("a:1",), ("a:1", "b:1")))
    LocalOffsets(theirs).store({A: 7})
    users.give_away(monkeypatch, theirs.parent, theirs)
    LocalOffsets(mine).adopt_renamed_file()
    assert (theirs.exists(), mine.exists()) == (True, False)
    assert LocalOffsets(mine).other_files() == [theirs]


def test_offset_folder_writable_by_others_is_warned_of_once(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for kind in ("open folders", "replaceable folders"):
        process.entries(kind).clear()
    LocalOffsets(path).store({A: 1})
    path.parent.chmod(0o755)
    path.parents[3].chmod(0o777)
    for _ in range(2):
        LocalOffsets(path).warn_if_shared()
    assert caplog.messages == [
        f"the folder of 'localOffsetsDir' lies in {path.parents[3]}, in which others (mode 0777) may replace files and folders; "
        "let the owner of the folder run chmod go-w or 1777, or name another folder",
        f"the folder {path.parent} keeps its mode, with which other users may read offsets; "
        f"protect it with: chmod 700 {path.parent}",
    ]


def test_offset_file_is_locked_until_the_other_process_ends(path: Path) -> None:
    arguments = [sys.executable, "-c", HOLDER, str(path)]
    with subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "held\n"
        with pytest.raises(OptionError, match=r"offsets\.json"):
            LocalOffsets(path).lock()
        other.kill()
    one = LocalOffsets(path)
    one.lock()
    one.unlock()


def test_where_nothing_can_be_locked_it_goes_on(tmp_path: Path) -> None:
    """What keeps the lock from being made keeps the offsets from being stored, which is said then."""
    (tmp_path / "file").touch()
    one = LocalOffsets(tmp_path / "file" / "g" / "offsets.json")
    one.lock()
    one.unlock()
    with pytest.raises(OffsetError):
        one.store({A: 1})


def test_child_forked_during_a_file_lock_can_lock_another_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    inside, go_on = threading.Event(), threading.Event()
    real = offsets.fcntl.lockf

    def slow(file: int, how: int) -> None:
        inside.set()
        assert go_on.wait(60)
        real(file, how)

    monkeypatch.setattr(offsets.fcntl, "lockf", slow)
    locking = threading.Thread(target=LocalOffsets(tmp_path / "a" / "offsets.json").lock)
    locking.start()
    assert inside.wait(60)
    child = os.fork()
    if not child:
        signal.alarm(30)
        offsets.fcntl.lockf = real
        LocalOffsets(tmp_path / "b" / "offsets.json").lock()
        os._exit(0)
    go_on.set()
    locking.join(60)
    assert os.waitpid(child, 0)[1] == 0
