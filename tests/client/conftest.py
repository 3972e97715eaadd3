"""A client over a scripted broker that is its own name server, and one over a real cluster."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from rocketmq_spark.base.clock import Deadline
from rocketmq_spark.base.codes import Request
from rocketmq_spark.base.retry import Retry
from rocketmq_spark.client.admin import BaseAdmin
from rocketmq_spark.client.broker_client import BrokerClient
from rocketmq_spark.client.committer import RemotingCommitter
from rocketmq_spark.client.instance import ClientInstance, MemberRegistry
from rocketmq_spark.client.long_polls import LongPolls
from rocketmq_spark.client.member import RemotingMember
from rocketmq_spark.client.name_servers import NameServers
from rocketmq_spark.client.offsets import RemotingOffsetReader
from rocketmq_spark.client.pull_source import RemotingPulls
from rocketmq_spark.client.replies import AwaitedReplies, RemotingReplies
from rocketmq_spark.client.routes import Routes
from rocketmq_spark.client.rpc import RpcClient
from rocketmq_spark.client.sender import RemotingSender
from rocketmq_spark.client.topic_attributes import TopicAttributesCache
from rocketmq_spark.localbroker import LocalBroker
from rocketmq_spark.remoting.pool import ConnectOptions, Pool
from tests.mockbroker import MockBroker, route, topic_config


class Parts:
    """The rooms of a client, wired by hand."""

    def __init__(self, name_server: str, **how: Any) -> None:
        awaited = AwaitedReplies()
        self.groups = MemberRegistry(awaited.on_reply)
        connect_options = ConnectOptions(
            how.pop("connect_timeout_s", 30.0),
            address_map=how.pop("address_map", {}),
            at_name_server=how.pop("at_name_server", False),
        )
        self.pool = Pool(connect_options, self.groups.on_request)
        self.rpc_client = RpcClient(self.pool, **how)
        self.name_servers = NameServers(self.rpc_client, name_server.split(";"))
        self.routes = Routes(self.name_servers)
        self.broker_client = BrokerClient(self.rpc_client, self.routes)
        self.offset_reader = RemotingOffsetReader(self.broker_client)
        self.instance = ClientInstance(self.groups, self.rpc_client, self.routes)
        self.kinds = TopicAttributesCache(self.rpc_client, self.routes)
        self.sender = RemotingSender(self.rpc_client, self.routes, self.instance, self.kinds)
        self.admin = BaseAdmin(name_server, self.rpc_client)
        polls = LongPolls(self.rpc_client, self.routes, self.kinds)
        self.committer = RemotingCommitter(self.broker_client, self.admin, polls)
        self.member = RemotingMember(self.broker_client, self.routes, self.instance, self.sender, polls)
        self.replies = RemotingReplies(self.rpc_client, self.routes, self.instance, awaited)
        self.pulls = RemotingPulls(self.rpc_client, self.routes, self.kinds, Retry(0))

    def close(self) -> None:
        self.instance.close()
        self.pool.close()

    @property
    def soon(self) -> Deadline:
        return Deadline.after(30.0)


def elsewhere(broker: MockBroker) -> dict[str, str]:
    """An ``addressMap`` by which a scripted broker is reached at an address that is not loopback."""
    return {broker.address: broker.address.replace("127.0.0.1", "0.0.0.0")}


@pytest.fixture
def broker() -> Iterator[MockBroker]:
    """Knows topic ``t``, an ordinary one with two queues on ``broker-a``, which is itself."""
    with MockBroker() as one:
        one.on(Request.GET_ROUTEINFO_BY_TOPIC, route(2, {"broker-a": one.address}))
        one.on(Request.GET_TOPIC_CONFIG, topic_config())
        yield one


@pytest.fixture
def parts(broker: MockBroker) -> Iterator[Parts]:
    one = Parts(broker.address)
    yield one
    one.close()


@pytest.fixture
def real(broker_cluster: LocalBroker) -> Iterator[Parts]:
    one = Parts(broker_cluster.name_server)
    yield one
    one.close()
