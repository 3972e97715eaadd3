"""Figures over HTTP."""

from __future__ import annotations

import socket
import threading
import time
from http.client import HTTPConnection
from urllib.parse import urlsplit

import pytest

from rocketmq_spark.base import exposition
from rocketmq_spark.base.exposition import serve
from rocketmq_spark.errors import CallTimeout
from tests.mockbroker import eventually

LOCAL = ("127.0.0.1", 0)


def get(url: str, path: str | None = None) -> tuple[int, str, str | None]:
    parts = urlsplit(url)
    connection = HTTPConnection(parts.netloc, timeout=60)
    connection.request("GET", path or parts.path)
    answer = connection.getresponse()
    found = answer.status, answer.read().decode(), answer.getheader("Content-Type")
    connection.close()
    return found


def test_each_request_gets_fresh_metrics_and_failure_returns_503() -> None:
    said = iter(["a 1\n", CallTimeout("no answer", "h:1", remedy="Look"), "a 2\n", "a 2\n"])

    def text() -> str:
        value = next(said)
        if isinstance(value, str):
            return value
        raise value

    with serve(LOCAL, text, failure_types=CallTimeout) as url:
        assert get(url) == (200, "a 1\n", "text/plain; version=0.0.4; charset=utf-8")
        assert get(url)[:2] == (503, "[ROCKETMQ_TIMEOUT] no answer (at h:1). Look\n")
        assert get(url)[:2] == (200, "a 2\n")
        assert get(url, "/metrics?name=b")[:2] == (200, "a 2\n")
        assert get(url, "/")[:2] == (404, "There is /metrics only\n")


def test_any_other_error_is_a_503_and_one_line_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    """Of each kind, as texts may differ each time."""
    said = iter([ValueError("a\nbug"), ValueError("another"), KeyError("b"), "a 1\n", ValueError("c")])

    def text() -> str:
        value = next(said)
        if isinstance(value, str):
            return value
        raise value

    with serve(LOCAL, text, failure_types=CallTimeout) as url:
        for _ in range(3):
            status, body, _ = get(url)
            assert (status, body) == (503, "The figures cannot be computed; the log of this process has the error\n")
        assert [get(url)[0] for _ in range(2)] == [200, 503]
    problem = "the figures of /metrics cannot be computed: "
    assert caplog.messages == [problem + r"ValueError('a\nbug')", problem + "KeyError('b')"]


def test_after_the_block_nobody_listens() -> None:
    with serve(LOCAL, lambda: "") as url:
        port = urlsplit(url).port
    assert port
    with pytest.raises(ConnectionRefusedError), socket.create_connection(("127.0.0.1", port)):
        pass


def test_a_port_that_is_taken_is_said() -> None:
    with serve(LOCAL, lambda: "") as url:
        taken = serve(("127.0.0.1", urlsplit(url).port or 0), lambda: "")
        with pytest.raises(OSError, match="in use"):
            taken.__enter__()
    with pytest.raises(OSError, match="port must be 0-65535"), serve(("127.0.0.1", 70_000), lambda: ""):
        pass


def asked(url: str, host: str | None) -> bytes:
    parts = urlsplit(url)
    with socket.create_connection((parts.hostname or "", parts.port or 0), timeout=60) as sock:
        sock.sendall(f"GET {parts.path} HTTP/1.0\r\n{f'Host: {host}' if host else 'X: y'}\r\n\r\n".encode())
        return sock.recv(65536)


def test_request_with_foreign_host_header_is_refused_on_loopback() -> None:
    with serve(LOCAL, lambda: "a 1\n") as url:
        for host in ("localhost", "localhost:9464", "127.0.0.1:1", "[::1]:9464", "[::1]", None):
            assert b"200" in asked(url, host).split(b"\r\n")[0], host
        for host in ("evil.example", "evil.example:9464", "127.0.0.1.evil.example", "localhost.evil.example:80"):
            assert b"403" in asked(url, host).split(b"\r\n")[0], host
    with serve(("127.0.0.2", 0), lambda: "a 1\n") as url:
        assert b"200" in asked(url, "127.0.0.2:9464").split(b"\r\n")[0]
        assert b"403" in asked(url, "evil.example:9464").split(b"\r\n")[0]
    with serve(("0.0.0.0", 0), lambda: "a 1\n") as url:
        port = urlsplit(url).port
        assert b"200" in asked(f"http://127.0.0.1:{port}/metrics", "node7.example:9464").split(b"\r\n")[0]


def test_idle_connections_keep_no_scraper_out() -> None:
    with serve(LOCAL, lambda: "a 1\n") as url:
        parts = urlsplit(url)
        place = (parts.hostname or "", parts.port or 0)
        silent = [socket.create_connection(place, timeout=60) for _ in range(2 * exposition._MAX_CLIENTS)]
        begun_s = time.monotonic()
        assert b"200" in asked(url, "localhost").split(b"\r\n")[0]
        assert time.monotonic() - begun_s < exposition._IDLE_S / 2
        assert silent[0].recv(1) == b"", "the oldest ones are closed"
        for each in silent:
            each.close()


def test_a_new_connection_is_closed_while_all_are_served(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exposition, "_MAX_CLIENTS", 3)
    may_end, arrived, note = threading.Event(), threading.Semaphore(0), exposition._Server.note_request_read

    def noted(server: exposition._Server, request: socket.socket) -> None:
        note(server, request)
        arrived.release()

    monkeypatch.setattr(exposition._Server, "note_request_read", noted)

    def figures() -> str:
        assert may_end.wait(60)
        return "a 1\n"

    with serve(LOCAL, figures) as url:
        parts = urlsplit(url)
        place = (parts.hostname or "", parts.port or 0)
        served = [socket.create_connection(place, timeout=60) for _ in range(3)]
        for each in served:
            each.sendall(b"GET /metrics HTTP/1.0\r\nHost: localhost\r\n\r\n")
        assert all(arrived.acquire(timeout=60) for _ in served)
        assert one_too_many(place) == b""
        may_end.set()
        assert all(b"200" in each.recv(65536) for each in served)
        eventually(lambda: b"200" in asked_or_closed(url))
        for each in served:
            each.close()


def one_too_many(place: tuple[str, int]) -> bytes:
    """What a connection reads that sends nothing; b"open" for one that is not closed at once."""
    with socket.create_connection(place, timeout=0.5) as sock:
        try:
            return sock.recv(1)
        except TimeoutError:
            return b"open"
        except ConnectionError:
            return b""


def asked_or_closed(url: str) -> bytes:
    try:
        return asked(url, "localhost")
    except ConnectionError:
        return b""


def test_a_silent_connection_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exposition, "_IDLE_S", 0.05)
    with serve(LOCAL, lambda: "a 1\n") as url:
        parts = urlsplit(url)
        with socket.create_connection((parts.hostname or "", parts.port or 0), timeout=60) as sock:
            assert sock.recv(1) == b""


def test_a_request_that_comes_byte_by_byte_keeps_no_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exposition, "_IDLE_S", 0.5)
    with serve(LOCAL, lambda: "a 1\n") as url:
        parts = urlsplit(url)
        with socket.create_connection((parts.hostname or "", parts.port or 0), timeout=60) as sock:
            sock.settimeout(0.1)

            def ended() -> bool:
                try:
                    sock.sendall(b"G")
                    return sock.recv(1) == b""
                except TimeoutError:
                    return False
                except ConnectionError:
                    return True

            eventually(ended, 30)


def test_text_that_is_no_unicode_is_shown_as_far_as_it_is() -> None:
    with serve(LOCAL, lambda: 'a{t="\ud800"} 1\n') as url:
        assert get(url)[:2] == (200, 'a{t="?"} 1\n')
