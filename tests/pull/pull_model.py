"""Queues of one broker as a model, and a pull stream over it whose time, order and accidents the test decides.

The stream stands in for ``BulkStream`` where a test must not take real time; its bodies are messages of which only offset
and flags are written.
"""

from __future__ import annotations

import random
import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
from hypothesis import strategies as st

from rocketmq_spark.base.clock import Clock, Deadline
from rocketmq_spark.errors import ConnectionLost, RocketMQError
from rocketmq_spark.model import MessageQueue, OffsetRange
from rocketmq_spark.pull.fetched import FetchedAnswers, Hole
from rocketmq_spark.pull.outcomes import Cause
from rocketmq_spark.pull.pacing import PullSettings
from rocketmq_spark.pull.range_reader import RangeReader
from rocketmq_spark.remoting.bulk import BUFFER_BYTES, EmptyAnswer, FoundAnswer, Keys, PullTemplate
from rocketmq_spark.wire import header, rpc

# As a stored message has them: offset and flags; what lies between is no matter here.
_MESSAGE = struct.Struct(">20xq8xi")
_INNER = 0x80


def offset_at(buffer: np.ndarray, at: int) -> int:
    offset: int = _MESSAGE.unpack_from(buffer, at)[0]
    return offset


class Time:
    """A clock that moves when somebody sleeps or waits."""

    def __init__(self) -> None:
        self.now = 1000.0

    def advance(self, seconds: float) -> None:
        self.now += max(0.0, seconds)

    def pauses(self) -> Iterator[float]:
        pause = 0.02
        while True:
            yield pause
            pause = min(1.0, pause * 2)

    @property
    def clock(self) -> Clock:
        return Clock(lambda: self.now, self.advance, self.pauses)


@dataclass
class Queue:
    """What one queue holds. ``steps`` maps an offset to how many index entries its message takes (inner batches)."""

    low: int
    high: int
    gaps: frozenset[int] = frozenset()
    batches: dict[int, int] = field(default_factory=dict)
    message_bytes: int = 40
    visible_from: Callable[[float], int] | None = None
    deleted_at: float | None = None
    truncate: tuple[float, int] | None = None

    def stored(self) -> set[int]:
        """Offsets that have a message."""
        return {n for n in range(self.low, self.high) if n not in self.gaps}

    def base(self, offset: int) -> int:
        """Where the inner batch begins that covers ``offset``."""
        return next((b for b, size in self.batches.items() if b <= offset < b + size), offset)

    def message(self, offset: int) -> bytes:
        flags = _INNER if self.base(offset) in self.batches else 0
        return _MESSAGE.pack(offset, flags).ljust(self.message_bytes, b"\0")

    def pull(self, now: float, start: int, count: int) -> tuple[list[int], int] | EmptyAnswer:
        """Offsets of the messages in an answer and where to go on, or what the broker says instead."""
        if self.deleted_at is not None and now >= self.deleted_at:
            return EmptyAnswer(17, "topic[t] not exist", None, None, None, 0)
        if self.truncate is not None and now >= self.truncate[0]:
            self.low = max(self.low, self.truncate[1])
        high = self.high if self.visible_from is None else min(self.high, self.visible_from(now))
        if start < self.low:
            return EmptyAnswer(21, "OFFSET_TOO_SMALL", self.low, self.low, high, 0)
        if start == high:
            return EmptyAnswer(19, "OFFSET_OVERFLOW_ONE", start, self.low, high, 0)
        if start > high:
            return EmptyAnswer(21, "OFFSET_OVERFLOW_BADLY", high, self.low, high, 0)
        at, found = self.base(start), []
        while at < high and len(found) < count:
            step = self.batches.get(at, 1)
            found += [n for n in range(at, at + step) if n not in self.gaps]
            at += step
        return found, at


@dataclass
class Accidents:
    """What may go wrong, as chances per pull or per receipt."""

    busy: float = 0.0
    reset_once: bool = False
    short: float = 0.0
    slow: float = 0.0
    cut: float = 0.0
    no_connection: float = 0.0
    silent: float = 0.0


class Model:
    """The broker, its network and the clock."""

    def __init__(self, queues: Sequence[Queue], accidents: Accidents | None = None, seed: int = 0) -> None:
        self.queues = queues
        self.accidents = accidents or Accidents()
        self.rng = random.Random(seed)
        self.time = Time()
        self.streams: list[Stream] = []
        self.buffer_bytes = BUFFER_BYTES
        self.asked: list[tuple[int, int, int]] = []
        self.max_asked = 100_000  # many times what any test asks for: a read without an end fails
        self.max_in_flight = 0
        # Whether gaps are gone from the log, not filtered: then a broker says so when it finds nothing at all.
        self.removing = False
        self.max_filled = 0
        self.latency: Callable[[int, int], float] = lambda queue, start: 0.001
        self.on_hint: Callable[[int | None], bool] | None = None
        self.suggests = 0
        # Who signs pulls, and the access key of each.
        self.keys: Callable[[], Keys] | None = None
        self.signed: list[str | None] = []
        # The minimum that answers with messages tell, by queue.
        self.lows: dict[int, int] = {}

    def connect(self, deadline: Deadline) -> Stream:
        if self.chance(self.accidents.no_connection):
            raise ConnectionLost("cannot connect: Connection refused", "h:1")
        self.streams.append(Stream(self))
        return self.streams[-1]

    def chance(self, share: float) -> bool:
        return share > 0 and self.rng.random() < share

    def answer(self, queue_id: int, start: int, count: int) -> tuple[list[int], int] | EmptyAnswer:
        if self.accidents.reset_once:
            self.accidents.reset_once = False
            return EmptyAnswer(21, "OFFSET_RESET", 0, 0, 1, 0)
        if self.chance(self.accidents.busy):
            return EmptyAnswer(2, "[TIMEOUT_CLEAN_QUEUE]broker busy", None, None, None, 0)
        if self.chance(self.accidents.short):
            count = self.rng.randint(1, count)
        answer = self.queues[queue_id].pull(self.time.now, start, count)
        if self.removing and not isinstance(answer, EmptyAnswer) and not answer[0]:
            queue = self.queues[queue_id]
            return EmptyAnswer(20, "MESSAGE_WAS_REMOVING", answer[1], queue.low, queue.high, 0)
        return answer

    def reader(
        self, ranges: Sequence[OffsetRange], settings: PullSettings, on_loss: Callable[[OffsetRange, Cause], None]
    ) -> RangeReader:
        templates = [PullTemplate(pull_of(r.queue), self.keys) for r in ranges]
        clock, hint = self.time.clock, self.on_hint
        return RangeReader(ranges, self.connect, templates, settings, on_loss, clock, hint)  # type: ignore[arg-type]


def pull_of(queue: MessageQueue) -> header.Command:
    return rpc.PULL_MESSAGE.request(
        consumerGroup="g",
        topic=queue.topic,
        queueId=queue.queue_id,
        queueOffset=0,
        maxMsgNums=1,
        sysFlag=4,
        commitOffset=0,
        suspendTimeoutMillis=0,
        subVersion=0,
    )


class Stream:
    """The part of ``BulkStream`` that a reader uses."""

    def __init__(self, model: Model) -> None:
        self.model = model
        self.address = "h:1"
        self.buffer = np.zeros(model.buffer_bytes, np.uint8)
        self.filled_bytes = 0
        self.closed = False
        self._silent = False
        self._pending: list[tuple[float, int, int, tuple[list[int], int] | EmptyAnswer]] = []
        self._arrived: list[tuple[int, int, tuple[list[int], int] | EmptyAnswer]] = []

    # --- what the reader calls

    def send(self, frames: Iterable[bytes], timeout_s: float) -> None:
        assert not self.closed
        for frame in frames:
            command = header.decode(frame[4:])
            queue, start, count = (int(command.ext[name]) for name in ("queueId", "queueOffset", "maxMsgNums"))
            self.model.asked.append((queue, start, count))
            assert len(self.model.asked) <= self.model.max_asked, "pulls without end"
            self.model.signed.append(command.ext.get("AccessKey"))
            wait = self.model.latency(queue, start)
            if self.model.chance(self.model.accidents.slow):
                wait += self.model.rng.random() * 2
            answer = self.model.answer(queue, start, count)
            self._pending.append((self.model.time.now + wait, command.opaque, queue, answer))
        self._silent = self._silent or self.model.chance(self.model.accidents.silent)
        self.model.max_in_flight = max(self.model.max_in_flight, sum(self._size(item) for item in self._pending))

    @property
    def owing(self) -> int:
        """How many answers were not received."""
        return len(self._pending)

    @property
    def free_bytes(self) -> int:
        return len(self.buffer) - self.filled_bytes

    @property
    def is_full(self) -> bool:
        return bool(self._pending) and self.filled_bytes + max(map(self._size, self._pending)) > len(self.buffer)

    def receive(self, timeout_s: float) -> bool:
        assert not self.closed
        assert not self.is_full
        if self.model.chance(self.model.accidents.cut):
            raise ConnectionLost("the connection broke while pulling", self.address)
        now = self.model.time.now
        due = min((item[0] for item in self._pending), default=float("inf"))
        if self._silent or due > now + timeout_s:
            self.model.time.advance(timeout_s)
            return False
        self.model.time.advance(due - now)
        ready = [item for item in self._pending if item[0] <= self.model.time.now]
        room = self.free_bytes
        for item in self.model.rng.sample(ready, self.model.rng.randint(1, len(ready))):
            if self._size(item) <= room:
                room -= self._size(item)
                self._pending.remove(item)
                self._arrived.append((item[1], item[2], item[3]))
        return True

    def scan(self) -> tuple[list[FoundAnswer], list[tuple[int, EmptyAnswer]]]:
        found: list[FoundAnswer] = []
        others: list[tuple[int, EmptyAnswer]] = []
        for opaque, queue, answer in self._arrived:
            if isinstance(answer, EmptyAnswer):
                others.append((opaque, answer))
                continue
            body = b"".join(map(self.model.queues[queue].message, answer[0]))
            begin, self.filled_bytes = self.filled_bytes, self.filled_bytes + len(body)
            self.buffer[begin : self.filled_bytes] = np.frombuffer(body, np.uint8)
            low = b"%d" % self.model.lows.get(queue, 0)
            found.append((opaque, answer[1], self.model.suggests, begin, self.filled_bytes, low))
        self._arrived.clear()
        self.model.max_filled = max(self.model.max_filled, self.filled_bytes)
        return found, others

    def compact(self, keep: Iterable[tuple[int, int]]) -> dict[int, int]:
        kept = list(keep)
        need = sum(end - begin for begin, end in kept) + max(map(self._size, self._pending), default=0)
        size = self.model.buffer_bytes
        old, self.buffer = self.buffer, np.zeros(max(size, need + (size >> 2)), np.uint8)
        moved, at = {}, 0
        for begin, end in kept:
            self.buffer[at : at + end - begin] = old[begin:end]
            moved[begin] = at
            at += end - begin
        old[: self.filled_bytes] = 255  # whoever still looks there shall see it
        self.filled_bytes = at
        return moved

    def close(self) -> None:
        self.closed = True

    def _size(self, item: tuple[float, int, int, tuple[list[int], int] | EmptyAnswer]) -> int:
        return 0 if isinstance(item[3], EmptyAnswer) else len(item[3][0]) * self.model.queues[item[2]].message_bytes


def holes(model: Model, fetched: FetchedAnswers) -> list[Hole]:
    """Offsets that the answers should have had."""
    found = []
    for i, (number, start, limit, next_offset, begin, end) in enumerate(fetched.answers):
        size = model.queues[number].message_bytes
        there = {offset_at(fetched.buffer, at) for at in range(begin, end, size)}
        missing = [n for n in range(start, min(limit, next_offset)) if n not in there]
        firsts = [n for n in missing if n - 1 not in missing]
        ends = [n + 1 for n in missing if n + 1 not in missing]
        found += [Hole(i, first, end) for first, end in zip(firsts, ends, strict=True)]
    return found


@dataclass
class Read:
    """What a read gave."""

    delivered: list[tuple[int, int]] = field(default_factory=list)
    lost: list[tuple[OffsetRange, Cause]] = field(default_factory=list)
    error: RocketMQError | None = None

    def of(self, number: int) -> list[int]:
        return [offset for queue, offset in self.delivered if queue == number]

    def lost_offsets(self) -> list[tuple[int, int]]:
        return [(part.queue.queue_id, n) for part, _ in self.lost for n in range(part.start, part.end)]


def read(
    model: Model, bounds: Sequence[tuple[int, int]], settings: PullSettings | None = None, dense: bool = False
) -> Read:
    """Read ``[start, end)`` of queue 0, 1, ...; trims each answer as the decoder does. ``dense``: gaps are doubted."""
    model.removing = dense
    result = Read()
    ranges = [OffsetRange(MessageQueue("t", "b", i), start, end) for i, (start, end) in enumerate(bounds)]
    reader = model.reader(ranges, settings or PullSettings(), lambda part, cause: result.lost.append((part, cause)))
    try:
        for fetched in reader.fetch():
            usable = reader.count_usable_answers(holes(model, fetched)) if dense else len(fetched.answers)
            for number, start, limit, next_offset, begin, end in fetched.answers[:usable]:
                size = model.queues[number].message_bytes
                for at in range(begin, end, size):
                    offset = offset_at(fetched.buffer, at)
                    if offset >= start and (next_offset <= limit or offset < limit):
                        result.delivered.append((number, offset))
    except RocketMQError as e:
        result.error = e
    assert all(stream.closed for stream in model.streams)
    return result


@st.composite
def queues(draw: st.DrawFn) -> Queue:
    low = draw(st.integers(0, 20))
    high = low + draw(st.integers(0, 300))
    queue = Queue(low, high, message_bytes=draw(st.sampled_from([40, 40, 100, 60_000])))
    if draw(st.booleans()):
        queue.gaps = frozenset(draw(st.lists(st.integers(low, high), max_size=30)))
    elif draw(st.booleans()):
        at = low
        while at < high and len(queue.batches) < 10:
            size = draw(st.integers(1, 12))
            if at + size <= high:
                queue.batches[at] = size
            at += size + draw(st.integers(0, 20))
    # An answer of before then arrives up to two seconds later (``Accidents.slow``), within the grace period.
    visible, until = draw(st.integers(0, high)), 1000 + draw(st.floats(0, 12))
    if draw(st.booleans()):
        queue.visible_from = lambda now: visible if now < until else high
    if draw(st.integers(0, 3)) == 0:
        queue.truncate = (1000 + draw(st.floats(0, 0.1)), draw(st.integers(low, high)))
    if draw(st.integers(0, 5)) == 0:
        queue.deleted_at = 1000 + draw(st.floats(0, 0.1))
    return queue


accidents = st.builds(
    Accidents,
    busy=st.sampled_from([0, 0, 0.2]),
    reset_once=st.booleans(),
    short=st.sampled_from([0, 0.5]),
    slow=st.sampled_from([0, 0.3]),
    cut=st.sampled_from([0, 0, 0.05]),
    no_connection=st.sampled_from([0, 0.3]),
    silent=st.sampled_from([0, 0, 0.01]),
)
pull_settings = st.builds(
    PullSettings,
    max_bytes_in_flight=st.sampled_from([64 << 10, 8 << 20]),
    depth=st.sampled_from([None, None, 1, 7]),
    batch_size=st.sampled_from([1, 10, 1024]),
    offsets_per_fetch=st.sampled_from([1, 30, 16_384]),
)
