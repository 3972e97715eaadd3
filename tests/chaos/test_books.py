"""The accounts of a chaos run notice what they are there for."""

from __future__ import annotations

from tests.chaos.books import Batch, Loss, Place, Row, Sent, disordered, losses, missing, row, twice, untrue

A = Place("t", "broker-a", 0)
SENT = [Sent(A, offset, "k", offset, 100.0 + offset) for offset in range(5)]
ROWS = [Row(A, offset, "k", offset) for offset in range(5)]
LINE = (
    "WARN at least 3 offsets cannot be read any more: t/broker-a/0 offsets 1 to 4 (truncated by retention); "
    "u/b/2 from offset 7 on (topic deleted)"
)


def test_what_is_missing_must_be_named():
    assert missing(SENT, ROWS, []) == []
    assert missing(SENT, ROWS[:1] + ROWS[4:], []) == SENT[1:4]
    assert missing(SENT, ROWS[:1] + ROWS[4:], losses(LINE)) == []
    assert missing(SENT, ROWS[:1], losses(LINE)) == SENT[4:]
    assert missing([SENT[0]._replace(generation=1)], ROWS, []) == [SENT[0]._replace(generation=1)]


def test_loss_in_a_deleted_topic_excuses_none_in_its_successor():
    again = [s._replace(generation=1) for s in SENT]
    gone = [Loss(A, 1, 5, "offset went back")]
    assert missing(SENT, ROWS[:1], gone) == []
    assert missing([*SENT, *again], [*ROWS[:1], *(r._replace(generation=1) for r in ROWS)], gone) == []
    assert missing([*SENT, *again], ROWS[:1], gone) == again
    assert missing(again, [], [Loss(A, 0, 5, "truncated by retention")]) == []


def test_reports_are_read():
    assert losses("nothing\n" + LINE) == [
        Loss(A, 1, 4, "truncated by retention"),
        Loss(Place("u", "b", 2), 7, 7, "topic deleted"),
    ]
    assert losses(LINE)[1].covers(Place("u", "b", 2), 9)
    assert not losses(LINE)[0].covers(A, 4)


def test_a_report_names_what_is_gone_and_no_more():
    truncated = Loss(A, 1, 4, "truncated by retention")
    assert untrue([truncated], {A: 4}) == []
    assert untrue([truncated], {A: 3}) == [truncated]
    assert untrue([truncated], {}) == [truncated]
    assert untrue([gone := Loss(A, 1, 1, "topic deleted")], {A: 4}) == [gone]


def test_rows_come_once_and_in_order():
    assert row("t|broker-a|0|3|k:3:0") == ROWS[3]
    assert twice(ROWS) == []
    assert twice([*ROWS, ROWS[2]]) == [ROWS[2]]
    assert disordered(ROWS) == []
    assert disordered([Row(A, 0, "k", 0), Row(A, 1, "k", 1), Row(A, 2, "k", 0), Row(A, 3, "k", 2)]) == []
    assert disordered([Row(A, 0, "k", 1), Row(A, 1, "k", 0)]) == [(Row(A, 0, "k", 1), Row(A, 1, "k", 0))]
    assert disordered([Row(A, 0, "k", 1), Row(A, 1, "j", 0)]) == []
    swapped = [Row(A, 0, "k", 1), Row(A, 1, "k", 0)]
    assert disordered(swapped, lambda row: A._replace(queue=row.number)) == []
    assert disordered(swapped, lambda row: A) == [(swapped[0], swapped[1])]


def test_a_batch_is_whole():
    seen = {A: (1, 4, 4, 4)}
    assert Batch(105.0, seen).complaints(SENT, 5.0, {A: 1}) == []
    assert Batch(105.0, seen).complaints(SENT, 4.5, {}) == []
    assert len(Batch(105.0, seen).complaints(SENT, 10.0, {})) == 1
    assert len(Batch(105.0, {A: (1, 4, 4, 5)}).complaints(SENT, 4.5, {})) == 1
    assert len(Batch(105.0, {A: (1, 4, 3, 3)}).complaints(SENT, 4.5, {})) == 1
    assert len(Batch(105.0, {}).complaints(SENT, 4.5, {})) == 4
    assert Batch(105.0, {}, frozenset({A})).complaints(SENT, 4.5, {}) == []
