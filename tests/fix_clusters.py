"""Clusters that several test files share because starting one costs seconds: with users, with TLS, with slaves.

Idle servers cost a part of a core each. So tests that share a cluster run one after the other (``fix_house`` sorts them),
and the cluster ends with the last of them; it is started again when another test wants it later.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import uuid
from collections.abc import Callable, Generator, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest

from rocketmq_spark import options, session
from rocketmq_spark.client.admin import BaseAdmin
from rocketmq_spark.localbroker import LocalBroker, cluster, distribution, servers
from rocketmq_spark.options import DEFAULT_GROUP
from rocketmq_spark.wire.header import Command
from tests.fix_house import LASTING, is_over
from tests.fix_proxy import FaultyProxy
from tests.reading import feed

_running: dict[str, tuple[pytest.FixtureDef[Any], pytest.FixtureRequest]] = {}


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup(
    fixturedef: pytest.FixtureDef[Any], request: pytest.FixtureRequest
) -> Generator[None, object, object]:
    made = yield
    if fixturedef.argname in LASTING:
        _running[fixturedef.argname] = (fixturedef, request)
    return made


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> Generator[None, None, None]:
    yield
    for name in [name for name in _running if is_over(name, nextitem)]:
        fixture, request = _running.pop(name)
        fixture.finish(request)


# Half a second of processor less for each start. Nothing can be delayed then, except by levels, no topic be deleted, and
# what was popped does not come again.
WITHOUT_TIMERS = {"timerWheelEnable": False}
WITH_TIMERS = {"timerWheelEnable": True}
# A broker that asks soon about half messages. It does not ask about what is decided: LocalBroker's brokers note that at once.
ASKS = {"transactionTimeOut": 5000, "transactionCheckInterval": 1000}

_AUTH = "org.apache.rocketmq.auth"
ADMIN = {"accessKey": "admin", "secretKey": "adminsecret"}
SECURED = {
    "authenticationEnabled": True,
    "authorizationEnabled": True,
    "authenticationProvider": f"{_AUTH}.authentication.provider.DefaultAuthenticationProvider",
    "authenticationMetadataProvider": f"{_AUTH}.authentication.provider.LocalAuthenticationMetadataProvider",
    "authorizationProvider": f"{_AUTH}.authorization.provider.DefaultAuthorizationProvider",
    "authorizationMetadataProvider": f"{_AUTH}.authorization.provider.LocalAuthorizationMetadataProvider",
    "initAuthenticationUser": '{"username":"admin","password":"adminsecret"}',
    "innerClientAuthenticationCredentials": '{"accessKey":"admin","secretKey":"adminsecret"}',
    "autoCreateSubscriptionGroup": False,
}
_CREATE_USER, _CREATE_ACL = 3001, 3006


@dataclass(frozen=True, slots=True)
class Secured:
    """A broker that asks who you are and lets nobody create groups by reading."""

    mq: LocalBroker
    admin: BaseAdmin

    def user(self, name: str, *grants: tuple[str, str]) -> dict[str, str]:
        """A user with so many grants: ``("Topic:orders", "Sub,Get")``; its connection options."""
        calls, address = self.admin.offset_reader.rpc_client, self.mq.address("broker-a")
        user = {"username": name, "password": f"{name}-secret", "userType": "Normal"}
        calls.request(address, Command(_CREATE_USER, {"username": name}, body=json.dumps(user).encode()))
        entries = [
            {"resource": resource, "actions": actions.split(","), "sourceIps": [], "decision": "Allow"}
            for resource, actions in grants
        ]
        if entries:
            subject = f"User:{name}"
            policy = {"subject": subject, "policies": [{"policyType": "Custom", "entries": entries}]}
            calls.request(address, Command(_CREATE_ACL, {"subject": subject}, body=json.dumps(policy).encode()))
        return {"accessKey": name, "secretKey": f"{name}-secret"}


@pytest.fixture(scope="session")
def secured() -> Iterator[Secured]:
    with LocalBroker(conf={**SECURED, **WITHOUT_TIMERS}, quiet=True) as mq:
        parsed = options.parse({"nameServer": mq.name_server, **ADMIN}).for_role("producer")
        admin = session.client(parsed).admin
        admin.create_group(DEFAULT_GROUP)
        yield Secured(mq, admin)


@pytest.fixture(scope="session")
def proxied() -> Iterator[LocalBroker]:
    """A broker and a Proxy; not to be broken."""
    with LocalBroker(proxy=True, quiet=True) as mq:
        yield mq


# A name that no machine resolves, as that of a pod from outside of its cluster.
POD = "rocketmq-proxy-0.invalid"


@pytest.fixture(scope="session")
def hidden_proxy() -> Iterator[LocalBroker]:
    """Two brokers and a Proxy that advertises an address which cannot be reached, and that keep traces; not to be broken."""
    conf, proxy = {**WITHOUT_TIMERS, "traceTopicEnable": True}, {"remotingAccessAddr": POD, "traceOn": True}
    with LocalBroker(2, conf=conf, proxy=proxy, quiet=True) as mq:
        yield mq


@pytest.fixture(scope="session")
def local_proxy() -> Iterator[LocalBroker]:
    """A broker with a Proxy in LOCAL mode, as the quick start of RocketMQ runs them; not to be broken."""
    with LocalBroker(proxy={"proxyMode": "LOCAL"}, conf=WITHOUT_TIMERS, quiet=True) as mq:
        yield mq


@pytest.fixture(scope="session")
def asking_proxy() -> Iterator[LocalBroker]:
    """A broker that asks soon about half messages, and a Proxy; not to be broken."""
    with LocalBroker(conf={**WITHOUT_TIMERS, **ASKS}, proxy=True, quiet=True) as mq:
        yield mq


@pytest.fixture(scope="session")
def slaved() -> Iterator[LocalBroker]:
    """A master with a slave; not to be broken."""
    with LocalBroker(slaves=1, conf=WITHOUT_TIMERS, quiet=True) as mq:
        yield mq


@pytest.fixture(scope="session")
def one_broker() -> Iterator[LocalBroker]:
    with LocalBroker(conf=WITHOUT_TIMERS, quiet=True) as mq:
        yield mq


@pytest.fixture
def lone(one_broker: LocalBroker) -> LocalBroker:
    """One broker without timers to be frozen, killed and restarted: it runs when a test begins. Use topics of your own."""
    return all_running(one_broker)


@pytest.fixture(scope="session")
def timerless() -> Iterator[LocalBroker]:
    """A broker for tests that ask for its state often: with timers the answer takes it 190 ms, because it counts what each second
    of a week has. Not to be broken.
    """
    with LocalBroker(conf=WITHOUT_TIMERS, quiet=True) as mq:
        yield mq


@pytest.fixture
def make_timerless_topic(timerless: LocalBroker) -> Callable[..., str]:
    """As ``make_topic``, of that broker."""

    def make(**how: Any) -> str:
        name = f"topic-{uuid.uuid4().hex[:12]}"
        timerless.create_topic(name, **how)
        return name

    return make


@pytest.fixture(scope="session")
def two_brokers() -> Iterator[LocalBroker]:
    with LocalBroker(brokers=2, quiet=True) as mq:
        yield mq


@pytest.fixture
def pair(two_brokers: LocalBroker) -> LocalBroker:
    """Two brokers to be frozen, killed and restarted: both run when a test begins. Use topics of your own."""
    return all_running(two_brokers)


def all_running(mq: LocalBroker) -> LocalBroker:
    """The cluster, with what an earlier test killed, stopped or froze at work again."""
    for server in ("namesrv", *mq.brokers, *mq.slaves):
        pid = mq.pid(server)
        if pid is None:
            mq.restart(server)
        else:
            os.kill(pid, signal.SIGCONT)
    return mq


@pytest.fixture
def make_cluster() -> Iterator[Callable[..., LocalBroker]]:
    """A function that starts a cluster for this test alone: brokers, slaves, conf and more, as LocalBroker takes them.

    For what ``lone`` and ``pair`` do not give: another configuration, slaves, stores that are lost, brokers that are added.
    Without timers, as WITHOUT_TIMERS says.
    """
    with contextlib.ExitStack() as stack:

        def start(conf: Mapping[str, object] = MappingProxyType({}), **how: Any) -> LocalBroker:
            return stack.enter_context(LocalBroker(quiet=True, conf={**WITHOUT_TIMERS, **conf}, **how))

        yield start


@dataclass(frozen=True, slots=True)
class Certificates:
    """PEM files: an authority, a server's certificate for 127.0.0.1, one for another name, and a client's."""

    folder: Path

    @property
    def ca(self) -> str:
        return str(self.folder / "ca.pem")

    def cert(self, name: str) -> str:
        return str(self.folder / f"{name}.pem")

    def key(self, name: str) -> str:
        return str(self.folder / f"{name}.key")

    def make(self, name: str, subject: str, signer: str | None = "ca", password: str | None = None) -> None:
        """A certificate signed by ``signer``, itself without one."""
        ec = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1"]
        lock = ["-passout", f"pass:{password}"] if password else ["-nodes"]
        out = ["-keyout", self.key(name), "-out", self.cert(name), "-days", "2", "-subj", f"/CN={name}"]
        signed = ["-CA", self.cert(signer), "-CAkey", self.key(signer)] if signer else []
        # Each is an authority, by default; from 3.13 on Python wants to know what the key of one is for.
        uses = ["-addext", "keyUsage=critical,keyCertSign,digitalSignature"]
        names = ["-addext", f"subjectAltName={subject}", *uses]
        command = ["openssl", "req", "-x509", *ec, *lock, *out, *signed, *names]
        subprocess.run(command, check=True, capture_output=True)


def certificates(folder: Path) -> Certificates:
    made = Certificates(folder)
    made.make("ca", "DNS:ca", signer=None)
    made.make("server", "IP:127.0.0.1")
    made.make("elsewhere", "DNS:broker.example")
    made.make("client", "DNS:client", password="open sesame")
    made.make("stranger", "DNS:stranger", signer=None)
    return made


def tls_cluster(
    certs: Certificates, name: str = "server", client: str = "none", conf: Mapping[str, object] = MappingProxyType({})
) -> LocalBroker:
    """A cluster whose servers speak TLS beside plain text; ``client`` is whether they ask for a client's certificate."""
    flags = (
        "-Dtls.server.mode=permissive",
        "-Dtls.test.mode.enable=false",
        f"-Dtls.server.certPath={certs.cert(name)}",
        f"-Dtls.server.keyPath={certs.key(name)}",
        f"-Dtls.server.need.client.auth={client}",
        f"-Dtls.server.authClient={str(client != 'none').lower()}",
        f"-Dtls.server.trustCertPath={certs.ca}",
    )
    plain_flags, fetch = servers._flags, distribution.fetch
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(servers, "_flags", lambda home: (*plain_flags(home)[1:], *flags))
        patch.setattr(cluster.distribution, "fetch", lambda names, quiet=False: fetch([*names, "tls-test"], quiet))
        made = LocalBroker(quiet=True, conf=conf)
        made.start()
        return made


@pytest.fixture(scope="session")
def certs(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return certificates(tmp_path_factory.mktemp("certificates"))


@pytest.fixture(scope="session")
def encrypted(certs: Certificates) -> Iterator[LocalBroker]:
    """Servers that want a client's certificate when they are spoken to in TLS; some messages in the topic private."""
    with_tls = tls_cluster(certs, client="require")
    try:
        with_tls.create_topic("private", 2)
        with_tls.bodies = set(feed(with_tls, "private", 6))  # type: ignore[attr-defined]
        yield with_tls
    finally:
        with_tls.close()


@pytest.fixture(scope="session")
def elsewhere(certs: Certificates) -> Iterator[LocalBroker]:
    """Servers whose certificate is for another name."""
    made = tls_cluster(certs, "elsewhere")
    yield made
    made.close()


class Tap(FaultyProxy):
    """A proxy that keeps what clients send."""

    def __init__(self, target: str) -> None:
        super().__init__(target)
        self.data = bytearray()

    def pass_on(self, sink: socket.socket, data: bytes, answers: bool) -> None:
        if not answers:
            self.data += data
        super().pass_on(sink, data, answers)

    def field(self, name: str, request: int) -> set[str]:
        """The values of a header field in requests of a code."""
        headers = re.findall(rb'\{"code": ?%d,[^{}]*"extFields": ?\{([^{}]*)\}' % request, bytes(self.data))
        found = (re.search(rb'"%s": ?"([^"]*)"' % name.encode(), header) for header in headers)
        return {match[1].decode() for match in found if match}


@pytest.fixture
def make_tap() -> Iterator[Callable[[str], Tap]]:
    """A function that puts a tap in front of an address."""
    made: list[Tap] = []

    def make(target: str) -> Tap:
        made.append(Tap(target))
        made[-1].__enter__()
        return made[-1]

    yield make
    for tap in made:
        tap.__exit__()
