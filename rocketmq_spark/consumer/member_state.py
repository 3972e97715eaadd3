"""The state of one member of a group, under one lock: its queues, their offsets, and figures by topic.

Pulls, listeners, rebalances and requests of brokers hold the lock of ``MemberState`` for a decision and release it before
they act.

``OffsetTable`` (Java's ``RemoteBrokerOffsetStore``) has the next offset of each queue, and knows which offsets are not
committed yet. ``OffsetStore`` commits these offsets. Results that end out of order may only raise an offset. An ordered commit
or a reset overwrites the offset. After Java has corrected an offset that does not exist, it freezes the offset, so that later
results do not change it. Here, the queue is dropped instead, and results of a dropped queue change nothing. ``OffsetTable`` is
pure: the caller holds the lock.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from rocketmq_spark.consumer.figures import ConsumerFigures
from rocketmq_spark.consumer.process_queue import ProcessQueue, Thresholds
from rocketmq_spark.model import MessageQueue
from rocketmq_spark.model.membership import ConsumerStats


@dataclass(slots=True)
class _Entry:
    offset: int
    # The last offset that was stored; None if the offset must be stored even if it does not change.
    committed_offset: int | None = None


class OffsetTable:
    """The next offset of each queue."""

    def __init__(self) -> None:
        self._entries: dict[MessageQueue, _Entry] = {}

    def get(self, queue: MessageQueue) -> int | None:
        entry = self._entries.get(queue)
        return None if entry is None else entry.offset

    def raise_to(self, queue: MessageQueue, offset: int) -> None:
        """Set the offset of a queue whose calls end in any order, unless the current offset is higher."""
        entry = self._entries.get(queue)
        if entry is None or entry.offset < offset:
            self._set(queue, offset)

    def set(self, queue: MessageQueue, offset: int) -> None:
        """Set the offset of a queue whose calls end in their order, even if the current offset is higher."""
        self._set(queue, offset)

    def force(self, queue: MessageQueue, offset: int) -> None:
        """Set the offset of a queue that starts or is reset. The next commit stores the offset even if it does not change."""
        self._set(queue, offset)
        self._entries[queue].committed_offset = None

    def forget(self, queue: MessageQueue) -> None:
        """Forget a queue that this member no longer owns, or whose offset is read again."""
        self._entries.pop(queue, None)

    def retain(self, owned_queues: Collection[MessageQueue]) -> None:
        """Forget all queues except ``owned_queues``, as each run of Java's ``persistAll`` does."""
        self._entries = {queue: entry for queue, entry in self._entries.items() if queue in owned_queues}

    def changed_offsets(self) -> dict[MessageQueue, int]:
        """Return the offsets that changed since the last commit. (Java commits all offsets each time.)

        An unchanged offset is not stored again, because an operator may have set another offset meanwhile.
        """
        return {queue: entry.offset for queue, entry in self._entries.items() if entry.offset != entry.committed_offset}

    def never_committed_offsets(self) -> dict[MessageQueue, int]:
        """Return the offsets of queues for which no offset has been stored since the queue was started or reset."""
        return {queue: entry.offset for queue, entry in self._entries.items() if entry.committed_offset is None}

    def all_offsets(self) -> dict[MessageQueue, int]:
        return {queue: entry.offset for queue, entry in self._entries.items()}

    def mark_committed(self, offsets: Mapping[MessageQueue, int]) -> None:
        """Record that these offsets are stored."""
        for queue, offset in offsets.items():
            if queue in self._entries:
                self._entries[queue].committed_offset = offset

    def _set(self, queue: MessageQueue, offset: int) -> None:
        if offset < 0:
            raise ValueError(f"the offset of {queue} is {offset}; expected a number of at least 0")
        entry = self._entries.get(queue)
        if entry is None:
            self._entries[queue] = _Entry(offset)
        else:
            entry.offset = offset


class MemberState:
    """The state of one member."""

    def __init__(self, thresholds: Thresholds) -> None:
        self.lock = threading.Lock()
        self.room_available = threading.Condition(self.lock)  # notified when a queue has room for messages again
        # ``room_available`` is notified when the message count of a queue falls to this number.
        self.resume_threshold = -1
        self.queues: dict[MessageQueue, ProcessQueue] = {}  # includes dropped queues, until they are released
        self.offsets = OffsetTable()
        # By topic: the limits of each queue, if the limits of the topic are divided among its queues.
        self.thresholds: dict[str, Thresholds] = {}
        self.end_offsets: dict[MessageQueue, int] = {}  # the last known ends of the queues
        self.counts: Counter[str] = Counter()  # since the start, of "consumed", "failed", "sent back", "rebalances"
        self.figures = ConsumerFigures()
        self._default_thresholds = thresholds

    def thresholds_of(self, topic: str) -> Thresholds:
        return self.thresholds.get(topic, self._default_thresholds)

    def record_finished_locked(self, queue: ProcessQueue, offset: int | None) -> None:
        """Record a result of a concurrent consumer, whose offsets only grow; do nothing if the queue was dropped. The caller
        holds the lock.
        """
        if offset is not None and not queue.dropped:
            self.offsets.raise_to(queue.queue, offset)

    def record_end_offset(self, queue: ProcessQueue, end_offset: int | None, requested_ms: int) -> None:
        """Record ``end_offset`` of an owned queue. The offset was requested at ``requested_ms``, and is None if the request
        failed. If a pull returned an end offset after ``requested_ms``, do nothing.
        """
        with self.lock:
            if self.queues.get(queue.queue) is not queue or queue.end_updated_ms > requested_ms:
                return
            if end_offset is None:
                self.end_offsets.pop(queue.queue, None)
            else:
                self.end_offsets[queue.queue] = end_offset

    def owned_queues(self) -> list[ProcessQueue]:
        """Return the queues that are not dropped."""
        with self.lock:
            return [process_queue for process_queue in self.queues.values() if not process_queue.dropped]

    def stats(self) -> ConsumerStats:
        with self.lock:
            owned_queues = [process_queue for process_queue in self.queues.values() if not process_queue.dropped]
            lags = [self._lag(process_queue) for process_queue in owned_queues]
            known_lags = [lag for lag in lags if lag is not None]
            return ConsumerStats(
                consumed=self.counts["consumed"],
                failed=self.counts["failed"],
                sent_back=self.counts["sent back"],
                cached=sum(process_queue.count for process_queue in owned_queues),
                lag=sum(known_lags) if len(known_lags) == len(lags) else None,
                rebalances=self.counts["rebalances"],
            )

    def _lag(self, process_queue: ProcessQueue) -> int | None:
        end_offset, finished_offset = self.end_offsets.get(process_queue.queue), self.offsets.get(process_queue.queue)
        return None if end_offset is None or finished_offset is None else max(0, end_offset - finished_offset)
