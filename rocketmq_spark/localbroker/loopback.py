"""Free ports on loopback for processes that are about to start.

Chosen below the range from which the kernel gives out ports for outgoing connections, so that nobody's connection takes
one between the choice and the start. Two starts at the same moment can still choose alike: the later one fails, and
whoever chose at random tries again.
"""

from __future__ import annotations

import contextlib
import json
import random
import socket
import threading
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from rocketmq_spark.errors import LocalBrokerError

HOST = "127.0.0.1"
_RANGE = range(20_000, 32_000)

# What a broker listens on, relative to listenPort: itself, the fast port, replication (on all interfaces).
BROKER_PORTS = (0, -2, 1)
# A proxy: Remoting and, one above, gRPC.
PROXY_PORTS = (0, 1)


def is_free(port: int) -> bool:
    """Whether a server could listen here now, on loopback and on all interfaces."""
    with socket.socket() as s:
        s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            s.bind(("", port))
        except OSError:
            return False
    return True


def all_free(port: int, around: Iterable[int] = (0,)) -> bool:
    return all(is_free(port + d) for d in around)


def free_port(around: Iterable[int] = (0,), taken: Iterable[int] = ()) -> int:
    """A port whose neighbours at the given distances are free as well, none of them in ``taken``."""
    around, avoid = tuple(around), set(taken)
    for port in _candidates():
        if avoid.isdisjoint(port + d for d in around) and all_free(port, around):
            return port
    raise LocalBrokerError(f"No free ports between {_RANGE.start} and {_RANGE.stop}", remedy="Stop some servers")


def _candidates() -> Iterator[int]:
    rng = random.SystemRandom()
    for _ in range(1000):
        yield rng.choice(_RANGE)


def accepts(port: int) -> bool:
    """Whether somebody listens here."""
    with contextlib.suppress(OSError), socket.create_connection((HOST, port), timeout=1):
        return True
    return False


def refuse_taken(wished: Mapping[str, int]) -> None:
    """Raise the error for a wish, by the name of a server, that cannot be had now: before anything is fetched or started."""
    for name, port in wished.items():
        if not is_free(port):
            raise taken(name, [port])


def taken(name: str, ports: Iterable[int]) -> LocalBrokerError:
    """The error of a server that cannot listen on one of its ports."""
    text = " or ".join(map(str, ports))
    return LocalBrokerError(
        f"{name} cannot listen: port {text} is in use",
        remedy="Stop what uses it, choose another (ports=, or --port of broker start), or name none: a free one is found",
    )


class PortBook:
    """Which server of a data folder has which port: the user's wish, else last time's if free, else a new one."""

    def __init__(self, path: Path, wished: Mapping[str, int]) -> None:
        self._path = path
        self._wished = dict(wished)
        self._lock = threading.Lock()
        self._ports: dict[str, int] = {}
        with contextlib.suppress(OSError, ValueError):
            self._ports = json.loads(path.read_text(encoding="utf-8"))

    def assign(self, name: str, around: tuple[int, ...]) -> int:
        """The port for a server that is about to start."""
        with self._lock:
            port = self._wished.get(name) or self._ports.get(name)
            if port is None or (name not in self._wished and not all_free(port, around)):
                port = free_port(around, taken=[p + d for p in self._ports.values() for d in BROKER_PORTS])
            self._ports[name] = port
            self._path.write_text(json.dumps(self._ports, indent=1) + "\n", encoding="utf-8")
        return port

    def may_change(self, name: str) -> bool:
        return name not in self._wished
