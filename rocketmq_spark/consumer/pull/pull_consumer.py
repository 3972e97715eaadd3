"""The methods of a ``PullConsumer``. Mirrors ``DefaultLitePullConsumer``.

Periodic work is done at the beginning of a poll and while it waits. Only rebalances, and reading ahead in queues that are far
behind, happen between polls, too. One thread polls; another one may call ``close``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import islice
from typing import Any

from rocketmq_spark.base.arguments import instance, is_whole, seconds, wrong
from rocketmq_spark.base.clock import Clock, Deadline
from rocketmq_spark.base.dropped import ClosedWhenDropped
from rocketmq_spark.base.process import Owner, entry, postponed
from rocketmq_spark.base.threads import Timer
from rocketmq_spark.consumer.ahead import ReadAhead
from rocketmq_spark.consumer.pull.assigned import ONE_ANSWER, FetchedPart
from rocketmq_spark.consumer.pull.polls import Polls, Positions, PullAnswers, check_offset
from rocketmq_spark.consumer.pull.upkeep import Subscribed, Upkeep
from rocketmq_spark.consumer.settings import ConsumerSettings, Subscriptions, checked_topic, filter_of
from rocketmq_spark.errors import ClosedError, LocalProtocolError, OptionError, RocketMQError
from rocketmq_spark.model import Filter, MessageQueue, ReceivedMessage
from rocketmq_spark.ports import GroupMember
from rocketmq_spark.wire.messages import PORTION_BYTES, portion

# Decodes the stored messages of several parts into one ``pyarrow.RecordBatch``. If a single part is too large, it decodes the
# first messages, and returns the offset of the next one. (This package does not import Arrow.)
ToArrow = Callable[[Sequence[FetchedPart]], tuple[Any, int | None]]
ARROW_PARTS = 1024
POLL_S, MAX_POLL_S = 5.0, 1e9


class BasePullConsumer(ClosedWhenDropped):
    """Returns messages of topics that its group shares, or of queues that its user names. ``close`` it at the end.

    Delivery is at least once: messages that a poll returned are finished when the next poll begins, or ``commit`` is called.
    If neither follows, they are delivered again after a restart.
    """

    def __init__(
        self,
        member: GroupMember,
        settings: ConsumerSettings,
        to_arrow: ToArrow,
        clock: Clock | None = None,
        read_ahead: ReadAhead | None = None,
        make_timer: Callable[[str], Timer] = Timer,
    ) -> None:
        self.client_id = member.client_id
        self._owner = Owner("consumer")
        self._settings = settings
        self._to_arrow = to_arrow
        clock = clock or Clock()
        timer = make_timer(f"rocketmq-{settings.group}-rebalance")
        subscriptions = Subscriptions(settings.group, False, timer.wall_ms)
        self._polls = Polls(member, settings, subscriptions, clock, read_ahead)
        self._positions = Positions(member, settings)
        self._shared = Subscribed(member, settings, subscriptions, self._positions, clock, self._polls.contact)
        self._upkeep = Upkeep(settings, self._polls, self._positions, self._shared, clock, timer)
        upkeep, shared = self._upkeep, self._shared
        missed = partial(upkeep.moved, given_up=False)
        self._answers = PullAnswers(
            self._polls, shared.membership, upkeep.changed, upkeep.store, missed, settings.answer_stacks
        )
        self._named = False

    @property
    def _is_open(self) -> bool:
        return not self._polls.closed

    # --- queues

    @entry
    def queues(self, topic: str) -> Sequence[MessageQueue]:
        """Return the readable queues of a topic, sorted. With option 'environment', only the queues of that environment.

        Args:
            topic: The topic.

        Raises:
            RouteNotFound: There is no such topic.
            OptionError: No queue of the topic belongs to the environment.
        """
        self._owner.check(False)
        return self._positions.queues(checked_topic(topic))

    @entry
    def subscribe(self, topic: str, tags: str | None = None, sql: str | None = None) -> None:
        """Share the topic's queues with the group. Queues may be assigned and revoked at any time, also between polls.

        All members of a group should use the same filter for a topic. A second call changes the filter for messages that are
        pulled from then on; messages that were pulled before are still returned.

        Args:
            topic: The topic.
            tags: One tag or several (``a || b``); by default, all messages match.
            sql: An SQL92 expression, for brokers with ``enablePropertyFilter``. Not together with ``tags``.

        Raises:
            RouteNotFound: There is no such topic.
            OptionError: The filter is wrong.
            LocalProtocolError: The consumer uses ``assign`` already, or this process has another member of the group.
        """
        self._owner.check(self._polls.closed)
        if self._named:
            raise _exclusive()
        self._want(checked_topic(topic), filter_of(tags, sql))
        self._upkeep.follow()

    @entry
    def unsubscribe(self, topic: str) -> None:
        """Stop reading ``topic``, and release its queues. With option 'autoCommit', its finished messages are committed."""
        self._owner.check(self._polls.closed)
        if checked_topic(topic) in self._shared.topics:
            self._want(topic, None)
            self._upkeep.rebalance()

    def _want(self, topic: str, wanted: Filter | None) -> None:
        """Subscribe. If another thread closes the consumer meanwhile, leave the group again, which this call may have joined."""
        try:
            self._shared.set(topic, wanted, self._answers)
        finally:
            if self._polls.closed:
                self._upkeep.close()
        self._owner.check(self._polls.closed)

    @entry
    def assign(self, queues: Iterable[MessageQueue]) -> None:
        """Read exactly these queues, without a filter, instead of those assigned before.

        A queue begins at the group's committed offset or, without one, where option 'consumeFromWhere' says. Other members do
        not know of the assignment: members that subscribe still share all queues.

        Args:
            queues: The queues to read.

        Raises:
            OptionError: An item is not a queue, or belongs to another environment.
            RocketMQError: A start offset could not be read. The assignment is then unchanged.
            LocalProtocolError: The consumer uses ``subscribe`` already.
        """
        self._owner.check(self._polls.closed)
        if self._shared.topics:
            raise _exclusive()
        instance("queues", queues, Iterable, "a list of MessageQueue, such as queues() returns")
        known, wanted = set(self._polls.queues()), {_checked(queue) for queue in queues}
        starts = {q: None if q in known else self._positions.start(q) for q in sorted(wanted)}
        self._named = True
        self._upkeep.have(starts)

    @entry
    def assignment(self) -> list[MessageQueue]:
        """Return the queues that are read now, sorted."""
        self._owner.check(False)
        return self._polls.queues()

    @entry
    def pause(self, *queues: MessageQueue) -> None:
        """Return no messages of these queues until ``resume``. Messages that were pulled are kept.

        A queue that goes to another member and comes back is not paused. Raises ``OffsetError`` if a queue is not assigned.
        """
        self._owner.check(self._polls.closed)
        self._polls.pause([_checked(queue) for queue in queues], True)

    @entry
    def resume(self, *queues: MessageQueue) -> None:
        """Return messages of these queues again. Raises ``OffsetError`` if a queue is not assigned."""
        self._owner.check(self._polls.closed)
        self._polls.pause([_checked(queue) for queue in queues], False)

    # --- positions

    @entry
    def seek(self, queue: MessageQueue, offset: int) -> None:
        """Continue at ``offset``. A commit before the next poll stores this offset.

        Args:
            queue: An assigned queue.
            offset: The offset of the next message.

        Raises:
            OffsetError: The queue is not assigned, or has no such offset.
        """
        self._owner.check(self._polls.closed)
        self._polls.seek([_checked(queue)], lambda queue: self._positions.checked(queue, offset))

    @entry
    def seek_to_beginning(self, *queues: MessageQueue) -> None:
        """Continue ``queues``, by default all assigned queues, at the first message that the broker keeps."""
        self._owner.check(self._polls.closed)
        self._polls.seek(
            [_checked(queue) for queue in queues], lambda queue: self._positions.bounds(queue, kept=True).min_offset
        )

    @entry
    def seek_to_end(self, *queues: MessageQueue) -> None:
        """Continue ``queues``, by default all assigned queues, after the last message."""
        self._owner.check(self._polls.closed)
        self._polls.seek([_checked(queue) for queue in queues], lambda queue: self._positions.bounds(queue).max_offset)

    @entry
    def seek_to_timestamp(self, epoch_ms: int, *queues: MessageQueue) -> None:
        """Continue at the first message stored at or after a time, or at the end if all are older.

        Args:
            epoch_ms: Milliseconds since 1970.
            queues: The queues; all assigned ones if none is named.
        """
        self._owner.check(self._polls.closed)
        if not is_whole(epoch_ms) or epoch_ms < 0:
            raise wrong("epoch_ms", epoch_ms, "a whole number of milliseconds since 1970, at least 0")
        self._polls.seek([_checked(queue) for queue in queues], lambda queue: self._positions.at_time(queue, epoch_ms))

    @entry
    def commit(self, offsets: Mapping[MessageQueue, int] | None = None) -> None:
        """Store offsets of the group on the brokers.

        Args:
            offsets: Offsets by queue. Without it, all messages that polls returned so far count as finished, and their offsets
                are committed.

        Raises:
            OffsetError: An offset is negative or not an integer. No offset is stored then.
            RocketMQError: The first error, if some offsets could not be stored. Those of finished messages are retried by the
                next commit; those that were passed as ``offsets`` are not.
        """
        self._owner.check(self._polls.closed)
        if offsets is not None:
            instance("offsets", offsets, Mapping, "a dict of offsets by MessageQueue")
        for queue, offset in (offsets or {}).items():
            check_offset(_checked(queue), offset)
        for error in (self._upkeep.store_finished() if offsets is None else self._upkeep.store(offsets)).values():
            raise error

    @entry
    def committed(self, queue: MessageQueue) -> int | None:
        """Return the group's stored offset of ``queue``, or None if there is none."""
        self._owner.check(False)
        return self._positions.stored(_checked(queue))

    # --- messages

    def poll(self, timeout_s: float = POLL_S) -> list[ReceivedMessage]:
        """Return messages of one queue in its order, as soon as there are any.

        Args:
            timeout_s: Seconds to wait for a message.

        Returns:
            The messages; an empty list after the timeout. The list ends at the latest with the message that brings the
            decompressed bodies to 64 MiB. A message that cannot be decoded has a ``decode_error``, and its stored bytes as the
            body.

        Raises:
            OptionError: The consumer has neither a subscription nor an assignment.
            ConnectionLost: No broker has answered for 60 seconds since the first poll. After a first answer, polls only log a
                warning while a broker does not answer.
            RocketMQError: A permanent failure, such as ``AccessDenied``. Temporary ones are logged and retried.
        """
        messages, left = self._polled(timeout_s)
        self._polls.given, self._polls.given_up_to = left is None, left
        return messages

    @entry
    def _polled(self, timeout_s: float) -> tuple[list[ReceivedMessage], int | None]:
        """The messages, and the offset of the first one that was left. They do not count as returned yet, because older Pythons
        can stop for Ctrl-C after the return of an ``entry``.
        """
        deadline = _begun(self, timeout_s)
        while parts := self._upkeep.next(deadline, ONE_ANSWER):
            messages, left = portion(parts[0].read())
            if messages or deadline.expired:  # if few of many messages match the filter, this would take too long
                return messages, None if left is None else left.queue_offset
            self._polls.given = True
        return [], None

    def poll_arrow(self, timeout_s: float = POLL_S) -> Any:
        """Return all messages that have arrived, of any queue, as one record batch.

        Args:
            timeout_s: Seconds to wait for a message.

        Returns:
            A ``pyarrow.RecordBatch`` with the columns of the Spark source; without rows after the timeout. Messages of a queue
            are in its order. No more messages are added once the batch has 64 MiB.

        Raises:
            DecodeError: A message cannot be decoded. It is raised after the messages of all earlier pulls have been returned. To
                continue, call ``poll``, which returns the message raw, or ``seek`` past it.
            OptionError: pyarrow is not installed, or the consumer has neither a subscription nor an assignment.
            RocketMQError: As for ``poll``.
        """
        batch, left = _polled_rows(self, timeout_s)
        self._polls.given, self._polls.given_up_to = left is None, left
        return batch

    def __iter__(self) -> Iterator[ReceivedMessage]:
        """Yield messages until ``close``.

        A message is finished when ``commit`` is called, or when the loop, another loop or a poll fetches more messages. After a
        loop was left (``break``, an exception), a new one continues after the last message that was yielded.
        """
        while not self._polls.closed:
            self._owner.check(False)
            try:
                answer = next_answer(self)
            except ClosedError:
                return
            yield from answer

    # --- the end

    def close(self) -> None:
        """Stop, and leave the group. With option 'autoCommit', the offsets of finished messages are committed; the messages of
        the last poll are not finished. If a signal handler calls ``close`` while a poll or another method runs in the same
        thread, that method returns soon, and the consumer is closed then.
        """
        if not self._owner.here:
            return
        if postponed(self.close):
            self._polls.close(wait=False)
            return
        try:
            self._polls.close()
        finally:
            self._upkeep.close()


def _begun(consumer: BasePullConsumer, timeout_s: object) -> Deadline:
    consumer._owner.check(consumer._polls.closed)
    wait_s = checked_timeout(timeout_s)
    if not consumer._named and not consumer._shared.topics:
        raise OptionError("the consumer has no queues; expected subscribe() or assign() before a poll")
    return consumer._upkeep.begin(wait_s)


@entry
def _polled_rows(consumer: BasePullConsumer, timeout_s: float) -> tuple[Any, int | None]:
    """As ``_polled``, but returns a record batch."""
    deadline, parts_at_once = _begun(consumer, timeout_s), ARROW_PARTS
    while parts := consumer._upkeep.next(deadline, parts_at_once):
        one = len(parts) == 1 and len(parts[0].cut()) == 1  # no less can be taken
        try:
            batch, left = consumer._to_arrow(parts)
            too_much = left is not None and not one
        except RocketMQError:
            too_much = True
            if one:
                consumer._polls.begin()
                raise
        if too_much:
            consumer._polls.begin()
            parts_at_once = len(parts) // 2  # of one part, its first answer
            continue
        if batch.num_rows or deadline.expired:
            return batch, left
        consumer._polls.given = True
    return consumer._to_arrow([])[0], None


@entry
def next_answer(consumer: BasePullConsumer, timeout_s: float = POLL_S) -> Iterator[ReceivedMessage]:
    """Return messages of one queue that have arrived together, as a loop over the consumer yields them: a yielded one is finished
    with the next poll, call of this or ``commit``, and the others are returned again first. Iterating does not block. Empty after
    ``timeout_s`` seconds without a message.
    """
    parts = consumer._upkeep.next(_begun(consumer, timeout_s), 1)
    return consumer._polls.each(parts[0]) if parts else iter(())


def some_of(consumer: BasePullConsumer, answer: Iterator[ReceivedMessage], most: int) -> list[ReceivedMessage]:
    """Take the first messages of an answer, at most ``most``, and at most as many as a poll returns. The others stay in it. If
    this raises, none of them counts as returned, and the answer must not be used any more.
    """
    polls, found, room = consumer._polls, list[ReceivedMessage](), PORTION_BYTES
    before = polls.given, polls.given_up_to
    try:
        for message in islice(answer, most):
            found.append(message)
            room -= len(message.body)
            if room <= 0:
                break
    except BaseException:  # Ctrl-C, or no memory for a body: the caller gets none of them
        polls.given, polls.given_up_to = before
        raise
    return found


class PolledMessages:
    """The messages that a poll returned, for a caller that finishes them one after the other. Only ``finished`` ones count as
    returned: a commit stores the offset behind them, and the next poll returns the others again. If their queue was revoked,
    sought or reset since the poll, they change nothing, also if the queue is assigned again.
    """

    def __init__(self, consumer: BasePullConsumer, timeout_s: float) -> None:
        self.messages = consumer.poll(timeout_s)
        self._polls = consumer._polls
        self._all = self._polls.given, self._polls.given_up_to
        self.finished(0)

    def finished(self, count: int) -> None:
        """Note that the first ``count`` messages are finished."""
        last = count == len(self.messages)
        self._polls.given, self._polls.given_up_to = self._all if last else (False, self.messages[count].queue_offset)

    @property
    def stands(self) -> bool:
        """Whether the consumer still has the queue as it had it when the poll returned. If False, the rest is not its own."""
        return self._polls.stands()


def checked_timeout(timeout_s: object) -> float:
    """Return the timeout of a poll; raises ``OptionError`` if it is not a number, or longer than locks support."""
    return seconds("timeout_s", timeout_s, MAX_POLL_S)


def _checked(queue: object) -> MessageQueue:
    if not isinstance(queue, MessageQueue):  # such as a field of the one queue that was given instead of a list
        raise wrong("a queue", queue, "a MessageQueue, such as queues() returns")
    return queue


def _exclusive() -> LocalProtocolError:
    return LocalProtocolError(
        "subscribe and assign are mutually exclusive", remedy="Use two consumers with different groups"
    )
