"""Name servers in turn, and the routes they know."""

from __future__ import annotations

import gc
import itertools
import json
import random
import socket
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from rocketmq_spark import options as options_table
from rocketmq_spark.base.clock import Deadline
from rocketmq_spark.base.codes import Request, Response
from rocketmq_spark.base.process import LiveObjects
from rocketmq_spark.client import routes as route_room
from rocketmq_spark.client.name_servers import NameServers
from rocketmq_spark.errors import (
    BrokerNotFound,
    ConnectionLost,
    NotSupported,
    OptionError,
    RemoteProtocolError,
    RouteNotFound,
    ServerFault,
)
from rocketmq_spark.model import MessageQueue
from rocketmq_spark.wire import bodies, rpc
from rocketmq_spark.wire.header import Command
from rocketmq_spark.wire.names import Scope
from tests import mockbroker as mb
from tests.client.conftest import Parts
from tests.mockbroker import (
    NO_ROUTE,
    Call,
    MockBroker,
    Script,
    close,
    eventually,
    never,
    of_proxy,
    ok,
    refuse,
    reset,
    route,
)
from tests.source.scripted import route as scripted_route
from tests.source.scripted import stats

ROUTE = Request.GET_ROUTEINFO_BY_TOPIC


def cluster_of(addresses: dict[str, str]) -> mb.Command:
    """The list of all brokers: one, with these addresses by id."""
    table = {"broker-a": {"brokerName": "broker-a", "cluster": "c", "brokerAddrs": addresses}}
    return ok(json.dumps({"brokerAddrTable": table, "clusterAddrTable": {"c": ["broker-a"]}}).encode())


@pytest.fixture
def dead() -> str:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return f"127.0.0.1:{server.getsockname()[1]}"


def starting_with(parts: Parts, at: int) -> None:
    parts.name_servers._current_index = at


def raised(parts: Parts, topic: str) -> RouteNotFound:
    with pytest.raises(RouteNotFound) as caught:
        parts.routes.fetch(topic)
    return caught.value


class TestNameServers:
    def test_topic_may_exist_while_a_name_server_is_silent(self, dead: str) -> None:
        """A name server that has just started lacks topics, and so does one that a broker cannot reach."""
        with MockBroker({ROUTE: NO_ROUTE}) as one:
            parts = Parts(f"{one.address};{dead}")
            for at in (0, 1):
                starting_with(parts, at)
                error = parts.routes.with_similar_topics(raised(parts, "orders"))
                assert f"and {dead} did not answer and may know it" in error.message
                assert error.remedy is not None
                assert "Start the name servers that do not answer" in error.remedy
                assert "topic create" not in error.remedy
            parts.pool.close()

    def test_the_next_one_is_tried_and_kept(self, broker: MockBroker, dead: str) -> None:
        parts = Parts(f"{dead};{broker.address}")
        starting_with(parts, 0)
        assert parts.routes.fetch("t").topic == "t"
        assert parts.name_servers._current_index == 1
        starting_with(parts, 1)
        assert parts.routes.fetch("t").topic == "t"
        parts.pool.close()

    def test_the_usual_port_of_kafka_is_named(self, dead: str) -> None:
        kafka = "127.255.255.254:9092"
        with pytest.raises(ConnectionLost, match="no name server answers") as caught:
            Parts(f"{dead};{kafka}").routes.fetch("t")
        assert (
            caught.value.remedy
            == f"{kafka} has Kafka's usual port: give the port of the name server, 9876 unless it was changed"
        )

    def test_when_none_answers_one_error_names_all(self, dead: str) -> None:
        parts = Parts(f"{dead};127.0.0.1:1")
        with pytest.raises(ConnectionLost, match="no name server answers") as caught:
            parts.routes.fetch("t")
        text = str(caught.value)
        assert f"{dead};127.0.0.1:1" in text
        assert "refused" in text
        assert "option 'nameServer'" in text
        assert "\n" not in text
        parts.pool.close()

    def test_hanging_name_server_costs_only_one_request_timeout(self, broker: MockBroker) -> None:
        with MockBroker({ROUTE: mb.never}) as deaf:
            parts = Parts(f"{deaf.address};{broker.address}", request_timeout_s=1.0)
            starting_with(parts, 0)
            assert parts.routes.get("t", 0.0, Deadline.after(30.0)).topic == "t"
            parts.pool.close()

    def test_a_server_that_hangs_leaves_time_for_the_next(self, broker: MockBroker) -> None:
        """Also where there is time for one request: consumers ask so, and never heard of a topic."""
        with MockBroker({ROUTE: mb.never}) as deaf:
            parts = Parts(f"{deaf.address};{broker.address}", request_timeout_s=3.0)
            starting_with(parts, 0)
            for _ in range(3):
                assert parts.routes.get("t", 0.0, Deadline.after(3.0)).topic == "t"
            assert len(deaf.seen(ROUTE)) == 1
            parts.pool.close()

    def test_who_knows_an_old_route_has_time_left_to_ask_by_it(self, broker: MockBroker) -> None:
        parts = Parts(broker.address)
        old = parts.routes.get("t")
        parts.routes.route_max_age_s = 0.0
        broker.on(ROUTE, mb.never)
        deadline = Deadline.after(3.0)
        assert parts.routes.recent_route("t", deadline) is old
        assert not deadline.expired
        parts.pool.close()

    def test_bytes_of_another_protocol_count_as_no_answer(self, broker: MockBroker) -> None:
        with MockBroker({ROUTE: mb.raw(b"HTTP/1.1 400 Bad Request\r\n\r\n")}) as web:
            parts = Parts(f"{web.address};{broker.address}")
            starting_with(parts, 0)
            assert parts.routes.fetch("t").topic == "t"
            parts.pool.close()

    def test_broker_given_as_name_server_is_skipped_or_reported(self, broker: MockBroker) -> None:
        with MockBroker() as other:  # knows no requests of a name server
            parts = Parts(f"{other.address};{broker.address}")
            starting_with(parts, 0)
            assert parts.routes.fetch("t").topic == "t"
            parts.pool.close()
            alone = Parts(other.address)
            for ask in (lambda: alone.routes.fetch("t"), alone.routes.topics, alone.routes.has_broker):
                with pytest.raises(
                    OptionError, match=f"option 'nameServer' names {other.address}, which is not a name serv"
                ) as e:
                    ask()
                assert "Give host and port of the name server, 9876" in str(e.value)
                assert not e.value.retriable
            alone.pool.close()

    def test_a_proxy_that_does_not_list_brokers_is_no_broker(self, broker: MockBroker, parts: Parts) -> None:
        broker.on(ROUTE, [NO_ROUTE, refuse(1, "busy")])
        for _ in range(2):
            with pytest.raises(NotSupported):
                parts.routes.topics()
        assert parts.routes.has_broker()

    def test_threads_failing_together_still_try_the_living_server(self, broker: MockBroker, dead: str) -> None:
        """Each once moved the common pointer on, two threads therefore past the server that lived."""
        parts = Parts(f"{dead};{broker.address}")
        for _ in range(5):
            starting_with(parts, 0)
            start = threading.Barrier(8)

            def fetch(start: threading.Barrier = start) -> str:
                start.wait()
                return parts.routes.fetch("t").topic

            with ThreadPoolExecutor(8) as threads:
                assert [f.result() for f in [threads.submit(fetch) for _ in range(8)]] == ["t"] * 8
        parts.pool.close()

    def test_topic_unknown_to_one_name_server_is_asked_of_others(self, broker: MockBroker) -> None:
        with MockBroker({ROUTE: NO_ROUTE}) as restarted:
            parts = Parts(f"{restarted.address};{broker.address}")
            starting_with(parts, 0)
            assert parts.routes.fetch("t").topic == "t"
            broker.on(ROUTE, NO_ROUTE)
            with pytest.raises(RouteNotFound):
                parts.routes.fetch("t")
            parts.pool.close()

    @pytest.mark.parametrize("first", [0, 1])
    def test_topic_is_missing_if_the_only_answering_server_lacks_it(
        self, broker: MockBroker, dead: str, first: int
    ) -> None:
        """Or nobody could make it, and its error would be that no name server answers."""
        broker.on(ROUTE, NO_ROUTE)
        parts = Parts(f"{dead};{broker.address}")
        starting_with(parts, first)
        with pytest.raises(RouteNotFound):
            parts.routes.fetch("t")
        parts.pool.close()

    def test_a_fault_while_a_route_changes_is_asked_about_once_more(self, broker: MockBroker, parts: Parts) -> None:
        fault = refuse(1, "java.util.ConcurrentModificationException, null")
        answers = [fault, route(2, {"broker-a": broker.address}), fault, fault]
        broker.on(ROUTE, lambda call: answers.pop(0))
        assert parts.routes.fetch("t").topic == "t"
        with pytest.raises(ServerFault, match="ConcurrentModificationException"):
            parts.routes.fetch("t")
        assert answers == []

    def test_each_is_told_even_when_one_fails(self, broker: MockBroker, dead: str) -> None:
        parts = Parts(f"{dead};{broker.address}")
        broker.on(Request.DELETE_TOPIC_IN_NAMESRV, ok())
        with pytest.raises(ConnectionLost):
            parts.name_servers.request_all_servers(lambda: rpc.DELETE_TOPIC_IN_NAMESRV.request(topic="t"))
        assert len(broker.seen(Request.DELETE_TOPIC_IN_NAMESRV)) == 1
        parts.pool.close()

    def test_each_is_told_at_once(self, broker: MockBroker) -> None:
        """What is told would be old for the others when one has hung."""
        code = Request.DELETE_TOPIC_IN_NAMESRV
        with MockBroker({code: ok()}) as other:
            parts = Parts(f"{broker.address};{other.address}")

            def late(call: Call) -> Command:
                eventually(lambda: len(other.seen(code)) == 1)
                return refuse(1, "late")

            broker.on(code, late)
            with pytest.raises(ServerFault, match="late") as caught:
                parts.name_servers.request_all_servers(lambda: rpc.DELETE_TOPIC_IN_NAMESRV.request(topic="t"))
            assert caught.value.addr == broker.address
            parts.pool.close()

    def test_blank_addresses_are_nothing(self, parts: Parts) -> None:
        assert NameServers(parts.rpc_client, [" a:1 ", "", " "]).addresses == ("a:1",)
        with pytest.raises(OptionError, match="nameServer"):
            NameServers(parts.rpc_client, [""])

    def test_the_first_one_is_chosen_at_random(self, parts: Parts) -> None:
        addresses = [f"h:{i}" for i in range(10)]
        assert len({NameServers(parts.rpc_client, addresses, random.Random(i))._current_index for i in range(50)}) > 5


class TestRoutes:
    def test_a_route_is_kept_for_as_long_as_it_may_be_old(self, broker: MockBroker, parts: Parts) -> None:
        first = parts.routes.get("t", 60.0)
        assert parts.routes.get("t", 60.0) is first
        assert len(broker.seen(ROUTE)) == 1
        parts.routes.get("t", 0.0)
        assert len(broker.seen(ROUTE)) == 2

    def test_an_unchanged_route_stays_the_same_object(self, broker: MockBroker, parts: Parts) -> None:
        first = parts.routes.get("t", 0.0)
        assert parts.routes.get("t", 0.0) is first
        broker.on(ROUTE, route(3, {"broker-a": broker.address}))
        assert parts.routes.get("t", 0.0) is not first
        assert len(parts.routes.get("t").readable_queues()) == 3

    def test_an_unchanged_route_is_one_object_for_all_threads(self, broker: MockBroker, parts: Parts) -> None:
        held = mb.Held()
        broker.on(ROUTE, held)
        with ThreadPoolExecutor(4) as threads:
            asked = [threads.submit(parts.routes.get, "t") for _ in range(4)]
            for call in held.wait(4):
                call.answer(route(2, {"broker-a": broker.address}))
            assert len({id(future.result()) for future in asked}) == 1

    def test_old_routes_are_refreshed_at_once_and_failures_skipped(self, broker: MockBroker, dead: str) -> None:
        parts = Parts(f"{broker.address};{dead}")
        starting_with(parts, 0)
        kept = parts.routes.get("kept")
        held = mb.Held()
        broker.on(ROUTE, held)
        topics = ["kept", "a", "b", "missing"]
        with ThreadPoolExecutor(1) as thread:
            asked = thread.submit(parts.routes.refresh, topics, 60.0)
            for call in held.wait(3):
                missing = call.command.ext["topic"] == "missing"
                call.answer(NO_ROUTE if missing else route(2, {"broker-a": broker.address}))
            assert asked.result() == {"a", "b"}
        assert parts.routes.cached_topics() == ["a", "b", "kept"]
        assert parts.routes.get("kept", 60.0) is kept
        starting_with(parts, 1)
        assert parts.routes.refresh(topics, 0.0) == frozenset()
        assert parts.routes.cached_topics() == ["a", "b", "kept"]
        parts.pool.close()

    def test_the_request_asks_for_standard_json_and_names_the_topic(self, broker: MockBroker, parts: Parts) -> None:
        parts.routes.fetch("t")
        assert broker.seen(ROUTE)[0].ext == {"topic": "t", "acceptStandardJsonOnly": "true"}

    def test_a_missing_topic(self, broker: MockBroker, parts: Parts) -> None:
        parts.routes.get("t")
        broker.on(ROUTE, NO_ROUTE)
        with pytest.raises(RouteNotFound, match="knows no such topic") as caught:
            parts.routes.get("t", 0.0)
        assert (caught.value.topic, caught.value.addr, caught.value.retriable) == ("t", broker.address, True)
        assert parts.routes.cached_topics() == []

    @pytest.mark.parametrize("topic", ["orders.eu", "тема", "t" * 128])
    def test_a_topic_that_cannot_exist_is_called_illegal(self, broker: MockBroker, parts: Parts, topic: str) -> None:
        """The error does not advise to create the topic, and names similar topics."""
        topics = json.dumps({"topicList": ["orders_eu"]}).encode()
        broker.on(Request.GET_ALL_TOPIC_LIST_FROM_NAMESERVER, ok(topics))
        broker.on(ROUTE, NO_ROUTE)
        for missing in (
            parts.routes.get_existing,
            lambda name, _: parts.routes.with_similar_topics(raised(parts, name)),
        ):
            with pytest.raises(RouteNotFound, match="The specified topic: ") as caught:
                raise missing(topic, 0.0)
            assert "create" not in str(caught.value)
            assert ("such as 'orders_eu'" in str(caught.value)) == (topic == "orders.eu")
            assert ("Did you mean orders_eu?" in str(caught.value)) == (topic == "orders.eu")

    def test_a_missing_topic_suggests_near_names_of_users(self, broker: MockBroker, parts: Parts) -> None:
        topics = ["orders", "orders-eu", "%RETRY%order", "TBW102", "payments", "order"]
        broker.on(Request.GET_ALL_TOPIC_LIST_FROM_NAMESERVER, ok(json.dumps({"topicList": topics}).encode()))
        error = parts.routes.with_similar_topics(RouteNotFound("no such topic", "h:1", 17, "order"))
        text = str(error)
        assert "Did you mean orders" in text
        assert "RETRY" not in text
        assert "Did you mean order," not in text
        assert "rocketmq-spark topic create order" in text

    def test_a_remedy_that_fits(self, broker: MockBroker, parts: Parts) -> None:
        """Nobody creates a topic to delete it, nor while no broker is there."""
        broker.on(ROUTE, NO_ROUTE)
        with pytest.raises(RouteNotFound, match=r"All names: rocketmq-spark topic list$"):
            parts.routes.get_existing("t", 0.0)
        broker.on(Request.GET_BROKER_CLUSTER_INFO, ok(b"{}"))
        nobody = "No broker is registered: start one, or look into the logs of those that should be there"
        assert str(parts.routes.with_similar_topics(RouteNotFound("no such topic", "h:1", 17, "order"))).endswith(
            nobody
        )
        with pytest.raises(RouteNotFound, match=nobody):
            parts.routes.get_existing("t", 0.0)

    def test_remedies_at_a_proxy_are_for_the_name_server(self, broker: MockBroker, parts: Parts) -> None:
        broker.on(ROUTE, of_proxy(NO_ROUTE))
        broker.on(Request.GET_BROKER_CLUSTER_INFO, of_proxy(refuse(Response.REQUEST_CODE_NOT_SUPPORTED)))
        where = "at the brokers' name server: a Proxy does not forward this"
        with pytest.raises(RouteNotFound, match=where) as caught:
            parts.routes.get_existing("t", 0.0)
        assert caught.value.message == "the Proxy knows no such topic, or all its brokers are down"
        assert where in (parts.routes.with_similar_topics(raised(parts, "t")).remedy or "")

    def test_refused_topic_list_costs_only_the_did_you_mean_hint(self, broker: MockBroker, parts: Parts) -> None:
        broker.on(Request.GET_ALL_TOPIC_LIST_FROM_NAMESERVER, refuse(1, "disabled"))
        error = parts.routes.with_similar_topics(RouteNotFound("no such topic", "h:1", 17, "order"))
        assert "Did you mean" not in str(error)
        assert "topic create order" in str(error)

    def test_broker_address_comes_from_the_newest_route_naming_it(self, broker: MockBroker, parts: Parts) -> None:
        broker.on(ROUTE, [route(1, {"a": "old:1", "b": "b:1"}), route(1, {"a": "new:1"}), route(1, {"a": ""})])
        parts.routes.get("first")
        assert parts.routes.address("a") == "old:1"
        parts.routes.get("second")
        assert (parts.routes.address("a"), parts.routes.address("b")) == ("new:1", "b:1")
        assert parts.routes.masters() == {"a": "new:1", "b": "b:1"}
        parts.routes.get("third")
        with pytest.raises(BrokerNotFound, match=r"'a' is known.*To list the brokers: rocketmq-spark cluster"):
            parts.routes.address("a")
        assert parts.routes.masters() == {"b": "b:1"}
        with pytest.raises(BrokerNotFound):
            parts.routes.address("unknown")
        parts.routes.forget("third")
        assert parts.routes.address("a") == "new:1"  # those that are gone say it last

    def test_a_broker_that_is_up_and_not_listed_is_found(self, broker: MockBroker, parts: Parts) -> None:
        with MockBroker() as other:
            both = route(2, {"broker-a": broker.address, "broker-b": other.address})
            broker.on(ROUTE, [both, NO_ROUTE, route(2, {"broker-a": broker.address})])
            other.on(Request.GET_TOPIC_STATS_INFO, ok(b'{"offsetTable":{}}'))
            parts.routes.get("t", 0.0)
            assert parts.routes.unlisted_queues("t", parts.soon) == []
            raised(parts, "t")
            for _ in range(2):
                parts.routes.get("t", 0.0)
                assert parts.routes.unlisted_queues("t", parts.soon) == [
                    MessageQueue("t", "broker-b", i) for i in range(2)
                ]
            other.on(Request.GET_TOPIC_STATS_INFO, refuse(Response.TOPIC_NOT_EXIST, "topic[t] not exist"))
            assert parts.routes.unlisted_queues("t", parts.soon) == []
            other.on(Request.GET_TOPIC_STATS_INFO, ok(b'{"offsetTable":{}}'))
            assert parts.routes.unlisted_queues("t", parts.soon) != []
        assert parts.routes.unlisted_queues("t", parts.soon) == []
        broker.on(ROUTE, both)
        parts.routes.get("t", 0.0)
        assert parts.routes._unlisted_brokers == {}

    def test_unlisted_brokers_of_all_topics_are_found(self, broker: MockBroker, parts: Parts) -> None:
        """However many topics a name server that has just started does not know for a moment."""
        topics = [f"t{n}" for n in range(100)]
        with MockBroker({Request.GET_TOPIC_STATS_INFO: ok(b'{"offsetTable":{}}')}) as other:
            broker.on(ROUTE, route(1, {"broker-a": broker.address, "b": other.address}))
            for topic in topics:
                parts.routes.get(topic)
            broker.on(ROUTE, NO_ROUTE)
            for topic in topics:
                raised(parts, topic)
            broker.on(ROUTE, route(1, {"broker-a": broker.address}))
            for topic in topics:
                parts.routes.get(topic)
                assert parts.routes.unlisted_queues(topic, parts.soon) == [MessageQueue(topic, "b", 0)]

    def test_topics_that_have_just_gone_are_in_the_account(
        self, broker: MockBroker, parts: Parts, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(route_room, "_MAX_CACHED_BYTES", 10_000)
        broker.on(ROUTE, route(1, {"b": "h:1"}))
        for n in range(200):
            parts.routes.get(f"t{n}")
            parts.routes.forget(f"t{n}")
        assert parts.routes.cached_bytes <= 10_000
        assert "t199" in parts.routes._forgotten_routes
        assert parts.routes._forgotten_routes.keys() == parts.routes._forgotten_at_s.keys()

    @pytest.mark.parametrize("number", [0, 1, 3])
    def test_any_replica_shows_that_a_broker_is_there(self, broker: MockBroker, parts: Parts, number: int) -> None:
        with MockBroker({Request.GET_TOPIC_STATS_INFO: stats({MessageQueue("t", "b", 0): (0, 1)})}) as replica:
            with MockBroker() as other:
                down = other.address
            replicas = {0: down, number: replica.address} if number > 1 else {number: replica.address}
            all_there = scripted_route({"broker-a": {0: broker.address}, "b": replicas})
            broker.on(ROUTE, [all_there, route(1, {"broker-a": broker.address})])
            for _ in range(2):
                parts.routes.get("t", 0.0)
            assert parts.routes.unlisted_queues("t", parts.soon) == [MessageQueue("t", "b", 0)]
            replica.on(Request.GET_TOPIC_STATS_INFO, refuse(Response.TOPIC_NOT_EXIST, "topic[t] not exist"))
            assert parts.routes.unlisted_queues("t", parts.soon) == []

    @pytest.mark.parametrize("ids", [(1,), (1, 2)])
    def test_a_broker_whose_master_had_no_address_may_be_starting(
        self, broker: MockBroker, parts: Parts, ids: tuple[int, ...]
    ) -> None:
        with MockBroker() as other:
            down = other.address
        all_there = scripted_route({"broker-a": {0: broker.address}, "b": dict.fromkeys(ids, down)})
        broker.on(ROUTE, [all_there, route(1, {"broker-a": broker.address})])
        for _ in range(2):
            parts.routes.get("t", 0.0)
        assert parts.routes.unlisted_queues("t", Deadline.after(0.2)) == [MessageQueue("t", "b", 0)]

    def test_a_slave_does_not_speak_for_a_master_that_hangs(self, broker: MockBroker, parts: Parts) -> None:
        gone = refuse(Response.TOPIC_NOT_EXIST, "topic[t] not exist")
        with (
            MockBroker({Request.GET_TOPIC_STATS_INFO: never}) as master,
            MockBroker({Request.GET_TOPIC_STATS_INFO: gone}) as slave,
        ):
            all_there = scripted_route({"broker-a": {0: broker.address}, "b": {0: master.address, 1: slave.address}})
            broker.on(ROUTE, [all_there, route(1, {"broker-a": broker.address})])
            for _ in range(2):
                parts.routes.get("t", 0.0)
            assert parts.routes.unlisted_queues("t", Deadline.after(0.2)) == [MessageQueue("t", "b", 0)]

    @pytest.mark.parametrize("silence", [never, close, reset, ok(b"?"), refuse(Response.GO_AWAY, "down")])
    def test_a_broker_without_a_clear_answer_is_not_gone(
        self, broker: MockBroker, parts: Parts, silence: Script
    ) -> None:
        with MockBroker({Request.GET_TOPIC_STATS_INFO: silence}) as other:
            both = route(1, {"broker-a": broker.address, "b": other.address})
            broker.on(ROUTE, [both, route(1, {"broker-a": broker.address})])
            for _ in range(2):
                parts.routes.get("t", 0.0)
            unlisted = parts.routes.unlisted_queues("t", Deadline.after(0.2))
        assert unlisted == [MessageQueue("t", "b", 0)]

    def test_an_unclear_broker_is_asked_again_within_the_deadline(self, broker: MockBroker, parts: Parts) -> None:
        with MockBroker() as other:
            gone = refuse(Response.TOPIC_NOT_EXIST, "topic[t] not exist")
            other.on(Request.GET_TOPIC_STATS_INFO, [close, close, gone])
            both = route(1, {"broker-a": broker.address, "b": other.address})
            broker.on(ROUTE, [both, route(1, {"broker-a": broker.address})])
            for _ in range(2):
                parts.routes.get("t", 0.0)
            assert parts.routes.unlisted_queues("t", parts.soon) == []

    def test_a_refusal_of_an_earlier_attempt_is_not_believed(self, broker: MockBroker, parts: Parts) -> None:
        with MockBroker() as other:
            address = other.address
        both = route(1, {"broker-a": broker.address, "b": address})
        broker.on(ROUTE, [both, route(1, {"broker-a": broker.address})])
        for _ in range(2):
            parts.routes.get("t", 0.0)
        with pytest.raises(ConnectionLost):
            parts.pool.get(address, parts.soon)
        rests = parts.pool._slots[address]
        rests.backoff_until = time.monotonic() + 60
        assert parts.routes.unlisted_queues("t", Deadline.after(0.2)) == [MessageQueue("t", "b", 0)]
        rests.backoff_until = 0.0
        assert parts.routes.unlisted_queues("t", parts.soon) == []

    def test_a_broker_with_another_name_at_the_address_is_another(self, broker: MockBroker, parts: Parts) -> None:
        with MockBroker({Request.GET_TOPIC_STATS_INFO: stats({MessageQueue("t", "new", 0): (0, 1)})}) as other:
            both = route(1, {"broker-a": broker.address, "old": other.address})
            broker.on(ROUTE, [both, route(1, {"broker-a": broker.address})])
            for _ in range(2):
                parts.routes.get("t", 0.0)
            assert parts.routes.unlisted_queues("t", parts.soon) == []
            other.on(Request.GET_TOPIC_STATS_INFO, stats({MessageQueue("t", "old", 0): (0, 1)}))
            assert parts.routes.unlisted_queues("t", parts.soon) == [MessageQueue("t", "old", 0)]

    def test_a_broker_that_is_not_listed_for_minutes_has_left(
        self, broker: MockBroker, parts: Parts, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        broker.on(ROUTE, [route(2, {"broker-a": broker.address, "b": broker.address}), route(2, {"c": broker.address})])
        for _ in range(2):
            parts.routes.get("t", 0.0)
        assert {queue.broker_name for queue in parts.routes.unlisted_queues("t", parts.soon)} == {"broker-a", "b"}
        assert options_table.parse({"nameServer": "x:1"}).for_role("sink").send_timeout > route_room.MAX_UNLISTED_S
        later = time.monotonic() + route_room.MAX_UNLISTED_S
        monkeypatch.setattr(route_room.time, "monotonic", lambda: later)
        assert parts.routes.unlisted_queues("t", parts.soon) == []
        parts.routes.get("t", 0.0)
        assert parts.routes._unlisted_brokers == {}

    @pytest.mark.parametrize("way", ["deleted", "idle"])
    def test_brokers_of_a_forgotten_topic_are_forgotten(self, broker: MockBroker, parts: Parts, way: str) -> None:
        routes = [route(2, {"a": broker.address, "b": broker.address}), route(2, {"a": broker.address})]
        broker.on(ROUTE, routes)
        for _ in range(2):
            parts.routes.get("t", 0.0)
        assert parts.routes._unlisted_brokers.keys() == {"t"}
        if way == "idle":
            parts.routes.forget_all(time.monotonic() + route_room._IDLE_TIMEOUT_S)
        else:
            parts.routes.forget("t")
            for n in range(100):
                parts.routes.get(f"t{n}")
                parts.routes.forget(f"t{n}")
            assert "t" in parts.routes._unlisted_brokers  # a name server may have lost all topics just now
            parts.routes._forgotten_at_s["t"] -= route_room.MAX_UNLISTED_S
            parts.routes.get("t100")
            parts.routes.forget("t100")
        assert parts.routes._unlisted_brokers == {}

    def test_topics_that_come_and_go_for_ever_leave_no_trail(self, broker: MockBroker, parts: Parts) -> None:
        broker.on(ROUTE, lambda c: route(1, {f"of-{c.ext('topic')}": "a:1"}))
        for number in range(200):
            parts.routes.get(f"t{number}")
            parts.routes.forget(f"t{number}")
            parts.routes._forgotten_at_s[f"t{number}"] -= route_room.MAX_UNLISTED_S
        assert parts.routes.address("of-t199") == parts.routes.address("of-t136") == "a:1"
        with pytest.raises(BrokerNotFound):
            parts.routes.address("of-t135")

    def test_write_permission_and_a_master_are_needed_to_send(self, broker: MockBroker, parts: Parts) -> None:
        for perm, readable, writable in ((6, 2, 2), (4, 2, 0), (2, 0, 2), (0, 0, 0)):
            broker.on(ROUTE, route(2, {"broker-a": "h:1"}, perm))
            known = parts.routes.get("t", 0.0)
            assert (len(known.readable_queues()), len(known.writable_queues())) == (readable, writable)
        broker.on(ROUTE, route(2, {"broker-a": ""}))
        known = parts.routes.get("t", 0.0)
        assert (len(known.readable_queues()), len(known.writable_queues())) == (2, 0)

    def test_namespace_shows_only_its_topics_by_user_names(self, broker: MockBroker) -> None:
        parts = Parts(broker.address, scope=Scope("ns"))
        topics = ["ns%orders", "other%orders", "orders", "%RETRY%ns%g", "TBW102"]
        broker.on(Request.GET_ALL_TOPIC_LIST_FROM_NAMESERVER, ok(json.dumps({"topicList": topics}).encode()))
        assert parts.routes.topics() == ["%RETRY%g", "orders"]
        known = parts.routes.get("orders")
        assert broker.seen(ROUTE)[0].ext["topic"] == "ns%orders"
        assert known.readable_queues()[0].topic == "orders"
        parts.pool.close()

    @pytest.mark.parametrize(
        ("scope", "odd", "own"), [(Scope("ns"), "ns%ns%orders", "ns%orders"), (Scope("", "dev"), "t_dev_dev", "t_dev")]
    )
    def test_a_topic_whose_name_leads_to_another_one_is_not_listed(
        self, broker: MockBroker, scope: Scope, odd: str, own: str
    ) -> None:
        """A source of a pattern would read the other one twice."""
        parts = Parts(broker.address, scope=scope)
        topics = json.dumps({"topicList": [odd, own]}).encode()
        broker.on(Request.GET_ALL_TOPIC_LIST_FROM_NAMESERVER, ok(topics))
        assert [scope.name_on_wire(topic) for topic in parts.routes.topics()] == [own]
        parts.pool.close()

    def test_whether_there_is_any_broker(self, broker: MockBroker, parts: Parts) -> None:
        table = (
            '{"brokerAddrTable":{"b":{"brokerName":"b","cluster":"c","brokerAddrs":{0:"h:1"}}},"clusterAddrTable":{}}'
        )
        broker.on(Request.GET_BROKER_CLUSTER_INFO, [ok(table.encode()), ok(b"{}"), refuse(3)])
        assert [parts.routes.has_broker() for _ in range(3)] == [True, False, True]

    def test_routes_of_a_real_name_server(self, real: Parts, topic: str) -> None:
        known = real.routes.get(topic)
        assert len(known.readable_queues()) == len(known.writable_queues()) == 8
        assert topic in real.routes.topics()
        assert set(real.routes.cluster()) == set(known.brokers)
        with pytest.raises(RouteNotFound) as caught:
            real.routes.get(topic[:-1])
        assert topic in str(real.routes.with_similar_topics(caught.value))


@pytest.mark.parametrize(
    ("listed", "acting"),
    [
        (cluster_of({"0": "m:1"}), False),
        (cluster_of({"1": "m:1"}), True),
        (cluster_of({"0": "n:1", "1": "m:1"}), True),
        (ok(b'{"brokerAddrTable": {}, "clusterAddrTable": {}}'), True),
        (refuse(Response.NO_PERMISSION), False),
        (refuse(Response.SYSTEM_BUSY), True),
    ],
    ids=["master", "slave", "slave of another", "not listed", "refused", "busy"],
)
def test_a_slave_that_acts_for_its_master_is_told_from_a_master(
    parts: Parts, broker: MockBroker, listed: mb.Command, acting: bool
) -> None:
    """The list of all brokers says it; where that cannot be had for now nobody is believed."""
    body = json.loads(route(1, {"broker-a": "m:1"}, perm=4).body)
    body["brokerDatas"][0]["enableActingMaster"] = True
    broker.on(ROUTE, ok(json.dumps(body).encode()))
    broker.on(Request.GET_BROKER_CLUSTER_INFO, listed)
    data = parts.routes.fetch("t").brokers["broker-a"]
    assert (data.has_acting_master, data.master, data.own_master) == (acting, "m:1", None if acting else "m:1")
    parts.routes.refresh(["t", "u"], 0.0)
    assert parts.routes.get("t").brokers["broker-a"].has_acting_master is acting
    body["queueDatas"][0]["perm"] = 6
    broker.on(ROUTE, ok(json.dumps(body).encode()))
    broker.on(Request.GET_BROKER_CLUSTER_INFO, refuse(Response.SYSTEM_ERROR))  # not asked
    assert not parts.routes.fetch("t").brokers["broker-a"].has_acting_master


class TestMemory:
    """A name server decides how many topics there are, and what their routes have."""

    def test_a_route_has_a_limit_of_brokers(self, broker: MockBroker, parts: Parts) -> None:
        broker.on(ROUTE, route(1, {f"b{n}": "h:1" for n in range(4097)}))
        with pytest.raises(RemoteProtocolError, match="4097"):
            parts.routes.get("t")
        broker.on(ROUTE, route(1, {f"b{n}": f"h{n}:1" for n in range(1024)}))
        assert len(parts.routes.get("t").brokers) == 1024

    def test_a_route_has_a_limit_of_addresses(self, broker: MockBroker, parts: Parts) -> None:
        data = [{"brokerName": "b", "cluster": "c", "brokerAddrs": {str(n): "h:1" for n in range(20_000)}}]
        broker.on(ROUTE, ok(json.dumps({"brokerDatas": data, "queueDatas": []}).encode()))
        with pytest.raises(RemoteProtocolError, match="20000"):
            parts.routes.get("t")

    @pytest.mark.parametrize("at_once", [True, False])
    def test_all_routes_together_have_a_limit_of_bytes(
        self, broker: MockBroker, parts: Parts, monkeypatch: pytest.MonkeyPatch, at_once: bool
    ) -> None:
        answer = route(1, {f"b{n}": f"h{n}:1" for n in range(10)})
        broker.on(ROUTE, answer)
        queues = sum(item["readQueueNums"] for item in json.loads(answer.body)["queueDatas"])
        monkeypatch.setattr(route_room, "_MAX_CACHED_BYTES", 3 * (len(answer.body) + route_room._QUEUE_BYTES * queues))
        topics = [f"t{n}" for n in range(4)]
        for _ in range(2):  # a route that is asked for again takes the place of itself
            parts.routes.refresh(topics[:3], 0.0)
        with pytest.raises(RemoteProtocolError, match="routes of 3 topics"):
            parts.routes.refresh(topics[2:], 0.0) if at_once else parts.routes.get("t3")
        parts.routes.forget("t0")  # what is remembered of it makes room
        assert parts.routes.get("t3").topic == "t3"

    @pytest.mark.parametrize("at_once", [True, False])
    def test_all_routes_together_have_a_limit_of_queues(self, broker: MockBroker, parts: Parts, at_once: bool) -> None:
        """200 bytes announce 200,000 queues, each of which becomes an object."""
        broker.on(ROUTE, route(200_000, {"b": "h:1"}))
        topics = [f"t{n}" for n in range(6)]
        parts.routes.refresh(topics[:5], 0.0)
        assert len(parts.routes.get("t4", 60.0).readable_queues()) == 200_000
        with pytest.raises(RemoteProtocolError, match="128 for each queue"):
            parts.routes.refresh([topics[4], topics[5]], 0.0) if at_once else parts.routes.get("t5")

    def test_route_requests_are_split_and_oversized_answers_dropped(
        self, broker: MockBroker, parts: Parts, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(route_room, "_MAX_PARALLEL_ROUTES", 3)
        sizes: list[int] = []
        ask_many = NameServers.request_many

        def counted(self: NameServers, commands: Any, *given: Any) -> Any:
            sizes.append(len(commands))
            return ask_many(self, commands, *given)

        monkeypatch.setattr(NameServers, "request_many", counted)
        long = ok(b"{" + b" " * (8 << 20) + b"}")
        broker.on(ROUTE, lambda call: long if call.ext("topic") == "t3" else route(1, {"b": broker.address}))
        topics = [f"t{n}" for n in range(7)]
        assert parts.routes.refresh(topics, 0.0) == {*topics} - {"t3"}
        assert sizes == [3, 3, 1]
        broker.on(ROUTE, refuse(Response.SYSTEM_ERROR))
        assert parts.routes.refresh(topics, 0.0) == frozenset()
        assert sizes[3:] == [3]

    def test_idle_client_forgets_its_routes_but_knows_its_brokers(
        self, broker: MockBroker, parts: Parts, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Each set of options has a client, which stays in the process."""
        monkeypatch.setattr(route_room, "_all_routes", LiveObjects())
        broker.on(ROUTE, route(200_000, {"b": "h:1"}))
        idle, busy = Parts(broker.address), Parts(broker.address)
        for one in (idle, busy):
            one.routes.get("t0")
            assert one.routes.cached_bytes > 200_000 * route_room._QUEUE_BYTES
        idle.routes._last_used_s -= 99
        busy.routes.get("t1")
        assert idle.routes.cached_topics() == ["t0"]
        idle.routes._last_used_s -= 2
        busy.routes.get("t2")
        assert idle.routes.cached_topics() == []
        assert 0 < idle.routes.cached_bytes < 1000  # of the broker
        assert busy.routes.cached_topics() == ["t0", "t1", "t2"]
        assert idle.routes.address("b") == "h:1"
        assert len(idle.routes.get("t0").readable_queues()) == 200_000
        for one in (idle, busy):
            one.close()

    def test_many_small_clients_take_no_room_of_others(
        self, broker: MockBroker, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(route_room, "_all_routes", LiveObjects())
        monkeypatch.setattr(route_room, "_MAX_PROCESS_BYTES", 600_000)
        small = [Parts(broker.address) for _ in range(30)]
        large, user = Parts(broker.address), Parts(broker.address)
        for one in small:
            one.routes.get("t")
        broker.on(ROUTE, route(4000, {"b": "h:1"}))
        large.routes.get("t")
        broker.on(ROUTE, route(2000, {"b": "h:1"}))
        user.routes.get("t")
        assert (large.routes.cached_topics(), user.routes.cached_topics()) == ([], ["t"])
        for one in (*small, large, user):
            one.close()

    def test_what_many_clients_keep_of_brokers_leaves_room(
        self, broker: MockBroker, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(route_room, "_all_routes", LiveObjects())
        many, user = [Parts(broker.address) for _ in range(30)], Parts(broker.address)
        broker.on(Request.GET_BROKER_CLUSTER_INFO, mb.cluster({f"b{n}": {"0": "h:1"} for n in range(10)}))
        for one in many:
            one.routes.cluster()
        monkeypatch.setattr(route_room, "_MAX_PROCESS_BYTES", sum(one.routes.cached_bytes for one in many))
        assert len(user.routes.get("t").readable_queues()) > 0
        for one in (*many, user):
            one.close()

    def test_clients_that_can_forget_nothing_are_asked_once(
        self, broker: MockBroker, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(route_room, "_all_routes", LiveObjects())
        many, user = [Parts(broker.address) for _ in range(3)], Parts(broker.address)
        broker.on(ROUTE, route(1, {f"b{n}": "h:1" for n in range(20)}))
        forgotten: list[route_room.Routes] = []
        for one in many:
            one.routes.get("t")
            one.routes.unlisted_queues("t", one.soon)
            one.routes.forget_all()
        monkeypatch.setattr(route_room, "_MAX_PROCESS_BYTES", 1000)
        broker.on(ROUTE, route(1, {"b": "h:1"}))
        forget_all = route_room.Routes.forget_all

        def counted(routes: route_room.Routes, *args: Any, **options: Any) -> None:
            forgotten.append(routes)
            assert len(forgotten) < 10  # where it never ends
            forget_all(routes, *args, **options)

        monkeypatch.setattr(route_room.Routes, "forget_all", counted)
        with pytest.raises(RemoteProtocolError, match="more than its share"):
            user.routes.get("t")
        assert sorted(map(id, forgotten)) == sorted(id(one.routes) for one in many)
        for one in (*many, user):
            one.close()

    def test_brokers_missing_in_newer_routes_are_counted_and_limited(
        self, broker: MockBroker, parts: Parts, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A name server could list other brokers each time."""
        monkeypatch.setattr(bodies, "MAX_ROUTE_BROKERS", 20)
        names = itertools.count()
        broker.on(ROUTE, lambda call: route(1, {f"b{next(names)}": "h:1" for _ in range(8)}))
        parts.routes.get("t", 0.0)
        alone = parts.routes.cached_bytes
        for _ in range(2):
            parts.routes.get("t", 0.0)
        assert parts.routes.cached_bytes > alone + 16 * route_room._QUEUE_BYTES
        most = 0
        for n in range(4, 9):
            parts.routes.get("t", 0.0)
            most = most or parts.routes.cached_bytes + 1000
            unlisted = parts.routes._unlisted_brokers["t"]
            assert len(unlisted) == 20
            assert {f"b{8 * (n - 2) + 7}", f"b{8 * (n - 3) + 7}"} <= unlisted.keys()  # the newest
            assert parts.routes.cached_bytes < most
        broker.on(ROUTE, lambda call: route(50_000, {f"b{next(names)}": "h:1"}))
        for _ in range(8):
            parts.routes.get("t", 0.0)
        assert len(parts.routes._unlisted_brokers["t"]) == 4  # of 50,000 queues

    def test_list_of_all_brokers_counts_as_memory_and_is_limited(
        self, broker: MockBroker, parts: Parts, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def listed(count: int) -> mb.Command:
            return mb.cluster({f"b{n}": {"0": "h:1"} for n in range(count)})

        broker.on(Request.GET_BROKER_CLUSTER_INFO, [listed(1000), listed(2000), listed(3), listed(4097), listed(2000)])
        held = []
        for _ in range(3):
            parts.routes.cluster()
            held.append(parts.routes.cached_bytes)
        assert held[0] < held[1]
        assert held[2] < 2000
        with pytest.raises(RemoteProtocolError, match="4097"):
            parts.routes.cluster()
        monkeypatch.setattr(route_room, "_MAX_CACHED_BYTES", held[0])
        with pytest.raises(RemoteProtocolError, match="with the list of all brokers, the routes"):
            parts.routes.cluster()
        assert parts.routes.broker("b2") is not None

    @pytest.mark.parametrize("way", ["route", "cluster"])
    def test_addresses_of_an_answer_without_room_are_not_noted(
        self, broker: MockBroker, parts: Parts, monkeypatch: pytest.MonkeyPatch, way: str
    ) -> None:
        monkeypatch.setattr(route_room, "_MAX_CACHED_BYTES", 10)
        broker.on(Request.GET_BROKER_CLUSTER_INFO, cluster_of({"0": "h:1"}))
        with pytest.raises(RemoteProtocolError):
            parts.routes.get("t") if way == "route" else parts.routes.cluster()
        assert parts.pool._advertised_peers == {}

    @pytest.mark.parametrize(
        "data",
        [
            {"brokerName": "b", "cluster": "c", "brokerAddrs": {"0": "h" * 301}},
            {"brokerName": "b" * 256, "cluster": "c", "brokerAddrs": {"0": "h:1"}},
            {"brokerName": "b", "cluster": "c" * 256, "brokerAddrs": {"0": "h:1"}},
            {"brokerName": ["b"], "cluster": "c", "brokerAddrs": {"0": "h:1"}},
        ],
        ids=["address", "name", "cluster", "no text"],
    )
    def test_texts_of_brokers_have_a_limit(self, broker: MockBroker, parts: Parts, data: dict[str, Any]) -> None:
        broker.on(ROUTE, ok(json.dumps({"brokerDatas": [data], "queueDatas": []}).encode()))
        broker.on(Request.GET_BROKER_CLUSTER_INFO, ok(json.dumps({"brokerAddrTable": {"b": data}}).encode()))
        for ask in (lambda: parts.routes.get("t"), parts.routes.cluster):
            with pytest.raises(RemoteProtocolError, match="expected a text of at most"):
                ask()
        assert parts.pool._advertised_peers == {}

    def test_idle_client_still_notices_queues_missing_in_a_new_route(self, broker: MockBroker, parts: Parts) -> None:
        """A stream with a slow trigger, whose name server was started anew meanwhile."""
        with MockBroker({Request.GET_TOPIC_STATS_INFO: ok(b'{"offsetTable":{}}')}) as other:
            both = route(2, {"broker-a": broker.address, "b": other.address})
            broker.on(ROUTE, [both, both, route(2, {"broker-a": broker.address})])
            for topic in ("t", "u"):
                parts.routes.get(topic)
            assert parts.routes.unlisted_queues("t", parts.soon) == []
            for later_s in (100, 1000):  # whatever others do meanwhile
                parts.routes.forget_all(time.monotonic() + later_s)
            assert parts.routes.cached_topics() == []
            parts.routes.get("t")
            parts.routes.get("u")
            assert parts.routes.unlisted_queues("t", parts.soon) == [MessageQueue("t", "b", i) for i in range(2)]
            assert parts.routes.unlisted_queues("u", parts.soon) == []

    def test_lists_of_queues_are_forgotten_with_the_route(self, broker: MockBroker, parts: Parts) -> None:
        broker.on(ROUTE, route(4, {"b": "h:1"}))
        queues = parts.sender.publish_queues("t", parts.soon)
        assert parts.sender.publish_queues("t", parts.soon) is queues
        of_route = weakref.ref(parts.routes.get("t"))
        parts.routes.unlisted_queues("t", parts.soon)
        parts.routes.forget_all()
        gc.collect()
        assert of_route() is None
        assert parts.sender.publish_queues("t", parts.soon) is not queues

    def test_few_routes_of_an_idle_client_stay(self, broker: MockBroker, monkeypatch: pytest.MonkeyPatch) -> None:
        """A stream with a slow trigger may use them while no name server answers."""
        monkeypatch.setattr(route_room, "_all_routes", LiveObjects())
        idle, busy = Parts(broker.address), Parts(broker.address)
        idle.routes.get("t")
        idle.routes._last_used_s -= 1000
        busy.routes.get("t")
        assert idle.routes.cached_topics() == ["t"]
        for one in (idle, busy):
            one.close()

    def test_clients_together_have_a_limit_and_each_its_share(
        self, broker: MockBroker, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(route_room, "_all_routes", LiveObjects())
        monkeypatch.setattr(route_room, "_MAX_PROCESS_BYTES", 4 * 20_500 * route_room._QUEUE_BYTES)
        broker.on(ROUTE, route(20_000, {"b": "h:1"}))
        greedy, other, small = (Parts(broker.address) for _ in range(3))
        for n in range(3):
            greedy.routes.get(f"t{n}")
        other.routes.get("t0")
        with pytest.raises(RemoteProtocolError, match="more than its share"):
            greedy.routes.get("t3")
        greedy.routes.get("t2", 0.0)  # what it has, it may have again
        assert len(small.routes.get("t0").readable_queues()) == 20_000
        assert (greedy.routes.cached_topics(), other.routes.cached_topics()) == ([], ["t0"])  # who had most makes room
        assert sum(one.routes.cached_bytes for one in (greedy, other, small)) < route_room._MAX_PROCESS_BYTES
        for one in (greedy, other, small):
            one.close()
