"""How much may be under way at once: requests, their bytes, and how many of them are at brokers. Pure.

A bound per broker adapts unless the user gave one: enough to keep a connection busy, and no more, since every batch
that waits in a broker adds to the latency by which slow brokers are recognised. So it grows while little is under way,
and halves when a broker had to be asked again.
"""

from __future__ import annotations

from rocketmq_spark.producer.settings import ProducerSettings

START = 4
MAX_PER_BROKER = 64
AIM_BYTES = 8 << 20


class InFlight:
    """What has no outcome yet, and whether there is room for more. ``brokers`` are as many as topics are published to."""

    def __init__(self, settings: ProducerSettings) -> None:
        self.requests = self.bytes = 0
        self.brokers = 1
        self.per_broker = settings.max_in_flight_per_broker or START
        self._adapts = settings.max_in_flight is None and settings.max_in_flight_per_broker is None
        self._total = settings.max_in_flight
        self._max_requests = settings.max_async_messages
        self._max_bytes = settings.max_async_bytes

    @property
    def counts_brokers(self) -> bool:
        """Whether the bound is one per broker."""
        return self._total is None

    @property
    def max_out(self) -> int:
        """How many requests may be at brokers at once."""
        return self._total if self._total is not None else self.per_broker * max(1, self.brokers)

    def has_room(self, size: int, ordered: bool) -> bool:
        """Whether a request of ``size`` bytes is within the bounds; a single one always is.

        With a bound per broker, requests that may go anywhere wait with their caller, where they cost nothing; those
        that are ordered wait for their queue, so that a queue that is slow or muted does not hold up the others.
        """
        if not self.requests:
            return True
        if self.bytes + size > self._max_bytes:
            return False
        if self._max_requests is not None and self.requests >= self._max_requests:
            return False
        return ordered or not self.counts_brokers or self.requests < self.max_out

    def add(self, size: int) -> None:
        self.requests += 1
        self.bytes += size

    def remove(self, size: int) -> None:
        self.requests -= 1
        self.bytes -= size

    def clear(self) -> None:
        self.requests = self.bytes = 0

    def answered(self, size: int, clean: bool) -> None:
        """A request of ``size`` bytes is acknowledged; ``clean`` when its first attempt was."""
        if not self._adapts:
            return
        if not clean:
            self.per_broker = max(1, self.per_broker // 2)
        elif size * (self.per_broker + 1) <= AIM_BYTES:
            self.per_broker = min(MAX_PER_BROKER, self.per_broker + 1)
