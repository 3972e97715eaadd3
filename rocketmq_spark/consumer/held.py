"""What a member has at this moment: its queues, how far they are finished, and what it counted. One lock guards all of it.

Everybody who acts (pulls, listeners, rebalance, questions of brokers) holds the lock for a decision and lets go of it for
the deed.
"""

from __future__ import annotations

import threading
from collections import Counter
from dataclasses import dataclass

from rocketmq_spark.consumer.figures import ConsumerFigures
from rocketmq_spark.consumer.flow import Thresholds
from rocketmq_spark.consumer.offset_table import OffsetTable
from rocketmq_spark.consumer.process_queue import ProcessQueue
from rocketmq_spark.model import MessageQueue


@dataclass(frozen=True, slots=True)
class Stats:
    """What a member did since its start, and what it has now.

    Args:
        consumed: Messages that a listener finished.
        failed: Messages that it did not finish, each time counted.
        sent_back: Messages that the broker took back to deliver them later.
        cached: Messages that were pulled and are not finished.
        lag: Messages behind the ends of all own queues; None while the end of one is not known.
        rebalances: How often the queues of a topic changed.
    """

    consumed: int = 0
    failed: int = 0
    sent_back: int = 0
    cached: int = 0
    lag: int | None = None
    rebalances: int = 0


class MemberState:
    """The state of one member."""

    def __init__(self, thresholds: Thresholds) -> None:
        self.lock = threading.Lock()
        self.changed = threading.Condition(self.lock)
        self.low = -1  # who reads ahead is told when no more than this wait of a queue
        self.queues: dict[MessageQueue, ProcessQueue] = {}
        self.offsets = OffsetTable()
        self.thresholds: dict[str, Thresholds] = {}  # by topic, where those of a topic are divided among its queues
        self.ends: dict[MessageQueue, int] = {}
        self.counts: Counter[str] = Counter()
        self.figures = ConsumerFigures()
        self._default = thresholds

    def thresholds_of(self, topic: str) -> Thresholds:
        return self.thresholds.get(topic, self._default)

    def finished(self, queue: ProcessQueue, offset: int | None) -> None:
        """With the lock. Results that end in any order: the offset only grows, and a dropped queue's means nothing."""
        if offset is not None and not queue.dropped:
            self.offsets.raise_to(queue.queue, offset)

    def owned(self) -> list[ProcessQueue]:
        """Those that are not dropped."""
        with self.lock:
            return [held for held in self.queues.values() if not held.dropped]

    def stats(self) -> Stats:
        with self.lock:
            owned = [held for held in self.queues.values() if not held.dropped]
            lags = [self._lag(held) for held in owned]
            known = [lag for lag in lags if lag is not None]
            return Stats(
                consumed=self.counts["consumed"],
                failed=self.counts["failed"],
                sent_back=self.counts["sent back"],
                cached=sum(held.count for held in owned),
                lag=sum(known) if len(known) == len(lags) else None,
                rebalances=self.counts["rebalances"],
            )

    def _lag(self, held: ProcessQueue) -> int | None:
        end, done = self.ends.get(held.queue), self.offsets.get(held.queue)
        return None if end is None or done is None else max(0, end - done)
