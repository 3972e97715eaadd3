"""What became of each topic's messages lately, as ``mqadmin consumerStatus`` shows it. Mirrors ``ConsumerStatsManager``.

Pure: the caller holds its lock and tells the time. Sums are kept for each ten seconds of the last hour, so that nothing grows.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from rocketmq_spark.membership import TopicFigures

STEP_MS = 10_000
MINUTE_MS, HOUR_MS = 60_000, 3_600_000


class _Sums:
    """Of one topic and ten seconds, from ``at_ms`` on; times in ms."""

    __slots__ = ("at_ms", "calls", "consumed", "consumed_ms", "failed", "pull_ms", "pulled", "pulls")

    def __init__(self, at_ms: int) -> None:
        self.at_ms = at_ms
        self.pulls = self.pulled = self.pull_ms = 0
        self.calls = self.consumed = self.failed = self.consumed_ms = 0


class ConsumerFigures:
    """Of one member. Topics are those of queues: what came again counts for the retry topic."""

    def __init__(self) -> None:
        self._topics: dict[str, deque[_Sums]] = {}
        self._since_ms: dict[str, int] = {}

    def pulled(self, topic: str, messages: int, spent_ms: int | None, now_ms: int) -> None:
        """A pull found so many messages, after so long; None: they were read ahead, where no pull is waited for."""
        now = self._now(topic, now_ms)
        now.pulled += messages
        if spent_ms is not None:
            now.pulls += 1
            now.pull_ms += spent_ms

    def consumed(self, topic: str, done: int, failed: int, spent_ms: int, now_ms: int) -> None:
        """A listener was called, finished some and failed with others, after so long."""
        now = self._now(topic, now_ms)
        now.calls += 1
        now.consumed += done
        now.failed += failed
        now.consumed_ms += spent_ms

    def of(self, topic: str, now_ms: int) -> TopicFigures:
        """Those of the last minute; the mean time of a call is that of the last hour where there was none, as in Java."""
        hour = [sums for sums in self._topics.get(topic, ()) if sums.at_ms > now_ms - HOUR_MS]
        minute = [sums for sums in hour if sums.at_ms > now_ms - MINUTE_MS]
        if not hour:
            return TopicFigures()
        began_ms = max(self._since_ms[topic], min((sums.at_ms for sums in minute), default=now_ms))
        seconds = max(1.0, (now_ms - began_ms) / 1000)
        calls = minute if any(sums.calls for sums in minute) else hour
        return TopicFigures(
            pull_ms=_mean(sum(sums.pull_ms for sums in minute), sum(sums.pulls for sums in minute)),
            pulled_per_s=sum(sums.pulled for sums in minute) / seconds,
            consume_ms=_mean(sum(sums.consumed_ms for sums in calls), sum(sums.calls for sums in calls)),
            consumed_per_s=sum(sums.consumed for sums in minute) / seconds,
            failed_per_s=sum(sums.failed for sums in minute) / seconds,
            failed=sum(sums.failed for sums in hour),
        )

    def all(self, topics: Iterable[str], now_ms: int) -> dict[str, TopicFigures]:
        """Those of ``topics``, and of all that anything is known of."""
        return {topic: self.of(topic, now_ms) for topic in sorted({*topics, *self._topics})}

    def _now(self, topic: str, now_ms: int) -> _Sums:
        steps = self._topics.get(topic)
        if steps is None:
            steps = self._topics[topic] = deque(maxlen=HOUR_MS // STEP_MS)
            self._since_ms[topic] = now_ms
        if not steps or now_ms >= steps[-1].at_ms + STEP_MS:
            steps.append(_Sums(now_ms - now_ms % STEP_MS))
        return steps[-1]


def _mean(total: int, count: int) -> float | None:
    return total / count if count else None
