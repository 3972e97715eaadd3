"""What brokers ask a ``PullConsumer``, and tools through them. Called on the group's own thread, so that it may block.

Java's LitePull answers 307 alone; here ``resetOffsetByTime`` and ``consumerStatus`` without an id work, too.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping

from rocketmq_spark.consumer.answers import stacks_of_threads
from rocketmq_spark.consumer.polls import Polls
from rocketmq_spark.membership import (
    Answer,
    InfoAsked,
    MembersChanged,
    Membership,
    OffsetsAsked,
    Question,
    ResetOffsets,
    RunningInfo,
)
from rocketmq_spark.model import MessageQueue

logger = logging.getLogger(__name__)


class PullAnswers:
    """Of one member. ``look`` has it look at its group soon, ``store`` commits offsets."""

    def __init__(
        self,
        polls: Polls,
        membership: Callable[[], Membership],
        look: Callable[[], None],
        store: Callable[[Mapping[MessageQueue, int]], object],
    ) -> None:
        self._polls = polls
        self._membership = membership
        self._look = look
        self._store = store
        self._started_ms = time.time_ns() // 1_000_000

    def __call__(self, address: str, question: Question) -> Answer | None:
        """The answer to the broker at ``address``; None where none is awaited, and for what only a listener could do."""
        match question:
            case MembersChanged():
                logger.info("the members of the group have changed, says %s", address)
                self._look()
            case ResetOffsets(topic, offsets):
                done = self._polls.reset(offsets)
                logger.warning("offsets of %s are reset by %s: %s", topic, address, done)
                if absent := sorted(offsets.keys() - done.keys()):
                    logger.warning("this member does not have these queues and did not reset them: %s", absent)
                self._store(done)
            case OffsetsAsked(topic):
                infos = self._polls.infos().items()
                return {queue: info.commit_offset or 0 for queue, info in infos if queue.topic == topic}
            case InfoAsked(stacks):
                shown = stacks_of_threads() if stacks else None
                return RunningInfo(self._membership(), self._started_ms, queues=self._polls.infos(), stacks=shown)
        return None
