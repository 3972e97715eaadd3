"""Channels of gRPC against servers that break and distrust."""

from __future__ import annotations

import math
import os
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import grpc
import pytest

from rocketmq_spark import errors
from rocketmq_spark.base.clock import Deadline
from rocketmq_spark.base.process import LiveObjects
from rocketmq_spark.consumer.settings import MAX_WAIT_S, ConsumerSettings
from rocketmq_spark.grpc_proxy import channel as channel_module
from rocketmq_spark.grpc_proxy.channel import ProxyChannel, Tls
from rocketmq_spark.grpc_proxy.protos import proto
from rocketmq_spark.grpc_proxy.tables import QUERY_ROUTE, RECEIVE_MESSAGE, SEND_MESSAGE, TELEMETRY, Code
from tests.fix_clusters import Certificates
from tests.grpc_proxy.scripted import acknowledge, route, serving, serving_bytes, status
from tests.helpers import awaited

# gRPC's own thread, which watches a connection, may look at the channel once more while it is closed, and ends with that error.
pytestmark = pytest.mark.filterwarnings(
    "ignore:(?s).*Cannot monitor channel state. Channel closed:pytest.PytestUnhandledThreadExceptionWarning"
)

REQUEST = proto("QueryRouteRequest")()


def headers() -> list[tuple[str, str]]:
    return [("x-mq-client-id", "me")]


def ask(address: str, seconds: float = 10.0, tls: Tls | None = None) -> Any:
    channel = ProxyChannel(address, headers, 1.0, tls)
    try:
        return channel.invoke(QUERY_ROUTE, REQUEST, Deadline.after(seconds))
    finally:
        channel.close()


def encrypted(certs: Certificates, name: str, client: bool = False) -> grpc.ServerCredentials:
    pair = Path(certs.key(name)).read_bytes(), Path(certs.cert(name)).read_bytes()
    return grpc.ssl_server_credentials([pair], Path(certs.ca).read_bytes() if client else None, client)


def test_an_answer_and_who_asked():
    seen = []

    def answer(request: Any, context: grpc.ServicerContext) -> Any:
        seen.extend(context.invocation_metadata())
        return route()(request, context)

    with serving({"QueryRoute": answer}) as address:
        assert ask(address).status.code == Code.OK
    assert ("x-mq-client-id", "me") in seen


def test_nobody_is_there(nobody):
    with pytest.raises(errors.ConnectionLost, match="gRPC port is reachable"):
        ask(nobody)


def test_a_web_proxy_of_the_environment_is_not_asked(nobody, monkeypatch):
    """gRPC itself would go there, where Java's client and remoting do not."""
    for name in ("grpc_proxy", "https_proxy", "http_proxy"):
        monkeypatch.setenv(name, f"http://{nobody}")
    for name in ("no_proxy", "no_grpc_proxy"):
        monkeypatch.delenv(name, raising=False)
    with serving({"QueryRoute": route()}) as address:
        assert ask(address).status.code == Code.OK


def test_a_proxy_that_is_back_is_found_within_seconds(monkeypatch):
    """By itself gRPC pauses for up to two minutes between attempts, and refuses calls meanwhile."""
    opened, options = grpc.insecure_channel, {}

    def noted(address: str, given: list[tuple[str, Any]]) -> grpc.Channel:
        options.update(given)
        return opened(address, given)

    monkeypatch.setattr(grpc, "insecure_channel", noted)
    with serving({"QueryRoute": route()}) as address:
        assert ask(address).status.code == Code.OK
    assert options["grpc.initial_reconnect_backoff_ms"] <= options["grpc.max_reconnect_backoff_ms"] <= 2000
    assert options["grpc.min_reconnect_backoff_ms"] == 1000, "an attempt has the time that connectTimeout says"


def test_no_answer_in_time(black_hole):
    with pytest.raises(errors.CallTimeout):
        ask(black_hole, 0.3)


@pytest.mark.parametrize("seconds", [1e10, 1e18, math.inf])
def test_a_deadline_that_never_comes_is_not_over(seconds):
    with serving({"QueryRoute": route()}) as address:
        assert ask(address, seconds).status.code == Code.OK


def test_what_is_not_implemented():
    with serving({}) as address, pytest.raises(errors.NotSupported, match="transport=remoting"):
        ask(address)


def test_certificates(certs, tmp_path, monkeypatch):
    monkeypatch.setenv("SSL_CERT_FILE", certs.ca)
    with serving({"QueryRoute": route()}, encrypted(certs, "server")) as address:
        assert ask(address, tls=Tls(certs.ca)).status.code == Code.OK
        with pytest.raises(errors.CertificateRefused, match="tlsCaFile"):
            ask(address, tls=Tls(certs.cert("stranger")))
        with pytest.raises(errors.ConnectionLost, match="set option 'tls'"):
            ask(address)
    with serving({"QueryRoute": route()}, encrypted(certs, "elsewhere")) as address:
        with pytest.raises(errors.CertificateRefused, match="tlsServerName"):
            ask(address, tls=Tls(certs.ca))
        assert ask(address, tls=Tls(certs.ca, server_name="broker.example")).status.code == Code.OK
    for trusted in (certs.ca, None):  # also with the authorities of the system
        with serving({"QueryRoute": route()}) as address, pytest.raises(errors.ConnectionLost):
            ask(address, tls=Tls(trusted))
    with pytest.raises(errors.OptionError, match="tlsCaFile"):
        ask("127.0.0.1:1", tls=Tls(str(tmp_path / "none.pem")))


def test_a_certificate_of_ones_own(certs):
    mine = Tls(certs.ca, certs.cert("server"), certs.key("server"))
    with serving({"QueryRoute": route()}, encrypted(certs, "server", client=True)) as address:
        assert ask(address, tls=mine).status.code == Code.OK
        with pytest.raises(errors.ConnectionLost):
            ask(address, tls=Tls(certs.ca))


def test_answers_that_come_later(nobody):
    outcomes: SimpleQueue[Any] = SimpleQueue()
    request = proto("SendMessageRequest")()
    request.messages.add().system_properties.message_id = "ID"
    with serving({"SendMessage": acknowledge}) as address:
        channel = ProxyChannel(address, headers)
        channel.invoke_async(SEND_MESSAGE, request, Deadline.after(10), outcomes.put)
        assert outcomes.get(timeout=60).entries[0].message_id == "ID"
        channel.close()
    channel = ProxyChannel(nobody, headers, 1.0)
    channel.invoke_async(SEND_MESSAGE, request, Deadline.after(10), outcomes.put)
    assert isinstance(outcomes.get(timeout=60), errors.ConnectionLost)
    channel.close()


def test_a_close_ends_what_is_under_way(black_hole):
    outcomes: SimpleQueue[Any] = SimpleQueue()
    channel = ProxyChannel(black_hole, headers, 30.0)
    channel.invoke_async(QUERY_ROUTE, REQUEST, Deadline.after(60), outcomes.put)
    channel.close()
    assert isinstance(outcomes.get(timeout=60), errors.ConnectionLost)


def test_a_stream_gives_what_came_before_it_broke():
    def answer(request: Any, context: grpc.ServicerContext) -> Any:
        yield proto("ReceiveMessageResponse")(status=status(Code.OK))
        context.abort(grpc.StatusCode.UNAVAILABLE, "gone")

    with serving({"ReceiveMessage": answer}) as address:
        channel = ProxyChannel(address, headers)
        answers = channel.answers(channel.stream(RECEIVE_MESSAGE, proto("ReceiveMessageRequest")(), Deadline.after(10)))
        assert next(answers).status.code == Code.OK
        with pytest.raises(errors.ConnectionLost, match="gone"):
            next(answers)
        channel.close()


def test_an_answer_may_be_as_large_as_those_of_brokers():
    """By itself gRPC takes 4 MiB, and a message of that size, with what belongs to it, would come in no answer for ever."""
    large = proto("ReceiveMessageResponse")(message=proto("Message")(body=bytes(5 << 20)))
    with serving_bytes("ReceiveMessage", large.SerializeToString()) as address:
        channel = ProxyChannel(address, headers)
        answers = channel.answers(channel.stream(RECEIVE_MESSAGE, proto("ReceiveMessageRequest")(), Deadline.after(60)))
        assert [len(answer.message.body) for answer in answers] == [5 << 20]
        channel.close()


def test_dead_connection_is_noticed_by_keepalive(make_proxy, monkeypatch):
    """Otherwise a stream without a deadline waits for ever, and later calls go into the dead connection."""
    assert channel_module._KEEPALIVE_MS + channel_module._PING_TIMEOUT_MS <= 60_000
    monkeypatch.setattr(channel_module, "_KEEPALIVE_MS", 1000)
    monkeypatch.setattr(channel_module, "_KEEPALIVE_TIMEOUT_MS", 1000)
    monkeypatch.setattr(channel_module, "_PING_TIMEOUT_MS", 1000)
    over, begun, outcomes = threading.Event(), threading.Event(), SimpleQueue()

    def nothing_yet(request: Any, context: grpc.ServicerContext) -> Any:
        begun.set()
        over.wait()
        return iter(())

    def waits(channel: ProxyChannel) -> None:
        try:
            receives(channel, outcomes)
        except errors.RocketMQError as e:
            outcomes.put(e)

    with serving({"ReceiveMessage": nothing_yet}) as address:
        proxy = make_proxy(address)
        channel = ProxyChannel(proxy.address, headers)
        thread = threading.Thread(target=waits, args=(channel,))
        thread.start()
        try:
            assert begun.wait(60)
            proxy.black_hole()
            assert isinstance(outcomes.get(timeout=30), errors.ConnectionLost)
        finally:
            over.set()
            channel.close()
            thread.join()


def test_message_may_take_longer_than_keepalive_timeout(make_proxy, monkeypatch):
    """The answers to pings wait behind it. If the connection were given up, the message would never come over a slow network."""
    monkeypatch.setattr(channel_module, "_KEEPALIVE_TIMEOUT_MS", 1000)
    large = proto("ReceiveMessageResponse")(message=proto("Message")(body=bytes(4 << 20)))
    with serving_bytes("ReceiveMessage", large.SerializeToString()) as address:
        proxy = make_proxy(address)
        proxy.delay_s = 0.05  # 64 times and more
        channel = ProxyChannel(proxy.address, headers)
        answers = channel.answers(channel.stream(RECEIVE_MESSAGE, proto("ReceiveMessageRequest")(), Deadline.after(90)))
        assert [len(answer.message.body) for answer in answers] == [4 << 20]
        channel.close()
    longest_s = MAX_WAIT_S + ConsumerSettings(group="g").request_timeout_s
    assert 1000 * longest_s < channel_module._PING_TIMEOUT_MS


@pytest.mark.parametrize(("limit", "taken"), [({}, False), ({"max_pushed_bytes": 33 << 20}, True)])
def test_what_a_proxy_sends_unasked_has_a_limit(limit, taken):
    """Its answers may be larger."""
    check = proto("TelemetryCommand")()
    check.recover_orphaned_transaction_command.message.body = bytes(17 << 20)
    with serving_bytes("Telemetry", check.SerializeToString()) as address:
        channel = ProxyChannel(address, headers, **limit)
        call = channel.stream(TELEMETRY, iter([proto("TelemetryCommand")()]), Deadline.after(60))
        if taken:
            assert len(list(channel.answers(call))) == 1
        else:
            with pytest.raises(errors.LocalProtocolError, match="larger than"):
                list(channel.answers(call))
        channel.close()
    large = proto("ReceiveMessageResponse")(message=proto("Message")(body=bytes(17 << 20)))
    with serving_bytes("ReceiveMessage", large.SerializeToString()) as address:
        channel = ProxyChannel(address, headers)
        answers = channel.answers(channel.stream(RECEIVE_MESSAGE, proto("ReceiveMessageRequest")(), Deadline.after(60)))
        assert len(list(answers)) == 1
        channel.close()


def test_ca_replaced_while_channel_is_idle_is_no_longer_trusted(certs, tmp_path):
    """The Proxy restarts meanwhile: gRPC would connect again with the authority that it has read before."""
    ca, new = tmp_path / "ca.pem", tmp_path / "new.pem"
    ca.write_bytes(Path(certs.ca).read_bytes())
    with serving({"QueryRoute": route()}, encrypted(certs, "server")) as address:
        channel = ProxyChannel(address, headers, 1.0, Tls(str(ca)))
        assert channel.invoke(QUERY_ROUTE, REQUEST, Deadline.after(10)).status.code == Code.OK
        new.write_bytes(Path(certs.cert("stranger")).read_bytes())
        new.rename(ca)
    with serving({"QueryRoute": route()}, encrypted(certs, "server"), address):
        with pytest.raises(errors.CertificateRefused):
            channel.invoke(QUERY_ROUTE, REQUEST, Deadline.after(10))
        channel.close()


def test_call_on_replaced_channel_ends_when_channel_closes(certs, tmp_path):
    ca, new = tmp_path / "ca.pem", tmp_path / "new.pem"
    ca.write_bytes(Path(certs.ca).read_bytes())
    ended = threading.Event()

    def waits(request, context):
        ended.wait(60)
        return iter(())

    answers = {"QueryRoute": route(), "ReceiveMessage": waits}
    with serving(answers, encrypted(certs, "server")) as address:
        channel = ProxyChannel(address, headers, 1.0, Tls(str(ca)))
        call = channel.stream(RECEIVE_MESSAGE, proto("ReceiveMessageRequest")(), Deadline.after(60))
        assert channel.invoke(QUERY_ROUTE, REQUEST, Deadline.after(10)).status.code == Code.OK
        new.write_bytes(Path(certs.ca).read_bytes() + b"\n")
        new.rename(ca)
        assert channel.invoke(QUERY_ROUTE, REQUEST, Deadline.after(10)).status.code == Code.OK
        assert call.is_active()
        channel.close()
        assert not call.is_active()
        ended.set()


def test_files_of_tls_are_read_again_by_the_next_call(certs, tmp_path):
    ca, new = tmp_path / "ca.pem", tmp_path / "new.pem"
    ca.write_bytes(Path(certs.cert("stranger")).read_bytes())
    with serving({"QueryRoute": route()}, encrypted(certs, "server")) as address:
        channel = ProxyChannel(address, headers, 1.0, Tls(str(ca)))
        with pytest.raises(errors.CertificateRefused):
            channel.invoke(QUERY_ROUTE, REQUEST, Deadline.after(10))
        ca.unlink()  # for the moment in which it is written anew
        with pytest.raises(errors.CertificateRefused):
            channel.invoke(QUERY_ROUTE, REQUEST, Deadline.after(10))
        new.write_bytes(Path(certs.ca).read_bytes())
        new.rename(ca)
        assert channel.invoke(QUERY_ROUTE, REQUEST, Deadline.after(10)).status.code == Code.OK
        channel.close()


def test_system_authorities_are_trusted_without_ca_file(certs, tmp_path, monkeypatch):
    """Not those that grpcio brings."""
    monkeypatch.setenv("SSL_CERT_DIR", str(tmp_path))
    monkeypatch.setenv("GRPC_DEFAULT_SSL_ROOTS_FILE_PATH", certs.cert("stranger"))
    with serving({"QueryRoute": route()}, encrypted(certs, "server")) as address:
        monkeypatch.setenv("SSL_CERT_FILE", certs.ca)
        assert ask(address, tls=Tls()).status.code == Code.OK
        monkeypatch.setenv("SSL_CERT_FILE", certs.cert("stranger"))
        with pytest.raises(errors.CertificateRefused, match="tlsCaFile"):
            ask(address, tls=Tls())
        monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "none"))
        (tmp_path / "ca.pem").symlink_to(certs.ca)  # OpenSSL reads only files that are named by hashes
        with pytest.raises(errors.OptionError, match=r"this system has no authorities to trust.*'tlsCaFile'"):
            ask(address, tls=Tls())
        (tmp_path / "0a1b2c3d.0").symlink_to(certs.ca)
        assert ask(address, tls=Tls()).status.code == Code.OK


@pytest.mark.parametrize(
    "damage", [None, b"garbage", b"-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n"]
)
def test_unreadable_ca_is_trusted_until_its_connection_ends(certs, tmp_path, monkeypatch, caplog, damage):
    """Ten minutes later: gRPC would connect again by itself, with what it has read before."""
    ca, real, offset = tmp_path / "ca.pem", time.monotonic, 0.0
    ca.write_bytes(Path(certs.ca).read_bytes())
    monkeypatch.setattr(time, "monotonic", lambda: real() + offset)
    with serving({"QueryRoute": route()}, encrypted(certs, "server")) as address:
        channel = ProxyChannel(address, headers, 1.0, Tls(str(ca)))

        def asked() -> int:
            return channel.invoke(QUERY_ROUTE, REQUEST, Deadline.after(10)).status.code

        assert asked() == Code.OK
        if damage is None:
            ca.unlink()
        else:
            ca.write_bytes(damage)
        for offset in (0.0, 60.0, 500.0, 700.0, 800.0):  # noqa: B007 - the clock above reads it
            assert asked() == Code.OK
        assert len([line for line in caplog.messages if "cannot be read any more" in line]) == 1
    awaited(lambda: channel._channel is None)
    with serving({"QueryRoute": route()}, encrypted(certs, "server"), address):
        for _ in range(2):
            with pytest.raises(errors.OptionError, match="tlsCaFile"):
                asked()
        ca.write_bytes(Path(certs.ca).read_bytes())
        assert asked() == Code.OK
        channel.close()


def test_tls_files_being_written_do_not_end_process(certs, tmp_path):
    """gRPC itself ends the process for a certificate without a key."""
    cert, key = tmp_path / "client.pem", tmp_path / "client.key"
    cert.write_bytes(Path(certs.cert("stranger")).read_bytes())
    key.write_bytes(Path(certs.key("stranger")).read_bytes())
    with serving({"QueryRoute": route()}, encrypted(certs, "server", client=True)) as address:
        channel = ProxyChannel(address, headers, 1.0, Tls(certs.ca, str(cert), str(key)))
        with pytest.raises(errors.ConnectionLost):
            channel.invoke(QUERY_ROUTE, REQUEST, Deadline.after(10))
        for half_written in (cert, key):
            half_written.write_bytes(b"")
            for _ in range(2):
                with pytest.raises(errors.ConnectionLost):
                    channel.invoke(QUERY_ROUTE, REQUEST, Deadline.after(10))
        cert.write_bytes(Path(certs.cert("server")).read_bytes())
        key.write_bytes(Path(certs.key("server")).read_bytes())
        assert channel.invoke(QUERY_ROUTE, REQUEST, Deadline.after(10)).status.code == Code.OK
        channel.close()


def test_client_certificate_may_hold_its_key_but_needs_one(certs, tmp_path):
    both, empty = tmp_path / "both.pem", tmp_path / "empty.pem"
    both.write_bytes(Path(certs.cert("server")).read_bytes() + Path(certs.key("server")).read_bytes())
    empty.touch()
    with serving({"QueryRoute": route()}, encrypted(certs, "server", client=True)) as address:
        assert ask(address, tls=Tls(certs.ca, str(both))).status.code == Code.OK
        for option, wrong in (
            ("tlsCertFile.*private key", Tls(certs.ca, certs.cert("server"))),
            ("tlsCertFile.*certificate", Tls(certs.ca, str(empty), certs.key("server"))),
            ("tlsKeyFile.*private key", Tls(certs.ca, certs.cert("server"), str(empty))),
            ("tlsCaFile.*certificate", Tls(str(empty))),
        ):
            with pytest.raises(errors.OptionError, match=option):
                ask(address, tls=wrong)


def test_call_on_channel_being_replaced_is_not_kept(certs, tmp_path, monkeypatch):
    ca, new = tmp_path / "ca.pem", tmp_path / "new.pem"
    ca.write_bytes(Path(certs.cert("stranger")).read_bytes())
    new.write_bytes(Path(certs.ca).read_bytes())
    with serving({"QueryRoute": route(), "SendMessage": acknowledge}, encrypted(certs, "server")) as address:
        channel = ProxyChannel(address, headers, 1.0, Tls(str(ca)))
        make = channel_module.proto

        def another_thread_asks(name: str) -> Any:
            monkeypatch.setattr(channel_module, "proto", make)
            new.rename(ca)
            assert channel.invoke(SEND_MESSAGE, b"", Deadline.after(10)).status.code == Code.OK
            return make(name)

        monkeypatch.setattr(channel_module, "proto", another_thread_asks)
        with pytest.raises(errors.CertificateRefused):
            channel.invoke(QUERY_ROUTE, REQUEST, Deadline.after(10))
        assert channel.invoke(QUERY_ROUTE, REQUEST, Deadline.after(10)).status.code == Code.OK
        channel.close()


def test_a_stream_of_a_channel_that_closes_at_that_moment(nobody):
    channel = ProxyChannel(nobody, headers, 1.0)
    answers = channel.answers(channel.stream(RECEIVE_MESSAGE, proto("ReceiveMessageRequest")(), Deadline.after(10)))
    with pytest.raises(errors.ConnectionLost):
        next(answers)
    kept = dict(channel._multi_callables)
    channel.close()
    channel._multi_callables = kept  # as a thread has it that got there before
    with pytest.raises(errors.ClosedError):
        channel.stream(RECEIVE_MESSAGE, proto("ReceiveMessageRequest")(), Deadline.after(10))


def asks(channel: ProxyChannel, outcomes: SimpleQueue[Any]) -> None:
    channel.invoke_async(QUERY_ROUTE, REQUEST, Deadline.after(10), outcomes.put)


def receives(channel: ProxyChannel, outcomes: SimpleQueue[Any]) -> None:
    call = channel.stream(RECEIVE_MESSAGE, proto("ReceiveMessageRequest")(), None)
    outcomes.put(next(channel.answers(call)))


@pytest.mark.parametrize("first", [asks, receives])
def test_channel_works_again_after_thread_shortage(monkeypatch, first):
    me, start, outcomes = threading.current_thread(), threading.Thread.start, SimpleQueue()

    def starts(thread: threading.Thread) -> None:
        if threading.current_thread() is me:  # not those of the server
            raise RuntimeError("can't start new thread")
        start(thread)

    answers = [proto("ReceiveMessageResponse")(status=status(Code.OK))]
    before = len(channel_module._leaked_channels)  # to lose one of them would hang
    with serving({"QueryRoute": route(), "ReceiveMessage": lambda request, context: iter(answers)}) as address:
        channel = ProxyChannel(address, headers)
        for _ in range(3):
            with monkeypatch.context() as lacking:
                lacking.setattr(threading.Thread, "start", starts)
                with pytest.raises(errors.ConnectionLost, match="no thread"):
                    first(channel, outcomes)
        assert len(channel_module._leaked_channels) == before + 1
        for ask in (asks, receives):
            ask(channel, outcomes)
            assert outcomes.get(timeout=60).status.code == Code.OK
        channel.close()


def test_a_name_that_is_not_found_sent_nothing():
    with pytest.raises(errors.ConnectionLost) as caught:
        ask("nobody.invalid:1")
    assert caught.value.unsent


def test_forked_child_of_grpc_process_gets_closed_error(nobody):
    """Its calls would not even end when their time is over."""
    with pytest.raises(errors.ConnectionLost):
        ask(nobody)
    child = os.fork()
    if child == 0:
        code = 1
        try:
            ask(nobody)
        except errors.ClosedError as e:
            code = 0 if "forked from a process that had used gRPC" in str(e) and "'spawn'" in str(e) else 2
        finally:
            os._exit(code)
    assert os.waitpid(child, 0)[1] == 0


FORKING = """
import os, sys, threading
from rocketmq_spark.base.clock import Deadline
from rocketmq_spark.grpc_proxy.channel import ProxyChannel
from rocketmq_spark.grpc_proxy.tables import QUERY_ROUTE, RECEIVE_MESSAGE
from rocketmq_spark.grpc_proxy.protos import proto

def asks():
    while not over.is_set():
        channel.invoke(QUERY_ROUTE, proto("QueryRouteRequest")(), Deadline.after(10))
        begun.set()

over, begun = threading.Event(), threading.Event()
channel, *others = (ProxyChannel(sys.argv[1], lambda: []) for _ in range(4))
waits = [one.stream(RECEIVE_MESSAGE, proto("ReceiveMessageRequest")(), None) for one in others]
thread = threading.Thread(target=asks)
thread.start()
begun.wait()
ends = set()
for _ in range(200):
    child = os.fork()
    if child == 0:
        sum(range(100_000))
        os._exit(0)
    ends.add(os.waitpid(child, 0)[1])
over.set()
thread.join()
print(*ends, flush=True)
os._exit(0)
"""


def test_a_child_that_has_nothing_to_do_with_grpc_does_not_crash():
    over = threading.Event()

    def nothing_yet(request: Any, context: grpc.ServicerContext) -> Any:
        over.wait()
        return iter(())

    env = {name: value for name, value in os.environ.items() if name != "GRPC_ENABLE_FORK_SUPPORT"}
    with serving({"QueryRoute": route(), "ReceiveMessage": nothing_yet}) as address:
        ended = subprocess.run(
            [sys.executable, "-c", FORKING, address], capture_output=True, text=True, timeout=200, env=env
        )
        over.set()
    assert ended.stdout.split() == ["0"], ended.stdout + ended.stderr


def test_a_host_with_the_name_of_a_scheme_is_a_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """gRPC connects to the Unix socket "8081" for the target unix:8081; an option names only hosts."""
    monkeypatch.chdir(tmp_path)
    with socket.socket(socket.AF_UNIX) as server:
        server.bind("8081")
        server.listen()
        server.setblocking(False)
        with pytest.raises(errors.RocketMQError):
            ask("unix:8081", 3.0)
        with pytest.raises(BlockingIOError):
            server.accept()


def test_a_channel_that_nobody_uses_closes_its_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process keeps the channels of all options that it was ever given."""
    monkeypatch.setattr(channel_module, "_IDLE_MS", 1)
    states: SimpleQueue[grpc.ChannelConnectivity] = SimpleQueue()
    with serving({"QueryRoute": route()}) as address:
        channel = ProxyChannel(address, headers, 1.0)
        channel.invoke(QUERY_ROUTE, REQUEST, Deadline.after(10))
        assert channel._channel is not None
        channel._channel.subscribe(states.put)
        while states.get(timeout=30) is not grpc.ChannelConnectivity.IDLE:
            pass
        assert channel.invoke(QUERY_ROUTE, REQUEST, Deadline.after(10)).status.code == Code.OK
        channel.close()


@pytest.mark.parametrize("connect_timeout_s", [0.5, 3.0, 24 * 86_400.0, 1e12])
def test_an_attempt_to_connect_ends_soon_after_the_call(
    connect_timeout_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server that accepts and says nothing would keep a descriptor of this process for all that time."""
    given: dict[str, Any] = {}
    opened = grpc.insecure_channel
    monkeypatch.setattr(
        grpc, "insecure_channel", lambda target, options: given.update(options) or opened(target, options)
    )
    with socket.create_server(("127.0.0.1", 0)) as silent:
        channel = ProxyChannel(f"127.0.0.1:{silent.getsockname()[1]}", headers, connect_timeout_s)
        with pytest.raises(errors.RocketMQError):
            channel.invoke(QUERY_ROUTE, REQUEST, Deadline.after(0.2))
        channel.close()
    assert given["grpc.min_reconnect_backoff_ms"] == min(20_000, 1000 * connect_timeout_s)


def test_idle_channel_is_closed_by_calls_of_other_channels(monkeypatch: pytest.MonkeyPatch) -> None:
    with serving({"QueryRoute": route()}) as address, socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setattr(channel_module, "_all_channels", LiveObjects(1.0))
        unused, used = (ProxyChannel(one, headers, 1e9) for one in (f"127.0.0.1:{silent.getsockname()[1]}", address))
        with pytest.raises(errors.RocketMQError):
            unused.invoke(QUERY_ROUTE, REQUEST, Deadline.after(0.2))
        peer = silent.accept()[0]
        peer.settimeout(30)
        used.invoke(QUERY_ROUTE, REQUEST, Deadline.after(10))
        assert unused._channel is not None
        assert used._channel is not None
        unused._last_used_s -= 101
        monkeypatch.setattr(channel_module._all_channels, "_next_due_s", 0.0)
        used.invoke(QUERY_ROUTE, REQUEST, Deadline.after(10))
        assert unused._channel is None
        assert used._channel is not None
        while peer.recv(1 << 16):  # until the end of the connection
            pass
        peer.close()
        with pytest.raises(errors.CallTimeout):
            unused.invoke(QUERY_ROUTE, REQUEST, Deadline.after(0.2))
        unused.close()
        used.close()


def test_a_channel_whose_tls_files_hang_stops_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as a pipe, or a file on a disk that does not answer: who uses another channel closes idle ones of all."""
    os.mkfifo(pipe := tmp_path / "ca.pem")
    monkeypatch.setattr(channel_module, "_all_channels", LiveObjects(0.0))
    outcomes: SimpleQueue[object] = SimpleQueue()

    def asked(channel: ProxyChannel) -> None:
        try:
            outcomes.put(channel.invoke(QUERY_ROUTE, REQUEST, Deadline.after(10)).status.code)
        except errors.RocketMQError as e:
            outcomes.put(type(e))

    with serving({"QueryRoute": route()}) as address:
        hung, used = ProxyChannel(address, headers, 1.0, Tls(str(pipe))), ProxyChannel(address, headers, 1.0)
        threading.Thread(target=asked, args=(hung,), daemon=True).start()
        awaited(hung._files_lock.locked)
        threading.Thread(target=asked, args=(used,), daemon=True).start()
        assert outcomes.get(timeout=30) == Code.OK
        closing = threading.Thread(target=hung.close, daemon=True)
        closing.start()
        closing.join(30)
        assert not closing.is_alive()
        with open(pipe, "w"):
            pass  # ends what reads it
        assert outcomes.get(timeout=30) is errors.ClosedError
        used.close()


def test_closing_idle_channel_waits_for_no_lock_or_watcher(certs: Certificates, tmp_path: Path) -> None:
    (trusted := tmp_path / "ca.pem").write_bytes(Path(certs.ca).read_bytes())
    with serving({"QueryRoute": route()}, encrypted(certs, "server")) as address:
        channel = ProxyChannel(address, headers, 1.0, Tls(str(trusted)))
        channel.invoke(QUERY_ROUTE, REQUEST, Deadline.after(30))
        with channel._lock:
            channel.close_idle(time.monotonic() + 101)
        assert channel._channel is not None
        assert channel._tls_files is not None
        trusted.unlink()
        channel._tls_files._stale_deadline = Deadline.after(0)
        channel.invoke(QUERY_ROUTE, REQUEST, Deadline.after(30))  # the connection is watched from here on
        closed_by: SimpleQueue[threading.Thread] = SimpleQueue()
        made, close = channel._channel, channel._channel.close
        made.close = lambda: (close(), closed_by.put(threading.current_thread()))
        channel.close_idle(time.monotonic() + 101)
        assert channel._channel is None
        assert closed_by.get(timeout=30) is not threading.current_thread()
        channel.close()


def test_a_channel_with_a_call_is_not_idle() -> None:
    entered, leave = threading.Event(), threading.Event()

    def slow(request: Any, context: grpc.ServicerContext) -> Any:
        entered.set()
        leave.wait(30)
        return route()(request, context)

    with serving({"QueryRoute": slow}) as address:
        for way in ("ask", "invoke_async"):
            channel, answers = ProxyChannel(address, headers, 1.0), SimpleQueue[Any]()
            entered.clear()
            leave.clear()
            if way == "ask":
                ask_it = lambda: answers.put(channel.invoke(QUERY_ROUTE, REQUEST, Deadline.after(60)))  # noqa: E731, B023
                threading.Thread(target=ask_it).start()
            else:
                channel.invoke_async(QUERY_ROUTE, REQUEST, Deadline.after(60), answers.put)
            assert entered.wait(30)
            channel.close_idle(time.monotonic() + 101)
            leave.set()
            assert answers.get(timeout=30).status.code == Code.OK
            awaited(lambda: not any(call.is_active() for call in channel._active_calls))  # noqa: B023
            channel.close_idle(time.monotonic() + 101)
            assert channel._channel is None
            channel.close()
