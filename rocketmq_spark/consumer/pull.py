"""The methods of ``PullConsumer``. Mirrors ``DefaultLitePullConsumer``.

Periodic work runs at the beginning of a poll, and while the poll waits. Only rebalances and prefetching also run between polls.
One thread polls, but another thread may call ``close``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import islice
from typing import Any

from rocketmq_spark.base.arguments import argument_error, check_instance, check_seconds, is_integer
from rocketmq_spark.base.clock import Clock, Deadline
from rocketmq_spark.base.dropped import ClosedWhenDropped
from rocketmq_spark.base.process import OwnerProcess, defer_close, signal_safe
from rocketmq_spark.base.threads import Timer
from rocketmq_spark.consumer.assigned import ONE_ANSWER, FetchedPart
from rocketmq_spark.consumer.broker_requests import PullRequestHandler
from rocketmq_spark.consumer.offsets import OffsetRequests, check_offset
from rocketmq_spark.consumer.polls import Polls
from rocketmq_spark.consumer.prefetch import BacklogReader
from rocketmq_spark.consumer.settings import ConsumerSettings, Subscriptions, checked_topic, parse_filter
from rocketmq_spark.consumer.upkeep import PullMembership, Upkeep
from rocketmq_spark.errors import ClosedError, LocalProtocolError, OptionError, RocketMQError
from rocketmq_spark.model import Filter, MessageQueue, ReceivedMessage
from rocketmq_spark.ports import GroupMember
from rocketmq_spark.wire.messages import PORTION_BYTES, first_portion

# Decodes the stored messages of several parts into a single ``pyarrow.RecordBatch``. If a single part is too large, the
# function decodes the first messages, and returns the offset of the next message. (This package does not import Arrow.)
ToArrow = Callable[[Sequence[FetchedPart]], tuple[Any, int | None]]
MAX_ARROW_PARTS = 1024  # the most parts that ``poll_arrow`` decodes together
DEFAULT_POLL_TIMEOUT_S, MAX_POLL_TIMEOUT_S = 5.0, 1e9


class BasePullConsumer(ClosedWhenDropped):
    """Polls messages of subscribed topics, whose queues the group shares, or of queues that the user assigns. Call ``close`` at
    the end.

    Delivery is at least once: messages that a poll returned are finished when the next poll begins, or ``commit`` is called.
    Messages that are not finished are delivered again after a restart.
    """

    def __init__(
        self,
        member: GroupMember,
        settings: ConsumerSettings,
        to_arrow: ToArrow,
        clock: Clock | None = None,
        backlog_reader: BacklogReader | None = None,
        make_timer: Callable[[str], Timer] = Timer,
    ) -> None:
        self.client_id = member.client_id
        self._owner = OwnerProcess("consumer")
        self._settings = settings
        self._to_arrow = to_arrow
        clock = clock or Clock()
        timer = make_timer(f"rocketmq-{settings.group}-rebalance")
        subscriptions = Subscriptions(settings.group, False, timer.wall_ms)
        self._polls = Polls(member, settings, subscriptions, clock, backlog_reader)
        self._offsets = OffsetRequests(member, settings)
        self._group = PullMembership(member, settings, subscriptions, self._offsets, clock, self._polls.reachability)
        self._upkeep = Upkeep(settings, self._polls, self._offsets, self._group, clock, timer)
        upkeep, group = self._upkeep, self._group
        on_foreign_reset = partial(upkeep.on_reset, was_released=False)
        self._request_handler = PullRequestHandler(
            self._polls,
            group.membership,
            upkeep.on_group_change,
            upkeep.commit,
            on_foreign_reset,
            settings.answer_stacks,
        )
        self._uses_assign = False

    @property
    def _is_open(self) -> bool:
        return not self._polls.closed

    # --- queues

    @signal_safe
    def queues(self, topic: str) -> Sequence[MessageQueue]:
        """Return the readable queues of a topic, sorted. With option 'environment', only the queues of that environment.

        Args:
            topic: The topic.

        Raises:
            RouteNotFound: There is no such topic.
            OptionError: No queue of the topic belongs to the environment.
        """
        self._owner.check(False)
        return self._offsets.queues(checked_topic(topic))

    @signal_safe
    def subscribe(self, topic: str, tags: str | None = None, sql: str | None = None) -> None:
        """Share the topic's queues with the group. Queues may be assigned and revoked at any time, also between polls.

        All members of a group should use the same filter for a topic. A second call changes the filter for messages that are
        pulled from then on; messages that were pulled before are still returned.

        Args:
            topic: The topic.
            tags: One tag or several (``a || b``); by default, all messages match.
            sql: An SQL92 expression, for brokers with ``enablePropertyFilter``; it cannot be combined with ``tags``.

        Raises:
            RouteNotFound: There is no such topic.
            OptionError: The filter is wrong.
            LocalProtocolError: The consumer uses ``assign`` already, or this process has another member of the group.
        """
        self._owner.check(self._polls.closed)
        if self._uses_assign:
            raise _mutually_exclusive_error()
        self._set_subscription(checked_topic(topic), parse_filter(tags, sql))
        self._upkeep.start_background()

    @signal_safe
    def unsubscribe(self, topic: str) -> None:
        """Stop reading ``topic``, and release its queues. With option 'autoCommit', its finished messages are committed."""
        self._owner.check(self._polls.closed)
        if checked_topic(topic) in self._group.topics:
            self._set_subscription(topic, None)
            self._upkeep.rebalance()

    def _set_subscription(self, topic: str, topic_filter: Filter | None) -> None:
        """Subscribe or unsubscribe.

        If another thread closes the consumer meanwhile, leave the group again, because this call may have joined the group.
        """
        try:
            self._group.set_subscription(topic, topic_filter, self._request_handler)
        finally:
            if self._polls.closed:
                self._upkeep.close()
        self._owner.check(self._polls.closed)

    @signal_safe
    def assign(self, queues: Iterable[MessageQueue]) -> None:
        """Read exactly these queues, without a filter, instead of the queues that were assigned before.

        A queue begins at the group's committed offset, or if there is none, where option 'consumeFromWhere' says. Other members
        do not know of the assignment, so members that subscribe still share all queues.

        Args:
            queues: The queues to read.

        Raises:
            OptionError: An item is not a queue, or belongs to another environment.
            RocketMQError: A start offset could not be read, and the assignment is unchanged.
            LocalProtocolError: The consumer uses ``subscribe`` already.
        """
        self._owner.check(self._polls.closed)
        if self._group.topics:
            raise _mutually_exclusive_error()
        check_instance("queues", queues, Iterable, "a list of MessageQueue, such as queues() returns")
        assigned_queues, requested_queues = (
            set(self._polls.assigned_queues()),
            {_check_queue(queue) for queue in queues},
        )
        start_offsets = {
            queue: None if queue in assigned_queues else self._offsets.start_offset_of(queue)
            for queue in sorted(requested_queues)
        }
        self._uses_assign = True
        self._upkeep.apply_assignment(start_offsets)

    @signal_safe
    def assignment(self) -> list[MessageQueue]:
        """Return the queues that are read now, sorted."""
        self._owner.check(False)
        return self._polls.assigned_queues()

    @signal_safe
    def pause(self, *queues: MessageQueue) -> None:
        """Return no messages of these queues until ``resume``. Messages that were pulled are kept.

        A queue that goes to another member and comes back is not paused. Raises ``OffsetError`` if a queue is not assigned.
        """
        self._owner.check(self._polls.closed)
        self._polls.pause([_check_queue(queue) for queue in queues], True)

    @signal_safe
    def resume(self, *queues: MessageQueue) -> None:
        """Return messages of these queues again. Raises ``OffsetError`` if a queue is not assigned."""
        self._owner.check(self._polls.closed)
        self._polls.pause([_check_queue(queue) for queue in queues], False)

    # --- positions

    @signal_safe
    def seek(self, queue: MessageQueue, offset: int) -> None:
        """Continue at ``offset``. A commit before the next poll stores this offset.

        Args:
            queue: An assigned queue.
            offset: The offset of the next message.

        Raises:
            OffsetError: The queue is not assigned, or does not have the offset.
        """
        self._owner.check(self._polls.closed)
        self._polls.seek([_check_queue(queue)], lambda queue: self._offsets.checked_offset(queue, offset))

    @signal_safe
    def seek_to_beginning(self, *queues: MessageQueue) -> None:
        """Continue ``queues``, by default all assigned queues, at the first message that the broker keeps."""
        self._owner.check(self._polls.closed)
        self._polls.seek(
            [_check_queue(queue) for queue in queues],
            lambda queue: self._offsets.bounds(queue, for_group=True).min_offset,
        )

    @signal_safe
    def seek_to_end(self, *queues: MessageQueue) -> None:
        """Continue ``queues``, by default all assigned queues, after the last message."""
        self._owner.check(self._polls.closed)
        self._polls.seek(
            [_check_queue(queue) for queue in queues], lambda queue: self._offsets.bounds(queue).max_offset
        )

    @signal_safe
    def seek_to_timestamp(self, epoch_ms: int, *queues: MessageQueue) -> None:
        """Continue at the first message stored at or after a time, or at the end if all messages are older.

        Args:
            epoch_ms: Milliseconds since 1970.
            queues: The queues; by default, all assigned queues.
        """
        self._owner.check(self._polls.closed)
        if not is_integer(epoch_ms) or epoch_ms < 0:
            raise argument_error("epoch_ms", epoch_ms, "a whole number of milliseconds since 1970, at least 0")
        self._polls.seek(
            [_check_queue(queue) for queue in queues], lambda queue: self._offsets.offset_at_time(queue, epoch_ms)
        )

    @signal_safe
    def commit(self, offsets: Mapping[MessageQueue, int] | None = None) -> None:
        """Store offsets of the group on the brokers.

        Args:
            offsets: Offsets by queue. Without ``offsets``, all messages that polls returned so far count as finished, and their
                offsets are committed.

        Raises:
            OffsetError: An offset is negative or not an integer, and no offset was stored.
            RocketMQError: The first error, if some offsets could not be stored. The next commit retries the offsets of finished
                messages, but not offsets that were passed as ``offsets``.
        """
        self._owner.check(self._polls.closed)
        if offsets is not None:
            check_instance("offsets", offsets, Mapping, "a dict of offsets by MessageQueue")
        for queue, offset in (offsets or {}).items():
            check_offset(_check_queue(queue), offset)
        for error in (self._upkeep.commit_finished() if offsets is None else self._upkeep.commit(offsets)).values():
            raise error

    @signal_safe
    def committed(self, queue: MessageQueue) -> int | None:
        """Return the group's stored offset of ``queue``, or None if there is none."""
        self._owner.check(False)
        return self._offsets.committed(_check_queue(queue))

    # --- messages

    def poll(self, timeout_s: float = DEFAULT_POLL_TIMEOUT_S) -> list[ReceivedMessage]:
        """Return messages of one queue in its order, as soon as there are any.

        Args:
            timeout_s: Seconds to wait for a message.

        Returns:
            The messages; an empty list after the timeout. A list ends early if the decompressed bodies of its messages reach 64
            MiB. A message that cannot be decoded has a ``decode_error``, and its stored bytes as the body.

        Raises:
            OptionError: The consumer has neither a subscription nor an assignment.
            ConnectionLost: No broker has answered for 60 seconds since the first poll. After a first answer, polls only log a
                warning while a broker does not answer.
            RocketMQError: A permanent failure, such as ``AccessDenied``. Temporary failures are logged and retried.
        """
        messages, left_out_offset = self._poll(timeout_s)
        self._polls.has_returned_all, self._polls.returned_up_to = left_out_offset is None, left_out_offset
        return messages

    @signal_safe
    def _poll(self, timeout_s: float) -> tuple[list[ReceivedMessage], int | None]:
        """Return messages, and the offset of the first message that was left out; None if no message was left out.

        This method does not record that the messages were returned; its caller does. In older versions of Python, Ctrl-C may
        come right after this method has returned. Then the user does not get the messages, and they must not count as returned.
        """
        deadline = _start_poll(self, timeout_s)
        while parts := self._upkeep.next_parts(deadline, ONE_ANSWER):
            messages, left_out_message = first_portion(parts[0].read())
            if messages or deadline.expired:  # the filter may exclude all messages of an answer
                return messages, None if left_out_message is None else left_out_message.queue_offset
            self._polls.has_returned_all = True
        return [], None

    def poll_arrow(self, timeout_s: float = DEFAULT_POLL_TIMEOUT_S) -> Any:
        """Return all messages that have arrived, of any queue, as one record batch.

        Args:
            timeout_s: Seconds to wait for a message.

        Returns:
            A ``pyarrow.RecordBatch`` with the columns of the Spark source; without rows after the timeout. The messages of each
            queue are in the order of the queue. A batch that has reached 64 MiB gets no more messages.

        Raises:
            DecodeError: A message cannot be decoded. The error is raised after the messages of all earlier pulls have been
                returned. To continue, call ``poll``, which returns the message raw, or ``seek`` past the message.
            OptionError: pyarrow is not installed, or the consumer has neither a subscription nor an assignment.
            RocketMQError: A permanent failure, or no broker has answered, as for ``poll``.
        """
        batch, left_out_offset = _poll_arrow(self, timeout_s)
        self._polls.has_returned_all, self._polls.returned_up_to = left_out_offset is None, left_out_offset
        return batch

    def __iter__(self) -> Iterator[ReceivedMessage]:
        """Yield messages until ``close``.

        A message is finished when ``commit`` is called, or when the loop, another loop or a poll fetches more messages. If a
        loop was left by ``break`` or an exception, a new loop continues after the last message that was yielded.
        """
        while not self._polls.closed:
            self._owner.check(False)
            try:
                answer_messages = next_answer(self)
            except ClosedError:
                return
            yield from answer_messages

    # --- the end

    def close(self) -> None:
        """Stop, and leave the group. With option 'autoCommit', the offsets of finished messages are committed; the messages of
        the last poll are not finished. If a signal handler calls ``close`` while a poll or another method runs in the same
        thread, that method returns soon, and the consumer is closed then.
        """
        if not self._owner.is_current:
            return
        if defer_close(self.close):
            self._polls.close(wait=False)
            return
        try:
            self._polls.close()
        finally:
            self._upkeep.close()


def _start_poll(consumer: BasePullConsumer, timeout_s: object) -> Deadline:
    consumer._owner.check(consumer._polls.closed)
    timeout = checked_timeout(timeout_s)
    if not consumer._uses_assign and not consumer._group.topics:
        raise OptionError("the consumer has no queues; expected subscribe() or assign() before a poll")
    return consumer._upkeep.start_poll(timeout)


@signal_safe
def _poll_arrow(consumer: BasePullConsumer, timeout_s: float) -> tuple[Any, int | None]:
    """Return the messages of several parts as one record batch, and the offset of the first message that was left out."""
    deadline, max_parts = _start_poll(consumer, timeout_s), MAX_ARROW_PARTS
    while parts := consumer._upkeep.next_parts(deadline, max_parts):
        is_single_answer = len(parts) == 1 and len(parts[0].split_first_answer()) == 1  # one answer cannot be split
        try:
            batch, left_out_offset = consumer._to_arrow(parts)
            is_too_large = left_out_offset is not None and not is_single_answer
        except RocketMQError:
            is_too_large = True
            if is_single_answer:
                consumer._polls.start_poll()
                raise
        if is_too_large:
            consumer._polls.start_poll()
            max_parts = len(parts) // 2  # the last value is 0, which is ``ONE_ANSWER``
            continue
        if batch.num_rows or deadline.expired:
            return batch, left_out_offset
        consumer._polls.has_returned_all = True
    return consumer._to_arrow([])[0], None


@signal_safe
def next_answer(consumer: BasePullConsumer, timeout_s: float = DEFAULT_POLL_TIMEOUT_S) -> Iterator[ReceivedMessage]:
    """Wait up to ``timeout_s`` seconds for messages of one queue, and return an iterator over them, which does not block.

    A yielded message is finished by the next poll, the next call of this function, or ``commit``. The next poll begins with the
    messages that were not yielded.
    """
    parts = consumer._upkeep.next_parts(_start_poll(consumer, timeout_s), 1)
    return consumer._polls.yield_messages(parts[0]) if parts else iter(())


def take_messages(
    consumer: BasePullConsumer, message_iterator: Iterator[ReceivedMessage], max_messages: int
) -> list[ReceivedMessage]:
    """Take the first messages of an iterator that ``next_answer`` returned: at most ``max_messages``, and no more than one poll
    returns.

    If this function raises, none of the messages counts as returned, and the iterator must not be used any more.
    """
    polls, messages, room_bytes = consumer._polls, list[ReceivedMessage](), PORTION_BYTES
    values_before = polls.has_returned_all, polls.returned_up_to
    try:
        for message in islice(message_iterator, max_messages):
            messages.append(message)
            room_bytes -= len(message.body)
            if room_bytes <= 0:
                break
    except BaseException:  # after Ctrl-C or a lack of memory, the caller gets none of the messages
        polls.has_returned_all, polls.returned_up_to = values_before
        raise
    return messages


class PolledMessages:
    """The messages of one poll, for a caller that finishes them one after the other.

    Only finished messages count as returned. A commit stores the offset after the finished messages, and the next poll returns
    the other messages again. If the queue was revoked, reset or moved by a seek since the poll, ``mark_finished`` has no
    effect, even if the queue is assigned again.
    """

    def __init__(self, consumer: BasePullConsumer, timeout_s: float) -> None:
        self.messages = consumer.poll(timeout_s)
        self._polls = consumer._polls
        self._values_of_complete_poll = self._polls.has_returned_all, self._polls.returned_up_to
        self.mark_finished(0)

    def mark_finished(self, count: int) -> None:
        """Record that the first ``count`` messages are finished."""
        is_all = count == len(self.messages)
        values = self._values_of_complete_poll if is_all else (False, self.messages[count].queue_offset)
        self._polls.has_returned_all, self._polls.returned_up_to = values

    @property
    def is_current(self) -> bool:
        """Whether the queue was neither revoked nor moved by a seek since the poll. If False, the caller must not finish the
        other messages.
        """
        return self._polls.is_current()


def checked_timeout(timeout_s: object) -> float:
    """Return the timeout of a poll. Raises ``OptionError`` if the timeout is not a number, or longer than a lock can wait."""
    return check_seconds("timeout_s", timeout_s, MAX_POLL_TIMEOUT_S)


def _check_queue(queue: object) -> MessageQueue:
    if not isinstance(queue, MessageQueue):  # if one queue was passed in place of a list, ``queue`` is a field of it
        raise argument_error("a queue", queue, "a MessageQueue, such as queues() returns")
    return queue


def _mutually_exclusive_error() -> LocalProtocolError:
    return LocalProtocolError(
        "subscribe and assign are mutually exclusive", remedy="Use two consumers with different groups"
    )
