"""Connections by address: one for many, closed when idle, not dialled by everybody when the server is down."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from rocketmq_spark.base.clock import Deadline
from rocketmq_spark.base.process import LiveObjects
from rocketmq_spark.errors import CallTimeout, ClosedError, ConnectionLost
from rocketmq_spark.remoting import pool as pool_module
from rocketmq_spark.remoting.pool import ConnectOptions, Pool
from rocketmq_spark.remoting.transport import UndeliveredPolicy
from rocketmq_spark.wire.header import Peer
from tests import mockbroker as mb
from tests.mockbroker import PING, MockBroker, eventually, ok, ping


@pytest.fixture
def pool() -> Iterator[Pool]:
    one = Pool(ConnectOptions(connect_timeout_s=30.0))
    yield one
    one.close()


def soon(seconds: float = 5.0) -> Deadline:
    return Deadline.after(seconds)


@pytest.fixture
def dead() -> str:
    """An address where nobody listens."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return f"127.0.0.1:{server.getsockname()[1]}"


def test_many_callers_share_one_connection(broker: MockBroker, pool: Pool) -> None:
    start = threading.Barrier(16)

    def get() -> object:
        start.wait()
        return pool.get(broker.address, soon())

    with ThreadPoolExecutor(16) as threads:
        got = {id(future.result()) for future in [threads.submit(get) for _ in range(16)]}
    assert len(got) == 1
    eventually(lambda: len(broker.peers) > 0)  # it is accepted a moment after it is made
    assert len(broker.peers) == 1


def test_a_broken_connection_is_replaced(broker: MockBroker, pool: Pool) -> None:
    broker.on(PING, ok())
    first = pool.get(broker.address, soon())
    broker.wait_for(lambda: bool(broker.peers))
    broker.drop()
    eventually(lambda: first.closed)
    attempt = pool.last_attempt(broker.address)
    second = pool.get(broker.address, soon())
    assert second is not first
    assert pool.last_attempt(broker.address) > attempt > 0, "whoever watches must see that it is another one"
    assert second.call(ping(), soon()).code == 0


def test_attempts_of_another_pool_have_other_numbers(broker: MockBroker, pool: Pool) -> None:
    """A client may be closed, and its program goes on with a new one, while the broker restarts."""
    assert pool.last_attempt(broker.address) == 0
    pool.get(broker.address, soon())
    attempt = pool.last_attempt(broker.address)
    pool.close()
    another = Pool(ConnectOptions())
    another.get(broker.address, soon())
    assert another.last_attempt(broker.address) > attempt
    another.close()


def test_idle_connections_are_closed_but_not_those_that_wait(
    broker: MockBroker, pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    broker.on(PING, mb.never)
    with MockBroker() as other:
        idle, busy = pool.get(broker.address, soon()), pool.get(other.address, soon())
        busy.call_each([(ping(), lambda _: None)], soon(60))
        monkeypatch.setattr(pool_module, "IDLE_TIMEOUT_S", -1.0)
        assert pool.get(other.address, soon()) is busy
        assert (idle.closed, busy.closed) == (True, False)
        assert pool.get(broker.address, soon()) is not idle


def test_a_dead_address_is_dialled_once_for_all_who_wait(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    dialled, go = [], threading.Event()

    def connection(*_: object, **how: object) -> None:
        dialled.append(1)
        go.wait(60)
        raise ConnectionLost("refused", "h:1")

    class Gate:
        """The lock of an address, and how many came to it."""

        def __init__(self, lock: threading.Lock) -> None:
            self.lock, self.release, self.came = lock, lock.release, 0

        def acquire(self, timeout: float) -> bool:
            self.came += 1
            return self.lock.acquire(timeout=timeout)

    monkeypatch.setattr(pool_module, "Connection", connection)
    with ThreadPoolExecutor(8) as threads:
        calls = [threads.submit(pool.get, "h:1", soon())]
        eventually(lambda: len(dialled) == 1)
        slot: Any = pool._slots["h:1"]
        gate = slot.connect_lock = Gate(slot.connect_lock)
        calls += [threads.submit(pool.get, "h:1", soon()) for _ in range(7)]
        eventually(lambda: gate.came == 7)
        go.set()
        errors = [call.exception(5) for call in calls]
    assert all(isinstance(error, ConnectionLost) for error in errors)
    assert len({id(error) for error in errors}) == 8
    assert len(dialled) == 1


def test_who_waits_for_another_s_dialling_keeps_its_own_deadline(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    go = threading.Event()

    def connection(*_: object, **how: object) -> None:
        go.wait(60)
        raise ConnectionLost("refused", "h:1")

    monkeypatch.setattr(pool_module, "Connection", connection)
    with ThreadPoolExecutor(1) as threads:
        first = threads.submit(pool.get, "h:1", soon())
        eventually(lambda: "h:1" in pool._slots and pool._slots["h:1"].connect_lock.locked())
        with pytest.raises(CallTimeout):
            pool.get("h:1", soon(0.05))
        go.set()
        assert isinstance(first.exception(5), ConnectionLost)


def test_a_dead_address_rests_for_a_moment_that_grows(pool: Pool, dead: str, monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    monkeypatch.setattr(pool_module, "time", SimpleNamespace(monotonic=lambda: 100.0, sleep=slept.append))
    for _ in range(9):
        with pytest.raises(ConnectionLost, match="refused"):
            pool.get(dead, soon(60))
    assert 0.025 <= slept[0] <= 0.05
    assert slept[0] < slept[1] < slept[2]
    assert 1.0 <= slept[-1] <= 2.0


def test_earlier_error_is_reported_if_no_backoff_time_is_left(
    pool: Pool, dead: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool_module, "FIRST_BACKOFF_S", 60.0)
    monkeypatch.setattr(pool_module, "MAX_BACKOFF_S", 60.0)
    for _ in range(2):
        with pytest.raises(ConnectionLost, match="refused"):
            pool.get(dead, soon(1.0))


def test_who_is_not_patient_gets_the_earlier_error_at_once(
    pool: Pool, dead: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    slept: list[float] = []
    attempts: set[int] = set()
    monkeypatch.setattr(pool_module, "time", SimpleNamespace(monotonic=lambda: 100.0, sleep=slept.append))
    for _ in range(3):
        with pytest.raises(ConnectionLost, match="refused"):
            pool.get(dead, soon(), wait_for_backoff=False)
        attempts.add(pool.last_attempt(dead))
    assert slept == []
    assert len(attempts) == 1


def test_who_is_not_patient_does_not_wait_for_one_who_is(
    pool: Pool, dead: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rests, over = threading.Event(), threading.Event()

    def rest(seconds: float) -> None:
        rests.set()
        assert over.wait(60)

    monkeypatch.setattr(pool_module, "time", SimpleNamespace(monotonic=lambda: 100.0, sleep=rest))
    with pytest.raises(ConnectionLost):
        pool.get(dead, soon())
    with ThreadPoolExecutor(1) as threads:
        patient = threads.submit(pool.get, dead, soon(60))
        assert rests.wait(60)
        try:
            with pytest.raises(ConnectionLost, match="refused"):
                pool.get(dead, soon(1), wait_for_backoff=False)
        finally:
            over.set()
        assert isinstance(patient.exception(60), ConnectionLost)


def test_a_server_that_is_back_is_found_and_its_rest_forgotten(pool: Pool, dead: str) -> None:
    with pytest.raises(ConnectionLost):
        pool.get(dead, soon())
    host, port = dead.split(":")
    with socket.create_server((host, int(port))):
        assert not pool.get(dead, soon()).closed
        assert pool._slots[dead].backoff_until == 0.0


def test_addresses_are_mapped(broker: MockBroker) -> None:
    pool = Pool(ConnectOptions(address_map={"10.0.0.1:10911": broker.address}))
    broker.on(PING, ok())
    assert pool.get("10.0.0.1:10911", soon()).call(ping(), soon()).code == 0
    assert pool.connect_options.reachable_address("other:1") == "other:1"
    pool.close()


@pytest.mark.parametrize("option", [socket.TCP_USER_TIMEOUT] if hasattr(socket, "TCP_USER_TIMEOUT") else [])
def test_the_system_drops_what_is_not_confirmed_in_time(broker: MockBroker, option: int) -> None:
    for seconds in (15.0, 3.0):
        pool = Pool(ConnectOptions(undelivered_policy=UndeliveredPolicy(seconds)) if seconds < 15 else ConnectOptions())
        sock = pool.get(broker.address, soon())._channel._sock
        assert sock.getsockopt(socket.IPPROTO_TCP, option) == 1000 * seconds
        pool.close()


def test_who_hangs_up_closes_retired_connections_too(broker: MockBroker, pool: Pool) -> None:
    """An attempt of exactly-once that ends must leave nothing on the way, wherever it waits."""
    broker.on(PING, mb.never)
    retired = pool.get(broker.address, soon())
    retired.call_each([(ping(), lambda _: None)], soon(60))
    pool.retire(broker.address, retired)
    fresh = pool.get(broker.address, soon())
    pool.close_connections()
    assert (retired.closed, fresh.closed) == (True, True)
    assert not pool.get(broker.address, soon()).closed


def test_a_retired_connection_ends_after_its_last_answer(broker: MockBroker, pool: Pool) -> None:
    held = mb.Held()
    broker.on(PING, held)
    old = pool.get(broker.address, soon())
    results: list[object] = []
    old.call_each([(ping(), results.append)], soon())
    (call,) = held.wait(1)
    pool.retire(broker.address, old)
    pool.retire(broker.address, old)
    fresh = pool.get(broker.address, soon())
    assert fresh is not old
    assert not old.closed
    call.answer(ok())
    eventually(lambda: len(results) == 1)
    assert pool.get(broker.address, soon()) is fresh
    assert old.closed


def test_close_ends_everything_and_refuses_everybody(broker: MockBroker, pool: Pool) -> None:
    connection = pool.get(broker.address, soon())
    pool.close()
    assert connection.closed
    with pytest.raises(ClosedError, match="closed"):
        pool.get(broker.address, soon())


def test_connection_made_while_the_pool_closes_is_closed_too(
    broker: MockBroker, pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, real = [], pool_module.Connection

    def connection(*args: object, **how: object) -> object:
        made.append(real(*args, **how))  # type: ignore[arg-type]
        pool.close()
        return made[0]

    monkeypatch.setattr(pool_module, "Connection", connection)
    with pytest.raises(ClosedError):
        pool.get(broker.address, soon())
    assert made[0].closed


# --- a limit of connections


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> Iterator[Pool]:
    """At most two connections, any of which may be closed as soon as it is idle."""
    monkeypatch.setattr(pool_module, "MIN_IDLE_S", 0.0)
    one = Pool(ConnectOptions(connect_timeout_s=30.0, max_connections=2))
    yield one
    one.close()


@pytest.fixture
def servers() -> Iterator[list[MockBroker]]:
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(MockBroker({PING: ok()})) for _ in range(4)]


def test_at_the_limit_the_longest_idle_connection_is_closed(
    few: Pool, servers: list[MockBroker], caplog: pytest.LogCaptureFixture
) -> None:
    first, second, third, fourth = servers
    kept, longest_idle = few.get(first.address, soon()), few.get(second.address, soon())
    assert few.get(first.address, soon()) is kept
    few.get(third.address, soon())
    assert (kept.closed, longest_idle.closed) == (False, True)
    for server in servers * 5:
        assert few.get(server.address, soon()).call(ping(), soon()).code == 0
    assert sum(few.is_connected(server.address) for server in servers) == 2
    assert caplog.text.count("maxConnections") == 1
    assert few.get(fourth.address, soon()).call(ping(), soon()).code == 0


def test_requests_at_the_connection_limit_wait_for_a_free_one(few: Pool, servers: list[MockBroker]) -> None:
    held = mb.Held()
    for server in servers[:2]:
        server.on(PING, held)
        few.get(server.address, soon()).call_each([(ping(), lambda _: None)], soon(60))
    calls = held.wait(2)
    with pytest.raises(CallTimeout, match=r"all 2 connections of this client are in use.*maxConnections"):
        few.get(servers[2].address, soon(0.05))
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(few.get, servers[2].address, soon(60))
        calls[0].answer(ok())
        assert waiting.result(60).call(ping(), soon()).code == 0
    calls[1].answer(ok())


def test_a_connection_that_was_just_handed_out_is_not_closed(
    few: Pool, servers: list[MockBroker], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its caller may not have sent the request yet."""
    monkeypatch.setattr(pool_module, "MIN_IDLE_S", 1e9)
    both = [few.get(server.address, soon()) for server in servers[:2]]
    with pytest.raises(CallTimeout, match="in use"):
        few.get(servers[2].address, soon(0.05))
    assert [connection.call(ping(), soon()).code for connection in both] == [0, 0]


def test_connections_that_failed_or_broke_leave_their_place(few: Pool, servers: list[MockBroker], dead: str) -> None:
    for _ in range(3):
        with pytest.raises((ConnectionLost, CallTimeout)):
            few.get(dead, soon(0.01))
    broken = [few.get(server.address, soon()) for server in servers[:2]]
    for server, connection in zip(servers, broken, strict=False):
        server.wait_for(lambda server=server: bool(server.peers))  # type: ignore[misc]
        server.drop()
        eventually(lambda connection=connection: connection.closed)  # type: ignore[misc]
    for server in servers[2:]:
        assert few.get(server.address, soon(1.0)).call(ping(), soon()).code == 0


def test_many_threads_at_the_limit_get_answers_and_no_errors(few: Pool, servers: list[MockBroker]) -> None:
    few.connect_options = replace(few.connect_options, max_connections=3)

    def call(number: int) -> int:
        return few.get(servers[number % 4].address, soon(60)).call(ping(), soon(60)).code

    with pytest.MonkeyPatch.context() as patch, ThreadPoolExecutor(4) as threads:
        patch.setattr(pool_module, "MIN_IDLE_S", 0.2)
        assert set(threads.map(call, range(40))) == {0}
    assert sum(few.is_connected(server.address) for server in servers) <= 3


def test_addresses_of_routes_are_not_kept_without_limit(
    broker: MockBroker, pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (("_MAX_SLOTS", 10), ("_MAX_ADVERTISED_ADDRESSES", 10), ("IDLE_TIMEOUT_S", -1.0)):
        monkeypatch.setattr(pool_module, name, value)
    for number in range(50):
        pool.advertise([f"h{number}:1"], Peer.UNKNOWN)
        with pytest.raises(ConnectionLost):
            pool.get(f"[h{number}]]:1", soon())
    pool.get(broker.address, soon())
    assert len(pool._slots) < 20
    assert len(pool._advertised_peers) < 20
    assert pool.is_connected(broker.address)


def test_idle_connections_of_unused_client_are_closed_by_others(
    broker: MockBroker, pool: Pool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process keeps the clients of all options that it was ever given, each with a thread for each connection."""
    broker.on(PING, mb.never)
    unused, used = Pool(ConnectOptions()), Pool(ConnectOptions())
    with contextlib.closing(unused), contextlib.closing(used):
        idle, busy = unused.get(broker.address, soon()), used.get(broker.address, soon())
        busy.call_each([(ping(), lambda _: None)], soon(60))
        pool.get(broker.address, soon())
        assert not idle.closed
        monkeypatch.setattr(pool_module, "IDLE_TIMEOUT_S", -1.0)
        monkeypatch.setattr(pool_module._pools, "_next_due_s", 0.0)
        pool.get(broker.address, soon())
        assert (idle.closed, busy.closed) == (True, False)
        again = unused.get(broker.address, soon())
        monkeypatch.setattr(pool_module._pools, "_next_due_s", 0.0)
        with unused._lock:  # it is in use: nobody waits for it
            pool.get(broker.address, soon())
        assert not again.closed
        monkeypatch.setattr(pool_module, "_pools", LiveObjects())  # as in a forked child
        pool.get(broker.address, soon())
        assert not again.closed, "it is the parent's"
