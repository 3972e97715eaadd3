"""Totals follow what a write does."""

from __future__ import annotations

from rocketmq_spark.spool.changes import AtomicChange
from rocketmq_spark.spool.records import TOTALS, Due, Record, RecordState, Totals
from tests.spool.bench import record


def test_totals_follow_each_step_and_the_ones_before_stay() -> None:
    before = Totals(next_sequence=5)
    change = AtomicChange(before)
    assert [change.add(record(b"x", at_ms=9), b"12345678"), change.add(record(b"y", lane=b"l"), b"1234")] == [5, 6]
    change.bury(5, 8, RecordState(1, 9, "", "why"))
    change.finish(6, 4)
    after = change.totals
    assert (after.next_sequence, after.depth, after.size, after.dead, after.dead_bytes, after.give_ups) == (
        7,
        0,
        0,
        1,
        8,
        1,
    )
    change.revive(5, Record("k", b"body", 0), 8)
    assert (after.depth, after.size, after.dead, after.dead_bytes, after.give_ups) == (1, 8, 0, 0, 1)
    assert before == Totals(next_sequence=5)
    assert change.all_puts[-1] == (TOTALS, after.encode())


def test_the_earliest_that_is_pending_is_known() -> None:
    change = AtomicChange(Totals())
    change.pend(Due(7, 1), RecordState(0, 0))
    change.pend(Due(5, 2), RecordState(0, 0))
    assert change.earliest == Due(5, 2)
