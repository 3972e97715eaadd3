"""Metrics for Prometheus: their text format, which prometheus-client writes (extra ``metrics``), and a server for it.

Anyone who can connect to the port may send requests. So the server handles few requests at once, and keeps no connection open. A
server that listens only on loopback rejects requests whose Host header names another host (DNS rebinding).
"""

from __future__ import annotations

import contextlib
import errno
import logging
import socket
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any, NamedTuple

from rocketmq_spark.base import extras
from rocketmq_spark.base.complaints import LogThrottle
from rocketmq_spark.base.hosts import is_loopback

if TYPE_CHECKING:
    from prometheus_client import Metric

logger = logging.getLogger(__name__)

PATH = "/metrics"
DEFAULT_HOST = "127.0.0.1"
# A client may be silent for this number of seconds, and its whole request may take as long. The second number limits the
# clients that are served at once.
_IDLE_S, _MAX_CLIENTS = 10.0, 16
_STOP_CHECK_S = 0.05  # how often the server checks whether to stop
_COUNTER_SUFFIX = "_total"

Samples = Sequence[tuple[Mapping[str, str], float]]


class Family(NamedTuple):
    """A metric: name, type (``gauge`` or ``counter``), meaning, and values by labels. Unknown values are omitted."""

    name: str
    kind: str
    help: str
    samples: Samples


def install_command() -> str | None:
    """Return the command that installs prometheus-client; None if it is installed."""
    return None if extras.is_installed("prometheus_client") else extras.install_command(extras.METRICS)


def metrics(families: Sequence[Family]) -> Iterator[Metric]:
    """Convert to prometheus-client's metrics, for the ``collect`` of a collector."""
    from prometheus_client import Metric

    for family in families:
        # prometheus-client appends ``_total`` to the names of counters.
        metric = Metric(family.name.removesuffix(_COUNTER_SUFFIX), family.help, family.kind)
        for labels, value in family.samples:
            metric.add_sample(family.name, {name: _replace_surrogates(text) for name, text in labels.items()}, value)
        yield metric


def text(families: Sequence[Family]) -> str:
    """Return the metrics in Prometheus' text format, version 0.0.4."""
    from prometheus_client import generate_latest

    return generate_latest(_Collector(families)).decode()


class _Collector:
    def __init__(self, families: Sequence[Family]) -> None:
        self._families = families

    def collect(self) -> Iterator[Metric]:
        return metrics(self._families)


def _replace_surrogates(value: str) -> str:
    """Replace single surrogates, which names from Java may contain and which cannot be encoded."""
    return value.encode(errors="replace").decode()


class _Server(ThreadingHTTPServer):
    """A server with a limited number of threads.

    At the limit, a new connection closes the oldest connection whose request has not arrived, so idle connections keep no
    client out. If all requests have arrived, the new connection is closed at once. The server of prometheus-client has neither
    a limit nor a timeout.
    """

    daemon_threads = True

    def __init__(self, *args: Any) -> None:
        try:
            super().__init__(*args)
        except OverflowError as e:  # the port number is too large
            raise OSError(errno.EINVAL, str(e)) from e
        self._lock = threading.Lock()
        # The oldest connection is first; the value is True if the whole request has arrived.
        self._connections: dict[socket.socket, bool] = {}

    def process_request(self, request: Any, client_address: Any) -> None:
        with self._lock:
            silent_connection = next(
                (connection for connection, has_arrived in self._connections.items() if not has_arrived), None
            )
            is_full = len(self._connections) >= _MAX_CLIENTS
            if is_full and silent_connection is not None:
                del self._connections[silent_connection]
                _stop_reading(silent_connection)  # the thread of this connection ends
            is_admitted = not is_full or silent_connection is not None
            if is_admitted:
                self._connections[request] = False
        if not is_admitted:
            self.shutdown_request(request)
            return
        try:
            super().process_request(request, client_address)
        except BaseException:
            self._remove_connection(request)
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        # The whole request has a time limit, because a client that sends a byte from time to time is never silent.
        timeout_timer = threading.Timer(_IDLE_S, _stop_reading, [request])
        timeout_timer.daemon = True
        try:
            timeout_timer.start()
            super().process_request_thread(request, client_address)
        finally:
            timeout_timer.cancel()
            self._remove_connection(request)

    def note_request_read(self, request: socket.socket) -> None:
        """Note that the whole request was read."""
        with self._lock:
            if request in self._connections:
                self._connections[request] = True

    def _remove_connection(self, request: socket.socket) -> None:
        with self._lock:
            self._connections.pop(request, None)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Log nothing, because clients may disconnect at any time."""


def _stop_reading(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RD)


def _is_allowed_host(served_host: str, host: str | None) -> bool:
    """Whether the Host header is acceptable. On a loopback address, only loopback names are acceptable; otherwise any name is."""
    if not is_loopback(served_host) or host is None:
        return True
    name = host if host.endswith("]") else host.rpartition(":")[0] or host
    return is_loopback(name.strip("[]"))


_FailureTypes = type[Exception] | tuple[()]
_FormatFailure = Callable[[Exception], str]


@contextlib.contextmanager
def serve(
    address: tuple[str, int],
    compute_text: Callable[[], str],
    failure_types: _FailureTypes = (),
    format_failure: _FormatFailure = str,
) -> Iterator[str]:
    """Serve the result of ``compute_text`` inside the block, and yield the URL. One request at a time calls ``compute_text``.

    If ``compute_text`` raises one of ``failure_types``, the response is a 503 with one line of text, which ``format_failure``
    returns. After any other exception, the response is a 503 without the text of the exception. The log then gets one line, at
    most every five minutes for each type of exception.

    Port 0 means any free port.

    Raises ``OSError`` if the server cannot listen on the address.
    """
    text_lock = threading.Lock()
    log_throttle = LogThrottle()

    def report(error: Exception) -> None:
        with text_lock:
            is_due = log_throttle.level(PATH, error) == logging.WARNING
        if is_due:  # each scrape raises the error again, perhaps with another text
            logger.error("the figures of %s cannot be computed: %r", PATH, error)

    class Handler(BaseHTTPRequestHandler):
        timeout = _IDLE_S

        def do_GET(self) -> None:
            server.note_request_read(self.connection)
            if not _is_allowed_host(address[0], self.headers.get("Host")):
                self._answer(403, "This name is not served\n")
                return
            if self.path.partition("?")[0] != PATH:
                self._answer(404, f"There is {PATH} only\n")
                return
            try:
                with text_lock:
                    body = compute_text()
            except failure_types as e:
                self._answer(503, format_failure(e) + "\n")
            except Exception as e:  # noqa: BLE001 - a fault of this package; its text may hold more than clients may read
                report(e)
                self._answer(503, "The figures cannot be computed; the log of this process has the error\n")
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
            """Scrapes are not logged."""

    server = _Server(address, Handler)
    thread = threading.Thread(target=server.serve_forever, args=(_STOP_CHECK_S,), name="metrics", daemon=True)
    thread.start()
    try:
        yield f"http://{address[0]}:{server.server_address[1]}{PATH}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
