"""A spool that is a list."""

from __future__ import annotations

from collections.abc import Sequence

from rocketmq_spark.base.clock import Deadline
from rocketmq_spark.errors import SpoolFull
from rocketmq_spark.model import MessageQueue, SpooledSend, SpoolMetrics
from rocketmq_spark.spool.spool import lane_of


class FakeSpool:
    """Implements ``ports.Spool``; ``room`` is how many sends it takes."""

    needs_answers = True

    def __init__(self) -> None:
        self.kept: list[SpooledSend] = []
        self.calls = 0
        self.room = 10**6
        self.answers: list[MessageQueue] = []
        self.closed = False

    def has_earlier_record(self, send: SpooledSend) -> bool:
        return lane_of(send) in {lane_of(each) for each in self.kept} - {b""}

    def keep(self, sends: Sequence[SpooledSend]) -> None:
        self.calls += 1
        if len(self.kept) + len(sends) > self.room:
            raise SpoolFull("it is full")
        self.kept += sends

    def note_accepted_send(self, queue: MessageQueue) -> None:
        self.answers.append(queue)

    def metrics(self) -> SpoolMetrics:
        return SpoolMetrics(len(self.kept), 0, None, 0, 0, 0, 0)

    def close(self, deadline: Deadline) -> None:
        self.closed = True
