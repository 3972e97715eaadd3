"""G2.10: bytes that fell over on the disk. What can be read is kept, the rest is named."""

from __future__ import annotations

import contextlib
import logging
import subprocess
import sys
from pathlib import Path

import pytest

from rocketmq_spark.errors import SpoolError
from rocketmq_spark.spool.database import Database
from rocketmq_spark.spool.lanes import find_lane
from rocketmq_spark.spool.records import (
    IDENTITY,
    ORDER,
    OWNER,
    PENDING,
    RECORD,
    TOTALS,
    Dead,
    Done,
    Due,
    PendingKey,
    Record,
    RecordState,
    RetryLater,
    SpoolOwner,
    Totals,
    Verdict,
    area_end,
    lane_key,
    record_key,
)
from rocketmq_spark.spool.recovery import SalvageResult, repair
from rocketmq_spark.spool.store import Store
from tests.spool.bench import database, record

COUNT = 300
ROOT = Path(__file__).parents[2]


def place(sequence: int, due_ms: int | None = None) -> PendingKey:
    """Of a record without a target."""
    return PendingKey("", False, Due(sequence if due_ms is None else due_ms, sequence))


def filled(path: Path, flush: bool = False) -> None:
    """By a process that ends without a word, so that a log is left, unless its content is flushed to a table."""
    command = [sys.executable, "-m", "tests.spool.filler", str(path), str(COUNT), "close" if flush else "die"]
    subprocess.run(command, check=True, cwd=ROOT, timeout=60)


def drained(path: Path) -> list[int]:
    """Everything that can be had, in its order."""
    store = Store(path, sync="never")
    found: list[int] = []
    for _ in range(20 * COUNT):
        works = store.take(10**13, 50)
        if not works and store.next_due_ms() is None:
            break
        found += [int(work.record.payload.rstrip(b"x")) for work in works]
        store.settle([(work, Done()) for work in works], 10**13)
    assert len(store) == 0
    assert not store.holds_lane(b"l")
    store.close()
    return found


def damage(file: Path, at: int, count: int = 40) -> None:
    data = bytearray(file.read_bytes())
    for i in range(at, at + count):
        data[i] ^= 0xFF
    file.write_bytes(data)


def test_log_damaged_in_middle_loses_only_records_there(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    filled(tmp_path)
    (log,) = (path for path in tmp_path.glob("*.log") if path.stat().st_size > 1000)
    damage(log, log.stat().st_size // 2)
    found = drained(tmp_path)
    assert len(found) == len(set(found))
    lost = sorted(set(range(COUNT)) - set(found))
    assert 0 < len(lost) < COUNT // 4
    assert lost == list(range(lost[0], lost[-1] + 1)), "one part of the log"
    assert {0, COUNT - 1} <= set(found), "what was written before it and after it is there"
    assert "is damaged: Corruption: checksum mismatch; what can be read is kept" in caplog.text
    assert (
        f"{len(found)} records are there, at least {len(lost)} are lost; the damaged files are kept in" in caplog.text
    )


def test_torn_end_of_the_log_is_what_a_kill_leaves_and_no_damage(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    filled(tmp_path)
    (log,) = (path for path in tmp_path.glob("*.log") if path.stat().st_size > 1000)
    log.write_bytes(log.read_bytes().rstrip(b"\0")[:-50])
    assert sorted(drained(tmp_path)) == list(range(COUNT - 1))
    assert "ends within a write: this write and all later writes are lost, an unknown number" in caplog.text
    assert "damaged" not in caplog.text


def test_one_bad_block_of_a_table_loses_what_stands_in_it(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Also while it is in use: the next call finds a whole store, and says how many records are lost."""
    filled(tmp_path, flush=True)
    (table,) = tmp_path.glob("*.sst")
    store = Store(tmp_path, sync="never")
    data = table.read_bytes()
    at = data.index(b"150xxxx") if b"150xxxx" in data else len(data) // 2
    damage(table, at, 1)
    found, errors = settled(store)
    assert errors == 1
    lost = set(range(COUNT)) - set(found)
    assert len(found) == len(set(found))
    assert 0 < len(lost) < 40
    assert f" records are there, {len(lost)} are lost" in caplog.text
    store.close()


def settled(store: Store) -> tuple[list[int], int]:
    """What a living store gives, and how often it raised."""
    found: list[int] = []
    errors = 0
    for _ in range(20 * COUNT):
        try:
            works = store.take(10**13, 50)
            if not works and store.next_due_ms() is None:
                break
        except SpoolError:
            errors += 1
            assert errors < 5
            continue
        store.settle([(work, Done()) for work in works], 10**13)
        found += [int(work.record.payload.rstrip(b"x")) for work in works]
    return found, errors


def test_repair_drops_orphans_and_makes_records_without_time_due(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = Store(tmp_path)
    store.add([(record(b"%d" % i, lane=b"l" if i in (4, 5) else b""), i) for i in range(1, 7)])
    store.settle([(work, Dead("no")) for work in store.take(1, 1)], 1)
    db = database(store)
    lost = [record_key(RECORD, 2), record_key(RECORD, 4), place(3).encoded, TOTALS]
    db.write([], lost)
    with caplog.at_level(logging.ERROR):
        repair(db)
    assert "4 records are there, 2 are lost, among them those with the numbers 2, 4" in caplog.text
    store.close()
    again = Store(tmp_path)
    assert (len(again), again.totals.dead, again.totals.next_sequence) == (3, 1, 7)
    assert again.totals.dead_bytes == len(record(b"1").encode()), "while there are any, they are nobody else's"
    assert sorted(work.record.payload for work in again.take(100, 10)) == [b"3", b"5", b"6"]
    assert find_lane(database(again), 5) == b"l"
    assert find_lane(database(again), 4) is None
    assert database(again).get(lane_key(b"l", 4)) is None
    assert len(list(database(again).scan(PENDING, area_end(PENDING)))) == 3
    again.close()


@pytest.mark.parametrize("area", [RECORD, PENDING, TOTALS])
def test_finished_record_restored_by_repair_hides_no_lost_record(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, area: bytes
) -> None:
    """One record is lost, and one that was over is there again; a place or a count that was over says nothing of what is lost."""
    store = Store(tmp_path)
    store.add([(record(b"%d" % i), i) for i in range(1, 4)], {b"note": b"all before is stored"})
    before = {key: database(store).get(key) or b"" for key in (record_key(RECORD, 1), place(1).encoded, TOTALS)}
    store.settle([(work, Done()) for work in store.take(1, 1)], 1)
    lost = [record_key(RECORD, 2), place(2).encoded] if area == RECORD else []
    database(store).write([(key, value) for key, value in before.items() if key[:1] == area], lost)
    repair(database(store), SalvageResult(tmp_path / "damaged-1", area != TOTALS, frozenset({area})))
    kept, how_many = (2, "an unknown number, perhaps none,") if area != PENDING else (2, "0")
    assert f"{kept} records are there, {how_many} are lost; the damaged files" in caplog.text
    assert bool(store.notes()) == (area == PENDING), "else what it lost is not read again"
    store.close()


def test_lane_with_restored_record_hands_out_first_one_alone(tmp_path: Path) -> None:
    """A lost block had ended it; the one behind it was the head of the lane by then, and would overtake it."""
    store = Store(tmp_path)
    store.add([(record(b"%d" % i, lane=b"l"), i) for i in range(1, 4)])
    before = {key: database(store).get(key) or b"" for key in (record_key(RECORD, 1), lane_key(b"l", 1))}
    store.settle([(work, Done()) for work in store.take(1, 1)], 1)
    database(store).write(list(before.items()))
    repair(database(store))
    store.close()
    again = Store(tmp_path)
    for payload in (b"1", b"2", b"3"):
        works = again.take(10**13, 10)
        assert [work.record.payload for work in works] == [payload]
        again.settle([(work, Done()) for work in works], 10**13)
    assert len(again) == 0
    again.close()


def test_what_cannot_be_read_waits_in_its_lane_as_well(tmp_path: Path) -> None:
    """Were it due at once, it would go to the dead before its turn, and the one behind it be out beside the head of the lane."""
    store = Store(tmp_path)
    store.add([(record(b"%d" % i, lane=b"l"), i) for i in range(1, 4)])
    database(store).write([(record_key(RECORD, 2), b"damaged")])
    repair(database(store))
    store.close()
    again = Store(tmp_path)
    for payload in (b"1", b"3"):
        (work,) = [work for _ in range(2) for work in again.take(10**13, 10)]
        assert work.record.payload == payload
        again.settle([(work, Done())], 10**13)
    assert (len(again), again.totals.dead) == (0, 1)
    again.close()


def test_a_moved_record_keeps_its_attempts_in_a_repair(tmp_path: Path) -> None:
    """Damage took the first one of its lane."""
    store = Store(tmp_path)
    records = [(record(b"%d" % i, lane=b"l"), i) for i in range(1, 3)]
    store.add(records, states=[RecordState(tries, 0, "down") for tries in (3, 5)])
    store.close()
    with contextlib.closing(Database(tmp_path)) as db:
        db.write([], [record_key(RECORD, 1)])
        repair(db)
    again = Store(tmp_path)
    (work,) = again.take(10**13, 10)
    assert (work.record.payload, work.state.tries) == (b"2", 5)
    again.close()


def test_a_record_has_one_place_whatever_comes_back(tmp_path: Path) -> None:
    """What a lost block had ended: the place before a try that failed, and that of a record that was given up."""
    store = Store(tmp_path)
    store.add([(record(b"%d" % i), i) for i in range(1, 4)])
    before = list(database(store).scan(PENDING, area_end(PENDING)))
    works = store.take(3, 3)
    store.settle([(works[0], RetryLater(100, "busy")), (works[1], Dead("no"))], 5)
    database(store).write(before)
    repair(database(store))
    store.close()
    again = Store(tmp_path)
    assert (len(again), again.totals.dead) == (2, 1)
    assert sorted(work.record.payload for work in again.take(1000, 10)) == [b"1", b"3"]
    again.close()


@pytest.mark.parametrize("known", [True, False], ids=["one of both is left", "none is left"])
def test_damage_gives_records_to_nobody_else(tmp_path: Path, known: bool) -> None:
    store = Store(tmp_path)
    mine, other = SpoolOwner(("a:1",), "n"), SpoolOwner(("b:1",), "m")
    store.set_owner(mine)
    store.add([(record(b"x"), 1)])
    store.close()
    again = Store(tmp_path)
    database(again).write([], OWNER[:1] if known else OWNER)
    database(again).close()
    again._load(SalvageResult(tmp_path / "damaged-1", True))
    with pytest.raises(SpoolError, match="holds records of"):
        again.set_owner(other)
    if known:
        again.set_owner(mine)
    else:
        with pytest.raises(SpoolError, match=r"an owner that a damaged block named"):
            again.set_owner(mine)
        again.set_owner(mine, force=True)
        again.set_owner(mine)
    again.close()


def test_a_store_without_totals_is_mended(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    store = Store(tmp_path)
    store.add([(record(b"x"), 1)] * 3)
    database(store).write([], [TOTALS])
    store.close()
    again = Store(tmp_path)
    assert (len(again), again.totals.next_sequence) == (3, 4)
    assert "was repaired" in caplog.text
    again.close()


def test_record_naming_its_due_time_is_not_early_after_damage(tmp_path: Path) -> None:
    store = Store(tmp_path)
    identity = (5000).to_bytes(8) + b"of one message"
    store.add([(Record("delayed", b"1", 1000, marks=((IDENTITY, identity),)), 5000), (record(b"2"), 9000)])
    database(store).write([], [place(1, 5000).encoded, place(2, 9000).encoded, TOTALS])
    store.close()
    again = Store(tmp_path)
    assert [work.record.payload for work in again.take(4999, 10)] == [b"2"], "of that one nothing is known"
    assert [work.record.payload for work in again.take(5000, 10)] == [b"1"]
    again.close()


def test_a_store_of_another_release_is_an_error_of_the_spool(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.add([(record(b"1"), 1)])
    database(store).write([(TOTALS, b"\x09" + Totals().encode()[1:])])
    store.close()
    with pytest.raises(SpoolError, match=r"cannot be opened: totals of version 9.*Use the release that wrote it"):
        Store(tmp_path)


@pytest.mark.parametrize("lane", [b"", b"l"])
@pytest.mark.parametrize("verdict", [Done(), RetryLater(9000, "busy"), Dead("no")])
@pytest.mark.parametrize("gone", ["records", "due times", "all"])
def test_records_leased_when_damage_is_found_end_normally(
    tmp_path: Path, lane: bytes, verdict: Verdict, gone: str
) -> None:
    """Its outcome comes when other records may have its place: they are neither counted out nor deleted by it."""
    store = Store(tmp_path, sync="never")
    store.add([(record(b"%d" % i, lane=lane), 1000) for i in range(4)])
    out = store.take(2000, 2)
    areas = {"records": [RECORD], "due times": [PENDING], "all": [RECORD, PENDING, ORDER, TOTALS]}[gone]
    keys = [key for area in areas for key, _ in database(store).scan(area, area_end(area))]
    database(store).write([], [*keys, TOTALS])
    store._has_failed = store._is_damaged = True
    store.add([(record(b"new", lane=lane), 1000)])
    store.settle([(work, verdict) for work in out], 3000)
    assert store.totals.depth >= 0
    found: list[bytes] = []
    while works := store.take(10_000, 10):
        found += [work.record.payload for work in works]
        store.settle([(work, Done()) for work in works], 10_000)
    assert found.count(b"new") == 1
    left = [b"new"] if gone != "due times" else [b"0", b"1", b"2", b"3", b"new"]
    ended = [work.record.payload for work in out] if not isinstance(verdict, RetryLater) and gone == "due times" else []
    assert sorted(found) == sorted(set(left) - set(ended))
    assert (store.totals.depth, store.totals.size, store._new_keys, store._leased_sequences) == (0, 0, {}, set())
    assert not store.holds_lane(lane)
    store.close()


def test_records_lost_from_leased_batch_cost_no_new_record(tmp_path: Path) -> None:
    """The numbers of what is out are not given a second time, when the damage took those that were counted, too."""
    store = Store(tmp_path, sync="never")
    store.add([(record(b"%d" % i, lane=b"l"), 1000) for i in range(3)])
    (head,) = store.take(2000, 1, predicate=lambda first: lambda other: True)
    assert len(head.followers) == 2
    database(store).write([], [TOTALS, *(record_key(RECORD, other.sequence) for other in head.followers)])
    store._has_failed = store._is_damaged = True
    store.add([(record(b"new", lane=b"l"), 1000)])
    store.settle([(head, Done())], 3000)
    assert [work.record.payload for work in store.take(10_000, 10)] == [b"new"]
    store.close()
