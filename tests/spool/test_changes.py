"""Totals follow what a write does."""

from __future__ import annotations

from rocketmq_spark.spool.changes import AtomicChange
from rocketmq_spark.spool.records import TOTALS, Due, PendingKey, Record, RecordState, Totals, mark_key
from tests.spool.bench import record


def test_totals_follow_each_step_and_the_ones_before_stay() -> None:
    before = Totals(next_sequence=5)
    change = AtomicChange(before)
    assert [change.add(record(b"x", at_ms=9), b"12345678"), change.add(record(b"y", lane=b"l"), b"1234")] == [5, 6]
    change.add_dead(5, 8, RecordState(1, 9, "why"))
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
    change.revive(5, Record("k", b"body", 0), 8, "")
    assert (after.depth, after.size, after.dead, after.dead_bytes, after.give_ups) == (1, 8, 0, 0, 1)
    assert before == Totals(next_sequence=5)
    assert change.all_puts[-1] == (TOTALS, after.encode())


def test_a_record_that_failed_waits_for_its_target() -> None:
    change, one = AtomicChange(Totals()), Record("k", b"x", 0, "t", marks=((b"id", b"place"),))
    first = one.pending_key(Due(7, 1))
    assert not first.waits_for_answer, "it waits only for its time"
    change.retry(one, first, Due(9, 1), RecordState(1, 7))
    assert (change.removed_pending, change.added_pending) == ([first], [PendingKey("t", True, Due(9, 1))])
    assert change.deletes == [first.encoded]
    assert [key for key, _ in change.puts] == [change.added_pending[0].encoded, mark_key(b"id", b"place")]
