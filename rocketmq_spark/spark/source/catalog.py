"""Fetches the queues that a source reads, and their minimum and maximum offsets.

A stream runs longer than brokers do. If a broker does not answer, or no route names it, the stream waits for it: the queues of
this broker keep their positions, and no batch reads them. A topic counts as deleted only if all of its brokers answer that they
do not have it, and a queue counts as removed only if its broker answers that it does not read the queue any more.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import replace

from rocketmq_spark import session
from rocketmq_spark.base.clock import Clock, Deadline
from rocketmq_spark.base.retry import Retry, RetryErrors
from rocketmq_spark.errors import BrokerNotFound, NotSupported, OptionError, RocketMQError, RouteNotFound, TopicNotFound
from rocketmq_spark.model import BrokerData, MessageQueue, QueueBounds, TopicRoute
from rocketmq_spark.options import Options
from rocketmq_spark.ports import OffsetReader, OnError, RouteReader
from rocketmq_spark.queues.environment import environment_of
from rocketmq_spark.spark.source import checkpoint_identity, partitioning, subscription
from rocketmq_spark.spark.source.offsets import Bounds, Offsets, Positions, queues_text
from rocketmq_spark.spark.source.planning import QueuesView
from rocketmq_spark.spark.source.recreated_topics import topic_broker, topic_brokers, with_client_overhead
from rocketmq_spark.spark.source.removed_queues import RemovedQueues

logger = logging.getLogger(__name__)

# While no messages arrive, the poll interval doubles up to a quarter of a second. If there are so many topics that a poll takes
# long, it grows further, until polls take a hundredth of the time.
_MIN_POLL_INTERVAL_S = 0.01
_MAX_POLL_INTERVAL_S = 0.25
_MAX_INTERVAL_PER_POLL_DURATION = 100
_MAX_SLOW_POLL_INTERVAL_S = 10.0
# After the first answers, a poll waits this long for the brokers that have not answered.
_GRACE_S = 0.2
# Spark requests the end of a batch, a report and the tasks one after the other. All three use the bounds of the same poll.
_SAME_BATCH_MAX_AGE_S = 1.0
# Interval of requests for topics while no topic matches a pattern: the first topic should not wait for ``routeRefresh``.
_NO_MATCH_RETRY_PAUSE_S = 1.0
_NEVER_MATCHED = (float("-inf"), ())
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


class OffsetCache:
    """The queues that the options subscribe to, with their bounds. Used by one thread."""

    def __init__(self, options: Options, clock: Clock | None = None) -> None:
        self._options = options
        self.clock = clock or Clock()
        self.read_deadline_s = options.read_deadline
        # The last route of each topic, also of topics whose name server does not answer now.
        self.known_routes: dict[str, TopicRoute] = {}
        # The last poll: its time, how long it took, what it returned, and when the next one is due.
        self._polled_at_s = 0.0
        self._poll_duration_s = 0.0
        self._view = QueuesView()
        self._poll_interval_s = _MIN_POLL_INTERVAL_S
        self._readable_queues = subscription.ReadableQueues(options)
        # The topics that match the pattern, and when name servers listed them.
        self._matched_topics: tuple[float, tuple[str, ...]] = _NEVER_MATCHED
        # The queues that the allocation strategy gave to no partition at the last poll; a change is logged.
        self._unallocated: frozenset[MessageQueue] | None = None
        # The offsets that Spark passed last, their topics with the brokers, and their queues.
        self._checkpoint_offsets: Offsets | None = None
        self._checkpoint_brokers: dict[str, set[str]] = {}
        self._checkpoint_queues: Container[MessageQueue] = ()
        # The queues that an AvailableNow run reads to a fixed end.
        self._target_queues: Iterable[MessageQueue] = ()
        # The queues that the environment owned at any poll: it keeps them while their brokers are unavailable.
        self._environment_queues: set[MessageQueue] = set()
        # Retriable errors since the last poll without any; each kind is logged once.
        self.retriable_failures = RetryErrors()
        self._logged_errors: set[tuple[object, ...]] = set()
        # Whether the next poll requests all routes, and the time before which it requests none.
        self._routes_are_stale = False
        self._routes_due_s = 0.0
        self._removed_queues = RemovedQueues(
            lambda: self.offsets, options.request_timeout, self.note_retriable_error, self.clock
        )

    def set_checkpoint_offsets(self, start: Offsets, target_queues: Iterable[MessageQueue] | None = None) -> None:
        """Remember which topics existed: the topics of ``start``, and those of ``target_queues``, which a run reads to a fixed
        end. If one of these topics is missing now, it may have been deleted; its name is not misspelt.

        An environment that is given by its number keeps the queues that ``start`` records for it. Raises ``CheckpointMismatch``
        for positions of another query.
        """
        target_queues = self._target_queues if target_queues is None else target_queues
        if start is self._checkpoint_offsets and target_queues is self._target_queues:
            return
        self._target_queues = target_queues
        checkpoint_identity.check_checkpoint(self._options, start)
        self._checkpoint_offsets = start
        brokers_by_topic: dict[str, set[str]] = {
            topic: set() for topic in checkpoint_identity.recorded_topics(start.source_identity)
        }
        for topic, broker_name in topic_brokers((*start.positions, *self._target_queues)):
            brokers_by_topic.setdefault(topic, set()).add(broker_name)
        self._checkpoint_brokers = brokers_by_topic
        assigned = checkpoint_identity.recorded_queues(start.source_identity)
        self._checkpoint_queues = assigned.union(start.positions) if assigned else start.positions
        # The offsets override queues that this run counted before it had offsets: if brokers were unavailable then, these queues
        # may belong to another environment.
        recorded_topics = {queue.topic for queue in start.environment}
        environment_queues = {queue for queue in self._environment_queues if queue.topic not in recorded_topics}
        environment = environment_of(self._options)  # compared by number, because the option may spell it "01"
        environment_queues |= {
            q for q, number in start.environment.items() if environment is not None and number == environment.number
        }
        if environment_queues != self._environment_queues:
            self._environment_queues, self._polled_at_s = environment_queues, 0.0

    def is_known_topic(self, topic: str | None) -> bool:
        """Whether the topic existed before: the offsets name it, or this run has had a route for it."""
        return topic in self._checkpoint_brokers or topic in self.known_routes

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
        deadline = Deadline.after(self._options.request_timeout)
        new_topics = (topic for topic in topics if topic not in numbered_topics)
        return [
            *routed_queues,
            *(queue for topic in new_topics for queue in self.routes.unlisted_queues(topic, deadline)),
        ]

    @property
    def environment(self) -> dict[MessageQueue, int]:
        """The queues that the environment owns, with its number; empty unless the environment is given by its number alone."""
        environment = environment_of(self._options)
        return (
            dict.fromkeys(self._environment_queues, environment.number)
            if environment is not None and environment.is_by_position
            else {}
        )

    @property
    def routes(self) -> RouteReader:
        return session.routes(self._options)

    @property
    def offsets(self) -> OffsetReader:
        return session.offsets(self._options)

    def topics(self) -> tuple[str, ...]:
        """Return the topics to read: those that the options name or assign, or those that match the pattern now."""
        if self._options.assign:
            return tuple(dict.fromkeys(queue.topic for queue in self._options.assign))
        if self._options.subscribe_pattern is None:
            return self._options.subscribe
        matched_at, matched = self._matched_topics
        refresh_s = self._options.route_refresh
        if self.clock.now() - matched_at > (refresh_s if matched else min(refresh_s, _NO_MATCH_RETRY_PAUSE_S)):
            self._matched_topics = (self.clock.now(), _matching_topics(self.routes, self._options))
        return subscription.plus_checkpoint_topics(self._options, self._matched_topics[1], self._checkpoint_brokers)

    def fetch_all(self) -> QueuesView:
        """Return the bounds of all queues, with retries. Raises an error if any topic, queue or broker is missing.

        If no topic matches the pattern within ``topicWait``, the view has no queues.
        """
        deadline = Deadline.after(self._options.topic_wait)
        retry = Retry(self._options.num_retries, self._options.retry_interval)
        while True:
            try:
                view = self._keep_view(retry.run(self._fetch))
                if self.known_routes or view.deleted_topics or deadline.expired:
                    return view
                logger.info("waiting for a topic that matches %r", self._options.subscribe_pattern)
                deadline.pause(1.0)
            except RouteNotFound as e:
                if e.broker_code is None:  # a route without read permission
                    raise
                if self._options.subscribe_pattern is not None and e.topic not in self._checkpoint_brokers:
                    self._matched_topics = _NEVER_MATCHED
                    if e.topic not in self.topics():
                        continue  # the topic was deleted after it was listed; the query has read nothing of it
                if deadline.expired:
                    # The new error has all details, and Spark's traceback is long enough without the cause.
                    raise self.routes.with_similar_topics(e) from None
                logger.info("waiting for topic %s", e.topic)
                deadline.pause(1.0)

    def _fetch(self) -> QueuesView:
        topics = self.topics()
        deleted_topics = set()
        routes = {}
        max_age_s, self._routes_are_stale = 0.0 if self._routes_are_stale else self._options.route_refresh, False
        refreshed = self.routes.refresh(topics, max_age_s)
        for topic in topics:
            try:
                routes[topic] = self.routes.get(topic, float("inf") if topic in refreshed else max_age_s)
            except RouteNotFound:
                if topic not in self._checkpoint_brokers or not self._is_deleted(topic):
                    raise
                deleted_topics.add(topic)
        view = self._fetch_bounds(routes, planning_deadline(self._options), skip_missing=False)
        return replace(view, deleted_topics=frozenset(deleted_topics))

    def latest(self, wait_for_all: bool = False, same_batch: bool = False) -> QueuesView:
        """Return the last view if it is recent, otherwise a new view with the brokers that answer.

        A broker that hangs does not delay the queues of others, unless ``wait_for_all`` is true. For the ``same_batch``, the view
        of its plan counts as recent, unless an error occurred since.
        """
        same_batch_max_age_s = (
            max(_SAME_BATCH_MAX_AGE_S, 3 * self._poll_duration_s) if same_batch and not self._routes_are_stale else 0.0
        )
        if self.clock.now() - self._polled_at_s < max(same_batch_max_age_s, self._poll_interval_s):
            return self._view
        polled_at_s, failures_before = self.clock.now(), self.retriable_failures.attempt_count
        routes, deleted_topics = self._fetch_routes(self.topics_or_last_known())
        queue_count = sum(len(route.queues) for route in routes.values())
        deadline = with_client_overhead(Deadline.after(self._options.request_timeout), queue_count)
        view = self._fetch_bounds(routes, deadline, skip_missing=True, grace_s=None if wait_for_all else _GRACE_S)
        no_failures = self.retriable_failures.attempt_count == failures_before
        if no_failures:
            self.retriable_failures.clear()
            self._logged_errors.clear()
        # A poll that waited for a broker in vain does not show how long polls take.
        took_s = self.clock.now() - polled_at_s if no_failures and not view.timed_out_brokers else 0.0
        return self._keep_view(replace(view, deleted_topics=frozenset(deleted_topics)), took_s)

    def _fetch_routes(self, topics: Iterable[str]) -> tuple[dict[str, TopicRoute], set[str]]:
        """Return the routes, and the topics that were deleted. If no name server answers, the routes are the last known ones."""
        deleted_topics = set()
        routes = {}
        started_at_s = self.clock.now()
        is_paused = started_at_s < self._routes_due_s
        max_age_s = float("inf") if is_paused else 0.0 if self._routes_are_stale else self._options.route_refresh
        refreshed = frozenset[str]()
        if not is_paused:
            self._routes_are_stale = False
            refreshed = self.routes.refresh(topics, max_age_s)
        for topic in topics:
            try:
                routes[topic] = self.routes.get(topic, float("inf") if topic in refreshed else max_age_s)
            except RouteNotFound:
                if self._is_deleted(topic):
                    deleted_topics.add(topic)
                    self._environment_queues = {queue for queue in self._environment_queues if queue.topic != topic}
                elif topic in self.known_routes:  # a name server that was restarted has no routes at first
                    routes[topic] = self.known_routes[topic]
            except RocketMQError as e:
                self.note_retriable_error(e)
                max_age_s = float("inf")
                self._routes_due_s = self.clock.now() + max(_ROUTE_RETRY_PAUSE_S, 5 * (self.clock.now() - started_at_s))
                if topic in self.known_routes:
                    routes[topic] = self.known_routes[topic]
        return routes, deleted_topics

    def refresh_routes(self) -> None:
        """Request the routes again, because a broker may have another address now. Retriable errors are noted, not raised."""
        self._fetch_routes(self.topics_or_last_known())

    def wait_for_next_poll(self, max_s: float) -> None:
        """Wait until the next poll is due, because the view does not change before; at most ``max_s``.

        If polls take longer than ``max_s``, the wait is as long as a poll, at most a quarter of a second.
        """
        due_s = self._polled_at_s + self._poll_interval_s - self.clock.now()
        self.clock.sleep(max(0.0, min(due_s, max(max_s, min(self._poll_duration_s, _MAX_POLL_INTERVAL_S)))))

    def topics_or_last_known(self) -> tuple[str, ...]:
        """Return the topics to read. If the name server does not answer, return the topics of its last answer."""
        if self.clock.now() < self._routes_due_s:
            self._matched_topics = (self.clock.now(), self._matched_topics[1])
        try:
            return self.topics()
        except RocketMQError as e:
            self.note_retriable_error(e)
            self._routes_due_s = self.clock.now() + _ROUTE_RETRY_PAUSE_S
            return subscription.plus_checkpoint_topics(self._options, self._matched_topics[1], self._checkpoint_brokers)

    def note_retriable_error(self, error: RocketMQError) -> None:
        """Note a retriable error, which makes the next poll request all routes; raise any other error.

        Errors of one kind are logged once as a warning, until a poll has no errors.
        """
        if not error.retriable:
            raise error
        self.retriable_failures.record(error, self.clock.now())
        kind = type(error), error.addr, error.topic
        logger.log(logging.DEBUG if kind in self._logged_errors else logging.WARNING, "the source waits: %s", error)
        self._logged_errors.add(kind)
        self._routes_are_stale = True

    def _is_deleted(self, topic: str) -> bool:
        """Whether the topic was deleted: all brokers that had it are up, and neither they nor the name server have it.

        A topic without positions, and without a route in this run, needs no proof: if it exists after all, the query loses
        nothing, because it reads the topic from its first message when a name server lists it.

        The name server is asked for the topic again after it listed the brokers, because a broker may have registered with its
        topics between the two requests. The brokers are asked, too: with ``enableSplitRegistration``, a broker registers its
        topics in portions, so a name server that was restarted lists the broker before it lists all topics of the broker.
        """
        route = self.known_routes.get(topic)
        # The brokers of the checkpoint count, too: if one of them was down, the last route did not name it.
        broker_names = {*(route.brokers if route is not None else ()), *self._checkpoint_brokers.get(topic, ())}
        if not broker_names:
            return True
        try:
            cluster = self.routes.cluster()
        except RocketMQError:
            return False
        if not all(name in cluster and cluster[name].master for name in broker_names):
            return False
        if not all(_has_own_address(self.routes, name, cluster) for name in broker_names):
            return False
        try:
            self.routes.fetch(topic)
        except RouteNotFound:
            return topic_missing_everywhere(
                self.offsets, topic, broker_names, Deadline.after(self._options.request_timeout)
            )
        except RocketMQError:
            return False
        return False

    def _fetch_bounds(
        self, routes: Mapping[str, TopicRoute], deadline: Deadline, skip_missing: bool, grace_s: float | None = None
    ) -> QueuesView:
        # Routes of deleted topics that matched the pattern are dropped, because there may be any number of such topics.
        keep_all = self._options.subscribe_pattern is None
        kept_routes = {
            topic: route for topic, route in self.known_routes.items() if keep_all or topic in self._checkpoint_brokers
        }
        self.known_routes = {**kept_routes, **routes}
        positions = {} if self._checkpoint_offsets is None else self._checkpoint_offsets.positions
        queues = self._readable_queues.of_routes(routes.values(), skip_missing, self._checkpoint_queues)
        assigned_topic_queues = (
            [queue for route in routes.values() for queue in route.readable_queues()] if self._options.assign else None
        )
        queues = self._allocated(queues, routes if skip_missing else self._checkpoint_brokers, assigned_topic_queues)
        # The bounds come from the master if there is one, also if tasks read from slaves.
        read_from = "master" if self._options.read_from == "master" else "hint"
        missing_topics: dict[tuple[str, str], RocketMQError] = {}

        def note_error(error: RocketMQError, queue: MessageQueue) -> None:
            # A slave may not have a new topic yet. If the master does not have the topic, its messages are deleted.
            if isinstance(error, TopicNotFound) and routes[queue.topic].brokers[queue.broker_name].own_master:
                if topic_broker(queue) in self._view.topics_missing_on_broker or _is_current_address(
                    self.routes, queue.broker_name
                ):
                    missing_topics[topic_broker(queue)] = error
                    return
                error = _error_of_old_address(error, queue.broker_name)
            if skip_missing:
                self.note_retriable_error(error)
            else:
                error.topic, error.queue = error.topic or queue.topic, error.queue or str(queue)
                raise error

        connections = {name: self.offsets.connection(name) for name in {queue.broker_name for queue in queues}}
        fetched_bounds = self.offsets.bounds(queues, deadline, note_error, read_from, grace_s)
        timed_out = frozenset[str]() if grace_s is None else self.offsets.late_brokers
        broker_data = (data for route in routes.values() for data in route.brokers.values())
        without_master = frozenset(data.broker_name for data in broker_data if not data.own_master)
        group, offsets = self._options.group, self.offsets
        bounds = with_compaction_minimum(
            lambda low, said: offsets.first_kept_offsets(group, low, deadline, said),
            fetched_bounds,
            positions,
            timed_out | without_master,
            note_error,
        )
        topics_with_queues = {queue.topic for queue in bounds}
        for (topic, broker_name), error in missing_topics.items():
            if topic not in topics_with_queues and topic not in self._checkpoint_brokers and not skip_missing:
                raise error
            if (topic, broker_name) not in self._view.topics_missing_on_broker:
                logger.info("broker %s does not know topic %s, although the route names it", broker_name, topic)
        gone = frozenset(missing_topics)
        return QueuesView(
            bounds,
            topics_missing_on_broker=gone,
            brokers_without_master=without_master,
            timed_out_brokers=timed_out,
            connections=connections,
        )

    def _allocated(
        self, queues: list[MessageQueue], topics_without_queues: Container[str], all_queues: list[MessageQueue] | None
    ) -> list[MessageQueue]:
        """Return ``queues`` without those of other environments, and without those that the strategy gives to no partition."""
        allocated, unallocated = partitioning.allocated_queues(
            self._options, queues, self._environment_queues, topics_without_queues, all_queues
        )
        if self._options.environment is not None:
            self._environment_queues.update(allocated)
        if unallocated != self._unallocated and unallocated:
            logger.warning("the allocation strategy gives these queues to no partition: %s", queues_text(unallocated))
        self._unallocated = unallocated
        return allocated

    def removed_queue_ends(self, queues: Iterable[MessageQueue], view: QueuesView) -> dict[MessageQueue, int]:
        """Return those of ``queues`` that their broker does not read any more, with the end that the broker reports."""
        return self._removed_queues.ends(queues, view, self.known_routes)

    def _keep_view(self, view: QueuesView, duration_s: float = 0.0) -> QueuesView:
        unchanged = view.bounds == self._view.bounds
        max_interval_s = max(
            _MAX_POLL_INTERVAL_S, min(_MAX_SLOW_POLL_INTERVAL_S, _MAX_INTERVAL_PER_POLL_DURATION * duration_s)
        )
        self._poll_interval_s = (
            min(max_interval_s, max(self._poll_interval_s * 2, 5 * duration_s)) if unchanged else _MIN_POLL_INTERVAL_S
        )
        self._polled_at_s, self._poll_duration_s = self.clock.now(), duration_s
        self._view = view
        return view


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


def no_matching_topic(options: Options) -> RouteNotFound:
    """The error for a batch read, which cannot wait for a topic of its pattern."""
    return RouteNotFound(
        f"no topic matches option 'subscribePattern' {options.subscribe_pattern!r}",
        remedy="System, retry and dead-letter topics are omitted; see option 'includeInternal'. Option 'topicWait' lets the read "
        "wait for a topic",
    )


def _matching_topics(routes: RouteReader, options: Options) -> tuple[str, ...]:
    """Return the topics that match the pattern, as name servers list them now.

    Raises ``BrokerNotFound`` if no broker is registered: the topics are unknown then, and a query that starts without them would
    read them from their first message later, as new topics.
    """
    try:
        cluster = routes.cluster()
        topics = routes.topics()
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


def with_compaction_minimum(
    fetch_first_kept: Callable[[Sequence[MessageQueue], OnError], Mapping[MessageQueue, int]],
    bounds: Bounds,
    positions: Positions,
    unavailable_brokers: Container[str],
    on_error: OnError,
) -> dict[MessageQueue, QueueBounds]:
    """Return ``bounds`` with the first offsets that brokers keep of compaction topics.

    The minimum offset of a queue is where its log begins, but a compaction topic keeps the last message of each key beyond that.
    Brokers are asked about queues whose position is before the minimum. Messages that compaction removed are no loss. If a
    broker does not answer, its queues are omitted.
    """
    below_minimum = [
        q for q, b in bounds.items() if b.min_offset > positions.get(q, 0) and q.broker_name not in unavailable_brokers
    ]
    unknown: set[MessageQueue] = set()

    def note_error(error: RocketMQError, queue: MessageQueue) -> None:
        unknown.add(queue)
        on_error(error, queue)

    first_kept_offset = fetch_first_kept(below_minimum, note_error) if below_minimum else {}
    return {
        queue: queue_bounds._replace(
            min_offset=min(
                queue_bounds.min_offset, first_kept_offset[queue], positions.get(queue, first_kept_offset[queue])
            )
        )
        if queue in first_kept_offset
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
