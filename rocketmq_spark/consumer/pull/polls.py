"""Pulls of a ``PullConsumer``, which polls wait for. Also its offset requests (``Positions``), each within the request timeout,
and its answers to brokers, on the thread of the group. Answers to pulls arrive on connection threads, which send the next
pulls. Queues far behind are read ahead. ``assigned`` decides, under one lock.
"""

from __future__ import annotations

import functools
import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from numbers import Integral

from rocketmq_spark.base.clock import Clock, Deadline
from rocketmq_spark.base.process import entry
from rocketmq_spark.base.threads import text_of
from rocketmq_spark.consumer.ahead import Ahead, Bounds, ReadAhead
from rocketmq_spark.consumer.pull.assigned import Ask, Assigned, FetchedPart, Left
from rocketmq_spark.consumer.pull.contact import Contact
from rocketmq_spark.consumer.push.offset_store import StoreTrouble
from rocketmq_spark.consumer.push.rebalancing import stacks_of_threads
from rocketmq_spark.consumer.rebalance import StartOffset, StartOffsetRequests, start_offset
from rocketmq_spark.consumer.settings import ConsumerSettings, Subscriptions
from rocketmq_spark.errors import BrokerBusy, BrokerError, OffsetError, OptionError, RocketMQError
from rocketmq_spark.model import Filter, MessageQueue, PullAnswer, PullRequest, PullStatus, QueueBounds, ReceivedMessage
from rocketmq_spark.model.membership import (
    Answer,
    BrokerRequest,
    InfoAsked,
    MembersChanged,
    Membership,
    OffsetsAsked,
    QueueInfo,
    ResetOffsets,
    RunningInfo,
)
from rocketmq_spark.ports import GroupMember
from rocketmq_spark.queues.environment import Own

logger = logging.getLogger(__name__)


class Polls:
    """The queues of one consumer. Thread-safe."""

    def __init__(
        self,
        member: GroupMember,
        settings: ConsumerSettings,
        subscriptions: Subscriptions,
        clock: Clock,
        read_ahead: ReadAhead | None = None,
    ) -> None:
        self._member = member
        self._settings = settings
        self._subscriptions = subscriptions
        self._clock = clock
        self.contact = Contact(settings.group, clock)
        self._lock = threading.RLock()  # entered directly: Ctrl-C in a condition's methods would leave it held
        self._changed = threading.Condition(self._lock)
        self._assigned = Assigned(settings.thresholds.max_count, settings.thresholds.max_bytes)
        # Called if the answer to a pull of a released queue reports a reset; it must not block.
        self.away: Callable[[MessageQueue, int], None] = lambda queue, offset: None
        self._assigned.away = lambda queue, offset: self.away(queue, offset)
        self._ahead: Ahead | None = None
        if read_ahead is not None:
            bounds = Bounds(settings.pull_batch_size, settings.thresholds.max_count, settings.thresholds.max_bytes)
            self._ahead = Ahead(self._lock, self._changed, self._assigned, bounds, read_ahead, clock)
            self._ahead.polled = self._pull
        self._error: tuple[MessageQueue, RocketMQError] | None = None
        self.failed: MessageQueue | None = None  # the queue whose error ``wait`` raised last
        self._woken = False
        # Whether the caller has the messages taken last; a loop has them up to an offset. Set in the last instruction before a
        # poll returns or a loop yields: after a Ctrl-C anywhere before it, the messages count as not returned.
        self.given = False
        self.given_up_to: int | None = None
        self.closed = False

    # --- queues and positions, as in ``Assigned``

    def queues(self) -> list[MessageQueue]:
        with self._lock:
            return sorted(self._assigned.places)

    def assign(self, starts: Mapping[MessageQueue, StartOffset | None], left: Left | None = None) -> Left:
        with self._lock:
            left = self._assigned.assign({} if self.closed else starts, left)  # closed: it owns no queues
        self._pull()
        return left

    def pause(self, queues: Iterable[MessageQueue], paused: bool) -> None:
        with self._lock:
            self._assigned.pause([_checked(self._assigned, queue) for queue in queues], paused)
        self._pull()

    def seek(self, queues: Iterable[MessageQueue], offset_of: Callable[[MessageQueue], int]) -> None:
        """Continue at the offset of ``offset_of``, which may ask a broker; in all owned queues if none is named."""
        with self._lock:
            named = [_checked(self._assigned, queue) for queue in queues]
            wanted = named or list(self._assigned.places)
        offsets = {queue: offset_of(queue) for queue in wanted}
        with self._lock:
            for queue in named:  # all of them or none
                _checked(self._assigned, queue)
            for queue in offsets.keys() & self._assigned.places.keys():
                self._assigned.seek(queue, offsets[queue])
        self._pull()

    def reset(self, offsets: Mapping[MessageQueue, int]) -> dict[MessageQueue, int]:
        """Continue at these offsets in the queues that are owned. Returns the offsets to commit."""
        with self._lock:
            mine = {queue: offset for queue, offset in offsets.items() if queue in self._assigned.places}
            for queue, offset in mine.items():
                self._assigned.seek(queue, offset)
        self._pull()
        return mine

    def infos(self) -> dict[MessageQueue, QueueInfo]:
        """The current state of each queue."""
        with self._lock:
            return self._assigned.infos()

    def begin(self, again: bool = False) -> None:
        """Begin a poll: messages that the last one returned are finished; ``again`` commits them even if they were committed.
        Messages that it took and did not return wait again.
        """
        with self._lock:
            self._settle()
            self._assigned.ready.take_back()
            self._assigned.finish(again)

    def finish(self) -> dict[MessageQueue, int]:
        """Count all returned messages as finished. Returns the offsets to commit."""
        with self._lock:
            self._settle()
            self._assigned.finish()
            return self._assigned.to_commit()

    def _settle(self) -> None:
        if (up_to := self.given_up_to) is not None:
            self._assigned.ready.give_up_to(up_to)
            if self.given_up_to == up_to:  # otherwise a loop continued during a cancelled commit
                self.given_up_to = None
        if self.given:
            self._assigned.ready.give()
            self.given = False

    def unstored(self) -> dict[MessageQueue, int]:
        """Offsets of the queues for which the group has none yet."""
        with self._lock:
            return {q: place.done for q, place in self._assigned.places.items() if place.committed is None}

    def committed(self, offsets: Mapping[MessageQueue, int]) -> None:
        with self._lock:
            self._assigned.committed(offsets)

    @entry
    def close(self, wait: bool = True) -> None:
        """Send no more pulls. Without ``wait`` this never blocks, so that a signal handler may call it at any point."""
        with self._lock:
            self.closed = True
            self._changed.notify_all()
        if wait and self._ahead is not None:
            self._ahead.close(self._settings.request_timeout_s)

    # --- messages

    def wake(self) -> None:
        """Make the current or the next ``wait`` return at once."""
        with self._lock:
            self._woken = True
            self._changed.notify_all()

    def wait(self, deadline: Deadline, most: int) -> list[FetchedPart]:
        """Wait for messages until ``deadline``. Returns nothing after it, and after ``wake`` or ``close``.
        Raises the error of a pull that is not retried.
        """
        while not (parts := self._take(most)):
            self._pull()
            with self._lock:
                if parts := self._take(most):  # arrived meanwhile
                    break
                if self.closed or self._woken or deadline.expired:
                    self._woken = False
                    return []
                now, left_s = self._clock.now(), deadline.remaining()
                retry = self._assigned.next_retry(now)
                try:
                    self._changed.wait(left_s if retry is None else min(left_s, retry - now))
                except BaseException:  # Ctrl-C, also after the lock was released
                    if not self._changed._is_owned():  # type: ignore[attr-defined]
                        self._lock.acquire()
                    raise
        self._pull()  # the next ones arrive while the caller processes these
        return parts

    def _take(self, most: int) -> list[FetchedPart]:
        with self._lock:
            if self._error is not None:
                (self.failed, error), self._error = self._error, None
                if self.failed in self._assigned.places:
                    raise error
            self._settle()
            return self._assigned.ready.take(most)

    def each(self, part: FetchedPart) -> Iterator[ReceivedMessage]:
        """Yield the messages of ``part``, which was taken alone. A yielded message counts as returned. A loop that continues
        after another poll or a seek gets no more messages of the part.

        No lock is held, because a signal handler may close the consumer at this point.
        """
        for message in part.read():
            if not self._assigned.ready.lends(part):
                return
            self.given_up_to = message.queue_offset + 1
            yield message
        if self._assigned.ready.lends(part):
            self.given, self.given_up_to = True, None

    def stands(self) -> bool:
        """Whether a queue of the messages taken last was neither revoked nor sought since."""
        with self._lock:
            return self._assigned.ready.stands()

    def _pull(self) -> None:
        """Send the pulls that are due."""
        asks: list[Ask] = []
        made = 0
        try:
            with self._lock:
                if self.closed:
                    return
                besides = self._ahead.begin(self._subscriptions.plain) if self._ahead is not None else ()
                self._assigned.due(self._clock.now(), besides, asks)
            for ask in asks:
                wanted = self._subscriptions.filter(ask.queue.topic)
                request, deadline = _request(self._settings, ask, wanted), Deadline.after(self._settings.pull_timeout_s)
                self._member.pull(request, deadline, functools.partial(self._answered, ask, wanted))
                made += 1
        except BaseException:  # Ctrl-C, too: a pull that was not sent gets no answer
            with self._lock:
                self._assigned.not_made(asks[made:])
            raise

    def _answered(self, ask: Ask, wanted: Filter, answer: PullAnswer | RocketMQError) -> None:
        """Handle an answer. If the filter has changed since the pull, it may have skipped messages that match the new one."""
        with self._lock:
            if isinstance(answer, RocketMQError):
                if isinstance(answer, BrokerError):  # ``_failed`` retries it, or lets a poll raise it
                    self.contact.reads(ask.queue.broker_name)
                else:
                    self.contact.failed(ask.queue.broker_name, answer)
                self._failed(ask, answer)
                self._changed.notify_all()
                return
            self.contact.reads(ask.queue.broker_name)
            if not answer.reset and wanted != self._subscriptions.filter(ask.queue.topic):
                self._assigned.not_made([ask])
            elif self._assigned.answered(ask, answer, wanted) and answer.status is PullStatus.OFFSET_ILLEGAL:
                why = "is reset by its broker" if answer.reset else "is not there"
                logger.warning("offset %d of %s %s: continuing at %d", ask.offset, ask.queue, why, answer.next_offset)
            self._changed.notify_all()
        self._pull()

    def _failed(self, ask: Ask, error: RocketMQError) -> None:
        how = self._settings
        pause_s = how.pull_delay_when_busy_s if isinstance(error, BrokerBusy) else how.pull_delay_on_error_s
        if not self._assigned.failed(ask, self._clock.now() + pause_s) or self.closed:
            return
        if error.retriable:
            logger.info("the pull of %s at %d is tried again: %s", ask.queue, ask.offset, error)
        else:
            self._error = ask.queue, error


def _checked(assigned: Assigned, queue: MessageQueue) -> MessageQueue:
    if queue not in assigned.places:
        raise OffsetError("the queue is not assigned", queue=str(queue), remedy="Assign it first")
    return queue


def _request(settings: ConsumerSettings, ask: Ask, wanted: Filter) -> PullRequest:
    return PullRequest(
        settings.group,
        ask.queue,
        ask.offset,
        settings.pull_batch_size,
        wanted,
        post_filter=True,
        suspend_s=settings.pull_suspend_s,
        broker_id=ask.broker_id,
        decoded=False,
    )


MAX_OFFSET = 2**63 - 1


def check_offset(queue: MessageQueue, offset: object) -> None:
    """Raises ``OffsetError`` if a user's value is no possible offset."""
    whole = isinstance(offset, Integral) and not isinstance(offset, bool)
    if not whole or not 0 <= offset <= MAX_OFFSET:  # type: ignore[operator]
        raise OffsetError(
            f"the offset is {text_of(offset)}; expected a whole number from 0 to {MAX_OFFSET}",
            topic=queue.topic,
            queue=str(queue),
        )


class Positions:
    """Offset requests through the member. Errors of requests are raised."""

    def __init__(self, member: GroupMember, settings: ConsumerSettings) -> None:
        self._member = member
        self._settings = settings
        self._own = Own(settings.environment)
        self._trouble = StoreTrouble(settings.group)

    def queues(self, topic: str, refresh: bool = False) -> Sequence[MessageQueue]:
        """The readable queues of a topic, or those of the environment; ``refresh`` fetches the route."""
        return self._own(self._member.queues(topic, self.soon(), refresh))

    def start(self, queue: MessageQueue) -> StartOffset:
        """The start offset of a new queue. Raises ``OptionError`` for one of another environment."""
        queues = self.queues(queue.topic)  # this also finds its broker
        if self._settings.environment is not None and queue not in queues:
            name = self._settings.environment.name
            raise OptionError(f"queue {queue} does not belong to environment {name!r}; expected one of {list(queues)}")
        ask = StartOffsetRequests(
            committed=lambda: self._member.committed(self._settings.group, queue, self.soon()),
            max_offset=lambda: self.bounds(queue).max_offset,
            offset_at_time=lambda epoch_ms: self.at_time(queue, epoch_ms),
        )
        return start_offset(queue, self._settings.consume_from, ask)

    def bounds(self, queue: MessageQueue, kept: bool = False) -> QueueBounds:
        return self._member.bounds(queue, self.soon(), self._settings.group if kept else None)

    def at_time(self, queue: MessageQueue, epoch_ms: int) -> int:
        """The first offset stored at or after a time; the end if all are older."""
        found = self._member.search_offset(queue, epoch_ms, self.soon(), self._settings.group)
        return self.bounds(queue, kept=True).clamp(found)

    def checked(self, queue: MessageQueue, offset: int) -> int:
        """``offset``, if the queue has it or ends there."""
        check_offset(queue, offset)
        bounds = self.bounds(queue, kept=True)
        if bounds.clamp(offset) != offset:
            raise OffsetError(
                f"seek to offset {offset}; expected one from {bounds.min_offset} to {bounds.max_offset}",
                topic=queue.topic,
                queue=str(queue),
                remedy="Seek the beginning or the end instead",
            )
        return offset

    def stored(self, queue: MessageQueue) -> int | None:
        """The group's offset; None if it has none."""
        self.queues(queue.topic)
        return self._member.committed(self._settings.group, queue, self.soon(), young_at_zero=False)

    def store(self, offsets: Mapping[MessageQueue, int]) -> dict[MessageQueue, RocketMQError]:
        """Commit. Returns the failures; their begin and end are logged."""
        if not offsets:
            return {}
        failed = self._member.commit(self._settings.group, offsets, self.soon())
        self._trouble.note(offsets, failed)
        return failed

    def soon(self) -> Deadline:
        return Deadline.after(self._settings.request_timeout_s)


class PullAnswers:
    """Answers of one member. ``look`` makes it check its group soon, ``store`` commits offsets, ``missed`` gets resets of queues
    that it does not own: it may be acquiring one, with a start offset from before the reset."""

    def __init__(
        self,
        polls: Polls,
        membership: Callable[[], Membership],
        look: Callable[[], None],
        store: Callable[[Mapping[MessageQueue, int]], object],
        missed: Callable[[MessageQueue, int], None] = lambda queue, offset: None,
        answers_stacks: bool = True,
    ) -> None:
        self._polls = polls
        self._answers_stacks = answers_stacks
        self._membership = membership
        self._look = look
        self._store = store
        self._missed = missed
        self._started_ms = time.time_ns() // 1_000_000

    def __call__(self, address: str, question: BrokerRequest) -> Answer | None:
        """The answer to the broker at ``address``; None if none is expected, and for requests that need a listener."""
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
                return {q: info.commit_offset or 0 for q, info in self._polls.infos().items() if q.topic == topic}
            case InfoAsked(stacks):
                shown = stacks_of_threads() if stacks and self._answers_stacks else None
                return RunningInfo(self._membership(), self._started_ms, queues=self._polls.infos(), stacks=shown)
        return None
