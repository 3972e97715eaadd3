"""Offsets of a group's queues as a ``PullConsumer`` asks for and stores them, each question within a request's time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from numbers import Integral

from rocketmq_spark.clock import Deadline
from rocketmq_spark.consumer.offset_store import StoreTrouble
from rocketmq_spark.consumer.pull_settings import PullConsumerSettings
from rocketmq_spark.consumer.start_offset import Start, StartQuestions, start_offset
from rocketmq_spark.errors import OffsetError, OptionError, RocketMQError
from rocketmq_spark.failures import text_of
from rocketmq_spark.model import MessageQueue, QueueBounds
from rocketmq_spark.ports import GroupMember
from rocketmq_spark.queues.environment import Own

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

    def __init__(self, member: GroupMember, settings: PullConsumerSettings) -> None:
        self._member = member
        self._settings = settings
        self._own = Own(settings.environment)
        self._trouble = StoreTrouble(settings.group)

    def queues(self, topic: str) -> Sequence[MessageQueue]:
        """The readable queues of a topic, in an environment its own ones."""
        return self._own(self._member.queues(topic, self.soon()))

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
        return self.bounds(queue).clamp(self._member.search_offset(queue, epoch_ms, self.soon()))

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
