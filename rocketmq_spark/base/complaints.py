"""The log level of a problem that lasts: a warning when it begins, and now and then."""

from __future__ import annotations

import logging
from collections.abc import Hashable

from rocketmq_spark.base.clock import NowAndThen

REPEAT_S = 300.0


class Complaints:
    """The present problem of each thing, such as a topic or queue. Attempts that are repeated each second log a warning, and
    another one each five minutes while the problem lasts.
    """

    def __init__(self) -> None:
        self._known: dict[Hashable, dict[Hashable, NowAndThen]] = {}  # of each thing, the kinds of its problem

    def level(self, thing: Hashable, why: object) -> int:
        """Return WARNING for a new problem and now and then for one of the same kind as before, else INFO."""
        kind = type(why), getattr(why, "broker_code", None)
        kinds = self._known.setdefault(thing, {})
        if kind not in kinds:
            kinds[kind] = NowAndThen(REPEAT_S)
        return logging.WARNING if kinds[kind].due() else logging.INFO

    def over(self, thing: Hashable) -> bool:
        """Note that the thing has no problem. Returns whether it had one."""
        return self._known.pop(thing, None) is not None
