"""Connections and certificates for the drivers' tests."""

from __future__ import annotations

import ssl
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from rocketmq_spark.base.clock import Deadline
from rocketmq_spark.remoting.connection import Connection
from tests.mockbroker import MockBroker


@pytest.fixture
def broker() -> Iterator[MockBroker]:
    with MockBroker() as one:
        yield one


@pytest.fixture
def connect() -> Iterator[Callable[..., Connection]]:
    """A function that connects to an address; closed at the end of the test."""
    made: list[Connection] = []

    def make(address: str, **how: Any) -> Connection:
        made.append(Connection(address, Deadline.after(30.0), **how))
        return made[-1]

    yield make
    for connection in made:
        connection.close()


@pytest.fixture(scope="session")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A certificate of its own authority for 127.0.0.1, and its key."""
    folder = tmp_path_factory.mktemp("tls")
    cert, key = folder / "cert.pem", folder / "key.pem"
    how = "req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -subj /CN=mock"
    # From 3.13 on Python wants to be told what an authority's key is for.
    uses = ["-addext", "subjectAltName=IP:127.0.0.1", "-addext", "keyUsage=critical,keyCertSign,digitalSignature"]
    files = [*uses, "-keyout", str(key), "-out", str(cert)]
    subprocess.run(["openssl", *how.split(), *files], check=True, capture_output=True)
    return cert, key


@pytest.fixture
def server_tls(certificate: tuple[Path, Path]) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*certificate)
    return context
