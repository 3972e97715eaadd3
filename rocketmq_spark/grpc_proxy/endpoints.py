"""Which endpoint of a Proxy takes a call: the one it belongs to, or another one while that does not answer. Pure but for a lock.

Every endpoint serves every topic, so that nothing has to wait for one of them.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

# How long one that could not be reached is left alone, if there is another one.
REST_S = 5.0


class Endpoints:
    """Addresses, and until when each is avoided; times are of a monotonic clock, in seconds."""

    def __init__(self, addresses: Sequence[str]) -> None:
        self.addresses = tuple(addresses)
        self._until: dict[str, float] = {}
        self._turn = 0
        self._lock = threading.Lock()

    def pick(self, home: str | None, now: float) -> str:
        """``home`` or, without one, the next in turn; the one after it that is not avoided; itself when all are."""
        with self._lock:
            if home in self.addresses:
                first = self.addresses.index(home)
            else:
                first, self._turn = self._turn % len(self.addresses), self._turn + 1
            ring = self.addresses[first:] + self.addresses[:first]
            return next((one for one in ring if self._until.get(one, 0.0) <= now), ring[0])

    def failed(self, address: str, now: float) -> None:
        """It could not be reached."""
        with self._lock:
            self._until[address] = now + REST_S

    def worked(self, address: str) -> None:
        """It answered, whatever."""
        if address in self._until:
            with self._lock:
                self._until.pop(address, None)
