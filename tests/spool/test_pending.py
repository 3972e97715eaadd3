"""Pending records are found by target, also those that earlier releases wrote. Real RocksDB."""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rocketmq_spark.errors import SpoolError
from rocketmq_spark.spool import pending as pending_module
from rocketmq_spark.spool.database import Database
from rocketmq_spark.spool.pending import is_indexed
from rocketmq_spark.spool.records import (
    IDENTITY,
    MARK,
    PENDING,
    RECORD,
    TOTALS,
    UNINDEXED,
    VERSION,
    Done,
    Due,
    PendingKey,
    Record,
    RecordState,
    RetryLater,
    Totals,
    area_end,
    record_key,
)
from rocketmq_spark.spool.spool import SpoolReading
from rocketmq_spark.spool.store import Store
from rocketmq_spark.spool.turns import Admission, Window
from tests.spool.bench import database, record

LATER = 10**13


def payloads(store: Store, **limits: Any) -> list[bytes]:
    return [work.record.payload for work in store.take(LATER, limits.pop("limit", 99), **limits)]


# --- folders of earlier releases

# Written by a program on commit 10152a1e, whose format is that of 0.1.0: sends to two topics and to one queue, a delayed message
# that failed and one that was not tried, a dead letter.
EARLIER = json.loads((Path(__file__).parent / "earlier_release.json").read_text())


@pytest.fixture
def earlier(tmp_path: Path) -> Path:
    path = tmp_path / "s"
    with contextlib.closing(Database(path)) as db:
        db.write([(bytes.fromhex(key), bytes.fromhex(value)) for key, value in EARLIER["entries"].items()])
    return path


def places(path: Path) -> list[tuple[object, ...]]:
    """What a look shows: sequence, standing, due time and state."""
    with contextlib.closing(SpoolReading(path)) as reading:
        assert reading.first_due_ms == 2002
        return [(each.sequence, each.standing, each.due_ms, each.state, each.record) for each in reading.entries()]


def test_folder_of_earlier_release_is_indexed_and_shows_same(earlier: Path) -> None:
    before = places(earlier)
    assert [[due, number] for number, standing, due, *_ in before if standing == "pending"] == EARLIER["pending"]
    store = Store(earlier, "never")
    assert places(earlier) == before
    assert is_indexed(database(store))
    found = {
        PendingKey.parse(key)[:2]: due
        for key, _ in database(store).scan(PENDING, area_end(PENDING))
        for due in [key[-1]]
    }
    assert found == {
        ("topic t", True): 1,
        ("broker broker-a", True): 3,
        ("topic u", True): 7,
        ("topic d", True): 8,
        ("topic d", False): 9,
        ("", False): 10,
    }
    assert store.drop_records([(IDENTITY, (2009).to_bytes(8) + b"%016d" % 9)]) == 1, "marks find their records"
    taken = store.take(LATER, 99)
    assert [work.due.sequence for work in taken] == [3, 6, 7, 10, 8, 1]
    assert [work.state.tries for work in taken] == [0, 0, 0, 0, 1, 1]
    store.close()


def test_old_releases_reject_only_folders_with_pending_records(earlier: Path) -> None:
    """They read totals of version 1 only."""
    store = Store(earlier, "never")
    versions = [(database(store).get(TOTALS) or b"")[0]]
    while works := store.take(LATER, 1):
        store.settle([(work, Done()) for work in works], 0)
        versions.append((database(store).get(TOTALS) or b"")[0])
    assert versions == [2] * 9 + [VERSION]
    assert store.totals.dead == 1
    store.close()


def test_kill_at_any_write_of_upgrade_loses_and_doubles_nothing(
    earlier: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(pending_module, "PORTION_KEYS", 2)
    before, write, states = places(earlier), Database.write, []

    def killed(db: Database, *args: Any, **kwargs: Any) -> None:
        write(db, *args, **kwargs)
        raise SpoolError("killed")

    for _ in range(4):
        with monkeypatch.context() as patched:
            patched.setattr(Database, "write", killed)
            with pytest.raises(SpoolError, match="killed"):
                Store(earlier, "never")
        with contextlib.closing(Database(earlier)) as db:
            left = [key for key, _ in db.scan(UNINDEXED, area_end(UNINDEXED))]
            states.append((len(left), (db.get(TOTALS) or b"")[0]))
        assert places(earlier) == before
    assert states == [(5, 2), (3, 2), (1, 2), (0, 2)], "no earlier release uses it from the first write on"
    store = Store(earlier, "never")
    assert (store.damage_count, len(payloads(store))) == (0, 7)
    store.close()


@pytest.mark.parametrize("by", ["damage", "a repair of the earlier release"])
def test_folder_needing_repair_gets_it_after_killed_upgrade(
    earlier: Path, monkeypatch: pytest.MonkeyPatch, by: str
) -> None:
    """A repair of an earlier release makes all records pending again, and does not find the places that have a target."""
    with contextlib.closing(Database(earlier)) as db:
        if by == "damage":
            db.write([], [TOTALS, Due(2005, 6).mark_value])
        else:
            db.write([(PendingKey("topic t", True, Due(1, 6)).encoded, RecordState(0, 0).encode())])
    write = Database.write

    def killed(db: Database, *args: Any, **kwargs: Any) -> None:
        write(db, *args, **kwargs)
        raise SpoolError("killed")

    with monkeypatch.context() as patched:
        patched.setattr(Database, "write", killed)
        with pytest.raises(SpoolError, match="killed"):
            Store(earlier, "never")
    store = Store(earlier, "never")
    assert store.damage_count == 1
    assert sorted(work.due.sequence for work in store.take(LATER, 99)) == [1, 3, 6, 7, 8, 9, 10]
    store.close()


# --- by target


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with contextlib.closing(Store(tmp_path / "s", "never")) as one:
        yield one


def test_a_sweep_reads_as_many_targets_as_it_takes(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    store.add([(record(b"%d" % i, target=f"topic {i}"), i) for i in range(500)])
    scans, scan = [], Database.scan
    monkeypatch.setattr(Database, "scan", lambda db, *given: scans.append(given) or scan(db, *given))
    away = {f"topic {i}": Window(1, 1, LATER + 1) for i in range(100)}
    turns = Admission(away, {f"topic {i}" for i in range(500)} - away.keys(), 99, LATER)
    assert payloads(store, limit=7, admission=turns) == [b"%d" % i for i in range(100, 107)]
    assert (store.next_due_ms(turns.refused_targets), store.next_due_ms()) == (107, 0)
    assert len(scans) == 7


def test_record_made_pending_again_during_sweep_is_not_skipped(store: Store) -> None:
    """The head of a lane cannot be read; the next one of the lane is due before the records that the sweep has read ahead."""
    store.add([(record(b"1", "k", "t", b"l"), 1), (record(b"2", "k", "t", b"l"), 1), (record(b"3", target="t"), 9)])
    database(store).write([(b"r" + (1).to_bytes(8), b"damaged")])
    assert [work.record.payload for work in store.take(9, 99)] == [b"2", b"3"]
    assert store.next_due_ms() is None


def test_a_lane_behind_a_damaged_record_continues_in_the_sweep(store: Store) -> None:
    """The next record of the lane becomes pending during the sweep, and is due after records that the sweep has read ahead."""
    store.add([(record(b"1", target="t", lane=b"l"), 1), (record(b"2", target="t", lane=b"l"), 1)])
    store.add([(record(b"3", target="t"), 3), (record(b"4", target="t"), 4)])
    store.close()
    with contextlib.closing(Database(store.path)) as db:
        db.write([(record_key(RECORD, 1), b"damaged")])
    with contextlib.closing(Store(store.path, "never")) as again:
        assert payloads(again) == [b"3", b"4", b"2"]
        assert again.next_due_ms() is None


def test_an_error_between_two_records_of_a_sweep_passes_none(store: Store) -> None:
    store.add([(record(b"%d" % i, target="t", lane=b"l" if i == 2 else b""), i) for i in range(4)])

    def fails(first: Record) -> Any:
        if first.payload == b"2":
            raise ZeroDivisionError("a bug")
        return lambda other: False

    with pytest.raises(ZeroDivisionError):
        store.take(LATER, 99, predicate=fails)
    assert payloads(store) == [b"0", b"1", b"2", b"3"]


def test_first_due_time_is_known_after_first_record_is_dropped(store: Store) -> None:
    marks = [((IDENTITY, i.to_bytes(8) + b"id"),) for i in range(3)]
    store.add([(Record("k", b"%d" % i, 0, "t", marks=marks[i]), i) for i in range(3)])
    assert store.next_due_ms() == 0
    store.drop_records(marks[0])
    assert store.next_due_ms() == 1
    store.drop_records(marks[1])
    assert payloads(store) == [b"2"]
    assert store.next_due_ms() is None


def test_delayed_message_is_untouched_when_its_target_answers(store: Store) -> None:
    """A node may hold a million of them, and few that failed."""
    marked = [Record("k", b"%d" % i, 0, "t", marks=((IDENTITY, (1000 * i).to_bytes(8) + b"id"),)) for i in range(1, 4)]
    store.add([(each, 1000 * i) for i, each in enumerate(marked, 1)])
    (first,) = store.take(1000, 9)
    store.settle([(first, RetryLater(9000, "down"))], 1000)
    assert store.make_due("t", None, 1, 1500) is None, "it was one record"
    assert [(work.record.payload, work.due.due_ms) for work in store.take(LATER, 9)] == [
        (b"1", 1500),
        (b"2", 2000),
        (b"3", 3000),
    ]
    assert len(list(database(store).scan(MARK, area_end(MARK)))) == 3


def test_totals_without_places_are_those_of_an_empty_store(tmp_path: Path) -> None:
    """An earlier release may have used the folder meanwhile."""
    with contextlib.closing(Database(tmp_path)) as db:
        db.write([(TOTALS, Totals(7).encode())])
    with contextlib.closing(Store(tmp_path, "never")) as one:
        assert (one.damage_count, one.totals.next_sequence) == (0, 7)


def test_memory_does_not_grow_with_records_that_pass(store: Store) -> None:
    """One record of a target is due later; many others come and go before it."""
    store.add([(record(b"late", target="t"), LATER)])
    for number in range(200):
        store.add([(record(b"soon", target="t"), number)])
        (work,) = store.take(number, 1)
        store.settle([(work, Done())], number)
    assert store.next_due_ms() == LATER
    assert len(store._pending._heap) <= 3
