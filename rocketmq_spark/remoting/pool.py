"""Connections by address: created on first use, shared, replaced when they break, closed when idle.

The lock guards decisions; connections are opened and closed without it. After a failed attempt, the pool waits before it
connects to the address again (*backoff*). The pause doubles with each failure, so that callers do not flood a broker that is
down. Callers that waited for a failed attempt get its error.

A name server decides how many addresses there are, so the number of connections is limited. At the limit, the connection that
has been idle for longest is closed for a new one. While all connections are in use, a caller waits.

A pool closes idle connections when it is used. A pool in use also closes idle connections of pools that are no longer used.
"""

from __future__ import annotations

import functools
import itertools
import logging
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace

from rocketmq_spark.base.budget import MAX_WAITING_BYTES, Budget, ReceiveBudget
from rocketmq_spark.base.clock import Deadline, backoff
from rocketmq_spark.base.process import LiveObjects
from rocketmq_spark.errors import CallTimeout, ClosedError, RocketMQError, copy_error
from rocketmq_spark.remoting.advertised import with_advertised_remedy
from rocketmq_spark.remoting.connection import Connection, OnRequest, ServerRequest
from rocketmq_spark.remoting.protocol import MAX_PUSHED_BYTES
from rocketmq_spark.remoting.transport import DEFAULT_UNDELIVERED_POLICY, TlsSettings, UndeliveredPolicy, is_loopback
from rocketmq_spark.wire.header import Peer

logger = logging.getLogger(__name__)

# Servers drop a connection after 120 s without traffic. The pool closes a connection earlier, because a request that is sent
# while the server drops the connection would be lost.
IDLE_TIMEOUT_S = 100.0
FIRST_BACKOFF_S = 0.05
MAX_BACKOFF_S = 2.0
MAX_CONNECTIONS = 1024
# A connection that ``get`` returned within the last ``MIN_IDLE_S`` is not closed for a new one, because the caller may not have
# sent its request yet.
MIN_IDLE_S = 0.2
_attempt_numbers = itertools.count(1)  # for all pools of the process; see ``Pool.last_attempt``
_POLL_S = 0.02  # how often a caller that waits at the limit checks for an idle connection
# If there are more than ``_MAX_SLOTS`` addresses, those that are idle and not connected are forgotten. If there are more than
# ``_MAX_ADVERTISED_ADDRESSES`` advertised addresses, all of them are forgotten; one route may have half as many.
_MAX_SLOTS, _MAX_ADVERTISED_ADDRESSES = 8 * MAX_CONNECTIONS, 32_768


@dataclass(slots=True)
class _Slot:
    """The state of one address. The caller that holds ``connect_lock`` connects, and the others wait for this caller."""

    connect_lock: threading.Lock = field(default_factory=threading.Lock)
    connection: Connection | None = None
    last_used_s: float = 0.0
    last_attempt: int = 0  # the number of the last attempt to connect, successful or not; see ``Pool.last_attempt``
    failure: RocketMQError | None = None  # the error of the last attempt; None after a success
    backoffs: Iterator[float] | None = None  # yields the pause after each further failure
    backoff_until: float = 0.0
    was_connected: bool = False  # whether any attempt has succeeded

    @property
    def live_connection(self) -> Connection | None:
        connection = self.connection
        return None if connection is None or connection.closed else connection

    def raise_during_backoff(self) -> None:
        failure = self.failure
        if failure is not None and self.backoff_until > time.monotonic():
            raise copy_error(failure)


@dataclass(frozen=True, slots=True)
class ConnectOptions:
    """How connections are made. ``address_map`` turns an advertised address into a reachable one. With ``at_name_server``, the
    address of the name server that reported a route replaces all advertised addresses in the route. ``allow_plain_text`` says
    that the user has given ``tls=false`` explicitly. ``max_pushed_bytes`` is the largest request of a server, in bytes.
    """

    connect_timeout_s: float = 3.0
    tls: TlsSettings | None = None
    address_map: Mapping[str, str] = field(default_factory=dict)
    at_name_server: bool = False
    undelivered_policy: UndeliveredPolicy = DEFAULT_UNDELIVERED_POLICY
    allow_plain_text: bool = False
    max_pushed_bytes: int = MAX_PUSHED_BYTES
    max_connections: int = MAX_CONNECTIONS
    # Each client has its own budgets, so that the servers of other clients in the process cannot use them up.
    receive_budget: ReceiveBudget = field(default_factory=ReceiveBudget, compare=False, repr=False)
    waiting_budget: Budget = field(default_factory=lambda: Budget(MAX_WAITING_BYTES), compare=False, repr=False)

    def reachable_address(self, address: str) -> str:
        return self.address_map.get(address, address)

    def is_private(self, address: str) -> bool:
        """Whether traffic to an advertised address is encrypted or stays on this machine, so that the network cannot read it."""
        return self.tls is not None or is_loopback(self.reachable_address(address))


class Pool:
    """At most one connection per address, besides retired connections that still wait for answers."""

    def __init__(self, connect_options: ConnectOptions, on_request: OnRequest | None = None) -> None:
        self.connect_options = connect_options
        self._on_request = on_request
        self._slots: dict[str, _Slot] = {}
        self._advertised_peers: dict[str, Peer] = {}  # addresses in routes, with the kind of their server
        self._reachable_addresses: set[str] = set()  # advertised addresses after ``address_map`` was applied
        self._name_servers: frozenset[str] = frozenset()
        self._retired_connections: list[Connection] = []  # each is closed when its last request is answered
        self._connecting_count = 0  # connections that are being opened
        self._is_limit_reported = False  # whether the limit of connections was reached, and logged
        self._idle_checked_s = 0.0  # when the pool last looked for idle connections
        self._lock = threading.Lock()
        self._closed = False
        _pools.add(self)

    def get(self, address: str, deadline: Deadline, wait_for_backoff: bool = True) -> Connection:
        """Return a live connection. Raises ``ConnectionLost`` or ``CallTimeout``, and ``ClosedError`` after ``close``.

        During the backoff of an address, this method waits if ``wait_for_backoff`` is set. Otherwise it raises the error of the
        last attempt at once.
        """
        with self._lock:
            self._check_open(address)
            slot = self._slots.setdefault(address, _Slot())
            idle_connections = self._remove_idle_locked(time.monotonic())
            connection, last_attempt = slot.live_connection, slot.last_attempt
            slot.last_used_s = time.monotonic()
        for idle_connection in idle_connections:
            idle_connection.close()
        _close_idle_of_all_pools()
        if connection is not None:
            return connection
        if not wait_for_backoff:
            slot.raise_during_backoff()  # before ``connect_lock``, which another caller may hold during the backoff
        if not slot.connect_lock.acquire(timeout=deadline.remaining()):
            raise CallTimeout("the connection was not established in time", address)
        try:
            connection = slot.live_connection
            if connection is None and slot.last_attempt != last_attempt and slot.failure is not None:
                raise copy_error(slot.failure)
            if connection is None:
                self._wait_for_backoff(slot, deadline, wait_for_backoff)
                connection = self._connect(address, slot, deadline)
            return connection
        finally:
            slot.connect_lock.release()

    def is_connected(self, address: str) -> bool:
        """Whether the address has an open connection, so that ``get`` returns at once."""
        with self._lock:
            slot = self._slots.get(address)
            return slot is not None and slot.live_connection is not None

    def is_proxy(self, address: str) -> bool:
        """Whether the server at the address is a Proxy. Its answers show this, or a route that a Proxy returned has the
        address.
        """
        with self._lock:
            slot = self._slots.get(address)
            is_connected_proxy = slot is not None and slot.connection is not None and slot.connection.peer is Peer.PROXY
            return is_connected_proxy or self._advertised_peers.get(address) is Peer.PROXY

    def advertise(self, addresses: Iterable[str], peer: Peer) -> None:
        """Record the addresses of a route that a server of the kind ``peer`` returned. Routes of a Proxy lead only to Proxies."""
        advertised_peer = peer if peer is Peer.PROXY else Peer.UNKNOWN
        with self._lock:
            if len(self._advertised_peers) > _MAX_ADVERTISED_ADDRESSES:
                self._advertised_peers.clear()
                self._reachable_addresses.clear()
            for address in addresses:
                self._advertised_peers[address] = advertised_peer
                self._reachable_addresses.add(self.connect_options.reachable_address(address))
                slot = self._slots.get(address)
                if advertised_peer is Peer.PROXY and slot is not None and slot.connection is not None:
                    slot.connection.peer = advertised_peer

    def note_name_servers(self, addresses: Iterable[str]) -> None:
        """Record the addresses of name servers, which may not send requests to group members."""
        with self._lock:
            self._name_servers |= frozenset(addresses)

    def may_send_requests(self, address: str) -> bool:
        """Whether the server at the address may send requests to this client. A plain name server may not send requests. A
        Proxy that is used as a name server may send requests. Routes have the address of such a Proxy, but not the address of a
        plain name server.
        """
        with self._lock:
            if address not in self._name_servers or self.connect_options.at_name_server:
                return True
            return self.connect_options.reachable_address(address) in self._reachable_addresses

    def last_attempt(self, address: str) -> int:
        """The number of the last attempt to connect to the address; 0 before the first attempt. While this number does not
        change, the pool uses the same connection to the address. Two attempts of one process never have the same number, even
        in different pools.
        """
        with self._lock:
            slot = self._slots.get(address)
            return slot.last_attempt if slot is not None else 0

    def retire(self, address: str, connection: Connection) -> None:
        """Retire ``connection``: it takes no new calls and is closed after its last answer."""
        with self._lock:
            slot = self._slots.get(address)
            if slot is not None and slot.connection is connection:
                slot.connection = None
                self._retired_connections.append(connection)

    def _connect(self, address: str, slot: _Slot, deadline: Deadline) -> Connection:
        self._reserve_connection(address, deadline.within(self.connect_options.connect_timeout_s))
        try:
            return self._open_connection(address, slot, deadline)
        finally:
            with self._lock:
                self._connecting_count -= 1

    def _reserve_connection(self, address: str, deadline: Deadline) -> None:
        """Count one more connection. If the limit is reached, close the connection that has been idle for longest, or wait
        until one is idle.
        """
        max_connections = self.connect_options.max_connections
        while True:
            with self._lock:
                self._check_open(address)
                slots = [slot for slot in self._slots.values() if slot.live_connection is not None]
                self._retired_connections = [
                    connection for connection in self._retired_connections if not connection.closed
                ]
                if len(slots) + len(self._retired_connections) + self._connecting_count < max_connections:
                    self._connecting_count += 1
                    return
                must_log_limit, self._is_limit_reported = not self._is_limit_reported, True
                idle_connection = self._remove_longest_idle_locked(slots, time.monotonic() - MIN_IDLE_S)
            if must_log_limit:
                logger.warning(
                    "this client has %d connections, which is its limit (option 'maxConnections'): idle ones are closed for "
                    "new ones, and requests wait while all are in use",
                    max_connections,
                )
            if idle_connection is not None:
                idle_connection.close()
            elif deadline.expired:
                raise CallTimeout(
                    f"all {max_connections} connections of this client are in use",
                    address,
                    remedy="Increase option 'maxConnections' if the cluster has more servers",
                )
            else:
                deadline.pause(_POLL_S)

    def _remove_longest_idle_locked(self, slots: Iterable[_Slot], idle_since: float) -> Connection | None:
        """Remove and return a retired connection without requests, or else the connection that has been idle for longest; None
        if all connections were used after ``idle_since``.
        """
        for retired_connection in self._retired_connections:
            if not retired_connection.is_busy:
                self._retired_connections.remove(retired_connection)
                return retired_connection
        idle_slots = (
            slot for slot in slots if slot.connection and not slot.connection.is_busy and slot.last_used_s < idle_since
        )
        slot = min(idle_slots, key=lambda slot: slot.last_used_s, default=None)
        if slot is None:
            return None
        connection, slot.connection = slot.connection, None
        return connection

    def _open_connection(self, address: str, slot: _Slot, deadline: Deadline) -> Connection:
        try:
            connection = Connection(
                self.connect_options.reachable_address(address),
                deadline.within(self.connect_options.connect_timeout_s),
                self.connect_options.tls,
                None
                if self._on_request is None
                else functools.partial(self._on_server_request, self._on_request, address),
                undelivered_policy=self.connect_options.undelivered_policy,
                peer=self._advertised_peers.get(address, Peer.UNKNOWN),
                max_pushed_bytes=self.connect_options.max_pushed_bytes,
                receive_budget=self.connect_options.receive_budget,
                waiting_budget=self.connect_options.waiting_budget,
            )
        except RocketMQError as e:
            self._add_remedy(e, address, slot)
            slot.last_attempt, slot.failure = next(_attempt_numbers), copy_error(e)
            slot.backoffs = slot.backoffs or backoff(FIRST_BACKOFF_S, MAX_BACKOFF_S)
            slot.backoff_until = time.monotonic() + next(slot.backoffs)
            raise
        slot.last_attempt = next(_attempt_numbers)
        slot.backoffs, slot.backoff_until, slot.failure, slot.was_connected = None, 0.0, None, True
        with self._lock:
            if not self._closed:
                slot.connection, slot.last_used_s = connection, time.monotonic()
                return connection
        connection.close()
        raise _closed_error(address)

    def _on_server_request(self, on_request: OnRequest, address: str, request: ServerRequest) -> bool:
        """Pass on a request with the advertised address, which may differ from the address of the connection."""
        return self.may_send_requests(address) and on_request(replace(request, address=address))

    def _add_remedy(self, error: RocketMQError, address: str, slot: _Slot) -> None:
        """Add the remedy for advertised addresses that cannot be reached. Adds nothing if ``address`` was connected before, or
        if another advertised address is connected, because then only this server is down.
        """
        with self._lock:
            peer = self._advertised_peers.get(address)
            if peer is None or slot.was_connected:
                return
            connected_addresses = (
                a
                for a in self._advertised_peers
                if (other_slot := self._slots.get(a)) is not None and other_slot.live_connection is not None
            )
            if next(connected_addresses, None) is None:
                with_advertised_remedy(error, self._advertised_peers, peer)

    def _wait_for_backoff(self, slot: _Slot, deadline: Deadline, wait_for_backoff: bool) -> None:
        """Wait until the backoff is over. If the deadline is earlier, raise the error of the last attempt."""
        remaining_s = slot.backoff_until - time.monotonic()
        if remaining_s <= 0:
            return
        if slot.failure is not None and (not wait_for_backoff or remaining_s >= deadline.remaining()):
            raise copy_error(slot.failure)
        time.sleep(remaining_s)

    def _remove_idle_locked(self, now: float) -> list[Connection]:
        if now - self._idle_checked_s < IDLE_TIMEOUT_S / 100 and not self._retired_connections:
            return []
        self._idle_checked_s = now
        if len(self._slots) > _MAX_SLOTS:
            self._slots = {
                address: slot
                for address, slot in self._slots.items()
                if slot.connection is not None or slot.connect_lock.locked() or now - slot.last_used_s < IDLE_TIMEOUT_S
            }
        removed_connections = [connection for connection in self._retired_connections if not connection.waiting_count]
        self._retired_connections = [connection for connection in self._retired_connections if connection.waiting_count]
        for slot in self._slots.values():
            connection = slot.connection
            if connection is not None and now - slot.last_used_s > IDLE_TIMEOUT_S and not connection.waiting_count:
                slot.connection = None
                removed_connections.append(connection)
        return removed_connections

    def close_idle(self) -> None:
        """Close the connections that have been idle for ``IDLE_TIMEOUT_S``, as ``get`` does. Other pools call this method, so
        it waits neither for the lock nor for sockets.
        """
        if not self._lock.acquire(blocking=False):
            return  # another thread uses the pool, and closes idle connections
        try:
            idle_connections = self._remove_idle_locked(time.monotonic())
        finally:
            self._lock.release()
        for connection in idle_connections:
            connection.close_nowait()

    def _check_open(self, address: str) -> None:
        if self._closed:
            raise _closed_error(address)

    def close_connections(self) -> None:
        """Close all connections. Later calls of ``get`` open new ones."""
        with self._lock:
            connections = self._retired_connections + [
                slot.connection for slot in self._slots.values() if slot.connection
            ]
            self._retired_connections = []
        for connection in connections:
            connection.close()

    def close(self) -> None:
        with self._lock:
            self._closed = True
            connections = self._retired_connections + [
                slot.connection for slot in self._slots.values() if slot.connection
            ]
            self._slots.clear()
            self._retired_connections = []
        for connection in connections:
            connection.close()


def _closed_error(address: str) -> ClosedError:
    return ClosedError("the client is closed", address)


_pools: LiveObjects[Pool] = LiveObjects(IDLE_TIMEOUT_S / 100)


def _close_idle_of_all_pools() -> None:
    for pool in _pools.due(time.monotonic()):
        pool.close_idle()
