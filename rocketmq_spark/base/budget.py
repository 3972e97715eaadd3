"""Limits of the memory for bytes that servers send. Each server has a fair share, which other servers cannot use up."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Hashable

# The limit of the memory for incomplete large frames in one client: answers, requests of servers, and bulk reads.
MAX_INCOMPLETE_BYTES = 512 << 20
# One limit for two kinds of memory: for servers' requests that wait in a client, and for half messages that wait for the user's
# function. If larger messages are allowed, the limit for the requests is four times the largest request.
MAX_WAITING_BYTES = 64 << 20

# The first number is the memory in bytes that a decoded message needs besides its texts. The second one is the memory for each
# byte of the properties, which may be many short texts.
MESSAGE_OVERHEAD_BYTES, _BYTES_PER_PROPERTY_BYTE = 512, 8


def estimated_memory(body_bytes: int, property_bytes: int) -> int:
    """Return about how many bytes of memory a decoded message needs."""
    return MESSAGE_OVERHEAD_BYTES + body_bytes + _BYTES_PER_PROPERTY_BYTE * property_bytes


class Budget:
    """Limits the bytes that holders, such as servers, have in memory together. Thread-safe.

    After a claim, the holder must not have more bytes than stay free; otherwise, the claim fails. If no holder has bytes, a
    claim of any size succeeds.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.used_bytes = 0
        self._bytes_by_holder: Counter[Hashable] = Counter()
        self._lock = threading.RLock()  # reentrant: garbage collection may call ``release`` in this block

    def claim(self, holder: Hashable, size: int) -> Callable[[], None] | None:
        """Claim ``size`` bytes. Returns a function that releases the claimed bytes once; None if the claim would exceed the
        limit.
        """
        with self._lock:
            if self.used_bytes and self.used_bytes + self._bytes_by_holder[holder] + 2 * size > self.limit:
                return None
            self.used_bytes += size
            self._bytes_by_holder[holder] += size
        unreleased_bytes = [size]

        def release() -> None:
            with self._lock:
                released_bytes = unreleased_bytes.pop() if unreleased_bytes else 0
                self.used_bytes -= released_bytes
                self._bytes_by_holder[holder] -= released_bytes
                if not self._bytes_by_holder[holder]:
                    del self._bytes_by_holder[holder]

        return release


class ReceiveBudget:
    """Limits the bytes of incomplete frames that holders, such as servers, have in memory together. Thread-safe.

    If the limit is reached, the largest account of the holder with most bytes is revoked. The fair share of a holder is the
    limit divided by the number of holders; a holder that has at most its fair share keeps its bytes. A single frame may have
    any size.
    """

    def __init__(self, limit: int = MAX_INCOMPLETE_BYTES) -> None:
        self.limit = limit
        self.used_bytes = 0
        self._bytes_by_holder: Counter[Hashable] = Counter()
        self._accounts: set[ReceiveAccount] = set()
        self._lock = threading.RLock()  # reentrant: garbage collection may release bytes in a block with this lock

    def account(self, holder: Hashable, on_revoked: Callable[[], None] | None = None) -> ReceiveAccount:
        """Return an empty account for ``holder``. The account is for one incomplete frame at a time, or for all frames that a
        call keeps.

        ``on_revoked`` is called when the account is revoked, on any thread, while the budget's lock is held.
        """
        return ReceiveAccount(self, holder, on_revoked)

    def _resize(self, account: ReceiveAccount, size: int) -> bool:
        with self._lock:
            if size and account.is_revoked:
                return False
            growth = size - account.size
            holder_bytes = self._bytes_by_holder[account.holder] + growth
            while growth > 0 and self.used_bytes > account.size and self.used_bytes + growth > self.limit:
                largest_holder, largest_bytes = self._bytes_by_holder.most_common(1)[0]
                if largest_holder == account.holder or largest_bytes <= holder_bytes:
                    return False
                largest_account = max(
                    (other for other in self._accounts if other.holder == largest_holder), key=lambda other: other.size
                )
                self._set_size(largest_account, 0)
                largest_account.is_revoked = True
                if largest_account.on_revoked is not None:
                    largest_account.on_revoked()
            self._set_size(account, size)
            account.is_revoked = False
            return True

    def _set_size(self, account: ReceiveAccount, size: int) -> None:
        self.used_bytes += size - account.size
        self._bytes_by_holder[account.holder] += size - account.size
        if not self._bytes_by_holder[account.holder]:
            del self._bytes_by_holder[account.holder]
        account.size = size
        (self._accounts.add if size else self._accounts.discard)(account)


class ReceiveAccount:
    """The bytes of one incomplete frame. If the account is revoked (``is_revoked``), another holder needs the memory, and the
    frame must be dropped.
    """

    def __init__(self, budget: ReceiveBudget, holder: Hashable, on_revoked: Callable[[], None] | None = None) -> None:
        self._budget = budget
        self.holder = holder
        self.on_revoked = on_revoked
        self.size = 0
        self.is_revoked = False

    def resize(self, size: int) -> bool:
        """Set the size to ``size`` bytes; 0 releases all bytes. Returns False, and changes nothing, if there is no room."""
        return self._budget._resize(self, size)

    def add(self, size: int) -> bool:
        """Add ``size`` bytes of a further frame. Returns False, and changes nothing, if the budget has no room."""
        total = self.size + size
        return (not self.size or total <= self._budget.limit) and self.resize(total)
