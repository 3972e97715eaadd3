"""Figures of a consumer by topic, as Java's ``ConsumerStatsManager`` has them: what ``mqadmin consumerStatus`` shows.

Sums are kept for each ten seconds of the last hour, so memory does not grow. This module is pure: the caller holds a lock and
passes the time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from rocketmq_spark.model.membership import TopicFigures

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
