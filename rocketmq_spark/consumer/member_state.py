"""The state of one member of a group, under one lock: its queues, their offsets, and figures by topic.

Pulls, listeners, rebalances and requests of brokers hold the lock of ``MemberState`` for a decision and release it before
they act.

``OffsetTable`` (Java's ``RemoteBrokerOffsetStore``) has the next offset of each queue, and which offsets are not committed yet;
``offset_store`` commits them. Results that end out of order may only raise an offset; an ordered commit or a reset overwrites
it. Java freezes the offset of a queue after it corrected an offset that does not exist; here, results of a dropped queue change
nothing.

``ConsumerFigures`` (Java's ``ConsumerStatsManager``) has what ``mqadmin consumerStatus`` shows of each topic. Sums are kept
for each ten seconds of the last hour, so memory does not grow. Both classes are pure: the caller holds the lock and passes the
time.
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
    """Sums of one topic for ten seconds from ``start_ms`` on."""

    __slots__ = ("calls", "consumed", "consumed_ms", "failed", "pull_ms", "pulled", "pulls", "start_ms")

    def __init__(self, start_ms: int) -> None:
        self.start_ms = start_ms
        self.pulls = self.pull_ms = 0  # how many pulls, and how long they took together
        self.pulled = 0  # how many messages they returned
        self.calls = self.consumed_ms = 0  # how many calls of the listener, and how long they took together
        self.consumed = self.failed = 0  # how many messages succeeded, and how many failed


class ConsumerFigures:
    """The figures of one member, by the topic of the queues: a redelivered message counts for the retry topic."""

    def __init__(self) -> None:
        self._buckets: dict[str, deque[_Bucket]] = {}
        self._since_ms: dict[str, int] = {}

    def record_pull(self, topic: str, message_count: int, duration_ms: int | None, now_ms: int) -> None:
        """Record the messages of a pull. ``duration_ms`` is None for messages that were read ahead."""
        bucket = self._bucket(topic, now_ms)
        bucket.pulled += message_count
        if duration_ms is not None:
            bucket.pulls += 1
            bucket.pull_ms += duration_ms

    def record_call(self, topic: str, done_count: int, failed_count: int, duration_ms: int, now_ms: int) -> None:
        """Record a call of the listener: how many messages succeeded and failed, and how long the call took."""
        bucket = self._bucket(topic, now_ms)
        bucket.calls += 1
        bucket.consumed += done_count
        bucket.failed += failed_count
        bucket.consumed_ms += duration_ms

    def for_topic(self, topic: str, now_ms: int) -> TopicFigures:
        """Return the figures of the last minute. Without a call in it, ``consume_ms`` is that of the last hour (as in Java)."""
        last_hour = [bucket for bucket in self._buckets.get(topic, ()) if bucket.start_ms > now_ms - HOUR_MS]
        last_minute = [bucket for bucket in last_hour if bucket.start_ms > now_ms - MINUTE_MS]
        if not last_hour:
            return TopicFigures()
        start_ms = max(self._since_ms[topic], min((bucket.start_ms for bucket in last_minute), default=now_ms))
        seconds = max(1.0, (now_ms - start_ms) / 1000)
        with_calls = last_minute if any(bucket.calls for bucket in last_minute) else last_hour
        return TopicFigures(
            pull_ms=_mean(sum(bucket.pull_ms for bucket in last_minute), sum(bucket.pulls for bucket in last_minute)),
            pulled_per_s=sum(bucket.pulled for bucket in last_minute) / seconds,
            consume_ms=_mean(
                sum(bucket.consumed_ms for bucket in with_calls), sum(bucket.calls for bucket in with_calls)
            ),
            consumed_per_s=sum(bucket.consumed for bucket in last_minute) / seconds,
            failed_per_s=sum(bucket.failed for bucket in last_minute) / seconds,
            failed=sum(bucket.failed for bucket in last_hour),
        )

    def for_topics(self, topics: Iterable[str], now_ms: int) -> dict[str, TopicFigures]:
        """Return the figures of ``topics``, and of all other topics that have figures."""
        return {topic: self.for_topic(topic, now_ms) for topic in sorted({*topics, *self._buckets})}

    def _bucket(self, topic: str, now_ms: int) -> _Bucket:
        buckets = self._buckets.get(topic)
        if buckets is None:
            buckets = self._buckets[topic] = deque(maxlen=HOUR_MS // BUCKET_MS)
            self._since_ms[topic] = now_ms
        if not buckets or now_ms >= buckets[-1].start_ms + BUCKET_MS:
            buckets.append(_Bucket(now_ms - now_ms % BUCKET_MS))
        return buckets[-1]


def _mean(total: int, count: int) -> float | None:
    return total / count if count else None


@dataclass(slots=True)
class _Entry:
    offset: int
    committed: int | None = (
        None  # the last offset that was stored; None: the offset must be stored, even if it does not change
    )


class OffsetTable:
    """The next offset of each queue."""

    def __init__(self) -> None:
        self._entries: dict[MessageQueue, _Entry] = {}

    def get(self, queue: MessageQueue) -> int | None:
        entry = self._entries.get(queue)
        return None if entry is None else entry.offset

    def raise_to(self, queue: MessageQueue, offset: int) -> None:
        """Set the offset if it is higher than the current one, for results that end in any order."""
        entry = self._entries.get(queue)
        if entry is None or entry.offset < offset:
            self._set(queue, offset)

    def set(self, queue: MessageQueue, offset: int) -> None:
        """Set the offset, also to a lower one, for results that end in their order."""
        self._set(queue, offset)

    def force(self, queue: MessageQueue, offset: int) -> None:
        """Set the offset of a queue that starts or is reset. It must be stored even if it does not change."""
        self._set(queue, offset)
        self._entries[queue].committed = None

    def forget(self, queue: MessageQueue) -> None:
        """Forget a queue that this member no longer owns, or whose offset is read again."""
        self._entries.pop(queue, None)

    def retain(self, owned: Collection[MessageQueue]) -> None:
        """Forget all other queues, as each run of Java's ``persistAll`` does."""
        self._entries = {queue: entry for queue, entry in self._entries.items() if queue in owned}

    def changed(self) -> dict[MessageQueue, int]:
        """Return the offsets that changed since the last commit. (Java commits all offsets each time.)

        An unchanged offset is not stored again, because an operator may have set another offset meanwhile.
        """
        return {queue: entry.offset for queue, entry in self._entries.items() if entry.offset != entry.committed}

    def never_committed(self) -> dict[MessageQueue, int]:
        """Return the offsets of queues for which no offset was stored since they started, or were reset."""
        return {queue: entry.offset for queue, entry in self._entries.items() if entry.committed is None}

    def all(self) -> dict[MessageQueue, int]:
        return {queue: entry.offset for queue, entry in self._entries.items()}

    def mark_committed(self, offsets: Mapping[MessageQueue, int]) -> None:
        """Record that these offsets are stored."""
        for queue, offset in offsets.items():
            if queue in self._entries:
                self._entries[queue].committed = offset

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
        self.changed = threading.Condition(self.lock)  # notified when a queue has room for messages again
        self.resume_count = -1  # ``changed`` is notified when the message count of a queue falls to this
        self.queues: dict[MessageQueue, ProcessQueue] = {}  # also dropped queues, until they are released
        self.offsets = OffsetTable()
        self.thresholds: dict[
            str, Thresholds
        ] = {}  # of one queue, by topic, if the limits of a topic are divided among its queues
        self.end_offsets: dict[MessageQueue, int] = {}  # the last known ends of the queues
        self.counts: Counter[str] = Counter()  # since the start: "consumed", "failed", "sent back" and "rebalances"
        self.figures = ConsumerFigures()
        self._default = thresholds

    def thresholds_of(self, topic: str) -> Thresholds:
        return self.thresholds.get(topic, self._default)

    def record_finished_locked(self, queue: ProcessQueue, offset: int | None) -> None:
        """Record a result of a concurrent consumer: the offset only grows. Ignores dropped queues. The caller holds the lock."""
        if offset is not None and not queue.dropped:
            self.offsets.raise_to(queue.queue, offset)

    def record_end_offset(self, queue: ProcessQueue, end_offset: int | None, now_ms: int) -> None:
        """Record the end of an owned queue, requested at ``now_ms``; None if the request failed. The answer to a later pull is
        newer, and wins.
        """
        with self.lock:
            if self.queues.get(queue.queue) is not queue or queue.end_updated_ms > now_ms:
                return
            if end_offset is None:
                self.end_offsets.pop(queue.queue, None)
            else:
                self.end_offsets[queue.queue] = end_offset

    def owned(self) -> list[ProcessQueue]:
        """Return the queues that are not dropped."""
        with self.lock:
            return [process_queue for process_queue in self.queues.values() if not process_queue.dropped]

    def stats(self) -> ConsumerStats:
        with self.lock:
            owned = [process_queue for process_queue in self.queues.values() if not process_queue.dropped]
            lags = [self._lag(process_queue) for process_queue in owned]
            known_lags = [lag for lag in lags if lag is not None]
            return ConsumerStats(
                consumed=self.counts["consumed"],
                failed=self.counts["failed"],
                sent_back=self.counts["sent back"],
                cached=sum(process_queue.count for process_queue in owned),
                lag=sum(known_lags) if len(known_lags) == len(lags) else None,
                rebalances=self.counts["rebalances"],
            )

    def _lag(self, process_queue: ProcessQueue) -> int | None:
        end_offset, finished_offset = self.end_offsets.get(process_queue.queue), self.offsets.get(process_queue.queue)
        return None if end_offset is None or finished_offset is None else max(0, end_offset - finished_offset)
