"""Limits the bytes that arrive or wait, with a fair share for each server: nobody can take what others need."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Hashable

# What a client keeps of large frames that have not arrived completely: answers, requests of servers, and bulk reads.
MAX_INCOMPLETE_BYTES = 512 << 20
# Requests of servers that wait in a client; a client whose messages may be larger has four times the largest request. And
# half messages that wait for a function of the user.
MAX_WAITING_BYTES = 64 << 20

# Added to the bytes of a decoded message; and bytes of objects for each byte of properties, which may be short and many.
OBJECT_BYTES, _BYTES_PER_PROPERTY_BYTE = 512, 8


def estimated_memory(body_bytes: int, property_bytes: int) -> int:
    """About the memory of a decoded message, in bytes."""
    return OBJECT_BYTES + body_bytes + _BYTES_PER_PROPERTY_BYTE * property_bytes


class Budget:
    """Counts the bytes that wait, up to ``limit``, of holders such as servers. Thread-safe.

    A holder may have as many bytes as stay free. While nothing is held, a claim of any size succeeds.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.used = 0
        self._by_holder: Counter[Hashable] = Counter()
        self._lock = threading.RLock()  # reentrant: garbage collection may release something here

    def claim(self, holder: Hashable, size: int) -> Callable[[], None] | None:
        """Claim ``size`` bytes. Returns a function that releases them, also if called repeatedly; None without room."""
        with self._lock:
            if self.used and self.used + self._by_holder[holder] + 2 * size > self.limit:
                return None
            self.used += size
            self._by_holder[holder] += size
        left = [size]

        def release() -> None:
            with self._lock:
                released = left.pop() if left else 0
                self.used -= released
                self._by_holder[holder] -= released
                if not self._by_holder[holder]:
                    del self._by_holder[holder]

        return release


class ReceiveBudget:
    """Counts the bytes that have arrived of things that are not complete, up to ``limit``, by holders. Thread-safe.

    If there is no room, the holder with most loses its largest thing. So a holder that has at most its fair share, the limit
    divided by the number of holders, loses nothing, whatever the others do. One thing alone may have any size.
    """

    def __init__(self, limit: int = MAX_INCOMPLETE_BYTES) -> None:
        self.limit = limit
        self.used = 0
        self._by_holder: Counter[Hashable] = Counter()
        self._accounts: set[ReceiveAccount] = set()
        self._lock = threading.RLock()  # reentrant, as above

    def account(self, holder: Hashable, drop: Callable[[], None] | None = None) -> ReceiveAccount:
        """Return an empty account for one thing at a time that arrives from ``holder``, or for all that one call keeps of it.
        ``on_revoked`` is called, on any thread and with the lock, when the account is revoked.
        """
        return ReceiveAccount(self, holder, drop)

    def _resize(self, one: ReceiveAccount, size: int) -> bool:
        with self._lock:
            if size and one.revoked:
                return False
            more = size - one.size
            mine = self._by_holder[one.holder] + more
            while more > 0 and self.used > one.size and self.used + more > self.limit:
                most, held = self._by_holder.most_common(1)[0]
                if most == one.holder or held <= mine:
                    return False
                largest = max((other for other in self._accounts if other.holder == most), key=lambda other: other.size)
                self._set(largest, 0)
                largest.revoked = True
                if largest.on_revoked is not None:
                    largest.on_revoked()
            self._set(one, size)
            one.revoked = False
            return True

    def _set(self, one: ReceiveAccount, size: int) -> None:
        self.used += size - one.size
        self._by_holder[one.holder] += size - one.size
        if not self._by_holder[one.holder]:
            del self._by_holder[one.holder]
        one.size = size
        (self._accounts.add if size else self._accounts.discard)(one)


class ReceiveAccount:
    """The account of one thing that arrives. If it is ``revoked``, others needed the room: its owner must drop the thing."""

    def __init__(self, arrivals: ReceiveBudget, holder: Hashable, drop: Callable[[], None] | None = None) -> None:
        self._budget = arrivals
        self.holder = holder
        self.on_revoked = drop
        self.size = 0
        self.revoked = False

    def resize(self, size: int) -> bool:
        """``size`` bytes have arrived; False if there is no room for them. Size 0 ends the thing."""
        return self._budget._resize(self, size)

    def add(self, size: int) -> bool:
        """One more thing of ``size`` bytes has arrived, beside those that are kept; False if there is no room for it."""
        total = self.size + size
        return (not self.size or total <= self._budget.limit) and self.resize(total)
