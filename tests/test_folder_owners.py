"""Who may write to a folder, or replace what is in it, and files that lead elsewhere."""

from __future__ import annotations

import contextlib
import grp
import os
import pwd
import re
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from rocketmq_spark.base import folders
from rocketmq_spark.base.process import python_call
from tests import users


def status(mode: int, uid: int = 1000, gid: int = 1000) -> os.stat_result:
    return os.stat_result((stat.S_IFDIR | mode, 1, 1, 1, uid, gid, 0, 0, 0, 0))


GROUPS = {1000: "alice", 1001: "bob", 1002: "team-c", 1005: "frank", 100: "users", 104: "tape", 50: "staff"}
MEMBERS = {1001: ["bob", "alice"], 1000: ["alice"]}
USERS = {
    1000: ("alice", 1000),
    1001: ("bob", 1001),
    1002: ("carol", 1002),
    1003: ("dave", 100),
    1005: ("frank", 1005),
    1006: ("grace", 1005),
    104: ("scanner", 65534),
}


@pytest.fixture
def groups(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """This process is alice's, and in the groups users and 2000, the fsGroup of a volume."""
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setattr(os, "getegid", lambda: 1000)
    monkeypatch.setattr(os, "getgroups", lambda: [1000, 100, 2000])
    monkeypatch.setattr(grp, "getgrgid", lambda gid: SimpleNamespace(gr_name=GROUPS[gid], gr_mem=MEMBERS.get(gid, [])))

    def account(uid: int) -> object:
        name, gid = USERS[uid]
        return SimpleNamespace(pw_name=name, pw_uid=uid, pw_gid=gid)

    monkeypatch.setattr(pwd, "getpwuid", account)
    monkeypatch.setattr(pwd, "getpwall", lambda: [account(uid) for uid in USERS])
    folders.uids_by_primary_group.cache_clear()
    yield
    folders.uids_by_primary_group.cache_clear()


@pytest.mark.usefixtures("groups")
@pytest.mark.parametrize(
    ("status", "may"),
    [
        (status(0o755), False),
        (status(0o775), False),  # umask 002 with a private group
        (status(0o777), True),
        (status(0o1777), True),
        (status(0o775, gid=100), True),
        (status(0o775, gid=50), True),
        (status(0o2775, 0, 50), True),
        (status(0o2775, 0, 100), True),  # root's folder of a project, in whose group this process is
        (status(0o775, 1003, 100), True),  # the primary group of many
        (status(0o775, 1001, 1001), True),  # a private group with another member
        (status(0o775, 1002, 1002), False),  # the private group of its owner, by its number
        (status(0o775, 1005, 1005), True),  # the primary group of another account, too, which is not among the members
        (status(0o775, 104, 104), True),  # no group of that user
        (status(0o775, 1009, 100), True),  # nor of one without a name
        (status(0o2775, 0, 2000), False),  # a volume of Kubernetes
        (status(0o2770, 1000, 2000), False),  # and a folder in it, after a restart
        (status(0o2777, 0, 2000), True),
        (status(0o2775, 0, 3000), True),  # no group of this process
        (status(0o775, 0, 0), False),  # g=u, as images for OpenShift have it
    ],
)
def test_only_a_group_that_has_certainly_no_others_is_private(status: os.stat_result, may: bool) -> None:
    assert folders.others_may_write(status) is may


def test_folders_on_the_way_that_others_may_replace_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also those to which links lead, and links of other users themselves."""
    (real := tmp_path / "shared" / "real" / "x").mkdir(parents=True)
    (tmp_path / "link").symlink_to("shared/real")
    assert list(folders.exposures(tmp_path / "link" / "x")) == []
    (tmp_path / "shared").chmod(0o777)
    for path in (real, tmp_path / "link" / "x", tmp_path / "link" / ".." / "real" / "x", real / "missing"):
        [found] = folders.exposures(path)
        assert str(found) == (f"{tmp_path / 'shared'}, in which others (mode 0777) may replace files and folders")
    (tmp_path / "shared").chmod(0o1777)
    assert list(folders.exposures(real)) == []
    [found] = folders.exposures(tmp_path / "shared" / "missing")  # everyone may create it
    assert found.path == tmp_path / "shared"
    uid = users.give_away(monkeypatch, tmp_path / "link")
    found = {way.path: way for way in folders.exposures(tmp_path / "link" / "x")}
    assert f"in which its owner, uid {uid}" in str(found[tmp_path / "link"])
    assert not users.IS_ROOT or len(found) == 1


@pytest.mark.parametrize(
    ("uid", "holder", "is_above", "led", "expected"),
    [
        (None, "mine", True, False, "Run: chmod go-w '.*/a b'$"),
        (None, "mine", True, True, "Let uid 7.* move it, not root, below a folder"),
        (None, "mine", False, True, "Let uid 7.* move it, not root, below a folder"),
        (None, "other", True, False, "Let uid 34567.* run, not root: chmod go-w '.*/a b'$"),
        (
            34567,
            "other",
            True,
            False,
            "Let uid 7.* move it, not root, below a folder that only that user and root may change$",
        ),
        (34567, "other", False, False, "Let uid 34567.* remove '.*/a b', not root$"),
    ],
)
def test_a_remedy_has_nothing_that_others_could_lead_elsewhere(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    uid: int | None,
    holder: str,
    is_above: bool,
    led: bool,
    expected: str,
) -> None:
    (path := tmp_path / "a b").mkdir()
    status = os.stat_result([0o40777, 0, 0, 0, os.geteuid() if holder == "mine" else users.OTHER, *[0] * 5])
    found = folders.Exposure(path, status, uid)
    monkeypatch.setattr(folders, "exposures", lambda *_: iter([found] if led else []))
    assert re.match(expected, folders.remedy(found, "it", 7, is_above))
    if expected.startswith("Let uid 7"):
        assert folders.remedy(found, "it", 0, is_above).startswith("Use a folder for it that only root may change")
        monkeypatch.setattr(folders, "ROOT_ID", -1)
        assert folders.remedy(found, "it", os.geteuid(), is_above).startswith("Move it below")


def test_root_with_the_rights_of_an_owner_still_reads_the_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = folders.Exposure(tmp_path, tmp_path.stat(), None)
    monkeypatch.setattr(folders, "ROOT_ID", -1)
    assert folders.remedy(found, "it", os.geteuid()).startswith(("Run: chmod", "Move it"))
    monkeypatch.setattr(folders, "_borrowed_uids", [os.geteuid()])
    assert folders.remedy(found, "it", os.geteuid()).startswith(f"Let uid {os.geteuid()}")
    upper = folders.Exposure(tmp_path, tmp_path.stat(), users.OTHER)
    assert folders.remedy(upper, "it", os.geteuid()).startswith(f"Let uid {os.geteuid()}")


MOUNTS = """\
22 1 254:0 / / rw,relatime shared:1 - ext4 /dev/vda rw
30 22 0:45 / /home/m/mnt rw,nosuid,nodev,relatime shared:2 - fuse.sshfs m@host: rw,user_id=2621,group_id=2621,allow_other
31 22 0:46 / /data/s3 rw - fuse s3fs rw,user_id=0,group_id=0,allow_other
32 22 0:47 / /tmp rw - tmpfs tmpfs rw,size=100k
"""


@pytest.mark.parametrize(
    ("device", "owner"),
    [((254, 0), 7), ((0, 45), 2621), ((0, 46), 7), ((0, 47), 7), ((0, 99), 7)],
)
def test_on_the_file_system_of_a_user_all_belongs_to_that_user(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device: tuple[int, int], owner: int
) -> None:
    """The program behind it may say that a file belongs to root."""
    status = os.stat_result([0o40700, 1, os.makedev(*device), 1, 7, *[0] * 5])
    monkeypatch.setattr(folders, "_MOUNTS", tmp_path / "mounts")
    assert folders.owner_uid(status) == 7  # not Linux
    (tmp_path / "mounts").write_text(MOUNTS)
    assert folders.owner_uid(status) == owner


def test_what_a_user_has_mounted_is_an_exposure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (path := tmp_path / "spool").mkdir()
    inode = path.stat().st_ino
    monkeypatch.setattr(folders, "owner_uid", lambda status: 2621 if status.st_ino == inode else status.st_uid)
    assert [found.uid for found in folders.exposures(path)] == [2621]
    assert [found.uid for found in folders.exposures_of(path, ())] == [2621]
    assert folders.foreign_file(path) == folders.ForeignFile(path, 2621)


def test_a_link_is_followed_as_it_is_after_the_check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A user who changes the link before the check cannot hide its target."""
    for name in ("safe", "shared"):
        (tmp_path / name / "x").mkdir(parents=True)
    (tmp_path / "shared").chmod(0o777)
    (link := tmp_path / "link").symlink_to("safe")
    lstat = Path.lstat

    def change(path: Path) -> os.stat_result:
        if path == link:
            link.unlink()
            link.symlink_to("shared")
        return lstat(path)

    monkeypatch.setattr(Path, "lstat", change)
    assert [way.path for way in folders.exposures(link / "x")] == [tmp_path / "shared"]


def test_a_loop_of_links_ends(tmp_path: Path) -> None:
    (tmp_path / "a").symlink_to("b")
    (tmp_path / "b").symlink_to("a")
    assert list(folders.exposures(tmp_path / "a" / "x")) == []


def test_the_hosts_users_are_nobody_in_particular_in_a_container(monkeypatch: pytest.MonkeyPatch) -> None:
    texts = {"/proc/sys/kernel/overflowuid": "65534\n"}
    monkeypatch.setattr(Path, "read_text", lambda self, _: texts[str(self)])
    for text, unmapped in (
        ("0 0 4294967295\n", set()),
        ("0 1000 1\n", {65534}),
        ("0 1000 1\n1 100000 65536\n", set()),
        ("damaged", set()),
    ):
        texts["/proc/self/uid_map"] = text
        assert folders._unmapped_uids() == unmapped


@pytest.mark.parametrize("kind", ["link", "pipe", "device"])
def test_only_regular_files_are_opened(tmp_path: Path, kind: str) -> None:
    path, text = tmp_path / "file", "it is no file"
    (tmp_path / "secret").write_text("secret")
    if kind == "link":
        path.symlink_to(tmp_path / "secret")
        text = "it is a link"
    elif kind == "pipe":
        os.mkfifo(path)
    else:
        path = Path("/dev/zero")
    for flags in (os.O_RDONLY, os.O_RDWR | os.O_CREAT):
        with pytest.raises(OSError, match=text):
            folders.open_regular(path, flags)
    for read in (folders.read_regular, lambda path: folders.copy_regular(path, tmp_path / "copy")):
        with pytest.raises(OSError, match=text):
            read(path)
    assert not (tmp_path / "copy").exists()


def test_a_copy_follows_no_link_at_its_target(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("new")
    (tmp_path / "precious").write_text("old")
    (tmp_path / "copy").symlink_to(tmp_path / "precious")
    with pytest.raises(FileExistsError):
        folders.copy_regular(tmp_path / "file", tmp_path / "copy")
    folders.replace_file(tmp_path / "copy", "new")
    assert ((tmp_path / "precious").read_text(), (tmp_path / "copy").read_text()) == ("old", "new")
    with pytest.raises(IsADirectoryError):
        folders.replace_file(tmp_path, "new")
    assert {path.name for path in tmp_path.iterdir()} == {"file", "precious", "copy"}


def test_root_has_the_rights_of_an_owner_and_gets_its_own_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if the block fails. A user without a name is in no group, whatever group a folder has."""
    before, calls = (os.geteuid(), os.getegid(), os.getgroups()), []
    for name in ("setgroups", "setegid", "seteuid"):
        change = getattr(os, name) if users.IS_ROOT else lambda _: None
        monkeypatch.setattr(
            os, name, lambda value, name=name, change=change: (calls.append((name, value)), change(value))
        )
    named = next(user for user in pwd.getpwall() if user.pw_uid and user.pw_gid)
    cases = [
        (users.OTHER, [65534], 65534),
        (named.pw_uid, os.getgrouplist(named.pw_name, named.pw_gid), named.pw_gid),
    ]
    for uid, groups, group in cases:
        calls.clear()
        with contextlib.suppress(ZeroDivisionError), folders.as_user(uid):
            assert calls == [("setgroups", groups), ("setegid", group), ("seteuid", uid)]
            if users.IS_ROOT:
                assert (os.geteuid(), os.getegid(), os.getgroups()) == (uid, group, groups)
                assert not folders.has_own_rights()
            raise ZeroDivisionError
        assert calls[3:] == [("seteuid", before[0]), ("setegid", before[1]), ("setgroups", before[2])]
        assert (os.geteuid(), os.getegid(), os.getgroups()) == before


def test_root_becomes_another_user_for_good_or_stays_root(monkeypatch: pytest.MonkeyPatch) -> None:
    """All ids change, so that nothing gets root's rights back."""
    calls: list[tuple[object, ...]] = []
    for name in ("setgroups", "setregid", "setreuid"):
        monkeypatch.setattr(os, name, lambda *given, name=name: calls.append((name, *given)))
    monkeypatch.setattr(folders, "_borrowed_uids", [])
    monkeypatch.setattr(folders, "forbid_core_dumps", lambda: lambda: None)
    folders.become_user(users.OTHER)
    assert calls == [("setgroups", [65534]), ("setregid", 65534, 65534), ("setreuid", users.OTHER, users.OTHER)]
    assert not folders.has_own_rights()
    calls.clear()
    monkeypatch.setattr(folders, "_borrowed_uids", [])

    def refuse(*_: int) -> None:
        raise PermissionError

    monkeypatch.setattr(os, "setreuid", refuse)
    with pytest.raises(PermissionError):
        folders.become_user(users.OTHER)
    assert calls[2:] == [("setregid", os.getgid(), os.getegid()), ("setgroups", os.getgroups())]
    assert folders.has_own_rights()


SEALED = """
import ctypes, os, resource, sys
from rocketmq_spark.base import folders
from rocketmq_spark.base.process import python_call
resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
if os.getuid():
    os.setgroups = os.setregid = lambda *_: None
    os.setreuid = lambda *_: None
else:
    # As where the system permits cores of such processes (fs.suid_dumpable).
    os.setreuid = lambda *_, real=os.setreuid: (real(*_), ctypes.CDLL(None).prctl(4, 1, 0, 0, 0))
folders.become_user(int(sys.argv[1]))
print(resource.getrlimit(resource.RLIMIT_CORE), ctypes.CDLL(None).prctl(3, 0, 0, 0, 0))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="prctl")
def test_a_process_with_other_rights_leaves_no_core() -> None:
    given = python_call("-c", SEALED, str(users.OTHER), first_import_folders=[str(Path(__file__).parents[1])])
    done = subprocess.run(**given, capture_output=True, text=True, check=True)
    assert done.stdout == "(0, 0) 0\n"


@pytest.mark.parametrize("problem", ["open", "of another user", "no root"])
def test_folder_gets_new_owner_only_if_root_alone_can_replace_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, problem: str
) -> None:
    """Otherwise its name could already be that of another folder."""
    users.of_root(monkeypatch, os.getuid())
    monkeypatch.setattr(os, "fchown", lambda *_: None)
    with folders.open_subfolder(tmp_path) as above:
        os.close(folders.make_folder_for(tmp_path.stat(), "first", above))
        if problem == "open":
            tmp_path.chmod(0o777)
        elif problem == "no root":
            monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
        else:
            monkeypatch.setattr(os, "fstat", lambda _: os.stat_result([0o40755, 0, 0, 0, os.getuid() + 1, *[0] * 5]))
        with pytest.raises(PermissionError, match="may not create this folder"):
            folders.make_folder_for(tmp_path.stat(), "second", above)
    assert [path.name for path in tmp_path.iterdir()] == ["first"]


def test_a_part_of_a_path_that_is_a_link_is_not_entered(tmp_path: Path) -> None:
    (tmp_path / "real" / "inner").mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path / "real")
    for below in (["link"], ["link", "inner"], ["..", "real"], ["real/inner"], [""]):
        with (
            pytest.raises(OSError, match=r"it is a link|it is no name of a folder"),
            folders.open_subfolder(tmp_path, below),
        ):
            pass
    with folders.open_subfolder(tmp_path, ["real", "new"], 0o700) as opened:
        assert os.path.samestat(os.fstat(opened), (tmp_path / "real" / "new").stat())
