"""Half messages in any order of decisions, errors and questions."""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from rocketmq_spark.errors import CallTimeout, LocalProtocolError
from rocketmq_spark.model import Message, MessageQueue, SendResult, SendStatus
from rocketmq_spark.model.send import HalfPlace, TransactionState
from rocketmq_spark.producer.transactions import HalfFate, HalfMessage

COMMIT, ROLLBACK, UNKNOWN = TransactionState.COMMIT, TransactionState.ROLLBACK, TransactionState.UNKNOWN
COPY = HalfPlace("T", "a", "g", "copy", "copy", 9, 99)


class HalfModel(RuleBasedStateMachine):
    """Whatever comes in whatever order: one decision at most reaches a copy, and no answer is against it."""

    @initialize()
    def begin(self) -> None:
        self.sent: list[TransactionState] = []
        self.error: Exception | None = None
        where = SendResult(SendStatus.SEND_OK, "ID", MessageQueue("T", "a", 0), None)
        self.half = HalfMessage(Message("T", b"x"), where, HalfFate(COPY, b"content"), self._end, 1.0)
        self.unanswered = False

    def _end(self, place: HalfPlace, decision: TransactionState, deadline: object) -> bool:
        error, self.error = self.error, None
        if error is not None and getattr(error, "unsent", False):
            raise error
        self.sent.append(decision)
        if error is not None:
            self.unanswered = True
            raise error
        return True

    @rule(decision=st.sampled_from([COMMIT, ROLLBACK]), fails=st.sampled_from(["", "unsent", "lost"]))
    def decide(self, decision: TransactionState, fails: str) -> None:
        self.error = CallTimeout("x") if fails else None
        if self.error is not None:
            self.error.unsent = fails == "unsent"  # type: ignore[attr-defined]
        before = list(self.sent)
        try:
            (self.half.commit if decision is COMMIT else self.half.rollback)()
        except LocalProtocolError:
            assert before, "it was decided before"
        except CallTimeout:
            assert fails

    @rule()
    def ask(self) -> None:
        answer = self.half._fate.on_check(COPY._replace(digest=b"content"))
        if not self.sent:
            assert answer is UNKNOWN
        elif self.unanswered:
            assert answer is None
        else:
            assert answer is ROLLBACK

    @invariant()
    def decided_once(self) -> None:
        assert len(getattr(self, "sent", [])) <= 1


TestHalfModel = HalfModel.TestCase
