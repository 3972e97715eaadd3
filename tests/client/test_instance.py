"""Who belongs to which group here: one heartbeat for all, and what brokers ask, handed to whom it concerns."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from rocketmq_spark.base.clock import Deadline
from rocketmq_spark.base.codes import Flag, Request, Response, SysFlag
from rocketmq_spark.client import instance as instance_module
from rocketmq_spark.client.instance import ClientInstance, MemberRegistry, RegisteredMember
from rocketmq_spark.errors import LocalProtocolError
from rocketmq_spark.localbroker import LocalBroker
from rocketmq_spark.remoting.connection import ServerRequest
from rocketmq_spark.wire.bodies import GroupMembership
from rocketmq_spark.wire.compression import compress
from rocketmq_spark.wire.header import Command
from rocketmq_spark.wire.names import Scope
from rocketmq_spark.wire.properties import parse_subscription
from tests.client.conftest import Parts
from tests.fakes.timer import ManualTimer, Time
from tests.harness import peak_bytes, store
from tests.helpers import RAISED, raising, waits_in
from tests.mockbroker import WAIT_S, Held, MockBroker, eventually, never, ok, ping, refuse, route

ROUTE = Request.GET_ROUTEINFO_BY_TOPIC


@pytest.fixture
def broker() -> Iterator[MockBroker]:
    script = {Request.HEART_BEAT: ok(), Request.UNREGISTER_CLIENT: ok()}
    with MockBroker(script) as one:
        one.on(ROUTE, route(2, {"broker-a": one.address}))
        yield one


def beats(broker: MockBroker) -> list[dict[str, Any]]:
    return [json.loads(bytes(command.body)) for command in broker.seen(Request.HEART_BEAT)]


def left(broker: MockBroker) -> list[dict[str, str]]:
    return [command.ext for command in broker.seen(Request.UNREGISTER_CLIENT)]


def consumer(group: str = "cg", asked: Any = None, subscription: str = "a || b") -> RegisteredMember:
    """As a consumer will join."""

    def membership() -> GroupMembership:
        topics = {"t": parse_subscription(subscription), f"%RETRY%{group}": parse_subscription("*")}
        return GroupMembership(group, topics, versions_ms=dict.fromkeys(topics, 7))

    return RegisteredMember(group, request_handler=asked, membership=membership)


class Inbox:
    """A group's worker: what it was asked, by whom, on which thread; it works when it may."""

    def __init__(self, reply: Command | None = None) -> None:
        self.asked: list[tuple[str, int, str]] = []
        self.may_work = threading.Event()
        self.may_work.set()
        self._reply = reply

    def __call__(self, address: str, command: Command) -> Command | None:
        assert self.may_work.wait(WAIT_S)
        self.asked.append((address, command.code, threading.current_thread().name))
        return self._reply


# --- heartbeats


def test_one_heartbeat_has_all_groups_of_producers_and_consumers(broker: MockBroker, parts: Parts) -> None:
    parts.routes.get("t")
    for member in (RegisteredMember("pg2"), RegisteredMember("pg1"), RegisteredMember("pg1"), consumer()):
        parts.instance.join(member)
    parts.instance.heartbeat(parts.soon)
    (beat,) = beats(broker)
    assert beat["clientID"] == parts.instance.client_id
    assert beat["producerDataSet"] == [{"groupName": "pg1"}, {"groupName": "pg2"}]
    (member,) = beat["consumerDataSet"]
    assert (member["groupName"], member["consumeType"], member["messageModel"]) == (
        "cg",
        "CONSUME_PASSIVELY",
        "CLUSTERING",
    )
    of_t, of_retry = member["subscriptionDataSet"]
    assert of_t == {
        "classFilterMode": False, "codeSet": [97, 98], "expressionType": "TAG", "subString": "a || b",
        "subVersion": 7, "tagsSet": ["a", "b"], "topic": "t",
    }  # fmt: skip
    assert (of_retry["topic"], of_retry["subString"]) == ("%RETRY%cg", "*")


def test_names_are_those_of_the_namespace(broker: MockBroker) -> None:
    tenant = Parts(broker.address, scope=Scope("ns"))
    tenant.routes.get("t")
    inbox, member = Inbox(), consumer(asked=None)
    tenant.instance.join(member)
    asked = consumer("other", inbox)
    tenant.instance.join(asked)
    tenant.instance.heartbeat(tenant.soon)
    first = beats(broker)[0]["consumerDataSet"][0]
    topics = [subscription["topic"] for subscription in first["subscriptionDataSet"]]
    assert (first["groupName"], topics) == ("ns%cg", ["ns%t", "%RETRY%ns%cg"])
    broker.ask(Command(Request.NOTIFY_CONSUMER_IDS_CHANGED, {"consumerGroup": "ns%other"}, flag=Flag.ONEWAY))
    broker.ask(Command(Request.GET_CONSUMER_RUNNING_INFO, {"consumerGroup": "ns%cg"}))
    broker.wait_for(lambda: bool(broker.replies))
    eventually(lambda: bool(inbox.asked))  # on the group's own thread
    assert [code for _, code, _ in inbox.asked] == [Request.NOTIFY_CONSUMER_IDS_CHANGED]
    tenant.instance.leave(member, tenant.soon)
    assert left(broker)[0]["consumerGroup"] == "ns%cg"
    tenant.instance.close()
    tenant.pool.close()


def test_slaves_get_heartbeats_of_consumers_but_not_of_producers(broker: MockBroker, parts: Parts) -> None:
    data = {"brokerName": "a", "cluster": "c", "brokerAddrs": {"0": broker.address, "1": broker.address}}
    queues = {"brokerName": "a", "readQueueNums": 1, "writeQueueNums": 1, "perm": 6}
    broker.on(ROUTE, ok(json.dumps({"brokerDatas": [data], "queueDatas": [queues]}).encode()))
    parts.routes.get("t")
    producer, member = RegisteredMember("pg", 0.0), consumer()
    parts.instance.join(producer)
    parts.instance.heartbeat(parts.soon)
    assert len(beats(broker)) == 1
    parts.instance.join(member)
    parts.instance.heartbeat(parts.soon)
    assert len(beats(broker)) == 3
    parts.instance.leave(producer, parts.soon)
    assert [ext["producerGroup"] for ext in left(broker)] == ["pg"]
    parts.instance.leave(member, parts.soon)
    assert [ext.get("consumerGroup") for ext in left(broker)] == [None, "cg", "cg"]


def test_the_last_of_a_group_tells_that_it_leaves(broker: MockBroker, parts: Parts) -> None:
    parts.routes.get("t")
    first, second = RegisteredMember("g"), RegisteredMember("g")
    parts.instance.join(first)
    parts.instance.join(second)
    parts.instance.leave(first, parts.soon)
    assert left(broker) == []
    parts.instance.leave(second, parts.soon)
    assert left(broker) == [
        {"clientID": parts.instance.client_id, "producerGroup": "g", "bname": "broker-a"},
    ]
    parts.instance.heartbeat(parts.soon)
    assert beats(broker) == []


def test_who_leaves_waits_for_a_heartbeat_that_is_under_way(broker: MockBroker, parts: Parts) -> None:
    """Brokers that handle it later would have the member again, and its queues would belong to nobody for two minutes."""
    parts.routes.get("t")
    member, held, early = consumer(), Held(), list[bool]()
    parts.instance.join(member)
    answered = threading.Event()
    broker.on(Request.HEART_BEAT, held)
    broker.on(Request.UNREGISTER_CLIENT, lambda call: early.append(not answered.is_set()) or ok())
    beat = threading.Thread(target=parts.instance.heartbeat, args=(parts.soon,))
    beat.start()
    (call,) = held.wait(1)
    leaves = threading.Thread(target=parts.instance.leave, args=(member, parts.soon))
    leaves.start()
    waits_in(leaves, ClientInstance.leave)
    parts.rpc_client.invoke(broker.address, ping(), parts.soon)  # behind what would have been said by now
    answered.set()
    call.answer(ok())
    for thread in (beat, leaves):
        thread.join(WAIT_S)
    assert early == [False]


def test_consumer_group_has_one_member_here(parts: Parts) -> None:
    first = consumer()
    parts.instance.join(first)
    parts.instance.join(RegisteredMember("cg", 0.0))  # producers of that name are another group
    with pytest.raises(LocalProtocolError, match="consumer group 'cg' has a member in this process already"):
        parts.instance.join(consumer())
    parts.instance.leave(first, parts.soon)
    again = consumer()
    parts.instance.join(again)
    parts.instance.leave(again, parts.soon)


def test_first_heartbeat_is_soon_then_one_every_30_s_for_all(parts: Parts, monkeypatch: pytest.MonkeyPatch) -> None:
    clock, told = Time(), list[float]()
    instance = ClientInstance(MemberRegistry(), parts.rpc_client, parts.routes, "me", lambda name: ManualTimer(clock))
    monkeypatch.setattr(instance, "heartbeat", lambda deadline: told.append(round(clock.now - 1000, 3)))
    silent, first, second, quick = (
        RegisteredMember("a", 0.0),
        RegisteredMember("a", 30.0),
        RegisteredMember("b", 30.0),
        RegisteredMember("c", 2.0),
    )
    instance.join(silent)
    clock.advance(100)
    assert told == []
    instance.join(first)
    clock.advance(65)
    assert told == [101.0, 131.0, 161.0]
    for member in (second, quick):  # a new one is told soon, and once
        instance.join(member)
    clock.advance(4)
    assert told[3:] == [166.0, 168.0]
    clock.advance(30)  # past the one that was due before they came
    assert told[5:] == [170.0 + 2 * n for n in range(15)]
    for member in (quick, second, first):
        instance.leave(member, Deadline.after(1))
    told.clear()
    clock.advance(100)
    assert told == []
    instance.join(first)
    clock.advance(1)
    assert len(told) == 1
    instance.close()


def test_what_fails_stops_no_heartbeat(parts: Parts, broker: MockBroker, caplog: pytest.LogCaptureFixture) -> None:
    clock, tries = Time(), list[None]()

    def membership() -> GroupMembership:
        tries.append(None)
        raise LocalProtocolError("no subscription")

    caplog.set_level("INFO")
    instance = ClientInstance(MemberRegistry(), parts.rpc_client, parts.routes, "me", lambda name: ManualTimer(clock))
    instance.join(RegisteredMember("g", membership=membership))
    clock.advance(65)
    assert len(tries) == 3
    assert "no heartbeat was sent" in caplog.text


def test_heartbeats_reach_every_master_although_one_fails(
    broker: MockBroker, parts: Parts, caplog: pytest.LogCaptureFixture
) -> None:
    broker.on(ROUTE, route(1, {"a": "127.0.0.1:1", "b": broker.address, "c": ""}))
    broker.on(Request.UNREGISTER_CLIENT, refuse(3, "not supported"))
    parts.routes.get("t")
    caplog.set_level("INFO")
    leave = parts.sender.join("g", 0.0)
    parts.instance.heartbeat(parts.soon)
    leave(parts.soon)
    (beat,) = broker.seen(Request.HEART_BEAT)
    assert b'"groupName":"g"' in bytes(beat.body)
    assert left(broker)[0] == {"clientID": parts.sender.client_id, "producerGroup": "g", "bname": "b"}
    assert "127.0.0.1:1" in caplog.text


def test_a_master_that_hangs_costs_one_request_s_time(broker: MockBroker) -> None:
    parts = Parts(broker.address)
    broker.on(Request.HEART_BEAT, never)
    parts.routes.get("t")
    parts.sender.join("g", 0.0)
    object.__setattr__(parts.rpc_client, "request_timeout_s", 0.05)
    deadline = parts.soon
    parts.instance.heartbeat(deadline)
    assert not deadline.expired
    assert broker.seen(Request.HEART_BEAT), "it was not asked at all"
    parts.pool.close()


def test_a_master_that_hangs_takes_no_time_from_the_others(
    broker: MockBroker, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "rocketmq_spark.client")
    with MockBroker({Request.HEART_BEAT: never, Request.UNREGISTER_CLIENT: never}) as hangs, MockBroker() as server:
        server.on(ROUTE, route(1, {"a": hangs.address, "b": broker.address}))
        parts = Parts(server.address, request_timeout_s=2.0)
        parts.routes.get("t")
        leave = parts.sender.join("g", 0.0)
        parts.instance.heartbeat(Deadline.after(2.0))
        leave(Deadline.after(2.0))
        assert (len(hangs.seen(Request.HEART_BEAT)), len(beats(broker)), len(left(broker))) == (1, 1, 1)
        assert caplog.text.count("failed") == 2
        assert broker.address not in caplog.text
        parts.close()


def test_heartbeats_and_leaving(real: Parts, topic: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("DEBUG", "rocketmq_spark.client")
    real.sender.publish_queues(topic, real.soon)
    leave = real.sender.join("group-1", 0.0)
    real.instance.heartbeat(real.soon)
    leave(real.soon)
    assert caplog.text == ""


# --- what brokers ask


ASKED = [
    (Request.NOTIFY_CONSUMER_IDS_CHANGED, "consumerGroup", Flag.ONEWAY),
    (Request.RESET_CONSUMER_CLIENT_OFFSET, "group", Flag.ONEWAY),
    (Request.GET_CONSUMER_RUNNING_INFO, "consumerGroup", 0),
    (Request.CONSUME_MESSAGE_DIRECTLY, "consumerGroup", 0),
]


@pytest.mark.parametrize(("code", "field", "flag"), ASKED, ids=lambda value: str(value))
def test_consumer_requests_run_off_the_reader_thread(
    broker: MockBroker, parts: Parts, code: Request, field: str, flag: int
) -> None:
    parts.routes.get("t")
    inbox, busy = Inbox(ok(b"{}", a=1)), Inbox()
    busy.may_work.clear()
    for member in (consumer("cg", inbox), consumer("busy", busy)):
        parts.instance.join(member)
    broker.ask(Command(code, {field: "busy"}, flag=flag, opaque=4))  # holds up neither answers nor other groups
    broker.ask(Command(code, {field: "cg"}, flag=flag, opaque=5))
    if not flag:
        broker.wait_for(lambda: bool(broker.replies))
        (reply,) = broker.replies
        assert (reply.code, reply.opaque, reply.ext, bytes(reply.body)) == (0, 5, {"a": "1"}, b"{}")
    assert parts.routes.get("t", 0.0)
    eventually(lambda: bool(inbox.asked))
    (asked,) = inbox.asked
    assert asked[:2] == (broker.address, code)
    assert asked[2] != f"rocketmq-{broker.address}", "the reader's thread"
    busy.may_work.set()


def test_direct_consume_that_hangs_blocks_no_other_request(broker: MockBroker, parts: Parts) -> None:
    """A listener may hang in it."""
    parts.routes.get("t")
    inbox = Inbox()
    hangs = threading.Event()

    def asked(address: str, command: Command) -> Command | None:
        return (
            inbox(address, command) if command.code != Request.CONSUME_MESSAGE_DIRECTLY else hangs.wait(WAIT_S) and ok()
        )

    parts.instance.join(consumer("cg", asked))
    broker.ask(Command(Request.CONSUME_MESSAGE_DIRECTLY, {"consumerGroup": "cg"}, opaque=3))
    codes = [Request.NOTIFY_CONSUMER_IDS_CHANGED, Request.RESET_CONSUMER_CLIENT_OFFSET]
    for code, field in zip(codes, ("consumerGroup", "group"), strict=True):
        broker.ask(Command(code, {field: "cg"}, flag=Flag.ONEWAY))
    eventually(lambda: len(inbox.asked) == 2)
    assert ([code for _, code, _ in inbox.asked], broker.replies) == (codes, [])
    hangs.set()
    broker.wait_for(lambda: [reply.opaque for reply in broker.replies] == [3])


def test_who_asks_is_told_by_the_address_that_brokers_advertise(broker: MockBroker) -> None:
    parts = Parts(broker.address, address_map={"10.0.0.1:10911": broker.address})
    broker.on(ROUTE, route(1, {"broker-a": "10.0.0.1:10911"}))
    broker.on(Request.GET_MAX_OFFSET, ok(offset=0))
    parts.routes.get("t")
    assert parts.sender.probe("broker-a", "t", parts.soon)
    inbox = Inbox(ok())
    parts.instance.join(consumer("cg", inbox))
    broker.ask(Command(Request.GET_CONSUMER_RUNNING_INFO, {"consumerGroup": "cg"}))
    broker.wait_for(lambda: len(broker.replies) == 2)  # to the name server that it is, too
    assert {address for address, _, _ in inbox.asked} == {broker.address, "10.0.0.1:10911"}
    parts.instance.close()
    parts.pool.close()


def half_message(group: str) -> bytes:
    return bytes(store(topic="t", body=b"x", properties=f"PGROUP\x01{group}\x02TRAN_MSG\x01true\x02"))


def test_a_producer_is_asked_about_its_transactions(broker: MockBroker, parts: Parts) -> None:
    parts.routes.get("t")
    inbox = Inbox()
    parts.instance.join(RegisteredMember("pg"))
    parts.instance.join(RegisteredMember("pg", request_handler=inbox))
    for group in ("other", "pg"):
        fields = {"tranStateTableOffset": "1", "commitLogOffset": "2"}
        broker.ask(Command(Request.CHECK_TRANSACTION_STATE, fields, half_message(group), flag=Flag.ONEWAY))
    eventually(lambda: bool(inbox.asked))
    assert [asked[:2] for asked in inbox.asked] == [(broker.address, Request.CHECK_TRANSACTION_STATE)]


def test_a_check_is_rejected_unread_where_no_producer_decides(
    broker: MockBroker, parts: Parts, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts.routes.get("t")
    for member in (RegisteredMember("pg"), consumer("cg", Inbox(ok()))):
        parts.instance.join(member)
    monkeypatch.setattr(instance_module, "decode_leniently", lambda *args, **how: pytest.fail("the body is decoded"))
    broker.ask(Command(Request.CHECK_TRANSACTION_STATE, {}, half_message("pg")))
    broker.wait_for(lambda: bool(broker.replies))
    assert broker.replies[0].code == Response.REQUEST_CODE_NOT_SUPPORTED


def test_the_group_of_a_check_is_read_without_opening_its_body(broker: MockBroker, parts: Parts) -> None:
    packed = compress(bytes(65 << 20))  # more than any body may have
    text = "PGROUP\x01other\x02TRAN_MSG\x01true\x02"
    bomb = bytes(store(topic="t", body=packed, properties=text, sys_flag=int(SysFlag.COMPRESSED | SysFlag.ZLIB)))
    parts.routes.get("t")
    parts.instance.join(RegisteredMember("pg", request_handler=Inbox(ok())))
    assert (
        peak_bytes(lambda: parts.groups._dispatch_check(ServerRequest("a:1", Command(39, {}, bomb), print, None)))
        < 4 << 20
    )


def test_requests_wait_within_a_budget_of_bytes_and_leave_it(
    broker: MockBroker, parts: Parts, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    waiting = parts.pool.connect_options.waiting_budget
    monkeypatch.setattr(waiting, "limit", 200_000)
    inbox = Inbox(ok())
    inbox.may_work.clear()
    parts.routes.get("t")
    parts.instance.join(consumer("cg", inbox))
    sent = 20
    for _ in range(sent):
        broker.ask(Command(Request.GET_CONSUMER_RUNNING_INFO, {"consumerGroup": "cg"}, bytes(20_000)))
    broker.wait_for(lambda: bool(broker.replies))
    eventually(lambda: len(broker.replies) == sent - 4)
    assert {reply.code for reply in broker.replies} == {Response.REQUEST_CODE_NOT_SUPPORTED}
    assert waiting.used_bytes <= 100_000
    inbox.may_work.set()
    eventually(lambda: len(broker.replies) == sent)
    eventually(lambda: waiting.used_bytes == 0)
    assert caplog.text.count("is rejected: requests of") == 1


@pytest.mark.parametrize("flag", [0, Flag.ONEWAY])
@pytest.mark.parametrize("group", ["cg", "raising", "deaf", "nobody"])
def test_every_request_leaves_the_budget(broker: MockBroker, parts: Parts, group: str, flag: int) -> None:
    parts.routes.get("t")
    parts.instance.join(RegisteredMember("pg", request_handler=raising(ValueError("no"))))
    for member in (consumer("cg", Inbox(ok())), consumer("raising", raising(ValueError("no"))), consumer("deaf")):
        parts.instance.join(member)
    parts.replies.expect("ID", lambda reply: None)
    for code, field in ((307, "consumerGroup"), (309, "consumerGroup"), (39, "x"), (326, "x"), (9999, "x")):
        broker.ask(Command(code, {field: group}, half_message("pg"), flag=flag))
    for body in (half_message("pg"), half_message("pg") * 3, b"\x00" * 50, b""):
        broker.ask(Command(39, {}, body, flag=flag))
    parts.routes.get("t", 0.0)
    eventually(lambda: parts.pool.connect_options.waiting_budget.used_bytes == 0)


@pytest.mark.parametrize("body", [b"", half_message("other"), b"garbage"], ids=["none", "another group's", "garbage"])
def test_a_question_about_nobody_s_transaction_is_refused(broker: MockBroker, parts: Parts, body: bytes) -> None:
    parts.routes.get("t")
    parts.instance.join(RegisteredMember("pg", request_handler=Inbox(ok())))
    broker.ask(Command(Request.CHECK_TRANSACTION_STATE, {}, body))
    broker.wait_for(lambda: bool(broker.replies))
    assert broker.replies[0].code == Response.REQUEST_CODE_NOT_SUPPORTED


def test_what_concerns_nobody_here_is_refused(broker: MockBroker, parts: Parts) -> None:
    parts.routes.get("t")
    parts.instance.join(consumer("deaf"))
    parts.instance.join(consumer("silent", Inbox(None)))
    for group in ("cg", "deaf", "silent"):
        broker.ask(Command(Request.GET_CONSUMER_RUNNING_INFO, {"consumerGroup": group}))
    broker.ask(Command(Request.GET_CONSUMER_STATUS_FROM_CLIENT, {"group": "silent"}))
    broker.wait_for(lambda: len(broker.replies) == 4)
    assert {reply.code for reply in broker.replies} == {Response.REQUEST_CODE_NOT_SUPPORTED}


@pytest.mark.parametrize("error", RAISED, ids=lambda error: type(error).__name__)
def test_a_worker_that_fails_says_so_and_is_asked_again(
    error: BaseException, broker: MockBroker, parts: Parts, caplog: pytest.LogCaptureFixture
) -> None:
    parts.routes.get("t")
    parts.instance.join(consumer("cg", raising(error)))
    for turn in (1, 2):
        broker.ask(Command(Request.CONSUME_MESSAGE_DIRECTLY, {"consumerGroup": "cg"}))
        broker.wait_for(lambda turn=turn: len(broker.replies) == turn)  # type: ignore[misc]
    told = {(reply.code, reply.remark) for reply in broker.replies}
    assert told == {(Response.SYSTEM_ERROR, f"{type(error).__name__}: mine")}
    assert caplog.text.count("group cg could not handle request 309") == 2


def test_an_answer_after_the_connection_went_is_nothing(broker: MockBroker, parts: Parts) -> None:
    inbox = Inbox(ok())
    inbox.may_work.clear()
    parts.routes.get("t")
    parts.instance.join(consumer("cg", inbox))
    broker.ask(Command(Request.GET_CONSUMER_RUNNING_INFO, {"consumerGroup": "cg"}))
    parts.routes.get("t", 0.0)  # the question came before this answer
    parts.pool.close()
    inbox.may_work.set()
    eventually(lambda: bool(inbox.asked))
    assert broker.replies == []


def test_producer_leaves_group_whose_name_a_consumer_shares(broker: MockBroker, parts: Parts) -> None:
    parts.routes.get("t")
    producer = RegisteredMember("cg", 0.0)
    for member in (producer, consumer("cg")):
        parts.instance.join(member)
    parts.instance.leave(producer, parts.soon)
    assert [ext["producerGroup"] for ext in left(broker)] == ["cg"]


def test_a_broker_knows_both_kinds_of_groups(broker_cluster: LocalBroker, real: Parts, topic: str) -> None:
    group = f"cg-{topic}"
    real.sender.publish_queues(topic, real.soon)
    inbox = Inbox()
    member = consumer(group, inbox)
    broker_cluster.admin.create_group(group)
    real.instance.join(RegisteredMember("pg", 0.0))
    real.instance.join(member)
    real.instance.heartbeat(real.soon)
    assert real.committer.members(group, "broker-a", real.soon) == [real.instance.client_id]
    # A broker tells also those who caused the change.
    eventually(lambda: bool(inbox.asked))
    assert inbox.asked[0][:2] == (broker_cluster.address("broker-a"), Request.NOTIFY_CONSUMER_IDS_CHANGED)
    real.instance.leave(member, real.soon)
    assert real.committer.members(group, "broker-a", real.soon) == []
    real.instance.close()


QUESTIONS = [
    Command(Request.CHECK_TRANSACTION_STATE, {"tranStateTableOffset": "1", "commitLogOffset": "2"}, half_message("pg")),
    Command(Request.NOTIFY_CONSUMER_IDS_CHANGED, {"consumerGroup": "cg"}),
    Command(Request.GET_CONSUMER_RUNNING_INFO, {"consumerGroup": "cg"}),
    Command(Request.CONSUME_MESSAGE_DIRECTLY, {"consumerGroup": "cg"}),
    Command(Request.PUSH_REPLY_MESSAGE_TO_CLIENT, {"topic": "t"}),
]


class TestWhoMayAsk:
    @pytest.fixture
    def asker(self) -> Iterator[MockBroker]:
        """A name server that also asks; routes of its topic ``t`` lead to ``10.0.0.1:10911``."""
        with MockBroker({ROUTE: route(1, {"broker-a": "10.0.0.1:10911"})}) as one:
            yield one

    def answers(self, asker: MockBroker, **how: Any) -> tuple[list[int], list[int]]:
        """The codes of questions that reached a member, and those of the replies, after the route of ``t`` is known."""
        parts, taken = Parts(asker.address, **how), list[int]()

        def takes(request: ServerRequest, aside: object) -> bool:
            taken.append(request.command.code)
            request.answer(Command(Response.SUCCESS))
            return True

        parts.groups._on_reply = takes
        inbox = Inbox(ok())
        parts.instance.join(consumer("cg", inbox))
        parts.instance.join(RegisteredMember("pg", request_handler=inbox))
        parts.routes.get("t")
        for opaque, question in enumerate(QUESTIONS):
            asker.ask(replace(question, opaque=opaque))
        asker.wait_for(lambda: len(asker.replies) == len(QUESTIONS))
        parts.close()
        return sorted([*taken, *(code for _, code, _ in inbox.asked)]), [reply.code for reply in asker.replies]

    def test_a_server_that_is_only_a_name_server_may_not(self, asker: MockBroker) -> None:
        assert self.answers(asker) == ([], [Response.REQUEST_CODE_NOT_SUPPORTED] * len(QUESTIONS))

    @pytest.mark.parametrize("mapped", ["addressMap", "nameServer", "itself"])
    def test_a_proxy_at_the_address_of_the_name_server_may(self, asker: MockBroker, mapped: str) -> None:
        how: dict[str, Any] = {}
        if mapped == "addressMap":
            how["address_map"] = {"10.0.0.1:10911": asker.address}
        elif mapped == "nameServer":
            how["at_name_server"] = True
        else:
            asker.on(ROUTE, route(1, {"broker-a": asker.address}))
        taken, _ = self.answers(asker, **how)
        assert taken == sorted(question.code for question in QUESTIONS)
