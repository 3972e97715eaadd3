"""JSON bodies of a consumer's answers to brokers, as fastjson writes them: some have objects as keys.

Mirrors ``GetConsumerStatusBody``, ``ConsumerRunningInfo`` and ``ConsumeMessageDirectlyResult``; topic names are those
on the wire.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from rocketmq_spark.base.codes import VERSION
from rocketmq_spark.model import MessageQueue
from rocketmq_spark.model.membership import DirectResult, QueueInfo, RunningInfo, TopicFigures
from rocketmq_spark.wire.bodies import GroupMembership, subscription_data

_MIB = 1 << 20


def consumer_offsets(offsets: Mapping[MessageQueue, int]) -> bytes:
    """Answer to GET_CONSUMER_STATUS_FROM_CLIENT."""
    return b'{"messageQueueTable":%b}' % _by_queue(offsets)


def direct_result(result: DirectResult) -> bytes:
    """Answer to CONSUME_MESSAGE_DIRECTLY."""
    values = {
        "autoCommit": result.auto_commit,
        "consumeResult": result.outcome.value,
        "order": result.ordered,
        "remark": result.remark,
        "spentTimeMills": result.spent_ms,
    }
    return _dump({name: value for name, value in values.items() if value is not None})


def running_info(info: RunningInfo, membership: GroupMembership) -> bytes:
    """Answer to GET_CONSUMER_RUNNING_INFO; ``membership`` is that of the heartbeats, with names on the wire."""
    properties = {
        **info.properties,
        "PROP_CLIENT_VERSION": f"V{VERSION}",
        "PROP_CONSUMEORDERLY": str(info.ordered).lower(),
        "PROP_CONSUMER_START_TIMESTAMP": str(info.started_ms),
        "PROP_CONSUME_TYPE": membership.consume_type,
        "PROP_THREADPOOL_CORE_SIZE": str(info.threads),
    }
    parts = {
        "mqPopTable": b"{}",
        "mqTable": _by_queue({queue: _queue_info(of_queue) for queue, of_queue in info.queues.items()}),
        "properties": _dump(properties),
        "statusTable": _dump({topic: _figures(figures) for topic, figures in sorted(info.topics.items())}),
        "subscriptionSet": _dump(subscription_data(membership)),
        "userConsumerInfo": b"{}",
    }
    if info.stacks is not None:
        parts["jstack"] = _dump(info.stacks)
    return b"{%b}" % b",".join(b'"%b":%b' % (name.encode(), part) for name, part in parts.items())


def _queue_info(info: QueueInfo) -> dict[str, Any]:
    """Figures of a queue. Java requires every number, so unknown ones are 0."""
    return {
        "cachedMsgCount": info.cached_count,
        "cachedMsgMaxOffset": info.cached_max_offset or 0,
        "cachedMsgMinOffset": info.cached_min_offset or 0,
        "cachedMsgSizeInMiB": info.cached_bytes // _MIB,
        "commitOffset": info.commit_offset or 0,
        "droped": info.dropped,
        "lastConsumeTimestamp": info.last_consume_ms or 0,
        "lastLockTimestamp": info.last_lock_ms or 0,
        "lastPullTimestamp": info.last_pull_ms or 0,
        "locked": info.locked,
        "transactionMsgCount": 0,
        "transactionMsgMaxOffset": 0,
        "transactionMsgMinOffset": 0,
        "tryUnlockTimes": 0,
    }


def _figures(figures: TopicFigures) -> dict[str, Any]:
    """Figures of a topic; unknown figures are 0, as in ``_queue_info``."""
    return {
        "consumeFailedMsgs": figures.failed,
        "consumeFailedTPS": figures.failed_per_s,
        "consumeOKTPS": figures.consumed_per_s,
        "consumeRT": figures.consume_ms or 0.0,
        "pullRT": figures.pull_ms or 0.0,
        "pullTPS": figures.pulled_per_s,
    }


def _by_queue(table: Mapping[MessageQueue, Any]) -> bytes:
    """A map with queues as keys. Objects as keys are not JSON, but Java writes and reads them."""
    entries = (
        b"%b:%b" % (_dump({"brokerName": q.broker_name, "queueId": q.queue_id, "topic": q.topic}), _dump(value))
        for q, value in sorted(table.items())
    )
    return b"{%b}" % b",".join(entries)


def _dump(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()
