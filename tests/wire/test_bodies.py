"""Bodies against what the Java classes print, and against captured exchanges."""

import json
from dataclasses import replace

import pytest

from rocketmq_spark.base.secret import Secret
from rocketmq_spark.errors import LocalProtocolError, RemoteProtocolError
from rocketmq_spark.model import BrokerData, MessageQueue, QueueBounds, QueueData, TopicRoute
from rocketmq_spark.wire import bodies, header
from rocketmq_spark.wire.bodies import ConsumeProgress, GroupMembership, TopicConfig
from rocketmq_spark.wire.properties import parse_subscription
from tests.harness import check_decoder, unhex, vectors
from tests.helpers import raising

LIVE = {case["label"]: case for case in vectors("live_exchanges")}


def golden(kind):
    cases = [case for case in vectors("json_bodies") if case["kind"] == kind]
    assert cases
    return pytest.mark.parametrize("case", cases, ids=range(len(cases)))


def live(label, side="response"):
    return header.decode(unhex(LIVE[label][side])[4:]).body


def short(queue):
    return f"{queue.broker_name}:{queue.queue_id}"


@golden("TopicRouteData")
def test_routes(case):
    expected = TopicRoute(
        topic="T",
        queues=tuple(QueueData(e["broker"], e["read"], e["write"], e["perm"]) for e in case["expected"]),
        brokers={
            e["broker"]: BrokerData(e["broker"], e["cluster"], {int(i): a for i, a in e["addrs"].items()})
            for e in case["expected"]
        },
        order_conf=case["order_topic_conf"],
    )
    for encoding in ("encoded", "encoded_standard"):
        route = bodies.route("T", unhex(case[encoding]))
        flags = {q.broker_name: q.topic_sys_flag for q in route.queues}
        queues = tuple(QueueData(q.broker_name, q.read_queues, q.write_queues, q.perm) for q in route.queues)
        brokers = {name: replace(data, has_acting_master=False) for name, data in route.brokers.items()}
        assert (queues, brokers, route.order_conf) == (expected.queues, expected.brokers, expected.order_conf)
        for told in json.loads(unhex(case["encoded_standard"]))["brokerDatas"]:
            data = route.brokers[told["brokerName"]]
            unwritten = [not q.perm & 2 for q in queues if q.broker_name == data.broker_name]
            assert data.has_acting_master is (
                told["enableActingMaster"] and data.master is not None and all(unwritten) and any(unwritten)
            )
        assert all(0 <= flag < 4 for flag in flags.values())
        check_decoder(lambda data: bodies.route("T", data), unhex(case[encoding]), route)


def test_live_routes_of_old_and_new_clients_are_equal():
    new = bodies.route("CapA", live("route standard json"))
    assert new == bodies.route("CapA", live("route bare numeric keys (request version 300)"))
    assert new.brokers["broker-a"].master == "127.0.0.1:21911"
    assert [short(queue) for queue in new.readable_queues()] == ["broker-a:0", "broker-a:1", "broker-a:2"]
    assert len(new.writable_queues()) == 2
    assert not new.static


def test_static_topics_are_noticed():
    body = b'{"brokerDatas":[],"queueDatas":[],"topicQueueMappingByBroker":{"b":{"epoch":1}}}'
    assert bodies.route("T", body).static


@golden("ClusterInfo")
def test_clusters(case):
    cluster = bodies.cluster(unhex(case["encoded"]))
    addresses = {name: {str(i): a for i, a in broker.addresses.items()} for name, broker in cluster.brokers.items()}
    assert addresses == case["expected"]
    assert {name for members in cluster.clusters.values() for name in members} <= set(cluster.brokers)
    check_decoder(bodies.cluster, unhex(case["encoded"]), cluster)


@golden("TopicStatsTable")
def test_topic_stats(case):
    stats = bodies.topic_stats("T", unhex(case["encoded"]))
    assert {short(q): [b.min_offset, b.max_offset, b.last_update_ms] for q, b in stats.items()} == case["expected"]
    assert {queue.topic for queue in stats} <= {"T"}
    check_decoder(lambda data: bodies.topic_stats("T", data), unhex(case["encoded"]), stats)


def test_live_topic_stats():
    stats = bodies.topic_stats("CapA", live("topic stats (object keys)"))
    assert stats[MessageQueue("CapA", "broker-a", 2)] == QueueBounds(0, 0, 0)
    assert stats[MessageQueue("CapA", "broker-a", 0)].max_offset == 9


def test_topic_stats_in_another_order_are_the_same():
    entry = b'{"brokerName":"b","queueId":%d,"topic":"T"}:{"lastUpdateTimestamp":7,"maxOffset":9,"minOffset":1}'
    usual = b'{"offsetTable":{' + entry % 0 + b"," + entry % 1 + b'},"topicPutTps":0.0}'
    other = usual.replace(b'"lastUpdateTimestamp":7,', b"").replace(
        b'"minOffset":1', b'"minOffset":1,"lastUpdateTimestamp":7'
    )
    assert other != usual
    assert bodies.topic_stats("T", other) == bodies.topic_stats("T", usual)
    assert len(bodies.topic_stats("T", usual)) == 2


def test_topic_stats_of_many_queues_are_read_without_json(monkeypatch):
    """0.03 s instead of 0.2."""
    key = '{"brokerName":"broker-a","queueId":%d,"topic":"T"}'
    value = '{"lastUpdateTimestamp":1795159949122,"maxOffset":3,"minOffset":0}'
    body = '{"offsetTable":{%s},"topicPutTps":0.0}' % ",".join(f"{key % i}:{value}" for i in range(5000))  # noqa: UP031
    monkeypatch.setattr(bodies, "_entries_by_queue", raising(AssertionError("json")))
    assert len(bodies.topic_stats("T", body.encode())) == 5000


@golden("ConsumeStats")
def test_consume_stats(case):
    stats = bodies.consume_stats(unhex(case["encoded"]))
    numbers = {
        short(q): [p.broker_offset, p.consumer_offset, p.pull_offset, p.last_timestamp_ms] for q, p in stats.items()
    }
    assert numbers == case["expected"]
    check_decoder(bodies.consume_stats, unhex(case["encoded"]), stats)


def test_live_consume_stats():
    stats = bodies.consume_stats(live("consume stats (object keys)"))
    assert stats[MessageQueue("CapA", "broker-a", 0)] == ConsumeProgress(9, 2, 2, 1795159949114)


@golden("ResetOffsetBody")
def test_reset_offsets(case):
    offsets = bodies.reset_offsets(unhex(case["encoded"]))
    assert {short(queue): offset for queue, offset in offsets.items()} == case["expected"]
    check_decoder(bodies.reset_offsets, unhex(case["encoded"]), offsets)


def test_live_reset_offsets():
    offsets = bodies.reset_offsets(live("reset (object keys)"))
    assert offsets == {MessageQueue("CapA", "broker-a", i): 0 for i in range(3)}


@golden("LockBatchRequestBody")
def test_lock_requests(case):
    queues = bodies.queues_to_lock(unhex(case["encoded"]))
    assert sorted(map(short, queues)) == sorted(case["expected"])
    java = json.loads(unhex(case["encoded"]))
    ours = json.loads(bodies.lock_request(java["consumerGroup"], java["clientId"], queues, java["onlyThisBroker"]))
    java["mqSet"].sort(key=lambda item: (item["topic"], item["brokerName"], item["queueId"]))
    assert ours == java


@golden("LockBatchResponseBody")
def test_locked_queues(case):
    assert sorted(map(short, bodies.locked_queues(unhex(case["encoded"])))) == sorted(case["expected"])


def test_live_lock():
    assert bodies.locked_queues(live("lock")) == [MessageQueue("CapA", "broker-a", 0)]
    assert bodies.queues_to_lock(live("lock", "request")) == [MessageQueue("CapA", "broker-a", 0)]


@golden("HeartbeatData")
def test_heartbeats(case):
    expected = case["expected"]
    memberships = [
        GroupMembership(
            group=consumer["groupName"],
            subscriptions={s["topic"]: parse_subscription(s["subString"]) for s in consumer["subscriptionDataSet"]},
            consume_type=consumer["consumeType"],
            message_model=consumer["messageModel"],
            consume_from_where=consumer["consumeFromWhere"],
            unit_mode=consumer["unitMode"],
            versions_ms={one["topic"]: one["subVersion"] for one in consumer["subscriptionDataSet"]},
        )
        for consumer in expected["consumerDataSet"]
    ]
    body = bodies.heartbeat(expected["clientID"], [p["groupName"] for p in expected["producerDataSet"]], memberships)
    assert json.loads(body) == expected == json.loads(unhex(case["encoded"]))


def test_a_producers_heartbeat_names_no_consumer():
    body = json.loads(bodies.heartbeat("client", ["pg"]))
    assert body["consumerDataSet"] == []
    assert body["producerDataSet"] == [{"groupName": "pg"}]


def test_live_lists():
    assert bodies.consumer_ids(live("consumer list")) == ["10.0.0.1@A"]
    assert bodies.topic_list(b'{"brokerAddr":null,"topicList":["b","a"]}') == ["a", "b"]
    assert bodies.topic_list(b'{"topicList":null}') == []
    assert bodies.group_list(b'{"groupList":["g"]}') == ["g"]


def test_a_member_with_two_connections_is_listed_once():
    assert bodies.consumer_ids(b'{"consumerIdList":["b","a","b"]}') == ["a", "b"]


def test_live_topic_config():
    assert bodies.topic_config(live("topic config")) == TopicConfig("CapA", 3, 2, 6, "SINGLE_TAG", 0, False, {})


def test_attributes_of_a_topic():
    body = b'{"topicName":"t","readQueueNums":1,"writeQueueNums":1,"perm":6,"attributes":{"message.type":"FIFO"}}'
    assert bodies.topic_config(body).attributes == {"message.type": "FIFO"}


def test_tables_and_groups():
    assert bodies.runtime_info(b'{"table":{"brokerVersionDesc":"V5_5_0","n":1}}') == {
        "brokerVersionDesc": "V5_5_0",
        "n": "1",
    }
    body = b'{"dataVersion":{"counter":1},"subscriptionGroupTable":{"g":{"groupName":"g","retryMaxTimes":16}}}'
    assert bodies.subscription_groups(body)["g"]["retryMaxTimes"] == 16
    assert json.loads(bodies.subscription_group("g", consumeEnable=True)) == {"groupName": "g", "consumeEnable": True}


def test_broker_configuration_as_lines():
    body = b"brokerName=broker-a\nurl=http://a/?b=c\n\nnonsense\n"
    assert bodies.read_config(body) == {"brokerName": "broker-a", "url": "http://a/?b=c"}
    assert bodies.write_config({"maxTransferCountOnMessageInMemory": "1024", "path": "a\\b\u00e9"}) == (
        b"maxTransferCountOnMessageInMemory=1024\npath=a\\\\b\\u00e9\n"
    )
    assert (
        bodies.write_config({"a": Secret("s3cret")}) == b"a=s3cret\n"
    )  # what ``broker_config`` returns may be sent back
    for name, value in (("a=b", "c"), ("", "c"), ("a", "b\nc=d")):
        with pytest.raises(LocalProtocolError):
            bodies.write_config({name: value})


@pytest.mark.parametrize(
    ("read", "body"),
    [
        (lambda b: bodies.route("T", b), b""),
        (lambda b: bodies.route("T", b), b"[]"),
        (lambda b: bodies.route("T", b), b'{"queueDatas":[{"brokerName":"b"}]}'),
        (lambda b: bodies.route("T", b), b'{"brokerDatas":[{"brokerName":"b","brokerAddrs":{"x":"h:1"}}]}'),
        (lambda b: bodies.topic_stats("T", b), b'{"offsetTable":{"q":{}}}'),
        (lambda b: bodies.topic_stats("T", b), b'{"offsetTable":[1]}'),
        (lambda b: bodies.topic_stats("T", b), b'{"offsetTable":{{"brokerName":"b","queueId":0}:{"minOffset":1}}}'),
        (bodies.topic_list, b'{"topicList":5}'),
        (bodies.consumer_ids, b"null"),
        (bodies.topic_config, b"{}"),
        (bodies.locked_queues, b'{"lockOKMQSet":[{}]}'),
        (bodies.runtime_info, b'{"table":[1]}'),
        (bodies.read_config, b"a=\xff"),
        (bodies.subscription_groups, b'{"subscriptionGroupTable":{"g":1}}'),
    ],
)
def test_unexpected_shapes_are_refused(read, body):
    with pytest.raises(RemoteProtocolError):
        read(body)


def of_queues(*counts: object) -> bytes:
    queues = [{"brokerName": f"b{i}", "readQueueNums": n, "writeQueueNums": 1, "perm": 6} for i, n in enumerate(counts)]
    return json.dumps({"queueDatas": queues, "brokerDatas": []}).encode()


@pytest.mark.parametrize(
    "counts", [(2**31,), (-1,), (200_001,), (150_000, 50_001), (1.5,), (1e300,), ("9" * 5000,), (None,)], ids=str
)
def test_a_topic_has_no_more_queues_than_anybody_means(counts):
    with pytest.raises(RemoteProtocolError, match="route"):
        bodies.route("t", of_queues(*counts))


def test_a_topic_may_have_very_many_queues():
    assert [each.read_queues for each in bodies.route("t", of_queues(150_000, 50_000)).queues] == [150_000, 50_000]


@pytest.mark.parametrize("offset", [2**63, -(2**63) - 1, 10**30, 1e30])
def test_an_offset_is_a_long(offset):
    """In whatever order its broker writes them."""
    queue = '{"brokerName":"b","queueId":0,"topic":"t"}'
    for body in (
        f'{{"offsetTable":{{{queue}:{{"lastUpdateTimestamp":1,"maxOffset":{offset},"minOffset":0}}}},"topicPutTps":0.0}}',
        f'{{"offsetTable":{{{queue}:{{"maxOffset":{offset},"minOffset":0,"lastUpdateTimestamp":1}}}}}}',
    ):
        with pytest.raises(RemoteProtocolError, match="topic statistics"):
            bodies.topic_stats("t", body.encode())
    with pytest.raises(RemoteProtocolError, match="offsets"):
        bodies.reset_offsets(f'{{"offsetTable":{{{queue}:{offset}}}}}'.encode())


def test_topic_list_leaves_out_names_that_cannot_be_queried():
    assert bodies.topic_list(b'{"topicList":["u","","a\\ud800","\xc3\xa9","t"]}') == ["t", "u", "\xe9"]
