"""The replica of a broker that a read pulls from.

``Replica`` starts at the master that the plan knew, then follows the route, then the broker's own suggestions
(``ReplicaHints``).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from rocketmq_spark.base.clock import Deadline
from rocketmq_spark.errors import BrokerNotFound, RocketMQError, RouteNotFound
from rocketmq_spark.model import MASTER_ID
from rocketmq_spark.ports import PullSource
from rocketmq_spark.pull.suspicions import LossSuspicions
from rocketmq_spark.remoting.advertised import explained
from rocketmq_spark.remoting.bulk import BulkStream
from rocketmq_spark.remoting.pool import Dialling

# Receives the replica that a broker suggests, or None if its suggestion is in doubt; returns whether to reconnect.
OnHint = Callable[[int | None], bool]


class ReplicaHints:
    """``moving``: the address may be another one by now, which is to be looked at when nothing is under way."""

    def __init__(self, on_hint: OnHint | None) -> None:
        self._on_hint = on_hint
        self.last: int | None = None
        self.moving = False

    def follow(self, suggested: int, trials: LossSuspicions) -> None:
        """Go where the broker suggests; but while something looks like loss, the master has to say first what is lost."""
        if suggested != MASTER_ID and trials.suspicious:
            return
        self.last = suggested
        if self._on_hint is not None and self._on_hint(suggested):
            self.moving = True

    def doubt(self) -> bool:
        """A slave may just not have it: whether the master is to be asked before anything is called lost."""
        if self._on_hint is None or not self._on_hint(None):
            return False
        self.last, self.moving = MASTER_ID, True
        return True


@dataclass(slots=True)
class Replica:
    """Opens streams to a replica of a broker; follows what brokers suggest when it may.

    ``known`` was the master's address when the read was planned. ``at_master`` is None while no route was asked whether it
    still is. ``spare_bytes`` is what the user's options let a stream keep besides its buffer.
    """

    source: PullSource
    dialling: Dialling
    broker_name: str
    topic: str
    read_from: str = "master"
    known: str | None = None
    spare_bytes: int = 0
    suggested: int = MASTER_ID
    doubted: bool = False
    at_master: bool | None = False
    connected: bool = False

    def __call__(self, deadline: Deadline) -> BulkStream:
        address, self.known = self.known if self.read_from != "slave" else None, None
        at_master: bool | None = None
        if address is None:
            address, at_master = self._from_route(deadline)
        try:
            stream = BulkStream(
                self.dialling.reachable(address),
                deadline.within(self.dialling.connect_timeout_s),
                self.dialling.tls,
                spare_bytes=self.spare_bytes,
                arriving=self.dialling.arriving,
            )
        except RocketMQError as e:
            # The remedy assumes that the name server answers. That is known only if the address came from a route just now.
            if at_master is not None and not self.connected and not self.dialling.at_name_server:
                explained(e, [address])
            raise
        self.at_master, self.connected = at_master, True
        return stream

    def hint(self, broker_id: int | None) -> bool:
        """A broker suggests a replica, or (None) a replica's word is doubted; whether to connect anew."""
        if broker_id is None:
            self.suggested, self.doubted = MASTER_ID, True
            return not self.at_master
        if self.read_from != "hint" or broker_id == self.suggested:
            return False
        self.suggested, self.doubted = broker_id, False
        return True

    def _from_route(self, deadline: Deadline) -> tuple[str, bool]:
        """An address, and whether it is the master's."""
        try:
            route = self.source.route(self.topic, deadline)
        except RouteNotFound:
            self.at_master = self.at_master is not False  # the topic is gone: nothing contradicts the plan any more
            raise
        data = route.brokers.get(self.broker_name)
        address = data.replica(self.read_from, self.suggested) if data is not None else None
        if data is None or address is None:
            raise BrokerNotFound(f"no address of broker {self.broker_name!r} is registered", topic=self.topic)
        if self.doubted and data.master is not None:
            address = data.master
        return address, address == data.own_master
