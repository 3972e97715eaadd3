"""Folders by path and by address."""

from __future__ import annotations

from pathlib import Path

import pytest

from rocketmq_spark.errors import OffsetError
from rocketmq_spark.spark.checkpoints.files import open_folder


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
