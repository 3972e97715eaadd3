"""The pulls that a read sends: their numbers, and the keys that sign them."""

from __future__ import annotations

from collections.abc import Sequence

from rocketmq_spark.pull.missing import Missing
from rocketmq_spark.pull.pacing import Pacing
from rocketmq_spark.remoting.bulk import PullTemplate

_MAX_OPAQUE = 0x7FFFFFFF


class Requests:
    """Frames from the templates of the ranges, in their order."""

    def __init__(self, templates: Sequence[PullTemplate]) -> None:
        self._templates = templates
        self._opaque = self._signed_from = 0
        self.sent = 0

    def take(self, missing: Missing, pacing: Pacing, pulls: int, count: int) -> list[bytes]:
        """``pulls`` requests of ``count`` for the lowest missing offsets, which are under way from now on."""
        if self._opaque + pulls > _MAX_OPAQUE:
            self._opaque = 0
        first = self._opaque
        slots = missing.send(first, count, pulls)
        self._opaque += len(slots)
        self.sent += len(slots)
        pacing.asked(max(limit - start for _, start, limit in slots))
        templates = self._templates
        # A filtered pull scans as many offsets as it is asked for; the count never falls short of the slot.
        return [
            templates[number].frame(opaque, start, limit - start)
            for opaque, (number, start, limit) in enumerate(slots, first)
        ]

    def other_keys(self, opaque: int) -> bool:
        """Whether a request that was refused would have other keys by now."""
        if opaque < self._signed_from:
            return True
        changed = [template.renew() for template in self._templates]
        if any(changed):
            self._signed_from = self._opaque
        return any(changed)
