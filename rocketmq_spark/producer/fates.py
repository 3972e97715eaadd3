"""The state of a half message in this process: by which decision it changes, and what a broker that asks is answered."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator

from rocketmq_spark.base.clock import Deadline
from rocketmq_spark.base.copies import CROSSING_S
from rocketmq_spark.errors import CallTimeout, RocketMQError
from rocketmq_spark.model.send import HalfPlace, HalfState, TransactionState

SendDecision = Callable[[HalfPlace, TransactionState, Deadline], bool]

# A check that arrives while a decision is being sent waits for its end, at most this long.
MAX_DECISION_S = 5.0

# All transitions: from a state, by a decision.
_TRANSITIONS = {
    (HalfState.PREPARED, TransactionState.COMMIT): HalfState.COMMITTED,
    (HalfState.PREPARED, TransactionState.ROLLBACK): HalfState.ROLLED_BACK,
}


class HalfFate:
    """The state of a half message in this process, without the message and its producer, because many are kept for long.

    While the program references the message, it may decide: ``held`` is a weak reference to it.

    Its decision goes to the message that its send has stored, or to the last copy that a broker made of it. Another message with
    its id is none of these: it has other ``content`` (``model.send.content_of``).
    """

    __slots__ = ("_crossing_until", "_lock", "_place", "content", "last_decision", "owner_ref", "state")

    def __init__(self, place: HalfPlace, content: bytes, state: HalfState = HalfState.PREPARED) -> None:
        self._place = place
        self.content = content
        self._lock = threading.Lock()
        self._crossing_until: Deadline | None = None
        self.state = state
        self.last_decision: TransactionState | None = None  # the last decision, even if it could not be sent
        self.owner_ref: Callable[[], object] = lambda: True  # while it is being sent

    @property
    def is_deciding(self) -> bool:
        """Whether a decision is being sent, so that the answer about a copy follows soon."""
        return self._lock.locked()

    def on_check(self, place: HalfPlace, patience_s: float = 0.0) -> TransactionState | None:
        """The decision about a copy that its broker has written to ``place``; None if the user's function must decide, as about
        another message with its id. While the program may decide, that one waits, too.
        """
        if not self._lock.acquire(timeout=patience_s):
            return TransactionState.UNKNOWN
        try:
            if self.state is HalfState.PREPARED:
                if place.content == self.content:  # brokers before 5.1 do not send their name
                    self._place = place._replace(broker_name=place.broker_name or self._place.broker_name)
                return None if self.owner_ref() is None else TransactionState.UNKNOWN
            if place.content != self.content:
                return None
            if self.state is HalfState.COMMITTED:
                crossing = self._crossing_until is not None and not self._crossing_until.expired
                return TransactionState.ROLLBACK if crossing else TransactionState.COMMIT
            return TransactionState.ROLLBACK if self.state is HalfState.ROLLED_BACK else None
        finally:
            self._lock.release()

    def record_place(self, place: HalfPlace) -> None:
        """Note its place, unless its broker has already asked about a copy at another place."""
        with self._lock:
            at = self._place
            asked = at.broker_name or at.half_offset is not None
            self._place = at._replace(broker_name=at.broker_name or place.broker_name) if asked else place

    def decide(self, decision: TransactionState, timeout_s: float, send: SendDecision) -> bool:
        """Send a decision. Returns whether it was still possible; raises errors of the request."""
        timeout = Deadline.after(timeout_s)
        with self._decision_lock(timeout):
            after = _TRANSITIONS.get((self.state, decision))
            if after is None:
                return False
            self.last_decision = decision
            self.state = HalfState.UNKNOWN  # in case this is interrupted
            try:
                proved = send(self._place._replace(content=self.content), decision, timeout)
            except RocketMQError as e:
                if e.unsent:
                    self.state = HalfState.PREPARED
                raise
            self.state = after
            self._crossing_until = Deadline.after(CROSSING_S) if proved else None
            return True

    def abandon(self) -> bool:
        """Leave an undecided message to the user's function: the program can no longer decide. Returns False if a decision on
        its way takes longer than ``MAX_DECISION_S``.
        """
        with contextlib.suppress(CallTimeout), self._decision_lock(Deadline.after(MAX_DECISION_S)):
            if self.state is HalfState.PREPARED:
                self.state = HalfState.UNKNOWN
            return True
        return False

    @contextlib.contextmanager
    def _decision_lock(self, deadline: Deadline) -> Iterator[None]:
        """Hold the lock of decisions. In a fork, its owner may be a thread of the parent, which never releases it."""
        if not self._lock.acquire(timeout=min(deadline.remaining(), threading.TIMEOUT_MAX)):
            late = CallTimeout("another decision on the half message is on its way", topic=self._place.topic)
            late.unsent = True
            raise late
        try:
            yield
        finally:
            self._lock.release()
