"""A resender that answers as a test says."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rocketmq_spark.base.clock import Deadline
from rocketmq_spark.model import Resent, SpooledSend
from tests.queues import q


class FakeResender:
    """Implements ``ports.Resender``: answers as it is told."""

    def __init__(self) -> None:
        self.answer: Callable[[SpooledSend], Resent] = lambda send: Resent(send.queue or q("a:0", send.topic))
        self.sent: list[SpooledSend] = []
        self.closed = False

    def batch_predicate(self, first: SpooledSend) -> Callable[[SpooledSend], bool]:
        return lambda send: False

    def join_sends(self, sends: Sequence[SpooledSend]) -> SpooledSend:
        raise AssertionError(sends)

    def resend(self, send: SpooledSend, done: Callable[[Resent], None]) -> None:
        if self.closed:
            done(Resent(None, "it is closed", is_temporary=True))
            return
        self.sent.append(send)
        done(self.answer(send))

    def close(self, deadline: Deadline) -> None:
        self.closed = True
