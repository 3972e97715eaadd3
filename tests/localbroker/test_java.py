"""Finding Java: which one wins, and the sentence when there is none that will do."""

from __future__ import annotations

from pathlib import Path

import pytest

from rocketmq_spark.errors import LocalBrokerError
from rocketmq_spark.localbroker.java import find_java


def _fake_java(folder: Path, version: str, release: str | None = None) -> Path:
    (folder / "bin").mkdir(parents=True)
    java = folder / "bin" / "java"
    java.write_text(f"#!/bin/sh\necho 'openjdk version \"{version}\" 2024-01-16' >&2\n")
    java.chmod(0o755)
    if release is not None:
        (folder / "release").write_text(release)
    return java


@pytest.mark.parametrize(("version", "major"), [("17.0.15", 17), ("21", 21), ("26-ea", 26)])
def test_java_on_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: str, major: int) -> None:
    java = _fake_java(tmp_path, version)
    monkeypatch.delenv("JAVA_HOME", raising=False)
    monkeypatch.setenv("PATH", f"{java.parent}:/usr/bin:/bin")
    found = find_java()
    assert (found.path, found.major_version) == (java, major)


def test_java_home_wins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home, other = _fake_java(tmp_path / "a", "17"), _fake_java(tmp_path / "b", "21")
    monkeypatch.setenv("JAVA_HOME", str(tmp_path / "a"))
    monkeypatch.setenv("PATH", f"{other.parent}:/usr/bin:/bin")
    assert find_java().path == home


def test_release_file_is_enough(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    java = _fake_java(tmp_path, "1.0", 'JAVA_VERSION="17.0.2"\n')
    java.write_text("#!/bin/sh\nexit 9\n")
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    assert find_java().major_version == 17


def test_old_java_is_refused_with_a_way_to_get_a_new_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    java = _fake_java(tmp_path, "1.8.0_402")
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    with pytest.raises(LocalBrokerError) as e:
        find_java()
    first_line = str(e.value).splitlines()[0]
    assert f"Java 17 or newer is needed, but {java} is Java 8" in first_line
    assert "apt install" in first_line


def test_no_java(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("JAVA_HOME", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(LocalBrokerError, match=r"there is none: no java on PATH, JAVA_HOME is not set\. Install"):
        find_java()


def test_wrong_java_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    with pytest.raises(LocalBrokerError, match=r"JAVA_HOME is .*, but there is no bin/java in it\. Install"):
        find_java()


def test_a_java_that_says_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _fake_java(tmp_path, "?").write_text("#!/bin/sh\nexit 1\n")
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    with pytest.raises(LocalBrokerError, match=r"reports no Java version"):
        find_java()
