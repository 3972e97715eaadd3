"""Values: messages, routes, pulls, sends, groups. They know nothing of the wire, of sockets or of threads."""

from rocketmq_spark.model.message import Message, MessageQueue, ReceivedMessage
from rocketmq_spark.model.pull import (
    MASTER_ID,
    NO_FILTER,
    BrokerData,
    Filter,
    LogState,
    OffsetRange,
    PullAnswer,
    PullRequest,
    PullStatus,
    QueueBounds,
    QueueData,
    QueueEnd,
    TopicRoute,
)
from rocketmq_spark.model.send import Reply, Resent, SendRequest, SendResult, SendStatus, SpooledSend, SpoolMetrics

__all__ = [
    "MASTER_ID",
    "NO_FILTER",
    "BrokerData",
    "Filter",
    "LogState",
    "Message",
    "MessageQueue",
    "OffsetRange",
    "PullAnswer",
    "PullRequest",
    "PullStatus",
    "QueueBounds",
    "QueueData",
    "QueueEnd",
    "ReceivedMessage",
    "Reply",
    "Resent",
    "SendRequest",
    "SendResult",
    "SendStatus",
    "SpoolMetrics",
    "SpooledSend",
    "TopicRoute",
]
