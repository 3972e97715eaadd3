"""What a consumer answers: read again by our tolerant reader; what Java makes of it is shown in tests/client/test_member.py."""

from __future__ import annotations

import json

from rocketmq_spark.model import MessageQueue
from rocketmq_spark.model.membership import (
    DirectOutcome,
    DirectResult,
    Membership,
    QueueInfo,
    RunningInfo,
    TopicFigures,
)
from rocketmq_spark.wire import bodies
from rocketmq_spark.wire.bodies import GroupMembership
from rocketmq_spark.wire.loose_json import read_json
from rocketmq_spark.wire.properties import parse_subscription

QUEUES = [MessageQueue("t", "b", i) for i in (1, 0)]
KEYS = [(("brokerName", "b"), ("queueId", i), ("topic", "t")) for i in (0, 1)]


def test_offsets_stand_behind_queues_as_keys() -> None:
    body = bodies.consumer_offsets({QUEUES[0]: 7, QUEUES[1]: 5})
    assert body == (
        b'{"messageQueueTable":{{"brokerName":"b","queueId":0,"topic":"t"}:5,'
        b'{"brokerName":"b","queueId":1,"topic":"t"}:7}}'
    )
    assert read_json(body) == {"messageQueueTable": dict(zip(KEYS, (5, 7), strict=True))}
    assert read_json(bodies.consumer_offsets({})) == {"messageQueueTable": {}}


def test_a_result_without_a_remark_has_none() -> None:
    told = json.loads(bodies.direct_result(DirectResult(DirectOutcome.SUCCESS, 12)))
    assert told == {"autoCommit": True, "consumeResult": "CR_SUCCESS", "order": False, "spentTimeMills": 12}
    raised = DirectResult(DirectOutcome.THROW_EXCEPTION, 1, True, False, "ValueError: no")
    assert json.loads(bodies.direct_result(raised))["remark"] == "ValueError: no"


def test_how_a_member_is() -> None:
    info = RunningInfo(
        Membership({}),
        started_ms=1_000,
        ordered=True,
        threads=20,
        properties={"pullBatchSize": "32"},
        queues={QUEUES[1]: QueueInfo(commit_offset=5, cached_count=2, cached_bytes=3 << 20, last_pull_ms=9)},
        topics={"t": TopicFigures(failed=3, consume_ms=1.5)},
        stacks='"main"\n',
    )
    told = read_json(
        bodies.running_info(info, GroupMembership("g", {"t": parse_subscription("a")}, versions_ms={"t": 4}))
    )
    (queue,) = told["mqTable"].values()
    assert (queue["commitOffset"], queue["cachedMsgCount"], queue["cachedMsgSizeInMiB"]) == (5, 2, 3)
    assert (queue["lastPullTimestamp"], queue["lastConsumeTimestamp"]) == (9, 0)
    assert told["statusTable"]["t"]["consumeFailedMsgs"] == 3
    assert told["subscriptionSet"][0]["subString"] == "a"
    assert told["properties"] == {
        "pullBatchSize": "32",
        "PROP_CLIENT_VERSION": "V513",
        "PROP_CONSUMEORDERLY": "true",
        "PROP_CONSUMER_START_TIMESTAMP": "1000",
        "PROP_CONSUME_TYPE": "CONSUME_PASSIVELY",
        "PROP_THREADPOOL_CORE_SIZE": "20",
    }
    assert told["jstack"] == '"main"\n'
