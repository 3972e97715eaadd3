"""Where topics are: brokers, their addresses and queues."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from rocketmq_spark.base.codes import MAX_QUEUES, Perm
from rocketmq_spark.errors import RemoteProtocolError
from rocketmq_spark.model.message import MessageQueue

MASTER_ID = 0


@dataclass(frozen=True, slots=True)
class QueueData:
    """Queues of a topic on one broker as the name server reports them: counts and permission bits (4 read, 2 write)."""

    broker_name: str
    read_queues: int
    write_queues: int
    perm: int
    topic_sys_flag: int = 0


@dataclass(frozen=True, slots=True)
class BrokerData:
    """Addresses of one broker name by broker id; 0 is the master and may be missing while it is down.

    ``acting``: what stands at 0 is a slave that acts for a master that is down (a name server with ``supportActingMaster``).
    It answers and may lack the last messages.
    """

    broker_name: str
    cluster: str
    addresses: Mapping[int, str]
    acting: bool = False

    @property
    def master(self) -> str | None:
        return self.addresses.get(MASTER_ID)

    @property
    def own_master(self) -> str | None:
        """The master, unless it is an acting one: data that the master lacks exist nowhere."""
        return None if self.acting else self.master

    @property
    def slaves(self) -> list[str]:
        """By broker id."""
        return [address for number, address in sorted(self.addresses.items()) if number != MASTER_ID]

    def replica(self, read_from: str, suggested: int = MASTER_ID) -> str | None:
        """Where to read: the master; a slave where one is wanted or suggested, or where the master is missing.

        ``read_from`` is the option: only ``master`` never leads to a slave.
        """
        if read_from == "slave":
            return self._first_slave or self.master
        if read_from == "hint":
            wanted = self.addresses.get(suggested) if suggested != MASTER_ID else None
            return wanted or self.master or self._first_slave
        return self.master

    @property
    def _first_slave(self) -> str | None:
        return next(iter(self.slaves), None)


@dataclass(frozen=True, slots=True)
class TopicRoute:
    """Where a topic lives. ``static`` is true for static (mapped) topics, which have logical queues."""

    topic: str
    queues: tuple[QueueData, ...]
    brokers: Mapping[str, BrokerData]
    order_conf: str | None = None
    static: bool = False

    def readable(self) -> list[MessageQueue]:
        """Sorted queues that may be pulled: read permission, any live replica (Java's subscribe set)."""
        return sorted(
            MessageQueue(self.topic, data.broker_name, i)
            for data in self.queues
            if data.perm & Perm.READ and data.broker_name in self.brokers
            for i in range(data.read_queues)
        )

    def writable(self) -> list[MessageQueue]:
        """Queues that may be sent to, in Java's publish order: write permission and a live master.

        Raises ``RemoteProtocolError`` for an ``order_conf`` that is none: an operator writes it.

        Mirrors ``MQClientInstance.topicRouteData2TopicPublishInfo``.
        """
        if self.order_conf:
            return _ordered(self.topic, self.order_conf)
        return [
            MessageQueue(self.topic, data.broker_name, i)
            for data in sorted(self.queues, key=lambda d: d.broker_name)
            if data.perm & Perm.WRITE and data.broker_name in self.brokers and self.brokers[data.broker_name].master
            for i in range(data.write_queues)
        ]


def _ordered(topic: str, conf: str) -> list[MessageQueue]:
    try:
        parts = [item.rsplit(":", 1) for item in conf.split(";") if item]
        counts = [(name, int(count)) for name, count in parts]
        if sum(max(0, count) for _, count in counts) > MAX_QUEUES:
            raise ValueError(f"it has more than {MAX_QUEUES} queues")
    except ValueError as e:
        raise RemoteProtocolError(
            f"the route has orderTopicConf {conf!r}; expected broker:queues;…", topic=topic
        ) from e
    return [MessageQueue(topic, name, i) for name, count in counts for i in range(count)]
