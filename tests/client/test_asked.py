"""What brokers ask of a consumer: each command is a question, each answer a command, and names lose their namespace."""

from __future__ import annotations

import functools
import json
import threading
import zlib
from collections.abc import Callable
from typing import Any

import pytest

from rocketmq_spark.base.codes import INNER_BATCH_MASK, Request, Response, SysFlag
from rocketmq_spark.client import instance
from rocketmq_spark.client.broker_requests import BrokerRequests, group_membership, with_user_names
from rocketmq_spark.client.instance import MemberRegistry, RegisteredMember
from rocketmq_spark.client.rpc import RpcClient
from rocketmq_spark.errors import RemoteProtocolError
from rocketmq_spark.model import Filter, MessageQueue
from rocketmq_spark.model.membership import (
    BrokerRequest,
    ConsumeDirectly,
    DirectOutcome,
    DirectResult,
    GetConsumedOffsets,
    GetRunningInfo,
    MembersChanged,
    Membership,
    QueueInfo,
    RequestAnswer,
    ResetOffsets,
    RunningInfo,
)
from rocketmq_spark.remoting.connection import ServerRequest
from rocketmq_spark.remoting.pool import ConnectOptions, Pool
from rocketmq_spark.wire.header import Command
from rocketmq_spark.wire.loose_json import read_json
from rocketmq_spark.wire.messages import decode_messages
from rocketmq_spark.wire.names import NO_SCOPE, Scope
from tests.harness import peak_bytes, store
from tests.mockbroker import eventually

QUEUE = MessageQueue("t", "b", 1)
ON_WIRE = {"brokerName": "b", "queueId": 1, "topic": "ns%t"}
STORED = store("%RETRY%ns%g", b"body", "RETRY_TOPIC\x01ns%t\x02", queue_offset=3)
INFO = RunningInfo(Membership({"t": Filter("a")}), 5, queues={QUEUE: QueueInfo()})


def ask(
    code: Request, answer: RequestAnswer | None, body: bytes = b"", **ext: Any
) -> tuple[BrokerRequest, Command | None]:
    asked: list[tuple[str, BrokerRequest]] = []

    def worker(address: str, question: BrokerRequest) -> RequestAnswer | None:
        asked.append((address, question))
        return answer

    with_names = {"topic": "ns%t", "group": "ns%g", "consumerGroup": "ns%g", "clientId": "me", **ext}
    reply = BrokerRequests(RpcClient(Pool(ConnectOptions()), scope=Scope("ns")), "g", worker)(
        "a:1", Command(code, with_names, body)
    )
    ((address, question),) = asked
    assert address == "a:1"
    return question, reply


def test_changed_members_are_told_and_nothing_is_answered() -> None:
    assert ask(Request.NOTIFY_CONSUMER_IDS_CHANGED, None) == (MembersChanged(), None)


def test_offsets_are_reset_to() -> None:
    body = b'{"offsetTable":{%b:17}}' % json.dumps(ON_WIRE).encode()
    question, reply = ask(Request.RESET_CONSUMER_CLIENT_OFFSET, None, body)
    assert (question, reply) == (ResetOffsets("t", {QUEUE: 17}), None)


def test_reset_ignores_offsets_of_topics_outside_the_namespace() -> None:
    foreign = b'{"offsetTable":{%b:17}}' % json.dumps({**ON_WIRE, "topic": "t"}).encode()
    question, _ = ask(Request.RESET_CONSUMER_CLIENT_OFFSET, None, foreign, topic="t")
    assert isinstance(question, ResetOffsets)
    assert question.offsets == {}


def test_offsets_are_reported() -> None:
    question, reply = ask(Request.GET_CONSUMER_STATUS_FROM_CLIENT, {QUEUE: 17})
    assert question == GetConsumedOffsets("t")
    assert reply is not None
    assert reply.code == Response.SUCCESS
    assert read_json(reply.body) == {"messageQueueTable": {tuple(ON_WIRE.items()): 17}}


@pytest.mark.parametrize("stacks", [True, False])
def test_a_member_tells_how_it_is(stacks: bool) -> None:
    question, reply = ask(Request.GET_CONSUMER_RUNNING_INFO, INFO, jstackEnable=str(stacks).lower())
    assert question == GetRunningInfo(stacks)
    assert reply is not None
    answer = read_json(reply.body)
    assert list(answer["mqTable"]) == [tuple(ON_WIRE.items())]
    assert answer["subscriptionSet"][0]["topic"] == "ns%t"


def test_a_message_is_consumed_directly() -> None:
    question, reply = ask(
        Request.CONSUME_MESSAGE_DIRECTLY, DirectResult(DirectOutcome.SUCCESS, 1), STORED, brokerName="b"
    )
    assert isinstance(question, ConsumeDirectly)
    assert (question.message.topic, question.message.queue.topic) == ("t", "%RETRY%g")
    assert (question.message.broker_name, question.message.body) == ("b", b"body")
    assert reply is not None
    assert json.loads(bytes(reply.body))["consumeResult"] == "CR_SUCCESS"


def test_claimed_retry_topic_outside_namespace_is_not_trusted() -> None:
    planted = store("%RETRY%ns%g", b"body", "RETRY_TOPIC\x01t\x02", queue_offset=3)
    question, _ = ask(Request.CONSUME_MESSAGE_DIRECTLY, DirectResult(DirectOutcome.SUCCESS, 1), planted, brokerName="b")
    assert isinstance(question, ConsumeDirectly)
    assert (question.message.topic, question.message.queue.topic) == ("%RETRY%g", "%RETRY%g")


def test_a_question_without_its_message_is_an_error() -> None:
    with pytest.raises(RemoteProtocolError, match="no message came"):
        ask(Request.CONSUME_MESSAGE_DIRECTLY, None)


def test_direct_consume_refuses_extra_messages_before_inflating() -> None:
    packed = store("t", zlib.compress(bytes(8 << 20)), sys_flag=SysFlag.COMPRESSED)

    def refused() -> None:
        with pytest.raises(RemoteProtocolError, match="more than one message came"):
            ask(Request.CONSUME_MESSAGE_DIRECTLY, None, packed * 50)

    assert peak_bytes(refused) < 8 << 20


def test_what_is_not_known_is_refused() -> None:
    questions = BrokerRequests(RpcClient(Pool(ConnectOptions())), "g", lambda address, question: pytest.fail("asked"))
    assert questions("a:1", Command(Request.PULL_MESSAGE)) is None


def test_subscriptions_are_told_by_tags_or_as_they_are() -> None:
    made = group_membership(
        "g", Membership({"t": Filter("a || b"), "u": Filter("x > 1", "SQL92")}, {"t": 7}, message_model="BROADCASTING")
    )
    assert (made.group, made.versions_ms, made.message_model) == ("g", {"t": 7}, "BROADCASTING")
    assert made.subscriptions["t"].tags == ("a", "b")
    assert (made.subscriptions["u"].sub_string, made.subscriptions["u"].codes) == ("x > 1", ())
    assert made.expression_types == {"t": "TAG", "u": "SQL92"}


def test_a_message_without_a_namespace_stays_as_it_is() -> None:
    (message,) = decode_messages(store("t", b"x"), "b")
    assert with_user_names(message, NO_SCOPE) is message


def test_no_reply_of_a_flood_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """They come faster than one thread takes them where many answer at once; those refused were lost."""
    monkeypatch.setattr(instance, "_MAX_WAITING_REQUESTS", 1)
    may_go_on, taken = threading.Event(), list[ServerRequest]()

    def taking(request: ServerRequest) -> None:
        assert may_go_on.wait(60)
        taken.append(request)

    def take(request: ServerRequest, aside: Callable[[Callable[[], None]], None]) -> bool:
        aside(functools.partial(taking, request))
        return True

    groups = MemberRegistry(take)
    command = Command(Request.PUSH_REPLY_MESSAGE_TO_CLIENT, {})
    requests = [ServerRequest(f"a:{i}", command, lambda reply: None, None) for i in range(50)]
    assert all(groups.on_request(request) for request in requests)
    may_go_on.set()
    eventually(lambda: taken == requests)


def test_flood_of_requests_is_refused_and_logged_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A broker may ask thousands at once about what another producer left."""
    monkeypatch.setattr(instance, "_MAX_WAITING_REQUESTS", 1)
    groups, may_end, begun = MemberRegistry(), threading.Event(), threading.Event()

    def slow(address: str, command: Command) -> None:
        begun.set()
        assert may_end.wait(60)

    groups.add(
        "g", RegisteredMember("g", request_handler=slow, membership=lambda: group_membership("g", Membership({})))
    )
    command = Command(Request.GET_CONSUMER_RUNNING_INFO, {"consumerGroup": "g"})
    request = ServerRequest("a:1", command, lambda reply: None, None)
    assert groups.on_request(request)
    assert begun.wait(60)
    assert [groups.on_request(request) for _ in range(5)] == [True, False, False, False, False]
    may_end.set()
    assert caplog.text.count("of a:1 is refused: 1 requests wait for one thread") == 1


def test_a_pushed_batch_is_refused_before_it_is_inflated() -> None:
    items = bytes(22) * 400_000
    packed = store("t", zlib.compress(items), sys_flag=int(INNER_BATCH_MASK) | SysFlag.COMPRESSED)

    def refused() -> None:
        with pytest.raises(RemoteProtocolError, match="a batch came to be consumed directly"):
            ask(Request.CONSUME_MESSAGE_DIRECTLY, None, packed)

    assert peak_bytes(refused) < 1 << 20


def test_pushed_body_stays_compressed_until_member_accepts_it() -> None:
    packed = store("ns%t", zlib.compress(bytes(8 << 20)), sys_flag=SysFlag.COMPRESSED)
    question, _ = ask(Request.CONSUME_MESSAGE_DIRECTLY, DirectResult(DirectOutcome.SUCCESS, 1), packed, brokerName="b")
    assert isinstance(question, ConsumeDirectly)
    assert len(question.message.body) < 1 << 20
