"""One client of a Proxy: its channels, who it is, and single questions of it. What producers and consumers stand on."""

from __future__ import annotations

import ipaddress
import itertools
import os
import platform
import time
import uuid
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any, NamedTuple

from rocketmq_spark.clock import Deadline
from rocketmq_spark.codes import VERSION
from rocketmq_spark.errors import ConnectionLost, RocketMQError
from rocketmq_spark.grpc_proxy.answers import refused
from rocketmq_spark.grpc_proxy.channel import ProxyChannel, Tls
from rocketmq_spark.grpc_proxy.endpoints import Endpoints
from rocketmq_spark.grpc_proxy.facts import AddressScheme, Code, Language, Rpc
from rocketmq_spark.grpc_proxy.metadata import Keys, metadata
from rocketmq_spark.grpc_proxy.protos import proto

_numbers = itertools.count()
_GOOD = (Code.OK, Code.MULTIPLE_RESULTS)


class Access(NamedTuple):
    """How a Proxy is reached: ``host:port`` of each endpoint, who signs, and how names stand on the wire."""

    addresses: tuple[str, ...]
    on_wire: Callable[[str], str]
    keys: Callable[[], Keys | None]
    tls: Tls | None = None
    connect_timeout_s: float = 3.0
    request_timeout_s: float = 3.0


class Proxy:
    """Shared by all producers and consumers of a process with the same connection options."""

    def __init__(self, access: Access) -> None:
        self.access = access
        self.host = platform.node() or "localhost"
        self.client_id = f"{self.host}@{os.getpid()}@{next(_numbers)}@{uuid.uuid4().hex[:8]}"
        self.on_wire = access.on_wire
        self._endpoints = Endpoints(access.addresses)
        self._channels = {
            address: ProxyChannel(address, self._headers, access.connect_timeout_s, access.tls)
            for address in access.addresses
        }
        self._agent = proto("UA")(
            language=Language.PYTHON, version=_version(), platform=platform.platform(), hostname=self.host
        )

    @property
    def addresses(self) -> tuple[str, ...]:
        return self.access.addresses

    def agent(self) -> Any:
        """Who asks, for settings."""
        return self._agent

    def resource(self, name: str) -> Any:
        """A topic or group."""
        return proto("Resource")(name=self.on_wire(name))

    def channel(self, home: str | None = None) -> ProxyChannel:
        """The one to use now: of the ``home`` endpoint if that answers."""
        return self._channels[self._endpoints.pick(home, time.monotonic())]

    def at(self, address: str) -> ProxyChannel:
        """That of one endpoint."""
        return self._channels[address]

    def ask(self, rpc: Rpc, request: Any, deadline: Deadline, topic: str | None = None, home: str | None = None) -> Any:
        """A good answer; raises ``RocketMQError``. Another endpoint is asked when one cannot be reached."""
        for left in range(len(self.addresses), 0, -1):
            channel = self.channel(home)
            try:
                answer = channel.ask(rpc, request, deadline)
            except ConnectionLost as e:
                self.noted(channel.address, e)
                if left == 1 or deadline.expired:
                    raise
                continue
            self.noted(channel.address)
            return checked(answer, channel.address, topic)
        raise ConnectionLost("there is no endpoint")

    def noted(self, address: str, error: RocketMQError | None = None) -> None:
        """How a call to an endpoint went."""
        if isinstance(error, ConnectionLost):
            self._endpoints.failed(address, time.monotonic())
        else:
            self._endpoints.worked(address)

    def endpoints(self, address: str | None = None) -> Any:
        """Where the Proxy is, as it wants to be told: it names itself so in routes."""
        made = proto("Endpoints")()
        for one in (address,) if address else self.addresses:
            host, _, port = one.rpartition(":")
            made.scheme = _scheme(host.strip("[]"))
            made.addresses.add(host=host.strip("[]"), port=int(port))
        return made

    def close(self) -> None:
        for channel in self._channels.values():
            channel.close()

    def _headers(self) -> list[tuple[str, str]]:
        return metadata(self.client_id, _version(), uuid.uuid4().hex, datetime.now(UTC), self.access.keys())


def checked(answer: Any, address: str, topic: str | None = None) -> Any:
    """The answer if its status is good; raises what it says otherwise."""
    if answer.status.code not in _GOOD:
        raise refused(answer.status, address, topic)
    return answer


def _version() -> str:
    return f"rocketmq-spark-{VERSION}"


def _scheme(host: str) -> AddressScheme:
    try:
        return AddressScheme.IPv4 if ipaddress.ip_address(host).version == 4 else AddressScheme.IPv6
    except ValueError:
        return AddressScheme.DOMAIN_NAME
