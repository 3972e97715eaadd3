"""Message ids of a task, thousands at a time."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

# Two bytes as the four characters of their upper-case hex, in one word.
_HEX = np.frombuffer("".join(f"{i:04X}" for i in range(1 << 16)).encode(), np.uint32)
_LOW = 1 << 16


class UniqueIds:
    """Message ids of a task: 32 hex characters, a prefix that is the task's own and a counter."""

    def __init__(self, prefix: bytes, first: int = 0) -> None:
        if len(prefix) != 8:
            raise ValueError("the prefix of message ids has 8 bytes")
        self._prefix = prefix.hex().upper()
        self._next = first

    def fill(self, target: npt.NDArray[np.uint8]) -> None:
        """Write one id into every row of ``target``, which is 32 bytes wide."""
        done = 0
        while done < len(target):  # as long as the upper half of the counter stays, only four characters differ
            upper, low = divmod(self._next, _LOW)
            count = min(len(target) - done, _LOW - low)
            rows = target[done : done + count]
            rows[:, :28] = np.frombuffer(f"{self._prefix}{upper:012X}".encode(), np.uint8)
            rows[:, 28:] = _HEX[low : low + count].view(np.uint8).reshape(count, 4)
            self._next += count
            done += count

    def take(self, count: int) -> npt.NDArray[np.uint8]:
        """``count`` ids as rows of 32 ASCII characters."""
        rows = np.empty((count, 32), np.uint8)
        self.fill(rows)
        return rows
