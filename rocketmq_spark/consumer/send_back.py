"""Failed messages on their way to the retry topic: by the broker, else as a copy, else again later.

Mirrors ``DefaultMQPushConsumerImpl.sendMessageBack`` and, for ordered messages, ``ConsumeMessageOrderlyService.sendMessageBack``.
"""

from __future__ import annotations

import logging

from rocketmq_spark.clock import Deadline
from rocketmq_spark.codes import SysFlag
from rocketmq_spark.consumer.held import MemberState
from rocketmq_spark.errors import RocketMQError
from rocketmq_spark.model import ReceivedMessage
from rocketmq_spark.ports import GroupMember
from rocketmq_spark.wire.names import dlq_topic

logger = logging.getLogger(__name__)

TIMEOUT_S = 5.0
COPY_TIMEOUT_S = 3.0
DEAD = -1  # the level of what is to be a dead letter
DROPPED = "dropped: the group is broadcasting"  # instead of being sent back


class SendBack:
    """Of one group; a message that came again ``max_reconsume_times`` times goes to its dead-letter topic."""

    def __init__(self, port: GroupMember, group: str, max_reconsume_times: int, held: MemberState) -> None:
        self._port = port
        self._group = group
        self._max = max_reconsume_times
        self._held = held

    def __call__(self, message: ReceivedMessage, level: int) -> bool:
        """Whether brokers have it, to be delivered again. On the copy's way the level is lost, as in Java."""
        taken = self._sent_back(message, level) or self._copied(message, level)
        return self._noted(message, taken, level < 0 or message.reconsume_times >= self._max)

    def dead(self, message: ReceivedMessage) -> bool:
        """Whether brokers have it among the dead letters, after its last attempt in place.

        A copy says how often the message was tried. The broker that stores it knows of no attempt: request 36 would have it
        delivered again. So that is asked, at once for a dead letter, only for what cannot be copied.
        """
        return self._noted(message, self._copied(message, 0) or self._sent_back(message, DEAD), True)

    def _noted(self, message: ReceivedMessage, taken: bool, dead: bool) -> bool:
        if not taken:
            return False
        if dead:
            text = "message %s of %s is a dead letter now, in topic %s, after attempt %d"
            attempt = message.reconsume_times + 1
            logger.warning(text, message.msg_id, message.queue, dlq_topic(self._group), attempt)
        with self._held.lock:
            self._held.counts["sent back"] += 1
        return True

    def _sent_back(self, message: ReceivedMessage, level: int) -> bool:
        if message.sys_flag & SysFlag.INNER_BATCH:
            return False  # a broker could take back the whole batch or nothing, and refuses
        try:
            self._port.send_back(self._group, message, level, self._max, Deadline.after(TIMEOUT_S))
        except RocketMQError as e:
            logger.warning("message %s could not be sent back by its broker: %s", message.msg_id, e)
            return False
        return True

    def _copied(self, message: ReceivedMessage, level: int) -> bool:
        """A copy that may not come again becomes a dead letter."""
        max_times = self._max if level >= 0 else 0
        try:
            self._port.send_to_retry(self._group, message, max_times, Deadline.after(COPY_TIMEOUT_S))
        except RocketMQError as e:
            logger.warning("message %s could not be copied to the retry topic: %s", message.msg_id, e)
            return False
        return True
