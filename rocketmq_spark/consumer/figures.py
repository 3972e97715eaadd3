"""Figures of a consumer by topic, which ``mqadmin consumerStatus`` shows. Mirrors Java's ``ConsumerStatsManager``.

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

    __slots__ = (
        "call_count",
        "consumed_count",
        "consumed_ms",
        "failed_count",
        "pull_count",
        "pull_ms",
        "pulled_count",
        "start_ms",
    )

    def __init__(self, start_ms: int) -> None:
        self.start_ms = start_ms
        # How many pulls, how long they took together, and how many messages they returned.
        self.pull_count = self.pull_ms = self.pulled_count = 0
        # How many calls of the listener, and how long they took together.
        self.call_count = self.consumed_ms = 0
        # How many messages succeeded, and how many failed.
        self.consumed_count = self.failed_count = 0


class ConsumerFigures:
    """The figures of one member, by the topic of the queue. So a redelivered message counts for the retry topic."""

    def __init__(self) -> None:
        self._buckets: dict[str, deque[_Bucket]] = {}
        self._first_record_ms: dict[str, int] = {}

    def record_pull(self, topic: str, message_count: int, duration_ms: int | None, now_ms: int) -> None:
        """Record the messages of a pull. ``duration_ms`` is None for messages that were read ahead."""
        bucket = self._bucket(topic, now_ms)
        bucket.pulled_count += message_count
        if duration_ms is not None:
            bucket.pull_count += 1
            bucket.pull_ms += duration_ms

    def record_call(self, topic: str, done_count: int, failed_count: int, duration_ms: int, now_ms: int) -> None:
        """Record a call of the listener: how many messages succeeded and failed, and how long the call took."""
        bucket = self._bucket(topic, now_ms)
        bucket.call_count += 1
        bucket.consumed_count += done_count
        bucket.failed_count += failed_count
        bucket.consumed_ms += duration_ms

    def figures_of_topic(self, topic: str, now_ms: int) -> TopicFigures:
        """Return the figures of the last minute. If the listener was not called in the last minute, ``consume_ms`` is the mean
        of the last hour, as in Java.
        """
        last_hour_buckets = [bucket for bucket in self._buckets.get(topic, ()) if bucket.start_ms > now_ms - HOUR_MS]
        last_minute_buckets = [bucket for bucket in last_hour_buckets if bucket.start_ms > now_ms - MINUTE_MS]
        if not last_hour_buckets:
            return TopicFigures()
        start_ms = max(
            self._first_record_ms[topic], min((bucket.start_ms for bucket in last_minute_buckets), default=now_ms)
        )
        seconds = max(1.0, (now_ms - start_ms) / 1000)
        buckets_with_calls = (
            last_minute_buckets if any(bucket.call_count for bucket in last_minute_buckets) else last_hour_buckets
        )
        return TopicFigures(
            pull_ms=_mean(
                sum(bucket.pull_ms for bucket in last_minute_buckets),
                sum(bucket.pull_count for bucket in last_minute_buckets),
            ),
            pulled_per_s=sum(bucket.pulled_count for bucket in last_minute_buckets) / seconds,
            consume_ms=_mean(
                sum(bucket.consumed_ms for bucket in buckets_with_calls),
                sum(bucket.call_count for bucket in buckets_with_calls),
            ),
            consumed_per_s=sum(bucket.consumed_count for bucket in last_minute_buckets) / seconds,
            failed_per_s=sum(bucket.failed_count for bucket in last_minute_buckets) / seconds,
            failed=sum(bucket.failed_count for bucket in last_hour_buckets),
        )

    def figures_of_topics(self, topics: Iterable[str], now_ms: int) -> dict[str, TopicFigures]:
        """Return the figures of ``topics``, and of all other topics that have figures."""
        return {topic: self.figures_of_topic(topic, now_ms) for topic in sorted({*topics, *self._buckets})}

    def _bucket(self, topic: str, now_ms: int) -> _Bucket:
        buckets = self._buckets.get(topic)
        if buckets is None:
            buckets = self._buckets[topic] = deque(maxlen=HOUR_MS // BUCKET_MS)
            self._first_record_ms[topic] = now_ms
        if not buckets or now_ms >= buckets[-1].start_ms + BUCKET_MS:
            buckets.append(_Bucket(now_ms - now_ms % BUCKET_MS))
        return buckets[-1]


def _mean(total: int, count: int) -> float | None:
    return total / count if count else None
