"""Addresses that servers advertise: replaced by option addressMap, and explained where they cannot be connected."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from rocketmq_spark.base.clock import Deadline
from rocketmq_spark.base.codes import Request
from rocketmq_spark.errors import CallTimeout, ConnectionLost, NotSupported, RocketMQError
from rocketmq_spark.model import MessageQueue
from rocketmq_spark.remoting.advertised import remedy, with_advertised_remedy
from rocketmq_spark.wire import rpc
from rocketmq_spark.wire.header import Peer
from tests.client.conftest import Parts
from tests.mockbroker import MockBroker, cluster, of_proxy, offsets, ok, refuse, route

ROUTE = Request.GET_ROUTEINFO_BY_TOPIC
QUEUE = MessageQueue("t", "broker-a", 0)
OTHER = MessageQueue("t", "broker-b", 0)


@pytest.fixture
def proxy(nobody: str) -> Iterator[MockBroker]:
    """A Proxy before two brokers, which advertises an address where nobody listens."""
    with MockBroker() as one:
        one.on(ROUTE, of_proxy(route(1, {"broker-a": nobody, "broker-b": nobody})))
        one.on(
            Request.GET_MAX_OFFSET,
            lambda call: of_proxy(offsets({0: 7 if call.ext("bname") == "broker-a" else 8})(call)),
        )
        yield one


@pytest.fixture
def mapped(proxy: MockBroker) -> Iterator[Parts]:
    one = Parts(proxy.address, at_name_server=True)
    yield one
    one.close()


@pytest.fixture
def plain(proxy: MockBroker) -> Iterator[Parts]:
    one = Parts(proxy.address)
    yield one
    one.close()


def failed(parts: Parts, queue: MessageQueue = QUEUE) -> RocketMQError:
    parts.routes.get(queue.topic)
    with pytest.raises(RocketMQError) as caught:
        parts.offset_reader.max_offsets([queue], parts.soon)
    return caught.value


class TestAtNameServer:
    def test_requests_go_to_the_name_server(self, proxy: MockBroker, mapped: Parts) -> None:
        mapped.routes.get("t")
        assert mapped.offset_reader.max_offsets([QUEUE, OTHER], mapped.soon) == {QUEUE: 7, OTHER: 8}
        assert len(proxy.peers) == 1, "the connection for routes serves for the rest"

    def test_routes_that_are_refreshed_together_are_mapped(self, proxy: MockBroker, mapped: Parts) -> None:
        assert mapped.routes.refresh(["t", "u"], 0.0) == {"t", "u"}
        addresses = {data.master for data in mapped.routes.get("u").brokers.values()}
        assert addresses == {proxy.address}

    def test_each_route_leads_to_its_own_name_server(self, proxy: MockBroker, nobody: str) -> None:
        parts = Parts(f"{nobody};{proxy.address}", at_name_server=True)
        assert parts.routes.get("t").brokers["broker-a"].master == proxy.address
        parts.close()

    def test_the_list_of_brokers_is_mapped(self, proxy: MockBroker, mapped: Parts) -> None:
        proxy.on(Request.GET_BROKER_CLUSTER_INFO, cluster({"broker-c": {"0": "pod:1", "1": "pod:2"}}))
        assert mapped.admin.cluster()["broker-c"].addresses == {0: proxy.address, 1: proxy.address}

    def test_at_a_real_name_server_the_error_names_the_option(self, proxy: MockBroker, mapped: Parts) -> None:
        proxy.on(ROUTE, route(1, {"broker-a": "pod:1"}))
        proxy.on(Request.GET_MAX_OFFSET, refuse(3, "request type 30 not supported"))
        error = failed(mapped)
        assert isinstance(error, NotSupported)
        assert "is a name server" in error.message
        assert "'addressMap'" in (error.remedy or "")
        assert "port-forward per broker" in (error.remedy or "")

    def test_a_new_connection_is_known_to_be_a_proxys(self, proxy: MockBroker, mapped: Parts) -> None:
        proxy.on(Request.GET_BROKER_CLUSTER_INFO, refuse(3, "request type 106 not supported"))
        mapped.routes.get("t")
        mapped.pool.get(proxy.address, mapped.soon).close()
        connection = mapped.pool.get(proxy.address, mapped.soon)
        assert (connection.peer, mapped.pool.is_proxy(proxy.address)) == (Peer.PROXY, True)
        with pytest.raises(NotSupported, match="the server is a Proxy"):
            mapped.rpc_client.request(proxy.address, rpc.GET_BROKER_CLUSTER_INFO.request(), mapped.soon)


class TestUnreachable:
    def test_a_proxy_s_address_is_explained(self, plain: Parts, nobody: str) -> None:
        error = failed(plain)
        assert isinstance(error, ConnectionLost)
        assert error.remedy == remedy([nobody], Peer.PROXY)
        assert all(word in error.remedy for word in (nobody, "remotingAccessAddr", "'addressMap' to nameServer"))
        assert "brokerIP1" not in error.remedy

    def test_a_broker_s_address_is_explained(self, proxy: MockBroker, plain: Parts, nobody: str) -> None:
        proxy.on(ROUTE, route(1, {"broker-a": nobody}))
        words = failed(plain).remedy or ""
        assert all(word in words for word in (nobody, "brokerIP1", "remotingAccessAddr", "'addressMap'"))

    def test_so_is_a_time_out_of_the_connection(self) -> None:
        assert with_advertised_remedy(
            CallTimeout("cannot connect: no progress in time", "a:1"), ["a:1"]
        ).remedy == remedy(["a:1"])
        assert with_advertised_remedy(CallTimeout("no answer in time", "a:1"), ["a:1"]).remedy is None
        assert with_advertised_remedy(ConnectionLost("the TLS handshake failed: x", "a:1"), ["a:1"]).remedy is None

    def test_every_later_caller_is_told_too(self, plain: Parts, nobody: str) -> None:
        first = failed(plain)
        with pytest.raises(ConnectionLost) as caught:
            plain.pool.get(nobody, Deadline.after(60), wait_for_backoff=False)
        assert caught.value.remedy == first.remedy

    def test_not_while_another_broker_is_connected(self, proxy: MockBroker, plain: Parts, nobody: str) -> None:
        proxy.on(ROUTE, route(1, {"broker-a": nobody, "broker-b": proxy.address}))
        plain.routes.get("t")
        plain.offset_reader.max_offsets([OTHER], plain.soon)
        assert failed(plain).remedy is None

    def test_not_for_a_broker_that_went_down(self, plain: Parts, proxy: MockBroker) -> None:
        with MockBroker({Request.GET_MAX_OFFSET: offsets({0: 1})}) as broker:
            proxy.on(ROUTE, route(1, {"broker-a": broker.address}))
            plain.routes.get("t")
            plain.offset_reader.max_offsets([QUEUE], plain.soon)
        assert failed(plain).remedy is None

    def test_not_for_a_name_server_that_is_down(self, nobody: str) -> None:
        parts = Parts(nobody)
        with pytest.raises(ConnectionLost) as caught:
            parts.routes.get("t")
        assert "advertised" not in (caught.value.remedy or "")
        parts.close()

    def test_many_addresses_are_counted(self) -> None:
        assert "a:1, a:2, a:3 and 2 more" in remedy([f"a:{i}" for i in range(1, 6)])


def test_a_proxy_s_routes_lead_to_proxies(proxy: MockBroker, plain: Parts) -> None:
    """So a connection is known to be a Proxy's before its first answer."""
    with MockBroker({Request.GET_TOPIC_STATS_INFO: refuse(3), Request.GET_MAX_OFFSET: ok(offset=1)}) as pod:
        proxy.on(ROUTE, of_proxy(route(1, {"broker-a": pod.address})))
        plain.routes.get("t")
        assert plain.pool.is_proxy(pod.address)
        assert plain.offset_reader.is_proxy("t", "broker-a", plain.soon)


def test_a_connection_may_be_older_than_the_route(proxy: MockBroker, plain: Parts) -> None:
    with MockBroker({Request.GET_TOPIC_STATS_INFO: refuse(3)}) as pod:
        connection = plain.pool.get(pod.address, plain.soon)
        proxy.on(ROUTE, of_proxy(route(1, {"broker-a": pod.address})))
        plain.routes.get("t")
        assert connection.peer is Peer.PROXY
