"""The routes of a producer, and the queue that each message goes to.

``RouteCache`` mirrors ``tryToFindTopicPublishInfo``: messages of a topic without a route are sent by the route of the template
topic, and the broker creates the topic with the first message. The cache keeps a route until it is refreshed. Several threads
share a cache without a lock, because each change replaces one whole entry.

``Destinations`` resolves the queue that the caller named or that a selector chooses. ``Destinations`` also requests routes, and
waits while no name server answers. ``QueueChooser`` chooses the queue of each attempt: the resolved queue, or the next queue on a
good broker. Each thread has its own round robin. The selectors are in ``queues/selection``, and the selectors for rows in
``rows/routing``.
"""

from __future__ import annotations

import contextlib
import copy
import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from rocketmq_spark.base import codes, process
from rocketmq_spark.base.clock import Deadline, backoff
from rocketmq_spark.base.threads import Timer
from rocketmq_spark.errors import (
    BrokerNotFound,
    CallTimeout,
    MessageRefused,
    RocketMQError,
    RouteNotFound,
    SelectorError,
    SpoolError,
)
from rocketmq_spark.model import Message, MessageQueue, SendRequest, SpooledSend
from rocketmq_spark.model.send import BatchStorage
from rocketmq_spark.ports import Sender, Spool
from rocketmq_spark.producer import encoding
from rocketmq_spark.producer.encoding import DEFAULT_HOW, How
from rocketmq_spark.producer.fault_tolerance import FaultTable
from rocketmq_spark.producer.outgoing import OutgoingSend, Queues
from rocketmq_spark.producer.retry import OutOfTime, RetryState
from rocketmq_spark.producer.settings import ProducerSettings
from rocketmq_spark.producer.spool_bridge import is_storable_selector, is_transient
from rocketmq_spark.queues.environment import Environment
from rocketmq_spark.queues.selection import RoundRobin, Selector, check_arg, select
from rocketmq_spark.wire.envelope import INNER_TOPIC

logger = logging.getLogger(__name__)

REFRESH_PAUSE_S = 0.5
_MAX_REMEDIES = 1000  # the maximum number of cached remedies for missing topics
# The request for a topic's type may take this fraction of the send timeout.
_STORAGE_TIMEOUT_SHARE = 1 / 3

_ENVIRONMENT_QUEUES = "queues of environments"


def queues_of_environment(sender: Sender, environment: Environment) -> dict[str, tuple[MessageQueue, ...]]:
    """The queues of an environment, by topic. The environment owns queues by their positions in the list of all queues. When a
    broker leaves, other queues get the positions of its queues. So all senders to this cluster in this process keep the queues
    that were counted first, even if a later route differs.
    """
    queues_by_topic: dict[str, tuple[MessageQueue, ...]] = process.get_or_create(
        _ENVIRONMENT_QUEUES, (sender, environment), dict
    )
    return queues_by_topic


def set_environment_queues(
    sender: Sender, environment: Environment, counted_queues: Mapping[str, tuple[MessageQueue, ...]]
) -> None:
    """Use the queues that the driver counted. Raises ``SpoolError`` if this process already uses other queues of a topic,
    because a spool of this process then has records for the other queues.
    """
    queues_by_topic = queues_of_environment(sender, environment)
    for topic, queues in counted_queues.items():
        if queues_by_topic.setdefault(topic, queues) != queues:
            raise SpoolError(
                f"the driver counted {', '.join(map(str, queues))} as the queues of the environment, but a spool of this "
                f"process has records for {', '.join(map(str, queues_by_topic[topic]))}",
                topic=topic,
                remedy="Set option 'environments' to the number of environments, or to their queues; or start the driver again "
                "when all brokers are up",
            )


class RouteCache:
    """The queues to which topics are published. The list of a topic stays the same object until the route changes, because each
    list object has its own round robin.
    """

    def __init__(self, sender: Sender, settings: ProducerSettings) -> None:
        self._sender = sender
        self._settings = settings
        # All queues of the topic's route, and those that belong to the producer's environment.
        self._queues_by_topic: dict[str, tuple[Sequence[MessageQueue], Sequence[MessageQueue]]] = {}
        # Topics that do not exist yet and are published through the template topic.
        self._auto_created_topics: set[str] = set()
        self.storage: dict[str, BatchStorage | None] = {}  # how topics store batches; None until a broker answers
        self.pinned_queues: Mapping[str, tuple[MessageQueue, ...]] = {}  # used instead of the environment's queues
        self._refresh_pause_deadline = Deadline(0.0)
        self._missing_topic_remedies: dict[str, tuple[Deadline, str | None]] = {}

    def queues(self, topic: str, deadline: Deadline, refresh: bool = False) -> Sequence[MessageQueue]:
        """The queues to publish to, restricted to the producer's environment. Raises ``RouteNotFound``.

        With ``refresh``, the route is fetched again. If the request for the route fails, the cached route is used. After a
        failure, no route is fetched again for ``REFRESH_PAUSE_S``, because many requests may need a refresh at once.
        """
        cached_queues = self._queues_by_topic.get(topic)
        if cached_queues is not None and (not refresh or not self._refresh_pause_deadline.expired):
            return cached_queues[1]
        try:
            return self._update(topic, self._fetch_queues(topic, deadline, refresh), deadline)
        except RocketMQError as e:
            if cached_queues is None:
                raise self._with_remedy(topic, e) from e.__cause__
            logger.info("could not refresh the route of %s, using the cached one: %s", topic, e)
            if not isinstance(e, RouteNotFound):
                self._refresh_pause_deadline = Deadline.after(REFRESH_PAUSE_S)
            return cached_queues[1]

    def _with_remedy(self, topic: str, error: RocketMQError) -> RocketMQError:
        """Return ``error``, with the nearest names as remedy if the topic does not exist. The result of the search is cached for
        other sends.
        """
        if not isinstance(error, RouteNotFound) or error.broker_code != codes.Response.TOPIC_NOT_EXIST:
            return error
        cached_remedy = self._missing_topic_remedies.get(topic)
        if cached_remedy is None or cached_remedy[0].expired:
            if len(self._missing_topic_remedies) >= _MAX_REMEDIES:
                self._missing_topic_remedies.clear()
            remedy = self._sender.with_similar_topics(error).remedy
            cached_remedy = self._missing_topic_remedies[topic] = Deadline.after(REFRESH_PAUSE_S), remedy
        error.remedy = cached_remedy[1]
        return error

    def wait_for_queues(self, topic: str, deadline: Deadline, pause: Callable[[float], None]) -> Sequence[MessageQueue]:
        """As ``queues``, but waits while no name server answers or a broker is unavailable. Raises the first error."""
        pauses, first_error = backoff(0.05, 1.0), None
        while True:
            try:
                return self.queues(topic, deadline, refresh=first_error is not None)
            except RouteNotFound:
                raise
            except RocketMQError as e:
                first_error = first_error or e
                if not e.retriable or deadline.expired:
                    raise first_error from None
            pause(min(next(pauses), deadline.remaining()))

    def refresh(self, deadline: Deadline) -> None:
        """Fetch the routes of all cached topics. As in Java, a topic without a route keeps its queues, because a name server that
        restarts has no routes at first. Brokers themselves reject sends to a deleted topic.
        """
        self._sender.refresh_routes(deadline)
        for topic in list(self._queues_by_topic):
            try:
                self._update(topic, self._fetch_queues(topic, deadline, False), deadline)
            except RocketMQError as e:
                logger.info("could not refresh the route of %s, using the cached one: %s", topic, e)
        for topic in list(self.storage):
            self.fetch_storage(topic, deadline)

    def brokers(self) -> set[str]:
        """All brokers with queues of a cached topic."""
        return {queue.broker_name for queues, _ in list(self._queues_by_topic.values()) for queue in queues}

    def brokers_of(self, topic: str) -> set[str]:
        """The brokers in the cached route of one topic."""
        cached_queues = self._queues_by_topic.get(topic)
        return {queue.broker_name for queue in cached_queues[1]} if cached_queues is not None else set()

    def fetch_storage(self, topic: str, deadline: Deadline) -> BatchStorage | None:
        """Fetch how the topic stores batches. The request may take ``_STORAGE_TIMEOUT_SHARE`` of the send timeout. If no broker
        answers in time, returns the last answer, or None if no broker has ever answered.
        """
        storage_deadline = deadline.within(self._settings.send_timeout_s * _STORAGE_TIMEOUT_SHARE)
        storage = self.storage[topic] = self._sender.batch_storage(topic, storage_deadline) or self.storage.get(topic)
        return storage

    def is_stored_whole(self, topic: str) -> bool:
        """Whether batches are stored as one message, according to the last answer. Each refresh of routes
        also fetches the storage again."""
        return (storage := self.storage.get(topic)) is not None and storage.as_one_message

    def is_compaction_topic(self, topic: str) -> bool:
        """Whether the topic is a compaction topic, according to the last answer."""
        return (storage := self.storage.get(topic)) is not None and storage.is_compacted

    def any_topic(self) -> str | None:
        return next(iter(self._queues_by_topic), None)

    def _fetch_queues(self, topic: str, deadline: Deadline, refresh: bool) -> Sequence[MessageQueue]:
        try:
            queues = self._sender.publish_queues(topic, deadline, refresh)
        except (RouteNotFound, BrokerNotFound) as e:
            if e.broker_code != codes.Response.TOPIC_NOT_EXIST:
                # The error may mean that the topic has no write permission. The template topic must not be used then, because
                # brokers do not check the permission. As in Java, each send fetches the route again.
                if refresh:
                    raise
                return self._sender.publish_queues(topic, deadline, True)
            cached_queues = self._queues_by_topic.get(topic)
            if not self._settings.auto_create_topics or (
                cached_queues is not None and topic not in self._auto_created_topics
            ):
                raise  # a topic that had a route must not be created again on other brokers
            if self._owns_queues_by_position(topic):
                raise  # positions among the queues of the template would be wrong
            template_queues = self._template_queues(topic, deadline)
            if not template_queues:
                raise
            self._auto_created_topics.add(topic)
            return (
                cached_queues[0]
                if cached_queues is not None and cached_queues[0] == template_queues
                else template_queues
            )
        self._auto_created_topics.discard(topic)
        return queues

    def _owns_queues_by_position(self, topic: str) -> bool:
        """Whether the environment owns the topic's queues by their positions in the list of all queues."""
        environment = self._settings.environment
        return environment is not None and environment.is_by_position and topic != INNER_TOPIC

    def _template_queues(self, topic: str, deadline: Deadline) -> tuple[MessageQueue, ...]:
        try:
            queues = self._sender.publish_queues(codes.AUTO_CREATE_TOPIC, deadline)
        except RouteNotFound:
            return ()
        max_queues = self._settings.default_topic_queues
        return tuple(MessageQueue(topic, q.broker_name, q.queue_id) for q in queues if q.queue_id < max_queues)

    def _update(self, topic: str, queues: Sequence[MessageQueue], deadline: Deadline) -> Sequence[MessageQueue]:
        cached_queues = self._queues_by_topic.get(topic)
        if cached_queues is not None and cached_queues[0] is queues:
            return cached_queues[1]
        own_queues = self._environment_queues(topic, queues, deadline)
        self._queues_by_topic[topic] = (queues, own_queues)
        return own_queues

    def _environment_queues(
        self, topic: str, queues: Sequence[MessageQueue], deadline: Deadline
    ) -> Sequence[MessageQueue]:
        """The queues of the environment. If the environment owns queues by position, its queues of a topic are chosen once, and
        stay the same when the route changes.
        """
        environment = self._settings.environment
        if environment is None or topic == INNER_TOPIC:  # the delay service knows no environments
            return queues
        if topic in self.pinned_queues:
            return self.pinned_queues[topic]
        counted_queues = queues_of_environment(self._sender, environment) if environment.is_by_position else {}
        if topic in counted_queues:
            return counted_queues[topic]
        # Positions are counted in the list of all readable queues, because readers use the same list. A topic that does not exist
        # yet will have the queues of the template.
        readable_queues = queues if topic in self._auto_created_topics else self._sender.all_queues(topic, deadline)
        own_queues = tuple(environment.writable_queues(readable_queues, queues))
        return counted_queues.setdefault(topic, own_queues)


class QueueChooser:
    """Chooses the queue of each attempt of an engine."""

    def __init__(self, routes: RouteCache, faults: FaultTable, timer: Timer) -> None:
        self._routes = routes
        self._faults = faults
        self._timer = timer
        self._round_robins = threading.local()

    def choose(
        self, outgoing: OutgoingSend, retry_state: RetryState, deadline: Deadline, refresh: bool
    ) -> MessageQueue:
        """The queue of the next attempt. With ``refresh`` the route is fetched first."""
        if deadline.expired:
            raise OutOfTime("the send timeout is over", topic=outgoing.topic)
        if outgoing.queue is not None:
            self._ensure_address(outgoing.topic, deadline, refresh)
            return outgoing.queue
        queues = self._routes.queues(outgoing.topic, deadline, refresh)
        if outgoing.filter_queues is not None:
            queues, round_robin = outgoing.filter_queues(queues), RoundRobin()
        else:
            round_robin = self._round_robin(outgoing.topic, queues)
        if retry_state.attempt_count and self._faults.enabled:
            round_robin.reset()
        return self._pick(queues, round_robin, retry_state.last_broker)

    def _ensure_address(self, topic: str, deadline: Deadline, refresh: bool) -> None:
        """Fetch a route if the addresses of brokers are missing, because a route contains these addresses."""
        if refresh:
            self._routes.queues(topic, deadline, refresh=True)
        elif self._routes.any_topic() is None:  # perhaps no route was fetched yet
            with contextlib.suppress(RouteNotFound):
                self._routes.queues(topic, deadline)

    def _pick(self, queues: Queues, round_robin: RoundRobin, last_broker: str | None) -> MessageQueue:
        try:
            return self._faults.pick(queues, round_robin, last_broker, self._timer.now_ms())
        except Exception:  # an error in the choice must not prevent the send
            logger.exception("fault tolerance failed; choosing the queue by round robin instead")
            return round_robin.pick(queues, last_broker)

    def _round_robin(self, topic: str, queues: Queues) -> RoundRobin:
        """This thread's round robin for ``queues``. A new list gets a new round robin, as a new publish info does in Java."""
        round_robins: dict[str, tuple[Queues, RoundRobin]] = self._round_robins.__dict__
        cached_round_robin = round_robins.get(topic)
        if cached_round_robin is None or cached_round_robin[0] is not queues:
            cached_round_robin = round_robins[topic] = (queues, RoundRobin())
        return cached_round_robin[1]


class SpoolFallback(NamedTuple):
    """The spool of a producer, for messages whose topic has no route yet."""

    spool: Spool
    sender: Sender

    def holds_earlier_message(self, topic: str, selector: str, arg: object) -> bool:
        """Whether the spool holds messages of the same selector and argument, which must be sent first."""
        return self.spool.has_earlier_record(SpooledSend(topic, _EMPTY_REQUEST, selector=selector, arg=arg))

    def is_transient(self, error: RocketMQError) -> bool:
        return is_transient(error, self.sender)


_EMPTY_REQUEST = SendRequest("", b"")


class Destinations:
    """Resolves and checks the destination of each message. With a ``spool_fallback``, a selector may choose the queue later, when
    the spool sends the message.
    """

    def __init__(
        self, routes: RouteCache, timer: Timer, environment: Environment | None, fallback: SpoolFallback | None = None
    ) -> None:
        self.spool_fallback = fallback
        self._routes = routes
        self._timer = timer
        self._environment = environment

    def queues(self, topic: str, deadline: Deadline) -> Sequence[MessageQueue]:
        """The queues to which messages of ``topic`` can go."""
        return self._routes.wait_for_queues(topic, deadline, self._timer.pause)

    def queues_or_empty(self, topic: str, deadline: Deadline) -> Sequence[MessageQueue]:
        """As ``queues``, but empty if there is no route and the spool accepts the message."""
        try:
            return self.queues(topic, deadline)
        except RocketMQError as e:
            if self.spool_fallback is None or not self.spool_fallback.is_transient(e):
                raise
            return ()

    def resolve(self, message: Message, how: How, deadline: Deadline) -> How:
        """The destination of ``message``: a queue, any queue, or a selector with its argument. The result has a selector only
        if the spool must send the message; the selector then chooses the queue when the spool sends the message.
        """
        queue, selector = how.queue, how.selector
        if queue is not None and selector is not None:
            raise MessageRefused("a message goes to a queue or through a selector, not both", topic=message.topic)
        if selector is not None:
            return self._apply_selector(message, selector, how.arg, deadline)
        if queue is None:
            return DEFAULT_HOW
        self.check_queue(message.topic, queue, deadline)
        return How(queue)

    def check_queue(self, topic: str, queue: MessageQueue | None, deadline: Deadline) -> None:
        """Check that ``queue``, if given, belongs to the topic and to the producer's environment."""
        if queue is None:
            return
        encoding.check_queue(topic, queue)
        if self._routes.any_topic() is None:  # perhaps no route was fetched yet
            try:
                self.queues(topic, deadline)
            except RouteNotFound:
                pass
            except RocketMQError as e:
                if self.spool_fallback is None or not self.spool_fallback.is_transient(e):
                    raise
        environment = self._environment
        if environment is not None and queue not in self.queues(topic, deadline):
            raise MessageRefused(f"{queue} does not belong to environment {environment.name!r}", topic=topic)

    def _apply_selector(self, message: Message, selector: str | Selector, arg: object, deadline: Deadline) -> How:
        name = selector.lower() if isinstance(selector, str) else ""
        if name == "roundrobin" or (name == "environment" and self._environment is not None and arg is None):
            return DEFAULT_HOW  # any queue of the environment: bad brokers are avoided, and a retry may go to another broker
        fallback = self.spool_fallback
        if fallback is None or not isinstance(selector, str) or not is_storable_selector(selector, arg):
            if fallback is not None and isinstance(selector, str):
                # The argument is checked before the wait for a route, as for messages that are spooled.
                check_arg(selector, arg)
            return How(self._select_queue(message, selector, arg, deadline))
        if fallback.holds_earlier_message(message.topic, selector, arg):
            return How(None, selector, arg)
        try:
            return How(self._select_queue(message, selector, arg, deadline))
        except RocketMQError as e:
            if isinstance(e, SelectorError) or not fallback.is_transient(e):
                raise
            check_arg(selector, arg)  # a selector that would fail with any queues is not spooled
            return How(None, selector, arg)

    def _select_queue(
        self, message: Message, selector: str | Selector, arg: object, deadline: Deadline
    ) -> MessageQueue:
        queues = self.queues(message.topic, deadline)
        queue = select(selector, queues, copy.copy(message), arg)
        if deadline.expired:
            raise CallTimeout("sendSelectImpl call timeout: selecting a queue took too long", topic=message.topic)
        return queue
