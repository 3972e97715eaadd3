"""The remedy in errors if this machine cannot connect to an advertised address.

Brokers and Proxies advertise their own addresses in routes. A server in a container often advertises an address that only other
containers can reach.
"""

from __future__ import annotations

from collections.abc import Collection

from rocketmq_spark.errors import CallTimeout, ConnectionLost, RocketMQError
from rocketmq_spark.remoting.transport import CANNOT_CONNECT
from rocketmq_spark.wire.header import Peer

_MAX_LISTED_ADDRESSES = 3
_PROXY_REMEDY = (
    "set option 'addressMap' to nameServer, or let the Proxy advertise an address that clients reach (remotingAccessAddr in "
    "rmq-proxy.json)"
)
_BROKER_REMEDY = (
    "If the server is a broker that runs, let it advertise an address that clients reach (brokerIP1 in broker.conf), or give "
    f"its port-forward in option 'addressMap'. If the server is a Proxy, {_PROXY_REMEDY}"
)


def remedy(addresses: Collection[str], peer: Peer = Peer.UNKNOWN) -> str:
    """Return the remedy for the case that this machine can connect to none of the advertised addresses. ``peer`` is the kind of
    server that advertised the addresses.
    """
    listed_addresses = ", ".join(sorted(addresses)[:_MAX_LISTED_ADDRESSES])
    more_text = f" and {len(addresses) - _MAX_LISTED_ADDRESSES} more" if len(addresses) > _MAX_LISTED_ADDRESSES else ""
    server_kind, remedies = "name server", _BROKER_REMEDY
    if peer is Peer.PROXY:
        server_kind, remedies = "Proxy", _PROXY_REMEDY[0].upper() + _PROXY_REMEDY[1:]
    return (
        f"The {server_kind} answers, but what it advertises cannot be reached from here: {listed_addresses}{more_text}. "
        f"{remedies}"
    )


def with_advertised_remedy(
    error: RocketMQError, addresses: Collection[str], peer: Peer = Peer.UNKNOWN
) -> RocketMQError:
    """Return ``error``. Adds the remedy if this machine cannot connect to an advertised address."""
    is_unreached = isinstance(error, ConnectionLost | CallTimeout) and error.message.startswith(CANNOT_CONNECT)
    if is_unreached and error.remedy is None:
        error.remedy = remedy(addresses, peer)
    return error
