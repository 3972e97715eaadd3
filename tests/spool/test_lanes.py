"""What goes with the first record of a lane, and what follows it, in real RocksDB."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from rocketmq_spark.model import Resent
from rocketmq_spark.spool.changes import AtomicChange
from rocketmq_spark.spool.database import Database
from rocketmq_spark.spool.lanes import BatchPolicy, find_lane, lanes_in, records_to_batch, remove_from_lane
from rocketmq_spark.spool.records import LAST_SEQUENCE, RECORD, Due, PendingKey, Record, Totals, lane_key, record_key
from tests.spool.bench import Bench, record


def everything(first: Record) -> object:
    return lambda other: True


@pytest.fixture
def db(tmp_path: Path) -> Iterator[Database]:
    """Records 0 to 4 of lane ``l``, 5 of ``m`` and 6 of none."""
    found, change = Database(tmp_path / "db"), AtomicChange(Totals(next_sequence=0))
    for lane in (b"l",) * 5 + (b"m", b""):
        one = record(b"x", lane=lane)
        change.add(one, one.encode())
    found.write(change.all_puts, [], sync=False)
    yield found
    found.close()


def numbers(db: Database, sequence: int, lane: bytes, joins: object = everything) -> list[int]:
    return [each.sequence for each in records_to_batch(db, sequence, record(b"x", lane=lane), joins)]  # type: ignore[arg-type]


def test_every_lane_once(db: Database) -> None:
    assert list(lanes_in(db)) == [b"l", b"m"]
    assert [find_lane(db, sequence) for sequence in (0, 4, 5, 6)] == [b"l", b"l", b"m", None]


def test_followers_are_of_the_lane_and_one_after_the_other(db: Database) -> None:
    assert numbers(db, 0, b"l") == [1, 2, 3, 4]
    assert numbers(db, 3, b"l") == [4]
    assert (numbers(db, 5, b"m"), numbers(db, 6, b"")) == ([], [])
    assert numbers(db, 7, b"l") == [], "it has no place in the lane"
    left = iter([True, True, False, True])
    assert numbers(db, 0, b"l", lambda first: lambda other: next(left)) == [1, 2]


def test_one_that_cannot_be_read_is_no_follower(db: Database) -> None:
    db.write([(record_key(RECORD, 2), b"garbled")], [record_key(RECORD, 4)], sync=False)
    assert numbers(db, 0, b"l") == [1]
    assert numbers(db, 3, b"l") == []


def test_those_that_leave_let_the_next_one_be_due(db: Database) -> None:
    change = AtomicChange(Totals())
    assert remove_from_lane(db, change, b"l", [0, 1, 2], 77)
    assert change.deletes == [lane_key(b"l", sequence) for sequence in range(3)]
    assert [key for key, _ in change.puts] == [PendingKey("", False, Due(77, 3)).encoded]
    last = AtomicChange(Totals())
    assert not remove_from_lane(db, last, b"l", [0, 1, 2, 3, 4], 77)
    assert (len(last.deletes), last.puts) == (5, [])
    nothing = AtomicChange(Totals())
    for lane, gone in ((b"", [6]), (b"l", [LAST_SEQUENCE])):
        assert remove_from_lane(db, nothing, lane, gone, 77)
    assert (nothing.deletes, nothing.puts) == ([], [])


def test_those_of_a_run_that_was_refused_go_one_by_one() -> None:
    runs, first = BatchPolicy(), record(b"x", lane=b"l")
    assert not runs.limited_predicate(first)(first)
    runs.predicate = everything  # type: ignore[assignment]
    assert runs.limited_predicate(first)(first)
    runs.record_result(b"l", 9, has_succeeded=False, is_permanent=False)
    assert runs.limited_predicate(first)(first), "that passes"
    runs.record_result(b"l", 3, has_succeeded=False, is_permanent=True)
    for done, final in ((True, False), (False, False), (False, True), (True, False)):
        assert not runs.limited_predicate(first)(first)
        assert runs.limited_predicate(record(b"y", lane=b"m"))(first)
        runs.record_result(b"l", 1, done, final)
    assert runs.limited_predicate(first)(first)
    runs.record_result(b"l", 9, has_succeeded=True, is_permanent=False)
    runs.record_result(b"l", 1, has_succeeded=False, is_permanent=True)
    assert runs.limited_predicate(first)(first)


def test_after_a_failure_a_run_is_half_as_long_and_grows_again() -> None:
    runs, first = BatchPolicy(), record(b"x", lane=b"l")
    runs.predicate = everything  # type: ignore[assignment]

    def length(lane: bytes = b"l") -> int:
        takes = runs.limited_predicate(record(b"x", lane=lane))
        return 1 + sum(takes(first) for _ in range(300))

    for lengths in (301, 150, 75):
        assert length() == lengths
        runs.record_result(b"l", lengths, has_succeeded=False, is_permanent=False)
    runs.record_result(b"l", 1, has_succeeded=True, is_permanent=False)
    assert (length(), length(b"m")) == (37, 301)
    found = []
    for _ in range(30):
        found.append(length())
        runs.record_result(b"l", length(), has_succeeded=True, is_permanent=False)
    assert found == sorted(found)
    assert length() == 301
    runs.record_result(b"l", 2, has_succeeded=False, is_permanent=False)
    assert length() == 1
    runs.record_result(b"l", 1, has_succeeded=True, is_permanent=False)
    assert length() == 2


def test_a_lane_that_was_empty_starts_with_a_whole_run(tmp_path: Path) -> None:
    """What is known of it is forgotten: there may be millions of lanes."""
    bench = Bench(tmp_path / "s")
    bench.joins = lambda head, other: True
    for failure, sizes in (
        (Resent(None, "down", is_temporary=True), [9, 1, 4, 4]),
        (Resent(None, "illegal"), [9] + [1] * 9),
    ):
        bench.together.clear()
        bench.works = lambda one, failure=failure: failure if len(bench.together) == 1 else Resent()
        bench.add(*(record(b"x", lane=b"l") for _ in range(9)), after_s=0)
        bench.time.advance(100)
        assert bench.together == sizes
        assert not bench.store.holds_lane(b"l")
    bench.add(*(record(b"x", lane=b"l") for _ in range(9)), after_s=0)
    bench.time.advance(100)
    assert bench.together[10:] == [9]
