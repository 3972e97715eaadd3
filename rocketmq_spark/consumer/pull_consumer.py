"""A consumer that asks for messages: what its user calls. Mirrors ``DefaultLitePullConsumer``.

It has no thread of its own: what must happen now and then happens while a poll waits, or when it begins. One thread
polls; ``close`` may be called by another.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from rocketmq_spark.clock import Clock
from rocketmq_spark.closing import Closing
from rocketmq_spark.consumer.assigned import Part
from rocketmq_spark.consumer.polls import Polls
from rocketmq_spark.consumer.positions import Positions
from rocketmq_spark.consumer.pull_settings import PullConsumerSettings
from rocketmq_spark.consumer.subscribed import Subscribed
from rocketmq_spark.consumer.subscriptions import filter_of
from rocketmq_spark.consumer.upkeep import Upkeep
from rocketmq_spark.errors import ClosedError, LocalProtocolError, RocketMQError
from rocketmq_spark.model import MessageQueue, ReceivedMessage
from rocketmq_spark.ports import GroupMember

# Makes one ``pyarrow.RecordBatch`` of the stored messages of several parts. (This room does not know Arrow.)
ToArrow = Callable[[Sequence[Part]], Any]
ARROW_PARTS = 64


class PullConsumer(Closing):
    """Gives messages of topics that its group shares, or of queues that its user names. ``close`` it at the end.

    Delivery is at least once: what a poll gave counts as finished when the next poll begins, or ``commit`` is called, so
    that messages of a poll that nothing follows come again after a restart.
    """

    def __init__(
        self, member: GroupMember, settings: PullConsumerSettings, to_arrow: ToArrow, clock: Clock | None = None
    ) -> None:
        self._settings = settings
        self._to_arrow = to_arrow
        clock = clock or Clock()
        self._polls = Polls(member, settings, clock)
        self._positions = Positions(member, settings)
        self._shared = Subscribed(member, settings.group, self._positions, clock, self._polls.wake)
        self._upkeep = Upkeep(settings, self._polls, self._positions, self._shared, clock)
        self._named = False

    # --- queues

    def queues(self, topic: str) -> Sequence[MessageQueue]:
        """The readable queues of a topic, sorted. Raises ``RouteNotFound`` when there is no such topic."""
        return self._positions.queues(topic)

    def subscribe(self, topic: str, tags: str | None = None, sql: str | None = None) -> None:
        """Share the topic's queues with the group: they are assigned, and given up, while polls wait.

        ``tags`` are one or several (``a || b``), ``sql`` an SQL92 expression for brokers that are configured for it; not
        both. All members should want the same of a topic. Raises ``RouteNotFound`` when there is no such topic.
        """
        self._polls.check_open()
        if self._named:
            raise _exclusive()
        wanted = filter_of(tags, sql)
        self._polls.filters = {**self._polls.filters, topic: wanted}
        self._shared.set(topic, wanted)

    def unsubscribe(self, topic: str) -> None:
        """Give the topic's queues up, after what is finished was committed."""
        self._polls.check_open()
        if topic in self._shared.topics:
            self._shared.set(topic, None)
            self._upkeep.rebalance()

    def assign(self, queues: Iterable[MessageQueue]) -> None:
        """Read these queues, all of their messages, and none of those that were assigned before.

        A new one begins at the group's offset, or where option 'consumeFromWhere' says; raises when that cannot be found
        out, and then nothing has changed. Groups know nothing of it: members that subscribe share all queues all the same.
        """
        self._polls.check_open()
        if self._shared.topics:
            raise _exclusive()
        known = set(self._polls.queues())
        starts = {q: None if q in known else self._positions.start(q) for q in sorted(set(queues))}
        self._named = True
        self._upkeep.have(starts)

    def assignment(self) -> list[MessageQueue]:
        """The queues that are read now, sorted."""
        return self._polls.queues()

    def pause(self, *queues: MessageQueue) -> None:
        """Give no messages of these queues until ``resume``. What was pulled is kept."""
        self._polls.pause(queues, True)

    def resume(self, *queues: MessageQueue) -> None:
        """Give messages of these queues again."""
        self._polls.pause(queues, False)

    # --- positions

    def seek(self, queue: MessageQueue, offset: int) -> None:
        """Go on at ``offset``, which is committed next. Raises ``OffsetError`` where the queue has no such offset."""
        self._polls.seek([queue], lambda queue: self._positions.checked(queue, offset))

    def seek_to_beginning(self, *queues: MessageQueue) -> None:
        """Go on at the first message kept, of all assigned queues if none is named."""
        self._polls.seek(queues, lambda queue: self._positions.bounds(queue).min_offset)

    def seek_to_end(self, *queues: MessageQueue) -> None:
        """Go on behind the last message there is, of all assigned queues if none is named."""
        self._polls.seek(queues, lambda queue: self._positions.bounds(queue).max_offset)

    def seek_to_timestamp(self, epoch_ms: int, *queues: MessageQueue) -> None:
        """Go on at the first message stored at or after ``epoch_ms``, ms since 1970; at the end where all are older.

        Of all assigned queues if none is named.
        """
        self._polls.seek(queues, lambda queue: self._positions.at_time(queue, epoch_ms))

    def commit(self, offsets: Mapping[MessageQueue, int] | None = None) -> None:
        """Store the group's offsets: these, or those of all messages that polls gave so far, which are finished by that.

        Raises the first error when some could not be stored; those of polls are tried again by the next commit.
        """
        self._polls.check_open()
        for error in self._upkeep.store(self._polls.finish() if offsets is None else offsets).values():
            raise error

    def committed(self, queue: MessageQueue) -> int | None:
        """The group's stored offset of ``queue``, None where there is none."""
        return self._positions.stored(queue)

    # --- messages

    def poll(self, timeout_s: float = 5.0) -> list[ReceivedMessage]:
        """Messages of one queue in its order, as soon as there are any; none when ``timeout_s`` is over.

        One that cannot be decoded has a ``decode_error`` and the stored bytes as its body. Raises what the broker says
        for good, such as ``AccessDenied``; what may pass is logged and tried again.
        """
        deadline = self._upkeep.begin(timeout_s)
        while parts := self._upkeep.next(deadline, 1):
            if messages := list(parts[0].answer.read()):
                return messages
        return []

    def poll_arrow(self, timeout_s: float = 5.0) -> Any:
        """A ``pyarrow.RecordBatch`` of all messages that have come, of any queue, in the columns of the Spark source.

        A queue's messages are in its order. There are no rows when ``timeout_s`` is over. Raises ``DecodeError`` for a
        message that cannot be decoded: nothing is given then, and ``seek`` leads past it.
        """
        deadline = self._upkeep.begin(timeout_s)
        while parts := self._upkeep.next(deadline, ARROW_PARTS):
            try:
                batch = self._to_arrow(parts)
            except RocketMQError:
                self._polls.put_back(parts)
                raise
            if batch.num_rows:
                return batch
        return self._to_arrow([])

    def __iter__(self) -> Iterator[ReceivedMessage]:
        """Messages without end, until ``close``. Those of a poll are finished when all were taken and more are asked for."""
        while not self._polls.closed:
            try:
                messages = self.poll()
            except ClosedError:
                return
            yield from messages

    # --- the end

    def close(self) -> None:
        """Stop, and leave the group. Offsets of what is finished are committed if option 'autoCommit' says so; what the last
        poll gave is not.
        """
        left = self._polls.close()
        if self._settings.auto_commit:
            self._upkeep.store(left)
        self._shared.leave()


def _exclusive() -> LocalProtocolError:
    return LocalProtocolError(
        "subscribe and assign are mutually exclusive", remedy="Use two consumers, of two groups, for both"
    )
