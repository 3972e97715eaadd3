"""A resender that answers as a test says."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rocketmq_spark.base.clock import Deadline
from rocketmq_spark.model import Resent, SpooledSend
from tests.queues import q

CLOSED = Resent(None, "the resender is closed", is_temporary=True)


class FakeResender:
    """Implements ``ports.Resender``. ``answer`` gives the outcomes; after None, the call of ``done`` is in ``waiting``."""

    def __init__(self) -> None:
        self.answer: Callable[[SpooledSend], Resent | None] = lambda send: Resent(send.queue or q("a:0", send.topic))
        self.sent: list[SpooledSend] = []
        self.waiting: list[Callable[[Resent], None]] = []
        self.closed = False

    def batch_predicate(self, first_send: SpooledSend) -> Callable[[SpooledSend], bool]:
        return lambda send: False

    def join_sends(self, sends: Sequence[SpooledSend]) -> SpooledSend:
        raise AssertionError(sends)

    def resend(self, send: SpooledSend, done: Callable[[Resent], None]) -> None:
        if self.closed:
            done(CLOSED)
            return
        self.sent.append(send)
        answer = self.answer(send)
        if answer is None:
            self.waiting.append(done)
        else:
            done(answer)

    def close(self, deadline: Deadline) -> None:
        self.closed = True
        while self.waiting:
            self.waiting.pop()(CLOSED)

    @property
    def bodies(self) -> list[bytes]:
        return [bytes(send.request.body) for send in self.sent]
