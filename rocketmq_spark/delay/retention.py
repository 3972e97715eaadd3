"""Whether brokers keep envelopes for as long as they wait: a disk that is lost is rebuilt from them alone."""

from __future__ import annotations

import logging
from collections.abc import Callable

from rocketmq_spark.clock import Deadline

logger = logging.getLogger(__name__)

# As often the same is said, and a broker's setting is asked for.
AGAIN_S = 3600.0


class Retention:
    """``kept_ms`` says for how long a broker keeps messages, None where it does not tell. Not thread-safe."""

    def __init__(self, kept_ms: Callable[[str], int | None]) -> None:
        self._ask = kept_ms
        self._longest: dict[str, int] = {}
        self._kept: dict[str, tuple[int | None, Deadline]] = {}
        self._said: dict[str, Deadline] = {}

    def note(self, broker_name: str, waits_ms: int) -> None:
        """An envelope on this broker waits for so long."""
        if waits_ms > self._longest.get(broker_name, 0):
            self._longest[broker_name] = waits_ms

    def warn(self) -> list[str]:
        """Say which brokers keep messages for less than what was noted; their names."""
        short = []
        for name, waits_ms in self._longest.items():
            kept = self._kept_ms(name)
            if kept is None or waits_ms < kept:
                continue
            short.append(name)
            if name in self._said and not self._said[name].expired:
                continue
            self._said[name] = Deadline.after(AGAIN_S)
            logger.warning(
                "a message waits for %.1f hours, and %s keeps messages for %.1f: after that it is on this disk alone; raise "
                "fileReservedTime of the broker above the longest delay",
                waits_ms / 3_600_000,
                name,
                kept / 3_600_000,
            )
        return short

    def _kept_ms(self, broker_name: str) -> int | None:
        known = self._kept.get(broker_name)
        if known is None or known[1].expired:
            known = self._kept[broker_name] = self._ask(broker_name), Deadline.after(AGAIN_S)
        return known[0]
