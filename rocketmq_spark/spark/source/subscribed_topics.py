"""Lists the topics that a source reads: the topics that the options name or assign, or the topics that match the pattern."""

from __future__ import annotations

from collections.abc import Collection

from rocketmq_spark.base.clock import Clock
from rocketmq_spark.errors import BrokerNotFound, NotSupported, OptionError, RouteNotFound
from rocketmq_spark.options import Options
from rocketmq_spark.ports import RouteReader
from rocketmq_spark.spark.source import subscription

# The maximum interval between two requests for the list of topics while no topic matches the pattern. The interval is short, so
# that the first topic is found soon.
_NO_MATCH_RETRY_PAUSE_S = 1.0
_NEVER = float("-inf")


class SubscribedTopics:
    """Lists the topics to read. If there is a pattern, requests the list of topics when the last list is older than
    ``routeRefresh``.
    """

    def __init__(self, options: Options, clock: Clock) -> None:
        self._options = options
        self._clock = clock
        assigned_topics = tuple(dict.fromkeys(queue.topic for queue in options.assign))
        # None if the options have a pattern instead of names.
        self._named_topics = assigned_topics or (options.subscribe if options.subscribe_pattern is None else None)
        # The topics that match the pattern, and the time at which name servers listed them.
        self._matched_topics: tuple[str, ...] = ()
        self._listed_at_s = _NEVER

    def current(self, route_reader: RouteReader, checkpoint_topics: Collection[str]) -> tuple[str, ...]:
        """Return the topics to read. The result includes topics in ``checkpoint_topics`` that match the pattern, also if name
        servers do not list these topics any more.
        """
        if self._named_topics is not None:
            return self._named_topics
        refresh_s = self._options.route_refresh
        if self._clock.now() - self._listed_at_s > (
            refresh_s if self._matched_topics else min(refresh_s, _NO_MATCH_RETRY_PAUSE_S)
        ):
            self._matched_topics = _matching_topics(route_reader, self._options)
            self._listed_at_s = self._clock.now()
        return self.last_known(checkpoint_topics)

    def last_known(self, checkpoint_topics: Collection[str]) -> tuple[str, ...]:
        """Return the topics to read according to the last answer of a name server."""
        if self._named_topics is not None:
            return self._named_topics
        return subscription.with_checkpoint_topics(self._options, self._matched_topics, checkpoint_topics)

    def postpone(self) -> None:
        """Delay the next request for the list of topics: its interval begins now."""
        self._listed_at_s = self._clock.now()

    def expire(self) -> None:
        """Make the next call of ``current`` request the list of topics."""
        self._matched_topics, self._listed_at_s = (), _NEVER


def no_matching_topic_error(options: Options) -> RouteNotFound:
    """Return the error of a source that does not wait any longer for a topic of its pattern."""
    return RouteNotFound(
        f"no topic matches option 'subscribePattern' {options.subscribe_pattern!r}",
        remedy="System, retry and dead-letter topics are omitted; see option 'includeInternal'. Option 'topicWait' lets the read "
        "wait for a topic",
    )


def _matching_topics(route_reader: RouteReader, options: Options) -> tuple[str, ...]:
    """Return the topics that match the pattern, as name servers list them now.

    Raises ``BrokerNotFound`` if no broker is registered, because the topics are unknown then. A query that starts without its
    topics would later read them as new topics, from their first message.
    """
    try:
        cluster = route_reader.cluster()
        topics = route_reader.topics()
    except NotSupported as e:
        raise OptionError(
            "option 'subscribePattern' cannot be used here: the server does not list topics",
            remedy="A Proxy does not forward this request; name the topics with option 'subscribe'",
        ) from e
    if not cluster:
        raise BrokerNotFound(
            f"no broker is registered, so the topics of option 'subscribePattern' {options.subscribe_pattern!r} are unknown",
            remedy="Start a broker, or check the logs of the brokers that should be registered",
        )
    return subscription.matching_topics(options, topics, {*cluster, *(data.cluster for data in cluster.values())})
