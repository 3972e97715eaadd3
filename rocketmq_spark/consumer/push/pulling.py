"""The long polls of one member; each answer leads to the queue's next pull. Java's ``PullMessageService``.

One thread serves all queues and never waits for answers or listeners. A queue has one pull at a time, from when a rebalance
adds the queue until it is dropped.

Queues that are far behind their ends are read ahead (``ahead``) for a while: a pull returns 32 messages and involves three
threads; reading ahead has many pulls in flight. A queue is either pulled or read ahead; only between ``take`` and the start of a
read it is neither. The conditions that pause pulls (a full cache, a listener that blocks the offset) also end a read, and pulls
continue.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Protocol

from rocketmq_spark.base.clock import Clock, Deadline
from rocketmq_spark.base.codes import Response
from rocketmq_spark.base.threads import Failure, Timer, attempt
from rocketmq_spark.consumer.ahead import FAR_ANSWERS, Ahead, Bounds, Plain, ReadAhead
from rocketmq_spark.consumer.process_queue import (
    FIRST_PULL_DELAY_S,
    FULL_PAUSE_S,
    ProcessQueue,
    PullDecision,
    decide_next_pull,
    pause_reason,
)
from rocketmq_spark.consumer.pull.assigned import Ask, FetchedPart
from rocketmq_spark.consumer.push.member_state import MemberState
from rocketmq_spark.consumer.settings import ConsumerSettings, TopicFilter
from rocketmq_spark.errors import ConnectionLost, DecodeError, RocketMQError
from rocketmq_spark.model import MASTER_ID, MessageQueue, PullAnswer, PullRequest, PullStatus
from rocketmq_spark.ports import GroupMember
from rocketmq_spark.wire.messages import portion

PATIENCE_S = 1.0  # pulls are fast enough for slower listeners
RECHECK_S = 0.05  # the interval at which Java checks a full queue

Submit = Callable[[ProcessQueue, Sequence[Any]], None]
# What is put into a process queue, and the offset from which on messages are left because these are too large; of each part.
Unpacked = tuple[Sequence[Any], int | None]
Unpack = Callable[[Sequence[FetchedPart]], Iterable[Unpacked]]
Move = Callable[[Mapping[MessageQueue, int]], None]  # resets offsets of queues on another thread; must not block


def as_messages(parts: Sequence[FetchedPart]) -> Iterator[Unpacked]:
    """``Unpack`` for a listener of messages."""
    for part in parts:
        messages, left = portion(part.read())
        yield messages, None if left is None else left.queue_offset


class BacklogQueue:
    """One queue (``ahead.ReadAheadQueue``). Its messages wait in its process queue, or are on their way there."""

    def __init__(self, held: ProcessQueue, token: int, max_span: int | None) -> None:
        self.held = held
        self.token = token
        self.asked = True
        self.pull_at = 0
        self.end: int | None = None
        self.calm_until = self.retry_at = 0.0
        self.broker_id = MASTER_ID
        self._max_span = max_span
        self.coming = self.coming_bytes = 0

    @property
    def waiting(self) -> int:
        return self.held.count + self.coming

    @property
    def bytes(self) -> int:
        return self.held.bytes + self.coming_bytes

    @property
    def paused(self) -> bool:
        """Whether the queue was dropped, or an unfinished message holds its offset far back."""
        return self.held.dropped or (self._max_span is not None and self.held.span > self._max_span)


class Backlog:
    """The queues of one member that are read ahead."""

    def __init__(self, settings: ConsumerSettings, held: MemberState, timer: Timer, how: ReadAhead) -> None:
        most = settings.thresholds
        self._held = held
        self._timer = timer
        self._max_span = most.max_span
        bounds = Bounds(settings.pull_batch_size, most.max_count, most.max_bytes, PATIENCE_S, RECHECK_S)
        self._far = FAR_ANSWERS * bounds.count
        self._ahead = Ahead(held.lock, held.changed, self, bounds, how, Clock())
        self._tokens = 0
        self._places: dict[MessageQueue, BacklogQueue] = {}
        # Set by who makes pulls: the next one of a queue, from an offset on; have messages consumed; is all of a queue wanted;
        # have queues go on at other offsets.
        self.pull: Callable[[ProcessQueue, int], None] = lambda queue, offset: None
        self.submit: Submit = lambda queue, messages: None
        self.unpack: Unpack = as_messages
        self.plain: Plain = lambda queue: False
        self.move: Move = lambda offsets: None
        held.low = bounds.half

    def take(self, queue: ProcessQueue, offset: int) -> bool:
        """Whether ``queue`` is read ahead from ``offset`` on. If not, the caller pulls it."""
        with self._held.lock:
            end = self._held.ends.get(queue.queue)
            if end is None or end - offset < self._far:
                return False
            place = self._place(queue)
            place.pull_at, place.end, place.asked = offset, end, False
            place.asked = queue.queue not in self._ahead.begin(self.plain)
            return not place.asked

    def close(self, wait_s: float) -> None:
        self._ahead.close(wait_s)

    # --- ``ahead.Queues``, with the lock held

    @property
    def places(self) -> Mapping[MessageQueue, BacklogQueue]:
        return self._places

    def hold(self, asks: Iterable[Ask]) -> None:
        for ask in asks:
            self._places[ask.queue].asked = True

    def bring(self, ask: Ask, part: FetchedPart) -> bool:
        place = self._current(ask)
        if place is None:
            return False
        place.coming += part.count
        place.coming_bytes += len(part.stored)
        return True

    def reset(self, ask: Ask, offset: int) -> None:
        """Apply an operator's reset, also if the queue was just dropped: the broker reports a reset only once."""
        self.move({ask.queue: offset})

    def let_go(self, asks: Iterable[Ask], calm_until: float) -> None:
        for ask in asks:
            if (place := self._current(ask)) is not None:
                place.asked = False
                place.calm_until = calm_until
                place.coming = place.coming_bytes = (
                    0  # also for messages that could not be decoded: pulls request them again
                )
        self._timer.later(0, self._go_on)  # also where none is left: what came too late for a read is still free

    # --- without it

    def brought(self, parts: Sequence[tuple[Ask, FetchedPart]]) -> None:
        """Decode messages, on the thread that read them."""
        for (ask, part), unpacked in zip(parts, self.unpack([part for _, part in parts]), strict=True):
            self._put(ask, part, *unpacked)

    def _put(self, ask: Ask, part: FetchedPart, messages: Sequence[Any], left: int | None) -> None:
        with self._held.lock:
            place = self._current(ask)
            if place is None:
                return
            place.coming -= part.count
            place.coming_bytes -= len(part.stored)
            # No sooner: what is not decoded is to be had again.
            place.pull_at = part.next_offset if left is None else left
            now_ms = self._timer.now_ms()
            place.held.last_pull_ms = now_ms
            place.held.put(messages)
            self._held.figures.pulled(ask.queue.topic, place.held.message_count(messages), None, now_ms)
        self.submit(place.held, messages)
        if left is not None:
            raise DecodeError(f"what was read ahead of {ask.queue} becomes large: it is pulled from offset {left} on")

    def _go_on(self) -> None:
        """Continue to pull the queues that are not read ahead."""
        with self._held.lock:
            free = [place for place in self._places.values() if not place.asked]
            for place in free:
                place.asked = True
        for place in free:
            self.pull(place.held, place.pull_at)

    def _place(self, queue: ProcessQueue) -> BacklogQueue:
        place = self._places.get(queue.queue)
        if place is None or place.held is not queue:
            self._tokens += 1
            self._places = {known: one for known, one in self._places.items() if not one.held.dropped}
            place = self._places[queue.queue] = BacklogQueue(queue, self._tokens, self._max_span)
        return place

    def _current(self, ask: Ask) -> BacklogQueue | None:
        place = self._places.get(ask.queue)
        return place if place is not None and place.token == ask.token and not place.held.dropped else None


logger = logging.getLogger(__name__)

# A broker that was restarted does not know the group and its subscriptions until the next heartbeat.
_NOT_TOLD_YET = (Response.SUBSCRIPTION_NOT_EXIST, Response.SUBSCRIPTION_NOT_LATEST)


class Consuming(Protocol):
    """What passes messages to the listener: ``Concurrent`` or ``Orderly``."""

    def ready(self, queue: ProcessQueue) -> bool:
        """Whether the queue may be pulled. An orderly consumer needs its lock."""

    def submit(self, queue: ProcessQueue, messages: Sequence[Any]) -> None:
        """Consume what was put into ``queue``. Must not block."""


class Pulling:
    """``subscribed`` returns the current filter of a topic; ``repair`` replaces an illegal offset and releases the queue."""

    def __init__(
        self,
        port: GroupMember,
        settings: ConsumerSettings,
        held: MemberState,
        timer: Timer,
        subscribed: Callable[[str], TopicFilter | None],
        repair: Callable[[ProcessQueue, int], None],
    ) -> None:
        self._port = port
        self._settings = settings
        self._held = held
        self._timer = timer
        self._subscribed = subscribed
        self._repair = repair
        self._replicas: dict[MessageQueue, int] = {}
        self._complaints: set[tuple[str, int | None]] = set()  # brokers, and what they last refused us for
        self._backlog: Backlog | None = None
        self.unpack: Unpack | None = None  # None: answers are messages already
        self.consuming: Consuming | None = None
        self.move: Move = lambda offsets: None  # for resets
        self.unready: Callable[[ProcessQueue], None] = lambda queue: (
            None
        )  # a queue is not pulled because it is not ready
        self.unknown: Callable[[], None] = lambda: None  # a broker does not know this member
        self.lost: Callable[[str], None] = lambda broker_name: None  # its connection broke
        self._lost: set[str] = set()  # brokers that did not answer since

    def read_ahead(self, backlog: Backlog) -> None:
        """Use ``backlog`` for queues that are far behind."""
        backlog.pull, backlog.submit, backlog.move = self._pull, self._submit, self.move
        backlog.unpack = self.unpack or as_messages
        backlog.plain = lambda queue: (wanted := self._subscribed(queue.topic)) is not None and not wanted.filter
        self._backlog = backlog

    def begin(self, queue: ProcessQueue, offset: int, in_s: float = FIRST_PULL_DELAY_S) -> None:
        """Pull ``queue`` from ``offset`` on, until it is dropped."""
        self._timer.later(in_s, partial(self._pull, queue, offset))

    def close(self, wait_s: float) -> None:
        """Stop pulling, and ignore later answers. Waits until the deadline for reads of ``backlog``."""
        self._timer.close(wait_s)
        if self._backlog is not None:
            self._backlog.close(wait_s)

    def _pull(self, queue: ProcessQueue, offset: int) -> None:
        if queue.dropped:
            return
        queue.last_pull_ms = self._timer.now_ms()
        wait_s = self._wait_s(queue)
        wanted = self._subscribed(queue.queue.topic)
        if wait_s or wanted is None:
            self.begin(queue, offset, wait_s or self._settings.pull_delay_on_error_s)
            return
        if self._backlog is not None and self._backlog.take(queue, offset):
            return
        request = self._request(queue.queue, offset, wanted)
        self._port.pull(
            request, Deadline.after(self._settings.pull_timeout_s), partial(self._came, queue, offset, wanted)
        )

    def _wait_s(self, queue: ProcessQueue) -> float:
        """Return the pause in seconds before the next pull of the queue; 0 for none."""
        if self.consuming is None or not self.consuming.ready(queue):  # first: a full queue may be long without pulls
            self.unready(queue)
            return self._settings.pull_delay_on_error_s
        with self._held.lock:
            why = pause_reason(queue, self._held.thresholds_of(queue.queue.topic))
        if why:
            logger.debug("%s is not pulled now: %s", queue.queue, why)
            return FULL_PAUSE_S
        return 0.0

    def _request(self, queue: MessageQueue, offset: int, wanted: TopicFilter) -> PullRequest:
        finished = self._held.offsets.get(queue) if self._settings.clustering else None
        return PullRequest(
            group=self._settings.group,
            queue=queue,
            offset=offset,
            count=self._settings.pull_batch_size,
            filter=wanted.filter,
            post_filter=self._settings.post_subscription_when_pull,
            version_ms=wanted.version_ms,
            suspend_s=self._settings.pull_suspend_s,
            commit_offset=finished or None,
            broker_id=self._replicas.get(queue, MASTER_ID),
            max_bytes=self._settings.pull_batch_size_in_bytes,
            decoded=self.unpack is None,
        )

    def _came(self, queue: ProcessQueue, offset: int, wanted: TopicFilter, answer: PullAnswer | RocketMQError) -> None:
        """Pass an answer from the connection's thread to the pull thread.

        A reset also applies to a queue that was just released, and while the consumer stops: the broker reports it only once.
        """
        if isinstance(answer, PullAnswer) and answer.reset:
            self.move({queue.queue: answer.next_offset})
            return
        if isinstance(answer, PullAnswer) and self.unpack is not None and not queue.dropped:
            unpacked = attempt(_unpacked, queue.queue, offset, wanted, answer, self.unpack)
            if isinstance(unpacked, Failure):  # without memory for instance: it is pulled again
                unpacked.log(logger, "an answer to a pull of %s at %d could not be decoded", queue.queue, offset)
                answer = DecodeError(f"the answer could not be decoded: {unpacked}", queue=str(queue.queue))
            else:
                answer = unpacked
        self._timer.later(0, partial(self._landed, queue, offset, wanted, answer))

    def _landed(
        self, queue: ProcessQueue, offset: int, wanted: TopicFilter, answer: PullAnswer | RocketMQError
    ) -> None:
        if queue.dropped:
            return
        if isinstance(answer, RocketMQError):
            self._replicas.pop(
                queue.queue, None
            )  # a slave that it was sent to may be gone: the master says where to ask
            self._complain(queue.queue, offset, answer)
            if answer.broker_code in _NOT_TOLD_YET:
                self.unknown()
            elif isinstance(answer, ConnectionLost) and queue.queue.broker_name not in self._lost:
                self._lost.add(queue.queue.broker_name)
                self.lost(queue.queue.broker_name)
        else:
            self._replicas[queue.queue] = answer.broker_id
            self._complaints = {known for known in self._complaints if known[0] != queue.queue.broker_name}
            self._lost.discard(queue.queue.broker_name)
            now = self._subscribed(queue.queue.topic)
            if now is None or now.since_ms != wanted.since_ms:
                self._pull(queue, offset)  # the answer may have passed over what is wanted now
                return
        then = decide_next_pull(offset, answer, self._settings.pull_interval_s, self._settings.pull_delay_on_error_s)
        if then.corrected_offset is not None:
            logger.warning(
                "offset %d of %s does not exist, continuing at %d", offset, queue.queue, then.corrected_offset
            )
            self._repair(queue, then.corrected_offset)
            return
        self._note(queue, answer, then)
        if then.messages:
            self._submit(queue, then.messages)
        if then.pause_s:
            self.begin(queue, then.offset, then.pause_s)
        else:
            self._pull(queue, then.offset)

    def _submit(self, queue: ProcessQueue, messages: Sequence[Any]) -> None:
        if self.consuming is not None:
            self.consuming.submit(queue, messages)

    def _complain(self, queue: MessageQueue, offset: int, error: RocketMQError) -> None:
        """Log a failed pull. A failure that may last, such as a missing group, is a warning, once per broker until it answers."""
        complaint = queue.broker_name, error.broker_code
        passes = error.retriable or error.broker_code in _NOT_TOLD_YET
        level = logging.INFO if passes or complaint in self._complaints else logging.WARNING
        if not passes:
            self._complaints.add(complaint)
        logger.log(level, "group %s: a pull of %s at %d failed: %s", self._settings.group, queue, offset, error)

    def _note(self, queue: ProcessQueue, answer: PullAnswer | RocketMQError, then: PullDecision) -> None:
        with self._held.lock:
            if isinstance(answer, PullAnswer):
                self._held.ends[queue.queue], queue.end_updated_ms = answer.max_offset, self._timer.now_ms()
                if answer.status is PullStatus.FOUND:
                    now_ms = self._timer.now_ms()
                    spent_ms = now_ms - queue.last_pull_ms
                    self._held.figures.pulled(queue.queue.topic, queue.message_count(answer.messages), spent_ms, now_ms)
            queue.put(then.messages)
            if then.finished_offset is not None and not queue.count:
                self._held.finished(queue, then.finished_offset)


def _unpacked(queue: MessageQueue, offset: int, wanted: TopicFilter, answer: PullAnswer, unpack: Unpack) -> PullAnswer:
    """An answer that came as it is stored, with what is put into the process queue."""
    if answer.status is not PullStatus.FOUND:
        return answer
    ends = ((answer.next_offset, len(answer.stored)),)
    part = FetchedPart(queue, offset, ends, answer.stored, lambda *_: answer.read(), wanted.filter)
    ((messages, left),) = unpack([part])
    return replace(
        answer, messages=messages, next_offset=answer.next_offset if left is None else left, stored=b"", read=tuple
    )
