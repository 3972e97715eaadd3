"""Fetches the queues that a source reads, and their minimum and maximum offsets.

A stream runs longer than brokers do. If a broker does not answer, or no route names it, the stream waits for it: the queues of
this broker keep their positions, and no batch reads them. A topic counts as deleted only if all of its brokers answer that they
do not have it, and a queue counts as removed only if its broker answers that it does not read the queue any more.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import attrgetter
from typing import Any

from rocketmq_spark import session
from rocketmq_spark.base.clock import Clock, Deadline
from rocketmq_spark.base.retry import RetryErrors
from rocketmq_spark.errors import BrokerNotFound, NotSupported, RocketMQError, RouteNotFound, TopicNotFound
from rocketmq_spark.model import BrokerData, MessageQueue, TopicRoute
from rocketmq_spark.options import Options
from rocketmq_spark.ports import OffsetReader, OnError, RouteReader, SourcePorts
from rocketmq_spark.spark.source import checkpoint_identity, subscription
from rocketmq_spark.spark.source.offsets import Bounds, Offsets, Positions
from rocketmq_spark.spark.source.owned_queues import OwnedQueues
from rocketmq_spark.spark.source.planning import QueuesView
from rocketmq_spark.spark.source.poll_interval import PollInterval
from rocketmq_spark.spark.source.recreated_topics import topic_broker, topic_brokers, with_client_overhead
from rocketmq_spark.spark.source.removed_queues import RemovedQueues
from rocketmq_spark.spark.source.subscribed_topics import SubscribedTopics

logger = logging.getLogger(__name__)

# The name of the broker of a queue. Written in C: a poll calls it for each queue.
_broker_name: Callable[[MessageQueue], str] = attrgetter("broker_name")
# After the first answers, a poll waits this long for the brokers that have not answered.
_GRACE_S = 0.2
# After a name server did not answer, the last known routes are used for this long.
_ROUTE_RETRY_PAUSE_S = 1.0


def planning_deadline(options: Options) -> Deadline:
    """The deadline for requests about all queues of a plan at once, which are many calls."""
    return Deadline.after(10 * options.request_timeout)


def check_filter(options: Options, queues: Iterable[MessageQueue]) -> None:
    """Let brokers check the filters for these queues. Raises ``OptionError`` for a filter that brokers reject."""
    deadline = planning_deadline(options)
    subscription.check_sql(
        session.offsets(options), options, queues, deadline, lambda queue: session.pulls(options).stores_batches(queue)
    )


@dataclass(frozen=True, slots=True)
class CheckpointQueues:
    """The queues that existed before: those of the offsets that Spark passed last, and those that a run reads to a fixed end."""

    offsets: Offsets = field(default_factory=lambda: Offsets({}))
    target_ends: Positions | None = None
    # By topic, the brokers that had queues of it. Topics without positions have none.
    brokers_by_topic: Mapping[str, set[str]] = field(default_factory=dict)
    # The queues with a position, and the assigned queues that the offsets record.
    queues: Container[MessageQueue] = ()

    @classmethod
    def of(cls, offsets: Offsets, target_ends: Positions | None) -> CheckpointQueues:
        brokers_by_topic: dict[str, set[str]] = {
            topic: set() for topic in checkpoint_identity.recorded_topics(offsets.source_identity)
        }
        for topic, broker_name in topic_brokers((*offsets.positions, *(target_ends or ()))):
            brokers_by_topic.setdefault(topic, set()).add(broker_name)
        assigned = checkpoint_identity.recorded_queues(offsets.source_identity)
        queues = assigned.union(offsets.positions) if assigned else offsets.positions
        return cls(offsets, target_ends, brokers_by_topic, queues)

    @property
    def topics(self) -> Collection[str]:
        return self.brokers_by_topic.keys()


class RetriableErrors:
    """The retriable errors since the last poll without any. Each kind of error is logged once as a warning."""

    def __init__(self) -> None:
        self.failures = RetryErrors()
        self._logged: set[tuple[object, ...]] = set()

    def note(self, error: RocketMQError, now_s: float) -> None:
        self.failures.record(error, now_s)
        kind = type(error), error.addr, error.topic
        logger.log(logging.DEBUG if kind in self._logged else logging.WARNING, "the source waits: %s", error)
        self._logged.add(kind)

    def clear(self) -> None:
        if self.failures.attempts:
            self.failures.clear()
            self._logged.clear()


class BoundsReader:
    """Reads the bounds of the queues that the options subscribe to. Confined to one thread."""

    def __init__(self, options: Options, clock: Clock | None = None) -> None:
        self._options = options
        self.clock = clock or Clock()
        self.topics = SubscribedTopics(options, self.clock)
        self.polls = PollInterval()
        self.owned = OwnedQueues(options)
        self.errors = RetriableErrors()
        self._readable_queues = subscription.ReadableQueues(options)
        self._removed_queues = RemovedQueues(options.request_timeout, self.note_retriable_error, self.clock)
        # The ports of this call of Spark; None until it needs them.
        self._ports: SourcePorts | None = None
        # What the last poll returned.
        self._view = QueuesView()
        # The last route of each topic, also of topics whose name server does not answer now.
        self.known_routes: dict[str, TopicRoute] = {}
        self._checkpoint = CheckpointQueues()
        # Whether the next poll requests all routes, and the time before which it requests none.
        self._routes_are_stale = False
        self._routes_due_s = 0.0

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_ports": None}  # clients stay in their process

    def begin_call(self) -> None:
        """Fetch the ports again when they are needed: since the last call of Spark, clients may have been closed."""
        self._ports = None

    @property
    def ports(self) -> SourcePorts:
        if self._ports is None:
            self._ports = session.source_ports(self._options)
        return self._ports

    def offsets(self) -> OffsetReader:
        return self.ports.offsets

    @property
    def has_answered(self) -> bool:
        """Whether all brokers have answered once in this run."""
        return bool(self._view.topics)

    def set_checkpoint_offsets(self, start: Offsets, target_ends: Positions | None = None) -> None:
        """Remember which topics existed: the topics of ``start``, and those of ``target_ends``, to which a run reads. If one of
        these topics is missing now, it may have been deleted; its name is not misspelt.

        An environment that is given by its number keeps the queues that ``start`` records for it. Raises ``CheckpointMismatch``
        for positions of another query.
        """
        if (start, target_ends) == (self._checkpoint.offsets, self._checkpoint.target_ends):
            return
        checkpoint_identity.check_checkpoint(self._options, start)
        self._checkpoint = CheckpointQueues.of(start, target_ends)
        known_topics = self._view.topics
        if self.owned.restore(start.environment) or (
            known_topics and not known_topics.issuperset(self.topics.last_known(self._checkpoint.topics))
        ):
            self.polls.expire()

    def is_known_topic(self, topic: str | None) -> bool:
        """Whether the topic existed before: the offsets name it, or this run has had a route for it."""
        return topic in self._checkpoint.topics or topic in self.known_routes

    def partition_queues(self, topics: Iterable[str], numbered_topics: Container[str] = ()) -> list[MessageQueue]:
        """Return the queues of these topics that get a number as Kafka's partitions. For a new topic, these include queues of
        brokers that the route does not list. Topics in ``numbered_topics`` have numbers already, so such queues can get theirs
        later.
        """
        routed_queues = [
            queue
            for topic in topics
            if topic in self.known_routes
            for queue in self.known_routes[topic].partition_queues()
        ]
        deadline, routes = Deadline.after(self._options.request_timeout), self.ports.routes
        new_topics = (topic for topic in topics if topic not in numbered_topics)
        return [*routed_queues, *(queue for topic in new_topics for queue in routes.unlisted_queues(topic, deadline))]

    def fetch_all(self) -> QueuesView:
        """Return the bounds of all queues. Raises an error if any topic, queue or broker is missing."""
        while True:
            try:
                return self._fetch_all()
            except RouteNotFound as e:
                if not self._is_vanished_match(e):
                    raise

    def _fetch_all(self) -> QueuesView:
        routes_port, checkpoint = self.ports.routes, self._checkpoint
        topics = self.topics.current(routes_port, checkpoint.topics)
        deleted_topics = set()
        routes = {}
        max_age_s, self._routes_are_stale = 0.0 if self._routes_are_stale else self._options.route_refresh, False
        refreshed = routes_port.refresh(topics, max_age_s)
        for topic in topics:
            try:
                routes[topic] = routes_port.get(topic, float("inf") if topic in refreshed else max_age_s)
            except RouteNotFound:
                if topic not in checkpoint.topics or not self._is_deleted(topic):
                    raise
                deleted_topics.add(topic)
        view = self._fetch_bounds(routes, deleted_topics, planning_deadline(self._options), skip_missing=False)
        return self._keep_view(view, topics)

    def _is_vanished_match(self, error: RouteNotFound) -> bool:
        """Whether the error names a topic that was deleted after it was listed as a match; the query has read nothing of it."""
        is_match = self._options.subscribe_pattern is not None and error.topic not in self._checkpoint.topics
        if not is_match or error.broker_code is None:  # without a code: a route without read permission
            return False
        self.topics.expire()
        return error.topic not in self.topics.current(self.ports.routes, self._checkpoint.topics)

    def latest(self, wait_for_all: bool = False, same_batch: bool = False) -> QueuesView:
        """Return the last view if it is recent, otherwise a new view with the brokers that answer.

        A broker that hangs does not delay the queues of others, unless ``wait_for_all`` is true. For the ``same_batch``, the view
        of its plan counts as recent, unless an error occurred since.
        """
        polled_at_s = self.clock.now()
        if not self.polls.is_due(polled_at_s) or (
            same_batch and not self._routes_are_stale and self.polls.serves_same_batch(polled_at_s)
        ):
            return self._view
        errors_before = self.errors.failures.attempts
        topics = self.topics_or_last_known()
        routes, deleted_topics = self._fetch_routes(topics)
        queue_count = sum([len(route.queues) for route in routes.values()])
        deadline = with_client_overhead(Deadline.after(self._options.request_timeout), queue_count)
        grace_s = None if wait_for_all else _GRACE_S
        view = self._fetch_bounds(routes, deleted_topics, deadline, skip_missing=True, grace_s=grace_s)
        no_errors = self.errors.failures.attempts == errors_before
        if no_errors:
            self.errors.clear()
        # A poll that waited for a broker in vain does not show how long polls take.
        took_s = self.clock.now() - polled_at_s if no_errors and not view.timed_out_brokers else 0.0
        return self._keep_view(view, topics, took_s)

    def _fetch_routes(self, topics: Iterable[str]) -> tuple[dict[str, TopicRoute], set[str]]:
        """Return the routes, and the topics that were deleted. If no name server answers, the routes are the last known ones."""
        deleted_topics = set()
        routes, routes_port = {}, self.ports.routes
        started_at_s = self.clock.now()
        is_paused = started_at_s < self._routes_due_s
        max_age_s = float("inf") if is_paused else 0.0 if self._routes_are_stale else self._options.route_refresh
        refreshed = frozenset[str]()
        if not is_paused:
            self._routes_are_stale = False
            refreshed = routes_port.refresh(topics, max_age_s)
        for topic in topics:
            try:
                routes[topic] = routes_port.get(topic, float("inf") if topic in refreshed else max_age_s)
            except RouteNotFound:
                if self._is_deleted(topic):
                    deleted_topics.add(topic)
                    self.owned.forget(topic)
                elif topic in self.known_routes:  # a name server that was restarted has no routes at first
                    routes[topic] = self.known_routes[topic]
            except RocketMQError as e:
                self.note_retriable_error(e)
                max_age_s = float("inf")
                self._routes_due_s = self.clock.now() + max(_ROUTE_RETRY_PAUSE_S, 5 * (self.clock.now() - started_at_s))
                if topic in self.known_routes:
                    routes[topic] = self.known_routes[topic]
        return routes, deleted_topics

    def wait_for_next_poll(self, max_s: float) -> None:
        """Wait until the next poll is due, because the view does not change before; see ``PollInterval.wait_s``."""
        self.clock.sleep(self.polls.wait_s(self.clock.now(), max_s))

    def topics_or_last_known(self) -> tuple[str, ...]:
        """Return the topics to read. If the name server does not answer, return the topics of its last answer."""
        if self.clock.now() < self._routes_due_s:
            self.topics.postpone()
            return self.topics.last_known(self._checkpoint.topics)
        try:
            return self.topics.current(self.ports.routes, self._checkpoint.topics)
        except RocketMQError as e:
            self.note_retriable_error(e)
            self._routes_due_s = self.clock.now() + _ROUTE_RETRY_PAUSE_S
            return self.topics.last_known(self._checkpoint.topics)

    def note_retriable_error(self, error: RocketMQError) -> None:
        """Note a retriable error, which makes the next poll request all routes; raise any other error."""
        if not error.retriable:
            raise error
        self.errors.note(error, self.clock.now())
        self._routes_are_stale = True

    def _is_deleted(self, topic: str) -> bool:
        """Whether the topic was deleted: all brokers that had it are up, and neither they nor the name server have it.

        A topic without positions, and without a route in this run, needs no proof: if it exists after all, the query loses
        nothing, because it reads the topic from its first message when a name server lists it.

        The name server is asked for the topic again after it listed the brokers, because a broker may have registered with its
        topics between the two requests. The brokers are asked, too: with ``enableSplitRegistration``, a broker registers its
        topics in portions, so a name server that was restarted lists the broker before it lists all topics of the broker.
        """
        route, routes, offsets = self.known_routes.get(topic), self.ports.routes, self.ports.offsets
        # The brokers of the checkpoint count, too: if one of them was down, the last route did not name it.
        broker_names = {
            *(route.brokers if route is not None else ()),
            *self._checkpoint.brokers_by_topic.get(topic, ()),
        }
        if not broker_names:
            return True
        try:
            cluster = routes.cluster()
        except RocketMQError:
            return False
        if not all(name in cluster and cluster[name].master for name in broker_names):
            return False
        if not all(_has_own_address(routes, name, cluster) for name in broker_names):
            return False
        try:
            routes.fetch(topic)
        except RouteNotFound:
            return topic_missing_everywhere(offsets, topic, broker_names, Deadline.after(self._options.request_timeout))
        except RocketMQError:
            return False
        return False

    def _fetch_bounds(
        self,
        routes: Mapping[str, TopicRoute],
        deleted_topics: set[str],
        deadline: Deadline,
        skip_missing: bool,
        grace_s: float | None = None,
    ) -> QueuesView:
        checkpoint = self._checkpoint
        # Routes of deleted topics that matched the pattern are dropped, because there may be any number of such topics.
        keep_all = self._options.subscribe_pattern is None
        kept_routes = {t: route for t, route in self.known_routes.items() if keep_all or t in checkpoint.topics}
        self.known_routes = {**kept_routes, **routes}
        queues = self._readable_queues.of_routes(routes.values(), skip_missing, checkpoint.queues)
        assigned_topic_queues = (
            [queue for route in routes.values() for queue in route.readable_queues()] if self._options.assign else None
        )
        queues = self.owned.select(queues, routes if skip_missing else checkpoint.topics, assigned_topic_queues)
        # The bounds come from the master if there is one, also if tasks read from slaves.
        read_from = "master" if self._options.read_from == "master" else "hint"
        missing_topics: dict[tuple[str, str], RocketMQError] = {}
        missing_before = self._view.topics_missing_on_broker

        def note_error(error: RocketMQError, queue: MessageQueue) -> None:
            # A slave may not have a new topic yet. If the master does not have the topic, its messages are deleted.
            if isinstance(error, TopicNotFound) and routes[queue.topic].brokers[queue.broker_name].own_master:
                if topic_broker(queue) in missing_before or _is_current_address(self.ports.routes, queue.broker_name):
                    missing_topics[topic_broker(queue)] = error
                    return
                error = _error_of_old_address(error, queue.broker_name)
            if skip_missing:
                self.note_retriable_error(error)
            else:
                error.topic, error.queue = error.topic or queue.topic, error.queue or str(queue)
                raise error

        group, offsets = self._options.group, self.ports.offsets
        broker_names = [*{*map(_broker_name, queues)}]
        before = [*map(offsets.connection, broker_names)]
        bounds: Bounds = offsets.bounds(queues, deadline, note_error, read_from, grace_s)
        after = [*map(offsets.connection, broker_names)]
        if None in before:  # the first connection came with the requests
            before = [after[i] if connection is None else connection for i, connection in enumerate(before)]
        timed_out = frozenset[str]() if grace_s is None else offsets.late_brokers
        without_master = frozenset(
            [data.broker_name for route in routes.values() for data in route.brokers.values() if not data.own_master]
        )
        if None in after:  # other users of the client may have fetched a newer route, without the master
            without_master |= {name for name, connection in zip(broker_names, after, strict=True) if connection is None}
        bounds = with_compaction_minimum(
            lambda low, said: offsets.first_kept_offsets(group, low, deadline, said),
            bounds,
            checkpoint.offsets.positions,
            timed_out | without_master,
            note_error,
        )
        topics_with_queues = {queue.topic for queue in bounds} if missing_topics else ()
        for (topic, broker_name), error in missing_topics.items():
            if topic not in topics_with_queues and topic not in checkpoint.topics and not skip_missing:
                raise error
            if (topic, broker_name) not in missing_before:
                logger.info("broker %s does not know topic %s, although the route names it", broker_name, topic)
        return QueuesView(
            bounds,
            deleted_topics=frozenset(deleted_topics),
            topics_missing_on_broker=frozenset(missing_topics),
            brokers_without_master=without_master,
            timed_out_brokers=timed_out,
            connections=dict(zip(broker_names, zip(before, after, strict=True), strict=True)),
        )

    def removed_queue_ends(self, queues: Collection[MessageQueue], view: QueuesView) -> dict[MessageQueue, int]:
        """Return those of ``queues`` that their broker does not read any more, with the end that the broker reports."""
        return self._removed_queues.ends(self.ports.offsets, queues, view, self.known_routes)

    def _keep_view(self, view: QueuesView, topics: Sequence[str], duration_s: float = 0.0) -> QueuesView:
        is_unchanged = view.bounds == self._view.bounds
        self.polls.polled(self.clock.now(), duration_s, is_unchanged)
        # Equal views share their bounds, so that they are compared fast.
        bounds = self._view.bounds if is_unchanged else view.bounds
        self._view = replace(view, bounds=bounds, topics=frozenset(topics), poll_number=self._view.poll_number + 1)
        return self._view


def _is_current_address(routes: RouteReader, broker_name: str) -> bool:
    """Whether the address at which a broker is asked still belongs to it: another broker may have taken the address."""
    try:
        return _has_own_address(routes, broker_name, routes.cluster())
    except NotSupported:  # a Proxy, whose one address serves all brokers
        return True
    except RocketMQError:
        return False


def _has_own_address(routes: RouteReader, broker_name: str, cluster: Mapping[str, BrokerData]) -> bool:
    try:
        address = routes.address(broker_name)
    except BrokerNotFound:  # the last route of this broker has no master
        return False
    return [name for name, data in cluster.items() if data.master == address] == [broker_name]


def _error_of_old_address(error: RocketMQError, broker_name: str) -> BrokerNotFound:
    """The error instead of ``error``, if the address of the broker may belong to another broker now."""
    return BrokerNotFound(
        f"broker {broker_name!r} may have left its address; the server there says: {error}",
        error.addr,
        topic=error.topic,
    )


def with_compaction_minimum(
    fetch_first_kept: Callable[[Sequence[MessageQueue], OnError], Mapping[MessageQueue, int]],
    bounds: Bounds,
    positions: Positions,
    unavailable_brokers: Container[str],
    on_error: OnError,
) -> Bounds:
    """Return ``bounds`` with the first offsets that brokers keep of compaction topics.

    The minimum offset of a queue is where its log begins, but a compaction topic keeps the last message of each key beyond that.
    Brokers are asked about queues whose position is before the minimum. Messages that compaction removed are no loss. If a
    broker does not answer, its queues are omitted.
    """
    below_minimum = [
        q for q, b in bounds.items() if b.min_offset > positions.get(q, 0) and q.broker_name not in unavailable_brokers
    ]
    if not below_minimum:
        return bounds
    unknown: set[MessageQueue] = set()

    def note_error(error: RocketMQError, queue: MessageQueue) -> None:
        unknown.add(queue)
        on_error(error, queue)

    first_kept = fetch_first_kept(below_minimum, note_error)
    return {
        queue: queue_bounds._replace(
            min_offset=min(queue_bounds.min_offset, first_kept[queue], positions.get(queue, first_kept[queue]))
        )
        if queue in first_kept
        else queue_bounds
        for queue, queue_bounds in bounds.items()
        if queue not in unknown
    }


def topic_missing_everywhere(offsets: OffsetReader, topic: str, brokers: Iterable[str], deadline: Deadline) -> bool:
    """Whether each of these brokers answers that it does not have the topic."""
    asked_queues = [MessageQueue(topic, name, 0) for name in brokers]
    missing_queues = set()

    def note_error(error: RocketMQError, queue: MessageQueue) -> None:
        if isinstance(error, TopicNotFound):
            missing_queues.add(queue)

    offsets.bounds(asked_queues, deadline, note_error)
    return missing_queues == {*asked_queues}
