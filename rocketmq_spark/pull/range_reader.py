"""Offset ranges of one broker as pipelined pulls, and the answers that were received but not read yet.

The offsets of a range are known, so many pulls are under way at once. Answers may be short (a broker sends 32 messages or
256 KiB, 8 when the data is cold), empty (filters, compaction), late or out of order: what an answer did not cover is asked
for again, and answers are handed out up to the first offset that is still missing. ``answers`` decides what an answer means,
so also whether the pull is repeated, and has what was received; ``missing`` has when, and which offsets are still to be read;
``requests`` how much to ask for, from which replica, and how long to wait.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import TYPE_CHECKING

from rocketmq_spark.base.clock import Clock, Deadline
from rocketmq_spark.errors import AccessDenied, BrokerError, ConnectionLost, RocketMQError
from rocketmq_spark.model import MessageQueue, OffsetRange
from rocketmq_spark.pull.fetched import (
    FetchedAnswer,
    FetchedAnswers,
    Hole,
    ReceivedAnswers,
    is_inner_batch,
    offset_count,
)
from rocketmq_spark.pull.outcomes import Cause, Continue, Lost, OnLoss, Reconnect, RepeatPull, Reset, Suspect, judge
from rocketmq_spark.pull.pacing import PullPacing, PullRequests, PullSettings
from rocketmq_spark.pull.pending import PendingOffsets, PendingRange
from rocketmq_spark.pull.progress_timeout import BROKER_SILENCE_S, ProgressTimeout
from rocketmq_spark.pull.replica import OnHint, ReplicaHints
from rocketmq_spark.pull.suspicions import HoleSuspicions, LossSuspicions, confirmed_losses, split_at_doubt
from rocketmq_spark.remoting.bulk import BUFFER_BYTES, Answer, BulkStream, Found, PullTemplate

if TYPE_CHECKING:
    from rocketmq_spark.pull.recreated import RecreatedTopics

logger = logging.getLogger(__name__)


# How long a look at another address may take while the connection at hand still works.
RECONNECT_S = 5.0
# How long a read that ends waits for the answers to what it asked, where one may be a reset.
LAST_ANSWERS_S = 1.0


class GroupResets:
    """Where an operator moved the group of a read that ``follows`` it. A broker says it once for each queue."""

    def __init__(self, ranges: Sequence[OffsetRange], follows: bool) -> None:
        self._ranges = ranges
        self._follows = follows
        self.by_queue: dict[MessageQueue, int] = {}

    def note(self, slot: PendingRange, at: int) -> None:
        if self._follows:
            self.by_queue[self._ranges[slot.number].queue] = at

    def hear(self, stream: BulkStream, missing: PendingOffsets, clock: Clock) -> None:
        """The connection ends: wait for the answers to what is under way. All of that is missing again."""
        until = clock.now() + LAST_ANSWERS_S
        try:
            while self._follows and missing.in_flight and (left_s := until - clock.now()) > 0:
                if stream.full:
                    stream.turn(())
                if stream.receive(left_s):
                    self._hear(stream, missing)
        except RocketMQError as e:
            logger.info("pulls in flight were not answered: %s", e)

    def _hear(self, stream: BulkStream, missing: PendingOffsets) -> None:
        found, others = stream.scan()
        answers: list[tuple[int, Answer | None]] = [*((one[0], None) for one in found), *others]
        for opaque, answer in answers:
            if (slot := missing.answered(opaque)) is None:
                continue
            missing.put(slot)
            if answer is not None and isinstance(decision := judge(slot.start, answer), Reset):
                self.note(slot, decision.at)


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
        on_hint: OnHint | None = None,
        recreated: RecreatedTopics | None = None,
    ) -> None:
        self._ranges = ranges
        self._recreated = recreated
        self._connect = connect
        self._settings = settings
        self._on_loss = on_loss
        self._clock = clock or Clock()
        grace_s = min(settings.grace_s, settings.read_deadline_s / 2)
        self._pacing = PullPacing(settings)
        self._missing = PendingOffsets(ranges)
        self._collected = ReceivedAnswers()
        self._trials = LossSuspicions(grace_s, self._clock.pauses)
        self._doubts = HoleSuspicions(grace_s, self._clock.pauses)
        self._hints = ReplicaHints(on_hint)
        # The earliest time of the next route request. Each refused pull is a reason for one, and a task has thousands of pulls.
        self._route_due, self._route_pauses = 0.0, self._clock.pauses()
        self._patience = ProgressTimeout(settings.read_deadline_s, self._clock)
        self._stream: BulkStream | None = None
        self._address: str | None = None
        self._stopped = False
        self.requests = PullRequests(templates)
        self._resets = GroupResets(ranges, settings.follows_resets)
        self.resets = self._resets.by_queue

    def fetch(self) -> Generator[FetchedAnswers, None, None]:
        """All messages of the ranges, buffer by buffer. A dropped iterator closes the connection too.

        A read that follows its group ends when an operator moves it; ``resets`` are the offsets by queue then.
        """
        self._patience.renew()
        try:
            while self._missing and not self._stopped and not self.resets:
                try:
                    self._step()
                except RocketMQError as e:
                    if e.retriable:  # else what was refused is not among what is missing
                        yield from self._deliver(leaving=True)
                    self._drop_stream()
                    if not self._missing:  # all that was missing is refused, or lost
                        raise
                    queue = self._ranges[self._missing.frontier()[0]].queue
                    e.topic, e.queue = e.topic or queue.topic, e.queue or str(queue)
                    if e.retriable:
                        e.remedy = e.remedy or f"Start broker {queue.broker_name}, or raise option 'readDeadline'"
                    self._patience.pause(e, self._place)
                    continue
                # What is given back of the last answers is missing again.
                yield from self._deliver()
        finally:
            self._drop_stream()

    def stop(self) -> None:
        """Have ``fetch`` end within a second or so of waiting; it may be called on another thread."""
        self._stopped = True

    def doubt(self, holes: Sequence[Hole]) -> int:
        """How many of the answers at hand may be used; the others are given out again.

        ``holes``, in order, are offsets that it jumps over although every offset of their queue has a message. They are
        asked for again, of the master, until they come or have been missing for too long: then they are lost.
        """
        pieces, now = self._collected.lent, self._clock.now()
        doubted = self._doubts.still(pieces, holes, now, believe=not self._hints.doubt())
        for number, start, end in confirmed_losses(holes, doubted, pieces):
            self._on_loss(OffsetRange(self._ranges[number].queue, start, end), Cause.TRUNCATED)
        for piece, due in self._doubts.again(pieces, doubted, now):
            self._missing.park(PendingRange(piece.number, piece.start, min(piece.next_offset, piece.limit)), due)
        usable, others = split_at_doubt(pieces, doubted)
        self._collected.give_back(others)
        return usable

    def _step(self) -> None:
        """Send what may be sent, then take in what comes."""
        if self._hints.moving and not self._missing.in_flight:
            self._move()
        if self._stream is None:
            self._stream = self._connect(self._patience.deadline())
        stream = self._stream
        if stream.address != self._address:  # what another replica lacked does not count any more
            self._address = stream.address
            self._trials.forget()
            self._doubts.forget()
        self._missing.unpark(self._clock.now())
        self._issue(stream)
        if not stream.full:
            self._receive(stream)
        if not self._missing:
            return
        self._patience.tell(self._place)
        if self._patience.left() <= 0:
            raise self._patience.timeout(stream.address)

    def _place(self) -> str:
        """What is read next."""
        number, offset = self._missing.frontier()
        queue = self._ranges[number].queue
        return f"broker {queue.broker_name}: {queue} from offset {offset} on"

    def _issue(self, stream: BulkStream) -> None:
        if self._hints.moving:  # what is under way is awaited first
            return
        depth = self._pacing.depth()
        # While the first missing offset keeps us waiting, no more is collected behind it than may be in flight.
        if stream.filled > BUFFER_BYTES + self._settings.max_bytes_in_flight:
            depth = 0 if self._missing.next_due is not None else 1
        frames: list[bytes] = []
        missing = self._missing
        while missing.todo and (free := depth - missing.in_flight) > 0:
            count = self._pacing.next_count()
            pulls = min(free, self._pacing.pulls(count, missing.asked))
            if not pulls and missing.in_flight:
                break
            frames.extend(self.requests.take(missing, self._pacing, max(1, pulls), count))
        if frames:
            if missing.in_flight == len(frames):
                self._patience.heard()
            stream.send(frames, self._settings.read_deadline_s)

    def _receive(self, stream: BulkStream) -> None:
        if not stream.receive(self._patience.wait_s(self._missing.next_due)):
            if self._missing.in_flight and self._patience.silent:
                raise ConnectionLost(f"the broker sent nothing for {BROKER_SILENCE_S:g} s", stream.address)
            return
        self._patience.heard()
        found, others = stream.scan()
        self._take_all(found)
        for opaque, other in others:
            self._refuse(opaque, other, stream.address)

    def _take_all(self, found: list[Found]) -> None:
        """Most answers are full ones, which must cost little: there are 30,000 in a million messages."""
        answered, pieces, trials = self._missing.answered, self._collected.pieces, self._trials.by_place
        hinted, count = self._hints.last, self._pacing.count
        full = largest = 0
        make = FetchedAnswer._make
        for answer in found:
            opaque, next_offset, suggested, begin, end, _ = answer
            slot = answered(opaque)
            if slot is None:
                continue
            number, start, limit = slot
            size = end - begin
            if next_offset != limit or limit - start != count or suggested != hinted or not size or trials:
                self._take(slot, answer)
                continue
            pieces.append(make((number, start, limit, next_offset, begin, end)))
            full += 1
            if size > largest:
                largest = size
        if full:
            self._collected.rows += full * count
            self._patience.hope()
            self._pacing.learn(count, count, largest, full)

    def _take(self, slot: PendingRange, answer: Found) -> None:
        _, next_offset, suggested, begin, end, low = answer
        if suggested != self._hints.last:
            self._hints.follow(suggested, self._trials)
        number, start, limit = slot
        if next_offset <= start:
            self._again(slot)
            return
        if self._settings.filtered and int(low) > start:  # a filter hides how much of what it jumped over was there
            self._gone(slot, int(low), Cause.TRUNCATED, below=True)
            return
        self._progress(slot)
        if end > begin and not self._settings.filtered:
            number, start, limit = self._whole(slot, next_offset, begin)
        rows = min(next_offset, limit) - start
        if end > begin:
            self._collected.add(FetchedAnswer(number, start, limit, next_offset, begin, end), rows)
        self._pacing.learn(limit - start, rows, end - begin)
        self._missing.put(PendingRange(number, next_offset, limit))

    def _whole(self, slot: PendingRange, next_offset: int, begin: int) -> PendingRange:
        """An inner batch comes whole, however few of its offsets were asked for: what was not had yet is had now.

        Up to where the broker goes on. What lies before is asked for again: where the batch begins says it alone.
        """
        assert self._stream is not None
        if not is_inner_batch(self._stream.buffer, begin):
            return slot
        return self._missing.claim(slot, max(slot.end, next_offset))

    def _refuse(self, opaque: int, answer: Answer, address: str) -> None:
        slot = self._missing.answered(opaque)
        if slot is None:
            return
        if answer.suggested_broker is not None and answer.suggested_broker != self._hints.last:
            self._hints.follow(answer.suggested_broker, self._trials)
        self._patience.refused(f"{answer.code} {answer.remark}".strip())
        match judge(slot.start, answer):
            case AccessDenied() if self.requests.other_keys(opaque):
                self._again(slot)  # keys that expired, while others are to be had
            case BrokerError() as error:
                queue = self._ranges[slot.number].queue
                error.addr, error.topic, error.queue = address, queue.topic, str(queue)
                raise error
            case Continue(at):
                self._progress(slot)
                self._pacing.passed()
                self._missing.put(slot._replace(start=at))
            case RepeatPull(reroute):
                if reroute:
                    self._reroute()
                    self._hints.doubt()
                self._again(slot)
            case Reset(at):
                self._resets.note(slot, at)
                self._again(slot)
            case Reconnect():
                self._missing.put(slot)
                raise ConnectionLost("the broker is shutting down", address, remark=answer.remark)
            case Lost(until, cause):
                # Below the minimum nothing is left, whatever was asked for first: one loss.
                self._gone(slot, until, cause, below=until == answer.min_offset)
            case Suspect(cause, until):
                self._suspect(slot, until, cause)

    def _suspect(self, slot: PendingRange, until: int | None, cause: Cause) -> None:
        doubted = self._hints.doubt()
        outlasted = self._trials.suspect(slot[:2], self._clock.now(), believe=not doubted)
        if doubted:
            self._again(slot)
            return
        # What comes before it in the same range has the first word, so that a loss is reported once and as a whole.
        if outlasted and not self._missing.misses_before(slot):
            self._lose(slot, until, cause)
            return
        if cause in (Cause.TOPIC_DELETED, Cause.QUEUE_GONE):
            self._reroute()
        self._again(slot)

    def _gone(self, slot: PendingRange, until: int, cause: Cause, below: bool) -> None:
        if self._hints.doubt():
            self._again(slot)
        else:
            self._lose(slot, until, cause, below)

    def _lose(self, slot: PendingRange, until: int | None, cause: Cause, below: bool = False) -> None:
        """What is still missing from the start of ``slot``, or ``below`` it, to ``until`` or the range's end is gone."""
        whole = self._ranges[slot.number]
        self._progress(slot)
        self._missing.put(slot)
        self._pacing.forget()
        start = whole.start if below else slot.start
        for part in self._missing.cut(PendingRange(slot.number, start, whole.end if until is None else until)):
            self._on_loss(OffsetRange(whole.queue, part.start, part.end), cause)

    def _again(self, slot: PendingRange) -> None:
        self._missing.park(slot, self._trials.due(slot[:2], self._clock.now()))

    def _progress(self, slot: PendingRange) -> None:
        self._trials.end(slot[:2])
        self._patience.hope()

    def _reroute(self) -> None:
        """Request the route in the next step, unless it was requested a moment ago."""
        now = self._clock.now()
        if now >= self._route_due:
            self._hints.moving = True
            self._route_due = now + next(self._route_pauses)

    def _move(self) -> None:
        """Go to where the route leads by now. What still works is not given up for less."""
        self._hints.moving = False
        try:
            fresh = self._connect(self._patience.deadline(RECONNECT_S))
        except RocketMQError as e:
            logger.info("cannot connect to the address in the current route: %s", e)
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
        self._resets.hear(stream, self._missing, self._clock)
        stream.close()
        for piece in self._collected.drop():
            self._missing.put(PendingRange(piece.number, piece.start, min(piece.next_offset, piece.limit)))
        self._missing.recall()
        self._pacing.forget()

    def _deliver(self, leaving: bool = False) -> Iterator[FetchedAnswers]:
        """Hand out what lies before the first offset that is missing, once it is worth it or nothing is missing.

        With ``leaving``, and before a move, all of it: a read that needs more answers than a connection gives must have an end.
        """
        stream, enough = self._stream, self._settings.fetched_rows
        leaving = leaving or (self._hints.moving and not self._missing.in_flight)
        hurry = leaving or not self._missing or (stream is not None and stream.full)
        if stream is None or not (hurry or self._collected.rows >= enough):
            return
        ready, rest = self._collected.before(self._missing.frontier())
        while self._recreated is not None and (recreated := self._recreated.find(stream.buffer, ready)):
            self._lose_recreated(recreated)
            ready, rest = self._collected.before(self._missing.frontier())  # fewer offsets are missing now
        waiting = offset_count(rest)
        if not hurry and self._collected.rows - waiting < enough // 2:
            return
        if ready:
            self._collected.lent = ready
            yield FetchedAnswers(stream.buffer, ready)
            self._patience.renew()
        self._collected.keep(rest, waiting, stream)

    def _lose_recreated(self, pieces: Sequence[FetchedAnswer]) -> None:
        """Report ``pieces``, whose topics were created again, and the missing offsets of their ranges as lost."""
        self._collected.remove(pieces)
        for piece in pieces:
            self._missing.put(PendingRange(piece.number, piece.start, min(piece.next_offset, piece.limit)))
        for number in sorted({piece.number for piece in pieces}):
            whole = self._ranges[number]
            for part in self._missing.cut(PendingRange(number, whole.start, whole.end)):
                self._on_loss(OffsetRange(whole.queue, part.start, part.end), Cause.WENT_BACK)
