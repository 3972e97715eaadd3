"""Figures over HTTP."""

from __future__ import annotations

import socket
from http.client import HTTPConnection
from urllib.parse import urlsplit

import pytest

from rocketmq_spark.cli.metrics_server import serving
from rocketmq_spark.errors import CallTimeout, OptionError

LOCAL = ("127.0.0.1", 0)


def get(url: str, path: str | None = None) -> tuple[int, str, str | None]:
    parts = urlsplit(url)
    connection = HTTPConnection(parts.netloc, timeout=60)
    connection.request("GET", path or parts.path)
    answer = connection.getresponse()
    found = answer.status, answer.read().decode(), answer.getheader("Content-Type")
    connection.close()
    return found


def test_each_request_asks_anew_and_a_failure_is_a_503_that_says_why() -> None:
    said = iter(["a 1\n", CallTimeout("no answer", "h:1", remedy="Look"), "a 2\n"])

    def text() -> str:
        value = next(said)
        if isinstance(value, str):
            return value
        raise value

    with serving(LOCAL, text) as url:
        assert get(url) == (200, "a 1\n", "text/plain; version=0.0.4; charset=utf-8")
        assert get(url)[:2] == (503, "[ROCKETMQ_TIMEOUT] no answer (at h:1). Look\n")
        assert get(url)[:2] == (200, "a 2\n")
        assert get(url, "/")[:2] == (404, "There is /metrics only\n")


def test_after_the_block_nobody_listens() -> None:
    with serving(LOCAL, lambda: "") as url:
        port = urlsplit(url).port
    assert port
    with pytest.raises(ConnectionRefusedError), socket.create_connection(("127.0.0.1", port)):
        pass


def test_a_port_that_is_taken_is_said() -> None:
    with serving(LOCAL, lambda: "") as url:
        taken = serving(("127.0.0.1", urlsplit(url).port or 0), lambda: "")
        with pytest.raises(OptionError, match=r"--serve 127\.0\.0\.1:\d+: .*in use"):
            taken.__enter__()
