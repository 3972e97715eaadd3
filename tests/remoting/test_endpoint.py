"""Addresses, connecting, TLS, and what the operating system's errors become."""

from __future__ import annotations

import contextlib
import errno
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rocketmq_spark.base.clock import Deadline
from rocketmq_spark.base.tls_files import ReloadedValue
from rocketmq_spark.errors import (
    CallTimeout,
    CertificateRefused,
    ConnectionLost,
    OptionError,
    RocketMQError,
)
from rocketmq_spark.options import paths
from rocketmq_spark.remoting import transport
from rocketmq_spark.remoting.connection import Connection
from rocketmq_spark.remoting.transport import TlsSettings, is_loopback, parse_address, ssl_context
from rocketmq_spark.wire.header import Command
from tests.fix_clusters import certificates
from tests.helpers import awaited
from tests.mockbroker import PING, MockBroker, never, ok, ping


@given(st.from_regex(r"[a-z0-9.-]{1,30}", fullmatch=True), st.integers(0, 65535))
def test_addresses(host: str, port: int) -> None:
    assert parse_address(f"{host}:{port}") == (host, port)


@pytest.mark.parametrize(
    ("address", "expected"),
    [("[::1]:9876", ("::1", 9876)), ("[fe80::1%eth0]:1", ("fe80::1%eth0", 1)), ("::1:9876", ("::1", 9876))],
)
def test_addresses_of_ipv6_are_split_at_the_last_colon(address: str, expected: tuple[str, int]) -> None:
    assert parse_address(address) == expected


@pytest.mark.parametrize(
    "address",
    [
        "", "host", "host:", ":9876", "host:x", "host:70000", "host:-1", "host:١", "host:" + "9" * 5000, "[]:1", "[[::1]]:1",
        "[::1:1", "::1]:1", "[host]]:1", "[[host]:1", "h[o]st:1", "]host[:1",
    ],
)  # fmt: skip
def test_what_is_no_address_is_said_so(address: str) -> None:
    """A server told it, which may tell a better one soon."""
    with pytest.raises(ConnectionLost, match="host:port") as caught:
        parse_address(address)
    assert caught.value.retriable


def connect_to(address: str, tls: TlsSettings | None = None) -> None:
    transport.connect(address, Deadline.after(30.0), tls).close()


@pytest.mark.parametrize(
    ("address", "loopback"),
    [
        ("127.0.0.1:10911", True),
        ("127.8.9.10:1", True),
        ("[::1]:10911", True),
        ("[::ffff:127.0.0.1]:10911", True),
        ("localhost:10911", True),
        ("LocalHost:10911", True),
        ("10.0.0.5:10911", False),
        ("0.0.0.0:10911", False),
        ("[::]:10911", False),
        ("[fe80::1]:10911", False),
        ("localhost.example:10911", False),
        ("127.0.0.1.example:10911", False),
        ("127.1:10911", False),
        ("127.0.0.1", False),
        ("", False),
    ],
)
def test_which_addresses_stay_on_this_machine(address: str, loopback: bool) -> None:
    assert is_loopback(address) is loopback


def test_nobody_listens() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    with pytest.raises(ConnectionLost, match="cannot connect: Connection refused") as caught:
        connect_to(address)
    assert caught.value.addr == address
    assert isinstance(caught.value.__cause__, ConnectionRefusedError)


def resolved(monkeypatch: pytest.MonkeyPatch, *places: tuple[str, int]) -> None:
    """A host name with these addresses, in this order."""
    found = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", place) for place in places]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_: found)


@pytest.fixture
def deaf() -> Iterator[tuple[str, int]]:
    """An address that accepts no connection and refuses none."""
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=0))
        for _ in range(4):
            waiting = stack.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(server.getsockname())
        yield server.getsockname()


def test_all_addresses_of_a_host_share_one_timeout(monkeypatch: pytest.MonkeyPatch, deaf: tuple[str, int]) -> None:
    resolved(monkeypatch, *[deaf] * 10)
    began = time.monotonic()
    with pytest.raises(CallTimeout, match="cannot connect"):
        transport.connect("many.example:1", Deadline.after(0.3), None)
    assert 0.2 < time.monotonic() - began < 1.5


def test_an_address_that_is_silent_leaves_time_for_the_next(
    broker: MockBroker, monkeypatch: pytest.MonkeyPatch, deaf: tuple[str, int]
) -> None:
    resolved(monkeypatch, deaf, parse_address(broker.address))
    transport.connect("two.example:1", Deadline.after(1.0), None).close()
    resolved(monkeypatch, free_place(), parse_address(broker.address))
    transport.connect("two.example:1", Deadline.after(30.0), None).close()


def free_place() -> tuple[str, int]:
    """An address that refuses connections."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        place: tuple[str, int] = free.getsockname()
        return place


@pytest.mark.parametrize("first", ["silent", "refusing"])
def test_a_host_refuses_only_at_all_of_its_addresses(
    monkeypatch: pytest.MonkeyPatch, deaf: tuple[str, int], first: str
) -> None:
    places = [deaf, free_place()]
    resolved(monkeypatch, *(places if first == "silent" else places[::-1]))
    with pytest.raises(CallTimeout, match="cannot connect"):
        transport.connect("two.example:1", Deadline.after(0.3), None)
    resolved(monkeypatch, free_place(), free_place())
    with pytest.raises(ConnectionLost, match="cannot connect: Connection refused"):
        transport.connect("two.example:1", Deadline.after(30.0), None)


@pytest.mark.parametrize("order", [1, -1])
def test_a_family_that_the_machine_lacks_is_no_sign_of_a_server(monkeypatch: pytest.MonkeyPatch, order: int) -> None:
    odd = (socket.AF_CAN, socket.SOCK_STREAM, 6, "", ())
    host, port = free_place()
    places = [odd, (socket.AF_INET, socket.SOCK_STREAM, 6, "", (host, port))][::order]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_: places)
    lacking = socket.socket

    def made(family: int, *rest: int) -> socket.socket:
        if family == socket.AF_CAN:
            raise OSError(errno.EAFNOSUPPORT, "Address family not supported by protocol")
        return lacking(family, *rest)

    monkeypatch.setattr(socket, "socket", made)
    with pytest.raises(ConnectionLost) as caught:
        transport.connect("two.example:1", Deadline.after(30.0), None)
    assert isinstance(caught.value.__cause__, ConnectionRefusedError)


def test_a_host_without_an_address_is_said_so(monkeypatch: pytest.MonkeyPatch) -> None:
    resolved(monkeypatch)
    with pytest.raises(ConnectionLost, match=r"none\.example has no address"):
        transport.connect("none.example:1", Deadline.after(1.0), None)


@pytest.mark.parametrize("host", ["a..b", "x" * 64])
def test_no_host_can_have_that_name(host: str) -> None:
    with pytest.raises(RocketMQError, match=r"not a host name|cannot connect"):
        connect_to(f"{host}:1")


@pytest.mark.parametrize(
    ("error", "kind", "text"),
    [
        (TimeoutError("timed out"), CallTimeout, "pulling: no progress in time"),
        (ConnectionResetError(104, "Connection reset by peer"), ConnectionLost, "pulling: Connection reset by peer"),
        (OSError(), ConnectionLost, "pulling: OSError"),
        (ssl.SSLError(1, "[SSL] odd"), ConnectionLost, "odd"),
    ],
)
def test_errors_of_the_operating_system(error: OSError, kind: type[RocketMQError], text: str) -> None:
    made = transport.to_rocketmq_error(error, "h:1", "pulling")
    assert type(made) is kind
    assert text in str(made)
    assert made.retriable


def test_tls_settings_do_not_show_the_password() -> None:
    assert "hunter2" not in repr(TlsSettings(key_password="hunter2"))


def test_files_that_cannot_be_used_are_an_error_of_options(tmp_path: Path) -> None:
    (tmp_path / "bad.pem").write_text("nothing")
    for settings in (TlsSettings(ca_file=str(tmp_path / "no")), TlsSettings(cert_file=str(tmp_path / "bad.pem"))):
        with pytest.raises(OptionError, match="tlsCaFile"):
            connect_to("127.0.0.1:1", settings)


class TestTls:
    """Encrypted connections; RocketMQ's own server is tried in issue "Security"."""

    @pytest.fixture
    def trusting(self, certificate: tuple[Path, Path]) -> TlsSettings:
        return TlsSettings(ca_file=str(certificate[0]))

    def test_a_call_over_tls(
        self, server_tls: ssl.SSLContext, trusting: TlsSettings, connect: Callable[..., Connection]
    ) -> None:
        body = bytes(range(256)) * 4000
        with MockBroker({PING: lambda call: ok(bytes(call.command.body))}, tls=server_tls) as broker:
            connection = connect(broker.address, tls=trusting)
            for size in (0, 1, 20_000, len(body)):
                answer = connection.call(Command(PING, {}, body[:size]), Deadline.after(30.0))
                assert bytes(answer.body) == body[:size]

    def test_close_wakes_a_call_over_tls(
        self, server_tls: ssl.SSLContext, trusting: TlsSettings, connect: Callable[..., Connection]
    ) -> None:
        with MockBroker({PING: never}, tls=server_tls) as broker:
            connection = connect(broker.address, tls=trusting)
            results: list[object] = []
            connection.call_each([(ping(), results.append)], Deadline.after(60.0))
            broker.wait_for(lambda: bool(broker.requests))
            connection.close()
        assert isinstance(results[0], ConnectionLost)

    def test_an_unknown_authority_is_refused_with_a_remedy(self, server_tls: ssl.SSLContext) -> None:
        with MockBroker(tls=server_tls) as broker:
            with pytest.raises(CertificateRefused, match="tlsCaFile"):  # only the check of the name can be switched off
                connect_to(broker.address, TlsSettings(check_hostname=False))
            with pytest.raises(CertificateRefused, match="tlsCaFile") as e:
                connect_to(broker.address, TlsSettings())
        assert not e.value.retriable

    def test_the_name_is_checked_unless_told_otherwise(self, server_tls: ssl.SSLContext, trusting: TlsSettings) -> None:
        with MockBroker(tls=server_tls) as broker:
            by_name = broker.address.replace("127.0.0.1", "localhost")
            with pytest.raises(CertificateRefused, match="tlsCheckHostname"):
                connect_to(by_name, trusting)
            connect_to(by_name, replace(trusting, check_hostname=False))

    def test_a_server_without_tls(self, broker: MockBroker) -> None:
        with pytest.raises(ConnectionLost, match="TLS handshake failed"):
            connect_to(broker.address, TlsSettings())

    def test_a_server_that_never_shakes_hands_costs_the_deadline(self) -> None:
        with socket.create_server(("127.0.0.1", 0)) as deaf, pytest.raises(CallTimeout, match="handshake"):
            transport.connect(f"127.0.0.1:{deaf.getsockname()[1]}", Deadline.after(0.1), TlsSettings())

    def test_a_plain_client_at_a_tls_server_is_told_about_tls(
        self, server_tls: ssl.SSLContext, connect: Callable[..., Connection]
    ) -> None:
        with MockBroker(tls=server_tls) as broker, pytest.raises(RocketMQError, match="tls"):
            connect(broker.address).call(ping(), Deadline.after(30.0))


def test_rotated_tls_files_are_read_again(tmp_path: Path) -> None:
    """The next connection uses them; while they do not fit each other the last good ones serve."""
    certs = certificates(tmp_path)
    ca, cert, key = (tmp_path / name for name in ("trusted.pem", "mine.pem", "mine.key"))

    def put(target: Path, source: str) -> None:
        fresh = target.with_suffix(".new")
        fresh.write_bytes(Path(source).read_bytes())
        fresh.replace(target)

    put(ca, certs.cert("stranger"))
    put(cert, certs.cert("server"))
    put(key, certs.key("server"))
    tls = TlsSettings(str(ca), str(cert), str(key))
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(certs.cert("server"), certs.key("server"))
    with MockBroker(tls=server) as broker:
        with pytest.raises(ConnectionLost, match="option 'tlsCaFile'"):
            connect_to(broker.address, tls)
        put(ca, certs.ca)
        connect_to(broker.address, tls)
        good = transport.ssl_context(tls)
        assert transport.ssl_context(tls) is good
        put(key, certs.key("elsewhere"))
        assert transport.ssl_context(tls) is good
        put(cert, certs.cert("elsewhere"))
        connect_to(broker.address, tls)
        assert transport.ssl_context(tls) is not good
        cert.unlink()
        connect_to(broker.address, tls)


def test_files_that_are_spelled_in_many_ways_have_few_contexts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[TlsSettings] = []
    monkeypatch.setattr(transport, "_context", lambda tls: (made.append(tls), object())[1])
    often = ssl_context(TlsSettings(f"{tmp_path}/ca.pem"))
    for n in range(1, 200):
        ssl_context(TlsSettings(f"{tmp_path}/{'./' * n}ca.pem"))
        assert ssl_context(TlsSettings(f"{tmp_path}/ca.pem")) is often
    assert len(made) == len(set(made)) == 200
    assert transport._reloaded_context.cache_info().currsize <= 64


@pytest.fixture
def pass_s(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Sets the monotonic clock forward."""
    real, offset = time.monotonic, [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: real() + offset[0])

    def passed(seconds: float) -> None:
        offset[0] += seconds

    return passed


@pytest.mark.parametrize("damage", ["removed", "damaged", "empty"])
def test_unreadable_ca_file_stays_trusted_for_ten_minutes(
    tmp_path: Path,
    server_tls: ssl.SSLContext,
    certificate: tuple[Path, Path],
    connect: Callable[..., Connection],
    pass_s: Callable[[float], None],
    caplog: pytest.LogCaptureFixture,
    damage: str,
) -> None:
    ca = tmp_path / "trusted.pem"
    shutil.copy(certificate[0], ca)
    tls = TlsSettings(str(ca))
    with MockBroker(tls=server_tls) as broker:
        open_one = connect(broker.address, tls=tls)
        if damage == "removed":
            ca.unlink()
        else:
            ca.write_text("garbage" if damage == "damaged" else "")
        for seconds in (0, 300, 299):
            pass_s(seconds)
            connect_to(broker.address, tls)
        assert [line for line in caplog.messages if str(ca) in line] == caplog.messages[-1:]
        assert "cannot be read any more: " in caplog.text
        assert "New connections fail if that lasts longer than 10 minutes" in caplog.text
        pass_s(2)
        for _ in range(2):
            with pytest.raises(OptionError, match="tlsCaFile"):
                connect_to(broker.address, tls)
        open_one.call(ping(), Deadline.after(30.0))
        shutil.copy(certificate[0], ca)
        connect_to(broker.address, tls)
        assert caplog.messages[-1] == f"the TLS files {ca} can be read again"
        ca.unlink()
        connect_to(broker.address, tls)  # another ten minutes


class TestNames:
    """Which certificates for another name are accepted without the check of the name, and which error says so."""

    def test_error_suggests_skipping_name_check_only_if_name_differs(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        certs = certificates(tmp_path)
        first = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        first.load_cert_chain(certs.cert("elsewhere"), certs.key("elsewhere"))
        then = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        then.load_cert_chain(certs.cert("stranger"), certs.key("stranger"))
        handshakes: list[object] = []

        def chosen(sock: ssl.SSLObject, name: str | None, context: ssl.SSLContext) -> None:
            handshakes.append(name)
            if len(handshakes) % 2 == 0:
                sock.context = then

        with MockBroker(tls=first) as broker:
            by_name = broker.address.replace("127.0.0.1", "localhost")
            with pytest.raises(CertificateRefused, match=r"or set 'tlsCheckHostname' to false: only the name differs"):
                connect_to(by_name, TlsSettings(certs.ca))
            first.sni_callback = chosen
            with pytest.raises(CertificateRefused) as refused:
                connect_to(by_name, TlsSettings(certs.ca))
        assert "tlsCheckHostname" not in str(refused.value)
        assert "Without the check of the name: the TLS handshake failed: self-signed certificate" in str(refused.value)
        assert len(handshakes) == 2

    def test_it_is_never_advised_with_the_authorities_of_the_system(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        certs = certificates(tmp_path)
        monkeypatch.setenv("SSL_CERT_FILE", certs.ca)
        server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        server.load_cert_chain(certs.cert("elsewhere"), certs.key("elsewhere"))
        with MockBroker(tls=server) as broker, pytest.raises(CertificateRefused) as refused:
            connect_to(broker.address, TlsSettings(cert_file=certs.cert("server"), key_file=certs.key("server")))
        assert "addressMap" in str(refused.value)
        assert "tlsCheckHostname" not in str(refused.value)


DIES = """
import os, signal, sys
from rocketmq_spark.base.clock import Deadline
from rocketmq_spark.remoting.transport import UndeliveredPolicy, connect

sock = connect(sys.argv[1], Deadline.after(30), None, UndeliveredPolicy(1.0))
sock.setblocking(False)
sent = 0
try:
    while True:
        sent += sock.send(bytes(1 << 16))
except BlockingIOError:
    print(sent, sock.getsockname()[1], flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def left_in_the_kernel(port: int) -> bool:
    """Whether the system still has a socket with that port here and something to send."""
    with open("/proc/net/tcp") as table:
        rows = [line.split() for line in table.readlines()[1:]]
    return any(int(row[1].rpartition(":")[2], 16) == port and int(row[4].partition(":")[0], 16) for row in rows)


@pytest.mark.parametrize("linux", [sys.platform] if sys.platform == "linux" else [])
def test_what_a_dead_process_left_unsent_is_dropped(linux: str) -> None:
    """Its peer stands still, and would get it when it goes on: long after somebody looked whether it is there."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        command = [sys.executable, "-c", DIES, address]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child, server.accept()[0] as peer:
            assert child.stdout is not None
            sent, port = map(int, child.stdout.readline().split())
            assert child.wait(60) == -signal.SIGKILL
            assert left_in_the_kernel(port)
            awaited(lambda: not left_in_the_kernel(port))
            got = 0
            while True:
                try:
                    data = peer.recv(1 << 20)
                except ConnectionResetError:
                    break
                if not data:
                    break
                got += len(data)
    assert got < sent


def test_a_key_with_a_password_asks_nobody_for_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """OpenSSL would ask on the terminal, and ignore SIGTERM and Ctrl-C until somebody answers."""
    certs, given = certificates(tmp_path), []
    key = tmp_path / "locked.pem"
    command = ["openssl", "pkey", "-in", certs.key("server"), "-aes256", "-passout", "pass:open sesame"]
    subprocess.run([*command, "-out", str(key)], check=True, capture_output=True)
    load = ssl.SSLContext.load_cert_chain

    def loaded(context: ssl.SSLContext, cert: str, key: str, password: str | None) -> None:
        given.append(password)
        load(context, cert, key, password or "")

    monkeypatch.setattr(ssl.SSLContext, "load_cert_chain", loaded)
    with pytest.raises(OptionError, match="'tlsKeyPassword'"):
        ssl_context(TlsSettings(certs.ca, certs.cert("server"), str(key)))
    ssl_context(TlsSettings(certs.ca, certs.cert("server"), str(key), "open sesame"))
    ssl_context(TlsSettings(certs.ca, certs.cert("server"), certs.key("server")))
    assert given == ["", "open sesame", ""]


@pytest.mark.parametrize("option", ["ca_file", "cert_file", "key_file"])
def test_files_of_tls_are_read_only_to_a_limit(option: str, tmp_path: Path) -> None:
    certs = certificates(tmp_path)
    given = TlsSettings(certs.ca, certs.cert("server"), certs.key("server"))
    for content, problem in (
        (b"-----BEGIN CERTIFICATE-----\n" + b"A" * paths.MAX_FILE_BYTES, f"more than {paths.MAX_FILE_BYTES} bytes"),
        (
            b"-----BEGIN CERTIFICATE-----\n" * (paths.MAX_PEM_BLOCKS + 1),
            f"more than {paths.MAX_PEM_BLOCKS} certificates",
        ),
    ):
        (file := tmp_path / "large.pem").write_bytes(content)
        with pytest.raises(OptionError, match=problem):
            ssl_context(replace(given, **{option: str(file)}))
    (file := tmp_path / "endless").symlink_to("/dev/zero")
    with pytest.raises(OptionError, match=f"more than {paths.MAX_FILE_BYTES} bytes"):
        ssl_context(replace(given, **{option: str(file)}))


def test_files_of_tls_are_used_where_no_file_is_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr("os.memfd_create", raising=False)
    certs = certificates(tmp_path)
    given = TlsSettings(certs.ca, certs.cert("server"), certs.key("server"), check_hostname=False)
    assert ssl_context(given).get_ca_certs()


def test_a_load_that_failed_slowly_is_not_repeated_soon(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A key may demand any number of rounds before it is refused."""
    now, loads = 1000.0, 0

    def load() -> None:
        nonlocal now, loads
        now, loads = now + 20.0, loads + 1
        raise ssl.SSLError("wrong password")

    monkeypatch.setattr(time, "monotonic", lambda: now)
    (file := tmp_path / "key.pem").write_bytes(b"a")
    key = ReloadedValue([str(file)], load)

    def attempts() -> int:
        with pytest.raises(ssl.SSLError, match="wrong password"):
            key.get()
        return loads

    assert [attempts(), attempts()] == [1, 1]
    now += 199.0
    assert attempts() == 1
    now += 2.0
    assert attempts() == 2
    file.write_bytes(b"ab")
    assert attempts() == 3
