"""The scripted client of ``tests/client``: its ``Parts`` are what administration asks with."""

from __future__ import annotations

import json

import pytest

from rocketmq_spark.base.codes import Request
from tests.client.conftest import Parts, broker, parts
from tests.mockbroker import MockBroker, ok

__all__ = ["broker", "parts", "tools"]


@pytest.fixture
def tools(broker: MockBroker, parts: Parts) -> Parts:
    """With a cluster of ``broker-a`` alone, which is the scripted broker."""
    table = {"broker-a": {"brokerName": "broker-a", "cluster": "c", "brokerAddrs": {"0": broker.address}}}
    broker.on(
        Request.GET_BROKER_CLUSTER_INFO, ok(json.dumps({"brokerAddrTable": table, "clusterAddrTable": {}}).encode())
    )
    return parts
