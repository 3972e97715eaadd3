"""Half messages on the wire: how they are sent and decided, who hears of their producer, and what a broker's question does."""

from __future__ import annotations

import functools
import json
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest

from rocketmq_spark.base import copies, process
from rocketmq_spark.base.codes import Flag, Property, Request, Response, SysFlag
from rocketmq_spark.errors import BrokerError, BrokerNotFound, ConnectionLost
from rocketmq_spark.model import MessageQueue, ReceivedMessage, SendRequest
from rocketmq_spark.model.send import HalfPlace, TransactionState, content_digest, stored_content_digest
from rocketmq_spark.wire.header import Command
from rocketmq_spark.wire.names import Scope
from rocketmq_spark.wire.properties import decode_properties
from tests.client.conftest import Parts
from tests.harness import store
from tests.helpers import no_more_threads
from tests.mockbroker import OF_PROXY, Held, MockBroker, eventually, never, ok, refuse, route

COMMIT, ROLLBACK, UNKNOWN = TransactionState.COMMIT, TransactionState.ROLLBACK, TransactionState.UNKNOWN
PLACE = HalfPlace(
    "t", "broker-a", "pg", "ID", "TX", 5, 1234, content_digest("t", b"order 7", {"PGROUP": "ns%pg", "TRAN_MSG": "true"})
)
SENT = {"msgId": "x", "queueId": "0", "queueOffset": "3"}


def test_a_long_id_of_another_client_is_not_kept_as_it_is() -> None:
    first, second = (PLACE._replace(msg_id="é" * 30_000 + end) for end in "ab")
    assert len(first.key) < 200
    assert first.key != second.key
    assert first.key != first._replace(msg_id=first.key.split()[0]).key
    assert PLACE.key.startswith("ID ")
    assert PLACE._replace(msg_id="\ud800" * 99).key


@pytest.fixture(autouse=True)
def nothing_asked_before() -> Iterator[None]:
    """All of them are about one id, of which a process remembers what was said, as soon as the thread that says it knows."""
    process.entries("copies").clear()
    yield
    eventually(lambda: not [one for one in threading.enumerate() if one.name.startswith("rocketmq-aside-")])


@pytest.fixture
def tenant(broker: MockBroker) -> Iterator[Parts]:
    made = Parts(broker.address, scope=Scope("ns"))
    broker.on(Request.END_TRANSACTION, ok())
    yield made
    made.close()


@pytest.mark.parametrize(("decision", "kind"), [(COMMIT, "8"), (ROLLBACK, "12")])
def test_a_decision_says_where_the_half_message_is(
    broker: MockBroker, tenant: Parts, decision: TransactionState, kind: str
) -> None:
    tenant.routes.get("t")
    assert tenant.sender.end_transaction(PLACE, decision, tenant.soon) is True
    (command,) = broker.seen(Request.END_TRANSACTION)
    assert not command.flag & Flag.ONEWAY
    assert command.ext == {
        "topic": "ns%t", "producerGroup": "ns%pg", "tranStateTableOffset": "5", "commitLogOffset": "1234",
        "commitOrRollback": kind, "fromTransactionCheck": "false", "msgId": "ID", "transactionId": "TX",
        "bname": "broker-a",
    }  # fmt: skip


def test_decision_error_tells_unsent_from_refused(broker: MockBroker, tenant: Parts) -> None:
    with pytest.raises(BrokerNotFound) as unknown:
        tenant.sender.end_transaction(PLACE, COMMIT, tenant.soon)
    assert unknown.value.unsent
    tenant.routes.get("t")
    broker.on(Request.END_TRANSACTION, refuse(Response.SYSTEM_ERROR, "The producer group wrong"))
    with pytest.raises(BrokerError, match="The producer group wrong") as wrong:
        tenant.sender.end_transaction(PLACE, COMMIT, tenant.soon)
    assert not wrong.value.unsent


def test_decision_for_a_broker_that_is_down_is_marked_unsent(broker: MockBroker, tenant: Parts) -> None:
    """So the half message stays undecided here, and the user may try again."""
    tenant.routes.get("t")
    broker.refuse_connections()
    broker.drop()
    eventually(lambda: not tenant.pool.is_connected(broker.address))
    with pytest.raises(ConnectionLost) as down:
        tenant.sender.end_transaction(PLACE, COMMIT, tenant.soon)
    assert down.value.unsent


def test_a_half_message_names_its_group_as_brokers_know_it(broker: MockBroker, tenant: Parts) -> None:
    broker.on(Request.SEND_MESSAGE_V2, ok(**SENT))
    tenant.routes.get("t")
    half = SendRequest("pg", b"x", "UNIQ_KEY\x01ID\x02TRAN_MSG\x01true\x02", int(SysFlag.TRANSACTION_PREPARED))
    tenant.sender.send(MessageQueue("t", "broker-a", 0), half, tenant.soon)
    tenant.sender.send(MessageQueue("t", "broker-a", 0), half._replace(sys_flag=0), tenant.soon)
    first, plain = (decode_properties(command.ext["i"]) for command in broker.seen(Request.SEND_MESSAGE_V2))
    assert first[Property.PRODUCER_GROUP] == "ns%pg"
    assert Property.PRODUCER_GROUP not in plain


def question(body: bytes, flag: int = Flag.ONEWAY) -> Command:
    """What broker-a asks; the offsets are those of the copy that it has written."""
    fields = {
        "topic": "RMQ_SYS_TRANS_HALF_TOPIC", "bname": "broker-a", "msgId": "ID", "transactionId": "TX",
        "offsetMsgId": "0", "tranStateTableOffset": "7", "commitLogOffset": "99",
    }  # fmt: skip
    return Command(Request.CHECK_TRANSACTION_STATE, fields, body, flag=flag)


HALF = store(topic="ns%t", body=b"order 7", properties="PGROUP\x01ns%pg\x02TRAN_MSG\x01true\x02UNIQ_KEY\x01ID\x02")


@pytest.mark.parametrize(("decision", "kind"), [(COMMIT, "8"), (ROLLBACK, "12"), (UNKNOWN, "0")])
def test_a_question_is_answered_by_a_request_about_the_copy(
    broker: MockBroker, tenant: Parts, decision: TransactionState, kind: str
) -> None:
    tenant.routes.get("t")
    asked: list[tuple[ReceivedMessage, HalfPlace]] = []

    def check(message: ReceivedMessage, place: HalfPlace) -> TransactionState:
        asked.append((message, place))
        return decision

    leave = tenant.sender.join("pg", 0, check)
    tenant.rpc_client.invoke_oneway(
        broker.address, Command(Request.GET_ROUTEINFO_BY_TOPIC, {"topic": "ns%t"}, flag=Flag.ONEWAY)
    )
    broker.ask(question(HALF))
    broker.wait_for(lambda: bool(broker.seen(Request.END_TRANSACTION)))
    ((message, place),) = asked
    assert (message.topic, message.body, message.msg_id) == ("t", b"order 7", "ID")
    assert place == HalfPlace("t", "broker-a", "pg", "ID", "TX", 7, 99, stored_content_digest(message))
    (command,) = broker.seen(Request.END_TRANSACTION)
    assert (command.ext["commitOrRollback"], command.ext["fromTransactionCheck"]) == (kind, "true")
    assert (command.ext["tranStateTableOffset"], command.ext["commitLogOffset"]) == ("7", "99")
    assert (command.ext["topic"], command.ext["producerGroup"]) == ("ns%t", "ns%pg")
    assert bool(command.flag & Flag.ONEWAY) is (decision is UNKNOWN), "a broker does not answer that"
    leave(tenant.soon)


def test_refused_check_answer_is_logged_and_next_check_handled(
    broker: MockBroker, tenant: Parts, caplog: pytest.LogCaptureFixture
) -> None:
    tenant.routes.get("t")
    broker.on(Request.END_TRANSACTION, refuse(Response.SYSTEM_ERROR, "The transaction state table offset wrong"))
    tenant.sender.join("pg", 0, lambda message, place: COMMIT)
    broker.ask(question(HALF))
    eventually(lambda: "COMMIT did not arrive" in caplog.text)
    broker.ask(question(HALF))
    broker.wait_for(lambda: len(broker.seen(Request.END_TRANSACTION)) == 2)


def test_refused_commit_is_committed_again_at_the_next_check(broker: MockBroker, tenant: Parts) -> None:
    """As what crosses a commit is rolled back: the message would be lost."""
    tenant.routes.get("t")
    broker.on(Request.END_TRANSACTION, [refuse(Response.SYSTEM_ERROR, "not now"), ok()])
    tenant.sender.join("pg", 0, lambda message, place: lambda: COMMIT)
    for count in (1, 2):
        broker.ask(question(HALF))
        broker.wait_for(lambda count=count: len(broker.seen(Request.END_TRANSACTION)) == count)  # type: ignore[misc]
        eventually(lambda: not copies_of(tenant)._newest_places)
    assert [c.ext["commitOrRollback"] for c in broker.seen(Request.END_TRANSACTION)] == ["8", "8"]


def test_commit_confirmed_only_by_a_proxy_is_resent_each_check(broker: MockBroker, tenant: Parts) -> None:
    """A Proxy answers with success, and does not forward the decision before the first check."""
    tenant.routes.get("t")
    broker.on(Request.END_TRANSACTION, ok(**OF_PROXY))
    assert tenant.sender.end_transaction(PLACE, COMMIT, tenant.soon) is False
    tenant.sender.join("pg", 0, lambda message, place: lambda: COMMIT)
    for count in (2, 3):
        broker.ask(question(HALF))
        broker.wait_for(lambda count=count: len(broker.seen(Request.END_TRANSACTION)) == count)  # type: ignore[misc]
        eventually(lambda: not copies_of(tenant)._newest_places)
    assert [c.ext["commitOrRollback"] for c in broker.seen(Request.END_TRANSACTION)] == ["8", "8", "8"]


def test_a_commit_over_a_connection_to_a_proxy_is_never_proved(broker: MockBroker, tenant: Parts) -> None:
    """What an earlier answer has shown holds for the connection."""
    tenant.routes.get("t")
    broker.on(Request.HEART_BEAT, ok(**OF_PROXY))
    tenant.rpc_client.request(broker.address, Command(Request.HEART_BEAT), tenant.soon)
    assert tenant.sender.end_transaction(PLACE, COMMIT, tenant.soon) is False


def test_the_answer_to_a_half_message_makes_no_broker_a_proxy(broker: MockBroker, tenant: Parts) -> None:
    tenant.routes.get("t")
    broker.on(Request.SEND_MESSAGE_V2, ok(**SENT, **OF_PROXY))
    half = SendRequest("pg", b"x", "UNIQ_KEY\x01ID\x02TRAN_MSG\x01true\x02", int(SysFlag.TRANSACTION_PREPARED))
    tenant.sender.send(MessageQueue("t", "broker-a", 0), half, tenant.soon)
    assert tenant.sender.end_transaction(PLACE, COMMIT, tenant.soon) is True


@pytest.mark.parametrize("asked", [False, True], ids=["by the program", "by an answer"])
def test_new_master_gets_a_commit_confirmed_by_the_old_one(broker: MockBroker, tenant: Parts, asked: bool) -> None:
    """It may lack the commit. To roll back what it asks about, as what crosses the commit, would lose the message."""
    tenant.routes.get("t")
    answers = iter([COMMIT] * asked + [ROLLBACK] * 9)
    tenant.sender.join("pg", 0, lambda message, place: next(answers))
    if asked:
        broker.ask(question(HALF))
        broker.wait_for(lambda: len(broker.seen(Request.END_TRANSACTION)) == 1)
    else:
        tenant.sender.end_transaction(PLACE, COMMIT, tenant.soon)
    broker.ask(question(HALF))
    broker.wait_for(lambda: len(broker.seen(Request.END_TRANSACTION)) == 2)
    with MockBroker() as other:
        other.on(Request.END_TRANSACTION, ok())
        other.on(Request.HEART_BEAT, ok())
        tenant.rpc_client.request(other.address, Command(Request.HEART_BEAT), tenant.soon)
        for count in (1, 2):
            other.ask(question(HALF))
            other.wait_for(lambda count=count: len(other.seen(Request.END_TRANSACTION)) == count)  # type: ignore[misc]
        kinds = [[one.ext["commitOrRollback"] for one in of.seen(Request.END_TRANSACTION)] for of in (broker, other)]
    assert kinds == [["8", "12"], ["8", "12"]]


@pytest.mark.parametrize("first", ["mine", "ns%t"])
def test_foreign_message_with_same_id_changes_no_commit_answer(broker: MockBroker, tenant: Parts, first: str) -> None:
    """Neither is the commit sent to it, nor does the one that was committed lose or repeat its commit."""
    tenant.routes.get("t")
    tenant.sender.join("pg", 0, lambda message, place: ROLLBACK)
    tenant.sender.end_transaction(PLACE, COMMIT, tenant.soon)
    fakes = "PGROUP\x01ns%pg\x02TRAN_MSG\x01true\x02UNIQ_KEY\x01ID\x02"
    fake = store(topic=first, body=b"another", properties=fakes)
    with MockBroker() as other:
        both = broker, other
        other.on(Request.END_TRANSACTION, ok())
        other.on(Request.HEART_BEAT, ok())
        tenant.rpc_client.request(other.address, Command(Request.HEART_BEAT), tenant.soon)
        for count, (asks, half) in enumerate(((other, fake), (broker, HALF), (other, HALF)), 2):
            asks.ask(question(half))
            eventually(lambda count=count: sum(len(of.seen(Request.END_TRANSACTION)) for of in both) == count)  # type: ignore[misc]
        kinds = [[one.ext["commitOrRollback"] for one in of.seen(Request.END_TRANSACTION)] for of in (broker, other)]
    assert kinds == [["8", "12"], ["12", "8"]]


def copies_of(parts: Parts) -> Any:
    """The questions of the only group."""
    (answering,) = [member.request_handler.__self__ for _, member in parts.groups.one_member_per_group()]  # type: ignore[union-attr]
    return answering._coalescer


def test_hanging_check_function_blocks_no_immediate_answer(broker: MockBroker, tenant: Parts) -> None:
    """Nor is what waits behind it asked once its producer has left: what it would look at may be gone."""
    broker.on(Request.UNREGISTER_CLIENT, ok())
    tenant.routes.get("t")
    called, go_on = threading.Event(), threading.Event()
    calls: list[str] = []
    decisions: list[TransactionState | None] = [None, None, COMMIT]

    def function(name: str) -> TransactionState:
        calls.append(name)
        called.set()
        go_on.wait(60)
        return ROLLBACK

    def check(message: ReceivedMessage, place: HalfPlace) -> TransactionState | Callable[[], TransactionState]:
        return decisions.pop(0) or (lambda: function("asked"))

    leave = tenant.sender.join("pg", 0, check)
    copies = copies_of(tenant)
    for msg_id in (b"1D", b"2D", b"3D"):
        broker.ask(question(HALF.replace(b"\x01ID\x02", b"\x01" + msg_id + b"\x02")))
    broker.wait_for(lambda: [c.ext["commitOrRollback"] for c in broker.seen(Request.END_TRANSACTION)] == ["8"])
    assert called.wait(60)
    leave(tenant.soon)
    go_on.set()
    broker.wait_for(lambda: len(broker.seen(Request.END_TRANSACTION)) == 2)
    eventually(lambda: not copies._newest_places)
    assert calls == ["asked"]


def test_slow_check_function_delivers_its_message_once(broker: MockBroker, tenant: Parts) -> None:
    """Each question is about a copy of its own, and a commit of each would deliver each."""
    tenant.routes.get("t")
    called, go_on = threading.Event(), threading.Event()
    calls: list[str] = []

    def function() -> TransactionState:
        calls.append("asked")
        called.set()
        go_on.wait(60)
        return COMMIT

    tenant.sender.join("pg", 0, lambda message, place: function)
    broker.ask(question(HALF))
    assert called.wait(60)
    copy = question(HALF)
    for offset in ("8", "9"):
        broker.ask(replace(copy, ext={**copy.ext, "tranStateTableOffset": offset}))
    copies = copies_of(tenant)
    eventually(lambda: next(iter(copies._newest_places.values()))[1].half_offset == 9)
    held = Held()
    broker.on(Request.END_TRANSACTION, [held, ok()])
    go_on.set()
    (commit,) = held.wait(1)
    broker.ask(
        replace(copy, ext={**copy.ext, "tranStateTableOffset": "10"})
    )  # before it knows that its commit has arrived
    eventually(lambda: next(iter(copies._newest_places.values()))[1].half_offset == 10)
    commit.answer(ok())
    broker.wait_for(lambda: len(broker.seen(Request.END_TRANSACTION)) == 2)
    eventually(lambda: not copies._newest_places)
    broker.ask(replace(copy, ext={**copy.ext, "tranStateTableOffset": "11"}))
    broker.wait_for(lambda: len(broker.seen(Request.END_TRANSACTION)) == 3)
    answers = [(c.ext["tranStateTableOffset"], c.ext["commitOrRollback"]) for c in broker.seen(Request.END_TRANSACTION)]
    assert (answers, calls) == ([("9", "8"), ("10", "12"), ("11", "12")], ["asked"])


@pytest.mark.parametrize("closed", [False, True])
def test_two_producers_of_a_group_in_one_process_deliver_once(broker: MockBroker, tenant: Parts, closed: bool) -> None:
    """Each over its own connection; or the first was closed while its function was under way."""
    other = Parts(broker.address, scope=Scope("ns"))
    broker.on(Request.HEART_BEAT, ok())
    broker.on(Request.UNREGISTER_CLIENT, ok())
    called, go_on = threading.Event(), threading.Event()
    calls: list[str] = []

    def function(name: str) -> TransactionState:
        calls.append(name)
        called.set()
        go_on.wait(60)
        return COMMIT

    leave = tenant.sender.join("pg", 0, lambda message, place: lambda: function("first"))
    other.sender.join("pg", 0, lambda message, place: lambda: function("second"))
    for parts in (tenant, other):
        parts.routes.get("t")  # a server that is only a name server may not ask
        parts.rpc_client.request(broker.address, Command(Request.HEART_BEAT))
    copies = copies_of(tenant)
    first, second = broker.peers
    first.send(broker.encode(question(HALF)))
    assert called.wait(60)
    if closed:
        leave(tenant.soon)
    copy = question(HALF)

    def asked(offset: str) -> Command:
        return replace(copy, ext={**copy.ext, "tranStateTableOffset": offset})

    second.send(broker.encode(asked("8")))
    eventually(lambda: next(iter(copies._newest_places.values()))[1].half_offset == 8 or len(calls) > 1)
    go_on.set()
    eventually(lambda: not copies._newest_places)
    second.send(broker.encode(asked("9")))
    broker.wait_for(lambda: len(broker.seen(Request.END_TRANSACTION)) == 2)
    answers = [(c.ext["tranStateTableOffset"], c.ext["commitOrRollback"]) for c in broker.seen(Request.END_TRANSACTION)]
    assert (answers, calls) == ([("8", "8"), ("9", "12")], ["first"])
    other.close()


def test_checks_waiting_behind_one_producer_go_to_another() -> None:
    """The first one's may hang, or be closed."""
    go_on, called, calls = threading.Event(), threading.Event(), list[str]()

    def say(place: str, decision: TransactionState) -> bool:
        calls.append(place)
        return True

    def hang() -> TransactionState:
        called.set()
        go_on.wait(60)
        return ROLLBACK

    one, two, three = (copies.CheckCoalescer(say, lambda place: "a", COMMIT, ROLLBACK, UNKNOWN, "pg") for _ in range(3))
    one.request_decision("hangs", "1", hang)
    assert called.wait(60)
    for what in ("behind", "left"):
        one.request_decision(what, "1", lambda: COMMIT)
    two.request_decision("behind", "2", lambda: COMMIT)
    eventually(lambda: "behind" not in one._newest_places)
    one.leave()
    assert one._newest_places.keys() == {"hangs"}
    three.request_decision("left", "3", lambda: COMMIT)
    eventually(lambda: "left" not in one._newest_places)
    go_on.set()
    eventually(lambda: not one._newest_places)
    assert calls == ["2", "3", "1"]


def test_hanging_check_of_a_closed_producer_goes_to_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Not at once, for a slow one still answers; and it answers no more when it comes back after that."""
    called, ended, calls = threading.Event(), threading.Event(), list[object]()
    go_on = {decision: threading.Event() for decision in (COMMIT, ROLLBACK)}

    def say(place: str, decision: TransactionState) -> bool:
        calls.append((place, decision))
        return True

    def waits(decision: TransactionState) -> TransactionState:
        called.set()
        go_on[decision].wait(60)
        return decision

    one, two = (copies.CheckCoalescer(say, lambda place: "a", COMMIT, ROLLBACK, UNKNOWN, "pg") for _ in range(2))
    one.request_decision("hangs", "1", lambda: waits(ROLLBACK))
    assert called.wait(60)
    one.leave()
    called.clear()
    two.request_decision("hangs", "2", lambda: waits(COMMIT))
    assert one._deciders["hangs"][0] is one
    with monkeypatch.context() as later:
        later.setattr(copies, "RACE_WINDOW_S", 0.0)
        one.leave()
    two.request_decision("hangs", "3", lambda: waits(COMMIT))
    assert called.wait(60)
    go_on[ROLLBACK].set()
    one._decide_executor.run(None, ended.set)  # behind what hung
    assert ended.wait(60)
    one._send_executor.wait(("a",), 60)
    assert calls == []
    go_on[COMMIT].set()
    eventually(lambda: not one._newest_places)
    assert calls == [("3", COMMIT)]


def test_a_broker_that_hangs_holds_up_no_answer_to_another_one(broker: MockBroker) -> None:
    """Neither what is known, nor what the function says: the other one gives up after so many questions."""
    parts = Parts(broker.address, scope=Scope("ns"), request_timeout_s=120.0)
    broker.on(Request.END_TRANSACTION, never)
    broker.on(Request.HEART_BEAT, ok())
    known: list[TransactionState | None] = [None, COMMIT, None, COMMIT]
    with MockBroker({Request.END_TRANSACTION: ok(), Request.HEART_BEAT: ok()}) as other:
        parts.routes.get("t")  # a server that is only a name server may not ask
        parts.sender.join("pg", 0, lambda message, place: known.pop(0) or (lambda: COMMIT))
        for one, ids in ((broker, (b"1D", b"2D")), (other, (b"3D", b"4D"))):
            parts.rpc_client.request(one.address, Command(Request.HEART_BEAT))
            for msg_id in ids:
                one.ask(question(HALF.replace(b"\x01ID\x02", b"\x01" + msg_id + b"\x02")))
        broker.wait_for(lambda: len(broker.seen(Request.END_TRANSACTION)) == 1)
        other.wait_for(lambda: len(other.seen(Request.END_TRANSACTION)) == 2)
        parts.close()


def test_check_function_is_not_called_if_answer_cannot_be_sent(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Nor does a broker that hangs take the room of others, and the log is not flooded."""
    monkeypatch.setattr(copies, "MAX_WAITING_CHECKS", 2)
    go_on, calls, said = threading.Event(), list[str](), list[str]()

    def say(place: str, decision: TransactionState) -> bool:
        if place.startswith("a"):
            go_on.wait(60)
        said.append(place)
        return True

    def call(what: str) -> TransactionState:
        calls.append(what)
        return ROLLBACK

    questions = copies.CheckCoalescer(say, lambda place: place[0], COMMIT, ROLLBACK, UNKNOWN)
    for what in ("a1", "a2", "a3", "a4", "b1"):
        questions.request_decision(what, what, functools.partial(call, what))
    eventually(lambda: said == ["b1"])
    assert (calls, caplog.text.count("are ignored until brokers repeat them")) == (["a1", "a2", "b1"], 1)
    go_on.set()
    eventually(lambda: not questions._newest_places)
    questions.request_decision("a3", "a3", functools.partial(call, "a3"))
    eventually(lambda: "a3" in said)


def test_what_cannot_be_sent_for_lack_of_threads_is_asked_again(
    broker: MockBroker, tenant: Parts, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The connection of the question is gone, and none can be made."""
    tenant.routes.get("t")
    calls: list[str] = []

    def function() -> TransactionState:
        calls.append("asked")
        return COMMIT

    tenant.sender.join("pg", 0, lambda message, place: function)
    (answering,) = [member.request_handler.__self__ for _, member in tenant.groups.one_member_per_group()]  # type: ignore[union-attr]
    for thread, said in (
        ("rocketmq-aside-('", "are ignored until brokers repeat them"),
        ("rocketmq-127", "could not be sent"),
    ):
        with monkeypatch.context() as lacking:
            no_more_threads(lacking, thread)
            asked, tenant.pool._slots[broker.address].connection = tenant.pool._slots[broker.address].connection, None
            broker.ask(question(HALF))
            eventually(lambda said=said: said in caplog.text)  # type: ignore[misc]
        eventually(lambda: not answering._coalescer._newest_places)
        with pytest.MonkeyPatch.context() as lacking:
            no_more_threads(lacking, "rocketmq-127")
            with pytest.raises(ConnectionLost, match="no connection can be made") as lost:
                tenant.sender.end_transaction(PLACE, COMMIT, tenant.soon)
            assert lost.value.unsent
        tenant.pool._slots[broker.address].connection = asked
    broker.ask(question(HALF))
    broker.wait_for(lambda: len(broker.seen(Request.END_TRANSACTION)) == 1)
    assert len(calls) == 3


def test_transaction_producer_sends_heartbeats_to_all_brokers(broker: MockBroker, parts: Parts) -> None:
    with MockBroker({Request.HEART_BEAT: ok()}) as other:
        table = {
            "brokerAddrTable": {
                name: {"brokerName": name, "cluster": "c", "brokerAddrs": {"0": address}}
                for name, address in (("broker-a", broker.address), ("broker-b", other.address))
            },
            "clusterAddrTable": {"c": ["broker-a", "broker-b"]},
        }
        broker.on(Request.GET_BROKER_CLUSTER_INFO, ok(json.dumps(table).encode()))
        broker.on(Request.HEART_BEAT, ok())
        broker.on(Request.GET_ROUTEINFO_BY_TOPIC, route(2, {"broker-a": broker.address}))
        parts.routes.get("t")
        parts.sender.join("plain", 0)
        parts.instance.heartbeat(parts.soon)
        assert [len(one.seen(Request.HEART_BEAT)) for one in (broker, other)] == [1, 0]
        leave = parts.sender.join("pg", 0, lambda message, place: COMMIT)
        parts.instance.refresh_cluster(parts.soon)
        parts.instance.heartbeat(parts.soon)
        assert [len(one.seen(Request.HEART_BEAT)) for one in (broker, other)] == [2, 1]
        broker.on(Request.GET_BROKER_CLUSTER_INFO, refuse(Response.SYSTEM_ERROR, "not now"))
        parts.instance.refresh_cluster(parts.soon)
        parts.instance.heartbeat(parts.soon)
        assert [len(one.seen(Request.HEART_BEAT)) for one in (broker, other)] == [3, 2], "those known before"
        other.on(Request.UNREGISTER_CLIENT, ok())
        broker.on(Request.UNREGISTER_CLIENT, ok())
        leave(parts.soon)
        assert [len(one.seen(Request.UNREGISTER_CLIENT)) for one in (broker, other)] == [1, 1]


def test_hanging_name_server_hides_no_broker_known_to_another(
    broker: MockBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A producer that has sent nothing yet, as after a restart."""
    monkeypatch.setattr("rocketmq_spark.client.instance.FIRST_HEARTBEAT_DELAY_S", 0.01)
    monkeypatch.setattr("rocketmq_spark.client.instance.HEARTBEAT_TIMEOUT_S", 0.5)
    table = {
        "brokerAddrTable": {
            "broker-a": {"brokerName": "broker-a", "cluster": "c", "brokerAddrs": {"0": broker.address}}
        },
        "clusterAddrTable": {"c": ["broker-a"]},
    }
    broker.on(Request.GET_BROKER_CLUSTER_INFO, ok(json.dumps(table).encode()))
    broker.on(Request.HEART_BEAT, ok())
    with MockBroker({Request.GET_BROKER_CLUSTER_INFO: never}) as hanging:
        parts = Parts(f"{hanging.address};{broker.address}", request_timeout_s=0.5)
        parts.name_servers._current_index = 0
        parts.sender.join("pg", 30.0, lambda message, place: COMMIT)
        broker.wait_for(lambda: bool(broker.seen(Request.HEART_BEAT)))
        parts.close()
    assert hanging.seen(Request.GET_BROKER_CLUSTER_INFO)
