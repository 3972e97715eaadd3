"""A faulty TCP proxy between a client and a server: the network that production has.

``make_proxy(address)`` gives one; its ``address`` goes where the server's would, for instance through ``addressMap``.
Faults are switched on and off while connections are up.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from typing import Self

import pytest

CHUNK = 1 << 16


class Link:
    """One connection through the proxy: two sockets, a thread for each direction."""

    def __init__(self, proxy: FaultyProxy, client: socket.socket, server: socket.socket) -> None:
        self.client = client
        self.server = server
        self._proxy = proxy
        self._cut = False
        self._threads = [
            threading.Thread(target=self._pump, args=pair, daemon=True)
            for pair in ((client, server, False), (server, client, True))
        ]
        for thread in self._threads:
            thread.start()

    def _pump(self, source: socket.socket, sink: socket.socket, answers: bool) -> None:
        try:
            while data := source.recv(CHUNK):
                self._proxy.count(len(data), answers)
                self._proxy.pass_on(sink, data, answers)
            if not self._cut:
                sink.shutdown(socket.SHUT_WR)
        except OSError:
            pass

    def cut(self, reset: bool) -> None:
        self._cut = True
        for sock in (self.client, self.server):
            try:
                if reset:
                    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                    sock.shutdown(socket.SHUT_RD)
                else:
                    sock.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass
        self.close()

    def close(self) -> None:
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(0 if self._proxy.held else 5)
        for sock in (self.client, self.server):
            sock.close()


class FaultyProxy:
    """Forwards bytes until it is told otherwise. ``forwarded`` and ``answered`` count bytes to and from the server, ``cuts``
    how often it ended a connection in the midst."""

    def __init__(self, target: str) -> None:
        self.target = target
        self.links: list[Link] = []
        self.forwarded = 0
        self.answered = 0
        self.cuts = 0
        self.delay_s = 0.0
        self.max_per_write = 0
        self.held = False
        self.swallows = 0  # so many requests from now on lead nowhere: nobody but who asks again has an answer
        self._cut_after: int | None = None
        self._may_pass = threading.Event()
        self._may_pass.set()
        self._closed = threading.Event()
        self._lock = threading.Lock()

    def __enter__(self) -> Self:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self._thread = threading.Thread(target=self._accept, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._closed.set()
        self.heal()
        self.refuse()
        self.cut()

    # --- faults

    def cut(self, reset: bool = False) -> None:
        """End all connections; new ones are let through."""
        with self._lock:
            links, self.links = self.links, []
            self.cuts += bool(links)
        for link in links:
            link.cut(reset)

    def cut_after(self, answer_bytes: int) -> None:
        """End all connections once the server has sent so many bytes more."""
        self._cut_after = self.answered + answer_bytes

    def half_close(self) -> None:
        """The client sees the end of the stream, but may go on writing."""
        for link in self.links:
            link.client.shutdown(socket.SHUT_WR)

    def black_hole(self) -> None:
        """Connections stay up and new ones are accepted, but no byte comes through."""
        self.held = True
        self._may_pass.clear()

    def heal(self) -> None:
        self.held = False
        self._may_pass.set()
        self.delay_s = 0.0
        self.max_per_write = 0
        self._cut_after = None

    def refuse(self) -> None:
        """No new connections any more."""
        try:
            self._listener.shutdown(socket.SHUT_RDWR)
        except OSError:
            return
        self._listener.close()
        self._thread.join(60)

    # --- how it works

    def count(self, size: int, answers: bool) -> None:
        with self._lock:
            if answers:
                self.answered += size
            else:
                self.forwarded += size

    def pass_on(self, sink: socket.socket, data: bytes, answers: bool) -> None:
        if self.delay_s:
            self._closed.wait(self.delay_s)
        self._may_pass.wait()
        if self.swallows and not answers:
            self.swallows -= 1
            return
        if self._cut_after is not None and self.answered >= self._cut_after:
            self._cut_after = None
            threading.Thread(target=self.cut, daemon=True).start()
            raise ConnectionAbortedError
        step = self.max_per_write or len(data)
        if step < len(data):
            sink.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for at in range(0, len(data), step):
            sink.sendall(data[at : at + step])

    def connect(self) -> socket.socket:
        """A connection to the server; for a client that has just come."""
        host, port = self.target.rsplit(":", 1)
        return socket.create_connection((host, int(port)), 5)

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            try:
                server = self.connect()
                server.settimeout(None)
            except OSError:
                client.close()
                continue
            with self._lock:
                self.links.append(Link(self, client, server))


@pytest.fixture
def make_proxy() -> Iterator[Callable[[str], FaultyProxy]]:
    """A function that puts a proxy in front of an address; all are closed at the end of the test."""
    made: list[FaultyProxy] = []

    def make(target: str) -> FaultyProxy:
        made.append(FaultyProxy(target).__enter__())
        return made[-1]

    yield make
    for proxy in made:
        proxy.__exit__()


@pytest.fixture
def black_hole() -> Iterator[str]:
    """An address that answers no attempt to connect: its queue of waiting connections is full."""
    with contextlib.ExitStack() as stack:
        sock = stack.enter_context(socket.socket())
        sock.bind(("127.0.0.1", 0))
        sock.listen(0)
        for _ in range(3):
            waiting = stack.enter_context(socket.socket())
            waiting.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                waiting.connect(sock.getsockname())
        yield f"127.0.0.1:{sock.getsockname()[1]}"


@pytest.fixture
def nobody() -> Iterator[str]:
    """An address where nobody listens."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        yield f"127.0.0.1:{sock.getsockname()[1]}"
