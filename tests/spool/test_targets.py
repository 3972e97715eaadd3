"""Records whose target changes while they are stored, and their places. Real RocksDB."""

from __future__ import annotations

import contextlib
import dataclasses
from pathlib import Path

import pytest

from rocketmq_spark.base.clock import Deadline
from rocketmq_spark.errors import SpoolError
from rocketmq_spark.spool.copying import CopyLimits, copy_spool
from rocketmq_spark.spool.database import Database
from rocketmq_spark.spool.pending import all_pending_entries
from rocketmq_spark.spool.records import (
    IDENTITY,
    PENDING,
    RECORD,
    TOTALS,
    Dead,
    Done,
    Due,
    PendingKey,
    Record,
    RecordState,
    Replaced,
    RetryLater,
    Totals,
    area_end,
    record_key,
)
from rocketmq_spark.spool.store import Store
from tests.spool.bench import database
from tests.spool.scripted_reader import reader

MARKS = ((b"id", bytes(7) + b"\x05"), (b"q", b"1"))
OLD = Record("k", b"old", 1, "old", marks=MARKS)
NEW = Record("k", b"a longer payload", 1, "new", marks=MARKS)


def places(store: Store) -> list[PendingKey]:
    return [PendingKey.parse(key) for key, _ in all_pending_entries(database(store))]


def contents(store: Store) -> int:
    return sum(len(value) for _, value in database(store).scan(RECORD, area_end(RECORD)))


def with_both_places(path: Path) -> Store:
    """A repaired store: the block with the deletion of a record's old place was lost, and so were the totals."""
    with contextlib.closing(Store(path, sync="never")) as store:
        store.add([(OLD, 5)])
        before = [*database(store).scan(PENDING, area_end(PENDING))]
        (work,) = store.take(9, 1)
        store.settle([(work, Replaced(NEW, "why"))], 9)
    with contextlib.closing(Database(path)) as db:
        db.write(before, [TOTALS])
    return Store(path, sync="never")


def test_a_repair_leaves_a_record_the_place_of_its_target(tmp_path: Path) -> None:
    with contextlib.closing(with_both_places(tmp_path)) as store:
        assert [(place.target, place.due.sequence) for place in places(store)] == [("new", 1)]
        assert store.drop_records([MARKS[1]]) == 1
        assert (places(store), store.totals.all_bytes, store.take(99, 9), len(store)) == ([], 0, [], 0)


def test_a_repair_keeps_failures_of_a_record_of_another_target(tmp_path: Path) -> None:
    with contextlib.closing(Store(tmp_path, sync="never")) as store:
        store.add([(OLD, 5)])
        (work,) = store.take(9, 1)
        store.settle([(work, RetryLater(50, "away"))], 9)
    with contextlib.closing(Database(tmp_path)) as db:
        db.write([(record_key(RECORD, 1), NEW.encode())], [TOTALS])
    with contextlib.closing(Store(tmp_path, sync="never")) as store:
        assert places(store) == [PendingKey("new", True, Due(50, 1))]
        (work,) = store.take(50, 1)
        assert (work.state.tries, work.state.reason) == (1, "away")


def test_a_repair_knows_that_a_record_without_a_place_failed(tmp_path: Path) -> None:
    """The state is that of its place in a lane."""
    laned = dataclasses.replace(OLD, lane=b"l", marks=())
    with contextlib.closing(Store(tmp_path, sync="never")) as store:
        store.add([(laned, 5)], states=[RecordState(3, 1, "away")])
        (place,) = places(store)
    with contextlib.closing(Database(tmp_path)) as db:
        db.write([(record_key(RECORD, 1), dataclasses.replace(laned, marks=MARKS).encode())], [TOTALS, place.encoded])
    with contextlib.closing(Store(tmp_path, sync="never")) as store:
        assert [each[:2] for each in places(store)] == [("old", True)]


def test_forgetting_a_record_of_a_strange_place_removes_it(tmp_path: Path) -> None:
    with contextlib.closing(Store(tmp_path, sync="never")) as store:
        store.add([(OLD, 5)])
        database(store).write([(record_key(RECORD, 1), dataclasses.replace(OLD, target="new").encode())], [])
        assert store.drop_records([MARKS[1]]) == 1
        assert (places(store), store.take(99, 9), len(store)) == ([], [], 0)


def test_a_place_without_a_record_is_repaired_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with contextlib.closing(Store(tmp_path, sync="never")) as store:
        store.add([(OLD, 5)])
        database(store).write([], [record_key(RECORD, 1)])
        store.totals = Totals(next_sequence=2)
        with pytest.raises(SpoolError, match="are counted again"):
            store.take(9, 1)
        for _ in range(3):
            assert store.take(9, 1) == []
        assert (places(store), store.next_due_ms(), len(store), store.damage_count) == ([], None, 0, 1)
    assert caplog.text.count("counted again") == 0


@pytest.mark.parametrize("answer", [Done(), RetryLater(20, "away")], ids=str)
def test_a_letter_counts_once_although_its_write_seemed_to_fail(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answer: Done | RetryLater
) -> None:
    """Also of one without marks, as after ``revive``."""
    with contextlib.closing(Store(tmp_path, sync="never")) as store:
        store.add([(dataclasses.replace(OLD, marks=()), 5)])
        (work,) = store.take(9, 1)
        write = database(store).write

        def failing(*args: object) -> None:
            write(*args)  # type: ignore[arg-type]
            raise SpoolError("full")

        monkeypatch.setattr(database(store), "write", failing)
        for _ in range(2):
            with contextlib.suppress(SpoolError):
                store.settle([(work, Replaced(dataclasses.replace(NEW, marks=()), "why"))], 9)
        assert store.totals.size == contents(store) > 0
        assert store.totals.give_ups == 1
        (work,) = store.take(9, 1)
        store.settle([(work, answer)], 9)
        assert store.totals.size == contents(store)


def with_revived(path: Path) -> Store:
    """A store with a record that was given up by a clock that was ahead, and is due later."""
    store = Store(path, sync="never")
    store.add([(dataclasses.replace(OLD, marks=((IDENTITY, bytes(6) + b"\x03\xe8"),)), 1000)])
    (work,) = store.take(2000, 1)
    store.settle([(work, Dead("refused"))], 2000)
    assert store.revive(5) == 1
    assert places(store) == [PendingKey("old", False, Due(1000, 1))]
    return store


def test_a_revived_record_does_not_wait_for_another_target(tmp_path: Path) -> None:
    with contextlib.closing(with_revived(tmp_path)) as store:
        assert store.retarget(lambda record: "new", None, 9) is None
        assert places(store) == [PendingKey("new", False, Due(1000, 1))]
        store.make_due("new", None, 9, 6)
        assert store.take(999, 1) == []


def test_a_repaired_revived_record_waits_for_no_other_target(tmp_path: Path) -> None:
    with_revived(tmp_path).close()
    with contextlib.closing(Database(tmp_path)) as db:
        db.write([(record_key(RECORD, 1), dataclasses.replace(NEW, marks=()).encode())], [TOTALS])
    with contextlib.closing(Store(tmp_path, sync="never")) as store:
        assert places(store) == [PendingKey("new", False, Due(1000, 1))]


def test_a_record_without_a_target_waits_for_the_one_it_gets(tmp_path: Path) -> None:
    with contextlib.closing(Store(tmp_path, sync="never")) as store:
        store.add([(dataclasses.replace(OLD, target="", marks=()), 50)])
        store.retarget(lambda record: "new", None, 9)
        assert places(store) == [PendingKey("new", True, Due(50, 1))]


def test_records_of_one_kind_become_due_with_another_target(tmp_path: Path) -> None:
    """But not before their original due time."""
    with contextlib.closing(Store(tmp_path, sync="never")) as store:
        for i, (kind, target) in enumerate((("k", "old"), ("letter", "old"), ("letter", "new"), ("letter", "old")), 1):
            due = bytes(7) + (b"\x05" if i < 4 else b"\x37")
            store.add([(Record(kind, b"", 1, target, marks=((IDENTITY, due + bytes([i])),)), 90)])
        store.retarget(lambda record: "new", None, 9, "letter", 40)
        assert [(place.due.sequence, place.due.due_ms) for place in places(store)] == [
            (2, 40),
            (4, 55),
            (1, 90),
            (3, 90),
        ]
        assert {place.target for place in places(store)} == {"new"}
        assert (store.next_due_ms(), store.drop_records([(IDENTITY, bytes(7) + b"\x05\x02")]), store.next_due_ms()) == (
            40,
            1,
            55,
        )


def test_a_copy_knows_which_records_failed(tmp_path: Path) -> None:
    """An answer of their target makes them due, as in the folder that was copied."""
    other = dataclasses.replace(OLD, marks=((b"id", bytes(7) + b"\x06"),))
    call = reader(
        f"put(Due(10, 1).mark_value, {RecordState(0, 1).encode()!r})",
        f"put(Due(20, 2).mark_value, {RecordState(3, 1, 'away').encode()!r})",
        f"put(record_key(RECORD, 1), {OLD.encode()!r})",
        f"put(record_key(RECORD, 2), {other.encode()!r})",
        "end()",
    )
    kinds = {"k": lambda record: record}  # they keep their marks
    copy_spool(tmp_path / "source", tmp_path / "copy", CopyLimits(Deadline.after(60), 1 << 20), call, kinds)
    with contextlib.closing(Store(tmp_path / "copy", sync="never")) as store:
        assert sorted(places(store)) == [("old", False, Due(10, 1)), ("old", True, Due(20, 2))]
        store.make_due("old", None, 9, 8)
        assert [work.due.sequence for work in store.take(9, 9)] == [2]


def test_targets_are_compared_in_pages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Due times, failures and marks stay; records that are out, or cannot be read, are left alone."""
    monkeypatch.setattr("rocketmq_spark.spool.store.RETARGET_PAGE_BYTES", 2 * len(OLD.encode()))
    with contextlib.closing(Store(tmp_path, sync="never")) as store:
        for i in range(1, 8):
            marks = ((b"id", bytes(7) + bytes([i])), (b"q", bytes([i])))
            store.add([(dataclasses.replace(OLD, marks=marks), 10 + i)])
        out, failed = store.take(12, 9)
        store.settle([(failed, RetryLater(50, "away"))], 12)
        database(store).write([(record_key(RECORD, 3), b"?" * len(OLD.encode()))])
        start, pages = None, 0
        while pages == 0 or start is not None:
            start, pages = store.retarget(lambda record: "new", start, 5), pages + 1
        assert pages > 2
        new = [PendingKey("new", False, Due(10 + i, i)) for i in range(4, 8)]
        left = [PendingKey("old", False, Due(10 + i, i)) for i in (1, 3)]
        assert sorted(places(store)) == sorted([*new, *left, PendingKey("new", True, Due(50, 2))])
        assert store.places(b"q", b"", 9) == [bytes([i]) for i in range(1, 8)]
        store.settle([(out, Done())], 12)
        store.make_due("new", None, 9, 13)
        works = store.take(17, 9)
        assert [(work.due.sequence, work.state.tries, work.record.target) for work in works] == [
            (2, 1, "new"), *((i, 0, "new") for i in range(4, 8)),
        ]  # fmt: skip
        store.settle([(work, Done()) for work in works], 17)
        assert (len(store), store.totals.size, store.places(b"q", b"", 9)) == (0, 0, [])
