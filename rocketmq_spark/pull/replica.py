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
from rocketmq_spark.remoting.advertised import with_advertised_remedy
from rocketmq_spark.remoting.bulk import BulkStream
from rocketmq_spark.remoting.pool import ConnectOptions

# Called with the replica that a broker suggests, or with None if the answers of the replica are in doubt. Returns whether to
# reconnect.
OnHint = Callable[[int | None], bool]


class ReplicaHints:
    """Suggestions of brokers. ``reconnect_needed`` means that the address may have changed, so that the reader connects again
    when no pull is in flight.
    """

    def __init__(self, on_hint: OnHint | None) -> None:
        self._on_hint = on_hint
        self.last_suggested_broker: int | None = None
        self.reconnect_needed = False

    def follow(self, suggested_broker: int, suspicions: LossSuspicions) -> None:
        """Use the replica that the broker suggests. While an offset looks lost, ignore suggestions of slaves, because only the
        master knows whether the offset is lost.
        """
        if suggested_broker != MASTER_ID and suspicions.has_suspicions:
            return
        self.last_suggested_broker = suggested_broker
        if self._on_hint is not None and self._on_hint(suggested_broker):
            self.reconnect_needed = True

    def return_to_master(self) -> bool:
        """Use the master. Only the master can confirm that an offset is lost, because a slave may lag behind. Returns False if
        the read already uses the master.
        """
        if self._on_hint is None or not self._on_hint(None):
            return False
        self.last_suggested_broker, self.reconnect_needed = MASTER_ID, True
        return True


@dataclass(slots=True)
class Replica:
    """Opens streams to a replica of a broker. Follows what brokers suggest if ``read_from`` is "hint".

    ``planned_address`` was the address of the master when the read was planned. The first stream uses this address.
    ``is_at_master`` is None until a route shows whether the address still belongs to the master. ``spare_bytes`` is the number
    of bytes that a stream may keep besides its buffer.
    """

    source: PullSource
    connect_options: ConnectOptions
    broker_name: str
    topic: str
    read_from: str = "master"
    planned_address: str | None = None
    spare_bytes: int = 0
    suggested_broker: int = MASTER_ID
    must_use_master: bool = False
    is_at_master: bool | None = False
    has_connected: bool = False

    def __call__(self, deadline: Deadline) -> BulkStream:
        address, self.planned_address = self.planned_address if self.read_from != "slave" else None, None
        is_at_master: bool | None = None
        if address is None:
            address, is_at_master = self._address_from_route(deadline)
        try:
            stream = BulkStream(
                self.connect_options.reachable_address(address),
                deadline.within(self.connect_options.connect_timeout_s),
                self.connect_options.tls,
                spare_bytes=self.spare_bytes,
                receive_budget=self.connect_options.receive_budget,
            )
        except RocketMQError as e:
            # The remedy assumes that the name server answers, which is known only if the address just came from a route.
            if is_at_master is not None and not self.has_connected and not self.connect_options.at_name_server:
                with_advertised_remedy(e, [address])
            raise
        self.is_at_master, self.has_connected = is_at_master, True
        return stream

    def follow_hint(self, broker_id: int | None) -> bool:
        """Use replica ``broker_id``, which a broker suggests. If ``broker_id`` is None, the answers of a replica are in doubt,
        so use the master. Returns whether to connect again.
        """
        if broker_id is None:
            self.suggested_broker, self.must_use_master = MASTER_ID, True
            return not self.is_at_master
        if self.read_from != "hint" or broker_id == self.suggested_broker:
            return False
        self.suggested_broker, self.must_use_master = broker_id, False
        return True

    def _address_from_route(self, deadline: Deadline) -> tuple[str, bool]:
        """Return an address from the current route, and whether it is the master's."""
        try:
            route = self.source.route(self.topic, deadline)
        except RouteNotFound:
            # The topic was deleted, so no route can contradict the address of the plan. Unless an earlier route did, the
            # address counts as the master's.
            self.is_at_master = self.is_at_master is not False
            raise
        broker_data = route.brokers.get(self.broker_name)
        address = broker_data.replica(self.read_from, self.suggested_broker) if broker_data is not None else None
        if broker_data is None or address is None:
            raise BrokerNotFound(f"no address of broker {self.broker_name!r} is registered", topic=self.topic)
        if self.must_use_master and broker_data.master is not None:
            address = broker_data.master
        return address, address == broker_data.own_master
