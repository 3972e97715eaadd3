"""The scripted client of ``tests/client``: its ``Parts`` are what administration asks with."""

from __future__ import annotations

import json
from collections.abc import Mapping

import pytest

from rocketmq_spark.base.codes import Request
from rocketmq_spark.wire.header import Command
from tests.client.conftest import Parts, broker, parts
from tests.mockbroker import MockBroker, ok

__all__ = ["broker", "parts", "tools"]


def cluster(servers: Mapping[str, Mapping[str, str]]) -> Command:
    """What a name server answers: of each broker the addresses by broker id."""
    table = {name: {"brokerName": name, "cluster": "c", "brokerAddrs": at} for name, at in servers.items()}
    return ok(json.dumps({"brokerAddrTable": table, "clusterAddrTable": {}}).encode())


@pytest.fixture
def tools(broker: MockBroker, parts: Parts) -> Parts:
    """With a cluster of ``broker-a`` alone, which is the scripted broker."""
    broker.on(Request.GET_BROKER_CLUSTER_INFO, cluster({"broker-a": {"0": broker.address}}))
    return parts
