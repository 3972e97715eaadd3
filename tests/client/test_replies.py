"""Request and reply on the wire: who gets a reply that a broker passes on, and where replies are sent."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from dataclasses import replace

import pytest

from rocketmq_spark.base.clock import Deadline
from rocketmq_spark.base.codes import Property, Request, Response, SysFlag
from rocketmq_spark.client.instance import RegisteredMember
from rocketmq_spark.errors import (
    BrokerNotFound,
    CallTimeout,
    DecodeError,
    MessageRefused,
    NotSupported,
    RocketMQError,
    ServerFault,
)
from rocketmq_spark.model import Message, MessageQueue, ReceivedMessage, Reply
from rocketmq_spark.producer.request_reply import RequestProducer
from rocketmq_spark.producer.settings import ProducerSettings
from rocketmq_spark.wire import compression as compression_module
from rocketmq_spark.wire.compression import compress, decompress
from rocketmq_spark.wire.header import Command
from rocketmq_spark.wire.names import Scope
from rocketmq_spark.wire.properties import decode_properties
from tests.client.conftest import Parts
from tests.consumer.messages import message
from tests.helpers import no_more_threads
from tests.mockbroker import OF_PROXY, Call, Held, MockBroker, eventually, never, ok, refuse, route

SENT = {"msgId": "0", "queueId": "0", "queueOffset": "0"}
OWN = "CORRELATION_ID\x01ID\x02REPLY_TO_CLIENT\x01me\x02MSG_TYPE\x01reply\x02PUSH_REPLY_TIME\x017\x02"
Outcome = Reply | RocketMQError


def passed_on(body: bytes, properties: str = OWN, **fields: object) -> Command:
    """A reply, as a broker passes it on."""
    header = {
        "producerGroup": "g", "topic": "c_REPLY_TOPIC", "defaultTopic": "TBW102", "defaultTopicQueueNums": "1",
        "queueId": "0", "sysFlag": "0", "bornTimestamp": "5", "flag": "3", "properties": properties,
        "reconsumeTimes": "0", "unitMode": "false", "bornHost": "10.0.0.7:99", "storeHost": "10.0.0.8:1",
        "storeTimestamp": "6", **{name: str(value) for name, value in fields.items()},
    }  # fmt: skip
    return Command(Request.PUSH_REPLY_MESSAGE_TO_CLIENT, header, body)


def question(topic: str = "t", broker_name: str = "broker-a", **properties: str) -> ReceivedMessage:
    """A request that a consumer has."""
    own = {Property.CLUSTER: "c", Property.REPLY_TO_CLIENT: "me", Property.CORRELATION_ID: "ID", Property.TTL: "3000"}
    queue = MessageQueue(topic, broker_name, 0)
    return replace(message(0), topic=topic, queue=queue, properties={**own, **properties})


ANSWER = Message("t", b"yes", properties={"a": "b"}, tags="x", keys=["k"], flag=3)


@pytest.fixture
def two(broker: MockBroker) -> Iterator[MockBroker]:
    """A second broker, which has the topic, too."""
    with MockBroker() as other:
        broker.on(Request.GET_ROUTEINFO_BY_TOPIC, route(2, {"broker-b": other.address, "broker-a": broker.address}))
        for one in (broker, other):
            one.on(Request.SEND_REPLY_MESSAGE_V2, ok(**SENT))
        yield other


def connected(broker: MockBroker, parts: Parts) -> list[Outcome]:
    """What the reply ID becomes, once there is a connection over which it can come."""
    got: list[Outcome] = []
    parts.replies.expect("ID", got.append)
    parts.routes.get("t")
    return got


def replies_of(broker: MockBroker, count: int = 1) -> list[Command]:
    broker.wait_for(lambda: len(broker.replies) >= count)
    return broker.replies


def test_a_reply_comes_to_who_expects_it_once(
    broker: MockBroker, parts: Parts, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    got = connected(broker, parts)
    more = "a\x01b\x02TAGS\x01x\x02KEYS\x01k l\x02"
    for _ in range(2):  # two repliers, or one whose answer its broker passed on twice
        broker.ask(passed_on(b"yes", OWN + more))
    assert [reply.code for reply in replies_of(broker, 2)] == [0, 0]
    eventually(lambda: "is ignored, because no request waits for it: ID" in caplog.text)
    eventually(lambda: bool(got))  # the broker gets its answer before the program gets the reply
    assert got == [Reply(b"yes", {"a": "b"}, "x", ["k", "l"], 3, 5, "10.0.0.7:99")]


def test_reply_without_a_waiting_request_is_acked_and_dropped(
    broker: MockBroker, parts: Parts, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    got: list[Outcome] = []
    forget = parts.replies.expect("ID", got.append)
    parts.routes.get("t")
    forget()
    broker.ask(passed_on(b"yes"))
    assert [reply.code for reply in replies_of(broker)] == [0]
    eventually(lambda: "because no request waits for it" in caplog.text)
    assert got == []


def test_replies_are_rejected_by_a_process_that_sent_no_request(broker: MockBroker, parts: Parts) -> None:
    parts.routes.get("t")
    broker.ask(passed_on(b"no zlib", sysFlag=int(SysFlag.COMPRESSED | SysFlag.ZLIB)))
    assert [reply.code for reply in replies_of(broker)] == [Response.REQUEST_CODE_NOT_SUPPORTED]


def test_a_forged_reply_is_dropped_before_its_body_is_touched(
    broker: MockBroker, parts: Parts, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    opened: list[int] = []
    monkeypatch.setattr(
        compression_module, "decompress", lambda body, flag: opened.append(len(body)) or decompress(body, flag)
    )
    got = connected(broker, parts)
    packed, yes = int(SysFlag.COMPRESSED | SysFlag.ZLIB), compress(b"yes")
    bomb = compress(bytes(1 << 20))
    for number in range(200):
        broker.ask(passed_on(bomb, f"CORRELATION_ID\x01forged {number}\x02", sysFlag=packed))
    broker.ask(passed_on(yes, sysFlag=packed))
    eventually(lambda: len(got) == 1)
    assert opened == [len(yes)]
    assert {reply.code for reply in replies_of(broker, 201)} == {0}
    assert caplog.text.count("is ignored, because no request waits for it") <= 5


def test_a_reply_without_a_thread_leaves_its_request_waiting(
    broker: MockBroker, parts: Parts, monkeypatch: pytest.MonkeyPatch
) -> None:
    got = connected(broker, parts)
    with monkeypatch.context() as exhausted:
        no_more_threads(exhausted)
        broker.ask(passed_on(b"yes"))
        assert replies_of(broker)[0].code == Response.REQUEST_CODE_NOT_SUPPORTED
    broker.ask(passed_on(b"yes"))
    eventually(lambda: len(got) == 1)


def test_compressed_reply_is_decoded_or_is_a_decode_error(broker: MockBroker, parts: Parts) -> None:
    got = connected(broker, parts)
    packed = int(SysFlag.COMPRESSED | SysFlag.ZLIB)
    broker.ask(passed_on(compress(b"yes" * 100), sysFlag=packed))
    eventually(lambda: len(got) == 1)
    parts.replies.expect("ID", got.append)
    broker.ask(passed_on(b"no zlib", sysFlag=packed))
    eventually(lambda: len(got) == 2)
    assert isinstance(got[0], Reply)
    assert got[0].body == b"yes" * 100
    assert isinstance(got[1], DecodeError)


def test_what_is_no_reply_is_refused_and_the_next_one_is_read(
    broker: MockBroker, parts: Parts, caplog: pytest.LogCaptureFixture
) -> None:
    got = connected(broker, parts)
    broker.ask(passed_on(b"yes", sysFlag="none"))
    broker.ask(Command(Request.PUSH_REPLY_MESSAGE_TO_CLIENT, {}, b"yes"))
    broker.ask(passed_on(b"yes"))
    assert [reply.code for reply in replies_of(broker, 3)] == [Response.SYSTEM_ERROR, Response.SYSTEM_ERROR, 0]
    eventually(lambda: len(got) == 1)
    assert caplog.text.count(f"a reply from {broker.address} cannot be read") == 2


def test_a_reply_goes_to_the_broker_of_its_request(broker: MockBroker, two: MockBroker) -> None:
    parts = Parts(broker.address, scope=Scope("ns"))
    parts.replies.reply(question(), ANSWER, "repliers", parts.soon)
    (command,) = broker.seen(Request.SEND_REPLY_MESSAGE_V2)
    assert two.seen(Request.SEND_REPLY_MESSAGE_V2) == []
    parts.replies.reply(question(broker_name="broker-b"), ANSWER, "repliers", parts.soon)
    assert [c.ext["n"] for c in two.seen(Request.SEND_REPLY_MESSAGE_V2)] == ["broker-b"]
    assert bytes(command.body) == b"yes"
    assert {name: command.ext[name] for name in "abehn"} == {
        "a": "ns%repliers", "b": "c_REPLY_TOPIC", "e": "0", "h": "3", "n": "broker-a"
    }  # fmt: skip
    assert decode_properties(command.ext["i"]) == {
        "MSG_TYPE": "reply", "CORRELATION_ID": "ID", "REPLY_TO_CLIENT": "me", "TTL": "3000", "a": "b", "TAGS": "x",
        "KEYS": "k",
    }  # fmt: skip
    parts.close()


def test_a_large_reply_is_compressed(broker: MockBroker, parts: Parts, two: MockBroker) -> None:
    large = Message("t", b"yes" * 10_000)
    parts.replies.reply(question(), large, "g", parts.soon)
    (command,) = broker.seen(Request.SEND_REPLY_MESSAGE_V2)
    assert len(command.body) < 1_000
    assert decompress(command.body, int(command.ext["f"])) == large.body


def test_reply_tries_other_brokers_if_requester_is_unknown(broker: MockBroker, parts: Parts, two: MockBroker) -> None:
    gone = refuse(Response.SYSTEM_ERROR, "push reply message fail, channel of <me> not found.")
    broker.on(Request.SEND_REPLY_MESSAGE_V2, gone)
    parts.replies.reply(question(), ANSWER, "g", parts.soon)
    assert len(two.seen(Request.SEND_REPLY_MESSAGE_V2)) == 1
    two.on(Request.SEND_REPLY_MESSAGE_V2, gone)
    with pytest.raises(ServerFault, match=r"channel of <me> not found.*Perhaps the requester has ended"):
        parts.replies.reply(question(), ANSWER, "g", parts.soon)


def test_a_broker_that_hangs_leaves_time_for_the_other(broker: MockBroker, parts: Parts, two: MockBroker) -> None:
    broker.on(Request.SEND_REPLY_MESSAGE_V2, never)
    parts.routes.get("t")
    parts.replies.reply(question(), ANSWER, "g", Deadline.after(3.0))
    assert len(two.seen(Request.SEND_REPLY_MESSAGE_V2)) == 1
    with pytest.raises(CallTimeout, match="no time to send the reply"):
        parts.replies.reply(question(), ANSWER, "g", Deadline.after(0))


def test_a_reply_without_a_master_to_pass_it_on_says_so(broker: MockBroker, parts: Parts) -> None:
    broker.on(Request.GET_ROUTEINFO_BY_TOPIC, route(2, {"broker-a": ""}))
    with pytest.raises(BrokerNotFound, match="no broker of the topic has a master now"):
        parts.replies.reply(question(), ANSWER, "g", parts.soon)


@pytest.mark.parametrize("missing", [Property.CLUSTER, Property.REPLY_TO_CLIENT, Property.CORRELATION_ID])
def test_only_requests_are_answered(broker: MockBroker, parts: Parts, two: MockBroker, missing: str) -> None:
    with pytest.raises(MessageRefused, match="is not a request"):
        parts.replies.reply(question(**{missing: ""}), ANSWER, "g", parts.soon)
    assert broker.seen(Request.SEND_REPLY_MESSAGE_V2) == []


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (Message("t", b""), "has 0 bytes; expected 1 to 4194304"),
        (Message("t", bytes(4 * 1024 * 1024 + 1)), "has 4194305 bytes"),
        (Message("t", "yes"), "body is str; expected bytes"),  # type: ignore[arg-type]
        (Message("t", 5), "body is int; expected bytes"),  # type: ignore[arg-type]
        (Message("t", b"x", properties={"CLUSTER": "c"}), "CLUSTER belongs to RocketMQ"),
        (Message("t", b"x", properties={"a": "b\x01"}), "separator"),
    ],
)
def test_answers_that_no_broker_passes_on_are_refused(
    broker: MockBroker, parts: Parts, two: MockBroker, answer: Message, words: str
) -> None:
    with pytest.raises(MessageRefused, match=words):
        parts.replies.reply(question(), answer, "g", parts.soon)
    assert broker.seen(Request.SEND_REPLY_MESSAGE_V2) == []


def test_every_broker_of_the_cluster_hears_of_a_requester(broker: MockBroker, parts: Parts, two: MockBroker) -> None:
    """Also those that have none of its topics."""
    for one in (broker, two):
        one.on(Request.HEART_BEAT, ok())
        one.on(Request.UNREGISTER_CLIENT, ok())
    brokers = {
        name: {"cluster": "c", "brokerName": name, "brokerAddrs": {"0": one.address}}
        for name, one in (("broker-a", broker), ("broker-b", two))
    }
    info = {"brokerAddrTable": brokers, "clusterAddrTable": {"c": list(brokers)}}
    broker.on(Request.GET_BROKER_CLUSTER_INFO, ok(json.dumps(info).encode()))
    leave = parts.replies.join("askers", 0)
    parts.replies.announce(parts.soon)
    for one in (broker, two):
        (heartbeat,) = one.seen(Request.HEART_BEAT)
        assert json.loads(bytes(heartbeat.body))["producerDataSet"] == [{"groupName": "askers"}]
    leave(parts.soon)
    assert [len(one.seen(Request.UNREGISTER_CLIENT)) for one in (broker, two)] == [1, 1]


def test_a_requester_whose_heartbeat_a_proxy_keeps_is_refused(broker: MockBroker, parts: Parts) -> None:
    """Its brokers do not know the requester, so no reply would arrive."""
    broker.on(Request.HEART_BEAT, ok(**OF_PROXY))
    broker.on(Request.UNREGISTER_CLIENT, ok(**OF_PROXY))
    parts.routes.get("t")
    leave = parts.replies.join("askers", 0)
    for _ in range(2):
        with pytest.raises(NotSupported, match=r"a Proxy does not forward replies.*nameServer"):
            parts.replies.announce(parts.soon)
    leave(parts.soon)


def test_a_reply_that_a_proxy_does_not_take_names_the_brokers(
    broker: MockBroker, parts: Parts, two: MockBroker
) -> None:
    for one in (broker, two):
        one.on(Request.SEND_REPLY_MESSAGE_V2, refuse(Response.REQUEST_CODE_NOT_SUPPORTED))
    with pytest.raises(NotSupported, match="nameServer"):
        parts.replies.reply(question(), ANSWER, "g", parts.soon)


class Connected:
    """Clients to which a broker passes replies on: as ProducerManager of 5.5.0, which is to keep them and loses some."""

    def __init__(self, broker: MockBroker) -> None:
        self.clients: set[str] = set()
        self._groups: set[str] = set()
        broker.on(Request.HEART_BEAT, self._heartbeat)
        broker.on(Request.UNREGISTER_CLIENT, self._unregister)

    def _heartbeat(self, call: Call) -> Command:
        said = json.loads(bytes(call.command.body))
        groups = {group["groupName"] for group in said["producerDataSet"]}
        if groups - self._groups:
            self.clients.add(said["clientID"])
        self._groups |= groups
        return ok()

    def _unregister(self, call: Call) -> Command:
        group = call.command.ext.get("producerGroup")
        if group in self._groups:
            self._groups.discard(group)
            self.clients.discard(call.ext("clientID"))
        return ok()


@pytest.fixture
def connected_clients(broker: MockBroker, parts: Parts) -> Connected:
    parts.routes.get("t")
    return Connected(broker)


def unregistered(broker: MockBroker) -> list[str]:
    return [command.ext["producerGroup"] for command in broker.seen(Request.UNREGISTER_CLIENT)]


def producers(broker: MockBroker) -> list[str]:
    """Those of the last heartbeat."""
    said = json.loads(bytes(broker.seen(Request.HEART_BEAT)[-1].body))
    return [group["groupName"] for group in said["producerDataSet"]]


def test_leaving_producer_does_not_stop_replies_to_others(
    broker: MockBroker, parts: Parts, connected_clients: Connected
) -> None:
    """Not for a moment, in which replies may come: brokers hear of it when no reply is waited for any more."""
    leave = parts.replies.join("askers", 0)
    others = [RegisteredMember(group, 0) for group in ("a", "b", "a")]
    for other in others:
        parts.instance.join(other)
    parts.replies.announce(parts.soon)
    for other in others[:2]:
        parts.instance.leave(other, parts.soon)
    parts.replies.announce(parts.soon)
    assert (unregistered(broker), producers(broker)) == ([], ["a", "askers", "b"])
    parts.instance.leave(others[2], parts.soon)
    parts.instance.join(others[0])
    assert connected_clients.clients == {parts.instance.client_id}
    leave(parts.soon)
    assert unregistered(broker) == ["askers", "b"]
    assert connected_clients.clients == set()
    parts.instance.leave(others[0], parts.soon)
    assert unregistered(broker) == ["askers", "b", "a"]


def test_producer_leaving_before_first_request_loses_no_reply(
    broker: MockBroker, parts: Parts, connected_clients: Connected
) -> None:
    """With its group brokers forget the connection, and that of the requester is not new to them."""
    stays, goes = RegisteredMember("askers", 0), RegisteredMember("others", 0)
    for other in (stays, goes):
        parts.instance.join(other)
    parts.instance.heartbeat(parts.soon)
    parts.instance.leave(goes, parts.soon)
    parts.replies.join("askers", 0)
    parts.replies.announce(parts.soon)
    assert connected_clients.clients == {parts.instance.client_id}
    parts.replies.announce(parts.soon)
    assert unregistered(broker) == ["others", "askers"]


def test_connection_is_registered_again_after_producers_left(
    broker: MockBroker, parts: Parts, connected_clients: Connected
) -> None:
    parts.replies.join("askers", 0)
    parts.replies.announce(parts.soon)
    groups = [f"g{i}" for i in range(51)]
    for group in groups:
        other = RegisteredMember(group, 0)
        parts.instance.join(other)
        parts.instance.leave(other, parts.soon)
    assert sorted(unregistered(broker)) == ["askers", *sorted(groups)]
    assert producers(broker) == ["askers"]
    assert connected_clients.clients == {parts.instance.client_id}


def test_leaving_producer_loses_no_reply_while_a_broker_hangs(
    broker: MockBroker, parts: Parts, connected_clients: Connected
) -> None:
    parts.replies.join("askers", 0)
    other = RegisteredMember("others", 0, request_handler=lambda address, command: None)
    parts.instance.join(other)
    parts.replies.announce(parts.soon)
    with MockBroker() as hanging:
        hanging.on(Request.UNREGISTER_CLIENT, never)
        hanging.on(Request.HEART_BEAT, ok())
        broker.on(Request.GET_ROUTEINFO_BY_TOPIC, route(2, {"a": hanging.address, "broker-a": broker.address}))
        parts.routes.get("t", 0.0)
        parts.instance.leave(other, Deadline.after(1.0))
        assert sorted(unregistered(broker)) == ["askers", "others"]
        hanging.wait_for(lambda: len(hanging.seen(Request.HEART_BEAT)) == 1)
        broker.wait_for(lambda: bool(connected_clients.clients))
        assert producers(broker) == ["askers"]


def test_connection_is_registered_again_after_a_missing_reply(
    broker: MockBroker, parts: Parts, connected_clients: Connected
) -> None:
    """The end of an older connection makes a broker forget the new one, of which it hears in each heartbeat."""
    me = parts.instance.client_id
    parts.replies.join("askers", 0)
    parts.replies.announce(parts.soon)
    forget = [parts.replies.expect(name, lambda _: None) for name in ("ID", "other")]
    broker.ask(passed_on(b"yes"))
    replies_of(broker)
    forget[1]()
    parts.replies.announce(parts.soon)
    assert broker.seen(Request.UNREGISTER_CLIENT) == []
    connected_clients.clients.clear()
    parts.replies.expect("ID", lambda _: None)()
    parts.replies.announce(parts.soon)
    assert connected_clients.clients == {me}
    parts.replies.announce(parts.soon)
    assert len(broker.seen(Request.UNREGISTER_CLIENT)) == 1


def test_only_brokers_passing_no_replies_are_registered_again(
    broker: MockBroker, parts: Parts, two: MockBroker
) -> None:
    """The topics of some requests are on one of them only, whose replies no other one can pass on."""
    known = Connected(broker), Connected(two)
    parts.routes.get("t")
    parts.replies.join("askers", 0)
    parts.replies.announce(parts.soon)
    forget = parts.replies.expect("of the second one", lambda _: None)
    broker.ask(passed_on(b"yes"))
    replies_of(broker)
    forget()
    for one in known:
        one.clients.clear()
    parts.replies.announce(parts.soon)
    assert [one.clients for one in known] == [set(), {parts.instance.client_id}]
    assert [unregistered(one) for one in (broker, two)] == [[], ["askers"]], "between these it passes none on"
    forget = parts.replies.expect("of both", lambda _: None)
    forget()
    broker.ask(passed_on(b"yes"))
    two.ask(passed_on(b"yes"))
    replies_of(broker, 2), replies_of(two)
    parts.replies.announce(parts.soon)
    assert [unregistered(one) for one in (broker, two)] == [[], ["askers"]], "they have passed others on since"


def test_a_closed_producer_that_brokers_asked_is_asked_no_more(
    broker: MockBroker, parts: Parts, connected_clients: Connected
) -> None:
    """Another process of its group would answer, and what is asked here is lost. Its requests had joined, too, and leave last."""
    parts.replies.join("others", 0)
    broker.on(Request.SEND_MESSAGE_V2, ok(**SENT))
    settings = ProducerSettings(group="askers", heartbeat_s=0, route_refresh_s=0)
    producer = RequestProducer(parts.sender, settings, lambda message: "COMMIT", parts.replies)
    producer.request_async(Message("t", b"x"))
    assert producers(broker) == ["askers", "others"]
    producer.close(0)
    parts.instance.heartbeat(parts.soon)
    assert (unregistered(broker), producers(broker)) == (["askers", "others"], ["others"])
    assert connected_clients.clients == {parts.instance.client_id}


@pytest.mark.parametrize("event", ["a producer leaves", "a reply did not come"])
@pytest.mark.parametrize("name", ["a", "z"], ids=["the first", "the last"])
def test_brokers_resume_replies_at_once_while_another_hangs(
    broker: MockBroker, connected_clients: Connected, event: str, name: str
) -> None:
    """They know the connection no more until the heartbeat behind the unregistration: replies of that time would be lost."""
    parts = Parts(broker.address, request_timeout_s=600.0)
    parts.replies.join("askers", 0)
    other = RegisteredMember("others", 0, request_handler=lambda address, command: None)
    parts.instance.join(other)
    with MockBroker() as hanging:
        broker.on(Request.GET_ROUTEINFO_BY_TOPIC, route(2, {name: hanging.address, "broker-a": broker.address}))
        hanging.on(Request.HEART_BEAT, ok())
        held = Held()
        hanging.on(Request.UNREGISTER_CLIENT, held)
        parts.routes.get("t")
        parts.replies.announce(parts.soon)
        if event == "a producer leaves":
            telling = threading.Thread(target=parts.instance.leave, args=(other, Deadline.after(600)))
        else:
            parts.replies.expect("ID", lambda _: None)()
            telling = threading.Thread(target=parts.replies.announce, args=(Deadline.after(600),))
        telling.start()
        held.wait(1)
        broker.wait_for(lambda: len(broker.seen(Request.HEART_BEAT)) == 2)
        assert connected_clients.clients == {parts.instance.client_id}
        assert telling.is_alive()
        hanging.drop()
        telling.join(60)
        assert not telling.is_alive()
    parts.close()


def test_without_threads_one_broker_is_told_after_the_other(
    broker: MockBroker, parts: Parts, two: MockBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = Connected(broker), Connected(two)
    parts.routes.get("t")
    parts.replies.join("askers", 0)
    parts.replies.announce(parts.soon)
    parts.replies.expect("ID", lambda _: None)()
    no_more_threads(monkeypatch)
    parts.replies.announce(parts.soon)
    assert [unregistered(one) for one in (broker, two)] == [["askers"], ["askers"]]
    assert [one.clients for one in known] == [{parts.instance.client_id}] * 2


def test_requester_does_not_wait_for_a_hanging_heartbeat(broker: MockBroker, connected_clients: Connected) -> None:
    parts = Parts(broker.address, request_timeout_s=600.0)
    parts.instance.join(RegisteredMember("others", 0))
    with MockBroker() as hanging:
        broker.on(Request.GET_ROUTEINFO_BY_TOPIC, route(2, {"a": hanging.address, "broker-a": broker.address}))
        held = Held()
        hanging.on(Request.HEART_BEAT, held)
        parts.routes.get("t")
        beating = threading.Thread(target=parts.instance.heartbeat, args=(Deadline.after(600),))
        beating.start()
        held.wait(1)
        broker.wait_for(lambda: bool(connected_clients.clients))
        connected_clients.clients.clear()  # an older connection ended
        parts.replies.join("askers", 0)
        parts.replies.expect("ID", lambda _: None)()
        asking = threading.Thread(target=parts.replies.announce, args=(Deadline.after(2.0),))
        asking.start()
        asking.join(20)
        assert (asking.is_alive(), beating.is_alive()) == (False, True)
        assert connected_clients.clients == {parts.instance.client_id}
        hanging.drop()
        beating.join(60)
        assert unregistered(broker) == []
        hanging.on(Request.HEART_BEAT, ok())
        parts.replies.announce(parts.soon)
        assert unregistered(broker) == ["askers"], "a reply had not come, and there was no time for that"
    parts.close()
