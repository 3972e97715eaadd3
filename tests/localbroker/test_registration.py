"""Registration at the name server, seen on a running broker."""

from __future__ import annotations

import time
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from rocketmq_spark.localbroker import LocalBroker
from rocketmq_spark.localbroker.cluster_servers import _TRIGGER_INTERVAL_S, Registration
from rocketmq_spark.localbroker.processes import Server
from rocketmq_spark.localbroker.servers import BrokerSpec
from tests.helpers import awaited

SPEC = BrokerSpec("broker-a", 0)


@pytest.fixture
def registration(lone: LocalBroker) -> Iterator[Registration]:
    registration = Registration([lone._servers.server("namesrv")])
    yield registration
    registration.close()


@pytest.fixture
def server(lone: LocalBroker) -> Server:
    return lone._servers.server("broker-a")


def test_shown_and_not_shown(registration: Registration, server: Server) -> None:
    assert registration.shows(SPEC, server)
    assert not registration.shows(BrokerSpec("broker-a", 1), server)
    assert not registration.shows(BrokerSpec("broker-z", 0), server)


@pytest.mark.parametrize("pid", [1, None], ids=["does not answer", "does not run"])
def test_a_name_server_that_is_away_shows_nothing(server: Server, pid: int | None) -> None:
    registration = Registration([SimpleNamespace(address="127.0.0.1:1", pid=pid)])
    assert not registration.shows(SPEC, server)
    assert registration.hides(SPEC, server)
    registration.close()


def test_all_that_run_must_show_a_broker(lone: LocalBroker, server: Server) -> None:
    servers = [lone._servers.server("namesrv"), SimpleNamespace(address="127.0.0.1:1", pid=1)]
    registration = Registration(servers)
    assert not registration.shows(SPEC, server)
    assert not registration.hides(SPEC, server)
    servers[1].pid = None
    assert registration.shows(SPEC, server)
    registration.close()


def test_a_trigger_registers_and_leaves_the_configuration_alone(registration: Registration, server: Server) -> None:
    """By itself a broker registers once in ten seconds."""
    conf, told = server.program.home / "broker.conf", "Registering current broker to name server completed"
    before, registered, begun = conf.read_text(), server.log().count(told), time.monotonic()

    def oftener() -> bool:
        assert not registration.shows_or_triggers(BrokerSpec("broker-z", 0), server)
        return server.log().count(told) - registered > (time.monotonic() - begun) / 10 + 1

    awaited(oftener)
    assert conf.read_text() == before


def test_a_trigger_sends_a_broker_the_permission_that_it_has(
    lone: LocalBroker, registration: Registration, server: Server
) -> None:
    conf = server.program.home / "broker.conf"
    before = conf.read_text()
    try:
        conf.write_text(f"{before}brokerPermission=4\n")
        registration._trigger_registration(server)
        assert lone.admin.broker_config("broker-a")["brokerPermission"] == "4"
    finally:
        conf.write_text(before)
        registration._trigger_registration(server)
    assert lone.admin.broker_config("broker-a")["brokerPermission"] == "6"


def test_registrations_are_not_triggered_all_the_time(registration: Registration, server: Server) -> None:
    stranger, told = BrokerSpec("broker-z", 0), "updateBrokerConfig, new config"
    before, begun = server.log().count(told), time.monotonic()
    for _ in range(20):
        registration.shows_or_triggers(stranger, server)
    most = (time.monotonic() - begun) / _TRIGGER_INTERVAL_S + 1
    assert 1 <= server.log().count(told) - before <= most
