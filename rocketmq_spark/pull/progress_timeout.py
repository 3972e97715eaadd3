"""How long a read waits for a broker: for the next bytes, for a new connection, and for any progress."""

from __future__ import annotations

import logging
from collections.abc import Callable

from rocketmq_spark.base.clock import Clock, Deadline
from rocketmq_spark.base.retry import Trouble
from rocketmq_spark.errors import CallTimeout, RocketMQError

logger = logging.getLogger(__name__)


# A broker answers these pulls within its queueing time of 5 s; one that says nothing for so long is gone.
BROKER_SILENCE_S = 20.0


# A receipt ends by then, so that what became due meanwhile is looked after.
_LONGEST_WAIT_S = 1.0


_SHORTEST_WAIT_S = 0.001


_TOLD_EVERY_S = 10.0


# The driver waits no longer for a batch that a task can read as well.
_BRIEF_S = 1.0


class ProgressTimeout:
    """Begins anew whenever something was read; what went wrong since then explains its end."""

    def __init__(self, read_deadline_s: float, clock: Clock) -> None:
        self._read_deadline_s = read_deadline_s
        self._clock = clock
        self._trouble = Trouble()
        self._pauses = clock.pauses()
        self._heard_at = self._begun_at = 0.0
        self._told_at: float | None = None
        self._refusal: str | None = None
        self.renew()

    def renew(self) -> None:
        """Begin anew: something was read, or the caller took its time."""
        self._heard_at = self._begun_at = self._clock.now()

    def hope(self) -> None:
        """The broker gives something: errors and pauses begin anew, too."""
        if self._told_at is not None:
            waited_s = self._clock.now() - self._begun_at
            long = waited_s >= _TOLD_EVERY_S
            logger.log(logging.WARNING if long else logging.INFO, "the read continues after %.0f s", waited_s)
            self._told_at = None
        self.renew()
        self._trouble.clear()
        self._pauses = self._clock.pauses()

    def heard(self) -> None:
        """The broker spoke, or is expected to from now on."""
        self._heard_at = self._clock.now()

    def refused(self, text: str) -> None:
        """What the broker said instead of messages, for the error at the end."""
        self._refusal = text

    @property
    def silent(self) -> bool:
        """Whether a broker that owes an answer is taken for gone."""
        return self._clock.now() - self._heard_at > BROKER_SILENCE_S

    def left(self) -> float:
        return max(0.0, self._begun_at + self._read_deadline_s - self._clock.now())

    def deadline(self, max_s: float | None = None) -> Deadline:
        """By when a connection must stand."""
        return Deadline.after(self.left() if max_s is None else min(max_s, self.left()))

    def wait_s(self, due: float | None) -> float:
        """How long to wait for an answer while something else is ``due``."""
        wait = min(_LONGEST_WAIT_S, self.left())
        return wait if due is None else min(wait, max(_SHORTEST_WAIT_S, due - self._clock.now()))

    def pause(self, error: RocketMQError, place: Callable[[], str]) -> None:
        """Sleep before the next connection is tried; ``place`` says what is waited for.

        Raises ``error`` when no waiting heals it; when patience is over, what went wrong first.
        """
        over = self.left() <= 0
        self._trouble.note(error, self._clock.now(), cut_short=over)
        if not error.retriable or over:
            self._trouble.give_up(error, self._clock.now())
        if self._told_at is None:
            self._tell(place, str(error))
        self.tell(place)
        self._clock.sleep(min(next(self._pauses), self.left()))

    def tell(self, place: Callable[[], str]) -> None:
        """Say that the read waits, and for what, where it has waited for long and that was not said a moment ago."""
        since = self._begun_at if self._told_at is None else self._told_at
        if self._clock.now() - since >= _TOLD_EVERY_S:
            last = self._trouble.last
            self._tell(place, str(last) if last is not None else self._refusal or "it does not answer")

    def _tell(self, place: Callable[[], str], why: str) -> None:
        self._told_at = self._clock.now()
        waited_s = self._told_at - self._begun_at
        # The error at the end of a short wait is enough.
        logger.log(
            logging.WARNING if self._read_deadline_s > _BRIEF_S else logging.INFO,
            "the read waits for %s, for %.0f s of %g s (option 'readDeadline'): %s",
            place(),
            waited_s,
            self._read_deadline_s,
            why,
        )

    def timeout(self, address: str) -> CallTimeout:
        return CallTimeout(f"no message came within {self._read_deadline_s:g} s", address, remark=self._refusal)
