"""The subscriptions of a consumer. Heartbeats, pulls and rebalances all read this one copy."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from rocketmq_spark.errors import OptionError
from rocketmq_spark.model import NO_FILTER, Filter
from rocketmq_spark.wire.names import retry_topic, topic_problem
from rocketmq_spark.wire.properties import parse_subscription


def filter_of(tags: str | None, sql: str | None) -> Filter:
    """Return the filter of one subscription. Raises ``OptionError`` for tags with SQL, empty tags, and other types."""
    if tags is not None and sql is not None:
        raise OptionError(f"tags are {tags!r} and sql is {sql!r}; expected at most one of them")
    for name, given in (("tags are", tags), ("sql is", sql)):
        try:
            (given or "").encode()
        except UnicodeEncodeError as e:  # encoding it for a heartbeat would fail for all topics
            raise OptionError(f"{name} {given!r}; expected characters that can be sent: {e}") from e
    if sql is not None:
        return Filter(sql, "SQL92")
    try:
        parse_subscription(tags)
    except ValueError as e:
        raise OptionError(f"tags are {tags!r}; expected '*' or such as 'a || b', one or several ({e})") from e
    return Filter(tags) if tags else NO_FILTER


@dataclass(frozen=True, slots=True)
class TopicFilter:
    """The filter of one topic. Its version is ``since_ms``; it was set ``at_ms`` by the clock of leases.

    A broker rejects pulls with a later version than that of the last heartbeat.
    """

    filter: Filter
    version_ms: int
    since_ms: int
    at_ms: int = field(default=0, compare=False)


class Subscriptions:
    """The subscriptions of one consumer. Each change of a topic gets a later version, and affects no other topic.

    With ``clustering``, they include the group's retry topic, without a filter.
    """

    def __init__(
        self, group: str, clustering: bool, wall_ms: Callable[[], int], lease_ms: Callable[[], int] = lambda: 0
    ) -> None:
        self._wall_ms, self._lease_ms = wall_ms, lease_ms
        self._lock = threading.Lock()
        self._version_ms = wall_ms()
        self._retry: dict[str, TopicFilter] = {}
        if clustering:
            self._retry[retry_topic(group)] = TopicFilter(NO_FILTER, self._version_ms, self._version_ms)
        self._topics: dict[str, TopicFilter] = {}

    def add(self, topic: str, wanted: Filter) -> None:
        """Subscribe to a topic. Raises ``OptionError`` for an invalid topic name."""
        if problem := topic_problem(topic):
            raise OptionError(f"topic is {topic!r}; expected the name of a topic ({problem})")
        with self._lock:
            version_ms = self._later()
            self._topics = {**self._topics, topic: TopicFilter(wanted, version_ms, version_ms, self._lease_ms())}

    def put_back(self, topic: str, before: TopicFilter | None) -> None:
        """Restore the subscription of a topic before its last change; None removes it."""
        if before is None:
            self.remove(topic)
        else:
            self.add(topic, before.filter)

    def remove(self, topic: str) -> None:
        with self._lock:
            self._topics = {known: each for known, each in self._topics.items() if known != topic}

    def touch(self, topic: str) -> None:
        """Give the subscription a new version, because queues of the topic changed."""
        with self._lock:
            for topics in (self._topics, self._retry):
                if topic in topics:
                    topics[topic] = replace(topics[topic], version_ms=self._later())

    def each(self) -> Mapping[str, TopicFilter]:
        """All subscriptions, including the retry topic."""
        with self._lock:
            return {**self._topics, **self._retry}

    def all(self) -> dict[str, Filter]:
        """The filters of ``each``."""
        return {topic: each.filter for topic, each in self.each().items()}

    def get(self, topic: str) -> TopicFilter | None:
        return self._topics.get(topic) or self._retry.get(topic)

    def at_ms(self, topic: str) -> int:
        """Return when a topic was subscribed to, by the clock of leases; 0 if it is not."""
        known = self.get(topic)
        return 0 if known is None else known.at_ms

    def filter(self, topic: str) -> Filter:
        """Return the filter of a topic; one that accepts everything without a subscription, for explicitly assigned queues."""
        known = self._topics.get(topic)
        return NO_FILTER if known is None else known.filter

    def __bool__(self) -> bool:
        return bool(self._topics)

    def _later(self) -> int:
        self._version_ms = max(self._version_ms + 1, self._wall_ms())
        return self._version_ms
