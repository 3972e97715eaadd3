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
        self.newest: dict[str, Any] = {}  # the places of those that wait for a function
        self.answering: dict[str, CheckCoalescer[Any, Any]] = {}  # by place: the object whose broker asked
        self.whose: dict[
            str, tuple[CheckCoalescer[Any, Any], Hashable]
        ] = {}  # the object whose function is called, and the one that was asked first
        self.done: OrderedDict[str, Deadline] = OrderedDict()


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
        self._answer, self._who = answer, who
        self._taken, self._dropped, self._unknown = taken, dropped, unknown
        self._aside = KeyedExecutor()
        self._answers = KeyedExecutor(2 * MAX_WAITING)  # half of it for answers without the function
        self._left: Deadline | None = None  # decisions of its function after this time are ignored
        shared = _SharedState() if shared_as is None else process.get_or_create("copies", shared_as, _SharedState)
        self._lock, self._newest, self._done = shared.lock, shared.newest, shared.done
        self._answering, self._whose = shared.answering, shared.whose
        self._behind: set[str] = set()  # things that wait for a call of the function
        self._waiting: Counter[Hashable] = Counter()
        self._say_so = RateLimit(LOG_PAUSE_S)
        self._held = Budget(MAX_WAITING_BYTES)

    def leave(self) -> None:
        """Stop deciding. Brokers may ask the other objects about what waits here."""
        with self._lock:
            self._left = Deadline.after(RACE_WINDOW_S)
            for what in list(self._behind):
                self._drop(what)

    def ask(self, what: str, place: P, decide: Callable[[], D], held_bytes: int = 0) -> D | None:
        """Have the function called, unless a call for ``what`` waits or runs, whose result then also applies to this copy.

        While ``decide`` waits, it keeps ``held_bytes`` in memory.
        """
        who = self._who(place)
        release: Callable[[], None] | None = None
        with self._lock:
            lately = self._done.get(what)
            if lately is not None and not lately.expired:
                return self._dropped
            if self._left is not None:
                return None
            mine, _ = self._whose.get(what, (self, who))
            hangs = mine._left is not None and mine._left.expired
            if mine is not self and (hangs or what in mine._behind):  # the function here is called as soon, or sooner
                self._drop(what)
            waits = what in self._newest
            if not waits and self._waiting[who] < MAX_WAITING:
                release = self._held.claim(who, held_bytes)
            room = waits or release is not None
            if room:
                self._newest[what], self._answering[what] = place, self
            if room and not waits:
                self._whose[what] = self, who
                self._waiting[who] += 1
                self._behind.add(what)
        if not room:
            self._log_ignored(what, "too many others, or too many bytes, wait for the function")
        elif release is not None:
            self._soon(self._aside, None, what, functools.partial(self._decide, what, decide, release), release)
        return None

    def say(self, what: str, place: P, decision: D) -> None:
        """Send a decision that does not need the function."""

        def answer() -> None:
            self._answered(what, place, decision)

        try:
            self._answers.run((self._who(place),), answer)
        except RuntimeError as e:
            self._log_ignored(what, e)

    def _soon(
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
                if self._mine(what):
                    self._drop(what)
            self._log_ignored(what, e)

    def _log_ignored(self, what: str, why: object) -> None:
        if self._say_so.due():
            logger.warning(
                "some requests are left to their next repetition, among them the one about %s: %s", what, why
            )

    def _decide(self, what: str, decide: Callable[[], D], release: Callable[[], None]) -> None:
        with self._lock:
            is_open = what in self._behind  # otherwise the producer has closed
            self._behind.discard(what)
        if not is_open:
            release()
            return
        made = capture(decide)
        release()
        if isinstance(made, Failure):  # its state must be removed
            made.log(logger, "%s could not be decided", what)
        decision = self._unknown if isinstance(made, Failure) else made
        with self._lock:
            if not self._mine(what):
                return
            who = self._who(self._newest[what])
        self._soon(self._answers, (who,), what, functools.partial(self._tell, what, decision))

    def _tell(self, what: str, decision: D) -> None:
        last: P | None = None
        taken = False
        while (copy := self._next(what, last, taken)) is not None:  # a further copy may arrive while one is decided
            asked, last = copy
            taken = asked._answered(what, last, decision) and decision is self._taken
            decision = self._dropped if taken else decision

    def _answered(self, what: str, place: P, decision: D) -> bool:
        made = capture(self._answer, place, decision)
        if isinstance(made, Failure):
            made.log(logger, "the decision on %s could not be sent", what)
            return False
        return made

    def _next(self, what: str, last: P | None, taken: bool) -> tuple[CheckCoalescer[P, D], P] | None:
        """The newest copy and the object that its broker asked. None if it is the ``last`` one, and then nothing waits."""
        with self._lock:
            if taken:
                self._done[what] = Deadline.after(RACE_WINDOW_S)
                while len(self._done) > MAX_COMMITTED or next(iter(self._done.values())).expired:
                    self._done.popitem(last=False)
            if not self._mine(what):
                return None
            newest: P = self._newest[what]
            if newest is not last:
                return self._answering[what], newest
            self._drop(what)
            return None

    def _mine(self, what: str) -> bool:
        """Call with the lock. Whether ``what`` still belongs to this object: after it left, another may have taken it over."""
        whose = self._whose.get(what)
        return whose is not None and whose[0] is self

    def _drop(self, what: str) -> None:
        """Forget ``what``. Call with the lock."""
        del self._newest[what], self._answering[what]
        mine, who = self._whose.pop(what)
        mine._behind.discard(what)
        mine._waiting[who] -= 1
        if not mine._waiting[who]:
            del mine._waiting[who]
