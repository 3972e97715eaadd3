"""Free ports on loopback for processes that are about to start.

Chosen below the range from which the kernel gives out ports for outgoing connections, so that no connection takes
one between the choice and the start. Each process chooses from blocks of its own, and no port twice: a server that was
killed finds its ports free when it starts again. Where blocks cannot be had, two processes can choose alike: the later
start fails, and is tried on other ports.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import random
import socket
import threading
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from rocketmq_spark.errors import LocalBrokerError
from rocketmq_spark.localbroker.distro import cache_folder

HOST = "127.0.0.1"
_RANGE = range(20_000, 32_000)
_BLOCK = 60

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
    """A port whose neighbours at the given distances are free as well, none of them in ``taken`` or given out before."""
    around, avoid = tuple(around), set(taken)
    with _blocks.lock:
        for port in _blocks.candidates():
            wanted = {port + d for d in around}
            if avoid.isdisjoint(wanted) and _blocks.given.isdisjoint(wanted) and all_free(port, around):
                _blocks.given |= wanted
                return port
    raise LocalBrokerError(f"No free ports between {_RANGE.start} and {_RANGE.stop}", remedy="Stop some servers")


class _Blocks:
    """Parts of the range that are this process's, each by a lock that ends with it, and the ports that it gave out."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.given: set[int] = set()
        self._own: set[int] = set()

    def candidates(self) -> Iterator[int]:
        """Ports of the blocks that this process has, then of others that are free; any, if there are no locks."""
        rng = random.SystemRandom()
        starts = list(range(_RANGE.start, _RANGE.stop, _BLOCK))
        for start in [*self._own, *rng.sample(starts, len(starts))]:
            if self._has(start):
                # Without those at its ends, whose neighbours are in other blocks.
                yield from rng.sample(range(start + 2, start + _BLOCK - 1), _BLOCK - 3)
        for _ in range(1000):
            yield rng.choice(_RANGE)

    def _has(self, start: int) -> bool:
        if start in self._own:
            return True
        folder = cache_folder() / "ports"
        with contextlib.suppress(OSError):
            folder.mkdir(parents=True, exist_ok=True)
            # A bare descriptor, for it is to stay open until the process ends.
            lock = os.open(folder / str(start), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                os.close(lock)
                return False
            self._own.add(start)
            return True
        return False


_blocks = _Blocks()


def accepts(port: int) -> bool:
    """Whether a process listens here."""
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
                # Also not what a server wants that starts later.
                known = {**self._ports, **self._wished}.values()
                port = free_port(around, taken=[p + d for p in known for d in BROKER_PORTS])
            self._ports[name] = port
            self._path.write_text(json.dumps(self._ports, indent=1) + "\n", encoding="utf-8")
        return port

    def may_change(self, name: str) -> bool:
        return name not in self._wished
