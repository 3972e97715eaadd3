"""Registration at the name server, seen on a running broker."""

from __future__ import annotations

import time
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from rocketmq_spark.base.clock import Deadline
from rocketmq_spark.localbroker import LocalBroker
from rocketmq_spark.localbroker.members import _NUDGE_EVERY_S, Registration
from rocketmq_spark.localbroker.process import Server
from rocketmq_spark.localbroker.servers import BrokerSpec

SPEC = BrokerSpec("broker-a", 0)


@pytest.fixture
def registration(one_broker: LocalBroker) -> Iterator[Registration]:
    registration = Registration([one_broker._members.server("namesrv")], {})
    yield registration
    registration.close()


@pytest.fixture
def server(one_broker: LocalBroker) -> Server:
    return one_broker._members.server("broker-a")


def test_shown_and_not_shown(registration: Registration, server: Server) -> None:
    assert registration.shows(SPEC, server)
    assert not registration.shows(BrokerSpec("broker-a", 1), server)
    assert not registration.shows(BrokerSpec("broker-z", 0), server)


@pytest.mark.parametrize("pid", [1, None], ids=["does not answer", "does not run"])
def test_a_name_server_that_is_away_shows_nothing(server: Server, pid: int | None) -> None:
    registration = Registration([SimpleNamespace(address="127.0.0.1:1", pid=pid)], {})
    assert not registration.shows(SPEC, server)
    assert registration.hides(SPEC, server)
    registration.close()


def test_all_that_run_must_show_a_broker(one_broker: LocalBroker, server: Server) -> None:
    servers = [one_broker._members.server("namesrv"), SimpleNamespace(address="127.0.0.1:1", pid=1)]
    registration = Registration(servers, {})
    assert not registration.shows(SPEC, server)
    assert not registration.hides(SPEC, server)
    servers[1].pid = None
    assert registration.shows(SPEC, server)
    registration.close()


def test_a_nudge_registers_and_leaves_the_configuration_alone(registration: Registration, server: Server) -> None:
    conf = server.program.home / "broker.conf"
    before, registered = conf.read_text(), server.log().count("Registering current broker to name server completed")
    assert not registration.shows_or_nudges(BrokerSpec("broker-z", 0), server)
    server.wait_until(
        lambda: server.log().count("Registering current broker to name server completed") > registered,
        Deadline.after(9.0),
    )
    assert conf.read_text() == before


def test_nudges_are_not_a_storm(registration: Registration, server: Server) -> None:
    stranger, told = BrokerSpec("broker-z", 0), "updateBrokerConfig, new config"
    before, begun = server.log().count(told), time.monotonic()
    for _ in range(20):
        registration.shows_or_nudges(stranger, server)
    most = (time.monotonic() - begun) / _NUDGE_EVERY_S + 1
    assert 1 <= server.log().count(told) - before <= most
