"""How long a read waits for a broker: for the next bytes, for a new connection, and for any progress.

A wait is logged at once if something failed, and every ten seconds. The level is INFO in reads that wait for at most a second,
else WARNING.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from rocketmq_spark.base.clock import Clock, Deadline
from rocketmq_spark.base.retry import RetryErrors
from rocketmq_spark.errors import CallTimeout, RocketMQError

logger = logging.getLogger(__name__)

# A broker that sends nothing for this long counts as unavailable. An available broker answers the pulls of a read within its
# queueing time of 5 s.
MAX_BROKER_SILENCE_S = 20.0
# A wait for bytes ends after this time, so that the reader notices attempts that became due meanwhile.
_LONGEST_RECEIVE_S = 1.0
_SHORTEST_RECEIVE_S = 0.001
_LOG_INTERVAL_S = 10.0
# The longest time limit of a short read. The driver uses short reads for batches that a task can also read.
_SHORT_READ_S = 1.0


class ProgressTimeout:
    """The time limit of a read, which starts again whenever the read progresses. If a read exceeds the limit, its error has the
    first failure since the last progress.
    """

    def __init__(self, read_deadline_s: float, clock: Clock) -> None:
        self._read_deadline_s = read_deadline_s
        self._clock = clock
        self._retry_errors = RetryErrors()
        self._pauses = clock.pauses()
        self._last_answer_at = self._started_at = 0.0
        self._logged_at: float | None = None
        self._last_refusal: str | None = None
        self.restart()

    def restart(self) -> None:
        """Start the time limit again, because the time that the caller used for delivered messages does not count."""
        self._last_answer_at = self._started_at = self._clock.now()

    def record_progress(self) -> None:
        """Start the time limit again, and forget failures and pauses, because the broker sent messages, or showed that there
        are none.
        """
        if self._logged_at is not None:
            waited_s = self._clock.now() - self._started_at
            is_long = waited_s >= _LOG_INTERVAL_S
            logger.log(logging.WARNING if is_long else logging.INFO, "the read continues after %.0f s", waited_s)
            self._logged_at = None
        self.restart()
        self._retry_errors.clear()
        self._pauses = self._clock.pauses()

    def record_answer(self) -> None:
        """Record that the broker answered, or that it now has a request to answer."""
        self._last_answer_at = self._clock.now()

    def record_refusal(self, text: str) -> None:
        """Keep the broker's latest reason for not sending messages, for the error of a read that exceeds the limit."""
        self._last_refusal = text

    @property
    def is_broker_silent(self) -> bool:
        """Whether the broker has been silent for longer than ``MAX_BROKER_SILENCE_S``, although it has requests to answer."""
        return self._clock.now() - self._last_answer_at > MAX_BROKER_SILENCE_S

    def remaining_s(self) -> float:
        return max(0.0, self._started_at + self._read_deadline_s - self._clock.now())

    def connect_deadline(self, max_s: float | None = None) -> Deadline:
        """Return the deadline of a connection attempt."""
        return Deadline.after(self.remaining_s() if max_s is None else min(max_s, self.remaining_s()))

    def receive_wait_s(self, next_retry_at: float | None) -> float:
        """Return how long to wait for bytes if the reader has something to do at ``next_retry_at``."""
        wait_s = min(_LONGEST_RECEIVE_S, self.remaining_s())
        return (
            wait_s
            if next_retry_at is None
            else min(wait_s, max(_SHORTEST_RECEIVE_S, next_retry_at - self._clock.now()))
        )

    def pause_or_raise(self, error: RocketMQError, describe_wait: Callable[[], str]) -> None:
        """Sleep before the next connection attempt. ``describe_wait`` returns what the read waits for.

        Raises ``error`` if it is permanent. If the time is over, raises the first failure.
        """
        is_over = self.remaining_s() <= 0
        self._retry_errors.record(error, self._clock.now(), is_cut_short=is_over)
        if not error.retriable or is_over:
            self._retry_errors.raise_final(error, self._clock.now())
        if self._logged_at is None:
            self._log(describe_wait, str(error))
        self.log_wait(describe_wait)
        self._clock.sleep(min(next(self._pauses), self.remaining_s()))

    def log_wait(self, describe_wait: Callable[[], str]) -> None:
        """Log what the read waits for. Does nothing in the first ten seconds after the start and after each log line."""
        waiting_since = self._started_at if self._logged_at is None else self._logged_at
        if self._clock.now() - waiting_since >= _LOG_INTERVAL_S:
            last_failure = self._retry_errors.last_error
            self._log(
                describe_wait,
                str(last_failure) if last_failure is not None else self._last_refusal or "it does not answer",
            )

    def _log(self, describe_wait: Callable[[], str], reason: str) -> None:
        self._logged_at = self._clock.now()
        waited_s = self._logged_at - self._started_at
        # A short read logs its waits below WARNING, because its error is enough.
        logger.log(
            logging.WARNING if self._read_deadline_s > _SHORT_READ_S else logging.INFO,
            "the read waits for %s, for %.0f s of %g s (option 'readDeadline'): %s",
            describe_wait(),
            waited_s,
            self._read_deadline_s,
            reason,
        )

    def timeout_error(self, address: str) -> CallTimeout:
        return CallTimeout(f"no message came within {self._read_deadline_s:g} s", address, remark=self._last_refusal)
