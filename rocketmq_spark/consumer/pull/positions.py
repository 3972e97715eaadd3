"""Group offsets of a ``PullConsumer``: reading them from brokers and looking offsets up. Also its answers to requests of brokers.

Each question must be answered within the request timeout. ``PullAnswers`` runs on the group's own thread, so it may block.
Java's LitePull answers request 307 only; this one also answers ``resetOffsetByTime`` and ``consumerStatus`` without an id.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from numbers import Integral

from rocketmq_spark.base.clock import Deadline
from rocketmq_spark.base.threads import text_of
from rocketmq_spark.consumer.pull.polls import Polls
from rocketmq_spark.consumer.push.offset_store import StoreTrouble
from rocketmq_spark.consumer.push.rebalancing import stacks_of_threads
from rocketmq_spark.consumer.rebalance import Start, StartQuestions, start_offset
from rocketmq_spark.consumer.settings import ConsumerSettings
from rocketmq_spark.errors import OffsetError, OptionError, RocketMQError
from rocketmq_spark.model import MessageQueue, QueueBounds
from rocketmq_spark.model.membership import (
    Answer,
    BrokerRequest,
    InfoAsked,
    MembersChanged,
    Membership,
    OffsetsAsked,
    ResetOffsets,
    RunningInfo,
)
from rocketmq_spark.ports import GroupMember
from rocketmq_spark.queues.environment import Own

logger = logging.getLogger(__name__)

MAX_OFFSET = 2**63 - 1


def check_offset(queue: MessageQueue, offset: object) -> None:
    """Raises ``OffsetError`` for what a user gave and no queue can have."""
    whole = isinstance(offset, Integral) and not isinstance(offset, bool)
    if not whole or not 0 <= offset <= MAX_OFFSET:  # type: ignore[operator]
        raise OffsetError(
            f"the offset is {text_of(offset)}; expected a whole number from 0 to {MAX_OFFSET}",
            topic=queue.topic,
            queue=str(queue),
        )


class Positions:
    """Asks a member of the group. Raises what a question raises."""

    def __init__(self, member: GroupMember, settings: ConsumerSettings) -> None:
        self._member = member
        self._settings = settings
        self._own = Own(settings.environment)
        self._trouble = StoreTrouble(settings.group)

    def queues(self, topic: str, refresh: bool = False) -> Sequence[MessageQueue]:
        """The readable queues of a topic, in an environment its own ones; with ``refresh`` by a route of now."""
        return self._own(self._member.queues(topic, self.soon(), refresh))

    def start(self, queue: MessageQueue) -> Start:
        """Where a queue begins that is new here. Raises ``OptionError`` for one of another environment."""
        queues = self.queues(queue.topic)  # so that its broker is known, too
        if self._settings.environment is not None and queue not in queues:
            name = self._settings.environment.name
            raise OptionError(f"queue {queue} does not belong to environment {name!r}; expected one of {list(queues)}")
        ask = StartQuestions(
            stored=lambda: self._member.committed(self._settings.group, queue, self.soon()),
            max_offset=lambda: self.bounds(queue).max_offset,
            search=lambda epoch_ms: self.at_time(queue, epoch_ms),
        )
        return start_offset(queue, self._settings.consume_from, ask)

    def bounds(self, queue: MessageQueue) -> QueueBounds:
        return self._member.bounds(queue, self.soon())

    def at_time(self, queue: MessageQueue, epoch_ms: int) -> int:
        """The first offset stored at or after a time, the end where all are older."""
        found = self._member.search_offset(queue, epoch_ms, self.soon(), self._settings.group)
        return self.bounds(queue).clamp(found)

    def checked(self, queue: MessageQueue, offset: int) -> int:
        """``offset``, if the queue has it or ends there."""
        check_offset(queue, offset)
        bounds = self.bounds(queue)
        if bounds.clamp(offset) != offset:
            raise OffsetError(
                f"offset {offset} is sought; expected one from {bounds.min_offset} to {bounds.max_offset}",
                topic=queue.topic,
                queue=str(queue),
                remedy="Seek the beginning or the end instead",
            )
        return offset

    def stored(self, queue: MessageQueue) -> int | None:
        """The group's offset, None where it has none."""
        self.queues(queue.topic)
        return self._member.committed(self._settings.group, queue, self.soon(), young_at_zero=False)

    def store(self, offsets: Mapping[MessageQueue, int]) -> dict[MessageQueue, RocketMQError]:
        """Commit; what fails is given, and logged when it begins and when it is over."""
        if not offsets:
            return {}
        failed = self._member.commit(self._settings.group, offsets, self.soon())
        self._trouble.note(offsets, failed)
        return failed

    def soon(self) -> Deadline:
        return Deadline.after(self._settings.request_timeout_s)


class PullAnswers:
    """Of one member. ``look`` has it look at its group soon, ``store`` commits offsets.

    ``missed`` is for resets of queues that are not here: one may be on its way, and where it begins was asked before.
    """

    def __init__(
        self,
        polls: Polls,
        membership: Callable[[], Membership],
        look: Callable[[], None],
        store: Callable[[Mapping[MessageQueue, int]], object],
        missed: Callable[[MessageQueue, int], None] = lambda queue, offset: None,
    ) -> None:
        self._polls = polls
        self._membership = membership
        self._look = look
        self._store = store
        self._missed = missed
        self._started_ms = time.time_ns() // 1_000_000

    def __call__(self, address: str, question: BrokerRequest) -> Answer | None:
        """The answer to the broker at ``address``; None where none is awaited, and for what only a listener could do."""
        match question:
            case MembersChanged():
                logger.info("the broker at %s reports that the members of the group changed", address)
                self._look()
            case ResetOffsets(topic, offsets):
                done = self._polls.reset(offsets)
                logger.warning("offsets of %s are reset by %s: %s", topic, address, done)
                if absent := sorted(offsets.keys() - done.keys()):
                    logger.warning("this member does not have these queues and did not reset them: %s", absent)
                for queue in absent:
                    self._missed(queue, offsets[queue])
                self._store(done)
            case OffsetsAsked(topic):
                infos = self._polls.infos().items()
                return {queue: info.commit_offset or 0 for queue, info in infos if queue.topic == topic}
            case InfoAsked(stacks):
                shown = stacks_of_threads() if stacks else None
                return RunningInfo(self._membership(), self._started_ms, queues=self._polls.infos(), stacks=shown)
        return None
