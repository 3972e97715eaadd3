"""Messages that cannot be decoded go through here, as ``badMessage`` says: an error, rows without a body, or none."""

from __future__ import annotations

import logging

from rocketmq_spark.errors import DecodeError
from rocketmq_spark.model import MessageQueue

logger = logging.getLogger(__name__)

_SHOWN = 10
_REMEDY = (
    "Look at it with: rocketmq-spark tail; to go on, set option 'badMessage' to 'null' (a row whose body is null, with "
    "the cause in column decodeError of metadata=full) or to 'skip' (it is counted and logged)"
)


def error(queue: MessageQueue, where: str, why: str) -> DecodeError:
    """The error of ``fail``; ``where`` names message and offset."""
    return DecodeError(f"{where} cannot be decoded: {why}", topic=queue.topic, queue=str(queue), remedy=_REMEDY)


class Bad:
    """What to do about bad messages, and how many a task has met. The first ones are logged each, then their number."""

    def __init__(self, policy: str = "fail") -> None:
        self.policy = policy
        self.count = 0

    @property
    def fails(self) -> bool:
        return self.policy == "fail"

    @property
    def skips(self) -> bool:
        return self.policy == "skip"

    def met(self, queue: MessageQueue, offset: int, why: str) -> None:
        """Raises, or counts it."""
        if self.fails:
            raise error(queue, f"the message at offset {offset}", why)
        self.count += 1
        if self.count <= _SHOWN:
            done = "left out" if self.skips else "a row without its body"
            logger.warning("%s: the message at offset %d cannot be decoded, %s: %s", queue, offset, done, why)

    def summary(self) -> None:
        """At the end of a task."""
        if self.count > _SHOWN:
            logger.warning("%d messages in all cannot be decoded; badMessage=%s", self.count, self.policy)
