"""Rewinds of checkpoints that another user owns, or in which another user has put links."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from rocketmq_spark.base import folders
from rocketmq_spark.errors import OffsetError
from rocketmq_spark.spark.checkpoints.files import Folder
from tests import users
from tests.source.test_rewind import go, query, state

__all__ = ["query"]


def everything(path: Path) -> list[Path]:
    return [path, *path.rglob("*")]


def of_another(query: Folder, monkeypatch: pytest.MonkeyPatch) -> int:
    state(query, "1.delta", "2.delta", "3.delta", "4.delta")
    Path(query.name, "rocketmq").mkdir()
    return users.root_beside(monkeypatch, Path(query.name))


def their_folder(path: Path) -> dict[Path, int]:
    """A folder with the names of entries, which a rewind must neither change nor give away: names and owners."""
    for name in ("2", "3", "4", ".2.crc", "0/3.delta"):
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_text("theirs")
    return owners(path)


def owners(path: Path) -> dict[Path, int]:
    return {entry: entry.lstat().st_uid for entry in everything(path)}


def test_the_backup_is_for_the_owner_alone(query: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    uid = of_another(query, monkeypatch)
    Path(query.name, "offsets", ".note").write_text("no entry of a log")
    _, backup = go(query, 1)
    assert ".note" not in "".join(backup.files(recursive=True))
    made = everything(Path(backup.name))
    assert {stat.S_IMODE(path.stat().st_mode) for path in made if path.is_dir()} == {0o700}
    assert {path.stat().st_uid for path in (*made, Path(query.name, "rocketmq", "epoch"))} == {uid}


def test_root_has_the_rights_of_the_owner_while_it_changes(query: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    uid, seen = of_another(query, monkeypatch), []
    for name in ("unlink", "replace", "rename"):
        real = getattr(os, name)
        monkeypatch.setattr(os, name, lambda *a, _real=real, **k: (seen.append(os.geteuid()), _real(*a, **k))[1])
    go(query, 1)
    assert len(seen) > 5
    assert set(seen) == {uid}
    assert folders.has_own_rights()


def test_backup_in_owner_folder_is_made_with_owner_rights(
    query: Folder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The owner could replace a folder that root has made there before root gives it away."""
    uid = of_another(query, monkeypatch)
    if users.IS_ROOT:
        users.give_away(monkeypatch, tmp_path)
    given: list[int] = []
    monkeypatch.setattr(os, "fchown", lambda fd, *_: given.append(fd))
    _, backup = go(query, 1)
    assert (Path(backup.name).stat().st_uid, given) == (uid, [])


def test_root_makes_no_backup_where_the_owner_may_replace_it(
    query: Folder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    of_another(query, monkeypatch)
    before = owners(tmp_path)
    real, tried = os.mkdir, []

    def mkdir(path: str, *args: int, **at: int) -> None:
        if os.geteuid() != os.getuid() and not tried:
            tried.append(path)
            raise PermissionError(path)
        real(path, *args, **at)

    monkeypatch.setattr(os, "mkdir", mkdir)
    monkeypatch.setattr(folders, "others_may_write", lambda status: bool(tried))
    with pytest.raises(OffsetError, match="before-rewind"):
        go(query, 1)
    assert owners(tmp_path) == before


def test_root_makes_no_backup_where_the_owner_can_redirect_it(
    query: Folder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The owner may exchange a link above the checkpoint while root uses it."""
    of_another(query, monkeypatch)
    before = owners(tmp_path)
    above = folders.Exposure(tmp_path / "link", tmp_path.stat(), users.OTHER)
    monkeypatch.setattr(
        folders, "exposures", lambda path, owner=folders.ROOT_ID: iter([above] * (owner == folders.ROOT_ID))
    )
    real = os.mkdir

    def mkdir(path: str, *args: int, **at: int) -> None:
        if os.geteuid() != os.getuid():
            raise PermissionError(path)
        real(path, *args, **at)

    monkeypatch.setattr(os, "mkdir", mkdir)
    with pytest.raises(OffsetError, match="Check the path and its permissions"):
        go(query, 1)
    assert owners(tmp_path) == before


@pytest.mark.parametrize("root", [True, False], ids=["root", "user"])
@pytest.mark.parametrize("place", ["state", "state/0", "commits", "offsets", "rocketmq"])
def test_links_of_folders_are_an_error_before_anything_changes(
    query: Folder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str, root: bool
) -> None:
    state(query, "1.delta", "2.delta", "3.delta")
    link = Path(query.name, place)
    if link.exists():
        link.rename(tmp_path / "theirs")
    else:
        (tmp_path / "theirs").mkdir()
    link.symlink_to(tmp_path / "theirs")
    if root:
        users.root_beside(monkeypatch, Path(query.name))
    monkeypatch.setattr(folders, "user_text", "uid {} (Alice)".format)
    before, owner = owners(tmp_path), Path(query.name).stat().st_uid
    who, end = (f"Let uid {owner} (Alice) r", ", not root") if root else ("R", "")
    for step in (lambda: go(query, 1), lambda: query.as_owner().__enter__()):
        with pytest.raises(
            OffsetError, match=f"{link} is a link|{link}(/0)? is not read: {place} is a link|{place} is a link"
        ) as caught:
            step()
        assert caught.value.remedy == f"{who}eplace the link by the folder or file to which it leads{end}"
    assert owners(tmp_path) == before


@pytest.mark.parametrize("place", ["commits", "state/0", "rocketmq"])
def test_folder_swapped_for_a_link_after_the_check_is_refused(
    query: Folder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    of_another(query, monkeypatch)
    before = their_folder(tmp_path / "theirs")
    link = Path(query.name, place)
    real = Folder.copy

    def copy(*args: object) -> Folder:
        copied = real(*args)  # type: ignore[arg-type]
        monkeypatch.setattr(folders, "link_in", lambda _: exchange())
        return copied

    def exchange() -> None:
        if not link.is_symlink():
            link.rename(tmp_path / "real")
            link.symlink_to(tmp_path / "theirs")

    monkeypatch.setattr(Folder, "copy", copy)
    if users.IS_ROOT:  # exchanges with the rights that the process has then
        users.give_away(monkeypatch, tmp_path)
    with pytest.raises(OffsetError, match="is a link"):
        go(query, 1)
    assert owners(tmp_path / "theirs") == before


def test_swapped_backup_folder_is_not_given_to_the_owner(
    query: Folder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    of_another(query, monkeypatch)
    before = their_folder(tmp_path / "theirs")
    real = os.mkdir

    def mkdir(path: str, *args: int, **at: int) -> None:
        real(path, *args, **at)
        if path == "offsets":
            (made,) = tmp_path.glob("query.before-rewind-*")
            (made / "offsets").rename(made / "away")
            (made / "offsets").symlink_to(tmp_path / "theirs")

    monkeypatch.setattr(os, "mkdir", mkdir)
    with pytest.raises(OffsetError, match="it is a link"):
        go(query, 1)
    assert owners(tmp_path / "theirs") == before


@pytest.mark.parametrize("kind", ["link", "pipe"])
def test_nothing_is_copied_through_a_link(query: Folder, tmp_path: Path, kind: str) -> None:
    """The owner of the checkpoint could let it lead to a file that only root may read."""
    entry = Path(query.name) / "offsets" / ".3.crc"
    (tmp_path / "secret").write_text("secret")
    entry.unlink(missing_ok=True)
    entry.symlink_to(tmp_path / "secret") if kind == "link" else os.mkfifo(entry)
    if kind == "link":
        with pytest.raises(OffsetError, match=r"\.3\.crc is a link"):
            go(query, 1)
    else:
        go(query, 1)
    copies = [path for path in tmp_path.rglob("*.before-rewind-*/**/*") if path.is_file()]
    assert all(path.read_bytes() != b"secret" for path in copies)


def test_root_changes_no_checkpoint_that_others_may_replace(
    query: Folder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    of_another(query, monkeypatch)
    tmp_path.chmod(0o777)
    before = owners(tmp_path)
    with pytest.raises(
        OffsetError, match=rf"may replace {tmp_path}.*Run: chmod go-w {tmp_path}, or run this command as"
    ):
        go(query, 1)
    assert owners(tmp_path) == before


SCRIPT = """
import os, sys
from pathlib import Path
import pytest
from rocketmq_spark.cli.command import app
from tests import users
users.root_beside(pytest.MonkeyPatch(), Path(sys.argv[1]))
late = []
def outside(path):
    return not isinstance(path, int) and os.fspath(path).startswith("/") and not os.fspath(path).startswith(sys.argv[1])
def watch(event, details):
    if os.geteuid() != os.getuid() and (event == "import" or event == "open" and outside(details[0])):
        late.append((event, details[0]))
sys.addaudithook(watch)
try:
    app(["checkpoint", "rewind", sys.argv[1], *sys.argv[2:]])
finally:
    users.folders.has_own_rights() or late.append("rights")
    print("late:", *late, file=sys.stderr)
"""


@pytest.mark.parametrize(
    "given", [("--to-batch", "1", "--yes", "--force"), ("--to-batch", "9")], ids=["done", "refused"]
)
def test_root_needs_no_other_file_while_it_has_their_rights(query: Folder, given: tuple[str, ...]) -> None:
    """The owner may not be able to read the package."""
    state(query, "1.delta", "2.delta", "3.delta")
    users.let_in(Path(query.name))
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, query.name, *given],
        cwd=Path(__file__).parents[2], capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == ("--yes" not in given), done.stderr
    assert done.stderr.splitlines()[-1] == "late:", done.stderr
