"""Decides whether a host is on the loopback interface."""

from __future__ import annotations

import ipaddress


def is_loopback(host: str) -> bool:
    """Whether ``host`` is ``localhost`` or an address of the loopback interface. Other names are not resolved."""
    try:
        ip = ipaddress.ip_address(host)
    except ValueError:
        return host.lower() == "localhost"
    mapped_v4 = ip.ipv4_mapped if isinstance(ip, ipaddress.IPv6Address) else None
    return (mapped_v4 or ip).is_loopback
