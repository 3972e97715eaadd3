"""Which replica of a broker one read pulls from: where the plan knew its master, then where the route leads, then where
the broker itself suggests.
"""

from __future__ import annotations

from dataclasses import dataclass

from rocketmq_spark.clock import Deadline
from rocketmq_spark.errors import BrokerNotFound, RouteNotFound
from rocketmq_spark.model import MASTER_ID
from rocketmq_spark.ports import PullSource
from rocketmq_spark.remoting.bulk import BulkStream
from rocketmq_spark.remoting.pool import Dialling


@dataclass(slots=True)
class Replica:
    """Opens streams to a replica of a broker; follows what brokers suggest when it may.

    ``known`` was the master's address when the read was planned. ``at_master`` is None while no route was asked whether it
    still is.
    """

    source: PullSource
    dialling: Dialling
    broker_name: str
    topic: str
    read_from: str = "master"
    known: str | None = None
    suggested: int = MASTER_ID
    doubted: bool = False
    at_master: bool | None = False

    def __call__(self, deadline: Deadline) -> BulkStream:
        address, self.known = self.known if self.read_from != "slave" else None, None
        at_master: bool | None = None
        if address is None:
            address, at_master = self._from_route(deadline)
        stream = BulkStream(
            self.dialling.reachable(address),
            deadline.within(self.dialling.connect_timeout_s),
            self.dialling.tls,
        )
        self.at_master = at_master
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
