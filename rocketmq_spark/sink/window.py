"""How many batches a task may have unacknowledged per broker, when the user does not say. Pure.

Enough to keep a connection busy, and no more: every batch that waits in a broker adds to the latency by which slow
brokers are recognised. So the window grows while little is under way, and halves when a broker had to be asked again.
"""

from __future__ import annotations

START = 4
MOST = 64
AIM_BYTES = 8 << 20


class Window:
    """The number of batches; ``fixed`` if the user gave one."""

    def __init__(self, fixed: int | None = None) -> None:
        self.size = fixed or START
        self._fixed = fixed is not None

    def answered(self, size: int, clean: bool) -> None:
        """A batch of ``size`` bytes is acknowledged; ``clean`` when its first attempt was."""
        if self._fixed:
            return
        if not clean:
            self.size = max(1, self.size // 2)
        elif size * (self.size + 1) <= AIM_BYTES:
            self.size = min(MOST, self.size + 1)
