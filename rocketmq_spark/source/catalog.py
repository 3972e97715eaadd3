"""What exists now: the queues that a source reads and their bounds, asked as seldom as freshness allows.

A running stream outlives brokers. A broker that does not answer, or that no route names, is waited for: its queues keep
their positions and nothing new is planned for them. Only what brokers say clearly is gone: a topic that its living
brokers do not know any more, a queue that its broker does not read any more.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from rocketmq_spark.clock import Deadline
from rocketmq_spark.codes import DLQ_PREFIX, RETRY_PREFIX
from rocketmq_spark.errors import NotSupported, OptionError, RocketMQError, RouteNotFound, TopicNotFound
from rocketmq_spark.model import MessageQueue, QueueBounds, TopicRoute
from rocketmq_spark.options import Options
from rocketmq_spark.session import Client, client
from rocketmq_spark.source import allocation
from rocketmq_spark.source.positions import listed
from rocketmq_spark.wire import names

logger = logging.getLogger(__name__)

Bounds = Mapping[MessageQueue, QueueBounds]

# While nothing new arrives the brokers are asked less and less often: down to four times a second, and where there are
# so many topics that asking takes long, until it takes a hundredth of the time.
_SHORTEST_REST_S = 0.01
_LONGEST_REST_S = 0.25
_REST_PER_SWEEP = 100
_LONGEST_OF_ALL_S = 10.0


@dataclass(frozen=True, slots=True)
class View:
    """The queues of a moment, topics that are known to be deleted, and brokers that only have slaves now.

    ``forgotten`` are topics with the brokers that do not know them any more, although others do.

    A slave may lack what its master has: its bounds say what can be read there, and nothing of what is lost.
    """

    bounds: Bounds = field(default_factory=dict)
    deleted: frozenset[str] = frozenset()
    forgotten: frozenset[tuple[str, str]] = frozenset()
    orphans: frozenset[str] = frozenset()

    def lacks(self, queue: MessageQueue) -> bool:
        """Whether the queue's topic was deleted, everywhere or on its broker."""
        return queue.topic in self.deleted or (queue.topic, queue.broker_name) in self.forgotten


class Catalog:
    """Queues and bounds of what the options subscribe to."""

    def __init__(self, options: Options) -> None:
        self._options = options
        self._swept_at = 0.0
        self._rest_s = _SHORTEST_REST_S
        self._took_s = 0.0
        self._view = View()
        self._routes: dict[str, TopicRoute] = {}
        self._matched: tuple[float, tuple[str, ...]] = (0.0, ())
        self._left_out: frozenset[MessageQueue] | None = None
        self._had: dict[str, set[str]] = {}

    def expect(self, queues: Iterable[MessageQueue]) -> None:
        """Queues that the checkpoint knows: a topic of theirs that is missing was there, and may be known to be deleted."""
        for queue in queues:
            self._had.setdefault(queue.topic, set()).add(queue.broker_name)

    @property
    def client(self) -> Client:
        return client(self._options)

    def topics(self) -> tuple[str, ...]:
        """The topics that are read: named, assigned, or matched by the pattern now."""
        if self._options.assign:
            return tuple(dict.fromkeys(queue.topic for queue in self._options.assign))
        if self._options.subscribe_pattern is None:
            return self._options.subscribe
        if time.monotonic() - self._matched[0] > self._options.route_refresh or not self._matched[1]:
            self._matched = (time.monotonic(), self._matching(self._options.subscribe_pattern))
        return self._matched[1]

    def _matching(self, pattern: str) -> tuple[str, ...]:
        routes = self.client.routes
        try:
            cluster = routes.cluster()
            found = routes.topics()
        except NotSupported as e:
            raise OptionError(
                "option 'subscribePattern' cannot be used here: the server does not list topics",
                remedy="A Proxy does not pass that question; name the topics with option 'subscribe'",
            ) from e
        internal = {*cluster, *(data.cluster for data in cluster.values())}
        matches = re.compile(pattern).fullmatch
        return tuple(topic for topic in found if matches(topic) and self._is_for_users(topic, internal))

    def _is_for_users(self, topic: str, internal: set[str]) -> bool:
        special = topic.startswith((RETRY_PREFIX, DLQ_PREFIX))
        return self._options.include_internal if special else names.is_user_topic(topic, internal)

    def sweep(self) -> View:
        """Everything now, with retries; all that is missing is an error. For starts and for batches."""
        deadline = Deadline.after(self._options.topic_wait)
        while True:
            try:
                return self._note(self.client.retry.run(self._ask))
            except RouteNotFound as e:
                if deadline.expired or e.topic is None:
                    raise self.client.routes.missing_topic(e) if e.topic else e from e
                logger.info("waiting for topic %s", e.topic)
                time.sleep(min(1.0, max(0.05, deadline.remaining())))

    def _ask(self) -> View:
        topics = self.topics()
        if not topics:
            raise RouteNotFound(
                f"no topic matches option 'subscribePattern' {self._options.subscribe_pattern!r}",
                remedy="System, retry and dead-letter topics are left out; see option 'includeInternal'",
            )
        deleted = set()
        routes = {}
        self.client.routes.refresh(topics, self._options.route_refresh)
        for topic in topics:
            try:
                routes[topic] = self.client.routes.get(topic, self._options.route_refresh)
            except RouteNotFound:
                if topic not in self._had or not self._is_deleted(topic):
                    raise
                deleted.add(topic)
        view = self._looked(routes, Deadline.after(10 * self._options.request_timeout), tolerant=False)
        return replace(view, deleted=frozenset(deleted))

    def recent(self) -> View:
        """The last view when that was a moment ago, else a new one, as far as brokers answer."""
        if time.monotonic() - self._swept_at < self._rest_s:
            return self._view
        begun = time.monotonic()
        deleted = set()
        routes = {}
        topics = self.topics_or_last()
        self.client.routes.refresh(topics, self._options.route_refresh)
        for topic in topics:
            try:
                routes[topic] = self.client.routes.get(topic, self._options.route_refresh)
            except RouteNotFound:
                if self._is_deleted(topic):
                    deleted.add(topic)
            except RocketMQError as e:
                self.waits(e)
        view = self._looked(routes, Deadline.after(self._options.request_timeout), tolerant=True)
        return self._note(replace(view, deleted=frozenset(deleted)), time.monotonic() - begun)

    def rest(self, most_s: float) -> None:
        """Wait until brokers are to be asked again, for before that there is no other view, but no longer than ``most_s``.

        A quarter of a second at most where it took so long to ask them.
        """
        due_s = self._swept_at + self._rest_s - time.monotonic()
        time.sleep(max(0.0, min(due_s, max(most_s, min(self._took_s, _LONGEST_REST_S)))))

    def topics_or_last(self) -> tuple[str, ...]:
        """The topics, or those of the last answer while the name server gives none."""
        try:
            return self.topics()
        except RocketMQError as e:
            self.waits(e)
            return self._matched[1]

    def waits(self, error: RocketMQError) -> None:
        """Note an error that time may heal, and ask for routes anew; raise any other."""
        if not error.retriable:
            raise error
        logger.warning("the stream waits: %s", error)
        for topic in list(self._routes):
            self.client.routes.forget(topic)

    def _is_deleted(self, topic: str) -> bool:
        """Whether all brokers that had the topic are up, and so know what they say."""
        known = self._routes.get(topic)
        try:
            cluster = self.client.routes.cluster()
        except RocketMQError:
            return False
        had = set(known.brokers) if known is not None else self._had.get(topic) or set(cluster)
        return bool(had) and all(name in cluster and cluster[name].master for name in had)

    def _looked(self, routes: Mapping[str, TopicRoute], deadline: Deadline, tolerant: bool) -> View:
        self._routes.update(routes)
        wanted = [queue for route in routes.values() for queue in self._readable(route, tolerant)]
        wanted = self._covered(wanted)
        # Statistics are the master's as long as there is one, wherever messages are read.
        read_from = "master" if self._options.read_from == "master" else "hint"
        forgotten: dict[tuple[str, str], RocketMQError] = {}

        def note(error: RocketMQError, queue: MessageQueue) -> None:
            # A slave may not have heard of a topic yet; of a topic that its master does not know nothing is left.
            if isinstance(error, TopicNotFound) and routes[queue.topic].brokers[queue.broker_name].master:
                forgotten[queue.topic, queue.broker_name] = error
            elif tolerant:
                self.waits(error)
            else:
                raise error

        bounds = self.client.brokers.bounds(wanted, deadline, note, read_from)
        brokers = (data for route in routes.values() for data in route.brokers.values())
        orphans = frozenset(data.broker_name for data in brokers if not data.master)
        left = {queue.topic for queue in bounds}
        for (topic, broker_name), error in forgotten.items():
            if topic not in left and topic not in self._had and not tolerant:
                raise error
            if (topic, broker_name) not in self._view.forgotten:
                logger.info("broker %s does not know topic %s, though the name server says so", broker_name, topic)
        return View(bounds, forgotten=frozenset(forgotten), orphans=orphans)

    def _readable(self, route: TopicRoute, tolerant: bool) -> list[MessageQueue]:
        if route.static:
            raise OptionError(
                f"topic {route.topic!r} is a static topic (logical queues mapped over brokers), which cannot be read",
                remedy="Name topics with ordinary queues",
            )
        queues = route.readable()
        if self._options.assign:
            mine = {queue for queue in self._options.assign if queue.topic == route.topic}
            absent = mine - set(queues)
            if absent and not tolerant:
                raise OptionError(f"option 'assign' names queues that do not exist: {listed(absent)}")
            queues = sorted(mine & set(queues))
        if not queues and not tolerant:
            raise RouteNotFound("no queue of the topic may be read: no read permission", remedy=f"Topic: {route.topic}")
        return queues

    def _covered(self, queues: list[MessageQueue]) -> list[MessageQueue]:
        """Without the queues of other environments, and without those that the strategy gives to nobody."""
        covered, left_out = allocation.covered(self._options, queues)
        if left_out != self._left_out and left_out:
            logger.warning("the allocation strategy gives these queues to no partition: %s", listed(left_out))
        self._left_out = left_out
        return covered

    def hidden(self, queues: Iterable[MessageQueue], view: View) -> dict[MessageQueue, int]:
        """Queues that their living broker does not read any more, with the end that it still knows."""
        gone = []
        for queue in queues:
            route = self._routes.get(queue.topic)
            data = next((d for d in route.queues if d.broker_name == queue.broker_name), None) if route else None
            if data is not None and queue not in view.bounds and queue.queue_id >= data.read_queues:
                gone.append(queue)
        if not gone:
            return {}
        try:
            return self.client.brokers.max_offsets(gone, Deadline.after(self._options.request_timeout))
        except RocketMQError as e:
            self.waits(e)
            return {}

    def _note(self, view: View, took_s: float = 0.0) -> View:
        quiet = view.bounds == self._view.bounds
        longest = max(_LONGEST_REST_S, min(_LONGEST_OF_ALL_S, _REST_PER_SWEEP * took_s))
        self._rest_s = min(longest, max(self._rest_s * 2, 5 * took_s)) if quiet else _SHORTEST_REST_S
        self._swept_at, self._took_s = time.monotonic(), took_s
        self._view = view
        return view
