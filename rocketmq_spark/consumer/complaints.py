"""Log levels of troubles that last: a line when one begins, and one when it ends."""

from __future__ import annotations

import logging
from collections.abc import Hashable

from rocketmq_spark.errors import RocketMQError


class Complaints:
    """What is wrong now with each of some things, such as topics. What is tried again each second would flood the log."""

    def __init__(self) -> None:
        self._known: dict[Hashable, Hashable] = {}

    def level(self, thing: Hashable, why: object) -> int:
        """WARNING for a trouble of another kind than that of before, INFO for the same one."""
        kind = type(why), why.broker_code if isinstance(why, RocketMQError) else None
        before, self._known[thing] = self._known.get(thing), kind
        return logging.INFO if before == kind else logging.WARNING

    def over(self, thing: Hashable) -> bool:
        """Note that nothing is wrong with it; returns whether something was."""
        return self._known.pop(thing, None) is not None
