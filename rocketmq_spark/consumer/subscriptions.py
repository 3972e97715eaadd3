"""What a consumer wants of which topics, and since when."""

from __future__ import annotations

import threading
from collections.abc import Callable

from rocketmq_spark.consumer.pulling import Subscribed
from rocketmq_spark.consumer.rebalance import with_retry_topic
from rocketmq_spark.errors import OptionError
from rocketmq_spark.model import NO_FILTER, Filter
from rocketmq_spark.wire.names import topic_problem
from rocketmq_spark.wire.subscription import parse_subscription


def filter_of(tags: str | None, sql: str | None) -> Filter:
    """The filter of one subscription. Raises ``OptionError`` for both at once, and for tags that name none."""
    if tags is not None and sql is not None:
        raise OptionError(f"tags are {tags!r} and sql is {sql!r}; expected at most one of them")
    if sql is not None:
        return Filter(sql, "SQL92")
    try:
        parse_subscription(tags)
    except ValueError as e:
        raise OptionError(f"tags are {tags!r}; expected '*' or such as 'a || b', one or several ({e})") from e
    return Filter(tags) if tags else NO_FILTER


class Subscriptions:
    """Of one consumer. Each change has a later version than the one before, by which brokers know the newest."""

    def __init__(self, group: str, clustering: bool, wall_ms: Callable[[], int]) -> None:
        self._group = group
        self._clustering = clustering
        self._wall_ms = wall_ms
        self._lock = threading.Lock()
        self._filters: dict[str, Filter] = {}
        self.version_ms = wall_ms()

    def add(self, topic: str, wanted: Filter) -> None:
        """Raises ``OptionError`` for what is no name of a topic."""
        if problem := topic_problem(topic):
            raise OptionError(f"topic is {topic!r}; expected the name of a topic ({problem})")
        with self._lock:
            self._filters = {**self._filters, topic: wanted}
        self.touch()

    def remove(self, topic: str) -> None:
        with self._lock:
            self._filters = {known: wanted for known, wanted in self._filters.items() if known != topic}
        self.touch()

    def touch(self) -> None:
        """The same subscriptions, but a new version: queues have changed."""
        with self._lock:
            self.version_ms = max(self.version_ms + 1, self._wall_ms())

    def all(self) -> dict[str, Filter]:
        """With the retry topic where there is one."""
        return with_retry_topic(self._group, self._filters, self._clustering)

    def get(self, topic: str) -> Subscribed | None:
        wanted = self.all().get(topic)
        return None if wanted is None else Subscribed(wanted, self.version_ms)

    def __bool__(self) -> bool:
        return bool(self._filters)
