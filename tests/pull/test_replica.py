"""Which address a read pulls from, and what makes it another one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from rocketmq_spark.base.clock import Deadline
from rocketmq_spark.base.codes import Request, Response
from rocketmq_spark.errors import BrokerNotFound, ConnectionLost, RouteNotFound
from rocketmq_spark.pull import replica as replica_module
from rocketmq_spark.pull.replica import Replica
from rocketmq_spark.remoting.advertised import remedy
from rocketmq_spark.remoting.pool import ConnectOptions
from rocketmq_spark.remoting.transport import TlsSettings
from tests.client.conftest import Parts
from tests.mockbroker import MockBroker, refuse
from tests.source.scripted import route

MASTER, SLAVE = "m:1", "s:1"


@pytest.fixture
def make(parts: Parts, broker: MockBroker, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Replica]:
    """Opened streams are their addresses."""
    broker.on(Request.GET_ROUTEINFO_BY_TOPIC, route({"broker-a": {0: MASTER, 1: SLAVE}}))
    monkeypatch.setattr(replica_module, "BulkStream", lambda address, deadline, tls, **memory: address)

    def made(*how: Any, broker_name: str = "broker-a") -> Replica:
        return Replica(parts.pulls, parts.pool.connect_options, broker_name, "t", *how)

    return made


def address(replica: Replica) -> object:
    return replica(Deadline.after(30.0))


def test_a_stream_goes_where_an_address_leads_and_is_encrypted(
    make: Callable[..., Replica], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replica_module, "BulkStream", lambda address, deadline, tls, **memory: (address, tls))
    replica, tls = make("master", "known:1"), TlsSettings("ca.pem")
    replica.connect_options = ConnectOptions(tls=tls, address_map={"known:1": "mapped:1", MASTER: "mapped:2"})
    assert [address(replica), address(replica)] == [("mapped:1", tls), ("mapped:2", tls)]


def test_an_address_that_cannot_be_reached_is_explained(
    make: Callable[..., Replica], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A broker that was reached before is down. The address of the plan does not show that the name server answers."""

    def refused(address: str, *how: object, **memory: object) -> None:
        raise ConnectionLost("cannot connect: refused", address)

    fresh, planned, reached, mapped = make("master"), make("master", "pod:1"), make("master"), make("master")
    address(reached)
    mapped.connect_options = ConnectOptions(at_name_server=True)
    monkeypatch.setattr(replica_module, "BulkStream", refused)
    remedies = []
    for replica in (fresh, planned, reached, mapped):
        with pytest.raises(ConnectionLost) as caught:
            address(replica)
        remedies.append(caught.value.remedy)
    assert remedies == [remedy([MASTER]), None, None, None]


def test_what_the_plan_knew_comes_first_and_once(make: Callable[..., Replica]) -> None:
    replica = make("hint", "known:1")
    assert address(replica) == "known:1"
    assert [address(replica), address(replica)] == [MASTER, MASTER]


def test_a_slave_is_not_what_the_plan_knew(make: Callable[..., Replica]) -> None:
    replica = make("slave", "known:1")
    assert [address(replica), replica.is_at_master] == [SLAVE, False]


@pytest.mark.parametrize(("read_from", "moves"), [("hint", True), ("master", False), ("slave", False)])
def test_a_suggestion_is_followed_when_it_may_be(make: Callable[..., Replica], read_from: str, moves: bool) -> None:
    replica = make(read_from)
    assert replica.follow_hint(1) is moves
    assert not replica.follow_hint(1)
    assert address(replica) == (MASTER if read_from == "master" else SLAVE)


def test_the_master_has_the_last_word_where_a_slave_is_doubted(make: Callable[..., Replica]) -> None:
    replica = make("slave")
    assert address(replica) == SLAVE
    assert replica.follow_hint(None)
    assert [address(replica), replica.is_at_master] == [MASTER, True]
    assert not replica.follow_hint(None)


@pytest.mark.parametrize("read_from", ["master", "hint"])
def test_the_master_that_the_plan_knew_may_be_a_slave_by_now(make: Callable[..., Replica], read_from: str) -> None:
    replica = make(read_from, SLAVE)
    assert address(replica) == SLAVE
    assert replica.follow_hint(None)
    assert [address(replica), replica.follow_hint(None)] == [MASTER, False]


@pytest.mark.parametrize(("read_from", "master"), [("master", True), ("slave", False)])
def test_without_a_route_the_plan_is_believed(
    make: Callable[..., Replica], broker: MockBroker, read_from: str, master: bool
) -> None:
    """A topic that was deleted: its broker says so, and no route is left that could name another master."""
    replica = make(read_from, MASTER)
    address(replica)
    assert replica.follow_hint(None)
    broker.on(Request.GET_ROUTEINFO_BY_TOPIC, refuse(Response.TOPIC_NOT_EXIST))
    with pytest.raises(RouteNotFound):
        address(replica)
    assert replica.follow_hint(None) is not master


def test_slave_stays_a_slave_when_its_master_is_unreachable(
    make: Callable[..., Replica], monkeypatch: pytest.MonkeyPatch
) -> None:
    replica = make("slave")
    assert [address(replica), replica.follow_hint(None)] == [SLAVE, True]
    monkeypatch.setattr(replica_module, "BulkStream", _refuse)
    with pytest.raises(ConnectionLost):
        address(replica)
    assert replica.follow_hint(None)


def test_who_was_sent_to_the_master_stays_there(make: Callable[..., Replica]) -> None:
    """The master's word takes its time: a look for another address does not lead back to the slave meanwhile."""
    replica = make("slave")
    address(replica)
    replica.follow_hint(None)
    assert address(replica) == MASTER
    assert not replica.follow_hint(None)
    assert address(replica) == MASTER


def _refuse(*_: object, **memory: object) -> None:
    raise ConnectionLost("cannot connect: Connection refused", MASTER)


def test_a_broker_without_an_address(make: Callable[..., Replica]) -> None:
    with pytest.raises(BrokerNotFound, match="no address of broker 'broker-z' is registered"):
        address(make(broker_name="broker-z"))


def test_a_slave_that_acts_as_master_is_none(make: Callable[..., Replica], broker: MockBroker) -> None:
    broker.on(Request.GET_ROUTEINFO_BY_TOPIC, route({"broker-a": {0: SLAVE}}, perm=4, acting=True))
    broker.on(Request.GET_BROKER_CLUSTER_INFO, refuse(Response.SYSTEM_BUSY))
    replica = make("hint")
    assert [address(replica), replica.is_at_master] == [SLAVE, False]
