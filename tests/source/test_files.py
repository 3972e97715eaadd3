"""Folders by path and by address."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from pyarrow.fs import LocalFileSystem, SubTreeFileSystem

from rocketmq_spark.errors import OffsetError
from rocketmq_spark.spark.checkpoints import files
from rocketmq_spark.spark.checkpoints.files import Folder, open_folder


@pytest.fixture(params=["path", "address"])
def name(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A folder with a file in it and one below."""
    made = tmp_path / "made"
    (made / "a").mkdir(parents=True)
    (made / "top").write_text("one")
    (made / "a" / "1").write_text("two")
    return str(made) if request.param == "path" else made.as_uri()


def test_what_is_there_and_when_it_was_changed(name: str, tmp_path: Path) -> None:
    found = open_folder(name)
    assert (found.exists(), found.exists("a"), found.exists("top"), found.exists("b")) == (True, True, False, False)
    assert set(found.files(recursive=True)) == {"top", "a/1"}
    assert (set(found.files()), set(found.files("a")), found.files("b")) == ({"top"}, {"a/1"}, {})
    assert found.files()["top"] == (tmp_path / "made" / "top").stat().st_mtime_ns // 1_000_000
    assert found.read("a/1") == "two"


def test_a_copy_beside_it_and_what_is_deleted(name: str, tmp_path: Path) -> None:
    found = open_folder(name)
    copied = found.copy(["a/1", "top"], "kept")
    assert copied.name == name[: -len("made")] + "kept"
    found.delete(["a/1"])
    assert set(found.files(recursive=True)) == {"top"}
    assert (tmp_path / "kept" / "a" / "1").read_text() == copied.read("a/1") == "two"


def test_what_goes_wrong_names_the_folder(name: str) -> None:
    with pytest.raises(OffsetError, match=rf"{name}: .*No such file"):
        open_folder(name).read("b")
    with pytest.raises(OffsetError, match="odd://x cannot be reached"):
        open_folder("odd://x")


@pytest.mark.parametrize("planted", ["link", "folder", "pipe"])
def test_only_regular_files_of_the_folder_are_read(name: str, tmp_path: Path, planted: str) -> None:
    """Another user may own the folder, and a link of that user may lead to a file that only root may read."""
    (tmp_path / "secret").mkdir()
    (tmp_path / "secret" / "1").write_text("token")
    made = tmp_path / "made"
    if planted == "folder":
        (made / "a").rename(tmp_path / "before")
        (made / "a").symlink_to(tmp_path / "secret")
    else:
        (made / "a" / "1").unlink()
        os.mkfifo(made / "a" / "1") if planted == "pipe" else (made / "a" / "1").symlink_to(tmp_path / "secret" / "1")
    problem = "it is no file.*a/1" if planted == "pipe" else "a/1 is not read: .* is a link.*Replace the link"
    for read in (open_folder(name).read, open_folder(name).read_bytes):
        with pytest.raises(OffsetError, match=problem):
            read("a/1")


@pytest.mark.parametrize("place", ["a/1", "a"])
def test_links_are_not_listed(name: str, tmp_path: Path, place: str) -> None:
    """A link of another user shows when a file was changed, and which names are in a folder that only root may read."""
    (tmp_path / "secret").mkdir()
    (tmp_path / "secret" / "7").write_text("token")
    link = tmp_path / "made" / place
    link.rename(tmp_path / "before")
    link.symlink_to(tmp_path / "secret" / "7" if place == "a/1" else tmp_path / "secret")
    found = open_folder(name)
    with pytest.raises(OffsetError, match=rf"is not read: {place} is a link|is not read: .* is a link"):
        found.files("a")
    with pytest.raises(OffsetError, match="is a link"):
        found.files(recursive=True)
    if place == "a":
        for look in (found.exists, found.folders):
            with pytest.raises(OffsetError, match="is a link"):
                look("a")


@pytest.mark.parametrize("is_local", [True, False])
def test_a_file_of_more_bytes_than_the_limit_is_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_local: bool
) -> None:
    monkeypatch.setattr(files, "_MAX_FILE_BYTES", 1 << 20)
    remote = Folder("other://made", SubTreeFileSystem(str(tmp_path), LocalFileSystem()), "")
    read = (open_folder(str(tmp_path)) if is_local else remote).read_bytes
    (tmp_path / "a").write_bytes(bytes(1 << 20))
    assert read("a") == bytes(1 << 20)
    os.truncate(tmp_path / "a", (1 << 20) + 1)
    with pytest.raises(OffsetError, match="/a is not read: it has more than 1 MiB, the limit"):
        read("a")


@pytest.mark.parametrize(
    ("given", "real"), [(".", "made/a"), ("..", "made"), ("../a/.", "made/a"), ("~", "made/a"), ("./", "made/a")]
)
def test_one_that_is_named_from_inside_has_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: str, real: str
) -> None:
    """Backups are made beside it, and begin with its name."""
    (tmp_path / "made" / "a").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "made" / "a")
    monkeypatch.setenv("HOME", str(tmp_path / "made" / "a"))
    assert open_folder(given).name == str(tmp_path.resolve() / real)
