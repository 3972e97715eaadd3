"""Connections by address: made on first use, shared, replaced when they break, closed when idle.

Decisions are taken under the lock, connecting and closing happen outside it. After a failed attempt an address rests
for a moment that doubles, so that a broker that is down is not dialled by every caller at once.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from rocketmq_spark.clock import Deadline, backoff
from rocketmq_spark.errors import ConnectionLost, RocketMQError
from rocketmq_spark.remoting.connection import Connection, OnRequest
from rocketmq_spark.remoting.endpoint import TlsSettings

# Servers drop a connection after 120 s without traffic; ours go before, so that no request meets that moment.
IDLE_S = 100.0
FIRST_REST_S = 0.05
LONGEST_REST_S = 2.0


@dataclass(slots=True)
class _Slot:
    """State of one address; ``gate`` lets one caller connect while the others wait for it."""

    gate: threading.Lock = field(default_factory=threading.Lock)
    connection: Connection | None = None
    last_used: float = 0.0
    rests: Iterator[float] | None = None
    rest_until: float = 0.0


@dataclass(frozen=True, slots=True)
class Dialling:
    """How connections are made. ``address_map`` turns an advertised address into a reachable one."""

    connect_timeout_s: float = 3.0
    tls: TlsSettings | None = None
    address_map: Mapping[str, str] = field(default_factory=dict)

    def reachable(self, address: str) -> str:
        return self.address_map.get(address, address)


class Pool:
    """At most one connection per address."""

    def __init__(self, dialling: Dialling, on_request: OnRequest | None = None) -> None:
        self.dialling = dialling
        self._on_request = on_request
        self._slots: dict[str, _Slot] = {}
        self._lock = threading.Lock()
        self._closed = False

    def get(self, address: str, deadline: Deadline) -> Connection:
        """A live connection. Raises ``ConnectionLost`` or ``CallTimeout``."""
        now = time.monotonic()
        with self._lock:
            if self._closed:
                raise ConnectionLost("the client is closed", address)
            slot = self._slots.setdefault(address, _Slot())
            idle = self._take_idle(now)
            connection = slot.connection
            slot.last_used = now
        for old in idle:
            old.close()
        if connection is not None and not connection.closed:
            return connection
        with slot.gate:
            if slot.connection is None or slot.connection.closed:
                slot.connection = self._connect(address, slot, deadline)
            return slot.connection

    def _connect(self, address: str, slot: _Slot, deadline: Deadline) -> Connection:
        rest = min(slot.rest_until - time.monotonic(), deadline.remaining())
        if rest > 0:
            time.sleep(rest)
        try:
            connection = Connection(
                self.dialling.reachable(address),
                deadline.within(self.dialling.connect_timeout_s),
                self.dialling.tls,
                self._on_request,
            )
        except RocketMQError:
            slot.rests = slot.rests or backoff(FIRST_REST_S, LONGEST_REST_S)
            slot.rest_until = time.monotonic() + next(slot.rests)
            raise
        slot.rests, slot.rest_until = None, 0.0
        with self._lock:
            if not self._closed:
                return connection
        connection.close()
        raise ConnectionLost("the client is closed", address)

    def _take_idle(self, now: float) -> list[Connection]:
        taken = []
        for slot in self._slots.values():
            connection = slot.connection
            if connection is not None and now - slot.last_used > IDLE_S and not connection.waiting:
                slot.connection = None
                taken.append(connection)
        return taken

    def close(self) -> None:
        with self._lock:
            self._closed = True
            open_ones = [slot.connection for slot in self._slots.values() if slot.connection is not None]
            self._slots.clear()
        for connection in open_ones:
            connection.close()
