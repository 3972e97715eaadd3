"""The jars: the lock, the cache, what happens to damaged files, two processes at once, and repositories that fail.

A small repository of our own on loopback, holding two real jars of the lock, stands for Maven Central.
"""

from __future__ import annotations

import functools
import hashlib
import http.server
import io
import os
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from rocketmq_spark.base import folders
from rocketmq_spark.base import process as registry
from rocketmq_spark.errors import LocalBrokerError
from rocketmq_spark.localbroker import distribution, java, maven, processes, workspace
from rocketmq_spark.localbroker.moved_folders import revoke_write_if_safe
from tests import users
from tests.helpers import raising

SMALL = ("commons-cli:commons-cli:1.5.0", "io.netty:netty-codec-haproxy:4.1.130.Final")


class Repository(http.server.SimpleHTTPRequestHandler):
    """Serves a folder; the log of jars asked for is shared through the class made per server."""

    asked: list[str]
    failing: set[str]

    def do_GET(self) -> None:
        name = self.path.rpartition("/")[2]
        self.asked.append(name)
        if name in self.failing:
            self.failing.discard(name)
            self.send_error(503)
        else:
            super().do_GET()

    def log_message(self, format: str, *args: object) -> None:
        """Not on the terminal."""


class Mirror:
    """A repository with its address, its folder and what was asked of it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.asked: list[str] = []
        self.failing: set[str] = set()
        handler = type("Handler", (Repository,), {"asked": self.asked, "failing": self.failing})
        self.server = http.server.ThreadingHTTPServer(
            (processes.HOST, 0), functools.partial(handler, directory=str(folder))
        )
        self.root = f"http://{processes.HOST}:{self.server.server_port}/"

    def file_of(self, coordinate: str) -> Path:
        group, artifact, version = coordinate.split(":")
        return self.folder / group.replace(".", "/") / artifact / version / f"{artifact}-{version}.jar"


@pytest.fixture(scope="session")
def small_jars() -> dict[str, tuple[distribution.Jar, Path]]:
    """Two small jars of the real distribution."""
    files = {path.name: path for path in distribution.fetch(["core"])}
    jars = {jar.coordinate: jar for jar in distribution.read_lock_file()["core"].jars}
    return {c: (jars[c], files[jars[c].file_name]) for c in SMALL}


@pytest.fixture
def mirror(tmp_path: Path, small_jars: dict[str, tuple[distribution.Jar, Path]]) -> Iterator[Mirror]:
    mirror = Mirror(tmp_path / "mirror")
    for coordinate, (_, file) in small_jars.items():
        target = mirror.file_of(coordinate)
        target.parent.mkdir(parents=True)
        shutil.copy(file, target)
    thread = threading.Thread(target=mirror.server.serve_forever, args=(0.05,))
    thread.start()
    yield mirror
    mirror.server.shutdown()
    mirror.server.server_close()
    thread.join()


@pytest.fixture
def small(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    small_jars: dict[str, tuple[distribution.Jar, Path]],
    mirror: Mirror,
) -> Path:
    """An empty cache, a lock with the two jars only, Ivy settings that lead to the mirror; returns the cache."""
    lines = "".join(f"{c} {jar.sha256} {jar.size}\n" for c, (jar, _) in small_jars.items())
    lock = tmp_path / "jars.lock"
    lock.write_text(f"# a lock for tests\n# [small] two jars\n{lines}")
    monkeypatch.setattr(
        distribution, "read_lock_file", functools.partial(distribution.read_lock_file, lock.read_text())
    )
    monkeypatch.setenv(distribution.CACHE_VARIABLE, str(tmp_path / "cache"))
    monkeypatch.setenv(maven.SETTINGS_VARIABLE, str(_ivy_settings(tmp_path / "ivysettings.xml", mirror.root)))
    return tmp_path / "cache"


def _ivy_settings(path: Path, root: str) -> Path:
    path.write_text(
        '<ivysettings><settings defaultResolver="ours"/><resolvers>'
        f'<ibiblio name="ours" m2compatible="true" root="{root}"/></resolvers></ivysettings>'
    )
    return path


def _hash(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def test_the_lock_is_read_section_by_section() -> None:
    lock = distribution.read_lock_file()
    assert {name: len(lock[name].jars) for name in ("core", "tls-test", "proxy", "proxy-native")} == {
        "core": 40,
        "tls-test": 4,
        "proxy": 14,
        "proxy-native": 2,
    }
    assert all(len(jar.sha256) == 64 and jar.size > 0 for section in lock.values() for jar in section.jars)
    assert lock["core"].key.startswith("core-")


def test_another_section_text_is_another_folder() -> None:
    one, two = (distribution.read_lock_file(f"# [x] note\ng:a:1 {'0' * 64} {size}\n")["x"].key for size in (1, 2))
    noted = distribution.read_lock_file(f"# [x] other note\n# more\ng:a:1 {'0' * 64} 1\n")["x"].key
    assert one != two
    assert one == noted


def test_file_names_tell_classifiers_apart() -> None:
    native = distribution.read_lock_file()["proxy-native"].jars
    assert len({jar.file_name for jar in native}) == len(native)


def test_cache_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sys, "platform", "linux")
    home = tmp_path / "somebody"
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.delenv(distribution.CACHE_VARIABLE, raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert distribution.cache_folder() == home / ".cache" / "rocketmq-spark"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert distribution.cache_folder() == tmp_path / "xdg" / "rocketmq-spark"
    monkeypatch.setattr(sys, "platform", "darwin")
    assert distribution.cache_folder() == home / "Library" / "Caches" / "rocketmq-spark"
    monkeypatch.setenv(distribution.CACHE_VARIABLE, "~/there")
    assert distribution.cache_folder() == home / "there"
    assert stat.S_IMODE((home / "there").stat().st_mode) == 0o700


def test_a_cache_that_others_may_write_to_is_not_trusted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Classes and libraries from there are executed."""
    monkeypatch.setenv(distribution.CACHE_VARIABLE, str(tmp_path / "mine"))
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine").chmod(0o777)
    distribution.cache_folder()
    assert stat.S_IMODE((tmp_path / "mine").stat().st_mode) == 0o755
    monkeypatch.setenv(distribution.CACHE_VARIABLE, str(tmp_path / "file" / "below"))
    (tmp_path / "file").touch()
    assert distribution.cache_folder() == tmp_path / "file" / "below", "who writes there says what is wrong"


def test_what_private_groups_may_write_is_closed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "jars" / "core").mkdir(parents=True)
    for folder in (places := [tmp_path, *tmp_path.rglob("*")]):
        folder.chmod(0o775)
    monkeypatch.setattr(folders, "_is_private_group", lambda *_: True)
    monkeypatch.setenv(distribution.CACHE_VARIABLE, str(tmp_path))
    distribution.cache_folder()
    assert {stat.S_IMODE(folder.stat().st_mode) for folder in places} == {0o755}


@pytest.mark.parametrize("open_folder", [".", "{name}", "{name}/inner"])
@pytest.mark.parametrize("name", ["archives", "background", "demo", "jars", "natives", "ports", "run"])
def test_what_others_may_have_moved_into_a_cache_stays(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str, open_folder: str
) -> None:
    """They rename a folder of its user to one in which starts delete old files. Also at the next start."""
    (cache := tmp_path / "cache").mkdir()
    (cache / "project" / "inner").mkdir(parents=True)
    for folder in (cache, *cache.rglob("*")):
        folder.chmod(0o755)
    (cache / "project").rename(cache / name)
    (cache / open_folder.format(name=name)).chmod(0o777)
    monkeypatch.setenv(distribution.CACHE_VARIABLE, str(cache))
    modes = {path: path.stat().st_mode for path in (cache, *cache.rglob("*"))}
    for _ in range(2):
        with pytest.raises(LocalBrokerError, match=rf"The cache {cache} is not used: .* {cache}/{name}.*chmod go-w"):
            distribution.cache_folder()
        assert {path: path.stat().st_mode for path in modes} == modes
    (cache / open_folder.format(name=name)).chmod(0o755)
    assert distribution.cache_folder() == cache


def test_what_comes_while_a_cache_is_closed_is_seen(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (cache := tmp_path / "cache").mkdir()
    cache.chmod(0o777)
    close = folders.revoke_write

    def late(path: Path) -> bool:
        (cache / "archives").mkdir(exist_ok=True)
        return close(path)

    monkeypatch.setattr(folders, "revoke_write", late)
    monkeypatch.setenv(distribution.CACHE_VARIABLE, str(cache))
    with pytest.raises(LocalBrokerError, match=rf"may have moved a folder of yours to {cache}/archives"):
        distribution.cache_folder()
    assert stat.S_IMODE(cache.stat().st_mode) == 0o777


def test_a_link_that_leads_nowhere_hides_no_moved_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Its target has a name that is too long for the system, so that its status is an error."""
    cache = tmp_path / "cache"
    (cache / "jars" / "project").mkdir(parents=True)
    (cache / "archives").symlink_to("x" * 300)
    cache.chmod(0o777)
    monkeypatch.setenv(distribution.CACHE_VARIABLE, str(cache))
    with pytest.raises(LocalBrokerError, match=rf"The cache {cache} is not used: others may write to it"):
        distribution.cache_folder()
    assert stat.S_IMODE(cache.stat().st_mode) == 0o777


def test_a_cache_may_have_a_folder_of_all_users_beside_its_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Such as the temporary folder of a volume. LocalBroker executes nothing from there."""
    (other := tmp_path / "tmp").mkdir()
    tmp_path.chmod(0o755)
    other.chmod(0o1777)
    monkeypatch.setenv(distribution.CACHE_VARIABLE, str(tmp_path))
    assert distribution.cache_folder() == tmp_path
    assert stat.S_IMODE(other.stat().st_mode) == 0o1777


def test_only_the_refused_folder_gets_its_mode_back(tmp_path: Path) -> None:
    """Whoever may replace it could otherwise open a private folder of this user."""
    (folder := tmp_path / "folder").mkdir()
    (private := tmp_path / "private").mkdir(0o700)
    folder.chmod(0o777)

    def replaced() -> str:
        folder.rename(tmp_path / "away")
        folder.symlink_to(private)
        return "a problem"

    assert revoke_write_if_safe(folder, lambda _: None, replaced) == "a problem"
    assert stat.S_IMODE(private.stat().st_mode) == 0o700


@pytest.mark.parametrize("data", ["background/data", "mine", "mine/data"])
def test_a_data_folder_in_a_cache_keeps_its_mode(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, data: str) -> None:
    """So that the check of data folders sees that others could write to it."""
    (folder := tmp_path / data).mkdir(parents=True)
    (folder / "broker-a").mkdir()
    for above in (tmp_path, *folder.parents[: len(Path(data).parts) - 1]):
        above.chmod(0o755)
    folder.chmod(0o777)
    monkeypatch.setenv(distribution.CACHE_VARIABLE, str(tmp_path))
    distribution.cache_folder()
    with pytest.raises(LocalBrokerError, match=rf"{folder} is not used: others may write to it, .*broker-a"):
        workspace.reserve(tmp_path / "run", folder, keeps_data=True)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o777


def test_a_cache_that_is_refused_keeps_its_modes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Without the mode of /tmp, all other users lose it."""
    (shared := tmp_path / "shared").mkdir()
    shared.chmod(0o1777)
    monkeypatch.setenv(distribution.CACHE_VARIABLE, str(shared))
    with pytest.raises(LocalBrokerError, match=f"All users may write to {shared}; .* Name a new folder in it with"):
        distribution.cache_folder()
    assert stat.S_IMODE(shared.stat().st_mode) == 0o1777
    monkeypatch.setenv(distribution.CACHE_VARIABLE, str(shared / "cache"))
    assert distribution.cache_folder() == shared / "cache"
    (shared / "cache" / "jars" / "core").mkdir(parents=True)
    for folder in (shared / "cache", shared / "cache" / "jars"):
        folder.chmod(0o777)
    users.give_away(monkeypatch, shared / "cache" / "jars" / "core")
    with pytest.raises(LocalBrokerError, match=r"belongs to uid|lies in"):
        distribution.cache_folder()
    assert {stat.S_IMODE(folder.stat().st_mode) for folder in (shared / "cache", shared / "cache" / "jars")} == {0o777}


def of_root(monkeypatch: pytest.MonkeyPatch) -> None:
    """From here on this process is an ordinary user, and its files are root's."""
    users.of_root(monkeypatch, os.getuid())
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)


def test_a_cache_of_root_is_used_unless_others_may_write_to_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """An administrator may fill one for all users."""
    (made := tmp_path / "made").mkdir()
    (made / "jars").mkdir()
    monkeypatch.setenv(distribution.CACHE_VARIABLE, str(made))
    of_root(monkeypatch)
    assert distribution.cache_folder() == made
    monkeypatch.setattr(folders, "_is_private_group", lambda *_: True)
    for open_folder in (made / "jars", made):
        open_folder.chmod(0o777)
        with pytest.raises(
            LocalBrokerError, match=rf"Others may write to {open_folder}; .*{distribution.CACHE_VARIABLE}"
        ):
            distribution.cache_folder()
        open_folder.chmod(0o775)  # as in images for OpenShift
        assert distribution.cache_folder() == made


@pytest.mark.parametrize("link", [False, True])
def test_a_cache_that_others_may_replace_is_not_used(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture, link: bool
) -> None:
    """They could exchange it between the check of its jars and the start of the JVM."""
    (cache := tmp_path / "shared" / "mine" / "cache").mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path / "shared" / "mine")
    monkeypatch.setenv(distribution.CACHE_VARIABLE, str(tmp_path / "link" / "cache" if link else cache))
    for private, bits in ((False, 0o1777), (True, 0o775)):
        monkeypatch.setattr(folders, "_is_private_group", lambda *_, private=private: private)
        (tmp_path / "shared").chmod(bits)
        assert distribution.cache_folder().samefile(cache)
    monkeypatch.setattr(folders, "_is_private_group", lambda *_: False)
    with pytest.raises(LocalBrokerError, match=rf"lies in {tmp_path / 'shared'}, in which the group \d+ \(mode 0775\)"):
        distribution.cache_folder()
    assert not caplog.messages
    (tmp_path / "shared").chmod(0o777)
    with pytest.raises(LocalBrokerError) as raised:
        distribution.cache_folder()
    for part in (
        f"lies in {tmp_path / 'shared'}, in which others (mode 0777)",
        "chmod go-w",
        distribution.CACHE_VARIABLE,
    ):
        assert part in str(raised.value)
    (tmp_path / "shared").chmod(0o755)
    uid = users.give_away(monkeypatch, tmp_path / "shared", tmp_path / "shared" / "mine")
    with pytest.raises(LocalBrokerError, match=rf"its owner, uid {uid}|belongs to uid {uid}"):
        distribution.cache_folder()


def test_folders_above_a_new_cache_are_private(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(distribution.CACHE_VARIABLE, str(tmp_path / "a" / "b" / "cache"))
    before = os.umask(0)
    try:
        distribution.cache_folder()
    finally:
        os.umask(before)
    assert {stat.S_IMODE(folder.stat().st_mode) for folder in (tmp_path / "a").rglob("*")} == {0o700}
    assert stat.S_IMODE((tmp_path / "a").stat().st_mode) == 0o700


@pytest.mark.parametrize("variable", ["HOME", "XDG_CACHE_HOME"])
def test_a_home_of_another_user_has_no_cache_of_this_one(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, variable: str
) -> None:
    """As with sudo, and in jobs of GitHub that run as root in a container."""
    monkeypatch.delenv(distribution.CACHE_VARIABLE, raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    for name in ("theirs", "account"):
        (tmp_path / name).mkdir()
    account = SimpleNamespace(pw_dir=str(tmp_path / "account"))
    monkeypatch.setattr(java.folders.pwd, "getpwuid", lambda _: account)
    monkeypatch.setenv("HOME", str(tmp_path / "account"))
    monkeypatch.setenv(variable, str(tmp_path / "theirs"))
    theirs = java.user_cache()
    assert theirs.is_relative_to(tmp_path / "theirs")
    users.give_away(monkeypatch, tmp_path / "theirs")
    assert java.user_cache() == tmp_path / "account" / theirs.relative_to(tmp_path / "theirs") or (
        java.user_cache() == tmp_path / "account" / ".cache" / "rocketmq-spark"
    )


@pytest.fixture
def usual(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The home of a user without a name, whose temporary folder is that of all."""
    for variable in (distribution.CACHE_VARIABLE, "XDG_CACHE_HOME"):
        monkeypatch.delenv(variable, raising=False)
    for name, bits in (("home", 0o755), ("tmp", 0o1777)):
        (tmp_path / name).mkdir()
        (tmp_path / name).chmod(bits)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))

    def nameless(uid: int) -> None:
        raise KeyError(uid)

    monkeypatch.setattr(java.folders.pwd, "getpwuid", nameless)
    registry.entries("cache").clear()
    return tmp_path / "home"


@pytest.mark.parametrize("problem", ["of another user", "open", "no folder"])
def test_an_unusable_default_cache_is_replaced_with_a_warning(
    usual: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, problem: str
) -> None:
    """As for random uids, and in a volume to which everyone may write."""
    if problem == "open":
        usual.chmod(0o777)
    elif problem == "no folder":
        (usual / ".cache").touch()
        (usual / "Library").touch()
    elif users.IS_ROOT:
        users.give_away(monkeypatch, usual)
    else:
        monkeypatch.setattr(java, "user_cache", lambda: Path("/proc/rocketmq-spark"))
    for _ in range(2):
        folder = distribution.cache_folder()
    assert folder == tmp_path / "tmp" / f"rocketmq-spark-{os.geteuid()}"
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    [warning] = caplog.messages
    assert f"LocalBroker uses {folder} instead" in warning
    assert f"set {distribution.CACHE_VARIABLE} to a folder" in warning
    monkeypatch.setenv(distribution.CACHE_VARIABLE, str(usual / "named"))
    if problem == "open":
        with pytest.raises(LocalBrokerError, match="others"):
            distribution.cache_folder()


@pytest.mark.parametrize("planted", ["folder", "link", "own link"])
def test_a_temporary_cache_of_another_user_is_not_used(
    usual: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, planted: str
) -> None:
    usual.chmod(0o777)
    (tmp_path / "theirs").mkdir()
    made = tmp_path / "tmp" / "made"
    made.mkdir() if planted == "folder" else made.symlink_to(tmp_path / "theirs")
    if planted != "own link":
        users.give_away(monkeypatch, made)
    place = made.rename(made.with_name(f"rocketmq-spark-{os.geteuid()}"))
    with pytest.raises(
        LocalBrokerError, match=rf"{place} is a link, or belongs to another .*{distribution.CACHE_VARIABLE}"
    ):
        distribution.cache_folder()


def test_downloaded_jars_are_closed_whatever_the_umask_is(
    small: Path, mirror: Mirror, monkeypatch: pytest.MonkeyPatch
) -> None:
    small.mkdir(mode=0o755, exist_ok=True)
    before = os.umask(0)
    try:
        jars = distribution.fetch(["small"], quiet=True)
    finally:
        os.umask(before)
    assert {stat.S_IMODE(jar.stat().st_mode) for jar in jars} == {0o644}
    assert {stat.S_IMODE(jar.parent.stat().st_mode) for jar in jars} == {0o755}, (
        "an administrator may fill it for all users"
    )
    assert {stat.S_IMODE(folder.stat().st_mode) & 0o022 for folder in small.rglob("*")} == {0}


@pytest.mark.parametrize("place", [".", "jars", "jars/core", "link", "link to a folder of others"])
def test_a_cache_of_another_user_is_not_used(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, place: str) -> None:
    """Classes and libraries from there are executed, whatever its mode is."""
    cache = tmp_path / "cache"
    for folder in (cache / "jars" / "core", tmp_path / "theirs"):
        folder.mkdir(parents=True)
    theirs = cache / place
    if "link" in place:
        theirs.symlink_to(tmp_path / "theirs")
    monkeypatch.setenv(distribution.CACHE_VARIABLE, str(cache))
    assert distribution.cache_folder() == cache
    uid = users.give_away(monkeypatch, tmp_path / "theirs" if place.endswith("others") else theirs)
    with pytest.raises(LocalBrokerError) as raised:
        distribution.cache_folder()
    for part in (f"belongs to uid {uid}", "would be executed", "Remove it, or name a", distribution.CACHE_VARIABLE):
        assert part in str(raised.value)


@pytest.mark.parametrize("change", ["owner", "mode", "link"])
def test_a_jar_that_others_may_change_is_not_used_as_it_is(
    small: Path, mirror: Mirror, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    """Its hash is that of the lock now, and perhaps not when the JVM reads it."""
    jar = distribution.fetch(["small"], quiet=True)[0]
    inode, asked = jar.stat().st_ino, len(mirror.asked)
    if change == "mode":
        jar.chmod(0o666)
    elif change == "link":
        jar.rename(tmp_path / "theirs")
        jar.symlink_to(tmp_path / "theirs")
        users.give_away(monkeypatch, tmp_path / "theirs")
    else:
        users.give_away(monkeypatch, jar)
    if change != "mode" and not users.IS_ROOT:  # the folders are the other user's, too
        with pytest.raises(LocalBrokerError, match="belongs to uid"):
            distribution.fetch(["small"], quiet=True)
        return
    assert distribution.fetch(["small"], quiet=True)[0] == jar
    status = jar.lstat()
    assert (stat.S_ISREG(status.st_mode), status.st_mode & 0o022, status.st_uid) == (True, 0, os.geteuid())
    assert status.st_ino != inode, "who has opened it may still write to it"
    assert (len(mirror.asked) == asked) == (change == "mode"), "copied, or fetched again"


def test_real_jars_are_complete_and_in_the_order_of_the_lock() -> None:
    jars = distribution.read_lock_file()["core"].jars
    files = distribution.fetch(["core"])
    assert [f.name for f in files] == [j.file_name for j in jars]
    assert [_hash(f) for f in files] == [j.sha256 for j in jars]


def test_an_unknown_section() -> None:
    with pytest.raises(LocalBrokerError, match=r"jars\.lock has no section nonsense"):
        distribution.fetch(["core", "nonsense"])


def test_fetched_once_and_then_found(small: Path, mirror: Mirror, capfd: pytest.CaptureFixture[str]) -> None:
    files = distribution.fetch(["small"])
    assert [f.parent.parent for f in files] == [small / "jars"] * 2
    asked = len(mirror.asked)
    assert distribution.fetch(["small"]) == files
    assert len(mirror.asked) == asked
    out, err = capfd.readouterr()
    assert err.splitlines() == [f"Fetching RocketMQ {distribution.VERSION}: 2 jars, 0 MB ...", "RocketMQ is fetched"]
    assert not out
    assert {p.name for p in (small / "jars").iterdir()} == {"lock", files[0].parent.name}


def test_jars_behind_a_link_have_their_resolved_paths(
    small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files, other = distribution.fetch(["small"], quiet=True), tmp_path / "other"
    other.mkdir()
    (other / "jars").symlink_to(distribution.cache_folder() / "jars")
    monkeypatch.setenv(distribution.CACHE_VARIABLE, str(other))
    assert distribution.fetch(["small"]) == files


def test_jars_behind_a_link_that_others_may_replace_are_not_used(
    small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    distribution.fetch(["small"], quiet=True)
    cache, shared = tmp_path / "other", tmp_path / "shared"
    for folder in (cache, shared):
        folder.mkdir()
    shutil.copytree(small / "jars", shared / "jars")
    shared.chmod(0o777)
    (cache / "jars").symlink_to(shared / "jars")
    monkeypatch.setenv(distribution.CACHE_VARIABLE, str(cache))
    with pytest.raises(LocalBrokerError, match=rf"{cache}/jars lies in {shared}, in which others"):
        distribution.fetch(["small"])


def test_a_jar_behind_an_exposed_link_is_fetched_again(small: Path, tmp_path: Path) -> None:
    jar = distribution.fetch(["small"], quiet=True)[0]
    (shared := tmp_path / "shared").mkdir()
    shared.chmod(0o777)
    jar.rename(shared / jar.name)
    jar.symlink_to(shared / jar.name)
    assert not distribution.fetch(["small"], quiet=True)[0].is_symlink()


def test_a_user_without_a_home_has_a_cache_in_temporary_files(
    usual: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("HOME")
    monkeypatch.setattr(Path, "home", raising(RuntimeError("Could not determine home directory.")))
    monkeypatch.setattr(java.folders, "make_folders", make_below(tmp_path))
    assert distribution.cache_folder() == tmp_path / "tmp" / f"rocketmq-spark-{os.geteuid()}"


def make_below(top: Path) -> Callable[..., list[Path]]:
    """Folders elsewhere cannot be created, as by a user who is not root."""
    real = java.folders.make_folders

    def make(path: Path, mode: int = 0o700) -> list[Path]:
        if not path.is_relative_to(top):
            raise PermissionError(path)
        return real(path, mode)

    return make


def test_what_a_killed_download_left_goes_with_the_next_one(small: Path) -> None:
    (left := small / "jars" / "fetch-dead").mkdir(parents=True)
    (left / "half").write_bytes(b"x")
    distribution.fetch(["small"], quiet=True)
    assert not left.exists()


def test_quiet(small: Path, capfd: pytest.CaptureFixture[str]) -> None:
    distribution.fetch(["small"], quiet=True)
    assert capfd.readouterr() == ("", "")


def test_a_terminal_gets_a_bar(small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    distribution.fetch(["small"])
    assert "2 jars" in terminal.getvalue()
    assert "━" in terminal.getvalue()


@pytest.mark.parametrize("damage", ["flipped", "short", "gone"])
def test_a_damaged_jar_is_fetched_again_and_only_that(small: Path, mirror: Mirror, damage: str) -> None:
    first, second = distribution.fetch(["small"])
    good, untouched = _hash(first), second.stat().st_mtime_ns
    if damage == "gone":
        first.unlink()
    else:
        content = bytearray(first.read_bytes())
        content[1000] ^= 1
        first.write_bytes(content if damage == "flipped" else content[:1000])
    mirror.asked.clear()
    distribution.fetch(["small"])
    assert _hash(first) == good
    assert second.stat().st_mtime_ns == untouched
    assert second.name not in mirror.asked


def test_other_content_than_the_lock_says_is_not_used(small: Path, mirror: Mirror) -> None:
    mirror.file_of(SMALL[1]).write_bytes(b"evil")
    with pytest.raises(LocalBrokerError, match=rf"{SMALL[1]} does not match its hash in jars\.lock"):
        distribution.fetch(["small"])
    assert not list(small.rglob("*.jar"))


def test_a_download_that_broke_off_goes_on(small: Path, mirror: Mirror) -> None:
    mirror.failing.add(mirror.file_of(SMALL[1]).name)
    assert len(distribution.fetch(["small"])) == 2
    assert mirror.asked.count(mirror.file_of(SMALL[0]).name) == 1


def test_a_jar_that_the_repository_lacks(small: Path, mirror: Mirror) -> None:
    mirror.file_of(SMALL[0]).unlink()
    with pytest.raises(LocalBrokerError, match=r"the repository lacks some jars .*commons-cli"):
        distribution.fetch(["small"])


def test_no_network_and_an_empty_cache(small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    closed = f"http://{processes.HOST}:{processes.free_port()}/"
    monkeypatch.setenv(maven.SETTINGS_VARIABLE, str(_ivy_settings(tmp_path / "closed.xml", closed)))
    with pytest.raises(LocalBrokerError) as e:
        distribution.fetch(["small"])
    assert str(e.value) == (
        "[ROCKETMQ_LOCAL_BROKER] Could not download RocketMQ: no connection to the repository. Check the network and "
        "HTTPS_PROXY, or name an Ivy settings file with your mirror in ROCKETMQ_SPARK_IVY_SETTINGS (rocketmq-spark help running)"
    )


def test_no_network_and_a_full_cache(small: Path, mirror: Mirror) -> None:
    files = distribution.fetch(["small"])
    mirror.server.shutdown()
    assert distribution.fetch(["small"]) == files


def test_a_cache_that_cannot_be_written(small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv(distribution.CACHE_VARIABLE, str(tmp_path / "file" / "cache"))
    with pytest.raises(LocalBrokerError, match=r"Could not write to .*/file/cache: Not a directory\. Free some space"):
        distribution.fetch(["small"])


def test_the_file_that_could_not_be_written_is_named(tmp_path: Path) -> None:
    for missing, named in ((tmp_path / "a" / "b", tmp_path / "a"), (Path("/nowhere/b"), Path("/nowhere/b"))):
        sentence = pytest.raises(LocalBrokerError, match=rf"Could not write to {named}: No such file or directory")
        with sentence, distribution.writing_to(tmp_path / "a"):
            missing.touch()


_FETCH = """
import functools, pathlib, sys
from rocketmq_spark.localbroker import distribution
distribution.read_lock_file = functools.partial(distribution.read_lock_file, pathlib.Path(sys.argv[1]).read_text())
print(*distribution.fetch(["small"]))
"""


def test_two_processes_at_once_fetch_once(small: Path, tmp_path: Path, mirror: Mirror) -> None:
    command = [sys.executable, "-c", _FETCH, str(tmp_path / "jars.lock")]
    both = [subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for _ in range(3)]
    ends = [process.communicate(timeout=180) for process in both]
    assert [process.returncode for process in both] == [0, 0, 0], ends
    assert len({out for out, _ in ends}) == 1
    assert "".join(err for _, err in ends).count("Fetching RocketMQ") == 1
    assert mirror.asked.count(mirror.file_of(SMALL[0]).name) == 1


def test_a_lock_ends_with_its_process(tmp_path: Path) -> None:
    lock = tmp_path / "lock"
    holder = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "import sys, pathlib; from rocketmq_spark.localbroker import distribution\n"
            "with distribution.file_locked(pathlib.Path(sys.argv[1])): print(flush=True); sys.stdin.read()",
            str(lock),
        ],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    with holder:
        assert holder.stdout is not None
        holder.stdout.readline()
        waited: list[bool] = []

        def held() -> None:
            waited.append(True)
            os.kill(holder.pid, signal.SIGKILL)

        with distribution.file_locked(lock, held):
            assert waited
