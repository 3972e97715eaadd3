"""The faulty proxy itself, between a plain socket and an echoing server."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from tests.fix_proxy import FaultyProxy
from tests.mockbroker import eventually


@pytest.fixture
def echo() -> Iterator[str]:
    """Sends back what it gets; on the end of the stream it says goodbye."""
    server = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        while True:
            try:
                sock, _ = server.accept()
            except OSError:
                return
            threading.Thread(target=talk, args=(sock,), daemon=True).start()

    def talk(sock: socket.socket) -> None:
        with sock:
            try:
                while data := sock.recv(1000):
                    sock.sendall(data)
                sock.sendall(b"bye")
            except OSError:
                pass

    threading.Thread(target=serve, daemon=True).start()
    yield f"127.0.0.1:{server.getsockname()[1]}"
    server.shutdown(socket.SHUT_RDWR)
    server.close()


@pytest.fixture
def proxy(echo: str, make_proxy: Callable[[str], FaultyProxy]) -> FaultyProxy:
    return make_proxy(echo)


@pytest.fixture
def client(proxy: FaultyProxy) -> Iterator[socket.socket]:
    host, port = proxy.address.split(":")
    with socket.create_connection((host, int(port)), 5) as sock:
        sock.sendall(b"hello")
        assert sock.recv(100) == b"hello"
        yield sock


def test_requests_that_are_swallowed_have_no_answer(proxy: FaultyProxy, client: socket.socket) -> None:
    proxy.swallows = 2
    for left in (1, 0):
        client.sendall(b"lost")
        eventually(lambda left=left: proxy.swallows == left)  # type: ignore[misc]
    client.sendall(b"heard")
    assert client.recv(100) == b"heard"


def test_forwards_and_counts(proxy: FaultyProxy, client: socket.socket) -> None:
    client.shutdown(socket.SHUT_WR)
    assert client.recv(100) == b"bye"
    assert client.recv(100) == b""
    assert (proxy.forwarded, proxy.answered) == (5, 8)


def test_cuts(proxy: FaultyProxy, client: socket.socket) -> None:
    proxy.cut()
    assert client.recv(100) == b""
    host, port = proxy.address.split(":")
    with socket.create_connection((host, int(port)), 5) as again:
        again.sendall(b"x")
        assert again.recv(100) == b"x"


def test_resets(proxy: FaultyProxy, client: socket.socket) -> None:
    proxy.cut(reset=True)
    with pytest.raises(ConnectionResetError):
        client.recv(100)


def test_cuts_after_so_many_bytes(proxy: FaultyProxy, client: socket.socket) -> None:
    proxy.cut_after(3)
    client.sendall(b"abc")
    assert client.recv(100) == b""


def test_half_closes(proxy: FaultyProxy, client: socket.socket) -> None:
    proxy.half_close()
    assert client.recv(100) == b""
    client.sendall(b"still taken")


def test_swallows_and_heals(proxy: FaultyProxy, client: socket.socket) -> None:
    proxy.black_hole()
    client.sendall(b"lost?")
    client.settimeout(0.05)
    with pytest.raises(TimeoutError):
        client.recv(100)
    client.settimeout(5)
    proxy.heal()
    assert client.recv(100) == b"lost?"


def test_writes_bytes_one_by_one(proxy: FaultyProxy, client: socket.socket) -> None:
    proxy.max_per_write = 1
    client.sendall(b"abc")
    got = b""
    while len(got) < 3:
        got += client.recv(100)
    assert got == b"abc"


def test_delays(proxy: FaultyProxy, client: socket.socket) -> None:
    proxy.delay_s = 0.02
    start = time.monotonic()
    client.sendall(b"x")
    assert client.recv(100) == b"x"
    assert time.monotonic() - start >= 0.04


def test_refuses(proxy: FaultyProxy, client: socket.socket) -> None:
    proxy.refuse()
    client.sendall(b"x")
    assert client.recv(100) == b"x"
    host, port = proxy.address.split(":")
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((host, int(port)), 5)
