"""Decides about copies of the same thing with a slow user function, which is called once for all copies that arrive meanwhile.

It decides about half messages: a broker repeats its question, and a send that was retried may have stored several copies.
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

# Questions of one broker that may wait for the user's function, or whose answers wait for the broker. The broker repeats others.
MAX_WAITING = 1000
# Pause between log lines about ignored questions.
LOG_PAUSE_S = 10.0
# A broker records decisions some seconds later (``transactionOpBatchInterval``), and may ask about a new copy until then. If it
# asks long after a commit, it has lost the commit.
RACE_WINDOW_S = 60.0
MAX_COMMITTED = 100_000


def _no_op() -> None:
    pass


class _SharedState:
    """State that all ``CheckCoalescer`` with the same ``shared_as`` share in a process."""

    def __init__(self) -> None:
        self.lock = threading.RLock()  # reentrant, because garbage collection may close a producer
        self.newest_places: dict[str, Any] = {}  # the places of those that wait for a function
        self.requested: dict[str, CheckCoalescer[Any, Any]] = {}  # by place: the object whose broker asked
        self.deciders: dict[
            str, tuple[CheckCoalescer[Any, Any], Hashable]
        ] = {}  # the object whose function is called, and the one that was asked first
        self.committed_until: OrderedDict[str, Deadline] = OrderedDict()


class CheckCoalescer(Generic[P, D]):
    """Calls a user's function on a separate thread, so that answers that do not need it are sent at once.

    ``answer`` sends a decision about the copy at a place, and returns whether it has certainly arrived. It may block: each
    ``who`` has its own thread, so that a broker that hangs does not delay others. ``taken`` is the decision that may be made
    only once: after it, other copies get ``dropped``. ``unknown`` is the answer if the function fails.

    Objects with the same ``shared_as`` share their state: only one of them calls its function for a thing at a time.
    """

    def __init__(
        self, answer: Callable[[P, D], bool], who: Callable[[P], Hashable], taken: D, dropped: D, unknown: D,
        shared_as: Hashable = None,
    ) -> None:  # fmt: skip
        self._send, self._broker_of = answer, who
        self._commit, self._rollback, self._unknown = taken, dropped, unknown
        self._executor = KeyedExecutor()
        self._senders = KeyedExecutor(2 * MAX_WAITING)  # half of it for answers without the function
        self._stopped_until: Deadline | None = None  # decisions of its function after this time are ignored
        shared = _SharedState() if shared_as is None else process.get_or_create("copies", shared_as, _SharedState)
        self._lock, self._newest_places, self._committed_until = (
            shared.lock,
            shared.newest_places,
            shared.committed_until,
        )
        self._requested, self._deciders = shared.requested, shared.deciders
        self._queued: set[str] = set()  # things that wait for a call of the function
        self._waiting_by_broker: Counter[Hashable] = Counter()
        self._log_limit = RateLimit(LOG_PAUSE_S)
        self._memory = Budget(MAX_WAITING_BYTES)

    def leave(self) -> None:
        """Stop deciding. Brokers may ask the other objects about what waits here."""
        with self._lock:
            self._stopped_until = Deadline.after(RACE_WINDOW_S)
            for what in list(self._queued):
                self._forget(what)

    def request_decision(self, what: str, place: P, decide: Callable[[], D], held_bytes: int = 0) -> D | None:
        """Have the function called, unless a call for ``what`` waits or runs, whose result then also applies to this copy.

        While ``decide`` waits, it keeps ``held_bytes`` in memory.
        """
        who = self._broker_of(place)
        release: Callable[[], None] | None = None
        with self._lock:
            lately = self._committed_until.get(what)
            if lately is not None and not lately.expired:
                return self._rollback
            if self._stopped_until is not None:
                return None
            mine, _ = self._deciders.get(what, (self, who))
            hangs = mine._stopped_until is not None and mine._stopped_until.expired
            if mine is not self and (hangs or what in mine._queued):  # the function here is called as soon, or sooner
                self._forget(what)
            waits = what in self._newest_places
            if not waits and self._waiting_by_broker[who] < MAX_WAITING:
                release = self._memory.claim(who, held_bytes)
            room = waits or release is not None
            if room:
                self._newest_places[what], self._requested[what] = place, self
            if room and not waits:
                self._deciders[what] = self, who
                self._waiting_by_broker[who] += 1
                self._queued.add(what)
        if not room:
            self._log_ignored(what, "too many others, or too many bytes, wait for the function")
        elif release is not None:
            self._submit(self._executor, None, what, functools.partial(self._decide, what, decide, release), release)
        return None

    def send_decision(self, what: str, place: P, decision: D) -> None:
        """Send a decision that does not need the function."""

        def answer() -> None:
            self._send_to(what, place, decision)

        try:
            self._senders.run((self._broker_of(place),), answer)
        except RuntimeError as e:
            self._log_ignored(what, e)

    def _submit(
        self,
        aside: KeyedExecutor,
        key: Hashable,
        what: str,
        work: Callable[[], None],
        release: Callable[[], None] = _no_op,
    ) -> None:
        try:
            aside.run(key, work)
        except RuntimeError as e:
            release()
            with self._lock:
                if self._is_own(what):
                    self._forget(what)
            self._log_ignored(what, e)

    def _log_ignored(self, what: str, why: object) -> None:
        if self._log_limit.due():
            logger.warning(
                "some requests are left to their next repetition, among them the one about %s: %s", what, why
            )

    def _decide(self, what: str, decide: Callable[[], D], release: Callable[[], None]) -> None:
        with self._lock:
            is_open = what in self._queued  # otherwise the producer has closed
            self._queued.discard(what)
        if not is_open:
            release()
            return
        made = capture(decide)
        release()
        if isinstance(made, Failure):  # its state must be removed
            made.log(logger, "%s could not be decided", what)
        decision = self._unknown if isinstance(made, Failure) else made
        with self._lock:
            if not self._is_own(what):
                return
            who = self._broker_of(self._newest_places[what])
        self._submit(self._senders, (who,), what, functools.partial(self._send_to_copies, what, decision))

    def _send_to_copies(self, what: str, decision: D) -> None:
        last: P | None = None
        taken = False
        while (
            copy := self._next_copy(what, last, taken)
        ) is not None:  # a further copy may arrive while one is decided
            asked, last = copy
            taken = asked._send_to(what, last, decision) and decision is self._commit
            decision = self._rollback if taken else decision

    def _send_to(self, what: str, place: P, decision: D) -> bool:
        made = capture(self._send, place, decision)
        if isinstance(made, Failure):
            made.log(logger, "the decision on %s could not be sent", what)
            return False
        return made

    def _next_copy(self, what: str, last: P | None, taken: bool) -> tuple[CheckCoalescer[P, D], P] | None:
        """The newest copy and the object that its broker asked. None if it is the ``last`` one, and then nothing waits."""
        with self._lock:
            if taken:
                self._committed_until[what] = Deadline.after(RACE_WINDOW_S)
                while len(self._committed_until) > MAX_COMMITTED or next(iter(self._committed_until.values())).expired:
                    self._committed_until.popitem(last=False)
            if not self._is_own(what):
                return None
            newest: P = self._newest_places[what]
            if newest is not last:
                return self._requested[what], newest
            self._forget(what)
            return None

    def _is_own(self, what: str) -> bool:
        """Call with the lock. Whether ``what`` still belongs to this object: after it left, another may have taken it over."""
        whose = self._deciders.get(what)
        return whose is not None and whose[0] is self

    def _forget(self, what: str) -> None:
        """Forget ``what``. Call with the lock."""
        del self._newest_places[what], self._requested[what]
        mine, who = self._deciders.pop(what)
        mine._queued.discard(what)
        mine._waiting_by_broker[who] -= 1
        if not mine._waiting_by_broker[who]:
            del mine._waiting_by_broker[who]
