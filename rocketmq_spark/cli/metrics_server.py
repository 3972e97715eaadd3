"""Figures for Prometheus over HTTP: each request of ``/metrics`` asks anew; what fails is a 503 with the reason.

Whoever reaches the port may ask. So few may at once, none may keep a connection, and where it serves this machine alone a
browser that was led here under another name (DNS rebinding) gets nothing.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from rocketmq_spark.cli.output import one_line
from rocketmq_spark.errors import OptionError, RocketMQError

PATH = "/metrics"
# So long a client may be silent, or take for its request, and so many may be served at once.
_IDLE_S, _AT_ONCE = 10.0, 16
_LOOPBACK = {"localhost", "127.0.0.1", "[::1]", "::1"}
_LOOK_S = 0.05  # how soon it sees that it is to end


class _Server(ThreadingHTTPServer):
    """One that has no more than a few threads: who is one too many is let go at once."""

    daemon_threads = True

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._room = threading.BoundedSemaphore(_AT_ONCE)

    def process_request(self, request: Any, client_address: Any) -> None:
        if not self._room.acquire(blocking=False):
            self.shutdown_request(request)
            return
        try:
            super().process_request(request, client_address)
        except BaseException:
            self._room.release()
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        # A client that sends a byte now and then is never silent.
        late = threading.Timer(_IDLE_S, _read_no_more, [request])
        late.daemon = True
        try:
            late.start()
            super().process_request_thread(request, client_address)
        finally:
            late.cancel()
            self._room.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Who went away in the midst is no news."""


def _read_no_more(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RD)


def _is_meant(served: str, host: str | None) -> bool:
    """Whether a request means who serves: any name may be that of a machine, but not of a loopback address."""
    if served not in _LOOPBACK or host is None:
        return True
    name = host if host.endswith("]") else host.rpartition(":")[0] or host
    return name in _LOOPBACK


@contextlib.contextmanager
def serving(address: tuple[str, int], text: Callable[[], str]) -> Iterator[str]:
    """Serve what ``text`` gives inside the block; gives the URL. Port 0 is any. One question is asked at a time."""
    asking = threading.Lock()

    class Handler(BaseHTTPRequestHandler):
        timeout = _IDLE_S

        def do_GET(self) -> None:
            if not _is_meant(address[0], self.headers.get("Host")):
                self._answer(403, "This name is not served\n")
                return
            if self.path != PATH:
                self._answer(404, f"There is {PATH} only\n")
                return
            try:
                with asking:
                    body = text()
            except RocketMQError as e:
                self._answer(503, one_line(e) + "\n")
            else:
                self._answer(200, body)

        def _answer(self, status: int, body: str) -> None:
            data = body.encode(errors="replace")
            self.send_response(status)
            self.send_header("Content-Type", "text/plain; version=0.0.4; charset=utf-8")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, format: str, *args: object) -> None:
            """Scrapes are no news."""

    try:
        server = _Server(address, Handler)
    except OSError as e:
        raise OptionError(
            f"--serve {address[0]}:{address[1]}: {e.strerror}", remedy="Choose another port, or stop what uses it"
        ) from e
    thread = threading.Thread(target=server.serve_forever, args=(_LOOK_S,), name="metrics", daemon=True)
    thread.start()
    try:
        yield f"http://{address[0]}:{server.server_address[1]}{PATH}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
