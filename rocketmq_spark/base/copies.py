"""Coalesces checks of half messages: while the user's function decides about a message, further checks of it only wait.

A broker repeats its check, and a send that was retried may have stored several copies of a half message.
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

# Checks of one broker that may wait for the user's function, or whose answers wait for the broker. The broker repeats the others.
MAX_WAITING = 1000
# Pause between log lines about ignored checks.
LOG_PAUSE_S = 10.0
# A broker records decisions some seconds later (``transactionOpBatchInterval``), and may check a new copy until then. A check
# long after a commit means that the broker has lost the commit.
RACE_WINDOW_S = 60.0
MAX_COMMITTED = 100_000


def _no_op() -> None:
    pass


class _SharedState:
    """State of all ``CheckCoalescer`` objects of a process that have the same ``shared_as``. Keys are those of half messages."""

    def __init__(self) -> None:
        self.lock = threading.RLock()  # reentrant, because garbage collection may close a producer
        self.newest_places: dict[str, Any] = {}  # the place of the newest copy, of messages that are being decided
        self.requested: dict[str, CheckCoalescer[Any, Any]] = {}  # the object that got the newest check
        self.deciders: dict[
            str, tuple[CheckCoalescer[Any, Any], Hashable]
        ] = {}  # the object whose function decides, and the broker that sent the first check
        self.committed_until: OrderedDict[str, Deadline] = OrderedDict()


class CheckCoalescer(Generic[P, D]):
    """Calls the user's function on a separate thread, so that decisions that do not need the function are sent at once.

    Args:
        send: Sends a decision about the copy at a place, and returns whether the decision has certainly arrived. It may block:
            each broker has its own thread, so that a broker that hangs does not delay others.
        broker_of: Returns the broker of a place.
        commit: The decision that is made for one copy only. The other copies then get ``rollback``.
        rollback: The decision that drops a copy.
        unknown: The decision if the user's function raises.
        shared_as: Objects with the same value share their state: one of them at a time calls its function for a message.
    """

    def __init__(
        self, send: Callable[[P, D], bool], broker_of: Callable[[P], Hashable], commit: D, rollback: D, unknown: D,
        shared_as: Hashable = None,
    ) -> None:  # fmt: skip
        self._send, self._broker_of = send, broker_of
        self._commit, self._rollback, self._unknown = commit, rollback, unknown
        self._executor = KeyedExecutor()
        self._senders = KeyedExecutor(2 * MAX_WAITING)  # half of it for decisions without the function
        self._stopped_until: Deadline | None = (
            None  # set by ``leave``; decisions of the function after this time are ignored
        )
        shared = _SharedState() if shared_as is None else process.get_or_create("copies", shared_as, _SharedState)
        self._lock, self._newest_places, self._committed_until = (
            shared.lock,
            shared.newest_places,
            shared.committed_until,
        )
        self._requested, self._deciders = shared.requested, shared.deciders
        self._queued: set[str] = set()  # messages that wait for a call of the function
        self._waiting_by_broker: Counter[Hashable] = Counter()
        self._log_limit = RateLimit(LOG_PAUSE_S)
        self._memory = Budget(MAX_WAITING_BYTES)

    def leave(self) -> None:
        """Stop deciding. Brokers may send the checks that wait here to other objects."""
        with self._lock:
            self._stopped_until = Deadline.after(RACE_WINDOW_S)
            for key in list(self._queued):
                self._forget(key)

    def request_decision(self, key: str, place: P, decide: Callable[[], D], held_bytes: int = 0) -> D | None:
        """Queue a call of ``decide``. If a call for ``key`` waits or runs, its result applies to this copy, too.

        Returns a decision that needs no call, for the caller to send; otherwise None. ``held_bytes`` is the memory that
        ``decide`` needs while it waits.
        """
        broker = self._broker_of(place)
        release: Callable[[], None] | None = None
        with self._lock:
            committed_until = self._committed_until.get(key)
            if committed_until is not None and not committed_until.expired:
                return self._rollback
            if self._stopped_until is not None:
                return None
            decider, _ = self._deciders.get(key, (self, broker))
            is_hanging = decider._stopped_until is not None and decider._stopped_until.expired
            if decider is not self and (is_hanging or key in decider._queued):
                # The function of this object is called at the same time or earlier.
                self._forget(key)
            is_pending = key in self._newest_places
            if not is_pending and self._waiting_by_broker[broker] < MAX_WAITING:
                release = self._memory.claim(broker, held_bytes)
            is_accepted = is_pending or release is not None
            if is_accepted:
                self._newest_places[key], self._requested[key] = place, self
            if is_accepted and not is_pending:
                self._deciders[key] = self, broker
                self._waiting_by_broker[broker] += 1
                self._queued.add(key)
        if not is_accepted:
            self._log_ignored(key, "too many others, or too many bytes, wait for the function")
        elif release is not None:
            self._submit(self._executor, None, key, functools.partial(self._decide, key, decide, release), release)
        return None

    def send_decision(self, key: str, place: P, decision: D) -> None:
        """Send a decision that does not need the user's function."""

        def answer() -> None:
            self._send_to(key, place, decision)

        try:
            self._senders.run((self._broker_of(place),), answer)
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
                if self._is_own(key):
                    self._forget(key)
            self._log_ignored(key, e)

    def _log_ignored(self, key: str, reason: object) -> None:
        if self._log_limit.due():
            logger.warning(
                "some requests are left to their next repetition, among them the one about %s: %s", key, reason
            )

    def _decide(self, key: str, decide: Callable[[], D], release: Callable[[], None]) -> None:
        with self._lock:
            is_open = key in self._queued  # otherwise the producer has closed
            self._queued.discard(key)
        if not is_open:
            release()
            return
        outcome = capture(decide)
        release()
        if isinstance(outcome, Failure):  # continue, because the state of the message must be removed
            outcome.log(logger, "%s could not be decided", key)
        decision = self._unknown if isinstance(outcome, Failure) else outcome
        with self._lock:
            if not self._is_own(key):
                return
            broker = self._broker_of(self._newest_places[key])
        self._submit(self._senders, (broker,), key, functools.partial(self._send_to_copies, key, decision))

    def _send_to_copies(self, key: str, decision: D) -> None:
        last: P | None = None
        is_committed = False
        while (
            copy := self._next_copy(key, last, is_committed)
        ) is not None:  # a further copy may arrive while one is decided
            sender, last = copy
            is_committed = sender._send_to(key, last, decision) and decision is self._commit
            decision = self._rollback if is_committed else decision

    def _send_to(self, key: str, place: P, decision: D) -> bool:
        outcome = capture(self._send, place, decision)
        if isinstance(outcome, Failure):
            outcome.log(logger, "the decision on %s could not be sent", key)
            return False
        return outcome

    def _next_copy(self, key: str, last: P | None, is_committed: bool) -> tuple[CheckCoalescer[P, D], P] | None:
        """Return the newest copy, and the object that got its check. If it is the ``last`` copy, forget the message."""
        with self._lock:
            if is_committed:
                self._committed_until[key] = Deadline.after(RACE_WINDOW_S)
                while len(self._committed_until) > MAX_COMMITTED or next(iter(self._committed_until.values())).expired:
                    self._committed_until.popitem(last=False)
            if not self._is_own(key):
                return None
            newest: P = self._newest_places[key]
            if newest is not last:
                return self._requested[key], newest
            self._forget(key)
            return None

    def _is_own(self, key: str) -> bool:
        """Whether this object still decides about the message: after ``leave``, another may do so. Call with the lock."""
        decider = self._deciders.get(key)
        return decider is not None and decider[0] is self

    def _forget(self, key: str) -> None:
        """Remove the state of the message. Call with the lock."""
        del self._newest_places[key], self._requested[key]
        decider, broker = self._deciders.pop(key)
        decider._queued.discard(key)
        decider._waiting_by_broker[broker] -= 1
        if not decider._waiting_by_broker[broker]:
            del decider._waiting_by_broker[broker]
