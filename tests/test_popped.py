"""What a Proxy hands out."""

from __future__ import annotations

from rocketmq_spark.model import MessageQueue
from rocketmq_spark.model.message import PoppedMessage


def popped(attempt: int = 1, msg_id: str = "ID", topic: str = "t", group: str | None = None) -> PoppedMessage:
    queue = MessageQueue(topic, "broker-a", 0)
    return PoppedMessage(topic, queue, 0, b"x", None, [], {}, 0, None, msg_id, attempt, group, "receipt", "h:1")


def test_the_first_delivery_is_no_redelivery():
    assert [popped(attempt).reconsume_times for attempt in (1, 2, 5)] == [0, 1, 4]
