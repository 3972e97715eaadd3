"""The state of one member of a group, under one lock: its queues, how far each is finished, and figures by topic.

Pulls, listeners, rebalances and requests of brokers hold the lock of ``MemberState`` for a decision and release it before
they act.

``OffsetTable`` (Java's ``RemoteBrokerOffsetStore``) has how far each queue is finished and which offsets are to be
committed; ``offset_store`` commits them. Results that end out of order may only raise an offset; an orderly commit or a
reset overwrites it. Java freezes the offset of a queue whose illegal one was repaired; here results of a dropped queue
change nothing.

``ConsumerFigures`` (Java's ``ConsumerStatsManager``) has what ``mqadmin consumerStatus`` shows of each topic. Sums are kept
for each ten seconds of the last hour, so memory does not grow. Both are pure: the caller holds the lock and passes the time.
"""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from rocketmq_spark.consumer.process_queue import ProcessQueue, Thresholds
from rocketmq_spark.model import MessageQueue
from rocketmq_spark.model.membership import ConsumerStats, TopicFigures

BUCKET_MS = 10_000
MINUTE_MS, HOUR_MS = 60_000, 3_600_000


class _Bucket:
    """Of one topic and ten seconds, from ``at_ms`` on; times in ms."""

    __slots__ = ("at_ms", "calls", "consumed", "consumed_ms", "failed", "pull_ms", "pulled", "pulls")

    def __init__(self, start_ms: int) -> None:
        self.at_ms = start_ms
        self.pulls = self.pulled = self.pull_ms = 0
        self.calls = self.consumed = self.failed = self.consumed_ms = 0


class ConsumerFigures:
    """Of one member. Topics are those of queues: what came again counts for the retry topic."""

    def __init__(self) -> None:
        self._buckets: dict[str, deque[_Bucket]] = {}
        self._since_ms: dict[str, int] = {}

    def record_pull(self, topic: str, message_count: int, duration_ms: int | None, now_ms: int) -> None:
        """A pull found so many messages, after so long; None: they were read ahead, where no pull is waited for."""
        bucket = self._bucket(topic, now_ms)
        bucket.pulled += message_count
        if duration_ms is not None:
            bucket.pulls += 1
            bucket.pull_ms += duration_ms

    def record_call(self, topic: str, done_count: int, failed_count: int, duration_ms: int, now_ms: int) -> None:
        """A listener was called, finished some and failed with others, after so long."""
        bucket = self._bucket(topic, now_ms)
        bucket.calls += 1
        bucket.consumed += done_count
        bucket.failed += failed_count
        bucket.consumed_ms += duration_ms

    def for_topic(self, topic: str, now_ms: int) -> TopicFigures:
        """Those of the last minute; the mean time of a call is that of the last hour where there was none, as in Java."""
        last_hour = [bucket for bucket in self._buckets.get(topic, ()) if bucket.at_ms > now_ms - HOUR_MS]
        last_minute = [sums for sums in last_hour if sums.at_ms > now_ms - MINUTE_MS]
        if not last_hour:
            return TopicFigures()
        start_ms = max(self._since_ms[topic], min((sums.at_ms for sums in last_minute), default=now_ms))
        seconds = max(1.0, (now_ms - start_ms) / 1000)
        with_calls = last_minute if any(sums.calls for sums in last_minute) else last_hour
        return TopicFigures(
            pull_ms=_mean(sum(sums.pull_ms for sums in last_minute), sum(sums.pulls for sums in last_minute)),
            pulled_per_s=sum(sums.pulled for sums in last_minute) / seconds,
            consume_ms=_mean(sum(sums.consumed_ms for sums in with_calls), sum(sums.calls for sums in with_calls)),
            consumed_per_s=sum(sums.consumed for sums in last_minute) / seconds,
            failed_per_s=sum(sums.failed for sums in last_minute) / seconds,
            failed=sum(sums.failed for sums in last_hour),
        )

    def for_topics(self, topics: Iterable[str], now_ms: int) -> dict[str, TopicFigures]:
        """Those of ``topics``, and of all that anything is known of."""
        return {topic: self.for_topic(topic, now_ms) for topic in sorted({*topics, *self._buckets})}

    def _bucket(self, topic: str, now_ms: int) -> _Bucket:
        buckets = self._buckets.get(topic)
        if buckets is None:
            buckets = self._buckets[topic] = deque(maxlen=HOUR_MS // BUCKET_MS)
            self._since_ms[topic] = now_ms
        if not buckets or now_ms >= buckets[-1].at_ms + BUCKET_MS:
            buckets.append(_Bucket(now_ms - now_ms % BUCKET_MS))
        return buckets[-1]


def _mean(total: int, count: int) -> float | None:
    return total / count if count else None


@dataclass(slots=True)
class _Entry:
    offset: int
    committed: int | None = None


class OffsetTable:
    """The next offset of each queue. None is ever below zero."""

    def __init__(self) -> None:
        self._entries: dict[MessageQueue, _Entry] = {}

    def get(self, queue: MessageQueue) -> int | None:
        entry = self._entries.get(queue)
        return None if entry is None else entry.offset

    def raise_to(self, queue: MessageQueue, offset: int) -> None:
        """Only upwards, for results that end in any order."""
        entry = self._entries.get(queue)
        if entry is None or entry.offset < offset:
            self._set(queue, offset)

    def set(self, queue: MessageQueue, offset: int) -> None:
        """Whatever it was before, for results that end in their order."""
        self._set(queue, offset)

    def force(self, queue: MessageQueue, offset: int) -> None:
        """Whatever it was before, and stored in any case: the queue begins, or is reset."""
        self._set(queue, offset)
        self._entries[queue].committed = None

    def forget(self, queue: MessageQueue) -> None:
        """The queue is not ours any more, or its offset is read anew."""
        self._entries.pop(queue, None)

    def retain(self, owned: Collection[MessageQueue]) -> None:
        """Forget all others, as each run of Java's ``persistAll`` does."""
        self._entries = {queue: entry for queue, entry in self._entries.items() if queue in owned}

    def changed(self) -> dict[MessageQueue, int]:
        """What changed since the last commit. Java commits everything each time; pulls carry the rest anyway.

        What did not change is not stored again: an operator may have set another offset meanwhile.
        """
        return {queue: entry.offset for queue, entry in self._entries.items() if entry.offset != entry.committed}

    def never_committed(self) -> dict[MessageQueue, int]:
        """Those of which no broker took an offset since they came, or were put."""
        return {queue: entry.offset for queue, entry in self._entries.items() if entry.committed is None}

    def all(self) -> dict[MessageQueue, int]:
        return {queue: entry.offset for queue, entry in self._entries.items()}

    def mark_committed(self, offsets: Mapping[MessageQueue, int]) -> None:
        """Brokers have these."""
        for queue, offset in offsets.items():
            if queue in self._entries:
                self._entries[queue].committed = offset

    def _set(self, queue: MessageQueue, offset: int) -> None:
        if offset < 0:
            raise ValueError(f"the offset of {queue} is {offset}; expected one of at least 0")
        entry = self._entries.get(queue)
        if entry is None:
            self._entries[queue] = _Entry(offset)
        else:
            entry.offset = offset


class MemberState:
    """The state of one member."""

    def __init__(self, thresholds: Thresholds) -> None:
        self.lock = threading.Lock()
        self.changed = threading.Condition(self.lock)
        self.resume_count = -1  # read-ahead is notified when no more than this wait of a queue
        self.queues: dict[MessageQueue, ProcessQueue] = {}
        self.offsets = OffsetTable()
        self.thresholds: dict[str, Thresholds] = {}  # by topic, where those of a topic are divided among its queues
        self.end_offsets: dict[MessageQueue, int] = {}
        self.counts: Counter[str] = Counter()
        self.figures = ConsumerFigures()
        self._default = thresholds

    def thresholds_of(self, topic: str) -> Thresholds:
        return self.thresholds.get(topic, self._default)

    def record_finished_locked(self, queue: ProcessQueue, offset: int | None) -> None:
        """With the lock. Results that end in any order: the offset only grows, and a dropped queue's means nothing."""
        if offset is not None and not queue.dropped:
            self.offsets.raise_to(queue.queue, offset)

    def record_end_offset(self, queue: ProcessQueue, end_offset: int | None, now_ms: int) -> None:
        """A broker was asked at ``now_ms`` where an owned queue ends; None: it did not say. A pull that was answered since knows
        better.
        """
        with self.lock:
            if self.queues.get(queue.queue) is not queue or queue.end_updated_ms > now_ms:
                return
            if end_offset is None:
                self.end_offsets.pop(queue.queue, None)
            else:
                self.end_offsets[queue.queue] = end_offset

    def owned(self) -> list[ProcessQueue]:
        """Those that are not dropped."""
        with self.lock:
            return [process_queue for process_queue in self.queues.values() if not process_queue.dropped]

    def stats(self) -> ConsumerStats:
        with self.lock:
            owned = [process_queue for process_queue in self.queues.values() if not process_queue.dropped]
            lags = [self._lag(held) for held in owned]
            known_lags = [lag for lag in lags if lag is not None]
            return ConsumerStats(
                consumed=self.counts["consumed"],
                failed=self.counts["failed"],
                sent_back=self.counts["sent back"],
                cached=sum(held.count for held in owned),
                lag=sum(known_lags) if len(known_lags) == len(lags) else None,
                rebalances=self.counts["rebalances"],
            )

    def _lag(self, process_queue: ProcessQueue) -> int | None:
        end_offset, finished_offset = self.end_offsets.get(process_queue.queue), self.offsets.get(process_queue.queue)
        return None if end_offset is None or finished_offset is None else max(0, end_offset - finished_offset)
