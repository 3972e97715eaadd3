"""Bytes in and out of one socket that does not block; TLS or not, it is used by one thread at a time."""

from __future__ import annotations

import select
import socket
import ssl
import threading
import time
from collections import deque
from collections.abc import Iterable

from rocketmq_spark.clock import Deadline

# How late the expiry of an asynchronous request, or a change by another thread, may be noticed.
TICK_S = 0.1


class SocketChannel:
    """A connected socket, and what it is still to take, in order.

    One thread reads; of those that write, one at a time, which is its callers' business. The lock in here is held only
    while bytes move.
    """

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self._sock = sock
        self._lock = threading.Lock()
        self._unsent: deque[memoryview] = deque()
        self.blocked_since: float | None = None

    @property
    def has_unsent(self) -> bool:
        return bool(self._unsent)

    def add(self, frames: Iterable[bytes | bytearray | memoryview]) -> None:
        self._unsent += map(memoryview, frames)

    def write(self, deadline: Deadline) -> bool:
        """Move bytes once; False when the time is over. Raises ``OSError``."""
        data = self._unsent[0]
        try:
            with self._lock:
                sent = self._sock.send(data)
        except (BlockingIOError, ssl.SSLWantWriteError, ssl.SSLWantReadError) as e:
            if self.blocked_since is None:
                self.blocked_since = time.monotonic()
            event = select.POLLIN if isinstance(e, ssl.SSLWantReadError) else select.POLLOUT
            return bool(_wait(self._sock, event, min(TICK_S, deadline.remaining()))) or not deadline.expired
        self.blocked_since = None
        if sent == len(data):
            self._unsent.popleft()
        else:
            self._unsent[0] = data[sent:]
        return True

    def wait(self, timeout_s: float) -> tuple[bool, bool]:
        """Whether there are bytes to be read, and whether what was blocked can be written now."""
        if self._pending():
            return True, False
        blocked = self.blocked_since is not None
        ready = _wait(self._sock, select.POLLIN | (select.POLLOUT if blocked else 0), timeout_s)
        return bool(ready & ~select.POLLOUT), blocked and bool(ready & select.POLLOUT)

    def _pending(self) -> bool:
        if not isinstance(self._sock, ssl.SSLSocket):
            return False
        with self._lock:
            return self._sock.pending() > 0

    def receive(self, view: memoryview) -> int:
        """Bytes read, 0 at the end of the stream, -1 when there is nothing yet. Raises ``OSError``."""
        try:
            with self._lock:
                return self._sock.recv_into(view)
        except (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError):
            return -1
        except ssl.SSLZeroReturnError:
            return 0

    def shutdown(self) -> None:
        """Wake whoever waits for bytes; raises ``OSError`` when the socket was closed already."""
        # Not the method of SSLSocket: it goes back to plain text first.
        socket.socket.shutdown(self._sock, socket.SHUT_RDWR)

    def close(self) -> None:
        with self._lock:
            self._sock.close()


def _wait(sock: socket.socket, events: int, timeout_s: float) -> int:
    """What became possible, as bits of ``poll``; 0 when nothing did in time."""
    poller = select.poll()
    try:
        poller.register(sock, events)
    except ValueError:  # another thread closed it
        return select.POLLHUP
    return sum(bits for _, bits in poller.poll(max(0.0, timeout_s) * 1000))
