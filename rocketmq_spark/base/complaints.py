"""The log level of a problem that lasts: a warning when it begins, and now and then."""

from __future__ import annotations

import logging
from collections.abc import Hashable

from rocketmq_spark.base.clock import RateLimit

REPEAT_S = 300.0


class LogThrottle:
    """The present problems of things such as topics and queues. The first failed attempt of a kind is a warning, and then one
    attempt in five minutes while the problem lasts.
    """

    def __init__(self) -> None:
        self._limits: dict[Hashable, dict[Hashable, RateLimit]] = {}  # the kinds of problems of each thing

    def level(self, thing: Hashable, why: object) -> int:
        """Return WARNING for a new kind of problem, and every ``REPEAT_S`` seconds while this kind lasts; else INFO."""
        kind = type(why), getattr(why, "broker_code", None)
        kinds = self._limits.setdefault(thing, {})
        if kind not in kinds:
            kinds[kind] = RateLimit(REPEAT_S)
        return logging.WARNING if kinds[kind].due() else logging.INFO

    def resolved(self, thing: Hashable) -> bool:
        """Note that the thing has no problem. Returns whether it had one."""
        return self._limits.pop(thing, None) is not None
