"""Offset ranges of one broker as pipelined pulls: in order, complete, and within a bound of bytes.

The offsets of a range are known, so many pulls are under way at once. Answers may be short (a broker sends 32 messages
or 256 KiB, 8 when the data is cold), empty (filters, compaction), late or out of order: what an answer did not cover is
asked for again, and a window is handed out up to the first offset that is still missing. Decisions are in ``pull``.
"""

from __future__ import annotations

import heapq
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from rocketmq_spark.client.pull import Again, Cause, Continue, Decision, Lost, Suspect, judge
from rocketmq_spark.clock import Deadline, backoff
from rocketmq_spark.errors import BrokerError, CallTimeout, RocketMQError
from rocketmq_spark.model import OffsetRange
from rocketmq_spark.remoting.bulk import WINDOW_BYTES, Answer, BulkStream, Found, PullTemplate

logger = logging.getLogger(__name__)

FIRST_PULL = 8
STOCK_PULL = 32
STOCK_BYTES = 256 << 10
PULL_BYTES = 1 << 20
DEPTH = 64
ADAPTIVE_BYTES_IN_FLIGHT = 2 << 20
# How long a broker may contradict what it said when the batch was planned, before that is called loss.
LAG_S = 15.0
_PROBE_AFTER = 64


class Piece(NamedTuple):
    """Messages of one answer: range number, offset asked, end of what was asked, where the broker went on, bytes."""

    number: int
    start: int
    limit: int
    next_offset: int
    begin: int
    end: int


class Window(NamedTuple):
    """Answers in one buffer, in the order of ranges and offsets. Valid until the next one is asked for."""

    buffer: npt.NDArray[np.uint8]
    pieces: list[Piece]


@dataclass(frozen=True, slots=True)
class PullSettings:
    """``depth`` None adapts the number of pulls to the size of the answers."""

    max_bytes_in_flight: int = 8 << 20
    depth: int | None = None
    batch_size: int = 1024
    read_deadline_s: float = 120.0
    window_rows: int = 16_384
    filtered: bool = False


class _Pacing:
    """How many messages to ask for at once, and how many pulls to keep under way; learns from answers.

    A short answer tells what the broker gives at most; now and then one pull asks for twice as much, in case that an
    operator raised the limits or cold data became warm.
    """

    def __init__(self, settings: PullSettings) -> None:
        self._settings = settings
        self.count = settings.batch_size if settings.filtered else min(FIRST_PULL, settings.batch_size)
        self._bytes_per_message = 0.0
        self._answer_bytes = 0.0
        self._full_answers = 0
        self._patience = 1
        self._probing = False

    def next_count(self) -> int:
        """Messages to ask for in the next pull."""
        if self._settings.filtered or self._probing or self._full_answers < self._patience:
            return self.count
        doubled = min(self.count * 2, self._settings.batch_size, self._most())
        if doubled <= self.count:
            return self.count
        self._probing = True
        return doubled

    def depth(self) -> int:
        if not self._bytes_per_message:
            return self._settings.depth or 1
        answer = max(1.0, self._answer_bytes, 0 if self._settings.filtered else self._bytes_per_message * self.count)
        most = int(self._settings.max_bytes_in_flight / answer)
        if self._settings.depth:
            return max(1, min(self._settings.depth, most))
        return max(1, min(DEPTH, most, max(4, int(ADAPTIVE_BYTES_IN_FLIGHT / answer))))

    def learn(self, asked: int, covered: int, size: int) -> None:
        """An answer covered ``covered`` of the ``asked`` offsets with ``size`` bytes."""
        first = not self._bytes_per_message
        per_message = size / max(1, covered)
        share = 1.0 if first else 0.1
        self._bytes_per_message += share * (per_message - self._bytes_per_message)
        self._answer_bytes += share * (size - self._answer_bytes)
        if self._settings.filtered:
            return
        if first:
            self.count = max(
                covered, min(STOCK_PULL, self._settings.batch_size, int(STOCK_BYTES / max(1.0, per_message)))
            )
            return
        probe = asked > self.count
        if probe:
            self._probing = False
        if covered >= asked:
            if probe:
                self.count, self._patience, self._full_answers = asked, 1, 0
            self._full_answers += 1
        else:
            self.count = max(self.count, covered) if probe else max(1, covered)
            self._full_answers, self._patience = 0, _PROBE_AFTER
        self.count = max(1, min(self.count, self._most()))

    def _most(self) -> int:
        return max(1, int(PULL_BYTES / max(1.0, self._bytes_per_message)))


_Todo = tuple[int, int, int]  # range number, start, end


class RangeReader:
    """Reads ``ranges``, all of one broker, over one connection that is made again when it breaks."""

    def __init__(
        self,
        ranges: Sequence[OffsetRange],
        connect: Callable[[Deadline], BulkStream],
        templates: Sequence[PullTemplate],
        settings: PullSettings,
        on_loss: Callable[[OffsetRange, Cause], None],
    ) -> None:
        self._ranges = ranges
        self._connect = connect
        self._templates = templates
        self._settings = settings
        self._on_loss = on_loss
        self._pacing = _Pacing(settings)
        self._todo: list[_Todo] = [(i, r.start, r.end) for i, r in enumerate(ranges) if r.size > 0]
        heapq.heapify(self._todo)
        self._parked: list[tuple[float, _Todo]] = []
        self._in_flight: dict[int, _Todo] = {}
        self._pieces: list[Piece] = []
        self._rows = 0
        self._opaque = 0
        self._stream: BulkStream | None = None
        self._suspected: dict[tuple[int, int], float] = {}
        self._last_refusal: str | None = None
        self._patience = Deadline.after(settings.read_deadline_s)
        self._pauses = backoff(0.02, 1.0)
        self.pulls = 0

    def windows(self) -> Iterator[Window]:
        """All messages of the ranges, window by window. A dropped iterator closes the connection too."""
        try:
            while self._missing():
                try:
                    self._step()
                except RocketMQError as e:
                    self._reconnect_later(e)
                    continue
                yield from self._ready()
            yield from self._deliver()
        finally:
            if self._stream is not None:
                self._stream.close()

    def _missing(self) -> bool:
        return bool(self._todo or self._parked or self._in_flight)

    def _step(self) -> None:
        """Send what may be sent, then take in what comes."""
        if self._stream is None:
            self._stream = self._connect(self._patience)
        stream = self._stream
        self._unpark()
        self._issue(stream)
        if not stream.full and stream.receive(self._wait_s()):
            found, others = stream.scan()
            for answer in found:
                self._take(answer)
            for opaque, other in others:
                self._refuse(opaque, other)
        if self._patience.expired:
            raise self._timeout(stream.address)

    def _issue(self, stream: BulkStream) -> None:
        depth = self._pacing.depth()
        frames = []
        # While the first missing offset keeps us waiting, no more is collected behind it than may be in flight.
        if stream.filled > WINDOW_BYTES + self._settings.max_bytes_in_flight:
            depth = 0 if self._parked else 1
        while self._todo and len(self._in_flight) < depth:
            index, start, end = heapq.heappop(self._todo)
            count = self._pacing.next_count()
            limit = min(end, start + count)
            if limit < end:
                heapq.heappush(self._todo, (index, limit, end))
            self._opaque = (self._opaque + 1) & 0x7FFFFFFF
            self._in_flight[self._opaque] = (index, start, limit)
            # A filtered pull scans as many offsets as it is asked for; the count never falls short of the slot.
            frames.append(self._templates[index].frame(self._opaque, start, limit - start))
        if frames:
            self.pulls += len(frames)
            stream.send(frames, self._settings.read_deadline_s)

    def _take(self, answer: Found) -> None:
        opaque, next_offset, _, begin, end = answer
        slot = self._in_flight.pop(opaque, None)
        if slot is None:
            return
        index, start, limit = slot
        if next_offset <= start:
            self._again(slot, Again())
            return
        self._progress(slot)
        if end > begin:
            self._pieces.append(Piece(index, start, limit, next_offset, begin, end))
            self._rows += min(next_offset, limit) - start
        self._pacing.learn(limit - start, min(next_offset, limit) - start, end - begin)
        if next_offset < limit:
            heapq.heappush(self._todo, (index, next_offset, limit))

    def _refuse(self, opaque: int, answer: Answer) -> None:
        slot = self._in_flight.pop(opaque, None)
        if slot is None:
            return
        self._last_refusal = f"{answer.code} {answer.remark}".strip()
        decision = judge(slot[1], slot[2], answer)
        if isinstance(decision, BrokerError):
            queue = self._ranges[slot[0]].queue
            decision.addr, decision.topic, decision.queue = self._address(), queue.topic, str(queue)
            raise _Refused(decision)
        self._decide(slot, decision)

    def _decide(self, slot: _Todo, decision: Decision) -> None:
        index, start, limit = slot
        match decision:
            case Continue(at):
                self._progress(slot)
                if at < limit:
                    heapq.heappush(self._todo, (index, at, limit))
            case Again():
                self._again(slot, decision)
            case Lost(until, cause):
                self._progress(slot)
                self._on_loss(OffsetRange(self._ranges[index].queue, start, until), cause)
                if until < limit:
                    heapq.heappush(self._todo, (index, until, limit))
            case Suspect(cause):
                since = self._suspected.setdefault(slot[:2], time.monotonic())
                if time.monotonic() - since < min(LAG_S, self._settings.read_deadline_s):
                    self._again(slot, Again(reroute=cause is not Cause.WENT_BACK))
                else:
                    self._lose_rest(index, start, cause)

    def _lose_rest(self, index: int, start: int, cause: Cause) -> None:
        """Nothing of the range from ``start`` on exists any more."""
        self._progress((index, start, start))
        self._todo = [slot for slot in self._todo if slot[0] != index or slot[1] < start]
        heapq.heapify(self._todo)
        self._parked = [item for item in self._parked if item[1][0] != index or item[1][1] < start]
        self._in_flight = {k: slot for k, slot in self._in_flight.items() if slot[0] != index or slot[1] < start}
        self._on_loss(OffsetRange(self._ranges[index].queue, start, self._ranges[index].end), cause)

    def _again(self, slot: _Todo, decision: Again) -> None:
        self._parked.append((time.monotonic() + next(self._pauses), slot))
        if decision.reroute and not self._in_flight:
            self._drop_stream()

    def _progress(self, slot: _Todo) -> None:
        self._suspected.pop(slot[:2], None)
        self._patience = Deadline.after(self._settings.read_deadline_s)
        if self._parked:
            return
        self._pauses = backoff(0.02, 1.0)

    def _unpark(self) -> None:
        if self._parked:
            now = time.monotonic()
            for item in [item for item in self._parked if item[0] <= now]:
                self._parked.remove(item)
                heapq.heappush(self._todo, item[1])

    def _wait_s(self) -> float:
        wait = min(1.0, self._patience.remaining())
        if self._parked:
            wait = min(wait, max(0.001, min(due for due, _ in self._parked) - time.monotonic()))
        return wait

    def _reconnect_later(self, error: RocketMQError) -> None:
        """A broken connection is made again until patience ends; what was under way is asked for again."""
        if isinstance(error, _Refused):
            raise error.reason from None
        if not error.retriable or self._patience.expired:
            raise error
        logger.info("pulls are sent again: %s", error)
        self._drop_stream()
        time.sleep(min(next(self._pauses), self._patience.remaining()))

    def _drop_stream(self) -> None:
        stream, self._stream = self._stream, None
        if stream is None:
            return
        # Bodies that were received live in its buffer: without it they are asked for again.
        stream.close()
        for piece in self._pieces:
            heapq.heappush(self._todo, (piece.number, piece.start, min(piece.next_offset, piece.limit)))
        for slot in self._in_flight.values():
            heapq.heappush(self._todo, slot)
        self._pieces, self._rows = [], 0
        self._in_flight.clear()

    def _timeout(self, address: str) -> CallTimeout:
        return CallTimeout(
            f"no message came within {self._settings.read_deadline_s:g} s",
            address,
            queue=str(self._ranges[self._frontier()[0]].queue),
            remark=self._last_refusal,
            remedy="Look at the broker, or raise option 'readDeadline'",
        )

    def _address(self) -> str | None:
        return self._stream.address if self._stream else None

    def _frontier(self) -> tuple[int, int]:
        """The first offset that is still missing; everything before it may be handed out."""
        missing = [slot[:2] for slot in self._in_flight.values()]
        missing += [slot[:2] for _, slot in self._parked]
        if self._todo:
            missing.append(self._todo[0][:2])
        return min(missing, default=(len(self._ranges), 0))

    def _ready(self) -> Iterator[Window]:
        stream = self._stream
        if stream is not None and (stream.full or self._rows >= self._settings.window_rows):
            yield from self._deliver()

    def _deliver(self) -> Iterator[Window]:
        """Hand out what lies before the frontier and turn the buffer, keeping what lies behind."""
        if self._stream is None:
            return
        frontier = self._frontier()
        self._pieces.sort()
        ready = [piece for piece in self._pieces if piece[:2] < frontier]
        if self._missing() and not self._stream.full and _rows(ready) < self._settings.window_rows // 2:
            return
        if ready:
            yield Window(self._stream.buffer, ready)
            self._patience = Deadline.after(self._settings.read_deadline_s)
        rest = self._pieces[len(ready) :]
        moved = self._stream.turn((piece.begin, piece.end) for piece in rest)
        self._pieces = [
            piece._replace(begin=moved[piece.begin], end=moved[piece.begin] + piece.end - piece.begin) for piece in rest
        ]
        self._rows = _rows(rest)


def _rows(pieces: list[Piece]) -> int:
    return sum(min(piece.next_offset, piece.limit) - piece.start for piece in pieces)


class _Refused(RocketMQError):
    """Carries a refusal out of the step past the reconnect logic."""

    def __init__(self, reason: BrokerError) -> None:
        super().__init__(str(reason))
        self.reason = reason
