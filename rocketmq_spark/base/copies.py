"""Coalesces checks of half messages: while the user's function decides about a message, further checks of the message wait for
the result, and do not call the function again.

There are further checks because a broker repeats its check, and because a retried send may have stored several copies of the half
message.
"""

from __future__ import annotations

import functools
import logging
import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable
from typing import Any, Generic, TypeVar

from rocketmq_spark.base import process
from rocketmq_spark.base.budget import MAX_WAITING_BYTES, Budget
from rocketmq_spark.base.clock import Deadline, RateLimit
from rocketmq_spark.base.threads import Failure, KeyedExecutor, capture

logger = logging.getLogger(__name__)

P = TypeVar("P")
D = TypeVar("D")

# The maximum number of checks of one broker that wait for the user's function, or wait until the decision is sent. Further
# checks are dropped, because the broker repeats them.
MAX_WAITING_CHECKS = 1000
# Pause between log lines about ignored checks.
LOG_PAUSE_S = 10.0
# A broker records a decision some seconds after the decision arrives (``transactionOpBatchInterval``). Until then, the broker
# may check a new copy of the message. A check long after a commit means that the broker has lost the commit.
RACE_WINDOW_S = 60.0
MAX_COMMITTED_KEYS = 100_000


def _no_op() -> None:
    pass


class _SharedState:
    """The state that all ``CheckCoalescer`` objects with the same ``sharing_key`` share in a process. The keys of its
    dictionaries identify half messages.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()  # reentrant, because garbage collection may close a producer
        self.newest_places: dict[str, Any] = {}  # the place of the newest copy of each undecided message
        # The object that got the newest check of the message.
        self.newest_receivers: dict[str, CheckCoalescer[Any, Any]] = {}
        # The object whose function decides about the message, and the broker that sent the message's first check.
        self.deciders: dict[str, tuple[CheckCoalescer[Any, Any], Hashable]] = {}
        # Until when further copies of a committed message are rolled back.
        self.rollback_deadlines: OrderedDict[str, Deadline] = OrderedDict()


class CheckCoalescer(Generic[P, D]):
    """Calls the user's function on a separate thread, so that decisions that do not need the function are sent at once.

    Args:
        send: Sends a decision about one copy, and returns whether the decision has certainly arrived. A copy is identified by
            its place: broker and offset. ``send`` may block: each broker has its own thread, so a broker that hangs delays no
            decisions for other brokers.
        broker_of: Returns the broker in the place of a copy.
        commit_decision: The decision that delivers the message. Only one copy gets this decision; the other copies then get
            ``rollback_decision``.
        rollback_decision: The decision that drops a copy.
        unknown_decision: The decision if the user's function raises.
        sharing_key: Objects with the same key share their state: only one of them at a time calls its function for a message.
    """

    def __init__(
        self, send: Callable[[P, D], bool], broker_of: Callable[[P], Hashable], commit_decision: D, rollback_decision: D,
        unknown_decision: D, sharing_key: Hashable = None,
    ) -> None:  # fmt: skip
        self._send, self._broker_of = send, broker_of
        self._commit_decision, self._rollback_decision, self._unknown_decision = (
            commit_decision,
            rollback_decision,
            unknown_decision,
        )
        self._decide_executor = KeyedExecutor()
        # One half of this limit is for decisions of the user's function, the other half for decisions without a call of the
        # function.
        self._send_executor = KeyedExecutor(2 * MAX_WAITING_CHECKS)
        # This deadline is set by ``leave``. Decisions that the function makes after this deadline are ignored.
        self._leave_deadline: Deadline | None = None
        shared_state = (
            _SharedState() if sharing_key is None else process.get_or_create("copies", sharing_key, _SharedState)
        )
        self._lock, self._newest_places, self._rollback_deadlines = (
            shared_state.lock,
            shared_state.newest_places,
            shared_state.rollback_deadlines,
        )
        self._newest_receivers, self._deciders = shared_state.newest_receivers, shared_state.deciders
        self._queued_keys: set[str] = set()  # messages that wait for a call of the function
        self._waiting_checks_by_broker: Counter[Hashable] = Counter()
        self._log_limit = RateLimit(LOG_PAUSE_S)
        self._memory_budget = Budget(MAX_WAITING_BYTES)

    def leave(self) -> None:
        """Stop deciding. The checks that wait here are dropped; brokers may later send them to other objects."""
        with self._lock:
            self._leave_deadline = Deadline.after(RACE_WINDOW_S)
            for key in list(self._queued_keys):
                self._forget(key)

    def request_decision(self, key: str, place: P, decide: Callable[[], D], held_bytes: int = 0) -> D | None:
        """Queue a call of ``decide``. If a call for ``key`` waits or runs, the result of that call applies to the copy at
        ``place``, too.

        Returns a decision that needs no call, for the caller to send; otherwise None. ``held_bytes`` is the memory that
        ``decide`` needs while it waits.
        """
        broker = self._broker_of(place)
        release: Callable[[], None] | None = None
        with self._lock:
            rollback_deadline = self._rollback_deadlines.get(key)
            if rollback_deadline is not None and not rollback_deadline.expired:
                return self._rollback_decision
            if self._leave_deadline is not None:
                return None
            decider, _ = self._deciders.get(key, (self, broker))
            is_hanging = decider._leave_deadline is not None and decider._leave_deadline.expired
            if decider is not self and (is_hanging or key in decider._queued_keys):
                # This object takes the message over from ``decider``, whose function hangs or is not called yet.
                self._forget(key)
            is_pending = key in self._newest_places
            if not is_pending and self._waiting_checks_by_broker[broker] < MAX_WAITING_CHECKS:
                release = self._memory_budget.claim(broker, held_bytes)
            is_accepted = is_pending or release is not None
            if is_accepted:
                self._newest_places[key], self._newest_receivers[key] = place, self
            if is_accepted and not is_pending:
                self._deciders[key] = self, broker
                self._waiting_checks_by_broker[broker] += 1
                self._queued_keys.add(key)
        if not is_accepted:
            self._log_ignored(key, "too many checks, or too many bytes, wait for the function")
        elif release is not None:
            self._submit(
                self._decide_executor, None, key, functools.partial(self._decide, key, decide, release), release
            )
        return None

    def send_decision(self, key: str, place: P, decision: D) -> None:
        """Send a decision that does not need the user's function."""

        def answer() -> None:
            self._send_to_copy(key, place, decision)

        try:
            self._send_executor.run((self._broker_of(place),), answer)
        except RuntimeError as e:
            self._log_ignored(key, e)

    def _submit(
        self,
        executor: KeyedExecutor,
        executor_key: Hashable,
        key: str,
        work: Callable[[], None],
        release: Callable[[], None] = _no_op,
    ) -> None:
        try:
            executor.run(executor_key, work)
        except RuntimeError as e:
            release()
            with self._lock:
                if self._is_decider(key):
                    self._forget(key)
            self._log_ignored(key, e)

    def _log_ignored(self, key: str, reason: object) -> None:
        if self._log_limit.due():
            logger.warning(
                "some checks are ignored until brokers repeat them, such as the check of %s: %s", key, reason
            )

    def _decide(self, key: str, decide: Callable[[], D], release: Callable[[], None]) -> None:
        with self._lock:
            is_queued = key in self._queued_keys  # false if the producer has been closed
            self._queued_keys.discard(key)
        if not is_queued:
            release()
            return
        outcome = capture(decide)
        release()
        if isinstance(outcome, Failure):  # continue, because the state of the message must be removed
            outcome.log(logger, "%s could not be decided", key)
        decision = self._unknown_decision if isinstance(outcome, Failure) else outcome
        with self._lock:
            if not self._is_decider(key):
                return
            broker = self._broker_of(self._newest_places[key])
        self._submit(self._send_executor, (broker,), key, functools.partial(self._send_to_copies, key, decision))

    def _send_to_copies(self, key: str, decision: D) -> None:
        previous_place: P | None = None
        is_committed = False
        # While a decision is sent, a check of a further copy may arrive.
        while (newest_copy := self._next_copy(key, previous_place, is_committed)) is not None:
            receiver, previous_place = newest_copy
            is_committed = receiver._send_to_copy(key, previous_place, decision) and decision is self._commit_decision
            decision = self._rollback_decision if is_committed else decision

    def _send_to_copy(self, key: str, place: P, decision: D) -> bool:
        outcome = capture(self._send, place, decision)
        if isinstance(outcome, Failure):
            outcome.log(logger, "the decision on %s could not be sent", key)
            return False
        return outcome

    def _next_copy(
        self, key: str, previous_place: P | None, is_committed: bool
    ) -> tuple[CheckCoalescer[P, D], P] | None:
        """Return the place of the newest copy, and the object that got its check. If the newest copy is at ``previous_place``,
        forget the message and return None.
        """
        with self._lock:
            if is_committed:
                self._rollback_deadlines[key] = Deadline.after(RACE_WINDOW_S)
                while (
                    len(self._rollback_deadlines) > MAX_COMMITTED_KEYS
                    or next(iter(self._rollback_deadlines.values())).expired
                ):
                    self._rollback_deadlines.popitem(last=False)
            if not self._is_decider(key):
                return None
            newest_place: P = self._newest_places[key]
            if newest_place is not previous_place:
                return self._newest_receivers[key], newest_place
            self._forget(key)
            return None

    def _is_decider(self, key: str) -> bool:
        """Whether this object still decides about the message. After ``leave``, another object may decide. The caller holds the
        lock.
        """
        decider = self._deciders.get(key)
        return decider is not None and decider[0] is self

    def _forget(self, key: str) -> None:
        """Remove the state of the message. The caller holds the lock."""
        del self._newest_places[key], self._newest_receivers[key]
        decider, broker = self._deciders.pop(key)
        decider._queued_keys.discard(key)
        decider._waiting_checks_by_broker[broker] -= 1
        if not decider._waiting_checks_by_broker[broker]:
            del decider._waiting_checks_by_broker[broker]
