"""Questions about copies of one thing that a slow function decides: it is asked once about all that came meanwhile."""

from __future__ import annotations

import functools
import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

from rocketmq_spark.base.clock import Deadline
from rocketmq_spark.base.threads import Aside, Failure, attempt

logger = logging.getLogger(__name__)

P = TypeVar("P")
D = TypeVar("D")

# Questions that wait for a user's function, and answers that wait for who asked: what is more is asked again.
MOST_WAITING = 1000
# A broker notes decisions some seconds later (``transactionOpBatchInterval``), and may ask about a new copy until then. What it
# asks long after a commit means that it has lost that.
CROSSING_S = 60.0
MOST_ANSWERED = 100_000


class CopyQuestions(Generic[P, D]):
    """Asks a user's function on a thread of its own, so that what is known without it is said at once.

    ``answer`` sends a decision about the copy at a place, and says whether it is done for certain. It may block: each ``who``
    asks has a thread for that, so that one that hangs holds up no other. ``taken`` is the decision that may be taken once:
    after it, copies get ``dropped``. ``unknown`` is said where the function fails.
    """

    def __init__(
        self, answer: Callable[[P, D], bool], who: Callable[[P], Hashable], taken: D, dropped: D, unknown: D
    ) -> None:
        self._answer, self._who = answer, who
        self._taken, self._dropped, self._unknown = taken, dropped, unknown
        self._aside = Aside(MOST_WAITING)
        self._left = False
        self._lock = threading.Lock()
        self._newest: dict[str, P] = {}  # of those that wait for the function
        self._done: OrderedDict[str, Deadline] = OrderedDict()

    def leave(self) -> None:
        """What waits is not decided here any more."""
        self._left = True

    def ask(self, what: str, place: P, decide: Callable[[], D]) -> D | None:
        """Has the function asked, unless it is going to be, or was: then its answer is about this copy, too."""
        with self._lock:
            lately = self._done.get(what)
            if lately is not None and not lately.expired:
                return self._dropped
            waits = what in self._newest
            self._newest[what] = place
        if not waits:
            self._soon(None, what, functools.partial(self._decide, what, decide))
        return None

    def say(self, what: str, place: P, decision: D) -> None:
        """What is known without the function."""
        try:
            self._aside.run((self._who(place),), functools.partial(self._answered, what, place, decision))
        except RuntimeError as e:
            _left_for_next_time(what, e)

    def _soon(self, key: Hashable, what: str, work: Callable[[], None]) -> None:
        try:
            self._aside.run(key, work)
        except RuntimeError as e:
            self._over(what)
            _left_for_next_time(what, e)

    def _decide(self, what: str, decide: Callable[[], D]) -> None:
        if self._left:
            self._over(what)
            return
        made = attempt(decide)
        if isinstance(made, Failure):  # what is noted of it must not stay
            made.log(logger, "%s could not be decided", what)
        decision = self._unknown if isinstance(made, Failure) else made
        self._soon((self._who(self._newest[what]),), what, functools.partial(self._tell, what, decision))

    def _tell(self, what: str, decision: D) -> None:
        newest: P | None = self._newest[what]
        while newest is not None:  # another copy may come while one is decided
            taken = self._answered(what, newest, decision) and decision is self._taken
            newest = self._over(what, newest, taken)
            decision = self._dropped if taken else decision

    def _answered(self, what: str, place: P, decision: D) -> bool:
        made = attempt(self._answer, place, decision)
        if isinstance(made, Failure):
            made.log(logger, "the decision on %s could not be sent", what)
            return False
        return made

    def _over(self, what: str, last: P | None = None, taken: bool = False) -> P | None:
        """It does not wait any more, unless a question came after the ``last``, which is returned."""
        with self._lock:
            if taken:
                self._done[what] = Deadline.after(CROSSING_S)
                while len(self._done) > MOST_ANSWERED or next(iter(self._done.values())).expired:
                    self._done.popitem(last=False)
            newest = self._newest[what]
            if last is not None and newest is not last:
                return newest
            del self._newest[what]
            return None


def _left_for_next_time(what: str, error: RuntimeError) -> None:
    logger.warning("the question about %s is left for the next time: %s", what, error)
