"""Any file of a store is damaged in any place: what can be read is kept, and what is lost is counted."""

from __future__ import annotations

import errno
import itertools
import os
import random
import re
import shutil
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from rocketmq_spark.errors import SpoolError, SpoolFull
from rocketmq_spark.spool.database import Damaged, is_database
from rocketmq_spark.spool.files import BLOCK_BYTES
from rocketmq_spark.spool.recovery import salvage
from rocketmq_spark.spool.spool import SpoolReading
from rocketmq_spark.spool.store import Store
from tests.helpers import raising
from tests.spool.test_recovery import COUNT, drained, filled, settled


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store of two tables, the second of which is due later, and a log."""
    path = tmp_path_factory.mktemp("whole") / "store"
    filled(path, flush=True)
    filled(path, flush=True)
    filled(path)
    return path


@pytest.mark.parametrize("seed", range(10))
def test_any_damage_of_any_file_loses_little_and_says_so(
    whole: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, seed: int
) -> None:
    """A flipped bit, a cut, or a file that has gone: nothing comes twice that was not there twice, and nobody is stopped."""
    rng = random.Random(seed)
    for number in range(5):
        caplog.clear()
        path = tmp_path / str(number)
        shutil.copytree(whole, path)
        files = [
            file for file in path.iterdir() if file.stat().st_size and file.suffix != ".json" and file.name != "LOG"
        ]
        file = rng.choice(sorted(file for file in files if not file.name.startswith(("OPTIONS", "IDENTITY"))))
        data, how = bytearray(file.read_bytes()), rng.choice(["flip", "flip", "flip", "cut", "gone"])
        at = rng.randrange(len(data))
        data[at] ^= 1 << rng.randrange(8)
        file.unlink()
        if how != "gone":
            file.write_bytes(data if how == "flip" else data[:at])
        case = f"{how} {file.name} at {at} of {len(data)}, seed {seed}"
        store = Store(path, sync="never")
        given, errors = settled(store)
        assert errors <= 1, case
        assert not store.totals.depth, case
        assert not store.totals.dead, case
        store.close()
        found = Counter(given)
        assert set(found) <= set(range(COUNT)), case
        assert max(found.values(), default=0) <= 3, case
        lost = 3 * COUNT - found.total()
        assert lost <= COUNT, case
        table = file.suffix == ".sst" and how == "flip"
        if table and at < 0.9 * len(data):
            assert lost < 60, case
        text = caplog.text.replace("an unknown number, perhaps none,", "at least 0")
        said = re.findall(r"records are there, (at least )?(\d+) are lost", text)
        if lost and how != "cut" and not (how == "gone" and file.suffix == ".log"):
            assert said, case
            assert (said[-1][0] and int(said[-1][1]) <= lost) or int(said[-1][1]) == lost, (case, said, lost)


def record_places(data: bytes) -> list[int]:
    """Where the records of a log or a manifest begin."""
    places, at = [], 0
    while at + 7 <= len(data):
        if BLOCK_BYTES - at % BLOCK_BYTES < 7:
            at += BLOCK_BYTES - at % BLOCK_BYTES
            continue
        places.append(at)
        at += 7 + int.from_bytes(data[at + 4 : at + 6], "little")
    return places


@pytest.mark.parametrize("kind", ["*.log", "MANIFEST-*"])
def test_one_flipped_byte_of_a_records_head_loses_nothing(
    whole: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, kind: str
) -> None:
    """RocksDB waits for ever for some of them, and leaves out the rest of the file, or a table, for others."""
    (file,) = whole.glob(kind)
    data = file.read_bytes()
    places = record_places(data)
    rng, number = random.Random(kind), itertools.count()
    for place in {places[0], places[1], rng.choice(places), places[-2], places[-1]}:
        for at, bit in ((place + 6, 4), (place + 6, 1 << rng.randrange(8)), (place + 4, 1), (place + 5, 0x40)):
            path = tmp_path / f"{place}-{at}-{bit}-{next(number)}"
            shutil.copytree(whole, path)
            broken = bytearray(data)
            broken[at] ^= bit
            (path / file.name).write_bytes(broken)
            case = f"{file.name}: record at {place}, byte {at - place} is {broken[at]} instead of {data[at]}"
            reading = SpoolReading(path)
            shown = sum(1 for _ in reading.entries())
            is_damaged = reading.is_damaged
            reading.close()
            # Of one type that is one of RocksDB's own the checksum says that it is wrong, and not what it was.
            unmended = broken[place + 6] in (1, 2, 3, 4) and at == place + 6
            caplog.clear()
            found = len(drained(path))
            assert "was repaired" in caplog.text, case
            if not unmended:
                assert (shown, is_damaged, found) == (3 * COUNT, False, 3 * COUNT), case
                assert " 0 are lost" in caplog.text, case
                assert "at least" not in caplog.text, case


def test_a_salvage_that_was_cut_off_is_finished_or_begun_again(
    whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed before or after any step: the next one to open the folder has all of it, and a look shows that, or is an error."""
    steps, rename, shown = 0, Path.rename, []
    monkeypatch.setattr(time, "sleep", lambda _: None)
    while True:
        path = tmp_path / f"of-{steps}"
        shutil.copytree(whole, path)
        left = iter(range(steps))
        done = False

        def cut(self: Path, target: Path, left: Iterator[int] = left) -> Path:
            if next(left, None) is None:
                raise KeyboardInterrupt
            return rename(self, target)

        with monkeypatch.context() as patched:
            patched.setattr(Path, "rename", cut)
            try:
                salvage(path)
                done = True
            except KeyboardInterrupt:
                pass
        assert is_database(path), steps
        try:
            reading = SpoolReading(path)
            shown.append((sum(1 for _ in reading.entries()), reading.is_damaged))
            reading.close()
        except Damaged:
            shown.append((-1, True))
        assert len(drained(path)) == 3 * COUNT, steps
        if done:
            break
        steps += 1
    assert steps > 10
    assert {*shown} == {(3 * COUNT, False), (-1, True)}
    assert (shown[1], shown[-1]) == ((3 * COUNT, False), (3 * COUNT, False))
    assert not [each for each in path.iterdir() if each.is_dir() and each.name != "damaged-1"]


def test_names_of_removed_damaged_folders_are_reused(whole: Path, tmp_path: Path) -> None:
    whole = shutil.copytree(whole, tmp_path / "store")
    kept = [salvage(whole).folder.name for _ in range(2)]
    shutil.rmtree(whole / "damaged-1")
    kept += [salvage(whole).folder.name for _ in range(2)]
    assert kept == ["damaged-1", "damaged-2", "damaged-1", "damaged-3"]


def test_salvage_on_full_disk_raises_error_and_next_try_succeeds(
    whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = shutil.copytree(whole, tmp_path / "store")
    with monkeypatch.context() as full:
        full.setattr(Path, "rename", raising(OSError(errno.ENOSPC, "No space left on device")))
        with pytest.raises(SpoolFull, match=r"could not be put together again.*No space left"):
            salvage(whole)
    salvage(whole)
    assert len(drained(whole)) == 3 * COUNT


def test_a_folder_that_takes_no_lock_is_an_error_of_the_spool(
    whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = shutil.copytree(whole, tmp_path / "store")
    with monkeypatch.context() as read_only:
        read_only.setattr(os, "open", raising(OSError(errno.EROFS, "Read-only file system")))
        with pytest.raises(SpoolError, match=r"could not be put together again.*Read-only"):
            salvage(whole)
    salvage(whole)


def test_unreadable_folder_is_reported_as_spool_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as gone:
        gone.setattr(Path, "exists", raising(OSError(errno.EIO, "Input/output error")))
        with pytest.raises(SpoolError, match=r"cannot be read.*Input/output error"):
            Store(tmp_path / "store")


def test_manifest_cut_within_record_loses_no_table(
    whole: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """RocksDB takes it for what a kill left, and deletes the table that the record names."""
    (manifest,) = whole.glob("MANIFEST-*")
    data = manifest.read_bytes()
    places = record_places(data)[1:]
    assert len(places) > 2
    for number, place in enumerate(places):
        path = shutil.copytree(whole, tmp_path / str(number))
        (path / manifest.name).write_bytes(data[: place + 9])
        caplog.clear()
        assert Counter(drained(path)) == dict.fromkeys(range(COUNT), 3)
        assert "records are there, an unknown number, perhaps none, are lost" in caplog.text


def test_a_log_that_has_gone_is_damage(whole: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """RocksDB begins a new one without a word."""
    path = shutil.copytree(whole, tmp_path / "store")
    for log in path.glob("*.log"):
        log.unlink()
    reading = SpoolReading(path)
    assert (sum(1 for _ in reading.entries()), reading.is_damaged) == (2 * COUNT, True)
    reading.close()
    assert Counter(drained(path)) == dict.fromkeys(range(COUNT), 2)
    assert "is damaged: its log is gone" in caplog.text
    assert f"{2 * COUNT} records are there, an unknown number, perhaps none, are lost" in caplog.text
    caplog.clear()
    assert drained(path) == []
    assert not caplog.text


@pytest.mark.parametrize(
    "content", [b"", bytes(16), b"MANIFEST-00002\0\n", b"MANIFEST-\n", b"\xff" * 16, b"MANIFEST-999999\n"]
)
def test_a_file_current_that_names_nothing_is_damage(whole: Path, tmp_path: Path, content: bytes) -> None:
    path = shutil.copytree(whole, tmp_path / "store")
    (path / "CURRENT").write_bytes(content)
    assert Counter(drained(path)) == dict.fromkeys(range(COUNT), 3)
    assert (path / "damaged-1" / "CURRENT").read_bytes() == content
