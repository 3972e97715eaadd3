"""Prefetching for consumers that are far behind: it reads queues ahead of the consumer, with many pulls in flight.

A long poll requests one answer and waits for it. If the end of a queue is many answers away, the next offsets are known, so
many pulls can be in flight at once. One half of a queue's cache is for cached messages, the other half for messages in flight.
Each broker has its own thread and connection.

The consumer handles prefetched messages like answers to long polls. Long polls continue at the offset where a read ended: at
the last known end of the queue, or before the first answer that only a long poll can handle (see ``RangeRead.fetch``).
``lagging_queues``, ``offset_ranges_in_turn`` and ``next_pace`` are pure.
"""

from __future__ import annotations

import enum
import logging
import math
import threading
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from rocketmq_spark.base.clock import Clock
from rocketmq_spark.base.threads import Timer, start_thread
from rocketmq_spark.consumer.assigned import Bytes, FetchedPart, FetchRequest
from rocketmq_spark.consumer.member_state import MemberState
from rocketmq_spark.consumer.process_queue import ProcessQueue
from rocketmq_spark.consumer.settings import ConsumerSettings
from rocketmq_spark.errors import DecodeError, RocketMQError
from rocketmq_spark.model import MASTER_ID, MessageQueue, OffsetRange, ReceivedMessage
from rocketmq_spark.wire.messages import first_portion

logger = logging.getLogger(__name__)

# A queue is read ahead if its backlog has at least this many answers. A smaller backlog is not worth a connection.
MIN_BACKLOG_ANSWERS = 32
# Half of the cache must hold at least this many answers; otherwise single pulls are as fast.
MIN_ANSWERS_PER_HALF_CACHE = 4
# The most ranges of one read.
MAX_RANGES = 1024


@dataclass(frozen=True, slots=True)
class PrefetchLimits:
    """Limits of a read, which waits while the cache of a queue is full.

    The read checks for room whenever the consumer takes messages, and every ``recheck_interval_s`` seconds.
    """

    pull_batch_size: int  # the most messages of one answer
    max_count: int  # the most offsets of one queue in the cache and in flight
    max_bytes: int  # the most bytes of one queue in the cache and in flight
    max_full_s: float = math.inf  # a read ends when a cache has been full for this many seconds
    recheck_interval_s: float | None = None

    @property
    def half_count(self) -> int:
        return self.max_count // 2


class PrefetchableQueue(Protocol):
    """The state of one queue of a consumer, which is an ``AssignedQueue`` or a ``BacklogQueue``."""

    token: int  # changes when the position of the queue changes, which makes earlier reads obsolete
    is_fetching: bool  # whether a pull or a read of the queue runs
    pull_offset: int  # the offset of the next pull
    end_offset: int | None  # the last known end of the queue
    broker_id: int
    retry_at: float  # after a failure, no pull is sent before this time
    cooldown_until: float  # the queue is not read ahead before this time

    @property
    def paused(self) -> bool: ...
    @property
    def cached_count(self) -> int: ...
    @property
    def cached_bytes(self) -> int: ...


@dataclass(frozen=True, slots=True)
class BacklogRange:
    """The unread part of a queue, from the offset of its next pull (``request``) to its end."""

    request: FetchRequest
    end_offset: int


class ReadPace(enum.Enum):
    """What a running read does next."""

    GO = "go"
    WAIT = "wait"
    STOP = "stop"


def lagging_queues(
    states: Mapping[MessageQueue, PrefetchableQueue],
    now: float,
    limits: PrefetchLimits,
    is_unfiltered: Callable[[MessageQueue], bool],
) -> dict[str, list[BacklogRange]]:
    """Return the unread ranges of the queues to read ahead, by broker. These queues are far behind, and have no pull in
    flight.

    Queues with a filter are not read ahead. With a filter, a broker may search hundreds of offsets for one answer, so the
    offset of the next pull is unknown until the answer arrives.
    """
    backlogs: dict[str, list[BacklogRange]] = {}
    if limits.half_count < MIN_ANSWERS_PER_HALF_CACHE * limits.pull_batch_size:
        return backlogs
    for queue, state in states.items():
        if state.is_fetching or state.paused or state.end_offset is None or is_full(state, limits):
            continue
        if max(state.retry_at, state.cooldown_until) > now:
            continue
        backlog_size = state.end_offset - state.pull_offset
        if backlog_size >= MIN_BACKLOG_ANSWERS * limits.pull_batch_size and is_unfiltered(queue):
            request = FetchRequest(queue, state.pull_offset, state.broker_id, state.token)
            backlogs.setdefault(queue.broker_name, []).append(BacklogRange(request, state.end_offset))
    return backlogs


def is_full(state: PrefetchableQueue, limits: PrefetchLimits) -> bool:
    """Whether the cache has no room for more messages in flight."""
    return state.cached_count > limits.half_count or state.cached_bytes > limits.max_bytes // 2


def offset_ranges_in_turn(backlogs: Sequence[BacklogRange], size: int) -> list[OffsetRange]:
    """Return ranges of ``size`` offsets, alternating between the queues; about ``MAX_RANGES`` at most."""
    offset_ranges: list[OffsetRange] = []
    next_starts = [backlog.request.offset for backlog in backlogs]
    while len(offset_ranges) < MAX_RANGES:
        count_before = len(offset_ranges)
        for i, backlog in enumerate(backlogs):
            if next_starts[i] < backlog.end_offset:
                end = min(backlog.end_offset, next_starts[i] + size)
                offset_ranges.append(OffsetRange(backlog.request.queue, next_starts[i], end))
                next_starts[i] = end
        if len(offset_ranges) == count_before:
            break
    return offset_ranges


def next_pace(
    states: Mapping[MessageQueue, PrefetchableQueue], backlogs: Sequence[BacklogRange], limits: PrefetchLimits
) -> ReadPace:
    """Return ``STOP`` if a queue was paused, released or moved by a seek, and ``WAIT`` if the cache of a queue is full."""
    has_full_queue = False
    for backlog in backlogs:
        state = states.get(backlog.request.queue)
        if state is None or state.token != backlog.request.token or state.paused:
            return ReadPace.STOP
        has_full_queue = has_full_queue or is_full(state, limits)
    return ReadPace.WAIT if has_full_queue else ReadPace.GO


COOLDOWN_S = 10.0  # how long a queue is not read ahead after a read that ended early

IsUnfiltered = Callable[[MessageQueue], bool]
# Consecutive answers for one queue: the queue, the first offset, the end of each answer (see ``FetchedPart.ends``), and the
# stored messages.
ReadAnswer = tuple[MessageQueue, int, Sequence[tuple[int, int]], Bytes]


class RangeRead(Protocol):
    """A running read of ranges."""

    @property
    def had_only_plain_answers(self) -> bool:
        """Whether each answer continued where the previous answer ended, until the read reached its end or was stopped."""

    @property
    def resets(self) -> Mapping[MessageQueue, int]:
        """The offsets to which an operator reset queues. The mapping is complete when the read has ended."""

    def fetch(self) -> Generator[Sequence[ReadAnswer], None, None]:
        """Yield answers. If the offsets of an answer do not follow those of the previous answer, the read ends before the
        answer, and ``had_only_plain_answers`` is False.
        """

    def stop(self) -> None:
        """End the read soon, also while it waits for a broker."""


class PrefetchQueues(Protocol):
    """The queues of a consumer, which are an ``AssignedQueues`` or a ``BacklogQueues`` object.

    The caller holds the lock, except for ``process_accepted_parts``.
    """

    @property
    def states(self) -> Mapping[MessageQueue, PrefetchableQueue]: ...

    def mark_read_ahead(self, requests: Iterable[FetchRequest]) -> None:
        """Mark queues as read ahead."""

    def accept(self, request: FetchRequest, part: FetchedPart) -> bool:
        """Accept a part of a read; returns False if the part is obsolete."""

    def process_accepted_parts(self, parts: Sequence[tuple[FetchRequest, FetchedPart]]) -> None:
        """Process accepted parts. The caller does not hold the lock, because decoding is slow."""

    def reset(self, request: FetchRequest, offset: int) -> None:
        """Apply an operator's reset: ignore answers for this queue, and continue at ``offset``."""

    def release(self, requests: Iterable[FetchRequest], cooldown_until: float) -> None:
        """Mark queues as no longer read ahead. The next read ahead of the queues begins at ``cooldown_until`` or later."""


@dataclass(frozen=True, slots=True)
class BacklogReader:
    """Functions for reading ahead.

    ``start`` starts a read of ranges of one broker, and its last two arguments limit the offsets and the bytes in flight.
    ``decode`` decodes the messages of a queue between two offsets.
    """

    start: Callable[[Sequence[OffsetRange], int, int], RangeRead]
    decode: Callable[[MessageQueue, int, int, Bytes], Iterable[ReceivedMessage]]


class _BrokerReader:
    """The thread that reads ahead the queues of one broker, and its current read."""

    def __init__(self, is_unfiltered: IsUnfiltered) -> None:
        self.thread: threading.Thread | None = None
        self.is_unfiltered = is_unfiltered
        self.read: RangeRead | None = None
        self.backlogs: Sequence[BacklogRange] = ()
        self.has_new_backlog = False  # whether a queue that the current read does not include is far behind


class Prefetcher:
    """Reads the queues of a consumer ahead, with one thread for each broker.

    The state is guarded by the consumer's ``lock``, which is also the lock of ``condition``.
    """

    def __init__(
        self,
        lock: AbstractContextManager[object],
        condition: threading.Condition,
        queues: PrefetchQueues,
        limits: PrefetchLimits,
        backlog_reader: BacklogReader,
        clock: Clock,
    ) -> None:
        self._lock, self._condition = lock, condition
        self._queues = queues
        self._limits = limits
        self._backlog_reader = backlog_reader
        self._clock = clock
        self._readers: dict[str, _BrokerReader] = {}  # by broker
        self._waiting_reader_count = 0  # how many threads wait for room in a cache
        self._closed = False
        self.resume_long_polls: Callable[[], None] = lambda: None  # called without the lock when a thread ends

    def start(self, is_unfiltered: IsUnfiltered) -> set[MessageQueue]:
        """Start to read ahead the queues that are far behind, and return them. The caller holds the lock."""
        if self._closed:
            return set()
        self.wake_readers()
        backlogs_by_broker = lagging_queues(self._queues.states, self._clock.now(), self._limits, is_unfiltered)
        started_queues: set[MessageQueue] = set()
        for broker_name, backlogs in backlogs_by_broker.items():
            reader = self._readers.get(broker_name)
            if reader is None:
                if not self._start_reader(broker_name, is_unfiltered):
                    continue
            elif reader.backlogs:
                reader.has_new_backlog = True
            started_queues |= {backlog.request.queue for backlog in backlogs}
        return started_queues

    def _start_reader(self, broker_name: str, is_unfiltered: IsUnfiltered) -> bool:
        """Start the thread of a broker. Returns False if the system cannot start a thread, so that long polls continue."""
        reader = _BrokerReader(is_unfiltered)
        run, on_end = partial(self._run, broker_name, reader), partial(self._on_reader_end, broker_name, reader)
        try:
            self._readers[broker_name] = reader
            reader.thread = start_thread(f"rocketmq-ahead-{broker_name}", run, on_end, restart=False)
        except BaseException as e:
            # Ctrl-C is handled, too. If the thread was started already, it ends, because its reader is no longer registered.
            self._readers.pop(broker_name, None)
            if not isinstance(e, RuntimeError):
                raise
            logger.warning("cannot read ahead the backlog of broker %s: %s", broker_name, e)
            return False
        return True

    def wake_readers(self) -> None:
        """Wake the reads that wait for room. Called after a poll, a seek or a pause, with the lock held."""
        if self._waiting_reader_count and any(
            self._current_pace(reader) is not ReadPace.WAIT for reader in self._readers.values()
        ):
            self._condition.notify_all()

    def close(self, wait_s: float) -> None:
        """Stop all reads, and wait up to ``wait_s`` seconds for each thread."""
        with self._lock:
            self._closed = True
            self._condition.notify_all()
            readers = list(self._readers.values())
            for reader in readers:
                if reader.read is not None:
                    reader.read.stop()
        for reader in readers:
            if reader.thread is not None and reader.thread is not threading.current_thread():
                reader.thread.join(wait_s)

    def _run(self, broker_name: str, reader: _BrokerReader) -> None:
        while self._start_read(broker_name, reader):
            self._read(reader)

    def _on_reader_end(self, broker_name: str, reader: _BrokerReader) -> None:
        """Release the queues of a thread that ends, so that long polls continue. A later backlog starts a new thread."""
        with self._lock:
            if self._readers.get(broker_name) is reader:
                del self._readers[broker_name]
            self._end_read(reader, COOLDOWN_S)
        self.resume_long_polls()

    def _start_read(self, broker_name: str, reader: _BrokerReader) -> bool:
        """Start the next read of a broker; returns False if no queue of the broker is far behind."""
        with self._lock:
            if self._readers.get(broker_name) is not reader:
                return False
            backlogs_by_broker = lagging_queues(
                self._queues.states, self._clock.now(), self._limits, reader.is_unfiltered
            )
            backlogs = backlogs_by_broker.get(broker_name, [])
            if self._closed or not backlogs:
                return False
            self._queues.mark_read_ahead([backlog.request for backlog in backlogs])
            reader.backlogs, reader.has_new_backlog = backlogs, False
            half_count, queue_count = self._limits.half_count, len(backlogs)
            offset_ranges = offset_ranges_in_turn(backlogs, half_count)
            reader.read = self._backlog_reader.start(
                offset_ranges, half_count * queue_count, self._limits.max_bytes // 2 * queue_count
            )
            return True

    def _read(self, reader: _BrokerReader) -> None:
        assert reader.read is not None
        cooldown_s, pace = 0.0, ReadPace.GO
        try:
            with closing(reader.read.fetch()) as answer_batches:
                for answers in answer_batches:
                    self._deliver(reader, answers)
                    pace = self._wait_for_room(reader)
                    if pace is not ReadPace.GO:
                        break
            if not reader.read.had_only_plain_answers or pace is ReadPace.WAIT:
                cooldown_s = COOLDOWN_S
        except RocketMQError as e:
            logger.info("stopped reading ahead, continuing with long polls: %s", e)
            cooldown_s = COOLDOWN_S
        with self._lock:
            for queue, offset in reader.read.resets.items():
                self._reset(reader, queue, offset)
            self._end_read(reader, cooldown_s)

    def _deliver(self, reader: _BrokerReader, answers: Sequence[ReadAnswer]) -> None:
        """Pass answers to the consumer."""
        requests = {backlog.request.queue: backlog.request for backlog in reader.backlogs}
        parts = [
            (requests[queue], FetchedPart(queue, start, ends, stored, partial(self._backlog_reader.decode, queue)))
            for queue, start, ends, stored in answers
        ]
        with self._lock:
            accepted_flags = [self._queues.accept(request, part) for request, part in parts]
            self._condition.notify_all()
        self._queues.process_accepted_parts(
            [part for part, is_accepted in zip(parts, accepted_flags, strict=True) if is_accepted]
        )

    def _wait_for_room(self, reader: _BrokerReader) -> ReadPace:
        """Wait for room in the caches, and return how to continue. ``WAIT`` means that there was no room for ``max_full_s``."""
        wait_until = self._clock.now() + self._limits.max_full_s
        with self._lock:
            while (pace := self._current_pace(reader)) is ReadPace.WAIT and self._clock.now() < wait_until:
                self._waiting_reader_count += 1
                self._condition.wait(self._limits.recheck_interval_s)
                self._waiting_reader_count -= 1
            return pace

    def _current_pace(self, reader: _BrokerReader) -> ReadPace:
        all_unfiltered = all(reader.is_unfiltered(backlog.request.queue) for backlog in reader.backlogs)
        if self._closed or reader.has_new_backlog or not all_unfiltered:
            return ReadPace.STOP
        return next_pace(self._queues.states, reader.backlogs, self._limits)

    def _reset(self, reader: _BrokerReader, queue: MessageQueue, offset: int) -> None:
        logger.warning("the broker reset the offset of %s: continuing at %d", queue, offset)
        for backlog in reader.backlogs:
            if backlog.request.queue == queue:
                self._queues.reset(backlog.request, offset)

    def _end_read(self, reader: _BrokerReader, cooldown_s: float) -> None:
        self._queues.release([backlog.request for backlog in reader.backlogs], self._clock.now() + cooldown_s)
        reader.read, reader.backlogs = None, ()
        self._condition.notify_all()


MAX_FULL_S = 1.0  # if a cache is full for this long, the listener is slow, and pulls are fast enough
RECHECK_INTERVAL_S = 0.05  # the interval at which Java checks a full queue
SubmitMessages = Callable[[ProcessQueue, Sequence[Any]], None]
# A decoded part has the items for a process queue, and the offset of the first message that was left out. A message is left out
# if the messages before it are large. The offset is None if no message was left out.
DecodedPart = tuple[Sequence[Any], int | None]
DecodeParts = Callable[[Sequence[FetchedPart]], Iterable[DecodedPart]]
# A function that resets offsets of queues on another thread, and does not block.
ResetOffsetsSoon = Callable[[Mapping[MessageQueue, int]], None]


def decode_messages(parts: Sequence[FetchedPart]) -> Iterator[DecodedPart]:
    """``DecodeParts`` for a listener of messages."""
    for part in parts:
        messages, left_out_message = first_portion(part.read())
        yield messages, None if left_out_message is None else left_out_message.queue_offset


class BacklogQueue:
    """A queue that may be read ahead (``PrefetchableQueue``). Cached messages are in the process queue, or not decoded yet."""

    def __init__(self, process_queue: ProcessQueue, token: int, max_span: int | None) -> None:
        self.process_queue = process_queue
        self.token = token
        self.is_fetching = True
        self.pull_offset = 0
        self.end_offset: int | None = None
        self.cooldown_until = self.retry_at = 0.0
        self.broker_id = MASTER_ID
        self._max_span = max_span
        self.undecoded_count = self.undecoded_bytes = 0  # accepted messages that are not in the process queue yet

    @property
    def cached_count(self) -> int:
        return self.process_queue.count + self.undecoded_count

    @property
    def cached_bytes(self) -> int:
        return self.process_queue.bytes + self.undecoded_bytes

    @property
    def paused(self) -> bool:
        """Whether the queue was dropped, or its first unfinished message is too far behind its last message."""
        return self.process_queue.dropped or (self._max_span is not None and self.process_queue.span > self._max_span)


class BacklogQueues:
    """The queues of one member that are read ahead."""

    def __init__(
        self, settings: ConsumerSettings, state: MemberState, timer: Timer, backlog_reader: BacklogReader
    ) -> None:
        thresholds = settings.thresholds
        self._member_state = state
        self._timer = timer
        self._max_span = thresholds.max_span
        limits = PrefetchLimits(
            settings.pull_batch_size, thresholds.max_count, thresholds.max_bytes, MAX_FULL_S, RECHECK_INTERVAL_S
        )
        self._min_backlog_size = MIN_BACKLOG_ANSWERS * limits.pull_batch_size
        self._prefetcher = Prefetcher(state.lock, state.room_available, self, limits, backlog_reader, Clock())
        self._last_token = 0  # the token of the newest ``BacklogQueue``
        self._states: dict[MessageQueue, BacklogQueue] = {}
        # Set by ``Pulling.use_backlog_queues``.
        self.pull: Callable[[ProcessQueue, int], None] = lambda queue, offset: None  # pulls a queue from an offset on
        self.submit: SubmitMessages = lambda queue, messages: None  # passes messages to the listener
        self.decode: DecodeParts = decode_messages
        self.is_unfiltered: IsUnfiltered = lambda queue: False  # whether a queue is read without a filter
        self.reset_offsets_soon: ResetOffsetsSoon = lambda offsets: None
        state.resume_threshold = limits.half_count

    def try_read_ahead(self, queue: ProcessQueue, offset: int) -> bool:
        """Start to read ``queue`` ahead from ``offset`` on, if the queue is far behind. Returns False if the caller must pull
        the queue.
        """
        with self._member_state.lock:
            end_offset = self._member_state.end_offsets.get(queue.queue)
            if end_offset is None or end_offset - offset < self._min_backlog_size:
                return False
            backlog_queue = self._backlog_queue(queue)
            backlog_queue.pull_offset, backlog_queue.end_offset, backlog_queue.is_fetching = offset, end_offset, False
            backlog_queue.is_fetching = queue.queue not in self._prefetcher.start(self.is_unfiltered)
            return not backlog_queue.is_fetching

    def close(self, wait_s: float) -> None:
        self._prefetcher.close(wait_s)

    # --- ``PrefetchQueues``; the caller holds the lock

    @property
    def states(self) -> Mapping[MessageQueue, BacklogQueue]:
        return self._states

    def mark_read_ahead(self, requests: Iterable[FetchRequest]) -> None:
        for request in requests:
            self._states[request.queue].is_fetching = True

    def accept(self, request: FetchRequest, part: FetchedPart) -> bool:
        backlog_queue = self._current_queue(request)
        if backlog_queue is None:
            return False
        backlog_queue.undecoded_count += part.offset_count
        backlog_queue.undecoded_bytes += len(part.stored)
        return True

    def reset(self, request: FetchRequest, offset: int) -> None:
        """Apply an operator's reset, even if the queue was just dropped, because the broker reports a reset only once."""
        self.reset_offsets_soon({request.queue: offset})

    def release(self, requests: Iterable[FetchRequest], cooldown_until: float) -> None:
        for request in requests:
            if (backlog_queue := self._current_queue(request)) is not None:
                backlog_queue.is_fetching = False
                backlog_queue.cooldown_until = cooldown_until
                # Messages that could not be decoded are no longer counted, because pulls request them again.
                backlog_queue.undecoded_count = backlog_queue.undecoded_bytes = 0
        # ``_resume_pulls`` runs even if ``requests`` is empty, because queues that were added too late for the read still wait
        # for their pulls.
        self._timer.call_later(0, self._resume_pulls)

    # --- ``PrefetchQueues``; without the lock

    def process_accepted_parts(self, parts: Sequence[tuple[FetchRequest, FetchedPart]]) -> None:
        """Decode messages, on the thread that read them."""
        for (request, part), decoded_part in zip(parts, self.decode([part for _, part in parts]), strict=True):
            self._put_decoded_messages(request, part, *decoded_part)

    def _put_decoded_messages(
        self, request: FetchRequest, part: FetchedPart, messages: Sequence[Any], left_out_offset: int | None
    ) -> None:
        with self._member_state.lock:
            backlog_queue = self._current_queue(request)
            if backlog_queue is None:
                return
            backlog_queue.undecoded_count -= part.offset_count
            backlog_queue.undecoded_bytes -= len(part.stored)
            # The pull offset is set after the messages were decoded, so that pulls request the messages again if decoding
            # fails.
            backlog_queue.pull_offset = part.next_offset if left_out_offset is None else left_out_offset
            now_ms = self._timer.now_ms()
            backlog_queue.process_queue.last_pull_ms = now_ms
            backlog_queue.process_queue.put(messages)
            self._member_state.figures.record_pull(
                request.queue.topic, backlog_queue.process_queue.message_count(messages), None, now_ms
            )
        self.submit(backlog_queue.process_queue, messages)
        if left_out_offset is not None:
            raise DecodeError(
                f"the prefetched messages of {request.queue} are too large together; pulling from offset {left_out_offset} on"
            )

    def _resume_pulls(self) -> None:
        """Continue to pull the queues that are not read ahead."""
        with self._member_state.lock:
            released_queues = [
                backlog_queue for backlog_queue in self._states.values() if not backlog_queue.is_fetching
            ]
            for backlog_queue in released_queues:
                backlog_queue.is_fetching = True
        for backlog_queue in released_queues:
            self.pull(backlog_queue.process_queue, backlog_queue.pull_offset)

    def _backlog_queue(self, queue: ProcessQueue) -> BacklogQueue:
        backlog_queue = self._states.get(queue.queue)
        if backlog_queue is None or backlog_queue.process_queue is not queue:
            self._last_token += 1
            self._states = {
                message_queue: other_queue
                for message_queue, other_queue in self._states.items()
                if not other_queue.process_queue.dropped
            }
            backlog_queue = self._states[queue.queue] = BacklogQueue(queue, self._last_token, self._max_span)
        return backlog_queue

    def _current_queue(self, request: FetchRequest) -> BacklogQueue | None:
        backlog_queue = self._states.get(request.queue)
        return (
            backlog_queue
            if backlog_queue is not None
            and backlog_queue.token == request.token
            and not backlog_queue.process_queue.dropped
            else None
        )
