"""Questions about copies of one thing that a slow function decides: it is asked once about all that came meanwhile."""

from __future__ import annotations

import functools
import logging
import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable
from typing import Any, Generic, TypeVar

from rocketmq_spark.base import process
from rocketmq_spark.base.clock import Deadline, NowAndThen
from rocketmq_spark.base.threads import Aside, Failure, attempt

logger = logging.getLogger(__name__)

P = TypeVar("P")
D = TypeVar("D")

# Questions of one broker that wait for a user's function, or whose answers wait for the broker: what is more is asked again.
MOST_WAITING = 1000
# How often the log says so.
SAID_S = 10.0
# A broker notes decisions some seconds later (``transactionOpBatchInterval``), and may ask about a new copy until then. What it
# asks long after a commit means that it has lost that.
CROSSING_S = 60.0
MOST_ANSWERED = 100_000


class _Shared:
    """What a process knows of things that are asked about, whichever of those that may answer is asked."""

    def __init__(self) -> None:
        self.lock = threading.RLock()  # what garbage collection runs may close a producer
        self.newest: dict[str, Any] = {}  # the places of those that wait for a function
        self.answering: dict[str, CopyQuestions[Any, Any]] = {}  # who was asked about that place
        self.whose: dict[
            str, tuple[CopyQuestions[Any, Any], Hashable]
        ] = {}  # whose function it is, and who asked first
        self.done: OrderedDict[str, Deadline] = OrderedDict()


class CopyQuestions(Generic[P, D]):
    """Asks a user's function on a thread of its own, so that what is known without it is said at once.

    ``answer`` sends a decision about the copy at a place, and says whether it is done for certain. It may block: each ``who``
    asks has a thread for that, so that one that hangs holds up no other. ``taken`` is the decision that may be taken once:
    after it, copies get ``dropped``. ``unknown`` is said where the function fails.

    Those with the same ``shared_as`` are asked about the same things: what one asks its function no other does meanwhile.
    """

    def __init__(
        self, answer: Callable[[P, D], bool], who: Callable[[P], Hashable], taken: D, dropped: D, unknown: D,
        shared_as: Hashable = None,
    ) -> None:  # fmt: skip
        self._answer, self._who = answer, who
        self._taken, self._dropped, self._unknown = taken, dropped, unknown
        self._aside = Aside()
        self._answers = Aside(2 * MOST_WAITING)  # half of it for what is known
        self._left: Deadline | None = None  # what its function has not said by then, it does not say any more
        shared = _Shared() if shared_as is None else process.once("copies", shared_as, _Shared)
        self._lock, self._newest, self._done = shared.lock, shared.newest, shared.done
        self._answering, self._whose = shared.answering, shared.whose
        self._behind: set[str] = set()  # what waits for the turn of the function here
        self._waiting: Counter[Hashable] = Counter()
        self._say_so = NowAndThen(SAID_S)

    def leave(self) -> None:
        """What waits is not decided here any more. Others may be asked about it."""
        with self._lock:
            self._left = Deadline.after(CROSSING_S)
            for what in list(self._behind):
                self._drop(what)

    def ask(self, what: str, place: P, decide: Callable[[], D]) -> D | None:
        """Has the function asked, unless it is going to be, or was: then its answer is about this copy, too."""
        who = self._who(place)
        with self._lock:
            lately = self._done.get(what)
            if lately is not None and not lately.expired:
                return self._dropped
            if self._left is not None:
                return None
            mine, _ = self._whose.get(what, (self, who))
            hangs = mine._left is not None and mine._left.expired
            if mine is not self and (hangs or what in mine._behind):  # its turn comes here as soon, or sooner
                self._drop(what)
            waits = what in self._newest
            room = waits or self._waiting[who] < MOST_WAITING
            if room:
                self._newest[what], self._answering[what] = place, self
            if room and not waits:
                self._whose[what] = self, who
                self._waiting[who] += 1
                self._behind.add(what)
        if not room:
            self._left_for_next_time(what, f"{MOST_WAITING} others wait")
        elif not waits:
            self._soon(self._aside, None, what, functools.partial(self._decide, what, decide))
        return None

    def say(self, what: str, place: P, decision: D) -> None:
        """What is known without the function."""

        def answer() -> None:
            self._answered(what, place, decision)

        try:
            self._answers.run((self._who(place),), answer)
        except RuntimeError as e:
            self._left_for_next_time(what, e)

    def _soon(self, aside: Aside, key: Hashable, what: str, work: Callable[[], None]) -> None:
        try:
            aside.run(key, work)
        except RuntimeError as e:
            with self._lock:
                if self._mine(what):
                    self._drop(what)
            self._left_for_next_time(what, e)

    def _left_for_next_time(self, what: str, why: object) -> None:
        if self._say_so.due():
            logger.warning(
                "some requests are left to their next repetition, among them the one about %s: %s", what, why
            )

    def _decide(self, what: str, decide: Callable[[], D]) -> None:
        with self._lock:
            if what not in self._behind:  # its producer has left
                return
            self._behind.discard(what)
        made = attempt(decide)
        if isinstance(made, Failure):  # what is noted of it must not stay
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
        while (copy := self._next(what, last, taken)) is not None:  # another one may come while one is decided
            asked, last = copy
            taken = asked._answered(what, last, decision) and decision is self._taken
            decision = self._dropped if taken else decision

    def _answered(self, what: str, place: P, decision: D) -> bool:
        made = attempt(self._answer, place, decision)
        if isinstance(made, Failure):
            made.log(logger, "the decision on %s could not be sent", what)
            return False
        return made

    def _next(self, what: str, last: P | None, taken: bool) -> tuple[CopyQuestions[P, D], P] | None:
        """The newest copy, and whom its broker asked; None, and it waits no more, if that is the ``last`` one."""
        with self._lock:
            if taken:
                self._done[what] = Deadline.after(CROSSING_S)
                while len(self._done) > MOST_ANSWERED or next(iter(self._done.values())).expired:
                    self._done.popitem(last=False)
            if not self._mine(what):
                return None
            newest: P = self._newest[what]
            if newest is not last:
                return self._answering[what], newest
            self._drop(what)
            return None

    def _mine(self, what: str) -> bool:
        """With the lock. Whether it was not given to another one, long after this one has left."""
        whose = self._whose.get(what)
        return whose is not None and whose[0] is self

    def _drop(self, what: str) -> None:
        """With the lock."""
        del self._newest[what], self._answering[what]
        mine, who = self._whose.pop(what)
        mine._behind.discard(what)
        mine._waiting[who] -= 1
        if not mine._waiting[who]:
            del mine._waiting[who]
