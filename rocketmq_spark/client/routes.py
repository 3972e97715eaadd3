"""The routes that name servers return, cached by topic."""

from __future__ import annotations

import bisect
import itertools
import logging
import math
import operator
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from rocketmq_spark.base.arguments import similar_names
from rocketmq_spark.base.clock import Deadline, backoff
from rocketmq_spark.base.codes import MAX_QUEUES, Response
from rocketmq_spark.base.process import LiveObjects
from rocketmq_spark.client.name_servers import NameServers, route_request
from rocketmq_spark.errors import (
    BrokerNotFound,
    CallTimeout,
    ConnectionLost,
    NotSupported,
    RemoteProtocolError,
    RocketMQError,
    RouteNotFound,
    TopicNotFound,
)
from rocketmq_spark.model import BrokerData, MessageQueue, QueueData, TopicRoute
from rocketmq_spark.wire import bodies, names, rpc
from rocketmq_spark.wire.header import Command, Peer

logger = logging.getLogger(__name__)

ROUTE_MAX_AGE_S = 30.0
# Brokers register every 30 s by default (``registerNameServerPeriod``), and at least every 60 s. A broker that no name server
# lists for ``MAX_UNLISTED_S`` has left the cluster. ``MAX_UNLISTED_S`` is shorter than the sink's default of ``sendTimeout``,
# so that a broker that hangs has left before the write times out.
MAX_UNLISTED_S = 90.0

_SILENT_SERVERS_REMEDY = "Start the name servers that do not answer, or remove them from option 'nameServer'"


# If a name server does not know a topic, the client forgets the topic's route. The addresses in forgotten routes stay in use,
# because a name server that has just started knows no topic. If there are more than ``_MAX_FORGOTTEN_ROUTES`` forgotten routes,
# those that were forgotten more than ``MAX_UNLISTED_S`` ago are discarded.
_MAX_FORGOTTEN_ROUTES = 64
# ``_MAX_CACHED_BYTES`` limits the encoded size of the cached routes, which take about seven times as much memory. 10,000 topics
# on 30 brokers have 75 MiB. Each queue adds ``_QUEUE_BYTES``, because each queue becomes an object, and a route of 200 bytes
# may announce 200,000 queues. Only ``_MAX_PARALLEL_ROUTES`` routes are refreshed at a time, because all answers of one round
# are in memory.
_MAX_CACHED_BYTES, _MAX_PARALLEL_ROUTES, _MAX_SHOWN_CHARACTERS = 128 << 20, 64, 127
_QUEUE_BYTES = 128


# The routes of all clients of a process are limited, too, because the process keeps the client of each set of options. If all
# routes together exceed ``_MAX_IDLE_BYTES``, clients that were not called for ``_IDLE_TIMEOUT_S`` forget their routes. If they
# exceed ``_MAX_PROCESS_BYTES``, the clients with the most bytes forget their routes.
_IDLE_TIMEOUT_S, _MAX_IDLE_BYTES, _MAX_PROCESS_BYTES = 100.0, 16 << 20, 2 * _MAX_CACHED_BYTES
# A client that forgets its routes keeps up to ``_MAX_ADDRESS_BYTES`` of broker addresses, because a paused consumer needs
# addresses first. The client also keeps up to ``_MAX_ADDRESS_BYTES`` of routes with numbered queues, to notice a change of the
# numbers.
_MAX_ADDRESS_BYTES = 1 << 16
_CLUSTER_KEY = ""  # the key of the list of all brokers in ``_bytes_by_key``; not a topic


def _has_topic(topic: str, broker_name: str, answer: Command | RocketMQError) -> bool | None:
    """Whether a broker has the topic, according to the ``answer`` of one of its replicas; None if the replica did not answer."""
    if isinstance(answer, RocketMQError):
        return None
    if answer.code == Response.TOPIC_NOT_EXIST:
        return False
    if answer.code != Response.SUCCESS:
        return True
    try:
        broker_names = {queue.broker_name for queue in bodies.topic_stats(topic, answer.body)}
    except RemoteProtocolError:
        return True
    return not broker_names or broker_name in broker_names


def _is_connection_refused(answer: Command | RocketMQError) -> bool:
    """Whether the address refused the connection: no process listens there."""
    return isinstance(answer, RocketMQError) and isinstance(answer.__cause__, ConnectionRefusedError)


# Brokers that are in older routes of a topic, but not in its newest route: by name, the time since when the broker is missing,
# its queues, and its addresses.
_UnlistedBrokers = dict[str, tuple[float, QueueData, BrokerData]]


def _queue_count(data: QueueData) -> int:
    return max(data.read_queues, data.write_queues)


def _route_bytes(route: TopicRoute, answer: Command) -> int:
    return len(answer.body) + _QUEUE_BYTES * sum(map(_queue_count, route.queues))


def _broker_bytes(brokers: Iterable[BrokerData]) -> int:
    texts = [text for data in brokers for text in (data.broker_name, data.cluster, *data.addresses.values())]
    return sum(map(len, texts)) + _QUEUE_BYTES * len(texts)


def _unlisted_bytes(unlisted_brokers: _UnlistedBrokers) -> int:
    queue_count = sum(_queue_count(data) for _, data, _ in unlisted_brokers.values())
    return _broker_bytes(broker for _, _, broker in unlisted_brokers.values()) + _QUEUE_BYTES * queue_count


class Routes:
    """Caches routes by topic, with their age. Implements ``ports.RouteReader``, whose docstrings also hold here.

    Thread-safe. The lock is not held during requests. So if several threads need the route of a topic at the same time, each
    thread requests the route, and the last answer is cached.
    """

    def __init__(self, name_servers: NameServers) -> None:
        self._name_servers = name_servers
        self.name_on_wire, self.scope = name_servers.rpc_client.name_on_wire, name_servers.rpc_client.scope
        self.route_max_age_s = ROUTE_MAX_AGE_S
        self._lock = threading.Lock()
        # By topic, with the time when the route was fetched.
        self._routes: dict[str, tuple[float, TopicRoute]] = {}
        # Routes of topics that name servers no longer have, in the order in which the routes were forgotten, and the times when
        # they were forgotten.
        self._forgotten_routes: dict[str, tuple[float, TopicRoute]] = {}
        self._forgotten_at_s: dict[str, float] = {}
        # By topic: brokers that are in earlier routes, but not in the newest route.
        self._unlisted_brokers: dict[str, _UnlistedBrokers] = {}
        # Topics whose queues are numbered, because ``unlisted_queues`` was called for them.
        self._numbered_topics: set[str] = set()
        # The bytes of the routes of each topic and of the list of all brokers, and the sum of these bytes.
        self._bytes_by_key: dict[str, int] = {}
        self._cached_bytes = 0
        # The brokers of the newest routes, cached because each pull needs its broker; None after a change of routes.
        self._brokers_by_name: dict[str, BrokerData] | None = None
        # The brokers of the last list of all brokers. Used for brokers that are in no route.
        self._cluster_brokers: dict[str, BrokerData] = {}
        self._last_used_s = time.monotonic()
        _all_routes.add(self)

    def get(self, topic: str, max_age_s: float = 30.0, deadline: Deadline | None = None) -> TopicRoute:
        """See ``ports.RouteReader``. Also raises ``ConnectionLost`` or ``CallTimeout`` if no name server answers, and
        ``RemoteProtocolError`` if the cache is full.
        """
        self._last_used_s = time.monotonic()
        with self._lock:
            cached_entry = self._routes.get(topic)
        if cached_entry is not None and time.monotonic() - cached_entry[0] < max_age_s:
            return cached_entry[1]
        return self._store(topic, *self._fetch_with_size(topic, deadline))

    def recent_route(self, topic: str, deadline: Deadline, refresh: bool = False) -> TopicRoute:
        """Return a route that is at most 30 s old (``route_max_age_s``), or a new one with ``refresh``. If no name server
        answers, returns an older cached route, unless ``refresh`` is set.

        If a route is cached, name servers get half of the time, so that the caller can still use the route.
        """
        is_cached = not refresh and topic in self.cached_topics()
        first_deadline = deadline.within(deadline.remaining() / 2) if is_cached else deadline
        try:
            return self.get(topic, 0.0 if refresh else self.route_max_age_s, first_deadline)
        except (ConnectionLost, CallTimeout) as e:
            if refresh or topic not in self.cached_topics():
                raise
            logger.info("could not refresh the route of %s, using the cached one: %s", topic, e)
            return self.get(topic, math.inf, deadline)

    def _store(self, topic: str, route: TopicRoute, size: int, peer: Peer) -> TopicRoute:
        """Cache a route of ``size`` bytes. The cache has a limit, because a name server decides how large routes are."""
        self._last_used_s = time.monotonic()
        with self._lock:
            growth_bytes = (
                size + _unlisted_bytes(self._unlisted_brokers_locked(topic, route)) - self._bytes_by_key.get(topic, 0)
            )
        has_room = _make_room(self, growth_bytes)
        with self._lock:
            unlisted_brokers = self._unlisted_brokers_locked(topic, route)
            size += _unlisted_bytes(unlisted_brokers)
            self._check_room_locked(topic, size, has_room)
            # Another thread may have cached a route since ``get`` read the cache.
            cached_entry = self._routes.get(topic)
            if cached_entry is not None and cached_entry[1] == route:
                route = cached_entry[1]
            self._forgotten_routes.pop(topic, None)
            self._forgotten_at_s.pop(topic, None)
            self._routes[topic] = (time.monotonic(), route)
            self._unlisted_brokers.pop(topic, None)
            if unlisted_brokers:
                self._unlisted_brokers[topic] = unlisted_brokers
            self._set_size_locked(topic, size)
            self._brokers_by_name = None
        self._advertise(route.brokers, peer)
        return route

    def _set_size_locked(self, key: str, size: int) -> None:
        """Record the bytes that are cached for a topic, or for the list of all brokers."""
        self._cached_bytes += size - self._bytes_by_key.pop(key, 0)
        if size:
            self._bytes_by_key[key] = size

    def _check_room_locked(self, key: str, size: int, process_has_room: bool) -> None:
        """Raise ``RemoteProtocolError`` if ``size`` bytes of a topic's route, or of the list of all brokers, do not fit.
        Forgotten routes are discarded to make room. ``process_has_room`` says whether the process has room.
        """
        other_bytes = self._cached_bytes - self._bytes_by_key.get(key, 0)
        description = f"the route of {key[:_MAX_SHOWN_CHARACTERS]}" if key else "the list of all brokers"
        if not process_has_room:
            raise RemoteProtocolError(
                f"with {description}, the routes of this client would have {other_bytes + size} bytes, {_QUEUE_BYTES} for each "
                f"queue included; this is more than its share of the {_MAX_PROCESS_BYTES} bytes for all clients of this process",
                topic=key[:_MAX_SHOWN_CHARACTERS] or None,
                remedy="Read fewer topics in one process, or use the same connection options for all topics",
            )
        while other_bytes + size > _MAX_CACHED_BYTES and (
            forgotten_topic := next((topic for topic in self._forgotten_routes if topic != key), None)
        ):
            self._discard_forgotten_locked(forgotten_topic)
            other_bytes = self._cached_bytes - self._bytes_by_key.get(key, 0)
        if other_bytes + size > _MAX_CACHED_BYTES:
            raise RemoteProtocolError(
                f"with {description}, the routes of {len(self._routes)} topics would have {other_bytes + size} bytes, "
                f"{_QUEUE_BYTES} for each queue included; at most {_MAX_CACHED_BYTES} bytes are kept",
                topic=key[:_MAX_SHOWN_CHARACTERS] or None,
                remedy="Read fewer topics in one process, for example with a narrower 'subscribePattern'. If the topics have "
                "few brokers, look at what the name server answers: rocketmq-spark topic describe",
            )

    def _unlisted_brokers_locked(self, topic: str, route: TopicRoute) -> _UnlistedBrokers:
        """Return the brokers that are in earlier routes, but not in ``route``. If there are more brokers than a route may have,
        only the brokers that went missing last are returned.
        """
        earlier_entry, now = self._routes.get(topic) or self._forgotten_routes.get(topic), time.monotonic()
        unlisted_brokers = self._unlisted_brokers.get(topic, {})
        if earlier_entry is not None and earlier_entry[1] is not route:
            brokers = earlier_entry[1].brokers
            earlier_queues = {data.broker_name: data for data in earlier_entry[1].queues if data.broker_name in brokers}
            unlisted_brokers = {
                **{name: (now, data, brokers[name]) for name, data in earlier_queues.items()},
                **unlisted_brokers,
            }
        listed_brokers = {data.broker_name for data in route.queues}
        unlisted_entries = [
            (name, entry)
            for name, entry in unlisted_brokers.items()
            if name not in listed_brokers and now - entry[0] < MAX_UNLISTED_S
        ]
        unlisted_entries.sort(key=lambda entry: entry[1][0], reverse=True)
        queue_totals = list(itertools.accumulate(_queue_count(data) for _, (_, data, _) in unlisted_entries))
        return dict(unlisted_entries[: min(bodies.MAX_ROUTE_BROKERS, bisect.bisect_right(queue_totals, MAX_QUEUES))])

    def unlisted_queues(self, topic: str, deadline: Deadline) -> list[MessageQueue]:
        """See ``ports.RouteReader``. A broker has left if its addresses refuse connections, if it does not know the topic, or
        if a broker with another name answers. A broker is present if one of its replicas has the topic. A broker whose state is
        unclear is asked again until ``deadline``. A broker whose state is then still unclear counts as present. Proxies are
        left out.
        """
        with self._lock:
            unlisted_brokers, now = dict(self._unlisted_brokers.get(topic, {})), time.monotonic()
            if topic in self._routes:
                self._numbered_topics.add(topic)
        unclear_brokers = [
            (data, broker)
            for since, data, broker in unlisted_brokers.values()
            if now - since < MAX_UNLISTED_S and not any(map(self.is_proxy, broker.addresses.values()))
        ]
        present_queues: list[QueueData] = []
        pauses = backoff(0.05, 0.5)
        while unclear_brokers:
            states = list(self._topic_presence(topic, unclear_brokers, deadline))
            present_queues += [data for (data, _), state in zip(unclear_brokers, states, strict=True) if state]
            unclear_brokers = [
                broker_data for broker_data, state in zip(unclear_brokers, states, strict=True) if state is None
            ]
            if unclear_brokers and deadline.expired:
                present_queues += [data for data, _ in unclear_brokers]
                break
            if unclear_brokers:
                deadline.pause(next(pauses))
        return TopicRoute(topic, tuple(present_queues), {}).partition_queues()

    def _topic_presence(
        self, topic: str, brokers: Sequence[tuple[QueueData, BrokerData]], deadline: Deadline
    ) -> Iterator[bool | None]:
        """Yield for each broker whether it has the topic, after one request to each of its replicas; None if that is unclear."""
        rpc_client = self._name_servers.rpc_client
        replicas = [(data.broker_name, address) for data, broker in brokers for address in broker.replicas]
        attempts = [rpc_client.pool.last_attempt(address) for _, address in replicas]
        name_on_wire = self.name_on_wire(topic)
        answers = rpc_client.invoke_each(
            [(address, rpc.GET_TOPIC_STATS_INFO.request(topic=name_on_wire, bname=name)) for name, address in replicas],
            deadline,
        )
        # During a backoff, the pool returns the error of an earlier attempt, which says nothing about the present.
        new_attempt_flags = [
            rpc_client.pool.last_attempt(address) != attempts_before
            for (_, address), attempts_before in zip(replicas, attempts, strict=True)
        ]
        replica_answers = zip(answers, new_attempt_flags, strict=True)
        for data, broker in brokers:
            broker_answers = list(itertools.islice(replica_answers, len(broker.replicas)))
            states = [_has_topic(topic, data.broker_name, answer) for answer, _ in broker_answers]
            # If the master's address is unknown, the broker does not count as down, because its master may be starting at
            # another address.
            down_flags = [
                broker.master is not None and is_new and _is_connection_refused(answer)
                for answer, is_new in broker_answers
            ]
            is_gone = all(state is False or is_down for state, is_down in zip(states, down_flags, strict=True))
            yield True if any(states) else False if broker_answers and is_gone else None

    def refresh(self, topics: Iterable[str], max_age_s: float, deadline: Deadline | None = None) -> frozenset[str]:
        """Fetch the routes that are older than ``max_age_s`` seconds in parallel, 64 at a time. Returns the topics that it
        refreshed.

        If only one route is older, nothing is fetched here, because ``get`` fetches it. ``get`` also fetches the routes whose
        requests failed here.
        """
        oldest_fetch_s = time.monotonic() - max_age_s
        with self._lock:
            due_topics = [
                topic for topic in topics if topic not in self._routes or self._routes[topic][0] < oldest_fetch_s
            ]
        if len(due_topics) < 2:
            return frozenset()
        refreshed_topics: set[str] = set()
        for some_topics in (
            due_topics[first : first + _MAX_PARALLEL_ROUTES]
            for first in range(0, len(due_topics), _MAX_PARALLEL_ROUTES)
        ):
            server, answers = self._name_servers.request_many(
                [self._route_request(topic) for topic in some_topics], deadline
            )
            topic_answers = [
                (topic, answer) for topic, answer in zip(some_topics, answers, strict=True) if answer is not None
            ]
            for topic, answer in topic_answers:
                route = self._with_acting_masters(self._parsed_route(topic, server, answer), deadline)
                self._store(topic, route, _route_bytes(route, answer), answer.peer)
            refreshed_topics.update(topic for topic, _ in topic_answers)
            if not topic_answers:  # the server does not answer
                break
        return frozenset(refreshed_topics)

    def fetch(self, topic: str, deadline: Deadline | None = None) -> TopicRoute:
        """See ``ports.RouteReader``."""
        route, _, peer = self._fetch_with_size(topic, deadline)
        self._advertise(route.brokers, peer)
        return route

    def _fetch_with_size(self, topic: str, deadline: Deadline | None) -> tuple[TopicRoute, int, Peer]:
        try:
            server, answer = self._name_servers.request_with_address(lambda: self._route_request(topic), deadline)
        except TopicNotFound as e:
            self.forget(topic)
            server = "Proxy" if self.is_proxy(e.addr) else "name server"
            message = (
                names.read_problem(topic, self.scope)
                or f"the {server} knows no such topic, or all its brokers are down"
            )
            remedy = None
            if e.silent_name_servers:
                message += f", and {', '.join(e.silent_name_servers)} did not answer and may know it"
                remedy = _SILENT_SERVERS_REMEDY
            raise RouteNotFound(message, e.addr, e.broker_code, topic, remedy=remedy) from e
        route = self._with_acting_masters(self._parsed_route(topic, server, answer), deadline)
        return route, _route_bytes(route, answer), answer.peer

    def is_proxy(self, address: str | None) -> bool:
        """Whether the name server at this address is a Proxy."""
        return address is not None and self._name_servers.rpc_client.pool.is_proxy(address)

    def _parsed_route(self, topic: str, server: str, answer: Command) -> TopicRoute:
        route = bodies.route(topic, answer.body)
        return replace(route, brokers=self._reachable_brokers(route.brokers, server))

    def _reachable_brokers(self, brokers: Mapping[str, BrokerData], server: str) -> dict[str, BrokerData]:
        """Return the brokers of an answer with the addresses to connect to."""
        if not self._name_servers.rpc_client.pool.connect_options.at_name_server:
            return dict(brokers)
        return {name: replace(data, addresses=dict.fromkeys(data.addresses, server)) for name, data in brokers.items()}

    def _advertise(self, brokers: Mapping[str, BrokerData], peer: Peer) -> None:
        """Pass the brokers' addresses to the pool, so that the pool knows whether a later connection leads to a Proxy."""
        addresses = (address for data in brokers.values() for address in data.addresses.values())
        self._name_servers.rpc_client.pool.advertise(addresses, peer)

    def _with_acting_masters(self, route: TopicRoute, deadline: Deadline | None) -> TopicRoute:
        """Return the route with ``has_acting_master`` corrected. A master in the route is an acting master if the list of all
        brokers has another address for the master with this broker name.

        A route does not distinguish an acting master from the master of a topic that is not writable. If the list cannot be
        fetched now, brokers that look like acting masters count as acting masters. If servers cannot list brokers, no broker
        counts as an acting master.
        """
        possible_acting_masters = [data for data in route.brokers.values() if data.has_acting_master]
        if not possible_acting_masters:
            return route
        try:
            masters = {name: data.master for name, data in self.cluster(deadline).items()}
        except RocketMQError as e:
            masters = {} if e.retriable else {data.broker_name: data.master for data in possible_acting_masters}
        corrected_brokers = {
            data.broker_name: replace(data, has_acting_master=masters.get(data.broker_name) != data.master)
            for data in possible_acting_masters
        }
        return replace(route, brokers={**route.brokers, **corrected_brokers})

    def _route_request(self, topic: str) -> Command:
        return route_request(self.name_on_wire(topic))

    def forget(self, topic: str) -> None:
        """Remove the route of a topic. Keeps the addresses of its brokers, because a name server that has just started may not
        know these brokers yet.
        """
        with self._lock:
            if topic in self._routes:
                now = time.monotonic()
                self._forgotten_routes[topic], self._forgotten_at_s[topic] = self._routes.pop(topic), now
                while (
                    len(self._forgotten_routes) > _MAX_FORGOTTEN_ROUTES
                    and self._forgotten_at_s[oldest_topic := next(iter(self._forgotten_routes))] <= now - MAX_UNLISTED_S
                ):
                    self._discard_forgotten_locked(oldest_topic)
                self._brokers_by_name = None

    @property
    def cached_bytes(self) -> int:
        """The bytes of all cached routes, of brokers that are missing in newer routes, and of the list of all brokers."""
        return self._cached_bytes

    def forget_all(self, idle_at_s: float | None = None, max_address_bytes: int = _MAX_ADDRESS_BYTES) -> None:
        """Forget all routes. With a time ``idle_at_s``, does nothing if the cache was used in the ``_IDLE_TIMEOUT_S`` seconds
        before that time. Keeps up to ``max_address_bytes`` bytes of broker addresses, and a few routes with numbered queues, so
        that the next routes can be compared with them.
        """
        with self._lock:
            if idle_at_s is not None and idle_at_s - self._last_used_s < _IDLE_TIMEOUT_S:
                return
            newest_brokers = {**self._cluster_brokers, **_newest_brokers(self._routes, self._forgotten_routes)}
            all_routes = {**self._forgotten_routes, **self._routes}
            numbered_routes = {
                topic: all_routes[topic] for topic in sorted(self._numbered_topics) if topic in all_routes
            }
            address_bytes = _broker_bytes(newest_brokers.values())
            self._cluster_brokers, address_bytes = (
                (newest_brokers, address_bytes) if address_bytes <= max_address_bytes else ({}, 0)
            )
            self._routes, self._forgotten_routes, self._unlisted_brokers = {}, {}, {}
            self._brokers_by_name, self._bytes_by_key, self._cached_bytes = None, {}, 0
            self._set_size_locked(_CLUSTER_KEY, address_bytes)
            for topic, (fetched_s, route) in numbered_routes.items():
                broker_bytes = _broker_bytes(route.brokers.values())
                if self._cached_bytes - address_bytes + broker_bytes <= _MAX_ADDRESS_BYTES:
                    self._forgotten_routes[topic] = fetched_s, replace(route)  # the copy has no cached lists of queues
                    self._set_size_locked(topic, broker_bytes)
            self._numbered_topics = {*self._forgotten_routes}
            self._forgotten_at_s = dict.fromkeys(self._forgotten_routes, self._last_used_s)

    def _discard_forgotten_locked(self, topic: str) -> None:
        """Discard a forgotten route."""
        del self._forgotten_routes[topic], self._forgotten_at_s[topic]
        self._unlisted_brokers.pop(topic, None)
        self._numbered_topics.discard(topic)
        self._set_size_locked(topic, 0)

    def cached_topics(self) -> list[str]:
        with self._lock:
            return sorted(self._routes)

    def cached_topic_brokers(self) -> set[tuple[str, str]]:
        """Pairs of topic and broker name, from the cached routes."""
        with self._lock:
            return {
                (topic, queue_data.broker_name)
                for topic, (_, route) in self._routes.items()
                for queue_data in route.queues
            }

    def address(self, broker_name: str, read_from: str = "master") -> str:
        """The address of a broker's master, or of the replica that ``read_from`` selects, from the newest route with the broker.

        Raises ``BrokerNotFound``.
        """
        data = self.broker(broker_name)
        address = data.replica(read_from) if data is not None else None
        if not address:
            raise BrokerNotFound(
                f"no address of broker {broker_name!r} is known: its master is down or it left the cluster",
                remedy="Start it with its data. To list the brokers: rocketmq-spark cluster",
            )
        return address

    def broker(self, broker_name: str) -> BrokerData | None:
        """A broker's data, from the newest route that has the broker, or else from the last list of all brokers."""
        self._last_used_s = time.monotonic()
        brokers = self._brokers_by_name
        if brokers is None:
            with self._lock:
                brokers = self._brokers_by_name = _newest_brokers(self._routes, self._forgotten_routes)
        return brokers.get(broker_name) or self._cluster_brokers.get(broker_name)

    def masters(self) -> dict[str, str]:
        """The addresses of all masters in the cached routes, by broker name."""
        return {data.broker_name: data.master for data in self.brokers() if data.master}

    def brokers(self) -> list[BrokerData]:
        """All brokers of the cached routes, sorted by name."""
        with self._lock:
            newest_brokers = _newest_brokers(self._routes)
        return [data for _, data in sorted(newest_brokers.items())]

    def topics(self, deadline: Deadline | None = None) -> list[str]:
        """See ``ports.RouteReader``. With a namespace or environment, returns only its topics, as users name them.

        Leaves out a topic whose short name would resolve to another topic.
        """
        answer = self._name_servers.request(rpc.GET_ALL_TOPIC_LIST_FROM_NAMESERVER.request, deadline)
        scope = self._name_servers.rpc_client.scope
        return sorted(scope.user_name(topic) for topic in bodies.topic_list(answer.body) if scope.contains(topic))

    def cluster(self, deadline: Deadline | None = None) -> dict[str, BrokerData]:
        """See ``ports.RouteReader``."""
        server, answer = self._name_servers.request_with_address(rpc.GET_BROKER_CLUSTER_INFO.request, deadline)
        brokers = self._reachable_brokers(bodies.cluster(answer.body).brokers, server)
        size = _broker_bytes(brokers.values())
        has_room = _make_room(self, size - self._bytes_by_key.get(_CLUSTER_KEY, 0))
        with self._lock:
            self._check_room_locked(_CLUSTER_KEY, size, has_room)
            self._set_size_locked(_CLUSTER_KEY, size)
            self._cluster_brokers = brokers
        self._advertise(brokers, answer.peer)
        return dict(brokers)

    def has_broker(self) -> bool:
        """Whether a broker is registered. True at a Proxy, which cannot list brokers."""
        try:
            return bool(self.cluster())
        except NotSupported:
            return True

    def has_master(self) -> bool:
        """Whether a master is registered. True at a Proxy, which cannot list brokers."""
        try:
            return any(broker.master is not None for broker in self.cluster().values())
        except NotSupported:
            return True

    def get_existing(self, topic: str, max_age_s: float = 30.0) -> TopicRoute:
        """Return a route as ``get`` does, for callers that do not create the topic. ``RouteNotFound`` names similar topics."""
        try:
            return self.get(topic, max_age_s)
        except RouteNotFound as e:
            raise _with_similar_topics(self, e, "All names: rocketmq-spark topic list") from e

    def with_similar_topics(self, error: RouteNotFound) -> RouteNotFound:
        """See ``ports.RouteReader``. The error also has the command that creates the topic."""
        return _with_similar_topics(
            self, error, f"Create it with Admin.create_topic, or with: rocketmq-spark topic create {error.topic}"
        )


_all_routes: LiveObjects[Routes] = LiveObjects()


def _make_room(requester: Routes, growth_bytes: int) -> bool:
    """Make room for ``growth_bytes`` bytes of a client within the limits of the process. If there is no room, other clients
    forget their routes, beginning with the clients with the most bytes. Returns False if there is still no room, or if the
    requester itself would have to forget its routes.
    """
    all_routes, now = _all_routes.all(), time.monotonic()
    needed_bytes = max(0, growth_bytes)  # a smaller route always fits
    # If there are very many clients, each keeps fewer addresses, to leave room for routes.
    max_address_bytes = min(_MAX_ADDRESS_BYTES, _MAX_PROCESS_BYTES // 4 // max(1, len(all_routes)))
    if _total_bytes(all_routes) + needed_bytes > _MAX_IDLE_BYTES:
        for routes in all_routes:
            routes.forget_all(now, max_address_bytes)
    if not needed_bytes or _total_bytes(all_routes) + needed_bytes <= _MAX_PROCESS_BYTES:
        return True
    excess_bytes = _total_bytes(all_routes) + needed_bytes - _MAX_PROCESS_BYTES
    for cached_bytes, other_routes in sorted(
        ((routes.cached_bytes, routes) for routes in all_routes), key=operator.itemgetter(0), reverse=True
    ):
        if excess_bytes <= 0 or cached_bytes <= requester.cached_bytes + needed_bytes:
            break
        other_routes.forget_all(max_address_bytes=max_address_bytes)
        excess_bytes -= cached_bytes - other_routes.cached_bytes
    return excess_bytes <= 0


def _total_bytes(all_routes: Iterable[Routes]) -> int:
    return sum(routes.cached_bytes for routes in all_routes)


def _with_similar_topics(routes: Routes, error: RouteNotFound, remedy: str) -> RouteNotFound:
    similar_topics: list[str] = []
    is_legal = names.read_problem(error.topic or "", routes.scope) is None
    if not is_legal:
        remedy = ""  # the error's message says what a legal name is
    elif routes.is_proxy(error.addr):
        remedy += " (at the brokers' name server: a Proxy does not forward this)"
    try:
        if is_legal and not routes.has_broker():
            remedy = "No broker is registered: start one, or look into the logs of those that should be there"
        existing_topics = [topic for topic in routes.topics() if names.is_user_topic(topic) and topic != error.topic]
        similar_topics = similar_names(error.topic or "", existing_topics, 3, 0.5)
    except RocketMQError:
        pass
    hint = f"Did you mean {', '.join(similar_topics)}? " if similar_topics else ""
    remedy = (hint + (error.remedy or remedy)).rstrip()
    return RouteNotFound(error.message, error.addr, error.broker_code, error.topic, remedy=remedy or None)


def _newest_brokers(*tables: Mapping[str, tuple[float, TopicRoute]]) -> dict[str, BrokerData]:
    """Each broker's data from the newest route with the broker. If several of ``tables`` have the broker, the first of them
    counts.
    """
    newest_brokers: dict[str, BrokerData] = {}
    for routes in tables:
        for _, route in sorted(routes.values(), key=operator.itemgetter(0), reverse=True):
            for name, data in route.brokers.items():
                newest_brokers.setdefault(name, data)
    return newest_brokers


def format_queue_counts(queues: Mapping[str, QueueData]) -> str:
    """Describe how many queues a topic has, as in ``8 on broker-a, 8 (4 for writing) on broker-b``."""
    return ", ".join(
        f"{data.read_queues}{'' if data.read_queues == data.write_queues else f' ({data.write_queues} for writing)'} on {name}"
        for name, data in sorted(queues.items())
    )


def require_brokers(cluster: dict[str, BrokerData]) -> dict[str, BrokerData]:
    """Return ``cluster``. Raises ``BrokerNotFound`` if ``cluster`` is empty, because without brokers every topic and every
    group seems to be missing.
    """
    if not cluster:
        remedy = "Start a broker, or look into the logs of the brokers that should be registered"
        raise BrokerNotFound("no broker is registered", remedy=remedy)
    return cluster


def masters_of(cluster: Mapping[str, BrokerData], brokers: Sequence[str] | None = None) -> dict[str, str]:
    """Return the masters' addresses of ``brokers`` (default: all). Raises ``BrokerNotFound`` if a master is not registered."""
    broker_names = sorted(cluster) if brokers is None else list(brokers)
    masters = {name: cluster[name].master for name in broker_names if name in cluster}
    missing_masters = [name for name in broker_names if not masters.get(name)] if broker_names else ["any"]
    if missing_masters:
        raise BrokerNotFound(
            f"no master of {', '.join(missing_masters)} is registered",
            remedy=f"Known brokers: {', '.join(sorted(cluster)) or 'none'}",
        )
    return {name: address for name, address in masters.items() if address}
