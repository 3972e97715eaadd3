"""Name servers and the routes they know: asked in turn, kept for a while, asked again on demand."""

from __future__ import annotations

import difflib
import random
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from rocketmq_spark.client.calls import Calls
from rocketmq_spark.clock import Deadline, backoff
from rocketmq_spark.errors import (
    BrokerNotFound,
    CallTimeout,
    ConnectionLost,
    RocketMQError,
    RouteNotFound,
    TopicNotFound,
)
from rocketmq_spark.model import BrokerData, TopicRoute
from rocketmq_spark.wire import bodies, rpc
from rocketmq_spark.wire.header import Command

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Retry:
    """How a metadata question is repeated: ``times`` more tries, pauses that double from ``interval_s``."""

    times: int = 3
    interval_s: float = 0.5

    def run(self, ask: Callable[[], T], deadline: Deadline | None = None) -> T:
        """The first success; the last error when tries or time are over, other than retriable errors at once."""
        pauses = backoff(self.interval_s, 10.0)
        for left in range(self.times, -1, -1):
            try:
                return ask()
            except RocketMQError as e:
                if not e.retriable or left == 0 or (deadline is not None and deadline.expired):
                    raise
                time.sleep(min(next(pauses), deadline.remaining() if deadline else 60.0))
        raise AssertionError("unreachable")


class NameServers:
    """The list of name servers: one is used as long as it answers, then the next."""

    def __init__(self, calls: Calls, addresses: Sequence[str], rng: random.Random | None = None) -> None:
        self.addresses = tuple(addresses)
        self._calls = calls
        self._current = (rng or random.Random()).randrange(len(self.addresses))

    def ask(self, make: Callable[[], Command], deadline: Deadline | None = None) -> Command:
        """The first server's answer that could be had. Raises the last server's error, naming all that were tried."""
        last: RocketMQError | None = None
        for _ in self.addresses:
            try:
                return self._calls.ask(self.addresses[self._current], make(), deadline)
            except (ConnectionLost, CallTimeout) as e:
                last = e
                self._current = (self._current + 1) % len(self.addresses)
        assert last is not None
        raise type(last)(
            f"no name server answers: {last.message}",
            ";".join(self.addresses),
            remedy="Check option 'nameServer' and that the name server runs",
        ) from last

    def ask_each(self, make: Callable[[], Command], deadline: Deadline | None = None) -> None:
        """Ask every server: they do not know of each other."""
        for address in self.addresses:
            self._calls.ask(address, make(), deadline)


class Routes:
    """Routes by topic with their age. Thread-safe; one thread asks for a topic while others may ask for other ones."""

    def __init__(self, name_servers: NameServers) -> None:
        self._name_servers = name_servers
        self._lock = threading.Lock()
        self._routes: dict[str, tuple[float, TopicRoute]] = {}

    def get(self, topic: str, max_age_s: float = 30.0, deadline: Deadline | None = None) -> TopicRoute:
        """The route, at most ``max_age_s`` old. An unchanged route stays the same object. Raises ``RouteNotFound``."""
        with self._lock:
            known = self._routes.get(topic)
        if known is not None and time.monotonic() - known[0] <= max_age_s:
            return known[1]
        route = self.fetch(topic, deadline)
        if known is not None and known[1] == route:
            route = known[1]
        with self._lock:
            self._routes[topic] = (time.monotonic(), route)
        return route

    def fetch(self, topic: str, deadline: Deadline | None = None) -> TopicRoute:
        """Ask the name server now."""
        try:
            answer = self._name_servers.ask(
                lambda: rpc.GET_ROUTEINFO_BY_TOPIC.request(topic=topic, acceptStandardJsonOnly=True), deadline
            )
        except TopicNotFound as e:
            self.forget(topic)
            raise RouteNotFound(
                "the name server knows no such topic, or all its brokers are down", e.addr, e.broker_code, topic
            ) from e
        return bodies.route(topic, answer.body)

    def forget(self, topic: str) -> None:
        with self._lock:
            self._routes.pop(topic, None)

    def known(self) -> list[str]:
        with self._lock:
            return sorted(self._routes)

    def address(self, broker_name: str) -> str:
        """The master of a broker, from the routes at hand. Raises ``BrokerNotFound``."""
        with self._lock:
            routes = [route for _, route in self._routes.values()]
        for route in routes:
            data = route.brokers.get(broker_name)
            if data is not None and data.master:
                return data.master
        raise BrokerNotFound(
            f"no address of broker {broker_name!r} is known: its master is down or it left the cluster"
        )

    def masters(self) -> list[str]:
        """Addresses of all masters in the routes at hand."""
        with self._lock:
            routes = [route for _, route in self._routes.values()]
        return sorted({data.master for route in routes for data in route.brokers.values() if data.master})

    def topics(self, deadline: Deadline | None = None) -> list[str]:
        """All topics of the name server, system ones too."""
        answer = self._name_servers.ask(rpc.GET_ALL_TOPIC_LIST_FROM_NAMESERVER.request, deadline)
        return sorted(bodies.topic_list(answer.body))

    def cluster(self, deadline: Deadline | None = None) -> dict[str, BrokerData]:
        """Brokers by name."""
        return dict(bodies.cluster(self._name_servers.ask(rpc.GET_BROKER_CLUSTER_INFO.request, deadline).body).brokers)

    def missing_topic(self, error: RouteNotFound) -> RouteNotFound:
        """The same error with the nearest existing names, as far as the name server tells them."""
        try:
            near = difflib.get_close_matches(error.topic or "", self.topics(), n=3, cutoff=0.5)
        except RocketMQError:
            near = []
        hint = f"Did you mean {', '.join(near)}? " if near else ""
        return RouteNotFound(
            error.message,
            error.addr,
            error.broker_code,
            error.topic,
            remedy=f"{hint}Create it with: rocketmq-spark topic create {error.topic}",
        )
