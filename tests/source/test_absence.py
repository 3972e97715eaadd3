"""One line when queues go, one when they come back, whatever is asked between."""

from __future__ import annotations

from rocketmq_spark.model import MessageQueue, QueueBounds
from rocketmq_spark.spark.source.waiting import Absence

A, B, C = (MessageQueue("t", broker, 0) for broker in "abc")
BOUNDS = {queue: QueueBounds(0, 1, 0) for queue in (A, B, C)}


def test_what_changes_is_told_once_with_the_reason(caplog):
    absence = Absence()
    reasons = {B: "no read permission", C: "the route does not name its broker"}
    for _ in range(3):
        absence.look([A, B, C], {A: BOUNDS[A]}, reasons.__getitem__)
    for _ in range(3):
        absence.look([A, B, C], {A: BOUNDS[A], B: BOUNDS[B]}, reasons.__getitem__)
    absence.look([A, B], BOUNDS, reasons.__getitem__)
    assert [record.getMessage() for record in caplog.records] == [
        "the stream waits for queues that it cannot read now: t/b/0 (no read permission); "
        "t/c/0 (the route does not name its broker)",
        "the stream can read these queues again: t/b/0",
        "the stream can read these queues again: t/c/0",
    ]


def test_a_queue_that_nobody_wants_any_more_goes_quietly(caplog):
    absence = Absence()
    absence.look([A, B], {A: BOUNDS[A]}, lambda _: "gone")
    absence.look([A], {A: BOUNDS[A]}, lambda _: "gone")
    absence.look([A], BOUNDS, lambda _: "gone")
    assert "again" not in caplog.text
