"""Figures for Prometheus over HTTP: each request of ``/metrics`` asks anew; what fails is a 503 with the reason."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from rocketmq_spark.cli.output import one_line
from rocketmq_spark.errors import OptionError, RocketMQError

PATH = "/metrics"
_LOOK_S = 0.05  # how soon it sees that it is to end


@contextlib.contextmanager
def serving(address: tuple[str, int], text: Callable[[], str]) -> Iterator[str]:
    """Serve what ``text`` gives inside the block; gives the URL. Port 0 is any. One question is asked at a time."""
    asking = threading.Lock()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
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
            data = body.encode()
            self.send_response(status)
            self.send_header("Content-Type", "text/plain; version=0.0.4; charset=utf-8")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, format: str, *args: object) -> None:
            """Scrapes are no news."""

    try:
        server = ThreadingHTTPServer(address, Handler)
    except OSError as e:
        raise OptionError(
            f"--serve {address[0]}:{address[1]}: {e.strerror}", remedy="Choose another port, or stop what uses it"
        ) from e
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, args=(_LOOK_S,), name="metrics", daemon=True)
    thread.start()
    try:
        yield f"http://{address[0]}:{server.server_address[1]}{PATH}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
