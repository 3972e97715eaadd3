"""The state of a producer besides sends: the queues of each topic, housekeeping of brokers, and closing at exit.

``RouteCache`` mirrors ``tryToFindTopicPublishInfo``: a topic without a route is published through the route of the template
topic, and the broker creates it with the first message. Routes come from the sender and are kept until they are refreshed. Several
threads share an object without a lock, because each step replaces one whole entry.

``Housekeeping`` mirrors the scheduled task of ``MQClientInstance`` that refreshes routes, and the detector of
``LatencyFaultToleranceImpl``. A driver, on a timer of its own: these calls may block, and sends must not wait for them.

``watch`` registers a producer to be closed at exit: it sends what is waiting and logs what is lost.
"""

from __future__ import annotations

import atexit
import logging
import sys
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from rocketmq_spark.base import codes, process
from rocketmq_spark.base.clock import Deadline, backoff
from rocketmq_spark.base.threads import Timer
from rocketmq_spark.errors import BrokerNotFound, RocketMQError, RouteNotFound, SpoolError
from rocketmq_spark.model import MessageQueue
from rocketmq_spark.model.send import BatchStorage
from rocketmq_spark.ports import Sender
from rocketmq_spark.producer.attempts import FaultTable
from rocketmq_spark.producer.settings import ProducerSettings
from rocketmq_spark.queues.environment import Environment
from rocketmq_spark.wire.envelope import INNER_TOPIC

logger = logging.getLogger(__name__)

REFRESH_PAUSE_S = 0.5
_MAX_REMEDIES = 1000  # cached remedies of topics that do not exist
# Share of the send timeout for the request for a topic's type.
_STORAGE_TIMEOUT_SHARE = 1 / 3

_ENVIRONMENT_QUEUES = "queues of environments"


def queues_of_environment(sender: Sender, environment: Environment) -> dict[str, tuple[MessageQueue, ...]]:
    """The queues, by topic, of an environment by position. All senders to this cluster in this process share them, even if a
    later route differs: when a broker leaves, other queues take the positions of its queues.
    """
    found: dict[str, tuple[MessageQueue, ...]] = process.once(_ENVIRONMENT_QUEUES, (sender, environment), dict)
    return found


def set_environment_queues(
    sender: Sender, environment: Environment, positions: Mapping[str, tuple[MessageQueue, ...]]
) -> None:
    """Use the queues that the driver counted. Raises ``SpoolError`` if this process already uses others, from a spool whose
    records are for them.
    """
    known = queues_of_environment(sender, environment)
    for topic, queues in positions.items():
        if known.setdefault(topic, queues) != queues:
            raise SpoolError(
                f"a spool that this process sends is for {', '.join(map(str, known[topic]))}, and the driver counted "
                f"{', '.join(map(str, queues))} as the queues of the same environment",
                topic=topic,
                remedy="Set option 'environments' to the number of environments, or to their queues; or start the driver again "
                "when all brokers are there",
            )


class RouteCache:
    """Publish lists. A list stays the same object until the route changes, so that indexes can be kept by it."""

    def __init__(self, sender: Sender, settings: ProducerSettings) -> None:
        self._sender = sender
        self._settings = settings
        self._cached: dict[str, tuple[Sequence[MessageQueue], Sequence[MessageQueue]]] = {}
        self._auto_created: set[str] = set()  # topics that so far are published through the template
        self.storage: dict[str, BatchStorage | None] = {}  # how batches are stored, for topics that were asked about
        self.pinned: Mapping[str, tuple[MessageQueue, ...]] = {}  # these override the environment's
        self._refresh_pause = Deadline(0.0)
        self._missing_remedies: dict[str, tuple[Deadline, str | None]] = {}

    def queues(self, topic: str, deadline: Deadline, refresh: bool = False) -> Sequence[MessageQueue]:
        """The queues to publish to, those of the producer's environment if it has one; raises ``RouteNotFound``.

        With ``refresh`` the route is fetched again. If that fails, the known one is used, and for a moment it is not fetched
        again, because many requests may ask at once.
        """
        known = self._cached.get(topic)
        if known is not None and (not refresh or not self._refresh_pause.expired):
            return known[1]
        try:
            return self._update(topic, self._fetch_queues(topic, deadline, refresh), deadline)
        except RocketMQError as e:
            if known is None:
                raise self._with_remedy(topic, e) from e.__cause__
            logger.info("could not refresh the route of %s, using the cached one: %s", topic, e)
            if not isinstance(e, RouteNotFound):
                self._refresh_pause = Deadline.after(REFRESH_PAUSE_S)
            return known[1]

    def _with_remedy(self, topic: str, error: RocketMQError) -> RocketMQError:
        """Return ``error``, with the nearest names as remedy if the topic does not exist. One search serves many sends."""
        if not isinstance(error, RouteNotFound) or error.broker_code != codes.Response.TOPIC_NOT_EXIST:
            return error
        known = self._missing_remedies.get(topic)
        if known is None or known[0].expired:
            if len(self._missing_remedies) >= _MAX_REMEDIES:
                self._missing_remedies.clear()
            remedy = self._sender.missing_topic(error).remedy
            known = self._missing_remedies[topic] = Deadline.after(REFRESH_PAUSE_S), remedy
        error.remedy = known[1]
        return error

    def wait_for_queues(self, topic: str, deadline: Deadline, pause: Callable[[float], None]) -> Sequence[MessageQueue]:
        """As ``queues``, but waits for a name server that does not answer or a broker that is away. Raises the first
        error.
        """
        pauses, first = backoff(0.05, 1.0), None
        while True:
            try:
                return self.queues(topic, deadline, refresh=first is not None)
            except RouteNotFound:
                raise
            except RocketMQError as e:
                first = first or e
                if not e.retriable or deadline.expired:
                    raise first from None
            pause(min(next(pauses), deadline.remaining()))

    def refresh(self, deadline: Deadline) -> None:
        """Ask for all known topics again. A topic without a route keeps its queues, as in Java: a name server that
        restarts has no routes at first, and a broker reports a deleted topic itself.
        """
        self._sender.refresh_routes(deadline)
        for topic in list(self._cached):
            try:
                self._update(topic, self._fetch_queues(topic, deadline, False), deadline)
            except RocketMQError as e:
                logger.info("could not refresh the route of %s, using the cached one: %s", topic, e)
        for topic in list(self.storage):
            self.fetch_storage(topic, deadline)

    def brokers(self) -> set[str]:
        """All brokers that any known topic is published to."""
        return {queue.broker_name for queues, _ in list(self._cached.values()) for queue in queues}

    def brokers_of(self, topic: str) -> set[str]:
        """The known brokers of one topic, without a request."""
        known = self._cached.get(topic)
        return {queue.broker_name for queue in known[1]} if known is not None else set()

    def fetch_storage(self, topic: str, deadline: Deadline) -> BatchStorage | None:
        """Return how batches of the topic are stored. None without an answer within a share of the send timeout."""
        soon = deadline.within(self._settings.send_timeout_s * _STORAGE_TIMEOUT_SHARE)
        found = self.storage[topic] = self._sender.batch_storage(topic, soon) or self.storage.get(topic)
        return found

    def stored_whole(self, topic: str) -> bool:
        """Whether batches are stored as one message, according to the last answer; each refresh of routes renews it."""
        return (found := self.storage.get(topic)) is not None and found.whole

    def stored_by_key(self, topic: str) -> bool:
        """Whether the topic is a compaction topic, according to the last answer."""
        return (found := self.storage.get(topic)) is not None and found.by_key

    def any_topic(self) -> str | None:
        return next(iter(self._cached), None)

    def _fetch_queues(self, topic: str, deadline: Deadline, refresh: bool) -> Sequence[MessageQueue]:
        try:
            queues = self._sender.publish_queues(topic, deadline, refresh)
        except (RouteNotFound, BrokerNotFound) as e:
            if e.broker_code != codes.Response.TOPIC_NOT_EXIST:
                # The topic exists without write permission, at least in the sender's cached route. Brokers do not check
                # the permission, so the template must not be used; Java asks again for each send.
                if refresh:
                    raise
                return self._sender.publish_queues(topic, deadline, True)
            known = self._cached.get(topic)
            if not self._settings.auto_create_topics or (known is not None and topic not in self._auto_created):
                raise  # a topic that had a route must not be created again on other brokers
            if self._has_positions(topic):
                raise  # the positions would be counted among other queues
            created = self._template_queues(topic, deadline)
            if not created:
                raise
            self._auto_created.add(topic)
            return known[0] if known is not None and known[0] == created else created
        self._auto_created.discard(topic)
        return queues

    def _has_positions(self, topic: str) -> bool:
        """Whether the queues of the environment are those at its position among all."""
        environment = self._settings.environment
        return environment is not None and environment.by_position and topic != INNER_TOPIC

    def _template_queues(self, topic: str, deadline: Deadline) -> tuple[MessageQueue, ...]:
        try:
            queues = self._sender.publish_queues(codes.AUTO_CREATE_TOPIC, deadline)
        except RouteNotFound:
            return ()
        max_queues = self._settings.default_topic_queues
        return tuple(MessageQueue(topic, q.broker_name, q.queue_id) for q in queues if q.queue_id < max_queues)

    def _update(self, topic: str, queues: Sequence[MessageQueue], deadline: Deadline) -> Sequence[MessageQueue]:
        known = self._cached.get(topic)
        if known is not None and known[0] is queues:
            return known[1]
        mine = self._environment_queues(topic, queues, deadline)
        self._cached[topic] = (queues, mine)
        return mine

    def _environment_queues(
        self, topic: str, queues: Sequence[MessageQueue], deadline: Deadline
    ) -> Sequence[MessageQueue]:
        """The environment's queues. Queues by position are determined once, when the topic exists."""
        environment = self._settings.environment
        if environment is None or topic == INNER_TOPIC:  # the delay service knows no environments
            return queues
        if topic in self.pinned:
            return self.pinned[topic]
        kept = queues_of_environment(self._sender, environment) if environment.by_position else {}
        if topic in kept:
            return kept[topic]
        # The queues that readers count; a topic that is not created yet will have those of the template.
        readable = queues if topic in self._auto_created else self._sender.all_queues(topic, deadline)
        mine = tuple(environment.publish(readable, queues))
        return kept.setdefault(topic, mine)


class OpenProducer(Protocol):
    """The method of a producer that is called at exit."""

    settings: ProducerSettings

    def at_exit(self, deadline: Deadline) -> Mapping[str, RocketMQError]:
        """Send waiting batches until ``deadline``. Returns failures from now on, by message id; empty for a closed producer."""


# Strong references, which keep these producers alive.
_open_producers: weakref.WeakSet[OpenProducer] = weakref.WeakSet()
_closed_last: weakref.WeakSet[OpenProducer] = weakref.WeakSet()


def register_at_exit(producer: OpenProducer, last: bool = False) -> None:
    """Register a producer for the exit. ``last``: after the others, because it sends messages that their last sends create."""
    _open_producers.add(producer)
    if last:
        _closed_last.add(producer)


# For all producers together: a process must end, whatever their time-outs are.
MAX_EXIT_S = 30.0


@atexit.register
def _close_producers() -> None:
    end, producers = Deadline.after(MAX_EXIT_S), sorted(_open_producers, key=_closed_last.__contains__)
    for left, producer in zip(range(len(producers), 0, -1), producers, strict=True):
        lost = producer.at_exit(
            end.within(end.remaining() / left)
        )  # a share, so that one alone does not use all the time
        if lost:
            shown, cause = ", ".join(list(lost)[:10]), next(iter(lost.values()))
            sys.stderr.write(
                f"rocketmq-spark: the producer of group {producer.settings.group!r} was not closed, and {len(lost)} "
                f"messages are not acknowledged: {shown}{', …' if len(lost) > 10 else ''}. {cause}\n"
            )


FIRST_REFRESH_S = 0.01
DETECTOR_INTERVAL_S = 3.0
REFRESH_TIMEOUT_S = 3.0


class Housekeeping:
    """The periodic work of one producer, on a timer."""

    def __init__(self, sender: Sender, topics: RouteCache, faults: FaultTable, settings: ProducerSettings) -> None:
        self._sender = sender
        self._topics = topics
        self._faults = faults
        self._settings = settings

    def start(self, timer: Timer) -> None:
        """Refresh routes every 30 s, and run the detector every 3 s while it is on."""
        settings = self._settings
        if settings.route_refresh_s:
            timer.every(settings.route_refresh_s, self.refresh_routes, FIRST_REFRESH_S)
        if settings.heartbeat_s:
            timer.every(DETECTOR_INTERVAL_S, lambda: self.detect(timer.now_ms()), DETECTOR_INTERVAL_S)

    def refresh_routes(self) -> None:
        """Refresh the routes, and forget faults of brokers that left."""
        try:
            self._topics.refresh(Deadline.after(REFRESH_TIMEOUT_S))
        except RocketMQError as e:
            logger.info("routes were not refreshed: %s", e)
            return
        self._faults.retain(self._topics.brokers())

    def detect(self, now_ms: int) -> None:
        """Probe brokers with reported faults; needs a topic that was published to."""
        topic = self._topics.any_topic()
        if topic is None or not self._faults.detecting:
            return
        for broker in self._faults.due_probes(now_ms, self._settings.detect_interval_ms):
            deadline = Deadline.after(self._settings.detect_timeout_ms / 1000)
            self._faults.record_probe(broker, self._sender.probe(broker, topic, deadline))
