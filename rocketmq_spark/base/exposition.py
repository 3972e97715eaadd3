"""Metrics for Prometheus: their text format, which prometheus-client writes (extra ``metrics``), and a server for it.

Anyone who can connect to the port may send requests, so few are served at once and no connection is kept open. A server that
listens only on loopback rejects requests whose Host header names another host (DNS rebinding).
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
# How long a client may be silent or take for its request, and how many clients are served at once.
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
    return None if extras.installed("prometheus_client") else extras.install_command(extras.METRICS)


def metrics(families: Sequence[Family]) -> Iterator[Metric]:
    """Convert to prometheus-client's metrics, for the ``collect`` of a collector."""
    from prometheus_client import Metric

    for family in families:
        # prometheus-client appends ``_total`` to the names of counters.
        made = Metric(family.name.removesuffix(_COUNTER_SUFFIX), family.help, family.kind)
        for labels, value in family.samples:
            made.add_sample(family.name, {name: _encodable(text) for name, text in labels.items()}, value)
        yield made


def text(families: Sequence[Family]) -> str:
    """Return the metrics in Prometheus' text format, version 0.0.4."""
    from prometheus_client import generate_latest

    return generate_latest(_Collector(families)).decode()


class _Collector:
    def __init__(self, families: Sequence[Family]) -> None:
        self._families = families

    def collect(self) -> Iterator[Metric]:
        return metrics(self._families)


def _encodable(value: str) -> str:
    """Replace single surrogates, which names from Java may contain and which cannot be encoded."""
    return value.encode(errors="replace").decode()


class _Server(ThreadingHTTPServer):
    """A server with a limited number of threads.

    At the limit, a new connection closes the oldest one whose request has not arrived, so that idle connections keep no client
    out. If all requests have arrived, the new connection is closed at once. (The server of prometheus-client has neither a
    limit nor a timeout.)
    """

    daemon_threads = True

    def __init__(self, *args: Any) -> None:
        try:
            super().__init__(*args)
        except OverflowError as e:  # the number is no port
            raise OSError(errno.EINVAL, str(e)) from e
        self._lock = threading.Lock()
        self._open: dict[socket.socket, bool] = {}  # oldest first, with whether the request has arrived

    def process_request(self, request: Any, client_address: Any) -> None:
        with self._lock:
            silent = next((each for each, arrived in self._open.items() if not arrived), None)
            full = len(self._open) >= _MAX_CLIENTS
            if full and silent is not None:
                del self._open[silent]
                _stop_reading(silent)  # its thread ends
            admitted = not full or silent is not None
            if admitted:
                self._open[request] = False
        if not admitted:
            self.shutdown_request(request)
            return
        try:
            super().process_request(request, client_address)
        except BaseException:
            self._ended(request)
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        # A client that sends a byte from time to time would never be silent.
        late = threading.Timer(_IDLE_S, _stop_reading, [request])
        late.daemon = True
        try:
            late.start()
            super().process_request_thread(request, client_address)
        finally:
            late.cancel()
            self._ended(request)

    def arrived(self, request: socket.socket) -> None:
        """Note that the whole request was read."""
        with self._lock:
            if request in self._open:
                self._open[request] = True

    def _ended(self, request: socket.socket) -> None:
        with self._lock:
            self._open.pop(request, None)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Log nothing: clients may disconnect at any time."""


def _stop_reading(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RD)


def _is_allowed_host(served: str, host: str | None) -> bool:
    """Whether the Host header is acceptable: any name for a machine's address, only loopback names for a loopback address."""
    if not is_loopback(served) or host is None:
        return True
    name = host if host.endswith("]") else host.rpartition(":")[0] or host
    return is_loopback(name.strip("[]"))


_Failures = type[Exception] | tuple[()]
_Format = Callable[[Exception], str]


@contextlib.contextmanager
def serve(
    address: tuple[str, int], figures: Callable[[], str], failures: _Failures = (), shown: _Format = str
) -> Iterator[str]:
    """Serve the result of ``figures`` inside the block, and yield the URL. Port 0 takes any free port. One request
    at a time calls ``figures``. If it raises one of ``failures``, the response is a 503 with its text in one line, formatted by
    ``shown``. After any other exception, the response is a 503 without the text of the exception, and the log
    gets one line, at most every five minutes for each type of exception.

    Raises ``OSError`` if the server cannot listen on the address.
    """
    asking = threading.Lock()
    complaints = LogThrottle()

    def report(error: Exception) -> None:
        with asking:
            due = complaints.level(PATH, error) == logging.WARNING
        if due:  # each scrape raises it again, perhaps with another text
            logger.error("the figures of %s cannot be computed: %r", PATH, error)

    class Handler(BaseHTTPRequestHandler):
        timeout = _IDLE_S

        def do_GET(self) -> None:
            server.arrived(self.connection)
            if not _is_allowed_host(address[0], self.headers.get("Host")):
                self._answer(403, "This name is not served\n")
                return
            if self.path.partition("?")[0] != PATH:
                self._answer(404, f"There is {PATH} only\n")
                return
            try:
                with asking:
                    body = figures()
            except failures as e:
                self._answer(503, shown(e) + "\n")
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
