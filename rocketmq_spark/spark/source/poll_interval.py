"""Decides when the bounds of the queues are fetched again. Pure.

While no messages arrive, the interval doubles up to a quarter of a second. If there are so many topics that a poll takes long,
the interval grows further, until only a hundredth of the time is spent on polls.
"""

from __future__ import annotations

MIN_INTERVAL_S = 0.01
MAX_INTERVAL_S = 0.25
_MAX_INTERVAL_PER_POLL_DURATION = 100
_MAX_SLOW_INTERVAL_S = 10.0
# Spark requests the end of a batch, a progress report and the tasks one after the other. These three requests use the bounds of
# the same poll if the poll is not older than this time.
_SAME_BATCH_MAX_AGE_S = 1.0


class PollInterval:
    """The time of the last poll, and the interval to the next one. Times are those of the caller's clock, in seconds."""

    def __init__(self) -> None:
        self._polled_at_s = 0.0
        self._poll_duration_s = 0.0
        self._interval_s = MIN_INTERVAL_S

    @property
    def interval_s(self) -> float:
        return self._interval_s

    def is_due(self, now_s: float) -> bool:
        return now_s - self._polled_at_s >= self._interval_s

    def serves_same_batch(self, now_s: float) -> bool:
        """Whether the last poll is recent enough for the other calls of the batch that was planned from it."""
        return now_s - self._polled_at_s < max(_SAME_BATCH_MAX_AGE_S, 3 * self._poll_duration_s)

    def wait_s(self, now_s: float, max_wait_s: float) -> float:
        """Return the time to wait for the next poll, usually at most ``max_wait_s``.

        If polls take longer than ``max_wait_s``, the wait is as long as a poll, at most a quarter of a second.
        """
        remaining_s = self._polled_at_s + self._interval_s - now_s
        return max(0.0, min(remaining_s, max(max_wait_s, min(self._poll_duration_s, MAX_INTERVAL_S))))

    def note_poll(self, now_s: float, duration_s: float, is_unchanged: bool) -> None:
        """Note a poll that ended at ``now_s``. ``duration_s`` is 0 if the duration of the poll does not show how long polls
        usually take.
        """
        max_interval_s = max(MAX_INTERVAL_S, min(_MAX_SLOW_INTERVAL_S, _MAX_INTERVAL_PER_POLL_DURATION * duration_s))
        self._interval_s = (
            min(max_interval_s, max(self._interval_s * 2, 5 * duration_s)) if is_unchanged else MIN_INTERVAL_S
        )
        self._polled_at_s, self._poll_duration_s = now_s, duration_s

    def expire(self) -> None:
        """Make the next poll due now."""
        self._polled_at_s = float("-inf")
