"""A member of a consumer group: what it tells and asks brokers, scripted and real."""

from __future__ import annotations

import json
import logging
import random
import threading
from collections.abc import Callable
from types import SimpleNamespace

import pytest

from rocketmq_spark.base import complaints
from rocketmq_spark.base.clock import Deadline
from rocketmq_spark.base.codes import BATCH_QUEUE, CLEANUP_POLICY, COMPACTION, QUEUE_TYPE, Request, Response
from rocketmq_spark.client.member import RemotingMember
from rocketmq_spark.errors import (
    BrokerError,
    BrokerNotFound,
    ConnectionLost,
    LocalProtocolError,
    RouteNotFound,
    ServerFault,
)
from rocketmq_spark.localbroker import LocalBroker
from rocketmq_spark.model import Filter, MessageQueue, PullAnswer, PullRequest, PullStatus, QueueBounds, SendRequest
from rocketmq_spark.model.membership import BrokerRequest, MembersChanged, Membership, RequestAnswer
from rocketmq_spark.wire.header import Command
from rocketmq_spark.wire.names import Scope
from tests.client.conftest import Parts
from tests.client.test_long_polls import Told
from tests.harness import store
from tests.mockbroker import (
    NO_ROUTE,
    WAIT_S,
    Call,
    MockBroker,
    eventually,
    of_proxy,
    offsets,
    ok,
    refuse,
    route,
    topic_config,
)

QUEUES = [MessageQueue("t", "broker-a", i) for i in range(2)]


def nothing(address: str, question: BrokerRequest) -> None:
    raise AssertionError(f"{question} was not expected")


def test_queues_are_sorted_and_one_object_while_unchanged(broker: MockBroker, parts: Parts) -> None:
    found = parts.member.queues("t", parts.soon)
    assert list(found) == QUEUES
    assert parts.member.queues("t", parts.soon, refresh=True) is found
    broker.on(Request.GET_ROUTEINFO_BY_TOPIC, route(3, {"broker-a": broker.address}))
    assert len(parts.member.queues("t", parts.soon, refresh=True)) == 3


def test_a_proxy_sends_no_notices(broker: MockBroker, parts: Parts) -> None:
    parts.member.queues("t", parts.soon)
    assert parts.member.receives_notices
    broker.on(Request.GET_ROUTEINFO_BY_TOPIC, of_proxy(route(2, {"broker-a": broker.address})))
    parts.member.queues("t", parts.soon, refresh=True)
    assert not parts.member.receives_notices


def test_a_proxy_that_reaches_no_broker_is_the_cause(broker: MockBroker, parts: Parts) -> None:
    """It answers with the text of a NullPointerException, and knows no members, because their heartbeats failed."""
    null = 'Cannot invoke "ConsumerGroupInfo.getAllClientId()" because "consumerGroupInfo" is null'
    broker.on(Request.GET_CONSUMER_LIST_BY_GROUP, of_proxy(refuse(Response.SYSTEM_ERROR, null)))
    with pytest.raises(
        ServerFault, match=r"the Proxy knows no member of the group.*does not reach its brokers"
    ) as caught:
        parts.member.members("g", "t", parts.soon)
    assert "null" not in str(caught.value)
    broker.on(Request.GET_CONSUMER_LIST_BY_GROUP, of_proxy(refuse(Response.SYSTEM_ERROR, "other words")))
    with pytest.raises(ServerFault, match="other words"):
        parts.member.members("g", "t", parts.soon)


def test_queues_are_asked_for_again_after_thirty_seconds(
    broker: MockBroker, parts: Parts, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [1000.0]
    monkeypatch.setattr("rocketmq_spark.client.routes.time", SimpleNamespace(monotonic=lambda: now[0]))
    parts.member.queues("t", parts.soon)
    broker.on(Request.GET_ROUTEINFO_BY_TOPIC, route(3, {"broker-a": broker.address}))
    now[0] += 29.9
    assert len(parts.member.queues("t", parts.soon)) == 2
    now[0] += 0.2
    assert len(parts.member.queues("t", parts.soon)) == 3


def test_broker_gone_from_routes_gets_no_more_heartbeats(broker: MockBroker, parts: Parts) -> None:
    with MockBroker({Request.HEART_BEAT: ok()}) as other:
        broker.on(Request.HEART_BEAT, ok())
        broker.on(Request.GET_ROUTEINFO_BY_TOPIC, route(1, {"broker-a": broker.address, "broker-b": other.address}))
        parts.member.queues("t", parts.soon)
        join(parts, "g")
        parts.member.heartbeat(parts.soon)
        broker.on(Request.GET_ROUTEINFO_BY_TOPIC, route(1, {"broker-a": broker.address}))
        assert len(parts.member.queues("t", parts.soon, refresh=True)) == 1
        parts.member.heartbeat(parts.soon)
        assert [len(one.seen(Request.HEART_BEAT)) for one in (broker, other)] == [2, 1]
        assert parts.routes.broker("broker-b") is None


def test_without_a_name_server_queues_are_what_they_were(broker: MockBroker, parts: Parts) -> None:
    found = parts.member.queues("t", parts.soon)
    broker.refuse_connections()
    broker.drop()
    parts.routes.route_max_age_s = 0.0
    assert parts.member.queues("t", parts.soon) is found
    with pytest.raises(ConnectionLost):
        parts.member.queues("t", parts.soon, refresh=True)


def test_a_topic_that_is_not_there(broker: MockBroker, parts: Parts) -> None:
    broker.on(Request.GET_ROUTEINFO_BY_TOPIC, NO_ROUTE)
    with pytest.raises(RouteNotFound):
        parts.member.queues("t", parts.soon)


def test_ids_come_from_a_random_broker_of_the_topic(broker: MockBroker, parts: Parts) -> None:
    ids = ok(json.dumps({"consumerIdList": ["b", "a"]}).encode())
    broker.on(Request.GET_CONSUMER_LIST_BY_GROUP, ids)
    with MockBroker({Request.GET_CONSUMER_LIST_BY_GROUP: ids}) as other:
        both = {"broker-a": broker.address, "broker-b": other.address}
        broker.on(Request.GET_ROUTEINFO_BY_TOPIC, route(1, both))
        member = RemotingMember(
            parts.broker_client, parts.routes, parts.instance, parts.sender, parts.kinds, random.Random(3)
        )
        for _ in range(20):
            assert member.members("g", "t", parts.soon) == ["a", "b"]
        asked = [len(one.seen(Request.GET_CONSUMER_LIST_BY_GROUP)) for one in (broker, other)]
        assert sum(asked) == 20
        assert min(asked) > 0
        assert broker.seen(Request.GET_CONSUMER_LIST_BY_GROUP)[0].ext["consumerGroup"] == "g"


def test_a_broker_that_knows_no_member_says_what_to_do(broker: MockBroker, parts: Parts) -> None:
    broker.on(Request.GET_CONSUMER_LIST_BY_GROUP, refuse(1, "no consumer for this group, g"))
    with pytest.raises(ServerFault, match=r"no consumer for this group, g.*autoCreateSubscriptionGroup") as caught:
        parts.member.members("g", "t", parts.soon)
    assert (caught.value.topic, caught.value.addr) == ("t", broker.address)


def test_what_a_group_wants_as_its_broker_heard_it(broker: MockBroker) -> None:
    """Under the user's names; what a broker of another version leaves out is what it means by that."""
    table = {"ns%t": {"subString": "a > 1", "expressionType": "SQL92"}, "%RETRY%ns%g": {"subString": "*"}, "ns%u": {}}
    table["t"] = {"subString": "another topic, outside the namespace"}
    broker.on(Request.GET_CONSUMER_CONNECTION_LIST, ok(json.dumps({"subscriptionTable": table}).encode()))
    tenant = Parts(broker.address, scope=Scope("ns"))
    found = tenant.member.filters("g", "t", tenant.soon)
    assert found == {"t": Filter("a > 1", "SQL92"), "%RETRY%g": Filter("*"), "u": Filter("*")}
    assert broker.seen(Request.GET_CONSUMER_CONNECTION_LIST)[0].ext["consumerGroup"] == "ns%g"
    tenant.close()


def test_each_broker_reports_the_consume_mode_of_a_topic(broker: MockBroker) -> None:
    """Under the user's names; a broker that does not know the request is left out."""

    def assigned(mode: str) -> Command:
        queue = {"topic": "ns%t", "brokerName": "broker-a", "queueId": 0}
        return ok(json.dumps({"messageQueueAssignments": [{"messageQueue": queue, "mode": mode}]}).encode())

    ask = Request.QUERY_ASSIGNMENT
    broker.on(ask, assigned("POP"))
    with (
        MockBroker({ask: refuse(Response.REQUEST_CODE_NOT_SUPPORTED)}) as old,
        MockBroker({ask: ok(b"{]")}) as odd,
        MockBroker({ask: ok(b"{}")}) as empty,
    ):
        addresses = {"broker-a": broker.address, "old": old.address, "odd": odd.address, "empty": empty.address}
        broker.on(Request.GET_ROUTEINFO_BY_TOPIC, route(1, addresses))
        tenant = Parts(broker.address, scope=Scope("ns"))
        assert tenant.member.consume_modes("g", ["t"], tenant.soon) == {("t", "broker-a"): "POP"}
        tenant.close()
    (asked,) = broker.seen(ask)
    body = json.loads(asked.body)
    assert (body["topic"], body["consumerGroup"], body["messageModel"]) == ("ns%t", "ns%g", "BROADCASTING")


def test_a_named_broker_says_what_it_heard_itself(broker: MockBroker, parts: Parts) -> None:
    def heard(topic: str) -> Command:
        return ok(json.dumps({"subscriptionTable": {topic: {}}}).encode())

    ask = Request.GET_CONSUMER_CONNECTION_LIST
    with MockBroker({ask: heard("there")}) as other:
        broker.on(ask, heard("here"))
        broker.on(Request.GET_ROUTEINFO_BY_TOPIC, route(1, {"broker-a": broker.address, "broker-b": other.address}))
        for _ in range(5):
            assert parts.member.filters("g", "t", parts.soon, "broker-a") == {"here": Filter("*")}
            assert parts.member.filters("g", "t", parts.soon, "broker-b") == {"there": Filter("*")}
        with pytest.raises(BrokerNotFound, match="broker-c is not a broker of the topic that has an address"):
            parts.member.filters("g", "t", parts.soon, "broker-c")


def test_only_a_broker_that_says_so_has_no_offset(broker: MockBroker, parts: Parts) -> None:
    parts.routes.get("t")
    broker.on(
        Request.QUERY_CONSUMER_OFFSET,
        [ok(offset=7), refuse(Response.QUERY_NOT_FOUND), refuse(Response.SYSTEM_ERROR), refuse(Response.SYSTEM_BUSY)],
    )
    assert parts.member.committed("g", QUEUES[0], parts.soon) == 7
    assert parts.member.committed("g", QUEUES[0], parts.soon, zero_if_new=False) is None
    for _ in range(2):
        with pytest.raises(BrokerError):
            parts.member.committed("g", QUEUES[0], parts.soon)
    first, second, *_ = broker.seen(Request.QUERY_CONSUMER_OFFSET)
    assert "setZeroIfNotFound" not in first.ext
    assert second.ext["setZeroIfNotFound"] == "false"


def test_bounds_and_offsets_by_time(broker: MockBroker, parts: Parts) -> None:
    parts.routes.get("t")
    broker.on(Request.GET_MIN_OFFSET, offsets({1: 3}))
    broker.on(Request.GET_MAX_OFFSET, offsets({1: 9}))
    broker.on(Request.SEARCH_OFFSET_BY_TIMESTAMP, offsets({1: 5}))
    assert parts.member.bounds(QUEUES[1], parts.soon) == QueueBounds(3, 9, 0)
    assert parts.member.search_offset(QUEUES[1], 1234, parts.soon) == 5
    assert broker.seen(Request.SEARCH_OFFSET_BY_TIMESTAMP)[0].ext["timestamp"] == "1234"


def test_bounds_with_a_group_start_at_what_compaction_keeps(broker: MockBroker, parts: Parts) -> None:
    """A seek to the beginning would skip what is kept before the log that the broker tells of."""
    parts.routes.get("t")
    broker.on(Request.GET_TOPIC_CONFIG, topic_config(**{CLEANUP_POLICY: COMPACTION}))
    broker.on(Request.GET_MIN_OFFSET, offsets({1: 5}))
    broker.on(Request.GET_MAX_OFFSET, offsets({1: 9}))
    first = store("t", b"x", queue_id=1, queue_offset=2)
    broker.on(Request.PULL_MESSAGE, ok(first, nextBeginOffset=3, minOffset=5, maxOffset=9))
    assert parts.member.bounds(QUEUES[1], parts.soon) == QueueBounds(5, 9, 0)
    assert parts.member.bounds(QUEUES[1], parts.soon, "g") == QueueBounds(2, 9, 0)
    (pull,) = broker.seen(Request.PULL_MESSAGE)
    assert (pull.ext["consumerGroup"], pull.ext["queueOffset"]) == ("g", "0")


def test_a_queue_that_its_broker_never_had_begins_at_zero(broker: MockBroker, parts: Parts) -> None:
    """The broker says -1. A seek to it would have the group's offset be none."""
    parts.routes.get("t")
    broker.on(Request.GET_MIN_OFFSET, offsets({1: -1}))
    broker.on(Request.GET_MAX_OFFSET, offsets({1: 0}))
    assert parts.member.bounds(QUEUES[1], parts.soon) == QueueBounds(0, 0, 0)


def slave_only(slave: str) -> Command:
    body = {
        "brokerDatas": [{"brokerName": "broker-a", "cluster": "c", "brokerAddrs": {"1": slave}}],
        "queueDatas": [{"brokerName": "broker-a", "readQueueNums": 2, "writeQueueNums": 2, "perm": 6}],
    }
    return ok(json.dumps(body).encode())


def test_offsets_go_to_a_slave_while_there_is_no_master(broker: MockBroker, parts: Parts) -> None:
    with MockBroker({Request.UPDATE_CONSUMER_OFFSET: ok(), Request.QUERY_CONSUMER_OFFSET: ok(offset=8)}) as slave:
        broker.on(Request.GET_ROUTEINFO_BY_TOPIC, slave_only(slave.address))
        parts.routes.get("t")
        assert parts.member.commit("g", dict.fromkeys(QUEUES, 8), parts.soon) == {}
        assert [c.ext["commitOffset"] for c in slave.seen(Request.UPDATE_CONSUMER_OFFSET)] == ["8", "8"]
        assert parts.member.committed("g", QUEUES[0], parts.soon) == 8


def test_slave_reports_group_members_while_the_master_is_away(broker: MockBroker, parts: Parts) -> None:
    """Heartbeats go to it, too, and without an answer no queue of the topic would be given to anybody."""
    wanted = ok(b'{"subscriptionTable":{"t":{"subString":"a"}}}')
    ids = ok(b'{"consumerIdList":["one","two"]}')
    with MockBroker({Request.GET_CONSUMER_LIST_BY_GROUP: ids, Request.GET_CONSUMER_CONNECTION_LIST: wanted}) as slave:
        broker.on(Request.GET_ROUTEINFO_BY_TOPIC, slave_only(slave.address))
        assert parts.member.members("g", "t", parts.soon) == ["one", "two"]
        assert parts.member.filters("g", "t", parts.soon) == {"t": Filter("a")}


def test_slave_reports_topic_attributes_while_master_is_away(broker: MockBroker, parts: Parts) -> None:
    """Without an answer nothing would be pulled from it with a filter."""
    with MockBroker({Request.GET_TOPIC_CONFIG: topic_config(**{QUEUE_TYPE: BATCH_QUEUE})}) as slave:
        broker.on(Request.GET_ROUTEINFO_BY_TOPIC, slave_only(slave.address))
        assert parts.kinds.attributes("t", "broker-a", parts.soon) == {QUEUE_TYPE: BATCH_QUEUE}


def test_commit_of_an_unknown_group_pulls_and_commits_again(broker: MockBroker, parts: Parts) -> None:
    """An offset that a new group begins with, without which a member that dies begins elsewhere the next time."""
    made = threading.Event()

    def pulled(call: Call) -> Command:
        made.set()
        return refuse(Response.PULL_NOT_FOUND)

    def stored(call: Call) -> Command:
        return ok() if made.is_set() else refuse(Response.SUBSCRIPTION_GROUP_NOT_EXIST)

    broker.on(Request.PULL_MESSAGE, pulled)
    broker.on(Request.UPDATE_CONSUMER_OFFSET, lambda call: call.answer(stored(call)))
    parts.routes.get("t")
    assert parts.member.commit("g", {QUEUES[0]: 8}, parts.soon) == {}
    assert [c.ext["commitOffset"] for c in broker.seen(Request.UPDATE_CONSUMER_OFFSET)] == ["8", "8"]


def test_slave_without_an_offset_does_not_prove_there_is_none(broker: MockBroker, parts: Parts) -> None:
    """It may not have copied it yet, and a group that begins at its queues' ends would skip what was sent since."""
    none = refuse(Response.QUERY_NOT_FOUND)

    def young(call: Call) -> Command:
        return none if call.command.ext.get("setZeroIfNotFound") == "false" else ok(offset=0)

    with MockBroker({Request.QUERY_CONSUMER_OFFSET: young}) as slave:
        broker.on(Request.GET_ROUTEINFO_BY_TOPIC, slave_only(slave.address))
        parts.routes.get("t")
        with pytest.raises(BrokerNotFound, match="its slave may not have the group's offset yet") as caught:
            parts.member.committed("g", QUEUES[0], parts.soon)
        assert caught.value.retriable


def test_garbled_lock_answer_of_one_broker_spares_the_others(broker: MockBroker, parts: Parts) -> None:
    granted = {"lockOKMQSet": [{"topic": "t", "brokerName": "broker-b", "queueId": 1}]}
    with MockBroker({Request.LOCK_BATCH_MQ: ok(json.dumps(granted).encode())}) as other:
        broker.on(Request.GET_ROUTEINFO_BY_TOPIC, route(2, {"broker-a": broker.address, "broker-b": other.address}))
        broker.on(Request.LOCK_BATCH_MQ, ok(b"{]"))
        queues = parts.member.queues("t", parts.soon)
        assert parts.member.lock("g", queues, parts.soon) == {MessageQueue("t", "broker-b", 1)}


def test_locks_are_requested_per_broker_and_one_may_fail(broker: MockBroker, parts: Parts) -> None:
    with MockBroker() as other:
        broker.on(Request.GET_ROUTEINFO_BY_TOPIC, route(2, {"broker-a": broker.address, "broker-b": other.address}))
        granted = {"lockOKMQSet": [{"topic": "t", "brokerName": "broker-a", "queueId": 1}]}
        broker.on(Request.LOCK_BATCH_MQ, ok(json.dumps(granted).encode()))
        broker.on(Request.UNLOCK_BATCH_MQ, ok())
        queues = parts.member.queues("t", parts.soon)
        assert parts.member.lock("g", queues, parts.soon) == {QUEUES[1]}
        (asked,) = broker.seen(Request.LOCK_BATCH_MQ)
        body = json.loads(bytes(asked.body))
        assert (body["clientId"], body["consumerGroup"]) == (parts.member.client_id, "g")
        assert [item["queueId"] for item in body["mqSet"]] == [0, 1]
        parts.member.unlock("g", queues, parts.soon)
        assert len(broker.seen(Request.UNLOCK_BATCH_MQ)) == len(other.seen(Request.UNLOCK_BATCH_MQ)) == 1


def join(
    parts: Parts, group: str, topic: str = "t", asked: Callable[[str, BrokerRequest], RequestAnswer | None] = nothing
) -> Callable[[Deadline], None]:
    return parts.member.join(group, lambda: Membership({topic: Filter("a")}, versions_ms={topic: 3}), asked, 0.0)


def test_heartbeat_tells_the_subscriptions(broker: MockBroker, parts: Parts) -> None:
    broker.on(Request.HEART_BEAT, ok())
    broker.on(Request.UNREGISTER_CLIENT, ok())
    parts.routes.get("t")
    leave = join(parts, "g")
    with pytest.raises(LocalProtocolError, match="'g'"):
        join(parts, "g")
    parts.member.heartbeat(parts.soon)
    (beat,) = broker.seen(Request.HEART_BEAT)
    (told,) = json.loads(bytes(beat.body))["consumerDataSet"]
    assert (told["groupName"], told["consumeType"], told["messageModel"]) == ("g", "CONSUME_PASSIVELY", "CLUSTERING")
    assert told["subscriptionDataSet"][0]["tagsSet"] == ["a"]
    leave(parts.soon)
    assert broker.seen(Request.UNREGISTER_CLIENT)[0].ext["consumerGroup"] == "g"


def test_what_a_broker_asks_gets_to_the_group(broker: MockBroker, parts: Parts) -> None:
    broker.on(Request.HEART_BEAT, ok())
    parts.routes.get("t")
    asked = threading.Event()
    questions: list[BrokerRequest] = []

    def worker(address: str, question: BrokerRequest) -> RequestAnswer | None:
        questions.append(question)
        asked.set()
        return {QUEUES[0]: 4} if not isinstance(question, MembersChanged) else None

    join(parts, "g", asked=worker)
    parts.member.heartbeat(parts.soon)
    broker.ask(Command(Request.NOTIFY_CONSUMER_IDS_CHANGED, {"consumerGroup": "g"}))
    assert asked.wait(WAIT_S)
    broker.ask(Command(Request.GET_CONSUMER_STATUS_FROM_CLIENT, {"group": "g", "topic": "t"}, opaque=7))
    broker.wait_for(lambda: any(reply.opaque == 7 for reply in broker.replies))
    (reply,) = (reply for reply in broker.replies if reply.opaque == 7)
    assert b'"queueId":0' in bytes(reply.body)
    assert questions[0] == MembersChanged()


# --- a real broker


def test_a_member_of_a_real_group(real: Parts, broker_cluster: LocalBroker, make_topic: Callable[..., str]) -> None:
    """Joins, is seen, pulls what comes while it waits, commits, sends back, gets it again, and locks."""
    topic = make_topic(queues=1)
    group = f"g-{topic}"
    member, soon = real.member, Deadline.after(30.0)
    (queue,) = member.queues(topic, soon)
    subscriptions = {topic: Filter("*"), f"%RETRY%{group}": Filter("*")}
    leave = member.join(
        group,
        lambda: Membership(subscriptions, versions_ms=dict.fromkeys(subscriptions, 1)),
        lambda address, question: None,
        30.0,
    )
    member.heartbeat(soon)
    assert member.members(group, topic, soon) == [member.client_id]
    assert member.filters(group, topic, soon) == subscriptions
    waiting = Told()
    member.pull(PullRequest(group, queue, 0, version_ms=1), soon, waiting)
    real.sender.send(queue, SendRequest("p", b"hello", "TAGS\x01a\x02"), soon)
    answer = waiting.one
    assert isinstance(answer, PullAnswer)
    assert (answer.status, answer.next_offset) == (PullStatus.FOUND, 1)
    (message,) = answer.messages
    assert (message.queue, message.body, message.tags) == (queue, b"hello", "a")
    assert member.commit(group, {queue: 1}, soon) == {}
    assert member.committed(group, queue, soon) == 1
    assert member.bounds(queue, soon) == QueueBounds(0, 1, 0)
    assert member.lock(group, [queue], soon) == {queue}
    member.unlock(group, [queue], soon)
    member.send_back(group, message, 1, 16, soon)
    retry = f"%RETRY%{group}"
    eventually(lambda: bool(member.queues(retry, soon, refresh=True)))
    again = Told()
    (retry_queue,) = member.queues(retry, soon)
    member.pull(PullRequest(group, retry_queue, 0, version_ms=1), soon, again)
    answer = again.one
    assert isinstance(answer, PullAnswer)
    (message,) = answer.messages
    assert (message.topic, message.queue, message.reconsume_times) == (topic, retry_queue, 1)
    leave(soon)
    with pytest.raises(BrokerError):
        member.members(group, topic, soon)


def test_connection_id_is_none_while_down_and_new_on_reconnect(broker: MockBroker, parts: Parts) -> None:
    broker.on(Request.HEART_BEAT, ok())
    assert parts.member.connection("broker-a") is None  # no route says where it is
    parts.member.queues("t", parts.soon)
    join(parts, "g")
    parts.member.heartbeat(parts.soon)
    first = parts.member.connection("broker-a")
    parts.member.heartbeat(parts.soon)
    assert first == parts.member.connection("broker-a") is not None
    broker.drop()
    eventually(lambda: parts.member.connection("broker-a") is None)
    parts.member.heartbeat(parts.soon)
    assert parts.member.connection("broker-a") not in (None, first)


def test_a_broker_that_gives_no_locks_is_one_warning(
    broker: MockBroker, parts: Parts, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    parts.member.queues("t", parts.soon)
    for answer in (refuse(Response.SYSTEM_ERROR), refuse(Response.SYSTEM_ERROR), ok(b'{"lockOKMQSet":[]}')):
        broker.on(Request.LOCK_BATCH_MQ, answer)
        assert parts.member.lock("g", QUEUES, parts.soon) == set()
    assert caplog.text.count("LOCK_BATCH_MQ of ") == 1
    broker.on(Request.LOCK_BATCH_MQ, refuse(Response.SYSTEM_ERROR))
    parts.member.lock("g", QUEUES, parts.soon)
    assert caplog.text.count("LOCK_BATCH_MQ of ") == 2


def test_locks_that_stay_refused_are_warned_of_again(
    broker: MockBroker, parts: Parts, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(complaints, "WARNING_INTERVAL_S", 0.0)
    caplog.set_level(logging.WARNING)
    parts.member.queues("t", parts.soon)
    broker.on(Request.LOCK_BATCH_MQ, refuse(Response.SYSTEM_ERROR))
    for _ in range(3):
        parts.member.lock("g", QUEUES, parts.soon)
    assert caplog.text.count("LOCK_BATCH_MQ of ") == 3
