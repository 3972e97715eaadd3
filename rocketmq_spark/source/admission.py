"""How much a batch may read: offsets at most and at least, and bytes by the driver's own estimate.

Tasks cannot report back to a Python source, so the size of messages is learnt from samples of what is waiting.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from rocketmq_spark.model import MessageQueue

# A sample says a fifth; the rest is what earlier ones said.
_LEARNING = 0.2
SAMPLED_QUEUES = 4


@dataclass(frozen=True, slots=True)
class Wanted:
    """Limits of one batch; None means none."""

    most: int | None = None
    most_bytes: int | None = None
    least: int | None = None


class Admission:
    """State between batches: when the last one was admitted, and how large messages are."""

    def __init__(self, max_delay_s: float, now: float) -> None:
        self._max_delay_s = max_delay_s
        self._admitted_at = now
        self._message_bytes: float | None = None

    def most(
        self,
        waiting: Mapping[MessageQueue, int],
        wanted: Wanted,
        sample: Callable[[MessageQueue], tuple[int, int]],
        now: float,
    ) -> int | None:
        """The most offsets of this batch, None without a limit, 0 to wait for more.

        ``sample`` gives bytes and number of some messages that wait in a queue.
        """
        total = sum(waiting.values())
        if not total:
            return wanted.most
        if wanted.least is not None and total < wanted.least and now - self._admitted_at < self._max_delay_s:
            return 0
        self._admitted_at = now
        if wanted.most_bytes is None:
            return wanted.most
        self._learn(waiting, sample)
        fitting = max(1, int(wanted.most_bytes / self._message_bytes)) if self._message_bytes else wanted.most
        return fitting if wanted.most is None or fitting is None else min(wanted.most, fitting)

    def _learn(self, waiting: Mapping[MessageQueue, int], sample: Callable[[MessageQueue], tuple[int, int]]) -> None:
        largest = sorted(waiting, key=lambda queue: -waiting[queue])[:SAMPLED_QUEUES]
        samples = [sample(queue) for queue in largest]
        messages = sum(count for _, count in samples)
        if not messages:
            return
        mean = sum(size for size, _ in samples) / messages
        known = self._message_bytes
        self._message_bytes = mean if known is None else known + _LEARNING * (mean - known)
