"""Topics that are changed: what stays, what is refused before anything is changed, and what brokers refuse."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from rocketmq_spark import Admin, session
from rocketmq_spark.admin import topics
from rocketmq_spark.admin.topics import TopicChange
from rocketmq_spark.base.codes import Request, Response
from rocketmq_spark.client.rpc import RpcClient
from rocketmq_spark.errors import BrokerNotFound, ConnectionLost, NotSupported, OptionError, RocketMQError, ServerFault
from rocketmq_spark.wire.header import Command
from tests.client.conftest import Parts
from tests.mockbroker import Call, MockBroker, cluster, ok, refuse

PUT, CONFIG, ALL, ROUTE = (
    Request.UPDATE_AND_CREATE_TOPIC, Request.GET_TOPIC_CONFIG, Request.GET_ALL_TOPIC_CONFIG, Request.GET_ROUTEINFO_BY_TOPIC,
)  # fmt: skip


class Kept:
    """Topic ``t`` as two brokers keep it, and as the route shows it; what they are asked to put they put."""

    def __init__(self, broker: MockBroker, second: MockBroker) -> None:
        self.servers = {"broker-a": broker, "broker-b": second}
        self.configs: dict[str, dict[str, Any]] = {
            name: {
                "topicName": "t", "readQueueNums": 4, "writeQueueNums": 4, "perm": 6, "topicFilterType": "SINGLE_TAG",
                "topicSysFlag": 2, "order": False, "attributes": {"message.type": "FIFO"},
            }
            for name in self.servers
        }  # fmt: skip
        self.own = dict.fromkeys(self.servers, 6)
        self.numbers = dict.fromkeys(self.servers, "0")
        broker.on(Request.GET_BROKER_CLUSTER_INFO, self.cluster)
        broker.on(ROUTE, self.route)
        for server in self.servers.values():
            server.on(CONFIG, lambda call: ok(json.dumps(self.configs[call.ext("bname")]).encode()))
            server.on(Request.GET_TOPIC_STATS_INFO, ok(b'{"offsetTable":{}}'))
            server.on(PUT, self.put)

    def brokers(self) -> dict[str, dict[str, Any]]:
        return {
            name: {"brokerName": name, "cluster": "c", "brokerAddrs": {self.numbers[name]: s.address}}
            for name, s in self.servers.items()
        }

    def cluster(self, call: Call) -> Any:
        return ok(json.dumps({"brokerAddrTable": self.brokers()}).encode())

    def route(self, call: Call) -> Any:
        data = list(self.brokers().values())
        return ok(json.dumps({"brokerDatas": data, "queueDatas": [
            {
                "brokerName": name, "readQueueNums": c["readQueueNums"], "writeQueueNums": c["writeQueueNums"],
                "perm": c["perm"] if self.own[name] == 6 else c["perm"] & self.own[name],
            }
            for name, c in self.configs.items()
        ]}).encode())  # fmt: skip

    def put(self, call: Call) -> Any:
        kept = self.configs[call.ext("bname")]
        kept |= {name: int(call.ext(name)) for name in ("readQueueNums", "writeQueueNums", "perm", "topicSysFlag")}
        kept["order"] = call.ext("order") == "true"
        for pair in call.command.ext.get("attributes", "").split(","):
            if pair:
                name, _, value = pair[1:].partition("=")
                kept["attributes"] = {**kept["attributes"], name: value}
        return ok()

    def seen(self) -> list[tuple[str, dict[str, str]]]:
        return [(name, command.ext) for name, server in self.servers.items() for command in server.seen(PUT)]


@pytest.fixture
def kept(broker: MockBroker, tools: Parts) -> Iterator[Kept]:
    with MockBroker() as second:
        yield Kept(broker, second)


def test_what_is_not_given_stays(kept: Kept, tools: Parts) -> None:
    there = topics.update(tools, "t", TopicChange(permission="R"))
    assert [(name, ext["perm"], ext["readQueueNums"], ext["writeQueueNums"], ext["topicSysFlag"], ext["order"],
             "attributes" in ext) for name, ext in kept.seen()] == [
        (name, "4", "4", "4", "2", "false", False) for name in ("broker-a", "broker-b")
    ]  # fmt: skip
    assert (there.permission, there.message_type) == ("R", "FIFO")
    there = topics.update(tools, "t", TopicChange(6, order=True, attributes={"reserve.time": "60000"}))
    assert there.permission == "R"
    for name in kept.servers:
        on = there.brokers[name]
        assert (on.read_queues, on.write_queues, on.order) == (6, 6, True)
        assert on.attributes == {"message.type": "FIFO", "reserve.time": "60000"}
    assert topics.update(tools, "t", TopicChange(permission="RW")).brokers["broker-a"].order
    assert not topics.update(tools, "t", TopicChange(order=False)).brokers["broker-a"].order


def test_other_bits_of_a_permission_stay(kept: Kept, tools: Parts) -> None:
    kept.configs["broker-a"]["perm"] = 7
    topics.update(tools, "t", TopicChange(permission="W"))
    assert [config["perm"] for config in kept.configs.values()] == [3, 2]


def test_on_one_broker_only(kept: Kept, tools: Parts) -> None:
    there = topics.update(tools, "t", TopicChange(8, "W"), ["broker-b"])
    assert [name for name, _ in kept.seen()] == ["broker-b"]
    assert there.permission == "RW, W"


@pytest.mark.parametrize(
    ("change", "only", "said"),
    [
        (TopicChange(), None, "there is nothing to change"),
        (TopicChange(3), None, r"queues is 3, fewer than topic t has: 4 on broker-a, 4 on broker-b.*topic shrink"),
        (TopicChange(0), None, "queues is 0, fewer than"),
        (TopicChange(permission="rw"), None, "permission is 'rw'; expected RW, R, W"),
        (TopicChange(9), ["broker-a", "broker-c"], "topic t is not on broker-c"),
        (
            TopicChange(9, attributes={"queue.type": "BatchCQ"}),
            None,
            "'queue.type' of topic t is 'SimpleCQ' and cannot be changed",
        ),
        (
            TopicChange(attributes={"cleanup.policy": "COMPACTION"}),
            None,
            "'cleanup.policy' of topic t is 'DELETE' and cannot be changed",
        ),
    ],
)
def test_what_is_refused_changes_nothing(
    change: TopicChange, only: list[str] | None, said: str, kept: Kept, tools: Parts
) -> None:
    with pytest.raises(OptionError, match=said):
        topics.update(tools, "t", change, only)
    assert kept.seen() == []


def test_an_attribute_that_is_so_is_not_sent_again(kept: Kept, tools: Parts) -> None:
    """Brokers refuse those that stay for ever even then."""
    kept.configs["broker-b"]["attributes"] = {"queue.type": "BatchCQ"}
    with pytest.raises(OptionError, match=r"'queue\.type' of topic t is 'SimpleCQ' and cannot be changed"):
        topics.update(tools, "t", TopicChange(attributes={"queue.type": "BatchCQ", "message.type": "FIFO"}))
    attributes = {"queue.type": "BatchCQ", "message.type": "FIFO", "cleanup.policy": "DELETE"}
    topics.update(tools, "t", TopicChange(attributes=attributes), ["broker-b"])
    ((name, ext),) = kept.seen()
    assert (name, ext["attributes"]) == ("broker-b", "+message.type=FIFO")
    kept.configs["broker-a"]["attributes"] = {}
    topics.update(tools, "t", TopicChange(attributes={"message.type": "FIFO"}))
    assert {name: ext.get("attributes", "") for name, ext in kept.seen()} == {
        "broker-a": "+message.type=FIFO",
        "broker-b": "",
    }


def test_brokers_before_5_0_have_no_attributes(kept: Kept, tools: Parts) -> None:
    """All others are left alone, too. Without attributes such a broker is changed like any other."""
    second = kept.servers["broker-b"]
    second.on(CONFIG, refuse(Response.REQUEST_CODE_NOT_SUPPORTED))
    second.on(ALL, lambda call: ok(json.dumps({"topicConfigTable": {"t": kept.configs["broker-b"]}}).encode()))
    with pytest.raises(
        NotSupported, match=r"broker-b is older than RocketMQ 5\.0 and has no attributes; nothing was changed"
    ):
        topics.update(tools, "t", TopicChange(9, attributes={"message.type": "NORMAL"}))
    with pytest.raises(
        NotSupported, match=r"broker-b .* reads the order from name servers; nothing.*mqadmin updateOrderConf"
    ):
        topics.update(tools, "t", TopicChange(9, order=True))
    assert kept.seen() == []
    there = topics.update(tools, "t", TopicChange(9, "R"))
    assert {(on.write_queues, on.permission) for on in there.brokers.values()} == {(9, "R")}


def test_what_a_broker_does_not_take_is_said_in_its_words(kept: Kept, tools: Parts) -> None:
    kept.servers["broker-a"].on(PUT, refuse(Response.SYSTEM_ERROR, "unsupported key: colour"))
    with pytest.raises(OptionError, match=r"a broker rejects colour=red.*unsupported key: colour"):
        topics.update(tools, "t", TopicChange(attributes={"colour": "red"}))
    with pytest.raises(ServerFault):
        topics.update(tools, "t", TopicChange(9))


def test_topic_change_overwritten_by_other_process_is_an_error(kept: Kept, tools: Parts) -> None:
    """Each asks what a topic has, changes its part, and puts all: of two at once the later one wins."""
    before = {**kept.configs["broker-b"], "order": True}

    def asked(call: Call) -> Any:
        return ok(json.dumps(before if put() else kept.configs["broker-b"]).encode())

    def put() -> bool:
        return bool(kept.servers["broker-b"].seen(PUT))

    kept.servers["broker-b"].on(CONFIG, asked)
    for change in (TopicChange(9), TopicChange(permission="R"), TopicChange(order=False)):
        with pytest.raises(RocketMQError, match="topic t lacks the new settings on broker-b: another process"):
            topics.update(tools, "t", change)
    assert topics.update(tools, "t", TopicChange(order=True)).brokers["broker-b"].order


def test_who_has_it_already_is_said_where_one_refuses(kept: Kept, tools: Parts) -> None:
    kept.servers["broker-b"].on(PUT, refuse(Response.SYSTEM_ERROR, "no such type"))
    for change in (TopicChange(attributes={"message.type": "PRIORITY"}), TopicChange(9)):
        with pytest.raises(RocketMQError, match="no such type") as caught:
            topics.update(tools, "t", change)
        assert caught.value.remedy == "It is done on broker-a, and not on broker-b"
    for code in (Request.DELETE_TOPIC_IN_BROKER, Request.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP):
        kept.servers["broker-a"].on(code, ok())
        kept.servers["broker-b"].on(code, refuse(Response.SYSTEM_ERROR, "no"))
    for verb in (lambda: topics.delete(tools, "t"), lambda: tools.admin.create_group("g")):
        with pytest.raises(ServerFault) as half:
            verb()
        assert half.value.remedy == "It is done on broker-a, and not on broker-b"
    kept.servers["broker-b"].on(Request.DELETE_TOPIC_IN_BROKER, lambda call: kept.servers["broker-b"].drop())
    with pytest.raises(ConnectionLost, match="It is done on broker-a, and perhaps on broker-b"):
        topics.delete(tools, "t")
    kept.servers["broker-a"].on(PUT, refuse(Response.SYSTEM_ERROR, "no such type"))
    with pytest.raises(ServerFault) as fault:
        topics.update(tools, "t", TopicChange(9))
    assert fault.value.remedy is None


def test_delete_topic_error_names_name_server_that_may_keep_it(kept: Kept, tools: Parts) -> None:
    """It was an error that did not say that the topic is deleted."""
    for server in kept.servers.values():
        server.on(Request.DELETE_TOPIC_IN_BROKER, ok())
    kept.servers["broker-a"].on(Request.DELETE_TOPIC_IN_NAMESRV, ok())
    tools.admin.name_servers.addresses = [*tools.admin.name_servers.addresses, "127.0.0.1:1"]
    with pytest.raises(ConnectionLost, match="cannot connect") as caught:
        topics.delete(tools, "t")
    assert caught.value.remedy == "Topic t is deleted on all masters, but this server may still have it"


def test_who_has_it_already_is_said_after_ctrl_c(kept: Kept, tools: Parts, monkeypatch: pytest.MonkeyPatch) -> None:
    ask = RpcClient.request

    def interrupted(self: RpcClient, address: str, command: Command, *more: Any, **how: Any) -> Command:
        if command.code == PUT and command.ext["bname"] == "broker-b":
            raise KeyboardInterrupt
        return ask(self, address, command, *more, **how)

    monkeypatch.setattr(RpcClient, "request", interrupted)
    with pytest.raises(KeyboardInterrupt) as caught:
        topics.widen(tools, "t", 9)
    assert caught.value.__notes__ == ["It is done on broker-a, and perhaps on broker-b"]


@pytest.mark.parametrize("own", [4, 2])
def test_a_broker_that_is_closed_shows_no_more_than_it_permits(
    own: int, kept: Kept, broker: MockBroker, tools: Parts
) -> None:
    """The change is done; it was waited for in vain, and said that it is not."""
    kept.own["broker-b"] = own
    kept.servers["broker-b"].on(Request.GET_BROKER_CONFIG, ok(b"brokerPermission=%d\n" % own))
    broker.on(Request.GET_BROKER_CONFIG, ok(b"brokerPermission=6\n"))
    assert topics.update(tools, "t", TopicChange(9)).permission == "RW"
    assert topics.widen(tools, "t", 10).write_queues == 20
    assert len(broker.seen(ROUTE)) < 20, "who waits looks at it every 10 ms"
    assert broker.seen(Request.GET_BROKER_CONFIG) == []  # only who shows another is asked


def test_topic_without_read_permission_shows_queues_and_messages(kept: Kept, tools: Parts) -> None:
    rows = ",".join(
        f'{{"brokerName":"%s","queueId":{n},"topic":"t"}}:{{"minOffset":1,"maxOffset":{4 + n},"lastUpdateTimestamp":0}}'
        for n in range(4)
    )
    for name, server in kept.servers.items():
        kept.configs[name]["perm"] = 2
        server.on(Request.GET_TOPIC_STATS_INFO, ok(('{"offsetTable":{' + rows.replace("%s", name) + "}}").encode()))
    there = topics.describe(tools, "t")
    assert (there.permission, len(there.queues), there.messages) == ("W", 8, 2 * (3 + 4 + 5 + 6))
    assert topics.shrink(tools, "t", 3, preview=True).hidden == 2 * 6
    assert topics.shrink(tools, "t", 3, ["broker-b"], preview=True).hidden == 6


def test_only_the_brokers_that_are_named_have_other_queues_then(kept: Kept, tools: Parts) -> None:
    """On others queues would be out of sight with their messages."""
    topics.shrink(tools, "t", 3, preview=True)
    assert kept.seen() == []
    topics.shrink(tools, "t", 3, ["broker-b"])
    topics.widen(tools, "t", 9, ["broker-a"])
    numbers = {name: (c["readQueueNums"], c["writeQueueNums"]) for name, c in kept.configs.items()}
    assert numbers == {"broker-a": (9, 9), "broker-b": (3, 3)}
    assert [name for name, _ in kept.seen()] == ["broker-a", "broker-b"], "each once"


def test_each_broker_keeps_what_it_has_of_a_topic(kept: Kept, tools: Parts) -> None:
    """One that is closed for writers would take messages again after the topic was widened."""
    kept.configs["broker-b"] |= {"perm": 4, "topicSysFlag": 0, "order": True}
    topics.widen(tools, "t", 5)
    topics.update(tools, "t", TopicChange(6))
    names = ("perm", "topicSysFlag", "order", "writeQueueNums")
    found = {name: [config[one] for one in names] for name, config in kept.configs.items()}
    assert found == {"broker-a": [6, 2, False, 6], "broker-b": [4, 0, True, 6]}


def test_widen_refuses_fewer_queues_than_any_broker_has(kept: Kept, tools: Parts) -> None:
    """That broker would take queues away, with all that is not read in them."""
    kept.configs["broker-b"] |= {"readQueueNums": 8, "writeQueueNums": 8}
    for verb in (lambda: topics.widen(tools, "t", 6), lambda: topics.update(tools, "t", TopicChange(6))):
        with pytest.raises(OptionError, match="queues is 6, fewer than topic t has: 4 on broker-a, 8 on broker-b"):
            verb()
    with pytest.raises(OptionError, match="queues is 6, more than topic t has"):
        topics.shrink(tools, "t", 6)
    assert kept.seen() == []


def test_a_broker_whose_master_is_away_is_not_called_old(kept: Kept, broker: MockBroker, tools: Parts) -> None:
    kept.numbers["broker-b"] = "1"
    with pytest.raises(BrokerNotFound, match="no master of broker-b"):
        topics.update(tools, "t", TopicChange(attributes={"message.type": "NORMAL"}))
    assert kept.seen() == []


def test_where_a_master_is_away_nothing_is_changed(kept: Kept, broker: MockBroker, tools: Parts) -> None:
    pairs = zip(kept.servers.items(), "01", strict=True)
    table = {name: {number: server.address} for (name, server), number in pairs}
    broker.on(Request.GET_BROKER_CLUSTER_INFO, cluster(table))
    with pytest.raises(BrokerNotFound, match="no master of broker-b"):
        topics.update(tools, "t", TopicChange(9))
    assert kept.seen() == []
    topics.update(tools, "t", TopicChange(9), ["broker-a"])
    assert [name for name, _ in kept.seen()] == ["broker-a"]


def test_admin(kept: Kept, broker: MockBroker) -> None:
    with Admin(broker.address) as admin:
        there = admin.update_topic("t", 5, permission="W", order=True, attributes={"message.type": "NORMAL"})
        assert (there.permission, there.message_type, there.brokers["broker-a"].order) == ("W", "NORMAL", True)
        with pytest.raises(OptionError, match="there is nothing to change"):
            admin.update_topic("t")
    session.close_all()
