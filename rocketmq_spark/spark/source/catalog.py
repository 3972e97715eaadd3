"""What exists now: the queues that a source reads and their bounds, asked as seldom as freshness allows.

A running stream outlives brokers. A broker that does not answer, or that no route names, is waited for: its queues keep
their positions and nothing new is planned for them. Only what brokers say clearly is gone: a topic that its living
brokers do not know any more, a queue that its broker does not read any more.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import replace

from rocketmq_spark import session
from rocketmq_spark.base.clock import Clock, Deadline
from rocketmq_spark.base.retry import Retry, Trouble
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

# While nothing new arrives the brokers are asked less and less often: down to four times a second, and where there are
# so many topics that asking takes long, until it takes a hundredth of the time.
_MIN_POLL_INTERVAL_S = 0.01
_MAX_POLL_INTERVAL_S = 0.25
_MAX_INTERVAL_PER_POLL_DURATION = 100
_MAX_SLOW_POLL_INTERVAL_S = 10.0
# How long the answers that are there wait for those that are not.
_GRACE_S = 0.2
# Spark takes a batch in steps: its end, a report, its tasks. What was seen for the first of them serves the others.
_SAME_BATCH_MAX_AGE_S = 1.0
# Interval of requests for topics while no topic matches a pattern: the first topic should not wait for ``routeRefresh``.
_NO_MATCH_RETRY_PAUSE_S = 1.0
_NEVER_MATCHED = (float("-inf"), ())
# When name servers that gave no answer are asked again; what was known of routes serves meanwhile.
_ROUTE_RETRY_PAUSE_S = 1.0


def planning_deadline(options: Options) -> Deadline:
    """For what a plan asks at once, about all of its queues: many calls of brokers."""
    return Deadline.after(10 * options.request_timeout)


def check_filter(options: Options, queues: Iterable[MessageQueue]) -> None:
    """What only brokers can say about the filters of these queues. Raises ``OptionError``."""
    deadline = planning_deadline(options)
    subscription.check_sql(
        session.offsets(options), options, queues, deadline, lambda queue: session.pulls(options).batched(queue)
    )


class OffsetCache:
    """Queues and bounds of what the options subscribe to."""

    def __init__(self, options: Options, clock: Clock | None = None) -> None:
        self._options = options
        self.clock = clock or Clock()
        self.read_deadline_s = options.read_deadline
        self.known_routes: dict[str, TopicRoute] = {}  # as they were last known
        self._polled_at_s = 0.0
        self._poll_interval_s = _MIN_POLL_INTERVAL_S
        self._poll_duration_s = 0.0
        self._view = QueuesView()
        self._readable_queues = subscription.ReadableQueues(options)
        self._matched_topics: tuple[float, tuple[str, ...]] = _NEVER_MATCHED
        self._unallocated: frozenset[MessageQueue] | None = None
        self._checkpoint_brokers: dict[str, set[str]] = {}
        self._checkpoint_queues: Container[MessageQueue] = ()
        self._environment_queues: set[MessageQueue] = set()
        self._checkpoint_offsets: Offsets | None = None
        self._target_queues: Iterable[MessageQueue] = ()
        self.retriable_failures = Trouble()
        self._logged_errors: set[tuple[object, ...]] = set()
        self._routes_are_stale = False
        self._routes_due_s = 0.0
        self._removed_queues = RemovedQueues(
            lambda: self.offsets, options.request_timeout, self.note_retriable_error, self.clock
        )

    def set_checkpoint_offsets(self, begin: Offsets, to_read: Iterable[MessageQueue] | None = None) -> None:
        """Note the topics that existed: those of the offsets, and of the queues that a run has ``to_read``, although it has read
        nothing of them so far. If one of these topics is missing now, its name is not misspelt: it may be deleted.

        An environment given by its number goes on with the queues that it had; positions of another query are refused.
        """
        to_read = self._target_queues if to_read is None else to_read
        if begin is self._checkpoint_offsets and to_read is self._target_queues:
            return
        self._target_queues = to_read
        checkpoint_identity.check_checkpoint(self._options, begin)
        self._checkpoint_offsets = begin
        had: dict[str, set[str]] = {
            topic: set() for topic in checkpoint_identity.recorded_topics(begin.source_identity)
        }
        for topic, broker_name in topic_brokers((*begin.positions, *self._target_queues)):
            had.setdefault(topic, set()).add(broker_name)
        self._checkpoint_brokers = had
        assigned = checkpoint_identity.recorded_queues(begin.source_identity)
        self._checkpoint_queues = assigned.union(begin.positions) if assigned else begin.positions
        # What was counted before positions were there, in an outage perhaps, may be another environment's.
        known = {queue.topic for queue in begin.environment}
        owned = {queue for queue in self._environment_queues if queue.topic not in known}
        mine = environment_of(self._options)  # whose number may be written in other ways: "01"
        owned |= {q for q, number in begin.environment.items() if mine is not None and number == mine.number}
        if owned != self._environment_queues:
            self._environment_queues, self._polled_at_s = owned, 0.0

    def is_known_topic(self, topic: str | None) -> bool:
        """Whether a topic existed: offsets name it, or it had a route."""
        return topic in self._checkpoint_brokers or topic in self.known_routes

    def numbered_queues(self, topics: Iterable[str], begun: Container[str] = ()) -> list[MessageQueue]:
        """The queues of these topics that have a number as Kafka's partitions. Topics that have ``begun`` have numbers already:
        queues of brokers that are not listed can get theirs later.
        """
        there = [
            queue for topic in topics if topic in self.known_routes for queue in self.known_routes[topic].numbered()
        ]
        deadline = Deadline.after(self._options.request_timeout)
        new = (topic for topic in topics if topic not in begun)
        return [*there, *(queue for topic in new for queue in self.routes.unlisted(topic, deadline))]

    @property
    def environment(self) -> dict[MessageQueue, int]:
        """The queues that the environment of the options owns by its number alone, with the number."""
        mine = environment_of(self._options)
        return dict.fromkeys(self._environment_queues, mine.number) if mine is not None and mine.by_position else {}

    @property
    def routes(self) -> RouteReader:
        return session.routes(self._options)

    @property
    def offsets(self) -> OffsetReader:
        return session.offsets(self._options)

    def topics(self) -> tuple[str, ...]:
        """The topics that are read: named, assigned, or matched by the pattern now."""
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
        """Everything now, with retries; all that is missing is an error. For starts and for batches.

        A pattern that no topic matches within ``topicWait`` gives a view without queues.
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
                        continue  # it was deleted since topics were listed: no loss
                if deadline.expired:
                    # It has all that is known, and a traceback of Spark is long enough.
                    raise self.routes.missing_topic(e) from None
                logger.info("waiting for topic %s", e.topic)
                deadline.pause(1.0)

    def _fetch(self) -> QueuesView:
        topics = self.topics()
        deleted = set()
        routes = {}
        age, self._routes_are_stale = 0.0 if self._routes_are_stale else self._options.route_refresh, False
        fresh = self.routes.refresh(topics, age)
        for topic in topics:
            try:
                routes[topic] = self.routes.get(topic, float("inf") if topic in fresh else age)
            except RouteNotFound:
                if topic not in self._checkpoint_brokers or not self._is_deleted(topic):
                    raise
                deleted.add(topic)
        view = self._fetch_bounds(routes, planning_deadline(self._options), tolerant=False)
        return replace(view, deleted_topics=frozenset(deleted))

    def latest(self, patient: bool = False, same_batch: bool = False) -> QueuesView:
        """The last view when that was a moment ago, else a new one, as far as brokers answer.

        One that hangs does not delay what others have, unless ``patient``. What the plan of a batch saw serves the rest of the
        ``same_batch``, unless something is in doubt.
        """
        same_s = (
            max(_SAME_BATCH_MAX_AGE_S, 3 * self._poll_duration_s) if same_batch and not self._routes_are_stale else 0.0
        )
        if self.clock.now() - self._polled_at_s < max(same_s, self._poll_interval_s):
            return self._view
        begun, waits = self.clock.now(), self.retriable_failures.tries
        routes, deleted = self._fetch_routes(self.topics_or_last_known())
        questions = sum(len(route.queues) for route in routes.values())
        deadline = with_client_overhead(Deadline.after(self._options.request_timeout), questions)
        view = self._fetch_bounds(routes, deadline, tolerant=True, grace_s=None if patient else _GRACE_S)
        quiet = self.retriable_failures.tries == waits
        if quiet:
            self.retriable_failures.clear()
            self._logged_errors.clear()
        # Time spent on who does not answer says nothing about how long asking takes.
        took_s = self.clock.now() - begun if quiet and not view.timed_out_brokers else 0.0
        return self._keep_view(replace(view, deleted_topics=frozenset(deleted)), took_s)

    def _fetch_routes(self, topics: Iterable[str]) -> tuple[dict[str, TopicRoute], set[str]]:
        """Routes, as they were where no name server answers, and the topics that were deleted."""
        deleted = set()
        routes = {}
        now = self.clock.now()
        resting = now < self._routes_due_s
        age = float("inf") if resting else 0.0 if self._routes_are_stale else self._options.route_refresh
        fresh = frozenset[str]()
        if not resting:
            self._routes_are_stale = False
            fresh = self.routes.refresh(topics, age)
        for topic in topics:
            try:
                routes[topic] = self.routes.get(topic, float("inf") if topic in fresh else age)
            except RouteNotFound:
                if self._is_deleted(topic):
                    deleted.add(topic)
                    self._environment_queues = {queue for queue in self._environment_queues if queue.topic != topic}
                elif topic in self.known_routes:  # a name server that has restarted knows nothing for a while
                    routes[topic] = self.known_routes[topic]
            except RocketMQError as e:
                self.note_retriable_error(e)
                age = float("inf")
                self._routes_due_s = self.clock.now() + max(_ROUTE_RETRY_PAUSE_S, 5 * (self.clock.now() - now))
                if topic in self.known_routes:
                    routes[topic] = self.known_routes[topic]
        return routes, deleted

    def refresh_routes(self) -> None:
        """Ask for the routes anew, as far as a name server answers: a broker may have another address now."""
        self._fetch_routes(self.topics_or_last_known())

    def wait_for_next_poll(self, max_s: float) -> None:
        """Wait until brokers are to be asked again, for before that there is no other view, but no longer than ``max_s``.

        A quarter of a second at most where it took so long to ask them.
        """
        due_s = self._polled_at_s + self._poll_interval_s - self.clock.now()
        self.clock.sleep(max(0.0, min(due_s, max(max_s, min(self._poll_duration_s, _MAX_POLL_INTERVAL_S)))))

    def topics_or_last_known(self) -> tuple[str, ...]:
        """The topics, or those of the last answer while the name server gives none."""
        if self.clock.now() < self._routes_due_s:
            self._matched_topics = (self.clock.now(), self._matched_topics[1])
        try:
            return self.topics()
        except RocketMQError as e:
            self.note_retriable_error(e)
            self._routes_due_s = self.clock.now() + _ROUTE_RETRY_PAUSE_S
            return subscription.plus_checkpoint_topics(self._options, self._matched_topics[1], self._checkpoint_brokers)

    def note_retriable_error(self, error: RocketMQError) -> None:
        """Note an error that time may heal, and ask for routes anew; raise any other. Logged once until all is well."""
        if not error.retriable:
            raise error
        self.retriable_failures.note(error, self.clock.now())
        said = type(error), error.addr, error.topic
        logger.log(logging.DEBUG if said in self._logged_errors else logging.WARNING, "the source waits: %s", error)
        self._logged_errors.add(said)
        self._routes_are_stale = True

    def _is_deleted(self, topic: str) -> bool:
        """Whether all brokers that had the topic are up and do not know it, nor does the name server.

        A topic without positions and without a route in this run needs no proof: if it exists after all, the query loses nothing,
        because it reads the topic from its first message when a name server lists it.

        That is asked again after it named them: a broker may have come up between the two questions, with its topics. And
        they are asked themselves: one that registers its topics in portions (``enableSplitRegistration``) is listed by a name
        server that has restarted before all of its topics are.
        """
        known = self.known_routes.get(topic)
        # Also those that the last route did not name: they were away then, and may know it.
        had = {*(known.brokers if known is not None else ()), *self._checkpoint_brokers.get(topic, ())}
        if not had:
            return True
        try:
            cluster = self.routes.cluster()
        except RocketMQError:
            return False
        if not all(name in cluster and cluster[name].master for name in had):
            return False
        if not all(_has_own_address(self.routes, name, cluster) for name in had):
            return False
        try:
            self.routes.fetch(topic)
        except RouteNotFound:
            return topic_missing_everywhere(self.offsets, topic, had, Deadline.after(self._options.request_timeout))
        except RocketMQError:
            return False
        return False

    def _fetch_bounds(
        self, routes: Mapping[str, TopicRoute], deadline: Deadline, tolerant: bool, grace_s: float | None = None
    ) -> QueuesView:
        # Of topics that a pattern matched and that are gone, nothing is kept, however many come and go.
        named = self._options.subscribe_pattern is None
        kept = {
            topic: route for topic, route in self.known_routes.items() if named or topic in self._checkpoint_brokers
        }
        self.known_routes = {**kept, **routes}
        read = {} if self._checkpoint_offsets is None else self._checkpoint_offsets.positions
        wanted = self._readable_queues.of_routes(routes.values(), tolerant, self._checkpoint_queues)
        there = [queue for route in routes.values() for queue in route.readable()] if self._options.assign else None
        wanted = self._allocated(wanted, routes if tolerant else self._checkpoint_brokers, there)
        # Statistics are the master's as long as there is one, wherever messages are read.
        read_from = "master" if self._options.read_from == "master" else "hint"
        forgotten: dict[tuple[str, str], RocketMQError] = {}

        def note(error: RocketMQError, queue: MessageQueue) -> None:
            # A slave may not have heard of a topic yet; of a topic that its master does not know nothing is left.
            if isinstance(error, TopicNotFound) and routes[queue.topic].brokers[queue.broker_name].own_master:
                if topic_broker(queue) in self._view.topics_missing_on_broker or _is_current_address(
                    self.routes, queue.broker_name
                ):
                    forgotten[topic_broker(queue)] = error
                    return
                error = _error_of_old_address(error, queue.broker_name)
            if tolerant:
                self.note_retriable_error(error)
            else:
                error.topic, error.queue = error.topic or queue.topic, error.queue or str(queue)
                raise error

        connections = {name: self.offsets.connection(name) for name in {queue.broker_name for queue in wanted}}
        told = self.offsets.bounds(wanted, deadline, note, read_from, grace_s)
        silent = frozenset[str]() if grace_s is None else self.offsets.late
        brokers = (data for route in routes.values() for data in route.brokers.values())
        orphans = frozenset(data.broker_name for data in brokers if not data.own_master)
        group, offsets = self._options.group, self.offsets
        bounds = with_compaction_minimum(
            lambda low, said: offsets.kept_from(group, low, deadline, said), told, read, silent | orphans, note
        )
        left = {queue.topic for queue in bounds}
        for (topic, broker_name), error in forgotten.items():
            if topic not in left and topic not in self._checkpoint_brokers and not tolerant:
                raise error
            if (topic, broker_name) not in self._view.topics_missing_on_broker:
                logger.info("broker %s does not know topic %s, although the route names it", broker_name, topic)
        gone = frozenset(forgotten)
        return QueuesView(
            bounds,
            topics_missing_on_broker=gone,
            brokers_without_master=orphans,
            timed_out_brokers=silent,
            connections=connections,
        )

    def _allocated(
        self, queues: list[MessageQueue], may_lack: Container[str], there: list[MessageQueue] | None
    ) -> list[MessageQueue]:
        """Without the queues of other environments, and without those that the strategy gives to no consumer."""
        covered, left_out = partitioning.allocated_queues(
            self._options, queues, self._environment_queues, may_lack, there
        )
        if self._options.environment is not None:
            self._environment_queues.update(covered)
        if left_out != self._unallocated and left_out:
            logger.warning("the allocation strategy gives these queues to no partition: %s", queues_text(left_out))
        self._unallocated = left_out
        return covered

    def removed_queue_ends(self, queues: Iterable[MessageQueue], view: QueuesView) -> dict[MessageQueue, int]:
        """Queues that their living broker does not read any more, with the end that it still knows."""
        return self._removed_queues.ends(queues, view, self.known_routes)

    def _keep_view(self, view: QueuesView, took_s: float = 0.0) -> QueuesView:
        quiet = view.bounds == self._view.bounds
        longest = max(_MAX_POLL_INTERVAL_S, min(_MAX_SLOW_POLL_INTERVAL_S, _MAX_INTERVAL_PER_POLL_DURATION * took_s))
        self._poll_interval_s = (
            min(longest, max(self._poll_interval_s * 2, 5 * took_s)) if quiet else _MIN_POLL_INTERVAL_S
        )
        self._polled_at_s, self._poll_duration_s = self.clock.now(), took_s
        self._view = view
        return view


def _is_current_address(routes: RouteReader, broker_name: str) -> bool:
    """Whether the address that is asked for a broker is its own, by the list of all: addresses may change hands."""
    try:
        return _has_own_address(routes, broker_name, routes.cluster())
    except NotSupported:  # a Proxy, whose address is everybody's
        return True
    except RocketMQError:
        return False


def _has_own_address(routes: RouteReader, broker_name: str, cluster: Mapping[str, BrokerData]) -> bool:
    try:
        address = routes.address(broker_name)
    except BrokerNotFound:  # the last route that names it has no master of it
        return False
    return [name for name, data in cluster.items() if data.master == address] == [broker_name]


def _error_of_old_address(error: RocketMQError, broker_name: str) -> BrokerNotFound:
    """For what is said at an address that may be another broker's by now."""
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
    """The topics of the pattern, as name servers list them now.

    Raises ``BrokerNotFound`` if no broker is registered: the topics are then unknown, and a start without them would treat them
    as new topics later.
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
            remedy="Start a broker, or look into the logs of those that should be there",
        )
    return subscription.matching_topics(options, topics, {*cluster, *(data.cluster for data in cluster.values())})


def with_compaction_minimum(
    ask: Callable[[Sequence[MessageQueue], OnError], Mapping[MessageQueue, int]],
    bounds: Bounds,
    positions: Positions,
    silent: Container[str],
    on_error: OnError,
) -> dict[MessageQueue, QueueBounds]:
    """``bounds`` with the minimums of compaction topics: brokers keep the last message of a key for good, and tell where their
    log begins. They are asked where something before that is to be read. What they do not keep is no loss. A queue of which it
    is not known is left out.
    """
    low = [q for q, b in bounds.items() if b.min_offset > positions.get(q, 0) and q.broker_name not in silent]
    unknown: set[MessageQueue] = set()

    def note(error: RocketMQError, queue: MessageQueue) -> None:
        unknown.add(queue)
        on_error(error, queue)

    kept = ask(low, note) if low else {}
    return {
        queue: of._replace(min_offset=min(of.min_offset, kept[queue], positions.get(queue, kept[queue])))
        if queue in kept
        else of
        for queue, of in bounds.items()
        if queue not in unknown
    }


def topic_missing_everywhere(offsets: OffsetReader, topic: str, brokers: Iterable[str], deadline: Deadline) -> bool:
    """Whether all of these brokers say that they do not know the topic."""
    asked = [MessageQueue(topic, name, 0) for name in brokers]
    unknown = set()

    def note(error: RocketMQError, queue: MessageQueue) -> None:
        if isinstance(error, TopicNotFound):
            unknown.add(queue)

    offsets.bounds(asked, deadline, note)
    return unknown == {*asked}
