"""Which address a read pulls from, and what makes it another one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from rocketmq_spark.clock import Deadline
from rocketmq_spark.codes import Request
from rocketmq_spark.errors import BrokerNotFound
from rocketmq_spark.pull import replica as replica_module
from rocketmq_spark.pull.replica import Replica
from tests.client.conftest import Parts
from tests.mockbroker import MockBroker
from tests.source.scripted import route

MASTER, SLAVE = "m:1", "s:1"


@pytest.fixture
def make(parts: Parts, broker: MockBroker, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Replica]:
    """Opened streams are their addresses."""
    broker.on(Request.GET_ROUTEINFO_BY_TOPIC, route({"broker-a": {0: MASTER, 1: SLAVE}}))
    monkeypatch.setattr(replica_module, "BulkStream", lambda address, deadline, tls: address)

    def made(*how: Any, broker_name: str = "broker-a") -> Replica:
        return Replica(parts.pulls, parts.pool.dialling, broker_name, "t", *how)

    return made


def address(replica: Replica) -> object:
    return replica(Deadline.after(5.0))


def test_what_the_plan_knew_comes_first_and_once(make: Callable[..., Replica]) -> None:
    replica = make("hint", "known:1")
    assert [address(replica), replica.at_master] == ["known:1", True]
    assert [address(replica), address(replica)] == [MASTER, MASTER]


def test_a_slave_is_not_what_the_plan_knew(make: Callable[..., Replica]) -> None:
    replica = make("slave", "known:1")
    assert [address(replica), replica.at_master] == [SLAVE, False]


@pytest.mark.parametrize(("read_from", "moves"), [("hint", True), ("master", False), ("slave", False)])
def test_a_suggestion_is_followed_when_it_may_be(make: Callable[..., Replica], read_from: str, moves: bool) -> None:
    replica = make(read_from)
    assert replica.hint(1) is moves
    assert not replica.hint(1)
    assert address(replica) == (MASTER if read_from == "master" else SLAVE)


def test_the_master_has_the_last_word_where_a_slave_is_doubted(make: Callable[..., Replica]) -> None:
    replica = make("slave")
    assert address(replica) == SLAVE
    assert replica.hint(None)
    assert [address(replica), replica.at_master] == [MASTER, True]
    assert not replica.hint(None)


def test_a_broker_without_an_address(make: Callable[..., Replica]) -> None:
    with pytest.raises(BrokerNotFound, match="no address of broker 'broker-z' is registered"):
        address(make(broker_name="broker-z"))
