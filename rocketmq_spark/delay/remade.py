"""Whether the messages of a queue are those that were read: its topic may have been made again, or its broker may have come back
without its last messages. A broker is asked from where on it has younger ones than the youngest that was read.
"""

from __future__ import annotations

import logging
from functools import partial

from rocketmq_spark.base.clock import Deadline
from rocketmq_spark.delay.commits import REQUEST_S
from rocketmq_spark.delay.release import Seen, newest_before
from rocketmq_spark.model import MessageQueue, QueueBounds
from rocketmq_spark.ports import GroupMember

logger = logging.getLogger(__name__)

# Of a queue without a message before its beginning: any that lies there later is another one.
LONG_AGO_MS = 1


class Remade:
    """Asks brokers as a group. Its methods raise what questions raise."""

    def __init__(self, member: GroupMember, group: str) -> None:
        self._member = member
        self._group = group

    def is_same(self, queue: MessageQueue, seen: Seen) -> bool:
        """Whether it seems so. The next message does not show it: a pull goes on behind what was read as if nothing were, or
        at the new end.
        """
        if not seen.newest_ms or self._since(queue, seen.newest_ms + 1) >= seen.stored:
            return True
        return self._member.bounds(queue, Deadline.after(REQUEST_S)).min_offset >= seen.stored

    def other_from(self, queue: MessageQueue, stored: int, newest_ms: int, bounds: QueueBounds) -> int | None:
        """From where on the messages are others than those that were read, None if they are the same."""
        at = stored if stored <= bounds.max_offset else 0
        if newest_ms:
            at = self._since(queue, newest_ms + 1)
        at = max(at, bounds.min_offset)
        if at >= stored:
            return None
        logger.warning(
            "%s was read up to %d, and has younger messages from %d on: its topic was made again, or its broker lost its "
            "last messages. It is read from there on; what was stored of the old ones is sent", queue, stored, at,
        )  # fmt: skip
        return at

    def newest_of(self, queue: MessageQueue, stored: int, now_ms: int) -> int:
        """When the last message before ``stored`` was stored."""
        return newest_before(stored, now_ms, partial(self._since, queue)) or LONG_AGO_MS

    def _since(self, queue: MessageQueue, epoch_ms: int) -> int:
        return self._member.search_offset(queue, epoch_ms, Deadline.after(REQUEST_S), self._group)
