"""By what records are found while they are kept. Real RocksDB."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rocketmq_spark.errors import SpoolError
from rocketmq_spark.spool import recovery
from rocketmq_spark.spool.database import Database
from rocketmq_spark.spool.records import (
    IDENTITY,
    MARK,
    RECORD,
    Dead,
    Done,
    Due,
    Record,
    Replaced,
    RetryLater,
    Verdict,
    area_end,
    mark_key,
    place_of,
    record_key,
    space_end,
)
from rocketmq_spark.spool.store import Store
from tests.spool.bench import BASE_MS, database


def marked_record(name: bytes, place: int = 0, payload: bytes = b"x") -> Record:
    return Record("k", payload, BASE_MS, marks=((b"id", name), (b"q", place.to_bytes(8, "big"))))


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    one = Store(tmp_path / "s", sync="never")
    yield one
    one.close()


def first(store: Store) -> int | None:
    found = store.places(b"q")
    assert found == store.places(b"q", b"")
    return int.from_bytes(found[0], "big") if found else None


@given(st.binary(max_size=3), st.binary(max_size=3), st.binary(max_size=3))
def test_a_space_ends_before_the_next_one(space: bytes, other: bytes, place: bytes) -> None:
    key = mark_key(other, place)
    assert (mark_key(space) <= key < space_end(space)) is (space == other)
    assert place_of(key) == place
    assert MARK <= key < area_end(MARK)


def test_of_two_with_one_first_mark_the_second_is_not_kept(store: Store) -> None:
    store.add([(marked_record(b"a", 1), 10), (marked_record(b"a", 2), 10), (marked_record(b"b", 3), 10)])
    store.add([(marked_record(b"b", 4), 10)])
    assert len(store) == 2
    works = store.take(10, 9)
    assert [work.record.marks[1][1][-1] for work in works] == [1, 3]
    store.settle([(work, Done()) for work in works], 10)
    store.add([(marked_record(b"a", 5), 10)])
    assert len(store) == 1, "it is forgotten with its record"


def test_the_first_place_is_that_of_the_oldest_that_is_not_over(store: Store) -> None:
    assert first(store) is None
    store.add([(marked_record(bytes([i]), i), 10 + i) for i in (5, 3, 7)])
    assert first(store) == 3
    three, five = store.take(15, 9)
    assert first(store) == 3, "who has it has not finished it"
    store.settle([(three, Done()), (five, RetryLater(99, "why"))], 15)
    assert first(store) == 5
    store.add([(marked_record(b"old", 1), 9)])
    assert first(store) == 1
    store.settle([(work, Dead("why")) for work in store.take(200, 9)], 200)
    assert first(store) is None


def test_places_come_in_pages(store: Store) -> None:
    store.add([(marked_record(bytes([i]), i), 10) for i in range(5)])
    assert [place[-1] for place in store.places(b"q", (2).to_bytes(8, "big"), 2)] == [2, 3]


def test_what_is_forgotten_is_gone(store: Store) -> None:
    """Also what is out; the number is of those that are not."""
    store.add([(marked_record(name, i), 10) for i, name in enumerate((b"a", b"b", b"c"))])
    (taken,) = store.take(10, 1)
    store.settle([(taken, RetryLater(50, "why"))], 10)
    (other,) = store.take(10, 1)
    assert store.drop_records([(b"id", b"a"), (b"id", b"b"), (b"id", b"nobody"), (b"id", b"a")]) == 1
    assert (len(store), first(store)) == (1, 2)
    store.settle([(other, Done())], 10)
    assert (len(store), first(store)) == (1, 2)
    assert [work.record.marks[0][1] for work in store.take(99, 9)] == [b"c"]


@pytest.mark.parametrize("verdict", [Done(), RetryLater(20, "why"), Dead("why")], ids=str)
def test_the_result_of_a_record_that_was_forgotten_is_ignored(store: Store, verdict: Verdict) -> None:
    store.add([(marked_record(b"a", 1), 10), (marked_record(b"b", 2), 10)])
    (work,) = store.take(10, 1)
    assert store.awaits_result(work)
    assert store.drop_records([(b"id", b"a")]) == 0
    assert not store.awaits_result(work)
    before = store.totals.copy()
    store.settle([(work, verdict)], 10)
    assert store.totals == before
    store.close()
    again = Store(store.path, sync="never")
    assert ([work.record.marks[0][1] for work in again.take(99, 9)], again.damage_count, again.totals.dead) == (
        [b"b"],
        0,
        0,
    )
    again.close()


def in_queue(name: bytes, queue: bytes, place: int = 0) -> Record:
    return Record("k", b"x", BASE_MS, marks=((IDENTITY, (10).to_bytes(8) + name), (queue, place.to_bytes(8, "big"))))


def places(store: Store) -> dict[bytes, list[int]]:
    return {
        queue: [int.from_bytes(place) for place in store.places(queue, b"", 9)] for queue in (b"q", b"r", b"s", b"t")
    }


@pytest.mark.parametrize("together", [True, False])
def test_a_repeated_record_adds_one_mark_for_each_space(store: Store, together: bool) -> None:
    """Up to the limit; what is waited for in a space is the first place there."""
    copies = [in_queue(b"a", queue, place) for queue, place in ((b"q", 5), (b"q", 6), (b"r", 7), (b"s", 8), (b"t", 9))]
    for part in [copies] if together else [[each] for each in copies]:
        store.add([(each, 10) for each in part])
    assert places(store) == {b"q": [5], b"r": [7], b"s": [8], b"t": []}
    assert len(store) == 1
    size = store.totals.size
    store.close()
    with contextlib.closing(Database(store.path)) as db:
        recovery.repair(db)
    store = Store(store.path, sync="never")
    assert places(store) == {b"q": [5], b"r": [7], b"s": [8], b"t": []}
    (work,) = store.take(10, 9)
    assert (len(work.record.encode()), work.size) == (size, size)
    store.settle([(work, RetryLater(20, "why"))], 10)
    store.settle([(work, Done()) for work in store.take(20, 9)], 20)
    assert places(store) == {b"q": [], b"r": [], b"s": [], b"t": []}
    assert (len(store), store.totals.size) == (0, 0)
    store.close()


@pytest.mark.parametrize("verdict", [Done(), Dead("why")], ids=str)
def test_a_mark_added_while_a_record_is_out_ends_with_it(store: Store, verdict: Verdict) -> None:
    store.add([(in_queue(b"a", b"q", 5), 10), (in_queue(b"b", b"q", 6), 10)])
    (work, other) = store.take(10, 9)
    store.add([(in_queue(b"a", b"r", 7), 10)])
    assert places(store)[b"r"] == [7]
    store.settle([(work, verdict)], 10)
    assert (places(store)[b"q"], places(store)[b"r"], len(store)) == ([6], [], 1)
    store.settle([(other, Done())], 10)
    assert store.totals.size == 0


def test_a_revived_record_is_not_due_before_its_time(store: Store) -> None:
    """It was given up while the clock was ahead, and its target answers before that time."""
    store.add([(dataclasses.replace(in_queue(b"a", b"q", 5), target="t"), 10)])
    store.settle([(work, Dead("why")) for work in store.take(10, 9)], 10)
    assert store.revive(3) == 1
    store.make_due("t", None, 9, 5)
    assert (store.take(9, 9), len(store.take(10, 9))) == ([], 1)


def test_the_copy_of_a_damaged_record_is_stored(store: Store) -> None:
    store.add([(in_queue(b"a", b"q", 5), 10)])
    store.close()
    with contextlib.closing(Database(store.path)) as db:
        db.write([(record_key(RECORD, 1), b"damaged")])
    store = Store(store.path, sync="never")
    store.add([(in_queue(b"a", b"r", 7), 10)])
    assert [work.due.sequence for work in store.take(10, 9)] == [2]
    assert (store.totals.dead, places(store)[b"q"], places(store)[b"r"]) == (1, [], [7])
    store.close()


def test_a_record_of_two_spaces_stays_when_one_is_handed_over(store: Store) -> None:
    store.add([(in_queue(b"a", b"q", 5), 10), (in_queue(b"a", b"r", 6), 10), (in_queue(b"b", b"q", 7), 10)])
    marks = [(b"q", place) for place in store.places(b"q", b"", 9)]
    assert store.hand_over(marks) == 1
    assert (places(store)[b"q"], places(store)[b"r"], len(store)) == ([], [6], 1)
    assert store.hand_over([(b"r", place) for place in store.places(b"r")]) == 1
    assert (len(store), store.take(10, 9)) == (0, [])


def test_what_falls_due_early_is_still_found(store: Store) -> None:
    store.add([(marked_record(b"a"), 500)])
    assert store.make_due(None, None, 10, 20) is None
    assert store.drop_records([(b"id", b"a")]) == 1
    assert (len(store), store.take(1000, 9)) == (0, [])


def test_notes_are_written_with_records_and_kept(store: Store) -> None:
    assert store.notes() == {}
    store.add([(marked_record(b"a"), 10)], {b"n": b"1"})
    store.add([], {b"n": b"2", b"m": b""})
    store.close()
    again = Store(store.path, sync="never")
    assert (again.notes(), len(again)) == ({b"n": b"2", b"m": b""}, 1)
    assert again.drop_records([(b"id", b"a")]) == 1
    again.close()


def test_marks_are_mended_with_their_store(store: Store) -> None:
    store.add([(marked_record(b"a", 1), 10), (marked_record(b"b", 2), 10)])
    db = database(store)
    (gone, kept) = (Due(10, sequence) for sequence in (1, 2))
    db.write([], [record_key(RECORD, gone.sequence), mark_key(b"id", b"b")])
    recovery.repair(db)
    assert [place_of(key) for key, _ in db.scan(MARK, area_end(MARK))] == [(2).to_bytes(8, "big"), b"b"]
    assert Due.parse(db.get(mark_key(b"id", b"b")) or b"") == kept


def test_record_that_cannot_be_read_has_no_marks_any_more(store: Store) -> None:
    store.add([(marked_record(b"a", 1), 10)])
    database(store).write([(record_key(RECORD, 1), b"garbage")])
    assert store.take(10, 9) == []
    assert first(store) is None


def test_a_damaged_record_is_forgotten_with_its_marks(store: Store) -> None:
    store.add([(marked_record(b"a", 1), 10), (marked_record(b"b", 2), 10)])
    database(store).write([(record_key(RECORD, 1), b"damaged")])
    assert store.drop_records([(b"id", b"a")]) == 1
    assert first(store) == 2
    assert len(list(database(store).scan(MARK, area_end(MARK)))) == 2


@pytest.mark.parametrize("fails", [False, True], ids=["said", "written although the write was said to have failed"])
def test_mark_removed_from_leased_record_passes_to_new_record(
    store: Store, fails: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.add([(marked_record(b"a", 1), 10)])
    (work,) = store.take(10, 9)
    if fails:
        write = Database.write

        def failing(self: Database, *args: Any, **kwargs: Any) -> None:
            write(self, *args, **kwargs)
            raise SpoolError("no space left")

        with monkeypatch.context() as patched:
            patched.setattr(Database, "write", failing)
            with pytest.raises(SpoolError):
                store.remove_marks([(b"q", (1).to_bytes(8, "big"))])
    else:
        assert store.remove_marks([(b"q", (1).to_bytes(8, "big"))]) == 1
    store.add([(marked_record(b"b", 1), 10)])
    store.settle([(work, Done())], 10)
    assert (first(store), len(store)) == (1, 1)


def test_removed_marks_leave_their_records_in_store(store: Store) -> None:
    store.add([(marked_record(bytes([i]), i), 10) for i in range(3)])
    assert first(store) == 0
    store.remove_marks([(b"q", i.to_bytes(8, "big")) for i in range(3)])
    assert first(store) is None
    store.add([(marked_record(b"new", 2), 10)])
    assert first(store) == 2
    assert len(store.take(10, 9)) == 4


@pytest.mark.parametrize("reason", [None, "given up"])
def test_a_record_in_the_place_of_another_has_its_marks(store: Store, reason: str | None) -> None:
    """Also those that were added while it was out; a dead letter that is given up is again the record that it was."""
    store.add([(marked_record(b"a", 1), 5), (marked_record(b"b", 2), 5), (marked_record(b"c", 3), 5)])
    works = store.take(5, 3)
    again = dataclasses.replace(works[0].record, marks=((b"id", b"a"), (b"r", b"0")))
    store.add([(again, 5)])
    store.drop_records([(b"q", (3).to_bytes(8, "big"))])
    letters = [dataclasses.replace(work.record, payload=b"a longer one", target="t") for work in works]
    outcomes = [(work, Replaced(letter, reason)) for work, letter in zip(works, letters, strict=True)]
    store.settle(outcomes, 9)
    assert store.next_due_ms() == (5 if reason is None else 9)
    assert (len(store), first(store), store.places(b"r")) == (2, 1, [b"0"])
    assert store.drop_records([(b"q", (2).to_bytes(8, "big"))]) == 1
    [work] = store.take(9, 3)
    assert (work.record.target, work.record.payload, work.pending.target) == ("t", b"a longer one", "t")
    assert work.record.marks == ((b"id", b"a"), (b"q", (1).to_bytes(8, "big")), (b"r", b"0"))
    assert work.state.reason == (reason or "")
    assert store.totals.size == len(work.record.encode())
    store.settle([(work, Dead("no", record=marked_record(b"a", 1)))], 9)
    assert (len(store), first(store), store.places(b"r"), store.totals.size) == (0, None, [], 0)
    dead = dataclasses.replace(marked_record(b"a", 1), marks=work.record.marks)
    assert store.totals.dead_bytes == len(dead.encode())
    assert store.revive(9) == 1
    assert [work.record for work in store.take(9, 3)] == [dataclasses.replace(dead, marks=())]
