"""What tools see of a spool while its process goes on."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from rocketmq_spark.errors import SpoolError
from rocketmq_spark.spool.records import RECORD, Dead, numbered
from rocketmq_spark.spool.spool import SpoolReading
from rocketmq_spark.spool.store import Store
from tests.spool.bench import record


def test_entries_are_pending_behind_and_dead_while_the_store_is_open(tmp_path: Path) -> None:
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
    store._db.write([(numbered(RECORD, 1), b"?")])
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
