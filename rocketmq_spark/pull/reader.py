"""Offset ranges of one broker as pipelined pulls: in order, complete, and within a bound of bytes.

The offsets of a range are known, so many pulls are under way at once. Answers may be short (a broker sends 32 messages
or 256 KiB, 8 when the data is cold), empty (filters, compaction), late or out of order: what an answer did not cover is
asked for again, and a window is handed out up to the first offset that is still missing. What an answer means is
decided in ``verdict``, what is missing is kept in ``missing``, how much to ask for in ``pacing``.
"""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence

from rocketmq_spark.clock import Clock, Deadline
from rocketmq_spark.errors import AccessDenied, BrokerError, CallTimeout, ConnectionLost, RocketMQError
from rocketmq_spark.model import MASTER_ID, OffsetRange
from rocketmq_spark.pull.missing import Missing, Slot
from rocketmq_spark.pull.pacing import Pacing, PullSettings
from rocketmq_spark.pull.verdict import Again, Cause, Continue, Lost, OnLoss, Reconnect, Suspect, judge
from rocketmq_spark.pull.window import Doubts, Hole, Piece, Trial, Window, covered, lasting, undoubted
from rocketmq_spark.remoting.bulk import WINDOW_BYTES, Answer, BulkStream, Found, PullTemplate
from rocketmq_spark.retry import Trouble

logger = logging.getLogger(__name__)

# A broker answers these pulls within its queueing time of 5 s; one that says nothing for so long is gone.
SILENCE_S = 20.0
# How long a look at another address may take while the connection at hand still works.
MOVE_S = 5.0
_MAX_OPAQUE = 0x7FFFFFFF


class RangeReader:
    """Reads ``ranges``, all of one broker, over one connection that is made again when it breaks."""

    def __init__(
        self,
        ranges: Sequence[OffsetRange],
        connect: Callable[[Deadline], BulkStream],
        templates: Sequence[PullTemplate],
        settings: PullSettings,
        on_loss: OnLoss,
        clock: Clock | None = None,
        on_hint: Callable[[int | None], bool] | None = None,
    ) -> None:
        self._ranges = ranges
        self._connect = connect
        self._templates = templates
        self._settings, self._pacing = settings, Pacing(settings)
        self._on_loss, self._on_hint = on_loss, on_hint
        self._clock = clock or Clock()
        self._missing = Missing(ranges)
        self._trials: dict[tuple[int, int], Trial] = {}
        self._grace_s = min(settings.grace_s, settings.read_deadline_s / 2)
        self._doubts = Doubts(self._grace_s, self._clock.pauses)
        self._pieces: list[Piece] = []
        self._lent, self._returned = list[Piece](), list[Piece]()  # the window that is handed out, what came back of it
        self._window_at = 0  # where in the buffer the window at hand begins
        self._rows = self._opaque = self._signed_from = 0
        self._stream: BulkStream | None = None
        self._reroute = False
        self._hinted: int | None = None
        self._last_refusal: str | None = None
        self._trouble = Trouble()
        self._dial_pauses = self._clock.pauses()
        self._heard_at = self._patient_until = 0.0
        self._renew()
        self.pulls = 0

    def windows(self) -> Iterator[Window]:
        """All messages of the ranges, window by window. A dropped iterator closes the connection too."""
        self._renew()
        try:
            while self._missing:
                try:
                    self._step()
                except RocketMQError as e:
                    self._reconnect_later(e)
                    continue
                # What is given back of the last window is missing again.
                yield from self._ready() if self._missing else self._deliver()
        finally:
            if self._stream is not None:
                self._stream.close()

    def doubt(self, holes: Sequence[Hole]) -> int:
        """How many answers of the window at hand may be used; the others are given out again.

        ``holes``, in order, are offsets that it jumps over although every offset of their queue has a message. They are
        asked for again, of the master, until they come or have been missing for too long: then they are lost.
        """
        pieces, now = self._lent, self._clock.now()
        doubted = self._doubts.still(pieces, holes, now, believe=not self._doubtful())
        for number, start, end in lasting(holes, doubted, pieces):
            self._on_loss(OffsetRange(self._ranges[number].queue, start, end), Cause.TRUNCATED)
        for piece, due in self._doubts.again(pieces, doubted, now):
            self._missing.park(Slot(piece.number, piece.start, min(piece.next_offset, piece.limit)), due)
        usable, self._returned = undoubted(pieces, doubted)
        return usable

    def _step(self) -> None:
        """Send what may be sent, then take in what comes."""
        if self._reroute and not self._missing.in_flight:
            self._move()
        if self._stream is None:
            self._stream = self._connect(Deadline.after(self._left()))
        stream = self._stream
        self._missing.unpark(self._clock.now())
        self._issue(stream)
        if not stream.full:
            self._receive(stream)
        if self._missing and self._left() <= 0:
            raise self._timeout(stream.address)

    def _issue(self, stream: BulkStream) -> None:
        if self._reroute:  # what is under way is awaited first
            return
        depth = self._pacing.depth()
        # While the first missing offset keeps us waiting, no more is collected behind it than may be in flight.
        if stream.filled > WINDOW_BYTES + self._settings.max_bytes_in_flight:
            depth = 0 if self._missing.next_due is not None else 1
        frames: list[bytes] = []
        missing = self._missing
        while missing.todo and (free := depth - missing.in_flight) > 0:
            count = self._pacing.next_count()
            pulls = min(free, self._pacing.pulls(count, missing.asked))
            if not pulls and missing.in_flight:
                break
            frames.extend(self._asks(max(1, pulls), count))
        if frames:
            if missing.in_flight == len(frames):
                self._heard_at = self._clock.now()
            self.pulls += len(frames)
            stream.send(frames, self._settings.read_deadline_s)

    def _asks(self, pulls: int, count: int) -> list[bytes]:
        """Requests for the lowest missing offsets."""
        if self._opaque + pulls > _MAX_OPAQUE:
            self._opaque = 0
        first = self._opaque
        slots = self._missing.send(first, count, pulls)
        self._opaque += len(slots)
        self._pacing.asked(max(limit - start for _, start, limit in slots))
        templates = self._templates
        # A filtered pull scans as many offsets as it is asked for; the count never falls short of the slot.
        return [
            templates[number].frame(opaque, start, limit - start)
            for opaque, (number, start, limit) in enumerate(slots, first)
        ]

    def _receive(self, stream: BulkStream) -> None:
        if not stream.receive(self._wait_s()):
            if self._missing.in_flight and self._clock.now() - self._heard_at > SILENCE_S:
                raise ConnectionLost(f"the broker said nothing for {SILENCE_S:g} s", stream.address)
            return
        self._heard_at = self._clock.now()
        found, others = stream.scan()
        self._take_all(found)
        for opaque, other in others:
            self._refuse(opaque, other)

    def _take_all(self, found: list[Found]) -> None:
        """Most answers are full ones, which must cost little: there are 30,000 in a million messages."""
        answered, pieces, hinted, count = self._missing.answered, self._pieces, self._hinted, self._pacing.count
        full = largest = 0
        make = Piece._make
        for answer in found:
            opaque, next_offset, suggested, begin, end, _ = answer
            slot = answered(opaque)
            if slot is None:
                continue
            number, start, limit = slot
            size = end - begin
            if next_offset != limit or limit - start != count or suggested != hinted or not size or self._trials:
                self._take(slot, answer)
                continue
            pieces.append(make((number, start, limit, next_offset, begin, end)))
            full += 1
            if size > largest:
                largest = size
        if full:
            self._rows += full * count
            self._hope()
            self._pacing.learn(count, count, largest, full)

    def _take(self, slot: Slot, answer: Found) -> None:
        _, next_offset, suggested, begin, end, low = answer
        if suggested != self._hinted:
            self._follow(suggested)
        number, start, limit = slot
        if next_offset <= start:
            self._again(slot)
            return
        if self._settings.filtered and int(low) > start:  # a filter hides how much of what it jumped over was there
            self._gone(slot, int(low), Cause.TRUNCATED, below=True)
            return
        self._progress(slot)
        covered = min(next_offset, limit) - start
        if end > begin:
            self._pieces.append(Piece(number, start, limit, next_offset, begin, end))
            self._rows += covered
        self._pacing.learn(limit - start, covered, end - begin)
        self._missing.put(Slot(number, next_offset, limit))

    def _refuse(self, opaque: int, answer: Answer) -> None:
        slot = self._missing.answered(opaque)
        if slot is None:
            return
        if answer.suggested_broker is not None and answer.suggested_broker != self._hinted:
            self._follow(answer.suggested_broker)
        self._last_refusal = f"{answer.code} {answer.remark}".strip()
        match judge(slot.start, answer):
            case AccessDenied() if opaque < self._signed_from or self._renewed():
                self._again(slot)  # keys that expired, while others are to be had
            case BrokerError() as error:
                queue = self._ranges[slot.number].queue
                error.addr, error.topic, error.queue = self._address(), queue.topic, str(queue)
                raise error
            case Continue(at):
                self._progress(slot)
                self._pacing.passed()
                self._missing.put(slot._replace(start=at))
            case Again(reroute):
                if reroute:
                    self._reroute = True
                    self._doubtful()
                self._again(slot)
            case Reconnect():
                self._missing.put(slot)
                raise ConnectionLost("the broker drains", self._address(), remark=answer.remark)
            case Lost(until, cause):
                # Below the minimum nothing is left, whatever was asked for first: one loss.
                self._gone(slot, until, cause, below=until == answer.min_offset)
            case Suspect(cause, until):
                self._suspect(slot, until, cause)

    def _renewed(self) -> bool:
        """Whether there are other keys; what was asked so far has the old ones."""
        changed = sum(template.renew() for template in self._templates)
        self._signed_from = self._opaque if changed else self._signed_from
        return bool(changed)

    def _follow(self, suggested: int) -> None:
        """The broker suggests a replica for the next pulls; ``on_hint`` says whether to go there."""
        if suggested != MASTER_ID and any(trial.suspected_at is not None for trial in self._trials.values()):
            return  # first the master has to say what is lost
        self._hinted = suggested
        if self._on_hint is not None and self._on_hint(suggested):
            self._reroute = True

    def _doubtful(self) -> bool:
        """A slave may just not have it: the master is asked, and waited for, before anything is called lost."""
        if self._on_hint is None or not self._on_hint(None):
            return False
        self._hinted, self._reroute = MASTER_ID, True
        return True

    def _suspect(self, slot: Slot, until: int | None, cause: Cause) -> None:
        suspected = self._trial(slot).suspected(self._clock.now())
        if self._doubtful():
            self._again(slot)
            return
        # What comes before it in the same range has the first word, so that a loss is told once and as a whole.
        if suspected >= self._grace_s and not self._missing.misses_before(slot):
            self._lose(slot, until, cause)
            return
        self._reroute = self._reroute or cause in (Cause.TOPIC_DELETED, Cause.QUEUE_GONE)
        self._again(slot)

    def _gone(self, slot: Slot, until: int, cause: Cause, below: bool) -> None:
        if self._doubtful():
            self._again(slot)
        else:
            self._lose(slot, until, cause, below)

    def _lose(self, slot: Slot, until: int | None, cause: Cause, below: bool = False) -> None:
        """What is still missing from the start of ``slot``, or ``below`` it, to ``until`` or the range's end is gone."""
        whole = self._ranges[slot.number]
        self._progress(slot)
        self._missing.put(slot)
        self._pacing.forget()
        start = whole.start if below else slot.start
        for part in self._missing.cut(Slot(slot.number, start, whole.end if until is None else until)):
            self._on_loss(OffsetRange(whole.queue, part.start, part.end), cause)

    def _trial(self, slot: Slot) -> Trial:
        return self._trials.setdefault(slot[:2], Trial(self._clock.pauses()))

    def _again(self, slot: Slot) -> None:
        self._missing.park(slot, self._clock.now() + next(self._trial(slot).pauses))

    def _progress(self, slot: Slot) -> None:
        self._trials.pop(slot[:2], None)
        self._hope()

    def _hope(self) -> None:
        """The broker gives something: patience and pauses begin anew."""
        self._renew()
        self._trouble.clear()
        self._dial_pauses = self._clock.pauses()

    def _renew(self) -> None:
        """Patience begins anew: something was read, or the caller took its time."""
        self._heard_at = self._clock.now()
        self._patient_until = self._heard_at + self._settings.read_deadline_s

    def _left(self) -> float:
        return max(0.0, self._patient_until - self._clock.now())

    def _wait_s(self) -> float:
        wait = min(1.0, self._left())
        due = self._missing.next_due
        return wait if due is None else min(wait, max(0.001, due - self._clock.now()))

    def _reconnect_later(self, error: RocketMQError) -> None:
        """A broken connection is made again until patience ends; what was under way is asked for again."""
        self._trouble.note(error, self._clock.now())
        if not error.retriable or self._left() <= 0:
            raise self._trouble.cause(error, self._clock.now()) from error
        logger.info("pulls are sent again: %s", error)
        self._drop_stream()
        self._clock.sleep(min(next(self._dial_pauses), self._left()))

    def _move(self) -> None:
        """Go to where the route leads by now. What still works is not given up for less."""
        self._reroute = False
        try:
            fresh = self._connect(Deadline.after(min(MOVE_S, self._left())))
        except RocketMQError as e:
            logger.info("no other way to the broker: %s", e)
            return
        if self._stream is not None and self._stream.address == fresh.address:
            fresh.close()
            return
        self._drop_stream()
        self._stream = fresh

    def _drop_stream(self) -> None:
        stream, self._stream = self._stream, None
        if stream is None:
            return
        stream.close()
        # Bodies that were received live in its buffer: without it they are asked for again.
        for piece in self._pieces:
            self._missing.put(Slot(piece.number, piece.start, min(piece.next_offset, piece.limit)))
        self._missing.recall()
        self._pacing.forget()
        self._pieces, self._rows, self._window_at = [], 0, 0

    def _timeout(self, address: str) -> CallTimeout:
        return CallTimeout(
            f"no message came within {self._settings.read_deadline_s:g} s",
            address,
            queue=str(self._ranges[self._missing.frontier()[0]].queue),
            remark=self._last_refusal,
            remedy="Look at the broker, or raise option 'readDeadline'",
        )

    def _address(self) -> str | None:
        return self._stream.address if self._stream else None

    def _ready(self) -> Iterator[Window]:
        stream = self._stream
        if stream is not None and (stream.full or self._rows >= self._settings.window_rows):
            yield from self._deliver()

    def _deliver(self) -> Iterator[Window]:
        """Hand out what lies before the frontier; turn the buffer where another window like it might not fit."""
        stream = self._stream
        if stream is None:
            return
        self._pieces.sort()
        split = bisect_left(self._pieces, self._missing.frontier())
        ready, rest = self._pieces[:split], self._pieces[split:]
        waiting = covered(rest)
        if self._missing and not stream.full and self._rows - waiting < self._settings.window_rows // 2:
            return
        if ready:
            self._lent = ready
            yield Window(stream.buffer, ready)
            self._renew()
            self._lent = []
        if self._returned:
            rest, self._returned = self._returned + rest, []
            waiting = covered(rest)
        self._pieces, self._rows = rest, waiting
        if stream.full or stream.room < stream.filled - self._window_at:
            self._turn(stream)
        self._window_at = stream.filled

    def _turn(self, stream: BulkStream) -> None:
        moved = stream.turn((piece.begin, piece.end) for piece in self._pieces)
        self._pieces = [
            piece._replace(begin=moved[piece.begin], end=moved[piece.begin] + piece.end - piece.begin)
            for piece in self._pieces
        ]
