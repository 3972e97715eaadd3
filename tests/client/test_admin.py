"""Administration: what is asked of whom, and the whole of it on a real broker."""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import replace

import pytest

from rocketmq_spark.base.codes import FIRST_VERSION_WITH_ATTRIBUTES, Request, Response, SysFlag
from rocketmq_spark.client.admin import BaseAdmin, batch_attributes
from rocketmq_spark.errors import (
    BrokerNotFound,
    CallTimeout,
    NotSupported,
    OptionError,
    RocketMQError,
    RouteNotFound,
    ServerFault,
)
from rocketmq_spark.localbroker import LocalBroker
from rocketmq_spark.model import MessageQueue, QueueData, SendRequest
from rocketmq_spark.wire import bodies
from rocketmq_spark.wire.bodies import ConsumeProgress
from rocketmq_spark.wire.header import Command
from rocketmq_spark.wire.names import Scope
from tests.client.conftest import Parts, elsewhere
from tests.decode.fetching import stored, text
from tests.harness import peak_bytes
from tests.mockbroker import NO_ROUTE, Call, MockBroker, eventually, never, ok, refuse, route

ROUTE, CLUSTER = Request.GET_ROUTEINFO_BY_TOPIC, Request.GET_BROKER_CLUSTER_INFO
REGISTER = Request.REGISTER_TOPIC_IN_NAMESRV
NO_TOPIC, DENIED = refuse(Response.TOPIC_NOT_EXIST, "no such topic"), refuse(Response.NO_PERMISSION, "not you")


def cluster(**masters: str) -> bytes:
    """Bare numeric keys, as name servers write them."""
    items = [
        f'"{name}":{{"brokerName":"{name}","cluster":"c","brokerAddrs":{{{0 if address else 1}:"{address or "h:2"}"}}}}'
        for name, address in masters.items()
    ]
    return ('{"brokerAddrTable":{' + ",".join(items) + '},"clusterAddrTable":{}}').encode()


def config(queues: int, perm: int = 6, sys_flag: int = 0) -> Command:
    told = {"topicName": "t", "readQueueNums": queues, "writeQueueNums": queues, "perm": perm, "topicSysFlag": sys_flag}
    return ok(json.dumps(told).encode())


def configured(
    broker: MockBroker, answers: Sequence[Command], asks: int, there: Mapping[str, str] | None = None
) -> None:
    """What it says the topic is, then the last answer again; at the last of ``asks`` the route shows what is waited for."""
    said = iter(answers)

    def answer(call: Call) -> Command:
        if len(broker.seen(Request.GET_TOPIC_CONFIG)) >= asks:
            broker.on(ROUTE, route(3, there or {"a": broker.address}))
        return next(said, answers[-1])

    broker.on(Request.GET_TOPIC_CONFIG, answer)


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody waits for a registration that may still come."""
    monkeypatch.setattr("rocketmq_spark.client.admin._REGISTER_AGAIN_S", 0.0)


@pytest.fixture
def admin(broker: MockBroker, parts: Parts) -> BaseAdmin:
    broker.on(CLUSTER, ok(cluster(a=broker.address)))
    broker.on(ROUTE, route(8, {"a": broker.address}))
    return BaseAdmin(broker.address, parts.rpc_client)


@pytest.fixture
def real_admin(broker_cluster: LocalBroker) -> BaseAdmin:
    return broker_cluster.admin


class TestTopics:
    def test_every_master_is_told_and_the_route_awaited(self, broker: MockBroker, admin: BaseAdmin) -> None:
        with MockBroker({Request.UPDATE_AND_CREATE_TOPIC: ok()}) as other:
            broker.on(CLUSTER, ok(cluster(a=broker.address, b=other.address)))
            both = {"a": broker.address, "b": other.address}
            broker.on(ROUTE, [NO_ROUTE, route(8, {"a": broker.address}), route(4, both), route(8, both)])
            broker.on(Request.UPDATE_AND_CREATE_TOPIC, ok())
            assert len(admin.create_topic("t", attributes={"message.type": "FIFO"}).readable_queues()) == 16
            assert len(broker.seen(ROUTE)) == 4
            for name, server in (("a", broker), ("b", other)):
                (command,) = server.seen(Request.UPDATE_AND_CREATE_TOPIC)
                assert command.ext["bname"] == name
                assert command.ext["attributes"] == "+message.type=FIFO"

    def test_a_route_that_never_comes(self, broker: MockBroker, admin: BaseAdmin) -> None:
        broker.on(Request.UPDATE_AND_CREATE_TOPIC, ok())
        with pytest.raises(CallTimeout) as caught:
            admin.create_topic("t", 3, timeout_s=1.5)
        assert caught.value.topic == "t"
        assert "addWritePerm" in str(caught.value)

    def test_what_a_name_server_left_out_is_registered_there(
        self, broker: MockBroker, parts: Parts, at_once: None
    ) -> None:
        """Brokers do nothing when they are put what they have, so name servers are told, by the name that brokers know."""
        with MockBroker({Request.UPDATE_AND_CREATE_TOPIC: ok()}) as other:
            broker.on(CLUSTER, ok(cluster(a=broker.address, b=other.address)))
            both = {"a": broker.address, "b": other.address}
            broker.on(ROUTE, route(3, {"a": broker.address}))
            broker.on(Request.UPDATE_AND_CREATE_TOPIC, ok())
            broker.on(REGISTER, refuse(1, "broken"))  # one name server of two
            for server in (broker, other):
                server.on(Request.GET_TOPIC_CONFIG, config(3))
                server.on(Request.GET_BROKER_CONFIG, ok(b"brokerPermission=6\n"))

            def register(call: Call) -> Command:
                broker.on(ROUTE, route(3, both))
                return ok()

            other.on(REGISTER, register)
            admin = BaseAdmin([broker.address, other.address], replace(parts.rpc_client, scope=Scope("ns")))
            assert len(admin.create_topic("t", 3, attributes={"message.type": "FIFO"}).readable_queues()) == 6
            for server in (broker, other):
                (told,) = server.seen(REGISTER)
                assert told.ext == {"topic": "ns%t"}
                assert bodies.route("t", told.body).queues == (QueueData("b", 3, 3, 6),)
                assert len(server.seen(Request.UPDATE_AND_CREATE_TOPIC)) == 1

    @pytest.mark.parametrize(
        ("now", "own", "told"),
        [
            (config(10), ok(), [QueueData("a", 10, 10, 6)]),
            (config(10, 4), ok(), [QueueData("a", 10, 10, 4)]),
            (config(10, sys_flag=2), ok(b"brokerPermission=4"), [QueueData("a", 10, 10, 4, 2)]),
            (config(10), DENIED, []),
            (NO_TOPIC, ok(), []),
            (DENIED, ok(), []),
            (config(8), ok(), []),
        ],
        ids=["resized", "closed", "closed broker", "perhaps closed broker", "deleted", "denied", "wiped"],
    )
    def test_it_is_told_what_a_broker_has(
        self, broker: MockBroker, admin: BaseAdmin, at_once: None, now: Command, own: Command, told: list[QueueData]
    ) -> None:
        """Not what was put, which somebody may have changed or deleted since; and what ``wipeWritePerm`` has closed stays so."""
        broker.on(ROUTE, route(8, {"a": broker.address}, perm=4))
        broker.on(Request.UPDATE_AND_CREATE_TOPIC, ok())
        broker.on(Request.GET_BROKER_CONFIG, own)
        broker.on(REGISTER, ok())
        configured(broker, [now], 5)
        admin.create_topic("t", 3)
        queues = [queue for command in broker.seen(REGISTER) for queue in bodies.route("t", command.body).queues]
        assert list(dict.fromkeys(queues)) == told
        assert len(broker.seen(Request.UPDATE_AND_CREATE_TOPIC)) == 1

    @pytest.mark.parametrize("own", [DENIED, ok(b"brokerPermission=rw\n")], ids=["denied", "no number"])
    def test_create_topic_awaits_route_if_permission_is_unknown(
        self, broker: MockBroker, admin: BaseAdmin, at_once: None, own: Command
    ) -> None:
        broker.on(ROUTE, route(3, {"a": broker.address}, perm=4))
        broker.on(Request.UPDATE_AND_CREATE_TOPIC, ok())
        broker.on(Request.GET_BROKER_CONFIG, own)
        configured(broker, [config(3)], 2)
        assert [queues.perm for queues in admin.create_topic("t", 3).queues] == [6]

    def test_create_topic_reads_no_broker_config_in_clear_text(
        self, broker: MockBroker, parts: Parts, at_once: None
    ) -> None:
        """A change of a topic then waits for the route, as where the permission is unknown."""
        parts.pool.connect_options = replace(
            parts.pool.connect_options, address_map=elsewhere(broker), allow_plain_text=True
        )
        broker.on(CLUSTER, ok(cluster(a=broker.address)))
        broker.on(ROUTE, route(3, {"a": broker.address}, perm=4))
        broker.on(Request.UPDATE_AND_CREATE_TOPIC, ok())
        broker.on(Request.GET_BROKER_CONFIG, ok(b"brokerPermission=4\n"))
        configured(broker, [config(3)], 2)
        changed = BaseAdmin(broker.address, parts.rpc_client).create_topic("t", 3)
        assert [queues.perm for queues in changed.queues] == [6]
        assert broker.seen(Request.GET_BROKER_CONFIG) == []

    def test_broker_denying_topic_config_stops_no_other_registration(
        self, broker: MockBroker, admin: BaseAdmin, at_once: None
    ) -> None:
        with MockBroker({Request.UPDATE_AND_CREATE_TOPIC: ok(), Request.GET_TOPIC_CONFIG: config(3)}) as other:
            broker.on(CLUSTER, ok(cluster(a=broker.address, b=other.address)))
            broker.on(Request.UPDATE_AND_CREATE_TOPIC, ok())
            broker.on(REGISTER, ok())
            other.on(Request.GET_BROKER_CONFIG, ok(b"a=1\n"))
            configured(broker, [DENIED], 3, {"a": broker.address, "b": other.address})
            admin.create_topic("t", 3)
        assert {bodies.route("t", told.body).queues for told in broker.seen(REGISTER)} == {(QueueData("b", 3, 3, 6),)}

    @pytest.mark.parametrize("answer", [ok(), refuse(1, "another name server hangs")], ids=["all", "some"])
    def test_what_changes_while_it_is_told_is_told_again(
        self, broker: MockBroker, admin: BaseAdmin, at_once: None, answer: Command
    ) -> None:
        """The broker's own registration may have come first."""
        broker.on(ROUTE, route(2, {"a": broker.address}))
        broker.on(Request.UPDATE_AND_CREATE_TOPIC, ok())
        broker.on(Request.GET_BROKER_CONFIG, ok(b"a=1\n"))
        told: list[int] = []

        def register(call: Call) -> Command:
            (queues,) = bodies.route("t", call.command.body).queues
            told.append(queues.read_queues)
            broker.on(ROUTE, route(queues.read_queues, {"a": broker.address}))
            return answer

        broker.on(REGISTER, register)
        configured(broker, [config(3), config(5)], 5)
        admin.create_topic("t", 3)
        assert told[:2] == [3, 5]

    @pytest.mark.parametrize(
        ("then", "there", "deleted"),
        [
            (NO_TOPIC, ["a"], 1),
            (NO_TOPIC, ["a", "b"], 0),
            (refuse(Response.SYSTEM_ERROR, "it stops"), ["a"], 0),
        ],
        ids=["deleted", "deleted on one broker", "not known"],
    )
    def test_topic_deleted_during_registration_leaves_no_route(
        self, broker: MockBroker, parts: Parts, at_once: None, then: Command, there: list[str], deleted: int
    ) -> None:
        broker.on(CLUSTER, ok(cluster(a=broker.address)))
        broker.on(ROUTE, NO_ROUTE)
        broker.on(Request.UPDATE_AND_CREATE_TOPIC, ok())
        broker.on(Request.GET_BROKER_CONFIG, ok(b"a=1\n"))

        def register(call: Call) -> Command:
            broker.on(ROUTE, route(2, dict.fromkeys(there, broker.address)))
            return ok()

        def delete(call: Call) -> Command:
            broker.on(ROUTE, NO_ROUTE)
            return ok()

        broker.on(REGISTER, register)
        broker.on(Request.DELETE_TOPIC_IN_NAMESRV, delete)
        configured(broker, [config(2), then], 5)
        BaseAdmin(broker.address, replace(parts.rpc_client, scope=Scope("ns"))).create_topic("t", 3)
        assert [told.ext for told in broker.seen(Request.DELETE_TOPIC_IN_NAMESRV)] == [{"topic": "ns%t"}] * deleted

    def test_topic_changed_back_during_registration_is_not_deleted(
        self, broker: MockBroker, admin: BaseAdmin, at_once: None
    ) -> None:
        broker.on(ROUTE, route(8, {"a": broker.address}, perm=4))
        for code in (Request.UPDATE_AND_CREATE_TOPIC, Request.GET_BROKER_CONFIG, REGISTER):
            broker.on(code, ok())
        broker.on(Request.DELETE_TOPIC_IN_NAMESRV, ok())
        configured(broker, [config(3, 4), config(8, 4)], 5)
        admin.create_topic("t", 3)
        assert broker.seen(Request.DELETE_TOPIC_IN_NAMESRV) == []
        told = [queue.read_queues for c in broker.seen(REGISTER) for queue in bodies.route("t", c.body).queues]
        assert told[:2] == [3, 8]

    def test_a_name_server_that_does_not_know_the_request(
        self, broker: MockBroker, admin: BaseAdmin, at_once: None
    ) -> None:
        broker.on(ROUTE, NO_ROUTE)
        broker.on(Request.UPDATE_AND_CREATE_TOPIC, ok())
        broker.on(Request.GET_BROKER_CONFIG, ok(b"a=1\n"))
        broker.on(REGISTER, refuse(Response.REQUEST_CODE_NOT_SUPPORTED))
        configured(broker, [config(3)], 5)
        assert len(admin.create_topic("t", 3).readable_queues()) == 3
        assert len(broker.seen(REGISTER)) > 0

    def test_it_is_told_within_the_time_of_the_change(self, broker: MockBroker, parts: Parts, at_once: None) -> None:
        broker.on(CLUSTER, ok(cluster(a=broker.address)))
        broker.on(ROUTE, NO_ROUTE)
        broker.on(Request.UPDATE_AND_CREATE_TOPIC, ok())
        broker.on(Request.GET_TOPIC_CONFIG, config(3))
        broker.on(Request.GET_BROKER_CONFIG, ok(b"a=1\n"))
        broker.on(REGISTER, never)
        patient = replace(parts.rpc_client, request_timeout_s=3600.0)
        with pytest.raises(CallTimeout, match="does not show the topic in time"):
            BaseAdmin(broker.address, patient).create_topic("t", 3, timeout_s=2.0)
        assert len(broker.seen(REGISTER)) == 1

    @pytest.mark.parametrize("name", ["", "a b", "x" * 128])
    def test_names_that_no_broker_takes(self, name: str, broker: MockBroker, admin: BaseAdmin) -> None:
        with pytest.raises(OptionError, match=r"[Tt]opic"):
            admin.create_topic(name)
        with pytest.raises(OptionError, match=r"[Gg]roup"):
            admin.create_group(name)
        assert broker.requests == []

    def test_brokers_that_are_not_there(self, broker: MockBroker, admin: BaseAdmin) -> None:
        broker.on(CLUSTER, [ok(cluster(a=broker.address, down="")), ok(cluster(down="")), ok(b"{}")])
        with pytest.raises(BrokerNotFound, match="no master of x, down") as caught:
            admin.create_topic("t", brokers=["x", "a", "down"])
        assert "Known brokers: a, down" in str(caught.value)
        with pytest.raises(BrokerNotFound, match="down"):
            admin.create_topic("t")
        with pytest.raises(BrokerNotFound, match="Known brokers: none"):
            admin.create_topic("t")

    def test_delete_topic_deletes_nothing_while_a_master_is_away(self, broker: MockBroker, admin: BaseAdmin) -> None:
        """It would be told as deleted, and be there again with its messages when that master returns."""
        broker.on(Request.DELETE_TOPIC_IN_BROKER, ok())
        there = {"a": {"0": broker.address}, "b": {"1": broker.address}}
        table = {name: {"brokerName": name, "cluster": "c", "brokerAddrs": at} for name, at in there.items()}
        broker.on(CLUSTER, ok(json.dumps({"brokerAddrTable": table}).encode()))
        with pytest.raises(BrokerNotFound, match="no master of b"):
            admin.delete_topic("t")
        assert broker.seen(Request.DELETE_TOPIC_IN_BROKER) == broker.seen(Request.DELETE_TOPIC_IN_NAMESRV) == []

    def test_slaves_delete_after_their_masters(self, broker: MockBroker, admin: BaseAdmin) -> None:
        for code in (Request.DELETE_TOPIC_IN_BROKER, Request.DELETE_TOPIC_IN_NAMESRV):
            broker.on(code, ok())
        order: list[str] = []
        with MockBroker() as slave:
            told = {"brokerName": "a", "cluster": "c", "brokerAddrs": {"1": slave.address, "0": broker.address}}
            broker.on(CLUSTER, ok(json.dumps({"brokerAddrTable": {"a": told}}).encode()))
            for name, server in (("master", broker), ("slave", slave)):

                def delete(call: Call, name: str = name) -> None:
                    order.append(name)
                    call.peer.send(call.frame(ok()))

                server.on(Request.DELETE_TOPIC_IN_BROKER, delete)
            admin.delete_topic("t")
            assert order == ["master", "slave"]
            slave.on(Request.DELETE_TOPIC_IN_BROKER, refuse(Response.SYSTEM_BUSY, "busy"))
            with pytest.raises(RocketMQError, match="busy"):
                admin.delete_topic("t")
        assert len(broker.seen(Request.DELETE_TOPIC_IN_NAMESRV)) == 2

    def test_every_slave_of_every_broker_deletes_though_one_does_not(
        self, broker: MockBroker, admin: BaseAdmin
    ) -> None:
        """What one keeps a topic of the same name would have."""
        for code in (Request.DELETE_TOPIC_IN_BROKER, Request.DELETE_TOPIC_IN_NAMESRV):
            broker.on(code, ok())
        slaves = [MockBroker({Request.DELETE_TOPIC_IN_BROKER: ok()}) for _ in range(4)]
        with slaves[0], slaves[1], slaves[2], slaves[3]:
            slaves[0].on(Request.DELETE_TOPIC_IN_BROKER, refuse(Response.SYSTEM_BUSY, "busy"))
            table = {
                name: {
                    "brokerName": name,
                    "cluster": "c",
                    "brokerAddrs": {0: broker.address, 1: s.address, 2: t.address},
                }
                for name, s, t in (("a", *slaves[:2]), ("b", *slaves[2:]))
            }
            broker.on(CLUSTER, ok(json.dumps({"brokerAddrTable": table}).encode()))
            with pytest.raises(RocketMQError, match="busy"):
                admin.delete_topic("t")
            assert [len(slave.seen(Request.DELETE_TOPIC_IN_BROKER)) for slave in slaves] == [1, 1, 1, 1]

    def test_delete_topic_asks_brokers_before_name_servers(
        self, broker: MockBroker, parts: Parts, admin: BaseAdmin
    ) -> None:
        codes = (Request.DELETE_TOPIC_IN_BROKER, Request.DELETE_TOPIC_IN_NAMESRV)
        for code in codes:
            broker.on(code, ok())
        admin.delete_topic("t")
        assert [c.code for c in broker.requests if c.code in codes] == list(codes)
        assert admin.routes.cached_topics() == []
        broker.on(ROUTE, NO_ROUTE)
        with pytest.raises(RouteNotFound):
            admin.delete_topic("t")


def test_every_request_to_a_broker_names_it(broker: MockBroker, admin: BaseAdmin) -> None:
    to_brokers = (
        Request.UPDATE_AND_CREATE_TOPIC,
        Request.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP,
        Request.UPDATE_BROKER_CONFIG,
        Request.DELETE_TOPIC_IN_BROKER,
        Request.DELETE_TOPIC_IN_NAMESRV,
    )
    for code in to_brokers:
        broker.on(code, ok())
    broker.on(Request.GET_BROKER_CONFIG, ok(b"a=1\n"))
    broker.on(Request.GET_CONSUME_STATS, ok(b'{"offsetTable":{}}'))
    config = b'{"topicName":"t","readQueueNums":1,"writeQueueNums":1,"perm":6}'
    broker.on(Request.GET_TOPIC_CONFIG, ok(config))
    admin.create_topic("t")
    admin.create_group("g")
    admin.update_broker_config("a", {"x": "1"})
    settings = admin.broker_config("a")
    assert (settings, repr(settings), settings["a"].reveal()) == ({"a": "1"}, "{'a': '***'}", "1")
    assert admin.topic_config("t", "a").read_queues == 1
    assert admin.consume_stats("g", "t") == {}
    admin.delete_topic("t")
    asked = [c for c in broker.requests if c.code not in (ROUTE, CLUSTER, Request.DELETE_TOPIC_IN_NAMESRV)]
    assert len(asked) == 7
    assert {c.ext.get("bname") for c in asked} == {"a"}


def test_an_older_broker_tells_of_all_topics_at_once(broker: MockBroker) -> None:
    one = b'{"topicName":"ns%%t","readQueueNums":%d,"writeQueueNums":1,"perm":6,"topicFilterType":"SINGLE_TAG"}'
    table = b'{"topicConfigTable":{"ns%%t":%b,"t":%b}}' % (one % 3, one % 8)
    broker.on(Request.GET_TOPIC_CONFIG, refuse(Response.REQUEST_CODE_NOT_SUPPORTED))
    broker.on(Request.GET_ALL_TOPIC_CONFIG, ok(table))
    broker.on(CLUSTER, ok(cluster(a=broker.address)))
    parts = Parts(broker.address, scope=Scope("ns"))
    assert BaseAdmin(broker.address, parts.rpc_client).topic_config("t", "a").read_queues == 3


def test_progress_is_told_by_the_names_of_users(broker: MockBroker) -> None:
    parts = Parts(broker.address, scope=Scope("ns"))
    table = (
        b'{"offsetTable":{{"brokerName":"a","queueId":1,"topic":"ns%t"}:'
        b'{"brokerOffset":9,"consumerOffset":5,"pullOffset":6,"lastTimestamp":7}}}'
    )
    broker.on(Request.GET_CONSUME_STATS, ok(table))
    progress = BaseAdmin(broker.address, parts.rpc_client).consume_stats("g", "t")
    assert progress == {MessageQueue("t", "a", 1): ConsumeProgress(9, 5, 6, 7)}
    assert broker.seen(Request.GET_CONSUME_STATS)[0].ext["topic"] == "ns%t"
    with MockBroker({Request.GET_CONSUME_STATS: ok(table.replace(b'"a"', b'"b"'))}) as other:
        broker.on(ROUTE, route(2, {"a": broker.address, "b": other.address}))
        progress = BaseAdmin(broker.address, parts.rpc_client).consume_stats("g", "t")
    assert progress == {MessageQueue("t", name, 1): ConsumeProgress(9, 5, 6, 7) for name in "ab"}
    parts.pool.close()


def test_messages_of_a_key_are_those_that_have_it(broker: MockBroker) -> None:
    """An index knows hashes, and a broker that has none says so."""
    parts = Parts(broker.address, scope=Scope("ns"))
    with MockBroker({Request.QUERY_MESSAGE: refuse(Response.QUERY_NOT_FOUND, "can not find message")}) as other:
        broker.on(ROUTE, route(1, {"a": broker.address, "b": other.address}))
        both = stored(properties=text(KEYS="k other", UNIQ_KEY="1")) + stored(properties=text(KEYS="kk", UNIQ_KEY="2"))
        broker.on(Request.QUERY_MESSAGE, ok(both))
        found = BaseAdmin(broker.address, parts.rpc_client).messages_of_key("t", "k", 5, 9)
        assert [(message.msg_id, message.broker_name) for message in found] == [("1", "a")]
        asked = [server.seen(Request.QUERY_MESSAGE)[0].ext for server in (broker, other)]
        other.on(Request.QUERY_MESSAGE, ok(stored(properties=text(KEYS="kk", UNIQ_KEY="3"))))
        found = BaseAdmin(broker.address, parts.rpc_client).messages_of_key("t", "k", 5, 9)
        assert [message.msg_id for message in found] == ["1"], (
            "what one finds of another key hides nothing of the others"
        )
    assert [(ext["topic"], ext["key"], ext["beginTimestamp"], ext["endTimestamp"], ext["bname"]) for ext in asked] == [
        ("ns%t", "k", "5", "9", name) for name in "ab"
    ]
    parts.pool.close()


def test_refusals_are_reported(broker: MockBroker, admin: BaseAdmin) -> None:
    broker.on(Request.UPDATE_AND_CREATE_TOPIC, refuse(1, "unknown attribute\nmore"))
    with pytest.raises(ServerFault, match=r"unknown attribute$") as caught:
        admin.create_topic("t")
    assert caught.value.addr == broker.address


def test_attributes_that_an_old_broker_leaves_out_are_reported(broker: MockBroker, admin: BaseAdmin) -> None:
    broker.on(Request.UPDATE_AND_CREATE_TOPIC, lambda call: Command(0, version=FIRST_VERSION_WITH_ATTRIBUTES - 1))
    admin.create_topic("t")
    with pytest.raises(
        NotSupported, match=r"broker a is older than RocketMQ 5.0 and ignored the attributes queue.type"
    ):
        admin.create_topic("t", attributes=batch_attributes())


def test_a_topic_is_of_one_kind() -> None:
    assert batch_attributes({"a": "b"}) == {"a": "b", "queue.type": "BatchCQ"}
    with pytest.raises(OptionError, match=r"'queue.type' is 'SimpleCQ', but that of a batch topic is 'BatchCQ'"):
        batch_attributes({"queue.type": "SimpleCQ"})


def test_connections_that_were_lent_are_not_closed(broker: MockBroker, parts: Parts) -> None:
    broker.on(CLUSTER, ok(cluster(a="h:1")))
    with BaseAdmin(f" {broker.address} ; ", parts.rpc_client) as lent:
        assert set(lent.cluster()) == {"a"}
    assert set(parts.routes.cluster()) == {"a"}
    with BaseAdmin([broker.address]) as own:
        own.cluster()
    with pytest.raises(RocketMQError, match="closed"):
        own.cluster()


class TestRealBroker:
    def test_the_life_of_a_topic(self, real: Parts, real_admin: BaseAdmin, broker_cluster: LocalBroker) -> None:
        (broker,) = broker_cluster.brokers
        name = "life-of-a-topic"
        route = real_admin.create_topic(name, 3, attributes={"message.type": "FIFO"})
        assert [len(route.readable_queues()), len(route.writable_queues())] == [3, 3]
        config = real_admin.topic_config(name, broker)
        assert (config.read_queues, config.attributes["message.type"]) == (3, "FIFO")
        queue = route.writable_queues()[1]
        real.routes.get(name)
        real.sender.send(queue, SendRequest("g", b"x"), real.soon)
        eventually(lambda: real_admin.describe_topic(name)[queue].max_offset == 1)
        assert len(real_admin.create_topic(name, read_queues=4, write_queues=2).writable_queues()) == 2
        assert name in real_admin.topics()
        real_admin.delete_topic(name)
        with pytest.raises(RouteNotFound):
            real_admin.route(name)

    def test_groups_and_their_progress(self, real: Parts, real_admin: BaseAdmin, topic: str) -> None:
        group = f"group-{topic}"
        real_admin.create_group(group)
        queues = real_admin.route(topic).readable_queues()
        real.routes.get(topic)
        assert real.committer.commit_each(group, {queues[0]: 5}, real.soon) == {}
        assert real.offset_reader.committed(group, queues[:2], real.soon) == {queues[0]: 5, queues[1]: None}
        assert real_admin.consume_stats(group, topic)[queues[0]].consumer_offset == 5
        assert real_admin.consumed_topics(group) == [topic]
        assert real_admin.consumed_topics("nobody") == []

    def test_settings_of_a_broker(self, lone: LocalBroker) -> None:
        (broker,) = lone.brokers
        for value in ("true", "false"):
            lone.admin.update_broker_config(broker, {"traceTopicEnable": value})
            assert lone.admin.broker_config(broker)["traceTopicEnable"] == value

    def test_names_that_the_broker_refuses(self, real_admin: BaseAdmin) -> None:
        with pytest.raises(RocketMQError, match="conflict with system topic"):
            real_admin.create_topic("SELF_TEST_TOPIC")


def test_messages_of_a_key_are_not_inflated_for_their_ids(broker: MockBroker) -> None:
    parts = Parts(broker.address)
    broker.on(ROUTE, route(1, {"a": broker.address}))
    packed = stored(zlib.compress(bytes(30 << 20)), text(KEYS="k", UNIQ_KEY="1"), sys_flag=SysFlag.COMPRESSED)
    broker.on(Request.QUERY_MESSAGE, ok(packed * 8))
    admin = BaseAdmin(broker.address, parts.rpc_client)
    assert [message.msg_id for message in admin.messages_of_key("t", "k", 5, 9)] == ["1"] * 8
    assert peak_bytes(lambda: admin.messages_of_key("t", "k", 5, 9)) < 60 << 20
    parts.pool.close()
