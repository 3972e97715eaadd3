"""The scripted client of ``tests/client``: its ``Parts`` are what administration asks with."""

from __future__ import annotations

import pytest

from rocketmq_spark.base.codes import Request
from tests.client.conftest import Parts, broker, parts
from tests.mockbroker import MockBroker, cluster

__all__ = ["broker", "parts", "tools"]


@pytest.fixture
def tools(broker: MockBroker, parts: Parts) -> Parts:
    """With a cluster of ``broker-a`` alone, which is the scripted broker."""
    broker.on(Request.GET_BROKER_CLUSTER_INFO, cluster({"broker-a": {"0": broker.address}}))
    return parts
