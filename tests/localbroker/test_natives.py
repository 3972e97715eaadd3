"""RocksDB's machine code: unpacked once, and never in the way."""

from __future__ import annotations

import platform
import stat
import zipfile
from pathlib import Path

import pytest

from rocketmq_spark.localbroker import distribution
from tests.users import IS_ROOT, give_away

CODE = "librocksdbjni-linux64.so"


@pytest.fixture(autouse=True)
def _linux(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "system", lambda: "Linux")
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")


@pytest.fixture
def jar(tmp_path: Path) -> Path:
    made = tmp_path / "rocketmq-rocksdb-1.0.6.jar"
    with zipfile.ZipFile(made, "w") as archive:
        archive.writestr(CODE, b"code")
        archive.writestr("librocksdbjni-win64.dll", b"other code")
    return made


def test_unpacked_once(tmp_path: Path, jar: Path) -> None:
    wanted = (f"-Djava.library.path={tmp_path / 'natives' / 'rocketmq-rocksdb-1.0.6'}",)
    assert distribution.native_flags([tmp_path / "other.jar", jar], tmp_path / "natives") == wanted
    [file] = (tmp_path / "natives" / "rocketmq-rocksdb-1.0.6").iterdir()
    assert (file.name, file.read_bytes()) == (CODE, b"code")
    before = file.stat()
    assert distribution.native_flags([jar], tmp_path / "natives") == wanted
    assert file.stat() == before


@pytest.mark.parametrize("change", ["content", "owner", "mode", "link"])
def test_a_file_that_may_not_be_the_jars_is_unpacked_again(
    tmp_path: Path, jar: Path, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    natives = tmp_path / "natives"
    [flag] = distribution.native_flags([jar], natives)
    file = natives / jar.stem / CODE
    before = file.stat().st_ino
    if change == "content":
        file.write_bytes(b"other code")
    elif change == "mode":
        file.chmod(0o666)
    elif change == "link":
        file.rename(tmp_path / "theirs")
        file.symlink_to(tmp_path / "theirs")
        give_away(monkeypatch, tmp_path / "theirs")
    else:
        give_away(monkeypatch, file)
    flags = distribution.native_flags([jar], natives)
    if change in ("owner", "link") and not IS_ROOT:  # the folders are the other user's, too
        assert flags == ()
        return
    assert flags == (flag,)
    assert (file.read_bytes(), stat.S_IMODE(file.lstat().st_mode)) == (b"code", 0o644)
    assert file.lstat().st_ino != before or change == "content"


@pytest.mark.parametrize("inner", [False, True])
@pytest.mark.parametrize("change", ["owner", "mode"])
def test_a_folder_in_which_others_may_write_is_not_used(
    tmp_path: Path, jar: Path, monkeypatch: pytest.MonkeyPatch, inner: bool, change: str
) -> None:
    natives = tmp_path / "natives"
    assert distribution.native_flags([jar], natives)
    place = natives / jar.stem if inner else natives
    if change == "owner":
        give_away(monkeypatch, place)
    else:
        place.chmod(0o777)
    assert distribution.native_flags([jar], natives) == ()


def test_brokers_unpack_it_themselves_where_this_cannot(
    tmp_path: Path, jar: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert distribution.native_flags([tmp_path / "other.jar"], tmp_path / "natives") == ()
    (tmp_path / "file").write_text("in the way")
    assert distribution.native_flags([jar], tmp_path / "file") == ()
    jar.write_bytes(b"no archive")
    assert distribution.native_flags([jar], tmp_path / "natives") == ()
    monkeypatch.setattr(platform, "machine", lambda: "s390x")
    assert distribution.native_flags([jar], tmp_path / "natives") == ()
