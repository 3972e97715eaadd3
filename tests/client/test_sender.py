"""The verbs of a producer over remoting."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future

import pytest

from rocketmq_spark.base.codes import Request, Response, SysFlag
from rocketmq_spark.errors import (
    AccessDenied,
    BrokerBusy,
    BrokerNotFound,
    CallTimeout,
    ConnectionLost,
    LocalProtocolError,
    MessageIllegal,
    RemoteProtocolError,
    RocketMQError,
    RouteNotFound,
    ServerFault,
    ServiceNotAvailable,
    TopicNotFound,
)
from rocketmq_spark.localbroker import LocalBroker
from rocketmq_spark.model import MessageQueue, SendRequest, SendResult, SendStatus
from rocketmq_spark.wire import rpc
from rocketmq_spark.wire.header import Command
from rocketmq_spark.wire.messages import BatchItem, encode_batch
from tests import mockbroker as mb
from tests.client.conftest import Parts
from tests.fix_proxy import FaultyProxy
from tests.helpers import no_more_threads
from tests.mockbroker import NO_ROUTE, Call, MockBroker, ok, refuse, route

ROUTE = Request.GET_ROUTEINFO_BY_TOPIC
SEND, BATCH = Request.SEND_MESSAGE_V2, Request.SEND_BATCH_MESSAGE
QUEUE = MessageQueue("t", "broker-a", 1)


def sent(code: int = 0, **ext: object) -> Callable[[Call], Command]:
    fields = {"msgId": "0A", "queueId": 1, "queueOffset": 7, "transactionId": "tx", **ext}
    texts = {name: str(value) for name, value in fields.items() if value is not None}
    return lambda call: Command(code, texts)


@pytest.fixture
def routed(parts: Parts) -> Parts:
    parts.routes.get("t")
    return parts


def test_numbers_wait_for_brokers_that_are_up_and_not_listed(broker: MockBroker, parts: Parts) -> None:
    with MockBroker({Request.GET_TOPIC_STATS_INFO: ok(b'{"offsetTable":{}}')}) as first:
        both = route(1, {"a": first.address, "broker-a": broker.address})
        broker.on(ROUTE, [both, route(1, {"broker-a": broker.address}), both, route(1, {"broker-a": broker.address})])
        numbers = parts.sender.partition_queues("t", parts.soon)
        assert [queue.broker_name for queue in numbers] == ["a", "broker-a"]
        with pytest.raises(BrokerNotFound, match="no name server lists a, which had queues of the topic and may be up"):
            parts.sender.partition_queues("t", parts.soon)
        assert parts.sender.partition_queues("t", parts.soon) == numbers
    assert parts.sender.partition_queues("t", parts.soon) == numbers[1:]  # it is down


How = Callable[[Parts, SendRequest], SendResult]


def send_now(parts: Parts, request: SendRequest) -> SendResult:
    return parts.sender.send(QUEUE, request, parts.soon)


def send_later(parts: Parts, request: SendRequest) -> SendResult:
    future: Future[SendResult | RocketMQError] = Future()
    parts.sender.send_async(QUEUE, request, parts.soon, future.set_result)
    outcome = future.result(60)
    if isinstance(outcome, RocketMQError):
        raise outcome
    return outcome


both = pytest.mark.parametrize("send", [send_now, send_later])


@both
def test_an_acknowledged_message(send: How, broker: MockBroker, routed: Parts) -> None:
    broker.on(SEND, sent(recallHandle="h"))
    request = SendRequest("g", b"body", "TAGS\x01a\x02", SysFlag.COMPRESSED, 9, 123)
    assert send(routed, request) == SendResult(SendStatus.SEND_OK, "", QUEUE, 7, "0A", "tx", "h")
    (command,) = broker.seen(SEND)
    assert bytes(command.body) == b"body"
    assert rpc.SEND_MESSAGE_V2.arguments(command) == {
        "producerGroup": "g",
        "topic": "t",
        "defaultTopic": "TBW102",
        "defaultTopicQueueNums": 4,
        "queueId": 1,
        "sysFlag": 1,
        "bornTimestamp": 123,
        "flag": 9,
        "properties": "TAGS\x01a\x02",
        "reconsumeTimes": 0,
        "unitMode": False,
        "maxReconsumeTimes": None,
        "batch": False,
        "brokerName": "broker-a",
    }


@both
def test_a_batch_has_its_own_code_and_says_so(send: How, broker: MockBroker, routed: Parts) -> None:
    broker.on(BATCH, sent(msgId="0A,0B", transactionId=None))
    result = send(routed, SendRequest("g", encode_batch([BatchItem(b"a"), BatchItem(b"b")]), batch=True))
    assert (result.offset_msg_id, result.transaction_id) == ("0A,0B", None)
    assert broker.seen(BATCH)[0].ext["m"] == "true"


@both
@pytest.mark.parametrize(
    ("code", "status"),
    [
        (Response.FLUSH_DISK_TIMEOUT, SendStatus.FLUSH_DISK_TIMEOUT),
        (Response.SLAVE_NOT_AVAILABLE, SendStatus.SLAVE_NOT_AVAILABLE),
        (Response.FLUSH_SLAVE_TIMEOUT, SendStatus.FLUSH_SLAVE_TIMEOUT),
    ],
)
def test_stored_but_not_safe_is_a_status(
    send: How, code: int, status: SendStatus, broker: MockBroker, routed: Parts
) -> None:
    broker.on(SEND, [sent(code), refuse(code)])
    assert send(routed, SendRequest("g", b"x")) == SendResult(status, "", QUEUE, 7, "0A", "tx")
    assert send(routed, SendRequest("g", b"x")) == SendResult(status, "", QUEUE, None)


@both
@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (Response.SYSTEM_ERROR, ServerFault),
        (Response.SYSTEM_BUSY, BrokerBusy),
        (Response.MESSAGE_ILLEGAL, MessageIllegal),
        (Response.SERVICE_NOT_AVAILABLE, ServiceNotAvailable),
        (Response.NO_PERMISSION, AccessDenied),
        (Response.TOPIC_NOT_EXIST, TopicNotFound),
    ],
)
def test_a_refusal_names_topic_queue_and_address(
    send: How, code: int, kind: type[RocketMQError], broker: MockBroker, routed: Parts
) -> None:
    broker.on(SEND, refuse(code, "why"))
    with pytest.raises(kind) as caught:
        send(routed, SendRequest("g", b"x"))
    error = caught.value
    assert (error.topic, error.queue, error.addr, error.remark) == ("t", str(QUEUE), broker.address, "why")


@both
def test_a_broken_connection_and_a_missing_broker(send: How, broker: MockBroker, routed: Parts) -> None:
    broker.on(SEND, mb.close)
    with pytest.raises(ConnectionLost):
        send(routed, SendRequest("g", b"x"))
    broker.on(ROUTE, route(2, {"broker-a": ""}))
    routed.routes.get("t", 0.0)
    with pytest.raises(BrokerNotFound):
        send(routed, SendRequest("g", b"x"))


@both
def test_unreadable_acknowledgement_is_a_protocol_error(send: How, broker: MockBroker, routed: Parts) -> None:
    broker.on(SEND, [ok(), sent(queueOffset="x"), sent()])
    for _ in range(2):
        with pytest.raises(RemoteProtocolError):
            send(routed, SendRequest("g", b"x"))
    assert send(routed, SendRequest("g", b"x")).queue_offset == 7
    assert len(broker.peers) == 1


@pytest.mark.parametrize(
    ("properties", "delayed"),
    [
        ("DELAY\x013\x02", True),
        ("KEYS\x01k\x02TIMER_DELAY_MS\x0150\x02", True),
        ("TIMER_DELAY_SEC\x015\x02", True),
        ("TIMER_DELIVER_MS\x015\x02", True),
        ("", False),
        ("MY_DELAY\x013\x02", False),
        ("KEYS\x01DELAY\x02", False),
    ],
)
def test_the_offset_of_a_delayed_message_is_not_its_own(
    properties: str, delayed: bool, broker: MockBroker, routed: Parts
) -> None:
    broker.on(SEND, sent())
    assert (send_now(routed, SendRequest("g", b"x", properties)).queue_offset is None) == delayed


@both
@pytest.mark.parametrize("bit", [0x2, 0x8, 0x10, 0x20, 0x40, 0x80, 0x800])
def test_bits_of_a_received_message_are_never_sent(send: How, bit: int, broker: MockBroker, routed: Parts) -> None:
    broker.on(SEND, sent())
    for flag in (bit, bit | SysFlag.COMPRESSED):
        with pytest.raises(LocalProtocolError, match="sysFlag"):
            send(routed, SendRequest("g", b"x", sys_flag=flag))
    with pytest.raises(LocalProtocolError):
        routed.sender.send_oneway(QUEUE, SendRequest("g", b"x", sys_flag=bit), routed.soon)
    assert broker.seen(SEND) == []


@pytest.mark.parametrize("flag", [0, 0x1, 0x101, 0x201, 0x301, 0x4, 0x305])
def test_what_may_be_sent_is_compression_and_half_messages(flag: int, broker: MockBroker, routed: Parts) -> None:
    broker.on(SEND, sent())
    send_now(routed, SendRequest("g", b"x", sys_flag=flag))
    assert broker.seen(SEND)[0].ext["f"] == str(flag)


class TestPublishQueues:
    def test_permission_bits_of_the_route_are_honoured(self, broker: MockBroker, parts: Parts) -> None:
        broker.on(ROUTE, route(2, {"broker-a": "h:1"}, perm=4))
        with pytest.raises(RouteNotFound, match="is writable") as caught:
            parts.sender.publish_queues("t", parts.soon)
        assert caught.value.topic == "t"
        broker.on(ROUTE, route(2, {"broker-a": "h:1", "broker-b": ""}))
        queues = parts.sender.publish_queues("t", parts.soon, refresh=True)
        assert list(queues) == [MessageQueue("t", "broker-a", i) for i in range(2)]

    def test_they_stay_identical_while_the_route_is_unchanged(self, broker: MockBroker, parts: Parts) -> None:
        first = parts.sender.publish_queues("t", parts.soon)
        assert parts.sender.publish_queues("t", parts.soon) is first
        assert len(broker.seen(ROUTE)) == 1
        assert parts.sender.publish_queues("t", parts.soon, refresh=True) is first
        assert len(broker.seen(ROUTE)) == 2
        broker.on(ROUTE, route(3, {"broker-a": broker.address}))
        assert len(parts.sender.publish_queues("t", parts.soon, refresh=True)) == 3

    def test_a_missing_topic(self, broker: MockBroker, parts: Parts) -> None:
        broker.on(ROUTE, NO_ROUTE)
        with pytest.raises(RouteNotFound):
            parts.sender.publish_queues("t", parts.soon)


class TestOtherVerbs:
    def test_one_way(self, broker: MockBroker, routed: Parts) -> None:
        routed.sender.send_oneway(QUEUE, SendRequest("g", b"x"), routed.soon)
        broker.wait_for(lambda: bool(broker.seen(SEND)))
        assert broker.seen(SEND)[0].is_oneway

    def test_recall(self, broker: MockBroker, routed: Parts) -> None:
        broker.on(Request.RECALL_MESSAGE, [ok(msgId="id"), refuse(604, "recall failed")])
        assert routed.sender.recall("t", "broker-a", "handle", "g", routed.soon) == "id"
        ext = broker.seen(Request.RECALL_MESSAGE)[0].ext
        assert (ext["recallHandle"], ext["bname"]) == ("handle", "broker-a")
        with pytest.raises(RocketMQError, match="recall failed") as caught:
            routed.sender.recall("t", "broker-a", "handle", "g", routed.soon)
        assert caught.value.topic == "t"

    def test_probe(self, broker: MockBroker, routed: Parts) -> None:
        broker.on(Request.GET_MAX_OFFSET, [ok(offset=0), refuse(2, "busy")])
        answers = [routed.sender.probe(name, "t", routed.soon) for name in ("broker-a", "broker-a", "unknown")]
        assert answers == [True, False, False]

    def test_routes_are_refreshed_and_those_that_are_gone_forgotten(self, broker: MockBroker, parts: Parts) -> None:
        for topic in ("s", "t", "u"):
            parts.routes.get(topic)
        broker.on(ROUTE, lambda call: route(3, {"broker-a": "h:1"}) if call.ext("topic") == "t" else NO_ROUTE)
        parts.sender.refresh_routes(parts.soon)
        assert parts.routes.cached_topics() == ["t"]
        assert parts.routes.address("broker-a") == "h:1"


@pytest.mark.parametrize("how", ["sync", "async", "oneway"])
def test_queue_whose_broker_is_unknown_asks_for_the_route_once(broker: MockBroker, parts: Parts, how: str) -> None:
    broker.on(SEND, sent())
    request = SendRequest("g", b"x")
    if how == "oneway":
        parts.sender.send_oneway(QUEUE, request, parts.soon)
        broker.wait_for(lambda: bool(broker.seen(SEND)))
    else:
        assert (send_later if how == "async" else send_now)(parts, request).queue_offset == 7
    elsewhere = MessageQueue("t", "broker-b", 0)
    for _ in range(3):
        with pytest.raises(BrokerNotFound, match="broker-b"):
            parts.sender.send(elsewhere, request, parts.soon)
    assert len(broker.seen(ROUTE)) == 1
    future: Future[SendResult | RocketMQError] = Future()
    parts.sender.send_async(elsewhere, request, parts.soon, future.set_result)
    error = future.result(60)
    assert isinstance(error, BrokerNotFound)
    assert error.unsent, "nobody need look whether it is stored"


@pytest.mark.parametrize("conf", ["broker-a", "broker-a:many", "broker-a:4;broker-b"])
def test_an_order_conf_without_a_count_is_reported(broker: MockBroker, parts: Parts, conf: str) -> None:
    broker.on(ROUTE, route(1, {"broker-a": broker.address}, orderTopicConf=conf))
    with pytest.raises(RemoteProtocolError, match=f"the route has orderTopicConf '{conf}'; expected broker:queues"):
        parts.sender.publish_queues("t", parts.soon)


def test_vanished_host_does_not_delay_sends_to_other_brokers(broker: MockBroker, black_hole: str) -> None:
    parts = Parts(broker.address, connect_timeout_s=2.0)
    broker.on(ROUTE, route(1, {"broker-a": broker.address, "gone": black_hole}))
    broker.on(SEND, sent())
    parts.routes.get("t")
    arrived: list[tuple[str, object]] = []
    changed = threading.Condition()

    def done(name: str) -> Callable[[SendResult | RocketMQError], None]:
        def note(outcome: SendResult | RocketMQError) -> None:
            with changed:
                arrived.append((name, type(outcome)))
                changed.notify_all()

        return note

    for name in ("gone 1", "gone 2", "broker-a 1", "broker-a 2"):
        queue = MessageQueue("t", name.split()[0], 0)
        parts.sender.send_async(queue, SendRequest("g", name.encode()), parts.soon, done(name))
    with changed:
        assert changed.wait_for(lambda: len(arrived) == 4, 30)
    parts.close()
    assert arrived == [
        ("broker-a 1", SendResult),
        ("broker-a 2", SendResult),
        ("gone 1", CallTimeout),
        ("gone 2", CallTimeout),
    ]
    assert [bytes(command.body) for command in broker.seen(SEND)] == [b"broker-a 1", b"broker-a 2"]


def test_thread_that_cannot_be_started_is_an_outcome(
    broker: MockBroker, parts: Parts, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts.routes.get("t")
    monkeypatch.setattr(threading.Thread, "start", no_threads)
    outcomes: list[object] = []
    parts.sender.send_async(MessageQueue("t", "elsewhere", 0), SendRequest("g", b"x"), parts.soon, outcomes.append)
    assert "can't start new thread" in str(outcomes)
    assert not parts.sender._executor.has_work("elsewhere")


def test_connection_whose_thread_cannot_be_started_is_an_outcome(
    broker: MockBroker, parts: Parts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another thread connects, and must not keep the failure to itself: nothing else would end the send."""
    parts.routes.get("t")
    slot, outcome = parts.pool._slots[broker.address], Future[object]()
    slot.connection, known = None, slot.connection
    no_more_threads(monkeypatch, "rocketmq-127")
    parts.sender.send_async(QUEUE, SendRequest("g", b"x"), parts.soon, outcome.set_result)
    assert isinstance(outcome.result(60), ConnectionLost)
    slot.connection = known


def no_threads(thread: threading.Thread) -> None:
    raise RuntimeError("can't start new thread")


def test_sends_use_known_address_when_name_server_lost_the_route(broker: MockBroker, parts: Parts) -> None:
    broker.on(SEND, sent())
    parts.routes.get("t")
    broker.on(ROUTE, NO_ROUTE)
    parts.sender.refresh_routes(parts.soon)
    assert parts.sender.send(QUEUE, SendRequest("g", b"x"), parts.soon).queue_offset == 7
    assert parts.routes.masters() == {}
    broker.on(ROUTE, route(2, {"broker-a": "127.0.0.1:1"}))
    parts.sender.publish_queues("t", parts.soon)
    assert parts.routes.address("broker-a") == "127.0.0.1:1"


def test_an_old_route_serves_while_no_name_server_answers(broker: MockBroker) -> None:
    parts = Parts(broker.address)
    parts.routes.route_max_age_s = 0.0
    known = parts.sender.publish_queues("t", parts.soon)
    broker.refuse_connections()
    broker.drop()
    assert parts.sender.publish_queues("t", parts.soon) == known
    assert parts.sender.all_queues("t", parts.soon) == sorted(known)
    with pytest.raises(ConnectionLost):
        parts.sender.publish_queues("t", parts.soon, refresh=True)
    with pytest.raises(ConnectionLost):
        parts.sender.publish_queues("u", parts.soon)
    parts.pool.close()


def test_topic_without_a_master_is_not_one_without_permission(broker: MockBroker, parts: Parts) -> None:
    broker.on(ROUTE, route(2, {"broker-a": ""}))
    with pytest.raises(BrokerNotFound, match="no broker of the topic has a master now"):
        parts.sender.publish_queues("t", parts.soon)
    broker.on(ROUTE, route(2, {"broker-a": broker.address}, perm=4))
    with pytest.raises(RouteNotFound, match="no write permission"):
        parts.sender.publish_queues("t", parts.soon, refresh=True)


def test_an_expired_deadline_does_not_blame_the_name_server(broker: MockBroker, parts: Parts) -> None:
    broker.on(ROUTE, mb.never)
    with pytest.raises(CallTimeout, match="no name server answered in time") as e:
        parts.routes.get("t", 0.0, parts.soon.within(0.05))
    assert "nameServer" not in str(e.value)
    assert e.value.remedy == "Allow more time, or check that the name server runs and has this address"


def test_time_over_is_reported(broker: MockBroker) -> None:
    parts = Parts(broker.address)
    broker.on(SEND, mb.never)
    parts.routes.get("t")
    with pytest.raises(CallTimeout):
        parts.sender.send(QUEUE, SendRequest("g", b"x"), parts.soon.within(0.05))
    parts.pool.close()


class TestRealBroker:
    def test_messages_are_stored(self, real: Parts, topic: str) -> None:
        queue = real.sender.publish_queues(topic, real.soon)[3]
        single = real.sender.send(queue, SendRequest("g", b"one", "KEYS\x01k\x02UNIQ_KEY\x01u1\x02"), real.soon)
        assert (single.status, single.queue, single.queue_offset) == (SendStatus.SEND_OK, queue, 0)
        assert single.transaction_id == "u1"
        body = encode_batch([BatchItem(b"two", "UNIQ_KEY\x01u2\x02"), BatchItem(b"three", "UNIQ_KEY\x01u3\x02")])
        batch = real.sender.send(queue, SendRequest("g", body, batch=True), real.soon)
        assert (batch.queue_offset, len(str(batch.offset_msg_id).split(","))) == (1, 2)
        mb.eventually(lambda: real.offset_reader.max_offsets([queue], real.soon)[queue] == 3)

    def test_delayed_messages_have_no_offset_of_their_own(self, real: Parts, topic: str) -> None:
        queue = real.sender.publish_queues(topic, real.soon)[0]
        assert real.sender.send(queue, SendRequest("g", b"x", "DELAY\x0118\x02"), real.soon).queue_offset is None

    def test_what_the_broker_refuses(self, real: Parts, topic: str) -> None:
        queue = real.sender.publish_queues(topic, real.soon)[0]
        with pytest.raises(MessageIllegal):
            real.sender.send(queue, SendRequest("g", bytes(4 << 20) + b"x"), real.soon)
        with pytest.raises(RocketMQError, match="queueId"):
            real.sender.send(MessageQueue(topic, queue.broker_name, 99), SendRequest("g", b"x"), real.soon)

    def test_through_a_mapped_address_and_a_network_that_breaks(
        self, broker_cluster: LocalBroker, real: Parts, topic: str, make_proxy: Callable[[str], FaultyProxy]
    ) -> None:
        queue = real.sender.publish_queues(topic, real.soon)[0]
        advertised = real.routes.address(queue.broker_name)
        proxy = make_proxy(advertised)
        mapped = Parts(broker_cluster.name_server, address_map={advertised: proxy.address})
        mapped.routes.get(topic)
        request = SendRequest("g", b"x")
        assert mapped.sender.send(queue, request, mapped.soon).queue_offset == 0
        assert proxy.forwarded > 0
        proxy.black_hole()
        with pytest.raises(CallTimeout):
            mapped.sender.send(queue, request, mapped.soon.within(0.1))
        proxy.heal()
        proxy.cut(reset=True)
        mb.eventually(lambda: self.arrives(mapped, queue, request))
        mapped.pool.close()

    def arrives(self, parts: Parts, queue: MessageQueue, request: SendRequest) -> bool:
        try:
            return parts.sender.send(queue, request, parts.soon).status is SendStatus.SEND_OK
        except ConnectionLost:
            return False


def test_whether_brokers_know_timers_and_queues_to_read(real: Parts, broker_cluster: LocalBroker, topic: str) -> None:
    broker_cluster.admin.create_topic(topic, read_queues=8, write_queues=3)
    assert len(real.sender.publish_queues(topic, real.soon)) == 3
    assert real.sender.max_timer_delays_ms(topic, broker_cluster.brokers, real.soon) == {
        broker_cluster.brokers[0]: 259_200_000
    }
    assert [queue.queue_id for queue in real.sender.all_queues(topic, real.soon)] == list(range(8))
