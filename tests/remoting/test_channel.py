"""A socket that does not block: bytes in order, whatever it takes at a time."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest

from rocketmq_spark.base.clock import Deadline
from rocketmq_spark.remoting.transport import SocketChannel

LONG = bytes(range(256)) * 8192


@pytest.fixture
def pair() -> Iterator[tuple[SocketChannel, socket.socket]]:
    ours, theirs = socket.socketpair()
    ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    channel = SocketChannel(ours)
    with theirs:
        theirs.settimeout(10)
        yield channel, theirs
        channel.close()


def write(channel: SocketChannel, seconds: float) -> None:
    deadline = Deadline.after(seconds)
    while channel.has_unsent_bytes and channel.write(deadline):
        pass


def test_what_is_not_taken_stays_in_order_and_says_since_when(pair: tuple[SocketChannel, socket.socket]) -> None:
    channel, peer = pair
    channel.add([b"first", LONG, b"last"])
    write(channel, 0.0)
    assert channel.has_unsent_bytes
    since = channel.blocked_since
    assert since is not None
    write(channel, 0.0)
    assert channel.blocked_since == since  # not since the last try
    got = bytearray()
    while len(got) < len(LONG) + 9:
        got += peer.recv(1 << 16)
        write(channel, 0.0)
    assert bytes(got) == b"first" + LONG + b"last"
    assert (channel.has_unsent_bytes, channel.blocked_since) == (False, None)


def test_it_waits_for_room_only_while_something_is_blocked(pair: tuple[SocketChannel, socket.socket]) -> None:
    channel, peer = pair
    assert channel.wait(0.0) == (False, False)
    channel.add([LONG])
    write(channel, 0.0)
    assert channel.wait(0.0) == (False, False)
    while not channel.wait(0.0)[1]:
        peer.recv(1 << 16)
    peer.send(b"x")
    assert channel.wait(60)[0]


def test_bytes_nothing_and_the_end(pair: tuple[SocketChannel, socket.socket]) -> None:
    channel, peer = pair
    view = memoryview(bytearray(4))
    assert channel.receive(view) == -1
    peer.send(b"abcdef")
    assert channel.wait(60) == (True, False)
    assert (channel.receive(view), bytes(view)) == (4, b"abcd")
    assert (channel.receive(view), bytes(view[:2])) == (2, b"ef")
    peer.shutdown(socket.SHUT_WR)
    assert channel.wait(60) == (True, False)
    assert channel.receive(view) == 0


def test_shutdown_wakes_waiters_and_closed_channel_is_ready(
    pair: tuple[SocketChannel, socket.socket],
) -> None:
    channel, _ = pair
    channel.shutdown()
    assert channel.wait(60) == (True, False)
    channel.close()
    with pytest.raises(OSError, match="Bad file"):
        channel.shutdown()
    assert channel.wait(60) == (True, False)
