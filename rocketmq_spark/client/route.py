"""The list of name servers (``NameServers``), and the routes that they return, cached by topic (``Routes``)."""

from __future__ import annotations

import bisect
import itertools
import logging
import math
import operator
import random
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from rocketmq_spark.base.arguments import nearest
from rocketmq_spark.base.clock import Deadline, backoff
from rocketmq_spark.base.codes import AUTO_CREATE_TOPIC, MAX_QUEUES, Response
from rocketmq_spark.base.process import Living
from rocketmq_spark.client.calls import RpcClient, error_from_response
from rocketmq_spark.errors import (
    BrokerNotFound,
    CallTimeout,
    ConnectionLost,
    NotSupported,
    OptionError,
    RemoteProtocolError,
    RocketMQError,
    RouteNotFound,
    ServerFault,
    TopicNotFound,
)
from rocketmq_spark.model import BrokerData, MessageQueue, QueueData, TopicRoute
from rocketmq_spark.options.names import of_kafka_port
from rocketmq_spark.wire import bodies, names, rpc
from rocketmq_spark.wire.header import Command, Peer

logger = logging.getLogger(__name__)

ROUTE_AGE_S = 30.0
# Brokers register every 30 s by default (``registerNameServerPeriod``), at the latest every 60 s. A broker that no name server
# lists for longer has left the cluster. This is less than the default of ``sendTimeout``, so that a write outlasts a broker that
# hangs.
UNLISTED_S = 90.0

_NAME_SERVER_REMEDY = "Check option 'nameServer' and that the name server runs"
_SILENT_SERVERS_REMEDY = "Start the name servers that do not answer, or remove them from option 'nameServer'"
_TIMEOUT_REMEDY = "Allow more time, or check that the name server runs and has this address"


class NameServers:
    """The list of name servers: one is used as long as it answers, then the next."""

    def __init__(self, calls: RpcClient, addresses: Sequence[str], rng: random.Random | None = None) -> None:
        self.addresses = tuple(address.strip() for address in addresses if address.strip())
        if not self.addresses:
            raise OptionError("no name server is given", remedy="Set option 'nameServer' to host:port")
        self.calls = calls
        calls.pool.note_name_servers(self.addresses)
        self._current = (rng or random.Random()).randrange(len(self.addresses))

    def ask(self, make: Callable[[], Command], deadline: Deadline | None = None) -> Command:
        return self.ask_at(make, deadline)[1]

    def ask_at(self, make: Callable[[], Command], deadline: Deadline | None = None) -> tuple[str, Command]:
        """Ask the servers in turn. Returns the first answer and the address of its server.

        Each server has the time of one request, and at most its share of the time that is left. Servers do not know of each
        other, so the others are also asked for a topic that one server does not have. If none answers, raises the last error,
        with all addresses. Raises ``OptionError`` if all of them are brokers.
        """
        first = self._current
        unknown: TopicNotFound | None = None
        last: RocketMQError | None = None
        silent: list[str] = []
        wrong: OptionError | None = None
        for i in range(len(self.addresses)):
            at = (first + i) % len(self.addresses)
            try:
                answer = self._answered(self.addresses[at], make, self._share(deadline, len(self.addresses) - i))
            except TopicNotFound as e:
                unknown = unknown or e
            except (ConnectionLost, CallTimeout, RemoteProtocolError) as e:
                last = e
                silent.append(self.addresses[at])
            except NotSupported:
                if self.calls.pool.is_proxy(self.addresses[at]):
                    raise
                if self.routes_at(self.addresses[at], deadline):
                    # The answer about the route has shown whether the server is a Proxy, and the next error names this cause.
                    return self.addresses[at], self.calls.ask(self.addresses[at], make(), self._share(deadline))
                wrong = _error_for_broker_address(self.addresses[at])
            else:
                self._current = at
                return self.addresses[at], answer
        if unknown is not None:
            unknown.silent = silent
            raise unknown
        if last is None:
            assert wrong is not None
            raise wrong
        if deadline is not None and deadline.expired and isinstance(last, CallTimeout):
            remedy = of_kafka_port(self.addresses) or _TIMEOUT_REMEDY
            raise CallTimeout("no name server answered in time", ";".join(self.addresses), remedy=remedy) from last
        raise type(last)(
            f"no name server answers: {last.message}",
            ";".join(self.addresses),
            remedy=of_kafka_port(self.addresses) or last.remedy or _NAME_SERVER_REMEDY,
        ) from last

    def _answered(self, address: str, make: Callable[[], Command], deadline: Deadline | None) -> Command:
        """Ask once more after a fault: encoding a route that changes at that moment fails (ConcurrentModificationException)."""
        try:
            return self.calls.ask(address, make(), deadline)
        except ServerFault:
            return self.calls.ask(address, make(), deadline)

    def routes_at(self, address: str, deadline: Deadline | None = None) -> bool:
        """Whether the server at this address answers requests for routes: a name server or a Proxy does, a broker does not."""
        try:
            self.calls.ask(address, route_request(AUTO_CREATE_TOPIC), self._share(deadline))
        except NotSupported:
            return False
        except RocketMQError:
            pass
        return True

    def ask_many(
        self, commands: Sequence[Command], deadline: Deadline | None = None
    ) -> tuple[str, list[Command | None]]:
        """Send several requests to the current server at once. Returns its address and the answers.

        An answer is None if the request failed; ``ask`` can then try the other servers.
        """
        deadline = deadline or Deadline.after(self.calls.request_timeout_s)
        server = self.addresses[self._current]
        answers = self.calls.exchange_each([(server, command) for command in commands], deadline)
        return server, [a if not isinstance(a, RocketMQError) and a.code == Response.SUCCESS else None for a in answers]

    def ask_each(self, make: Callable[[], Command], deadline: Deadline | None = None) -> None:
        """Ask every server at once, because they do not know of each other; raises the first error when all have answered."""
        limit = self._share(deadline) or Deadline.after(self.calls.request_timeout_s)
        answers = self.calls.exchange_each([(address, make()) for address in self.addresses], limit)
        for address, answer in zip(self.addresses, answers, strict=True):
            if isinstance(answer, RocketMQError):
                raise answer
            if answer.code != Response.SUCCESS:
                raise error_from_response(answer, address)

    def _share(self, deadline: Deadline | None, servers: int = 1) -> Deadline | None:
        """For one of ``servers`` that are still to be asked."""
        if deadline is None:
            return None
        return deadline.within(min(self.calls.request_timeout_s, deadline.remaining() / servers))


# Routes of deleted topics that are remembered for the addresses in them: all of the last ``UNLISTED_S`` seconds, because a name
# server that has just started knows no topic, and the newest of those before.
_MAX_FORGOTTEN = 64
# Bytes of the answers whose routes are kept: in memory they take about seven times as much. 10,000 topics on 30 brokers each have
# 75 MiB. A queue counts, too: 200 bytes may announce 200,000, each of which becomes an object. A million of them fill this.
# Routes are asked for in parts, because all answers of a part are held.
_MAX_BYTES, _MAX_PARALLEL, _MAX_SHOWN_CHARACTERS = 128 << 20, 64, 127
_QUEUE_BYTES = 128


# The routes of all clients of a process are limited, too: each set of options has a client, which stays. Above the first number
# of bytes, clients without calls for ``_IDLE_S`` forget their routes. Above the second, those with most do.
_IDLE_S, _MAX_IDLE_BYTES, _MAX_PROCESS_BYTES = 100.0, 16 << 20, 2 * _MAX_BYTES
# What a client keeps then, in bytes: addresses of brokers, for which a consumer that pauses asks first; and as many bytes of
# routes whose queues have numbers, which must not change unnoticed.
_MAX_ADDRESS_BYTES = 1 << 16
_CLUSTER_KEY = ""  # no topic: the list of all brokers in the account of what is held


def _has_topic(topic: str, broker_name: str, answer: Command | RocketMQError) -> bool | None:
    """Whether a broker that name servers do not list has queues of the topic, by the ``answer`` of a replica; None if that does
    not say.
    """
    if isinstance(answer, RocketMQError):
        return None
    if answer.code == Response.TOPIC_NOT_EXIST:
        return False
    if answer.code != Response.SUCCESS:
        return True
    try:
        names_there = {queue.broker_name for queue in bodies.topic_stats(topic, answer.body)}
    except RemoteProtocolError:
        return True
    return not names_there or broker_name in names_there


def _is_connection_refused(answer: Command | RocketMQError) -> bool:
    """Whether nothing listens at an address."""
    return isinstance(answer, RocketMQError) and isinstance(answer.__cause__, ConnectionRefusedError)


# What newer routes of a topic lack of older ones, by broker, and since when.
_Unlisted = dict[str, tuple[float, QueueData, BrokerData]]


def _queue_count(data: QueueData) -> int:
    return max(data.read_queues, data.write_queues)


def _route_bytes(route: TopicRoute, answer: Command) -> int:
    return len(answer.body) + _QUEUE_BYTES * sum(map(_queue_count, route.queues))


def _broker_bytes(brokers: Iterable[BrokerData]) -> int:
    texts = [text for data in brokers for text in (data.broker_name, data.cluster, *data.addresses.values())]
    return sum(map(len, texts)) + _QUEUE_BYTES * len(texts)


def _unlisted_bytes(unlisted: _Unlisted) -> int:
    queues = sum(_queue_count(data) for _, data, _ in unlisted.values())
    return _broker_bytes(broker for _, _, broker in unlisted.values()) + _QUEUE_BYTES * queues


class Routes:
    """Caches routes by topic, with their age. Implements ``ports.RouteReader``, whose docstrings also hold here.

    Thread-safe. The lock is not held while a server is asked: threads that need the same topic at the same time each ask for it,
    and the last answer is kept.
    """

    def __init__(self, name_servers: NameServers) -> None:
        self._name_servers = name_servers
        self.on_wire, self.scope = name_servers.calls.on_wire, name_servers.calls.scope
        self.recent_s = ROUTE_AGE_S
        self._lock = threading.Lock()
        self._routes: dict[str, tuple[float, TopicRoute]] = {}
        self._gone: dict[str, tuple[float, TopicRoute]] = {}  # the last that was forgotten is the last
        self._gone_at: dict[str, float] = {}
        self._unlisted_brokers: dict[str, _Unlisted] = {}
        self._numbered: set[str] = set()  # kept topics, of which somebody asked what is ``unlisted``
        self._sizes: dict[str, int] = {}  # of all this, by topic, and of the list of all brokers
        self._held_bytes = 0  # their sum: see ``_weigh_locked``
        self._brokers: dict[str, BrokerData] | None = None  # by name, as routes say now: each pull asks for one
        self._listed: dict[str, BrokerData] = {}  # of the last list of all brokers; for those that no route names
        self._used_at = time.monotonic()
        _all_routes.add(self)

    def get(self, topic: str, max_age_s: float = 30.0, deadline: Deadline | None = None) -> TopicRoute:
        """See ``ports.RouteReader``. Also raises ``ConnectionLost`` or ``CallTimeout`` if no name server answers, and
        ``RemoteProtocolError`` if the cache is full.
        """
        self._used_at = time.monotonic()
        with self._lock:
            known = self._routes.get(topic)
        if known is not None and time.monotonic() - known[0] < max_age_s:
            return known[1]
        return self._keep(topic, *self._fetched(topic, deadline))

    def recent(self, topic: str, deadline: Deadline, refresh: bool = False) -> TopicRoute:
        """Returns a route of the last 30 s (``recent_s``). If no name server answers, returns an older one from the cache, unless
        ``refresh`` demands a new one.

        With a cached route, name servers get half of the deadline, so that the caller can still use the route.
        """
        old = not refresh and topic in self.known()
        soon = deadline.within(deadline.remaining() / 2) if old else deadline
        try:
            return self.get(topic, 0.0 if refresh else self.recent_s, soon)
        except (ConnectionLost, CallTimeout) as e:
            if refresh or topic not in self.known():
                raise
            logger.info("could not refresh the route of %s, using the cached one: %s", topic, e)
            return self.get(topic, math.inf, deadline)

    def _keep(self, topic: str, route: TopicRoute, size: int, peer: Peer) -> TopicRoute:
        """Keep a route of this ``size``. A name server decides how many topics there are, and what a route has."""
        self._used_at = time.monotonic()
        with self._lock:
            growth = size + _unlisted_bytes(self._unlisted_after_locked(topic, route)) - self._sizes.get(topic, 0)
        has_room = _make_room(self, growth)
        with self._lock:
            unlisted = self._unlisted_after_locked(topic, route)
            size += _unlisted_bytes(unlisted)
            self._check_room_locked(topic, size, has_room)
            known = self._routes.get(topic)  # of another thread, perhaps, that asked at the same time
            if known is not None and known[1] == route:
                route = known[1]
            self._gone.pop(topic, None)
            self._gone_at.pop(topic, None)
            self._routes[topic] = (time.monotonic(), route)
            self._unlisted_brokers.pop(topic, None)
            if unlisted:
                self._unlisted_brokers[topic] = unlisted
            self._weigh_locked(topic, size)
            self._brokers = None
        self._advertise(route.brokers, peer)
        return route

    def _weigh_locked(self, what: str, size: int) -> None:
        """Note the size of all that is kept of a topic, or of the list of all brokers."""
        self._held_bytes += size - self._sizes.pop(what, 0)
        if size:
            self._sizes[what] = size

    def _check_room_locked(self, what: str, size: int, in_process: bool) -> None:
        """Raise ``RemoteProtocolError`` if there is no room for so many bytes of a topic, or of the list of all brokers.
        ``in_process``: the process has room. Deleted topics are forgotten for it.
        """
        others = self._held_bytes - self._sizes.get(what, 0)
        shown = f"that of {what[:_MAX_SHOWN_CHARACTERS]}" if what else "the list of all brokers"
        if not in_process:
            raise RemoteProtocolError(
                f"the routes of all clients of this process have {_MAX_PROCESS_BYTES} bytes, {_QUEUE_BYTES} for each queue "
                f"included, and with {shown} this client would have {others + size}, more than its share",
                topic=what[:_MAX_SHOWN_CHARACTERS] or None,
                remedy="Read fewer topics in one process, or use the same connection options for all",
            )
        while others + size > _MAX_BYTES and (gone := next((one for one in self._gone if one != what), None)):
            self._forget_gone_locked(gone)
            others = self._held_bytes - self._sizes.get(what, 0)
        if others + size > _MAX_BYTES:
            raise RemoteProtocolError(
                f"the routes of {len(self._routes)} topics have {others} bytes, {_QUEUE_BYTES} for each queue included, and "
                f"with {shown} more than {_MAX_BYTES}, the most that is kept",
                topic=what[:_MAX_SHOWN_CHARACTERS] or None,
                remedy="Read fewer topics in one process: a narrower 'subscribePattern'. If the topics have few brokers, "
                "look at what the name server answers: rocketmq-spark topic describe",
            )

    def _unlisted_after_locked(self, topic: str, route: TopicRoute) -> _Unlisted:
        """What a new route lacks of earlier ones: the newest brokers, no more than a route may have."""
        before, now = self._routes.get(topic) or self._gone.get(topic), time.monotonic()
        unlisted = self._unlisted_brokers.get(topic, {})
        if before is not None and before[1] is not route:
            brokers = before[1].brokers
            known = {data.broker_name: data for data in before[1].queues if data.broker_name in brokers}
            unlisted = {**{name: (now, data, brokers[name]) for name, data in known.items()}, **unlisted}
        listed = {data.broker_name for data in route.queues}
        noted = [(name, of) for name, of in unlisted.items() if name not in listed and now - of[0] < UNLISTED_S]
        noted.sort(key=lambda one: one[1][0], reverse=True)
        queues = list(itertools.accumulate(_queue_count(data) for _, (_, data, _) in noted))
        return dict(noted[: min(bodies.MAX_ROUTE_BROKERS, bisect.bisect_right(queues, MAX_QUEUES))])

    def unlisted(self, topic: str, deadline: Deadline) -> list[MessageQueue]:
        """See ``ports.RouteReader``. A broker has left if its addresses refuse connections, if it does not know the topic, or if
        a broker with another name answers there. It is there if one of its replicas has the topic. A broker that gives no clear
        answer is asked again until ``deadline``, and then counts as one that is there. Proxies are left out.
        """
        with self._lock:
            unlisted, now = dict(self._unlisted_brokers.get(topic, {})), time.monotonic()
            if topic in self._routes:
                self._numbered.add(topic)
        unclear = [
            (data, broker)
            for since, data, broker in unlisted.values()
            if now - since < UNLISTED_S and not any(map(self.is_proxy, broker.addresses.values()))
        ]
        there: list[QueueData] = []
        pauses = backoff(0.05, 0.5)
        while unclear:
            states = list(self._look_for(topic, unclear, deadline))
            there += [data for (data, _), state in zip(unclear, states, strict=True) if state]
            unclear = [one for one, state in zip(unclear, states, strict=True) if state is None]
            if unclear and deadline.expired:
                there += [data for data, _ in unclear]
                break
            if unclear:
                deadline.pause(next(pauses))
        return TopicRoute(topic, tuple(there), {}).numbered()

    def _look_for(
        self, topic: str, brokers: Sequence[tuple[QueueData, BrokerData]], deadline: Deadline
    ) -> Iterator[bool | None]:
        """Whether each of the brokers has queues of the topic, by one question to each replica; None if that is not clear."""
        calls = self._name_servers.calls
        asked = [(data.broker_name, address) for data, broker in brokers for address in broker.replicas]
        attempts = [calls.pool.attempts(address) for _, address in asked]
        on_wire = self.on_wire(topic)
        answers = calls.exchange_each(
            [(address, rpc.GET_TOPIC_STATS_INFO.request(topic=on_wire, bname=name)) for name, address in asked],
            deadline,
        )
        # An address that rests returns the error of an earlier attempt, which says nothing about now.
        fresh = [calls.pool.attempts(address) != before for (_, address), before in zip(asked, attempts, strict=True)]
        of_replicas = zip(answers, fresh, strict=True)
        for data, broker in brokers:
            own = list(itertools.islice(of_replicas, len(broker.replicas)))
            states = [_has_topic(topic, data.broker_name, answer) for answer, _ in own]
            # A master without an address may be starting where nobody has looked.
            is_down = [
                broker.master is not None and is_new and _is_connection_refused(answer) for answer, is_new in own
            ]
            is_gone = all(state is False or down for state, down in zip(states, is_down, strict=True))
            yield True if any(states) else False if own and is_gone else None

    def refresh(self, topics: Iterable[str], max_age_s: float, deadline: Deadline | None = None) -> frozenset[str]:
        """Fetch the routes older than ``max_age_s`` seconds with parallel requests, 64 at a time; returns the topics whose routes
        came.

        Fetches nothing if only one is older. That one, and all that failed, are left to ``get``.
        """
        oldest = time.monotonic() - max_age_s
        with self._lock:
            due = [topic for topic in topics if topic not in self._routes or self._routes[topic][0] < oldest]
        if len(due) < 2:
            return frozenset()
        fresh: set[str] = set()
        for part in (due[at : at + _MAX_PARALLEL] for at in range(0, len(due), _MAX_PARALLEL)):
            server, answers = self._name_servers.ask_many([self._question(topic) for topic in part], deadline)
            came = [(topic, answer) for topic, answer in zip(part, answers, strict=True) if answer is not None]
            for topic, answer in came:
                route = self._settled(self._route(topic, server, answer), deadline)
                self._keep(topic, route, _route_bytes(route, answer), answer.peer)
            fresh.update(topic for topic, _ in came)
            if not came:  # the server does not answer
                break
        return frozenset(fresh)

    def fetch(self, topic: str, deadline: Deadline | None = None) -> TopicRoute:
        """See ``ports.RouteReader``."""
        route, _, peer = self._fetched(topic, deadline)
        self._advertise(route.brokers, peer)
        return route

    def _fetched(self, topic: str, deadline: Deadline | None) -> tuple[TopicRoute, int, Peer]:
        try:
            server, answer = self._name_servers.ask_at(lambda: self._question(topic), deadline)
        except TopicNotFound as e:
            self.forget(topic)
            server = "Proxy" if self.is_proxy(e.addr) else "name server"
            why = (
                names.read_problem(topic, self.scope)
                or f"the {server} knows no such topic, or all its brokers are down"
            )
            remedy = None
            if e.silent:
                why += f", and {', '.join(e.silent)} did not answer and may know it"
                remedy = _SILENT_SERVERS_REMEDY
            raise RouteNotFound(why, e.addr, e.broker_code, topic, remedy=remedy) from e
        route = self._settled(self._route(topic, server, answer), deadline)
        return route, _route_bytes(route, answer), answer.peer

    def is_proxy(self, address: str | None) -> bool:
        """Whether the name server at this address is a Proxy."""
        return address is not None and self._name_servers.calls.pool.is_proxy(address)

    def _route(self, topic: str, server: str, answer: Command) -> TopicRoute:
        route = bodies.route(topic, answer.body)
        return replace(route, brokers=self._reachable(route.brokers, server))

    def _reachable(self, brokers: Mapping[str, BrokerData], server: str) -> dict[str, BrokerData]:
        """Return the brokers of an answer with the addresses to connect to."""
        if not self._name_servers.calls.pool.dialling.at_name_server:
            return dict(brokers)
        return {name: replace(data, addresses=dict.fromkeys(data.addresses, server)) for name, data in brokers.items()}

    def _advertise(self, brokers: Mapping[str, BrokerData], peer: Peer) -> None:
        """Note the addresses in the pool, so that a later connection is known to lead to a Proxy."""
        addresses = (address for data in brokers.values() for address in data.addresses.values())
        self._name_servers.calls.pool.advertise(addresses, peer)

    def _settled(self, route: TopicRoute, deadline: Deadline | None) -> TopicRoute:
        """Returns the route with ``acting`` corrected: a broker is an acting master if the cluster's list names another master.

        The route alone does not distinguish acting masters from masters of a topic that is not writable. If the list cannot be
        had now, all that look like acting masters stay so; if servers cannot list brokers, none does.
        """
        doubted = [data for data in route.brokers.values() if data.acting]
        if not doubted:
            return route
        try:
            masters = {name: data.master for name, data in self.cluster(deadline).items()}
        except RocketMQError as e:
            masters = {} if e.retriable else {data.broker_name: data.master for data in doubted}
        settled = {
            data.broker_name: replace(data, acting=masters.get(data.broker_name) != data.master) for data in doubted
        }
        return replace(route, brokers={**route.brokers, **settled})

    def _question(self, topic: str) -> Command:
        return route_request(self.on_wire(topic))

    def forget(self, topic: str) -> None:
        """Remove the route of a topic. The addresses of its brokers are kept: a name server that has just started may not know
        them yet.
        """
        with self._lock:
            if topic in self._routes:
                now = time.monotonic()
                self._gone[topic], self._gone_at[topic] = self._routes.pop(topic), now
                while (
                    len(self._gone) > _MAX_FORGOTTEN
                    and self._gone_at[oldest := next(iter(self._gone))] <= now - UNLISTED_S
                ):
                    self._forget_gone_locked(oldest)
                self._brokers = None

    @property
    def held_bytes(self) -> int:
        """The size of all that is kept: routes, what newer ones lack, and the list of all brokers."""
        return self._held_bytes

    def forget_all(self, idle_at: float | None = None, most_addresses: int = _MAX_ADDRESS_BYTES) -> None:
        """Forget all routes; with a time ``idle_at`` only if none was asked for in the ``_IDLE_S`` before it. A few brokers stay
        known, with ``most_addresses`` bytes, and a few routes whose queues have numbers, to compare the next ones with.
        """
        with self._lock:
            if idle_at is not None and idle_at - self._used_at < _IDLE_S:
                return
            newest = {**self._listed, **_newest_brokers(self._routes, self._gone)}
            kept = {**self._gone, **self._routes}
            numbered = {topic: kept[topic] for topic in sorted(self._numbered) if topic in kept}
            size = _broker_bytes(newest.values())
            self._listed, size = (newest, size) if size <= most_addresses else ({}, 0)
            self._routes, self._gone, self._unlisted_brokers = {}, {}, {}
            self._brokers, self._sizes, self._held_bytes = None, {}, 0
            self._weigh_locked(_CLUSTER_KEY, size)
            for topic, (at, route) in numbered.items():
                of_brokers = _broker_bytes(route.brokers.values())
                if self._held_bytes - size + of_brokers <= _MAX_ADDRESS_BYTES:
                    self._gone[topic] = at, replace(route)  # without its lists of queues
                    self._weigh_locked(topic, of_brokers)
            self._numbered = {*self._gone}
            self._gone_at = dict.fromkeys(self._gone, self._used_at)

    def _forget_gone_locked(self, topic: str) -> None:
        """Forget a deleted topic."""
        del self._gone[topic], self._gone_at[topic]
        self._unlisted_brokers.pop(topic, None)
        self._numbered.discard(topic)
        self._weigh_locked(topic, 0)

    def known(self) -> list[str]:
        with self._lock:
            return sorted(self._routes)

    def known_brokers(self) -> set[tuple[str, str]]:
        """The topic and the broker's name of all queues in the routes at hand."""
        with self._lock:
            return {(topic, of.broker_name) for topic, (_, route) in self._routes.items() for of in route.queues}

    def address(self, broker_name: str, read_from: str = "master") -> str:
        """A broker's master (``replica`` with another ``read_from``), as the newest route that names it says.

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
        """A broker as the newest route that names it says, or else the last list of all."""
        self._used_at = time.monotonic()
        found = self._brokers
        if found is None:
            with self._lock:
                found = self._brokers = _newest_brokers(self._routes, self._gone)
        return found.get(broker_name) or self._listed.get(broker_name)

    def masters(self) -> dict[str, str]:
        """Broker name to address of all masters in the routes at hand."""
        return {data.broker_name: data.master for data in self.brokers() if data.master}

    def brokers(self) -> list[BrokerData]:
        """All brokers of the routes at hand, by name."""
        with self._lock:
            newest = _newest_brokers(self._routes)
        return [data for _, data in sorted(newest.items())]

    def topics(self, deadline: Deadline | None = None) -> list[str]:
        """See ``ports.RouteReader``. In a namespace or environment only the topics in it, by the user's names.

        A topic whose short name would resolve to another topic is left out.
        """
        answer = self._name_servers.ask(rpc.GET_ALL_TOPIC_LIST_FROM_NAMESERVER.request, deadline)
        scope = self._name_servers.calls.scope
        return sorted(scope.plain(topic) for topic in bodies.topic_list(answer.body) if scope.contains(topic))

    def cluster(self, deadline: Deadline | None = None) -> dict[str, BrokerData]:
        """See ``ports.RouteReader``."""
        server, answer = self._name_servers.ask_at(rpc.GET_BROKER_CLUSTER_INFO.request, deadline)
        listed = self._reachable(bodies.cluster(answer.body).brokers, server)
        size = _broker_bytes(listed.values())
        has_room = _make_room(self, size - self._sizes.get(_CLUSTER_KEY, 0))
        with self._lock:
            self._check_room_locked(_CLUSTER_KEY, size, has_room)
            self._weigh_locked(_CLUSTER_KEY, size)
            self._listed = listed
        self._advertise(listed, answer.peer)
        return dict(listed)

    def any_broker(self) -> bool:
        """Whether a broker is registered; true for a Proxy, which cannot list brokers."""
        try:
            return bool(self.cluster())
        except NotSupported:
            return True

    def any_master(self) -> bool:
        """Whether a master is registered; true for a Proxy, which cannot list brokers."""
        try:
            return any(broker.master is not None for broker in self.cluster().values())
        except NotSupported:
            return True

    def existing(self, topic: str, max_age_s: float = 30.0) -> TopicRoute:
        """``get`` for callers that do not create the topic: ``RouteNotFound`` names the nearest topics."""
        try:
            return self.get(topic, max_age_s)
        except RouteNotFound as e:
            raise _with_similar_topics(self, e, "All names: rocketmq-spark topic list") from e

    def missing_topic(self, error: RouteNotFound) -> RouteNotFound:
        """See ``ports.RouteReader``. The error also has the command that creates the topic."""
        return _with_similar_topics(
            self, error, f"Create it with Admin.create_topic, or with: rocketmq-spark topic create {error.topic}"
        )


_all_routes: Living[Routes] = Living()


def _make_room(asking: Routes, growth: int) -> bool:
    """Make room for ``growth`` bytes of a client in the routes of all clients of this process. Where there is none, the client
    with most forgets its routes, each at most once; return False if that is not enough, or if the asking one would be next.
    """
    everyone, now = _all_routes.all(), time.monotonic()
    wanted = max(0, growth)  # what it has, it may have again
    # What very many clients keep of addresses must leave room.
    most_addresses = min(_MAX_ADDRESS_BYTES, _MAX_PROCESS_BYTES // 4 // max(1, len(everyone)))
    if _total_bytes(everyone) + wanted > _MAX_IDLE_BYTES:
        for one in everyone:
            one.forget_all(now, most_addresses)
    if not wanted or _total_bytes(everyone) + wanted <= _MAX_PROCESS_BYTES:
        return True
    excess = _total_bytes(everyone) + wanted - _MAX_PROCESS_BYTES
    for held, most in sorted(((one.held_bytes, one) for one in everyone), key=operator.itemgetter(0), reverse=True):
        if excess <= 0 or held <= asking.held_bytes + wanted:
            break
        most.forget_all(most_addresses=most_addresses)
        excess -= held - most.held_bytes
    return excess <= 0


def _total_bytes(everyone: Iterable[Routes]) -> int:
    return sum(one.held_bytes for one in everyone)


def _with_similar_topics(routes: Routes, error: RouteNotFound, remedy: str) -> RouteNotFound:
    near: list[str] = []
    is_legal = names.read_problem(error.topic or "", routes.scope) is None
    if not is_legal:
        remedy = ""  # the message has a legal name
    elif routes.is_proxy(error.addr):
        remedy += " (at the brokers' name server: a Proxy does not forward this)"
    try:
        if is_legal and not routes.any_broker():
            remedy = "No broker is registered: start one, or look into the logs of those that should be there"
        existing = [topic for topic in routes.topics() if names.is_user_topic(topic) and topic != error.topic]
        near = nearest(error.topic or "", existing, 3, 0.5)
    except RocketMQError:
        pass
    hint = f"Did you mean {', '.join(near)}? " if near else ""
    remedy = (hint + (error.remedy or remedy)).rstrip()
    return RouteNotFound(error.message, error.addr, error.broker_code, error.topic, remedy=remedy or None)


def route_request(topic_on_wire: str) -> Command:
    return rpc.GET_ROUTEINFO_BY_TOPIC.request(topic=topic_on_wire, acceptStandardJsonOnly=True)


def _error_for_broker_address(address: str) -> OptionError:
    return OptionError(
        f"option 'nameServer' names {address}, which is not a name server: it answers like a broker, and has no routes",
        remedy="Give host and port of the name server, 9876 unless it was changed",
    )


def _newest_brokers(*kept: Mapping[str, tuple[float, TopicRoute]]) -> dict[str, BrokerData]:
    """Each broker as the newest of the routes says that name it, those of the first mapping before all others."""
    found: dict[str, BrokerData] = {}
    for routes in kept:
        for _, route in sorted(routes.values(), key=operator.itemgetter(0), reverse=True):
            for name, data in route.brokers.items():
                found.setdefault(name, data)
    return found


def format_queue_counts(there: Mapping[str, QueueData]) -> str:
    """How many queues a topic has, for messages: ``8 on broker-a, 8 (4 for writing) on broker-b``."""
    return ", ".join(
        f"{data.read_queues}{'' if data.read_queues == data.write_queues else f' ({data.write_queues} for writing)'} on {name}"
        for name, data in sorted(there.items())
    )


def require_brokers(cluster: dict[str, BrokerData]) -> dict[str, BrokerData]:
    """Returns ``cluster``; raises ``BrokerNotFound`` if it is empty, because then a missing topic proves nothing."""
    if not cluster:
        remedy = "Start one, or look into the logs of those that should be there"
        raise BrokerNotFound("no broker is registered", remedy=remedy)
    return cluster


def masters_of(cluster: Mapping[str, BrokerData], brokers: Sequence[str] | None = None) -> dict[str, str]:
    """Addresses of the masters of ``brokers`` (default: all), each of which must be registered."""
    wanted = sorted(cluster) if brokers is None else list(brokers)
    masters = {name: cluster[name].master for name in wanted if name in cluster}
    missing = [name for name in wanted if not masters.get(name)] if wanted else ["any"]
    if missing:
        raise BrokerNotFound(
            f"no master of {', '.join(missing)} is registered",
            remedy=f"Known brokers: {', '.join(sorted(cluster)) or 'none'}",
        )
    return {name: address for name, address in masters.items() if address}
