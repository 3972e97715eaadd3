"""What the operating system has not sent when a connection ends: over a slow way it would arrive long after that."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest

from rocketmq_spark.base.clock import Deadline
from rocketmq_spark.errors import CallTimeout
from rocketmq_spark.remoting import connection as connection_module
from rocketmq_spark.remoting.connection import Connection
from rocketmq_spark.remoting.pool import ConnectOptions, Pool
from rocketmq_spark.remoting.transport import DropUnsent, UndeliveredPolicy
from rocketmq_spark.wire.header import Command
from tests.helpers import awaited
from tests.mockbroker import PING, MockBroker, ok, ping

LARGE = 8 << 20
Connect = Callable[..., Connection]

CHILD = f"""
import sys, time
from rocketmq_spark.base.clock import Deadline
from rocketmq_spark.remoting.connection import Connection
from rocketmq_spark.remoting.transport import DropUnsent, UndeliveredPolicy
from rocketmq_spark.wire.header import Command
policy = UndeliveredPolicy(drop_unsent=DropUnsent[sys.argv[2]])
connection = Connection(sys.argv[1], Deadline.after(30), undelivered_policy=policy)
connection.call_each([(Command({int(PING)}, body=bytes({LARGE})), lambda outcome: None)], Deadline.after(0.5))
print("blocked", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def slow() -> Iterator[socket.socket]:
    """Takes little before it is read from."""
    with socket.socket() as server:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 8192)
        server.bind(("127.0.0.1", 0))
        server.listen()
        yield server


def address(server: socket.socket) -> str:
    return f"127.0.0.1:{server.getsockname()[1]}"


def ends_with_reset(peer: socket.socket) -> bool:
    """Read all that comes: whether the connection was cut, or everything handed to the other system came."""
    try:
        while peer.recv(1 << 20):
            pass
    except ConnectionResetError:
        return True
    return False


@pytest.mark.parametrize(
    ("drops", "cut"), [(DropUnsent.NEVER, False), (DropUnsent.ON_CLOSE, True), (DropUnsent.ON_EXIT, True)]
)
def test_a_connection_that_is_closed_while_requests_wait(
    slow: socket.socket, connect: Connect, drops: DropUnsent, cut: bool
) -> None:
    connection = connect(address(slow), undelivered_policy=UndeliveredPolicy(drop_unsent=drops))
    peer, _ = slow.accept()
    with peer:
        connection.call_each([(Command(PING, body=bytes(LARGE)), lambda outcome: None)], Deadline.after(0.1))
        awaited(lambda: connection._channel.blocked_since, bool)
        connection.close()
        assert ends_with_reset(peer) is cut


def test_a_request_that_was_given_up_counts_as_one_that_waits(
    slow: socket.socket, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By its caller, that is: the thread that reads, which would do so at the same moment, has other work."""
    monkeypatch.setattr(connection_module, "TICK_S", 60.0)
    connection = connect(address(slow), undelivered_policy=UndeliveredPolicy(drop_unsent=DropUnsent.ON_CLOSE))
    peer, _ = slow.accept()
    with peer:
        with pytest.raises(CallTimeout):
            connection.call(Command(PING, body=bytes(LARGE)), Deadline.after(0.1))
        assert not connection.waiting_count
        connection.close()
        assert ends_with_reset(peer)


def test_what_expects_no_answer_is_still_sent(slow: socket.socket, connect: Connect) -> None:
    connection = connect(address(slow), undelivered_policy=UndeliveredPolicy(drop_unsent=DropUnsent.ON_CLOSE))
    peer, _ = slow.accept()
    with peer:
        connection.send_oneway(Command(PING, body=bytes(100_000)), Deadline.after(5.0))
        connection.close()
        assert not ends_with_reset(peer)


@pytest.mark.parametrize(("drops", "cut"), [(DropUnsent.ON_CLOSE, False), (DropUnsent.ON_EXIT, True)])
def test_a_process_that_dies(slow: socket.socket, drops: DropUnsent, cut: bool) -> None:
    command = [sys.executable, "-c", CHILD, address(slow), drops.name]
    with (
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child,
        contextlib.ExitStack() as end,
    ):
        end.callback(child.kill)
        peer, _ = slow.accept()
        end.enter_context(peer)
        assert child.stdout is not None
        assert child.stdout.readline() == b"blocked\n"
        child.kill()
        child.wait()
        assert ends_with_reset(peer) is cut


def test_a_pool_that_hangs_up_goes_on_with_other_connections(broker: MockBroker) -> None:
    pool, soon = (
        Pool(ConnectOptions(undelivered_policy=UndeliveredPolicy(drop_unsent=DropUnsent.ON_EXIT))),
        Deadline.after(5.0),
    )
    broker.on(PING, ok())
    first = pool.get(broker.address, soon)
    pool.close_connections()
    assert first.closed
    assert pool.get(broker.address, soon).call(ping(), soon).code == 0
    pool.close()
