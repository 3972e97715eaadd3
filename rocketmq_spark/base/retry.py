"""Retries of metadata requests (``Retry``), and the error to raise when retries end (``RetryErrors``).

The raised error names the first cause, and the last error before the deadline. The error of a request that the deadline cut short
is left out, because such an error misleads. For example, a broker dies, its route expires, and at the deadline the name server
has no time to answer. The last error would then be "no name server answers", although the name server is healthy.
``pull/outcomes`` decides about retries of pulls, and ``producer/retry`` about retries of sends.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import NoReturn, TypeVar

from rocketmq_spark.base.clock import Deadline, backoff
from rocketmq_spark.errors import RocketMQError

T = TypeVar("T")

_NO_DEADLINE = Deadline(math.inf)


@dataclass(slots=True)
class RetryErrors:
    """The errors of consecutive failed attempts."""

    first_error: RocketMQError | None = None
    last_error: RocketMQError | None = None
    first_failure_s: float = 0.0
    attempt_count: int = 0

    def record(self, error: RocketMQError, now_s: float, is_cut_short: bool = False) -> None:
        """Record an error. ``is_cut_short`` says whether the deadline expired during the request."""
        if self.first_error is None:
            self.first_error, self.first_failure_s = error, now_s
        if self.last_error is None or not is_cut_short:
            self.last_error = error
        self.attempt_count += 1

    def clear(self) -> None:
        self.first_error, self.last_error, self.first_failure_s, self.attempt_count = None, None, 0.0, 0

    def final_error(self, error: RocketMQError, now_s: float) -> RocketMQError:
        """Return the error to raise after ``error``: a copy of the first error. The text of the copy also has the number and
        duration of the attempts, and the last error.

        A single error, or a permanent one, is returned as it is.
        """
        first, last = self.first_error, self.last_error
        if first is None or last is None or self.attempt_count < 2 or not error.retriable:
            return error
        last_texts = [f"at last: {last.message}", last.remark] if last.message != first.message else []
        remark = "; ".join(part for part in (first.remark, *last_texts) if part) or None
        return type(first)(
            f"{first.message}; tried {self.attempt_count} times in {now_s - self.first_failure_s:.3g} s",
            first.addr,
            first.broker_code,
            first.topic,
            first.queue or last.queue,
            remark,
            first.remedy or last.remedy,
        )

    def raise_final(self, error: RocketMQError, now_s: float) -> NoReturn:
        """Raise ``final_error(error)``, chained to ``error`` unless it is the same."""
        final_error = self.final_error(error, now_s)
        if final_error is error:
            raise error
        raise final_error from error


@dataclass(frozen=True, slots=True)
class Retry:
    """Repeats a metadata request: up to ``max_retries`` more attempts, with pauses that double from ``interval_s``."""

    max_retries: int = 3
    interval_s: float = 0.5

    def run(self, request: Callable[[], T], deadline: Deadline | None = None) -> T:
        """Return the first result. Raises a permanent error at once. Otherwise raises the last error after all attempts, or
        ``final_error`` when the deadline is reached.
        """
        pauses, errors = backoff(self.interval_s, 10.0), RetryErrors()
        for attempts_left in range(self.max_retries, -1, -1):
            try:
                return request()
            except RocketMQError as e:
                is_expired = deadline is not None and deadline.expired and e.retriable
                errors.record(e, time.monotonic(), is_cut_short=is_expired)
                if is_expired:
                    errors.raise_final(e, time.monotonic())
                if not e.retriable or attempts_left == 0:
                    raise
                (deadline or _NO_DEADLINE).pause(next(pauses))
        raise AssertionError("unreachable")
