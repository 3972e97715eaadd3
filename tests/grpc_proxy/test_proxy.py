"""A client of a Proxy with several endpoints."""

from __future__ import annotations

import socket
import threading

import pytest

from rocketmq_spark import errors
from rocketmq_spark.base.clock import Deadline
from rocketmq_spark.grpc_proxy.channel import SigningKeys
from rocketmq_spark.grpc_proxy.protos import proto
from rocketmq_spark.grpc_proxy.tables import QUERY_ROUTE, AddressScheme, Code
from tests.grpc_proxy.scripted import client, route, serving, status

REQUEST = proto("QueryRouteRequest")()


def test_another_endpoint_is_asked_when_one_is_away(nobody):
    with serving({"QueryRoute": route()}) as address:
        proxy = client(nobody, address, connect_timeout_s=30.0)
        assert proxy.request(QUERY_ROUTE, REQUEST, Deadline.after(10), preferred_address=nobody).status.code == Code.OK
        assert proxy.channel(nobody).address == address  # and not once more at the one that is away
        proxy.close()


def test_unresponsive_endpoint_leaves_time_for_another():
    """A host without power refuses no connection: the first send of a process took all its time to find that out."""
    with socket.create_server(("127.0.0.1", 0)) as hole, serving({"QueryRoute": route()}) as address:
        silent = f"127.0.0.1:{hole.getsockname()[1]}"
        proxy = client(silent, address, connect_timeout_s=30.0)
        assert proxy.request(QUERY_ROUTE, REQUEST, Deadline.after(5), preferred_address=silent).status.code == Code.OK
        assert proxy.channel(silent).address == address
        proxy.close()
        alone = client(silent, connect_timeout_s=30.0)
        with pytest.raises(errors.CallTimeout, match=silent):
            alone.request(QUERY_ROUTE, REQUEST, Deadline.after(0.5))
        alone.close()


def test_an_endpoint_that_has_answered_before_has_all_the_time():
    """The one before has a part, so that another may be asked."""
    left: list[float] = []

    def noted(request, context):
        left.append(context.time_remaining())
        return route()(request, context)

    with serving({"QueryRoute": noted}) as one, serving({}) as other:
        proxy = client(one, other)
        for _ in range(2):
            proxy.request(QUERY_ROUTE, REQUEST, Deadline.after(1000), preferred_address=one)
        proxy.close()
    assert left[0] < 600
    assert left[1] > 900


def test_endpoint_that_stopped_answering_is_avoided():
    """A Proxy that stands still keeps its connections: each second call went there and took all its time in vain."""
    over = threading.Event()

    def once(request, context, asked=[]):  # noqa: B006
        asked.append(request)
        if len(asked) > 1:
            over.wait(60)
        return route()(request, context)

    with serving({"QueryRoute": once}) as one, serving({"QueryRoute": route()}) as other:
        proxy = client(one, other, connect_timeout_s=30.0)
        proxy.request(QUERY_ROUTE, REQUEST, Deadline.after(30), preferred_address=one)
        with pytest.raises(errors.CallTimeout):
            proxy.request(QUERY_ROUTE, REQUEST, Deadline.after(0.5), preferred_address=one)
        assert proxy.channel(one).address == other
        over.set()
        proxy.close()


def test_when_all_are_away_the_error_says_so(nobody):
    proxy = client(nobody, connect_timeout_s=30.0)
    with pytest.raises(errors.ConnectionLost, match=nobody):
        proxy.request(QUERY_ROUTE, REQUEST, Deadline.after(10))
    proxy.close()


def test_a_refusal_is_no_reason_to_ask_another():
    asked = []

    def refuse(request, context):
        asked.append(request)
        return proto("QueryRouteResponse")(status=status(Code.FORBIDDEN, "not you"))

    with serving({"QueryRoute": refuse}) as one, serving({"QueryRoute": refuse}) as other:
        proxy = client(one, other)
        with pytest.raises(errors.AccessDenied, match="not you"):
            proxy.request(QUERY_ROUTE, REQUEST, Deadline.after(10), "t")
        proxy.close()
    assert len(asked) == 1


@pytest.mark.parametrize(
    ("address", "scheme", "host"),
    [
        ("127.0.0.1:8081", AddressScheme.IPv4, "127.0.0.1"),
        ("[::1]:8081", AddressScheme.IPv6, "::1"),
        ("proxy.example:8081", AddressScheme.DOMAIN_NAME, "proxy.example"),
    ],
)
def test_it_says_how_it_reached_the_proxy(address, scheme, host):
    told = client(address).endpoints()
    assert (told.scheme, told.addresses[0].host, told.addresses[0].port) == (scheme, host, 8081)


def test_what_was_closed_is_not_opened_again():
    with serving({"QueryRoute": route()}) as address:
        proxy = client(address)
        proxy.request(QUERY_ROUTE, REQUEST, Deadline.after(10))
        proxy.close()
        with pytest.raises(errors.ClosedError, match=address):
            proxy.request(QUERY_ROUTE, REQUEST, Deadline.after(10))


def test_keys_are_asked_for_with_each_call():
    seen = []

    def answer(request, context):
        seen.append(dict(context.invocation_metadata())["authorization"].split(",")[0])
        return route()(request, context)

    keys = iter([SigningKeys("one", "s"), SigningKeys("two", "s")])
    with serving({"QueryRoute": answer}) as address:
        proxy = client(address, keys=lambda: next(keys))
        for _ in range(2):
            proxy.request(QUERY_ROUTE, REQUEST, Deadline.after(10))
        proxy.close()
    assert [each.rpartition("=")[2] for each in seen] == ["one", "two"]


def test_names_are_those_of_the_wire_and_clients_differ():
    one, other = client("a:1", name_on_wire=lambda name: f"ns%{name}"), client("a:1")
    assert one.resource("t").name == "ns%t"
    assert one.client_id != other.client_id
