"""Reading ahead for consumers that are far behind: chooses queues and offsets, and reads them on threads.

A long poll requests one answer and waits for it. If the end of a queue is many answers away, the next offsets are known, so many
pulls can be in flight at once. Half of the cache of a queue is for cached messages, half for messages in flight. Each broker
has its own thread and connection.

The consumer handles these messages like answers to long polls. Long polls continue where a read ended: at the known end
of the queue, or at the first answer that is not plain messages. ``far_behind``, ``ranges`` and ``pace`` are pure.
"""

from __future__ import annotations

import enum
import logging
import math
import threading
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, closing
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from rocketmq_spark.base.clock import Clock
from rocketmq_spark.base.threads import start_thread
from rocketmq_spark.consumer.pull.assigned import Ask, Bytes, FetchedPart
from rocketmq_spark.errors import RocketMQError
from rocketmq_spark.model import MessageQueue, OffsetRange, ReceivedMessage

logger = logging.getLogger(__name__)

# A queue is read ahead if it is at least this many answers behind; fewer are not worth a connection.
FAR_ANSWERS = 32
# Half of the cache must hold at least this many answers; otherwise single pulls are as fast.
MIN_HALF = 4
# Ranges of one read. The next read uses the new ends of the queues.
MAX_RANGES = 1024


@dataclass(frozen=True, slots=True)
class Bounds:
    """Limits: messages per pull, and the offsets and bytes of one queue that may wait to be consumed.

    A read that finds no room for ``patience_s`` ends. It checks for room when messages are taken, and every ``recheck_s``.
    """

    count: int
    max_waiting: int
    max_bytes: int
    patience_s: float = math.inf
    recheck_s: float | None = None

    @property
    def half(self) -> int:
        return self.max_waiting // 2


class ReadAheadQueue(Protocol):
    """One queue of a consumer: ``assigned.AssignedQueue`` or ``backlog.BacklogQueue``."""

    token: int
    asked: bool
    pull_at: int
    end: int | None
    broker_id: int
    retry_at: float
    calm_until: float

    @property
    def paused(self) -> bool: ...
    @property
    def waiting(self) -> int: ...
    @property
    def bytes(self) -> int: ...


@dataclass(frozen=True, slots=True)
class Stretch:
    """The unread part of a queue, from its next pull (``ask``) to its end."""

    ask: Ask
    end: int


class ReadPace(enum.Enum):
    """What a running read does next."""

    GO = "go"
    WAIT = "wait"
    STOP = "stop"


def far_behind(
    places: Mapping[MessageQueue, ReadAheadQueue], now: float, bounds: Bounds, plain: Callable[[MessageQueue], bool]
) -> dict[str, list[Stretch]]:
    """Return the queues to read ahead, by broker, of those without a pull in flight. Only ``plain`` ones: for a filter, the
    broker searches hundreds of offsets per answer, so the next offset is unknown."""
    found: dict[str, list[Stretch]] = {}
    if bounds.half < MIN_HALF * bounds.count:
        return found
    for queue, place in places.items():
        if place.asked or place.paused or place.end is None or max(place.retry_at, place.calm_until) > now:
            continue
        if full(place, bounds):
            continue
        if place.end - place.pull_at >= FAR_ANSWERS * bounds.count and plain(queue):
            ask = Ask(queue, place.pull_at, place.broker_id, place.token)
            found.setdefault(queue.broker_name, []).append(Stretch(ask, place.end))
    return found


def full(place: ReadAheadQueue, bounds: Bounds) -> bool:
    """Whether the cache has no room for more messages in flight."""
    return place.waiting > bounds.half or place.bytes > bounds.max_bytes // 2


def ranges(stretches: Sequence[Stretch], size: int) -> list[OffsetRange]:
    """Return ranges of ``size`` offsets, one of each queue in turn; at least one and at most ``MAX_RANGES``."""
    made: list[OffsetRange] = []
    starts = [stretch.ask.offset for stretch in stretches]
    while len(made) < MAX_RANGES:
        before = len(made)
        for i, stretch in enumerate(stretches):
            if starts[i] < stretch.end:
                end = min(stretch.end, starts[i] + size)
                made.append(OffsetRange(stretch.ask.queue, starts[i], end))
                starts[i] = end
        if len(made) == before:
            break
    return made


def pace(places: Mapping[MessageQueue, ReadAheadQueue], stretches: Sequence[Stretch], bounds: Bounds) -> ReadPace:
    """Stop if a queue was sought, paused or released; wait while the cache of a queue is full."""
    waits = False
    for stretch in stretches:
        place = places.get(stretch.ask.queue)
        if place is None or place.token != stretch.ask.token or place.paused:
            return ReadPace.STOP
        waits = waits or full(place, bounds)
    return ReadPace.WAIT if waits else ReadPace.GO


CALM_S = 10.0  # for how long a queue with an unusual answer is long-polled before it is read ahead again

Plain = Callable[[MessageQueue], bool]
# Queue, first offset, of each answer its next offset and where its bytes end, stored messages.
Answered = tuple[MessageQueue, int, Sequence[tuple[int, int]], Bytes]


class Run(Protocol):
    """A read of ranges."""

    @property
    def whole(self) -> bool: ...

    @property
    def resets(self) -> Mapping[MessageQueue, int]:
        """Offsets to which an operator reset the group; brokers report each only once. Complete when the read has ended."""

    def fetch(self) -> Generator[Sequence[Answered], None, None]:
        """Yield answers. Ends early, with ``whole`` False, before an answer that is not plain messages."""

    def stop(self) -> None:
        """End the read soon, also while it waits for a broker."""


class Queues(Protocol):
    """The queues of a consumer: ``Assigned`` or ``Backlog``. All methods but ``brought`` are called with the condition held."""

    @property
    def places(self) -> Mapping[MessageQueue, ReadAheadQueue]: ...

    def hold(self, asks: Iterable[Ask]) -> None:
        """Mark queues as read ahead."""

    def bring(self, ask: Ask, part: FetchedPart) -> bool:
        """Take an answer; returns False if it is obsolete."""

    def brought(self, parts: Sequence[tuple[Ask, FetchedPart]]) -> None:
        """Answers that were taken; called without the condition, for slow work."""

    def reset(self, ask: Ask, offset: int) -> None:
        """Apply an operator's reset: ignore answers for this queue, and continue at ``offset``."""

    def let_go(self, asks: Iterable[Ask], calm_until: float) -> None:
        """Mark queues as not read ahead, at least until ``calm_until``."""


@dataclass(frozen=True, slots=True)
class ReadAhead:
    """Functions for reading ahead: ``begin`` reads ranges of one broker within limits of offsets and bytes, ``messages``
    decodes the messages between two offsets.
    """

    begin: Callable[[Sequence[OffsetRange], int, int], Run]
    messages: Callable[[MessageQueue, int, int, Bytes], Iterable[ReceivedMessage]]


class _Reader:
    """The read of one broker, on its thread."""

    def __init__(self, plain: Plain) -> None:
        self.thread: threading.Thread | None = None
        self.plain = plain
        self.run: Run | None = None
        self.stretches: Sequence[Stretch] = ()
        self.joined = False  # by a queue that the run does not have


class Ahead:
    """Reads ``queues`` ahead. Consumers share them, guarded by ``lock``, which is that of ``changed``; ``polled`` continues
    long polls.
    """

    def __init__(
        self,
        lock: AbstractContextManager[object],
        changed: threading.Condition,
        queues: Queues,
        bounds: Bounds,
        how: ReadAhead,
        clock: Clock,
    ) -> None:
        self._lock, self._changed = lock, changed
        self._queues = queues
        self._bounds = bounds
        self._how = how
        self._clock = clock
        self._readers: dict[str, _Reader] = {}
        self._waiting = 0
        self._closed = False
        self.polled: Callable[[], None] = lambda: None

    def begin(self, plain: Plain) -> set[MessageQueue]:
        """Begin to read queues ahead that are far behind. Needs the condition."""
        if self._closed:
            return set()
        self.taken()
        far = far_behind(self._queues.places, self._clock.now(), self._bounds, plain)
        begun: set[MessageQueue] = set()
        for broker_name, stretches in far.items():
            reader = self._readers.get(broker_name)
            if reader is None:
                if not self._start(broker_name, plain):
                    continue
            elif reader.stretches:
                reader.joined = True
            begun |= {stretch.ask.queue for stretch in stretches}
        return begun

    def _start(self, broker_name: str, plain: Plain) -> bool:
        """Start the thread of a broker. If there is none, long polls continue."""
        reader = _Reader(plain)
        run, ended = partial(self._run, broker_name, reader), partial(self._ended, broker_name, reader)
        try:
            self._readers[broker_name] = reader
            reader.thread = start_thread(f"rocketmq-ahead-{broker_name}", run, ended, again=False)
        except BaseException as e:  # Ctrl-C, too: there may be a thread, or none, and it finds that it is not wanted
            self._readers.pop(broker_name, None)
            if not isinstance(e, RuntimeError):
                raise
            logger.warning("cannot read ahead the backlog of broker %s: %s", broker_name, e)
            return False
        return True

    def taken(self) -> None:
        """Wake reads that wait for room, after a poll, seek or pause. Needs the condition."""
        if self._waiting and any(self._pace(reader) is not ReadPace.WAIT for reader in self._readers.values()):
            self._changed.notify_all()

    def close(self, wait_s: float) -> None:
        """Stop reading, and wait a moment for the threads."""
        with self._lock:
            self._closed = True
            self._changed.notify_all()
            readers = list(self._readers.values())
            for reader in readers:
                if reader.run is not None:
                    reader.run.stop()
        for reader in readers:
            if reader.thread is not None and reader.thread is not threading.current_thread():
                reader.thread.join(wait_s)

    def _run(self, broker_name: str, reader: _Reader) -> None:
        while self._next(broker_name, reader):
            self._read(reader)

    def _ended(self, broker_name: str, reader: _Reader) -> None:
        """Return the queues of a thread that ends to long polls. A later backlog gets a new thread."""
        with self._lock:
            if self._readers.get(broker_name) is reader:
                del self._readers[broker_name]
            self._end(reader, CALM_S)
        self.polled()

    def _next(self, broker_name: str, reader: _Reader) -> bool:
        """Note what to read next; False for nothing."""
        with self._lock:
            if self._readers.get(broker_name) is not reader:
                return False
            far = far_behind(self._queues.places, self._clock.now(), self._bounds, reader.plain)
            stretches = far.get(broker_name, [])
            if self._closed or not stretches:
                return False
            self._queues.hold([stretch.ask for stretch in stretches])
            reader.stretches, reader.joined = stretches, False
            half, count = self._bounds.half, len(stretches)
            wanted = ranges(stretches, half)
            reader.run = self._how.begin(wanted, half * count, self._bounds.max_bytes // 2 * count)
            return True

    def _read(self, reader: _Reader) -> None:
        assert reader.run is not None
        calm_s, pace = 0.0, ReadPace.GO
        try:
            with closing(reader.run.fetch()) as answers:
                for some in answers:
                    self._bring(reader, some)
                    pace = self._room(reader)
                    if pace is not ReadPace.GO:
                        break
            if not reader.run.whole or pace is ReadPace.WAIT:
                calm_s = CALM_S
        except RocketMQError as e:
            logger.info("stopped reading ahead, continuing with long polls: %s", e)
            calm_s = CALM_S
        with self._lock:
            for queue, offset in reader.run.resets.items():
                self._reset(reader, queue, offset)
            self._end(reader, calm_s)

    def _bring(self, reader: _Reader, answers: Sequence[Answered]) -> None:
        """Pass an answer to the consumer."""
        asks = {stretch.ask.queue: stretch.ask for stretch in reader.stretches}
        parts = [
            (asks[queue], FetchedPart(queue, start, ends, stored, partial(self._how.messages, queue)))
            for queue, start, ends, stored in answers
        ]
        with self._lock:
            wanted = [self._queues.bring(ask, part) for ask, part in parts]
            self._changed.notify_all()
        self._queues.brought([one for one, is_wanted in zip(parts, wanted, strict=True) if is_wanted])

    def _room(self, reader: _Reader) -> ReadPace:
        """Wait for room, and return how to continue; ``WAIT`` after ``patience_s`` without room."""
        until = self._clock.now() + self._bounds.patience_s
        with self._lock:
            while (pace := self._pace(reader)) is ReadPace.WAIT and self._clock.now() < until:
                self._waiting += 1
                self._changed.wait(self._bounds.recheck_s)
                self._waiting -= 1
            return pace

    def _pace(self, reader: _Reader) -> ReadPace:
        plain = all(reader.plain(stretch.ask.queue) for stretch in reader.stretches)
        if self._closed or reader.joined or not plain:
            return ReadPace.STOP
        return pace(self._queues.places, reader.stretches, self._bounds)

    def _reset(self, reader: _Reader, queue: MessageQueue, offset: int) -> None:
        logger.warning("the broker reset the offset of %s: continuing at %d", queue, offset)
        for stretch in reader.stretches:
            if stretch.ask.queue == queue:
                self._queues.reset(stretch.ask, offset)

    def _end(self, reader: _Reader, calm_s: float) -> None:
        self._queues.let_go([stretch.ask for stretch in reader.stretches], self._clock.now() + calm_s)
        reader.run, reader.stretches = None, ()
        self._changed.notify_all()
