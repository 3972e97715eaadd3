"""Endpoints that have the fault: a real Proxy, and a server that is told what to say for what a real one cannot be made to do."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from click.testing import CliRunner, Result

from rocketmq_spark import session
from rocketmq_spark.cli.command import app
from rocketmq_spark.cli.connection import Target
from rocketmq_spark.cli.doctor import command
from rocketmq_spark.cli.doctor.command import Subject
from rocketmq_spark.cli.doctor.findings import Finding, Level, broker_target, check_proxies, proxy_options
from rocketmq_spark.grpc_proxy.protos import proto
from rocketmq_spark.grpc_proxy.tables import Code, MessageType, Permission
from rocketmq_spark.localbroker import LocalBroker
from tests.cli.conftest import documents
from tests.fix_clusters import Certificates
from tests.grpc_proxy.scripted import route, serving, status
from tests.live.grpc.proxied import new_topic
from tests.reading import names


@pytest.fixture(autouse=True)
def _channels_end() -> Iterator[None]:
    yield
    session.close_all()


def doctor(endpoints: str, *topics: str, **options: object) -> list[Finding]:
    return list(check_proxies(Target({"proxyEndpoint": endpoints, "requestTimeout": "10s", **options}), topics))


def levels(found: list[Finding]) -> list[tuple[str, Level]]:
    return [(one.check, one.level) for one in found]


def refusing(code: int) -> object:
    return lambda request, context: proto("QueryRouteResponse")(status=status(code, "no"))


def test_a_brokers_port_is_named(rocketmq: LocalBroker) -> None:
    for address in (rocketmq.address("broker-a"), rocketmq.name_server):
        (found,) = doctor(address)
        assert (found.check, found.level) == ("proxy", Level.BROKEN)
        assert "If this is the port of a broker or name server, use the Proxy's port for gRPC" in (found.remedy or "")


class TestARealProxy:
    def test_routes_and_types_of_topics(self, proxied: LocalBroker) -> None:
        normal, fifo = new_topic(proxied), new_topic(proxied, "FIFO")
        (missing,) = names(1, "nowhere")
        found = doctor(proxied.proxy_grpc, normal, fifo, missing)
        assert levels(found) == [
            ("proxy", Level.OK), (f"topic {normal}", Level.OK), (f"topic {fifo}", Level.ADVICE),
            (f"topic {missing}", Level.BROKEN),
        ]  # fmt: skip
        assert "takes NORMAL" in found[1].text
        assert "takes FIFO" in found[2].text
        assert "no such topic" in found[3].text

    def test_a_topic_that_may_not_be_written(self, proxied: LocalBroker) -> None:
        (topic,) = names(1, "readonly")
        proxied.admin.create_topic(topic, 2, perm=4)
        assert levels(doctor(proxied.proxy_grpc, topic)) == [("proxy", Level.OK), (f"topic {topic}", Level.BROKEN)]

    def test_other_ports(self, proxied: LocalBroker) -> None:
        """Those of a name server, and the Proxy's for Remoting, which are given by mistake."""
        for address in (proxied.name_server, proxied.proxy_server):
            (found,) = doctor(address, "t")
            assert (found.level, address in found.text) == (Level.BROKEN, True)

    def test_no_tls_where_it_is_asked_for(self, proxied: LocalBroker, certs: Certificates) -> None:
        (found,) = doctor(proxied.proxy_grpc, tls=True, tlsCaFile=certs.ca)
        assert (found.level, "does not support TLS" in found.text) == (Level.BROKEN, True)

    def test_beside_its_brokers(self, proxied: LocalBroker, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(command, "check_machine", lambda: iter(()))
        topic = new_topic(proxied)
        target = Target({"name_server": proxied.name_server, "proxyEndpoint": proxied.proxy_grpc})
        checks = [one.check for one in command.examine(target, Subject([topic]))]
        assert [checks.count(name) for name in ("proxy", "name server", "brokers", f"topic {topic}")] == [1, 1, 1, 2]

    def test_the_command(self, proxied: LocalBroker, no_broker: Path) -> None:
        def run(*arguments: str) -> Result:
            return CliRunner().invoke(app, arguments)

        done = run("doctor", "--proxy-endpoint", proxied.proxy_grpc, "--group", "g", "--json")
        rows = [(row["check"], row["level"]) for row in documents(done.stdout)][-2:]
        assert rows == [("proxy", "ok"), ("readers", "advice")]
        away = run("doctor", "--json", "-o", "proxyEndpoint=127.0.0.1:1")
        assert (away.exit_code, documents(away.stdout)[-1]["level"]) == (1, "broken")


def test_nobody_there_and_one_of_two(certs: Certificates) -> None:
    with serving({"QueryRoute": route(MessageType.NORMAL)}) as address:
        away, there, topic = doctor(f"127.0.0.1:1;{address}", "t")
    assert (away.check, away.level, "127.0.0.1:1 cannot be used" in away.text) == ("proxy", Level.BROKEN, True)
    assert "gRPC port is reachable" in (away.remedy or "")
    assert (there.level, address in there.text, topic.level) == (Level.OK, True, Level.OK)


def test_one_that_hangs() -> None:
    def hang(request: object, context: grpc.ServicerContext) -> object:
        over = threading.Event()
        context.add_callback(over.set)
        over.wait()
        return route(MessageType.NORMAL)(request, context)

    with serving({"QueryRoute": hang}) as address:
        (found,) = doctor(address, requestTimeout="200ms")
    assert (found.level, "in time" in found.text) == (Level.BROKEN, True)


def test_tls_on_one_side_only(certs: Certificates) -> None:
    pair = [(Path(certs.key("server")).read_bytes(), Path(certs.cert("server")).read_bytes())]
    answers = {"QueryRoute": route(MessageType.NORMAL)}
    with serving(answers, grpc.ssl_server_credentials(pair)) as address:
        (plain,) = doctor(address, "t")
        assert (plain.level, "set option 'tls'" in (plain.remedy or "")) == (Level.BROKEN, True)
        well = doctor(address, "t", tls=True, tlsCaFile=certs.ca)
        assert levels(well) == [("proxy", Level.OK), ("topic t", Level.OK)]
        assert "in TLS" in well[0].text
        (stranger,) = doctor(address, "t", tls=True, tlsCaFile=certs.cert("stranger"))
        assert (stranger.level, "not trusted" in stranger.text) == (Level.BROKEN, True)
    with serving(answers) as address:
        (without,) = doctor(address, "t", tls=True, tlsCaFile=certs.ca)
        assert (without.level, "does not support TLS" in without.text, "'tls'" in (without.remedy or "")) == (
            Level.BROKEN, True, True,
        )  # fmt: skip


def test_who_asks_is_not_known_or_may_not(certs: Certificates) -> None:
    with serving({"QueryRoute": refusing(Code.UNAUTHORIZED)}) as address:
        (found,) = doctor(address, "t", accessKey="me", secretKey="guess")
    assert (found.level, "does not know this user" in found.text, "guess" in str(found)) == (Level.BROKEN, True, False)
    with serving({"QueryRoute": refusing(Code.FORBIDDEN)}) as address:
        assert levels(doctor(address, "t")) == [("proxy", Level.OK), ("topic t", Level.BROKEN)]


def test_no_queue_is_writable() -> None:
    with serving({"QueryRoute": route(MessageType.NORMAL, permission=Permission.READ)}) as address:
        proxy, topic = doctor(address, "t")
    assert (proxy.level, topic.level, "no write permission" in topic.text) == (Level.OK, Level.BROKEN, True)


def test_something_else_that_speaks_grpc() -> None:
    with serving({}) as address:
        (found,) = doctor(address, "t")
    assert (found.level, "not the gRPC port of a Proxy" in found.text) == (Level.BROKEN, True)


def test_what_is_given_goes_to_whom_it_concerns() -> None:
    given = {
        "name_server": "h:1", "addressMap": "{}", "sql": "a > 1", "requestTimeout": "1s", "proxy_endpoint": "h:2",
        "tlsServerName": "x", "nonsense": "1",
    }  # fmt: skip
    assert proxy_options(Target(given)) == {
        "requestTimeout": "1s", "proxy_endpoint": "h:2", "tlsServerName": "x", "nonsense": "1", "transport": "grpc",
    }  # fmt: skip
    brokers = broker_target(Target(given))
    assert brokers is not None
    assert brokers.given_options.keys() == {"name_server", "addressMap", "sql", "requestTimeout", "nonsense"}
    assert broker_target(Target({"proxyEndpoint": "h:2"})) is None
    assert proxy_options(Target({"name_server": "h:1"})) is None
    assert broker_target(Target({})) is not None
    (found,) = check_proxies(Target({"transport": "grpc"}), [])
    assert (found.check, found.level, "proxyEndpoint" in found.text) == ("options", Level.BROKEN, True)
