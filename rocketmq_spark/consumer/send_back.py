"""Failed messages on their way to the retry topic: by the broker, else as a copy, else again later.

Mirrors ``DefaultMQPushConsumerImpl.sendMessageBack``.
"""

from __future__ import annotations

import logging

from rocketmq_spark.clock import Deadline
from rocketmq_spark.codes import SysFlag
from rocketmq_spark.consumer.held import Held
from rocketmq_spark.errors import RocketMQError
from rocketmq_spark.model import ReceivedMessage
from rocketmq_spark.ports import GroupMember

logger = logging.getLogger(__name__)

TIMEOUT_S = 5.0
COPY_TIMEOUT_S = 3.0


class SendBack:
    """Of one group; a message that came again ``max_reconsume_times`` times goes to its dead-letter topic."""

    def __init__(self, port: GroupMember, group: str, max_reconsume_times: int, held: Held) -> None:
        self._port = port
        self._group = group
        self._max = max_reconsume_times
        self._held = held

    def __call__(self, message: ReceivedMessage, level: int) -> bool:
        """Whether brokers have it, to be delivered again. On the copy's way the level is lost, as in Java.

        Of an inner batch a broker could take back all of it or nothing, and refuses.
        """
        single = not message.sys_flag & SysFlag.INNER_BATCH
        if not (single and self._sent_back(message, level)) and not self._copied(message, level):
            return False
        with self._held.lock:
            self._held.counts["sent back"] += 1
        return True

    def _sent_back(self, message: ReceivedMessage, level: int) -> bool:
        try:
            self._port.send_back(self._group, message, level, self._max, Deadline.after(TIMEOUT_S))
        except RocketMQError as e:
            logger.warning("message %s could not be sent back, a copy is sent: %s", message.msg_id, e)
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
