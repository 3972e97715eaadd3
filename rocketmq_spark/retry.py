"""What is asked again when it failed, and what an error says after a time of trying.

That is the first cause, for the last question of an expired deadline explains nothing: a broker dies, its route goes, and
when patience ends the name server has no time left to answer in. "No name server answers" would be the last error, of the
one server that was well.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import NoReturn, TypeVar

from rocketmq_spark.clock import Deadline, backoff
from rocketmq_spark.errors import RocketMQError

T = TypeVar("T")

_NEVER = Deadline(math.inf)


@dataclass(slots=True)
class Trouble:
    """Errors from the first one until something succeeds."""

    first: RocketMQError | None = None
    since: float = 0.0
    tries: int = 0

    def note(self, error: RocketMQError, now: float) -> None:
        if self.first is None:
            self.first, self.since = error, now
        self.tries += 1

    def clear(self) -> None:
        self.first, self.since, self.tries = None, 0.0, 0

    def cause(self, last: RocketMQError, now: float) -> RocketMQError:
        """The error to raise: the first one with how often and how long was tried, and what was said at last.

        A single error stands for itself, and so does one that no waiting heals.
        """
        first = self.first
        if first is None or first is last or not last.retriable:
            return last
        ending = [f"at last: {last.message}", last.remark] if last.message != first.message else []
        remark = "; ".join(part for part in (first.remark, *ending) if part) or None
        return type(first)(
            f"{first.message}; tried {self.tries} times in {now - self.since:.3g} s",
            first.addr,
            first.broker_code,
            first.topic,
            first.queue or last.queue,
            remark,
            first.remedy or last.remedy,
        )

    def give_up(self, last: RocketMQError, now: float) -> NoReturn:
        """Raise ``cause``, which came of ``last`` unless it is that."""
        cause = self.cause(last, now)
        if cause is last:
            raise last
        raise cause from last


@dataclass(frozen=True, slots=True)
class Retry:
    """How a metadata question is repeated: ``times`` more tries, pauses that double from ``interval_s``."""

    times: int = 3
    interval_s: float = 0.5

    def run(self, ask: Callable[[], T], deadline: Deadline | None = None) -> T:
        """The first success; the last error when tries are over, the first one when time is, others at once."""
        pauses, trouble = backoff(self.interval_s, 10.0), Trouble()
        for left in range(self.times, -1, -1):
            try:
                return ask()
            except RocketMQError as e:
                trouble.note(e, time.monotonic())
                if deadline is not None and deadline.expired and e.retriable:
                    trouble.give_up(e, time.monotonic())
                if not e.retriable or left == 0:
                    raise
                (deadline or _NEVER).pause(next(pauses))
        raise AssertionError("unreachable")
