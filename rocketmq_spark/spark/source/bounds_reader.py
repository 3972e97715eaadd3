"""Fetches the queues that a source reads, and their minimum and maximum offsets.

A stream must survive restarts of brokers. If a broker does not answer, or if no route names it, the stream waits for this broker:
its queues keep their positions, and no batch reads these queues. A topic counts as deleted only if all of its brokers answer that
they do not have it, and a queue counts as removed only if its broker answers that clients can no longer read the queue.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
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
from rocketmq_spark.spark.source.recreated_topics import (
    TopicBroker,
    broker_name_of,
    topic_broker,
    topic_broker_pairs,
    with_client_overhead,
)
from rocketmq_spark.spark.source.removed_queues import RemovedQueues
from rocketmq_spark.spark.source.subscribed_topics import SubscribedTopics

logger = logging.getLogger(__name__)

# After the first answers, a poll waits this long for the brokers that have not answered.
_LATE_BROKER_GRACE_S = 0.2
# If a route no longer names a broker of the checkpoint, polls ask the broker at most once in this time whether it has the topic.
# A poll waits only this long for the answer, because the queues of other brokers wait with it.
_UNROUTED_CHECK_INTERVAL_S, _UNROUTED_CHECK_TIMEOUT_S = 5.0, 1.0
# If no name server answers, polls use the last known routes, and request no routes for at least this time.
_ROUTE_RETRY_PAUSE_S = 1.0


def planning_deadline(options: Options) -> Deadline:
    """Return the deadline for requests about all queues of a plan. The deadline is long, because there may be many requests."""
    return Deadline.after(10 * options.request_timeout)


def check_filter(options: Options, queues: Iterable[MessageQueue]) -> None:
    """Let brokers check the filters of the topics of ``queues``. Raises ``OptionError`` for a filter that brokers reject."""
    deadline = planning_deadline(options)
    subscription.check_sql(
        session.offsets(options), options, queues, deadline, lambda queue: session.pulls(options).stores_batches(queue)
    )


@dataclass(frozen=True, slots=True)
class CheckpointQueues:
    """The queues that existed earlier: the queues in the offsets that Spark passed last, and the queues that an AvailableNow run
    reads to a fixed end.
    """

    offsets: Offsets = field(default_factory=lambda: Offsets({}))
    target_ends: Positions | None = None
    # For each topic, the brokers that had queues of the topic. The set of a topic without positions is empty.
    brokers_by_topic: Mapping[str, set[str]] = field(default_factory=dict)
    # The queues that have a position in ``offsets``, and the queues that ``offsets`` records for option ``assign``.
    queues: Container[MessageQueue] = ()

    @classmethod
    def of(cls, offsets: Offsets, target_ends: Positions | None) -> CheckpointQueues:
        brokers_by_topic: dict[str, set[str]] = {
            topic: set() for topic in checkpoint_identity.recorded_topics(offsets.source_identity)
        }
        for topic, broker_name in topic_broker_pairs((*offsets.positions, *(target_ends or ()))):
            brokers_by_topic.setdefault(topic, set()).add(broker_name)
        assigned_queues = checkpoint_identity.recorded_queues(offsets.source_identity)
        queues = assigned_queues.union(offsets.positions) if assigned_queues else offsets.positions
        return cls(offsets, target_ends, brokers_by_topic, queues)

    @property
    def topics(self) -> Collection[str]:
        return self.brokers_by_topic.keys()


class RetriableErrors:
    """The retriable errors since the last poll that had no error. Each kind of error is logged as a warning once. If two
    polls in a row have no error, and no other request fails between them, the next error of each kind is a warning again.
    """

    def __init__(self) -> None:
        self.retry_errors = RetryErrors()
        self._logged_kinds: set[tuple[object, ...]] = set()

    def note(self, error: RocketMQError, now_s: float) -> None:
        self.retry_errors.record(error, now_s)
        kind = type(error), error.addr, error.topic
        logger.log(logging.DEBUG if kind in self._logged_kinds else logging.WARNING, "the source waits: %s", error)
        self._logged_kinds.add(kind)

    def note_poll_without_error(self) -> None:
        if self.retry_errors.attempt_count:
            # A request has failed since the last poll without an error. The cause may last, so errors of this kind are still
            # not logged as warnings.
            self.retry_errors.clear()
        else:
            self._logged_kinds.clear()


class BoundsReader:
    """Reads the bounds of the queues that the options subscribe to. Confined to one thread."""

    def __init__(self, options: Options, clock: Clock | None = None) -> None:
        self._options = options
        self.clock = clock or Clock()
        self.subscribed_topics = SubscribedTopics(options, self.clock)
        self.poll_interval = PollInterval()
        self.owned_queues = OwnedQueues(options)
        self.retriable_errors = RetriableErrors()
        self._readable_queues = subscription.ReadableQueues(options)
        self._removed_queues = RemovedQueues(options.request_timeout, self.note_retriable_error, self.clock)
        # The ports for the current call of Spark; None until the call needs them.
        self._ports: SourcePorts | None = None
        # The view that the last poll returned.
        self._last_view = QueuesView()
        # The last known route of each topic, also if no name server answers now.
        self.known_routes: dict[str, TopicRoute] = {}
        self._checkpoint_queues = CheckpointQueues()
        # Whether the next poll requests all routes, and the time before which polls request no routes.
        self._routes_are_stale = False
        self._next_route_request_s = 0.0
        # The time before which polls do not ask brokers that no route names.
        self._next_unrouted_check_s = 0.0

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_ports": None}  # ports have clients, which cannot leave their process

    def begin_call(self) -> None:
        """Make this call of Spark fetch the ports again when it needs them, because clients may have been closed since the last
        call.
        """
        self._ports = None

    @property
    def ports(self) -> SourcePorts:
        if self._ports is None:
            self._ports = session.source_ports(self._options)
        return self._ports

    def offset_reader(self) -> OffsetReader:
        return self.ports.offsets

    @property
    def have_brokers_answered(self) -> bool:
        """Whether all brokers have answered once in this run."""
        return bool(self._last_view.topics)

    def set_checkpoint_offsets(self, start: Offsets, target_ends: Positions | None = None) -> None:
        """Remember which topics existed: the topics of ``start``, and the topics of ``target_ends``, which are the ends of an
        AvailableNow run. If a topic that existed is missing now, it was deleted or is unavailable; a missing topic that never
        existed may have a misspelt name.

        An environment that is given by its number keeps the queues that ``start`` records for it. Raises ``CheckpointMismatch``
        for positions of another query.
        """
        if (start, target_ends) == (self._checkpoint_queues.offsets, self._checkpoint_queues.target_ends):
            return
        checkpoint_identity.check_checkpoint(self._options, start)
        self._checkpoint_queues = CheckpointQueues.of(start, target_ends)
        known_topics = self._last_view.topics
        if self.owned_queues.restore(start.environment_numbers) or (
            known_topics
            and not known_topics.issuperset(self.subscribed_topics.last_known(self._checkpoint_queues.topics))
        ):
            self.poll_interval.expire()

    def is_known_topic(self, topic: str | None) -> bool:
        """Whether the topic existed before: the offsets name it, or this run has had a route for it."""
        return topic in self._checkpoint_queues.topics or topic in self.known_routes

    def partition_queues(self, topics: Iterable[str], numbered_topics: Container[str] = ()) -> list[MessageQueue]:
        """Return the queues of ``topics`` that get a number as Kafka's partitions. The result also has the queues of brokers that
        the route does not list now, because their numbers may precede those of listed queues. In a topic of
        ``numbered_topics``, the queues have their numbers already, and a new queue gets the next number. So the result omits
        unlisted queues of such a topic.
        """
        routed_queues = [
            queue
            for topic in topics
            if topic in self.known_routes
            for queue in self.known_routes[topic].partition_queues()
        ]
        deadline, route_reader = Deadline.after(self._options.request_timeout), self.ports.routes
        new_topics = (topic for topic in topics if topic not in numbered_topics)
        return [
            *routed_queues,
            *(queue for topic in new_topics for queue in route_reader.unlisted_queues(topic, deadline)),
        ]

    def fetch_complete_view(self) -> QueuesView:
        """Return the bounds of all queues. Raises an error if any topic, queue or broker is missing."""
        while True:
            try:
                return self._fetch_all()
            except RouteNotFound as e:
                if not self._is_vanished_match(e):
                    raise

    def _fetch_all(self) -> QueuesView:
        route_reader, checkpoint_queues = self.ports.routes, self._checkpoint_queues
        topics = self.subscribed_topics.current(route_reader, checkpoint_queues.topics)
        deleted_topics = set()
        routes = {}
        max_age_s, self._routes_are_stale = 0.0 if self._routes_are_stale else self._options.route_refresh, False
        refreshed_topics = route_reader.refresh(topics, max_age_s)
        for topic in topics:
            try:
                routes[topic] = route_reader.get(topic, float("inf") if topic in refreshed_topics else max_age_s)
            except RouteNotFound:
                if topic not in checkpoint_queues.topics or not self._is_deleted(topic):
                    raise
                deleted_topics.add(topic)
        view = self._fetch_bounds(routes, deleted_topics, planning_deadline(self._options), skip_missing=False)
        return self._keep_view(view, topics)

    def _is_vanished_match(self, error: RouteNotFound) -> bool:
        """Whether the error is about a topic that was deleted after name servers had listed it as a match, and of which the query
        has read no message.
        """
        is_match = self._options.subscribe_pattern is not None and error.topic not in self._checkpoint_queues.topics
        # An error without a code is about a route without read permission.
        if not is_match or error.broker_code is None:
            return False
        self.subscribed_topics.expire()
        return error.topic not in self.subscribed_topics.current(self.ports.routes, self._checkpoint_queues.topics)

    def latest_view(self, wait_for_all: bool = False, is_same_batch: bool = False) -> QueuesView:
        """Return the last view if it is recent, otherwise a new view with the brokers that answer.

        A broker that hangs does not delay the queues of other brokers. With ``wait_for_all``, the method waits for all brokers,
        and a view that lacks the answer of a broker does not count as recent. With ``is_same_batch``, the view from which the
        batch was planned counts as recent, unless an error occurred since the plan.
        """
        started_at_s = self.clock.now()
        is_recent = not self.poll_interval.is_due(started_at_s) or (
            is_same_batch and not self._routes_are_stale and self.poll_interval.serves_same_batch(started_at_s)
        )
        if is_recent and not (wait_for_all and self._last_view.timed_out_brokers):
            return self._last_view
        error_count_before = self.retriable_errors.retry_errors.attempt_count
        topics = self.topics_or_last_known()
        routes, deleted_topics = self._fetch_routes(topics)
        queue_count = sum([len(route.queues) for route in routes.values()])
        deadline = with_client_overhead(Deadline.after(self._options.request_timeout), queue_count)
        grace_s = None if wait_for_all else _LATE_BROKER_GRACE_S
        view = self._fetch_bounds(routes, deleted_topics, deadline, skip_missing=True, grace_s=grace_s)
        has_no_errors = self.retriable_errors.retry_errors.attempt_count == error_count_before
        if has_no_errors:
            self.retriable_errors.note_poll_without_error()
        # If a poll waited in vain for a broker, the duration of this poll does not show how long polls usually take.
        duration_s = self.clock.now() - started_at_s if has_no_errors and not view.timed_out_brokers else 0.0
        return self._keep_view(view, topics, duration_s)

    def _fetch_routes(self, topics: Iterable[str]) -> tuple[dict[str, TopicRoute], set[str]]:
        """Return the routes, and the topics that were deleted. If no name server answers, return the last known routes."""
        deleted_topics = set()
        routes, route_reader = {}, self.ports.routes
        started_at_s = self.clock.now()
        are_requests_paused = started_at_s < self._next_route_request_s
        max_age_s = (
            float("inf") if are_requests_paused else 0.0 if self._routes_are_stale else self._options.route_refresh
        )
        refreshed_topics = frozenset[str]()
        if not are_requests_paused:
            self._routes_are_stale = False
            refreshed_topics = route_reader.refresh(topics, max_age_s)
        for topic in topics:
            try:
                routes[topic] = route_reader.get(topic, float("inf") if topic in refreshed_topics else max_age_s)
            except RouteNotFound:
                if self._is_deleted(topic):
                    deleted_topics.add(topic)
                    self.owned_queues.forget(topic)
                elif topic in self.known_routes:  # a name server that was restarted has no routes at first
                    routes[topic] = self.known_routes[topic]
            except RocketMQError as e:
                self.note_retriable_error(e)
                max_age_s = float("inf")
                self._next_route_request_s = self.clock.now() + max(
                    _ROUTE_RETRY_PAUSE_S, 5 * (self.clock.now() - started_at_s)
                )
                if topic in self.known_routes:
                    routes[topic] = self.known_routes[topic]
        return routes, deleted_topics

    def wait_for_next_poll(self, max_wait_s: float) -> None:
        """Wait until the next poll is due, because the view does not change before this poll. See ``PollInterval.wait_s``."""
        self.clock.sleep(self.poll_interval.wait_s(self.clock.now(), max_wait_s))

    def topics_or_last_known(self) -> tuple[str, ...]:
        """Return the topics to read. If the name server does not answer, return the topics of its last answer."""
        if self.clock.now() < self._next_route_request_s:
            self.subscribed_topics.postpone()
            return self.subscribed_topics.last_known(self._checkpoint_queues.topics)
        try:
            return self.subscribed_topics.current(self.ports.routes, self._checkpoint_queues.topics)
        except RocketMQError as e:
            self.note_retriable_error(e)
            self._next_route_request_s = self.clock.now() + _ROUTE_RETRY_PAUSE_S
            return self.subscribed_topics.last_known(self._checkpoint_queues.topics)

    def note_retriable_error(self, error: RocketMQError) -> None:
        """Note a retriable error, and make the next poll request all routes. Raises any other error."""
        if not error.retriable:
            raise error
        self.retriable_errors.note(error, self.clock.now())
        self._routes_are_stale = True

    def _is_deleted(self, topic: str) -> bool:
        """Whether the topic was deleted: all brokers that had the topic are up, but no broker and no name server has the topic
        now.

        A topic without positions, and without a route in this run, counts as deleted without any request. If the topic does
        exist, the query loses no messages, because it reads the topic from its first message as soon as a name server lists the
        topic.

        The name server is asked for the topic again after it has listed the brokers, because a broker may have registered with
        its topics in the meantime. The brokers are asked, too: with ``enableSplitRegistration``, a broker registers its topics in
        portions, so a name server that was restarted lists the broker before it lists all topics of the broker.
        """
        route, route_reader, offset_reader = self.known_routes.get(topic), self.ports.routes, self.ports.offsets
        # The brokers of the checkpoint are checked, too, because the last route did not name a broker that was down.
        broker_names = {
            *(route.brokers if route is not None else ()),
            *self._checkpoint_queues.brokers_by_topic.get(topic, ()),
        }
        if not broker_names:
            return True
        try:
            cluster = route_reader.cluster()
        except RocketMQError:
            return False
        if not all(_is_running_at_address(route_reader, name, cluster) for name in broker_names):
            return False
        try:
            route_reader.fetch(topic)
        except RouteNotFound:
            pairs = {(topic, name) for name in broker_names}
            deadline = Deadline.after(self._options.request_timeout)
            return pairs_without_topic(offset_reader, pairs, deadline)[0] == pairs
        except RocketMQError:
            return False
        return False

    def _unrouted_pairs_without_topic(self, routes: Mapping[str, TopicRoute], must_ask: bool) -> frozenset[TopicBroker]:
        """Return the topics and brokers of the checkpoint for which the broker is up and does not have the topic, although the
        route of the topic does not name the broker. A route lacks a broker that is down, and also a broker on which the topic was
        deleted, so the broker decides.
        """
        unrouted_pairs = frozenset(
            [
                (topic, name)
                for topic, broker_names in self._checkpoint_queues.brokers_by_topic.items()
                if topic in routes
                for name in broker_names
                if name not in routes[topic].brokers
            ]
        )
        known_pairs = unrouted_pairs & self._last_view.topics_missing_on_broker
        started_at_s = self.clock.now()
        is_paused = started_at_s < max(self._next_unrouted_check_s, self._next_route_request_s)
        if unrouted_pairs == known_pairs or (is_paused and not must_ask):
            return known_pairs
        missing_pairs, error = self._ask_unrouted_brokers(
            unrouted_pairs, self._options.request_timeout if must_ask else _UNROUTED_CHECK_TIMEOUT_S
        )
        duration_s = self.clock.now() - started_at_s
        self._next_unrouted_check_s = self.clock.now() + max(_UNROUTED_CHECK_INTERVAL_S, 10 * duration_s)
        if error is not None and error.retriable and not must_ask:
            self.retriable_errors.note(error, self.clock.now())
        return known_pairs | missing_pairs

    def _ask_unrouted_brokers(
        self, pairs: Collection[TopicBroker], timeout_s: float
    ) -> tuple[set[TopicBroker], RocketMQError | None]:
        """Return those of ``pairs`` whose broker is up and does not have the topic, and an error if a server did not answer."""
        route_reader = self.ports.routes
        try:
            cluster = route_reader.cluster()
        except RocketMQError as e:
            return set(), e
        broker_names = {name for _, name in pairs}
        running_brokers = {name for name in broker_names if _is_running_at_address(route_reader, name, cluster)}
        pairs_to_ask = [pair for pair in pairs if pair[1] in running_brokers]
        deadline = Deadline.after(min(timeout_s, self._options.request_timeout))
        return pairs_without_topic(self.ports.offsets, pairs_to_ask, deadline)

    def _fetch_bounds(
        self,
        routes: Mapping[str, TopicRoute],
        deleted_topics: set[str],
        deadline: Deadline,
        skip_missing: bool,
        grace_s: float | None = None,
    ) -> QueuesView:
        checkpoint_queues = self._checkpoint_queues
        # Routes of deleted topics that matched the pattern are not kept, because programs may create and delete any number of
        # such topics.
        keeps_all_routes = self._options.subscribe_pattern is None
        kept_routes = {
            t: route for t, route in self.known_routes.items() if keeps_all_routes or t in checkpoint_queues.topics
        }
        self.known_routes = {**kept_routes, **routes}
        queues = self._readable_queues.of_routes(routes.values(), skip_missing, checkpoint_queues.queues)
        assigned_topic_queues = (
            [queue for route in routes.values() for queue in route.readable_queues()] if self._options.assign else None
        )
        queues = self.owned_queues.select(
            queues, routes if skip_missing else checkpoint_queues.topics, assigned_topic_queues
        )
        # If a broker has a master, its bounds come from the master, also if tasks read from slaves.
        read_from = "master" if self._options.read_from == "master" else "hint"
        missing_topic_errors: dict[tuple[str, str], RocketMQError] = {}
        missing_topics_before = self._last_view.topics_missing_on_broker

        def note_error(error: RocketMQError, queue: MessageQueue) -> None:
            # A slave may not have a new topic yet. But if the master does not have the topic, the messages of the topic are
            # deleted.
            if isinstance(error, TopicNotFound) and routes[queue.topic].brokers[queue.broker_name].own_master:
                if topic_broker(queue) in missing_topics_before or _is_current_address(
                    self.ports.routes, queue.broker_name
                ):
                    missing_topic_errors[topic_broker(queue)] = error
                    return
                error = _error_of_old_address(error, queue.broker_name)
            if skip_missing:
                self.note_retriable_error(error)
            else:
                error.topic, error.queue = error.topic or queue.topic, error.queue or str(queue)
                raise error

        group, offset_reader = self._options.group, self.ports.offsets
        broker_names = [*{*map(broker_name_of, queues)}]
        connections_before = [*map(offset_reader.connection, broker_names)]
        bounds: Bounds = offset_reader.bounds(queues, deadline, note_error, read_from, grace_s)
        connections_after = [*map(offset_reader.connection, broker_names)]
        if None in connections_before:  # the requests made the first connection
            connections_before = [
                connections_after[i] if connection is None else connection
                for i, connection in enumerate(connections_before)
            ]
        late_brokers = frozenset[str]() if grace_s is None else offset_reader.late_brokers
        brokers_without_master = frozenset(
            [data.broker_name for route in routes.values() for data in route.brokers.values() if not data.own_master]
        )
        if None in connections_after:  # other users of the client may have fetched a newer route that lacks the master
            brokers_without_master |= {
                name for name, connection in zip(broker_names, connections_after, strict=True) if connection is None
            }
        bounds = with_compaction_minimum(
            lambda queues_to_ask, on_error: offset_reader.first_kept_offsets(group, queues_to_ask, deadline, on_error),
            bounds,
            checkpoint_queues.offsets.positions,
            late_brokers | brokers_without_master,
            note_error,
        )
        topics_with_queues = {queue.topic for queue in bounds} if missing_topic_errors else ()
        for (topic, broker_name), error in missing_topic_errors.items():
            if topic not in topics_with_queues and topic not in checkpoint_queues.topics and not skip_missing:
                raise error
            if (topic, broker_name) not in missing_topics_before:
                logger.info("broker %s lacks topic %s, although the topic's route names the broker", broker_name, topic)
        return QueuesView(
            bounds,
            deleted_topics=frozenset(deleted_topics),
            topics_missing_on_broker=self._unrouted_pairs_without_topic(routes, not skip_missing).union(
                missing_topic_errors
            ),
            brokers_without_master=brokers_without_master,
            timed_out_brokers=late_brokers,
            connections=dict(zip(broker_names, zip(connections_before, connections_after, strict=True), strict=True)),
        )

    def removed_queue_ends(self, queues: Collection[MessageQueue], view: QueuesView) -> dict[MessageQueue, int]:
        """Return those of ``queues`` that clients can no longer read from their broker, with the end that the broker reports."""
        return self._removed_queues.ends(self.ports.offsets, queues, view, self.known_routes)

    def _keep_view(self, view: QueuesView, topics: Sequence[str], duration_s: float = 0.0) -> QueuesView:
        is_unchanged = view.bounds == self._last_view.bounds
        self.poll_interval.note_poll(self.clock.now(), duration_s, is_unchanged)
        # Views with equal bounds share one ``bounds`` object, because a comparison of an object with itself is fast.
        bounds = self._last_view.bounds if is_unchanged else view.bounds
        self._last_view = replace(
            view, bounds=bounds, topics=frozenset(topics), poll_number=self._last_view.poll_number + 1
        )
        return self._last_view


def _is_current_address(route_reader: RouteReader, broker_name: str) -> bool:
    """Whether the address to which requests for a broker go still belongs to this broker. Another broker may have taken the
    address.
    """
    try:
        return _is_running_at_address(route_reader, broker_name, route_reader.cluster())
    except NotSupported:  # a Proxy has one address for all brokers
        return True
    except RocketMQError:
        return False


def _is_running_at_address(route_reader: RouteReader, broker_name: str, cluster: Mapping[str, BrokerData]) -> bool:
    """Whether ``cluster`` has a master of the broker, and requests for the broker go to the address of this master. No other
    broker may have this address.
    """
    try:
        address = route_reader.address(broker_name)
    except BrokerNotFound:  # the last route has no master of this broker
        return False
    return [name for name, data in cluster.items() if data.master == address] == [broker_name]


def _error_of_old_address(error: RocketMQError, broker_name: str) -> BrokerNotFound:
    """Return the error that replaces ``error`` if the address of the broker may belong to another broker now."""
    return BrokerNotFound(
        f"broker {broker_name!r} may have left its address; the server there says: {error}",
        error.addr,
        topic=error.topic,
    )


def with_compaction_minimum(
    fetch_first_kept_offsets: Callable[[Sequence[MessageQueue], OnError], Mapping[MessageQueue, int]],
    bounds: Bounds,
    positions: Positions,
    unavailable_brokers: Container[str],
    on_error: OnError,
) -> Bounds:
    """Return ``bounds`` with the offset of the first kept message as the minimum offset of each queue of a compaction topic.

    The minimum offset of a queue is the first offset in its log. A compaction topic also keeps the last message of each key
    after this message has left the log. Brokers are asked for the first kept message of the queues whose position is before the
    minimum offset. So messages that compaction removed are not reported as lost. If a broker does not answer, its queues are
    omitted.
    """
    queues_below_minimum = [
        q for q, b in bounds.items() if b.min_offset > positions.get(q, 0) and q.broker_name not in unavailable_brokers
    ]
    if not queues_below_minimum:
        return bounds
    unanswered_queues: set[MessageQueue] = set()

    def note_error(error: RocketMQError, queue: MessageQueue) -> None:
        unanswered_queues.add(queue)
        on_error(error, queue)

    first_kept_offsets = fetch_first_kept_offsets(queues_below_minimum, note_error)
    return {
        queue: queue_bounds._replace(
            min_offset=min(
                queue_bounds.min_offset, first_kept_offsets[queue], positions.get(queue, first_kept_offsets[queue])
            )
        )
        if queue in first_kept_offsets
        else queue_bounds
        for queue, queue_bounds in bounds.items()
        if queue not in unanswered_queues
    }


def pairs_without_topic(
    offset_reader: OffsetReader, pairs: Iterable[TopicBroker], deadline: Deadline
) -> tuple[set[TopicBroker], RocketMQError | None]:
    """Return those of ``pairs`` whose broker answers that it does not have the topic, and another error of a broker, if any."""
    missing_pairs = set()
    other_errors: list[RocketMQError] = []

    def note_error(error: RocketMQError, queue: MessageQueue) -> None:
        if isinstance(error, TopicNotFound):
            missing_pairs.add(topic_broker(queue))
        else:
            other_errors.append(error)

    offset_reader.bounds([MessageQueue(topic, name, 0) for topic, name in pairs], deadline, note_error)
    return missing_pairs, other_errors[0] if other_errors else None
