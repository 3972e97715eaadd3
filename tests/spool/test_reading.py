"""What tools see of a spool while its process goes on."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from rocketmq_spark.errors import SpoolError
from rocketmq_spark.spool.database import Damaged
from rocketmq_spark.spool.records import RECORD, Dead, Record, record_key
from rocketmq_spark.spool.spool import SpoolReading
from rocketmq_spark.spool.store import Store
from tests.spool.bench import database, record


def test_open_store_lists_entries_as_pending_behind_or_dead(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.add([(record(b"%d" % i, lane=b"l" if i < 3 else b""), 10 - i) for i in range(5)])
    store.settle([(work, Dead("no")) for work in store.take(6, 1)], 7)
    reading = SpoolReading(tmp_path)
    found = [(entry.sequence, entry.standing, entry.due_ms) for entry in reading.entries()]
    assert found == [(4, "pending", 7), (1, "pending", 10), (2, "behind", None), (3, "behind", None), (5, "dead", None)]
    assert (reading.totals, reading.first_due_ms) == (store.totals, 7)
    reading.close()
    store.add([(record(b"goes on"), 1)])
    store.close()


def test_what_cannot_be_read_is_told_as_such(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.add([(record(b"x"), 1)])
    database(store).write([(record_key(RECORD, 1), b"?")])
    reading = SpoolReading(tmp_path)
    ((entry),) = reading.entries()
    assert "cannot be read" in str(entry.record)
    reading.close()
    store.close()


def test_reading_makes_no_folder(tmp_path: Path) -> None:
    with pytest.raises(SpoolError, match="there is no spool"):
        SpoolReading(tmp_path / "s")
    assert not (tmp_path / "s").exists()


def test_what_a_running_process_changes_meanwhile_is_no_damage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It deletes a file between two steps of the opening, or is within a write."""
    store = Store(tmp_path)
    store.add([(record(b"x"), 1)])
    (log,) = tmp_path.glob("*.log")
    whole, pauses = log.read_bytes(), []

    def written(seconds: float) -> None:
        pauses.append(seconds)
        log.write_bytes(whole)

    log.write_bytes(whole[:-1])
    monkeypatch.setattr(time, "sleep", written)
    reading = SpoolReading(tmp_path)
    assert [entry.sequence for entry in reading.entries()] == [1]
    assert (len(pauses), reading.is_damaged, caplog.text) == (1, False, "")
    reading.close()
    store.close()


def payloads(path: Path) -> list[bytes]:
    reading = SpoolReading(path)
    try:
        return [entry.record.payload for entry in reading.entries() if isinstance(entry.record, Record)]
    finally:
        reading.close()


@pytest.mark.parametrize(
    ("rests", "shown"),
    [
        (("whole", "leaving"), b"other"),
        (("whole",), None),
        (("leaving",), b"shown"),
        (("salvaged",), b"shown"),
        (("copy",), b"shown"),
        (("salvaged", "copy", "leaving"), b"shown"),
        (("salvaged", "copy", "whole", "leaving"), b"other"),
    ],
)
def test_a_look_shows_the_database_that_is_sent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rests: tuple[str, ...], shown: bytes | None
) -> None:
    """Of an earlier repair, folders may be left, and who owns the spool may put some there."""
    monkeypatch.setattr(time, "sleep", lambda _: None)
    spool = tmp_path / "worker-1"
    for path, payload in ((spool, b"shown"), *((spool / name, b"other") for name in rests if name != "leaving")):
        store = Store(path)
        store.add([(record(payload), 1)])
        store.close()
        if path != spool:
            (path / "LOCK").unlink()
    if "leaving" in rests:
        (spool / "leaving").mkdir()
    before = sorted(spool.rglob("*"))
    if shown is None:
        with pytest.raises(Damaged, match="an earlier repair of it has not ended") as refused:
            SpoolReading(spool)
        assert "spool repair" in str(refused.value.remedy)
    else:
        assert payloads(spool) == [shown]
    assert {each for each in spool.rglob("*") if each.name != "LOG" and ".old" not in each.name} <= {*before}
    Store(spool).close()
    assert payloads(spool) == [shown or b"other"]


def test_damage_of_what_is_not_shown_is_told_as_well(tmp_path: Path) -> None:
    """The repair after it may bring records back that were not shown."""
    store = Store(tmp_path)
    first, note = os.urandom(1 << 16), os.urandom(1 << 16)  # larger than a block
    store.add([(record(b"x"), 1)], {b"1": first, b"2": note})
    store.close()
    (table,) = (each for each in tmp_path.glob("*.sst") if note[-99:] in each.read_bytes())
    data = bytearray(table.read_bytes())
    data[data.index(note[-99:])] ^= 1
    table.write_bytes(data)
    reading = SpoolReading(tmp_path)
    assert len(list(reading.entries())) == 1
    assert reading.is_damaged
    reading.close()
    store = Store(tmp_path)
    store.verify()
    assert (store.damage_count, len(store), store.notes()) == (1, 1, {b"1": first})
    store.close()
    assert payloads(tmp_path) == [b"x"]
