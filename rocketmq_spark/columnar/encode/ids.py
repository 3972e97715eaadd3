"""Message ids. Pure."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from rocketmq_spark.wire.identifiers import month_bounds

# For each 16-bit number, the four characters of its upper-case hexadecimal text as one 32-bit number.
HEX = np.frombuffer(np.arange(1 << 16, dtype=">u2").tobytes().hex().upper().encode(), np.uint32)
_COUNTER_LIMIT = 1 << 16


class UniqueIds:
    """Message ids of a task: 32 hex characters in the layout of Java's ids. Java's tools recover the time from them.

    An id is a prefix of the task, the upper half of a counter, milliseconds since the month began, and the counter's lower half.
    ``now_ms`` is called once for every ``fill``.
    """

    width = 32

    def __init__(self, prefix: bytes, now_ms: Callable[[], int], first_number: int = 0) -> None:
        if len(prefix) != 8:
            raise ValueError("the prefix of message ids must have 8 bytes")
        self._prefix = prefix.hex().upper()
        self._now_ms = now_ms
        self._month_bounds = (0, 0)
        self._next_number = first_number

    def fill(self, target: npt.NDArray[np.uint8]) -> None:
        """Write one id into every row of ``target``, which is 32 bytes wide."""
        filled_count, month_ms = 0, self._month_ms()
        # The ids of one step differ only in the last four characters, because the upper half of the counter stays the same.
        while filled_count < len(target):
            upper, low = divmod(self._next_number, _COUNTER_LIMIT)
            count = min(len(target) - filled_count, _COUNTER_LIMIT - low)
            rows = target[filled_count : filled_count + count]
            rows[:, :28] = np.frombuffer(f"{self._prefix}{upper % _COUNTER_LIMIT:04X}{month_ms:08X}".encode(), np.uint8)
            rows[:, 28:] = HEX[low : low + count].view(np.uint8).reshape(count, 4)
            self._next_number += count
            filled_count += count

    def _month_ms(self) -> int:
        now_ms = self._now_ms()
        if not self._month_bounds[0] <= now_ms < self._month_bounds[1]:
            self._month_bounds = month_bounds(now_ms)
        return now_ms - self._month_bounds[0]


class RecordingIds(UniqueIds):
    """Message ids of which the caller can read the last ones: ``last_ids`` has the ids of the last ``fill``."""

    last_ids: npt.NDArray[np.uint8] = np.empty((0, UniqueIds.width), np.uint8)

    def fill(self, target: npt.NDArray[np.uint8]) -> None:
        super().fill(target)
        self.last_ids = target.copy()
