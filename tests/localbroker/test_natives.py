"""RocksDB's machine code: unpacked once, and never in the way."""

from __future__ import annotations

import platform
import zipfile
from pathlib import Path

import pytest

from rocketmq_spark.localbroker import distro

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
    assert distro.native_flags([tmp_path / "other.jar", jar], tmp_path / "natives") == wanted
    [file] = (tmp_path / "natives" / "rocketmq-rocksdb-1.0.6").iterdir()
    assert (file.name, file.read_bytes()) == (CODE, b"code")
    file.write_bytes(b"as it was")
    assert distro.native_flags([jar], tmp_path / "natives") == wanted
    assert file.read_bytes() == b"as it was"


def test_brokers_unpack_it_themselves_where_this_cannot(
    tmp_path: Path, jar: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert distro.native_flags([tmp_path / "other.jar"], tmp_path / "natives") == ()
    (tmp_path / "file").write_text("in the way")
    assert distro.native_flags([jar], tmp_path / "file") == ()
    jar.write_bytes(b"no archive")
    assert distro.native_flags([jar], tmp_path / "natives") == ()
    monkeypatch.setattr(platform, "machine", lambda: "s390x")
    assert distro.native_flags([jar], tmp_path / "natives") == ()
