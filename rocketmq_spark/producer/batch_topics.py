"""Which topics store a batch as one message (``queue.type=BatchCQ``): brokers are asked once for each topic.

They store a batch so if it has an id of its own. While nobody says what a topic is, its batches have none: then their messages
are stored one by one, which every reader and filter understands.
"""

from __future__ import annotations

from rocketmq_spark.clock import Deadline
from rocketmq_spark.errors import RocketMQError
from rocketmq_spark.ports import Sender

AGAIN_S = 30.0


class BatchTopics:
    """Of one producer, or of one task."""

    def __init__(self, sender: Sender) -> None:
        self._sender = sender
        self._known: dict[str, bool] = {}
        self._unknown: dict[str, Deadline] = {}

    def has(self, topic: str, deadline: Deadline) -> bool:
        known = self._known.get(topic)
        if known is not None:
            return known
        again = self._unknown.get(topic)
        if again is not None and not again.expired:
            return False
        try:
            said = self._sender.keeps_batches(topic, deadline)
        except RocketMQError:  # the sends that follow say it better
            said = None
        if said is None:
            self._unknown[topic] = Deadline.after(AGAIN_S)
            return False
        self._known[topic] = said
        return said
