"""Entries that are intact and cannot all be true: opening repairs them, and a look shows what opening would use."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path

import pytest

from rocketmq_spark.errors import SpoolError
from rocketmq_spark.spool.database import Database
from rocketmq_spark.spool.records import (
    DEAD,
    ORDER,
    RECORD,
    TOTALS,
    Done,
    Due,
    RecordState,
    Totals,
    lane_key,
    record_key,
)
from rocketmq_spark.spool.spool import SpoolReading
from rocketmq_spark.spool.store import Store
from tests.spool.bench import database, record

NOW_MS = 10**13
LANE = b"lane"


def three_of_a_lane(path: Path) -> Path:
    with contextlib.closing(Store(path, sync="never")) as store:
        store.add([(record(payload, lane=LANE), 1) for payload in (b"first", b"second", b"third")])
    return path


def change(path: Path, puts: list[tuple[bytes, bytes]], deletes: list[bytes] | None = None) -> None:
    with contextlib.closing(Database(path)) as db:
        db.write(puts, deletes or [])


def sent(store: Store, joins: bool) -> list[bytes]:
    """The payloads that a user of the store gets, one after the other or with those that may join them."""
    found = []
    while works := store.take(NOW_MS, 10, predicate=(lambda first: lambda other: True) if joins else None):
        for work in works:
            found += [work.record.payload, *(other.record.payload for other in work.followers)]
        store.settle([(work, Done()) for work in works], NOW_MS)
    return found


@pytest.mark.parametrize("joins", [False, True])
@pytest.mark.parametrize(("sequence", "rest"), [(1, [b"second", b"third"]), (2, [b"first", b"third"])])
def test_a_record_that_is_dead_and_waits_is_dead(tmp_path: Path, sequence: int, rest: list[bytes], joins: bool) -> None:
    """The first one of the lane is pending, too."""
    change(three_of_a_lane(tmp_path), [(record_key(DEAD, sequence), RecordState(1, 1, "given up").encode())])
    with contextlib.closing(SpoolReading(tmp_path)) as reading:
        assert reading.totals is not None
        assert reading.is_damaged
        shown = [(entry.sequence, entry.standing == "dead") for entry in reading.entries()]
    assert sorted(shown) == [(each, each == sequence) for each in (1, 2, 3)]
    with contextlib.closing(Store(tmp_path, sync="never")) as store:
        assert (len(store), store.totals.dead, store.damage_count) == (2, 1, 1)
        assert database(store).get(lane_key(LANE, sequence)) is None
        assert sent(store, joins) == rest
        assert (len(store), store.totals.dead, store.holds_lane(LANE)) == (0, 1, False)
    with contextlib.closing(Store(tmp_path, sync="never")) as store:
        assert (store.damage_count, store.revive(NOW_MS)) == (0, 1)


@pytest.mark.parametrize("wrong", [Totals(next_sequence=2, depth=3, size=600), Totals(next_sequence=4, depth=3)])
def test_totals_contradicting_last_record_are_recounted(tmp_path: Path, wrong: Totals) -> None:
    """A new record would take the place of one with its number."""
    change(three_of_a_lane(tmp_path), [(TOTALS, wrong.encode())])
    with contextlib.closing(SpoolReading(tmp_path)) as reading:
        assert reading.totals is not None
        assert reading.is_damaged
    with contextlib.closing(Store(tmp_path, sync="never")) as store:
        assert (len(store), store.totals.next_sequence, store.damage_count) == (3, 4, 1)
        store.add([(record(b"new", lane=LANE), 1)])
        assert sent(store, joins=True) == [b"first", b"second", b"third", b"new"]


def until_done(step: Callable[[], object]) -> list[str]:
    """Repeat a step as redelivery does, and return the errors."""
    errors: list[str] = []
    while len(errors) < 5:
        try:
            step()
            return errors
        except SpoolError as e:
            errors.append(e.message)
    return errors


def of_live_ones(store: Store) -> list[str]:
    errors = []
    while works := store.take(NOW_MS, 1):
        errors += until_done(lambda works=works: store.settle([(work, Done()) for work in works], NOW_MS))
    return errors


def of_dead_ones(store: Store) -> list[str]:
    return until_done(lambda: store.revive(NOW_MS)) + of_live_ones(store)


@pytest.mark.parametrize(
    ("wrong", "use"),
    [
        (Totals(next_sequence=4, depth=1, size=600), of_live_ones),
        (Totals(next_sequence=4, depth=3, size=50), of_live_ones),
        (Totals(next_sequence=5, depth=3, size=600, dead=0, dead_bytes=600), of_dead_ones),
        (Totals(next_sequence=5, depth=3, size=600, dead=1, dead_bytes=1), of_dead_ones),
    ],
)
def test_totals_that_would_fall_below_zero_are_counted_again(
    tmp_path: Path, wrong: Totals, use: Callable[[Store], list[str]]
) -> None:
    puts = [(TOTALS, wrong.encode())]
    if use is of_dead_ones:
        puts += [(record_key(RECORD, 4), record(b"dead").encode()), (record_key(DEAD, 4), RecordState(1, 1).encode())]
    change(three_of_a_lane(tmp_path), puts)
    with contextlib.closing(Store(tmp_path, sync="never")) as store:
        (error,) = use(store)
        assert (
            f"totals of the spool in {tmp_path} are lower than its records, so the records are counted again" in error
        )
        assert (store.damage_count, store.totals) == (
            1,
            Totals(store.totals.next_sequence, last_recorded_ms=store.totals.last_recorded_ms),
        )


def test_a_record_whose_number_no_store_reaches_is_named(tmp_path: Path) -> None:
    three_of_a_lane(tmp_path)
    change(tmp_path, [(record_key(RECORD, 2**64 - 1), record(b"x").encode()), (Due(1, 2**64 - 1).mark_value, b"")])
    with pytest.raises(SpoolError, match=rf"record {2**64 - 1} .* rocketmq-spark spool copy {tmp_path}"):
        Store(tmp_path, sync="never")


def test_what_is_true_is_not_counted_again(tmp_path: Path) -> None:
    """Also with dead letters, and where a revived record of a lane has no place in it."""
    with contextlib.closing(Store(three_of_a_lane(tmp_path), sync="never")) as store:
        assert store.damage_count == 0
    with contextlib.closing(Database(tmp_path)) as db:
        assert [key for key, _ in db.scan(ORDER, lane_key(LANE, 2))] == [lane_key(LANE, 1)]
        assert db.last_key(RECORD, DEAD) is None
        assert db.last_key(ORDER, b"s") == record_key(RECORD, 3)
