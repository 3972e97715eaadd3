"""The log level of a problem that lasts: a warning when it begins, and every five minutes."""

from __future__ import annotations

import logging
from collections.abc import Hashable

from rocketmq_spark.base.clock import RateLimit

WARNING_INTERVAL_S = 300.0


class LogThrottle:
    """The current problems of subjects such as topics and queues. The first failure of a kind is logged as a warning. While the
    problem lasts, one failure in five minutes is logged as a warning.
    """

    def __init__(self) -> None:
        self._limits: dict[Hashable, dict[Hashable, RateLimit]] = {}  # a limit for each subject and kind of problem

    def level(self, subject: Hashable, error: object) -> int:
        """Return WARNING for a new kind of problem, and every ``WARNING_INTERVAL_S`` seconds while this kind lasts; else INFO."""
        kind = type(error), getattr(error, "broker_code", None)
        limits_by_kind = self._limits.setdefault(subject, {})
        if kind not in limits_by_kind:
            limits_by_kind[kind] = RateLimit(WARNING_INTERVAL_S)
        return logging.WARNING if limits_by_kind[kind].due() else logging.INFO

    def mark_resolved(self, subject: Hashable) -> bool:
        """Record that the subject has no problem. Returns whether it had one."""
        return self._limits.pop(subject, None) is not None
